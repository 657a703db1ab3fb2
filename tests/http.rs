//! What the HTTP server refuses: changes without the token, bodies, floods.

use std::{net::SocketAddr, sync::Arc};

use bson::{Document, doc};
use denormd::{
    server::{self, Guard},
    status::Board,
};
use denormd_fixture::TestDb;
use secrecy::SecretString;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_util::sync::CancellationToken;

use crate::daemon::Daemon;

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
        let daemon = Daemon::start(test, RULE).await;
        daemon.settled().await;
        let listener = server::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let board = Board::new("test", daemon.context().metrics.clone());
        board.attach(daemon.shared(), daemon.progress());
        let (guard, stop) = (Arc::new(Guard::new(token.map(SecretString::from))), CancellationToken::new());
        tokio::spawn(board.clone().watch(stop.clone()));
        tokio::spawn(server::serve(listener, board, guard.clone(), stop.clone()));
        Self { daemon, address, guard, stop }
    }

    /// The status code of an answer.
    async fn ask(&self, method: &str, path: &str, headers: &str) -> u16 {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok();
        let answer = String::from_utf8_lossy(&answer);
        answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
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
    served.guard.set_token(Some(SecretString::from(TOKEN)));
    for headers in [String::new(), bearer("a-token-of-some-lengtH"), bearer("a-token-of-some-lengt"), bearer("")] {
        assert_eq!(served.ask("POST", path, &headers).await, 401, "{headers}");
    }
    assert_eq!(served.ask("GET", path, &bearer(TOKEN)).await, 405, "a link changes nothing");
    assert_eq!(generation().await, before);
    assert_eq!(served.ask("POST", "/v1/rules/nobody/backfill", &bearer(TOKEN)).await, 404);
    assert_eq!(served.ask("POST", "/v1/rules/address/release", &bearer(TOKEN)).await, 409, "it is not held");
    assert_eq!(served.ask("POST", path, &bearer(TOKEN)).await, 202);
    assert_eq!(generation().await, before + 1);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_and_floods_are_refused_and_liveness_is_told_all_the_same() {
    let test = denormd_fixture::database().await;
    let served = Served::start(&test, Some(TOKEN)).await;
    let large = format!("authorization: Bearer {TOKEN}\r\ncontent-length: 100000000\r\n");
    assert_eq!(served.ask("POST", "/v1/rules/address/backfill", &large).await, 413);
    assert_eq!(served.ask("POST", "/v1/rules/address/backfill", "transfer-encoding: chunked\r\n").await, 413);
    let mut refused = 0;
    // More than the burst and what comes in meanwhile: thousands a second are made here.
    for _ in 0..2000 {
        refused += u32::from(served.ask("GET", "/v1/history?since=9999999999999", "").await == 429);
        if refused > 10 {
            break;
        }
    }
    assert!(refused > 10, "a flood was let in");
    assert_eq!(served.ask("GET", "/livez", "").await, 200);
    served.stop().await;
}
