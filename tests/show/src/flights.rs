//! A year of flights out of New York, and what denormd must make of them.

pub mod changes;
pub mod expected;
pub mod floor;
pub mod gathered;
pub mod tables;

/// The database of `config/flights.yaml`.
pub const DATABASE: &str = "nycflights";
/// Its rules.
pub const RULES: usize = expected::Rule::ALL.len();
