//! Dependencies of every batch.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bson::Document;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{fan_out::FanOuts, kept::Kept, store::Store},
    dead_letter::DeadLetters,
    metrics::Metrics,
    reconcile::{
        memory::Memory,
        read,
        value::{NoInput, Rows},
    },
    request::Task,
    snapshot::Published,
};
use denormd_model::{key::Key, partition::Partition, position::ClusterTime};
use denormd_mongo::{
    Fence, Server,
    command::{limited, rows_of},
    error::{Error, Kind, Result},
};
use denormd_rules::{
    config::{Limits, Undo},
    plan::{Plan, Rule, RuleId},
};

/// Dependencies of every batch, shared by all batches of a pipeline.
#[derive(Debug)]
pub struct Context {
    /// Connection to the cluster.
    pub server: Server,
    /// The compiled rules.
    pub plan: Plan,
    /// Configured limits.
    pub limits: Limits,
    /// The config of kept values.
    pub undo: Undo,
    /// Storage of refused work.
    pub dead_letters: DeadLetters,
    /// Storage of fan-out jobs.
    pub fan_outs: FanOuts,
    /// Facts kept between batches.
    pub memory: Memory,
    /// Held by the one batch of this process that processes a key larger than `limits.batch_bytes`.
    large: Arc<Semaphore>,
    /// Unavailable rules when the config was loaded, each with the missing requirement.
    pub lacking: BTreeMap<RuleId, String>,
    /// Counters of the work so far.
    pub counts: Counts,
    /// The snapshot of the pipeline that uses it.
    pub published: Published,
    /// The daemon's metrics.
    pub metrics: Arc<Metrics>,
    /// Partition that decides which keys are reconciled here.
    pub partition: Partition,
    /// Cancelled when the pipeline that uses it stops.
    pub stopping: CancellationToken,
}

impl Context {
    /// A context for the whole deployment, without a partition.
    #[must_use]
    pub fn new(server: Server, plan: Plan, limits: Limits, dead_letters: DeadLetters, metrics: Arc<Metrics>) -> Self {
        let (database, deployment) = (dead_letters.database.clone(), dead_letters.deployment.clone());
        Self {
            published: Published::new(&plan),
            server,
            plan,
            limits,
            undo: Undo::default(),
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

    /// The same context with another config of kept values.
    #[must_use]
    pub fn with_undo(self, undo: Undo) -> Self {
        Self { undo, ..self }
    }

    /// The storage of kept values.
    #[must_use]
    pub fn kept(&self) -> Kept<'_> {
        let DeadLetters { database, deployment, .. } = &self.dead_letters;
        Kept { server: &self.server, database, deployment }
    }

    /// The same context for one partition: it reconciles the keys that it owns, and keeps its own state. Limits for all
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

    /// A context that reads the data of whole rules, not only of this partition's keys.
    #[must_use]
    pub fn whole(&self) -> Self {
        let Self { server, plan, limits, dead_letters, metrics, .. } = self;
        Self::new(server.unfenced(), plan.clone(), limits.clone(), dead_letters.clone(), metrics.clone())
    }

    /// The state of all partitions of the deployment, to read it and to make requests; it does not end with the lease.
    pub async fn state_of_deployment(&self) -> Result<Store> {
        let DeadLetters { database, deployment, .. } = &self.dead_letters;
        Store::open(&self.server.unfenced(), database, deployment).await
    }

    /// True if writes for this key of the rule run here.
    #[must_use]
    pub fn owns(&self, rule: &Rule, key: &Key) -> bool {
        self.partition.owns(&rule.name, key)
    }

    /// The same context for a leader, whose writes end with its lease. Counters start at zero.
    #[must_use]
    pub fn under(&self, fence: Arc<Fence>) -> Self {
        Self {
            server: self.server.under(fence),
            undo: self.undo.clone(),
            fan_outs: self.fan_outs.clone(),
            large: self.large.clone(),
            lacking: self.lacking.clone(),
            partition: self.partition,
            ..self.whole()
        }
    }

    /// Reads the sources of `keys` for `load.items` keys or targets, at least as new as `after`.
    ///
    /// More than `limits.batch_bytes` of values is an error of the kind [`Kind::TooLarge`], and the caller retries with
    /// fewer. A single key or target is read whatever its size, but only one such read runs at a time in this process.
    pub(super) async fn rows(&self, rule: &Rule, keys: &[&Key], after: ClusterTime, load: Load<'_>) -> Result<Rows> {
        let mut rows =
            if keys.is_empty() { Rows::within(0) } else { self.rows_of_keys(rule, keys, after, load).await? };
        rows.no_input = self.no_input(rule, load.limit).await?;
        let emptied = keys.iter().copied().filter(|key| rule.creates.is_some() && !rows.answer(key));
        rows.held = self.held_by_others(rule, &emptied.collect::<Vec<_>>(), after, load.limit).await?;
        Ok(rows)
    }

    /// The values of a key without sources, if only a server can compute them.
    async fn no_input(&self, rule: &Rule, limit: Duration) -> Result<Option<NoInput>> {
        let Some(command) = read::no_input(rule) else { return Ok(None) };
        if let Some(known) = self.memory.traits.of(rule.id, |traits| traits.no_input.clone()).flatten() {
            return Ok(Some(known));
        }
        let read = async {
            let database = &rule.source.namespace.database;
            let rows = self.server.read(database, limited(command, limit), ClusterTime::default()).await?;
            let row = rows.first().ok_or_else(|| Error::internal("no row without input"))?;
            row.get_document("v").map(ToOwned::to_owned).map_err(|_| Error::internal("a row without values"))
        };
        let values = match read.await {
            Ok(values) => Ok(values),
            Err(error) if error.kind == Kind::Refused => Err(error.message),
            Err(error) => return Err(error),
        };
        self.memory.traits.learn(rule.id, |traits| traits.no_input = Some(values.clone()));
        Ok(Some(values))
    }

    pub(super) async fn rows_of_keys(
        &self,
        rule: &Rule,
        keys: &[&Key],
        after: ClusterTime,
        load: Load<'_>,
    ) -> Result<Rows> {
        let budget = self.limits.batch_bytes;
        let mut rows = Rows::within(budget);
        if load.items <= 1 && self.memory.traits.keys_at_once(rule.id, load.task, budget) <= 1 {
            rows = Rows::alone(rule, keys, self.take_turn(load.limit).await?);
        }
        let mut filled = self.unless_stopping(load.limit, self.fill(&mut rows, rule, keys, after, load)).await;
        if load.items <= 1 && filled.as_ref().is_err_and(|error| error.kind == Kind::TooLarge) && !rows.is_alone() {
            rows = Rows::alone(rule, keys, self.take_turn(load.limit).await?);
            filled = self.unless_stopping(load.limit, self.fill(&mut rows, rule, keys, after, load)).await;
        }
        load.bytes.fetch_add(rows.bytes(), Ordering::Relaxed);
        filled.map(|()| rows)
    }

    /// Ends a read that may take minutes when the pipeline stops; the next leader reads its key again.
    async fn unless_stopping(&self, limit: Duration, read: impl Future<Output = Result<()>>) -> Result<()> {
        let is_slow = limit > self.limits.read_timeout;
        tokio::select! {
            done = read => done,
            () = self.stopping.cancelled(), if is_slow => {
                Err(Error::new(Kind::Unavailable, "the pipeline stops"))
            }
        }
    }

    /// Waits for the turn, no longer than a read may take: the key before it may be slow.
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
        let may = load.sources.is_none() && !self.memory.traits.shortcut_fails(rule.id);
        if let Some(command) = read::sources_by_shortcut(rule, keys).filter(|_| may) {
            let mut pages = self.server.pages(database, limited(command, load.limit), after).await?;
            let mut right = true;
            while let Some(batch) = pages.batch().await?.filter(|_| right) {
                for row in rows_of(&batch)? {
                    let row = row?;
                    right &= row.get_bool("w").unwrap_or(false);
                    rows.take(&row)?;
                }
            }
            if right {
                return Ok(());
            }
            self.memory.traits.learn(rule.id, |traits| traits.shortcut_failed = Some(Instant::now()));
            rows.clear();
        }
        let command = load.sources.map_or_else(|| read::sources(rule, keys), |sources| sources(keys));
        let mut pages = self.server.pages(database, limited(command, load.limit), after).await?;
        while let Some(batch) = pages.batch().await? {
            for row in rows_of(&batch)? {
                rows.take(&row?)?;
            }
        }
        Ok(())
    }
}

/// Properties of a read for several keys or targets.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) task: Task,
    pub(super) items: usize,
    /// Time limit for a read.
    pub(super) limit: Duration,
    /// Counts what was read.
    pub(super) bytes: &'a AtomicUsize,
    /// Another command for reading the sources.
    pub(super) sources: Option<ReadsSources<'a>>,
}

/// The command that reads the sources of keys.
pub type ReadsSources<'a> = &'a (dyn Fn(&[&Key]) -> Document + Sync);

/// Counters since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Keys that were reconciled.
    pub reconciled: AtomicU64,
    /// Targets that a statement matched.
    pub matched: AtomicU64,
    /// Targets that a statement changed or deleted.
    pub modified: AtomicU64,
    /// Write commands that failed as a whole or in part, so that their effect is not known.
    pub uncertain: AtomicU64,
    /// Fan-out jobs and backfills that were started.
    pub jobs: AtomicU64,
    /// Keys and targets that became dead letters.
    pub dead_letters: AtomicU64,
    /// Targets whose owned fields were changed by another writer.
    pub drift: AtomicU64,
}

impl Counts {
    /// Writes that may have changed or deleted targets, and jobs started that may do so.
    pub fn effects(&self) -> u64 {
        [&self.modified, &self.uncertain, &self.jobs].iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}
