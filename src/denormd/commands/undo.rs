//! `denormd undo`

use crate::{
    cli::Output,
    commands::{
        Failure, connected,
        leader::{self, unless_interrupted},
        print_as,
        run::signals::Signals,
        without_record,
    },
};
use denormd_engine::{
    checkpoint::requests::RequestedWork,
    deployment::lease,
    jobs::undo::{Tally, count, is_running},
};
use denormd_model::{
    rule_state::RuleState,
    text::{counted, span},
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::{Loaded, Undo};

/// Has the leader put back what the first backfill of `rule` has overwritten or removed; takes the lease where nobody
/// leads.
pub async fn undo(loaded: &Loaded, output: Output, rule: &str, dry_run: bool) -> Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    let known = store.rules(&context.server).await?;
    let Some((_, record)) = known.iter().find(|(name, _)| name == rule) else {
        return Err(without_record(&context, &known, rule).into());
    };
    let is_planned = context.plan.named(rule).is_some();
    let led = lease::is_held(&context.server, store.database(), store.ids()).await?;
    if !dry_run && is_running(record) && (is_planned || led) {
        let error = Error::new(Kind::State, format!("`{rule}` is running, and would replace the old values again"));
        let hint = format!("`denormd pause {rule}` first, or take the rule out of the config");
        return Err(error.hint(hint).into());
    }
    if !dry_run && is_planned && record.state.resumes_by_itself() {
        let message = format!(
            "`{rule}` is {}: it may run again by itself and overwrite the restored values",
            record.state.name()
        );
        let hint = format!("run `denormd pause {rule}` first, without `--for`: the rule then stays stopped");
        return Err(Error::new(Kind::State, message).hint(hint).into());
    }
    if !dry_run && is_planned && !led && record.state == RuleState::Removed {
        let message =
            format!("`{rule}` is in this config, but not in that of the last leader: it would run again here");
        let error = Error::new(Kind::State, message);
        return Err(error.hint("take the rule out of the config that this command reads").into());
    }
    let mut signals = Signals::listen(&[])?;
    let before = unless_interrupted(rule, &mut signals, Box::pin(count(&context, rule))).await?;
    let mut after = before;
    if !dry_run && before != Tally::default() {
        leader::request(loaded, &context, &store, (rule, RequestedWork::Undo), &[rule], &mut signals).await?;
        after = unless_interrupted(rule, &mut signals, Box::pin(count(&context, rule))).await?;
    }
    let summary = Summary { rule, dry_run, before, after, undo: &loaded.config.undo };
    print_as(output, || summary.text(), || summary.json());
    match summary.refused() {
        0 => Ok(()),
        refused => {
            let error = Error::new(Kind::Refused, format!("{} could not be put back", counted(refused, "value")));
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
        let mut out = format!("{rule}: {} {would}put back\n", counted(self.back(), "value"));
        if after.changed > 0 {
            out += &format!(
                "{} changed since, by the application or by the rule itself after a change of its source: left as {}\n",
                counted(after.changed, "value"),
                if after.changed == 1 { "it is" } else { "they are" }
            );
        }
        if before.lost > 0 {
            let be = if before.lost == 1 { "was" } else { "were" };
            out += &format!(
                "about {} {be} not kept for lack of room (undo.max_bytes), and cannot be put back\n",
                counted(before.lost, "value")
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
