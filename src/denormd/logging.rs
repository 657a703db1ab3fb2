//! Structured logs: text on a terminal, JSON otherwise. Repeated lines are bounded, and panics are logged without
//! values. Spans go to a collector if one is configured.

#[cfg(feature = "otlp")]
mod export;
mod limit;

use std::{any::Any, io::IsTerminal};

use tracing_subscriber::{
    EnvFilter, Layer,
    filter::{FilterExt, filter_fn},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use denormd_engine::reconcile::STAGES;
use denormd_mongo::error::Result;
#[cfg(not(feature = "otlp"))]
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::{Log, LogFormat};
use limit::Limit;
pub use limit::TIMELINE;

/// Logging resources that must be shut down with the process.
#[derive(Debug, Default)]
pub struct Started {
    #[cfg(feature = "otlp")]
    spans: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

impl Started {
    /// Sends the last spans.
    pub async fn end(self) {
        #[cfg(feature = "otlp")]
        if let Some(spans) = self.spans {
            // The shutdown waits for a thread that needs this runtime. Spans that cannot be sent have been reported.
            tokio::task::spawn_blocking(move || spans.shutdown().ok()).await.ok();
        }
    }
}

/// Starts the log of a deployment, on standard error. An unreadable filter falls back to `info`.
pub fn start(log: &Log, deployment: &str) -> Result<Started> {
    let chosen = EnvFilter::try_new(&log.filter);
    let unreadable = chosen.as_ref().err().map(ToString::to_string);
    let filter = chosen.unwrap_or_else(|_| EnvFilter::new("info"));
    let text = match log.format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let limit = Limit::default();
    let lines = filter.and(filter_fn(|metadata| metadata.target() != STAGES)).and(limit.clone());
    // Only on a terminal, and not if `NO_COLOR` is set.
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(colour);
    let layer = if text { layer.boxed() } else { layer.json().flatten_event(true).boxed() };
    let registry = tracing_subscriber::registry().with(layer.with_filter(lines));
    #[cfg(feature = "otlp")]
    let (stages, started) = match &log.otlp {
        Some(endpoint) => {
            let (layer, spans) = export::layer(endpoint, deployment)?;
            (Some(layer.with_filter(filter_fn(|metadata| metadata.target() == STAGES))), Started { spans: Some(spans) })
        }
        None => (None, Started::default()),
    };
    #[cfg(feature = "otlp")]
    let registry = registry.with(stages);
    #[cfg(not(feature = "otlp"))]
    let started = match &log.otlp {
        Some(_) => {
            let error =
                Error::new(Kind::Config, format!("log.otlp: this build of denormd ({deployment}) sends no spans"));
            return Err(error.hint("build it with `--features otlp`, or take the setting away"));
        }
        None => Started::default(),
    };
    if registry.try_init().is_err() {
        tracing::debug!("the log was started before");
        return Ok(started);
    }
    if let Some(why) = unreadable {
        tracing::warn!(%why, "`log.filter` cannot be read: the log has the level `info`");
    }
    tokio::spawn(limit::tell(limit));
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panicked: {}", reason(panic.payload()));
    }));
    Ok(started)
}

/// Message of a panic if it is a constant of the program: a formatted text may contain a document's values.
fn reason(payload: &(dyn Any + Send)) -> &'static str {
    payload.downcast_ref::<&'static str>().copied().unwrap_or("message withheld: it may contain values")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `denormd=debug` matches every target that begins so, and a target is the path of the module that logs.
    #[test]
    fn a_filter_for_denormd_means_all_of_its_crates() {
        let of = |filter| tracing_subscriber::registry().with(EnvFilter::try_new(filter).unwrap());
        tracing::subscriber::with_default(of("denormd=debug"), || {
            assert!(tracing::enabled!(target: "denormd::commands::run", tracing::Level::DEBUG));
            assert!(tracing::enabled!(target: "denormd_engine::pipeline", tracing::Level::DEBUG));
            assert!(!tracing::enabled!(target: "denormd_engine::pipeline", tracing::Level::TRACE));
            assert!(!tracing::enabled!(target: "mongodb::client", tracing::Level::DEBUG));
        });
        assert!(std::any::type_name::<denormd_engine::pipeline::Handle>().starts_with("denormd_engine::pipeline"));
    }

    #[test]
    fn a_panic_tells_no_value() {
        let name = "canary-7e57ed";
        let told = |panic: fn(&str)| {
            let payload = std::panic::catch_unwind(|| panic(name)).unwrap_err();
            reason(&*payload)
        };
        assert_eq!(told(|_| panic!("no such key")), "no such key");
        assert!(!told(|name| panic!("no key {name}")).contains(name));
        assert!(!told(|name| assert_eq!(name.parse::<u8>().map_err(|_| name.to_owned()).unwrap(), 0)).contains(name));
    }
}
