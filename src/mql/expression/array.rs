//! Arrays and objects.

use bson::{Bson, Document};

use super::{Args, EvalError, Result, Value, compare, is_nullish, is_true, needs_server, refused};
use crate::{
    number::position,
    order::{by_keys, directions},
};

/// An operand that is an array; none where it is nothing, which makes the result null.
fn array(args: &Args<'_>, nth: usize) -> Result<Option<Vec<Bson>>> {
    items(args, args.get(nth)?)
}

fn items(args: &Args<'_>, value: Value) -> Result<Option<Vec<Bson>>> {
    match value {
        value if is_nullish(value.as_ref()) => Ok(None),
        Some(Bson::Array(items)) => Ok(Some(items)),
        value => args.wrong("an array", value.as_ref()),
    }
}

#[expect(clippy::unnecessary_wraps, reason = "what the operators yield")]
fn null() -> Result<Value> {
    Ok(Some(Bson::Null))
}

pub(super) fn element_at(args: &Args<'_>) -> Result<Value> {
    let (items, at) = (args.get(0)?, args.get(1)?);
    if is_nullish(items.as_ref()) || is_nullish(at.as_ref()) {
        return null();
    }
    let Some(Bson::Array(items)) = items else { return args.wrong("an array", items.as_ref()) };
    let Some(at) = position(at.as_ref())? else { return args.wrong("a whole number", at.as_ref()) };
    Ok(place(items.len(), at).and_then(|at| items.into_iter().nth(at)))
}

/// A place counted from the end when it is negative.
fn place(length: usize, at: i64) -> Option<usize> {
    let at = if at < 0 { at + i64::try_from(length).ok()? } else { at };
    usize::try_from(at).ok()
}

pub(super) fn first(args: &Args<'_>) -> Result<Value> {
    array(args, 0)?.map_or_else(null, |items| Ok(items.into_iter().next()))
}

pub(super) fn last(args: &Args<'_>) -> Result<Value> {
    array(args, 0)?.map_or_else(null, |mut items| Ok(items.pop()))
}

pub(super) fn size(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        Some(Bson::Array(items)) => Ok(Some(Bson::Int32(i32::try_from(items.len()).unwrap_or(i32::MAX)))),
        value => args.wrong("an array", value.as_ref()),
    }
}

pub(super) fn slice(args: &Args<'_>) -> Result<Value> {
    let Some(items) = array(args, 0)? else { return null() };
    let at = |nth: usize| -> Result<Option<i64>> {
        let value = args.get(nth)?;
        if is_nullish(value.as_ref()) {
            return Ok(None);
        }
        position(value.as_ref())?.map_or_else(|| args.wrong("whole numbers", value.as_ref()), |at| Ok(Some(at)))
    };
    let Some(one) = at(1)? else { return null() };
    let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
    let from_end = |at: i64| if at < 0 { (length + at).max(0) } else { at.min(length) };
    let (start, count) = if args.len() == 2 {
        if one < 0 { (from_end(one), length) } else { (0, one) }
    } else {
        match at(2)? {
            None => return null(),
            Some(count) if count <= 0 => return refused("`$slice` with a place takes a count from 1"),
            Some(count) => (from_end(one), count),
        }
    };
    let bound = |value: i64| usize::try_from(value).unwrap_or_default();
    Ok(Some(Bson::Array(items.into_iter().skip(bound(start)).take(bound(count)).collect())))
}

pub(super) fn concat(args: &Args<'_>) -> Result<Value> {
    let mut out = Vec::new();
    for nth in 0..args.len() {
        match array(args, nth)? {
            Some(items) => out.extend(items),
            None => return null(),
        }
    }
    Ok(Some(Bson::Array(out)))
}

pub(super) fn reverse(args: &Args<'_>) -> Result<Value> {
    array(args, 0)?.map_or_else(null, |items| Ok(Some(Bson::Array(items.into_iter().rev().collect()))))
}

pub(super) fn is_in(args: &Args<'_>) -> Result<Value> {
    let (wanted, items) = (args.get(0)?, args.get(1)?);
    let Some(Bson::Array(items)) = items else { return args.wrong("an array", items.as_ref()) };
    Ok(Some(Bson::Boolean(items.iter().any(|item| compare(Some(item), wanted.as_ref()).is_eq()))))
}

pub(super) fn any_true(args: &Args<'_>) -> Result<Value> {
    // Unlike other operators on arrays, it refuses null.
    let Some(Bson::Array(items)) = args.get(0)? else { return refused("`$anyElementTrue` takes an array") };
    Ok(Some(Bson::Boolean(items.iter().any(|item| is_true(Some(item))))))
}

pub(super) fn is_subset(args: &Args<'_>) -> Result<Value> {
    let (part, whole) = (args.get(0)?, args.get(1)?);
    let (Some(Bson::Array(part)), Some(Bson::Array(whole))) = (part, whole) else {
        return refused("`$setIsSubset` takes two arrays");
    };
    let held = |item: &Bson| whole.iter().any(|other| compare(Some(item), Some(other)).is_eq());
    Ok(Some(Bson::Boolean(part.iter().all(held))))
}

pub(super) fn index_of(args: &Args<'_>) -> Result<Value> {
    let Some(items) = array(args, 0)? else { return null() };
    let wanted = args.get(1)?;
    let place = |nth: usize| match args.get(nth)? {
        None => Ok(None),
        value => match position(value.as_ref())? {
            Some(place @ 0..) => Ok(usize::try_from(place).ok()),
            _ => args.wrong("a place from 0", value.as_ref()),
        },
    };
    if args.len() > 2 && args.get(2)?.is_none() || args.len() > 3 && args.get(3)?.is_none() {
        return needs_server("`$indexOfArray` with a place that is missing");
    }
    let (from, end) = (place(2)?.unwrap_or(0), place(3)?.unwrap_or(items.len()).min(items.len()));
    let found = (from..end).find(|nth| compare(items.get(*nth), wanted.as_ref()).is_eq());
    Ok(Some(Bson::Int32(found.map_or(-1, |nth| i32::try_from(nth).unwrap_or(i32::MAX)))))
}

/// The reason for the refusal of a `$range` without a step.
pub const ZERO_STEP: &str = "`$range` with a step of 0";

pub(super) fn range(args: &Args<'_>) -> Result<Value> {
    let number = |nth: usize| {
        let value = args.get(nth)?;
        match position(value.as_ref())? {
            Some(number) => Ok(number),
            None => args.wrong("whole numbers of 32 bits", value.as_ref()),
        }
    };
    let (mut at, end) = (number(0)?, number(1)?);
    let step = if args.len() == 3 { number(2)? } else { 1 };
    if step == 0 {
        return refused(ZERO_STEP);
    }
    let mut out = Vec::new();
    while (step > 0 && at < end) || (step < 0 && at > end) {
        if out.len() == 1_000_000 {
            return needs_server("a `$range` of more than a million");
        }
        out.push(Bson::Int32(i32::try_from(at).unwrap_or_default()));
        at += step;
    }
    Ok(Some(Bson::Array(out)))
}

/// The name that an element is bound to.
fn bound(doc: &Document) -> String {
    doc.get_str("as").unwrap_or("this").to_owned()
}

pub(super) fn map(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "as", "in"])?;
    args.required(doc, "input")?;
    let body = args.required(doc, "in")?;
    let Some(items) = items(args, args.of(doc, "input")?)? else { return null() };
    let name = bound(doc);
    let mapped = items.into_iter().map(|item| {
        let value = args.scope.with([(name.clone(), Some(item))]).evaluate(body)?;
        Ok(value.unwrap_or(Bson::Null))
    });
    Ok(Some(Bson::Array(mapped.collect::<Result<_>>()?)))
}

pub(super) fn filter(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "as", "cond"])?;
    args.required(doc, "input")?;
    let condition = args.required(doc, "cond")?;
    let Some(items) = items(args, args.of(doc, "input")?)? else { return null() };
    let name = bound(doc);
    let mut out = Vec::new();
    for item in items {
        let scope = args.scope.with([(name.clone(), Some(item.clone()))]);
        if is_true(scope.evaluate(condition)?.as_ref()) {
            out.push(item);
        }
    }
    Ok(Some(Bson::Array(out)))
}

pub(super) fn reduce(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "initialValue", "in"])?;
    args.required(doc, "input")?;
    let (first, body) = (args.required(doc, "initialValue")?, args.required(doc, "in")?);
    let Some(items) = items(args, args.of(doc, "input")?)? else { return null() };
    let mut value = args.scope.evaluate(first)?;
    for item in items {
        let scope = args.scope.with([("this".to_owned(), Some(item)), ("value".to_owned(), value)]);
        value = scope.evaluate(body)?;
    }
    Ok(value)
}

pub(super) fn of_object(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        value if is_nullish(value.as_ref()) => null(),
        Some(Bson::Document(doc)) => {
            let pairs = doc.into_iter().map(|(name, value)| bson::doc! {"k": name, "v": value}.into());
            Ok(Some(Bson::Array(pairs.collect())))
        }
        value => args.wrong("an object", value.as_ref()),
    }
}

pub(super) fn to_object(args: &Args<'_>) -> Result<Value> {
    let Some(items) = array(args, 0)? else { return null() };
    let mut out = Document::new();
    let wrong = || EvalError::Refused("`$arrayToObject` takes { k, v } documents, or pairs, throughout".to_owned());
    let pairs = matches!(items.first(), Some(Bson::Array(_)));
    for item in items {
        let (name, value) = match item {
            Bson::Array(pair) if pairs => {
                <[Bson; 2]>::try_from(pair).map(|[name, value]| (name, value)).map_err(|_| wrong())?
            }
            Bson::Document(mut pair) if !pairs && pair.len() == 2 => {
                pair.remove("k").zip(pair.remove("v")).ok_or_else(wrong)?
            }
            _ => return Err(wrong()),
        };
        let Bson::String(name) = name else { return Err(wrong()) };
        if name.contains('\0') {
            return Err(wrong());
        }
        out.insert(name, value);
    }
    Ok(Some(Bson::Document(out)))
}

/// The constant name of a field.
fn field_name(args: &Args<'_>, expression: &Bson) -> Result<String> {
    match expression {
        Bson::String(name) if !name.starts_with('$') => Ok(name.clone()),
        Bson::Document(doc) if doc.len() == 1 => match doc.get("$literal") {
            Some(Bson::String(name)) => Ok(name.clone()),
            _ => needs_server(format!("a computed `field` of `{}`", args.name)),
        },
        _ => needs_server(format!("a computed `field` of `{}`", args.name)),
    }
}

pub(super) fn get_field(args: &Args<'_>) -> Result<Value> {
    let (name, input) = match args.argument {
        Bson::Document(doc) if doc.contains_key("field") => {
            let doc = args.named(&["field", "input"])?;
            (args.required(doc, "field")?, args.scope.evaluate(doc.get("input").unwrap_or(&Bson::from("$$CURRENT")))?)
        }
        name => (name, args.scope.evaluate(&Bson::from("$$CURRENT"))?),
    };
    let name = field_name(args, name)?;
    Ok(match input {
        Some(Bson::Document(doc)) => doc.get(&name).cloned(),
        Some(Bson::Null | Bson::Undefined) => Some(Bson::Null),
        _ => None,
    })
}

pub(super) fn set_field(args: &Args<'_>) -> Result<Value> {
    let sets = args.name == "$setField";
    let doc = args.named(if sets { &["field", "input", "value"] } else { &["field", "input"] })?;
    let name = field_name(args, args.required(doc, "field")?)?;
    args.required(doc, "input")?;
    if sets {
        args.required(doc, "value")?;
    }
    match args.of(doc, "input")? {
        input if is_nullish(input.as_ref()) => null(),
        Some(Bson::Document(mut inside)) => {
            match if sets { args.of(doc, "value")? } else { None } {
                Some(value) => drop(inside.insert(name, value)),
                None => drop(inside.remove(&name)),
            }
            Ok(Some(Bson::Document(inside)))
        }
        input => args.wrong("an object as `input`", input.as_ref()),
    }
}

pub(super) fn sort(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["input", "sortBy"])?;
    args.required(doc, "input")?;
    let by = args.required(doc, "sortBy")?;
    let Some(mut items) = items(args, args.of(doc, "input")?)? else { return null() };
    match by {
        Bson::Document(by) => {
            let directions = directions(by)?;
            let keyed = items.into_iter().map(|item| {
                // Unlike a sort of documents, it does not look into arrays. What is no document has none of the fields, and a
                // field that is missing sorts as null.
                let keys =
                    by.keys().map(|path| plain(item.as_document(), path).or(Some(Bson::Null))).collect::<Vec<_>>();
                (keys, item)
            });
            let mut keyed = keyed.collect::<Vec<_>>();
            keyed.sort_by(|(a, _), (b, _)| by_keys(&directions, a, b));
            items = keyed.into_iter().map(|(_, item)| item).collect();
        }
        way => {
            let ascending = match position(Some(way))? {
                Some(1) => true,
                Some(-1) => false,
                _ => return refused("`sortBy` is 1, -1, or a document of paths"),
            };
            items.sort_by(|a, b| {
                let order = compare(Some(a), Some(b));
                if ascending { order } else { order.reverse() }
            });
        }
    }
    Ok(Some(Bson::Array(items)))
}

/// The value at a path that does not look into arrays.
fn plain(document: Option<&Document>, path: &str) -> Value {
    match path.split_once('.') {
        None => document?.get(path).cloned(),
        Some((first, rest)) => plain(document?.get(first)?.as_document(), rest),
    }
}

pub(super) fn bson_size(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        value if is_nullish(value.as_ref()) => null(),
        Some(Bson::Document(doc)) => match bson::RawDocumentBuf::try_from(&doc) {
            Ok(raw) => Ok(Some(Bson::Int32(i32::try_from(raw.as_bytes().len()).unwrap_or(i32::MAX)))),
            Err(_) => needs_server("`$bsonSize` of this document"),
        },
        value => args.wrong("an object", value.as_ref()),
    }
}
