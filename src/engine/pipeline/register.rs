//! Registers the rules when the pipeline starts: records new and changed ones, and reads the states of the others.

use std::sync::Arc;

use bson::Document;

use super::{
    adoption::{self, decisions_of},
    keep,
    rules::Rules,
};
use crate::{
    checkpoint::{
        adoption::Decision,
        rule_record::{Agreement, RuleRecord},
        store::Store,
    },
    dead_letter::Chosen,
    reconcile::Context,
};
use denormd_model::{
    failpoint,
    position::ClusterTime,
    rule_state::{Adoption, BlockReason, RuleState},
};
use denormd_mongo::error::Result;
use denormd_rules::{
    config::BackfillMode,
    plan::{Rule, is_same_definition},
};

/// Records new and changed rules, and returns all rules.
pub(super) async fn register_rules(context: &Context, store: &Store) -> Result<Rules> {
    let mut known = store.rules(&context.server).await?;
    if release_documents(context, store, &known).await? {
        known = store.rules(&context.server).await?;
    }
    let mut rules = Rules::new(&context.plan);
    // A rule may only write after the permission to do so is recorded.
    let decisions = adoption::decide(context, &known).await?;
    let others = adoption::of_other_partitions(context).await?;
    for (rule, decision) in context.plan.rules.iter().zip(decisions) {
        let before = known.iter().find(|(name, _)| *name == rule.name).map(|(_, record)| record);
        let (state, generation) = match (before, decision) {
            (Some(record), None) => {
                log_stopped(&rule.name, &record.state);
                // An earlier start may have ended before it forgot the work of the former definition.
                let begins = matches!(record.state, RuleState::Backfilling { after: None, in_sources: false, .. });
                // With kept values, the dead letters and jobs tell where the application's values still are.
                let has_kept = record.keeping.as_ref().is_some_and(|keeping| !keeping.passed.is_empty());
                if (begins || record.state.awaits_agreement()) && !has_kept {
                    forget_work(context, rule).await?;
                }
                keep::begin(context, rule, record.keeping.clone()).await?;
                (record.state.clone(), record.generation)
            }
            (before, decision) => register(context, store, others.as_ref(), rule, before, decision).await?,
        };
        rules.set(rule.id, state, generation);
    }
    remove_absent(context, store, &known).await?;
    for (name, record) in store.standing(&context.server).await? {
        let Some(rule) = context.plan.named(&name) else { continue };
        if record.degraded {
            rules.lose(rule.id);
        }
        rules.released.extend(record.released.map(|until| (rule.id, until)));
        rules.sources.extend(record.source_seen.then_some((rule.id, record.source_uuid)));
    }
    Ok(rules)
}

/// Requests backfills of the rules whose documents another rule may have kept until now, because its source collection was lost, or
/// because it had sources whose values it had not written: a rule that created documents in the same collection, and that leaves it
/// or the config. A rule that awaited an agreement has kept documents, too. The requests come before that is recorded, so that a start
/// that ends in between makes them again. Returns true if there are any.
async fn release_documents(context: &Context, store: &Store, known: &[(String, RuleRecord)]) -> Result<bool> {
    let mut are_some = false;
    for rule in &context.plan.rules {
        let deletes = rule.creates.as_ref().is_some_and(|creates| !creates.keeps);
        // The backfill that an operator requests later covers these documents.
        let waits =
            known.iter().any(|(name, record)| *name == rule.name && record.state == RuleState::AwaitingBackfill);
        let collection = creates_in(&rule.definition).filter(|_| deletes && !waits);
        let is_due = collection
            .is_some_and(|collection| is_left(context, known, collection) || is_agreed(context, known, collection));
        if is_due && store.ask(&context.server, &rule.name).await? {
            tracing::info!(rule = %rule.name, "another rule no longer creates documents in its collection: it is backfilled");
            are_some = true;
        }
    }
    Ok(are_some)
}

/// True if a rule leaves this collection of created documents, and all rules that stay have run before.
fn is_left(context: &Context, known: &[(String, RuleRecord)], collection: &str) -> bool {
    let is_in = |definition: &Document| creates_in(definition) == Some(collection);
    let leaves = |(name, record): &(String, RuleRecord)| {
        let stays = context.plan.named(name).is_some_and(|rule| is_in(&rule.definition));
        // The record of a blocked definition does not change when the rule leaves the config: each start would ask again.
        record.state != RuleState::Removed && !record.state.awaits_agreement() && is_in(&record.definition) && !stays
    };
    // The first backfill of a new rule, or of one that is blocked, covers the documents of all. It may be the same rule with another
    // name, and then they are not to be deleted before somebody has agreed.
    let has_run = |rule: &&Arc<Rule>| {
        let record = known.iter().find(|(name, _)| *name == rule.name).map(|(_, record)| record);
        record.is_some_and(|record| {
            record.runs(rule) && !record.state.awaits_agreement() && record.state != RuleState::AwaitingBackfill
        })
    };
    let mut staying = context.plan.rules.iter().filter(|rule| is_in(&rule.definition));
    known.iter().any(leaves) && staying.all(|rule| has_run(&rule))
}

/// True if a rule of this collection awaited an agreement, which has kept documents there, and may not await it any more.
fn is_agreed(context: &Context, known: &[(String, RuleRecord)], collection: &str) -> bool {
    known.iter().any(|(name, record)| {
        let target = record.definition.get_document("target").and_then(|target| target.get_str("collection")).ok();
        let is_decided_again =
            || context.plan.named(name).is_none_or(|rule| rule.adopt || !rule.has_definition(&record.definition));
        let begins = matches!(record.state, RuleState::Backfilling { after: None, in_sources: false, .. });
        let has_agreement = record.agreed.as_ref().is_some_and(|agreed| is_same_definition(agreed, &record.definition));
        target == Some(collection) && (record.state.awaits_agreement() && is_decided_again() || begins && has_agreement)
    })
}

/// The collection in which a definition creates documents. A shadow rule creates none.
fn creates_in(definition: &Document) -> Option<&str> {
    let is = |name: &str| definition.get_bool(name).unwrap_or_default();
    let collection = definition.get_document("target").ok()?.get_str("collection").ok()?;
    (is("create") && !is("shadow")).then_some(collection)
}

/// Records a new or changed rule. Returns its state and generation.
async fn register(
    context: &Context,
    store: &Store,
    others: Option<&Store>,
    rule: &Rule,
    before: Option<&RuleRecord>,
    decision: Option<Decision>,
) -> Result<(RuleState, i64)> {
    let mut keeping = keep::of(rule, before, decision.as_ref());
    if let Some(passed) = keeping.as_mut().map(|keeping| &mut keeping.passed).filter(|passed| !passed.is_empty())
        && has_work(context, store, rule).await?
    {
        // The work is deleted below, and only it shows which targets up to there still hold the application's values.
        passed.clear();
    }
    let block = decision.and_then(|decision| decision.block);
    let change = match before {
        None => "new rule",
        Some(record) if record.definition.is_empty() || rule.has_definition(&record.definition) => {
            "the rule is back in the config"
        }
        Some(_) => "changed rule",
    };
    // A definition that was blocked has written nothing, so there is nothing to prune.
    let changed = |record: &&RuleRecord| !rule.has_definition(&record.definition) && !record.state.awaits_agreement();
    if let Some(record) = before.filter(changed) {
        store.retire(&context.server, &rule.name, &record.definition).await?;
    }
    let others = others.filter(|_| before.is_none_or(|record| record.state == RuleState::Removed));
    // Recorded with the rule: a start after an interruption finds the rule registered, and does not look again.
    let paused = paused_elsewhere(context, others, rule).await?;
    let next = |seen: Option<&RuleRecord>| {
        let first = first_state(rule, seen, block.as_ref());
        let state = paused.clone().filter(|_| !first.is_stopped()).unwrap_or(first);
        // `adopt: true` agrees to what the first backfill removes, as `denormd unblock` would.
        let agreement = if rule.adopt && state.block().is_none() { Agreement::Given } else { Agreement::Ended };
        (state, agreement)
    };
    let mut registered =
        store.register_rule(&context.server, rule, next, keeping.as_ref(), rule.adopt && block.is_none()).await?;
    failpoint::here("rule-registered");
    if !registered.0.is_stopped()
        && let Some(paused) = paused_elsewhere(context, others, rule).await?
    {
        registered = store.reset_rule(&context.server, rule, &paused, Agreement::Kept).await?;
    }
    log_stopped(&rule.name, &registered.0);
    tracing::info!(rule = %rule.name, state = registered.0.name(), "{change}");
    failpoint::here("rule-reset");
    keep::begin(context, rule, keeping).await?;
    forget_work(context, rule).await?;
    Ok(registered)
}

/// True if a rule has dead letters or fan-out jobs.
async fn has_work(context: &Context, store: &Store, rule: &Rule) -> Result<bool> {
    let chosen = Chosen { rule: Some(rule.name.clone()), key: None };
    Ok(context.dead_letters.count(&context.server, &chosen).await? > 0
        || store.is_fanning_out(&context.server, Some(&rule.name), ClusterTime::default()).await?)
}

/// Deletes the dead letters and the fan-out jobs of a rule: a backfill from the start covers them, and their keys may be those
/// of a former definition. After the new definition is recorded, so that they are still there if the former one
/// goes on after a crash in between.
async fn forget_work(context: &Context, rule: &Rule) -> Result<()> {
    context.dead_letters.forget(&context.server, &rule.name).await?;
    context.fan_outs.forget(&context.server, &rule.name).await
}

/// Ends the work of recorded rules that are not in the config.
async fn remove_absent(context: &Context, store: &Store, known: &[(String, RuleRecord)]) -> Result<()> {
    for (name, record) in known.iter().filter(|(name, _)| context.plan.named(name).is_none()) {
        // A definition that is blocked has written nothing: it does not count as the rule's last one. A pause ends with the rule.
        // Values that the application writes while the rule is absent belong to the application, so an earlier decision does not
        // count.
        if record.state.awaits_agreement() {
            decisions_of(context).forget(name).await?;
            store.forget_blocked(&context.server, name).await?;
            store.resume(&context.server, name).await?;
        } else if record.state != RuleState::Removed {
            decisions_of(context).forget(name).await?;
            store.remove(&context.server, name).await?;
        }
        // No leader runs the jobs of a rule that is not in the plan, and a `wait` would wait for them.
        context.fan_outs.forget(&context.server, name).await?;
        tracing::warn!(rule = %name, "this rule is no longer in the config: its fields stay until `denormd prune {name}`");
    }
    context.fan_outs.retain(&context.server, &context.plan).await?;
    // After the states: a rule that returns to the config is backfilled, so it needs its former dead letters no more.
    match context.dead_letters.retain(&context.server, &context.plan).await {
        Ok(0) => {}
        Ok(deleted) => {
            tracing::info!(
                deleted,
                "dead letters of rules, definitions and partitions that no longer exist are deleted"
            );
        }
        Err(error) => tracing::warn!(
            error = %error.message,
            "dead letters of rules, definitions and partitions that no longer exist cannot be deleted; the next start tries again"
        ),
    }
    Ok(())
}

/// The pause of a rule in another partition: `denormd pause` reaches only those that have registered the rule. It is read again
/// after this partition has registered the rule, because the command looks again after it has recorded the pause.
async fn paused_elsewhere(context: &Context, others: Option<&Store>, rule: &Rule) -> Result<Option<RuleState>> {
    let Some(others) = others else { return Ok(None) };
    let records = others.of_each_partition(&context.server, &rule.name).await?;
    let states = records.into_iter().map(|(_, record)| record.state);
    Ok(states.into_iter().find(|state| matches!(state, RuleState::Paused { .. })))
}

/// The state of a rule that is new, changed, or returns to the config: paused if it is paused now, whatever the change.
fn first_state(rule: &Rule, seen: Option<&RuleRecord>, block: Option<&Adoption>) -> RuleState {
    let state = match seen {
        Some(RuleRecord { state: RuleState::Paused { until, blocked }, definition, .. }) => {
            let is_gone = *blocked == Some(BlockReason::SourceGone) && rule.has_source(definition);
            RuleState::Paused { until: *until, blocked: is_gone.then_some(BlockReason::SourceGone) }
        }
        _ if rule.backfill == BackfillMode::Auto => RuleState::BACKFILL,
        _ => RuleState::AwaitingBackfill,
    };
    block.map_or(state.clone(), |adoption| state.blocked(BlockReason::Adoption(adoption.clone())))
}

fn log_stopped(rule: &str, state: &RuleState) {
    let reason = state.reason().unwrap_or_default();
    match state {
        RuleState::Blocked(block) => {
            tracing::error!(rule, reason, "this rule is blocked until {}", block.end(rule));
        }
        RuleState::Unavailable { .. } => {
            tracing::error!(rule, reason, "this rule is unavailable until the cluster has what it needs");
        }
        RuleState::Paused { .. } => tracing::warn!(rule, reason, "this rule is paused until `denormd resume {rule}`"),
        RuleState::Backfilling { .. } | RuleState::AwaitingBackfill | RuleState::Live | RuleState::Removed => {}
    }
}
