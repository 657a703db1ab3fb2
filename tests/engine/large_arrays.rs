//! Targets whose array has many keys: each target is written once for many of its keys, not once for each.

use std::{sync::atomic::Ordering, time::Instant};

use bson::{Document, doc};
use denormd_fixture::TestDb;
use mongodb::Database;

use crate::support::daemon::Daemon;

const RULE: &str = "  - { name: names, copy: { source: parts, target: products, match: { 'items.$[].part': _id }, set: { 'items.$[].name': $name, 'items.$[].price': $price } } }\n";

/// Inserts a product of this number of elements over this number of parts.
async fn insert_product(db: &Database, elements: i32, parts: i32) {
    let items: Vec<Document> = (0..elements).map(|n| doc! {"part": n % parts}).collect();
    db.collection("products").insert_one(doc! {"_id": 1, "items": items}).await.unwrap();
}

async fn insert_parts(db: &Database, parts: i32) {
    let parts = (0..parts).map(|n| doc! {"_id": n, "name": format!("part {n}"), "price": n});
    db.collection("parts").insert_many(parts).await.unwrap();
}

/// Number of elements that differ from `{ n, part, name, price }` in the current version of their part.
async fn wrong_elements(db: &Database) -> i32 {
    let pipeline = [
        doc! {"$unwind": "$items"},
        doc! {"$lookup": {"from": "parts", "localField": "items.part", "foreignField": "_id", "as": "p"}},
        doc! {"$set": {"p": {"$first": "$p"}}},
        doc! {"$match": {"$expr": {"$or": [{"$ne": ["$items.name", "$p.name"]}, {"$ne": ["$items.price", "$p.price"]}]}}},
        doc! {"$count": "n"},
    ];
    let mut found = db.collection::<Document>("products").aggregate(pipeline).await.unwrap();
    if found.advance().await.unwrap() { found.deserialize_current().unwrap().get_i32("n").unwrap() } else { 0 }
}

/// Counts the targets that statements have matched since the last request.
struct Found<'a>(&'a Daemon, u64);

impl Found<'_> {
    fn more(&mut self) -> u64 {
        let now = self.0.context().counts.matched.load(Ordering::Relaxed);
        now - std::mem::replace(&mut self.1, now)
    }
}

async fn daemon_beside(test: &TestDb, parts: i32) -> (Daemon, Database) {
    let db = test.database();
    insert_parts(&db, parts).await;
    let daemon = Daemon::start(test, RULE).await;
    daemon.settled().await;
    (daemon, db)
}

/// Each of the 1,000 parts once had its own statement, which scanned the whole array: 15 seconds of the server's time
/// for one insert, and as much for a change of all parts.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_array_is_written_once_for_many_of_its_keys() {
    let test = denormd_fixture::database().await;
    let (daemon, db) = daemon_beside(&test, 1000).await;
    let mut found = Found(&daemon, 0);
    insert_product(&db, 5000, 1000).await;
    daemon.settled().await;
    assert_eq!(wrong_elements(&db).await, 0);
    let inserted = found.more();
    assert!(inserted < 150, "{inserted} statements found the product when it was inserted");

    let parts = db.collection::<Document>("parts");
    parts.update_many(doc! {}, vec![doc! {"$set": {"name": {"$concat": ["$name", "!"]}}}]).await.unwrap();
    daemon.settled().await;
    assert_eq!(wrong_elements(&db).await, 0);
    let changed = found.more();
    assert!(changed < 150, "{changed} statements found the product when its parts had changed");

    parts.delete_many(doc! {"_id": {"$lt": 300}}).await.unwrap();
    parts.update_many(doc! {"_id": {"$gte": 700}}, doc! {"$unset": {"price": ""}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(wrong_elements(&db).await, 0);
    let emptied = found.more();
    assert!(emptied < 150, "{emptied} statements found the product when parts had gone");
    daemon.stop().await;
}

/// If there are many targets, they are not written for keys that they do not have.
#[tokio::test(flavor = "multi_thread")]
async fn large_arrays_of_different_keys_have_statements_of_their_own() {
    let test = denormd_fixture::database().await;
    let (daemon, db) = daemon_beside(&test, 160).await;
    let product = |id: i32| {
        let items: Vec<Document> = (0..100).map(|n| doc! {"n": n, "part": id, "text": "x".repeat(100)}).collect();
        doc! {"_id": id, "items": items}
    };
    db.collection("products").insert_many((0..160).map(product)).await.unwrap();
    daemon.settled().await;
    assert_eq!(wrong_elements(&db).await, 0);
    let mut found = Found(&daemon, 0);
    found.more();
    let parts = db.collection::<Document>("parts");
    parts.update_many(doc! {}, doc! {"$set": {"name": "new"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(wrong_elements(&db).await, 0);
    assert!(found.more() >= 160);
    daemon.stop().await;
}

/// `DENORMD_ELEMENTS=300000` creates about as many as a document can hold, 20 for each key.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_of_many_thousand_elements_converges() {
    let elements = std::env::var("DENORMD_ELEMENTS").map_or(40_000, |text| text.parse().unwrap());
    let parts = elements / 20;
    let test = denormd_fixture::database().await;
    let (daemon, db) = daemon_beside(&test, parts).await;
    insert_product(&db, elements, parts).await;
    let begun = Instant::now();
    daemon.settled().await;
    println!("inserted: {:?}", begun.elapsed());
    assert_eq!(wrong_elements(&db).await, 0);
    let parts = db.collection::<Document>("parts");
    let begun = Instant::now();
    parts.update_many(doc! {}, doc! {"$set": {"name": "new"}}).await.unwrap();
    daemon.settled().await;
    println!("changed: {:?}", begun.elapsed());
    assert_eq!(wrong_elements(&db).await, 0);
    assert_eq!(crate::support::cases::dead_letters(&test).await, Vec::<Document>::new());
    daemon.stop().await;
}
