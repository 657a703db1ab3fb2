//! One batch of keys: read the sources, compute what the targets should hold, write it.

pub mod applied;
pub mod batch;
pub mod by_difference;
pub mod by_target;
pub mod compare;
pub mod context;
pub mod create;
pub mod find;
pub mod group;
pub mod guard;
mod isolate;
mod keep;
pub mod memory;
mod of_target;
pub mod places;
pub mod read;
mod removal_limit;
pub mod run;
pub mod scan;
pub mod shape;
mod share;
mod slow;
pub mod statement;
pub mod tree;
pub mod value;
mod write;

pub use context::Context;
pub use run::{Outcome, run};

/// Target of the spans of batches and their stages: for a collector, not for the log.
pub const STAGES: &str = "denormd::stages";
