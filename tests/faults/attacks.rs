//! Hostile and clumsy clients of the HTTP server, against a daemon that may open 1,024 files. During each attack,
//! `/livez`, `/metrics` and the page answer on another connection, changes are copied, the daemon reconnects to a
//! killed server, and memory stays small. A few seconds each; `make attacks` takes a minute each and measures times.

use std::{
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd::server::client;
use denormd_fixture::{ReplicaSet, TestDb};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};

use crate::support::daemon::PATIENCE;
use crate::support::running::Running;

const RULE: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
/// File descriptors of the daemon.
const FILES: &str = "1024";
/// Limit on the daemon's resident memory, in kB.
const MEMORY: u64 = 128 * 1024;
/// Time for which a client holds a connection without an answer before it opens another one.
const HOLD: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
enum Attack {
    /// 1,100 connections, half of them with half a request line.
    Idle,
    /// 1,000 headers of 390 KB that do not end.
    Headers,
    /// 300 requests for a time that does not come.
    Waits,
    /// One endpoint after the other, as fast as it answers, on 50 connections.
    Flood,
}

/// Duration of each attack, and time limits of an answer and of a copy.
#[derive(Debug, Clone, Copy)]
struct Limits {
    attack: Duration,
    answer: Duration,
    copy: Duration,
    /// Measures times strictly, on a machine without other work. Otherwise a connection that was closed before a client
    /// without processor time could use it is opened again.
    strict: bool,
}

impl Limits {
    fn read() -> Self {
        let seconds = std::env::var("DENORMD_ATTACK_SECONDS").ok().and_then(|text| text.parse().ok());
        let (second, generous) = (Duration::from_secs(1), PATIENCE);
        seconds.map_or(
            Self { attack: Duration::from_secs(3), answer: generous, copy: generous, strict: false },
            |seconds| Self { attack: Duration::from_secs(seconds), answer: second, copy: second, strict: true },
        )
    }
}

struct Target {
    address: SocketAddr,
    child: Child,
    // Keeps the config file.
    _config: Running,
}

impl Target {
    async fn start(test: &TestDb) -> Self {
        let config = Running::prepare(test, RULE, "");
        let (address, file) = (config.address, config.file());
        // As elsewhere, DENORMD names another binary.
        let binary = std::env::var("DENORMD").ok().filter(|path| !path.is_empty());
        let child = Command::new("sh")
            .args(["-c", "ulimit -n $0; exec \"$@\"", FILES])
            .arg(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_denormd").to_owned()))
            .args(["run", "--config"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let target = Self { address, child, _config: config };
        let limit = Instant::now() + PATIENCE;
        while !client::get(address, "/readyz", Duration::from_secs(10)).await.is_ok_and(|answer| answer.ok) {
            assert!(Instant::now() < limit, "it is not ready");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        target
    }

    /// Resident memory, in kB.
    fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches("kB").trim().parse().unwrap()
    }

    async fn looks_well(&self, limits: Limits, attack: Attack) {
        for path in ["/livez", "/metrics", "/"] {
            let begun = Instant::now();
            loop {
                let answered = client::get(self.address, path, limits.answer.saturating_sub(begun.elapsed())).await;
                if answered.as_ref().is_ok_and(|answered| answered.ok) {
                    break;
                }
                let again = !limits.strict && answered.is_err() && begun.elapsed() < limits.answer;
                assert!(again, "{attack:?}: {path} after {:?}: {answered:?}", begun.elapsed());
            }
        }
        let memory = self.memory();
        assert!(memory < MEMORY, "{attack:?}: {memory} kB");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Clients that run until they are dropped. `done` counts their actions, to show that they were active.
fn attack(attack: Attack, address: SocketAddr, done: &Arc<AtomicU64>) -> JoinSet<()> {
    let clients = match attack {
        Attack::Idle => 1100,
        Attack::Headers => 1000,
        Attack::Waits => 300,
        Attack::Flood => 50,
    };
    let mut running = JoinSet::new();
    for number in 0..clients {
        let done = done.clone();
        running.spawn(async move {
            loop {
                // A refused or closed connection is the daemon's correct reaction, and no reason to stop the attack.
                if let Ok(stream) = TcpStream::connect(address).await {
                    client_of(attack, number, stream, &done).await.ok();
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    running
}

async fn client_of(attack: Attack, number: usize, mut stream: TcpStream, done: &AtomicU64) -> std::io::Result<()> {
    let count = || done.fetch_add(1, Ordering::Relaxed);
    let mut buffer = vec![0; 64 << 10];
    match attack {
        Attack::Idle => {
            stream.write_all(if number.is_multiple_of(2) { b"" } else { b"GET /met" }).await?;
            count();
        }
        Attack::Headers => {
            stream.write_all(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ").await?;
            for _ in 0..39 {
                stream.write_all(&[b'a'; 10_000]).await?;
            }
            count();
        }
        Attack::Waits => {
            let request = "GET /v1/wait?timeout=3600&operationTime=4000000000.1 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
            stream.write_all(request.as_bytes()).await?;
            count();
        }
        Attack::Flood => {
            let paths = ["/v1/status", "/metrics", "/", "/v1/history", "/readyz"];
            let path = paths[number % paths.len()];
            let request = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n");
            while stream.write_all(request.as_bytes()).await.is_ok() {
                // The response is ignored: several responses may wait to be read.
                if stream.read(&mut buffer).await? == 0 {
                    break;
                }
                count();
            }
        }
    }
    tokio::time::timeout(HOLD, async { while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {} }).await.ok();
    Ok(())
}

/// Changes the source, waits for the copy, and returns the time that took.
async fn changes_are_copied(db: &mongodb::Database, attack: Attack, number: i64, limit: Duration) -> Duration {
    let ip = format!("{attack:?}-{number}");
    let hosts = db.collection::<Document>("hosts");
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": &ip}}).await.unwrap();
    let begun = Instant::now();
    while db.collection::<Document>("log").find_one(doc! {"_id": 1, "ip": &ip}).await.unwrap().is_none() {
        assert!(begun.elapsed() < limit, "{attack:?}: the change is not copied");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_clients_harm_nobody() {
    let limits = Limits::read();
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "before"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let target = Target::start(&test).await;
    for kind in [Attack::Idle, Attack::Headers, Attack::Waits, Attack::Flood] {
        let done = Arc::new(AtomicU64::new(0));
        let attackers = attack(kind, target.address, &done);
        let (begun, mut number, mut slowest) = (Instant::now(), 0, Duration::ZERO);
        while begun.elapsed() < limits.attack {
            target.looks_well(limits, kind).await;
            slowest = slowest.max(changes_are_copied(&db, kind, number, limits.copy).await);
            number += 1;
        }
        assert!(done.load(Ordering::Relaxed) > 100, "{kind:?} is no attack");
        // New connections to MongoDB need file descriptors.
        set.node(0).kill9();
        target.looks_well(limits, kind).await;
        set.node(0).restart().await;
        set.primary().await;
        changes_are_copied(&db, kind, -1, PATIENCE).await;
        target.looks_well(limits, kind).await;
        println!("{kind:?}: {} done, {} kB, slowest copy {slowest:?}", done.load(Ordering::Relaxed), target.memory());
        drop(attackers);
    }
}
