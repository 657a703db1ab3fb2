//! Everything a user sees: commands, HTTP, metrics, the page, messages.

pub mod action;
pub mod advise;
pub mod backfill;
pub mod check;
pub mod diff;
pub mod errors;
pub mod foreign;
pub mod http;
pub mod https;
pub mod observe;
pub mod offline;
pub mod operator;
pub mod page;
pub mod plan;
pub mod program;
pub mod scraped;
pub mod secrets;
pub mod secured;
pub mod story;
pub mod support_bundle;
pub mod timeline;
#[cfg(feature = "top")]
pub mod top;
pub mod traces;
