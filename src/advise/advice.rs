//! One piece of advice, and the number formats that all of them share. Pure.

use serde_json::{Value, json};

use super::draft::Draft;
use denormd_model::{
    distribution::{Distribution, How, ratio, whole},
    text::plural,
};

/// The kind of a piece of advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Embed the documents of one collection in those of another.
    Embed,
    /// Leave an embedded array of subdocuments as it is.
    KeepEmbedded,
    /// Keep an array of ids on the "one" side.
    ArrayOfReferences,
    /// Keep the parent's id in each document on the "many" side.
    ParentReference,
    /// References in both directions.
    TwoWay,
    /// Copy these fields.
    Copy,
    /// Do not copy these fields.
    DoNotCopy,
    /// The figures do not allow a decision.
    Measure,
    /// Keep the first few documents of the "many" side in the parent.
    Subset,
    /// Use ids instead of DBRefs.
    PlainIds,
    /// Move an array that is too long into its own collection.
    MoveOut,
    /// References resolve only after a type conversion.
    KeyType,
    /// References to documents that do not exist.
    Dangling,
    /// Several documents share a key.
    DuplicateKeys,
    /// Copies that differ from their source.
    StaleCopies,
    /// A lookup has no index.
    IndexMissing,
    /// An index is not used.
    IndexUnused,
    /// A collection has too many indexes.
    IndexesMany,
    /// Joins fetch whole documents.
    Projection,
    /// Too large a share of the reads are `$lookup`.
    LookupShare,
    /// Case-insensitive regular expressions.
    IgnoreCase,
    /// Too many collections.
    Collections,
    /// Large documents.
    DocumentSize,
    /// Recently used data does not fit the cache.
    Cache,
}

impl Kind {
    /// The name as it is printed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::KeepEmbedded => "keep embedded",
            Self::ArrayOfReferences => "array of references",
            Self::ParentReference => "parent reference",
            Self::TwoWay => "two-way references",
            Self::Copy => "copy",
            Self::DoNotCopy => "do not copy",
            Self::Measure => "measure",
            Self::Subset => "subset",
            Self::PlainIds => "plain ids",
            Self::MoveOut => "move out",
            Self::KeyType => "key type",
            Self::Dangling => "dangling references",
            Self::DuplicateKeys => "duplicate keys",
            Self::StaleCopies => "stale copies",
            Self::IndexMissing => "missing index",
            Self::IndexUnused => "unused index",
            Self::IndexesMany => "many indexes",
            Self::Projection => "projection",
            Self::LookupShare => "$lookup",
            Self::IgnoreCase => "regular expressions",
            Self::Collections => "collections",
            Self::DocumentSize => "document size",
            Self::Cache => "cache",
        }
    }
}

/// The six rules of thumb of MongoDB's blog series "6 Rules of Thumb for MongoDB Schema Design", in short.
pub const RULES_OF_THUMB: [&str; 6] = [
    "favour embedding unless there is a compelling reason not to",
    "needing to access an object on its own is a compelling reason not to embed it",
    "arrays should not grow without bound: more than a couple of hundred documents on the many side are not embedded, for \
     more than a few thousand there is no array of references",
    "do not be afraid of joins in the application: with indexes and projections they cost barely more than the server's",
    "consider the ratio of reads to writes: a field that is mostly read and seldom updated is a good one to copy",
    "how you model depends entirely on how the application reads and writes",
];

/// One piece of advice: its kind, the number behind it, and the rule of thumb that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// The kind, which selects the printed name.
    pub kind: Kind,
    /// The rule of thumb, 1 to 6; None for advice from another source.
    pub rule: Option<u8>,
    /// One sentence, with its number.
    pub says: String,
    /// A command for mongosh that carries out the advice.
    pub command: Option<String>,
    /// A rule for denormd that carries out the advice.
    pub draft: Option<Draft>,
}

impl Advice {
    /// Advice without a command or a rule.
    #[must_use]
    pub fn new(kind: Kind, rule: impl Into<Option<u8>>, says: impl Into<String>) -> Self {
        Self { kind, rule: rule.into(), says: says.into(), command: None, draft: None }
    }

    /// Adds a command for mongosh.
    #[must_use]
    pub fn command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }

    /// Adds a rule for denormd.
    #[must_use]
    pub fn draft(mut self, draft: Option<Draft>) -> Self {
        self.draft = draft;
        self
    }

    /// The advice as JSON, for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "kind": self.kind.name(), "rule_of_thumb": self.rule, "says": self.says, "command": self.command,
            "rule": self.draft.as_ref().map(Draft::json),
        })
    }
}

/// Formats a count: `1,234,567`.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Formats a count with its noun: `1 document`, `2,000 documents`.
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), plural(number))
}

/// Formats a size: `1.5 MB`.
#[must_use]
pub fn bytes(number: u64) -> String {
    let (unit, name) = match number {
        0..1024 => return counted(number, "byte"),
        1024..0x10_0000 => (1 << 10, "KB"),
        0x10_0000..0x4000_0000 => (1 << 20, "MB"),
        _ => (1 << 30, "GB"),
    };
    format!("{:.1} {name}", ratio(number, unit))
}

/// Formats a number with one decimal at most, and with none from 10 up.
#[must_use]
pub fn figure(number: f64) -> String {
    if number >= 100.0 {
        count(whole(number.round()))
    } else if number >= 10.0 || (number - number.round()).abs() < 0.05 {
        format!("{number:.0}")
    } else {
        format!("{number:.1}")
    }
}

/// Formats a distribution: `median 3, 99th percentile 4, most 5 (all 1,000 counted)`.
#[must_use]
pub fn distribution(distribution: &Distribution) -> String {
    let Distribution { median, p99, max, .. } = distribution;
    format!("median {}, 99th percentile {}, most {} ({})", count(*median), count(*p99), count(*max), how(distribution))
}

/// Describes the basis of a distribution: a full count or a sample.
#[must_use]
pub fn how(distribution: &Distribution) -> String {
    match distribution.how {
        How::Exact => format!("all {} counted", count(distribution.count)),
        How::Sample(of) => format!("a sample of {}", count(of)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
        assert_eq!(counted(1, "document"), "1 document");
        assert_eq!(bytes(512), "512 bytes");
        assert_eq!(bytes(1_572_864), "1.5 MB");
        assert_eq!(bytes(91 << 30), "91.0 GB");
        for (number, text) in
            [(0.25, "0.2"), (3.0, "3"), (3.26, "3.3"), (15.5, "16"), (1234.5, "1,235"), (6.0001, "6"), (0.0, "0")]
        {
            assert_eq!(figure(number), text);
        }
    }
}
