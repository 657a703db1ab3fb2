//! `denormd advise`: MongoDB's six rules of thumb for schema design, applied to the data that is there.
//!
//! The survey reads: samples, counters, the log, the oplog, each bounded. What the advice is decided from are figures
//! ([`facts`]), and deciding is pure ([`decide`]). What may not be read is "not known", never a failure. No document's value
//! reaches the report.

pub mod advice;
pub mod ask;
pub mod copies;
pub mod decide;
pub mod draft;
pub mod facts;
pub mod fan_out;
pub mod inventory;
pub mod log;
pub mod names;
pub mod reads;
pub mod relationships;
pub mod render;
pub mod report;
pub mod updates;
