//! Seeds of randomized tests, from the environment. By default each run uses the same.

use std::{ops::Range, str::FromStr};

/// The number in an environment variable; None when there is none.
///
/// # Panics
///
/// Panics if it is not a number.
pub fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// `DENORMD_SEED` alone, or as many seeds as the variable `count` says, starting at `DENORMD_FIRST`: a number,
/// `random`, or 1.
pub fn seeds(count: &str, default: u64) -> Range<u64> {
    if let Some(seed) = from_environment("DENORMD_SEED") {
        return seed..seed + 1;
    }
    let first = match std::env::var("DENORMD_FIRST").as_deref() {
        Ok("random") => u64::from(rand::random::<u32>()),
        _ => from_environment("DENORMD_FIRST").unwrap_or(1),
    };
    first..first + from_environment(count).unwrap_or(default)
}
