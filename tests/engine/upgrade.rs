//! A newer daemon takes over an older one's state, and an older one does not touch a newer one's.

use bson::{Document, doc};
use denormd_engine::checkpoint::{
    format::{COLLECTION, UNDIVIDED, VERSION},
    rule_record::RULES,
    store::{POSITIONS, Store},
};
use denormd_fixture::TestDb;
use denormd_mongo::error::Kind;

use crate::support::daemon::{Daemon, all, config, context};

const RULE: &str = "
  - { name: address, guard: off, allow_scan: true, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// The state that a daemon leaves after copying one address.
async fn state_of_a_run(test: &TestDb) {
    let db = test.database();
    db.collection("hosts")
        .insert_many([doc! {"_id": 1, "ip": "10.0.0.1"}, doc! {"_id": 2, "ip": "10.0.0.9"}])
        .await
        .unwrap();
    db.collection("log").insert_many([doc! {"_id": 1, "host": 1}, doc! {"_id": 2, "host": 2}]).await.unwrap();
    let daemon = Daemon::start(test, RULE).await;
    daemon.settled().await;
    daemon.stop().await;
}

async fn state(test: &TestDb) -> Vec<Document> {
    let state = test.beside("state");
    let mut found = Vec::new();
    for name in [POSITIONS, RULES, COLLECTION] {
        found.extend(all(&state, name).await);
    }
    found
}

/// The first daemons had no lease, so their state had no terms; no backfill requests, so no generations; and no
/// version.
#[tokio::test]
async fn state_from_before_versions_is_taken_over_where_it_is() {
    let test = denormd_fixture::database().await;
    state_of_a_run(&test).await;
    let state = test.beside("state");
    for name in [POSITIONS, RULES] {
        let newer = doc! {"term": "", "generation": "", "retired": "", "source_seen": "", "reason": "", "detached": ""};
        state.collection::<Document>(name).update_many(doc! {}, doc! {"$unset": newer}).await.unwrap();
    }
    state.collection::<Document>(COLLECTION).drop().await.unwrap();

    // Changes while the old daemon is being replaced: one that is followed, and one that only a backfill would repair.
    let db = test.database();
    let before_position = doc! {"$set": {"ip": "forged"}};
    db.collection::<Document>("hosts").update_one(doc! {"_id": 1}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    db.collection::<Document>("log").update_one(doc! {"_id": 2}, before_position).await.unwrap();

    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    daemon.stop().await;
    assert_eq!(
        all(&db, "log").await,
        [doc! {"_id": 1, "host": 1, "ip": "10.0.0.2"}, doc! {"_id": 2, "host": 2, "ip": "forged"}],
        "it resumes from the checkpoint, without a backfill"
    );
    assert_eq!(all(&state, COLLECTION).await[0].get_i32("version").unwrap(), UNDIVIDED);
}

/// The backfill was repeated at each start, and never ended.
#[tokio::test]
async fn a_backfill_from_before_generations_ends() {
    let test = denormd_fixture::database().await;
    state_of_a_run(&test).await;
    let rules = test.beside("state").collection::<Document>(RULES);
    let begun = doc! {"$set": {"backfill": "pending"}, "$unset": {"generation": ""}};
    assert_eq!(rules.update_many(doc! {}, begun).await.unwrap().modified_count, 1);
    test.database().collection::<Document>("log").update_many(doc! {}, doc! {"$unset": {"ip": ""}}).await.unwrap();
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    daemon.stop().await;
    let record = rules.find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(record.get_str("backfill").unwrap(), "done", "{record}");
}

#[tokio::test]
async fn state_of_a_newer_program_is_refused_before_anything_is_written() {
    let test = denormd_fixture::database().await;
    state_of_a_run(&test).await;
    let formats = test.beside("state").collection::<Document>(COLLECTION);
    let newer = doc! {"$set": {"version": VERSION + 1, "program": "9.0.0"}};
    formats.update_one(doc! {"_id": "default"}, newer).await.unwrap();
    let before = state(&test).await;

    let context = context(&config(&test, RULE)).await;
    let dead_letters = &context.dead_letters;
    let refused = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap_err();
    assert_eq!(refused.kind, Kind::Topology);
    assert!(refused.message.contains("by denormd 9.0.0"), "{}", refused.message);
    assert_eq!(state(&test).await, before);
    // Another deployment's state has its own format.
    Store::open(&context.server, &dead_letters.database, "another").await.unwrap();
}
