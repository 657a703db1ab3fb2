//! The HTTP server with a certificate, and the commands that query it.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::Output,
    time::{Duration, Instant},
};

use denormd::server::client;
use denormd_fixture::Authority;
use tokio::net::TcpStream;

use crate::support::{
    daemon::{config, until},
    running::{Started, denormd},
};

const RULE: &str =
    "  - { name: ip, guard: off, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
const TOKEN: &str = "a-token-of-some-length";
/// Far more connections than the server accepts at once.
const SILENT: usize = 600;

fn told(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_ask_a_daemon_that_serves_https() {
    let test = denormd_fixture::database().await;
    for name in ["hosts", "log"] {
        test.database().create_collection(name).await.unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let authority = Authority::new("the shop");
    // As usual, it has no IP address.
    let issue = || authority.issue("daemon", "http", &["localhost"]);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("\"127.0.0.1:{port}\", token: {TOKEN}, require_token: everything, tls_cert_file: daemon.pem");
    let file = put("denormd.yaml", &config(&test, RULE).replace("\"127.0.0.1:0\"", &listen));
    put("daemon.pem", &issue());
    let (ca, other) = (put("ca.pem", &authority.pem()), put("other.pem", &Authority::new("somebody").pem()));
    let run = |arguments: &[&str]| denormd(&file).args(arguments).output().unwrap();
    assert_eq!(run(&["plan", "--apply"]).status.code(), Some(0));
    let log = folder.path().join("log");
    let stderr = std::fs::File::create(&log).unwrap();
    let mut started = Started(denormd(&file).arg("run").stderr(stderr).spawn().unwrap());
    until("it is ready", async || run(&["health"]).status.success().then_some(())).await;

    // With its config.
    for arguments in [["status"].as_slice(), &["wait"], &["health", "--live"], &["runbook", "DenormdGone"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", told(&output));
    }
    assert!(told(&run(&["support-bundle", "--to", "-"])).contains("\"summary\""), "the bundle has no status");
    // A probe sends no token, and gets no body.
    let health = run(&["health", "--output", "json"]);
    assert_eq!(String::from_utf8_lossy(&health.stdout), "{\"ready\":true}\n");

    // Without it: by the authority and the certificate's name.
    let without = |address: &str, more: &[&str]| {
        let mut command = denormd(&folder.path().join("none.yaml"));
        command.env("DENORMD__HTTP__TOKEN", TOKEN).args(["status", "--address", address]).args(more).output().unwrap()
    };
    let named = format!("https://localhost:{port}");
    let [ca, other] = [&ca, &other].map(|path| path.to_str().unwrap());
    assert_eq!(without(&named, &["--ca-file", ca]).status.code(), Some(0));
    for (address, more, reason) in [
        (named.clone(), vec![], "--ca-file"),
        (named.clone(), vec!["--ca-file", other], "--ca-file"),
        (format!("https://127.0.0.1:{port}"), vec!["--ca-file", ca], "a name that is in the certificate"),
        (format!("127.0.0.1:{port}"), vec![], "--address https://"),
        (format!("https://127.0.0.1:{port}"), vec!["--ca-file", "/none"], "--ca-file /none"),
    ] {
        let output = without(&address, &more);
        assert!(!output.status.success() && told(&output).contains(reason), "{address} {more:?}: {}", told(&output));
    }

    // A renewed certificate is read when the file changes. The process continues to run.
    put("daemon.pem", &issue());
    assert_eq!(run(&["health", "--live"]).status.code(), Some(0), "a probe does not depend on it");
    until("the new certificate is shown", async || run(&["status"]).status.success().then_some(())).await;
    assert!(started.is_running());

    // Clients that never start their handshake.
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let output = run(&["health", "--live"]);
    let log = || std::fs::read_to_string(&log).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}{}", told(&output), log());
    // The last connection, which no other one replaced, is closed in the end.
    let begun = Instant::now();
    let last = silent.pop().unwrap();
    tokio::time::timeout(Duration::from_secs(60), last.readable()).await.unwrap().unwrap();
    assert_eq!(last.try_read(&mut [0; 16]).unwrap_or(0), 0, "nothing but the end");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn a_certificate_that_cannot_be_used_is_a_mistake_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("the shop");
    let pem = authority.issue("daemon", "http", &["localhost"]);
    let key = pem.find("-----BEGIN PRIVATE KEY").unwrap();
    let foreign = authority.issue("another", "http", &["localhost"]);
    for (name, text) in
        [("both.pem", pem.as_str()), ("cert.pem", &pem[..key]), ("key.pem", &pem[key..]), ("foreign.pem", &foreign)]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let file = folder.path().join("denormd.yaml");
    for (settings, expected) in [
        ("tls_cert_file: both.pem", None),
        ("tls_cert_file: cert.pem, tls_key_file: key.pem", None),
        ("tls_cert_file: cert.pem", Some("it holds no private key in PEM")),
        ("tls_cert_file: key.pem", Some("it holds no certificate in PEM")),
        ("tls_cert_file: cert.pem, tls_key_file: foreign.pem", Some("this certificate cannot be used: ")),
        ("tls_cert_file: none.pem", Some("`tls_cert_file` holds the server's certificate")),
        ("tls_key_file: key.pem", Some("give http.tls_cert_file")),
    ] {
        let text =
            format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nhttp: {{ {settings} }}\nrules:\n{RULE}\n");
        std::fs::write(&file, text).unwrap();
        let output = denormd(&file).args(["plan", "--offline"]).output().unwrap();
        let told = told(&output);
        match expected {
            None => assert_eq!(output.status.code(), Some(0), "{settings}: {told}"),
            Some(part) => {
                assert_eq!(output.status.code(), Some(2), "{settings}: {told}");
                assert!(told.contains(part) && told.contains("denormd.yaml:2:"), "{settings}: {told}");
            }
        }
        assert!(!told.contains("PRIVATE"), "{told}");
    }
}

/// Bundles are also useful where the config of a daemon is not at hand.
#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_needs_no_config_where_the_address_is_given() {
    let test = denormd_fixture::database().await;
    for name in ["hosts", "log"] {
        test.database().create_collection(name).await.unwrap();
    }
    let running = crate::support::running::Running::start(&test, RULE, "").await;
    let folder = tempfile::tempdir().unwrap();
    let bundle = |more: &[&str]| {
        denormd(&folder.path().join("none.yaml")).args(["support-bundle", "--to", "-"]).args(more).output().unwrap()
    };
    let output = bundle(&["--address", &running.address.to_string()]);
    assert_eq!(output.status.code(), Some(0), "{}", told(&output));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["daemon"]["status"]["rules"][0]["name"], "ip", "{told:#}");
    assert!(told["config_error"].is_string(), "{told:#}");
    assert_eq!(bundle(&[]).status.code(), Some(2), "neither a config nor an address");
    let answer = client::get(running.address, "/livez", Duration::from_secs(60)).await.unwrap();
    assert!(answer.ok);
}
