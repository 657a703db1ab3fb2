//! The stages that denormd's own reads use (`reconcile::read`), over documents in memory.

use std::collections::BTreeMap;

use bson::{Bson, Document, doc};

use super::{
    Result,
    expression::Scope,
    group::group,
    matches, needs_server,
    number::position,
    order::{by_keys, directions},
    path::{below_document, sort_keys, steps},
    refused,
};

/// Documents by the full name of their collection, `database.collection`.
pub type Collections = BTreeMap<String, Vec<Document>>;

/// The rows of an `aggregate` command.
pub fn aggregate(collections: &Collections, database: &str, command: &Document) -> Result<Vec<Document>> {
    let name = command.get_str("aggregate").unwrap_or_default();
    let mut rows = collections.get(&format!("{database}.{name}")).cloned().unwrap_or_default();
    for one in command.get_array("pipeline").into_iter().flatten() {
        let Some((name, argument)) = one.as_document().and_then(|stage| stage.iter().next()) else {
            return refused("a stage is a document");
        };
        rows = stage(name, argument, rows, collections, database)?;
    }
    Ok(rows)
}

/// The rows after one stage.
pub fn stage(
    name: &str,
    argument: &Bson,
    rows: Vec<Document>,
    collections: &Collections,
    database: &str,
) -> Result<Vec<Document>> {
    match (name, argument) {
        ("$match", Bson::Document(filter)) => {
            let mut out = Vec::new();
            for row in rows {
                if matches(filter, &row)? {
                    out.push(row);
                }
            }
            Ok(out)
        }
        ("$sort", Bson::Document(by)) => sort(rows, by),
        ("$limit", count) => {
            let count = position(Some(count))?.and_then(|count| usize::try_from(count).ok());
            Ok(rows.into_iter().take(count.unwrap_or(usize::MAX)).collect())
        }
        ("$replaceWith", expression) => rows.iter().map(|row| replaced(expression, row)).collect(),
        ("$set", Bson::Document(fields)) => rows.into_iter().map(|row| set(fields, row)).collect(),
        ("$unwind", Bson::String(path)) => Ok(unwind(path.trim_start_matches('$'), None, rows)),
        ("$unwind", Bson::Document(stage)) => match stage.get_str("path") {
            Ok(path) => Ok(unwind(path.trim_start_matches('$'), stage.get_str("includeArrayIndex").ok(), rows)),
            Err(_) => refused("`$unwind` has no path"),
        },
        ("$group", Bson::Document(stage)) => group(stage, rows),
        ("$documents", Bson::Array(documents)) => {
            let empty = Document::new();
            documents.iter().map(|document| replaced(document, &empty)).collect()
        }
        ("$lookup", Bson::Document(stage)) => {
            rows.into_iter().map(|row| lookup(stage, row, collections, database)).collect()
        }
        _ => needs_server(format!("`{name}`")),
    }
}

fn replaced(expression: &Bson, row: &Document) -> Result<Document> {
    match Scope::new(row).evaluate(expression)? {
        Some(Bson::Document(doc)) => Ok(doc),
        _ => refused("`$replaceWith` takes an object"),
    }
}

fn set(fields: &Document, mut row: Document) -> Result<Document> {
    for (name, expression) in fields {
        match Scope::new(&row).evaluate(expression)? {
            Some(value) => drop(row.insert(name.clone(), value)),
            None => drop(row.remove(name)),
        }
    }
    Ok(row)
}

fn unwind(name: &str, index: Option<&str>, rows: Vec<Document>) -> Vec<Document> {
    let one = |row: Document| -> Vec<Document> {
        match row.get(name) {
            Some(Bson::Array(items)) => items
                .iter()
                .zip(0_i64..)
                .map(|(item, nth)| {
                    let mut row = row.clone();
                    row.insert(name, item.clone());
                    row.extend(index.map(|index| (index.to_owned(), Bson::Int64(nth))));
                    row
                })
                .collect(),
            None | Some(Bson::Null | Bson::Undefined) => Vec::new(),
            Some(_) => vec![row],
        }
    };
    rows.into_iter().flat_map(one).collect()
}

fn lookup(stage: &Document, mut row: Document, collections: &Collections, database: &str) -> Result<Document> {
    let text = |name: &str| stage.get_str(name).unwrap_or_default();
    let local = below_document(&row, &steps(text("localField"))).unwrap_or(Bson::Null);
    let any = match local {
        Bson::Array(values)
            if values.iter().any(|value| matches!(value, Bson::Array(_) | Bson::RegularExpression(_))) =>
        {
            return needs_server("`$lookup` of an array");
        }
        Bson::Array(values) => doc! {"$in": values},
        Bson::RegularExpression(_) => return needs_server("`$lookup` of a regular expression"),
        local => doc! {"$eq": local},
    };
    let mut stages = vec![Bson::from(doc! {"$match": {text("foreignField"): any}})];
    let mut variables = Document::new();
    for (name, expression) in stage.get_document("let").into_iter().flatten() {
        variables.extend(Scope::new(&row).evaluate(expression)?.map(|value| (name.clone(), value)));
    }
    let names: Vec<&str> = stage.get_document("let").into_iter().flat_map(Document::keys).map(String::as_str).collect();
    let inner = stage.get_array("pipeline").into_iter().flatten();
    stages.extend(inner.map(|stage| bind_stage(stage, &names, &variables)));
    let found = aggregate(collections, database, &doc! {"aggregate": text("from"), "pipeline": stages})?;
    row.insert(text("as"), found);
    Ok(row)
}

/// A stage with the values of these variables in place of their names. Queries are not expressions, except in `$expr`.
#[must_use]
pub fn bind_stage(stage: &Bson, names: &[&str], variables: &Document) -> Bson {
    match stage {
        Bson::Document(doc) => {
            let inner = doc.iter().map(|(name, value)| match name.as_str() {
                "$match" => (name.clone(), bind_query(value, names, variables)),
                _ => (name.clone(), bind_expression(value, names, variables)),
            });
            inner.collect::<Document>().into()
        }
        other => other.clone(),
    }
}

/// A query with the values of these variables in place of their names.
#[must_use]
pub fn bind_query(query: &Bson, names: &[&str], variables: &Document) -> Bson {
    match query {
        Bson::Array(items) => Bson::Array(items.iter().map(|item| bind_query(item, names, variables)).collect()),
        Bson::Document(doc) => {
            let inner = doc.iter().map(|(name, value)| match name.as_str() {
                "$expr" => (name.clone(), bind_expression(value, names, variables)),
                "$and" | "$or" | "$nor" => (name.clone(), bind_query(value, names, variables)),
                _ => (name.clone(), value.clone()),
            });
            inner.collect::<Document>().into()
        }
        other => other.clone(),
    }
}

/// An expression with the values of these variables in place of their names.
#[must_use]
pub fn bind_expression(expression: &Bson, names: &[&str], variables: &Document) -> Bson {
    match expression {
        Bson::String(text) => {
            let name = text.strip_prefix("$$").and_then(|text| text.split('.').next());
            let Some(name) = name.filter(|name| names.contains(name)) else { return expression.clone() };
            let value =
                variables.get(name).map_or_else(|| Bson::from("$$REMOVE"), |value| doc! {"$literal": value}.into());
            doc! {"$let": {"vars": {name: value}, "in": text}}.into()
        }
        Bson::Array(items) => Bson::Array(items.iter().map(|item| bind_expression(item, names, variables)).collect()),
        Bson::Document(doc) if doc.contains_key("$literal") => expression.clone(),
        Bson::Document(doc) => {
            // An expression may have a variable of its own with such a name.
            let own = |name: &&str| {
                let binds = |inner: &Document| {
                    inner.get_str("as").is_ok_and(|bound| bound == *name)
                        || inner.get_document("vars").is_ok_and(|vars| vars.contains_key(*name))
                };
                doc.values().filter_map(Bson::as_document).any(binds)
            };
            let names: Vec<&str> = names.iter().filter(|name| !own(name)).copied().collect();
            let inner = doc.iter().map(|(name, value)| (name.clone(), bind_expression(value, &names, variables)));
            inner.collect::<Document>().into()
        }
        other => other.clone(),
    }
}

fn sort(rows: Vec<Document>, by: &Document) -> Result<Vec<Document>> {
    let ways = directions(by)?;
    let keyed = rows.into_iter().map(|row| Ok((sort_keys(&row, by)?, row)));
    let mut keyed = keyed.collect::<Result<Vec<_>>>()?;
    keyed.sort_by(|(a, _), (b, _)| by_keys(&ways, a, b));
    Ok(keyed.into_iter().map(|(_, row)| row).collect())
}
