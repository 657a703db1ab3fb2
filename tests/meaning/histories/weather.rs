//! Faults for a simulated cluster and its daemons, in an order that a seed draws. A fault of the cluster overlaps with one of a
//! daemon. Not simulated: a frozen process, whose timers stand still; `make zombies` and `make faults` have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Bson, Document, doc, oid::ObjectId};
use denormd_engine::checkpoint::{
    fan_out,
    rule_record::RULES,
    store::{POSITIONS, Store},
};
use denormd_fixture::TestDb;
use denormd_mongo::Server;
use denormd_simulated::{Faults, Model};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::instance::Instance;

/// The longest time to wait for leases that replace deleted ones.
const UNTIL_TAKEN: Duration = Duration::from_secs(3);
/// Faults that strike less often than the others unless they are favoured, because everything is compared again after them.
const RARE: [Fault; 2] = [Fault::OplogExpired, Fault::CheckpointsDeleted];
/// Number of additional entries of a favoured fault in the draw.
const FAVOURED: usize = 6;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Fault {
    /// Commands are refused, cut off, delayed, or lose their answers; cursors are gone.
    Commands,
    /// Another member becomes the primary.
    Election,
    /// Another member becomes the primary, and its commit point is older for a time.
    StaleMajority,
    /// For a time, no write is majority-committed.
    HeldBack,
    /// For a time, no write is majority-committed, and an election rolls those writes back.
    Rollback,
    /// All change streams lose their cursors.
    StreamsKilled,
    /// The oplog no longer has what the streams have not read.
    OplogExpired,
    /// Somebody deletes the leases, a few times.
    LeasesDeleted,
    /// All or part of the state is marked with a later term, as by another leader.
    StateMarked,
    /// The record of a fan-out job arrives late.
    FanOutRecordedLate,
    DaemonKilled,
    /// A daemon is killed, and somebody deletes the checkpoints.
    CheckpointsDeleted,
    /// A daemon hands over, and starts again.
    DaemonStopped,
    /// For a time, nothing passes between a daemon and the cluster.
    DaemonDisconnected,
    /// Daemons start again with another number of partitions, one after another, and not always all of them.
    Repartitioned,
    /// An operator requests the backfill of a rule, or pauses it for a time.
    Operator,
}

impl Fault {
    pub const CLUSTER: [Self; 10] = [
        Self::Commands,
        Self::Election,
        Self::StaleMajority,
        Self::HeldBack,
        Self::Rollback,
        Self::StreamsKilled,
        Self::OplogExpired,
        Self::LeasesDeleted,
        Self::StateMarked,
        Self::FanOutRecordedLate,
    ];
    pub const DAEMONS: [Self; 6] = [
        Self::DaemonKilled,
        Self::CheckpointsDeleted,
        Self::DaemonStopped,
        Self::DaemonDisconnected,
        Self::Repartitioned,
        Self::Operator,
    ];

    pub fn all() -> BTreeSet<Self> {
        Self::CLUSTER.into_iter().chain(Self::DAEMONS).collect()
    }
}

/// The faults that strike far more often than the others: two of them in half of the runs. So they overlap with their own
/// after-effects.
fn favoured(seed: u64, kinds: &[Fault]) -> Vec<Fault> {
    let mut random = StdRng::seed_from_u64(seed ^ 0x6661_766f);
    if random.random_bool(0.5) { kinds.choose_multiple(&mut random, 2).copied().collect() } else { Vec::new() }
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

/// Faults that strike one after another.
pub struct Weather {
    model: Model,
    random: StdRng,
    kinds: Vec<Fault>,
    /// Those of them that strike far more often than the others.
    favoured: Vec<Fault>,
    /// Draws the variant of a fault. A generator of its own leaves the other draws of a seed unchanged.
    variants: StdRng,
    primary: usize,
    /// The most by which the clock of a primary is wrong, in milliseconds.
    skew: i64,
    /// The operator's connection, and the database of the state.
    operator: (Server, String),
    /// The rules that the operator knows.
    pub rules: Vec<String>,
    /// The number of times that each kind has struck.
    pub struck: BTreeMap<Fault, u32>,
}

/// The `_id` of a rule's record, whether the rule is paused, and the number of changes of its state.
type Pause = (Option<Bson>, bool, i64);

impl Weather {
    /// Those of these kinds that are in `faults`.
    pub fn new(seed: u64, model: Model, kinds: &[Fault], faults: &BTreeSet<Fault>, test: &TestDb) -> Self {
        let favoured = favoured(seed, kinds);
        let kinds: Vec<Fault> = kinds.iter().filter(|kind| faults.contains(kind)).copied().collect();
        let struck = kinds.iter().map(|kind| (*kind, 0)).collect();
        let again = favoured.iter().filter(|kind| faults.contains(kind)).flat_map(|kind| [*kind; FAVOURED]);
        let mut random = StdRng::seed_from_u64(seed ^ 0x7765_6174);
        Self {
            model,
            // Some are wrong by more than a lease lasts. denormd tolerates ten minutes.
            skew: if random.random_bool(0.25) { 3000 } else { 400 },
            random,
            struck,
            kinds: kinds.iter().copied().chain(again).collect(),
            favoured,
            variants: StdRng::seed_from_u64(seed ^ 0x666f_726d),
            primary: 0,
            operator: (Server::new(test.client.clone()), test.beside("state").name().to_owned()),
            rules: Vec::new(),
        }
    }

    /// Strikes until `over`, and ends every fault. Returns an error if a daemon has ended by itself, or does not stop.
    pub async fn strike(&mut self, daemons: &mut [Instance], over: &AtomicBool, trace: &Trace) -> Result<(), String> {
        while !over.load(Ordering::Relaxed) {
            self.pause(50..400).await;
            let Some(fault) = self.kinds.choose(&mut self.random).copied() else { continue };
            if RARE.contains(&fault) && !self.favoured.contains(&fault) && self.random.random_range(0..4) > 0 {
                continue;
            }
            trace.add(format_args!("{fault:?} begins"));
            let has_struck = self.one(fault, daemons, trace).await?;
            *self.struck.entry(fault).or_default() += u32::from(has_struck);
            trace.add(format_args!("{fault:?} is over"));
        }
        Ok(())
    }

    async fn pause(&mut self, milliseconds: std::ops::Range<u64>) {
        tokio::time::sleep(Duration::from_millis(self.random.random_range(milliseconds))).await;
    }

    /// Returns false if it had nothing to strike.
    async fn one(&mut self, fault: Fault, daemons: &mut [Instance], trace: &Trace) -> Result<bool, String> {
        let count = daemons.len();
        let daemon = |random: &mut StdRng| random.random_range(0..count);
        match fault {
            Fault::Commands => {
                let faults = self.rates();
                trace.add(format_args!("{faults:?}"));
                let before = self.model.struck();
                self.model.afflict("denormd", faults);
                self.pause(200..1500).await;
                self.model.afflict("denormd", Faults::default());
                return Ok(self.model.struck() != before);
            }
            Fault::Election => self.election(trace).await,
            Fault::StaleMajority => {
                let known = self.model.majority();
                self.pause(20..500).await;
                self.election(trace).await;
                self.model.fall_behind(known);
                self.pause(50..800).await;
                self.model.replicate();
            }
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
            // Several times: one of them may fall into the middle of a transaction.
            Fault::StreamsKilled => {
                for _ in 0..self.random.random_range(1..=8) {
                    self.model.kill_streams();
                    self.pause(5..60).await;
                }
            }
            Fault::OplogExpired => self.model.shorten_oplog(),
            Fault::LeasesDeleted => return Ok(self.delete_leases().await),
            Fault::StateMarked => return Ok(self.mark_state().await),
            Fault::FanOutRecordedLate => return Ok(self.insert_late_fan_out().await),
            Fault::DaemonKilled | Fault::CheckpointsDeleted => {
                let nth = daemon(&mut self.random);
                let mut has_struck = daemons[nth].kill()?;
                if fault == Fault::CheckpointsDeleted {
                    has_struck = self.delete_all(POSITIONS).await;
                }
                self.restart(nth, daemons, trace).await;
                return Ok(has_struck);
            }
            Fault::DaemonStopped => {
                let nth = daemon(&mut self.random);
                daemons[nth].stop().await?;
                self.restart(nth, daemons, trace).await;
            }
            Fault::DaemonDisconnected => {
                let nth = daemon(&mut self.random);
                let has_struck = daemons[nth].disconnect();
                trace.add(format_args!("daemon {nth} is disconnected"));
                self.pause(300..4000).await;
                daemons[nth].connect();
                return Ok(has_struck);
            }
            Fault::Repartitioned => return self.repartition(daemons, trace).await,
            Fault::Operator => return self.ask(trace).await,
        }
        Ok(true)
    }

    /// Rolls out another number of partitions. If not all daemons get it, other faults strike while their numbers differ.
    /// Returns false if all of them have it already.
    async fn repartition(&mut self, daemons: &mut [Instance], trace: &Trace) -> Result<bool, String> {
        let partitions: u32 = self.random.random_range(1..=3);
        let has_struck = daemons.iter().any(|daemon| daemon.partitions != partitions);
        for nth in 0..self.random.random_range(1..=daemons.len()) {
            trace.add(format_args!("daemon {nth} is to have {partitions} partitions"));
            // A killed one leaves work undone.
            if self.random.random_bool(0.3) {
                daemons[nth].kill()?;
            } else {
                daemons[nth].stop().await?;
            }
            daemons[nth].partitions = partitions;
            self.restart(nth, daemons, trace).await;
        }
        Ok(has_struck)
    }

    async fn restart(&mut self, nth: usize, daemons: &mut [Instance], trace: &Trace) {
        self.pause(1..1000).await;
        trace.add(format_args!("daemon {nth} starts again"));
        daemons[nth].start();
    }

    /// An operator's request. Returns false if it fails, as it may during another fault, and an error if a request for a
    /// backfill ends a pause.
    async fn ask(&mut self, trace: &Trace) -> Result<bool, String> {
        let Some(rule) = self.rules.choose(&mut self.random) else { return Ok(false) };
        let pause = self.random.random_bool(0.5).then(|| Duration::from_millis(self.random.random_range(100..3000)));
        trace.add(format_args!("{rule}: {}", if pause.is_some() { "pause" } else { "backfill" }));
        let (server, database) = &self.operator;
        let Ok(store) = Store::open(server, database, "default").await else { return Ok(false) };
        if pause.is_none() {
            return Ok(store.ask(server, rule).await.unwrap_or(false));
        }
        if store.pause(server, rule, pause).await.is_err() {
            return Ok(false);
        }
        let before = self.pauses(rule).await;
        let is_recorded = before.len() == store.ids().len() && before.iter().all(|(_, is_paused, _)| *is_paused);
        if is_recorded && store.ask(server, rule).await.unwrap_or(false) {
            let after = self.pauses(rule).await;
            // If the pause has ended by itself in between, a state has changed twice.
            let once = |((id, _, before), (same, _, after)): (&Pause, &Pause)| {
                id == same && (0..2).contains(&(after - before))
            };
            if after.len() == before.len() && before.iter().zip(&after).all(once) {
                return Err(format!("a request for a backfill has ended the pause of {rule}: {before:?}, {after:?}"));
            }
        }
        Ok(true)
    }

    /// The records of a rule, one for each partition that has registered it.
    async fn pauses(&self, rule: &str) -> Vec<Pause> {
        let (_, database) = &self.operator;
        let find = doc! {"find": RULES, "filter": {"_id.rule": rule}, "sort": {"_id": 1}, "$db": database};
        let reply = self.model.run(find).await;
        let records = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        let records = records.into_iter().flatten().filter_map(Bson::as_document);
        let generation = |record: &Document| record.get_i64("generation").unwrap_or_default();
        let is_paused = |record: &Document| record.get_bool("paused").unwrap_or(false);
        records.map(|record| (record.get("_id").cloned(), is_paused(record), generation(record))).collect()
    }

    /// Deletes the leases one to four times, soon after they are there: an instance may not have claimed its term by then.
    /// Returns false if there were none.
    async fn delete_leases(&mut self) -> bool {
        let (begun, wanted, mut times) = (Instant::now(), self.random.random_range(1..=4), 0);
        while times < wanted && begun.elapsed() < UNTIL_TAKEN {
            times += i32::from(self.delete_all("leases").await);
            tokio::time::sleep(Duration::from_millis(self.random.random_range(1..20))).await;
        }
        times > 0
    }

    /// Deletes all documents of a collection of the state. Returns false if there were none.
    async fn delete_all(&self, collection: &str) -> bool {
        let (_, database) = &self.operator;
        let delete = doc! {"delete": collection, "deletes": [{"q": {}, "limit": 0}], "$db": database};
        self.model.run(delete).await.get_i32("n").is_ok_and(|deleted| deleted > 0)
    }

    /// Writes the term after the leader's into all or part of the state. Returns false if there is no state yet.
    async fn mark_state(&mut self) -> bool {
        let collections: &[&str] = match self.variants.random_range(0..5) {
            0..=1 => &[RULES],
            2 => &[POSITIONS],
            _ => &[POSITIONS, RULES],
        };
        let (_, database) = &self.operator;
        let mut marked = 0;
        for collection in collections {
            let mark = doc! {"q": {}, "u": {"$inc": {"term": 1_i64}}, "multi": true};
            let reply = self.model.run(doc! {"update": *collection, "updates": [mark], "$db": database}).await;
            marked += reply.get_i32("n").unwrap_or_default();
        }
        marked > 0
    }

    /// Inserts the record of a fan-out job as a delayed write would, after the job itself is done. The job has no targets: no document
    /// has its key. Returns false if no partition has registered the rule.
    async fn insert_late_fan_out(&mut self) -> bool {
        let (_, database) = &self.operator;
        let find = doc! {"find": RULES, "filter": {"_id.rule": "marker"}, "sort": {"_id": 1}, "$db": database};
        let reply = self.model.run(find).await;
        let records = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        let ids = records.into_iter().flatten().filter_map(|record| record.as_document()?.get_document("_id").ok());
        let ids: Vec<&Document> = ids.collect();
        let Some(id) = ids.choose(&mut self.variants) else { return false };
        let request = ObjectId::from_bytes(self.variants.random());
        let mut id = (*id).clone();
        id.extend(doc! {"task": "Value", "key": [request.to_hex()]});
        let job = doc! {"_id": id, "wish": request, "after": [], "term": 0_i64};
        let reply = self.model.run(doc! {"insert": fan_out::COLLECTION, "documents": [job], "$db": database}).await;
        reply.get_i32("n").is_ok_and(|inserted| inserted > 0)
    }

    fn rates(&mut self) -> Faults {
        let mut rate = |most: u32| if self.random.random() { self.random.random_range(0..most) } else { 0 };
        let (refused, cut_off, answer_lost, unconfirmed) = (rate(100), rate(50), rate(50), rate(100));
        let (delayed, cursors) = (rate(100), rate(100));
        // If command faults are favoured, many commands are delayed and others overtake them.
        let delayed = if self.favoured.contains(&Fault::Commands) { delayed + 200 } else { delayed };
        // After ten seconds a daemon no longer waits for a write of its state.
        let longest = match self.random.random_range(0..8) {
            0 => 15_000,
            1..=3 => 3000,
            _ => 100,
        };
        Faults { refused, cut_off, answer_lost, unconfirmed, delayed, longest, cursors }
    }

    async fn election(&mut self, trace: &Trace) {
        self.model.step_down();
        self.pause(20..300).await;
        self.primary = 1 - self.primary;
        let skew = self.random.random_range(-self.skew..self.skew);
        self.model.elect(self.primary, skew);
        trace.add(format_args!("member {} is the primary, its clock is {skew} ms ahead", self.primary));
    }
}
