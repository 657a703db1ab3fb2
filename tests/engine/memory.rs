//! Memory follows the config, not the data: small forms of what `make memory` measures.

use std::time::Duration;

use bson::{Bson, Document, doc};
use denormd_fixture::{TestDb, database};
use mongodb::{Collection, IndexModel};

use crate::support::{
    daemon::{Daemon, config, until},
    process::Program,
};

const MB: usize = 1 << 20;
/// Memory limit of a daemon, also of a debug build.
const LIMIT: u64 = 256 << 20;

fn docs(test: &TestDb, collection: &str) -> Collection<Document> {
    test.database().collection(collection)
}

/// Inserts documents one by one: some are too large to be sent together.
async fn insert(test: &TestDb, collection: &str, documents: impl Iterator<Item = Document>) {
    let collection = docs(test, collection);
    for document in documents {
        collection.insert_one(document).await.unwrap();
    }
}

/// Runs a daemon with `rule` until `done`; returns its peak memory.
async fn peak(test: &TestDb, rule: &str, done: impl AsyncFn() -> bool) -> u64 {
    let program = Program::new(&config(test, rule));
    program.run(&["plan", "--apply"]).await.exits(0);
    let daemon = program.daemon();
    until("the daemon does its work", async || done().await.then_some(())).await;
    let peak = daemon.peak();
    println!("{} MB", peak >> 20);
    drop(daemon);
    peak
}

/// True if `t` has this number of targets, each of at least this size.
///
/// A backfill writes them by `_id`. Read backwards, the first one is too small until the last one is written, so waiting for them
/// does not read all the others each time.
async fn all_hold(test: &TestDb, size: usize, count: u64) -> bool {
    let size = i64::try_from(size).unwrap();
    let smaller = doc! {"$expr": {"$lt": [{"$bsonSize": "$$ROOT"}, size]}};
    let found = docs(test, "t").find_one(smaller).sort(doc! {"_id": -1}).projection(doc! {"_id": 1}).await.unwrap();
    found.is_none() && docs(test, "t").count_documents(doc! {}).await.unwrap() == count
}

#[tokio::test]
async fn sources_of_several_megabytes_are_copied_a_few_at_a_time() {
    let test = database().await;
    let value = "x".repeat(8 * MB);
    insert(&test, "t", (0..40).map(|id| doc! {"_id": id, "s": id})).await;
    insert(&test, "s", (0..40).map(|id| doc! {"_id": id, "v": &value})).await;
    let rule = "- { name: r, copy: { source: s, target: t, match: { s: _id }, set: { v: $v } } }";
    let peak = peak(&test, rule, async || all_hold(&test, 8 * MB, 40).await).await;
    assert!(peak <= LIMIT, "{} MB", peak >> 20);
}

#[tokio::test]
async fn arrays_of_a_megabyte_are_gathered_a_few_at_a_time() {
    let test = database().await;
    let value = "x".repeat(MB / 4);
    insert(&test, "t", (0..200).map(|id| doc! {"_id": id})).await;
    insert(&test, "s", (0..800).map(|id| doc! {"_id": id, "t": id / 4, "v": &value})).await;
    docs(&test, "s").create_index(IndexModel::builder().keys(doc! {"t": 1}).build()).await.unwrap();
    let rule =
        "- { name: r, collect: { source: s, target: t, match: { _id: t }, into: v, element: { id: $_id, v: $v } } }";
    let peak = peak(&test, rule, async || all_hold(&test, MB, 200).await).await;
    assert!(peak <= LIMIT, "{} MB", peak >> 20);
}

#[tokio::test]
async fn dead_letters_are_read_and_tried_a_page_at_a_time() {
    let test = database().await;
    let reason = "x".repeat(32 << 10);
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    for page in 0..100 {
        let dead_letter = |nth: i32| {
            let id = doc! {"deployment": "default", "rule": "r", "task": "Value", "key": [nth], "target": []};
            doc! {
                "_id": id, "deployment": "default", "rule": "r", "attempts": 1, "reason": &reason,
                "first": bson::DateTime::from_millis(0), "last": bson::DateTime::from_millis(0),
            }
        };
        dead_letters.insert_many((page * 100..(page + 1) * 100).map(dead_letter)).await.unwrap();
    }
    let rule = "- { name: r, copy: { source: s, target: t, match: { s: _id }, set: { v: $v } } }";
    for collection in ["s", "t"] {
        docs(&test, collection).insert_one(doc! {"_id": 1}).await.unwrap();
    }
    let peak = peak(&test, rule, async || dead_letters.count_documents(doc! {}).await.unwrap() == 0).await;
    assert!(peak <= LIMIT, "{} MB", peak >> 20);
}

/// A look-up that finds targets requests each of them. With many pending look-ups, the requests must not pile up.
#[tokio::test]
async fn look_ups_wait_until_what_others_have_found_is_done() {
    let test = database().await;
    let targets = |source: i32| (0..2000).map(move |nth| doc! {"_id": source * 2000 + nth, "refs": [source]});
    for source in 0..60 {
        docs(&test, "t").insert_many(targets(source)).await.unwrap();
        docs(&test, "s").insert_one(doc! {"_id": source, "v": 0}).await.unwrap();
    }
    docs(&test, "t").create_index(IndexModel::builder().keys(doc! {"refs": 1}).build()).await.unwrap();
    let rule =
        "- { name: r, guard: off, copy: { source: s, target: t, match: { \"refs.$[]\": _id }, into: v, element: $v } }";
    let yaml = config(&test, rule).replace("limits: {", "limits: { pending: 1000,");
    let daemon = Daemon::start_config(&yaml).await;
    daemon.settled().await;
    let progress = daemon.progress();
    let watching = tokio::spawn(async move {
        let mut most = 0;
        loop {
            most = most.max(progress.borrow().depth);
            if progress.borrow().ended {
                return most;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    docs(&test, "s").update_many(doc! {}, doc! {"$set": {"v": 1}}).await.unwrap();
    daemon.settled().await;
    let wrong = docs(&test, "t").count_documents(doc! {"v": {"$ne": Bson::Array(vec![1.into()])}}).await.unwrap();
    daemon.stop().await;
    let most = watching.await.unwrap();
    assert_eq!(wrong, 0);
    // Three batches, each with the requests it has found when it stops.
    assert!(most <= 1000 + 3 * 14_000, "{most} requests in the queue");
}

/// However small the limit is, each key is processed: alone, when its batch has its turn.
#[tokio::test]
async fn a_limit_smaller_than_any_value_stops_nothing() {
    let test = database().await;
    insert(&test, "s", (0..100).map(|id| doc! {"_id": id, "v": format!("value {id}"), "t": id % 10})).await;
    insert(&test, "t", (0..100).map(|id| doc! {"_id": id, "s": id, "refs": [id, (id + 1) % 100]})).await;
    let rules = "\
- { name: one, allow_scan: true, copy: { source: s, target: t, match: { s: _id }, set: { v: $v } } }
- { name: array, allow_scan: true, copy: { source: s, target: t, match: { \"refs.$[]\": _id }, into: all, element: $v } }
- { name: gathered, allow_scan: true, collect: { source: s, target: t, match: { _id: t }, into: found, element: $_id } }";
    let yaml = config(&test, rules).replace("limits: {", "limits: { batch_bytes: 1,");
    let daemon = Daemon::start_config(&yaml).await;
    daemon.settled().await;
    docs(&test, "s").update_many(doc! {}, vec![doc! {"$set": {"v": {"$concat": ["$v", "!"]}}}]).await.unwrap();
    daemon.settled().await;
    for id in 0..100 {
        let target = docs(&test, "t").find_one(doc! {"_id": id}).await.unwrap().unwrap();
        let found: Vec<i32> = if id < 10 { (0..10).map(|nth| nth * 10 + id).collect() } else { Vec::new() };
        let all = vec![format!("value {id}!"), format!("value {}!", (id + 1) % 100)];
        assert_eq!(
            target,
            doc! {
                "_id": id, "s": id, "refs": [id, (id + 1) % 100], "v": format!("value {id}!"), "all": all, "found": found,
            }
        );
    }
    daemon.stop().await;
}
