//! How fast the audit goes, and how rules share that rate. Pure, but for the turns.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::MutexGuard;

use crate::plan::RuleId;

/// The most targets that are compared at once.
const PAGE: usize = 100;
/// How long a page lasts at least: its commands cost the same for one target, and else many rules with few targets each would be
/// audited without a pause.
const LEAST: Duration = Duration::from_millis(100);
/// How many targets a rule is taken to have while they cannot be counted.
const UNCOUNTED: u64 = 1_000_000;

/// One rate for all rules, which compare in turn.
pub(super) struct Pace {
    per_second: usize,
    /// It is fair: who waits longest is next.
    turn: tokio::sync::Mutex<()>,
    targets: Mutex<BTreeMap<RuleId, u64>>,
}

/// Nobody else compares meanwhile.
pub(super) struct Turn<'a> {
    /// How many pages it may last.
    pub pages: u64,
    _turn: MutexGuard<'a, ()>,
}

impl Pace {
    /// For so many targets a second.
    pub fn new(per_second: usize) -> Self {
        Self { per_second: per_second.max(1), turn: tokio::sync::Mutex::default(), targets: Mutex::default() }
    }

    /// A rule has so many targets.
    pub fn expects(&self, rule: RuleId, targets: Option<u64>) {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).insert(rule, targets.unwrap_or(UNCOUNTED));
    }

    /// Waits for the rule's turn.
    pub async fn turn(&self, rule: RuleId) -> Turn<'_> {
        let turn = self.turn.lock().await;
        let targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        let own = targets.get(&rule).copied().unwrap_or_default();
        Turn { pages: pages(own, targets.values().sum(), targets.len() as u64), _turn: turn }
    }

    /// The targets of a page: half a second's at a low rate, so that no turn takes long.
    pub fn page(&self) -> usize {
        (self.per_second / 2).clamp(1, PAGE)
    }

    /// How long a page of so many targets lasts, at the rate.
    pub fn lasts(&self, targets: u64) -> Duration {
        let millis = targets.saturating_mul(1000) / self.per_second as u64;
        let least = if targets < self.page() as u64 { LEAST } else { Duration::ZERO };
        Duration::from_millis(millis).max(least)
    }

    /// How long a round is likely to take before any of its targets has been compared.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn expected_seconds(&self, targets: Option<u64>) -> Option<f64> {
        let all = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        let total: u64 = all.values().sum();
        // The rate is shared with other rules, and a rule has at least about half of it while it is the largest.
        targets.map(|own| own.max(total.min(own.saturating_mul(2))) as f64 / self.per_second as f64)
    }
}

/// The pages of a turn. Of all turns that rules take one after the other, half is divided equally, so that small rules are done
/// soon, and half by size: no rule waits for its round more than twice as long as all targets of all rules take.
fn pages(own: u64, all: u64, rules: u64) -> u64 {
    1 + u64::try_from(u128::from(own) * u128::from(rules) / u128::from(all.max(1))).unwrap_or(u64::MAX - 1)
}

/// How long a round takes in all that has compared so many targets in so many seconds.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub(super) fn expected_seconds(compared: u64, total: Option<u64>, seconds: f64) -> Option<f64> {
    // From the first pages of many nothing can be told.
    let enough = compared >= 10 * PAGE as u64;
    total.filter(|_| enough).map(|total| seconds * (total.max(compared) as f64 / compared as f64))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::{Instant, timeout};

    use super::*;

    /// Goes round over so many targets without a server, each page in no time, and counts rounds and targets.
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

    /// The round of a small rule waited for that of a large one: 14 hours for ten million targets.
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
