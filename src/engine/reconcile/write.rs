//! Writes the statements of a batch, and the targets that a statement did not reach in time.

use std::{collections::HashSet, sync::atomic::Ordering, time::Duration};

use bson::RawDocumentBuf;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{Instrument, field::Empty};

use crate::{
    reconcile::{
        STAGES,
        batch::{End, Item, Run},
        context::Context,
        read::{self, id_of},
        statement::{self, Part, Statement},
        value::{Desired, Rows},
    },
    request::{Scope, Task},
};
use denormd_model::{clock::millis, failpoint, key::Key, position::ClusterTime};
use denormd_mongo::{
    Written,
    error::{Error, Kind, Reaction, Result},
};
use denormd_rules::plan::reference::Role;

/// A statement that takes too long for all targets of a key is restarted for up to this multiple of
/// `limits.write_timeout`: targets that are written already are skipped quickly, and statements are twice as fast as
/// the pages of a fan-out job. Other work for the key waits as long.
const RESTARTED: u32 = 3;
/// Statements that write the rest of a key's targets, two at a time, if these are a large part of their collection.
const PARTS: usize = 16;
/// Sampled documents that tell how large that part is: a quarter is large.
const SAMPLE: usize = 400;

/// The error of a refused statement, and the items that the statement belongs to.
type Shared = (Vec<usize>, Error);

impl Run<'_> {
    /// Sends the statements of both lists concurrently, each list with this timeout. Returns the number of targets that
    /// they matched.
    pub(super) async fn write(
        &self,
        items: &mut [Item],
        statements: [Vec<(Vec<usize>, Statement)>; 2],
        rows: &Rows,
        timeout: Duration,
    ) -> Result<u64> {
        let begun = Instant::now();
        let owners: usize = statements.iter().flatten().map(|(owners, _)| owners.len()).sum();
        let [first, second] = statements.map(|statements| self.sent(items, statements, timeout));
        // Both run to their end: a failure of one does not leave the other running.
        let (first, second) = tokio::join!(first, second);
        let ((mut refused, mut matched), (others, found)) = (first?, second?);
        refused.extend(others);
        matched += found;
        let whole = |item: &Item| item.work.scope == Scope::All && item.work.slowness().restarted.is_none();
        if self.task == Task::Value && owners >= items.len() && items.iter().all(whole) {
            self.context.memory.traits.learn(self.rule.id, |traits| traits.shape.learn(items.len(), matched));
        }
        // Keys that share a refused statement are written one by one.
        let shared: Vec<usize> =
            refused.extract_if(.., |(owners, _)| owners.len() > 1).flat_map(|(owners, _)| owners).collect();
        let mut alone = Vec::new();
        for nth in shared {
            let item = &items[nth];
            // Already written alone, because of another of its targets: that covered all of them.
            if item.end.is_some() {
                continue;
            }
            let desired = rows.desired(self.rule, &item.key)?;
            let statements = statement::of_value(self.rule, &item.key, &item.work.scope, &desired)?;
            alone.extend(statements.into_iter().map(|statement| (vec![nth], statement)));
        }
        refused.extend(self.sent(items, alone, timeout).await?.0);
        let mut seen = HashSet::new();
        for (nth, error) in refused.into_iter().filter_map(|(owners, error)| Some((*owners.first()?, error))) {
            // Both halves of a key may be refused. Steps cover both at once.
            if !seen.insert(nth) || items[nth].end.is_some() {
                continue;
            }
            let end = self.refused(&mut items[nth], rows, error, begun.elapsed() > timeout / 2).await;
            items[nth].end = Some(end);
        }
        Ok(matched)
    }

    /// The result of a key with a refused statement. `long` tells that the refusal took most of the timeout.
    pub(super) async fn refused(&self, item: &mut Item, rows: &Rows, error: Error, long: bool) -> End {
        match error.reaction() {
            Reaction::Divide if long && self.may_go_on(item, rows) => {
                item.work.slowness_mut().restarted.get_or_insert_with(Instant::now);
                End::Later(Duration::ZERO)
            }
            Reaction::Divide | Reaction::Isolate => self.in_steps(item, rows, error).await.unwrap_or_else(End::Failed),
            _ => End::Failed(error),
        }
    }

    /// True if a statement that took too long is restarted. Its removals have been counted already.
    pub(super) fn may_go_on(&self, item: &Item, rows: &Rows) -> bool {
        self.task == Task::Value
            && self.rule.creates.is_none()
            && item.work.scope == Scope::All
            && item
                .work
                .slowness()
                .restarted
                .is_none_or(|since| since.elapsed() < self.context.limits.write_timeout * RESTARTED)
            && matches!(rows.desired(self.rule, &item.key), Ok(Desired::Fields(_)))
    }

    /// Sends the statements. Returns the refused ones with the items that they belong to, and the number of matched
    /// targets.
    pub(super) async fn sent(
        &self,
        items: &[Item],
        statements: Vec<(Vec<usize>, Statement)>,
        timeout: Duration,
    ) -> Result<(Vec<Shared>, u64)> {
        let mut refused = Vec::new();
        let mut matched = 0;
        let (deletes, updates): (Vec<_>, Vec<_>) = statements.into_iter().partition(|(_, one)| one.deletes);
        // A document that a rule created is deleted, or else given other values: in this order.
        for (deletes, statements) in [(true, deletes), (false, updates)] {
            let (mut owners, raw): (Vec<_>, Vec<_>) =
                statements.into_iter().map(|(owners, one)| (owners, one.raw)).unzip();
            let mut sent = self.send(deletes, &raw, timeout).await;
            // The shortened limit was enough to write the targets, but not for a majority to have them: it gets the whole limit.
            let whole = self.context.limits.write_timeout;
            if timeout < whole && sent.as_ref().is_err_and(Error::is_majority_behind) {
                sent = self.send(deletes, &raw, whole).await;
            }
            match sent {
                Ok(written) => {
                    matched += written.matched;
                    let owned = |(index, error): (usize, Error)| (std::mem::take(&mut owners[index]), error);
                    refused.extend(written.refused.into_iter().map(owned));
                }
                // A single key whose targets take too long is written in steps.
                Err(error) if error.kind == Kind::TimedOut && items.len() == 1 => refused.push((vec![0], error)),
                Err(error) => return Err(error),
            }
        }
        Ok((refused, matched))
    }

    pub(super) async fn send(
        &self,
        deletes: bool,
        statements: &[RawDocumentBuf],
        timeout: Duration,
    ) -> Result<Written> {
        if statements.is_empty() {
            return Ok(Written::default());
        }
        let Context { server, counts, metrics, published, .. } = self.context;
        failpoint::here("read");
        let writing = metrics.write(&self.rule.name, if deletes { "delete" } else { "update" });
        let ns = &self.rule.target.namespace;
        let span = tracing::info_span!(
            target: STAGES, "write", collection = %ns, deletes, statements = statements.len(), matched = Empty, modified = Empty
        );
        let sent = async {
            if deletes {
                server.delete(&ns.database, &ns.collection, statements, timeout).await
            } else {
                server.update(&ns.database, &ns.collection, statements, timeout).await
            }
        };
        let written = sent.instrument(span.clone()).await;
        // A write that failed may have taken effect, and so may a part of a refused statement. A retry then changes nothing.
        if !written.as_ref().is_ok_and(|written| written.refused.is_empty() && !written.is_uncertain) {
            counts.uncertain.fetch_add(1, Ordering::Relaxed);
        }
        let written = written?;
        span.record("matched", written.matched).record("modified", written.modified);
        failpoint::here("written");
        writing.done(written.matched, written.modified);
        published.note(|snapshot| snapshot.last_write = Some(Instant::now()));
        counts.matched.fetch_add(written.matched, Ordering::Relaxed);
        let changed = if deletes { written.matched } else { written.modified };
        counts.modified.fetch_add(changed, Ordering::Relaxed);
        Ok(written)
    }

    /// Writes the targets of a key that do not hold `desired` yet, by two concurrent commands, after a statement for
    /// all of them took too long.
    pub(super) async fn rest(&self, item: &mut Item, rows: &Rows, desired: &Desired) -> End {
        let begun = Instant::now();
        let timeout = self.context.limits.write_timeout;
        let end = item.work.slowness().restarted.unwrap_or(begun) + timeout * RESTARTED;
        let parts = self.parts_of_rest(&item.key, desired).await;
        let failed = Mutex::new(None);
        let (key, failure) = (&item.key, &failed);
        let beside = if desired.is_large() { 1 } else { 2 };
        let written = stream::iter(&parts).for_each_concurrent(beside, |part| async move {
            // After a failure, no further part is started.
            if failure.lock().is_some() {
                return;
            }
            let result = match timeout.min(end.saturating_duration_since(Instant::now())) {
                Duration::ZERO => Err(Error::new(Kind::TimedOut, "this key has too many targets")),
                timeout => self.part(key, desired, part, timeout).await,
            };
            if let Err(error) = result {
                failure.lock().get_or_insert(error);
            }
        });
        written.await;
        let Some(error) = failed.into_inner() else { return End::Done };
        self.refused(item, rows, error, begun.elapsed() > timeout / 2).await
    }

    pub(super) async fn part(&self, key: &Key, desired: &Desired, part: &Part, timeout: Duration) -> Result<()> {
        let updates = statement::of_rest(self.rule, key, desired, part)?.into_iter().map(|one| one.raw);
        let mut written = self.send(false, &updates.collect::<Vec<_>>(), timeout).await?;
        written.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Divides the collection into parts with about the same number of targets that do not hold `desired` yet. One part
    /// if these are few: the index on their reference finds them, but would be scanned for each part.
    pub(super) async fn parts_of_rest(&self, key: &Key, desired: &Desired) -> Vec<Part> {
        let rest = statement::unfinished(self.rule, desired);
        let size = i32::try_from(SAMPLE).unwrap_or(i32::MAX);
        let mut command = read::some_of_rest(self.rule, key, rest.as_ref(), size);
        command.insert("maxTimeMS", millis(self.context.limits.write_timeout));
        // Without an answer, there is one part.
        let rows = self.read(Role::Target, command, ClusterTime::default()).await.unwrap_or_default();
        let count = if rows.len() >= SAMPLE / 4 { PARTS } else { 1 };
        let bound = |nth| id_of(rows.get(rows.len() * nth / count)?).ok()?.values().first().cloned();
        Part::between(&(1..count).filter_map(bound).collect::<Vec<_>>())
    }
}
