//! Paths in documents, and the sort keys at them.

use bson::{Bson, Document};

use super::{Result, Value, compare, needs_server, order::directions};

pub(super) fn steps(path: &str) -> Vec<&str> {
    path.split('.').collect()
}

/// The value at a path, which maps over arrays.
pub(super) fn below(value: Option<&Bson>, path: &[&str]) -> Value {
    match value {
        value if path.is_empty() => value.cloned(),
        Some(Bson::Document(doc)) => below_document(doc, path),
        Some(Bson::Array(items)) => {
            let inside = items.iter().filter_map(|item| below_document(item.as_document()?, path));
            Some(Bson::Array(inside.collect()))
        }
        _ => None,
    }
}

pub(super) fn below_document(doc: &Document, path: &[&str]) -> Value {
    let (first, rest) = path.split_first()?;
    below(doc.get(*first), rest)
}

/// Sort key of a document: the least value of an array, or the greatest when descending; null for a missing field.
pub(super) fn sort_keys(document: &Document, by: &Document) -> Result<Vec<Value>> {
    let mut arrays = 0;
    let mut keys = Vec::new();
    for (path, way) in by.iter().zip(directions(by)?).map(|((path, _), way)| (path, way)) {
        let mut values = Vec::new();
        arrays += usize::from(leaves(document, &steps(path), &mut values));
        let order = |a: &&Bson, b: &&Bson| compare(Some(*a), Some(*b));
        let key = if way > 0 { values.iter().min_by(order) } else { values.iter().max_by(order) };
        keys.push(key.cloned());
    }
    if arrays > 1 { needs_server("sorting by two arrays") } else { Ok(keys) }
}

/// True if the value at a path is an array, or the path runs through one.
pub(super) fn through_array(document: &Document, path: &str) -> bool {
    leaves(document, &steps(path), &mut Vec::new())
}

/// Collects the values at a path; returns true if the path runs through an array.
fn leaves(document: &Document, path: &[&str], out: &mut Vec<Bson>) -> bool {
    let Some((first, rest)) = path.split_first() else { return false };
    match (document.get(*first), rest.is_empty()) {
        (Some(Bson::Array(items)), _) if items.is_empty() => {
            out.push(if rest.is_empty() { Bson::Undefined } else { Bson::Null });
            true
        }
        (Some(Bson::Array(items)), true) => {
            out.extend(items.iter().cloned());
            true
        }
        (Some(Bson::Array(items)), false) => {
            for item in items {
                match item {
                    Bson::Document(inside) => drop(leaves(inside, rest, out)),
                    _ => out.push(Bson::Null),
                }
            }
            true
        }
        (Some(value), true) => {
            out.push(value.clone());
            false
        }
        (Some(Bson::Document(inside)), false) => leaves(inside, rest, out),
        _ => {
            out.push(Bson::Null);
            false
        }
    }
}
