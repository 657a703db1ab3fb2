//! `make soak`: faults, new configs and other releases at random, as in `make faults`, beside a daemon that no fault
//! ends. After each round, what must not grow is measured; at the end it is compared with its limits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Document, doc};

use super::{Stage, print, rounds};
use crate::support::seeds::from_environment;

/// Most memory (RSS) of the daemon that is never ended, in megabytes.
const MOST_MEMORY: f64 = 256.0;
/// Largest age of the saved position when all is at rest, in seconds. An idle stream moves once in ten seconds.
const MOST_AGE: f64 = 60.0;
/// Rounds below which nothing is said about growth.
const ENOUGH: usize = 12;
/// Growth that counts as none, from the second quarter of the time to the last: of each figure.
const MEMORY: Growth = Growth { share: 0.3, more: 16.0 };
const DESCRIPTORS: Growth = Growth { share: 0.1, more: 16.0 };
const DOCUMENTS: Growth = Growth { share: 0.1, more: 30.0 };

#[derive(Clone, Copy)]
struct Growth {
    share: f64,
    more: f64,
}

/// The figures after each round, by name.
type Ledger = BTreeMap<String, Vec<f64>>;

/// Memory in megabytes and the number of file descriptors of a process.
fn of_process(process: i64) -> (f64, f64) {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kilobytes: u32 = memory.trim().trim_end_matches("kB").trim().parse().unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count();
    (f64::from(kilobytes) / 1024.0, f64::from(u32::try_from(descriptors).unwrap()))
}

async fn measure(stage: &Stage, process: i64, ledger: &mut Ledger) {
    let mut add = |name: &str, value: f64| ledger.entry(name.to_owned()).or_default().push(value);
    let (memory, descriptors) = of_process(process);
    add("memory, MB", memory);
    add("file descriptors", descriptors);
    let state = stage.world.test.beside("state");
    let names: BTreeSet<String> = state.list_collection_names().await.unwrap().into_iter().collect();
    for name in names.iter().filter(|name| !name.starts_with("system.")) {
        let documents = state.collection::<Document>(name).count_documents(doc! {}).await.unwrap();
        add(&format!("documents in {name}"), f64::from(u32::try_from(documents).unwrap()));
    }
    let hello = state.run_command(doc! {"hello": 1}).await.unwrap();
    let now = hello.get_datetime("localTime").unwrap().timestamp_millis() / 1000;
    let oldest = state.collection::<Document>("positions").find_one(doc! {}).sort(doc! {"time": 1}).await.unwrap();
    let saved = oldest.unwrap().get_timestamp("time").unwrap().time;
    add("checkpoint age, s", f64::from(i32::try_from((now - i64::from(saved)).max(0)).unwrap()));
}

fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the figures, and returns those that have grown or are too large.
fn judge(ledger: &Ledger) -> Vec<String> {
    let mut found = Vec::new();
    println!("\n{:<28} {:>8} {:>14} {:>14} {:>8}", "", "rounds", "second quarter", "last quarter", "worst");
    for (name, values) in ledger {
        let quarter = values.len() / 4;
        let (second, last) = (&values[quarter..(2 * quarter).max(1)], &values[values.len() - quarter.max(1)..]);
        let (second, last) = (middle(second), middle(last));
        let worst = values.iter().copied().fold(0.0, f64::max);
        println!("{name:<28} {:>8} {second:>14.1} {last:>14.1} {worst:>8.1}", values.len());
        let (growth, most) = match name.as_str() {
            "memory, MB" => (MEMORY, MOST_MEMORY),
            "file descriptors" => (DESCRIPTORS, f64::INFINITY),
            "checkpoint age, s" => (Growth { share: 0.0, more: MOST_AGE }, MOST_AGE),
            // A capped collection.
            "documents in events" => continue,
            _ => (DOCUMENTS, f64::INFINITY),
        };
        if worst > most {
            found.push(format!("{name}: {worst:.1}, more than {most:.0}"));
        }
        if values.len() >= ENOUGH && last > second * (1.0 + growth.share) + growth.more {
            found.push(format!("{name} has grown from {second:.1} to {last:.1}"));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes hours: make soak HOURS=2"]
async fn nothing_grows() {
    let minutes: f64 = from_environment("DENORMD_SOAK_MINUTES").unwrap_or(120.0);
    let seed = from_environment("DENORMD_SEED").unwrap_or_else(rand::random::<u32>);
    println!("seed {seed}, {minutes} minutes");
    let mut stage = Stage::set_up(u64::from(seed)).await;
    let veteran = stage.world.daemon();
    let process = veteran.pid();
    stage.veteran = Some(process);
    stage.daemons.push(veteran);
    let mut ledger = Ledger::new();
    let after = async |stage: &Stage, at: Duration| {
        measure(stage, process, &mut ledger).await;
        println!("{:6.0} s  memory {:.0} MB", at.as_secs_f64(), ledger["memory, MB"].last().unwrap());
    };
    let table = rounds(&mut stage, minutes, after).await;
    let (runs, divergences) = print(&table);
    let grown = judge(&ledger);
    println!("\n{runs} runs, {divergences} divergences; {} faults seen to strike; seed {seed}", stage.struck);
    assert!(runs > 0, "no time for a run");
    assert_eq!(divergences, 0, "seed {seed}");
    assert!(grown.is_empty(), "{grown:#?}");
}

/// The figures of a process that leaks, and of one that does not.
#[test]
fn growth_is_seen() {
    let flat: Vec<f64> = (0..40).map(|n| 50.0 + f64::from(n % 3)).collect();
    let rising: Vec<f64> = (0..40).map(|n| 50.0 + 4.0 * f64::from(n)).collect();
    let ledger = |name: &str, values: &[f64]| Ledger::from([(name.to_owned(), values.to_vec())]);
    for name in ["memory, MB", "file descriptors", "documents in rules"] {
        assert_eq!(judge(&ledger(name, &flat)), Vec::<String>::new());
        assert_eq!(judge(&ledger(name, &rising)).len(), 1, "{name}");
    }
    assert_eq!(judge(&ledger("checkpoint age, s", &[1.0, 300.0])).len(), 1);
    assert_eq!(judge(&ledger("memory, MB", &[300.0])).len(), 1);
}
