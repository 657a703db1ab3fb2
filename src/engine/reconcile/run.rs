//! Runs a batch: reads, computes, writes, and finds the offending document where the server refuses.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

use bson::Document;
use tracing::Instrument;

use crate::{
    reconcile::{
        STAGES,
        batch::{End, Ended, Item, MANY, Run, newest, source_gone},
        context::Context,
        group::{self, Shape, Size},
        read::{self, id_of},
        share::Shares,
        statement,
        value::{Desired, Rows},
    },
    request::{Request, Scope, Task},
    workqueue::{Batch, Lane},
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::plan::{Keyed, reference::Role};

/// Half the number of targets from which a key is written by two concurrent commands.
const HALF: usize = 1000;
/// The first statement for a key gets this fraction (one in …) of `limits.write_timeout`: only its timeout shows that the key
/// has many targets.
const FIRST: u32 = 10;

/// The result of a batch.
#[derive(Debug)]
pub struct Outcome {
    /// Its rule and task.
    pub lane: Lane,
    /// Each key's end.
    pub keys: Vec<Ended>,
    /// Requests found by lookups, from all keys of the batch together.
    pub follow_ups: Vec<Request>,
    /// The batch's number.
    pub number: u64,
    /// The generation of the rule's state when the batch began.
    pub generation: i64,
    /// Duration of the run.
    pub took: Duration,
}

/// Runs one batch to its end. `generation` is that of the rule's state when the batch begins. Never fails as a whole: each key has its own
/// result. With `detached`, the source is gone for now: targets keep the values of keys that no source matches.
pub async fn run(context: Arc<Context>, batch: Batch, generation: i64, detached: bool) -> Outcome {
    let started = Instant::now();
    let (rule, task) = batch.lane;
    let rule = context.plan.rule(rule).clone();
    let limit = match batch.items.as_slice() {
        [(_, work)] => work.slowness().read_limit.unwrap_or(context.limits.read_timeout),
        _ => context.limits.read_timeout,
    };
    let run = Run { context: &context, rule: &rule, task, detached, limit, started, bytes: AtomicUsize::default() };
    let items: Vec<Item> = batch.items.into_iter().map(|(key, work)| Item { key, work, end: None }).collect();
    let mut follow_ups = Vec::new();
    let late = batch_age(&items, context.metrics.now());
    let span = tracing::info_span!(target: STAGES, "batch", rule = %rule.name, ?task, keys = items.len(), oldest_change_ms = late);
    let keys = run.items(items, &mut follow_ups).instrument(span).await;
    Outcome { lane: batch.lane, keys, follow_ups, number: batch.number, generation, took: started.elapsed() }
}

/// Age of the oldest change that these items come from, in milliseconds.
fn batch_age(items: &[Item], now: i64) -> Option<i64> {
    items.iter().filter_map(|item| item.work.committed).min().map(|committed| (now - committed).max(0))
}

impl Run<'_> {
    /// Processes as many keys at once as their size allows. A batch that has found enough to do, or has taken as long
    /// as a read may, leaves its other keys to another batch.
    pub(super) async fn items(&self, mut items: Vec<Item>, follow_ups: &mut Vec<Request>) -> Vec<Ended> {
        let mut out = Vec::with_capacity(items.len());
        while !items.is_empty() {
            let long = !out.is_empty() && self.started.elapsed() > self.limit;
            if long || follow_ups.len() > MANY {
                let later = || Some(End::Later(Duration::ZERO));
                out.extend(items.into_iter().map(|item| Item { end: later(), ..item }.ended()));
                break;
            }
            let Context { memory, limits, .. } = self.context;
            let most = memory.traits.keys_at_once(self.rule.id, self.task, limits.batch_bytes);
            let rest = items.split_off(items.len().min(most));
            out.append(&mut Box::pin(self.at_once(items, follow_ups)).await);
            items = rest;
        }
        out
    }

    async fn at_once(&self, mut items: Vec<Item>, follow_ups: &mut Vec<Request>) -> Vec<Ended> {
        self.bytes.store(0, Ordering::Relaxed);
        let result = match self.task {
            // A dead letter of an earlier definition: its targets are written one by one now.
            Task::Value if self.rule.keyed == Keyed::Target => self.found(&mut items, follow_ups).await,
            // Or by their references.
            Task::Target if self.rule.keyed == Keyed::Value => self.locate(Role::Target, &mut items, follow_ups).await,
            Task::Value => self.values(&mut items).await,
            Task::Target => self.targets(&mut items).await,
            Task::LocateSource => self.locate(Role::Source, &mut items, follow_ups).await,
            Task::LocateTarget => self.locate(Role::Target, &mut items, follow_ups).await,
            Task::Bucket => self.buckets(&items, follow_ups).await,
            Task::Guard => self.guard(&mut items, follow_ups).await,
            Task::Parents | Task::Holders => self.found(&mut items, follow_ups).await,
        };
        let bytes = self.bytes.load(Ordering::Relaxed);
        if result.is_ok() && self.task != Task::Guard && !self.rule.shadow {
            self.context.memory.traits.cost(self.rule.id, self.task, items.len(), bytes);
        }
        if let Err(error) = result {
            if error.kind == Kind::TooLarge {
                // Only a part of them was read: half of the keys may fit.
                self.context.memory.traits.cost(self.rule.id, self.task, items.len().div_ceil(2), bytes);
            }
            return self.whole_failed(items, error, follow_ups).await;
        }
        self.context.counts.reconciled.fetch_add(items.len() as u64, Ordering::Relaxed);
        self.judge_speed(&mut items);
        items.into_iter().map(Item::ended).collect()
    }

    /// Writes the targets of the keys.
    ///
    /// A key with a fan-out job leaves all its targets to another pass of the job. Only the current page of the job,
    /// with which this request was merged, is written now: otherwise a key that changes before each page is taken would
    /// get none of them written.
    pub(super) async fn values(&self, items: &mut [Item]) -> Result<()> {
        if self.rule.shadow {
            return self.shadow(items).await;
        }
        let mut fan_outs_running = Vec::new();
        for (nth, item) in items.iter_mut().enumerate() {
            let page = (item.work.scope == Scope::All).then(|| self.context.memory.fan_outs.page(&self.subject(item)));
            if let Some(page) = page.flatten() {
                (item.work.scope, item.work.is_counted) = (Scope::Named(page), false);
                item.work.clear_restart();
                fan_outs_running.push(nth);
            }
        }
        let result = self.values_in_scope(items).await;
        for nth in fan_outs_running {
            let item = &mut items[nth];
            item.work.scope = Scope::All;
            if result.is_ok() && matches!(item.end, None | Some(End::Done | End::DeadLetter)) {
                item.end = Some(self.fan_out(item).await);
            }
        }
        result
    }

    async fn values_in_scope(&self, items: &mut [Item]) -> Result<()> {
        let keys: Vec<&Key> = items.iter().map(|item| &item.key).filter(|key| !key.values().is_empty()).collect();
        let Some(rows) = self.rows(&keys, newest(items), items.len()).await? else { return source_gone(items) };
        let shape = self.shape(items.len()).await;
        self.limit_losses(items, &rows).await?;
        self.limit_deletions(items, &rows).await?;
        self.keep(items, &rows).await?;
        let (mut statements, mut beside) = (Vec::new(), Vec::new());
        let mut shares = Shares::new(self, items);
        let mut destroys = false;
        for (nth, item) in items.iter_mut().enumerate() {
            let Some(desired) = self.desired(item, &rows).await? else { continue };
            destroys |= matches!(desired, Desired::Remove | Desired::Delete);
            let scope = match &desired {
                Desired::Fields(fields) => shares.take(self, shape, (nth, &*item), fields),
                _ => Some(Cow::Borrowed(&item.work.scope)),
            };
            let Some(scope) = scope else { continue };
            let (scope, other) = halves(&scope, &desired);
            for (scope, out) in [(Some(scope), &mut statements), (other, &mut beside)] {
                let Some(scope) = scope else { continue };
                let alone = statement::of_value(self.rule, &item.key, &scope, &desired)?;
                out.extend(alone.into_iter().map(|statement| (vec![nth], statement)));
            }
        }
        let [shared, long] = shares.statements(self, items).await?;
        statements.extend(shared);
        let timeout = match items {
            [item] if item.work.scope == Scope::All && !destroys && !self.rule.reference.keyed_by_target_id() => {
                self.context.limits.write_timeout / FIRST
            }
            _ => self.context.limits.write_timeout,
        };
        self.write(items, [statements, beside], &rows, timeout).await?;
        for statement in long {
            self.write(items, [vec![statement], Vec::new()], &rows, timeout).await?;
        }
        Ok(())
    }

    /// The values that the targets of a key get now. None for a key that has its end, or that waits for its source.
    async fn desired(&self, item: &mut Item, rows: &Rows) -> Result<Option<Desired>> {
        if item.end.is_some() {
            return Ok(None);
        }
        if item.work.scope == Scope::All && self.context.memory.fan_outs.is_running(&self.subject(item)) {
            item.end = Some(self.fan_out(item).await);
            return Ok(None);
        }
        if self.detached && !item.key.values().is_empty() && !rows.answer(&item.key) {
            return Ok(None);
        }
        let desired = match rows.desired(self.rule, &item.key) {
            Ok(desired) => desired,
            Err(error) if error.kind == Kind::Refused => {
                item.end = Some(self.set_aside(item, &error).await);
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        match &desired {
            Desired::Remove | Desired::Delete => item.end = self.destroys(item).await?,
            // The restarted statement was for all targets, and they are still to be written.
            Desired::Fields(_) if item.work.slowness().restarted.is_some() => {
                item.end = Some(self.rest(item, rows, &desired).await);
            }
            _ => {}
        }
        Ok(Some(desired).filter(|_| item.end.is_none()))
    }

    /// The shape of the targets. None if the rule's statements are not shared, or for fewer than two keys or targets.
    pub(super) async fn shape(&self, keys: usize) -> Option<Shape> {
        if keys < 2 || !(group::is_possible(self.rule) || group::is_possible_by_id(self.rule)) {
            return None;
        }
        let mut shape = self.context.memory.traits.shape(self.rule.id);
        if shape.size.is_none() {
            // Without an answer, each key gets a statement of its own until the next attempt.
            let rows = self.read(Role::Target, read::target_size(self.rule), ClusterTime::default()).await;
            let rows = rows.unwrap_or_default();
            let row = rows.first().map(|row| Document::try_from(row.as_ref())).transpose().ok()?.unwrap_or_default();
            let others = row.get_i32("others").map_or(0.0, f64::from);
            shape.size = Some(Size { bytes: row.get_f64("bytes").unwrap_or_default(), others });
            let measured = Some(Instant::now());
            let traits = &self.context.memory.traits;
            traits.learn(self.rule.id, |traits| (traits.shape.size, traits.measured) = (shape.size, measured));
        }
        Some(shape)
    }

    pub(super) async fn targets(&self, items: &mut [Item]) -> Result<()> {
        if self.rule.shadow {
            return self.shadow(items).await;
        }
        if self.rule.compares_first() {
            return self.differences_of_targets(items).await;
        }
        if self.rule.of_target.is_some() {
            return self.values_of_targets(items).await;
        }
        let after = newest(items);
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let (mut targets, mut wanted) = (HashMap::new(), HashSet::new());
        for row in self.read_within(Role::Target, read::targets(self.rule, &ids), after, items.len()).await? {
            let doc = Document::try_from(row.as_ref())?;
            let guard =
                row.get_document(read::GUARD).map_err(|_| Error::internal("a target without its guard"))?.to_owned();
            let mut references = self.rule.reference.keys(Role::Target, &doc);
            shared(&mut references, &mut wanted);
            targets.insert(id_of(&row)?, (references, self.rule.reference.has_array(&doc), guard));
        }
        let rows = self.rows(&wanted.iter().collect::<Vec<_>>(), after, items.len()).await?;
        let Some(rows) = rows else { return source_gone(items) };
        let mut wanted = Vec::new();
        for (nth, item) in items.iter().enumerate() {
            let Some((references, has_array, guard)) = targets.get(&item.key) else { continue };
            let dangling = references.iter().flatten().filter(|key| !rows.answer(key)).count();
            if self.detached && dangling > 0 {
                continue;
            }
            let desired = rows.desired_of_target(self.rule, references, *has_array)?;
            let has_source = dangling < references.iter().flatten().count();
            let gets_another = has_source && desired.fields().is_some_and(|fields| self.gets_another(fields));
            wanted.push((nth, dangling > 0 && !gets_another, desired, guard));
        }
        let losing = wanted.iter().filter(|(_, may_lose, ..)| *may_lose);
        let losing: Vec<(&Key, &Desired)> = losing.map(|(nth, _, desired, _)| (&items[*nth].key, desired)).collect();
        let within_limit = self.may_lose_of_targets(&losing, after).await?;
        let (over_limit, within): (Vec<_>, Vec<_>) =
            wanted.iter().partition(|(_, may_lose, ..)| *may_lose && !within_limit);
        for (nth, ..) in over_limit {
            items[*nth].end = Some(End::RemovalLimit);
        }
        self.keep(items, &rows).await?;
        let within: Vec<_> = within.into_iter().map(|(nth, _, desired, guard)| (*nth, *guard, desired)).collect();
        self.write_targets(items, &within, Vec::new(), &rows).await
    }
}

/// Makes equal references of a batch share their memory: each takes twenty times its size in the document.
fn shared(references: &mut [Option<Key>], known: &mut HashSet<Key>) {
    for reference in references.iter_mut().flatten() {
        match known.get(reference) {
            Some(same) => *reference = same.clone(),
            None => drop(known.insert(reference.clone())),
        }
    }
}

/// Splits many named targets into two parts, which two connections write faster than one. Each part has a copy of the
/// values, so large values are not split.
fn halves<'a>(scope: &'a Scope, desired: &Desired) -> (Cow<'a, Scope>, Option<Cow<'a, Scope>>) {
    match scope {
        Scope::Named(ids) if ids.len() >= 2 * HALF && !desired.is_large() => {
            let part = |ids: &mut dyn Iterator<Item = &Key>| Cow::Owned(Scope::Named(ids.cloned().collect()));
            let (half, mut ids) = (ids.len() / 2, ids.iter());
            let first = part(&mut ids.by_ref().take(half));
            (first, Some(part(&mut ids)))
        }
        scope => (Cow::Borrowed(scope), None),
    }
}
