//! Structured logs: text on a terminal, JSON otherwise; repeats bounded; panics without what they hold.

mod limit;

use std::{any::Any, io::IsTerminal};

use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{Log, LogFormat};
use limit::Limit;

/// Starts the log, on standard error. An unreadable filter falls back to `info`.
pub fn start(log: &Log) {
    let filter = EnvFilter::try_new(&log.filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let text = match log.format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let limit = Limit::default();
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let started = if text {
        registry.with(layer.with_filter(limit.clone())).try_init()
    } else {
        registry.with(layer.json().flatten_event(true).with_filter(limit.clone())).try_init()
    };
    if started.is_err() {
        tracing::debug!("the log was started before");
        return;
    }
    tokio::spawn(limit::tell(limit));
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panicked: {}", reason(panic.payload()));
    }));
}

/// What a panic says, where that is written in the program: a text that was put together may hold a document's values.
fn reason(payload: &(dyn Any + Send)) -> &'static str {
    payload.downcast_ref::<&'static str>().copied().unwrap_or("its message is not told, for it may hold values")
}

#[cfg(test)]
mod tests {
    use super::*;

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
