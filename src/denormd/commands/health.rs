//! `denormd health`: a probe of the running daemon.

use std::{net::SocketAddr, path::Path, time::Duration};

use secrecy::SecretString;

use crate::{
    cli::Output,
    commands::{Failure, print},
    server::client,
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::{Certificate, Http, Loaded, certificate, file};

/// Time limit for the answer, below the timeout of a container's health check.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The environment variable with the daemon's address.
const LISTEN: &str = "DENORMD__HTTP__LISTEN";

/// The address of the daemon. If the config cannot be loaded, uses the environment or the default, so that a config
/// broken after the daemon read it does not make the daemon unhealthy.
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

/// The token from the environment, given directly or as a file.
pub fn token(environment: &[(String, String)]) -> Option<SecretString> {
    let given =
        |name: &str| environment.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, text)| text);
    let from_file = || {
        let path = given("DENORMD__HTTP__TOKEN_FILE")?;
        file::read(Path::new(path), file::SECRET).ok().map(|text| text.trim().to_owned())
    };
    given("DENORMD__HTTP__TOKEN").cloned().or_else(from_file).map(SecretString::from)
}

/// The certificate named in the environment, for a daemon whose config cannot be read now.
#[must_use]
pub fn certificate(environment: &[(String, String)]) -> Option<Certificate> {
    let given = |name: &str| {
        let (_, path) = environment.iter().find(|(known, _)| known.eq_ignore_ascii_case(name))?;
        file::bytes(Path::new(path), file::SECRET).ok()
    };
    let chain = given("DENORMD__HTTP__TLS_CERT_FILE")?;
    let key = given("DENORMD__HTTP__TLS_KEY_FILE").unwrap_or_else(|| chain.clone());
    Certificate::new(certificate::chain(&chain).ok()?, certificate::key(&key).ok()?).ok()
}

/// Succeeds if the daemon is ready or, with `live`, alive.
pub async fn health(output: Output, daemon: client::Daemon, live: bool) -> Result<(), Failure> {
    let path = if live { "/livez" } else { "/readyz" };
    let answer = client::get(probe(daemon), path, TIMEOUT).await?;
    let body = String::from_utf8_lossy(&answer.body).into_owned();
    match output {
        Output::Json if live => print(&format!("{}\n", serde_json::json!({"live": answer.ok}))),
        // Without the token there is no body.
        Output::Json if body.trim().is_empty() => print(&format!("{}\n", serde_json::json!({"ready": answer.ok}))),
        Output::Json => print(&format!("{body}\n")),
        Output::Text if answer.ok => print(if live { "alive\n" } else { "ready\n" }),
        Output::Text => {}
    }
    let why = match body.trim() {
        "" => "it gives its reasons only to a request with its token, such as that of `denormd status`",
        why => why,
    };
    if answer.ok {
        Ok(())
    } else {
        let what = if live { "not alive" } else { "not ready" };
        Err(Error::new(Kind::Unavailable, format!("{what} (HTTP {}): {why}", answer.code)).into())
    }
}

/// Makes a probe accept any certificate, without sending a token that somebody else could read. A renewed certificate
/// that the daemon has not loaded yet must not make it unhealthy.
fn probe(daemon: client::Daemon) -> client::Daemon {
    if daemon.address.https != Some(true) {
        return daemon;
    }
    client::Daemon { token: None, trust: client::Trust { probe: true, ..daemon.trust }, ..daemon }
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
