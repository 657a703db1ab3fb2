//! Paths to fields, with `$[]` for "every element of this array".

use std::fmt;

use bson::{Bson, Document};
use serde::{Deserialize, Serialize};

/// One step of a [`FieldPath`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Segment {
    /// A field's name.
    Name(String),
    /// `$[]`, MongoDB's all-positional operator: each element of the array at this point of the path.
    Each,
}

impl Segment {
    /// The name of the field; None for `$[]`.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Name(name) => Some(name),
            Self::Each => None,
        }
    }
}

/// A path from a document's root to a field: `parts.$[].name`. It has at least one segment and does not start with `$[]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FieldPath(Vec<Segment>);

/// Reason why a text is not a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The text, or a segment of it, is empty.
    #[error("a path has no empty segment")]
    Empty,
    /// `$[]` needs an array before it.
    #[error("`$[]` cannot be the first segment of a path")]
    LeadingEach,
    /// `$` or `$[name]`.
    #[error("`{0}` has no meaning here; every element of an array is `$[]`")]
    Positional(String),
    /// A field name that starts with `$` and is not part of a DBRef.
    #[error("a field name cannot start with `$`: `{0}` (only `$ref`, `$id` and `$db` of a DBRef do)")]
    Dollar(String),
    /// `parts.0.id`
    #[error("`{0}` is an array index; rules speak of every element: write `$[]`")]
    ArrayIndex(String),
    /// Two `$[]` in a row.
    #[error("`$[].$[]`, an array directly inside an array, is not supported")]
    NestedEach,
    /// `parts.name `
    #[error("`{0}` begins or ends with a space, which would be a part of the field's name")]
    Space(String),
    /// A NUL byte, which BSON cannot hold in a name.
    #[error("a field name cannot hold a NUL character")]
    Nul,
}

impl FieldPath {
    /// Parses a path as written in a rule.
    pub fn parse(text: &str) -> Result<Self, PathError> {
        let mut segments = Vec::new();
        for part in text.split('.') {
            let segment = match part {
                "" => return Err(PathError::Empty),
                "$[]" if segments.is_empty() => return Err(PathError::LeadingEach),
                "$[]" if segments.last() == Some(&Segment::Each) => return Err(PathError::NestedEach),
                "$[]" => Segment::Each,
                "$id" | "$ref" | "$db" => Segment::Name(part.to_owned()),
                "$" => return Err(PathError::Positional(part.to_owned())),
                _ if part.starts_with("$[") => return Err(PathError::Positional(part.to_owned())),
                _ if part.starts_with('$') => return Err(PathError::Dollar(part.to_owned())),
                _ if part.bytes().all(|b| b.is_ascii_digit()) => return Err(PathError::ArrayIndex(part.to_owned())),
                _ if part.contains('\0') => return Err(PathError::Nul),
                name => Segment::Name(name.to_owned()),
            };
            segments.push(segment);
        }
        Ok(Self(segments))
    }

    /// Parses a path as written in a rule. Refuses names that are nearly always a mistake there: `lines[]`, `lines[0]`,
    /// `*`, and those that begin or end with a space.
    pub fn parse_written(text: &str) -> Result<Self, PathError> {
        for part in text.split('.') {
            if part.trim() != part {
                return Err(PathError::Space(part.to_owned()));
            }
            if without_index(part).is_some() {
                return Err(PathError::Positional(part.to_owned()));
            }
        }
        Self::parse(text)
    }

    /// The path that was probably meant by one that [`FieldPath::parse_written`] refuses.
    #[must_use]
    pub fn probably_meant(text: &str) -> Option<Self> {
        let mut parts: Vec<&str> = Vec::new();
        for part in text.split('.').map(str::trim) {
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            match without_index(part) {
                Some("") => parts.push("$[]"),
                Some(array) => parts.extend([array, "$[]"]),
                None if part == "$" || is_number => parts.push("$[]"),
                None => parts.push(part),
            }
        }
        let meant = parts.join(".");
        Self::parse_written(&meant).ok().filter(|_| meant != text)
    }

    /// The segments, first to last.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.0
    }

    /// The names of the fields on the path, first to last: without `$[]`.
    pub fn names(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.iter().filter_map(Segment::name)
    }

    /// True if the path runs through the elements of an array.
    #[must_use]
    pub fn has_each(&self) -> bool {
        self.0.contains(&Segment::Each)
    }

    /// The path up to and including its last `$[]`, if it has one: `parts.$[]` of `parts.$[].id`.
    #[must_use]
    pub fn array_prefix(&self) -> Option<Self> {
        let last = self.0.iter().rposition(|s| *s == Segment::Each)?;
        Some(Self(self.0[..=last].to_vec()))
    }

    /// The segments after `prefix`, if the path starts with it and is longer.
    #[must_use]
    pub fn below(&self, prefix: &Self) -> Option<&[Segment]> {
        self.0.strip_prefix(prefix.0.as_slice()).filter(|rest| !rest.is_empty())
    }

    /// The name of the top-level field.
    #[must_use]
    pub fn root(&self) -> &str {
        self.names().next().unwrap_or_default()
    }

    /// The path as a query or an index names it: without `$[]`.
    #[must_use]
    pub fn query(&self) -> String {
        self.names().collect::<Vec<_>>().join(".")
    }

    /// True if the paths are equal or one contains the other: both cannot be owned, and a write to one may change the
    /// other.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a == b)
    }

    /// Like [`FieldPath::overlaps`], but ignores `$[]` on both sides.
    #[must_use]
    pub fn overlaps_loosely(&self, other: &Self) -> bool {
        self.names().zip(other.names()).all(|(a, b)| a == b)
    }

    /// True if a write to `changed`, a dotted path as `updateDescription` names it (array indexes as numbers), may
    /// change the value at this path. Returns true when in doubt: a number may be an index or a field's name.
    #[must_use]
    pub fn touched_by(&self, changed: &str) -> bool {
        touches(&self.0, changed)
    }
}

/// The array of a part that other languages write for its elements: `lines` of `lines[]` and of `lines[0]`, nothing of
/// `*`.
fn without_index(part: &str) -> Option<&str> {
    if part == "*" {
        return Some("");
    }
    let (array, index) = part.strip_suffix(']')?.rsplit_once('[')?;
    let is_index = index == "*" || index.bytes().all(|byte| byte.is_ascii_digit());
    (is_index && array != "$").then_some(array)
}

/// [`FieldPath::touched_by`] for a path given as segments.
#[must_use]
pub fn touches(path: &[Segment], changed: &str) -> bool {
    touch(path, &changed.split('.').collect::<Vec<_>>())
}

fn touch(path: &[Segment], changed: &[&str]) -> bool {
    let (Some((segment, path_rest)), Some((part, changed_rest))) = (path.split_first(), changed.split_first()) else {
        return true;
    };
    let numeric = part.bytes().all(|b| b.is_ascii_digit());
    match segment {
        Segment::Each => numeric && touch(path_rest, changed_rest),
        // An expression's path looks into arrays implicitly: an index in `changed` may stand between two names.
        Segment::Name(name) => {
            (name == part && touch(path_rest, changed_rest)) || (numeric && touch(path, changed_rest))
        }
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, segment) in self.0.iter().enumerate() {
            if nth > 0 {
                f.write_str(".")?;
            }
            match segment {
                Segment::Name(name) => f.write_str(name)?,
                Segment::Each => f.write_str("$[]")?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for FieldPath {
    type Error = PathError;

    fn try_from(text: String) -> Result<Self, PathError> {
        Self::parse(&text)
    }
}

impl From<FieldPath> for String {
    fn from(path: FieldPath) -> Self {
        path.to_string()
    }
}

/// The value at a path. Does not look into arrays.
#[must_use]
pub fn value_at<'a>(document: &'a Document, path: &[Segment]) -> Option<&'a Bson> {
    let (first, rest) = path.split_first()?;
    let Segment::Name(name) = first else { return None };
    let value = document.get(name)?;
    if rest.is_empty() { Some(value) } else { value_at(value.as_document()?, rest) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> FieldPath {
        FieldPath::parse(text).unwrap()
    }

    #[test]
    fn what_is_written_is_what_is_shown() {
        for text in ["a", "a.b", "parts.$[].id", "a.$[].b.$[].c", "publisher.$id", "ünï.code"] {
            assert_eq!(path(text).to_string(), text);
        }
    }

    #[test]
    fn refused_with_the_reason() {
        for (text, error) in [
            ("", PathError::Empty),
            ("a..b", PathError::Empty),
            ("$[].a", PathError::LeadingEach),
            ("a.$.b", PathError::Positional("$".to_owned())),
            ("a.$[x].b", PathError::Positional("$[x]".to_owned())),
            ("a.$b", PathError::Dollar("$b".to_owned())),
            ("a.0.b", PathError::ArrayIndex("0".to_owned())),
            ("a.$[].$[].b", PathError::NestedEach),
        ] {
            assert_eq!(FieldPath::parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn the_notation_of_other_languages_is_refused() {
        for (text, part, meant) in [
            ("lines[].name", "lines[]", "lines.$[].name"),
            ("lines[0].name", "lines[0]", "lines.$[].name"),
            ("lines[*]", "lines[*]", "lines.$[]"),
            ("a.lines.*.name", "*", "a.lines.$[].name"),
        ] {
            assert_eq!(FieldPath::parse_written(text), Err(PathError::Positional(part.to_owned())), "{text}");
            assert_eq!(FieldPath::probably_meant(text), Some(path(meant)), "{text}");
        }
        assert_eq!(FieldPath::parse_written("a. b"), Err(PathError::Space(" b".to_owned())));
        assert_eq!(FieldPath::probably_meant("company "), Some(path("company")));
        for text in ["a.$[].b", "ref.$id", "unit [kg]", "first name"] {
            assert_eq!(FieldPath::parse_written(text), Ok(path(text)), "{text}");
        }
    }

    #[test]
    fn the_array_prefix_ends_with_the_last_each() {
        assert_eq!(path("a.b").array_prefix(), None);
        assert_eq!(path("a.$[].b.$[].c").array_prefix(), Some(path("a.$[].b.$[]")));
        assert_eq!(path("parts.$[].id").query(), "parts.id");
    }

    #[test]
    fn a_write_touches_what_is_above_at_and_below_it() {
        let touched = |here: &str, changed: &str| path(here).touched_by(changed);
        assert!(touched("parts.$[].id", "parts"));
        assert!(touched("parts.$[].id", "parts.0"));
        assert!(touched("parts.$[].id", "parts.0.id"));
        assert!(touched("parts.$[].id", "parts.10.id.x"));
        assert!(!touched("parts.$[].id", "parts.0.name"));
        assert!(!touched("host", "hostname"));
        assert!(touched("a.b.c", "a.b"));
        assert!(touched("a.b", "a.b.c"));
        assert!(touched("parts.id", "parts.0.id"), "an expression looks into arrays");
        assert!(!touched("parts.id", "parts.0.name"));
        assert!(!touched("a.b", "c.b"));
    }

    #[test]
    fn overlap_is_equality_or_nesting() {
        assert!(path("a.b").overlaps(&path("a")));
        assert!(path("a.b").overlaps(&path("a.b.c")));
        assert!(!path("a.b").overlaps(&path("a.c")));
        assert!(!path("a.$[].b").overlaps(&path("a.$[].c")));
    }
}
