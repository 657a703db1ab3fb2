//! A small application with real daemon processes: its writes, the expected copies, and the oplog as evidence.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, Document, doc};
use denormd_fixture::TestDb;
use denormd_model::namespace::Namespace;
use denormd_mongo::Server;
use futures_util::TryStreamExt;
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::daemon::{PATIENCE, databases, shard};

const HOSTS: i32 = 12;
const LOGS: i32 = 120;
const PERSONS: i32 = 12;
/// Shorter than in production, so that tests need not wait.
pub const TTL: Duration = Duration::from_secs(3);

/// Without a guard: the audit would soon repair the damage of a fault.
const RULES: &str = "
  - { name: address, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }
  - { name: tasks, guard: off, collect: { source: tasks, target: persons, match: { _id: owner }, into: tasks, element: $_id, sort: { due: 1 } } }
";

pub struct World {
    pub test: TestDb,
    pub db: Database,
    folder: tempfile::TempDir,
    daemons: AtomicU64,
}

/// A daemon process. It ends with the value.
pub struct Daemon {
    child: Child,
    log: PathBuf,
    /// The program that it runs.
    pub program: PathBuf,
}

/// The application's writer.
pub struct Writer {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

impl World {
    /// Documents without copies, and everything that the rules need on the cluster.
    pub async fn new(test: TestDb) -> Self {
        let db = test.database();
        let folder = tempfile::tempdir().unwrap();
        let world = Self { test, db, folder, daemons: AtomicU64::new(0) };
        let hosts = (0..HOSTS).map(|n| doc! {"_id": n, "ip": n});
        world.db.collection("hosts").insert_many(hosts).await.unwrap();
        let logs = (0..LOGS).map(|n| doc! {"_id": n, "host": n % HOSTS});
        world.db.collection("logs").insert_many(logs).await.unwrap();
        world.db.collection("persons").insert_many((0..PERSONS).map(|n| doc! {"_id": n})).await.unwrap();
        world.write_config("denormd.yaml", "");
        // No index is created on a collection that does not exist.
        world.db.create_collection("tasks").await.unwrap();
        let applied = world.command(&["plan", "--apply"], "denormd.yaml").stdout(Stdio::null()).status().unwrap();
        assert!(applied.success());
        let server = Server::new(world.test.client.clone());
        for collection in ["hosts", "logs", "persons", "tasks"] {
            let (database, collection) = (world.test.name.clone(), collection.to_owned());
            shard(&server, &Namespace { database, collection }).await;
        }
        world
    }

    /// Writes a config file with the rules of this world and others.
    pub fn write_config(&self, file: &str, more_rules: &str) {
        self.write_divided_config(file, more_rules, 1);
    }

    /// Sets the duration of leases, for daemons started from now on.
    pub fn lease_for(&self, ttl: Duration) {
        let file = self.folder.path().join("denormd.yaml");
        let config = std::fs::read_to_string(&file).unwrap();
        let [old, new] = [TTL, ttl].map(|ttl| format!("ttl_seconds: {}", ttl.as_secs()));
        std::fs::write(file, config.replace(&old, &new)).unwrap();
    }

    /// Writes a config file for a deployment with this number of partitions.
    pub fn write_divided_config(&self, file: &str, more_rules: &str, partitions: u32) {
        let config = format!(
            "{}lease: {{ ttl_seconds: {}, partitions: {partitions} }}\nlimits: {{ destroy_per_hour: 1000000 }}\nhttp: {{ listen: \"127.0.0.1:0\" }}\nrules:{RULES}{more_rules}",
            databases(&self.test),
            TTL.as_secs()
        );
        std::fs::write(self.folder.path().join(file), config).unwrap();
    }

    fn command(&self, arguments: &[&str], config: &str) -> Command {
        self.command_of(Path::new(env!("CARGO_BIN_EXE_denormd")), arguments, config)
    }

    fn command_of(&self, program: &Path, arguments: &[&str], config: &str) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).arg("--config").arg(self.folder.path().join(config));
        command
    }

    /// Starts another daemon.
    pub fn daemon(&self) -> Daemon {
        self.daemon_with("denormd.yaml")
    }

    /// Starts another daemon with the config file of this name.
    pub fn daemon_with(&self, config: &str) -> Daemon {
        self.spawn(self.command(&["run"], config))
    }

    /// Starts a daemon of another release.
    pub fn daemon_of(&self, program: &Path) -> Daemon {
        self.spawn(self.command_of(program, &["run"], "denormd.yaml"))
    }

    fn spawn(&self, mut command: Command) -> Daemon {
        let nth = self.daemons.fetch_add(1, Ordering::Relaxed);
        let log = self.folder.path().join(format!("daemon{nth}.log"));
        let file = File::create(&log).unwrap();
        let child = command.stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        Daemon { child, log, program: command.get_program().into() }
    }

    /// Starts a daemon that crashes when it reaches `place` for the `nth` time.
    pub fn daemon_that_dies(&self, place: &str, nth: u32) -> Daemon {
        let mut command = self.command(&["run"], "denormd.yaml");
        command.env("DENORMD_CRASH", format!("{place}:{nth}"));
        self.spawn(command)
    }

    /// Starts a daemon whose wall clock libfaketime reads from a file; elapsed time is real.
    pub fn daemon_by_clock(&self, library: &Path, clock: &Path) -> Daemon {
        let mut command = self.command(&["run"], "denormd.yaml");
        command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", clock);
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        self.spawn(command)
    }

    /// Runs a command to its end.
    pub async fn run(&self, arguments: &[&str]) -> std::process::ExitStatus {
        self.run_of(Path::new(env!("CARGO_BIN_EXE_denormd")), arguments).await
    }

    /// Runs a command of another release to its end.
    pub async fn run_of(&self, program: &Path, arguments: &[&str]) -> std::process::ExitStatus {
        let mut command = self.command_of(program, arguments, "denormd.yaml");
        let mut child = command.stdout(Stdio::null()).spawn().unwrap();
        tokio::task::spawn_blocking(move || child.wait().unwrap()).await.unwrap()
    }

    /// Waits until a daemon that follows changes has recorded that there are tasks.
    pub async fn has_seen_tasks(&self) {
        let rules = self.test.beside("state").collection::<Document>("rules");
        let seen = doc! {"_id.rule": "tasks", "source_seen": true};
        let begun = Instant::now();
        while rules.find_one(seen.clone()).await.unwrap().is_none() || !self.logs().contains("following changes") {
            assert!(begun.elapsed() < PATIENCE, "it does not follow changes\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the rule of the hosts follows the collection that now has this name: a leader has noticed that it was
    /// replaced, has compared the values, and backfills. With `agree`, an operator agrees to values that get lost.
    pub async fn follows_replaced_hosts(&self, agree: bool) {
        let hosts = self.db.list_collections().filter(doc! {"name": "hosts"}).await.unwrap().try_next().await;
        let uuid = hosts.unwrap().unwrap().info.uuid.unwrap();
        let rules = self.test.beside("state").collection::<Document>("rules");
        let follows = doc! {"_id.rule": "address", "source_uuid": uuid};
        let begun = Instant::now();
        // An election may interrupt a read.
        while !matches!(rules.find_one(follows.clone()).await, Ok(Some(_))) {
            if begun.elapsed() > PATIENCE {
                let record = rules.find_one(doc! {"_id.rule": "address"}).await;
                panic!("the replaced source is not followed: not {follows}, but {record:?}\n{}", self.logs());
            }
            if agree && self.logs().contains("the rule stays blocked") {
                self.run(&["unblock", "address"]).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the saved position has passed everything committed so far.
    pub async fn caught_up(&self) {
        let reply = self.db.run_command(doc! {"ping": 1}).await.unwrap();
        let now = reply.get_timestamp("operationTime").unwrap();
        let positions = self.test.beside("state").collection::<Document>("positions");
        let begun = Instant::now();
        while positions.find_one(doc! {"time": {"$gte": now}}).await.unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the position stays behind\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Starts to write like an application, until stopped. Failed writes are not retried.
    pub fn writer(&self, seed: u64) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let (db, stopped) = (self.db.clone(), stop.clone());
        let task = tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed);
            let mut done = 0;
            while !stopped.load(Ordering::Relaxed) {
                done += u64::from(write(&db, &mut random).await.is_ok());
                tokio::time::sleep(Duration::from_millis(random.random_range(0..4))).await;
            }
            done
        });
        Writer { stop, task }
    }

    /// The copies that differ from their sources.
    pub async fn differences(&self) -> mongodb::error::Result<Vec<String>> {
        let hosts: BTreeMap<i32, Bson> =
            self.read("hosts").await?.iter().map(|doc| (id(doc), doc.get("ip").cloned().unwrap())).collect();
        let mut found = Vec::new();
        for log in self.read("logs").await? {
            let expected = log.get_i32("host").ok().and_then(|host| hosts.get(&host));
            if log.get("ip") != expected {
                found.push(format!("{log} should have {expected:?}"));
            }
        }
        let mut tasks = self.read("tasks").await?;
        tasks.sort_by_key(|task| (task.get_i32("due").unwrap(), id(task)));
        for person in self.read("persons").await? {
            let mine = tasks.iter().filter(|task| task.get("owner") == person.get("_id"));
            let expected: Vec<Bson> = mine.map(|task| Bson::Int32(id(task))).collect();
            if person.get_array("tasks").ok() != Some(&expected) {
                found.push(format!("{person} should have {expected:?}"));
            }
        }
        Ok(found)
    }

    async fn read(&self, name: &str) -> mongodb::error::Result<Vec<Document>> {
        self.db.collection(name).find(doc! {}).await?.try_collect().await
    }

    /// Waits until every copy is correct, and returns the time that took.
    pub async fn converged(&self) -> Duration {
        let begun = Instant::now();
        loop {
            let found = self.differences().await;
            match found {
                Ok(found) if found.is_empty() => return begun.elapsed(),
                Ok(found) if begun.elapsed() >= PATIENCE => {
                    panic!("still wrong: {found:#?}\n{}\n{}", self.written(&found).await, self.logs());
                }
                found => assert!(begun.elapsed() < PATIENCE, "cannot be read: {found:#?}\n{}", self.logs()),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The last entries of the oplog about these targets.
    async fn written(&self, found: &[String]) -> String {
        let oplog = self.test.client.database("local").collection::<Document>("oplog.rs");
        let targets = [format!("{}.logs", self.test.name), format!("{}.persons", self.test.name)];
        let mut entries = String::new();
        for line in found.iter().take(3) {
            let number =
                line.split_once("\"_id\": ").and_then(|(_, rest)| rest.split(',').next()?.trim().parse::<i32>().ok());
            let about = doc! {"ns": {"$in": targets.to_vec()}, "$or": [{"o2._id": number}, {"o._id": number}]};
            let last = oplog.find(about).sort(doc! {"$natural": -1}).limit(20).await.unwrap();
            for entry in last.try_collect::<Vec<_>>().await.unwrap() {
                entries.push_str(&format!("{entry}\n"));
            }
        }
        entries
    }

    /// Waits until everything has converged, and then verifies that nothing is written for a time.
    pub async fn at_rest(&self, quiet: Duration) -> Duration {
        let took = self.converged().await;
        let begun = Instant::now();
        let oplog = self.test.client.database("local").collection::<Document>("oplog.rs");
        let targets = [format!("{}.logs", self.test.name), format!("{}.persons", self.test.name)];
        loop {
            let last = oplog.find_one(doc! {}).sort(doc! {"$natural": -1}).await.unwrap().unwrap();
            tokio::time::sleep(quiet).await;
            let since = doc! {"ts": {"$gt": last.get("ts").unwrap()}, "ns": {"$in": targets.to_vec()}};
            // The last writes may be visible before they are acknowledged.
            let Some(written) = oplog.find_one(since).await.unwrap() else { break };
            assert!(begun.elapsed() < PATIENCE, "written at rest: {written}\n{}", self.logs());
        }
        assert_eq!(self.differences().await.unwrap(), Vec::<String>::new(), "{}", self.logs());
        took
    }

    /// The leases' document.
    pub async fn lease(&self) -> Option<Document> {
        self.test.beside("state").collection("leases").find_one(doc! {}).await.ok()?
    }

    /// Waits until a term after `term` has begun; returns it with the process id of the leader.
    pub async fn term_after(&self, term: i64) -> (i64, i64) {
        let begun = Instant::now();
        loop {
            if let Some(lease) = self.lease().await {
                let now = lease.get_i64("term").unwrap();
                if now > term && lease.get_str("owner").is_ok() {
                    return (now, lease.get_i64("process").unwrap());
                }
            }
            assert!(begun.elapsed() < PATIENCE, "nobody leads\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The places of the partitions that have a leader, each with the leader's process id.
    pub async fn led(&self, partitions: u32) -> BTreeMap<String, i64> {
        let leases = self.test.beside("state").collection::<Document>("leases");
        let held = doc! {
            "_id": {"$regex": format!("#[0-9]+/{partitions}$")}, "owner": {"$type": "string"},
            "$expr": {"$gt": ["$until", "$$NOW"]},
        };
        let held: Vec<Document> = leases.find(held).await.unwrap().try_collect().await.unwrap();
        let read = |lease: &Document| (lease.get_str("_id").unwrap().to_owned(), lease.get_i64("process").unwrap());
        held.iter().map(read).collect()
    }

    /// Waits until these daemons lead all partitions, with numbers that differ by one at most. Returns the time that
    /// took.
    pub async fn shared_by(&self, daemons: &[&Daemon], partitions: u32) -> Duration {
        let begun = Instant::now();
        loop {
            let led = self.led(partitions).await;
            let of = |daemon: &&Daemon| led.values().filter(|process| **process == daemon.pid()).count();
            let counts: Vec<usize> = daemons.iter().map(of).collect();
            let all = counts.iter().sum::<usize>() == usize::try_from(partitions).unwrap();
            if all && counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1 {
                return begun.elapsed();
            }
            assert!(begun.elapsed() < PATIENCE, "{led:?} of {counts:?}\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn logs(&self) -> String {
        let logs = (0..self.daemons.load(Ordering::Relaxed)).map(|nth| {
            let log = std::fs::read_to_string(self.folder.path().join(format!("daemon{nth}.log"))).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            format!("--- daemon {nth}\n{}\n", lines[lines.len().saturating_sub(15)..].join("\n"))
        });
        logs.collect()
    }
}

fn id(doc: &Document) -> i32 {
    doc.get_i32("_id").unwrap()
}

async fn write(db: &Database, random: &mut StdRng) -> mongodb::error::Result<()> {
    let (hosts, logs) = (db.collection::<Document>("hosts"), db.collection::<Document>("logs"));
    let tasks = db.collection::<Document>("tasks");
    let (host, log) = (random.random_range(0..HOSTS), random.random_range(0..LOGS));
    let (task, owner) = (random.random_range(0..60), random.random_range(0..PERSONS));
    let number: i32 = random.random_range(0..1_000_000);
    match random.random_range(0..12) {
        0..4 => hosts.update_one(doc! {"_id": host}, doc! {"$set": {"ip": number}}).upsert(true).await.map(drop),
        4 => hosts.delete_one(doc! {"_id": host}).await.map(drop),
        5..7 => logs.update_one(doc! {"_id": log}, doc! {"$set": {"host": host}}).upsert(true).await.map(drop),
        7 => logs.delete_one(doc! {"_id": log}).await.map(drop),
        8..11 => {
            let update = doc! {"$set": {"owner": owner, "due": number % 10}};
            tasks.update_one(doc! {"_id": task}, update).upsert(true).await.map(drop)
        }
        _ => tasks.delete_one(doc! {"_id": task}).await.map(drop),
    }
}

impl Writer {
    /// Stops; returns the number of acknowledged writes.
    pub async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

impl Daemon {
    pub fn pid(&self) -> i64 {
        i64::from(self.child.id())
    }

    /// Sends a signal: `STOP`, `CONT`, `TERM`.
    pub fn signal(&self, name: &str) {
        assert!(
            Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap().success()
        );
    }

    /// Ends it like a crash.
    pub fn kill9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it has logged `text`.
    pub async fn says(&self, text: &str) {
        let begun = Instant::now();
        while !self.log().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "it does not say {text:?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// True if it has ended.
    pub fn is_dead(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has crashed by itself, at the expected place.
    pub async fn has_died(&mut self, place: &str) {
        let begun = Instant::now();
        while !self.is_dead() {
            assert!(begun.elapsed() < PATIENCE, "it does not come to `{place}`\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(self.log().contains("aborting at the failpoint named by DENORMD_CRASH"), "{}", self.log());
    }

    /// Asks it to stop, and waits for a regular end.
    pub async fn terminate(mut self) {
        self.signal("TERM");
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not stop\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        // One that was started a moment ago may not handle signals yet: it has not begun.
        let has_not_begun = status.signal() == Some(15) && self.log().is_empty();
        assert!(status.success() || has_not_begun, "{status}\n{}", self.log());
    }

    /// True if its log has lines whose times differ from the machine's by half an hour or more.
    pub fn log_has_other_times(&self) -> bool {
        let now = bson::DateTime::now().timestamp_millis();
        let log = self.log();
        let mut times = log.lines().filter_map(|line| {
            let text = line.split_once("\"timestamp\":\"").map_or(line, |(_, rest)| rest);
            bson::DateTime::parse_rfc3339_str(text.split(['"', ' ']).next()?).ok()
        });
        times.any(|time| (time.timestamp_millis() - now).abs() > 30 * 60 * 1000)
    }

    /// Its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
