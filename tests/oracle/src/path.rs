//! Field paths with `$[]`, the places in a document that they name, and classic `$set`/`$unset` at such a place.

use std::fmt;

use bson::{Bson, Document};

/// One component of a [`Path`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// A field's name.
    Field(String),
    /// `$[]`: every element of the array.
    All,
}

/// A path as in a rule: `parts.$[].name`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Path(pub Vec<Part>);

/// One component of a [`Place`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A field's name.
    Field(String),
    /// An element's position.
    Index(usize),
}

/// A path in one document, with positions in place of `$[]`: `parts.0.name`.
pub type Place = Vec<Step>;

impl Path {
    /// Parses a path by splitting it at the dots.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let part = |part: &str| if part == "$[]" { Part::All } else { Part::Field(part.to_owned()) };
        Self(text.split('.').map(part).collect())
    }

    /// Number of components in the array prefix: up to and with the last `$[]`, 0 without one.
    #[must_use]
    pub fn prefix_len(&self) -> usize {
        self.0.iter().rposition(|part| *part == Part::All).map_or(0, |last| last + 1)
    }

    /// The names alone, as the path is written in an index or a query.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().filter_map(|part| if let Part::Field(name) = part { Some(name.as_str()) } else { None }).collect()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<&str> =
            self.0.iter().map(|part| if let Part::Field(name) = part { name.as_str() } else { "$[]" }).collect();
        f.write_str(&parts.join("."))
    }
}

/// The value at a path without `$[]`; an array on the way hides it.
#[must_use]
pub fn get<'a>(root: &'a Bson, parts: &[Part]) -> Option<&'a Bson> {
    parts.iter().try_fold(root, |value, part| match (value, part) {
        (Bson::Document(document), Part::Field(name)) => document.get(name),
        _ => None,
    })
}

/// The places that a path names below `root`: one for each combination of elements. The last component need not exist
/// unless it is `$[]`.
#[must_use]
pub fn places(root: &Bson, parts: &[Part]) -> Vec<Place> {
    let mut found = vec![(Place::new(), Some(root))];
    for part in parts {
        found = match part {
            Part::Field(name) => found
                .into_iter()
                .map(|(mut place, value)| {
                    place.push(Step::Field(name.clone()));
                    (place, value.and_then(Bson::as_document).and_then(|document| document.get(name)))
                })
                .collect(),
            Part::All => found
                .into_iter()
                .flat_map(|(place, value)| {
                    let elements = value.and_then(Bson::as_array).map_or(&[][..], Vec::as_slice);
                    elements.iter().enumerate().map(move |(index, element)| {
                        let mut place = place.clone();
                        place.push(Step::Index(index));
                        (place, Some(element))
                    })
                })
                .collect(),
        };
    }
    found.into_iter().map(|(place, _)| place).collect()
}

/// The value at a place.
#[must_use]
pub fn at<'a>(root: &'a Bson, place: &[Step]) -> Option<&'a Bson> {
    place.iter().try_fold(root, |value, step| match (value, step) {
        (Bson::Document(document), Step::Field(name)) => document.get(name),
        (Bson::Array(elements), Step::Index(index)) => elements.get(*index),
        _ => None,
    })
}

/// Classic `$set`: missing parents become documents; a parent of another type causes an error, as on the server.
pub fn set(root: &mut Bson, place: &[Step], value: Bson) -> Result<(), String> {
    let Some((step, rest)) = place.split_first() else {
        *root = value;
        return Ok(());
    };
    match (root, step) {
        (Bson::Document(document), Step::Field(name)) if rest.is_empty() => {
            document.insert(name, value);
            Ok(())
        }
        (Bson::Document(document), Step::Field(name)) => {
            set(document.entry(name).or_insert_with(|| Bson::Document(Document::new())), rest, value)
        }
        (Bson::Array(elements), Step::Index(index)) if *index < elements.len() => {
            set(&mut elements[*index], rest, value)
        }
        (other, step) => Err(format!("cannot create {step:?} in {other}")),
    }
}

/// Classic `$unset`: ignores a missing value; a parent stays even when it becomes empty.
pub fn unset(root: &mut Bson, place: &[Step]) {
    match (root, place) {
        (Bson::Document(document), [Step::Field(name)]) => {
            document.remove(name);
        }
        (Bson::Document(document), [Step::Field(name), rest @ ..]) => {
            if let Some(value) = document.get_mut(name) {
                unset(value, rest);
            }
        }
        (Bson::Array(elements), [Step::Index(index), rest @ ..]) => {
            if let Some(value) = elements.get_mut(*index) {
                unset(value, rest);
            }
        }
        _ => {}
    }
}

/// Removes an element from its array, like `$pull`.
pub fn pull(root: &mut Bson, place: &[Step]) {
    match (root, place) {
        (Bson::Array(elements), [Step::Index(index)]) if *index < elements.len() => {
            elements.remove(*index);
        }
        (Bson::Array(elements), [Step::Index(index), rest @ ..]) => {
            if let Some(value) = elements.get_mut(*index) {
                pull(value, rest);
            }
        }
        (Bson::Document(document), [Step::Field(name), rest @ ..]) => {
            if let Some(value) = document.get_mut(name) {
                pull(value, rest);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;

    #[test]
    fn nested_arrays_bind_every_combination() {
        let root = bson!({"a": [{"b": [{}, {}]}, 5, {"b": 1}, {"b": [{}]}]});
        assert_eq!(places(&root, &Path::parse("a.$[].b.$[].c").0).len(), 3);
        assert!(places(&bson!({"a": {"b": 1}}), &Path::parse("a.$[]").0).is_empty());
    }

    #[test]
    fn set_creates_parents_and_unset_leaves_them() {
        let mut root = bson!({});
        let place = [Step::Field("a".into()), Step::Field("b".into())];
        set(&mut root, &place, Bson::Int32(1)).unwrap();
        assert_eq!(root, bson!({"a": {"b": 1}}));
        unset(&mut root, &place);
        assert_eq!(root, bson!({"a": {}}));
        let mut scalar = bson!({"a": null});
        assert!(set(&mut scalar, &place, Bson::Int32(1)).is_err());
        unset(&mut scalar, &place);
        assert_eq!(scalar, bson!({"a": null}));
    }
}
