//! The snapshot and the counters that the pipeline publishes.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::{
    change::Change,
    metrics::Reconciled,
    reconcile::{Outcome, batch::End},
    request::Task,
    snapshot::Snapshot,
    watch::Delivery,
};
use denormd_rules::plan::RuleId;

use super::Pipeline;

/// Interval between publications of the figures of each rule.
const EVERY: Duration = Duration::from_millis(100);

impl Pipeline {
    pub(super) fn count_events(&mut self, delivery: &Delivery) {
        let mut counts: BTreeMap<(&denormd_model::namespace::Namespace, &'static str), u64> = BTreeMap::new();
        for event in &delivery.events {
            *counts.entry((&event.namespace, operation(&event.change))).or_default() += 1;
        }
        for ((namespace, operation), count) in counts {
            // Only collections of the config: a rename or `$out` names others, without bound.
            let known = self
                .context
                .plan
                .rules
                .iter()
                .any(|rule| rule.source.namespace == *namespace || rule.target.namespace == *namespace);
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
                End::DeadLetter => (1, Reconciled::DeadLetter),
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
            [Reconciled::Done, Reconciled::DeadLetter, Reconciled::Failed, Reconciled::Waiting].into_iter().zip(counts)
        {
            metrics.reconciled(rule, outcome, count);
        }
    }

    /// Commit time of the oldest change that is not applied, including those that fan-out jobs carry.
    fn oldest(&self, rule: RuleId) -> Option<i64> {
        let of_fan_outs = self.context.memory.fan_outs.oldest(rule);
        self.schedule.queue().oldest(rule).into_iter().chain(of_fan_outs).min()
    }

    /// Publishes all figures at once: a command waits for a state to be reported.
    pub(super) fn publish_now(&mut self) {
        self.published = None;
        self.publish();
    }

    /// Publishes the snapshot: the figures of each rule at most ten times a second.
    pub(super) fn publish(&mut self) {
        let now = Instant::now();
        let due = self.published.is_none_or(|last| now - last >= EVERY);
        if due {
            self.published = Some(now);
        }
        let published = self.rules.published();
        let streams = self.streams.facts(&self.schedule);
        self.context.published.update(|snapshot| {
            let facts = |snapshot: &Snapshot| {
                (snapshot.applied(), snapshot.depth, snapshot.fan_outs.is_empty(), snapshot.rewound)
            };
            let before = facts(snapshot);
            (snapshot.at, snapshot.ended) = (now, false);
            snapshot.streams = streams;
            snapshot.depth = self.schedule.queue().depth();
            snapshot.full = !self.schedule.queue().has_room();
            snapshot.rewound = self.streams.is_rewound();
            let fan_outs = &self.context.memory.fan_outs;
            if due || snapshot.fan_outs.is_empty() == fan_outs.any() {
                snapshot.fan_outs = fan_outs.count();
            }
            let states = snapshot.states != published;
            if states {
                snapshot.states = published;
            }
            if due {
                self.publish_rules(snapshot);
            }
            states || before != facts(snapshot)
        });
    }

    /// The figures of each rule.
    fn publish_rules(&self, snapshot: &mut Snapshot) {
        let rules = || (0..snapshot.rules.len()).map(RuleId);
        (snapshot.oldest, snapshot.late) =
            rules().map(|rule| (self.oldest(rule), self.schedule.queue().late(rule))).unzip();
        snapshot.capacity = self.context.limits.pending;
        snapshot.keys = self.schedule.queue().keys();
        snapshot.running = self.schedule.queue().running().map(|rule| rule.0).collect();
        snapshot.degraded = self.rules.degraded().map(|rule| rule.0).collect();
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
