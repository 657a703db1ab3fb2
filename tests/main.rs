//! One binary for every test that needs a server: linking the driver is slow.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::print_stdout,
    reason = "a test that fails panics, and helpers of tests are tests"
)]

mod acknowledged;
mod action;
mod adoption;
mod advise;
mod apps;
mod attacks;
mod backlogs;
mod beside;
mod book;
mod cases;
mod check;
mod combinations;
mod config_pages;
#[cfg(feature = "testcontainers")]
mod containers;
mod copy_rules;
mod crashes;
mod created;
mod daemon;
mod deployment;
mod diff;
mod errors;
mod evaluate;
mod exact_meaning;
mod fan_outs;
mod fault_runs;
mod faults;
mod floors;
mod foreign;
mod fuzz;
mod golden;
mod grouped;
mod histories;
mod http;
mod https;
mod impostor;
mod keys_on_server;
mod kinds;
mod large_arrays;
mod lease;
mod lifecycle;
mod memory;
mod mutants;
mod observe;
mod of_target;
mod offline;
mod operator;
mod outages;
mod packages;
mod page;
mod partitions;
mod patterns;
mod plan;
mod process;
mod program;
mod reads;
mod relevance;
mod rolling_upgrade;
mod routers;
mod running;
mod scraped;
mod secrets;
mod secured;
mod seeds;
mod simulation;
mod slow_reads;
mod standbys;
mod story;
mod support;
mod throttle;
mod timeline;
#[cfg(feature = "top")]
mod top;
mod touches;
mod traces;
mod trees;
mod unavailable;
mod undo;
mod unreadable;
mod upgrade;
mod upgrades;
mod verification;
mod versions;
mod waits;
mod world;
mod zombies;
