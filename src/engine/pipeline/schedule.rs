//! Decides which work runs next, and which is done. Contains all decisions of the pipeline about work, without I/O and
//! without a clock of its own.
//!
//! Every place where a change could get lost is here: routing, coalescing, the origins of lookup results, the low
//! watermark. `tests/engine/simulation.rs` runs it through crashes, slow writes and former leaders in virtual time.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    change::ChangeEvent,
    checkpoint::watermark::Watermark,
    pace::Deferral,
    reconcile::group::SHARED_BELOW,
    request::{Origin, Request, Scope, Task},
    route::{Routed, Router},
    workqueue::{Batch, BatchLimits, Finish, LONGEST_UNCONFIRMED, Lane, Pending, Verdict, Work, WorkQueue, origins},
};
use denormd_model::{
    key::Key,
    partition::Partition,
    position::{ClusterTime, Position},
};
use denormd_rules::plan::{Keyed, Plan, RuleId};

/// Origin number of the first page: each page is a stream of one batch, numbered downwards.
const PAGES: usize = usize::MAX;

/// Scheduling state of all work.
#[derive(Debug)]
pub struct Schedule {
    router: Router,
    queue: WorkQueue,
    watermark: Watermark,
    streams: Vec<Followed>,
    /// The cluster time of the newest event that has arrived.
    newest: ClusterTime,
    /// Pages taken so far.
    pages: usize,
    partition: Partition,
    deferral: Deferral,
    /// Running batches of work that shrinks by waiting.
    waited: HashSet<(Lane, u64)>,
}

/// State of a stream.
#[derive(Debug)]
struct Followed {
    /// Batches routed so far.
    batches: u64,
    /// The position after the last one.
    reached: Position,
    /// True if the stream is known to hold more.
    more: bool,
}

/// A batch of a stream that waits for something besides its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// The stream.
    pub stream: usize,
    /// The batch's number.
    pub batch: u64,
}

/// Next step for a key whose run has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// No work is left; requests that arrive during the pause wait until it is over.
    Done {
        /// Minimum time until the next run.
        pause: Duration,
    },
    /// The key runs again.
    Again {
        /// Time until then.
        delay: Duration,
    },
}

impl Schedule {
    /// An empty schedule with room for about `capacity` requests.
    #[must_use]
    pub fn new(plan: Plan, capacity: usize) -> Self {
        Self {
            router: Router::new(plan),
            queue: WorkQueue::new(capacity),
            watermark: Watermark::default(),
            streams: Vec::new(),
            newest: ClusterTime::default(),
            pages: 0,
            partition: Partition::WHOLE,
            deferral: Deferral::default(),
            waited: HashSet::new(),
        }
    }

    /// Restricts the schedule to the keys that this partition owns.
    #[must_use]
    pub fn within(self, partition: Partition) -> Self {
        Self { partition, ..self }
    }

    /// Records the pending documents of trees in `pending`, where batches look for them.
    #[must_use]
    pub fn sharing(mut self, plan: &Plan, pending: Arc<Pending>) -> Self {
        let trees = plan.rules.iter().filter(|rule| rule.tree.is_some()).map(|rule| rule.id).collect();
        self.queue.record(trees, pending);
        self
    }

    /// Adds a stream that is followed from `position` on. Streams are numbered in this order.
    pub fn follow(&mut self, position: Position) {
        self.streams.push(Followed { batches: 0, reached: position, more: false });
    }

    /// Begins a batch of a stream; returns its number.
    pub fn begin(&mut self, stream: usize) -> u64 {
        self.streams[stream].batches += 1;
        self.streams[stream].batches
    }

    /// Routes an event of the batch: adds its requests to `routed`. Returns their origin.
    pub fn route_event(&mut self, stream: usize, batch: u64, event: &ChangeEvent, routed: &mut Routed) -> Origin {
        self.newest = self.newest.max(event.cluster_time);
        self.router.route(event, routed);
        let committed = event.wall_time.map(bson::DateTime::timestamp_millis);
        Origin { stream, batch, after: event.cluster_time, committed }
    }

    /// Adds a request. The checkpoint does not pass its origin before it is done.
    pub fn enqueue(&mut self, request: Request, origin: Origin) {
        if !self.runs_here(&request) {
            return;
        }
        self.queue.push(request, origin, &mut self.watermark);
    }

    /// Records that all requests of an event have been added.
    pub fn event_routed(&self, event: &ChangeEvent) {
        if self.queue.has_trees() {
            self.queue.routed(self.router.writers(&event.namespace), &Key::one(event.id.clone()));
        }
    }

    /// Keeps the checkpoint before a batch that is being routed, until [`Schedule::release`].
    pub fn hold(&mut self, hold: Hold) {
        self.watermark.hold(hold.stream, hold.batch);
    }

    /// Ends a [`Schedule::hold`].
    pub fn release(&mut self, hold: Hold) {
        self.watermark.release(hold.stream, hold.batch);
    }

    /// True if this partition runs the request. Writes belong to the owner of their key. A lookup leads to keys of any
    /// owner, so every partition runs it and keeps the results that it owns.
    fn runs_here(&self, request: &Request) -> bool {
        let rule = self.router.rule(request.rule);
        match (request.task, rule.keyed) {
            (Task::Value | Task::Target, _) | (Task::Guard, Keyed::Target) => {
                self.partition.owns(&rule.name, &request.key)
            }
            // The guard compares the parts of a target that the partition owns.
            (Task::Guard, Keyed::Value)
            | (Task::LocateSource | Task::LocateTarget | Task::Parents | Task::Holders | Task::Bucket, _) => true,
        }
    }

    /// Ends a batch that has arrived completely, and whose requests have all been added or recorded. With `more`, the
    /// stream is known to hold more.
    pub fn end(&mut self, stream: usize, batch: u64, position: Position, more: bool) {
        self.streams[stream].reached = position.clone();
        self.streams[stream].more = more;
        self.watermark.routed(stream, batch, position);
    }

    /// Adds requests that do not come from a stream; returns the page's number.
    pub fn page(&mut self, requests: impl IntoIterator<Item = Request>, after: ClusterTime) -> usize {
        let page = PAGES - self.pages;
        self.pages += 1;
        let origin = Origin { stream: page, batch: 1, after, committed: None };
        for request in requests {
            self.enqueue(request, origin);
        }
        page
    }

    /// True if all requests of a page are done, including the work that they caused. Does not depend on other pages.
    #[must_use]
    pub fn is_page_done(&self, page: usize) -> bool {
        self.watermark.is_drained(page)
    }

    /// The next keys to run together.
    ///
    /// A rule without a batch may start one although all batches are taken: the backlog of one rule does not hold up its
    /// neighbours.
    ///
    /// If a rule is `crowded`, only one of its batches writes at a time: several would write the same targets, and the
    /// server would repeat the conflicting writes. No key of a rule that is `stopping` runs.
    pub fn take(
        &mut self,
        limits: BatchLimits,
        now: Instant,
        crowded: impl Fn(RuleId) -> bool,
        stopping: impl Fn(RuleId) -> bool,
    ) -> Option<Batch> {
        let busy: Vec<RuleId> = if limits.all_running { self.queue.running().collect() } else { Vec::new() };
        let more = self.queue.has_room() && self.has_more();
        let waiting = || self.queue.waiting(|lane, scope| shrinks_by_waiting(&self.router, lane, scope));
        let defers = self.deferral.defers(now, more, !self.waited.is_empty(), waiting);
        // Results of lookups are accepted even if there is no room, so the next lookup waits for room. Writes never
        // wait for a lookup.
        let full = self.queue.is_full_of_writes();
        let writing: Vec<RuleId> = self.queue.writing().filter(|rule| crowded(*rule)).collect();
        let mut batch = self.queue.take(limits, now, |lane, scope| {
            let waits = defers && shrinks_by_waiting(&self.router, lane, scope);
            let conflicts = matches!(lane.1, Task::Value | Task::Target) && writing.contains(&lane.0);
            let is_closed = waits || conflicts || stopping(lane.0) || busy.contains(&lane.0);
            !(is_closed || full && lane.1.looks_up())
        })?;
        // A slow key already runs in parallel with others.
        let waited = |work: &Work| {
            work.slowness().read_limit.is_none() && shrinks_by_waiting(&self.router, batch.lane, &work.scope)
        };
        if batch.items.iter().any(|(_, work)| waited(work)) {
            self.waited.insert((batch.lane, batch.number));
            self.deferral.took(now, batch.items.len());
        }
        // Majority reads can see all events that have arrived: a batch never reads a state before any of them.
        for (_, work) in &mut batch.items {
            work.after = work.after.max(self.newest);
        }
        Some(batch)
    }

    /// Decides about targets that the guard found to differ. A write may be on its way, so a verdict is postponed until
    /// every event up to the guard's read is delivered, and the rule has no writes left, here or `elsewhere`. For a
    /// rule that is never idle, the second condition is dropped after [`LONGEST_UNCONFIRMED`].
    ///
    /// Nothing is delivered while the queue is full. So if such targets fill the queue, none of them waits any longer:
    /// the difference stays unconfirmed.
    pub fn postpone_verdicts(&self, batch: &mut Batch, elsewhere: bool, now: Instant) {
        let (rule, task) = batch.lane;
        if task != Task::Guard {
            return;
        }
        let delivered = self.streams.iter().map(|stream| stream.reached.time).min().unwrap_or_default();
        let writing = elsewhere || self.queue.is_reconciling(rule);
        let crowded = self.queue.is_crowded_by_guard();
        for (_, work) in &mut batch.items {
            let mismatch = work.unconfirmed_mismatch.get_or_insert_default();
            let long = mismatch.since.is_some_and(|since| now.saturating_duration_since(since) > LONGEST_UNCONFIRMED);
            mismatch.verdict = match delivered < mismatch.seen || (writing && !long) {
                _ if crowded => Verdict::Unconfirmed,
                true => Verdict::Postponed,
                false => Verdict::Drift,
            };
        }
    }

    /// Ends a batch: its keys, and the requests that its lookups produced, whose origins are those of the whole batch.
    pub fn finish(
        &mut self,
        lane: Lane,
        number: u64,
        follow_ups: &[Request],
        keys: Vec<(Key, Work, Next)>,
        now: Instant,
    ) {
        self.queue.ended(lane, number);
        self.waited.remove(&(lane, number));
        for origin in origins(keys.iter().map(|(_, work, _)| work)) {
            for request in follow_ups {
                self.enqueue(request.clone(), origin);
            }
        }
        for (key, work, next) in keys {
            let weight = work.scope.weight();
            self.queue.set_read_limit(lane, &key, work.slowness().read_limit);
            let finish = match next {
                Next::Done { pause } => Finish::Done { pause },
                Next::Again { delay } => Finish::Again { delay, work },
            };
            self.queue.finish(lane, key, weight, finish, now, &mut self.watermark);
        }
    }

    /// The position up to which all work of a stream is done. None before its first batch is done.
    #[must_use]
    pub fn frontier(&self, stream: usize) -> Option<&Position> {
        self.watermark.frontier(stream)
    }

    /// The position after the last batch of a stream.
    #[must_use]
    pub fn reached(&self, stream: usize) -> &Position {
        &self.streams[stream].reached
    }

    /// The time up to which all work of a stream is done.
    #[must_use]
    pub fn applied(&self, stream: usize) -> ClusterTime {
        if self.watermark.is_drained(stream) {
            self.streams[stream].reached.time
        } else {
            self.frontier(stream).map_or(ClusterTime::default(), |position| position.time)
        }
    }

    /// True if a stream is known to hold more.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.streams.iter().any(|stream| stream.more)
    }

    /// The requests that wait or run, to be read.
    #[must_use]
    pub fn queue(&self) -> &WorkQueue {
        &self.queue
    }
}

/// True if such work shrinks by waiting: a value with many sources is computed once for all their changes, and targets
/// of one key are written by one statement.
fn shrinks_by_waiting(router: &Router, (rule, task): Lane, scope: &Scope) -> bool {
    let gathered = match scope {
        Scope::All => router.rule(rule).gathers(),
        Scope::Named(targets) => targets.len() < SHARED_BELOW as usize,
    };
    task == Task::Value && gathered
}

#[cfg(test)]
mod tests {
    use bson::Bson;

    use super::*;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    const COPY: &str = "copy: { source: s, target: t, match: { part: _id }, set: { name: $name } }";
    const COUNT: &str = "aggregate: { source: s, target: t, match: { _id: t }, set: { n: { $sum: 1 } } }";

    struct Bench {
        schedule: Schedule,
        start: Instant,
        /// Maximum number of keys in a batch.
        keys: usize,
    }

    impl Bench {
        fn new(rule: &str) -> Self {
            let text =
                format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {{ name: r, {rule} }}\n");
            let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
            let mut schedule = Schedule::new(plan, 100);
            schedule.follow(Position { time: ClusterTime::default(), token: None });
            Self { schedule, start: Instant::now(), keys: 100 }
        }

        /// Delivers a batch of the stream that requests a key; `more` says if the stream holds more.
        fn deliver(&mut self, key: i32, scope: Scope, more: bool) {
            let batch = self.schedule.begin(0);
            let origin = Origin { stream: 0, batch, after: ClusterTime::default(), committed: None };
            let request = Request { rule: RuleId(0), task: Task::Value, key: Key::one(Bson::Int32(key)), scope };
            self.schedule.enqueue(request, origin);
            self.schedule.end(0, batch, Position { time: ClusterTime::default(), token: None }, more);
        }

        /// Number of keys taken at this time after the start. They are done at once.
        fn taken(&mut self, millis: u64) -> usize {
            let Some(batch) = self.take(millis) else { return 0 };
            self.finish(batch, millis)
        }

        fn take(&mut self, millis: u64) -> Option<Batch> {
            self.schedule.take(
                BatchLimits { keys: self.keys, batches: 1, all_running: false },
                self.start + Duration::from_millis(millis),
                |_| false,
                |_| false,
            )
        }

        fn finish(&mut self, batch: Batch, millis: u64) -> usize {
            let done = Next::Done { pause: Duration::ZERO };
            let keys: Vec<_> = batch.items.into_iter().map(|(key, work)| (key, work, done)).collect();
            let count = keys.len();
            self.schedule.finish(batch.lane, batch.number, &[], keys, self.start + Duration::from_millis(millis));
            count
        }
    }

    fn named(targets: i32) -> Scope {
        Scope::Named((0..targets).map(|id| Key::one(Bson::Int32(id))).collect::<HashSet<_>>())
    }

    #[test]
    fn values_of_many_sources_wait_for_the_rest_of_a_backlog() {
        let mut bench = Bench::new(COUNT);
        bench.deliver(1, Scope::All, true);
        assert_eq!(bench.taken(0), 0);
        bench.deliver(2, Scope::All, true);
        assert_eq!(bench.taken(900), 0);
        assert_eq!(bench.taken(1_000), 2, "patience has an end");
        assert_eq!(bench.taken(1_000), 0);
        bench.deliver(3, Scope::All, true);
        assert_eq!(bench.taken(1_100), 0, "and starts again");
        bench.deliver(4, Scope::All, false);
        assert_eq!(bench.taken(1_100), 2, "nothing more is to come");
    }

    #[test]
    fn beside_a_backlog_one_batch_runs_of_what_has_waited() {
        let mut bench = Bench::new(COUNT);
        bench.keys = 1;
        bench.deliver(1, Scope::All, true);
        bench.deliver(2, Scope::All, true);
        bench.deliver(3, Scope::All, true);
        assert!(bench.take(0).is_none());
        let first = bench.take(1_000).unwrap();
        assert!(bench.take(1_100).is_none(), "the rest of the server is for the stream");
        bench.finish(first, 1_100);
        assert!(bench.take(1_100).is_some());
        bench.deliver(4, Scope::All, false);
        assert!(bench.take(1_100).is_some(), "nothing more is to come");
    }

    /// A page with a slow key delayed those behind it: other backfills, fan-out jobs, retries and repairs.
    #[test]
    fn a_page_is_done_when_its_own_requests_are() {
        let mut bench = Bench::new(COPY);
        bench.keys = 1;
        let request =
            |key| Request { rule: RuleId(0), task: Task::Value, key: Key::one(Bson::Int32(key)), scope: Scope::All };
        let mut page = |keys: &[i32]| bench.schedule.page(keys.iter().map(|key| request(*key)), ClusterTime::default());
        let (stuck, other, shared, empty) = (page(&[1]), page(&[2]), page(&[1, 3]), page(&[]));
        let done = |bench: &Bench| [stuck, other, shared, empty].map(|page| bench.schedule.is_page_done(page));
        assert_eq!(done(&bench), [false, false, false, true]);
        let first = bench.take(0).unwrap();
        for _ in 0..2 {
            let batch = bench.take(0).unwrap();
            bench.finish(batch, 0);
        }
        assert_eq!(done(&bench), [false, true, false, true], "the third asks for the key of the first, too");
        bench.finish(first, 0);
        assert_eq!(done(&bench), [true; 4]);
    }

    #[test]
    fn a_few_targets_of_a_key_wait_for_others_and_many_do_not() {
        let mut bench = Bench::new(COPY);
        bench.deliver(1, named(1), true);
        assert_eq!(bench.taken(0), 0);
        bench.deliver(1, named(20), true);
        assert_eq!(bench.taken(0), 1);
        bench.deliver(2, Scope::All, true);
        assert_eq!(bench.taken(0), 1, "a source's change is for all its targets");
    }

    /// The guard never waits in a queue that it fills itself.
    #[test]
    fn a_verdict_is_not_postponed_in_a_queue_that_the_guard_fills() {
        let mut bench = Bench::new(COPY);
        let seen = ClusterTime { seconds: 9, increment: 1 };
        let verdicts = |bench: &mut Bench| {
            let batch = bench.schedule.begin(0);
            let origin = Origin { stream: 0, batch, after: ClusterTime::default(), committed: None };
            let request =
                Request { rule: RuleId(0), task: Task::Guard, key: Key::one(Bson::Int32(-1)), scope: Scope::All };
            bench.schedule.enqueue(request, origin);
            let mut batch = bench.take(0).unwrap();
            batch.items.iter_mut().for_each(|(_, work)| work.unconfirmed_mismatch.get_or_insert_default().seen = seen);
            bench.schedule.postpone_verdicts(&mut batch, false, bench.start);
            let verdict = |(_, work): &(Key, Work)| work.unconfirmed_mismatch.as_ref().unwrap().verdict;
            batch.items.iter().map(verdict).collect::<HashSet<_>>()
        };
        assert_eq!(verdicts(&mut bench), HashSet::from([Verdict::Postponed]), "not everything is delivered");
        for key in 0..100 {
            let origin = Origin { stream: 0, batch: 1, after: ClusterTime::default(), committed: None };
            let request =
                Request { rule: RuleId(0), task: Task::Guard, key: Key::one(Bson::Int32(key)), scope: Scope::All };
            bench.schedule.enqueue(request, origin);
        }
        assert!(!bench.schedule.queue().has_room());
        assert_eq!(verdicts(&mut bench), HashSet::from([Verdict::Unconfirmed]));
    }

    /// A rule's backlog does not hold up its neighbours.
    #[test]
    fn a_rule_without_a_batch_may_start_one_beside_all_others() {
        let rules = format!("rules:\n  - {{ name: r, {COPY} }}\n  - {{ name: q, {COUNT} }}\n");
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\n{rules}");
        let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
        let mut schedule = Schedule::new(plan, 100);
        schedule.follow(Position { time: ClusterTime::default(), token: None });
        let now = Instant::now();
        let ask = |schedule: &mut Schedule, rule, key: i32| {
            let batch = schedule.begin(0);
            let origin = Origin { stream: 0, batch, after: ClusterTime::default(), committed: None };
            let key = Key::one(Bson::Int32(key));
            schedule.enqueue(Request { rule: RuleId(rule), task: Task::Value, key, scope: Scope::All }, origin);
            schedule.end(0, batch, Position { time: ClusterTime::default(), token: None }, false);
        };
        let take = |schedule: &mut Schedule, all_running| {
            schedule.take(BatchLimits { keys: 1, batches: 1, all_running }, now, |_| false, |_| false)
        };
        (0..3).for_each(|key| ask(&mut schedule, 0, key));
        let first = take(&mut schedule, false).unwrap();
        assert!(take(&mut schedule, true).is_none(), "the rule has a batch");
        (0..2).for_each(|key| ask(&mut schedule, 1, key));
        assert_eq!(take(&mut schedule, true).unwrap().lane.0, RuleId(1));
        assert!(take(&mut schedule, true).is_none(), "both rules have one");
        let done = Next::Done { pause: Duration::ZERO };
        let keys = first.items.into_iter().map(|(key, work)| (key, work, done)).collect();
        schedule.finish(first.lane, first.number, &[], keys, now);
        assert_eq!(take(&mut schedule, true).unwrap().lane.0, RuleId(0));
    }

    #[test]
    fn of_a_crowded_rule_one_batch_writes_at_a_time() {
        let mut bench = Bench::new(COPY);
        bench.keys = 1;
        bench.deliver(1, Scope::All, false);
        bench.deliver(2, Scope::All, false);
        let limits = BatchLimits { keys: 1, batches: 3, all_running: false };
        let first = bench.schedule.take(limits, bench.start, |_| true, |_| false).unwrap();
        assert!(bench.schedule.take(limits, bench.start, |_| true, |_| false).is_none());
        bench.finish(first, 0);
        let second = bench.schedule.take(limits, bench.start, |_| true, |_| false).unwrap();
        bench.deliver(3, Scope::All, false);
        assert!(
            bench.schedule.take(limits, bench.start, |_| false, |_| false).is_some(),
            "another rule's, or not crowded any more"
        );
        bench.finish(second, 0);
    }

    /// Its keys are not done before the stop is recorded, and the checkpoint stays before the event that stops it.
    #[test]
    fn the_keys_of_a_rule_that_is_stopping_wait_and_so_does_the_checkpoint() {
        let mut bench = Bench::new(COPY);
        let position = |seconds| Position { time: ClusterTime { seconds, increment: 1 }, token: None };
        let hold = Hold { stream: 0, batch: bench.schedule.begin(0) };
        bench.schedule.hold(hold);
        bench.schedule.end(0, hold.batch, position(1), false);
        bench.deliver(1, Scope::All, false);
        let limits = BatchLimits { keys: 1, batches: 1, all_running: false };
        assert!(bench.schedule.take(limits, bench.start, |_| false, |_| true).is_none());
        let batch = bench.schedule.take(limits, bench.start, |_| false, |_| false).unwrap();
        bench.finish(batch, 0);
        assert_eq!(bench.schedule.frontier(0), None);
        assert_eq!(bench.schedule.applied(0), ClusterTime::default());
        bench.schedule.release(hold);
        assert!(bench.schedule.frontier(0).is_some());
    }

    #[test]
    fn nothing_waits_when_the_queue_is_full() {
        let mut bench = Bench::new(COUNT);
        for key in 0..100 {
            bench.deliver(key, Scope::All, true);
        }
        assert_eq!(bench.taken(0), 100);
    }
}
