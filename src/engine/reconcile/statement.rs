//! Update and delete statements. Pure.
//!
//! Architecture invariant: every statement requires that the reference still is the one that the value was computed
//! for, and that the target still matches `target.where`. The code that sends the command ensures that it starts in
//! time.

use std::{collections::HashSet, iter};

use bson::{Bson, Document, RawArrayBuf, RawBson, RawBsonRef, RawDocumentBuf, cstr, doc, rawdoc};

use crate::{
    reconcile::{
        read::{guard_expression, simple_collation},
        value::{Desired, Field},
    },
    request::Scope,
};
use denormd_model::{
    field_path::{FieldPath, Segment},
    key::Key,
};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::plan::{
    Rule, Values,
    reference::{Role, dbref_parent},
};

pub(super) mod created;

/// A statement for one of the two write commands.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    /// True if it is for `delete`, false if it is for `update`.
    pub deletes: bool,
    /// The statement as the command contains it.
    pub raw: RawDocumentBuf,
}

/// Conditions that find the targets of a reference, and the elements within them.
#[derive(Debug, Default)]
struct Matcher {
    /// Conditions on the document.
    conditions: Vec<Document>,
    /// Conditions on elements of arrays, outermost first.
    array_filters: Vec<Document>,
    /// `parts.$[e]`: the name of the found elements in update operators.
    elements: String,
}

/// The statements that make the targets of `key` in `scope` hold `desired`.
pub fn of_value(rule: &Rule, key: &Key, scope: &Scope, desired: &Desired) -> Result<Vec<Statement>> {
    those_of_value(rule, key, scope, desired, Vec::new())
}

/// The same for those targets of a key in a part of the collection that do not hold `desired` yet.
pub fn of_rest(rule: &Rule, key: &Key, desired: &Desired, part: &Part) -> Result<Vec<Statement>> {
    let conditions = unfinished(rule, desired).into_iter().chain(part.condition()).collect();
    let mut statements = those_of_value(rule, key, &Scope::All, desired, conditions)?;
    if *part != Part::default() {
        for statement in &mut statements {
            statement.raw.append(cstr!("hint"), rawdoc! {"_id": 1});
        }
    }
    Ok(statements)
}

/// Condition that skips the targets that hold `desired` already. Finding out that a target need not be written costs
/// the server half as much as writing it; skipping it costs a sixth.
#[must_use]
pub fn unfinished(rule: &Rule, desired: &Desired) -> Option<Document> {
    match desired {
        Desired::Fields(fields) => holds(rule, fields).map(|done| doc! {"$nor": [done]}),
        Desired::Keep | Desired::Remove | Desired::Delete | Desired::Emptied { .. } => None,
    }
}

/// True if the `_id` index finds this value even in a collection with its own collation, which that index has too.
fn ignores_collation(id: &Bson) -> bool {
    matches!(
        id,
        Bson::Double(_)
            | Bson::Int32(_)
            | Bson::Int64(_)
            | Bson::Decimal128(_)
            | Bson::ObjectId(_)
            | Bson::DateTime(_)
            | Bson::Timestamp(_)
            | Bson::Binary(_)
            | Bson::Boolean(_)
    )
}

/// A range of a collection by `_id`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Part {
    /// The first `_id`; None if there is no lower bound.
    pub from: Option<Bson>,
    /// The end of the range, with which the next part begins; None if there is no upper bound.
    pub before: Option<Bson>,
}

impl Part {
    /// The parts between these bounds; one part for the whole collection if the index may not find them.
    #[must_use]
    pub fn between(bounds: &[Bson]) -> Vec<Self> {
        let bounds = if bounds.iter().all(ignores_collation) { bounds } else { &[] };
        let from = iter::once(None).chain(bounds.iter().cloned().map(Some));
        let before = bounds.iter().cloned().map(Some).chain(iter::once(None));
        from.zip(before).map(|(from, before)| Self { from, before }).collect()
    }

    /// `$lt` compares within one BSON type, so parts overlap where `_id`s have several types. A document that one part
    /// leaves out is in the next: together they leave none out.
    fn condition(&self) -> Option<Document> {
        let before = self.before.as_ref().map(|before| doc! {"$lt": before.clone()});
        let from = self.from.as_ref().map(|from| doc! {"$not": {"$lt": from.clone()}});
        let both: Document = before.into_iter().chain(from).flatten().collect();
        (!both.is_empty()).then(|| doc! {"_id": both})
    }
}

fn those_of_value(
    rule: &Rule,
    key: &Key,
    scope: &Scope,
    desired: &Desired,
    and: Vec<Document>,
) -> Result<Vec<Statement>> {
    if rule.creates.is_some() {
        return created::statements(rule, key, desired);
    }
    let named = named(scope);
    if key.values().is_empty() {
        return nothing(rule, named, desired);
    }
    let mut matcher = refers(rule, &|nth| {
        let stored = key.values().get(nth).map(|value| rule.reference.stored_as(value)).unwrap_or_default();
        match stored.as_slice() {
            [one] => doc! {"$eq": one.clone()},
            several => doc! {"$in": several.to_vec()},
        }
    });
    matcher.conditions.splice(0..0, named);
    matcher.conditions.extend(and);
    match desired {
        Desired::Keep => Ok(Vec::new()),
        Desired::Delete => Ok(vec![Statement {
            deletes: true,
            raw: rawdoc! {"q": raw(&query(rule, matcher.conditions))?, "limit": 0, "collation": raw(&simple_collation())?},
        }]),
        Desired::Remove => Ok(vec![pull(rule, key, matcher)?]),
        Desired::Emptied { .. } => Err(Error::internal("only a document that a rule creates is emptied")),
        Desired::Fields(fields) => match &rule.values {
            Values::Set { once: true, .. } => fill_once(rule, &matcher, fields),
            _ => Ok(vec![update(
                rule,
                matcher.conditions,
                operators(rule, &matcher.elements, fields)?,
                &matcher.array_filters,
            )?]),
        },
    }
}

/// Condition that targets with exactly these values fulfil; None where the server's equality cannot tell.
fn holds(rule: &Rule, fields: &[Field]) -> Option<Document> {
    let mut all = Vec::new();
    for (path, field) in rule.owned().into_iter().zip(fields) {
        if path.has_each() {
            return None;
        }
        let condition = match field {
            None => doc! {"$exists": false},
            Some(value) if is_like_no_other(value) => {
                doc! {"$eq": Bson::try_from(value.clone()).ok()?, "$type": i32::from(value.element_type() as u8)}
            }
            Some(_) => return None,
        };
        all.extend(field_conditions("", path.segments(), path, rule, &condition));
    }
    Some(doc! {"$and": all})
}

/// True if every value of the same type that the server considers equal is identical: not for zeros, decimals, and
/// values that may contain numbers.
fn is_like_no_other(value: &RawBson) -> bool {
    match value {
        RawBson::Double(number) => number.abs() > 0.0,
        RawBson::String(_)
        | RawBson::Binary(_)
        | RawBson::ObjectId(_)
        | RawBson::Boolean(_)
        | RawBson::DateTime(_)
        | RawBson::Null
        | RawBson::Int32(_)
        | RawBson::Timestamp(_)
        | RawBson::Int64(_) => true,
        _ => false,
    }
}

/// The statement that makes the target with this `_id` hold `desired`, while its references equal `guard`.
pub fn of_target(rule: &Rule, id: &Key, guard: &RawDocumentBuf, desired: &Desired) -> Result<Vec<Statement>> {
    let Desired::Fields(fields) = desired else { return Ok(Vec::new()) };
    let conditions = unchanged(rule, id, guard)?;
    Ok(vec![update(rule, conditions, operators(rule, "", fields)?, &[])?])
}

/// The same for values of elements, by the index of each: the guard contains all elements in their order.
pub fn of_elements(
    rule: &Rule,
    id: &Key,
    guard: &RawDocumentBuf,
    elements: &[(usize, Vec<Field>)],
) -> Result<Option<Statement>> {
    let Some(each) = rule.reference.target_each.as_ref().filter(|_| !elements.is_empty()) else { return Ok(None) };
    let array = each.query();
    let mut operators = Operators::default();
    for (nth, fields) in elements {
        operators.add(rule, &format!("{array}.{nth}"), fields)?;
    }
    Ok(Some(update(rule, unchanged(rule, id, guard)?, operators.document(), &[])?))
}

/// A guard as a document. An error if it has a field name twice: the server compares both fields, and a [`Document`] has one of them.
pub(super) fn guard_document(guard: &RawDocumentBuf) -> Result<Document> {
    if has_a_name_twice(RawBsonRef::Document(guard))? {
        return Err(Error::new(Kind::Refused, "a value that the rule reads in the target has a field name twice"));
    }
    Ok(Document::try_from(guard.as_ref())?)
}

fn has_a_name_twice(value: RawBsonRef<'_>) -> Result<bool> {
    match value {
        RawBsonRef::Document(document) => {
            let mut names = HashSet::new();
            for field in document {
                let (name, value) = field?;
                if !names.insert(name) || has_a_name_twice(value)? {
                    return Ok(true);
                }
            }
        }
        RawBsonRef::Array(array) => {
            for value in array {
                if has_a_name_twice(value?)? {
                    return Ok(true);
                }
            }
        }
        _ => {}
    }
    Ok(false)
}

/// Conditions that the target with this `_id` fulfils while its guard is unchanged.
pub(super) fn unchanged(rule: &Rule, id: &Key, guard: &RawDocumentBuf) -> Result<Vec<Document>> {
    let id = id.values().first().cloned().unwrap_or(Bson::Null);
    let guard = guard_document(guard)?;
    Ok(vec![doc! {"_id": id}, doc! {"$expr": {"$eq": [guard_expression(rule), {"$literal": guard}]}}])
}

/// The statement that removes `path` from those documents with these `_id`s that match `filter`.
pub fn unset(path: &FieldPath, ids: Vec<Bson>, filter: &Document) -> Result<RawDocumentBuf> {
    let mut clauses = vec![doc! {"_id": {"$in": ids}}, filter.clone()];
    let mut name = path.to_string();
    let mut filters = Vec::new();
    if let Some(each) = path.array_prefix() {
        clauses.extend(array_guards(&each));
        let (outer, elements) = outer_filters(&each);
        filters = outer;
        filters.push(doc! {"e": {"$type": "object"}});
        name = format!("{elements}{}", name.strip_prefix(&each.to_string()).unwrap_or_default());
    }
    let query = doc! {"$and": clauses};
    let statement = doc! {"q": query, "u": {"$unset": {name: ""}}, "multi": true, "arrayFilters": filters};
    raw(&statement)
}

fn named(scope: &Scope) -> Option<Document> {
    match scope {
        Scope::All => None,
        Scope::Named(ids) => {
            let mut ids: Vec<Bson> = ids.iter().filter_map(|id| id.values().first().cloned()).collect();
            Some(match ids.len() {
                1 => doc! {"_id": ids.remove(0)},
                _ => doc! {"_id": {"$in": ids}},
            })
        }
    }
}

/// Statements for targets with an empty reference: null, missing, an array, or a DBRef to another collection.
fn nothing(rule: &Rule, named: Option<Document>, desired: &Desired) -> Result<Vec<Statement>> {
    let (Some(named), Desired::Fields(fields)) = (named, desired) else { return Ok(Vec::new()) };
    if matches!(rule.values, Values::Set { once: true, .. }) {
        return Ok(Vec::new());
    }
    let something = refers(rule, &|_| doc! {"$ne": null});
    let Some(each) = &rule.reference.target_each else {
        let conditions = vec![named, doc! {"$nor": [{"$and": something.conditions}]}];
        return Ok(vec![update(rule, conditions, operators(rule, "", fields)?, &[])?]);
    };
    let mut out = Vec::new();
    // Elements whose own reference fields are empty.
    let mut filters = something.array_filters.clone();
    if let Some(last) = filters.pop() {
        filters.push(doc! {"e": {"$type": "object"}, "$nor": [last]});
    }
    let mut conditions = vec![named.clone()];
    conditions.extend(array_guards(each));
    out.push(update(rule, conditions.clone(), operators(rule, &something.elements, fields)?, &filters)?);
    // All elements, where a reference field outside the array is empty.
    let beside = rule.reference.paths(Role::Target).filter(|path| !path.has_each());
    let beside: Vec<Document> =
        beside.flat_map(|path| field_conditions("", path.segments(), path, rule, &doc! {"$ne": null})).collect();
    if !beside.is_empty() {
        let mut filters = something.array_filters;
        filters.pop();
        filters.push(doc! {"e": {"$type": "object"}});
        conditions.push(doc! {"$nor": [{"$and": beside}]});
        out.push(update(rule, conditions, operators(rule, &something.elements, fields)?, &filters)?);
    }
    Ok(out)
}

/// Matcher for the targets whose every reference field fulfils `condition`, which receives the field's index in
/// `match`.
fn refers(rule: &Rule, condition: &dyn Fn(usize) -> Document) -> Matcher {
    let mut matcher = Matcher::default();
    let mut element = Document::new();
    for (nth, path) in rule.reference.paths(Role::Target).enumerate() {
        let condition = condition(nth);
        match &rule.reference.target_each {
            Some(each) if path.below(each).is_some() => {
                // Implied by the array filter; repeated because an index can serve it.
                matcher.conditions.push(doc! {path.query(): condition.clone()});
                let rest = path.below(each).unwrap_or_default();
                for part in field_conditions("e.", rest, path, rule, &condition) {
                    element.extend(part);
                }
            }
            _ => matcher.conditions.extend(field_conditions("", path.segments(), path, rule, &condition)),
        }
    }
    if let Some(each) = &rule.reference.target_each {
        matcher.conditions.extend(array_guards(each));
        let (outer, elements) = outer_filters(each);
        matcher.array_filters = outer;
        if !element.is_empty() {
            // `e.id` would look into an array that is an element, and a name inside it cannot be set.
            element.insert("e", doc! {"$not": {"$type": "array"}});
        }
        matcher.array_filters.push(element);
        matcher.elements = elements;
    }
    matcher
}

/// Conditions on one field that is reached without looking into arrays, and on the DBRef around it.
fn field_conditions(
    prefix: &str,
    segments: &[Segment],
    whole: &FieldPath,
    rule: &Rule,
    condition: &Document,
) -> Vec<Document> {
    let names: Vec<&str> = segments.iter().filter_map(Segment::name).collect();
    let at = |count: usize| format!("{prefix}{}", names[..count].join("."));
    let mut out = Vec::new();
    let mut condition = condition.clone();
    // An `_id` cannot be an array, and a bare equality is what the server looks up fastest. A field of it can be one.
    if !matches!(whole.segments(), [Segment::Name(name)] if name == "_id") {
        condition.insert("$not", doc! {"$type": "array"});
    }
    out.push(doc! {at(names.len()): condition});
    out.extend((1..names.len()).map(|count| doc! {at(count): {"$not": {"$type": "array"}}}));
    if dbref_parent(whole).is_some() {
        let (collection, database) = rule.reference.other(Role::Target);
        let parent = at(names.len() - 1);
        let parent = if parent.is_empty() || parent.ends_with('.') { parent } else { format!("{parent}.") };
        out.push(doc! {format!("{parent}$ref"): collection});
        out.push(doc! {format!("{parent}$db"): {"$in": [database, Bson::Null]}});
    }
    out
}

/// Conditions under which an update operator may traverse `each`: it is an array, and none of its parents is one.
fn array_guards(each: &FieldPath) -> Vec<Document> {
    let mut names: Vec<String> = Vec::new();
    let mut out = Vec::new();
    for segment in each.segments() {
        match segment {
            Segment::Name(name) => {
                if !names.is_empty() {
                    out.push(doc! {names.join("."): {"$not": {"$type": "array"}}});
                }
                names.push(name.clone());
            }
            Segment::Each => {
                out.push(doc! {names.join("."): {"$type": "array"}});
                break;
            }
        }
    }
    out
}

/// The filters for the arrays around the innermost one, and the name of its elements: `a.$[x0].b.$[e]`.
fn outer_filters(each: &FieldPath) -> (Vec<Document>, String) {
    let text = each.to_string();
    let parts: Vec<&str> = text.split(".$[]").collect();
    let arrays = &parts[..parts.len() - 1];
    let mut filters = Vec::new();
    let mut name = String::new();
    for (depth, part) in arrays.iter().enumerate() {
        name.push_str(part);
        if depth + 1 == arrays.len() {
            name.push_str(".$[e]");
        } else {
            name.push_str(&format!(".$[x{depth}]"));
            let mut filter = Document::new();
            let next: Vec<&str> = arrays[depth + 1].split('.').filter(|part| !part.is_empty()).collect();
            for count in 1..next.len() {
                filter.insert(format!("x{depth}.{}", next[..count].join(".")), doc! {"$not": {"$type": "array"}});
            }
            filter.insert(format!("x{depth}.{}", next.join(".")), doc! {"$type": "array"});
            filter.insert(format!("x{depth}"), doc! {"$not": {"$type": "array"}});
            filters.push(filter);
        }
    }
    (filters, name)
}

pub(super) fn query(rule: &Rule, mut conditions: Vec<Document>) -> Document {
    conditions.extend(rule.target.filter.clone());
    let mut flat = Document::new();
    let mut collided = false;
    for (name, value) in conditions.iter().flatten() {
        collided |= flat.insert(name.clone(), value.clone()).is_some();
    }
    if collided {
        doc! {"$and": conditions}
    } else {
        flat
    }
}

/// Builds `$set` and `$unset`. In an update document, unlike in a pipeline, a value is data: a string such as "$name"
/// stays one.
fn operators(rule: &Rule, elements: &str, fields: &[Field]) -> Result<RawDocumentBuf> {
    let mut operators = Operators::default();
    operators.add(rule, elements, fields)?;
    Ok(operators.document())
}

/// The operators of one statement.
#[derive(Default)]
pub(super) struct Operators {
    set: RawDocumentBuf,
    unset: RawDocumentBuf,
}

impl Operators {
    /// Adds the owned paths, for the elements of this name.
    fn add(&mut self, rule: &Rule, elements: &str, fields: &[Field]) -> Result<()> {
        for (path, field) in rule.owned().into_iter().zip(fields) {
            self.put(update_path(rule, path, elements), field)?;
        }
        Ok(())
    }

    /// Adds one path.
    pub(super) fn put(&mut self, path: String, field: &Field) -> Result<()> {
        let name = bson::raw::CString::try_from(path)?;
        match field {
            Some(value) => self.set.append(name, value.clone()),
            None => self.unset.append(name, ""),
        }
        Ok(())
    }

    pub(super) fn document(self) -> RawDocumentBuf {
        let mut out = RawDocumentBuf::new();
        if !self.set.is_empty() {
            out.append(cstr!("$set"), self.set);
        }
        if !self.unset.is_empty() {
            out.append(cstr!("$unset"), self.unset);
        }
        out
    }
}

fn update_path(rule: &Rule, path: &FieldPath, elements: &str) -> String {
    match &rule.reference.target_each {
        Some(each) if path.below(each).is_some() && !elements.is_empty() => {
            let text = path.to_string();
            format!("{elements}{}", text.strip_prefix(&each.to_string()).unwrap_or_default())
        }
        _ => path.to_string(),
    }
}

/// Condition that a path below `outer` has no value, or leads through an array, where the server refuses to write: a query alone
/// would look into the array's elements.
pub(super) fn absent(path: &str, outer: &str) -> Document {
    let inner = path.match_indices('.').filter(|(end, _)| *end > outer.len());
    let mut ways = vec![doc! {path: {"$exists": false}}];
    ways.extend(inner.map(|(end, _)| doc! {&path[..end]: {"$type": "array"}}));
    if ways.len() == 1 {
        ways.remove(0)
    } else {
        doc! {"$or": ways}
    }
}

/// One statement per path, for targets that do not have it yet.
fn fill_once(rule: &Rule, matcher: &Matcher, fields: &[Field]) -> Result<Vec<Statement>> {
    let mut out = Vec::new();
    for (path, field) in rule.owned().into_iter().zip(fields) {
        let Some(value) = field else { continue };
        let mut set = RawDocumentBuf::new();
        set.append(bson::raw::CString::try_from(update_path(rule, path, &matcher.elements))?, value.clone());
        let mut conditions = matcher.conditions.clone();
        let mut filters = matcher.array_filters.clone();
        match (&rule.reference.target_each, filters.last_mut()) {
            (Some(each), Some(last)) if path.below(each).is_some() => {
                let text = path.query();
                let below = text.strip_prefix(&format!("{}.", each.query())).unwrap_or(&text);
                last.extend(absent(&format!("e.{below}"), "e"));
            }
            _ => conditions.push(absent(&path.query(), "")),
        }
        out.push(update(rule, conditions, rawdoc! {"$set": set}, &filters)?);
    }
    Ok(out)
}

/// Pulls the elements that hold the reference.
fn pull(rule: &Rule, key: &Key, mut matcher: Matcher) -> Result<Statement> {
    let array = matcher.elements.strip_suffix(".$[e]").unwrap_or(&matcher.elements).to_owned();
    let last = matcher.array_filters.pop().unwrap_or_default();
    if rule.reference.paths(Role::Target).any(|path| dbref_parent(path).is_some()) {
        return filter_out(rule, key, &array, matcher);
    }
    // `$pull` itself skips elements that are not documents.
    let condition: Document =
        last.into_iter().filter_map(|(name, value)| Some((name.strip_prefix("e.")?.to_owned(), value))).collect();
    let mut pull = RawDocumentBuf::new();
    pull.append(bson::raw::CString::try_from(array)?, raw(&condition)?);
    update(rule, matcher.conditions, rawdoc! {"$pull": pull}, &matcher.array_filters)
}

/// The same for DBRefs, as a pipeline: `$pull` takes `$id` for an operator (tested on MongoDB 6.0.5). It only writes
/// elements that the array holds already; the key is under `$literal`.
fn filter_out(rule: &Rule, key: &Key, array: &str, matcher: Matcher) -> Result<Statement> {
    let Some(each) = &rule.reference.target_each else {
        return Err(Error::internal("there is no array to remove from"));
    };
    let (collection, database) = rule.reference.other(Role::Target);
    let mut same = Vec::new();
    for (path, value) in rule.reference.paths(Role::Target).zip(key.values()) {
        let Some(below) = path.query().strip_prefix(&format!("{}.", each.query())).map(ToOwned::to_owned) else {
            continue;
        };
        let stored: Vec<Document> =
            rule.reference.stored_as(value).into_iter().map(|value| doc! {"$literal": value}).collect();
        same.push(doc! {"$in": [format!("$$this.{below}"), stored]});
        if dbref_parent(path).is_some() {
            let parent = below.strip_suffix("$id").unwrap_or_default();
            same.push(doc! {"$eq": [format!("$$this.{parent}$ref"), {"$literal": collection}]});
            same.push(
                doc! {"$in": [{"$ifNull": [format!("$$this.{parent}$db"), null]}, [null, {"$literal": database}]]},
            );
        }
    }
    let kept = doc! {"$filter": {"input": format!("${array}"), "cond": {"$not": [{"$and": same}]}}};
    let statement = doc! {
        "q": query(rule, matcher.conditions), "u": [{"$set": {array: kept}}], "multi": true, "collation": simple_collation(),
    };
    Ok(Statement { deletes: false, raw: raw(&statement)? })
}

pub(super) fn update(
    rule: &Rule,
    conditions: Vec<Document>,
    operators: RawDocumentBuf,
    array_filters: &[Document],
) -> Result<Statement> {
    let mut statement =
        rawdoc! {"q": raw(&query(rule, conditions))?, "u": operators, "multi": true, "collation": {"locale": "simple"}};
    if !array_filters.is_empty() {
        let mut filters = RawArrayBuf::new();
        for filter in array_filters {
            filters.push(RawBson::Document(raw(filter)?));
        }
        statement.append(cstr!("arrayFilters"), filters);
    }
    Ok(Statement { deletes: false, raw: statement })
}

pub(super) fn raw(doc: &Document) -> Result<RawDocumentBuf> {
    RawDocumentBuf::try_from(doc).map_err(Into::into)
}
