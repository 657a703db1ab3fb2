//! The details of a rule. Pure.

use super::text::lines;
use crate::{
    commands::status::{explained_pace, share, short, short_lag, since, stale},
    status::{Backfill, CauseReport, Rule, Status},
};
use denormd_engine::metrics::RecentError;
use denormd_model::text::duration;

/// The causes as lines, each with the reason and the advice. Causes that concern one rule name it in the advice.
pub(super) fn cause(status: &Status, cause: &CauseReport, rule: Option<&str>, columns: usize) -> Vec<String> {
    let rules =
        if cause.rules.is_empty() || rule.is_some() { String::new() } else { format!(" ({})", cause.rules.join(", ")) };
    let mark = if cause.severe { "!!" } else { " *" };
    let mut text = format!("{mark} {}, for {}: {}{rules}\n", cause.cause, since(status, cause.since), cause.meaning);
    if let Some(reason) = &cause.reason {
        text.push_str(&format!("   reason: {reason}\n"));
    }
    let only = rule.or(cause.rules.first().map(String::as_str).filter(|_| cause.rules.len() == 1));
    let advice = only.map_or_else(|| cause.advice.clone(), |rule| cause.advice.replace("RULE", rule));
    text.push_str(&format!("   what to do: {advice}\n"));
    lines(&text, columns)
}

/// A recent error in one line.
pub(super) fn problem(status: &Status, problem: &RecentError) -> String {
    let times = if problem.count > 1 { format!(", {} times", problem.count) } else { String::new() };
    let place = problem.rule.as_ref().map_or_else(String::new, |rule| format!("{rule}, "));
    format!("   {} ago{times}: {place}{}: {}", since(status, problem.last), problem.doing, problem.message)
}

/// The details of a rule as lines: of the `last` known status if it is unknown now, with the rate of its writes.
pub(super) fn details(status: &Status, rule: &Rule, last: bool, rate: Option<f64>, columns: usize) -> Vec<String> {
    let mut text = format!("   {:<14}{} -> {}\n", "copies", rule.source, rule.target);
    for (label, value) in figures(status, rule, last, rate) {
        text.push_str(&format!("   {label:<14}{value}\n"));
    }
    let mut out = lines(&text, columns);
    if rule.behind_since.is_some() {
        out.extend(lines(&format!("   {}\n", stale(status, rule)), columns));
    }
    let concerned = |cause: &&CauseReport| cause.rules.is_empty() || cause.rules.contains(&rule.name);
    for found in status.causes.iter().filter(concerned) {
        out.push(String::new());
        out.extend(cause(status, found, Some(&rule.name), columns));
    }
    if !rule.dead_letter_reasons.is_empty() {
        out.extend([String::new(), "   dead letters by reason".to_owned()]);
        let reasons = rule.dead_letter_reasons.iter().map(|(why, count)| format!("   {count:>6}  {why}"));
        out.extend(reasons.flat_map(|reason| lines(&reason, columns)));
    }
    let errors = status.errors.iter().filter(|error| error.rule.as_ref().is_none_or(|of| *of == rule.name));
    let errors: Vec<String> = errors.take(5).flat_map(|error| lines(&problem(status, error), columns)).collect();
    if !errors.is_empty() {
        out.extend([String::new(), "   recent errors".to_owned()]);
        out.extend(errors);
    }
    out
}

/// The figures of a rule with their labels.
fn figures(status: &Status, rule: &Rule, last: bool, rate: Option<f64>) -> Vec<(&'static str, String)> {
    let why_none = match rule.state.as_str() {
        "awaiting_backfill" => "none: existing data waits for a backfill",
        _ => "none: the rule does not run",
    };
    let lag = rule.lag_seconds.map_or_else(|| why_none.to_owned(), short_lag);
    let chain =
        if let Some(chain) = rule.chain_lag_seconds.filter(|chain| *chain > rule.lag_seconds.unwrap_or_default()) {
            format!("; with the rules that feed it {}", short_lag(chain))
        } else {
            String::new()
        };
    let was = if last { "was " } else { "" };
    let mut out = vec![
        ("state", format!("{was}{}", rule.state.replace('_', " "))),
        ("lag", format!("{was}{lag} (objective {}){chain}", duration(rule.max_lag_seconds))),
        ("written", written(rule, rate)),
    ];
    if let (Some(p50), Some(p99)) = (rule.propagation.p50, rule.propagation.p99) {
        let value = format!("{} at the median, p99 {}, of {}", short(p50), short(p99), rule.propagation.count);
        out.push(("propagation", format!("{value} in the last five minutes")));
    }
    match &rule.backfill {
        Backfill::None => {}
        Backfill::Waiting => {
            out.push(("backfill", "waits for other backfills, or until every partition runs the rule".to_owned()));
        }
        running @ Backfill::Running { scanned, total, .. } => {
            let of = total.map_or_else(String::new, |total| format!(" of about {total}"));
            let pace = explained_pace(running).map_or_else(String::new, |pace| format!(", {pace}"));
            out.push(("backfill", format!("{}, {scanned}{of} documents read{pace}", share(running))));
        }
    }
    if let Some(audit) = &rule.audit {
        let of = audit.total.map_or_else(String::new, |total| format!(" of about {total}"));
        let ended = match audit.last_ended {
            Some(at) => format!("the last round ended {} ago", since(status, at)),
            None => "no round has ended yet".to_owned(),
        };
        out.push(("audit", format!("{}{of} documents read, {ended}", audit.compared)));
    }
    if rule.drift_found > 0 {
        out.push(("drift", format!("{} found, {} repaired", rule.drift_found, rule.drift_repaired)));
    }
    out.push(("dead letters", status.dead_letters_text(rule.dead_letters)));
    out
}

fn written(rule: &Rule, rate: Option<f64>) -> String {
    let rate = rate.map_or_else(String::new, |rate| format!("{rate:.1} targets/s, "));
    format!("{rate}{} targets since the start", rule.targets_changed)
}
