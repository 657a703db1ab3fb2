//! A year of flights out of New York, and the expected result of denormd's rules.

pub mod changes;
pub mod expected;
pub mod floor;
pub mod gathered;
pub mod tables;

/// The database of `config/flights.yaml`.
pub const DATABASE: &str = "nycflights";
/// The number of its rules.
pub const RULES: usize = expected::Rule::ALL.len();
