//! Mistakes in a config, and where they stand.

use std::fmt;

/// One step of the way from the root of the config to a value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// A key of a mapping, in the case it was written in.
    Key(String),
    /// An element of a sequence, from 0. For `rules` this counts over all layered files.
    Index(usize),
}

/// The way from the root of the config to a value: `rules[2].copy.set."parts.$[].name"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ConfigPath(pub Vec<Step>);

impl ConfigPath {
    /// The path of rule `index` in the concatenated list.
    #[must_use]
    pub fn rule(index: usize) -> Self {
        Self(vec![Step::Key("rules".to_owned()), Step::Index(index)])
    }

    /// This path, one key further down.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Key(key.to_owned()));
        Self(steps)
    }

    /// This path, one element further down.
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

/// One thing that is wrong in a config: what, where, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The value or the mapping that the mistake is in.
    pub at: ConfigPath,
    /// Whether the last key of `at` is meant rather than its value: an unknown key, a target path of `set`.
    pub on_key: bool,
    /// What is wrong, in one sentence without a full stop.
    pub message: String,
    /// What to do about it ("did you mean `source`?").
    pub hint: Option<String>,
    /// Other places that belong to the story, each with a few words: "the first is here".
    pub related: Vec<(ConfigPath, String)>,
}

impl Mistake {
    /// A mistake at `at`, without a hint.
    pub fn new(at: ConfigPath, message: impl Into<String>) -> Self {
        Self { at, on_key: false, message: message.into(), hint: None, related: Vec::new() }
    }

    /// The same mistake with a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same mistake, shown at the last key of its path rather than at the value.
    #[must_use]
    pub fn on_key(mut self) -> Self {
        self.on_key = true;
        self
    }

    /// The same mistake with one more place to show.
    #[must_use]
    pub fn related(mut self, at: ConfigPath, label: impl Into<String>) -> Self {
        self.related.push((at, label.into()));
        self
    }
}
