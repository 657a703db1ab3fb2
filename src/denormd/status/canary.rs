//! The canary: a write by denormd itself, every ten seconds, that is followed through the oplog. Pure.
//!
//! An idle daemon reports a lag of zero, and so would one that receives no events. The canary distinguishes the two. It
//! is one document in the state database; nothing is written to a target. It has arrived when every stream has passed
//! its place in the oplog, and everything before that place is applied: then the server accepts denormd's writes, a
//! majority has them, the streams deliver events, and the pipeline makes progress.

use std::collections::VecDeque;

use denormd_model::position::ClusterTime;

/// Most canaries in flight that are remembered.
const KEPT: usize = 360;

/// The canaries of one term of leadership.
#[derive(Debug)]
pub struct Canary {
    /// The canaries in flight, oldest first: their places in the oplog, and their send times (milliseconds since 1970).
    flying: VecDeque<(ClusterTime, i64)>,
    /// Send time of the newest canary that has arrived; at first, the beginning of this leadership.
    through: i64,
}

impl Canary {
    /// Starts without a canary in flight.
    #[must_use]
    pub fn new(now: i64) -> Self {
        Self { flying: VecDeque::new(), through: now }
    }

    /// Records a canary that was sent at `at` and written at this place of the oplog.
    pub fn sent(&mut self, place: ClusterTime, at: i64) {
        self.flying.push_back((place, at));
        // With many in flight, the oldest one adds no information.
        if self.flying.len() > KEPT {
            self.flying.pop_front();
        }
    }

    /// Records that every stream has applied everything up to this time.
    pub fn applied(&mut self, applied: ClusterTime) {
        while let Some((_, at)) = self.flying.front().copied().filter(|(place, _)| *place <= applied) {
            self.flying.pop_front();
            self.through = self.through.max(at);
        }
    }

    /// Time since the newest canary that has arrived was sent, in milliseconds.
    #[must_use]
    pub fn age(&self, now: i64) -> i64 {
        (now - self.through).max(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(seconds: u32) -> ClusterTime {
        ClusterTime { seconds, increment: 1 }
    }

    #[test]
    fn age_grows_until_the_place_of_one_is_passed() {
        let mut canary = Canary::new(0);
        canary.sent(place(10), 10_000);
        canary.sent(place(20), 20_000);
        canary.applied(place(9));
        assert_eq!(canary.age(25_000), 25_000, "none has come through");
        canary.applied(place(10));
        assert_eq!(canary.age(25_000), 15_000);
        canary.applied(place(30));
        assert_eq!(canary.age(25_000), 5_000);
        assert_eq!(canary.age(95_000), 75_000, "nothing is sent any more");
    }

    #[test]
    fn those_under_way_are_bounded() {
        let mut canary = Canary::new(0);
        for second in 0..10_000 {
            canary.sent(place(second), i64::from(second) * 1000);
        }
        assert_eq!(canary.flying.len(), KEPT);
        canary.applied(place(10_000));
        assert_eq!(canary.age(9_999_000), 0);
    }
}
