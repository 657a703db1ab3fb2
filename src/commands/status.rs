//! `denormd status`

use std::{fmt::Write as _, net::SocketAddr, time::Duration};

use crate::{
    cli::Output,
    commands::{Failure, print},
    config::Loaded,
    metrics::HeldBack,
    server::client,
    status::{Backfill, Partitions, Role, Rule, Status, duration},
};

/// How long the daemon may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Prints what the running daemon says. Fails when none answers.
pub async fn status(loaded: &Loaded, output: Output, address: Option<SocketAddr>) -> Result<(), Failure> {
    let answer = client::get(address.unwrap_or(loaded.config.http.listen), "/v1/status", PATIENCE).await?;
    match output {
        Output::Text => print(&text(&answer.json()?)),
        Output::Json => print(&format!("{:#}\n", answer.json::<serde_json::Value>()?)),
    }
    Ok(())
}

/// First what is wrong and what to do, then the table.
fn text(status: &Status) -> String {
    let mut out = format!("{}\n", status.summary);
    if status.role == Role::Leader {
        writeln!(out, "Will data be lost? {}", status.risk).ok();
    }
    for rule in status.rules.iter().filter(|rule| rule.behind_since.is_some()) {
        writeln!(out, "   {}", stale(status, rule)).ok();
    }
    for option in &status.insecure {
        writeln!(out, "\n!! INSECURE: {option} is set: the server's certificate is not verified").ok();
        writeln!(out, "   what to do: give tlsCAFile instead").ok();
    }
    for cause in &status.causes {
        let rules = if cause.rules.is_empty() { String::new() } else { format!(" ({})", cause.rules.join(", ")) };
        let mark = if cause.severe { "!!" } else { " *" };
        writeln!(out, "\n{mark} {}, for {}: {}{rules}", cause.cause, since(status, cause.since), cause.meaning).ok();
        writeln!(out, "   what to do: {}", cause.advice).ok();
    }
    if !status.rules.is_empty() {
        out.push('\n');
        out.push_str(&table(&rules(status)));
    }
    writeln!(
        out,
        "\n{} {}{}, {} waiting, {:.1} targets/s, {:.1} events/s, restart replays {}, up {}",
        status.name,
        match status.role {
            Role::Starting => "starting",
            Role::Leader => "leader",
            Role::Standby => "standby",
        },
        status.partitions.as_ref().map(led).unwrap_or_default(),
        status.queue_depth,
        status.targets_per_second,
        status.events_per_second,
        duration(status.checkpoint_age_seconds),
        since(status, status.started),
    )
    .ok();
    if let Some(age) = status.canary_age_seconds {
        writeln!(out, "the last write of its own that came through was sent {} ago", duration(age)).ok();
    }
    let reasons = status.rules.iter().flat_map(|rule| {
        rule.dead_letter_reasons.iter().map(|(why, count)| vec![rule.name.clone(), count.to_string(), why.clone()])
    });
    let reasons: Vec<Vec<String>> = reasons.collect();
    if !reasons.is_empty() {
        writeln!(out, "\ndead letters").ok();
        out.push_str(&table(&reasons));
    }
    if !status.errors.is_empty() {
        writeln!(out, "\nrecent errors").ok();
        let errors = status.errors.iter().take(5).map(|error| {
            let times = if error.count > 1 { format!("{} times", error.count) } else { String::new() };
            let place = error.rule.as_ref().map_or(error.doing.clone(), |rule| format!("{rule}, {}", error.doing));
            vec![format!("{} ago", since(status, error.last)), times, place, error.message.clone()]
        });
        out.push_str(&table(&errors.collect::<Vec<_>>()));
    }
    out
}

/// Which partitions the process leads: ` of partitions 0, 2 of 4`.
fn led(Partitions { of, led }: &Partitions) -> String {
    let places: Vec<String> = led.iter().map(ToString::to_string).collect();
    match led.len() {
        0 => format!(" of none of {of} partitions"),
        all if u32::try_from(all) == Ok(*of) => format!(" of all {of} partitions"),
        1 => format!(" of partition {} of {of} (the figures are its own)", places.join(", ")),
        _ => format!(" of partitions {} of {of} (the figures are theirs)", places.join(", ")),
    }
}

/// The rules, the worst first.
pub(super) fn rules_table(status: &Status) -> String {
    table(&rules(status))
}

fn rules(status: &Status) -> Vec<Vec<String>> {
    let head = ["RULE", "LAG", "SINCE", "P50", "P99", "BACKFILL", "DEAD"].map(str::to_owned).to_vec();
    let percentile = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
    let mut sorted: Vec<_> = status.rules.iter().collect();
    // The worst first; of equals, the config's order.
    sorted.sort_by(|a, b| b.lag_seconds.total_cmp(&a.lag_seconds));
    let rows = sorted.into_iter().map(|rule| {
        vec![
            rule.name.clone(),
            if rule.lag_seconds > 0.0 { short(rule.lag_seconds) } else { "0".to_owned() },
            rule.behind_since.map_or_else(|| "-".to_owned(), |from| format!("{} ago", since(status, from))),
            percentile(rule.propagation.p50),
            percentile(rule.propagation.p99),
            backfill(&rule.backfill),
            rule.dead_letters.to_string(),
        ]
    });
    std::iter::once(head).chain(rows).collect()
}

/// How many targets are stale, since when, on which rule.
fn stale(status: &Status, rule: &Rule) -> String {
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
    let at = bson::DateTime::from_millis(from).try_to_rfc3339_string().unwrap_or_default();
    let at = at.get(11..19).unwrap_or("an unknown time").to_owned();
    format!("{name}: {what}; the oldest since {at} UTC, {} ago", since(status, from))
}

fn backfill(backfill: &Backfill) -> String {
    match backfill {
        Backfill::None => "-".to_owned(),
        Backfill::Waiting => "waiting".to_owned(),
        Backfill::Running { scanned, total, per_second, eta_seconds, held_back } => {
            let share = total.filter(|total| *total > 0).map(|total| format!("{}%", (scanned * 100 / total).min(100)));
            let eta = eta_seconds.map(|eta| format!(", {} to go", duration(eta))).unwrap_or_default();
            let why = match held_back {
                Some(HeldBack::Limit) => ", held back by limits.backfill_per_second",
                Some(HeldBack::MajorityBehind) => ", held back: a majority is behind",
                None => "",
            };
            format!("{}, {per_second:.0}/s{eta}{why}", share.unwrap_or_else(|| scanned.to_string()))
        }
    }
}

fn short(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1000.0) } else { duration(seconds) }
}

fn since(status: &Status, at: i64) -> String {
    let millis = u32::try_from((status.now - at).max(0)).unwrap_or(u32::MAX);
    duration(f64::from(millis) / 1000.0)
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
