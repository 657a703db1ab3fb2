//! A key of the config: its name, the form of its value, its default, and what it is for.

/// One key of a mapping.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The name of the key in a config file.
    pub name: &'static str,
    /// The form of its value.
    pub form: Form,
    /// True if the key is required.
    pub required: bool,
    /// The default in config syntax; empty if there is none.
    pub default: &'static str,
    /// A description of the key.
    pub about: &'static str,
}

/// The form of a value.
#[derive(Debug, Clone, Copy)]
pub enum Form {
    /// A string that is not empty.
    Text,
    /// A list of strings, or one string with commas.
    Words,
    /// Letters, digits, `_`, `.` and `-`; a letter or a digit first.
    Name,
    /// true or false.
    Flag,
    /// An integer from 1.
    Count,
    /// A number of seconds, from this minimum up to a day.
    Seconds(i64),
    /// A number followed by s, m, h or d, up to 30 days.
    Span,
    /// An address with a port: `address:port`.
    Address,
    /// One of these words, each with its description.
    Choice(&'static [(&'static str, &'static str)]),
    /// A collection's name, or `{ collection, where }`.
    Side,
    /// Target path: source path.
    Match,
    /// Target path: source path, or `{ $dateTrunc: … }` of one.
    MatchWithBuckets,
    /// Target path: aggregation expression.
    Set,
    /// Target path: `{ $accumulator: expression }`, or an expression over variables.
    Accumulators,
    /// Name: `{ $accumulator: expression }`.
    Variables,
    /// Source path: 1 or -1.
    Sort,
    /// A path.
    Path,
    /// An aggregation expression.
    Expression,
    /// A query document.
    Filter,
    /// An integer that is not 0.
    Slice,
    /// A mapping with these keys.
    Keys(&'static [Key]),
    /// A list of mappings with these keys.
    List(&'static [Key]),
}

pub(super) const fn key(name: &'static str, form: Form, default: &'static str, about: &'static str) -> Key {
    Key { name, form, required: false, default, about }
}

pub(super) const fn must(name: &'static str, form: Form, about: &'static str) -> Key {
    Key { name, form, required: true, default: "", about }
}

/// The names of these keys, in their order.
#[must_use]
pub fn names(keys: &[Key]) -> Vec<&'static str> {
    keys.iter().map(|key| key.name).collect()
}

/// True if one of these keys has this name.
#[must_use]
pub fn has(keys: &[Key], name: &str) -> bool {
    keys.iter().any(|key| key.name == name)
}
