//! Joins the stages in data order, and stops them in reverse.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, btree_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    audit,
    backfill::{self, Wish},
    checkpoint::{
        fan_out::{FanOut, Subject},
        store::{Backfill, Hold, Store},
    },
    error::Result,
    failpoint, fan_out,
    plan::RuleId,
    position::{ClusterTime, Position},
    reconcile::{
        self, Context, Outcome,
        run::{End, Ended},
    },
    request::{Page, Scope, Task},
    route::Routed,
    suspension::{self, UNAUTHORIZED},
    watch::{Delivery, StreamSpec, follow, streams},
    workqueue::{Batch, Lane, Most},
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

mod feeders;
mod observe;
mod rules;
pub mod schedule;

use feeders::{Wishes, requests, retry, wishes};
use rules::{look_for_sources, register_rules, releases, rules_of};
use schedule::{Next, Schedule};

/// How far the daemon is.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Everything committed up to here is applied and acknowledged.
    pub applied: ClusterTime,
    /// Reconcile requests that wait or run.
    pub pending: usize,
    /// Rules whose backfill is not done.
    pub backfilling: BTreeSet<RuleId>,
    /// Large fan-outs that are not done.
    pub fan_outs: usize,
    /// Rules that are held until they are released, and why.
    pub held: BTreeMap<RuleId, Hold>,
}

impl Progress {
    /// Whether everything that was committed by `time` is applied, what that has led to included.
    #[must_use]
    pub fn has_applied(&self, time: ClusterTime) -> bool {
        self.applied >= time && self.backfilling.is_empty() && self.fan_outs == 0
    }

    /// Up to when everything is applied, where the targets of `rule` are true by then: not while it is being backfilled, or is
    /// held.
    #[must_use]
    pub fn applied_of(&self, rule: RuleId) -> Option<ClusterTime> {
        let settled = self.fan_outs == 0 && !self.backfilling.contains(&rule) && !self.held.contains_key(&rule);
        settled.then_some(self.applied)
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
    let (backfills, held) = register_rules(&context, &store).await?;
    let now = context.server.operation_time().await?;
    let mut starts = Vec::new();
    let mut forgotten = BTreeSet::new();
    for spec in streams(&context.plan) {
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
    let gone = look_for_sources(&context, &store).await?;
    // The driver's futures are large.
    let lacking = Box::pin(suspension::still(&context)).await?;
    let mut pipeline = Pipeline::new(context.clone(), store.clone());
    pipeline.held = held;
    pipeline.released = released;
    for rule in gone {
        pipeline.hold(rule, "its source collection is gone", true).await;
    }
    for (rule, reason) in lacking {
        Box::pin(pipeline.suspend(rule, reason)).await?;
    }
    // A rule is done up to a position: without one, it is done again.
    for rule in forgotten {
        if !backfills.iter().any(|wish| wish.rule == rule) && !pipeline.held.contains_key(&rule) {
            pipeline.sweep(rule).await?;
        }
    }
    for wish in backfills.into_iter().filter(|wish| !pipeline.held.contains_key(&wish.rule)).collect::<Vec<_>>() {
        pipeline.ask_backfill(wish);
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
    let stop = CancellationToken::new();
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
    /// Rules whose backfill is not done, with the generation of the last wish.
    backfilling: BTreeMap<RuleId, i64>,
    spread: mpsc::UnboundedSender<FanOut>,
    spread_asked: Option<mpsc::UnboundedReceiver<FanOut>>,
    /// Large fan-outs that are not done.
    fan_outs: HashMap<Subject, FanOut>,
    /// Rules that are held until they are released, and why.
    held: BTreeMap<RuleId, Hold>,
    /// Until when the loss of a rule's source was released before this start.
    released: BTreeMap<RuleId, ClusterTime>,
    pages: VecDeque<(u64, oneshot::Sender<()>)>,
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
            context,
            store,
            streams: Vec::new(),
            waiting: Arc::default(),
            running: JoinSet::new(),
            whole: HashMap::new(),
            backfills,
            asked: Some(asked),
            backfilling: BTreeMap::new(),
            spread,
            spread_asked: Some(spread_asked),
            fan_outs: HashMap::new(),
            held: BTreeMap::new(),
            released: BTreeMap::new(),
            pages: VecDeque::new(),
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
        feeders.spawn(wishes(self.context.clone(), self.store.clone(), ask, stop.clone()));
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
                Some(wishes) = asked.recv() => self.take_wishes(wishes),
                Some(wish) = finished.recv() => {
                    if self.backfilling.get(&wish.rule).is_some_and(|asked| *asked <= wish.generation) {
                        self.backfilling.remove(&wish.rule);
                    }
                }
                Some(done) = spread_out.recv() => self.spread_out(&done),
                Some((rule, reason)) = lacking.recv() => self.lacks(rule, reason).await,
                Some(outcome) = self.running.join_next() => self.finish(outcome).await,
                () = sleep_until(due), if due.is_some() => {}
                _ = tick.tick() => {}
                () = stop.cancelled() => break,
            }
            self.report().await;
        }
        drop((deliveries, pages));
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
            let Some(mut batch) = self.schedule.take(most, now) else { return };
            if self.held.get(&batch.lane.0).is_some_and(Hold::rests) {
                self.skip(batch);
                continue;
            }
            let elsewhere = !self.fan_outs.is_empty() || self.backfilling.contains_key(&batch.lane.0);
            self.schedule.postpone_verdicts(&mut batch, elsewhere, now);
            let detached = self.held.contains_key(&batch.lane.0);
            if batch.lane.1 == Task::Value && batch.items.iter().any(|(_, work)| work.scope == Scope::All) {
                let anew = batch.items.iter().any(|(_, work)| work.begun_anew.is_some());
                let begun = if anew { now.checked_sub(LONG) } else { None };
                self.whole.insert((batch.lane, batch.number), begun.unwrap_or(now));
            }
            self.running.spawn(reconcile::run(self.context.clone(), batch, detached));
        }
    }

    /// What waits of a rule that is paused or suspended is not done: the backfill that follows does it.
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
            for rule in routed.renewed.drain(..) {
                if self.held.get(&rule).is_some_and(|hold| !hold.rests()) {
                    self.held.remove(&rule);
                }
                self.context.saw(&self.context.plan.rule(rule).source.namespace, true);
                routed.sweeps.push(rule);
            }
            // In the order of the events: what follows a drop is not done any more.
            for rule in std::mem::take(&mut routed.bereft) {
                // Met again after a crash: the loss was released meanwhile.
                if self.released.get(&rule).is_some_and(|released| event.cluster_time <= *released) {
                    continue;
                }
                self.hold(rule, "its source collection was dropped or renamed away", true).await;
            }
            for request in routed.requests.drain(..).filter(|request| may_run(&self.context, &self.held, request.rule))
            {
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

    async fn not_recorded(&self, error: &crate::error::Error, attempts: &mut u64) {
        tracing::warn!(error = %error.message, "the state of a rule cannot be recorded; trying again");
        *attempts += 1;
        tokio::time::sleep(Duration::from_millis(100 * (*attempts).min(50))).await;
    }

    /// Stops a rule until somebody releases it: its fields stay as they are. Recorded before any event may be passed over.
    /// A rule that is paused or suspended is held all the same: coming back, it would take an absent source for an empty one.
    async fn hold(&mut self, rule: RuleId, reason: &str, detached: bool) {
        if self.held.get(&rule).is_some_and(|hold| !hold.rests()) {
            return;
        }
        let mut attempts = 0;
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        let hold = Hold { reason: reason.to_owned(), detached, paused: false, suspended: false };
        let state = Backfill::Held(hold.clone());
        while let Err(error) = self.store.reset_rule(&context.server, named, &state).await {
            self.not_recorded(&error, &mut attempts).await;
        }
        failpoint::here("held");
        tracing::error!(rule = %named.name, reason, "the rule is held: its fields stay as they are until `denormd release {}`", named.name);
        self.backfilling.remove(&rule);
        self.held.insert(rule, hold);
    }

    /// Sets a rule aside until the cluster has what it needs. Its events are passed over, its fan-outs forgotten: the backfill
    /// that it comes back by does all that. The others go on.
    async fn suspend(&mut self, rule: RuleId, reason: String) -> Result<()> {
        if self.held.contains_key(&rule) {
            return Ok(());
        }
        let context = self.context.clone();
        let named = context.plan.rule(rule);
        let hold = Hold { reason, detached: false, paused: false, suspended: true };
        Box::pin(self.store.reset_rule(&context.server, named, &Backfill::Held(hold.clone()))).await?;
        context.fan_outs.forget(&context.server, &named.name).await?;
        tracing::error!(rule = %named.name, reason = hold.reason, "the rule is suspended until the cluster has what it needs; the others go on");
        self.backfilling.remove(&rule);
        self.held.insert(rule, hold);
        Ok(())
    }

    /// The same where it can wait: what is refused is tried again, and refused again, until it is recorded.
    async fn lacks(&mut self, rule: RuleId, reason: String) {
        if let Err(error) = self.suspend(rule, reason).await {
            tracing::warn!(error = %error.message, "that a rule is suspended cannot be recorded yet");
        }
    }

    /// Backfills that commands have asked for, and rules that they have paused.
    fn take_wishes(&mut self, wishes: Wishes) {
        for (rule, hold) in wishes.paused {
            // A rule that is held stays so.
            if let Entry::Vacant(free) = self.held.entry(rule) {
                tracing::warn!(rule = %self.context.plan.rule(rule).name, "the rule is paused");
                free.insert(hold);
                // It is stopped: the state has a newer wish than the one it runs for.
                self.backfilling.remove(&rule);
            }
        }
        for wish in wishes.backfills {
            let known = self.backfilling.get(&wish.rule).is_some_and(|generation| *generation >= wish.generation);
            if !known {
                let hold = self.held.remove(&wish.rule);
                if hold.as_ref().is_some_and(Hold::rests) {
                    tracing::info!(rule = %self.context.plan.rule(wish.rule).name, "the rule is resumed");
                } else if hold.is_some() {
                    // The loss is wanted: an absent source is an empty one.
                    self.context.released(wish.rule);
                    self.context.saw(&self.context.plan.rule(wish.rule).source.namespace, false);
                    tracing::info!(rule = %self.context.plan.rule(wish.rule).name, "the rule is released");
                }
                self.ask_backfill(wish);
            }
        }
    }

    /// Marks a rule as in need of a whole backfill.
    async fn sweep(&mut self, rule: RuleId) -> Result<()> {
        if self.held.contains_key(&rule) {
            return Ok(());
        }
        let (store, context) = (&self.store, &self.context);
        let generation = store.reset_rule(&context.server, context.plan.rule(rule), &Backfill::Pending(None)).await?;
        self.ask_backfill(Wish { rule, generation, after: None });
        Ok(())
    }

    fn ask_backfill(&mut self, wish: Wish) {
        self.backfilling.insert(wish.rule, wish.generation);
        if self.backfills.send(wish).is_err() {
            tracing::error!("the backfill task is gone");
        }
    }

    fn ask_fan_out(&mut self, fan_out: FanOut) {
        if let Ok(mut spreading) = self.context.spreading.lock() {
            spreading.insert(fan_out.subject.clone());
        }
        self.fan_outs.insert(fan_out.subject.clone(), fan_out.clone());
        if self.spread.send(fan_out).is_err() {
            tracing::error!("the fan-out task is gone");
        }
    }

    fn spread_out(&mut self, done: &FanOut) {
        if self.fan_outs.get(&done.subject).is_some_and(|newest| newest.wish == done.wish) {
            self.fan_outs.remove(&done.subject);
            if let Ok(mut spreading) = self.context.spreading.lock() {
                spreading.remove(&done.subject);
            }
        }
    }

    fn take_page(&mut self, page: Page) {
        let (context, held) = (&self.context, &self.held);
        let requests = page.requests.into_iter().filter(|request| may_run(context, held, request.rule));
        let number = self.schedule.page(requests, page.after);
        self.pages.push_back((number, page.done));
        self.acknowledge_pages();
    }

    fn acknowledge_pages(&mut self) {
        while self.pages.front().is_some_and(|(page, _)| self.schedule.is_page_done(*page)) {
            if let Some((_, done)) = self.pages.pop_front() {
                // A receiver that is gone has been stopped.
                done.send(()).ok();
            }
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
            let reason = "`on_missing` would have destroyed more than limits.destroy_per_hour";
            self.hold(outcome.lane.0, reason, false).await;
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
                // The brake has held the rule.
                End::Done | End::SetAside | End::Brake => Next::Done { pause },
                // Whatever is left of a held rule is done by the backfill that follows its release.
                End::Later(_) | End::Failed(_) if self.held.contains_key(&outcome.lane.0) => Next::Done { pause },
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
            backfilling: self.backfilling.keys().copied().collect(),
            fan_outs: self.fan_outs.len(),
            held: self.held.clone(),
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

/// Whether requests of a rule are done: one whose source is gone still copies what it finds, which takes nothing away.
fn may_run(context: &Context, held: &BTreeMap<RuleId, Hold>, rule: RuleId) -> bool {
    held.get(&rule).is_none_or(|hold| hold.detached && !context.plan.rule(rule).gathers())
}

async fn sleep_until(due: Option<Instant>) {
    if let Some(due) = due {
        tokio::time::sleep_until(due.into()).await;
    }
}
