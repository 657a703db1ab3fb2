//! `denormd undo`

use std::time::Duration;

use crate::{
    cli::Output,
    commands::{Failure, compile, context, leader::with_a_leader, print},
};
use denormd_engine::{
    checkpoint::{requests::Work, store::Store},
    deployment::lease,
    jobs::undo::{Tally, count, is_running},
    metrics::Metrics,
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::{Loaded, Undo};

/// Has the leader put back what the first backfill of `rule` has overwritten or removed; takes the lease where nobody
/// leads.
pub async fn undo(loaded: &Loaded, output: Output, rule: &str, dry_run: bool) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let config = &loaded.config;
    let store = Store::open(&context.server, &config.state.database, &config.name).await?;
    let known = store.rules(&context.server).await?;
    let Some((_, record)) = known.iter().find(|(name, _)| name == rule) else {
        let names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
        let is_planned = context.plan.rules.iter().any(|planned| planned.name == rule);
        let error = Error::new(
            if is_planned { Kind::State } else { Kind::Config },
            format!("the deployment `{}` knows no rule `{rule}`: it has never run, or is pruned", config.name),
        );
        return Err(error.hint(format!("known are: {}", names.join(", "))).into());
    };
    let is_planned = context.plan.rules.iter().any(|planned| planned.name == rule);
    let led = lease::is_held(&context.server, store.database(), store.ids()).await?;
    if !dry_run && is_running(record) && (is_planned || led) {
        let error = Error::new(Kind::State, format!("`{rule}` is running, and would replace the old values again"));
        let hint = format!("`denormd pause {rule}` first, or take the rule out of the config");
        return Err(error.hint(hint).into());
    }
    let before = Box::pin(count(&context, rule)).await?;
    let mut after = before;
    if !dry_run && before != Tally::default() {
        let work = async {
            let request = store.request(&context.server, rule, &Work::Undo).await?;
            store.until_done(&context.server, request).await
        };
        with_a_leader(loaded, &context, work).await?;
        after = Box::pin(count(&context, rule)).await?;
    }
    let summary = Summary { rule, dry_run, before, after, undo: &config.undo };
    print(&match output {
        Output::Text => summary.text(),
        Output::Json => format!("{:#}\n", summary.json()),
    });
    match summary.refused() {
        0 => Ok(()),
        refused => {
            let error = Error::new(Kind::Refused, format!("{} could not be put back", values(refused)));
            Err(error.hint("the server refuses the old values, by the collection's validator for example").into())
        }
    }
}

struct Summary<'a> {
    rule: &'a str,
    dry_run: bool,
    before: Tally,
    after: Tally,
    undo: &'a Undo,
}

impl Summary<'_> {
    /// Values that were, or would be, put back.
    fn back(&self) -> u64 {
        if self.dry_run { self.before.back } else { self.before.back.saturating_sub(self.after.back) }
    }

    /// Values that the server has refused.
    fn refused(&self) -> u64 {
        if self.dry_run { 0 } else { self.after.back }
    }

    fn text(&self) -> String {
        let Self { rule, dry_run, before, after, .. } = self;
        if *before == Tally::default() {
            return format!("{rule}: no value is kept: {}\n", self.why_none());
        }
        let would = if *dry_run { "would be " } else { "" };
        let mut out = format!("{rule}: {} {would}put back\n", values(self.back()));
        if after.changed > 0 {
            out += &format!(
                "{} changed since, by the application or by the rule itself after a change of its source: left as {}\n",
                values(after.changed),
                if after.changed == 1 { "it is" } else { "they are" }
            );
        }
        if before.lost > 0 {
            let be = if before.lost == 1 { "was" } else { "were" };
            out += &format!(
                "about {} {be} not kept for lack of room (undo.max_bytes), and cannot be put back\n",
                values(before.lost)
            );
        }
        if !dry_run && self.back() > 0 {
            out += &format!("`denormd prune {rule}` leaves these fields alone from now on\n");
        }
        out
    }

    fn why_none(&self) -> String {
        if !self.undo.enabled {
            return "undo.mode is off".to_owned();
        }
        format!("its first backfill has replaced none, or that was more than {} ago", span(self.undo.keep))
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "rule": self.rule, "dry_run": self.dry_run, "put_back": self.back(), "changed": self.after.changed,
            "not_kept": self.before.lost, "refused": self.refused(),
        })
    }
}

/// A number of values.
#[must_use]
pub fn values(number: u64) -> String {
    if number == 1 { "1 value".to_owned() } else { format!("{number} values") }
}

/// A span of the config, in words.
#[must_use]
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (number, unit) = match seconds {
        s if s % 86_400 == 0 => (s / 86_400, "day"),
        s if s % 3600 == 0 => (s / 3600, "hour"),
        s if s % 60 == 0 => (s / 60, "minute"),
        s => (s, "second"),
    };
    if number == 1 { format!("1 {unit}") } else { format!("{number} {unit}s") }
}
