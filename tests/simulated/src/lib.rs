//! A MongoDB in memory that speaks the wire protocol: a replica set with an oplog, change streams,
//! elections and faults.
//!
//! Every command is a function from a document to a document ([`Model::run`]). Expressions, filters and accumulators are
//! those of [`denormd_mql`]. It refuses what it does not know, by name: an error with the code [`UNKNOWN`], which
//! [`Model::unknown`] collects.

#![allow(clippy::print_stderr, reason = "a refusal must be seen")]

mod administration;
mod diff;
mod faults;
mod large;
mod oplog;
mod projection;
mod read;
mod record;
mod replication;
mod replies;
mod state;
mod stream;
mod transaction;
mod update;
mod wire;
mod write;

pub use faults::Faults;
pub use oplog::FieldHistory;
pub use record::Write;
pub use replication::Held;
pub use replies::{Failure, UNKNOWN};
pub use state::Model;
pub use wire::Server;
