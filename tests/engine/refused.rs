//! One document on which the server cannot evaluate something stops no other.

use bson::{DateTime, Document, doc};
use denormd_fixture::ReplicaSet;

use crate::{
    engine::fan_outs::fail,
    support::daemon::{Daemon, all, until},
};

async fn values(db: &mongodb::Database, collection: &str) -> Vec<Option<i32>> {
    all(db, collection).await.iter().map(|target| target.get_i32("n").ok()).collect()
}

/// Number of rounds of the audit that have ended since.
async fn audited(daemon: &Daemon) {
    let ended = || daemon.progress().borrow().audits.get("r").and_then(|audit| audit.last_ended);
    let before = ended();
    until("a round of the audit", async || (ended() > before).then_some(())).await;
}

/// The fan-out job, the backfill and the audit read the targets with the same `where`, and were tried again without end.
#[tokio::test]
async fn a_target_on_which_where_fails_becomes_a_dead_letter_alone() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let things = db.collection::<Document>("things");
    db.collection("sources").insert_one(doc! {"_id": "a", "n": 1}).await.unwrap();
    things.insert_many((0..40).map(|id| doc! {"_id": id, "ref": "a", "lines": [1]})).await.unwrap();
    let rule = "  - { name: r, copy: { source: sources, match: { ref: _id }, set: { n: $n }, \
                target: { collection: things, where: { $expr: { $gt: [{ $size: $lines }, 0] } } } } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    assert_eq!(values(&db, "things").await, [Some(1); 40]);
    things.update_one(doc! {"_id": 7}, doc! {"$unset": {"lines": ""}}).await.unwrap();
    let change = async |n: i32| {
        let sources = db.collection::<Document>("sources");
        sources.update_one(doc! {}, doc! {"$set": {"n": n}}).await.unwrap();
        daemon.settled().await;
        let mut expected = [Some(n); 40];
        expected[7] = Some(1);
        assert_eq!(values(&db, "things").await, expected);
    };
    change(2).await;
    change(3).await;
    let letters = all(&test.beside("state"), "dead_letters").await;
    assert!(letters.iter().all(|letter| letter.to_string().contains('7')) && !letters.is_empty(), "{letters:?}");
    daemon.ask("r").await;
    change(4).await;
    audited(&daemon).await;
    // A target beside it is repaired.
    things.update_one(doc! {"_id": 8}, doc! {"$set": {"n": 0}}).await.unwrap();
    until("the repair", async || (values(&db, "things").await[8] == Some(4)).then_some(())).await;
    things.update_one(doc! {"_id": 7}, doc! {"$set": {"lines": [1]}}).await.unwrap();
    until("the last one", async || (values(&db, "things").await == [Some(4); 40]).then_some(())).await;
    daemon.stop().await;
}

/// So did the sources of a rule that creates its targets, by their `where` and by a date outside of every calendar.
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

/// A value of a single target that takes too long once is tried again, as any other write.
#[tokio::test]
async fn a_target_whose_write_times_out_once_is_no_dead_letter() {
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
