//! Reconcile requests in waiting: coalesced, one run a key at a time, bounded.
//!
//! The queue decides nothing about documents. It promises: requests for a key that waits become one; a request that
//! arrives while its key runs is remembered and runs after; what a request came from is held until it is done.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque, hash_map::Entry as MapEntry},
    time::{Duration, Instant},
};

use crate::{
    checkpoint::watermark::Watermark,
    key::Key,
    plan::RuleId,
    position::ClusterTime,
    request::{Origin, Request, Scope, Task},
};

/// Fewer keys than this are not shared out: a batch costs the same reads and writes for one of them.
const SMALL: usize = 50;

/// What keys of the queue are told apart by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Slot {
    lane: Lane,
    key: Key,
}

/// Keys of one rule and task: what can share a batch.
pub type Lane = (RuleId, Task);

/// All that has been asked of one key.
#[derive(Debug, Clone)]
pub struct Work {
    /// Which targets.
    pub scope: Scope,
    /// What reads must not be older than.
    pub after: ClusterTime,
    /// Wall time of the oldest event, in milliseconds since 1970.
    pub committed: Option<i64>,
    /// How often this was tried in vain.
    pub attempts: u32,
    /// Since when its targets are written anew, because a statement for all of them took longer than it may.
    pub begun_anew: Option<Instant>,
    /// When a reference was first found to dangle, for policies that destroy, or a target to differ, for the guard.
    pub doubted_since: Option<Instant>,
    /// What the guard has found then.
    pub doubt: Doubt,
    /// What this comes from.
    held: Held,
}

/// The oldest batch of each stream that something comes from. Most often of one.
#[derive(Debug, Clone, Default)]
struct Held(Vec<(usize, u64)>);

impl Held {
    fn of(&mut self, stream: usize) -> Option<&mut u64> {
        self.0.iter_mut().find(|held| held.0 == stream).map(|held| &mut held.1)
    }
}

/// A target that was found to differ.
#[derive(Debug, Clone, Default)]
pub struct Doubt {
    /// Tells the difference from others.
    pub difference: u64,
    /// Whatever it was computed from was committed by then.
    pub seen: ClusterTime,
    /// What was committed by then may not be applied yet.
    pub premature: bool,
}

#[derive(Debug, Default)]
struct Entry {
    /// What is asked for next.
    pending: Option<Work>,
    /// Held while a batch has the key.
    running: Option<Held>,
    /// Whether the lane knows of `pending`.
    in_lane: bool,
    /// `pending` waits until then.
    not_before: Option<Instant>,
    /// The wait is for the sake of others: a new request does not end it.
    cooling: bool,
    /// Batches with a lower number must have ended first ([`Task::Parents`]).
    barrier: u64,
    /// When the oldest change was committed that the key waits or runs for, as [`Oldest`] knows it.
    since: Option<i64>,
}

/// Keys to reconcile together.
#[derive(Debug)]
pub struct Batch {
    /// Rule and task.
    pub lane: Lane,
    /// The keys, each with what was asked of it.
    pub items: Vec<(Key, Work)>,
    /// Counts the batches.
    pub number: u64,
}

/// What one batch may hold.
#[derive(Debug, Clone, Copy)]
pub struct Most {
    /// Keys, and about four times as many named targets.
    pub keys: usize,
    /// Batches that share what waits: one that took all the keys would let nothing run beside it.
    pub batches: usize,
}

/// How the run of one key ended.
#[derive(Debug)]
pub enum Finish {
    /// Nothing is left to do. What is asked of the key within the pause waits for its end: a recompute that takes long is
    /// not repeated for each event.
    Done {
        /// The pause.
        pause: Duration,
    },
    /// To be done again, after a while.
    Again {
        /// How long to wait.
        delay: Duration,
        /// What to do again.
        work: Work,
    },
}

/// The queue.
#[derive(Debug)]
pub struct WorkQueue {
    entries: HashMap<Slot, Entry>,
    lanes: BTreeMap<Lane, VecDeque<Key>>,
    /// The lane that was served last.
    turn: Option<Lane>,
    delayed: BinaryHeap<Reverse<Delayed>>,
    /// Requests held, named targets counted.
    weight: usize,
    capacity: usize,
    /// Batches taken so far.
    taken: u64,
    /// The batches of each rule that write.
    writing: BTreeMap<RuleId, BTreeSet<u64>>,
    /// For each rule, how many keys wait, run or rest for another task than the guard's.
    reconciling: BTreeMap<RuleId, usize>,
    oldest: Oldest,
}

/// For each rule, how many keys wait or run for a change that was committed then.
#[derive(Debug, Default)]
struct Oldest {
    rules: BTreeMap<RuleId, BTreeMap<i64, usize>>,
    /// The sums of these counts.
    keys: BTreeMap<RuleId, usize>,
}

impl Oldest {
    fn moved(&mut self, rule: RuleId, from: Option<i64>, to: Option<i64>) -> Option<i64> {
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

#[derive(Debug, PartialEq, Eq)]
struct Delayed {
    at: Instant,
    slot: Slot,
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
    /// An empty queue that wants no more than `capacity` requests.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            entries: HashMap::new(),
            lanes: BTreeMap::new(),
            turn: None,
            delayed: BinaryHeap::new(),
            weight: 0,
            capacity,
            taken: 0,
            writing: BTreeMap::new(),
            reconciling: BTreeMap::new(),
            oldest: Oldest::default(),
        }
    }

    /// Whether a target of `rule` that differs may be about to be written.
    #[must_use]
    pub fn is_reconciling(&self, rule: RuleId) -> bool {
        self.reconciling.get(&rule).is_some_and(|keys| *keys > 0)
    }

    fn remove(&mut self, slot: &Slot) {
        if self.entries.remove(slot).is_some()
            && slot.lane.1 != Task::Guard
            && let Some(keys) = self.reconciling.get_mut(&slot.lane.0)
        {
            *keys = keys.saturating_sub(1);
        }
    }

    /// Whether the streams may deliver more. What is pushed beyond is taken all the same: nothing is ever dropped.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.weight < self.capacity
    }

    /// Requests held: waiting and running keys, named targets counted.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.weight
    }

    /// When the oldest change was committed that a key of `rule` waits or runs for, in milliseconds since 1970.
    #[must_use]
    pub fn oldest(&self, rule: RuleId) -> Option<i64> {
        self.oldest.rules.get(&rule)?.first_key_value().map(|(committed, _)| *committed)
    }

    /// Keys of `rule` that wait or run for the sake of a change.
    #[must_use]
    pub fn late(&self, rule: RuleId) -> usize {
        self.oldest.keys.get(&rule).copied().unwrap_or_default()
    }

    /// Keys of any rule that wait or run for the sake of a change.
    #[must_use]
    pub fn all_late(&self) -> usize {
        self.oldest.keys.values().sum()
    }

    /// Keys that wait or run.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing waits and nothing runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a key waits to be taken in such a lane.
    #[must_use]
    pub fn waits(&self, such: impl Fn(Lane, &Scope) -> bool) -> bool {
        self.lanes.keys().any(|lane| self.first(*lane).is_some_and(|scope| such(*lane, scope)))
    }

    /// What is asked of the first key of a lane.
    fn first(&self, lane: Lane) -> Option<&Scope> {
        let key = self.lanes.get(&lane)?.front()?.clone();
        Some(&self.entries.get(&Slot { lane, key })?.pending.as_ref()?.scope)
    }

    /// Takes a request; what it came from is held in `watermark` until it is done.
    pub fn push(&mut self, request: Request, origin: Origin, watermark: &mut Watermark) {
        let work = Work {
            scope: request.scope,
            after: origin.after,
            committed: origin.committed,
            attempts: 0,
            begun_anew: None,
            doubted_since: None,
            doubt: Doubt::default(),
            held: Held::default(),
        };
        let slot = Slot { lane: (request.rule, request.task), key: request.key };
        let entry = match self.entries.entry(slot.clone()) {
            MapEntry::Occupied(known) => known.into_mut(),
            MapEntry::Vacant(new) => {
                *self.reconciling.entry(request.rule).or_default() += usize::from(request.task != Task::Guard);
                new.insert(Entry::default())
            }
        };
        let before = entry.pending.as_ref().map_or(0, |work| work.scope.weight());
        let work = match entry.pending.take() {
            Some(pending) => pending.joined(work),
            None => work,
        };
        let work = work.holding(origin, watermark);
        self.weight = self.weight + work.scope.weight() - before;
        entry.pending = Some(work);
        entry.since = self.oldest.moved(request.rule, entry.since, earliest(entry.since, origin.committed));
        entry.barrier = self.taken + 1;
        if entry.cooling {
            return;
        }
        entry.not_before = None;
        if entry.running.is_none() && !entry.in_lane {
            entry.in_lane = true;
            self.lanes.entry(slot.lane).or_default().push_back(slot.key);
        }
    }

    /// The next keys to run together, from a lane that is `open`, which is told what is asked of its first key; None when
    /// nothing is ready.
    pub fn take(&mut self, most: Most, now: Instant, open: impl Fn(Lane, &Scope) -> bool) -> Option<Batch> {
        self.wake(now);
        for _ in 0..self.lanes.len() {
            let lane = self.next_lane()?;
            self.turn = Some(lane);
            if self.first(lane).is_some_and(|scope| !open(lane, scope)) {
                continue;
            }
            let items = self.take_from(lane, most);
            if !items.is_empty() {
                self.taken += 1;
                if writes(lane.1) {
                    self.writing.entry(lane.0).or_default().insert(self.taken);
                }
                return Some(Batch { lane, items, number: self.taken });
            }
        }
        None
    }

    fn take_from(&mut self, lane: Lane, most: Most) -> Vec<(Key, Work)> {
        let oldest_write = self.writing.get(&lane.0).and_then(BTreeSet::first).copied().unwrap_or(u64::MAX);
        let mut items = Vec::new();
        let mut weight = 0;
        let Some(waiting) = self.lanes.get_mut(&lane) else { return items };
        let keys = waiting.len().div_ceil(most.batches).max(SMALL).min(most.keys);
        while let Some(key) = waiting.pop_front() {
            let slot = Slot { lane, key };
            let Some(entry) = self.entries.get_mut(&slot) else { continue };
            if lane.1 == Task::Parents && oldest_write < entry.barrier {
                waiting.push_front(slot.key);
                break;
            }
            // It takes seconds, for which others of its batch would wait.
            let alone = entry.pending.as_ref().is_some_and(|work| work.begun_anew.is_some());
            if alone && !items.is_empty() {
                waiting.push_front(slot.key);
                break;
            }
            entry.in_lane = false;
            // Pushed back by a delay after it entered the lane: the delay's end brings it in again.
            if entry.not_before.is_some() || entry.running.is_some() {
                continue;
            }
            let Some(work) = entry.pending.take() else { continue };
            entry.running = Some(work.held.clone());
            weight += work.scope.weight();
            items.push((slot.key, work));
            if alone || items.len() >= keys || weight >= most.keys.saturating_mul(4) {
                break;
            }
        }
        if waiting.is_empty() {
            self.lanes.remove(&lane);
        }
        items
    }

    /// Says that a batch has ended, before its keys are finished one by one.
    pub fn ended(&mut self, lane: Lane, number: u64) {
        if let Some(writing) = self.writing.get_mut(&lane.0) {
            writing.remove(&number);
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

    /// Says how the run of a key ended. `weight` is what its scope weighed when it was taken.
    pub fn finish(
        &mut self,
        lane: Lane,
        key: Key,
        weight: usize,
        finish: Finish,
        now: Instant,
        watermark: &mut Watermark,
    ) {
        let slot = Slot { lane, key };
        let Some(entry) = self.entries.get_mut(&slot) else { return };
        let held = entry.running.take().unwrap_or_default();
        let waits = entry.pending.as_ref().and_then(|work| work.committed);
        let goes_on = match &finish {
            Finish::Done { .. } => waits,
            Finish::Again { work, .. } => earliest(waits, work.committed),
        };
        entry.since = self.oldest.moved(lane.0, entry.since, goes_on);
        self.weight = self.weight.saturating_sub(weight);
        match finish {
            Finish::Done { pause } => {
                for (stream, batch) in held.0 {
                    watermark.release(stream, batch);
                }
                if let Some(at) = now.checked_add(pause).filter(|_| !pause.is_zero()) {
                    entry.not_before = Some(at);
                    entry.cooling = true;
                    self.delayed.push(Reverse(Delayed { at, slot }));
                    return;
                }
            }
            Finish::Again { delay, mut work } => {
                work.held = held;
                // A request that came meanwhile ends the wait: something has changed.
                let at = if entry.pending.is_none() { now.checked_add(delay) } else { None };
                let before = entry.pending.as_ref().map_or(0, |work| work.scope.weight());
                let work = match entry.pending.take() {
                    Some(pending) => work.joined_held(pending, watermark),
                    None => work,
                };
                self.weight = self.weight + work.scope.weight() - before;
                entry.pending = Some(work);
                entry.not_before = at;
                if let Some(at) = at {
                    self.delayed.push(Reverse(Delayed { at, slot }));
                    return;
                }
            }
        }
        if entry.pending.is_none() {
            self.remove(&slot);
        } else if !entry.in_lane {
            entry.in_lane = true;
            self.lanes.entry(lane).or_default().push_back(slot.key);
        }
    }

    /// When the next delayed key is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.delayed.peek().map(|Reverse(delayed)| delayed.at)
    }

    fn wake(&mut self, now: Instant) {
        while self.delayed.peek().is_some_and(|Reverse(delayed)| delayed.at <= now) {
            let Some(Reverse(Delayed { slot, .. })) = self.delayed.pop() else { return };
            let Some(entry) = self.entries.get_mut(&slot) else { continue };
            if entry.not_before.is_none_or(|at| at > now) {
                continue;
            }
            entry.not_before = None;
            entry.cooling = false;
            if entry.pending.is_none() && entry.running.is_none() {
                self.remove(&slot);
                continue;
            }
            if entry.running.is_none() && !entry.in_lane && entry.pending.is_some() {
                entry.in_lane = true;
                self.lanes.entry(slot.lane).or_default().push_back(slot.key);
            }
        }
    }
}

/// Whether a task writes to targets; the others look up.
fn writes(task: Task) -> bool {
    match task {
        Task::Value | Task::Target => true,
        Task::LocateSource | Task::LocateTarget | Task::Parents | Task::Holders | Task::Guard => false,
    }
}

impl Work {
    /// Both of two works on one key, the newer one without anything held yet.
    fn joined(mut self, newer: Self) -> Self {
        self.scope.merge(newer.scope);
        self.after = self.after.max(newer.after);
        self.committed = earliest(self.committed, newer.committed);
        self.attempts = 0;
        self.begun_anew = self.begun_anew.or(newer.begun_anew);
        self.doubted_since = None;
        self
    }

    /// Both, each with what it holds.
    fn joined_held(mut self, newer: Self, watermark: &mut Watermark) -> Self {
        for (stream, batch) in &newer.held.0 {
            match self.held.of(*stream) {
                // Of two batches the older one is enough: the low watermark cannot pass it.
                Some(mine) if *mine <= *batch => watermark.release(*stream, *batch),
                Some(mine) => watermark.release(*stream, std::mem::replace(mine, *batch)),
                None => self.held.0.push((*stream, *batch)),
            }
        }
        self.joined(newer)
    }

    fn holding(mut self, origin: Origin, watermark: &mut Watermark) -> Self {
        match self.held.of(origin.stream) {
            // What a look-up leads to comes from a batch that may be older than what the key already holds.
            Some(held) if origin.batch < *held => {
                watermark.hold(origin.stream, origin.batch);
                watermark.release(origin.stream, std::mem::replace(held, origin.batch));
            }
            Some(_) => {}
            None => {
                watermark.hold(origin.stream, origin.batch);
                self.held.0.push((origin.stream, origin.batch));
            }
        }
        self
    }
}

/// Where the works of a batch come from, taken together: of each stream the oldest batch. For what they lead to.
#[must_use]
pub fn origins<'a>(works: impl Iterator<Item = &'a Work>) -> Vec<Origin> {
    let mut streams: BTreeMap<usize, Origin> = BTreeMap::new();
    let (mut after, mut committed) = (ClusterTime::default(), None);
    for work in works {
        after = after.max(work.after);
        committed = earliest(committed, work.committed);
        for (stream, batch) in &work.held.0 {
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
    use crate::position::Position;

    const LANE: Lane = (RuleId(0), Task::Value);

    /// A queue with its watermark and a clock of its own.
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
            self.queue.take(Most { keys: 100, batches: 1 }, self.now, |_, _| true)
        }

        fn keys(&mut self) -> Vec<i32> {
            let items = self.take().map(|batch| batch.items).unwrap_or_default();
            items.iter().filter_map(|(key, _)| key.values()[0].as_i32()).collect()
        }

        fn finish(&mut self, batch: Batch, finish: impl Fn(Work) -> Finish) {
            self.queue.ended(batch.lane, batch.number);
            for (key, work) in batch.items {
                let weight = work.scope.weight();
                self.queue.finish(batch.lane, key, weight, finish(work), self.now, &mut self.watermark);
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

    /// What is begun anew takes seconds, and has neither others in its batch nor is lost behind them.
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
        bench.finish(batch, |work| Finish::Again {
            work: Work { begun_anew: Some(now), ..work },
            delay: Duration::ZERO,
        });
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
        let lanes: Vec<Task> =
            std::iter::from_fn(|| bench.queue.take(Most { keys: 1, batches: 1 }, bench.now, |_, _| true))
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
