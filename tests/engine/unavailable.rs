//! Only the rule for which the cluster lacks something becomes unavailable, and it recovers by itself.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use mongodb::Database;

use crate::support::running::{Running, causes};

const A_AND_B: &str = "
  - { name: a, guard: off, copy: { source: hosts, target: a, match: { host: _id }, set: { ip: $ip } } }
  - { name: b, guard: off, copy: { source: hosts, target: b, match: { host: _id }, set: { ip: $ip } } }";
const LIMIT: Duration = Duration::from_secs(120);

async fn documents(db: &Database) {
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 0}).await.unwrap();
    for name in ["a", "b"] {
        db.collection(name).insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
        index(db, name).await;
    }
}

async fn index(db: &Database, name: &str) {
    db.run_command(doc! {"createIndexes": name, "indexes": [{"key": {"host": 1}, "name": "host_1"}]}).await.unwrap();
}

async fn set_ip(db: &Database, ip: i32) {
    db.collection::<Document>("hosts").update_one(doc! {"_id": 1}, doc! {"$set": {"ip": ip}}).await.unwrap();
}

async fn is_copied(db: &Database, name: &str, ip: i32, running: &Running) {
    let begun = Instant::now();
    while db.collection::<Document>(name).find_one(doc! {"ip": ip}).await.unwrap().is_none() {
        assert!(begun.elapsed() < LIMIT, "{name} has no {ip}\n{}", running.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Two rules under a user with exactly the privileges of `denormd role`.
async fn secured(set: &ReplicaSet, test: &TestDb) -> TestDb {
    let on = |database: &str, collection: &str, actions: &[&str]| doc! {"resource": {"db": database, "collection": collection}, "actions": actions.to_vec()};
    let state = format!("{}_state", test.name);
    let privileges = [
        on(&test.name, "", &["changeStream", "find", "listCollections", "listIndexes"]),
        on(&test.name, "a", &["update"]),
        on(&test.name, "b", &["update"]),
        on(
            &state,
            "",
            &["convertToCapped", "createCollection", "find", "insert", "listCollections", "remove", "update"],
        ),
        on("local", "oplog.rs", &["collStats", "find"]),
    ];
    let admin = test.client.database("admin");
    admin.run_command(doc! {"createRole": "copies", "privileges": privileges.to_vec(), "roles": []}).await.unwrap();
    admin.run_command(doc! {"createUser": "denormd", "pwd": "x", "roles": ["copies"]}).await.unwrap();
    let uri = set.uri_of("denormd", "x");
    TestDb::named(uri, &test.name).await
}

/// A revoked privilege once filled the queue with keys that could not be written: the position stopped, and in the end
/// every rule did.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_privilege_suspends_its_rule_alone_until_it_is_granted() {
    let set = ReplicaSet::builder().auth().start().await;
    let test = set.database().await;
    let db = test.database();
    documents(&db).await;
    let user = secured(&set, &test).await;
    let running = Running::start(&user, A_AND_B, "").await;
    is_copied(&db, "a", 0, &running).await;
    let change = async |verb: &str| {
        let update = doc! {"resource": {"db": &test.name, "collection": "a"}, "actions": ["update"]};
        let admin = test.client.database("admin");
        admin.run_command(doc! {verb: "copies", "privileges": [update]}).await.unwrap();
    };
    change("revokePrivilegesFromRole").await;
    set_ip(&db, 1).await;
    is_copied(&db, "b", 1, &running).await;
    let status = running.until("the rule is unavailable", |status| causes(status).contains(&"unavailable")).await;
    let unavailable = status.causes.iter().find(|cause| cause.cause == "unavailable").unwrap();
    assert_eq!(unavailable.rules, ["a"]);
    running.until("why is said", |_| running.log().contains("the rule is unavailable")).await;
    // The other rules continue, and so does the position: commands that wait do not wait for this rule.
    set_ip(&db, 2).await;
    is_copied(&db, "b", 2, &running).await;
    let address = running.address.to_string();
    let (code, told, error) = running.command(&["wait", "--address", &address]);
    assert_eq!(code, Some(0), "{told}{error}");
    let begun = Instant::now();
    while !running.text("/v1/status").await.contains("the user lacks update on") {
        assert!(begun.elapsed() < LIMIT, "{}", running.text("/v1/status").await);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (code, _, error) = running.command(&["release", "a"]);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("is unavailable") && error.contains("resumes by itself"), "{error}");
    change("grantPrivilegesToRole").await;
    is_copied(&db, "a", 2, &running).await;
    running.until("it is back", |status| !causes(status).contains(&"unavailable")).await;
    set_ip(&db, 3).await;
    is_copied(&db, "a", 3, &running).await;
}

/// A collection that was dropped and created again had lost its index: a restart once refused every rule.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_index_suspends_its_rule_and_a_rule_that_never_had_one_is_refused() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    documents(&db).await;
    let mut running = Running::start(&test, A_AND_B, "").await;
    is_copied(&db, "a", 0, &running).await;
    running.stop();
    db.collection::<Document>("a").drop().await.unwrap();
    db.collection("a").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    set_ip(&db, 1).await;
    running.run().await;
    is_copied(&db, "b", 1, &running).await;
    running.until("the rule is unavailable", |status| causes(status).contains(&"unavailable")).await;
    // Also after another restart.
    running.stop();
    running.run().await;
    running.until("the rule is unavailable", |status| causes(status).contains(&"unavailable")).await;
    assert_eq!(db.collection::<Document>("a").count_documents(doc! {"ip": 1}).await.unwrap(), 0);
    index(&db, "a").await;
    is_copied(&db, "a", 1, &running).await;
    running.until("it is back", |status| !causes(status).contains(&"unavailable")).await;
    running.stop();

    // All rules at once: nothing would work.
    for name in ["a", "b"] {
        db.run_command(doc! {"dropIndexes": name, "index": "host_1"}).await.unwrap();
    }
    let (code, _, error) = running.command(&["run"]);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("createIndex"), "{error}");
    // A rule that has never run, together with some that have.
    index(&db, "a").await;
    index(&db, "b").await;
    let text = std::fs::read_to_string(running.file()).unwrap();
    let new =
        "\n  - { name: c, guard: off, copy: { source: hosts, target: c, match: { host: _id }, set: { ip: $ip } } }\n";
    std::fs::write(running.file(), format!("{}{new}", text.trim_end())).unwrap();
    let (code, _, error) = running.command(&["run"]);
    assert_eq!(code, Some(4), "{error}");
    // An index would create a collection, possibly under a wrong name.
    assert!(!error.contains("createIndex") && error.contains("createCollection"), "{error}");
    db.create_collection("c").await.unwrap();
    let (code, _, error) = running.command(&["run"]);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("createIndex") && !error.contains("\"a\""), "{error}");
}
