//! The timeline of a deployment: changes of leader, problems, and actions taken. It is kept in a capped collection of
//! the state database, so it outlives every process and its size is bounded.

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};

use denormd_mongo::{Connection, bounded, code, error::Result, unless};

/// The collection of events in the state database, shared by its deployments.
pub const COLLECTION: &str = "events";
/// Size of the capped collection: about ten thousand events.
const BYTES: i64 = 4 << 20;

/// A timeline entry. It names rules and reasons, never a document's id or value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Unique identifier.
    pub id: String,
    /// Time of the event, in milliseconds since 1970.
    pub time: i64,
    /// Kind of event: the name of a cause, with `…_ended` when it ends; or `leader`, `leader_unknown`, `standby`,
    /// `stopped`, `did_not_run`, `lease_lost`, `config_reloaded`, `config_refused`, `backfill_started`, `backfill_done`;
    /// or `unreadable`.
    pub what: String,
    /// The rules concerned; an empty list means all.
    pub rules: Vec<String>,
    /// Description in one sentence.
    pub text: String,
    /// The reporting instance: host and process.
    pub instance: String,
}

impl Event {
    /// An event with a new id and an empty instance.
    #[must_use]
    pub fn new(time: i64, what: &str, rules: Vec<String>, text: String) -> Self {
        Self { id: ObjectId::new().to_hex(), time, what: what.to_owned(), rules, text, instance: String::new() }
    }

    fn document(&self, deployment: &str) -> Result<Document> {
        let Self { id, time, what, rules, text, instance } = self.clone();
        let (deployment, time) = (deployment.to_owned(), DateTime::from_millis(time));
        Ok(bson::serialize_to_document(&Stored { id, deployment, time, what, rules, text, instance })?)
    }

    /// An event that cannot be read is still one: the timeline says that there was something.
    fn read(document: &Document) -> Self {
        match bson::deserialize_from_document(document.clone()) {
            Ok(Stored { id, time, what, rules, text, instance, .. }) => {
                Self { id, time: time.timestamp_millis(), what, rules, text, instance }
            }
            Err(error) => {
                let id = document.get("_id").cloned().unwrap_or(Bson::Null).into_relaxed_extjson();
                let time = document.get_datetime("time").map(|time| time.timestamp_millis()).unwrap_or_default();
                let text = format!("the event with the `_id` {id} cannot be read: {error}");
                Self { id: id.to_string(), ..Self::new(time, "unreadable", Vec::new(), text) }
            }
        }
    }
}

/// The stored form of an event.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(rename = "_id")]
    id: String,
    #[serde(rename = "deployment")]
    deployment: String,
    #[serde(rename = "time")]
    time: DateTime,
    #[serde(rename = "what")]
    what: String,
    #[serde(rename = "rules")]
    rules: Vec<String>,
    #[serde(rename = "text")]
    text: String,
    #[serde(rename = "instance")]
    instance: String,
}

/// The persisted timeline of one deployment.
#[derive(Debug)]
pub struct Journal {
    connection: Connection,
    database: String,
    deployment: String,
}

impl Journal {
    /// The timeline of `deployment` in the state database.
    #[must_use]
    pub fn new(connection: impl Into<Connection>, database: &str, deployment: &str) -> Self {
        Self { connection: connection.into(), database: database.to_owned(), deployment: deployment.to_owned() }
    }

    /// Creates the collection if it does not exist.
    pub async fn open(&self) -> Result<()> {
        let command = doc! {"create": COLLECTION, "capped": true, "size": BYTES};
        let created = self.connection.now().database(&self.database).run_command(command).await;
        unless(code::NAMESPACE_EXISTS, created).map(drop)
    }

    /// Appends events. An event that exists already is left unchanged, so this may be repeated.
    pub async fn write(&self, events: &[Event]) -> Result<()> {
        let collection = self.connection.now().collection(&self.database, COLLECTION);
        for event in events {
            // A late event may be inserted out of order: readers sort by time.
            unless(code::DUPLICATE_KEY, bounded(collection.insert_one(event.document(&self.deployment)?)).await)?;
        }
        Ok(())
    }

    /// The last `limit` events since `since` (milliseconds since 1970), oldest first.
    pub async fn read(&self, since: i64, limit: i64) -> Result<Vec<Event>> {
        let filter = doc! {"deployment": &self.deployment, "time": {"$gte": DateTime::from_millis(since)}};
        let collection = self.connection.now().collection(&self.database, COLLECTION);
        // Newest first, so that reading the last few events does not scan all of them.
        let found = collection.find(filter).sort(doc! {"$natural": -1}).limit(limit);
        let documents: Vec<Document> = found.await?.try_collect().await?;
        let mut events: Vec<Event> = documents.iter().map(Event::read).collect();
        events.sort_by(|a, b| (a.time, &a.id).cmp(&(b.time, &b.id)));
        Ok(events)
    }
}
