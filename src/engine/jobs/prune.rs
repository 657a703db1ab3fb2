//! Removes the retired fields: those of rules that are no longer in the config, and those that a changed rule no longer
//! owns.

use bson::{Bson, Document, doc, oid::ObjectId};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{
        earlier,
        requests::RequestOutcome,
        rule_record::{Retired, RuleRecord},
        store::Store,
    },
    deployment::lease,
    reconcile::{
        Context,
        scan::{self, Page, Wanted},
        statement,
    },
};
use denormd_model::{namespace::Namespace, position::ClusterTime, rule_state::BlockReason};
use denormd_mongo::error::Result;
use denormd_rules::plan::{Plan, Rule, owned_paths};

/// Documents in one page, and in one write.
const PAGE: usize = 1000;

/// The retired fields of a rule: paths that it once owned and no rule owns now. `active` means that the config still
/// has a rule of that name.
#[must_use]
pub fn retired(plan: &Plan, state: &RuleRecord, active: bool) -> Vec<Retired> {
    // A definition that was blocked before its first write has written nothing: the values belong to the application.
    let wrote = !matches!(state.state.block(), Some(BlockReason::Adoption(_)));
    let current = (!active && wrote).then_some(&state.definition);
    let definitions = state.retired.iter().chain(current);
    let mut found: Vec<Retired> = Vec::new();
    for left in definitions.flat_map(|definition| left_by(plan, definition)) {
        if !found.contains(&left) {
            found.push(left);
        }
    }
    found.sort_by(|one, other| (&one.collection, &one.path).cmp(&(&other.collection, &other.path)));
    // `undo` has put back the application's values.
    let is_undone = |retired: &Retired| {
        let is_same = |undone: &&Retired| undone.collection == retired.collection;
        state.undone.iter().filter(is_same).any(|undone| undone.path.overlaps_loosely(&retired.path))
    };
    found.retain(|retired| !is_undone(retired));
    found
}

/// The fields that a rule with this definition leaves behind: no rule of the plan owns them.
#[must_use]
pub fn left_by(plan: &Plan, definition: &Document) -> Vec<Retired> {
    // A rule in shadow writes nothing: the values belong to the application.
    if definition.get_bool("shadow").unwrap_or_default() {
        return Vec::new();
    }
    // A `once` rule leaves its values to the application: they cannot be distinguished from the application's own.
    if definition.get_document("values").is_ok_and(|values| values.get_bool("once").unwrap_or_default()) {
        return Vec::new();
    }
    let Ok(target) = definition.get_document("target") else { return Vec::new() };
    let Ok(collection) = target.get_str("collection") else { return Vec::new() };
    let filter = target.get_document("where").ok();
    let paths = owned_paths(definition).into_iter().map(|path| Retired {
        collection: collection.to_owned(),
        path,
        filter: filter.cloned(),
    });
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

/// The reason why these fields must not be removed: a rule of another deployment owns one of them, as after a change of the
/// deployment's name. Only deployments with a leader count: the state of a deployment that was removed may still exist.
pub async fn owned_elsewhere(context: &Context, paths: &[Retired]) -> Result<Option<String>> {
    if paths.is_empty() {
        return Ok(None);
    }
    let (server, dead_letters) = (&context.server, &context.dead_letters);
    let (database, deployment) = (&dead_letters.database, &dead_letters.deployment);
    for (id, rule, record) in earlier::of_other_deployments(server, database, deployment).await? {
        let Some(retired) = paths.iter().find(|retired| writes(&record, retired)) else { continue };
        if lease::is_held(server, database, std::slice::from_ref(&id)).await? {
            let Retired { collection, path, .. } = retired;
            let other = id.split('#').next().unwrap_or_default();
            return Ok(Some(format!("rule `{rule}` of the deployment `{other}` owns `{path}` of `{collection}`")));
        }
    }
    Ok(None)
}

/// True if a rule with this record writes the path, or a part of it.
fn writes(record: &RuleRecord, retired: &Retired) -> bool {
    let definition = &record.definition;
    let is_blocked = matches!(record.state.block(), Some(BlockReason::Adoption(_)));
    let in_shadow = definition.get_bool("shadow").unwrap_or_default();
    let target = definition.get_document("target").and_then(|target| target.get_str("collection"));
    !is_blocked
        && !in_shadow
        && target.is_ok_and(|target| target == retired.collection)
        && owned_paths(definition).iter().any(|owned| owned.overlaps_loosely(&retired.path))
}

/// Number of documents with the retired field.
pub async fn count(context: &Context, retired: &Retired) -> Result<u64> {
    let mut pages = Holders::of(retired);
    let mut documents = 0;
    while let Some(page) = pages.next(context).await? {
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
) -> Result<RequestOutcome> {
    if let Some(taken) = paths.iter().find(|retired| is_owned(&context.plan, retired)) {
        return Ok(RequestOutcome::Refused(format!(
            "a rule that it runs owns `{}` of `{}`: does it run with this config?",
            taken.path, taken.collection
        )));
    }
    if let Some(owner) = owned_elsewhere(context, paths).await? {
        return Ok(RequestOutcome::Refused(owner));
    }
    // Every partition receives the request. One of them writes, once no other has a rule that owns the paths.
    if context.partition.place() != 0 {
        return Ok(RequestOutcome::Done);
    }
    if !store.is_last(&context.server, id).await? {
        return Ok(RequestOutcome::Stopped);
    }
    for retired in paths {
        if !take_away(context, (store, id), retired, stop).await? {
            return Ok(RequestOutcome::Stopped);
        }
    }
    Ok(RequestOutcome::Done)
}

/// Removes one retired field. Returns false if it was stopped, or the command has ended.
async fn take_away(
    context: &Context,
    (store, id): (&Store, ObjectId),
    retired: &Retired,
    stop: &CancellationToken,
) -> Result<bool> {
    let (database, collection) = retired.namespace();
    let mut pages = Holders::of(retired);
    loop {
        let Some(page) = stop.run_until_cancelled(pages.next(context)).await else { return Ok(false) };
        let Some(ids) = page? else { return Ok(true) };
        if ids.is_empty() {
            continue;
        }
        if !store.is_awaited(&context.server, id).await? {
            return Ok(false);
        }
        let statement = statement::unset(&retired.path, ids, &pages.filter)?;
        let written = context.server.update(database, collection, &[statement], context.limits.write_timeout).await?;
        if let Some((_, error)) = written.refused.into_iter().next() {
            return Err(error);
        }
    }
}

/// The documents with a retired field that may come from the rule, in the order of their `_id`s. Each page has a time
/// limit of its own, however large the collection is.
struct Holders {
    namespace: Namespace,
    filter: Document,
    /// The `_id` that the next page follows.
    after: Option<Bson>,
    window: Option<i64>,
    is_over: bool,
}

impl Holders {
    fn of(retired: &Retired) -> Self {
        let (database, collection) = retired.namespace();
        let namespace = Namespace { database: database.to_owned(), collection: collection.to_owned() };
        let holds = doc! {retired.path.query(): {"$exists": true}};
        let filter = match &retired.filter {
            Some(filter) => doc! {"$and": [filter.clone(), holds]},
            None => holds,
        };
        Self { namespace, filter, after: None, window: None, is_over: false }
    }

    /// The `_id`s of the next page, which may have none; None after the last page.
    async fn next(&mut self, context: &Context) -> Result<Option<Vec<Bson>>> {
        if self.is_over {
            return Ok(None);
        }
        let wanted = Wanted { filter: &self.filter, projection: &doc! {"_id": 1}, limit: PAGE };
        let (after, time) = (self.after.as_ref(), ClusterTime::default());
        let page = scan::page_of_collection(context, &self.namespace, wanted, after, time, &mut self.window).await?;
        let Page { targets, last } = page;
        (self.is_over, self.after) = (last.is_none(), last);
        Ok(Some(targets.into_iter().filter_map(|mut target| target.remove("_id")).collect()))
    }
}
