//! A replica set, the daemon on it, and what both use.

use std::{
    env, fs,
    path::PathBuf,
    slice, thread,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::{daemon::Daemon, host, progress::Progress};
use futures_util::future::try_join_all;
use mongodb::{Client, Database, IndexModel};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Statements in one command of a writer: 500 to 1,000 are equally good (measured on MongoDB 6.0.5).
pub const STATEMENTS: usize = 500;
/// Connections that a writer uses at once: they fill two cores.
pub const WRITERS: usize = 2;
/// Time limit of a start, which is reached only if something is broken.
const LIMIT: Duration = Duration::from_mins(2);
/// The database that the daemon keeps its state in.
const STATE: &str = "denormd";
/// The database of the workloads.
pub const DATABASE: &str = "bench";

/// One server for all the workloads.
pub struct Bench {
    set: ReplicaSet,
    /// To write and look with.
    pub client: Client,
    /// Number of times that each measurement is repeated.
    pub rounds: usize,
}

/// The cost of a measurement.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    /// From the beginning to the end.
    pub wall: f64,
    /// CPU seconds of the server.
    pub server: f64,
    /// CPU seconds of the daemon, of all daemons that are measured together, or of a client that does their work.
    pub daemon: f64,
}

/// A daemon and its config file.
pub struct Running {
    daemon: Daemon,
    config: PathBuf,
}

impl Cost {
    /// CPU of server and daemon together, in microseconds for each of so many changes.
    pub fn each(self, changes: usize) -> f64 {
        (self.server + self.daemon) / f64::from(u32::try_from(changes).unwrap_or(u32::MAX)) * 1e6
    }
}

impl Bench {
    /// Starts the server. With a cache of 2 GB it evicts old versions of what was changed a moment ago while something is
    /// measured: a quarter of its CPU and more. With test commands enabled, it also validates its own replies to `find`, `aggregate`
    /// and `getMore`, which production servers do not: 4% of the cost of a change event.
    pub async fn start(rounds: usize) -> Self {
        let set = ReplicaSet::builder().cache_gb(8.0).oplog_mb(4096).enable_test_commands(false).start().await;
        Self { client: set.client().await, set, rounds }
    }

    /// The database of the workloads, with nothing in it and no state of a daemon.
    pub async fn fresh(&self) -> Database {
        self.forget().await;
        let database = self.client.database(DATABASE);
        database.drop().await.expect("a drop");
        database
    }

    /// Forgets what a daemon knew. The next one backfills, so that it leads once that is done.
    pub async fn forget(&self) {
        self.client.database(STATE).drop().await.expect("a drop");
    }

    /// The server's version.
    pub async fn version(&self) -> String {
        let reply = self.client.database("admin").run_command(doc! {"buildInfo": 1}).await.expect("the version");
        reply.get_str("version").unwrap_or("of an unknown version").to_owned()
    }

    /// The server's connection string.
    pub fn uri(&self) -> String {
        self.set.uri()
    }

    /// Starts a daemon with these rules and waits until it has caught up.
    pub async fn daemon(&self, rules: &str, count: usize) -> Running {
        self.daemon_of(None, rules, count).await
    }

    /// The same with another program than the one beside this one.
    pub async fn daemon_of(&self, program: Option<PathBuf>, rules: &str, count: usize) -> Running {
        self.up_to_date(self.prepared(program, rules), count).await
    }

    /// The same with these further lines of config.
    pub async fn daemon_with(&self, config: &str, rules: &str, count: usize) -> Running {
        self.up_to_date(self.instance(None, config, rules, (0, 1)), count).await
    }

    async fn up_to_date(&self, mut daemon: Running, count: usize) -> Running {
        daemon.start();
        self.backfilled(count).await;
        daemon.applied().await;
        self.first_backfills_recorded().await;
        daemon
    }

    /// Starts this number of instances with as many partitions, and waits until each leads one and has caught up.
    pub async fn instances(&self, number: u32, rules: &str, count: usize) -> Vec<Running> {
        let mut instances: Vec<Running> =
            (0..number).map(|nth| self.instance(None, "", rules, (nth, number))).collect();
        instances.iter_mut().for_each(Running::start);
        let leases = self.client.database(STATE).collection::<Document>("leases");
        let started = Instant::now();
        // There are no more partitions, so each of these processes leads one.
        while leases.distinct("process", doc! {"owner": {"$ne": null}}).await.expect("the leases").len()
            < instances.len()
        {
            assert!(
                started.elapsed() < LIMIT,
                "the instances do not lead one partition each\n{}",
                instances[0].log_tail()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.backfilled(count * instances.len()).await;
        for instance in &instances {
            instance.applied().await;
        }
        instances
    }

    /// A daemon with these rules that is about to start: the server has what they need.
    pub fn prepared(&self, program: Option<PathBuf>, rules: &str) -> Running {
        self.instance(program, "", rules, (0, 1))
    }

    /// The same as one of several instances, with as many partitions.
    fn instance(&self, program: Option<PathBuf>, more: &str, rules: &str, (nth, partitions): (u32, u32)) -> Running {
        let config = env::temp_dir().join(format!("denormd-bench-{}-{nth}.yaml", std::process::id()));
        // Held by SIGSTOP it stays the leader. Nothing else differs from the defaults.
        let head = format!(
            "mongodb: {{ uri: \"mongodb://localhost\", database: {DATABASE} }}\nlease: {{ ttl_seconds: 3600, partitions: {partitions} }}\n"
        );
        fs::write(&config, format!("{head}{more}rules:\n{rules}")).expect("a config file");
        let mut daemon = Daemon::with(&config, &self.uri()).reachable();
        if let Some(program) = program {
            daemon = daemon.running(program);
        }
        daemon.plan_apply();
        Running { daemon, config }
    }

    /// Waits until the backfills of this number of rules are done.
    pub async fn backfilled(&self, count: usize) {
        Progress::new(&self.client, DATABASE, count).wait_backfilled().await;
    }

    /// Waits until the daemon has recorded that the first backfills are over, and keeps no more of the values that they overwrite. It does
    /// so once for each rule, soon after the backfill, with two commands that would count as those of a change.
    async fn first_backfills_recorded(&self) {
        let rules = self.client.database(STATE).collection::<Document>("rules");
        let started = Instant::now();
        while rules.count_documents(doc! {"keeping": {"$exists": true}}).await.expect("the rules") > 0 {
            assert!(started.elapsed() < LIMIT, "the first backfill of a rule is still recorded as open");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server has written out what others have changed. Else that falls to whoever is measured next: half a
    /// second of both cores after every few hundred thousand writes.
    pub async fn at_rest(&self) {
        self.client.database("admin").run_command(doc! {"fsync": 1}).await.expect("a checkpoint");
    }

    /// The time, and the CPU time of the server and of the daemons so far.
    pub fn spent<'a>(&self, daemons: impl IntoIterator<Item = &'a Running>) -> (Instant, f64, f64) {
        let mine = daemons.into_iter().map(|daemon| host::cpu(daemon.pid())).sum();
        (Instant::now(), host::cpu(self.set.node(0).pid()), mine)
    }

    /// The cost since then.
    pub fn since<'a>(
        &self,
        (begin, server, mine): (Instant, f64, f64),
        daemons: impl IntoIterator<Item = &'a Running>,
    ) -> Cost {
        let wall = begin.elapsed().as_secs_f64();
        let (_, server_now, mine_now) = self.spent(daemons);
        Cost { wall, server: server_now - server, daemon: mine_now - mine }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        fs::remove_file(&self.config).ok();
    }
}

impl Running {
    /// Starts the process.
    pub fn start(&mut self) {
        self.daemon.start();
    }

    /// Of the process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid().expect("a daemon that runs")
    }

    /// Holds it, does something, and lets it go on: what changes meanwhile is a backlog.
    pub async fn held<T>(&self, then: impl Future<Output = T>) -> T {
        held(slice::from_ref(self), then).await
    }

    /// Returns when everything is applied that is committed now. Just after a start, the daemon may not listen or follow changes
    /// yet; just after a long hold, its connections may be closed.
    pub async fn applied(&self) {
        let started = Instant::now();
        while !self.ask_to_wait().await.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")) {
            assert!(started.elapsed() < LIMIT, "not caught up\n{}", self.daemon.log_tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn ask_to_wait(&self) -> std::io::Result<String> {
        let mut connection = TcpStream::connect(self.daemon.address()).await?;
        let request = "GET /v1/wait?timeout=3000 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// Ends it. What it warned of would make a measurement worthless, but for what it had under way when it was held, and for
    /// what a floor has written in its place.
    pub async fn stop(mut self) {
        let expected = [
            "no answer in time",
            "no primary of the replica set answers",
            "connections were closed after a failure",
            "connection lost",
            "the lease cannot be read, taken or renewed",
            "owned fields differ from their definition",
            "more lines like this were left out",
            // Of a state database that was created a moment ago.
            "SnapshotUnavailable",
            // Of instances that start together and divide the deployment: one of them does.
            "cannot look for partitions to lead",
            // Of a benchmark that changes all copies at once, while the daemon is held.
            "who wrote them is unknown",
            "the checkpoint will soon fall off the oplog",
        ];
        let warnings = self.daemon.warnings();
        let others: Vec<&String> =
            warnings.iter().filter(|line| !expected.iter().any(|why| line.contains(why))).collect();
        assert!(others.is_empty(), "warnings: {others:#?}");
        self.end().await;
    }

    /// Ends the process, which can start again.
    pub async fn end(&mut self) {
        self.daemon.stop().await;
    }

    /// Runs a command of denormd beside it, which must succeed.
    pub fn command(&self, words: &[&str]) {
        let output = self.daemon.command(words).output().expect("denormd starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }
}

/// Holds these daemons, does something, and lets them go on: what changes meanwhile is a backlog.
pub async fn held<T>(daemons: &[Running], then: impl Future<Output = T>) -> T {
    let signal = |name| daemons.iter().for_each(|daemon| host::signal(daemon.pid(), name));
    signal("STOP");
    let out = then.await;
    signal("CONT");
    out
}

/// The number of cores of this machine.
pub fn cores() -> u32 {
    thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Inserts documents, in few commands.
pub async fn insert(database: &Database, collection: &str, documents: Vec<Document>) {
    let collection = &database.collection::<Document>(collection);
    let mut documents = documents.into_iter().peekable();
    while documents.peek().is_some() {
        let some: Vec<Document> = documents.by_ref().take(10_000).collect();
        collection.insert_many(some).ordered(false).await.expect("an insert");
    }
}

/// Creates the index that finds the products of a part. `plan --apply` creates it where denormd runs.
pub async fn index_products(database: &Database) {
    let index = IndexModel::builder().keys(doc! {"part": 1}).build();
    database.collection::<Document>("products").create_index(index).await.expect("an index");
}

/// Runs update statements as fast as the server takes them: two connections, bulk commands, acknowledged by a majority.
pub async fn update(database: &Database, collection: &str, statements: &[Document]) {
    update_by(WRITERS, database, collection, statements).await;
}

/// The same from so many connections.
pub async fn update_by(writers: usize, database: &Database, collection: &str, statements: &[Document]) {
    let mut shares: Vec<Vec<Document>> = vec![Vec::new(); writers];
    for (nth, chunk) in statements.chunks(STATEMENTS).enumerate() {
        let command = doc! {
            "update": collection, "updates": chunk.to_vec(), "ordered": false, "writeConcern": {"w": "majority"},
        };
        shares[nth % writers].push(command);
    }
    let writers = shares.into_iter().map(|commands| async move {
        for command in commands {
            let reply = database.run_command(command).await?;
            assert!(!reply.contains_key("writeErrors"), "{reply}");
        }
        Ok::<_, mongodb::error::Error>(())
    });
    try_join_all(writers).await.expect("updates");
}

/// Waits a little longer than the daemon's own turn.
pub async fn breath() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}
