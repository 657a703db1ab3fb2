//! The oplog: what happened, in order, each with its cluster time.

use std::collections::BTreeMap;

use bson::{Bson, Document, Timestamp, doc};

use crate::{
    diff::Changes,
    state::{Meta, Model, State},
};

/// The values of a field, each with the cluster time of the change after which it held.
pub type FieldHistory = Vec<(Timestamp, Option<Bson>)>;

/// One change.
#[derive(Debug, Clone)]
pub struct Entry {
    pub time: Timestamp,
    /// Its place among the entries of one transaction, which share a time.
    pub nth: u32,
    /// The number of the transaction that it is part of.
    pub transaction: Option<i64>,
    /// The wall clock, in milliseconds since 1970.
    pub wall: i64,
    pub database: String,
    pub collection: String,
    pub change: Change,
}

#[derive(Debug, Clone)]
pub enum Change {
    Noop,
    Insert(Document),
    Replace {
        document: Document,
        before: Option<Document>,
    },
    Update {
        id: Bson,
        changes: Changes,
        before: Option<Document>,
    },
    Delete {
        id: Bson,
        before: Option<Document>,
    },
    Create,
    Drop,
    Rename {
        to: (String, String),
    },
    DropDatabase,
    /// `collMod` and indexes.
    Modify,
}

impl Entry {
    pub fn start(time: Timestamp, wall: i64) -> Self {
        let (database, collection) = (String::new(), String::new());
        Self { time, nth: 0, transaction: None, wall, database, collection, change: Change::Noop }
    }

    /// The `_id` of the document that it changes.
    pub fn id(&self) -> Option<&Bson> {
        match &self.change {
            Change::Insert(document) | Change::Replace { document, .. } => document.get("_id"),
            Change::Update { id, .. } | Change::Delete { id, .. } => Some(id),
            _ => None,
        }
    }

    /// A document of `local.oplog.rs`.
    pub fn document(&self) -> Document {
        let (op, object) = match &self.change {
            Change::Noop => ("n", Document::new()),
            Change::Insert(document) => ("i", document.clone()),
            Change::Replace { document, .. } => ("u", document.clone()),
            Change::Update { .. } => ("u", doc! {"$v": 2}),
            Change::Delete { id, .. } => ("d", doc! {"_id": id.clone()}),
            _ => ("c", Document::new()),
        };
        let namespace = format!("{}.{}", self.database, self.collection);
        let wall = bson::DateTime::from_millis(self.wall);
        doc! {"op": op, "ns": namespace, "o": object, "ts": self.time, "t": 1_i64, "v": 2_i64, "wall": wall}
    }
}

impl Model {
    /// The majority-committed changes of a database, in a form to read.
    #[must_use]
    pub fn changes(&self, database: &str) -> Vec<String> {
        let state = self.state();
        let entries = state.oplog[..state.committed_length()].iter().filter(|entry| entry.database == database);
        entries.map(|entry| format!("{}.{} {:?}", entry.time.time, entry.time.increment, entry.document())).collect()
    }

    /// The values of a top-level field after each majority-committed change of a document, in order, by `_id`. None where
    /// the document was deleted or lacks the field.
    #[must_use]
    pub fn values(&self, database: &str, collection: &str, field: &str) -> BTreeMap<String, Vec<Option<Bson>>> {
        let histories = self.field_histories(database, collection, field).into_iter();
        histories.map(|(id, (_, values))| (id, values.into_iter().map(|(_, value)| value).collect())).collect()
    }

    /// The history of a top-level field in each document, by `_id` as text, with the `_id` itself.
    #[must_use]
    pub fn field_histories(
        &self,
        database: &str,
        collection: &str,
        field: &str,
    ) -> BTreeMap<String, (Bson, FieldHistory)> {
        let state = self.state();
        let mut values: BTreeMap<String, (Bson, FieldHistory)> = BTreeMap::new();
        for entry in &state.oplog[..state.committed_length()] {
            let Some(id) = entry.id().filter(|_| entry.database == database && entry.collection == collection) else {
                continue;
            };
            let (_, values) = values.entry(id.to_string()).or_insert_with(|| (id.clone(), Vec::new()));
            let value = match &entry.change {
                Change::Insert(document) | Change::Replace { document, .. } => document.get(field).cloned(),
                Change::Update { changes, .. } if changes.unset.iter().any(|path| path == field) => None,
                Change::Update { changes, .. } => {
                    let set = changes.set.iter().find(|(path, _)| path == field).map(|(_, value)| value);
                    set.or_else(|| values.last()?.1.as_ref()).cloned()
                }
                _ => None,
            };
            values.push((entry.time, value));
        }
        values
    }

    /// The number of majority-committed updates of each document up to a time, by `_id`.
    #[must_use]
    pub fn updates(&self, database: &str, collection: &str, until: Timestamp) -> BTreeMap<String, usize> {
        let state = self.state();
        let mut updates: BTreeMap<String, usize> = BTreeMap::new();
        for entry in state.oplog[..state.committed_length()].iter().filter(|entry| entry.time <= until) {
            let is_there = entry.database == database && entry.collection == collection;
            if is_there && let (Change::Update { .. } | Change::Replace { .. }, Some(id)) = (&entry.change, entry.id())
            {
                *updates.entry(id.to_string()).or_default() += 1;
            }
        }
        updates
    }

    /// Majority-committed updates that set nothing but one of these paths, right after another update of the document that set the
    /// same one. After a change by somebody else, or where another collection has been renamed to this one's name, whatever else the
    /// update sets may already be there. Each has the document's changes before it.
    #[must_use]
    pub fn alone(&self, database: &str, paths: &[&str]) -> Vec<String> {
        let state = self.state();
        let mut before: BTreeMap<(&str, String), Vec<&Entry>> = BTreeMap::new();
        let mut found = Vec::new();
        for entry in state.oplog[..state.committed_length()].iter().filter(|entry| entry.database == database) {
            let Some(id) = entry.id() else {
                if matches!(entry.change, Change::Drop | Change::DropDatabase | Change::Rename { .. }) {
                    before.clear();
                }
                continue;
            };
            let before = before.entry((entry.collection.as_str(), id.to_string())).or_default();
            let sets = |entry: &Entry, wanted: &str| match &entry.change {
                Change::Update { changes, .. } => changes.set.iter().any(|(path, _)| path == wanted),
                _ => false,
            };
            if let Change::Update { changes, .. } = &entry.change
                && let [(path, _)] = changes.set.as_slice()
                && paths.contains(&path.as_str())
                && changes.unset.is_empty()
                && changes.truncated.is_empty()
                && before.last().is_some_and(|before| sets(before, path))
            {
                found.push(format!("{} {id}: {entry:?} after {before:?}", entry.collection));
            }
            before.push(entry);
        }
        found
    }
}

impl State {
    pub fn emit(&mut self, namespace: &str, change: Change) {
        let (database, collection) = namespace.split_once('.').unwrap_or((namespace, ""));
        let (database, collection) = (database.to_owned(), collection.to_owned());
        let (time, wall) = (self.last, self.millis());
        let entry = Entry { time, nth: 0, transaction: None, wall, database, collection, change };
        match &mut self.buffered {
            Some(buffered) => buffered.push(entry),
            None => self.append(vec![entry]),
        }
    }

    /// Appends entries that share a time.
    pub fn append(&mut self, entries: Vec<Entry>) {
        let seconds = u32::try_from(self.millis() / 1000).unwrap_or_default();
        self.time = if seconds > self.time.time {
            Timestamp { time: seconds, increment: 1 }
        } else {
            Timestamp { increment: self.time.increment + 1, ..self.time }
        };
        self.last = self.time;
        for (nth, mut entry) in (0..).zip(entries) {
            (entry.time, entry.nth) = (self.last, nth);
            self.oplog.push(entry);
        }
    }

    pub fn noop(&mut self) {
        self.append(vec![Entry::start(self.last, self.millis())]);
    }

    /// Creates a collection unless it exists.
    pub fn create(&mut self, namespace: &str, options: Document) {
        if self.collections.contains_key(namespace) {
            return;
        }
        let uuid = self.uuid();
        let indexes = vec![doc! {"v": 2, "key": {"_id": 1}, "name": "_id_"}];
        self.collections.insert(namespace.to_owned(), Meta { uuid, options, indexes });
        self.data.insert(namespace.to_owned(), Vec::new());
        self.emit(namespace, Change::Create);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An update of a document in another collection, which had been renamed to this one's name, once counted.
    #[test]
    fn a_time_alone_is_told_from_one_in_a_collection_of_the_same_name() {
        let times = |between: Option<Change>| {
            let model = Model::new(1);
            let update = |path: &str| {
                let changes = Changes { set: vec![(path.to_owned(), true.into())], ..Changes::default() };
                Change::Update { id: 1.into(), changes, before: None }
            };
            {
                let mut state = model.state();
                state.emit("d.c", update("stamp"));
                if let Some(change) = between {
                    state.emit("d.c", change);
                }
                state.emit("d.c", update("stamp"));
                state.emit("d.c", update("seen"));
            }
            model.alone("d", &["stamp", "seen"]).len()
        };
        assert_eq!(times(None), 1);
        assert_eq!(times(Some(Change::Replace { document: doc! {"_id": 1}, before: None })), 0);
        assert_eq!(times(Some(Change::Rename { to: ("d".to_owned(), "c".to_owned()) })), 0);
    }
}
