//! Dead letters: keys and documents that could not be written, with the reason. They are counted and retried.

use std::{collections::BTreeSet, time::Duration};

use bson::{Bson, DateTime, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use serde::Deserialize;

use crate::request::{Request, Scope, Task};
use denormd_model::{
    clock,
    key::Key,
    partition::Partition,
    position::ClusterTime,
    stored_key::{loaded, loaded_value, stored, stored_value},
};
use denormd_mongo::{
    Server, all, bounded, code,
    error::{Error, Kind, Result},
    text,
};
use denormd_rules::plan::{Plan, Rule};

/// The collection of dead letters in the state database.
pub const COLLECTION: &str = "dead_letters";

/// A key or a document that cannot be read or written.
#[derive(Debug)]
pub struct Offending<'a> {
    /// The key of the rule that failed.
    pub key: &'a Key,
    /// The offending target of this key; none when the key as a whole failed.
    pub target: Option<&'a Key>,
    /// Path of the field whose shape prevents the write.
    pub path: Option<String>,
    /// The documents of a tree that prevent the write.
    pub tree: Option<Nodes<'a>>,
    /// The time at which these were read.
    pub since: Option<DateTime>,
}

/// Documents of a tree because of which a document keeps its values. Once one of them has another place, the dead letter
/// is retried.
#[derive(Debug, Clone, Copy)]
pub enum Nodes<'a> {
    /// The members of a circle, which share one dead letter.
    Circle(&'a [Key]),
    /// The nearest ancestors of a document that has too many.
    Ancestors(&'a [Key]),
}

/// The dead letters of one deployment.
#[derive(Debug, Clone)]
pub struct DeadLetters {
    /// The state database.
    pub database: String,
    /// The deployment's name.
    pub deployment: String,
    /// The partition whose dead letters are retried here. Unpartitioned deployments and commands cover all of them.
    pub partition: Partition,
}

impl DeadLetters {
    /// Records that `rule` could not read or write `offending`. The write is acknowledged by a majority, so the
    /// checkpoint may pass the event afterwards.
    pub async fn record(
        &self,
        server: &Server,
        rule: &Rule,
        task: Task,
        offending: &Offending<'_>,
        error: &Error,
    ) -> Result<()> {
        let id = self.id(rule, task, offending);
        let now = clock::now();
        let mut set = doc! {
            "code": error.code, "reason": &error.message, "path": &offending.path, "last": now,
            "definition": rule.fingerprint(),
        };
        let mut unset = Document::new();
        if let Some(nodes) = offending.tree {
            let (keys, name, other) = match nodes {
                Nodes::Circle(keys) => (keys, "circle", "ancestors"),
                Nodes::Ancestors(keys) => (keys, "ancestors", "circle"),
            };
            set.insert(name, keys.iter().map(stored).collect::<Vec<_>>());
            unset.insert(other, "");
        } else {
            unset.insert("asked", "");
        }
        let update = doc! {
            "$set": set,
            "$unset": unset,
            "$setOnInsert": {"deployment": &self.deployment, "rule": &rule.name, "first": now},
            "$inc": {"attempts": 1},
        };
        let dead_letters = server.collection(&self.database, COLLECTION);
        // A record that arrives late is retried and then deleted.
        let write = || bounded(dead_letters.update_one(doc! {"_id": id.clone()}, update.clone()).upsert(true));
        match write().await {
            // The former record has no number of attempts. The event must not wait until somebody drops it.
            Err(error) if error.code == Some(code::TYPE_MISMATCH) => {
                let unreadable = doc! {"_id": id.clone(), "attempts": {"$exists": true, "$not": {"$type": "number"}}};
                bounded(dead_letters.delete_one(unreadable)).await?;
                write().await?
            }
            written => written?,
        };
        if let Some(nodes) = offending.tree {
            // Its former members may be written now. No document is in two circles.
            let members =
                if let Nodes::Circle(members) = nodes { members } else { std::slice::from_ref(offending.key) };
            let members: Vec<_> = members.iter().map(stored).collect();
            let mut circle = doc! {"$in": members.clone()};
            if let Nodes::Circle(_) = nodes {
                // Another partition that owns a member has a dead letter of the same circle.
                circle.insert("$ne", members);
            }
            let former = doc! {
                "deployment": &self.deployment, "rule": &rule.name, "_id": {"$ne": id.clone()}, "circle": circle,
            };
            bounded(dead_letters.update_many(former, requested(now))).await?;
        }
        if let Some(since) = offending.since {
            // Another document of the tree may have asked for a retry after this one was read.
            let earlier = doc! {"_id": id, "asked": {"$lt": since}};
            bounded(dead_letters.update_one(earlier, doc! {"$unset": {"asked": ""}})).await?;
        }
        Ok(())
    }

    /// Deletes dead letters that were resolved, unless they failed again in the meantime.
    pub async fn clear(&self, server: &Server, dead_letters: &[DeadLetter]) -> Result<()> {
        // Compares `last` too: a dead letter that was deleted and recorded again starts at one attempt.
        let deletes = dead_letters.iter().map(|dead_letter| {
            let done = doc! {"_id": dead_letter.id.clone(), "attempts": dead_letter.attempts, "last": dead_letter.last};
            let delete = RawDocumentBuf::try_from(&doc! {"q": done, "limit": 1})?;
            Ok(text::escaped(&delete).into_owned())
        });
        let deletes: Vec<RawDocumentBuf> = deletes.collect::<Result<_>>()?;
        let mut done = server.delete(&self.database, COLLECTION, &deletes, CLEARING).await?;
        done.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
    }

    fn id(&self, rule: &Rule, task: Task, Offending { key, target, tree, .. }: &Offending<'_>) -> Document {
        let target = target.and_then(|id| id.values().first()).map(stored_value);
        let mut id = doc! {
            "deployment": self.partition.id(&self.deployment),
            "rule": &rule.name,
            "task": task.name(),
            "key": stored(key),
            "target": target.map_or_else(Vec::new, |id| vec![id]),
        };
        // A circle that loses a member is another one, and the former dead letter has that member retried.
        if let Some(Nodes::Circle(members)) = tree {
            id.insert("circle", members.iter().map(stored).collect::<Vec<_>>());
        }
        id
    }

    /// A page of the dead letters that are due now, in the order of their `_id`s: those after `after`, up to about
    /// `bytes` bytes, with the `_id` of the last one. None after the last page.
    pub async fn due(
        &self,
        server: &Server,
        after: Option<&RawDocument>,
        bytes: usize,
    ) -> Result<Option<(Vec<Entry>, RawDocumentBuf)>> {
        let now = clock::wall_millis();
        // Without these two, nobody knows when it is due: it is read, and reported as unreadable.
        let has_no = |name: &str, kind: &str| doc! {name: {"$not": {"$type": kind}}};
        let mut due = vec![doc! {"asked": {"$exists": true}}, has_no("attempts", "number"), has_no("last", "date")];
        due.extend((1..=LONGEST).map(|attempts| {
            let tried = if attempts == LONGEST {
                doc! {"$gte": attempts}
            } else {
                doc! {"$eq": attempts}
            };
            doc! {"attempts": tried, "last": {"$lte": DateTime::from_millis(now - pause(attempts))}}
        }));
        let waited = DateTime::from_millis(now - LONGEST_IN_CIRCLE);
        due.push(doc! {"circle": {"$exists": true}, "last": {"$lte": waited}});
        let mut filter = doc! {"$and": [self.filter(&Chosen::default()), {"_id": {"$type": "object"}}, {"$or": due}]};
        if let Some(after) = after {
            filter.insert("_id", doc! {"$gt": Document::try_from(after)?});
        }
        let command = doc! {
            "find": COLLECTION, "filter": filter, "sort": {"_id": 1}, "hint": {"_id": 1}, "limit": PAGE, "batchSize": PAGE,
            // The reason is only for display.
            "projection": {"reason": 0, "path": 0},
        };
        let (rows, _) = server.pages(&self.database, command, ClusterTime::default()).await?.up_to(bytes).await?;
        let stored = rows.iter().map(|row| text::unescaped(row.clone()));
        let dead_letters = stored.map(|row| Ok(DeadLetter::read(Document::try_from(row.as_ref())?)));
        let dead_letters = dead_letters.collect::<Result<Vec<_>>>()?;
        let last = rows.last().and_then(|row| row.get_document("_id").ok()).map(ToOwned::to_owned);
        Ok(last.map(|last| (dead_letters, last)))
    }

    /// The dead letters of `rule` that concern one of these targets, or a value that the target references. One that
    /// cannot be read explains no difference, and is logged.
    pub async fn concerning(
        &self,
        server: &Server,
        rule: &Rule,
        targets: &[(Key, &[Option<Key>])],
    ) -> Result<Vec<DeadLetter>> {
        let ids: Vec<Vec<Bson>> = targets.iter().map(|(target, _)| stored(target)).collect();
        let references = targets.iter().flat_map(|(_, references)| references.iter().flatten()).map(stored);
        let keys: Vec<Vec<Bson>> = ids.iter().cloned().chain(references).collect();
        let filter = doc! {"$and": [
            self.filter(&Chosen { rule: Some(rule.name.clone()), key: None }),
            {"$or": [{"_id.key": {"$in": keys}}, {"_id.target": {"$in": ids.clone()}}, {"circle": {"$in": ids}}]},
        ]};
        let found = all(server.collection(&self.database, COLLECTION).find(filter)).await?;
        let mut out = Vec::new();
        for dead_letter in found {
            match DeadLetter::read(dead_letter) {
                Ok(dead_letter) => out.push(dead_letter),
                Err(unreadable) => tracing::error!(rule = %rule.name, error = %unreadable.error().message),
            }
        }
        Ok(out)
    }

    /// The chosen dead letters, newest first; at most `limit`, where 0 means no limit.
    pub async fn find(&self, server: &Server, chosen: &Chosen, limit: i64) -> Result<Vec<Entry>> {
        let dead_letters = server.collection(&self.database, COLLECTION);
        let found = dead_letters.find(self.filter(chosen)).sort(doc! {"last": -1}).limit(limit).await?;
        Ok(found.map_ok(DeadLetter::read).try_collect().await?)
    }

    /// Number of chosen dead letters.
    pub async fn count(&self, server: &Server, chosen: &Chosen) -> Result<u64> {
        bounded(server.collection(&self.database, COLLECTION).count_documents(self.filter(chosen))).await
    }

    /// The names of the rules that have dead letters, as of `after` or later.
    pub async fn rules(&self, server: &Server, after: ClusterTime) -> Result<Vec<String>> {
        let stages = [doc! {"$match": {"deployment": &self.deployment}}, doc! {"$group": {"_id": "$rule"}}];
        let command = doc! {"aggregate": COLLECTION, "pipeline": stages.to_vec(), "cursor": {}};
        let found = server.read_state(&self.database, command, after).await?;
        Ok(found.iter().filter_map(|row| row.get_str("_id").ok().map(ToOwned::to_owned)).collect())
    }

    /// Asks the leader to retry the chosen dead letters now.
    pub async fn ask(&self, server: &Server, chosen: &Chosen) -> Result<Retry> {
        let dead_letters = server.collection(&self.database, COLLECTION);
        // Of a record that cannot be read, this may be no date.
        let dated = doc! {"$and": [self.filter(chosen), {"last": {"$type": "date"}}]};
        let newest = dead_letters.find_one(dated).sort(doc! {"last": -1}).await?;
        let last = newest.and_then(|newest| newest.get_datetime("last").ok().copied());
        let retry = Retry { asked: clock::now(), last: last.unwrap_or(DateTime::MIN) };
        // Leaves `last` as it is: a dead letter that fails again in the meantime counts as retried.
        dead_letters.update_many(self.filter(chosen), doc! {"$set": {"asked": retry.asked}}).await?;
        Ok(retry)
    }

    /// Makes the dead letters of these keys and targets due now: a change was written there, which may have fixed the
    /// offending document.
    pub async fn make_due(&self, server: &Server, rule: &str, written: &Written) -> Result<()> {
        let of = |keys: &BTreeSet<Key>| keys.iter().map(stored).collect::<Vec<_>>();
        let keys = of(&written.keys);
        // In a tree, what one partition writes may end a circle of documents of another one.
        let filter = doc! {"$and": [
            {"deployment": &self.deployment, "rule": rule},
            {"$or": [
                {"_id.key": {"$in": keys.clone()}}, {"_id.target": {"$in": of(&written.targets)}},
                {"circle": {"$in": keys.clone()}}, {"ancestors": {"$in": keys}},
            ]},
        ]};
        let dead_letters = server.collection(&self.database, COLLECTION);
        bounded(dead_letters.update_many(filter, requested(clock::now()))).await?;
        Ok(())
    }

    /// Number of chosen dead letters that have not been retried since this request. A retry of another dead letter of the tree may have
    /// renewed the request for one of them.
    pub async fn untried(&self, server: &Server, chosen: &Chosen, Retry { asked, last }: Retry) -> Result<u64> {
        let filter = doc! {"$and": [self.filter(chosen), {"asked": {"$gte": asked}, "last": {"$not": {"$gt": last}}}]};
        Ok(server.collection(&self.database, COLLECTION).count_documents(filter).await?)
    }

    /// Deletes the chosen dead letters; returns how many were deleted.
    pub async fn drop(&self, server: &Server, chosen: &Chosen) -> Result<u64> {
        Ok(server.collection(&self.database, COLLECTION).delete_many(self.filter(chosen)).await?.deleted_count)
    }

    /// Deletes the dead letters of rules and definitions that are not in the plan, under the leader's deadline: a former
    /// leader would otherwise delete those of a rule that has come back since. Also deletes those of partitions that no longer exist
    /// because their number has changed: no leader retries them, and a repartitioning leaves them behind if it cannot carry them over.
    pub async fn retain(&self, server: &Server, plan: &Plan) -> Result<u64> {
        let names: Vec<&str> = plan.rules.iter().map(|rule| rule.name.as_str()).collect();
        // A dead letter without a readable rule name or partition stays: its rule and its partition may exist.
        let of_rules = vec![doc! {"rule": {"$type": "string", "$nin": names}}, plan.other_definitions()];
        let of_rules = doc! {"$and": [self.filter(&Chosen::default()), {"$or": of_rules}]};
        let ids: Vec<String> = Partition::all(self.partition.of()).map(|one| one.id(&self.deployment)).collect();
        let of_partitions = doc! {"deployment": &self.deployment, "_id.deployment": {"$type": "string", "$nin": ids}};
        let gone = [of_rules, of_partitions];
        let mut more_attempts = 1..CLEARINGS;
        loop {
            match self.delete(server, &gone).await {
                // The dead letters that were deleted before the timeout are gone, so the next attempt has fewer left.
                Err(error) if error.kind == Kind::TimedOut && more_attempts.next().is_some() => {}
                deleted => return deleted,
            }
        }
    }

    /// Deletes the dead letters of a rule whose definition has changed, also under the leader's deadline: their keys and tasks are those of
    /// the former definition, and the backfill of the new one finds what still cannot be read or written.
    pub async fn forget(&self, server: &Server, rule: &str) -> Result<()> {
        self.delete(server, &[self.filter(&Chosen { rule: Some(rule.to_owned()), key: None })]).await?;
        Ok(())
    }

    async fn delete(&self, server: &Server, gone: &[Document]) -> Result<u64> {
        let mut deletes = Vec::new();
        for gone in gone {
            deletes.push(text::escaped(&RawDocumentBuf::try_from(&doc! {"q": gone, "limit": 0})?).into_owned());
        }
        let mut done = server.delete(&self.database, COLLECTION, &deletes, CLEARING).await?;
        done.refused.pop().map_or(Ok(done.matched), |(_, error)| Err(error))
    }

    fn filter(&self, chosen: &Chosen) -> Document {
        let mut filter = doc! {"deployment": &self.deployment};
        // Several partitions may have failed at the same lookup: each has its own dead letter and retries only that
        // one.
        if self.partition != Partition::WHOLE {
            filter.insert("_id.deployment", self.partition.id(&self.deployment));
        }
        if let Some(rule) = &chosen.rule {
            filter.insert("rule", rule);
        }
        if let Some(key) = &chosen.key {
            let is = doc! {"$elemMatch": {"$eq": stored_value(key)}};
            let member = doc! {"circle": {"$elemMatch": is.clone()}};
            filter.insert("$or", vec![doc! {"_id.key": is.clone()}, doc! {"_id.target": is}, member]);
        }
        filter
    }
}

/// Selection of dead letters. An empty selection means all of them.
#[derive(Debug, Clone, Default)]
pub struct Chosen {
    /// Restricts the selection to this rule.
    pub rule: Option<String>,
    /// Restricts the selection to this value, in the key or as the target.
    pub key: Option<Bson>,
}

/// A request to retry dead letters.
#[derive(Debug, Clone, Copy)]
pub struct Retry {
    /// Time of the request, by the clock of the machine that has made it.
    asked: DateTime,
    /// The newest failure before it, by the leader's clock.
    last: DateTime,
}

/// Keys and targets of a rule that were written.
#[derive(Debug, Default)]
pub struct Written {
    keys: BTreeSet<Key>,
    targets: BTreeSet<Key>,
}

impl Written {
    /// Adds the targets that `scope` means for `key`. Beyond a page of them, dead letters wait for their own retry.
    pub fn add(&mut self, key: &Key, scope: &Scope) {
        match scope {
            Scope::All => self.keys.extend(self.room(std::iter::once(key.clone()))),
            Scope::Named(ids) => self.targets.extend(self.room(ids.iter().cloned())),
        }
    }

    /// Adds the keys and targets of `other`.
    pub fn join(&mut self, other: Self) {
        self.keys.extend(self.room(other.keys.into_iter()));
        self.targets.extend(self.room(other.targets.into_iter()));
    }

    /// As many of these keys as there is room for.
    fn room(&self, keys: impl Iterator<Item = Key>) -> Vec<Key> {
        keys.take((PAGE.unsigned_abs() as usize).saturating_sub(self.keys.len() + self.targets.len())).collect()
    }

    /// True if nothing was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.targets.is_empty()
    }
}

/// The update that requests a retry, unless a later request is recorded. Otherwise the command that waits for that request would
/// count the dead letter as retried. The clock of the operator's machine may be ahead, or this update may be delayed.
fn requested(time: DateTime) -> Document {
    doc! {"$max": {"asked": time}}
}

/// Interval between searches for dead letters that are due.
pub const ROUND: Duration = Duration::from_secs(5);

/// Dead letters that are retried together.
const PAGE: i32 = 500;
/// Time limit for deleting dead letters.
const CLEARING: Duration = Duration::from_secs(5);
/// Maximum number of attempts to delete obsolete dead letters, each within [`CLEARING`].
const CLEARINGS: u32 = 20;
/// Number of attempts from which the pause no longer grows.
const LONGEST: i32 = 11;

/// Pause after this number of attempts, in milliseconds: 5 seconds, doubled each time up to an hour.
fn pause(attempts: i32) -> i64 {
    (5_000_i64 << (attempts.clamp(1, LONGEST) - 1)).min(3_600_000)
}

/// Longest pause of a circle, in milliseconds. When one member leaves it, the others may be requested by this retry alone: the one
/// that the write of that member requests is lost in a crash.
const LONGEST_IN_CIRCLE: i64 = 60_000;

/// A record of the collection: a dead letter, if it can be read.
pub type Entry = std::result::Result<DeadLetter, Unreadable>;

/// A record that cannot be read. It is not retried, and stays until somebody drops it.
#[derive(Debug, Clone, PartialEq)]
pub struct Unreadable {
    /// Its `_id`.
    pub id: Box<Bson>,
    /// The rule's name, if that can be read.
    pub rule: Option<String>,
    /// The reason. It may contain a value.
    pub why: String,
}

impl Unreadable {
    /// The error, without the `_id` and the reason, which may contain values of documents.
    #[must_use]
    pub fn error(&self) -> Error {
        let rule = self.rule.as_deref().unwrap_or("an unknown rule");
        Error::internal(format!("a dead letter of {rule} cannot be read, and is not retried")).hint(
            "was it written by another version, or by hand? `denormd dead-letters list` shows it. Drop it, and \
             `denormd backfill` of its rule does its work",
        )
    }
}

/// One dead letter, with the fields that a retry needs.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    id: Document,
    task: Task,
    /// The value or the document that failed.
    pub key: Key,
    /// The offending target, if a single one was identified.
    pub target: Option<Key>,
    /// The members of a circle in a tree, one of which is the key.
    pub circle: Vec<Key>,
    /// The rule's name.
    pub rule: String,
    /// The fingerprint of the rule's definition at that time; None if an earlier version recorded it.
    definition: Option<Bson>,
    /// The error, without values of documents.
    pub reason: String,
    /// Path of the field whose shape prevents the write.
    pub path: Option<String>,
    /// Failed attempts.
    pub attempts: i32,
    /// Time of the first failure.
    pub first: DateTime,
    /// Time of the last attempt.
    pub last: DateTime,
    /// Time of the next retry, in milliseconds since 1970: the pause doubles from 5 seconds to an hour, of a circle to a minute.
    /// Immediately if an operator has requested it.
    pub due: i64,
}

/// The stored form of a dead letter.
#[derive(Debug, Deserialize)]
struct Stored {
    #[serde(rename = "_id")]
    id: StoredId,
    #[serde(rename = "rule")]
    rule: String,
    /// A retry does not read this field and the next.
    #[serde(rename = "reason", default)]
    reason: String,
    #[serde(rename = "path", default)]
    path: Option<String>,
    #[serde(rename = "circle", default)]
    circle: Vec<Vec<Bson>>,
    #[serde(rename = "attempts")]
    attempts: i32,
    #[serde(rename = "first", default)]
    first: Option<DateTime>,
    #[serde(rename = "last")]
    last: DateTime,
    #[serde(rename = "asked", default)]
    asked: Option<DateTime>,
    #[serde(rename = "definition", default)]
    definition: Option<Bson>,
}

#[derive(Debug, Deserialize)]
struct StoredId {
    #[serde(rename = "task")]
    task: String,
    #[serde(rename = "key")]
    key: Vec<Bson>,
    /// The `_id` of the offending target, in an array because any BSON value may be one.
    #[serde(rename = "target")]
    target: Vec<Bson>,
}

impl DeadLetter {
    fn read(document: Document) -> Entry {
        let id = document.get("_id").cloned().unwrap_or(Bson::Null);
        let rule = document.get_str("rule").ok().map(ToOwned::to_owned);
        let read = || {
            let stored: Stored = bson::deserialize_from_document(document).map_err(|error| error.to_string())?;
            let task = Task::named(&stored.id.task).ok_or_else(|| format!("the task {} is unknown", stored.id.task))?;
            Ok((stored, task, id.as_document().cloned().unwrap_or_default()))
        };
        let (stored, task, id) = read().map_err(|why| Unreadable { id: Box::new(id.clone()), rule, why })?;
        let Stored { rule, reason, path, circle, attempts, first, last, asked, definition, .. } = stored;
        let pause = pause(attempts).min(if circle.is_empty() { i64::MAX } else { LONGEST_IN_CIRCLE });
        Ok(Self {
            id,
            task,
            key: loaded(&stored.id.key),
            target: stored.id.target.first().map(loaded_value).map(Key::one),
            circle: circle.iter().map(|member| loaded(member)).collect(),
            rule,
            definition,
            reason,
            path,
            attempts,
            first: first.unwrap_or(last),
            last,
            due: if asked.is_some() { 0 } else { last.timestamp_millis() + pause },
        })
    }

    /// The kind of key in one word: a value that sources and targets share, or a document.
    #[must_use]
    pub fn about(&self) -> &'static str {
        match self.task {
            Task::Value | Task::Holders | Task::Bucket => "value",
            Task::LocateSource | Task::Parents => "source",
            Task::Target | Task::LocateTarget | Task::Guard => "target",
        }
    }

    /// True if it was recorded under this definition of the rule.
    #[must_use]
    pub fn is_of(&self, rule: &Rule) -> bool {
        self.definition.as_ref().is_none_or(|definition| *definition == rule.fingerprint())
    }

    /// True for the same dead letter, even if one of the two has been retried since.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.key == other.key && self.id == other.id
    }

    /// True if this concerns the target, or a value that the target references.
    #[must_use]
    pub fn concerns(&self, target: &Key, references: &[Option<Key>]) -> bool {
        match (&self.target, self.task) {
            _ if self.circle.contains(target) => true,
            (Some(offending), _) => offending == target,
            (None, Task::Value | Task::Holders) => references.iter().flatten().any(|key| *key == self.key),
            // Its key is the `_id` of a source, which a target may have as well.
            (None, Task::LocateSource | Task::Parents | Task::Bucket) => false,
            (None, _) => self.key == *target,
        }
    }

    /// The reconcile requests that retry it: of a circle, one for each member, because each of them may have changed
    /// since.
    pub fn requests(&self, rule: &Rule) -> impl Iterator<Item = Request> {
        let scope = self.target.clone().map_or(Scope::All, Scope::one);
        let others = self.circle.iter().filter(|member| **member != self.key);
        std::iter::once(&self.key).chain(others).map(move |key| Request {
            rule: rule.id,
            task: self.task,
            key: key.clone(),
            scope: scope.clone(),
        })
    }
}
