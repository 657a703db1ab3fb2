//! What could not be written, and why: set aside, counted, and tried again.

use std::time::Duration;

use bson::{Bson, DateTime, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;

use crate::{
    error::{Error, Result},
    key::Key,
    mongo::{Reads, Server, bounded},
    partition::Partition,
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
    /// Whose letters are tried again here. A deployment that is not divided, and commands, mean all.
    pub partition: Partition,
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
            "$unset": {"asked": ""},
            "$setOnInsert": {"deployment": &self.deployment, "rule": &rule.name, "first": now},
            "$inc": {"attempts": 1},
        };
        let letters = server.collection(&self.database, COLLECTION);
        // One that comes late is tried again, and forgotten.
        bounded(letters.update_one(doc! {"_id": id}, update).upsert(true)).await?;
        Ok(())
    }

    /// Forgets letters whose work has been done, unless they failed once more meanwhile.
    pub async fn clear(&self, server: &Server, letters: &[Letter]) -> Result<()> {
        // `last` too: a letter that was forgotten and written anew counts from one again.
        let deletes = letters.iter().map(|letter| {
            let done = doc! {"_id": letter.id.clone(), "attempts": letter.attempts, "last": letter.last};
            Ok(RawDocumentBuf::try_from(&doc! {"q": done, "limit": 1})?)
        });
        let deletes: Vec<RawDocumentBuf> = deletes.collect::<Result<_>>()?;
        let mut done = server.delete(&self.database, COLLECTION, &deletes, CLEARING).await?;
        done.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
    }

    fn id(&self, rule: &Rule, task: Task, key: &Key, target: Option<&Key>) -> Document {
        let target = target.and_then(|id| id.values().first().cloned());
        doc! {
            "deployment": self.partition.id(&self.deployment),
            "rule": &rule.name,
            "task": task.name(),
            "key": key.values().to_vec(),
            "target": target.map_or_else(Vec::new, |id| vec![id]),
        }
    }

    /// A page of the letters that are to be tried again now, in the order of their `_id`s: those after `after`, of about so many
    /// bytes at most, and the last one's `_id`. None after the last page.
    pub async fn due(
        &self,
        server: &Server,
        after: Option<&RawDocument>,
        bytes: usize,
    ) -> Result<Option<(Vec<Letter>, RawDocumentBuf)>> {
        let now = DateTime::now().timestamp_millis();
        let mut due = vec![doc! {"asked": {"$exists": true}}];
        due.extend((1..=LONGEST).map(|attempts| {
            let tried = if attempts == LONGEST {
                doc! {"$gte": attempts}
            } else {
                doc! {"$eq": attempts}
            };
            doc! {"attempts": tried, "last": {"$lte": DateTime::from_millis(now - pause(attempts))}}
        }));
        let mut filter = doc! {"$and": [self.filter(&Chosen::default()), {"$or": due}]};
        if let Some(after) = after {
            filter.insert("_id", doc! {"$gt": Document::try_from(after)?});
        }
        let command = doc! {
            "find": COLLECTION, "filter": filter, "sort": {"_id": 1}, "hint": {"_id": 1}, "limit": PAGE, "batchSize": PAGE,
            // Its reason is for people.
            "projection": {"reason": 0, "path": 0},
        };
        let (rows, _) = server.pages(&self.database, command, Reads::default()).await?.up_to(bytes).await?;
        let letters = rows.iter().map(|row| Ok(Letter::read(&Document::try_from(row.as_ref())?)));
        let letters = letters.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let last = rows.last().and_then(|row| row.get_document("_id").ok()).map(ToOwned::to_owned);
        Ok(last.map(|last| (letters, last)))
    }

    /// The letters of `rule` that are about one of these targets, each with what it refers to.
    pub async fn concerning(
        &self,
        server: &Server,
        rule: &Rule,
        targets: &[(Key, &[Option<Key>])],
    ) -> Result<Vec<Letter>> {
        let of = |key: &Key| Bson::Array(key.values().to_vec());
        let ids: Vec<Bson> = targets.iter().map(|(target, _)| of(target)).collect();
        let references = targets.iter().flat_map(|(_, references)| references.iter().flatten()).map(of);
        let keys: Vec<Bson> = ids.iter().cloned().chain(references).collect();
        let filter = doc! {"$and": [
            self.filter(&Chosen { rule: Some(rule.name.clone()), key: None }),
            {"$or": [{"_id.key": {"$in": keys}}, {"_id.target": {"$in": ids}}]},
        ]};
        let mut cursor = server.collection(&self.database, COLLECTION).find(filter).await?;
        let mut out = Vec::new();
        while let Some(letter) = cursor.try_next().await? {
            out.extend(Letter::read(&letter));
        }
        Ok(out)
    }

    /// The chosen letters, the newest first; `limit` of them at most, if it is not 0.
    pub async fn find(&self, server: &Server, chosen: &Chosen, limit: i64) -> Result<Vec<Letter>> {
        let letters = server.collection(&self.database, COLLECTION);
        let mut cursor = letters.find(self.filter(chosen)).sort(doc! {"last": -1}).limit(limit).await?;
        let mut out = Vec::new();
        while let Some(letter) = cursor.try_next().await? {
            out.extend(Letter::read(&letter));
        }
        Ok(out)
    }

    /// How many letters are chosen.
    pub async fn count(&self, server: &Server, chosen: &Chosen) -> Result<u64> {
        Ok(server.collection(&self.database, COLLECTION).count_documents(self.filter(chosen)).await?)
    }

    /// The names of the rules that have any.
    pub async fn rules(&self, server: &Server) -> Result<Vec<String>> {
        let mine = doc! {"deployment": &self.deployment};
        let found = server.collection(&self.database, COLLECTION).distinct("rule", mine).await?;
        Ok(found.iter().filter_map(|rule| rule.as_str().map(ToOwned::to_owned)).collect())
    }

    /// Asks the leader to try the chosen letters now; returns when that was asked, by this machine's clock as all times of
    /// letters.
    pub async fn ask(&self, server: &Server, chosen: &Chosen) -> Result<DateTime> {
        let now = DateTime::now();
        let letters = server.collection(&self.database, COLLECTION);
        // Not `last`: a letter that fails once more meanwhile counts as tried.
        letters.update_many(self.filter(chosen), doc! {"$set": {"asked": now}}).await?;
        Ok(now)
    }

    /// How many of the chosen letters have been asked for at `asked` and not been tried since.
    pub async fn untried(&self, server: &Server, chosen: &Chosen, asked: DateTime) -> Result<u64> {
        let filter = doc! {"$and": [self.filter(chosen), {"asked": asked}]};
        Ok(server.collection(&self.database, COLLECTION).count_documents(filter).await?)
    }

    /// Forgets the chosen letters; returns how many there were.
    pub async fn drop(&self, server: &Server, chosen: &Chosen) -> Result<u64> {
        Ok(server.collection(&self.database, COLLECTION).delete_many(self.filter(chosen)).await?.deleted_count)
    }

    fn filter(&self, chosen: &Chosen) -> Document {
        let mut filter = doc! {"deployment": &self.deployment};
        // Several partitions may have failed at one look-up: each has its own letter, and tries its own again.
        if self.partition != Partition::WHOLE {
            filter.insert("_id.deployment", self.partition.id(&self.deployment));
        }
        if let Some(rule) = &chosen.rule {
            filter.insert("rule", rule);
        }
        if let Some(key) = &chosen.key {
            let is = doc! {"$elemMatch": {"$eq": key.clone()}};
            filter.insert("$or", vec![doc! {"_id.key": is.clone()}, doc! {"_id.target": is}]);
        }
        filter
    }
}

/// Which letters.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// Of this rule.
    pub rule: Option<String>,
    /// With this value in their key, or as their target.
    pub key: Option<Bson>,
}

/// How often dead letters are looked through.
pub const ROUND: Duration = Duration::from_secs(5);

/// Letters tried again together.
const PAGE: i32 = 500;
/// How long it may take to forget them.
const CLEARING: Duration = Duration::from_secs(5);
/// From so many attempts on the pause is the longest.
const LONGEST: i32 = 11;

/// How long to wait after so many attempts, in milliseconds: 5 seconds, doubled each time up to an hour.
fn pause(attempts: i32) -> i64 {
    (5_000_i64 << (attempts.clamp(1, LONGEST) - 1)).min(3_600_000)
}

/// One dead letter, as far as trying it again needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Letter {
    id: Document,
    task: Task,
    /// The value or the document that it is about.
    pub key: Key,
    /// The one target that was found to be the culprit.
    pub target: Option<Key>,
    /// The rule's name.
    pub rule: String,
    /// Why, without values.
    pub reason: String,
    /// The path where the target's shape is in the way.
    pub path: Option<String>,
    /// How often it was tried.
    pub attempts: i32,
    /// When it was set aside.
    pub first: DateTime,
    /// When it was tried last.
    pub last: DateTime,
    /// When to try again, in milliseconds since 1970: the pause doubles from 5 seconds to an hour. At once, when somebody
    /// has asked for it.
    pub due: i64,
}

impl Letter {
    fn read(letter: &Document) -> Option<Self> {
        let id = letter.get_document("_id").ok()?;
        let task = Task::named(id.get_str("task").ok()?)?;
        let attempts = letter.get_i32("attempts").unwrap_or(1);
        let last = *letter.get_datetime("last").ok()?;
        Some(Self {
            task,
            key: Key::new(id.get_array("key").ok()?.clone()),
            target: id.get_array("target").ok()?.first().cloned().map(Key::one),
            rule: letter.get_str("rule").unwrap_or_default().to_owned(),
            reason: letter.get_str("reason").unwrap_or_default().to_owned(),
            first: letter.get_datetime("first").copied().unwrap_or(last),
            path: letter.get_str("path").ok().map(ToOwned::to_owned),
            attempts,
            last,
            due: if letter.contains_key("asked") { 0 } else { last.timestamp_millis() + pause(attempts) },
            id: id.clone(),
        })
    }

    /// What it is about, in a word: a value that sources and targets share, or a document.
    #[must_use]
    pub fn about(&self) -> &'static str {
        match self.task {
            Task::Value | Task::Holders => "value",
            Task::LocateSource | Task::Parents => "source",
            Task::Target | Task::LocateTarget | Task::Guard => "target",
        }
    }

    /// Whether it is the same letter, which may have been tried once more meanwhile.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.key == other.key && self.id == other.id
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
