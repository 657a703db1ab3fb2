//! `denormd support-bundle`, and commands that lead if there is no leader.

use bson::{Document, doc};

use crate::support::{daemon::config, process::Program};

const NAMES: &str =
    r"  - { name: names, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name } } }";

/// Secrets are put wherever they could come from, and searched for in the bundle.
#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_has_nothing_from_documents_and_no_secret() {
    const SECRET: &str = "hunter2";
    let test = denormd_fixture::database().await;
    let db = test.database();
    let id = |n: i32| format!("{SECRET}-id-{n}");
    db.collection::<Document>("parts")
        .insert_one(doc! {"_id": id(1), "name": format!("{SECRET}-value")})
        .await
        .unwrap();
    // A validator refuses the copy: a dead letter with the target's `_id`.
    let validator = doc! {"name": {"$exists": false}};
    db.run_command(doc! {"create": "products", "validator": validator}).await.unwrap();
    db.collection::<Document>("products").insert_one(doc! {"_id": id(2), "part": id(1)}).await.unwrap();
    // A user in the connection string is ignored without authentication; its password is in the text nevertheless.
    let uri = test.uri.replacen("/?", "/?appName=x&", 1);
    let text = config(&test, NAMES)
        .replace(&test.uri, &uri)
        .replace("http: {", &format!("http: {{ token: \"{SECRET}-token-with-many-letters\","));
    let program = Program::new(&text);
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    let states = test.beside("state");
    // State as during a fan-out job and a backfill.
    let open =
        doc! {"_id": {"deployment": "default", "rule": "names", "task": "value", "key": [id(1)]}, "after": [id(2)]};
    states.collection::<Document>("fan_outs").insert_one(open).await.unwrap();
    let asked = doc! {"rule": "names", "targets": [id(2)], "deployment": "default"};
    states.collection::<Document>("requests").insert_one(asked).await.unwrap();
    let begun = std::time::Instant::now();
    while states.collection::<Document>("dead_letters").count_documents(doc! {}).await.unwrap() == 0 {
        assert!(begun.elapsed() < crate::support::daemon::PATIENCE, "there is no dead letter");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    // The bundle must not contain the rules of another deployment in the same state database.
    let rules = states.collection::<Document>("rules");
    let mut other = rules.find_one(doc! {}).await.unwrap().unwrap();
    other.insert("_id", doc! {"deployment": "other", "rule": format!("{SECRET}-rule")});
    rules.insert_one(other).await.unwrap();
    let told = program.run(&["support-bundle", "--to", "-"]).await.exits(0);
    assert!(!told.out.contains(SECRET), "{}", told.out);
    let bundle = told.json();
    assert_eq!(bundle["dead_letters"][0]["_id"]["rule"], "names");
    assert_eq!(bundle["state"]["rules"][0]["_id"]["rule"], "names");
    assert!(bundle["state"]["fan_outs"].to_string().contains("hidden:"), "{}", bundle["state"]["fan_outs"]);
    assert!(bundle["server"]["build"]["version"].is_string(), "{}", bundle["server"]);
    assert!(bundle["server"]["oplog"]["hours"].is_number(), "{}", bundle["server"]);
    assert!(bundle["collections"].to_string().contains("part"), "{}", bundle["collections"]);
    assert!(bundle["rules"].to_string().contains("$name"), "{}", bundle["rules"]);
    assert!(bundle["daemon"]["error"].is_string(), "it listens on a port of the system's choice");
    daemon.stop().await;

    // If no server answers, the bundle reports that, and hides the password of the connection string.
    let gone = "mongodb://user:hunter2@127.0.0.1:1/?replicaSet=rs0&serverSelectionTimeoutMS=200";
    let program = Program::new(&text.replace(&uri, gone));
    let told = program.run(&["support-bundle", "--to", "-"]).await.exits(0);
    assert!(!told.out.contains(SECRET), "{}", told.out);
    assert!(told.json()["cluster_error"].is_string(), "{}", told.out);
}

/// There is no leader: the command itself takes the lease, does the work, and releases it.
#[tokio::test(flavor = "multi_thread")]
async fn commands_that_write_lead_where_nobody_does() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let (parts, products) = (db.collection::<Document>("parts"), db.collection::<Document>("products"));
    parts.insert_one(doc! {"_id": 1, "name": "bolt"}).await.unwrap();
    products.insert_one(doc! {"_id": 1, "part": 1}).await.unwrap();
    let program = Program::new(&config(&test, NAMES));
    program.run(&["plan", "--apply"]).await.exits(0);
    let name = async || {
        let product = products.find_one(doc! {"_id": 1}).await.unwrap().unwrap();
        product.get_str("name").unwrap_or("none").to_owned()
    };
    // A rule that has never run is known as soon as there is a leader.
    let told = program.run(&["backfill"]).await.exits(0);
    assert!(told.out.contains("names: done, 1 targets"), "{}", told.out);
    assert!(told.err.contains("no daemon leads: this command takes the lease and does the work"), "{}", told.err);
    assert_eq!(name().await, "bolt");

    // A rule that has run before.
    products.update_one(doc! {}, doc! {"$set": {"name": "damaged"}}).await.unwrap();
    program.run(&["backfill", "--rule", "names"]).await.exits(0);
    assert_eq!(name().await, "bolt");

    program.run(&["pause", "names"]).await.exits(0);
    parts.update_one(doc! {}, doc! {"$set": {"name": "nut"}}).await.unwrap();
    let told = program.run(&["backfill"]).await.exits(4);
    assert!(told.err.contains("denormd resume names"), "{}", told.err);
    program.run(&["resume", "names"]).await.exits(0);
    assert_eq!(name().await, "nut");

    // The source is dropped while a daemon runs, and the rule is unblocked after it has stopped.
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    parts.drop().await.unwrap();
    let states = test.beside("state").collection::<Document>("rules");
    let begun = std::time::Instant::now();
    while states.count_documents(doc! {"backfill": "held"}).await.unwrap() == 0 {
        assert!(begun.elapsed() < crate::support::daemon::PATIENCE, "the rule is not held");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    daemon.stop().await;
    assert_eq!(name().await, "nut");
    let told = program.run(&["release", "names"]).await.exits(0);
    assert!(told.out.contains("is unblocked"), "{}", told.out);
    assert_eq!(name().await, "none");
    let leases = test.beside("state").collection::<Document>("leases");
    let lease = leases.find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(lease.get("owner"), Some(&bson::Bson::Null), "the lease is given back");
}
