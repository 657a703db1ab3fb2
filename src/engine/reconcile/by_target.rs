//! Reads for rules whose values depend on the target: `$$target` and `$$targetElement`.
//!
//! The key of such a rule is the target's. One command reads the sources of many targets. It contains what the values
//! depend on, as it was read from the targets, and looks up the sources of each. Where the target does not affect which
//! source is chosen, another command comes first: it reads each source once and computes the values of all its targets,
//! and only targets without a source are looked up. The write demands that what was read of the target is unchanged;
//! the event of a change requests the target again.

use std::collections::BTreeMap;

use bson::{Bson, Document, RawDocumentBuf, doc};

use crate::reconcile::{
    context::{Context, Load},
    read,
    value::{Rows, index, refers, target_key, target_key_without_source},
};
use denormd_model::{
    field_path::FieldPath,
    key::{Key, id_of},
    position::ClusterTime,
};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::plan::{Rule, Values, reference::Role};

/// Size of what one command may contain of several targets, in bytes. The server takes 16 MB.
const BYTES: usize = 4 << 20;
/// Time limit of a read that only serves a figure, in milliseconds.
const FIGURE: i64 = 5000;

/// A target with its references.
#[derive(Debug, Clone, Copy)]
pub struct Referrer<'a> {
    /// The target, with its references and with what values are computed from.
    pub target: &'a Document,
    /// Its references.
    pub references: &'a [Option<Key>],
}

impl Referrer<'_> {
    /// Its `_id`.
    #[must_use]
    pub fn id(&self) -> Bson {
        id_of(self.target)
    }

    /// The key of a target that has one reference, if a source can match it.
    fn only_key(&self, rule: &Rule) -> Option<&Key> {
        self.references.first()?.as_ref().filter(|key| rule.reference.can_resolve(key))
    }
}

/// One lookup of a target: its sources together, or those of one reference.
struct Slot<'a> {
    nth: usize,
    /// The different values that a source must have one of.
    keys: Vec<&'a Key>,
}

fn slots<'a>(rule: &Rule, target: Referrer<'a>) -> Vec<Slot<'a>> {
    let references = target.references;
    let slot = |nth, references: &'a [Option<Key>]| {
        let mut keys: Vec<&Key> = references.iter().flatten().filter(|key| rule.reference.can_resolve(key)).collect();
        keys.sort_unstable();
        keys.dedup();
        Slot { nth, keys }
    };
    let mut slots: Vec<Slot> = if rule.by_reference() {
        references.iter().enumerate().map(|(nth, reference)| slot(nth, std::slice::from_ref(reference))).collect()
    } else {
        vec![slot(0, references)]
    };
    // Without sources, an expression may fail, so it is computed only where its value is used.
    let has_values = read::values_without_source(rule).is_some();
    let counts = |slot: &Slot| match &rule.values {
        _ if !has_values => false,
        Values::Set { .. } => true,
        _ if rule.by_reference() => references.get(slot.nth).is_some_and(Option::is_some),
        _ => refers(rule, references, rule.reference.has_array(target.target)),
    };
    slots.retain(|slot| !slot.keys.is_empty() || counts(slot));
    slots
}

/// The keys of the rows that may come for these targets.
fn keys_of_rows(rule: &Rule, targets: &[Referrer<'_>]) -> Vec<Key> {
    let mut keys = Vec::new();
    for target in targets {
        let id = target.id();
        for slot in slots(rule, *target) {
            keys.extend([target_key(&id, slot.nth), target_key_without_source(&id, slot.nth)]);
        }
    }
    keys
}

/// The sources of a target.
pub type Settled<'a> = &'a (dyn Fn(&Bson) -> Vec<Document> + Sync);

/// True if [`sources_at_once`] reads the values of several of these targets: if `$$target` affects the values computed
/// from a source, but not which source is chosen.
#[must_use]
pub fn share_sources(rule: &Rule, targets: &[Referrer<'_>]) -> bool {
    let chosen_by_target = rule.pair_filter.is_some() || rule.row_filter.is_some();
    let one_key = rule.reference.source_each.is_none() && rule.reference.target_each.is_none();
    let is_shared = matches!(rule.values, Values::Set { .. }) && one_key && !chosen_by_target;
    is_shared && targets.iter().filter_map(|target| target.only_key(rule)).nth(1).is_some()
}

/// Reads the values of targets like [`sources`], but each source once, and only for targets that have one. For targets
/// that [`share_sources`]; `settled` is as in [`sources`].
#[must_use]
pub fn sources_at_once(rule: &Rule, targets: &[Referrer<'_>], settled: Option<Settled<'_>>) -> Document {
    let mut by_key: BTreeMap<&Key, Vec<Document>> = BTreeMap::new();
    let mut known = Vec::new();
    for target in targets {
        let Some(key) = target.only_key(rule) else { continue };
        let (same, id) = (by_key.entry(key).or_default(), target.id());
        // Targets with the same key have the same sources.
        known.extend(settled.filter(|_| same.is_empty()).into_iter().flat_map(|settled| settled(&id)));
        same.push(doc! {"k": [id, index(0)], "t": read_paths(rule, *target)});
    }
    let settle = settled.map(|_| {
        let values = |name: &str| doc! {"$literal": known.iter().filter_map(|one| one.get(name)).collect::<Vec<_>>()};
        settle(rule, values("k").into(), values("v").into())
    });
    read::sources_of_targets(rule, by_key, settle)
}

/// The targets that still have to be looked up: those without a row.
#[must_use]
pub fn without_rows<'a>(targets: &[Referrer<'a>], rows: &Rows) -> Vec<Referrer<'a>> {
    targets.iter().filter(|target| !rows.answer(&target_key(&target.id(), 0))).copied().collect()
}

/// Reads the values of these targets: rows `{ k: [_id, index], v }`, and `{ k: [_id, index, null], v }` where no source
/// matches and that has a value. For a tree whose documents do not have their values yet, `settled` gives the sources of a
/// target, by its `_id`, as `{ k: _id, v: the fields that the rule writes }`.
#[must_use]
pub fn sources(rule: &Rule, targets: &[Referrer<'_>], settled: Option<Settled<'_>>) -> Document {
    let mut inner = read::sources_of_pair(rule);
    inner.extend(settled.map(|_| settle(rule, "$$settled.k".into(), "$$settled.v".into())));
    inner.extend(read::row_of_pair(rule));
    let mut stages = lookups(rule, asked(rule, targets, settled), &inner);
    let found = doc! {"k": ["$id", "$r.n"], "v": {"$arrayElemAt": ["$s.v", 0]}};
    stages.push(match read::values_without_source(rule) {
        None => doc! {"$replaceWith": found},
        Some(values) => {
            let values = doc! {"$let": {"vars": {"target": "$t", "targetElement": "$r.e"}, "in": values}};
            let without = doc! {"k": ["$id", "$r.n", null], "v": values};
            doc! {"$replaceWith": {"$cond": [{"$eq": ["$s", []]}, without, found]}}
        }
    });
    read::command(1, stages)
}

/// Replaces the fields of a source that the rule writes by those in `values`, where `ids` has its `_id`.
fn settle(rule: &Rule, ids: Bson, values: Bson) -> Document {
    let roots: Vec<&str> = rule.owned().into_iter().map(FieldPath::root).collect();
    let is_other = doc! {"$not": [{"$in": ["$$field.k", roots]}]};
    let others = doc! {"$filter": {"input": {"$objectToArray": "$$ROOT"}, "as": "field", "cond": is_other}};
    let merged = doc! {"$mergeObjects": [{"$arrayToObject": others}, {"$arrayElemAt": [values, "$$place"]}]};
    doc! {"$replaceWith": {"$let": {
        "vars": {"place": {"$indexOfArray": [ids, "$_id"]}},
        "in": {"$cond": [{"$lt": ["$$place", 0]}, "$$ROOT", merged]},
    }}}
}

/// Reads the `_id`s of the sources of one target: rows `{ n: index of the reference, ids }`, each with `limit` at most.
#[must_use]
pub fn source_ids(rule: &Rule, target: Referrer<'_>, limit: i64) -> Document {
    let mut inner = read::sources_of_pair(rule);
    inner.extend([doc! {"$sort": read::order(rule)}, doc! {"$limit": limit}, doc! {"$project": {"_id": 1}}]);
    let mut stages = lookups(rule, asked(rule, &[target], None), &inner);
    stages.push(doc! {"$replaceWith": {"n": "$r.n", "ids": "$s._id"}});
    read::command(1, stages)
}

/// The stages that give each slot of the `asked` documents the results `s` of the inner stages.
fn lookups(rule: &Rule, asked: Vec<Document>, inner: &[Document]) -> Vec<Document> {
    // Inside `$literal`, no value is taken for an expression.
    let asked: Vec<Document> = asked.into_iter().map(|asked| doc! {"d": {"$literal": asked}}).collect();
    let path = rule.reference.paths(Role::Source).next().map(FieldPath::query).unwrap_or_default();
    // The lookup by the first path finds the index; `keys` decides.
    let mut variables = doc! {"keys": "$r.k", "target": "$t", "targetElement": "$r.e", "settled": "$settled"};
    for nth in 1..rule.reference.pairs.len() {
        let value = doc! {"$arrayElemAt": [{"$arrayElemAt": ["$r.k", 0]}, i32::try_from(nth).unwrap_or(i32::MAX)]};
        variables.insert(read::variable_of_path(nth), value);
    }
    let mut stages = vec![doc! {"$documents": asked}, doc! {"$replaceWith": "$d"}, doc! {"$unwind": "$r"}];
    stages.push(doc! {"$lookup": {
        "from": &rule.source.namespace.collection, "localField": "r.f", "foreignField": path,
        "let": variables, "pipeline": inner.to_vec(), "as": "s",
    }});
    if read::values_without_source(rule).is_none() {
        stages.push(doc! {"$match": {"s": {"$ne": []}}});
    }
    stages
}

/// The lookups: one document `{ id, t: target, r: [{ n, f, k, e: element }], settled }` for each target, with its slots in `r`.
/// `f` finds sources, and `k` has the keys. The values read from a target appear once, however many elements it has.
fn asked(rule: &Rule, targets: &[Referrer<'_>], settled: Option<Settled<'_>>) -> Vec<Document> {
    let mut out = Vec::new();
    for target in targets {
        let elements = rule.reference.elements(Role::Target, target.target);
        let lookup = |slot: Slot<'_>| {
            let mut searched = searched(&slot.keys);
            searched.insert("n", index(slot.nth));
            let element = elements.get(slot.nth).filter(|_| rule.by_reference());
            searched.extend(element.and_then(|element| read_element(rule, element)).map(|e| ("e".to_owned(), e)));
            searched
        };
        let lookups: Vec<Document> = slots(rule, *target).into_iter().map(lookup).collect();
        if lookups.is_empty() {
            continue;
        }
        let mut asked = doc! {"id": target.id(), "t": read_paths(rule, *target), "r": lookups};
        asked.extend(settled.map(|settled| ("settled".to_owned(), settled(&target.id()).into())));
        out.push(asked);
    }
    out
}

/// The values `f` that find the sources with one of these keys, and the keys `k`.
fn searched(keys: &[&Key]) -> Document {
    let mut values: Vec<Bson> = keys.iter().map(|key| key.values().first().cloned().unwrap_or(Bson::MinKey)).collect();
    // A slot without a key finds nothing, and should search nothing.
    let any = match values.len() {
        0 => Bson::MinKey,
        1 => values.remove(0),
        _ => Bson::Array(values),
    };
    doc! {"f": any, "k": keys.iter().map(|key| Bson::Array(key.values().to_vec())).collect::<Vec<_>>()}
}

/// The paths of a target that values are computed from.
fn read_paths(rule: &Rule, target: Referrer<'_>) -> Document {
    let mut read = Document::new();
    for path in rule.of_target.iter().flat_map(|of_target| &of_target.paths) {
        let root = path.root();
        read.extend(target.target.get(root).map(|value| (root.to_owned(), value.clone())));
    }
    read
}

/// The fields of an element that values are computed from.
fn read_element(rule: &Rule, element: &Bson) -> Option<Bson> {
    let (Some(of_target), Some(each)) = (&rule.of_target, &rule.reference.target_each) else { return None };
    if of_target.elements.contains(each) {
        return Some(element.clone());
    }
    let inside = element.as_document()?;
    let names = of_target.elements.iter().filter_map(|path| path.below(each)?.first()?.name());
    let read: Document = names.filter_map(|name| Some((name.to_owned(), inside.get(name)?.clone()))).collect();
    Some(read.into())
}

impl Context {
    /// Reads the values of targets, like [`Context::rows`] those of keys.
    pub(super) async fn rows_of_targets(
        &self,
        rule: &Rule,
        targets: &[Referrer<'_>],
        after: ClusterTime,
        load: Load<'_>,
    ) -> Result<Rows> {
        let bytes = |target: &Referrer| RawDocumentBuf::try_from(target.target).map_or(0, |raw| raw.as_bytes().len());
        if targets.len() > 1 && targets.iter().map(bytes).sum::<usize>() > BYTES {
            return Err(Error::new(Kind::TooLarge, "these targets have more than a command may contain"));
        }
        let mut found = Rows::within(0);
        if share_sources(rule, targets) {
            found = self.rows_by(rule, targets, &|| sources_at_once(rule, targets, None), after, load).await?;
        }
        let rest = without_rows(targets, &found);
        if keys_of_rows(rule, &rest).is_empty() {
            return Ok(found);
        }
        let mut rows = self.rows_by(rule, &rest, &|| sources(rule, &rest, None), after, load).await?;
        rows.extend(found)?;
        Ok(rows)
    }

    /// Reads the rows of targets by a command.
    async fn rows_by(
        &self,
        rule: &Rule,
        targets: &[Referrer<'_>],
        command: &(dyn Fn() -> Document + Sync),
        after: ClusterTime,
        load: Load<'_>,
    ) -> Result<Rows> {
        let is_figure = load.sources.is_some();
        let sources = |_: &[&Key]| {
            let mut command = command();
            if is_figure {
                command.insert("maxTimeMS", FIGURE);
            }
            command
        };
        // Only the rows of a single item are checked against the keys.
        let keys = if load.items > 1 { Vec::new() } else { keys_of_rows(rule, targets) };
        let load = Load { sources: Some(&sources), ..load };
        self.rows_of_keys(rule, &keys.iter().collect::<Vec<_>>(), after, load).await
    }
}
