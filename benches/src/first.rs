//! The first backfill of a rule, from the start of the process until the rule is live, beside one aggregation in the server
//! that writes the same.

use std::env;

use bson::{Document, doc};
use denormd_show::{
    figures::{median, spread},
    print::{bold, count, heading},
};
use mongodb::Database;

use crate::{
    bench::{Bench, Cost, insert},
    scan,
};

/// Documents of the larger collection. DOCUMENTS sets another number.
const DOCUMENTS: i32 = 200_000;

/// The documents of two collections, by its name.
type Collections = [(&'static str, Vec<Document>); 2];

/// A rule, its data, and the aggregation.
struct Shape {
    name: &'static str,
    rule: &'static str,
    /// The documents, for this number of them in the larger collection.
    load: fn(i32) -> Collections,
    /// The fields that the rule writes in `products`.
    fields: &'static [&'static str],
    /// The stages of the aggregation on `products` before `$merge`.
    stages: fn() -> Vec<Document>,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "copy",
        rule: scan::RULES,
        load: |documents| {
            let parts = (documents / 10).max(1);
            [
                ("parts", (0..parts).map(|id| doc! {"_id": id, "name": "part", "price": id}).collect()),
                ("products", (0..documents).map(|id| doc! {"_id": id, "part": id % parts, "stock": id % 7}).collect()),
            ]
        },
        fields: scan::COPIED,
        stages: scan::copies,
    },
    Shape {
        name: "aggregate",
        rule: "  - name: stats\n    aggregate: { source: reviews, target: products, match: { _id: product }, set: { review_count: { $sum: 1 }, mean: { $avg: $rating } } }\n",
        load: |documents| reviewed(documents, 4),
        fields: &["review_count", "mean"],
        stages: || {
            let lookup = doc! {"from": "reviews", "localField": "_id", "foreignField": "product", "as": "s"};
            vec![
                doc! {"$lookup": lookup},
                doc! {"$project": {"review_count": {"$size": "$s"}, "mean": {"$avg": "$s.rating"}}},
            ]
        },
    },
    Shape {
        name: "latest five",
        rule: "  - name: latest\n    collect: { source: reviews, target: products, match: { _id: product }, into: reviews, element: { id: $_id, author: $author, date: $date }, sort: { date: -1 }, slice: 5 }\n",
        load: |documents| reviewed(documents, 10),
        fields: &["reviews"],
        stages: || {
            let element = doc! {"_id": 0, "id": "$_id", "author": 1, "date": 1};
            let five = vec![doc! {"$sort": {"date": -1, "_id": 1}}, doc! {"$limit": 5}, doc! {"$project": element}];
            let lookup = doc! {
                "from": "reviews", "localField": "_id", "foreignField": "product", "pipeline": five, "as": "reviews",
            };
            vec![doc! {"$lookup": lookup}, doc! {"$project": {"reviews": 1}}]
        },
    },
];

/// Reviews, and products with this number of reviews each.
fn reviewed(reviews: i32, each: i32) -> Collections {
    let products = (reviews / each).max(1);
    let review =
        |id: i32| doc! {"_id": id, "product": id % products, "rating": id % 5, "author": "somebody", "date": id};
    [
        ("products", (0..products).map(|id| doc! {"_id": id, "name": "a product"}).collect()),
        ("reviews", (0..reviews).map(review).collect()),
    ]
}

/// Measures and prints.
pub async fn measure(bench: &Bench) {
    let documents = env::var("DOCUMENTS").ok().filter(|text| !text.is_empty());
    let documents = documents.map_or(DOCUMENTS, |text| text.parse().expect("DOCUMENTS is a number"));
    heading(&format!(
        "First backfill from the start of the process, {} documents: $lookup and $merge / denormd",
        count(usize::try_from(documents).unwrap_or_default())
    ));
    for shape in &SHAPES {
        let database = bench.fresh().await;
        for (collection, documents) in (shape.load)(documents) {
            insert(&database, collection, documents).await;
        }
        let mut daemon = bench.prepared(None, shape.rule);
        let mut pairs = Vec::new();
        for round in 0..=bench.rounds {
            // Each begins with no copies.
            forget(bench, &database, shape).await;
            bench.forget().await;
            let started = bench.spent(None);
            daemon.start();
            bench.backfilled(1).await;
            let mine = bench.since(started, Some(&daemon));
            daemon.end().await;
            forget(bench, &database, shape).await;
            let started = bench.spent(None);
            scan::merge(&database, (shape.stages)()).await;
            let merged = bench.since(started, None);
            println!("  {:<12} denormd {:>6.2} s   $merge {:>6.2} s", shape.name, mine.wall, merged.wall);
            if round > 0 {
                pairs.push((merged, mine));
            }
        }
        print(shape.name, &pairs);
    }
}

fn print(name: &str, pairs: &[(Cost, Cost)]) {
    let middle = |one: fn(&(Cost, Cost)) -> f64| median(&pairs.iter().map(one).collect::<Vec<_>>());
    let wall: Vec<f64> = pairs.iter().map(|(merged, mine)| merged.wall / mine.wall).collect();
    println!(
        "  {name:<12} {}   medians: denormd {:.2} s, CPU of the daemon {:.2} s, of the server {:.2} s; $merge {:.2} s, CPU of the server {:.2} s",
        bold(&spread(&wall, 2)),
        middle(|(_, mine)| mine.wall),
        middle(|(_, mine)| mine.daemon),
        middle(|(_, mine)| mine.server),
        middle(|(merged, _)| merged.wall),
        middle(|(merged, _)| merged.server),
    );
}

async fn forget(bench: &Bench, database: &Database, shape: &Shape) {
    scan::forget(database, shape.fields).await;
    bench.at_rest().await;
}
