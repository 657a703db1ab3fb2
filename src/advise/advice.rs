//! One piece of advice, and the words that all of them share. Pure.

use serde_json::{Value, json};

use super::{
    draft::Draft,
    spread::{How, Spread, ratio, whole},
};

/// What is advised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Put the documents of one collection into those of another.
    Embed,
    /// An array of subdocuments is where it belongs.
    KeepEmbedded,
    /// The ids of the many in an array of the one.
    ArrayOfReferences,
    /// The id of the one in each of the many.
    ParentReference,
    /// Both of these.
    TwoWay,
    /// Copy these fields.
    Copy,
    /// Do not copy these.
    DoNotCopy,
    /// The figures do not decide.
    Measure,
    /// Keep the first few of the many in the one.
    Subset,
    /// Ids instead of DBRefs.
    PlainIds,
    /// An array is too long for its document.
    MoveOut,
    /// References resolve only once their type is converted.
    KeyType,
    /// References that lead nowhere.
    Dangling,
    /// Several documents share a key.
    DuplicateKeys,
    /// Copies that differ from their source.
    StaleCopies,
    /// A lookup has no index.
    IndexMissing,
    /// An index is not used.
    IndexUnused,
    /// A collection has too many.
    IndexesMany,
    /// Joins fetch whole documents.
    Projection,
    /// Too many reads are `$lookup`.
    LookupShare,
    /// Regular expressions without regard to case.
    IgnoreCase,
    /// Too many collections.
    Collections,
    /// Large documents.
    DocumentSize,
    /// Hot data and the cache.
    Cache,
}

impl Kind {
    /// As it is printed.
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

/// One piece of advice: what, the number behind it, and the rule of thumb that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Advice {
    /// What.
    pub kind: Kind,
    /// The rule of thumb, 1 to 6; None where it comes from elsewhere.
    pub rule: Option<u8>,
    /// In a sentence, with its number.
    pub says: String,
    /// A command for mongosh.
    pub command: Option<String>,
    /// A rule for denormd.
    pub draft: Option<Draft>,
}

impl Advice {
    /// Advice in a sentence.
    #[must_use]
    pub fn new(kind: Kind, rule: impl Into<Option<u8>>, says: impl Into<String>) -> Self {
        Self { kind, rule: rule.into(), says: says.into(), command: None, draft: None }
    }

    /// With a command for mongosh.
    #[must_use]
    pub fn command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into());
        self
    }

    /// With a rule for denormd.
    #[must_use]
    pub fn draft(mut self, draft: Option<Draft>) -> Self {
        self.draft = draft;
        self
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "kind": self.kind.name(), "rule_of_thumb": self.rule, "says": self.says, "command": self.command,
            "rule": self.draft.as_ref().map(Draft::json),
        })
    }
}

/// `1,234,567`
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

/// `1 document`, `2,000 documents`
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// `1.5 MB`
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

/// A number with as many digits as matter.
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

/// `median 3, 99th percentile 4, most 5 (all 1,000 counted)`
#[must_use]
pub fn spread(spread: &Spread) -> String {
    let Spread { median, p99, max, .. } = spread;
    format!("median {}, 99th percentile {}, most {} ({})", count(*median), count(*p99), count(*max), how(spread))
}

/// How a spread is known.
#[must_use]
pub fn how(spread: &Spread) -> String {
    match spread.how {
        How::Exact => format!("all {} counted", count(spread.count)),
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
