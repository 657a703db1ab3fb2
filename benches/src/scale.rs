//! Shows that the cost follows the changes: neither the number of rules nor the documents that do not change.

use bson::{Document, doc};
use denormd_show::{
    figures::median,
    host,
    print::{bold, count, dim, heading},
};
use mongodb::Database;

use crate::bench::{Bench, Cost, Running, insert, update};

const SOURCES: i32 = 10_000;
/// Changes in one measurement.
pub const CHANGES: usize = 10_000;
/// Numbers of rules.
pub const RULES: [usize; 4] = [1, 10, 100, 500];

/// The same changes of one rule's source, among more and more rules.
pub async fn rules(bench: &Bench) {
    heading("10,000 changes of one rule's source, among more and more rules");
    println!(
        "  {:<12}{:>10}{:>16}{:>16}{:>14}{:>16}",
        "rules", "drain", "server CPU", "daemon CPU", "in all", "memory at rest"
    );
    let mut first = None;
    for number in RULES {
        let database = bench.fresh().await;
        let rules = load_rules(&database, number).await;
        line(bench, &database, &rules, number, &count(number), &mut first).await;
    }
}

/// The same changes, beside more and more documents that do not change.
pub async fn documents(bench: &Bench) {
    heading("10,000 changes, in collections that grow by documents that do not change");
    let most: usize = std::env::var("DOCUMENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(1_000_000);
    println!(
        "  {:<12}{:>10}{:>16}{:>16}{:>14}{:>16}",
        "documents", "drain", "server CPU", "daemon CPU", "in all", "memory at rest"
    );
    let mut first = None;
    let database = bench.fresh().await;
    load(&database).await;
    let rules =
        "  - name: rule0\n    copy: { source: parts, target: products, match: { part: _id }, set: { name: $name } }\n";
    let (mut there, mut wanted) = (0_usize, 10_000);
    while wanted <= most {
        let from = i32::try_from(there).unwrap_or(i32::MAX) + SOURCES;
        let to = i32::try_from(wanted).unwrap_or(i32::MAX) + SOURCES;
        for step in (from..to).step_by(100_000) {
            let ids = || step..to.min(step + 100_000);
            insert(&database, "parts", ids().map(|id| doc! {"_id": id, "name": "same"}).collect()).await;
            insert(&database, "products", ids().map(|id| doc! {"_id": id, "part": id, "name": "same"}).collect()).await;
        }
        there = wanted;
        bench.forget().await;
        line(bench, &database, rules, 1, &count(wanted), &mut first).await;
        wanted *= 10;
    }
    println!("{}", dim("  DOCUMENTS=10000000 goes on to ten million."));
}

/// Writes the documents of so many rules, and returns these rules. Only the sources of the first one change.
pub async fn load_rules(database: &Database, number: usize) -> String {
    load(database).await;
    let mut rules = String::new();
    for nth in 0..number {
        let (source, target) =
            if nth == 0 { ("parts".into(), "products".into()) } else { (format!("s{nth}"), format!("t{nth}")) };
        rules.push_str(&format!(
            "  - name: rule{nth}\n    copy: {{ source: {source}, target: {target}, match: {{ part: _id }}, set: {{ name: $name }} }}\n"
        ));
        if nth > 0 {
            insert(database, &target, vec![doc! {"_id": 1, "part": 1}]).await;
            insert(database, &source, vec![doc! {"_id": 1, "name": "x"}]).await;
        }
    }
    rules
}

async fn load(database: &Database) {
    insert(database, "parts", (0..SOURCES).map(|id| doc! {"_id": id, "name": "part"}).collect()).await;
    insert(database, "products", (0..SOURCES).map(|id| doc! {"_id": id, "part": id}).collect()).await;
}

/// Renames all sources while the daemon is held, and returns what it cost to work that off.
pub async fn drained(bench: &Bench, database: &Database, daemon: &Running, name: &str) -> Cost {
    let write = async {
        let name = format!("name {name}");
        let renames: Vec<Document> =
            (0..SOURCES).map(|id| doc! {"q": {"_id": id}, "u": {"$set": {"name": &name}}}).collect();
        update(database, "parts", &renames).await;
    };
    daemon.held(write).await;
    let begin = bench.spent(Some(daemon));
    daemon.applied().await;
    bench.since(begin, Some(daemon))
}

async fn line(bench: &Bench, database: &Database, rules: &str, number: usize, name: &str, first: &mut Option<f64>) {
    let daemon = bench.daemon(rules, number).await;
    let memory = host::memory(daemon.pid()).0;
    let mut costs: Vec<Cost> = Vec::new();
    for round in 0..=bench.rounds {
        let cost = drained(bench, database, &daemon, &format!("{number} {name} {round}")).await;
        if round > 0 {
            costs.push(cost);
        }
    }
    daemon.stop().await;
    let of = |what: fn(&Cost) -> f64| median(&costs.iter().map(what).collect::<Vec<_>>());
    let each = |seconds: f64| seconds / f64::from(SOURCES) * 1e6;
    let all = of(|cost| cost.server + cost.daemon);
    let ratio = all / *first.get_or_insert(all);
    println!(
        "  {name:<12}{:>8.2} s{:>11.1} ms{:>13.1} ms{:>14}{:>13.0} MB",
        of(|cost| cost.wall),
        each(of(|cost| cost.server)),
        each(of(|cost| cost.daemon)),
        bold(&format!("{ratio:.2}")),
        memory
    );
}
