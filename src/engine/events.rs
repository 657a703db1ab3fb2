//! The timeline of a deployment: changes of leader, problems, and actions taken. It is kept in a capped collection of
//! the state database, so it outlives every process and its size is bounded.

use bson::{DateTime, Document, doc, oid::ObjectId};
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
    /// `stopped`, `did_not_run`, `lease_lost`, `config_reloaded`, `config_refused`, `backfill_started`, `backfill_done`.
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

    fn document(&self, deployment: &str) -> Document {
        doc! {
            "_id": &self.id, "deployment": deployment, "time": DateTime::from_millis(self.time), "what": &self.what,
            "rules": &self.rules, "text": &self.text, "instance": &self.instance,
        }
    }

    fn read(doc: &Document) -> Option<Self> {
        let text = |name: &str| doc.get_str(name).ok().map(ToOwned::to_owned);
        let rules = doc.get_array("rules").map(Vec::as_slice).unwrap_or_default();
        Some(Self {
            id: text("_id")?,
            time: doc.get_datetime("time").ok()?.timestamp_millis(),
            what: text("what")?,
            rules: rules.iter().filter_map(|rule| rule.as_str().map(ToOwned::to_owned)).collect(),
            text: text("text")?,
            instance: text("instance").unwrap_or_default(),
        })
    }
}

/// The name of this process among the instances of a deployment: its host and its process id.
#[must_use]
pub fn instance() -> String {
    instance_name(&host(), std::process::id().into())
}

/// The name of a process on a host.
#[must_use]
pub fn instance_name(host: &str, process: i64) -> String {
    format!("{host}:{process}")
}

/// Host name of this machine or container.
#[must_use]
pub fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
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
            unless(code::DUPLICATE_KEY, bounded(collection.insert_one(event.document(&self.deployment))).await)?;
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
        let mut events: Vec<Event> = documents.iter().filter_map(Event::read).collect();
        events.sort_by(|a, b| (a.time, &a.id).cmp(&(b.time, &b.id)));
        Ok(events)
    }
}
