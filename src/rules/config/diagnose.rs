//! Mistakes in a config, with their paths.

use std::fmt;

/// One step of the path from the root of the config to a value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// A key of a mapping, in its original case.
    Key(String),
    /// The index of an element in a sequence. For `rules` it counts over all layered files.
    Index(usize),
}

/// The path from the root of the config to a value: `rules[2].copy.set."parts.$[].name"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ConfigPath(pub Vec<Step>);

impl ConfigPath {
    /// The path of rule `index` in the merged list.
    #[must_use]
    pub fn rule(index: usize) -> Self {
        Self(vec![Step::Key("rules".to_owned()), Step::Index(index)])
    }

    /// This path, extended by a key.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Key(key.to_owned()));
        Self(steps)
    }

    /// This path, extended by an element.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Index(index));
        Self(steps)
    }
}

impl fmt::Display for ConfigPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-') => {
                    write!(f, "{}{key}", if nth == 0 { "" } else { "." })?;
                }
                Step::Key(key) => write!(f, "{}{key:?}", if nth == 0 { "" } else { "." })?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// One mistake in a config: its place, a message and a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The value or mapping that contains the mistake.
    pub at: ConfigPath,
    /// True if the mistake is in the last key of `at` rather than its value: an unknown key, a target path of `set`.
    pub on_key: bool,
    /// A description of the mistake, in one sentence without a full stop.
    pub message: String,
    /// A suggestion for the fix ("did you mean `source`?").
    pub hint: Option<String>,
    /// Other relevant places, each with a short label: "the first is here".
    pub related: Vec<(ConfigPath, String)>,
}

impl Mistake {
    /// A mistake at `at`, without a hint.
    pub fn new(at: ConfigPath, message: impl Into<String>) -> Self {
        Self { at, on_key: false, message: message.into(), hint: None, related: Vec::new() }
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Places the mistake at the last key of its path rather than at the value.
    #[must_use]
    pub fn on_key(mut self) -> Self {
        self.on_key = true;
        self
    }

    /// Adds another relevant place.
    #[must_use]
    pub fn related(mut self, at: ConfigPath, label: impl Into<String>) -> Self {
        self.related.push((at, label.into()));
        self
    }
}
