//! The driver's edge: connecting, raw commands, and what the server's errors mean.

pub mod classify;
pub mod code;
pub mod command;
pub mod connect;
pub mod connection;
pub mod error;
pub mod fence;
pub mod primary;
pub mod product;
mod reach;
pub mod skew;
pub mod text;

pub use classify::unless;
pub use command::{Batches, Pages, Server, Written};
pub use connection::Connection;
pub use fence::{End, Fence};
pub use primary::{all, bounded};
pub use reach::silent;
