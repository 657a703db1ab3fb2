//! The cost of monitoring: CPU seconds of the daemon and of the server under a steady load, in pairs of phases, with
//! and without a Prometheus and an open page; and the cost of the daemon's own requests to the server.
//!
//! To rise above the noise, requests are made up to `FASTER` times as often as in real life. The actual work is
//! counted: the CPU seconds of a phase are compared with those of the same number of changes without requests, and
//! divided by the number of requests.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::host::cpu;

/// Factor by which requests are more frequent than in real life.
const FASTER: u32 = 100;
/// The requests of a browser every two seconds.
const PAGE: [&str; 3] = ["/v1/status", "/v1/history?since=9999999999999", "/v1/events"];
const PAGE_EVERY: Duration = Duration::from_secs(2);
/// The interval in our prometheus.yml.
const SCRAPE_EVERY: Duration = Duration::from_secs(15);
const PHASE: Duration = Duration::from_secs(10);
const PAIRS: u32 = 6;
const CHANGES_PER_SECOND: u32 = 200;

#[tokio::main]
async fn main() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    for host in 0..1000 {
        db.collection("hosts").insert_one(doc! {"_id": host, "ip": "10.0.0.1"}).await.expect("a host");
    }
    let log: Vec<Document> = (0..5000).map(|id| doc! {"_id": id, "host": id % 1000}).collect();
    db.collection("log").insert_many(log).await.expect("the log");
    let server = set.node(0).pid();
    println!(
        "{CHANGES_PER_SECOND} changes a second with 5 targets each; phases of {PHASE:?}; looked at {FASTER} times as often as in real life"
    );

    let idle = cpu_of(server, PHASE).await;
    let asked = questions(&set, server).await;
    println!(
        "the daemon's own questions: {:.4} s of the server's CPU a minute",
        (asked - idle).max(0.0) / f64::from(FASTER) * 60.0 / PHASE.as_secs_f64()
    );

    let (daemon, address) = start(&test.uri, &test.name);
    let stop = Arc::new(AtomicBool::new(false));
    let (changes, looks) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let load = tokio::spawn(change(db, stop.clone(), changes.clone()));
    tokio::time::sleep(Duration::from_secs(5)).await;
    // Without and with requests: CPU seconds of daemon and server, changes, requests.
    let mut sums = [[0.0; 4]; 2];
    for pair in 0..PAIRS {
        // Alternating, so that any drift affects both.
        for polled in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            let looking = Arc::new(AtomicBool::new(polled));
            let lookers = look(address, &looking, &looks);
            let now = || [cpu(daemon.0.id()), cpu(server), count(&changes), count(&looks)];
            let before = now();
            tokio::time::sleep(PHASE).await;
            let after = now();
            let used: Vec<f64> = after.iter().zip(before).map(|(after, before)| after - before).collect();
            looking.store(false, Ordering::Relaxed);
            for looker in lookers {
                looker.join().expect("a looker");
            }
            let how = if polled { "looked at" } else { "left alone" };
            let [daemon, server, changes, looks] = used[..] else { unreachable!("four figures") };
            println!("  {how}: daemon {daemon:.2} s, server {server:.2} s, {changes} changes, {looks} looks");
            for (sum, used) in sums[usize::from(polled)].iter_mut().zip(used) {
                *sum += used;
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    load.await.expect("the load");
    let [alone, looked] = sums;
    // An open page sends requests every two seconds, and Prometheus scrapes every fifteen.
    let minute = 60.0 / PAGE_EVERY.as_secs_f64() + 60.0 / SCRAPE_EVERY.as_secs_f64();
    for (nth, name) in ["daemon", "server"].into_iter().enumerate() {
        let each = (looked[nth] - alone[nth] * looked[2] / alone[2]) / looked[3];
        let load = alone[nth] * 60.0 / (PHASE.as_secs_f64() * f64::from(PAIRS));
        println!(
            "{name}: {:.2} ms a look; a page and a Prometheus add {:.4} s a minute to {load:.2} s, {:.2}%",
            each * 1000.0,
            each * minute,
            100.0 * each * minute / load
        );
    }
}

fn count(counter: &AtomicU64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts of a minute")]
    let count = counter.load(Ordering::Relaxed) as f64;
    count
}

/// A process that ends with the measurement.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn start(uri: &str, database: &str) -> (Daemon, SocketAddr) {
    let beside = std::env::current_exe().expect("the path of this program").with_file_name("denormd");
    let binary = std::env::var_os("DENORMD").map_or(beside, PathBuf::from);
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = free.local_addr().expect("its number");
    drop(free);
    let config = std::env::temp_dir().join(format!("denormd-scrape-{}.yaml", std::process::id()));
    let rules = "rules:\n  - { name: ip, allow_scan: false, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }\n";
    let text = format!(
        "mongodb: {{ uri: {uri:?}, database: {database:?} }}\nstate: {{ database: {:?} }}\nhttp: {{ listen: {:?} }}\n{rules}",
        format!("{database}_state"),
        address.to_string()
    );
    fs::write(&config, text).expect("a config");
    let command = |word: &[&str]| {
        let mut command = Command::new(&binary);
        command
            .args(word)
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    };
    assert!(command(&["plan", "--apply"]).status().expect("denormd starts").success(), "denormd plan --apply");
    let daemon = Daemon(command(&["run"]).spawn().expect("denormd starts"));
    let limit = Instant::now() + Duration::from_mins(1);
    while !get(address, "/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
        assert!(Instant::now() < limit, "denormd does not become ready");
        std::thread::sleep(Duration::from_millis(100));
    }
    fs::remove_file(&config).ok();
    (daemon, address)
}

async fn change(db: mongodb::Database, stop: Arc<AtomicBool>, changes: Arc<AtomicU64>) {
    let hosts = db.collection::<Document>("hosts");
    let mut beat = tokio::time::interval(Duration::from_secs(1) / CHANGES_PER_SECOND);
    let mut nth = 0_i64;
    while !stop.load(Ordering::Relaxed) {
        beat.tick().await;
        nth += 1;
        let update = doc! {"$set": {"ip": format!("10.1.0.{nth}")}};
        hosts.update_one(doc! {"_id": nth % 1000}, update).await.expect("a change");
        changes.fetch_add(1, Ordering::Relaxed);
    }
}

fn look(address: SocketAddr, looking: &Arc<AtomicBool>, looks: &Arc<AtomicU64>) -> Vec<std::thread::JoinHandle<()>> {
    let look_at = |paths: &'static [&'static str], every: Duration| {
        let (looking, looks) = (looking.clone(), looks.clone());
        std::thread::spawn(move || {
            while looking.load(Ordering::Relaxed) {
                for path in paths {
                    assert!(get(address, path).is_some_and(|answer| answer.starts_with("HTTP/1.1 200")), "{path}");
                }
                looks.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(every / FASTER);
            }
        })
    };
    vec![look_at(&PAGE, PAGE_EVERY), look_at(&["/metrics"], SCRAPE_EVERY)]
}

fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// The board's requests to the server, `FASTER` times as often: the CPU seconds of the server for them.
async fn questions(set: &ReplicaSet, server: u32) -> f64 {
    let client = set.client().await;
    let (admin, local, state) = (client.database("admin"), client.database("local"), client.database("scrape_state"));
    let (before, started) = (cpu(server), Instant::now());
    let mut beat = tokio::time::interval(Duration::from_secs(1) / FASTER);
    let mut nth = 0_u32;
    while started.elapsed() < PHASE {
        beat.tick().await;
        admin.run_command(doc! {"hello": 1}).await.expect("hello");
        if nth.is_multiple_of(5) {
            for order in [1, -1] {
                let oplog = local.collection::<Document>("oplog.rs");
                let entry = oplog.find_one(doc! {}).sort(doc! {"$natural": order});
                entry.projection(doc! {"_id": 0, "ts": 1}).await.expect("an entry");
            }
            local.run_command(doc! {"collStats": "oplog.rs"}).await.expect("its size");
            let group = doc! {"$group": {"_id": {"rule": "$rule", "reason": "$reason"}, "count": {"$sum": 1_i64}}};
            state.collection::<Document>("dead_letters").aggregate([group]).await.expect("dead letters");
        }
        if nth.is_multiple_of(10) {
            let update = doc! {"q": {"_id": 1}, "u": {"$currentDate": {"sent": true}}, "upsert": true};
            let canary = doc! {"update": "canaries", "updates": [update], "writeConcern": {"w": "majority"}};
            state.run_command(canary).await.expect("a canary");
            let events = state.collection::<Document>("events");
            events.find(doc! {}).sort(doc! {"$natural": -1}).limit(200).await.expect("events");
        }
        nth += 1;
    }
    cpu(server) - before
}

async fn cpu_of(process: u32, during: Duration) -> f64 {
    let before = cpu(process);
    tokio::time::sleep(during).await;
    cpu(process) - before
}
