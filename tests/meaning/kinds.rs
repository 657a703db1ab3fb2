//! Kinds of collections: clustered ones, ones whose documents expire, capped sources, encrypted values and fields. Views, time-series
//! collections and capped targets are refused (`tests/meaning/copy_rules.rs`); collations and validators have tests of their own
//! (`tests/meaning/exact_meaning.rs`, `tests/meaning/grouped.rs`).

use bson::{Binary, Document, doc, spec::BinarySubtype};
use denormd_engine::dead_letter;
use denormd_fixture::{ReplicaSet, TestDb};

use crate::support::daemon::{Daemon, all, until};

const RULE: &str = "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip }, on_missing: unset } }";
/// More than a page of a backfill.
const TARGETS: i32 = 2500;
const FEW: i32 = 10;

/// Targets of two sources, few of the first: the removal limit allows those to lose their values.
async fn documents(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_many([doc! {"_id": 1, "ip": "a"}, doc! {"_id": 2, "ip": "a"}]).await.unwrap();
    let targets = (0..TARGETS).map(|id| doc! {"_id": id, "host": if id < FEW { 1 } else { 2 }});
    db.collection("log").insert_many(targets).await.unwrap();
}

async fn targets_have(test: &TestDb, expected: &Document, count: i32) {
    let log = test.database().collection::<Document>("log");
    let what = format!("{count} targets have {expected}");
    until(&what, async || {
        let right = log.count_documents(expected.clone()).await.unwrap();
        (right == u64::try_from(count).unwrap()).then_some(())
    })
    .await;
}

/// Their documents are stored by `_id`, and there is no index on `_id` for a hint.
#[tokio::test(flavor = "multi_thread")]
async fn clustered_collections_are_backfilled_and_followed() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    for name in ["hosts", "log"] {
        let index = doc! {"key": {"_id": 1}, "unique": true};
        db.run_command(doc! {"create": name, "clusteredIndex": index}).await.unwrap();
    }
    documents(&test).await;
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    targets_have(&test, &doc! {"ip": "a"}, TARGETS).await;
    db.collection::<Document>("hosts").update_one(doc! {"_id": 2}, doc! {"$set": {"ip": "b"}}).await.unwrap();
    targets_have(&test, &doc! {"ip": "b"}, TARGETS - FEW).await;
    daemon.stop().await;
}

/// An expired document is deleted like any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_expires_is_gone() {
    let set = ReplicaSet::builder().param("ttlMonitorSleepSecs", "1").start().await;
    let test = set.database().await;
    let db = test.database();
    documents(&test).await;
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    targets_have(&test, &doc! {"ip": "a"}, TARGETS).await;
    let expire = doc! {"key": {"until": 1}, "name": "until_1", "expireAfterSeconds": 0};
    db.run_command(doc! {"createIndexes": "hosts", "indexes": [expire]}).await.unwrap();
    let hosts = db.collection::<Document>("hosts");
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"until": bson::DateTime::from_millis(0)}}).await.unwrap();
    targets_have(&test, &doc! {"ip": {"$exists": false}}, FEW).await;
    daemon.stop().await;
}

/// A server deletes the oldest documents of a capped collection with change events, like other deletes.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_capped_source_drops_is_gone() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.run_command(doc! {"create": "hosts", "capped": true, "size": 4096, "max": 2}).await.unwrap();
    documents(&test).await;
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    targets_have(&test, &doc! {"ip": "a"}, TARGETS).await;
    db.collection("hosts").insert_one(doc! {"_id": 3, "ip": "b"}).await.unwrap();
    targets_have(&test, &doc! {"ip": {"$exists": false}}, FEW).await;
    daemon.stop().await;
}

/// A value that a client has encrypted is binary data to the server, and is copied unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn an_encrypted_value_is_copied_byte_for_byte() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let secret = Binary { subtype: BinarySubtype::Encrypted, bytes: (0..200).collect() };
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": secret.clone()}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": secret}]);
    daemon.stop().await;
}

/// Queryable Encryption: the server refuses a plain value in an encrypted field, whose form only a client can make. What
/// is beside it is copied.
#[tokio::test(flavor = "multi_thread")]
async fn copies_go_beside_the_encrypted_fields_of_a_target() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let key = Binary { subtype: BinarySubtype::Uuid, bytes: (0..16).collect() };
    let fields = doc! {"fields": [{"path": "secret", "keyId": key, "bsonType": "string"}]};
    db.run_command(doc! {"create": "log", "encryptedFields": fields}).await.unwrap();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "a"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let secret = RULE.replace("name: ip", "name: secret").replace("ip: $ip", "secret: $ip");
    let daemon = Daemon::start(&test, &format!("{RULE}\n{secret}")).await;
    daemon.settled().await;
    targets_have(&test, &doc! {"ip": "a", "secret": {"$exists": false}}, 1).await;
    let dead_letters = all(&test.beside("state"), dead_letter::COLLECTION).await;
    let rules: Vec<&str> = dead_letters.iter().map(|letter| letter.get_str("rule").unwrap()).collect();
    assert_eq!(rules, ["secret"], "{dead_letters:?}");
    daemon.stop().await;
}
