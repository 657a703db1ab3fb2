//! Fan-outs that are too large for one command: recorded as jobs, resumed, started over, and passed by the position.

use std::time::Duration;

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::position::ClusterTime;
use mongodb::Database;

use crate::support::daemon::{Daemon, PATIENCE, config, until};

const RULES: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
const LOGS: i32 = 50_000;

async fn hosts_and_logs(test: &TestDb) -> Database {
    let db = test.database();
    db.collection("hosts").insert_many([doc! {"_id": 1, "ip": 0}, doc! {"_id": 2, "ip": 0}]).await.unwrap();
    // `_id`s of two BSON types: a page contains both.
    let logs = (0..LOGS).map(|n| match n % 2 {
        0 => doc! {"_id": n, "host": 1, "ip": 0},
        _ => doc! {"_id": bson::DateTime::from_millis(n.into()), "host": 1, "ip": 0},
    });
    db.collection("logs").insert_many(logs).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": "other", "host": 2, "ip": 0}).await.unwrap();
    db
}

pub async fn fail(test: &TestDb, mode: impl Into<bson::Bson>, data: Document) {
    let mut command = doc! {"configureFailPoint": "failCommand", "mode": mode.into()};
    if !data.is_empty() {
        command.insert("data", data);
    }
    test.client.database("admin").run_command(command).await.unwrap();
}

/// Lets the next write of the daemon to this collection run out of time.
pub async fn next_write_runs_out_of_time(test: &TestDb, collection: &str) {
    let namespace = format!("{}.{collection}", test.name);
    let data = doc! {"failCommands": ["update"], "namespace": namespace, "appName": "denormd", "errorCode": 50};
    fail(test, doc! {"times": 1}, data).await;
}

/// Changes host 1 while the next write takes too long, until a fan-out is recorded. Returns the address of host 1 after that.
async fn begin_fan_out(test: &TestDb, db: &Database) -> i32 {
    for ip in 1..50 {
        next_write_runs_out_of_time(test, "logs").await;
        set_ip(db, ip).await;
        // Otherwise a late event of an earlier change makes the daemon repeat the fan-out.
        let is_recorded = until("the change is applied, or recorded as a fan-out", async || {
            let is_recorded = fan_out(test).await.is_some();
            (is_recorded || with_ip(db, ip).await == u64::try_from(LOGS).unwrap()).then_some(is_recorded)
        });
        if is_recorded.await {
            return ip;
        }
    }
    panic!("no fan-out is recorded");
}

/// Delays each write of the daemon by this number of milliseconds, until `fail` sets another failure.
pub async fn slow_writes(test: &TestDb, milliseconds: i32) {
    let slow = doc! {
        "failCommands": ["update"], "appName": "denormd", "blockConnection": true, "blockTimeMS": milliseconds,
    };
    fail(test, "alwaysOn", slow).await;
}

async fn fan_out(test: &TestDb) -> Option<Document> {
    test.beside("state").collection("fan_outs").find_one(doc! {}).await.unwrap()
}

async fn half_done(test: &TestDb) -> Document {
    until("the fan-out has some progress", async || {
        fan_out(test).await.filter(|doc| doc.get_array("after").is_ok_and(|after| !after.is_empty()))
    })
    .await
}

async fn set_ip(db: &Database, ip: i32) {
    db.collection::<Document>("hosts").update_one(doc! {"_id": 1}, doc! {"$set": {"ip": ip}}).await.unwrap();
}

async fn with_ip(db: &Database, ip: i32) -> u64 {
    db.collection::<Document>("logs").count_documents(doc! {"host": 1, "ip": ip}).await.unwrap()
}

/// A fan-out job in progress, with slow writes.
struct Slow {
    // Ends with its servers.
    _set: ReplicaSet,
    test: TestDb,
    db: Database,
    daemon: Daemon,
    ip: i32,
}

impl Slow {
    /// Begins one whose pages take this number of milliseconds each.
    async fn begin(pause: i32) -> Self {
        let set = ReplicaSet::start(1).await;
        let test = set.database().await;
        let db = hosts_and_logs(&test).await;
        let daemon = Daemon::start(&test, RULES).await;
        daemon.settled().await;
        let ip = begin_fan_out(&test, &db).await;
        slow_writes(&test, pause).await;
        Self { _set: set, test, db, daemon, ip }
    }
}

/// Waits until the position has passed this time: a restart does not read earlier changes again.
async fn is_passed(test: &TestDb, time: ClusterTime) {
    let positions = test.beside("state").collection::<Document>("positions");
    until("the position passes what is recorded", async || {
        let position = positions.find_one(doc! {}).await.unwrap()?;
        (position.get_timestamp("time").unwrap() >= bson::Timestamp::from(time)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_fan_out_neither_holds_the_position_nor_is_lost_by_a_crash() {
    // Ten pages take this time each; the other asserted steps take three times.
    let Slow { _set, test, db, daemon, ip } = Slow::begin(800).await;
    let begun = half_done(&test).await;
    // Other keys do not wait for it.
    db.collection::<Document>("hosts").update_one(doc! {"_id": 2}, doc! {"$set": {"ip": 7}}).await.unwrap();
    let changed = daemon.context().server.operation_time().await.unwrap();
    until("the other host's log", async || {
        db.collection::<Document>("logs").find_one(doc! {"_id": "other", "ip": 7}).await.unwrap()
    })
    .await;
    is_passed(&test, changed).await;
    assert!(with_ip(&db, ip).await < u64::try_from(LOGS).unwrap(), "it is still under way");
    daemon.kill();
    let before = fan_out(&test).await.unwrap();
    assert_eq!(before.get("wish"), begun.get("wish"));
    fail(&test, "off", doc! {}).await;
    let daemon = Daemon::start(&test, RULES).await;
    daemon.settled().await;
    assert_eq!(with_ip(&db, ip).await, u64::try_from(LOGS).unwrap());
    assert_eq!(fan_out(&test).await, None);
    daemon.stop().await;
}

/// Once, the rules of open fan-outs were backfilled when the number of partitions changed, even those whose backfill is
/// asked for by hand.
#[tokio::test(flavor = "multi_thread")]
async fn a_fan_out_goes_on_in_the_partition_that_owns_its_key() {
    let Slow { _set, test, db, daemon, ip } = Slow::begin(800).await;
    half_done(&test).await;
    is_passed(&test, daemon.context().server.operation_time().await.unwrap()).await;
    daemon.kill();
    assert!(fan_out(&test).await.is_some(), "it is still under way");
    fail(&test, "off", doc! {}).await;
    for partitions in [3, 2] {
        let daemon =
            Daemon::start_config(&format!("{}lease: {{ partitions: {partitions} }}\n", config(&test, RULES))).await;
        daemon.settled().await;
        assert_eq!(with_ip(&db, ip).await, u64::try_from(LOGS).unwrap());
        assert_eq!(fan_out(&test).await, None);
        let rules = test.beside("state").collection::<Document>("rules");
        let backfilled = doc! {"$or": [{"backfill": {"$ne": "done"}}, {"generation": {"$ne": 1_i64}}]};
        assert_eq!(rules.find_one(backfilled).await.unwrap(), None, "only the first start has backfilled");
        daemon.stop().await;
    }
}

/// Changes host 1, which has too many targets for one statement, and returns the operations that write the rest, once
/// there are `enough`. At the end everything is correct, and there was no fan-out job.
async fn restarted(db: &Database, test: &TestDb, enough: usize) -> Vec<Document> {
    // On a busy machine, too, the rest is written within three times as long.
    let text = config(test, RULES).replace("limits: { ", "limits: { write_timeout_seconds: 20, ");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    let admin = test.client.database("admin");
    // The server pauses at each of its yields: every thousand targets, not also every ten milliseconds, which would be far
    // more often on a busy machine.
    admin.run_command(doc! {"setParameter": 1, "internalQueryExecYieldPeriodMS": 60_000}).await.unwrap();
    let slow = doc! {"waitForMillis": 200, "namespace": format!("{}.logs", db.name())};
    let command = doc! {"configureFailPoint": "setYieldAllLocksWait", "mode": "alwaysOn", "data": slow};
    admin.run_command(command).await.unwrap();
    set_ip(db, 1).await;
    let rest = until("it is begun anew", async || {
        let all = doc! {"currentOp": 1, "active": true, "op": "update", "ns": format!("{}.logs", db.name())};
        let found = admin.run_command(all).await.unwrap();
        let found = found.get_array("inprog").unwrap();
        let statements = found.iter().filter_map(|op| op.as_document()?.get_document("command").ok());
        let passes_over = |statement: &&Document| statement.get_document("q").is_ok_and(|q| q.contains_key("$nor"));
        let rest: Vec<Document> = statements.filter(passes_over).cloned().collect();
        (rest.len() >= enough).then_some(rest)
    })
    .await;
    let off = doc! {"configureFailPoint": "setYieldAllLocksWait", "mode": "off"};
    admin.run_command(off).await.unwrap();
    daemon.settled().await;
    assert_eq!(with_ip(db, 1).await, u64::try_from(LOGS).unwrap());
    let opened = doc! {"ns": {"$regex": "fan_outs$"}, "op": "i"};
    let opened =
        test.client.database("local").collection::<Document>("oplog.rs").count_documents(opened).await.unwrap();
    assert_eq!(opened, 0, "no fan-out");
    daemon.stop().await;
    rest
}

/// A statement that took too long is restarted for the rest: in parts of the collection, two at once, with `_id`s of
/// two types.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_takes_too_long_is_begun_anew() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = hosts_and_logs(&test).await;
    let rest = restarted(&db, &test, 2).await;
    let part = |statement: &Document| statement.get_document("q").unwrap().get_document("_id").unwrap().clone();
    assert_ne!(part(&rest[0]), part(&rest[1]));
    assert!(rest.iter().all(|statement| statement.get_document("hint").unwrap() == &doc! {"_id": 1}), "{rest:?}");
}

/// A key whose restarted statements also take too long is not restarted forever.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_begun_anew_for_long_becomes_a_fan_out() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = hosts_and_logs(&test).await;
    let text = config(&test, RULES).replace("limits: { ", "limits: { write_timeout_seconds: 1, ");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    let admin = test.client.database("admin");
    let slow = doc! {"waitForMillis": 500, "namespace": format!("{}.logs", db.name())};
    let command = doc! {"configureFailPoint": "setYieldAllLocksWait", "mode": "alwaysOn", "data": slow};
    admin.run_command(command).await.unwrap();
    set_ip(&db, 1).await;
    until("a fan-out is recorded", async || fan_out(&test).await).await;
    let off = doc! {"configureFailPoint": "setYieldAllLocksWait", "mode": "off"};
    admin.run_command(off).await.unwrap();
    daemon.settled().await;
    assert_eq!(with_ip(&db, 1).await, u64::try_from(LOGS).unwrap());
    assert_eq!(fan_out(&test).await, None);
    daemon.stop().await;
}

/// If the key has few of the collection's documents, scanning parts of the collection would be wasted.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_for_few_of_a_collection_is_begun_anew_as_one() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = hosts_and_logs(&test).await;
    // The server samples pages at random: their sizes in bytes matter.
    let others = (LOGS..LOGS * 4).map(|n| doc! {"_id": n, "text": "some text ".repeat(20)});
    db.collection("logs").insert_many(others).await.unwrap();
    let rest = restarted(&db, &test, 1).await;
    assert!(rest.iter().all(|statement| !statement.get_document("q").unwrap().contains_key("_id")), "{rest:?}");
}

/// Each change of the source once made its fan-out job start over: while it kept changing, only the first targets were
/// written.
#[tokio::test(flavor = "multi_thread")]
async fn a_fan_out_comes_to_its_end_however_often_its_source_changes() {
    let Slow { _set, test, db, daemon, ip } = Slow::begin(600).await;
    let logs = db.collection::<Document>("logs");
    // Not even the other half of a page, which a command of its own writes.
    let older = doc! {"host": 1, "ip": {"$lt": ip}};
    let mut newest = ip;
    while logs.find_one(older.clone()).await.unwrap().is_some() {
        assert!(newest < ip + 1000, "it never gets to the last target");
        newest += 1;
        set_ip(&db, newest).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(fan_out(&test).await.is_some(), "the first targets are older than the source");
    assert_eq!(daemon.progress().borrow().fan_outs.values().sum::<usize>(), 1);
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(with_ip(&db, newest).await, u64::try_from(LOGS).unwrap());
    assert_eq!(fan_out(&test).await, None);
    daemon.stop().await;
}

/// Four jobs run at once. A job that was requested again once continued at once, and the others waited for as long as
/// its key kept changing. The test records the same as changes of the key do.
#[tokio::test(flavor = "multi_thread")]
async fn fan_outs_that_are_asked_for_again_let_others_have_their_turn() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_many((1..=5).map(|id| doc! {"_id": id, "ip": 0})).await.unwrap();
    db.collection("logs").insert_many((1..=5).map(|id| doc! {"_id": id, "host": id})).await.unwrap();
    let daemon = Daemon::start(&test, RULES).await;
    daemon.settled().await;
    daemon.stop().await;
    let id = |host: i32| doc! {"deployment": "default", "rule": "ip", "task": "Value", "key": [host]};
    let open = |host| doc! {"_id": id(host), "wish": bson::oid::ObjectId::new(), "after": [], "term": 0_i64};
    let fan_outs = test.beside("state").collection::<Document>("fan_outs");
    fan_outs.insert_many((1..=5).map(open)).await.unwrap();
    slow_writes(&test, 1000).await;
    let daemon = Daemon::start(&test, RULES).await;
    until("the fifth is done", async || {
        let again = doc! {"$set": {"wish": bson::oid::ObjectId::new(), "after": []}};
        fan_outs.update_many(doc! {"_id": {"$ne": id(5)}}, again).await.unwrap();
        fan_outs.find_one(doc! {"_id": id(5)}).await.unwrap().is_none().then_some(())
    })
    .await;
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(fan_out(&test).await, None);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fan_out_whose_source_changes_is_done_once_more() {
    let Slow { _set, test, db, daemon, ip } = Slow::begin(600).await;
    let first = half_done(&test).await;
    set_ip(&db, ip + 100).await;
    let second = until("it is asked for again", async || {
        fan_out(&test).await.filter(|doc| doc.get("wish") != first.get("wish"))
    })
    .await;
    assert_eq!(second.get("started"), first.get("started"));
    assert_eq!(second.get("committed"), first.get("committed"), "the lag counts from the first change");
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(with_ip(&db, ip + 100).await, u64::try_from(LOGS).unwrap());
    assert_eq!(fan_out(&test).await, None);
    daemon.stop().await;
}

/// A record whose answer was given up arrived late and overwrote its replacement. From then on the job's progress was
/// refused, which counted as its end: the rest was not written before a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_fan_out_that_is_recorded_late_over_another_one_is_done() {
    let Slow { _set, test, db, daemon, ip } = Slow::begin(600).await;
    half_done(&test).await;
    let late = doc! {"$set": {"wish": bson::oid::ObjectId::new(), "after": []}};
    let fan_outs = test.beside("state").collection::<Document>("fan_outs");
    assert_eq!(fan_outs.update_one(doc! {}, late).await.unwrap().modified_count, 1);
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(with_ip(&db, ip).await, u64::try_from(LOGS).unwrap());
    assert_eq!(fan_out(&test).await, None);
    // A record that arrives even later, when no job is in progress; before it, one that cannot be read.
    let id = doc! {"deployment": "default", "rule": "ip", "task": "Value", "key": [1]};
    fan_outs.insert_one(doc! {"_id": id.clone(), "after": []}).await.unwrap();
    let metrics = daemon.shared().metrics.clone();
    until("it is reported", async || {
        metrics.recent_errors().iter().any(|error| error.message.contains("rule ip, task Value")).then_some(())
    })
    .await;
    fan_outs.delete_many(doc! {}).await.unwrap();
    let later = doc! {"_id": id, "wish": bson::oid::ObjectId::new(), "after": [], "term": 0_i64};
    fan_outs.insert_one(later).await.unwrap();
    until("it is found and done", async || fan_out(&test).await.is_none().then_some(())).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_target_that_is_refused_is_found_among_many() {
    let test = denormd_fixture::database().await;
    let db = hosts_and_logs(&test).await;
    let daemon = Daemon::start(&test, RULES).await;
    daemon.settled().await;
    let validator = doc! {"$nor": [{"_id": 5000, "ip": 1}]};
    db.run_command(doc! {"collMod": "logs", "validator": validator}).await.unwrap();
    set_ip(&db, 1).await;
    daemon.settled().await;
    assert_eq!(with_ip(&db, 1).await, u64::try_from(LOGS).unwrap() - 1);
    let dead_letter =
        test.beside("state").collection::<Document>("dead_letters").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(dead_letter.get_document("_id").unwrap().get_array("target").unwrap()[0], 5000.into());
    assert_eq!(dead_letter.get_i32("code").unwrap(), 121);
    daemon.stop().await;
}

/// It was once retried forever, and its fan-out job with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_takes_too_long_to_write_becomes_a_dead_letter() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = hosts_and_logs(&test).await;
    let daemon = Daemon::start(&test, RULES).await;
    daemon.settled().await;
    let namespace = format!("{}.logs", test.name);
    fail(&test, "alwaysOn", doc! {"failCommands": ["update"], "namespace": namespace, "errorCode": 50}).await;
    db.collection::<Document>("hosts").update_one(doc! {"_id": 2}, doc! {"$set": {"ip": 7}}).await.unwrap();
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    let dead_letter = until("a dead letter", async || dead_letters.find_one(doc! {}).await.unwrap()).await;
    assert_eq!(dead_letter.get_document("_id").unwrap().get_array("target").unwrap()[0], "other".into());
    assert_eq!(dead_letter.get_i32("code").unwrap(), 50);
    until("the fan-out job is done", async || fan_out(&test).await.is_none().then_some(())).await;
    fail(&test, "off", doc! {}).await;
    let logs = db.collection::<Document>("logs");
    until("the target", async || logs.find_one(doc! {"_id": "other", "ip": 7}).await.unwrap()).await;
    until("no dead letter", async || dead_letters.find_one(doc! {}).await.unwrap().is_none().then_some(())).await;
    daemon.stop().await;
}

/// The targets of one source were once all read into memory and queued at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_in_many_arrays_is_looked_up_a_page_at_a_time() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("parts").insert_one(doc! {"_id": 1, "name": "a"}).await.unwrap();
    db.collection("products").insert_many((0..LOGS).map(|n| doc! {"_id": n, "parts": [1]})).await.unwrap();
    let rules = "  - { name: info, guard: off, copy: { source: parts, target: products, match: { \"parts.$[]\": _id }, into: info, element: { name: $name } } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    db.collection::<Document>("parts").update_one(doc! {"_id": 1}, doc! {"$set": {"name": "b"}}).await.unwrap();
    let mut progress = daemon.progress();
    let waited = progress.wait_for(|progress| progress.fan_outs.values().sum::<usize>() == 1);
    tokio::time::timeout(PATIENCE, waited).await.expect("a fan-out").unwrap();
    daemon.settled().await;
    let products = db.collection::<Document>("products");
    let done = products.count_documents(doc! {"info": [{"name": "b"}]}).await.unwrap();
    assert_eq!(done, u64::try_from(LOGS).unwrap());
    daemon.stop().await;
}
