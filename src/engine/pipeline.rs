//! Joins the stages in data order, and stops them in reverse.
//!
//! The loop takes messages, one at a time, and never waits for the server: the state of a rule is recorded beside it
//! ([`record`]), and so are the checkpoints ([`streams`]).

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    checkpoint::store::Store,
    dead_letter::{DeadLetters, Written},
    jobs::Report,
    reconcile::Context,
    request::Page,
    route::Routed,
    unavailable,
    watch::{Delivery, StreamSpec, nested, streams},
};
use denormd_model::{
    failpoint,
    position::Position,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::Result;
use denormd_rules::plan::RuleId;

mod adoption;
mod batches;
mod feeders;
mod jobs;
mod keep;
mod publish;
mod record;
mod register;
mod rules;
pub mod schedule;
mod sources;
mod streams;

use batches::Batches;
use feeders::{Changed, Inbox};
use jobs::Jobs;
use record::Change;
use register::register_rules;
use rules::{Rules, rules_of};
use schedule::{Hold, Schedule};
use sources::{Seen, read_sources};
pub use streams::SAVE_POSITION;
use streams::Streams;

/// Longest interval between turns of the loop.
const TICK: Duration = Duration::from_millis(100);
/// Capacity of the channel of writes that dead letters are retried for.
const WRITTEN: usize = 2;

/// A running pipeline.
#[derive(Debug)]
pub struct Handle {
    /// The dependencies that its work uses.
    pub context: Arc<Context>,
    task: tokio::task::JoinHandle<()>,
}

impl Handle {
    /// Stops the pipeline: takes no new work, finishes the work in flight, and saves the checkpoints.
    pub async fn stop(self) {
        self.context.stopping.cancel();
        if self.task.await.is_err() {
            tracing::error!("the pipeline panicked");
        }
    }

    /// Ends like a crash: nothing is finished, nothing is saved.
    pub fn abort(self) {
        self.task.abort();
        self.context.stopping.cancel();
    }

    /// Waits for the end of the pipeline. By itself it ends only after a rewind of the cluster, or a panic.
    pub async fn ended(&self) {
        self.context.published.subscribe().wait_for(|snapshot| snapshot.ended).await.ok();
    }

    /// True if the pipeline has ended because the cluster was restored to an earlier time: another one starts from there.
    #[must_use]
    pub fn is_rewound(&self) -> bool {
        self.context.published.borrow().rewound
    }

    /// Waits until everything committed by now is applied, through whole chains of rules, and no backfill is open.
    pub async fn settled(&self) -> Result<()> {
        let Context { plan, counts, server, published, .. } = &*self.context;
        for _ in 0..=plan.longest_chain() {
            let before = counts.effects();
            published.has_applied(server.operation_time().await?).await?;
            // A round that changes nothing leaves no work for further rules.
            if counts.effects() == before {
                break;
            }
        }
        Ok(())
    }
}

/// Decides whether the new and changed rules of a plan may write, and records that: [`start`] finds it decided.
pub async fn decide(context: &Context) -> Result<()> {
    let DeadLetters { database, deployment, .. } = &context.dead_letters;
    let store = Store::open_partition(&context.server, database, deployment, context.partition).await?;
    let known = store.rules(&context.server).await?;
    // The futures here are large.
    Box::pin(adoption::decide(context, &known)).await?;
    Ok(())
}

/// Starts following the streams of a plan. New and changed rules are recorded and backfilled.
pub async fn start(context: Arc<Context>, store: Store) -> Result<Handle> {
    context.memory.fan_outs.clear();
    // The futures here are large.
    let rules = Box::pin(register_rules(&context, &store)).await?;
    let now = context.server.operation_time().await?;
    let (written, retried) = mpsc::channel(WRITTEN);
    let mut pipeline = Pipeline::new(context.clone(), store.clone(), rules, Jobs::new(written));
    let mut forgotten = BTreeSet::new();
    let nested = Box::pin(nested(&context.server, &context.plan)).await?;
    for spec in streams(&context.plan, &nested) {
        let position = store.position(&context.server, &spec.database, &spec.pipeline).await?;
        if position.is_none() {
            forgotten.extend(rules_of(&context.plan, &spec.database));
        }
        pipeline.follow(spec, position.unwrap_or(Position { time: now, token: None }));
    }
    pipeline.take_sources(read_sources(&context).await?);
    for (rule, reason) in Box::pin(unavailable::still(&context)).await? {
        pipeline.change(rule, Change::Unavailable(reason), None);
    }
    // The backfill of a rule is complete up to a checkpoint: without one, the rule is backfilled again, from the start.
    for rule in forgotten {
        if !matches!(pipeline.rules.state(rule), RuleState::Backfilling { after: None, in_sources: false, .. }) {
            pipeline.change(rule, Change::Backfill, None);
        }
    }
    pipeline.record_all().await?;
    for rule in &context.plan.order {
        pipeline.act_on_state(*rule);
    }
    for fan_out in context.fan_outs.all(&context.server, &context.plan).await? {
        pipeline.jobs.fan_out(&context, fan_out);
    }
    failpoint::here("rules-registered");
    // Saved only after the rules are recorded for a backfill: after a crash in between, they would count as complete.
    for stream in pipeline.streams.iter() {
        if let Some(position) = stream.saved.as_ref().filter(|position| position.token.is_none()) {
            let StreamSpec { database, pipeline, .. } = &stream.spec;
            let now = context.server.operation_time().await?;
            store.save_position(&context.server, database, pipeline, position, None, now).await?;
        }
    }
    context.metrics.rules(context.plan.rules.iter().map(|rule| rule.name.as_str()));
    pipeline.publish();
    let task = tokio::spawn(pipeline.run(retried));
    Ok(Handle { context, task })
}

struct Pipeline {
    context: Arc<Context>,
    store: Store,
    schedule: Schedule,
    rules: Rules,
    streams: Streams,
    batches: Batches,
    jobs: Jobs,
    pages: Vec<(usize, oneshot::Sender<()>)>,
    /// The result of [`Pipeline::backlog`], shared with the streams.
    waiting: Arc<AtomicUsize>,
    /// Time at which the figures of each rule were last published.
    published: Option<Instant>,
}

impl Drop for Pipeline {
    /// Also after a panic: those that wait for the pipeline learn that it has ended.
    fn drop(&mut self) {
        self.context.published.update(|snapshot| {
            snapshot.ended = true;
            true
        });
    }
}

impl Pipeline {
    fn new(context: Arc<Context>, store: Store, rules: Rules, jobs: Jobs) -> Self {
        Self {
            schedule: Schedule::new(context.plan.clone(), context.limits.pending)
                .within(context.partition)
                .sharing(&context.plan, context.memory.pending.clone()),
            context,
            store,
            rules,
            streams: Streams::new(),
            batches: Batches::default(),
            jobs,
            pages: Vec::new(),
            waiting: Arc::default(),
            published: None,
        }
    }

    fn follow(&mut self, spec: StreamSpec, position: Position) {
        self.schedule.follow(position.clone());
        self.streams.add(spec, position);
    }

    async fn run(mut self, retried: mpsc::Receiver<(RuleId, Written)>) {
        let stop = self.context.stopping.clone();
        let (mut feeders, mut inbox) = Inbox::open(&self, retried);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !stop.is_cancelled() {
            self.record();
            self.dispatch();
            self.waiting.store(self.backlog(), Ordering::Relaxed);
            let room = self.schedule.queue().has_room();
            // While all batches run, due keys wait for a free one: a timer in the past would make the loop spin.
            let due =
                self.schedule.queue().next_due().filter(|_| self.batches.running.len() < self.context.limits.batches);
            tokio::select! {
                Some(delivery) = inbox.deliveries.recv(), if room => self.take(delivery),
                Some(page) = inbox.pages.recv(), if room => self.take_page(page),
                Some(report) = inbox.reports.recv() => self.take_report(report),
                Some((changed, published)) = inbox.states.recv() => self.take_states(changed, published),
                Some(seen) = inbox.sources.recv() => self.take_seen(seen),
                Some((order, recorded)) = self.rules.recorder.recorded(&stop) => self.recorded(order, recorded),
                Some(outcome) = self.batches.running.join_next() => self.ended(outcome),
                // Feeders with nothing to do end by themselves.
                Some(Err(error)) = feeders.join_next() => {
                    tracing::error!(%error, "a pipeline task panicked; stopping");
                    stop.cancel();
                }
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                _ = tick.tick() => {}
                () = stop.cancelled() => {}
            }
            self.report();
        }
        // Dropping it ends every task that waits for an answer to a message in it.
        drop(inbox);
        self.close().await;
        while feeders.join_next().await.is_some() {}
    }

    /// Finishes the work in flight, and saves the checkpoints.
    async fn close(&mut self) {
        // A batch may take as long as a read. Meanwhile the figures are published, so the loop does not count as blocked.
        let mut tick = tokio::time::interval(TICK);
        while !self.batches.running.is_empty() {
            tokio::select! {
                Some(outcome) = self.batches.running.join_next() => self.ended(outcome),
                _ = tick.tick() => self.publish(),
            }
        }
        self.record();
        while let Some((order, recorded)) = self.rules.recorder.recorded(&self.context.stopping).await {
            self.recorded(order, recorded);
            self.record();
        }
        self.streams.close(&self.context, &self.store, &self.schedule).await;
        self.report();
    }

    fn take(&mut self, delivery: Delivery) {
        self.count_events(&delivery);
        let mut routed = Routed::default();
        let batch = self.schedule.begin(delivery.stream);
        let hold = Some(Hold { stream: delivery.stream, batch });
        for event in &delivery.events {
            let origin = self.schedule.route_event(delivery.stream, batch, event, &mut routed);
            // Another collection took the name of the source (`$out`, a rename).
            let mut gone = std::mem::take(&mut routed.renewed);
            gone.append(&mut routed.sources_gone);
            // The loss may have been accepted after the event, which is read later: after a crash, or behind a backlog.
            gone.retain(|rule| self.rules.released.get(rule).is_none_or(|released| event.cluster_time > *released));
            for rule in gone {
                self.change(rule, Change::Block(BlockReason::SourceGone), hold);
            }
            let (rules, plan) = (&self.rules, &self.context.plan);
            for request in routed.requests.drain(..).filter(|request| rules.may_run(plan, request.rule)) {
                self.schedule.enqueue(request, origin);
            }
            self.schedule.event_routed(event);
        }
        let database = self.streams.delivered(delivery.stream);
        if delivery.lost {
            routed.backfills.extend(rules_of(&self.context.plan, database));
        }
        for rule in routed.backfills.into_iter().collect::<BTreeSet<_>>() {
            let change = if delivery.lost { Change::Lost } else { Change::Backfill };
            self.change(rule, change, hold);
        }
        failpoint::here("routed");
        self.schedule.end(delivery.stream, batch, delivery.position, delivery.more);
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

    fn take_report(&mut self, report: Report) {
        match report {
            Report::Backfilled(request) => self.backfilled(&request),
            Report::FannedOut(done) => self.context.memory.fan_outs.end(&done),
            Report::Refused(rule, reason) => drop(self.change(rule, Change::Unavailable(reason), None)),
        }
    }

    fn take_states(&mut self, changed: Vec<Changed>, published: oneshot::Sender<()>) {
        for changed in changed {
            self.take_state(changed);
        }
        self.publish_now();
        // The receiver may have been stopped.
        published.send(()).ok();
    }

    fn take_seen(&mut self, seen: Seen) {
        match seen {
            Seen::All(sources) => self.take_sources(sources),
            Seen::Returned { rule, uuid } => drop(self.change(rule, Change::SourceBack(uuid), None)),
        }
    }

    /// Publishes the progress, and saves the checkpoints at intervals.
    fn report(&mut self) {
        self.publish();
        self.streams.save_at_intervals(&self.context, &self.store, &self.schedule);
        if self.streams.is_rewound() {
            self.context.stopping.cancel();
        }
    }
}
