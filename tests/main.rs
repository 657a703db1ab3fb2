//! One binary for every test that needs a server: the driver is heavy to link.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    reason = "a test that fails panics, and helpers of tests are tests"
)]

mod acknowledged;
mod advise;
mod cases;
mod check;
mod config_pages;
#[cfg(feature = "testcontainers")]
mod containers;
mod copy_rules;
mod crashes;
mod daemon;
mod evaluate;
mod exact_meaning;
mod fan_outs;
mod fault_runs;
mod faults;
mod floors;
mod fuzz;
mod grouped;
mod histories;
mod http;
mod keys_on_server;
mod lease;
mod lifecycle;
mod mutants;
mod observe;
mod offline;
mod operator;
mod page;
mod partitions;
mod patterns;
mod plan;
mod process;
mod program;
mod reads;
mod relevance;
mod running;
mod scraped;
mod secured;
mod simulation;
mod story;
mod support;
mod suspended;
mod throttle;
mod timeline;
mod traces;
mod upgrade;
mod world;
mod zombies;
