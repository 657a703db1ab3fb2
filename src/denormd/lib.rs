//! denormd keeps the fields you copy between MongoDB collections equal to their source.
//!
//! This crate is the program: the command line, HTTP and the page, status and logs. [`denormd_engine`] does the work; its
//! documentation has the way of the data and the invariants.

pub mod cli;
pub mod commands;
pub mod dry_run;
pub mod logging;
pub mod server;
pub mod status;
