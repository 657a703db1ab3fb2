//! The one state that a pipeline publishes: commands wait for it, and status and metrics are computed from it on demand.
//! So lag also grows while the pipeline is stuck.

mod progress;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use denormd_model::{position::ClusterTime, rule_state::RuleState};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Keyed, Plan, RuleId};
use tokio::{sync::watch, time::Instant};

pub use progress::{AuditProgress, BackfillProgress, HeldBack};

/// A pipeline at one moment. Rules and streams are identified by their index here.
///
/// The pipeline updates it on each turn of its loop; the figures of each rule, which cost more, ten times a second.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Time of the loop's last turn.
    pub at: Instant,
    /// The rules, in the config's order.
    pub rules: Arc<[RuleFacts]>,
    /// The state of each rule. Empty before the pipeline has started.
    pub states: Arc<Vec<RuleState>>,
    /// The streams. Empty before the pipeline has started.
    pub streams: Vec<StreamFacts>,
    /// Requests that wait or run, counting named targets.
    pub depth: usize,
    /// Number of requests from which on the streams wait.
    pub capacity: usize,
    /// True while the streams wait for the queue.
    pub full: bool,
    /// Number of keys that are queued or run.
    pub keys: usize,
    /// Rules with a running batch.
    pub running: BTreeSet<usize>,
    /// For each rule that has any: number of fan-out jobs in progress.
    pub fan_outs: BTreeMap<usize, usize>,
    /// For each rule: commit time of the oldest change that waits or runs, in milliseconds since 1970 by the server's
    /// clock.
    pub oldest: Vec<Option<i64>>,
    /// For each rule: number of keys that wait or run because of a change.
    pub late: Vec<usize>,
    /// Rules whose history was lost and whose backfill has not ended since.
    pub degraded: BTreeSet<usize>,
    /// The last backfill of each rule in this process, by the rule's name.
    pub backfills: BTreeMap<String, BackfillProgress>,
    /// The audit of each rule that is audited, by the rule's name.
    pub audits: BTreeMap<String, AuditProgress>,
    /// For each rule with targets that differ from their definition and were not repaired (`on_drift: report`), by its name: time at
    /// which the last one was found. Ends with an audit round or a backfill that began later.
    pub unrepaired: BTreeMap<String, Instant>,
    /// Time at which the last write was acknowledged.
    pub last_write: Option<Instant>,
    /// The state database has an older position than this pipeline has saved: the pipeline has ended, and the next one
    /// starts from that position.
    pub rewound: bool,
    /// True if the pipeline has ended.
    pub ended: bool,
}

impl Snapshot {
    /// A pipeline that has not started yet.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            at: Instant::now(),
            rules: facts(plan),
            states: Arc::default(),
            streams: Vec::new(),
            depth: 0,
            capacity: 0,
            full: false,
            keys: 0,
            running: BTreeSet::new(),
            fan_outs: BTreeMap::new(),
            oldest: vec![None; plan.rules.len()],
            late: vec![0; plan.rules.len()],
            degraded: BTreeSet::new(),
            backfills: BTreeMap::new(),
            audits: BTreeMap::new(),
            unrepaired: BTreeMap::new(),
            last_write: None,
            rewound: false,
            ended: false,
        }
    }

    /// Everything committed up to this time is applied and acknowledged.
    #[must_use]
    pub fn applied(&self) -> ClusterTime {
        self.streams.iter().map(|stream| stream.applied).min().unwrap_or_default()
    }

    /// True while the backfill of any rule is open.
    #[must_use]
    pub fn is_backfilling(&self) -> bool {
        self.states.iter().any(RuleState::is_backfilling)
    }

    /// The rules whose state matches the predicate.
    #[must_use]
    pub fn in_state(&self, is: impl Fn(&RuleState) -> bool) -> BTreeSet<usize> {
        self.states.iter().enumerate().filter(|(_, state)| is(state)).map(|(nth, _)| nth).collect()
    }

    /// True if everything committed by `time` is applied, including the work that it caused.
    #[must_use]
    pub fn has_applied(&self, time: ClusterTime) -> bool {
        self.applied() >= time && self.fan_outs.is_empty() && !self.is_backfilling()
    }

    /// The time up to which everything is applied, if the targets of `rule` are up to date by then. None while the rule
    /// is being backfilled, has an open fan-out job, waits for `denormd backfill`, or is stopped. Jobs of other rules do not matter:
    /// what they write to its sources is applied like other changes.
    #[must_use]
    pub fn applied_of(&self, rule: RuleId) -> Option<ClusterTime> {
        let settled =
            |state: &RuleState| !state.is_backfilling() && !state.is_stopped() && *state != RuleState::AwaitingBackfill;
        (!self.fan_outs.contains_key(&rule.0) && self.states.get(rule.0).is_none_or(settled)).then(|| self.applied())
    }

    /// True unless the rule is stopped, or its existing targets wait for `denormd backfill`: a lag of 0 would call its
    /// targets up to date.
    #[must_use]
    pub fn has_lag(&self, rule: usize) -> bool {
        self.runs(rule) && self.states.get(rule) != Some(&RuleState::AwaitingBackfill)
    }

    /// True unless the rule is stopped.
    #[must_use]
    pub fn runs(&self, rule: usize) -> bool {
        self.states.get(rule).is_none_or(|state| !state.is_stopped())
    }

    /// Forgets a rule's unrepaired drift that was found before `since`: every target has been compared or written after that.
    pub fn clear_drift(&mut self, rule: &str, since: Instant) {
        self.unrepaired.retain(|name, found| name != rule || *found >= since);
    }

    /// Keeps the progress of the jobs of the pipeline before this one, for those that have not started again, and its rules'
    /// unrepaired drift.
    pub fn inherit(&mut self, before: &Self) {
        let (backfills, audits) = (before.backfills.clone(), before.audits.clone());
        self.backfills = backfills.into_iter().chain(std::mem::take(&mut self.backfills)).collect();
        self.audits = audits.into_iter().chain(std::mem::take(&mut self.audits)).collect();
        let unrepaired = before.unrepaired.clone().into_iter().chain(std::mem::take(&mut self.unrepaired));
        self.unrepaired = unrepaired.filter(|(name, _)| self.rules.iter().any(|rule| rule.name == *name)).collect();
    }

    /// This snapshot with the rules and streams of another one. A rule that this one lacks has the other one's state, and a stream
    /// its position there, but is applied no further than the last of the streams here.
    fn aligned(mut self, with: &Self) -> Self {
        let by_name: HashMap<&str, usize> =
            self.rules.iter().enumerate().map(|(nth, rule)| (rule.name.as_str(), nth)).collect();
        let nth_here: Vec<Option<usize>> =
            with.rules.iter().map(|rule| by_name.get(rule.name.as_str()).copied()).collect();
        let of_rules = |old: &BTreeSet<usize>| -> BTreeSet<usize> {
            (0..nth_here.len()).filter(|nth| nth_here[*nth].is_some_and(|here| old.contains(&here))).collect()
        };
        let applied = self.applied();
        let stream = |there: &StreamFacts| match self.streams.iter().find(|own| own.database == there.database) {
            Some(own) => own.clone(),
            None => StreamFacts { applied: there.applied.min(applied), ..there.clone() },
        };
        let state = |(nth, there): (usize, &RuleState)| {
            nth_here[nth].and_then(|here| self.states.get(here)).unwrap_or(there).clone()
        };
        self.streams = with.streams.iter().map(stream).collect();
        self.states = Arc::new(with.states.iter().enumerate().map(state).collect());
        self.running = of_rules(&self.running);
        self.degraded = of_rules(&self.degraded);
        self.fan_outs =
            nth_here.iter().enumerate().filter_map(|(nth, here)| Some((nth, *self.fan_outs.get(&(*here)?)?))).collect();
        self.oldest = nth_here.iter().map(|here| self.oldest[(*here)?]).collect();
        self.late = nth_here.iter().map(|here| here.map_or(0, |here| self.late[here])).collect();
        self.rules = with.rules.clone();
        self
    }

    /// Merges the snapshots of two partitions: each rule is as late as in the later one. During a reload, two pipelines may
    /// briefly have different rules: then those of the newer snapshot count, if that pipeline has started.
    #[must_use]
    pub fn joined(self, other: Self) -> Self {
        let age = |snapshot: &Self| (!snapshot.streams.is_empty(), snapshot.at);
        let (newer, older) = if age(&other) > age(&self) { (other, self) } else { (self, other) };
        let older = older.aligned(&newer);
        newer.merged(older)
    }

    /// Merges the snapshot of another partition with the same rules and streams.
    fn merged(self, other: Self) -> Self {
        let earliest = |(a, b): (Option<i64>, Option<i64>)| a.into_iter().chain(b).min();
        let worse = |(a, b)| if RuleState::outranks(b, a) { b } else { a };
        let mut fan_outs = self.fan_outs;
        other.fan_outs.into_iter().for_each(|(rule, count)| *fan_outs.entry(rule).or_default() += count);
        Self {
            at: self.at.min(other.at),
            rules: self.rules,
            states: Arc::new(self.states.iter().zip(other.states.iter()).map(worse).cloned().collect()),
            streams: self.streams.iter().zip(&other.streams).map(|(a, b)| a.joined(b)).collect(),
            depth: self.depth + other.depth,
            capacity: self.capacity + other.capacity,
            full: self.full || other.full,
            keys: self.keys + other.keys,
            running: self.running.union(&other.running).copied().collect(),
            fan_outs,
            oldest: self.oldest.into_iter().zip(other.oldest).map(earliest).collect(),
            late: self.late.into_iter().zip(other.late).map(|(a, b)| a + b).collect(),
            degraded: self.degraded.union(&other.degraded).copied().collect(),
            backfills: joined(self.backfills, other.backfills, BackfillProgress::joined),
            audits: joined(self.audits, other.audits, AuditProgress::joined),
            unrepaired: joined(self.unrepaired, other.unrepaired, |a, b| *a.max(b)),
            last_write: self.last_write.max(other.last_write),
            rewound: self.rewound || other.rewound,
            ended: self.ended || other.ended,
        }
    }
}

fn joined<T>(mut all: BTreeMap<String, T>, more: BTreeMap<String, T>, join: fn(&T, &T) -> T) -> BTreeMap<String, T> {
    for (rule, other) in more {
        let one = match all.get(&rule) {
            Some(one) => join(one, &other),
            None => other,
        };
        all.insert(rule, one);
    }
    all
}

/// Facts about a rule that do not change.
#[derive(Debug, Clone)]
pub struct RuleFacts {
    /// Its name.
    pub name: String,
    /// The source collection.
    pub source: String,
    /// The target collection.
    pub target: String,
    /// True if its keys are targets. Otherwise they are values that sources and targets match on, each with many
    /// targets.
    pub keyed_by_target: bool,
    /// True if it compares, and writes nothing.
    pub shadow: bool,
    /// The configured lag objective.
    pub max_lag: Duration,
    /// Indexes of the rules that it reads from, directly or through other rules.
    pub fed_by: Vec<usize>,
    /// Indexes of the streams that it follows.
    pub streams: Vec<usize>,
}

fn facts(plan: &Plan) -> Arc<[RuleFacts]> {
    let databases: Vec<String> = plan.databases().into_iter().collect();
    let facts = plan.rules.iter().map(|rule| {
        let sides = [&rule.source.namespace, &rule.target.namespace];
        let touched = |(_, database): &(usize, &String)| sides.iter().any(|side| side.database == **database);
        RuleFacts {
            name: rule.name.clone(),
            source: rule.source.namespace.to_string(),
            target: rule.target.namespace.to_string(),
            keyed_by_target: rule.keyed == Keyed::Target,
            shadow: rule.shadow,
            max_lag: rule.max_lag,
            fed_by: plan.feeders(rule.id).into_iter().map(|feeder| feeder.0).collect(),
            streams: databases.iter().enumerate().filter(touched).map(|(nth, _)| nth).collect(),
        }
    });
    facts.collect()
}

/// Progress of a stream.
#[derive(Debug, Clone)]
pub struct StreamFacts {
    /// Its database.
    pub database: String,
    /// Everything up to here was read.
    pub reached: ClusterTime,
    /// Everything up to here is applied.
    pub applied: ClusterTime,
    /// The checkpoint: a restart begins here.
    pub saved: Option<ClusterTime>,
    /// Time of its last answer.
    pub delivered: Instant,
}

impl StreamFacts {
    /// Merges the streams of two partitions for the same database: the one that is further behind counts.
    fn joined(&self, other: &Self) -> Self {
        Self {
            database: self.database.clone(),
            reached: self.reached.min(other.reached),
            applied: self.applied.min(other.applied),
            // Without a checkpoint, a restart begins before any checkpoint.
            saved: self.saved.min(other.saved),
            delivered: self.delivered.min(other.delivered),
        }
    }
}

/// The place where a pipeline and its jobs publish their snapshot.
#[derive(Debug)]
pub struct Published(watch::Sender<Snapshot>);

impl Published {
    /// A pipeline of this plan that has not started yet.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self(watch::channel(Snapshot::new(plan)).0)
    }

    /// The snapshot, and a notification of each change that commands wait for.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Snapshot> {
        self.0.subscribe()
    }

    /// The current snapshot.
    #[must_use]
    pub fn borrow(&self) -> watch::Ref<'_, Snapshot> {
        self.0.borrow()
    }

    /// Changes the snapshot. Those that wait are notified if the closure returns true.
    pub fn update(&self, change: impl FnOnce(&mut Snapshot) -> bool) {
        self.0.send_if_modified(change);
    }

    /// Changes the snapshot without a notification.
    pub fn note(&self, change: impl FnOnce(&mut Snapshot)) {
        self.update(|snapshot| {
            change(snapshot);
            false
        });
    }

    /// Changes the progress of a rule's backfill, if one has started.
    pub fn backfill(&self, rule: &str, change: impl FnOnce(&mut BackfillProgress)) {
        self.note(|snapshot| {
            if let Some(progress) = snapshot.backfills.get_mut(rule) {
                change(progress);
            }
        });
    }

    /// Waits until everything committed by `time` is applied, including the work that it caused.
    pub async fn has_applied(&self, time: ClusterTime) -> Result<()> {
        let mut snapshot = self.subscribe();
        let applied = snapshot.wait_for(|snapshot| snapshot.ended || snapshot.has_applied(time)).await;
        match applied {
            Ok(snapshot) if snapshot.has_applied(time) => Ok(()),
            _ => Err(Error::internal("the pipeline has stopped")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    /// A pipeline of these rules that has applied everything up to this second.
    fn snapshot(names: &[&str], seconds: u32) -> Snapshot {
        let mut text = "mongodb: { uri: mongodb://localhost, database: d }\nrules:\n".to_owned();
        for name in names {
            let copy = format!("{{ source: s, target: t, match: {{ ref: _id }}, set: {{ {name}: $n }} }}");
            writeln!(text, "  - {{ name: {name}, copy: {copy} }}").unwrap();
        }
        let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
        let applied = ClusterTime { seconds, increment: 1 };
        let (database, delivered) = ("d".to_owned(), Instant::now());
        let stream = StreamFacts { database, reached: applied, applied, saved: None, delivered };
        Snapshot { streams: vec![stream], ..Snapshot::new(&plan) }
    }

    /// A reload reaches the partitions one after the other.
    #[test]
    fn a_partition_with_other_rules_still_counts() {
        let (old, new) = (snapshot(&["old"], 5), snapshot(&["new"], 9));
        assert_eq!(old.clone().joined(new.clone()).applied().seconds, 5);
        assert_eq!(new.clone().joined(old).applied().seconds, 5);
        let starting = Snapshot { streams: Vec::new(), ..snapshot(&["old"], 0) };
        assert_eq!(new.clone().joined(starting.clone()).applied(), ClusterTime::default());
        assert_eq!(starting.joined(new).applied(), ClusterTime::default());
    }

    /// Its lag vanished from the status for as long as the other partition took to put another rule into force.
    #[test]
    fn a_rule_is_as_late_as_in_the_partition_that_has_fewer_rules() {
        let late = Snapshot { oldest: vec![Some(7)], late: vec![3], ..snapshot(&["kept"], 5) };
        let newer = snapshot(&["added", "kept"], 9);
        for joined in [late.clone().joined(newer.clone()), newer.clone().joined(late.clone())] {
            assert_eq!((joined.oldest, joined.late), (vec![None, Some(7)], vec![0, 3]));
        }
    }

    #[test]
    fn a_rule_is_audited_when_all_partitions_have_done_it() {
        let audits = |compared, last_ended| {
            BTreeMap::from([("r".to_owned(), AuditProgress { compared, last_ended, ..AuditProgress::default() })])
        };
        let both = joined(audits(7, Some(5)), audits(9, None), AuditProgress::joined);
        assert_eq!(both, audits(7, None));
        assert_eq!(joined(audits(7, Some(5)), BTreeMap::new(), AuditProgress::joined), audits(7, Some(5)));
    }
}
