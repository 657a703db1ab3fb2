//! Writes of rules whose values depend on the target: `$$target` and `$$targetElement`. Their reads are in
//! [`super::by_target`].

use std::collections::HashMap;

use bson::{Bson, Document, RawDocumentBuf};

use crate::reconcile::{
    batch::{End, Item, Run, newest, source_gone},
    by_target::Referrer,
    compare::differs,
    context::Load,
    read::{self, id_of},
    statement,
    value::{Desired, Field, Rows, target_key},
};
use denormd_model::{field_path::value_at, key::Key, position::ClusterTime};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Values, reference::Role};

/// A target that was read to be written.
pub(super) struct Read {
    pub(super) target: Document,
    pub(super) references: Vec<Option<Key>>,
    pub(super) guard: RawDocumentBuf,
}

/// The content of a target: of the whole, or of its elements.
enum Content {
    Whole(Desired),
    Elements(Vec<(usize, Vec<Field>)>),
}

impl Run<'_> {
    /// Writes targets whose values depend on them.
    pub(super) async fn values_of_targets(&self, items: &mut [Item]) -> Result<()> {
        let after = newest(items);
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let mut targets = self.read_targets(read::targets(self.rule, &ids), after, items.len()).await?;
        if let Some(tree) = self.rule.tree {
            Box::pin(self.hold_back(tree, items, &mut targets, after)).await?;
        }
        let asked: Vec<Referrer> = targets.values().map(Read::referrer).collect();
        let load = Load { task: self.task, items: items.len(), limit: self.limit, bytes: &self.bytes, sources: None };
        let rows = self.context.rows_of_targets(self.rule, &asked, after, load).await?;
        let dangling: HashMap<&Key, Vec<usize>> =
            targets.iter().map(|(id, target)| (id, self.dangling(target, &rows))).collect();
        let missing = dangling.values().any(|missing| !missing.is_empty());
        if self.is_source_gone_now(missing, !rows.is_empty()).await? {
            return source_gone(items);
        }
        let mut wanted = Vec::new();
        for (nth, item) in items.iter().enumerate() {
            let Some(target) = targets.get(&item.key) else { continue };
            let dangling = &dangling[&item.key];
            let whole = !self.rule.by_element();
            if self.detached && whole && !dangling.is_empty() {
                continue;
            }
            wanted.push((nth, target, self.content(target, &rows, dangling)?));
        }
        if self.rule.tree.is_some() {
            self.record_changes(items, &wanted)?;
        }
        let within_limit = self.may_lose_by_targets(&wanted, &dangling, items, after).await?;
        let (mut whole, mut by_element, mut over_limit) = (Vec::new(), Vec::new(), Vec::new());
        for (nth, target, content) in &wanted {
            let key = &items[*nth].key;
            match content {
                _ if !within_limit && !dangling[key].is_empty() => over_limit.push(*nth),
                Content::Whole(desired) => whole.push((*nth, &target.guard, desired)),
                Content::Elements(elements) => {
                    let statement = statement::of_elements(self.rule, key, &target.guard, elements)?;
                    by_element.extend(statement.map(|statement| (vec![*nth], statement)));
                }
            }
        }
        for nth in over_limit {
            items[nth].end = Some(End::RemovalLimit);
        }
        self.keep(items, &rows).await?;
        self.write_targets(items, &whole, by_element, &rows).await
    }

    /// Records the documents of a tree that are about to change. Statements go to the others as well: only the server
    /// knows what they hold when it writes.
    fn record_changes(&self, items: &[Item], wanted: &[(usize, &Read, Content)]) -> Result<()> {
        let mut changed = Vec::new();
        for (nth, target, content) in wanted {
            if let Content::Whole(desired) = content
                && differs(self.rule, &target.target, desired)?
            {
                changed.push(&items[*nth].key);
            }
        }
        self.context.memory.pending.writes(self.rule.id, changed.into_iter());
        Ok(())
    }

    /// Reads targets for this number of items, by a command whose rows have a guard.
    pub(super) async fn read_targets(
        &self,
        command: Document,
        after: ClusterTime,
        items: usize,
    ) -> Result<HashMap<Key, Read>> {
        let mut targets = HashMap::new();
        for row in self.read_within(Role::Target, command, after, items).await? {
            let mut target = Document::try_from(row.as_ref())?;
            let guard = row.get_document(read::GUARD).map_err(|_| Error::internal("a target without its guard"))?;
            target.remove(read::GUARD);
            let references = self.rule.reference.keys(Role::Target, &target);
            targets.insert(id_of(&row)?, Read { target, references, guard: guard.to_owned() });
        }
        Ok(targets)
    }

    /// The indexes of the references that no source matches; 0 for a target that has its sources together.
    pub(super) fn dangling(&self, target: &Read, rows: &Rows) -> Vec<usize> {
        let id = target.referrer().id();
        let answered = |nth| rows.answer(&target_key(&id, nth));
        if !self.rule.by_reference() {
            return if target.references.iter().any(Option::is_some) && !answered(0) { vec![0] } else { Vec::new() };
        }
        let references = target.references.iter().enumerate().filter(|(_, reference)| reference.is_some());
        references.map(|(nth, _)| nth).filter(|nth| !answered(*nth)).collect()
    }

    fn content(&self, target: &Read, rows: &Rows, dangling: &[usize]) -> Result<Content> {
        let (rule, id) = (self.rule, target.referrer().id());
        if !rule.by_element() {
            let has_array = rule.reference.has_array(&target.target);
            return Ok(Content::Whole(rows.desired_of_referrer(rule, &id, &target.references, has_array)?));
        }
        let mut elements = Vec::new();
        for (nth, element) in rule.reference.elements(Role::Target, &target.target).into_iter().enumerate() {
            // A value that is not a subdocument has no fields for copies.
            let keeps = self.detached && dangling.contains(&nth);
            if element.as_document().is_none() || keeps {
                continue;
            }
            let refers = target.references.get(nth).is_some_and(Option::is_some);
            if let Desired::Fields(fields) = rows.desired_of_pair(rule, &id, nth, refers)? {
                elements.push((nth, fields));
            }
        }
        Ok(Content::Elements(elements))
    }

    /// Counts the targets that lose values because no source matches; false if they are too many.
    async fn may_lose_by_targets(
        &self,
        wanted: &[(usize, &Read, Content)],
        dangling: &HashMap<&Key, Vec<usize>>,
        items: &[Item],
        after: ClusterTime,
    ) -> Result<bool> {
        if !matches!(self.rule.values, Values::Set { .. } | Values::Into { .. }) || self.detached {
            return Ok(true);
        }
        let is_nothing = |field: &Field| matches!(field, None | Some(bson::RawBson::Null));
        // A value of `otherwise` that follows the target does not count: the stored one may be an earlier one of these.
        let otherwise = match &self.rule.values {
            Values::Set { otherwise, .. } => otherwise.as_deref().unwrap_or_default(),
            _ => &[],
        };
        let follows = otherwise.iter().flatten().any(|value| value.to_string().contains("$$target"));
        let mut whole: Vec<(&Key, &Desired)> = Vec::new();
        let mut losses = Vec::new();
        for (nth, target, content) in wanted {
            let id = &items[*nth].key;
            let missing = &dangling[id];
            if missing.is_empty() {
                continue;
            }
            match content {
                Content::Whole(desired) => whole.push((id, desired)),
                Content::Elements(elements) => {
                    let stored = self.rule.reference.elements(Role::Target, &target.target);
                    let loses = |(nth, fields): &&(usize, Vec<Field>)| {
                        missing.contains(nth)
                            && (!follows || fields.iter().all(is_nothing))
                            && stored.get(*nth).is_some_and(|element| self.loses(element, fields))
                    };
                    let lost: Vec<_> = elements.iter().filter(loses).map(|(nth, _)| &target.references[*nth]).collect();
                    losses.extend((!lost.is_empty()).then(|| self.loss(id, lost)));
                }
            }
        }
        if !losses.is_empty() {
            return self.may_lose_named(losses).await;
        }
        self.may_lose_of_targets(&whole, after).await
    }

    /// True if an element has a value other than the desired one, which it gets because no source matches.
    fn loses(&self, element: &Bson, fields: &[Field]) -> bool {
        let Some(each) = self.rule.reference.target_each.as_ref() else { return false };
        self.rule.owned().into_iter().zip(fields).any(|(path, field)| {
            let stored = path.below(each).and_then(|below| value_at(element.as_document()?, below));
            let desired = field.clone().and_then(|field| Bson::try_from(field).ok());
            stored.is_some_and(|stored| *stored != Bson::Null && Some(stored) != desired.as_ref())
        })
    }
}

impl Read {
    pub(super) fn referrer(&self) -> Referrer<'_> {
        Referrer { target: &self.target, references: &self.references }
    }
}
