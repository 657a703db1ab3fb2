//! The timeline, the canary and the reloads of a daemon.

use std::time::{Duration, Instant};

use bson::{Document, doc};
use denormd::server::client;
use denormd_engine::{events::Event, metrics::RecentError};
use denormd_fixture::ReplicaSet;

use crate::support::daemon::PATIENCE;
use crate::support::running::{Running, causes};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

async fn hosts_and_log(test: &denormd_fixture::TestDb) {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
}

fn kept(running: &Running) -> Vec<Event> {
    let (code, text, error) = running.command(&["events", "--since", "1h", "--output", "json"]);
    assert_eq!(code, Some(0), "{error}");
    serde_json::from_str(&text).unwrap()
}

async fn until_kept(running: &Running, what: &str) -> Vec<Event> {
    let limit = Instant::now() + PATIENCE;
    loop {
        let events = kept(running);
        if events.iter().any(|event| event.what == what) {
            return events;
        }
        assert!(Instant::now() < limit, "{what} is not among {events:#?}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// A config that the cluster refused was once not tried again: after `plan --apply`, the daemon went on with the old rules
/// until a signal or another change of the file.
#[tokio::test(flavor = "multi_thread")]
async fn a_config_that_the_cluster_refused_is_taken_once_it_has_what_it_lacked() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    test.database().create_collection("rooms").await.unwrap();
    let running = Running::start(&test, RULES, "").await;
    let more =
        "  - { name: room, copy: { source: rooms, target: log, match: { room: _id }, set: { title: $title } } }\n";
    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), text.replace("rules:\n", &format!("rules:\n{more}"))).unwrap();
    let status = running.until("refused", |status| causes(status).contains(&"config_refused")).await;
    assert!(
        status.summary.contains("The changed config is refused; the old rules stay in force."),
        "{}",
        status.summary
    );
    let (code, _, error) = running.command(&["plan", "--apply"]);
    assert_eq!(code, Some(0), "{error}");
    let status = running.until("it is taken", |status| status.rules.iter().any(|rule| rule.name == "room")).await;
    assert!(!causes(&status).contains(&"config_refused"), "{status:#?}");
    let told = running.text("/v1/events").await;
    assert_eq!(told.matches("config_refused").count(), 1, "{told}");
}

/// A daemon that was stopped once reported a server outage when it resumed.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_is_recorded_and_is_no_outage() {
    // Other tests may keep a shared server busy for longer than a renewal of the lease may take.
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    hosts_and_log(&test).await;
    let running = Running::start(&test, RULES, "").await;
    until_kept(&running, "backfill_done").await;
    for seconds in [3, 7] {
        running.signal("STOP");
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        running.signal("CONT");
        // Long enough for a report that waits for new readings.
        tokio::time::sleep(Duration::from_secs(6)).await;
        running.until("it leads", |status| status.leadership.leads()).await;
    }
    let events = until_kept(&running, "did_not_run").await;
    let pauses: Vec<&Event> = events.iter().filter(|event| event.what == "did_not_run").collect();
    assert!(pauses.iter().any(|event| event.text.starts_with("this process did not run for ")), "{pauses:#?}");
    let outages = ["no_primary", "lease_unreadable", "leader_unknown"];
    assert!(!events.iter().any(|event| outages.contains(&event.what.as_str())), "{events:#?}");
}

/// A config that was invalid after an edit was once reported in the log alone: the daemon continued with the old rules,
/// and nobody knew that the new ones were not in force.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_config_is_told_everywhere_until_it_is_mended_and_the_timeline_remembers() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let mut running = Running::start(&test, RULES, "").await;
    until_kept(&running, "backfill_done").await;
    assert_eq!(running.metric("denormd_config_last_reload_successful").await, Some(1.0));
    let good = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), good.replace("source: hosts", "sorce: hosts")).unwrap();
    let status = running.until("refused", |status| causes(status).contains(&"config_refused")).await;
    assert!(status.errors.iter().any(|error| error.message.contains("the key `source` is missing")), "{status:#?}");
    assert_eq!(running.metric("denormd_config_last_reload_successful").await, Some(0.0));
    assert_eq!(running.metric("denormd_config_reloads_total{outcome=\"refused\"}").await, Some(1.0));
    assert_eq!(running.metric("denormd_cause{reason=\"config_refused\",rule=\"\"}").await, Some(1.0));
    std::fs::write(running.file(), &good).unwrap();
    running.until("mended", |status| !causes(status).contains(&"config_refused")).await;
    assert_eq!(running.metric("denormd_config_last_reload_successful").await, Some(1.0));
    let told: Vec<Event> = serde_json::from_str(&running.text("/v1/events").await).unwrap();
    assert!(told.iter().any(|event| event.what == "config_reloaded"), "{told:#?}");
    running.stop();
    // Its events are read without it.
    let names: Vec<String> = kept(&running).into_iter().map(|event| event.what).collect();
    for what in ["leader", "backfill_started", "backfill_done", "config_refused", "config_reloaded", "stopped"] {
        assert!(names.iter().any(|name| name == what), "{what} is not among {names:?}");
    }
    let place = |what: &str| names.iter().position(|name| name == what);
    assert!(place("config_refused") < place("config_reloaded"), "{names:?}");
    let (_, text, _) = running.command(&["events"]);
    assert!(text.contains("the new config is refused: "), "{text}");
    let (code, _, error) = running.command(&["events", "--since", "soon"]);
    assert_eq!(code, Some(2), "{error}");
}

/// An idle daemon reports a lag of zero, and so would one that receives no events.
#[tokio::test(flavor = "multi_thread")]
async fn the_canary_comes_through_while_idle_and_ages_when_its_write_is_held() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    hosts_and_log(&test).await;
    let running = Running::start(&test, RULES, "").await;
    running.until("a canary", |status| status.canary_age_seconds.is_some_and(|age| age < 5.0)).await;
    let held = doc! {
        "configureFailPoint": "failCommand", "mode": "alwaysOn",
        "data": {"failCommands": ["update"], "errorCode": 112, "namespace": format!("{}_state.canaries", test.name)},
    };
    let admin = set.client().await.database("admin");
    admin.run_command(held).await.unwrap();
    running
        .until("no canary, and nothing else is late", |status| {
            status.canary_age_seconds.is_some_and(|age| age > 13.0) && status.lag_seconds == Some(0.0)
        })
        .await;
    assert!(running.metric("denormd_canary_age_seconds").await.is_some_and(|age| age > 13.0));
    let is_canary = |error: &RecentError| error.doing == "send a canary";
    running.until("its error among the recent ones", |status| status.errors.iter().any(is_canary)).await;
    admin.run_command(doc! {"configureFailPoint": "failCommand", "mode": "off"}).await.unwrap();
    running.until("a canary again", |status| status.canary_age_seconds.is_some_and(|age| age < 10.0)).await;
    // No writes when idle: the canary is written to the state database only.
    let targets = test.database().collection::<Document>("log");
    assert_eq!(targets.count_documents(doc! {"ip": "10.0.0.1"}).await.unwrap(), 1);
    let databases = set.client().await.list_database_names().await.unwrap();
    assert!(databases.contains(&format!("{}_state", test.name)), "{databases:?}");
    let answer = client::get(running.address, "/readyz", Duration::from_secs(10)).await.unwrap();
    assert!(answer.ok);
}
