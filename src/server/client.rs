//! Asks a running daemon, for the commands that do.

use std::{net::SocketAddr, time::Duration};

use http_body_util::{BodyExt, Empty};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::error::{Error, Kind, Result};

/// What a daemon answers.
#[derive(Debug)]
pub struct Answer {
    /// Whether the status code is of the 200s.
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

/// Asks for `path` at `address`. An address that means every interface is asked on the loopback.
pub async fn get(address: SocketAddr, path: &str, patience: Duration) -> Result<Answer> {
    let address = reachable(address);
    let silent = || Error::new(Kind::Connection, format!("no answer from denormd at {address} in time"));
    tokio::time::timeout(patience, ask(address, path)).await.map_err(|_| silent())?
}

fn reachable(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => SocketAddr::from(([127, 0, 0, 1], v4.port())),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], v6.port())),
        address => address,
    }
}

async fn ask(address: SocketAddr, path: &str) -> Result<Answer> {
    let gone = |error: std::io::Error| {
        Error::new(Kind::Connection, format!("no denormd answers at {address}: {}", error.kind()))
            .hint("is `denormd run` up, and is this its config? The address is http.listen, or --address")
    };
    let broken = |_: hyper::Error| Error::new(Kind::Connection, format!("{address} does not answer as denormd does"));
    let stream = TcpStream::connect(address).await.map_err(gone)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let driven = tokio::spawn(connection);
    let request = Request::get(path)
        .header("host", address.to_string())
        .header("connection", "close")
        .body(Empty::<Bytes>::new())
        .map_err(|_| Error::new(Kind::Config, "this cannot be asked for"))?;
    let response = sender.send_request(request).await.map_err(broken)?;
    let status: StatusCode = response.status();
    let body = response.into_body().collect().await.map_err(broken)?.to_bytes().to_vec();
    driven.abort();
    Ok(Answer { ok: status.is_success(), code: status.as_u16(), body })
}
