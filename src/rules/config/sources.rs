//! The texts that a config came from, and the text position of each path of the config.

use std::{fmt, path::Path};

use serde::Serialize;

use super::{
    diagnose::{ConfigPath, Mistake, Step},
    excerpt::{Place, redact, secrets},
    tree::{Fault, Node, Span, Value},
};

/// A mistake with its place, ready to be shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LocatedMistake {
    /// Position of the mistake in its file.
    #[serde(flatten)]
    pub place: Place,
    /// Path from the config's root (`rules[2].copy.set`), empty for syntax errors.
    pub path: String,
    /// Description of the mistake.
    pub message: String,
    /// Suggested correction.
    pub hint: Option<String>,
    /// Other places that help to explain the mistake.
    pub related: Vec<Related>,
}

/// Another place that belongs to a mistake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Related {
    /// Position in its file.
    #[serde(flatten)]
    pub place: Place,
    /// Explanation of this place.
    pub message: String,
}

impl fmt::Display for LocatedMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.write(f, 0, &self.message)?;
        for related in &self.related {
            writeln!(f)?;
            related.place.write(f, 3, &related.message)?;
        }
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "\n   hint: {hint}"))
    }
}

/// One file, parsed. Not `Debug`: its text may hold a password.
#[derive(Clone)]
pub(super) struct Source {
    pub name: String,
    pub text: String,
    /// `None` when the text has no value, or a syntax error.
    pub tree: Option<Node>,
    secrets: Vec<Span>,
}

impl Source {
    pub fn new(name: String, text: String, tree: Option<Node>) -> Self {
        let secrets = secrets(&text, tree.as_ref());
        Self { name, text, tree, secrets }
    }

    fn place(&self, span: &Span) -> Place {
        Place::in_text(&self.name, &self.text, span, &self.secrets)
    }

    pub fn locate_fault(&self, fault: &Fault) -> LocatedMistake {
        let related = fault.related.iter();
        LocatedMistake {
            place: self.place(&fault.span),
            path: String::new(),
            message: redact(&fault.message),
            hint: fault.hint.clone(),
            related: related
                .map(|(span, label)| Related { place: self.place(span), message: (*label).to_owned() })
                .collect(),
        }
    }
}

/// Everything that a config was layered from.
#[derive(Clone, Default)]
pub(super) struct Sources {
    pub files: Vec<Source>,
    /// For each rule of the concatenated list: the index of its file, and its index in that file.
    pub rules: Vec<(usize, usize)>,
    /// Environment variables in use: the setting that each one sets, its name and its text.
    pub variables: Vec<(ConfigPath, String, String)>,
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.files.iter().map(|file| &file.name)).finish()
    }
}

impl Sources {
    pub fn locate(&self, mistake: &Mistake) -> LocatedMistake {
        let related = mistake.related.iter();
        LocatedMistake {
            place: self.place(&mistake.at, mistake.on_key),
            path: redact(&mistake.at.to_string()),
            message: redact(&mistake.message),
            hint: mistake.hint.as_deref().map(redact),
            related: related
                .map(|(at, label)| Related { place: self.place(at, false), message: redact(label) })
                .collect(),
        }
    }

    /// Origin of the value at `at`, as `file:line` or the name of an environment variable.
    pub fn origin(&self, at: &ConfigPath) -> String {
        let place = self.place(at, false);
        place.line.map_or_else(|| place.file.clone(), |line| format!("{}:{line}", place.file))
    }

    /// The directory of the file that sets the value at `at`; `None` if an environment variable sets it.
    pub fn directory(&self, at: &ConfigPath) -> Option<&Path> {
        let from_environment = self.variables.iter().any(|(path, ..)| path == at);
        let file = self.files.iter().rev().find(|file| place_in(file, &at.0, false).is_some())?;
        if from_environment { None } else { Path::new(&file.name).parent() }
    }

    fn place(&self, at: &ConfigPath, on_key: bool) -> Place {
        if let Some((_, name, _)) = self.variables.iter().rev().find(|(path, ..)| path == at) {
            return Place::whole(format!("environment variable {name}"));
        }
        // A key that does not exist is reported at its closest existing parent.
        let exact = (1..=at.0.len()).rev().find_map(|length| {
            let on_key = on_key && length == at.0.len();
            self.find(&at.0[..length], on_key)
        });
        exact.unwrap_or_else(|| match self.files.as_slice() {
            [file] => Place::whole(&file.name),
            [] => Place::whole("config"),
            files => Place::whole(files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>().join(", ")),
        })
    }

    fn find(&self, steps: &[Step], on_key: bool) -> Option<Place> {
        if let [Step::Key(rules), Step::Index(index), rest @ ..] = steps
            && rules == "rules"
        {
            let (file, local) = self.rules.get(*index)?;
            let file = self.files.get(*file)?;
            let steps: Vec<_> = [Step::Key(rules.clone()), Step::Index(*local)].iter().chain(rest).cloned().collect();
            return Some(file.place(&place_in(file, &steps, on_key)?));
        }
        // The last file wins, as it does for the value.
        self.files.iter().rev().find_map(|file| Some(file.place(&place_in(file, steps, on_key)?)))
    }
}

fn place_in(file: &Source, steps: &[Step], on_key: bool) -> Option<Span> {
    file.tree.as_ref()?.place(steps, on_key)
}

/// A file without any value is an empty mapping.
pub(super) fn entries(tree: Option<&Node>) -> Option<&[super::tree::Entry]> {
    match tree.map(|node| &node.value) {
        None | Some(Value::Null) => Some(&[]),
        Some(Value::Mapping(entries)) => Some(entries),
        Some(_) => None,
    }
}
