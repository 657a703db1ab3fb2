//! The status in the form that people and programs read.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use denormd_engine::{
    deployment::instances::Instance,
    metrics::{Cause, Metrics, RecentError},
    snapshot::{AuditProgress, HeldBack, Snapshot},
};
use denormd_model::rule_state::{RuleState, rank};

use super::{
    Board, State, View,
    causes::Found,
    lag::{BEHIND, millis, seconds},
    leadership::Leadership,
    sentence,
    shared::Report,
};

/// A remaining oplog window below which the oplog counts as thin, in seconds.
const THIN: f64 = 4.0 * 3600.0;

/// The overall state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Every copy is up to date.
    Ok,
    /// Nothing is wrong that does not resolve itself, but there is something to know.
    Notice,
    /// Copies are late.
    Behind,
    /// Nothing makes progress, or data is at risk.
    Critical,
}

/// The whole status. Times are milliseconds since 1970.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Status {
    /// The name of the deployment.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// Options of the connection string that disable the verification of certificates.
    #[serde(default)]
    pub insecure: Vec<String>,
    /// The `role` of this instance, and the leaders.
    #[serde(flatten)]
    pub leadership: Leadership,
    /// On a standby: seconds since the last report of the leader, whose figures these are. None elsewhere, and before
    /// the first report.
    #[serde(default)]
    pub heard_seconds: Option<f64>,
    /// The running instances.
    #[serde(default)]
    pub instances: Vec<InstanceReport>,
    /// The partitions that this process leads and reports on. None if the deployment is not divided into partitions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partitions: Option<Partitions>,
    /// Start of the process.
    pub started: i64,
    /// Time of this status.
    pub now: i64,
    /// The overall state.
    pub level: Level,
    /// In sentences: the lag, its duration, and the rules that are behind.
    pub summary: String,
    /// In a sentence: the risk of losing data.
    pub risk: String,
    /// The largest lag of the running rules. None while it is not known.
    pub lag_seconds: Option<f64>,
    /// Time since which some rule is behind.
    pub behind_since: Option<i64>,
    /// The time up to which the copies are current. None if it is not known, for instance while another instance leads
    /// a partition.
    #[serde(default)]
    pub current: Option<Current>,
    /// The causes of this state.
    pub causes: Vec<CauseReport>,
    /// The rules.
    pub rules: Vec<Rule>,
    /// The streams.
    pub streams: Vec<Stream>,
    /// The oplog.
    pub oplog: Oplog,
    /// Time from commit to acknowledged write in the last five minutes, all rules together.
    pub propagation: Percentiles,
    /// Requests that wait or run.
    pub queue_depth: usize,
    /// Requests at which the streams pause.
    pub queue_capacity: usize,
    /// Change events read per second.
    pub events_per_second: f64,
    /// Targets changed per second.
    pub targets_per_second: f64,
    /// Age of the position from which a restart would resume.
    pub checkpoint_age_seconds: f64,
    /// Time since the newest canary that has arrived was sent. None while another process leads.
    pub canary_age_seconds: Option<f64>,
    /// Smallest possible difference between the clocks of the replica set's members. None while none of them answers.
    #[serde(default)]
    pub clock_skew_seconds: Option<f64>,
    /// Number of dead letters of all rules.
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
    /// The rule that wrote it.
    pub rule: String,
    /// The full name of the collection.
    pub collection: String,
    /// The path of the field.
    pub path: String,
}

/// The partitions of a deployment that has several.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Partitions {
    /// Number of partitions.
    pub of: u32,
    /// The places of the partitions that this process leads, from 0.
    pub led: Vec<u32>,
}

/// A claim: every change that was committed by a cluster time is in the copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Current {
    /// The cluster time, `seconds.increment`.
    pub as_of: String,
    /// Rules that this does not cover: they do not run, are being backfilled, are in shadow, or have dead letters.
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
    /// Its start.
    pub started: i64,
    /// True if its rules differ from those of the reporting instance.
    pub other_rules: bool,
    /// True if it is the reporting instance.
    pub this: bool,
}

/// A cause that affects the copies.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CauseReport {
    /// Its name, the same in metrics and alerts.
    pub cause: String,
    /// Time since which it holds.
    pub since: i64,
    /// The rules that it affects; all, if none is named.
    pub rules: Vec<String>,
    /// An explanation in a sentence.
    pub meaning: String,
    /// The reason why the server does not answer, with host, port and the driver's message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The recommended action.
    pub advice: String,
    /// True if it cannot wait until the morning.
    pub severe: bool,
}

/// The status of a rule.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// Its state, as named by [`RuleState::name`]; `degraded` during a backfill after a loss of changes.
    #[serde(default)]
    pub state: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// Its own lag. None while it does not run.
    pub lag_seconds: Option<f64>,
    /// Its objective: the lag that it should not exceed for long.
    #[serde(default)]
    pub max_lag_seconds: f64,
    /// The largest of its own lag and those of the rules that feed it.
    pub chain_lag_seconds: f64,
    /// Time since which it is behind.
    pub behind_since: Option<i64>,
    /// Number of keys that wait or run because of a change.
    pub late_keys: usize,
    /// True if these keys are targets; otherwise each is a value that any number of targets match.
    pub keyed_by_target: bool,
    /// The state of its backfill.
    pub backfill: Backfill,
    /// Changes may have been lost: copies may be wrong until its backfill ends.
    pub degraded: bool,
    /// Time from commit to acknowledged write in the last five minutes.
    pub propagation: Percentiles,
    /// Targets changed since the start.
    pub targets_changed: u64,
    /// Targets that differed from their definition without a change that explains it.
    #[serde(default)]
    pub drift_found: u64,
    /// Number of these targets that were repaired.
    #[serde(default)]
    pub drift_repaired: u64,
    /// Number of dead letters.
    pub dead_letters: u64,
    /// Number of dead letters by reason.
    pub dead_letter_reasons: BTreeMap<String, u64>,
    /// Progress of the continuous audit. None while the process does not audit the rule.
    #[serde(default)]
    pub audit: Option<AuditProgress>,
}

/// The state of a backfill.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Backfill {
    /// No backfill is open.
    None,
    /// It waits for the backfills of other rules.
    Waiting,
    /// It runs.
    Running {
        /// Targets read since it started or resumed; with `create: true`, sources as well.
        scanned: u64,
        /// Estimated number of targets.
        total: Option<u64>,
        /// Targets per second.
        per_second: f64,
        /// Estimated seconds until it ends.
        eta_seconds: Option<f64>,
        /// The reason why it does not go faster.
        #[serde(default)]
        held_back: Option<HeldBack>,
    },
}

/// A change stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stream {
    /// Its database.
    pub database: String,
    /// Cluster time up to which everything was read, as `seconds.increment`.
    pub reached: String,
    /// Cluster time up to which everything is applied.
    pub applied: String,
    /// Cluster time at which a restart resumes.
    pub saved: Option<String>,
    /// Age of its last answer.
    pub age_seconds: f64,
}

/// The oplog, as seen from the saved position.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Oplog {
    /// True if it can be read. None before the first check.
    pub readable: Option<bool>,
    /// The reason why it cannot be read.
    pub reason: Option<String>,
    /// Time from its first to its last entry.
    pub window_seconds: Option<f64>,
    /// Time until the saved position falls off, at the mean write rate.
    pub headroom_seconds: Option<f64>,
    /// Its maximum size.
    pub size_megabytes: Option<f64>,
    /// Time that it bridges when it is full, at the mean write rate.
    pub bridged_seconds: Option<f64>,
    /// Time until the saved position falls off, at the current rate of falling behind. None while it does not fall
    /// behind.
    pub lost_in_seconds: Option<f64>,
}

impl Oplog {
    /// Seconds until changes are lost; less than any number while that is not known.
    fn margin(&self) -> f64 {
        match self.headroom_seconds.filter(|_| self.readable == Some(true)) {
            Some(headroom) => self.lost_in_seconds.map_or(headroom, |lost| lost.min(headroom)),
            None => f64::NEG_INFINITY,
        }
    }
}

/// Percentiles in seconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Percentiles {
    /// Number of measurements.
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
    /// Time of the first occurrence.
    pub first: i64,
    /// Time of the last occurrence.
    pub last: i64,
    /// Number of occurrences.
    pub count: u64,
    /// The affected rule, if there is one.
    pub rule: Option<String>,
    /// The operation that failed.
    pub doing: String,
    /// The kind of error.
    pub reason: String,
    /// The error message.
    pub message: String,
}

pub(super) fn status(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let own = own(board, state, view, now);
    let status = match &state.shared.report {
        Some(report) if view.snapshot.is_none() => passed_on(own, report, view, now),
        _ => own,
    };
    let level = level(&status);
    let summary = sentence::summary(&status);
    let risk = if unanswered(&status) { unknown_risk(&status) } else { status.risk.clone() };
    Status { level, summary, risk, ..status }
}

impl Percentiles {
    /// Joins the percentiles of two partitions: the slower one counts.
    fn joined(&self, other: &Self) -> Self {
        let slower = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
        Self {
            count: self.count + other.count,
            p50: slower(self.p50, other.p50),
            p95: slower(self.p95, other.p95),
            p99: slower(self.p99, other.p99),
        }
    }
}

/// The status that this instance knows by itself. Level and summary are derived from the rest.
fn own(board: &Board, state: &State, view: &View, now: i64) -> Status {
    let metrics = &board.metrics;
    let seen = view.snapshot.as_ref();
    let (events_per_second, targets_per_second) = state.history.rates(metrics, now);
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
        instances: instances(board, state, view),
        partitions: (state.partitions > 1)
            .then(|| Partitions { of: state.partitions, led: state.attached.keys().copied().collect() }),
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
            .map(|time| Current { as_of: time.to_string(), except: in_order(&state.except, seen) }),
        causes: causes(state, view, now),
        rules: rules(metrics, state, view),
        streams: streams.collect(),
        oplog: state.oplog.clone(),
        propagation: state.history.propagation(metrics, None),
        queue_depth: seen.map_or(0, |seen| seen.depth),
        queue_capacity: seen.map_or(0, |seen| seen.capacity),
        events_per_second,
        targets_per_second,
        checkpoint_age_seconds: view.lags.checkpoint,
        clock_skew_seconds: state.clock_skew,
        canary_age_seconds: state.canary.as_ref().map(|canary| seconds(canary.age(now))),
        dead_letters: state.dead_letters.values().flat_map(BTreeMap::values).sum(),
        errors: metrics.recent_errors().into_iter().map(Problem::from).collect(),
        retired: state.retired.clone(),
    }
}

/// The leader's status on a standby: the figures of its last report, with lags that have grown since.
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
    /// Joins the statuses of leaders of several partitions: the later or worse figure counts.
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        let later = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.max(b));
        let mut rules = self.rules;
        for rule in &mut rules {
            if let Some(same) = other.rules.iter().find(|same| same.name == rule.name) {
                let worse = if rank(&same.state) > rank(&rule.state) { same } else { &*rule };
                *rule = Rule {
                    state: worse.state.clone(),
                    lag_seconds: later(rule.lag_seconds, same.lag_seconds),
                    chain_lag_seconds: rule.chain_lag_seconds.max(same.chain_lag_seconds),
                    behind_since: rule.behind_since.into_iter().chain(same.behind_since).min(),
                    late_keys: rule.late_keys + same.late_keys,
                    targets_changed: rule.targets_changed + same.targets_changed,
                    drift_found: rule.drift_found + same.drift_found,
                    drift_repaired: rule.drift_repaired + same.drift_repaired,
                    propagation: rule.propagation.joined(&same.propagation),
                    audit: rule.audit.as_ref().zip(same.audit.as_ref()).map(|(audit, same)| audit.joined(same)),
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
        let (oplog, risk) = if other.oplog.margin() < self.oplog.margin() {
            (other.oplog, other.risk)
        } else {
            (self.oplog, self.risk)
        };
        Self {
            rules,
            causes,
            oplog,
            risk,
            propagation: self.propagation.joined(&other.propagation),
            clock_skew_seconds: self.clock_skew_seconds.into_iter().chain(other.clock_skew_seconds).reduce(f64::max),
            lag_seconds: later(self.lag_seconds, other.lag_seconds),
            behind_since: self.behind_since.into_iter().chain(other.behind_since).min(),
            // Each claim covers one leader's partitions, and none covers all.
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

impl From<RecentError> for Problem {
    fn from(line: RecentError) -> Self {
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
fn in_order(rules: &BTreeSet<String>, seen: Option<&Snapshot>) -> Vec<String> {
    let known = seen.into_iter().flat_map(|seen| seen.rules.iter()).map(|rule| rule.name.clone());
    known.filter(|name| rules.contains(name)).collect()
}

/// True if the cause is that the server does not answer, or refuses the user.
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
    let Some(seen) = &view.snapshot else { return Vec::new() };
    let (_, changed) = metrics.totals();
    let drift = metrics.drift();
    let rules = seen.rules.iter().enumerate().zip(&view.lags.rules).map(|((nth, facts), lag)| {
        let (drift_found, drift_repaired) = drift.get(&facts.name).copied().unwrap_or_default();
        let reasons = state.dead_letters.get(&facts.name).cloned().unwrap_or_default();
        Rule {
            name: facts.name.clone(),
            state: state_of(seen, nth).to_owned(),
            source: facts.source.clone(),
            target: facts.target.clone(),
            lag_seconds: lag.runs.then_some(lag.own),
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
            propagation: state.history.propagation(metrics, Some(&facts.name)),
            targets_changed: changed.iter().find(|(name, _)| *name == facts.name).map_or(0, |(_, count)| *count),
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
        state => state.unwrap_or(&RuleState::Live).name(),
    }
}

fn backfill(seen: &Snapshot, rule: &str) -> Backfill {
    let Some(progress) = seen.backfills.get(rule).filter(|progress| progress.ended.is_none()) else {
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

/// True if the figures are from before an outage.
fn unanswered(status: &Status) -> bool {
    status.causes.iter().any(|cause| cause.cause == Cause::NoPrimary.name())
}

fn unknown_risk(status: &Status) -> String {
    let known = status
        .oplog
        .headroom_seconds
        .map(|headroom| format!(" When it last did, the remaining oplog window was {}.", duration(headroom)));
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
            format!("No loss now, but the remaining oplog window is only {}.", duration(headroom))
        }
        (_, _, Some(headroom)) => format!("No: the remaining oplog window is {}.", duration(headroom)),
        _ => "The remaining oplog window is not known yet.".to_owned(),
    }
}

/// The time of day after this number of seconds: `04:12 UTC`.
fn clock(now: i64, seconds: f64) -> String {
    let at = bson::DateTime::from_millis(now.saturating_add(super::lag::millis(seconds)));
    let text = at.try_to_rfc3339_string().unwrap_or_default();
    format!("{} UTC", text.get(11..16).unwrap_or("an unknown time"))
}

/// A duration in two units: `4.2 s`, `3 min 20 s`, `5 h 3 min`, `2 d 4 h`.
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
