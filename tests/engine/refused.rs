//! A document on which the server cannot evaluate a rule stops no other document.

use bson::{DateTime, Document, RawDocumentBuf, cstr, doc, rawdoc};
use denormd_fixture::ReplicaSet;

use crate::{
    engine::fan_outs::fail,
    support::{
        daemon::{Daemon, all, config, until},
        process::Program,
    },
};

async fn values(db: &mongodb::Database, collection: &str) -> Vec<Option<i32>> {
    all(db, collection).await.iter().map(|target| target.get_i32("n").ok()).collect()
}

/// Waits until a round of the audit has ended.
async fn audited(daemon: &Daemon) {
    let ended = || daemon.progress().borrow().audits.get("r").and_then(|audit| audit.last_ended);
    let before = ended();
    until("a round of the audit", async || (ended() > before).then_some(())).await;
}

/// The fan-out job, the backfill and the audit read the targets with the same `where`, and were repeated without end. Sources that
/// change, are deleted and return are still followed.
#[tokio::test]
async fn a_target_on_which_where_fails_becomes_a_dead_letter_alone() {
    for touch in ["", ", touch: at"] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let (sources, things) = (db.collection::<Document>("sources"), db.collection::<Document>("things"));
        sources.insert_one(doc! {"_id": "a", "n": 1}).await.unwrap();
        things.insert_many((0..40).map(|id| doc! {"_id": id, "ref": "a", "lines": [1]})).await.unwrap();
        let rule = format!(
            "  - {{ name: r, copy: {{ source: sources, match: {{ ref: _id }}, set: {{ n: $n }}{touch}, \
             target: {{ collection: things, where: {{ $expr: {{ $gt: [{{ $size: $lines }}, 0] }} }} }} }} }}"
        );
        let daemon = Daemon::start(&test, &rule).await;
        daemon.settled().await;
        assert_eq!(values(&db, "things").await, [Some(1); 40]);
        things.update_one(doc! {"_id": 7}, doc! {"$unset": {"lines": ""}}).await.unwrap();
        let are_all_but_one = async |n: Option<i32>| {
            daemon.settled().await;
            let mut expected = [n; 40];
            expected[7] = Some(1);
            assert_eq!(values(&db, "things").await, expected, "{rule}");
        };
        for n in [2, 3] {
            sources.update_one(doc! {}, doc! {"$set": {"n": n}}).await.unwrap();
            are_all_but_one(Some(n)).await;
        }
        let letters = all(&test.beside("state"), "dead_letters").await;
        let about_it = |letter: &Document| letter.get_document("_id").unwrap().to_string().contains("[7]");
        assert!(letters.iter().all(about_it) && !letters.is_empty(), "{letters:?}");
        daemon.ask("r").await;
        are_all_but_one(Some(3)).await;
        audited(&daemon).await;
        // A target beside it is repaired.
        things.update_one(doc! {"_id": 8}, doc! {"$set": {"n": 0}}).await.unwrap();
        until("the repair", async || (values(&db, "things").await[8] == Some(3)).then_some(())).await;
        sources.delete_one(doc! {"_id": "a"}).await.unwrap();
        sources.insert_one(doc! {"_id": "b"}).await.unwrap();
        are_all_but_one(None).await;
        sources.insert_one(doc! {"_id": "a", "n": 4}).await.unwrap();
        are_all_but_one(Some(4)).await;
        things.update_one(doc! {"_id": 7}, doc! {"$set": {"lines": [1]}}).await.unwrap();
        until("the last one", async || (values(&db, "things").await == [Some(4); 40]).then_some(())).await;
        daemon.stop().await;
    }
}

/// The backfill of a rule that creates its targets was repeated without end if `where` could not be evaluated on one source, or the date
/// of one was outside of every calendar.
#[tokio::test]
async fn a_source_without_a_key_stops_no_other_source() {
    let rule = "aggregate: { source: @source, target: { collection: days, create: true }, match: { _id: @key }, set: { n: { $sum: $n } } }";
    let day = rule.replace("@source", "sales").replace("@key", "{ $dateTrunc: { date: $at, unit: day } }");
    let sold = "{ collection: sales, where: { $expr: { $gt: [{ $size: $lines }, 0] } } }";
    let item = rule.replace("@source", sold).replace("@key", "item");
    for (rule, odd) in [
        (day, doc! {"_id": 20, "n": 1, "at": DateTime::from_millis(i64::MIN)}),
        (item, doc! {"_id": 20, "n": 1, "item": 20}),
    ] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let sale =
            |id: i64| doc! {"_id": id, "n": 1, "item": id, "at": DateTime::from_millis(id * 86_400_000), "lines": [1]};
        db.collection("sales").insert_many((0..40).filter(|id| *id != 20).map(sale)).await.unwrap();
        db.collection("sales").insert_one(odd).await.unwrap();
        let daemon = Daemon::start(&test, &format!("  - {{ name: r, allow_scan: true, {rule} }}")).await;
        daemon.settled().await;
        assert_eq!(values(&db, "days").await, [Some(1); 39], "{rule}");
        assert_eq!(all(&test.beside("state"), "dead_letters").await.len(), 1, "{rule}");
        audited(&daemon).await;
        daemon.stop().await;
    }
}

/// A value of a single target that takes too long twice is tried again, as any other write.
#[tokio::test]
async fn a_target_whose_write_times_out_twice_is_no_dead_letter() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("sources").insert_one(doc! {"_id": 1, "price": 2}).await.unwrap();
    db.collection("things").insert_one(doc! {"_id": 1, "ref": 1, "qty": 3}).await.unwrap();
    let rule = "  - { name: r, allow_scan: true, copy: { source: sources, target: things, match: { ref: _id }, \
                set: { n: { $multiply: [$price, $$target.qty] } } } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let timeout = doc! {"failCommands": ["update"], "namespace": format!("{}.things", test.name), "errorCode": 50};
    fail(&test, doc! {"times": 2}, timeout).await;
    db.collection::<Document>("sources").update_one(doc! {}, doc! {"$set": {"price": 5}}).await.unwrap();
    until("the write", async || (values(&db, "things").await == [Some(15)]).then_some(())).await;
    daemon.settled().await;
    assert_eq!(daemon.context().counts.dead_letters.load(std::sync::atomic::Ordering::Relaxed), 0);
    daemon.stop().await;
}

/// The statement demanded a value that no document can hold, matched nothing, and was repeated for ever.
#[tokio::test]
async fn a_target_with_a_field_name_twice_becomes_a_dead_letter_alone() {
    for touch in ["", ", touch: at"] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        db.collection("sources").insert_one(doc! {"_id": 1, "n": 1}).await.unwrap();
        let mut twice = RawDocumentBuf::new();
        for n in [1, 2] {
            twice.append(cstr!("a"), n);
        }
        let odd = rawdoc! {"_id": 2, "ref": 1, "meta": twice};
        let documents = [rawdoc! {"_id": 1, "ref": 1, "meta": {"a": 1}}, odd, rawdoc! {"_id": 3, "ref": 1}];
        db.collection::<RawDocumentBuf>("things").insert_many(documents).await.unwrap();
        let rule = format!(
            "  - {{ name: r, allow_scan: true, copy: {{ source: sources, target: things, match: {{ ref: _id }}, \
             set: {{ n: $n, m: $$target.meta }}{touch} }} }}"
        );
        let daemon = Daemon::start(&test, &rule).await;
        daemon.settled().await;
        assert_eq!(values(&db, "things").await, [Some(1), None, Some(1)]);
        assert_eq!(all(&test.beside("state"), "dead_letters").await.len(), 1, "{touch}");
        daemon.stop().await;
    }
}

/// The leader died between recording a changed rule and forgetting the dead letters of its former definition. Their keys were those of
/// two fields, and the retry took the first for the whole key: every target with it lost its value, although its source existed.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_former_definition_are_not_retried() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("stock").insert_one(doc! {"_id": 1, "sku": "A", "tenant": "t", "n": 0}).await.unwrap();
    let offers = db.collection::<Document>("offers");
    offers.insert_many((0..3).map(|id| doc! {"_id": id, "sku": "A", "tenant": "t"})).await.unwrap();
    let rule = "  - { name: r, backfill: manual, copy: { source: stock, target: offers, match: { sku: sku, tenant: tenant }, set: { n: { $divide: [6, $n] } } } }";
    let program = Program::new(&config(&test, rule));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    let letters = test.beside("state").collection::<Document>("dead_letters");
    let rules = test.beside("state").collection::<Document>("rules");
    until("the rule is registered", async || rules.find_one(doc! {}).await.unwrap()).await;
    program.run(&["backfill", "--rule", "r"]).await.exits(1);
    assert!(letters.count_documents(doc! {"_id.key": ["A", "t"]}).await.unwrap() > 0);
    daemon.stop().await;

    let by_sku = rule.replace("{ sku: sku, tenant: tenant }", "{ sku: sku }").replace("$divide", "$add");
    program.write(&config(&test, &by_sku));
    program.run(&["plan", "--apply"]).await;
    offers.update_many(doc! {}, doc! {"$set": {"n": 6}}).await.unwrap();
    let died = program.run_and_die(&["run"], "rule-reset").await;
    assert!(died.err.contains("rule-reset"), "{}", died.err);
    assert!(letters.count_documents(doc! {"_id.key": ["A", "t"]}).await.unwrap() > 0, "they are still there");
    let daemon = program.daemon();
    until("they are deleted", async || (letters.count_documents(doc! {}).await.unwrap() == 0).then_some(())).await;
    // One that a former leader records late.
    let late = doc! {
        "_id": {"deployment": "default", "rule": "r", "task": "Value", "key": ["A", "t"], "target": []}, "deployment": "default",
        "rule": "r", "reason": "", "attempts": 1, "first": DateTime::now(), "last": DateTime::from_millis(0),
        "definition": bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![1; 32] },
    };
    letters.insert_one(late).await.unwrap();
    until("it is deleted", async || (letters.count_documents(doc! {}).await.unwrap() == 0).then_some(())).await;
    assert_eq!(values(&db, "offers").await, [Some(6); 3]);
    daemon.stop().await;
}

/// The copy of such a document has both fields, too. It differed from its definition for ever, and `touch` moved with each round of the
/// audit.
#[tokio::test(flavor = "multi_thread")]
async fn a_copied_value_with_a_field_name_twice_is_no_difference() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let twice = rawdoc! {"_id": 1, "info": {"a": 1, "b": 2, "a": 3}};
    db.collection::<RawDocumentBuf>("sources").insert_one(twice).await.unwrap();
    db.collection("things").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    let rule = "  - { name: r, copy: { source: sources, target: things, match: { ref: _id }, set: { info: $info }, touch: at } }";
    let program = Program::new(&config(&test, rule));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["check"]).await.exits(0);
    daemon.stop().await;
}
