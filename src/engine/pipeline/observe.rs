//! Observations that the pipeline publishes about itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    change::Change,
    checkpoint::fan_out::FanOut,
    metrics::{Observation, Reconciled, RuleFacts, StreamFacts},
    reconcile::{Outcome, run::End},
    request::Task,
    watch::Delivery,
};
use denormd_rules::plan::{Keyed, Plan, RuleId};

use super::Pipeline;

/// Interval between observations.
const EVERY: Duration = Duration::from_millis(100);

/// State kept between observations.
pub(super) struct Observer {
    rules: Arc<[RuleFacts]>,
    last: Option<Instant>,
    /// Rules whose history was lost and whose backfill has not ended since.
    pub degraded: BTreeSet<RuleId>,
}

impl Observer {
    pub fn new(plan: &Plan) -> Self {
        Self { rules: facts(plan), last: None, degraded: BTreeSet::new() }
    }
}

fn facts(plan: &Plan) -> Arc<[RuleFacts]> {
    let databases: Vec<String> = plan.databases().into_iter().collect();
    let mut fed_by: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); plan.rules.len()];
    // In the plan's order, each rule is complete before it is passed on.
    for rule in &plan.order {
        for fed in &plan.feeds[rule.0] {
            let mut from = fed_by[rule.0].clone();
            from.insert(rule.0);
            fed_by[fed.0].extend(from);
        }
    }
    let facts = plan.rules.iter().zip(fed_by).map(|(rule, fed_by)| {
        let sides = [&rule.source.namespace, &rule.target.namespace];
        let touched = |(_, database): &(usize, &String)| sides.iter().any(|side| side.database == **database);
        RuleFacts {
            name: rule.name.clone(),
            source: rule.source.namespace.to_string(),
            target: rule.target.namespace.to_string(),
            keyed_by_target: rule.keyed == Keyed::Target,
            max_lag: rule.max_lag,
            fed_by: fed_by.into_iter().filter(|from| *from != rule.id.0).collect(),
            streams: databases.iter().enumerate().filter(touched).map(|(nth, _)| nth).collect(),
        }
    });
    facts.collect()
}

impl Pipeline {
    pub(super) fn count_events(&mut self, delivery: &Delivery) {
        let mut counts: BTreeMap<(&denormd_model::namespace::Namespace, &'static str), u64> = BTreeMap::new();
        for event in &delivery.events {
            *counts.entry((&event.namespace, operation(&event.change))).or_default() += 1;
        }
        for ((namespace, operation), count) in counts {
            // Only collections of the config: a rename or `$out` names others, without bound.
            let known = self.observer.rules.iter().any(|rule| {
                let name = namespace.to_string();
                rule.source == name || rule.target == name
            });
            let collection = if known { namespace.to_string() } else { "other".to_owned() };
            self.context.metrics.events(&collection, operation, count);
        }
    }

    pub(super) fn count_outcome(&self, outcome: &Outcome) {
        let now = self.context.metrics.now();
        let (metrics, rule) = (&self.context.metrics, &self.context.plan.rule(outcome.lane.0).name);
        let writes = matches!(outcome.lane.1, Task::Value | Task::Target);
        let propagation = metrics.propagation(rule);
        let mut counts = [0_u64; 4];
        for ended in &outcome.keys {
            let (place, outcome) = match &ended.end {
                End::Done | End::FanOut(_) => (0, Reconciled::Done),
                End::SetAside => (1, Reconciled::SetAside),
                End::Failed(error) => {
                    metrics.retried(rule, error);
                    (2, Reconciled::Failed)
                }
                End::Later(_) | End::RemovalLimit | End::SourceGone => (3, Reconciled::Waiting),
            };
            counts[place] += 1;
            if let Some(committed) = ended.work.committed.filter(|_| writes && outcome == Reconciled::Done) {
                #[expect(clippy::cast_precision_loss, reason = "milliseconds of a lag, not of an age")]
                propagation.observe((now - committed).max(0) as f64 / 1000.0);
            }
        }
        for (outcome, count) in
            [Reconciled::Done, Reconciled::SetAside, Reconciled::Failed, Reconciled::Waiting].into_iter().zip(counts)
        {
            metrics.reconciled(rule, outcome, count);
        }
    }

    fn fan_outs_of(&self, rule: RuleId) -> impl Iterator<Item = &FanOut> {
        self.fan_outs.values().filter(move |fan_out| fan_out.subject.rule == rule)
    }

    /// Commit time of the oldest change that is not applied, including those that fan-out jobs carry.
    fn oldest(&self, rule: RuleId) -> Option<i64> {
        let fan_outs_running = self.fan_outs_of(rule).filter_map(|fan_out| fan_out.committed);
        self.schedule.oldest(rule).into_iter().chain(fan_outs_running).min()
    }

    /// Publishes the progress at once: a command waits for a state to be reported.
    pub(super) fn observe_now(&mut self) {
        self.observer.last = self.observer.last.and_then(|last| last.checked_sub(EVERY));
        self.observe();
    }

    /// Publishes the progress, at most ten times a second.
    pub(super) fn observe(&mut self) {
        self.context.metrics.turn(self.context.partition.place());
        if self.observer.last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        if self.observer.last.is_none() {
            self.context.metrics.rules(self.observer.rules.iter().map(|rule| rule.name.as_str()));
        }
        self.observer.last = Some(Instant::now());
        let rules = &self.rules;
        self.observer.degraded.retain(|rule| rules.state(*rule).is_backfilling());
        let numbers = |rules: &BTreeSet<RuleId>| rules.iter().map(|rule| rule.0).collect();
        let streams = self.streams.iter().enumerate().map(|(nth, stream)| StreamFacts {
            database: stream.spec.database.clone(),
            reached: self.schedule.reached(nth).time,
            applied: self.schedule.applied(nth),
            saved: stream.saved.as_ref().map(|position| position.time),
            delivered: stream.delivered,
        });
        let observation = Observation {
            at: Instant::now(),
            oldest: (0..self.observer.rules.len()).map(|rule| self.oldest(RuleId(rule))).collect(),
            fan_outs: (0..self.observer.rules.len()).map(|rule| self.fan_outs_of(RuleId(rule)).count()).collect(),
            late: (0..self.observer.rules.len()).map(|rule| self.schedule.late(RuleId(rule))).collect(),
            rules: self.observer.rules.clone(),
            streams: streams.collect(),
            depth: self.schedule.depth(),
            capacity: self.context.limits.pending,
            full: !self.schedule.has_room(),
            keys: self.schedule.keys(),
            states: self.rules.states().clone(),
            degraded: numbers(&self.observer.degraded),
        };
        self.context.metrics.observe(self.context.partition.place(), observation);
    }
}

fn operation(change: &Change) -> &'static str {
    match change {
        Change::Insert(_) => "insert",
        Change::Replace(_) => "replace",
        Change::Update(_) => "update",
        Change::Delete => "delete",
        Change::Drop => "drop",
        Change::Rename(_) => "rename",
        Change::DropDatabase => "drop_database",
        Change::Other => "other",
    }
}
