//! One update for the targets of many keys, or for many targets by their `_id`: its pipeline looks up the value by the
//! target's current reference, or by its `_id`. No I/O.
//!
//! A statement costs the server 50 µs in addition to its writes, more than writing two small targets (MongoDB 6.0.5;
//! docs/lab-notebook.md), and the condition that the reference is not an array another 15. In one statement, fifty keys
//! pay that cost only once. Statements by `_id` also check that the target has not changed since it was
//! read: they cost 45 µs for a small target alone, and 20 µs for each in a shared one.
//!
//! Architecture invariant: such a statement either writes into a target the value that [`super::statement`] would
//! write, or writes nothing, or fails. The keys or targets of a failed statement are written again one by one.

use std::collections::{HashMap, HashSet};

use bson::{Bson, Document, RawArrayBuf, RawBson, RawDocumentBuf, cstr, doc, raw::CString, rawdoc};

use crate::{
    reconcile::{
        read::guard_expression,
        statement::{Statement, guard_document, query, raw},
        value::{Field, size_of},
    },
    request::Scope,
};
use denormd_model::{
    field_path::{FieldPath, Segment},
    key::Key,
};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Keyed, Rule, Values, reference::Pair};

/// Keys in one statement: the server searches them for every target.
pub const KEYS: usize = 50;
/// Keys in one statement for one or a few targets that contain many of them. An element costs the server 2 µs, and each
/// key another 12 ns for each element (MongoDB 6.0.5); a statement of its own costs 0.4 µs for each element.
pub const KEYS_OF_ONE: usize = 250;
/// A target named for at least this many keys is written once for all of them, by a command of its own.
pub const CROWD: usize = 32;
/// Most targets in one statement by `_id`. A larger one saves nothing more.
pub const TARGETS: usize = 25;
/// Larger values, in bytes, are not copied for each target of such a statement.
const SMALL_VALUES: usize = 4096;
/// Targets share a statement for all their keys if there are fewer targets than keys by this factor.
pub const KEYS_PER_TARGET: usize = 16;
/// Targets named in one statement.
const NAMED: usize = 1000;
/// Bytes of values in one statement.
const BYTES: usize = 256 << 10;
/// Number of targets of a key from which a separate statement is faster.
pub const SHARED_BELOW: u32 = 16;
/// Targets larger than this, in bytes, get separate statements.
const TARGET_BYTES: f64 = 4096.0;
/// Targets with fewer bytes than this outside the owned fields do too: the change itself takes 28 bytes and the fields.
const OTHER_BYTES: f64 = 32.0;

/// Observed properties of a rule's targets.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shape {
    /// Mean number of targets of one key.
    pub targets: Option<f64>,
    /// Size of one target.
    pub size: Option<Size>,
}

/// Sizes of targets, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Mean size of a target.
    pub bytes: f64,
    /// Smallest size of a target without the fields that the rule owns.
    pub others: f64,
}

impl Size {
    /// Operators write large targets faster, because they change them in place. For very small targets, the server logs
    /// a pipeline's change as a replacement of the whole document. The only harm is that followers of the collection,
    /// including denormd, cannot see which fields have changed (`doc_diff::computeDiff` of the server).
    fn is_fit(self) -> bool {
        self.bytes <= TARGET_BYTES && self.others >= OTHER_BYTES
    }
}

impl Shape {
    /// Records the number of targets found for a number of keys. The latest result has a weight of one third.
    pub fn learn(&mut self, keys: usize, targets: u64) {
        let (Ok(keys), Ok(targets)) = (u32::try_from(keys), u32::try_from(targets)) else { return };
        let found = f64::from(targets) / f64::from(keys.max(1));
        self.targets = Some(self.targets.map_or(found, |known| known + (found - known) / 3.0));
    }
}

/// A key with the values for its targets.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// The key.
    pub key: &'a Key,
    /// The targets of this key.
    pub scope: &'a Scope,
    /// Values for the targets, in the order of the rule's owned paths.
    pub fields: &'a [Field],
}

/// A target and the values to write. They are valid while the fields that they were computed from equal `guard`.
#[derive(Debug, Clone, Copy)]
pub struct Guarded<'a> {
    /// Its `_id`.
    pub id: &'a Key,
    /// The value of [`guard_expression`].
    pub guard: &'a RawDocumentBuf,
    /// Values, in the order of the rule's owned paths.
    pub fields: &'a [Field],
}

/// True if a rule can use shared statements: it has one reference, every path consists of names only, in the target
/// or in the elements of one top-level array, and it inserts no targets: a statement for many documents inserts none.
#[must_use]
pub fn is_possible(rule: &Rule) -> bool {
    let [pair] = rule.reference.pairs.as_slice() else { return false };
    if rule.keyed != Keyed::Value || rule.creates.is_some() || matches!(rule.values, Values::Set { once: true, .. }) {
        return false;
    }
    if let Some(each) = &rule.reference.target_each {
        let inside = |path: &FieldPath| name_in(each, path).is_some_and(|name| name != "$id");
        let distinct = |path: &&FieldPath| inside(path) && **path != pair.target;
        return each.segments().len() == 2 && inside(&pair.target) && rule.owned().iter().all(distinct);
    }
    let apart = |path: &&FieldPath| !path.has_each() && path.root() != pair.target.root();
    pair.target.segments().len() == 1 && rule.owned().iter().all(apart)
}

/// True if targets of a rule can share statements by their `_id`.
#[must_use]
pub fn is_possible_by_id(rule: &Rule) -> bool {
    rule.keyed == Keyed::Target && rule.creates.is_none() && rule.owned().into_iter().all(|path| !path.has_each())
}

/// True if a target of such a rule can share a statement with others, and is faster that way.
#[must_use]
pub fn fits_by_id(rule: &Rule, shape: Shape, target: &Guarded) -> bool {
    let can_share = is_plain(target.id) && may_set(rule, target.fields);
    let is_small = is_small(target.fields) && target.guard.as_bytes().len() <= SMALL_VALUES;
    can_share && is_small && shape.size.is_some_and(Size::is_fit)
}

/// True if a key of such a rule can share a statement with others, and is faster that way.
#[must_use]
pub fn fits(rule: &Rule, shape: Shape, member: &Member) -> bool {
    let few = match member.scope {
        Scope::All => {
            rule.reference.keyed_by_target_id()
                || shape.targets.is_some_and(|targets| targets < f64::from(SHARED_BELOW))
        }
        Scope::Named(ids) => ids.len() < SHARED_BELOW as usize,
    };
    few && can_share(rule, member.key, member.fields) && shape.size.is_some_and(Size::is_fit)
}

/// The targets named for many keys, of a rule whose keys can share statements. Each contains many keys in one array,
/// and a separate statement for each key would scan the whole array.
#[must_use]
pub fn crowded<'a>(rule: &Rule, scopes: impl Iterator<Item = &'a Scope>) -> HashSet<&'a Key> {
    let mut keys: HashMap<&Key, usize> = HashMap::new();
    if rule.reference.target_each.is_some() && is_possible(rule) {
        for scope in scopes {
            if let Scope::Named(ids) = scope {
                for id in ids {
                    *keys.entry(id).or_default() += 1;
                }
            }
        }
    }
    keys.into_iter().filter(|(_, keys)| *keys >= CROWD).map(|(id, _)| id).collect()
}

/// True if the values of a key are small enough to be written together with other keys of a large array.
#[must_use]
pub fn is_small(fields: &[Field]) -> bool {
    size_of(fields) <= SMALL_VALUES
}

/// True if a key can share a statement with others.
#[must_use]
pub fn can_share(rule: &Rule, key: &Key, fields: &[Field]) -> bool {
    is_plain(key) && (rule.reference.target_each.is_some() || may_set(rule, fields))
}

/// True if a pipeline can set these fields of a target: one that unsets `a.b` creates `a` if it does not exist.
fn may_set(rule: &Rule, fields: &[Field]) -> bool {
    fields.iter().all(Option::is_some) || rule.owned().iter().all(|path| path.segments().len() == 1)
}

/// True for a key of one value that has no special meaning in a query, and that can be a reference or an `_id`.
fn is_plain(key: &Key) -> bool {
    let [value] = key.values() else { return false };
    match value {
        Bson::Document(doc) => !doc.keys().any(|name| name.starts_with('$')),
        Bson::Double(_)
        | Bson::String(_)
        | Bson::Boolean(_)
        | Bson::Int32(_)
        | Bson::Int64(_)
        | Bson::Timestamp(_)
        | Bson::Binary(_)
        | Bson::ObjectId(_)
        | Bson::DateTime(_)
        | Bson::Decimal128(_) => true,
        _ => false,
    }
}

/// Divides members into statements of at most `keys` keys. All members of a statement have the same kind of scope.
#[must_use]
pub fn divide<T>(members: Vec<(T, Member<'_>)>, keys: usize) -> Vec<Vec<(T, Member<'_>)>> {
    let (all, named): (Vec<_>, Vec<_>) = members.into_iter().partition(|(_, member)| *member.scope == Scope::All);
    let mut out = Vec::new();
    for members in [all, named] {
        let (mut targets, mut bytes) = (0, 0);
        let mut group = Vec::new();
        for (owner, member) in members {
            let weight = member.scope.weight();
            let size = size_of(member.fields);
            if !group.is_empty() && (group.len() == keys || targets + weight > NAMED || bytes + size > BYTES) {
                out.push(std::mem::take(&mut group));
                (targets, bytes) = (0, 0);
            }
            (targets, bytes) = (targets + weight, bytes + size);
            group.push((owner, member));
        }
        out.extend(Some(group).filter(|group| !group.is_empty()));
    }
    out
}

/// The statement that writes each member's values into its targets. All members have the same kind of scope.
pub fn statement(rule: &Rule, members: &[Member]) -> Result<Statement> {
    let mut references = Vec::new();
    let mut named = Vec::new();
    let mut columns = vec![RawArrayBuf::new(); rule.owned().len()];
    for member in members {
        let values = member.key.values().first().map(|value| rule.reference.stored_as(value));
        for value in values.into_iter().flatten() {
            references.push(value);
            for (column, field) in columns.iter_mut().zip(member.fields) {
                column.push(cell(field));
            }
        }
        if let Scope::Named(ids) = member.scope {
            named.extend(ids.iter().filter_map(|id| id.values().first().cloned()));
        }
    }
    let [Pair { target: reference, .. }] = rule.reference.pairs.as_slice() else {
        return Err(Error::internal("a shared statement of several references"));
    };
    let mut conditions = Vec::new();
    if !named.is_empty() {
        conditions.push(doc! {"_id": {"$in": named}});
    }
    conditions.push(doc! {reference.query(): {"$in": &references}});
    let values = rule.owned().into_iter().zip(columns.into_iter().map(value_of));
    let set = match &rule.reference.target_each {
        None => fields(&format!("${}", reference.query()), &references, values)?,
        Some(each) => {
            conditions.push(doc! {each.root(): {"$type": "array"}});
            let nothing = |nth: usize| members.iter().any(|member| member.fields.get(nth).is_none_or(Option::is_none));
            let values = values.enumerate().map(|(nth, (path, value))| (path, (value, nothing(nth))));
            elements(each, reference, &references, values)?
        }
    };
    pipeline(rule, conditions, set)
}

/// The statement that writes the values of each of these targets whose guard is unchanged.
pub fn statement_by_id(rule: &Rule, targets: &[Guarded]) -> Result<Statement> {
    let mut columns = vec![RawArrayBuf::new(); rule.owned().len()];
    let (mut ids, mut unchanged) = (Vec::new(), Vec::new());
    for target in targets {
        let id = target.id.values().first().cloned().unwrap_or(Bson::Null);
        unchanged.push(doc! {"i": &id, "g": guard_document(target.guard)?});
        ids.push(id);
        for (column, field) in columns.iter_mut().zip(target.fields) {
            column.push(cell(field));
        }
    }
    let is_unchanged = doc! {"$in": [{"i": "$_id", "g": guard_expression(rule)}, {"$literal": unchanged}]};
    let conditions = vec![doc! {"_id": {"$in": &ids}}, doc! {"$expr": is_unchanged}];
    let set = fields("$_id", &ids, rule.owned().into_iter().zip(columns.into_iter().map(value_of)))?;
    pipeline(rule, conditions, set)
}

/// The statement that sets these fields of targets that fulfil all conditions.
fn pipeline(rule: &Rule, conditions: Vec<Document>, set: RawDocumentBuf) -> Result<Statement> {
    let statement = rawdoc! {
        "q": raw(&query(rule, conditions))?, "u": [{"$set": set}], "multi": true, "collation": {"locale": "simple"},
    };
    Ok(Statement { deletes: false, raw: statement })
}

/// A value in a column, or none.
fn cell(field: &Field) -> RawDocumentBuf {
    let mut cell = RawDocumentBuf::new();
    if let Some(value) = field {
        cell.append(cstr!("v"), value.clone());
    }
    cell
}

/// The index of the reference `at` among `references`; -1 for any other value. An array gets -1, although the query
/// finds it by its elements.
fn place(at: &str, references: &[Bson]) -> Result<RawDocumentBuf> {
    raw(&doc! {"$indexOfArray": [{"$literal": references}, at]})
}

/// The value at index `$$place`; missing for an empty cell.
fn value_of(column: RawArrayBuf) -> RawDocumentBuf {
    let cell = rawdoc! {"$arrayElemAt": [{"$literal": column}, "$$place"]};
    rawdoc! {"$let": {"vars": {"cell": cell}, "in": "$$cell.v"}}
}

/// Sets fields of the target.
fn fields<'a>(
    at: &str,
    references: &[Bson],
    values: impl Iterator<Item = (&'a FieldPath, RawDocumentBuf)>,
) -> Result<RawDocumentBuf> {
    let place = place(at, references)?;
    let mut set = RawDocumentBuf::new();
    for (path, value) in values {
        let value = rawdoc! {"$cond": [raw(&may_be_set(path))?, value, otherwise(path)]};
        set.append(CString::try_from(path.query())?, rawdoc! {"$let": {"vars": {"place": place.clone()}, "in": value}});
    }
    Ok(set)
}

/// Sets fields of the elements that contain a reference. Each value comes with a flag that says if it may be missing.
/// An element that is not a document stays unchanged.
fn elements<'a>(
    each: &FieldPath,
    reference: &FieldPath,
    references: &[Bson],
    values: impl Iterator<Item = (&'a FieldPath, (RawDocumentBuf, bool))>,
) -> Result<RawDocumentBuf> {
    let root = each.root();
    let mut merged = RawDocumentBuf::new();
    let mut unset = Vec::new();
    for (path, (value, may_be_nothing)) in values {
        let name = name_in(each, path).unwrap_or_default();
        if may_be_nothing {
            unset.push((name.to_owned(), value.clone()));
        }
        merged.append(CString::try_from(name.to_owned())?, value);
    }
    let found = rawdoc! {"$and": [{"$gte": ["$$place", 0]}, {"$eq": [{"$type": "$$e"}, "object"]}]};
    let mut changed = rawdoc! {"$mergeObjects": ["$$e", merged]};
    // `$mergeObjects` does not remove a field whose value is missing.
    for (name, value) in unset {
        let field = rawdoc! {"$literal": name};
        changed = rawdoc! {"$setField": {"field": field, "input": changed, "value": value}};
    }
    let element = rawdoc! {"$cond": [found, changed, "$$e"]};
    let place = place(&format!("$$e.{}", name_in(each, reference).unwrap_or_default()), references)?;
    let element = rawdoc! {"$let": {"vars": {"place": place}, "in": element}};
    let mut set = RawDocumentBuf::new();
    let array = rawdoc! {"$map": {"input": format!("${root}"), "as": "e", "in": element}};
    set.append(CString::try_from(root.to_owned())?, array);
    Ok(set)
}

/// The name of a field directly inside the elements of `each`.
fn name_in<'a>(each: &FieldPath, path: &'a FieldPath) -> Option<&'a str> {
    match path.below(each)? {
        [Segment::Name(name)] => Some(name),
        _ => None,
    }
}

/// True for a target whose reference is among the keys, if everything around `path` is a document or missing.
fn may_be_set(path: &FieldPath) -> Document {
    let around = around(path).map(|outer| Bson::from(doc! {"$in": [{"$type": outer}, ["object", "missing"]]}));
    let mut all = vec![Bson::from(doc! {"$gte": ["$$place", 0]})];
    all.extend(around);
    doc! {"$and": all}
}

/// A top-level field keeps its value. For a nested one, that would create the documents around it, where an update
/// operator would refuse. So the statement fails instead, by converting a text to a number.
fn otherwise(path: &FieldPath) -> RawBson {
    let kept = format!("${}", path.query());
    match around(path).next() {
        None => RawBson::String(kept),
        Some(outer) => RawBson::Document(rawdoc! {"$toInt": {"$concat": ["a value of type ", {"$type": outer}]}}),
    }
}

/// The paths around `path`: `$a` and `$a.b` for `a.b.c`.
fn around(path: &FieldPath) -> impl Iterator<Item = String> {
    let whole = format!("${}", path.query());
    let ends: Vec<usize> = whole.match_indices('.').map(|(end, _)| end).collect();
    ends.into_iter().map(move |end| whole[..end].to_owned())
}
