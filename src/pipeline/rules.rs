//! What is known of the rules when the pipeline starts.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    backfill::Wish,
    checkpoint::store::{Backfill, Hold, Store},
    error::{Kind, Result},
    failpoint,
    plan::RuleId,
    position::ClusterTime,
    reconcile::Context,
};

pub(super) fn rules_of(context: &Context, database: &str) -> Vec<RuleId> {
    let touched = |rule: &&Arc<crate::plan::Rule>| {
        rule.source.namespace.database == database || rule.target.namespace.database == database
    };
    context.plan.rules.iter().filter(touched).map(|rule| rule.id).collect()
}

/// Records new and changed rules; returns the backfills that are open, and the rules that are held.
pub(super) async fn register_rules(context: &Context, store: &Store) -> Result<(Vec<Wish>, BTreeMap<RuleId, Hold>)> {
    let known = store.rules(&context.server).await?;
    let mut open = Vec::new();
    let mut held = BTreeMap::new();
    for rule in &context.plan.rules {
        let before = known.iter().find(|(name, _)| *name == rule.name).map(|(_, state)| state);
        match before {
            Some(state) if state.definition == rule.definition && state.backfill != Backfill::Absent => {
                match &state.backfill {
                    Backfill::Pending(after) => {
                        open.push(Wish { rule: rule.id, generation: state.generation, after: after.clone() });
                    }
                    Backfill::Held(hold) if hold.suspended => {
                        tracing::error!(rule = %rule.name, reason = hold.reason, "this rule is suspended until the cluster has what it needs");
                        held.insert(rule.id, hold.clone());
                    }
                    Backfill::Held(hold) if hold.paused => {
                        tracing::warn!(rule = %rule.name, "this rule is paused until `denormd resume {}`", rule.name);
                        held.insert(rule.id, hold.clone());
                    }
                    Backfill::Held(hold) => {
                        tracing::error!(rule = %rule.name, reason = hold.reason, "this rule is held until `denormd release {}`", rule.name);
                        held.insert(rule.id, hold.clone());
                    }
                    Backfill::Manual | Backfill::Done | Backfill::Absent => {}
                }
            }
            before => {
                let auto = rule.backfill == crate::config::BackfillMode::Auto;
                // A pause outlives a change of the rule.
                let paused = before.and_then(|state| match &state.backfill {
                    Backfill::Held(hold) if hold.paused => Some(hold.clone()),
                    _ => None,
                });
                let auto = auto && paused.is_none();
                let backfill = match &paused {
                    Some(hold) => Backfill::Held(hold.clone()),
                    None if auto => Backfill::Pending(None),
                    None => Backfill::Manual,
                };
                let change = match before {
                    None => "new",
                    Some(state) if state.definition == rule.definition => "back in the config",
                    Some(_) => "changed",
                };
                tracing::info!(rule = %rule.name, change, backfill = auto, "rule");
                if let Some(state) = before.filter(|state| state.definition != rule.definition) {
                    store.retire(&context.server, &rule.name, &state.definition).await?;
                }
                let generation = store.reset_rule(&context.server, rule, &backfill).await?;
                failpoint::here("rule-reset");
                context.fan_outs.forget(&context.server, &rule.name).await?;
                if auto {
                    open.push(Wish { rule: rule.id, generation, after: None });
                }
                held.extend(paused.map(|hold| (rule.id, hold)));
            }
        }
    }
    for (name, state) in known.iter().filter(|(name, _)| !context.plan.rules.iter().any(|rule| rule.name == *name)) {
        // A hold stays: its release is a whole backfill too.
        if !matches!(state.backfill, Backfill::Absent | Backfill::Held(_)) {
            store.absent(&context.server, name).await?;
        }
        tracing::warn!(rule = %name, "this rule is no longer in the config: its fields stay until `denormd prune {name}`");
    }
    Ok((open, held))
}

/// Until when the loss of each rule's source has been released.
pub(super) async fn releases(context: &Context, store: &Store) -> Result<BTreeMap<RuleId, ClusterTime>> {
    let known = store.rules(&context.server).await?;
    let released = known.iter().filter_map(|(name, state)| {
        let rule = context.plan.rules.iter().find(|rule| rule.name == *name)?;
        Some((rule.id, state.released?))
    });
    Ok(released.collect())
}

/// Remembers which source collections are there; returns the rules whose source has been there and is gone.
pub(super) async fn look_for_sources(context: &Context, store: &Store) -> Result<Vec<RuleId>> {
    let known = store.rules(&context.server).await?;
    let mut gone = Vec::new();
    for rule in &context.plan.rules {
        let source = &rule.source.namespace;
        let state = known.iter().find(|(name, _)| *name == rule.name).map(|(_, state)| state);
        let seen = state.is_some_and(|state| state.source_seen);
        let is_there = match context.server.has_collection(&source.database, &source.collection).await {
            // The rule is suspended, or will be.
            Err(error) if error.kind == Kind::Privilege => continue,
            is_there => is_there?,
        };
        if is_there {
            context.saw(source, true);
            if let Some(state) = state.filter(|state| !state.source_seen) {
                store.source_seen(&context.server, &rule.name, state.generation).await?;
            }
        } else if seen {
            gone.push(rule.id);
        }
    }
    Ok(gone)
}
