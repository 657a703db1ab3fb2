//! Documents that a rule inserts and deletes (`create: true` in `target`).
//!
//! A key with sources has a document, whose `_id` is made of the key ([`denormd_rules::plan::create`]). Everything written
//! follows from the sources as they are when they are read, whole, as for other rules:
//!
//! - With sources: one update statement by `_id` with `upsert`. It inserts the document, or sets its owned paths.
//! - Without: a delete statement that demands that the document has no path but `_id` and those that rules own, then an
//!   update statement without `upsert`, which gives the values of "no input" to a document that has other fields. In
//!   this order: a document that fails the first is always met by the second.
//!
//! No document is left with an old value, and none comes back:
//!
//! - Each key is written by one run at a time, and a command whose answer was lost is waited out (see
//!   [`denormd_mongo::fence`]). So an `upsert` cannot run after a later delete, nor under another leader.
//! - Two rules may create one document at once. The index on `_id` refuses the second insert, which is tried again and
//!   then finds the document.
//! - A document that somebody inserts, replaces or deletes is an event of its key, and so is a change of a field that no
//!   rule owns: without sources, the last of these fields keeps the document.
//! - While another rule of the collection awaits an agreement to its first writes, no document is deleted.
//! - Rules that share a collection keep a document as long as one of them has sources for it. Of two rules that lose
//!   their sources at once, the one that reads later sees neither.

use std::{collections::HashSet, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};

use crate::{
    checkpoint::{
        earlier::{is_agreement_awaited, sources_seen},
        fan_out::FanOuts,
    },
    dead_letter::DeadLetters,
    reconcile::{
        batch::{End, Item, Run, newest},
        compare::created::stand_ins,
        context::Context,
        read::{self, one_of, simple_collation},
        scan,
        statement::created::nothing_else,
        value::{Desired, Rows, key_of},
    },
    request::Request,
    route::value_request,
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{
    command::{decoded, limited},
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{
    Rule,
    reference::{Reference, Role},
};

impl Run<'_> {
    /// Counts the documents that are deleted because their keys have no sources. If they exceed the removal limit, these
    /// keys end here.
    pub(super) async fn limit_deletions(&self, items: &mut [Item], rows: &Rows) -> Result<()> {
        let Some(creates) = self.rule.creates.as_ref().filter(|_| !self.detached) else { return Ok(()) };
        let is_deleted =
            |item: &&Item| matches!(rows.desired(self.rule, &item.key), Ok(Desired::Emptied { deletes: true, .. }));
        let ids: Vec<Bson> = items.iter().filter(is_deleted).map(|item| self.rule.reference.id_of(&item.key)).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let mut losing = vec![one_of("_id", ids.iter())];
        losing.extend(nothing_else(creates));
        let losing = doc! {"$and": losing};
        if !self.may_lose(&|_| losing.clone(), newest(items), &|id| self.loss(id, ())).await? {
            for item in items.iter_mut().filter(|item| is_deleted(&&**item)) {
                item.end = Some(End::RemovalLimit);
            }
        }
        Ok(())
    }

    /// Finds the intervals that contain the dates of these keys.
    pub(super) async fn buckets(&self, items: &[Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let found = self.context.bucket_keys(self.rule, &keys).await?;
        follow_ups.extend(found.into_iter().map(|key| value_request(self.rule, key)));
        Ok(())
    }

    /// Those of these sources that have a value which no key can have, and that take part in the rule.
    pub(super) async fn unusable(&self, sources: &[Bson], after: ClusterTime) -> Result<HashSet<Key>> {
        let clauses: Vec<Document> =
            [Some(one_of("_id", sources.iter())), self.rule.source.filter.clone()].into_iter().flatten().collect();
        let command = doc! {
            "find": &self.rule.source.namespace.collection, "filter": {"$and": clauses}, "projection": {"_id": 1},
            "batchSize": 10_000, "collation": simple_collation(),
        };
        self.read(Role::Source, command, after).await?.iter().map(read::id_of).collect()
    }
}

/// The expression of the `_id` of a document from its key in the field `k`.
#[must_use]
pub fn id_expression(reference: &Reference) -> Bson {
    let value = |nth: usize| Bson::from(doc! {"$arrayElemAt": ["$k", i32::try_from(nth).unwrap_or(i32::MAX)]});
    let names = reference.pairs.iter().enumerate().filter_map(|(nth, pair)| Some((pair.name_in_id()?, value(nth))));
    let fields: Document = names.map(|(name, value)| (name.to_owned(), value)).collect();
    if fields.is_empty() { value(0) } else { fields.into() }
}

/// The error of a source with a value that no key can have.
#[must_use]
pub fn unusable(reference: &Reference) -> Error {
    let paths: Vec<String> = reference.pairs.iter().map(|pair| format!("`{}`", pair.source)).collect();
    let what = if reference.has_buckets() { "is an array, or no date where the rule needs one" } else { "is an array" };
    Error::new(Kind::Refused, format!("a value of {} {what}: it makes no `_id`", paths.join(", ")))
}

/// Finds the keys of dates: rows `{ k: [values] }` in the order of `keys`.
#[must_use]
pub fn buckets_of(rule: &Rule, keys: &[&Key]) -> Document {
    let wanted = keys.iter().map(|key| doc! {"k": {"$literal": key.values().to_vec()}});
    let values = rule.reference.pairs.iter().enumerate().map(|(nth, pair)| {
        let value = doc! {"$arrayElemAt": ["$k", i32::try_from(nth).unwrap_or(i32::MAX)]};
        pair.bucket.as_ref().map_or_else(|| value.clone(), |bucket| bucket.start_of(value.clone()))
    });
    let values: Vec<Document> = values.collect();
    let stages = vec![doc! {"$documents": wanted.collect::<Vec<_>>()}, doc! {"$replaceWith": {"k": values}}];
    read::command(1, stages)
}

/// Most keys or `_id`s in one command.
const AT_ONCE: usize = 10_000;

/// A page of sources, in the order of `_id`.
#[derive(Debug, Default)]
pub struct Sources {
    /// Number of sources read.
    pub read: u64,
    /// Stand-ins for the documents that their keys should have and do not have.
    pub absent: Vec<Document>,
    /// The `_id`s of sources with a value that no key can have.
    pub unusable: Vec<Key>,
    /// The `_id` that the next page follows; None after the last source.
    pub last: Option<Bson>,
}

impl Sources {
    fn extend(&mut self, other: Self) {
        self.absent.extend(other.absent);
        self.unusable.extend(other.unusable);
    }
}

impl Context {
    /// The keys of the intervals that contain the dates of these keys; the same keys for rules without intervals.
    pub async fn bucket_keys(&self, rule: &Rule, keys: &[&Key]) -> Result<Vec<Key>> {
        if !rule.reference.has_buckets() || keys.is_empty() {
            return Ok(keys.iter().map(|key| (*key).clone()).collect());
        }
        let mut found = Vec::new();
        // A source has as many keys as its array has elements.
        for keys in keys.chunks(AT_ONCE) {
            let command = limited(buckets_of(rule, keys), self.limits.read_timeout);
            let rows = self.server.read(&rule.source.namespace.database, command, ClusterTime::default()).await?;
            for row in &rows {
                found.push(key_of(row)?);
            }
        }
        Ok(found)
    }

    /// Reads up to `limit` sources that follow `after`, and finds out which documents are absent.
    pub async fn sources_of_documents(
        &self,
        rule: &Rule,
        after: Option<&Bson>,
        limit: usize,
        time: ClusterTime,
    ) -> Result<Sources> {
        let filter = rule.source.filter.clone().unwrap_or_default();
        let projection = rule.reference.projection(Role::Source);
        let wanted = scan::Wanted { filter: &filter, projection: &projection, limit };
        let page = scan::page_of_side(self, (rule, Role::Source), wanted, after, time).await?;
        let sources = self.documents_of(rule, &decoded(&page.targets)?, time).await?;
        Ok(Sources { last: page.last, ..sources })
    }

    /// Finds out which documents of these sources are absent. A source whose keys the server cannot compute counts as unusable.
    pub async fn documents_of(&self, rule: &Rule, sources: &[Document], time: ClusterTime) -> Result<Sources> {
        let mut all = Sources::default();
        let mut stack = vec![sources];
        while let Some(part) = stack.pop() {
            match self.documents_of_at_once(rule, part, time).await {
                Ok(found) => all.extend(found),
                Err(error) if error.kind != Kind::Refused => return Err(error),
                Err(_) if part.len() > 1 => {
                    let (front, back) = part.split_at(part.len() / 2);
                    stack.extend([back, front]);
                }
                Err(_) => all.unusable.extend(part.iter().map(Key::of_document)),
            }
        }
        all.read = sources.len() as u64;
        Ok(all)
    }

    async fn documents_of_at_once(&self, rule: &Rule, sources: &[Document], time: ClusterTime) -> Result<Sources> {
        let mut out = Sources::default();
        let mut keys: Vec<Key> = Vec::new();
        for source in sources {
            if rule.reference.has_unusable_value(source) {
                out.unusable.push(Key::of_document(source));
            }
            keys.extend(rule.reference.keys(Role::Source, source).into_iter().flatten());
        }
        keys.sort_unstable();
        keys.dedup();
        let mut keys = self.bucket_keys(rule, &keys.iter().collect::<Vec<_>>()).await?;
        keys.retain(|key| self.owns(rule, key));
        let ids: Vec<Bson> = keys.iter().map(|key| rule.reference.id_of(key)).collect();
        out.absent = self.absent(rule, &ids, time).await?;
        Ok(out)
    }

    /// Stand-ins for those of these `_id`s that no document has.
    pub(super) async fn absent(&self, rule: &Rule, ids: &[Bson], time: ClusterTime) -> Result<Vec<Document>> {
        let mut absent = Vec::new();
        for ids in ids.chunks(AT_ONCE) {
            let command = doc! {
                "find": &rule.target.namespace.collection, "filter": one_of("_id", ids.iter()), "projection": {"_id": 1},
                "batchSize": 10_000, "collation": simple_collation(),
            };
            let command = limited(command, self.limits.read_timeout);
            let rows = self.server.read(&rule.target.namespace.database, command, time).await?;
            absent.extend(stand_ins(&decoded(&rows)?, ids));
        }
        Ok(absent)
    }

    /// True if the source collection of a rule has existed and is gone, or is another one now. While a source has never
    /// existed, no document is there because of it.
    async fn is_lost(&self, rule: &Rule) -> Result<bool> {
        let source = &rule.source.namespace;
        let names = [source.collection.as_str()];
        let now = self.server.collection_uuids(&source.database, &names).await?.remove(&source.collection);
        if self.memory.sources.uuid(source).is_some_and(|known| now.as_ref() != Some(&known)) {
            return Ok(true);
        }
        // Of a source that was replaced before this process looked, the record alone tells.
        let DeadLetters { database, deployment, .. } = &self.dead_letters;
        let seen = sources_seen(&self.server, database, deployment, &rule.name).await?;
        Ok(seen.iter().any(|seen| now.is_none() || seen.as_ref().is_some_and(|seen| Some(seen) != now.as_ref())))
    }

    /// True if another rule of the collection awaits an agreement: it has not written the fields that it owns, and the values in them
    /// are the application's, so they keep their documents.
    async fn is_agreement_awaited(&self, rule: &Rule) -> Result<bool> {
        let shares = |other: &&Arc<Rule>| other.target.namespace == rule.target.namespace && other.id != rule.id;
        let others: Vec<&str> = self.plan.rules.iter().filter(shares).map(|other| other.name.as_str()).collect();
        if others.is_empty() || rule.creates.as_ref().is_none_or(|creates| creates.keeps) {
            return Ok(false);
        }
        // Of this partition alone, if it is one: each is agreed to, and backfilled, on its own.
        let FanOuts { database, deployment } = &self.fan_outs;
        is_agreement_awaited(&self.server, database, deployment, &others).await
    }

    /// Of these keys without sources, those for which another rule keeps the document.
    pub(super) async fn held_by_others(
        &self,
        rule: &Rule,
        keys: &[&Key],
        after: ClusterTime,
        limit: Duration,
    ) -> Result<HashSet<Key>> {
        let mut held = HashSet::new();
        if !keys.is_empty() && self.is_agreement_awaited(rule).await? {
            held.extend(keys.iter().map(|key| (*key).clone()));
        }
        let others = rule.creates.iter().filter(|creates| !creates.keeps).flat_map(|creates| &creates.others);
        for other in others.filter_map(|other| self.plan.rules.iter().find(|rule| rule.id == *other)) {
            let left: Vec<&Key> = keys.iter().copied().filter(|key| !held.contains(*key)).collect();
            if left.is_empty() {
                break;
            }
            let command = limited(read::keys_with_sources(other, &left), limit);
            let rows = self.server.read(&other.source.namespace.database, command, after).await?;
            let found: HashSet<Key> = rows.iter().map(|row| key_of(row)).collect::<Result<_>>()?;
            // Documents created from a source that is gone stay until it is there again, or somebody has agreed.
            let all = self.is_lost(other).await?;
            held.extend(left.into_iter().filter(|key| all || found.contains(*key)).cloned());
        }
        Ok(held)
    }
}
