//! Backfill and check of a whole collection, beside the same done inside the server by one aggregation.

use bson::{Document, doc};
use denormd_show::{
    figures::spread,
    print::{bold, count, heading},
};
use mongodb::Database;

use crate::bench::{Bench, Cost, insert};

const SOURCES: i32 = 20_000;
const TARGETS: i32 = 200_000;
/// The fields of the products that [`RULES`] writes.
pub const COPIED: &[&str] = &["name", "price"];
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
    let mut pairs: [Vec<(Cost, Cost)>; 4] = Default::default();
    for round in 0..=bench.rounds {
        let backfill = async || daemon.command(&["backfill", "--rule", "names"]);
        let check = async || daemon.command(&["check"]);
        forget(&database, COPIED).await;
        daemon.applied().await;
        let filled = spent(bench, backfill).await;
        let merge = async || merge(&database, copies()).await;
        let merged = async {
            forget(&database, COPIED).await;
            spent(bench, merge).await
        };
        let merged = daemon.held(merged).await;
        daemon.applied().await;
        let silent = spent(bench, backfill).await;
        let looked = daemon.held(spent(bench, merge)).await;
        daemon.applied().await;
        let checked = spent(bench, check).await;
        let compared = daemon.held(spent(bench, async || compare(&database).await)).await;
        println!(
            "  backfill {:>6.2} s  $merge {:>6.2} s   nothing to write {:>6.2} s  $merge {:>6.2} s   check {:>6.2} s  $lookup {:>6.2} s",
            filled.wall, merged.wall, silent.wall, looked.wall, checked.wall, compared.wall
        );
        if round > 0 {
            let measured = [(merged, filled), (looked, silent), (compared, checked), (looked, checked)];
            pairs.iter_mut().zip(measured).for_each(|(pairs, pair)| pairs.push(pair));
        }
    }
    println!("  {:<48}{:>20}{:>24}", "", "time", "CPU of the server");
    for (name, pairs) in [
        "$merge / backfill",
        "$merge / backfill that finds nothing to write",
        "$lookup / check",
        "$merge that finds nothing / check",
    ]
    .iter()
    .zip(&pairs)
    {
        let ratio =
            |what: fn(&Cost) -> f64| pairs.iter().map(|(one, other)| what(one) / what(other)).collect::<Vec<_>>();
        let (time, server) = (spread(&ratio(|cost| cost.wall), 2), spread(&ratio(|cost| cost.server), 2));
        println!("  {name:<48}{:>20}{server:>24}", bold(&time));
    }
    daemon.stop().await;
}

/// The cost of some work, with a server that is at rest when it begins.
async fn spent(bench: &Bench, work: impl AsyncFnOnce()) -> Cost {
    bench.at_rest().await;
    let started = bench.spent(None);
    work().await;
    bench.since(started, None)
}

/// Removes these fields of all products.
pub async fn forget(database: &Database, fields: &[&str]) {
    let unset: Document = fields.iter().map(|field| ((*field).to_owned(), "".into())).collect();
    let products = database.collection::<Document>("products");
    products.update_many(doc! {}, doc! {"$unset": unset}).await.expect("an update");
}

/// Writes what these stages make of the products into them.
pub async fn merge(database: &Database, mut stages: Vec<Document>) {
    stages.push(doc! {"$merge": {"into": "products", "whenMatched": "merge", "whenNotMatched": "discard"}});
    run(database, stages).await;
}

/// The stages that compute the copies of [`RULES`].
pub fn copies() -> Vec<Document> {
    let mut stages = looked_up();
    stages.push(doc! {"$project": {"name": "$s.name", "price": "$s.price"}});
    stages
}

async fn compare(database: &Database) {
    let mut pipeline = looked_up();
    pipeline
        .push(doc! {"$match": {"$expr": {"$or": [{"$ne": ["$name", "$s.name"]}, {"$ne": ["$price", "$s.price"]}]}}});
    pipeline.push(doc! {"$count": "differ"});
    run(database, pipeline).await;
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
