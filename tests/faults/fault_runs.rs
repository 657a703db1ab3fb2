//! `make faults`: faults drawn from a seed, alone and in pairs, on three real servers and two daemons, for any length
//! of time; then a table of the faults and the recovery times.
//!
//! After each fault the writer stops, every copy is compared with its source, and the oplog must be silent. A marker
//! measures the interruption: one more write, from the moment that an instance can lead and a primary can write.
//!
//! `make soak` does the same with a daemon that is never replaced, and limits what may grow (`soak`).

use std::{
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb, Weather};
use futures_util::FutureExt;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{
    daemon::{PATIENCE, until},
    script::found_by,
    seeds::from_environment,
    world::{Daemon, World},
};

pub mod data;
mod members;
mod soak;

/// Time for which the oplog must be silent.
const QUIET: Duration = Duration::from_millis(700);
/// Longer than the longest limit within a step, which is that of an initial sync.
const LONGEST_STEP: Duration = Duration::from_secs(7 * PATIENCE.as_secs());
/// A host and a log that the application's writer leaves alone.
const MARKER: i32 = -1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    LeaderKilled,
    LeaderStopped,
    LeaderFrozen,
    LeaderFrozenShortly,
    LeaseDeleted,
    PrimaryKilled,
    PrimaryFrozen,
    PrimaryStepsDown,
    SecondaryKilled,
    NoMajority,
    RolledBack,
    CommandsRefused,
    AnswersLost,
    WritesHang,
    SlowServer,
    LargeTransaction,
    LargeDocument,
    NetworkSlow,
    NetworkLossy,
    RequestsCutOff,
    AnswersCutOff,
    PrimaryCutOff,
    DiskFull,
    ClockStrobes,
    ForeignFlood,
    ExpiredByTtl,
    SourceRenamedOver,
    TargetRenamedOver,
    StateDiskFull,
    LongRollback,
    MemberResynced,
    MemberClockSkewed,
    Reloaded,
    Upgraded,
}

impl Fault {
    const ALL: [Self; 34] = [
        Self::LeaderKilled,
        Self::LeaderStopped,
        Self::LeaderFrozen,
        Self::LeaderFrozenShortly,
        Self::LeaseDeleted,
        Self::PrimaryKilled,
        Self::PrimaryFrozen,
        Self::PrimaryStepsDown,
        Self::SecondaryKilled,
        Self::NoMajority,
        Self::RolledBack,
        Self::CommandsRefused,
        Self::AnswersLost,
        Self::WritesHang,
        Self::SlowServer,
        Self::LargeTransaction,
        Self::LargeDocument,
        Self::NetworkSlow,
        Self::NetworkLossy,
        Self::RequestsCutOff,
        Self::AnswersCutOff,
        Self::PrimaryCutOff,
        Self::DiskFull,
        Self::ClockStrobes,
        Self::ForeignFlood,
        Self::ExpiredByTtl,
        Self::SourceRenamedOver,
        Self::TargetRenamedOver,
        Self::StateDiskFull,
        Self::LongRollback,
        Self::MemberResynced,
        Self::MemberClockSkewed,
        Self::Reloaded,
        Self::Upgraded,
    ];

    /// True for faults of daemons, which can strike together with faults of servers.
    fn of_daemons(self) -> bool {
        matches!(self, Self::LeaderKilled | Self::LeaderStopped | Self::LeaderFrozen | Self::LeaseDeleted)
    }

    fn of_servers(self) -> bool {
        matches!(
            self,
            Self::PrimaryKilled
                | Self::PrimaryFrozen
                | Self::PrimaryStepsDown
                | Self::SecondaryKilled
                | Self::NetworkSlow
                | Self::RequestsCutOff
                | Self::AnswersCutOff
                | Self::PrimaryCutOff
        )
    }
}

/// Number of rollbacks of a node.
async fn rollbacks(node: &mongodb::Client) -> i32 {
    let reply = node.database("admin").run_command(doc! {"replSetGetRBID": 1}).await;
    reply.ok().and_then(|reply| reply.get_i32("rbid").ok()).unwrap_or_default()
}

struct Stage {
    /// The process that no fault ends, for `make soak`.
    veteran: Option<i64>,
    /// The program of the previous release, if there is one.
    previous: Option<PathBuf>,
    /// True while the config has one more rule.
    extended: bool,
    /// Number of faults that certainly struck, among those that can be detected.
    struck: u64,
    // Dropped before the servers, on which its database is dropped.
    world: World,
    set: ReplicaSet,
    daemons: Vec<Daemon>,
    random: StdRng,
}

/// The result of one step of a round. A step whose own limits do not end it, such as a command that is never answered,
/// fails with its name.
async fn ends<T>(step: &str, work: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(LONGEST_STEP, work).await;
    ended.unwrap_or_else(|_| panic!("{step} has not ended after {LONGEST_STEP:?}"))
}

fn pause(milliseconds: u64) -> impl Future<Output = ()> {
    tokio::time::sleep(Duration::from_millis(milliseconds))
}

impl Stage {
    async fn set_up(seed: u64) -> Self {
        let set = ReplicaSet::builder().nodes(3).proxied().param("ttlMonitorSleepSecs", "1").start().await;
        let world = World::new(set.database().await).await;
        world.db.collection("hosts").insert_one(doc! {"_id": MARKER, "ip": 0}).await.unwrap();
        world.db.collection("logs").insert_one(doc! {"_id": MARKER, "host": MARKER}).await.unwrap();
        let daemons = vec![world.daemon(), world.daemon()];
        world.at_rest(QUIET).await;
        let previous = std::env::var_os("DENORMD_PREVIOUS").filter(|path| !path.is_empty()).map(PathBuf::from);
        let random = StdRng::seed_from_u64(seed);
        Self { veteran: None, previous, extended: false, struck: 0, set, world, daemons, random }
    }

    /// The leader, if a fault may end its process.
    async fn leader_to_end(&self) -> Option<usize> {
        let nth = self.leader().await;
        (Some(self.daemons[nth].pid()) != self.veteran).then_some(nth)
    }

    async fn leader(&self) -> usize {
        until("one of the daemons leads", async || {
            let process = self.world.lease().await?.get_i64("process").ok();
            self.daemons.iter().position(|daemon| Some(daemon.pid()) == process)
        })
        .await
    }

    async fn term(&self) -> i64 {
        until("there is a lease with a term", async || self.world.lease().await?.get_i64("term").ok()).await
    }

    /// Waits until another member than this one is the primary.
    async fn primary_after(&self, old: usize) {
        until("another member is elected", async || (self.set.primary().await != old).then_some(())).await;
    }

    async fn fail(&self, mode: bson::Bson, mut data: Document) {
        data.insert("appName", "denormd");
        let command = doc! {"configureFailPoint": "failCommand", "mode": mode, "data": data};
        // If the primary ends, the fail point ends with it.
        self.world.test.client.database("admin").run_command(command).await.ok();
    }

    async fn heal_commands(&self) {
        for node in self.set.nodes() {
            let off = doc! {"configureFailPoint": "failCommand", "mode": "off"};
            node.client().await.database("admin").run_command(off).await.ok();
        }
    }

    /// Causes one fault and ends it, unless it ends by itself.
    async fn strike(&mut self, fault: Fault) {
        let wait = self.random.random_range(0..1500);
        match fault {
            Fault::LeaderKilled
            | Fault::LeaderStopped
            | Fault::LeaderFrozen
            | Fault::LeaderFrozenShortly
            | Fault::LeaseDeleted => self.strike_leader(fault, wait).await,
            Fault::PrimaryKilled
            | Fault::PrimaryFrozen
            | Fault::PrimaryStepsDown
            | Fault::SecondaryKilled
            | Fault::NoMajority => self.strike_members(fault, wait).await,
            Fault::RolledBack => self.roll_back(1).await,
            Fault::LongRollback => self.roll_back(1500).await,
            Fault::ForeignFlood => {
                let TestDb { client, name, .. } = &self.world.test;
                data::flood(client, name, data::flood_size(20_000)).await;
            }
            Fault::ExpiredByTtl => {
                data::expire(&self.world).await;
                self.struck += 1;
            }
            Fault::SourceRenamedOver => {
                // Release 0.1 does not record which collection a rule follows.
                self.finish_upgrade().await;
                data::rename_over(&self.world, "hosts").await;
                self.world.follows_replaced_hosts(true).await;
            }
            Fault::TargetRenamedOver => data::rename_over(&self.world, "logs").await,
            Fault::StateDiskFull => self.state_disk_full(1000 + 2 * wait).await,
            Fault::MemberResynced => self.resync_member().await,
            Fault::MemberClockSkewed => {
                // A daemon of release 0.1 never takes back an end of its lease that a primary whose clock was ahead has set.
                self.finish_upgrade().await;
                self.skew_member(wait).await;
            }
            Fault::Reloaded => self.reload(),
            Fault::Upgraded => self.upgrade().await,
            Fault::CommandsRefused | Fault::AnswersLost | Fault::WritesHang | Fault::SlowServer => {
                self.commands_fail(fault).await;
                pause(wait).await;
                self.heal_commands().await;
            }
            Fault::NetworkSlow
            | Fault::NetworkLossy
            | Fault::RequestsCutOff
            | Fault::AnswersCutOff
            | Fault::PrimaryCutOff => self.network(fault, wait).await,
            Fault::DiskFull => self.disk_full(wait).await,
            Fault::ClockStrobes => self.clock_strobes(wait).await,
            Fault::LargeTransaction => self.large_transaction(wait % 2 == 0).await,
            Fault::LargeDocument => {
                // Its change event is larger than the limit, unless it is trimmed.
                let junk = "x".repeat(15 << 20);
                let hosts = self.world.db.collection::<Document>("hosts");
                let filter = doc! {"_id": MARKER};
                for update in [doc! {"$set": {"junk": &junk}}, doc! {"$set": {"ip": 1}}, doc! {"$unset": {"junk": ""}}]
                {
                    hosts.update_one(filter.clone(), update).await.ok();
                }
            }
        }
    }

    async fn strike_leader(&mut self, fault: Fault, wait: u64) {
        match fault {
            Fault::LeaderKilled => {
                let Some(nth) = self.leader_to_end().await else { return };
                self.daemons.remove(nth).kill9();
                self.daemons.push(self.world.daemon());
            }
            Fault::LeaderStopped => {
                let Some(nth) = self.leader_to_end().await else { return };
                self.daemons.remove(nth).terminate().await;
                self.daemons.push(self.world.daemon());
            }
            Fault::LeaderFrozen => {
                let (nth, term) = (self.leader().await, self.term().await);
                self.daemons[nth].signal("STOP");
                self.world.term_after(term).await;
                pause(wait).await;
                self.daemons[nth].signal("CONT");
            }
            Fault::LeaderFrozenShortly => {
                let nth = self.leader().await;
                self.daemons[nth].signal("STOP");
                pause(wait).await;
                self.daemons[nth].signal("CONT");
            }
            _ => {
                let leases = self.world.test.beside("state").collection::<Document>("leases");
                leases.delete_one(doc! {}).await.ok();
            }
        }
    }

    async fn strike_members(&mut self, fault: Fault, wait: u64) {
        match fault {
            Fault::PrimaryKilled => {
                let old = self.set.primary().await;
                self.set.node(old).kill9();
                self.set.primary().await;
                pause(wait).await;
                self.set.node(old).restart().await;
            }
            Fault::PrimaryFrozen => {
                let old = self.set.primary().await;
                self.set.node(old).sigstop();
                self.primary_after(old).await;
                pause(wait).await;
                self.set.node(old).sigcont();
            }
            Fault::PrimaryStepsDown => {
                self.set.step_down().await;
            }
            Fault::SecondaryKilled => {
                let secondary = (self.set.primary().await + 1) % 3;
                self.set.node(secondary).kill9();
                pause(wait).await;
                self.set.node(secondary).restart().await;
            }
            _ => {
                let primary = self.set.primary().await;
                let others = [(primary + 1) % 3, (primary + 2) % 3];
                for node in others {
                    self.set.node(node).sigstop();
                }
                pause(1000 + 2 * wait).await;
                for node in others {
                    self.set.node(node).sigcont();
                }
            }
        }
    }

    async fn commands_fail(&mut self, fault: Fault) {
        let commands = ["update", "find", "aggregate", "getMore", "findAndModify"].to_vec();
        let times = |times: i32| doc! {"times": times}.into();
        let several = self.random.random_range(1..6);
        let (mode, data) = match fault {
            Fault::CommandsRefused => {
                let code = [91, 189, 11600, 11602, 10107, 13435, 262, 112, 43, 280][self.random.random_range(0..10)];
                (times(several), doc! {"failCommands": commands, "errorCode": code})
            }
            Fault::AnswersLost => (times(several), doc! {"failCommands": commands, "closeConnection": true}),
            Fault::WritesHang => {
                (times(1), doc! {"failCommands": ["update"], "blockConnection": true, "blockTimeMS": 4000})
            }
            _ => ("alwaysOn".into(), doc! {"failCommands": commands, "blockConnection": true, "blockTimeMS": 150}),
        };
        self.fail(mode, data).await;
    }

    /// Writes that only their primary has, and that are lost when another one is elected.
    async fn roll_back(&mut self, writes: i32) {
        let old = self.set.primary().await;
        let others = [(old + 1) % 3, (old + 2) % 3];
        for node in others {
            self.set.node(node).sigstop();
        }
        let lost = |collection: &str, field: &str, first: i32| {
            let update = |n: i32| doc! {"q": {"_id": first + n % 12}, "u": {"$set": {field: -7 - n}}};
            // On its disk, so that it exists to be rolled back.
            let updates: Vec<Document> = (0..writes).map(update).collect();
            doc! {"update": collection, "updates": updates, "writeConcern": {"w": 1, "j": true}, "maxTimeMS": 2000}
        };
        let alone = self.set.node(old).client().await;
        let before = rollbacks(&alone).await;
        let db = alone.database(&self.world.test.name);
        let mut written = db.run_command(lost("hosts", "ip", MARKER)).await.is_ok();
        if writes > 1 {
            // Other references, too. Some of these writes may come after it has stepped down.
            written |= db.run_command(lost("logs", "host", 0)).await.is_ok();
        }
        pause(300).await;
        self.set.node(old).kill9();
        for node in others {
            self.set.node(node).sigcont();
        }
        self.primary_after(old).await;
        self.set.node(old).restart().await;
        // A primary that was stepping down at the write has nothing to roll back.
        if written {
            let begun = Instant::now();
            while rollbacks(&self.set.node(old).client().await).await == before {
                assert!(begun.elapsed() < PATIENCE, "nothing was rolled back");
                pause(100).await;
            }
            self.struck += 1;
        }
    }

    async fn network(&mut self, fault: Fault, wait: u64) {
        let fine = Weather::default();
        match fault {
            Fault::NetworkSlow => {
                let slow = Weather { delay: Duration::from_millis(80), ..fine };
                self.weather(&[0, 1, 2], slow, 2000 + wait).await;
            }
            Fault::NetworkLossy => self.weather(&[0, 1, 2], Weather { loss: 20, ..fine }, 2000 + wait).await,
            _ => {
                let (requests_lost, answers_lost) = (fault != Fault::AnswersCutOff, fault != Fault::RequestsCutOff);
                let primary = self.set.primary().await;
                // Longer than an election takes, or shorter.
                self.weather(&[primary], Weather { requests_lost, answers_lost, ..fine }, 500 + 4 * wait).await;
            }
        }
    }

    /// Sets the weather on the ways to these nodes for a time, and checks that it affected something.
    async fn weather(&mut self, nodes: &[usize], weather: Weather, milliseconds: u64) {
        let struck = |set: &ReplicaSet| nodes.iter().map(|node| set.node(*node).proxy().struck()).sum::<u64>();
        let before = struck(&self.set);
        for node in nodes {
            self.set.node(*node).proxy().set(weather);
        }
        pause(milliseconds).await;
        for node in nodes {
            self.set.node(*node).proxy().set(Weather::default());
        }
        assert!(struck(&self.set) > before, "nothing was struck");
        self.struck += 1;
    }

    /// Prevents the primary from writing to any file, which no server survives: it ends by itself, and starts when
    /// there is room.
    async fn disk_full(&mut self, milliseconds: u64) {
        let primary = self.set.primary().await;
        let process = self.set.node(primary).pid().to_string();
        let limited = Command::new("prlimit").args(["--pid", &process, "--fsize=1"]).status();
        if !limited.is_ok_and(|status| status.success()) {
            println!("skipped: DiskFull wants `prlimit` of util-linux, and the right to limit a process of one's own");
            return;
        }
        let begun = Instant::now();
        while self.set.node(primary).is_alive() {
            assert!(begun.elapsed() < PATIENCE, "it goes on without room for a byte");
            pause(50).await;
        }
        self.struck += 1;
        pause(milliseconds).await;
        self.set.node(primary).restart().await;
    }

    /// Runs the leader, or the instance that takes over, with a clock that jumps an hour forward and back.
    async fn clock_strobes(&mut self, milliseconds: u64) {
        let Some(library) = found_by("faketime.py") else { return };
        let folder = tempfile::tempdir().unwrap();
        let clock = folder.path().join("clock");
        std::fs::write(&clock, "+0").unwrap();
        let term = self.term().await;
        // The other daemons stop: the leader has the strange clock.
        let kept = self.daemons.iter().position(|daemon| Some(daemon.pid()) == self.veteran);
        let kept = kept.map(|nth| self.daemons.remove(nth));
        if let Some(daemon) = &kept {
            daemon.signal("STOP");
        }
        for daemon in self.daemons.drain(..) {
            daemon.terminate().await;
        }
        let strange = self.world.daemon_by_clock(&library, &clock);
        self.world.term_after(term).await;
        let begun = Instant::now();
        for nth in 0.. {
            std::fs::write(&clock, if nth % 2 == 0 { "+3600" } else { "-3600" }).unwrap();
            pause(100).await;
            if begun.elapsed() > Duration::from_millis(2000 + milliseconds) {
                break;
            }
        }
        self.struck += u64::from(strange.log_has_other_times());
        strange.terminate().await;
        if let Some(daemon) = &kept {
            daemon.signal("CONT");
        }
        self.daemons.extend(kept);
        while self.daemons.len() < 2 {
            self.daemons.push(self.world.daemon());
        }
    }

    /// Ten thousand writes that become visible at once, or not at all.
    async fn large_transaction(&self, commits: bool) {
        let run = async {
            let mut session = self.world.test.client.start_session().await?;
            session.start_transaction().await?;
            let logs = self.world.db.collection::<Document>("logs");
            let new: Vec<Document> = (0..5000).map(|n| doc! {"_id": 1_000_000 + n, "host": n % 12}).collect();
            logs.insert_many(new).session(&mut session).await?;
            logs.delete_many(doc! {"_id": {"$gte": 1_000_000}}).session(&mut session).await?;
            if commits { session.commit_transaction().await } else { session.abort_transaction().await }
        };
        let result: mongodb::error::Result<()> = run.await;
        // A failure is part of the fault.
        result.ok();
    }

    /// Time from the moment that the marker can be written until its copy exists.
    async fn stood_still(&mut self) -> Duration {
        let ip = self.random.random_range(2..i32::MAX);
        let (hosts, logs) =
            (self.world.db.collection::<Document>("hosts"), self.world.db.collection::<Document>("logs"));
        let update = doc! {"$set": {"ip": ip}};
        until("the marker can be written", async || hosts.update_one(doc! {"_id": MARKER}, update.clone()).await.ok())
            .await;
        let written = Instant::now();
        while !matches!(logs.find_one(doc! {"_id": MARKER, "ip": ip}).await, Ok(Some(_))) {
            assert!(written.elapsed() < PATIENCE, "changes stand still");
            pause(5).await;
        }
        written.elapsed()
    }

    /// One round: the application writes, the faults strike, everything recovers.
    async fn round(&mut self, faults: &[Fault]) -> (Duration, Duration) {
        let writer = self.world.writer(self.random.random());
        let lead = self.random.random_range(100..500);
        pause(lead).await;
        for fault in faults {
            ends("the fault", self.strike(*fault)).await;
        }
        let stood_still = ends("the interruption", self.stood_still()).await;
        ends("the application's last write", writer.stop()).await;
        let right = ends("the comparison", self.world.at_rest(QUIET)).await;
        ends("the recovery of the members", self.set.wait_members()).await;
        (stood_still, right)
    }

    fn draw(&mut self) -> Vec<Fault> {
        let first = Fault::ALL[self.random.random_range(0..Fault::ALL.len())];
        let second = Fault::ALL[self.random.random_range(0..Fault::ALL.len())];
        // One time in three, a fault of a daemon and one of a server at once.
        let pair = (first.of_daemons() && second.of_servers()) || (first.of_servers() && second.of_daemons());
        if pair { vec![first, second] } else { vec![first] }
    }
}

pub fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// For each combination of faults: the interruption and the time to be right of each round, or None if it differed.
type Table = BTreeMap<String, Vec<Option<(Duration, Duration)>>>;

/// Runs rounds until the time is over, or one of them fails. `after` examines the stage after each round.
async fn rounds(stage: &mut Stage, minutes: f64, mut after: impl AsyncFnMut(&Stage, Duration)) -> Table {
    let only: Option<String> = std::env::var("DENORMD_FAULT").ok().filter(|name| !name.is_empty());
    let begun = Instant::now();
    let mut table = Table::new();
    while begun.elapsed().as_secs_f64() < minutes * 60.0 {
        let faults = match &only {
            Some(names) => {
                let named = |name: &str| Fault::ALL.into_iter().find(|fault| format!("{fault:?}") == name);
                names.split('+').map(|name| named(name.trim())).collect::<Option<Vec<_>>>().unwrap_or_default()
            }
            None => stage.draw(),
        };
        assert!(!faults.is_empty(), "DENORMD_FAULT is one of these, or several with + between them: {:?}", Fault::ALL);
        let name = faults.iter().map(|fault| format!("{fault:?}")).collect::<Vec<_>>().join(" + ");
        // A difference or a write panics with the logs; the table must still be printed.
        let round = AssertUnwindSafe(stage.round(&faults)).catch_unwind().await;
        let at = begun.elapsed().as_secs_f64();
        let Ok((still, right)) = round else {
            println!("{at:6.0} s  {name}: DIFFERS");
            table.entry(name).or_default().push(None);
            break;
        };
        println!("{at:6.0} s  {name}: stood still for {still:?}, right {right:?} after the writes");
        table.entry(name).or_default().push(Some((still, right)));
        after(&*stage, begun.elapsed()).await;
    }
    table
}

/// Prints the table; returns the number of rounds and of those that differed.
fn print(table: &Table) -> (usize, usize) {
    println!(
        "\n{:<34} {:>5} {:>7} {:>12} {:>12} {:>12} {:>12}",
        "fault", "runs", "differ", "still,median", "still,worst", "right,median", "right,worst"
    );
    let mut divergences = 0;
    for (name, runs) in table {
        let differ = runs.iter().filter(|run| run.is_none()).count();
        divergences += differ;
        let mut columns = Vec::new();
        for part in [|run: &(Duration, Duration)| run.0, |run: &(Duration, Duration)| run.1] {
            let mut times: Vec<Duration> = runs.iter().flatten().map(part).collect();
            if times.is_empty() {
                columns.extend(["-".to_owned(), "-".to_owned()]);
                continue;
            }
            let middle = median(&mut times).as_secs_f64();
            columns.push(format!("{middle:.2} s"));
            columns.push(format!("{:.2} s", times.last().unwrap().as_secs_f64()));
        }
        let columns: Vec<String> = columns.iter().map(|column| format!("{column:>12}")).collect();
        println!("{name:<34} {:>5} {differ:>7} {}", runs.len(), columns.join(" "));
    }
    (table.values().map(Vec::len).sum(), divergences)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs for as long as it is told: make faults MINUTES=60"]
async fn for_as_long_as_it_is_told() {
    let minutes: f64 = from_environment("DENORMD_FAULT_MINUTES").unwrap_or(5.0);
    let seed = from_environment("DENORMD_SEED").unwrap_or_else(rand::random::<u32>);
    println!("seed {seed}, {minutes} minutes");
    let mut stage = Stage::set_up(u64::from(seed)).await;
    let (runs, divergences) = print(&rounds(&mut stage, minutes, async |_, _| {}).await);
    assert!(runs > 0, "no time for a run");
    println!("{runs} runs, {divergences} divergences; {} faults seen to strike", stage.struck);
    assert_eq!(divergences, 0, "seed {seed}");
}
