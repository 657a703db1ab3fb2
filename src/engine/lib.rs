//! The engine: follows the change streams of a plan's collections, and keeps the targets in sync.
//!
//! # How data flows
//!
//! ```text
//! watch -> route -> workqueue -> reconcile -> checkpoint
//!                                (read, value, statement)
//! ```
//!
//! CONTRIBUTING.md lists the modules in their order and walks one event through them. A module imports only from those before
//! it; `tests/repository/floors.rs` fails on an upward import.
//!
//! # Architecture invariants
//!
//! - **An event only says what to look at again.** What is written is computed from the sources as they are when they are
//!   read, whole; so replays, duplicates and reordering do no harm.
//! - **A position is saved only when every batch up to it has nothing left in the queue** ([`checkpoint::watermark`]), or
//!   what is left is recorded by a majority: a dead letter, a backfill, a hold.
//! - **A key never runs twice at once, and a request that arrives while it runs is remembered** ([`workqueue`]).
//! - **Every statement demands that the reference is still what the value was computed for, that the target still takes
//!   part, and that the command started in time** ([`reconcile::statement`]); every read is of a majority, by the primary,
//!   no older than any event delivered so far.
//! - **A copied value is data**: it is written by classic `$set`, never inside a pipeline.
//! - **No document's value reaches a log, a metric or an error's text.**
// The driver's futures nest deeply, and whether one is `Send` is decided type by type.
#![recursion_limit = "256"]

pub mod change;
pub mod checkpoint;
pub mod dead_letter;
pub mod deployment;
pub mod events;
pub mod inspection;
pub mod jobs;
pub mod leadership;
pub mod metrics;
pub mod pace;
pub mod pipeline;
pub mod preflight;
pub mod reconcile;
pub mod request;
pub mod route;
pub mod snapshot;
pub mod unavailable;
pub mod watch;
pub mod workqueue;
