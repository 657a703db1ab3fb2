//! Fan-outs too large for one command, recorded by a majority: once one is written down, the position may pass the event
//! that it comes from, and a restart goes on where it was.

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;

use crate::{
    error::Result,
    key::Key,
    mongo::{Reads, Server, bounded},
    plan::{Plan, Rule, RuleId},
    request::Task,
};

use super::store::{mine, refused_upsert};

/// The collection of fan-outs in the state database: one document a deployment, rule, task and key.
pub const COLLECTION: &str = "fan_outs";

/// What a fan-out is about: one at a time of each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject {
    /// The rule.
    pub rule: RuleId,
    /// Whose targets are found: [`Task::Value`], [`Task::Holders`] or [`Task::Parents`].
    pub task: Task,
    /// The source's match value, or for parents its `_id`.
    pub key: Key,
}

/// One fan-out.
#[derive(Debug, Clone, PartialEq)]
pub struct FanOut {
    /// What it is about.
    pub subject: Subject,
    /// Which of the times that it was asked for: progress of an older one does not overwrite a newer one.
    pub wish: ObjectId,
    /// The `_id` of the last target that is done.
    pub after: Option<Bson>,
    /// Whether its targets are read a part of the collection at a time: in the order of the collection's own collation, in which
    /// `after` is another place than in the simple one.
    pub in_parts: bool,
    /// When the oldest change was committed that it carries, in milliseconds since 1970.
    pub committed: Option<i64>,
}

/// The fan-outs of one deployment.
#[derive(Debug, Clone)]
pub struct FanOuts {
    /// The state database.
    pub database: String,
    /// What they are kept under: the deployment's name, or the id of one of its partitions.
    pub deployment: String,
}

impl FanOuts {
    /// Records that all targets of `subject` are to be done, from the first on. A pass that is under way goes on to its end, and
    /// another one follows.
    pub async fn open(&self, server: &Server, rule: &Rule, subject: Subject, committed: Option<i64>) -> Result<FanOut> {
        let wish = ObjectId::new();
        let mut update = doc! {
            "$set": {"wish": wish, "after": [], "term": server.term()},
            "$unset": {"in_parts": ""},
            "$setOnInsert": {"started": DateTime::now()},
        };
        if let Some(committed) = committed {
            update.insert("$min", doc! {"committed": DateTime::from_millis(committed)});
        }
        let filter = mine(server, self.id(&rule.name, subject.task, &subject.key));
        let fan_outs = server.collection(&self.database, COLLECTION);
        let open = fan_outs.find_one_and_update(filter, update).upsert(true);
        // One that comes late costs another pass.
        let saved =
            bounded(open.return_document(mongodb::options::ReturnDocument::After)).await.map_err(refused_upsert)?;
        let committed = saved.and_then(|doc| Some(doc.get_datetime("committed").ok()?.timestamp_millis()));
        Ok(FanOut { subject, wish, after: None, in_parts: false, committed })
    }

    /// Saves how far it is. False when it has been asked for again.
    pub async fn advance(&self, server: &Server, rule: &Rule, job: &FanOut) -> Result<bool> {
        let after: Vec<Bson> = job.after.iter().cloned().collect();
        let mut update = doc! {"after": after, "saved": DateTime::now()};
        if job.in_parts {
            update.insert("in_parts", true);
        }
        let update = doc! {"$set": update};
        let fan_outs = server.collection(&self.database, COLLECTION);
        // One that comes late takes the progress back.
        Ok(bounded(fan_outs.update_one(self.wished(server, rule, job), update)).await?.matched_count > 0)
    }

    /// Forgets it, all its targets being done. False when it has been asked for again.
    pub async fn close(&self, server: &Server, rule: &Rule, job: &FanOut) -> Result<bool> {
        let fan_outs = server.collection(&self.database, COLLECTION);
        Ok(bounded(fan_outs.delete_one(self.wished(server, rule, job))).await?.deleted_count > 0)
    }

    /// What is recorded of a subject now, whoever recorded it: nothing that has been refused by it is missed.
    pub async fn recorded(&self, server: &Server, rule: &Rule, subject: &Subject) -> Result<Option<FanOut>> {
        let after = server.operation_time().await?;
        let filter = doc! {"_id": self.id(&rule.name, subject.task, &subject.key)};
        let command = doc! {"find": COLLECTION, "filter": filter, "limit": 1};
        let found = server.read(&self.database, command, Reads { after }).await?;
        let found = found.first().map(|found| Document::try_from(found.as_ref())).transpose()?;
        Ok(found.as_ref().and_then(|found| progress(found, subject.clone())))
    }

    /// Forgets all of a rule, whose backfill is to do what they would have done.
    pub async fn forget(&self, server: &Server, rule: &str) -> Result<()> {
        let filter = doc! {
            "_id.deployment": &self.deployment, "_id.rule": rule, "term": {"$not": {"$gt": server.term()}},
        };
        bounded(server.collection(&self.database, COLLECTION).delete_many(filter)).await?;
        Ok(())
    }

    /// Those of the plan's rules.
    pub async fn all(&self, server: &Server, plan: &Plan) -> Result<Vec<FanOut>> {
        let filter = doc! {"_id.deployment": &self.deployment};
        let mut cursor = bounded(server.collection(&self.database, COLLECTION).find(filter)).await?;
        let mut out = Vec::new();
        while let Some(doc) = bounded(cursor.try_next()).await? {
            out.extend(read(&doc, plan));
        }
        Ok(out)
    }

    fn id(&self, rule: &str, task: Task, key: &Key) -> Document {
        doc! {"deployment": &self.deployment, "rule": rule, "task": task.name(), "key": key.values().to_vec()}
    }

    fn wished(&self, server: &Server, rule: &Rule, job: &FanOut) -> Document {
        let mut filter = mine(server, self.id(&rule.name, job.subject.task, &job.subject.key));
        filter.insert("wish", job.wish);
        filter
    }
}

fn read(doc: &Document, plan: &Plan) -> Option<FanOut> {
    let id = doc.get_document("_id").ok()?;
    let rule = plan.rules.iter().find(|rule| Some(rule.name.as_str()) == id.get_str("rule").ok())?;
    let subject = Subject {
        rule: rule.id,
        task: Task::named(id.get_str("task").ok()?)?,
        key: Key::new(id.get_array("key").ok()?.clone()),
    };
    progress(doc, subject)
}

fn progress(doc: &Document, subject: Subject) -> Option<FanOut> {
    Some(FanOut {
        subject,
        wish: doc.get_object_id("wish").ok()?,
        after: doc.get_array("after").ok()?.first().cloned(),
        in_parts: doc.get_bool("in_parts").unwrap_or_default(),
        committed: doc.get_datetime("committed").ok().map(|at| at.timestamp_millis()),
    })
}
