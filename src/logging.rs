//! Structured logs: text on a terminal, JSON otherwise.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{Log, LogFormat};

/// Starts the log, on standard error. An unreadable filter falls back to `info`.
pub fn start(log: &Log) {
    let filter = EnvFilter::try_new(&log.filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let text = match log.format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let started =
        if text { registry.with(layer).try_init() } else { registry.with(layer.json().flatten_event(true)).try_init() };
    if started.is_err() {
        tracing::debug!("the log was started before");
    }
}
