//! The low watermark of each stream. Pure.
//!
//! Architecture invariant: a position is only handed out when every batch up to it has nothing left in the work queue.

use std::collections::{BTreeMap, VecDeque};

use crate::position::Position;

/// The low watermarks of several streams.
#[derive(Debug, Default)]
pub struct Watermark {
    streams: BTreeMap<usize, Stream>,
}

#[derive(Debug, Default)]
struct Stream {
    /// Batches that work is held for, and by how many keys.
    held: BTreeMap<u64, usize>,
    /// Batches that were routed whole, with the position after each, oldest first.
    routed: VecDeque<(u64, Position)>,
    /// The position after the last batch that is done with all before it.
    frontier: Option<Position>,
}

impl Watermark {
    /// Work of `batch` waits.
    pub fn hold(&mut self, stream: usize, batch: u64) {
        *self.streams.entry(stream).or_default().held.entry(batch).or_default() += 1;
    }

    /// Work of `batch` is done.
    pub fn release(&mut self, stream: usize, batch: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(count) = state.held.get_mut(&batch) {
            *count -= 1;
            if *count == 0 {
                state.held.remove(&batch);
            }
        }
        state.advance();
    }

    /// All of `batch` has been routed; `position` is the place after it. Batches are routed in order.
    pub fn routed(&mut self, stream: usize, batch: u64, position: Position) {
        let state = self.streams.entry(stream).or_default();
        debug_assert!(state.routed.back().is_none_or(|(last, _)| *last < batch), "batches are routed in order");
        state.routed.push_back((batch, position));
        state.advance();
    }

    /// The position up to which everything of `stream` is done.
    #[must_use]
    pub fn frontier(&self, stream: usize) -> Option<&Position> {
        self.streams.get(&stream)?.frontier.as_ref()
    }

    /// Whether nothing of `stream` waits.
    #[must_use]
    pub fn is_drained(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(|state| state.held.is_empty())
    }

    /// Whether nothing of `batch` or older waits.
    #[must_use]
    pub fn is_done(&self, stream: usize, batch: u64) -> bool {
        self.streams
            .get(&stream)
            .and_then(|state| state.held.first_key_value())
            .is_none_or(|(oldest, _)| *oldest > batch)
    }
}

impl Stream {
    fn advance(&mut self) {
        let oldest = self.held.first_key_value().map_or(u64::MAX, |(batch, _)| *batch);
        while self.routed.front().is_some_and(|(batch, _)| *batch < oldest) {
            self.frontier = self.routed.pop_front().map(|(_, position)| position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::ClusterTime;

    fn position(seconds: u32) -> Position {
        Position { time: ClusterTime { seconds, increment: 1 }, token: None }
    }

    fn frontier(watermark: &Watermark) -> Option<u32> {
        watermark.frontier(0).map(|p| p.time.seconds)
    }

    #[test]
    fn a_position_waits_for_all_work_before_it() {
        let mut w = Watermark::default();
        w.hold(0, 1);
        w.hold(0, 1);
        w.routed(0, 1, position(1));
        w.hold(0, 2);
        w.routed(0, 2, position(2));
        assert_eq!(frontier(&w), None);
        w.release(0, 2);
        assert_eq!(frontier(&w), None, "batch 1 still waits");
        w.release(0, 1);
        assert_eq!(frontier(&w), None, "one key of batch 1 still waits");
        w.release(0, 1);
        assert_eq!(frontier(&w), Some(2));
        assert!(w.is_drained(0));
    }

    #[test]
    fn a_batch_that_asks_for_nothing_moves_on_at_once() {
        let mut w = Watermark::default();
        w.routed(0, 1, position(1));
        assert_eq!(frontier(&w), Some(1));
        w.hold(0, 2);
        w.routed(0, 2, position(2));
        w.routed(0, 3, position(3));
        assert_eq!(frontier(&w), Some(1));
        assert!(w.is_done(0, 1) && !w.is_done(0, 2));
    }
}
