//! State that the pipeline publishes several times a second. Lag is computed from it on demand, so it also grows while
//! the pipeline is stuck.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use denormd_model::{position::ClusterTime, rule_state::RuleState};

/// The pipeline at one moment. Rules and streams are identified by their index here.
#[derive(Debug, Clone)]
pub struct Observation {
    /// Time of the observation.
    pub at: Instant,
    /// The rules, in the config's order.
    pub rules: Arc<[RuleFacts]>,
    /// For each rule: commit time of the oldest change that waits or runs, in milliseconds since 1970 by the server's
    /// clock.
    pub oldest: Vec<Option<i64>>,
    /// For each rule: number of fan-out jobs in progress.
    pub fan_outs: Vec<usize>,
    /// For each rule: number of keys that wait or run because of a change.
    pub late: Vec<usize>,
    /// The streams.
    pub streams: Vec<StreamFacts>,
    /// Requests that wait or run, counting named targets.
    pub depth: usize,
    /// Number of requests from which on the streams wait.
    pub capacity: usize,
    /// True while the streams wait for the queue.
    pub full: bool,
    /// Number of keys that are queued or run.
    pub keys: usize,
    /// The state of each rule.
    pub states: Arc<Vec<RuleState>>,
    /// Rules whose history was lost and whose backfill has not ended since.
    pub degraded: BTreeSet<usize>,
}

impl Observation {
    /// True unless the rule is stopped: the lag of a stopped rule has no meaning.
    #[must_use]
    pub fn runs(&self, rule: usize) -> bool {
        self.states.get(rule).is_none_or(|state| !state.is_stopped())
    }

    /// The rules whose state matches the predicate.
    #[must_use]
    pub fn in_state(&self, is: impl Fn(&RuleState) -> bool) -> BTreeSet<usize> {
        self.states.iter().enumerate().filter(|(_, state)| is(state)).map(|(nth, _)| nth).collect()
    }

    /// Merges the observations of two partitions: each rule is as late as in the later one.
    #[must_use]
    pub fn joined(&self, other: &Self) -> Self {
        // During a reload, two pipelines may briefly have different rules: then the newer observation counts.
        let same = self.rules.iter().map(|rule| &rule.name).eq(other.rules.iter().map(|rule| &rule.name));
        if !same || self.streams.len() != other.streams.len() {
            return if self.at > other.at { self.clone() } else { other.clone() };
        }
        let earliest = |(a, b): (&Option<i64>, &Option<i64>)| a.iter().chain(b).min().copied();
        let sum = |(a, b): (&usize, &usize)| a + b;
        let worse = |(a, b)| if RuleState::outranks(b, a) { b } else { a };
        let both = |a: &BTreeSet<usize>, b: &BTreeSet<usize>| a.union(b).copied().collect();
        Self {
            at: self.at.min(other.at),
            rules: self.rules.clone(),
            oldest: self.oldest.iter().zip(&other.oldest).map(earliest).collect(),
            fan_outs: self.fan_outs.iter().zip(&other.fan_outs).map(sum).collect(),
            late: self.late.iter().zip(&other.late).map(sum).collect(),
            streams: self.streams.iter().zip(&other.streams).map(|(a, b)| a.joined(b)).collect(),
            depth: self.depth + other.depth,
            capacity: self.capacity + other.capacity,
            full: self.full || other.full,
            keys: self.keys + other.keys,
            states: Arc::new(self.states.iter().zip(other.states.iter()).map(worse).cloned().collect()),
            degraded: both(&self.degraded, &other.degraded),
        }
    }
}

impl StreamFacts {
    /// Merges the streams of two partitions for the same database: the one that is further behind counts.
    fn joined(&self, other: &Self) -> Self {
        Self {
            database: self.database.clone(),
            reached: self.reached.min(other.reached),
            applied: self.applied.min(other.applied),
            // Without a checkpoint, a restart begins before any checkpoint.
            saved: self.saved.min(other.saved),
            delivered: self.delivered.min(other.delivered),
        }
    }
}

/// Facts about a rule that do not change.
#[derive(Debug, Clone)]
pub struct RuleFacts {
    /// Its name.
    pub name: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// True if its keys are targets. Otherwise they are values that sources and targets match on, each with many
    /// targets.
    pub keyed_by_target: bool,
    /// The configured lag objective.
    pub max_lag: Duration,
    /// Indexes of the rules that it reads from, directly or through other rules.
    pub fed_by: Vec<usize>,
    /// Indexes of the streams that it follows.
    pub streams: Vec<usize>,
}

/// Progress of a stream.
#[derive(Debug, Clone)]
pub struct StreamFacts {
    /// Its database.
    pub database: String,
    /// Everything up to here was read.
    pub reached: ClusterTime,
    /// Everything up to here is applied.
    pub applied: ClusterTime,
    /// The checkpoint: a restart begins here.
    pub saved: Option<ClusterTime>,
    /// Time of its last answer.
    pub delivered: Instant,
}

/// Progress of a backfill.
#[derive(Debug, Clone)]
pub struct BackfillProgress {
    /// Time of its start, or of its continuation after a restart.
    pub started: Instant,
    /// Targets read since then.
    pub scanned: u64,
    /// Targets to read since then, estimated.
    pub total: Option<u64>,
    /// Time of its end.
    pub ended: Option<Instant>,
    /// External reason that limits its speed.
    pub held_back: Option<HeldBack>,
}

/// Reason for the pauses between the pages of a backfill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBack {
    /// `limits.backfill_per_second`.
    Limit,
    /// The primary's last writes are not majority-committed yet.
    MajorityBehind,
}

impl HeldBack {
    /// All reasons.
    pub const ALL: [Self; 2] = [Self::Limit, Self::MajorityBehind];

    /// Its name in metrics and status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::MajorityBehind => "majority_behind",
        }
    }
}

impl BackfillProgress {
    /// Merges two partitions' backfills of a rule: the one that is open, or has the least progress, counts.
    pub(super) fn joined(&self, other: &Self) -> Self {
        let rank = |progress: &Self| (progress.ended.is_some(), progress.scanned);
        let slower = if rank(other) < rank(self) { other } else { self };
        Self { started: self.started.min(other.started), ..slower.clone() }
    }
}
