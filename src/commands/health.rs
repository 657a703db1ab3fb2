//! `denormd health`

use std::{net::SocketAddr, time::Duration};

use crate::{
    cli::Output,
    commands::{Failure, print},
    config::{Http, Loaded},
    error::{Error, Kind},
    server::client,
};

/// A container's health check should give up before its own timeout.
const PATIENCE: Duration = Duration::from_secs(3);
/// Says where to listen in the environment, before any file.
const LISTEN: &str = "DENORMD__HTTP__LISTEN";

/// Where the daemon listens. A config that has been broken since the daemon read it must not make the daemon unwell, so
/// what cannot be loaded leaves the environment and the default.
pub fn address(loaded: Option<&Loaded>, environment: &[(String, String)]) -> Result<SocketAddr, Failure> {
    if let Some(loaded) = loaded {
        return Ok(loaded.config.http.listen);
    }
    match environment.iter().find(|(name, _)| name.eq_ignore_ascii_case(LISTEN)) {
        None => Ok(Http::default().listen),
        Some((_, text)) => {
            text.parse().map_err(|_| Error::new(Kind::Config, format!("{LISTEN} is not an address and a port")).into())
        }
    }
}

/// Succeeds when the daemon is ready, or with `live` when it is alive.
pub async fn health(output: Output, address: SocketAddr, live: bool) -> Result<(), Failure> {
    let path = if live { "/livez" } else { "/readyz" };
    let answer = client::get(address, path, PATIENCE).await?;
    let body = String::from_utf8_lossy(&answer.body).into_owned();
    match output {
        Output::Json if live => print(&format!("{}\n", serde_json::json!({"live": answer.ok}))),
        Output::Json => print(&format!("{body}\n")),
        Output::Text if answer.ok => print(if live { "alive\n" } else { "ready\n" }),
        Output::Text => {}
    }
    if answer.ok { Ok(()) } else { Err(Error::new(Kind::Unavailable, format!("not well: {}", body.trim())).into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_config_the_environment_says_where_the_daemon_listens() {
        let environment = |text: &str| vec![(LISTEN.to_owned(), text.to_owned())];
        assert_eq!(address(None, &[]).unwrap(), Http::default().listen);
        assert_eq!(address(None, &environment("0.0.0.0:9")).unwrap(), SocketAddr::from(([0, 0, 0, 0], 9)));
        assert!(address(None, &environment("here")).is_err());
    }
}
