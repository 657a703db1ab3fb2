//! The program itself: exit statuses, messages, signals, reload, prune.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::TestDb;
use mongodb::Database;

use crate::support::{
    daemon::{PATIENCE, all, config, until},
    process::Program,
};

const RULE: &str =
    "  - { name: address, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

fn denormd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
    command.stdin(Stdio::null());
    command
}

/// A config file in its own folder.
pub struct File {
    pub folder: tempfile::TempDir,
}

impl File {
    pub fn new(text: &str) -> Self {
        let file = Self { folder: tempfile::tempdir().unwrap() };
        file.write(text);
        file
    }

    pub fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("shop.yaml")
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        denormd().args(arguments).arg("--config").arg(self.path()).output().unwrap()
    }
}

/// A daemon whose log lines can be waited for.
pub struct Running {
    pub child: Child,
    lines: mpsc::Receiver<String>,
}

impl Running {
    pub fn start(file: &File) -> Self {
        Self::spawn(denormd().arg("--config").arg(file.path()))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.arg("run").stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = mpsc::channel();
        let log = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, lines }
    }

    /// The next log line that contains `text`.
    pub fn wait(&self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                return line;
            }
            seen.push(line);
        }
        panic!("no log line holds {text:?}:\n{}", seen.join("\n"));
    }

    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

async fn log_becomes(db: &Database, expected: Document) {
    let deadline = Instant::now() + PATIENCE;
    while all(db, "log").await != [expected.clone()] {
        assert!(Instant::now() < deadline, "expected {expected}, found {:?}", all(db, "log").await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn shop() -> (TestDb, Database) {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1", "name": "alpha"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    (test, db)
}

/// The first process of a container ignored SIGTERM while it waited for its config.
#[test]
fn sigterm_ends_a_daemon_that_waits_for_its_config() {
    let file = File::new("rules: [");
    let mut child = denormd()
        .args(["run", "--wait-for-cluster", "--config"])
        .arg(file.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("the config is read again until it is right")));
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_config_mistake_is_shown_with_its_place_and_a_suggestion() {
    let file = File::new(
        "mongodb: { uri: mongodb://localhost }\nrules:\n  - name: a\n    copy: { sorce: x, target: t, match: { r: _id }, set: { v: $v } }\n",
    );
    let output = file.run(&["plan", "--offline"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    for part in ["shop.yaml:4:13", "unknown key `sorce`", "did you mean `source`?"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn rules_that_feed_each_other_are_refused_with_the_circle() {
    let rules = "mongodb: { uri: mongodb://localhost, database: shop }\nrules:\n\
                 \x20 - { name: a, copy: { source: x, target: y, match: { r: _id }, set: { v: $w } } }\n\
                 \x20 - { name: b, copy: { source: y, target: x, match: { r: _id }, set: { w: $v } } }\n";
    let output = File::new(rules).run(&["plan", "--offline"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(message.contains("\n   a writes y.v, which b reads\n   b writes x.w, which a reads"), "{message}");
}

#[tokio::test]
async fn plan_says_what_is_missing_and_apply_makes_it() {
    let (test, _) = shop().await;
    let file = File::new(&config(&test, RULE));
    let output = file.run(&["plan"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(text.contains("createIndex({ \"host\": 1 })"), "{text}");
    assert_eq!(file.run(&["plan", "--apply"]).status.code(), Some(0));
    assert!(String::from_utf8(file.run(&["plan"]).stdout).unwrap().ends_with("ready\n"));
}

#[tokio::test]
async fn run_follows_stops_and_goes_on() {
    let (test, db) = shop().await;
    let file = File::new(&config(&test, RULE));
    assert!(file.run(&["plan", "--apply"]).status.success());
    let mut running = Running::start(&file);
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}).await;
    running.signal("-TERM");
    running.wait("stopped");
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
    let hosts = db.collection::<Document>("hosts");
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    let _running = Running::start(&file);
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.2"}).await;
}

#[tokio::test]
async fn a_reload_swaps_the_rules_and_a_bad_file_leaves_the_old_ones() {
    let (test, db) = shop().await;
    let file = File::new(&config(&test, RULE));
    assert!(file.run(&["plan", "--apply"]).status.success());
    let running = Running::start(&file);
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}).await;
    file.write(&config(&test, &RULE.replace("copy:", "cpy:")));
    running.wait("the new config is refused; the old rules stay in force");
    let hosts = db.collection::<Document>("hosts");
    hosts.update_one(doc! {}, doc! {"$set": {"ip": "10.0.0.2"}}).await.unwrap();
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.2"}).await;
    file.write(&config(&test, &RULE.replace("{ ip: $ip }", "{ hostname: $name }")));
    running.signal("-HUP");
    running.wait("config reloaded: 1 rule");
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.2", "hostname": "alpha"}).await;
    // Fields that the changed rule no longer owns stay until they are pruned.
    let output = file.run(&["prune", "address"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("address: ip was removed from 1 document of"), "{text}");
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "hostname": "alpha"}]);
}

#[tokio::test]
async fn a_removed_rule_is_reported_and_pruned_on_request() {
    let (test, db) = shop().await;
    db.collection::<Document>("log")
        .update_one(doc! {}, doc! {"$set": {"lines": [{"host": 1}, 5, {"host": 2}]}})
        .await
        .unwrap();
    let lines = "  - { name: lines, copy: { source: hosts, target: log, match: { \"lines.$[].host\": _id }, set: { \"lines.$[].ip\": $ip }, on_missing: \"null\" } }";
    let file = File::new(&config(&test, &format!("{RULE}\n{lines}")));
    assert!(file.run(&["plan", "--apply"]).status.success());
    {
        let running = Running::start(&file);
        running.wait("backfill done");
        running.wait("backfill done");
        running.signal("-TERM");
        running.wait("stopped");
    }
    file.write(&config(&test, RULE));
    let running = Running::start(&file);
    running.wait("this rule is no longer in the config");
    let written = doc! {"_id": 1, "host": 1, "lines": [{"host": 1, "ip": "10.0.0.1"}, 5, {"host": 2, "ip": null}], "ip": "10.0.0.1"};
    assert_eq!(all(&db, "log").await, [written]);
    let dry = String::from_utf8(file.run(&["prune", "lines", "--dry-run"]).stdout).unwrap();
    assert!(dry.contains("lines: lines.$[].ip would be removed from 1 document of"), "{dry}");
    let leads = test.beside("state").collection::<Document>("requests");
    let output = file.run(&["prune", "lines"]);
    assert!(output.status.success());
    // The leading daemon has done it.
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(leads.count_documents(doc! {}).await.unwrap(), 0, "a request is left");
    assert_eq!(
        all(&db, "log").await,
        [doc! {"_id": 1, "host": 1, "lines": [{"host": 1}, 5, {"host": 2}], "ip": "10.0.0.1"}]
    );
    assert_eq!(file.run(&["prune", "nobody"]).status.code(), Some(2));
}

#[tokio::test]
async fn all_retired_fields_are_pruned_at_once() {
    let (test, db) = shop().await;
    let rule = |name: &str, set: &str| {
        RULE.replace("address", name).replace("{ ip: $ip }", set).replace("copy:", "allow_scan: true, copy:")
    };
    let rules =
        [rule("kept", "{ ip: $ip, kept_name: $name }"), rule("first", "{ a: $ip }"), rule("second", "{ b: $ip }")];
    let file = File::new(&config(&test, &rules.join("\n")));
    {
        let mut running = Running::start(&file);
        log_becomes(
            &db,
            doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "kept_name": "alpha", "a": "10.0.0.1", "b": "10.0.0.1"},
        )
        .await;
        running.signal("-TERM");
        running.wait("stopped");
        running.child.wait().unwrap();
    }
    file.write(&config(&test, &rule("kept", "{ ip: $ip }")));
    let _running = Running::start(&file);
    let begun = std::time::Instant::now();
    let dry = loop {
        let output = file.run(&["prune", "--all", "--dry-run"]);
        let dry = String::from_utf8(output.stdout).unwrap();
        if dry.lines().count() == 3 {
            break dry;
        }
        assert!(begun.elapsed() < PATIENCE, "{dry}{}", String::from_utf8_lossy(&output.stderr));
    };
    for line in ["first: a would be removed from 1 document of", "second: b would be", "kept: kept_name would be"] {
        assert!(dry.contains(line), "{dry}");
    }
    // A record that the leader changes meanwhile is kept: the next `prune` would find nothing to remove, and name it.
    until("the leader has recorded that two rules are gone", async || {
        let rules = test.beside("state").collection::<Document>("rules");
        (rules.count_documents(doc! {"backfill": "absent"}).await.unwrap() == 2).then_some(())
    })
    .await;
    let output = file.run(&["prune", "--all", "--output", "json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((json["rules"].as_array().unwrap().len(), &json["dry_run"]), (3, &false.into()), "{json}");
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}]);
    let output = file.run(&["prune", "--all"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "no rule has retired fields: nothing to prune\n");
    assert_eq!(file.run(&["prune"]).status.code(), Some(2));
}

/// A leader with another config may own the fields: it receives the request, and refuses it. Without a leader, the
/// command takes the lease and writes under it.
#[tokio::test]
async fn fields_are_taken_away_by_a_leader_and_by_none_that_owns_them() {
    let (test, db) = shop().await;
    let rule = RULE.replace("copy:", "allow_scan: true, copy:");
    let [both, one] = ["{ ip: $ip, name: $name }", "{ ip: $ip }"].map(|set| rule.replace("{ ip: $ip }", set));
    let (old, new) = (File::new(&config(&test, &both)), File::new(&config(&test, &one)));
    let mut running = Running::start(&old);
    let written = doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "name": "alpha"};
    log_becomes(&db, written.clone()).await;
    running.signal("-TERM");
    running.wait("stopped");
    running.child.wait().unwrap();
    // The new rules lead once, so that the fields of the old ones are known.
    {
        let mut running = Running::start(&new);
        running.wait("following changes");
        running.signal("-TERM");
        running.wait("stopped");
        running.child.wait().unwrap();
    }
    {
        let mut running = Running::start(&old);
        running.wait("following changes");
        let output = new.run(&["prune", "address"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{told}");
        assert!(told.contains("the leader refuses this: a rule that it runs owns `name`"), "{told}");
        running.signal("-TERM");
        running.wait("stopped");
        running.child.wait().unwrap();
    }
    let output = new.run(&["prune", "address", "--output", "json"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("no daemon leads: this command takes the lease and does the work"), "{told}");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["paths"][0]["path"], &told["paths"][0]["documents"]), (&"name".into(), &1.into()));
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}]);
    // It released the lease.
    let _running = Running::start(&old);
    log_becomes(&db, written).await;
}

/// A ConfigMap's folder as the kubelet mounts it: files are links through a hidden link, which an update swaps.
struct Mounted {
    folder: tempfile::TempDir,
}

impl Mounted {
    fn new(text: &str) -> Self {
        let mounted = Self { folder: tempfile::tempdir().unwrap() };
        mounted.swap("..1", text);
        std::os::unix::fs::symlink("..data/shop.yaml", mounted.folder.path().join("shop.yaml")).unwrap();
        mounted
    }

    fn swap(&self, version: &str, text: &str) {
        let at = |name: &str| self.folder.path().join(name);
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("shop.yaml"), text).unwrap();
        let old = fs::read_link(at("..data"));
        std::os::unix::fs::symlink(version, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        if let Ok(old) = old {
            fs::remove_dir_all(at("").join(old)).unwrap();
        }
    }
}

#[tokio::test]
async fn a_config_map_that_is_swapped_is_reloaded() {
    let (test, db) = shop().await;
    let rule = RULE.replace("copy:", "allow_scan: true, copy:");
    let mounted = Mounted::new(&config(&test, &rule));
    let running = Running::spawn(denormd().arg("--config").arg(mounted.folder.path()));
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}).await;
    mounted.swap("..2", &config(&test, &rule.replace("{ ip: $ip }", "{ ip: $ip, hostname: $name }")));
    running.wait("config reloaded");
    log_becomes(&db, doc! {"_id": 1, "host": 1, "ip": "10.0.0.1", "hostname": "alpha"}).await;
}

/// The messages to a service manager, until this one.
fn hears(socket: &std::os::unix::net::UnixDatagram, text: &str) {
    let mut all = Vec::new();
    loop {
        let mut message = [0; 1000];
        let length = socket.recv(&mut message).unwrap_or_else(|error| panic!("{text} is not said: {error}; {all:?}"));
        all.push(String::from_utf8_lossy(&message[..length]).into_owned());
        if all.last().unwrap().lines().any(|line| line == text) {
            return;
        }
    }
}

#[tokio::test]
async fn systemd_hears_of_the_start_the_reload_the_end_and_that_the_loop_turns() {
    let (test, _) = shop().await;
    let file = File::new(&config(&test, RULE));
    assert!(file.run(&["plan", "--apply"]).status.success());
    let path = file.folder.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = denormd();
    command.arg("--config").arg(file.path()).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "200000");
    let mut running = Running::spawn(&mut command);
    for text in ["READY=1", "WATCHDOG=1", "WATCHDOG=1"] {
        hears(&socket, text);
    }
    running.wait("following changes");
    running.signal("-HUP");
    for text in ["RELOADING=1", "READY=1"] {
        hears(&socket, text);
    }
    running.wait("following changes");
    running.signal("-TERM");
    hears(&socket, "STOPPING=1");
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
}

/// A config that was read while the pipeline was starting counted as seen: the daemon went on with rules that it no longer had.
#[tokio::test(flavor = "multi_thread")]
async fn a_config_that_changes_during_a_start_is_followed() {
    let set = denormd_fixture::ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let program = Program::new(&config(&test, RULE));
    program.run(&["plan", "--apply"]).await.exits(0);
    let shuts_down = doc! {
        "failCommands": ["create"], "namespace": format!("{}.positions", test.beside("state").name()), "errorCode": 91,
    };
    crate::engine::fan_outs::fail(&test, "alwaysOn", shuts_down).await;
    let daemon = program.daemon();
    daemon.says("the pipeline cannot start yet; retrying").await;
    program.write(&config(&test, &RULE.replace("ip: $ip", "address: $ip")));
    daemon.says("config reloaded").await;
    crate::engine::fan_outs::fail(&test, "off", doc! {}).await;
    let log = db.collection::<Document>("log");
    until("the new rule is applied", async || log.find_one(doc! {"address": "10.0.0.1"}).await.unwrap()).await;
    assert_eq!(log.count_documents(doc! {"ip": {"$exists": true}}).await.unwrap(), 0);
    daemon.stop().await;
}

/// A start creates the collections of its state, and for that the first read of them may fail. It was logged as a warning, and half a
/// second passed until the next read.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_reads_new_state_again_at_once() {
    let test = denormd_fixture::database().await;
    test.database().collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    test.database().collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let program = Program::new(&config(&test, RULE));
    program.run(&["plan", "--apply"]).await.exits(0);
    let unavailable = doc! {
        "failCommands": ["find"], "namespace": format!("{}.leases", test.beside("state").name()), "errorCode": 246,
    };
    let fails = |mode: Document| doc! {"configureFailPoint": "failCommand", "mode": mode, "data": unavailable.clone()};
    let admin = test.client.database("admin");
    admin.run_command(fails(doc! {"times": 3})).await.unwrap();
    let daemon = program.daemon();
    daemon.says("backfill done").await;
    assert!(!daemon.log().contains("WARN"), "{}", daemon.log());
    daemon.stop().await;
    let off = doc! {"configureFailPoint": "failCommand", "mode": "off"};
    let reply = admin.run_command(off).await.unwrap();
    assert!(reply.get_i32("count").unwrap() >= 3, "{reply}");
}
