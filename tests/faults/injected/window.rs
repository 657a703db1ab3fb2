//! A backfill that takes longer than the oplog window.

use bson::{Document, doc};
use denormd::status::{Backfill, Rule, Status};
use denormd_fixture::{ReplicaSet, TestDb};

use super::roll_over;
use crate::support::{
    daemon::until,
    running::{Running, causes},
};

const RULES: &str = "  - { name: ip, guard: off, allow_scan: true, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
const LEASE: &str = "lease: { ttl_seconds: 120 }\n";
/// At the slow pace they take half an hour: an end is not what the test waits for.
const TARGETS: i32 = 3600;
const SLOW: &str = "limits: { backfill_per_second: 2, ";
const SLOWER: &str = "limits: { backfill_per_second: 3, ";
const FAST: &str = "limits: { backfill_per_second: 100000, ";

async fn prepared() -> (ReplicaSet, TestDb, Running) {
    let set = ReplicaSet::builder().oplog_mb(8).arg("--syncdelay").arg("1").start().await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..TARGETS).map(|n| doc! {"_id": n, "ip": n})).await.unwrap();
    db.collection("log").insert_many((0..TARGETS).map(|n| doc! {"_id": n, "host": n})).await.unwrap();
    let running = Running::prepare(&test, RULES, LEASE);
    replace(&running, "limits: { ", SLOW);
    (set, test, running)
}

fn replace(running: &Running, old: &str, new: &str) {
    let text = std::fs::read_to_string(running.file()).unwrap();
    assert!(text.contains(old), "{text}");
    std::fs::write(running.file(), text.replace(old, new)).unwrap();
}

async fn right(test: &TestDb) -> u64 {
    let log = test.database().collection::<Document>("log");
    log.count_documents(doc! {"$expr": {"$eq": ["$ip", "$host"]}}).await.unwrap()
}

/// Waits until it has done some targets, and says that it does them.
async fn is_under_way(test: &TestDb, running: &Running) -> Status {
    let before = right(test).await;
    until("some targets are right", async || (right(test).await > before).then_some(())).await;
    let runs = |rule: &Rule| matches!(rule.backfill, Backfill::Running { .. });
    running.until("it is being backfilled", |status| status.rules.iter().all(runs)).await
}

async fn ends(test: &TestDb, running: &Running) {
    replace(running, SLOW, FAST);
    running.signal("HUP");
    let done = |status: &Status| status.rules.iter().all(|rule| rule.state == "live" && !rule.degraded);
    let status = running.until("the backfill ends", done).await;
    assert!(!causes(&status).contains(&"degraded"), "{status:#?}");
    until("every copy is right", async || (right(test).await >= u64::try_from(TARGETS).unwrap()).then_some(())).await;
}

/// The stream is read meanwhile: its position stays in the oplog, and live changes are applied.
#[tokio::test(flavor = "multi_thread")]
async fn beside_a_running_daemon_it_loses_nothing() {
    let (_set, test, mut running) = prepared().await;
    running.run().await;
    let db = test.database();
    for round in 0..2 {
        is_under_way(&test, &running).await;
        roll_over(&test).await;
        let (host, log) = (TARGETS + round, TARGETS + round);
        db.collection("hosts").insert_one(doc! {"_id": host, "ip": host}).await.unwrap();
        db.collection("log").insert_one(doc! {"_id": log, "host": host}).await.unwrap();
        let log = db.collection::<Document>("log");
        until("a live change is applied", async || log.find_one(doc! {"_id": host, "ip": host}).await.unwrap()).await;
        let status = running.status().await;
        assert!(causes(&status).contains(&"backfilling") && !causes(&status).contains(&"degraded"), "{status:#?}");
    }
    assert!(!running.log().contains("no longer reaches back"), "{}", running.log());
    let starts = |text: &str| running.log().matches(text).count();
    // Before the reload, which starts a backfill over that has not saved its first page.
    assert_eq!(starts("resumed=false") + starts("\"resumed\":false"), 1, "it was started once: {}", running.log());
    ends(&test, &running).await;
    running.stop();
}

/// The daemon is frozen for longer than the window, twice: the changes in between are lost, and its status says so until a
/// whole backfill has been made.
#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_is_lost_during_it_is_told_until_it_ends() {
    let (_set, test, mut running) = prepared().await;
    running.run().await;
    let log = test.database().collection::<Document>("log");
    for round in 1..=2 {
        is_under_way(&test, &running).await;
        running.signal("STOP");
        // Only a backfill finds this one: its page has been done before.
        log.update_one(doc! {"_id": 0}, doc! {"$set": {"ip": -round}}).await.unwrap();
        roll_over(&test).await;
        running.signal("CONT");
        let losses = || running.log().matches("no longer reaches back").count();
        let noticed = usize::try_from(round).unwrap();
        until("the loss is noticed", async || (losses() == noticed).then_some(())).await;
        let lost =
            |status: &Status| causes(status).contains(&"degraded") && status.rules.iter().all(|rule| rule.degraded);
        let status = running.until("the loss is told", lost).await;
        let claims = status.current.as_ref().is_some_and(|current| !current.except.contains(&"ip".to_owned()));
        assert!(!claims && !status.summary.contains("every change is applied"), "{status:#?}");
        let waited = running.command(&["wait", "--timeout", "1"]);
        assert_ne!(waited.0, Some(0), "{waited:?}");
        // Each new pipeline once forgot the loss: after a reload, a hand-over or a restart.
        let reloads = || running.log().matches("config reloaded").count();
        let before = reloads();
        replace(&running, SLOW, SLOWER);
        // The file alone may be noticed as well.
        running.signal("HUP");
        until("the config is reloaded", async || (reloads() > before).then_some(())).await;
        running.until("the rule is degraded after a reload", lost).await;
        running.stop();
        running.run().await;
        running.until("the rule is degraded after a restart", lost).await;
        replace(&running, SLOWER, SLOW);
    }
    ends(&test, &running).await;
    let waited = running.command(&["wait", "--timeout", "120"]);
    assert_eq!(waited.0, Some(0), "{waited:?}");
    assert_eq!(log.find_one(doc! {"_id": 0}).await.unwrap().unwrap().get_i32("ip").ok(), Some(0));
    // A restart has nothing to do: the state is that of a whole backfill.
    let started = running.log().matches("backfill started").count();
    running.stop();
    running.run().await;
    running.until("it is live", |status| status.rules.iter().all(|rule| rule.state == "live")).await;
    assert_eq!(running.log().matches("backfill started").count(), started, "{}", running.log());
    running.stop();
}
