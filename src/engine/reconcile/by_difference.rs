//! Writes of rules that compare a target before they write it: those with `touch`, and those with paths in the matched
//! element and beside its array.
//!
//! A target is read whole and compared with its definition, and one statement sets what differs. So `touch` sets its
//! time only together with a value that changes, bit for bit. The statement demands that the references are unchanged,
//! and for elements, that each is still in its place. It does not demand that owned paths are: whoever else writes one
//! between the read and the write is overwritten, as by any other statement.

use std::collections::{BTreeSet, HashMap, HashSet};

use bson::{Bson, Document, RawBson, RawDocumentBuf, cstr, doc};

use crate::reconcile::{
    batch::{End, Item, Run, backoff, newest, source_gone},
    by_target::Referrer,
    compare::{self, Difference},
    context::Load,
    keep::places_of,
    of_target::Read,
    read,
    removal_limit::count_values,
    statement::{Operators, Statement, absent, unchanged, update},
    value::Rows,
};
use denormd_model::{field_path::FieldPath, key::Key, position::ClusterTime};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Rule, Values};

/// A target, and what differs in it.
struct TargetDifferences<'a> {
    nth: usize,
    read: &'a Read,
    differences: Vec<Difference>,
}

/// The command that reads targets whole: the paths that a comparison needs, and the guard.
#[must_use]
pub fn targets(rule: &Rule, ids: &[&Key]) -> Document {
    let mut projection = compare::projection(rule);
    projection.insert(read::GUARD, 1);
    let mut command = read::targets(rule, ids);
    if let Some(stage) = command.get_array_mut("pipeline").ok().and_then(|stages| stages.last_mut()) {
        *stage = doc! {"$project": projection}.into();
    }
    command
}

impl Run<'_> {
    /// Writes what differs in the targets.
    pub(super) async fn differences_of_targets(&self, items: &mut [Item]) -> Result<()> {
        let after = newest(items);
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let command = targets(self.rule, &ids);
        let targets = self.read_targets(command, after, items.len()).await?;
        let Some(rows) = self.rows_of_read(&targets, after, items.len()).await? else { return source_gone(items) };
        let (mut found, mut losing) = (Vec::new(), Vec::new());
        for (nth, item) in items.iter().enumerate() {
            let Some(read) = targets.get(&item.key) else { continue };
            let dangling = self.dangling_references(read, &rows);
            let dangles = |difference: &Difference| match difference.element {
                Some(nth) => dangling.contains(&nth),
                None => !dangling.is_empty(),
            };
            let compared = compare::one(self.rule, &rows, &read.target, read.references.clone(), &|_| true)?;
            let differences = compared.differences().filter(|one| !(self.detached && dangles(one)));
            let differences: Vec<Difference> = differences.cloned().collect();
            let has_source = self.rule.of_target.is_none() && dangling.len() < read.references.iter().flatten().count();
            let gets_another = |one: &Difference| {
                has_source && one.element.is_none() && self.gets_another(std::slice::from_ref(&one.expected))
            };
            if differences.iter().any(|one| dangles(one) && loses(self.rule, one) && !gets_another(one)) {
                losing.push((nth, self.loss(&item.key, compared.fingerprint())));
            }
            found.push(TargetDifferences { nth, read, differences });
        }
        if !losing.is_empty() && !self.may_lose_named(losing.iter().map(|(_, loss)| *loss).collect()).await? {
            for (nth, _) in losing {
                items[nth].end = Some(End::RemovalLimit);
            }
        }
        self.keep(items, &rows).await?;
        let mut all = Vec::new();
        for TargetDifferences { nth, read, differences } in found.iter().filter(|found| items[found.nth].end.is_none())
        {
            let (key, Read { target, guard, .. }) = (&items[*nth].key, read);
            let written = statements(self.rule, key, (target, guard), differences)?;
            all.extend(written.into_iter().map(|statement| (vec![*nth], statement)));
        }
        let owners: BTreeSet<usize> = all.iter().flat_map(|(owners, _)| owners).copied().collect();
        let changes = if self.rule.touch.is_some() { all.len() / 2 } else { all.len() };
        let matched = self.write(items, [all, Vec::new()], &rows, self.context.limits.write_timeout).await?;
        if matched < changes as u64 {
            Self::compare_again(items, owners);
        }
        Ok(())
    }

    /// Has these targets compared once more: a statement of some of them matched nothing. Either the references were
    /// changed since the read, or somebody set the path of `touch` between the two statements of one change
    /// ([`touched`]), so that each left the target to the other.
    fn compare_again(items: &mut [Item], owners: BTreeSet<usize>) {
        for nth in owners {
            let Item { work, end, .. } = &mut items[nth];
            if end.is_none() {
                *end = Some(End::Later(backoff(work.attempts)));
                work.attempts += 1;
            }
        }
    }

    /// The sources of these targets; None if their collection is gone.
    async fn rows_of_read(
        &self,
        targets: &HashMap<Key, Read>,
        after: ClusterTime,
        items: usize,
    ) -> Result<Option<Rows>> {
        if self.rule.of_target.is_none() {
            let keys: HashSet<&Key> =
                targets.values().flat_map(|target| &target.references).filter_map(Option::as_ref).collect();
            return self.rows(&keys.into_iter().collect::<Vec<_>>(), after, items).await;
        }
        let asked: Vec<Referrer> = targets.values().map(Read::referrer).collect();
        let load = Load { task: self.task, items, limit: self.limit, bytes: &self.bytes, sources: None };
        let rows = self.context.rows_of_targets(self.rule, &asked, after, load).await?;
        let missing = targets.values().any(|target| !self.dangling(target, &rows).is_empty());
        let is_gone = self.is_source_gone_now(missing, !rows.is_empty()).await?;
        Ok((!is_gone).then_some(rows))
    }

    /// The indexes of the references that no source matches.
    fn dangling_references(&self, target: &Read, rows: &Rows) -> Vec<usize> {
        if self.rule.of_target.is_some() {
            return self.dangling(target, rows);
        }
        let references = target.references.iter().enumerate();
        let dangling = references.filter(|(_, key)| key.as_ref().is_some_and(|key| !rows.answer(key)));
        dangling.map(|(nth, _)| nth).collect()
    }
}

/// True if a value is lost where no source matches. One that is computed from several sources does not count.
fn loses(rule: &Rule, Difference { expected, stored, .. }: &Difference) -> bool {
    match (&rule.values, expected, stored) {
        (Values::Set { .. }, _, stored) => !matches!(stored, None | Some(RawBson::Null)),
        (Values::Into { .. }, Some(RawBson::Array(expected)), Some(RawBson::Array(stored))) => {
            count_values(expected) < count_values(stored)
        }
        _ => false,
    }
}

/// The statements that set what differs in one target, while its guard is unchanged.
pub fn statements(
    rule: &Rule,
    id: &Key,
    (target, guard): (&Document, &RawDocumentBuf),
    differences: &[Difference],
) -> Result<Vec<Statement>> {
    let each = rule.reference.target_each.as_ref();
    let places = each.map(|each| places_of(each, target)).unwrap_or_default();
    let once = matches!(rule.values, Values::Set { once: true, .. });
    let mut out = Vec::new();
    // A value that is there by now stays, whatever is to be done with the others.
    for part in differences.chunks(if once { 1 } else { differences.len().max(1) }) {
        let mut conditions = unchanged(rule, id, guard)?;
        let mut operators = Operators::default();
        for difference in part {
            let (path, outer) = place(each, &places, difference)?;
            operators.put(path.clone(), &difference.expected)?;
            conditions.extend(once.then(|| absent(&path, outer)));
        }
        out.extend(touched(rule, conditions, operators.document())?);
    }
    Ok(out)
}

/// A path as an update names it, with the index of its element, and the place of that element: `lines.3.name` and `lines.3`. The
/// place is empty for a path outside the array.
fn place<'a>(
    each: Option<&FieldPath>,
    places: &'a [(String, Bson)],
    difference: &Difference,
) -> Result<(String, &'a str)> {
    let Difference { path, element, .. } = difference;
    match (element, each) {
        (Some(nth), Some(each)) => {
            let (at, _) = places.get(*nth).ok_or_else(|| Error::internal("an element without a place"))?;
            Ok((format!("{at}{}", path.strip_prefix(&each.to_string()).unwrap_or_default()), at))
        }
        _ => Ok((path.clone(), "")),
    }
}

/// The same statement with the path of `touch`. Of the two, one matches: the one that leaves the path as it is, or the
/// one that sets the time. A time that is later than the server's clock stays, as after a failover to a member whose
/// clock is behind; so does a value of another type, which denormd has not written. The statement for these cases comes
/// first: the other one may set a time that is later than `$$NOW`, which is the time of the whole command. Neither
/// matches if somebody else sets such a time between the two; the target is compared again then.
fn touched(rule: &Rule, conditions: Vec<Document>, operators: RawDocumentBuf) -> Result<Vec<Statement>> {
    let Some(path) = &rule.touch else { return Ok(vec![update(rule, conditions, operators, &[])?]) };
    let at = format!("${path}");
    let is_past = doc! {"$and": [{"$eq": [{"$type": &at}, "date"]}, {"$lte": [&at, "$$NOW"]}]};
    let may_be_set = doc! {"$or": [is_past, {"$in": [{"$type": &at}, ["missing", "null", "undefined"]]}]};
    let mut sets_time = operators.clone();
    let mut time = RawDocumentBuf::new();
    time.append(bson::raw::CString::try_from(path.to_string())?, true);
    sets_time.append(cstr!("$currentDate"), time);
    let mut out = Vec::new();
    for (condition, operators) in [(doc! {"$not": [may_be_set.clone()]}, operators), (may_be_set, sets_time)] {
        let mut conditions = conditions.clone();
        conditions.push(doc! {"$expr": condition});
        out.push(update(rule, conditions, operators, &[])?);
    }
    Ok(out)
}
