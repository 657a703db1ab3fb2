//! The removal limit covers every way in which a target loses values for want of a source, and counts each loss once.

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::rule_state::{BlockReason, RuleState};

use crate::{
    engine::fan_outs::fail,
    support::daemon::{Daemon, all, config, until},
};

/// Of thirty orders, ten may lose values in an hour.
async fn with_limit(test: &TestDb, rule: &str) -> Daemon {
    let text = config(test, &format!("  - {{ name: r, allow_scan: true, {rule} }}"));
    Daemon::start_config(&text.replace("limits: {", "limits: { destroy_per_hour: 10,")).await
}

/// Thirty orders, each with a line for item 1. Items 2 and 3 stay.
async fn orders(test: &TestDb) {
    let db = test.database();
    let item = |id: i32| {
        let mut item = doc! {"_id": id, "price": 2, "name": "part", "tags": ["a"], "active": id < 3};
        item.extend((id == 1).then(|| ("alias".to_owned(), "first".into())));
        item
    };
    db.collection("items").insert_many((1..4).map(item)).await.unwrap();
    let link = || doc! {"$ref": "items", "$id": 1};
    let order = |n: i32| {
        doc! {
            "_id": n, "item": 1, "qty": 3, "items": [1, 2], "lines": [{"item": 1, "qty": 3}],
            "boxes": [{"lines": [{"item": 1}], "links": [link()]}, {"lines": [{"item": 2}]}], "links": [link()],
            "pairs": [{"item": 1}, {"item": 2}],
        }
    };
    db.collection("orders").insert_many((0..30).map(order)).await.unwrap();
}

async fn is_blocked(daemon: &Daemon) {
    let blocked = RuleState::Blocked(BlockReason::RemovalLimit);
    until("the rule is blocked", async || (daemon.progress().borrow().states[0] == blocked).then_some(())).await;
}

/// Values of elements and values that are no scalars were replaced by those of `otherwise` without limit, and so were the elements
/// of an array of references by null.
#[tokio::test]
async fn every_form_of_a_loss_counts() {
    for rule in [
        "copy: { source: items, target: orders, match: { 'lines.$[].item': _id }, \
         set: { 'lines.$[].total': { $multiply: [$price, $$targetElement.qty] } }, otherwise: { 'lines.$[].total': 0 } }",
        "copy: { source: items, target: orders, match: { 'lines.$[].item': _id }, set: { 'lines.$[].name': $name }, \
         otherwise: { 'lines.$[].name': unknown } }",
        "copy: { source: items, target: orders, match: { 'boxes.$[].lines.$[].item': _id }, set: { 'boxes.$[].lines.$[].name': $name } }",
        "copy: { source: items, target: orders, match: { 'links.$[].$id': _id }, set: { 'links.$[].name': $name } }",
        "copy: { source: items, target: orders, match: { 'boxes.$[].links.$[].$id': _id }, set: { 'boxes.$[].links.$[].name': $name } }",
        // The other item has no such field.
        "copy: { source: items, target: orders, match: { 'pairs.$[].item': _id }, set: { 'pairs.$[].none': $none, first: $alias } }",
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, set: { first: $alias } }",
        "copy: { source: items, target: orders, match: { item: _id }, \
         set: { total: { $multiply: [$price, $$target.qty] }, tags: $tags }, otherwise: { total: 0, tags: [] } }",
        "copy: { source: items, target: orders, match: { item: _id }, set: { tags: $tags }, otherwise: { tags: [] } }",
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, into: names, element: $name, on_missing: 'null' }",
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, into: names, element: $name, on_missing: 'null', touch: at }",
    ] {
        let test = denormd_fixture::database().await;
        orders(&test).await;
        let daemon = with_limit(&test, rule).await;
        daemon.settled().await;
        let before = all(&test.database(), "orders").await;
        test.database().collection::<Document>("items").delete_one(doc! {"_id": 1}).await.unwrap();
        is_blocked(&daemon).await;
        daemon.settled().await;
        let after = all(&test.database(), "orders").await;
        let kept = before.iter().zip(&after).filter(|(before, after)| before == after).count();
        assert!(kept >= 20, "{rule}: {kept} keep their values");
        daemon.stop().await;
    }
}

/// Each change of a source that its rule's `where` leaves out counted all orders that refer to it, and so did each backfill.
#[tokio::test]
async fn what_otherwise_says_is_nothing_to_lose() {
    for rule in [
        "copy: { source: { collection: items, where: { active: true } }, target: orders, match: { 'lines.$[].item': _id }, \
         set: { 'lines.$[].name': $name }, otherwise: { 'lines.$[].name': unknown } }",
        "copy: { source: { collection: items, where: { active: true } }, target: orders, match: { item: _id }, \
         set: { tags: $tags, name: $name }, otherwise: { tags: [], name: { no: 0.0 } } }",
        "copy: { source: { collection: items, where: { active: true } }, target: orders, match: { item: _id }, \
         set: { tags: $tags, total: { $multiply: [$price, $$target.qty] } }, otherwise: { tags: [], total: 0 } }",
        "copy: { source: { collection: items, where: { active: true } }, target: orders, match: { 'lines.$[].item': _id }, \
         set: { 'lines.$[].total': $$targetElement.qty }, otherwise: { 'lines.$[].total': $$targetElement.list } }",
        "copy: { source: { collection: items, where: { active: true } }, target: orders, \
         match: { 'boxes.$[].lines.$[].item': _id }, set: { 'boxes.$[].lines.$[].name': $name }, on_missing: 'null' }",
    ] {
        let test = denormd_fixture::database().await;
        orders(&test).await;
        let db = test.database();
        let orders = db.collection::<Document>("orders");
        let lines = vec![doc! {"item": 3, "qty": 1, "list": 5}, doc! {"item": 3, "qty": 2, "list": 9}];
        let boxes = vec![doc! {"lines": &lines}, doc! {"lines": [{"item": 2}, {"item": 3}]}];
        orders.update_many(doc! {}, doc! {"$set": {"item": 3, "lines": lines, "boxes": boxes}}).await.unwrap();
        let daemon = with_limit(&test, rule).await;
        daemon.settled().await;
        for price in 3..6 {
            let set = doc! {"$set": {"price": price, "name": format!("part {price}")}};
            db.collection::<Document>("items").update_one(doc! {"_id": 3}, set).await.unwrap();
            orders.update_many(doc! {}, doc! {"$set": {"lines.0.list": price}}).await.unwrap();
            daemon.settled().await;
        }
        daemon.start_backfill("r").await;
        daemon.settled().await;
        assert_eq!(daemon.progress().borrow().states[0], RuleState::Live, "{rule}");
        daemon.stop().await;
    }
}

/// Each order with a reference that found no source counted whenever another of its sources was renamed.
#[tokio::test]
async fn a_new_value_from_one_of_several_sources_is_no_loss() {
    for rule in [
        "copy: { source: items, target: orders, match: { 'lines.$[].item': _id }, set: { 'lines.$[].name': $name, first: $name } }",
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, set: { first: $name }, otherwise: { first: none } }",
    ] {
        let test = denormd_fixture::database().await;
        orders(&test).await;
        let db = test.database();
        let set = doc! {"$set": {"items": [1, 99], "lines": [{"item": 1}, {"item": 99}]}};
        db.collection::<Document>("orders").update_many(doc! {}, set).await.unwrap();
        let daemon = with_limit(&test, rule).await;
        daemon.settled().await;
        let renamed = doc! {"$set": {"name": "new"}};
        db.collection::<Document>("items").update_one(doc! {"_id": 1}, renamed).await.unwrap();
        daemon.settled().await;
        let orders = db.collection::<Document>("orders");
        assert_eq!(orders.count_documents(doc! {"first": "new"}).await.unwrap(), 30, "{rule}");
        // Without any source, it is a loss.
        db.collection::<Document>("items").delete_one(doc! {"_id": 1}).await.unwrap();
        is_blocked(&daemon).await;
        daemon.stop().await;
    }
}

/// Each attempt of a batch, and of each half of it, was counted again and blocked the rule.
#[tokio::test]
async fn a_loss_in_an_array_that_is_tried_again_counts_once() {
    for rule in [
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, into: names, element: $name }",
        "copy: { source: items, target: orders, match: { 'items.$[]': _id }, into: names, element: $name, touch: at }",
        "copy: { source: items, target: orders, match: { 'lines.$[].item': _id }, \
         set: { 'lines.$[].total': { $multiply: [$price, $$targetElement.qty] } } }",
    ] {
        let set = ReplicaSet::start(1).await;
        let test = set.database().await;
        orders(&test).await;
        let db = test.database();
        let few = doc! {"_id": {"$gte": 8}};
        let other = doc! {"$set": {"items": [2], "lines": [{"item": 2, "qty": 1}]}};
        db.collection::<Document>("orders").update_many(few, other).await.unwrap();
        let daemon = with_limit(&test, rule).await;
        daemon.settled().await;
        let before = all(&db, "orders").await;
        let refused = doc! {"failCommands": ["update"], "namespace": format!("{}.orders", test.name), "errorCode": 112};
        fail(&test, doc! {"times": 4}, refused).await;
        db.collection::<Document>("items").delete_one(doc! {"_id": 1}).await.unwrap();
        until("eight orders have lost a value", async || {
            let after = all(&db, "orders").await;
            (before.iter().zip(&after).filter(|(before, after)| before != after).count() == 8).then_some(())
        })
        .await;
        daemon.settled().await;
        assert!(daemon.progress().borrow().in_state(RuleState::is_stopped).is_empty(), "{rule}: eight of ten are gone");
        daemon.stop().await;
    }
}
