//! Traits of the rules' data that reads and writes have shown.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    reconcile::{group::Shape, value::NoInput},
    request::Task,
};
use denormd_rules::plan::{RuleId, reference::Role};

/// Time for which a measured target size is used.
const SIZE_AGE: Duration = Duration::from_secs(60);

/// Time for which no shortcut is tried after one has failed.
const LONG_WAY: Duration = Duration::from_secs(60);

/// The traits of each rule's data.
#[derive(Debug, Default)]
pub struct Traits(Mutex<HashMap<RuleId, OfRule>>);

/// The traits of one rule's data.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct OfRule {
    /// The shape of the targets.
    pub shape: Shape,
    /// The time at which their size was measured.
    pub measured: Option<Instant>,
    /// Bytes for each key in the last read of each task.
    costs: HashMap<Task, usize>,
    /// The last time at which a shortcut returned a row that may be wrong.
    pub shortcut_failed: Option<Instant>,
    /// Number of documents of each side's collection that one page covers, if a full page took too long to read.
    pub windows: HashMap<Role, i64>,
    /// The values of a key without sources, if only a server can compute them. They depend on the rule alone.
    pub no_input: Option<NoInput>,
    /// True if keys were written to the same few targets.
    pub is_crowded: bool,
}

impl Traits {
    /// Gets what is known of a rule; None if nothing is.
    pub(in crate::reconcile) fn of<T>(&self, rule: RuleId, get: impl FnOnce(&OfRule) -> T) -> Option<T> {
        self.0.lock().get(&rule).map(get)
    }

    /// Changes what is known of a rule.
    pub(in crate::reconcile) fn learn(&self, rule: RuleId, change: impl FnOnce(&mut OfRule)) {
        change(self.0.lock().entry(rule).or_default());
    }

    /// The shape of a rule's targets, without their size if that measurement is too old.
    pub(in crate::reconcile) fn shape(&self, rule: RuleId) -> Shape {
        let is_new = |traits: &OfRule| traits.measured.is_some_and(|since| since.elapsed() < SIZE_AGE);
        let shape =
            self.of(rule, |traits| Shape { size: traits.shape.size.filter(|_| is_new(traits)), ..traits.shape });
        shape.unwrap_or_default()
    }

    /// Number of keys whose sources one read is likely to fit into this number of bytes: at least one.
    pub fn keys_at_once(&self, rule: RuleId, task: Task, bytes: usize) -> usize {
        let cost = self.of(rule, |traits| traits.costs.get(&task).copied()).flatten();
        cost.and_then(|cost| bytes.checked_div(cost)).map_or(usize::MAX, |keys| keys.max(1))
    }

    /// Records the number of bytes that a read for `keys` keys took.
    pub(in crate::reconcile) fn cost(&self, rule: RuleId, task: Task, keys: usize, bytes: usize) {
        self.learn(rule, |traits| {
            traits.costs.insert(task, bytes / keys.max(1));
        });
    }

    pub(in crate::reconcile) fn shortcut_fails(&self, rule: RuleId) -> bool {
        self.of(rule, |traits| traits.shortcut_failed).flatten().is_some_and(|since| since.elapsed() < LONG_WAY)
    }

    /// True if the keys of a rule were last written to the same few targets: parallel batches would conflict.
    pub fn is_crowded(&self, rule: RuleId) -> bool {
        self.of(rule, |traits| traits.is_crowded).unwrap_or(false)
    }
}
