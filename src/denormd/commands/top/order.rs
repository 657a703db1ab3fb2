//! The order of rules. Pure.

use crate::status::{BEHIND, Rule};

/// Reasons why a rule needs attention, the most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Concern {
    /// It is blocked, unavailable or paused, or its copies may be wrong.
    Stopped,
    /// It is behind.
    Late,
    /// It has dead letters.
    DeadLetters,
    /// It is backfilled, or waits for that.
    Backfill,
    /// Nothing.
    None,
}

impl Concern {
    pub fn of(rule: &Rule) -> Self {
        match rule.state.as_str() {
            "blocked" | "unavailable" | "paused" | "degraded" => Self::Stopped,
            _ if rule.degraded => Self::Stopped,
            _ if rule.lag_seconds.is_some_and(|lag| lag >= BEHIND) => Self::Late,
            _ if rule.dead_letters > 0 => Self::DeadLetters,
            "backfilling" | "awaiting_backfill" => Self::Backfill,
            _ => Self::None,
        }
    }
}

/// The order of the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// Rules that need attention first.
    Attention,
    /// The largest lag first.
    Lag,
    /// By name.
    Name,
    /// As in the config.
    Config,
}

impl Sort {
    /// The next order.
    #[must_use]
    pub fn next(self) -> Self {
        match self {
            Self::Attention => Self::Lag,
            Self::Lag => Self::Name,
            Self::Name => Self::Config,
            Self::Config => Self::Attention,
        }
    }

    /// Its name in the footer.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "problems first",
            Self::Lag => "largest lag first",
            Self::Name => "by name",
            Self::Config => "as in the config",
        }
    }

    /// The rules in this order; equal ones stay in the config's.
    pub(super) fn apply(self, rules: &[Rule]) -> Vec<&Rule> {
        let mut sorted: Vec<&Rule> = rules.iter().collect();
        // A rule whose lag is not known comes last.
        let lag = |rule: &Rule| rule.lag_seconds.unwrap_or(-1.0);
        match self {
            Self::Attention => sorted.sort_by_key(|rule| Concern::of(rule)),
            Self::Lag => sorted.sort_by(|a, b| lag(b).total_cmp(&lag(a))),
            Self::Name => sorted.sort_by(|a, b| a.name.cmp(&b.name)),
            Self::Config => {}
        }
        sorted
    }
}
