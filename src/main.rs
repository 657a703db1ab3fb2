//! The denormd binary.
fn main() {}
