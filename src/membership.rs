//! Who is there: the instances of a deployment, and which of their plans is the newest.
//!
//! In a rolling update instances with the old and the new rules run side by side. If either could lead, a changed rule would
//! be backfilled back and forth. So an instance leads only while no other one that is alive has a newer plan. A plan's age
//! is when the deployment first met it: an old instance that restarts in the middle of an update stays the older one, and
//! after a roll-back the older plan leads as soon as the newer instances are gone.

use std::time::Duration;

use bson::{DateTime, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::{
    error::Result,
    mongo::{Connection, bounded},
    plan::Plan,
};

/// The collection of instances in the state database: one document each.
pub const COLLECTION: &str = "instances";
/// The collection of plans in the state database: one document a deployment and plan, with the time it was first met.
pub const PLANS: &str = "plans";

/// What tells two plans apart: what their rules mean, in any order.
#[must_use]
pub fn fingerprint(plan: &Plan) -> String {
    let mut rules: Vec<(&str, &Document)> =
        plan.rules.iter().map(|rule| (rule.name.as_str(), &rule.definition)).collect();
    rules.sort_by_key(|(name, _)| *name);
    let mut hash = Sha256::new();
    for (name, definition) in rules {
        hash.update(name.as_bytes());
        hash.update([0]);
        // A definition was read from a config, which is smaller than any document may be.
        hash.update(bson::serialize_to_vec(definition).unwrap_or_default());
    }
    hash.finalize().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// One instance's place among those of its deployment. It is announced until this is dropped or it leaves.
#[derive(Debug)]
pub struct Member {
    place: Place,
    plan: watch::Sender<String>,
    beat: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Clone)]
struct Place {
    connection: Connection,
    database: String,
    deployment: String,
    instance: String,
    /// An instance that has not been heard of for this long is not there.
    ttl: Duration,
}

impl Member {
    /// Announces an instance with this plan, several times in every `ttl`.
    #[must_use]
    pub fn join(
        connection: impl Into<Connection>,
        database: &str,
        deployment: &str,
        ttl: Duration,
        plan: &Plan,
    ) -> Self {
        let place = Place {
            connection: connection.into(),
            database: database.to_owned(),
            deployment: deployment.to_owned(),
            instance: ObjectId::new().to_hex(),
            ttl,
        };
        let (sender, receiver) = watch::channel(fingerprint(plan));
        let beat = tokio::spawn(place.clone().keep(receiver));
        Self { place, plan: sender, beat }
    }

    /// The rules have been swapped.
    pub fn has_plan(&self, plan: &Plan) {
        self.plan.send_replace(fingerprint(plan));
    }

    /// Whether another instance that is there has a newer plan. Until the deployment has met this one's
    /// plan, every other is newer.
    pub async fn is_outdated(&self) -> Result<bool> {
        let plan = self.plan.borrow().clone();
        Ok(self.place.newer_than(&plan).await? > 0)
    }

    /// Is not there any more.
    pub async fn leave(&self) {
        self.beat.abort();
        let instances = self.place.collection(COLLECTION);
        let gone = instances.delete_one(doc! {"_id": self.place.id()}).into_future();
        // Otherwise its document gets old.
        if let Ok(Err(error)) = tokio::time::timeout(self.place.ttl / 5, gone).await {
            tracing::debug!(error = %crate::error::Error::from(error).message, "could not say that this instance leaves");
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.beat.abort();
    }
}

impl Place {
    fn collection(&self, name: &str) -> mongodb::Collection<Document> {
        self.connection.now().collection(&self.database, name)
    }

    fn id(&self) -> Document {
        doc! {"deployment": &self.deployment, "instance": &self.instance}
    }

    fn plan_id(&self, plan: &str) -> Document {
        doc! {"deployment": &self.deployment, "plan": plan}
    }

    async fn keep(self, mut plan: watch::Receiver<String>) {
        loop {
            let now = plan.borrow_and_update().clone();
            let beat = async {
                self.meet(&now).await?;
                self.beat(&now).await
            };
            if let Err(error) = beat.await {
                tracing::debug!(error = %error.message, "could not say that this instance is there; trying again");
            }
            tokio::select! {
                () = tokio::time::sleep(self.ttl / 3) => {}
                changed = plan.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Remembers since when the deployment knows this plan.
    async fn meet(&self, plan: &str) -> Result<()> {
        let first = vec![doc! {"$set": {"first": {"$ifNull": ["$first", "$$NOW"]}}}];
        bounded(self.collection(PLANS).update_one(doc! {"_id": self.plan_id(plan)}, first).upsert(true)).await?;
        Ok(())
    }

    async fn beat(&self, plan: &str) -> Result<()> {
        let state = doc! {
            "plan": plan, "seen": "$$NOW", "started": {"$ifNull": ["$started", "$$NOW"]},
            "process": i64::from(std::process::id()),
        };
        let instances = self.collection(COLLECTION);
        bounded(instances.update_one(doc! {"_id": self.id()}, vec![doc! {"$set": state}]).upsert(true)).await?;
        // What has been silent for a day does not come back.
        let day = DateTime::from_millis(DateTime::now().timestamp_millis() - 24 * 3600 * 1000);
        let old = doc! {"_id.deployment": &self.deployment, "seen": {"$lt": day}};
        bounded(instances.delete_many(old)).await?;
        Ok(())
    }

    /// How many instances that are alive have a plan that was first met after this one.
    async fn newer_than(&self, plan: &str) -> Result<usize> {
        let millis = i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX);
        let alive = doc! {"$gt": ["$seen", {"$subtract": ["$$NOW", millis]}]};
        let pipeline = vec![
            doc! {"$match": {"_id.deployment": &self.deployment, "plan": {"$ne": plan}, "$expr": alive}},
            doc! {"$set": {"known": {"deployment": "$_id.deployment", "plan": "$plan"}}},
            doc! {"$lookup": {"from": PLANS, "localField": "known", "foreignField": "_id", "as": "known"}},
            doc! {"$lookup": {
                "from": PLANS, "pipeline": [{"$match": {"_id": self.plan_id(plan)}}], "as": "mine",
            }},
            doc! {"$match": {"$expr": {"$gt": [{"$first": "$known.first"}, {"$first": "$mine.first"}]}}},
            doc! {"$count": "newer"},
        ];
        let mut cursor = bounded(self.collection(COLLECTION).aggregate(pipeline)).await?;
        let newer = bounded(cursor.try_next()).await?.and_then(|found| found.get_i32("newer").ok());
        Ok(newer.and_then(|count| usize::try_from(count).ok()).unwrap_or_default())
    }
}
