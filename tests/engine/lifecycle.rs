//! Rules that are added, changed and removed; fields that others write.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bson::{Bson, Document, doc};
use denormd_engine::{
    checkpoint::{rule_record::Agreement, store::Store},
    dead_letter::{Chosen, DeadLetters, Offending},
    request::Task,
    snapshot::{Snapshot, StreamFacts},
};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::{
    key::Key,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{
    Server,
    error::{Error, Kind},
};
use futures_util::TryStreamExt;
use mongodb::Database;

use crate::{
    engine::fan_outs::{fail, next_write_runs_out_of_time, slow_writes},
    support::{
        daemon::{Daemon, PATIENCE, all, config, until},
        running::Running,
    },
};

const HOST: &str =
    "  - { name: address, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

async fn host_and_log(test: &TestDb) -> Database {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1", "name": "alpha"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    db
}

/// Waits until the only log message equals this.
async fn becomes(db: &Database, expected: Document) {
    until(&format!("{expected}"), async || (all(db, "log").await == [expected.clone()]).then_some(())).await;
}

#[tokio::test]
async fn a_changed_rule_is_backfilled_again_and_only_that_rule() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let other =
        "  - { name: name, copy: { source: hosts, target: log, match: { host: _id }, set: { hostname: $name } } }";
    let daemon = Daemon::start(&test, &format!("{HOST}\n{other}")).await;
    daemon.settled().await;
    daemon.stop().await;
    // These writes send no event to the daemon: only a backfill finds them.
    db.collection::<Document>("log")
        .update_one(doc! {}, doc! {"$set": {"hostname": "wrong", "ip": "wrong"}})
        .await
        .unwrap();
    let changed = HOST.replace("$ip }", "$ip, shout: { $toUpper: $name } }");
    let daemon = Daemon::start(&test, &format!("{changed}\n{other}")).await;
    daemon.settled().await;
    let expected = doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "hostname": "wrong", "shout": "ALPHA"};
    assert_eq!(all(&db, "log").await, [expected]);
    daemon.stop().await;
}

/// A rule that was removed from the config and put back unchanged once counted as done, whatever had happened in the
/// meantime.
#[tokio::test]
async fn a_rule_that_comes_back_is_backfilled() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let other =
        "  - { name: name, copy: { source: hosts, target: log, match: { host: _id }, set: { hostname: $name } } }";
    let both = format!("{HOST}\n{other}");
    let daemon = Daemon::start(&test, &both).await;
    daemon.settled().await;
    daemon.stop().await;
    let daemon = Daemon::start(&test, HOST).await;
    db.collection::<Document>("hosts").update_one(doc! {"_id": 1}, doc! {"$set": {"name": "new"}}).await.unwrap();
    daemon.settled().await;
    daemon.stop().await;
    let daemon = Daemon::start(&test, &both).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "hostname": "new"}]);
    daemon.stop().await;
}

#[tokio::test]
async fn guard_watch_repairs_at_once_and_counts() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let rule = HOST.replace("name: address,", "name: address, guard: watch,");
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    db.collection::<Document>("log").update_one(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}).await;
    daemon.settled().await;
    let drift = || daemon.context().counts.drift.load(Ordering::Relaxed);
    assert_eq!(drift(), 1);
    // A change of the source, and our own write that follows, are not drift, and lead to no further write.
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.2"}).await;
    daemon.settled().await;
    assert_eq!(drift(), 1);
    let modified = daemon.context().counts.modified.load(Ordering::Relaxed);
    daemon.settled().await;
    assert_eq!(daemon.context().counts.modified.load(Ordering::Relaxed), modified, "no echo");
    daemon.stop().await;
}

#[tokio::test]
async fn on_drift_report_counts_and_leaves_it() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let rule = HOST.replace("name: address,", "name: address, guard: watch, on_drift: report,");
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    db.collection::<Document>("log").update_one(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(daemon.context().counts.drift.load(Ordering::Relaxed), 1);
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": "forged"}]);
    daemon.stop().await;
}

#[tokio::test]
async fn the_audit_finds_what_was_written_while_nobody_watched() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    db.collection::<Document>("log").update_one(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}).await;
    assert_eq!(daemon.context().counts.drift.load(Ordering::Relaxed), 1);
    daemon.stop().await;
}

/// The guard once called our own write drift if it took a while: with a large fan-out, or a full queue.
#[tokio::test]
async fn a_write_that_takes_its_time_is_nobodys_drift() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = host_and_log(&test).await;
    db.collection("log").insert_many((2..2000).map(|id| doc! {"_id": id, "host": 1})).await.unwrap();
    let rule = HOST.replace("name: address,", "name: address, guard: watch,");
    // The first statement for all targets of a key has a tenth of this time, which must be longer than a slowed write.
    let limits = "limits: { write_timeout_seconds: 60,";
    let daemon = Daemon::start_config(&config(&test, &rule).replace("limits: {", limits)).await;
    daemon.settled().await;
    // The guard checks the events of the first write twice while the second write is in progress.
    slow_writes(&test, 1500).await;
    let logs = db.collection::<Document>("log");
    let hosts = db.collection::<Document>("hosts");
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "10.0.1.1"}}).await.unwrap();
    until("the first write is under way", async || {
        let writes = doc! {"$match": {"command.update": "log", "command.$db": &test.name}};
        let running = test.client.database("admin").aggregate([doc! {"$currentOp": {}}, writes]).await.unwrap();
        running.try_collect::<Vec<_>>().await.unwrap().pop()
    })
    .await;
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "10.0.1.2"}}).await.unwrap();
    until("the first write is applied", async || logs.find_one(doc! {"_id": 1999, "ip": "10.0.1.1"}).await.unwrap())
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    let stale = doc! {"ip": {"$ne": "10.0.1.2"}};
    assert_eq!(logs.count_documents(stale).await.unwrap(), 0);
    assert_eq!(daemon.context().counts.drift.load(Ordering::Relaxed), 0);
    daemon.stop().await;
}

/// Without a checkpoint, changes may be lost on both sides of the place that a backfill has reached.
#[tokio::test]
async fn a_backfill_whose_checkpoint_is_lost_starts_over() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    // Each has a source of its own: one statement does not write them all.
    db.collection("hosts").insert_many((2..100).map(|id| doc! {"_id": id, "ip": "10.0.0.1"})).await.unwrap();
    db.collection("log").insert_many((2..100).map(|id| doc! {"_id": id, "host": id})).await.unwrap();
    let rule = HOST.replace("name: address,", "name: address, guard: off,");
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    daemon.stop().await;
    let state = test.beside("state");
    let half = doc! {"$set": {"backfill": "pending", "after": [50]}};
    state.collection::<Document>("rules").update_one(doc! {}, half).await.unwrap();
    state.collection::<Document>("positions").delete_many(doc! {}).await.unwrap();
    db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    let stale = doc! {"ip": {"$ne": "10.0.0.2"}};
    assert_eq!(db.collection::<Document>("log").count_documents(stale).await.unwrap(), 0);
    daemon.stop().await;
}

/// The audit once reported the targets of a rule that was not backfilled yet as drift, one warning each: thousands in
/// the first minutes of 336,776 flights; and also recent changes on a busy daemon.
#[tokio::test]
async fn what_is_under_way_is_nobodys_drift() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let rule = HOST.replace("name: address,", "name: address, on_drift: report,");
    let context = crate::support::daemon::context(&config(&test, &rule)).await;
    let rule = &context.plan.rules[0];
    let (out, _pages) = tokio::sync::mpsc::channel(1);
    let latest = ClusterTime { seconds: u32::MAX, increment: 0 };
    let set = async |collection: &str, ip: &str| {
        db.collection::<Document>(collection).update_one(doc! {}, doc! {"$set": {"ip": ip}}).await.unwrap();
    };
    set("log", "stale").await;
    let round = async |snapshot: Snapshot| {
        denormd_engine::jobs::audit::round(&context, rule, &move |rule| snapshot.applied_of(rule), &out).await.unwrap();
        context.counts.drift.load(Ordering::Relaxed)
    };
    let applied_by = |applied: ClusterTime| {
        let (database, delivered) = (db.name().to_owned(), tokio::time::Instant::now());
        let stream = StreamFacts { database, reached: applied, applied, saved: None, delivered };
        Snapshot { streams: vec![stream], ..Snapshot::new(&context.plan) }
    };
    let audit = async |applied: ClusterTime| round(applied_by(applied)).await;
    // The audit once did by itself what `backfill: manual` leaves to `denormd backfill`, and counted it as drift.
    for state in [RuleState::BACKFILL, RuleState::AwaitingBackfill] {
        let name = state.name();
        let states = Arc::new(vec![state]);
        assert_eq!(round(Snapshot { states, ..applied_by(latest) }).await, 0, "{name}");
    }
    // Jobs of other rules go on for as long as one of their keys is busy.
    let fan_outs = |rule: usize| Snapshot { fan_outs: [(rule, 1)].into(), ..applied_by(latest) };
    assert_eq!(fan_outs(1).applied_of(rule.id), Some(latest));
    assert_eq!(fan_outs(0).applied_of(rule.id), None);
    // The expected value changes between the two reads, and so does the stored one.
    let audit_while = async |collection: &str, ip: &str| {
        let (asked, is_changed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (asks, changes) = (asked.clone(), is_changed.clone());
        let applied = move |_| {
            // The third question comes between them.
            let waits = asks.fetch_add(1, Ordering::SeqCst) >= 2 && !changes.load(Ordering::SeqCst);
            Some(if waits { ClusterTime { seconds: 1, increment: 0 } } else { latest })
        };
        let change = async {
            until("the first read", async || (asked.load(Ordering::SeqCst) > 2).then_some(())).await;
            set(collection, ip).await;
            is_changed.store(true, Ordering::SeqCst);
        };
        let (ended, ()) = tokio::join!(denormd_engine::jobs::audit::round(&context, rule, &applied, &out), change);
        ended.unwrap();
        context.counts.drift.load(Ordering::Relaxed)
    };
    assert_eq!(audit_while("hosts", "10.0.0.2").await, 0);
    assert_eq!(audit_while("log", "10.0.0.1").await, 0);
    assert_eq!(audit_while("log", "10.0.0.2").await, 0);
    // The changes that the first read has seen are not applied yet.
    let behind = tokio::time::timeout(Duration::from_secs(4), async {
        set("log", "stale").await;
        audit(ClusterTime { seconds: 1, increment: 0 }).await
    });
    assert!(behind.await.is_err(), "the second look waits");
    assert_eq!(audit(latest).await, 1, "drift");
    let unrepaired = || context.published.borrow().unrepaired.contains_key(&rule.name);
    assert!(unrepaired(), "it stays as it is");
    set("log", "10.0.0.2").await;
    assert_eq!(audit(latest).await, 1);
    assert!(!unrepaired(), "a whole round has found it right");
}

/// The same with a second source, and the rules of both.
async fn host_room_and_log(test: &TestDb) -> (Database, String) {
    let db = host_and_log(test).await;
    db.collection("rooms").insert_one(doc! {"_id": 1, "room": "R1"}).await.unwrap();
    let other = "  - { name: room, copy: { source: rooms, target: log, match: { host: _id }, set: { room: $room } } }";
    (db, format!("{HOST}\n{other}"))
}

/// Waits until a rule is blocked, or none is.
async fn held(daemon: &Daemon, is: bool) {
    let mut progress = daemon.progress();
    let wait = progress.wait_for(|progress| progress.in_state(RuleState::is_stopped).is_empty() != is);
    tokio::time::timeout(PATIENCE, wait).await.expect("the rule is blocked").unwrap();
}

#[tokio::test]
async fn a_dropped_source_blocks_its_rules_until_it_is_there_again_or_the_loss_is_agreed_to() {
    let test = denormd_fixture::database().await;
    let (db, rules) = host_room_and_log(&test).await;
    let daemon = Daemon::start(&test, &rules).await;
    daemon.settled().await;
    let whole = doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "room": "R1"};
    assert_eq!(all(&db, "log").await, std::slice::from_ref(&whole));
    db.collection::<Document>("hosts").drop().await.unwrap();
    held(&daemon, true).await;
    // Events that make the rule check again: the target's event, a restart.
    let log = db.collection::<Document>("log");
    log.update_one(doc! {}, doc! {"$set": {"host": 1.0}}).await.unwrap();
    daemon.settled().await;
    daemon.stop().await;
    let daemon = Daemon::start(&test, &rules).await;
    held(&daemon, true).await;
    db.collection::<Document>("rooms").update_one(doc! {}, doc! {"$set": {"room": "R2"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(
        all(&db, "log").await,
        [doc! {"_id": 1, "host": 1.0, "ip": "10.0.0.1", "room": "R2"}],
        "the other rule goes on"
    );
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.2"}).await.unwrap();
    held(&daemon, false).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1.0, "ip": "10.0.0.2", "room": "R2"}], "it is back");
    db.collection::<Document>("hosts").drop().await.unwrap();
    held(&daemon, true).await;
    daemon.ask("address").await;
    held(&daemon, false).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1.0, "room": "R2"}]);
    daemon.stop().await;
}

/// A dead letter of the former definition was retried by the new one: each line got the price of one item.
#[tokio::test]
async fn a_changed_definition_forgets_the_dead_letters_of_the_former_one() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("items").insert_many([doc! {"_id": 1, "price": 10}, doc! {"_id": 2, "price": 20}]).await.unwrap();
    let lines = bson::bson!([{"item": 1, "qty": "abc"}, {"item": 2, "qty": 3}]);
    db.collection("orders").insert_one(doc! {"_id": 1, "lines": lines}).await.unwrap();
    db.collection("orders").insert_one(doc! {"_id": 2}).await.unwrap();
    let rule = |set: &str| {
        let pair = "match: { \"lines.$[].item\": _id }";
        format!(
            "  - {{ name: line, adopt: true, allow_scan: true, copy: {{ source: items, target: orders, {pair}, set: {{ {set} }} }} }}"
        )
    };
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    let daemon = Daemon::start(&test, &rule("\"lines.$[].total\": { $multiply: [$price, $$targetElement.qty] }")).await;
    daemon.settled().await;
    assert_eq!(dead_letters.count_documents(doc! {"rule": "line"}).await.unwrap(), 1);
    daemon.stop().await;
    let daemon = Daemon::start(&test, &rule("\"lines.$[].price\": $price")).await;
    daemon.settled().await;
    assert_eq!(dead_letters.count_documents(doc! {}).await.unwrap(), 0, "its keys are those of the former definition");
    let order = db.collection::<Document>("orders").find_one(doc! {"_id": 1}).await.unwrap().unwrap();
    let prices =
        order.get_array("lines").unwrap().iter().map(|line| line.as_document().unwrap().get_i32("price").unwrap());
    assert_eq!(prices.collect::<Vec<_>>(), [10, 20]);
    daemon.stop().await;
}

/// Nobody carried out the fan-out jobs of a rule that had left the config, and every `wait` waited for them.
#[tokio::test]
async fn a_rule_that_leaves_the_config_takes_its_jobs_with_it() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    db.collection("rooms").insert_one(doc! {"_id": 1, "name": "R1"}).await.unwrap();
    let room = "  - { name: room, copy: { source: rooms, target: log, match: { host: _id }, set: { room: $name } } }";
    let daemon = Daemon::start(&test, &format!("{HOST}\n{room}")).await;
    daemon.settled().await;
    daemon.stop().await;
    let jobs = test.beside("state").collection::<Document>("fan_outs");
    let id = doc! {"deployment": "default", "rule": "room", "task": "Value", "key": [1]};
    jobs.insert_one(doc! {"_id": id, "wish": bson::oid::ObjectId::new(), "after": [], "term": 0_i64}).await.unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    assert_eq!(jobs.count_documents(doc! {}).await.unwrap(), 0);
    daemon.stop().await;
}

#[tokio::test]
async fn a_source_dropped_while_the_daemon_is_down_detaches_its_rules() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    daemon.stop().await;
    db.collection("log").insert_one(doc! {"_id": 2, "host": 1}).await.unwrap();
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.9"}}).await.unwrap();
    db.collection::<Document>("hosts").drop().await.unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    held(&daemon, true).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await[0], doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"});
    daemon.stop().await;
}

/// The rule reads another collection from now on. It was compared with the UUID of the former one, and blocked because its source
/// was said to be replaced.
#[tokio::test]
async fn a_rule_may_get_another_source() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    db.collection("machines").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    let rules = test.beside("state").collection::<Document>("rules");
    let seen = async || rules.find_one(doc! {"source_seen": true}).await.unwrap()?.get("source_uuid").cloned();
    let hosts = until("the source is recorded", seen).await;
    daemon.stop().await;
    let daemon = Daemon::start(&test, &HOST.replace("source: hosts", "source: machines")).await;
    daemon.settled().await;
    until("the other source is recorded", async || seen().await.filter(|machines| *machines != hosts)).await;
    let record = rules.find_one(doc! {}).await.unwrap().unwrap();
    // It is registered, backfilled, and that is all.
    assert_eq!((record.get_str("backfill").unwrap(), record.get_i64("generation").unwrap()), ("done", 2));
    daemon.stop().await;
}

/// After a crash before the position had passed the drop, and an `unblock`, the next start read the drop again and once
/// blocked the rule a second time.
#[tokio::test]
async fn a_drop_that_is_met_again_after_its_release_holds_nothing() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    let server = Server::new(test.client.clone());
    let state = format!("{}_state", test.name);
    daemon.stop().await;
    let positions = test.beside("state").collection::<Document>("positions");
    let before = positions.find_one(doc! {}).await.unwrap().unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    db.collection::<Document>("hosts").drop().await.unwrap();
    held(&daemon, true).await;
    daemon.kill();
    let store = Store::open(&server, &state, "default").await.unwrap();
    assert!(store.unblock(&server, "address", &BlockReason::SourceGone, &doc! {}).await.unwrap());
    positions.replace_one(doc! {"_id": before.get("_id").unwrap()}, &before).await.unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty(), "it is blocked again");
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1}], "the loss is applied");
    // A later drop is a new one.
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.5"}).await.unwrap();
    daemon.settled().await;
    db.collection::<Document>("hosts").drop().await.unwrap();
    held(&daemon, true).await;
    daemon.stop().await;
}

/// While a block could not be recorded, the daemon did nothing else, and could not be stopped either.
#[tokio::test]
async fn a_stop_that_cannot_be_recorded_delays_its_own_rule_alone() {
    let test = denormd_fixture::database().await;
    let (db, rules) = host_room_and_log(&test).await;
    let daemon = Daemon::start(&test, &rules).await;
    daemon.settled().await;
    let state = test.beside("state");
    let validate = |filter: Document| state.run_command(doc! {"collMod": "rules", "validator": filter});
    validate(doc! {"backfill": {"$ne": "held"}}).await.unwrap();
    db.collection::<Document>("hosts").drop().await.unwrap();
    let dropped = daemon.context().server.operation_time().await.unwrap();
    db.collection::<Document>("rooms").update_one(doc! {}, doc! {"$set": {"room": "R2"}}).await.unwrap();
    let after = doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "room": "R2"};
    becomes(&db, after.clone()).await;
    assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty(), "the block is not recorded");
    tokio::time::timeout(PATIENCE, daemon.stop()).await.expect("the daemon stops");
    let position = state.collection::<Document>("positions").find_one(doc! {}).await.unwrap().unwrap();
    let saved = ClusterTime::from(position.get_timestamp("time").unwrap());
    assert!(saved < dropped, "the drop is read again: {saved:?}, {dropped:?}");
    validate(doc! {}).await.unwrap();
    let daemon = Daemon::start(&test, &rules).await;
    held(&daemon, true).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [after]);
    daemon.stop().await;
}

/// Thirty hosts with a log message each.
async fn thirty(test: &TestDb) -> Database {
    let db = test.database();
    let hosts = (0..30).map(|n| doc! {"_id": n, "ip": "10.0.0.1"});
    db.collection("hosts").insert_many(hosts).await.unwrap();
    db.collection("log").insert_many((0..30).map(|n| doc! {"_id": n, "host": n})).await.unwrap();
    db
}

async fn with_values(db: &Database) -> u64 {
    db.collection::<Document>("log").count_documents(doc! {"ip": {"$exists": true}}).await.unwrap()
}

async fn is_blocked_by_the_removal_limit(daemon: &Daemon) {
    let mut progress = daemon.progress();
    let blocked = RuleState::Blocked(BlockReason::RemovalLimit);
    let wait = progress.wait_for(|progress| progress.states.contains(&blocked));
    tokio::time::timeout(PATIENCE, wait).await.expect("the rule is blocked").unwrap();
}

/// The limit once covered only `remove` and `delete`: a purge of the sources unset every copy.
#[tokio::test]
async fn values_that_would_be_unset_count_towards_the_removal_limit() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let forms = [
        ("one", "match: { host: _id }, set: { ip: $ip }"),
        ("into", "match: { \"hosts.$[]\": _id }, into: ip, element: $ip"),
    ];
    for (name, form) in forms {
        let rule = HOST.replace("match: { host: _id }, set: { ip: $ip }", form).replace("address", name);
        let text = config(&test, &rule).replace("limits: {", "limits: { destroy_per_hour: 10,");
        let hosts = db.collection::<Document>("hosts");
        hosts.delete_many(doc! {}).await.unwrap();
        hosts.insert_many((0..30).map(|n| doc! {"_id": n, "ip": "10.0.0.1"})).await.unwrap();
        let log = db.collection::<Document>("log");
        log.update_many(doc! {}, vec![doc! {"$set": {"hosts": ["$host"]}}, doc! {"$unset": "ip"}]).await.unwrap();
        let daemon = Daemon::start_config(&text).await;
        daemon.settled().await;
        assert_eq!(with_values(&db).await, 30);
        // References that never had a value lose none.
        log.insert_many((100..130).map(|n| doc! {"_id": n, "host": n, "hosts": []})).await.unwrap();
        daemon.settled().await;
        hosts.delete_many(doc! {"_id": {"$lt": 5}}).await.unwrap();
        daemon.settled().await;
        assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty(), "five may go");
        hosts.delete_many(doc! {}).await.unwrap();
        is_blocked_by_the_removal_limit(&daemon).await;
        daemon.settled().await;
        let kept = log.count_documents(doc! {"ip": {"$in": ["10.0.0.1"]}}).await.unwrap();
        assert!((20..=25).contains(&kept), "{kept} have their value: no more than ten go in an hour");
        // An operator agrees: all values are removed at once.
        daemon.ask(name).await;
        held(&daemon, false).await;
        daemon.settled().await;
        assert_eq!(log.count_documents(doc! {"ip": {"$in": ["10.0.0.1"]}}).await.unwrap(), 0);
        assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty());
        daemon.stop().await;
        log.delete_many(doc! {"_id": {"$gte": 100}}).await.unwrap();
    }
}

/// Whatever a target without a source gets instead, it loses nothing when it is written again: a rule with many dangling
/// references blocked itself in each backfill after the first.
#[tokio::test]
async fn targets_without_a_source_lose_nothing_in_another_backfill() {
    for instead in ["on_missing: \"null\"", "otherwise: { ip: none }"] {
        let test = denormd_fixture::database().await;
        let db = thirty(&test).await;
        db.collection::<Document>("hosts").delete_many(doc! {"_id": {"$gte": 5}}).await.unwrap();
        let rule = HOST.replace("set: { ip: $ip }", &format!("set: {{ ip: $ip }}, {instead}"));
        let text = config(&test, &rule).replace("limits: {", "limits: { destroy_per_hour: 10,");
        let daemon = Daemon::start_config(&text).await;
        daemon.settled().await;
        assert_eq!(with_values(&db).await, 30, "{instead}");
        daemon.start_backfill("address").await;
        daemon.settled().await;
        assert_eq!(daemon.progress().borrow().states[0], RuleState::Live, "{instead}");
        daemon.stop().await;
    }
}

/// A failed batch was once counted again with each attempt, and blocked the rule.
#[tokio::test]
async fn a_removal_that_is_tried_again_counts_once() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = thirty(&test).await;
    let text = config(&test, HOST).replace("limits: {", "limits: { destroy_per_hour: 10,");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    let refused = doc! {"failCommands": ["update"], "namespace": format!("{}.log", test.name), "errorCode": 112};
    fail(&test, doc! {"times": 5}, refused).await;
    let hosts = db.collection::<Document>("hosts");
    hosts.delete_many(doc! {"_id": {"$lt": 8}}).await.unwrap();
    until("eight targets have lost their values", async || (with_values(&db).await == 22).then_some(())).await;
    daemon.settled().await;
    assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty(), "eight of ten are gone");
    hosts.delete_many(doc! {}).await.unwrap();
    is_blocked_by_the_removal_limit(&daemon).await;
    daemon.settled().await;
    assert!(with_values(&db).await >= 20, "no more than ten go in an hour");
    daemon.stop().await;
}

/// A collection that was created after the start once counted as never seen: when it was dropped, its copies were
/// removed.
#[tokio::test]
async fn a_source_that_was_created_after_the_start_is_missed_when_it_goes() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("log").insert_many((0..12_000).map(|n| doc! {"_id": n, "host": n})).await.unwrap();
    // The drop waits behind more changes than the queue holds.
    let text = config(&test, HOST).replace("limits: {", "limits: { pending: 100, batch_keys: 50, ");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    let hosts = db.collection("hosts");
    hosts.insert_many((0..12_000).map(|n| doc! {"_id": n, "ip": "10.0.0.1"})).await.unwrap();
    daemon.settled().await;
    assert_eq!(with_values(&db).await, 12_000);
    // Its last changes are processed after it is gone.
    slow_writes(&test, 300).await;
    hosts.update_many(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    hosts.drop().await.unwrap();
    held(&daemon, true).await;
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(with_values(&db).await, 12_000);
    daemon.stop().await;
}

/// An application that writes one document creates the collection again: nearly all copies were once removed, because
/// the removal limit does not protect a small collection.
#[tokio::test]
async fn a_source_that_returns_with_few_documents_costs_no_value() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let running = Running::start(&test, HOST, "").await;
    running.until_state("live").await;
    assert_eq!(with_values(&db).await, 30);
    let hosts = db.collection("hosts");
    hosts.drop().await.unwrap();
    hosts.insert_one(doc! {"_id": 0, "ip": "10.0.0.2"}).await.unwrap();
    let stays = "the source collection is there again, but the rule stays blocked";
    until("the new collection has been counted", async || running.log().contains(stays).then_some(())).await;
    let log = running.log();
    assert!(
        log.contains("29 of 30 targets would lose their value") && log.contains("`denormd unblock address`"),
        "{log}"
    );
    assert_eq!(with_values(&db).await, 30);
    // `mongorestore` goes on: the rest of the documents, but for two.
    hosts.insert_many((1..28).map(|n| doc! {"_id": n, "ip": "10.0.0.2"})).await.unwrap();
    until("it resumes by itself", async || {
        let new = db.collection::<Document>("log").count_documents(doc! {"ip": "10.0.0.2"}).await.unwrap();
        (new == 28 && with_values(&db).await == 28).then_some(())
    })
    .await;
    hosts.drop().await.unwrap();
    running.until_state("blocked").await;
    let (code, told, error) = running.command(&["unblock", "address"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(told.contains("  - 28 of 28 targets would lose their value\n"), "{told}");
    assert_eq!(with_values(&db).await, 0);
}

/// With `otherwise`, this count found no loss, and nearly all copies were replaced.
#[tokio::test]
async fn a_source_that_returns_with_few_documents_is_not_replaced_by_otherwise() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let rule = HOST.replace("set: { ip: $ip }", "set: { ip: $ip }, otherwise: { ip: none }");
    let running = Running::start(&test, &rule, "").await;
    running.until_state("live").await;
    let hosts = db.collection("hosts");
    hosts.drop().await.unwrap();
    hosts.insert_one(doc! {"_id": 0, "ip": "10.0.0.1"}).await.unwrap();
    let stays = "the source collection is there again, but the rule stays blocked";
    until("the new collection has been counted", async || running.log().contains(stays).then_some(())).await;
    let log = db.collection::<Document>("log");
    assert_eq!(log.count_documents(doc! {"ip": "10.0.0.1"}).await.unwrap(), 30);
}

/// An older backup restored while the daemon was down, and `$out` while it runs.
#[tokio::test]
async fn a_source_that_is_replaced_costs_no_value_without_an_agreement() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    daemon.stop().await;
    let hosts = db.collection("hosts");
    hosts.drop().await.unwrap();
    hosts.insert_many((0..5).map(|n| doc! {"_id": n, "ip": "10.0.0.3"})).await.unwrap();
    let daemon = Daemon::start(&test, HOST).await;
    held(&daemon, true).await;
    daemon.settled().await;
    assert_eq!(with_values(&db).await, 30);
    daemon.ask("address").await;
    held(&daemon, false).await;
    daemon.settled().await;
    let log = db.collection::<Document>("log");
    assert_eq!(log.count_documents(doc! {"ip": "10.0.0.3"}).await.unwrap(), 5);
    assert_eq!(with_values(&db).await, 5);
    // Rebuilt as a whole: no value is lost, so nobody is asked.
    let rebuilt = vec![doc! {"$set": {"ip": "10.0.0.4"}}, doc! {"$out": "hosts"}];
    hosts.aggregate(rebuilt).await.unwrap();
    until("it is copied", async || (log.count_documents(doc! {"ip": "10.0.0.4"}).await.unwrap() == 5).then_some(()))
        .await;
    hosts.aggregate(vec![doc! {"$match": {"_id": 1}}, doc! {"$out": "hosts"}]).await.unwrap();
    held(&daemon, true).await;
    daemon.settled().await;
    assert_eq!(with_values(&db).await, 5);
    daemon.stop().await;
}

/// The new collection was taken for the one that the rule knew if the pipeline started again during a pause: `resume` emptied the
/// arrays before the loss was noticed.
#[tokio::test]
async fn a_source_that_is_replaced_during_a_pause_costs_no_value() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let rule = "  - { name: ips, collect: { source: hosts, target: log, match: { host: _id }, into: ip, element: { ip: $ip } } }";
    let mut running = Running::start(&test, rule, "").await;
    running.until_state("live").await;
    assert_eq!(running.command(&["pause", "ips"]).0, Some(0));
    running.stop();
    let few = vec![doc! {"$match": {"_id": 1}}, doc! {"$out": "hosts"}];
    db.collection::<Document>("hosts").aggregate(few).await.unwrap();
    // Without a position, the event of the replacement is not read.
    test.beside("state").collection::<Document>("positions").drop().await.unwrap();
    running.run().await;
    let rules = test.beside("state").collection::<Document>("rules");
    let is_recorded = doc! {"_id.rule": "ips", "paused": true, "block.kind": "source_gone"};
    until("the loss is recorded", async || rules.find_one(is_recorded.clone()).await.unwrap()).await;
    let (code, _, error) = running.command(&["resume", "ips"]);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("rule `ips` is blocked: its source collection was dropped, renamed or replaced"), "{error}");
    let stays = "the source collection is there again, but the rule stays blocked";
    until("the new collection has been counted", async || running.log().contains(stays).then_some(())).await;
    let lost = db.collection::<Document>("log").count_documents(doc! {"ip.0": {"$exists": false}}).await.unwrap();
    assert_eq!(lost, 0);
}

/// A rule with `backfill: manual` was backfilled unasked once its source, or an index, was there again.
#[tokio::test]
async fn a_rule_that_waits_for_its_command_waits_again_after_a_stop() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    db.collection("rooms").insert_one(doc! {"_id": 1, "name": "R1"}).await.unwrap();
    let rules = HOST.replace("copy:", "backfill: manual, copy:")
        + "\n  - { name: room, copy: { source: rooms, target: log, match: { room: _id }, set: { room_name: $name } } }";
    let mut running = Running::start(&test, &rules, "").await;
    running.until_state("awaiting_backfill").await;
    let generation = async || {
        let record = doc! {"_id.rule": "address"};
        let rules = test.beside("state").collection::<Document>("rules");
        rules.find_one(record).await.unwrap().unwrap().get_i64("generation").unwrap()
    };
    let before = generation().await;
    db.collection::<Document>("hosts").aggregate(vec![doc! {"$out": "hosts"}]).await.unwrap();
    until("it is blocked, and waits again", async || (generation().await == before + 2).then_some(())).await;
    running.until_state("awaiting_backfill").await;
    let again = "the source collection is there again: the rule still waits for `denormd backfill`";
    assert_eq!(running.log().matches(again).count(), 1, "{}", running.log());

    running.stop();
    db.run_command(doc! {"dropIndexes": "log", "index": "host_1"}).await.unwrap();
    running.run().await;
    running.until_state("unavailable").await;
    db.run_command(doc! {"createIndexes": "log", "indexes": [{"key": {"host": 1}, "name": "host_1"}]}).await.unwrap();
    running.until_state("awaiting_backfill").await;
    assert_eq!(with_values(&db).await, 0);
    assert_eq!(running.command(&["backfill", "--rule", "address"]).0, Some(0));
    assert_eq!(with_values(&db).await, 30);
}

/// A block that the server recorded late, after an operator had agreed: the state was blocked, the leader ran a
/// backfill that could never be saved, and nothing reported it.
#[tokio::test]
async fn a_block_that_is_recorded_late_is_noticed() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    let server = Server::new(test.client.clone());
    let store = Store::open(&server, &format!("{}_state", test.name), "default").await.unwrap();
    let blocked = RuleState::Blocked(BlockReason::RemovalLimit);
    store.reset_rule(&server, &daemon.context().plan.rules[0], &blocked, Agreement::Ended).await.unwrap();
    held(&daemon, true).await;
    daemon.ask("address").await;
    held(&daemon, false).await;
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(with_values(&db).await, 1);
    daemon.stop().await;
}

#[tokio::test]
async fn the_removal_limit_stops_a_wave_of_deletes() {
    let test = denormd_fixture::database().await;
    let db = thirty(&test).await;
    let rule = HOST.replace("set: { ip: $ip }", "set: { ip: $ip }, on_missing: delete");
    let text = config(&test, &rule).replace("limits: {", "limits: { destroy_per_hour: 10,");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    for n in 0..5 {
        db.collection::<Document>("hosts").delete_one(doc! {"_id": n}).await.unwrap();
    }
    daemon.settled().await;
    assert_eq!(all(&db, "log").await.len(), 25);
    db.collection::<Document>("hosts").delete_many(doc! {}).await.unwrap();
    held(&daemon, true).await;
    daemon.settled().await;
    assert!(all(&db, "log").await.len() >= 20, "no more than ten go in an hour");
    daemon.stop().await;
}

/// Each new target once began the grace period of its key again.
#[tokio::test]
async fn targets_without_a_source_are_deleted_while_more_of_them_arrive() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let rule = HOST.replace("set: { ip: $ip }", "set: { ip: $ip }, on_missing: delete");
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    let log = db.collection::<Document>("log");
    let next = std::cell::Cell::new(100);
    until("the first one is deleted", async || {
        log.insert_one(doc! {"_id": next.get(), "host": "gone"}).await.unwrap();
        next.set(next.get() + 1);
        (next.get() > 110 && log.count_documents(doc! {"_id": 100}).await.unwrap() == 0).then_some(())
    })
    .await;
    daemon.settled().await;
    assert_eq!(log.count_documents(doc! {"host": "gone"}).await.unwrap(), 0);
    daemon.stop().await;
}

/// Each page waited for the grace period of its keys, with no more than four pages in the queue.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_reads_on_while_some_keys_wait_for_their_grace_period() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    let log = db.collection::<Document>("log");
    let host = |id: i32| if id % 1000 == 0 { Bson::from(format!("gone {id}")) } else { 1.into() };
    log.insert_many((1000..9000).map(|id| doc! {"_id": id, "host": host(id)})).await.unwrap();
    let rule = HOST.replace("set: { ip: $ip }", "set: { ip: $ip }, on_missing: delete");
    let text = config(&test, &rule).replace("destroy_grace_seconds: 1 ", "destroy_grace_seconds: 3600 ");
    let daemon = Daemon::start_config(&text).await;
    until("all others have their address", async || {
        (log.count_documents(doc! {"ip": "10.0.0.1"}).await.unwrap() == 7993).then_some(())
    })
    .await;
    assert_eq!(log.count_documents(doc! {"host": {"$type": "string"}}).await.unwrap(), 8);
    daemon.stop().await;
}

/// The server refuses an `_id` with such a name in it, and the daemon's records have the key in theirs: they could not be
/// written, and were tried again for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_a_dollar_in_a_name_can_be_a_dead_letter_and_a_fan_out() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    let key = doc! {"$x": [{"$y": 1}]};
    let hosts = db.collection::<Document>("hosts");
    hosts.insert_one(doc! {"_id": 1, "key": key.clone(), "ip": 0}).await.unwrap();
    db.collection("log").insert_many((0..12_000).map(|id| doc! {"_id": id, "host": key.clone()})).await.unwrap();
    let rule = "  - { name: address, guard: off, copy: { source: hosts, target: log, match: { host: key }, set: { ip: $ip } } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let validator = doc! {"$nor": [{"_id": 5000, "ip": {"$gt": 0}}]};
    db.run_command(doc! {"collMod": "log", "validator": validator}).await.unwrap();
    let log = db.collection::<Document>("log");
    let fan_outs = test.beside("state").collection::<Document>("fan_outs");
    let opened = doc! {"ns": format!("{}_state.fan_outs", test.name), "op": "i"};
    let oplog = test.client.database("local").collection::<Document>("oplog.rs");
    // The failure may strike a write of the daemon's own state.
    let mut ip = 0;
    while oplog.count_documents(opened.clone()).await.unwrap() == 0 {
        ip += 1;
        assert!(ip < 50, "no fan-out is recorded");
        next_write_runs_out_of_time(&test, "log").await;
        hosts.update_one(doc! {}, doc! {"$set": {"ip": ip}}).await.unwrap();
        daemon.settled().await;
    }
    fail(&test, "off", doc! {}).await;
    daemon.settled().await;
    assert_eq!(log.count_documents(doc! {"ip": ip}).await.unwrap(), 11_999);
    assert_eq!(fan_outs.count_documents(doc! {}).await.unwrap(), 0, "the fan-out is done");
    let context = daemon.shared();
    let chosen = Chosen { rule: None, key: Some(key.into()) };
    let found = context.dead_letters.find(&context.server, &chosen, 0).await.unwrap();
    let [Ok(dead_letter)] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(dead_letter.target.as_ref().unwrap().values(), [5000.into()]);
    db.run_command(doc! {"collMod": "log", "validator": {}}).await.unwrap();
    assert!(daemon.retry_dead_letters("address").await);
    assert_eq!(log.count_documents(doc! {"ip": ip}).await.unwrap(), 12_000);
    daemon.stop().await;
}

/// They once counted as tried, and were deleted.
#[tokio::test]
async fn the_dead_letters_of_a_stopped_rule_wait_for_it() {
    let test = denormd_fixture::database().await;
    let db = host_and_log(&test).await;
    db.collection("rooms").insert_one(doc! {"_id": 1, "name": "R1"}).await.unwrap();
    let room = "  - { name: room, copy: { source: rooms, target: log, match: { host: _id }, set: { room: $name } } }";
    let daemon = Daemon::start(&test, &format!("{HOST}\n{room}")).await;
    daemon.settled().await;
    let context = daemon.shared();
    let DeadLetters { database, deployment, .. } = &context.dead_letters;
    let store = Store::open(&context.server, database, deployment).await.unwrap();
    store.pause(&context.server, "address", None).await.unwrap();
    let snapshot = daemon.progress();
    until("it is paused", async || snapshot.borrow().states[0].is_stopped().then_some(())).await;
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    let now = bson::DateTime::now();
    // In this order, they are tried together.
    let dead_letter = |rule: &str| {
        let id = doc! {"deployment": "default", "rule": rule, "task": "Value", "key": [1], "target": []};
        doc! {"_id": id, "deployment": "default", "rule": rule, "attempts": 1, "first": now, "last": now, "asked": now}
    };
    dead_letters.insert_many(["address", "room"].map(dead_letter)).await.unwrap();
    let left = async |rule: &str| dead_letters.count_documents(doc! {"rule": rule}).await.unwrap();
    until("the other rule's is tried", async || (left("room").await == 0).then_some(())).await;
    assert_eq!(left("address").await, 1);
    store.resume(&context.server, "address").await.unwrap();
    until("it is tried", async || (left("address").await == 0).then_some(())).await;
    daemon.stop().await;
}

/// Such records were skipped: nothing retried them, and nothing listed them.
#[tokio::test]
async fn a_dead_letter_that_cannot_be_read_is_reported_and_the_others_are_retried() {
    let test = denormd_fixture::database().await;
    host_and_log(&test).await;
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    let context = daemon.shared();
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    let now = bson::DateTime::now();
    let dead_letter = |task: &str, key: i32| {
        let id = doc! {"deployment": "default", "rule": "address", "task": task, "key": [key], "target": []};
        doc! {"_id": id, "deployment": "default", "rule": "address", "attempts": 1, "first": now, "last": now, "asked": now}
    };
    let mut without_number = dead_letter("Value", 1);
    without_number.extend(doc! {"attempts": "one"});
    without_number.remove("asked");
    let records = [without_number, dead_letter("Later", 1), dead_letter("Value", 2)];
    dead_letters.insert_many(records).await.unwrap();
    let find = async || context.dead_letters.find(&context.server, &Chosen::default(), 0).await.unwrap();
    // The daemon reads what a majority has, which may be later than what a count finds.
    let left = until("the readable one is retried", async || Some(find().await).filter(|found| found.len() == 2)).await;
    let error = context.metrics.recent_errors().into_iter().find(|error| error.doing == "read a dead letter").unwrap();
    assert_eq!(error.rule.as_deref(), Some("address"));
    assert_eq!(error.message, "a dead letter of address cannot be read, and is not retried");
    let why = left.into_iter().map(|entry| entry.unwrap_err().why).collect::<Vec<_>>();
    assert!(why.iter().any(|why| why == "the task Later is unknown"), "{why:?}");

    // The document fails again: the checkpoint does not wait for it, and its record can be read from now on.
    let (rule, key) = (context.plan.rules[0].clone(), Key::one(1.into()));
    let offending = Offending { key: &key, target: None, path: None, tree: None, since: None };
    let error = Error::new(Kind::Refused, "Document failed validation");
    context.dead_letters.record(&context.server, &rule, Task::Value, &offending, &error).await.unwrap();
    let attempts: Vec<i32> = find().await.into_iter().flatten().map(|dead_letter| dead_letter.attempts).collect();
    assert_eq!(attempts, [1]);
    daemon.stop().await;
}

/// The old rules once stood still meanwhile, and a liveness probe failed.
#[tokio::test(flavor = "multi_thread")]
async fn the_old_rules_run_while_the_effect_of_new_ones_is_counted() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = host_and_log(&test).await;
    db.collection("rooms").insert_one(doc! {"_id": 1, "name": "R1"}).await.unwrap();
    db.collection("seats").insert_one(doc! {"_id": 1, "room": 1, "name": "R1"}).await.unwrap();
    let room = "  - { name: room, copy: { source: rooms, target: seats, match: { room: _id }, set: { name: $name } } }";
    let both = Running::prepare(&test, &format!("{HOST}\n{room}"), "");
    let mut running = Running::start(&test, HOST, "").await;
    running.until("it is live", |status| status.rules.first().is_some_and(|rule| rule.state == "live")).await;
    let counted = doc! {
        "failCommands": ["find"], "namespace": format!("{}.seats", test.name), "appName": "denormd",
        "blockConnection": true, "blockTimeMS": 600_000,
    };
    // The first one is of the checks before anything is counted.
    fail(&test, doc! {"skip": 1}, counted).await;
    let new = std::fs::read_to_string(both.file()).unwrap();
    std::fs::write(running.file(), new.replace(&both.address.to_string(), &running.address.to_string())).unwrap();
    until("the new config is read", async || running.log().contains("replacing the rules").then_some(())).await;
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.2"}).await;
    assert!(!running.log().contains(r#""new rule","rule":"room""#), "{}", running.log());
    running.kill();
}
