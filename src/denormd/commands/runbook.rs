//! `denormd runbook`: instructions for an alert, with the running daemon's current values filled in.

use std::{fmt::Write as _, time::Duration};

use crate::{
    cli::Output,
    commands::{Failure, print_as, status},
    server::client,
    status::Status,
};
use denormd_model::text::duration;
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::nearest;

/// The only source of the runbook, published on the web and printed here.
const RUNBOOK: &str = include_str!("../../../deploy/RUNBOOK.md");
/// Time limit for the daemon's answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The time that an oplog should cover, in seconds: a long weekend.
const ENOUGH: f64 = 3.0 * 86_400.0;
/// The least size that `replSetResizeOplog` accepts, in megabytes.
const LEAST: u64 = 990;

/// Prints the section of an alert, or the names of all alerts.
pub async fn runbook(output: Output, alert: Option<&str>, daemon: client::Daemon) -> Result<(), Failure> {
    let Some(alert) = alert else {
        let line = |(name, body): (&str, &str)| format!("{name:<32}{}\n", first(body));
        let text = || sections().map(line).collect();
        print_as(output, text, || sections().map(|(name, _)| name).collect());
        return Ok(());
    };
    let (name, body) = find(alert)?;
    let said = client::get(daemon, "/v1/status", TIMEOUT).await.and_then(|answer| answer.json::<Status>());
    let text = filled(body, said.as_ref().map_err(|error| error.message.as_str()));
    let json = || serde_json::json!({"alert": name, "text": text, "live": said.is_ok()});
    print_as(output, || format!("{name}\n\n{text}\n"), json);
    Ok(())
}

/// The names and bodies of the sections.
fn sections() -> impl Iterator<Item = (&'static str, &'static str)> {
    RUNBOOK.split("\n## ").skip(1).filter_map(|section| section.split_once('\n')).map(|(n, body)| (n, body.trim()))
}

/// The first paragraph, on one line.
fn first(body: &str) -> String {
    let paragraph = body.split("\n\n").find(|paragraph| !paragraph.starts_with("<!--")).unwrap_or_default();
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Finds the section of an alert. Its name may omit `Denormd`, and its case does not matter.
fn find(alert: &str) -> Result<(&'static str, &'static str), Error> {
    let plain = |name: &str| name.to_lowercase().trim_start_matches("denormd").to_owned();
    sections().find(|(name, _)| plain(name) == plain(alert)).ok_or_else(|| {
        let known: Vec<(String, &str)> = sections().map(|(name, _)| (plain(name), name)).collect();
        let names: Vec<&str> = known.iter().map(|(plain, _)| plain.as_str()).collect();
        let nearest = nearest(&plain(alert), &names);
        let meant = known.iter().find(|(plain, _)| Some(plain.as_str()) == nearest);
        let hint = match meant {
            Some((_, name)) => format!("did you mean {name}? `denormd runbook` lists all"),
            None => "`denormd runbook` lists all".to_owned(),
        };
        Error::new(Kind::Config, format!("no alert is called {alert}")).hint(hint)
    })
}

/// Fills in a section: `<!-- now: … -->` becomes the current values, `RULE` the affected rule, and `<MB>` an oplog size
/// that covers three days.
fn filled(body: &str, said: Result<&Status, &str>) -> String {
    let mut out = String::new();
    let mut words = body.lines().filter_map(asked).flat_map(str::split_whitespace);
    let rule = said.ok().and_then(|status| words.find_map(|word| concerned(word, status)));
    let size = said.ok().and_then(enough);
    for line in body.lines() {
        let Some(wanted) = asked(line) else {
            let line = rule.as_ref().map_or_else(|| line.to_owned(), |rule| line.replace("RULE", rule));
            let line = size.map_or_else(|| line.clone(), |size| line.replace("<MB>", &size.to_string()));
            out.push_str(&line);
            out.push('\n');
            continue;
        };
        out.push_str("**Now.**");
        match said {
            Err(why) => writeln!(out, " Nothing is known: {why}").ok(),
            Ok(status) => {
                let now: String = wanted.split_whitespace().map(|word| now(word, status)).collect();
                // One empty line before a table, whatever comes before it.
                let now = now.trim_end().replace("\n\n\n", "\n\n");
                writeln!(out, "{}{now}", if now.starts_with('\n') { "" } else { " " }).ok()
            }
        };
    }
    out.trim_end().to_owned()
}

/// The words of a `<!-- now: … -->` line.
fn asked(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- now:")?.strip_suffix("-->")
}

/// The rule that is affected by `cause=…`.
fn concerned(word: &str, status: &Status) -> Option<String> {
    let cause = word.strip_prefix("cause=")?;
    status.causes.iter().find(|found| found.cause == cause)?.rules.first().cloned()
}

/// The text in place of a figure that this instance does not know.
fn not_known(status: &Status) -> String {
    format!("This instance does not know. {}\n", status.summary)
}

/// The current value for one word of `<!-- now: … -->`.
fn now(word: &str, status: &Status) -> String {
    let list = |lines: Vec<String>, none: &str| match lines.len() {
        0 => format!("{none}\n"),
        _ => format!("\n- {}\n", lines.join("\n- ")),
    };
    match word.split_once('=').unwrap_or((word, "")) {
        ("cause", name) => match status.causes.iter().find(|found| found.cause == name) {
            None if !status.knows_the_rules() => not_known(status),
            None => format!("The cause `{name}` no longer holds.\n"),
            Some(found) => {
                let rules = if found.rules.is_empty() { "every rule".to_owned() } else { found.rules.join(", ") };
                let since = status::since(status, found.since);
                format!("`{name}` has held for {since}, for {rules}.\n")
            }
        },
        ("summary", _) => format!("{} Will data be lost? {}\n", status.summary, status.risk),
        ("causes", _) => list(
            status
                .causes
                .iter()
                .map(|found| format!("`{}`: {}. {}.", found.cause, found.meaning, found.advice))
                .collect(),
            if status.knows_the_rules() { "No cause holds." } else { "It is not known whether a cause holds." },
        ),
        ("rules", _) => format!("\n\n{}", status::rules_table(status)),
        ("oplog", _) => format!("{}\n", oplog(status)),
        ("canary", _) => match status.canary_age_seconds {
            Some(age) => format!("The newest canary that was received was sent {} ago.\n", duration(age)),
            None => "This instance does not lead and sends none.\n".to_owned(),
        },
        ("dead-letters", _) if !status.knows_the_rules() || !status.dead_letters_known && status.dead_letters == 0 => {
            not_known(status)
        }
        ("dead-letters", _) => {
            let dead_letters = status.rules.iter().flat_map(|rule| {
                rule.dead_letter_reasons.iter().map(|(why, count)| format!("{}: {count} times {why}", rule.name))
            });
            list(dead_letters.collect(), "There are none.")
        }
        ("errors", _) => {
            let errors = status.errors.iter().take(5).map(|error| {
                let rule = error.rule.as_ref().map(|rule| format!(" ({rule})")).unwrap_or_default();
                let when = status::since(status, error.last);
                format!("{when} ago, {} times: {}{rule}: {}", error.count, error.doing, error.message)
            });
            list(errors.collect(), "No recent errors.")
        }
        _ => String::new(),
    }
}

fn oplog(status: &Status) -> String {
    let oplog = &status.oplog;
    let size = oplog.size_megabytes.map(|size| format!(" It has {size:.0} MB.")).unwrap_or_default();
    let lost = oplog
        .lost_in_seconds
        .map(|left| format!(" At this rate the checkpoint falls off the oplog in {}.", duration(left)));
    match (oplog.headroom_seconds, &oplog.reason) {
        (Some(headroom), _) => {
            format!("The remaining oplog window is {}.{size}{}", duration(headroom), lost.unwrap_or_default())
        }
        (None, Some(reason)) => format!("The oplog cannot be read: {reason}."),
        (None, None) => "The oplog has not been looked at yet.".to_owned(),
    }
}

/// An oplog size in megabytes that covers three days at the current write rate, and that the server accepts; None if the oplog
/// already covers them.
fn enough(status: &Status) -> Option<u64> {
    let (size, bridged) = (status.oplog.size_megabytes?, status.oplog.bridged_seconds?);
    let wanted = (size * ENOUGH / bridged.max(60.0) / 100.0).ceil() * 100.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size in megabytes")]
    (bridged < ENOUGH).then_some(LEAST.max(wanted as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        serde_json::from_value(serde_json::json!({
            "name": "shop", "version": "1", "role": "leader", "term": 1, "started": 0, "now": 60_000, "level": "critical",
            "summary": "Behind.", "risk": "No.", "lag_seconds": 1.0, "behind_since": null,
            "causes": [{"cause": "removal_limit", "since": 30_000, "rules": ["old-orders", "x"], "meaning": "m", "advice": "a", "severe": true}],
            "rules": [], "streams": [], "queue_depth": 0, "queue_capacity": 1, "events_per_second": 0.0,
            "oplog": {"readable": true, "headroom_seconds": 7200.0, "size_megabytes": 1000.0, "bridged_seconds": 21_600.0},
            "propagation": {"count": 0}, "targets_per_second": 0.0, "checkpoint_age_seconds": 0.0, "dead_letters": 0, "errors": [],
            "canary_age_seconds": 3.0, "insecure": [],
        }))
        .unwrap()
    }

    #[test]
    fn live_values_are_filled_in() {
        let status = status();
        let body = "It is held.\n<!-- now: cause=removal_limit oplog -->\n1. `denormd release RULE`\n2. `size: <MB>`\n";
        let text = filled(body, Ok(&status));
        assert!(text.contains("**Now.** `removal_limit` has held for 30 s, for old-orders, x."), "{text}");
        assert!(text.contains("`denormd release old-orders`") && text.contains("window is 2 h 0 min"), "{text}");
        assert!(text.contains("size: 12000"), "1000 MB bridge six hours: {text}");
        let table = filled("<!-- now: summary causes rules -->", Ok(&status));
        assert!(table.contains("\n\n  RULE") && !table.contains("\n\n\n"), "{table}");
        let table = filled("<!-- now: rules -->", Ok(&status));
        assert!(table.starts_with("**Now.**\n\n  RULE"), "{table}");
        let table = filled("<!-- now: cause=removal_limit rules -->\n`denormd unblock RULE`", Ok(&status));
        assert!(table.contains("\n\n  RULE") && table.ends_with("`denormd unblock old-orders`"), "{table}");
        let uncounted = Status { dead_letters_known: false, ..status.clone() };
        let text = filled("<!-- now: dead-letters -->", Ok(&uncounted));
        assert!(text.contains("This instance does not know."), "{text}");
        let text = filled(body, Err("no denormd answers"));
        assert!(text.contains("Nothing is known: no denormd answers") && text.contains("release RULE"), "{text}");
    }

    #[test]
    fn every_section_asks_for_live_values_that_there_are() {
        let status = status();
        for (name, body) in sections() {
            let asked = body.lines().find_map(asked).unwrap_or_else(|| panic!("{name} says nothing of now"));
            for word in asked.split_whitespace() {
                assert!(!now(word, &status).is_empty(), "{name} asks for {word}");
                let cause = word.strip_prefix("cause=");
                assert!(
                    cause.is_none_or(|cause| denormd_engine::metrics::Cause::ALL
                        .iter()
                        .any(|known| known.name() == cause)),
                    "{word}"
                );
            }
            assert!(!filled(body, Ok(&status)).contains("<!--"), "{name}");
            assert!(!first(body).is_empty(), "{name}");
        }
    }

    #[test]
    fn an_alert_is_found_without_its_prefix_and_a_slip_is_named() {
        assert_eq!(find("DenormdBehind").unwrap().0, "DenormdBehind");
        assert_eq!(find("behind").unwrap().0, "DenormdBehind");
        let error = find("DenormdBehnid").unwrap_err();
        assert!(error.hint.is_some_and(|hint| hint.contains("did you mean DenormdBehind?")));
        assert_eq!(find("Foo").unwrap_err().hint.as_deref(), Some("`denormd runbook` lists all"));
    }

    #[test]
    fn a_summary_is_a_whole_paragraph() {
        assert_eq!(first("<!-- now: oplog -->\n\nOne line\nand another.\n\nMore."), "One line and another.");
        for (name, body) in sections() {
            let first = first(body);
            assert!(first.ends_with(['.', ')', ':']), "{name}: {first}");
        }
    }
}
