//! Where a mistake stands, with the offending line of text and a caret, and never a password.

use std::fmt;

use serde::Serialize;

use super::{
    tree::{Node, Span, Value},
    uri,
};

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

/// The parts of a file's text that must not be shown: passwords in connection strings, the values in `mongodb` and `http` whose keys
/// are not known to be harmless, and those of unknown sections. Without a tree (a syntax error) neither the quotes nor the sections
/// can be trusted: what follows a word such as `uri` or `token`, and what stands before the last `@`, is hidden to the line's end.
pub(super) fn secrets(text: &str, tree: Option<&Node>) -> Vec<Span> {
    let mut found = Vec::new();
    if let Some(tree) = tree {
        secret_values(text, tree, Trust::Root, &mut found);
    }
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let shift = |span: Span| start + span.start..start + span.end;
        found.extend(uris(line, tree.is_some()).into_iter().map(shift));
        if tree.is_none() {
            found.extend(after_a_secret_word(line).map(shift));
        }
        start += line.len();
    }
    merged(found)
}

/// One stretch of text is hidden once.
fn merged(mut found: Vec<Span>) -> Vec<Span> {
    found.sort_by_key(|span| (span.start, span.end));
    found.dedup_by(|next, kept| {
        let overlaps = next.start <= kept.end;
        kept.end = if overlaps { kept.end.max(next.end) } else { kept.end };
        overlaps
    });
    found
}

/// What must not be shown of the URIs in a line. `quoted`: spaces and quotes end them.
fn uris(line: &str, quoted: bool) -> Vec<Span> {
    let mut found = Vec::new();
    let ends_token = |c: char| c.is_whitespace() || c == '"' || c == '\'';
    for scheme in ["://", r":\/\/"] {
        for (at, _) in line.match_indices(scheme) {
            let from = at + scheme.len();
            let rest = &line[from..];
            let word = rest.find(ends_token).map_or(rest, |length| &rest[..length]);
            let token = if quoted { word } else { rest };
            found.extend(token.rfind('@').map(|length| from..from + length));
            if line[..at].ends_with("mongodb") || line[..at].ends_with("mongodb+srv") {
                let word = word.trim_end_matches([',', '}', ']', ';', ')', '`', '.']);
                // The scheme may be written with escapes.
                let spans = uri::secrets(&format!("mongodb://{word}")).into_iter();
                let moved =
                    spans.map(|span| span.start - "mongodb://".len() + from..span.end - "mongodb://".len() + from);
                found.extend(moved.filter(|span| !span.is_empty()));
            }
        }
    }
    found
}

/// What follows a word in a line that names a secret, unless it is a connection string without one.
fn after_a_secret_word(line: &str) -> Option<Span> {
    const WORDS: [&str; 6] = ["uri", "token", "password", "pwd", "secret", "mongodb"];
    let line = line.trim_end();
    let lower = line.to_ascii_lowercase();
    let word = WORDS.iter().filter_map(|word| lower.find(word)).min()?;
    let from = word + lower[word..].find([':', '=']).map(|at| at + 1)?;
    let value = line[from..].trim_start();
    let from = line.len() - value.len();
    let clean = value.trim_matches(['"', '\'', ' ', ',', '}', '{', ']', '[']);
    let harmless =
        clean.starts_with("mongodb://") && !clean.contains(char::is_whitespace) && uri::secrets(clean).is_empty();
    let nested = value.is_empty()
        || value == "{"
        || lower[word..].starts_with("uri_file")
        || lower[word..].starts_with("token_file");
    (!harmless && !nested).then_some(from..line.len())
}

/// What is known of the values under a key.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trust {
    /// The root's keys.
    Root,
    /// Rules, cases of `denormd test`, and settings without secrets.
    Open,
    /// A section with secrets.
    Section,
    /// A value that may be one.
    Secret,
}

impl Trust {
    fn below(self, key: &str) -> Self {
        let open = ["name", "rules", "cases", "state", "log", "limits", "lease", "advise", "$schema"];
        let harmless = [
            "database",
            "uri_file",
            "token_file",
            "listen",
            "allowed_hosts",
            "require_token",
            "tls_cert_file",
            "tls_key_file",
        ];
        match self {
            Self::Root if matches!(key, "mongodb" | "http") => Self::Section,
            Self::Root if open.contains(&key) || key.starts_with("x-") => Self::Open,
            Self::Section if harmless.contains(&key) => Self::Open,
            Self::Root | Self::Section | Self::Secret => Self::Secret,
            Self::Open => Self::Open,
        }
    }
}

fn secret_values(text: &str, node: &Node, trust: Trust, found: &mut Vec<Span>) {
    let (start, end) = (floor_char(text, node.span.start), floor_char(text, node.span.end));
    let written = text.get(start..end).unwrap_or_default();
    let scalar = !matches!(node.value, Value::Mapping(_) | Value::Sequence(_));
    if scalar && matches!(trust, Trust::Section | Trust::Secret) {
        // YAML ends a value at ` #`: what looks like a comment may be the rest of a password.
        let rest = text.get(end..).and_then(|rest| rest.lines().next()).unwrap_or_default();
        found.extend(rest.find('#').map(|at| end + at..end + rest.len()));
    }
    match &node.value {
        Value::Mapping(entries) => {
            for entry in entries {
                secret_values(text, &entry.node, trust.below(&entry.key), found);
            }
        }
        Value::Sequence(items) => items.iter().for_each(|item| secret_values(text, item, trust, found)),
        Value::String(value) if value.starts_with("mongodb://") || value.starts_with("mongodb+srv://") => {
            match (uri::secrets(value), written.find(value.as_str())) {
                (secrets, _) if secrets.is_empty() => {}
                (secrets, Some(at)) => {
                    found.extend(secrets.into_iter().map(|span| start + at + span.start..start + at + span.end));
                }
                // It is written with escapes.
                (_, None) => found.push(start..end),
            }
        }
        Value::String(value) if value.contains("://") && value.contains('@') => found.push(start..end),
        Value::String(_) | Value::Date(_) if matches!(trust, Trust::Section | Trust::Secret) => found.push(start..end),
        Value::Int(_) | Value::Float(_) | Value::Bool(_) if trust == Trust::Secret => found.push(start..end),
        _ => {}
    }
}

/// A message without what would be hidden in a file.
pub(super) fn redact(message: &str) -> String {
    let mut found = Vec::new();
    let mut start = 0;
    for line in message.split_inclusive('\n') {
        found.extend(uris(line, false).into_iter().map(|span| start + span.start..start + span.end));
        start += line.len();
    }
    let mut shown = message.to_owned();
    for secret in merged(found).into_iter().rev() {
        shown.replace_range(secret, "***");
    }
    shown
}
