//! Requests from commands to the leader: targets to check again, processed in the leader's own order, and fields to
//! remove.

use std::time::Duration;

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::checkpoint::{rule_record::Retired, store::Store};
use denormd_model::clock;
use denormd_mongo::{
    Server, all, bounded,
    error::{Error, Kind, Result},
};

/// The collection of requests.
pub const REQUESTS: &str = "requests";
/// Number of requests that the leader takes at once.
const BATCH: i64 = 10;
/// Interval between reads of the answer.
const POLL_INTERVAL: Duration = Duration::from_millis(300);
/// Interval between two signs of life of a command that waits.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// A request is refused when its command has given no sign of life for this long, in milliseconds: nobody expects the
/// effect of a command that has failed or was interrupted.
const ABANDONED: i64 = 60_000;
/// Time that a request without any sign of life gets in addition, in milliseconds: commands of an earlier version give
/// none, and the clock of their machine may be ten minutes slow.
const WITHOUT_HEARTBEAT: i64 = 15 * 60_000;

/// A request about one rule.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorRequest {
    /// The id of the request.
    pub id: ObjectId,
    /// The name of the rule.
    pub rule: String,
    /// The requested work.
    pub work: RequestedWork,
}

/// The kinds of requested work.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestedWork {
    /// Reconcile the targets with these `_id`s.
    Reconcile(Vec<Bson>),
    /// Remove the fields at paths that no rule owns any more.
    Prune(Vec<Retired>),
    /// Put back the values that the first backfill of the rule has overwritten or removed.
    Undo,
}

/// The stored form of a request: one document for each partition.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(rename = "_id")]
    id: ObjectId,
    /// The id of the request, which the documents of all partitions share.
    #[serde(rename = "together")]
    together: ObjectId,
    #[serde(rename = "deployment")]
    deployment: String,
    #[serde(rename = "rule")]
    rule: String,
    #[serde(rename = "asked")]
    asked: DateTime,
    #[serde(rename = "targets", default, skip_serializing_if = "Option::is_none")]
    targets: Option<Vec<Bson>>,
    #[serde(rename = "prune", default, skip_serializing_if = "Option::is_none")]
    prune: Option<Vec<Retired>>,
    /// The same with conditions. An earlier version would ignore them, so it must not find the list under its own name.
    #[serde(rename = "prune_where", default, skip_serializing_if = "Option::is_none")]
    prune_where: Option<Vec<Retired>>,
    #[serde(rename = "undo", default, skip_serializing_if = "Option::is_none")]
    undo: Option<bool>,
    /// The reason why the leader refuses it.
    #[serde(rename = "refused", default, skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl Stored {
    fn of(together: ObjectId, deployment: &str, rule: &str, work: &RequestedWork) -> Self {
        let mut stored = Self {
            id: ObjectId::new(),
            together,
            deployment: deployment.to_owned(),
            rule: rule.to_owned(),
            asked: clock::now(),
            targets: None,
            prune: None,
            prune_where: None,
            undo: None,
            refused: None,
        };
        match work {
            RequestedWork::Reconcile(targets) => stored.targets = Some(targets.clone()),
            RequestedWork::Prune(paths) if paths.iter().any(|path| path.filter.is_some()) => {
                stored.prune_where = Some(paths.clone());
            }
            RequestedWork::Prune(paths) => stored.prune = Some(paths.clone()),
            RequestedWork::Undo => stored.undo = Some(true),
        }
        stored
    }

    fn work(self) -> Option<RequestedWork> {
        match self {
            Self { targets: Some(targets), .. } => Some(RequestedWork::Reconcile(targets)),
            Self { undo: Some(true), .. } => Some(RequestedWork::Undo),
            Self { prune, prune_where, .. } => prune_where.or(prune).map(RequestedWork::Prune),
        }
    }
}

/// Outcome of a request that the leader carries out by itself.
#[derive(Debug)]
pub enum RequestOutcome {
    /// Done.
    Done,
    /// Refused, with the reason.
    Refused(String),
    /// Stopped before the end, or not started yet.
    Stopped,
}

/// An expression: true for a request whose command has given no sign of life for too long.
fn is_abandoned() -> Document {
    let heard = doc! {"$ifNull": ["$heard", {"$add": ["$asked", WITHOUT_HEARTBEAT]}]};
    doc! {"$lt": [heard, {"$subtract": ["$$NOW", ABANDONED]}]}
}

impl Store {
    /// Records a request for the current or next leader of every partition. If that fails, the request is withdrawn.
    pub async fn request(&self, server: &Server, rule: &str, work: &RequestedWork) -> Result<ObjectId> {
        let asked = ObjectId::new();
        let requests = self
            .ids()
            .iter()
            .map(|id| bson::serialize_to_document(&Stored::of(asked, id, rule, work)).map_err(Error::from));
        let requests = requests.collect::<Result<Vec<_>>>()?;
        let recorded = async {
            server.collection(self.database(), REQUESTS).insert_many(requests).await?;
            self.still_waits(server, asked).await
        };
        if let Err(error) = recorded.await {
            // The request may be recorded although its answer was lost.
            self.withdraw(server, asked).await.ok();
            return Err(error);
        }
        Ok(asked)
    }

    /// Gives the leader a sign that the command still waits for its request: `heard`, by the server's clock, which only
    /// the server compares.
    async fn still_waits(&self, server: &Server, asked: ObjectId) -> Result<()> {
        let requests = server.collection(self.database(), REQUESTS);
        bounded(requests.update_many(doc! {"together": asked}, vec![doc! {"$set": {"heard": "$$NOW"}}])).await?;
        Ok(())
    }

    /// Withdraws a request that no leader has carried out yet.
    pub async fn withdraw(&self, server: &Server, asked: ObjectId) -> Result<()> {
        bounded(server.collection(self.database(), REQUESTS).delete_many(doc! {"together": asked})).await?;
        Ok(())
    }

    /// True if the command that made a request still waits for it. Work on it that takes long ends otherwise: the command may have
    /// been interrupted because the request was a mistake.
    pub async fn is_awaited(&self, server: &Server, id: ObjectId) -> Result<bool> {
        // Commands of an earlier version give no sign of life.
        let is_heard = doc! {"$or": [{"heard": {"$exists": false}}, {"$expr": {"$not": [is_abandoned()]}}]};
        let awaited = doc! {"$and": [{"_id": id, "refused": {"$exists": false}}, is_heard]};
        Ok(bounded(server.collection(self.database(), REQUESTS).find_one(awaited)).await?.is_some())
    }

    /// Refuses requests whose commands do not wait for them any more.
    async fn refuse_abandoned(&self, server: &Server, mut open: Document) -> Result<bool> {
        open.insert("$expr", is_abandoned());
        let refused = doc! {"$set": {"refused": "the command that requested it has ended, or was interrupted"}};
        let abandoned = bounded(server.collection(self.database(), REQUESTS).update_many(open, refused)).await?;
        Ok(abandoned.modified_count > 0)
    }

    /// The oldest open requests, but for those in progress. Refuses those that cannot be read, which would otherwise stay in
    /// front of the others.
    pub async fn requests(&self, server: &Server, in_progress: &[ObjectId]) -> Result<Vec<OperatorRequest>> {
        let open = doc! {
            "deployment": {"$in": self.ids().to_vec()}, "refused": {"$exists": false}, "_id": {"$type": "objectId"},
        };
        let others = doc! {"$and": [open.clone(), {"_id": {"$nin": in_progress.to_vec()}}]};
        let requests = server.collection(self.database(), REQUESTS);
        let oldest = || all(requests.find(others.clone()).sort(doc! {"_id": 1}).limit(BATCH));
        let mut found = oldest().await?;
        if !found.is_empty() && self.refuse_abandoned(server, open.clone()).await? {
            found = oldest().await?;
        }
        let read = |doc: &Document| {
            let stored: Stored = super::read(REQUESTS, doc).ok()?;
            Some(OperatorRequest { id: stored.id, rule: stored.rule.clone(), work: stored.work()? })
        };
        let mut requests = Vec::new();
        for doc in found {
            let Ok(id) = doc.get_object_id("_id") else { continue };
            match read(&doc) {
                Some(asked) => requests.push(asked),
                None => self.refuse_request(server, id, "this version cannot read the request").await?,
            }
        }
        Ok(requests)
    }

    /// True if no other partition has still to answer this request.
    pub async fn is_last(&self, server: &Server, id: ObjectId) -> Result<bool> {
        let requests = server.collection(self.database(), REQUESTS);
        let Some(mine) = bounded(requests.find_one(doc! {"_id": id})).await? else { return Ok(false) };
        let others = doc! {"together": mine.get("together").cloned(), "_id": {"$ne": id}};
        Ok(bounded(requests.find_one(others)).await?.is_none())
    }

    /// Deletes a request that is done.
    pub async fn request_done(&self, server: &Server, id: ObjectId) -> Result<()> {
        bounded(server.collection(self.database(), REQUESTS).delete_one(doc! {"_id": id})).await?;
        Ok(())
    }

    /// Records that a request is refused, for all partitions: none of them waits for this one.
    pub async fn refuse_request(&self, server: &Server, id: ObjectId, why: &str) -> Result<()> {
        let requests = server.collection(self.database(), REQUESTS);
        let refused = bounded(requests.find_one_and_update(doc! {"_id": id}, doc! {"$set": {"refused": why}})).await?;
        if let Some(refused) = refused {
            // Another partition may have refused it as well: without any document it would count as done.
            let others = doc! {
                "together": refused.get("together").cloned(), "_id": {"$ne": id}, "refused": {"$exists": false},
            };
            bounded(requests.delete_many(others)).await?;
        }
        Ok(())
    }

    /// Waits until a request is done. Returns an error if the request is refused.
    pub async fn until_done(&self, server: &Server, asked: ObjectId) -> Result<()> {
        let mut heard = Instant::now();
        while !self.is_done(server, asked).await? {
            if heard.elapsed() >= HEARTBEAT {
                self.still_waits(server, asked).await?;
                heard = Instant::now();
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// True if a request is done in all partitions: every target is written, already correct, or recorded as a dead
    /// letter. Once one of them has refused it, deletes it and returns an error with the reason.
    pub async fn is_done(&self, server: &Server, asked: ObjectId) -> Result<bool> {
        let requests = server.collection(self.database(), REQUESTS);
        let together = doc! {"together": asked};
        let open: Vec<Document> = requests.find(together.clone()).await?.try_collect().await?;
        let open = open.iter().map(|request| super::read(REQUESTS, request)).collect::<Result<Vec<Stored>>>()?;
        let is_done = open.is_empty();
        let Some(why) = open.into_iter().find_map(|request| request.refused) else { return Ok(is_done) };
        requests.delete_many(together).await?;
        Err(Error::new(Kind::State, format!("the leader refuses this: {why}")))
    }
}
