//! The status as people and programs read it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    membership::Instance,
    metrics::{AuditProgress, Cause, HeldBack, Metrics, Observation, Trouble},
    rule_state::RuleState,
};

use super::{
    Board, State, View,
    causes::Found,
    lag::{BEHIND, millis, seconds},
    leadership::Leadership,
    sentence,
    shared::Report,
};

/// An oplog that bridges no more than this, in seconds, is called thin.
const THIN: f64 = 4.0 * 3600.0;

/// How it is, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Every copy is true.
    Ok,
    /// Nothing is wrong that does not pass by itself, but something is to be known.
    Notice,
    /// Copies are late.
    Behind,
    /// Nothing moves, or data is at risk.
    Critical,
}

/// The whole status. Times are milliseconds since 1970.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// The deployment.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// Options of the connection string that switch the verification of certificates off.
    #[serde(default)]
    pub insecure: Vec<String>,
    /// What this instance is: its `role`, and who leads.
    #[serde(flatten)]
    pub leadership: Leadership,
    /// On a standby: for how many seconds nothing has been heard of the leader, whose figures these are. None elsewhere, and
    /// before it has said anything.
    #[serde(default)]
    pub heard_seconds: Option<f64>,
    /// The instances that are there.
    #[serde(default)]
    pub instances: Vec<InstanceReport>,
    /// Which partitions this process leads; what it says is of these. None in a deployment that is not divided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partitions: Option<Partitions>,
    /// When the process started.
    pub started: i64,
    /// When this was said.
    pub now: i64,
    /// In one word.
    pub level: Level,
    /// In a sentence: are we behind, since when, on which rule?
    pub summary: String,
    /// In a sentence: will we lose data?
    pub risk: String,
    /// The largest lag of all rules that run. None while it is not known.
    pub lag_seconds: Option<f64>,
    /// Since when some rule is behind.
    pub behind_since: Option<i64>,
    /// Up to when the copies are current. None while nothing can be said, as while another instance leads a partition.
    #[serde(default)]
    pub current: Option<Current>,
    /// Why.
    pub causes: Vec<CauseReport>,
    /// The rules.
    pub rules: Vec<Rule>,
    /// The streams.
    pub streams: Vec<Stream>,
    /// The oplog.
    pub oplog: Oplog,
    /// From commit to acknowledged write, in the last five minutes, all rules together.
    pub propagation: Percentiles,
    /// Requests that wait or run.
    pub queue_depth: usize,
    /// Requests from which on the streams wait.
    pub queue_capacity: usize,
    /// Change events read a second.
    pub events_per_second: f64,
    /// Targets changed a second.
    pub targets_per_second: f64,
    /// How far back a restart would begin.
    pub checkpoint_age_seconds: f64,
    /// How long ago the newest write of denormd's own was sent that has come through. None while another process leads.
    pub canary_age_seconds: Option<f64>,
    /// By how much the clocks of the replica set's members differ at least. None while none of them answers.
    #[serde(default)]
    pub clock_skew_seconds: Option<f64>,
    /// Dead letters of all rules.
    pub dead_letters: u64,
    /// Recent errors, newest first.
    pub errors: Vec<Problem>,
    /// Retired fields: no rule owns them any more, and they stay until `denormd prune`. None while another process leads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<RetiredField>,
}

/// A field that an earlier rule, or an earlier definition of a rule, has written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RetiredField {
    /// The rule.
    pub rule: String,
    /// The whole name of the collection.
    pub collection: String,
    /// The path.
    pub path: String,
}

/// The partitions of a deployment that is divided.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Partitions {
    /// How many there are.
    pub of: u32,
    /// The places of those that this process leads, from 0.
    pub led: Vec<u32>,
}

/// A claim: every change that was committed by a cluster time is in the copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Current {
    /// The cluster time, `seconds.increment`.
    pub as_of: String,
    /// Rules that this is not said of: they do not run, are being backfilled, are in shadow, or have dead letters.
    pub except: Vec<String>,
}

/// An instance of the deployment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceReport {
    /// Host and process.
    pub name: String,
    /// `leader`, `standby`, or `unknown` while the lease cannot be read.
    pub role: String,
    /// The program's version.
    pub version: String,
    /// When it started.
    pub started: i64,
    /// Whether it has other rules than the instance that says this.
    pub other_rules: bool,
    /// Whether it is the instance that says this.
    pub this: bool,
}

/// A cause.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CauseReport {
    /// Its name, the same in metrics and alerts.
    pub cause: String,
    /// Since when.
    pub since: i64,
    /// The rules that it concerns; all, where none is named.
    pub rules: Vec<String>,
    /// What it means.
    pub meaning: String,
    /// Why the server does not answer, with host, port and the driver's reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What to do.
    pub advice: String,
    /// Whether it cannot wait until the morning.
    pub severe: bool,
}

/// A rule.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// Its state, as [`RuleState::name`] has it; `degraded` while it is backfilled because changes were lost.
    #[serde(default)]
    pub state: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// Its own lag. None while it does not run.
    pub lag_seconds: Option<f64>,
    /// Its objective: the lag that it should not have for long.
    #[serde(default)]
    pub max_lag_seconds: f64,
    /// The largest of its own and of the rules that feed it.
    pub chain_lag_seconds: f64,
    /// Since when it is behind.
    pub behind_since: Option<i64>,
    /// How many keys wait or run for the sake of a change.
    pub late_keys: usize,
    /// Whether these keys are targets; else each is a value that any number of targets match.
    pub keyed_by_target: bool,
    /// Its backfill.
    pub backfill: Backfill,
    /// Changes may have been lost: copies may be wrong until its backfill ends.
    pub degraded: bool,
    /// From commit to acknowledged write, in the last five minutes.
    pub propagation: Percentiles,
    /// Targets changed since the start.
    pub targets_changed: u64,
    /// Targets that differed from their definition without a change that explains it.
    #[serde(default)]
    pub drift_found: u64,
    /// Of those, repaired.
    #[serde(default)]
    pub drift_repaired: u64,
    /// Dead letters.
    pub dead_letters: u64,
    /// And why.
    pub dead_letter_reasons: BTreeMap<String, u64>,
    /// The continuous audit. None while the process does not audit the rule.
    #[serde(default)]
    pub audit: Option<AuditProgress>,
}

/// A backfill.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Backfill {
    /// None is open.
    None,
    /// Others come first.
    Waiting,
    /// It runs.
    Running {
        /// Targets done since it started or went on.
        scanned: u64,
        /// Targets to do, estimated.
        total: Option<u64>,
        /// Targets a second.
        per_second: f64,
        /// Seconds until it ends, at this rate.
        eta_seconds: Option<f64>,
        /// What keeps it from going faster.
        #[serde(default)]
        held_back: Option<HeldBack>,
    },
}

/// A change stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stream {
    /// Its database.
    pub database: String,
    /// `seconds.increment`: everything up to here was read.
    pub reached: String,
    /// Everything up to here is applied.
    pub applied: String,
    /// A restart begins here.
    pub saved: Option<String>,
    /// How old its last answer is.
    pub age_seconds: f64,
}

/// How far the oplog reaches back.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Oplog {
    /// Whether it can be read. None before the first look.
    pub readable: Option<bool>,
    /// Why not.
    pub reason: Option<String>,
    /// From its first to its last entry.
    pub window_seconds: Option<f64>,
    /// How long until the saved position falls off, at the mean rate of writing.
    pub headroom_seconds: Option<f64>,
    /// Its size.
    pub size_megabytes: Option<f64>,
    /// What it bridges when it is full, at the mean rate of writing.
    pub bridged_seconds: Option<f64>,
    /// The same at the present rate of falling behind. None while it does not.
    pub lost_in_seconds: Option<f64>,
}

/// Percentiles in seconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Percentiles {
    /// How many were measured.
    pub count: u64,
    /// The median.
    pub p50: Option<f64>,
    /// 95 of 100 were faster.
    pub p95: Option<f64>,
    /// 99 of 100 were faster.
    pub p99: Option<f64>,
}

/// A recent error.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Problem {
    /// First met.
    pub first: i64,
    /// Last met.
    pub last: i64,
    /// How often.
    pub count: u64,
    /// The rule.
    pub rule: Option<String>,
    /// What was being done.
    pub doing: String,
    /// The kind.
    pub reason: String,
    /// The text.
    pub message: String,
}

pub(super) fn status(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let metrics = &board.metrics;
    let own = own(board, state, view, now);
    let status = match &state.shared.report {
        Some(report) if metrics.observation().is_none() => passed_on(own, report, view, now),
        _ => own,
    };
    let level = level(&status);
    let summary = sentence::summary(&status);
    let risk = if unanswered(&status) { unknown_risk(&status) } else { status.risk.clone() };
    Status { level, summary, risk, ..status }
}

/// What this instance knows by itself. Level and summary are made of the rest.
fn own(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let metrics = &board.metrics;
    let seen = metrics.observation();
    let (events_per_second, targets_per_second) = state.history.rates(metrics, now);
    let streams = seen.iter().flat_map(|seen| &seen.streams).map(|stream| Stream {
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
        instances: instances(board, state, view),
        partitions: (state.partitions > 1)
            .then(|| Partitions { of: state.partitions, led: state.attached.keys().copied().collect() }),
        started: metrics.started_at(),
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
            .map(|time| Current { as_of: time.to_string(), except: in_order(&state.except, metrics) }),
        causes: causes(state, view, now),
        rules: rules(metrics, state, view),
        streams: streams.collect(),
        oplog: state.oplog.clone(),
        propagation: state.history.propagation(metrics, None),
        queue_depth: seen.as_ref().map_or(0, |seen| seen.depth),
        queue_capacity: seen.as_ref().map_or(0, |seen| seen.capacity),
        events_per_second,
        targets_per_second,
        checkpoint_age_seconds: view.lags.checkpoint,
        clock_skew_seconds: state.clock_skew,
        canary_age_seconds: state.canary.as_ref().map(|canary| seconds(canary.age(now))),
        dead_letters: state.letters.values().flat_map(BTreeMap::values).sum(),
        errors: metrics.troubles().into_iter().map(Problem::from).collect(),
        retired: state.retired.clone(),
    }
}

/// The leader's status on a standby: its figures as of when they were heard, with lags that grow since.
fn passed_on(own: Status, report: &Report, view: &View, now: i64) -> Status {
    let told = (*report.status).clone();
    let mut causes = own.causes;
    causes.extend(
        told.causes
            .into_iter()
            .filter(|cause| causes.iter().all(|known| known.cause != cause.cause))
            .collect::<Vec<_>>(),
    );
    let grown = |rule: Rule| {
        let lag = view.lags.rules.iter().find(|lag| lag.name == rule.name);
        let lag_seconds = rule.lag_seconds.and(lag.map(|lag| lag.own));
        let behind = lag_seconds.filter(|lag| *lag >= BEHIND);
        Rule {
            lag_seconds,
            chain_lag_seconds: lag.map_or(rule.chain_lag_seconds, |lag| lag.chain),
            behind_since: behind.map(|lag| rule.behind_since.unwrap_or(now - millis(lag))),
            ..rule
        }
    };
    let rules: Vec<Rule> = told.rules.into_iter().map(grown).collect();
    Status {
        name: own.name,
        version: own.version,
        insecure: own.insecure,
        leadership: own.leadership,
        heard_seconds: Some(seconds(report.silence(now))),
        instances: own.instances,
        partitions: own.partitions,
        started: own.started,
        now,
        lag_seconds: view.lags.overall,
        behind_since: rules.iter().filter_map(|rule| rule.behind_since).min(),
        causes,
        rules,
        errors: own.errors.into_iter().chain(told.errors).collect(),
        ..told
    }
}

impl Status {
    /// What leaders of several partitions say, as one: whatever is later, or worse, counts.
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        let later = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.max(b));
        let mut rules = self.rules;
        for rule in &mut rules {
            if let Some(same) = other.rules.iter().find(|same| same.name == rule.name) {
                *rule = Rule {
                    lag_seconds: later(rule.lag_seconds, same.lag_seconds),
                    chain_lag_seconds: rule.chain_lag_seconds.max(same.chain_lag_seconds),
                    behind_since: rule.behind_since.into_iter().chain(same.behind_since).min(),
                    late_keys: rule.late_keys + same.late_keys,
                    targets_changed: rule.targets_changed + same.targets_changed,
                    degraded: rule.degraded || same.degraded,
                    backfill: if matches!(rule.backfill, Backfill::None) {
                        same.backfill.clone()
                    } else {
                        rule.backfill.clone()
                    },
                    ..rule.clone()
                };
            }
        }
        let mut causes = self.causes;
        for cause in other.causes {
            match causes.iter_mut().find(|known| known.cause == cause.cause) {
                Some(known) => {
                    known.since = known.since.min(cause.since);
                    let more: Vec<String> =
                        cause.rules.into_iter().filter(|rule| !known.rules.contains(rule)).collect();
                    known.rules.extend(more);
                }
                None => causes.push(cause),
            }
        }
        Self {
            rules,
            causes,
            lag_seconds: later(self.lag_seconds, other.lag_seconds),
            behind_since: self.behind_since.into_iter().chain(other.behind_since).min(),
            // Each speaks of its own partitions, and none of all.
            current: None,
            streams: self.streams.into_iter().chain(other.streams).collect(),
            queue_depth: self.queue_depth + other.queue_depth,
            queue_capacity: self.queue_capacity + other.queue_capacity,
            events_per_second: self.events_per_second + other.events_per_second,
            targets_per_second: self.targets_per_second + other.targets_per_second,
            checkpoint_age_seconds: self.checkpoint_age_seconds.max(other.checkpoint_age_seconds),
            canary_age_seconds: later(self.canary_age_seconds, other.canary_age_seconds),
            errors: self.errors.into_iter().chain(other.errors).collect(),
            ..self
        }
    }
}

impl From<Trouble> for Problem {
    fn from(line: Trouble) -> Self {
        Self {
            first: line.first,
            last: line.last,
            count: line.count,
            rule: line.rule,
            doing: line.doing.to_owned(),
            reason: line.reason.to_owned(),
            message: line.message,
        }
    }
}

fn instances(board: &Board, state: &State, view: &View) -> Vec<InstanceReport> {
    let there = &state.shared.instances;
    let mine = there.iter().find(|instance| instance.name == board.instance).map(|instance| &instance.plan);
    let leads =
        |name: &str| state.read.iter().flat_map(|read| read.held.values()).any(|holder| holder.instance == name);
    let role = |name: &str| match &view.leadership {
        Leadership::Unknown { .. } => "unknown",
        mine if name == board.instance => mine.name(),
        _ if leads(name) => "leader",
        _ => "standby",
    };
    let report = |instance: &Instance| InstanceReport {
        name: instance.name.clone(),
        role: role(&instance.name).to_owned(),
        version: instance.version.clone(),
        started: instance.started,
        other_rules: mine.is_some_and(|mine| *mine != instance.plan),
        this: instance.name == board.instance,
    };
    there.iter().map(report).collect()
}

/// Rules in the config's order.
fn in_order(rules: &BTreeSet<String>, metrics: &Metrics) -> Vec<String> {
    let seen = metrics.observation();
    let known = seen.iter().flat_map(|seen| seen.rules.iter()).map(|rule| rule.name.clone());
    known.filter(|name| rules.contains(name)).collect()
}

/// Whether the cause is that the server does not answer, or refuses the user.
fn of_connection(cause: Cause) -> bool {
    matches!(cause, Cause::NoPrimary | Cause::LeaseUnreadable | Cause::Privilege)
}

fn causes(state: &State, view: &View, now: i64) -> Vec<CauseReport> {
    let report = |found: &Found| CauseReport {
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

fn rules(metrics: &Metrics, state: &State, view: &View) -> Vec<Rule> {
    let Some(seen) = metrics.observation() else { return Vec::new() };
    let (_, changed) = metrics.totals();
    let drift = metrics.drift();
    let rules = seen.rules.iter().enumerate().zip(&view.lags.rules).map(|((nth, facts), lag)| {
        let (drift_found, drift_repaired) = drift.get(&facts.name).copied().unwrap_or_default();
        let reasons = state.letters.get(&facts.name).cloned().unwrap_or_default();
        Rule {
            name: facts.name.clone(),
            state: state_of(&seen, nth).to_owned(),
            source: facts.source.clone(),
            target: facts.target.clone(),
            lag_seconds: lag.runs.then_some(lag.own),
            max_lag_seconds: facts.max_lag.as_secs_f64(),
            chain_lag_seconds: lag.chain,
            behind_since: state.behind_since.get(&facts.name).copied(),
            late_keys: seen.late.get(nth).copied().unwrap_or_default(),
            keyed_by_target: facts.keyed_by_target,
            backfill: match seen.states.get(nth) {
                Some(RuleState::Backfilling { .. }) => backfill(metrics, &facts.name),
                _ => Backfill::None,
            },
            degraded: seen.degraded.contains(&nth),
            propagation: state.history.propagation(metrics, Some(&facts.name)),
            targets_changed: changed.iter().find(|(name, _)| *name == facts.name).map_or(0, |(_, count)| *count),
            drift_found,
            drift_repaired,
            dead_letters: reasons.values().sum(),
            dead_letter_reasons: reasons,
            audit: metrics.audit(&facts.name),
        }
    });
    rules.collect()
}

/// The name of a rule's state.
fn state_of(seen: &Observation, rule: usize) -> &'static str {
    match seen.states.get(rule) {
        Some(state) if state.is_backfilling() && seen.degraded.contains(&rule) => "degraded",
        state => state.unwrap_or(&RuleState::Live).name(),
    }
}

fn backfill(metrics: &Metrics, rule: &str) -> Backfill {
    let Some(progress) = metrics.backfill(rule).filter(|progress| progress.ended.is_none()) else {
        return Backfill::Waiting;
    };
    let elapsed = progress.started.elapsed().as_secs_f64().max(0.001);
    #[expect(clippy::cast_precision_loss, reason = "a rate and an estimate")]
    let (scanned, total) = (progress.scanned as f64, progress.total.map(|total| total as f64));
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
    } else if !status.causes.is_empty() || status.lag_seconds.is_none() || status.leadership == Leadership::Starting {
        Level::Notice
    } else {
        Level::Ok
    }
}

/// Whether the figures cannot be more than what was known before an outage.
fn unanswered(status: &Status) -> bool {
    status.causes.iter().any(|cause| cause.cause == Cause::NoPrimary.name())
}

fn unknown_risk(status: &Status) -> String {
    let known = status
        .oplog
        .headroom_seconds
        .map(|headroom| format!(" When it last did, the oplog bridged an outage of {}.", duration(headroom)));
    format!("Not known while no primary answers.{}", known.unwrap_or_default())
}

fn risk(state: &State, view: &View, now: i64) -> String {
    if view.causes.iter().any(|found| found.cause == Cause::Degraded) {
        return "History was lost with the oplog; the backfill that runs repairs it.".to_owned();
    }
    let oplog = &state.oplog;
    match (oplog.readable, oplog.lost_in_seconds, oplog.headroom_seconds) {
        (Some(false), ..) => "Not known whether changes will be lost: the oplog cannot be read.".to_owned(),
        (_, Some(left), _) if view.lags.overall.is_some_and(|lag| lag >= BEHIND) => {
            format!("Falling behind: changes are lost in {}, at {}.", duration(left), clock(now, left))
        }
        (_, _, Some(headroom)) if headroom < THIN => {
            format!("No loss now, but the oplog bridges an outage of only {}.", duration(headroom))
        }
        (_, _, Some(headroom)) => format!("No: the oplog bridges an outage of {}.", duration(headroom)),
        _ => "How far the oplog reaches back is not known yet.".to_owned(),
    }
}

/// The time of day in so many seconds: `04:12 UTC`.
fn clock(now: i64, seconds: f64) -> String {
    let at = bson::DateTime::from_millis(now.saturating_add(super::lag::millis(seconds)));
    let text = at.try_to_rfc3339_string().unwrap_or_default();
    format!("{} UTC", text.get(11..16).unwrap_or("an unknown time"))
}

/// A duration as people say it: `4.2 s`, `3 min 20 s`, `5 h 3 min`, `2 d 4 h`.
#[must_use]
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and no age of the universe")]
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_are_said_in_two_units() {
        let cases = [
            (0.0, "0.0 s"),
            (4.25, "4.2 s"),
            (59.0, "59 s"),
            (200.0, "3 min 20 s"),
            (18_180.0, "5 h 3 min"),
            (187_200.0, "2 d 4 h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
