//! The repository itself: documents, examples, packages, manifests, the layout of the code.

pub mod book;
pub mod config_pages;
#[cfg(feature = "testcontainers")]
pub mod containers;
pub mod deployment;
pub mod floors;
pub mod fuzz;
pub mod mutants;
pub mod packages;
