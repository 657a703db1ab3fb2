//! `denormd health`

use std::{net::SocketAddr, time::Duration};

use crate::{
    cli::Output,
    commands::{Failure, print},
    config::Loaded,
    error::{Error, Kind},
    server::client,
};

/// A container's health check should give up before its own timeout.
const PATIENCE: Duration = Duration::from_secs(3);

/// Succeeds when the daemon is ready, or with `live` when it is alive.
pub async fn health(loaded: &Loaded, output: Output, address: Option<SocketAddr>, live: bool) -> Result<(), Failure> {
    let path = if live { "/livez" } else { "/readyz" };
    let answer = client::get(address.unwrap_or(loaded.config.http.listen), path, PATIENCE).await?;
    let body = String::from_utf8_lossy(&answer.body).into_owned();
    match output {
        Output::Json if live => print(&format!("{}\n", serde_json::json!({"live": answer.ok}))),
        Output::Json => print(&format!("{body}\n")),
        Output::Text if answer.ok => print(if live { "alive\n" } else { "ready\n" }),
        Output::Text => {}
    }
    if answer.ok { Ok(()) } else { Err(Error::new(Kind::Unavailable, format!("not well: {}", body.trim())).into()) }
}
