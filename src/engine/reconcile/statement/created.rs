//! Statements for documents that a rule inserts and deletes.

use bson::{Bson, Document, cstr, doc, rawdoc};

use super::{Statement, operators, raw};
use crate::reconcile::{read::simple_collation, value::Desired};
use denormd_model::key::Key;
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::{Creates, Rule, create::below};

/// The statements for the document of a key.
pub(super) fn statements(rule: &Rule, key: &Key, desired: &Desired) -> Result<Vec<Statement>> {
    let id = rule.reference.id_of(key);
    let (fields, upsert) = match desired {
        Desired::Fields(fields) => (fields, true),
        Desired::Emptied { fields, .. } => (fields, false),
        Desired::Keep | Desired::Remove | Desired::Delete => {
            return Err(Error::internal("a document that is created has no such policy"));
        }
    };
    let mut statements = Vec::new();
    if let (Desired::Emptied { deletes: true, .. }, Some(creates)) = (desired, &rule.creates) {
        let query = doc! {"_id": {"$eq": id.clone()}, "$and": nothing_else(creates)};
        let delete = rawdoc! {"q": raw(&query)?, "limit": 1, "collation": raw(&simple_collation())?};
        statements.push(Statement { deletes: true, raw: delete });
    }
    let mut update = rawdoc! {
        "q": raw(&doc! {"_id": {"$eq": id}})?, "u": operators(rule, "", fields)?, "collation": raw(&simple_collation())?,
    };
    if upsert {
        update.append(cstr!("upsert"), true);
    }
    statements.push(Statement { deletes: false, raw: update });
    Ok(statements)
}

/// Conditions for a document that has only `_id` and paths that rules own in it.
pub(in crate::reconcile) fn nothing_else(creates: &Creates) -> Vec<Document> {
    let mut all = vec![doc! {"$expr": only(&creates.plain(), "$$ROOT", "", &["_id"])}];
    all.extend(creates.owned_where.iter().map(|(path, filters)| {
        let mut either = vec![doc! {path.query(): {"$exists": false}}];
        either.extend(filters.iter().cloned());
        doc! {"$or": either}
    }));
    all
}

fn only(paths: &[Vec<&str>], document: &str, prefix: &str, others: &[&str]) -> Bson {
    let mut names: Vec<&str> = others.to_vec();
    for name in paths.iter().filter_map(|path| path.first()) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let stored = doc! {"$map": {"input": {"$objectToArray": document}, "in": "$$this.k"}};
    let mut all = vec![Bson::from(doc! {"$setIsSubset": [stored, {"$literal": names.clone()}]})];
    for name in names {
        let below = below(paths, name);
        if below.is_empty() || paths.iter().any(|path| path.as_slice() == [name]) {
            continue;
        }
        let field = format!("{prefix}{name}");
        let path = format!("${field}");
        let inside = only(&below, &path, &format!("{field}."), &[]);
        all.push(
            doc! {"$switch": {
                "branches": [
                    {"case": {"$eq": [{"$type": &path}, "missing"]}, "then": true},
                    {"case": {"$eq": [{"$type": &path}, "object"]}, "then": inside},
                ],
                "default": false,
            }}
            .into(),
        );
    }
    doc! {"$and": all}.into()
}
