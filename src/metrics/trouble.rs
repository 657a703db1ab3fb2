//! The recent errors, those that repeat as one line.

use std::{collections::VecDeque, time::Duration};

use super::wall_millis;

/// Lines kept.
const KEPT: usize = 50;

/// One error, or the same one many times.
#[derive(Debug, Clone, PartialEq)]
pub struct Trouble {
    /// When it was first met, in milliseconds since 1970.
    pub first: i64,
    /// When it was last met.
    pub last: i64,
    /// How often.
    pub count: u64,
    /// The rule it concerns, where it concerns one.
    pub rule: Option<String>,
    /// What was being done.
    pub doing: &'static str,
    /// The kind of error.
    pub reason: &'static str,
    /// The error's text.
    pub message: String,
}

/// A bounded list, the one met last at the back.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    lines: VecDeque<Trouble>,
}

impl Troubles {
    pub fn add(&mut self, rule: Option<&str>, doing: &'static str, reason: &'static str, message: &str) {
        let now = wall_millis();
        let same = |line: &Trouble| line.rule.as_deref() == rule && line.doing == doing && line.message == message;
        let known = self.lines.iter().position(same).and_then(|at| self.lines.remove(at));
        let line = match known {
            Some(line) => Trouble { last: now, count: line.count + 1, ..line },
            None => Trouble {
                first: now,
                last: now,
                count: 1,
                rule: rule.map(ToOwned::to_owned),
                doing,
                reason,
                message: message.to_owned(),
            },
        };
        self.lines.push_back(line);
        if self.lines.len() > KEPT {
            self.lines.pop_front();
        }
    }

    pub fn recent(&self) -> Vec<Trouble> {
        self.lines.iter().rev().cloned().collect()
    }

    pub fn met(&self, reasons: &[&str], window: Duration) -> bool {
        let from = wall_millis() - i64::try_from(window.as_millis()).unwrap_or(i64::MAX);
        self.lines.iter().rev().take_while(|line| line.last >= from).any(|line| reasons.contains(&line.reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_repeats_is_one_line_and_old_lines_go() {
        let mut troubles = Troubles::default();
        for nth in 0..KEPT + 5 {
            troubles.add(None, "read", "connection", &format!("no. {nth}"));
            troubles.add(Some("r"), "write", "refused", "always the same");
        }
        let recent = troubles.recent();
        assert_eq!(recent.len(), KEPT);
        assert_eq!((recent[0].count, recent[0].rule.as_deref()), (55, Some("r")));
        assert!(troubles.met(&["refused"], Duration::from_secs(5)));
        assert!(!troubles.met(&["privilege"], Duration::from_secs(5)));
    }
}
