//! What could not be written, and why: set aside, counted, and tried again.

use bson::{Bson, DateTime, Document, doc};

use crate::{
    error::{Error, Result},
    key::Key,
    mongo::Server,
    plan::Rule,
    request::Task,
};

/// The collection of dead letters in the state database.
pub const COLLECTION: &str = "dead_letters";

/// The dead letters of one deployment.
#[derive(Debug, Clone)]
pub struct DeadLetters {
    /// The state database.
    pub database: String,
    /// The deployment's name.
    pub deployment: String,
}

impl DeadLetters {
    /// Records that `key` of `rule` (or one `target` of it) cannot be read or written. Acknowledged by a majority: after
    /// that the position may pass the event.
    pub async fn record(
        &self,
        server: &Server,
        rule: &Rule,
        task: Task,
        key: &Key,
        target: Option<&Key>,
        error: &Error,
    ) -> Result<()> {
        let id = self.id(rule, task, key, target);
        let now = DateTime::now();
        let update = doc! {
            "$set": {"code": error.code, "reason": &error.message, "last": now},
            "$setOnInsert": {"deployment": &self.deployment, "rule": &rule.name, "first": now},
            "$inc": {"attempts": 1},
        };
        server.collection(&self.database, COLLECTION).update_one(doc! {"_id": id}, update).upsert(true).await?;
        Ok(())
    }

    /// Forgets what was recorded of `key`: it has been written.
    pub async fn clear(&self, server: &Server, rule: &Rule, task: Task, key: &Key, target: Option<&Key>) -> Result<()> {
        let id = self.id(rule, task, key, target);
        server.collection(&self.database, COLLECTION).delete_one(doc! {"_id": id}).await?;
        Ok(())
    }

    fn id(&self, rule: &Rule, task: Task, key: &Key, target: Option<&Key>) -> Document {
        let target = target.and_then(|id| id.values().first().cloned());
        doc! {
            "deployment": &self.deployment,
            "rule": &rule.name,
            "task": format!("{task:?}"),
            "key": key.values().to_vec(),
            "target": target.map_or_else(Vec::new, |id| vec![id]),
        }
    }

    /// The keys of `rule` that have a dead letter.
    pub async fn of_rule(&self, server: &Server, rule: &Rule) -> Result<Vec<Letter>> {
        use futures_util::TryStreamExt;
        let filter = doc! {"deployment": &self.deployment, "rule": &rule.name};
        let mut cursor = server.collection(&self.database, COLLECTION).find(filter).await?;
        let mut out = Vec::new();
        while let Some(letter) = cursor.try_next().await? {
            out.extend(Letter::read(&letter));
        }
        Ok(out)
    }
}

/// One dead letter, as far as trying it again needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Letter {
    /// What was being done.
    pub task: Task,
    /// With which key.
    pub key: Key,
    /// To which target, where one was found to be the culprit.
    pub target: Option<Key>,
    /// How often it was tried.
    pub attempts: u32,
    /// When it was last tried, in milliseconds since 1970.
    pub last: i64,
}

impl Letter {
    fn read(letter: &Document) -> Option<Self> {
        let id = letter.get_document("_id").ok()?;
        let task = match id.get_str("task").ok()? {
            "Value" => Task::Value,
            "Target" => Task::Target,
            "LocateSource" => Task::LocateSource,
            "LocateTarget" => Task::LocateTarget,
            "Holders" => Task::Holders,
            _ => return None,
        };
        let attempts =
            letter.get("attempts").and_then(|n| n.as_i32().map(i64::from).or(n.as_i64())).unwrap_or_default();
        Some(Self {
            task,
            key: Key::new(id.get_array("key").ok()?.clone()),
            target: id.get_array("target").ok()?.first().cloned().map(Key::one),
            attempts: u32::try_from(attempts).unwrap_or(u32::MAX),
            last: letter.get("last").and_then(Bson::as_datetime).map(|at| at.timestamp_millis()).unwrap_or_default(),
        })
    }
}
