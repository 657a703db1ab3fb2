//! The differences between the expected and the stored documents.

use bson::{Bson, Document};

use crate::{
    World,
    expected::Expectation,
    path::{Part, Path},
    value::{equal, identical},
};

/// Every difference, one line each: `collection _id path: expected ..., stored ...`.
///
/// Values are compared by BSON type and bit. The order of fields matters inside a copied value, but not where owned
/// fields are added and removed among others: at the top level and in subdocuments that contain owned paths.
#[must_use]
pub fn differences(expected: &Expectation, actual: &World) -> Vec<String> {
    let mut found = Vec::new();
    let empty = Vec::new();
    for name in expected.world.keys().chain(actual.keys().filter(|name| !expected.world.contains_key(*name))) {
        let wanted = expected.world.get(name).unwrap_or(&empty);
        let stored = actual.get(name).unwrap_or(&empty);
        let owned: Vec<&[Part]> = expected
            .owned
            .get(name)
            .map(|paths| paths.iter().map(|path: &Path| &path.0[..]).collect())
            .unwrap_or_default();
        for wanted in wanted {
            let id = wanted.get("_id").unwrap_or(&Bson::Null);
            match by_id(stored, id) {
                Some(stored) => {
                    let mut lines = Vec::new();
                    documents("", wanted, stored, &owned, &mut lines);
                    found.extend(lines.into_iter().map(|line| format!("{name} {id} {line}")));
                }
                None => found.push(format!("{name} {id}: the document is gone")),
            }
        }
        for stored in stored {
            let id = stored.get("_id").unwrap_or(&Bson::Null);
            if by_id(wanted, id).is_none() {
                found.push(format!("{name} {id}: the document should be gone"));
            }
        }
    }
    found
}

fn by_id<'a>(documents: &'a [Document], id: &Bson) -> Option<&'a Document> {
    documents.iter().find(|document| equal(document.get("_id").unwrap_or(&Bson::Null), id))
}

fn documents(path: &str, wanted: &Document, stored: &Document, owned: &[&[Part]], lines: &mut Vec<String>) {
    let names = wanted.keys().chain(stored.keys().filter(|name| !wanted.contains_key(name)));
    for name in names {
        let below = below(owned, &Part::Field(name.clone()));
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        values(&path, wanted.get(name), stored.get(name), &below, lines);
    }
}

fn values(path: &str, wanted: Option<&Bson>, stored: Option<&Bson>, owned: &[&[Part]], lines: &mut Vec<String>) {
    match (wanted, stored) {
        (Some(Bson::Document(wanted)), Some(Bson::Document(stored))) if !owned.is_empty() => {
            documents(path, wanted, stored, owned, lines);
        }
        (Some(Bson::Array(wanted)), Some(Bson::Array(stored))) if !owned.is_empty() => {
            let below = below(owned, &Part::All);
            for index in 0..wanted.len().max(stored.len()) {
                values(&format!("{path}.{index}"), wanted.get(index), stored.get(index), &below, lines);
            }
        }
        (Some(wanted), Some(stored)) if identical(wanted, stored) => {}
        (None, None) => {}
        (wanted, stored) => lines.push(format!("{path}: expected {}, stored {}", show(wanted), show(stored))),
    }
}

/// The remainders of the owned paths below one part. A path that ends here is one whole value without a remainder.
fn below<'a>(owned: &[&'a [Part]], part: &Part) -> Vec<&'a [Part]> {
    owned
        .iter()
        .filter_map(|path| match path.split_first() {
            Some((first, rest)) if first == part && !rest.is_empty() => Some(rest),
            _ => None,
        })
        .collect()
}

fn show(value: Option<&Bson>) -> String {
    value.map_or_else(|| "missing".to_owned(), |value| format!("{value:?}"))
}
