//! `$project`, `$set` and `$unset` of pipelines, and the projection of `find`.

use bson::{Bson, Document};
use denormd_mql::{Value, expression};

use crate::replies::{Failure, Result};

/// The fields of a projection, by their paths.
#[derive(Debug, Default)]
struct Tree(Vec<(String, Node)>);

#[derive(Debug)]
enum Node {
    Leaf,
    Inner(Tree),
}

impl Tree {
    fn insert(&mut self, path: &str) {
        let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
        let at = self.0.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            let node = if rest.is_some() { Node::Inner(Self::default()) } else { Node::Leaf };
            self.0.push((name.to_owned(), node));
            self.0.len() - 1
        });
        if let (Node::Inner(inner), Some(rest)) = (&mut self.0[at].1, rest) {
            inner.insert(rest);
        }
    }

    fn get(&self, name: &str) -> Option<&Node> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, node)| node)
    }

    fn include(&self, document: &Document) -> Document {
        let kept = document.iter().filter_map(|(name, value)| match self.get(name)? {
            Node::Leaf => Some((name.clone(), value.clone())),
            Node::Inner(inner) => Some((name.clone(), inner.include_in(value)?)),
        });
        kept.collect()
    }

    fn include_in(&self, value: &Bson) -> Option<Bson> {
        match value {
            Bson::Document(inside) => Some(self.include(inside).into()),
            Bson::Array(items) => Some(Bson::Array(items.iter().filter_map(|item| self.include_in(item)).collect())),
            _ => None,
        }
    }

    fn exclude(&self, document: &Document) -> Document {
        let kept = document.iter().filter_map(|(name, value)| match self.get(name) {
            None => Some((name.clone(), value.clone())),
            Some(Node::Leaf) => None,
            Some(Node::Inner(inner)) => Some((name.clone(), inner.exclude_in(value))),
        });
        kept.collect()
    }

    fn exclude_in(&self, value: &Bson) -> Bson {
        match value {
            Bson::Document(inside) => self.exclude(inside).into(),
            Bson::Array(items) => Bson::Array(items.iter().map(|item| self.exclude_in(item)).collect()),
            other => other.clone(),
        }
    }
}

/// One entry of a `$project`.
enum Entry {
    Include,
    Exclude,
    Computed(Bson),
}

/// The entries of a projection, with nested documents as paths.
fn entries(spec: &Document, prefix: &str, out: &mut Vec<(String, Entry)>) -> Result<()> {
    for (name, value) in spec {
        let path = format!("{prefix}{name}");
        let entry = match value {
            Bson::Boolean(flag) => Some(*flag),
            Bson::Int32(number) => Some(*number != 0),
            Bson::Int64(number) => Some(*number != 0),
            Bson::Double(number) => Some(*number != 0.0),
            Bson::Document(inner) if !is_operator(inner) && !inner.is_empty() => {
                entries(inner, &format!("{path}."), out)?;
                continue;
            }
            Bson::Document(inner) if inner.keys().any(|key| matches!(key.as_str(), "$elemMatch" | "$meta")) => {
                return Err(Failure::unknown(format_args!("the projection {value}")));
            }
            _ => None,
        };
        if path.ends_with(".$") {
            return Err(Failure::unknown("a positional projection"));
        }
        let entry = match entry {
            Some(true) => Entry::Include,
            Some(false) => Entry::Exclude,
            None => Entry::Computed(value.clone()),
        };
        out.push((path, entry));
    }
    Ok(())
}

fn is_operator(document: &Document) -> bool {
    document.keys().next().is_some_and(|name| name.starts_with('$'))
}

/// The documents after a `$project`, or after the projection of `find`.
pub fn project(spec: &Document, rows: Vec<Document>) -> Result<Vec<Document>> {
    let mut all = Vec::new();
    entries(spec, "", &mut all)?;
    if all.is_empty() {
        return Ok(rows);
    }
    let excludes = all.iter().all(|(path, entry)| matches!(entry, Entry::Exclude) || path == "_id")
        && all.iter().any(|(path, entry)| matches!(entry, Entry::Exclude) && (path != "_id" || all.len() == 1));
    let mut tree = Tree::default();
    // A projection of a field of the `_id` leaves out the others.
    let names_id = |path: &str| path == "_id" || path.starts_with("_id.");
    let keeps_id = !all.iter().any(|(path, entry)| names_id(path) && !matches!(entry, Entry::Computed(_)));
    if !excludes && keeps_id {
        tree.insert("_id");
    }
    for (path, entry) in &all {
        match entry {
            Entry::Include if !excludes => tree.insert(path),
            Entry::Exclude if excludes => tree.insert(path),
            Entry::Exclude if path != "_id" => {
                return Err(Failure::new(31254, "Cannot do exclusion in inclusion projection"));
            }
            _ => {}
        }
    }
    let one = |row: Document| {
        let mut out = if excludes { tree.exclude(&row) } else { tree.include(&row) };
        for (path, entry) in &all {
            if let Entry::Computed(value) = entry {
                put(&mut out, path, expression(value, &row)?);
            }
        }
        Ok(out)
    };
    rows.into_iter().map(one).collect()
}

/// The documents after `$set`.
pub fn set(spec: &Document, rows: Vec<Document>) -> Result<Vec<Document>> {
    let mut all = Vec::new();
    computed(spec, "", &mut all);
    let one = |row: Document| {
        let mut out = row.clone();
        for (path, value) in &all {
            put(&mut out, path, expression(value, &row)?);
        }
        Ok(out)
    };
    rows.into_iter().map(one).collect()
}

fn computed(spec: &Document, prefix: &str, out: &mut Vec<(String, Bson)>) {
    for (name, value) in spec {
        let path = format!("{prefix}{name}");
        match value {
            Bson::Document(inner) if !is_operator(inner) && !inner.is_empty() => {
                computed(inner, &format!("{path}."), out);
            }
            _ => out.push((path, value.clone())),
        }
    }
}

/// The documents after `$unset`.
pub fn unset(argument: &Bson, rows: &[Document]) -> Result<Vec<Document>> {
    let mut tree = Tree::default();
    match argument {
        Bson::String(path) => tree.insert(path),
        Bson::Array(paths) => paths.iter().filter_map(Bson::as_str).for_each(|path| tree.insert(path)),
        _ => return Err(Failure::new(31002, "$unset takes paths")),
    }
    Ok(rows.iter().map(|row| tree.exclude(row)).collect())
}

/// Puts a computed value at a path, in each element of the arrays on the way; a missing value removes the field.
fn put(document: &mut Document, path: &str, value: Value) {
    match path.split_once('.') {
        None => match value {
            Some(value) => drop(document.insert(path, value)),
            None => drop(document.remove(path)),
        },
        Some((first, rest)) => {
            let inside = document.entry(first.to_owned()).or_insert(Bson::Null);
            put_in(inside, rest, &value);
        }
    }
}

fn put_in(inside: &mut Bson, path: &str, value: &Value) {
    match inside {
        Bson::Document(document) => put(document, path, value.clone()),
        Bson::Array(items) => items.iter_mut().for_each(|item| put_in(item, path, value)),
        other => {
            let mut document = Document::new();
            put(&mut document, path, value.clone());
            *other = document.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_field_of_the_id_leaves_out_the_others() {
        let row = doc! {"_id": {"k": 1, "more": 2}, "n": 3};
        let projected = |spec: Document| project(&spec, vec![row.clone()]).ok();
        assert_eq!(projected(doc! {"_id.k": 1}), Some(vec![doc! {"_id": {"k": 1}}]));
        assert_eq!(projected(doc! {"n": 1}), Some(vec![row.clone()]));
    }
}
