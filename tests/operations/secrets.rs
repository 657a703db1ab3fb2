//! A password never appears anywhere, however the connection string is malformed.

use bson::Document;
use denormd_mongo::connect;
use denormd_rules::config::{Format, load_str};
use futures_util::TryStreamExt;
use mongodb::options::ConnectionString;
use proptest::prelude::*;
use secrecy::SecretString;

use crate::support::running::Running;

const CANARY: &str = "cAnary7e57ed";
const RULE: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

/// Mistyped connection strings: a password with any character, unescaped, and wrong or missing parts.
fn connection_string() -> impl Strategy<Value = String> {
    let characters = [
        "", ":", "/", "?", "#", "[", "]", "@", "%", "&", "=", ",", ";", " ", "'", "\\", "é", "1", "27017", "x", "$",
        "%4",
    ];
    let part =
        || prop::collection::vec(prop::sample::select(characters.to_vec()), 0..4).prop_map(|parts| parts.concat());
    let one = |words: &'static [&'static str]| prop::sample::select(words);
    let whole = (
        one(&[
            "mongodb://",
            "mongodb://",
            "mongodb://",
            "mongodb+srv://",
            "mongodb:/",
            "mongodb:",
            "mongo://",
            "MONGODB://",
            "http://",
            "",
        ]),
        one(&["user", "", "us/er", "us%er"]),
        part(),
        part(),
        one(&["@host", "@host:27017,b:1", "@host:port", "@", "", "@[::1", "@a,,b"]),
        one(&["", "/", "/shop", "/sh$op", "/a b"]),
        one(&["", "?", "?replicaSet=rs0", "?replicaSet", "?w=x&w=y", "?connectTimeoutMS=soon", "?pasword=x"]),
    )
        .prop_map(|(scheme, user, before, after, hosts, database, options)| {
            format!("{scheme}{user}:{before}{CANARY}{after}{hosts}{database}{options}")
        });
    let options = ["tlsCertificateKeyFilePassword=", "authMechanismProperties=AWS_SESSION_TOKEN:", "pasword=", ""];
    let option = (prop::sample::select(options.to_vec()), part())
        .prop_map(|(option, after)| format!("mongodb://host/?tls=true&{option}{CANARY}{after}"));
    prop_oneof![4 => whole, 1 => option]
}

fn config_of(uri: &str) -> String {
    format!("mongodb: {{ uri: {} }}\nrules: []\n", serde_json::to_string(uri).unwrap())
}

/// The driver's parse of a connection string, if the config and the driver accept it.
fn parsed(uri: &str) -> Option<ConnectionString> {
    load_str(&config_of(uri), Format::Yaml).ok()?;
    ConnectionString::parse(uri).ok()
}

/// True if the driver parses the canary as a host or a database, whatever the options: hosts are shown.
fn is_well_formed_elsewhere(uri: &str) -> bool {
    let (before, options) = uri.split_once('?').unwrap_or((uri, ""));
    // An empty name of a user is refused, and changes nothing about what is a host.
    let Some(parsed) = parsed(&before.replacen("://:", "://user:", 1)) else { return false };
    let secret = parsed.credential.and_then(|credential| credential.password).unwrap_or_default();
    !secret.contains(CANARY) && !options.contains(CANARY)
}

fn shown_of(uri: &str) -> Vec<String> {
    let quoted = serde_json::to_string(uri).unwrap();
    let mut shown = Vec::new();
    let mut texts = vec![
        config_of(uri),
        format!("mongodb: {{ uri: {quoted}, x: 1 }}\nrules: []\n"),
        format!("mongodb: {{ uri: {quoted}\nrules: []\n"),
        format!("mongodb:\n  uri: \"{uri}\nrules: []\n"),
        format!("mongdb:\n  uri: {quoted}\nrules: []\n"),
    ];
    // Without quotes, a comment begins at ` #`. What is before it may name the canary as a host.
    if !uri.split_once(" #").is_some_and(|(before, _)| is_well_formed_elsewhere(before)) {
        texts.push(format!("mongodb:\n  uri: {uri}\nrules: []\n"));
    }
    for text in texts {
        match load_str(&text, Format::Yaml) {
            Err(error) => shown.push(format!("{error}\n{error:?}")),
            Ok(loaded) => shown.push(format!("{:?}\n{loaded:?}", loaded.effective())),
        }
    }
    // A string that the driver accepts would be connected to.
    if load_str(&config_of(uri), Format::Yaml).is_ok() && parsed(uri).is_none() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(connect::connect(&SecretString::from(uri.to_owned()))).unwrap_err();
        shown.push(format!("{error}\n{error:?}"));
    }
    shown
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(2000), ..ProptestConfig::default() })]

    #[test]
    fn no_malformed_connection_string_shows_its_password(uri in connection_string()) {
        prop_assume!(!is_well_formed_elsewhere(&uri));
        for shown in shown_of(&uri) {
            prop_assert!(!shown.to_lowercase().contains(&CANARY.to_lowercase()), "{uri}\n{shown}");
        }
    }
}

async fn hosts_and_log(test: &denormd_fixture::TestDb) {
    for name in ["hosts", "log"] {
        test.database().create_collection(name).await.unwrap();
    }
}

/// A running daemon reads such a connection string on a reload: it is refused, and does not appear anywhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_with_a_malformed_connection_string_tells_nobody_of_it() {
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let running = Running::start(&test, RULE, "").await;
    let good = std::fs::read_to_string(running.file()).unwrap();
    for (number, password) in ["pa?", "pa:", "pa/", "12?w="].into_iter().enumerate() {
        let uri = test.uri.replacen("mongodb://", &format!("mongodb://user:{password}{CANARY}@"), 1);
        std::fs::write(running.file(), good.replace(&test.uri, &uri)).unwrap();
        crate::support::daemon::until("the config is refused", async || {
            let refused = running.text("/v1/events").await.matches("config_refused").count();
            (refused > number).then_some(())
        })
        .await;
        let (code, out, err) = running.command(&["plan"]);
        assert!(code != Some(0) && !format!("{out}{err}").contains(CANARY), "{out}{err}");
        let (_, out, err) =
            running.command(&["support-bundle", "--to", "-", "--address", &running.address.to_string()]);
        assert!(!format!("{out}{err}").contains(CANARY), "{out}{err}");
    }
    for path in ["/v1/status", "/v1/events", "/v1/history", "/metrics", "/readyz"] {
        let text = running.text(path).await;
        assert!(!text.contains(CANARY), "{path}: {text}");
    }
    assert!(!running.log().contains(CANARY), "{}", running.log());
    let state = test.beside("state");
    for name in state.list_collection_names().await.unwrap() {
        let all: Vec<Document> =
            state.collection(&name).find(bson::doc! {}).await.unwrap().try_collect().await.unwrap();
        assert!(!format!("{all:?}").contains(CANARY), "{name}: {all:?}");
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_a_secret_that_everybody_may_change_is_warned_about() {
    use std::os::unix::fs::PermissionsExt;
    let test = denormd_fixture::database().await;
    hosts_and_log(&test).await;
    let mut running = Running::prepare(&test, RULE, "");
    let file = running.file().with_file_name("uri");
    std::fs::write(&file, &test.uri).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let text = std::fs::read_to_string(running.file()).unwrap();
    std::fs::write(running.file(), text.replace(&format!("uri: {:?}", test.uri), "uri_file: uri")).unwrap();
    running.run().await;
    assert!(running.log().contains("every user of this machine can change this file"), "{}", running.log());
}
