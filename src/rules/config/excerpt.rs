//! Shows the place of a mistake, with the line of text and a caret, but never a password.

use std::fmt;

use serde::Serialize;

use super::{
    tree::{Node, Span, Value},
    uri,
};

/// The place of a value: the line and column of a file, or a source without lines (the environment).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The name of the file as the user gave it, or `environment variable DENORMD__…`.
    pub file: String,
    /// The line, counted from 1.
    pub line: Option<usize>,
    /// The column in characters, counted from 1.
    pub column: Option<usize>,
    #[serde(skip)]
    excerpt: Option<Excerpt>,
}

/// The displayed part of the line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Excerpt {
    text: String,
    caret: usize,
    width: usize,
}

/// Maximum number of characters to show. Longer lines (JSON on one line) are cut around the caret.
const MAX_SHOWN: usize = 110;
const SHOWN_BEFORE_CARET: usize = 40;

impl Place {
    /// A place without an excerpt.
    pub(super) fn whole(file: impl Into<String>) -> Self {
        Self { file: file.into(), line: None, column: None, excerpt: None }
    }

    /// The place of `span` in `text`. The excerpt shows the parts in `secrets` as `***`.
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

    /// Writes `file:line:column` with the excerpt below it, indented by `indent`.
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, indent: usize, message: &str) -> fmt::Result {
        let pad = " ".repeat(indent);
        write!(f, "{pad}{}", self.file)?;
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {message}")?;
        self.shown().iter().try_for_each(|line| write!(f, "\n{pad}   {line}"))
    }

    /// The line of the file, and the one with the caret below it; none if the line is not known.
    #[must_use]
    pub fn shown(&self) -> Vec<String> {
        let (Some(line), Some(Excerpt { text, caret, width })) = (self.line, &self.excerpt) else { return Vec::new() };
        let line = line.to_string();
        let below = format!("{} | {}{}", " ".repeat(line.len()), " ".repeat(*caret), "^".repeat(*width));
        vec![format!("{line} | {text}"), below]
    }
}

/// The last character boundary in the text at or before `at`.
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
            // A tab would misplace the caret, and other control characters could manipulate the terminal.
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

/// The parts of a file's text to hide: passwords in connection strings, values in `mongodb` and `http` except those of
/// known harmless keys, and values in unknown sections. Without a tree (after a syntax error), quotes and sections are
/// unreliable. Then everything up to the end of the line is hidden after a word such as `uri` or `token`, as is
/// everything before the last `@`, and every value in a section with secrets, whose lines may be parts of one.
pub(super) fn secrets(text: &str, tree: Option<&Node>) -> Vec<Span> {
    let mut found = Vec::new();
    if let Some(tree) = tree {
        secret_values(text, tree, Trust::Root, &mut found);
    }
    let mut start = 0;
    let mut in_section = false;
    for line in text.split_inclusive('\n') {
        let shift = |span: Span| start + span.start..start + span.end;
        found.extend(uris(line, tree.is_some()).into_iter().map(shift));
        if tree.is_none() {
            found.extend(after_a_secret_word(line).map(shift));
            in_section = is_section(line).unwrap_or(in_section);
            found.extend(in_section.then(|| value_of(line)).flatten().map(shift));
        }
        start += line.len();
    }
    merged(found)
}

/// The key at the beginning of a line; empty without one.
fn key_of(line: &str) -> &str {
    let line = line.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '{' | '[' | '"' | '\''));
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '-' | '$')).unwrap_or(line.len());
    &line[..end]
}

/// True if a section with secrets begins in this line, false if another one does; none if it goes on.
fn is_section(line: &str) -> Option<bool> {
    match Trust::Root.below(key_of(line)) {
        Trust::Section => Some(true),
        Trust::Open => Some(false),
        Trust::Root | Trust::Secret => None,
    }
}

/// The text after the key, or the whole line without one. None after a key whose value is harmless, or judged by its words.
fn value_of(line: &str) -> Option<Span> {
    let key = key_of(line);
    let is_judged = matches!(key, "mongodb" | "http" | "uri" | "token");
    if line.contains([':', '=']) && (is_judged || Trust::Section.below(key) == Trust::Open) {
        return None;
    }
    let end = line.trim_end().len();
    let start = line.find([':', '=']).map_or(0, |at| at + 1);
    let start = start + line.get(start..end)?.find(|c: char| !c.is_whitespace())?;
    (!matches!(&line[start..end], "{" | "[" | "|" | ">")).then_some(start..end)
}

/// Merges overlapping spans.
fn merged(mut found: Vec<Span>) -> Vec<Span> {
    found.sort_by_key(|span| (span.start, span.end));
    found.dedup_by(|next, kept| {
        let overlaps = next.start <= kept.end;
        kept.end = if overlaps { kept.end.max(next.end) } else { kept.end };
        overlaps
    });
    found
}

/// The parts to hide of the URIs in a line. If `quoted` is true, a space or a quote ends a URI.
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
                // The scheme may contain escapes.
                let spans = uri::secrets(&format!("mongodb://{word}")).into_iter();
                let moved =
                    spans.map(|span| span.start - "mongodb://".len() + from..span.end - "mongodb://".len() + from);
                found.extend(moved.filter(|span| !span.is_empty()));
            }
        }
    }
    found
}

/// The text after a word that announces a secret, unless it is a connection string without one.
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

/// The classification of the values under a key.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trust {
    /// The keys of the root.
    Root,
    /// Rules, cases of `denormd test`, and settings without secrets: shown.
    Open,
    /// A section with secrets: values of unknown keys are hidden.
    Section,
    /// A value that may be secret: hidden.
    Secret,
}

impl Trust {
    fn below(self, key: &str) -> Self {
        let open = ["name", "rules", "cases", "state", "log", "limits", "lease", "undo", "advise", "$schema"];
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
        // In YAML ` #` ends a value, so an apparent comment may be the rest of a password.
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
                // The text contains escapes.
                (_, None) => found.push(start..end),
            }
        }
        Value::String(value) if value.contains("://") && value.contains('@') => found.push(start..end),
        Value::String(_) | Value::Date(_) if matches!(trust, Trust::Section | Trust::Secret) => found.push(start..end),
        Value::Int(_) | Value::Float(_) | Value::Bool(_) if trust == Trust::Secret => found.push(start..end),
        _ => {}
    }
}

/// The message without the parts that would be hidden in a file.
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
