//! The fan-out jobs in progress.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use crate::checkpoint::fan_out::Subject;
use denormd_model::key::Key;

/// The fan-out jobs in progress, and the targets of the page that each of them waits for.
#[derive(Debug, Default)]
pub struct RunningFanOuts {
    running: Mutex<HashSet<Subject>>,
    pages: Mutex<HashMap<Subject, HashSet<Key>>>,
}

impl RunningFanOuts {
    /// True if the job is in progress.
    #[must_use]
    pub fn is_running(&self, subject: &Subject) -> bool {
        self.running.lock().contains(subject)
    }

    /// Records that a job is in progress.
    pub fn begin(&self, subject: &Subject) {
        self.running.lock().insert(subject.clone());
    }

    /// Records that a job has ended.
    pub fn end(&self, subject: &Subject) {
        self.running.lock().remove(subject);
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
