//! The user-visible messages when the cluster cannot be used, and the exit status of each.

use std::{process::Output, time::Duration};

use bson::doc;
use denormd::server::client;

use crate::{
    operations::program::File,
    support::{
        daemon::until,
        running::{Running, denormd},
    },
};

const RULE: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

fn config(uri: &str) -> String {
    format!("mongodb: {{ uri: {uri:?}, database: d }}\nhttp: {{ listen: \"127.0.0.1:0\" }}\nrules:\n{RULE}\n")
}

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_error_names_the_server_and_the_reason() {
    let test = denormd_fixture::database().await;
    let shorter = "&serverSelectionTimeoutMS=2000";
    let name = test.uri.split("replicaSet=").nth(1).unwrap().split('&').next().unwrap();
    for (uri, reason, advice) in [
        (
            format!("mongodb://127.0.0.1:1/?replicaSet=rs0{shorter}"),
            "127.0.0.1:1: connection refused",
            "are the servers up",
        ),
        (
            test.uri.replace(&format!("replicaSet={name}"), "replicaSet=other") + shorter,
            "it is a member of the replica set",
            "give the set's real name",
        ),
        (format!("mongodb://nowhere.invalid:1/?replicaSet=rs0{shorter}"), "nowhere.invalid:1: ", "DNS"),
    ] {
        let output = File::new(&config(&uri)).run(&["plan"]);
        let told = told(&output);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(reason) && told.contains(advice), "{told}");
    }
}

/// The hint of a missing file says which option or variable names it.
#[test]
fn a_missing_file_is_searched_for_where_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("nowhere.yaml");
    let file = File::new(&config("mongodb://localhost"));
    let output = denormd(&file.path()).arg("test").arg(&nowhere).output().unwrap();
    let text = told(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("hint: check the path; FILE holds cases, see `denormd test --help`"), "{text}");
    let output = denormd(&nowhere).arg("plan").output().unwrap();
    assert!(told(&output).contains("--config names a file or a directory"), "{}", told(&output));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_denormd"));
    let output = command.arg("plan").env("DENORMD_CONFIG", &nowhere).output().unwrap();
    assert!(told(&output).contains("hint: the path comes from DENORMD_CONFIG"), "{}", told(&output));
}

/// `run` keeps trying, and its status has the message that `plan` would print. The connection string is corrected meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_cannot_connect_says_why_in_its_status() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let text = config("mongodb://127.0.0.1:1/?replicaSet=rs0&serverSelectionTimeoutMS=1000");
    let file = File::new(&text.replace("127.0.0.1:0", &format!("127.0.0.1:{port}")));
    let mut child = denormd(&file.path()).arg("run").spawn().unwrap();
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    until("the status says why", async || {
        let answer = client::get(address, "/v1/status", Duration::from_secs(10)).await.ok()?;
        String::from_utf8_lossy(&answer.body).contains("127.0.0.1:1: connection refused").then_some(())
    })
    .await;
    until("readiness says why it is refused", async || {
        let ready = client::get(address, "/readyz", Duration::from_secs(10)).await.ok()?;
        assert_eq!(ready.code, 503);
        let because = ready.json::<serde_json::Value>().ok()?["not_ready_because"].to_string();
        (because.contains("no_primary: ") && because.contains("127.0.0.1:1: connection refused")).then_some(())
    })
    .await;
    let output = denormd(&file.path()).arg("status").output().unwrap();
    assert!(
        told(&output).contains("   reason: no primary can be reached (127.0.0.1:1: connection refused)"),
        "{}",
        told(&output)
    );
    let text = std::fs::read_to_string(file.path()).unwrap();
    file.write(&text.replace("127.0.0.1:1/", "127.0.0.1:2/"));
    until("it tries the server that the changed config names", async || {
        let answer = client::get(address, "/v1/status", Duration::from_secs(10)).await.ok()?;
        let status = answer.json::<serde_json::Value>().ok()?;
        status["causes"].to_string().contains("127.0.0.1:2: connection refused").then_some(())
    })
    .await;
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_is_asked_without_a_config_and_beside_a_broken_one() {
    let test = denormd_fixture::database().await;
    for name in ["hosts", "log"] {
        test.database().create_collection(name).await.unwrap();
    }
    let running = Running::start(&test, RULE, "").await;
    until("it leads", async || (running.metric("denormd_leader").await == Some(1.0)).then_some(())).await;
    let address = running.address.to_string();
    let folder = tempfile::tempdir().unwrap();
    let without = |arguments: &[&str]| {
        denormd(&folder.path().join("none.yaml")).args(arguments).args(["--address", &address]).output().unwrap()
    };
    for arguments in [["status"].as_slice(), &["health"], &["wait"], &["runbook", "DenormdGone"]] {
        let output = without(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", told(&output));
    }
    // A name that somebody gave may be misspelt, and then another daemon answers.
    let none = folder.path().join("none.yaml");
    let output = denormd(&none).arg("health").env("DENORMD__HTTP__LISTEN", &address).output().unwrap();
    let notice = told(&output);
    assert_eq!(output.status.code(), Some(0), "{notice}");
    assert!(notice.contains("none.yaml") && notice.contains(&format!("the daemon is asked at {address}")), "{notice}");
    let mut unnamed = std::process::Command::new(env!("CARGO_BIN_EXE_denormd"));
    unnamed
        .arg("health")
        .current_dir(folder.path())
        .env("DENORMD__HTTP__LISTEN", &address)
        .env_remove("DENORMD_CONFIG");
    let output = unnamed.output().unwrap();
    assert_eq!((output.status.code(), told(&output).as_str()), (Some(0), "ready\n"));
    // The port is in the config that is broken now: the environment provides it.
    std::fs::write(running.file(), "rules: [").unwrap();
    let output = denormd(&running.file()).arg("status").env("DENORMD__HTTP__LISTEN", &address).output().unwrap();
    let told = told(&output);
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(told.contains("the config cannot be used") && told.contains("ip"), "{told}");
}

/// DESIGN.md 1.5: 2 when the files or the command line are wrong, 4 when the cluster lacks something or a rule is
/// stopped.
#[tokio::test(flavor = "multi_thread")]
async fn every_command_tells_by_its_exit_status_what_is_to_blame() {
    let rule = |name: &str, target: &str| {
        format!(
            "  - {{ name: {name}, guard: off, copy: {{ source: hosts, target: {target}, match: {{ host: _id }}, set: {{ ip: $ip }} }} }}\n"
        )
    };
    let test = denormd_fixture::database().await;
    let db = test.database();
    for name in ["hosts", "a", "b", "c", "late"] {
        db.create_collection(name).await.unwrap();
    }
    let rules: String = [("blocked", "a"), ("paused", "b"), ("live", "c")].map(|(name, to)| rule(name, to)).concat();
    let mut running = Running::prepare(&test, &rules, "");
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("a").insert_one(doc! {"_id": 1, "host": 1, "ip": "the application's"}).await.unwrap();
    running.run().await;
    let blocked = |status: &serde_json::Value| {
        status["rules"].as_array().is_some_and(|rules| rules.iter().any(|rule| rule["state"] == "blocked"))
    };
    // Before that, its leader has not recorded the rules.
    running.until_json("the rule is blocked", blocked).await;
    assert_eq!(running.command(&["pause", "paused"]).0, Some(0));

    // The same deployment by a config with a rule that the daemon does not have.
    let folder = tempfile::tempdir().unwrap();
    let more = folder.path().join("more.yaml");
    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(&more, format!("{}\n{}", text.trim_end(), rule("late", "late"))).unwrap();
    let nowhere = folder.path().join("nowhere/file");
    let (more_path, nowhere) = (more.to_str().unwrap(), nowhere.to_str().unwrap());
    let table: [(&[&str], i32); 42] = [
        (&["unblock", "live"], 0),
        (&["resume", "live"], 0),
        (&["prune", "live"], 0),
        (&["prune", "blocked"], 0),
        (&["status"], 0),
        (&["health", "--live"], 0),
        (&["explain", "live", "99"], 1),
        (&["support-bundle", "--to", nowhere], 1),
        (&["man", "--out", "/proc/none"], 1),
        (&["init", "--observe", "0", "--to", nowhere], 1),
        (&["status", "--address", "127.0.0.1:1"], 1),
        (&["health", "--address", "127.0.0.1:1"], 1),
        (&["wait", "--address", "127.0.0.1:1"], 1),
        (&["run"], 1),
        (&["unknown-command"], 2),
        (&["status", "--address", "not an address"], 2),
        (&["backfill", "--rule", "nobody"], 2),
        (&["unblock", "nobody"], 2),
        (&["pause", "nobody"], 2),
        (&["resume", "nobody"], 2),
        (&["prune", "nobody"], 2),
        (&["check", "--rule", "nobody"], 2),
        (&["explain", "nobody", "1"], 2),
        (&["dead-letters", "retry", "--rule", "nobody"], 2),
        (&["dead-letters", "retry"], 2),
        (&["dead-letters", "drop"], 2),
        (&["wait", "--operation-time", "x"], 2),
        (&["events", "--since", "soon"], 2),
        (&["runbook", "no-alert"], 2),
        (&["test", nowhere], 2),
        (&["init", "--observe", "0", "--to", more_path], 2),
        (&["plan", "--offline", "--config", nowhere], 2),
        (&["check", "--rule", "blocked"], 3),
        (&["plan"], 4),
        (&["backfill", "--rule", "blocked"], 4),
        (&["backfill", "--rule", "paused"], 4),
        (&["backfill", "--rule", "late", "--no-wait"], 4),
        (&["unblock", "paused"], 4),
        (&["unblock", "late"], 4),
        (&["pause", "blocked"], 4),
        (&["resume", "late"], 4),
        (&["prune", "late"], 4),
    ];
    let mut wrong = Vec::new();
    for (arguments, expected) in table {
        let output = denormd(&more).args(arguments).output().unwrap();
        if output.status.code() != Some(expected) {
            wrong.push(format!("{arguments:?} {:?} instead of {expected}: {}", output.status.code(), told(&output)));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), table.len(), wrong.join("\n"));
    // `check` once reported all copies as different, and the leader wrote them again as they were.
    let other = rule("live", "c").replace("{ ip: $ip }", "{ address: $ip }");
    std::fs::write(&more, text.replace(&rule("live", "c"), &other)).unwrap();
    for arguments in [["check", "--rule", "live"].as_slice(), &["check", "--rule", "live", "--repair"]] {
        let output = denormd(&more).args(arguments).output().unwrap();
        let told = told(&output);
        assert_eq!(output.status.code(), Some(4), "{told}");
        assert!(told.contains("the leader does not run rule `live` as this config defines it"), "{told}");
    }
    let (_, _, error) = running.command(&["check", "--rule", "pausd"]);
    assert!(error.contains("the config has no rule `pausd`") && error.contains("did you mean `paused`?"), "{error}");
    assert_eq!(running.command(&["unblock", "blocked"]).0, Some(0));
}
