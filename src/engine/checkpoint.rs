//! The recorded progress of streams, rules and jobs, and its storage.

pub mod adoption;
pub mod earlier;
pub mod fan_out;
pub mod format;
pub mod kept;
pub mod progress;
pub mod requests;
pub mod rule_record;
pub mod store;
pub mod watermark;
