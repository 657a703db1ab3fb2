//! `denormd prune` leaves the application's values alone, and no leader carries out a request whose command has ended.

use std::time::Duration;

use bson::{Document, doc};
use denormd_engine::{
    checkpoint::{requests::RequestedWork, rule_record::Retired, store::Store},
    deployment::{identity::Identity, lease::Lease, repartitioning::divide},
};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::field_path::FieldPath;
use denormd_mongo::Server;

use crate::{
    engine::fan_outs::fail,
    support::{
        daemon::{Daemon, all, config, until},
        process::Program,
    },
};

const OTHER: &str =
    "  - { name: other, copy: { source: hosts, target: logs, match: { host: _id }, set: { other: $name } } }";

const KIND: &str =
    "  - { name: kind, copy: { source: hosts, target: logs, match: { host: _id }, set: { host_name: $name } } }";

/// Three logs with an application's label, of which one is of the kind that the rules here choose. The second label is
/// missing.
async fn logs(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "name": "host"}).await.unwrap();
    let logs = [
        doc! {"_id": 1, "kind": "post", "host": 1, "label": "host"},
        doc! {"_id": 2, "kind": "post", "host": 1},
        doc! {"_id": 3, "kind": "page", "host": 1, "label": "mine"},
    ];
    db.collection("logs").insert_many(logs).await.unwrap();
    let keys = doc! {"createIndexes": "logs", "indexes": [{"key": {"host": 1}, "name": "host_1"}]};
    db.run_command(keys).await.unwrap();
}

const LABEL: &str =
    "  - { name: label, copy: { source: hosts, target: logs, match: { host: _id }, set: { label: $name } } }";

/// Runs a daemon until everything is written.
async fn have_run(test: &TestDb, rules: &str) {
    let daemon = Daemon::start(test, rules).await;
    daemon.settled().await;
    daemon.stop().await;
}

async fn labels(test: &TestDb) -> Vec<Option<String>> {
    let logs = all(&test.database(), "logs").await;
    logs.iter().map(|log| log.get_str("label").ok().map(ToOwned::to_owned)).collect()
}

async fn requests(test: &TestDb) -> Vec<Document> {
    all(&test.beside("state"), "requests").await
}

/// Documents outside of the rule's `where`, and those that a `once` rule did not fill, have values that the rule never
/// wrote: `prune` removed them.
#[tokio::test]
async fn values_that_the_rule_cannot_have_written_are_left_alone() {
    let chosen = "target: { collection: logs, where: { kind: post } }, match: { host: _id }, set: { label: $name }";
    let once = "target: logs, match: { host: _id }, set: { label: $name }, once: true";
    let removed = "was removed from 2 documents of ";
    for (rule, told, left) in [
        (chosen, removed, [None, None, Some("mine")]),
        (once, "`label` has no retired fields: nothing to prune", [Some("host"), Some("host"), Some("mine")]),
    ] {
        let test = denormd_fixture::database().await;
        logs(&test).await;
        let rule = format!("  - {{ name: label, copy: {{ source: hosts, {rule} }} }}");
        have_run(&test, &rule).await;
        assert_eq!(labels(&test).await[1].as_deref(), Some("host"));
        let out = Program::new(&config(&test, OTHER)).run(&["prune", "label"]).await.exits(0).out;
        assert!(out.contains(told), "{out}");
        assert_eq!(out.contains("among those that match its `where`"), told == removed, "{out}");
        assert_eq!(labels(&test).await, left.map(|label| label.map(ToOwned::to_owned)), "{rule}");
    }
}

/// The application may change a value while the rule is `once`. Because of the earlier definition, `prune` took it for the rule's value.
#[tokio::test]
async fn values_of_a_rule_that_became_once_are_left_alone() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    have_run(&test, &LABEL.replace("$name } }", "$name }, once: true }")).await;
    let logs = test.database().collection::<Document>("logs");
    logs.update_many(doc! {}, doc! {"$set": {"label": "mine"}}).await.unwrap();
    let out = Program::new(&config(&test, OTHER)).run(&["prune", "label"]).await.exits(0).out;
    assert!(out.contains("nothing to prune"), "{out}");
    assert_eq!(labels(&test).await, ["mine"; 3].map(|label| Some(label.to_owned())));
}

/// The same after the field has passed from one rule to another: `prune` looked only at the definitions of the rule that it was asked
/// about.
#[tokio::test]
async fn values_that_another_rule_left_to_the_application_are_left_alone() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    // It has a field to prune, and its record must outlast that.
    have_run(&test, &LABEL.replace("name: label,", "name: once,").replace("label: $name", "other: $name")).await;
    have_run(&test, &LABEL.replace("name: label,", "name: once,").replace("$name } }", "$name }, once: true }")).await;
    let logs = test.database().collection::<Document>("logs");
    logs.update_many(doc! {}, doc! {"$set": {"label": "mine"}}).await.unwrap();
    have_run(&test, KIND).await;
    let program = Program::new(&config(&test, KIND));
    program.run(&["prune", "once"]).await.exits(0);
    let out = program.run(&["prune", "label"]).await.exits(0).out;
    assert!(out.contains("nothing to prune"), "{out}");
    program.run(&["prune", "--all"]).await.exits(0);
    assert_eq!(labels(&test).await, ["mine"; 3].map(|label| Some(label.to_owned())));
}

/// `prune` counts the documents before it sends its request. Meanwhile, `undo` had put back the application's values, and the leader
/// removed them.
#[tokio::test(flavor = "multi_thread")]
async fn values_that_undo_puts_back_before_the_request_are_left_alone() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    let daemon = Daemon::start(&test, OTHER).await;
    daemon.settled().await;
    let (server, state) = (Server::new(test.client.clone()), test.beside("state"));
    let label =
        Retired { collection: format!("{}.logs", test.name), path: FieldPath::parse("label").unwrap(), filter: None };
    let undone = doc! {"$set": {"undone": [bson::serialize_to_bson(&label).unwrap()]}};
    state.collection::<Document>("rules").update_one(doc! {"_id.rule": "label"}, undone).await.unwrap();
    let store = Store::open(&server, state.name(), "default").await.unwrap();
    let before = labels(&test).await;
    let asked = store.request(&server, "label", &RequestedWork::Prune(vec![label])).await.unwrap();
    let refused = until("it is refused", async || store.is_done(&server, asked).await.err()).await;
    assert!(refused.message.contains("was left to the application meanwhile"), "{}", refused.message);
    assert_eq!(labels(&test).await, before);
    daemon.stop().await;
}

/// Two rules share a field in different documents. Once one of them was gone, its values stayed for ever: the other rule owned the
/// field.
#[tokio::test]
async fn a_rule_of_other_documents_keeps_no_field() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    let of = |kind: &str| {
        format!(
            "  - {{ name: {kind}, copy: {{ source: hosts, target: {{ collection: logs, where: {{ kind: {kind} }} }}, match: {{ host: _id }}, set: {{ label: $name }} }} }}\n"
        )
    };
    have_run(&test, &(of("post") + &of("page"))).await;
    let page = config(&test, &of("page"));
    let out = Program::new(&page).run(&["prune", "post"]).await.exits(0).out;
    assert!(out.contains("was removed from 2 documents of ") && out.contains("that match its `where`"), "{out}");
    assert_eq!(labels(&test).await, [None, None, Some("host".to_owned())]);
}

/// One document that the server refuses to change kept the field in all that came after it.
#[tokio::test]
async fn a_document_that_cannot_be_changed_does_not_stop_the_others() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    let validator = doc! {"$or": [{"_id": {"$ne": 2}}, {"label": {"$exists": true}}]};
    test.database().run_command(doc! {"collMod": "logs", "validator": validator}).await.unwrap();
    let program = Program::new(&config(&test, OTHER));
    let told = program.run(&["prune", "label"]).await.exits(4).err;
    assert!(told.contains("the server refused to change 1 document, the field is removed from all others: "), "{told}");
    assert_eq!(labels(&test).await, [None, Some("host".to_owned()), None]);
    test.database().run_command(doc! {"collMod": "logs", "validator": {}}).await.unwrap();
    program.run(&["prune", "--all"]).await.exits(0);
    assert_eq!(labels(&test).await, [None, None, None]);
}

/// Without a daemon, a command leads with its own config. One with some of the rules took the others out of force: their
/// pauses and dead letters were forgotten, and `prune --all` removed their fields.
#[tokio::test]
async fn a_config_without_all_rules_of_the_deployment_does_not_lead() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, &format!("{OTHER}\n{LABEL}")).await;
    let (before, states) = (labels(&test).await, all(&test.beside("state"), "rules").await);
    let program = Program::new(&config(&test, OTHER));
    let told = program.run(&["prune", "--all"]).await.exits(4).err;
    assert!(told.contains("no daemon leads, and this config lacks rules of the deployment `default`: label"), "{told}");
    assert_eq!(labels(&test).await, before);
    assert_eq!(all(&test.beside("state"), "rules").await, states);
    assert_eq!(requests(&test).await, []);
    // The rule that a command names may be gone.
    program.run(&["prune", "label"]).await.exits(0);
    assert_eq!(labels(&test).await, [None, None, None]);
}

/// A deployment that gets another name is a new one, whose rules own the fields. Under the old name, they were removed.
#[tokio::test]
async fn fields_of_another_deployment_are_left_alone() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    have_run(&test, &format!("{LABEL}\nname: shop")).await;
    let (before, state) = (labels(&test).await, test.beside("state"));
    let (server, instance) = (Server::new(test.client.clone()), Identity::of_this_process());
    let lease = Lease::new(server.unfenced(), state.name(), "shop", &instance, Duration::from_secs(60));
    let held = lease.stand_by().await;
    let program = Program::new(&config(&test, OTHER));
    let told = program.run(&["prune", "label"]).await.exits(4).err;
    assert!(told.contains("rule `label` of the deployment `shop` owns `label` of "), "{told}");
    assert_eq!(labels(&test).await, before);
    held.release().await;
    program.run(&["prune", "label"]).await.exits(0);
    assert_eq!(labels(&test).await, [None, None, None]);
}

/// The request stayed, and the next leader carried it out, perhaps weeks later.
#[tokio::test]
async fn a_command_that_fails_leaves_no_request() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    test.database().collection::<Document>("logs").drop_index("host_1").await.unwrap();
    let before = labels(&test).await;
    let told = Program::new(&config(&test, OTHER)).run(&["prune", "label"]).await.exits(4).err;
    assert!(told.contains("nothing was written"), "{told}");
    assert_eq!((requests(&test).await, labels(&test).await), (Vec::new(), before));
}

/// The request was recorded, but not that the command waits for it: it stayed, and any leader within the next quarter of an hour
/// carried it out.
#[tokio::test]
async fn a_request_that_is_only_half_recorded_is_withdrawn() {
    const ATLAS_ERROR: i32 = 8000;
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    let before = labels(&test).await;
    let namespace = format!("{}.requests", test.beside("state").name());
    let heard = doc! {"failCommands": ["update"], "namespace": namespace, "errorCode": ATLAS_ERROR};
    fail(&test, doc! {"times": 1}, heard).await;
    let told = Program::new(&config(&test, OTHER)).run(&["prune", "label"]).await.exits(1).err;
    assert!(told.contains("8000"), "{told}");
    assert_eq!((requests(&test).await, labels(&test).await), (Vec::new(), before));
}

/// A validator refuses each write. Of other errors that no retry overcomes, the command did not hear: the leader tried again for as
/// long as it waited, and carried out no other request.
#[tokio::test]
async fn a_request_that_cannot_succeed_is_answered() {
    const CHANGE_STREAM_HISTORY_LOST: i32 = 286;
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    let before = labels(&test).await;
    let program = Program::new(&config(&test, OTHER));
    let validator = async |validator: Document| {
        test.database().run_command(doc! {"collMod": "logs", "validator": validator}).await.unwrap();
    };
    validator(doc! {"label": {"$exists": true}}).await;
    let told = program.run(&["prune", "label"]).await.exits(4).err;
    assert!(told.contains("the leader refuses this: ") && told.contains("121"), "{told}");
    assert_eq!((requests(&test).await, labels(&test).await), (Vec::new(), before.clone()));
    validator(doc! {}).await;
    let update = doc! {
        "failCommands": ["update"], "namespace": format!("{}.logs", test.name), "errorCode": CHANGE_STREAM_HISTORY_LOST,
    };
    fail(&test, "alwaysOn", update).await;
    let told = program.run(&["prune", "label"]).await.exits(4).err;
    assert!(told.contains("the leader refuses this: ") && told.contains("286"), "{told}");
    assert_eq!((requests(&test).await, labels(&test).await), (Vec::new(), before));
    fail(&test, "off", doc! {}).await;
    program.run(&["prune", "label"]).await.exits(0);
    assert_eq!(labels(&test).await, [None, None, None]);
}

/// A command that is killed cannot withdraw its request.
#[tokio::test]
async fn a_request_is_refused_when_its_command_is_gone() {
    let test = denormd_fixture::database().await;
    let (server, state) = (Server::new(test.client.clone()), test.beside("state"));
    let store = Store::open(&server, state.name(), "default").await.unwrap();
    let collection = state.collection::<Document>("requests");
    let gone = store.request(&server, "label", &RequestedWork::Undo).await.unwrap();
    let waits = store.request(&server, "label", &RequestedWork::Undo).await.unwrap();
    // One of an earlier version, which gives no sign of life.
    let earlier = store.request(&server, "label", &RequestedWork::Undo).await.unwrap();
    let two_minutes_ago = vec![doc! {"$set": {"heard": {"$subtract": ["$$NOW", 120_000]}}}];
    collection.update_one(doc! {"together": gone}, two_minutes_ago).await.unwrap();
    collection.update_one(doc! {"together": earlier}, doc! {"$unset": {"heard": 1}}).await.unwrap();
    assert_eq!(store.requests(&server, &[]).await.unwrap().len(), 2);
    let refused = store.is_done(&server, gone).await.unwrap_err();
    let reason = "the command that requested it has ended, or was interrupted";
    assert_eq!(refused.message, format!("the leader refuses this: {reason}"));
    for open in [waits, earlier] {
        assert!(!store.is_done(&server, open).await.unwrap());
    }
    store.withdraw(&server, waits).await.unwrap();
    let an_hour_ago = vec![doc! {"$set": {"asked": {"$subtract": ["$$NOW", 3_600_000]}}}];
    collection.update_one(doc! {"together": earlier}, an_hour_ago).await.unwrap();
    assert_eq!(store.requests(&server, &[]).await.unwrap(), []);
}

/// The request stayed for a minute, and the leader went on removing values.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_is_interrupted_withdraws_its_request() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, LABEL).await;
    let before = labels(&test).await;
    // A leader that carries out nothing.
    let (server, instance) = (Server::new(test.client.clone()), Identity::of_this_process());
    let lease =
        Lease::new(server.unfenced(), test.beside("state").name(), "default", &instance, Duration::from_secs(60));
    let held = lease.stand_by().await;
    let recorded = until("the request is recorded", async || (!requests(&test).await.is_empty()).then_some(()));
    let told = Program::new(&config(&test, OTHER)).interrupt(&["prune", "label"], recorded).await.exits(130).err;
    assert!(told.contains("label: interrupted; a leader that works on it stops at its next page"), "{told}");
    assert_eq!((requests(&test).await, labels(&test).await), (Vec::new(), before));
    held.release().await;
}

/// Without a daemon, `resume` ended the pause, then refused to lead with exit status 4. The next daemon ran the rule.
#[tokio::test]
async fn a_config_without_all_rules_resumes_nothing() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    let both = format!("{OTHER}\n{LABEL}");
    have_run(&test, &both).await;
    Program::new(&config(&test, &both)).run(&["pause", "label"]).await.exits(0);
    let states = all(&test.beside("state"), "rules").await;
    for which in ["label", "--all"] {
        let printed = Program::new(&config(&test, LABEL)).run(&["resume", which]).await.exits(4);
        assert!(printed.err.contains("this config lacks rules of the deployment `default`: other"), "{printed:?}");
        assert_eq!(printed.out, "");
        assert_eq!(all(&test.beside("state"), "rules").await, states);
    }
    let told = Program::new(&config(&test, &both)).run(&["resume", "label"]).await.exits(0).out;
    assert_eq!(told, "label is resumed\nlabel: done, 3 targets\n");
}

/// Work on a request that takes long once went on after its command had been interrupted.
#[tokio::test]
async fn a_request_is_awaited_until_its_command_ends() {
    let test = denormd_fixture::database().await;
    let (server, state) = (Server::new(test.client.clone()), test.beside("state"));
    let store = Store::open(&server, state.name(), "default").await.unwrap();
    let asked = store.request(&server, "label", &RequestedWork::Undo).await.unwrap();
    let id = store.requests(&server, &[]).await.unwrap()[0].id;
    assert!(store.is_awaited(&server, id).await.unwrap());
    let two_minutes_ago = vec![doc! {"$set": {"heard": {"$subtract": ["$$NOW", 120_000]}}}];
    state.collection::<Document>("requests").update_one(doc! {"_id": id}, two_minutes_ago).await.unwrap();
    assert!(!store.is_awaited(&server, id).await.unwrap());
    store.withdraw(&server, asked).await.unwrap();
    assert!(!store.is_awaited(&server, id).await.unwrap());
}

/// Each partition deleted the refusal of the other one. Without any document, the request counted as done.
#[tokio::test]
async fn a_request_that_two_partitions_refuse_is_refused() {
    let test = denormd_fixture::database().await;
    let (server, state) = (Server::new(test.client.clone()), test.beside("state"));
    assert!(divide(&server, state.name(), "default", 2, Duration::from_secs(3)).await.unwrap());
    let store = Store::open(&server, state.name(), "default").await.unwrap();
    let asked = store.request(&server, "label", &RequestedWork::Undo).await.unwrap();
    let requests = store.requests(&server, &[]).await.unwrap();
    let collection = state.collection::<Document>("requests");
    // Both have marked their own document before either deletes the others.
    let refused = doc! {"$set": {"refused": "no"}};
    collection.update_one(doc! {"_id": requests[0].id}, refused).await.unwrap();
    store.refuse_request(&server, requests[1].id, "neither").await.unwrap();
    let error = store.is_done(&server, asked).await.unwrap_err();
    assert!(error.message.starts_with("the leader refuses this: "), "{}", error.message);
}

/// The rule left the config while no daemon was running. Its record stayed, and a later `prune --all` removed what the
/// application had written by then.
#[tokio::test]
async fn a_pruned_rule_is_forgotten() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, &format!("{OTHER}\n{LABEL}")).await;
    let program = Program::new(&config(&test, OTHER));
    program.run(&["prune", "label"]).await.exits(0);
    assert_eq!(labels(&test).await, [None, None, None]);
    let set = doc! {"$set": {"label": "the application's"}};
    test.database().collection::<Document>("logs").update_many(doc! {}, set).await.unwrap();
    let told = program.run(&["prune", "--all"]).await.exits(0).out;
    assert_eq!(told, "no rule has retired fields: nothing to prune\n");
    assert_eq!(labels(&test).await[0].as_deref(), Some("the application's"));
}

/// A new rule that was blocked before its first write, and was taken out of the config again, kept every command without a daemon
/// from leading.
#[tokio::test]
async fn a_new_rule_that_was_blocked_may_leave_the_config() {
    let test = denormd_fixture::database().await;
    logs(&test).await;
    have_run(&test, OTHER).await;
    let set = doc! {"$set": {"label": "the application's"}};
    test.database().collection::<Document>("logs").update_many(doc! {}, set).await.unwrap();
    let program = Program::new(&config(&test, &format!("{OTHER}\n{LABEL}")));
    let daemon = program.daemon();
    daemon.says("this rule is blocked").await;
    daemon.stop().await;
    let program = Program::new(&config(&test, OTHER));
    program.run(&["backfill", "--rule", "other"]).await.exits(0);
    assert_eq!(labels(&test).await[0].as_deref(), Some("the application's"));
}
