//! The reads of a reconcile as commands. Pure: what is sent is decided here, sending is done in [`super::run`].

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc};

use crate::request::Task;
use denormd_model::{
    field_path::{FieldPath, Segment},
    key::Key,
};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::{
    config::OnEmpty,
    plan::{
        Assignment, Groups, Rule, Values,
        expression::OfTarget,
        reference::{Pair, Role, dbref_parent},
    },
};

/// The collation of every comparison: a collection's own would make "A" and "a" one key.
#[must_use]
pub fn simple_collation() -> Document {
    doc! {"locale": "simple"}
}

/// Reads the sources of `keys`: rows `{ k: [match values], v: { v0: …, v1: … } }`, the winner of each key first; for
/// `collect` and `aggregate` one row per key, `{ k, v }` with `v.e` the elements or `v.v0…` the accumulated values.
#[must_use]
pub fn sources(rule: &Rule, keys: &[&Key]) -> Document {
    let first = first_of_each(rule, keys).filter(|_| !reads_in_reverse(rule));
    first.unwrap_or_else(|| sources_at_once(rule, keys))
}

/// Like [`sources`], but in one pass for any rule: used while there is no index yet.
#[must_use]
pub fn sources_at_once(rule: &Rule, keys: &[&Key]) -> Document {
    command(&rule.source.namespace.collection, stages(rule, keys, Order::OfTheRule))
}

/// A cheaper read of the same rows. A row with `w: false` may be wrong; [`sources`] reads it right. None if the rule has
/// no such read.
///
/// - Sums and means, without sorting the sources: a read then costs two thirds, or half for few keys with many sources.
///   The order affects the last digits unless all numbers are whole.
/// - The last N of an order, as the first N of the opposite one. There, an array counts with its other extreme, which
///   never places it further back. So if none of the N has an array, no source with an array was left out.
#[must_use]
pub fn sources_by_shortcut(rule: &Rule, keys: &[&Key]) -> Option<Document> {
    match &rule.values {
        Values::Aggregate { assignments, .. } => {
            let may = |assignment: &Assignment| !needs_order(assignment) || is_sum(&assignment.expression);
            let may = assignments.iter().all(may) && assignments.iter().any(needs_order);
            may.then(|| command(&rule.source.namespace.collection, stages(rule, keys, Order::Any)))
        }
        Values::Collect { .. } => first_of_each(rule, keys).filter(|_| reads_in_reverse(rule)),
        _ => None,
    }
}

/// True if the rule keeps the last N, and a path of its order may lead to an array.
fn reads_in_reverse(rule: &Rule) -> bool {
    let is_last = matches!(rule.values, Values::Collect { slice: Some(slice), .. } if slice < 0);
    is_last && rule.sort.iter().any(|(path, _)| path != "_id")
}

/// An expression that is true if a path of the rule's order leads to or through an array.
fn has_array(rule: &Rule) -> Document {
    let paths = rule.sort.iter().map(|(path, _)| path.as_str());
    let ways = paths.flat_map(|path| path.match_indices('.').map(|(end, _)| &path[..end]).chain([path]));
    doc! {"$or": ways.map(|path| Bson::from(doc! {"$isArray": [format!("${path}")]})).collect::<Vec<_>>()}
}

/// Largest whole number up to which a double is exact: 2^53.
const WHOLE: i64 = 1 << 53;

/// The order in which sources are gathered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The rule's order, ties by `_id`: always the same.
    OfTheRule,
    /// The order in which the server finds them.
    Any,
}

/// A field that no document has and no index holds. If an index holds all fields that a read needs, the server does not fetch the
/// documents, and reads null where a field is missing (6.0.5, 7.0.28). A read that also needs this field fetches them.
pub const UNINDEXED: &str = "__denormd_unindexed";

/// A condition that every source meets; it makes the server fetch the documents. None if null and a missing field give the same values: an
/// index alone may then answer, in half the time.
fn fetched(rule: &Rule) -> Option<Document> {
    let is_same = |accumulator: &Bson| {
        let skips_both = matches!(operator(accumulator), "$sum" | "$avg" | "$min" | "$max");
        let is_field =
            matches!(operand(accumulator), Bson::String(path) if path.starts_with('$') && !path.starts_with("$$"));
        operator(accumulator) == "$count" || skips_both && (is_field || operand(accumulator).as_i32().is_some())
    };
    let is_same = match &rule.values {
        Values::Aggregate { assignments, .. } => assignments.iter().flat_map(Assignment::accumulators).all(is_same),
        _ => false,
    };
    (!is_same).then(|| doc! {UNINDEXED: {"$exists": false}})
}

fn stages(rule: &Rule, keys: &[&Key], gathered: Order) -> Vec<Document> {
    let mut stages = vec![doc! {"$match": source_match(rule, keys)}];
    stages.extend(fetched(rule).map(|condition| doc! {"$match": condition}));
    match &rule.reference.source_each {
        Some(each) => stages.extend(unwind(rule, each, in_elements(rule, each, keys))),
        None => stages.extend(in_intervals(rule, keys).map(|condition| doc! {"$match": condition})),
    }
    // Grouped by a mere field, MongoDB 6.0.5 makes the key MaxKey the document `{"": MaxKey}`.
    let edges = keys.iter().flat_map(|key| key.values()).any(|v| matches!(v, Bson::MinKey | Bson::MaxKey));
    stages.extend(rows(rule, gathered, edges, RowOf::OneKey));
    stages
}

/// The stages that find the keys of all sources: rows `{ k: [match values] }`.
pub(crate) fn all_keys(rule: &Rule) -> Vec<Document> {
    let mut stages: Vec<Document> = rule.source.filter.iter().map(|filter| doc! {"$match": filter.clone()}).collect();
    if let Some(each) = &rule.reference.source_each {
        stages.extend(unwind(rule, each, vec![doc! {}]));
    }
    stages.push(doc! {"$group": {"_id": row_keys(rule)}});
    stages.push(doc! {"$replaceWith": {"k": "$_id"}});
    stages
}

/// Finds out which of these keys have sources: rows `{ k: [match values] }`.
#[must_use]
pub fn keys_with_sources(rule: &Rule, keys: &[&Key]) -> Document {
    let element = rule.reference.source_each.as_ref();
    let mut stages = vec![doc! {"$match": source_match(rule, keys)}];
    if let Some(each) = element {
        stages.extend(unwind(rule, each, in_elements(rule, each, keys)));
    }
    stages.push(doc! {"$group": {"_id": row_keys(rule)}});
    stages.push(doc! {"$replaceWith": {"k": "$_id"}});
    command(&rule.source.namespace.collection, stages)
}

/// The stages that find the sources of a target in a `$lookup` whose variables are `keys`, `target` and
/// `targetElement`: the documents, or their unwound elements.
pub(super) fn sources_of_pair(rule: &Rule) -> Vec<Document> {
    let each = rule.reference.source_each.as_ref();
    let key: Vec<Bson> = rule.reference.paths(Role::Source).map(|path| row_path(path, each)).collect();
    let has_key = doc! {"$expr": {"$in": [key, "$$keys"]}};
    let mut clauses: Vec<Document> = rule.source.filter.clone().into_iter().collect();
    let mut stages = Vec::new();
    if let Some(each) = each {
        stages.extend(Some(doc! {"$match": {"$and": clauses.clone()}}).filter(|_| !clauses.is_empty()));
        stages.extend(unwind(rule, each, vec![has_key]));
    } else {
        let parents = rule.reference.paths(Role::Source).filter_map(dbref_parent);
        clauses.extend(parents.map(|parent| names_target(rule, &parent)));
        match rule.reference.pairs.as_slice() {
            // The lookup itself compares one value, but it also looks into arrays. Comparing the key once more takes
            // longer.
            [pair] => {
                clauses.extend(no_arrays(&pair.source.query()));
                // A slot without keys must not find what it searches for.
                clauses.extend(values_without_source(rule).map(|_| doc! {"$expr": {"$ne": ["$$keys", []]}}));
            }
            _ => clauses.push(has_key),
        }
        // An index of several paths is found by an equality on each, where a target has one key.
        let one_key = rule.by_reference() || rule.reference.target_each.is_none();
        for (nth, path) in rule.reference.paths(Role::Source).enumerate().skip(1).filter(|_| one_key) {
            let variable = format!("$${}", variable_of_path(nth));
            clauses.push(doc! {"$expr": {"$eq": [format!("${}", path.query()), variable]}});
        }
        stages.extend(Some(doc! {"$match": {"$and": clauses.clone()}}).filter(|_| !clauses.is_empty()));
    }
    if let Some(condition) = &rule.pair_filter {
        stages.push(doc! {"$match": {"$expr": bind(condition.clone(), each)}});
    }
    stages.extend(fetched(rule).map(|condition| doc! {"$match": condition}));
    stages
}

/// The variable in such a `$lookup` that has the key's value for the `nth` path of `match`.
pub(super) fn variable_of_path(nth: usize) -> String {
    format!("key{nth}")
}

/// The stages that follow: one row `{ k, v }` at most, with the values of the target.
pub(super) fn row_of_pair(rule: &Rule) -> Vec<Document> {
    let mut stages = rows(rule, Order::OfTheRule, true, RowOf::AllKeys);
    if matches!(rule.values, Values::Set { .. } | Values::Into { .. }) {
        stages.push(doc! {"$limit": 1});
    }
    stages
}

/// The sources that one row is gathered from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowOf {
    /// Those of one key.
    OneKey,
    /// All that were found: those of a target's set of keys.
    AllKeys,
}

/// The field that holds the target that a row is for. It shadows a field of the same name in the source.
const TARGET: &str = "__denormd_target";

/// Reads copied values for targets with one key each, from each source once: rows `{ k, v }` for the targets
/// `{ k, t: target }` of each key that has a source. `settle` replaces values of the sources before they are used.
pub(super) fn sources_of_targets(
    rule: &Rule,
    targets: BTreeMap<&Key, Vec<Document>>,
    settle: Option<Document>,
) -> Document {
    let (keys, mut targets): (Vec<&Key>, Vec<Vec<Document>>) = targets.into_iter().unzip();
    let row_key = row_keys(rule);
    let mut stages = vec![doc! {"$match": source_match(rule, &keys)}];
    stages.extend(fetched(rule).map(|condition| doc! {"$match": condition}));
    stages.extend(without_arrays(&rule.values, &row_key));
    stages.extend(settle);
    if !rule.reference.keyed_by_source_id() {
        stages.extend(winners_first(rule));
        stages.push(doc! {"$group": {"_id": row_key.clone(), "d": {"$first": "$$ROOT"}}});
        stages.push(doc! {"$replaceWith": "$d"});
    }
    // The place of a source that matches no key is -1, which is that of the last element.
    targets.push(Vec::new());
    let keys: Vec<&[Bson]> = keys.into_iter().map(Key::values).collect();
    let place = doc! {"$indexOfArray": [{"$literal": keys}, row_key]};
    let assignments = if let Values::Set { assignments, .. } = &rule.values { assignments.as_slice() } else { &[] };
    let values = without_fields(fields(assignments), &[TARGET.to_owned()]);
    let values = doc! {"$let": {"vars": {"target": format!("${TARGET}.t")}, "in": values}};
    stages.extend([
        doc! {"$set": {TARGET: {"$arrayElemAt": [{"$literal": targets}, place]}}},
        doc! {"$unwind": format!("${TARGET}")},
        doc! {"$replaceWith": {"k": format!("${TARGET}.k"), "v": values}},
    ]);
    command(&rule.source.namespace.collection, stages)
}

/// The stages from the sources of keys to rows.
fn rows(rule: &Rule, gathered: Order, edges: bool, of: RowOf) -> Vec<Document> {
    let mut stages = Vec::new();
    let element = rule.reference.source_each.as_ref();
    // Operands and filters of rows may use the element.
    let bound =
        |assignments: &[Assignment]| assignments.iter().map(|one| with_element(one, element)).collect::<Vec<_>>();
    let row_key = row_keys(rule);
    stages.extend(without_arrays(&rule.values, &row_key));
    let row_key = if of != RowOf::OneKey && rule.gathers() { Vec::new() } else { row_key };
    match &rule.values {
        Values::Set { assignments, .. } => {
            stages.extend(winners_first(rule));
            stages.push(row(&row_key, &bind(fields(assignments), element)));
        }
        Values::Into { element: value, .. } => {
            stages.extend(winners_first(rule));
            stages.push(row(&row_key, &bind(doc! {"e": value.clone()}.into(), element)));
        }
        Values::Collect { element: value, slice, .. } => {
            stages.extend(collect(rule, row_key, bind(doc! {"e": value.clone()}.into(), element), *slice));
        }
        Values::Aggregate { assignments, .. } => {
            stages.extend(aggregate(rule, row_key, &bound(assignments), gathered, edges));
        }
        Values::Groups(values) => {
            let by = values.by.iter().map(|(name, value)| (name.clone(), bind(value.clone(), element))).collect();
            let values = Groups { by, fields: bound(&values.fields), ..values.clone() };
            stages.extend(groups(rule, &row_key, &values));
        }
    }
    stages
}

/// An `aggregate` command on a collection, or 1 for none.
pub(crate) fn command(collection: impl Into<Bson>, stages: Vec<Document>) -> Document {
    let collection: Bson = collection.into();
    doc! {"aggregate": collection, "pipeline": stages, "cursor": {"batchSize": 10_000}, "collation": simple_collation(), "allowDiskUse": true}
}

/// The stage that drops the sources whose key has an array, where their values must not be computed.
fn without_arrays(values: &Values, row_key: &[Bson]) -> Option<Document> {
    let paths = row_key.iter().filter_map(Bson::as_str).map(|path| path.trim_start_matches('$'));
    let clauses: Vec<Document> = paths.filter(|_| may_fail(values)).flat_map(no_arrays).collect();
    Some(doc! {"$match": {"$and": clauses.clone()}}).filter(|_| !clauses.is_empty())
}

/// The condition that leaves out sources in other intervals than those of `keys`. Nothing may be computed from them, and the range of dates
/// that finds sources may be wider.
fn in_intervals(rule: &Rule, keys: &[&Key]) -> Option<Document> {
    let computes = may_fail(&rule.values) || rule.row_filter.is_some() || rule.sort.len() > 1;
    let keys: Vec<&[Bson]> = keys.iter().map(|key| key.values()).collect();
    let is_wanted = doc! {"$in": [row_keys(rule), {"$literal": keys}]};
    (rule.reference.has_buckets() && computes).then(|| doc! {"$expr": is_wanted})
}

/// True if the server may refuse to compute the values of a source, because they contain an operator that may fail. A query also
/// finds sources that hold a key inside an array. Such a source matches no key, and must not make the others fail.
fn may_fail(values: &Values) -> bool {
    fn has_operator(expression: &Bson) -> bool {
        match expression {
            Bson::Document(doc) => {
                doc.iter().any(|(name, value)| name != "$literal" && (name.starts_with('$') || has_operator(value)))
            }
            Bson::Array(items) => items.iter().any(has_operator),
            _ => false,
        }
    }
    /// `$mergeObjects` fails on a value that is not a document, and a sort by two paths on two arrays.
    fn any_fails(assignments: &[Assignment]) -> bool {
        let fails = |accumulator: &Bson| {
            matches!(operator(accumulator), "$mergeObjects" | "$top" | "$topN" | "$bottom" | "$bottomN")
                || has_operator(&operand(accumulator))
        };
        assignments.iter().flat_map(Assignment::accumulators).any(fails)
    }
    match values {
        Values::Set { assignments, .. } => assignments.iter().any(|assignment| has_operator(&assignment.expression)),
        Values::Into { element, .. } | Values::Collect { element, .. } => has_operator(element),
        Values::Aggregate { assignments, .. } => any_fails(assignments),
        Values::Groups(values) => values.by.iter().any(|(_, value)| has_operator(value)) || any_fails(&values.fields),
    }
}

fn row(key: &[Bson], values: &Bson) -> Document {
    doc! {"$replaceWith": {"k": key, "v": values.clone()}}
}

fn fields(assignments: &[Assignment]) -> Bson {
    let values: Document =
        assignments.iter().enumerate().map(|(n, a)| (format!("v{n}"), a.expression.clone())).collect();
    Bson::Document(values)
}

/// Binds our own variable `$$element` to the unwound element, and removes that element from the whole document.
fn bind(expression: Bson, element: Option<&FieldPath>) -> Bson {
    match element {
        Some(each) => {
            let ours: Vec<String> = indexes(each).chain([ELEMENT.to_owned()]).collect();
            let expression = without_fields(expression, &ours);
            doc! {"$let": {"vars": {"element": format!("${ELEMENT}")}, "in": expression}}.into()
        }
        None => expression,
    }
}

/// Binds `$$element` in the accumulators of a value.
fn with_element(assignment: &Assignment, element: Option<&FieldPath>) -> Assignment {
    let accumulator = |accumulator: &Bson| -> Bson {
        let Some((operator, operand)) = accumulator.as_document().and_then(|doc| doc.iter().next()) else {
            return accumulator.clone();
        };
        let operand = match (operator.as_str(), operand) {
            // `n` is a number, and `sortBy` has paths of the document.
            (
                "$top" | "$topN" | "$bottom" | "$bottomN" | "$firstN" | "$lastN" | "$maxN" | "$minN",
                Bson::Document(arguments),
            ) => {
                let bound = arguments.iter().map(|(name, value)| match name.as_str() {
                    "input" | "output" => (name.clone(), bind(value.clone(), element)),
                    _ => (name.clone(), value.clone()),
                });
                bound.collect::<Document>().into()
            }
            ("$count", operand) | (_, operand @ (Bson::Int32(_) | Bson::Int64(_))) => operand.clone(),
            (_, operand) => bind(operand.clone(), element),
        };
        doc! {operator: operand}.into()
    };
    let expression = match assignment.variables() {
        None => accumulator(&assignment.expression),
        Some((variables, expression)) => {
            let variables: Document =
                variables.iter().map(|(name, value)| (name.clone(), accumulator(value))).collect();
            doc! {"$let": {"vars": variables, "in": expression.clone()}}.into()
        }
    };
    Assignment { path: assignment.path.clone(), expression }
}

/// The expression over a whole document without these fields, which are ours.
fn without_fields(expression: Bson, ours: &[String]) -> Bson {
    match expression {
        Bson::String(text) if text == "$$ROOT" || text == "$$CURRENT" => {
            let without = |whole: Bson, field: &String| doc! {"$unsetField": {"field": field, "input": whole}}.into();
            ours.iter().fold(text.into(), without)
        }
        Bson::Array(items) => Bson::Array(items.into_iter().map(|item| without_fields(item, ours)).collect()),
        Bson::Document(doc) if doc.contains_key("$literal") => doc.into(),
        Bson::Document(doc) => {
            doc.into_iter().map(|(name, value)| (name, without_fields(value, ours))).collect::<Document>().into()
        }
        other => other,
    }
}

/// The field that holds the unwound element. It shadows a field of the same name in the document.
const ELEMENT: &str = "__denormd_element";
/// The fields that hold the indexes of the unwound element in its arrays, from the outermost on.
fn indexes(each: &FieldPath) -> impl Iterator<Item = String> + use<> {
    (0..each.to_string().matches("$[]").count()).map(|nth| format!("__denormd_index{nth}"))
}

/// Expressions of the match values in an unwound document.
fn row_keys(rule: &Rule) -> Vec<Bson> {
    let element = rule.reference.source_each.as_ref();
    let value = |pair: &Pair| match (row_path(&pair.source, element), &pair.bucket) {
        (Bson::String(field), Some(bucket)) => bucket.key_of(&field).into(),
        (field, _) => field,
    };
    rule.reference.pairs.iter().map(value).collect()
}

/// Path of a match value in an unwound document.
fn row_path(path: &FieldPath, element: Option<&FieldPath>) -> Bson {
    match element {
        Some(each) if path == each => format!("${ELEMENT}").into(),
        Some(each) => match path.below(each) {
            Some(_) => {
                let below = path.query();
                let below = below.strip_prefix(&format!("{}.", each.query())).unwrap_or(&below).to_owned();
                format!("${ELEMENT}.{below}").into()
            }
            None => format!("${}", path.query()).into(),
        },
        None => format!("${}", path.query()).into(),
    }
}

/// Conditions on an unwound element that contains one of the keys.
fn in_elements(rule: &Rule, each: &FieldPath, keys: &[&Key]) -> Vec<Document> {
    let mut wanted = Vec::new();
    for (nth, path) in rule.reference.paths(Role::Source).enumerate() {
        let Bson::String(field) = row_path(path, Some(each)) else { continue };
        let at = field.trim_start_matches('$');
        if at.starts_with(ELEMENT) {
            wanted.push(one_of(at, keys.iter().filter_map(|key| key.values().get(nth))));
        }
    }
    wanted.extend(in_intervals(rule, keys));
    wanted
}

/// One row for each element of the source's array that fulfils all of `wanted`; nested arrays one after the other.
fn unwind(rule: &Rule, each: &FieldPath, mut wanted: Vec<Document>) -> Vec<Document> {
    let text = each.to_string();
    let mut stages = Vec::new();
    let mut from = String::new();
    let mut indexes = indexes(each);
    for part in text.split(".$[]").filter(|part| !part.is_empty()) {
        let path = if from.is_empty() { format!("${part}") } else { format!("${ELEMENT}{part}") };
        // A non-array where an array is expected holds no reference, nor does an array around it.
        let parents = path.match_indices('.').map(|(end, _)| doc! {"$not": [{"$isArray": &path[..end]}]});
        let is_array: Vec<Document> = iter::once(doc! {"$isArray": &path}).chain(parents).collect();
        stages.push(doc! {"$set": {ELEMENT: {"$cond": [{"$and": is_array}, &path, []]}}});
        let path = format!("${ELEMENT}");
        stages.push(match indexes.next().filter(|_| orders_elements(rule)) {
            Some(index) => doc! {"$unwind": {"path": path, "includeArrayIndex": index}},
            None => doc! {"$unwind": path},
        });
        part.clone_into(&mut from);
    }
    let mut row_key = Vec::new();
    for path in rule.reference.paths(Role::Source) {
        let Bson::String(field) = row_path(path, Some(each)) else { continue };
        let at = field.trim_start_matches('$');
        if dbref_parent(path).is_some() {
            wanted.push(names_target(rule, at.trim_end_matches("$id")));
        }
        if rule.row_filter.is_some() {
            // An element whose key is in an array refers to nothing, and nothing may be computed from it.
            wanted.extend(no_arrays(at));
        }
        row_key.push(field);
    }
    stages.push(doc! {"$match": {"$and": wanted}});
    // Otherwise the server would move a condition on the source to the front, where it may fail for a source that has
    // no key at all.
    stages.push(doc! {"$limit": i64::MAX});
    if let Some(condition) = &rule.row_filter {
        stages.push(doc! {"$match": {"$expr": bind(condition.clone(), Some(each))}});
    }
    if rule.gathers() {
        return stages;
    }
    // One value is copied of a source that lists a key twice: by the first element.
    stages.push(doc! {"$group": {"_id": {"k": row_key, "s": "$_id"}, "d": {"$first": "$$ROOT"}}});
    stages.push(doc! {"$replaceWith": "$d"});
    stages
}

/// The sources that can answer one of the keys: a superset where several paths match, narrowed by the caller.
fn source_match(rule: &Rule, keys: &[&Key]) -> Document {
    let paths: Vec<String> = rule.reference.paths(Role::Source).map(FieldPath::query).collect();
    let clause = match paths.as_slice() {
        [path] if !rule.reference.has_buckets() => one_of(path, keys.iter().filter_map(|key| key.values().first())),
        _ => {
            let pairs = &rule.reference.pairs;
            let bucket = |nth: usize| pairs.get(nth).and_then(|pair| pair.bucket.as_ref());
            let plain: Vec<usize> = (0..paths.len()).filter(|nth| bucket(*nth).is_none()).collect();
            let all = together(keys, &plain).into_iter().map(|keys| {
                let conditions = paths.iter().enumerate().flat_map(|(nth, path)| match (bucket(nth), keys.first()) {
                    (Some(bucket), Some(first)) => {
                        first.values().get(nth).map_or_else(Vec::new, |v| bucket.range(path, v))
                    }
                    _ => vec![one_of_each(path, keys.iter().filter_map(|key| key.values().get(nth)))],
                });
                doc! {"$and": conditions.collect::<Vec<_>>()}
            });
            doc! {"$or": all.collect::<Vec<_>>()}
        }
    };
    let mut clauses = vec![clause];
    if rule.reference.source_each.is_none() {
        for parent in rule.reference.paths(Role::Source).filter_map(dbref_parent) {
            clauses.push(names_target(rule, &parent));
        }
    }
    clauses.extend(rule.source.filter.clone());
    doc! {"$and": clauses}
}

/// Reads the `_id`s and reference fields of the sources that can answer one of the keys, the winner of each key first.
#[must_use]
pub fn source_ids(rule: &Rule, keys: &[&Key], limit: i64) -> Document {
    let mut projection = rule.reference.projection(Role::Source);
    projection.insert("_id", 1);
    doc! {
        "find": &rule.source.namespace.collection, "filter": source_match(rule, keys), "projection": projection,
        "sort": order(rule), "limit": limit, "batchSize": 10_000, "collation": simple_collation(), "allowDiskUse": true,
    }
}

/// The DBRef at `parent` (with its dot) names the target.
fn names_target(rule: &Rule, parent: &str) -> Document {
    let (collection, database) = rule.reference.other(Role::Source);
    doc! {format!("{parent}$ref"): collection, format!("{parent}$db"): {"$in": [database, Bson::Null]}}
}

/// `path` equals one of `values`. Inside `$in` a regular expression would be used as a pattern, and a document that begins
/// with a `$` name is refused; inside `$eq` both are values. `$id`, in an element that is a DBRef, takes nothing but a value.
#[must_use]
pub fn one_of<'a>(path: &str, values: impl Iterator<Item = &'a Bson>) -> Document {
    let alone = |value: &&Bson| match value {
        Bson::RegularExpression(_) => true,
        Bson::Document(doc) => doc.keys().next().is_some_and(|name| name.starts_with('$')),
        _ => false,
    };
    if path == "$id" {
        let any: Vec<Document> = values.map(|value| doc! {path: value.clone()}).collect();
        return if any.is_empty() {
            doc! {"$nor": [{}]}
        } else {
            doc! {"$or": any}
        };
    }
    let (patterns, plain): (Vec<&Bson>, Vec<&Bson>) = values.partition(alone);
    let plain: Vec<Bson> = plain.into_iter().cloned().collect();
    if patterns.is_empty() {
        return doc! {path: {"$in": plain}};
    }
    let mut any = vec![doc! {path: {"$in": plain}}];
    any.extend(patterns.into_iter().map(|pattern| doc! {path: {"$eq": pattern.clone()}}));
    doc! {"$or": any}
}

/// The same for values of which some may be equal.
fn one_of_each<'a>(path: &str, values: impl Iterator<Item = &'a Bson>) -> Document {
    let different: BTreeSet<Key> = values.map(|value| Key::one(value.clone())).collect();
    one_of(path, different.iter().filter_map(|key| key.values().first()))
}

/// Divides the keys into groups whose keys differ at one of `places` alone, so that one condition finds a whole group: the
/// server plans each of the alternatives of a query by itself, which takes it a millisecond. Of the places where they may
/// differ, chooses the one that gives the fewest groups.
fn together<'a>(keys: &[&'a Key], places: &[usize]) -> Vec<Vec<&'a Key>> {
    let by = |place: usize| {
        let mut groups: BTreeMap<Key, Vec<&'a Key>> = BTreeMap::new();
        for key in keys {
            let others = key.values().iter().enumerate().filter(|(nth, _)| *nth != place);
            groups.entry(Key::new(others.map(|(_, value)| value.clone()).collect())).or_default().push(key);
        }
        groups.into_values().collect::<Vec<_>>()
    };
    let fewest = places.iter().map(|place| by(*place)).min_by_key(Vec::len);
    fewest.unwrap_or_else(|| keys.iter().map(|key| vec![*key]).collect())
}

/// The rule's order, ties by `_id`.
#[must_use]
pub fn order(rule: &Rule) -> Document {
    let mut order: Document =
        rule.sort.iter().map(|(path, direction)| (path.clone(), Bson::Int32(*direction))).collect();
    if !order.contains_key("_id") {
        order.insert("_id", 1);
    }
    order
}

/// The order of rows: that of the sources, and of the elements in one source.
fn row_order(rule: &Rule) -> Document {
    let mut order = order(rule);
    let each = rule.reference.source_each.iter().filter(|_| orders_elements(rule));
    order.extend(each.flat_map(indexes).map(|index| (index, Bson::Int32(1))));
    order
}

/// True if the order of the elements in one source matters: they are gathered, or each has another key of one target.
fn orders_elements(rule: &Rule) -> bool {
    rule.gathers() || across_keys(rule)
}

/// True if the order of sources matters across keys: when a target has several references, the first source wins.
fn across_keys(rule: &Rule) -> bool {
    !rule.by_key && rule.reference.target_each.is_some() && matches!(rule.values, Values::Set { .. })
}

/// Sorts by the rule's order. That order is only needed within a key, so the sort begins with a match path that has one
/// value for all sources of a key: then only an index that also finds the keys can provide it. To sort by `_id` alone,
/// the server would scan the whole collection.
fn sorted(rule: &Rule) -> Vec<Document> {
    let reference = &rule.reference;
    if across_keys(rule) || reference.source_each.is_some() {
        return vec![doc! {"$sort": row_order(rule)}];
    }
    // The sources of a bucket have different dates.
    let Some(path) = reference.pairs.iter().find(|pair| pair.bucket.is_none()).map(|pair| pair.source.query()) else {
        // The server finds the sources before it sorts them, because a sort does not move across a limit.
        return vec![doc! {"$limit": i64::MAX}, doc! {"$sort": row_order(rule)}];
    };
    let mut stages = Vec::new();
    let clauses = no_arrays(&path);
    // The server cannot sort by two arrays; no key has an array as its value.
    if !rule.sort.is_empty() && !clauses.is_empty() {
        stages.push(doc! {"$match": {"$and": clauses}});
    }
    let mut sort = doc! {path: 1};
    for (path, way) in order(rule) {
        sort.entry(path).or_insert(way);
    }
    stages.push(doc! {"$sort": sort});
    stages
}

/// Conditions on a document that neither the value at `path` nor any of its parents is an array.
fn no_arrays(path: &str) -> Vec<Document> {
    let ways = path.match_indices('.').map(|(end, _)| &path[..end]).chain([path]);
    ways.filter(|path| *path != "_id").map(|path| doc! {path: {"$not": {"$type": "array"}}}).collect()
}

/// The winner of each key first. A source found by its `_id` has no rival, unless a target has several references.
fn winners_first(rule: &Rule) -> Vec<Document> {
    let rivals = !rule.reference.keyed_by_source_id() || across_keys(rule);
    if rivals { sorted(rule) } else { Vec::new() }
}

fn collect(rule: &Rule, key: Vec<Bson>, element: Bson, slice: Option<i64>) -> Vec<Document> {
    // `$topN` orders arrays differently from `$sort`, and differently in each version of the server.
    let elements = match slice {
        Some(n) if n < 0 => doc! {"$lastN": {"n": n.saturating_neg(), "input": element.clone()}},
        Some(n) => doc! {"$firstN": {"n": n, "input": element.clone()}},
        None => doc! {"$push": element.clone()},
    };
    let mut stages = Vec::new();
    if may_be_missing(rule) {
        if must_not_see_excluded(rule) {
            stages.push(doc! {"$limit": i64::MAX});
        }
        stages.push(doc! {"$match": {"$expr": {"$ne": [element, {}]}}});
    }
    stages.extend(sorted(rule));
    stages.push(doc! {"$group": {"_id": key, "e": elements}});
    stages.push(doc! {"$replaceWith": {"k": "$_id", "v": {"e": "$e"}}});
    stages
}

/// Reads the first (or last) N sources of each key by one limited lookup per key: with an index on match, sort and `_id` it
/// reads N documents where a `$group` reads all of the key's. None where the form of the rule or of a key does not allow it.
fn first_of_each(rule: &Rule, keys: &[&Key]) -> Option<Document> {
    let (Values::Collect { element, slice: Some(slice), .. }, [pair], None) =
        (&rule.values, rule.reference.pairs.as_slice(), &rule.reference.source_each)
    else {
        return None;
    };
    let values: Vec<&Bson> = keys.iter().filter_map(|key| key.values().first()).collect();
    let plain = |value: &&Bson| !matches!(value, Bson::RegularExpression(_) | Bson::Document(_));
    if dbref_parent(&pair.source).is_some() || !values.iter().all(plain) || must_not_see_excluded(rule) {
        return None;
    }
    // `$lookup` looks into arrays; a path without `$[]` does not.
    let path = pair.source.query();
    let mut clauses = no_arrays(&path);
    clauses.extend(rule.source.filter.clone());
    clauses.extend(fetched(rule));
    let element = doc! {"e": element.clone()};
    if may_be_missing(rule) {
        clauses.push(doc! {"$expr": {"$ne": [element.clone(), {}]}});
    }
    let turn = if *slice < 0 { -1 } else { 1 };
    let order: Document =
        order(rule).into_iter().map(|(path, way)| (path, Bson::Int32(turn * way.as_i32().unwrap_or(1)))).collect();
    let mut inner =
        vec![doc! {"$match": {"$and": clauses}}, doc! {"$sort": order}, doc! {"$limit": slice.saturating_abs()}];
    let mut row = doc! {"k": ["$k"], "v": {"e": elements_of(*slice)}};
    let element = if reads_in_reverse(rule) {
        row.insert("w", doc! {"$not": [{"$in": [true, "$e.a"]}]});
        doc! {"$mergeObjects": [element, {"a": has_array(rule)}]}
    } else {
        element
    };
    inner.push(doc! {"$replaceWith": element});
    let wanted: Vec<Document> = values.into_iter().map(|value| doc! {"k": {"$literal": value.clone()}}).collect();
    let stages = vec![
        doc! {"$documents": wanted},
        doc! {"$lookup": {"from": &rule.source.namespace.collection, "localField": "k", "foreignField": path, "pipeline": inner, "as": "e"}},
        // A lookup also returns a row for a key without sources.
        doc! {"$match": {"e": {"$ne": []}}},
        doc! {"$replaceWith": row},
    ];
    Some(command(1, stages))
}

/// The elements that a lookup has found, in the rule's order.
fn elements_of(slice: i64) -> Bson {
    if slice < 0 { doc! {"$reverseArray": "$e"}.into() } else { "$e".into() }
}

/// True if an element's expression can yield no value; such an element does not count for the slice.
fn may_be_missing(rule: &Rule) -> bool {
    match &rule.values {
        Values::Collect { element: Bson::Document(doc), .. } => doc.keys().any(|name| name.starts_with('$')),
        Values::Collect { element: Bson::String(path), .. } => path != "$_id" && path != "$$ROOT",
        _ => false,
    }
}

/// True if computing an element may fail for a source that `where` excludes. The server merges consecutive conditions and
/// may evaluate a `$expr` comparison last, but it moves no condition across a `$limit`.
fn must_not_see_excluded(rule: &Rule) -> bool {
    fn has_expression(filter: &Document) -> bool {
        filter.iter().any(|(name, value)| match value {
            _ if name == "$expr" => true,
            Bson::Document(inner) => has_expression(inner),
            Bson::Array(items) => items.iter().filter_map(Bson::as_document).any(has_expression),
            _ => false,
        })
    }
    let has_condition = rule.pair_filter.is_some() || rule.row_filter.is_some();
    may_fail(&rule.values) && (has_condition || rule.source.filter.as_ref().is_some_and(has_expression))
}

fn aggregate(
    rule: &Rule,
    key: Vec<Bson>,
    assignments: &[Assignment],
    gathered: Order,
    as_array: bool,
) -> Vec<Document> {
    let in_order = gathered == Order::OfTheRule && assignments.iter().any(needs_order);
    // An array of one value costs more than the value. But by a mere field the server groups in its other engine
    // (6.0.5), whose means of large numbers differ in the last digit, and whose `$min` and `$max` keep another one of
    // equal values.
    let mut accumulators = assignments.iter().flat_map(Assignment::accumulators);
    let same = accumulators.all(|accumulator| matches!(operator(accumulator), "$sum" | "$count"));
    let (id, key) = match key.as_slice() {
        [field] if same && !in_order && !as_array => (field.clone(), vec![Bson::from("$_id")].into()),
        _ => (key.into(), Bson::from("$_id")),
    };
    let mut group = doc! {"_id": id};
    let mut out = Document::new();
    let mut whole: Vec<Bson> = Vec::new();
    for (n, assignment) in assignments.iter().enumerate() {
        if gathered == Order::Any && needs_order(assignment) {
            whole.push(whole_numbers(&mut group, n, &assignment.expression));
        }
        out.insert(format!("v{n}"), result(&mut group, n, assignment));
    }
    let mut stages = Vec::new();
    if in_order {
        stages.extend(sorted(rule));
    }
    stages.push(doc! {"$group": group});
    let mut row = doc! {"k": key, "v": out};
    if gathered == Order::Any {
        row.insert("w", doc! {"$and": whole});
    }
    stages.push(doc! {"$replaceWith": row});
    stages
}

/// One row a key with all its groups in their order: `v.e` is an array of `{ b: fields of by, v: accumulated fields }`.
fn groups(rule: &Rule, key: &[Bson], groups: &Groups) -> Vec<Document> {
    // `$group` tells missing from null.
    let by: Document =
        groups.by.iter().map(|(name, value)| (name.clone(), doc! {"$ifNull": [value.clone(), null]}.into())).collect();
    // The values of a group come from its first source.
    let mut group = doc! {"_id": {"k": key, "b": by.clone()}, "b": {"$first": by}};
    let mut fields = Document::new();
    for (n, field) in groups.fields.iter().enumerate() {
        fields.insert(field.path.root(), result(&mut group, n, field));
    }
    let place = |path: &str| {
        let root = path.split('.').next().unwrap_or_default();
        let part = if groups.by.iter().any(|(name, _)| name == root) { "b" } else { "v" };
        format!("{part}.{path}")
    };
    let mut order: Document = groups.sort.iter().map(|(path, way)| (place(path), Bson::Int32(*way))).collect();
    // No two groups are equal in all values of `by`.
    order.insert("b", 1);
    let mut ordered = doc! {"$sortArray": {"input": "$e", "sortBy": order}};
    if let Some(slice) = groups.slice {
        ordered = doc! {"$slice": [ordered, slice]};
    }
    let mut stages = sorted(rule);
    stages.extend([
        doc! {"$group": group},
        doc! {"$group": {"_id": {"k": "$_id.k"}, "e": {"$push": {"b": "$b", "v": fields}}}},
        doc! {"$replaceWith": {"k": "$_id.k", "v": {"e": ordered}}},
    ]);
    stages
}

/// Adds the accumulators of the `nth` value to the group; returns the expression for the value.
fn result(group: &mut Document, nth: usize, assignment: &Assignment) -> Bson {
    let Some((variables, expression)) = assignment.variables() else {
        return accumulated(group, format!("v{nth}"), &assignment.expression);
    };
    // A variable of several values is accumulated once.
    let bind =
        |(name, accumulator): (&String, &Bson)| (name.clone(), accumulated(group, format!("let_{name}"), accumulator));
    let bound: Document = variables.iter().map(bind).collect();
    doc! {"$let": {"vars": bound, "in": expression.clone()}}.into()
}

/// Adds an accumulator to the group under a name; returns the expression for its result.
fn accumulated(group: &mut Document, name: String, accumulator: &Bson) -> Bson {
    let result = format!("${name}");
    group.insert(name, accumulator.clone());
    if operator(accumulator) == "$addToSet" {
        return doc! {"$sortArray": {"input": result, "sortBy": 1}}.into();
    }
    result.into()
}

/// Computes the values of a key without sources: one row `{ k: [], v }`. None for rules whose values for it are known.
#[must_use]
pub fn no_input(rule: &Rule) -> Option<Document> {
    let values = values_without_source(rule).filter(|_| rule.of_target.is_none())?;
    let stages = vec![doc! {"$documents": [{}]}, doc! {"$replaceWith": {"k": [], "v": values}}];
    Some(command(1, stages))
}

/// The expressions for the values of a key without sources, if only a server can compute them.
#[must_use]
pub fn values_without_source(rule: &Rule) -> Option<Document> {
    let values = match &rule.values {
        Values::Set { otherwise: Some(values), .. } => values.clone(),
        Values::Aggregate { assignments, on_empty: OnEmpty::Value | OnEmpty::Keep } => {
            assignments.iter().find_map(Assignment::variables)?;
            assignments.iter().map(|one| Some(without_input(one))).collect()
        }
        _ => return None,
    };
    let named = values.into_iter().enumerate().filter_map(|(n, value)| Some((format!("v{n}"), value?)));
    Some(named.collect())
}

/// The expression of an accumulated value over no sources.
fn without_input(assignment: &Assignment) -> Bson {
    let empty = |accumulator: &Bson| Bson::from(doc! {"$literal": no_input_of(accumulator)});
    let Some((variables, expression)) = assignment.variables() else { return empty(&assignment.expression) };
    // Not a constant: later servers inline constants, and evaluate branches that are not taken, such as 0 / 0.
    let variable = |accumulator: &Bson| Bson::from(doc! {"$ifNull": ["$__denormd_nothing", empty(accumulator)]});
    let bound: Document = variables.iter().map(|(name, accumulator)| (name.clone(), variable(accumulator))).collect();
    doc! {"$let": {"vars": bound, "in": expression.clone()}}.into()
}

/// The value where `$group` returns no row: `[]` for accumulators that build arrays, 0 for those that count, null for
/// others.
#[must_use]
pub fn no_input_of(accumulator: &Bson) -> Bson {
    match operator(accumulator) {
        "$sum" | "$count" => Bson::Int32(0),
        "$push" | "$addToSet" | "$firstN" | "$lastN" | "$topN" | "$bottomN" | "$minN" | "$maxN" => {
            Bson::Array(Vec::new())
        }
        _ => Bson::Null,
    }
}

/// An expression that is true if the order does not affect the `nth` value, a sum or a mean. Adds the accumulators that
/// it needs to the group.
fn whole_numbers(group: &mut Document, nth: usize, accumulator: &Bson) -> Bson {
    let is_of = |name: &str, types: &[&str]| doc! {"$in": [{"$type": format!("${name}")}, types]}.into();
    // A sum is a double or a decimal if one of its numbers is, or if it is too large.
    let is_whole = |name: &str| is_of(name, &["int", "long"]);
    if operator(accumulator) == "$sum" {
        return is_whole(&format!("v{nth}"));
    }
    // A mean of whole numbers is exact if the largest one times their count still fits into a double. The types of the smallest
    // and the largest number do not determine the others: 0, 8.76, 100. Without any number it is null.
    let [sum, least, most, count] = ["sum", "least", "most", "count"].map(|name| format!("{name}{nth}"));
    let largest = doc! {"$max": [format!("${most}"), {"$multiply": [-1, format!("${least}")]}]};
    let bounded = doc! {"$lte": [{"$multiply": [largest, format!("${count}")]}, WHOLE]};
    let types = ["int", "long", "null"];
    let whole: [Bson; 3] = [is_whole(&sum), is_of(&least, &types), is_of(&most, &types)];
    // Other values cannot be multiplied.
    let exact = doc! {"$cond": [{"$and": whole.to_vec()}, bounded, false]};
    let value = operand(accumulator);
    group.extend(doc! {sum: {"$sum": value.clone()}, count: {"$sum": 1}});
    group.extend(doc! {least: {"$min": value.clone()}, most: {"$max": value}});
    exact.into()
}

fn operator(accumulator: &Bson) -> &str {
    let operator = accumulator.as_document().and_then(|doc| doc.keys().next());
    operator.map(String::as_str).unwrap_or_default()
}

/// The operand of an accumulator.
fn operand(accumulator: &Bson) -> Bson {
    let operand = accumulator.as_document().and_then(|doc| doc.values().next());
    operand.cloned().unwrap_or(Bson::Null)
}

/// True if the order of sources affects the value. This includes `$min`, `$max` and `$addToSet`: the order decides
/// whether they keep 1 or 1.0.
fn needs_order(assignment: &Assignment) -> bool {
    assignment.accumulators().any(|accumulator| match operator(accumulator) {
        "$count" => false,
        "$sum" => !matches!(operand(accumulator), Bson::Int32(_) | Bson::Int64(_)),
        _ => true,
    })
}

fn is_sum(accumulator: &Bson) -> bool {
    matches!(operator(accumulator), "$sum" | "$avg")
}

/// Reads documents of one side by `_id`, with the fields that its references are in.
#[must_use]
pub fn by_id(rule: &Rule, role: Role, ids: &[&Key]) -> Document {
    let side = rule.side(role);
    let ids: Vec<Bson> = ids.iter().filter_map(|key| key.values().first().cloned()).collect();
    doc! {"find": &side.namespace.collection, "filter": {"_id": {"$in": ids}}, "projection": rule.reference.projection(role), "batchSize": 10_000, "collation": simple_collation()}
}

/// Reads the size of targets: one row `{ bytes, others }` from a small random sample, or none.
#[must_use]
pub fn target_size(rule: &Rule) -> Document {
    let owned: Vec<String> = rule.owned().iter().map(|path| format!("rest.{}", path.query())).collect();
    let stages = vec![
        doc! {"$sample": {"size": 20}},
        doc! {"$replaceWith": {"bytes": {"$bsonSize": "$$ROOT"}, "rest": "$$ROOT"}},
        doc! {"$unset": owned},
        doc! {"$group": {"_id": null, "bytes": {"$avg": "$bytes"}, "others": {"$min": {"$bsonSize": "$rest"}}}},
    ];
    let mut command = command(&rule.target.namespace.collection, stages);
    // A small collection of huge documents is read as a whole.
    command.insert("maxTimeMS", 1000);
    command
}

/// Takes a random sample of `size` documents, and reads the `_id`s of the targets of `key` in it that match `rest`, in
/// order.
#[must_use]
pub fn some_of_rest(rule: &Rule, key: &Key, rest: Option<&Document>, size: i32) -> Document {
    let wanted = both(holders_filter(rule, &[key]), rest);
    let stages = vec![
        doc! {"$sample": {"size": size}},
        doc! {"$match": wanted},
        doc! {"$sort": {"_id": 1}},
        doc! {"$project": {"_id": 1}},
    ];
    command(&rule.target.namespace.collection, stages)
}

/// Reads targets by `_id` for a rule that is keyed by them: rows of reference fields and the guard, which
/// must be unchanged when [`super::statement`] writes.
#[must_use]
pub fn targets(rule: &Rule, ids: &[&Key]) -> Document {
    let ids: Vec<Bson> = ids.iter().filter_map(|key| key.values().first().cloned()).collect();
    let mut filter = doc! {"_id": {"$in": ids}};
    if let Some(target_filter) = &rule.target.filter {
        filter = doc! {"$and": [filter, target_filter.clone()]};
    }
    let stages = vec![
        doc! {"$match": filter},
        doc! {"$set": {GUARD: guard_expression(rule)}},
        doc! {"$project": fields_of_target(rule)},
    ];
    command(&rule.target.namespace.collection, stages)
}

/// A projection of the guard, the references, and what values are computed from. No path contains another.
fn fields_of_target(rule: &Rule) -> Document {
    let references = rule.reference.projection(Role::Target);
    let read = rule.of_target.iter().flat_map(OfTarget::all).map(FieldPath::query);
    // A projection inside an array leaves out elements that are no documents, and moves those after them.
    let whole = rule.reference.target_each.iter().filter(|_| rule.by_reference()).map(FieldPath::query);
    // In a tree, others wait for the documents that change.
    let owned = rule.owned().into_iter().filter(|_| rule.tree.is_some()).map(FieldPath::query);
    let paths: Vec<String> = references.keys().cloned().chain(read).chain(whole).chain(owned).collect();
    let inside = |path: &&String| paths.iter().any(|outer| path.starts_with(&format!("{outer}.")));
    let outermost = paths.iter().filter(|path| !inside(path));
    // A part of the `_id` does not identify the document.
    let whole_id = |path: &String| if path.starts_with("_id.") { "_id".to_owned() } else { path.clone() };
    let mut projection: Document = outermost.map(|path| (whole_id(path), Bson::Int32(1))).collect();
    projection.extend([(GUARD, 1), (UNINDEXED, 1)].map(|(name, shown)| (name.to_owned(), Bson::Int32(shown))));
    projection
}

/// The field of [`targets`]' rows that holds the guard.
pub const GUARD: &str = "__denormd_guard";

/// Everything that a target refers to, as one value: while it is unchanged, the values computed for the target are
/// correct.
#[must_use]
pub fn guard_expression(rule: &Rule) -> Document {
    let each = rule.reference.target_each.as_ref().filter(|_| rule.writes_by_index());
    let (mut guard, mut element) = (Document::new(), doc! {"t": {"$type": "$$e"}});
    for (nth, path) in rule.reference.paths(Role::Target).enumerate() {
        let (part, at) = place_of(path, each, (&mut guard, &mut element));
        part.insert(format!("p{nth}"), at.clone());
        if let Some(parent) = at.strip_suffix("$id") {
            part.insert(format!("r{nth}"), format!("{parent}$ref"));
            part.insert(format!("d{nth}"), format!("{parent}$db"));
        }
    }
    for (nth, path) in rule.of_target.iter().flat_map(OfTarget::all).enumerate() {
        let (part, at) = place_of(path, each, (&mut guard, &mut element));
        part.insert(format!("v{nth}"), at);
    }
    if let Some(each) = each {
        // The elements are told apart by their indexes, so an element without a reference counts too.
        let array = format!("${}", each.query());
        let around: Vec<Bson> =
            array.match_indices('.').map(|(end, _)| Bson::from(doc! {"$type": &array[..end]})).collect();
        let elements = doc! {"$map": {"input": &array, "as": "e", "in": element}};
        guard.insert("e", doc! {"$cond": [{"$isArray": &array}, elements, null]});
        guard.insert("a", around);
    }
    guard
}

/// The part of the guard that a path belongs to, that of the target or that of each element, and the path in it.
fn place_of<'a>(
    path: &FieldPath,
    each: Option<&FieldPath>,
    (guard, element): (&'a mut Document, &'a mut Document),
) -> (&'a mut Document, String) {
    match each {
        Some(each) if path == each => (element, "$$e".to_owned()),
        Some(each) if path.below(each).is_some() => {
            let query = path.query();
            let below = query.strip_prefix(&format!("{}.", each.query())).unwrap_or(&query);
            (element, format!("$$e.{below}"))
        }
        _ => (guard, format!("${}", path.query())),
    }
}

/// Reads the reference fields of the targets whose array holds one of these sources' `_id`s.
#[must_use]
pub fn parents(rule: &Rule, ids: &[&Key]) -> Option<Document> {
    let child = rule.child()?.query();
    let filter = both(one_of(&child, ids.iter().filter_map(|key| key.values().first())), rule.target.filter.as_ref());
    let projection = rule.reference.projection(Role::Target);
    Some(doc! {
        "find": &rule.target.namespace.collection, "filter": filter, "projection": projection, "batchSize": 10_000,
        "collation": simple_collation(),
    })
}

/// Reads the targets that a change of `keys` affects: those that refer to them or, for [`Task::Parents`], hold them.
#[must_use]
pub fn found(rule: &Rule, task: Task, keys: &[&Key]) -> Option<Document> {
    if task == Task::Parents { parents(rule, keys) } else { Some(holders(rule, keys)) }
}

/// Like [`found`] for one key, in the order of `_id`, starting after `after`. The server sorts all `_id`s in one pass.
#[must_use]
pub fn found_in_order(rule: &Rule, task: Task, key: &Key, after: Option<&Bson>) -> Option<Document> {
    let mut command = found(rule, task, &[key])?;
    if let Some(after) = after {
        // `$gt` outside of an expression stays within one BSON type.
        let beyond = doc! {"$expr": {"$gt": ["$_id", {"$literal": after.clone()}]}};
        let filter = command.remove("filter").unwrap_or_default();
        command.insert("filter", doc! {"$and": [filter, beyond]});
    }
    command.extend(doc! {"sort": {"_id": 1}, "allowDiskUse": true});
    Some(command)
}

/// True if a read with the rule's `where` for targets may have failed because it cannot be evaluated on one of them. A read without it
/// ([`Rule::without_target_filter`]) goes past that one.
#[must_use]
pub fn where_fails(rule: &Rule, error: &Error) -> bool {
    error.kind == Kind::Refused && rule.target.filter.is_some()
}

/// Reads the `_id`s of all targets that refer to one of `keys`.
#[must_use]
pub fn holders(rule: &Rule, keys: &[&Key]) -> Document {
    let filter = holders_filter(rule, keys);
    doc! {"find": &rule.target.namespace.collection, "filter": filter, "projection": {"_id": 1}, "batchSize": 10_000, "collation": simple_collation()}
}

/// Filter for targets that have a value of the rule other than `without`, which a target without a source gets. Where values are
/// in array elements, the element must refer to one of `keys`; of several references in `match`, those beside the array are not
/// compared.
#[must_use]
pub fn has_values(rule: &Rule, keys: &[&Key], without: &[Option<RawBson>]) -> Document {
    let owned = rule.owned();
    let nothing = |path: &FieldPath| {
        let nth = owned.iter().position(|other| *other == path);
        let without = nth.and_then(|nth| without.get(nth)?.clone()).and_then(|field| Bson::try_from(field).ok());
        without.into_iter().chain([Bson::Null]).collect::<Vec<_>>()
    };
    let has_value = |query: String, path: &FieldPath| {
        // An array may have null among its elements.
        let arrays: Vec<Bson> = nothing(path).into_iter().filter(|value| value.as_array().is_some()).collect();
        doc! {"$or": [
            {&query: {"$exists": true, "$nin": nothing(path)}}, {query: {"$type": "array", "$nin": arrays}},
        ]}
    };
    let values = |paths: Vec<(String, &FieldPath)>| {
        doc! {"$or": paths.into_iter().map(|(query, path)| has_value(query, path)).collect::<Vec<_>>()}
    };
    let name_in_element = |path: &FieldPath| {
        let each = rule.reference.target_each.as_ref()?;
        Some(path.below(each)?.iter().filter_map(Segment::name).collect::<Vec<_>>().join("."))
    };
    // A rule that is not compared first has all its paths in the element, or none.
    let inside: Vec<_> = owned.iter().filter_map(|path| Some((name_in_element(path)?, *path))).collect();
    let Some(each) = rule.reference.target_each.as_ref().filter(|_| !inside.is_empty()) else {
        return values(owned.iter().map(|path| (path.query(), *path)).collect());
    };
    let element = doc! {"$and": [referring(rule, keys, &name_in_element), values(inside)]};
    // One level for each array, from the innermost: its last segment is `$[]`.
    let arrays = each.segments().split(|segment| *segment == Segment::Each).filter(|names| !names.is_empty());
    arrays.rev().fold(element, |element, names| {
        let names: Vec<&str> = names.iter().filter_map(Segment::name).collect();
        doc! {names.join("."): {"$elemMatch": element}}
    })
}

pub(super) fn holders_filter(rule: &Rule, keys: &[&Key]) -> Document {
    if rule.creates.is_some() {
        let ids: Vec<Bson> = keys.iter().map(|key| rule.reference.id_of(key)).collect();
        return one_of("_id", ids.iter());
    }
    both(referring(rule, keys, &|path| Some(path.query())), rule.target.filter.as_ref())
}

/// Filter for a reference to one of `keys`. `query` returns the name of a path in the filter, and None for a path that is left out. At
/// least one path must have a name.
fn referring(rule: &Rule, keys: &[&Key], query: &dyn Fn(&FieldPath) -> Option<String>) -> Document {
    let paths = rule.reference.paths(Role::Target).enumerate();
    let paths: Vec<(usize, String)> = paths.filter_map(|(nth, path)| Some((nth, query(path)?))).collect();
    let stored =
        |key: &Key, nth: usize| key.values().get(nth).map(|value| rule.reference.stored_as(value)).unwrap_or_default();
    match paths.as_slice() {
        [(nth, path)] => {
            let values: Vec<Bson> = keys.iter().flat_map(|key| stored(key, *nth)).collect();
            one_of(path, values.iter())
        }
        paths => {
            let places: Vec<usize> = paths.iter().map(|(nth, _)| *nth).collect();
            let clauses = together(keys, &places).into_iter().map(|keys| {
                let parts = paths.iter().map(|(nth, path)| {
                    let values: Vec<Bson> = keys.iter().flat_map(|key| stored(key, *nth)).collect();
                    one_of_each(path, values.iter())
                });
                doc! {"$and": parts.collect::<Vec<_>>()}
            });
            doc! {"$or": clauses.collect::<Vec<_>>()}
        }
    }
}

/// A document's `_id`.
pub fn id_of(row: &RawDocumentBuf) -> Result<Key> {
    let id = row.get("_id")?.ok_or_else(|| Error::internal("a document without _id"))?;
    Ok(Key::one(Bson::try_from(id)?))
}

fn both(filter: Document, other: Option<&Document>) -> Document {
    match other {
        Some(other) => doc! {"$and": [filter, other.clone()]},
        None => filter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand keys of a hundred items and ten days were a thousand alternatives.
    #[test]
    fn keys_that_differ_at_one_place_are_read_together() {
        let of = |pairs: &[(i32, i32)]| -> Vec<Key> {
            pairs.iter().map(|(a, b)| Key::new(vec![(*a).into(), (*b).into()])).collect()
        };
        let sizes = |keys: &[Key], places: &[usize]| {
            let keys: Vec<&Key> = keys.iter().collect();
            let groups = together(&keys, places);
            assert_eq!(groups.iter().flatten().collect::<BTreeSet<_>>(), keys.iter().collect());
            groups.iter().map(Vec::len).collect::<Vec<_>>()
        };
        let all: Vec<(i32, i32)> = (0..100).flat_map(|item| (0..3).map(move |day| (item, day))).collect();
        assert_eq!(sizes(&of(&all), &[0, 1]), [100; 3]);
        assert_eq!(sizes(&of(&all), &[1]), [3; 100]);
        assert_eq!(sizes(&of(&all), &[]), [1; 300]);
        assert_eq!(sizes(&of(&[(1, 1), (2, 2), (3, 3)]), &[0, 1]), [1; 3]);
        let one = one_of_each("a", [1.into(), 2.into(), Bson::Double(1.0)].iter());
        assert_eq!(one.get_document("a").unwrap().get_array("$in").unwrap().len(), 2, "1 and 1.0 are equal");
    }
}
