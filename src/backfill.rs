//! Brings existing targets up to date, a page at a time, through the same queue as live changes.
//!
//! A page asks for the same reconciles that inserts of its targets would. The queue runs one reconcile a key at a time, so
//! backfill and live writes commute; progress is saved when a page is acknowledged, so a killed backfill goes on there.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::{Backfill, Store},
    error::{Error, Result},
    failpoint,
    key::Key,
    mongo::Reads,
    plan::{Rule, RuleId, reference::Role},
    position::ClusterTime,
    reconcile::Context,
    request::Page,
    route::target_requests,
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
    let place = |rule: RuleId| context.plan.order.iter().position(|other| *other == rule);
    let mut waiting: Vec<Wish> = Vec::new();
    while !stop.is_cancelled() {
        if waiting.is_empty() {
            let next = tokio::select! {
                next = asked.recv() => next,
                () = stop.cancelled() => return,
            };
            waiting.extend(next);
        }
        while let Ok(more) = asked.try_recv() {
            waiting.push(more);
        }
        waiting.sort_by_key(|wish| std::cmp::Reverse(place(wish.rule)));
        let Some(mut wish) = waiting.pop() else { return };
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
        waiting.push(wish);
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = stop.cancelled() => return,
        }
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
            let page = self.page(after.as_ref(), pace.page(PAGE), time).await?;
            let last = page.last().and_then(|doc| doc.get("_id")).cloned();
            scanned += page.len() as u64;
            if let Some(last) = &last {
                self.submit(&page, last, time, &mut pending).await?;
            }
            let keep = if last.is_some() { IN_FLIGHT } else { 0 };
            while pending.len() > keep {
                done += pending.front().map_or(0, |page: &Pending| page.targets);
                if !self.settle(wish, &mut pending, (done, expected)).await? {
                    tracing::info!(rule = %self.rule.name, "backfill asked for again: starting over");
                    return Ok(false);
                }
                metrics.backfilled(&self.rule.name, self.context.partition.place(), done);
            }
            if last.is_none() {
                break;
            }
            after = last;
            pace.keep(page.len()).await?;
        }
        let progress = (done, expected);
        failpoint::here("backfill-ending");
        let done = self.store.save_backfill(server, self.rule, wish.generation, &Backfill::Done, progress).await?;
        if done {
            metrics.backfill_ended(&self.rule.name, self.context.partition.place());
            tracing::info!(rule = %self.rule.name, targets = scanned, "backfill done");
        }
        Ok(done)
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
        let state = Backfill::Pending(wish.after.clone());
        self.store.save_backfill(&self.context.server, self.rule, wish.generation, &state, progress).await
    }

    /// The next targets by `_id`. `min` with a hint compares across BSON types, where `$gt` stays within one; it includes
    /// its bound, and leaves out a target whose `_id` is MaxKey, which is read by itself at the end.
    async fn page(&self, after: Option<&Bson>, mut limit: i32, time: ClusterTime) -> Result<Vec<Document>> {
        let mut filter = self.rule.target.filter.clone().unwrap_or_default();
        let mut bounds = Document::new();
        match after {
            Some(Bson::MaxKey) => return Ok(Vec::new()),
            Some(after) => {
                bounds = doc! {"min": {"_id": after.clone()}};
                limit += 1;
            }
            None => {}
        }
        let mut command = doc! {
            "find": &self.rule.target.namespace.collection, "filter": filter.clone(), "hint": {"_id": 1},
            "projection": self.rule.reference.projection(Role::Target), "limit": limit, "batchSize": limit,
        };
        command.extend(bounds);
        let mut page = self.read(command, time).await?;
        if after.is_some() && page.first().and_then(|doc| doc.get("_id")) == after {
            page.remove(0);
        }
        if page.is_empty() && after.is_some() {
            filter = doc! {"$and": [{"_id": {"$eq": Bson::MaxKey}}, filter]};
            page = self
                .read(doc! {"find": &self.rule.target.namespace.collection, "filter": filter, "limit": 1}, time)
                .await?;
        }
        Ok(page)
    }

    async fn read(&self, command: Document, after: ClusterTime) -> Result<Vec<Document>> {
        let rows = self.context.server.read(&self.rule.target.namespace.database, command, Reads { after }).await?;
        rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect()
    }
}
