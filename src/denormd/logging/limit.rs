//! Limits repeated log lines: at most a fixed number for each call site and rule in a minute, then their count.

use std::{
    collections::HashMap,
    fmt::{Debug, Write as _},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{Event, Level, Metadata, Subscriber, callsite::Identifier, field::Field};
use tracing_subscriber::layer::{Context, Filter};

/// Lines of one call site and one rule that are written in one window.
const BURST: u64 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Interval between checks for windows that have ended.
const ROUND: Duration = Duration::from_secs(5);
/// Combinations of call site and rule that are counted separately. Beyond that, all rules of a call site are counted
/// together.
const KEPT: usize = 4096;
/// Target of the lines that report suppressed lines. They are not limited themselves.
const TARGET: &str = "denormd::repeated";
/// Target of the lines of the timeline, which are never limited: one call site writes all kinds of them.
pub const TIMELINE: &str = "denormd::timeline";

/// A filter that lets the first lines of each kind through.
#[derive(Debug, Default, Clone)]
pub(super) struct Limit {
    kinds: Arc<Mutex<HashMap<(Identifier, String), Kind>>>,
}

#[derive(Debug)]
struct Kind {
    began: Instant,
    lines: u64,
    /// The message of the first suppressed line.
    message: String,
}

/// Suppressed lines of one kind.
#[derive(Debug, PartialEq)]
struct LeftOut {
    rule: String,
    message: String,
    count: u64,
}

impl Limit {
    fn admits(&self, place: Identifier, rule: String, message: &str, now: Instant) -> bool {
        let mut kinds = self.kinds.lock();
        let mut key = (place, rule);
        if kinds.len() >= KEPT && !kinds.contains_key(&key) {
            key.1.clear();
        }
        let kind = kinds.entry(key).or_insert_with(|| Kind { began: now, lines: 0, message: String::new() });
        kind.lines += 1;
        if kind.lines == BURST + 1 {
            message.clone_into(&mut kind.message);
        }
        kind.lines <= BURST
    }

    /// Removes the windows that have ended; returns the lines suppressed in them.
    fn round(&self, now: Instant) -> Vec<LeftOut> {
        let mut kinds = self.kinds.lock();
        let mut out = Vec::new();
        kinds.retain(|(_, rule), kind| {
            let over = now.duration_since(kind.began) >= WINDOW;
            if over && kind.lines > BURST {
                let (rule, message) = (rule.clone(), std::mem::take(&mut kind.message));
                out.push(LeftOut { rule, message, count: kind.lines - BURST });
            }
            !over
        });
        out
    }
}

/// Debug and trace lines are never limited.
fn is_limited(metadata: &Metadata<'_>) -> bool {
    *metadata.level() <= Level::INFO && ![TARGET, TIMELINE].contains(&metadata.target())
}

impl<S: Subscriber> Filter<S> for Limit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        if !is_limited(event.metadata()) {
            return true;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.admits(event.metadata().callsite(), fields.rule, &fields.message, Instant::now())
    }
}

#[derive(Default)]
struct Fields {
    rule: String,
    message: String,
}

impl tracing::field::Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "rule" {
            value.clone_into(&mut self.rule);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let into = match field.name() {
            "rule" => &mut self.rule,
            "message" => &mut self.message,
            _ => return,
        };
        // Writing to a `String` cannot fail.
        write!(into, "{value:?}").ok();
    }
}

/// Reports suppressed lines at regular intervals; never returns.
pub(super) async fn tell(limit: Limit) {
    loop {
        tokio::time::sleep(ROUND).await;
        for LeftOut { rule, message, count } in limit.round(Instant::now()) {
            tracing::warn!(target: TARGET, rule, suppressed = count, "more lines like this were left out: {message}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing_subscriber::{Layer, layer::SubscriberExt};

    use super::*;

    #[derive(Default, Clone)]
    struct Counter(Arc<AtomicUsize>);

    impl<S: Subscriber> Layer<S> for Counter {
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A target that was refused repeatedly, once for each of its million documents, filled the disk.
    #[test]
    fn a_flood_is_ten_lines_a_rule_and_its_number() {
        let (limit, counter) = (Limit::default(), Counter::default());
        let subscriber = tracing_subscriber::registry().with(counter.clone().with_filter(limit.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for nth in 0..1_000_000 {
                let rule = if nth % 2 == 0 { "a" } else { "b" };
                tracing::warn!(rule, nth, "set aside");
            }
            assert_eq!(counter.0.swap(0, Ordering::SeqCst), 20);
            tracing::warn!(rule = "a", "something else");
            assert_eq!(counter.0.swap(0, Ordering::SeqCst), 1, "other lines are not held back");
            assert_eq!(limit.round(Instant::now()), [], "the window is not over");
            let mut left_out = limit.round(Instant::now() + WINDOW);
            left_out.sort_by(|a, b| a.rule.cmp(&b.rule));
            let told: Vec<_> = left_out.iter().map(|l| (l.rule.as_str(), l.message.as_str(), l.count)).collect();
            assert_eq!(told, [("a", "set aside", 499_990), ("b", "set aside", 499_990)]);
            tracing::warn!(rule = "a", nth = 0, "set aside");
            assert_eq!(counter.0.swap(0, Ordering::SeqCst), 1, "a new window");
            (0..2 * BURST).for_each(|nth| tracing::info!(target: TIMELINE, "event {nth}"));
            assert_eq!(counter.0.swap(0, Ordering::SeqCst), 20, "the timeline is complete");
            (0..2 * BURST).for_each(|nth| tracing::info!("line {nth}"));
            assert_eq!(counter.0.swap(0, Ordering::SeqCst), 10);
            assert_eq!(limit.round(Instant::now() + WINDOW)[0].message, "line 10", "the first that was left out");
        });
    }

    #[test]
    fn what_is_counted_is_bounded() {
        let limit = Limit::default();
        let subscriber = tracing_subscriber::registry().with(Counter::default().with_filter(limit.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for nth in 0..3 * KEPT {
                tracing::warn!(rule = format!("rule-{nth}"), "set aside");
            }
        });
        assert!(limit.kinds.lock().len() <= KEPT + 1);
    }
}
