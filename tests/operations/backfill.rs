//! `denormd backfill` and `resume` without a daemon: what they call done is done.

use bson::{Bson, Document, doc};
use denormd_fixture::TestDb;

use crate::support::{
    daemon::{config, until},
    process::{Printed, Program},
};

const MANUAL: &str = "  - { name: host, backfill: manual, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
const ROOM: &str =
    "  - { name: room, copy: { source: rooms, target: logs, match: { room: _id }, set: { floor: $floor } } }";

/// The same rule, which also copies another field.
fn changed(field: &str) -> String {
    MANUAL.replace("set: {", &format!("set: {{ {field}: ${field},"))
}

/// One log message with its host and its room, and a program with the index that the rules need.
async fn shop(test: &TestDb) -> Program {
    let db = test.database();
    let host = doc! {"_id": 1, "ip": "10.0.0.1", "name": "web", "rack": 7};
    db.collection("hosts").insert_one(host).await.unwrap();
    db.collection("rooms").insert_one(doc! {"_id": 1, "floor": 2}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1, "room": 1}).await.unwrap();
    let program = Program::new(&config(test, &format!("{MANUAL}\n{ROOM}")));
    program.run(&["plan", "--apply"]).await.exits(0);
    program.write(&config(test, MANUAL));
    program
}

async fn stored(test: &TestDb, field: &str) -> Option<Bson> {
    let log = test.database().collection::<Document>("logs").find_one(doc! {}).await.unwrap().unwrap();
    log.get(field).cloned()
}

fn is_done(told: &Printed) {
    assert!(told.out.ends_with("host: done, 1 targets\n"), "{}\n{}", told.out, told.err);
}

/// The command's own leadership registers a rule with `backfill: manual` as one that waits for a request, and once called
/// that done: for a new rule, a changed one, and one that returns to the config.
#[tokio::test]
async fn a_rule_that_is_registered_by_the_command_itself_is_backfilled() {
    let test = denormd_fixture::database().await;
    let program = shop(&test).await;
    is_done(&program.run(&["backfill"]).await.exits(0));
    assert_eq!(stored(&test, "ip").await, Some("10.0.0.1".into()), "a new rule");

    program.write(&config(&test, &changed("name")));
    is_done(&program.run(&["backfill", "--rule", "host"]).await.exits(0));
    assert_eq!(stored(&test, "name").await, Some("web".into()), "a changed rule");

    program.write(&config(&test, ROOM));
    let daemon = program.daemon();
    let rules = test.beside("state").collection::<Document>("rules");
    let removed = doc! {"_id.rule": "host", "backfill": "absent"};
    until("the rule is removed", async || rules.find_one(removed.clone()).await.unwrap()).await;
    daemon.stop().await;
    let unset = doc! {"$unset": {"ip": "", "name": ""}};
    test.database().collection::<Document>("logs").update_one(doc! {}, unset).await.unwrap();
    program.write(&config(&test, &format!("{MANUAL}\n{ROOM}")));
    is_done(&program.run(&["backfill", "--rule", "host"]).await.exits(0));
    assert_eq!(stored(&test, "ip").await, Some("10.0.0.1".into()), "a rule that has returned");
}

/// The request of `resume` was replaced by the state of a changed rule with `backfill: manual`.
#[tokio::test]
async fn a_changed_rule_is_backfilled_when_it_is_resumed() {
    let test = denormd_fixture::database().await;
    let program = shop(&test).await;
    program.run(&["backfill"]).await.exits(0);
    program.run(&["pause", "host"]).await.exits(0);
    program.write(&config(&test, &changed("rack")));
    is_done(&program.run(&["resume", "host"]).await.exits(0));
    assert_eq!(stored(&test, "rack").await, Some(7.into()));
}

/// The leader did what was asked by its own definition, and the command called that done.
#[tokio::test]
async fn a_backfill_by_another_definition_is_not_that_of_the_config() {
    let test = denormd_fixture::database().await;
    let program = shop(&test).await;
    let daemon = program.daemon();
    until("the daemon has registered the rule", async || {
        let rules = test.beside("state").collection::<Document>("rules");
        rules.find_one(doc! {"backfill": "manual"}).await.unwrap()
    })
    .await;
    let other = Program::new(&config(&test, &changed("name")));
    let told = other.run(&["backfill", "--rule", "host"]).await.exits(4);
    let why = "the leader does not run rule `host` as this config defines it";
    assert!(told.err.contains(why), "{}\n{}", told.out, told.err);
    is_done(&program.run(&["backfill", "--rule", "host"]).await.exits(0));
    daemon.stop().await;
}
