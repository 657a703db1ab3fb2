//! Composes the status from the readings of the board, the pipeline's snapshot, and the leader's last report.

use std::collections::{BTreeMap, BTreeSet};

use denormd_engine::{
    deployment::instances::Instance,
    metrics::{Cause, Metrics},
    snapshot::Snapshot,
};
use denormd_model::{distribution::ratio, rule_state::RuleState, text::duration};

use super::{
    Board, State, View,
    causes::ActiveCause,
    currency::Claim,
    history::Recent,
    lag::{BEHIND, millis, seconds},
    leadership::Leadership,
    report::{Backfill, CauseReport, Current, InstanceReport, Level, Partitions, Rule, SHADOW, Status, Stream},
    sentence,
    shared::Report,
};

/// A remaining oplog window below which the oplog counts as thin, in seconds.
const THIN: f64 = 4.0 * 3600.0;

pub(super) fn status(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let own = own(board, state, view, now);
    let status = match &state.shared.report {
        Some(report) if view.snapshot.is_none() => passed_on(own, report, view, now),
        _ => own,
    };
    let level = level(&status);
    let summary = sentence::summary(&status);
    let risk = match status.heard_seconds.filter(|silence| *silence >= BEHIND) {
        _ if unanswered(&status) => unknown_risk(&status, "while no primary answers"),
        Some(silence) => {
            unknown_risk(&status, &format!("because the leader has not reported for {}", duration(silence)))
        }
        None => status.risk.clone(),
    };
    Status { level, summary, risk, ..status }
}

/// The status that this instance knows by itself. Level and summary are derived from the rest.
fn own(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let metrics = &board.metrics;
    let seen = view.snapshot.as_ref();
    let (events_per_second, targets_per_second) = state.history.rates(metrics, now);
    let recent = state.history.recent(metrics);
    let streams = seen.into_iter().flat_map(|seen| &seen.streams).map(|stream| Stream {
        database: stream.database.clone(),
        reached: stream.reached.to_string(),
        applied: stream.applied.to_string(),
        saved: stream.saved.map(|saved| saved.to_string()),
        age_seconds: stream.delivered.elapsed().as_secs_f64(),
    });
    Status {
        name: board.name.clone(),
        version: env!("DENORMD_VERSION").to_owned(),
        insecure: state.insecure.iter().map(|option| (*option).to_owned()).collect(),
        leadership: view.leadership.clone(),
        heard_seconds: None,
        plan: state.plan.clone(),
        instances: instances(&board.instance.id, state, view),
        partitions: (state.partitions > 1).then(|| Partitions {
            of: state.partitions,
            led: state.attached.keys().copied().collect(),
            unreported: Vec::new(),
        }),
        started: board.started,
        now,
        level: Level::Ok,
        summary: String::new(),
        risk: risk(state, view, now),
        lag_seconds: view.lags.overall,
        behind_since: state.behind_since.values().min().copied(),
        current: state
            .currency
            .claim()
            .filter(|_| seen.is_some())
            .map(|claim| Current { as_of: claim.time.to_string(), except: except(state, &claim, seen) }),
        causes: causes(state, view, now),
        rules: rules(metrics, state, view, &recent),
        streams: streams.collect(),
        oplog: state.oplog.clone(),
        propagation: recent.propagation(None),
        queue_depth: seen.map_or(0, |seen| seen.depth),
        queue_capacity: seen.map_or(0, |seen| seen.capacity),
        events_per_second,
        targets_per_second,
        checkpoint_age_seconds: view.lags.checkpoint,
        clock_skew_seconds: state.clock_skew,
        canary_age_seconds: state.canary.as_ref().map(|canary| seconds(canary.age(now))),
        dead_letters: state.dead_letters.iter().flat_map(BTreeMap::values).flat_map(BTreeMap::values).sum(),
        dead_letters_known: state.dead_letters.is_some(),
        errors: metrics.recent_errors(),
        retired: state.retired.clone(),
    }
}

/// The leader's status on a standby: the figures of its last report, with lags that have grown since.
fn passed_on(own: Status, report: &Report, view: &View, now: i64) -> Status {
    let told = (*report.status).clone();
    let partitions = own.partitions.map(|own| Partitions { unreported: told.not_led(), ..own });
    // The claim is about the rules that the leader had when it reported. Since an earlier term, others may have led.
    let is_present = match (&told.leadership, &own.leadership) {
        (Leadership::Leader { term }, Leadership::Standby { leaders }) => {
            leaders.len() == 1 && leaders[0].term == *term
        }
        _ => false,
    };
    let has_same_rules = told.plan.is_some() && told.plan == own.plan;
    let mut causes = own.causes;
    causes.extend(
        told.causes
            .into_iter()
            .filter(|cause| causes.iter().all(|known| known.cause != cause.cause))
            .collect::<Vec<_>>(),
    );
    let grown = |rule: Rule| {
        let lag = view.lags.rules.iter().find(|lag| lag.name == rule.name);
        let lag_seconds = lag.filter(|lag| lag.is_known).map(|lag| lag.own);
        let behind = lag_seconds.filter(|lag| *lag >= BEHIND);
        Rule {
            lag_seconds,
            chain_lag_seconds: lag.map_or(rule.chain_lag_seconds, |lag| lag.chain),
            behind_since: behind.map(|lag| rule.behind_since.unwrap_or(now - millis(lag))),
            ..rule
        }
    };
    let rules: Vec<Rule> = told.rules.into_iter().map(grown).collect();
    let silence = seconds(report.silence(now));
    Status {
        name: own.name,
        version: own.version,
        insecure: own.insecure,
        leadership: own.leadership,
        heard_seconds: Some(silence),
        checkpoint_age_seconds: told.checkpoint_age_seconds + silence,
        canary_age_seconds: told.canary_age_seconds.map(|age| age + silence),
        plan: own.plan,
        instances: own.instances,
        partitions,
        started: own.started,
        now,
        lag_seconds: view.lags.overall,
        behind_since: rules.iter().filter_map(|rule| rule.behind_since).min(),
        current: told.current.filter(|_| is_present && has_same_rules),
        causes,
        rules,
        errors: own.errors.into_iter().chain(told.errors).collect(),
        ..told
    }
}

fn instances(this: &str, state: &State, view: &View) -> Vec<InstanceReport> {
    let there = &state.shared.instances;
    let is_this = |instance: &Instance| instance.id == this;
    let mine = there.iter().find(|instance| is_this(instance)).map(|instance| &instance.plan);
    let holders = || state.read.iter().flat_map(|read| read.held.values());
    let leads = |instance: &Instance| holders().any(|holder| holder.id == instance.id);
    let role = |instance: &Instance| match &view.leadership {
        Leadership::Unknown { .. } => "unknown",
        mine if is_this(instance) => mine.name(),
        _ if leads(instance) => "leader",
        _ => "standby",
    };
    let report = |instance: &Instance| InstanceReport {
        id: instance.id.clone(),
        name: instance.name.clone(),
        role: role(instance).to_owned(),
        version: instance.version.clone(),
        started: instance.started,
        other_rules: mine.is_some_and(|mine| *mine != instance.plan),
        this: is_this(instance),
    };
    there.iter().map(report).collect()
}

/// Rules in the config's order.
fn in_order(rules: &BTreeSet<String>, seen: Option<&Snapshot>) -> Vec<String> {
    let known = seen.into_iter().flat_map(|seen| seen.rules.iter()).map(|rule| rule.name.clone());
    known.filter(|name| rules.contains(name)).collect()
}

/// The exceptions of a claim, and the rules that do not run yet.
fn except(state: &State, claim: &Claim, seen: Option<&Snapshot>) -> Vec<String> {
    let starting = state.starting();
    let mut except = in_order(&claim.except.union(&starting).cloned().collect(), seen);
    let new: Vec<String> = starting.into_iter().filter(|rule| !except.contains(rule)).collect();
    except.extend(new);
    except
}

/// True if the cause is that the server does not answer, or refuses the user.
fn of_connection(cause: Cause) -> bool {
    matches!(cause, Cause::NoPrimary | Cause::LeaseUnreadable | Cause::Privilege)
}

fn causes(state: &State, view: &View, now: i64) -> Vec<CauseReport> {
    let report = |found: &ActiveCause| CauseReport {
        cause: found.cause.name().to_owned(),
        since: state.since.get(&found.cause).copied().unwrap_or(now),
        rules: found.rules.clone(),
        meaning: found.cause.meaning().to_owned(),
        reason: state.unanswered.as_ref().filter(|_| of_connection(found.cause)).map(|(_, reason)| reason.clone()),
        advice: found.cause.advice().to_owned(),
        severe: found.cause.is_severe(),
    };
    view.causes.iter().map(report).collect()
}

fn rules(metrics: &Metrics, state: &State, view: &View, recent: &Recent<'_>) -> Vec<Rule> {
    let Some(seen) = &view.snapshot else { return Vec::new() };
    let changed: BTreeMap<String, u64> = metrics.totals().1.into_iter().collect();
    let drift = metrics.drift();
    let rules = seen.rules.iter().enumerate().zip(&view.lags.rules).map(|((nth, facts), lag)| {
        let (drift_found, drift_repaired) = drift.get(&facts.name).copied().unwrap_or_default();
        let reasons = state.dead_letters.as_ref().and_then(|of_rules| of_rules.get(&facts.name));
        let reasons = reasons.cloned().unwrap_or_default();
        Rule {
            name: facts.name.clone(),
            state: state_of(seen, nth).to_owned(),
            source: facts.source.clone(),
            target: facts.target.clone(),
            lag_seconds: lag.is_known.then_some(lag.own),
            max_lag_seconds: facts.max_lag.as_secs_f64(),
            chain_lag_seconds: lag.chain,
            behind_since: state.behind_since.get(&facts.name).copied(),
            late_keys: seen.late.get(nth).copied().unwrap_or_default(),
            keyed_by_target: facts.keyed_by_target,
            backfill: match seen.states.get(nth) {
                Some(RuleState::Backfilling { .. }) => backfill(seen, &facts.name),
                _ => Backfill::None,
            },
            degraded: seen.degraded.contains(&nth),
            propagation: recent.propagation(Some(&facts.name)),
            targets_changed: changed.get(&facts.name).copied().unwrap_or_default(),
            drift_found,
            drift_repaired,
            dead_letters: reasons.values().sum(),
            dead_letter_reasons: reasons,
            audit: seen.audits.get(&facts.name).cloned(),
        }
    });
    rules.collect()
}

/// The name of a rule's state.
fn state_of(seen: &Snapshot, rule: usize) -> &'static str {
    match seen.states.get(rule) {
        Some(state) if state.is_backfilling() && seen.degraded.contains(&rule) => "degraded",
        None | Some(RuleState::Live) if seen.rules.get(rule).is_some_and(|facts| facts.shadow) => SHADOW,
        state => state.unwrap_or(&RuleState::Live).name(),
    }
}

fn backfill(seen: &Snapshot, rule: &str) -> Backfill {
    let Some(progress) = seen.backfills.get(rule).filter(|progress| progress.ended.is_none()) else {
        return Backfill::Waiting;
    };
    let elapsed = progress.started.elapsed().as_secs_f64().max(0.001);
    let (scanned, total) = (ratio(progress.scanned, 1), progress.total.map(|total| ratio(total, 1)));
    let per_second = scanned / elapsed;
    let eta_seconds = total.filter(|_| per_second > 0.0).map(|total| ((total - scanned) / per_second).max(0.0));
    Backfill::Running {
        scanned: progress.scanned,
        total: progress.total,
        per_second,
        eta_seconds,
        held_back: progress.held_back,
    }
}

fn level(status: &Status) -> Level {
    let unknown = matches!(status.leadership, Leadership::Unknown { .. });
    if unknown || status.causes.iter().any(|cause| cause.severe) {
        Level::Critical
    } else if status.lag_seconds.is_some_and(|lag| lag >= BEHIND) {
        Level::Behind
    } else if !status.causes.is_empty()
        || status.lag_seconds.is_none()
        || !status.dead_letters_known
        || status.leadership == Leadership::Starting
        || status.follows_other_rules()
    {
        Level::Notice
    } else {
        Level::Ok
    }
}

/// True if the figures are from before an outage.
fn unanswered(status: &Status) -> bool {
    status.causes.iter().any(|cause| cause.cause == Cause::NoPrimary.name())
}

fn unknown_risk(status: &Status, why: &str) -> String {
    let known = status
        .oplog
        .headroom_seconds
        .map(|headroom| format!(" When it was last known, the remaining oplog window was {}.", duration(headroom)));
    format!("Not known {why}.{}", known.unwrap_or_default())
}

fn risk(state: &State, view: &View, now: i64) -> String {
    if view.causes.iter().any(|found| found.cause == Cause::Degraded) {
        return "History was lost with the oplog; the running backfill repairs the copies.".to_owned();
    }
    let oplog = &state.oplog;
    match (oplog.readable, oplog.lost_in_seconds, oplog.headroom_seconds) {
        (Some(false), ..) => "Not known whether changes will be lost: the oplog cannot be read.".to_owned(),
        (_, Some(left), _) if view.lags.overall.is_some_and(|lag| lag >= BEHIND) => {
            format!("Falling behind: the oplog position expires in {}, at {}.", duration(left), clock(now, left))
        }
        (_, _, Some(headroom)) if headroom < THIN => {
            format!("No loss now, but the remaining oplog window is only {}.", duration(headroom))
        }
        (_, _, Some(headroom)) => format!("No: the remaining oplog window is {}.", duration(headroom)),
        _ => "The remaining oplog window is not known yet.".to_owned(),
    }
}

/// The time of day after this number of seconds: `04:12 UTC`.
fn clock(now: i64, seconds: f64) -> String {
    let at = bson::DateTime::from_millis(now.saturating_add(millis(seconds)));
    let text = at.try_to_rfc3339_string().unwrap_or_default();
    format!("{} UTC", text.get(11..16).unwrap_or("an unknown time"))
}
