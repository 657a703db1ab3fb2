//! The running batches of each rule.

use std::collections::HashMap;

use parking_lot::Mutex;

use denormd_rules::plan::RuleId;

/// Number of running batches of each rule.
#[derive(Debug, Default)]
pub struct RunningBatches(Mutex<HashMap<RuleId, usize>>);

impl RunningBatches {
    /// Counts a batch of a rule until the returned value is dropped.
    pub(in crate::reconcile) fn begin(&self, rule: RuleId) -> Running<'_> {
        *self.0.lock().entry(rule).or_default() += 1;
        Running { batches: self, rule }
    }

    /// True while a batch of the rule runs.
    #[must_use]
    pub fn is_running(&self, rule: RuleId) -> bool {
        self.0.lock().get(&rule).is_some_and(|batches| *batches > 0)
    }
}

/// A running batch.
pub(in crate::reconcile) struct Running<'a> {
    batches: &'a RunningBatches,
    rule: RuleId,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(batches) = self.batches.0.lock().get_mut(&self.rule) {
            *batches = batches.saturating_sub(1);
        }
    }
}
