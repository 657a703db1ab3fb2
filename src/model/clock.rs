//! The wall clock, which a simulation replaces. Durations are measured with tokio's clock, which a simulation pauses.

use std::{
    cell::RefCell,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bson::DateTime;

/// A clock, in milliseconds since 1970.
type Clock = Box<dyn Fn() -> i64>;

thread_local! {
    /// The clock of a simulation, which runs in one thread.
    static SIMULATED: RefCell<Option<Clock>> = const { RefCell::new(None) };
}

/// This machine's clock, in milliseconds since 1970.
#[must_use]
pub fn wall_millis() -> i64 {
    SIMULATED.with_borrow(|simulated| simulated.as_ref().map(|clock| clock())).unwrap_or_else(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        millis(since)
    })
}

/// A duration in milliseconds.
#[must_use]
pub fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// This machine's clock as a date.
#[must_use]
pub fn now() -> DateTime {
    DateTime::from_millis(wall_millis())
}

/// Replaces the clock of this thread by one that gives milliseconds since 1970.
pub fn simulate(clock: impl Fn() -> i64 + 'static) {
    SIMULATED.set(Some(Box::new(clock)));
}
