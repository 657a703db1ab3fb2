//! Read your writes, through failovers: clients write, wait for the commit time of their write at any instance, and read
//! copies. After a wait that was acknowledged for a cluster time T, no read of a copy may lack a change that was committed by
//! T, whoever made it.
//!
//! `make waits MINUTES=10` is the long form.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Document, doc};
use denormd::server::client;
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::position::ClusterTime;
use futures_util::StreamExt;
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;

use crate::{
    engine::fan_outs::slow_writes,
    support::{
        daemon::{Daemon, PATIENCE, until},
        running::Running,
        seeds::from_environment,
    },
};

/// The second rule copies a field that the first one writes; the third one gathers.
const RULES: &str = "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }
  - { name: note, guard: off, copy: { source: log, target: notes, match: { log: _id }, set: { ip: $ip } } }
  - { name: sum, guard: off, aggregate: { source: hosts, target: racks, match: { _id: rack }, set: { newest: { $max: $ip } } } }";
const LEASE: &str = "lease: { ttl_seconds: 3 }\n";
/// Each client writes one host, which one log, one note and one rack follow.
const CLIENTS: i32 = 4;
/// Time that a client gives a wait, in seconds. A failover may take longer: then it is not acknowledged.
const WAIT: u64 = 20;

type Time = (u32, u32);

/// An entry of a history, in the order in which it became known.
#[derive(Debug, Clone, PartialEq)]
enum Entry {
    /// A write of `value` to the source of `key` was acknowledged, committed by `time`.
    Wrote { key: i32, value: i32, time: Time },
    /// A wait was acknowledged: every change that was committed by `time` is in the copies.
    Waited { time: Time },
    /// A read that was sent after the `known` first entries has found `value` in a copy of `key`.
    Read { copy: &'static str, key: i32, value: i32, known: usize },
}

/// The reads of a history that lack a change which an acknowledged wait covers.
fn violations(history: &[Entry]) -> Vec<String> {
    // The latest time for which a wait was acknowledged, after each number of entries.
    let mut covered = vec![None];
    for entry in history {
        let before: Option<Time> = *covered.last().unwrap();
        covered.push(if let Entry::Waited { time } = entry { before.max(Some(*time)) } else { before });
    }
    // A write counts wherever it is in the history: it is committed by its time, whenever its client heard of it.
    let mut written: BTreeMap<i32, BTreeMap<Time, i32>> = BTreeMap::new();
    for entry in history {
        if let Entry::Wrote { key, value, time } = entry {
            written.entry(*key).or_default().insert(*time, *value);
        }
    }
    for values in written.values_mut() {
        let mut newest = 0;
        for value in values.values_mut() {
            newest = newest.max(*value);
            *value = newest;
        }
    }
    let mut found = Vec::new();
    for entry in history {
        let Entry::Read { copy, key, value, known } = entry else { continue };
        let due = covered[*known].and_then(|time| written.get(key)?.range(..=time).next_back());
        if let Some((_, due)) = due.filter(|(_, due)| *due > value) {
            found.push(format!("{copy} of {key} has {value} and lacks {due}, after a wait for {:?}", covered[*known]));
        }
    }
    found
}

/// The history, to which all clients add.
#[derive(Clone, Default)]
struct History(Arc<Mutex<Vec<Entry>>>);

impl History {
    fn add(&self, entry: Entry) {
        self.0.lock().unwrap().push(entry);
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// One client of the application.
struct Client {
    db: Database,
    key: i32,
    instances: [SocketAddr; 2],
    history: History,
    random: StdRng,
}

impl Client {
    /// Writes, waits and reads until `stop`.
    async fn run(mut self, stop: Arc<AtomicBool>) {
        for value in 1.. {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            // A client whose write fails goes on with the next value.
            if let Some(time) = self.write(value).await {
                self.history.add(Entry::Wrote { key: self.key, value, time });
                if self.wait(time).await {
                    self.history.add(Entry::Waited { time });
                }
                self.read().await;
            }
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..30))).await;
        }
    }

    async fn write(&self, value: i32) -> Option<Time> {
        // With `$max`, a write that is executed late after all cannot take a newer value back.
        let update = doc! {"q": {"_id": self.key}, "u": {"$max": {"ip": value}}};
        let command =
            doc! {"update": "hosts", "updates": [update], "writeConcern": {"w": "majority"}, "maxTimeMS": 5000};
        let reply = self.db.run_command(command).await.ok()?;
        if reply.contains_key("writeErrors") || reply.contains_key("writeConcernError") {
            return None;
        }
        let time = reply.get_timestamp("operationTime").ok()?;
        Some((time.time, time.increment))
    }

    /// True if one of the instances acknowledges the wait, for all rules.
    async fn wait(&mut self, (seconds, increment): Time) -> bool {
        let instance = self.instances[self.random.random_range(0..2)];
        let path = format!("/v1/wait?operationTime={seconds}.{increment}&timeout={WAIT}");
        let Ok(answer) = client::get(instance, &path, Duration::from_secs(2 * WAIT)).await else { return false };
        answer.code == 200 && answer.json::<Value>().is_ok_and(|body| body["except"] == serde_json::json!([]))
    }

    /// Reads the copies of any client's host. A linearizable read is not answered by a former primary.
    async fn read(&mut self) {
        let key = self.random.random_range(0..CLIENTS);
        for (copy, field) in [("log", "ip"), ("notes", "ip"), ("racks", "newest")] {
            let known = self.history.len();
            let command = doc! {
                "find": copy, "filter": {"_id": key}, "limit": 1, "readConcern": {"level": "linearizable"}, "maxTimeMS": 5000,
            };
            let Ok(reply) = self.db.run_command(command).await else { continue };
            let batch = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
            let value = batch[0].as_document().unwrap().get_i32(field).unwrap_or_default();
            self.history.add(Entry::Read { copy, key, value, known });
        }
    }
}

async fn documents(test: &TestDb) {
    let db = test.database();
    let keys = || 0..CLIENTS;
    db.collection("hosts").insert_many(keys().map(|key| doc! {"_id": key, "rack": key, "ip": 0})).await.unwrap();
    db.collection("log").insert_many(keys().map(|key| doc! {"_id": key, "host": key})).await.unwrap();
    db.collection("notes").insert_many(keys().map(|key| doc! {"_id": key, "log": key})).await.unwrap();
    db.collection("racks").insert_many(keys().map(|key| doc! {"_id": key})).await.unwrap();
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    InstanceKilled,
    InstanceFrozen,
    PrimaryStepsDown,
    PrimaryKilled,
}

/// Causes a fault and ends it. Half of the time the instance leads.
async fn strike(fault: Fault, set: &ReplicaSet, running: &mut [Running], random: &mut StdRng) {
    let pause = Duration::from_millis(random.random_range(500..5000));
    let instance = &mut running[random.random_range(0..2)];
    match fault {
        Fault::InstanceKilled => {
            instance.kill();
            instance.run().await;
        }
        Fault::InstanceFrozen => {
            instance.signal("STOP");
            tokio::time::sleep(pause).await;
            instance.signal("CONT");
        }
        Fault::PrimaryStepsDown => {
            set.step_down().await;
        }
        Fault::PrimaryKilled => {
            let primary = set.primary().await;
            set.node(primary).kill9();
            set.primary().await;
            set.node(primary).restart().await;
            set.wait_members().await;
        }
    }
}

/// Runs clients through so many rounds of all faults, or for a time, and judges their history.
async fn through_failovers(rounds: Option<usize>, length: Duration, seed: u64) {
    let set = ReplicaSet::start(3).await;
    let test = set.database().await;
    documents(&test).await;
    let mut running = vec![Running::start(&test, RULES, LEASE).await, Running::start(&test, RULES, LEASE).await];
    let instances = [running[0].address, running[1].address];
    let (history, stop) = (History::default(), Arc::new(AtomicBool::new(false)));
    let mut clients = tokio::task::JoinSet::new();
    for key in 0..CLIENTS {
        let random = StdRng::seed_from_u64(seed * 100 + u64::try_from(key).unwrap());
        // A connection of its own: its commands do not carry the times of others.
        let db = denormd_fixture::client(&test.uri).await.database(&test.name);
        let client = Client { db, key, instances, history: history.clone(), random };
        clients.spawn(client.run(stop.clone()));
    }
    let mut random = StdRng::seed_from_u64(seed);
    let begun = tokio::time::Instant::now();
    let mut struck: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0.. {
        if rounds.map_or(begun.elapsed() >= length, |rounds| round >= rounds) {
            break;
        }
        for fault in [Fault::InstanceKilled, Fault::PrimaryStepsDown, Fault::InstanceFrozen, Fault::PrimaryKilled] {
            acknowledged(&history, 5).await;
            strike(fault, &set, &mut running, &mut random).await;
            *struck.entry(format!("{fault:?}")).or_default() += 1;
        }
    }
    acknowledged(&history, 20).await;
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    let history = history.0.lock().unwrap().clone();
    let count = |of: fn(&Entry) -> bool| history.iter().filter(|entry| of(entry)).count();
    let found = violations(&history);
    println!(
        "seed {seed}: {} writes, {} waits, {} reads, {} violations, through {struck:?}",
        count(|entry| matches!(entry, Entry::Wrote { .. })),
        count(|entry| matches!(entry, Entry::Waited { .. })),
        count(|entry| matches!(entry, Entry::Read { .. })),
        found.len()
    );
    assert!(found.is_empty(), "{found:#?}");
}

/// Waits until so many more waits were acknowledged.
async fn acknowledged(history: &History, more: usize) {
    let count = || history.0.lock().unwrap().iter().filter(|entry| matches!(entry, Entry::Waited { .. })).count();
    let (before, limit) = (count(), tokio::time::Instant::now() + PATIENCE);
    while count() < before + more {
        assert!(tokio::time::Instant::now() < limit, "no waits are acknowledged");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_acknowledged_covers_every_change_by_its_time() {
    through_failovers(Some(1), Duration::ZERO, from_environment("DENORMD_SEED").unwrap_or(1)).await;
}

/// The answer to a wait up to now. An instance that is starting, although it is ready to stand by, answers 503.
async fn waited(running: &Running) -> Value {
    let answer = until("this instance knows what is applied", async || {
        let answer = client::get(running.address, "/v1/wait?timeout=60", PATIENCE).await.unwrap();
        (answer.code != 503).then_some(answer)
    })
    .await;
    assert_eq!(answer.code, 200, "{}\n{}", String::from_utf8_lossy(&answer.body), running.log());
    answer.json().unwrap()
}

/// Two instances, each of which leads one of two partitions.
async fn two_leaders(test: &TestDb, rules: &str, divided: &str) -> [Running; 2] {
    let running = [Running::start(test, rules, divided).await, Running::start(test, rules, divided).await];
    let leases = test.beside("state").collection::<Document>("leases");
    until("each instance leads a partition", async || {
        let processes = leases.distinct("process", doc! {"owner": {"$type": "string"}}).await.ok()?;
        (processes.len() == 2).then_some(())
    })
    .await;
    running
}

/// With several instances, a wait went through as many levels as a tree may have, a second or more each: it ran into its
/// timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_over_several_instances_ends_with_the_last_level_that_is_written() {
    const LEVELS: i32 = 6;
    const TREE: &str = "  - { name: path, guard: off, copy: { source: categories, target: categories, match: { parent: _id }, recursive: true,
      set: { path: { $concat: [$path, /, $$target.name] } }, otherwise: { path: $$target.name } } }";
    let test = denormd_fixture::database().await;
    let categories = test.database().collection::<Document>("categories");
    let all = (0..LEVELS).map(|id| doc! {"_id": id, "name": "a", "parent": (id > 0).then_some(id - 1)});
    categories.insert_many(all).await.unwrap();
    let divided = "lease: { ttl_seconds: 3, partitions: 2 }\n";
    let running = two_leaders(&test, TREE, divided).await;
    for round in 0..4 {
        let name = format!("b{round}");
        categories.update_one(doc! {"_id": 0}, doc! {"$set": {"name": &name}}).await.unwrap();
        // 64 levels would take longer, since each one waits for a checkpoint.
        waited(&running[round % 2]).await;
        let last = categories.find_one(doc! {"_id": LEVELS - 1}).await.unwrap().unwrap();
        assert_eq!(last.get_str("path").unwrap(), format!("{name}{}", "/a".repeat(5)), "round {round}");
    }
}

/// A deleted document is a change that other rules follow. A wait took a level that only deletes for the last one.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_covers_what_follows_from_a_delete() {
    const SUMS: &str = "  - { name: sums, guard: off, aggregate: { source: sales, target: { collection: sums, create: true }, match: { _id: item }, set: { n: { $sum: 1 } } } }
  - { name: shown, guard: off, copy: { source: sums, target: items, match: { _id: _id }, set: { n: $n } } }";
    let test = denormd_fixture::database().await;
    let (sales, items) = (test.database().collection("sales"), test.database().collection::<Document>("items"));
    items.insert_one(doc! {"_id": 1}).await.unwrap();
    sales.insert_one(doc! {"_id": 0, "item": 2}).await.unwrap();
    let running = Running::start(&test, SUMS, "").await;
    for round in 1..30 {
        let shown = async || items.find_one(doc! {"_id": 1}).await.unwrap().unwrap().get_i32("n").ok();
        sales.insert_one(doc! {"_id": round, "item": 1}).await.unwrap();
        waited(&running).await;
        assert_eq!(shown().await, Some(1), "round {round}");
        sales.delete_one(doc! {"_id": round}).await.unwrap();
        waited(&running).await;
        assert_eq!(shown().await, None, "round {round}\n{}", running.log());
    }
}

/// A wait also covers a rule that reads documents which another rule deletes. Such a rule did not count as a step of the chain.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_covers_what_follows_from_a_removal() {
    const RULES: &str = "  - { name: host, adopt: true, guard: off, copy: { source: hosts, target: notes, match: { host: _id }, set: { ip: $ip }, on_missing: delete } }
  - { name: shown, guard: off, copy: { source: notes, target: cards, match: { note: _id }, set: { text: $text } } }";
    let test = denormd_fixture::database().await;
    let db = test.database();
    let [hosts, notes, cards] = ["hosts", "notes", "cards"].map(|name| db.collection::<Document>(name));
    hosts.insert_one(doc! {"_id": 0}).await.unwrap();
    notes.insert_one(doc! {"_id": 0, "host": 0, "text": "a"}).await.unwrap();
    cards.insert_one(doc! {"_id": 1}).await.unwrap();
    let running = Running::start(&test, RULES, "").await;
    for round in 1..5 {
        let shown = async || cards.find_one(doc! {"_id": 1}).await.unwrap().unwrap().contains_key("text");
        hosts.insert_one(doc! {"_id": round}).await.unwrap();
        notes.insert_one(doc! {"_id": round, "host": round, "text": "a"}).await.unwrap();
        cards.update_one(doc! {"_id": 1}, doc! {"$set": {"note": round}}).await.unwrap();
        waited(&running).await;
        assert!(shown().await, "round {round}\n{}", running.log());
        hosts.delete_one(doc! {"_id": round}).await.unwrap();
        waited(&running).await;
        assert!(!shown().await, "round {round}\n{}", running.log());
    }
}

const NOTE: &str =
    "  - { name: note, guard: off, copy: { source: log, target: notes, match: { log: _id }, set: { text: $text } } }";
const IP: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// The rules of a new config begin when those of the former one have finished what is in flight. In between, a wait covered
/// them, although the daemon had said that the config is in force.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_covers_the_rules_of_a_config_that_has_just_been_read() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1, "text": "a"}).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": 1, "log": 1}).await.unwrap();
    // For the index that the second rule needs.
    Running::prepare(&test, &format!("{IP}\n{NOTE}"), "");
    let running = Running::start(&test, IP, "").await;
    slow_writes(&test, 1000).await;
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": 2}}).await.unwrap();
    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), text.replace(IP, &format!("{IP}\n{NOTE}"))).unwrap();
    let read = "denormd_config_reloads_total{outcome=\"done\"}";
    until("the new config is read", async || running.metric(read).await.filter(|times| *times > 0.5)).await;
    let mut excepted = 0;
    let covered = async |answer: client::Answer| {
        // The former rules have ended, and the new ones do not run yet.
        if answer.code == 503 {
            return false;
        }
        assert_eq!(answer.code, 200, "{}\n{}", String::from_utf8_lossy(&answer.body), running.log());
        let except = answer.json::<Value>().unwrap()["except"].clone();
        except == serde_json::json!([]) || {
            assert_eq!(except, serde_json::json!(["note"]));
            false
        }
    };
    while !covered(client::get(running.address, "/v1/wait?timeout=120", PATIENCE).await.unwrap()).await {
        excepted += 1;
        let current = running.until_json("it answers", |_| true).await["current"].clone();
        let is_new = running.metric("denormd_backfill_running{rule=\"note\"}").await.is_some();
        let is_excepted = |current: &Value| current["except"].as_array().unwrap().contains(&"note".into());
        assert!(is_new || current.is_null() || is_excepted(&current), "{current}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(excepted > 0, "the new rule ran at once: {}", running.log());
    let note = db.collection::<Document>("notes").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(note.get_str("text").ok(), Some("a"), "{}", running.log());
}

/// A standby whose config is older than the leader's names the rules that the leader runs otherwise, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_excepts_the_rules_that_its_leader_does_not_run() {
    let test = denormd_fixture::database().await;
    test.database().collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    let standby = Running::start(&test, &format!("{IP}\n{NOTE}"), LEASE).await;
    standby.until_json("it leads", |status| status["role"] == "leader").await;
    let except = async || waited(&standby).await["except"].clone();
    assert_eq!(except().await, serde_json::json!([]));
    let leader = Running::start(&test, &IP.replace("ip: $ip", "ip: $name"), LEASE).await;
    leader.until_json("it leads", |status| status["role"] == "leader").await;
    standby.until_json("it has handed over", |status| status["role"] == "standby").await;
    assert_eq!(except().await, serde_json::json!(["ip", "note"]), "{}\n{}", leader.log(), standby.log());
}

/// One partition may run a rule that another one has not registered yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_excepts_a_rule_that_one_partition_does_not_run() {
    let test = denormd_fixture::database().await;
    test.database().collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    let divided = "lease: { ttl_seconds: 3, partitions: 2 }\n";
    let _leaders = two_leaders(&test, IP, divided).await;
    let standby = Running::start(&test, IP, divided).await;
    let except = async || waited(&standby).await["except"].clone();
    assert_eq!(except().await, serde_json::json!([]));
    let rules = test.beside("state").collection::<Document>("rules");
    rules.delete_one(doc! {"_id.rule": "ip"}).await.unwrap();
    assert_eq!(except().await, serde_json::json!(["ip"]), "{}", standby.log());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs for as long as it is told: make waits MINUTES=10"]
async fn for_as_long_as_it_is_told() {
    let minutes: f64 = from_environment("DENORMD_WAIT_MINUTES").unwrap_or(5.0);
    let seed = u64::from(from_environment("DENORMD_SEED").unwrap_or_else(rand::random::<u32>));
    println!("seed {seed}, {minutes} minutes");
    through_failovers(None, Duration::from_secs_f64(minutes * 60.0), seed).await;
}

/// The judge sees what a daemon that acknowledges too early would cause, and nothing else.
#[test]
fn the_judge_of_histories_sees_reads_that_lack_a_change() {
    let wrote = |value, seconds| Entry::Wrote { key: 1, value, time: (seconds, 1) };
    let waited = |seconds| Entry::Waited { time: (seconds, 1) };
    let read = |value, known| Entry::Read { copy: "log", key: 1, value, known };
    let bad = |history: &[Entry]| violations(history).len();
    assert_eq!(bad(&[wrote(1, 10), waited(10), read(1, 2)]), 0);
    assert_eq!(bad(&[wrote(1, 10), waited(10), read(0, 2)]), 1, "the copy lacks it");
    assert_eq!(bad(&[wrote(1, 10), waited(10), read(0, 1)]), 0, "it was read before the wait was acknowledged");
    assert_eq!(bad(&[wrote(1, 10), waited(9), read(0, 2)]), 0, "the wait was for an earlier time");
    assert_eq!(bad(&[waited(10), wrote(1, 10), read(0, 1)]), 1, "another client heard of its write later");
    assert_eq!(bad(&[wrote(1, 10), wrote(2, 11), waited(11), read(1, 3)]), 1, "an older value");
    assert_eq!(bad(&[wrote(1, 10), waited(12), waited(9), read(0, 3)]), 1, "a later wait takes nothing back");
    let other = Entry::Read { copy: "log", key: 2, value: 0, known: 2 };
    assert_eq!(bad(&[wrote(1, 10), waited(10), other]), 0, "the copy of another key");
}

/// More hosts than fit into some batches of the stream, each with a log message.
const MANY: i32 = 12_000;
const COPY: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// Changes all hosts in one transaction; returns its commit time.
async fn change_all(test: &TestDb) -> ClusterTime {
    let mut session = test.client.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_many(doc! {}, doc! {"$set": {"ip": 1}}).session(&mut session).await.unwrap();
    session.commit_transaction().await.unwrap();
    session.operation_time().unwrap().into()
}

/// Waits until the daemon claims to have applied everything up to this time, and returns the number of copies that lack the
/// change.
async fn lacking_at(daemon: &Daemon, db: &Database, time: ClusterTime) -> u64 {
    let snapshot = daemon.progress();
    until("it is applied", async || snapshot.borrow().has_applied(time).then_some(())).await;
    db.collection::<Document>("log").count_documents(doc! {"ip": {"$ne": 1}}).await.unwrap()
}

async fn many_hosts(test: &TestDb) -> (Database, Daemon) {
    let db = test.database();
    db.collection("hosts").insert_many((0..MANY).map(|id| doc! {"_id": id, "ip": 0})).await.unwrap();
    db.collection("log").insert_many((0..MANY).map(|id| doc! {"_id": id, "host": id})).await.unwrap();
    let daemon = Daemon::start(test, COPY).await;
    daemon.settled().await;
    (db, daemon)
}

/// All changes of a transaction have one commit time. A batch of the stream that ended among them once counted as everything
/// up to that time, and a wait was acknowledged while most copies lacked the change.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_covers_the_whole_of_a_transaction() {
    let test = denormd_fixture::database().await;
    let (db, daemon) = many_hosts(&test).await;
    let time = change_all(&test).await;
    assert_eq!(lacking_at(&daemon, &db, time).await, 0, "copies lack a change that was committed by then");
    daemon.stop().await;
}

/// After a restart, or a lost connection, the stream confirms its token before it reads anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_reopened_in_a_transaction_claims_no_more_than_it_has_read() {
    let test = denormd_fixture::database().await;
    let (db, daemon) = many_hosts(&test).await;
    daemon.stop().await;
    let mut stream = db.collection::<Document>("hosts").watch().await.unwrap();
    let time = change_all(&test).await;
    let mut passed = Vec::new();
    for _ in 0..MANY / 2 {
        let event = stream.next().await.unwrap().unwrap();
        passed.push(event.document_key.unwrap().get("_id").cloned().unwrap());
    }
    let token = bson::serialize_to_document(&stream.resume_token().unwrap()).unwrap();
    // As if the daemon had applied and saved the first half.
    let half = doc! {"_id": {"$in": passed}};
    db.collection::<Document>("log").update_many(half, doc! {"$set": {"ip": 1}}).await.unwrap();
    let saved = doc! {"$set": {"token": token, "time": bson::Timestamp::from(time.before())}};
    test.beside("state").collection::<Document>("positions").update_one(doc! {}, saved).await.unwrap();
    let daemon = Daemon::start(&test, COPY).await;
    assert_eq!(lacking_at(&daemon, &db, time).await, 0, "copies lack a change that was committed by then");
    daemon.stop().await;
}
