//! One binary for every test that needs a server: linking the driver is slow.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    reason = "a test that fails panics, and helpers of tests are tests"
)]

/// The allocator of the daemon, for its speed in long simulations.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod cluster;
mod engine;
mod faults;
mod meaning;
mod operations;
mod repository;
mod support;
