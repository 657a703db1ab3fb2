//! Shows denormd at work: `make demo` on a small shop, `make flights` on a year of real flights.
//!
//! Both start a throw-away replica set and drive the binary `denormd` like any user: a config file, `plan
//! --apply`, `run`, and SIGKILL. They observe it like an operator, through the data and the state database.

pub mod daemon;
pub mod exact;
pub mod figures;
pub mod flights;
pub mod host;
pub mod print;
pub mod progress;
pub mod shop;
