//! The changes of an update as the oplog describes them.

use bson::{Bson, Document, doc};

use crate::read::bytes;

/// Changed paths with their values, removed paths, and arrays that became shorter.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    pub set: Vec<(String, Bson)>,
    pub unset: Vec<String>,
    pub truncated: Vec<(String, usize)>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.unset.is_empty() && self.truncated.is_empty()
    }

    pub fn append(&mut self, other: Self) {
        self.set.extend(other.set);
        self.unset.extend(other.unset);
        self.truncated.extend(other.truncated);
    }

    fn under(self, prefix: &str, into: &mut Self) {
        let path = |path: String| format!("{prefix}.{path}");
        into.set.extend(self.set.into_iter().map(|(name, value)| (path(name), value)));
        into.unset.extend(self.unset.into_iter().map(path));
        let array = |name: String| if name.is_empty() { prefix.to_owned() } else { path(name) };
        into.truncated.extend(self.truncated.into_iter().map(|(name, size)| (array(name), size)));
    }

    /// The size that the oplog's form has, about.
    fn size(&self) -> i64 {
        let set = self.set.iter().map(|(name, value)| bytes(&doc! {name: value.clone()})).sum::<i64>();
        let names = self.unset.iter().map(|name| i64::try_from(name.len()).unwrap_or_default() + 3).sum::<i64>();
        set + names + 8 * i64::try_from(self.truncated.len()).unwrap_or_default()
    }
}

/// True if two values have the same bytes.
pub fn identical(a: &Bson, b: &Bson) -> bool {
    match (a, b) {
        (Bson::Double(a), Bson::Double(b)) => a.to_bits() == b.to_bits(),
        (Bson::Document(a), Bson::Document(b)) => same_documents(a, b),
        (Bson::Array(a), Bson::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| identical(a, b)),
        (a, b) => a == b,
    }
}

/// True if two documents have the same bytes.
pub fn same_documents(a: &Document, b: &Document) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|((n, a), (m, b))| n == m && identical(a, b))
}

/// The changes between two documents; none where the whole document is shorter.
pub fn between(before: &Document, after: &Document) -> Option<Changes> {
    let mut changes = Changes::default();
    let mut deleted: Vec<&String> = Vec::new();
    let (mut old, mut new) = (before.iter().peekable(), after.iter().peekable());
    while let (Some((old_name, old_value)), Some((new_name, new_value))) = (old.peek(), new.peek()) {
        if old_name == new_name {
            if !identical(old_value, new_value) {
                changed(new_name, old_value, new_value, &mut changes);
            }
            new.next();
        } else {
            deleted.push(old_name);
        }
        old.next();
    }
    for (name, value) in new {
        changes.set.push((name.clone(), value.clone()));
        deleted.retain(|deleted| *deleted != name);
    }
    deleted.extend(old.map(|(name, _)| name));
    changes.unset.extend(deleted.into_iter().cloned());
    (changes.size() <= bytes(after)).then_some(changes)
}

fn changed(name: &str, before: &Bson, after: &Bson, changes: &mut Changes) {
    let inner = match (before, after) {
        (Bson::Document(before), Bson::Document(after)) => between(before, after),
        (Bson::Array(before), Bson::Array(after)) => arrays(before, after),
        _ => None,
    };
    match inner {
        Some(inner) => inner.under(name, changes),
        None => changes.set.push((name.to_owned(), after.clone())),
    }
}

fn arrays(before: &[Bson], after: &[Bson]) -> Option<Changes> {
    let mut changes = Changes::default();
    for (nth, (before, after)) in before.iter().zip(after).enumerate() {
        if !identical(before, after) {
            changed(&nth.to_string(), before, after, &mut changes);
        }
    }
    for (nth, item) in after.iter().enumerate().skip(before.len()) {
        changes.set.push((nth.to_string(), item.clone()));
    }
    let whole = bytes(&doc! {"": after.to_vec()});
    if changes.size() > whole {
        return None;
    }
    if before.len() > after.len() {
        // Its own path is the empty one.
        changes.truncated.push((String::new(), after.len()));
    }
    Some(changes)
}
