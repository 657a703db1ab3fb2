//! Backlogs larger than the queue: the streams are not read while it is full, so nothing in it may wait for their
//! events.

use std::sync::atomic::Ordering;

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::rule_state::RuleState;
use mongodb::Database;

use crate::{
    engine::fan_outs::{fail, slow_writes},
    support::daemon::{Daemon, PATIENCE, config, until},
};

const HOST: &str = "  - { name: address, guard: watch, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }\n";
const OTHER: &str = "  - { name: other, guard: off, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name } } }\n";

/// A config with a queue of this capacity.
fn tiny(test: &TestDb, rules: &str, pending: usize) -> String {
    config(test, rules).replace("limits: { ", &format!("limits: {{ pending: {pending}, "))
}

async fn part_and_product(db: &Database) {
    db.collection("parts").insert_one(doc! {"_id": 1, "name": "old"}).await.unwrap();
    db.collection("products").insert_one(doc! {"_id": 1, "part": 1}).await.unwrap();
}

async fn rename_part(db: &Database, name: &str) {
    db.collection::<Document>("parts").update_one(doc! {}, doc! {"$set": {"name": name}}).await.unwrap();
}

async fn product_is(db: &Database, name: &str) {
    let products = db.collection::<Document>("products");
    until("the other rule", async || products.find_one(doc! {"name": name}).await.unwrap()).await;
}

/// A script overwrote copies while the daemon was stopped. Each copy once filled a place in the queue and waited there
/// for the stream to pass the time of its comparison; the full queue kept the stream from being read. All copies stayed
/// wrong, and every other rule stopped.
#[tokio::test(flavor = "multi_thread")]
async fn more_forged_copies_than_the_queue_holds_are_repaired() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..10).map(|n| doc! {"_id": n, "ip": n})).await.unwrap();
    db.collection("log").insert_many((0..6000).map(|n| doc! {"_id": n, "host": n % 10})).await.unwrap();
    part_and_product(&db).await;
    let text = tiny(&test, &format!("{HOST}{OTHER}"), 300);
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    daemon.stop().await;
    let log = db.collection::<Document>("log");
    log.update_many(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    let daemon = Daemon::start_config(&text).await;
    rename_part(&db, "new").await;
    product_is(&db, "new").await;
    daemon.settled().await;
    assert_eq!(log.count_documents(doc! {"$expr": {"$eq": ["$ip", "$host"]}}).await.unwrap(), 6000);
    daemon.stop().await;
}

/// With `on_drift: report` nothing is written, and a difference that may be a change in progress is not called drift.
#[tokio::test(flavor = "multi_thread")]
async fn differences_that_nothing_explains_are_not_counted_as_drift() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..10).map(|n| doc! {"_id": n, "ip": n})).await.unwrap();
    db.collection("log").insert_many((0..2000).map(|n| doc! {"_id": n, "host": n % 10})).await.unwrap();
    part_and_product(&db).await;
    let host = HOST.replace("guard: watch,", "guard: watch, on_drift: report,");
    let text = tiny(&test, &format!("{host}{OTHER}"), 100);
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    daemon.stop().await;
    let log = db.collection::<Document>("log");
    log.update_many(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    let daemon = Daemon::start_config(&text).await;
    rename_part(&db, "new").await;
    product_is(&db, "new").await;
    daemon.settled().await;
    let drift = daemon.context().counts.drift.load(Ordering::Relaxed);
    assert!(drift < 2000, "{drift} of what filled the queue");
    assert_eq!(log.count_documents(doc! {"ip": "forged"}).await.unwrap(), 2000);
    daemon.stop().await;
}

/// A source was dropped while more of its changes waited than the queue holds. Each of them found no source, and was
/// once retried until the drop itself would be read, for which there was no room.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_dropped_behind_a_backlog_holds_its_rule_alone() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..12_000).map(|n| doc! {"_id": n, "ip": 0})).await.unwrap();
    db.collection("log").insert_many((0..12_000).map(|n| doc! {"_id": n, "host": n})).await.unwrap();
    part_and_product(&db).await;
    let text = tiny(&test, &format!("{}{OTHER}", HOST.replace("guard: watch", "guard: off")), 50);
    let text = text.replace("limits: { ", "limits: { batch_keys: 50, ");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    slow_writes(&test, 300).await;
    db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$set": {"ip": 1}}).await.unwrap();
    db.collection::<Document>("hosts").drop().await.unwrap();
    rename_part(&db, "new").await;
    let mut progress = daemon.progress();
    let held = progress.wait_for(|progress| !progress.in_state(RuleState::is_stopped).is_empty());
    tokio::time::timeout(PATIENCE, held).await.expect("the rule is blocked").unwrap();
    fail(&test, "off", doc! {}).await;
    product_is(&db, "new").await;
    let log = db.collection::<Document>("log");
    assert_eq!(log.count_documents(doc! {"ip": {"$in": [0, 1]}}).await.unwrap(), 12_000, "its copies stay");
    daemon.ask("address").await;
    tokio::time::timeout(PATIENCE, progress.wait_for(|progress| progress.in_state(RuleState::is_stopped).is_empty()))
        .await
        .expect("the rule is unblocked")
        .unwrap();
    daemon.settled().await;
    assert_eq!(log.count_documents(doc! {"ip": {"$exists": true}}).await.unwrap(), 0);
    daemon.stop().await;
}
