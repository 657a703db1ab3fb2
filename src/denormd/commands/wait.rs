//! `denormd wait`

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    cli::Output,
    commands::{Failure, notice, print_json},
    server::client,
};
use denormd_mongo::error::{Error, Kind};

/// The daemon answers at the timeout; this much longer is waited for the answer.
const MARGIN: Duration = Duration::from_secs(5);

/// Pause before another request to a daemon that is starting, reloads its config, or has too many requests.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns once the daemon has applied everything up to an operation time, or up to now.
pub async fn wait(
    output: Output,
    daemon: client::Daemon,
    operation_time: Option<&str>,
    timeout: u32,
) -> Result<(), Failure> {
    let legible = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '.' || c == ':');
    if operation_time.is_some_and(|text| !legible(text)) {
        return Err(Error::new(Kind::Config, "--operation-time is seconds.increment, as in 1700000000.5").into());
    }
    let from = operation_time.map(|time| format!("&operationTime={time}")).unwrap_or_default();
    let end = Instant::now() + Duration::from_secs(timeout.into());
    let answer = loop {
        let left = end.saturating_duration_since(Instant::now());
        let path = format!("/v1/wait?timeout={}{from}", left.as_secs_f64());
        let answer = client::get(daemon.clone(), &path, left + MARGIN).await?;
        if !matches!(answer.code, 429 | 503) || left.is_zero() {
            break answer;
        }
        tokio::time::sleep(left.min(PAUSE)).await;
    };
    let body: serde_json::Value = match answer.json() {
        // A server with too many requests answers in plain text.
        Err(_) if matches!(answer.code, 429 | 503) => {
            serde_json::json!({"applied": false, "error": String::from_utf8_lossy(&answer.body).trim()})
        }
        body => body?,
    };
    if output == Output::Json {
        print_json(&body);
    }
    if answer.ok {
        let except = body.get("except").and_then(serde_json::Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let except: Vec<&str> = except.iter().filter_map(serde_json::Value::as_str).collect();
        if !except.is_empty() && output == Output::Text {
            notice(&format!(
                "these rules may lack changes: {}. Each is paused, blocked, unavailable or in shadow, waits for `denormd backfill`, has dead letters or unrepaired drift, does not run yet as this config defines it, or reads the copies of such a rule",
                except.join(", ")
            ));
        }
        return Ok(());
    }
    let text = |name: &str| body.get(name).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    if answer.code == 400 {
        return Err(Error::new(Kind::Config, text("error")).into());
    }
    let causes = body.get("causes").and_then(serde_json::Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let causes: Vec<&str> = causes.iter().filter_map(serde_json::Value::as_str).collect();
    let error = Error::new(Kind::TimedOut, text("error"));
    Err(if causes.is_empty() { error } else { error.hint(format!("it says: {}", causes.join(", "))) }.into())
}
