//! Joins the stages in data order, and stops them in reverse.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, doc};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    audit,
    backfill::{self, Wish},
    change::Namespace,
    checkpoint::{
        fan_out::{FanOut, Subject},
        store::Store,
    },
    error::Result,
    failpoint, fan_out,
    mongo::Reads,
    plan::{Rule, RuleId},
    position::{ClusterTime, Position},
    reconcile::{
        self, Context, Outcome,
        run::{End, Ended},
    },
    request::{Page, Scope, Task},
    route::Routed,
    rule_state::{BlockReason, RuleState},
    suspension::{self, UNAUTHORIZED},
    watch::{Delivery, StreamSpec, follow, nested, streams},
    workqueue::{Batch, Lane, Most, Work},
};

/// How often positions are saved while work goes on.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Deliveries that wait between a stream and the pipeline.
const DELIVERIES: usize = 2;
/// A recompute of one key that takes no longer than this is not spaced.
const CHEAP: Duration = Duration::from_millis(20);
/// The longest pause between two recomputes of one key.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The targets of a key that are written for so long are many.
const LONG: Duration = Duration::from_millis(250);
/// So often a key is refused a privilege before its rule is suspended: who changes a user's roles may take them away for a
/// moment.
const REFUSALS: u32 = 5;

mod adoption;
mod feeders;
mod observe;
mod rules;
pub mod schedule;

use feeders::{Changed, requests, retry, sources, states};
use rules::{Rules, read_sources, recorded_sources, register_rules, releases, rules_of};
use schedule::{Next, Schedule};

/// How far the daemon is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Everything committed up to here is applied and acknowledged.
    pub applied: ClusterTime,
    /// Reconcile requests that wait or run.
    pub pending: usize,
    /// The state of each rule.
    pub states: Arc<Vec<RuleState>>,
    /// Large fan-outs that are not done.
    pub fan_outs: usize,
}

impl Progress {
    /// Whether the backfill of a rule is open.
    #[must_use]
    pub fn is_backfilling(&self) -> bool {
        self.states.iter().any(RuleState::is_backfilling)
    }

    /// The rules that are blocked, paused or unavailable.
    pub fn stopped(&self) -> impl Iterator<Item = RuleId> {
        let stopped = self.states.iter().enumerate().filter(|(_, state)| state.is_stopped());
        stopped.map(|(nth, _)| RuleId(nth))
    }

    /// The rules whose copies may lack changes: all that are not live.
    pub fn not_live(&self) -> impl Iterator<Item = RuleId> {
        let rules = self.states.iter().enumerate().filter(|(_, state)| **state != RuleState::Live);
        rules.map(|(nth, _)| RuleId(nth))
    }

    /// Whether everything that was committed by `time` is applied, what that has led to included.
    #[must_use]
    pub fn has_applied(&self, time: ClusterTime) -> bool {
        self.applied >= time && self.fan_outs == 0 && !self.is_backfilling()
    }

    /// Up to when everything is applied, where the targets of `rule` are up to date by then: not while it is being backfilled, or
    /// is stopped.
    #[must_use]
    pub fn applied_of(&self, rule: RuleId) -> Option<ClusterTime> {
        let settled = |state: &RuleState| !state.is_backfilling() && !state.is_stopped();
        (self.fan_outs == 0 && self.states.get(rule.0).is_none_or(settled)).then_some(self.applied)
    }
}

/// A running pipeline.
#[derive(Debug)]
pub struct Handle {
    /// What it works with.
    pub context: Arc<Context>,
    /// How far it is.
    pub progress: watch::Receiver<Progress>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Handle {
    /// Stops: takes nothing new, ends what is in flight, saves the positions.
    pub async fn stop(self) {
        self.stop.cancel();
        if self.task.await.is_err() {
            tracing::error!("the pipeline ended by a panic");
        }
    }

    /// Ends as a crash would: nothing is finished, nothing is saved.
    pub fn abort(self) {
        self.task.abort();
        self.stop.cancel();
    }

    /// Whether the pipeline has ended by itself, which it never should.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }

    /// Waits until all that is committed now is applied, chains of rules followed to their end, and no backfill is open.
    pub async fn settled(&self) -> Result<()> {
        let mut progress = self.progress.clone();
        for _ in 0..=self.context.plan.rules.len().min(self.context.plan.longest_chain()) {
            let now = self.context.server.operation_time().await?;
            if progress.wait_for(|progress| progress.has_applied(now)).await.is_err() {
                return Err(crate::error::Error::internal("the pipeline has stopped"));
            }
        }
        Ok(())
    }
}

/// Starts following the streams of a plan. What is new or changed is recorded and backfilled.
pub async fn start(context: Arc<Context>, store: Store) -> Result<Handle> {
    let rules = register_rules(&context, &store).await?;
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
    let lacking = Box::pin(suspension::still(&context)).await?;
    let mut pipeline = Pipeline::new(context.clone(), store.clone());
    pipeline.rules = rules;
    pipeline.released = released;
    pipeline.sources = recorded;
    pipeline.take_sources(sources).await;
    for (rule, reason) in lacking {
        Box::pin(pipeline.suspend(rule, reason)).await?;
    }
    // A rule is done up to a position: without one, it is done again.
    for rule in forgotten {
        if !pipeline.rules.state(rule).is_backfilling() {
            pipeline.sweep(rule).await?;
        }
    }
    for rule in &context.plan.order {
        if let RuleState::Backfilling { after, agreed } = pipeline.rules.state(*rule).clone() {
            context.memory.agrees(*rule, agreed);
            pipeline.ask_backfill(Wish { rule: *rule, generation: pipeline.rules.generation(*rule), after });
        }
    }
    for fan_out in context.fan_outs.all(&context.server, &context.plan).await? {
        pipeline.ask_fan_out(fan_out);
    }
    failpoint::here("rules-registered");
    // Only now that the rules are known to need a backfill: a crash in between would take them for done.
    for (spec, position) in &starts {
        if position.token.is_none() {
            store.save_position(&context.server, &spec.database, &spec.pipeline, position).await?;
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
    /// When it last answered.
    delivered: Instant,
}

struct Pipeline {
    context: Arc<Context>,
    store: Store,
    schedule: Schedule,
    streams: Vec<Stream>,
    /// See [`Pipeline::backlog`], for the streams.
    waiting: Arc<AtomicUsize>,
    running: JoinSet<Outcome>,
    /// Of the running batches those that write all targets of a key, and since when they run.
    whole: HashMap<(Lane, u64), Instant>,
    backfills: mpsc::UnboundedSender<Wish>,
    asked: Option<mpsc::UnboundedReceiver<Wish>>,
    /// The states of the rules.
    rules: Rules,
    /// The generation of the last backfill that was begun for each rule.
    begun: BTreeMap<RuleId, i64>,
    /// The UUIDs that the rules' source collections are recorded with; None where one was seen by a version that kept none.
    sources: BTreeMap<RuleId, Option<Bson>>,
    spread: mpsc::UnboundedSender<FanOut>,
    spread_asked: Option<mpsc::UnboundedReceiver<FanOut>>,
    /// Large fan-outs that are not done.
    fan_outs: HashMap<Subject, FanOut>,
    /// Until when the loss of a rule's source was agreed to: a drop up to then that is read later does not block the rule again.
    released: BTreeMap<RuleId, ClusterTime>,
    pages: Vec<(usize, oneshot::Sender<()>)>,
    saver: Option<tokio::task::JoinHandle<Vec<(usize, Position)>>>,
    last_save: Instant,
    progress: watch::Sender<Progress>,
    observer: observe::Observer,
    /// Stops the pipeline, as the stop from outside does.
    broken: CancellationToken,
}

impl Pipeline {
    fn new(context: Arc<Context>, store: Store) -> Self {
        let (backfills, asked) = mpsc::unbounded_channel();
        let (spread, spread_asked) = mpsc::unbounded_channel();
        Self {
            schedule: Schedule::new(context.plan.clone(), context.limits.pending).within(context.partition),
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
            spread,
            spread_asked: Some(spread_asked),
            fan_outs: HashMap::new(),
            released: BTreeMap::new(),
            pages: Vec::new(),
            saver: None,
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
        let (spread, mut spread_out) = mpsc::unbounded_channel();
        if let Some(asked) = self.spread_asked.take() {
            feeders.spawn(fan_out::run(
                self.context.clone(),
                asked,
                page.clone(),
                fan_out::Told { finished: spread, lacking: lack },
                stop.clone(),
            ));
        }
        feeders.spawn(suspension::watch(self.context.clone(), self.store.clone(), stop.clone()));
        feeders.spawn(retry(self.context.clone(), page.clone(), stop.clone()));
        feeders.spawn(requests(self.context.clone(), self.store.clone(), page.clone(), stop.clone()));
        let (ask, mut asked) = mpsc::channel(1);
        feeders.spawn(states(self.context.clone(), self.store.clone(), ask, stop.clone()));
        let (see, mut seen) = mpsc::channel(1);
        feeders.spawn(sources(self.context.clone(), see, stop.clone()));
        feeders.spawn(audit::run(self.context.clone(), self.applied_of_rules(), page, stop.clone()));
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.dispatch();
            self.waiting.store(self.backlog(), Ordering::Relaxed);
            let room = self.schedule.has_room();
            // While all batches run, what is due waits for one of them: a moment that has passed would turn the loop idly.
            let due = self.schedule.next_due().filter(|_| self.running.len() < self.context.limits.batches);
            tokio::select! {
                Some(delivery) = deliveries.recv(), if room => self.take(delivery).await,
                Some(page) = pages.recv(), if room => self.take_page(page),
                Some((changed, reported)) = asked.recv() => {
                    for changed in changed {
                        self.take_state(changed);
                    }
                    self.observe_now();
                    // The one who waits for it may have been told to stop.
                    reported.send(()).ok();
                }
                Some(sources) = seen.recv() => self.take_sources(sources).await,
                Some(wish) = finished.recv() => self.backfilled(&wish),
                Some(done) = spread_out.recv() => self.spread_out(&done),
                Some((rule, reason)) = lacking.recv() => self.lacks(rule, reason).await,
                Some(outcome) = self.running.join_next() => self.finish(outcome).await,
                () = sleep_until(due), if due.is_some() => {}
                _ = tick.tick() => {}
                () = stop.cancelled() => break,
            }
            self.report().await;
        }
        // Whoever waits for an answer to what is left in there ends.
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

    /// What is being written: changed keys and the targets of large fan-outs, which nobody has counted. Keys that rest or failed
    /// are no backlog, the batches are free for others.
    fn backlog(&self) -> usize {
        let busy = self.running.len() >= self.context.limits.batches;
        match self.running.is_empty() {
            false if self.whole.values().any(|begun| begun.elapsed() >= LONG) => usize::MAX,
            false if !self.fan_outs.is_empty() => self.schedule.depth(),
            false if busy => self.schedule.all_late(),
            _ => 0,
        }
    }

    /// What the audit asks of a rule before it calls a difference drift.
    fn applied_of_rules(&self) -> Box<audit::Applied> {
        let progress = self.progress.subscribe();
        Box::new(move |rule| progress.borrow().applied_of(rule))
    }

    /// Starts batches while there is room for them. What arrives while they run forms the next ones.
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
                let anew = batch.items.iter().any(|(_, work)| work.begun_anew.is_some());
                let begun = if anew { now.checked_sub(LONG) } else { None };
                self.whole.insert((batch.lane, batch.number), begun.unwrap_or(now));
            }
            self.running.spawn(reconcile::run(self.context.clone(), batch, detached));
        }
    }

    /// Pending requests of a rule that is stopped are dropped: the backfill that follows does their work.
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
            // A whole new source in place of the one that went.
            for rule in std::mem::take(&mut routed.renewed) {
                // Another collection from now on: which one is found out when it is read.
                self.context.memory.saw(&self.context.plan.rule(rule).source.namespace, None);
                self.sources.remove(&rule);
                match self.rules.state(rule) {
                    RuleState::Blocked(BlockReason::SourceGone) => self.source_is_back(rule).await,
                    _ => routed.sweeps.push(rule),
                }
            }
            // In the order of the events: what follows a drop is not done any more.
            for rule in std::mem::take(&mut routed.bereft) {
                // Read after the loss was found and agreed to: after a crash, or behind a backlog.
                if self.released.get(&rule).is_some_and(|released| event.cluster_time <= *released) {
                    continue;
                }
                self.block(rule, BlockReason::SourceGone).await;
            }
            let (rules, plan) = (&self.rules, &self.context.plan);
            for request in routed.requests.drain(..).filter(|request| rules.may_run(plan, request.rule)) {
                self.schedule.ask(request, origin);
            }
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

    /// What events ask for beside keys. Recorded before the position may pass the events.
    async fn aside(&mut self, routed: &Routed) {
        for rule in routed.sweeps.iter().copied().collect::<BTreeSet<_>>() {
            let mut attempts = 0;
            while let Err(error) = self.sweep(rule).await {
                self.not_recorded(&error, &mut attempts).await;
            }
        }
    }

    /// A collection is there again under the name of a rule's source: the rule is unblocked, and backfilled from it.
    async fn source_is_back(&mut self, rule: RuleId) {
        let mut attempts = 0;
        while let Err(error) = self.backfill_anew(rule).await {
            self.not_recorded(&error, &mut attempts).await;
        }
    }

    async fn not_recorded(&self, error: &crate::error::Error, attempts: &mut u64) {
        tracing::warn!(error = %error.message, "the state of a rule cannot be recorded; trying again");
        *attempts += 1;
        tokio::time::sleep(Duration::from_millis(100 * (*attempts).min(50))).await;
    }

    /// Blocks a rule until somebody agrees to what going on would do: its fields stay as they are. Recorded before any event may
    /// be passed over. A rule that is paused or unavailable is blocked all the same: running again, it would take an absent source
    /// for an empty one.
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
        tracing::error!(rule = %named.name, %reason, "the rule is blocked: its fields stay as they are until `denormd unblock {}`", named.name);
        self.set(rule, RuleState::Blocked(reason), generation);
    }

    /// Stops a rule until the cluster has what it needs. Its events are passed over, its fan-outs forgotten: the backfill that it
    /// comes back by does all that. The others go on.
    async fn suspend(&mut self, rule: RuleId, reason: String) -> Result<()> {
        if self.rules.state(rule).is_stopped() {
            return Ok(());
        }
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        let state = RuleState::Unavailable { reason: reason.clone() };
        let generation = Box::pin(self.store.reset_rule(&context.server, named, &state)).await?;
        context.fan_outs.forget(&context.server, &named.name).await?;
        tracing::error!(rule = %named.name, reason, "the rule is unavailable until the cluster has what it needs; the others go on");
        self.set(rule, state, generation);
        Ok(())
    }

    /// The same where it can wait: what is refused is tried again, and refused again, until it is recorded.
    async fn lacks(&mut self, rule: RuleId, reason: String) {
        if let Err(error) = self.suspend(rule, reason).await {
            tracing::warn!(error = %error.message, "that a rule is unavailable cannot be recorded yet");
        }
    }

    /// Takes over the state of a rule that the state database has, where that is newer: a command has set it, or a write of ours
    /// that timed out. What was read before the leader recorded another state is older, and changes nothing.
    fn take_state(&mut self, Changed { rule, state, generation, released }: Changed) {
        if generation <= self.rules.generation(rule) {
            return;
        }
        self.released.extend(released.map(|until| (rule, until)));
        let (name, before) = (&self.context.plan.rule(rule).name, self.rules.state(rule));
        match (before, &state) {
            (RuleState::Blocked(reason), after) if !after.is_blocked() => {
                self.context.memory.released(rule);
                // The loss is wanted: an absent source is an empty one.
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
        if let RuleState::Backfilling { after, .. } = state {
            self.ask_backfill(Wish { rule, generation, after });
        }
    }

    /// Marks a rule as in need of a whole backfill.
    async fn sweep(&mut self, rule: RuleId) -> Result<()> {
        if self.rules.state(rule).is_stopped() {
            return Ok(());
        }
        self.backfill_anew(rule).await
    }

    /// Records that a rule is to be backfilled from the start, whatever its state, and begins.
    async fn backfill_anew(&mut self, rule: RuleId) -> Result<()> {
        let (store, context) = (&self.store, &self.context);
        let generation = store.reset_rule(&context.server, context.plan.rule(rule), &RuleState::BACKFILL).await?;
        self.set(rule, RuleState::BACKFILL, generation);
        self.ask_backfill(Wish { rule, generation, after: None });
        Ok(())
    }

    fn set(&mut self, rule: RuleId, state: RuleState, generation: i64) {
        self.context.memory.agrees(rule, matches!(state, RuleState::Backfilling { agreed: true, .. }));
        self.rules.set(rule, state, generation);
    }

    fn backfilled(&mut self, wish: &Wish) {
        self.rules.backfilled(wish.rule, wish.generation);
        if !self.rules.state(wish.rule).is_backfilling() {
            self.context.memory.agrees(wish.rule, false);
        }
    }

    /// Takes in which source collections exist. A rule whose source is gone is blocked. One whose source is there again, or is
    /// another collection by now, is backfilled, through the removal limit.
    async fn take_sources(&mut self, sources: Vec<(Namespace, Option<Bson>)>) {
        let context = self.context.clone();
        for (source, mut now) in sources {
            let known = context.memory.source(&source);
            let is_other = |before: Option<&Bson>| before.is_some_and(|before| Some(before) != now.as_ref());
            let replaced = now.is_some()
                && (is_other(known.as_ref())
                    || context.plan.rules.iter().filter(|rule| rule.source.namespace == source).any(|rule| {
                        *self.rules.state(rule.id) == RuleState::Blocked(BlockReason::SourceGone)
                            || is_other(self.sources.get(&rule.id).and_then(Option::as_ref))
                    }));
            // Applications create their collections when they start: an empty one is not the source that went.
            if replaced && self.is_empty(&source).await {
                now = None;
            }
            if now.is_some() {
                context.memory.saw(&source, now.clone());
            }
            for rule in context.plan.rules.iter().filter(|rule| rule.source.namespace == source) {
                let recorded = self.sources.get(&rule.id).cloned();
                match &now {
                    None if known.is_some() || recorded.is_some() => self.block(rule.id, BlockReason::SourceGone).await,
                    None => {}
                    Some(now) => self.take_source(rule, now, known.as_ref(), recorded.as_ref()).await,
                }
            }
        }
    }

    /// Whether a collection is empty, or cannot be read for now.
    async fn is_empty(&self, source: &Namespace) -> bool {
        let command = doc! {"find": &source.collection, "limit": 1, "projection": {"_id": 1}};
        let found = self.context.server.read(&source.database, command, Reads::default()).await;
        !found.is_ok_and(|found| !found.is_empty())
    }

    async fn take_source(&mut self, rule: &Rule, now: &Bson, known: Option<&Bson>, recorded: Option<&Option<Bson>>) {
        let mut attempts = 0;
        let was_another = |before: &Bson| before != now;
        if *self.rules.state(rule.id) == RuleState::Blocked(BlockReason::SourceGone) {
            tracing::info!(rule = %rule.name, "the source collection is there: the rule is backfilled from it");
            self.source_is_back(rule.id).await;
        } else if known.is_some_and(was_another) || recorded.and_then(Option::as_ref).is_some_and(was_another) {
            tracing::warn!(rule = %rule.name, "the source is another collection of the same name: the rule is backfilled from it");
            while let Err(error) = self.sweep(rule.id).await {
                self.not_recorded(&error, &mut attempts).await;
            }
        }
        if recorded.and_then(Option::as_ref) == Some(now) {
            return;
        }
        let generation = self.rules.generation(rule.id);
        match self.store.source_seen(&self.context.server, &rule.name, generation, now).await {
            Ok(()) => drop(self.sources.insert(rule.id, Some(now.clone()))),
            Err(error) => {
                tracing::warn!(error = %error.message, "the source of a rule cannot be recorded; trying again");
            }
        }
    }

    fn ask_backfill(&mut self, wish: Wish) {
        if self.begun.insert(wish.rule, wish.generation) == Some(wish.generation) {
            return;
        }
        if self.backfills.send(wish).is_err() {
            tracing::error!("the backfill task is gone");
        }
    }

    fn ask_fan_out(&mut self, fan_out: FanOut) {
        self.context.memory.spreads(&fan_out.subject, true);
        self.fan_outs.insert(fan_out.subject.clone(), fan_out.clone());
        if self.spread.send(fan_out).is_err() {
            tracing::error!("the fan-out task is gone");
        }
    }

    fn spread_out(&mut self, done: &FanOut) {
        if self.fan_outs.get(&done.subject).is_some_and(|newest| newest.wish == done.wish) {
            self.fan_outs.remove(&done.subject);
            self.context.memory.spreads(&done.subject, false);
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
            // A receiver that is gone has been stopped.
            done.send(()).ok();
        }
    }

    async fn finish(&mut self, outcome: std::result::Result<Outcome, tokio::task::JoinError>) {
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                // Its keys stay held: the position does not move past them, and a restart does them again.
                tracing::error!(%error, "a reconcile ended by a panic; stopping");
                self.broken.cancel();
                return;
            }
        };
        if outcome.keys.iter().any(|ended| matches!(ended.end, End::Brake)) {
            self.block(outcome.lane.0, BlockReason::RemovalLimit).await;
        }
        if outcome.keys.iter().any(|ended| matches!(ended.end, End::SourceGone)) {
            self.block(outcome.lane.0, BlockReason::SourceGone).await;
        }
        let refused = |ended: &Ended| match &ended.end {
            End::Failed(error) if error.code == Some(UNAUTHORIZED) && ended.work.attempts >= REFUSALS => {
                Some(error.message.clone())
            }
            _ => None,
        };
        if let Some(reason) = outcome.keys.iter().find_map(refused) {
            self.lacks(outcome.lane.0, reason).await;
        }
        self.whole.remove(&(outcome.lane, outcome.number));
        self.count_outcome(&outcome);
        let pause = self.pause(&outcome);
        let mut failed: BTreeMap<String, (usize, u32)> = BTreeMap::new();
        let mut keys = Vec::with_capacity(outcome.keys.len());
        for ended in outcome.keys {
            let mut work = ended.work;
            let next = match ended.end {
                // The last two have blocked the rule.
                End::Done | End::SetAside | End::Brake | End::SourceGone => Next::Done { pause },
                // The backfill that follows does what is left of a rule that is stopped.
                End::Later(_) | End::Failed(_) if self.rules.state(outcome.lane.0).is_stopped() => Next::Done { pause },
                End::Spread(fan_out) => {
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

    /// How long the keys of a batch rest: recomputing a parent with a million children is not repeated for each event, but
    /// spaced by its own cost.
    fn pause(&self, outcome: &Outcome) -> Duration {
        let recomputes = outcome.lane.1 == Task::Value && self.context.plan.rule(outcome.lane.0).gathers();
        let cost = outcome.took / u32::try_from(outcome.keys.len().max(1)).unwrap_or(u32::MAX);
        if recomputes && cost > CHEAP { cost.min(LONGEST_PAUSE) } else { Duration::ZERO }
    }

    /// Publishes how far everything is, and saves positions from time to time.
    async fn report(&mut self) {
        self.observe();
        let applied = (0..self.streams.len()).map(|stream| self.schedule.applied(stream));
        let progress = Progress {
            applied: applied.min().unwrap_or_default(),
            pending: self.schedule.depth(),
            states: self.rules.states().clone(),
            fan_outs: self.fan_outs.len(),
        };
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
        let (context, store) = (self.context.clone(), self.store.clone());
        self.saver = Some(tokio::spawn(async move {
            let mut saved = Vec::new();
            for (nth, spec, position) in due {
                failpoint::here("position-saving");
                match store.save_position(&context.server, &spec.database, &spec.pipeline, &position).await {
                    Ok(()) => {
                        failpoint::here("position-saved");
                        saved.push((nth, position));
                    }
                    Err(error) => {
                        tracing::warn!(error = %error.message, "the position could not be saved; trying again");
                        context.metrics.trouble(None, "save position", &error);
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
