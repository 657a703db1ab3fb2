//! Pending reconcile requests: coalesced, one run per key at a time, bounded.
//!
//! The queue decides nothing about documents. It guarantees: requests for a key that waits are merged; a request that
//! arrives while its key runs is kept and runs afterwards; the checkpoint does not pass the origin of a request until
//! it is done.
//!
//! # A full queue always empties
//!
//! The streams are not read while the queue is full. Architecture invariant: **nothing in the queue waits for an event
//! that is not read yet**, or a full queue would wait for itself. A key can stay here in these ways, each of which
//! ends:
//!
//! - *Ready*: lanes take turns, so it runs once the batches before it have ended.
//! - *Running*: every read and every write of a batch has a time limit.
//! - *Read for too long*: the keys of a large batch are divided into eighths, repeatedly, until a batch is small enough
//!   to tell which of its keys are slow.
//! - *Slow*: keys whose reads took too long take turns, one at a time. Each turn has a longer time limit, until the key
//!   is done or a dead letter.
//! - *Failed for now*: it is retried after a pause. It stays as long as the cluster refuses it, independently of
//!   events.
//! - *The source collection is gone*: the batch itself detects that and the rule is blocked, whether or not the event
//!   of the drop has been read.
//! - *A pause* (a grace period, a costly recompute): it ends by the clock.
//! - *A document of a tree, behind one that it reads*: the other one is in the queue as well, and the wait has a time
//!   limit ([`crate::reconcile::tree`]).
//! - *Lookups behind writes* ([`Task::Parents`]): they wait for batches that already run.
//! - *Work that shrinks by waiting for more events*: it waits only while the queue has room
//!   ([`crate::pipeline::schedule`]).
//! - *A target that the guard found to differ*: this one does wait for events, to distinguish drift from a change in
//!   progress. So such targets may fill only a part of the queue ([`WorkQueue::is_crowded_by_guard`]): beyond it they are
//!   settled as unconfirmed mismatches. Otherwise at least half of a full queue is other work, which makes room as it
//!   ends.
//!
//! Work that ends may request more (a lookup requests the targets that it found). It does so once, and each of these
//! is of the kinds above.

mod pending;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque, btree_map},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    checkpoint::watermark::Watermark,
    request::{Origin, Request, Scope, Task},
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_rules::plan::RuleId;

pub use pending::Pending;

/// Minimum number of keys in a batch, if that many are pending: a batch costs the same number of commands as a single
/// key.
const SMALL: usize = 50;
/// Time limit for the guard's verdict in a rule that is never idle, or on a target that other programs keep writing.
pub const LONGEST_UNCONFIRMED: Duration = Duration::from_secs(60);
/// Time after which a key that fails whenever it is tried is given up, if requests keep coming.
const LONGEST_FAILING: Duration = Duration::from_secs(60);
/// The failures in a row that this takes at least.
const FAILURES: u32 = 5;
/// Slow keys that are remembered after they are done.
const KNOWN_SLOW: usize = 10_000;
/// Outdated entries of `delayed` are removed once it holds this many more than twice the number of keys.
const OUTDATED: usize = 1000;

/// Identifies a key of the queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct QueueKey {
    lane: Lane,
    key: Key,
}

/// The rule and task of keys that can share a batch.
pub type Lane = (RuleId, Task);

/// All pending requests for one key.
#[derive(Debug, Clone, Default)]
pub struct Work {
    /// The targets that are meant.
    pub scope: Scope,
    /// The minimum cluster time of reads.
    pub after: ClusterTime,
    /// Wall time of the oldest event, in milliseconds since 1970.
    pub committed: Option<i64>,
    /// Failed attempts since the last request.
    pub attempts: u32,
    /// Its timeouts. Boxed: few of the many waiting keys have any.
    slowness: Option<Box<Slowness>>,
    /// True once the targets that lose their values by it are counted towards the removal limit.
    pub is_counted: bool,
    /// Time at which a reference was first found to dangle, for policies that remove, or a target to differ, for the
    /// guard. Each new request restarts this period.
    pub unconfirmed_since: Option<Instant>,
    /// Time at which the reference was first found to dangle, however many requests came after that.
    pub missing_since: Option<Instant>,
    /// The last mismatch that the guard found. Unlike `unconfirmed_since`, it outlives new requests, for its `since`.
    pub unconfirmed_mismatch: Option<Box<UnconfirmedMismatch>>,
    /// Time since which it waits for other documents of its tree.
    pub waits_since: Option<Instant>,
    /// The batches that its requests come from.
    origins: Origins,
}

/// The timeouts of a work, and the limits that follow from them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slowness {
    /// Time of the first of the failures in a row for which a write took too long or a privilege is missing, and their number,
    /// however many requests came after that.
    pub failing: Option<(Instant, u32)>,
    /// Time limit of its reads, if they have taken too long. Such a key is slow: it runs alone.
    pub read_limit: Option<Duration>,
    /// Maximum number of keys in a batch with this key, once a larger read has timed out.
    pub batch_keys: Option<usize>,
    /// Time at which its write was first restarted, because a statement for all of its targets took too long.
    pub restarted: Option<Instant>,
}

impl Slowness {
    fn or(self, other: Self) -> Self {
        Self {
            failing: self.failing.or(other.failing),
            read_limit: self.read_limit.or(other.read_limit),
            batch_keys: self.batch_keys.or(other.batch_keys),
            restarted: self.restarted.or(other.restarted),
        }
    }
}

/// The oldest batch of each stream from which a work comes; usually of one stream.
#[derive(Debug, Clone, Default)]
struct Origins(Vec<(usize, u64)>);

impl Origins {
    fn of(&mut self, stream: usize) -> Option<&mut u64> {
        self.0.iter_mut().find(|origin| origin.0 == stream).map(|origin| &mut origin.1)
    }
}

/// An unconfirmed mismatch: a target that was found to differ.
#[derive(Debug, Clone, Default)]
pub struct UnconfirmedMismatch {
    /// A number that distinguishes the difference from others.
    pub difference: u64,
    /// The time by which everything that it was computed from was committed.
    pub seen: ClusterTime,
    /// The current verdict on the difference.
    pub verdict: Verdict,
    /// Time at which the target was first found to differ, however many requests came after that.
    pub since: Option<Instant>,
}

/// The guard's verdict on a target that differs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// A change that explains the difference may still have to be applied: the target is compared again later.
    #[default]
    Postponed,
    /// Every change up to the comparison is applied: the target was written by someone else.
    Drift,
    /// Undecided. The events that would decide are not read until the queue has room, and such targets fill the queue; or the
    /// target has been written again and again for longer than [`LONGEST_UNCONFIRMED`].
    Unconfirmed,
}

#[derive(Debug, Default)]
struct Entry {
    /// The next work on the key.
    pending: Option<Work>,
    /// The work after that. Few keys have any.
    later: Option<Box<Later>>,
    /// The origins of the work that a batch currently does on the key.
    running: Option<Origins>,
    /// True if the key is in its lane because of `pending`.
    in_lane: bool,
    /// `pending` waits until this time.
    not_before: Option<Instant>,
    /// The wait protects other keys: a new request does not end it.
    cooling: bool,
    /// Batches with a lower number must end first ([`Task::Parents`]).
    barrier: u64,
    /// Commit time of the oldest change that the key waits or runs for, as counted by [`Oldest`].
    since: Option<i64>,
}

/// Work that was requested while the work before it waits for earlier writes.
#[derive(Debug, Default)]
struct Later {
    work: Option<Work>,
    /// Batches with a lower number must end first.
    barrier: u64,
}

/// Keys to reconcile together.
#[derive(Debug)]
pub struct Batch {
    /// Rule and task.
    pub lane: Lane,
    /// The keys, each with the requested work.
    pub items: Vec<(Key, Work)>,
    /// The number of the batch, counted from 1.
    pub number: u64,
}

/// The limits of one batch.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    /// Maximum number of keys; about four times as many named targets are allowed.
    pub keys: usize,
    /// Number of batches that run at once. They share the waiting keys: one that took all of them would leave none for
    /// the others.
    pub batches: usize,
    /// True if all batches are running: only a rule without a running batch may start another.
    pub all_running: bool,
}

/// The result of one key's run.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum Finish {
    /// Nothing is left to do. Requests for the key during the pause wait for its end: a costly recompute is not
    /// repeated for each event.
    Done {
        /// The pause before the next run.
        pause: Duration,
    },
    /// To be done again after a delay.
    Again {
        /// The delay.
        delay: Duration,
        /// The work to repeat.
        work: Work,
    },
}

/// The pending and running requests, by key.
#[derive(Debug, Default)]
pub struct WorkQueue {
    /// Boxed: an entry has several hundred bytes, and up to half of a table's slots are empty.
    entries: HashMap<QueueKey, Box<Entry>>,
    lanes: BTreeMap<Lane, VecDeque<Key>>,
    slow: Slow,
    /// The lane that was served last.
    turn: Option<Lane>,
    delayed: BinaryHeap<Reverse<Delayed>>,
    weights: Weights,
    capacity: usize,
    /// Batches taken so far.
    taken: u64,
    /// The running batches that write, by rule.
    writing: BTreeMap<RuleId, BTreeSet<u64>>,
    /// Number of running batches of each rule that has any.
    running: BTreeMap<RuleId, usize>,
    /// For each rule, the number of keys that wait, run or pause for another task than the guard's.
    reconciling: BTreeMap<RuleId, usize>,
    /// Number of the guard's keys, of all rules.
    guarded: usize,
    oldest: Oldest,
    /// The recursive rules, whose keys are recorded in `pending`.
    trees: BTreeSet<RuleId>,
    pending: Arc<Pending>,
}

/// Keys whose reads took too long. One of them runs at a time, so that the other batches serve other keys.
#[derive(Debug, Default)]
struct Slow {
    /// Slow keys that are ready, of all lanes.
    ready: VecDeque<QueueKey>,
    /// The running batch of a slow key.
    running: Option<u64>,
    /// The last batch of a slow key.
    last: u64,
    /// Read limits of keys that were slow when they were last done, so that a key that changes often does not slow down
    /// a batch of other keys each time.
    known: HashMap<QueueKey, Duration>,
}

impl Slow {
    fn remember(&mut self, queue_key: &QueueKey, limit: Option<Duration>) {
        match limit {
            Some(limit) if self.known.len() < KNOWN_SLOW && queue_key.key.weight() < 1024 => {
                self.known.insert(queue_key.clone(), limit);
            }
            // A key that is not remembered is found to be slow again.
            _ => drop(self.known.remove(queue_key)),
        }
    }
}

/// For each rule, the number of keys that wait or run, by the commit time of their oldest change.
#[derive(Debug, Default)]
struct Oldest {
    rules: BTreeMap<RuleId, BTreeMap<i64, usize>>,
    /// The sum of these counts for each rule.
    keys: BTreeMap<RuleId, usize>,
}

impl Oldest {
    fn replace(&mut self, rule: RuleId, from: Option<i64>, to: Option<i64>) -> Option<i64> {
        if from != to {
            let counts = self.rules.entry(rule).or_default();
            if let Some(count) = from.and_then(|from| counts.get_mut(&from)) {
                *count -= 1;
            }
            if let Some(from) = from.filter(|from| counts.get(from) == Some(&0)) {
                counts.remove(&from);
            }
            if let Some(to) = to {
                *counts.entry(to).or_default() += 1;
            }
            let keys = self.keys.entry(rule).or_default();
            *keys = (*keys + usize::from(to.is_some())).saturating_sub(usize::from(from.is_some()));
        }
        to
    }
}

/// Requests in the queue, counting named targets; a large key counts once for each KiB.
#[derive(Debug, Default)]
struct Weights {
    all: usize,
    /// The part that is work that writes.
    writing: usize,
}

impl Weights {
    fn adjust(&mut self, lane: Lane, more: usize, less: usize) {
        self.all = (self.all + more).saturating_sub(less);
        if writes(lane.1) {
            self.writing = (self.writing + more).saturating_sub(less);
        }
    }
}

fn weight(key: &Key, scope: &Scope) -> usize {
    scope.weight() + key.weight() / 1024
}

#[derive(Debug, PartialEq, Eq)]
struct Delayed {
    at: Instant,
    queue_key: QueueKey,
}

impl PartialOrd for Delayed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Delayed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl WorkQueue {
    /// An empty queue that is full with `capacity` requests.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Records the keys of these recursive rules in `pending`, from now on.
    pub fn record(&mut self, trees: BTreeSet<RuleId>, pending: Arc<Pending>) {
        pending.clear();
        (self.trees, self.pending) = (trees, pending);
    }

    /// Records that the requests of an event on this document are in the queue.
    pub fn routed(&self, rules: impl Iterator<Item = RuleId>, document: &Key) {
        rules.filter(|rule| self.trees.contains(rule)).for_each(|rule| self.pending.routed(rule, document));
    }

    /// True if a rule is recursive.
    #[must_use]
    pub fn has_trees(&self) -> bool {
        !self.trees.is_empty()
    }

    /// True if the key is a document of a tree that may be about to be written.
    fn is_recorded(&self, (rule, task): Lane) -> bool {
        task != Task::Guard && self.trees.contains(&rule)
    }

    /// True if a target of `rule` that differs may be about to be written.
    #[must_use]
    pub fn is_reconciling(&self, rule: RuleId) -> bool {
        self.reconciling.get(&rule).is_some_and(|keys| *keys > 0)
    }

    /// True if the queue is full and the guard has more than a quarter of it. A key of the guard weighs two at most (it
    /// runs, and is requested again), so a full queue is either crowded, or half of it is other work, which makes room
    /// as it is done.
    #[must_use]
    pub fn is_crowded_by_guard(&self) -> bool {
        !self.has_room() && self.guarded > self.capacity / 4
    }

    /// The rules with a running batch that writes. The batch of a slow key does not count: it reads most of the time.
    pub fn writing(&self) -> impl Iterator<Item = RuleId> {
        let ordinary = |batch: &u64| Some(*batch) != self.slow.running;
        self.writing.iter().filter(move |(_, batches)| batches.iter().any(ordinary)).map(|(rule, _)| *rule)
    }

    /// The rules with a running batch.
    pub fn running(&self) -> impl Iterator<Item = RuleId> {
        self.running.keys().copied()
    }

    /// The number of keys in the queue for the guard, or for the other tasks of a rule.
    fn count(&mut self, (rule, task): Lane) -> &mut usize {
        if task == Task::Guard { &mut self.guarded } else { self.reconciling.entry(rule).or_default() }
    }

    fn remove(&mut self, queue_key: &QueueKey) {
        if self.entries.remove(queue_key).is_some() {
            let keys = self.count(queue_key.lane);
            *keys = keys.saturating_sub(1);
            if self.is_recorded(queue_key.lane) {
                self.pending.left(queue_key.lane.0, &queue_key.key);
            }
        }
    }

    /// True if the streams may deliver more. Requests beyond the capacity are still taken: nothing is ever dropped.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.weights.all < self.capacity
    }

    /// True if the work that writes alone fills the queue.
    #[must_use]
    pub fn is_full_of_writes(&self) -> bool {
        self.weights.writing >= self.capacity
    }

    /// Requests in the queue: waiting and running keys, counting named targets.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.weights.all
    }

    /// Commit time of the oldest change that a key of `rule` waits or runs for, in milliseconds since 1970.
    #[must_use]
    pub fn oldest(&self, rule: RuleId) -> Option<i64> {
        self.oldest.rules.get(&rule)?.first_key_value().map(|(committed, _)| *committed)
    }

    /// Number of keys of `rule` that wait or run because of a change.
    #[must_use]
    pub fn late(&self, rule: RuleId) -> usize {
        self.oldest.keys.get(&rule).copied().unwrap_or_default()
    }

    /// Number of keys of all rules that wait or run because of a change.
    #[must_use]
    pub fn all_late(&self) -> usize {
        self.oldest.keys.values().sum()
    }

    /// Number of keys that wait or run.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.entries.len()
    }

    /// True if nothing waits and nothing runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of keys that wait to be taken, in the lanes for whose first key `such` returns true.
    #[must_use]
    pub fn waiting(&self, such: impl Fn(Lane, &Scope) -> bool) -> usize {
        let chosen = self.lanes.iter().filter(|(lane, _)| self.first(**lane).is_some_and(|scope| such(**lane, scope)));
        chosen.map(|(_, keys)| keys.len()).sum()
    }

    /// The requested scope of the first key of a lane.
    fn first(&self, lane: Lane) -> Option<&Scope> {
        let key = self.lanes.get(&lane)?.front()?.clone();
        Some(&self.entries.get(&QueueKey { lane, key })?.pending.as_ref()?.scope)
    }

    /// Takes a request; `watermark` does not pass its origin until it is done.
    pub fn push(&mut self, request: Request, origin: Origin, watermark: &mut Watermark) {
        let work = Work { scope: request.scope, after: origin.after, committed: origin.committed, ..Work::default() };
        let queue_key = QueueKey { lane: (request.rule, request.task), key: request.key };
        if !self.entries.contains_key(&queue_key) {
            *self.count(queue_key.lane) += 1;
            if self.is_recorded(queue_key.lane) {
                self.pending.entered(queue_key.lane.0, &queue_key.key);
            }
        }
        let (oldest_write, barrier) = (self.oldest_write(request.rule), self.taken + 1);
        let entry = self.entries.entry(queue_key.clone()).or_default();
        // With a later barrier, work that waits already would have to wait longer: for ever, if the source keeps changing.
        let comes_later = entry.in_lane && request.task == Task::Parents && oldest_write < barrier;
        let (slot, slot_barrier) = if comes_later {
            let later = entry.later.get_or_insert_default();
            (&mut later.work, &mut later.barrier)
        } else {
            (&mut entry.pending, &mut entry.barrier)
        };
        let before = slot.as_ref().map_or(0, |work| weight(&queue_key.key, &work.scope));
        let work = match slot.take() {
            Some(pending) => pending.merge(work),
            None => match self.slow.known.get(&queue_key) {
                Some(limit) => work.with_slowness(Slowness { read_limit: Some(*limit), ..Slowness::default() }),
                None => work,
            },
        };
        let work = work.with_origin(origin, watermark);
        self.weights.adjust(queue_key.lane, weight(&queue_key.key, &work.scope), before);
        *slot = Some(work);
        *slot_barrier = barrier;
        entry.since = self.oldest.replace(request.rule, entry.since, earliest(entry.since, origin.committed));
        if entry.cooling {
            return;
        }
        entry.not_before = None;
        self.enter(queue_key);
    }

    /// Puts a key with pending work into its lane, unless it runs or is there already.
    fn enter(&mut self, queue_key: QueueKey) {
        let Some(entry) = self.entries.get_mut(&queue_key) else { return };
        let Some(work) = entry.pending.as_ref().filter(|_| entry.running.is_none() && !entry.in_lane) else { return };
        entry.in_lane = true;
        if work.slowness().read_limit.is_some() {
            self.slow.ready.push_back(queue_key);
        } else {
            self.lanes.entry(queue_key.lane).or_default().push_back(queue_key.key);
        }
    }

    /// The next keys to run together, from a lane for which `open` returns true; it receives the scope of the lane's
    /// first key. None when nothing is ready.
    ///
    /// A slow key runs alone, and no other slow key runs at the same time. If there is only one batch at a time, slow
    /// keys and others take turns.
    pub fn take(&mut self, limits: BatchLimits, now: Instant, open: impl Fn(Lane, &Scope) -> bool) -> Option<Batch> {
        self.wake(now);
        let (lane, items) = if self.slow.last == self.taken {
            self.take_ordinary(limits, &open).or_else(|| self.take_slow(&open))?
        } else {
            self.take_slow(&open).or_else(|| self.take_ordinary(limits, &open))?
        };
        self.taken += 1;
        *self.running.entry(lane.0).or_default() += 1;
        if writes(lane.1) {
            self.writing.entry(lane.0).or_default().insert(self.taken);
        }
        if items.iter().any(|(_, work)| work.slowness().read_limit.is_some()) {
            (self.slow.running, self.slow.last) = (Some(self.taken), self.taken);
        }
        Some(Batch { lane, items, number: self.taken })
    }

    fn take_ordinary(
        &mut self,
        limits: BatchLimits,
        open: &impl Fn(Lane, &Scope) -> bool,
    ) -> Option<(Lane, Vec<(Key, Work)>)> {
        for _ in 0..self.lanes.len() {
            let lane = self.next_lane()?;
            self.turn = Some(lane);
            if self.first(lane).is_some_and(|scope| !open(lane, scope)) {
                continue;
            }
            let items = self.take_from(lane, limits);
            if !items.is_empty() {
                return Some((lane, items));
            }
        }
        None
    }

    /// The first slow key, if none is running. A key that has to wait goes to the end.
    fn take_slow(&mut self, open: &impl Fn(Lane, &Scope) -> bool) -> Option<(Lane, Vec<(Key, Work)>)> {
        if self.slow.running.is_some() {
            return None;
        }
        let queue_key = self.slow.ready.pop_front()?;
        let oldest_write = self.oldest_write(queue_key.lane.0);
        let entry = self.entries.get_mut(&queue_key)?;
        if entry.is_barred(queue_key.lane.1, oldest_write)
            || entry.pending.as_ref().is_some_and(|work| !open(queue_key.lane, &work.scope))
        {
            self.slow.ready.push_back(queue_key);
            return None;
        }
        let work = entry.begin()?;
        Some((queue_key.lane, vec![(queue_key.key, work)]))
    }

    /// The oldest running batch of a rule that writes.
    fn oldest_write(&self, rule: RuleId) -> u64 {
        self.writing.get(&rule).and_then(BTreeSet::first).copied().unwrap_or(u64::MAX)
    }

    fn take_from(&mut self, lane: Lane, limits: BatchLimits) -> Vec<(Key, Work)> {
        let oldest_write = self.oldest_write(lane.0);
        let mut items = Vec::new();
        let mut weight = 0;
        let Some(waiting) = self.lanes.get_mut(&lane) else { return items };
        let mut keys = waiting.len().div_ceil(limits.batches).max(SMALL).min(limits.keys);
        while let Some(key) = waiting.pop_front() {
            let queue_key = QueueKey { lane, key };
            let Some(entry) = self.entries.get_mut(&queue_key) else { continue };
            if entry.is_barred(lane.1, oldest_write) {
                waiting.push_front(queue_key.key);
                break;
            }
            let max_keys = entry.pending.as_ref().map_or(usize::MAX, Work::max_batch_keys);
            if items.len() >= max_keys {
                waiting.push_front(queue_key.key);
                break;
            }
            keys = keys.min(max_keys);
            let Some(work) = entry.begin() else { continue };
            weight += work.scope.weight();
            items.push((queue_key.key, work));
            if items.len() >= keys || weight >= limits.keys.saturating_mul(4) {
                break;
            }
        }
        if waiting.is_empty() {
            self.lanes.remove(&lane);
        }
        items
    }

    /// Records that a batch has ended, before its keys are finished one by one.
    pub fn ended(&mut self, lane: Lane, number: u64) {
        if let Some(writing) = self.writing.get_mut(&lane.0) {
            writing.remove(&number);
        }
        if let btree_map::Entry::Occupied(mut running) = self.running.entry(lane.0) {
            *running.get_mut() -= 1;
            if *running.get() == 0 {
                running.remove();
            }
        }
        self.slow.running.take_if(|running| *running == number);
    }

    /// Records the time limit of a key's next read, before the run of the key is finished.
    pub fn set_read_limit(&mut self, lane: Lane, key: &Key, read_limit: Option<Duration>) {
        if read_limit.is_none() && self.slow.known.is_empty() {
            return;
        }
        let queue_key = QueueKey { lane, key: key.clone() };
        self.slow.remember(&queue_key, read_limit);
        if let Some(pending) = self.entries.get_mut(&queue_key).and_then(|entry| entry.pending.as_mut()) {
            match read_limit {
                Some(_) => pending.slowness_mut().read_limit = read_limit,
                None => pending.clear_read_limit(),
            }
        }
    }

    /// The lane after the one that was served last.
    fn next_lane(&self) -> Option<Lane> {
        let after = self.turn.and_then(|turn| {
            self.lanes
                .range((std::ops::Bound::Excluded(turn), std::ops::Bound::Unbounded))
                .next()
                .map(|(lane, _)| *lane)
        });
        after.or_else(|| self.lanes.keys().next().copied())
    }

    /// Records the result of a key's run. `taken` is the weight of its scope when it was taken.
    pub fn finish(
        &mut self,
        lane: Lane,
        key: Key,
        taken: usize,
        finish: Finish,
        now: Instant,
        watermark: &mut Watermark,
    ) {
        let queue_key = QueueKey { lane, key };
        let Some(entry) = self.entries.get_mut(&queue_key) else { return };
        let origins = entry.running.take().unwrap_or_default();
        let waits = entry.pending.as_ref().and_then(|work| work.committed);
        let goes_on = match &finish {
            Finish::Done { .. } => waits,
            Finish::Again { work, .. } => earliest(waits, work.committed),
        };
        entry.since = self.oldest.replace(lane.0, entry.since, goes_on);
        self.weights.adjust(lane, 0, taken + queue_key.key.weight() / 1024);
        match finish {
            Finish::Done { pause } => {
                for (stream, batch) in origins.0 {
                    watermark.release(stream, batch);
                }
                if let Some(at) = now.checked_add(pause).filter(|_| !pause.is_zero()) {
                    entry.not_before = Some(at);
                    entry.cooling = true;
                    self.delayed.push(Reverse(Delayed { at, queue_key }));
                    return;
                }
            }
            Finish::Again { delay, mut work } => {
                work.origins = origins;
                // A request that arrived in the meantime ends the wait: something has changed.
                let at = if entry.pending.is_none() { now.checked_add(delay) } else { None };
                let before = entry.pending.as_ref().map_or(0, |work| weight(&queue_key.key, &work.scope));
                let work = match entry.pending.take() {
                    Some(pending) => work.merge_with_origins(pending, watermark),
                    None => work,
                };
                self.weights.adjust(lane, weight(&queue_key.key, &work.scope), before);
                entry.pending = Some(work);
                entry.not_before = at;
                if let Some(at) = at {
                    self.delayed.push(Reverse(Delayed { at, queue_key }));
                    return;
                }
            }
        }
        if entry.pending.is_none() {
            self.remove(&queue_key);
        } else {
            self.enter(queue_key);
        }
    }

    /// Time at which the next delayed key is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.delayed.peek().map(|Reverse(delayed)| delayed.at)
    }

    fn wake(&mut self, now: Instant) {
        // A request that ends the wait of a key leaves the entry of that wait behind, so a grace period may collect one for each
        // request.
        if self.delayed.len() > 2 * self.entries.len() + OUTDATED {
            let entries = &self.entries;
            let is_awaited = |delayed: &Delayed| {
                entries.get(&delayed.queue_key).is_some_and(|entry| entry.not_before == Some(delayed.at))
            };
            self.delayed.retain(|Reverse(delayed)| is_awaited(delayed));
        }
        while self.delayed.peek().is_some_and(|Reverse(delayed)| delayed.at <= now) {
            let Some(Reverse(Delayed { queue_key, .. })) = self.delayed.pop() else { return };
            let Some(entry) = self.entries.get_mut(&queue_key) else { continue };
            if entry.not_before.is_none_or(|at| at > now) {
                continue;
            }
            entry.not_before = None;
            entry.cooling = false;
            if entry.pending.is_none() && entry.running.is_none() {
                self.remove(&queue_key);
                continue;
            }
            self.enter(queue_key);
        }
    }
}

impl Entry {
    /// True if a write that began earlier may still put the source into a target.
    fn is_barred(&self, task: Task, oldest_write: u64) -> bool {
        task == Task::Parents && oldest_write < self.barrier
    }

    /// Takes the key out of its lane and starts its work.
    fn begin(&mut self) -> Option<Work> {
        self.in_lane = false;
        // A delay began after it entered the lane: the end of the delay puts it in again.
        if self.not_before.is_some() || self.running.is_some() {
            return None;
        }
        let work = self.pending.take()?;
        if let Some(later) = self.later.take() {
            (self.pending, self.barrier) = (later.work, later.barrier);
        }
        self.running = Some(work.origins.clone());
        Some(work)
    }
}

/// True if a task writes to targets; the others only read.
fn writes(task: Task) -> bool {
    match task {
        Task::Value | Task::Target => true,
        Task::LocateSource | Task::LocateTarget | Task::Parents | Task::Holders | Task::Bucket | Task::Guard => false,
    }
}

impl Work {
    /// Its timeouts.
    #[must_use]
    pub fn slowness(&self) -> Slowness {
        self.slowness.as_deref().copied().unwrap_or_default()
    }

    /// Mutable access to its timeouts.
    pub fn slowness_mut(&mut self) -> &mut Slowness {
        self.slowness.get_or_insert_default()
    }

    /// The same work with this slowness.
    #[must_use]
    pub fn with_slowness(self, slowness: Slowness) -> Self {
        Self { slowness: Some(Box::new(slowness)), ..self }
    }

    /// True if each attempt has failed for so long that the number of attempts no longer matters: a key may be requested
    /// more often than it fails.
    #[must_use]
    pub fn has_failed_for_long(&self) -> bool {
        self.slowness()
            .failing
            .is_some_and(|(since, failures)| failures >= FAILURES && since.elapsed() > LONGEST_FAILING)
    }

    /// Counts a failure of an attempt. One that passes by itself (not `lasting`) ends the row.
    pub fn fails(&mut self, lasting: bool) {
        self.attempts += 1;
        let (since, failures) = self.slowness().failing.unwrap_or_else(|| (Instant::now(), 0));
        if lasting {
            self.slowness_mut().failing = Some((since, failures + 1));
        } else {
            self.clear_failures();
        }
    }

    /// Forgets that its write was restarted, because another write follows.
    pub fn clear_restart(&mut self) {
        if let Some(slowness) = &mut self.slowness {
            slowness.restarted = None;
        }
    }

    /// Removes the limit of its reads.
    pub fn clear_read_limit(&mut self) {
        if let Some(slowness) = &mut self.slowness {
            slowness.read_limit = None;
        }
    }

    /// Resets the series of failures.
    pub fn clear_failures(&mut self) {
        if let Some(slowness) = &mut self.slowness {
            slowness.failing = None;
        }
    }

    /// Maximum number of keys in a batch with this one.
    fn max_batch_keys(&self) -> usize {
        // A restarted statement takes seconds, for which other keys of the batch would wait.
        let Slowness { restarted, batch_keys, .. } = self.slowness();
        if restarted.is_some() { 1 } else { batch_keys.unwrap_or(usize::MAX) }
    }

    /// Merges two works on one key; the newer one has no origins yet.
    fn merge(mut self, newer: Self) -> Self {
        self.scope.merge(newer.scope);
        self.after = self.after.max(newer.after);
        self.committed = earliest(self.committed, newer.committed);
        self.attempts = 0;
        self.slowness = match (self.slowness, newer.slowness) {
            (Some(own), Some(newer)) => Some(Box::new(own.or(*newer))),
            (own, newer) => own.or(newer),
        };
        self.is_counted &= newer.is_counted;
        self.unconfirmed_since = None;
        self.unconfirmed_mismatch = self.unconfirmed_mismatch.or(newer.unconfirmed_mismatch);
        self.missing_since = self.missing_since.or(newer.missing_since);
        self.waits_since = self.waits_since.or(newer.waits_since);
        self
    }

    /// Merges two works on one key, and their origins.
    fn merge_with_origins(mut self, newer: Self, watermark: &mut Watermark) -> Self {
        for (stream, batch) in &newer.origins.0 {
            match self.origins.of(*stream) {
                // Of two batches the older one is enough: the low watermark cannot pass it.
                Some(mine) if *mine <= *batch => watermark.release(*stream, *batch),
                Some(mine) => watermark.release(*stream, std::mem::replace(mine, *batch)),
                None => self.origins.0.push((*stream, *batch)),
            }
        }
        self.merge(newer)
    }

    fn with_origin(mut self, origin: Origin, watermark: &mut Watermark) -> Self {
        match self.origins.of(origin.stream) {
            // The result of a lookup comes from a batch that may be older than the key's current origin.
            Some(oldest) if origin.batch < *oldest => {
                watermark.hold(origin.stream, origin.batch);
                watermark.release(origin.stream, std::mem::replace(oldest, origin.batch));
            }
            Some(_) => {}
            None => {
                watermark.hold(origin.stream, origin.batch);
                // Usually there is one origin; a vector would start with room for four.
                self.origins.0.reserve_exact(1);
                self.origins.0.push((origin.stream, origin.batch));
            }
        }
        self
    }
}

/// The origins of a batch's works taken together: the oldest batch of each stream. For the requests that the works lead
/// to.
#[must_use]
pub fn origins<'a>(works: impl Iterator<Item = &'a Work>) -> Vec<Origin> {
    let mut streams: BTreeMap<usize, Origin> = BTreeMap::new();
    let (mut after, mut committed) = (ClusterTime::default(), None);
    for work in works {
        after = after.max(work.after);
        committed = earliest(committed, work.committed);
        for (stream, batch) in &work.origins.0 {
            let origin = Origin { stream: *stream, batch: *batch, after, committed };
            streams.entry(*stream).and_modify(|known| known.batch = known.batch.min(*batch)).or_insert(origin);
        }
    }
    streams.into_values().map(|origin| Origin { after, committed, ..origin }).collect()
}

fn earliest(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use bson::Bson;

    use super::*;
    use denormd_model::position::Position;

    const LANE: Lane = (RuleId(0), Task::Value);

    /// A queue with its watermark and its own clock.
    struct Bench {
        queue: WorkQueue,
        watermark: Watermark,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Self { queue: WorkQueue::new(10), watermark: Watermark::default(), now: Instant::now() }
        }

        fn push(&mut self, task: Task, key: i32, scope: Scope, batch: u64) {
            let request = Request { rule: RuleId(0), task, key: Key::one(Bson::Int32(key)), scope };
            let after = ClusterTime { seconds: u32::try_from(batch).unwrap(), increment: 1 };
            let origin = Origin { stream: 0, batch, after, committed: None };
            self.queue.push(request, origin, &mut self.watermark);
        }

        fn routed(&mut self, batch: u64) {
            let time = ClusterTime { seconds: u32::try_from(batch).unwrap(), increment: 1 };
            self.watermark.routed(0, batch, Position { time, token: None });
        }

        fn take(&mut self) -> Option<Batch> {
            self.queue.take(BatchLimits { keys: 100, batches: 1, all_running: false }, self.now, |_, _| true)
        }

        fn keys(&mut self) -> Vec<i32> {
            let items = self.take().map(|batch| batch.items).unwrap_or_default();
            items.iter().filter_map(|(key, _)| key.values()[0].as_i32()).collect()
        }

        fn finish(&mut self, batch: Batch, finish: impl Fn(Work) -> Finish) {
            self.queue.ended(batch.lane, batch.number);
            for (key, work) in batch.items {
                let weight = work.scope.weight();
                let finish = finish(work);
                let limit = if let Finish::Again { work, .. } = &finish { work.slowness().read_limit } else { None };
                self.queue.set_read_limit(batch.lane, &key, limit);
                self.queue.finish(batch.lane, key, weight, finish, self.now, &mut self.watermark);
            }
        }

        fn done(&mut self, batch: Batch) {
            self.finish(batch, |_| Finish::Done { pause: Duration::ZERO });
        }

        fn frontier(&self) -> Option<u32> {
            self.watermark.frontier(0).map(|position| position.time.seconds)
        }
    }

    fn named(ids: &[i32]) -> Scope {
        Scope::Named(ids.iter().map(|id| Key::one(Bson::Int32(*id))).collect::<HashSet<_>>())
    }

    /// The parents of a source that went on changing were never looked up while writes of the rule overlapped.
    #[test]
    fn a_new_request_does_not_hold_up_one_that_waits_for_writes() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let first = bench.take().unwrap();
        bench.push(Task::Parents, 9, Scope::All, 2);
        bench.push(Task::Value, 2, Scope::All, 3);
        let second = bench.take().unwrap();
        assert_eq!(second.lane.1, Task::Value);
        bench.push(Task::Parents, 9, Scope::All, 4);
        assert!(bench.take().is_none());
        bench.done(first);
        let parents = bench.take().unwrap();
        assert_eq!(parents.lane.1, Task::Parents);
        bench.routed(2);
        bench.done(parents);
        assert!(bench.take().is_none(), "the later request waits for the second write");
        bench.done(second);
        assert_eq!(bench.keys(), [9]);
    }

    /// A hundred thousand keys may wait: with 320 bytes for each entry, the next size of the allocator, the queue took 6 MB more.
    #[test]
    fn an_entry_is_small() {
        assert!(size_of::<Entry>() <= 256, "{} bytes", size_of::<Entry>());
    }

    /// A key that changed more often than it failed was tried for ever, and never became a dead letter.
    #[test]
    fn a_new_request_does_not_hide_how_long_a_key_fails() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let batch = bench.take().unwrap();
        bench.push(Task::Value, 1, Scope::All, 1);
        bench.finish(batch, |mut work| {
            work.fails(true);
            Finish::Again { work, delay: Duration::ZERO }
        });
        bench.push(Task::Value, 1, Scope::All, 1);
        let mut work = bench.take().unwrap().items.remove(0).1;
        assert_eq!(work.slowness().failing.map(|(_, failures)| failures), Some(1));
        work.fails(false);
        assert_eq!(work.slowness().failing, None, "an outage");
    }

    /// A restarted key takes seconds: it shares its batch with no other key, and is not lost behind the others.
    #[test]
    fn a_key_that_is_begun_anew_has_a_batch_of_its_own() {
        let mut bench = Bench::new();
        for key in [1, 2] {
            bench.push(Task::Value, key, Scope::All, 1);
        }
        bench.routed(1);
        let batch = bench.take().unwrap();
        assert_eq!(batch.items.len(), 2);
        let now = bench.now;
        let restarted = Slowness { restarted: Some(now), ..Slowness::default() };
        bench.finish(batch, |work| Finish::Again { work: work.with_slowness(restarted), delay: Duration::ZERO });
        bench.push(Task::Value, 3, Scope::All, 2);
        bench.push(Task::Value, 4, Scope::All, 2);
        let mut batches = Vec::new();
        while let Some(batch) = bench.take() {
            batches.push(batch.items.len());
            bench.done(batch);
        }
        batches.sort_unstable();
        assert_eq!(batches, [1, 1, 2]);
    }

    /// All keys of a large batch once became slow keys when it took too long, and ran one at a time.
    #[test]
    fn keys_that_take_too_long_together_are_done_fewer_at_once() {
        let mut bench = Bench::new();
        for key in 0..30 {
            bench.push(Task::Value, key, Scope::All, 1);
        }
        let batch = bench.take().unwrap();
        let few = Slowness { batch_keys: Some(12), ..Slowness::default() };
        bench.finish(batch, |work| Finish::Again { work: work.with_slowness(few), delay: Duration::ZERO });
        for key in 30..70 {
            bench.push(Task::Value, key, Scope::All, 2);
        }
        bench.push(Task::Value, 0, Scope::All, 2);
        let mut batches = Vec::new();
        while let Some(batch) = bench.take() {
            let few = batch.items.iter().filter(|(_, work)| work.slowness().batch_keys.is_some()).count();
            batches.push((few, batch.items.len()));
        }
        assert!(batches.iter().all(|(few, keys)| *few == 0 || *keys <= 12), "{batches:?}");
        assert_eq!(batches.iter().map(|(few, _)| few).sum::<usize>(), 30);
        assert_eq!(batches.iter().map(|(_, keys)| keys).sum::<usize>(), 70);
        assert!(batches.contains(&(0, 40)), "others are not divided: {batches:?}");
    }

    /// Three keys whose reads took too long every time once occupied all batches.
    #[test]
    fn slow_keys_run_alone_and_one_at_a_time_beside_others() {
        let mut bench = Bench::new();
        for key in 1..=3 {
            bench.push(Task::Value, key, Scope::All, 1);
        }
        let batch = bench.take().unwrap();
        let limit = Slowness { read_limit: Some(Duration::from_secs(1)), ..Slowness::default() };
        let slow = |work: Work| Finish::Again { work: work.with_slowness(limit), delay: Duration::ZERO };
        bench.finish(batch, slow);
        for key in [4, 5] {
            bench.push(Task::Value, key, Scope::All, 2);
        }
        let running = bench.take().unwrap();
        assert_eq!(running.items.len(), 1, "a slow key alone");
        assert_eq!(bench.keys(), [4, 5], "others beside it");
        assert!(bench.take().is_none(), "and no other slow key");
        bench.push(Task::Value, 6, Scope::All, 3);
        let first = running.items[0].0.clone();
        bench.finish(running, slow);
        let next = bench.take().unwrap();
        assert!(next.items.len() == 1 && next.items[0].0 != first, "each slow key has its turn");
        bench.finish(next, slow);
        bench.push(Task::Value, 7, Scope::All, 4);
        assert_eq!(bench.keys(), [6, 7], "where there is one batch at a time, others are next");
    }

    #[test]
    fn a_slow_key_is_remembered_until_it_is_done_in_a_short_time() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let batch = bench.take().unwrap();
        bench.queue.ended(LANE, batch.number);
        bench.push(Task::Value, 1, Scope::All, 2);
        let limit = Some(Duration::from_secs(9));
        let done = || Finish::Done { pause: Duration::ZERO };
        let key = Key::one(Bson::Int32(1));
        bench.queue.set_read_limit(LANE, &key, limit);
        bench.queue.finish(LANE, key.clone(), 1, done(), bench.now, &mut bench.watermark);
        let batch = bench.take().unwrap();
        assert_eq!(batch.items[0].1.slowness().read_limit, limit, "what was asked for while it ran");
        bench.queue.ended(LANE, batch.number);
        bench.queue.set_read_limit(LANE, &key, limit);
        bench.queue.finish(LANE, key, 1, done(), bench.now, &mut bench.watermark);
        assert!(bench.queue.is_empty());
        bench.push(Task::Value, 1, Scope::All, 3);
        let batch = bench.take().unwrap();
        assert_eq!(batch.items[0].1.slowness().read_limit, limit);
        bench.done(batch);
        bench.push(Task::Value, 1, Scope::All, 4);
        assert_eq!(bench.take().unwrap().items[0].1.slowness().read_limit, None);
    }

    #[test]
    fn a_rule_is_reconciling_until_the_last_key_that_is_not_the_guards() {
        let mut bench = Bench::new();
        let is = |bench: &Bench| bench.queue.is_reconciling(RuleId(0));
        bench.push(Task::Guard, 1, Scope::All, 1);
        assert!(!is(&bench), "what the guard looks at is not about to be written");
        bench.push(Task::Value, 1, Scope::All, 1);
        bench.push(Task::Value, 1, Scope::All, 2);
        assert!(is(&bench));
        while let Some(batch) = bench.take() {
            if batch.lane.1 == Task::Value {
                assert!(is(&bench), "it runs");
            }
            bench.finish(batch, |_| Finish::Done { pause: Duration::from_secs(1) });
        }
        assert!(is(&bench), "it rests, and what is asked of it waits");
        bench.now += Duration::from_secs(2);
        assert!(bench.take().is_none() && !is(&bench) && bench.queue.is_empty());
    }

    /// A target that the guard finds to differ waits for events, which are not read while the queue is full.
    #[test]
    fn a_queue_that_the_guard_fills_says_so() {
        let mut bench = Bench::new();
        for key in 0..3 {
            bench.push(Task::Guard, key, Scope::All, 1);
        }
        assert!(!bench.queue.is_crowded_by_guard(), "there is room");
        for key in 0..7 {
            bench.push(Task::Value, key, Scope::All, 1);
        }
        assert!(bench.queue.is_crowded_by_guard());
        let guarded = std::iter::from_fn(|| bench.take()).find(|batch| batch.lane.1 == Task::Guard).unwrap();
        assert!(bench.queue.is_crowded_by_guard(), "running keys count");
        bench.done(guarded);
        for key in 7..20 {
            bench.push(Task::Value, key, Scope::All, 1);
        }
        assert!(!bench.queue.has_room() && !bench.queue.is_crowded_by_guard(), "other work makes room as it is done");
    }

    #[test]
    fn requests_for_a_key_that_waits_are_one() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, named(&[7]), 1);
        bench.push(Task::Value, 1, named(&[8, 7]), 2);
        let batch = bench.take().unwrap();
        assert_eq!(batch.items.len(), 1);
        assert_eq!(batch.items[0].1.scope, named(&[7, 8]));
        assert_eq!(batch.items[0].1.after.seconds, 2);
        bench.done(batch);
        assert!(bench.queue.is_empty() && bench.queue.depth() == 0);
    }

    #[test]
    fn a_key_never_runs_twice_at_once_and_what_arrives_meanwhile_runs_after() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let first = bench.take().unwrap();
        bench.push(Task::Value, 1, Scope::All, 2);
        assert!(bench.take().is_none());
        bench.done(first);
        assert_eq!(bench.keys(), [1]);
    }

    #[test]
    fn the_position_waits_for_the_oldest_request_of_a_merged_key() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        bench.routed(1);
        bench.push(Task::Value, 1, Scope::All, 2);
        bench.routed(2);
        assert_eq!(bench.frontier(), None);
        let batch = bench.take().unwrap();
        bench.push(Task::Value, 1, Scope::All, 3);
        bench.routed(3);
        bench.done(batch);
        assert_eq!(bench.frontier(), Some(2));
        let batch = bench.take().unwrap();
        bench.done(batch);
        assert_eq!(bench.frontier(), Some(3));
    }

    #[test]
    fn what_a_look_up_leads_to_holds_the_batch_it_comes_from() {
        let mut bench = Bench::new();
        bench.push(Task::LocateSource, 1, Scope::All, 1);
        bench.routed(1);
        bench.push(Task::Value, 5, Scope::All, 2);
        bench.routed(2);
        let batch = std::iter::from_fn(|| bench.take()).find(|batch| batch.lane.1 == Task::LocateSource);
        let look_up = batch.unwrap();
        for origin in origins(look_up.items.iter().map(|(_, work)| work)) {
            let request =
                Request { rule: RuleId(0), task: Task::Value, key: Key::one(Bson::Int32(5)), scope: Scope::All };
            bench.queue.push(request, origin, &mut bench.watermark);
        }
        bench.done(look_up);
        assert_eq!(bench.frontier(), None, "key 5 is now asked for by batch 1 too");
    }

    #[test]
    fn a_failed_key_waits_unless_something_new_is_asked_of_it() {
        let mut bench = Bench::new();
        let again = |work| Finish::Again { delay: Duration::from_secs(5), work };
        bench.push(Task::Value, 1, Scope::All, 1);
        bench.push(Task::Value, 2, Scope::All, 1);
        let batch = bench.take().unwrap();
        bench.finish(batch, again);
        assert!(bench.take().is_none());
        bench.push(Task::Value, 2, Scope::All, 2);
        assert_eq!(bench.keys(), [2]);
        bench.now += Duration::from_secs(5);
        assert_eq!(bench.keys(), [1]);
    }

    /// Each request in a grace period of an hour once left an entry behind until its end.
    #[test]
    fn waits_that_requests_have_ended_are_forgotten() {
        let mut bench = Bench::new();
        for batch in 1..=u64::try_from(3 * OUTDATED).unwrap() {
            bench.push(Task::Value, 1, named(&[1]), batch);
            bench.routed(batch);
            let batch = bench.take().unwrap();
            bench.finish(batch, |work| Finish::Again { delay: Duration::from_secs(3600), work });
        }
        assert!(bench.queue.delayed.len() <= OUTDATED + 3, "{}", bench.queue.delayed.len());
        bench.now += Duration::from_secs(3600);
        assert_eq!(bench.keys(), [1], "the last wait still ends");
    }

    #[test]
    fn a_costly_key_rests_whatever_is_asked_of_it() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let batch = bench.take().unwrap();
        bench.finish(batch, |_| Finish::Done { pause: Duration::from_secs(5) });
        for batch in 2..100 {
            bench.push(Task::Value, 1, Scope::All, batch);
            assert!(bench.take().is_none());
        }
        bench.now += Duration::from_secs(5);
        assert_eq!(bench.keys(), [1], "once for all");
        bench.routed(99);
        assert_eq!(bench.frontier(), None);
    }

    #[test]
    fn a_key_that_rests_unasked_is_forgotten() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let batch = bench.take().unwrap();
        bench.finish(batch, |_| Finish::Done { pause: Duration::from_secs(5) });
        bench.now += Duration::from_secs(6);
        assert!(bench.take().is_none());
        assert!(bench.queue.is_empty());
    }

    #[test]
    fn parents_are_looked_for_when_earlier_writes_of_the_rule_have_ended() {
        let mut bench = Bench::new();
        bench.push(Task::Value, 1, Scope::All, 1);
        let writing = bench.take().unwrap();
        bench.push(Task::Parents, 9, Scope::All, 2);
        assert!(bench.take().is_none(), "a write in flight may put source 9 into a parent yet");
        bench.push(Task::Value, 2, Scope::All, 3);
        let later = bench.take().unwrap();
        assert_eq!(later.lane, LANE, "writes that begin later see the move");
        bench.done(writing);
        assert_eq!(bench.keys(), [9]);
        bench.done(later);
    }

    #[test]
    fn lanes_take_turns() {
        let mut bench = Bench::new();
        for key in 0..3 {
            bench.push(Task::Value, key, Scope::All, 1);
            bench.push(Task::LocateTarget, key, Scope::All, 1);
        }
        let lanes: Vec<Task> = std::iter::from_fn(|| {
            bench.queue.take(BatchLimits { keys: 1, batches: 1, all_running: false }, bench.now, |_, _| true)
        })
        .map(|batch| batch.lane.1)
        .collect();
        let (first, second) = (lanes[0], lanes[1]);
        assert_ne!(first, second);
        assert_eq!(lanes, [first, second, first, second, first, second]);
    }

    #[test]
    fn a_full_queue_says_so_and_drops_nothing() {
        let mut bench = Bench::new();
        for key in 0..20 {
            bench.push(Task::Value, key, named(&[1, 2]), 1);
        }
        assert!(!bench.queue.has_room());
        assert_eq!(bench.queue.depth(), 40);
        let batch = bench.take().unwrap();
        assert_eq!(batch.items.len(), 20);
        bench.done(batch);
        assert!(bench.queue.has_room() && bench.queue.depth() == 0);
    }
}
