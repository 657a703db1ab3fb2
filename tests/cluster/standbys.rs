//! A standby answers for the leader, and a claim that copies are current is true.

use std::time::{Duration, Instant};

use bson::{DateTime, Document, doc};
use denormd::{
    server::client,
    status::{Leadership, Status},
};
use denormd_fixture::{ReplicaSet, TestDb};
use serde_json::{Value, json};

use crate::{
    engine::fan_outs::fail,
    support::{
        daemon,
        running::{Running, causes},
    },
};

/// The second rule copies a field that the first one writes.
const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }
  - { name: note, copy: { source: log, target: notes, match: { log: _id }, set: { ip: $ip } } }";
/// The leader stays the leader however slow the machine is.
const LEASE: &str = "lease: { ttl_seconds: 60 }\n";

async fn hosts_and_log(test: &TestDb) {
    let db = test.database();
    db.create_collection("log").validator(doc! {"ip": {"$ne": -1}}).await.unwrap();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 0}).await.unwrap();
    db.collection("log").insert_many((0..3).map(|id| doc! {"_id": id, "host": 1})).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": 1, "log": 0}).await.unwrap();
}

pub async fn leader_and_standby(test: &TestDb) -> (Running, Running) {
    hosts_and_log(test).await;
    let leader = Running::start(test, RULES, LEASE).await;
    let standby = Running::start(test, RULES, LEASE).await;
    standby
        .until_json("it names the leader", |status| status["role"] == "standby" && !status["leaders"][0].is_null())
        .await;
    (leader, standby)
}

/// Changes the source, and returns the commit time as seconds and increment.
async fn write(test: &TestDb, ip: i32) -> (u32, u32) {
    let command =
        doc! {"update": "hosts", "updates": [{"q": {}, "u": {"$set": {"ip": ip}}}], "writeConcern": {"w": "majority"}};
    let reply = test.database().run_command(command).await.unwrap();
    let time = reply.get_timestamp("operationTime").unwrap();
    (time.time, time.increment)
}

async fn copied(test: &TestDb) -> i32 {
    let notes = test.database().collection::<Document>("notes");
    notes.find_one(doc! {}).await.unwrap().unwrap().get_i32("ip").unwrap_or_default()
}

async fn waited(running: &Running, (seconds, increment): (u32, u32)) -> Value {
    let path = format!("/v1/wait?operationTime={seconds}.{increment}&timeout=180");
    let answer = client::get(running.address, &path, Duration::from_secs(190)).await.unwrap();
    assert_eq!(answer.code, 200, "{}", String::from_utf8_lossy(&answer.body));
    answer.json().unwrap()
}

fn name_of(status: &Value) -> String {
    let this = status["instances"].as_array().unwrap().iter().find(|instance| instance["this"] == true);
    this.unwrap_or_else(|| panic!("{status:#}"))["name"].as_str().unwrap().to_owned()
}

/// The lease can be read and not written. Nobody leads, and the instance said that it was ready, without a cause.
#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_cannot_take_the_lease_says_so() {
    const USER_WRITES_BLOCKED: i32 = 371;
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    hosts_and_log(&test).await;
    let mut running = Running::prepare(&test, RULES, LEASE);
    let leases = format!("{}_state.leases", test.name);
    let refused = doc! {"failCommands": ["findAndModify"], "namespace": leases, "errorCode": USER_WRITES_BLOCKED};
    fail(&test, "alwaysOn", refused).await;
    running.spawn();
    let answers = async || client::get(running.address, "/livez", Duration::from_secs(10)).await.ok();
    daemon::until("it answers", answers).await;
    let status = running.until("the cause", |status| causes(status) == ["lease_unreadable"]).await;
    assert_eq!(status.leadership, Leadership::Standby { leaders: Vec::new() });
    assert!(status.errors.iter().any(|error| error.doing == "take the lease"), "{:?}", status.errors);
    let ready = client::get(running.address, "/readyz", Duration::from_secs(10)).await.unwrap();
    assert_eq!(ready.code, 503);
    fail(&test, "off", doc! {}).await;
    running.until("it leads", |status| status.leadership.leads() && causes(status).is_empty()).await;
}

/// With partitions, the leader of one of them did not know the drift that another leader had found, and vouched for the rule.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_of_some_partitions_does_not_vouch_for_drift_elsewhere() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let rules = RULES.replace("name: ip, copy", "name: ip, on_drift: report, copy");
    let shared = "lease: { ttl_seconds: 60, partitions: 2 }\n";
    let instances = [Running::start(&test, &rules, shared).await, Running::start(&test, &rules, shared).await];
    for one in &instances {
        let leads_one =
            |status: &Status| status.partitions.as_ref().is_some_and(|partitions| partitions.led.len() == 1);
        one.until("it leads a partition", leads_one).await;
    }
    let excepts = async |one: &Running, rules: Value| {
        daemon::until("both know of the drift", async || {
            let answer = waited(one, write(&test, 0).await).await;
            (answer["except"] == rules).then_some(())
        })
        .await;
    };
    for one in &instances {
        excepts(one, json!([])).await;
    }
    let logs = test.database().collection::<Document>("log");
    logs.update_one(doc! {"_id": 0}, doc! {"$set": {"ip": 99}}).await.unwrap();
    for one in &instances {
        // With the rule that reads its copies.
        excepts(one, json!(["ip", "note"])).await;
    }
}

/// `wait` on a standby was once refused ("this process does not lead: ask the one that does"), and its status was
/// empty.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_names_the_leader_and_serves_read_your_writes() {
    let test = denormd_fixture::database().await;
    let (leader, standby) = leader_and_standby(&test).await;
    let live = |status: &Value| {
        status["rules"]
            .as_array()
            .is_some_and(|rules| rules.len() == 2 && rules.iter().all(|rule| rule["state"] == "live"))
    };
    let told = standby.until_json("the rules, and that they are live", live).await;
    let leads = leader
        .until_json("two instances", |status| status["instances"].as_array().is_some_and(|all| all.len() == 2))
        .await;
    assert_eq!(told["leaders"][0]["instance"], name_of(&leads), "{told:#}");
    let (code, text, error) = standby.command(&["status"]);
    assert_eq!(code, Some(0), "{error}");
    assert!(text.starts_with(&format!("Standing by: {} leads.", name_of(&leads))), "{text}");
    assert!(text.contains("live") && text.contains("standby of"), "{text}");
    for ip in 1..=5 {
        let time = write(&test, ip).await;
        let answer = waited(&standby, time).await;
        assert_eq!(answer["except"], serde_json::json!([]), "{answer}");
        assert_eq!(copied(&test).await, ip, "the end of the chain is there when it returns");
    }
    // Both instances name a rule that does not run, also in the summary; the command returns when they do.
    let (code, _, error) = standby.command(&["pause", "note"]);
    assert_eq!(code, Some(0), "{error}");
    let status = leader.status().await;
    assert!(status.summary.contains("Rule note is paused."), "{}", status.summary);
    assert!(
        status.rules.iter().any(|rule| rule.name == "note" && rule.state == "paused" && rule.lag_seconds.is_none())
    );
    assert_eq!(leader.metric("denormd_cause{reason=\"paused\",rule=\"note\"}").await, Some(1.0));
    assert_eq!(leader.metric("denormd_rule_lag_seconds{rule=\"note\"}").await, None, "0 would say that it is current");
    for running in [&leader, &standby] {
        let answer = waited(running, write(&test, 6).await).await;
        assert_eq!(answer["except"], serde_json::json!(["note"]), "{answer}");
        running.until_json("told", |status| status["current"]["except"] == serde_json::json!(["note"])).await;
    }
    standby.until_json("told", |status| status["summary"].as_str().unwrap().contains("Rule note is paused.")).await;
}

/// Instances that are ended often, as by a deployment that crashes again and again, would fill the state.
#[tokio::test(flavor = "multi_thread")]
async fn the_report_of_an_instance_that_is_gone_is_removed() {
    let test = denormd_fixture::database().await;
    let reports = test.beside("state").collection::<Document>("reports");
    let (leader, standby) = leader_and_standby(&test).await;
    let report = daemon::until("a report", async || reports.find_one(doc! {}).await.unwrap()).await;
    let mut id = report.get_document("_id").unwrap().clone();
    for (name, minutes) in [("gone", 61), ("silent", 30)] {
        id.insert("instance", name);
        let at = doc! {"$dateSubtract": {"startDate": "$$NOW", "unit": "minute", "amount": minutes}};
        reports.update_one(doc! {"_id": &id}, vec![doc! {"$set": {"at": at}}]).upsert(true).await.unwrap();
    }
    let count = async |name| reports.count_documents(doc! {"_id.instance": name}).await.unwrap();
    daemon::until("the old report is gone", async || (count("gone").await == 0).then_some(())).await;
    assert_eq!(count("silent").await, 1);
    drop((leader, standby));
}

/// The status of a standby said of rules that only its own config has that every change is applied.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_does_not_vouch_for_rules_that_the_leader_lacks() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let (one, _) = RULES.split_once('\n').unwrap();
    let standby = Running::start(&test, RULES, LEASE).await;
    standby.until_json("it leads", |status| status["role"] == "leader").await;
    let scanned = async || standby.metric("denormd_backfill_scanned_targets{rule=\"ip\"}").await;
    daemon::until("a backfill", async || scanned().await.filter(|targets| *targets > 0.0)).await;
    // The newest config takes over.
    let leader = Running::start(&test, one, LEASE).await;
    leader.until_json("it leads", |status| status["role"] == "leader").await;
    let claim = leader.until_json("it makes a claim", |status| !status["current"].is_null()).await;
    let is_told = |status: &Value| {
        // The leader makes its claim in every report that it writes from now on.
        let reported = status["heard_seconds"].as_f64().map(|age| status["now"].as_f64().unwrap() - age * 1000.0);
        let summary = status["summary"].as_str().unwrap();
        reported > claim["now"].as_f64()
            && summary.contains("The leader's rules differ from those in this instance's config.")
    };
    let status = standby.until_json("it hears the leader", is_told).await;
    assert_eq!(status["rules"].as_array().map(Vec::len), Some(1), "{status:#}");
    assert!(status["level"] == "notice" && status["current"].is_null(), "{status:#}");
    // A former leader once went on exporting its last figures.
    daemon::until("no figures of its own", async || (scanned().await == Some(0.0)).then_some(())).await;
}

/// A daemon that was killed and started again said that its dead predecessor leads.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_whose_holder_is_not_heard_is_waited_for() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 1}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
    let mut running = Running::start(&test, rule, "lease: { ttl_seconds: 600 }\n").await;
    let leads = |status: &Value| status["role"] == "leader";
    let name =
        name_of(&running.until_json("it leads", |status| leads(status) && !status["instances"][0].is_null()).await);
    running.kill();
    running.run().await;
    let stands_by = |status: &Value| status["role"] == "standby";
    let status = running.until_json("it stands by", stands_by).await;
    let said = status["summary"].as_str().unwrap();
    let waiting = format!("Standing by: waiting for the lease of {name}, which expires in ");
    assert!(said.starts_with(&waiting) && said.contains(" unless renewed."), "{said}");
    assert!(!said.contains("Not behind"), "{said}");
    let events = daemon::until("the timeline says so", async || {
        let events = running.text("/v1/events").await;
        events.contains(&format!("standing by: the lease names {name}")).then_some(events)
    })
    .await;
    assert!(!events.contains(&format!("{name} leads")), "{events}");
    // A container that restarts has the name of its predecessor.
    let is_listed = |status: &Value| status["instances"].as_array().unwrap().iter().any(|one| one["this"] == true);
    let own = name_of(&running.until_json("it is listed", is_listed).await);
    let (_, process) = own.rsplit_once(':').unwrap();
    let named = doc! {"$set": {"process": process.parse::<i64>().unwrap()}};
    test.beside("state").collection::<Document>("leases").update_one(doc! {}, named).await.unwrap();
    let waiting = format!("Standing by: waiting for the lease of {own}, which expires in ");
    let waits = |status: &Value| status["summary"].as_str().is_some_and(|summary| summary.starts_with(&waiting));
    running.until_json("it waits for the lease of its predecessor", waits).await;
}

/// A container that restarts has the name of its predecessor, which counts as alive for the duration of a lease. Both were marked as
/// the reporting instance, and rules were compared with those of the predecessor.
#[tokio::test(flavor = "multi_thread")]
async fn a_predecessor_of_the_same_name_is_another_instance() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let running = Running::start(&test, RULES, LEASE).await;
    running.until_json("it leads", |status| status["role"] == "leader").await;
    let instances = test.beside("state").collection::<Document>("instances");
    let mut predecessor = daemon::until("an instance", async || instances.find_one(doc! {}).await.unwrap()).await;
    predecessor.get_document_mut("_id").unwrap().insert("instance", "predecessor");
    predecessor.insert("started", DateTime::from_millis(0));
    predecessor.insert("seen", DateTime::from_millis(i64::from(u32::MAX) * 1000));
    predecessor.insert("plan", "others");
    instances.insert_one(predecessor).await.unwrap();
    let has_two = |status: &Value| status["instances"].as_array().is_some_and(|all| all.len() == 2);
    let status = running.until_json("two instances", has_two).await;
    let told = |field: &str| [0_usize, 1].map(|nth| status["instances"][nth][field].clone());
    assert_eq!(told("name")[0], told("name")[1], "{status:#}");
    assert_eq!((told("this"), told("other_rules")), ([false, true].map(Value::from), [true, false].map(Value::from)));
    assert_eq!(told("role"), ["standby", "leader"].map(Value::from));
}

/// A standby passed on the claim of a report that was older than a reload of both instances, or than the leader's term.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_about_other_rules_or_of_an_earlier_term_is_not_passed_on() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let long = "lease: { ttl_seconds: 600 }\n";
    let leader = Running::start(&test, RULES, long).await;
    leader.until_json("it leads", |status| status["role"] == "leader").await;
    let standby = Running::start(&test, RULES, long).await;
    let has_claim = |status: &Value| status["role"] == "standby" && !status["current"].is_null();
    let claim = standby.until_json("a claim", has_claim).await;
    leader.signal("STOP");
    let reports = test.beside("state").collection::<Document>("reports");
    let plan = claim["plan"].as_str().unwrap();
    for (plan, term, is_passed_on) in [("others", 1_i64, false), (plan, 1, true), (plan, 0, false)] {
        daemon::until("the report as the standby passes it on", async || {
            // A report that was sent before the leader was stopped may arrive later.
            let report = doc! {"$set": {"status.plan": plan, "status.term": term}};
            reports.update_many(doc! {}, report).await.unwrap();
            let status: Value = serde_json::from_str(&standby.text("/v1/status").await).unwrap();
            (status["role"] == "standby" && status["current"].is_null() != is_passed_on).then_some(())
        })
        .await;
    }
    leader.signal("CONT");
    standby.until_json("a claim", has_claim).await;
}

/// Copies that are reported as current as of a time are current, on both instances, with a chain of rules and dead
/// letters.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_to_be_current_lacks_no_change() {
    let test = denormd_fixture::database().await;
    let (leader, standby) = leader_and_standby(&test).await;
    let mut committed: Vec<((u32, u32), i32)> = Vec::new();
    // The first claims except the rules that were being backfilled.
    for running in [&leader, &standby] {
        running.until_json("a claim", |status| status["current"]["except"] == serde_json::json!([])).await;
    }
    let mut claims = [0, 0];
    let limit = Instant::now() + Duration::from_secs(240);
    let mut ip = 0;
    while claims.iter().any(|claims| *claims < 3) {
        ip += 1;
        committed.push((write(&test, ip).await, ip));
        for (running, claims) in [&leader, &standby].into_iter().zip(&mut claims) {
            let status: Value = serde_json::from_str(&running.text("/v1/status").await).unwrap();
            let Some(as_of) = status["current"]["as_of"].as_str() else { continue };
            assert_eq!(status["current"]["except"], serde_json::json!([]), "{status:#}");
            let (seconds, increment) = as_of.split_once('.').unwrap();
            let as_of = (seconds.parse::<u32>().unwrap(), increment.parse::<u32>().unwrap());
            let Some((_, least)) = committed.iter().rev().find(|(time, _)| *time <= as_of) else { continue };
            // Read after the claim: the copies may only be newer.
            assert!(copied(&test).await >= *least, "current as of {as_of:?}, and lacks {least}: {committed:?}");
            *claims += 1;
        }
        assert!(Instant::now() < limit, "claims are made: {claims:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // A failed write becomes a dead letter, and its rule is excepted from then on, with the rule that reads its copies.
    let excepted = serde_json::json!(["ip", "note"]);
    let time = write(&test, -1).await;
    for running in [&leader, &standby] {
        let answer = waited(running, time).await;
        assert_eq!(answer["except"], excepted, "{answer}");
    }
    leader
        .until_json("excepted", |status| {
            let as_of = status["current"]["as_of"].as_str().unwrap_or_default();
            let passed =
                as_of.split('.').next().and_then(|seconds| seconds.parse::<u32>().ok()).is_some_and(|s| s > time.0);
            assert!(!passed || status["current"]["except"] == excepted, "{status:#}");
            passed
        })
        .await;
}
