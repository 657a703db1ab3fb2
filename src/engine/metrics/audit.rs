//! Progress of the continuous audit of each rule.

use serde::{Deserialize, Serialize};

use super::Metrics;

/// The audit of one rule. Times are milliseconds since 1970.
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
    fn joined(&self, other: &Self) -> Self {
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

impl Metrics {
    /// Updates the audit progress of a rule in a partition.
    pub fn audited(&self, rule: &str, partition: u32, change: impl FnOnce(&mut AuditProgress)) {
        change(self.live().audits.entry((rule.to_owned(), partition)).or_default());
    }

    /// Audit progress of a rule. None if this process does not audit it.
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
