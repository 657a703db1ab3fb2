//! Texts that look like those of other languages, where a field's name inside a text stands for its value:
//! `$first $last`.

use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::Rule,
};

use super::constants;

/// The texts of a rule that hold the name of a field, with the expression that was probably meant.
pub fn suspicions(rule: &Rule) -> Vec<Mistake> {
    let mut texts: Vec<(ConfigPath, &str)> = Vec::new();
    for (place, value, _) in rule.values_at() {
        constants::texts(&place, value, &mut texts);
    }
    let suspicion = |(place, text): (ConfigPath, &str)| {
        let meant = meant(text)?;
        let message = if text.starts_with('$') {
            format!("`{text}` is the path of one field, whose name is the whole text")
        } else {
            format!("`{text}` is a constant text: no value is put into it")
        };
        let hint = format!("did you mean `{meant}`? if the text itself is meant: {{ $literal: {text:?} }}");
        Some(Mistake::new(place, message).hint(hint))
    };
    texts.into_iter().filter_map(suspicion).collect()
}

/// The concatenation that a text stands for in other languages; None if it holds no field's name, or is one.
fn meant(text: &str) -> Option<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(at) = field(rest) {
        parts.extend(constant(&rest[..at]));
        let name = &rest[at + 1..];
        let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
        let end = name.find(|c| !is_name(c)).unwrap_or(name.len());
        let name = name[..end].trim_end_matches('.');
        parts.push(format!("${name}"));
        rest = &rest[at + 1 + name.len()..];
    }
    let is_alone = parts.len() == 1 && text.starts_with('$');
    // `$unit price` may be the field that it says.
    if parts.is_empty() || is_alone || text.starts_with("$$") {
        return None;
    }
    parts.extend(constant(rest));
    Some(format!("{{ $concat: [{}] }}", parts.join(", ")))
}

/// The place of a `$` with a name behind it. That of a DBRef, `owner.$id`, is part of a path.
fn field(text: &str) -> Option<usize> {
    let is_field = |(at, _): &(usize, &str)| {
        !text[..*at].ends_with('.') && text[at + 1..].starts_with(|c: char| c.is_alphabetic() || c == '_')
    };
    text.match_indices('$').find(is_field).map(|(at, _)| at)
}

/// The text between two fields. A plus sign is how other languages join them.
fn constant(text: &str) -> Option<String> {
    let joined = if text.trim() == "+" { " " } else { text };
    (!joined.is_empty()).then(|| format!("{joined:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_concatenation_is_offered() {
        for (text, expected) in [
            ("$first $last", Some("{ $concat: [$first, \" \", $last] }")),
            ("$first + $last", Some("{ $concat: [$first, \" \", $last] }")),
            ("$a.b, $c_d.", Some("{ $concat: [$a.b, \", \", $c_d, \".\"] }")),
            ("Order $number", Some("{ $concat: [\"Order \", $number] }")),
            ("$first$last", Some("{ $concat: [$first, $last] }")),
            ("$name", None),
            ("$address.city", None),
            ("$unit price", None),
            ("$owner.$id", None),
            ("$$target.name", None),
            ("costs $5", None),
            ("US$", None),
        ] {
            assert_eq!(meant(text).as_deref(), expected, "{text}");
        }
    }
}
