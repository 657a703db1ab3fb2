//! Filters that no document matches, perhaps because they compare a field with a constant of a type that its values never have.

use bson::{Bson, DateTime, Document, oid::ObjectId};

use super::{Seen, side};
use denormd_model::shape::{Shape, type_name};
use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::{Rule, reference::Role},
};

/// Fewer values than this are not conclusive.
const ENOUGH: u64 = 20;

/// The suspected mistakes in the filter of one side.
pub fn suspicions(rule: &Rule, role: Role, seen: &Seen) -> Vec<Mistake> {
    let side = side(rule, role);
    // Otherwise the sample is of documents that match.
    let (Some(filter), Some(shape), true) = (&side.filter, &seen.shape, seen.none_match) else { return Vec::new() };
    let at = rule.side_at(role).key("where");
    let collection = &side.namespace.collection;
    let mut found = Vec::new();
    for Comparison { at, path, value } in comparisons(&at, filter) {
        let Some(types) = types_that_differ(shape, &path, value) else { continue };
        let message = format!(
            "`where` compares `{path}` with a value of type {}, but its type is {types} in every sampled document of `{collection}`",
            type_name(value)
        );
        found.push(Mistake::new(at, message).hint(meant(&types, value)));
    }
    if found.is_empty() {
        let message = format!("no document of `{collection}` matches `where`");
        found.push(
            Mistake::new(at, message)
                .on_key()
                .hint("check its fields and values; if such documents will be added later, ignore this"),
        );
    }
    found
}

/// A comparison of a field with a constant.
struct Comparison<'a> {
    at: ConfigPath,
    path: String,
    value: &'a Bson,
}

/// The comparisons of a filter that a document must meet to match; of `$or`, one of them.
fn comparisons<'a>(at: &ConfigPath, filter: &'a Document) -> Vec<Comparison<'a>> {
    let mut found = Vec::new();
    for (name, condition) in filter {
        let at = at.key(name);
        match condition {
            Bson::Array(parts) if matches!(name.as_str(), "$and" | "$or") => {
                let documents = parts.iter().enumerate().filter_map(|(nth, part)| Some((nth, part.as_document()?)));
                found.extend(documents.flat_map(|(nth, part)| comparisons(&at.index(nth), part)));
            }
            _ if name.starts_with('$') => {}
            Bson::Document(operators) if operators.keys().any(|key| key.starts_with('$')) => {
                for (operator, value) in operators {
                    let at = at.key(operator);
                    match (operator.as_str(), value) {
                        ("$eq" | "$gt" | "$gte" | "$lt" | "$lte", value) => {
                            found.push(Comparison { at, path: name.clone(), value });
                        }
                        ("$in", Bson::Array(values)) => {
                            let each = values.iter().enumerate();
                            found.extend(each.map(|(nth, value)| Comparison {
                                at: at.index(nth),
                                path: name.clone(),
                                value,
                            }));
                        }
                        _ => {}
                    }
                }
            }
            value => found.push(Comparison { at, path: name.clone(), value }),
        }
    }
    found
}

/// The types of the values at a path, if the server compares none of them with a constant of this type.
fn types_that_differ(shape: &Shape, path: &str, value: &Bson) -> Option<String> {
    if matches!(value, Bson::Null | Bson::Undefined | Bson::RegularExpression(_) | Bson::MinKey | Bson::MaxKey) {
        return None;
    }
    let mut types: Vec<&str> = Vec::new();
    let mut met = 0;
    // A path without `$[]` also finds the elements of an array.
    for field in shape.fields.iter().filter(|field| field.path.query() == path) {
        for (name, number) in field.types.iter().filter(|(name, _)| !matches!(**name, "null" | "undefined")) {
            types.push(class(name));
            met += number;
        }
    }
    types.sort_unstable();
    types.dedup();
    let differ = met >= ENOUGH && !shape.is_cut() && !types.contains(&class(type_name(value)));
    differ.then(|| types.join(" or "))
}

/// The types that the server compares with each other, by one name.
fn class(kind: &str) -> &str {
    match kind {
        "int" | "long" | "double" | "decimal" => "number",
        "symbol" => "string",
        other => other,
    }
}

/// The constant that was probably meant.
fn meant(types: &str, value: &Bson) -> String {
    match (types, value) {
        ("date", Bson::String(text)) => format!("a date is written {{ $date: \"{}\" }}", as_time(text)),
        ("bool", Bson::String(text)) if matches!(text.to_lowercase().as_str(), "yes" | "on") => {
            format!("`{text}` is a string: write true")
        }
        ("bool", Bson::String(text)) if matches!(text.to_lowercase().as_str(), "no" | "off") => {
            format!("`{text}` is a string: write false")
        }
        ("objectId", Bson::String(text)) if ObjectId::parse_str(text).is_ok() => {
            format!("an ObjectId is written {{ $oid: \"{text}\" }}")
        }
        ("number", Bson::String(text)) if text.parse::<f64>().is_ok() => {
            format!("without quotes, `{text}` is a number")
        }
        ("string", _) => "put the value in quotes if you mean a string".to_owned(),
        _ => "values of different types never match".to_owned(),
    }
}

/// The text as a time of Extended JSON, if it is one or a day; otherwise an example.
fn as_time(text: &str) -> String {
    let candidates = [text.to_owned(), format!("{text}T00:00:00Z")];
    let time = candidates.into_iter().find(|time| DateTime::parse_rfc3339_str(time).is_ok());
    time.unwrap_or_else(|| "2026-01-31T00:00:00Z".to_owned())
}
