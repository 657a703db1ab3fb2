//! The state of a rule: one value for whether the rule runs and, if it does not, the reason.
//!
//! The state database holds it (the engine's `checkpoint::rule_record`), the pipeline acts on it, and status, metrics and
//! commands report it. No other flag duplicates it.

use std::fmt;

use bson::{Bson, DateTime};
use serde::{Deserialize, Serialize};

/// The state of a rule.
#[derive(Debug, Clone, PartialEq)]
pub enum RuleState {
    /// Existing targets are being brought up to date while live changes are applied. The leader sets it for a new or
    /// changed rule, after a loss of history, and when a blocked, paused or unavailable rule runs again; `denormd
    /// backfill` requests it.
    Backfilling {
        /// The `_id` of the target to resume after; None at the beginning.
        after: Option<Bson>,
        /// True if all targets are done, and `after` is the `_id` of a source: for a rule that creates its targets.
        in_sources: bool,
        /// Somebody has agreed to the values that it removes (`denormd unblock`, or `adopt: true` before the first backfill of a
        /// definition): the removal limit does not stop it.
        agreed: bool,
    },
    /// Live changes are applied, and existing targets wait for `denormd backfill`. The leader sets it for a new or changed rule
    /// with `backfill: manual`, and again after it was unavailable or its source gone.
    AwaitingBackfill,
    /// Live changes are applied, and existing targets are up to date. The leader sets it at the end of a backfill.
    Live,
    /// Continuing could lose data, which a person has to agree to. The leader sets it; `denormd unblock` ends it with a
    /// backfill. The leader also ends the block of a rule whose source is there again, if a backfill would remove at most a tenth of
    /// the rule's values.
    Blocked(BlockReason),
    /// An operator has stopped it. `denormd pause` sets it; `denormd resume`, or the end of the given time, ends it
    /// with a backfill.
    Paused {
        /// Time at which the pause ends by itself.
        until: Option<DateTime>,
        /// The reason for which the end of the pause blocks the rule, instead of a backfill.
        blocked: Option<BlockReason>,
    },
    /// The cluster lacks a privilege or an index that the rule needs. The leader sets it, and ends it with a backfill
    /// once the privilege is granted or the index exists.
    Unavailable {
        /// The missing privilege or index.
        reason: String,
    },
    /// The rule is not in the config. The leader sets it; a rule that comes back is backfilled.
    Removed,
}

/// Reason why a rule is blocked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
pub enum BlockReason {
    /// The source collection was dropped, renamed or replaced, and does not exist: the copied values stay.
    #[serde(rename = "source_gone")]
    SourceGone,
    /// More targets would have lost their values within an hour than `limits.destroy_per_hour` allows.
    #[serde(rename = "removal_limit")]
    RemovalLimit,
    /// The rule's first backfill would change existing data that denormd did not write, and nobody has agreed to that.
    #[serde(rename = "adoption")]
    Adoption(Adoption),
}

/// Effect of a rule's first backfill on existing data.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Adoption {
    /// Values that would be written where there is none.
    #[serde(rename = "adds", default)]
    pub adds: u64,
    /// Existing values that would change.
    #[serde(rename = "overwrites", default)]
    pub overwrites: u64,
    /// Existing values that would be removed, with those of deleted documents and elements.
    #[serde(rename = "removes", default)]
    pub removes: u64,
    /// Targets that were inspected.
    #[serde(rename = "total", default)]
    pub total: u64,
    /// True if the figures come from a sample, not from all targets.
    #[serde(rename = "sampled", default)]
    pub sampled: bool,
    /// The reasons why the rule is blocked, one sentence each.
    #[serde(rename = "causes", default)]
    pub causes: Vec<String>,
}

impl RuleState {
    /// A backfill of all targets, without an agreement to its removals.
    pub const BACKFILL: Self = Self::Backfilling { after: None, in_sources: false, agreed: false };

    /// The state once the rule is blocked for this reason: a paused rule stays paused.
    #[must_use]
    pub fn blocked(&self, reason: BlockReason) -> Self {
        match self {
            Self::Paused { until, .. } => Self::Paused { until: *until, blocked: Some(reason) },
            _ => Self::Blocked(reason),
        }
    }

    /// The state after the pause; None if the rule is not paused.
    #[must_use]
    pub fn resumed(&self) -> Option<Self> {
        match self {
            Self::Paused { blocked: Some(reason), .. } => Some(Self::Blocked(reason.clone())),
            Self::Paused { blocked: None, .. } => Some(Self::BACKFILL),
            _ => None,
        }
    }

    /// The reason for which the rule is blocked, or will be at the end of its pause.
    #[must_use]
    pub fn block(&self) -> Option<&BlockReason> {
        match self {
            Self::Blocked(reason) => Some(reason),
            Self::Paused { blocked, .. } => blocked.as_ref(),
            _ => None,
        }
    }

    /// True if the rule is blocked for its effect on existing data, or will be at the end of its pause: its definition has written
    /// nothing.
    #[must_use]
    pub fn awaits_agreement(&self) -> bool {
        matches!(self.block(), Some(BlockReason::Adoption(_)))
    }

    /// The same state; a backfill gets this agreement to its removals.
    #[must_use]
    pub fn with_removals(mut self, are_agreed: bool) -> Self {
        if let Self::Backfilling { agreed, .. } = &mut self {
            *agreed = are_agreed;
        }
        self
    }

    /// Its name in output and metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Backfilling { .. } => "backfilling",
            Self::AwaitingBackfill => "awaiting_backfill",
            Self::Live => "live",
            Self::Blocked(_) => "blocked",
            Self::Paused { .. } => "paused",
            Self::Unavailable { .. } => "unavailable",
            Self::Removed => "removed",
        }
    }

    /// True while its backfill is in progress.
    #[must_use]
    pub fn is_backfilling(&self) -> bool {
        matches!(self, Self::Backfilling { .. })
    }

    /// True if a person has to agree before it runs again.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        matches!(self, Self::Blocked(_))
    }

    /// True if it is blocked, paused or unavailable: its values are not kept in sync for now, and a backfill follows.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self, Self::Blocked(_) | Self::Paused { .. } | Self::Unavailable { .. })
    }

    /// True if it is stopped, and may run again without an operator.
    #[must_use]
    pub fn resumes_by_itself(&self) -> bool {
        match self {
            Self::Paused { until, .. } => until.is_some(),
            Self::Blocked(reason) => *reason == BlockReason::SourceGone,
            Self::Unavailable { .. } => true,
            Self::Backfilling { .. } | Self::AwaitingBackfill | Self::Live | Self::Removed => false,
        }
    }

    /// The reason why it is stopped, in words.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Blocked(reason) => Some(reason.to_string()),
            Self::Paused { blocked: None, .. } => Some("paused by an operator".to_owned()),
            Self::Paused { blocked: Some(reason), .. } => Some(format!("paused by an operator; {reason}")),
            Self::Unavailable { reason } => Some(reason.clone()),
            Self::Backfilling { .. } | Self::AwaitingBackfill | Self::Live | Self::Removed => None,
        }
    }

    /// True if this state is reported for a rule that has the other state in another partition.
    #[must_use]
    pub fn outranks(&self, other: &Self) -> bool {
        self.rank() > other.rank()
    }

    fn rank(&self) -> (Option<usize>, u8) {
        let of_reason = match self.block() {
            Some(BlockReason::Adoption(_)) => 3,
            Some(BlockReason::SourceGone) => 2,
            Some(BlockReason::RemovalLimit) => 1,
            None => 0,
        };
        (rank(self.name()), of_reason)
    }
}

/// Rank of a state by its name. Of the states of a rule in several partitions, the highest is reported.
#[must_use]
pub fn rank(name: &str) -> Option<usize> {
    // A live rule may be in shadow; `degraded` is a backfill after a loss of changes.
    let names = [
        "live",
        "shadow",
        "awaiting_backfill",
        "removed",
        "backfilling",
        "degraded",
        "paused",
        "unavailable",
        "blocked",
    ];
    names.iter().position(|known| *known == name)
}

impl BlockReason {
    /// The event that ends the block of a rule.
    #[must_use]
    pub fn end(&self, rule: &str) -> String {
        match self {
            Self::SourceGone => {
                format!("the collection is there again with its documents, or `denormd unblock {rule}`")
            }
            Self::RemovalLimit | Self::Adoption(_) => format!("`denormd unblock {rule}`"),
        }
    }
}

impl fmt::Display for BlockReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SourceGone => f.write_str("its source collection was dropped, renamed or replaced"),
            Self::RemovalLimit => {
                f.write_str("more targets would have lost their values than limits.destroy_per_hour allows")
            }
            Self::Adoption(adoption) => {
                write!(f, "its first backfill would change existing data: {}", adoption.figures())?;
                adoption.causes.iter().try_for_each(|cause| write!(f, "; {cause}"))
            }
        }
    }
}

impl Adoption {
    /// The counts, in words.
    #[must_use]
    pub fn figures(&self) -> String {
        let Self { adds, overwrites, removes, total, sampled, .. } = self;
        let sample = if *sampled { "a sample of " } else { "" };
        format!("of {sample}{total} targets it adds {adds}, overwrites {overwrites}, removes {removes}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_states_of_a_rule_in_several_partitions_the_most_urgent_is_reported() {
        let states = [
            RuleState::Live,
            RuleState::AwaitingBackfill,
            RuleState::Removed,
            RuleState::BACKFILL,
            RuleState::Paused { until: None, blocked: None },
            RuleState::Paused { until: None, blocked: Some(BlockReason::RemovalLimit) },
            RuleState::Paused { until: None, blocked: Some(BlockReason::SourceGone) },
            RuleState::Unavailable { reason: String::new() },
            RuleState::Blocked(BlockReason::RemovalLimit),
            RuleState::Blocked(BlockReason::SourceGone),
            RuleState::Blocked(BlockReason::Adoption(Adoption::default())),
        ];
        for (nth, state) in states.iter().enumerate() {
            assert!(rank(state.name()).is_some(), "{}", state.name());
            for (other, lower) in states.iter().enumerate() {
                assert_eq!(state.outranks(lower), nth > other, "{} and {}", state.name(), lower.name());
            }
        }
    }
}
