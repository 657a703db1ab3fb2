//! Begins and ends the keeping of values that a rule's first backfill overwrites, and deletes the expired ones.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bson::Document;
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{adoption::Decision, kept::Keeping, rule_record::RuleRecord, store::Store},
    dead_letter::Chosen,
    inspection::adoption::EarlierWrites,
    reconcile::Context,
};
use denormd_model::{position::ClusterTime, rule_state::RuleState};
use denormd_mongo::error::Result;
use denormd_rules::{
    config::OnMissing,
    plan::{Rule, Values, is_once, narrowed, owned_paths},
};

/// Interval between deletions of expired values.
const EXPIRE_EVERY: Duration = Duration::from_secs(3600);
/// Time from the start of the leadership to the first one.
const FIRST: Duration = Duration::from_secs(10);

/// The paths whose values may be the application's when a rule's next backfill begins: those that a new, changed or returning rule did
/// not own before. They are recorded in any case, and their values kept unless `undo.mode` is `off`. A value that the rule wrote itself
/// can be computed again.
pub(super) fn of(rule: &Rule, before: Option<&RuleRecord>, decision: Option<&Decision>) -> Option<Keeping> {
    if rule.shadow || matches!(rule.values, Values::Set { once: true, .. }) {
        return None;
    }
    // Another partition may have decided before it knew that the rule was gone.
    let returns = before.is_some_and(|record| record.state == RuleState::Removed);
    let earlier = decision.and_then(|decision| decision.earlier.as_ref()).filter(|_| !returns);
    let own = EarlierWrites::of(rule, earlier).paths;
    let open = before.and_then(|record| open(rule, record));
    let is_open = |path: &String| open.is_some_and(|open| open.paths.contains(path));
    let owned = rule.owned().into_iter().map(ToString::to_string);
    let paths: Vec<String> = owned.filter(|path| !own.contains(path) || is_open(path)).collect();
    let set = |paths: &[String]| paths.iter().cloned().collect::<BTreeSet<_>>();
    let same = open.filter(|open| set(&open.paths) == set(&paths));
    let passed = same.map(|open| open.passed.clone()).unwrap_or_default();
    (!paths.is_empty()).then_some(Keeping { paths, passed })
}

/// The open keeping of an earlier definition with the same targets; its progress does not apply to others.
fn open<'a>(rule: &Rule, record: &'a RuleRecord) -> Option<&'a Keeping> {
    let same_targets = narrowed(&record.definition, &rule.definition).get("target") == rule.definition.get("target");
    record.keeping.as_ref().filter(|_| same_targets && record.state != RuleState::Removed)
}

/// Marks the values that a rule kept at paths which the application has owned since. Must run before the decision is recorded, because
/// from then on a partition may keep values. `asked` is a time before the decision was read.
pub(super) async fn leave_earlier(
    context: &Context,
    rule: &Rule,
    before: Option<&RuleRecord>,
    decision: &Decision,
    asked: ClusterTime,
) -> Result<()> {
    let Some(keeping) = of(rule, before, Some(decision)) else { return Ok(()) };
    let kept = context.kept();
    if keeping.passed.is_empty() {
        kept.forget_not_kept(&rule.name).await?;
    }
    let records = context.state_of_deployment().await?.of_each_partition(&context.server, &rule.name).await?;
    let is_open = |path: &String| {
        records.iter().filter_map(|(_, record)| open(rule, record)).any(|open| open.paths.contains(path))
    };
    // With another `where`, a path counts as new, but denormd has owned it until now.
    let collection = |definition: &Document| definition.get_document("target").ok()?.get("collection").cloned();
    let wrote = |earlier: &&Document| {
        collection(earlier) == collection(&rule.definition)
            && !earlier.get_bool("shadow").unwrap_or_default()
            && !is_once(earlier)
    };
    let owned: Vec<String> =
        decision.earlier.iter().filter(wrote).flat_map(owned_paths).map(|path| path.to_string()).collect();
    let paths: Vec<String> = keeping.paths.into_iter().filter(|path| !is_open(path) && !owned.contains(path)).collect();
    kept.leave_earlier(&rule.name, &rule.target.namespace.to_string(), &paths, asked).await
}

/// Begins to keep values for a rule, at its registration and after each restart.
pub(super) async fn begin(context: &Context, rule: &Rule, keeping: Option<Keeping>) -> Result<()> {
    let Some(keeping) = keeping.filter(|_| context.undo.enabled) else {
        context.memory.kept.end(rule.id);
        return Ok(());
    };
    let chosen = Chosen { rule: Some(rule.name.clone()), key: None };
    let aside = context.dead_letters.count(&context.server, &chosen).await? > 0;
    let is_full = context.kept().count_not_kept(&rule.name).await? > 0;
    if matches!(rule.on_missing, OnMissing::Remove | OnMissing::Delete) {
        tracing::info!(rule = %rule.name, "documents and elements that the rule deletes are not kept for `denormd undo`");
    }
    context.memory.kept.begin(rule.id, keeping, aside, is_full);
    Ok(())
}

/// Ends the keeping after a rule's backfill, once its fan-out jobs are done: they write targets that the backfill has
/// left to them. A failure is tried again a second later.
pub(super) async fn end(context: &Context, store: &Store, name: &str, generation: i64) {
    let Some(rule) = context.plan.named(name) else { return };
    let ended = async {
        if store.is_fanning_out(&context.server, Some(name), ClusterTime::default()).await? {
            return Ok(false);
        }
        store.end_keeping(&context.server, rule, generation).await
    };
    match ended.await {
        Ok(true) => context.memory.kept.end(rule.id),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!(rule = name, error = %error.message, "the end of a rule's first backfill cannot be recorded; trying again");
        }
    }
}

/// Deletes expired values, about hourly.
pub(super) async fn expire(context: Arc<Context>, stop: CancellationToken) {
    // One partition is enough for all.
    if context.partition.place() != 0 {
        return;
    }
    let mut pause = FIRST;
    while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        pause = EXPIRE_EVERY;
        match context.kept().expire(context.undo.keep).await {
            Ok(0) => {}
            Ok(values) => {
                tracing::info!(values, "kept values have expired: `denormd undo` cannot put them back any more");
            }
            Err(error) => {
                tracing::warn!(error = %error.message, "expired values cannot be deleted; trying again");
                pause = FIRST;
            }
        }
    }
}
