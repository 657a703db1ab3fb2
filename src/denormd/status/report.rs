//! The status in the form that people and programs read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use denormd_engine::{
    metrics::RecentError,
    snapshot::{AuditProgress, HeldBack},
};
use denormd_model::rule_state::rank;

use super::{lag::BEHIND, leadership::Leadership};

/// The state of a live rule that writes nothing.
pub const SHADOW: &str = "shadow";

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
    /// Fingerprint of the rules of this instance, by which instances are compared. None before the cluster is reached.
    #[serde(default)]
    pub plan: Option<String>,
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
    /// The largest lag of the rules that have one. None if none has, and while it is not known.
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
    /// False if there may be more: they cannot be counted, or have not been counted since a leader began.
    #[serde(default = "counted")]
    pub dead_letters_known: bool,
    /// Recent errors, newest first.
    pub errors: Vec<RecentError>,
    /// Retired fields: no rule owns them any more, and they stay until `denormd prune`. Empty while another process
    /// leads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<RetiredField>,
}

/// Earlier versions do not say it.
fn counted() -> bool {
    true
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
    /// On a standby: the places of the partitions that no leader reports as running. Their lag is not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreported: Vec<u32>,
}

/// A claim: every change that was committed by a cluster time is in the copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Current {
    /// The cluster time, `seconds.increment`.
    pub as_of: String,
    /// Rules that this does not cover: they do not run, are being backfilled, or have dead letters; they read the copies of such
    /// a rule; or they are in shadow.
    pub except: Vec<String>,
}

/// An instance of the deployment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceReport {
    /// Unique id, as the leases have it.
    #[serde(default)]
    pub id: String,
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
    /// Its state, as named by [`RuleState::name`]; `degraded` during a backfill after a loss of changes, and [`SHADOW`].
    #[serde(default)]
    pub state: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// Its own lag. None while it does not run, or waits for `denormd backfill`.
    pub lag_seconds: Option<f64>,
    /// Its objective: the lag that it should not exceed for long.
    #[serde(default)]
    pub max_lag_seconds: f64,
    /// The largest of its own lag and those of the rules that feed it. None if one of them is not known.
    #[serde(default)]
    pub chain_lag_seconds: Option<f64>,
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
    /// It waits for the backfills of other rules, or until every partition runs this definition of the rule.
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

/// The oplog, as seen from the checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Oplog {
    /// True if it can be read. None before the first check.
    pub readable: Option<bool>,
    /// The reason why it cannot be read.
    pub reason: Option<String>,
    /// Time from its first to its last entry.
    pub window_seconds: Option<f64>,
    /// Time until the checkpoint falls off, at the mean write rate.
    pub headroom_seconds: Option<f64>,
    /// Its maximum size.
    pub size_megabytes: Option<f64>,
    /// Time that it bridges when it is full, at the mean write rate.
    pub bridged_seconds: Option<f64>,
    /// Time until the checkpoint falls off, at the current rate of falling behind. None while it does not fall
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

/// The later of two lags; unknown if one is.
fn later(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.zip(other).map(|(one, other)| one.max(other))
}

/// Joins the causes of two leaders: the earlier beginning, and the rules of both.
fn joined_causes(mut causes: Vec<CauseReport>, others: Vec<CauseReport>) -> Vec<CauseReport> {
    for cause in others {
        match causes.iter_mut().find(|known| known.cause == cause.cause) {
            Some(known) => {
                known.since = known.since.min(cause.since);
                let more: Vec<String> = cause.rules.into_iter().filter(|rule| !known.rules.contains(rule)).collect();
                known.rules.extend(more);
            }
            None => causes.push(cause),
        }
    }
    causes
}

impl Rule {
    /// Joins the statuses of two partitions: the later or worse figure counts.
    fn joined(&self, same: &Self) -> Self {
        let worse = if rank(&same.state) > rank(&self.state) { same } else { self };
        let open = if matches!(self.backfill, Backfill::None) { same } else { self };
        Self {
            state: worse.state.clone(),
            lag_seconds: later(self.lag_seconds, same.lag_seconds),
            chain_lag_seconds: later(self.chain_lag_seconds, same.chain_lag_seconds),
            behind_since: self.behind_since.into_iter().chain(same.behind_since).min(),
            late_keys: self.late_keys + same.late_keys,
            targets_changed: self.targets_changed + same.targets_changed,
            drift_found: self.drift_found + same.drift_found,
            drift_repaired: self.drift_repaired + same.drift_repaired,
            propagation: self.propagation.joined(&same.propagation),
            audit: self.audit.as_ref().zip(same.audit.as_ref()).map(|(audit, same)| audit.joined(same)),
            degraded: self.degraded || same.degraded,
            backfill: open.backfill.clone(),
            ..self.clone()
        }
    }
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

impl Status {
    /// True on a standby whose leader has other rules: the leader's figures do not cover this instance's config.
    #[must_use]
    pub fn follows_other_rules(&self) -> bool {
        let leads = |instance: &InstanceReport| instance.role == "leader" && instance.other_rules;
        matches!(self.leadership, Leadership::Standby { .. }) && self.instances.iter().any(leads)
    }

    /// True if it tells the present state of the rules: on a leader, and on a standby that hears its leader.
    #[must_use]
    pub fn knows_the_rules(&self) -> bool {
        let is_heard = || self.heard_seconds.is_some_and(|silence| silence < BEHIND);
        self.leadership.leads() || self.leadership.has_leader() && is_heard()
    }

    /// The places of the partitions that the leaders of this report do not run.
    #[must_use]
    pub fn not_led(&self) -> Vec<u32> {
        let Some(Partitions { of, led, .. }) = &self.partitions else { return Vec::new() };
        (0..*of).filter(|place| !led.contains(place)).collect()
    }

    /// A number of dead letters as text; `-` if it is not known.
    #[must_use]
    pub fn dead_letters_text(&self, count: u64) -> String {
        if count > 0 || self.dead_letters_known { count.to_string() } else { "-".to_owned() }
    }

    /// Joins the statuses of leaders of several partitions: the later or worse figure counts.
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        let mut rules = self.rules;
        for rule in &mut rules {
            if let Some(same) = other.rules.iter().find(|same| same.name == rule.name) {
                *rule = rule.joined(same);
            }
        }
        let causes = joined_causes(self.causes, other.causes);
        let mut partitions = self.partitions;
        if let (Some(all), Some(more)) = (&mut partitions, other.partitions) {
            all.led.extend(more.led);
        }
        let (oplog, risk) = if other.oplog.margin() < self.oplog.margin() {
            (other.oplog, other.risk)
        } else {
            (self.oplog, self.risk)
        };
        Self {
            rules,
            causes,
            partitions,
            oplog,
            risk,
            propagation: self.propagation.joined(&other.propagation),
            dead_letters_known: self.dead_letters_known && other.dead_letters_known,
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
