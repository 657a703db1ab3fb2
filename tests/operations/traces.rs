//! Spans that arrive at a collector.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{Router, body::Bytes, extract::State, routing::post};
use bson::{Document, doc};

use crate::support::daemon::PATIENCE;
use crate::support::running::Running;

/// Occurs in documents, and must never occur in a span.
const CANARY: &str = "canary-7e57ed";

type Received = Arc<Mutex<Vec<u8>>>;

async fn collect(State(received): State<Received>, body: Bytes) {
    received.lock().unwrap().extend_from_slice(&body);
}

/// Protobuf contains strings unchanged.
fn holds(received: &Received, text: &str) -> bool {
    received.lock().unwrap().windows(text.len()).any(|bytes| bytes == text.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_a_span_for_each_batch_with_its_stages_and_no_value() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": CANARY, "ip": CANARY}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": CANARY, "host": CANARY}).await.unwrap();
    let received = Received::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collector = listener.local_addr().unwrap();
    let router = Router::new().route("/v1/traces", post(collect)).with_state(received.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let rules =
        "  - { name: ip-of-host, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
    let mut running = Running::start(&test, rules, &format!("log: {{ otlp: \"http://{collector}\" }}\n")).await;
    let log = db.collection::<Document>("log");
    let limit = Instant::now() + PATIENCE;
    // Existing data first, which has no event, then a change.
    let second = format!("{CANARY}-2");
    for ip in [CANARY, &second] {
        let hosts = db.collection::<Document>("hosts");
        hosts.update_one(doc! {}, doc! {"$set": {"ip": ip}}).await.unwrap();
        while log.count_documents(doc! {"ip": ip}).await.unwrap() == 0 {
            assert!(Instant::now() < limit, "{}", running.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    // The last spans are sent at the end of the process.
    running.stop();
    for text in ["batch", "read", "write", "ip-of-host", "statements", "oldest_change_ms", "denormd.deployment"] {
        let told = String::from_utf8_lossy(&received.lock().unwrap()).into_owned();
        assert!(holds(&received, text), "{text} is not in {told:?}\n{}", running.log());
    }
    assert!(!holds(&received, CANARY));
    assert!(!running.log().contains("read{"), "spans are for the collector, not for the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_costs_its_spans_and_nothing_else() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let away = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rules = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
    let mut running = Running::start(&test, rules, &format!("log: {{ otlp: \"http://{away}\" }}\n")).await;
    running.until("backfilled", |status| status.rules.iter().any(|rule| rule.targets_changed == 1)).await;
    running.stop();
    assert!(running.log().contains("spans could not be sent"), "{}", running.log());
}
