//! `touch`: a path that gets the server's time with each change by a rule.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use std::collections::BTreeSet;

use bson::{Bson, DateTime, Document, RawDocumentBuf, bson, doc};
use denormd_engine::reconcile::{by_difference, compare::Difference, read};
use denormd_fixture::ReplicaSet;
use denormd_model::key::Key;
use denormd_rules::{
    config::{Format, load_str},
    plan::compile,
};
use mongodb::Database;

use crate::support::{
    cases::{Case, TIME, dead_letters, delete, every_way, insert, now, oplog, replace, update},
    daemon::{self, Daemon, all, load},
    process::Program,
};

fn set(fields: Document) -> Document {
    doc! {"$set": fields}
}

fn with(mut document: Document, fields: Document) -> Document {
    document.extend(fields);
    document
}

fn touched(document: Document) -> Document {
    with(document, doc! {"at": TIME})
}

/// Each case has a target that is right from the beginning, which never gets a time.
fn kinds() -> Vec<Case> {
    vec![
        Case::new("a copy", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { name: $name, in.n: $n }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a", "n": 1}, doc! {"_id": 2, "name": "b", "n": 2}])
            .has("t", [doc! {"_id": 1, "s": 1}, doc! {"_id": 2, "s": 2, "name": "b", "in": {"n": 2}}, doc! {"_id": 3}])
            .writes([
                update("s", 1, set(doc! {"name": "c", "unread": 1})),
                update("s", 2, set(doc! {"unread": 2})),
                update("t", 3, set(doc! {"unread": 3})),
            ])
            .expect("t", [
                touched(doc! {"_id": 1, "s": 1, "name": "c", "in": {"n": 1}}),
                doc! {"_id": 2, "s": 2, "name": "b", "in": {"n": 2}},
                doc! {"_id": 3, "unread": 3},
            ]),
        Case::new("only the type of a number", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { n: $n, l: $l }, touch: at }")
            .has("s", [doc! {"_id": 1, "n": 1.0, "l": [{"x": Bson::Int64(1)}]}])
            .has("t", [doc! {"_id": 1, "s": 1, "n": 1, "l": [{"x": Bson::Int64(1)}]}, doc! {"_id": 2, "s": 1, "n": 1.0, "l": [{"x": 1}]}, doc! {"_id": 3, "s": 1, "n": 1.0, "l": [{"x": Bson::Int64(1)}]}])
            .expect("t", [
                touched(doc! {"_id": 1, "s": 1, "n": 1.0, "l": [{"x": Bson::Int64(1)}]}),
                touched(doc! {"_id": 2, "s": 1, "n": 1.0, "l": [{"x": Bson::Int64(1)}]}),
                doc! {"_id": 3, "s": 1, "n": 1.0, "l": [{"x": Bson::Int64(1)}]},
            ]),
        Case::new("a value that goes", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { name: $name }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "s": 1, "name": "a"}, doc! {"_id": 2, "s": 7}])
            .writes([delete("s", 1), insert("s", doc! {"_id": 8})])
            .expect("t", [touched(doc! {"_id": 1, "s": 1}), doc! {"_id": 2, "s": 7}]),
        Case::new("elements", "copy: { source: '@s', target: '@t', match: { 'l.$[].s': _id }, set: { 'l.$[].name': $name }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}])
            .has("t", [
                doc! {"_id": 1, "l": [{"s": 1}, 5, {"s": 2}, {"s": 1, "name": "a"}, {"name": "stale"}]},
                doc! {"_id": 2, "l": [{"s": 2, "name": "b"}, {"s": null}]},
            ])
            .writes([update("t", 1, doc! {"$push": {"l": {"$each": [{"s": 2}], "$position": 0}}}), update("s", 1, set(doc! {"name": "c"}))])
            .expect("t", [
                touched(doc! {"_id": 1, "l": [{"s": 2, "name": "b"}, {"s": 1, "name": "c"}, 5, {"s": 2, "name": "b"}, {"s": 1, "name": "c"}, {}]}),
                doc! {"_id": 2, "l": [{"s": 2, "name": "b"}, {"s": null}]},
            ]),
        Case::new("beside an array", "copy: { source: '@s', target: '@t', match: { 'ids.$[]': _id }, set: { first: $name }, sort: { name: 1 }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "b"}, doc! {"_id": 2, "name": "a"}])
            .has("t", [doc! {"_id": 1, "ids": [1, 2]}, doc! {"_id": 2, "ids": [2], "first": "a"}])
            .writes([update("s", 1, set(doc! {"name": "c"}))])
            .expect("t", [touched(doc! {"_id": 1, "ids": [1, 2], "first": "a"}), doc! {"_id": 2, "ids": [2], "first": "a"}]),
        Case::new("an array of the references", "copy: { source: '@s', target: '@t', match: { 'ids.$[]': _id }, into: all, element: $name, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}])
            .has("t", [doc! {"_id": 1, "ids": [2, 1, 2]}, doc! {"_id": 2, "ids": [2], "all": ["b"]}])
            .writes([update("t", 1, doc! {"$push": {"ids": 7}}), update("s", 1, set(doc! {"name": "c"}))])
            .expect("t", [touched(doc! {"_id": 1, "ids": [2, 1, 2, 7], "all": ["b", "c", "b"]}), doc! {"_id": 2, "ids": [2], "all": ["b"]}]),
        Case::new("a collect", "collect: { source: '@s', target: '@t', match: { _id: t }, into: last, element: { id: $_id, n: $n }, sort: { n: -1 }, slice: 2, touch: at }")
            .has("s", (1..=3).map(|n| doc! {"_id": n, "t": 1, "n": n}))
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "last": []}])
            .writes([insert("s", doc! {"_id": 4, "t": 1, "n": 0}), update("s", 1, set(doc! {"n": 9}))])
            .expect("t", [touched(doc! {"_id": 1, "last": [{"id": 1, "n": 9}, {"id": 3, "n": 3}]}), doc! {"_id": 2, "last": []}]),
        Case::new("an aggregate", "aggregate: { source: '@s', target: '@t', match: { _id: t }, let: { n: { $sum: $n } }, set: { n: $$n, twice: { $multiply: [$$n, 2] } }, touch: at }")
            .has("s", [doc! {"_id": 1, "t": 1, "n": 1}, doc! {"_id": 2, "t": 2, "n": 2}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "n": 2, "twice": 4}, doc! {"_id": 3, "n": 0, "twice": 0}])
            .writes([insert("s", doc! {"_id": 3, "t": 1, "n": 4}), update("s", 2, set(doc! {"unread": 1}))])
            .expect("t", [touched(doc! {"_id": 1, "n": 5, "twice": 10}), doc! {"_id": 2, "n": 2, "twice": 4}, doc! {"_id": 3, "n": 0, "twice": 0}]),
        Case::new("groups", "aggregate: { source: '@s', target: '@t', match: { _id: t }, by: { e: $e }, into: all, set: { n: { $sum: 1 } }, touch: at }")
            .has("s", [doc! {"_id": 1, "t": 1, "e": "a"}, doc! {"_id": 2, "t": 2, "e": "a"}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "all": [{"e": "a", "n": 1}]}])
            .writes([insert("s", doc! {"_id": 3, "t": 1, "e": "b"})])
            .expect("t", [touched(doc! {"_id": 1, "all": [{"e": "a", "n": 1}, {"e": "b", "n": 1}]}), doc! {"_id": 2, "all": [{"e": "a", "n": 1}]}]),
        Case::new("counts in elements", "aggregate: { source: '@s', target: '@t', match: { 'rooms.$[].id': room }, set: { 'rooms.$[].n': { $sum: 1 } }, touch: at }")
            .has("s", [doc! {"_id": 1, "room": 1}, doc! {"_id": 2, "room": 2}])
            .has("t", [doc! {"_id": 1, "rooms": [{"id": 2, "n": 1}, {"id": 1}]}, doc! {"_id": 2, "rooms": [{"id": 2, "n": 1}]}])
            .writes([insert("s", doc! {"_id": 3, "room": 1})])
            .expect("t", [touched(doc! {"_id": 1, "rooms": [{"id": 2, "n": 1}, {"id": 1, "n": 2}]}), doc! {"_id": 2, "rooms": [{"id": 2, "n": 1}]}]),
        Case::new("values of the target", "copy: { source: '@s', target: '@t', match: { 'l.$[].s': _id }, set: { 'l.$[].sum': { $multiply: [$p, $$targetElement.q] } }, touch: at }")
            .has("s", [doc! {"_id": 1, "p": 3}])
            .has("t", [doc! {"_id": 1, "l": [{"s": 1, "q": 2}, {"s": 1, "q": 1, "sum": 3}]}, doc! {"_id": 2, "l": [{"s": 1, "q": 2, "sum": 6}]}])
            .writes([update("t", 1, set(doc! {"l.1.q": 5})), update("t", 2, set(doc! {"unread": 1}))])
            .expect("t", [
                touched(doc! {"_id": 1, "l": [{"s": 1, "q": 2, "sum": 6}, {"s": 1, "q": 5, "sum": 15}]}),
                doc! {"_id": 2, "l": [{"s": 1, "q": 2, "sum": 6}], "unread": 1},
            ]),
        Case::new("values without a source", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { name: $name }, otherwise: { name: none }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "s": 1}, doc! {"_id": 2, "name": "none"}, doc! {"_id": 3, "s": 9, "name": "none"}])
            .writes([delete("s", 1), update("t", 2, set(doc! {"s": null}))])
            .expect("t", [touched(doc! {"_id": 1, "s": 1, "name": "none"}), doc! {"_id": 2, "s": null, "name": "none"}, doc! {"_id": 3, "s": 9, "name": "none"}]),
        Case::new("a value that is kept", "copy: { source: '@s', target: '@t', match: { 'l.$[].s': _id }, set: { 'l.$[].p': $p, 'l.$[].n': $n }, once: true, touch: at }")
            .has("s", [doc! {"_id": 1, "p": 1, "n": 1}])
            .has("t", [doc! {"_id": 1, "l": [{"s": 1, "p": 7}]}, doc! {"_id": 2, "l": [{"s": 1, "p": 8, "n": 8}, {"s": 2}]}])
            .expect("t", [touched(doc! {"_id": 1, "l": [{"s": 1, "p": 7, "n": 1}]}), doc! {"_id": 2, "l": [{"s": 1, "p": 8, "n": 8}, {"s": 2}]}]),
        Case::new("two rules with one path", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { name: $name }, touch: at }")
            .and("aggregate: { source: '@c', target: '@t', match: { _id: t }, set: { n: { $sum: 1 } }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("c", [doc! {"_id": 1, "t": 2}])
            .has("t", [doc! {"_id": 1, "s": 1, "name": "a"}, doc! {"_id": 2, "n": 1}, doc! {"_id": 3, "n": 0}])
            .writes([replace("c", doc! {"_id": 1, "t": 2, "x": 1})])
            .expect("t", [touched(doc! {"_id": 1, "s": 1, "name": "a", "n": 0}), doc! {"_id": 2, "n": 1}, doc! {"_id": 3, "n": 0}]),
        Case::new("a value that is no time stays", "copy: { source: '@s', target: '@t', match: { s: _id }, set: { name: $name }, touch: at }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [
                doc! {"_id": 1, "s": 1, "at": "yesterday"},
                doc! {"_id": 2, "s": 1, "at": DateTime::from_millis(1)},
                doc! {"_id": 3, "s": 1, "at": Bson::MaxKey},
                // A clock that was ahead: no time goes back.
                doc! {"_id": 4, "s": 1, "at": DateTime::from_millis(4_102_444_800_000)},
                doc! {"_id": 5, "s": 1, "at": Bson::Null},
                doc! {"_id": 6, "s": 1, "at": [DateTime::from_millis(1)]},
            ])
            .writes([update("s", 1, set(doc! {"name": "b"}))])
            .expect("t", [
                doc! {"_id": 1, "s": 1, "name": "b", "at": "yesterday"},
                touched(doc! {"_id": 2, "s": 1, "name": "b"}),
                doc! {"_id": 3, "s": 1, "name": "b", "at": Bson::MaxKey},
                doc! {"_id": 4, "s": 1, "name": "b", "at": DateTime::from_millis(4_102_444_800_000)},
                touched(doc! {"_id": 5, "s": 1, "name": "b"}),
                doc! {"_id": 6, "s": 1, "name": "b", "at": [DateTime::from_millis(1)]},
            ]),
    ]
}

#[tokio::test]
async fn a_change_by_a_rule_sets_the_time() {
    every_way(&kinds()).await;
}

/// A chat's clients ask for what has changed since they last asked.
#[tokio::test]
async fn clients_that_sync_by_the_time_see_each_change_once() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("users").insert_one(doc! {"_id": 1, "name": "Ann", "mail": "a@example.org"}).await.unwrap();
    let message = |n: i32| doc! {"_id": n, "user": 1, "updatedAt": DateTime::from_millis(1000)};
    db.collection("messages").insert_many((0..20).map(message)).await.unwrap();
    let rule = "  - { name: author, allow_scan: true, copy: { source: users, target: messages, match: { user: _id }, \
        set: { author: $name }, touch: updatedAt } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let times = async || -> BTreeSet<i64> {
        let found = all(&db, "messages").await;
        found.iter().map(|message| message.get_datetime("updatedAt").unwrap().timestamp_millis()).collect()
    };
    let first = *times().await.first().unwrap();
    assert!(first > 1_600_000_000_000, "{first}");
    // A field that no rule reads, and the same value again.
    let before = now(&db).await;
    db.collection::<Document>("users").update_one(doc! {}, set(doc! {"mail": "b@example.org"})).await.unwrap();
    db.collection::<Document>("users").replace_one(doc! {}, doc! {"name": "Ann"}).await.unwrap();
    daemon.settled().await;
    let written = oplog(&test, before).await;
    assert_eq!(written.iter().filter(|entry| entry.get_str("ns").unwrap().ends_with(".messages")).count(), 0);
    let last = *times().await.last().unwrap();
    db.collection::<Document>("users").update_one(doc! {}, set(doc! {"name": "Anna"})).await.unwrap();
    daemon.settled().await;
    let again = times().await;
    assert!(*again.first().unwrap() >= last, "{again:?} after {last}");
    assert!(*again.last().unwrap() > first, "{again:?}");
    daemon.stop().await;
}

/// Runs the statements that were computed for a target before `change`; returns the target.
async fn written_after(db: &Database, rule: &str, target: &Document, change: Document) -> Document {
    let rule = daemon::rule(rule);
    let targets = db.collection::<Document>("t");
    targets.delete_many(doc! {}).await.unwrap();
    targets.insert_one(target).await.unwrap();
    let id = Key::one(bson!(1));
    let mut command = by_difference::targets(&rule, &[&id]);
    command.insert("cursor", doc! {});
    let reply = db.run_command(command).await.unwrap();
    let row = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap()[0].as_document().unwrap().clone();
    let guard = RawDocumentBuf::try_from(row.get_document(read::GUARD).unwrap()).unwrap();
    targets.update_one(doc! {}, change).await.unwrap();
    let path = rule.owned()[0];
    let difference = Difference {
        target: bson!(1),
        path: path.to_string(),
        element: path.has_each().then_some(0),
        expected: Some("written".into()),
        stored: None,
    };
    for statement in by_difference::statements(&rule, &id, (&row, &guard), &[difference]).unwrap() {
        assert!(!statement.deletes);
        let statement = Document::try_from(statement.raw.as_ref()).unwrap();
        let reply = db.run_command(doc! {"update": "t", "updates": [statement]}).await.unwrap();
        assert!(!reply.contains_key("writeErrors"), "{reply}");
    }
    targets.find_one(doc! {}).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_value_is_written_while_the_references_are_unchanged() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let scalar = "copy: { source: s, target: t, match: { s: _id }, set: { name: $name }, touch: at }";
    let target = doc! {"_id": 1, "s": 1};
    for (change, writes) in [(set(doc! {"x": 1}), true), (set(doc! {"s": 2}), false)] {
        let after = written_after(&db, scalar, &target, change.clone()).await;
        assert_eq!(after.get_str("name").is_ok(), writes, "{change}: {after}");
        assert_eq!(after.get_datetime("at").is_ok(), writes, "{change}: {after}");
    }
    let inside = "copy: { source: s, target: t, match: { 'l.$[].s': _id }, set: { 'l.$[].name': $name }, touch: at }";
    let target = doc! {"_id": 1, "l": [{"s": 1}, {"s": 2}]};
    for (change, writes) in [
        (set(doc! {"l.1.x": 1}), true),
        (set(doc! {"l.0.s": 2}), false),
        (doc! {"$push": {"l": {"$each": [{}], "$position": 0}}}, false),
        (doc! {"$pull": {"l": {"s": 1}}}, false),
    ] {
        let after = written_after(&db, inside, &target, change.clone()).await;
        assert_eq!(after.to_string().contains("written"), writes, "{change}: {after}");
        assert_eq!(after.get_datetime("at").is_ok(), writes, "{change}: {after}");
    }
    // A value that the application writes in the meantime stays.
    let once = "copy: { source: s, target: t, match: { s: _id }, set: { name: $name }, once: true, touch: at }";
    let after = written_after(&db, once, &doc! {"_id": 1, "s": 1}, set(doc! {"name": "mine"})).await;
    assert_eq!(after, doc! {"_id": 1, "s": 1, "name": "mine"});
}

/// A query looks into arrays, so a `once` value seemed to be there where an element of an array on its way has one. With `touch`, the
/// target was compared again and again for ever.
#[tokio::test]
async fn a_once_value_behind_an_array_is_a_dead_letter() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("s").insert_one(doc! {"_id": 1, "name": "a"}).await.unwrap();
    let targets = [
        doc! {"_id": 1, "s": 1, "in": [{"name": "x"}], "l": [{"s": 1, "in": [{"name": "x"}]}]},
        doc! {"_id": 2, "s": 1, "l": [{"s": 1}]},
    ];
    db.collection("t").insert_many(targets).await.unwrap();
    let rule = |name: &str, more: &str| {
        format!("  - {{ name: {name}, allow_scan: true, copy: {{ source: s, target: t, once: true, {more} }} }}\n")
    };
    let rules = rule("plain", "match: { s: _id }, set: { in.name: $name }")
        + &rule("element", "match: { 'l.$[].s': _id }, set: { 'l.$[].in.name': $name }, touch: at");
    let daemon = Daemon::start(&test, &rules).await;
    daemon.settled().await;
    daemon.stop().await;
    let found = dead_letters(&test).await;
    let is_of = |one: &Document, rule: &str| one.get_document("_id").unwrap().get_str("rule").unwrap() == rule;
    let of = |rule: &str| found.iter().filter(|one| is_of(one, rule)).count();
    assert_eq!((of("plain"), of("element")), (1, 1), "{found:?}");
    let right = db.collection::<Document>("t").find_one(doc! {"_id": 2}).await.unwrap().unwrap();
    assert_eq!(right.get_document("in").unwrap(), &doc! {"name": "a"});
}

/// Two rules touch one target: the time that the first one sets must not keep the second one from its write.
#[tokio::test]
async fn a_time_that_is_set_in_the_middle_of_a_write_loses_no_value() {
    let servers = ReplicaSet::start(1).await;
    let test = servers.database().await;
    let db = test.database();
    db.collection("s").insert_one(doc! {"_id": 1, "name": "a"}).await.unwrap();
    db.collection("t").insert_one(doc! {"_id": 1, "s": 1}).await.unwrap();
    let rule = "  - { name: r, allow_scan: true, copy: { source: s, target: t, match: { s: _id }, set: { name: $name }, \
        touch: at } }";
    let daemon = Daemon::start(&test, rule).await;
    // The first write ever probes how the server checks deadlines.
    daemon.settled().await;
    let admin = servers.client().await.database("admin");
    // The check of the deadline passes, and the first of the two statements, which leaves the target to the second.
    let fail_point = async |mode: Bson| {
        let data = doc! {"nss": format!("{}.t", db.name())};
        let command = doc! {"configureFailPoint": "hangDuringBatchUpdate", "mode": mode, "data": data};
        admin.run_command(command).await.unwrap();
    };
    fail_point(doc! {"skip": 2}.into()).await;
    db.collection::<Document>("s").update_one(doc! {}, set(doc! {"name": "b"})).await.unwrap();
    let waits = doc! {"waitForFailPoint": "hangDuringBatchUpdate", "timesEntered": 1, "maxTimeMS": 60_000};
    admin.run_command(waits).await.unwrap();
    let later = DateTime::from_millis(DateTime::now().timestamp_millis() + 3_600_000);
    db.collection::<Document>("t").find_one_and_update(doc! {}, set(doc! {"at": later})).await.unwrap();
    fail_point("off".into()).await;
    daemon.settled().await;
    assert_eq!(all(&db, "t").await, [doc! {"_id": 1, "s": 1, "name": "b", "at": later}]);
    daemon.stop().await;
}

/// The messages of a config with these rules.
fn mistakes(rules: &[&str]) -> Vec<String> {
    let rules: Vec<String> =
        rules.iter().enumerate().map(|(nth, rule)| format!("  - {{ name: r{nth}, {rule} }}\n")).collect();
    let rules = rules.concat();
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{rules}");
    let mistakes = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap_err();
    mistakes.into_iter().map(|mistake| format!("{}: {}", mistake.at, mistake.message)).collect()
}

#[test]
fn a_path_that_is_touched_has_no_owner_and_no_reader() {
    let copy =
        |rest: &str| format!("copy: {{ source: s, target: t, match: {{ s: _id }}, set: {{ name: $name }}, {rest} }}");
    let at = copy("touch: at");
    for (rules, expected) in [
        (vec![copy("touch: name")], "rules[0].copy.touch: `name` of `d.t` is written by this rule"),
        (vec![copy("touch: s")], "rules[0].copy.touch: `s` of `d.t` is read by this rule"),
        (vec![copy("touch: _id.x")], "rules[0].copy.touch: `_id` cannot be written"),
        (vec![copy("touch: 'l.$[].at'")], "rules[0].copy.touch: `l.$[].at` lies in the elements of an array, and `touch` is one time for the target"),
        (vec![copy("touch: $at")], "rules[0].copy.touch: `$at` is not a path: a field name cannot start with `$`: `$at` (only `$ref`, `$id` and `$db` of a DBRef do)"),
        (vec![copy("touch: at, on_missing: delete")], "rules[0].copy.on_missing: `delete` leaves no target whose time could be set"),
        (
            vec![at.clone(), "copy: { source: u, target: t, match: { u: _id }, set: { n: $name }, touch: at.x }".to_owned()],
            "rules[0].copy.touch: `at` and `at.x`, which rule `r1` sets, cannot both hold a time",
        ),
        (
            vec![at.clone(), "copy: { source: u, target: t, match: { u: _id }, set: { at.x: $name } }".to_owned()],
            "rules[0].copy.touch: `at` of `d.t` is written by rule `r1`",
        ),
        (
            vec![at.clone(), "aggregate: { source: u, target: { collection: t, create: true }, match: { _id: u }, set: { n: { $sum: 1 } } }".to_owned()],
            "rules[0].copy.touch: rule `r1` deletes documents of `d.t` that hold nothing of others",
        ),
        (
            vec![at.clone(), "copy: { source: t, target: u, match: { t: _id }, set: { last: $at } }".to_owned()],
            "rules[0].copy.touch: `at` of `d.t` is read by rule `r1`",
        ),
        (
            vec![at.clone(), "copy: { source: t, target: u, match: { t: _id }, set: { whole: $$ROOT } }".to_owned()],
            "rules[0].copy.touch: `at` of `d.t` is read by rule `r1`",
        ),
        (
            vec![at.clone(), "copy: { source: u, target: t, match: { u: _id }, set: { u_at: $$target.at } }".to_owned()],
            "rules[0].copy.touch: `at` of `d.t` is read by rule `r1`",
        ),
        (
            vec![at.clone(), "copy: { source: u, target: { collection: t, where: { at: { $gt: 1 } } }, match: { u: _id }, set: { u_name: $name } }".to_owned()],
            "rules[0].copy.touch: `at` of `d.t` is read by rule `r1`",
        ),
        (
            vec!["copy: { source: s, target: t, match: { 'l.$[].m.$[].s': _id }, set: { 'l.$[].m.$[].name': $name }, touch: at }".to_owned()],
            "rules[0].copy.touch: `l.$[].m.$[]` is an array inside another array, whose elements cannot be compared before each write",
        ),
    ] {
        let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
        assert_eq!(mistakes(&rules).first().map(String::as_str), Some(expected), "{rules:?}");
    }
}

#[tokio::test]
async fn plan_and_explain_name_the_path_and_drift_is_repaired_with_a_time() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("s").insert_one(doc! {"_id": 1, "name": "a"}).await.unwrap();
    db.collection("t").insert_one(doc! {"_id": 1, "s": 1}).await.unwrap();
    let rule = "  - { name: r, guard: watch, allow_scan: true, copy: { source: s, target: t, match: { s: _id }, set: { name: $name }, touch: at } }";
    let config = daemon::config(&test, rule);
    let program = Program::new(&config);
    let text = program.run(&["plan"]).await.exits(0).out;
    assert!(text.contains("touch       at gets the server's time with each change"), "{text}");
    assert!(text.contains("clients that sync by this path fetch all changed targets again"), "{text}");
    let daemon = Daemon::start_loaded(&load(&config)).await;
    daemon.settled().await;
    let first = all(&db, "t").await[0].get_datetime("at").unwrap().timestamp_millis();
    let text = program.run(&["explain", "r", "1"]).await.exits(0).out;
    assert!(text.contains("sets at to the server's time with each change"), "{text}");
    program.run(&["check"]).await.exits(0);
    db.collection::<Document>("t").update_one(doc! {}, set(doc! {"name": "drift"})).await.unwrap();
    daemon::until("the drift is repaired", async || {
        let target = all(&db, "t").await.remove(0);
        let time = target.get_datetime("at").unwrap().timestamp_millis();
        (target.get_str("name").is_ok_and(|name| name == "a") && time >= first).then_some(())
    })
    .await;
    // Its own time is no drift.
    db.collection::<Document>("t").update_one(doc! {}, doc! {"$unset": {"at": ""}}).await.unwrap();
    daemon.settled().await;
    program.run(&["check"]).await.exits(0);
    assert!(!all(&db, "t").await[0].contains_key("at"));
    daemon.stop().await;
}
