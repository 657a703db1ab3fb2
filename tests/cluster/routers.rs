//! Sharded clusters, as far as they can be shown without a router: recorded replies of routers, two impostors of routers
//! before a replica set, and real servers in the roles of config server and shard. `make test-sharded` runs the patterns
//! and histories where there is a router.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, DateTime, Document, RawDocumentBuf, Timestamp, doc, oid::ObjectId, rawdoc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_model::position::ClusterTime;
use denormd_mongo::{
    Server, Written, connect,
    error::{Kind, Result},
};
use mongodb::Client;

use crate::support::{
    daemon::{config, until},
    impostor::{Answer, Impostor, no_such_command, recorded},
    running::{Running, denormd},
};

/// More than a page of a backfill.
const TARGETS: i32 = 2500;
const RULE: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// A router's reply to `hello`.
fn router() -> Document {
    let time = Timestamp { time: 1_700_000_000, increment: 1 };
    doc! {
        "isWritablePrimary": true, "msg": "isdbgrid", "helloOk": true, "ismaster": true, "maxBsonObjectSize": 16_777_216,
        "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000, "localTime": DateTime::now(),
        "logicalSessionTimeoutMinutes": 30, "connectionId": 1, "maxWireVersion": 17, "minWireVersion": 0, "ok": 1.0,
        "operationTime": time,
    }
}

/// Makes a primary's reply that of a router, which has neither a set nor an oplog.
fn into_router(hello: &mut Document) {
    for name in
        ["setName", "setVersion", "hosts", "primary", "me", "electionId", "lastWrite", "secondary", "topologyVersion"]
    {
        hello.remove(name);
    }
    hello.insert("msg", "isdbgrid");
}

fn cursor(namespace: &str, documents: Vec<Document>) -> Document {
    doc! {"cursor": {"firstBatch": documents, "id": 0_i64, "ns": namespace}, "ok": 1.0}
}

async fn server_of(routers: &[&Impostor]) -> Server {
    let hosts: Vec<String> = routers.iter().map(|router| router.address.to_string()).collect();
    Server::new(Client::with_uri_str(format!("mongodb://{}/", hosts.join(","))).await.unwrap())
}

/// Commands that took longer than a second were given up, because the driver had chosen the other router to ask.
#[tokio::test(flavor = "multi_thread")]
async fn another_router_does_not_end_a_slow_command() {
    let slow = async || {
        Impostor::start(None, |name, _| match name {
            "hello" | "ismaster" => recorded(router()),
            "find" => Answer::Recorded(cursor("d.c", vec![doc! {"_id": 7}]), Duration::from_secs(5)),
            _ => no_such_command(name),
        })
        .await
    };
    let (one, other) = (slow().await, slow().await);
    let server = server_of(&[&one, &other]).await;
    // Each asks four times meanwhile, and each time both routers can be chosen.
    let reads = (0..4).map(|_| server.read("d", doc! {"find": "c"}, ClusterTime::default()));
    for found in futures_util::future::join_all(reads).await {
        assert_eq!(found.unwrap().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_to_a_frozen_router_is_given_up() {
    let frozen = Arc::new(AtomicBool::new(false));
    let freezes = frozen.clone();
    let only = Impostor::start(None, move |name, _| match name {
        _ if freezes.load(Ordering::SeqCst) => Answer::Silence,
        "hello" | "ismaster" => recorded(router()),
        _ => {
            freezes.store(true, Ordering::SeqCst);
            Answer::Silence
        }
    })
    .await;
    let error = server_of(&[&only]).await.read("d", doc! {"find": "c"}, ClusterTime::default()).await.unwrap_err();
    assert!(frozen.load(Ordering::SeqCst));
    assert_eq!((error.kind, error.message.as_str()), (Kind::Connection, "the router no longer answers"));
}

/// The reply of a router that has lost a shard: it is a successful one, with an error for each statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_answer_a_router_lost_is_waited_out() {
    let lost = doc! {
        "ok": 1.0, "n": 0, "nModified": 0, "operationTime": Timestamp { time: 1_700_000_000, increment: 2 },
        "writeErrors": [{
            "index": 0, "code": 6,
            "errmsg": "Write results unavailable from failing to target a host in the shard s1 :: caused by :: host unreachable",
        }],
    };
    let only = Impostor::start(None, move |name, _| match name {
        "hello" | "ismaster" => recorded(router()),
        "update" => recorded(lost.clone()),
        _ => no_such_command(name),
    })
    .await;
    let server = server_of(&[&only]).await;
    let statement: RawDocumentBuf = rawdoc! {"q": {"_id": 1}, "u": {"$set": {"a": 1}}, "multi": true};
    let begun = Instant::now();
    let written: Result<Written> = server.update("d", "c", &[statement], Duration::from_secs(1)).await;
    let refused = written.unwrap().refused;
    assert_eq!(refused.iter().map(|(index, error)| (*index, error.kind)).collect::<Vec<_>>(), [(0, Kind::Connection)]);
    // It may start within its timeout, and run for as long.
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
    let updates: Vec<Document> = only.asked().into_iter().filter(|command| command.contains_key("update")).collect();
    assert_eq!(updates.len(), 1, "a router is not asked where it checks a deadline: {updates:?}");
    // Each shard gets the check with its part of the statements.
    assert!(updates[0].contains_key("let") && !updates[0].get_bool("ordered").unwrap(), "{updates:?}");
}

/// Two routers before one replica set, which stop to answer when they are told.
struct Routers {
    each: Vec<(Impostor, Arc<AtomicBool>)>,
    set: ReplicaSet,
}

impl Routers {
    /// The target collection `log` is said to be sharded by `key`.
    async fn start(key: Document) -> (Self, TestDb) {
        let set = ReplicaSet::start(1).await;
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, set.node(0).port()));
        let mut each = Vec::new();
        for _ in 0..2 {
            let frozen = Arc::new(AtomicBool::new(false));
            let (is_frozen, key) = (frozen.clone(), key.clone());
            let answers = move |name: &str, command: &Document| match (name, command.get_str("$db")) {
                _ if is_frozen.load(Ordering::SeqCst) => Answer::Silence,
                ("hello" | "ismaster", _) => Answer::Changed(into_router),
                ("find", Ok("config")) => {
                    let id = command.get_document("filter").unwrap().get_str("_id").unwrap();
                    let entry = doc! {"_id": id, "uuid": "…", "key": key.clone(), "unique": false, "noBalance": false};
                    recorded(cursor(
                        "config.collections",
                        if id.split('.').next_back() == Some("log") { vec![entry] } else { Vec::new() },
                    ))
                }
                (_, Ok("local")) => {
                    let why = "a router has no database `local`";
                    recorded(doc! {"ok": 0.0, "code": 20, "codeName": "IllegalOperation", "errmsg": why})
                }
                ("replsetgetstatus", _) => {
                    let why = "replSetGetStatus is not supported through mongos";
                    recorded(doc! {"ok": 0.0, "code": 115, "codeName": "CommandNotSupported", "errmsg": why})
                }
                _ => Answer::Forwarded,
            };
            each.push((Impostor::start(Some(server), answers).await, frozen));
        }
        let mut test = set.database().await;
        let hosts: Vec<String> = each.iter().map(|(router, _)| router.address.to_string()).collect();
        test.uri = format!("mongodb://{}/", hosts.join(","));
        (Self { each, set }, test)
    }

    fn asked(&self) -> Vec<Document> {
        self.each.iter().flat_map(|(router, _)| router.asked()).collect()
    }
}

async fn documents(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_many([doc! {"_id": 1, "ip": "a"}, doc! {"_id": 2, "ip": "a"}]).await.unwrap();
    let targets = (0..TARGETS).map(|id| doc! {"_id": id, "host": id % 2 + 1});
    db.collection("log").insert_many(targets).await.unwrap();
}

/// Changes all sources, and waits for all targets.
async fn rename(routers: &Routers, test: &TestDb, ip: &str) {
    // No router: one of them may be frozen.
    let client = routers.set.client().await;
    let db = client.database(&test.name);
    db.collection::<Document>("hosts").update_many(doc! {}, doc! {"$set": {"ip": ip}}).await.unwrap();
    let log = db.collection::<Document>("log");
    until(&format!("every target has {ip}"), async || {
        let right = log.count_documents(doc! {"ip": ip}).await.unwrap();
        (right == u64::try_from(TARGETS).unwrap()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sharded_cluster_must_be_allowed_and_is_called_an_experiment() {
    let (_routers, test) = Routers::start(doc! {"host": 1}).await;
    documents(&test).await;
    let running = Running::prepare(&test, RULE, "");
    let (code, told, _) = running.command(&["plan"]);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("EXPERIMENTAL: this is a sharded cluster"), "{told}");
    assert!(told.contains(&format!("{}.log is sharded by host", test.name)), "{told}");
    let config = std::fs::read_to_string(running.file()).unwrap();
    let file = running.file().with_file_name("not-allowed.yaml");
    std::fs::write(&file, config.replace(", allow_sharded: experimental", "")).unwrap();
    for command in ["plan", "run", "check"] {
        let output = denormd(&file).arg(command).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{command}: {told}");
        assert!(told.contains("allow_sharded: experimental"), "{command}: {told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_must_not_write_the_shard_key() {
    let (_routers, test) = Routers::start(doc! {"ip": "hashed"}).await;
    documents(&test).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    std::fs::write(&file, config(&test, RULE)).unwrap();
    let output = denormd(&file).arg("plan").output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(4), "{told}");
    assert!(told.contains("is sharded by `ip`, and the rule writes `ip`"), "{told}");
}

/// The daemon's whole way behind routers: what it cannot read there it says, and a frozen router is left for the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_works_through_two_routers_and_through_the_one_that_is_left() {
    let (routers, test) = Routers::start(doc! {"host": 1}).await;
    documents(&test).await;
    let running = Running::start(&test, RULE, "").await;
    rename(&routers, &test, "b").await;
    let status = running.until_json("the oplog was asked for", |status| !status["oplog"]["readable"].is_null()).await;
    let reason = status["oplog"]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("a router of a sharded cluster has no oplog"), "{status:#}");
    assert!(running.log().contains("EXPERIMENTAL: this is a sharded cluster"), "{}", running.log());
    let (code, bundle, error) = running.command(&["support-bundle", "--to", "-"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(bundle.contains("has no oplog") && bundle.contains("CommandNotSupported"), "{bundle}");
    routers.each[0].1.store(true, Ordering::SeqCst);
    rename(&routers, &test, "c").await;
    let asked = routers.asked();
    let local = asked.iter().find(|command| command.get_str("$db").is_ok_and(|name| name == "local"));
    assert!(local.is_none(), "a router was asked for its oplog: {local:?}");
    let pages = asked.iter().filter(|command| command.contains_key("find") && command.contains_key("min"));
    let sorted = pages.map(|page| page.get_document("sort").cloned().ok()).collect::<Vec<_>>();
    assert!(!sorted.is_empty() && sorted.iter().all(|sort| *sort == Some(doc! {"_id": 1})), "{sorted:?}");
}

/// `movePrimary` copies an unsharded collection to another shard, and drops the original with an event. Before 8.0 the
/// copy also has another UUID. A daemon that was away sees the same here: a drop, and a collection with these documents.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_was_moved_to_another_shard_is_not_taken_for_a_dropped_one() {
    let (routers, test) = Routers::start(doc! {"host": 1}).await;
    documents(&test).await;
    let mut running = Running::start(&test, RULE, "").await;
    rename(&routers, &test, "b").await;
    running.stop();
    let hosts = test.database().collection::<Document>("hosts");
    hosts.drop().await.unwrap();
    hosts.insert_many([doc! {"_id": 1, "ip": "b"}, doc! {"_id": 2, "ip": "b"}]).await.unwrap();
    running.run().await;
    // What a backfill from the other collection would remove is counted; it is nothing.
    running.until_json("the rule resumes by itself", |status| status["rules"][0]["state"] == "live").await;
    rename(&routers, &test, "c").await;
}

/// A rule whose source really is gone is blocked behind a router as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_was_dropped_behind_a_router_is_missed() {
    let (routers, test) = Routers::start(doc! {"host": 1}).await;
    documents(&test).await;
    let running = Running::start(&test, RULE, "").await;
    rename(&routers, &test, "b").await;
    test.database().collection::<Document>("hosts").drop().await.unwrap();
    running.until_json("the rule is blocked", |status| status["rules"][0]["state"] == "blocked").await;
}

async fn refusal(set: &ReplicaSet) -> String {
    let error = connect::connect(&set.uri().into()).await.unwrap_err();
    assert_eq!(error.kind, Kind::Topology, "{error}");
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("mongos")), "{error}");
    error.message
}

/// Two shards and a config server without a router. A shard's change stream has that shard's changes alone.
#[tokio::test(flavor = "multi_thread")]
async fn the_servers_behind_the_routers_are_refused() {
    let shard = || ReplicaSet::builder().arg("--shardsvr").start();
    let (config, one, other) = tokio::join!(ReplicaSet::builder().config_server().start(), shard(), shard());
    assert!(refusal(&config).await.contains("a config server of a sharded cluster"));
    // Started as a shard, and not part of a cluster yet: a replica set like any other.
    connect::connect(&one.uri().into()).await.unwrap();
    for (name, set) in [("s0", &one), ("s1", &other)] {
        // A router's `addShard` makes a config server send this.
        let identity = doc! {
            "shardName": name, "clusterId": ObjectId::from_bytes([1; 12]),
            "configsvrConnectionString": config.connection_string(),
        };
        let add: Document = doc! {"_addShard": 1, "shardIdentity": Bson::from(identity)};
        set.client().await.database("admin").run_command(add).await.unwrap();
        assert!(refusal(set).await.contains("one shard of a sharded cluster"));
    }
}
