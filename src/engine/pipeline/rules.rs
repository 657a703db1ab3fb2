//! The registry of the rules, and the changes of their states while the pipeline runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
};

use bson::Bson;

use super::{
    Pipeline,
    feeders::Changed,
    record::{Change, Order, Recorded, Recorder},
    schedule::Hold,
};
use crate::jobs::backfill::BackfillRequest;
use denormd_model::{
    failpoint,
    namespace::Namespace,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::Result;
use denormd_rules::plan::{Plan, Rule, RuleId, Side};

/// The states of the rules as this leader knows them, each with the generation that it is recorded under. The state
/// database takes precedence: a state that a command has recorded under a newer generation replaces the one here.
#[derive(Debug)]
pub(super) struct Rules {
    states: Arc<Vec<RuleState>>,
    generations: Vec<i64>,
    /// The generation under which each rule was last resumed, and what it removes may have been agreed to.
    resumed: Vec<i64>,
    /// Time up to which an operator has accepted the loss of a rule's source: an earlier drop that is read later does
    /// not block the rule again.
    pub released: BTreeMap<RuleId, ClusterTime>,
    /// The recorded UUIDs of the rules' source collections; None for a source that a version without this field has
    /// seen.
    pub sources: BTreeMap<RuleId, Option<Bson>>,
    /// Rules whose changes were lost, and whose backfill has not ended since.
    degraded: BTreeSet<RuleId>,
    /// Changes that are not recorded yet.
    pub recorder: Recorder,
}

impl Rules {
    pub fn new(plan: &Plan) -> Self {
        Self {
            states: Arc::new(vec![RuleState::Live; plan.rules.len()]),
            generations: vec![0; plan.rules.len()],
            resumed: vec![0; plan.rules.len()],
            released: BTreeMap::new(),
            sources: BTreeMap::new(),
            degraded: BTreeSet::new(),
            recorder: Recorder::default(),
        }
    }

    /// The state of a rule.
    pub fn state(&self, rule: RuleId) -> &RuleState {
        &self.states[rule.0]
    }

    /// The generation that the state of a rule is recorded under.
    pub fn generation(&self, rule: RuleId) -> i64 {
        self.generations[rule.0]
    }

    /// The generation under which a rule that was stopped was resumed last. 0 if it was not.
    pub fn resumed(&self, rule: RuleId) -> i64 {
        self.resumed[rule.0]
    }

    /// Sets the state of a rule.
    pub fn set(&mut self, rule: RuleId, state: RuleState, generation: i64) {
        Arc::make_mut(&mut self.states)[rule.0] = state;
        self.generations[rule.0] = generation;
    }

    /// Takes over a recorded state, unless it or a newer one is known; returns true if it did. The answer to a write of ours
    /// may arrive after a read of the same state, whose backfill may be done by then, or of a newer one by a command.
    pub fn take(&mut self, rule: RuleId, state: RuleState, generation: i64) -> bool {
        let is_newer = generation > self.generation(rule);
        if is_newer {
            if self.state(rule).is_stopped() && !state.is_stopped() {
                self.resumed[rule.0] = generation;
            }
            self.set(rule, state, generation);
        }
        is_newer
    }

    /// Marks the rule as live after the backfill of this generation, unless its state has changed since.
    pub fn backfilled(&mut self, rule: RuleId, generation: i64) {
        if self.state(rule).is_backfilling() && self.generation(rule) <= generation {
            self.set(rule, RuleState::Live, generation);
            self.degraded.remove(&rule);
        }
    }

    /// Marks a rule whose changes were lost, as its record says. A rule that is live has been backfilled since: the answer to
    /// the write of the record may arrive after that.
    pub fn lose(&mut self, rule: RuleId) {
        if *self.state(rule) != RuleState::Live {
            self.degraded.insert(rule);
        }
    }

    /// The rules that are backfilled because changes were lost.
    pub fn degraded(&self) -> impl Iterator<Item = RuleId> {
        let recorded = self.degraded.iter().copied().filter(|rule| self.state(*rule).is_backfilling());
        recorded.chain(self.recorder.open().filter(|(_, change)| **change == Change::Lost).map(|(rule, _)| rule))
    }

    /// The state of each rule as it is published: a backfill that is not recorded yet counts as open.
    pub fn published(&self) -> Arc<Vec<RuleState>> {
        let mut states = self.states.clone();
        for (rule, change) in self.recorder.open() {
            if *self.state(rule) == RuleState::Live && matches!(change, Change::Backfill | Change::Lost) {
                Arc::make_mut(&mut states)[rule.0] = RuleState::BACKFILL;
            }
        }
        states
    }

    /// True if requests of a rule may run. A rule whose source is gone still runs if it only copies, because copying
    /// removes nothing.
    pub fn may_run(&self, plan: &Plan, rule: RuleId) -> bool {
        match self.state(rule) {
            RuleState::Blocked(BlockReason::SourceGone) => !plan.rule(rule).gathers(),
            state => !state.is_stopped(),
        }
    }
}

impl Pipeline {
    /// Orders a change of a rule's state to be recorded; the checkpoint does not pass the batch before that. Returns
    /// false if the state of the rule does not allow the change.
    pub(super) fn change(&mut self, rule: RuleId, change: Change, hold: Option<Hold>) -> bool {
        let applies = change.applies_to(self.rules.state(rule));
        if applies {
            let hold = hold.inspect(|hold| self.schedule.hold(*hold));
            let generation = self.rules.generation(rule);
            if let Some(spare) = self.rules.recorder.add(rule, change, hold, generation) {
                self.schedule.release(spare);
            }
        }
        applies
    }

    /// Begins to record the next change, unless one is being recorded.
    pub(super) fn record(&mut self) {
        while let Some(Order { rule, change, .. }) = self.rules.recorder.first() {
            let (rule, applies) = (*rule, change.applies_to(self.rules.state(*rule)));
            if applies {
                let generation = self.rules.generation(rule);
                return self.rules.recorder.start(&self.context, &self.store, generation);
            }
            // The state has changed since.
            if let Some(order) = self.rules.recorder.pop() {
                self.settle(order);
            }
        }
    }

    /// Records all ordered changes before the loop starts.
    pub(super) async fn record_all(&mut self) -> Result<()> {
        while let Some(order) = self.rules.recorder.pop() {
            if order.change.applies_to(self.rules.state(order.rule)) {
                let (rule, generation) = (self.context.plan.rule(order.rule), self.rules.generation(order.rule));
                // The driver's futures are large.
                let recorded = Box::pin(order.change.record(&self.context, &self.store, rule, generation)).await?;
                self.recorded(order, recorded);
            }
        }
        Ok(())
    }

    /// Applies a change that is recorded.
    pub(super) fn recorded(&mut self, order: Order, recorded: Recorded) {
        let context = self.context.clone();
        let rule = context.plan.rule(order.rule);
        match (&order.change, &recorded) {
            (Change::Block(reason), Recorded::State(RuleState::Blocked(_), _)) => {
                failpoint::here("held");
                let end = reason.end(&rule.name);
                tracing::error!(rule = %rule.name, %reason, "the rule is blocked: its fields stay as they are until {end}");
            }
            (Change::Block(reason), _) => {
                tracing::error!(rule = %rule.name, %reason, "the rule stays paused; once resumed, it is blocked");
            }
            (Change::Unavailable(reason), Recorded::State(RuleState::Unavailable { .. }, _)) => {
                tracing::error!(rule = %rule.name, reason, "the rule is unavailable until the cluster has what it needs; the others go on");
            }
            (Change::SourceSeen(uuid), Recorded::Source) => {
                self.rules.sources.insert(rule.id, Some(uuid.clone()));
            }
            (Change::SourceBack(uuid), Recorded::State(state, _)) if state.block().is_none() => {
                // If somebody has unblocked the rule meanwhile, it is not recorded. The next look at the sources records it.
                self.rules.sources.remove(&rule.id);
                let waits = *state == RuleState::AwaitingBackfill;
                let then = if waits {
                    "the rule still waits for `denormd backfill`"
                } else {
                    "the rule is backfilled from it"
                };
                tracing::info!(rule = %rule.name, "the source collection is there again: {then}");
                context.memory.sources.saw(&rule.source.namespace, Some(uuid.clone()));
            }
            // A backfill begins below. A change that was not recorded comes again, or an operator has paused the rule meanwhile.
            _ => {}
        }
        if let Recorded::State(state, generation) = recorded
            && self.rules.take(rule.id, state, generation)
        {
            self.act_on_state(rule.id);
        }
        if order.change == Change::Lost && self.rules.state(rule.id).is_backfilling() {
            self.rules.lose(rule.id);
        }
        self.settle(order);
    }

    /// Releases the batches and the outcomes that have waited for a change to be recorded.
    fn settle(&mut self, order: Order) {
        for hold in order.holds {
            self.schedule.release(hold);
        }
        for outcome in self.batches.parked.extract_if(.., |outcome| outcome.lane.0 == order.rule).collect::<Vec<_>>() {
            self.finish(outcome);
        }
    }

    /// Starts the backfill of a rule in whose state it is open.
    pub(super) fn act_on_state(&mut self, rule: RuleId) {
        let mut removals_agreed = false;
        if let RuleState::Backfilling { after, in_sources, agreed } = self.rules.state(rule).clone() {
            let generation = self.rules.generation(rule);
            self.context.counts.jobs.fetch_add(1, Ordering::Relaxed);
            // This runs once for each generation: at the start, and when a newer one is taken over.
            self.jobs.backfills.put(rule, BackfillRequest { rule, generation, after, in_sources });
            removals_agreed = agreed;
        }
        self.context.memory.removals.agree(rule, removals_agreed);
    }

    /// Takes over the state of a rule from the state database if it is newer: set by a command, or by a write of ours
    /// that timed out. A state read before the leader recorded another one is older and is ignored.
    pub(super) fn take_state(&mut self, Changed { rule, state, generation, released }: Changed) {
        let before = self.rules.state(rule).clone();
        if !self.rules.take(rule, state.clone(), generation) {
            return;
        }
        let is_released = released.is_some() && released != self.rules.released.get(&rule).copied();
        self.rules.released.extend(released.map(|until| (rule, until)));
        let context = self.context.clone();
        let name = &context.plan.rule(rule).name;
        match (&before, &state) {
            // The state in between, blocked after a pause, may not have been read.
            (RuleState::Blocked(reason) | RuleState::Paused { blocked: Some(reason), .. }, after)
                if after.block().is_none() && (before.is_blocked() || is_released) =>
            {
                self.context.memory.removals.reset(rule);
                // The loss was accepted: an absent source counts as empty.
                if *reason == BlockReason::SourceGone {
                    context.memory.sources.saw(&context.plan.rule(rule).source.namespace, None);
                    self.rules.sources.remove(&rule);
                }
                // Until now, the fields of this rule have kept documents.
                if matches!(reason, BlockReason::Adoption(_)) {
                    for other in creators_beside(&context.plan, rule) {
                        self.change(other, Change::Backfill, None);
                    }
                }
                tracing::info!(rule = %name, "the rule is unblocked");
            }
            (before, RuleState::Backfilling { .. }) if before.is_stopped() => {
                tracing::info!(rule = %name, "the rule is resumed");
            }
            (before, RuleState::AwaitingBackfill) if before.is_stopped() => {
                tracing::info!(rule = %name, "the rule runs again, and its existing targets still wait for `denormd backfill`");
            }
            (_, RuleState::Paused { .. }) => tracing::warn!(rule = %name, "the rule is paused"),
            (_, after) if after.is_stopped() => {
                tracing::warn!(rule = %name, state = after.name(), "the rule is stopped");
            }
            _ => {}
        }
        self.act_on_state(rule);
    }

    pub(super) fn backfilled(&mut self, request: &BackfillRequest) {
        self.rules.backfilled(request.rule, request.generation);
        if !self.rules.state(request.rule).is_backfilling() {
            self.context.memory.removals.agree(request.rule, false);
        }
        // A fan-out job writes targets that the backfill has left to it. From here on, all others hold denormd's values. A
        // rule that was stopped meanwhile is backfilled once more, and keeps values until then.
        if *self.rules.state(request.rule) == RuleState::Live && !self.context.memory.fan_outs.has(request.rule) {
            self.context.memory.kept.end(request.rule);
        }
    }

    /// Processes the list of existing source collections. A rule whose source is gone, or is another collection now, is
    /// blocked.
    pub(super) fn take_sources(&mut self, sources: Vec<(Namespace, Option<Bson>)>) {
        let context = self.context.clone();
        for (source, now) in sources {
            let known = context.memory.sources.uuid(&source);
            if known.is_none() {
                context.memory.sources.saw(&source, now.clone());
            }
            for rule in context.plan.rules.iter().filter(|rule| rule.source.namespace == source) {
                let recorded = self.rules.sources.get(&rule.id).cloned();
                let seen = [known.as_ref(), recorded.as_ref().and_then(Option::as_ref)];
                let was_there = known.is_some() || recorded.is_some();
                match &now {
                    Some(_) if self.rules.state(rule.id).block().is_some() => {}
                    Some(now) if seen.iter().flatten().all(|seen| *seen == now) => {
                        if seen[1].is_none() {
                            self.change(rule.id, Change::SourceSeen(now.clone()), None);
                        }
                    }
                    None if !was_there => {}
                    Some(_) | None => drop(self.change(rule.id, Change::Block(BlockReason::SourceGone), None)),
                }
            }
        }
    }
}

/// The other rules that insert and delete documents in the rule's collection.
fn creators_beside(plan: &Plan, rule: RuleId) -> impl Iterator<Item = RuleId> {
    let target = &plan.rule(rule).target.namespace;
    let deletes = |other: &&Arc<Rule>| other.creates.as_ref().is_some_and(|creates| !creates.keeps);
    let beside = plan.rules.iter().filter(move |other| other.target.namespace == *target && other.id != rule);
    beside.filter(deletes).map(|other| other.id)
}

/// The rules with their source or target in a database.
pub(super) fn rules_of<'a>(plan: &'a Plan, database: &'a str) -> impl Iterator<Item = RuleId> {
    let is_there = move |side: &Side| side.namespace.database == database;
    plan.rules.iter().filter(move |rule| is_there(&rule.source) || is_there(&rule.target)).map(|rule| rule.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    fn one_rule() -> Rules {
        let rule = "{ name: r, copy: { source: s, target: t, match: { ref: _id }, set: { n: $n } } }";
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
        Rules::new(&compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap())
    }

    const RULE: RuleId = RuleId(0);
    const BLOCKED: RuleState = RuleState::Blocked(BlockReason::RemovalLimit);

    /// The pages of a backfill that was requested in between would be skipped.
    #[test]
    fn an_answer_that_comes_late_does_not_undo_a_newer_state() {
        let mut rules = one_rule();
        assert!(rules.take(RULE, RuleState::BACKFILL, 6));
        assert!(!rules.take(RULE, BLOCKED, 5));
        assert_eq!((rules.state(RULE), rules.generation(RULE)), (&RuleState::BACKFILL, 6));
        assert!(rules.take(RULE, BLOCKED, 7));
        assert_eq!((rules.state(RULE), rules.resumed(RULE)), (&BLOCKED, 0));
        assert!(rules.take(RULE, RuleState::BACKFILL, 8) && rules.take(RULE, RuleState::BACKFILL, 9));
        assert_eq!(rules.resumed(RULE), 8);
    }

    /// The rule would be backfilling forever: no second backfill of one generation is started.
    #[test]
    fn an_answer_that_comes_after_the_backfill_does_not_reopen_it() {
        let mut rules = one_rule();
        assert!(rules.take(RULE, RuleState::BACKFILL, 6));
        rules.backfilled(RULE, 6);
        assert!(!rules.take(RULE, RuleState::BACKFILL, 6));
        assert_eq!(rules.state(RULE), &RuleState::Live);
        rules.lose(RULE);
        assert!(rules.take(RULE, RuleState::BACKFILL, 7));
        assert_eq!(rules.degraded().count(), 0);
    }

    /// The status said that a backfill runs, of a rule that was blocked or paused during it.
    #[test]
    fn a_rule_is_degraded_while_its_backfill_is_open() {
        let mut rules = one_rule();
        let degraded = |rules: &Rules| rules.degraded().count();
        assert_eq!(rules.recorder.add(RULE, Change::Lost, None, 0), None);
        assert_eq!((degraded(&rules), rules.published()[0].clone()), (1, RuleState::BACKFILL));
        rules.recorder.pop();
        assert!(rules.take(RULE, RuleState::BACKFILL, 1));
        rules.lose(RULE);
        assert_eq!(degraded(&rules), 1);
        assert!(rules.take(RULE, BLOCKED, 2));
        assert_eq!(degraded(&rules), 0);
        assert!(rules.take(RULE, RuleState::BACKFILL, 3));
        assert_eq!(degraded(&rules), 1, "it is unblocked by a backfill");
        rules.backfilled(RULE, 3);
        assert_eq!((degraded(&rules), rules.published()[0].clone()), (0, RuleState::Live));
    }
}
