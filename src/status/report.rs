//! The status as people and programs read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::metrics::{Cause, HeldBack, Metrics};

use super::{
    Board, State, View,
    lag::{BEHIND, seconds},
};

/// An oplog that bridges no more than this, in seconds, is called thin.
const THIN: f64 = 4.0 * 3600.0;

/// What this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It has not started to follow changes.
    Starting,
    /// It writes.
    Leader,
    /// Another one writes.
    Standby,
}

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
    /// Leader or standby.
    pub role: Role,
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
    /// The largest lag of all rules.
    pub lag_seconds: f64,
    /// Since when some rule is behind.
    pub behind_since: Option<i64>,
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
    /// Dead letters of all rules.
    pub dead_letters: u64,
    /// Recent errors, newest first.
    pub errors: Vec<Problem>,
}

/// The partitions of a deployment that is divided.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Partitions {
    /// How many there are.
    pub of: u32,
    /// The places of those that this process leads, from 0.
    pub led: Vec<u32>,
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
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// Its own lag.
    pub lag_seconds: f64,
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
    /// Dead letters.
    pub dead_letters: u64,
    /// And why.
    pub dead_letter_reasons: BTreeMap<String, u64>,
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
    let seen = metrics.observation();
    let (events_per_second, targets_per_second) = state.history.rates(metrics, now);
    let behind_since = state.behind_since.values().min().copied();
    let causes = view.causes.iter().map(|found| CauseReport {
        cause: found.cause.name().to_owned(),
        since: state.since.get(&found.cause).copied().unwrap_or(now),
        rules: found.rules.clone(),
        meaning: found.cause.meaning().to_owned(),
        advice: found.cause.advice().to_owned(),
        severe: found.cause.is_severe(),
    });
    let streams = seen.iter().flat_map(|seen| &seen.streams).map(|stream| Stream {
        database: stream.database.clone(),
        reached: stream.reached.to_string(),
        applied: stream.applied.to_string(),
        saved: stream.saved.map(|saved| saved.to_string()),
        age_seconds: stream.delivered.elapsed().as_secs_f64(),
    });
    let errors = metrics.troubles().into_iter().map(|line| Problem {
        first: line.first,
        last: line.last,
        count: line.count,
        rule: line.rule,
        doing: line.doing.to_owned(),
        reason: line.reason.to_owned(),
        message: line.message,
    });
    Status {
        name: board.name.clone(),
        version: env!("DENORMD_VERSION").to_owned(),
        insecure: state.insecure.iter().map(|option| (*option).to_owned()).collect(),
        role: state.role,
        partitions: (state.partitions > 1)
            .then(|| Partitions { of: state.partitions, led: state.attached.keys().copied().collect() }),
        started: metrics.started_at(),
        now,
        level: level(state, view),
        summary: summary(state, view, now),
        risk: risk(state, view, now),
        lag_seconds: view.lags.overall,
        behind_since,
        causes: causes.collect(),
        rules: rules(metrics, state, view),
        streams: streams.collect(),
        oplog: state.oplog.clone(),
        propagation: state.history.propagation(metrics, None),
        queue_depth: seen.as_ref().map_or(0, |seen| seen.depth),
        queue_capacity: seen.as_ref().map_or(0, |seen| seen.capacity),
        events_per_second,
        targets_per_second,
        checkpoint_age_seconds: view.lags.checkpoint,
        canary_age_seconds: state.canary.as_ref().map(|canary| seconds(canary.age(now))),
        dead_letters: state.letters.values().flat_map(BTreeMap::values).sum(),
        errors: errors.collect(),
    }
}

fn rules(metrics: &Metrics, state: &State, view: &View) -> Vec<Rule> {
    let Some(seen) = metrics.observation() else { return Vec::new() };
    let (_, changed) = metrics.totals();
    let rules = seen.rules.iter().enumerate().zip(&view.lags.rules).map(|((nth, facts), lag)| {
        let reasons = state.letters.get(&facts.name).cloned().unwrap_or_default();
        Rule {
            name: facts.name.clone(),
            source: facts.source.clone(),
            target: facts.target.clone(),
            lag_seconds: lag.own,
            chain_lag_seconds: lag.chain,
            behind_since: state.behind_since.get(&facts.name).copied(),
            late_keys: seen.late.get(nth).copied().unwrap_or_default(),
            keyed_by_target: facts.keyed_by_target,
            backfill: if seen.backfilling.contains(&nth) { backfill(metrics, &facts.name) } else { Backfill::None },
            degraded: seen.degraded.contains(&nth),
            propagation: state.history.propagation(metrics, Some(&facts.name)),
            targets_changed: changed.iter().find(|(name, _)| *name == facts.name).map_or(0, |(_, count)| *count),
            dead_letters: reasons.values().sum(),
            dead_letter_reasons: reasons,
        }
    });
    rules.collect()
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

fn level(state: &State, view: &View) -> Level {
    if view.causes.iter().any(|found| found.cause.is_severe()) {
        Level::Critical
    } else if view.lags.overall >= BEHIND {
        Level::Behind
    } else if !view.causes.is_empty() || state.role == Role::Starting {
        Level::Notice
    } else {
        Level::Ok
    }
}

fn summary(state: &State, view: &View, now: i64) -> String {
    match state.role {
        Role::Starting => return "Starting: changes are not followed yet.".to_owned(),
        Role::Standby => return "Standing by: another process writes.".to_owned(),
        Role::Leader => {}
    }
    let has = |cause| view.causes.iter().any(|found| found.cause == cause);
    let mut late: Vec<_> = view.lags.rules.iter().filter(|rule| rule.own >= BEHIND).collect();
    late.sort_by(|a, b| b.own.total_cmp(&a.own));
    let Some(worst) = late.first() else {
        return if has(Cause::Degraded) {
            "Changes were lost; copies may be wrong until the backfill ends.".to_owned()
        } else if has(Cause::Backfilling) {
            "Changes are applied as they come; existing data is being brought up to date.".to_owned()
        } else if has(Cause::DeadLetters) {
            "Not behind. Some documents could not be written and are set aside.".to_owned()
        } else if view.lags.overall > 0.0 {
            "Not behind: changes are applied within seconds.".to_owned()
        } else {
            "Not behind: every change is applied.".to_owned()
        };
    };
    let since = state.behind_since.values().min().copied().unwrap_or(now);
    let rules = match late.len() {
        1 => format!("rule {}", worst.name),
        _ if late.len() == view.lags.rules.len() => "every rule".to_owned(),
        many => format!("{} and {} more of {} rules", worst.name, many - 1, view.lags.rules.len()),
    };
    format!("Behind by {} on {rules}, for {}.", duration(worst.own), duration(seconds(now - since).max(BEHIND)))
}

fn risk(state: &State, view: &View, now: i64) -> String {
    if view.causes.iter().any(|found| found.cause == Cause::Degraded) {
        return "History was lost with the oplog; the backfill that runs repairs it.".to_owned();
    }
    let oplog = &state.oplog;
    match (oplog.readable, oplog.lost_in_seconds, oplog.headroom_seconds) {
        (Some(false), ..) => "Not known whether changes will be lost: the oplog cannot be read.".to_owned(),
        (_, Some(left), _) if view.lags.overall >= BEHIND => {
            format!("Falling back: changes are lost in {}, at {}.", duration(left), clock(now, left))
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
