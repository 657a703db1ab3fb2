//! The summary: the leadership, the rules that do not run, and the lag. Pure.

use denormd_engine::metrics::Cause;

use super::{
    lag::{BEHIND, seconds},
    leadership::Leadership,
    report::{CauseReport, Partitions, Rule, SHADOW, Status},
};
use denormd_model::text::duration;

/// Rules named in a sentence.
const NAMED: usize = 3;

/// The status in a few sentences.
pub fn summary(status: &Status) -> String {
    let mut sentences = Vec::new();
    if let Some(cause) = cause(status, Cause::NoPrimary) {
        let since = duration(seconds(status.now - cause.since));
        sentences.push(format!("No primary of the replica set has answered for {since}."));
    } else {
        let heard = status.heard_seconds.is_some_and(|heard| heard < BEHIND);
        let waiting = waiting(status).filter(|_| !heard);
        sentences.extend(waiting.or_else(|| status.leadership.sentence()));
    }
    if let (Leadership::Standby { .. }, Some(heard)) =
        (&status.leadership, status.heard_seconds.filter(|s| *s >= BEHIND))
    {
        sentences.push(format!("Its figures are {} old.", duration(heard)));
    }
    if status.follows_other_rules() {
        sentences.push("The leader's rules differ from those in this instance's config.".to_owned());
    }
    if cause(status, Cause::ConfigRefused).is_some() {
        sentences.push("The changed config is refused; the old rules stay in force.".to_owned());
    }
    sentences.extend(standing_still(status));
    sentences.extend(in_shadow(status));
    let lag = lag(status);
    let partly = of_partitions(status).filter(|_| lag.is_some());
    sentences.extend(unreported(status).into_iter().chain(lag).chain(partly));
    if sentences.is_empty() {
        let is_idle = status.rules.is_empty();
        return if is_idle { "Leading: the config has no rules." } else { "Leading: the lag is not known yet." }
            .to_owned();
    }
    sentences.join(" ")
}

/// The role of a standby whose leader has not been heard, so that it may be dead.
fn waiting(status: &Status) -> Option<String> {
    let Leadership::Standby { leaders } = &status.leadership else { return None };
    let until = leaders.iter().map(|leader| leader.until).max()?;
    let left = duration(seconds((until - status.now).max(0)));
    let names = status.leadership.leaders().join(" and ");
    Some(if leaders.len() == 1 {
        format!("Standing by: waiting for the lease of {names}, which expires in {left} unless renewed.")
    } else {
        format!("Standing by: waiting for the leases of {names}, which expire within {left} unless renewed.")
    })
}

/// The restriction of what a leader of some of several partitions says.
fn of_partitions(status: &Status) -> Option<String> {
    let partitions = status.partitions.as_ref()?;
    let led = u32::try_from(partitions.led.len()).ok()?;
    let is_partial = matches!(status.leadership, Leadership::Leader { .. }) && led < partitions.of;
    is_partial.then(|| format!("This holds for the {led} of {} partitions that this instance leads.", partitions.of))
}

/// The partitions of which a standby knows nothing.
fn unreported(status: &Status) -> Option<String> {
    let Partitions { of, unreported, .. } = status.partitions.as_ref()?;
    let places: Vec<String> = unreported.iter().map(u32::to_string).collect();
    let word = if places.len() == 1 { "partition" } else { "partitions" };
    let places = (!places.is_empty()).then(|| places.join(", "))?;
    Some(format!(
        "No leader has reported that it runs {word} {places} (of 0 to {}): the lag is not known.",
        of.saturating_sub(1)
    ))
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
        (Cause::AwaitingBackfill, "waiting for `denormd backfill`"),
    ];
    let sentence = |(state, word): (Cause, &str)| {
        let rules = &cause(status, state)?.rules;
        Some(match rules.len() {
            0 => return None,
            1 => format!("Rule {} is {word}.", rules[0]),
            all if all == status.rules.len() => format!("Every rule is {word}."),
            many => {
                let word = word.replace("its", "their");
                format!("{many} of {} rules are {word}: {}.", status.rules.len(), named(rules, NAMED))
            }
        })
    };
    states.into_iter().filter_map(sentence).collect()
}

/// The rules that write nothing.
fn in_shadow(status: &Status) -> Option<String> {
    let rules: Vec<String> =
        status.rules.iter().filter(|rule| rule.state == SHADOW).map(|rule| rule.name.clone()).collect();
    match rules.len() {
        0 => None,
        all if all == status.rules.len() => Some("Every rule is in shadow: nothing is written.".to_owned()),
        1 => Some(format!("Rule {} is in shadow: it writes nothing.", rules[0])),
        many => Some(format!(
            "{many} of {} rules are in shadow and write nothing: {}.",
            status.rules.len(),
            named(&rules, NAMED)
        )),
    }
}

/// The names of the first `most` rules, and the number of the others: `a, b and 7 more`.
pub fn named(rules: &[String], most: usize) -> String {
    let more = rules.len().saturating_sub(most);
    let named = rules.iter().take(most).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { named } else { format!("{named} and {more} more") }
}

/// The lag of the rules that have one; None if none has, or nothing is known.
fn lag(status: &Status) -> Option<String> {
    let overall = status.lag_seconds?;
    let own = |rule: &Rule| rule.lag_seconds.unwrap_or_default();
    let mut late: Vec<&Rule> = status.rules.iter().filter(|rule| own(rule) >= BEHIND).collect();
    late.sort_by(|a, b| own(b).total_cmp(&own(a)));
    let Some(worst) = late.first() else {
        let has = |found| cause(status, found).is_some();
        let is_copied = |rule: &Rule| rule.lag_seconds.is_some() && rule.state != SHADOW;
        if !status.rules.is_empty() && !status.rules.iter().any(is_copied) {
            return None;
        }
        let is_known = !has(Cause::NoPrimary) && status.leadership.has_leader();
        return Some(if has(Cause::Degraded) {
            "Changes were lost; copies may be wrong until the backfill ends.".to_owned()
        } else if !is_known {
            return None;
        } else if has(Cause::Backfilling) {
            "Changes are applied as they come; existing data is being brought up to date.".to_owned()
        } else if has(Cause::CanaryLate) {
            "It is not known whether changes arrive: no canary has arrived for over a minute.".to_owned()
        } else if has(Cause::DeadLetters) {
            "Not behind. Some documents could not be written and became dead letters.".to_owned()
        } else if !status.dead_letters_known {
            "Not behind. It is not known yet whether there are dead letters.".to_owned()
        } else if has(Cause::DriftUnrepaired) {
            "Not behind. Some targets differ from their definition and are not repaired.".to_owned()
        } else if overall > 0.0 || status.rules.iter().any(|rule| rule.late_keys > 0) {
            "Not behind: changes are applied within seconds.".to_owned()
        } else if !status.rules.iter().all(is_copied) {
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

#[cfg(test)]
mod tests {
    use denormd_engine::deployment::lease::Holder;

    use super::{
        super::{
            report::Oplog,
            shared::{Report, Shared},
        },
        *,
    };

    fn status() -> Status {
        let reports: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/golden/2/reports.json")).unwrap();
        let status = bson::Bson::try_from(reports[0]["status"].clone()).unwrap();
        Status { partitions: None, ..serde_json::from_value(status.into_relaxed_extjson()).unwrap() }
    }

    /// The status of a leader whose rules are all live and up to date.
    fn all_live() -> Status {
        let mut status = Status { leadership: Leadership::Leader { term: 1 }, lag_seconds: Some(0.0), ..status() };
        status.causes.clear();
        for rule in &mut status.rules {
            (rule.lag_seconds, rule.late_keys, rule.state) = (Some(0.0), 0, "live".to_owned());
        }
        status
    }

    #[test]
    fn dead_letters_that_were_not_counted_are_not_said_to_be_none() {
        let uncounted = Status { dead_letters: 0, dead_letters_known: false, ..all_live() };
        assert!(summary(&uncounted).starts_with("Not behind. It is not known yet whether there are dead letters."));
        assert_eq!(uncounted.dead_letters_text(0), "-");
        assert_eq!(all_live().dead_letters_text(0), "0");
    }

    #[test]
    fn a_leader_of_some_partitions_does_not_speak_for_the_others() {
        let mut status = status();
        status.causes.clear();
        status.partitions = Some(Partitions { of: 4, led: vec![0, 2], unreported: Vec::new() });
        let summary = summary(&status);
        assert!(summary.ends_with("This holds for the 2 of 4 partitions that this instance leads."), "{summary}");
    }

    /// While one partition had no leader yet, a standby said that every change was applied.
    #[test]
    fn leaders_of_some_partitions_do_not_vouch_for_the_others() {
        let leader = |places: &[u32]| Status {
            partitions: Some(Partitions { of: 3, led: places.to_vec(), unreported: Vec::new() }),
            ..all_live()
        };
        let lags = |status: Status| {
            let report = Some(Report { at: 0, status: Box::new(status) });
            Shared { report, ..Shared::default() }.lags(0)
        };
        let whole = leader(&[0]).joined(leader(&[2, 1]));
        assert_eq!((whole.not_led(), lags(whole).overall), (vec![], Some(0.0)));
        let partly = leader(&[0]).joined(leader(&[2]));
        assert_eq!(partly.not_led(), [1]);
        let lags = lags(partly);
        assert_eq!(lags.overall, None);
        assert!(lags.rules.iter().all(|rule| !rule.is_known && rule.chain.is_none()));
        let standby = Status {
            lag_seconds: None,
            partitions: Some(Partitions { of: 3, led: vec![], unreported: vec![1] }),
            ..all_live()
        };
        let summary = summary(&standby);
        let sentence = "No leader has reported that it runs partition 1 (of 0 to 2): the lag is not known.";
        assert!(summary.contains(sentence), "{summary}");
    }

    /// A standby's risk was once that of the first leader, while another one was about to lose its position.
    #[test]
    fn of_several_leaders_the_one_at_risk_is_reported() {
        let leader = |headroom: Option<f64>, risk: &str| {
            let mut status = status();
            status.oplog = Oplog { readable: Some(true), headroom_seconds: headroom, ..Oplog::default() };
            status.risk = risk.to_owned();
            status
        };
        let cases =
            [(Some(9000.0), Some(20.0), "second"), (Some(20.0), Some(9000.0), "first"), (Some(20.0), None, "second")];
        for (first, second, expected) in cases {
            let joined = leader(first, "first").joined(leader(second, "second"));
            assert_eq!(joined.risk, expected);
            assert_eq!(joined.oplog.headroom_seconds, if expected == "first" { first } else { second });
        }
    }

    /// A daemon that was killed and started again said that its dead predecessor leads.
    #[test]
    fn a_leader_that_is_not_heard_is_only_known_by_its_lease() {
        let mut status = status();
        let holder = |name: &str, left: i64| Holder {
            instance: name.to_owned(),
            id: String::new(),
            term: 1,
            since: 0,
            until: status.now + left,
        };
        let (one, other) = (holder("a:1", 8000), holder("b:2", 3000));
        status.leadership = Leadership::Standby { leaders: vec![one.clone()] };
        (status.heard_seconds, status.causes, status.rules, status.lag_seconds) = (None, Vec::new(), Vec::new(), None);
        assert_eq!(
            summary(&status),
            "Standing by: waiting for the lease of a:1, which expires in 8.0 s unless renewed."
        );
        status.heard_seconds = Some(1.0);
        assert_eq!(summary(&status), "Standing by: a:1 leads.");
        status.heard_seconds = Some(7.0);
        status.leadership = Leadership::Standby { leaders: vec![one, other] };
        assert_eq!(
            summary(&status),
            "Standing by: waiting for the leases of a:1 and b:2, which expire within 8.0 s unless renewed. Its figures are 7.0 s old."
        );
        status.leadership = Leadership::Standby { leaders: Vec::new() };
        status.heard_seconds = None;
        assert_eq!(summary(&status), "Standing by: no instance leads at the moment.");
    }

    /// After a failover to a server whose clock is behind, the lag of a change that is not applied yet is 0.
    #[test]
    fn a_change_that_is_not_applied_is_not_called_applied() {
        let mut status = all_live();
        assert_eq!(summary(&status), "Not behind: every change is applied.");
        status.rules[0].late_keys = 1;
        assert_eq!(summary(&status), "Not behind: changes are applied within seconds.");
    }

    /// Rules that write nothing were called live, and every change applied.
    #[test]
    fn rules_in_shadow_are_named() {
        let mut status = all_live();
        status.rules[0].state = SHADOW.to_owned();
        let name = &status.rules[0].name;
        assert_eq!(
            summary(&status),
            format!("Rule {name} is in shadow: it writes nothing. The other rules are not behind.")
        );
        for rule in &mut status.rules[1..] {
            (rule.lag_seconds, rule.state) = (None, "paused".to_owned());
        }
        assert_eq!(summary(&status), format!("Rule {} is in shadow: it writes nothing.", status.rules[0].name));
        status.rules.truncate(1);
        assert_eq!(summary(&status), "Every rule is in shadow: nothing is written.");
    }

    /// A standby whose leader is gone said that every change is applied.
    #[test]
    fn nothing_is_claimed_while_nobody_leads() {
        let mut status = status();
        status.causes.clear();
        (status.heard_seconds, status.lag_seconds) = (Some(1.0), Some(0.0));
        status.leadership = Leadership::Standby { leaders: Vec::new() };
        assert_eq!(summary(&status), "Standing by: no instance leads at the moment.");
        assert!(!status.knows_the_rules());
    }

    /// Beside "No primary of the replica set has answered for 4.0 s" stood "Not behind".
    #[test]
    fn nothing_is_claimed_while_no_primary_answers() {
        let mut status = status();
        status.leadership = Leadership::Leader { term: 1 };
        status.lag_seconds = Some(4.0);
        for rule in &mut status.rules {
            rule.lag_seconds = Some(4.0);
        }
        status.causes.truncate(1);
        let cause = |cause: Cause| cause.name().to_owned();
        status.causes[0] =
            CauseReport { cause: cause(Cause::CatchingUp), since: status.now - 4000, ..status.causes[0].clone() };
        assert_eq!(summary(&status), "Not behind: changes are applied within seconds.");
        status.causes[0].cause = cause(Cause::NoPrimary);
        assert_eq!(summary(&status), "No primary of the replica set has answered for 4.0 s.");
        status.causes[0].cause = cause(Cause::LeaseUnreadable);
        status.leadership = Leadership::Unknown { since: status.now - 4000 };
        assert_eq!(summary(&status), "Leader unknown: the lease cannot be read or renewed.");
    }
}
