//! Tracks the server that a command went to, and whether it is still the primary: a frozen server neither answers nor
//! closes the connection. Behind routers there is no primary to lose: a command stays with its router until that one
//! no longer answers.

use std::{sync::Arc, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Client, Cursor, ServerType,
    options::{SelectionCriteria, ServerAddress},
};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::{Error, Kind, Result};

/// Delay of an answer after which the primary is checked, and the interval between checks.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks when the answer is known to be lost.
const CHECK_INTERVAL_AFTER_LOSS: Duration = Duration::from_millis(200);

/// The error message after a change of the primary.
pub(crate) const MOVED: &str = "the primary has changed";

/// Time without an answer after which a router counts as frozen. No other server is elected in its place.
const ROUTER: Duration = Duration::from_secs(5);

/// Time limit for an operation on the daemon's own state.
const STATE: Duration = Duration::from_secs(10);

/// Limits the time of an operation on the daemon's own state. A frozen server never answers, and a caller without a
/// limit would not notice that another server is the primary. The operation may still take effect later: each caller
/// explains why that does no harm.
pub fn bounded<T>(operation: impl IntoFuture<Output = mongodb::error::Result<T>>) -> impl Future<Output = Result<T>> {
    // The driver's futures are large.
    let operation = tokio::time::timeout(STATE, Box::pin(operation.into_future()));
    async {
        match operation.await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(Error::new(Kind::Connection, "no answer in time")),
        }
    }
}

/// All documents that a read of the daemon's own state finds, within the same limit.
pub async fn all(found: impl IntoFuture<Output = mongodb::error::Result<Cursor<Document>>>) -> Result<Vec<Document>> {
    bounded(async { found.await?.try_collect().await }).await
}

/// True if a router of a sharded cluster (mongos) sent this reply to `hello`.
#[must_use]
pub fn is_router(hello: &Document) -> bool {
    hello.get_str("msg").is_ok_and(|msg| msg == "isdbgrid")
}

/// The lag of the majority behind the last write, as the primary reports it. A mongos does not report it.
#[must_use]
pub fn majority_lag(hello: &Document) -> Duration {
    let last = hello.get_document("lastWrite").ok();
    let date = |name: &str| Some(last?.get_datetime(name).ok()?.timestamp_millis());
    let millis = date("lastWriteDate").zip(date("majorityWriteDate")).map_or(0, |(last, majority)| last - majority);
    Duration::from_millis(u64::try_from(millis).unwrap_or_default())
}

/// The error of a read of the oplog behind a router.
#[must_use]
pub fn no_oplog() -> Error {
    Error::new(Kind::Topology, "a router of a sharded cluster has no oplog; each shard has its own")
}

/// Destination of one command.
#[derive(Debug, Clone)]
pub struct Primary {
    client: Client,
    chosen: Arc<Mutex<Option<Chosen>>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Chosen {
    address: ServerAddress,
    /// True if it forwards commands: a mongos or a load balancer.
    is_router: bool,
}

impl Chosen {
    /// True if commands sent to this server have ended because another server answers now. A router that is gone or
    /// slow proves nothing about a command that it has forwarded: the shard may still run it.
    fn ends_with(&self, now: &Self) -> bool {
        !self.is_router && !now.is_router && self.address != now.address
    }
}

impl Primary {
    /// The destination of a command of `client` that is about to be sent.
    #[must_use]
    pub fn of(client: &Client) -> Self {
        Self { client: client.clone(), chosen: Arc::default() }
    }

    /// Selects the primary (or a mongos), and remembers it.
    #[must_use]
    pub fn criteria(&self) -> SelectionCriteria {
        let chosen = self.chosen.clone();
        SelectionCriteria::Predicate(Arc::new(move |server| {
            use ServerType::{LoadBalancer, Mongos, RsPrimary, Standalone};
            let writable = matches!(server.server_type(), RsPrimary | Mongos | Standalone | LoadBalancer);
            if writable {
                let is_router = matches!(server.server_type(), Mongos | LoadBalancer);
                let server = Chosen { address: server.address().clone(), is_router };
                *chosen.lock() = Some(server);
            }
            writable
        }))
    }

    /// The server that the command went to; None if it was not sent yet.
    #[must_use]
    pub fn address(&self) -> Option<ServerAddress> {
        self.chosen().map(|chosen| chosen.address)
    }

    fn chosen(&self) -> Option<Chosen> {
        self.chosen.lock().clone()
    }

    /// Returns the command's answer, or an error once another server is the primary, or the router no longer answers.
    pub fn attend<T>(&self, answer: impl IntoFuture<Output = T>) -> impl Future<Output = Result<T>> {
        // The driver's futures are large.
        let (answer, gone) = (Box::pin(answer.into_future()), Box::pin(self.gone()));
        async {
            tokio::select! {
                answer = answer => Ok(answer),
                why = gone => Err(Error::new(Kind::Connection, why)),
            }
        }
    }

    /// Waits until a command whose answer is lost has run or can no longer run: until `over`, or until another server
    /// is the primary. In the second case the effects of the command are in the new primary's log, or are lost. Behind
    /// a router, only the clock counts.
    pub async fn wait_out(&self, over: Instant) {
        let moved = async {
            loop {
                tokio::time::sleep(CHECK_INTERVAL_AFTER_LOSS).await;
                if self.has_moved().await {
                    return;
                }
            }
        };
        tokio::time::timeout_at(over, moved).await.ok();
    }

    /// Waits until the command's answer is no longer to be expected. Returns the reason.
    async fn gone(&self) -> &'static str {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match self.chosen() {
                // The driver chooses one of several routers for each command: that it is another one means nothing.
                Some(Chosen { address, is_router: true }) if !self.answers(&address).await => {
                    return "the router no longer answers";
                }
                Some(Chosen { is_router: false, .. }) if self.has_moved().await => return MOVED,
                _ => {}
            }
        }
    }

    /// True if another server is the primary now.
    pub(crate) async fn has_moved(&self) -> bool {
        let Some(old) = self.chosen() else { return false };
        let now = Self::of(&self.client);
        let Ok(hello) = now.hello(CHECK_INTERVAL).await else { return false };
        hello.get_bool("isWritablePrimary").unwrap_or_default() && now.chosen().is_some_and(|now| old.ends_with(&now))
    }

    /// True if this server answers `hello`.
    async fn answers(&self, address: &ServerAddress) -> bool {
        let address = address.clone();
        let this_one = SelectionCriteria::Predicate(Arc::new(move |server| *server.address() == address));
        let admin = self.client.database("admin");
        let hello = admin.run_command(doc! {"hello": 1}).selection_criteria(this_one);
        tokio::time::timeout(ROUTER, hello).await.is_ok_and(|answer| answer.is_ok())
    }

    /// The primary's reply to `hello`. An answer that takes longer than `limit` counts as none.
    pub async fn hello(&self, limit: Duration) -> Result<Document> {
        let admin = self.client.database("admin");
        let hello = admin.run_command(doc! {"hello": 1}).selection_criteria(self.criteria());
        match tokio::time::timeout(limit, hello).await {
            Ok(reply) => Ok(reply?),
            Err(_) => Err(Error::new(Kind::Connection, "the primary does not answer")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_is_known_by_its_hello() {
        assert!(is_router(&doc! {"isWritablePrimary": true, "msg": "isdbgrid", "ok": 1.0}));
        assert!(!is_router(&doc! {"isWritablePrimary": true, "setName": "rs0", "ok": 1.0}));
    }

    fn chosen(host: &str, is_router: bool) -> Chosen {
        Chosen { address: ServerAddress::Tcp { host: host.to_owned(), port: None }, is_router }
    }

    /// The other router counted as a new primary: the command was not waited out, and ran after the next write.
    #[test]
    fn another_router_does_not_end_what_the_first_one_has_handed_on() {
        let ends = |old: Chosen, now: Chosen| old.ends_with(&now);
        assert!(ends(chosen("a", false), chosen("b", false)));
        assert!(!ends(chosen("a", false), chosen("a", false)));
        assert!(!ends(chosen("a", true), chosen("b", true)));
        assert!(!ends(chosen("a", true), chosen("b", false)));
        assert!(!ends(chosen("a", false), chosen("b", true)));
    }

    #[test]
    fn how_far_the_majority_is_behind() {
        let at = bson::DateTime::from_millis;
        let hello = |last, majority| doc! {"lastWrite": {"lastWriteDate": at(last), "majorityWriteDate": at(majority)}};
        assert_eq!(majority_lag(&hello(9000, 2000)), Duration::from_secs(7));
        assert_eq!(majority_lag(&hello(2000, 2000)), Duration::ZERO);
        assert_eq!(majority_lag(&hello(2000, 9000)), Duration::ZERO);
        assert_eq!(majority_lag(&doc! {"ok": 1}), Duration::ZERO);
    }
}
