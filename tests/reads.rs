//! What a read looks at: the sources of its keys, however large the collection is.

use bson::{Bson, Document, doc};
use denormd::{key::Key, reconcile::read};
use mongodb::{Database, IndexModel};

use crate::daemon::rule;

/// Rules that need their sources in an order.
const RULES: [&str; 5] = [
    "aggregate: { source: s, target: t, match: { _id: part }, set: { mean: { $avg: $rating } } }",
    "aggregate: { source: s, target: t, match: { _id: part }, set: { mean: { $avg: $rating } }, sort: { at: -1 } }",
    "collect: { source: s, target: t, match: { _id: part }, into: all, element: { rating: $rating } }",
    "collect: { source: s, target: t, match: { _id: part }, into: all, element: { rating: $rating }, sort: { at: -1 } }",
    "copy: { source: s, target: t, match: { _id: part }, sort: { at: -1 }, set: { rating: $rating } }",
];
const PARTS: i32 = 5000;
const EACH: i32 = 4;
/// Of so many keys the server once preferred an index that promised the order, and went through the whole collection.
const KEYS: i32 = 1000;

/// The rows of keys; what was found by an element of an array is of none.
async fn rows(database: &Database, command: &Document) -> usize {
    let reply = database.run_command(command.clone()).await.unwrap();
    let rows = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
    let of_a_key = |row: &&Bson| row.as_document().unwrap().get_array("k").unwrap()[0].as_i32().is_some();
    rows.iter().filter(of_a_key).count()
}

/// The documents that were looked at, anywhere in what `explain` says.
fn examined(plan: &Bson) -> i64 {
    match plan {
        Bson::Document(doc) => doc
            .iter()
            .map(|(name, value)| match value {
                Bson::Int32(n) if name == "totalDocsExamined" => i64::from(*n),
                Bson::Int64(n) if name == "totalDocsExamined" => *n,
                value => examined(value),
            })
            .sum(),
        Bson::Array(items) => items.iter().map(examined).sum(),
        _ => 0,
    }
}

#[tokio::test]
async fn a_read_of_many_keys_looks_at_their_sources_alone() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    let source = |id: i32| doc! {"_id": id, "part": id % PARTS, "rating": 0.1 * f64::from(id % 7), "at": id % 11};
    sources.insert_many((0..PARTS * EACH).map(source)).await.unwrap();
    // Two arrays cannot be sorted by; such a source belongs to no key.
    sources.insert_one(doc! {"_id": "arrays", "part": [1, 2], "rating": 5, "at": [1, 2]}).await.unwrap();
    for keys in [doc! {"part": 1}, doc! {"at": 1}] {
        sources.create_index(IndexModel::builder().keys(keys).build()).await.unwrap();
    }
    let keys: Vec<Key> = (0..KEYS).map(|part| Key::one(Bson::Int32(part))).collect();
    let keys: Vec<&Key> = keys.iter().collect();
    for text in RULES {
        let rule = rule(text);
        let command = read::sources(&rule, &keys);
        let found = rows(&database, &command).await;
        assert!(found == KEYS as usize || found == (KEYS * EACH) as usize, "{text}: {found}");
        let plan = database.run_command(doc! {"explain": command, "verbosity": "executionStats"}).await.unwrap();
        let examined = examined(&plan.into());
        assert!(examined <= i64::from(KEYS * EACH) + 1, "{text}: {examined} looked at");
    }
}
