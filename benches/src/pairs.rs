//! `BEFORE=PROGRAM`: another build of denormd and this one do the same work in turn, and the figures of each pair are compared. Each
//! measurement has a fresh database, but for those among many rules. Which of the two is first alternates.

use std::path::{Path, PathBuf};

use denormd_show::{
    figures::{interval, median},
    print::{bold, dim, heading},
};
use mongodb::Database;

use crate::{
    bench::{Bench, Cost, Running},
    drain::{self, drained},
    live, scale,
    workloads::Workload,
};

/// The two programs of a pair: the one named by `BEFORE`, and this one.
const PROGRAMS: usize = 2;
/// Number of pairs that a daemon with many rules is measured in.
const PAIRS_OF_A_START: usize = 4;

/// The figures of one program in one round; less is better in each.
pub struct Figures {
    /// CPU of server and daemon together, in microseconds for each change.
    cpu: f64,
    /// Seconds for a backlog, or milliseconds of latency at the 99th percentile.
    time: f64,
}

impl Figures {
    /// Those of a backlog.
    fn of_drain(cost: Cost, changes: usize) -> Self {
        Self { cpu: cost.each(changes), time: cost.wall }
    }
}

/// Measures the workloads that are drained.
pub async fn drains(bench: &Bench, before: &Path, workload: &Workload) {
    measure(bench, before, workload.name, "seconds", async |program| {
        let database = bench.fresh().await;
        drain::load(&database, workload).await;
        let rules = workload.rules;
        let daemon = bench.daemon_of(program, rules, rules.matches("- name:").count()).await;
        // The first drain warms caches.
        drained(bench, &database, workload, 1, &daemon).await;
        let cost = drained(bench, &database, workload, 2, &daemon).await;
        daemon.stop().await;
        Figures::of_drain(cost, workload.changes)
    })
    .await;
}

/// Measures the latency of live changes at each rate.
pub async fn live(bench: &Bench, before: &Path) {
    for rate in live::RATES {
        measure(bench, before, &format!("live, {rate}/s"), "p99 in ms", async |program| {
            let database = bench.fresh().await;
            live::load(&database).await;
            let daemon = bench.daemon_of(program, live::RULES, 1).await;
            let (cost, high) = live::denormd(bench, &database, rate, &daemon).await;
            daemon.stop().await;
            Figures { cpu: cost.each(live::changes(rate)), time: high }
        })
        .await;
    }
}

/// Measures one rule's changes among more and more rules. A daemon with 500 rules takes a hundred times as long to start as it takes
/// for the changes, so each program has its own server and runs for a few pairs. Both are restarted then, because two processes of
/// one program can differ in speed.
pub async fn rules(bench: &Bench, before: &Path) {
    let other = Bench::start(bench.rounds).await;
    for number in scale::RULES {
        let mut started: Vec<Started> = Vec::new();
        let mut drains = 0;
        measure(bench, before, &format!("{number} rules"), "seconds", async |program| {
            if drains % (PROGRAMS * PAIRS_OF_A_START) == 0 {
                for (_, daemon) in started.drain(..) {
                    daemon.stop().await;
                }
                started.push(start(&other, Some(before.to_owned()), number).await);
                started.push(start(bench, None, number).await);
            }
            drains += 1;
            let nth = usize::from(program.is_none());
            let (database, daemon) = &started[nth];
            let cost = scale::drained([&other, bench][nth], database, daemon, &drains.to_string()).await;
            Figures::of_drain(cost, scale::CHANGES)
        })
        .await;
        for (_, daemon) in started {
            daemon.stop().await;
        }
    }
}

/// A daemon, and the database that it works on.
type Started = (Database, Running);

/// Starts a program with so many rules. The first drain warms caches.
async fn start(bench: &Bench, program: Option<PathBuf>, number: usize) -> Started {
    let database = bench.fresh().await;
    let rules = scale::load_rules(&database, number).await;
    let daemon = bench.daemon_of(program, &rules, number).await;
    scale::drained(bench, &database, &daemon, "first").await;
    (database, daemon)
}

async fn measure(
    bench: &Bench,
    before: &Path,
    name: &str,
    time: &str,
    mut run: impl AsyncFnMut(Option<PathBuf>) -> Figures,
) {
    heading(&format!("{name}: the program in BEFORE, and this one, {} pairs", bench.rounds));
    let mut pairs: Vec<[Figures; PROGRAMS]> = Vec::new();
    for round in 0..bench.rounds {
        let pair = if round % 2 == 0 {
            let first = run(Some(before.to_owned())).await;
            [first, run(None).await]
        } else {
            let second = run(None).await;
            [run(Some(before.to_owned())).await, second]
        };
        let [before, now] = &pair;
        println!(
            "{}",
            dim(&format!(
                "  {:>9.1} {:>9.1} µs a change {:>11.3} {:>9.3} {time}",
                before.cpu, now.cpu, before.time, now.time
            ))
        );
        pairs.push(pair);
    }
    let ratios = |what: fn(&Figures) -> f64| -> Vec<f64> {
        pairs.iter().map(|[before, now]| what(before) / what(now)).collect()
    };
    // Too few pairs give no interval, but their range.
    let between = if pairs.len() < 6 { "from" } else { "with 95% certainty from" };
    for (figure, ratios) in [("CPU a change", ratios(|figures| figures.cpu)), (time, ratios(|figures| figures.time))] {
        let (least, greatest) = interval(&ratios);
        let median = bold(&format!("{:.3}", median(&ratios)));
        println!("  {name:<14}{figure:<14}before / now: median {median}, {between} {least:.3} to {greatest:.3}");
    }
}
