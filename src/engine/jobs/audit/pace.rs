//! The rate of the audit, and its division among the rules. Pure, except for waiting for a turn.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use tokio::sync::MutexGuard;

use denormd_rules::plan::RuleId;

/// Maximum number of targets to compare at once.
const PAGE: usize = 100;
/// Minimum duration of a partial page. Its commands cost as much as those of a full page, so many small rules would
/// otherwise be audited without a pause.
const LEAST: Duration = Duration::from_millis(100);
/// Assumed number of targets of a rule whose targets cannot be counted.
const UNCOUNTED: u64 = 1_000_000;

/// One rate for all rules, which take turns.
pub(super) struct Pace {
    per_second: usize,
    /// A fair lock: the rule that waits longest is next.
    turn: tokio::sync::Mutex<()>,
    targets: Mutex<BTreeMap<RuleId, u64>>,
}

/// The right to compare, held by one rule at a time.
pub(super) struct Turn<'a> {
    /// Maximum number of pages of the turn.
    pub pages: u64,
    _turn: MutexGuard<'a, ()>,
}

impl Pace {
    /// A rate in targets per second.
    pub fn new(per_second: usize) -> Self {
        Self { per_second: per_second.max(1), turn: tokio::sync::Mutex::default(), targets: Mutex::default() }
    }

    /// Sets the number of targets of a rule.
    pub fn expects(&self, rule: RuleId, targets: Option<u64>) {
        self.targets.lock().insert(rule, targets.unwrap_or(UNCOUNTED));
    }

    /// Waits for the rule's turn.
    pub async fn turn(&self, rule: RuleId) -> Turn<'_> {
        let turn = self.turn.lock().await;
        let targets = self.targets.lock();
        let own = targets.get(&rule).copied().unwrap_or_default();
        Turn { pages: pages(own, targets.values().sum(), targets.len() as u64), _turn: turn }
    }

    /// The number of targets in a page: half a second's worth at a low rate, so that turns stay short.
    pub fn page(&self) -> usize {
        (self.per_second / 2).clamp(1, PAGE)
    }

    /// The duration of a page with this number of targets, at the rate.
    pub fn lasts(&self, targets: u64) -> Duration {
        let millis = targets.saturating_mul(1000) / self.per_second as u64;
        let least = if targets < self.page() as u64 { LEAST } else { Duration::ZERO };
        Duration::from_millis(millis).max(least)
    }

    /// The expected duration of a round, in seconds, before any target has been compared.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn expected_seconds(&self, targets: Option<u64>) -> Option<f64> {
        let all = self.targets.lock();
        let total: u64 = all.values().sum();
        // The rate is shared with other rules. The largest rule gets about half of it or more.
        targets.map(|own| own.max(total.min(own.saturating_mul(2))) as f64 / self.per_second as f64)
    }
}

/// The pages of a turn. Half of the work is divided equally among the rules, so that small rules finish soon, and half
/// by size. No round takes more than twice as long as one pass over all targets of all rules.
fn pages(own: u64, all: u64, rules: u64) -> u64 {
    1 + u64::try_from(u128::from(own) * u128::from(rules) / u128::from(all.max(1))).unwrap_or(u64::MAX - 1)
}

/// The expected duration of a whole round, from the targets compared so far and the seconds that took.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub(super) fn expected_seconds(compared: u64, total: Option<u64>, seconds: f64) -> Option<f64> {
    // A few pages are not enough for an estimate.
    let enough = compared >= 10 * PAGE as u64;
    total.filter(|_| enough).map(|total| seconds * (total.max(compared) as f64 / compared as f64))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::{Instant, timeout};

    use super::*;

    /// Runs rounds of `targets` without a server, with pages that take no time, and counts rounds and targets.
    async fn rounds(pace: &Pace, rule: RuleId, targets: u64, ended: &AtomicU64, compared: &AtomicU64) {
        loop {
            tokio::time::sleep(Duration::from_secs(10)).await;
            pace.expects(rule, Some(targets));
            let mut left = targets;
            while left > 0 {
                let turn = pace.turn(rule).await;
                for _ in 0..turn.pages {
                    let page = left.min(pace.page() as u64);
                    left -= page;
                    compared.fetch_add(page, Ordering::Relaxed);
                    tokio::time::sleep(pace.lasts(page)).await;
                    if left == 0 {
                        break;
                    }
                }
            }
            ended.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A small rule used to wait for the round of a large one: 14 hours for ten million targets.
    #[tokio::test(start_paused = true)]
    async fn small_rules_do_not_wait_for_large_ones_nor_slow_them_down_much() {
        let pace = Pace::new(200);
        let count = || (AtomicU64::new(0), AtomicU64::new(0));
        let (large, middle) = (count(), count());
        let small: Vec<_> = (0..20).map(|_| count()).collect();
        let hour = timeout(Duration::from_secs(3600), async {
            let others = small
                .iter()
                .enumerate()
                .map(|(nth, (ended, compared))| rounds(&pace, RuleId(nth + 2), 30, ended, compared));
            tokio::join!(
                rounds(&pace, RuleId(0), 10_000_000, &large.0, &large.1),
                rounds(&pace, RuleId(1), 50_000, &middle.0, &middle.1),
                futures_util::future::join_all(others),
            )
        });
        assert!(hour.await.is_err());
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        assert!(small.iter().all(|(ended, _)| of(ended) >= 60), "a small rule's round takes a minute at most");
        let all: u64 = small.iter().chain([&large, &middle]).map(|(_, compared)| of(compared)).sum();
        assert!(all <= 200 * 3600, "{all} targets in an hour are more than 200 a second");
        assert!(of(&large.1) >= 100 * 3600, "the largest rule has {} of {all}: less than half the rate", of(&large.1));
        assert!(of(&middle.1) >= 50_000 / 4, "{}", of(&middle.1));
    }

    #[tokio::test(start_paused = true)]
    async fn one_rule_alone_is_compared_at_the_rate() {
        for per_second in [1, 7, 200, 5000] {
            let pace = Pace::new(per_second);
            let (ended, compared) = (AtomicU64::new(0), AtomicU64::new(0));
            let begun = Instant::now();
            timeout(Duration::from_secs(3600), rounds(&pace, RuleId(0), u64::MAX, &ended, &compared))
                .await
                .unwrap_err();
            let rate = compared.into_inner() / begun.elapsed().as_secs();
            let wanted = per_second as u64;
            assert!(rate <= wanted && rate >= wanted * 98 / 100, "{rate} a second, not {wanted}");
        }
    }

    #[test]
    fn the_expected_time_follows_the_rate_until_it_is_measured() {
        let pace = Pace::new(200);
        pace.expects(RuleId(0), Some(10_000_000));
        assert_eq!(pace.expected_seconds(Some(10_000_000)), Some(50_000.0));
        pace.expects(RuleId(1), Some(100));
        assert_eq!(pace.expected_seconds(Some(100)), Some(1.0));
        assert_eq!(pace.expected_seconds(None), None);
        assert_eq!(expected_seconds(10, Some(1_000), 1.0), None);
        assert_eq!(expected_seconds(2_000, Some(10_000), 100.0), Some(500.0));
        assert_eq!(expected_seconds(2_000, None, 100.0), None);
    }
}
