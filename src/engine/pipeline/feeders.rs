//! All that works beside the pipeline's loop and sends messages to it: the streams, the jobs, the retries of dead letters,
//! requests of commands, and reads of the rules' states and sources.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bson::{RawDocumentBuf, oid::ObjectId};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    Pipeline, keep,
    sources::{self, Seen},
};
use crate::{
    checkpoint::{
        requests::{OperatorRequest, RequestOutcome, RequestedWork},
        store::Store,
    },
    dead_letter::{self, DeadLetter, Written},
    jobs::{Report, audit, backfill, fan_out, prune, undo},
    reconcile::Context,
    request::{Page, SentPage},
    route::target_request,
    unavailable,
    watch::{Delivery, follow},
};
use denormd_model::{key::Key, position::ClusterTime, rule_state::RuleState};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::RuleId;

/// Capacity of the channel between the streams and the pipeline, in deliveries.
const DELIVERIES: usize = 2;
/// Capacity of the channel for reports.
const REPORTS: usize = 16;
/// Interval between reads of the recorded rule states and the requests of commands.
const READ_STATES: Duration = Duration::from_secs(1);

/// Finding due dead letters also reads those that are not due: it takes no more than a twentieth of the time.
const PAUSE_FACTOR: u32 = 20;
/// A page of dead letters, or of a command's request, that takes longer than this continues in the background: a slow key in
/// it may take many minutes.
const LONG: Duration = Duration::from_secs(5);
/// With this number of pages in the background, a rule that has dead letters in one of them gets no further page.
const MAX_BACKGROUND_PAGES: usize = 3;

/// Dead letters that are being retried, and their requests.
type Retried = (Vec<DeadLetter>, SentPage);

/// Retries dead letters, a page at a time, each when its own pause is over, or after a change that was written at its key.
async fn retry(
    context: Arc<Context>,
    mut written: mpsc::Receiver<(RuleId, Written)>,
    out: mpsc::Sender<Page>,
    stop: CancellationToken,
) {
    let mut pause = dead_letter::ROUND;
    let mut late: Vec<Retried> = Vec::new();
    loop {
        let mut changed: BTreeMap<RuleId, Written> = BTreeMap::new();
        let mut over = std::pin::pin!(tokio::time::sleep(pause));
        loop {
            tokio::select! {
                () = &mut over => break,
                Some((rule, written)) = written.recv() => changed.entry(rule).or_default().join(written),
                () = stop.cancelled() => return,
            }
        }
        let round = async {
            for (rule, written) in &changed {
                context.dead_letters.make_due(&context.server, &context.plan.rule(*rule).name, written).await?;
            }
            retry_due(&context, &out, &mut late).await
        };
        let Some(result) = stop.run_until_cancelled(round).await else { return };
        match result {
            Ok(reading) => pause = dead_letter::ROUND.max(reading * PAUSE_FACTOR),
            Err(error) => tracing::warn!(error = %error.message, "dead letters cannot be read; trying again"),
        }
    }
}

/// Retries the dead letters that are due; returns the time spent on finding them.
async fn retry_due(context: &Context, out: &mpsc::Sender<Page>, late: &mut Vec<Retried>) -> Result<Duration> {
    let Context { server, dead_letters, plan, limits, .. } = context;
    let mut reading = Duration::ZERO;
    let mut last: Option<RawDocumentBuf> = None;
    let rule = |dead_letter: &DeadLetter| plan.named(&dead_letter.rule);
    // The requests of a rule that is stopped are dropped, and count as done.
    let runs =
        |dead_letter: &DeadLetter| rule(dead_letter).is_some_and(|rule| context.published.borrow().runs(rule.id.0));
    let clear = async |mut tried: Vec<DeadLetter>| {
        tried.retain(runs);
        if tried.is_empty() { Ok(()) } else { dead_letters.clear(server, &tried).await }
    };
    loop {
        while let Some(done) = late.iter_mut().position(|(_, page)| page.is_done()) {
            let (due, _) = late.swap_remove(done);
            clear(due).await?;
        }
        let begun = Instant::now();
        let found = dead_letters.due(server, last.as_deref(), limits.batch_bytes).await?;
        reading += begun.elapsed();
        let Some((found, id)) = found else { return Ok(reading) };
        last = Some(id);
        let mut due = Vec::with_capacity(found.len());
        for entry in found {
            match entry {
                Ok(dead_letter) => due.push(dead_letter),
                Err(unreadable) => {
                    let (rule, error) = (unreadable.rule.as_deref(), unreadable.error());
                    tracing::error!(rule, error = %error.message, "a dead letter is left as it is");
                    context.metrics.record_error(rule, "read a dead letter", &error);
                }
            }
        }
        let is_full = late.len() >= MAX_BACKGROUND_PAGES;
        let is_tried = |dead_letter: &DeadLetter| {
            let is_waited_for =
                |tried: &DeadLetter| tried.is_same(dead_letter) || is_full && tried.rule == dead_letter.rule;
            late.iter().flat_map(|(page, _)| page).any(is_waited_for)
        };
        due.retain(|dead_letter| runs(dead_letter) && !is_tried(dead_letter));
        // A former leader may have recorded it late, after this one deleted those of the former definition.
        let is_current = |dead_letter: &DeadLetter| rule(dead_letter).is_some_and(|rule| dead_letter.is_of(rule));
        let stale = due.extract_if(.., |dead_letter| !is_current(dead_letter)).collect();
        clear(stale).await?;
        if due.is_empty() {
            continue;
        }
        let of =
            |dead_letter: &DeadLetter| rule(dead_letter).map(|rule| dead_letter.requests(rule).collect::<Vec<_>>());
        let requests = due.iter().filter_map(of).flatten().collect();
        let after = server.operation_time().await?;
        let Ok(mut page) = Page::send(out, requests, after).await else { return Ok(reading) };
        match tokio::time::timeout(LONG, page.done()).await {
            Ok(Ok(())) => clear(due).await?,
            Ok(Err(_)) => return Ok(reading),
            Err(_) => late.push((due, page)),
        }
    }
}

/// Carries out the requests of commands: targets to reconcile again, and retired fields to remove. Answers when they
/// are done.
async fn requests(context: Arc<Context>, store: Store, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let mut late: Vec<(ObjectId, SentPage)> = Vec::new();
    let mut round = async || {
        while let Some(done) = late.iter_mut().position(|(_, page)| page.is_done()) {
            let (id, _) = late.swap_remove(done);
            store.request_done(&context.server, id).await?;
        }
        let in_progress: Vec<ObjectId> = late.iter().map(|(id, _)| *id).collect();
        for asked in store.requests(&context.server, &in_progress).await? {
            let targets = match asked.work {
                RequestedWork::Reconcile(targets) => targets,
                work @ (RequestedWork::Prune(_) | RequestedWork::Undo) => {
                    return Ok(Some(OperatorRequest { work, ..asked }));
                }
            };
            let Some(rule) = context.plan.named(&asked.rule) else {
                store
                    .refuse_request(
                        &context.server,
                        asked.id,
                        "the leader has no rule of that name: does it run with this config?",
                    )
                    .await?;
                continue;
            };
            let requests = targets.into_iter().map(|id| target_request(rule, Key::one(id))).collect();
            let after = context.server.operation_time().await?;
            let Ok(mut page) = Page::send(&out, requests, after).await else { return Ok(None) };
            // A slow repair goes on in the background: other requests wait for it for five seconds at most.
            match tokio::time::timeout(LONG, page.done()).await {
                Ok(Ok(())) => store.request_done(&context.server, asked.id).await?,
                Ok(Err(_)) => return Ok(None),
                Err(_) => late.push((asked.id, page)),
            }
        }
        Ok::<_, Error>(None)
    };
    // The futures are large, and commands are rare.
    let carry_out = async |asked: OperatorRequest| {
        let carried = match &asked.work {
            RequestedWork::Prune(paths) => Box::pin(prune::carry_out(&context, &store, (asked.id, paths), &stop)).await,
            RequestedWork::Undo => Box::pin(undo::carry_out(&context, &store, &asked, &stop)).await,
            RequestedWork::Reconcile(_) => Ok(RequestOutcome::Done),
        };
        match carried {
            Ok(RequestOutcome::Done) => store.request_done(&context.server, asked.id).await,
            Ok(RequestOutcome::Refused(why)) => store.refuse_request(&context.server, asked.id, &why).await,
            // This leader tries again, or the next one starts over.
            Ok(RequestOutcome::Stopped) => Ok(()),
            Err(error) if error.is_transient() => Err(error),
            // It would fail again, and no other request would have its turn.
            Err(error) => {
                tracing::warn!(rule = asked.rule, error = %error.message, "the request of a command is refused");
                context.metrics.record_error(Some(&asked.rule), "carry out the request of a command", &error);
                store.refuse_request(&context.server, asked.id, &error.to_string()).await
            }
        }
    };
    while stop.run_until_cancelled(tokio::time::sleep(READ_STATES)).await.is_some() {
        let Some(result) = stop.run_until_cancelled(round()).await else { return };
        let result = match result {
            // A stop does not interrupt a write: the lease is given back only when all writes are answered.
            Ok(Some(asked)) => carry_out(asked).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "the requests of commands cannot be read; trying again");
        }
    }
}

/// Messages to the pipeline.
#[derive(Debug)]
pub(super) struct Inbox {
    /// Batches of events.
    pub deliveries: mpsc::Receiver<Delivery>,
    /// Requests that do not come from a stream.
    pub pages: mpsc::Receiver<Page>,
    /// Reports of the backfills and the fan-out jobs.
    pub reports: mpsc::Receiver<Report>,
    /// Recorded states that have changed; answered when they are published.
    pub states: mpsc::Receiver<(Vec<Changed>, oneshot::Sender<()>)>,
    /// Findings about sources.
    pub sources: mpsc::Receiver<Seen>,
}

impl Inbox {
    /// Starts all that works beside the loop, until the pipeline stops. The channels are bounded, and the loop always
    /// reads them, except for deliveries and pages while the queue is full.
    pub fn open(pipeline: &Pipeline, written: mpsc::Receiver<(RuleId, Written)>) -> (JoinSet<()>, Self) {
        let (context, store, stop) = (&pipeline.context, &pipeline.store, &pipeline.context.stopping);
        let (deliver, deliveries) = mpsc::channel(DELIVERIES);
        let (page, pages) = mpsc::channel(1);
        let (report, reports) = mpsc::channel(REPORTS);
        let (change, changed) = mpsc::channel(1);
        let (see, seen) = mpsc::channel(1);
        let mut feeders = JoinSet::new();
        for stream in pipeline.streams.iter() {
            let Some(position) = stream.saved.clone() else { continue };
            let (context, deliver, stop) = (context.clone(), deliver.clone(), stop.clone());
            let (spec, waiting) = (stream.spec.clone(), pipeline.waiting.clone());
            feeders.spawn(async move {
                follow(&context.server, &context.metrics, &spec, position, waiting, deliver, stop).await;
            });
        }
        let (asked, out) = (pipeline.jobs.backfills.clone(), page.clone());
        feeders.spawn(backfill::run(context.clone(), store.clone(), asked, out, report.clone(), stop.clone()));
        let (asked, out) = (pipeline.jobs.fan_outs.clone(), page.clone());
        feeders.spawn(fan_out::run(context.clone(), asked, out, report, stop.clone()));
        feeders.spawn(unavailable::watch(context.clone(), store.clone(), stop.clone()));
        feeders.spawn(retry(context.clone(), written, page.clone(), stop.clone()));
        feeders.spawn(keep::expire(context.clone(), stop.clone()));
        feeders.spawn(requests(context.clone(), store.clone(), page.clone(), stop.clone()));
        feeders.spawn(states(context.clone(), store.clone(), change, stop.clone()));
        feeders.spawn(sources::look_at_intervals(context.clone(), see.clone(), stop.clone()));
        feeders.spawn(sources::returns(context.clone(), see, stop.clone()));
        let snapshot = context.published.subscribe();
        let applied = Box::new(move |rule| snapshot.borrow().applied_of(rule));
        feeders.spawn(audit::run(context.clone(), applied, page, stop.clone()));
        (feeders, Self { deliveries, pages, reports, states: changed, sources: seen })
    }
}

/// A rule whose recorded state has changed, with its new state and generation.
#[derive(Debug)]
pub(super) struct Changed {
    pub rule: RuleId,
    pub state: RuleState,
    pub generation: i64,
    /// Time up to which the loss of its source is accepted.
    pub released: Option<ClusterTime>,
}

/// A change of a rule's state that a command waits for the leader to notice.
#[derive(Debug, Clone, Copy)]
struct Noticed {
    rule: RuleId,
    generation: i64,
    /// The change stops the rule.
    stops: bool,
}

/// Reads the recorded states of the rules, which commands change, and ends expired pauses.
async fn states(
    context: Arc<Context>,
    store: Store,
    out: mpsc::Sender<(Vec<Changed>, oneshot::Sender<()>)>,
    stop: CancellationToken,
) {
    let mut seen: BTreeMap<String, i64> = BTreeMap::new();
    let mut noticed: Vec<Noticed> = Vec::new();
    loop {
        let read = async {
            tokio::time::sleep(READ_STATES).await;
            store.standing(&context.server).await
        };
        // The driver's futures are large.
        let Some(known) = stop.run_until_cancelled(Box::pin(read)).await else { return };
        let known = match known {
            Ok(known) => known,
            Err(error) => {
                tracing::warn!(error = %error.message, "the states of the rules cannot be read; trying again");
                continue;
            }
        };
        let mut changed = Vec::new();
        let pauses = known.iter().any(|(_, record)| matches!(record.state, RuleState::Paused { .. }));
        for (name, record) in known {
            let generation = record.generation;
            if record.state == RuleState::Live && record.keeping.is_some() {
                keep::end(&context, &store, &name, generation).await;
            }
            let newer = seen.insert(name.clone(), generation) != Some(generation);
            let Some(rule) = context.plan.rules.iter().find(|rule| newer && rule.name == name) else { continue };
            let waits_again = record.state == RuleState::AwaitingBackfill;
            if record.state.is_backfilling() || record.state.is_stopped() || waits_again {
                let stops = record.state.is_stopped();
                // Nobody waits for an earlier change any more.
                noticed.retain(|other| other.rule != rule.id);
                noticed.push(Noticed { rule: rule.id, generation, stops });
                changed.push(Changed { rule: rule.id, state: record.state, generation, released: record.released });
            }
        }
        if !changed.is_empty() {
            let (reported, seen) = oneshot::channel();
            if out.send((changed, reported)).await.is_err() || seen.await.is_err() {
                return;
            }
        }
        // Lets the waiting command know that a leader has seen the state. A following `denormd wait` must count the
        // requested work, and after a pause nothing is written any more. A failed write is repeated in the next round.
        for noticing in std::mem::take(&mut noticed) {
            let Noticed { rule, generation, stops } = noticing;
            let writes = stops && context.published.borrow().running.contains(&rule.0);
            if writes || store.notice(&context.server, &context.plan.rule(rule).name, generation).await.is_err() {
                noticed.push(noticing);
            }
        }
        // The next round finds the rules resumed.
        if pauses && let Err(error) = store.resume_ended(&context.server, &context.plan).await {
            tracing::warn!(error = %error.message, "the end of a pause cannot be recorded; trying again");
        }
    }
}
