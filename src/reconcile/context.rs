//! What every batch depends on.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bson::Document;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::fan_out::FanOuts,
    config::Limits,
    dead_letter::DeadLetters,
    error::{Error, Kind, Result},
    key::Key,
    metrics::Metrics,
    mongo::{
        Fence, Reads, Server,
        command::{limited, rows_of},
    },
    partition::Partition,
    plan::{Plan, Rule, RuleId},
    position::ClusterTime,
    reconcile::{memory::Memory, read, value::Rows},
    request::Task,
};

/// What every batch needs.
#[derive(Debug)]
pub struct Context {
    /// The cluster.
    pub server: Server,
    /// The rules.
    pub plan: Plan,
    /// Bounds.
    pub limits: Limits,
    /// Where refused work is recorded.
    pub dead_letters: DeadLetters,
    /// Where large fan-outs are recorded.
    pub fan_outs: FanOuts,
    /// What is remembered between batches.
    pub memory: Memory,
    /// Held by the one batch of this process that works at a key larger than `limits.batch_bytes`.
    large: Arc<Semaphore>,
    /// Rules that the cluster lacked something for when the config was taken, and what.
    pub lacking: BTreeMap<RuleId, String>,
    /// What was done so far.
    pub counts: Counts,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// Which keys are reconciled here.
    pub partition: Partition,
    /// Cancelled when the pipeline that works with it stops.
    pub stopping: CancellationToken,
}

impl Context {
    /// Gathers them.
    #[must_use]
    pub fn new(server: Server, plan: Plan, limits: Limits, dead_letters: DeadLetters, metrics: Arc<Metrics>) -> Self {
        let (database, deployment) = (dead_letters.database.clone(), dead_letters.deployment.clone());
        Self {
            server,
            plan,
            limits,
            dead_letters,
            fan_outs: FanOuts { database, deployment },
            memory: Memory::default(),
            large: Arc::new(Semaphore::new(1)),
            lacking: BTreeMap::new(),
            counts: Counts::default(),
            metrics,
            partition: Partition::WHOLE,
            stopping: CancellationToken::new(),
        }
    }

    /// The same for one partition: it reconciles the keys that it owns, and keeps its own state. Limits that bound all
    /// partitions together become its share of them.
    #[must_use]
    pub fn within(mut self, partition: Partition) -> Self {
        self.fan_outs.deployment = partition.id(&self.dead_letters.deployment);
        self.dead_letters.partition = partition;
        self.limits.pending = partition.share(self.limits.pending);
        self.limits.batch_bytes = partition.share(self.limits.batch_bytes);
        self.limits.destroy_per_hour = self.limits.destroy_per_hour.map(|limit| partition.share(limit));
        self.partition = partition;
        self
    }

    /// Whether what writes this key of the rule runs here.
    #[must_use]
    pub fn owns(&self, rule: &Rule, key: &Key) -> bool {
        self.partition.owns(&rule.name, key)
    }

    /// The same for a leader, whose writes end with its lease. Counts begin anew.
    #[must_use]
    pub fn under(&self, fence: Arc<Fence>) -> Self {
        Self {
            server: self.server.under(fence),
            plan: self.plan.clone(),
            limits: self.limits.clone(),
            dead_letters: self.dead_letters.clone(),
            fan_outs: self.fan_outs.clone(),
            memory: Memory::default(),
            large: self.large.clone(),
            lacking: self.lacking.clone(),
            counts: Counts::default(),
            metrics: self.metrics.clone(),
            partition: self.partition,
            stopping: CancellationToken::new(),
        }
    }

    /// Reads the sources of `keys` for so many keys or targets, at least as new as `after`.
    ///
    /// Values of more than `limits.batch_bytes` are an error of the kind [`Kind::TooLarge`], and the caller does fewer at once. What
    /// one alone needs is read whatever its size, but one such after the other in this process.
    pub(super) async fn rows(&self, rule: &Rule, keys: &[&Key], after: ClusterTime, load: Load<'_>) -> Result<Rows> {
        let budget = self.limits.batch_bytes;
        let mut rows = Rows::within(budget);
        if load.items <= 1 && self.memory.keys_at_once(rule.id, load.task, budget) <= 1 {
            rows = Rows::alone(rule, keys, self.take_turn(load.limit).await?);
        }
        let mut filled = self.fill_unless_stopping(&mut rows, rule, keys, after, load).await;
        if load.items <= 1 && filled.as_ref().is_err_and(|error| error.kind == Kind::TooLarge) && !rows.is_alone() {
            rows = Rows::alone(rule, keys, self.take_turn(load.limit).await?);
            filled = self.fill_unless_stopping(&mut rows, rule, keys, after, load).await;
        }
        load.bytes.fetch_add(rows.bytes(), Ordering::Relaxed);
        filled.map(|()| rows)
    }

    /// A read that may take minutes ends when the pipeline stops; its key is read again by whoever leads next.
    async fn fill_unless_stopping(
        &self,
        rows: &mut Rows,
        rule: &Rule,
        keys: &[&Key],
        after: ClusterTime,
        load: Load<'_>,
    ) -> Result<()> {
        let is_slow = load.limit > self.limits.read_timeout;
        tokio::select! {
            filled = self.fill(rows, rule, keys, after, load) => filled,
            () = self.stopping.cancelled(), if is_slow => {
                Err(Error::new(Kind::Unavailable, "the pipeline stops"))
            }
        }
    }

    /// Waits no longer than a read may take: the key whose turn it is may be slow.
    async fn take_turn(&self, limit: Duration) -> Result<OwnedSemaphorePermit> {
        match tokio::time::timeout(limit, self.large.clone().acquire_owned()).await {
            Ok(turn) => turn.map_err(|_| Error::internal("the semaphore of large values is closed")),
            Err(_) => Err(Error::new(Kind::Unavailable, "another large value is being read")),
        }
    }

    async fn fill(
        &self,
        rows: &mut Rows,
        rule: &Rule,
        keys: &[&Key],
        after: ClusterTime,
        load: Load<'_>,
    ) -> Result<()> {
        let database = &rule.source.namespace.database;
        let unordered = load.sources.is_none() && !self.memory.has_fractions(rule.id);
        if let Some(command) = read::sources_in_any_order(rule, keys).filter(|_| unordered) {
            let mut pages = self.server.pages(database, limited(command, load.limit), Reads { after }).await?;
            let mut whole = true;
            while let Some(batch) = pages.batch().await?.filter(|_| whole) {
                for row in rows_of(&batch)? {
                    let row = row?;
                    whole &= row.get_bool("w").unwrap_or(false);
                    rows.take(&row)?;
                }
            }
            if whole {
                return Ok(());
            }
            self.memory.saw_fractions(rule.id);
            rows.clear();
        }
        let command = load.sources.map_or_else(|| read::sources(rule, keys), |sources| sources(keys));
        let mut pages = self.server.pages(database, limited(command, load.limit), Reads { after }).await?;
        while let Some(batch) = pages.batch().await? {
            for row in rows_of(&batch)? {
                rows.take(&row?)?;
            }
        }
        Ok(())
    }
}

/// For how many keys or targets something is read together.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) task: Task,
    pub(super) items: usize,
    /// How long a read may take.
    pub(super) limit: Duration,
    /// Counts what was read.
    pub(super) bytes: &'a AtomicUsize,
    /// Another way to read the sources.
    pub(super) sources: Option<ReadsSources<'a>>,
}

/// The command that reads the sources of keys.
pub type ReadsSources<'a> = &'a (dyn Fn(&[&Key]) -> Document + Sync);

/// What was done since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Keys that were reconciled.
    pub reconciled: AtomicU64,
    /// Targets that a statement matched.
    pub matched: AtomicU64,
    /// Targets that a statement changed.
    pub modified: AtomicU64,
    /// Keys and targets that were set aside.
    pub dead_letters: AtomicU64,
    /// Runs that failed for the moment.
    pub retries: AtomicU64,
    /// Targets whose owned fields somebody else had written.
    pub drift: AtomicU64,
}
