//! Work that does not come from the streams: dead letters that are due, and requests of commands.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{Bson, RawDocumentBuf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{Progress, keep, rules::read_sources};
use crate::{
    checkpoint::{
        requests::{Asked, Carried, Work},
        store::Store,
    },
    dead_letter::{self, DeadLetter, Written},
    inspection::adoption::{Losses, losses},
    jobs::{prune, undo},
    reconcile::Context,
    request::Page,
    route::target_request,
};
use denormd_model::{
    key::Key,
    namespace::Namespace,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Rule, RuleId};

/// Interval between reads of the recorded rule states and the requests of commands.
const READ_STATES: Duration = Duration::from_secs(1);
/// Interval between reads of the list of existing source collections.
const READ_SOURCES: Duration = Duration::from_secs(2);

/// Finding due dead letters also reads those that are not due: it takes no more than a twentieth of the time.
const RARELY: u32 = 20;
/// A page of dead letters that takes longer than this continues in the background: a slow key in it may take many
/// minutes.
const LONG: Duration = Duration::from_secs(5);
/// Maximum number of pages in the background.
const LATE: usize = 3;

/// Dead letters that are being retried, and the notification of their end.
type Tried = (Vec<DeadLetter>, oneshot::Receiver<()>);

/// Retries dead letters, a page at a time, each when its own pause is over, or after a change that was written at its key.
pub(super) async fn retry(
    context: Arc<Context>,
    mut written: mpsc::Receiver<(RuleId, Written)>,
    out: mpsc::Sender<Page>,
    stop: CancellationToken,
) {
    let mut pause = dead_letter::ROUND;
    let mut late: Vec<Tried> = Vec::new();
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
                context.dead_letters.hasten(&context.server, &context.plan.rule(*rule).name, written).await?;
            }
            retry_due(&context, &out, &mut late).await
        };
        let result = tokio::select! {
            result = round => result,
            () = stop.cancelled() => return,
        };
        match result {
            Ok(reading) => pause = dead_letter::ROUND.max(reading * RARELY),
            Err(error) => tracing::warn!(error = %error.message, "dead letters cannot be read; trying again"),
        }
    }
}

/// Retries the dead letters that are due; returns the time spent on finding them.
async fn retry_due(context: &Context, out: &mpsc::Sender<Page>, late: &mut Vec<Tried>) -> Result<Duration> {
    let Context { server, dead_letters, plan, limits, .. } = context;
    let mut reading = Duration::ZERO;
    let mut last: Option<RawDocumentBuf> = None;
    loop {
        while let Some(done) = late.iter_mut().position(|(_, acknowledged)| acknowledged.try_recv().is_ok()) {
            let (due, _) = late.swap_remove(done);
            dead_letters.clear(server, &due).await?;
        }
        let begun = Instant::now();
        let found = dead_letters.due(server, last.as_deref(), limits.batch_bytes).await?;
        reading += begun.elapsed();
        let Some((mut due, id)) = found else { return Ok(reading) };
        last = Some(id);
        let rule = |dead_letter: &DeadLetter| plan.rules.iter().find(|rule| rule.name == dead_letter.rule);
        let is_tried =
            |dead_letter: &DeadLetter| late.iter().flat_map(|(page, _)| page).any(|tried| tried.is_same(dead_letter));
        due.retain(|dead_letter| rule(dead_letter).is_some() && !is_tried(dead_letter));
        if due.is_empty() {
            continue;
        }
        let of =
            |dead_letter: &DeadLetter| rule(dead_letter).map(|rule| dead_letter.requests(rule).collect::<Vec<_>>());
        let requests = due.iter().filter_map(of).flatten().collect();
        let after = server.operation_time().await?;
        let (done, mut acknowledged) = oneshot::channel();
        if out.send(Page { requests, after, done }).await.is_err() {
            return Ok(reading);
        }
        let patience = if late.len() < LATE { LONG } else { Duration::MAX };
        match tokio::time::timeout(patience, &mut acknowledged).await {
            Ok(Ok(())) => dead_letters.clear(server, &due).await?,
            Ok(Err(_)) => return Ok(reading),
            Err(_) => late.push((due, acknowledged)),
        }
    }
}

/// Carries out the requests of commands: targets to reconcile again, and retired fields to remove. Answers when they
/// are done.
pub(super) async fn requests(context: Arc<Context>, store: Store, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let round = async || {
        for asked in store.requests(&context.server).await? {
            let targets = match asked.work {
                Work::Look(targets) => targets,
                work @ (Work::Prune(_) | Work::Undo) => return Ok(Some(Asked { work, ..asked })),
            };
            let Some(rule) = context.plan.rules.iter().find(|rule| rule.name == asked.rule) else {
                store.refuse_request(&context.server, asked.id, "the leader has no rule of that name").await?;
                continue;
            };
            let requests = targets.into_iter().map(|id| target_request(rule, Key::one(id))).collect();
            let after = context.server.operation_time().await?;
            let (done, acknowledged) = oneshot::channel();
            if out.send(Page { requests, after, done }).await.is_err() || acknowledged.await.is_err() {
                return Ok(None);
            }
            store.request_done(&context.server, asked.id).await?;
        }
        Ok::<_, Error>(None)
    };
    // The futures are large, and commands are rare.
    let carry_out = async |asked: Asked| {
        let carried = match &asked.work {
            Work::Prune(paths) => Box::pin(prune::carry_out(&context, paths, &stop)).await?,
            Work::Undo => Box::pin(undo::carry_out(&context, &store, &asked, &stop)).await?,
            Work::Look(_) => Carried::Out,
        };
        match carried {
            Carried::Out => store.request_done(&context.server, asked.id).await,
            Carried::Refused(why) => store.refuse_request(&context.server, asked.id, &why).await,
            // This leader tries again, or the next one starts over.
            Carried::Stopped => Ok(()),
        }
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(READ_STATES) => {}
            () = stop.cancelled() => return,
        }
        let result = tokio::select! {
            result = round() => result,
            () = stop.cancelled() => return,
        };
        let result = match result {
            // A stop does not interrupt a write: the lease is given back only when all writes are answered.
            Ok(Some(asked)) => carry_out(asked).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "what commands ask for cannot be read; trying again");
        }
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

/// Reads the recorded states of the rules, which commands change, and ends expired pauses.
pub(super) async fn states(
    context: Arc<Context>,
    store: Store,
    out: mpsc::Sender<(Vec<Changed>, oneshot::Sender<()>)>,
    stop: CancellationToken,
) {
    let mut seen: BTreeMap<String, i64> = BTreeMap::new();
    let mut noticed: Vec<(String, i64)> = Vec::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(READ_STATES) => {}
            () = stop.cancelled() => return,
        }
        let Ok(known) = store.standing(&context.server).await else { continue };
        let mut changed = Vec::new();
        let pauses = known.iter().any(|(_, record)| matches!(record.state, RuleState::Paused { .. }));
        for (name, record) in known {
            let generation = record.generation;
            if record.state == RuleState::Live && record.keeping.is_some() {
                keep::end(&context, &store, &name, generation).await;
            }
            let newer = seen.insert(name.clone(), generation) != Some(generation);
            let Some(rule) = context.plan.rules.iter().find(|rule| newer && rule.name == name) else { continue };
            if record.state.is_backfilling() || record.state.is_stopped() {
                changed.push(Changed { rule: rule.id, state: record.state, generation, released: record.released });
                noticed.push((name, generation));
            }
        }
        if !changed.is_empty() {
            let (reported, seen) = oneshot::channel();
            if out.send((changed, reported)).await.is_err() || seen.await.is_err() {
                return;
            }
        }
        // Lets the waiting command know that a leader has seen the state. A following `denormd wait` must count the
        // requested work. A failed write is repeated in the next round.
        for (name, generation) in std::mem::take(&mut noticed) {
            if store.notice(&context.server, &name, generation).await.is_err() {
                noticed.push((name, generation));
            }
        }
        // The next round finds the rules resumed.
        if pauses && let Err(error) = store.resume(&context.server, None).await {
            tracing::warn!(error = %error.message, "the end of a pause cannot be recorded; trying again");
        }
    }
}

/// Reads at intervals which source collections exist.
pub(super) async fn sources(
    context: Arc<Context>,
    out: mpsc::Sender<Vec<(Namespace, Option<Bson>)>>,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(READ_SOURCES) => {}
            () = stop.cancelled() => return,
        }
        match read_sources(&context).await {
            Ok(sources) => {
                if out.send(sources).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::debug!(error = %error.message, "source collections cannot be listed; trying again"),
        }
    }
}

/// A rule whose source is there again, and the UUID of the collection.
#[derive(Debug)]
pub(super) struct Returned {
    pub rule: RuleId,
    pub uuid: Bson,
}

/// Counts what the rules without a source would lose if they ran again, and reports those that may. An application that
/// writes one document creates the collection, and `mongorestore` fills it bit by bit: neither is the source's return.
pub(super) async fn returns(
    context: Arc<Context>,
    progress: watch::Receiver<Progress>,
    out: mpsc::UnboundedSender<Returned>,
    stop: CancellationToken,
) {
    // The count covers the whole rule, not only this partition's keys.
    let whole = context.whole();
    let mut waiting: BTreeMap<RuleId, Waiting> = BTreeMap::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(READ_SOURCES) => {}
            () = stop.cancelled() => return,
        }
        let states = progress.borrow().states.clone();
        let lacks = |rule: RuleId| states.get(rule.0) == Some(&RuleState::Blocked(BlockReason::SourceGone));
        waiting.retain(|rule, _| lacks(*rule));
        for rule in context.plan.rules.iter().filter(|rule| lacks(rule.id)) {
            let waits = waiting.entry(rule.id).or_default();
            if waits.next.is_some_and(|next| Instant::now() < next) {
                continue;
            }
            let begun = Instant::now();
            let looked = tokio::select! {
                looked = Box::pin(look(&whole, rule, waits)) => looked,
                () = stop.cancelled() => return,
            };
            waits.next = Some(Instant::now() + begun.elapsed() * RARELY);
            match looked {
                // The pipeline may have ended.
                Ok(Some(uuid)) => drop(out.send(Returned { rule: rule.id, uuid })),
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(rule = %rule.name, error = %error.message, "the source cannot be compared; trying again");
                }
            }
        }
    }
}

/// A rule that waits for its source.
#[derive(Debug, Default)]
struct Waiting {
    /// Time of the next count: counts take no more than a twentieth of the time.
    next: Option<Instant>,
    /// The losses that were logged last.
    logged: Option<Losses>,
}

/// The UUID of a rule's source, if it is there again and the rule may run.
async fn look(whole: &Context, rule: &Rule, waits: &mut Waiting) -> Result<Option<Bson>> {
    let Namespace { database, collection } = &rule.source.namespace;
    let Some(uuid) = whole.server.collection_uuids(database, &[collection]).await?.remove(collection) else {
        return Ok(None);
    };
    let losses = losses(whole, rule).await?;
    if losses.are_small() {
        return Ok(Some(uuid));
    }
    if waits.logged != Some(losses) {
        tracing::warn!(
            rule = %rule.name, %losses,
            "the source collection is there again, but the rule stays blocked; `denormd unblock {}` agrees to the loss", rule.name
        );
        waits.logged = Some(losses);
    }
    Ok(None)
}
