//! Removes the retired fields: those of rules that are no longer in the config, and those that a changed rule no longer
//! owns.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc, oid::ObjectId};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{
        requests::{Carried, Retired},
        rule_record::RuleRecord,
        store::Store,
    },
    reconcile::{
        Context, read,
        statement::{self, Statement},
    },
};
use denormd_model::rule_state::{BlockReason, RuleState};
use denormd_mongo::{
    Pages, Reads,
    error::{Kind, Result},
};
use denormd_rules::plan::{Plan, Rule, owned_paths};

/// Documents in one write.
const PAGE: usize = 1000;

/// The retired fields of a rule: paths that it once owned and no rule owns now. `active` means that the config still
/// has a rule of that name.
#[must_use]
pub fn retired(plan: &Plan, state: &RuleRecord, active: bool) -> Vec<Retired> {
    // A definition that was blocked before its first write has written nothing: the values belong to the application.
    let wrote = !matches!(state.state, RuleState::Blocked(BlockReason::Adoption(_)));
    let current = (!active && wrote).then_some(&state.definition);
    let definitions = state.retired.iter().chain(current);
    let mut found: BTreeSet<Retired> = definitions.flat_map(|definition| left_by(plan, definition)).collect();
    // `undo` has put back the application's values.
    let is_undone = |retired: &Retired| {
        let is_same = |undone: &&Retired| undone.collection == retired.collection;
        state.undone.iter().filter(is_same).any(|undone| undone.path.overlaps_loosely(&retired.path))
    };
    found.retain(|retired| !is_undone(retired));
    found.into_iter().collect()
}

/// The fields that a rule with this definition leaves behind: no rule of the plan owns them.
#[must_use]
pub fn left_by(plan: &Plan, definition: &Document) -> Vec<Retired> {
    // A rule in shadow writes nothing: the values belong to the application.
    if definition.get_bool("shadow").unwrap_or_default() {
        return Vec::new();
    }
    let Ok(collection) = definition.get_document("target").and_then(|target| target.get_str("collection")) else {
        return Vec::new();
    };
    let paths = owned_paths(definition).into_iter().map(|path| Retired { collection: collection.to_owned(), path });
    paths.filter(|retired| !is_owned(plan, retired)).collect()
}

/// True if a rule of the plan owns the path, or a part of it.
fn is_owned(plan: &Plan, retired: &Retired) -> bool {
    plan.rules.iter().any(|rule| owns(rule, retired))
}

/// True if the rule owns the path, or a part of it.
pub(super) fn owns(rule: &Rule, retired: &Retired) -> bool {
    rule.target.namespace.to_string() == retired.collection
        && rule.owned().into_iter().any(|owned| owned.overlaps_loosely(&retired.path))
}

/// Number of documents with the retired field.
pub async fn count(context: &Context, retired: &Retired) -> Result<u64> {
    let mut pages = holders(context, retired).await?;
    let mut documents = 0;
    while let Some(page) = pages.next().await? {
        documents += page.len() as u64;
    }
    Ok(documents)
}

/// Removes retired fields for `denormd prune`, a page of documents at a time, by writes that end with the lease. Checks
/// `stop` between writes: a write in flight is waited for, because the next leader may write the same field.
pub async fn carry_out(
    context: &Context,
    store: &Store,
    (id, paths): (ObjectId, &[Retired]),
    stop: &CancellationToken,
) -> Result<Carried> {
    if let Some(taken) = paths.iter().find(|retired| is_owned(&context.plan, retired)) {
        return Ok(Carried::Refused(format!("a rule that it runs owns `{}` of `{}`", taken.path, taken.collection)));
    }
    // Every partition receives the request. One of them writes, once no other has a rule that owns the paths.
    if context.partition.place() != 0 {
        return Ok(Carried::Out);
    }
    if !store.is_last(&context.server, id).await? {
        return Ok(Carried::Stopped);
    }
    for retired in paths {
        match take_away(context, retired, stop).await {
            Err(error) if matches!(error.kind, Kind::Refused | Kind::Privilege) => {
                return Ok(Carried::Refused(error.message));
            }
            Ok(false) => return Ok(Carried::Stopped),
            done => drop(done?),
        }
    }
    Ok(Carried::Out)
}

/// Removes one retired field. Returns false if it was stopped.
async fn take_away(context: &Context, retired: &Retired, stop: &CancellationToken) -> Result<bool> {
    let (database, collection) = retired.namespace();
    let Some(pages) = stop.run_until_cancelled(holders(context, retired)).await else { return Ok(false) };
    let mut pages = pages?;
    loop {
        let Some(page) = stop.run_until_cancelled(pages.next()).await else { return Ok(false) };
        let Some(page) = page? else { return Ok(true) };
        let ids = page.iter().map(|row| Ok(row.get("_id")?.map(Bson::try_from).transpose()?.unwrap_or(Bson::Null)));
        let ids = ids.collect::<Result<Vec<Bson>>>()?;
        if ids.is_empty() {
            continue;
        }
        let Statement::Update(statement) = statement::unset(&retired.path, ids)? else { continue };
        let written = context.server.update(database, collection, &[statement], context.limits.write_timeout).await?;
        if let Some((_, error)) = written.refused.into_iter().next() {
            return Err(error);
        }
    }
}

/// The `_id`s of the documents with the field.
async fn holders(context: &Context, retired: &Retired) -> Result<Pages> {
    let (database, collection) = retired.namespace();
    let command = doc! {
        "find": collection, "filter": {retired.path.query(): {"$exists": true}}, "projection": {"_id": 1},
        "batchSize": i64::try_from(PAGE).unwrap_or(1000), "collation": read::simple_collation(),
    };
    context.server.pages(database, command, Reads::default()).await
}
