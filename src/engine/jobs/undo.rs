//! Puts back the values that a rule's first backfill overwrote or removed, where nobody else has written since.
//!
//! A value goes back only where its place still holds what denormd wrote: the stored value has the fingerprint that was
//! written down with the old one, and the statement demands that it is unchanged. A kept value is deleted after its
//! place has been read again, so a killed command or leader resumes where it left off.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use bson::{Bson, Document, RawBson, RawDocumentBuf, cstr, doc, raw::CString, rawdoc};
use tokio_util::sync::CancellationToken;

use super::prune::{OtherDeployments, owns};
use crate::{
    checkpoint::{
        kept::{COLLECTION, Element, KeptValue, fingerprint},
        requests::{OperatorRequest, RequestOutcome},
        rule_record::{Retired, RuleRecord},
        store::Store,
    },
    reconcile::{
        Context,
        read::{UNINDEXED, simple_collation},
    },
};
use denormd_model::{failpoint, field_path::FieldPath, key::Key, position::ClusterTime, rule_state::RuleState};
use denormd_mongo::error::{Error, Result};

/// Time limit for deleting kept values that are put back.
const CLEARING: Duration = Duration::from_secs(5);

/// The kept values of a rule, by what `undo` can do with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Values that are, or would be, put back.
    pub back: u64,
    /// Values that were changed since, by the application or by the rule itself.
    pub changed: u64,
    /// Values that denormd has not overwritten after all, or that are back already.
    pub same: u64,
    /// Values that were too large to be kept, or that were not kept for lack of room.
    pub lost: u64,
}

/// Decision on a kept value.
enum Verdict {
    /// Its place holds what denormd wrote.
    Back { at: String, stored: Option<Bson> },
    /// Its place holds another value, or is gone.
    Changed,
    /// Its place holds the old value.
    Same,
    /// It was too large to be kept.
    Lost,
}

/// True for a rule that may write, so that an old value would be overwritten again.
#[must_use]
pub fn is_running(record: &RuleRecord) -> bool {
    !record.state.is_stopped() && record.state != RuleState::Removed
}

/// Counts the kept values of a rule. Reads only.
pub async fn count(context: &Context, rule: &str) -> Result<Tally> {
    let kept = context.kept();
    let mut tally = Tally { lost: kept.count_not_kept(rule).await?, ..Tally::default() };
    let mut after: Option<Document> = None;
    loop {
        let page = kept.page(rule, after.as_ref()).await?;
        let Some(last) = page.last() else { return Ok(tally) };
        after = Some(last.id.clone());
        for (_, verdict) in judged(context, &page).await? {
            match verdict {
                Verdict::Back { .. } => tally.back += 1,
                Verdict::Changed => tally.changed += 1,
                Verdict::Same => tally.same += 1,
                Verdict::Lost => tally.lost += 1,
            }
        }
    }
}

/// Puts back what can be put back for `denormd undo`, by writes that end with the lease. Checks `stop` between writes: a
/// write in flight is waited for.
pub async fn carry_out(
    context: &Context,
    store: &Store,
    asked: &OperatorRequest,
    stop: &CancellationToken,
) -> Result<RequestOutcome> {
    let known = store.standing(&context.server).await?;
    let record = known.into_iter().find(|(name, _)| *name == asked.rule).map(|(_, record)| record);
    let rule = context.plan.named(&asked.rule);
    if rule.is_some() {
        let stopped = record.as_ref().filter(|record| !is_running(record));
        let Some(record) = stopped else { return Ok(RequestOutcome::Refused(format!("`{}` is running", asked.rule))) };
        // Its last batches may still write.
        if record.noticed != record.generation {
            return Ok(RequestOutcome::Stopped);
        }
    }
    let paths = context.kept().paths(&asked.rule).await?;
    let fields: Vec<Retired> = paths.into_iter().filter_map(retired).collect();
    // The plan refuses two rules that write one field of one document. It does not know rules that were renamed since, or fields
    // that an earlier definition of the rule owned and another rule owns now.
    let is_left = |field: &&Retired| rule.is_none_or(|rule| !owns(rule, field));
    let mut others = context.plan.rules.iter().filter(|other| rule.is_none_or(|rule| rule.id != other.id));
    if let Some(other) = others.find(|other| fields.iter().filter(is_left).any(|field| owns(other, field))) {
        return Ok(RequestOutcome::Refused(format!("`{}` owns a field that it would put back", other.name)));
    }
    if let Some(owner) = OtherDeployments::default().objection(context, &fields).await? {
        return Ok(RequestOutcome::Refused(format!("{owner}, a field that `undo` would put back")));
    }
    let mut keeping = record.and_then(|record| record.keeping).unwrap_or_default();
    keeping.passed.clear();
    for path in fields.iter().map(|field| field.path.to_string()) {
        if !keeping.paths.contains(&path) {
            keeping.paths.push(path);
        }
    }
    store.undoing(&context.server, &asked.rule, &keeping, &fields).await?;
    failpoint::here("undoing");
    if let Some(rule) = rule {
        if context.undo.enabled && !keeping.paths.is_empty() {
            context.memory.kept.begin(rule.id, keeping, false, false);
        } else {
            context.memory.kept.end(rule.id);
        }
    }
    // Every partition receives the request. One of them writes, after the batches of all have ended.
    if context.partition.place() != 0 {
        return Ok(RequestOutcome::Done);
    }
    if !store.is_last(&context.server, asked.id).await? {
        return Ok(RequestOutcome::Stopped);
    }
    put_back(context, store, asked, stop).await
}

fn retired((collection, path): (String, String)) -> Option<Retired> {
    Some(Retired { collection, path: FieldPath::parse(&path).ok()?, filter: None })
}

async fn put_back(
    context: &Context,
    store: &Store,
    asked: &OperatorRequest,
    stop: &CancellationToken,
) -> Result<RequestOutcome> {
    let rule = asked.rule.as_str();
    let kept = context.kept();
    let whole = context.state_of_deployment().await?;
    let is_planned = context.plan.named(rule).is_some();
    let mut after: Option<Document> = None;
    loop {
        // A pause may end, an index or a source may come back, or somebody resumes the rule.
        let records = whole.of_each_partition(&context.server, rule).await?;
        if is_planned && records.iter().any(|(_, record)| is_running(record)) {
            return Ok(RequestOutcome::Refused(format!("`{rule}` runs again, and some values may not be back")));
        }
        if !store.is_awaited(&context.server, asked.id).await? {
            return Ok(RequestOutcome::Stopped);
        }
        let Some(page) = stop.run_until_cancelled(kept.page(rule, after.as_ref())).await else {
            return Ok(RequestOutcome::Stopped);
        };
        let page = page?;
        let Some(last) = page.last() else { break };
        after = Some(last.id.clone());
        write(context, &page).await?;
        failpoint::here("put-back");
        clear(context, &page).await?;
    }
    kept.forget_not_kept(rule).await?;
    kept.leave(rule).await?;
    Ok(RequestOutcome::Done)
}

/// Writes the old values of a page. A target that the server refuses to write keeps denormd's value.
async fn write(context: &Context, page: &[KeptValue]) -> Result<()> {
    let mut statements: BTreeMap<&str, Vec<RawDocumentBuf>> = BTreeMap::new();
    for (value, verdict) in judged(context, page).await? {
        if let Verdict::Back { at, stored } = verdict {
            statements.entry(&value.place.collection).or_default().push(statement(value, &at, stored.as_ref())?);
        }
    }
    for (name, statements) in statements {
        let (database, collection) = name.split_once('.').unwrap_or_default();
        let written = context.server.update(database, collection, &statements, context.limits.write_timeout).await?;
        if let Some((_, error)) = written.refused.into_iter().find(|(_, error)| error.is_transient()) {
            return Err(error);
        }
    }
    Ok(())
}

/// Deletes the kept values that are back in their places.
async fn clear(context: &Context, page: &[KeptValue]) -> Result<()> {
    let same = judged(context, page).await?.into_iter().filter(|(_, verdict)| matches!(verdict, Verdict::Same));
    let deletes =
        same.map(|(value, _)| Ok(RawDocumentBuf::try_from(&doc! {"q": {"_id": value.id.clone()}, "limit": 1})?));
    let deletes = deletes.collect::<Result<Vec<_>>>()?;
    if deletes.is_empty() {
        return Ok(());
    }
    let database = &context.dead_letters.database;
    let mut written = context.server.delete(database, COLLECTION, &deletes, CLEARING).await?;
    written.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
}

/// Reads the targets of a page, and compares each place with its kept value.
async fn judged<'a>(context: &Context, page: &'a [KeptValue]) -> Result<Vec<(&'a KeptValue, Verdict)>> {
    let mut collections: BTreeMap<&str, Vec<&KeptValue>> = BTreeMap::new();
    for value in page {
        collections.entry(&value.place.collection).or_default().push(value);
    }
    let mut out = Vec::with_capacity(page.len());
    for (name, values) in collections {
        let (database, collection) = name.split_once('.').unwrap_or_default();
        let ids: Vec<Bson> = values.iter().map(|value| value.place.target.clone()).collect();
        let roots = values.iter().filter_map(|value| value.place.path.split('.').next()).chain([UNINDEXED]);
        let projection: Document = roots.map(|root| (root.to_owned(), Bson::Int32(1))).collect();
        let command = doc! {
            "find": collection, "filter": {"_id": {"$in": ids}}, "projection": projection, "collation": simple_collation(),
        };
        let mut verdicts: HashMap<Key, Vec<&KeptValue>> = HashMap::new();
        for value in values {
            verdicts.entry(Key::one(value.place.target.clone())).or_default().push(value);
        }
        let mut pages = context.server.pages(database, command, ClusterTime::default()).await?;
        while let Some(rows) = pages.next().await? {
            for row in rows {
                let target = Document::try_from(row.as_ref())?;
                let id = Key::of_document(&target);
                for value in verdicts.remove(&id).unwrap_or_default() {
                    out.push((value, judge(value, &target)?));
                }
            }
        }
        // The target is gone.
        out.extend(verdicts.into_values().flatten().map(|value| (value, Verdict::Changed)));
    }
    Ok(out)
}

fn judge(value: &KeptValue, target: &Document) -> Result<Verdict> {
    let Some(at) = place(value, target)? else { return Ok(Verdict::Changed) };
    let parent = at.rsplit_once('.').map(|(parent, _)| parent);
    let target = Bson::Document(target.clone());
    // The subdocument around the value may be gone, or be another value now.
    if parent.is_some_and(|parent| value_at(&target, parent).and_then(Bson::as_document).is_none()) {
        return Ok(Verdict::Changed);
    }
    let stored = value_at(&target, &at).cloned();
    let found = fingerprint(stored.clone().map(RawBson::try_from).transpose()?.as_ref());
    Ok(match value.old {
        _ if found == value.was => Verdict::Same,
        None => Verdict::Lost,
        Some(_) if found == value.new => Verdict::Back { at, stored },
        Some(_) => Verdict::Changed,
    })
}

/// The place of a kept value in its target as it is now, with indexes. None if its element is gone, or cannot be identified
/// from another one.
fn place(value: &KeptValue, target: &Document) -> Result<Option<String>> {
    let path = &value.place.path;
    let Some(element) = &value.place.element else { return Ok(Some(path.clone())) };
    let Element { at, by, rest, own } = element;
    let target = Bson::Document(target.clone());
    let (Some((array, index)), Some((_, below))) = (at.rsplit_once('.'), path.rsplit_once("$[].")) else {
        return Ok(None);
    };
    let Some(Bson::Array(items)) = value_at(&target, array) else { return Ok(None) };
    let mut found = Vec::new();
    for (nth, item) in items.iter().enumerate() {
        let same = |(path, value): &(String, Option<Bson>)| {
            let key = |value: Option<&Bson>| value.cloned().map(Key::one);
            key(value_at(item, path)) == key(value.as_ref())
        };
        if item.as_document().is_some()
            && by.iter().all(same)
            && (rest.is_none() || Element::rest_of(item, own)? == *rest)
        {
            found.push(nth);
        }
    }
    // The element may have moved. One in its old place with the same reference is the same.
    let old = index.parse().ok().filter(|index| found.contains(index));
    let nth: Option<usize> = old.or_else(|| found.first().copied().filter(|_| found.len() == 1));
    Ok(nth.map(|nth| format!("{array}.{nth}.{below}")))
}

/// The value at a path with indexes.
fn value_at<'a>(value: &'a Bson, path: &str) -> Option<&'a Bson> {
    path.split('.').try_fold(value, |at, part| match at {
        Bson::Document(doc) => doc.get(part),
        Bson::Array(items) => items.get(part.parse::<usize>().ok()?),
        _ => None,
    })
}

/// The statement that puts a value back while its place holds the one that was read.
fn statement(value: &KeptValue, at: &str, stored: Option<&Bson>) -> Result<RawDocumentBuf> {
    let old = value.old.clone().ok_or_else(|| Error::internal("a value that was not kept"))?;
    let mut conditions = vec![doc! {"_id": {"$eq": value.place.target.clone()}}];
    conditions.push(match stored {
        None => doc! {at: {"$exists": false}},
        // An array's elements would be compared as well.
        Some(stored @ Bson::Array(_)) => doc! {at: {"$eq": stored.clone()}},
        Some(stored) => {
            // The types of MinKey and MaxKey are -1 and 127.
            let same_type = i32::from((stored.element_type() as u8).cast_signed());
            doc! {at: {"$eq": stored.clone(), "$type": same_type, "$not": {"$type": "array"}}}
        }
    });
    if let Some(Element { by, .. }) = &value.place.element {
        let below = value.place.path.rsplit_once("$[].").map_or("", |(_, below)| below);
        let element = at.strip_suffix(&format!(".{below}")).unwrap_or_default();
        conditions.extend(by.iter().map(|(path, value)| {
            let equal = value.as_ref().map_or(doc! {"$exists": false}, |value| doc! {"$eq": value.clone()});
            doc! {format!("{element}.{path}"): equal}
        }));
        // If the element is gone and had no reference, the conditions hold as well, and the write would insert it again.
        conditions.push(doc! {element: {"$type": "object"}});
    } else {
        let outer = at.match_indices('.').map(|(end, _)| doc! {&at[..end]: {"$type": "object"}});
        conditions.extend(outer);
    }
    let mut set = RawDocumentBuf::new();
    set.append(CString::try_from(at)?, old);
    let mut statement = RawDocumentBuf::new();
    statement.append(cstr!("q"), RawDocumentBuf::try_from(&doc! {"$and": conditions})?);
    statement.append(cstr!("u"), rawdoc! {"$set": set});
    statement.append(cstr!("collation"), RawDocumentBuf::try_from(&simple_collation())?);
    Ok(statement)
}
