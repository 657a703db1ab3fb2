//! The daemon's reports about itself, in good and bad states.

use std::{
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd::{
    server::{self, client},
    status::{Board, Status},
};
use denormd_engine::deployment::identity::Identity;
use denormd_fixture::{ReplicaSet, TestDb};
use tokio_util::sync::CancellationToken;

use crate::support::daemon::PATIENCE;
use crate::support::daemon::{Daemon, all, config};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }
  - { name: note, copy: { source: log, target: notes, match: { log: _id }, set: { ip: $ip } } }";

/// Occurs in documents and in the password, and must never occur in any output.
const CANARY: &str = "canary-7e57ed";

/// The labels of all metrics.
const LABELS: [&str; 11] =
    ["rule", "collection", "operation", "reason", "outcome", "event", "version", "commit", "le", "partition", "role"];

/// A daemon of this process with its server on a free port.
struct Observed {
    daemon: Daemon,
    address: SocketAddr,
    stop: CancellationToken,
}

impl Observed {
    async fn start(test: &TestDb, rules: &str) -> Self {
        let daemon = Daemon::start(test, rules).await;
        let listener = server::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let board = Board::new("test", &Identity::of_this_process(), daemon.context().metrics.clone());
        board.attach(daemon.shared());
        let stop = CancellationToken::new();
        tokio::spawn(board.clone().watch(stop.clone()));
        tokio::spawn(server::serve(listener, board, Arc::new(server::Guard::default()), stop.clone()));
        Self { daemon, address, stop }
    }

    async fn text(&self, path: &str) -> String {
        let answer = client::get(self.address, path, Duration::from_secs(60)).await.unwrap();
        String::from_utf8(answer.body).unwrap()
    }

    async fn code(&self, path: &str) -> u16 {
        client::get(self.address, path, Duration::from_secs(60)).await.unwrap().code
    }

    async fn status(&self) -> Status {
        serde_json::from_str(&self.text("/v1/status").await).unwrap()
    }

    async fn metric(&self, series: &str) -> Option<f64> {
        let text = self.text("/metrics").await;
        let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == series))?;
        line.rsplit_once(' ').unwrap().1.parse().ok()
    }

    async fn until(&self, what: &str, condition: impl Fn(&Status) -> bool) -> Status {
        let limit = Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if condition(&status) {
                return status;
            }
            assert!(Instant::now() < limit, "{what}: {status:#?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn end(self) {
        self.stop.cancel();
        self.daemon.stop().await;
    }
}

/// A pipeline that ended for a new config, or with its leadership, once made the process count as dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_pipeline_has_just_ended_is_alive_and_not_ready() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 1).await;
    let Observed { daemon, address, stop } = Observed::start(&test, RULES).await;
    daemon.settled().await;
    daemon.stop().await;
    let code = async |path: &str| client::get(address, path, Duration::from_secs(60)).await.unwrap().code;
    assert_eq!((code("/livez").await, code("/readyz").await), (200, 503));
    stop.cancel();
}

/// The headline was empty in the first second.
#[tokio::test(flavor = "multi_thread")]
async fn the_headline_says_something_from_the_start() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 1).await;
    let observed = Observed::start(&test, RULES).await;
    let said = |status: &Status| {
        assert!(!status.summary.is_empty());
        status.summary.contains("Not behind")
    };
    observed.until("the first figures", said).await;
    observed.end().await;
}

fn causes(status: &Status) -> Vec<&str> {
    status.causes.iter().map(|cause| cause.cause.as_str()).collect()
}

async fn hosts_and_log(test: &TestDb, logs: i32) {
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    let log: Vec<Document> = (0..logs).map(|id| doc! {"_id": id, "host": 1}).collect();
    db.collection("log").insert_many(log).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": 1, "log": 0}).await.unwrap();
}

/// Makes commands of denormd fail or wait, and only those.
async fn fail_point(set: &ReplicaSet, data: Option<Document>) {
    let command = match data {
        Some(mut data) => {
            data.insert("appName", "denormd");
            doc! {"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data}
        }
        None => doc! {"configureFailPoint": "failCommand", "mode": "off"},
    };
    set.client().await.database("admin").run_command(command).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_well_formed_and_named_by_convention() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 3).await;
    let observed = Observed::start(&test, RULES).await;
    observed.daemon.settled().await;
    test.database()
        .collection::<Document>("hosts")
        .update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}})
        .await
        .unwrap();
    observed.daemon.settled().await;
    let text = observed.text("/metrics").await;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(series.starts_with("denormd_") || series.starts_with("process_"), "{line}");
        assert!(value.parse::<f64>().is_ok(), "{line}");
        let labels = series.split_once('{').map_or("", |(_, rest)| rest.trim_end_matches('}'));
        for label in labels.split("\",").filter(|label| !label.is_empty()) {
            let name = label.split('=').next().unwrap();
            assert!(LABELS.contains(&name), "{line}");
        }
    }
    for rule in ["ip", "note"] {
        let count = observed.metric(&format!("denormd_propagation_seconds_count{{rule=\"{rule}\"}}")).await;
        assert!(count.is_some_and(|count| count >= 1.0), "{rule}: {count:?}\n{text}");
    }
    assert_eq!(observed.metric("denormd_leader").await, Some(1.0));
    assert!(observed.metric("process_open_fds").await.is_some_and(|open| open > 2.0), "{text}");
    assert!(observed.metric("process_cpu_seconds_total").await.is_some_and(|seconds| seconds > 0.0), "{text}");
    promtool(&["check", "metrics"], &text);
    observed.end().await;
}

/// Runs promtool, if it is available.
fn promtool(arguments: &[&str], input: &str) {
    let Some(programs) = crate::operations::scraped::programs() else { return };
    let mut child = Command::new(programs.join("promtool"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_grows_while_writes_are_held_and_is_zero_when_drained() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    hosts_and_log(&test, 3).await;
    let observed = Observed::start(&test, RULES).await;
    observed.daemon.settled().await;
    observed.until("idle and drained", |status| status.lag_seconds == Some(0.0)).await;
    // WriteConflict: a transient code that does not make the driver drop its connections.
    let held = doc! {"failCommands": ["update"], "errorCode": 112, "namespace": format!("{}.log", test.name)};
    fail_point(&set, Some(held)).await;
    test.database()
        .collection::<Document>("hosts")
        .update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.9"}})
        .await
        .unwrap();
    let status = observed.until("behind", |status| status.lag_seconds > Some(6.0)).await;
    let rule = |name: &str| status.rules.iter().find(|rule| rule.name == name).unwrap();
    assert!(rule("ip").lag_seconds > Some(6.0) && rule("ip").behind_since.is_some(), "{status:#?}");
    assert!(rule("note").lag_seconds < Some(5.0), "its own work does not wait: {status:#?}");
    assert!(rule("note").chain_lag_seconds > Some(6.0), "the chain does: {status:#?}");
    assert!(causes(&status).contains(&"retrying"), "{status:#?}");
    assert!(status.summary.contains("rule ip"), "{}", status.summary);
    assert!(!status.errors.is_empty());
    let first = observed.metric("denormd_rule_lag_seconds{rule=\"ip\"}").await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let later = observed.metric("denormd_rule_lag_seconds{rule=\"ip\"}").await.unwrap();
    assert!(later > first + 0.5, "{first} then {later}");
    assert_eq!(observed.code("/v1/wait?timeout=1").await, 504);
    assert_eq!(observed.code("/livez").await, 200, "a server that refuses is no reason to restart");
    fail_point(&set, None).await;
    assert_eq!(observed.code("/v1/wait?timeout=60").await, 200);
    observed.until("drained again", |status| status.lag_seconds == Some(0.0) && status.behind_since.is_none()).await;
    observed.end().await;
}

/// Nothing is behind, and all was once said to be well, until a restart met an oplog that no longer reached back.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_cannot_be_saved_is_reported_while_nothing_is_behind() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    hosts_and_log(&test, 3).await;
    let observed = Observed::start(&test, RULES).await;
    observed.daemon.settled().await;
    // OutOfDiskSpace
    let full =
        doc! {"failCommands": ["update"], "errorCode": 14031, "namespace": format!("{}_state.positions", test.name)};
    fail_point(&set, Some(full)).await;
    let status = observed.until("it is said", |status| causes(status).contains(&"checkpoint_unsaved")).await;
    assert!(status.lag_seconds < Some(5.0) && status.checkpoint_age_seconds >= 60.0, "{status:#?}");
    assert_ne!(serde_json::to_value(status.level).unwrap(), "ok");
    assert!(status.errors.iter().any(|error| error.message.contains("OutOfDiskSpace")), "{status:#?}");
    assert_eq!(observed.metric("denormd_cause{reason=\"checkpoint_unsaved\",rule=\"\"}").await, Some(1.0));
    fail_point(&set, None).await;
    observed.until("it is saved again", |status| causes(status).is_empty()).await;
    observed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_returns_when_the_end_of_a_chain_shows_the_write() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 1).await;
    let observed = Observed::start(&test, RULES).await;
    let db = test.database();
    for round in 0..5 {
        let ip = format!("10.0.1.{round}");
        db.collection::<Document>("hosts").update_one(doc! {}, doc! {"$set": {"ip": &ip}}).await.unwrap();
        let hello = db.run_command(doc! {"hello": 1}).await.unwrap();
        let time = hello.get_timestamp("operationTime").unwrap();
        let path = format!("/v1/wait?operationTime={}.{}&timeout=30", time.time, time.increment);
        assert_eq!(observed.code(&path).await, 200);
        assert_eq!(all(&db, "notes").await, [doc! {"_id": 1, "log": 0, "ip": &ip}]);
    }
    assert_eq!(observed.code("/v1/wait?operationTime=nonsense").await, 400);
    assert_eq!(observed.code("/v1/wait?timeout=-1").await, 400);
    observed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_backfills_and_dead_letters_and_no_values() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": CANARY, "ip": CANARY}).await.unwrap();
    let log: Vec<Document> = (0..5000).map(|id| doc! {"_id": id, "host": CANARY}).collect();
    db.collection("log").insert_many(log).await.unwrap();
    let validator = doc! {"ip": {"$ne": CANARY}};
    db.create_collection("notes").validator(validator).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": CANARY, "log": 0}).await.unwrap();
    fail_point(&set, Some(doc! {"failCommands": ["update"], "blockConnection": true, "blockTimeMS": 300, "namespace": format!("{}.log", test.name)})).await;
    let observed = Observed::start(&test, RULES).await;
    let status = observed.until("a backfill under way", |status| {
        status.rules.iter().any(|rule| {
            matches!(rule.backfill, denormd::status::Backfill::Running { total: Some(5000), scanned, .. } if scanned > 0)
        })
    }).await;
    assert!(causes(&status).contains(&"backfilling"), "{status:#?}");
    let ready: serde_json::Value = serde_json::from_str(&observed.text("/readyz").await).unwrap();
    assert_eq!(ready["ready"], true, "a backfill does not make it unready");
    assert!(ready["backfilling"].as_array().is_some_and(|rules| !rules.is_empty()), "{ready}");
    fail_point(&set, None).await;
    let status = observed.until("the dead letter", |status| status.dead_letters > 0).await;
    let note = status.rules.iter().find(|rule| rule.name == "note").unwrap();
    assert!(note.dead_letter_reasons.keys().any(|why| why.contains("121")), "{note:#?}");
    assert!(observed.metric("denormd_dead_letters{rule=\"note\"}").await.is_some_and(|count| count > 0.0));
    for path in ["/metrics", "/v1/status", "/v1/history", "/readyz", "/"] {
        assert!(!observed.text(path).await.contains(CANARY), "{path} tells a value");
    }
    observed.end().await;
}

/// A round of the audit over ten million targets takes 14 hours, and its progress was once invisible.
#[tokio::test(flavor = "multi_thread")]
async fn status_tells_how_far_the_audit_is_and_when_its_last_round_ended() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 3).await;
    let unaudited =
        format!("{RULES}\n{}", RULES.replace("name: ", "guard: off, name: un").replace("ip: $ip", "un: $ip"));
    let observed = Observed::start(&test, &unaudited).await;
    let ended = |status: &Status| status.rules.iter().filter_map(|rule| rule.audit.as_ref()?.last_ended).count();
    let status = observed.until("a round of both rules", |status| ended(status) == 2).await;
    for rule in &status.rules {
        let Some(audit) = &rule.audit else {
            assert!(rule.name.starts_with("un"), "{rule:#?}");
            continue;
        };
        let targets = test.database().collection::<Document>(rule.target.split_once('.').unwrap().1);
        let targets = targets.count_documents(doc! {}).await.unwrap();
        assert_eq!((audit.compared, audit.total, audit.last_unknown), (targets, Some(targets), 0), "{rule:#?}");
        assert!(audit.last_ended.is_some_and(|at| at >= status.started && at <= status.now), "{status:#?}");
        assert!(audit.round_seconds.is_some() && audit.last_seconds.is_some_and(|took| took < 60.0), "{rule:#?}");
    }
    observed.end().await;
}

/// The daemon as a process of its own, killed when the test ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended by itself.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn denormd(config: &std::path::Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
    command.arg("--config").arg(config).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_ask_the_daemon_and_a_taken_port_is_told_at_once() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 3).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::fs::write(&file, config(&test, RULES).replace("127.0.0.1:0", &format!("127.0.0.1:{port}"))).unwrap();
    let run = |arguments: &[&str]| {
        let output = denormd(&file, arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, _, error) = run(&["health"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("no denormd answers"), "{error}");
    assert_eq!(run(&["plan", "--apply"]).0, Some(0));
    let _daemon = Process(denormd(&file, &["run"]).stderr(Stdio::null()).spawn().unwrap());
    let limit = Instant::now() + PATIENCE;
    while run(&["health"]).0 != Some(0) {
        assert!(Instant::now() < limit, "{:?}", run(&["health"]));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(run(&["health", "--live"]).0, Some(0));
    // A standby is healthy, too.
    while !run(&["status"]).1.contains("leader") {
        assert!(Instant::now() < limit, "{:?}", run(&["status"]));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(run(&["wait", "--timeout", "30"]), (Some(0), String::new(), String::new()));
    assert_eq!(run(&["wait", "--operation-time", "9;rm"]).0, Some(2));
    assert_eq!(run(&["wait", "--operation-time", "4000000000.1", "--timeout", "1"]).0, Some(1));
    let (code, text, _) = run(&["status"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("RULE") && text.contains("note"), "{text}");
    let (_, json, _) = run(&["status", "--output", "json"]);
    assert_eq!(serde_json::from_str::<Status>(&json).unwrap().rules.len(), 2);
    let (code, text, _) = run(&["backfill", "--rule", "ip"]);
    assert_eq!((code, text.as_str()), (Some(0), "ip: requested\nip: done, 3 targets\n"));
    let (_, json, _) = run(&["backfill", "--rule", "ip", "--output", "json"]);
    let told: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(told, serde_json::json!([{"rule": "ip", "done": true, "targets": 3, "dead_letters": 0}]));
    // The command does not wait for a paused rule, and reports that; it waits for one that was resumed, or whose
    // backfill was requested.
    assert_eq!(run(&["pause", "ip"]).0, Some(0));
    let hosts = test.database().collection::<Document>("hosts");
    hosts.update_many(doc! {}, doc! {"$set": {"ip": "another"}}).await.unwrap();
    let (code, _, told) = run(&["wait"]);
    assert_eq!(
        (code, told.as_str()),
        (
            Some(0),
            "these rules may lack changes: ip, note. Each is paused, blocked, unavailable or in shadow, waits for `denormd backfill`, has dead letters or unrepaired drift, does not run yet as this config defines it, or reads the copies of such a rule\n"
        )
    );
    assert_eq!(run(&["resume", "ip"]).0, Some(0));
    assert_eq!(run(&["wait"]), (Some(0), String::new(), String::new()));
    let log = test.database().collection::<Document>("log");
    assert_eq!(log.count_documents(doc! {"ip": "another"}).await.unwrap(), 3, "resumed, and not waited for");
    let (code, _, error) = run(&["run"]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("another process listens there"), "{error}");
}

#[test]
fn alerts_fire_when_they_should_and_only_then() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus");
    let file = |name: &str| folder.join(name).to_string_lossy().into_owned();
    promtool(&["check", "config", &file("prometheus.yml")], "");
    promtool(&["test", "rules", &file("alerts_test.yml")], "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_dashboard_rules_and_alerts_ask_for_is_measured() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test, 3).await;
    let observed = Observed::start(&test, RULES).await;
    observed.daemon.settled().await;
    observed.until("a look at the oplog", |status| status.oplog.readable.is_some()).await;
    let text = observed.text("/metrics").await;
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let known: std::collections::BTreeSet<&str> =
        text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split([' ', '{']).next()).collect();
    for file in ["prometheus/rules.yml", "prometheus/alerts.yml", "grafana/denormd.json"] {
        let asked = std::fs::read_to_string(root.join(file)).unwrap();
        let words = asked.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("denormd_")) {
            assert!(known.contains(name) || name == "denormd_last_event_timestamp_seconds", "{file} asks for {name}");
        }
    }
    let alerts = std::fs::read_to_string(root.join("prometheus/alerts.yml")).unwrap();
    let runbook = std::fs::read_to_string(root.join("RUNBOOK.md")).unwrap();
    for (alert, _) in crate::operations::scraped::alerts() {
        assert!(runbook.contains(&format!("## {alert}\n")), "{alert} has no section in the runbook");
        assert!(alerts.contains(&format!("runbook: \"denormd runbook {alert}\"")), "{alert} does not name it");
        let url = format!("RUNBOOK.md#{}\"", alert.to_lowercase());
        assert!(alerts.contains(&url), "{alert} does not lead there");
        let tested = std::fs::read_to_string(root.join("prometheus/alerts_test.yml")).unwrap();
        assert!(tested.matches(&format!("alertname: {alert}\n")).count() > 0, "{alert} is not tested to be quiet");
        assert!(tested.contains(&format!("alertname=\"{alert}\"")), "{alert} is not tested to fire");
    }
    let names = denormd_engine::metrics::Cause::ALL.map(denormd_engine::metrics::Cause::name);
    for reason in alerts.split("reason=").skip(1).filter_map(|rest| rest.split('"').nth(1)) {
        for name in reason.split('|') {
            assert!(names.contains(&name), "no cause is called {name}");
        }
    }
    observed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_the_password_nor_a_value_is_told_in_logs_or_figures() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let user = doc! {"createUser": "denormd", "pwd": CANARY, "roles": ["root"]};
    set.client().await.database("admin").run_command(user).await.unwrap();
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": CANARY}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 0, "host": 1}).await.unwrap();
    db.create_collection("notes").validator(doc! {"ip": {"$ne": CANARY}}).await.unwrap();
    db.collection("notes").insert_one(doc! {"_id": CANARY, "log": 0}).await.unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let uri = test.uri.replace("mongodb://", &format!("mongodb://denormd:{CANARY}@"));
    let text = config(&test, RULES).replace(&test.uri, &uri).replace("127.0.0.1:0", &format!("127.0.0.1:{port}"));
    let folder = tempfile::tempdir().unwrap();
    let (file, log) = (folder.path().join("denormd.yaml"), folder.path().join("log"));
    std::fs::write(&file, format!("{text}log: {{ filter: denormd=trace }}\n")).unwrap();
    assert!(denormd(&file, &["plan", "--apply"]).output().unwrap().status.success());
    let into = std::fs::File::create(&log).unwrap();
    let daemon = Process(denormd(&file, &["run"]).stderr(into).spawn().unwrap());
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let limit = Instant::now() + PATIENCE;
    let mut told = String::new();
    while !told.contains("server_error_121") {
        assert!(Instant::now() < limit, "{told}");
        tokio::time::sleep(Duration::from_millis(200)).await;
        if let Ok(answer) = client::get(address, "/metrics", Duration::from_secs(10)).await {
            told = String::from_utf8(answer.body).unwrap();
        }
    }
    told +=
        &String::from_utf8(client::get(address, "/v1/status", Duration::from_secs(10)).await.unwrap().body).unwrap();
    drop(daemon);
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("became a dead letter"), "{log}");
    assert!(!log.contains(CANARY) && !told.contains(CANARY), "{log}\n{told}");
}
