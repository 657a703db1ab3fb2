//! Jobs beside the stream. They send requests to the same work queue, or compare, or remove retired fields, or put back kept
//! values.

pub mod audit;
pub mod backfill;
pub mod check;
pub mod fan_out;
pub mod prune;
pub mod undo;
