//! `denormd undo`: what a first backfill overwrites or removes is kept, and put back where nobody else has written.

use std::time::Duration;

use bson::{Bson, DateTime, Document, doc};
use denormd_engine::checkpoint::{kept::Kept, requests::RequestedWork, store::Store};
use denormd_fixture::TestDb;
use denormd_model::clock;

use crate::support::{
    daemon::{all, config, context, until},
    process::Program,
};

const LABEL: &str = "  - { name: host-label, adopt: true, copy: { source: hosts, target: logs, match: { host: _id }, set: { label: $name } } }";

/// A rule for another field of the same targets.
fn other() -> String {
    LABEL.replace("host-label", "other").replace("label:", "other:").replace("adopt: true, ", "")
}

/// Thirty hosts and 300 logs: the label of the first log is right, the others are the application's own.
async fn logs(test: &TestDb) -> mongodb::Collection<Document> {
    let db = test.database();
    let hosts = (0..30).map(|n| doc! {"_id": n, "name": format!("host {n}")});
    db.collection("hosts").insert_many(hosts).await.unwrap();
    let label = |n: i32| if n == 0 { "host 0".to_owned() } else { format!("old {n}") };
    let logs = (0..300).map(|n| doc! {"_id": n, "host": n % 30, "label": label(n)});
    db.collection("logs").insert_many(logs).await.unwrap();
    let keys = doc! {"createIndexes": "logs", "indexes": [{"key": {"host": 1}, "name": "host_1"}]};
    db.run_command(keys).await.unwrap();
    db.collection("logs")
}

async fn one(logs: &mongodb::Collection<Document>, id: i32) -> Document {
    logs.find_one(doc! {"_id": id}).await.unwrap().unwrap()
}

async fn kept(test: &TestDb) -> Vec<Document> {
    all(&test.beside("state"), "kept").await
}

async fn ended(test: &TestDb) {
    let rules = test.beside("state").collection::<Document>("rules");
    let keeping = doc! {"keeping": {"$type": "object"}};
    until("the first backfill is over", async || {
        (rules.count_documents(keeping.clone()).await.unwrap() == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_first_backfill_overwrites_is_put_back() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let program = Program::new(&config(&test, LABEL));
    let told = program.run(&["plan"]).await.exits(0).out;
    let said = "299 values would be overwritten or removed: they are kept for 7 days (`denormd undo host-label`)";
    assert!(told.contains(said), "{told}");
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "host 7");
    assert_eq!(kept(&test).await.len(), 299);
    let told = program.run(&["undo", "host-label", "--dry-run"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 299 values would be put back\n"), "{told}");
    let told = program.run(&["undo", "host-label"]).await.exits(4).err;
    assert!(told.contains("`host-label` is running, and would replace the old values again"), "{told}");
    assert!(told.contains("`denormd pause host-label` first, or take the rule out of the config"), "{told}");
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "host 7");

    program.run(&["pause", "host-label"]).await.exits(0);
    logs.update_one(doc! {"_id": 5}, doc! {"$set": {"label": "the application's"}}).await.unwrap();
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    let expected = "host-label: 298 values put back\n\
        1 value changed since, by the application or by the rule itself after a change of its source: left as it is\n\
        `denormd prune host-label` leaves these fields alone from now on\n";
    assert_eq!(told, expected);
    for n in 0..300 {
        let expected = match n {
            0 => "host 0".to_owned(),
            5 => "the application's".to_owned(),
            n => format!("old {n}"),
        };
        assert_eq!(one(&logs, n).await.get_str("label").unwrap(), expected);
    }
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 0 values put back\n1 value changed since"), "{told}");

    // Values that the rule replaces when it runs again are kept again, the application's newest value included.
    program.run(&["resume", "host-label"]).await.exits(0);
    program.backfilled(&test, 1).await;
    ended(&test).await;
    assert_eq!(one(&logs, 5).await.get_str("label").unwrap(), "host 5");
    program.run(&["pause", "host-label"]).await.exits(0);
    let told = program.run(&["undo", "host-label", "--output", "json"]).await.exits(0).json();
    assert_eq!((&told["put_back"], &told["changed"]), (&299.into(), &0.into()), "{told}");
    assert_eq!(one(&logs, 5).await.get_str("label").unwrap(), "the application's");
    daemon.stop().await;
}

/// The collection's validator has changed since: the command fails, and says how many values stay.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_the_server_refuses_are_no_success() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    let program = Program::new(&config(&test, LABEL));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    let validator = doc! {"label": {"$nin": ["old 7", "old 8"]}};
    test.database().run_command(doc! {"collMod": "logs", "validator": validator}).await.unwrap();
    let told = program.run(&["undo", "host-label"]).await.exits(1);
    assert!(told.out.starts_with("host-label: 297 values put back\n"), "{}", told.out);
    assert!(told.err.contains("2 values could not be put back"), "{}", told.err);
    daemon.stop().await;
}

/// The rule is taken out of the config: nobody could compute what it wrote. Afterwards the fields are the
/// application's, and `prune` leaves them alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_is_no_longer_in_the_config_is_undone_and_not_pruned() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let other = other();
    let program = Program::new(&config(&test, &format!("{LABEL}\n{other}")));
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    daemon.stop().await;
    program.write(&config(&test, &other));
    // Without a daemon, the command leads.
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 299 values put back\n"), "{told}");
    assert!(kept(&test).await.is_empty());
    let told = program.run(&["prune", "host-label"]).await.exits(0).out;
    assert!(told.contains("nothing to prune"), "{told}");
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "old 7");
}

/// A running daemon that has read the config without the rule carries it out: it need not be restarted.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_was_removed_under_a_running_daemon_is_undone() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let other = other();
    let program = Program::new(&config(&test, &format!("{LABEL}\n{other}")));
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    program.write(&config(&test, &other));
    daemon.says("this rule is no longer in the config").await;
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 299 values put back\n"), "{told}");
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "old 7");
    daemon.stop().await;
}

/// Types, null, nested paths, subdocuments, and what the rule itself removes or adds.
#[tokio::test(flavor = "multi_thread")]
async fn values_come_back_as_they_were() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "n": 5, "name": "bolt"}).await.unwrap();
    let before = [
        doc! {"_id": 1, "host": 1, "at": {"n": 5_i64, "x": 1}},
        doc! {"_id": 2, "host": 1, "at": {"n": 5.0, "name": Bson::Null}},
        doc! {"_id": 3, "host": 1, "at": {"n": {"$ref": "a", "$id": "$b"}}},
        doc! {"_id": 4, "host": 1, "at": {"n": ["$$ROOT", {"a.b": 1}]}},
        doc! {"_id": 5, "host": 99, "at": {"n": -0.0, "name": "dangles"}},
        doc! {"_id": 6, "host": Bson::Null, "at": {"n": f64::NAN, "name": "refers to nothing"}},
        doc! {"_id": 7, "host": 1},
        doc! {"_id": 8, "host": 1, "at": {"n": 5, "name": "bolt"}},
    ];
    db.collection("logs").insert_many(before.clone()).await.unwrap();
    let rule = "  - { name: r, adopt: true, allow_scan: true, copy: { source: hosts, target: logs, match: { host: _id }, set: { at.n: $n, at.name: $name } } }";
    let program = Program::new(&config(&test, rule));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    let logs = db.collection::<Document>("logs");
    assert_eq!(one(&logs, 1).await, doc! {"_id": 1, "host": 1, "at": {"n": 5, "x": 1, "name": "bolt"}});
    assert_eq!(one(&logs, 5).await, doc! {"_id": 5, "host": 99, "at": {}});
    program.run(&["pause", "r"]).await.exits(0);
    // The document around the value is gone, and is not created again.
    logs.update_one(doc! {"_id": 6}, doc! {"$unset": {"at": 1}}).await.unwrap();
    let told = program.run(&["undo", "r", "--output", "json"]).await.exits(0).json();
    assert_eq!((&told["put_back"], &told["changed"]), (&7.into(), &2.into()), "{told}");
    let mut expected = before.to_vec();
    // Values that the rule has added stay; one that was null is null again.
    for id in [0, 2, 3] {
        expected[id].get_document_mut("at").unwrap().insert("name", "bolt");
    }
    expected[5].remove("at");
    expected[6].insert("at", doc! {"n": 5, "name": "bolt"});
    for (n, expected) in (1..).zip(expected) {
        let stored = one(&logs, n).await;
        let sorted = |doc: &Document| {
            let mut doc = doc.clone();
            if let Ok(at) = doc.get_document_mut("at") {
                let mut fields: Vec<_> = std::mem::take(at).into_iter().collect();
                fields.sort_by(|a, b| a.0.cmp(&b.0));
                at.extend(fields);
            }
            doc.to_vec().unwrap()
        };
        assert_eq!(sorted(&stored), sorted(&expected), "{stored} instead of {expected}");
    }
    daemon.stop().await;
}

/// Values in elements go back to their elements, also when these have moved; never to another element.
#[tokio::test(flavor = "multi_thread")]
async fn values_in_elements_are_put_back_in_their_elements() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let items = (1..=3).map(|n| doc! {"_id": n, "price": 10 * n});
    db.collection("items").insert_many(items).await.unwrap();
    let line = |item: i32, price: i32, qty: i32| doc! {"item": item, "price": price, "qty": qty};
    let orders = [
        doc! {"_id": 1, "lines": [line(1, 7, 1), line(2, 8, 1), 5, line(3, 30, 1)]},
        doc! {"_id": 2, "lines": [line(1, 7, 1), line(2, 8, 1), line(3, 9, 1)]},
        // Two elements with one reference.
        doc! {"_id": 3, "lines": [line(1, 7, 1), line(1, 8, 2)]},
        doc! {"_id": 4, "lines": [line(1, 7, 1), line(1, 8, 2)]},
    ];
    db.collection("orders").insert_many(orders).await.unwrap();
    let rule = "  - { name: prices, adopt: true, allow_scan: true, copy: { source: items, target: orders, match: { \"lines.$[].item\": _id }, set: { \"lines.$[].price\": $price } } }";
    let program = Program::new(&config(&test, rule));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["pause", "prices"]).await.exits(0);
    let orders = db.collection::<Document>("orders");
    let stored = one(&orders, 3).await;
    assert_eq!(stored, doc! {"_id": 3, "lines": [line(1, 10, 1), line(1, 10, 2)]});
    // An element in front of the others, another price, and one element gone.
    let lines = vec![line(9, 1, 1), line(1, 10, 1), line(2, 21, 1)];
    orders.update_one(doc! {"_id": 2}, doc! {"$set": {"lines": lines}}).await.unwrap();
    // The two change places, and the quantity of one changes.
    orders.update_one(doc! {"_id": 4}, doc! {"$set": {"lines": [line(1, 10, 2), line(1, 10, 3)]}}).await.unwrap();
    let told = program.run(&["undo", "prices", "--output", "json"]).await.exits(0).json();
    assert_eq!((&told["put_back"], &told["changed"]), (&6.into(), &3.into()), "{told}");
    let expected = [
        doc! {"_id": 1, "lines": [line(1, 7, 1), line(2, 8, 1), 5, line(3, 30, 1)]},
        doc! {"_id": 2, "lines": [line(9, 1, 1), line(1, 7, 1), line(2, 21, 1)]},
        doc! {"_id": 3, "lines": [line(1, 7, 1), line(1, 8, 2)]},
        doc! {"_id": 4, "lines": [line(1, 8, 2), line(1, 10, 3)]},
    ];
    for (n, expected) in (1..).zip(expected) {
        assert_eq!(one(&orders, n).await, expected);
    }
    daemon.stop().await;
}

/// A leader dies between the write and the checkpoint. The next one finds denormd's own values, and does not keep them
/// in place of the application's; a change of the source meanwhile is written down.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_is_written_again_keeps_the_oldest_values() {
    for place in ["kept", "written"] {
        let test = denormd_fixture::database().await;
        let logs = logs(&test).await;
        let program = Program::new(&config(&test, LABEL));
        program.dies_at(place, 1).await;
        let hosts = test.database().collection::<Document>("hosts");
        hosts.update_many(doc! {}, doc! {"$set": {"name": "another"}}).await.unwrap();
        let daemon = program.daemon();
        program.backfilled(&test, 1).await;
        ended(&test).await;
        until("the new name is copied", async || {
            let right = logs.count_documents(doc! {"label": "another"}).await.unwrap();
            (right == 300).then_some(())
        })
        .await;
        program.run(&["pause", "host-label"]).await.exits(0);
        let told = program.run(&["undo", "host-label", "--output", "json"]).await.exits(0).json();
        assert_eq!(told["changed"], 0, "{place}: {told}");
        for n in 1..300 {
            assert_eq!(one(&logs, n).await.get_str("label").unwrap(), format!("old {n}"), "{place}");
        }
        daemon.stop().await;
    }
}

/// The leader dies half-way through the undo, and the next one goes on.
#[tokio::test(flavor = "multi_thread")]
async fn an_undo_that_was_killed_goes_on() {
    for place in ["undoing", "put-back"] {
        let test = denormd_fixture::database().await;
        let logs = logs(&test).await;
        let program = Program::new(&config(&test, LABEL));
        let daemon = program.daemon();
        program.backfilled(&test, 1).await;
        program.run(&["pause", "host-label"]).await.exits(0);
        daemon.stop().await;
        // The command leads, and dies with its leadership.
        let told = program.run_and_die(&["undo", "host-label"], place).await;
        assert_ne!(told.code, 0, "{place}: {}", told.out);
        let told = program.run(&["undo", "host-label"]).await.exits(0).out;
        assert!(told.starts_with("host-label: "), "{told}");
        for n in 1..300 {
            assert_eq!(one(&logs, n).await.get_str("label").unwrap(), format!("old {n}"), "{place}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_beyond_the_limit_is_not_kept_and_that_is_reported() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let text = format!("undo: {{ max_bytes: 50000 }}\nlimits: {{ batch_keys: 3 }}\n{}", config(&test, LABEL));
    let program = Program::new(&text.replace("limits: { destroy_grace_seconds: 1 }\n", ""));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.contains("299 values would be overwritten or removed: only "), "{told}");
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    daemon.says("undo.max_bytes is reached").await;
    program.run(&["pause", "host-label"]).await.exits(0);
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.contains("not kept for lack of room (undo.max_bytes), and cannot be put back"), "{told}");
    let back = logs.count_documents(doc! {"label": {"$regex": "^old"}}).await.unwrap();
    assert!((1..299).contains(&back), "{back}: {told}");
    assert!(told.starts_with(&format!("host-label: {back} values put back\n")), "{told}");
    assert!(told.contains(&format!("about {} values were", 299 - back)), "{told}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_kept_where_that_is_switched_off_and_expired_values_go() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    let program = Program::new(&format!("undo: {{ mode: off }}\n{}", config(&test, LABEL)));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.contains("they are not kept (undo.mode is off)"), "{told}");
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    assert!(kept(&test).await.is_empty());
    let told = program.run(&["undo", "host-label", "--dry-run"]).await.exits(0).out;
    assert_eq!(told, "host-label: no value is kept: undo.mode is off\n");
    daemon.stop().await;

    let test = denormd_fixture::database().await;
    logs(&test).await;
    let program = Program::new(&format!("undo: {{ keep: 2s }}\n{}", config(&test, LABEL)));
    let daemon = program.daemon();
    daemon.says("kept values have expired").await;
    assert!(kept(&test).await.is_empty());
    let told = program.run(&["undo", "host-label", "--dry-run"]).await.exits(0).out;
    assert!(told.contains("no value is kept: its first backfill has replaced none, or that was"), "{told}");
    daemon.stop().await;
}

/// A machine whose clock is ahead once ended all kept values.
#[tokio::test]
async fn kept_values_expire_by_the_clock_of_the_server() {
    let test = denormd_fixture::database().await;
    let context = context(&config(&test, LABEL)).await;
    let kept = Kept { server: &context.server, database: &test.name, deployment: "d" };
    let days = |days: i64| DateTime::from_millis(DateTime::now().timestamp_millis() - days * 86_400_000);
    let ids = |n: i32| doc! {"deployment": "d", "rule": "r", "target": n};
    let values = [doc! {"_id": ids(1), "at": days(8)}, doc! {"_id": ids(2), "at": days(6)}, doc! {"_id": ids(3)}];
    test.database().collection("kept").insert_many(values).await.unwrap();
    let ahead = days(-8).timestamp_millis();
    clock::simulate(move || ahead);
    assert_eq!(kept.expire(Duration::from_secs(7 * 86_400)).await.unwrap(), 1);
    let left = all(&test.database(), "kept").await;
    assert_eq!(left.len(), 2, "{left:?}");
}

/// A repair of a document that is deleted after a time of grace once held up all other requests.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_request_does_not_hold_up_an_undo() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let other = "  - { name: other, adopt: true, copy: { source: hosts, target: notes, match: { host: _id }, on_missing: delete, set: { host_name: $name } } }";
    let db = test.database();
    db.run_command(doc! {"createIndexes": "notes", "indexes": [{"key": {"host": 1}, "name": "host_1"}]}).await.unwrap();
    let text = config(&test, &format!("{LABEL}\n{other}"));
    let program = Program::new(&text.replace("destroy_grace_seconds: 1 ", "destroy_grace_seconds: 3600 "));
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    db.collection("notes").insert_one(doc! {"_id": 1, "host": 99}).await.unwrap();
    let context = context(&text).await;
    let dead_letters = &context.dead_letters;
    let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap();
    let repair = RequestedWork::Reconcile(vec![1.into()]);
    store.request(&context.server, "other", &repair).await.unwrap();
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 299 values put back\n"), "{told}");
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "old 7");
    assert_eq!(db.collection::<Document>("notes").count_documents(doc! {}).await.unwrap(), 1);
    daemon.stop().await;
}

/// A new rule on fields without values keeps nothing, and a change of a source after its first backfill neither.
#[tokio::test(flavor = "multi_thread")]
async fn what_denormd_wrote_itself_is_not_kept() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    logs.update_many(doc! {}, doc! {"$unset": {"label": 1}}).await.unwrap();
    let program = Program::new(&config(&test, LABEL));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_many(doc! {}, doc! {"$set": {"name": "another"}}).await.unwrap();
    until("the new name is copied", async || {
        (logs.count_documents(doc! {"label": "another"}).await.unwrap() == 300).then_some(())
    })
    .await;
    daemon.stop().await;
    // Nor a changed definition, whose paths it owned before.
    program.write(&config(&test, &LABEL.replace("$name", "{ $concat: [$name, \"!\"] }")));
    let daemon = program.daemon();
    until("the new definition is applied", async || {
        (logs.count_documents(doc! {"label": "another!"}).await.unwrap() == 300).then_some(())
    })
    .await;
    assert!(kept(&test).await.is_empty());
    daemon.stop().await;
}

/// Values that are computed from the target are kept like others, those of elements too.
#[tokio::test(flavor = "multi_thread")]
async fn values_computed_from_the_target_come_back() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("items").insert_many([doc! {"_id": 1, "price": 5}, doc! {"_id": 2, "price": 7}]).await.unwrap();
    let line = |item: i32, qty: i32, total: i32| doc! {"item": item, "qty": qty, "total": total};
    let before = doc! {"_id": 1, "lines": [line(1, 2, 99), line(1, 3, 15), line(2, 1, 98)], "note": 1, "first": "old"};
    db.collection("orders").insert_one(before.clone()).await.unwrap();
    let rules = "  - { name: totals, adopt: true, copy: { source: items, target: orders, match: { 'lines.$[].item': _id }, set: { 'lines.$[].total': { $multiply: [$price, $$targetElement.qty] } } } }
  - { name: first, adopt: true, copy: { source: items, target: orders, match: { note: _id }, set: { first: { $add: [$price, $$target.note] } } } }";
    let program = Program::new(&config(&test, rules));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    ended(&test).await;
    let orders = db.collection::<Document>("orders");
    let after = doc! {"_id": 1, "lines": [line(1, 2, 10), line(1, 3, 15), line(2, 1, 7)], "note": 1, "first": 6};
    assert_eq!(one(&orders, 1).await, after);
    program.run(&["pause", "--all"]).await.exits(0);
    for (rule, values) in [("totals", "2 values"), ("first", "1 value")] {
        let told = program.run(&["undo", rule]).await.exits(0).out;
        assert!(told.starts_with(&format!("{rule}: {values} put back\n")), "{told}");
    }
    assert_eq!(one(&orders, 1).await, before);
    daemon.stop().await;
}

/// The rule is corrected after `undo`, and writes another field. The record of what was put back was lost then: `prune` removed the
/// application's values for good.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_were_put_back_outlast_a_change_of_the_rule() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let program = Program::new(&config(&test, LABEL));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    // It would overwrite the values again by itself.
    program.run(&["pause", "host-label", "--for", "1h"]).await.exits(0);
    let told = program.run(&["undo", "host-label"]).await.exits(4).err;
    assert!(told.contains("`host-label` is paused: it may run again by itself"), "{told}");
    program.run(&["pause", "host-label"]).await.exits(0);
    program.run(&["undo", "host-label"]).await.exits(0);
    daemon.stop().await;

    // `plan` took these values for the rule's own.
    program.write(&config(&test, &LABEL.replace("name }", "name, hostLabel: $name }")));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.contains("299 values would be overwritten or removed: they are kept for 7 days"), "{told}");

    program.write(&config(&test, &LABEL.replace("{ label:", "{ hostLabel:")));
    let daemon = program.daemon();
    program.run(&["resume", "host-label"]).await.exits(0);
    program.backfilled(&test, 1).await;
    assert_eq!(one(&logs, 7).await.get_str("hostLabel").unwrap(), "host 7");
    let told = program.run(&["prune", "--all"]).await.exits(0).out;
    assert_eq!(told, "no rule has retired fields: nothing to prune\n");
    daemon.stop().await;

    // With its former field, it would overwrite values that are not its own any more.
    program.write(&config(&test, &LABEL.replace("adopt: true, ", "").replace("name }", "name, hostLabel: $name }")));
    let daemon = program.daemon();
    daemon.says("its first backfill would change existing data").await;
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "old 7");
    daemon.stop().await;
}

/// A rule leaves the config for a while, and the application writes its field again. `undo` put back values from before that time, and the
/// application's newest were kept nowhere.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_the_application_wrote_while_the_rule_was_gone_come_back() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let other = other();
    let program = Program::new(&config(&test, &format!("{LABEL}\n{other}")));
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    ended(&test).await;
    program.write(&config(&test, &other));
    daemon.says("this rule is no longer in the config").await;
    let newer = (1..300).map(|n| (n, format!("newer {n}")));
    for (n, label) in newer.filter(|(n, _)| n % 2 == 1) {
        logs.update_one(doc! {"_id": n}, doc! {"$set": {"label": label}}).await.unwrap();
    }
    // These targets still hold denormd's value, although its source has changed since.
    test.database()
        .collection::<Document>("hosts")
        .update_one(doc! {"_id": 8}, doc! {"$set": {"name": "host eight"}})
        .await
        .unwrap();
    // Values are kept with the second in which that was.
    tokio::time::sleep(Duration::from_secs(1)).await;
    program.write(&config(&test, &format!("{LABEL}\n{other}")));
    until("the rule writes again", async || {
        (one(&logs, 299).await.get_str("label").unwrap() == "host 29").then_some(())
    })
    .await;
    ended(&test).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    let told = program.run(&["undo", "host-label"]).await.exits(0).out;
    assert!(told.starts_with("host-label: 299 values put back\n"), "{told}");
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "newer 7");
    assert_eq!(one(&logs, 8).await.get_str("label").unwrap(), "old 8");
    daemon.stop().await;
}

/// Only a whole backfill makes the values denormd's own again. After its first page, `prune` removed those that were put back.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_were_put_back_outlast_a_part_of_a_backfill() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    let program = Program::new(&config(&test, LABEL));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    program.run(&["undo", "host-label"]).await.exits(0);
    daemon.stop().await;

    // Its pages are saved, but not its end.
    program.run_and_die(&["resume", "host-label"], "backfill-ending").await;
    program.write(&config(&test, &LABEL.replace("host-label", "other").replace("label:", "other:")));
    let told = program.run(&["prune", "host-label"]).await.exits(0).out;
    assert!(told.contains("nothing to prune"), "{told}");
    assert!(one(&logs, 299).await.contains_key("label"));
}

/// Somebody corrects the target of a rule during its first backfill. The progress in the former collection counted in the new one, too,
/// so the values up to there were overwritten and not kept.
#[tokio::test(flavor = "multi_thread")]
async fn another_target_is_kept_from_its_beginning() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    let db = test.database();
    let archive = db.collection::<Document>("archive");
    let old = (0..300).map(|n| doc! {"_id": n - 1000, "host": n % 30, "label": format!("old {n}")});
    archive.insert_many(old).await.unwrap();
    let keys = doc! {"createIndexes": "archive", "indexes": [{"key": {"host": 1}, "name": "host_1"}]};
    db.run_command(keys).await.unwrap();
    let pages =
        config(&test, LABEL).replace("limits: { destroy_grace_seconds: 1 }", "limits: { backfill_per_second: 20 }");
    let program = Program::new(&pages);
    let daemon = program.daemon();
    let rules = test.beside("state").collection::<Document>("rules");
    until("it has passed some targets", async || {
        rules.find_one(doc! {"keeping.passed.0": {"$exists": true}}).await.unwrap()
    })
    .await;
    daemon.stop().await;
    program.write(&config(&test, &LABEL.replace("target: logs", "target: archive")));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    program.run(&["undo", "host-label"]).await.exits(0);
    assert_eq!(archive.count_documents(doc! {"label": {"$regex": "^old "}}).await.unwrap(), 300);
    daemon.stop().await;
}

/// A rule is divided into two, and one half is undone. It put back values in the field of the other half, which goes on: only the
/// audit would have found them, and with `guard: off` nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_another_rule_writes_now_is_not_put_back() {
    let test = denormd_fixture::database().await;
    let logs = logs(&test).await;
    logs.update_many(doc! {}, doc! {"$set": {"hostLabel": "old"}}).await.unwrap();
    let both = LABEL.replace("set: { label: $name }", "set: { label: $name, hostLabel: $name }");
    let program = Program::new(&config(&test, &both));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    ended(&test).await;
    daemon.stop().await;

    let mine = LABEL.replace("label: $name", "hostLabel: $name");
    let other = LABEL.replace("host-label", "other").replace("adopt: true", "guard: \"off\", adopt: true");
    program.write(&config(&test, &format!("{mine}\n{other}")));
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    program.run(&["pause", "host-label"]).await.exits(0);
    let told = program.run(&["undo", "host-label"]).await;
    assert!(told.err.contains("`other` owns a field that it would put back"), "{} {}", told.out, told.err);
    assert_eq!(one(&logs, 7).await.get_str("label").unwrap(), "host 7");
    daemon.stop().await;
}
