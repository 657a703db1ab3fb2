//! Simulations in virtual time, in which everything random follows from a seed.
//!
//! One thread runs everything, and its clock advances as soon as every task waits. Hash maps, `tokio::select!` and generators
//! seed themselves by `getrandom`, which returns numbers drawn from the simulation's seed in that thread, on Linux.
//! `tokio::select!` also depends on the number of runtimes that the process has created: an exact replay needs a process of its
//! own.

#[cfg(target_os = "linux")]
mod random;

use std::{panic::resume_unwind, thread};

use denormd_model::clock;
use tokio::{runtime::Builder, time::Instant};

/// The time at which every simulation begins, in milliseconds since 1970.
const BEGINNING: i64 = 1_700_000_000_000;

/// Runs a simulation in a thread of its own.
///
/// # Panics
///
/// Panics if the simulation does.
pub fn simulate<F: Future<Output: Send>>(seed: u64, simulation: impl FnOnce() -> F + Send) -> F::Output {
    let run = || {
        #[cfg(target_os = "linux")]
        random::seed(seed);
        #[cfg(not(target_os = "linux"))]
        let _ = seed;
        #[expect(clippy::expect_used, reason = "a test cannot go on without a runtime")]
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let begun = Instant::now();
            clock::simulate(move || BEGINNING + i64::try_from(begun.elapsed().as_millis()).unwrap_or(i64::MAX));
            simulation().await
        })
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| resume_unwind(panic)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{collections::HashSet, time::Duration};

    use denormd_model::clock::wall_millis;

    use super::{BEGINNING, simulate};

    async fn draw() -> (Vec<u32>, u64) {
        let order: HashSet<u32> = (0..100).collect();
        (order.into_iter().collect(), rand::random())
    }

    #[test]
    fn everything_random_follows_from_the_seed() {
        assert_eq!(simulate(1, draw), simulate(1, draw));
        assert_ne!(simulate(1, draw), simulate(2, draw));
    }

    #[test]
    fn time_passes_while_everything_waits() {
        let day = Duration::from_secs(24 * 3600);
        let slept = simulate(1, || async move {
            tokio::time::sleep(day).await;
            wall_millis()
        });
        assert_eq!(u128::try_from(slept - BEGINNING).ok(), Some(day.as_millis()));
    }
}
