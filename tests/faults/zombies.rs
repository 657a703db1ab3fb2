//! `make zombies`: leaders that are frozen in the middle of their work and resume when another instance leads, with
//! many deployments at once on one replica set, because each round waits for a lease to expire.
//!
//! A round: the application writes, the leader is frozen, another one takes over and writes newer values, the frozen
//! one resumes. Then every copy is compared with its source, and the oplog must be silent. The first difference ends
//! the run.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use denormd_fixture::ReplicaSet;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    faults::fault_runs::median,
    support::{
        seeds::from_environment,
        world::{TTL, World},
    },
};

/// Time for which the oplog must be silent.
const QUIET: Duration = Duration::from_millis(700);

/// The results of one deployment's rounds.
#[derive(Default)]
struct Seen {
    trials: usize,
    /// Time from the freeze until another instance leads.
    taken_over: Vec<Duration>,
    /// Writes of the application that were acknowledged while the leader was frozen, or shortly before.
    written: u64,
    /// Leaders that resumed and noticed; until then each of them believed that it led.
    noticed: usize,
    /// Writes that the server or the fence refused because they were too late.
    refused: usize,
}

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Runs rounds on its own deployment until none is `left`.
async fn trials(world: World, seed: u64, left: Arc<AtomicI64>) -> Seen {
    let mut random = StdRng::seed_from_u64(seed);
    let daemons = [world.daemon(), world.daemon()];
    world.term_after(0).await;
    world.converged().await;
    let mut seen = Seen::default();
    while left.fetch_sub(1, Ordering::SeqCst) > 0 {
        let writer = world.writer(random.random());
        pause(random.random_range(100..600)).await;
        // On a busy machine the leader may have changed since the last round.
        let (mut term, mut process) = world.term_after(0).await;
        let leader = daemons.iter().find(|daemon| daemon.pid() == process).unwrap();
        leader.signal("STOP");
        let begun = Instant::now();
        while process == leader.pid() {
            (term, process) = world.term_after(term).await;
        }
        seen.taken_over.push(begun.elapsed());
        // Resumed before, while, or after its successor has written newer values.
        let wakes = random.random_range(0..3);
        if wakes == 0 {
            leader.signal("CONT");
        }
        pause(random.random_range(0..400)).await;
        if wakes == 1 {
            leader.signal("CONT");
        }
        seen.written += writer.stop().await;
        if wakes == 2 {
            world.converged().await;
            leader.signal("CONT");
        }
        world.at_rest(QUIET).await;
        seen.trials += 1;
    }
    for daemon in daemons {
        let log = daemon.log();
        seen.noticed += log.matches("the lease is lost").count();
        seen.refused += log.matches("reached the server after its deadline").count();
        seen.refused += log.matches("the lease has run out").count();
        daemon.terminate().await;
    }
    seen
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: make zombies TRIALS=1000"]
async fn as_many_zombies_as_it_is_told() {
    let wanted: i64 = from_environment("DENORMD_ZOMBIES").unwrap_or(1000);
    let at_once: u64 = from_environment("DENORMD_AT_ONCE").unwrap_or(16);
    let seed = u64::from(from_environment("DENORMD_SEED").unwrap_or_else(rand::random::<u32>));
    println!("seed {seed}, {wanted} trials, {at_once} deployments at once");
    let begun = Instant::now();
    let set = ReplicaSet::builder().oplog_mb(256).start().await;
    let left = Arc::new(AtomicI64::new(wanted));
    let mut running = tokio::task::JoinSet::new();
    for nth in 0..at_once {
        let world = World::new(set.database().await).await;
        running.spawn(trials(world, seed.wrapping_mul(1000) + nth, left.clone()));
    }
    let mut all = Seen::default();
    while let Some(seen) = running.join_next().await {
        let seen = seen.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        all.trials += seen.trials;
        all.taken_over.extend(seen.taken_over);
        all.written += seen.written;
        all.noticed += seen.noticed;
        all.refused += seen.refused;
    }
    let middle = median(&mut all.taken_over);
    let worst = all.taken_over.last().copied().unwrap_or_default();
    println!("{} zombies in {:?}, 0 stale values at rest", all.trials, begun.elapsed());
    println!("taken over after {middle:?} (median), {worst:?} (worst); the lease is {TTL:?}");
    println!(
        "{} application writes; {} woke up and noticed that the lease was lost; {} lines about writes that came too late",
        all.written, all.noticed, all.refused
    );
    assert_eq!(i64::try_from(all.trials).unwrap(), wanted);
    // A leader that was about to hand over when it was frozen has nothing to notice.
    assert!(all.noticed * 10 >= all.trials * 9, "they woke up as former leaders");
}
