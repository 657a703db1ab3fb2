//! The three formats. Each becomes the same tree of values with places.

use std::path::Path;

use super::tree::{Fault, Node};

mod json;
mod toml;
mod yaml;

/// The format of a config file, told by its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.yaml`, `.yml`
    Yaml,
    /// `.toml`
    Toml,
    /// `.json`
    Json,
}

impl Format {
    /// The format that the extension of `path` names.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "yaml" | "yml" => Some(Self::Yaml),
            "toml" => Some(Self::Toml),
            "json" => Some(Self::Json),
            _ => None,
        }
    }

    /// The tree of `text` as far as there is one, and what is wrong with the text.
    pub(super) fn parse(self, text: &str) -> (Option<Node>, Vec<Fault>) {
        match self {
            Self::Yaml => yaml::parse(text),
            Self::Toml => toml::parse(text),
            Self::Json => json::parse(text),
        }
    }
}
