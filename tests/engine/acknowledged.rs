//! Nothing counts before it is majority-committed: neither reads nor writes.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_engine::checkpoint::{rule_record::Agreement, store::Store};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::{
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{Server, error::Kind};
use mongodb::options::WriteConcern;

use crate::{
    engine::fan_outs::fail,
    support::{
        daemon::{Daemon, PATIENCE, all, until},
        world::World,
    },
};

/// Makes updates of one collection fail as on a primary that steps down, or stops doing so.
async fn refuse_writes(test: &TestDb, collection: &str, refuse: bool) {
    let command = doc! {
        "configureFailPoint": "failCommand", "mode": if refuse { "alwaysOn" } else { "off" },
        "data": {"failCommands": ["update"], "namespace": format!("{}.{collection}", test.name), "errorCode": 189, "appName": "denormd"},
    };
    test.client.database("admin").run_command(command).await.unwrap();
}

/// Waits until the daemon has had a write refused, and longer than it waits between two saves of its state.
async fn tried_in_vain(world: &World, daemon: &crate::support::world::Daemon) {
    let begun = Instant::now();
    while !daemon.log().contains("reconciles failed and are tried again") {
        assert!(begun.elapsed() < PATIENCE, "nothing was tried: {}", daemon.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // State that the daemon might wrongly save in the meantime is saved once a second. Other work continues.
    for n in 0..25 {
        let tasks = world.db.collection::<Document>("tasks");
        let due = doc! {"$set": {"owner": n % 3, "due": n}};
        tasks.update_one(doc! {"_id": n % 9}, due).upsert(true).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A daemon that saves its position before the write is acknowledged loses the change if it is killed then, because
/// nothing reports it a second time. First its position in a backfill, then its position in the oplog.
#[tokio::test(flavor = "multi_thread")]
async fn the_state_does_not_pass_what_is_not_written() {
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    let state = world.test.beside("state");
    refuse_writes(&world.test, "logs", true).await;
    let daemon = world.daemon();
    tried_in_vain(&world, &daemon).await;
    let rules = state.collection::<Document>("rules");
    let address = rules.find_one(doc! {"_id.rule": "address"}).await.unwrap().unwrap();
    assert_eq!(address.get_str("backfill").ok(), Some("pending"), "{address}");
    assert!(address.get_array("after").is_ok_and(Vec::is_empty), "a page that was not written is passed: {address}");
    daemon.kill9();
    refuse_writes(&world.test, "logs", false).await;
    let daemon = world.daemon();
    world.converged().await;
    daemon.kill9();

    refuse_writes(&world.test, "logs", true).await;
    let daemon = world.daemon();
    let update = doc! {"update": "hosts", "updates": [{"q": {"_id": 1}, "u": {"$set": {"ip": "new"}}}]};
    let changed = world.db.run_command(update).await.unwrap().get_timestamp("operationTime").unwrap();
    tried_in_vain(&world, &daemon).await;
    for position in all(&state, "positions").await {
        assert!(position.get_timestamp("time").unwrap() < changed, "{changed} is passed: {position}");
    }
    daemon.kill9();
    refuse_writes(&world.test, "logs", false).await;
    let daemon = world.daemon();
    world.converged().await;
    daemon.terminate().await;
}

/// The first statement for a key has a tenth of the time. Where a majority was always further behind, each changed key was written
/// again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_majority_that_is_behind_gets_the_whole_time_of_a_write() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    let hosts = db.collection::<Document>("hosts");
    hosts.insert_one(doc! {"_id": 1, "ip": "old"}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = "  - { name: r, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }\n";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let behind = doc! {
        "failCommands": ["update"], "namespace": format!("{}.logs", test.name), "appName": "denormd",
        "writeConcernError": {"code": 50, "errmsg": "behind"},
    };
    let (metrics, counts) = (&daemon.context().metrics, &daemon.context().counts);
    let before = counts.uncertain.load(Ordering::Relaxed);
    fail(&test, doc! {"times": 1}, behind).await;
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "new"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(all(&db, "logs").await[0].get_str("ip").unwrap(), "new");
    assert!(counts.uncertain.load(Ordering::Relaxed) > before, "the first statement had no time for the majority");
    let errors = metrics.recent_errors();
    assert!(errors.iter().all(|error| error.reason != Kind::NotReplicated.policy().name), "{errors:?}");
    daemon.stop().await;
}

/// A source that only the primary has may be rolled back without an event: its copy would be of a document that never
/// existed. And a read that is older than the event that requested it would write the old value and finish.
#[tokio::test(flavor = "multi_thread")]
async fn reads_are_of_a_majority_and_no_older_than_asked() {
    let set = ReplicaSet::start(3).await;
    let test = set.database().await;
    let db = test.database();
    let majority = WriteConcern::builder().w(mongodb::options::Acknowledgment::Majority).build();
    db.collection("s").insert_one(doc! {"_id": 1, "v": "old"}).write_concern(majority).await.unwrap();
    let primary = set.primary().await;
    let replicate = async |go_on: bool| {
        for node in set.nodes().iter().enumerate().filter(|(nth, _)| *nth != primary).map(|(_, node)| node) {
            let stop = doc! {"configureFailPoint": "stopReplProducer", "mode": if go_on { "off" } else { "alwaysOn" }};
            node.client().await.database("admin").run_command(stop).await.unwrap();
        }
    };
    replicate(false).await;
    // The secondaries stop at their next batch: until a majority stops answering, writes succeed.
    let begun = Instant::now();
    loop {
        let hurried = doc! {"insert": "marks", "documents": [{}], "writeConcern": {"w": "majority", "wtimeout": 300}};
        if db.run_command(hurried).await.is_ok_and(|reply| reply.contains_key("writeConcernError")) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "the secondaries go on");
    }
    let alone =
        doc! {"update": "s", "updates": [{"q": {"_id": 1}, "u": {"$set": {"v": "new"}}}], "writeConcern": {"w": 1}};
    let written = db.run_command(alone).await.unwrap().get_timestamp("operationTime").unwrap();
    let server = Server::new(test.client.clone());
    let read = async |after: ClusterTime| {
        let rows = server.read(&test.name, doc! {"find": "s"}, after).await.unwrap();
        rows[0].get_str("v").unwrap().to_owned()
    };
    assert_eq!(read(ClusterTime::default()).await, "old", "a majority does not have it");
    let resumed = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        replicate(true).await;
    };
    let (value, ()) = tokio::join!(read(ClusterTime::from(written)), resumed);
    assert_eq!(value, "new", "read before a majority had what was asked for");
}

/// A new primary may not know yet that a majority has our last write. A search for the targets that hold a source would
/// miss the one to which it was added a moment ago.
#[tokio::test(flavor = "multi_thread")]
async fn reads_are_no_older_than_what_was_acknowledged_to_us() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    let server = Server::new(test.client.clone());
    let before = server.operation_time().await.unwrap();
    let statement = bson::rawdoc! {"q": {"_id": 1}, "u": {"$set": {"x": 1}}};
    server.update(&test.name, "t", &[statement], Duration::from_secs(60)).await.unwrap();
    db.run_command(doc! {"profile": 2}).await.unwrap();
    server.read(&test.name, doc! {"find": "t", "comment": "looked at"}, ClusterTime::default()).await.unwrap();
    db.run_command(doc! {"profile": 0}).await.unwrap();
    let profile = db.collection::<Document>("system.profile");
    let read = profile.find_one(doc! {"command.comment": "looked at"}).await.unwrap().unwrap();
    let concern = read.get_document("command").unwrap().get_document("readConcern").unwrap();
    assert!(ClusterTime::from(concern.get_timestamp("afterClusterTime").unwrap()) > before, "{concern}");
}

/// The end of an older backfill must not mark a newly requested one as done: after a crash a moment later, the newer
/// one would never run.
#[tokio::test]
async fn an_older_backfill_does_not_end_a_newer_wish() {
    let test = denormd_fixture::database().await;
    let rule = "  - { name: r, allow_scan: true, copy: { source: s, target: t, match: { ref: _id }, set: { x: $x } } }";
    let context = crate::support::daemon::context(&crate::support::daemon::config(&test, rule)).await;
    let (server, rule) = (&context.server, &context.plan.rules[0]);
    let store = Store::open(server, &context.dead_letters.database, "default").await.unwrap();
    let (_, older) = store.reset_rule(server, rule, &RuleState::BACKFILL, Agreement::Ended).await.unwrap();
    assert!(
        store
            .save_backfill(
                server,
                rule,
                older,
                (&RuleState::Backfilling { after: Some(5.into()), in_sources: false, agreed: false }, None),
                (1, None)
            )
            .await
            .unwrap()
    );
    assert!(store.ask(server, "r").await.unwrap());
    for state in [RuleState::Backfilling { after: Some(9.into()), in_sources: false, agreed: false }, RuleState::Live] {
        assert!(!store.save_backfill(server, rule, older, (&state, None), (2, None)).await.unwrap(), "{state:?}");
    }
    let stored = async || store.rules(server).await.unwrap().remove(0).1;
    assert_eq!(stored().await.state, RuleState::BACKFILL);
    // Its own progress, written late, does not reopen it either.
    let generation = stored().await.generation;
    assert!(store.save_backfill(server, rule, generation, (&RuleState::Live, None), (2, None)).await.unwrap());
    let progress = RuleState::Backfilling { after: Some(9.into()), in_sources: false, agreed: false };
    assert!(!store.save_backfill(server, rule, generation, (&progress, None), (1, None)).await.unwrap());
    assert!(store.save_backfill(server, rule, generation, (&RuleState::Live, None), (2, None)).await.unwrap());
    assert_eq!(stored().await.state, RuleState::Live);
}

/// The end of a backfill is recorded, and the answer lost. A pass that is repeated for it finds a new target, and no open backfill in the
/// record.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_ends_though_the_answer_to_its_last_write_is_lost() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let (db, state) = (test.database(), test.beside("state"));
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "new"}).await.unwrap();
    let logs = db.collection::<Document>("logs");
    logs.insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = "  - { name: r, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }\n";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let unanswered = doc! {
        "failCommands": ["update"], "namespace": format!("{}.rules", state.name()), "appName": "denormd",
        "writeConcernError": {"code": 50, "errmsg": "no answer"},
    };
    fail(&test, "alwaysOn", unanswered).await;
    // Another client than the daemon's: this write is answered.
    let server = Server::new(test.client.clone());
    let store = Store::open(&server, state.name(), "default").await.unwrap();
    let generation = async || store.rules(&server).await.unwrap().remove(0).1.generation;
    let before = generation().await;
    assert!(store.ask(&server, "r").await.unwrap());
    let ended = doc! {"backfill": "done", "generation": before + 1};
    let records = state.collection::<Document>("rules");
    until("the record says that it has ended", async || records.find_one(ended.clone()).await.unwrap()).await;
    fail(&test, "off", Document::new()).await;
    logs.insert_one(doc! {"_id": 2, "host": 1}).await.unwrap();
    daemon.settled().await;
    assert_eq!(generation().await, before + 1, "it was not asked for again");
    daemon.stop().await;
}

/// An agreement to the removals of a backfill was once lost when the backfill was requested again before its end: it
/// stopped at the removal limit, although the agreement had been given.
#[tokio::test]
async fn an_agreement_to_removals_lasts_until_the_backfill_is_done() {
    let test = denormd_fixture::database().await;
    let rule = "  - { name: r, allow_scan: true, copy: { source: s, target: t, match: { ref: _id }, set: { x: $x } } }";
    let context = crate::support::daemon::context(&crate::support::daemon::config(&test, rule)).await;
    let (server, rule) = (&context.server, &context.plan.rules[0]);
    let store = Store::open(server, &context.dead_letters.database, "default").await.unwrap();
    let stored = async || store.rules(server).await.unwrap().remove(0).1;
    let agreed = RuleState::Backfilling { after: None, in_sources: false, agreed: true };
    let reset = async |state: &RuleState, agreement| store.reset_rule(server, rule, state, agreement).await.unwrap().0;

    // `backfill: manual` with `adopt: true`, then `denormd backfill` twice.
    reset(&RuleState::AwaitingBackfill, Agreement::Given).await;
    for _ in 0..2 {
        assert!(store.ask(server, "r").await.unwrap());
        assert_eq!(stored().await.state, agreed);
    }
    // An event that cannot be read, or a lost position.
    assert_eq!(reset(&RuleState::BACKFILL, Agreement::Kept).await, agreed);
    store.pause(server, "r", None).await.unwrap();
    store.pause(server, "r", Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!(store.resume(server, "r").await.unwrap(), 1);
    assert_eq!(stored().await.state, agreed);
    reset(&RuleState::Unavailable { reason: "an index is missing".to_owned() }, Agreement::Kept).await;
    store.resume_unavailable(server, "r", stored().await.generation).await.unwrap();
    assert_eq!(stored().await.state, agreed);

    // The agreement ends with the backfill, with another source and with another definition.
    let again = async || {
        assert!(store.ask(server, "r").await.unwrap());
        stored().await.state
    };
    let generation = stored().await.generation;
    // A record that keeps nothing gets no half of what is kept: such a record could not be read.
    let passed = bson::Bson::from(5);
    let saved = store.save_backfill(server, rule, generation, (&RuleState::Live, Some(&passed)), (2, None)).await;
    assert!(saved.unwrap());
    assert_eq!(stored().await.keeping, None);
    assert_eq!(again().await, RuleState::BACKFILL);
    reset(&RuleState::BACKFILL, Agreement::Given).await;
    reset(&RuleState::BACKFILL, Agreement::Ended).await;
    assert_eq!(again().await, RuleState::BACKFILL);
    reset(&RuleState::BACKFILL, Agreement::Given).await;
    let mut changed = (**rule).clone();
    changed.definition.insert("changed", true);
    let (state, _) = store.reset_rule(server, &changed, &RuleState::BACKFILL, Agreement::Kept).await.unwrap();
    assert_eq!(state, RuleState::BACKFILL);
    // A block ends it, and `denormd unblock` gives it once more.
    reset(&RuleState::BACKFILL, Agreement::Given).await;
    store.reset_rule(server, rule, &RuleState::Blocked(BlockReason::RemovalLimit), Agreement::Ended).await.unwrap();
    store.pause(server, "r", None).await.unwrap();
    assert_eq!(stored().await.state, RuleState::Blocked(BlockReason::RemovalLimit));
    assert!(store.unblock(server, "r", &BlockReason::RemovalLimit, &rule.definition).await.unwrap());
    assert_eq!(stored().await.state, agreed);
}
