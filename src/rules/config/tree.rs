//! A parsed file before it is interpreted: values in the order they were written, each with its place in the text.

use std::ops::Range;

use super::diagnose::Step;

/// Byte offsets into the text of the file.
pub(super) type Span = Range<usize>;

/// Nesting deeper than this is refused in every format, so that walking a tree cannot exhaust the stack.
pub(super) const MAX_DEPTH: usize = 100;

/// Any value that a file can contain. TOML's dates have a variant of their own; YAML's and JSON's are strings.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    String(String),
    Date(String),
    Sequence(Vec<Node>),
    Mapping(Vec<Entry>),
}

/// A value and its position in the text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub value: Value,
    pub span: Span,
}

/// One key of a mapping.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub key: String,
    pub key_span: Span,
    pub node: Node,
}

/// An error in the text of a file: syntax, or a key written twice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fault {
    pub span: Span,
    pub message: String,
    pub hint: Option<String>,
    /// Another place that helps to explain the error.
    pub related: Option<(Span, &'static str)>,
}

impl Fault {
    pub fn new(span: Span, message: impl Into<String>) -> Self {
        Self { span, message: message.into(), hint: None, related: None }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn duplicate(key: &str, first: Span, second: Span) -> Self {
        Self {
            related: Some((first, "it is first given here")),
            ..Self::new(second, format!("the key `{key}` is given twice"))
        }
    }

    pub fn number_too_large(span: Span) -> Self {
        Self::new(span, "the number does not fit a 64-bit integer")
            .hint("write { $numberDecimal: \"…\" } for a larger one, or put a string in quotes")
    }

    pub fn too_deep(span: Span) -> Self {
        Self::new(span, format!("values are nested more than {MAX_DEPTH} deep"))
    }
}

impl Value {
    /// A scalar, or a list of scalars, as written in an environment variable.
    pub fn as_text(&self) -> Option<String> {
        match self {
            Self::Bool(flag) => Some(flag.to_string()),
            Self::Int(number) => Some(number.to_string()),
            Self::Float(number) => Some(number.to_string()),
            Self::String(text) | Self::Date(text) => Some(text.clone()),
            Self::Sequence(items) => {
                let items: Option<Vec<String>> = items.iter().map(|item| item.value.as_text()).collect();
                items.map(|items| items.join(","))
            }
            Self::Null | Self::Mapping(_) => None,
        }
    }
}

impl Node {
    pub fn new(value: Value, span: Span) -> Self {
        Self { value, span }
    }

    /// The value under `key`, if this is a mapping that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Mapping(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node),
            _ => None,
        }
    }

    /// The kind of value as messages name it: "found a string".
    pub fn kind(&self) -> &'static str {
        match self.value {
            Value::Null => "nothing",
            Value::Bool(_) => "a boolean",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a number with a fraction",
            Value::String(_) => "a string",
            Value::Date(_) => "a date",
            Value::Sequence(_) => "a list",
            Value::Mapping(_) => "a mapping",
        }
    }

    /// Total size of all texts and keys in this tree, in bytes.
    pub fn bytes(&self) -> usize {
        match &self.value {
            Value::String(text) | Value::Date(text) => text.len(),
            Value::Sequence(items) => items.iter().map(Self::bytes).sum(),
            Value::Mapping(entries) => entries.iter().map(|entry| entry.key.len() + entry.node.bytes()).sum(),
            Value::Null | Value::Bool(_) | Value::Int(_) | Value::Float(_) => 0,
        }
    }

    /// The number of values in this tree, itself included.
    pub fn size(&self) -> usize {
        1 + match &self.value {
            Value::Sequence(items) => items.iter().map(Node::size).sum::<usize>(),
            Value::Mapping(entries) => entries.iter().map(|entry| entry.node.size()).sum(),
            _ => 0,
        }
    }

    /// The position to show for the value at `steps`: a scalar itself, the key of a collection (its text may begin on
    /// the next line and be many lines long), or the first key of a mapping in a list.
    pub fn place(&self, steps: &[Step], on_key: bool) -> Option<Span> {
        let mut node = self;
        let mut key_span = None;
        for step in steps {
            match (step, &node.value) {
                (Step::Key(key), Value::Mapping(entries)) => {
                    let entry = entries.iter().find(|entry| entry.key == *key)?;
                    key_span = Some(entry.key_span.clone());
                    node = &entry.node;
                }
                (Step::Index(index), Value::Sequence(items)) => {
                    key_span = None;
                    node = items.get(*index)?;
                }
                _ => return None,
            }
        }
        let scalar = !matches!(node.value, Value::Mapping(_) | Value::Sequence(_) | Value::Null);
        match (key_span, &node.value) {
            (Some(span), _) if on_key || !scalar => Some(span),
            (None, Value::Mapping(entries)) => Some(entries.first().map_or(node.span.clone(), |e| e.key_span.clone())),
            _ => Some(node.span.clone()),
        }
    }
}
