//! From figures to advice. Pure: figures and thresholds in, sentences out.

pub mod cluster;
pub mod collection;
pub mod copy;
pub mod integrity;
pub mod relationship;
