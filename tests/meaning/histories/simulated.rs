//! Histories on a MongoDB in memory. `DENORMD_SEED` replays one, `DENORMD_SIMULATIONS` sets their number and
//! `DENORMD_FIRST` the first seed.

use std::time::{Duration, Instant};

use denormd_fixture::TestDb;
use denormd_oracle::{Odd, Options};
use denormd_simulated::{Model, Server};

use futures_util::{StreamExt, stream};

use super::{
    Run,
    faulty::{Scale, run_and_shrink},
    seeds,
};
use crate::support::seeds::from_environment;

/// The odd kinds of worlds that the model knows.
const KNOWN: &[Odd] = &[Odd::Empty, Odd::Collections, Odd::PreImages, Odd::Failing, Odd::Echo, Odd::EdgeIds];

/// The most worlds under one daemon.
const WORLDS: u64 = 20;

fn everything(prefix: String) -> Options {
    Options { mixed_composite: true, odd: KNOWN.to_vec(), ..Options::everything(prefix) }
}

/// Runs `count` histories from `first` on, on a cluster of their own. Returns false if one of them needs what the model
/// does not know.
async fn simulate(run: &Run, first: u64, count: u64) -> bool {
    let server = Server::start(Model::new(first), 0).await.unwrap();
    let test = TestDb::create(server.uri()).await;
    run.histories_on(&test, first, count).await;
    let unknown = server.model.unknown();
    if !unknown.is_empty() {
        println!("seeds {first} to {} are not decided: the model does not know {unknown:#?}", first + count - 1);
    }
    unknown.is_empty()
}

/// Several clusters at once: most of their time is waiting.
async fn many(run: Run, default: u64) {
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", default);
    let at_once = from_environment("DENORMD_AT_ONCE").unwrap_or(3);
    let firsts = seeds.clone().step_by(usize::try_from(WORLDS).unwrap());
    let runs = firsts.map(|first| simulate(&run, first, WORLDS.min(seeds.end - first)));
    let decided: Vec<bool> = stream::iter(runs).buffer_unordered(at_once).collect().await;
    let minutes = begun.elapsed().max(Duration::from_millis(1)).as_secs_f64() / 60.0;
    println!("{:.0} seeds a minute", f64::from(u32::try_from(seeds.end - seeds.start).unwrap()) / minutes);
    let undecided = decided.iter().filter(|decided| !**decided).count();
    assert!(undecided * 20 <= decided.len(), "{undecided} of {} clusters are not decided", decided.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_on_the_model() {
    many(Run::new(everything), 60).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_on_the_model_in_three_partitions() {
    many(Run { partitions: [2, 3], ..Run::new(everything) }, 20).await;
}

/// Commands fail, primaries change, daemons are killed and frozen. Several clusters at once: most of their time is waiting.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_whatever_fails() {
    let (worlds, at_once) =
        (from_environment("DENORMD_WORLDS").unwrap_or(10), from_environment("DENORMD_AT_ONCE").unwrap_or(2));
    let limit = Duration::from_secs(60 * from_environment("DENORMD_SHRINK_MINUTES").unwrap_or(2));
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", 20);
    let count = seeds.end - seeds.start;
    let runs = (seeds.start..seeds.end).step_by(usize::try_from(worlds).unwrap()).map(|first| {
        let scale = Scale::draw(first, worlds.min(seeds.end - first));
        run_and_shrink(scale, limit)
    });
    let mut runs = stream::iter(runs).buffer_unordered(at_once);
    while runs.next().await.is_some() {}
    println!(
        "{:.0} seeds a minute with faults",
        f64::from(u32::try_from(count).unwrap()) * 60.0 / begun.elapsed().as_secs_f64()
    );
}
