//! The definitions of rules that have run, read without opening the state, for commands that write nothing.

use std::collections::BTreeMap;

use bson::{Document, doc};
use futures_util::TryStreamExt;

use denormd_model::partition::SEPARATOR;
use denormd_mongo::{
    Server, bounded,
    error::{Kind, Result},
};

use super::store::RULES;

/// The definition of each rule that has run in this deployment, by its name. None can be read without the privilege to.
pub async fn definitions(server: &Server, database: &str, deployment: &str) -> Result<BTreeMap<String, Document>> {
    // The deployment's own, and those of its partitions, whose number need not be known here: they are between these two.
    let (first, last) = (format!("{deployment}{SEPARATOR}"), format!("{deployment}{SEPARATOR}~"));
    let mine = vec![doc! {"_id.deployment": deployment}, doc! {"_id.deployment": {"$gte": first, "$lt": last}}];
    // A definition that is blocked for its effect on existing data has written nothing.
    let ran = doc! {"$or": mine, "block.kind": {"$ne": "adoption"}};
    let found = bounded(server.collection(database, RULES).find(ran)).await;
    let mut cursor = match found {
        Err(error) if error.kind == Kind::Privilege => return Ok(BTreeMap::new()),
        found => found?,
    };
    let mut definitions = BTreeMap::new();
    while let Some(doc) = bounded(cursor.try_next()).await? {
        if let (Ok(id), Ok(definition)) = (doc.get_document("_id"), doc.get_document("definition"))
            && let Ok(rule) = id.get_str("rule")
        {
            definitions.insert(rule.to_owned(), definition.clone());
        }
    }
    Ok(definitions)
}
