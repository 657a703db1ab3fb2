//! A batch while it runs: its items, their ends, and its reads.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use tokio::time::Instant;

use bson::{Document, RawDocumentBuf};
use tracing::{Instrument, Span};

use crate::{
    checkpoint::fan_out::FanOut,
    reconcile::{
        STAGES,
        context::{Context, Load},
        group::Member,
        read,
        value::{Field, Rows},
    },
    request::Task,
    workqueue::Work,
};
use denormd_model::{key::Key, namespace::Namespace, position::ClusterTime};
use denormd_mongo::{
    command::limited,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{Rule, reference::Role};

/// Most targets, or requests, that a lookup may lead to. A key with more becomes a fan-out job of its own.
pub(super) const MANY: usize = 10_000;

/// The result of one key.
#[derive(Debug)]
pub struct Ended {
    /// The key.
    pub key: Key,
    /// The work that was requested of it.
    pub work: Work,
    /// The kind of result.
    pub end: End,
}

/// The kinds of result of one key.
#[derive(Debug)]
pub enum End {
    /// Acknowledged by a majority.
    Done,
    /// Recorded as one or more dead letters, acknowledged by a majority.
    DeadLetter,
    /// Recorded as a fan-out job, acknowledged by a majority: its targets are written a page at a time.
    FanOut(FanOut),
    /// Failed for now.
    Failed(Error),
    /// More targets would lose their values than the removal limit allows: the rule is to be blocked.
    RemovalLimit,
    /// The rule's source collection is gone: the rule is to be blocked. The event that reports it may be unread, so
    /// nothing waits for it.
    SourceGone,
    /// To be checked again after this time: a dangling reference under a policy that removes, or a target that differs
    /// and may be about to be written.
    Later(Duration),
}

/// A batch that runs: one task of one rule.
pub(super) struct Run<'a> {
    pub(super) context: &'a Context,
    pub(super) rule: &'a Rule,
    pub(super) task: Task,
    pub(super) detached: bool,
    /// Time limit of a read.
    pub(super) limit: Duration,
    pub(super) started: Instant,
    /// Bytes read for the current keys.
    pub(super) bytes: AtomicUsize,
}

pub(super) struct Item {
    pub(super) key: Key,
    pub(super) work: Work,
    pub(super) end: Option<End>,
}

impl Item {
    pub(super) fn member<'a>(&'a self, fields: &'a [Field]) -> Member<'a> {
        Member { key: &self.key, scope: &self.work.scope, fields }
    }

    pub(super) fn ended(self) -> Ended {
        let end = self.end.unwrap_or(End::Done);
        Ended { key: self.key, work: self.work, end }
    }
}

impl Run<'_> {
    pub(super) async fn read(&self, role: Role, command: Document, after: ClusterTime) -> Result<Vec<RawDocumentBuf>> {
        let (database, command) = (&self.namespace(role).database, limited(command, self.limit));
        self.context.server.read(database, command, after).instrument(self.reading(role)).await
    }

    /// The same for this number of items. Several of them read at most `limits.batch_bytes`.
    pub(super) async fn read_within(
        &self,
        role: Role,
        command: Document,
        after: ClusterTime,
        items: usize,
    ) -> Result<Vec<RawDocumentBuf>> {
        let most = if items > 1 { self.context.limits.batch_bytes } else { usize::MAX };
        let read = async {
            let (database, command) = (&self.namespace(role).database, limited(command, self.limit));
            self.context.server.pages(database, command, after).await?.up_to(most).await
        };
        let (rows, all) = read.instrument(self.reading(role)).await?;
        self.bytes.fetch_add(rows.iter().map(|row| row.as_bytes().len()).sum(), Ordering::Relaxed);
        if all { Ok(rows) } else { Err(too_large()) }
    }

    pub(super) fn namespace(&self, role: Role) -> &Namespace {
        &self.rule.side(role).namespace
    }

    pub(super) fn reading(&self, role: Role) -> Span {
        tracing::info_span!(target: STAGES, "read", collection = %self.namespace(role))
    }

    /// The sources of `keys`, for this number of items; None when their collection is gone, and the targets keep their
    /// values.
    pub(super) async fn rows(&self, keys: &[&Key], after: ClusterTime, items: usize) -> Result<Option<Rows>> {
        let mut rows = Rows::within(0);
        let keys: Vec<&Key> = keys.iter().copied().filter(|key| self.rule.reference.can_resolve(key)).collect();
        if !keys.is_empty() || read::no_input(self.rule).is_some() {
            let load = Load { task: self.task, items, limit: self.limit, bytes: &self.bytes, sources: None };
            rows = self.context.rows(self.rule, &keys, after, load).instrument(self.reading(Role::Source)).await?;
            let missing = keys.iter().any(|key| !rows.answer(key));
            if self.is_source_gone_now(missing, !rows.is_empty()).await? {
                return Ok(None);
            }
        }
        Ok(Some(rows))
    }

    /// True if the source collection is gone, and that explains why sources are `missing`. Checked when sources are
    /// missing, and when some were `found` for the first time.
    pub(super) async fn is_source_gone_now(&self, missing: bool, found: bool) -> Result<bool> {
        let unknown = found && self.context.memory.sources.uuid(&self.rule.source.namespace).is_none();
        Ok(!self.detached && (missing || unknown) && self.is_source_gone(found).await?)
    }

    /// True if a source collection that is known to have existed is gone, or another one has its name. Checked after
    /// the read: a UUID is never reused, so the rows came from the known collection. A collection in which sources were
    /// `found` for the first time is remembered.
    async fn is_source_gone(&self, found: bool) -> Result<bool> {
        let (memory, source) = (&self.context.memory, &self.rule.source.namespace);
        let known = memory.sources.uuid(source);
        if known.is_none() && !found {
            return Ok(false);
        }
        let names = [source.collection.as_str()];
        let now = self.context.server.collection_uuids(&source.database, &names).await?.remove(&source.collection);
        if known.is_none() && now.is_some() {
            memory.sources.saw(source, now);
            return Ok(false);
        }
        Ok(now.is_none() || now != known)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the result of a batch")]
pub(super) fn source_gone(items: &mut [Item]) -> Result<()> {
    for item in items {
        item.end = Some(End::SourceGone);
    }
    Ok(())
}

fn too_large() -> Error {
    Error::new(Kind::TooLarge, "these keys have more than a batch may hold")
}

pub(super) fn newest(items: &[Item]) -> ClusterTime {
    items.iter().map(|item| item.work.after).max().unwrap_or_default()
}

/// Pause before the next attempt: doubles from 50 ms to 10 s. A write whose answer was lost is waited for before its
/// error gets here.
#[must_use]
pub fn backoff(attempts: u32) -> Duration {
    Duration::from_millis(50).saturating_mul(1 << attempts.min(8)).min(Duration::from_secs(10))
}
