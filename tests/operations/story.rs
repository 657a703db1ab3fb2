//! One story in every form of output: the status that the page shows, `denormd status`, the metrics, and the
//! expressions of the alerts, evaluated by a real Prometheus.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd::status::{Level, Status};
use denormd_fixture::{ReplicaSet, TestDb};
use tokio_util::sync::CancellationToken;

use crate::{
    operations::scraped::{Prometheus, alert, alerts, dashboard, records, selectors},
    support::running::{Running, causes},
};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }
  - { name: note, copy: { source: log, target: notes, match: { log: _id }, set: { ip: $ip } } }";

async fn shop(test: &TestDb) {
    let db = test.database();
    // A validator for the target makes the value "poison" fail for the rule that copies it.
    db.create_collection("log").validator(doc! {"ip": {"$ne": "poison"}}).await.unwrap();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    let log: Vec<Document> = (0..100).map(|id| doc! {"_id": id, "host": 1}).collect();
    db.collection("log").insert_many(log).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": 1, "log": 0}).await.unwrap();
}

async fn rename(test: &TestDb, ip: &str) {
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": ip}}).await.unwrap();
}

/// Writes continuously until it is dropped.
struct Bustle(CancellationToken);

impl Bustle {
    fn start(test: &TestDb) -> Self {
        let (stop, database) = (CancellationToken::new(), test.database());
        let stopped = stop.clone();
        tokio::spawn(async move {
            let hosts = database.collection::<Document>("hosts");
            for nth in 0_u64.. {
                hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": format!("10.1.0.{nth}")}}).await.unwrap();
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(300)) => {}
                    () = stopped.cancelled() => return,
                }
            }
        });
        Self(stop)
    }
}

impl Drop for Bustle {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A panel whose query has no result looks the same as one with the value zero, and an alert on a missing series never
/// fires.
#[tokio::test(flavor = "multi_thread")]
async fn no_query_of_the_dashboard_the_alerts_and_the_rules_comes_back_empty() {
    let test = denormd_fixture::database().await;
    shop(&test).await;
    let running = Running::start(&test, RULES, "").await;
    let Some(prometheus) = Prometheus::start(running.address).await else { return };
    let _bustle = Bustle::start(&test);
    let mut asked: BTreeSet<String> = dashboard().into_iter().chain(records()).collect();
    asked.extend(alerts().iter().flat_map(|(_, expression)| selectors(expression)));
    assert!(asked.len() > 40, "{asked:#?}");
    for expression in &asked {
        prometheus.until(expression).await;
    }
    // Also evaluated in their original form: a rule that fails is not healthy.
    for (name, expression) in alerts() {
        prometheus.query(&expression).await;
        assert!(!selectors(&expression).is_empty(), "{name}");
    }
    for (name, value) in prometheus.query("denormd_last_event_timestamp_seconds").await {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let age = now.as_secs_f64() - value;
        assert!((0.0..600.0).contains(&age), "{name:?} is {age} seconds old");
    }
}

/// All reports at one moment.
struct Told {
    status: Status,
    /// The output of `denormd status`.
    output: String,
    /// The alerts whose expressions are true.
    alerts: BTreeSet<String>,
}

async fn told(running: &Running, prometheus: &Prometheus) -> Told {
    let mut firing = BTreeSet::new();
    for (name, expression) in alerts() {
        if !prometheus.query(&expression).await.is_empty() {
            firing.insert(name);
        }
    }
    let (code, output, error) = running.command(&["status"]);
    assert_eq!(code, Some(0), "{error}");
    Told { status: running.status().await, output, alerts: firing }
}

impl Told {
    fn says(&self, cause: &str, alert: &str) -> bool {
        causes(&self.status).contains(&cause) && self.output.contains(cause) && self.alerts.contains(alert)
    }

    /// Alerts that are unrelated to the short oplog of the test.
    fn alarming(&self) -> Vec<&str> {
        self.alerts.iter().map(String::as_str).filter(|name| !name.contains("Headroom")).collect()
    }
}

/// Waits until all reports agree.
async fn until(what: &str, running: &Running, prometheus: &Prometheus, condition: impl Fn(&Told) -> bool) -> Told {
    let limit = Instant::now() + Duration::from_secs(150);
    loop {
        let told = told(running, prometheus).await;
        if condition(&told) {
            return told;
        }
        assert!(Instant::now() < limit, "{what}: {:#?}\n{}\n{:?}", told.status, told.output, told.alerts);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Waits until the timeline has an event.
async fn recorded(running: &Running, what: &str) {
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let (_, events, _) = running.command(&["events"]);
        if events.lines().any(|line| line.split_whitespace().nth(2) == Some(what)) {
            return;
        }
        assert!(Instant::now() < limit, "{what}: {events}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Writes unrelated data until the oplog is `share` full, or has begun to drop its oldest entries.
async fn fill_oplog(set: &ReplicaSet, share: f64) {
    let client = set.client().await;
    let junk = client.database("junk").collection("junk");
    let local = client.database("local");
    loop {
        let stats = local.run_command(doc! {"collStats": "oplog.rs", "scale": 1024}).await.unwrap();
        // In kilobytes, so that they fit.
        let number = |name: &str| f64::from(stats.get_i32(name).unwrap());
        if number("size") >= share * number("maxSize") {
            return;
        }
        let text = "x".repeat(50_000);
        junk.insert_many((0..10).map(|_| doc! {"text": &text})).await.unwrap();
        junk.delete_many(doc! {}).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn page_metrics_status_and_alerts_tell_the_same_story() {
    let set = ReplicaSet::builder().oplog_mb(32).start().await;
    let test = set.database().await;
    shop(&test).await;
    let mut running = Running::start(&test, RULES, "").await;
    let Some(prometheus) = Prometheus::start(running.address).await else { return };

    // All is well.
    let well = |told: &Told| {
        told.alarming().is_empty()
            && told.status.lag_seconds == Some(0.0)
            && !told.output.contains("!!")
            && told.status.dead_letters == 0
    };
    // The output and the status are of two moments: the condition is on both.
    let first = until("all is well", &running, &prometheus, |told| {
        well(told) && told.output.starts_with("Not behind: every change is applied.")
    })
    .await;
    assert!(matches!(first.status.level, Level::Ok | Level::Notice), "{:?}", first.status);

    // A poisoned document: only it becomes a dead letter.
    rename(&test, "poison").await;
    let poisoned =
        until("a dead letter", &running, &prometheus, |told| told.says("dead_letters", "DenormdDeadLetters")).await;
    // A cause that lasts less than five seconds has no line in the timeline.
    recorded(&running, "dead_letters").await;
    assert!(poisoned.output.contains("dead letters") && poisoned.output.contains("121"), "{}", poisoned.output);
    assert_eq!(running.metric("denormd_cause{reason=\"dead_letters\",rule=\"ip\"}").await, Some(1.0));
    assert!(running.metric("denormd_dead_letters{rule=\"ip\"}").await.is_some_and(|count| count >= 1.0));
    rename(&test, "10.0.0.2").await;
    until("mended", &running, &prometheus, well).await;

    // Writes are blocked, and meanwhile the oplog wraps around.
    let held = doc! {
        "configureFailPoint": "failCommand", "mode": "alwaysOn",
        "data": {"failCommands": ["update"], "errorCode": 112, "appName": "denormd", "namespace": format!("{}.log", test.name)},
    };
    let admin = set.client().await.database("admin");
    admin.run_command(held).await.unwrap();
    rename(&test, "10.0.0.3").await;
    let behind = until("behind", &running, &prometheus, |told| {
        told.says("retrying", "DenormdBehind") && told.output.starts_with("Behind by ")
    })
    .await;
    assert!(running.metric("denormd_rule_lag_seconds{rule=\"ip\"}").await.is_some_and(|lag| lag > 60.0));
    assert!(behind.status.rules.iter().any(|rule| rule.name == "ip" && rule.behind_since.is_some()));
    // Its own lag shows the problem: the canary adds nothing.
    assert!(!behind.alerts.contains("DenormdCanaryLate"), "{:?}", behind.alerts);
    for share in [0.3, 0.5, 0.7, 0.85] {
        fill_oplog(&set, share).await;
        tokio::time::sleep(Duration::from_secs(6)).await;
    }
    let short = until("nearly overrun", &running, &prometheus, |told| {
        told.says("oplog_short", "DenormdOplogHeadroomCritical")
            && told.alerts.contains("DenormdLossNear")
            && [&told.status.risk, &told.output].into_iter().all(|text| text.contains("the oplog position expires in"))
    })
    .await;
    assert_eq!(short.status.level, Level::Critical);
    let (_, runbook, _) = running.command(&["runbook", "LossNear"]);
    assert!(runbook.contains("**Now.** Behind by") && !runbook.contains("<MB>"), "{runbook}");
    admin.run_command(doc! {"configureFailPoint": "failCommand", "mode": "off"}).await.unwrap();
    until("caught up", &running, &prometheus, well).await;

    // The daemon is stopped.
    running.stop();
    prometheus.until(&alert("DenormdGone")).await;
    let (code, _, error) = running.command(&["status"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("no denormd answers"), "{error}");
    let (_, runbook, _) = running.command(&["runbook", "gone"]);
    assert!(runbook.contains("Nothing is known: no denormd answers"), "{runbook}");
    rename(&test, "10.0.0.4").await;
    running.run().await;
    until("all is well again", &running, &prometheus, well).await;

    // The timeline contains all of it.
    for what in ["leader", "dead_letters", "dead_letters_ended", "retrying", "oplog_short", "stopped"] {
        recorded(&running, what).await;
    }
}
