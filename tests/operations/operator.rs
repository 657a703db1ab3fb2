//! The operator's commands as a user types them: explain, dead-letters, pause, resume.

use std::time::{Duration, Instant};

use bson::{Bson, Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use mongodb::Database;
use serde_json::json;

use crate::{
    engine::fan_outs::fail,
    support::{
        daemon::{Daemon, PATIENCE, config, until},
        process::{Daemon as Process, Program},
        running::{Running, causes, denormd},
    },
};
use denormd::status::Status;

const NAMES: &str = r#"  - { name: names, copy: { source: parts, target: products, match: { "parts.$[].id": _id }, set: { "parts.$[].name": $name } } }"#;

#[tokio::test]
async fn explain_says_what_should_be_there_and_where_it_comes_from() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rules = format!(
        "{NAMES}\n  - {{ name: latest, collect: {{ source: reviews, target: products, match: {{ _id: product }}, into: latest, element: $_id, sort: {{ _id: -1 }}, slice: 2 }} }}"
    );
    db.collection("parts").insert_one(doc! {"_id": 7, "name": "Spoke"}).await.unwrap();
    let parts = bson::bson!([{"id": 7, "name": "Hub"}, {"id": 9}, {"id": Bson::Null, "name": "stray"}]);
    db.collection("products").insert_one(doc! {"_id": 1, "parts": parts, "latest": [5, 4]}).await.unwrap();
    db.collection("reviews").insert_many((3..6).map(|n| doc! {"_id": n, "product": 1})).await.unwrap();
    // The values are wrong on purpose.
    let program = Program::new(&config(&test, &rules.replace("{ name: ", "{ adopt: true, name: ")));
    program.run(&["plan", "--apply"]).await.exits(0);

    let told = program.run(&["explain", "names", "1"]).await.exits(0);
    let expected = format!(
        "names: {0}.products 1
  ! the rule: it has never run
  parts.$[].id, element 0: 7, found in {0}.parts 7
    parts.$[].name
      expected \"Spoke\"
      stored   \"Hub\"   <- differs
  parts.$[].id, element 1: 9, not found in {0}.parts
    parts.$[].name
      expected and stored nothing
  parts.$[].id, element 2: refers to nothing
    parts.$[].name
      expected nothing
      stored   \"stray\"   <- differs
",
        test.name
    );
    assert_eq!(told.out, expected);

    let told = program.run(&["explain", "latest", "1", "--output", "json"]).await.exits(0).json();
    assert_eq!(told["differs"], json!(false));
    assert_eq!(told["references"], json!([{"element": null, "value": [1], "sources": [5, 4, 3], "more": false}]));
    let path = json!({"path": "latest", "element": null, "differs": false, "expected": [5, 4], "stored": [5, 4]});
    assert_eq!(told["paths"], json!([path]));

    let told = program.run(&["explain", "names", "2"]).await.exits(1);
    assert!(told.err.contains("no document with this _id"), "{}", told.err);
    program.run(&["explain", "nmes", "1"]).await.exits(2);
}

/// A validator refuses copied values. The dead letter is listed, a failed retry is reported, and after the validator is
/// removed a retry succeeds.
#[tokio::test]
async fn dead_letters_are_listed_retried_and_dropped() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let validator = doc! {"parts.name": {"$ne": "Spoke"}};
    db.run_command(doc! {"create": "products", "validator": validator}).await.unwrap();
    db.collection("parts")
        .insert_many([doc! {"_id": 7, "name": "Spoke"}, doc! {"_id": 8, "name": "Hub"}])
        .await
        .unwrap();
    let product = |id: i32, part: i32| doc! {"_id": id, "parts": [{"id": part}]};
    db.collection("products").insert_many([product(1, 7), product(2, 8), product(3, 7)]).await.unwrap();
    // The audit would write the dropped values.
    let program = Program::new(&config(&test, &NAMES.replace("name: names,", "name: names, guard: off,")));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;

    let listed = program.run(&["dead-letters", "list", "--output", "json"]).await.exits(0).json();
    assert_eq!(listed["count"], json!(2), "{listed}");
    let dead_letter = &listed["dead_letters"][0];
    assert_eq!(
        (&dead_letter["rule"], &dead_letter["about"], &dead_letter["key"]),
        (&json!("names"), &json!("value"), &json!([7]))
    );
    assert_eq!(dead_letter["reason"], json!("server error 121 (DocumentValidationFailure)"));
    let listed = program.run(&["dead-letters", "list", "--key", "3"]).await.exits(0);
    assert!(
        listed.out.starts_with(&format!("names value 7, target {}.products 3: server error 121", test.name)),
        "{}",
        listed.out
    );
    assert!(listed.out.ends_with("\n1 dead letter\n"), "{}", listed.out);
    // A check reports them.
    let checked = program.run(&["check"]).await.exits(3);
    assert_eq!(checked.out.matches(" (a dead letter)\n").count(), 2, "{}", checked.out);

    program.run(&["dead-letters", "retry"]).await.exits(2);
    // A misspelt name once had 0 dead letters.
    for action in ["list", "retry", "drop"] {
        let told = program.run(&["dead-letters", action, "--rule", "nmaes"]).await.exits(2);
        assert!(told.err.contains("has a rule `nmaes`"), "{}", told.err);
        assert!(told.err.contains("did you mean `names`? known rules: names"), "{}", told.err);
    }
    let tried = program.run(&["dead-letters", "retry", "--all"]).await.exits(1);
    assert!(tried.out.ends_with("2 dead letters tried, 2 left\n"), "{}", tried.out);
    // Those of a stopped rule once counted as tried, and were deleted.
    program.run(&["pause", "names"]).await.exits(0);
    let tried = program.run(&["dead-letters", "retry", "--all"]).await.exits(4);
    assert!(tried.err.contains("rule `names` is paused"), "{}", tried.err);
    let listed = program.run(&["dead-letters", "list", "--output", "json"]).await.exits(0).json();
    assert_eq!(listed["count"], json!(2), "{listed}");
    program.run(&["resume", "names"]).await.exits(0);
    program.backfilled(&test, 1).await;
    let dropped = program.run(&["dead-letters", "drop", "--rule", "names", "--key", "1"]).await.exits(0);
    assert_eq!(dropped.out, "1 dead letter dropped; their targets stay as they are\n");
    db.run_command(doc! {"collMod": "products", "validator": {}}).await.unwrap();
    let tried = program.run(&["dead-letters", "retry", "--rule", "names"]).await.exits(0);
    assert!(tried.out.ends_with("1 dead letter tried, 0 left\n"), "{}", tried.out);
    let name = async |id: i32| {
        let product = db.collection::<Document>("products").find_one(doc! {"_id": id}).await.unwrap().unwrap();
        product.get_array("parts").unwrap()[0].as_document().unwrap().get("name").cloned()
    };
    assert_eq!((name(3).await, name(1).await), (Some("Spoke".into()), None), "what was dropped stays as it is");
    daemon.stop().await;
}

/// The digits alone once selected nothing, although `explain` takes them.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_chosen_by_the_digits_of_an_objectid() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let id = bson::oid::ObjectId::new();
    db.collection("hosts").insert_one(doc! {"_id": id, "a": 1, "b": 1}).await.unwrap();
    db.collection("hosts").insert_one(doc! {"_id": "17", "a": 1, "b": 1}).await.unwrap();
    db.collection("hosts").insert_one(doc! {"_id": 17, "a": 1, "b": 1}).await.unwrap();
    let hosts = [Bson::from(id), "17".into(), 17.into()];
    db.collection("logs").insert_many(hosts.into_iter().map(|host| doc! {"host": host})).await.unwrap();
    let running = Running::start(&test, SHARE, "").await;
    running.until("it is live", |status| status.rules.first().is_some_and(|rule| rule.state == "live")).await;
    db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$set": {"b": 0}}).await.unwrap();
    running.until("they are dead letters", |status| status.dead_letters == 3).await;
    for (key, letters) in [(id.to_hex(), 1), (format!("{{\"$oid\": \"{id}\"}}"), 1), ("18".to_owned(), 0)] {
        let (code, told, error) = running.command(&["dead-letters", "list", "--key", &key, "--output", "json"]);
        assert_eq!(code, Some(0), "{error}");
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        assert_eq!(told["count"], json!(letters), "{key}: {told}");
    }
    // Nothing is dropped on a guess.
    let (code, told, error) = running.command(&["dead-letters", "drop", "--key", "17"]);
    assert!(code == Some(1) && error.contains("may stand for several values"), "{code:?} {told}{error}");
    for key in [id.to_hex().as_str(), "\"17\""] {
        let (code, told, error) = running.command(&["dead-letters", "drop", "--key", key]);
        assert!(code == Some(0) && told.starts_with("1 dead letter dropped"), "{code:?} {told}{error}");
    }
}

const SHARE: &str = "  - { name: share, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { share: { $divide: [$a, $b] } } } }";

/// The retry once ended at the first stopped rule, without a word about those before it.
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_all_passes_over_stopped_rules() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "a": 1, "b": 2}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 7, "host": 1}).await.unwrap();
    let other = SHARE.replace("name: share", "name: other").replace("{ share:", "{ other:");
    let running = Running::start(&test, &format!("{SHARE}\n{other}"), "").await;
    db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"b": 0}}).await.unwrap();
    running.until("both rules have a dead letter", |status| status.dead_letters == 2).await;
    // Dead letters of rules that the config lacks were skipped silently.
    let folder = tempfile::tempdir().unwrap();
    let less = folder.path().join("less.yaml");
    std::fs::write(&less, std::fs::read_to_string(running.file()).unwrap().replace(&other, "")).unwrap();
    let output = denormd(&less).args(["dead-letters", "retry", "--all"]).output().unwrap();
    let (told, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.code() == Some(4) && told.ends_with("\n1 dead letter tried, 1 left\n"), "{told}{error}");
    assert!(error.contains("this config does not have these rules: other"), "{error}");
    let retry = ["dead-letters", "retry", "--all", "--output", "json"];
    let output = denormd(&less).args(retry).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["tried"], &told["absent_rules"]), (&json!(1), &json!(["other"])));
    let (code, told, error) = running.command(&["pause", "share"]);
    assert_eq!(code, Some(0), "{told}{error}");
    let (code, told, error) = running.command(&["dead-letters", "retry", "--all"]);
    assert!(code == Some(4) && told.ends_with("\n1 dead letter tried, 1 left\n"), "{code:?} {told}{error}");
    assert!(error.contains("rule `share` is paused") && error.contains("these rules are stopped: share"), "{error}");
    let (code, told, error) = running.command(&["dead-letters", "retry", "--all", "--output", "json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((code, &told["tried"], &told["stopped_rules"]), (Some(4), &json!(1), &json!(["share"])), "{error}");
}

/// A count that failed was shown as none, and the headline said that every change is applied.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_that_cannot_be_counted_are_not_said_to_be_none() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "a": 1, "b": 2}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 7, "host": 1}).await.unwrap();
    let running = Running::start(&test, SHARE, "").await;
    running.until("they are counted", |status| status.summary.starts_with("Not behind: every change is")).await;
    let gauge = "denormd_dead_letters{rule=\"share\"}";
    assert_eq!(running.metric(gauge).await, Some(0.0));
    let namespace = format!("{}.dead_letters", test.beside("state").name());
    let failing = doc! {"failCommands": ["aggregate"], "appName": "denormd", "namespace": namespace, "errorCode": 50};
    fail(&test, "alwaysOn", failing).await;
    running.until("their number is not known", |status| !status.dead_letters_known).await;
    let status = running.status().await;
    assert!(status.summary.contains("It is not known yet whether there are dead letters."), "{}", status.summary);
    assert_eq!(running.metric(gauge).await, None);
    let (_, told, _) = running.command(&["status"]);
    assert!(told.lines().any(|line| line.trim().starts_with("share ") && line.trim_end().ends_with('-')), "{told}");
    fail(&test, "off", doc! {}).await;
    running.until("they are counted again", |status| status.dead_letters_known && status.dead_letters == 0).await;
}

/// A target that cannot be computed once made `check` exit with 0, and `explain` print the server's error alone. Its dead
/// letter was still listed, for up to an hour, after a change had corrected the source.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_cannot_be_computed_is_neither_right_nor_forgotten() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let hosts = db.collection::<Document>("hosts");
    hosts.insert_many([doc! {"_id": 1, "a": 1, "b": 0}, doc! {"_id": 2, "a": 1, "b": 2}]).await.unwrap();
    db.collection("logs").insert_many([doc! {"_id": 7, "host": 1}, doc! {"_id": 8, "host": 2}]).await.unwrap();
    let running = Running::start(&test, SHARE, "").await;
    running
        .until("it becomes a dead letter", |status| status.rules.first().is_some_and(|rule| rule.dead_letters == 1))
        .await;
    let (code, told, error) = running.command(&["check"]);
    assert_eq!(code, Some(1), "{told}{error}");
    assert!(error.contains("1 document could not be compared") && error.contains("denormd explain RULE ID"), "{error}");
    let (code, told, error) = running.command(&["explain", "share", "7"]);
    assert_eq!(code, Some(0), "{told}{error}");
    for part in
        ["  ! its values cannot be computed, and stay as they are: server error", "  host: 1, found in ", "hosts 1\n"]
    {
        assert!(told.contains(part), "{told}");
    }
    // The next retry is due in many minutes.
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    let waits = doc! {"$set": {"attempts": 10, "last": bson::DateTime::now()}};
    until("no retry is in progress", async || {
        dead_letters.update_one(doc! {}, waits.clone()).await.unwrap();
        let (code, told, _) = running.command(&["dead-letters", "list"]);
        (code == Some(0) && told.contains("tried 10 times")).then_some(())
    })
    .await;
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"b": 4}}).await.unwrap();
    running.until("it is no longer listed", |status| status.rules[0].dead_letters == 0).await;
    let (code, told, error) = running.command(&["check"]);
    assert_eq!(code, Some(0), "{told}{error}");
}

/// It was not listed, and `retry` waited for it without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_cannot_be_read_is_listed_until_it_is_dropped() {
    let test = denormd_fixture::database().await;
    test.database().collection("logs").insert_one(doc! {"_id": 7, "host": 1}).await.unwrap();
    let running = Running::start(&test, SHARE, "").await;
    running.until_state("live").await;
    let id = doc! {"deployment": "default", "rule": "share", "task": "Later", "key": [1], "target": []};
    let record =
        doc! {"_id": id, "deployment": "default", "rule": "share", "attempts": 1, "reason": "of a later version"};
    test.beside("state").collection("dead_letters").insert_one(record).await.unwrap();
    running.until("it is counted", |status| status.rules[0].dead_letters == 1).await;
    let (code, told, error) = running.command(&["dead-letters", "list"]);
    assert_eq!(code, Some(0), "{error}");
    let line = r#"share record {"deployment":"default","rule":"share","task":"Later","key":[1],"target":[]}: it cannot be read"#;
    assert!(told.contains(line) && told.ends_with("\n1 dead letter\n"), "{told}");
    let (code, told, _) = running.command(&["dead-letters", "retry", "--rule", "share", "--output", "json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((code, &told["left"][0]["id"]["task"]), (Some(1), &serde_json::json!("Later")), "{told}");
    let (code, told, error) = running.command(&["dead-letters", "drop", "--rule", "share"]);
    assert_eq!((code, told.as_str()), (Some(0), "1 dead letter dropped; their targets stay as they are\n"), "{error}");
    running.until("it is gone", |status| status.dead_letters == 0).await;
}

/// A backfill in which every target had failed was called a success. After the rule was removed, its dead letters stayed
/// in the status, where they were said to be tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_names_its_dead_letters_and_they_leave_with_their_rule() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..3).map(|id| doc! {"_id": id, "a": 1, "b": 1})).await.unwrap();
    db.collection("rooms").insert_one(doc! {"_id": 1, "floor": 2}).await.unwrap();
    db.collection("logs").insert_many((0..3).map(|id| doc! {"_id": id, "host": id, "room": 1})).await.unwrap();
    let running = Running::start(&test, &format!("{SHARE}\n{ROOM}"), "").await;
    running.until("both are live", |status| status.rules.iter().all(|rule| rule.state == "live")).await;
    db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$set": {"b": 0}}).await.unwrap();
    running.until("dead letters", |status| status.dead_letters == 3).await;
    let (code, told, error) = running.command(&["backfill", "--rule", "share"]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("rules with dead letters: share\n  hint: `denormd dead-letters list`"), "{error}");
    assert!(told.ends_with("\nshare: done, 3 targets, dead letters: 3\n"), "{told}");
    assert!(running.log().contains("backfill done, with dead letters"), "{}", running.log());
    let told = until("the timeline has all backfills", async || {
        let (_, told, _) = running.command(&["events"]);
        (told.matches("backfill_done").count() == 3).then_some(told)
    })
    .await;
    let ended = |text: &str, rule: &str| {
        told.lines().any(|line| line.contains(text) && line.contains("3 targets in ") && line.contains(rule))
    };
    assert!(ended("not all existing data is up to date: ", ", 3 dead letters (share)"), "{told}");
    assert!(ended(" existing data is up to date: ", " (room)"), "{told}");
    assert!(told.find("backfill_started") < told.find("backfill_done"), "{told}");
    assert!(!running.log().contains("existing data is "), "each start and end has one line: {}", running.log());

    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), text.replace(SHARE, "")).unwrap();
    let gone = |status: &Status| status.rules.len() == 1 && status.dead_letters == 0;
    let status = running.until("they are gone", gone).await;
    assert!(!causes(&status).contains(&"dead_letters"), "{status:#?}");
    // The rule is backfilled when it comes back, so nothing is lost.
    std::fs::write(running.file(), text).unwrap();
    running.until("they are back", |status| status.dead_letters == 3 && status.rules.len() == 2).await;
}

/// The status once said that every change is applied, while the targets that `on_drift: report` leaves as they are were wrong.
#[tokio::test(flavor = "multi_thread")]
async fn drift_that_is_only_reported_is_a_cause_until_a_backfill() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = HOST.replace("name: host,", "name: host, guard: watch, on_drift: report,");
    let running = Running::start(&test, &rule, "").await;
    running.until("it is live", |status| status.rules.first().is_some_and(|rule| rule.state == "live")).await;
    db.collection::<Document>("logs").update_one(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    let status = running.until("the cause", |status| causes(status).contains(&"drift_unrepaired")).await;
    let cause = status.causes.iter().find(|cause| cause.cause == "drift_unrepaired").unwrap();
    assert_eq!((cause.rules.as_slice(), cause.severe), (["host".to_owned()].as_slice(), false));
    let is_named = |status: &Status| status.summary.contains("differ from their definition and are not repaired");
    running.until("the summary names it", is_named).await;
    let is_excepted = |status: &Status| status.current.as_ref().is_some_and(|current| current.except == ["host"]);
    running.until("it is no part of what is current", is_excepted).await;
    let (code, told, error) = running.command(&["wait", "--output", "json"]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&told).unwrap()["except"], json!(["host"]));
    assert_eq!(running.command(&["backfill", "--rule", "host"]).0, Some(0));
    running.until("no cause", |status| causes(status).is_empty() && !is_named(status)).await;
    let log = db.collection::<Document>("logs").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(log.get_str("ip").unwrap(), "10.0.0.1");
}

/// Sources were counted as targets, and a document that does not exist, because its `_id` is a date, was explained.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_creates_its_targets_counts_those_and_explains_no_other() {
    let rule = "  - { name: daily, aggregate: { source: sales, target: { collection: days, create: true }, \
                match: { _id: { $dateTrunc: { date: $at, unit: day } } }, set: { total: { $sum: $amount } } } }";
    let test = denormd_fixture::database().await;
    let at = |hour: i64| bson::DateTime::from_millis(1_788_220_800_000 + hour * 3_600_000);
    let sales = (0..40).map(|hour| doc! {"at": at(hour), "amount": 1});
    test.database().collection("sales").insert_many(sales).await.unwrap();
    let running = Running::start(&test, rule, "").await;
    running.until("it is live", |status| status.rules.first().is_some_and(|rule| rule.state == "live")).await;
    let (code, told, error) = running.command(&["backfill", "--rule", "daily"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(told.ends_with("\ndaily: done, 2 targets\n"), "{told}");
    let state = test.beside("state").collection::<Document>("rules").find_one(doc! {}).await.unwrap().unwrap();
    let progress = doc! {"done": 2_i64, "expected": 42_i64};
    assert_eq!(state.get_document("progress").unwrap(), &progress, "2 targets and 40 sources were to be read");
    let (_, told, _) = running.command(&["events"]);
    assert!(!told.contains("40 targets") && !told.contains("42 targets"), "{told}");
    let (code, told, error) = running.command(&["explain", "daily", "2026-09-01"]);
    assert_eq!((code, told.as_str()), (Some(1), ""), "{error}");
    assert!(error.contains("days` has no document with this _id") && error.contains(r#"'{"$date": "#), "{error}");
    let (code, told, error) = running.command(&["explain", "daily", r#"{"$date": "2026-09-01T00:00:00Z"}"#]);
    assert_eq!(code, Some(0), "{error}");
    assert!(told.contains("expected and stored 24"), "{told}");
}

const HOST: &str = "  - { name: host, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
const ROOM: &str =
    "  - { name: room, copy: { source: rooms, target: logs, match: { room: _id }, set: { floor: $floor } } }";

/// Waits until the one log message has these fields.
async fn log_has(db: &Database, fields: Document) {
    let begun = Instant::now();
    loop {
        let log = db.collection::<Document>("logs").find_one(doc! {}).await.unwrap().unwrap();
        if fields.iter().all(|(name, value)| log.get(name) == Some(value)) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "expected {fields}, found {log}");
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

async fn hosts_and_rooms(db: &Database) {
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "old"}).await.unwrap();
    db.collection("rooms").insert_one(doc! {"_id": 1, "floor": 0}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1, "room": 1}).await.unwrap();
}

async fn set(db: &Database, collection: &str, fields: Document) {
    db.collection::<Document>(collection).update_one(doc! {"_id": 1}, doc! {"$set": fields}).await.unwrap();
}

/// A paused rule writes nothing, also after a restart; other rules and the saved position continue. Once resumed, it
/// has missed nothing.
#[tokio::test]
async fn a_paused_rule_stands_still_and_misses_nothing() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    hosts_and_rooms(&db).await;
    let program = Program::new(&config(&test, &format!("{HOST}\n{ROOM}")));
    program.run(&["plan", "--apply"]).await.exits(0);
    let told = program.run(&["pause", "host"]).await.exits(4);
    assert!(told.err.contains("the rule `host` has not run yet"), "{}", told.err);
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;

    let told = program.run(&["pause", "host"]).await.exits(0);
    assert!(told.out.starts_with("host is paused until `denormd resume host`"), "{}", told.out);
    set(&db, "hosts", doc! {"ip": "new"}).await;
    set(&db, "rooms", doc! {"floor": 1}).await;
    log_has(&db, doc! {"floor": 1, "ip": "old"}).await;
    let refused = program.run(&["backfill", "--rule", "host"]).await.exits(4);
    assert!(refused.err.contains("`denormd resume host` lets it run again"), "{}", refused.err);
    daemon.stop().await;

    let daemon = program.daemon();
    daemon.says("this rule is paused").await;
    set(&db, "rooms", doc! {"floor": 2}).await;
    log_has(&db, doc! {"floor": 2, "ip": "old"}).await;
    let checked = program.run(&["check"]).await.exits(3);
    assert!(checked.err.contains("host: it is paused"), "{}", checked.err);
    assert!(checked.out.contains("host 1 ip: value: another string"), "{}", checked.out);

    program.run(&["resume", "host"]).await.exits(0);
    log_has(&db, doc! {"floor": 2, "ip": "new"}).await;
    let told = program.run(&["resume", "host"]).await.exits(0);
    assert_eq!(told.out, "host is not paused\n");
    // A pause that ends by itself.
    let told = program.run(&["pause", "host", "--for", "2s", "--output", "json"]).await.exits(0);
    assert_eq!(told.json(), json!({"rule": "host", "paused": true, "seconds": 2}));
    set(&db, "hosts", doc! {"ip": "newest"}).await;
    log_has(&db, doc! {"ip": "newest"}).await;
    daemon.stop().await;
}

/// A daemon whose rules `host` and `room` have been backfilled.
async fn two_rules(test: &TestDb) -> (Program, Process) {
    hosts_and_rooms(&test.database()).await;
    let program = Program::new(&config(test, &format!("{HOST}\n{ROOM}")));
    program.run(&["plan", "--apply"]).await.exits(0);
    let daemon = program.daemon();
    program.backfilled(test, 2).await;
    (program, daemon)
}

/// The emergency stop: after one command nothing is written, whatever changes; another command ends it.
#[tokio::test]
async fn pause_all_stops_every_rule_and_resume_all_ends_it() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let (program, daemon) = two_rules(&test).await;
    program.run(&["pause", "--all", "host"]).await.exits(2);
    program.run(&["pause"]).await.exits(2);
    // It began a backfill at once, again and again.
    program.run(&["pause", "--all", "--for", "0m"]).await.exits(2);

    let told = program.run(&["pause", "--all"]).await.exits(0);
    assert!(told.out.starts_with("2 rules are paused until `denormd resume --all`"), "{}", told.out);
    let states = test.beside("state").collection::<Document>("rules");
    assert_eq!(states.count_documents(doc! {"paused": true}).await.unwrap(), 2);
    set(&db, "hosts", doc! {"ip": "new"}).await;
    set(&db, "rooms", doc! {"floor": 9}).await;
    let checked = program.run(&["check"]).await.exits(3);
    assert!(
        checked.err.contains("host: it is paused") && checked.err.contains("room: it is paused"),
        "{}",
        checked.err
    );
    log_has(&db, doc! {"ip": "old"}).await;

    let told = program.run(&["resume", "--all", "--output", "json"]).await.exits(0);
    assert_eq!(told.json(), json!({"rules": ["host", "room"], "resumed": true, "blocked": []}));
    log_has(&db, doc! {"floor": 9, "ip": "new"}).await;
    let told = program.run(&["resume", "--all"]).await.exits(0);
    assert_eq!(told.out, "no rule is paused\n");
    // While the config cannot be read, one without rules stops them all.
    let without_rules = Program::new(&config(&test, "[]"));
    let told = without_rules.run(&["pause", "--all"]).await.exits(0);
    assert!(told.out.starts_with("2 rules are paused"), "{}", told.out);
    daemon.stop().await;
}

/// The pause of one operator ended with the shorter one of another, and a rule was resumed that was to stand still.
#[tokio::test]
async fn a_pause_without_an_end_is_not_given_one() {
    let test = denormd_fixture::database().await;
    let (program, daemon) = two_rules(&test).await;
    program.run(&["pause", "host"]).await.exits(0);
    let told = program.run(&["pause", "--all", "--for", "10m"]).await.exits(0);
    let stays = "host: stays paused, without an end; resume it first to give it one\n";
    assert!(told.out.starts_with("1 rule is paused for 10 min 0 s") && told.out.ends_with(stays), "{}", told.out);
    let states = test.beside("state").collection::<Document>("rules");
    let until = async |rule: &str| {
        let record = states.find_one(doc! {"_id.rule": rule, "paused": true}).await.unwrap().unwrap();
        record.get("until").cloned().unwrap()
    };
    assert_eq!(until("host").await, Bson::Null);
    let first = until("room").await;
    let told = program.run(&["pause", "host", "--for", "10m"]).await.exits(0);
    assert_eq!(told.out, stays);
    let told = program.run(&["pause", "host", "--for", "10m", "--output", "json"]).await.exits(0);
    assert_eq!(told.json(), json!({"rule": "host", "paused": true, "seconds": null}));
    assert_eq!(until("host").await, Bson::Null);
    // An end may be changed, and taken away.
    let told = program.run(&["pause", "--all", "--for", "20m", "--output", "json"]).await.exits(0);
    let expected = json!({"rules": ["room"], "paused": true, "seconds": 1200, "without_end": ["host"], "blocked": [], "not_registered": []});
    assert_eq!(told.json(), expected);
    let second = until("room").await;
    assert!(second.as_datetime() > first.as_datetime(), "{first} {second}");
    program.run(&["pause", "room"]).await.exits(0);
    assert_eq!(until("room").await, Bson::Null);
    daemon.stop().await;
}

/// The emergency stop was called a success while the leader was about to start a rule of the changed config.
#[tokio::test]
async fn pause_all_names_the_rules_that_no_leader_has_registered() {
    let test = denormd_fixture::database().await;
    hosts_and_rooms(&test.database()).await;
    let program = Program::new(&config(&test, &format!("{HOST}\n{ROOM}")));
    program.run(&["plan", "--apply"]).await.exits(0);
    let told = program.run(&["pause", "--all"]).await.exits(4);
    assert!(told.err.contains("not paused, as no leader has registered them yet: host, room"), "{}", told.err);
    program.write(&config(&test, HOST));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    let newer = Program::new(&config(&test, &format!("{HOST}\n{ROOM}")));
    let told = newer.run(&["pause", "--all"]).await.exits(4);
    assert!(told.out.starts_with("1 rule is paused until"), "{}", told.out);
    assert!(told.err.contains("not paused, as no leader has registered them yet: room\n"), "{}", told.err);
    assert!(told.err.contains("run `denormd pause --all` again once `denormd status` lists them"), "{}", told.err);
    let told = newer.run(&["pause", "--all", "--output", "json"]).await.exits(4);
    assert_eq!((&told.json()["rules"], &told.json()["not_registered"]), (&json!(["host"]), &json!(["room"])));
    daemon.stop().await;

    // A rule that had left the config is back in it: the next leader starts it.
    let daemon = newer.daemon();
    newer.backfilled(&test, 1).await;
    daemon.stop().await;
    let daemon = program.daemon();
    daemon.says("this rule is no longer in the config").await;
    daemon.stop().await;
    let told = newer.run(&["pause", "--all"]).await.exits(4);
    assert!(told.err.contains("not paused, as no leader has registered them yet: room\n"), "{}", told.err);
}

/// The config of a command may be older or smaller than the leader's: the emergency stop stops what runs.
#[tokio::test]
async fn pause_all_stops_rules_that_the_command_does_not_know() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let (program, daemon) = two_rules(&test).await;
    let other = Program::new(&config(&test, HOST));
    let told = other.run(&["pause", "--all"]).await.exits(0);
    assert!(told.out.starts_with("2 rules are paused until `denormd resume --all`"), "{}", told.out);
    set(&db, "rooms", doc! {"floor": 9}).await;
    let states = test.beside("state").collection::<Document>("rules");
    assert_eq!(states.count_documents(doc! {"paused": true}).await.unwrap(), 2);
    let told = other.run(&["resume", "--all"]).await.exits(0);
    assert!(told.out.contains("room is resumed, and backfilled by the leader\n"), "{}", told.out);
    log_has(&db, doc! {"floor": 9}).await;

    // A rule that has left the config does not run: there is nothing to pause.
    program.write(&config(&test, HOST));
    daemon.says("this rule is no longer in the config").await;
    let old = Program::new(&config(&test, &format!("{HOST}\n{ROOM}")));
    let told = old.run(&["pause", "room"]).await.exits(4);
    assert!(told.err.contains("the rule `room` was not in the config of the last leader"), "{}", told.err);
    // Its backfill would overwrite the application's values without keeping them.
    let told = old.run(&["backfill", "--rule", "room"]).await.exits(4);
    assert!(told.err.contains("the rule `room` was not in the config of the last leader"), "{}", told.err);
    // The command cannot know whether its config is older than the leader's, or newer.
    let told = old.run(&["pause", "--all"]).await.exits(4);
    assert!(told.out.starts_with("1 rule is paused"), "{}", told.out);
    assert!(told.err.contains("not paused, as no leader has registered them yet: room\n"), "{}", told.err);
    daemon.stop().await;
}

/// Such a rule was once called as current as any other, with a lag of 0.
#[tokio::test]
async fn a_rule_that_waits_for_its_backfill_is_in_the_headline() {
    let test = denormd_fixture::database().await;
    hosts_and_rooms(&test.database()).await;
    let manual = HOST.replace("name: host,", "name: host, backfill: manual, allow_scan: true,");
    let running = Running::start(&test, &format!("{manual}\n{ROOM}"), "").await;
    let of = |status: &Status, rule: usize| (status.rules[rule].state.clone(), status.rules[rule].lag_seconds);
    let settled = |status: &Status| {
        let is_live = status.rules.len() == 2 && of(status, 1) == ("live".to_owned(), Some(0.0));
        is_live && status.dead_letters_known && causes(status) == ["awaiting_backfill"]
    };
    let status = running.until("the other rule is not behind", settled).await;
    assert_eq!(of(&status, 0), ("awaiting_backfill".to_owned(), None));
    assert_eq!(status.summary, "Rule host is waiting for `denormd backfill`. The other rules are not behind.");
    let (_, told, _) = running.command(&["status"]);
    let row = told.lines().find(|line| line.contains("awaiting backfill  ")).unwrap_or_else(|| panic!("{told}"));
    let columns: Vec<&str> = row.split_whitespace().take(4).collect();
    assert_eq!(columns, ["host", "awaiting", "backfill", "-"], "{told}");
    let metrics = running.text("/metrics").await;
    assert!(metrics.contains("denormd_rule_lag_seconds{rule=\"room\"} 0"), "{metrics}");
    assert!(!metrics.contains("denormd_rule_lag_seconds{rule=\"host\"}"), "{metrics}");
    let (_, told, _) = running.command(&["status"]);
    assert!(told.contains("Rule host is waiting for `denormd backfill`."), "{told}");
    assert!(told.contains("`denormd backfill --rule RULE` when ready"), "{told}");
}

/// The source is dropped while a rule is paused. Once resumed, the rule must not take the loss for intended. Until then it once
/// ran on, as a rule that only copies does without its source, and ended its pause itself when the source was restored.
#[tokio::test]
async fn a_rule_whose_source_goes_during_a_pause_stays_paused() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    hosts_and_rooms(&db).await;
    let program = Program::new(&config(&test, &format!("{HOST}\n{ROOM}")));
    program.run(&["plan", "--apply"]).await.exits(0);
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    program.run(&["pause", "host"]).await.exits(0);
    db.collection::<Document>("hosts").drop().await.unwrap();
    daemon.says("the rule stays paused").await;
    let told = program.run(&["resume", "host"]).await.exits(4);
    assert!(told.err.contains("its source collection was dropped"), "{}", told.err);
    log_has(&db, doc! {"ip": "old"}).await;

    // Blocked because of its source, it would run again by itself, as the other rule does: it can be paused.
    program.run(&["pause", "host"]).await.exits(0);
    db.collection::<Document>("rooms").drop().await.unwrap();
    daemon.says("the rule is blocked").await;
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "new"}).await.unwrap();
    db.collection("rooms").insert_one(doc! {"_id": 1, "floor": 7}).await.unwrap();
    daemon.says("the source collection is there again").await;
    log_has(&db, doc! {"ip": "old", "floor": 7}).await;
    let told = program.run(&["backfill", "--rule", "host"]).await.exits(4);
    assert!(told.err.contains("paused by an operator; its source collection was dropped"), "{}", told.err);

    let told = program.run(&["resume", "--all"]).await.exits(0);
    assert!(told.err.contains("host is not paused any more, but blocked"), "{}", told.err);
    log_has(&db, doc! {"ip": "new"}).await;
    daemon.stop().await;
}

/// A paused rule is changed, and its first backfill would overwrite the application's values. The pause was lost: whoever agreed
/// to the values started the rule.
#[tokio::test]
async fn a_pause_outlasts_a_change_that_is_blocked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    hosts_and_rooms(&db).await;
    let program = Program::new(&config(&test, HOST));
    program.run(&["plan", "--apply"]).await.exits(0);
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["pause", "host"]).await.exits(0);
    daemon.stop().await;
    set(&db, "logs", doc! {"label": "the application's"}).await;
    program.write(&config(&test, &HOST.replace("ip: $ip", "ip: $ip, label: $ip")));
    let daemon = program.daemon();
    daemon.says("changed rule").await;
    let told = program.run(&["unblock", "host"]).await.exits(4);
    assert!(told.err.contains("paused by an operator; its first backfill would change existing data"), "{}", told.err);
    let told = program.run(&["resume", "host"]).await.exits(4);
    assert!(told.err.contains("rule `host` is blocked: its first backfill would change"), "{}", told.err);
    log_has(&db, doc! {"label": "the application's"}).await;
    program.run(&["unblock", "host"]).await.exits(0);
    log_has(&db, doc! {"label": "old"}).await;
    daemon.stop().await;

    // Paused and changed once more, it leaves the config: `pause --all` waited for it without end.
    set(&db, "logs", doc! {"floor": 5}).await;
    program.run(&["pause", "host"]).await.exits(0);
    program.write(&config(&test, &HOST.replace("ip: $ip", "floor: $ip")));
    let daemon = program.daemon();
    until("the change is registered", async || {
        let told = program.run(&["unblock", "host"]).await.exits(4);
        told.err.contains("its first backfill would change existing data").then_some(())
    })
    .await;
    daemon.stop().await;
    program.write(&config(&test, &HOST.replace("name: host", "name: other").replace("ip: $ip", "other: $ip")));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    let told = program.run(&["pause", "--all"]).await.exits(0);
    assert!(told.err.contains("host is blocked"), "{}", told.err);
    daemon.stop().await;
}

/// A rule in shadow counts what it would change, in the backfill and at each change, and changes nothing.
#[tokio::test]
async fn a_rule_in_shadow_counts_and_writes_nothing() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    hosts_and_rooms(&db).await;
    db.collection("logs").insert_many((2..5).map(|n| doc! {"_id": n, "host": 1, "ip": "old"})).await.unwrap();
    let names = "  - { name: names, shadow: true, copy: { source: hosts, target: logs, match: { \"hosts.$[]\": _id }, into: all, element: $ip } }";
    let rules = format!("{}\n{names}", HOST.replace("name: host,", "name: host, shadow: true,"));
    let before = crate::support::daemon::all(&db, "logs").await;
    let daemon = Daemon::start(&test, &rules).await;
    daemon.settled().await;
    let figure = |name: &str, rule: &str| {
        let text = String::from_utf8(daemon.context().metrics.expose().unwrap()).unwrap();
        let series = format!("denormd_shadow_{name}_total{{rule=\"{rule}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series).map(ToOwned::to_owned));
        line.map_or(0, |value| value.parse::<u64>().unwrap())
    };
    assert_eq!((figure("compared", "host"), figure("differing", "host")), (4, 1));
    assert_eq!((figure("compared", "names"), figure("differing", "names")), (4, 0));
    set(&db, "hosts", doc! {"ip": "new"}).await;
    daemon.settled().await;
    assert_eq!((figure("compared", "host"), figure("differing", "host")), (8, 5));
    assert_eq!(crate::support::daemon::all(&db, "logs").await, before);
    daemon.stop().await;
    // When it is no longer a shadow rule, it is backfilled.
    let daemon = Daemon::start(&test, HOST).await;
    daemon.settled().await;
    log_has(&db, doc! {"ip": "new"}).await;
    daemon.stop().await;
}

/// The fields left behind by a rule were once known only from the log of the day of its change.
#[tokio::test(flavor = "multi_thread")]
async fn status_lists_the_fields_that_no_rule_owns_any_more() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    hosts_and_rooms(&db).await;
    set(&db, "hosts", doc! {"name": "alpha"}).await;
    let rule = "  - { name: address, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip, name: $name } } }";
    let mut running = crate::support::running::Running::start(&test, rule, "").await;
    log_has(&db, doc! {"name": "alpha"}).await;
    running.stop();
    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), text.replace(", name: $name", "")).unwrap();
    running.run().await;
    let retired = |status: &serde_json::Value| status["retired"].as_array().map_or(0, Vec::len);
    running.until_json("the field is listed", |status| retired(status) == 1).await;
    let (_, told, _) = running.command(&["status"]);
    assert!(told.contains("until `denormd prune RULE`"), "{told}");
    assert!(told.contains(&format!("address  name of {}.logs", test.name)), "{told}");
    assert_eq!(running.command(&["prune", "address"]).0, Some(0));
    running.until_json("the list is empty", |status| retired(status) == 0).await;
}
