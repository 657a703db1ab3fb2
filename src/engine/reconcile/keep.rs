//! Keeps the values that a rule's first backfill overwrites or removes, before the statements are sent.
//!
//! The targets of a batch are compared as the guard would: only values that differ from the definition are kept, and a
//! target without a value costs nothing but the lookup. Between this read and the write, the application may change a
//! value once more; that change is overwritten like any later one, and is not kept.

use std::collections::HashSet;

use bson::{Bson, DateTime, Document, RawBson, doc};

use crate::{
    checkpoint::kept::{Element, Fingerprint, Place, fingerprint},
    reconcile::{
        batch::{Item, Run, newest},
        compare::{self, Difference, key_of, projection},
        memory::{Kept, is_behind},
        read::{holders_filter, one_of, simple_collation, where_fails},
        value::Rows,
    },
    request::{Scope, Task},
};
use denormd_model::{
    failpoint,
    field_path::{FieldPath, Segment, value_at},
    key::Key,
};
use denormd_mongo::{
    command::limited,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{Keyed, Rule, reference::Role};

/// A value to be kept.
struct Old {
    place: Place,
    value: RawBson,
    was: Fingerprint,
    new: Fingerprint,
}

/// The targets of a batch.
struct Batch<'a> {
    /// The keys all of whose targets are written.
    all: Vec<&'a Key>,
    /// The `_id`s of other targets that are written.
    ids: Vec<&'a Key>,
    /// The keys whose values are written.
    keys: HashSet<&'a Key>,
    /// True if a key has a fan-out job: its targets behind the backfill may still hold the application's values.
    fans_out: bool,
}

impl Batch<'_> {
    /// Condition on its targets that this rule chooses and that have a value to be kept.
    fn filter(&self, rule: &Rule, kept: &Kept) -> Document {
        let mut clauses = Vec::new();
        if !self.ids.is_empty() {
            clauses.push(one_of("_id", self.ids.iter().filter_map(|id| id.values().first())));
        }
        if !self.all.is_empty() {
            clauses.push(holders_filter(rule, &self.all));
        }
        let exists = |path: &FieldPath| doc! {path.query(): {"$exists": true}};
        let paths = rule.owned().into_iter().filter(|path| kept.keeping.paths.contains(&path.to_string()));
        let mut filter = vec![doc! {"$or": clauses}, doc! {"$or": paths.map(exists).collect::<Vec<_>>()}];
        filter.extend(rule.target.filter.clone());
        doc! {"$and": filter}
    }
}

impl Run<'_> {
    /// Keeps the values that these items are about to overwrite, if this is the rule's first backfill.
    pub(super) async fn keep(&self, items: &[Item], rows: &Rows) -> Result<()> {
        let Some(kept) = self.context.memory.kept.of(self.rule.id) else { return Ok(()) };
        let Some(batch) = self.batch(items, rows) else { return Ok(()) };
        // The future is large, and most batches do not need it.
        match Box::pin(self.keep_of(self.rule, &batch, newest(items), rows, &kept)).await {
            // `where` cannot be evaluated on one of them. The values of targets that it leaves out do no harm.
            Err(error) if where_fails(self.rule, &error) => {
                let rule = self.rule.without_target_filter();
                Box::pin(self.keep_of(&rule, &batch, newest(items), rows, &kept)).await
            }
            kept => kept,
        }
    }

    fn batch<'a>(&self, items: &'a [Item], rows: &Rows) -> Option<Batch<'a>> {
        let written = |item: &&Item| {
            let gone = self.detached && !item.key.values().is_empty() && !rows.answer(&item.key);
            item.end.is_none() && !(self.task == Task::Value && gone)
        };
        let items: Vec<&Item> = items.iter().filter(written).collect();
        let (mut all, mut ids) = (Vec::new(), Vec::new());
        for item in &items {
            match &item.work.scope {
                _ if self.task == Task::Target => ids.push(&item.key),
                Scope::Named(named) => ids.extend(named),
                Scope::All => all.push(&item.key),
            }
        }
        if all.is_empty() && ids.is_empty() {
            return None;
        }
        let fans_out = items.iter().any(|item| self.context.memory.fan_outs.is_running(&self.subject(item)));
        Some(Batch { all, ids, keys: items.iter().map(|item| &item.key).collect(), fans_out })
    }

    async fn keep_of(
        &self,
        rule: &Rule,
        batch: &Batch<'_>,
        after: denormd_model::position::ClusterTime,
        rows: &Rows,
        kept: &Kept,
    ) -> Result<()> {
        let target = &self.rule.target.namespace;
        let command = doc! {
            "find": &target.collection, "filter": batch.filter(rule, kept), "projection": projection(self.rule),
            "collation": simple_collation(),
        };
        let passed = self.passed(batch, kept).await?;
        let mut pages = self.context.server.pages(&target.database, limited(command, self.limit), after).await?;
        while let Some(page) = pages.next().await? {
            let mut values = Vec::new();
            for row in &page {
                let doc = Document::try_from(row.as_ref())?;
                let id = doc.get("_id").unwrap_or(&Bson::Null);
                if passed.is_none_or(|passed| !is_behind(id, passed)) {
                    values.extend(self.old_values(&doc, batch, rows, kept)?);
                }
            }
            self.store_kept(&values).await?;
        }
        failpoint::here("kept");
        Ok(())
    }

    /// The last target that the backfill has passed. Values up to there are denormd's own.
    async fn passed<'k>(&self, batch: &Batch<'_>, kept: &'k Kept) -> Result<Option<&'k Bson>> {
        let Some(passed) = kept.keeping.passed.first().filter(|_| !kept.aside && !batch.fans_out) else {
            return Ok(None);
        };
        let is_simple = match (passed, kept.simple) {
            (Bson::String(_), None) => {
                let target = &self.rule.target.namespace;
                let own = self.context.server.has_own_collation(&target.database, &target.collection).await?;
                self.context.memory.kept.learn(self.rule.id, |kept| kept.simple = Some(!own));
                !own
            }
            (Bson::String(_), Some(simple)) => simple,
            _ => true,
        };
        Ok(is_simple.then_some(passed))
    }

    /// The values of one target that differ from what is about to be written.
    fn old_values(&self, doc: &Document, batch: &Batch<'_>, rows: &Rows, kept: &Kept) -> Result<Vec<Old>> {
        let references = self.rule.reference.keys(Role::Target, doc);
        let is_scalar = self.rule.keyed == Keyed::Value && self.rule.reference.target_each.is_none();
        if is_scalar && !batch.keys.contains(&key_of(references.first())) {
            return Ok(Vec::new());
        }
        let owns = |key: &Key| batch.keys.contains(key);
        let compared = match compare::one(self.rule, rows, doc, references, &owns) {
            Ok(compared) => compared,
            // It is not written either.
            Err(error) if error.kind == Kind::Refused => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut places = None;
        let mut out = Vec::new();
        for field in compared.differences() {
            let Difference { path, element, expected, stored, .. } = field;
            let (Some(stored), false) = (stored, matches!(expected, Some(RawBson::Undefined))) else { continue };
            if !kept.keeping.paths.contains(path) {
                continue;
            }
            let element = match (element, &self.rule.reference.target_each) {
                (Some(nth), Some(each)) => {
                    let places = places.get_or_insert_with(|| places_of(each, doc));
                    Some(self.element(each, *nth, places, &compared.references)?)
                }
                _ => None,
            };
            let collection = self.rule.target.namespace.to_string();
            let place = Place { collection, target: compared.target.clone(), path: path.clone(), element };
            let (was, new) = (fingerprint(Some(stored)), fingerprint(expected.as_ref()));
            out.push(Old { place, value: stored.clone(), was, new });
        }
        Ok(out)
    }

    fn element(
        &self,
        each: &FieldPath,
        nth: usize,
        places: &[(String, Bson)],
        references: &[Option<Key>],
    ) -> Result<Element> {
        let (at, value) = places.get(nth).ok_or_else(|| Error::internal("an element without a place"))?;
        let element = value.as_document();
        let by = self.rule.reference.paths(Role::Target).filter_map(|path| Some((path, path.below(each)?)));
        let by = by
            .map(|(path, below)| {
                (below_text(each, path), element.and_then(|element| value_at(element, below)).cloned())
            })
            .collect();
        let same = references.iter().filter(|reference| references.get(nth) == Some(*reference)).count();
        let (mut rest, mut own) = (None, Vec::new());
        if same > 1 {
            let owned = self.rule.owned().into_iter().filter(|path| path.below(each).is_some());
            own = owned.map(|path| below_text(each, path)).collect();
            rest = Element::rest_of(value, &own)?;
        }
        Ok(Element { at: at.clone(), by, rest, own })
    }

    /// Stores the values, unless there is no room for them.
    async fn store_kept(&self, values: &[Old]) -> Result<()> {
        let (Some(kept), false) = (self.context.memory.kept.of(self.rule.id), values.is_empty()) else { return Ok(()) };
        let rule = self.rule.name.as_str();
        // By the server's clock, because kept values expire by it.
        let now = self.context.server.operation_time().await?;
        let at = DateTime::from_millis(i64::from(now.seconds) * 1000);
        let mut statements = Vec::with_capacity(3 * values.len());
        let mut bytes = 0;
        for Old { place, value, was, new } in values {
            let three = self.context.kept().statements(rule, place, Some(value), (was, new), at)?;
            bytes += three[0].as_bytes().len() as u64;
            statements.extend(three);
        }
        if kept.is_full || !self.has_room(bytes).await? {
            return self.not_kept(values, statements, !kept.is_full).await;
        }
        let (server, timeout) = (&self.context.server, self.context.limits.write_timeout);
        let (database, collection) = (&self.context.dead_letters.database, crate::checkpoint::kept::COLLECTION);
        let written = server.update(database, collection, &statements, timeout).await?;
        for (nth, error) in written.refused {
            let Old { place, was, new, .. } = &values[nth / 3];
            if error.is_transient() {
                return Err(error);
            }
            // The largest documents leave no room for anything beside the value.
            tracing::warn!(rule, error = %error.message, "a value is too large to be kept for `denormd undo`");
            let without = self.context.kept().statements(rule, place, None, (was, new), at)?;
            server.update(database, collection, &without, timeout).await?;
        }
        Ok(())
    }

    /// True if this number of bytes can be kept in addition. Counts them if so.
    async fn has_room(&self, bytes: u64) -> Result<bool> {
        let (memory, most) = (&self.context.memory, self.context.undo.max_bytes);
        let fits = |used: u64| used.saturating_add(bytes) <= most;
        // A page that is written again was counted twice: only a count of what is there is conclusive.
        let used = match memory.kept.bytes().filter(|used| fits(*used)) {
            Some(used) => used,
            None => self.context.kept().bytes().await?,
        };
        memory.kept.learn_bytes(Some(used.saturating_add(if fits(used) { bytes } else { 0 })));
        Ok(fits(used))
    }

    /// Records that values are overwritten without being kept. Those that are kept already are brought up to date.
    async fn not_kept(&self, values: &[Old], statements: Vec<bson::RawDocumentBuf>, first: bool) -> Result<()> {
        let rule = self.rule.name.as_str();
        let (context, kept) = (self.context, self.context.kept());
        if first {
            let most = context.undo.max_bytes;
            tracing::warn!(
                rule,
                max_bytes = most,
                "undo.max_bytes is reached: further values of this rule are overwritten without being kept"
            );
        }
        let places: Vec<&Place> = values.iter().map(|old| &old.place).collect();
        let new = places.len().saturating_sub(kept.count(rule, &places).await?);
        if new > 0 {
            kept.not_kept(rule, new as u64).await?;
        }
        context.memory.kept.learn(self.rule.id, |kept| kept.is_full = true);
        let known: Vec<_> = statements.into_iter().skip(2).step_by(3).collect();
        let collection = crate::checkpoint::kept::COLLECTION;
        context.server.update(kept.database, collection, &known, context.limits.write_timeout).await?;
        Ok(())
    }
}

/// The text of a path from the element on.
fn below_text(each: &FieldPath, path: &FieldPath) -> String {
    path.query().strip_prefix(&format!("{}.", each.query())).unwrap_or_default().to_owned()
}

/// The elements at a path that ends in `$[]`, in the order of [`denormd_rules::plan::reference::Reference::elements`], each with
/// its place: `lines.3`.
pub(super) fn places_of(each: &FieldPath, doc: &Document) -> Vec<(String, Bson)> {
    fn walk(path: &[Segment], value: &Bson, at: &str, out: &mut Vec<(String, Bson)>) {
        match (path.split_first(), value) {
            (None, value) => out.push((at.to_owned(), value.clone())),
            (Some((Segment::Each, rest)), Bson::Array(items)) => {
                for (nth, item) in items.iter().enumerate() {
                    walk(rest, item, &format!("{at}.{nth}"), out);
                }
            }
            (Some((Segment::Name(name), rest)), Bson::Document(doc)) => {
                if let Some(value) = doc.get(name) {
                    walk(rest, value, &if at.is_empty() { name.clone() } else { format!("{at}.{name}") }, out);
                }
            }
            _ => {}
        }
    }
    let mut out = Vec::new();
    walk(each.segments(), &Bson::Document(doc.clone()), "", &mut out);
    out
}
