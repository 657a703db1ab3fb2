//! The recent errors. Repeated errors share one entry.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};

use denormd_model::clock::{millis, wall_millis};

/// Maximum number of entries.
const KEPT: usize = 50;

/// An error that occurred once or repeatedly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecentError {
    /// Time of the first occurrence, in milliseconds since 1970.
    pub first: i64,
    /// Time of the last occurrence.
    pub last: i64,
    /// Number of occurrences.
    pub count: u64,
    /// The rule concerned, if any.
    pub rule: Option<String>,
    /// The action that failed.
    pub doing: String,
    /// The kind of error.
    pub reason: String,
    /// The error's text.
    pub message: String,
}

/// A bounded list, with the most recent error at the back.
#[derive(Debug, Default)]
pub(super) struct RecentErrors {
    lines: VecDeque<RecentError>,
}

impl RecentErrors {
    pub fn add(&mut self, rule: Option<&str>, doing: &str, reason: &str, message: &str) {
        let now = wall_millis();
        let same = |line: &RecentError| line.rule.as_deref() == rule && line.doing == doing && line.message == message;
        let known = self.lines.iter().position(same).and_then(|at| self.lines.remove(at));
        let line = match known {
            Some(line) => RecentError { last: now, count: line.count + 1, ..line },
            None => RecentError {
                first: now,
                last: now,
                count: 1,
                rule: rule.map(ToOwned::to_owned),
                doing: doing.to_owned(),
                reason: reason.to_owned(),
                message: message.to_owned(),
            },
        };
        self.lines.push_back(line);
        if self.lines.len() > KEPT {
            self.lines.pop_front();
        }
    }

    pub fn recent(&self) -> Vec<RecentError> {
        self.lines.iter().rev().cloned().collect()
    }

    pub fn met(&self, reasons: &[&str], window: Duration) -> bool {
        let from = wall_millis() - millis(window);
        self.lines.iter().rev().take_while(|line| line.last >= from).any(|line| reasons.contains(&line.reason.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_is_one_line_and_old_lines_go() {
        let mut recent_errors = RecentErrors::default();
        for nth in 0..KEPT + 5 {
            recent_errors.add(None, "read", "connection", &format!("no. {nth}"));
            recent_errors.add(Some("r"), "write", "refused", "always the same");
        }
        let recent = recent_errors.recent();
        assert_eq!(recent.len(), KEPT);
        assert_eq!((recent[0].count, recent[0].rule.as_deref()), (55, Some("r")));
        assert!(recent_errors.met(&["refused"], Duration::from_secs(5)));
        assert!(!recent_errors.met(&["privilege"], Duration::from_secs(5)));
    }
}
