//! Joins the stages in data order, and stops them in reverse.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bson::Bson;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{
        fan_out::{FanOut, Subject},
        rule_record::Agreement,
        store::Store,
    },
    dead_letter::Written,
    jobs::{
        audit,
        backfill::{self, BackfillRequest},
        fan_out,
    },
    pace::spacing,
    reconcile::{
        self, Context, Outcome,
        run::{End, Ended},
    },
    request::{Page, Scope, Task},
    route::Routed,
    unavailable,
    watch::{Delivery, StreamSpec, follow, nested, streams},
    workqueue::{Batch, Lane, Most, Work},
};
use denormd_model::{
    failpoint,
    namespace::Namespace,
    position::{ClusterTime, Position},
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{
    code,
    error::{Kind, Result},
};
use denormd_rules::plan::{Rule, RuleId};

/// Interval between checkpoints while work continues.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Capacity of the channel between a stream and the pipeline, in deliveries.
const DELIVERIES: usize = 2;
/// Time after which a write to all targets of a key counts as long.
const LONG: Duration = Duration::from_millis(250);
/// Privilege errors of a key before its rule becomes unavailable: an operator who edits a user's roles may remove them
/// for a moment.
const REFUSALS: u32 = 5;

mod adoption;
mod feeders;
mod keep;
mod observe;
mod rules;
pub mod schedule;

use feeders::{Changed, Returned, requests, retry, returns, sources, states};
use rules::{Rules, read_sources, recorded_sources, register_rules, releases, rules_of};
use schedule::{Next, Schedule};

/// Progress of the pipeline.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Everything committed up to here is applied and acknowledged.
    pub applied: ClusterTime,
    /// Reconcile requests that wait or run.
    pub pending: usize,
    /// The state of each rule.
    pub states: Arc<Vec<RuleState>>,
    /// Fan-out jobs in progress.
    pub fan_outs: usize,
    /// The state database has an older position than this pipeline has saved: the pipeline has ended, and the next one
    /// starts from that position.
    pub rewound: bool,
}

impl Progress {
    /// True while the backfill of any rule is open.
    #[must_use]
    pub fn is_backfilling(&self) -> bool {
        self.states.iter().any(RuleState::is_backfilling)
    }

    /// The rules that are blocked, paused or unavailable.
    pub fn stopped(&self) -> impl Iterator<Item = RuleId> {
        let stopped = self.states.iter().enumerate().filter(|(_, state)| state.is_stopped());
        stopped.map(|(nth, _)| RuleId(nth))
    }

    /// The rules whose copies may lack changes: all rules that are not live.
    pub fn not_live(&self) -> impl Iterator<Item = RuleId> {
        let rules = self.states.iter().enumerate().filter(|(_, state)| **state != RuleState::Live);
        rules.map(|(nth, _)| RuleId(nth))
    }

    /// True if everything committed by `time` is applied, including the work that it caused.
    #[must_use]
    pub fn has_applied(&self, time: ClusterTime) -> bool {
        self.applied >= time && self.fan_outs == 0 && !self.is_backfilling()
    }

    /// The time up to which everything is applied, if the targets of `rule` are up to date by then. None while the rule
    /// is being backfilled, or is stopped.
    #[must_use]
    pub fn applied_of(&self, rule: RuleId) -> Option<ClusterTime> {
        let settled = |state: &RuleState| !state.is_backfilling() && !state.is_stopped();
        (self.fan_outs == 0 && self.states.get(rule.0).is_none_or(settled)).then_some(self.applied)
    }
}

/// A running pipeline.
#[derive(Debug)]
pub struct Handle {
    /// The dependencies that its work uses.
    pub context: Arc<Context>,
    /// The latest progress.
    pub progress: watch::Receiver<Progress>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Handle {
    /// Stops the pipeline: takes no new work, finishes the work in flight, and saves the checkpoints.
    pub async fn stop(self) {
        self.stop.cancel();
        if self.task.await.is_err() {
            tracing::error!("the pipeline ended by a panic");
        }
    }

    /// Ends like a crash: nothing is finished, nothing is saved.
    pub fn abort(self) {
        self.task.abort();
        self.stop.cancel();
    }

    /// True if the pipeline has ended by itself, which should never happen.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }

    /// True if the pipeline has ended because the cluster was restored to an earlier time: another one starts from there.
    #[must_use]
    pub fn is_rewound(&self) -> bool {
        self.progress.borrow().rewound
    }

    /// Waits until everything committed by now is applied, through whole chains of rules, and no backfill is open.
    pub async fn settled(&self) -> Result<()> {
        let mut progress = self.progress.clone();
        let (plan, modified) = (&self.context.plan, &self.context.counts.modified);
        for _ in 0..=plan.longest_chain() {
            let before = modified.load(Ordering::Relaxed);
            let now = self.context.server.operation_time().await?;
            if progress.wait_for(|progress| progress.has_applied(now)).await.is_err() {
                return Err(denormd_mongo::error::Error::internal("the pipeline has stopped"));
            }
            // A level of a tree that writes nothing is the last one.
            if plan.has_trees() && modified.load(Ordering::Relaxed) == before {
                break;
            }
        }
        Ok(())
    }
}

/// Starts following the streams of a plan. New and changed rules are recorded and backfilled.
pub async fn start(context: Arc<Context>, store: Store) -> Result<Handle> {
    // The future is large.
    let rules = Box::pin(register_rules(&context, &store)).await?;
    let now = context.server.operation_time().await?;
    let mut starts = Vec::new();
    let mut forgotten = BTreeSet::new();
    // The driver's futures are large.
    let nested = Box::pin(nested(&context.server, &context.plan)).await?;
    for spec in streams(&context.plan, &nested) {
        let position = match store.position(&context.server, &spec.database, &spec.pipeline).await? {
            Some(position) => position,
            None => {
                forgotten.extend(rules_of(&context, &spec.database));
                Position { time: now, token: None }
            }
        };
        starts.push((spec, position));
    }
    let released = releases(&context, &store).await?;
    let recorded = recorded_sources(&context, &store).await?;
    let sources = read_sources(&context).await?;
    // The driver's futures are large.
    let lacking = Box::pin(unavailable::still(&context)).await?;
    let mut pipeline = Pipeline::new(context.clone(), store.clone());
    pipeline.rules = rules;
    pipeline.released = released;
    pipeline.sources = recorded;
    pipeline.take_sources(sources).await;
    for (rule, reason) in lacking {
        Box::pin(pipeline.make_unavailable(rule, reason)).await?;
    }
    // The backfill of a rule is complete up to a checkpoint: without one, the rule is backfilled again.
    for rule in forgotten {
        if !pipeline.rules.state(rule).is_backfilling() {
            pipeline.sweep(rule, Agreement::Kept).await?;
        }
    }
    for rule in &context.plan.order {
        if let RuleState::Backfilling { after, in_sources, agreed } = pipeline.rules.state(*rule).clone() {
            context.memory.agrees(*rule, agreed);
            let generation = pipeline.rules.generation(*rule);
            pipeline.ask_backfill(BackfillRequest { rule: *rule, generation, after, in_sources });
        }
    }
    for fan_out in context.fan_outs.all(&context.server, &context.plan).await? {
        pipeline.ask_fan_out(fan_out);
    }
    failpoint::here("rules-registered");
    // Saved only after the rules are recorded for a backfill: after a crash in between, they would count as complete.
    for (spec, position) in &starts {
        if position.token.is_none() {
            store.save_position(&context.server, &spec.database, &spec.pipeline, position, None).await?;
        }
    }
    let stop = context.stopping.clone();
    let progress = pipeline.progress.subscribe();
    let task = tokio::spawn(pipeline.run(starts, stop.clone()));
    Ok(Handle { context, progress, stop, task })
}

struct Stream {
    spec: StreamSpec,
    saved: Option<Position>,
    /// Time of its last answer.
    delivered: Instant,
}

struct Pipeline {
    context: Arc<Context>,
    store: Store,
    schedule: Schedule,
    streams: Vec<Stream>,
    /// The result of [`Pipeline::backlog`], shared with the streams.
    waiting: Arc<AtomicUsize>,
    running: JoinSet<Outcome>,
    /// Running batches that write all targets of a key, with their start times.
    whole: HashMap<(Lane, u64), Instant>,
    backfills: mpsc::UnboundedSender<BackfillRequest>,
    asked: Option<mpsc::UnboundedReceiver<BackfillRequest>>,
    rules: Rules,
    /// The generation of the last backfill started for each rule.
    begun: BTreeMap<RuleId, i64>,
    /// The recorded UUIDs of the rules' source collections; None for a source that a version without this field has
    /// seen.
    sources: BTreeMap<RuleId, Option<Bson>>,
    fan_out: mpsc::UnboundedSender<FanOut>,
    fan_outs_asked: Option<mpsc::UnboundedReceiver<FanOut>>,
    fan_outs: HashMap<Subject, FanOut>,
    /// Writes of rules that have dead letters.
    written: mpsc::Sender<(RuleId, Written)>,
    written_asked: Option<mpsc::Receiver<(RuleId, Written)>>,
    /// Time up to which an operator has accepted the loss of a rule's source: an earlier drop that is read later does
    /// not block the rule again.
    released: BTreeMap<RuleId, ClusterTime>,
    pages: Vec<(usize, oneshot::Sender<()>)>,
    saver: Option<tokio::task::JoinHandle<Vec<(usize, Position)>>>,
    /// A position could not be saved because the stored one is older ([`Progress::rewound`]).
    rewound: Arc<AtomicBool>,
    last_save: Instant,
    progress: watch::Sender<Progress>,
    observer: observe::Observer,
    /// Stops the pipeline from inside, like the stop from outside.
    broken: CancellationToken,
}

impl Pipeline {
    fn new(context: Arc<Context>, store: Store) -> Self {
        // Unbounded, like those of the answers: the loop must not wait for a job that waits for the loop. They hold at
        // most one message for each rule, or for each recorded job.
        let (backfills, asked) = mpsc::unbounded_channel();
        let (fan_out, fan_outs_asked) = mpsc::unbounded_channel();
        let (written, written_asked) = mpsc::channel(DELIVERIES);
        Self {
            schedule: Schedule::new(context.plan.clone(), context.limits.pending)
                .within(context.partition)
                .sharing(&context.plan, context.memory.pending.clone()),
            observer: observe::Observer::new(&context.plan),
            rules: Rules::new(&context.plan),
            begun: BTreeMap::new(),
            sources: BTreeMap::new(),
            context,
            store,
            streams: Vec::new(),
            waiting: Arc::default(),
            running: JoinSet::new(),
            whole: HashMap::new(),
            backfills,
            asked: Some(asked),
            fan_out,
            fan_outs_asked: Some(fan_outs_asked),
            fan_outs: HashMap::new(),
            written,
            written_asked: Some(written_asked),
            released: BTreeMap::new(),
            pages: Vec::new(),
            saver: None,
            rewound: Arc::default(),
            last_save: Instant::now(),
            progress: watch::channel(Progress::default()).0,
            broken: CancellationToken::new(),
        }
    }

    async fn run(mut self, starts: Vec<(StreamSpec, Position)>, stop: CancellationToken) {
        self.broken = stop.clone();
        let (deliver, mut deliveries) = mpsc::channel(DELIVERIES);
        let (page, mut pages) = mpsc::channel(1);
        let mut feeders = JoinSet::new();
        for (spec, position) in starts {
            self.schedule.follow(position.clone());
            self.streams.push(Stream { spec: spec.clone(), saved: Some(position.clone()), delivered: Instant::now() });
            let (context, deliver, stop) = (self.context.clone(), deliver.clone(), stop.clone());
            let waiting = self.waiting.clone();
            feeders.spawn(async move {
                follow(&context.server, &context.metrics, &spec, position, waiting, deliver, stop).await;
            });
        }
        let (finish, mut finished) = mpsc::unbounded_channel();
        let (lack, mut lacking) = mpsc::unbounded_channel();
        if let Some(asked) = self.asked.take() {
            feeders.spawn(backfill::run(
                self.context.clone(),
                self.store.clone(),
                asked,
                page.clone(),
                backfill::Told { finished: finish, lacking: lack.clone() },
                stop.clone(),
            ));
        }
        let (fan_out, mut fan_out_done) = mpsc::unbounded_channel();
        if let Some(asked) = self.fan_outs_asked.take() {
            feeders.spawn(fan_out::run(
                self.context.clone(),
                asked,
                page.clone(),
                fan_out::Told { finished: fan_out, lacking: lack },
                stop.clone(),
            ));
        }
        feeders.spawn(unavailable::watch(self.context.clone(), self.store.clone(), stop.clone()));
        if let Some(written) = self.written_asked.take() {
            feeders.spawn(retry(self.context.clone(), written, page.clone(), stop.clone()));
        }
        feeders.spawn(keep::expire(self.context.clone(), stop.clone()));
        feeders.spawn(requests(self.context.clone(), self.store.clone(), page.clone(), stop.clone()));
        let (ask, mut asked) = mpsc::channel(1);
        feeders.spawn(states(self.context.clone(), self.store.clone(), ask, stop.clone()));
        let (see, mut seen) = mpsc::channel(1);
        feeders.spawn(sources(self.context.clone(), see, stop.clone()));
        let (give, mut returned) = mpsc::unbounded_channel();
        feeders.spawn(returns(self.context.clone(), self.progress.subscribe(), give, stop.clone()));
        feeders.spawn(audit::run(self.context.clone(), self.applied_of_rules(), page, stop.clone()));
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.dispatch();
            self.waiting.store(self.backlog(), Ordering::Relaxed);
            let room = self.schedule.has_room();
            // While all batches run, due keys wait for a free one: a timer in the past would make the loop spin.
            let due = self.schedule.next_due().filter(|_| self.running.len() < self.context.limits.batches);
            tokio::select! {
                Some(delivery) = deliveries.recv(), if room => self.take(delivery).await,
                Some(page) = pages.recv(), if room => self.take_page(page),
                Some((changed, reported)) = asked.recv() => {
                    for changed in changed {
                        self.take_state(changed);
                    }
                    self.observe_now();
                    // The receiver may have been stopped.
                    reported.send(()).ok();
                }
                Some(sources) = seen.recv() => self.take_sources(sources).await,
                Some(back) = returned.recv() => self.source_is_back(back).await,
                Some(request) = finished.recv() => self.backfilled(&request),
                Some(done) = fan_out_done.recv() => self.fan_out_done(&done),
                Some((rule, reason)) = lacking.recv() => self.lacks(rule, reason).await,
                Some(outcome) = self.running.join_next() => self.finish(outcome).await,
                () = sleep_until(due), if due.is_some() => {}
                _ = tick.tick() => {}
                () = stop.cancelled() => break,
            }
            self.report().await;
        }
        // Dropping these ends every task that waits for an answer to a message in them.
        drop((deliveries, pages, asked));
        while let Some(outcome) = self.running.join_next().await {
            self.finish(outcome).await;
        }
        while feeders.join_next().await.is_some() {}
        self.last_save = self.last_save.checked_sub(SAVE_EVERY).unwrap_or(self.last_save);
        self.report().await;
        if let Some(saver) = self.saver.take() {
            self.saved(saver.await.unwrap_or_default());
        }
    }

    /// Size of the backlog: keys with changes, and the targets of large fan-outs, whose number is not known. Paused and
    /// failed keys do not count, because the batches are free for others.
    fn backlog(&self) -> usize {
        let busy = self.running.len() >= self.context.limits.batches;
        match self.running.is_empty() {
            false if self.whole.values().any(|begun| begun.elapsed() >= LONG) => usize::MAX,
            false if !self.fan_outs.is_empty() => self.schedule.depth(),
            false if busy => self.schedule.all_late(),
            _ => 0,
        }
    }

    /// The check that the audit makes before it reports a difference as drift.
    fn applied_of_rules(&self) -> Box<audit::Applied> {
        let progress = self.progress.subscribe();
        Box::new(move |rule| progress.borrow().applied_of(rule))
    }

    /// Starts batches while there is room. Requests that arrive while they run form the next batches.
    fn dispatch(&mut self) {
        let limits = &self.context.limits;
        let most = Most { keys: limits.batch_keys, batches: limits.batches };
        while self.running.len() < most.batches {
            let now = Instant::now();
            let crowded = |rule| self.context.memory.is_crowded(rule);
            let Some(mut batch) = self.schedule.take(most, now, crowded) else { return };
            if !self.rules.may_run(&self.context.plan, batch.lane.0) {
                self.skip(batch);
                continue;
            }
            let elsewhere = !self.fan_outs.is_empty() || self.rules.state(batch.lane.0).is_backfilling();
            self.schedule.postpone_verdicts(&mut batch, elsewhere, now);
            let detached = self.rules.state(batch.lane.0).is_blocked();
            let whole = |work: &Work| work.scope == Scope::All && work.read_limit.is_none();
            if batch.lane.1 == Task::Value && batch.items.iter().any(|(_, work)| whole(work)) {
                let anew = batch.items.iter().any(|(_, work)| work.restarted.is_some());
                let begun = if anew { now.checked_sub(LONG) } else { None };
                self.whole.insert((batch.lane, batch.number), begun.unwrap_or(now));
            }
            self.running.spawn(reconcile::run(self.context.clone(), batch, detached));
        }
    }

    /// Drops pending requests of a stopped rule: its next backfill does their work.
    fn skip(&mut self, batch: Batch) {
        let done = Next::Done { pause: Duration::ZERO };
        let keys = batch.items.into_iter().map(|(key, work)| (key, work, done)).collect();
        self.schedule.finish(batch.lane, batch.number, &[], keys, Instant::now());
        self.acknowledge_pages();
    }

    async fn take(&mut self, delivery: Delivery) {
        self.count_events(&delivery);
        let mut routed = Routed::default();
        self.streams[delivery.stream].delivered = Instant::now();
        let batch = self.schedule.begin(delivery.stream);
        for event in &delivery.events {
            let origin = self.schedule.arrive(delivery.stream, batch, event, &mut routed);
            // Another collection took the name of the source (`$out`, a rename).
            for rule in std::mem::take(&mut routed.renewed) {
                if !self.rules.state(rule).is_stopped() {
                    self.block(rule, BlockReason::SourceGone).await;
                }
            }
            // In the order of the events: work after a drop is not done any more.
            for rule in std::mem::take(&mut routed.sources_gone) {
                // The drop is older than the acceptance of the loss, but was read later: after a crash, or behind a
                // backlog.
                if self.released.get(&rule).is_some_and(|released| event.cluster_time <= *released) {
                    continue;
                }
                self.block(rule, BlockReason::SourceGone).await;
            }
            let (rules, plan) = (&self.rules, &self.context.plan);
            for request in routed.requests.drain(..).filter(|request| rules.may_run(plan, request.rule)) {
                self.schedule.ask(request, origin);
            }
            self.schedule.asked(event);
        }
        if delivery.lost {
            let database = &self.streams[delivery.stream].spec.database;
            routed.sweeps.extend(rules_of(&self.context, database));
            self.observer.degraded.extend(&routed.sweeps);
        }
        self.aside(&routed).await;
        failpoint::here("routed");
        self.schedule.end(delivery.stream, batch, delivery.position, delivery.more);
    }

    /// Records the work that events require in addition to keys, before the checkpoint may pass the events.
    async fn aside(&mut self, routed: &Routed) {
        for rule in routed.sweeps.iter().copied().collect::<BTreeSet<_>>() {
            let mut attempts = 0;
            while let Err(error) = self.sweep(rule, Agreement::Kept).await {
                self.not_recorded(&error, &mut attempts).await;
            }
        }
    }

    async fn not_recorded(&self, error: &denormd_mongo::error::Error, attempts: &mut u64) {
        tracing::warn!(error = %error.message, "the state of a rule cannot be recorded; trying again");
        *attempts += 1;
        tokio::time::sleep(Duration::from_millis(100 * (*attempts).min(50))).await;
    }

    /// Blocks a rule until an operator agrees to its further effects: its fields stay as they are. This is recorded
    /// before any event may be skipped. Paused and unavailable rules are blocked as well: once resumed, they would
    /// treat an absent source as an empty one.
    async fn block(&mut self, rule: RuleId, reason: BlockReason) {
        if self.rules.state(rule).is_blocked() {
            return;
        }
        let mut attempts = 0;
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        let generation = loop {
            match Box::pin(self.store.block(&context.server, named, reason.clone())).await {
                Ok(generation) => break generation,
                Err(error) => self.not_recorded(&error, &mut attempts).await,
            }
        };
        failpoint::here("held");
        let end = reason.end(&named.name);
        tracing::error!(rule = %named.name, %reason, "the rule is blocked: its fields stay as they are until {end}");
        self.set(rule, RuleState::Blocked(reason), generation);
    }

    /// Stops a rule until the cluster meets its requirements. Its events are skipped and its fan-out jobs are deleted:
    /// the backfill on its return covers them. Other rules continue.
    async fn make_unavailable(&mut self, rule: RuleId, reason: String) -> Result<()> {
        if self.rules.state(rule).is_stopped() {
            return Ok(());
        }
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        let state = RuleState::Unavailable { reason: reason.clone() };
        let reset = self.store.reset_rule(&context.server, named, &state, Agreement::Kept);
        let (_, generation) = Box::pin(reset).await?;
        context.fan_outs.forget(&context.server, &named.name).await?;
        tracing::error!(rule = %named.name, reason, "the rule is unavailable until the cluster has what it needs; the others go on");
        self.set(rule, state, generation);
        Ok(())
    }

    /// Like `make_unavailable`, but an error is only logged: the refused work is retried, and refused again, until the
    /// state is recorded.
    async fn lacks(&mut self, rule: RuleId, reason: String) {
        if let Err(error) = self.make_unavailable(rule, reason).await {
            tracing::warn!(error = %error.message, "that a rule is unavailable cannot be recorded yet");
        }
    }

    /// Takes over the state of a rule from the state database if it is newer: set by a command, or by a write of ours
    /// that timed out. A state read before the leader recorded another one is older and is ignored.
    fn take_state(&mut self, Changed { rule, state, generation, released }: Changed) {
        if generation <= self.rules.generation(rule) {
            return;
        }
        self.released.extend(released.map(|until| (rule, until)));
        let (name, before) = (&self.context.plan.rule(rule).name, self.rules.state(rule));
        match (before, &state) {
            (RuleState::Blocked(reason), after) if !after.is_blocked() => {
                self.context.memory.released(rule);
                // The loss was accepted: an absent source counts as empty.
                if *reason == BlockReason::SourceGone {
                    self.context.memory.saw(&self.context.plan.rule(rule).source.namespace, None);
                    self.sources.remove(&rule);
                }
                tracing::info!(rule = %name, "the rule is unblocked");
            }
            (before, RuleState::Backfilling { .. }) if before.is_stopped() => {
                tracing::info!(rule = %name, "the rule is resumed");
            }
            (_, RuleState::Paused { .. }) => tracing::warn!(rule = %name, "the rule is paused"),
            (_, after) if after.is_stopped() => {
                tracing::warn!(rule = %name, state = after.name(), "the rule is stopped");
            }
            _ => {}
        }
        self.set(rule, state.clone(), generation);
        if let RuleState::Backfilling { after, in_sources, .. } = state {
            self.ask_backfill(BackfillRequest { rule, generation, after, in_sources });
        }
    }

    /// Restarts the backfill of a rule, unless the rule is stopped.
    async fn sweep(&mut self, rule: RuleId, agreement: Agreement) -> Result<()> {
        if self.rules.state(rule).is_stopped() {
            return Ok(());
        }
        self.backfill_anew(rule, agreement).await
    }

    /// Records that a rule must be backfilled from the start, whatever its state, and starts the backfill.
    async fn backfill_anew(&mut self, rule: RuleId, agreement: Agreement) -> Result<()> {
        let (store, context) = (&self.store, &self.context);
        let reset = store.reset_rule(&context.server, context.plan.rule(rule), &RuleState::BACKFILL, agreement);
        let (state, generation) = reset.await?;
        self.set(rule, state, generation);
        self.ask_backfill(BackfillRequest { rule, generation, after: None, in_sources: false });
        Ok(())
    }

    fn set(&mut self, rule: RuleId, state: RuleState, generation: i64) {
        self.context.memory.agrees(rule, matches!(state, RuleState::Backfilling { agreed: true, .. }));
        self.rules.set(rule, state, generation);
    }

    fn backfilled(&mut self, request: &BackfillRequest) {
        self.rules.backfilled(request.rule, request.generation);
        if !self.rules.state(request.rule).is_backfilling() {
            self.context.memory.agrees(request.rule, false);
        }
        // A fan-out job writes targets that the backfill has left to it. From here on, all others hold denormd's values. A
        // rule that was stopped meanwhile is backfilled once more, and keeps values until then.
        let is_open = self.fan_outs.keys().any(|subject| subject.rule == request.rule);
        if *self.rules.state(request.rule) == RuleState::Live && !is_open {
            self.context.memory.keeps(request.rule, None, false, false);
        }
    }

    /// Processes the list of existing source collections. A rule whose source is gone, or is another collection now, is
    /// blocked.
    async fn take_sources(&mut self, sources: Vec<(Namespace, Option<Bson>)>) {
        let context = self.context.clone();
        for (source, now) in sources {
            let known = context.memory.source(&source);
            if known.is_none() {
                context.memory.saw(&source, now.clone());
            }
            for rule in context.plan.rules.iter().filter(|rule| rule.source.namespace == source) {
                let recorded = self.sources.get(&rule.id).cloned();
                let seen = [known.as_ref(), recorded.as_ref().and_then(Option::as_ref)];
                let was_there = known.is_some() || recorded.is_some();
                match &now {
                    // Once it runs again, the comparison is repeated.
                    Some(_) if self.rules.state(rule.id).is_stopped() => {}
                    Some(now) if seen.iter().flatten().all(|seen| *seen == now) => {
                        if seen[1].is_none() {
                            self.record_source(rule, now).await;
                        }
                    }
                    None if !was_there => {}
                    Some(_) | None => self.block(rule.id, BlockReason::SourceGone).await,
                }
            }
        }
    }

    /// Unblocks a rule whose source is there again, and backfills the rule from it.
    async fn source_is_back(&mut self, Returned { rule, uuid }: Returned) {
        if *self.rules.state(rule) != RuleState::Blocked(BlockReason::SourceGone) {
            return;
        }
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        tracing::info!(rule = %named.name, "the source collection is there again: the rule is backfilled from it");
        context.memory.saw(&named.source.namespace, Some(uuid.clone()));
        let mut attempts = 0;
        while let Err(error) = self.backfill_anew(rule, Agreement::Ended).await {
            self.not_recorded(&error, &mut attempts).await;
        }
        self.record_source(named, &uuid).await;
    }

    /// Records the UUID of a rule's source. If this fails, the next list of the sources repeats it.
    async fn record_source(&mut self, rule: &Rule, uuid: &Bson) {
        let generation = self.rules.generation(rule.id);
        match self.store.source_seen(&self.context.server, &rule.name, generation, uuid).await {
            Ok(()) => drop(self.sources.insert(rule.id, Some(uuid.clone()))),
            Err(error) => {
                // An earlier collection of that name would block the rule.
                self.sources.remove(&rule.id);
                tracing::warn!(error = %error.message, "the source of a rule cannot be recorded; trying again");
            }
        }
    }

    fn ask_backfill(&mut self, request: BackfillRequest) {
        if self.begun.insert(request.rule, request.generation) == Some(request.generation) {
            return;
        }
        if self.backfills.send(request).is_err() {
            tracing::error!("the backfill task is gone");
        }
    }

    fn ask_fan_out(&mut self, fan_out: FanOut) {
        self.context.memory.runs_fan_out(&fan_out.subject, true);
        self.fan_outs.insert(fan_out.subject.clone(), fan_out.clone());
        if self.fan_out.send(fan_out).is_err() {
            tracing::error!("the fan-out task is gone");
        }
    }

    fn fan_out_done(&mut self, done: &FanOut) {
        if self.fan_outs.get(&done.subject).is_some_and(|newest| newest.request == done.request) {
            self.fan_outs.remove(&done.subject);
            self.context.memory.runs_fan_out(&done.subject, false);
        }
    }

    fn take_page(&mut self, page: Page) {
        let (rules, plan) = (&self.rules, &self.context.plan);
        let requests = page.requests.into_iter().filter(|request| rules.may_run(plan, request.rule));
        let number = self.schedule.page(requests, page.after);
        self.pages.push((number, page.done));
        self.acknowledge_pages();
    }

    fn acknowledge_pages(&mut self) {
        for (_, done) in self.pages.extract_if(.., |(page, _)| self.schedule.is_page_done(*page)) {
            // A receiver that is gone was stopped.
            done.send(()).ok();
        }
    }

    async fn finish(&mut self, outcome: std::result::Result<Outcome, tokio::task::JoinError>) {
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                // The keys stay in the queue: the checkpoint does not pass them, and a restart processes them again.
                tracing::error!(%error, "a reconcile ended by a panic; stopping");
                self.broken.cancel();
                return;
            }
        };
        if outcome.keys.iter().any(|ended| matches!(ended.end, End::RemovalLimit)) {
            self.block(outcome.lane.0, BlockReason::RemovalLimit).await;
        }
        if outcome.keys.iter().any(|ended| matches!(ended.end, End::SourceGone)) {
            self.block(outcome.lane.0, BlockReason::SourceGone).await;
        }
        let refused = |ended: &Ended| match &ended.end {
            End::Failed(error) if error.code == Some(code::UNAUTHORIZED) && ended.work.attempts >= REFUSALS => {
                Some(error.message.clone())
            }
            _ => None,
        };
        if let Some(reason) = outcome.keys.iter().find_map(refused) {
            self.lacks(outcome.lane.0, reason).await;
        }
        self.whole.remove(&(outcome.lane, outcome.number));
        self.count_outcome(&outcome);
        self.report_written(&outcome);
        let recomputes = outcome.lane.1 == Task::Value && self.context.plan.rule(outcome.lane.0).gathers();
        let pause = if recomputes { spacing(outcome.took, outcome.keys.len()) } else { Duration::ZERO };
        let mut failed: BTreeMap<String, (usize, u32)> = BTreeMap::new();
        let mut keys = Vec::with_capacity(outcome.keys.len());
        for ended in outcome.keys {
            let mut work = ended.work;
            let next = match ended.end {
                // The last two have blocked the rule.
                End::Done | End::SetAside | End::RemovalLimit | End::SourceGone => Next::Done { pause },
                // The next backfill of a stopped rule does the remaining work.
                End::Later(_) | End::Failed(_) if self.rules.state(outcome.lane.0).is_stopped() => Next::Done { pause },
                End::FanOut(fan_out) => {
                    self.ask_fan_out(fan_out);
                    Next::Done { pause }
                }
                End::Later(delay) => Next::Again { delay },
                End::Failed(error) => {
                    self.context.counts.retries.fetch_add(1, Ordering::Relaxed);
                    let delay = reconcile::run::backoff(work.attempts);
                    let (keys, attempts) = failed.entry(error.message).or_default();
                    (*keys, *attempts) = (*keys + 1, work.attempts.max(*attempts));
                    work.attempts += 1;
                    Next::Again { delay }
                }
            };
            keys.push((ended.key, work, next));
        }
        let rule = &self.context.plan.rule(outcome.lane.0).name;
        for (error, (keys, attempts)) in failed {
            tracing::warn!(rule, keys, attempts, error, "reconciles failed and are tried again");
        }
        failpoint::here("acknowledged");
        self.schedule.finish(outcome.lane, outcome.number, &outcome.follow_ups, keys, Instant::now());
        self.acknowledge_pages();
    }

    /// Reports what a batch has written, if its rule has dead letters: they are retried without their pause.
    fn report_written(&self, outcome: &Outcome) {
        let rule = outcome.lane.0;
        if self.context.metrics.dead_letters.with_label_values(&[&self.context.plan.rule(rule).name]).get() == 0 {
            return;
        }
        let mut written = Written::default();
        for ended in outcome.keys.iter().filter(|ended| matches!(ended.end, End::Done)) {
            written.add(&ended.key, &ended.work.scope);
        }
        if !written.is_empty() {
            // While the other side is busy, the dead letters wait for their own retry.
            self.written.try_send((rule, written)).ok();
        }
    }

    /// Publishes the progress, and saves the checkpoints at intervals.
    async fn report(&mut self) {
        self.observe();
        let applied = (0..self.streams.len()).map(|stream| self.schedule.applied(stream));
        let progress = Progress {
            applied: applied.min().unwrap_or_default(),
            pending: self.schedule.depth(),
            states: self.rules.states().clone(),
            fan_outs: self.fan_outs.len(),
            rewound: self.rewound.load(Ordering::Relaxed),
        };
        if progress.rewound {
            self.broken.cancel();
        }
        self.progress.send_if_modified(|known| {
            let changed = *known != progress;
            *known = progress;
            changed
        });
        if self.last_save.elapsed() >= SAVE_EVERY {
            self.save().await;
        }
    }

    async fn save(&mut self) {
        if let Some(saver) = self.saver.take_if(|saver| saver.is_finished()) {
            let saved = saver.await.unwrap_or_default();
            self.saved(saved);
        }
        if self.saver.is_some() {
            return;
        }
        self.last_save = Instant::now();
        let due: Vec<(usize, StreamSpec, Position)> = self
            .streams
            .iter()
            .enumerate()
            .filter_map(|(nth, stream)| Some((nth, stream, self.schedule.frontier(nth)?)))
            .filter(|(_, stream, frontier)| stream.saved.as_ref() != Some(*frontier))
            .map(|(nth, stream, frontier)| (nth, stream.spec.clone(), frontier.clone()))
            .collect();
        if due.is_empty() {
            return;
        }
        let known: Vec<Option<ClusterTime>> =
            self.streams.iter().map(|stream| stream.saved.as_ref().map(|saved| saved.time)).collect();
        let (context, store, rewound) = (self.context.clone(), self.store.clone(), self.rewound.clone());
        self.saver = Some(tokio::spawn(async move {
            let mut saved = Vec::new();
            for (nth, spec, position) in due {
                failpoint::here("position-saving");
                let (server, stages) = (&context.server, &spec.pipeline);
                match store.save_position(server, &spec.database, stages, &position, known[nth]).await {
                    Ok(()) => {
                        failpoint::here("position-saved");
                        saved.push((nth, position));
                    }
                    Err(error) if error.kind == Kind::HistoryLost => {
                        tracing::error!(error = %error.message, "the cluster was restored to an earlier time: starting over from its state");
                        rewound.store(true, Ordering::Relaxed);
                    }
                    Err(error) => {
                        tracing::warn!(error = %error.message, "the position could not be saved; trying again");
                        context.metrics.record_error(None, "save position", &error);
                    }
                }
            }
            saved
        }));
    }

    fn saved(&mut self, saved: Vec<(usize, Position)>) {
        for (nth, position) in saved {
            self.streams[nth].saved = Some(position);
        }
    }
}

async fn sleep_until(due: Option<Instant>) {
    if let Some(due) = due {
        tokio::time::sleep_until(due.into()).await;
    }
}
