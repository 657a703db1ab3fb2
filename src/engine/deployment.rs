//! The instances of a deployment: which of them leads, which of them exist, and how they share the keys.

pub mod identity;
pub mod instances;
pub mod lease;
pub mod repartitioning;
