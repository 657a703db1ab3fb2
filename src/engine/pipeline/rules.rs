//! The states of the rules, and how they are registered when the pipeline starts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bson::Bson;

use crate::{
    checkpoint::{
        rule_record::{Agreement, RuleRecord},
        store::Store,
    },
    reconcile::Context,
};
use denormd_model::{
    failpoint,
    namespace::Namespace,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::{Kind, Result};
use denormd_rules::{
    config::BackfillMode,
    plan::{Plan, Rule, RuleId},
};

use super::{
    adoption::{self, decisions_of, is_blocked},
    keep,
};

pub(super) fn rules_of(context: &Context, database: &str) -> Vec<RuleId> {
    let touched = |rule: &&Arc<denormd_rules::plan::Rule>| {
        rule.source.namespace.database == database || rule.target.namespace.database == database
    };
    context.plan.rules.iter().filter(touched).map(|rule| rule.id).collect()
}

/// The states of the rules as this leader knows them, each with the generation that it is recorded under. The state
/// database takes precedence: a state that a command has recorded under a newer generation replaces the one here.
#[derive(Debug)]
pub(super) struct Rules {
    states: Arc<Vec<RuleState>>,
    generations: Vec<i64>,
}

impl Rules {
    pub fn new(plan: &Plan) -> Self {
        Self { states: Arc::new(vec![RuleState::Live; plan.rules.len()]), generations: vec![0; plan.rules.len()] }
    }

    /// The state of a rule.
    pub fn state(&self, rule: RuleId) -> &RuleState {
        &self.states[rule.0]
    }

    /// The generation that the state of a rule is recorded under.
    pub fn generation(&self, rule: RuleId) -> i64 {
        self.generations[rule.0]
    }

    /// The states of all rules, in the config's order.
    pub fn states(&self) -> &Arc<Vec<RuleState>> {
        &self.states
    }

    /// Replaces the state of a rule.
    pub fn set(&mut self, rule: RuleId, state: RuleState, generation: i64) {
        Arc::make_mut(&mut self.states)[rule.0] = state;
        self.generations[rule.0] = generation;
    }

    /// Marks the rule as live after the backfill of this generation, unless its state has changed since.
    pub fn backfilled(&mut self, rule: RuleId, generation: i64) {
        if self.state(rule).is_backfilling() && self.generation(rule) <= generation {
            self.set(rule, RuleState::Live, generation);
        }
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

/// Records new and changed rules, and returns the states of all.
pub(super) async fn register_rules(context: &Context, store: &Store) -> Result<Rules> {
    let known = store.rules(&context.server).await?;
    let mut rules = Rules::new(&context.plan);
    // A rule may only write after the permission to do so is recorded.
    let decisions = adoption::decide(context, &known).await?;
    for (rule, decision) in context.plan.rules.iter().zip(decisions) {
        let before = known.iter().find(|(name, _)| *name == rule.name).map(|(_, record)| record);
        match (before, decision) {
            (Some(record), None) => {
                tell_stopped(&rule.name, &record.state);
                keep::resume(context, rule, record.keeping.clone()).await?;
                rules.set(rule.id, record.state.clone(), record.generation);
            }
            (before, decision) => {
                let keeping = keep::of(context, rule, before, decision.as_ref());
                let blocked = decision.and_then(|decision| decision.block);
                let state = match blocked {
                    Some(adoption) => RuleState::Blocked(BlockReason::Adoption(adoption)),
                    None => first_state(rule, before),
                };
                tell_stopped(&rule.name, &state);
                let change = match before {
                    None => "new",
                    Some(record) if rule.has_definition(&record.definition) => "back in the config",
                    Some(_) => "changed",
                };
                tracing::info!(rule = %rule.name, change, state = state.name(), "rule");
                // A definition that was blocked has written nothing, so there is nothing to prune.
                let changed = |record: &&RuleRecord| !rule.has_definition(&record.definition) && !is_blocked(record);
                if let Some(record) = before.filter(changed) {
                    store.retire(&context.server, &rule.name, &record.definition).await?;
                }
                // `adopt: true` agrees to what the first backfill removes, as `denormd unblock` would.
                let agreement = if rule.adopt && !state.is_blocked() { Agreement::Given } else { Agreement::Ended };
                let registered = store.register_rule(&context.server, rule, (&state, agreement), keeping.as_ref());
                let (state, generation) = registered.await?;
                failpoint::here("rule-reset");
                keep::begin(context, rule, keeping).await?;
                context.fan_outs.forget(&context.server, &rule.name).await?;
                rules.set(rule.id, state, generation);
            }
        }
    }
    for (name, record) in known.iter().filter(|(name, _)| !context.plan.rules.iter().any(|rule| rule.name == *name)) {
        // A stopped rule keeps its state: its return to the config requires a whole backfill anyway.
        if record.state != RuleState::Removed && !record.state.is_stopped() {
            // Values that the application writes while the rule is absent belong to the application.
            decisions_of(context).forget(name).await?;
            store.remove(&context.server, name).await?;
        }
        tracing::warn!(rule = %name, "this rule is no longer in the config: its fields stay until `denormd prune {name}`");
    }
    Ok(rules)
}

/// The state of a rule that is new, changed, or returns to the config.
fn first_state(rule: &Rule, before: Option<&RuleRecord>) -> RuleState {
    match before.map(|record| &record.state) {
        // A pause survives a change of the rule.
        Some(RuleState::Paused { until }) => RuleState::Paused { until: *until },
        _ if rule.backfill == BackfillMode::Auto => RuleState::BACKFILL,
        _ => RuleState::AwaitingBackfill,
    }
}

fn tell_stopped(rule: &str, state: &RuleState) {
    let reason = state.reason().unwrap_or_default();
    match state {
        RuleState::Blocked(block) => {
            tracing::error!(rule, reason, "this rule is blocked until {}", block.end(rule));
        }
        RuleState::Unavailable { .. } => {
            tracing::error!(rule, reason, "this rule is unavailable until the cluster has what it needs");
        }
        RuleState::Paused { .. } => tracing::warn!(rule, "this rule is paused until `denormd resume {rule}`"),
        RuleState::Backfilling { .. } | RuleState::AwaitingBackfill | RuleState::Live | RuleState::Removed => {}
    }
}

/// Times up to which the loss of each rule's source is accepted.
pub(super) async fn releases(context: &Context, store: &Store) -> Result<BTreeMap<RuleId, ClusterTime>> {
    let known = store.rules(&context.server).await?;
    let released = known.iter().filter_map(|(name, state)| {
        let rule = context.plan.rules.iter().find(|rule| rule.name == *name)?;
        Some((rule.id, state.released?))
    });
    Ok(released.collect())
}

/// The recorded UUIDs of the rules' source collections; None for a source that a version without this field has seen.
pub(super) async fn recorded_sources(context: &Context, store: &Store) -> Result<BTreeMap<RuleId, Option<Bson>>> {
    let known = store.rules(&context.server).await?;
    let recorded = known.into_iter().filter(|(_, record)| record.source_seen).filter_map(|(name, record)| {
        let rule = context.plan.rules.iter().find(|rule| rule.name == name)?;
        Some((rule.id, record.source_uuid))
    });
    Ok(recorded.collect())
}

/// The source collections with their UUIDs, or None for one that does not exist. A collection in a database that may
/// not be listed is left out: its rules are unavailable, or will be.
pub(super) async fn read_sources(context: &Context) -> Result<Vec<(Namespace, Option<Bson>)>> {
    let sources: BTreeSet<&Namespace> = context.plan.rules.iter().map(|rule| &rule.source.namespace).collect();
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for source in &sources {
        names.entry(&source.database).or_default().push(&source.collection);
    }
    let mut found = Vec::new();
    for (database, names) in names {
        let mut uuids = match context.server.collection_uuids(database, &names).await {
            Err(error) if error.kind == Kind::Privilege => continue,
            uuids => uuids?,
        };
        let of_one =
            |name: &str| (Namespace { database: database.to_owned(), collection: name.to_owned() }, uuids.remove(name));
        found.extend(names.into_iter().map(of_one));
    }
    Ok(found)
}
