//! The low watermark of each stream. Pure.
//!
//! Architecture invariant: a position is returned only when no batch up to it has work in the queue.

use std::collections::BTreeMap;

use denormd_model::position::Position;

/// The low watermarks of several streams.
#[derive(Debug, Default)]
pub struct Watermark {
    streams: BTreeMap<usize, Stream>,
}

#[derive(Debug, Default)]
struct Stream {
    /// Batches with pending work, with the number of their pending keys.
    held: BTreeMap<u64, usize>,
    /// Fully routed batches, with the position after each. Of a run of finished batches, only the last one before an
    /// unfinished batch is kept, so there are no more of them than unfinished batches.
    routed: BTreeMap<u64, Position>,
    /// The position after the last batch that is finished along with all earlier ones.
    frontier: Option<Position>,
}

impl Watermark {
    /// Records that a key has pending work of `batch`.
    pub fn hold(&mut self, stream: usize, batch: u64) {
        *self.streams.entry(stream).or_default().held.entry(batch).or_default() += 1;
    }

    /// Records that a key's work of `batch` is done.
    pub fn release(&mut self, stream: usize, batch: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if let Some(count) = state.held.get_mut(&batch) {
            *count -= 1;
            if *count == 0 {
                state.held.remove(&batch);
                state.join(batch);
            }
        }
        state.advance();
        // A finished page of a backfill has no position.
        if state.held.is_empty() && state.routed.is_empty() && state.frontier.is_none() {
            self.streams.remove(&stream);
        }
    }

    /// Records that all of `batch` has been routed; `position` is the position after it. Batches are routed in order.
    pub fn routed(&mut self, stream: usize, batch: u64, position: Position) {
        let state = self.streams.entry(stream).or_default();
        debug_assert!(
            state.routed.last_key_value().is_none_or(|(last, _)| *last < batch),
            "batches are routed in order"
        );
        state.routed.insert(batch, position);
        state.join(batch);
        state.advance();
    }

    /// The position up to which all work of `stream` is done.
    #[must_use]
    pub fn frontier(&self, stream: usize) -> Option<&Position> {
        self.streams.get(&stream)?.frontier.as_ref()
    }

    /// True if `stream` has no pending work.
    #[must_use]
    pub fn is_drained(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(|state| state.held.is_empty())
    }
}

impl Stream {
    fn advance(&mut self) {
        let oldest = self.held.first_key_value().map_or(u64::MAX, |(batch, _)| *batch);
        while let Some(first) = self.routed.first_entry().filter(|first| *first.key() < oldest) {
            self.frontier = Some(first.remove());
        }
    }

    /// Deletes the position before `batch` if no work is pending between that position and the next one: the low
    /// watermark passes both at once. New work is recorded only for a batch that is being routed or that has pending
    /// work, so no more can be added between them.
    fn join(&mut self, batch: u64) {
        let before = self.routed.range(..batch).next_back().map(|(before, _)| *before);
        let next = self.routed.range(batch..).next().map(|(next, _)| *next);
        if let (Some(before), Some(next)) = (before, next)
            && self.held.range(before + 1..=next).next().is_none()
        {
            self.routed.remove(&before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denormd_model::position::ClusterTime;

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

    /// While a slow key delayed the position, each later batch added another position.
    #[test]
    fn positions_that_wait_are_as_many_as_batches_that_are_not_done() {
        let mut w = Watermark::default();
        let routed = |w: &Watermark| w.streams[&0].routed.len();
        w.hold(0, 1);
        w.routed(0, 1, position(1));
        for batch in 2..=1000 {
            w.hold(0, batch.into());
            w.routed(0, batch.into(), position(batch));
            if batch != 500 {
                w.release(0, batch.into());
            }
        }
        assert!(routed(&w) <= 4, "{}", routed(&w));
        w.release(0, 1);
        assert_eq!(frontier(&w), Some(499), "the last one before a batch that is not done");
        w.release(0, 500);
        assert_eq!(frontier(&w), Some(1000));
        assert_eq!(routed(&w), 0);
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
        assert!(!w.is_drained(0));
    }
}
