//! Several daemons share the partitions of a deployment: when daemons start and stop, no change is lost.

use std::time::Duration;

use bson::{DateTime, Document, doc};
use denormd_engine::{
    checkpoint::{
        adoption::{Decision, Decisions},
        requests::RequestedWork,
        rule_record::Agreement,
        store::Store,
    },
    dead_letter::DeadLetters,
    deployment::{identity::Identity, lease::Lease, repartitioning::divide},
};
use denormd_fixture::ReplicaSet;
use denormd_model::{
    partition::Partition,
    rule_state::{Adoption, BlockReason, RuleState},
};
use denormd_mongo::{Server, error::Kind};
use denormd_rules::{
    config::{Format, load_str},
    plan::compile,
};
use futures_util::TryStreamExt;

use crate::support::{daemon::until, world::World};

const QUIET: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread")]
async fn instances_share_the_partitions_whoever_comes_and_goes() {
    let world = World::new(denormd_fixture::database().await).await;
    world.write_divided_config("four.yaml", "", 4);
    let (first, second) = (world.daemon_with("four.yaml"), world.daemon_with("four.yaml"));
    let third = world.daemon_with("four.yaml");
    let writer = world.writer(41);
    world.shared_by(&[&first, &second, &third], 4).await;

    let third_pid = third.pid();
    third.kill9();
    let taken = world.shared_by(&[&first, &second], 4).await;
    let fourth = world.daemon_with("four.yaml");
    let evened = world.shared_by(&[&first, &second, &fourth], 4).await;
    assert!(world.led(4).await.values().all(|pid| *pid != third_pid));

    second.signal("STOP");
    let woken = world.shared_by(&[&first, &fourth], 4).await;
    second.signal("CONT");
    world.shared_by(&[&first, &second, &fourth], 4).await;

    first.terminate().await;
    let handed = world.shared_by(&[&second, &fourth], 4).await;
    println!("taken {taken:?}, evened {evened:?}, woken {woken:?}, handed {handed:?}");
    assert!(writer.stop().await > 10);
    world.at_rest(QUIET).await;
    second.terminate().await;
    fourth.terminate().await;
}

/// Each partition has terms of its own. The leader of one read the state of all for its status, and marked it with its
/// term: the checkpoints of partitions with a lower term were never saved again.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_marks_the_state_of_its_own_partition_alone() {
    let world = World::new(denormd_fixture::database().await).await;
    world.write_divided_config("denormd.yaml", "", 2);
    let (first, second) = (world.daemon(), world.daemon());
    world.shared_by(&[&first, &second], 2).await;
    second.kill9();
    world.shared_by(&[&first], 2).await;
    let third = world.daemon();
    world.shared_by(&[&first, &third], 2).await;
    third.kill9();
    world.shared_by(&[&first], 2).await;
    let fourth = world.daemon();
    world.shared_by(&[&first, &fourth], 2).await;
    let writer = world.writer(46);
    let state = world.test.beside("state");
    let leases: Vec<Document> = state.collection("leases").find(doc! {}).await.unwrap().try_collect().await.unwrap();
    let terms: Vec<i64> = leases.iter().map(|lease| lease.get_i64("term").unwrap()).collect();
    assert!(terms[0] != terms[1], "nothing is tested with equal terms: {terms:?}");
    // A leader looks for retired fields every fifteen seconds.
    let due = DateTime::from_millis(DateTime::now().timestamp_millis() + 20_000);
    until("both checkpoints are saved later, too", async || {
        let saved = doc! {"_id.deployment": {"$regex": "/2$"}, "saved": {"$gt": due}};
        (state.collection::<Document>("positions").count_documents(saved).await.ok()? == 2).then_some(())
    })
    .await;
    for lease in &leases {
        let (id, term) = (lease.get_str("_id").unwrap(), lease.get_i64("term").unwrap());
        for name in ["rules", "positions"] {
            let others = doc! {"_id.deployment": id, "term": {"$ne": term}};
            let others: Vec<Document> = state.collection(name).find(others).await.unwrap().try_collect().await.unwrap();
            assert!(others.is_empty(), "term {term} of {id}: {others:#?}");
        }
    }
    writer.stop().await;
    world.at_rest(QUIET).await;
    first.terminate().await;
    fourth.terminate().await;
}

/// A leader whose state has the mark of a later term can save nothing: it lets its lease expire, and takes over with a later
/// term.
#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_leader_takes_over_with_a_later_term() {
    let world = World::new(denormd_fixture::database().await).await;
    let daemon = world.daemon();
    world.has_seen_tasks().await;
    let state = world.test.beside("state");
    for name in ["rules", "positions"] {
        let mark = doc! {"$set": {"term": 40_i64}};
        state.collection::<Document>(name).update_many(doc! {}, mark).await.unwrap();
    }
    let writer = world.writer(47);
    daemon.says("the state has the mark of a later leader").await;
    let (term, _) = world.term_after(40).await;
    assert_eq!(term, 41);
    until("a position is saved in the new term", async || {
        let saved = state.collection::<Document>("positions").find_one(doc! {"term": term}).await.unwrap()?;
        let marked = state.collection::<Document>("terms").find_one(doc! {"term": term}).await.unwrap()?;
        (saved.get_datetime("saved").unwrap() > marked.get_datetime("since").unwrap()).then_some(())
    })
    .await;
    writer.stop().await;
    world.at_rest(QUIET).await;
    daemon.terminate().await;
}

/// The same if only the records of the rules have a later term: nothing else that the leader saves is refused, and a backfill whose
/// end cannot be saved would stay open for good.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_cannot_save_a_backfill_takes_over_with_a_later_term() {
    let world = World::new(denormd_fixture::database().await).await;
    let daemon = world.daemon();
    world.has_seen_tasks().await;
    let rules = world.test.beside("state").collection::<Document>("rules");
    let asked = doc! {"$set": {"term": 40_i64, "backfill": "pending", "after": []}, "$inc": {"generation": 1_i64}};
    rules.update_many(doc! {}, asked).await.unwrap();
    daemon.says("the state has the mark of a later leader").await;
    until("all backfills are done in the later term", async || {
        let open = rules
            .count_documents(doc! {"$or": [{"term": {"$lt": 41_i64}}, {"backfill": {"$ne": "done"}}]})
            .await
            .ok()?;
        (open == 0).then_some(())
    })
    .await;
    world.at_rest(QUIET).await;
    daemon.terminate().await;
}

/// As with rules, the newest number wins: the old partitions are handed over and converted into the new ones, and
/// finished work is not repeated.
#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_partitions_changes_while_changes_go_on() {
    let world = World::new(denormd_fixture::database().await).await;
    let one = world.daemon();
    let writer = world.writer(42);
    world.has_seen_tasks().await;
    let mut before = vec![one];
    for (file, partitions) in [("three.yaml", 3), ("two.yaml", 2)] {
        world.write_divided_config(file, "", partitions);
        let now = [world.daemon_with(file), world.daemon_with(file)];
        world.shared_by(&[&now[0], &now[1]], partitions).await;
        for old in before.drain(..) {
            old.terminate().await;
        }
        before.extend(now);
    }
    let states = world.test.beside("state");
    for name in ["rules", "positions"] {
        let ids = states.collection::<Document>(name).distinct("_id.deployment", doc! {}).await.unwrap();
        let ids: Vec<&str> = ids.iter().filter_map(bson::Bson::as_str).collect();
        assert_eq!(ids, ["default#0/2", "default#1/2"], "{name}");
    }
    // A completed rule stays complete: only the first start has backfilled.
    let rules: Vec<Document> = states.collection("rules").find(doc! {}).await.unwrap().try_collect().await.unwrap();
    assert!(rules.iter().all(|rule| rule.get_i64("generation").unwrap() == 1), "{rules:#?}");
    assert!(writer.stop().await > 10);
    world.at_rest(QUIET).await;
    // Back to one partition, as before.
    let last = world.daemon();
    for old in before {
        old.terminate().await;
    }
    let writer = world.writer(43);
    last.says("following changes").await;
    writer.stop().await;
    world.at_rest(QUIET).await;
    let format: Document = states.collection("formats").find_one(doc! {"_id": "default"}).await.unwrap().unwrap();
    assert_eq!((format.get_i32("version").unwrap(), format.get("partitions")), (1, None));
    last.terminate().await;
}

/// A leader of the old number may still be writing.
#[tokio::test]
async fn the_number_does_not_change_under_a_leader() {
    let test = denormd_fixture::database().await;
    let (server, name) = (Server::new(test.client.clone()), &test.name);
    let ttl = Duration::from_secs(3);
    assert!(divide(&server, name, "d", 2, ttl).await.unwrap(), "there was nothing before");
    let lease = Lease::new(server.unfenced(), name, "d#1/2", &Identity::of_this_process(), ttl);
    let held = lease.try_lead().await.unwrap().unwrap();
    for _ in 0..3 {
        assert!(!divide(&server, name, "d", 4, ttl).await.unwrap());
    }
    Store::open_partition(&server, name, "d", Partition::all(2).next().unwrap()).await.unwrap();
    held.release().await;
    // A slow server may not have taken the release in time.
    until("the lease is free", async || divide(&server, name, "d", 4, ttl).await.unwrap().then_some(())).await;
    let old = Store::open_partition(&server, name, "d", Partition::all(2).next().unwrap()).await;
    assert_eq!(old.unwrap_err().kind, Kind::Unavailable, "what is left of the old number does not begin");
}

/// Deleting hundreds of thousands of dead letters exceeded the transaction's time limit, so no instance led.
#[tokio::test]
async fn a_change_of_the_number_leaves_very_many_dead_letters_to_the_new_leaders() {
    let test = denormd_fixture::database().await;
    let (server, name) = (Server::new(test.client.clone()), &test.name);
    let ttl = Duration::from_secs(3);
    assert!(divide(&server, name, "d", 2, ttl).await.unwrap());
    let stored = test.database().collection::<Document>("dead_letters");
    let dead_letter = |deployment: &str, partition: &str, key: i32| {
        let id = doc! {"deployment": partition, "rule": "r", "task": "Value", "key": [key], "target": []};
        doc! {"_id": id, "deployment": deployment, "rule": "r"}
    };
    stored.insert_many((0..10_001).map(|key| dead_letter("d", "d#0/2", key))).await.unwrap();
    assert!(divide(&server, name, "d", 3, ttl).await.unwrap());
    assert_eq!(stored.count_documents(doc! {}).await.unwrap(), 10_001);
    let unreadable = doc! {"_id": {"key": 1}, "deployment": "d", "rule": "r"};
    stored.insert_many([dead_letter("d", "d#1/3", 1), dead_letter("other", "other", 1), unreadable]).await.unwrap();
    let rule = "{ name: r, copy: { source: s, target: t, match: { s: _id }, set: { n: $n } } }";
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
    let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
    let of_third = Partition::all(3).next_back().unwrap();
    let dead_letters = DeadLetters { database: name.clone(), deployment: "d".to_owned(), partition: of_third };
    dead_letters.retain(&server, &plan).await.unwrap();
    let left: Vec<Document> = stored.find(doc! {}).await.unwrap().try_collect().await.unwrap();
    assert_eq!(left.len(), 3, "of another partition, of another deployment, and one that cannot be read: {left:?}");
    // Changes back to a number whose dead letters were left behind.
    stored.insert_many((2..1_003).map(|key| dead_letter("d", "d#0/2", key))).await.unwrap();
    assert!(divide(&server, name, "d", 2, ttl).await.unwrap());
    // The dead letter from the time with three partitions may be carried over.
    let left = doc! {"_id.deployment": "d#0/2", "_id.key": {"$ne": 1}};
    assert_eq!(stored.count_documents(left).await.unwrap(), 0, "the new leaders would take them for their own");
}

/// Two instances have read the old number, and the second one repartitions after the first one has finished.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_divided_is_not_divided_again_by_who_comes_late() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let name = test.name.clone();
    let ttl = Duration::from_secs(3);
    let server = Server::new(test.client.clone());
    assert!(divide(&server, &name, "d", 3, ttl).await.unwrap());
    let slow = doc! {"failCommands": ["create"], "appName": "late", "blockConnection": true, "blockTimeMS": 15_000};
    let admin = test.client.database("admin");
    admin.run_command(doc! {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": slow}).await.unwrap();
    let late = Server::new(denormd_fixture::client(&format!("{}&appName=late", set.uri())).await);
    let late = tokio::spawn({
        let name = name.clone();
        async move { divide(&late, &name, "d", 2, ttl).await }
    });
    until("it has read the old number", async || {
        let waits = doc! {"currentOp": true, "$all": true, "appName": "late", "command.create": {"$exists": true}};
        let found = admin.run_command(waits).await.unwrap();
        (!found.get_array("inprog").unwrap().is_empty()).then_some(())
    })
    .await;
    assert!(divide(&server, &name, "d", 2, ttl).await.unwrap());
    let rules = test.database().collection::<Document>("rules");
    let rule = doc! {"_id": {"deployment": "d#0/2", "rule": "r"}, "paused": true};
    rules.insert_one(&rule).await.unwrap();
    let lease = Lease::new(server.unfenced(), &name, "d#0/2", &Identity::of_this_process(), ttl);
    let held = lease.try_lead().await.unwrap().unwrap();
    assert!(!late.await.unwrap().unwrap(), "it looks again");
    assert_eq!(rules.find_one(doc! {}).await.unwrap().unwrap(), rule);
    assert!(divide(&server, &name, "d", 2, ttl).await.unwrap(), "nothing is left to do");
    held.release().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_reach_every_partition() {
    let world = World::new(denormd_fixture::database().await).await;
    world.write_divided_config("denormd.yaml", "", 3);
    let (first, second) = (world.daemon(), world.daemon());
    world.shared_by(&[&first, &second], 3).await;
    world.converged().await;
    let states = world.test.beside("state").collection::<Document>("rules");

    assert!(world.run(&["pause", "address"]).await.success());
    let paused = doc! {"_id.rule": "address", "backfill": "held", "paused": true};
    assert_eq!(states.count_documents(paused).await.unwrap(), 3);
    world.db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$inc": {"ip": 1000}}).await.unwrap();
    assert!(world.run(&["resume", "address"]).await.success());
    world.converged().await;

    // Another writer changes a copy: the check finds it, and sends a request to the owner of the partition.
    world.db.collection::<Document>("logs").update_many(doc! {}, doc! {"$set": {"ip": 5}}).await.unwrap();
    assert_eq!(world.run(&["check"]).await.code(), Some(3));
    world.run(&["check", "--repair"]).await;
    world.converged().await;
    assert!(world.run(&["backfill"]).await.success());
    assert_eq!(states.count_documents(doc! {"backfill": "done"}).await.unwrap(), 6);
    first.terminate().await;
    second.terminate().await;

    // Without a daemon the command leads all partitions.
    world.db.collection::<Document>("logs").update_many(doc! {}, doc! {"$set": {"ip": 6}}).await.unwrap();
    world.run(&["check", "--repair"]).await;
    world.converged().await;
}

/// A command agrees to the reason that the user has seen, in every partition that is stopped for it, and to no other.
#[tokio::test]
async fn an_agreement_holds_for_the_reason_that_was_seen() {
    let test = denormd_fixture::database().await;
    let rule = "  - { name: r, copy: { source: s, target: t, match: { ref: _id }, set: { x: $x } } }";
    let context = crate::support::daemon::context(&crate::support::daemon::config(&test, rule)).await;
    let (server, rule, name) = (&context.server, &context.plan.rules[0], &test.name);
    assert!(divide(server, name, "d", 5, Duration::from_secs(3)).await.unwrap());
    let whole = Store::open(server, name, "d").await.unwrap();
    let adoption: Adoption = Adoption { overwrites: 7, total: 7, ..Adoption::default() };
    let states = [
        RuleState::Blocked(BlockReason::Adoption(adoption.clone())),
        RuleState::Blocked(BlockReason::RemovalLimit),
        RuleState::Blocked(BlockReason::SourceGone),
        RuleState::Paused { until: None, blocked: None },
        RuleState::Live,
    ];
    for (partition, state) in Partition::all(5).zip(&states) {
        let store = Store::open_partition(server, name, "d", partition).await.unwrap();
        store.reset_rule(server, rule, state, Agreement::Ended).await.unwrap();
    }
    let now = async || -> Vec<RuleState> {
        let mut records = whole.of_each_partition(server, "r").await.unwrap();
        records.sort_by(|(one, _), (other, _)| one.cmp(other));
        records.into_iter().map(|(_, record)| record.state).collect()
    };
    let agreed = RuleState::Backfilling { after: None, in_sources: false, agreed: true };

    // A backfill runs where nothing is stopped.
    assert!(whole.ask(server, "r").await.unwrap());
    let mut expected = states.to_vec();
    expected[4] = RuleState::BACKFILL;
    assert_eq!(now().await, expected);
    assert!(whole.unblock(server, "r", &BlockReason::SourceGone, &rule.definition).await.unwrap());
    expected[2] = agreed.clone();
    assert_eq!(now().await, expected, "a leader that has found the source again is left alone");
    let reason = BlockReason::Adoption(adoption);
    assert!(!whole.unblock(server, "r", &reason, &doc! {"another": "definition"}).await.unwrap());
    assert!(whole.unblock(server, "r", &reason, &rule.definition).await.unwrap());
    expected[0] = agreed.clone();
    assert_eq!(now().await, expected, "not the loss of values that nobody has seen, and not the pause");
    assert!(whole.unblock(server, "r", &BlockReason::RemovalLimit, &rule.definition).await.unwrap());
    assert!(!whole.unblock(server, "r", &BlockReason::RemovalLimit, &rule.definition).await.unwrap());
    expected[1] = agreed;
    assert_eq!(now().await, expected);
}

/// A rule that is blocked in one partition once ran on in the others, whatever `denormd pause` said. And partitions that
/// register a rule after somebody has agreed to its first backfill asked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_and_an_agreement_reach_partitions_in_other_states() {
    let test = denormd_fixture::database().await;
    let rule = "  - { name: r, copy: { source: s, target: t, match: { ref: _id }, set: { x: $x } } }";
    let context = crate::support::daemon::context(&crate::support::daemon::config(&test, rule)).await;
    let (server, rule, name) = (&context.server, &context.plan.rules[0], &test.name);
    assert!(divide(server, name, "d", 3, Duration::from_secs(3)).await.unwrap());
    let whole = Store::open(server, name, "d").await.unwrap();
    let adoption = Adoption { overwrites: 7, total: 7, ..Adoption::default() };
    let blocked = RuleState::Blocked(BlockReason::Adoption(adoption.clone()));
    for (partition, state) in Partition::all(3).zip([&blocked, &RuleState::Live]) {
        let store = Store::open_partition(server, name, "d", partition).await.unwrap();
        store.reset_rule(server, rule, state, Agreement::Ended).await.unwrap();
    }
    whole.pause(server, "r", None).await.unwrap();
    let states = whole.of_each_partition(server, "r").await.unwrap();
    let states: Vec<&str> = states.iter().map(|(_, record)| record.state.name()).collect();
    assert_eq!(states, ["blocked", "paused"]);

    let decisions = Decisions { server, database: name, deployment: "d" };
    let block = Decision { definition: rule.definition.clone(), earlier: None, block: Some(adoption.clone()) };
    decisions.decide("r", block.clone()).await.unwrap();
    assert!(whole.unblock(server, "r", &BlockReason::Adoption(adoption), &rule.definition).await.unwrap());
    assert_eq!(decisions.decide("r", block).await.unwrap().block, None, "the third partition need not ask");
}

/// Another definition divides the targets otherwise: a partition that still ran the former one wrote over what the new backfill
/// had written, and nobody looked again.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_begins_when_every_partition_runs_the_rule() {
    let world = World::new(denormd_fixture::database().await).await;
    world.write_divided_config("denormd.yaml", "", 2);
    let daemon = world.daemon();
    world.shared_by(&[&daemon], 2).await;
    world.converged().await;
    daemon.terminate().await;
    // Somebody else leads the second partition, and does not know the rule.
    let leases = world.test.beside("state").collection::<Document>("leases");
    let held = doc! {"$set": {"owner": "another", "until": DateTime::from_millis(DateTime::now().timestamp_millis() + 3_600_000)}};
    let second = doc! {"_id": {"$regex": "#1/2$"}};
    assert_eq!(leases.update_one(second.clone(), held).await.unwrap().modified_count, 1);
    let rule =
        "\n  - { name: later, copy: { source: hosts, target: logs, match: { host: _id }, set: { later: $ip } } }";
    world.write_divided_config("denormd.yaml", rule, 2);
    let daemon = world.daemon();
    daemon.says("the backfill begins once all partitions run this definition of the rule").await;
    let rules = world.test.beside("state").collection::<Document>("rules");
    let ended = doc! {"_id.rule": "later", "backfill": "done"};
    assert_eq!(rules.count_documents(ended.clone()).await.unwrap(), 0);
    leases.update_one(second, doc! {"$set": {"until": DateTime::now()}}).await.unwrap();
    until("both partitions are backfilled", async || {
        (rules.count_documents(ended.clone()).await.unwrap() == 2).then_some(())
    })
    .await;
    daemon.terminate().await;
}

/// `denormd pause` writes to the partitions that have registered the rule.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_registers_a_rule_later_finds_it_paused() {
    for has_left in [false, true] {
        finds_it_paused(has_left).await;
    }
}

async fn finds_it_paused(has_left: bool) {
    let world = World::new(denormd_fixture::database().await).await;
    world.write_divided_config("denormd.yaml", "", 2);
    let daemon = world.daemon();
    world.shared_by(&[&daemon], 2).await;
    world.converged().await;
    assert!(world.run(&["pause", "address", "--for", "1h"]).await.success());
    daemon.terminate().await;
    let rules = world.test.beside("state").collection::<Document>("rules");
    let one = doc! {"_id.rule": "address", "_id.deployment": {"$regex": "#1/2$"}};
    if has_left {
        // A rule that returns to the config is registered again, as if it had no record.
        let update = doc! {"$set": {"backfill": "absent", "paused": false}, "$unset": {"until": ""}};
        assert_eq!(rules.update_one(one, update).await.unwrap().modified_count, 1);
    } else {
        assert_eq!(rules.delete_one(one).await.unwrap().deleted_count, 1);
    }

    world.db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$inc": {"ip": 1000}}).await.unwrap();
    // A start that was interrupted just after it had registered the rule once left it running.
    world.daemon_that_dies("rule-registered", 1).has_died("rule-registered").await;
    let daemon = world.daemon();
    world.shared_by(&[&daemon], 2).await;
    until("it is registered again, and paused for the same time", async || {
        let all: Vec<Document> = rules.find(doc! {"_id.rule": "address"}).await.ok()?.try_collect().await.ok()?;
        let ends: Vec<_> = all.iter().map(|rule| rule.get_datetime("until").ok()).collect();
        (ends.len() == 2 && ends[0].is_some() && ends[0] == ends[1]).then_some(())
    })
    .await;
    assert!(world.run(&["resume", "address"]).await.success());
    world.converged().await;
    daemon.terminate().await;
}

/// A leader that refuses a request answers for all: the others once waited for it, for as long as the command was gone.
#[tokio::test]
async fn a_request_that_one_partition_refuses_keeps_none_waiting() {
    let test = denormd_fixture::database().await;
    let (server, name) = (Server::new(test.client.clone()), &test.name);
    assert!(divide(&server, name, "d", 3, Duration::from_secs(3)).await.unwrap());
    let whole = Store::open(&server, name, "d").await.unwrap();
    let asked = whole.request(&server, "r", &RequestedWork::Undo).await.unwrap();
    let stores: Vec<Store> = Partition::all(3).map(|partition| whole.clone().of(&[partition])).collect();
    let open = async |nth: usize| stores[nth].requests(&server, &[]).await.unwrap();
    assert!(!whole.is_done(&server, asked).await.unwrap());
    stores[1].refuse_request(&server, open(1).await[0].id, "it is running").await.unwrap();
    for nth in 0..3 {
        assert_eq!(open(nth).await, [], "partition {nth}");
    }
    let error = whole.is_done(&server, asked).await.unwrap_err();
    assert_eq!(error.message, "the leader refuses this: it is running");
}
