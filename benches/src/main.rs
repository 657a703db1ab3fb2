//! `make bench`: denormd and the floor in turn, on a fresh replica set, several rounds; median ratios and a table.
//!
//! The floor of a workload is what the same target writes take from a client that already knows them, in bulk commands of
//! a good size, from two connections, on the same server in the same run. Absolute times are of this machine and this hour;
//! ratios and CPU seconds are what to look at. With `BEFORE`, the path of another denormd, both programs do the same work in
//! turn instead.

mod bare;
mod bench;
mod copies;
mod drain;
mod first;
mod live;
mod neighbour;
mod pairs;
mod partitions;
mod peer;
mod process;
mod scale;
mod scan;
mod workloads;

use std::{env, path::PathBuf};

use bench::Bench;

#[tokio::main]
async fn main() {
    let only = env::var("ONLY").unwrap_or_default();
    let wanted = |name: &str| only.is_empty() || only.split(',').any(|word| name.starts_with(word.trim()));
    let bench = Bench::start(rounds()).await;
    println!("MongoDB {}, {} cores", bench.version().await, bench::cores());
    let before = env::var_os("BEFORE").filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(before) = &before {
        for workload in workloads::all().iter().filter(|workload| wanted(workload.name)) {
            pairs::drains(&bench, before, workload).await;
        }
        if wanted("live") {
            pairs::live(&bench, before).await;
        }
        if wanted("rules") {
            pairs::rules(&bench, before).await;
        }
        if wanted("neighbour") {
            neighbour::measure(&bench, Some(before)).await;
        }
        return;
    }
    let mut drains = Vec::new();
    for workload in workloads::all().iter().filter(|workload| wanted(workload.name)) {
        drains.push(drain::measure(&bench, workload).await);
    }
    if !drains.is_empty() {
        drain::print(&drains);
    }
    if wanted("live") {
        live::measure(&bench).await;
    }
    if wanted("neighbour") {
        neighbour::measure(&bench, None).await;
    }
    if wanted("rules") {
        scale::rules(&bench).await;
    }
    if wanted("documents") {
        scale::documents(&bench).await;
    }
    if wanted("backfill") {
        scan::measure(&bench).await;
    }
    if wanted("first") {
        first::measure(&bench).await;
    }
    if wanted("partitions") {
        partitions::measure(&bench).await;
    }
    if wanted("copies") {
        copies::measure(&bench).await;
    }
    if wanted("peer") {
        peer::measure(&bench).await;
    }
}

fn rounds() -> usize {
    let rounds = env::var("ROUNDS").ok().filter(|text| !text.is_empty());
    rounds.map_or(5, |text| text.parse().expect("ROUNDS is a number"))
}
