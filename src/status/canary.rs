//! The canary: a write of our own, every ten seconds, whose way through the oplog is watched. Pure.
//!
//! A lag of zero is what an idle daemon says, and what one that hears nothing would say. The canary tells them apart. It is
//! one document in the state database; nothing is written to a target. It has come through when every stream has passed its
//! place in the oplog, and everything before that place is applied: then the server takes our writes, a majority has them,
//! the streams read on, and the pipeline turns.

use std::collections::VecDeque;

use crate::position::ClusterTime;

/// Canaries under way that are remembered.
const KEPT: usize = 360;

/// The canaries of one leadership.
#[derive(Debug)]
pub struct Canary {
    /// Those under way, oldest first: their places in the oplog, and when they were sent (milliseconds since 1970).
    flying: VecDeque<(ClusterTime, i64)>,
    /// When the newest one that has come through was sent; at first, when this leadership began.
    through: i64,
}

impl Canary {
    /// Nothing has been sent yet.
    #[must_use]
    pub fn new(now: i64) -> Self {
        Self { flying: VecDeque::new(), through: now }
    }

    /// One was written at this place of the oplog, and was sent at `at`.
    pub fn sent(&mut self, place: ClusterTime, at: i64) {
        self.flying.push_back((place, at));
        // Of many under way, the oldest is the one that will not tell anything new.
        if self.flying.len() > KEPT {
            self.flying.pop_front();
        }
    }

    /// Everything up to here is applied, by every stream.
    pub fn applied(&mut self, applied: ClusterTime) {
        while let Some((_, at)) = self.flying.front().copied().filter(|(place, _)| *place <= applied) {
            self.flying.pop_front();
            self.through = self.through.max(at);
        }
    }

    /// How long ago, in milliseconds, the newest one that has come through was sent.
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
