//! The lease of the leader: a document in the state database, valid by the server's clock alone.
//!
//! The instance named in the document may write until `until`, and every write of it has ended by then
//! ([`denormd_mongo::fence`]). Another instance may take the lease shortly after that, or at once if it was released,
//! and the term grows with every take-over. Local time is only used to measure the time since a request was sent.
//!
//! An expired lease is not lost yet. Nothing is written under it ([`denormd_mongo::fence`]), but it is still renewed,
//! and continues if nobody took it in the meantime: owner and term in the document change with every take-over. So an
//! election or a late answer does not cause a take-over.
//!
//! The clock of the next primary may be behind. So there is a second end, `cluster_until`, by the cluster time if that
//! is ahead of the server's clock, and a lease is free only when both have passed. If the cluster time is ahead by more
//! than [`MOST_SKEW`], there is no second end: a successor would wait too long for it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use mongodb::{
    Collection,
    options::{FindOneAndUpdateOptions, ReturnDocument},
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{
        read,
        store::{claim_term, highest_term},
        unreadable,
    },
    deployment::identity::{self, Identity},
};
use denormd_model::{clock::millis, failpoint, partition::of_deployment};
use denormd_mongo::{
    Connection, End, Fence, Server, all, code,
    error::{Error, Result},
    unless,
};

/// The collection of leases in the state database: one document for each deployment, or for each partition of one.
pub const COLLECTION: &str = "leases";
/// Extra time after `until` that a successor waits for the predecessor's writes to end. A server notices the end of a
/// command's time within milliseconds; this allows for a busy one.
pub const GRACE: Duration = Duration::from_secs(1);
/// Longest interval between renewals, however long the lease is valid: the leader finds out early that it cannot renew.
const RENEW: Duration = Duration::from_secs(2);
/// Greatest tolerated clock difference between the members of a replica set. After a failover to a slow clock, a lost
/// leader is replaced that much later. With larger differences a stale write is possible.
pub const MOST_SKEW: Duration = Duration::from_secs(600);
/// Interval between a standby's attempts to take the lease.
const POLL: Duration = Duration::from_millis(500);
/// Pause after a failed renewal.
const AGAIN: Duration = Duration::from_millis(200);
/// Time limit for giving the lease back.
const RELEASE: Duration = Duration::from_secs(2);
/// Time limit for giving back a lease whose grant was lost with the answer.
const WITHDRAW: Duration = Duration::from_secs(60);

/// One instance's claim to lead a deployment.
#[derive(Debug, Clone)]
pub struct Lease<R = LeaseDocument> {
    registry: R,
    ttl: Duration,
}

/// Storage of the lease, and the clock that decides. Every answer is majority-committed: a write that a new primary
/// might lack does not count.
pub trait Registry: Clone + Send + Sync + 'static {
    /// Takes the lease for `owner` if nobody has it. None if it is taken.
    fn take(&self, owner: &str) -> impl Future<Output = Result<Option<Grant>>> + Send;

    /// Renews the lease; returns its new end. None if another owner has it.
    fn renew(&self, owner: &str, term: i64) -> impl Future<Output = Result<Option<End>>> + Send;

    /// Makes the lease free at once. Each grant has an owner of its own.
    fn give_back(&self, owner: &str) -> impl Future<Output = Result<()>> + Send;
}

/// A lease as granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Number of take-overs.
    pub term: i64,
    /// Its end by the registry's clock.
    pub until: End,
    /// True if the state has a later term than the document: the document was deleted, or another instance has marked
    /// the state, and a leader of that term may not have noticed yet.
    pub has_later_term: bool,
}

/// A document in the state database.
#[derive(Debug, Clone)]
pub struct LeaseDocument {
    connection: Connection,
    database: String,
    deployment: String,
    instance: Identity,
    ttl: Duration,
}

/// A held lease. It is renewed until it is released, lost, or dropped.
#[derive(Debug)]
pub struct Held<R: Registry = LeaseDocument> {
    registry: R,
    /// Unique to this leadership, also among those of this instance: the writes of an earlier one must have ended
    /// before this one begins.
    owner: String,
    fence: Arc<Fence>,
    lost: CancellationToken,
    renewal: tokio::task::JoinHandle<()>,
}

impl Lease {
    /// A claim of `instance` on the lease of `deployment`, which is kept in `database`.
    #[must_use]
    pub fn new(
        connection: impl Into<Connection>,
        database: &str,
        deployment: &str,
        instance: &Identity,
        ttl: Duration,
    ) -> Self {
        let registry = LeaseDocument {
            connection: connection.into(),
            database: database.to_owned(),
            deployment: deployment.to_owned(),
            instance: instance.clone(),
            ttl,
        };
        Self::of(registry, ttl)
    }
}

impl<R: Registry> Lease<R> {
    /// A claim on the lease that `registry` keeps and grants for `ttl` at a time.
    #[must_use]
    pub fn of(registry: R, ttl: Duration) -> Self {
        Self { registry, ttl }
    }

    /// Waits until this instance leads. Retries after every error.
    pub async fn stand_by(&self) -> Held<R> {
        loop {
            match self.try_lead().await {
                Ok(Some(held)) => return held,
                Ok(None) => {}
                Err(error) => tracing::warn!(error = %error.message, "the lease cannot be read; trying again"),
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Takes the lease if it is free.
    pub async fn try_lead(&self) -> Result<Option<Held<R>>> {
        let (owner, sent) = (ObjectId::new().to_hex(), Instant::now());
        let limited = tokio::time::timeout(self.ttl, self.registry.take(&owner));
        let answer = limited.await.unwrap_or_else(|_| Err(Error::internal("no answer in time")));
        if answer.is_err() {
            tokio::spawn(self.clone().withdraw(owner.clone()));
        }
        let Some(grant) = answer? else { return Ok(None) };
        failpoint::here("lease-taken");
        let held = self.hold(owner, &grant, sent);
        if grant.has_later_term {
            tracing::warn!(
                term = grant.term,
                "the state has a later term than the lease: waiting until a leader of that term has stopped"
            );
            tokio::select! {
                () = tokio::time::sleep(self.ttl + GRACE) => {}
                () = held.lost() => return Ok(None),
            }
        }
        Ok(Some(held))
    }

    /// Gives back a lease that may have been granted to `owner`, or renewed, by an answer that got lost. Nothing is
    /// written under it any more, and no instance has to wait until it expires.
    async fn withdraw(self, owner: String) {
        let given_back = async {
            // Twice: a request that was sent earlier may arrive later.
            for _ in 0..2 {
                while !matches!(tokio::time::timeout(self.ttl, self.registry.give_back(&owner)).await, Ok(Ok(()))) {
                    tokio::time::sleep(AGAIN).await;
                }
                tokio::time::sleep(POLL).await;
            }
        };
        tokio::time::timeout(WITHDRAW, given_back).await.ok();
    }

    fn hold(&self, owner: String, grant: &Grant, sent: Instant) -> Held<R> {
        let fence = Arc::new(Fence::new(grant.term, grant.until));
        let lost = CancellationToken::new();
        let ends = sent + self.ttl;
        let renewal = tokio::spawn(self.clone().keep(owner.clone(), fence.clone(), ends, lost.clone()));
        tracing::info!(term = grant.term, "this instance leads");
        Held { registry: self.registry.clone(), owner, fence, lost, renewal }
    }

    /// Renews the lease until it is lost: another instance has it or has marked the state, or it could not be renewed
    /// for one more `ttl` after it expired. `ends` is the latest time of its expiry by the local clock.
    async fn keep(self, owner: String, fence: Arc<Fence>, mut ends: Instant, lost: CancellationToken) {
        let rhythm = RENEW.min(self.ttl / 3);
        let mut pause = rhythm;
        let why = loop {
            tokio::time::sleep(pause).await;
            if fence.is_superseded() {
                // The lease is not released: writes may be in progress until it expires.
                break "the state has the mark of a later leader";
            }
            let sent = Instant::now();
            match tokio::time::timeout(self.ttl / 3, self.registry.renew(&owner, fence.term())).await {
                Ok(Ok(Some(until))) => {
                    fence.extend(until);
                    (ends, pause) = (sent + self.ttl, rhythm);
                }
                Ok(Ok(None)) => break "the document was deleted, or names another instance",
                Ok(Err(error)) => {
                    tracing::warn!(term = fence.term(), error = %error.message, "the lease was not renewed; trying again");
                    pause = AGAIN;
                }
                Err(_) => {
                    tracing::warn!(term = fence.term(), "the lease was not renewed: no answer; trying again");
                    pause = AGAIN;
                }
            }
            if Instant::now() >= ends + self.ttl {
                // The writes under the lease ended when it expired, more than half a `ttl` ago. But requests that are
                // still in transit may have renewed it.
                tokio::spawn(self.clone().withdraw(owner));
                break "it could not be renewed in time";
            }
        };
        tracing::error!(term = fence.term(), why, "the lease is lost");
        lost.cancel();
    }
}

impl LeaseDocument {
    fn collection(&self) -> Collection<Document> {
        self.connection.now().collection(&self.database, COLLECTION)
    }

    fn until(&self) -> Document {
        doc! {"$add": ["$$NOW", millis(self.ttl)]}
    }

    /// The end by the cluster time; null if the cluster time is too far ahead.
    fn cluster_until(&self) -> Document {
        let most = doc! {"$add": ["$$NOW", millis(MOST_SKEW)]};
        doc! {"$cond": [{"$lte": [latest(), most]}, {"$add": [latest(), millis(self.ttl)]}, null]}
    }

    fn mine(&self, owner: &str) -> Document {
        doc! {"_id": &self.deployment, "owner": owner}
    }
}

impl Registry for LeaseDocument {
    async fn take(&self, owner: &str) -> Result<Option<Grant>> {
        let id = doc! {"_id": &self.deployment};
        let seen = self.collection().find_one(id.clone()).projection(doc! {"free": is_free(), "term": 1}).await?;
        let taken: Option<Taken> = seen.as_ref().map(|lease| read(COLLECTION, lease)).transpose()?;
        if taken.is_some_and(|lease| !lease.free) {
            return Ok(None);
        }
        let before = highest_term(&self.connection.now(), &self.database, &self.deployment).await?;
        let term = doc! {"$add": [{"$max": [{"$ifNull": ["$term", 0_i64]}, before]}, 1_i64]};
        let mine = doc! {
            "_id": "$_id", "term": term, "owner": owner, "until": self.until(),
            "cluster_until": self.cluster_until(), "host": {"$literal": &self.instance.host},
            "process": self.instance.process, "instance": &self.instance.id, "taken": "$$NOW",
        };
        let update = vec![doc! {"$replaceWith": {"$cond": [is_free(), mine, "$$ROOT"]}}];
        let options = FindOneAndUpdateOptions::builder().upsert(true).return_document(ReturnDocument::After).build();
        let taken = self.collection().find_one_and_update(id, update).with_options(options).await;
        // Another instance may have created the document at the same moment.
        let taken = unless(code::DUPLICATE_KEY, taken)?.flatten();
        let Some(doc) = taken.filter(|doc| doc.get_str("owner").ok() == Some(owner)) else { return Ok(None) };
        let term = term_of(&doc)?;
        // Recorded a second time, in a place that is not deleted along with the lease. The lease may have been deleted
        // since it was read, and taken by another instance in the same term: then both leases are left to expire.
        if !claim_term(&self.connection.now(), &self.database, &self.deployment, term).await? {
            tracing::warn!(term, "the lease was deleted while this instance took it; it is not used, and expires");
            return Ok(None);
        }
        let known = seen.as_ref().and_then(|seen| seen.get_i64("term").ok()).unwrap_or_default();
        Ok(Some(Grant { term, until: until_of(&doc)?, has_later_term: before > known }))
    }

    async fn renew(&self, owner: &str, term: i64) -> Result<Option<End>> {
        let update = vec![doc! {"$set": {"until": self.until(), "cluster_until": self.cluster_until()}}];
        let leases = self.collection();
        let mut mine = self.mine(owner);
        mine.insert("term", term);
        let renewed = leases.find_one_and_update(mine, update);
        renewed.return_document(ReturnDocument::After).await?.as_ref().map(until_of).transpose()
    }

    async fn give_back(&self, owner: &str) -> Result<()> {
        let update = vec![doc! {"$set": {"owner": Bson::Null, "until": "$$NOW"}}];
        self.collection().update_one(self.mine(owner), update).await?;
        Ok(())
    }
}

impl<R: Registry> Held<R> {
    /// Term of this leadership, which grows with every take-over.
    #[must_use]
    pub fn term(&self) -> i64 {
        self.fence.term()
    }

    /// Fence that bounds the writes of this leadership.
    #[must_use]
    pub fn fence(&self) -> Arc<Fence> {
        self.fence.clone()
    }

    /// Returns when the leadership is over: all its work must stop at once.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Gives the lease back, so that another instance leads at once. Call it only when no write under the lease is being awaited.
    /// It first waits until writes whose wait was cancelled can no longer run.
    pub async fn release(self) {
        self.fence.abandoned_writes_are_over().await;
        self.renewal.abort();
        let term = self.term();
        match tokio::time::timeout(RELEASE, self.registry.give_back(&self.owner)).await {
            Ok(Ok(())) => tracing::info!(term, "the lease was released"),
            Ok(Err(error)) => {
                tracing::warn!(term, error = %error.message, "the lease could not be released and will expire");
            }
            Err(_) => tracing::warn!(term, "the lease could not be released in time and will expire"),
        }
    }
}

impl<R: Registry> Drop for Held<R> {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

/// True if any of these partitions of a deployment has a leader now.
pub async fn is_held(server: &Server, database: &str, ids: &[String]) -> Result<bool> {
    Ok(!held(server, database, ids).await?.is_empty())
}

/// Those of these partitions that have a leader now.
pub async fn held(server: &Server, database: &str, ids: &[String]) -> Result<Vec<String>> {
    let filter = doc! {"_id": {"$in": ids.to_vec()}};
    let leases = server.collection(database, COLLECTION);
    let found = all(leases.find(filter).projection(doc! {"free": is_free()})).await?;
    let leases = found.iter().map(|lease| read(COLLECTION, lease)).collect::<Result<Vec<Taken>>>()?;
    Ok(leases.into_iter().filter(|lease| !lease.free).map(|lease| lease.id).collect())
}

/// The `_id` of a lease, and whether the lease is free, which the server computes ([`is_free`]).
#[derive(Debug, Deserialize)]
struct Taken {
    #[serde(rename = "_id")]
    id: String,
    #[serde(rename = "free")]
    free: bool,
}

/// The holder in a lease, as [`LeaseDocument`] writes it.
#[derive(Debug, Deserialize)]
struct Named {
    #[serde(rename = "host")]
    host: String,
    #[serde(rename = "process")]
    process: i64,
    /// Release 0.1 does not write it.
    #[serde(rename = "instance", default)]
    instance: String,
    #[serde(rename = "term")]
    term: i64,
    #[serde(rename = "taken")]
    taken: DateTime,
    #[serde(rename = "until")]
    until: DateTime,
}

/// The leader, as its lease names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the instance: host and process.
    pub instance: String,
    /// Id of the instance; empty if an instance of release 0.1 took the lease.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Term of the leadership.
    pub term: i64,
    /// Time of the take-over, in milliseconds since 1970 by the server's clock.
    pub since: i64,
    /// Time at which the lease expires unless it is renewed, by the same clock.
    #[serde(default)]
    pub until: i64,
}

/// Holders of all leases of a deployment by the lease's id, for any number of partitions.
pub async fn holders(server: &Server, database: &str, deployment: &str) -> Result<BTreeMap<String, Holder>> {
    let fields = doc! {"free": is_free(), "host": 1, "process": 1, "instance": 1, "term": 1, "taken": 1, "until": 1};
    let leases = server.collection(database, COLLECTION);
    let found = all(leases.find(of_deployment("_id", deployment)).projection(fields)).await?;
    let mut holders = BTreeMap::new();
    for lease in &found {
        let Taken { id, free } = read(COLLECTION, lease)?;
        // A change of the number of partitions marks leases whose leaders it does not know, without a host.
        if free || !lease.contains_key("host") {
            continue;
        }
        let Named { host, process, instance, term, taken, until } = read(COLLECTION, lease)?;
        let (since, until) = (taken.timestamp_millis(), until.timestamp_millis());
        let name = identity::name(&host, process);
        holders.insert(id, Holder { instance: name, id: instance, term, since, until });
    }
    Ok(holders)
}

/// Condition for a free lease: it has expired, and the grace period for the writes under it is over; or it was given
/// back, after the last write under it, whatever the clock says.
#[must_use]
pub fn is_free() -> Document {
    let is_date = doc! {"$eq": [{"$type": "$until"}, "date"]};
    let until = doc! {"$cond": [is_date, "$until", DateTime::from_millis(0)]};
    let given_back = doc! {"$eq": [{"$ifNull": ["$owner", Bson::Null]}, Bson::Null]};
    let by_clock = doc! {"$lte": [{"$add": [until, millis(GRACE)]}, "$$NOW"]};
    // The grace period is longer than the second that a cluster time is rounded to.
    let second =
        doc! {"$cond": [{"$eq": [{"$type": "$cluster_until"}, "date"]}, "$cluster_until", DateTime::from_millis(0)]};
    let by_cluster_time = doc! {"$lte": [{"$add": [second, millis(GRACE)]}, latest()]};
    doc! {"$or": [given_back, {"$and": [by_clock, by_cluster_time]}]}
}

/// The later of the server's clock and the cluster time. The cluster time of a write is at most a fraction of a second
/// behind the clock.
fn latest() -> Document {
    doc! {"$max": ["$$NOW", {"$toDate": "$$CLUSTER_TIME"}]}
}

pub(super) fn term_of(lease: &Document) -> Result<i64> {
    lease.get_i64("term").map_err(|error| unreadable(COLLECTION, lease, &format!("its term: {error}")))
}

fn until_of(doc: &Document) -> Result<End> {
    let unreadable = |error| unreadable(COLLECTION, doc, &error);
    let server = doc.get_datetime("until").map_err(unreadable)?.timestamp_millis();
    let cluster = match doc.get("cluster_until") {
        // The cluster time is too far ahead.
        None | Some(Bson::Null) => i64::MAX,
        _ => doc.get_datetime("cluster_until").map_err(unreadable)?.timestamp_millis(),
    };
    Ok(End { server, cluster })
}
