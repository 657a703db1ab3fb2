//! The removal limit: the number of targets of a rule that may lose their values within an hour because no source
//! matches their reference any more. Beyond it, the rule is blocked. `on_missing: remove` and `delete` also wait for a
//! grace period.
//!
//! A target without a value loses none, nor does one that holds what `otherwise` gives it, and a value that leaves a group or a
//! slice is not counted. A target counts once, and one with values in array elements once for each loss, however often its write
//! is tried.

use std::{collections::HashMap, hash::Hash};

use bson::{Bson, Document, RawArray, RawBson, RawBsonRef, doc};
use tokio::time::Instant;
use tracing::Instrument;

use crate::{
    reconcile::{
        batch::{End, Item, Run, newest},
        read,
        value::{Desired, Field, Rows},
    },
    request::Scope,
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{
    command::limited,
    error::{Error, Result},
};
use denormd_rules::{
    config::OnMissing,
    plan::{Rule, Values, reference::Role},
};

/// The limit of a rule with few targets, unless `limits.destroy_per_hour` says otherwise.
const LEAST: usize = 1000;
/// A tenth of a rule's targets is the limit, where that is more.
const PART: usize = 10;
/// Each new target begins the grace period of its key again, but not beyond this multiple of it: otherwise it would not end
/// while new targets arrive.
const LONGEST: u32 = 6;

impl Run<'_> {
    /// The reason why a dangling reference does not remove anything yet: the grace period, or the removal limit.
    pub(super) async fn destroys(&self, item: &mut Item) -> Result<Option<End>> {
        let limits = &self.context.limits;
        let waits = item.work.unconfirmed_since.get_or_insert_with(Instant::now).elapsed();
        let missing = item.work.missing_since.get_or_insert_with(Instant::now).elapsed();
        let rest = limits.destroy_grace.saturating_sub(waits);
        let rest = rest.min((limits.destroy_grace * LONGEST).saturating_sub(missing));
        if !rest.is_zero() {
            return Ok(Some(End::Later(rest)));
        }
        let losing = |rule: &Rule| {
            let holders = read::holders_filter(rule, &[&item.key]);
            match &item.work.scope {
                Scope::Named(ids) => {
                    doc! {"$and": [read::one_of("_id", ids.iter().filter_map(|id| id.values().first())), holders]}
                }
                Scope::All => holders,
            }
        };
        let may = self.may_lose(&losing, item.work.after, &|id| self.loss(id, &item.key)).await?;
        Ok((!may).then_some(End::RemovalLimit))
    }

    /// Counts the targets that lose their values because no source matches one of these keys. If they exceed the limit,
    /// these keys end here.
    pub(super) async fn limit_losses(&self, items: &mut [Item], rows: &Rows) -> Result<()> {
        let unsets = matches!(self.rule.values, Values::Set { once: false, .. })
            && matches!(self.rule.on_missing, OnMissing::Unset | OnMissing::Null);
        if self.detached || !unsets {
            return Ok(());
        }
        // Targets of a statement that took too long were counted before it was sent, unless the source went meanwhile.
        let missing = |item: &&Item| !item.work.is_counted && !item.key.values().is_empty() && !rows.answer(&item.key);
        let (all, named): (Vec<&Item>, Vec<&Item>) =
            items.iter().filter(missing).partition(|item| item.work.scope == Scope::All);
        let keys: Vec<&Key> = all.iter().chain(&named).map(|item| &item.key).collect();
        if keys.is_empty() {
            return Ok(());
        }
        let without_source = keys.first().and_then(|key| rows.desired(self.rule, key).ok());
        let without_source = without_source.as_ref().and_then(Desired::fields).unwrap_or_default();
        let losing = |rule: &Rule| {
            let holders = |items: &[&Item]| {
                let keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
                read::holders_filter(rule, &keys)
            };
            let mut clauses = Vec::new();
            if !all.is_empty() {
                clauses.push(holders(&all));
            }
            if !named.is_empty() {
                let ids = named.iter().filter_map(|item| match &item.work.scope {
                    Scope::Named(ids) => Some(ids),
                    Scope::All => None,
                });
                let ids = read::one_of("_id", ids.flatten().filter_map(|id| id.values().first()));
                clauses.push(doc! {"$and": [ids, holders(&named)]});
            }
            doc! {"$and": [{"$or": clauses}, read::has_values(rule, &keys, without_source)]}
        };
        let may_lose = self.may_lose(&losing, newest(items), &|id| self.loss(id, &keys)).await?;
        for item in items.iter_mut().filter(|item| missing(&&**item)) {
            if may_lose {
                item.work.is_counted = true;
            } else {
                item.end = Some(End::RemovalLimit);
            }
        }
        Ok(())
    }

    /// The same for targets whose values are computed from several references.
    pub(super) async fn may_lose_of_targets(&self, losing: &[(&Key, &Desired)], after: ClusterTime) -> Result<bool> {
        let path = match &self.rule.values {
            Values::Into { path, .. } => Some(path.query()),
            _ => None,
        };
        let clause = |(id, desired): &(&Key, &Desired)| {
            let id = id.values().first().cloned().unwrap_or(Bson::Null);
            let fields = desired.fields()?;
            let has_otherwise = matches!(self.rule.values, Values::Set { otherwise: Some(_), .. });
            let has_more = match (&path, fields) {
                // An array with more elements than the desired one is going to be shorter; under `on_missing: null`, some of them
                // become null.
                (Some(path), [Some(RawBson::Array(array))]) => {
                    let stored = format!("${path}");
                    let stored = doc! {"$cond": [{"$isArray": [&stored]}, &stored, []]};
                    let values = doc! {"$filter": {"input": stored, "cond": {"$ne": ["$$this", null]}}};
                    doc! {"$expr": {"$gt": [{"$size": values}, count_values(array)]}}
                }
                (None, fields) if has_otherwise || fields.iter().all(is_nothing) => {
                    read::has_values(self.rule, &[], fields)
                }
                _ => return None,
            };
            Some(doc! {"$and": [{"_id": {"$eq": id}}, has_more]})
        };
        let clauses: Vec<Document> = losing.iter().filter_map(clause).collect();
        if clauses.is_empty() {
            return Ok(true);
        }
        let lost: HashMap<&Key, String> = losing.iter().map(|(id, desired)| (*id, format!("{desired:?}"))).collect();
        self.may_lose(&|_| doc! {"$or": clauses.clone()}, after, &|id| self.loss(id, lost.get(id))).await
    }

    /// True if a target with several references, one of which has a source, gets these values from it, so that it loses nothing when
    /// another has none. Under `into`, each reference has an element of its own.
    pub(super) fn gets_another(&self, fields: &[Field]) -> bool {
        !matches!(self.rule.values, Values::Into { .. }) && !fields.iter().all(is_nothing)
    }

    /// The form in which a loss is counted: a target counts once, and one with values in array elements once for each that it loses
    /// (`lost`).
    pub(super) fn loss(&self, target: &Key, lost: impl Hash) -> u64 {
        let lost = self.rule.reference.target_each.is_some().then_some(lost);
        self.context.memory.removals.hash(&(target, lost))
    }

    /// True if these losses are within the limit. Counts them if so.
    pub(super) async fn may_lose_named(&self, losses: Vec<u64>) -> Result<bool> {
        let Some(limit) = self.limit().await? else { return Ok(true) };
        Ok(self.context.memory.removals.count(self.rule.id, limit, losses))
    }

    /// True if the targets that this filter of a rule finds may lose their values. Counts the `loss` of each if so. Where the rule's
    /// `where` cannot be evaluated on one of them, all targets count that it could choose; an error if these are too many.
    pub(super) async fn may_lose(
        &self,
        losing: &(dyn Fn(&Rule) -> Document + Send + Sync),
        after: ClusterTime,
        loss: &(dyn Fn(&Key) -> u64 + Send + Sync),
    ) -> Result<bool> {
        let Some(limit) = self.limit().await? else { return Ok(true) };
        let count = |losses| self.context.memory.removals.count(self.rule.id, limit, losses);
        match self.losses(losing(self.rule), limit, after, loss).await {
            Err(error) if read::where_fails(self.rule, &error) => {
                let losses = self.losses(losing(&self.rule.without_target_filter()), limit, after, loss).await?;
                if count(losses) { Ok(true) } else { Err(error) }
            }
            losses => Ok(count(losses?)),
        }
    }

    async fn losses(
        &self,
        filter: Document,
        limit: usize,
        after: ClusterTime,
        loss: &(dyn Fn(&Key) -> u64 + Send + Sync),
    ) -> Result<Vec<u64>> {
        let more = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
        let command = doc! {
            "find": &self.rule.target.namespace.collection, "filter": filter, "projection": {"_id": 1}, "limit": more,
            "batchSize": 10_000, "collation": read::simple_collation(),
        };
        let command = limited(command, self.limit);
        let database = &self.namespace(Role::Target).database;
        let read = async {
            let mut pages = self.context.server.pages(database, command, after).await?;
            // There may be as many as a tenth of a large collection: of each target only a hash is kept.
            let mut targets = Vec::new();
            while let Some(page) = pages.next().await? {
                for row in &page {
                    targets.push(loss(&read::id_of(row)?));
                }
            }
            Ok::<_, Error>(targets)
        };
        read.instrument(self.reading(Role::Target)).await
    }

    /// The number of targets that may lose their values within an hour; None if an operator has agreed to any number.
    async fn limit(&self) -> Result<Option<usize>> {
        let memory = &self.context.memory;
        if memory.removals.are_agreed(self.rule.id) {
            return Ok(None);
        }
        Ok(Some(match (self.context.limits.destroy_per_hour, memory.removals.limit(self.rule.id)) {
            (Some(limit), _) | (None, Some(limit)) => limit,
            (None, None) => {
                let limit = self.default_limit().await;
                memory.removals.learn_limit(self.rule.id, limit);
                limit
            }
        }))
    }

    /// This partition's share of a tenth of the rule's targets, at least of 1,000; of 1,000 if they cannot be counted.
    async fn default_limit(&self) -> usize {
        let target = &self.rule.target;
        let counted = self.context.server.count(&target.namespace, target.filter.clone().unwrap_or_default()).await;
        let targets = counted.ok().and_then(|targets| usize::try_from(targets).ok()).unwrap_or_default();
        self.context.partition.share((targets / PART).max(LEAST))
    }
}

fn is_nothing(field: &Field) -> bool {
    matches!(field, None | Some(RawBson::Null))
}

/// Number of elements that are not null.
pub(super) fn count_values(array: &RawArray) -> i32 {
    let values = array.into_iter().filter(|element| !matches!(element, Ok(RawBsonRef::Null))).count();
    i32::try_from(values).unwrap_or(i32::MAX)
}
