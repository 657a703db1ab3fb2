//! The updates of a target that the server sends, by the fields that they change.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_engine::{
    change::{Change, ChangeEvent},
    watch::{nested, streams},
};
use denormd_mongo::Server;
use denormd_rules::{
    config::{Format, load_str},
    plan::compile,
};

use crate::support::daemon::PATIENCE;
use crate::support::daemon::{Daemon, all};

/// The `_id`s of the delivered updates, among those that `changes` makes to `before`: the same with few and many rules,
/// for which the stream's filter names collections in different ways.
async fn delivered(rule: &str, before: &Document, changes: &[Document]) -> BTreeSet<i32> {
    let alone = delivered_among(0, rule, before, changes).await;
    for others in [10, 60] {
        assert_eq!(delivered_among(others, rule, before, changes).await, alone, "among {others} rules");
    }
    alone
}

async fn delivered_among(others: i32, rule: &str, before: &Document, changes: &[Document]) -> BTreeSet<i32> {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let other = |nth| {
        format!(
            "  - {{ name: r{nth}, copy: {{ source: s{nth}, target: t{nth}, match: {{ part: _id }}, set: {{ name: $name }} }} }}\n"
        )
    };
    let others: String = (0..others).map(other).collect();
    let head = format!("mongodb: {{ uri: \"mongodb://localhost\", database: {} }}\n", test.name);
    let text = format!("{head}rules:\n  - {rule}\n{others}");
    let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
    let targets = db.collection::<Document>("products");
    for (id, _) in (0..).zip(changes) {
        let mut target = doc! {"_id": id};
        target.extend(before.clone());
        targets.insert_one(target).await.unwrap();
    }
    let server = Server::new(test.client.clone());
    let from = server.operation_time().await.unwrap();
    let nested = nested(&server, &plan).await.unwrap();
    for (id, change) in (0..).zip(changes) {
        let done = targets.update_one(doc! {"_id": id}, change.clone()).await.unwrap();
        assert_eq!(done.modified_count, 1, "{change}");
    }
    db.collection("of_no_rule").insert_one(doc! {"_id": 0}).await.unwrap();
    targets.drop().await.unwrap();
    let spec = streams(&plan, &nested).remove(0);
    let mut pipeline = vec![doc! {"$changeStream": {"startAtOperationTime": bson::Timestamp::from(from)}}];
    pipeline.extend(spec.pipeline);
    let command = doc! {"aggregate": 1, "pipeline": pipeline, "cursor": {}, "readConcern": {"level": "majority"}};
    let mut batches = server.follow(&test.name, command, 100, Duration::from_millis(100)).await.unwrap();
    let mut found = BTreeSet::new();
    let begun = Instant::now();
    while let Some(batch) = batches.next().await.unwrap() {
        assert!(begun.elapsed() < PATIENCE, "the end is not delivered");
        for raw in batch.doc_slices().unwrap() {
            let event = ChangeEvent::decode(raw.unwrap().as_document().unwrap()).unwrap();
            assert_eq!(event.namespace.collection, "products");
            match event.change {
                Change::Update(_) => found.insert(event.id.as_i32().unwrap()),
                Change::Drop => return found,
                _ => false,
            };
        }
    }
    unreachable!("a stream does not end");
}

const PRICES: &str = "{ name: names, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, price: $price } } }";

/// All updates of `changes` except the first `held` are delivered.
async fn all_but(held: usize, rule: &str, before: &Document, changes: &[Document]) {
    let expected: BTreeSet<i32> = (0..).take(changes.len()).skip(held).collect();
    assert_eq!(delivered(rule, before, changes).await, expected, "{rule}");
}

#[tokio::test]
async fn updates_that_may_move_a_reference_are_sent_and_our_own_are_not() {
    let before = doc! {"part": 1, "name": "x", "price": 1, "stock": 1};
    let changes = [
        doc! {"$set": {"name": "y"}},
        doc! {"$set": {"name": "y", "price": 2}},
        // Not ours, but no field that a rule reads.
        doc! {"$set": {"name": "y", "stock": 2}},
        doc! {"$set": {"part": 2}},
        doc! {"$set": {"part": 2, "name": "y"}},
        doc! {"$set": {"part": {"a": 1}, "name": "y"}},
        doc! {"$unset": {"part": 1}},
        doc! {"$unset": {"part": 1}, "$set": {"name": "y"}},
        doc! {"$set": {"stock": 2}},
        doc! {"$unset": {"name": 1}},
    ];
    all_but(3, PRICES, &before, &changes).await;
}

/// A created document refers only by its `_id`. The search for references that are documents had no path and failed, so every write of
/// denormd's own was sent.
#[tokio::test]
async fn our_own_writes_to_created_documents_are_not_sent() {
    const TOTALS: &str = "{ name: totals, aggregate: { source: sales, target: { collection: products, create: true }, match: { _id: item }, set: { n: { $sum: 1 } } } }";
    let changes = [doc! {"$set": {"n": 2}}, doc! {"$set": {"note": "mine"}}, doc! {"$unset": {"note": 1}}];
    all_but(1, TOTALS, &doc! {"n": 1, "note": "ours"}, &changes).await;
}

/// They once counted as our own, and the copy stayed wrong.
#[tokio::test]
async fn updates_that_change_a_reference_from_inside_are_sent_whatever_else_they_write() {
    let document = doc! {"part": {"a": 1}, "name": "x", "price": 1};
    let inside = [
        doc! {"$set": {"part.a": 2, "name": "y"}},
        doc! {"$set": {"part.b": 2, "name": "y", "price": 2}},
        doc! {"$unset": {"part.a": 1}, "$set": {"name": "y"}},
    ];
    all_but(0, PRICES, &document, &inside).await;
    let cities =
        "{ name: names, copy: { source: parts, target: products, match: { at.city: _id }, set: { name: $name } } }";
    let changes = [doc! {"$set": {"at.city": 2, "name": "y"}}, doc! {"$unset": {"at.city": 2}, "$set": {"name": "y"}}];
    all_but(0, cities, &doc! {"at": {"city": 1}, "name": "x"}, &changes).await;
    let into = r#"{ name: names, copy: { source: parts, target: products, match: { "parts.$[]": _id }, into: info, element: $name } }"#;
    let changes = [doc! {"$set": {"parts.0": 2, "info": []}}, doc! {"$pop": {"parts": 1}, "$set": {"info": []}}];
    all_but(0, into, &doc! {"parts": [1, 3], "info": [1]}, &changes).await;
}

const PLACES: &str = "
  - { name: cities, copy: { source: cities, target: people, match: { address.city_id: _id }, set: { city_name: $name } } }
  - { name: places, copy: { source: places, target: visits, match: { place: _id }, set: { name: $name } } }
";

/// An application writes the copy and changes the reference in the same update: `wait` once reported that all was
/// applied.
#[tokio::test(flavor = "multi_thread")]
async fn a_reference_that_is_changed_from_inside_beside_an_owned_field_moves_the_copy() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    for (id, name) in [(1, "one"), (2, "two")] {
        db.collection("cities").insert_one(doc! {"_id": id, "name": name}).await.unwrap();
        db.collection("places").insert_one(doc! {"_id": {"x": id}, "name": name}).await.unwrap();
    }
    db.collection("people").insert_one(doc! {"_id": 1, "address": {"city_id": 1}}).await.unwrap();
    let visits = db.collection::<Document>("visits");
    visits.insert_one(doc! {"_id": 1, "place": 7}).await.unwrap();
    let daemon = Daemon::start(&test, PLACES).await;
    daemon.settled().await;
    let change = doc! {"$set": {"address.city_id": 2, "city_name": "old"}};
    db.collection::<Document>("people").update_one(doc! {}, change).await.unwrap();
    // A reference becomes a document while the stream treats it as a scalar, in each possible way.
    visits.update_one(doc! {"_id": 1}, doc! {"$set": {"place": {"x": 1}}}).await.unwrap();
    visits.insert_one(doc! {"_id": 2, "place": {"x": 1}}).await.unwrap();
    for _ in 0..2 {
        daemon.settled().await;
    }
    let change = doc! {"$set": {"place.x": 2, "name": "old"}};
    visits.update_many(doc! {}, change.clone()).await.unwrap();
    daemon.settled().await;
    let people = doc! {"_id": 1, "address": {"city_id": 2}, "city_name": "two"};
    assert_eq!(all(&db, "people").await, [people]);
    let moved = |id: i32| doc! {"_id": id, "place": {"x": 2}, "name": "two"};
    assert_eq!(all(&db, "visits").await, [moved(1), moved(2)]);
    daemon.stop().await;
    // A daemon that starts finds documents there.
    let daemon = Daemon::start(&test, PLACES).await;
    daemon.settled().await;
    visits.update_many(doc! {}, doc! {"$set": {"place.x": 1, "name": "old"}}).await.unwrap();
    daemon.settled().await;
    let back = |id: i32| doc! {"_id": id, "place": {"x": 1}, "name": "one"};
    assert_eq!(all(&db, "visits").await, [back(1), back(2)]);
    daemon.stop().await;
}

/// All at once, in one batch of the stream: from the first event with a document on, nothing is filtered out.
#[tokio::test(flavor = "multi_thread")]
async fn a_reference_that_becomes_a_document_and_changes_at_once_moves_the_copy() {
    for way in ["update", "insert", "replace", "rename"] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        for (id, name) in [(1, "one"), (2, "two")] {
            db.collection("places").insert_one(doc! {"_id": {"x": id}, "name": name}).await.unwrap();
        }
        for name in ["cities", "people"] {
            db.create_collection(name).await.unwrap();
        }
        let visits = db.collection::<Document>("visits");
        visits.insert_one(doc! {"_id": 1, "place": 7}).await.unwrap();
        let daemon = Daemon::start(&test, PLACES).await;
        daemon.settled().await;
        let document = doc! {"_id": 1, "place": {"x": 1}};
        match way {
            "update" => drop(visits.update_one(doc! {}, doc! {"$set": {"place": {"x": 1}}}).await.unwrap()),
            "insert" => {
                visits.delete_one(doc! {}).await.unwrap();
                visits.insert_one(document).await.unwrap();
            }
            "replace" => drop(visits.replace_one(doc! {}, document).await.unwrap()),
            _ => {
                db.collection("other").insert_one(document).await.unwrap();
                let [from, to] = ["other", "visits"].map(|name| format!("{}.{name}", test.name));
                let rename = doc! {"renameCollection": from, "to": to, "dropTarget": true};
                test.client.database("admin").run_command(rename).await.unwrap();
            }
        }
        visits.update_one(doc! {}, doc! {"$set": {"place.x": 2, "name": "old"}}).await.unwrap();
        daemon.settled().await;
        assert_eq!(all(&db, "visits").await, [doc! {"_id": 1, "place": {"x": 2}, "name": "two"}], "{way}");
        daemon.stop().await;
    }
}

#[tokio::test]
async fn updates_of_a_parent_that_is_known_by_its_id_are_not_sent() {
    let rule = "{ name: latest, collect: { source: reviews, target: products, match: { _id: product }, into: reviews, element: { id: $_id }, sort: { date: -1 }, slice: 2 } }";
    let changes = [doc! {"$set": {"reviews": [{"id": 1}]}}, doc! {"$set": {"stock": 1}}];
    assert_eq!(delivered(rule, &doc! {"reviews": []}, &changes).await, BTreeSet::new());
}

#[tokio::test]
async fn updates_of_a_source_are_all_sent() {
    let rule =
        "{ name: names, copy: { source: products, target: others, match: { part: _id }, set: { name: $name } } }";
    let changes = [doc! {"$set": {"name": "y"}}, doc! {"$set": {"stock": 1}}];
    assert_eq!(delivered(rule, &doc! {"name": "x"}, &changes).await, BTreeSet::from([0, 1]));
}
