//! The forms of references.

use bson::{Bson, Document, doc};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// The form of the references in a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// `r: key`
    Scalar,
    /// `r: { id: key }`
    Dotted,
    /// `r: [key]`
    Ids,
    /// `r: [{ id: key }]`
    Elements,
    /// `r: [{ b: [{ c: key }] }]`
    Nested,
    /// `r: [{ ids: [key] }]`
    NestedIds,
    /// `r: { $ref, $id, $db }`
    DbRef,
    /// `r: [{ $ref, $id, $db }]`
    DbRefs,
    /// `r: { t: tenant, k: key }`
    Pair,
    /// `r: [{ t: tenant, k: key }]`
    Pairs,
}

impl Shape {
    pub(super) fn draw(rng: &mut StdRng, into: bool) -> Self {
        let shapes: &[Self] = if into {
            &[Self::Ids, Self::Ids, Self::Elements, Self::NestedIds, Self::DbRefs]
        } else {
            &[
                Self::Scalar,
                Self::Scalar,
                Self::Dotted,
                Self::Ids,
                Self::Elements,
                Self::Elements,
                Self::Nested,
                Self::NestedIds,
                Self::DbRef,
                Self::DbRefs,
                Self::Pair,
                Self::Pairs,
            ]
        };
        shapes.choose(rng).copied().unwrap_or(Self::Scalar)
    }

    /// The paths of its keys below `field`.
    pub(super) fn key_paths(self, field: &str) -> Vec<String> {
        let below: &[&str] = match self {
            Self::Scalar => &[""],
            Self::Dotted => &[".id"],
            Self::Ids => &[".$[]"],
            Self::Elements => &[".$[].id"],
            Self::Nested => &[".$[].b.$[].c"],
            Self::NestedIds => &[".$[].ids.$[]"],
            Self::DbRef => &[".$id"],
            Self::DbRefs => &[".$[].$id"],
            Self::Pair => &[".t", ".k"],
            Self::Pairs => &[".$[].t", ".$[].k"],
        };
        below.iter().map(|path| format!("{field}{path}")).collect()
    }

    /// Possible prefixes of an owned path, from none to the whole array prefix.
    pub(super) fn prefixes(self, field: &str) -> Vec<String> {
        let mut prefixes = vec![String::new()];
        if self.is_array() {
            prefixes.push(format!("{field}.$[]."));
        }
        match self {
            Self::Nested => prefixes.push(format!("{field}.$[].b.$[].")),
            Self::NestedIds => prefixes.push(format!("{field}.$[].ids.$[].")),
            _ => {}
        }
        prefixes
    }

    /// True if the elements at this prefix are the ids themselves.
    pub(super) fn is_bare(self, prefix: &str) -> bool {
        (self == Self::Ids && !prefix.is_empty()) || prefix.ends_with("ids.$[].")
    }

    pub(super) fn is_array(self) -> bool {
        !matches!(self, Self::Scalar | Self::Dotted | Self::DbRef | Self::Pair)
    }

    /// True if its elements have other fields than the key.
    pub(super) fn has_fields(self) -> bool {
        matches!(self, Self::Elements | Self::Nested | Self::Pairs)
    }

    /// A condition for `$pull` that finds the elements with this key.
    pub(super) fn pull(self, key: &Bson) -> Bson {
        let any = doc! {"$in": [key.clone()]};
        Bson::Document(match self {
            Self::Elements => doc! {"id": any},
            Self::Pairs => doc! {"k": any},
            Self::DbRefs => doc! {"$id": any},
            Self::Nested => doc! {"b.c": any},
            Self::NestedIds => doc! {"ids": any},
            _ => any,
        })
    }

    /// An array in place of an element; it contains a value of this element where a document would have another array. It refers to
    /// nothing.
    pub(super) fn misplaced(self, element: &Bson) -> Option<Bson> {
        let name = match self {
            Self::Nested => "b",
            Self::NestedIds => "ids",
            _ => return None,
        };
        let inside = element.as_document()?.get_array(name).ok()?.first()?.clone();
        Some(Bson::Array(vec![doc! {name: inside}.into()]))
    }

    /// One reference, or one element of the array of references. `key` draws a key, `to` is the database and collection
    /// of DBRefs.
    pub(super) fn element(self, rng: &mut StdRng, to: (&str, &str), key: &mut dyn FnMut(&mut StdRng) -> Bson) -> Bson {
        let some = |rng: &mut StdRng| rng.random_range(0..=3);
        let mut element = match self {
            Self::Scalar | Self::Ids => return key(rng),
            Self::Dotted | Self::Elements => doc! {"id": key(rng)},
            Self::Nested => {
                let below: Vec<Document> = (0..some(rng)).map(|_| doc! {"c": key(rng), "role": role(rng)}).collect();
                doc! {"b": below}
            }
            Self::NestedIds => doc! {"ids": (0..some(rng)).map(|_| key(rng)).collect::<Vec<_>>()},
            Self::DbRef | Self::DbRefs => dbref(rng, to, key),
            Self::Pair | Self::Pairs => doc! {"t": tenant(rng), "k": key(rng)},
        };
        if self.has_fields() && rng.random_bool(0.5) {
            element.insert("role", role(rng));
        }
        Bson::Document(element)
    }
}

fn role(rng: &mut StdRng) -> &'static str {
    ["lead", "extra", "$name", ""].choose(rng).copied().unwrap_or_default()
}

/// Usually a number, in one of the number types.
pub(super) fn tenant(rng: &mut StdRng) -> Bson {
    [Bson::Int32(1), Bson::Int32(1), Bson::Int64(2), Bson::Double(1.0), Bson::Null]
        .choose(rng)
        .cloned()
        .unwrap_or(Bson::Null)
}

fn dbref(rng: &mut StdRng, to: (&str, &str), key: &mut dyn FnMut(&mut StdRng) -> Bson) -> Document {
    let (database, collection) = to;
    let mut reference = Document::new();
    match rng.random_range(0..10) {
        0 => {}
        1 => {
            reference.insert("$ref", "elsewhere");
        }
        _ => {
            reference.insert("$ref", collection);
        }
    }
    reference.insert("$id", key(rng));
    match rng.random_range(0..10) {
        0 => {
            reference.insert("$db", "elsewhere");
        }
        1..=2 => {
            reference.insert("$db", database);
        }
        3 => {
            reference.insert("$db", Bson::Null);
        }
        _ => {}
    }
    reference
}
