//! The processes that compare copies with their definition (the audit, `check`, a backfill's scan) continue after a
//! target that cannot be computed, and see the same targets as everything else.

use std::sync::{Arc, atomic::Ordering};

use bson::{Bson, DateTime, Document, doc};
use denormd_engine::{
    checkpoint::store::Store,
    jobs::check::{Check, Scope},
    reconcile::{Context, scan},
};
use denormd_fixture::TestDb;
use denormd_model::position::ClusterTime;
use mongodb::Database;

use crate::support::{
    daemon::{Daemon, all, config, context},
    process::Program,
};

const LATEST: ClusterTime = ClusterTime { seconds: u32::MAX, increment: 0 };

/// One round of the audit over the only rule, where everything is applied: the number of targets that have drifted.
async fn audited(context: &Context) -> u64 {
    let before = context.counts.drift.load(Ordering::Relaxed);
    let (out, _pages) = tokio::sync::mpsc::channel(1);
    denormd_engine::jobs::audit::round(context, &context.plan.rules[0], &|_| Some(LATEST), &out).await.unwrap();
    context.counts.drift.load(Ordering::Relaxed) - before
}

/// A check of the only rule: the number of targets that differ, and of those that cannot be computed.
async fn checked(context: &Arc<Context>) -> (u64, u64) {
    checked_within(context, Scope::default()).await
}

async fn checked_within(context: &Arc<Context>, scope: Scope) -> (u64, u64) {
    let dead_letters = &context.dead_letters;
    let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap();
    let mut check = Check::new(context, &store, &context.plan.rules[0], scope).await.unwrap();
    while check.next().await.unwrap().is_some() {}
    (check.tally.differing, check.tally.refused)
}

/// The documents of sources without a usable key were not compared, and `check` and the audit said that nothing differs.
#[tokio::test]
async fn a_source_whose_document_is_unknown_is_counted() {
    let test = denormd_fixture::database().await;
    let day = DateTime::from_millis(1_709_942_400_000);
    insert(&test.database(), "sales", [doc! {"_id": 1, "at": day}, doc! {"_id": 2, "at": "2024-03-09"}]).await;
    insert(&test.database(), "daily", [doc! {"_id": day, "n": 1}]).await;
    let rule = "aggregate: { source: sales, target: { collection: daily, create: true }, \
        match: { _id: { $dateTrunc: { date: $at, unit: day } } }, set: { n: { $sum: 1 } } }";
    let context = context(&config(&test, &format!("  - {{ name: r, allow_scan: true, {rule} }}"))).await;
    assert_eq!(checked(&context).await, (0, 1));
    assert_eq!(checked_within(&context, Scope { sample: Some(10), ..Scope::default() }).await, (0, 1));
    assert_eq!(audited(&context).await, 0);
    assert_eq!(context.published.borrow().audits["r"].last_unknown, 1);
}

async fn insert(db: &Database, collection: &str, documents: impl IntoIterator<Item = Document>) {
    db.collection(collection).insert_many(documents).await.unwrap();
}

/// The audit once compared a page at once: one target whose value cannot be computed (an expression that fails, an
/// array over `max_elements`) ended the round, so that no target after it was ever compared.
#[tokio::test]
async fn the_audit_goes_on_behind_a_target_that_cannot_be_computed() {
    let shout = "copy: { source: s, target: t, match: { ref: _id }, set: { shout: { $concat: [$name, '!'] } } }";
    let many = "collect: { source: s, target: t, match: { _id: ref }, into: all, element: $_id, max_elements: 2 }";
    for rule in [shout, many] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let name = |n: i32| if n == 3 { Bson::Int32(5) } else { format!("name {n}").into() };
        insert(&db, "s", (1..=6).map(|n| doc! {"_id": n, "name": name(n), "ref": n})).await;
        insert(&db, "s", (10..=14).map(|n| doc! {"_id": n, "name": "more", "ref": 3})).await;
        insert(&db, "t", (1..=6).map(|n| doc! {"_id": n, "ref": n})).await;
        let text = config(&test, &format!("  - {{ name: r, on_drift: report, allow_scan: true, {rule} }}"));
        let context = context(&text).await;
        assert_eq!(audited(&context).await, 5, "{rule}");
        assert_eq!(checked(&context).await, (5, 1), "{rule}");
    }
}

/// A query by a key also finds the sources whose array contains it. They match no key, so it does not matter that the
/// server cannot compute their values; once they made the key a dead letter, and a dangling reference kept its value.
#[tokio::test]
async fn a_source_that_answers_nothing_fails_no_key() {
    let concat = "{ $concat: [$name, '!'] }";
    let one = format!("copy: {{ source: s, target: t, match: {{ ref: code }}, set: {{ shout: {concat} }} }}");
    let several =
        format!("copy: {{ source: s, target: t, match: {{ 'refs.$[]': code }}, set: {{ shout: {concat} }} }}");
    let held =
        format!("collect: {{ source: s, target: t, match: {{ _id: 'lists.$[]' }}, into: all, element: {concat} }}");
    let sums = format!(
        "aggregate: {{ source: s, target: t, match: {{ _id: code }}, set: {{ n: {{ $sum: {{ $strLenCP: {concat} }} }} }} }}"
    );
    for rule in [one, several, held, sums] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let other = doc! {"_id": 2, "code": [1, 3], "lists": [[1, 3]], "name": 5};
        insert(&db, "s", [doc! {"_id": 1, "code": 1, "lists": [1], "name": "one"}, other]).await;
        insert(&db, "t", [1, 3].map(|n| doc! {"_id": n, "ref": n, "refs": [n], "shout": "old", "n": 9, "all": [9]}))
            .await;
        let text = config(&test, &format!("  - {{ name: r, on_drift: report, allow_scan: true, {rule} }}"));
        let context = context(&text).await;
        assert_eq!(checked(&context).await, (2, 0), "{rule}");
    }
}

/// A collection in which the server by default does not distinguish "X" and "x".
async fn ignores_case(db: &Database, collection: &str) {
    let collation = doc! {"locale": "en", "strength": 2};
    db.run_command(doc! {"create": collection, "collation": collation}).await.unwrap();
}

/// `where` has the same meaning in a collection with its own collation: the backfill once skipped all of these targets,
/// and the audit and `check` agreed with it.
#[tokio::test]
async fn a_filter_means_the_same_under_a_default_collation() {
    let test: TestDb = denormd_fixture::database().await;
    let db = test.database();
    for name in ["hosts", "logs"] {
        ignores_case(&db, name).await;
    }
    insert(&db, "hosts", [doc! {"_id": 1, "ip": "10.0.0.1"}]).await;
    // Byte by byte, "B" is less than "a"; in alphabetical order it is greater.
    let log = |n: i32| doc! {"_id": format!("log {n:04}"), "host": 1, "code": if n % 2 == 0 { "B" } else { "b" }};
    // More of them match than a page of a check has.
    insert(&db, "logs", (0..2000).map(log)).await;
    insert(&db, "logs", [doc! {"_id": 7, "host": 1, "code": "B"}, doc! {"_id": Bson::MaxKey, "host": 1, "code": "B"}])
        .await;
    let rule = "name: ip, guard: off, on_drift: report, copy: { source: hosts, target: { collection: logs, where: { code: { $lt: a } } }, match: { host: _id }, set: { ip: $ip } }";
    let text = config(&test, &format!("  - {{ {rule} }}"));
    let told = Program::new(&text).run(&["plan"]).await;
    assert!(told.out.contains("ip: adds 1002, "), "{}\n{}", told.out, told.err);
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    daemon.stop().await;
    let logs = db.collection::<Document>("logs");
    let filled = || logs.count_documents(doc! {"ip": "10.0.0.1"});
    assert_eq!(filled().await.unwrap(), 1002, "backfilled");
    let context = context(&text).await;
    assert_eq!(scan::count(&context, &context.plan.rules[0], None, false).await, Some(1002));
    logs.update_many(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    assert_eq!(audited(&context).await, 1002);
    assert_eq!(checked(&context).await, (1002, 0));
    let told = Program::new(&text).run(&["check", "--sample", "100000", "--output", "json"]).await.exits(3).lines();
    let compared: Vec<&serde_json::Value> = told.iter().map(|line| &line["compared"]).collect();
    assert!(compared.contains(&&serde_json::json!(1002)), "{told:?}");
    assert_eq!(all(&db, "logs").await.len(), 2002);
}
