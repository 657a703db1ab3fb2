//! HTTP client for the commands that query a running daemon.

use std::{net::SocketAddr, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use secrecy::{ExposeSecret, SecretString};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};

pub use super::{address::Address, trust::Trust};
use denormd_mongo::error::{Error, Kind, Result};

/// The response of a daemon.
#[derive(Debug)]
pub struct Answer {
    /// True for a status code of the 200s.
    pub ok: bool,
    /// The status code.
    pub code: u16,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    pub fn json<T: serde::de::DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.body)
            .map_err(|_| Error::internal(format!("the daemon's answer (HTTP {}) is not what was expected", self.code)))
    }
}

/// A daemon to query.
#[derive(Debug, Clone)]
pub struct Daemon {
    /// The address that it listens on. HTTPS only if the address says so.
    pub address: Address,
    /// Its `http.token`, if known.
    pub token: Option<SecretString>,
    /// The certificates to trust.
    pub trust: Trust,
}

impl From<SocketAddr> for Daemon {
    fn from(address: SocketAddr) -> Self {
        Self { address: address.into(), token: None, trust: Trust::default() }
    }
}

/// Requests `path` from `daemon`. The unspecified address is replaced by loopback.
pub async fn get(daemon: impl Into<Daemon>, path: &str, patience: Duration) -> Result<Answer> {
    let daemon: Daemon = daemon.into();
    let daemon = Daemon { address: daemon.address.reachable(), ..daemon };
    let address = &daemon.address;
    let silent = || Error::new(Kind::Connection, format!("no answer from denormd at {address} in time"));
    let answer = tokio::time::timeout(patience, ask(&daemon, path)).await.map_err(|_| silent())??;
    if answer.code == StatusCode::UNAUTHORIZED.as_u16() {
        let message = format!("denormd at {address} demands a token");
        return Err(Error::new(Kind::Config, message)
            .hint("pass that daemon's config with --config; without a config, set DENORMD__HTTP__TOKEN_FILE"));
    }
    if answer.code == StatusCode::MISDIRECTED_REQUEST.as_u16() {
        let why = String::from_utf8_lossy(&answer.body).trim().to_owned();
        return Err(Error::new(Kind::Config, format!("denormd at {address}: {why}")));
    }
    Ok(answer)
}

async fn ask(daemon: &Daemon, path: &str) -> Result<Answer> {
    let address = &daemon.address;
    let gone = |error: std::io::Error| {
        Error::new(Kind::Connection, format!("no denormd answers at {address}: {}", error.kind()))
            .hint("is `denormd run` up, and is this its config? The address is http.listen, or --address")
    };
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await.map_err(gone)?;
    if address.https != Some(true) {
        return converse(stream, daemon, path).await;
    }
    let untrusted = |error: std::io::Error| {
        Error::new(Kind::Connection, format!("no TLS with {address}: {error}")).hint(super::trust::advice(&error))
    };
    let name = ServerName::try_from(address.host.clone())
        .map_err(|_| Error::new(Kind::Config, format!("{address}: a certificate cannot have this name")))?;
    let stream = TlsConnector::from(daemon.trust.client()?).connect(name, stream).await.map_err(untrusted)?;
    converse(stream, daemon, path).await
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    daemon: &Daemon,
    path: &str,
) -> Result<Answer> {
    let address = &daemon.address;
    let broken = |_: hyper::Error| {
        let error = Error::new(Kind::Connection, format!("{address} does not answer as denormd does"));
        if address.https == Some(true) { error } else { error.hint("if it serves HTTPS: --address https://HOST:PORT") }
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let driven = tokio::spawn(connection);
    let authorization =
        daemon.token.as_ref().map(|token| ("authorization", format!("Bearer {}", token.expose_secret())));
    let request = authorization
        .into_iter()
        .fold(Request::get(path), |request, (name, value)| request.header(name, value))
        .header("host", address.authority())
        .header("connection", "close")
        .body(Empty::<Bytes>::new())
        .map_err(|_| Error::new(Kind::Config, "the request for this path is not valid"))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let status: StatusCode = response.status();
    let body = response.into_body().collect().await.map_err(broken)?.to_bytes().to_vec();
    driven.abort();
    Ok(Answer { ok: status.is_success(), code: status.as_u16(), body })
}
