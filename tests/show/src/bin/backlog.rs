//! `make backlog`: the daemon's memory while millions of events wait for it.
//!
//! It is stopped while an application writes `EVENTS` changes, each to another key, so that nothing is coalesced; then
//! it is started, and its memory is measured until all of them are applied. More than `LIMIT_MB` (256) fails. `DENORMD`
//! names the binary; otherwise it is the one in this program's folder.

use std::{
    env, fs,
    io::{Read, Write},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_show::{
    daemon::Daemon,
    host,
    print::{count, heading, rate, time},
};
use mongodb::Database;

/// Documents in one insert.
const BULK: usize = 20_000;
/// Approximate number of lines in the table.
const LINES: usize = 20;
/// Space of one event in the oplog, in bytes, with room for the writes during the run.
const OPLOG_BYTES: usize = 700;

fn number(name: &str, default: usize) -> usize {
    let given = env::var(name).ok().filter(|text| !text.is_empty());
    given.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[tokio::main]
async fn main() {
    let events = number("EVENTS", 10_000_000);
    let limit = f64::from(u32::try_from(number("LIMIT_MB", 256)).expect("fewer megabytes"));
    let oplog = ((events * OPLOG_BYTES) >> 20).max(990);
    let oplog = u32::try_from(oplog).expect("fewer events");
    let set = ReplicaSet::builder().oplog_mb(oplog).cache_gb(1.0).start().await;
    let test = set.database().await;
    let config = config(&test);
    let mut daemon = Daemon::with(&config, &test.uri).reachable();
    daemon.plan_apply();
    daemon.start();
    until_ready(&daemon);
    until_applied(&daemon);
    daemon.stop().await;

    heading("The daemon is stopped; the application writes");
    let begun = Instant::now();
    let written = write(&test.database(), events).await;
    println!("{} changes in {}", count(written), time(begun.elapsed()));

    heading("The daemon is started");
    println!("{:>10}  {:>14}  {:>10}  {:>8}", "after", "events pending", "in queue", "RSS");
    let begun = Instant::now();
    daemon.start();
    until_ready(&daemon);
    let worst = thread::scope(|scope| {
        let waiting = scope.spawn(|| until_applied(&daemon));
        sample(&daemon, written, begun, || waiting.is_finished())
    });
    let took = begun.elapsed();
    println!("drained in {}: {}", time(took), rate(written, took));
    let wrong = wrong(&test.database()).await;
    println!("compared: {} differ", count(wrong));
    println!("at most {worst:.0} MB, {limit} allowed");
    daemon.stop().await;
    fs::remove_file(&config).ok();
    assert_eq!(wrong, 0, "copies differ");
    assert!(worst <= limit, "more memory than allowed");
}

fn config(test: &TestDb) -> std::path::PathBuf {
    let file = env::temp_dir().join(format!("denormd-backlog-{}.yaml", std::process::id()));
    let rules = "rules:\n  - { name: address, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }\n";
    let yaml = format!(
        "mongodb: {{ uri: {:?}, database: {:?} }}\nstate: {{ database: {:?} }}\n{rules}",
        test.uri,
        test.name,
        format!("{}_state", test.name)
    );
    fs::write(&file, yaml).expect("a config");
    file
}

/// Half of the changes insert targets; a quarter inserts their sources, with two targets each; a quarter changes each
/// source once.
async fn write(db: &Database, events: usize) -> usize {
    let hosts = events / 4;
    let id = |n: usize| i64::try_from(n).expect("a number");
    let mut written = 0;
    for (name, documents) in [("logs", hosts * 2), ("hosts", hosts)] {
        let collection = db.collection::<Document>(name);
        for first in (0..documents).step_by(BULK) {
            let document = |n| {
                if name == "logs" {
                    doc! {"_id": id(n), "host": id(n % hosts)}
                } else {
                    doc! {"_id": id(n), "ip": id(n)}
                }
            };
            let some: Vec<Document> = (first..documents.min(first + BULK)).map(document).collect();
            written += some.len();
            collection.insert_many(some).ordered(false).await.expect("inserts");
        }
    }
    let collection = db.collection::<Document>("hosts");
    for first in (0..hosts).step_by(BULK) {
        let some = doc! {"_id": {"$gte": id(first), "$lt": id(first + BULK)}};
        let update = doc! {"$inc": {"ip": 1_i64}};
        let done = collection.update_many(some, update).await.expect("updates");
        written += usize::try_from(done.modified_count).expect("a count");
    }
    written
}

/// Measures memory and depth until it is `done`, and prints some of the values; returns the peak memory in megabytes.
fn sample(daemon: &Daemon, events: usize, begun: Instant, done: impl Fn() -> bool) -> f64 {
    let pid = daemon.pid().expect("a daemon that runs");
    let (mut worst, mut next) = (0.0_f64, events + 1);
    loop {
        let last = done();
        let (memory, most) = host::memory(pid);
        worst = worst.max(most);
        let metrics = get(daemon.address(), "/metrics").unwrap_or_default();
        let pending = events.saturating_sub(events_read(&metrics));
        if pending < next || last {
            let depth = sum(&metrics, |name| name == "denormd_queue_depth");
            println!("{:>10}  {:>14}  {:>10}  {memory:>5.0} MB", time(begun.elapsed()), count(pending), count(depth));
            next = (pending + 1).saturating_sub(events / LINES);
        }
        if last {
            return worst;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Events of the application: the daemon's own writes return as updates of targets.
fn events_read(metrics: &str) -> usize {
    sum(metrics, |name| {
        name.starts_with("denormd_events_total") && !(name.contains(".logs\"") && name.contains("\"update\""))
    })
}

fn sum(metrics: &str, wanted: impl Fn(&str) -> bool) -> usize {
    let values = metrics.lines().filter_map(|line| line.rsplit_once(' ')).filter(|(name, _)| wanted(name));
    values.filter_map(|(_, value)| value.parse::<usize>().ok()).sum()
}

/// Waits until it leads, and then until everything committed is applied, however long that takes.
fn until_applied(daemon: &Daemon) {
    while !get(daemon.address(), "/v1/wait?timeout=30").is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
        thread::sleep(Duration::from_millis(200));
    }
}

fn until_ready(daemon: &Daemon) {
    let limit = Instant::now() + Duration::from_mins(1);
    while !get(daemon.address(), "/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
        assert!(Instant::now() < limit, "denormd does not become ready\n{}", daemon.log_tail());
        thread::sleep(Duration::from_millis(100));
    }
}

fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Number of targets whose copy differs from their source, counted by the server.
async fn wrong(db: &Database) -> usize {
    let pipeline = vec![
        doc! {"$lookup": {"from": "hosts", "localField": "host", "foreignField": "_id", "as": "source"}},
        doc! {"$match": {"$expr": {"$ne": ["$ip", {"$first": "$source.ip"}]}}},
        doc! {"$count": "wrong"},
    ];
    let mut cursor = db.collection::<Document>("logs").aggregate(pipeline).await.expect("a comparison");
    let found = cursor.advance().await.expect("a comparison");
    let count = found.then(|| cursor.deserialize_current().expect("a count").get_i32("wrong").expect("a count"));
    usize::try_from(count.unwrap_or_default()).expect("a count")
}
