//! What could not be written, and why: set aside, counted, and tried again.

use std::time::Duration;

use bson::{DateTime, Document, doc};
use futures_util::TryStreamExt;

use crate::{
    error::{Error, Result},
    key::Key,
    mongo::{Server, bounded},
    plan::Rule,
    request::{Request, Scope, Task},
};

/// The collection of dead letters in the state database.
pub const COLLECTION: &str = "dead_letters";

/// What cannot be read or written.
#[derive(Debug)]
pub struct Culprit<'a> {
    /// A key of the rule.
    pub key: &'a Key,
    /// One target of it.
    pub target: Option<&'a Key>,
    /// The path where the target's shape is in the way.
    pub path: Option<String>,
}

/// The dead letters of one deployment.
#[derive(Debug, Clone)]
pub struct DeadLetters {
    /// The state database.
    pub database: String,
    /// The deployment's name.
    pub deployment: String,
}

impl DeadLetters {
    /// Records that what `culprit` says of `rule` cannot be read or written. Acknowledged by a majority: after
    /// that the position may pass the event.
    pub async fn record(
        &self,
        server: &Server,
        rule: &Rule,
        task: Task,
        culprit: &Culprit<'_>,
        error: &Error,
    ) -> Result<()> {
        let id = self.id(rule, task, culprit.key, culprit.target);
        let now = DateTime::now();
        let update = doc! {
            "$set": {"code": error.code, "reason": &error.message, "path": &culprit.path, "last": now},
            "$setOnInsert": {"deployment": &self.deployment, "rule": &rule.name, "first": now},
            "$inc": {"attempts": 1},
        };
        let letters = server.collection(&self.database, COLLECTION);
        // One that comes late is tried again, and forgotten.
        bounded(letters.update_one(doc! {"_id": id}, update).upsert(true)).await?;
        Ok(())
    }

    /// Forgets a letter whose work has been done, unless it failed once more meanwhile.
    pub async fn clear(&self, server: &Server, letter: &Letter) -> Result<()> {
        // `last` too: a letter that was forgotten and written anew counts from one again.
        let filter = doc! {"_id": letter.id.clone(), "attempts": letter.attempts, "last": letter.last};
        bounded(server.collection(&self.database, COLLECTION).delete_one(filter)).await?;
        Ok(())
    }

    fn id(&self, rule: &Rule, task: Task, key: &Key, target: Option<&Key>) -> Document {
        let target = target.and_then(|id| id.values().first().cloned());
        doc! {
            "deployment": &self.deployment,
            "rule": &rule.name,
            "task": task.name(),
            "key": key.values().to_vec(),
            "target": target.map_or_else(Vec::new, |id| vec![id]),
        }
    }

    /// The letters of `rule` that are to be tried again now.
    pub async fn due(&self, server: &Server, rule: &Rule) -> Result<Vec<Letter>> {
        let now = DateTime::now().timestamp_millis();
        let mut letters = self.of_rule(server, rule).await?;
        letters.retain(|letter| letter.due <= now);
        Ok(letters)
    }

    /// All letters of `rule`.
    pub async fn of_rule(&self, server: &Server, rule: &Rule) -> Result<Vec<Letter>> {
        let filter = doc! {"deployment": &self.deployment, "rule": &rule.name};
        let mut cursor = server.collection(&self.database, COLLECTION).find(filter).await?;
        let mut out = Vec::new();
        while let Some(letter) = cursor.try_next().await? {
            out.extend(Letter::read(&letter));
        }
        Ok(out)
    }
}

/// How often dead letters are looked through.
pub const ROUND: Duration = Duration::from_secs(5);

/// One dead letter, as far as trying it again needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Letter {
    id: Document,
    task: Task,
    key: Key,
    /// The one target that was found to be the culprit.
    target: Option<Key>,
    attempts: i32,
    last: DateTime,
    /// When to try again, in milliseconds since 1970: the pause doubles from 5 seconds to an hour.
    due: i64,
}

impl Letter {
    fn read(letter: &Document) -> Option<Self> {
        let id = letter.get_document("_id").ok()?;
        let task = Task::named(id.get_str("task").ok()?)?;
        let attempts = letter.get_i32("attempts").unwrap_or(1);
        let last = *letter.get_datetime("last").ok()?;
        let pause = 5_000_i64 << (attempts.clamp(1, 10) - 1);
        Some(Self {
            task,
            key: Key::new(id.get_array("key").ok()?.clone()),
            target: id.get_array("target").ok()?.first().cloned().map(Key::one),
            attempts,
            last,
            due: last.timestamp_millis() + pause.min(3_600_000),
            id: id.clone(),
        })
    }

    /// Whether it is about this target, or about what the target refers to.
    #[must_use]
    pub fn concerns(&self, target: &Key, references: &[Option<Key>]) -> bool {
        match (&self.target, self.task) {
            (Some(culprit), _) => culprit == target,
            (None, Task::Value | Task::Holders) => references.iter().flatten().any(|key| *key == self.key),
            (None, _) => self.key == *target,
        }
    }

    /// The request that tries it again.
    #[must_use]
    pub fn request(&self, rule: &Rule) -> Request {
        let scope = self.target.clone().map_or(Scope::All, Scope::one);
        Request { rule: rule.id, task: self.task, key: self.key.clone(), scope }
    }
}
