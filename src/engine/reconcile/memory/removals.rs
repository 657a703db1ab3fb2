//! The values that rules have removed, and how many they may remove.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, Hash, RandomState},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use denormd_rules::plan::RuleId;

/// The span of `limits.destroy_per_hour`.
const HOUR: Duration = Duration::from_secs(3600);

/// Maximum number of targets of a rule whose loss of a value is remembered individually, at 8 bytes each. Any further
/// target is counted again with each attempt to write it.
const REMEMBERED: usize = 1_000_000;

/// The removals of each rule.
#[derive(Debug, Default)]
pub struct Removals {
    rules: Mutex<HashMap<RuleId, OfRule>>,
    hasher: RandomState,
}

#[derive(Debug, Default)]
struct OfRule {
    losses: Option<Losses>,
    /// The removal limit of a rule whose limit depends on its number of targets, and the time of the count.
    limit: Option<(Instant, usize)>,
    /// True if an operator has agreed to the rule's backfill: the removal limit does not stop it.
    is_agreed: bool,
}

/// Targets that have lost a value within the last hour because they have no source.
#[derive(Debug)]
struct Losses {
    since: Instant,
    count: usize,
    /// Their hashes: a batch that is retried recognises those that it has counted but not written.
    hashes: HashSet<u64>,
}

impl Removals {
    /// The form in which losses are counted.
    pub(in crate::reconcile) fn hash(&self, loss: &impl Hash) -> u64 {
        self.hasher.hash_one(loss)
    }

    /// Counts these losses, each once, unless there would be more than `limit` in this hour; returns false in that case.
    pub(in crate::reconcile) fn count(&self, rule: RuleId, limit: usize, losses: Vec<u64>) -> bool {
        let mut rules = self.rules.lock();
        let hour = &mut rules.entry(rule).or_default().losses;
        hour.take_if(|hour| hour.since.elapsed() > HOUR);
        let known = hour.get_or_insert_with(|| Losses { since: Instant::now(), count: 0, hashes: HashSet::new() });
        let mut new: HashSet<u64> = losses.into_iter().collect();
        new.retain(|loss| !known.hashes.contains(loss));
        if known.count + new.len() > limit {
            return false;
        }
        known.count += new.len();
        let room = REMEMBERED.saturating_sub(known.hashes.len());
        known.hashes.extend(new.into_iter().take(room));
        true
    }

    /// Resets the count of a rule after it was unblocked.
    pub fn reset(&self, rule: RuleId) {
        self.rules.lock().entry(rule).or_default().losses = None;
    }

    /// The removal limit of a rule, if it was computed less than an hour ago.
    pub(in crate::reconcile) fn limit(&self, rule: RuleId) -> Option<usize> {
        let (since, limit) = self.rules.lock().get(&rule)?.limit?;
        (since.elapsed() < HOUR).then_some(limit)
    }

    pub(in crate::reconcile) fn learn_limit(&self, rule: RuleId, limit: usize) {
        self.rules.lock().entry(rule).or_default().limit = Some((Instant::now(), limit));
    }

    /// True if an operator has agreed to the removals of a rule's backfill.
    #[must_use]
    pub fn are_agreed(&self, rule: RuleId) -> bool {
        self.rules.lock().get(&rule).is_some_and(|rule| rule.is_agreed)
    }

    /// Records whether an operator has agreed to the removals of a rule's backfill.
    pub fn agree(&self, rule: RuleId, is_agreed: bool) {
        self.rules.lock().entry(rule).or_default().is_agreed = is_agreed;
    }
}
