//! Reconcile requests: what route asks for, the work queue holds, and reconcile does.

use std::collections::HashSet;

use tokio::sync::oneshot;

use crate::{key::Key, plan::RuleId, position::ClusterTime};

/// One thing to look at again. The reason is not part of it, so that many reasons are one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// For which rule.
    pub rule: RuleId,
    /// What kind of look.
    pub task: Task,
    /// At which document or value.
    pub key: Key,
    /// Which targets of the key are meant. Only [`Task::Value`] tells them apart.
    pub scope: Scope,
}

impl Request {
    /// About how many bytes of memory it takes in the queue.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let named: usize = match &self.scope {
            Scope::All => 0,
            Scope::Named(ids) => ids.iter().map(|id| id.weight() + PLACE).sum(),
        };
        PLACE + self.key.weight() + named
    }
}

/// What a key, or a named target, takes in the queue beside itself.
const PLACE: usize = 128;

/// What is done with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    /// The key is a value that source and targets share: read the sources, write the targets. A key without values stands
    /// for references to nothing.
    Value,
    /// The key is a target's `_id`: read its references and their sources, write it.
    Target,
    /// The key is a source's `_id`: find which values it has now, and ask for those.
    LocateSource,
    /// The key is a target's `_id`: find what it refers to now, and ask for that, for this target alone.
    LocateTarget,
    /// The key is the `_id` of a target whose owned fields somebody wrote, maybe we: compare it with its definition.
    Guard,
    /// The key is a source's `_id`: find the targets that hold it in their array, and ask for those. Runs when what was being
    /// written for the rule when this was asked is acknowledged: a write in flight may put the source into a target yet.
    Parents,
    /// The key is a value: find the targets that refer to it, and ask for each.
    Holders,
}

impl Task {
    const ALL: [Self; 7] =
        [Self::Value, Self::Target, Self::LocateSource, Self::LocateTarget, Self::Guard, Self::Parents, Self::Holders];

    /// Whether it finds keys and writes nothing.
    #[must_use]
    pub fn looks_up(self) -> bool {
        match self {
            Self::LocateSource | Self::LocateTarget | Self::Parents | Self::Holders => true,
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
        }
    }

    /// The task of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|task| task.name() == name)
    }
}

/// Which targets of a value are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every target: the source changed.
    All,
    /// Those with these `_id`s: they came or were re-pointed.
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

    /// How many places in memory it takes.
    #[must_use]
    pub fn weight(&self) -> usize {
        match self {
            Self::All => 1,
            Self::Named(ids) => ids.len().max(1),
        }
    }
}

/// Where a request comes from: what must not be taken for done before it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// The stream (or the backfill) that delivered it.
    pub stream: usize,
    /// The batch within the stream, counted from 1.
    pub batch: u64,
    /// The cluster time that reads must not be older than.
    pub after: ClusterTime,
    /// The wall time of the event in milliseconds since 1970, where it is known.
    pub committed: Option<i64>,
}

/// Requests that do not come from a stream, and the wish to know when they are done.
#[derive(Debug)]
pub struct Page {
    /// What is asked for.
    pub requests: Vec<Request>,
    /// What reads must not be older than.
    pub after: ClusterTime,
    /// Told when all of it is acknowledged or recorded as dead letters.
    pub done: oneshot::Sender<()>,
}
