//! The bounds of a leader's writes: the server checks them by its own clock, and this is the known state of that clock.
//!
//! Architecture invariant: a leader's command starts before its deadline and has ended when its lease ends. So a
//! successor that waits for the end of the lease writes after everything that its predecessor ever sent.
//!
//! The next primary's clock may be behind, and an expired lease would be valid again there. So a lease has a second
//! end, by the cluster time, which never goes back on a later primary. A successor takes over with a write whose
//! cluster time is past that end; from then on no primary runs a command of its predecessor.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::{Error, Kind, Result};
use denormd_model::clock::millis;

/// Nothing is sent when less than this remains of the lease, in milliseconds.
const LEAST: i64 = 200;
/// Time that a server may need to notice that a command has exceeded its limit.
const NOTICE: Duration = Duration::from_millis(500);

/// The end of a lease, in milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// By the server's clock.
    pub server: i64,
    /// By the cluster time, or by the server's clock if that is later.
    pub cluster: i64,
}

/// One leadership: its term, and the end of its lease.
#[derive(Debug)]
pub struct Fence {
    term: i64,
    /// The end of the lease, and the time of its grant or last renewal.
    lease: Mutex<(End, Instant)>,
    superseded: AtomicBool,
    /// Time after which writes whose wait was cancelled can no longer run.
    abandoned: Mutex<Option<Instant>>,
}

/// A write that was sent. If the wait for its answer is cancelled, its fence remembers until when it may still run.
#[derive(Debug)]
pub struct Sent<'a> {
    fence: Option<&'a Fence>,
    over: Instant,
}

impl Sent<'_> {
    /// The write was answered or waited out.
    pub fn ended(mut self) {
        self.fence = None;
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if let Some(fence) = self.fence {
            let mut abandoned = fence.abandoned.lock();
            *abandoned = (*abandoned).max(Some(self.over));
        }
    }
}

impl Fence {
    /// A leadership of this term until `end`.
    #[must_use]
    pub fn new(term: i64, end: End) -> Self {
        let lease = Mutex::new((end, Instant::now()));
        Self { term, lease, superseded: AtomicBool::new(false), abandoned: Mutex::default() }
    }

    /// Term of the leadership, which grows with every take-over.
    #[must_use]
    pub fn term(&self) -> i64 {
        self.term
    }

    /// Sets the end of the lease after a renewal that a majority acknowledged. It may be earlier than the last one, which was set by a
    /// primary whose clock was ahead: a successor goes by the document, and does not know that one.
    pub fn extend(&self, end: End) {
        let mut lease = self.lease.lock();
        let known = lease.0.cluster;
        // The previous end is not kept if the cluster time could not provide it.
        let cluster = if known == i64::MAX { end.cluster } else { known.max(end.cluster) };
        *lease = (End { cluster, ..end }, Instant::now());
    }

    /// Time since the lease was granted or renewed.
    #[must_use]
    pub fn since_renewal(&self) -> Duration {
        self.lease.lock().1.elapsed()
    }

    /// Ends the leadership: the state has the mark of a later one.
    pub fn supersede(&self) {
        self.superseded.store(true, Ordering::SeqCst);
    }

    /// True if the state has the mark of a later leadership: the lease is no longer renewed.
    #[must_use]
    pub fn is_superseded(&self) -> bool {
        self.superseded.load(Ordering::SeqCst)
    }

    /// Waits until writes whose wait was cancelled can no longer run.
    pub async fn abandoned_writes_are_over(&self) {
        let abandoned = *self.abandoned.lock();
        if let Some(over) = abandoned {
            tokio::time::sleep_until(over).await;
        }
    }

    fn end(&self) -> i64 {
        self.lease.lock().0.server
    }

    /// The first second of the cluster time in which no command may run.
    fn cluster_end(&self) -> u32 {
        let end = self.lease.lock().0.cluster;
        u32::try_from(end / 1000 + i64::from(end % 1000 != 0)).unwrap_or(u32::MAX)
    }
}

/// The time in which a write may run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// The write must start before this time of the server's clock, in milliseconds since 1970.
    pub deadline: i64,
    /// It must also start before this second of the cluster time.
    pub cluster_end: u32,
    /// Time limit once it has started.
    pub run: Duration,
    /// After this moment it can no longer run, whatever happened to it.
    pub over: Instant,
}

impl Window {
    /// The window of a command that is sent at `sent`, when the server's clock shows `now` or later. Half of the
    /// remaining lease is for starting and half for running.
    pub fn new(fence: Option<&Fence>, now: i64, timeout: Duration, sent: Instant) -> Result<Self> {
        let mut timeout = millis(timeout);
        if let Some(fence) = fence {
            let left = fence.end() - now;
            if left < LEAST {
                return Err(Error::new(Kind::Unavailable, "the lease has run out"));
            }
            timeout = timeout.min(left / 2);
        }
        let run = Duration::from_millis(timeout.unsigned_abs());
        let over = sent + run.saturating_mul(2) + NOTICE;
        let cluster_end = fence.map_or(u32::MAX, Fence::cluster_end);
        Ok(Self { deadline: now.saturating_add(timeout), cluster_end, run, over })
    }

    /// A write of this window that is about to be sent.
    #[must_use]
    pub fn sent<'a>(&self, fence: Option<&'a Fence>) -> Sent<'a> {
        Sent { fence, over: self.over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(end: i64) -> End {
        End { server: end, cluster: end }
    }

    #[test]
    fn a_write_is_over_when_the_lease_ends() {
        let sent = Instant::now();
        for (left, timeout) in [(10_000, 5), (6_700, 5), (300, 5), (200, 60), (86_400_000, 5)] {
            let fence = Fence::new(1, at(1_000_000 + left));
            let window = Window::new(Some(&fence), 1_000_000, Duration::from_secs(timeout), sent).unwrap();
            let run = i64::try_from(window.run.as_millis()).unwrap();
            assert!(window.deadline + run <= fence.end(), "{window:?}");
            assert!(window.run <= Duration::from_secs(timeout));
            assert!(window.over >= sent + 2 * window.run);
        }
        let fence = Fence::new(1, at(1_000_100));
        assert!(Window::new(Some(&fence), 1_000_000, Duration::from_secs(5), sent).is_err());
        fence.extend(at(1_000_500));
        assert!(Window::new(Some(&fence), 1_000_000, Duration::from_secs(5), sent).is_ok());
    }

    /// The next leader would begin while the write may still run.
    #[test]
    fn a_write_whose_wait_was_cancelled_may_still_run() {
        let fence = Fence::new(1, at(1_010_000));
        let window =
            |seconds| Window::new(Some(&fence), 1_000_000, Duration::from_secs(seconds), Instant::now()).unwrap();
        window(2).sent(Some(&fence)).ended();
        assert_eq!(*fence.abandoned.lock(), None);
        let last = window(3);
        drop(last.sent(Some(&fence)));
        drop(window(1).sent(Some(&fence)));
        assert_eq!(*fence.abandoned.lock(), Some(last.over));
    }

    /// A leader of release 0.1 that was frozen wrote under the end that a primary with a fast clock had set, although another one had
    /// taken over by the document.
    #[test]
    fn the_last_end_counts_not_the_latest() {
        let fence = Fence::new(1, at(1_020_000));
        fence.extend(at(1_003_000));
        assert!(Window::new(Some(&fence), 1_004_000, Duration::from_secs(5), Instant::now()).is_err());
    }
}
