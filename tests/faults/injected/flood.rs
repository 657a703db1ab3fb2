//! A flood of oplog entries in collections that no rule watches: a stream has to pass each of them.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use serde_json::Value;

use crate::{
    faults::fault_runs::data::{flood, flood_size},
    support::{
        daemon::{PATIENCE, until},
        running::Running,
    },
};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
/// A lease that does not end because the machine is busy.
const LEASE: &str = "lease: { ttl_seconds: 120 }\n";
/// Lag that a status may leave out: probes come once a second, unread changes count from three seconds on, and cluster
/// times are whole seconds.
const UNTOLD: Duration = Duration::from_secs(5);

/// A change of the source: its number, the time before it was sent, and its commit time.
struct Written {
    ip: i32,
    sent: Instant,
    time: (u32, u32),
}

/// The daemon's reports, and the findings.
#[derive(Default)]
struct Seen {
    written: Vec<Written>,
    worst_lag: f64,
    causes: BTreeSet<String>,
    looks: usize,
}

impl Seen {
    async fn write(&mut self, test: &TestDb) {
        let ip = i32::try_from(self.written.len()).unwrap() + 1;
        let sent = Instant::now();
        let command = doc! {"update": "hosts", "updates": [{"q": {}, "u": {"$set": {"ip": ip}}}], "writeConcern": {"w": "majority"}};
        let time = test.database().run_command(command).await.unwrap().get_timestamp("operationTime").unwrap();
        self.written.push(Written { ip, sent, time: (time.time, time.increment) });
    }

    /// Compares the daemon's statements with the copy, which is read after them and may only be newer.
    /// True if the last change is copied and the daemon says that nothing is late.
    async fn look(&mut self, test: &TestDb, running: &Running) -> bool {
        let asked = Instant::now();
        let status: Value = serde_json::from_str(&running.text("/v1/status").await).unwrap();
        let copied = copied(test).await;
        self.looks += 1;
        let causes = status["causes"].as_array().unwrap().iter().map(|cause| cause["cause"].as_str().unwrap());
        self.causes.extend(causes.map(ToOwned::to_owned));
        if let Some(as_of) = status["current"]["as_of"].as_str() {
            let (seconds, increment) = as_of.split_once('.').unwrap();
            let as_of = (seconds.parse().unwrap(), increment.parse().unwrap());
            let least = self.written.iter().filter(|one| one.time <= as_of).map(|one| one.ip).max();
            assert!(Some(copied) >= least, "current as of {as_of:?} without {least:?}: {copied}\n{status:#}");
        }
        let Some(lag) = status["rules"][0]["lag_seconds"].as_f64() else { return false };
        self.worst_lag = self.worst_lag.max(lag);
        let told = Duration::from_secs_f64(lag) + UNTOLD;
        let due = |one: &&Written| asked.saturating_duration_since(one.sent) > told;
        // The commit comes after `sent`: a slow write may be younger than it looks.
        let least = self.written.iter().rev().filter(due).nth(1).map(|one| one.ip);
        assert!(Some(copied) >= least, "a lag of {lag} s, and the copy lacks {least:?}: {copied}\n{status:#}");
        copied == self.written.last().unwrap().ip && status["lag_seconds"] == 0.0 && status["level"] != "critical"
    }

    /// Checks statements until the copy has the last change and nothing is late.
    async fn until_all_is_well(&mut self, test: &TestDb, running: &Running, entries: u64) {
        let limit = Instant::now() + PATIENCE + Duration::from_millis(entries);
        while !self.look(test, running).await {
            assert!(Instant::now() < limit, "it is not well again: {}", running.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

async fn copied(test: &TestDb) -> i32 {
    let log = test.database().collection::<Document>("log");
    log.find_one(doc! {}).await.unwrap().unwrap().get_i32("ip").unwrap_or_default()
}

/// Beside a running daemon, and while it is stopped.
async fn strike(entries: u64, oplog_mb: u32) {
    let set = ReplicaSet::builder().oplog_mb(oplog_mb).cache_gb(0.5).start().await;
    let test = set.database().await;
    test.database().collection("hosts").insert_one(doc! {"_id": 1, "ip": 0}).await.unwrap();
    test.database().collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let mut running = Running::start(&test, RULES, LEASE).await;
    let mut seen = Seen::default();
    seen.write(&test).await;
    seen.until_all_is_well(&test, &running, 0).await;

    let begun = Instant::now();
    let beside = {
        let uri = test.uri.clone();
        let name = test.name.clone();
        tokio::spawn(async move {
            let client = denormd_fixture::client(&uri).await;
            flood(&client, &name, entries).await;
        })
    };
    while !beside.is_finished() {
        seen.write(&test).await;
        seen.look(&test, &running).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    beside.await.unwrap();
    let flooded = begun.elapsed();
    seen.until_all_is_well(&test, &running, entries).await;
    println!(
        "beside a running daemon: {entries} entries in {flooded:?}, all well {:?} later; {} statements, lag at most {:.1} s, causes {:?}",
        begun.elapsed().saturating_sub(flooded),
        seen.looks,
        seen.worst_lag,
        seen.causes
    );

    running.stop();
    flood(&test.client, &test.name, entries).await;
    seen.write(&test).await;
    seen = Seen { written: seen.written, ..Seen::default() };
    let begun = Instant::now();
    running.run().await;
    seen.until_all_is_well(&test, &running, entries).await;
    println!(
        "behind a stopped one: {entries} entries, all well after {:?}; {} statements, lag at most {:.1} s, causes {:?}",
        begun.elapsed(),
        seen.looks,
        seen.worst_lag,
        seen.causes
    );
    let last = seen.written.last().unwrap().time;
    let last = bson::Timestamp { time: last.0, increment: last.1 };
    let positions = test.beside("state").collection::<Document>("positions");
    let passed = doc! {"time": {"$gte": last}};
    until("the checkpoint passes the flood", async || positions.find_one(passed.clone()).await.unwrap()).await;
    assert!(!running.log().contains("no longer reaches back"), "{}", running.log());
    running.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_that_no_rule_watches_is_passed_and_told_truthfully() {
    strike(20_000, 64).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes and some gigabytes: make flood ENTRIES=10000000"]
async fn of_as_many_entries_as_it_is_told() {
    let entries = flood_size(10_000_000);
    // An entry takes some 150 bytes of the oplog, and the flood comes twice.
    strike(entries, u32::try_from(entries / 2000).unwrap().max(64)).await;
}
