//! Decides which keys or targets of a batch share a statement, so that a target that refers to many keys is written once,
//! and small targets cost less.

use std::{borrow::Cow, collections::HashSet};

use bson::{Document, RawDocumentBuf};

use crate::{
    reconcile::{
        batch::{Item, Run, newest},
        group::{self, Guarded, Member, Shape},
        read,
        statement::{self, Statement},
        value::{Desired, Field, Rows},
    },
    request::Scope,
};
use denormd_model::key::Key;
use denormd_mongo::error::Result;
use denormd_rules::plan::reference::Role;

/// A statement, and the items of the batch that it belongs to.
pub(super) type Owned = (Vec<usize>, Statement);

/// Keys whose values are to be written, by the kind of statement that suits them, each with its index in the batch.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Targets that many keys name.
    crowded: HashSet<Key>,
    /// Keys with few and small targets.
    few: Vec<(usize, Vec<Field>)>,
    /// Keys that name crowded targets.
    named: Vec<(usize, Vec<Field>)>,
    /// Keys for all of their targets, which may be the same large documents.
    whole: Vec<(usize, Vec<Field>)>,
}

impl Shares {
    pub(super) fn new(run: &Run<'_>, items: &[Item]) -> Self {
        let scopes = items.iter().map(|item| &item.work.scope);
        Self { crowded: group::crowded(run.rule, scopes).into_iter().cloned().collect(), ..Self::default() }
    }

    /// Takes the fields of a key. Returns those of its targets that need a statement of their own.
    pub(super) fn take<'a>(
        &mut self,
        run: &Run<'_>,
        shape: Option<Shape>,
        (nth, item): (usize, &'a Item),
        fields: &[Field],
    ) -> Option<Cow<'a, Scope>> {
        let scope = Cow::Borrowed(&item.work.scope);
        let Some(shape) = shape.filter(|_| group::can_share(run.rule, &item.key, fields)) else { return Some(scope) };
        let entry = || (nth, fields.to_vec());
        match &*scope {
            Scope::Named(ids) if group::is_small(fields) && ids.iter().any(|id| self.crowded.contains(id)) => {
                self.named.push(entry());
                let rest: HashSet<Key> = ids.difference(&self.crowded).cloned().collect();
                (!rest.is_empty()).then_some(Cow::Owned(Scope::Named(rest)))
            }
            _ if group::fits(run.rule, shape, &item.member(fields)) => {
                self.few.push(entry());
                None
            }
            Scope::All if run.rule.reference.target_each.is_some() && group::is_small(fields) => {
                self.whole.push(entry());
                None
            }
            _ => Some(scope),
        }
    }

    /// The statements that write these keys, and those that scan large arrays, each long enough for a command of its
    /// own.
    pub(super) async fn statements(self, run: &Run<'_>, items: &[Item]) -> Result<[Vec<Owned>; 2]> {
        let members = self.few.iter().map(|(nth, fields)| (*nth, items[*nth].member(fields))).collect();
        let mut out = together(run, members, group::KEYS)?;
        let mut long = Vec::new();
        for target in &self.crowded {
            let holds = |nth: usize| matches!(&items[nth].work.scope, Scope::Named(ids) if ids.contains(target));
            let scope = Scope::Named(HashSet::from([target.clone()]));
            let members = self.named.iter().filter(|(nth, _)| holds(*nth));
            let members = members.map(|(nth, fields)| (*nth, Member { scope: &scope, ..items[*nth].member(fields) }));
            long.extend(together(run, members.collect(), group::KEYS_OF_ONE)?);
        }
        for keys in self.whole.chunks(group::KEYS_OF_ONE) {
            if have_few_targets(run, items, keys).await {
                let members = keys.iter().map(|(nth, fields)| (*nth, items[*nth].member(fields))).collect();
                long.extend(together(run, members, group::KEYS_OF_ONE)?);
                continue;
            }
            for (nth, fields) in keys {
                let desired = Desired::Fields(fields.clone());
                let alone = statement::of_value(run.rule, &items[*nth].key, &Scope::All, &desired)?;
                out.extend(alone.into_iter().map(|statement| (vec![*nth], statement)));
            }
        }
        if !long.is_empty() || items.len() >= group::CROWD {
            run.context.memory.traits.learn(run.rule.id, |traits| traits.is_crowded = !long.is_empty());
        }
        Ok([out, long])
    }
}

impl Run<'_> {
    /// Writes the values of targets: small targets by shared statements, then all that are left and the other statements. If a
    /// shared statement is refused, its targets are written one by one.
    pub(super) async fn write_targets(
        &self,
        items: &mut [Item],
        targets: &[(usize, &RawDocumentBuf, &Desired)],
        others: Vec<Owned>,
        rows: &Rows,
    ) -> Result<()> {
        let timeout = self.context.limits.write_timeout;
        let mut written = HashSet::new();
        if let Some(shape) = self.shape(targets.len()).await {
            let sharing = targets.iter().filter_map(|(nth, guard, desired)| {
                let Desired::Fields(fields) = desired else { return None };
                Some((*nth, Guarded { id: &items[*nth].key, guard, fields }))
            });
            let sharing: Vec<(usize, Guarded)> =
                sharing.filter(|(_, target)| group::fits_by_id(self.rule, shape, target)).collect();
            let mut shared = Vec::new();
            for group in sharing.chunks(group::TARGETS) {
                let (owners, targets): (Vec<usize>, Vec<Guarded>) = group.iter().copied().unzip();
                shared.push((owners, group::statement_by_id(self.rule, &targets)?));
            }
            let (refused, _) = self.sent(items, shared, timeout).await?;
            written.extend(sharing.into_iter().map(|(nth, _)| nth));
            for nth in refused.into_iter().flat_map(|(owners, _)| owners) {
                written.remove(&nth);
            }
        }
        let mut statements = others;
        for (nth, guard, desired) in targets.iter().filter(|(nth, ..)| !written.contains(nth)) {
            let alone = statement::of_target(self.rule, &items[*nth].key, guard, desired)?;
            statements.extend(alone.into_iter().map(|statement| (vec![*nth], statement)));
        }
        self.write(items, [statements, Vec::new()], rows, timeout).await?;
        Ok(())
    }
}

fn together(run: &Run<'_>, members: Vec<(usize, Member<'_>)>, keys: usize) -> Result<Vec<Owned>> {
    let mut out = Vec::new();
    for group in group::divide(members, keys) {
        let (owners, members): (Vec<usize>, Vec<Member>) = group.into_iter().unzip();
        out.push((owners, group::statement(run.rule, &members)?));
    }
    Ok(out)
}

/// True if these keys have so few targets that each is better written once for all of them. Without an answer they
/// count as many.
async fn have_few_targets(run: &Run<'_>, items: &[Item], keys: &[(usize, Vec<Field>)]) -> bool {
    let few = keys.len() / group::KEYS_PER_TARGET;
    let keys: Vec<&Key> = keys.iter().map(|(nth, _)| &items[*nth].key).collect();
    let mut command: Document = read::holders(run.rule, &keys);
    command.insert("limit", i64::try_from(few + 1).unwrap_or(i64::MAX));
    few > 0 && run.read(Role::Target, command, newest(items)).await.is_ok_and(|found| found.len() <= few)
}
