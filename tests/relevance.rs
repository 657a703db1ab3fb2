//! Which updates of a target the server sends: by what they change.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd::{
    change::{Change, ChangeEvent},
    config::{Format, load_str},
    mongo::Server,
    plan::compile,
    watch::streams,
};

/// The `_id`s of updates that are delivered, of those that `changes` makes to `before`: the same among few and many rules,
/// whose collections the stream's filter names in different ways.
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
    for (id, change) in (0..).zip(changes) {
        let done = targets.update_one(doc! {"_id": id}, change.clone()).await.unwrap();
        assert_eq!(done.modified_count, 1, "{change}");
    }
    db.collection("of_no_rule").insert_one(doc! {"_id": 0}).await.unwrap();
    targets.drop().await.unwrap();
    let spec = streams(&plan).remove(0);
    let mut pipeline = vec![doc! {"$changeStream": {"startAtOperationTime": bson::Timestamp::from(from)}}];
    pipeline.extend(spec.pipeline);
    let command = doc! {"aggregate": 1, "pipeline": pipeline, "cursor": {}, "readConcern": {"level": "majority"}};
    let mut batches = server.follow(&test.name, command, 100, Duration::from_millis(100)).await.unwrap();
    let mut found = BTreeSet::new();
    let begun = Instant::now();
    while let Some(batch) = batches.next().await.unwrap() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the end is not delivered");
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

#[tokio::test]
async fn updates_that_may_move_a_reference_are_sent_and_our_own_are_not() {
    let rule = "{ name: names, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, price: $price } } }";
    let before = doc! {"part": {"a": 1}, "name": "x", "price": 1, "stock": 1};
    let held = [
        doc! {"$set": {"name": "y"}},
        doc! {"$set": {"name": "y", "price": 2}},
        // Not ours, but nothing that a rule reads.
        doc! {"$set": {"name": "y", "stock": 2}},
    ];
    let sent = [
        doc! {"$set": {"part": 2}},
        doc! {"$set": {"part": 2, "name": "y"}},
        doc! {"$set": {"part.a": 2}},
        doc! {"$set": {"part.b": 2}},
        doc! {"$unset": {"part": 1}},
        doc! {"$unset": {"part": 1}, "$set": {"name": "y"}},
        doc! {"$unset": {"part.a": 1}},
        doc! {"$set": {"stock": 2}},
        doc! {"$unset": {"name": 1}},
    ];
    let changes: Vec<Document> = held.iter().chain(&sent).cloned().collect();
    let expected: BTreeSet<i32> = (0..).take(changes.len()).skip(held.len()).collect();
    assert_eq!(delivered(rule, &before, &changes).await, expected);
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
