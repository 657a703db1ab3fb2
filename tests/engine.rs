//! The stages of the engine and its jobs: reads, queue, backfill, fan-outs, audit, state, safety.

pub mod acknowledged;
pub mod adoption;
pub mod backlogs;
pub mod fan_outs;
pub mod golden;
pub mod large_arrays;
pub mod lifecycle;
pub mod memory;
pub mod prune;
pub mod reads;
pub mod refused;
pub mod relevance;
pub mod removal_limit;
pub mod simulation;
pub mod slow_reads;
pub mod throttle;
pub mod unavailable;
pub mod undo;
pub mod upgrade;
pub mod verification;
