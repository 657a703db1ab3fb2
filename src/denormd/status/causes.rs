//! The causes why copies are late or may be wrong.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use denormd_engine::{
    leadership::TAKE_LEASE,
    metrics::{Cause, Metrics, RECONCILE, RecentError},
    pipeline::SAVE_POSITION,
    snapshot::Snapshot,
    unavailable::UNAVAILABLE,
};
use denormd_model::{
    clock::millis,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::Kind;

use super::{
    State,
    lag::{BEHIND, Lags},
    leadership::{Leadership, SILENCE as SILENT},
};

/// Silence after which a server, a stream or a loop counts as stopped.
const SILENCE: Duration = Duration::from_secs(15);
/// Time for which an error counts as current.
const RECENT: Duration = Duration::from_secs(30);
/// Time without an acknowledged write after which, while a rule is behind, the server counts as slow.
const SLOW: Duration = Duration::from_secs(5);
/// Lag of the majority behind the primary from which it counts as absent. The server's flow control begins there.
const NO_MAJORITY: Duration = Duration::from_secs(10);
/// Headroom, in seconds, below which the oplog counts as short while a rule is behind or the checkpoint is old.
const SHORT: f64 = 3600.0;
/// The lag must exceed this fraction (one in …) of the headroom for the oplog to count as short. The oplog of a new server
/// covers only the time since the server was started, and there a lag of seconds is no danger.
const SHARE: f64 = 20.0;
/// Seconds until the checkpoint falls off the oplog, below which the oplog counts as short.
const SHORT_TIME_TO_LOSS: f64 = 4.0 * 3600.0;

/// Age, in seconds, from which a checkpoint counts as old: one is saved every second.
const OLD_CHECKPOINT: f64 = 60.0;
/// Age of a late canary, in milliseconds: one is sent every ten seconds, so five have not arrived.
const LATE_CANARY: i64 = 60_000;

/// A cause, and the rules that it affects (all, if none is named).
#[derive(Debug, Clone, PartialEq)]
pub struct ActiveCause {
    /// The cause.
    pub cause: Cause,
    /// The names of the rules.
    pub rules: Vec<String>,
    /// Its beginning, in milliseconds since 1970, if that is known more exactly than from the time it was found.
    pub since: Option<i64>,
}

/// The current causes, the most urgent first.
pub(super) fn find(
    metrics: &Metrics,
    state: &State,
    leadership: &Leadership,
    (seen, lags): (Option<&Snapshot>, &Lags),
    now: i64,
) -> Vec<ActiveCause> {
    let mut found = of_the_instance(metrics, state, leadership, now);
    if let Some(seen) = seen {
        let no_primary = found.contains_key(&Cause::NoPrimary);
        of_the_rules(metrics, state, (seen, lags), no_primary, now, &mut found);
    }
    let place = |name: &String| seen?.rules.iter().position(|rule| rule.name == *name);
    for found in found.values_mut() {
        // The config's order, as in every list of rules.
        found.rules.sort_by_key(place);
    }
    Cause::ALL.into_iter().filter_map(|cause| found.remove(&cause)).collect()
}

/// Causes that any instance finds by itself, leading or not.
fn of_the_instance(
    metrics: &Metrics,
    state: &State,
    leadership: &Leadership,
    now: i64,
) -> BTreeMap<Cause, ActiveCause> {
    let mut found = BTreeMap::new();
    let mut say = |cause: Cause, rules: Vec<String>, since: Option<i64>| {
        found.insert(cause, ActiveCause { cause, rules, since });
    };
    let answered = state.probes.answered().unwrap_or(state.times.began).elapsed();
    if answered >= SILENT && state.unanswered.as_ref().is_none_or(|(kind, _)| kind.means_no_answer()) {
        let age = millis(answered);
        say(Cause::NoPrimary, Vec::new(), Some(now - age));
    } else if let Leadership::Unknown { since } = leadership {
        say(Cause::LeaseUnreadable, Vec::new(), Some(*since));
    } else if *leadership == (Leadership::Standby { leaders: Vec::new() })
        && recent(metrics).any(|line| line.doing == TAKE_LEASE)
    {
        say(Cause::LeaseUnreadable, Vec::new(), None);
    }
    // Renewing the lease needs a majority: without one, no instance leads, and none meets an error.
    if state.majority_lag >= NO_MAJORITY {
        say(Cause::NoMajority, Vec::new(), None);
    }
    if met(metrics, &[Kind::Privilege]) || state.unanswered.as_ref().is_some_and(|(kind, _)| *kind == Kind::Privilege) {
        say(Cause::Privilege, rules_with_error(metrics, Kind::Privilege), None);
    }
    if !metrics.config_is_in_force() {
        say(Cause::ConfigRefused, Vec::new(), None);
    }
    found
}

/// Causes that follow from the state of the pipelines.
fn of_the_rules(
    metrics: &Metrics,
    state: &State,
    (seen, lags): (&Snapshot, &Lags),
    no_primary: bool,
    now: i64,
    found: &mut BTreeMap<Cause, ActiveCause>,
) {
    let mut say = |cause: Cause, rules: Vec<String>| found.insert(cause, ActiveCause { cause, rules, since: None });
    let behind: Vec<String> = lags.rules.iter().filter(|rule| rule.is_behind()).map(|rule| rule.name.clone()).collect();
    let runs = !state.attached.is_empty();
    let full = seen.full;
    if runs && state.since_turn() > SILENCE && !no_primary {
        say(Cause::Stalled, Vec::new());
    }
    let interrupted = seen.streams.iter().any(|stream| stream.delivered.elapsed() > SILENCE);
    if runs && interrupted && !no_primary && !full {
        say(Cause::StreamInterrupted, Vec::new());
    }
    if met(metrics, &[Kind::NotReplicated]) {
        say(Cause::NoMajority, rules_with_error(metrics, Kind::NotReplicated));
    }
    for (cause, rules) in of_rule_states(seen).into_iter().filter(|(_, rules)| !rules.is_empty()) {
        say(cause, names(seen, &rules));
    }
    for cause in of_the_oplog(metrics, state, lags, !behind.is_empty(), no_primary) {
        say(cause, Vec::new());
    }
    if behind.is_empty() && !no_primary && state.canary.as_ref().is_some_and(|canary| canary.age(now) > LATE_CANARY) {
        say(Cause::CanaryLate, Vec::new());
    }
    if !behind.is_empty() && !no_primary {
        for (cause, rules) in of_late_rules(metrics, state, (seen, lags), &behind, interrupted) {
            say(cause, rules);
        }
    }
    if full {
        say(Cause::Throttled, Vec::new());
    }
    if let Some(of_rules) = state.dead_letters.as_ref().filter(|of_rules| !of_rules.is_empty()) {
        say(Cause::DeadLetters, of_rules.keys().cloned().collect());
    }
    if !seen.unrepaired.is_empty() {
        say(Cause::DriftUnrepaired, seen.unrepaired.keys().cloned().collect());
    }
}

/// Causes that concern the position in the oplog.
fn of_the_oplog(metrics: &Metrics, state: &State, lags: &Lags, is_late: bool, no_primary: bool) -> Vec<Cause> {
    let headroom = state.oplog.headroom_seconds.unwrap_or(f64::INFINITY);
    let lost_in = state.oplog.lost_in_seconds.unwrap_or(f64::INFINITY);
    let is_old = lags.checkpoint >= OLD_CHECKPOINT;
    let oldest = lags.checkpoint.max(lags.overall.unwrap_or_default());
    let is_unsaved = || recent(metrics).any(|line| line.doing == SAVE_POSITION);
    let mut causes = Vec::new();
    if (is_old || is_late) && is_short(headroom, lost_in, oldest) {
        causes.push(Cause::OplogShort);
    }
    if is_old && !no_primary && is_unsaved() {
        causes.push(Cause::CheckpointUnsaved);
    }
    if state.oplog.readable == Some(false) {
        causes.push(Cause::OplogUnreadable);
    }
    causes
}

/// Reasons why these rules are behind, while the server has a primary.
fn of_late_rules(
    metrics: &Metrics,
    state: &State,
    (seen, lags): (&Snapshot, &Lags),
    behind: &[String],
    interrupted: bool,
) -> Vec<(Cause, Vec<String>)> {
    let is_silent = seen.last_write.is_none_or(|since| since.elapsed() > SLOW);
    let slow = met(metrics, &[Kind::TimedOut, Kind::ReadTimedOut]) || state.history.write_seconds(metrics) > 1.0;
    let failing: Vec<String> = failing(metrics).into_iter().filter(|rule| behind.contains(rule)).collect();
    let mut causes = Vec::new();
    if !failing.is_empty() {
        causes.push((Cause::Retrying, failing));
    } else if is_silent && metrics.in_flight() > 0 || slow {
        causes.push((Cause::ServerSlow, behind.to_vec()));
    } else if seen.keys <= 2 && metrics.in_flight() > 0 {
        causes.push((Cause::HotKey, behind.to_vec()));
    }
    if lags.unread >= BEHIND && !interrupted {
        causes.push((Cause::CatchingUp, behind.to_vec()));
    }
    causes
}

/// Causes that are the states of rules, with these rules.
fn of_rule_states(seen: &Snapshot) -> [(Cause, BTreeSet<usize>); 8] {
    [
        (Cause::Degraded, seen.degraded.clone()),
        (Cause::SourceGone, seen.in_state(|state| *state == RuleState::Blocked(BlockReason::SourceGone))),
        (Cause::RemovalLimit, seen.in_state(|state| *state == RuleState::Blocked(BlockReason::RemovalLimit))),
        (Cause::Adoption, seen.in_state(|state| matches!(state, RuleState::Blocked(BlockReason::Adoption(_))))),
        (Cause::Unavailable, seen.in_state(|state| matches!(state, RuleState::Unavailable { .. }))),
        (Cause::Paused, seen.in_state(|state| matches!(state, RuleState::Paused { .. }))),
        (Cause::Backfilling, seen.in_state(RuleState::is_backfilling)),
        (Cause::AwaitingBackfill, seen.in_state(|state| *state == RuleState::AwaitingBackfill)),
    ]
}

fn names(seen: &Snapshot, rules: &BTreeSet<usize>) -> Vec<String> {
    rules.iter().filter_map(|rule| seen.rules.get(*rule)).map(|rule| rule.name.clone()).collect()
}

/// The errors that count as current. What an unavailable rule lacks is its state, and stops no other rule.
fn recent(metrics: &Metrics) -> impl Iterator<Item = RecentError> {
    metrics.errors_within(RECENT).into_iter().filter(|line| line.doing != UNAVAILABLE)
}

/// True if an error of one of these kinds counts as current.
fn met(metrics: &Metrics, kinds: &[Kind]) -> bool {
    recent(metrics).any(|line| kinds.iter().any(|kind| kind.policy().name == line.reason))
}

/// Rules with a recent error that is being retried.
fn failing(metrics: &Metrics) -> BTreeSet<String> {
    recent(metrics).filter(|line| line.doing == RECONCILE).filter_map(|line| line.rule).collect()
}

/// Rules with a recent error of this kind. Old errors stay in the list, but are no longer causes.
fn rules_with_error(metrics: &Metrics, kind: Kind) -> Vec<String> {
    let name = kind.policy().name;
    let rules = recent(metrics).filter(|line| line.reason == name).filter_map(|line| line.rule);
    rules.collect::<BTreeSet<_>>().into_iter().collect()
}

/// True if the checkpoint may soon fall off the oplog: by its headroom, the time until it is lost at the present rate, and its
/// lag, all in seconds.
fn is_short(headroom: f64, lost_in: f64, lag: f64) -> bool {
    (headroom < SHORT && headroom < SHARE * lag) || lost_in < SHORT_TIME_TO_LOSS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oplog_is_short_for_a_lag_that_uses_up_a_part_of_it() {
        assert!(!is_short(600.0, f64::INFINITY, 3.0), "a burst on a new server");
        assert!(is_short(600.0, f64::INFINITY, 60.0));
        assert!(!is_short(20.0 * 3600.0, f64::INFINITY, 7200.0));
        assert!(is_short(20.0 * 3600.0, 3600.0, 3.0), "the checkpoint falls behind");
        assert!(is_short(0.0, f64::INFINITY, 3.0));
    }
}
