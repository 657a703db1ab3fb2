//! How the server is asked for the next batch: a request that waits for an event, or one every few milliseconds. Pure.
//!
//! A waiting request is woken by every entry of the oplog, our own writes included, to find that most are not for it. While
//! many are written that costs the server up to 7 µs an entry, half of it in the thread that makes entries visible (MongoDB
//! 6.0.5; docs/performance.md). Asked in turns, it passes them at once.

use std::time::{Duration, Instant};

use crate::position::ClusterTime;

/// Between two requests of a busy server.
const TURN: Duration = Duration::from_millis(5);
/// Entries a second from which on a server is busy.
const BUSY: f64 = 3000.0;
/// And below which it is calm again.
const CALM: f64 = 1000.0;
/// How long entries are counted.
const WINDOW: Duration = Duration::from_millis(250);

/// Counts the entries of the oplog by the stream's positions: a cluster time counts those of its second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    busy: bool,
    since: Instant,
    from: ClusterTime,
}

impl Pace {
    /// Calm, until it is known better.
    pub(super) fn new(from: ClusterTime, now: Instant) -> Self {
        Self { busy: false, since: now, from }
    }

    /// How long the server waits for an event before it answers with an empty batch.
    pub(super) fn wait(self, longest: Duration) -> Duration {
        if self.busy { Duration::from_millis(1) } else { longest }
    }

    /// How long to wait before the next request, when all that there was has come.
    pub(super) fn pause(self) -> Option<Duration> {
        self.busy.then_some(TURN)
    }

    /// The stream has come to `at`. Whether that changes the pace.
    pub(super) fn reached(&mut self, at: ClusterTime, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed < WINDOW {
            return false;
        }
        let from = std::mem::replace(&mut self.from, at);
        self.since = now;
        // Counting begins anew with each second.
        if at.seconds != from.seconds {
            return false;
        }
        let rate = f64::from(at.increment.saturating_sub(from.increment)) / elapsed.as_secs_f64();
        let busy = if self.busy { rate > CALM } else { rate > BUSY };
        std::mem::replace(&mut self.busy, busy) != busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it is busy after a second of so many entries.
    fn after_a_second(pace: &mut Pace, entries: u32) -> bool {
        let (start, first) = (pace.since, ClusterTime { seconds: pace.from.seconds + 1, increment: 1 });
        for quarter in 0..4_u32 {
            let at = ClusterTime { increment: first.increment + entries * quarter / 3, ..first };
            pace.reached(at, start + Duration::from_millis(250) * (quarter + 1));
        }
        pace.busy
    }

    #[test]
    fn a_busy_server_is_asked_in_turns_until_it_is_calm() {
        let mut pace = Pace::new(ClusterTime { seconds: 7, increment: 900 }, Instant::now());
        assert!(!after_a_second(&mut pace, 100));
        assert_eq!((pace.wait(Duration::from_millis(100)), pace.pause()), (Duration::from_millis(100), None));
        assert!(after_a_second(&mut pace, 20_000));
        assert_eq!((pace.wait(Duration::from_millis(100)), pace.pause()), (Duration::from_millis(1), Some(TURN)));
        assert!(after_a_second(&mut pace, 2_000), "between the two bounds nothing changes");
        assert!(!after_a_second(&mut pace, 100));
        assert!(!after_a_second(&mut pace, 2_000));
    }
}
