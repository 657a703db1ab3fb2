//! Backfill and check of a whole collection, beside the same done inside the server by one aggregation.

use std::time::Instant;

use bson::{Document, doc};
use denormd_show::{
    figures::spread,
    print::{bold, count, heading},
};
use mongodb::Database;

use crate::bench::{Bench, Running, insert};

const SOURCES: i32 = 20_000;
const TARGETS: i32 = 200_000;
/// A copy of two fields.
pub const RULES: &str = "  - name: names\n    copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, price: $price } }\n";

/// Measures and prints.
pub async fn measure(bench: &Bench) {
    heading(&format!(
        "Backfill and check of {} targets, beside one aggregation in the server",
        count(usize::try_from(TARGETS).unwrap_or_default())
    ));
    let database = bench.fresh().await;
    insert(&database, "parts", (0..SOURCES).map(|id| doc! {"_id": id, "name": "part", "price": id}).collect()).await;
    insert(
        &database,
        "products",
        (0..TARGETS).map(|id| doc! {"_id": id, "part": id % SOURCES, "stock": id % 7}).collect(),
    )
    .await;
    let daemon = bench.daemon(RULES, 1).await;
    let mut ratios: [Vec<f64>; 4] = Default::default();
    for round in 0..=bench.rounds {
        let filled = backfill(&database, &daemon, true).await;
        let merged = merge(&database, true).await;
        let silent = backfill(&database, &daemon, false).await;
        let looked = merge(&database, false).await;
        let checked = check(&daemon);
        let compared = compare(&database).await;
        println!(
            "  backfill {filled:>6.2} s  $merge {merged:>6.2} s   nothing to write {silent:>6.2} s  $merge {looked:>6.2} s   check {checked:>6.2} s  $lookup {compared:>6.2} s"
        );
        if round > 0 {
            for (ratio, value) in
                ratios.iter_mut().zip([merged / filled, looked / silent, compared / checked, looked / checked])
            {
                ratio.push(value);
            }
        }
    }
    for (name, ratio) in [
        "$merge / backfill",
        "$merge / backfill that finds nothing to write",
        "$lookup / check",
        "$merge that finds nothing / check",
    ]
    .iter()
    .zip(&ratios)
    {
        println!("  {name:<48}{}", bold(&spread(ratio, 2)));
    }
    daemon.stop().await;
}

async fn forget(database: &Database) {
    database
        .collection::<Document>("products")
        .update_many(doc! {}, doc! {"$unset": {"name": "", "price": ""}})
        .await
        .expect("an update");
}

async fn backfill(database: &Database, daemon: &Running, all: bool) -> f64 {
    if all {
        // With the fields gone, and the daemon past the events.
        forget(database).await;
    }
    daemon.applied().await;
    let begin = Instant::now();
    daemon.command(&["backfill", "--rule", "names"]);
    begin.elapsed().as_secs_f64()
}

fn check(daemon: &Running) -> f64 {
    let begin = Instant::now();
    daemon.command(&["check"]);
    begin.elapsed().as_secs_f64()
}

async fn merge(database: &Database, all: bool) -> f64 {
    if all {
        forget(database).await;
    }
    let begin = Instant::now();
    merge_all(database).await;
    begin.elapsed().as_secs_f64()
}

/// Writes all copies by one aggregation in the server.
pub async fn merge_all(database: &Database) {
    let mut pipeline = looked_up();
    pipeline.push(doc! {"$project": {"name": "$s.name", "price": "$s.price"}});
    pipeline.push(doc! {"$merge": {"into": "products", "whenMatched": "merge", "whenNotMatched": "discard"}});
    run(database, pipeline).await;
}

async fn compare(database: &Database) -> f64 {
    let begin = Instant::now();
    let mut pipeline = looked_up();
    pipeline
        .push(doc! {"$match": {"$expr": {"$or": [{"$ne": ["$name", "$s.name"]}, {"$ne": ["$price", "$s.price"]}]}}});
    pipeline.push(doc! {"$count": "differ"});
    run(database, pipeline).await;
    begin.elapsed().as_secs_f64()
}

fn looked_up() -> Vec<Document> {
    vec![
        doc! {"$lookup": {"from": "parts", "localField": "part", "foreignField": "_id", "as": "s"}},
        doc! {"$set": {"s": {"$first": "$s"}}},
    ]
}

async fn run(database: &Database, pipeline: Vec<Document>) {
    let command = doc! {"aggregate": "products", "pipeline": pipeline, "cursor": {}, "writeConcern": {"w": "majority"}};
    database.run_command(command).await.expect("an aggregation");
}
