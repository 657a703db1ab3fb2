//! Properties of a server that denormd relies on and that a version may change: docs/compatibility.md, "Where versions
//! differ". `make test-server` runs these on any server.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
};

use bson::{Document, doc};
use denormd_engine::dead_letter;
use denormd_fixture::{ReplicaSet, TestDb};
use futures_util::StreamExt;

use crate::support::{
    daemon::{Daemon, all, config, until},
    impostor::{Answer, Impostor},
    process::Program,
};

const RULE: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// The fields that are read from change events, by kind of event. Other fields are removed by the stream's projection.
#[tokio::test(flavor = "multi_thread")]
async fn change_events_have_the_fields_that_are_read() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let images = doc! {"create": "hosts", "changeStreamPreAndPostImages": {"enabled": true}};
    db.run_command(images).await.unwrap();
    let before = mongodb::options::FullDocumentBeforeChangeType::WhenAvailable;
    let stream = db.watch().full_document_before_change(before).await.unwrap();
    let mut stream = stream.with_type::<Document>();
    let hosts = db.collection::<Document>("hosts");
    hosts.insert_one(doc! {"_id": 1, "a": {"0": 1}, "list": [1, 2, 3], "gone": 1}).await.unwrap();
    // In a path such as `a.0`, 7.0 can tell a name from a place in an array, if it is asked to.
    let update = vec![doc! {"$set": {"a": {"0": 2}, "list": ["$list"]}}, doc! {"$unset": "gone"}];
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"a.0": 2, "list.1": 5}, "$unset": {"gone": 1}}).await.unwrap();
    hosts.update_one(doc! {"_id": 1}, update).await.unwrap();
    hosts.replace_one(doc! {"_id": 1}, doc! {"b": 1}).await.unwrap();
    hosts.delete_one(doc! {"_id": 1}).await.unwrap();
    let name = |collection: &str| format!("{}.{collection}", test.name);
    let rename = doc! {"renameCollection": name("hosts"), "to": name("others")};
    test.client.database("admin").run_command(rename).await.unwrap();
    db.collection::<Document>("others").drop().await.unwrap();
    let mut seen: BTreeMap<String, Vec<Document>> = BTreeMap::new();
    while !seen.contains_key("drop") {
        let event = stream.next().await.unwrap().unwrap();
        seen.entry(event.get_str("operationType").unwrap().to_owned()).or_default().push(event);
    }
    let all_have = ["_id", "operationType", "clusterTime", "wallTime", "ns"];
    for (operation, more) in [
        ("insert", &["documentKey", "fullDocument"][..]),
        ("update", &["documentKey", "updateDescription", "fullDocumentBeforeChange"]),
        ("replace", &["documentKey", "fullDocument", "fullDocumentBeforeChange"]),
        ("delete", &["documentKey", "fullDocumentBeforeChange"]),
        ("rename", &["to"]),
        ("drop", &[]),
    ] {
        for event in &seen[operation] {
            let missing: Vec<_> = all_have.iter().chain(more).filter(|field| !event.contains_key(**field)).collect();
            assert!(missing.is_empty(), "{operation} lacks {missing:?}: {event}");
        }
    }
    let described: Vec<&Document> =
        seen["update"].iter().map(|event| event.get_document("updateDescription").unwrap()).collect();
    let expected = doc! {"updatedFields": {"a.0": 2, "list.1": 5}, "removedFields": ["gone"], "truncatedArrays": []};
    assert_eq!(*described[0], expected, "nothing is said of ambiguous paths unless it is asked for");
    // The second one is an update or, where the document is small, a replacement.
    assert_eq!(seen["update"].len() + seen["replace"].len(), 3, "{seen:?}");
    println!(
        "fields: {:?}",
        seen.iter().map(|(name, all)| (name, all[0].keys().collect())).collect::<Vec<(_, Vec<_>)>>()
    );
}

/// `$bitAnd` came with 6.3: on an older server `plan` refuses the rule, with the server's message.
#[tokio::test]
async fn an_operator_of_a_later_version_is_refused_by_the_server() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 3}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let info: Document = db.run_command(doc! {"buildInfo": 1}).await.unwrap();
    let version = info.get_array("versionArray").unwrap();
    let has_it = (version[0].as_i32(), version[1].as_i32()) >= (Some(6), Some(3));
    let program = Program::new(&config(&test, &RULE.replace("ip: $ip", "ip: { $bitAnd: [$ip, 1] }")));
    if has_it {
        program.run(&["plan", "--apply"]).await.exits(0);
    } else {
        let told = program.run(&["plan"]).await.exits(4);
        assert!(told.out.contains("Unrecognized expression '$bitAnd'"), "{}", told.out);
    }
}

/// The defaults of a cluster may be weaker than what denormd needs: every command on data or state names its own.
#[tokio::test(flavor = "multi_thread")]
async fn no_command_depends_on_the_default_concerns_of_the_cluster() {
    let set = ReplicaSet::start(1).await;
    let weak = doc! {
        "setDefaultRWConcern": 1, "defaultWriteConcern": {"w": 1}, "defaultReadConcern": {"level": "local"},
        "writeConcern": {"w": "majority"},
    };
    set.client().await.database("admin").run_command(weak).await.unwrap();
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, set.node(0).port()));
    let between = Impostor::start(Some(server), |_, _| Answer::Forwarded).await;
    let mut test = set.database().await;
    documents(&test).await;
    test.uri = format!("mongodb://{}/?directConnection=true", between.address);
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    test.database()
        .collection::<Document>("hosts")
        .update_one(doc! {"_id": 1}, doc! {"$set": {"ip": "b"}})
        .await
        .unwrap();
    converged(&test, "b").await;
    daemon.stop().await;
    let mut careless = BTreeSet::new();
    for command in between.asked() {
        let (name, subject) = command.iter().next().unwrap();
        // Within a transaction the first command has the concerns.
        let wanted = match name.as_str() {
            _ if command.contains_key("txnNumber") => continue,
            "insert" | "update" | "delete" | "findAndModify" => "writeConcern",
            "find" | "aggregate" | "distinct" => "readConcern",
            _ => continue,
        };
        // A command that is only parsed reads nothing.
        if command.to_string().contains(r#""$expr": false"#) {
            continue;
        }
        if command.get_document(wanted).is_ok_and(|concern| !concern.is_empty()) {
            continue;
        }
        careless.insert(format!("{name} {subject} in {}", command.get_str("$db").unwrap()));
    }
    assert!(careless.is_empty(), "{careless:#?}");
}

/// An operator blocks writes, as tools do that move a cluster's data elsewhere: they became dead letters.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_an_operator_blocks_are_tried_again() {
    let set = ReplicaSet::builder().auth().start().await;
    let mut test = set.database().await;
    let admin = test.client.database("admin");
    // Unlike the user of this test, it may not write while writes are blocked.
    let user = doc! {"createUser": "denormd", "pwd": "secret", "roles": ["readWriteAnyDatabase", "dbAdminAnyDatabase", "clusterMonitor"]};
    admin.run_command(user).await.unwrap();
    test.uri = set.uri_of("denormd", "secret");
    documents(&test).await;
    let daemon = Daemon::start(&test, RULE).await;
    daemon.settled().await;
    admin.run_command(doc! {"setUserWriteBlockMode": 1, "global": true}).await.unwrap();
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": "b"}}).await.unwrap();
    until("a write is refused", async || {
        let errors = daemon.context().metrics.recent_errors();
        errors.iter().any(|error| error.rule.as_deref() == Some("ip")).then_some(())
    })
    .await;
    admin.run_command(doc! {"setUserWriteBlockMode": 1, "global": false}).await.unwrap();
    converged(&test, "b").await;
    assert!(all(&test.beside("state"), dead_letter::COLLECTION).await.is_empty());
    daemon.stop().await;
}

async fn documents(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "a"}).await.unwrap();
    db.collection("log").insert_many((0..10).map(|id| doc! {"_id": id, "host": 1})).await.unwrap();
}

async fn converged(test: &TestDb, ip: &str) {
    until(&format!("every target has {ip}"), async || {
        let targets = all(&test.database(), "log").await;
        targets.iter().all(|target| target.get_str("ip").is_ok_and(|value| value == ip)).then_some(())
    })
    .await;
}
