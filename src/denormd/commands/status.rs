//! `denormd status`: the running daemon's status as text.

use std::{fmt::Write as _, time::Duration};

use crate::{
    cli::Output,
    commands::{Failure, print, print_json, terminal::fitted},
    server::client,
    status::{Backfill, Current, Leadership, Partitions, RetiredField, Rule, Status},
};
use denormd_engine::snapshot::{AuditProgress, HeldBack};
use denormd_model::{distribution::ratio, text::duration};

/// Time limit for the daemon's answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of audits to show.
const AUDITS: usize = 5;

/// Prints the running daemon's status. Fails if no daemon answers.
pub async fn status(output: Output, daemon: client::Daemon) -> Result<(), Failure> {
    let answer = client::get(daemon, "/v1/status", TIMEOUT).await?;
    match output {
        Output::Text => print(&fitted(&text(&answer.json()?))),
        Output::Json => print_json(&answer.json::<serde_json::Value>()?),
    }
    Ok(())
}

/// The status as text: first the problems with advice, then the table.
fn text(status: &Status) -> String {
    let mut out = format!("{}\n", status.summary);
    if !status.rules.is_empty() {
        writeln!(out, "Will data be lost? {}", status.risk).ok();
    }
    if let Some(current) = &status.current {
        writeln!(out, "{}", as_of(current)).ok();
    }
    if let (None, Some(unknown)) = (&status.current, unknown(status)) {
        writeln!(out, "{unknown}").ok();
    }
    for line in stale_rules(status) {
        writeln!(out, "   {line}").ok();
    }
    problems(&mut out, status);
    if !status.rules.is_empty() {
        out.push('\n');
        out.push_str(&rules_table(status));
    }
    writeln!(
        out,
        "\n{} {}{}, {} waiting, {:.1} targets/s, {:.1} events/s, restart replays {}, up {}",
        status.name,
        role(&status.leadership),
        status.partitions.as_ref().map(led).unwrap_or_default(),
        status.queue_depth,
        status.targets_per_second,
        status.events_per_second,
        duration(status.checkpoint_age_seconds),
        since(status, status.started),
    )
    .ok();
    if let Some(age) = status.canary_age_seconds {
        writeln!(out, "the newest canary that was received was sent {} ago", duration(age)).ok();
    }
    let sections = [
        ("backfill", backfills(status)),
        ("dead letters", dead_letters(status)),
        ("drift since the leader was started", drift(status)),
        ("audit", audits(status)),
        ("recent errors", errors(status)),
    ];
    for (heading, rows) in sections.into_iter().filter(|(_, rows)| !rows.is_empty()) {
        write!(out, "\n{heading}\n{}", table(&rows)).ok();
    }
    out.push_str(&left_behind(status));
    out
}

/// Writes the problems, each with advice.
fn problems(out: &mut String, status: &Status) {
    for option in &status.insecure {
        writeln!(out, "\n!! INSECURE: {option} is set: the server's certificate is not verified").ok();
        writeln!(out, "   what to do: give tlsCAFile instead").ok();
    }
    for cause in &status.causes {
        let rules = if cause.rules.is_empty() { String::new() } else { format!(" ({})", cause.rules.join(", ")) };
        let mark = if cause.severe { "!!" } else { " *" };
        writeln!(out, "\n{mark} {}, for {}: {}{rules}", cause.cause, since(status, cause.since), cause.meaning).ok();
        if let Some(reason) = &cause.reason {
            writeln!(out, "   reason: {reason}").ok();
        }
        writeln!(out, "   what to do: {}", cause.advice).ok();
    }
}

fn backfills(status: &Status) -> Vec<Vec<String>> {
    let row = |rule: &Rule| Some(vec![rule.name.clone(), share(&rule.backfill), explained_pace(&rule.backfill)?]);
    status.rules.iter().filter_map(row).collect()
}

fn dead_letters(status: &Status) -> Vec<Vec<String>> {
    let reasons = status.rules.iter().flat_map(|rule| {
        rule.dead_letter_reasons.iter().map(|(why, count)| vec![rule.name.clone(), count.to_string(), why.clone()])
    });
    reasons.collect()
}

/// The targets that differed from their definition though no change explains it.
fn drift(status: &Status) -> Vec<Vec<String>> {
    let row =
        |rule: &Rule| vec![rule.name.clone(), format!("{} found, {} repaired", rule.drift_found, rule.drift_repaired)];
    status.rules.iter().filter(|rule| rule.drift_found > 0).map(row).collect()
}

fn errors(status: &Status) -> Vec<Vec<String>> {
    let errors = status.errors.iter().take(5).map(|error| {
        let times = if error.count > 1 { format!("{} times", error.count) } else { String::new() };
        let place = error.rule.as_ref().map_or(error.doing.clone(), |rule| format!("{rule}, {}", error.doing));
        vec![format!("{} ago", since(status, error.last)), times, place, error.message.clone()]
    });
    errors.collect()
}

/// Lists the retired fields.
fn left_behind(status: &Status) -> String {
    if status.retired.is_empty() {
        return String::new();
    }
    let row = |field: &RetiredField| vec![field.rule.clone(), format!("{} of {}", field.path, field.collection)];
    let rows: Vec<Vec<String>> = status.retired.iter().map(row).collect();
    format!("\nretired fields: no rule owns them, and they stay until `denormd prune RULE`\n{}", table(&rows))
}

/// The progress of the audits with the longest rounds.
fn audits(status: &Status) -> Vec<Vec<String>> {
    let mut audits: Vec<_> = status.rules.iter().filter_map(|rule| Some((rule, rule.audit.as_ref()?))).collect();
    audits
        .sort_by(|(_, a), (_, b)| b.round_seconds.unwrap_or_default().total_cmp(&a.round_seconds.unwrap_or_default()));
    let line = |(rule, audit): (&Rule, &AuditProgress)| {
        let of = audit.total.map(|total| format!(" of about {total}")).unwrap_or_default();
        let round = audit.round_seconds.map(|seconds| format!("a round takes about {}", duration(seconds)));
        let last = match (audit.last_ended, audit.last_unknown) {
            (None, _) => "no round has ended yet".to_owned(),
            (Some(at), 0) => format!("the last one ended {} ago", since(status, at)),
            (Some(at), unknown) => {
                format!("the last one ended {} ago, {unknown} could not be compared", since(status, at))
            }
        };
        vec![rule.name.clone(), format!("{}{of} documents read", audit.compared), round.unwrap_or_default(), last]
    };
    audits.into_iter().take(AUDITS).map(line).collect()
}

/// Formats the time up to which data is current: `Current as of 2026-11-22 20:31:05 UTC (1795379465.3), except for these
/// rules: a, b`.
pub(super) fn as_of(current: &Current) -> String {
    let seconds = current.as_of.split('.').next().and_then(|seconds| seconds.parse::<i64>().ok()).unwrap_or_default();
    let at = bson::DateTime::from_millis(seconds * 1000).try_to_rfc3339_string().unwrap_or_default();
    let at = format!("{} {}", at.get(..10).unwrap_or_default(), at.get(11..19).unwrap_or_default());
    let except = match current.except.as_slice() {
        [] => String::new(),
        rules => format!(", except for these rules: {}", rules.join(", ")),
    };
    format!("Current as of {at} UTC ({}){except}", current.as_of)
}

/// A note if nothing can be said about the whole deployment, because each instance knows only its own partitions.
pub(super) fn unknown(status: &Status) -> Option<&'static str> {
    let Partitions { of, led, .. } = status.partitions.as_ref()?;
    let shared = u32::try_from(led.len()) != Ok(*of);
    shared.then_some("Current as of: not known while several instances share the partitions")
}

/// The role of the instance: `standby of a:1`.
pub(super) fn role(leadership: &Leadership) -> String {
    match leadership {
        Leadership::Standby { leaders } if !leaders.is_empty() => {
            format!("standby of {}", leadership.leaders().join(" and "))
        }
        Leadership::Unknown { .. } => "leader unknown".to_owned(),
        other => other.name().to_owned(),
    }
}

/// The partitions that the process leads: ` of partitions 0, 2 of 4`.
pub(super) fn led(Partitions { of, led, .. }: &Partitions) -> String {
    let places: Vec<String> = led.iter().map(ToString::to_string).collect();
    match led.len() {
        0 => format!(" of none of {of} partitions"),
        all if u32::try_from(all) == Ok(*of) => format!(" of all {of} partitions"),
        1 => format!(" of partition {} of {of} (the figures are its own)", places.join(", ")),
        _ => format!(" of partitions {} of {of} (the figures are theirs)", places.join(", ")),
    }
}

/// The table of rules, in the config's order.
pub(super) fn rules_table(status: &Status) -> String {
    let head = ["RULE", "STATE", "LAG", "SINCE", "P50", "P99", "BACKFILL", "DEAD"].map(str::to_owned).to_vec();
    let rows = status.rules.iter().map(|rule| {
        vec![
            rule.name.clone(),
            rule.state.replace('_', " "),
            rule.lag_seconds.map_or_else(|| "-".to_owned(), short_lag),
            rule.behind_since.map_or_else(|| "-".to_owned(), |from| format!("{} ago", since(status, from))),
            percentile(rule.propagation.p50),
            percentile(rule.propagation.p99),
            share(&rule.backfill),
            status.dead_letters_text(rule.dead_letters),
        ]
    });
    table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Describes the stale targets of each rule; in one line, if changes are not read yet that may concern many rules.
fn stale_rules(status: &Status) -> Vec<String> {
    let late = |rule: &&Rule| rule.behind_since.is_some();
    let (unread, known): (Vec<&Rule>, Vec<&Rule>) =
        status.rules.iter().filter(late).partition(|rule| rule.late_keys == 0);
    let mut lines: Vec<String> = known.into_iter().map(|rule| stale(status, rule)).collect();
    match (unread.as_slice(), unread.iter().filter_map(|rule| rule.behind_since).min()) {
        ([rule], _) => lines.push(stale(status, rule)),
        (rules, Some(from)) => {
            lines.push(format!(
                "changes that are not read yet may concern {} rules; {}",
                rules.len(),
                oldest(status, from)
            ));
        }
        (_, None) => {}
    }
    lines
}

/// Describes the stale targets of a rule: their number, and their age.
pub(super) fn stale(status: &Status, rule: &Rule) -> String {
    let (name, target, from) = (&rule.name, &rule.target, rule.behind_since.unwrap_or(status.now));
    let what = match (rule.late_keys, rule.keyed_by_target) {
        (0, _) => format!("changes that are not read yet may concern {target}"),
        (1, true) => format!("1 document of {target} is stale"),
        (keys, true) => format!("{keys} documents of {target} are stale"),
        (1, false) => format!("1 changed value is not in {target}: every document there that refers to it is stale"),
        (keys, false) => {
            format!("{keys} changed values are not in {target}: every document there that refers to them is stale")
        }
    };
    format!("{name}: {what}; {}", oldest(status, from))
}

fn oldest(status: &Status, from: i64) -> String {
    let at = bson::DateTime::from_millis(from).try_to_rfc3339_string().unwrap_or_default();
    let at = at.get(11..19).unwrap_or("an unknown time").to_owned();
    format!("the oldest since {at} UTC, {} ago", since(status, from))
}

/// The progress of a backfill in one word.
pub(super) fn share(backfill: &Backfill) -> String {
    match backfill {
        Backfill::None => "-".to_owned(),
        Backfill::Waiting => "waiting".to_owned(),
        Backfill::Running { scanned, total, .. } => {
            let share = total.filter(|total| *total > 0).map(|total| format!("{}%", (scanned * 100 / total).min(100)));
            share.unwrap_or_else(|| scanned.to_string())
        }
    }
}

/// The rate of a backfill and the remaining time; None unless it is running.
pub(super) fn pace(backfill: &Backfill) -> Option<String> {
    let Backfill::Running { per_second, eta_seconds, .. } = backfill else { return None };
    let eta = eta_seconds.map(|eta| format!(", {} to go", duration(eta))).unwrap_or_default();
    Some(format!("{per_second:.0}/s{eta}"))
}

/// Like [`pace`], with the reason for any delay.
pub(super) fn explained_pace(backfill: &Backfill) -> Option<String> {
    let why = match backfill {
        Backfill::Running { held_back: Some(HeldBack::Limit), .. } => ", held back by limits.backfill_per_second",
        Backfill::Running { held_back: Some(HeldBack::MajorityBehind), .. } => ", held back: a majority is behind",
        _ => "",
    };
    Some(format!("{}{why}", pace(backfill)?))
}

/// A percentile as a cell: `-` if there is none.
pub(super) fn percentile(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "-".to_owned(), short)
}

/// A lag as a cell: `0` if there is none.
pub(super) fn short_lag(seconds: f64) -> String {
    if seconds > 0.0 { short(seconds) } else { "0".to_owned() }
}

pub(super) fn short(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1000.0) } else { duration(seconds) }
}

pub(super) fn since(status: &Status, at: i64) -> String {
    lasted(at, status.now)
}

/// The time between two moments in milliseconds since 1970.
pub(super) fn lasted(from: i64, to: i64) -> String {
    duration(ratio(u64::try_from(to - from).unwrap_or_default(), 1000))
}

fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end()).ok();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The golden report, which contains an example of everything.
    fn status() -> Status {
        let reports: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/golden/2/reports.json")).unwrap();
        let status = bson::Bson::try_from(reports[0]["status"].clone()).unwrap();
        serde_json::from_value(status.into_relaxed_extjson()).unwrap()
    }

    #[test]
    fn a_claim_that_no_instance_can_make_is_said_to_be_unknown() {
        let mut status = status();
        assert!(
            text(&status)
                .contains("Current as of 2023-11-14 22:13:20 UTC (1700000000.7), except for these rules: manual")
        );
        status.current = None;
        assert!(text(&status).contains("Current as of: not known while several instances share the partitions\n"));
        status.partitions = None;
        assert!(!text(&status).contains("Current as of"), "it has just started");
    }

    /// `up` stopped at 49 days and 17 hours.
    #[test]
    fn a_time_has_no_upper_limit_and_a_clock_that_is_ahead_does_not_matter() {
        assert_eq!(lasted(1000, 1000 + 60 * 86_400_000), "60 d 0 h");
        assert_eq!(lasted(1500, 3000), "1.5 s");
        assert_eq!(lasted(3000, 1500), "0.0 s");
    }

    /// In an outage the same line was printed for each of a dozen rules.
    #[test]
    fn what_may_concern_many_rules_has_one_line() {
        let mut status = status();
        let late = |late_keys: usize, ago: i64| Rule {
            late_keys,
            behind_since: Some(status.now - ago),
            ..status.rules[0].clone()
        };
        let (one, other, known) = (late(0, 6000), late(0, 8000), late(1, 7000));
        status.rules = vec![one.clone(), known];
        let lines = stale_rules(&status);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].starts_with("pending: changes that are not read yet may concern app."), "{lines:?}");
        status.rules.extend([other]);
        let lines = stale_rules(&status);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[1].starts_with("changes that are not read yet may concern 2 rules; the oldest since "),
            "{lines:?}"
        );
        assert!(lines[1].ends_with(" UTC, 8.0 s ago"), "{lines:?}");
    }

    #[test]
    fn drift_that_was_left_is_told() {
        let mut status = status();
        (status.rules[0].drift_found, status.rules[0].drift_repaired) = (3, 1);
        let text = text(&status);
        assert!(text.contains("\ndrift since the leader was started\n"), "{text}");
        assert!(text.contains("3 found, 1 repaired\n"), "{text}");
    }

    #[test]
    fn reasons_and_retired_fields_are_told_and_rules_keep_their_order() {
        let text = text(&status());
        assert!(text.contains("   reason: no answer in time (db:27017: connection refused)\n"), "{text}");
        assert!(text.contains("  changed  worst of app.t11\n"), "{text}");
        assert!(text.contains("backfill\n  pending  85%  4/s, 0.9 s to go\n"), "{text}");
        let places =
            ["\n  pending  live", "\n  manual   awaiting backfill", "\n  done     live"].map(|row| text.find(row));
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?} {text}");
    }
}
