//! Brings existing targets up to date, a page at a time, through the same queue as live changes.
//!
//! A page asks for the same reconciles that inserts of its targets would. The queue runs one reconcile a key at a time, so
//! backfill and live writes commute; progress is saved when a page is acknowledged, so a killed backfill goes on there.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::Store,
    error::{Error, Result},
    failpoint,
    key::Key,
    plan::{Rule, RuleId, reference::Role},
    position::ClusterTime,
    reconcile::{Context, read, scan},
    request::Page,
    route::target_requests,
    rule_state::RuleState,
    suspension::UNAUTHORIZED,
};

mod pace;

use pace::Pace;

/// Targets in one page.
const PAGE: i32 = 1000;
/// Pages in the queue at once: one is written while the next one is read.
const IN_FLIGHT: usize = 3;
/// How long the targets may be counted for, in milliseconds.
const COUNTING: i64 = 2000;
/// How long to wait after a failed page.
const PAUSE: Duration = Duration::from_secs(1);

/// A backfill that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Wish {
    /// Of which rule.
    pub rule: RuleId,
    /// Counts the wishes of the rule.
    pub generation: i64,
    /// The `_id` of the target to go on after.
    pub after: Option<Bson>,
}

/// Who is told.
#[derive(Debug)]
pub struct Told {
    /// What is done.
    pub finished: mpsc::UnboundedSender<Wish>,
    /// A rule that the user may not read for, and what was refused. Once that is recorded its backfill ends.
    pub lacking: mpsc::UnboundedSender<(RuleId, String)>,
}

/// Runs the backfills that are asked for, in the order of the plan, until `stop`.
pub async fn run(
    context: Arc<Context>,
    store: Store,
    mut asked: mpsc::UnboundedReceiver<Wish>,
    out: mpsc::Sender<Page>,
    told: Told,
    stop: CancellationToken,
) {
    let mut waiting = Waiting::default();
    while !stop.is_cancelled() {
        if waiting.0.is_empty() {
            let next = tokio::select! {
                next = asked.recv() => next,
                () = stop.cancelled() => return,
            };
            let Some(next) = next else { return };
            waiting.add(next, 0);
        }
        while let Ok(more) = asked.try_recv() {
            waiting.add(more, 0);
        }
        let Some((mut wish, failures)) = waiting.next(&context.plan.order) else { return };
        let begun = wish.after.clone();
        let one = One { context: &context, store: &store, rule: context.plan.rule(wish.rule), out: &out };
        let result = tokio::select! {
            result = one.run(&mut wish) => result,
            () = stop.cancelled() => return,
        };
        let error = match result {
            Ok(true) if told.finished.send(wish.clone()).is_err() => return,
            // Done; or asked for again, and the newer wish is found in the state, also when nobody here knows of it.
            Ok(_) => continue,
            Err(error) => error,
        };
        tracing::warn!(rule = %one.rule.name, error = %error.message, "the backfill was interrupted and goes on");
        context.metrics.trouble(Some(&one.rule.name), "backfill", &error);
        if error.code == Some(UNAUTHORIZED) {
            if told.lacking.send((wish.rule, error.message)).is_err() {
                return;
            }
            if one.is_asked_again(&wish).await {
                continue;
            }
        }
        let failures = if wish.after == begun { failures + 1 } else { 0 };
        waiting.add(wish, failures);
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Backfills that wait for their turn, one of each rule, and how often each has failed since it last made progress.
#[derive(Debug, Default)]
struct Waiting(Vec<(Wish, u32)>);

impl Waiting {
    /// Adds a backfill. A newer one of the same rule does the work of an older one.
    fn add(&mut self, wish: Wish, failures: u32) {
        match self.0.iter_mut().find(|(known, _)| known.rule == wish.rule) {
            Some((known, _)) if known.generation >= wish.generation => {}
            Some(known) => *known = (wish, failures),
            None => self.0.push((wish, failures)),
        }
    }

    /// The next one, in the order of the plan. One that fails goes behind those that have failed less often.
    fn next(&mut self, order: &[RuleId]) -> Option<(Wish, u32)> {
        let place = |rule: RuleId| order.iter().position(|other| *other == rule);
        let places = self.0.iter().enumerate();
        let next = places.min_by_key(|(_, (wish, failures))| (*failures, place(wish.rule))).map(|(nth, _)| nth)?;
        Some(self.0.swap_remove(next))
    }
}

struct One<'a> {
    context: &'a Context,
    store: &'a Store,
    rule: &'a Rule,
    out: &'a mpsc::Sender<Page>,
}

/// A page that is being done.
struct Pending {
    /// The last `_id` in it.
    last: Bson,
    targets: u64,
    acknowledged: oneshot::Receiver<()>,
}

impl One<'_> {
    /// Backfills the rule from the wish's place on, and moves that place along. False when the rule's backfill has been asked
    /// for again.
    ///
    /// A newer request is recorded as a backfill from the start, and begins when this pass is at its end: requests that come faster
    /// than a pass is done (each delete of a source without its pre-image is one) would keep it from ever getting there. What this
    /// pass has done is not saved then. A rule that is not to be backfilled any more ends it at once.
    async fn run(&self, wish: &mut Wish) -> Result<bool> {
        let server = &self.context.server;
        let mut pending: VecDeque<Pending> = VecDeque::new();
        let mut after = wish.after.clone();
        let mut scanned = 0_u64;
        let time = server.operation_time().await?;
        tracing::info!(rule = %self.rule.name, resumed = after.is_some(), "backfill started");
        let metrics = &self.context.metrics;
        let expected = self.expected(after.as_ref()).await;
        metrics.backfill_started(&self.rule.name, self.context.partition.place(), expected);
        let mut done = 0_u64;
        let mut pace = Pace::new(self.context, &self.rule.name);
        loop {
            let most = usize::try_from(pace.page(PAGE)).unwrap_or(1);
            let fields = self.rule.reference.projection(Role::Target);
            let page = scan::page(self.context, self.rule, &fields, after.as_ref(), most, time).await?;
            scanned += page.targets.len() as u64;
            let reached =
                page.last.as_ref().or_else(|| page.targets.last().and_then(|target| target.get("_id"))).cloned();
            if let Some(reached) = &reached {
                self.submit(&page.targets, reached, time, &mut pending).await?;
            }
            let last = page.last;
            let keep = if last.is_some() { IN_FLIGHT } else { 0 };
            while pending.len() > keep {
                done += pending.front().map_or(0, |page: &Pending| page.targets);
                if !self.settle(wish, &mut pending, (done, expected)).await? && !self.is_to_go_on().await? {
                    return Ok(false);
                }
                metrics.backfilled(&self.rule.name, self.context.partition.place(), done);
            }
            if last.is_none() {
                break;
            }
            after = last;
            pace.keep(page.targets.len()).await?;
        }
        let progress = (done, expected);
        failpoint::here("backfill-ending");
        let done = self.store.save_backfill(server, self.rule, wish.generation, &RuleState::Live, progress).await?;
        if done {
            metrics.backfill_ended(&self.rule.name, self.context.partition.place());
            tracing::info!(rule = %self.rule.name, targets = scanned, "backfill done");
        } else {
            tracing::info!(rule = %self.rule.name, targets = scanned, "backfill asked for again meanwhile: starting over");
        }
        Ok(done)
    }

    /// Whether the rule is to be backfilled, whoever has asked for it.
    async fn is_to_go_on(&self) -> Result<bool> {
        let known = self.store.standing(&self.context.server).await?;
        Ok(known.iter().any(|(name, record)| *name == self.rule.name && record.state.is_backfilling()))
    }

    /// Whether the state has a newer wish, which may be that the rule is suspended.
    async fn is_asked_again(&self, wish: &Wish) -> bool {
        let known = self.store.standing(&self.context.server).await.unwrap_or_default();
        known.iter().any(|(name, state)| *name == self.rule.name && state.generation > wish.generation)
    }

    /// About how many targets are to be read, for the progress alone: None when counting takes long. After a restart an
    /// `_id` of another BSON type is not counted, as `$gt` stays within one.
    async fn expected(&self, after: Option<&Bson>) -> Option<u64> {
        let mut filter = self.rule.target.filter.clone().unwrap_or_default();
        if let Some(after) = after {
            filter = doc! {"$and": [{"_id": {"$gt": after.clone()}}, filter]};
        }
        let command = doc! {
            "count": &self.rule.target.namespace.collection, "query": filter, "maxTimeMS": COUNTING,
            "collation": read::simple_collation(),
        };
        let database = self.context.server.database(&self.rule.target.namespace.database);
        let reply = database.run_command(command).await.ok()?;
        match reply.get("n")? {
            Bson::Int32(n) => u64::try_from(*n).ok(),
            Bson::Int64(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    async fn submit(
        &self,
        page: &[Document],
        last: &Bson,
        after: ClusterTime,
        pending: &mut VecDeque<Pending>,
    ) -> Result<()> {
        let requests = page.iter().flat_map(|doc| {
            let id = Key::one(doc.get("_id").cloned().unwrap_or(Bson::Null));
            target_requests(self.rule, &id, doc)
        });
        let targets = page.len() as u64;
        let (done, acknowledged) = oneshot::channel();
        let page = Page { requests: requests.collect(), after, done };
        self.out.send(page).await.map_err(|_| Error::internal("the pipeline is gone"))?;
        pending.push_back(Pending { last: last.clone(), targets, acknowledged });
        Ok(())
    }

    /// Waits for the oldest page and saves it. False when a newer backfill of the rule has been asked for.
    async fn settle(
        &self,
        wish: &mut Wish,
        pending: &mut VecDeque<Pending>,
        progress: (u64, Option<u64>),
    ) -> Result<bool> {
        let Some(Pending { last, acknowledged, .. }) = pending.pop_front() else { return Ok(true) };
        acknowledged.await.map_err(|_| Error::internal("the pipeline is gone"))?;
        failpoint::here("page-done");
        wish.after = Some(last);
        // Whether its removals are agreed to is a matter of its generation.
        let state = RuleState::Backfilling { after: wish.after.clone(), agreed: false };
        self.store.save_backfill(&self.context.server, self.rule, wish.generation, &state, progress).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(rule: usize, generation: i64) -> Wish {
        Wish { rule: RuleId(rule), generation, after: None }
    }

    /// One that failed was chosen again, before those behind it: they never began.
    #[test]
    fn a_backfill_that_fails_goes_behind_the_others() {
        let order = [RuleId(1), RuleId(0), RuleId(2)];
        let mut waiting = Waiting::default();
        for rule in 0..3 {
            waiting.add(wish(rule, 1), 0);
        }
        let mut turns = Vec::new();
        for _ in 0..6 {
            let (wish, failures) = waiting.next(&order).unwrap();
            turns.push(wish.rule.0);
            waiting.add(wish, failures + 1);
        }
        assert_eq!(turns, [1, 0, 2, 1, 0, 2]);
    }

    #[test]
    fn the_newest_backfill_of_a_rule_stands_for_the_others() {
        let mut waiting = Waiting::default();
        for generation in [2, 5, 3] {
            waiting.add(wish(0, generation), 0);
        }
        assert_eq!(waiting.next(&[RuleId(0)]), Some((wish(0, 5), 0)));
        assert_eq!(waiting.next(&[RuleId(0)]), None);
    }
}
