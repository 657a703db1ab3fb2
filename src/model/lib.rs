//! The vocabulary of denormd: what every other crate talks about. Pure: no server, no file.

pub mod clock;
pub mod distribution;
pub mod failpoint;
pub mod field_path;
pub mod key;
pub mod namespace;
pub mod partition;
pub mod position;
pub mod rule_state;
pub mod shape;
pub mod stored_key;
pub mod text;
