//! Removes the retired fields: those of rules that are no longer in the config, and those that a changed rule no longer
//! owns.

use bson::{Bson, Document, doc, oid::ObjectId};
use tokio::sync::OnceCell;
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
use denormd_model::{namespace::Namespace, position::ClusterTime, text::counted};
use denormd_mongo::{
    command::decoded,
    error::{Error, Result},
};
use denormd_rules::plan::{Plan, Rule, graph::exclude_each_other, is_once, owned_paths};

/// Documents in one page, and in one write.
const PAGE: usize = 1000;
/// Number of refused documents at which `prune` gives up: finding each of them takes several writes.
const MOST_REFUSED: u64 = 100;

/// The retired fields of the rule that has this name: paths that it once owned and no rule owns now. `known` has the records of all
/// rules of the deployment.
#[must_use]
pub fn retired(plan: &Plan, known: &[(String, RuleRecord)], name: &str) -> Vec<Retired> {
    let Some((_, state)) = known.iter().find(|(known, _)| known == name) else { return Vec::new() };
    let is_gone = plan.named(name).is_none();
    let definitions = state.retired.iter().chain(last_written(state).filter(|_| is_gone));
    let mut found: Vec<Retired> = Vec::new();
    for left in definitions.flat_map(|definition| left_by(plan, definition)) {
        if !found.contains(&left) {
            found.push(left);
        }
    }
    found.sort_by(|one, other| (&one.collection, &one.path).cmp(&(&other.collection, &other.path)));
    let left = left_to_application(known);
    found.retain(|retired| !left.iter().any(|left| overlap(left, retired)));
    found
}

/// The fields to which `undo` has put back the application's values, or which the application may have changed while a rule was `once`.
/// A retired field of another rule may be one of them.
fn left_to_application(known: &[(String, RuleRecord)]) -> Vec<Retired> {
    let records = || known.iter().map(|(_, record)| record);
    let all = records().flat_map(|record| record.retired.iter().chain(last_written(record)));
    let once = all.filter(|definition| is_once(definition)).flat_map(written_with);
    records().flat_map(|record| record.undone.iter().cloned()).chain(once).collect()
}

/// The fields that a rule of the plan writes.
#[must_use]
pub fn written_by(rule: &Rule) -> Vec<Retired> {
    let (collection, filter) = (rule.target.namespace.to_string(), &rule.target.filter);
    let paths = rule.owned().into_iter().cloned();
    paths.map(|path| Retired { collection: collection.clone(), path, filter: filter.clone() }).collect()
}

/// The definition by which a rule last wrote. One that was blocked before its first write has written nothing: the values belong to
/// the application.
fn last_written(record: &RuleRecord) -> Option<&Document> {
    (!record.state.awaits_agreement()).then_some(&record.definition)
}

/// The fields that a rule with this definition writes. A rule in shadow writes none: the values belong to the application.
fn written_with(definition: &Document) -> Vec<Retired> {
    let Ok(target) = definition.get_document("target") else { return Vec::new() };
    let Ok(collection) = target.get_str("collection") else { return Vec::new() };
    if definition.get_bool("shadow").unwrap_or_default() {
        return Vec::new();
    }
    let filter = target.get_document("where").ok();
    let field = |path| Retired { collection: collection.to_owned(), path, filter: filter.cloned() };
    owned_paths(definition).into_iter().map(field).collect()
}

/// True if two fields are the same or parts of each other, in documents of which some may be the same.
fn overlap(one: &Retired, other: &Retired) -> bool {
    one.collection == other.collection
        && one.path.overlaps_loosely(&other.path)
        && !exclude_each_other(one.filter.as_ref(), other.filter.as_ref())
}

/// The fields that a rule with this definition leaves behind: no rule of the plan owns them.
#[must_use]
pub fn left_by(plan: &Plan, definition: &Document) -> Vec<Retired> {
    // A `once` rule leaves its values to the application: they cannot be distinguished from the application's own.
    if is_once(definition) {
        return Vec::new();
    }
    written_with(definition).into_iter().filter(|retired| !is_owned(plan, retired)).collect()
}

/// True if a rule of the plan owns the path, or a part of it.
fn is_owned(plan: &Plan, retired: &Retired) -> bool {
    plan.rules.iter().any(|rule| owns(rule, retired))
}

/// True if the rule owns the path, or a part of it, in the same documents.
pub(super) fn owns(rule: &Rule, retired: &Retired) -> bool {
    written_by(rule).iter().any(|field| overlap(field, retired))
}

/// The rules of the other deployments in the same state database: the id of the deployment or partition, the rule's name and its
/// record. They are read once, when they are first needed.
#[derive(Debug, Default)]
pub struct OtherDeployments(OnceCell<Vec<(String, String, RuleRecord)>>);

impl OtherDeployments {
    /// The reason why these fields must not be removed or written: a rule of another deployment owns one of them, as after a change of
    /// the deployment's name. Only deployments with a leader count: the state of a deployment that was removed may still exist.
    pub async fn objection(&self, context: &Context, paths: &[Retired]) -> Result<Option<String>> {
        if paths.is_empty() {
            return Ok(None);
        }
        let (server, dead_letters) = (&context.server, &context.dead_letters);
        let (database, deployment) = (&dead_letters.database, &dead_letters.deployment);
        let read = || earlier::of_other_deployments(server, database, deployment);
        for (id, rule, record) in self.0.get_or_try_init(read).await? {
            let Some(retired) = paths.iter().find(|retired| writes(record, retired)) else { continue };
            if lease::is_held(server, database, std::slice::from_ref(id)).await? {
                let Retired { collection, path, .. } = retired;
                let other = id.split('#').next().unwrap_or_default();
                return Ok(Some(format!("rule `{rule}` of the deployment `{other}` owns `{path}` of `{collection}`")));
            }
        }
        Ok(None)
    }
}

/// True if a rule with this record writes the path, or a part of it.
fn writes(record: &RuleRecord, retired: &Retired) -> bool {
    last_written(record).into_iter().flat_map(written_with).any(|field| overlap(&field, retired))
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
    if let Some(owner) = OtherDeployments::default().objection(context, paths).await? {
        return Ok(RequestOutcome::Refused(owner));
    }
    // Every partition receives the request. One of them writes, once no other has a rule that owns the paths.
    if context.partition.place() != 0 {
        return Ok(RequestOutcome::Done);
    }
    if !store.is_last(&context.server, id).await? {
        return Ok(RequestOutcome::Stopped);
    }
    // An `undo` may have ended since the command read the records.
    let left = left_to_application(&store.rules(&context.server).await?);
    if let Some(Retired { collection, path, .. }) =
        paths.iter().find(|path| left.iter().any(|left| overlap(left, path)))
    {
        let reason = format!("`{path}` of `{collection}` was left to the application meanwhile: run the command again");
        return Ok(RequestOutcome::Refused(reason));
    }
    let mut refused = Refused::default();
    for retired in paths {
        if !take_away(context, (store, id), retired, stop, &mut refused).await? {
            return Ok(RequestOutcome::Stopped);
        }
    }
    Ok(match refused.first {
        None => RequestOutcome::Done,
        Some(first) => {
            let documents = counted(refused.documents, "document");
            let why = first.message;
            RequestOutcome::Refused(format!(
                "the server refused to change {documents}, the field is removed from all others: {why}"
            ))
        }
    })
}

/// The documents that the server refused to change.
#[derive(Default)]
struct Refused {
    documents: u64,
    /// The reason for the first of them.
    first: Option<Error>,
}

impl Refused {
    /// Fails if there are so many that no document may be changed.
    fn add(&mut self, error: Error) -> Result<()> {
        self.documents += 1;
        if self.documents >= MOST_REFUSED {
            return Err(error);
        }
        self.first.get_or_insert(error);
        Ok(())
    }
}

/// Removes one retired field. Documents that the server refuses to change stay as they are, and are counted in `refused`. Returns
/// false if it was stopped, or the command has ended.
async fn take_away(
    context: &Context,
    (store, id): (&Store, ObjectId),
    retired: &Retired,
    stop: &CancellationToken,
    refused: &mut Refused,
) -> Result<bool> {
    let (database, collection) = retired.namespace();
    let mut pages = Holders::of(retired);
    loop {
        let Some(page) = stop.run_until_cancelled(pages.next(context)).await else { return Ok(false) };
        let Some(ids) = page? else { return Ok(true) };
        let mut parts = vec![ids];
        while let Some(mut part) = parts.pop().filter(|part| !part.is_empty()) {
            if !store.is_awaited(&context.server, id).await? {
                return Ok(false);
            }
            let statement = statement::unset(&retired.path, part.clone(), &pages.filter)?;
            let timeout = context.limits.write_timeout;
            let written = context.server.update(database, collection, &[statement], timeout).await?;
            match written.refused.into_iter().next() {
                None => {}
                Some((_, error)) if error.is_transient() => return Err(error),
                Some((_, error)) if part.len() == 1 => refused.add(error)?,
                Some(_) => {
                    let rest = part.split_off(part.len() / 2);
                    parts.extend([rest, part]);
                }
            }
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
        Ok(Some(decoded(&targets)?.into_iter().filter_map(|mut target| target.remove("_id")).collect()))
    }
}
