//! Keys whose reads take too long: they wait for each other, others do not wait for them, and none is retried forever.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use futures_util::TryStreamExt;
use mongodb::{Collection, Database, IndexModel};

use crate::{
    engine::fan_outs::{fail, slow_writes},
    support::daemon::{Daemon, PATIENCE, config, load, until},
};

/// A source takes time to read in proportion to its `cost`.
const SLOW: &str = "  - { name: slow, guard: off, aggregate: { source: { collection: s, where: { $expr: { $gte: [{ $sum: { $map: { input: { $range: [0, $cost] }, in: { $add: [$$this, 1] } } } }, 0] } } }, target: t, match: { _id: part }, set: { n: { $sum: $n } } } }\n";
const OTHER: &str = "  - { name: other, guard: off, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name } } }\n";
const SLOW_KEYS: i32 = 2;
/// Sources of all slow keys: half of them at 3 ms each, on an idle and fast core, take three times the five seconds that the
/// last read of a key may take.
const SOURCES: i32 = 10_000;
const COST: i32 = 60_000;
/// A limit on reads and writes that is shorter than a user may set: the server is kept busy for a shorter time.
const LIMIT: Duration = Duration::from_millis(500);

/// The sources of two keys take longer than any limit; those of a third key do not.
async fn slow_keys_and_others(test: &TestDb) -> Database {
    let db = test.database();
    let s = db.collection::<Document>("s");
    s.create_index(IndexModel::builder().keys(doc! {"part": 1}).build()).await.unwrap();
    let slow = (0..SOURCES).map(|id| doc! {"_id": id, "part": id % SLOW_KEYS, "n": 1, "cost": 0});
    s.insert_many(slow).await.unwrap();
    s.insert_one(doc! {"_id": -1, "part": SLOW_KEYS, "n": 1, "cost": 0}).await.unwrap();
    db.collection("t").insert_many((0..=SLOW_KEYS).map(|id| doc! {"_id": id})).await.unwrap();
    db.collection("parts").insert_one(doc! {"_id": 1, "name": "old"}).await.unwrap();
    db.collection("products").insert_one(doc! {"_id": 1, "part": 1}).await.unwrap();
    db
}

async fn dead_letters(test: &TestDb) -> Vec<Document> {
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    dead_letters.find(doc! {}).await.unwrap().try_collect().await.unwrap()
}

/// A read that took longer than a minute was once retried forever. Its batch was never divided, and a few such keys
/// occupied all batches: other rules waited for minutes, other keys forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_takes_too_long_to_read_becomes_a_dead_letter_and_holds_up_no_other() {
    let test = denormd_fixture::database().await;
    let db = slow_keys_and_others(&test).await;
    let text = config(&test, &format!("{SLOW}{OTHER}")).replace("limits: { ", "limits: { batches: 2, ");
    let mut loaded = load(&text);
    loaded.config.limits.read_timeout = LIMIT;
    let daemon = Daemon::start_loaded(&loaded).await;
    daemon.settled().await;
    let (s, t) = (db.collection::<Document>("s"), db.collection::<Document>("t"));
    s.update_many(doc! {"part": {"$lt": SLOW_KEYS}}, doc! {"$set": {"cost": COST, "n": 2}}).await.unwrap();
    s.update_one(doc! {"part": SLOW_KEYS}, doc! {"$set": {"n": 2}}).await.unwrap();
    until("the key that is fast", async || t.find_one(doc! {"_id": SLOW_KEYS, "n": 2}).await.unwrap()).await;
    let mut meanwhile = 0;
    for round in 0..5 {
        let name = format!("new {round}");
        db.collection::<Document>("parts").update_one(doc! {}, doc! {"$set": {"name": &name}}).await.unwrap();
        let products = db.collection::<Document>("products");
        until("the other rule", async || products.find_one(doc! {"name": &name}).await.unwrap()).await;
        meanwhile += usize::from(dead_letters(&test).await.len() < SLOW_KEYS as usize);
    }
    assert!(meanwhile >= 3, "the slow keys are tried for longer and longer, and the other rule does not wait for them");
    let set_aside = until("dead letters", async || {
        Some(dead_letters(&test).await).filter(|dead_letters| dead_letters.len() == SLOW_KEYS as usize)
    })
    .await;
    for dead_letter in set_aside {
        let reason = dead_letter.get_str("reason").unwrap();
        assert!(reason.contains("took longer than 5s"), "{reason}");
    }
    assert_eq!(t.count_documents(doc! {"n": 2}).await.unwrap(), 1);
    s.update_many(doc! {}, doc! {"$set": {"cost": 0}}).await.unwrap();
    until("all keys", async || {
        (t.count_documents(doc! {"n": {"$gt": SOURCES / 2}}).await.unwrap() == SLOW_KEYS as u64).then_some(())
    })
    .await;
    until("no dead letter", async || dead_letters(&test).await.is_empty().then_some(())).await;
    daemon.stop().await;
}

/// Moderately slow keys, a thousand in a batch: when it took too long, each key was once read alone, one after the
/// other.
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_take_too_long_together_are_read_fewer_at_once() {
    const KEYS: i32 = 1000;
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    let s = db.collection::<Document>("s");
    s.create_index(IndexModel::builder().keys(doc! {"part": 1}).build()).await.unwrap();
    s.insert_many((0..KEYS).map(|id| doc! {"_id": id, "part": id, "n": 1, "cost": COST / 2})).await.unwrap();
    db.collection("t").insert_many((0..KEYS).map(|id| doc! {"_id": id})).await.unwrap();
    let reads = async || {
        let status = test.client.database("admin").run_command(doc! {"serverStatus": 1}).await.unwrap();
        let commands = status.get_document("metrics").unwrap().get_document("commands").unwrap();
        commands.get_document("aggregate").unwrap().get_i64("total").unwrap()
    };
    let before = reads().await;
    let text = config(&test, SLOW).replace("limits: { ", "limits: { read_timeout_seconds: 1, batches: 1, ");
    let daemon = Daemon::start_config(&text).await;
    let t = db.collection::<Document>("t");
    until("all keys", async || {
        (t.count_documents(doc! {"n": 1}).await.unwrap() == u64::try_from(KEYS).unwrap()).then_some(())
    })
    .await;
    daemon.settled().await;
    let reads = reads().await - before;
    // A few dozen on an idle machine. On a busy one, reads take longer and more batches are divided.
    assert!(reads < i64::from(KEYS), "{reads} reads");
    assert!(dead_letters(&test).await.is_empty());
    daemon.stop().await;
}

/// A filter that takes a tenth of a millisecond or more per document, and admits documents with a small demand.
const FILTERED: &str = "  - { name: filtered, guard: off, copy: { source: hosts, target: { collection: log, where: { $expr: { $gte: [{ $sum: { $map: { input: { $range: [0, RANGE] }, in: { $add: [$$this, 1] } } } }, $least] } } }, match: { host: _id }, set: { ip: $ip } } }\n";
const LOG: i32 = 20_000;
const TOO_MUCH: i32 = i32::MAX;

async fn hosts_and_log(test: &TestDb, least: impl Fn(i32) -> i32) -> Database {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    let log = (0..LOG).map(|id| doc! {"_id": id, "host": 1, "least": least(id)});
    db.collection("log").insert_many(log).await.unwrap();
    db
}

/// Starts with [`FILTERED`] and a range of this length. On a server whose majority needs more than a tenth of the limit, the limit
/// is longer, and so is the range.
async fn start(test: &TestDb, range: u128) -> Daemon {
    let limit = limit_for(&test.database().collection("log"), LIMIT).await;
    let range = range * limit.as_millis() / LIMIT.as_millis();
    let mut loaded = load(&config(test, &filtered(range)));
    (loaded.config.limits.read_timeout, loaded.config.limits.write_timeout) = (limit, limit);
    Daemon::start_loaded(&loaded).await
}

fn filtered(range: u128) -> String {
    FILTERED.replace("RANGE", &range.to_string())
}

/// A page once had to be full, or its part of the collection scanned, before its progress was saved. Where few targets
/// match a slow filter that took too long, and the backfill restarted at the same position forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_goes_on_where_few_targets_match_a_slow_filter() {
    let test = denormd_fixture::database().await;
    let db = hosts_and_log(&test, |id| if id < LOG - 10 { TOO_MUCH } else { 0 }).await;
    let daemon = start(&test, 2000).await;
    let states = test.beside("state").collection::<Document>("rules");
    let begun = doc! {"backfill": "pending", "after": {"$ne": []}};
    until("some progress", async || states.find_one(begun.clone()).await.unwrap()).await;
    daemon.settled().await;
    assert_eq!(db.collection::<Document>("log").count_documents(doc! {"ip": 1}).await.unwrap(), 10);
    daemon.stop().await;
}

/// Length of the range for which this server's filter takes `time` a document: a server under Wine takes several times as
/// long as another.
async fn range_for(log: &Collection<Document>, time: Duration) -> u128 {
    const DOCUMENTS: u32 = 20;
    const RANGE: u128 = 20_000;
    let added = doc! {"$map": {"input": {"$range": [0, i32::try_from(RANGE).unwrap()]}, "in": {"$add": ["$$this", 1]}}};
    let filter = doc! {"$expr": {"$gte": [{"$sum": added}, "$least"]}};
    let mut least = Duration::MAX;
    for _ in 0..3 {
        let (started, found) = (Instant::now(), log.find(filter.clone()).limit(DOCUMENTS.into()).await.unwrap());
        assert_eq!(found.try_collect::<Vec<Document>>().await.unwrap().len(), DOCUMENTS as usize);
        least = least.min(started.elapsed());
    }
    (RANGE * time.as_nanos() / (least / DOCUMENTS).as_nanos()).max(1000)
}

/// The time limit of which a write to a single document and its majority take a tenth on this server; at least `shortest`, and no
/// longer than eight times that: all targets take several times the limit.
async fn limit_for(log: &Collection<Document>, shortest: Duration) -> Duration {
    let mut took = Vec::new();
    for n in 0..11 {
        let begun = Instant::now();
        log.update_one(doc! {}, doc! {"$set": {"n": n}}).await.unwrap();
        took.push(begun.elapsed());
    }
    took.sort();
    (took[5] * 10).clamp(shortest, shortest * 8)
}

/// A statement for a page of targets that took too long was once retried for all of them, forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_goes_on_where_a_page_takes_too_long_to_write() {
    const TARGETS: u64 = 400;
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    let log = db.collection::<Document>("log");
    let targets = (0..TARGETS).map(|id| doc! {"_id": i64::try_from(id).unwrap(), "host": 1, "least": 0});
    log.insert_many(targets).await.unwrap();
    // A page is read in time. A third of its targets can be written within the limit, of which a majority needs a tenth.
    let limit = limit_for(&log, Duration::from_millis(250)).await;
    let range = range_for(&log, limit / 125).await;
    let mut loaded = load(&config(&test, &filtered(range)));
    loaded.config.limits.write_timeout = limit;
    let daemon = Daemon::start_loaded(&loaded).await;
    until("all targets", async || (log.count_documents(doc! {"ip": 1}).await.unwrap() == TARGETS).then_some(())).await;
    daemon.settled().await;
    daemon.stop().await;
}

/// All targets of a key were once sorted by one read. Where that took too long, the fan-out job never began.
#[tokio::test(flavor = "multi_thread")]
async fn a_fan_out_that_one_read_cannot_sort_goes_through_the_collection_in_parts() {
    let test = denormd_fixture::database().await;
    let db = hosts_and_log(&test, |_| 0).await;
    // All targets take twelve times the limit, so two statements at once cannot write them in time, and a fan-out job takes over.
    let range = range_for(&db.collection("log"), LIMIT * 12 / LOG.unsigned_abs()).await;
    let daemon = start(&test, range).await;
    daemon.settled().await;
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": 2}}).await.unwrap();
    let fan_outs = test.beside("state").collection::<Document>("fan_outs");
    until("a fan-out", async || fan_outs.find_one(doc! {}).await.unwrap()).await;
    // Counting the targets again and again would keep a core busy.
    until("its end", async || fan_outs.find_one(doc! {}).await.unwrap().is_none().then_some(())).await;
    daemon.settled().await;
    let done = db.collection::<Document>("log").count_documents(doc! {"ip": 2}).await.unwrap();
    assert_eq!(done, u64::try_from(LOG).unwrap());
    daemon.stop().await;
}

const SUM: &str = "  - { name: sum, guard: off, aggregate: { source: s, target: t, match: { _id: part }, set: { n: { $sum: $n } } } }\n";

/// Dead letters were once retried one page after the other. One that took long delayed all others.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_takes_long_holds_up_no_other() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    db.collection("parts").insert_one(doc! {"_id": 1, "name": "old"}).await.unwrap();
    db.collection("products").insert_one(doc! {"_id": 1, "part": 1}).await.unwrap();
    let daemon = Daemon::start(&test, &format!("{SUM}{OTHER}")).await;
    daemon.settled().await;
    let sums = |more: Document| {
        let mut data =
            doc! {"failCommands": ["aggregate"], "namespace": format!("{}.s", test.name), "appName": "denormd"};
        data.extend(more);
        fail(&test, "alwaysOn", data)
    };
    sums(doc! {"errorCode": 2}).await;
    db.collection("s").insert_one(doc! {"_id": 1, "part": 1, "n": 1}).await.unwrap();
    let of = async |rule: &str| {
        dead_letters(&test).await.into_iter().find(|dead_letter| dead_letter.get_str("rule").unwrap() == rule)
    };
    until("a dead letter", async || of("sum").await).await;
    sums(doc! {"blockConnection": true, "blockTimeMS": 120_000}).await;
    let admin = test.client.database("admin");
    let running = doc! {"currentOp": 1, "command.aggregate": "s"};
    until("it is tried again", async || {
        let reply = admin.run_command(running.clone()).await.unwrap();
        (!reply.get_array("inprog").unwrap().is_empty()).then_some(())
    })
    .await;
    let validator = doc! {"collMod": "products", "validator": {"name": {"$ne": "new"}}};
    db.run_command(validator).await.unwrap();
    db.collection::<Document>("parts").update_one(doc! {}, doc! {"$set": {"name": "new"}}).await.unwrap();
    until("another dead letter", async || of("other").await).await;
    db.run_command(doc! {"collMod": "products", "validator": {}}).await.unwrap();
    let cleared = until("it is tried again", async || of("other").await.is_none().then_some(()));
    tokio::time::timeout(PATIENCE, cleared).await.expect("it does not wait for the first one");
    assert!(of("sum").await.is_some(), "the first one is under way");
    daemon.kill();
}

/// Without pre-images each delete of a source requests a backfill. Each backfill once began from the start: while
/// sources were deleted, none ever reached its end.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_comes_to_its_end_however_often_it_is_asked_for() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    let s = db.collection::<Document>("s");
    s.insert_many((0..2000).map(|id| doc! {"_id": id, "part": id % 10, "n": 1})).await.unwrap();
    let daemon = Daemon::start(&test, SUM).await;
    daemon.settled().await;
    db.run_command(doc! {"collMod": "s", "changeStreamPreAndPostImages": {"enabled": false}}).await.unwrap();
    // Targets are inserted without an event to the daemon: only a backfill of all targets reaches the last ones.
    daemon.stop().await;
    let t = db.collection::<Document>("t");
    t.insert_many((0..12_000).map(|id| doc! {"_id": id})).await.unwrap();
    test.beside("state").collection::<Document>("positions").delete_many(doc! {}).await.unwrap();
    let daemon = Daemon::begin(&crate::support::daemon::load(&config(&test, SUM)), true).await;
    slow_writes(&test, 150).await;
    for id in 0..2000 {
        s.delete_one(doc! {"_id": id}).await.unwrap();
        if t.find_one(doc! {"_id": 11_999, "n": 0}).await.unwrap().is_some() {
            break;
        }
        assert!(id < 1999, "the backfill never gets to the last target");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    let left = |part: i64| doc! {"part": part};
    for part in 0..10 {
        let n = i32::try_from(s.count_documents(left(part)).await.unwrap()).unwrap();
        assert_eq!(t.count_documents(doc! {"_id": part, "n": n}).await.unwrap(), 1, "part {part}");
    }
    daemon.stop().await;
}
