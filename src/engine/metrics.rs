//! The daemon's metrics, in a registry of its own.
//!
//! Labels are rules, collections, operations, causes, outcomes and event names: all bounded by the config and by this
//! file, and never a document's id or value.

mod cause;
mod process;
mod recent_error;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder, core::Collector,
};
use tokio::time::Instant;

pub use cause::Cause;
use denormd_model::{clock::wall_millis, rule_state::RuleState};
use denormd_mongo::error::{Error, Kind, Result};
pub use recent_error::RecentError;
use recent_error::RecentErrors;

use crate::snapshot::{HeldBack, RuleFacts, Snapshot};

/// From one millisecond to ten minutes: a change stream answers within one millisecond, a failover takes a minute.
const PROPAGATION_BUCKETS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0];

/// The name of a key's reconciliation among the recent errors.
pub const RECONCILE: &str = "reconcile";

/// All metrics. There is one instance for each daemon, shared by every component that measures.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// 1 with the version and the commit of the program, which sets it.
    pub build: IntGaugeVec,
    /// Seconds since the oldest change that is not applied to each rule's targets was committed.
    pub rule_lag: GaugeVec,
    /// The configured lag objective of each rule.
    max_lag: GaugeVec,
    /// Like `rule_lag`, including the rules that feed this one.
    pub rule_chain_lag: GaugeVec,
    /// Seconds since the oldest change that is not applied was committed. No series while it is not known, and on a
    /// standby.
    pub lag: GaugeVec,
    propagation: HistogramVec,
    events: IntCounterVec,
    reconciles: IntCounterVec,
    matched: IntCounterVec,
    modified: IntCounterVec,
    write_seconds: HistogramVec,
    writes_in_flight: IntGauge,
    retries: IntCounterVec,
    dead_letters_recorded: IntCounterVec,
    /// Number of dead letters.
    dead_letters: IntGaugeVec,
    /// The rules that had dead letters when they were last counted.
    with_dead_letters: Mutex<BTreeSet<String>>,
    /// 1 while a rule's backfill is open.
    pub backfill_running: IntGaugeVec,
    fan_outs: IntGaugeVec,
    /// Targets that the open backfill has read.
    pub backfill_scanned: IntGaugeVec,
    /// Targets that the open backfill has to read.
    pub backfill_total: IntGaugeVec,
    /// 1 for the reason that limits the speed of the open backfill.
    backfill_held_back: IntGaugeVec,
    /// Age of the checkpoint in seconds; 0 when it is the newest.
    pub checkpoint_age: GaugeVec,
    /// Age of the last answer of the slowest stream, in seconds.
    pub stream_age: GaugeVec,
    /// Seconds of oplog behind the checkpoint. No series if it cannot be read; in an outage, the last value minus the time since it was read.
    pub oplog_headroom: GaugeVec,
    /// Seconds until the checkpoint falls off the oplog at the present rate; infinite while it does not fall behind. In an outage, the
    /// last headroom minus the time since it was read.
    pub oplog_loss: GaugeVec,
    /// 1 if the oplog's first entry can be read.
    pub oplog_readable: IntGauge,
    /// Seconds since the newest canary write that has come through was sent. No series while another process leads.
    pub canary_age: GaugeVec,
    /// Least difference between the clocks of the replica set's members, in seconds.
    pub clock_skew: GaugeVec,
    config_ok: IntGauge,
    config_reloads: IntCounterVec,
    last_event: GaugeVec,
    /// Requests that wait or run.
    pub queue_depth: IntGauge,
    /// 1 if the server's certificate is not verified.
    pub tls_unverified: IntGauge,
    /// 1 while this process holds the lease and may write.
    pub leader: IntGauge,
    /// 1 for each partition that this process leads.
    pub partition_leader: IntGaugeVec,
    /// 1 for the role of this process in its deployment.
    pub role: IntGaugeVec,
    /// Active causes: one series for each cause without a rule, and one for each rule that it names.
    pub causes: IntGaugeVec,
    drift_found: IntCounterVec,
    drift_repaired: IntCounterVec,
    shadow_compared: IntCounterVec,
    shadow_differing: IntCounterVec,
    process: process::Process,
    recent_errors: Mutex<RecentErrors>,
    clock: AtomicI64,
}

/// Outcome of reconciling one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reconciled {
    /// Acknowledged by a majority.
    Done,
    /// Recorded as a dead letter.
    DeadLetter,
    /// To be retried.
    Failed,
    /// Postponed: a grace period, an unconfirmed mismatch, or the removal limit.
    Waiting,
}

impl Reconciled {
    const ALL: [Self; 4] = [Self::Done, Self::DeadLetter, Self::Failed, Self::Waiting];

    fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::DeadLetter => "dead_letter",
            Self::Failed => "failed",
            Self::Waiting => "waiting",
        }
    }
}

struct Families {
    registry: Registry,
}

impl Families {
    fn add<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> Result<C> {
        let add = || {
            let family = made?;
            self.registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        add().map_err(|error: prometheus::Error| Error::internal(format!("a metric cannot be made: {error}")))
    }

    fn gauge(&self, name: &str, help: &str) -> Result<Gauge> {
        self.add(Gauge::with_opts(Opts::new(name, help)))
    }

    fn int_gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.add(IntGauge::with_opts(Opts::new(name, help)))
    }

    fn gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec> {
        self.add(GaugeVec::new(Opts::new(name, help), labels))
    }

    fn int_gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec> {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn int_counter_vec(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn histogram_vec(&self, name: &str, help: &str, labels: &[&str]) -> Result<HistogramVec> {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(PROPAGATION_BUCKETS.to_vec()), labels))
    }
}

impl Metrics {
    /// Registers all metric families, without series.
    pub fn new() -> Result<Arc<Self>> {
        let registry = Registry::new();
        let f = Families { registry: registry.clone() };
        let metrics = Self {
            build: f.int_gauge_vec("denormd_build_info", "Always 1; the labels are the program's version and commit.", &["version", "commit"])?,
            rule_lag: f.gauge_vec("denormd_rule_lag_seconds", "Age in seconds of the oldest change that is not yet applied to the rule's targets; 0 if there is none.", &["rule"])?,
            max_lag: f.gauge_vec("denormd_rule_max_lag_seconds", "The rule's lag objective (`max_lag`), in seconds.", &["rule"])?,
            rule_chain_lag: f.gauge_vec("denormd_rule_chain_lag_seconds", "The largest lag of the rule and the rules that feed it, in seconds.", &["rule"])?,
            lag: f.gauge_vec("denormd_lag_seconds", "Age in seconds of the oldest change that is not yet applied; 0 if there is none. Absent on a standby.", &[])?,
            propagation: f.histogram_vec("denormd_propagation_seconds", "Time from the commit of a source's change to the acknowledged write of its targets.", &["rule"])?,
            events: f.int_counter_vec("denormd_events_total", "Change events read.", &["collection", "operation"])?,
            reconciles: f.int_counter_vec("denormd_reconciles_total", "Reconciled keys, by outcome.", &["rule", "outcome"])?,
            matched: f.int_counter_vec("denormd_targets_matched_total", "Targets matched by write statements.", &["rule"])?,
            modified: f.int_counter_vec("denormd_targets_modified_total", "Targets changed by write statements.", &["rule"])?,
            write_seconds: f.histogram_vec("denormd_write_duration_seconds", "Duration of write commands until a majority acknowledged them.", &["rule", "operation"])?,
            writes_in_flight: f.int_gauge("denormd_writes_in_flight", "Write commands that are not acknowledged yet.")?,
            retries: f.int_counter_vec("denormd_retries_total", "Keys that failed temporarily and are retried, by kind of error.", &["rule", "reason"])?,
            dead_letters_recorded: f.int_counter_vec("denormd_dead_letters_recorded_total", "Dead letters recorded, by reason; each failed retry counts again.", &["rule", "reason"])?,
            dead_letters: f.int_gauge_vec("denormd_dead_letters", "Current number of dead letters.", &["rule"])?,
            backfill_running: f.int_gauge_vec("denormd_backfill_running", "1 while the rule's backfill is open.", &["rule"])?,
            fan_outs: f.int_gauge_vec("denormd_fan_outs", "Fan-out jobs of the rule in progress.", &["rule"])?,
            backfill_scanned: f.int_gauge_vec("denormd_backfill_scanned_targets", "Targets read by the rule's last backfill.", &["rule"])?,
            backfill_held_back: f.int_gauge_vec("denormd_backfill_held_back", "1 for the reason that limits the speed of the rule's backfill.", &["rule", "reason"])?,
            backfill_total: f.int_gauge_vec("denormd_backfill_expected_targets", "Estimated number of targets that the rule's last backfill has to read.", &["rule"])?,
            checkpoint_age: f.gauge_vec("denormd_checkpoint_age_seconds", "Age in seconds of the checkpoint, from which a restart resumes; 0 if it is up to date.", &[])?,
            stream_age: f.gauge_vec("denormd_stream_age_seconds", "Seconds since the last answer of the slowest change stream, with or without events.", &[])?,
            oplog_headroom: f.gauge_vec("denormd_oplog_headroom_seconds", "Seconds of oplog between its first entry and the checkpoint; absent when the oplog cannot be read. While no primary answers, the last value minus the time since it was read.", &[])?,
            oplog_loss: f.gauge_vec("denormd_oplog_time_to_loss_seconds", "Seconds until the oplog no longer reaches back to the checkpoint, at the rate of the last minutes; +Inf while the checkpoint does not fall behind. While no primary answers, the last headroom minus the time since it was read.", &[])?,
            oplog_readable: f.int_gauge("denormd_oplog_readable", "1 when the oplog's first entry can be read.")?,
            canary_age: f.gauge_vec("denormd_canary_age_seconds", "Seconds since denormd sent the newest canary write that has passed every stream and is applied.", &[])?,
            clock_skew: f.gauge_vec("denormd_clock_skew_seconds", "Minimum difference between the clocks of the replica set's members, in seconds; absent while none of them answers.", &[])?,
            config_ok: f.int_gauge("denormd_config_last_reload_successful", "1 if the config that was read last is in force, 0 if it was refused.")?,
            config_reloads: f.int_counter_vec("denormd_config_reloads_total", "Reloads of the config, by outcome.", &["outcome"])?,
            last_event: f.gauge_vec("denormd_last_event_timestamp_seconds", "Time of this instance's last timeline event of this name, in seconds since 1970.", &["event"])?,
            queue_depth: f.int_gauge("denormd_queue_depth", "Reconcile requests that are pending or running, counting each named target.")?,
            tls_unverified: f.int_gauge("denormd_tls_unverified", "1 while the connection string disables verification of the server's certificate.")?,
            leader: f.int_gauge("denormd_leader", "1 while this process holds a valid lease and may write.")?,
            role: f.int_gauge_vec("denormd_role", "1 for the current role of this process: starting, leader, standby, or unknown (the lease cannot be read or renewed).", &["role"])?,
            partition_leader: f.int_gauge_vec("denormd_partition_leader", "1 while this process leads the partition; an undivided deployment has one.", &["partition"])?,
            causes: f.int_gauge_vec("denormd_cause", "1 while the cause is active. A cause that concerns rules has one series per rule; its series without a rule is 0.", &["reason", "rule"])?,
            drift_found: f.int_counter_vec("denormd_drift_found_total", "Targets that differed from their definition although no pending change explains it.", &["rule"])?,
            drift_repaired: f.int_counter_vec("denormd_drift_repaired_total", "Drifted targets that were repaired.", &["rule"])?,
            shadow_compared: f.int_counter_vec("denormd_shadow_compared_total", "Targets compared by a rule in shadow mode.", &["rule"])?,
            shadow_differing: f.int_counter_vec("denormd_shadow_differing_total", "Targets that a rule in shadow mode would have changed.", &["rule"])?,
            process: process::Process::new(&f)?,
            recent_errors: Mutex::default(),
            with_dead_letters: Mutex::default(),
            clock: AtomicI64::new(0),
            registry,
        };
        for cause in Cause::ALL {
            metrics.causes.with_label_values(&[cause.name(), ""]).set(0);
        }
        for outcome in ["done", "refused"] {
            metrics.config_reloads.with_label_values(&[outcome]);
        }
        metrics.divided(1);
        metrics.config_ok.set(1);
        Ok(Arc::new(metrics))
    }

    fn lags_of_a_rule(&self) -> [&GaugeVec; 3] {
        [&self.rule_lag, &self.rule_chain_lag, &self.max_lag]
    }

    fn counts_of_a_rule(&self) -> [&IntGaugeVec; 4] {
        [&self.backfill_running, &self.fan_outs, &self.backfill_scanned, &self.backfill_total]
    }

    /// Creates the series of these rules, at zero, so that none is missing before the first event. The number of dead letters
    /// is not known before they are counted.
    pub fn rules<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        for rule in names {
            for family in self.lags_of_a_rule() {
                family.with_label_values(&[rule]);
            }
            for family in self.counts_of_a_rule() {
                family.with_label_values(&[rule]);
            }
            for family in [&self.matched, &self.modified, &self.drift_found, &self.drift_repaired] {
                family.with_label_values(&[rule]);
            }
            for outcome in Reconciled::ALL {
                self.reconciles.with_label_values(&[rule, outcome.name()]);
            }
            self.propagation.with_label_values(&[rule]);
            for passing in [Kind::Connection, Kind::Unavailable, Kind::TimedOut, Kind::NotReplicated] {
                self.retries.with_label_values(&[rule, passing.policy().name]);
            }
        }
    }

    /// Records the number of dead letters of a rule, once they are counted.
    pub fn dead_letters_counted(&self, rule: &str, count: u64) {
        self.dead_letters.with_label_values(&[rule]).set(i64::try_from(count).unwrap_or(i64::MAX));
        let mut with_dead_letters = self.with_dead_letters.lock();
        if count > 0 {
            with_dead_letters.insert(rule.to_owned())
        } else {
            with_dead_letters.remove(rule)
        };
    }

    /// Records that it is not known whether there are dead letters.
    pub fn dead_letters_unknown(&self) {
        self.dead_letters.reset();
        self.with_dead_letters.lock().clear();
    }

    /// True if the rule had dead letters when they were last counted.
    pub fn has_dead_letters(&self, rule: &str) -> bool {
        self.with_dead_letters.lock().contains(rule)
    }

    /// Removes the gauges of rules that no longer exist.
    fn retire(&self, rules: &[RuleFacts]) {
        let gone = |name: &String| rules.iter().all(|rule| rule.name != *name);
        for rule in rules_of(&self.max_lag).filter(gone) {
            for reason in HeldBack::ALL {
                self.backfill_held_back.remove_label_values(&[rule.as_str(), reason.name()]).ok();
            }
            for family in self.lags_of_a_rule() {
                // The family may have no series for the rule.
                family.remove_label_values(&[rule.as_str()]).ok();
            }
            for family in self.counts_of_a_rule().into_iter().chain([&self.dead_letters]) {
                family.remove_label_values(&[rule.as_str()]).ok();
            }
        }
    }

    /// Counts change events that were read.
    pub fn events(&self, collection: &str, operation: &str, count: u64) {
        self.events.with_label_values(&[collection, operation]).inc_by(count);
    }

    /// Counts keys of a rule that were reconciled.
    pub fn reconciled(&self, rule: &str, outcome: Reconciled, count: u64) {
        self.reconciles.with_label_values(&[rule, outcome.name()]).inc_by(count);
    }

    /// Histogram of the time from commit to acknowledged write, in seconds.
    #[must_use]
    pub fn propagation(&self, rule: &str) -> Histogram {
        self.propagation.with_label_values(&[rule])
    }

    /// Counts a write command that is sent now. The returned guard ends with it.
    #[must_use]
    pub fn write<'a>(&'a self, rule: &'a str, operation: &'static str) -> Writing<'a> {
        self.writes_in_flight.inc();
        Writing { metrics: self, rule, operation, started: Instant::now() }
    }

    /// Counts a key that failed and will be retried.
    pub fn retried(&self, rule: &str, error: &Error) {
        self.retries.with_label_values(&[rule, error.kind.policy().name]).inc();
        self.record_error(Some(rule), RECONCILE, error);
    }

    /// Counts a key or a target that became a dead letter.
    pub fn dead_letter(&self, rule: &str, error: &Error) {
        let reason =
            error.code.map_or_else(|| error.kind.policy().name.to_owned(), |code| format!("server_error_{code}"));
        self.dead_letters_recorded.with_label_values(&[rule, &reason]).inc();
        self.record_error(Some(rule), "became a dead letter", error);
    }

    /// Counts a target that differed although no change explains it; with `repaired`, it is being repaired.
    pub fn drifted(&self, rule: &str, repaired: bool) {
        self.drift_found.with_label_values(&[rule]).inc();
        if repaired {
            self.drift_repaired.with_label_values(&[rule]).inc();
        }
    }

    /// Counts a reload of the config, which is in force or refused.
    pub fn reloaded(&self, in_force: bool) {
        self.config_ok.set(i64::from(in_force));
        self.config_reloads.with_label_values(&[if in_force { "done" } else { "refused" }]).inc();
    }

    /// True if the config that was read last is in force.
    #[must_use]
    pub fn config_is_in_force(&self) -> bool {
        self.config_ok.get() == 1
    }

    /// Records the time of a timeline event by its name: a cause, or one of a few others.
    pub fn happened(&self, what: &str, at: i64) {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970 are far below 2^53")]
        self.last_event.with_label_values(&[what]).set(at as f64 / 1000.0);
    }

    /// Counts targets that a rule in shadow mode has compared instead of writing them.
    pub fn shadowed(&self, rule: &str, compared: u64, differing: u64) {
        self.shadow_compared.with_label_values(&[rule]).inc_by(compared);
        self.shadow_differing.with_label_values(&[rule]).inc_by(differing);
    }

    /// Adds an error to the recent errors. The error's text contains no values, see [`Error`].
    pub fn record_error(&self, rule: Option<&str>, doing: &'static str, error: &Error) {
        self.recent_errors.lock().add(rule, doing, error.kind.policy().name, &error.message);
    }

    /// The recent errors, newest first, with their times by the server's clock.
    #[must_use]
    pub fn recent_errors(&self) -> Vec<RecentError> {
        self.errors_within(Duration::MAX)
    }

    /// The errors of the last `window`, in the same way.
    #[must_use]
    pub fn errors_within(&self, window: Duration) -> Vec<RecentError> {
        self.recent_errors.lock().within(window, self.now())
    }

    /// Sets the gauges that follow from the state of the pipelines, and removes those of rules that no longer exist.
    pub fn show(&self, snapshot: &Snapshot) {
        self.retire(&snapshot.rules);
        self.queue_depth.set(saturating_i64(snapshot.depth));
        for (nth, facts) in snapshot.rules.iter().enumerate() {
            let rule = &[facts.name.as_str()];
            let progress = snapshot.backfills.get(&facts.name);
            let is_backfilling = snapshot.states.get(nth).is_some_and(RuleState::is_backfilling);
            self.backfill_running.with_label_values(rule).set(i64::from(is_backfilling));
            self.backfill_scanned
                .with_label_values(rule)
                .set(progress.map_or(0, |progress| saturating_i64(progress.scanned)));
            let total = progress.and_then(|progress| progress.total);
            self.backfill_total.with_label_values(rule).set(total.map_or(0, saturating_i64));
            let why = progress.and_then(|progress| progress.held_back);
            for reason in HeldBack::ALL.into_iter().filter(|_| progress.is_some()) {
                let held_back = self.backfill_held_back.with_label_values(&[facts.name.as_str(), reason.name()]);
                held_back.set(i64::from(why == Some(reason)));
            }
            self.max_lag.with_label_values(rule).set(facts.max_lag.as_secs_f64());
            self.fan_outs.with_label_values(rule).set(snapshot.fan_outs.get(&nth).copied().map_or(0, saturating_i64));
        }
    }

    /// Clears the gauges that a leader sets, in an instance that stands by: those that count are 0 again, the others absent.
    pub fn reset_leader_gauges(&self) {
        self.queue_depth.set(0);
        self.oplog_readable.set(0);
        for rule in rules_of(&self.max_lag) {
            self.counts_of_a_rule().into_iter().for_each(|family| family.with_label_values(&[&rule]).set(0));
        }
        let absent = [&self.checkpoint_age, &self.stream_age, &self.oplog_headroom, &self.oplog_loss, &self.clock_skew];
        absent.into_iter().for_each(GaugeVec::reset);
        self.backfill_held_back.reset();
        self.dead_letters_unknown();
    }

    /// Records the number of partitions of the deployment; this process leads none of them yet.
    pub fn divided(&self, partitions: u32) {
        self.partition_leader.reset();
        for place in 0..partitions {
            self.partition_leader.with_label_values(&[&place.to_string()]).set(0);
        }
    }

    /// Sets the lead of the server's clock over this machine's, in milliseconds.
    pub fn set_clock(&self, offset: i64) {
        self.clock.store(offset, Ordering::Relaxed);
    }

    /// The server's clock, in milliseconds since 1970. Commit times refer to it.
    #[must_use]
    pub fn now(&self) -> i64 {
        wall_millis() + self.clock.load(Ordering::Relaxed)
    }

    /// Number of write commands that wait for their answer.
    #[must_use]
    pub fn in_flight(&self) -> i64 {
        self.writes_in_flight.get()
    }

    /// The number of write commands so far, and their total duration in seconds.
    #[must_use]
    pub fn writes(&self) -> (u64, f64) {
        histogram_values(&self.write_seconds).fold((0, 0.0), |(count, sum), (_, h)| (count + h.count, sum + h.sum))
    }

    /// Each rule's propagation times so far: counts by bucket, not cumulative; the last bucket has no upper bound.
    #[must_use]
    pub fn propagations(&self) -> Vec<(String, Vec<u64>)> {
        histogram_values(&self.propagation).map(|(rule, h)| (rule, h.buckets)).collect()
    }

    /// The upper bounds of the propagation buckets, in seconds.
    #[must_use]
    pub fn bounds() -> &'static [f64] {
        &PROPAGATION_BUCKETS
    }

    /// Number of events read so far, and of each rule's changed targets.
    #[must_use]
    pub fn totals(&self) -> (u64, Vec<(String, u64)>) {
        let sum = |family: &IntCounterVec| counter_values(family).collect::<Vec<_>>();
        (sum(&self.events).iter().map(|(_, n)| n).sum(), sum(&self.modified))
    }

    /// Each rule's number of targets that differed although no change explains it, and the number of those repaired.
    #[must_use]
    pub fn drift(&self) -> BTreeMap<String, (u64, u64)> {
        let mut drift: BTreeMap<String, (u64, u64)> =
            counter_values(&self.drift_found).map(|(rule, n)| (rule, (n, 0))).collect();
        for (rule, repaired) in counter_values(&self.drift_repaired) {
            drift.entry(rule).or_default().1 = repaired;
        }
        drift
    }

    /// The metrics in Prometheus' text format.
    pub fn expose(&self) -> Result<Vec<u8>> {
        self.process.refresh();
        let mut out = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut out)
            .map_err(|error| Error::internal(format!("the metrics cannot be written: {error}")))?;
        Ok(out)
    }
}

/// A write command that waits for its answer.
#[derive(Debug)]
pub struct Writing<'a> {
    metrics: &'a Metrics,
    rule: &'a str,
    operation: &'static str,
    started: Instant,
}

impl Writing<'_> {
    /// Counts the answer: the matched and the modified documents.
    pub fn done(self, matched: u64, modified: u64) {
        let metrics = self.metrics;
        metrics.matched.with_label_values(&[self.rule]).inc_by(matched);
        metrics.modified.with_label_values(&[self.rule]).inc_by(modified);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.metrics.writes_in_flight.dec();
        let seconds = self.started.elapsed().as_secs_f64();
        self.metrics.write_seconds.with_label_values(&[self.rule, self.operation]).observe(seconds);
    }
}

struct Counted {
    count: u64,
    sum: f64,
    buckets: Vec<u64>,
}

fn histogram_values(family: &HistogramVec) -> impl Iterator<Item = (String, Counted)> {
    family.collect().into_iter().flat_map(|family| family.get_metric().to_vec()).map(|metric| {
        let h = metric.get_histogram();
        let mut below = 0;
        let mut buckets: Vec<u64> = h
            .get_bucket()
            .iter()
            .map(|bucket| {
                let own = bucket.cumulative_count().saturating_sub(below);
                below = bucket.cumulative_count();
                own
            })
            .collect();
        buckets.push(h.get_sample_count().saturating_sub(below));
        (rule_of(metric.get_label()), Counted { count: h.get_sample_count(), sum: h.get_sample_sum(), buckets })
    })
}

fn counter_values(family: &IntCounterVec) -> impl Iterator<Item = (String, u64)> {
    family.collect().into_iter().flat_map(|family| family.get_metric().to_vec()).map(|metric| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter of whole numbers")]
        let value = metric.get_counter().get_value() as u64;
        (rule_of(metric.get_label()), value)
    })
}

fn rules_of(family: &GaugeVec) -> impl Iterator<Item = String> {
    let metrics = family.collect().into_iter().flat_map(|family| family.get_metric().to_vec());
    metrics.map(|metric| rule_of(metric.get_label()))
}

fn rule_of(labels: &[prometheus::proto::LabelPair]) -> String {
    labels.iter().find(|label| label.name() == "rule").map(|label| label.value().to_owned()).unwrap_or_default()
}

fn saturating_i64(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}
