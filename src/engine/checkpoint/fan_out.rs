//! Records of fan-out jobs, which are too large for one command. Once a job is recorded by a majority, the position may
//! pass the event that started it, and after a restart the job resumes from its saved position.

use std::time::Duration;

use bson::{Bson, DateTime, Document, RawDocumentBuf, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use serde::Deserialize;

use crate::request::Task;
use denormd_model::{
    clock,
    key::Key,
    stored_key::{loaded, stored},
};
use denormd_mongo::{
    Server, bounded,
    error::{Error, Result},
    text,
};
use denormd_rules::plan::{Plan, Rule, RuleId};

use super::term::{mine, refused_upsert};

/// The collection of fan-out jobs in the state database: one document per deployment, rule, task and key.
pub const COLLECTION: &str = "fan_outs";
/// Time limit for deleting the jobs of a rule.
const FORGETTING: Duration = Duration::from_secs(5);

/// The identity of a fan-out job. At most one job per subject exists at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject {
    /// The rule whose targets the job updates.
    pub rule: RuleId,
    /// The way to find the targets: [`Task::Value`], [`Task::Holders`] or [`Task::Parents`].
    pub task: Task,
    /// The source's match value; for parents, its `_id`.
    pub key: Key,
}

/// One fan-out job with its progress.
#[derive(Debug, Clone, PartialEq)]
pub struct FanOut {
    /// The identity, shared by repeated requests for the same targets.
    pub subject: Subject,
    /// The id of the request: progress for an older request does not overwrite a newer one.
    pub request: ObjectId,
    /// The `_id` of the last target that is done.
    pub after: Option<Bson>,
    /// True if the job reads its targets in parts of the collection. They are in the order of the collection's own
    /// collation, in which `after` has a different place than in the simple collation.
    pub in_parts: bool,
    /// The commit time of the oldest change that the job covers, in milliseconds since 1970.
    pub committed: Option<i64>,
}

/// The fan-out jobs of one deployment or partition.
#[derive(Debug, Clone)]
pub struct FanOuts {
    /// The name of the state database.
    pub database: String,
    /// The name of the deployment, or the id of one of its partitions.
    pub deployment: String,
}

impl FanOuts {
    /// Records that all targets of `subject` are to be updated, from the first one on. A pass in progress continues to
    /// its end, and another one follows.
    pub async fn open(&self, server: &Server, rule: &Rule, subject: Subject, committed: Option<i64>) -> Result<FanOut> {
        let request = ObjectId::new();
        let mut update = doc! {
            "$set": {"wish": request, "after": [], "term": server.term(), "definition": rule.fingerprint()},
            "$unset": {"in_parts": ""},
            "$setOnInsert": {"started": clock::now()},
        };
        if let Some(committed) = committed {
            update.insert("$min", doc! {"committed": DateTime::from_millis(committed)});
        }
        let filter = mine(server, self.id(&rule.name, subject.task, &subject.key));
        let fan_outs = server.collection(&self.database, COLLECTION);
        let open = fan_outs.find_one_and_update(filter, update).upsert(true);
        // A delayed write costs one more pass.
        let saved = match bounded(open.return_document(mongodb::options::ReturnDocument::After)).await {
            Ok(saved) => saved,
            Err(error) => {
                let id = self.id(&rule.name, subject.task, &subject.key);
                return Err(refused_upsert(server, &fan_outs, id, error).await);
            }
        };
        let saved = saved.ok_or_else(|| Error::internal("the record of a fan-out job was not returned"))?;
        progress(&saved, subject).ok_or_else(|| unreadable(&saved))
    }

    /// Saves the job's position. Returns false if the job has been requested again.
    pub async fn advance(&self, server: &Server, rule: &Rule, job: &FanOut) -> Result<bool> {
        let after: Vec<Bson> = job.after.iter().cloned().collect();
        let mut set = doc! {"after": after, "saved": clock::now()};
        // Always writes the order together with the position: a delayed write may arrive after the order has changed.
        let update = if job.in_parts {
            set.insert("in_parts", true);
            doc! {"$set": set}
        } else {
            doc! {"$set": set, "$unset": {"in_parts": ""}}
        };
        let fan_outs = server.collection(&self.database, COLLECTION);
        // A delayed write moves the position back, which only repeats work.
        Ok(bounded(fan_outs.update_one(self.requested(server, rule, job), update)).await?.matched_count > 0)
    }

    /// Deletes a job whose targets are all done. Returns false if the job has been requested again.
    pub async fn close(&self, server: &Server, rule: &Rule, job: &FanOut) -> Result<bool> {
        let fan_outs = server.collection(&self.database, COLLECTION);
        Ok(bounded(fan_outs.delete_one(self.requested(server, rule, job))).await?.deleted_count > 0)
    }

    /// Reads the current record of a subject. The read follows every earlier commit, so it sees the request that made
    /// another write fail.
    pub async fn recorded(&self, server: &Server, rule: &Rule, subject: &Subject) -> Result<Option<FanOut>> {
        let after = server.operation_time().await?;
        let filter = doc! {"_id": self.id(&rule.name, subject.task, &subject.key)};
        let command = doc! {"find": COLLECTION, "filter": filter, "limit": 1};
        let found = server.read_state(&self.database, command, after).await?.pop();
        found.map(|found| progress(&found, subject.clone()).ok_or_else(|| unreadable(&found))).transpose()
    }

    /// Deletes all jobs of a rule, because a backfill of the rule covers them. Runs under the leader's deadline: a delayed
    /// deletion would also delete jobs that were opened after that backfill began.
    pub async fn forget(&self, server: &Server, rule: &str) -> Result<()> {
        self.delete(server, doc! {"_id.rule": rule}).await
    }

    /// Deletes the jobs of definitions that are not in the plan: a start may have ended between registering a definition and deleting
    /// the former one's jobs, or a former leader may have recorded them late.
    pub async fn retain(&self, server: &Server, plan: &Plan) -> Result<()> {
        self.delete(server, plan.other_definitions()).await
    }

    async fn delete(&self, server: &Server, which: Document) -> Result<()> {
        let mut filter = doc! {"_id.deployment": &self.deployment, "term": {"$not": {"$gt": server.term()}}};
        filter.extend(which);
        let delete = text::escaped(&RawDocumentBuf::try_from(&doc! {"q": filter, "limit": 0})?).into_owned();
        let mut done = server.delete(&self.database, COLLECTION, &[delete], FORGETTING).await?;
        done.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Reads the jobs of all rules in the plan, by its definitions.
    pub async fn all(&self, server: &Server, plan: &Plan) -> Result<Vec<FanOut>> {
        let filter = doc! {"_id.deployment": &self.deployment, "$nor": [plan.other_definitions()]};
        let mut cursor = bounded(server.collection(&self.database, COLLECTION).find(filter)).await?;
        let mut out = Vec::new();
        while let Some(doc) = bounded(cursor.try_next()).await? {
            let id = doc.get_document("_id").ok();
            let name = id.and_then(|id| id.get_str("rule").ok());
            if let Some(rule) = plan.rules.iter().find(|rule| Some(rule.name.as_str()) == name) {
                out.push(read(&doc, rule.id).ok_or_else(|| unreadable(&doc))?);
            }
        }
        Ok(out)
    }

    fn id(&self, rule: &str, task: Task, key: &Key) -> Document {
        doc! {"deployment": &self.deployment, "rule": rule, "task": task.name(), "key": stored(key)}
    }

    fn requested(&self, server: &Server, rule: &Rule, job: &FanOut) -> Document {
        let mut filter = mine(server, self.id(&rule.name, job.subject.task, &job.subject.key));
        filter.insert("wish", job.request);
        filter
    }
}

/// The stored form of a job, without its `_id`.
#[derive(Debug, Deserialize)]
struct Stored {
    #[serde(rename = "wish")]
    request: ObjectId,
    /// In an array because any BSON value may be an `_id`.
    #[serde(rename = "after")]
    after: Vec<Bson>,
    #[serde(rename = "in_parts", default)]
    in_parts: bool,
    #[serde(rename = "committed", default)]
    committed: Option<DateTime>,
}

fn read(doc: &Document, rule: RuleId) -> Option<FanOut> {
    let id = doc.get_document("_id").ok()?;
    let subject =
        Subject { rule, task: Task::named(id.get_str("task").ok()?)?, key: loaded(id.get_array("key").ok()?) };
    progress(doc, subject)
}

/// A job that is not read would count as done. Its `_id` contains a value of a document, so only a part of it is named.
fn unreadable(doc: &Document) -> Error {
    let part = |name| doc.get_document("_id").and_then(|id| id.get_str(name)).unwrap_or("unknown");
    let (deployment, rule, task) = (part("deployment"), part("rule"), part("task"));
    Error::internal(format!("the record of a fan-out job cannot be read: {deployment}, rule {rule}, task {task}")).hint(
        format!(
            "was it written by another version, or by hand? Delete it, and `denormd backfill {rule}` does its work"
        ),
    )
}

fn progress(doc: &Document, subject: Subject) -> Option<FanOut> {
    let Stored { request, after, in_parts, committed } = bson::deserialize_from_document(doc.clone()).ok()?;
    let committed = committed.map(DateTime::timestamp_millis);
    Some(FanOut { subject, request, after: after.into_iter().next(), in_parts, committed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_cannot_be_read_is_an_error_without_its_key() {
        let id = doc! {"deployment": "shop", "rule": "names", "task": "Value", "key": ["secret"]};
        let job = doc! {"_id": id.clone(), "wish": ObjectId::new(), "after": []};
        assert!(read(&job, RuleId(0)).is_some());
        let without_time = doc! {"_id": id.clone(), "wish": ObjectId::new(), "after": [], "committed": "secret"};
        assert!(read(&without_time, RuleId(0)).is_none());
        let damaged = doc! {"_id": id, "after": []};
        assert!(read(&damaged, RuleId(0)).is_none());
        let error = unreadable(&damaged).to_string();
        assert!(error.contains("shop, rule names, task Value") && !error.contains("secret"), "{error}");
    }
}
