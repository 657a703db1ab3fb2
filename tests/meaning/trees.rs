//! Trees: recursive rules, which read their own output from the parent or from the children.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use std::sync::atomic::Ordering;

use bson::{Bson, DateTime, Document, Timestamp, doc};
use denormd_engine::{
    dead_letter::{Chosen, DeadLetters, Nodes, Offending},
    request::Task,
};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::{key::Key, partition::Partition};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::plan;
use mongodb::Database;

use crate::support::{
    cases::{Case, Write, dead_letters, delete, every_way, insert, now, oplog, replace, update},
    daemon::{self, Daemon, all, load, until},
    process::Program,
};

/// Path, depth and ancestors of a category.
const PATH: &str = "copy: { source: '@c', target: '@c', match: { parent: _id }, recursive: true, \
    set: { path: { $concat: [$path, /, $$target.name] }, depth: { $add: [$depth, 1] }, above: { $concatArrays: [$above, [$_id]] } }, \
    otherwise: { path: $$target.name, depth: 0, above: [] } }";
/// Number of descendants.
const BELOW: &str = "aggregate: { source: '@c', target: '@c', match: { _id: parent }, recursive: true, \
    set: { below: { $sum: { $add: [1, $below] } } } }";

fn plain(rule: &str) -> String {
    format!("  - {{ name: tree, {} }}\n", rule.replace('@', ""))
}

fn node(id: i32, parent: i32, name: &str) -> Document {
    if parent == 0 {
        doc! {"_id": id, "name": name}
    } else {
        doc! {"_id": id, "parent": parent, "name": name}
    }
}

fn with(mut document: Document, fields: Document) -> Document {
    document.extend(fields);
    document
}

fn at(document: Document, path: &str, above: &[i32]) -> Document {
    let depth = i32::try_from(above.len()).unwrap();
    with(document, doc! {"path": path, "depth": depth, "above": above.to_vec()})
}

fn below(document: Document, below: i32) -> Document {
    with(document, doc! {"below": below})
}

fn set(fields: Document) -> Document {
    doc! {"$set": fields}
}

/// 1 → 2 → 3 → 4, 1 → 5, and 6 alone. The deepest document has the lowest place in no order.
fn nodes() -> Vec<Document> {
    vec![node(4, 3, "d"), node(1, 0, "a"), node(3, 2, "c"), node(5, 1, "e"), node(6, 0, "f"), node(2, 1, "b")]
}

fn downwards() -> Vec<Case> {
    let case = |name: &str| Case::new(name, PATH).has("c", nodes());
    vec![
        case("a category path").expect(
            "c",
            [
                at(node(1, 0, "a"), "a", &[]),
                at(node(2, 1, "b"), "a/b", &[1]),
                at(node(3, 2, "c"), "a/b/c", &[1, 2]),
                at(node(4, 3, "d"), "a/b/c/d", &[1, 2, 3]),
                at(node(5, 1, "e"), "a/e", &[1]),
                at(node(6, 0, "f"), "f", &[]),
            ],
        ),
        case("the root is renamed, a subtree moves, and something in it changes at the same time")
            .writes([Write::Burst(vec![
                update("c", 1, set(doc! {"name": "A"})),
                update("c", 2, set(doc! {"parent": 6})),
                update("c", 4, set(doc! {"name": "D"})),
            ])])
            .expect(
                "c",
                [
                    at(node(1, 0, "A"), "A", &[]),
                    at(node(2, 6, "b"), "f/b", &[6]),
                    at(node(3, 2, "c"), "f/b/c", &[6, 2]),
                    at(node(4, 3, "D"), "f/b/c/D", &[6, 2, 3]),
                    at(node(5, 1, "e"), "A/e", &[1]),
                    at(node(6, 0, "f"), "f", &[]),
                ],
            ),
        case("a parent goes, another comes, and a document becomes a root")
            .writes([
                delete("c", 2),
                update("c", 5, doc! {"$unset": {"parent": 1}}),
                update("c", 6, set(doc! {"parent": 7})),
                insert("c", node(7, 5, "g")),
            ])
            .expect(
                "c",
                [
                    at(node(1, 0, "a"), "a", &[]),
                    at(node(3, 2, "c"), "c", &[]),
                    at(node(4, 3, "d"), "c/d", &[3]),
                    at(node(5, 0, "e"), "e", &[]),
                    at(node(6, 7, "f"), "e/g/f", &[5, 7]),
                    at(node(7, 5, "g"), "e/g", &[5]),
                ],
            ),
        Case::new(
            "without `otherwise`, with equal keys of other types, and another rule that reads the path",
            "copy: { source: { collection: '@c', where: { kind: x } }, target: { collection: '@c', where: { kind: x } }, match: { in.up: _id }, \
             recursive: true, set: { in.path: { $concatArrays: [{ $ifNull: [$in.path, []] }, [$_id]] } } }",
        )
        .and("copy: { source: '@c', target: '@p', match: { c: _id }, set: { path: $in.path } }")
        .has("c", (1..=4).map(|n| doc! {"_id": n, "kind": "x", "in": {"up": f64::from(n - 1)}}))
        .has("c", [doc! {"_id": 5, "kind": "y", "in": {"up": 2}}, doc! {"_id": 6, "kind": "x", "in": {"up": [3]}}])
        .has("p", [doc! {"_id": 1, "c": 4}, doc! {"_id": 2, "c": 1}])
        .writes([update("c", 2, set(doc! {"kind": "z"})), update("c", 2, set(doc! {"kind": "x"}))])
        .expect(
            "c",
            [
                doc! {"_id": 1, "kind": "x", "in": {"up": 0.0}},
                doc! {"_id": 2, "kind": "x", "in": {"up": 1.0, "path": [1]}},
                doc! {"_id": 3, "kind": "x", "in": {"up": 2.0, "path": [1, 2]}},
                doc! {"_id": 4, "kind": "x", "in": {"up": 3.0, "path": [1, 2, 3]}},
                doc! {"_id": 5, "kind": "y", "in": {"up": 2}},
                doc! {"_id": 6, "kind": "x", "in": {"up": [3]}},
            ],
        )
        .expect("p", [doc! {"_id": 1, "c": 4, "path": [1, 2, 3]}, doc! {"_id": 2, "c": 1}]),
    ]
}

fn upwards() -> Vec<Case> {
    let case = |name: &str| Case::new(name, BELOW).has("c", nodes());
    vec![
        case("the number of descendants").expect(
            "c",
            [
                below(node(1, 0, "a"), 4),
                below(node(2, 1, "b"), 2),
                below(node(3, 2, "c"), 1),
                below(node(4, 3, "d"), 0),
                below(node(5, 1, "e"), 0),
                below(node(6, 0, "f"), 0),
            ],
        ),
        case("a subtree moves, a leaf comes, another one goes")
            .writes([Write::Burst(vec![
                update("c", 2, set(doc! {"parent": 6})),
                insert("c", node(7, 4, "g")),
                delete("c", 5),
                replace("c", node(3, 2, "C")),
            ])])
            .expect(
                "c",
                [
                    below(node(1, 0, "a"), 0),
                    below(node(2, 6, "b"), 3),
                    below(node(3, 2, "C"), 2),
                    below(node(4, 3, "d"), 1),
                    below(node(6, 0, "f"), 4),
                    below(node(7, 4, "g"), 0),
                ],
            ),
        Case::new(
            "total size, largest child and a mean, of documents with a filter",
            "aggregate: { source: { collection: '@c', where: { gone: null } }, target: { collection: '@c', where: { gone: null } }, \
             match: { _id: parent }, recursive: true, let: { sum: { $sum: { $add: [$size, $total] } }, n: { $sum: 1 } }, \
             set: { total: $$sum, mean: { $cond: [{ $eq: [$$n, 0] }, null, { $divide: [$$sum, $$n] }] } } }",
        )
        .has("c", (1..=4).map(|n| doc! {"_id": n, "parent": n / 2, "size": n}))
        .has("c", [doc! {"_id": 5, "parent": 2, "size": 50, "gone": true}])
        .writes([update("c", 4, set(doc! {"size": 10})), update("c", 3, set(doc! {"gone": true}))])
        .expect(
            "c",
            [
                doc! {"_id": 1, "parent": 0, "size": 1, "total": 12, "mean": 12.0},
                doc! {"_id": 2, "parent": 1, "size": 2, "total": 10, "mean": 10.0},
                doc! {"_id": 3, "parent": 1, "size": 3, "gone": true, "total": 0, "mean": null},
                doc! {"_id": 4, "parent": 2, "size": 10, "total": 0, "mean": null},
                doc! {"_id": 5, "parent": 2, "size": 50, "gone": true},
            ],
        )
        .on_history(),
    ]
}

#[tokio::test]
async fn values_come_from_the_parent() {
    every_way(&downwards()).await;
}

#[tokio::test]
async fn values_come_from_the_children() {
    every_way(&upwards()).await;
}

/// A tree of 341 documents: four children each, on five levels; `_id`s in a random order.
fn large() -> Vec<Document> {
    // 7 has no factor in common with 341.
    let id = |nth: i32| (nth * 7) % 341;
    let node = |nth: i32| {
        let node = doc! {"_id": id(nth), "name": format!("n{nth}"), "nth": nth};
        if nth == 0 { node } else { with(node, doc! {"parent": id((nth - 1) / 4)}) }
    };
    (0..341).map(node).collect()
}

/// The writes of the daemon since a point in time, and the documents that were written more than once.
async fn writes(test: &TestDb, since: bson::Timestamp) -> (usize, Vec<Bson>) {
    let entries = oplog(test, since).await;
    let mut ids: Vec<Bson> = Vec::new();
    let mut again = Vec::new();
    for entry in entries {
        let Some(id) = entry.get_document("o2").ok().and_then(|o2| o2.get("_id").cloned()) else { continue };
        if ids.contains(&id) {
            again.push(id.clone());
        }
        ids.push(id);
    }
    (ids.len(), again)
}

/// "A backfill goes level by level": each document is written once, whatever the order of the `_id`s.
#[tokio::test]
async fn a_backfill_writes_each_document_once() {
    for rule in [PATH, BELOW] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        db.collection("c").insert_many(large()).await.unwrap();
        let since = now(&db).await;
        let daemon = Daemon::start(&test, &plain(rule)).await;
        daemon.settled().await;
        let (count, again) = writes(&test, since).await;
        assert_eq!((count, again), (341, vec![]), "{rule}");
        daemon.stop().await;
    }
}

/// A subtree of several hundred documents moves: each is written once, with the value that it has at the end.
#[tokio::test]
async fn a_subtree_moves_and_each_document_is_written_once() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("c").insert_many(large()).await.unwrap();
    db.collection("c").insert_one(doc! {"_id": "new", "name": "new"}).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH)).await;
    daemon.settled().await;
    let since = now(&db).await;
    db.collection::<Document>("c").update_one(doc! {"nth": 0}, set(doc! {"parent": "new"})).await.unwrap();
    daemon.settled().await;
    let (count, again) = writes(&test, since).await;
    assert_eq!((count, again), (342, vec![0.into()]), "the application's own write is one of two of the root");
    let moved = all(&db, "c").await;
    let moved = moved.iter().filter(|node| node.get_str("path").is_ok_and(|path| path.starts_with("new/n0")));
    assert_eq!(moved.count(), 341);
    daemon.stop().await;
}

/// "A node waits while a node that it reads is pending in the same rule": a document far below one whose write is under
/// way never gets the old path with its new name.
#[tokio::test]
async fn a_document_waits_for_its_ancestors() {
    let servers = ReplicaSet::start(1).await;
    let test = servers.database().await;
    let (db, admin) = (test.database(), test.client.database("admin"));
    db.collection("c").insert_many(nodes()).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH)).await;
    daemon.settled().await;
    let since = now(&db).await;
    let namespace = format!("{}.c", test.name);
    let data = doc! {"failCommands": ["update"], "namespace": namespace, "appName": "denormd", "blockConnection": true, "blockTimeMS": 2000};
    let point = doc! {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data};
    let entered = match admin.run_command(point).await.unwrap().get("count") {
        Some(Bson::Int32(count)) => i64::from(*count),
        Some(Bson::Int64(count)) => *count,
        other => panic!("no count: {other:?}"),
    };
    let categories = db.collection::<Document>("c");
    categories.update_one(doc! {"_id": 2}, set(doc! {"parent": 6})).await.unwrap();
    let wait = doc! {"waitForFailPoint": "failCommand", "timesEntered": entered + 1, "maxTimeMS": 120_000};
    admin.run_command(wait).await.unwrap();
    categories.update_one(doc! {"_id": 4}, set(doc! {"name": "D"})).await.unwrap();
    daemon.settled().await;
    let found = all(&db, "c").await;
    let path = found.iter().find(|node| node.get("_id") == Some(&4.into())).unwrap().get_str("path").unwrap();
    assert_eq!(path, "f/b/c/D");
    let written = oplog(&test, since).await;
    let half = written.iter().filter(|entry| entry.to_string().contains("a/b/c/D"));
    assert_eq!(half.count(), 0, "{written:#?}");
    daemon.stop().await;
}

async fn path_of(db: &Database, id: i32) -> Bson {
    let found = db.collection::<Document>("c").find_one(doc! {"_id": id}).await.unwrap().unwrap();
    found.get("path").cloned().unwrap_or(Bson::Null)
}

/// "The members of a circle keep their stored values and share one dead letter that names them; what hangs below follows
/// those values." Without that, depths would grow for ever.
#[tokio::test]
async fn the_members_of_a_circle_keep_their_values() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let categories = db.collection::<Document>("c");
    categories.insert_many(nodes()).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH)).await;
    daemon.settled().await;
    // 1 → 2 → 3 → 1, below it 4 and 5.
    categories.update_one(doc! {"_id": 1}, set(doc! {"parent": 3})).await.unwrap();
    daemon.settled().await;
    let modified = || daemon.context().counts.modified.load(Ordering::Relaxed);
    let before = modified();
    categories.update_many(doc! {"_id": {"$in": [2, 4, 5]}}, set(doc! {"name": "new"})).await.unwrap();
    daemon.settled().await;
    assert_eq!(modified() - before, 2, "the two that hang below");
    let paths = [path_of(&db, 1).await, path_of(&db, 2).await, path_of(&db, 3).await];
    assert_eq!(paths, ["a", "a/b", "a/b/c"].map(Bson::from));
    assert_eq!([path_of(&db, 4).await, path_of(&db, 5).await], ["a/b/c/new", "a/new"].map(Bson::from));
    let letters = dead_letters(&test).await;
    assert_eq!(letters.len(), 1, "{letters:?}");
    let members: Bson = vec![Bson::from(vec![1]), vec![2].into(), vec![3].into()].into();
    assert_eq!(letters[0].get("circle"), Some(&members), "{letters:?}");
    // No event tells 2 that it is free: its parent has the same values again.
    categories.update_one(doc! {"_id": 1}, doc! {"$unset": {"parent": 1}}).await.unwrap();
    daemon.settled().await;
    daemon.retry_dead_letters("tree").await;
    daemon.settled().await;
    assert_eq!(path_of(&db, 3).await, "a/new/c".into());
    assert_eq!(path_of(&db, 4).await, "a/new/c/new".into());
    until("the dead letter is gone", async || dead_letters(&test).await.is_empty().then_some(())).await;
    daemon.stop().await;
}

/// A document that is its own parent, from the start and later, in both directions.
#[tokio::test]
async fn a_document_that_is_its_own_parent_is_a_circle() {
    for rule in [PATH, BELOW] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let categories = db.collection::<Document>("c");
        let own = with(node(1, 1, "a"), doc! {"path": "kept", "depth": 3, "above": [], "below": 7});
        categories.insert_many([own, node(2, 1, "b"), node(3, 2, "c")]).await.unwrap();
        let daemon = Daemon::start(&test, &plain(rule)).await;
        daemon.settled().await;
        let found = async || all(&db, "c").await;
        let first = found().await;
        assert_eq!([first[0].get("path"), first[0].get("below")], [Some(&"kept".into()), Some(&7.into())], "{rule}");
        let expected = if rule == PATH {
            doc! {"path": "kept/b/c"}
        } else {
            doc! {"below": 0}
        };
        let name = expected.keys().next().unwrap();
        assert_eq!(first[2].get(name), expected.get(name), "{rule}");
        assert_eq!(dead_letters(&test).await.len(), 1, "{rule}");
        categories.update_one(doc! {"_id": 2}, set(doc! {"parent": 2})).await.unwrap();
        categories.update_one(doc! {"_id": 1}, doc! {"$unset": {"parent": 1}}).await.unwrap();
        daemon.settled().await;
        daemon.retry_dead_letters("tree").await;
        daemon.settled().await;
        let then = found().await;
        let expected = if rule == PATH {
            doc! {"path": "a"}
        } else {
            doc! {"below": 0}
        };
        assert_eq!(then[0].get(name), expected.get(name), "{rule}");
        assert_eq!(then[1].get(name), first[1].get(name), "{rule}: a circle of its own");
        assert_eq!(dead_letters(&test).await.len(), 1, "{rule}");
        daemon.stop().await;
    }
}

/// A circle of 1 and 2 becomes one of 1 alone. Its dead letter once replaced that of both, and only an audit had 2
/// written.
#[tokio::test]
async fn a_document_that_a_circle_loses_is_written() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let categories = db.collection::<Document>("c");
    categories.insert_many([node(2, 9, "b"), node(1, 2, "a")]).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH).replace("name: tree,", "name: tree, guard: off,")).await;
    daemon.settled().await;
    assert_eq!([path_of(&db, 2).await, path_of(&db, 1).await], ["b", "b/a"].map(Bson::from));
    categories.update_one(doc! {"_id": 2}, set(doc! {"parent": 1})).await.unwrap();
    daemon.settled().await;
    let letters = dead_letters(&test).await;
    assert_eq!(letters[0].get_array("circle").unwrap().len(), 2, "{letters:?}");
    categories.update_one(doc! {"_id": 1}, set(doc! {"parent": 1})).await.unwrap();
    until("2 follows the values of 1", async || (path_of(&db, 2).await == "b/a/b".into()).then_some(())).await;
    until("one dead letter is left", async || {
        let letters = dead_letters(&test).await;
        (letters.len() == 1 && letters[0].get_array("circle").unwrap().len() == 1).then_some(())
    })
    .await;
    daemon.stop().await;
}

/// The request for the other members of an opened circle may be lost, and a dead letter that was tried often waited for an hour.
#[tokio::test]
async fn a_circle_is_retried_within_a_minute() {
    let test = denormd_fixture::database().await;
    let categories = test.database().collection::<Document>("c");
    categories.insert_many([node(1, 2, "a"), node(2, 1, "b")]).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH)).await;
    daemon.settled().await;
    daemon.stop().await;
    assert_eq!(dead_letters(&test).await.len(), 1);
    let tried =
        doc! {"$set": {"attempts": 11, "last": DateTime::from_millis(DateTime::now().timestamp_millis() - 61_000)}};
    test.beside("state").collection::<Document>("dead_letters").update_one(doc! {}, tried).await.unwrap();
    let daemon = Daemon::start(&test, &plain(PATH)).await;
    until("it is tried again", async || {
        dead_letters(&test).await[0].get_i32("attempts").is_ok_and(|tried| tried >= 12).then_some(())
    })
    .await;
    daemon.stop().await;
}

/// "`max_depth` bounds the work: beyond it a dead letter, the subtree below untouched."
#[tokio::test]
async fn a_document_with_too_many_ancestors_keeps_its_values() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let categories = db.collection::<Document>("c");
    categories.insert_many((1..=6).map(|n| node(n, n - 1, "n"))).await.unwrap();
    let rule = plain(&PATH.replace("recursive: true,", "recursive: true, max_depth: 3,"));
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    let depths = async || {
        let found = all(&db, "c").await;
        found.iter().map(|node| node.get_i32("depth").ok()).collect::<Vec<_>>()
    };
    assert_eq!(depths().await, [Some(0), Some(1), Some(2), Some(3), None, None]);
    let letters = dead_letters(&test).await;
    assert_eq!(letters.len(), 2, "{letters:?}");
    assert!(letters.iter().all(|letter| letter.get_str("reason").unwrap().contains("more than 3 ancestors")));
    // 2 becomes a root: all are in reach.
    categories.update_one(doc! {"_id": 2}, doc! {"$unset": {"parent": 1}}).await.unwrap();
    daemon.settled().await;
    daemon.retry_dead_letters("tree").await;
    daemon.settled().await;
    assert_eq!(depths().await, [0, 0, 1, 2, 3, 4].map(|depth| Some(depth).filter(|depth| *depth < 4)));
    assert_eq!(dead_letters(&test).await.len(), 1);
    daemon.stop().await;
}

/// A kill between two levels: the next daemon repeats the events of the level before.
#[tokio::test]
async fn a_kill_between_levels_loses_nothing() {
    for rule in [PATH, BELOW] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        db.collection("c").insert_many(large()).await.unwrap();
        db.collection("c").insert_one(doc! {"_id": "new", "name": "new"}).await.unwrap();
        let mut daemon = Daemon::start(&test, &plain(rule)).await;
        daemon.settled().await;
        let last = async || {
            let found = db.collection::<Document>("c").find_one(doc! {"nth": 340}).await.unwrap().unwrap();
            (found.get("path").cloned(), found.get("depth").cloned())
        };
        for moved in ["new", "none", "new"] {
            let before = daemon.context().counts.modified.load(Ordering::Relaxed);
            db.collection::<Document>("c").update_one(doc! {"nth": 0}, set(doc! {"parent": moved})).await.unwrap();
            if rule == PATH {
                let modified = || daemon.context().counts.modified.load(Ordering::Relaxed);
                until("the first level is written", async || (modified() > before).then_some(())).await;
            }
            daemon.kill();
            daemon = Daemon::start(&test, &plain(rule)).await;
            daemon.settled().await;
            let found = all(&db, "c").await;
            if rule == PATH {
                let under = |node: &&Document| node.get_str("path").unwrap().starts_with("new/") == (moved == "new");
                assert_eq!(found.iter().filter(|node| node.contains_key("nth")).filter(under).count(), 341);
                let depth = if moved == "new" { 5 } else { 4 };
                assert_eq!(last().await.1, Some(depth.into()));
            } else {
                let new = found.iter().find(|node| node.get("_id") == Some(&"new".into())).unwrap();
                assert_eq!(new.get_i32("below").unwrap(), if moved == "new" { 341 } else { 0 });
            }
        }
        daemon.stop().await;
    }
}

/// The commands know trees: `plan` describes them, `check` expects nothing of a circle, `explain` and `dead-letters` name
/// its members, and `test` computes a tree without a server. A dead letter of a circle is retried by itself once a
/// member has left.
#[tokio::test]
async fn the_commands_know_trees() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let categories = db.collection::<Document>("c");
    categories.insert_many(nodes()).await.unwrap();
    let program = Program::new(&daemon::config(&test, &plain(PATH)));
    program.run(&["plan", "--apply"]).await.exits(0);
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(
        told.contains("each document follows its parent, level by level from the roots down; at most 64 ancestors"),
        "{told}"
    );
    let running = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["check"]).await.exits(0);
    assert_eq!(path_of(&db, 4).await, "a/b/c/d".into());
    categories.update_one(doc! {"_id": 1}, set(doc! {"parent": 2})).await.unwrap();
    until("the dead letter", async || (dead_letters(&test).await.len() == 1).then_some(())).await;
    let told = program.run(&["dead-letters", "list", "--key", "2"]).await.exits(0).out;
    assert!(told.contains("a circle of 2 documents, each of which is its own ancestor: 1, 2"), "{told}");
    let told = program.run(&["explain", "tree", "2"]).await.exits(0).out;
    assert!(told.contains("a circle of 2 documents") && told.contains("keeps its values"), "{told}");
    categories.update_one(doc! {"_id": 2}, set(doc! {"name": "B"})).await.unwrap();
    program.run(&["check"]).await.exits(0);
    categories.update_one(doc! {"_id": 1}, doc! {"$unset": {"parent": 1}}).await.unwrap();
    until("the members are computed", async || (path_of(&db, 4).await == "a/B/c/d".into()).then_some(())).await;
    program.run(&["check"]).await.exits(0);
    running.stop().await;
}

/// The report on a rule that is refused.
fn refusal(rule: &str) -> String {
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {{ name: r, {rule} }}\n");
    let loaded = load(&text);
    let mistakes = plan::compile(&loaded.config, None).err().unwrap_or_else(|| panic!("{rule} is taken"));
    loaded.report(&mistakes).to_string()
}

#[test]
fn what_makes_no_sense_in_a_tree_is_refused_with_a_reason() {
    let down = "copy: { source: c, target: c, match: { parent: _id }, recursive: true, set: { path: { $concat: [$path, /] } } }";
    let up = "aggregate: { source: c, target: c, match: { _id: parent }, recursive: true, set: { n: { $sum: { $add: [1, $n] } } } }";
    for rule in [down, up] {
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {{ name: r, {rule} }}\n");
        let plan = plan::compile(&load(&text).config, None).unwrap();
        assert_eq!((plan.longest_chain(), plan.order.len()), (65, 1), "{rule}");
        assert_eq!(plan.feeds, [vec![]], "{rule}");
    }
    for (rule, from, to, message) in [
        (down, "target: c", "target: e", "a tree is in one collection"),
        (down, "parent: _id", "parent: key", "one plain field of a document holds the `_id` of its parent"),
        (down, "parent: _id", "'parents.$[]': _id", "one plain field of a document holds the `_id` of its parent"),
        (down, "parent: _id", "parent.$id: _id", "one plain field of a document holds the `_id` of its parent"),
        (
            down,
            "parent: _id",
            "parent: _id, tenant: tenant",
            "one plain field of a document holds the `_id` of its parent",
        ),
        (down, "recursive: true", "recursive: true, key_type: objectId", "holds the `_id` of its parent as it is"),
        (up, "_id: parent", "key: parent", "one plain field of a document holds the `_id` of its parent"),
        (up, "_id: parent", "_id: 'parents.$[]'", "one plain field of a document holds the `_id` of its parent"),
        (up, "$n] }", "$size] }", "the rule reads none of the paths that it writes"),
        (down, "$path,", "$name,", "the rule reads none of the paths that it writes"),
        (down, "$concat: [$path, /]", "all: $$ROOT", "`$$ROOT` would nest one document in the next"),
        (
            down,
            "recursive: true",
            "recursive: true, once: true",
            "`once` keeps a value that the documents below have to follow",
        ),
        (down, "recursive: true", "recursive: true, on_missing: keep", "a document without a parent is a root"),
        (down, "recursive: true", "recursive: true, on_missing: delete", "a document without a parent is a root"),
        (down, "source: c", "source: { collection: c, where: { kind: a } }", "its sources and its targets alike"),
        (down, "target: c", "target: { collection: c, where: { kind: a } }", "its sources and its targets alike"),
        (
            down,
            "source: c, target: c",
            "source: { collection: c, where: { path: a } }, target: { collection: c, where: { path: a } }",
            "the rule writes `path`",
        ),
        (down, "set: { path: { $concat: [$path, /] } }", "set: { parent: $parent }", "the rule writes `parent`"),
        (
            up,
            "set: { n: { $sum: { $add: [1, $n] } } }",
            "set: { parent: { $max: $parent } }",
            "the rule writes `parent`",
        ),
        (up, "set: {", "by: { k: $k }, into: groups, set: {", "no array of groups or of references"),
        (up, "target: c", "target: { collection: c, create: true }", "the documents of a tree name their parents"),
        (down, "recursive: true, ", "", "this rule feeds itself"),
        (down, "recursive: true, ", "", "say `recursive: true`"),
    ] {
        let rule = rule.replacen(from, to, 1);
        let report = refusal(&rule);
        assert!(report.contains(message), "{rule}\n{report}");
        assert!(report.contains(":3:"), "no line: {report}");
    }
    let report = refusal(&format!("shadow: true, {down}"));
    assert!(report.contains("a rule in shadow mode writes nothing"), "{report}");
}

/// A circle that is recorded renews the request for the circles that its members were in before. Those counted as tried.
#[tokio::test]
async fn a_dead_letter_whose_request_was_renewed_is_untried() {
    let test = denormd_fixture::database().await;
    let context = daemon::context(&daemon::config(&test, &plain(PATH))).await;
    let (server, dead_letters) = (&context.server, &context.dead_letters);
    let stored = test.beside("state").collection::<Document>("dead_letters");
    let of_tree =
        |id: i32, last: Bson| doc! {"_id": {"nth": id}, "deployment": "default", "rule": "tree", "last": last};
    // Nobody retries the second one, which cannot be read.
    let unreadable = of_tree(2, Bson::Timestamp(Timestamp { time: 1, increment: 1 }));
    stored.insert_many([of_tree(1, DateTime::now().into()), unreadable]).await.unwrap();
    let chosen = Chosen::default();
    let asked = dead_letters.ask(server, &chosen).await.unwrap();
    let untried = async || dead_letters.untried(server, &chosen, asked).await.unwrap();
    assert_eq!(untried().await, 2);
    let later = DateTime::from_millis(DateTime::now().timestamp_millis() + 60_000);
    for (update, left) in
        [(doc! {"$set": {"asked": later}}, 2), (doc! {"$set": {"last": later}}, 1), (doc! {"$unset": {"asked": ""}}, 1)]
    {
        stored.update_one(doc! {"_id.nth": 1}, update.clone()).await.unwrap();
        assert_eq!(untried().await, left, "{update}");
    }
}

/// The owners of a circle's members have a dead letter each. They requested a retry of each other, every five seconds.
#[tokio::test]
async fn a_circle_requests_no_retry_of_itself_in_another_partition() {
    let test = denormd_fixture::database().await;
    let context = daemon::context(&daemon::config(&test, &plain(PATH))).await;
    let (server, rule) = (&context.server, &context.plan.rules[0]);
    let record = async |partition, members: &[Key]| {
        let tree = Some(Nodes::Circle(members));
        let offending = Offending { key: &members[0], target: None, path: None, tree, since: None };
        let dead_letters = DeadLetters { partition, ..context.dead_letters.clone() };
        let error = Error::new(Kind::Refused, "a circle");
        dead_letters.record(server, rule, Task::Target, &offending, &error).await.unwrap();
    };
    let requested = async || {
        let stored = all(&test.beside("state"), "dead_letters").await;
        stored.iter().filter(|dead_letter| dead_letter.contains_key("asked")).count()
    };
    let members = [1, 2].map(|id| Key::one(Bson::Int32(id)));
    for _ in 0..2 {
        for partition in Partition::all(2) {
            record(partition, &members).await;
        }
        assert_eq!(requested().await, 0);
    }
    // Another circle with one of the members has taken its place.
    record(Partition::all(2).next().unwrap(), &members[..1]).await;
    assert_eq!(requested().await, 2);
}
