//! Where a mistake stands, with the offending line of text and a caret, and never a password.

use std::fmt;

use serde::Serialize;

use super::tree::{Node, Span, Value};

/// Where something stands: a file's line and column, or a source that has none (the environment).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The file as it was named, or `environment variable DENORMD__…`.
    pub file: String,
    /// From 1.
    pub line: Option<usize>,
    /// From 1, in characters.
    pub column: Option<usize>,
    #[serde(skip)]
    excerpt: Option<Excerpt>,
}

/// The offending line as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Excerpt {
    text: String,
    caret: usize,
    width: usize,
}

/// Longer lines (JSON on one line) are cut around the caret.
const MAX_SHOWN: usize = 110;
const SHOWN_BEFORE_CARET: usize = 40;

impl Place {
    /// A place without a text to show.
    pub(super) fn whole(file: impl Into<String>) -> Self {
        Self { file: file.into(), line: None, column: None, excerpt: None }
    }

    /// The place of `span` in `text`; what lies in `secrets` is shown as `***`.
    pub(super) fn in_text(file: impl Into<String>, text: &str, span: &Span, secrets: &[Span]) -> Self {
        let start = floor_char(text, span.start);
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |length| start + length);
        Self {
            file: file.into(),
            line: Some(text[..line_start].matches('\n').count() + 1),
            column: Some(text[line_start..start].chars().count() + 1),
            excerpt: Some(excerpt(text, &(line_start..line_end), &(start..span.end), secrets)),
        }
    }

    /// `file:line:column`, and the excerpt below, indented by `indent`.
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, indent: usize, message: &str) -> fmt::Result {
        let pad = " ".repeat(indent);
        write!(f, "{pad}{}", self.file)?;
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {message}")?;
        if let (Some(line), Some(excerpt)) = (self.line, &self.excerpt) {
            let line = line.to_string();
            let Excerpt { text, caret, width } = excerpt;
            write!(f, "\n{pad}   {line} | {text}")?;
            write!(f, "\n{pad}   {} | {}{}", " ".repeat(line.len()), " ".repeat(*caret), "^".repeat(*width))?;
        }
        Ok(())
    }
}

/// The last character boundary at or before `at`, within the text.
fn floor_char(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

fn excerpt(text: &str, line: &Span, span: &Span, secrets: &[Span]) -> Excerpt {
    let mut shown: Vec<char> = Vec::new();
    let (mut caret, mut end, mut hidden) = (None, None, None);
    for (offset, char) in text[line.clone()].trim_end().char_indices() {
        let offset = line.start + offset;
        if offset >= span.start {
            caret.get_or_insert(shown.len());
        }
        if offset >= span.end {
            end.get_or_insert(shown.len());
        }
        let secret = secrets.iter().position(|secret| secret.contains(&offset));
        match secret {
            Some(_) if secret == hidden => {}
            Some(_) => shown.extend("***".chars()),
            // A tab would move the caret; other control characters do worse to a terminal.
            None => shown.push(if char == '\t' {
                ' '
            } else if char.is_control() {
                '\u{fffd}'
            } else {
                char
            }),
        }
        hidden = secret;
    }
    let caret = caret.unwrap_or(shown.len());
    let width = end.unwrap_or(shown.len()).saturating_sub(caret).max(1);
    if shown.len() <= MAX_SHOWN {
        return Excerpt { text: shown.into_iter().collect(), caret, width };
    }
    let from = caret.saturating_sub(SHOWN_BEFORE_CARET).min(shown.len() - MAX_SHOWN);
    let to = (from + MAX_SHOWN).min(shown.len());
    let before = if from > 0 { "…" } else { "" };
    let after = if to < shown.len() { "…" } else { "" };
    let window: String = shown[from..to].iter().collect();
    let shown_caret = caret;
    let caret = caret - from + before.chars().count();
    Excerpt { text: format!("{before}{window}{after}"), caret, width: width.min(to.saturating_sub(shown_caret)).max(1) }
}

/// The parts of a file's text that must not be shown: what stands between `://` and the last `@`, and whatever `mongodb`
/// holds that does not look like a connection string at all. Without a tree (a syntax error) the quotes that would end a
/// password cannot be trusted, so the rest of the line up to its last `@` counts.
pub(super) fn secrets(text: &str, tree: Option<&Node>) -> Vec<Span> {
    let mut found = Vec::new();
    if let Some(tree) = tree {
        secret_values(text, tree, false, &mut found);
    }
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let ends_token = |c: char| tree.is_some() && (c.is_whitespace() || c == '"' || c == '\'');
        for scheme in ["://", r":\/\/"] {
            for (at, _) in line.match_indices(scheme) {
                let rest = &line[at + scheme.len()..];
                let token = rest.find(ends_token).map_or(rest, |length| &rest[..length]);
                if let Some(length) = token.rfind('@') {
                    let from = start + at + scheme.len();
                    found.push(from..from + length);
                }
            }
        }
        start += line.len();
    }
    // One stretch of text is hidden once.
    found.sort_by_key(|span| (span.start, span.end));
    found.dedup_by(|next, kept| {
        let overlaps = next.start <= kept.end;
        kept.end = if overlaps { kept.end.max(next.end) } else { kept.end };
        overlaps
    });
    found
}

fn secret_values(text: &str, node: &Node, under_mongodb: bool, found: &mut Vec<Span>) {
    match &node.value {
        Value::Mapping(entries) => {
            for entry in entries {
                let harmless = matches!(entry.key.as_str(), "database" | "uri_file");
                let secret = entry.key == "mongodb" || (under_mongodb && !harmless);
                secret_values(text, &entry.node, secret, found);
            }
        }
        Value::Sequence(items) => items.iter().for_each(|item| secret_values(text, item, under_mongodb, found)),
        Value::String(value) => {
            let uri = value.starts_with("mongodb://") || value.starts_with("mongodb+srv://");
            let (start, end) = (floor_char(text, node.span.start), floor_char(text, node.span.end));
            let written = text.get(start..end).unwrap_or_default();
            match (written.find("://"), written.rfind('@')) {
                (Some(scheme), Some(at)) if scheme + 3 <= at => found.push(start + scheme + 3..start + at),
                _ if value.contains("://") && value.contains('@') => found.push(start..end),
                _ if under_mongodb && !uri => found.push(start..end),
                _ => {}
            }
        }
        _ => {}
    }
}

/// A message without what would be hidden in a file.
pub(super) fn redact(message: &str) -> String {
    let mut shown = message.to_owned();
    for secret in secrets(message, None).into_iter().rev() {
        shown.replace_range(secret, "***");
    }
    shown
}
