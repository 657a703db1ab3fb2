//! The progress of a long command: a bar with rate and remaining time on a terminal, otherwise a plain line from time
//! to time.
//!
//! It is written to standard error, so that standard output contains only results.

use std::{io::IsTerminal, time::Duration};

use crate::commands::notice;
use denormd_model::{distribution::ratio, text::duration};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tokio::time::Instant;

/// Interval between plain lines.
const EVERY: Duration = Duration::from_secs(5);
const COUNTED: &str = "{prefix} [{wide_bar}] {percent}% of {human_len}, {rate}, {eta} to go";
const UNCOUNTED: &str = "{prefix} {spinner} {human_pos} done, {rate}";

/// The progress of one piece of work.
#[derive(Debug)]
pub struct Progress {
    name: String,
    form: Form,
    /// The time and value of the first count, from which the rate is computed: resumed work does not start at zero.
    first: Option<(Instant, u64)>,
}

#[derive(Debug)]
enum Form {
    Bar(ProgressBar),
    Lines { said: Instant },
}

impl Progress {
    /// The progress of the work called `name`: a bar if standard error is a terminal.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let form = if std::io::stderr().is_terminal() {
            let bar = ProgressBar::no_length().with_prefix(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            Form::Bar(bar)
        } else {
            Form::Lines { said: Instant::now() }
        };
        Self { name: name.to_owned(), form, first: None }
    }

    /// Sets the number of finished items, and their total if known.
    pub fn set(&mut self, done: u64, total: Option<u64>) {
        let first = match self.first {
            // A smaller count means that the work has restarted.
            Some(first) if first.1 <= done => first,
            _ => {
                let now = (Instant::now(), done);
                self.first = Some(now);
                if let Form::Bar(bar) = &self.form {
                    bar.set_position(done);
                    bar.reset_eta();
                }
                now
            }
        };
        match &mut self.form {
            Form::Bar(bar) => {
                // A test checks that these templates are valid.
                if let Ok(style) = ProgressStyle::with_template(if total.is_some() { COUNTED } else { UNCOUNTED }) {
                    bar.set_style(style.with_key("rate", rate));
                }
                total.map_or_else(|| bar.unset_length(), |total| bar.set_length(total.max(done)));
                bar.set_position(done);
            }
            Form::Lines { said } if said.elapsed() >= EVERY => {
                *said = Instant::now();
                notice(&line(&self.name, done, total, per_second(first.1, done, first.0.elapsed())));
            }
            Form::Lines { .. } => {}
        }
    }

    /// Prints results while the bar is off the screen: standard output may be the same terminal.
    pub fn beside(&self, print: impl FnOnce()) {
        match &self.form {
            Form::Bar(bar) => bar.suspend(print),
            Form::Lines { .. } => print(),
        }
    }

    /// Ends the progress and removes the bar. The caller prints the outcome.
    pub fn end(self) {
        if let Form::Bar(bar) = self.form {
            bar.finish_and_clear();
        }
    }
}

/// Formats the rate as a whole number, which indicatif does not.
fn rate(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    write!(out, "{:.0}/s", state.per_sec()).ok();
}

fn per_second(from: u64, to: u64, elapsed: Duration) -> f64 {
    ratio(to.saturating_sub(from), 1) / elapsed.as_secs_f64().max(0.001)
}

/// Formats a plain line: `part-names: 12000 of 50000 (24%), 3000/s, 13 s to go`.
fn line(name: &str, done: u64, total: Option<u64>, per_second: f64) -> String {
    let Some(total) = total.filter(|total| *total > 0) else {
        return format!("{name}: {done} done, {per_second:.0}/s");
    };
    let share = done.min(total) * 100 / total;
    let left = total.saturating_sub(done);
    let eta = (per_second > 0.0 && left > 0).then(|| format!(", {} to go", duration(ratio(left, 1) / per_second)));
    format!("{name}: {done} of {total} ({share}%), {per_second:.0}/s{}", eta.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_the_share_the_rate_and_the_time_to_go() {
        let cases = [
            ((0, None, 0.0), "r: 0 done, 0/s"),
            ((1200, None, 400.0), "r: 1200 done, 400/s"),
            ((0, Some(50_000), 0.0), "r: 0 of 50000 (0%), 0/s"),
            ((12_000, Some(50_000), 3000.0), "r: 12000 of 50000 (24%), 3000/s, 13 s to go"),
            // More items were found than expected.
            ((600, Some(500), 100.0), "r: 600 of 500 (100%), 100/s"),
            ((0, Some(0), 0.0), "r: 0 done, 0/s"),
        ];
        for ((done, total, rate), text) in cases {
            assert_eq!(line("r", done, total, rate), text);
        }
    }

    #[test]
    fn work_that_goes_on_after_a_restart_is_not_taken_for_fast() {
        assert!((per_second(40_000, 41_000, Duration::from_secs(10)) - 100.0).abs() < 0.001);
        assert!(per_second(5, 0, Duration::ZERO).abs() < 0.001, "a count that goes back");
    }

    #[test]
    fn the_templates_are_well_formed() {
        for template in [COUNTED, UNCOUNTED] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
