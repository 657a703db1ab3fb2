//! Progress of the jobs of a rule.

use tokio::time::Instant;

use serde::{Deserialize, Serialize};

/// Progress of a backfill.
#[derive(Debug, Clone)]
pub struct BackfillProgress {
    /// Time of its start, or of its continuation after a restart.
    pub started: Instant,
    /// Targets read since then. Of a rule that creates its targets, sources count as well until its end.
    pub scanned: u64,
    /// Targets to read since then, estimated.
    pub total: Option<u64>,
    /// Time of its end.
    pub ended: Option<Instant>,
    /// Dead letters of the rule at its end.
    pub dead_letters: u64,
    /// External reason that limits its speed.
    pub held_back: Option<HeldBack>,
}

impl BackfillProgress {
    /// A backfill that starts now.
    #[must_use]
    pub fn started(total: Option<u64>) -> Self {
        Self { started: Instant::now(), scanned: 0, total, ended: None, dead_letters: 0, held_back: None }
    }

    /// Merges two partitions' backfills of a rule: the one that is open, or has the least progress, counts. Each partition
    /// has its own dead letters.
    pub(super) fn joined(&self, other: &Self) -> Self {
        let rank = |progress: &Self| (progress.ended.is_some(), progress.scanned);
        let slower = if rank(other) < rank(self) { other } else { self };
        let dead_letters = self.dead_letters + other.dead_letters;
        Self { started: self.started.min(other.started), dead_letters, ..slower.clone() }
    }
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

/// Progress of the continuous audit of a rule. Times are milliseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditProgress {
    /// Targets compared in the current round.
    pub compared: u64,
    /// Targets to compare in the current round, estimated.
    pub total: Option<u64>,
    /// Duration of the whole current round in seconds, estimated.
    pub round_seconds: Option<f64>,
    /// End of the last complete round in this process; none before the first one.
    pub last_ended: Option<i64>,
    /// Duration of that round in seconds.
    pub last_seconds: Option<f64>,
    /// Targets of that round that could not be compared.
    pub last_unknown: u64,
}

impl AuditProgress {
    /// Merges the audits of two partitions: each reads all targets, and the one with the least progress counts.
    #[must_use]
    pub fn joined(&self, other: &Self) -> Self {
        let longest = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).max_by(f64::total_cmp);
        Self {
            compared: self.compared.min(other.compared),
            total: self.total.max(other.total),
            round_seconds: longest(self.round_seconds, other.round_seconds),
            // None, for a partition without a complete round, is the least.
            last_ended: self.last_ended.min(other.last_ended),
            last_seconds: longest(self.last_seconds, other.last_seconds),
            last_unknown: self.last_unknown + other.last_unknown,
        }
    }
}
