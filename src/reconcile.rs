//! One batch of keys: read the sources, compute what the targets should hold, write it.

pub mod applied;
pub mod compare;
pub mod group;
pub mod read;
pub mod run;
pub mod scan;
pub mod shape;
pub mod statement;
pub mod value;

pub use run::{Context, Outcome, run};
