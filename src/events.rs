//! The timeline of a deployment: who led when, what was wrong, what was done about it. Kept in a capped collection of the
//! state database, so that it outlives every process and never grows beyond its size.

use bson::{DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    mongo::{Connection, bounded},
};

/// The collection of events in the state database, shared by its deployments.
pub const COLLECTION: &str = "events";
/// Its size: some ten thousand events.
const BYTES: i64 = 4 << 20;
/// NamespaceExists
const NAMESPACE_EXISTS: i32 = 48;
/// DuplicateKey: it was written before, and the answer was lost.
const DUPLICATE_KEY: i32 = 11000;

/// Something that happened. It names rules and reasons, never a document's id or value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Tells it from all others.
    pub id: String,
    /// When, in milliseconds since 1970.
    pub time: i64,
    /// What: the name of a cause, which ends with `…_ended`; or `leader`, `leader_unknown`, `standby`, `stopped`, `lease_lost`,
    /// `config_reloaded`, `config_refused`, `backfill_started`, `backfill_done`.
    pub what: String,
    /// The rules that it concerns; all, where none is named.
    pub rules: Vec<String>,
    /// In a sentence.
    pub text: String,
    /// Where: host and process.
    pub instance: String,
}

impl Event {
    /// An event of this moment's making.
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

/// The name of this process among the instances of a deployment: its host and its number there.
#[must_use]
pub fn instance() -> String {
    instance_name(&host(), std::process::id().into())
}

/// The name of a process on a host.
#[must_use]
pub fn instance_name(host: &str, process: i64) -> String {
    format!("{host}:{process}")
}

/// The name of this machine, or of its container.
#[must_use]
pub fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// The kept timeline of one deployment.
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

    /// Makes the collection where there is none yet.
    pub async fn open(&self) -> Result<()> {
        let command = doc! {"create": COLLECTION, "capped": true, "size": BYTES};
        match self.connection.now().database(&self.database).run_command(command).await.map_err(Error::from) {
            Err(error) if error.code != Some(NAMESPACE_EXISTS) => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Appends. An event that was written before is left as it is, so that this may be repeated.
    pub async fn write(&self, events: &[Event]) -> Result<()> {
        let collection = self.connection.now().collection(&self.database, COLLECTION);
        for event in events {
            // One that comes late is a line in its place all the same: readers sort by time.
            match bounded(collection.insert_one(event.document(&self.deployment))).await {
                Err(error) if error.code != Some(DUPLICATE_KEY) => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// The last `limit` events since `since` (milliseconds since 1970), oldest first.
    pub async fn read(&self, since: i64, limit: i64) -> Result<Vec<Event>> {
        let filter = doc! {"deployment": &self.deployment, "time": {"$gte": DateTime::from_millis(since)}};
        let collection = self.connection.now().collection(&self.database, COLLECTION);
        // Newest first: a reader of the last few does not walk through all of them.
        let found = collection.find(filter).sort(doc! {"$natural": -1}).limit(limit);
        let documents: Vec<Document> = found.await?.try_collect().await?;
        let mut events: Vec<Event> = documents.iter().filter_map(Event::read).collect();
        events.sort_by(|a, b| (a.time, &a.id).cmp(&(b.time, &b.id)));
        Ok(events)
    }
}
