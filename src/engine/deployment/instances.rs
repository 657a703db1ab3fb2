//! The instances of a deployment, and which of their plans is the newest.
//!
//! During a rolling update, instances with the old and the new rules run at the same time. If either could lead, a
//! changed rule would be backfilled back and forth. So an instance leads only while no live instance has a newer plan.
//! The age of a plan is the time at which the deployment first saw it: an old instance that restarts during an update
//! keeps its older plan, and after a roll-back the older plan leads as soon as the newer instances are gone.
//!
//! In a partitioned deployment, each instance also announces how many partitions it leads. From these numbers alone,
//! [`next`] decides which instance takes a free partition and which one hands one over.

use std::{cmp::Ordering, time::Duration};

use bson::{DateTime, Document, doc};
use denormd_model::clock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::{
    checkpoint::read,
    deployment::identity::{self, Identity},
};
use denormd_mongo::{Connection, Server, all, bounded, error::Result};
use denormd_rules::plan::Plan;

/// The collection of instances in the state database: one document each.
pub const COLLECTION: &str = "instances";
/// The collection of plans in the state database: one document for each deployment and plan, with the time it was first
/// seen.
pub const PLANS: &str = "plans";

/// Next step of an instance towards an even distribution of the partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Take a free partition.
    Take,
    /// Hand one partition over to another instance.
    HandOver,
    /// Change nothing.
    Keep,
}

/// The next step of an instance that leads `mine` of `partitions`, while `others` are the numbers that the other
/// instances lead. The least loaded instances take free partitions. Once all are led, a partition is handed over only
/// if that makes the distribution more even, so the process terminates.
#[must_use]
pub fn next(mine: usize, others: &[usize], partitions: usize) -> Next {
    let least = others.iter().copied().min().unwrap_or(usize::MAX);
    let led = mine + others.iter().sum::<usize>();
    match led.cmp(&partitions) {
        Ordering::Less if mine <= least => Next::Take,
        Ordering::Equal if least < mine && mine - least > 1 => Next::HandOver,
        _ => Next::Keep,
    }
}

/// Identity of a plan: the meaning of its rules, in any order, and the number of partitions.
#[must_use]
pub fn fingerprint(plan: &Plan, partitions: u32) -> String {
    let mut rules: Vec<(&str, &Document)> =
        plan.rules.iter().map(|rule| (rule.name.as_str(), &rule.definition)).collect();
    rules.sort_by_key(|(name, _)| *name);
    let mut hash = Sha256::new();
    for (name, definition) in rules {
        hash.update(name.as_bytes());
        hash.update([0]);
        // A definition comes from a config, so it is smaller than the largest document.
        hash.update(bson::serialize_to_vec(definition).unwrap_or_default());
    }
    if partitions > 1 {
        hash.update(partitions.to_be_bytes());
    }
    hash.finalize().iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// An instance as it announces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Unique id.
    pub id: String,
    /// Host and process.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// Fingerprint of its plan.
    pub plan: String,
    /// Start of the process, in milliseconds since 1970 by the server's clock.
    pub started: i64,
}

/// The live instances of a deployment: those seen within `ttl`, oldest first.
pub async fn instances(server: &Server, database: &str, deployment: &str, ttl: Duration) -> Result<Vec<Instance>> {
    let there = doc! {"_id.deployment": deployment, "$expr": alive(ttl)};
    let instances = server.collection(database, COLLECTION);
    let found = all(instances.find(there).sort(doc! {"started": 1, "_id": 1})).await?;
    found.iter().map(|instance| read(COLLECTION, instance).map(|stored: Stored| stored.into())).collect()
}

/// The fields of an instance that are read, a part of those that [`Place::announce`] writes.
#[derive(Debug, Deserialize)]
struct Stored {
    #[serde(rename = "_id")]
    id: Id,
    /// The first version does not announce this field and the next.
    #[serde(rename = "host", default = "unknown")]
    host: String,
    #[serde(rename = "program", default = "unknown")]
    program: String,
    #[serde(rename = "process")]
    process: i64,
    #[serde(rename = "plan")]
    plan: String,
    #[serde(rename = "started")]
    started: DateTime,
    /// Number of partitions that it leads; none if it takes no partitions.
    #[serde(rename = "leads", default)]
    leads: Option<usize>,
}

/// The part of the `_id` that is read.
#[derive(Debug, Deserialize)]
struct Id {
    #[serde(rename = "instance")]
    instance: String,
}

fn unknown() -> String {
    "unknown".to_owned()
}

impl From<Stored> for Instance {
    fn from(stored: Stored) -> Self {
        let Stored { id, host, program, process, plan, started, .. } = stored;
        Self {
            id: id.instance,
            name: identity::name(&host, process),
            version: program,
            plan,
            started: started.timestamp_millis(),
        }
    }
}

fn alive(ttl: Duration) -> Document {
    doc! {"$gt": ["$seen", {"$subtract": ["$$NOW", clock::millis(ttl)]}]}
}

/// One instance's entry in its deployment. It is announced until this is dropped or leaves.
#[derive(Debug)]
pub struct Member {
    place: Place,
    announcement: watch::Sender<Announcement>,
    partitions: u32,
    heartbeat: tokio::task::JoinHandle<()>,
}

/// Announced properties of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Announcement {
    plan: String,
    /// Number of partitions that it leads; none if the deployment is not partitioned.
    leads: Option<usize>,
}

#[derive(Debug, Clone)]
struct Place {
    connection: Connection,
    database: String,
    deployment: String,
    instance: Identity,
    /// An instance that was not seen for this long counts as gone.
    ttl: Duration,
}

impl Member {
    /// Announces an instance with this plan, several times in each `ttl`.
    #[must_use]
    pub fn join(
        connection: impl Into<Connection>,
        database: &str,
        deployment: &str,
        instance: &Identity,
        ttl: Duration,
        plan: &Plan,
        partitions: u32,
    ) -> Self {
        let place = Place {
            connection: connection.into(),
            database: database.to_owned(),
            deployment: deployment.to_owned(),
            instance: instance.clone(),
            ttl,
        };
        let announcement = Announcement { plan: fingerprint(plan, partitions), leads: (partitions > 1).then_some(0) };
        let (sender, receiver) = watch::channel(announcement);
        let heartbeat = tokio::spawn(place.clone().keep(receiver));
        Self { place, announcement: sender, partitions, heartbeat }
    }

    /// Announces a new plan, after the rules were swapped.
    pub fn has_plan(&self, plan: &Plan) {
        let plan = fingerprint(plan, self.partitions);
        self.announcement.send_modify(|announcement| announcement.plan = plan);
    }

    /// Announces the number of partitions that it leads; none if it cannot take any, so that no other instance hands
    /// one over to it. In a deployment that is not divided, nothing is announced.
    pub fn leads(&self, partitions: Option<usize>) {
        let partitions = partitions.filter(|_| self.partitions > 1);
        let changed =
            |announcement: &mut Announcement| std::mem::replace(&mut announcement.leads, partitions) != partitions;
        self.announcement.send_if_modified(changed);
    }

    /// Numbers of partitions that the other instances lead: those that are alive, have the same plan, and take
    /// partitions.
    pub async fn others(&self) -> Result<Vec<usize>> {
        if self.partitions <= 1 {
            return Ok(Vec::new());
        }
        let Place { deployment, instance, ttl, .. } = &self.place;
        let plan = self.announcement.borrow().plan.clone();
        let others = doc! {
            "_id.deployment": deployment, "_id.instance": {"$ne": &instance.id}, "plan": plan, "leads": {"$exists": true},
            "$expr": alive(*ttl),
        };
        let mut leads = Vec::new();
        for other in all(self.place.collection(COLLECTION).find(others)).await? {
            let other: Stored = read(COLLECTION, &other)?;
            leads.extend(other.leads);
        }
        Ok(leads)
    }

    /// True if another live instance has a newer plan. Until the deployment has seen this instance's plan, none is newer.
    pub async fn is_outdated(&self) -> Result<bool> {
        let Place { deployment, instance, ttl, .. } = &self.place;
        let plan = self.announcement.borrow().plan.clone();
        let others = doc! {
            "_id.deployment": deployment, "_id.instance": {"$ne": &instance.id}, "plan": {"$ne": &plan}, "$expr": alive(*ttl),
        };
        let mine = doc! {"_id": self.place.plan_id(&plan)};
        let pipeline = vec![
            doc! {"$match": others},
            doc! {"$set": {"known": {"deployment": "$_id.deployment", "plan": "$plan"}}},
            doc! {"$lookup": {"from": PLANS, "localField": "known", "foreignField": "_id", "as": "known"}},
            doc! {"$lookup": {"from": PLANS, "pipeline": [{"$match": mine}], "as": "mine"}},
            doc! {"$match": {"$expr": {"$gt": [{"$first": "$known.first"}, {"$ifNull": [{"$first": "$mine.first"}, "$$NOW"]}]}}},
            doc! {"$count": "newer"},
        ];
        Ok(!all(self.place.collection(COLLECTION).aggregate(pipeline)).await?.is_empty())
    }

    /// Removes the announcement, so that the instance counts as gone at once.
    pub async fn leave(&self) {
        self.heartbeat.abort();
        let instances = self.place.collection(COLLECTION);
        let gone = instances.delete_one(doc! {"_id": self.place.id()}).into_future();
        // On failure, the document expires.
        if let Ok(Err(error)) = tokio::time::timeout(self.place.ttl / 5, gone).await {
            tracing::debug!(error = %denormd_mongo::error::Error::from(error).message, "this instance could not record that it leaves");
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.heartbeat.abort();
    }
}

impl Place {
    fn collection(&self, name: &str) -> mongodb::Collection<Document> {
        self.connection.now().collection(&self.database, name)
    }

    fn id(&self) -> Document {
        doc! {"deployment": &self.deployment, "instance": &self.instance.id}
    }

    fn plan_id(&self, plan: &str) -> Document {
        doc! {"deployment": &self.deployment, "plan": plan}
    }

    async fn keep(self, mut announcement: watch::Receiver<Announcement>) {
        loop {
            let now = announcement.borrow_and_update().clone();
            let announced = async {
                self.meet(&now.plan).await?;
                self.announce(&now).await
            };
            if let Err(error) = announced.await {
                tracing::debug!(error = %error.message, "this instance could not record that it is alive; trying again");
            }
            tokio::select! {
                () = tokio::time::sleep(self.ttl / 3) => {}
                changed = announcement.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Records the time at which the deployment first saw this plan.
    async fn meet(&self, plan: &str) -> Result<()> {
        let first = vec![doc! {"$set": {"first": {"$ifNull": ["$first", "$$NOW"]}}}];
        bounded(self.collection(PLANS).update_one(doc! {"_id": self.plan_id(plan)}, first).upsert(true)).await?;
        Ok(())
    }

    async fn announce(&self, announcement: &Announcement) -> Result<()> {
        let mut state = doc! {
            "plan": &announcement.plan, "seen": "$$NOW", "started": {"$ifNull": ["$started", "$$NOW"]},
            "process": self.instance.process, "host": {"$literal": &self.instance.host}, "program": env!("CARGO_PKG_VERSION"),
        };
        let update = match announcement.leads {
            Some(leads) => {
                state.insert("leads", i64::try_from(leads).unwrap_or(i64::MAX));
                vec![doc! {"$set": state}]
            }
            None => vec![doc! {"$set": state}, doc! {"$unset": "leads"}],
        };
        let instances = self.collection(COLLECTION);
        bounded(instances.update_one(doc! {"_id": self.id()}, update).upsert(true)).await?;
        // An instance that was silent for a day will not come back.
        let day = DateTime::from_millis(clock::wall_millis() - 24 * 3600 * 1000);
        let old = doc! {"_id.deployment": &self.deployment, "seen": {"$lt": day}};
        bounded(instances.delete_many(old)).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets all instances act in turn, each on the current numbers, until none of them does anything.
    fn settled(mut led: Vec<usize>, partitions: usize) -> (Vec<usize>, usize) {
        let mut handed_over = 0;
        loop {
            let mut changed = false;
            for nth in 0..led.len() {
                let others: Vec<usize> = led.iter().enumerate().filter(|(n, _)| *n != nth).map(|(_, l)| *l).collect();
                match next(led[nth], &others, partitions) {
                    Next::Take => led[nth] += 1,
                    Next::HandOver => {
                        led[nth] -= 1;
                        handed_over += 1;
                    }
                    Next::Keep => continue,
                }
                changed = true;
            }
            if !changed {
                led.sort_unstable();
                return (led, handed_over);
            }
        }
    }

    #[test]
    fn partitions_spread_evenly_and_come_to_rest() {
        for (before, partitions, after, moves) in [
            (vec![0], 4, vec![4], 0),
            (vec![0, 0], 4, vec![2, 2], 0),
            (vec![4, 0], 4, vec![2, 2], 2),
            (vec![2, 2, 0], 4, vec![1, 1, 2], 1),
            (vec![2, 1], 4, vec![2, 2], 0),
            (vec![3, 3, 0, 0], 6, vec![1, 1, 2, 2], 3),
            (vec![1, 1, 0], 2, vec![0, 1, 1], 0),
        ] {
            assert_eq!(settled(before.clone(), partitions), (after, moves), "{before:?}");
        }
        for instances in 1..8 {
            for partitions in 1..20 {
                let mut led = vec![0; instances];
                led[0] = partitions;
                let (led, _) = settled(led, partitions);
                assert_eq!(led.iter().sum::<usize>(), partitions);
                assert!(led[instances - 1] - led[0] <= 1, "{led:?}");
            }
        }
    }

    #[test]
    fn nothing_is_handed_over_while_a_partition_is_free() {
        assert_eq!(next(3, &[0], 4), Next::Keep, "the other one is about to take it");
        assert_eq!(next(0, &[3], 4), Next::Take);
    }
}
