//! YAML 1.2 with places: the core schema (`off`, `no` and dates are strings), anchors, and the merge key `<<`.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, StrInput, Tag};

use crate::config::tree::{Entry, Fault, MAX_DEPTH, Node, Span, Value};

/// Aliases may multiply a file to this many values: a few lines of nested aliases would fill the memory otherwise.
const MAX_ALIASED: usize = 100_000;
/// Anchors and aliases may copy so many bytes of text: few values may be long.
const MAX_COPIED: usize = 16 << 20;
const TOO_MUCH: &str = "anchors and aliases copy too much text";

pub(super) fn parse(text: &str) -> (Option<Node>, Vec<Fault>) {
    let mut walk = Walk {
        parser: Parser::new_from_str(text),
        text,
        anchors: HashMap::new(),
        aliased: 0,
        copied: 0,
        faults: Vec::new(),
    };
    match walk.document() {
        Ok(node) => (node, walk.faults),
        Err(fault) => {
            walk.faults.push(fault);
            (None, walk.faults)
        }
    }
}

struct Walk<'a> {
    parser: Parser<'a, StrInput<'a>>,
    text: &'a str,
    /// Complete anchored values by their number.
    anchors: HashMap<usize, Node>,
    aliased: usize,
    copied: usize,
    faults: Vec<Fault>,
}

impl<'a> Walk<'a> {
    /// The one document of the stream; `None` when there is nothing but blanks and comments.
    fn document(&mut self) -> Result<Option<Node>, Fault> {
        let mut root = None;
        while let Some((event, span)) = self.next()? {
            match event {
                Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd | Event::StreamEnd => {}
                _ if root.is_some() => {
                    return Err(Fault::new(span, "the file holds more than one YAML document")
                        .hint("put each document into a file of its own"));
                }
                event => root = Some(self.node(event, span, 0)?),
            }
        }
        Ok(root)
    }

    /// The next event that matters, with its place.
    fn next(&mut self) -> Result<Option<(Event<'a>, Span)>, Fault> {
        loop {
            match self.parser.next_event() {
                None => return Ok(None),
                Some(Err(error)) => return Err(self.syntax_fault(&error)),
                Some(Ok((Event::Comment(..), _))) => {}
                Some(Ok((event, span))) => return Ok(Some((event, span.byte_range().unwrap_or(0..0)))),
            }
        }
    }

    fn syntax_fault(&self, error: &ScanError) -> Fault {
        let at = error.marker().byte_offset().unwrap_or_else(|| {
            let line = error.marker().line().saturating_sub(1);
            self.text.split_inclusive('\n').take(line).map(str::len).sum::<usize>() + error.marker().col()
        });
        let info = error.info();
        let is_tab = info.contains("tabs disallowed");
        // The parser stops before the line with the tab.
        let tab = self.text.get(at..).and_then(|rest| rest.find('\t')).filter(|_| is_tab);
        let at = tab.map_or(at, |after| at + after);
        let fault = Fault::new(at..at + 1, format!("this is not YAML: {info}"));
        if is_tab {
            return fault.hint("YAML is indented by spaces");
        }
        let before = self.text.get(..=at).unwrap_or_default();
        let line = before.rfind('\n').map_or(before, |end| &before[end..]);
        // In flow style, `[` begins a list wherever it is.
        if info.contains("mapping values are not allowed") {
            return fault.hint("a line is indented differently from the line above, or a text with `: ` needs quotes");
        }
        if line.match_indices("$[").any(|(at, _)| line[..at].matches(['"', '\'']).count() % 2 == 0) {
            return fault.hint("a path with `$[]` needs quotes: \"parts.$[].id\"");
        }
        fault
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::too_deep(span));
        }
        let (node, anchor) = match event {
            Event::Alias(id) => return self.alias(id, span),
            Event::Scalar(text, style, anchor, tag) => {
                let value = self.scalar(&text, style, tag.as_deref(), &span);
                (Node::new(value, span), anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.known_tag(tag.as_deref(), &["seq"], &span);
                (self.sequence(span, depth)?, anchor)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.known_tag(tag.as_deref(), &["map"], &span);
                (self.mapping(span, depth)?, anchor)
            }
            _ => return Err(Fault::new(span, "this is not YAML: a value is missing")),
        };
        if anchor != 0 {
            self.keep(&node)?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn alias(&mut self, id: usize, span: Span) -> Result<Node, Fault> {
        let node =
            self.anchors.get(&id).ok_or_else(|| Fault::new(span.clone(), "the alias stands inside its anchor"))?;
        self.aliased += node.size();
        if self.aliased > MAX_ALIASED {
            return Err(Fault::new(span, "aliases multiply the file too often"));
        }
        self.copied += node.bytes();
        if self.copied > MAX_COPIED {
            return Err(Fault::new(span, TOO_MUCH));
        }
        Ok(node.clone())
    }

    /// Counts what an anchor keeps.
    fn keep(&mut self, node: &Node) -> Result<(), Fault> {
        self.copied += node.bytes();
        if self.copied > MAX_COPIED {
            return Err(Fault::new(node.span.clone(), TOO_MUCH));
        }
        Ok(())
    }

    fn sequence(&mut self, start: Span, depth: usize) -> Result<Node, Fault> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                Some((Event::SequenceEnd, end)) => {
                    return Ok(Node::new(Value::Sequence(items), start.start..end.end.max(start.end)));
                }
                Some((event, span)) => items.push(self.node(event, span, depth + 1)?),
                None => return Err(Fault::new(start, "this is not YAML: the list does not end")),
            }
        }
    }

    fn mapping(&mut self, start: Span, depth: usize) -> Result<Node, Fault> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut merged: Vec<Entry> = Vec::new();
        loop {
            let (key, key_span) = match self.next()? {
                Some((Event::MappingEnd, end)) => {
                    // Keys written here take precedence over merged ones, wherever `<<` stands.
                    for entry in merged {
                        if entries.iter().all(|own| own.key != entry.key) {
                            entries.push(entry);
                        }
                    }
                    return Ok(Node::new(Value::Mapping(entries), start.start..end.end.max(start.end)));
                }
                Some((event, span)) => (event, span),
                None => return Err(Fault::new(start, "this is not YAML: the mapping does not end")),
            };
            let merge = matches!(&key, Event::Scalar(text, ScalarStyle::Plain, ..) if text == "<<");
            let key = self.key(key, key_span.clone(), depth)?;
            let Some((event, span)) = self.next()? else {
                return Err(Fault::new(start, "this is not YAML: the mapping does not end"));
            };
            let node = self.node(event, span, depth + 1)?;
            if merge {
                merged.extend(merge_entries(node).ok_or_else(|| {
                    Fault::new(key_span, "`<<` merges a mapping or a list of mappings").hint("write `<<: *anchor`")
                })?);
            } else if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                self.faults.push(Fault::duplicate(&key, first.key_span.clone(), key_span));
            } else {
                entries.push(Entry { key, key_span, node });
            }
        }
    }

    /// Keys are text as it is written: `1` and `true` are names of fields here.
    fn key(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<String, Fault> {
        if let Event::Scalar(text, _, 0, _) = event {
            return Ok(text.into_owned());
        }
        match self.node(event, span.clone(), depth + 1)?.value {
            Value::String(text) => Ok(text),
            _ => Err(Fault::new(span, "a key must be text").hint("put it in quotes")),
        }
    }

    /// A tag that would change what a value means is refused rather than passed over.
    fn known_tag(&mut self, tag: Option<&Tag>, known: &[&str], span: &Span) {
        if let Some(tag) = tag.filter(|tag| !tag.core_suffix().is_some_and(|core| known.contains(&core))) {
            self.faults.push(Fault::new(span.clone(), format!("the tag `{}` has no meaning here", tag.original())));
        }
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, tag: Option<&Tag>, span: &Span) -> Value {
        self.known_tag(tag, &["str", "int", "float", "bool", "null"], span);
        let plain = match tag.and_then(Tag::core_suffix) {
            Some(core) => core != "str",
            None => style == ScalarStyle::Plain,
        };
        if !plain {
            return Value::String(text.to_owned());
        }
        plain_value(text).unwrap_or_else(|| {
            self.faults.push(Fault::number_too_large(span.clone()));
            Value::Int(0)
        })
    }
}

fn merge_entries(node: Node) -> Option<Vec<Entry>> {
    match node.value {
        Value::Mapping(entries) => Some(entries),
        Value::Sequence(items) => {
            let lists = items.into_iter().map(|item| match item.value {
                Value::Mapping(entries) => Some(entries),
                _ => None,
            });
            Some(lists.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
        }
        _ => None,
    }
}

/// A scalar without quotes by the core schema (YAML 1.2.2, section 10.3.2); `None` for an integer beyond 64 bits.
fn plain_value(text: &str) -> Option<Value> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let unsigned = |radix, digits: &str| i64::from_str_radix(digits, radix).ok().map(Value::Int);
    let all = |text: &str, radix| !text.is_empty() && text.chars().all(|c| char::is_digit(c, radix));
    Some(match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        ".nan" | ".NaN" | ".NAN" => Value::Float(f64::NAN),
        _ if matches!(digits, ".inf" | ".Inf" | ".INF") => {
            Value::Float(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY })
        }
        _ if all(digits, 10) => return unsigned(10, text),
        _ if text.strip_prefix("0x").is_some_and(|hex| all(hex, 16)) => return unsigned(16, &text[2..]),
        _ if text.strip_prefix("0o").is_some_and(|octal| all(octal, 8)) => return unsigned(8, &text[2..]),
        _ if digits.chars().all(|c| c.is_ascii_digit() || ".eE+-".contains(c)) => {
            text.parse().map_or_else(|_| Value::String(text.to_owned()), Value::Float)
        }
        _ => Value::String(text.to_owned()),
    })
}
