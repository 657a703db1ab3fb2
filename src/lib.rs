//! denormd
pub mod change;
pub mod checkpoint;
pub mod config;
pub mod dead_letter;
pub mod error;
pub mod field_path;
pub mod key;
pub mod mongo;
pub mod plan;
pub mod position;
pub mod reconcile;
pub mod request;
pub mod route;
pub mod watch;
pub mod workqueue;
