//! Requests that the HTTP server refuses: changes without the token, foreign host names, bodies, floods.

use std::{net::SocketAddr, sync::Arc};

use bson::{Document, doc};
use denormd::{
    server::{self, Guard, client},
    status::Board,
};
use denormd_engine::deployment::identity::Identity;
use denormd_fixture::TestDb;
use denormd_rules::config::Http;
use secrecy::SecretString;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_util::sync::CancellationToken;

use crate::support::daemon::{Daemon, config};

const TOKEN: &str = "a-token-of-some-length";
const RULE: &str = "
  - { name: address, guard: off, allow_scan: true, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";

struct Served {
    daemon: Daemon,
    address: SocketAddr,
    guard: Arc<Guard>,
    stop: CancellationToken,
}

impl Served {
    async fn start(test: &TestDb, token: Option<&str>) -> Self {
        Self::of(Daemon::start(test, RULE).await, token).await
    }

    async fn of(daemon: Daemon, token: Option<&str>) -> Self {
        daemon.settled().await;
        let listener = server::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = listener.local_addr().unwrap();
        let board = Board::new("test", &Identity::of_this_process(), daemon.context().metrics.clone());
        board.attach(daemon.shared());
        let (guard, stop) = (Arc::new(Guard::default()), CancellationToken::new());
        guard.obey(&Http { token: token.map(SecretString::from), ..Http::default() });
        tokio::spawn(board.clone().watch(stop.clone()));
        tokio::spawn(server::serve(listener, board, guard.clone(), stop.clone()));
        Self { daemon, address, guard, stop }
    }

    /// The status code of a response.
    async fn ask(&self, method: &str, path: &str, headers: &str) -> u16 {
        self.ask_by_name("127.0.0.1", method, path, headers).await.0
    }

    /// The status code of a response, and the whole response.
    async fn ask_by_name(&self, host: &str, method: &str, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"));
        (code, answer)
    }

    async fn stop(self) {
        self.stop.cancel();
        self.daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_changed_without_the_token() {
    let test = denormd_fixture::database().await;
    let rules = test.beside("state").collection::<Document>("rules");
    let generation = async || rules.find_one(doc! {}).await.unwrap().unwrap().get_i64("generation").unwrap();
    let served = Served::start(&test, None).await;
    let before = generation().await;
    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    let path = "/v1/rules/address/backfill";
    assert_eq!(served.ask("POST", path, &bearer(TOKEN)).await, 403, "none is set");
    served.guard.obey(&Http { token: Some(SecretString::from(TOKEN)), ..Http::default() });
    for headers in [String::new(), bearer("a-token-of-some-lengtH"), bearer("a-token-of-some-lengt"), bearer("")] {
        assert_eq!(served.ask("POST", path, &headers).await, 401, "{headers}");
    }
    assert_eq!(served.ask("GET", path, &bearer(TOKEN)).await, 405, "a link changes nothing");
    assert_eq!(generation().await, before);
    assert_eq!(served.ask("POST", "/v1/rules/nobody/backfill", &bearer(TOKEN)).await, 404);
    assert_eq!(served.ask("POST", "/v1/rules/address/release", &bearer(TOKEN)).await, 409, "it is not blocked");
    let lower_case = bearer(TOKEN).replace("Bearer", "bearer");
    assert_eq!(served.ask("POST", path, &lower_case).await, 202, "the scheme's case means nothing");
    assert_eq!(generation().await, before + 1);
    served.stop().await;
}

/// The command refused, but over HTTP a caller agreed to what nobody could know.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_whose_effect_is_unknown_is_not_unblocked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("makers").insert_one(doc! {"_id": 1, "name": "Ada"}).await.unwrap();
    db.collection("parts").insert_one(doc! {"_id": 1, "maker": 1}).await.unwrap();
    db.collection("products").insert_one(doc! {"_id": 1, "part": 1, "label": "none"}).await.unwrap();
    let rules = "
  - { name: label, allow_scan: true, copy: { source: parts, target: products, match: { part: _id }, set: { label: { $ifNull: [$made_by, none] } } } }
  - { name: maker, allow_scan: true, backfill: manual, copy: { source: makers, target: parts, match: { maker: _id }, set: { made_by: $name } } }";
    let served = Served::of(Daemon::start_unadopted(&config(&test, rules)).await, Some(TOKEN)).await;
    let headers = format!("authorization: Bearer {TOKEN}\r\n");
    let (code, answer) = served.ask_by_name("127.0.0.1", "POST", "/v1/rules/label/unblock", &headers).await;
    assert_eq!(code, 409, "{answer}");
    assert!(answer.contains("it reads fields that `maker` has not written yet"), "{answer}");
    assert!(served.daemon.progress().borrow().states[0].is_blocked());
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_floods_are_refused_and_liveness_is_told_all_the_same() {
    let test = denormd_fixture::database().await;
    let served = Served::start(&test, Some(TOKEN)).await;
    let large = format!("authorization: Bearer {TOKEN}\r\ncontent-length: 100000000\r\n");
    assert_eq!(served.ask("POST", "/v1/rules/address/backfill", &large).await, 413);
    assert_eq!(served.ask("POST", "/v1/rules/address/backfill", "transfer-encoding: chunked\r\n").await, 413);
    // More than the burst and the refill during the test: thousands of requests a second are made here.
    let flood = async |path: &str| {
        let mut refused = 0;
        for _ in 0..100 {
            let answers = futures_util::future::join_all((0..20).map(|_| served.ask("GET", path, ""))).await;
            refused += answers.iter().filter(|code| **code == 429).count();
            if refused > 10 {
                return true;
            }
        }
        false
    };
    assert!(flood("/v1/history?since=9999999999999").await, "a flood was let in");
    for other in ["/livez", "/readyz", "/metrics", "/", "/v1/status", "/v1/events"] {
        assert_eq!(served.ask("GET", other, "").await, 200, "{other}: a flood of one endpoint is no other's");
    }
    assert!(!flood("/metrics").await, "monitoring is never refused: above its rate it gets the last answer");
    served.stop().await;
}

/// A page of another site resolves its own name to this server: its scripts must get no data.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_rebound_to_this_address_is_refused() {
    let test = denormd_fixture::database().await;
    let served = Served::start(&test, Some(TOKEN)).await;
    let named = |host: &'static str| served.ask_by_name(host, "GET", "/v1/status", "");
    for known in ["127.0.0.1", "localhost", "LOCALHOST:9464", "10.1.2.3", "[::1]:9464"] {
        assert_eq!(named(known).await.0, 200, "{known}");
    }
    let (code, answer) = named("rebound.example:9464").await;
    assert_eq!(code, 421, "{answer}");
    assert!(answer.contains("http.allowed_hosts"), "{answer}");
    let hosts = vec!["rebound.example".to_owned()];
    served.guard.obey(&Http { allowed_hosts: hosts, ..Http::default() });
    assert_eq!(named("rebound.example:9464").await.0, 200, "the config allows it");
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_need_the_token_where_the_config_says_so() {
    let test = denormd_fixture::database().await;
    let served = Served::start(&test, None).await;
    let token = Some(SecretString::from(TOKEN));
    served.guard.obey(&Http { token: token.clone(), token_for_reads: true, ..Http::default() });
    // `any:a-token-of-some-length`, as a browser sends it.
    let basic = "authorization: Basic YW55OmEtdG9rZW4tb2Ytc29tZS1sZW5ndGg=\r\n";
    for path in ["/", "/metrics", "/v1/status", "/v1/events", "/v1/history"] {
        for headers in ["", "authorization: Bearer wrong\r\n", "authorization: Basic YW55Ondyb25n\r\n"] {
            assert_eq!(served.ask("GET", path, headers).await, 401, "{path} {headers}");
        }
        assert_eq!(served.ask("GET", path, &format!("authorization: bearer {TOKEN}\r\n")).await, 200, "{path}");
        assert_eq!(served.ask("GET", path, basic).await, 200, "{path}");
    }
    assert_eq!(served.ask("POST", "/v1/rules/address/backfill", basic).await, 401, "a browser sends it unasked");
    assert_eq!(served.ask("GET", "/livez", "").await, 200, "probes need none");
    let (code, answer) = served.ask_by_name("127.0.0.1", "GET", "/readyz", "").await;
    assert!(code == 200 && !answer.contains("backfilling"), "and learn no more: {answer}");
    let asked = async |token| {
        client::get(client::Daemon { token, ..served.address.into() }, "/v1/status", std::time::Duration::from_secs(60))
            .await
    };
    assert!(asked(token).await.unwrap().ok, "the commands show it");
    assert!(asked(None).await.unwrap_err().to_string().contains("demands a token"));
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_can_be_framed_or_run_foreign_code() {
    let test = denormd_fixture::database().await;
    let served = Served::start(&test, None).await;
    for (method, path, host, code) in [
        ("GET", "/", "127.0.0.1", 200),
        ("GET", "/livez", "127.0.0.1", 200),
        ("GET", "/metrics", "127.0.0.1", 200),
        ("GET", "/v1/status", "127.0.0.1", 200),
        ("GET", "/nothing", "127.0.0.1", 404),
        ("POST", "/v1/rules/address/backfill", "127.0.0.1", 403),
        ("GET", "/", "rebound.example", 421),
    ] {
        let (got, answer) = served.ask_by_name(host, method, path, "").await;
        assert_eq!(got, code, "{path}: {answer}");
        let policy = answer.lines().find(|line| line.starts_with("content-security-policy: ")).unwrap_or_default();
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{path}: {policy:?}");
    }
    served.stop().await;
}
