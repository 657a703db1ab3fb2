//! The recent errors. Repeated errors share one entry.

use std::{collections::VecDeque, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use denormd_model::clock::millis;

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

/// An error, with its times as this process measures them: the machine's clock may be set while it runs.
#[derive(Debug)]
struct Line {
    first: Instant,
    last: Instant,
    count: u64,
    rule: Option<String>,
    doing: String,
    reason: String,
    message: String,
}

/// A bounded list, with the most recent error at the back.
#[derive(Debug, Default)]
pub(super) struct RecentErrors {
    lines: VecDeque<Line>,
}

impl RecentErrors {
    pub fn add(&mut self, rule: Option<&str>, doing: &str, reason: &str, message: &str) {
        let now = Instant::now();
        let same = |line: &Line| line.rule.as_deref() == rule && line.doing == doing && line.message == message;
        let known = self.lines.iter().position(same).and_then(|at| self.lines.remove(at));
        let line = match known {
            Some(line) => Line { last: now, count: line.count + 1, ..line },
            None => Line {
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

    /// The errors of the last `window`, newest first. `now` is the time in milliseconds since 1970.
    pub fn within(&self, window: Duration, now: i64) -> Vec<RecentError> {
        let at = |instant: Instant| now - millis(instant.elapsed());
        let found = self.lines.iter().rev().take_while(|line| line.last.elapsed() <= window);
        let error = |line: &Line| RecentError {
            first: at(line.first),
            last: at(line.last),
            count: line.count,
            rule: line.rule.clone(),
            doing: line.doing.clone(),
            reason: line.reason.clone(),
            message: line.message.clone(),
        };
        found.map(error).collect()
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
        let recent = recent_errors.within(Duration::MAX, 1_000_000);
        assert_eq!(recent.len(), KEPT);
        assert_eq!((recent[0].count, recent[0].rule.as_deref()), (55, Some("r")));
        assert!(recent[0].first <= recent[0].last && recent[0].last <= 1_000_000, "by the clock of the caller");
        std::thread::sleep(Duration::from_millis(2));
        assert!(recent_errors.within(Duration::from_millis(1), 0).is_empty());
    }
}
