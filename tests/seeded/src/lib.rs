//! Simulations in virtual time, in which everything random follows from a seed.
//!
//! One thread runs everything, and its clock advances as soon as every task waits. Hash maps, `tokio::select!` and generators
//! seed themselves by `getrandom`, which returns numbers drawn from the simulation's seed in that thread, on Linux. What is
//! sent over TCP has arrived when `send` returns, there as well.
//! `tokio::select!` also depends on the number of runtimes that the process has created: an exact replay needs a process of its
//! own.

#[cfg(target_os = "linux")]
mod network;
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
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        time::Instant,
    };

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

    #[test]
    fn no_time_passes_while_a_message_is_on_its_way() {
        let sent = || async {
            let start = Instant::now();
            let listener = TcpListener::bind("127.0.0.1:27017").await.unwrap();
            assert_eq!(listener.local_addr().unwrap().to_string(), "127.0.0.1:27017");
            let later = tokio::spawn(tokio::time::sleep(Duration::from_millis(1)));
            let mut client = TcpStream::connect("127.0.0.1:27017").await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            for _ in 0..1000 {
                client.write_all(b"a message").await.unwrap();
                server.read_exact(&mut [0; 9]).await.unwrap();
            }
            (start.elapsed(), later.is_finished())
        };
        assert_eq!(simulate(1, sent), (Duration::ZERO, false));
        assert!(simulate(1, || async { TcpStream::connect("127.0.0.1:27017").await.is_err() }));
    }
}
