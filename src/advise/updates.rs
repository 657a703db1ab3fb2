//! Update rates of collections and fields, from a change stream that starts at the oldest oplog entry. It fetches only
//! the names of changed fields.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Document, RawDocument, Timestamp, doc};
use mongodb::options::CursorType;
use tokio::time::Instant;

use denormd_model::{
    field_path::FieldPath,
    namespace::Namespace,
    position::{ClusterTime, token_time},
};
use denormd_mongo::{
    code,
    error::{Error, Kind, Result},
};
use denormd_rules::config::Advise;

use futures_util::StreamExt;

use super::ask::Ask;
use denormd_model::distribution::{Known, Unknown};

/// Maximum number of different fields to count per collection.
const FIELDS: usize = 1000;
/// Maximum time for the server to wait for more events, per batch.
const WAIT: Duration = Duration::from_millis(200);
const BATCH: u32 = 10_000;
/// Start times to try if the oplog cannot be read, in seconds before its end: a month, a week, a day, six hours, an
/// hour, ten minutes, one.
const REACHES: [u32; 7] = [30 * 86_400, 7 * 86_400, 86_400, 6 * 3600, 3600, 600, 60];

/// The changes read from the oplog.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// Start of the covered period, in seconds since 1970.
    pub from: u32,
    /// End of the covered period, in seconds since 1970.
    pub to: u32,
    /// The end of the oplog when reading began, in seconds since 1970.
    pub end: u32,
    /// Number of change events.
    pub events: u64,
    /// The changes, by collection.
    pub collections: BTreeMap<Namespace, Changes>,
}

/// The changes of one collection.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    /// Number of inserted documents.
    pub inserts: u64,
    /// Number of updates.
    pub updates: u64,
    /// Number of replaced documents.
    pub replaces: u64,
    /// Number of deleted documents.
    pub deletes: u64,
    /// Number of updates by field; array indexes are `$[]`.
    pub fields: BTreeMap<String, u64>,
}

impl History {
    /// Length of the covered period, in seconds.
    #[must_use]
    pub fn seconds(&self) -> u32 {
        self.to.saturating_sub(self.from)
    }

    /// True if it covers the oplog up to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.to >= self.end
    }

    /// The changes of a collection; zero if there were none.
    #[must_use]
    pub fn of(&self, namespace: &Namespace) -> Changes {
        self.collections.get(namespace).cloned().unwrap_or_default()
    }

    fn take(&mut self, event: &RawDocument) {
        let text = |name: &str| event.get_str(name).unwrap_or_default();
        let part = |name: &str| {
            let ns = event.get_document("ns").ok();
            ns.and_then(|ns| ns.get_str(name).ok()).unwrap_or_default().to_owned()
        };
        self.events += 1;
        let changes = self.collections.entry(Namespace { database: part("db"), collection: part("coll") }).or_default();
        match text("operationType") {
            "insert" => changes.inserts += 1,
            "replace" => changes.replaces += 1,
            "delete" => changes.deletes += 1,
            "update" => {
                let paths = event.get_array("changed").ok().into_iter().flatten().filter_map(std::result::Result::ok);
                let paths: BTreeSet<String> = paths.filter_map(|path| path.as_str().map(general)).collect();
                changes.update(paths);
            }
            _ => {}
        }
    }
}

impl Changes {
    /// Counts one update of these fields.
    fn update(&mut self, paths: BTreeSet<String>) {
        self.updates += 1;
        for path in paths {
            if let Some(times) = self.fields.get_mut(&path) {
                *times += 1;
            } else if self.fields.len() < FIELDS {
                self.fields.insert(path, 1);
            }
        }
    }

    /// The number of changes that may have affected a field: updates of the field, of its parents or of its children,
    /// and replacements of the document.
    #[must_use]
    pub fn of_field(&self, path: &FieldPath) -> u64 {
        let touching = self
            .fields
            .iter()
            .filter(|(changed, _)| FieldPath::parse(changed).is_ok_and(|changed| changed.overlaps_loosely(path)));
        self.replaces + touching.map(|(_, times)| times).sum::<u64>()
    }

    /// The total number of changes.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.inserts + self.updates + self.replaces + self.deletes
    }
}

/// Replaces array indexes: `parts.$[].name` for `parts.12.name`.
fn general(path: &str) -> String {
    let parts = path.split('.').enumerate().map(|(nth, part)| {
        let index = nth > 0 && !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if index { "$[]" } else { part }
    });
    parts.collect::<Vec<_>>().join(".")
}

/// Reads the oplog from its oldest entry, within the limits of time and number of events.
pub async fn history(ask: &Ask, namespaces: &[Namespace], bounds: &Advise) -> Result<Known<History>> {
    let now = ask.client().database("admin").run_command(doc! {"hello": 1}).await?;
    let Ok(end) = now.get_timestamp("operationTime") else {
        return Ok(Err(Unknown("the server reports no operation time".to_owned())));
    };
    let mut refused = Unknown("the oplog does not reach back one minute".to_owned());
    for from in starts(ask, end.time).await? {
        match read(ask, namespaces, from, end, bounds).await {
            Ok(history) => return Ok(Ok(history)),
            Err(error) if error.kind == Kind::HistoryLost || is_overtaken(&error) => {}
            Err(error) if error.kind == Kind::Privilege => {
                refused = Unknown(
                    "needs the privilege changeStream on all databases (or on each that is looked at)".to_owned(),
                );
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Err(refused))
}

/// The times to start reading from, the earliest first.
async fn starts(ask: &Ask, end: u32) -> Result<Vec<u32>> {
    let oplog = ask.client().database("local").collection::<Document>("oplog.rs");
    let oldest = oplog.find_one(doc! {}).sort(doc! {"$natural": 1}).projection(doc! {"_id": 0, "ts": 1}).await;
    let oldest = match oldest.map_err(Error::from) {
        Ok(entry) => entry.and_then(|entry| entry.get_timestamp("ts").ok()).map(|ts| ts.time),
        // Reading the oplog takes a separate privilege. Without it, opening change streams shows how far back it
        // reaches.
        Err(error) if matches!(error.kind, Kind::Privilege | Kind::Refused) || is_overtaken(&error) => None,
        Err(error) => return Err(error),
    };
    let tried = REACHES.iter().map(|reach| end.saturating_sub(*reach));
    Ok(match oldest {
        // The oldest entry may be gone a moment later.
        Some(oldest) => [oldest, oldest + 1].into_iter().chain(tried.filter(|start| *start > oldest)).collect(),
        None => tried.collect(),
    })
}

/// True if the server has truncated the oplog past the entry that was to be read next. Reading begins with the oldest
/// entries, and they are the first to go.
fn is_overtaken(error: &Error) -> bool {
    error.code == Some(code::CAPPED_POSITION_LOST)
}

async fn read(ask: &Ask, namespaces: &[Namespace], from: u32, end: Timestamp, bounds: &Advise) -> Result<History> {
    let databases: BTreeSet<&str> = namespaces.iter().map(|ns| ns.database.as_str()).collect();
    let mut whole = History { from, to: end.time, end: end.time, ..History::default() };
    for database in databases {
        let history = read_database(ask, database, namespaces, from, end, bounds).await?;
        whole.events += history.events;
        whole.to = whole.to.min(history.to);
        whole.collections.extend(history.collections);
    }
    Ok(whole)
}

async fn read_database(
    ask: &Ask,
    database: &str,
    namespaces: &[Namespace],
    from: u32,
    end: Timestamp,
    bounds: &Advise,
) -> Result<History> {
    let names: Vec<&str> =
        namespaces.iter().filter(|ns| ns.database == database).map(|ns| ns.collection.as_str()).collect();
    let pipeline = vec![
        doc! {"$changeStream": {"startAtOperationTime": Timestamp { time: from, increment: 1 }}},
        doc! {"$match": {"ns.coll": {"$in": names}, "operationType": {"$in": ["insert", "update", "replace", "delete"]}}},
        doc! {"$project": {
            "operationType": 1, "ns": 1, "clusterTime": 1,
            "changed": {"$concatArrays": [
                {"$map": {"input": {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}, "in": "$$this.k"}},
                {"$ifNull": ["$updateDescription.removedFields", []]},
                {"$map": {"input": {"$ifNull": ["$updateDescription.truncatedArrays", []]}, "in": "$$this.field"}},
            ]},
        }},
    ];
    let command = doc! {"aggregate": 1, "pipeline": pipeline, "cursor": {"batchSize": 0}};
    let database = ask.client().database(database);
    let opened =
        database.run_cursor_command(command).cursor_type(CursorType::TailableAwait).batch_size(BATCH).max_time(WAIT);
    let mut cursor = Box::pin(opened.batch().into_future()).await?;
    let mut history = History { from, to: from, end: end.time, ..History::default() };
    let started = Instant::now();
    while started.elapsed() < bounds.history && history.events < bounds.history_events {
        let Some(batch) = cursor.next().await.transpose()? else { break };
        for event in batch.doc_slices()? {
            let event = event.map_err(Error::from)?;
            let Some(event) = event.as_document() else { continue };
            let time = event.get_timestamp("clusterTime").map(|ts| ts.time).unwrap_or_default();
            history.take(event);
            history.to = history.to.max(time);
        }
        let reached = batch.as_raw_document().get_document("cursor").ok();
        let reached = reached.and_then(|cursor| cursor.get_document("postBatchResumeToken").ok());
        let reached = reached.and_then(|token| Document::try_from(token.to_owned()).ok());
        if let Some(time) = reached.as_ref().and_then(token_time) {
            history.to = history.to.max(time.seconds);
            if time >= ClusterTime::from(end) {
                history.to = end.time;
                break;
            }
        }
    }
    Ok(history)
}

/// The history as JSON, for programs.
#[must_use]
pub fn json(history: &History) -> serde_json::Value {
    let changes = |(namespace, changes): (&Namespace, &Changes)| {
        let value = serde_json::json!({
            "inserts": changes.inserts, "updates": changes.updates, "replaces": changes.replaces,
            "deletes": changes.deletes, "fields": changes.fields,
        });
        (namespace.to_string(), value)
    };
    serde_json::json!({
        "seconds": history.seconds(), "complete": history.is_complete(), "events": history.events,
        "collections": history.collections.iter().map(changes).collect::<serde_json::Map<_, _>>(),
    })
}

/// Formats a time, given in seconds since 1970, as RFC 3339.
#[must_use]
pub fn moment(seconds: u32) -> String {
    bson::DateTime::from_millis(i64::from(seconds) * 1000).try_to_rfc3339_string().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use bson::rawdoc;

    use super::*;

    #[test]
    fn an_update_counts_once_for_each_field_that_it_touches() {
        let mut history = History::default();
        let ns = rawdoc! {"db": "shop", "coll": "parts"};
        for changed in [vec!["qty"], vec!["qty", "tags.0", "tags.1"], vec!["at.x"]] {
            let changed: Vec<bson::RawBson> =
                changed.into_iter().map(|path| bson::RawBson::String(path.to_owned())).collect();
            history.take(&rawdoc! {"operationType": "update", "ns": ns.clone(), "changed": bson::RawArrayBuf::from_iter(changed)});
        }
        history.take(&rawdoc! {"operationType": "replace", "ns": ns.clone()});
        history.take(&rawdoc! {"operationType": "insert", "ns": ns});
        let changes = history.of(&Namespace { database: "shop".to_owned(), collection: "parts".to_owned() });
        let of = |path: &str| changes.of_field(&FieldPath::parse(path).unwrap());
        assert_eq!((changes.inserts, changes.updates, changes.replaces, changes.all()), (1, 3, 1, 5));
        assert_eq!(of("qty"), 3, "two updates and the replaced document");
        assert_eq!(of("tags"), 2, "one update, whatever it did to the array, and the replaced document");
        assert_eq!(of("at"), 2);
        assert_eq!(of("name"), 1);
    }

    #[test]
    fn indexes_of_arrays_are_each() {
        for (path, general_path) in [("a.0.b", "a.$[].b"), ("a", "a"), ("7.x", "7.x"), ("a.10", "a.$[]")] {
            assert_eq!(general(path), general_path);
        }
    }
}
