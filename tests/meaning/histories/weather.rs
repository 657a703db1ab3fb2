//! Faults for a simulated cluster and its daemons, in an order that a seed draws.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use denormd_engine::checkpoint::store::Store;
use denormd_fixture::TestDb;
use denormd_mongo::Server;
use denormd_simulated::{Faults, Model};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::time::Instant;

use super::instance::Instance;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Commands are refused, cut off, delayed, or lose their answers; cursors are gone.
    Commands,
    /// Another member becomes the primary.
    Election,
    /// The same, and the new primary serves majority reads that lack what the former one has served.
    LateNews,
    /// For a time, no write is majority-committed.
    HeldBack,
    /// The same, and then those writes are rolled back by an election.
    Rollback,
    /// All change streams lose their cursors.
    StreamsKilled,
    /// The oplog no longer has what the streams have not read.
    OplogExpired,
    DaemonKilled,
    /// It hands over, and starts again.
    DaemonStopped,
    /// For a time, nothing passes between it and the cluster.
    DaemonDisconnected,
    /// An operator asks for the backfill of a rule, or pauses it for a time.
    Operator,
}

impl Fault {
    pub const ALL: [Self; 11] = [
        Self::Commands,
        Self::Election,
        Self::LateNews,
        Self::HeldBack,
        Self::Rollback,
        Self::StreamsKilled,
        Self::OplogExpired,
        Self::DaemonKilled,
        Self::DaemonStopped,
        Self::DaemonDisconnected,
        Self::Operator,
    ];
}

/// What happened, with the milliseconds since the beginning.
pub struct Trace {
    begun: Instant,
    lines: Mutex<Vec<String>>,
}

impl Trace {
    pub fn new() -> Self {
        Self { begun: Instant::now(), lines: Mutex::default() }
    }

    pub fn add(&self, what: impl std::fmt::Display) {
        let line = format!("{:6} ms  {what}", self.begun.elapsed().as_millis());
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The faults of one run.
pub struct Weather {
    pub model: Model,
    random: StdRng,
    kinds: Vec<Fault>,
    primary: usize,
    /// The operator's connection, and the database of the state.
    operator: (Server, String),
    /// The rules that the operator knows.
    pub rules: Vec<String>,
}

impl Weather {
    pub fn new(seed: u64, model: Model, kinds: &BTreeSet<Fault>, test: &TestDb) -> Self {
        let random = StdRng::seed_from_u64(seed ^ 0x7765_6174);
        let operator = (Server::new(test.client.clone()), test.beside("state").name().to_owned());
        Self { model, random, kinds: kinds.iter().copied().collect(), primary: 0, operator, rules: Vec::new() }
    }

    /// Strikes until `over`, and ends every fault.
    pub async fn strike(&mut self, daemons: &mut [Instance], over: &AtomicBool, trace: &Trace) {
        while !over.load(Ordering::Relaxed) {
            self.pause(50..400).await;
            let Some(fault) = self.kinds.choose(&mut self.random).copied() else { continue };
            // Rarer than the others: everything is compared again.
            if fault == Fault::OplogExpired && self.random.random_range(0..4) > 0 {
                continue;
            }
            self.one(fault, daemons, trace).await;
        }
    }

    async fn pause(&mut self, milliseconds: std::ops::Range<u64>) {
        tokio::time::sleep(Duration::from_millis(self.random.random_range(milliseconds))).await;
    }

    async fn one(&mut self, fault: Fault, daemons: &mut [Instance], trace: &Trace) {
        trace.add(format_args!("{fault:?} begins"));
        match fault {
            Fault::Commands => {
                let faults = self.rates();
                trace.add(format_args!("{faults:?}"));
                self.model.afflict("denormd", faults);
                self.pause(200..1500).await;
                self.model.afflict("denormd", Faults::default());
            }
            Fault::Election => self.election(trace).await,
            Fault::LateNews => self.late_news(trace).await,
            Fault::HeldBack => {
                self.model.hold_back();
                self.pause(50..800).await;
                self.model.replicate();
            }
            Fault::Rollback => {
                self.model.hold_back();
                self.pause(50..500).await;
                self.election(trace).await;
            }
            Fault::StreamsKilled => self.model.kill_streams(),
            Fault::OplogExpired => self.model.shorten_oplog(),
            Fault::DaemonKilled => {
                let nth = self.random.random_range(0..daemons.len());
                daemons[nth].kill();
                self.pause(1..1000).await;
                trace.add(format_args!("daemon {nth} starts again"));
                daemons[nth].start();
            }
            Fault::DaemonStopped => {
                let nth = self.random.random_range(0..daemons.len());
                daemons[nth].stop().await;
                self.pause(1..1000).await;
                trace.add(format_args!("daemon {nth} starts again"));
                daemons[nth].start();
            }
            Fault::DaemonDisconnected => {
                let nth = self.random.random_range(0..daemons.len());
                daemons[nth].disconnect();
                trace.add(format_args!("daemon {nth} is disconnected"));
                self.pause(300..4000).await;
                daemons[nth].connect();
            }
            Fault::Operator => self.ask(trace).await,
        }
        trace.add(format_args!("{fault:?} is over"));
    }

    /// An operator's requests may fail, as other commands do.
    async fn ask(&mut self, trace: &Trace) {
        let Some(rule) = self.rules.choose(&mut self.random) else { return };
        let pause = self.random.random_bool(0.5).then(|| Duration::from_millis(self.random.random_range(100..3000)));
        trace.add(format_args!("{rule}: {}", if pause.is_some() { "pause" } else { "backfill" }));
        let (server, database) = &self.operator;
        let Ok(store) = Store::open(server, database, "default").await else { return };
        match pause {
            Some(time) => drop(store.pause(server, rule, Some(time)).await),
            None => drop(store.ask(server, rule).await),
        }
    }

    fn rates(&mut self) -> Faults {
        let mut rate = |most: u32| if self.random.random() { self.random.random_range(0..most) } else { 0 };
        let (refused, cut_off, answer_lost, unconfirmed) = (rate(100), rate(50), rate(50), rate(100));
        let (delayed, cursors) = (rate(100), rate(100));
        let longest = if self.random.random() { 100 } else { 3000 };
        Faults { refused, cut_off, answer_lost, unconfirmed, delayed, longest, cursors }
    }

    async fn election(&mut self, trace: &Trace) {
        self.model.step_down();
        self.pause(20..300).await;
        self.primary = 1 - self.primary;
        let skew = self.random.random_range(-400..400);
        self.model.elect(self.primary, skew);
        trace.add(format_args!("member {} is the primary, its clock is {skew} ms ahead", self.primary));
    }

    /// The new primary learns late what the former one had seen a majority acknowledge.
    async fn late_news(&mut self, trace: &Trace) {
        let known = self.model.majority();
        self.pause(20..500).await;
        self.election(trace).await;
        self.model.fall_behind(known);
        self.pause(50..800).await;
        self.model.replicate();
    }
}
