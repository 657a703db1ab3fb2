//! What asks for work beside the streams: dead letters that are due, and commands.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{Bson, RawDocumentBuf, oid::ObjectId};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::rules::read_sources;
use crate::{
    change::Namespace,
    checkpoint::{
        requests::{Retired, Work},
        store::Store,
    },
    dead_letter::{self, Letter},
    error::{Error, Result},
    key::Key,
    plan::RuleId,
    position::ClusterTime,
    prune::{self, Carried},
    reconcile::Context,
    request::Page,
    route::target_request,
    rule_state::RuleState,
};

/// How often the recorded states of the rules, and requests of commands, are read.
const READ_STATES: Duration = Duration::from_secs(1);
/// How often it is read which source collections exist.
const READ_SOURCES: Duration = Duration::from_secs(2);

/// Letters that are not due have to be read over: no more than a twentieth of the time.
const RARELY: u32 = 20;
/// A page of letters that is not done in this time is left to itself: a slow key among them may take many minutes.
const LONG: Duration = Duration::from_secs(5);
/// The most pages that are left to themselves.
const LATE: usize = 3;

/// Letters that are being tried, and the word that they have been.
type Tried = (Vec<Letter>, oneshot::Receiver<()>);

/// Tries dead letters again, a page at a time, each when its own pause is over.
pub(super) async fn retry(context: Arc<Context>, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let mut pause = dead_letter::ROUND;
    let mut late: Vec<Tried> = Vec::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => return,
        }
        let result = tokio::select! {
            result = retry_due(&context, &out, &mut late) => result,
            () = stop.cancelled() => return,
        };
        match result {
            Ok(reading) => pause = dead_letter::ROUND.max(reading * RARELY),
            Err(error) => tracing::warn!(error = %error.message, "dead letters cannot be read; trying again"),
        }
    }
}

/// Tries those that are due; returns how long it took to find them.
async fn retry_due(context: &Context, out: &mpsc::Sender<Page>, late: &mut Vec<Tried>) -> Result<Duration> {
    let Context { server, dead_letters, plan, limits, .. } = context;
    let mut reading = Duration::ZERO;
    let mut last: Option<RawDocumentBuf> = None;
    loop {
        while let Some(done) = late.iter_mut().position(|(_, acknowledged)| acknowledged.try_recv().is_ok()) {
            let (letters, _) = late.swap_remove(done);
            dead_letters.clear(server, &letters).await?;
        }
        let begun = Instant::now();
        let found = dead_letters.due(server, last.as_deref(), limits.batch_bytes).await?;
        reading += begun.elapsed();
        let Some((mut letters, id)) = found else { return Ok(reading) };
        last = Some(id);
        let rule = |letter: &Letter| plan.rules.iter().find(|rule| rule.name == letter.rule);
        let is_tried = |letter: &Letter| late.iter().flat_map(|(page, _)| page).any(|tried| tried.is_same(letter));
        letters.retain(|letter| rule(letter).is_some() && !is_tried(letter));
        if letters.is_empty() {
            continue;
        }
        let requests = letters.iter().filter_map(|letter| Some(letter.request(rule(letter)?))).collect();
        let after = server.operation_time().await?;
        let (done, mut acknowledged) = oneshot::channel();
        if out.send(Page { requests, after, done }).await.is_err() {
            return Ok(reading);
        }
        let patience = if late.len() < LATE { LONG } else { Duration::MAX };
        match tokio::time::timeout(patience, &mut acknowledged).await {
            Ok(Ok(())) => dead_letters.clear(server, &letters).await?,
            Ok(Err(_)) => return Ok(reading),
            Err(_) => late.push((letters, acknowledged)),
        }
    }
}

/// Looks for targets that commands want to be looked at again and for fields to take away, and answers when that is done.
pub(super) async fn requests(context: Arc<Context>, store: Store, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let round = async || {
        for asked in store.requests(&context.server).await? {
            let targets = match asked.work {
                Work::Look(targets) => targets,
                Work::Prune(paths) => return Ok(Some((asked.id, paths))),
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
    let prune = async |(id, paths): (ObjectId, Vec<Retired>)| {
        match prune::carry_out(&context, &paths, &stop).await? {
            Carried::Out => store.request_done(&context.server, id).await,
            Carried::Refused(why) => store.refuse_request(&context.server, id, &why).await,
            // The next leader begins again.
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
            // Not ended by a stop in the middle of a write: the lease is given back when all writes are answered.
            Ok(Some(asked)) => prune(asked).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "what commands ask for cannot be read; trying again");
        }
    }
}

/// A rule whose recorded state has changed: its new state and generation.
#[derive(Debug)]
pub(super) struct Changed {
    pub rule: RuleId,
    pub state: RuleState,
    pub generation: i64,
    /// Until when the loss of its source is agreed to.
    pub released: Option<ClusterTime>,
}

/// Reads the recorded states of the rules, which commands change, and ends pauses that are over.
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
        // For the command alone, which waits no longer than a leader is there: what `denormd wait` is asked after it must count
        // what was asked for. What cannot be recorded now is recorded the next time round.
        for (name, generation) in std::mem::take(&mut noticed) {
            if store.notice(&context.server, &name, generation).await.is_err() {
                noticed.push((name, generation));
            }
        }
        // Found resumed the next time round.
        if pauses && let Err(error) = store.resume(&context.server, None).await {
            tracing::warn!(error = %error.message, "the end of a pause cannot be recorded; trying again");
        }
    }
}

/// Reads from time to time which source collections exist.
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
