//! A backfill runs as fast as the config allows and the replica set keeps up, and reports its limiting factor.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use denormd_engine::snapshot::{BackfillProgress, HeldBack};
use denormd_fixture::ReplicaSet;
use mongodb::options::WriteConcern;

use crate::support::daemon::{Daemon, config};

const RULE: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
const LIMIT: Duration = Duration::from_secs(120);

fn backfill(daemon: &Daemon) -> Option<BackfillProgress> {
    daemon.progress().borrow().backfills.get("ip").cloned()
}

async fn held_back(daemon: &Daemon, why: HeldBack) {
    let begun = Instant::now();
    while backfill(daemon).and_then(|progress| progress.held_back) != Some(why) {
        assert!(begun.elapsed() < LIMIT, "not {why:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_keeps_to_the_limit_and_waits_for_the_majority() {
    // Another primary would replicate again.
    let set = ReplicaSet::builder().nodes(3).election_timeout(Duration::from_secs(30)).start().await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    db.collection("logs").insert_many((0..3000).map(|n| doc! {"_id": n, "host": 1})).await.unwrap();
    let text = config(&test, RULE).replace("limits: {", "limits: { backfill_per_second: 200,");
    let begun = Instant::now();
    let daemon = Daemon::start_config(&text).await;
    held_back(&daemon, HeldBack::Limit).await;
    // Two of three members stop replicating but stay up: the primary remains, and its writes reach no majority.
    let primary = set.primary().await;
    let secondaries = [(primary + 1) % 3, (primary + 2) % 3];
    let replication = async |mode: &str| {
        for node in secondaries {
            let command = doc! {"configureFailPoint": "rsSyncApplyStop", "mode": mode};
            set.node(node).client().await.database("admin").run_command(command).await.unwrap();
        }
    };
    let alone = WriteConcern::builder().w(mongodb::options::Acknowledgment::Nodes(1)).build();
    let waits = async |limit: Duration| {
        let stopped = Instant::now();
        while stopped.elapsed() < limit {
            let progress = backfill(&daemon);
            if progress.and_then(|progress| progress.held_back) == Some(HeldBack::MajorityBehind) {
                return true;
            }
            db.collection::<Document>("other").insert_one(doc! {}).write_concern(alone.clone()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        false
    };
    // A page in flight waits for the majority by itself, and the next one is not requested. So replication is stopped
    // while the limit delays the backfill, and again if a page has started in the meantime: until the end of the
    // backfill, which fails.
    loop {
        held_back(&daemon, HeldBack::Limit).await;
        replication("alwaysOn").await;
        if waits(Duration::from_secs(8)).await {
            break;
        }
        replication("off").await;
    }
    replication("off").await;
    daemon.settled().await;
    assert!(begun.elapsed() >= Duration::from_secs(14), "3000 at 200 a second took {:?}", begun.elapsed());
    let done = db.collection::<Document>("logs").count_documents(doc! {"ip": 1}).await.unwrap();
    assert_eq!(done, 3000);
    daemon.stop().await;
}
