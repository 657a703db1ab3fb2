//! The daemon's progress, as seen from outside in its state database.

use std::time::Duration;

use bson::{Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::{Client, Collection};
use tokio::time::{Instant, sleep};

/// Generous limit: reached only if something is broken.
const LIMIT: Duration = Duration::from_mins(15);
/// Pause between two reads of the state.
const PAUSE: Duration = Duration::from_millis(20);

/// The state of one deployment, by the names of `state.database` and its collections.
#[derive(Clone)]
pub struct Progress {
    client: Client,
    database: String,
    rules: usize,
}

impl Progress {
    /// The state of a daemon with this number of rules over one database.
    pub fn new(client: &Client, database: &str, rules: usize) -> Self {
        Self { client: client.clone(), database: database.to_owned(), rules }
    }

    fn state(&self, collection: &str) -> Collection<Document> {
        self.client.database("denormd").collection(collection)
    }

    /// The rules whose backfill is done.
    pub async fn backfilled(&self) -> usize {
        let done = self.state("rules").count_documents(doc! {"backfill": "done"}).await.expect("the rules' states");
        usize::try_from(done).unwrap_or_default()
    }

    /// Waits until every rule's backfill is done.
    pub async fn wait_backfilled(&self) {
        let started = Instant::now();
        while self.backfilled().await < self.rules {
            assert!(started.elapsed() < LIMIT, "the backfill was not done after {LIMIT:?}");
            sleep(PAUSE).await;
        }
    }

    /// Waits until everything committed is applied. The daemon saves its position once a second while it changes, so
    /// this returns up to a second late.
    pub async fn wait_caught_up(&self) {
        let started = Instant::now();
        let now = self.mark().await;
        loop {
            let positions: Vec<Document> = self
                .state("positions")
                .find(doc! {})
                .await
                .expect("the positions")
                .try_collect()
                .await
                .expect("the positions");
            let time = |position: &Document| position.get_timestamp("time").ok();
            let reached = !positions.is_empty() && positions.iter().all(|position| time(position) >= Some(now));
            // Checked after the positions: a rule that an event sends back to a backfill is recorded before they pass
            // it.
            if reached && self.backfilled().await == self.rules {
                return;
            }
            assert!(
                started.elapsed() < LIMIT,
                "the daemon has not caught up with {now} after {LIMIT:?}: {positions:?}"
            );
            sleep(PAUSE).await;
        }
    }

    /// Writes to a collection of no rule; returns the cluster time of that write.
    async fn mark(&self) -> Timestamp {
        let insert = doc! {"insert": "marks", "documents": [{}], "writeConcern": {"w": "majority"}};
        let reply = self.client.database(&self.database).run_command(insert).await.expect("an insert");
        reply.get_timestamp("operationTime").expect("a replica set's reply has an operationTime")
    }

    /// The dead letters, with their reasons.
    pub async fn dead_letters(&self) -> Vec<Document> {
        let dead_letters = self.state("dead_letters").find(doc! {}).await.expect("the dead letters");
        dead_letters.try_collect().await.expect("the dead letters")
    }
}
