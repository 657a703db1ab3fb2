//! What the pipeline says of itself, several times a second. Lag is computed from it when somebody asks, so that it grows
//! also while the pipeline is stuck.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{position::ClusterTime, rule_state::RuleState};

/// The pipeline at one moment. Rules and streams are numbered by their places here.
#[derive(Debug, Clone)]
pub struct Observation {
    /// When.
    pub at: Instant,
    /// The rules, in the config's order.
    pub rules: Arc<[RuleFacts]>,
    /// For each rule: when the oldest change was committed that waits or runs, in milliseconds since 1970 of the server.
    pub oldest: Vec<Option<i64>>,
    /// For each rule: how many large fan-outs are under way.
    pub fan_outs: Vec<usize>,
    /// For each rule: keys that wait or run for the sake of a change.
    pub late: Vec<usize>,
    /// The streams.
    pub streams: Vec<StreamFacts>,
    /// Requests that wait or run, named targets counted.
    pub depth: usize,
    /// Requests from which on the streams wait.
    pub capacity: usize,
    /// Whether the streams wait.
    pub full: bool,
    /// Keys that are queued or run.
    pub keys: usize,
    /// The state of each rule.
    pub states: Arc<Vec<RuleState>>,
    /// Rules whose history was lost and whose backfill has not ended since.
    pub degraded: BTreeSet<usize>,
}

impl Observation {
    /// Whether a rule does all that it should: a lag of one that does not says nothing.
    #[must_use]
    pub fn runs(&self, rule: usize) -> bool {
        self.states.get(rule).is_none_or(|state| !state.is_stopped())
    }

    /// The rules that are in such a state.
    #[must_use]
    pub fn in_state(&self, is: impl Fn(&RuleState) -> bool) -> BTreeSet<usize> {
        self.states.iter().enumerate().filter(|(_, state)| is(state)).map(|(nth, _)| nth).collect()
    }

    /// What the pipelines of two partitions say, as one: a rule is as late as it is in the later one.
    #[must_use]
    pub fn joined(&self, other: &Self) -> Self {
        // For a moment in a reload two pipelines may have other rules: then the newer one speaks.
        let same = self.rules.iter().map(|rule| &rule.name).eq(other.rules.iter().map(|rule| &rule.name));
        if !same || self.streams.len() != other.streams.len() {
            return if self.at > other.at { self.clone() } else { other.clone() };
        }
        let earliest = |(a, b): (&Option<i64>, &Option<i64>)| a.iter().chain(b).min().copied();
        let sum = |(a, b): (&usize, &usize)| a + b;
        let worse = |(a, b)| if RuleState::urgency(b) > RuleState::urgency(a) { b } else { a };
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
    /// The same database's stream of another partition beside this one: the one that is behind counts.
    fn joined(&self, other: &Self) -> Self {
        Self {
            database: self.database.clone(),
            reached: self.reached.min(other.reached),
            applied: self.applied.min(other.applied),
            // Without a saved position a restart begins before any.
            saved: self.saved.min(other.saved),
            delivered: self.delivered.min(other.delivered),
        }
    }
}

/// What does not change about a rule.
#[derive(Debug, Clone)]
pub struct RuleFacts {
    /// Its name.
    pub name: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// Whether its keys are targets; else they are values that sources and targets match on, each of many targets.
    pub keyed_by_target: bool,
    /// The lag that it should not have for long.
    pub max_lag: Duration,
    /// The rules that it reads from, whole chains.
    pub fed_by: Vec<usize>,
    /// The streams that it listens to.
    pub streams: Vec<usize>,
}

/// How far a stream is.
#[derive(Debug, Clone)]
pub struct StreamFacts {
    /// Its database.
    pub database: String,
    /// Everything up to here was read.
    pub reached: ClusterTime,
    /// Everything up to here is applied.
    pub applied: ClusterTime,
    /// A restart begins here.
    pub saved: Option<ClusterTime>,
    /// When it last answered.
    pub delivered: Instant,
}

/// How far a backfill is.
#[derive(Debug, Clone)]
pub struct BackfillProgress {
    /// When it started, or went on after a restart.
    pub started: Instant,
    /// Targets read since.
    pub scanned: u64,
    /// Targets to read since then, estimated.
    pub total: Option<u64>,
    /// When it ended.
    pub ended: Option<Instant>,
    /// What keeps it from going faster, while that is not denormd itself.
    pub held_back: Option<HeldBack>,
}

/// Why a backfill waits between its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBack {
    /// `limits.backfill_per_second`.
    Limit,
    /// What the primary has written last is not acknowledged by a majority yet.
    MajorityBehind,
}

impl HeldBack {
    /// All of them.
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
    /// Of two partitions' backfills of a rule the one that is open, or least far.
    pub(super) fn joined(&self, other: &Self) -> Self {
        let rank = |progress: &Self| (progress.ended.is_some(), progress.scanned);
        let slower = if rank(other) < rank(self) { other } else { self };
        Self { started: self.started.min(other.started), ..slower.clone() }
    }
}
