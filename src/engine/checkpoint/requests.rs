//! Requests from commands to the leader: targets to check again, processed in the leader's own order, and fields to
//! remove.

use std::time::Duration;

use bson::{Bson, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;

use crate::checkpoint::store::Store;
use denormd_model::{clock, field_path::FieldPath};
use denormd_mongo::{
    Server, bounded,
    error::{Error, Kind, Result},
};

/// The collection of requests.
pub const REQUESTS: &str = "requests";
/// Number of requests that the leader takes at once.
const SOME: i64 = 10;
/// Interval between reads of the answer.
const LOOK: Duration = Duration::from_millis(300);

/// A request about one rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The id of the request.
    pub id: ObjectId,
    /// The name of the rule.
    pub rule: String,
    /// The requested work.
    pub work: Work,
}

/// The kinds of requested work.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// Reconcile the targets with these `_id`s.
    Look(Vec<Bson>),
    /// Remove the fields at paths that no rule owns any more.
    Prune(Vec<Retired>),
    /// Put back the values that the first backfill of the rule has overwritten or removed.
    Undo,
}

/// A path of a collection that a rule used to own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Retired {
    /// The full name of the collection, with its database.
    pub collection: String,
    /// The path of the field.
    pub path: FieldPath,
}

impl Retired {
    /// The names of the database and the collection.
    #[must_use]
    pub fn namespace(&self) -> (&str, &str) {
        self.collection.split_once('.').unwrap_or_default()
    }

    pub(super) fn written(&self) -> Bson {
        Bson::Document(doc! {"collection": &self.collection, "path": self.path.to_string()})
    }

    pub(super) fn read(value: &Bson) -> Option<Self> {
        let doc = value.as_document()?;
        let path = FieldPath::parse(doc.get_str("path").ok()?).ok()?;
        Some(Self { collection: doc.get_str("collection").ok()?.to_owned(), path })
    }
}

impl Work {
    fn written(&self) -> Document {
        match self {
            Self::Look(targets) => doc! {"targets": targets.clone()},
            Self::Prune(paths) => {
                doc! {"prune": paths.iter().map(Retired::written).collect::<Vec<_>>()}
            }
            Self::Undo => doc! {"undo": true},
        }
    }

    fn read(doc: &Document) -> Option<Self> {
        if let Ok(targets) = doc.get_array("targets") {
            return Some(Self::Look(targets.clone()));
        }
        if doc.get_bool("undo").unwrap_or_default() {
            return Some(Self::Undo);
        }
        doc.get_array("prune").ok()?.iter().map(Retired::read).collect::<Option<_>>().map(Self::Prune)
    }
}

/// Outcome of a request that the leader carries out by itself.
#[derive(Debug)]
pub enum Carried {
    /// Done.
    Out,
    /// Refused, with the reason.
    Refused(String),
    /// Stopped before the end, or not started yet.
    Stopped,
}

/// The state of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Not done yet.
    Waiting,
    /// Done: every target is written, already correct, or recorded as a dead letter.
    Done,
    /// Refused by the leader, with the reason.
    Refused(String),
}

impl Store {
    /// Records a request for the current or next leader of every partition.
    pub async fn request(&self, server: &Server, rule: &str, work: &Work) -> Result<ObjectId> {
        let asked = ObjectId::new();
        let requests = self.ids().iter().map(|id| {
            let mut request = doc! {
                "_id": ObjectId::new(), "together": asked, "deployment": id, "rule": rule, "asked": clock::now(),
            };
            request.extend(work.written());
            request
        });
        server.collection(self.database(), REQUESTS).insert_many(requests).await?;
        Ok(asked)
    }

    /// The oldest open requests. Refuses those that cannot be read, which would otherwise stay in front of the others.
    pub async fn requests(&self, server: &Server) -> Result<Vec<Asked>> {
        let open = doc! {
            "deployment": {"$in": self.ids().to_vec()}, "refused": {"$exists": false}, "_id": {"$type": "objectId"},
        };
        let requests = server.collection(self.database(), REQUESTS);
        let found: Vec<Document> = requests.find(open).sort(doc! {"_id": 1}).limit(SOME).await?.try_collect().await?;
        let read =
            |id, doc: &Document| Some(Asked { id, rule: doc.get_str("rule").ok()?.to_owned(), work: Work::read(doc)? });
        let mut requests = Vec::new();
        for doc in found {
            let Ok(id) = doc.get_object_id("_id") else { continue };
            match read(id, &doc) {
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
        server.collection(self.database(), REQUESTS).delete_one(doc! {"_id": id}).await?;
        Ok(())
    }

    /// Records that a request is refused, for all partitions: none of them waits for this one.
    pub async fn refuse_request(&self, server: &Server, id: ObjectId, why: &str) -> Result<()> {
        let requests = server.collection(self.database(), REQUESTS);
        let refused = bounded(requests.find_one_and_update(doc! {"_id": id}, doc! {"$set": {"refused": why}})).await?;
        if let Some(refused) = refused {
            let others = doc! {"together": refused.get("together").cloned(), "_id": {"$ne": id}};
            bounded(requests.delete_many(others)).await?;
        }
        Ok(())
    }

    /// Waits until a request is done. Returns an error if the request is refused.
    pub async fn until_done(&self, server: &Server, asked: ObjectId) -> Result<()> {
        loop {
            match self.answer(server, asked).await? {
                Answer::Done => return Ok(()),
                Answer::Waiting => tokio::time::sleep(LOOK).await,
                Answer::Refused(why) => {
                    return Err(Error::new(Kind::State, format!("the leader refuses this: {why}"))
                        .hint("does the leader run with this config?"));
                }
            }
        }
    }

    /// The state of a request over all partitions. Deletes it once one of them has refused it.
    pub async fn answer(&self, server: &Server, asked: ObjectId) -> Result<Answer> {
        let requests = server.collection(self.database(), REQUESTS);
        let together = doc! {"together": asked};
        let open: Vec<Document> = requests.find(together.clone()).await?.try_collect().await?;
        let Some(why) = open.iter().find_map(|request| request.get_str("refused").ok()) else {
            return Ok(if open.is_empty() { Answer::Done } else { Answer::Waiting });
        };
        requests.delete_many(together).await?;
        Ok(Answer::Refused(why.to_owned()))
    }
}
