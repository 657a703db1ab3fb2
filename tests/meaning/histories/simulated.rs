//! Histories on a MongoDB in memory. `DENORMD_SEED` replays one, `DENORMD_SIMULATIONS` sets their number and
//! `DENORMD_FIRST` the first seed.

use std::{
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    io::{Read, Seek},
    num::{NonZero, ParseIntError},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::Command,
    str::FromStr,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, available_parallelism},
    time::{Duration, Instant},
};

use denormd_fixture::TestDb;
use denormd_oracle::{Odd, Options};
use denormd_simulated::{Model, Server};

use super::{
    Run,
    faulty::{Scale, simulate_and_shrink},
    seeds,
};
use crate::support::{running::Started, seeds::from_environment};

/// The odd kinds of worlds that the model knows.
const KNOWN: &[Odd] = &[Odd::Empty, Odd::Collections, Odd::PreImages, Odd::Failing, Odd::Echo, Odd::EdgeIds];

/// The beginnings of lines that a process says to its parent.
const UNKNOWN: &str = "unknown to the model: ";
const DIGEST: &str = "digest: ";

/// A simulation that takes longer repeats something while no time passes.
const ENDLESS: Duration = Duration::from_secs(900);

/// The most worlds under one daemon.
const WORLDS: u64 = 20;

fn everything(prefix: String) -> Options {
    Options { mixed_composite: true, odd: KNOWN.to_vec(), ..Options::everything(prefix) }
}

/// Runs a simulation, a test with the name `name` in this file, in a process of its own, so that it can be replayed exactly.
/// Returns true if it has passed, and what it said.
pub fn in_a_process(name: &str, cluster: &str) -> (bool, String) {
    let name = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
    let mut said = tempfile::tempfile().unwrap();
    let mut child = Started(
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", &name, "--nocapture"])
            .env("DENORMD_CLUSTER", cluster)
            .stdout(said.try_clone().unwrap())
            .stderr(said.try_clone().unwrap())
            .spawn()
            .unwrap(),
    );
    let begun = Instant::now();
    while child.is_running() && begun.elapsed() < ENDLESS {
        thread::sleep(Duration::from_millis(20));
    }
    let has_passed = child.0.try_wait().unwrap().is_some_and(|status| status.success());
    let mut text = Vec::new();
    said.rewind().unwrap();
    said.read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    // A name that no test has would pass, too.
    (has_passed && text.contains(DIGEST), text)
}

/// The cluster that this process simulates.
fn cluster<T: FromStr<Err: Debug>>() -> T {
    std::env::var("DENORMD_CLUSTER").expect("the description of a cluster").parse().unwrap()
}

/// Says the digest of all changes of the application's database.
pub fn say(server: &Server, test: &TestDb) {
    let mut hasher = DefaultHasher::new();
    server.model.changes(&test.name).hash(&mut hasher);
    println!("{DIGEST}{:x}", hasher.finish());
}

/// The digest that a process said.
pub fn digest(said: &str) -> String {
    said.lines().find_map(|line| line.strip_prefix(DIGEST)).expect("a digest").to_owned()
}

/// The seeds of one cluster, and the numbers of partitions.
#[derive(Debug, Clone, Copy)]
struct Cluster {
    first: u64,
    count: u64,
    partitions: [u32; 2],
}

impl Cluster {
    /// Runs it in a process of its own. Returns what it said.
    fn simulate(self) -> String {
        let Self { first, count, partitions: [before, after] } = self;
        let cluster = format!("{first} {count} {before} {after}");
        let (is_right, said) = in_a_process("without_faults", &cluster);
        assert!(is_right, "DENORMD_CLUSTER='{cluster}' replays it, as CONTRIBUTING.md says:\n{said}");
        said
    }

    /// True if a simulation did what the model knows.
    fn is_decided(self, said: &str) -> bool {
        let unknown = said.lines().find_map(|line| line.strip_prefix(UNKNOWN));
        if let Some(unknown) = unknown {
            println!("{self:?} is not decided: the model does not know {unknown}");
        }
        unknown.is_none()
    }

    async fn run(self) {
        let Self { first, count, partitions } = self;
        let server = Server::start_set(Model::new(first), first, 1).await.unwrap();
        let test = TestDb::passing(server.uri(), "app").await;
        Run { partitions, ..Run::new(everything) }.histories_on(&test, first, count).await;
        let unknown = server.model.unknown();
        if !unknown.is_empty() {
            println!("{UNKNOWN}{unknown:?}");
        }
        say(&server, &test);
    }
}

impl FromStr for Cluster {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let mut numbers = text.split(' ');
        let mut number = || numbers.next().unwrap_or_default();
        let (first, count) = (number().parse()?, number().parse()?);
        Ok(Self { first, count, partitions: [number().parse()?, number().parse()?] })
    }
}

#[test]
#[ignore = "a part of other tests, in a process of its own"]
fn without_faults() {
    let cluster: Cluster = cluster();
    denormd_seeded::simulate(cluster.first, || cluster.run());
}

#[test]
#[ignore = "a part of other tests, in a process of its own"]
fn with_faults() {
    let scale: Scale = cluster();
    denormd_seeded::simulate(scale.seed, || scale.run());
}

/// As many clusters at once as there are cores.
fn many(partitions: [u32; 2], default: u64) {
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", default);
    let firsts = seeds.clone().step_by(usize::try_from(WORLDS).unwrap());
    let clusters: Vec<Cluster> =
        firsts.map(|first| Cluster { first, count: WORLDS.min(seeds.end - first), partitions }).collect();
    let undecided = at_once(&clusters, |cluster| !cluster.is_decided(&cluster.simulate()));
    let minutes = begun.elapsed().max(Duration::from_millis(1)).as_secs_f64() / 60.0;
    println!("{:.0} seeds a minute", f64::from(u32::try_from(seeds.end - seeds.start).unwrap()) / minutes);
    assert!(undecided * 20 <= clusters.len(), "{undecided} of {} clusters are not decided", clusters.len());
}

/// The number of those for which it is true, computed by `DENORMD_AT_ONCE` threads (one for each core). A panic in one of them
/// is one of the caller, and the others begin nothing more.
fn at_once<T: Sync>(all: &[T], compute: impl Fn(&T) -> bool + Sync) -> usize {
    let threads =
        from_environment("DENORMD_AT_ONCE").unwrap_or_else(|| available_parallelism().map_or(1, NonZero::get));
    let next = AtomicUsize::new(0);
    let some = || {
        let mut count = 0;
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let is_true = catch_unwind(AssertUnwindSafe(|| compute(one))).unwrap_or_else(|panic| {
                next.store(all.len(), Ordering::Relaxed);
                resume_unwind(panic)
            });
            count += usize::from(is_true);
        }
        count
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).sum()
    })
}

#[test]
fn all_rules_converge_on_the_model() {
    many([1, 1], 60);
}

#[test]
fn all_rules_converge_on_the_model_in_three_partitions() {
    many([2, 3], 20);
}

#[test]
fn a_seed_replays_exactly() {
    let cluster = Cluster { first: 1_000_001, count: 6, partitions: [2, 3] };
    let first = digest(&cluster.simulate());
    assert_eq!(digest(&cluster.simulate()), first);
    assert_ne!(digest(&Cluster { first: 1_000_007, ..cluster }.simulate()), first);
}

/// Commands fail, primaries change, daemons are killed and cut off.
#[test]
fn all_rules_converge_whatever_fails() {
    let worlds = from_environment("DENORMD_WORLDS").unwrap_or(10);
    let limit = Duration::from_secs(60 * from_environment("DENORMD_SHRINK_MINUTES").unwrap_or(2));
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", 20);
    let firsts: Vec<u64> = seeds.clone().step_by(usize::try_from(worlds).unwrap()).collect();
    at_once(&firsts, |first| {
        simulate_and_shrink(Scale::draw(*first, worlds.min(seeds.end - first)), limit);
        true
    });
    let count = f64::from(u32::try_from(seeds.end - seeds.start).unwrap());
    println!("{:.0} seeds a minute with faults", count * 60.0 / begun.elapsed().as_secs_f64());
}

#[test]
fn a_seed_with_faults_replays_exactly() {
    let scale = Scale { daemons: 2, partitions: [2, 3], ..Scale::draw(1_000_001, 3) };
    assert_eq!(scale.simulate().unwrap(), scale.simulate().unwrap());
}
