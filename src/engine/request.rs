//! Reconcile requests: created by routing, held in the work queue, carried out by reconciling.

use std::collections::HashSet;

use tokio::sync::{mpsc, oneshot};

use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::RuleId;

/// One thing to check again. The reason is not part of it, so that requests for different reasons are merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The rule that it is for.
    pub rule: RuleId,
    /// The kind of check.
    pub task: Task,
    /// The document or value to check.
    pub key: Key,
    /// The targets of the key that are meant. Only [`Task::Value`] distinguishes them.
    pub scope: Scope,
}

impl Request {
    /// Approximate memory in the queue, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let named: usize = match &self.scope {
            Scope::All => 0,
            Scope::Named(ids) => ids.iter().map(|id| id.weight() + PLACE).sum(),
        };
        PLACE + self.key.weight() + named
    }
}

/// Memory of a key, or of a named target, in the queue in addition to its own size, in bytes.
const PLACE: usize = 128;

/// Kind of work on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    /// The key is a value that source and targets share: read the sources, write the targets. A key without values stands
    /// for references to nothing.
    Value,
    /// The key is a target's `_id`: read its references and their sources, write it.
    Target,
    /// The key is a source's `_id`: find its current values, and request those.
    LocateSource,
    /// The key is a target's `_id`: find its current references, and request those, for this target alone.
    LocateTarget,
    /// The key is the `_id` of a target whose owned fields were written, possibly by denormd: compare it with its
    /// definition.
    Guard,
    /// The key is a source's `_id`: find the targets that hold it in their array, and request those. Runs after all
    /// writes that were in flight for the rule when it was requested: one of them may still add the source to a target.
    Parents,
    /// The key is a value: find the targets that refer to it, and request each.
    Holders,
    /// The key has dates of a source, of a rule that creates a document for each interval of time: find the intervals
    /// that contain them, and request those.
    Bucket,
}

impl Task {
    const ALL: [Self; 8] = [
        Self::Value,
        Self::Target,
        Self::LocateSource,
        Self::LocateTarget,
        Self::Guard,
        Self::Parents,
        Self::Holders,
        Self::Bucket,
    ];

    /// True if it finds keys and writes nothing.
    #[must_use]
    pub fn looks_up(self) -> bool {
        match self {
            Self::LocateSource | Self::LocateTarget | Self::Parents | Self::Holders | Self::Bucket => true,
            Self::Value | Self::Target | Self::Guard => false,
        }
    }

    /// Its name in the state database, which never changes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Value => "Value",
            Self::Target => "Target",
            Self::LocateSource => "LocateSource",
            Self::LocateTarget => "LocateTarget",
            Self::Guard => "Guard",
            Self::Parents => "Parents",
            Self::Holders => "Holders",
            Self::Bucket => "Bucket",
        }
    }

    /// The task of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|task| task.name() == name)
    }
}

/// The targets of a value that are meant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Scope {
    /// All targets, because the source changed.
    #[default]
    All,
    /// Targets with these `_id`s, because they are new or their reference changed.
    Named(HashSet<Key>),
}

impl Scope {
    /// One named target.
    #[must_use]
    pub fn one(id: Key) -> Self {
        Self::Named(HashSet::from([id]))
    }

    /// Widens this scope by another.
    pub fn merge(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::All, _) => {}
            (_, Self::All) => *self = Self::All,
            (Self::Named(mine), Self::Named(theirs)) => mine.extend(theirs),
        }
    }

    /// Number of `_id`s that it holds, at least 1.
    #[must_use]
    pub fn weight(&self) -> usize {
        match self {
            Self::All => 1,
            Self::Named(ids) => ids.len().max(1),
        }
    }
}

/// Origin of a request. Its batch is not done before the request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The stream (or the backfill) that delivered it.
    pub stream: usize,
    /// The batch within the stream, counted from 1.
    pub batch: u64,
    /// The minimum cluster time of reads.
    pub after: ClusterTime,
    /// The wall time of the event in milliseconds since 1970, if known.
    pub committed: Option<i64>,
}

/// Requests that do not come from a stream, with a notification of their end.
#[derive(Debug)]
pub struct Page {
    /// The requests of the page.
    pub requests: Vec<Request>,
    /// The minimum cluster time of reads.
    pub after: ClusterTime,
    /// Notified when all requests are acknowledged or recorded as dead letters.
    pub done: oneshot::Sender<()>,
}

impl Page {
    /// Sends requests to the pipeline.
    pub async fn send(out: &mpsc::Sender<Self>, requests: Vec<Request>, after: ClusterTime) -> Result<SentPage> {
        let (done, end) = oneshot::channel();
        out.send(Self { requests, after, done }).await.map_err(|_| gone())?;
        Ok(SentPage { answer: end, is_done: false })
    }
}

/// A page that the pipeline processes.
#[derive(Debug)]
pub struct SentPage {
    answer: oneshot::Receiver<()>,
    is_done: bool,
}

impl SentPage {
    /// Waits until all requests are done. Cancellation loses nothing.
    pub async fn done(&mut self) -> Result<()> {
        if self.is_done {
            return Ok(());
        }
        if self.answer.is_terminated() {
            return Err(gone());
        }
        (&mut self.answer).await.map_err(|_| gone())?;
        self.is_done = true;
        Ok(())
    }

    /// True if all requests are done.
    pub fn is_done(&mut self) -> bool {
        self.is_done = self.is_done || self.answer.try_recv().is_ok();
        self.is_done
    }
}

fn gone() -> Error {
    Error::internal("the pipeline is gone")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_page_can_be_asked_for_again_whatever_its_end() {
        let page = |answer| SentPage { answer, is_done: false };
        let (done, answer) = oneshot::channel();
        let mut written = page(answer);
        assert!(!written.is_done());
        done.send(()).unwrap();
        assert!(written.is_done() && written.done().await.is_ok() && written.done().await.is_ok() && written.is_done());
        let (gone, answer) = oneshot::channel();
        let mut lost = page(answer);
        drop(gone);
        assert!(lost.done().await.is_err() && lost.done().await.is_err() && !lost.is_done());
    }
}
