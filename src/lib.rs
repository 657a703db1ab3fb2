//! denormd keeps the fields you copy between MongoDB collections equal to their source.
//!
//! # The floors
//!
//! A module imports only from floors below its own; `tests/floors.rs` fails on an upward import or a cycle.
//!
//! | floor | modules |
//! |---|---|
pub mod config;
