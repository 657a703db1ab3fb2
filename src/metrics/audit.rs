//! How far the continuous audit of each rule is.

use serde::{Deserialize, Serialize};

use super::Metrics;

/// The audit of one rule. Times are milliseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditProgress {
    /// Targets compared in the present round.
    pub compared: u64,
    /// Targets to compare in it, estimated.
    pub total: Option<u64>,
    /// Seconds that the present round takes in all, estimated.
    pub round_seconds: Option<f64>,
    /// When the last complete round of this process ended; none before the first one.
    pub last_ended: Option<i64>,
    /// Seconds that it took.
    pub last_seconds: Option<f64>,
    /// Targets of that round that could not be compared.
    pub last_unknown: u64,
}

impl AuditProgress {
    /// The audits of two partitions as one: each goes through all targets, and the one that is least far counts.
    fn joined(&self, other: &Self) -> Self {
        let longest = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).max_by(f64::total_cmp);
        Self {
            compared: self.compared.min(other.compared),
            total: self.total.max(other.total),
            round_seconds: longest(self.round_seconds, other.round_seconds),
            // None, where a partition has not completed a round, is the least.
            last_ended: self.last_ended.min(other.last_ended),
            last_seconds: longest(self.last_seconds, other.last_seconds),
            last_unknown: self.last_unknown + other.last_unknown,
        }
    }
}

impl Metrics {
    /// The audit of a rule in a partition is at another place.
    pub fn audited(&self, rule: &str, partition: u32, change: impl FnOnce(&mut AuditProgress)) {
        change(self.live().audits.entry((rule.to_owned(), partition)).or_default());
    }

    /// How far the audit of a rule is. None where this process does not audit it.
    #[must_use]
    pub fn audit(&self, rule: &str) -> Option<AuditProgress> {
        let live = self.live();
        let mut of_rule = live.audits.iter().filter(|((name, _), _)| name == rule).map(|(_, progress)| progress);
        let first = of_rule.next()?.clone();
        Some(of_rule.fold(first, |all, one| all.joined(one)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_audited_when_all_partitions_have_done_it() {
        let metrics = Metrics::new().unwrap();
        assert_eq!(metrics.audit("r"), None);
        metrics.audited("r", 0, |audit| (audit.compared, audit.last_ended) = (7, Some(5)));
        metrics.audited("r", 1, |audit| audit.compared = 9);
        let audit = metrics.audit("r").unwrap();
        assert_eq!((audit.compared, audit.last_ended), (7, None));
        metrics.forget_observation(1);
        assert_eq!(metrics.audit("r").unwrap().last_ended, Some(5));
    }
}
