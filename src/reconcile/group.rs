//! One update for the targets of many keys: its pipeline looks the value up by the reference that a target has at that
//! moment. Pure.
//!
//! A statement costs the server 50 µs beside what it writes, more than the writing of two small targets (MongoDB 6.0.5;
//! docs/performance.md), and a demand that the reference is no array 15 more. Written in one statement, fifty keys pay once.
//!
//! Architecture invariant: what such a statement writes into a target is what [`super::statement`] would write, or nothing,
//! or it fails. One that fails is done again key by key.

use std::collections::{HashMap, HashSet};

use bson::{Bson, Document, RawArrayBuf, RawBson, RawDocumentBuf, cstr, doc, raw::CString, rawdoc};

use crate::{
    error::{Error, Result},
    field_path::{FieldPath, Segment},
    key::Key,
    plan::{Keyed, Rule, Values, reference::Pair},
    reconcile::{
        statement::{Statement, query, raw},
        value::{Field, size_of},
    },
    request::Scope,
};

/// Keys in one statement: a target's value is found by going through them.
pub const KEYS: usize = 50;
/// Keys in one statement for a target, or a few targets, that hold many of them: an element costs the server 2 µs, and a key 12 ns
/// more for each element (MongoDB 6.0.5), where a statement of its own costs 0.4 µs for each element.
pub const KEYS_OF_ONE: usize = 250;
/// A target that is named for so many keys is written once for all of them, by a command of its own.
pub const CROWD: usize = 32;
/// Values of more bytes are not copied for each target that is written so.
const SMALL_VALUES: usize = 4096;
/// Targets share a statement for all their keys where they are fewer than the keys by this factor.
pub const KEYS_PER_TARGET: usize = 16;
/// Targets named in one statement.
const NAMED: usize = 1000;
/// Bytes of values in one statement.
const BYTES: usize = 256 << 10;
/// From this many targets of a key on, a statement of its own is the faster one.
pub const SHARED_BELOW: u32 = 16;
/// Targets of more bytes than this have statements of their own.
const TARGET_BYTES: f64 = 4096.0;
/// And those that have less than this beside the owned fields: the change itself takes 28 and the fields.
const OTHER_BYTES: f64 = 32.0;

/// What the targets of a rule are like, as far as it is known.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shape {
    /// Of one key, in the mean.
    pub targets: Option<f64>,
    /// Of one target.
    pub size: Option<Size>,
}

/// How large targets are, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Size {
    /// Of one, in the mean.
    pub bytes: f64,
    /// The least that one has beside the fields that the rule owns.
    pub others: f64,
}

impl Size {
    /// A large one is written faster by operators, which change it where it is. And what a pipeline changes in a very small one
    /// is logged as a replacement of the whole: nothing else is wrong with that than that everybody who follows the
    /// collection, ourselves among them, cannot tell what has changed (`doc_diff::computeDiff` of the server).
    fn is_fit(self) -> bool {
        self.bytes <= TARGET_BYTES && self.others >= OTHER_BYTES
    }
}

impl Shape {
    /// Takes in how many targets were found for so many keys. What was found last counts for a third.
    pub fn learn(&mut self, keys: usize, targets: u64) {
        let (Ok(keys), Ok(targets)) = (u32::try_from(keys), u32::try_from(targets)) else { return };
        let found = f64::from(targets) / f64::from(keys.max(1));
        self.targets = Some(self.targets.map_or(found, |known| known + (found - known) / 3.0));
    }
}

/// A key whose targets are to hold these values.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// The key.
    pub key: &'a Key,
    /// Which targets.
    pub scope: &'a Scope,
    /// What they are to hold, in the order of the rule's owned paths.
    pub fields: &'a [Field],
}

/// Whether a rule can be written so: it has one reference, and everything is reached by names alone, in the target or in the
/// elements of one array at its top.
#[must_use]
pub fn is_possible(rule: &Rule) -> bool {
    let [pair] = rule.reference.pairs.as_slice() else { return false };
    if rule.keyed != Keyed::Value || matches!(rule.values, Values::Set { once: true, .. }) {
        return false;
    }
    if let Some(each) = &rule.reference.target_each {
        let inside = |path: &FieldPath| name_in(each, path).is_some_and(|name| name != "$id");
        let distinct = |path: &&FieldPath| inside(path) && **path != pair.target;
        return each.segments().len() == 2 && inside(&pair.target) && rule.owned().iter().all(distinct);
    }
    let by_names = |path: &FieldPath| path.segments().iter().all(|segment| matches!(segment, Segment::Name(_)));
    let apart = |path: &&FieldPath| by_names(path) && path.root() != pair.target.root();
    pair.target.segments().len() == 1 && by_names(&pair.target) && rule.owned().iter().all(apart)
}

/// Whether a key of such a rule can share a statement with others, and is written faster so.
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

/// The targets that are named for many keys, of a rule whose keys can share statements: each holds many keys in one array, and a
/// statement of each key goes through all of it.
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

/// Whether the values of a key are written together with those of other keys of a large array.
#[must_use]
pub fn is_small(fields: &[Field]) -> bool {
    size_of(fields) <= SMALL_VALUES
}

/// Whether a key can share a statement with others.
#[must_use]
pub fn can_share(rule: &Rule, key: &Key, fields: &[Field]) -> bool {
    let [value] = key.values() else { return false };
    // Every other kind means something of its own in a query, or is no reference.
    let plain = match value {
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
    };
    // A pipeline that sets `a.b` to nothing makes an `a` where there is none.
    let at_top = || rule.owned().iter().all(|path| path.segments().len() == 1);
    plain && (rule.reference.target_each.is_some() || fields.iter().all(Option::is_some) || at_top())
}

/// Divides members into statements of so many `keys` at most: all the members of one have the same kind of scope.
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

/// The statement that makes the targets of all members hold what each is to hold. All have the same kind of scope.
pub fn statement(rule: &Rule, members: &[Member]) -> Result<Statement> {
    let mut references = Vec::new();
    let mut named = Vec::new();
    let mut columns = vec![RawArrayBuf::new(); rule.owned().len()];
    for member in members {
        let values = member.key.values().first().map(|value| rule.reference.stored_as(value));
        for value in values.into_iter().flatten() {
            references.push(value);
            for (column, field) in columns.iter_mut().zip(member.fields) {
                let mut cell = RawDocumentBuf::new();
                if let Some(value) = field {
                    cell.append(cstr!("v"), value.clone());
                }
                column.push(cell);
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
    let statement = rawdoc! {
        "q": raw(&query(rule, conditions))?, "u": [{"$set": set}], "multi": true, "collation": {"locale": "simple"},
    };
    Ok(Statement::Update(statement))
}

/// The place of the reference `at` among `references`; -1 for any other. An array has none, though the query finds it by its
/// elements.
fn place(at: &str, references: &[Bson]) -> Result<RawDocumentBuf> {
    raw(&doc! {"$indexOfArray": [{"$literal": references}, at]})
}

/// What stands at `$$place`; nothing in an empty cell.
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

/// Sets fields of the elements that hold a reference, each with whether it may be nothing. An element that is no document keeps
/// what it is.
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
    // What merges nothing takes nothing away.
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

/// The name of a field that is directly in the elements of `each`.
fn name_in<'a>(each: &FieldPath, path: &'a FieldPath) -> Option<&'a str> {
    match path.below(each)? {
        [Segment::Name(name)] => Some(name),
        _ => None,
    }
}

/// Whether a target has its reference among the keys, and everything around `path` is a document or not there.
fn may_be_set(path: &FieldPath) -> Document {
    let around = around(path).map(|outer| Bson::from(doc! {"$in": [{"$type": outer}, ["object", "missing"]]}));
    let mut all = vec![Bson::from(doc! {"$gte": ["$$place", 0]})];
    all.extend(around);
    doc! {"$and": all}
}

/// A field at the top keeps what it has. Below, that would make documents around it, where an operator of an update
/// would refuse: the statement fails instead, as text is no number.
fn otherwise(path: &FieldPath) -> RawBson {
    let kept = format!("${}", path.query());
    match around(path).next() {
        None => RawBson::String(kept),
        Some(outer) => RawBson::Document(rawdoc! {"$toInt": {"$concat": ["a value of type ", {"$type": outer}]}}),
    }
}

/// `$a` and `$a.b` of `a.b.c`.
fn around(path: &FieldPath) -> impl Iterator<Item = String> {
    let whole = format!("${}", path.query());
    let ends: Vec<usize> = whole.match_indices('.').map(|(end, _)| end).collect();
    ends.into_iter().map(move |end| whole[..end].to_owned())
}
