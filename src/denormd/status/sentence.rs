//! The summary: the leadership, the rules that do not run, and the lag. Pure.

use denormd_engine::metrics::Cause;

use super::{
    lag::{BEHIND, seconds},
    leadership::Leadership,
    report::{CauseReport, Rule, Status, duration},
};

/// Rules named in a sentence.
const NAMED: usize = 3;

/// The status in a few sentences.
pub fn summary(status: &Status) -> String {
    let mut sentences = Vec::new();
    if let Some(cause) = cause(status, Cause::NoPrimary) {
        let since = duration(seconds(status.now - cause.since));
        sentences.push(format!("No primary of the replica set has answered for {since}."));
    } else {
        sentences.extend(status.leadership.sentence());
    }
    match (&status.leadership, status.heard_seconds) {
        (Leadership::Standby { leaders }, None) if !leaders.is_empty() => {
            sentences.push("Nothing has been heard of its figures yet.".to_owned());
        }
        (Leadership::Standby { .. }, Some(heard)) if heard >= BEHIND => {
            sentences.push(format!("Its figures are {} old.", duration(heard)));
        }
        _ => {}
    }
    if cause(status, Cause::ConfigRefused).is_some() {
        sentences.push("The changed config is refused; the old rules stay in force.".to_owned());
    }
    sentences.extend(standing_still(status));
    sentences.extend(lag(status));
    if sentences.is_empty() {
        let is_idle = status.rules.is_empty();
        return if is_idle { "Leading: the config has no rules." } else { "Leading: the lag is not known yet." }
            .to_owned();
    }
    sentences.join(" ")
}

fn cause(status: &Status, cause: Cause) -> Option<&CauseReport> {
    status.causes.iter().find(|found| found.cause == cause.name())
}

/// The rules that do not run, or only in part.
fn standing_still(status: &Status) -> Vec<String> {
    let states = [
        (Cause::SourceGone, "without its source"),
        (Cause::RemovalLimit, "blocked"),
        (Cause::Adoption, "blocked"),
        (Cause::Unavailable, "unavailable"),
        (Cause::Paused, "paused"),
    ];
    let sentence = |(state, word): (Cause, &str)| {
        let rules = &cause(status, state)?.rules;
        Some(match rules.len() {
            0 => return None,
            1 => format!("Rule {} is {word}.", rules[0]),
            all if all == status.rules.len() => format!("Every rule is {word}."),
            many => format!("{many} of {} rules are {word}: {}.", status.rules.len(), named(rules)),
        })
    };
    states.into_iter().filter_map(sentence).collect()
}

fn named(rules: &[String]) -> String {
    let more = rules.len().saturating_sub(NAMED);
    let named = rules.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

/// The lag of the running rules; None if no rule runs, or nothing is known.
fn lag(status: &Status) -> Option<String> {
    let overall = status.lag_seconds?;
    let own = |rule: &Rule| rule.lag_seconds.unwrap_or_default();
    let mut late: Vec<&Rule> = status.rules.iter().filter(|rule| own(rule) >= BEHIND).collect();
    late.sort_by(|a, b| own(b).total_cmp(&own(a)));
    let Some(worst) = late.first() else {
        let has = |found| cause(status, found).is_some();
        let stands_still = status.rules.iter().any(|rule| rule.lag_seconds.is_none());
        return Some(if has(Cause::Degraded) {
            "Changes were lost; copies may be wrong until the backfill ends.".to_owned()
        } else if has(Cause::Backfilling) {
            "Changes are applied as they come; existing data is being brought up to date.".to_owned()
        } else if has(Cause::DeadLetters) {
            "Not behind. Some documents could not be written and are set aside.".to_owned()
        } else if overall > 0.0 {
            "Not behind: changes are applied within seconds.".to_owned()
        } else if stands_still {
            "The other rules are not behind.".to_owned()
        } else {
            "Not behind: every change is applied.".to_owned()
        });
    };
    let since = status.behind_since.unwrap_or(status.now);
    let rules = match late.len() {
        1 => format!("rule {}", worst.name),
        all if all == status.rules.len() => "every rule".to_owned(),
        many => format!("{} and {} more of {} rules", worst.name, many - 1, status.rules.len()),
    };
    let lasts = duration(seconds(status.now - since).max(BEHIND));
    Some(format!("Behind by {} on {rules}, for {lasts}.", duration(own(worst))))
}
