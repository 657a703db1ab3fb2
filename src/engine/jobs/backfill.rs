//! Brings existing targets up to date, a page at a time, through the same queue as live changes.
//!
//! A page requests the same reconciles as inserts of its targets. The queue runs one reconcile per key at a time, so
//! backfill and live writes commute. Progress is saved when a page is acknowledged, so a killed backfill resumes from
//! there.
//!
//! A rule that creates its targets is backfilled in two passes. The first is that over its targets. The second reads the
//! sources, and requests each key whose document is absent.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use bson::{Bson, Document};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    dead_letter::Chosen,
    jobs::{Report, mailbox::Mailbox},
    reconcile::{Context, scan},
    request::{Page, Request, Scope, SentPage, Task},
    route::{target_request, target_requests},
    snapshot::BackfillProgress,
};
use denormd_model::{failpoint, key::Key, position::ClusterTime, rule_state::RuleState};
use denormd_mongo::{
    code,
    command::decoded,
    error::{Kind, Result},
};
use denormd_rules::plan::{Rule, RuleId, reference::Role};

mod levels;
mod pace;

use pace::Pace;

/// Number of targets in one page.
const PAGE: i32 = 1000;
/// Number of pages in the queue at once: one is written while the next one is read.
const IN_FLIGHT: usize = 3;
/// Number of pages in the queue at once, if few of their keys are left: with `on_missing: remove` or `delete`, a reference
/// without a source waits for `limits.destroy_grace_seconds`.
const MOST_IN_FLIGHT: usize = 100;
/// Time after which a page that is not done may be waiting for a few keys.
const LATE: Duration = Duration::from_secs(1);
/// Pause after a failed page.
const PAUSE: Duration = Duration::from_secs(1);

/// A backfill request.
#[derive(Debug, Clone, PartialEq)]
pub struct BackfillRequest {
    /// The rule to backfill.
    pub rule: RuleId,
    /// The generation of the rule's state that contains the request. A newer request has a higher one.
    pub generation: i64,
    /// The `_id` of the target to resume after; None at the start.
    pub after: Option<Bson>,
    /// True if all targets are done, and `after` is the `_id` of a source.
    pub in_sources: bool,
}

/// Runs the requested backfills in the order of the plan, until `stop`.
pub async fn run(
    context: Arc<Context>,
    store: Store,
    asked: Arc<Mailbox<RuleId, BackfillRequest>>,
    out: mpsc::Sender<Page>,
    reports: mpsc::Sender<Report>,
    stop: CancellationToken,
) {
    let mut waiting = Waiting::default();
    let mut held_up: HashSet<RuleId> = HashSet::new();
    while !stop.is_cancelled() {
        let new = if waiting.is_empty() { stop.run_until_cancelled(asked.wait()).await } else { Some(asked.take()) };
        for request in new.into_iter().flatten() {
            waiting.add(request, false);
        }
        let Some(mut request) = waiting.next(&context.plan.order) else { return };
        let start = request.after.clone();
        let backfill =
            RuleBackfill { context: &context, store: &store, rule: context.plan.rule(request.rule), out: &out };
        let attempt = async {
            if request.after.is_none() && !request.in_sources && !backfill.is_registered_everywhere().await? {
                return Ok(None);
            }
            backfill.run(&mut request).await.map(Some)
        };
        let Some(result) = stop.run_until_cancelled(attempt).await else { return };
        let error = match result {
            Ok(None) => {
                if held_up.insert(request.rule) {
                    let rule = &backfill.rule.name;
                    tracing::info!(rule, "the backfill begins once all partitions run this definition of the rule");
                }
                waiting.add(request, true);
                stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
                continue;
            }
            Ok(Some(true)) => match reports.send(Report::Backfilled(request)).await {
                Ok(()) => continue,
                Err(_) => return,
            },
            // Superseded by a newer request, which is recorded in the state and is picked up from there.
            Ok(Some(false)) => continue,
            Err(error) => error,
        };
        tracing::warn!(rule = %backfill.rule.name, error = %error.message, "the backfill was interrupted; retrying");
        context.metrics.record_error(Some(&backfill.rule.name), "backfill", &error);
        if error.code == Some(code::UNAUTHORIZED) {
            if reports.send(Report::Refused(request.rule, error.message)).await.is_err() {
                return;
            }
            if backfill.is_asked_again(&request).await {
                continue;
            }
        }
        let has_failed = request.after == start;
        waiting.add(request, has_failed);
        stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
    }
}

/// Backfills that wait for their turn, one per rule.
#[derive(Debug, Default)]
struct Waiting {
    fresh: Vec<BackfillRequest>,
    /// Those that have failed, or could not begin, since they last made progress.
    tried: VecDeque<BackfillRequest>,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.tried.is_empty()
    }

    /// Adds a backfill. A newer one replaces an older one of the same rule.
    fn add(&mut self, request: BackfillRequest, is_tried: bool) {
        let is_known = |known: &BackfillRequest| known.rule == request.rule && known.generation >= request.generation;
        if self.fresh.iter().chain(&self.tried).any(is_known) {
            return;
        }
        self.fresh.retain(|known| known.rule != request.rule);
        self.tried.retain(|known| known.rule != request.rule);
        if is_tried {
            self.tried.push_back(request);
        } else {
            self.fresh.push(request);
        }
    }

    /// Removes the next one: the first in the order of the plan, and then those that were tried, in turn.
    fn next(&mut self, order: &[RuleId]) -> Option<BackfillRequest> {
        let place = |nth: &usize| order.iter().position(|rule| *rule == self.fresh[*nth].rule);
        match (0..self.fresh.len()).min_by_key(place) {
            Some(first) => Some(self.fresh.swap_remove(first)),
            None => self.tried.pop_front(),
        }
    }
}

struct RuleBackfill<'a> {
    context: &'a Context,
    store: &'a Store,
    rule: &'a Rule,
    out: &'a mpsc::Sender<Page>,
}

/// A page in the queue.
struct Pending {
    /// The last `_id` in the page.
    last: Bson,
    documents: u64,
    sent: SentPage,
    /// True once it has not been done in [`LATE`].
    is_late: bool,
}

/// A page that was read.
struct Read {
    /// Number of documents.
    documents: u64,
    requests: Vec<Request>,
    /// The `_id` that everything up to is requested; None without documents.
    reached: Option<Bson>,
    /// The `_id` that the next page follows; None after the last page.
    last: Option<Bson>,
}

impl RuleBackfill<'_> {
    /// Backfills the rule from the request's position on, and advances that position. Returns false if the backfill of
    /// the rule has been requested again.
    ///
    /// A newer request is recorded as a backfill from the start, and begins when this pass ends. Requests may arrive
    /// faster than a pass finishes (each delete of a source without its pre-image makes one), and would otherwise
    /// restart it forever. Such a pass does not save its progress. If the rule no longer needs a backfill, the pass
    /// ends at once.
    async fn run(&self, request: &mut BackfillRequest) -> Result<bool> {
        let server = &self.context.server;
        let mut pending: VecDeque<Pending> = VecDeque::new();
        let mut after = request.after.clone();
        let is_whole = after.is_none() && !request.in_sources;
        let started = Instant::now();
        let mut targets = 0_u64;
        let time = server.operation_time().await?;
        tracing::info!(rule = %self.rule.name, resumed = after.is_some(), "backfill started");
        let published = &self.context.published;
        let expected = scan::count(self.context, self.rule, after.as_ref(), request.in_sources).await;
        published.note(|snapshot| {
            snapshot.backfills.insert(self.rule.name.clone(), BackfillProgress::started(expected));
        });
        let mut done = 0_u64;
        let mut pace = Pace::new(self.context, &self.rule.name);
        if let Some(tree) = self.rule.tree.filter(|_| after.is_none()) {
            match Box::pin(self.levels(tree, request, time, &mut pace)).await {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // `where` cannot be evaluated on an ancestor. The pages below take more passes, and reach every document.
                Err(error) if error.kind == Kind::Refused => {}
                Err(error) => return Err(error),
            }
        }
        loop {
            let most = usize::try_from(pace.page(PAGE)).unwrap_or(1);
            let page = self.page(request.in_sources, after.as_ref(), most, time).await?;
            // Only a rule that creates its targets reads its sources.
            targets += if request.in_sources { 0 } else { page.documents };
            if let Some(reached) = &page.reached {
                self.submit(page.requests, (page.documents, reached), time, &mut pending).await?;
            }
            let last = page.last;
            let keep = if last.is_some() { IN_FLIGHT } else { 0 };
            while pending.len() > keep {
                if keep > 0 && pending.len() < MOST_IN_FLIGHT && self.has_few_left(&mut pending[0]).await {
                    if !self.is_to_go_on(request).await? {
                        return Ok(false);
                    }
                    let written = pending.iter_mut().filter_map(|page| page.sent.is_done().then_some(page.documents));
                    let written = done + written.sum::<u64>();
                    published.backfill(&self.rule.name, |progress| progress.scanned = written);
                    break;
                }
                done += pending.front().map_or(0, |page: &Pending| page.documents);
                if !self.settle(request, &mut pending, (done, expected)).await? && !self.is_to_go_on(request).await? {
                    return Ok(false);
                }
                published.backfill(&self.rule.name, |progress| progress.scanned = done);
            }
            // Only a rule that creates its targets has to look at its sources.
            if last.is_none() && (request.in_sources || self.rule.creates.is_none()) {
                break;
            }
            if last.is_none() {
                (request.in_sources, request.after) = (true, None);
                failpoint::here("backfill-of-sources");
            }
            after = last;
            pace.keep(usize::try_from(page.documents).unwrap_or_default()).await?;
        }
        if self.rule.creates.is_some() {
            // Those that it has created as well.
            targets = scan::count_side(self.context, &self.rule.target, None).await.unwrap_or(targets);
        }
        let done = self.finish(request, (targets, expected)).await?;
        if done && is_whole {
            published.note(|snapshot| snapshot.clear_drift(&self.rule.name, started));
        }
        Ok(done)
    }

    /// True if every partition runs this definition of the rule. Another definition may assign a target to another
    /// partition. Its leader could then overwrite what this backfill has written.
    async fn is_registered_everywhere(&self) -> Result<bool> {
        if self.context.partition.of() == 1 {
            return Ok(true);
        }
        let store = self.context.state_of_deployment().await?;
        let records = store.of_each_partition(&self.context.server, &self.rule.name).await?;
        Ok(records.len() == store.ids().len() && records.iter().all(|(_, record)| record.runs(self.rule)))
    }

    /// Records the end of a backfill. False if it was requested again meanwhile.
    async fn finish(&self, request: &BackfillRequest, progress: (u64, Option<u64>)) -> Result<bool> {
        failpoint::here("backfill-ending");
        let (server, published, targets) = (&self.context.server, &self.context.published, progress.0);
        let dead_letters = self.dead_letters().await?;
        let state = (&RuleState::Live, None);
        let done = self.store.save_backfill(server, self.rule, request.generation, state, progress).await?;
        if done {
            published.backfill(&self.rule.name, |progress| {
                (progress.ended, progress.scanned) = (Some(Instant::now()), targets);
                progress.dead_letters = dead_letters;
            });
            match dead_letters {
                0 => tracing::info!(rule = %self.rule.name, targets, "backfill done"),
                _ => tracing::warn!(rule = %self.rule.name, targets, dead_letters, "backfill done, with dead letters"),
            }
        } else {
            tracing::info!(rule = %self.rule.name, targets, "a new backfill was requested meanwhile: starting over");
        }
        Ok(done)
    }

    /// Number of the rule's dead letters. Those of a page are recorded before it is acknowledged.
    async fn dead_letters(&self) -> Result<u64> {
        let chosen = Chosen { rule: Some(self.rule.name.clone()), key: None };
        self.context.dead_letters.count(&self.context.server, &chosen).await
    }

    /// True if the state says that the rule needs a backfill, or that this one has ended: the answer to that write may have been lost.
    async fn is_to_go_on(&self, request: &BackfillRequest) -> Result<bool> {
        let known = self.store.standing(&self.context.server).await?;
        let has_ended =
            |record: &RuleRecord| record.state == RuleState::Live && record.generation == request.generation;
        let goes_on = |record: &RuleRecord| record.state.is_backfilling() || has_ended(record);
        Ok(known.iter().any(|(name, record)| *name == self.rule.name && goes_on(record)))
    }

    /// True if the state has a newer generation, such as a backfill request or the unavailability of the rule.
    async fn is_asked_again(&self, request: &BackfillRequest) -> bool {
        let known = self.store.standing(&self.context.server).await.unwrap_or_default();
        known.iter().any(|(name, state)| *name == self.rule.name && state.generation > request.generation)
    }

    /// Reads a page of targets, or of sources, and the requests that it leads to.
    async fn page(&self, in_sources: bool, after: Option<&Bson>, most: usize, time: ClusterTime) -> Result<Read> {
        let rule = self.rule;
        if in_sources {
            let page = self.context.sources_of_documents(rule, after, most, time).await?;
            let absent = page.absent.iter().filter_map(|absent| absent.get("_id"));
            let absent = absent.map(|id| target_request(rule, Key::one(id.clone())));
            let locate = |key: Key| Request { rule: rule.id, task: Task::LocateSource, key, scope: Scope::All };
            let requests = absent.chain(page.unusable.into_iter().map(locate)).collect();
            // The last page ends the backfill, so its position need not be exact.
            let reached = page.last.clone().or_else(|| after.cloned()).or(Some(Bson::Null));
            return Ok(Read { documents: page.read, requests, reached, last: page.last });
        }
        let fields = rule.reference.projection(Role::Target);
        let page = scan::page(self.context, rule, &fields, after, most, time).await?;
        let (requests, reached) = (requests_of(rule, &decoded(&page.targets)?), page.reached()?);
        Ok(Read { documents: page.targets.len() as u64, requests, reached, last: page.last })
    }

    async fn submit(
        &self,
        requests: Vec<Request>,
        (documents, last): (u64, &Bson),
        after: ClusterTime,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        let sent = Page::send(self.out, requests, after).await?;
        pending.push_back(Pending { last: last.clone(), documents, sent, is_late: false });
        Ok(())
    }

    /// Waits until the page is done, or so little is in the queue that few keys of any page are left. True in the second case.
    async fn has_few_left(&self, page: &mut Pending) -> bool {
        // An error is met again when the page is settled.
        if !page.is_late && tokio::time::timeout(LATE, page.sent.done()).await.is_ok() {
            return false;
        }
        page.is_late = true;
        let mut progress = self.context.published.subscribe();
        // The streams need room in a small queue.
        let few = usize::try_from(PAGE).unwrap_or(usize::MAX).min(self.context.limits.pending / 2);
        tokio::select! {
            biased;
            _ = page.sent.done() => false,
            _ = progress.wait_for(|snapshot| snapshot.depth < few) => true,
        }
    }

    /// Waits for the oldest page and saves the position after it. Returns false if a newer backfill of the rule has
    /// been requested.
    async fn settle(
        &self,
        request: &mut BackfillRequest,
        pending: &mut VecDeque<Pending>,
        progress: (u64, Option<u64>),
    ) -> Result<bool> {
        let Some(page) = pending.pop_front() else { return Ok(true) };
        let last = acknowledged(page).await?;
        failpoint::here("page-done");
        request.after = Some(last.clone());
        // The generation determines whether the removals are agreed to.
        let state =
            RuleState::Backfilling { after: request.after.clone(), in_sources: request.in_sources, agreed: false };
        let (server, kept) = (&self.context.server, &self.context.memory.kept);
        let passed = (!request.in_sources && kept.is_before(request.rule, &last)).then_some(&last);
        let state = (&state, passed);
        let saved = self.store.save_backfill(server, self.rule, request.generation, state, progress).await?;
        // The page of a rule that was stopped meanwhile may not be written: its values are the application's.
        if let Some(passed) = passed.filter(|_| saved) {
            kept.passes(request.rule, passed);
        }
        Ok(saved)
    }
}

/// The requests of these targets.
fn requests_of(rule: &Rule, targets: &[Document]) -> Vec<Request> {
    let requests = targets.iter().flat_map(|target| {
        let id = Key::of_document(target);
        target_requests(rule, &id, target)
    });
    requests.collect()
}

/// Waits for a page; returns the last `_id` in it.
async fn acknowledged(mut page: Pending) -> Result<Bson> {
    page.sent.done().await?;
    Ok(page.last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(rule: usize, generation: i64) -> BackfillRequest {
        BackfillRequest { rule: RuleId(rule), generation, after: None, in_sources: false }
    }

    /// A failed backfill was chosen again before those behind it, which never started.
    #[test]
    fn a_backfill_that_fails_goes_behind_the_others() {
        let order = [RuleId(1), RuleId(0), RuleId(2)];
        let mut waiting = Waiting::default();
        for rule in 0..3 {
            waiting.add(request(rule, 1), false);
        }
        let mut turns = Vec::new();
        for _ in 0..6 {
            let request = waiting.next(&order).unwrap();
            turns.push(request.rule.0);
            waiting.add(request, true);
        }
        assert_eq!(turns, [1, 0, 2, 1, 0, 2]);
    }

    #[test]
    fn the_newest_backfill_of_a_rule_stands_for_the_others() {
        let mut waiting = Waiting::default();
        for generation in [2, 5, 3] {
            waiting.add(request(0, generation), false);
        }
        assert_eq!(waiting.next(&[RuleId(0)]), Some(request(0, 5)));
        assert_eq!(waiting.next(&[RuleId(0)]), None);
    }
}
