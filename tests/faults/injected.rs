//! Faults of servers and daemons, as processes: a short selection of those that lose changes or leave stale values in
//! less careful daemons.
//!
//! After each: stop the writes, compare the copies with their sources, and verify in the oplog that nothing is written.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};

use crate::faults::fault_runs::data;
use crate::support::daemon::{PATIENCE, until};
use crate::support::world::{Daemon, TTL, World};

mod arbiter;
mod flood;
mod restore;
mod window;

/// Time for which the oplog must be silent.
const QUIET: Duration = Duration::from_millis(700);

async fn work(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

fn rounds(default: u64) -> u64 {
    std::env::var("DENORMD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_is_killed_frozen_and_steps_down_while_changes_go_on() {
    let set = ReplicaSet::start(3).await;
    let world = World::new(set.database().await).await;
    let daemon = world.daemon();
    world.at_rest(QUIET).await;

    let writer = world.writer(1);
    work(500).await;
    let old = set.primary().await;
    set.node(old).kill9();
    set.primary().await;
    let writable = Instant::now();
    work(1500).await;
    assert!(writer.stop().await > 0);
    println!(
        "primary killed: right {:?} after the writes, {:?} after the election",
        world.at_rest(QUIET).await,
        writable.elapsed()
    );
    set.node(old).restart().await;
    set.wait_members().await;

    let writer = world.writer(2);
    for _ in 0..rounds(3) {
        work(400).await;
        set.step_down().await;
    }
    work(400).await;
    writer.stop().await;
    println!("step-down storm: right {:?} after the writes", world.at_rest(QUIET).await);

    set.wait_members().await;
    let writer = world.writer(3);
    work(400).await;
    let frozen = set.primary().await;
    set.node(frozen).sigstop();
    let begun = Instant::now();
    while set.primary().await == frozen {
        work(50).await;
    }
    println!("primary frozen: another one after {:?}", begun.elapsed());
    work(1500).await;
    set.node(frozen).sigcont();
    work(500).await;
    writer.stop().await;
    println!("primary frozen: right {:?} after the writes", world.at_rest(QUIET).await);
    daemon.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_killed_goes_on_where_it_was() {
    let world = World::new(denormd_fixture::database().await).await;
    for round in 0..rounds(2) {
        let daemon = world.daemon();
        world.converged().await;
        let writer = world.writer(10 + round);
        work(700).await;
        daemon.kill9();
        let begun = Instant::now();
        let term = world.lease().await.unwrap().get_i64("term").unwrap();
        let daemon = world.daemon();
        world.term_after(term).await;
        println!("killed: leads again after {:?}", begun.elapsed());
        writer.stop().await;
        world.at_rest(QUIET).await;
        daemon.terminate().await;
        assert_eq!(world.lease().await.unwrap().get("owner"), Some(&bson::Bson::Null), "given back");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_at_once_from_one_that_stops() {
    let world = World::new(denormd_fixture::database().await).await;
    // A lease that is given up has no end to wait for.
    world.lease_for(3 * PATIENCE);
    let (mut leader, mut standby) = (world.daemon(), None);
    let (mut term, _) = world.term_after(0).await;
    let writer = world.writer(20);
    for _ in 0..rounds(2) {
        let next: Daemon = standby.take().unwrap_or_else(|| world.daemon());
        work(1000).await;
        leader.terminate().await;
        let begun = Instant::now();
        let (now, process) = world.term_after(term).await;
        println!("handed over after {:?}", begun.elapsed());
        assert_eq!((now, process), (term + 1, next.pid()));
        (leader, term) = (next, now);
    }
    writer.stop().await;
    world.at_rest(QUIET).await;
}

/// A leader that was suspended past the end of its lease continues in the middle of a write. Its data is old, and its
/// successor has written the new value: the deadline in the write prevents the old value.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_wakes_up_late_leaves_no_stale_value() {
    let world = World::new(denormd_fixture::database().await).await;
    let daemons = [world.daemon(), world.daemon()];
    let (mut term, mut process) = world.term_after(0).await;
    let mut worst = Duration::ZERO;
    for round in 0..rounds(3) {
        let writer = world.writer(30 + round);
        work(300 + round * 37 % 200).await;
        let leader = daemons.iter().find(|daemon| daemon.pid() == process).unwrap();
        leader.signal("STOP");
        let begun = Instant::now();
        (term, process) = world.term_after(term).await;
        worst = worst.max(begun.elapsed());
        work(200).await;
        writer.stop().await;
        world.converged().await;
        leader.signal("CONT");
        world.at_rest(QUIET).await;
        assert_ne!(leader.pid(), process);
    }
    println!("a frozen leader was replaced after {worst:?} at worst");
}

/// The same in the worst case: the write hangs in the server until long after the successor has written.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_hangs_in_the_server_leaves_no_stale_value() {
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    let daemons = [world.daemon(), world.daemon()];
    let (mut term, mut process) = world.term_after(0).await;
    world.at_rest(QUIET).await;
    let hosts = world.db.collection::<Document>("hosts");
    let (mut hung, mut round) = (0, 0_u64);
    while hung < rounds(1) {
        round += 1;
        assert!(round <= rounds(1) + 10, "the old write never hangs until its successor has written");
        let hang = doc! {"failCommands": ["update"], "blockConnection": true, "blockTimeMS": 20_000};
        fail(&world.test, doc! {"times": 1}, hang).await;
        let begun = Instant::now();
        hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": format!("old {round}")}}).await.unwrap();
        work(300).await;
        let leader = daemons.iter().find(|daemon| daemon.pid() == process).unwrap();
        leader.signal("STOP");
        hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": format!("new {round}")}}).await.unwrap();
        (term, process) = world.term_after(term).await;
        world.converged().await;
        // A slow machine may take longer.
        hung += u64::from(begun.elapsed() < Duration::from_secs(20));
        tokio::time::sleep_until((begun + Duration::from_secs(21)).into()).await;
        leader.signal("CONT");
        world.at_rest(QUIET).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_five_leads_and_a_deleted_lease_changes_nothing() {
    let world = World::new(denormd_fixture::database().await).await;
    let mut daemons: Vec<Daemon> = (0..5).map(|_| world.daemon()).collect();
    let (mut term, mut process) = world.term_after(0).await;
    // The first leader's term is known from its state, once that exists.
    world.caught_up().await;
    let writer = world.writer(40);
    for fault in ["delete", "kill", "delete"] {
        work(500).await;
        if fault == "delete" {
            let leases = world.test.beside("state").collection::<Document>("leases");
            leases.delete_one(doc! {}).await.unwrap();
        } else {
            let nth = daemons.iter().position(|daemon| daemon.pid() == process).unwrap();
            daemons.remove(nth).kill9();
        }
        let begun = Instant::now();
        (term, process) = world.term_after(term).await;
        println!("{fault}: term {term} after {:?}", begun.elapsed());
    }
    work(500).await;
    writer.stop().await;
    world.at_rest(QUIET).await;
    let leading = |daemon: &&Daemon| {
        let log = daemon.log();
        log.rfind("following changes") > log.rfind("the lease is lost")
    };
    assert_eq!(daemons.iter().filter(leading).count(), 1);
}

/// During a rolling update old and new instances run at the same time. If each of them could lead, a changed rule would
/// alternate between its definitions.
#[tokio::test(flavor = "multi_thread")]
async fn the_newest_rules_lead() {
    let world = World::new(denormd_fixture::database().await).await;
    let more = "  - { name: shout, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { shout: { $concat: [\"!\", { $toString: $ip }] } } } }\n";
    world.write_config("new.yaml", more);
    let old = world.daemon();
    let (term, process) = world.term_after(0).await;
    assert_eq!(process, old.pid());
    let writer = world.writer(70);
    let begun = Instant::now();
    let new = world.daemon_with("new.yaml");
    let (term, process) = world.term_after(term).await;
    assert_eq!(process, new.pid());
    println!("handed over to the new rules after {:?}", begun.elapsed());
    // An old instance that restarts in the middle of the update remains the older one, even when the newer one dies.
    old.kill9();
    let (old, newest) = (world.daemon(), world.daemon_with("new.yaml"));
    let instances = world.test.beside("state").collection::<Document>("instances");
    for daemon in [&old, &newest] {
        let announced = doc! {"process": daemon.pid()};
        until("it is announced", async || instances.find_one(announced.clone()).await.unwrap()).await;
    }
    new.kill9();
    let (term, process) = world.term_after(term).await;
    assert_eq!(process, newest.pid(), "\n{}", old.log());
    // Rolled back: the newer instance stops, and the older one leads.
    newest.terminate().await;
    let (_, process) = world.term_after(term).await;
    assert_eq!(process, old.pid());
    writer.stop().await;
    world.at_rest(QUIET).await;
    old.terminate().await;
    let instances = world.test.beside("state").collection::<Document>("instances");
    let left: u64 = instances.count_documents(doc! {"process": process}).await.unwrap();
    assert_eq!(left, 0, "it has said that it leaves");
}

async fn fail(test: &TestDb, mode: Document, mut data: Document) {
    data.insert("appName", "denormd");
    let command = doc! {"configureFailPoint": "failCommand", "mode": mode, "data": data};
    test.client.database("admin").run_command(command).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_fail_before_and_after_they_are_applied() {
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    let daemon = world.daemon();
    world.at_rest(QUIET).await;
    let lost = doc! {"closeConnection": true};
    let code = |code: i32| doc! {"errorCode": code};
    let concern = |code: i32| doc! {"writeConcernError": {"code": code, "errmsg": "x"}};
    let faults = [
        (vec!["update"], code(10107)),
        (vec!["update"], code(189)),
        (vec!["update"], code(11602)),
        (vec!["update"], lost.clone()),
        (vec!["update"], concern(64)),
        (vec!["update"], concern(91)),
        (vec!["update"], code(13)),
        (vec!["update"], code(2)),
        (vec!["find", "aggregate"], code(11602)),
        (vec!["find", "aggregate"], lost.clone()),
        (vec!["aggregate"], code(2)),
        (vec!["getMore"], code(43)),
        (vec!["getMore"], lost.clone()),
        (vec!["getMore"], code(280)),
        (vec!["getMore", "aggregate"], code(286)),
        (vec!["findAndModify"], code(11602)),
        (vec!["findAndModify"], lost.clone()),
    ];
    for (nth, (commands, fault)) in (0..).zip(faults) {
        let mut data = doc! {"failCommands": &commands};
        data.extend(fault.clone());
        fail(&world.test, doc! {"times": 2}, data).await;
        let writer = world.writer(100 + nth);
        work(600).await;
        writer.stop().await;
        let took = world.converged().await;
        println!("{commands:?} {fault}: right {took:?} after the writes");
    }
    world.at_rest(QUIET).await;
    daemon.terminate().await;
}

/// Writes until the oplog has lost everything that it has now.
async fn roll_over(test: &TestDb) {
    let oplog = test.client.database("local").collection::<Document>("oplog.rs");
    let end_of_oplog = async |end: i32| loop {
        // The first entry may be truncated during the read.
        if let Ok(Some(entry)) = oplog.find_one(doc! {}).sort(doc! {"$natural": end}).await {
            return entry.get_timestamp("ts").unwrap();
        }
    };
    let last = end_of_oplog(-1).await;
    let junk = test.beside("junk").collection::<Document>("junk");
    let begun = Instant::now();
    while end_of_oplog(1).await <= last {
        assert!(begun.elapsed() < PATIENCE, "the oplog does not roll over");
        junk.insert_many((0..4).map(|_| doc! {"x": "x".repeat(1 << 20)})).await.unwrap();
    }
    println!("rolled over after {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oplog_that_no_longer_reaches_back_heals_by_itself() {
    let set = ReplicaSet::builder().oplog_mb(8).arg("--syncdelay").arg("1").start().await;
    let world = World::new(set.database().await).await;
    let daemon = world.daemon();
    world.at_rest(QUIET).await;
    daemon.terminate().await;
    let writer = world.writer(50);
    work(300).await;
    writer.stop().await;
    roll_over(&world.test).await;
    assert!(!world.differences().await.unwrap().is_empty());
    let daemon = world.daemon();
    println!("rollover: right after {:?}", world.at_rest(QUIET).await);
    assert!(daemon.log().contains("no longer reaches back"), "{}", daemon.log());
    let writer = world.writer(51);
    work(300).await;
    writer.stop().await;
    world.at_rest(QUIET).await;
    daemon.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_is_garbage_or_of_another_cluster_is_not_used() {
    // The oplog of the shared set has the writes of all tests.
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    let positions = world.test.beside("state").collection::<Document>("positions");
    let later = bson::Timestamp { time: u32::MAX / 2, increment: 1 };
    for (change, says) in [
        (doc! {"token": {"_data": "garbage"}}, "it is reopened at its time"),
        // A time before the set existed: its oplog is complete, so it is read from the beginning.
        (doc! {"token": {"_data": "8264E1A5B3000000052B0229296E04"}}, ""),
        (doc! {"token": {"x": 1}}, "it is reopened at its time"),
        (doc! {"token": {"_data": 5}}, "it is reopened at its time"),
        (doc! {"cluster": "another"}, "of another cluster"),
        (doc! {"time": later}, "of another cluster"),
    ] {
        let daemon = world.daemon();
        world.converged().await;
        work(1300).await;
        daemon.terminate().await;
        positions.update_many(doc! {}, doc! {"$set": change.clone()}).await.unwrap();
        let writer = world.writer(60);
        work(200).await;
        writer.stop().await;
        let daemon = world.daemon();
        let took = world.at_rest(QUIET).await;
        println!("{change} {says}: right after {took:?}");
        // On a busy machine, nothing may have been written before the daemon leads.
        until("the daemon says what it does", async || daemon.log().contains(says).then_some(())).await;
        daemon.terminate().await;
    }
}

/// Mass deletes by a TTL index, and collections that get the name of a source or a target (`renameCollection` with
/// `dropTarget`). A replaced source blocks its rule until most of its values are found again.
#[tokio::test(flavor = "multi_thread")]
async fn a_ttl_index_deletes_and_collections_are_renamed_over_others() {
    let set = ReplicaSet::builder().param("ttlMonitorSleepSecs", "1").start().await;
    let world = World::new(set.database().await).await;
    let daemon = world.daemon();
    world.at_rest(QUIET).await;
    for fault in ["expired", "hosts", "logs", "expired"] {
        let writer = world.writer(80);
        work(200).await;
        if fault == "hosts" {
            // A rule whose source is replaced goes on only if most of its values are found again: nothing is written
            // until they are.
            writer.stop().await;
            world.converged().await;
            data::rename_over(&world, fault).await;
            world.follows_replaced_hosts(false).await;
        } else {
            if fault == "expired" {
                data::expire(&world).await;
            } else {
                data::rename_over(&world, fault).await;
            }
            work(200).await;
            writer.stop().await;
        }
        println!("{fault}: right {:?} after the writes", world.at_rest(QUIET).await);
    }
    daemon.terminate().await;
}

/// A server without room for it refuses to write state. An instance that takes this for a final refusal ends when it cannot
/// open its state.
#[tokio::test(flavor = "multi_thread")]
async fn the_state_database_alone_has_no_room() {
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    let mut daemon = world.daemon();
    world.at_rest(QUIET).await;
    let refuse = async |collection: &str, mode: bson::Bson| {
        let data = doc! {
            "failCommands": ["update", "insert", "findAndModify", "delete"], "errorCode": 14031,
            "namespace": format!("{}_state.{collection}", world.test.name), "appName": "denormd",
        };
        let command = doc! {"configureFailPoint": "failCommand", "mode": mode, "data": data};
        world.test.client.database("admin").run_command(command).await.unwrap();
    };
    for (nth, collection) in (0..).zip(["positions", "rules", "terms", "leases", "instances", "events"]) {
        refuse(collection, "alwaysOn".into()).await;
        let writer = world.writer(90 + nth);
        work(1000).await;
        // Its successor meets the same.
        daemon.kill9();
        daemon = world.daemon();
        work(TTL.as_millis().try_into().unwrap()).await;
        work(2000).await;
        assert!(!daemon.is_dead(), "{collection}: it ended\n{}", daemon.log());
        refuse(collection, "off".into()).await;
        writer.stop().await;
        println!("{collection}: right {:?} after the writes", world.at_rest(QUIET).await);
    }
    daemon.terminate().await;
}

/// A command that requests a backfill may run twice if its first answer is lost. The second generation was once unknown
/// to the leader: the backfill stopped half-way and was reported as done.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_that_was_asked_for_twice_is_done() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 5}).await.unwrap();
    db.collection("logs").insert_many((0..20_000).map(|n| doc! {"_id": n, "host": 1})).await.unwrap();
    let rules =
        "  - { name: ip, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
    let daemon = crate::support::daemon::Daemon::start(&test, rules).await;
    let states = test.beside("state").collection::<Document>("rules");
    let asked = states.update_one(doc! {"backfill": "pending"}, doc! {"$inc": {"generation": 1_i64}}).await.unwrap();
    assert_eq!(asked.modified_count, 1, "the backfill was done before");
    daemon.settled().await;
    assert_eq!(db.collection::<Document>("logs").count_documents(doc! {"ip": 5}).await.unwrap(), 20_000);
    assert_eq!(states.find_one(doc! {}).await.unwrap().unwrap().get_str("backfill").unwrap(), "done");
    daemon.stop().await;
}
