//! The removal limit: so many targets of a rule may lose their values in an hour because no source answers their reference
//! any more. Then the rule is blocked. `on_missing: remove` and `delete` also wait for a grace period.
//!
//! A target that has no value loses none, and a value that leaves a group or a slice is not lost.

use std::time::Instant;

use bson::{Bson, Document, doc};

use crate::{
    config::OnMissing,
    error::Result,
    key::Key,
    plan::{Values, reference::Role},
    position::ClusterTime,
    reconcile::{
        read,
        run::{End, Item, Run, newest},
        value::{Desired, Rows},
    },
    request::Scope,
};

/// The limit of a rule with few targets, unless `limits.destroy_per_hour` says otherwise.
const LEAST: usize = 1000;
/// The part of a rule's targets that the limit is, where that is more.
const PART: usize = 10;
/// How long the targets may be counted for, in milliseconds.
const COUNTING: i64 = 2000;

impl Run<'_> {
    /// What keeps a dangling reference from destroying: the grace period, or the removal limit.
    pub(super) async fn destroys(&self, item: &mut Item) -> Result<Option<End>> {
        let limits = &self.context.limits;
        let since = *item.work.doubted_since.get_or_insert_with(Instant::now);
        if since.elapsed() < limits.destroy_grace {
            return Ok(Some(End::Later(limits.destroy_grace)));
        }
        let may = match &item.work.scope {
            Scope::Named(ids) => self.left().await?.is_none_or(|left| self.count(ids.len(), left)),
            Scope::All => self.may_lose(read::holders_filter(self.rule, &[&item.key]), item.work.after).await?,
        };
        Ok((!may).then_some(End::Brake))
    }

    /// Counts the targets that lose their values because no source answers for one of these keys. Where that is more than the
    /// limit allows, these keys end here.
    pub(super) async fn limit_losses(&self, items: &mut [Item], rows: &Rows) -> Result<()> {
        let unsets = matches!(self.rule.values, Values::Set { once: false, .. })
            && matches!(self.rule.on_missing, OnMissing::Unset | OnMissing::Null);
        if self.detached || !unsets {
            return Ok(());
        }
        let mut clauses = Vec::new();
        // The targets of a statement that took too long were counted before it.
        let is_new = |item: &&Item| item.work.begun_anew.is_none();
        let missing = |item: &&Item| is_new(item) && !item.key.values().is_empty() && !rows.answer(&item.key);
        let (all, named): (Vec<&Item>, Vec<&Item>) =
            items.iter().filter(missing).partition(|item| item.work.scope == Scope::All);
        let holders = |items: &[&Item]| {
            let keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
            read::holders_filter(self.rule, &keys)
        };
        if !all.is_empty() {
            clauses.push(holders(&all));
        }
        if !named.is_empty() {
            let ids = named.iter().filter_map(|item| match &item.work.scope {
                Scope::Named(ids) => Some(ids),
                Scope::All => None,
            });
            let ids: Vec<Bson> = ids.flatten().filter_map(|id| id.values().first().cloned()).collect();
            clauses.push(doc! {"$and": [read::one_of("_id", ids.iter()), holders(&named)]});
        }
        if clauses.is_empty() {
            return Ok(());
        }
        let keys: Vec<&Key> = all.iter().chain(&named).map(|item| &item.key).collect();
        let losing = doc! {"$and": [{"$or": clauses}, read::has_values(self.rule, &keys)]};
        if !self.may_lose(losing, newest(items)).await? {
            for item in items.iter_mut().filter(|item| missing(&&**item)) {
                item.end = Some(End::Brake);
            }
        }
        Ok(())
    }

    /// The same for targets that are computed from several references.
    pub(super) async fn may_lose_of_targets(&self, losing: &[(&Key, &Desired)], after: ClusterTime) -> Result<bool> {
        let path = match &self.rule.values {
            Values::Into { path, .. } => Some(path.query()),
            _ => None,
        };
        let clause = |(id, desired): &(&Key, &Desired)| {
            let id = id.values().first().cloned().unwrap_or(Bson::Null);
            let Desired::Fields(fields) = desired else { return None };
            let has_more = match (&path, fields.as_slice()) {
                // An array that has an element at the place after the last one is going to be shorter.
                (Some(path), [Some(bson::RawBson::Array(array))]) => {
                    doc! {format!("{path}.{}", array.into_iter().count()): {"$exists": true}}
                }
                (None, fields) if fields.iter().all(|field| matches!(field, None | Some(bson::RawBson::Null))) => {
                    read::has_values(self.rule, &[])
                }
                _ => return None,
            };
            Some(doc! {"$and": [{"_id": {"$eq": id}}, has_more]})
        };
        let clauses: Vec<Document> = losing.iter().filter_map(clause).collect();
        if clauses.is_empty() { Ok(true) } else { self.may_lose(doc! {"$or": clauses}, after).await }
    }

    /// Whether the targets that this filter finds may lose their values. If so, they are counted.
    async fn may_lose(&self, filter: Document, after: ClusterTime) -> Result<bool> {
        let Some(left) = self.left().await? else { return Ok(true) };
        let limit = i64::try_from(left).unwrap_or(i64::MAX).saturating_add(1);
        let command = doc! {
            "find": &self.rule.target.namespace.collection, "filter": filter, "projection": {"_id": 1}, "limit": limit,
            "batchSize": 10_000, "collation": read::simple_collation(),
        };
        Ok(self.count(self.read(Role::Target, command, after).await?.len(), left))
    }

    fn count(&self, targets: usize, left: usize) -> bool {
        if targets <= left {
            self.context.memory.destroyed(self.rule.id, targets);
        }
        targets <= left
    }

    /// How many more targets may lose their values in this hour; None where somebody has agreed to all.
    async fn left(&self) -> Result<Option<usize>> {
        let memory = &self.context.memory;
        if memory.has_agreed(self.rule.id) {
            return Ok(None);
        }
        let limit = match (self.context.limits.destroy_per_hour, memory.removal_limit(self.rule.id)) {
            (Some(limit), _) | (None, Some(limit)) => limit,
            (None, None) => {
                let limit = self.default_limit().await;
                memory.learn_removal_limit(self.rule.id, limit);
                limit
            }
        };
        Ok(Some(limit.saturating_sub(memory.destroyed(self.rule.id, 0))))
    }

    /// A tenth of the rule's targets, at least 1,000; without an answer 1,000.
    async fn default_limit(&self) -> usize {
        let target = &self.rule.target;
        let command = doc! {
            "count": &target.namespace.collection, "query": target.filter.clone().unwrap_or_default(),
            "maxTimeMS": COUNTING, "collation": read::simple_collation(),
        };
        let reply = self.context.server.database(&target.namespace.database).run_command(command).await;
        let targets = reply.ok().and_then(|reply| match reply.get("n")? {
            Bson::Int32(n) => usize::try_from(*n).ok(),
            Bson::Int64(n) => usize::try_from(*n).ok(),
            _ => None,
        });
        self.context.partition.share((targets.unwrap_or_default() / PART).max(LEAST))
    }
}
