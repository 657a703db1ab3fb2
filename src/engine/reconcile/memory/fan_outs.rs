//! The fan-out jobs in progress.

use std::collections::{BTreeMap, HashMap, HashSet};

use parking_lot::Mutex;

use crate::checkpoint::fan_out::{FanOut, Subject};
use denormd_model::key::Key;
use denormd_rules::plan::RuleId;

/// The fan-out jobs in progress, and the targets of the page that each of them waits for.
#[derive(Debug, Default)]
pub struct RunningFanOuts {
    /// The newest request of each job that is not done.
    open: Mutex<HashMap<Subject, FanOut>>,
    pages: Mutex<HashMap<Subject, HashSet<Key>>>,
}

impl RunningFanOuts {
    /// True if the job is in progress.
    #[must_use]
    pub fn is_running(&self, subject: &Subject) -> bool {
        self.open.lock().contains_key(subject)
    }

    /// True if any job is in progress.
    #[must_use]
    pub fn any(&self) -> bool {
        !self.open.lock().is_empty()
    }

    /// True if a job of the rule is in progress.
    #[must_use]
    pub fn has(&self, rule: RuleId) -> bool {
        self.open.lock().keys().any(|subject| subject.rule == rule)
    }

    /// Number of jobs in progress of each rule that has any.
    #[must_use]
    pub fn count(&self) -> BTreeMap<usize, usize> {
        let mut counts = BTreeMap::new();
        self.open.lock().keys().for_each(|subject| *counts.entry(subject.rule.0).or_default() += 1);
        counts
    }

    /// Commit time of the oldest change that a job of the rule carries, in milliseconds since 1970.
    #[must_use]
    pub fn oldest(&self, rule: RuleId) -> Option<i64> {
        let open = self.open.lock();
        open.values().filter(|fan_out| fan_out.subject.rule == rule).filter_map(|fan_out| fan_out.committed).min()
    }

    /// Forgets the jobs of an earlier attempt to start.
    pub fn clear(&self) {
        self.open.lock().clear();
        self.pages.lock().clear();
    }

    /// Records that a job, or another pass of it, is in progress.
    pub fn begin(&self, fan_out: &FanOut) {
        self.open.lock().insert(fan_out.subject.clone(), fan_out.clone());
    }

    /// Records that a job has ended, unless another pass was requested.
    pub fn end(&self, done: &FanOut) {
        let mut open = self.open.lock();
        if open.get(&done.subject).is_some_and(|newest| newest.request == done.request) {
            open.remove(&done.subject);
        }
    }

    /// The targets of the page that a job waits for; none if it waits for no page.
    pub(in crate::reconcile) fn page(&self, subject: &Subject) -> Option<HashSet<Key>> {
        self.pages.lock().get(subject).cloned()
    }

    /// Records the page that a job requests, or that the page is done.
    pub fn asks_page(&self, subject: &Subject, page: Option<HashSet<Key>>) {
        let mut pages = self.pages.lock();
        match page {
            Some(page) => drop(pages.insert(subject.clone(), page)),
            None => drop(pages.remove(subject)),
        }
    }
}
