//! One decoded change event.

use bson::{Bson, DateTime, Document, RawBsonRef, RawDocument, Timestamp};

use denormd_model::{namespace::Namespace, position::ClusterTime};
use denormd_mongo::error::{Error, Result};

/// The kinds of change that matter to rules.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A document was inserted: its reference fields.
    Insert(Document),
    /// A document was replaced: its reference fields after the change.
    Replace(Document),
    /// An update of these dotted paths, with array indexes as numbers. The empty path stands for the whole document.
    Update(Vec<String>),
    /// A document was deleted.
    Delete,
    /// The collection was dropped.
    Drop,
    /// The collection was renamed to this name, possibly replacing another one; `$out` ends with such an event.
    Rename(Namespace),
    /// The whole database was dropped.
    DropDatabase,
    /// An event that changes no document.
    Other,
}

/// One event of a change stream, with only the fields that routing needs.
#[derive(Debug, Clone, PartialEq)]
pub struct ChangeEvent {
    /// The affected collection. Its name is empty for `dropDatabase`.
    pub namespace: Namespace,
    /// The decoded change.
    pub change: Change,
    /// The document's `_id`; null for events about a whole collection.
    pub id: Bson,
    /// The reference fields before the change. None if the collection has no pre-images, or this one has expired.
    pub before: Option<Document>,
    /// Commit time, as cluster time.
    pub cluster_time: ClusterTime,
    /// Commit time, by the server's clock.
    pub wall_time: Option<DateTime>,
}

impl ChangeEvent {
    /// Decodes one event as the pipeline of [`crate::watch`] projects it
    /// (<https://www.mongodb.com/docs/manual/reference/change-events/>; `changed` is the pipeline's own).
    pub fn decode(raw: &RawDocument) -> Result<Self> {
        let mut fields = Fields::default();
        for field in raw {
            let (name, value) = field.map_err(|_| Error::internal("a change event is not valid BSON"))?;
            fields.take(name.as_str(), value)?;
        }
        let document = |raw: Option<&RawDocument>| {
            let document = raw.map(Document::try_from).transpose();
            document.map_err(|_| Error::internal("a document of a change event is not valid BSON"))
        };
        let change = match fields.operation {
            // The empty path stands for the whole document: anything may have changed.
            "insert" | "replace" | "update" if fields.unread => Change::Update(vec![String::new()]),
            "insert" => Change::Insert(document(fields.now)?.unwrap_or_default()),
            "replace" => Change::Replace(document(fields.now)?.unwrap_or_default()),
            "update" => Change::Update(fields.changed),
            "delete" => Change::Delete,
            "drop" => Change::Drop,
            "rename" => Change::Rename(namespace(fields.to)),
            "dropDatabase" => Change::DropDatabase,
            _ => Change::Other,
        };
        let id = fields.key.map_or(Ok(None), |key| key.get("_id"));
        let id = id.and_then(|id| id.map_or(Ok(Bson::Null), Bson::try_from));
        Ok(Self {
            namespace: namespace(fields.namespace),
            change,
            id: id.map_err(|_| Error::internal("the _id of a change event is not valid BSON"))?,
            before: document(fields.before)?,
            cluster_time: fields.cluster_time.map(ClusterTime::from).unwrap_or_default(),
            wall_time: fields.wall_time,
        })
    }
}

/// The fields of an event, read in one pass.
#[derive(Default)]
struct Fields<'a> {
    operation: &'a str,
    namespace: Option<&'a RawDocument>,
    to: Option<&'a RawDocument>,
    key: Option<&'a RawDocument>,
    now: Option<&'a RawDocument>,
    before: Option<&'a RawDocument>,
    changed: Vec<String>,
    unread: bool,
    cluster_time: Option<Timestamp>,
    wall_time: Option<DateTime>,
}

impl<'a> Fields<'a> {
    /// Takes a field. Another type than expected is an error, because a change that is not understood would be lost. The server
    /// sends null for an image that it does not have.
    fn take(&mut self, name: &str, value: RawBsonRef<'a>) -> Result<()> {
        let unreadable = || Error::internal(format!("`{name}` of a change event cannot be read"));
        let document = || value.as_document().map(Some).ok_or_else(unreadable);
        let image = || if value == RawBsonRef::Null { Ok(None) } else { document() };
        match name {
            "operationType" => self.operation = value.as_str().ok_or_else(unreadable)?,
            "ns" => self.namespace = document()?,
            "to" => self.to = document()?,
            "documentKey" => self.key = document()?,
            "fullDocument" => self.now = image()?,
            "fullDocumentBeforeChange" => self.before = image()?,
            "changed" => {
                let path = |path: RawBsonRef<'_>| path.as_str().map(ToOwned::to_owned);
                let paths = value.as_array().ok_or_else(unreadable)?.into_iter();
                // A name that is not UTF-8 may be a part of any path: the empty path stands for the whole document.
                self.changed = paths.map(|one| one.ok().and_then(path).unwrap_or_default()).collect();
            }
            "unread" => self.unread = value.as_bool().ok_or_else(unreadable)?,
            "clusterTime" => self.cluster_time = Some(value.as_timestamp().ok_or_else(unreadable)?),
            "wallTime" => self.wall_time = Some(value.as_datetime().ok_or_else(unreadable)?),
            _ => {}
        }
        Ok(())
    }
}

fn namespace(ns: Option<&RawDocument>) -> Namespace {
    let part = |name: &str| ns.and_then(|ns| ns.get_str(name).ok()).unwrap_or_default().to_owned();
    Namespace { database: part("db"), collection: part("coll") }
}

#[cfg(test)]
mod tests {
    use bson::{RawDocumentBuf, Timestamp, doc};

    use super::*;

    #[test]
    fn an_update_names_the_paths_that_changed() {
        let event = doc! {
            "_id": {"_data": "82"}, "operationType": "update", "clusterTime": Timestamp { time: 5, increment: 2 },
            "ns": {"db": "shop", "coll": "parts"}, "documentKey": {"_id": 7}, "changed": ["name", "a.0.b"],
        };
        let decoded = ChangeEvent::decode(&RawDocumentBuf::try_from(&event).unwrap()).unwrap();
        assert_eq!(decoded.namespace.to_string(), "shop.parts");
        assert_eq!(decoded.change, Change::Update(vec!["name".to_owned(), "a.0.b".to_owned()]));
        assert_eq!(decoded.id, Bson::Int32(7));
        assert_eq!(decoded.cluster_time, ClusterTime { seconds: 5, increment: 2 });
    }

    /// Such an event once counted as a change of nothing.
    #[test]
    fn a_change_that_cannot_be_read_is_an_error() {
        let update = doc! {"operationType": "update", "ns": {"db": "shop", "coll": "parts"}, "documentKey": {"_id": 7}};
        let decode = |field: &str, value: Bson| {
            let mut event = update.clone();
            event.insert(field, value);
            ChangeEvent::decode(&RawDocumentBuf::try_from(&event).unwrap())
        };
        let error = decode("changed", "name".into()).unwrap_err();
        assert_eq!(error.message, "`changed` of a change event cannot be read");
        for (field, value) in [
            ("operationType", Bson::Null),
            ("documentKey", 7.into()),
            ("fullDocument", 7.into()),
            ("changed", Bson::Null),
        ] {
            decode(field, value).unwrap_err();
        }
        let decoded = decode("fullDocumentBeforeChange", Bson::Null).unwrap();
        assert_eq!(decoded.before, None);
        let decoded = decode("changed", Bson::Array(vec!["name".into(), Bson::Null])).unwrap();
        assert_eq!(decoded.change, Change::Update(vec!["name".to_owned(), String::new()]));
    }
}
