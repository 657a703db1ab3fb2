//! Pauses that save the server work, at the cost of lag: how long a stream is not polled, how long work waits to be
//! merged, and how far apart the recomputations of one key are. Measurements: docs/lab-notebook.md.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Backlog, in changed keys and targets of fan-out jobs, above which the server is not asked for more at once. A
/// request that waits for an event is woken by every oplog entry, our own writes included: 7 µs an entry, half of it in
/// the thread that makes entries visible (MongoDB 6.0.5; docs/lab-notebook.md). A later request passes them all at once,
/// and does not wait.
const BACKLOG: usize = 500;
/// The delay of that request: changes of other rules, and of the rules that this one feeds, wait as long.
const PAUSE: Duration = Duration::from_millis(15);
/// Interval between checks of the backlog.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time that the server waits for an event before it answers with an empty batch. An empty batch carries a token as
/// well: it tells how far the stream is when only our own writes, which are not sent, have moved the oplog.
const AWAIT: Duration = Duration::from_millis(100);
/// The same while there is a backlog.
const AWAIT_BRIEFLY: Duration = Duration::from_millis(1);
/// Time without an answer after which a stream is late: half as long again as an idle stream takes ([`AWAIT`]).
const LATE_STREAM: Duration = Duration::from_millis(150);
/// Time without an answer after which a stream does not work at all. Fewer batches would not help it.
const SILENT: Duration = Duration::from_secs(5);
/// Divisor of the number of concurrent batches while a stream is late. In the stream, the changes of other rules come
/// after those of the backlog, and on a server with two cores three batches leave the stream a third of one.
const ONE_OF: usize = 3;
/// Delay of work that shrinks by waiting, while a stream is known to hold more. After the delay, one batch of it runs
/// at a time, so that the server's remaining capacity is free for the stream.
const COALESCING_DELAY: Duration = Duration::from_secs(1);
/// Recomputing one key is only spaced out if it takes longer than this.
const CHEAP: Duration = Duration::from_millis(20);
/// The longest pause between two recomputes of one key.
const LONGEST: Duration = Duration::from_secs(30);

/// The way in which events are requested: by requests that wait on the server, or, during a backlog, by requests that
/// hardly wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Polling {
    has_backlog: bool,
}

impl Polling {
    /// The way to request events with this backlog.
    #[must_use]
    pub fn of(backlog: usize) -> Self {
        Self { has_backlog: backlog > BACKLOG }
    }

    /// Time that a request waits on the server.
    #[must_use]
    pub fn wait(self) -> Duration {
        if self.has_backlog { AWAIT_BRIEFLY } else { AWAIT }
    }

    /// Waits while the backlog is large, but not for long. Returns the way to request events from then on.
    pub async fn pause(backlog: impl Fn() -> usize) -> Self {
        let until = Instant::now() + PAUSE;
        while backlog() > BACKLOG && Instant::now() < until {
            sleep(POLL_INTERVAL).await;
        }
        Self::of(backlog())
    }
}

/// Number of batches that run at once, `most` of them unless a stream is late. `more` tells that a stream is known to hold
/// more, and `silent` has the time since the last answer of each stream. Without `room` in the queue, no stream is read.
#[must_use]
pub fn batches(most: usize, room: bool, more: bool, mut silent: impl Iterator<Item = Duration>) -> usize {
    let is_late = |silent: Duration| silent > LATE_STREAM && silent < SILENT;
    if room && (more || silent.any(is_late)) { most.div_ceil(ONE_OF) } else { most }
}

/// The deferral of work that shrinks by waiting. While a backlog is read, such work would be repeated with every batch
/// of it. So it waits, what waits then runs once, and all that has come meanwhile waits again.
#[derive(Debug, Default)]
pub struct Deferral {
    since: Option<Instant>,
    /// Number of keys that have waited long enough and have not been taken yet.
    due: usize,
}

impl Deferral {
    /// True if such work should wait now. `more` tells that a stream is known to hold more, `runs` that a batch of such
    /// work runs, and `waiting` has the number of keys that wait.
    pub fn defers(&mut self, now: Instant, more: bool, runs: bool, waiting: impl FnOnce() -> usize) -> bool {
        if !more {
            *self = Self::default();
            return false;
        }
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) < COALESCING_DELAY || runs {
            return true;
        }
        let waiting = waiting();
        if self.due == 0 {
            self.due = waiting;
        }
        if waiting == 0 {
            *self = Self { since: Some(now), due: 0 };
        }
        false
    }

    /// Records that keys of such work were taken.
    pub fn took(&mut self, now: Instant, keys: usize) {
        if self.due > 0 {
            self.due = self.due.saturating_sub(keys);
            if self.due == 0 {
                self.since = Some(now);
            }
        }
    }
}

/// Pause before the keys of a batch may be recomputed again: the recomputation of a parent with a million children is
/// spaced out by its own cost instead of repeated for each event.
#[must_use]
pub fn spacing(took: Duration, keys: usize) -> Duration {
    let cost = took / u32::try_from(keys.max(1)).unwrap_or(u32::MAX);
    if cost > CHEAP { cost.min(LONGEST) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_pauses_briefly_while_there_is_a_backlog() {
        let begun = Instant::now();
        let pauses = async |backlog: &dyn Fn() -> usize, expected: Duration, then: Duration| {
            let before = begun.elapsed();
            let polling = Polling::pause(backlog).await;
            let paused = begun.elapsed().saturating_sub(before);
            assert!(paused >= expected && paused < expected + POLL_INTERVAL, "{paused:?}, not {expected:?}");
            assert_eq!(polling.wait(), then);
        };
        pauses(&|| BACKLOG, Duration::ZERO, AWAIT).await;
        pauses(&|| BACKLOG + 1, PAUSE, AWAIT_BRIEFLY).await;
        let checks = Cell::new(0);
        let shrinks = || {
            checks.set(checks.get() + 1);
            if checks.get() < 4 { usize::MAX } else { 0 }
        };
        pauses(&shrinks, POLL_INTERVAL * 3, AWAIT).await;
    }

    #[test]
    fn few_batches_run_beside_a_stream_that_is_late() {
        let beside = |most, room, more, silent| batches(most, room, more, [Duration::ZERO, silent].into_iter());
        assert_eq!(beside(3, true, false, LATE_STREAM), 3);
        assert_eq!(beside(3, true, false, LATE_STREAM * 2), 1);
        assert_eq!(beside(4, true, true, Duration::ZERO), 2);
        assert_eq!(beside(3, false, true, LATE_STREAM * 2), 3, "the streams wait for the batches");
        assert_eq!(beside(3, true, false, SILENT), 3);
    }

    #[test]
    fn work_is_deferred_until_its_patience_ends_and_while_a_batch_of_it_runs() {
        let (start, mut deferral) = (Instant::now(), Deferral::default());
        let mut defers = |millis, more, runs, waits| {
            deferral.defers(start + Duration::from_millis(millis), more, runs, || usize::from(waits))
        };
        assert!(!defers(0, false, false, true), "no stream holds more");
        assert!(defers(0, true, false, true));
        assert!(defers(999, true, false, true));
        assert!(!defers(1000, true, false, true));
        assert!(defers(1500, true, true, true), "one batch at a time");
        assert!(!defers(1600, true, false, false), "nothing is left: the next wait begins");
        assert!(defers(2599, true, false, true));
        assert!(!defers(2600, true, false, true));
    }

    /// Keys that came back without end made one run of it last as long as the backlog, which wrote each target again and again.
    #[test]
    fn what_comes_while_work_runs_waits_for_the_next_run() {
        let (start, mut deferral) = (Instant::now(), Deferral::default());
        let at = |millis| start + Duration::from_millis(millis);
        assert!(deferral.defers(at(0), true, false, || 1500));
        assert!(!deferral.defers(at(1000), true, false, || 1500));
        deferral.took(at(1000), 1000);
        assert!(!deferral.defers(at(1100), true, false, || 1400));
        deferral.took(at(1100), 1000);
        assert!(deferral.defers(at(1200), true, false, || 1300), "the 1500 have run");
        assert!(!deferral.defers(at(2100), true, false, || 1300));
        deferral.took(at(2100), 1000);
        assert!(!deferral.defers(at(2200), false, false, || 1300), "no stream holds more");
        deferral.took(at(2200), 1000);
        assert!(deferral.defers(at(2300), true, false, || 300), "the next backlog begins");
    }

    #[test]
    fn recomputations_are_spaced_out_by_what_they_cost() {
        assert_eq!(spacing(CHEAP, 1), Duration::ZERO);
        assert_eq!(spacing(CHEAP * 3, 2), CHEAP * 3 / 2);
        assert_eq!(spacing(LONGEST * 2, 1), LONGEST);
        assert_eq!(spacing(Duration::ZERO, 0), Duration::ZERO);
    }
}
