//! Jobs beside the stream. They send requests to the same work queue, or compare, or remove retired fields, or put back kept
//! values.

pub mod audit;
pub mod backfill;
pub mod check;
pub mod fan_out;
pub mod mailbox;
pub mod prune;
pub mod undo;

/// A job's report to the pipeline.
#[derive(Debug)]
pub enum Report {
    /// The backfill is done.
    Backfilled(backfill::BackfillRequest),
    /// The fan-out job is done.
    FannedOut(crate::checkpoint::fan_out::FanOut),
    /// A read for the rule lacks a privilege, with the server's message. The job ends once that is recorded.
    Refused(denormd_rules::plan::RuleId, String),
}
