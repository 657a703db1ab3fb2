//! What commands ask of the leader: targets to look at again, in the leader's own order.

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;

use crate::{checkpoint::store::Store, error::Result, mongo::Server};

/// The collection of requests.
pub const REQUESTS: &str = "requests";
/// Requests that the leader takes at once.
const SOME: i64 = 10;

/// Targets of one rule to look at again.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The request.
    pub id: ObjectId,
    /// The rule's name.
    pub rule: String,
    /// The targets' `_id`s.
    pub targets: Vec<Bson>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Nobody has done it yet.
    Waiting,
    /// It is done: written, found right, or recorded as dead letters.
    Done,
    /// The leader does not do it, and why.
    Refused(String),
}

impl Store {
    /// Asks the leader of every partition, whoever it is or will be, to look at these targets again.
    pub async fn request(&self, server: &Server, rule: &str, targets: &[Bson]) -> Result<ObjectId> {
        let asked = ObjectId::new();
        let requests = self.ids().iter().map(|id| {
            doc! {
                "_id": ObjectId::new(), "together": asked, "deployment": id, "rule": rule, "targets": targets.to_vec(),
                "asked": DateTime::now(),
            }
        });
        server.collection(self.database(), REQUESTS).insert_many(requests).await?;
        Ok(asked)
    }

    /// The oldest requests that nobody has done.
    pub async fn requests(&self, server: &Server) -> Result<Vec<Asked>> {
        let open = doc! {"deployment": {"$in": self.ids().to_vec()}, "refused": {"$exists": false}};
        let requests = server.collection(self.database(), REQUESTS);
        let found: Vec<Document> = requests.find(open).sort(doc! {"_id": 1}).limit(SOME).await?.try_collect().await?;
        let read = |doc: Document| {
            let id = doc.get_object_id("_id").ok()?;
            let targets = doc.get_array("targets").ok()?.clone();
            Some(Asked { id, rule: doc.get_str("rule").ok()?.to_owned(), targets })
        };
        Ok(found.into_iter().filter_map(read).collect())
    }

    /// A request is done.
    pub async fn request_done(&self, server: &Server, id: ObjectId) -> Result<()> {
        server.collection(self.database(), REQUESTS).delete_one(doc! {"_id": id}).await?;
        Ok(())
    }

    /// A request is not done, and will not be.
    pub async fn refuse_request(&self, server: &Server, id: ObjectId, why: &str) -> Result<()> {
        let update = doc! {"$set": {"refused": why}};
        server.collection(self.database(), REQUESTS).update_one(doc! {"_id": id}, update).await?;
        Ok(())
    }

    /// What became of what was asked. What is refused by one is forgotten with the answer.
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
