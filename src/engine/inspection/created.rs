//! Documents that a rule would create, and sources that expire. Reads only.

use bson::{Document, doc};
use futures_util::TryStreamExt;

use crate::reconcile::{Context, create::id_expression, read};
use denormd_model::{distribution::number, position::ClusterTime};
use denormd_mongo::{
    Server,
    command::decoded,
    error::{Error, Kind, Result},
};
use denormd_rules::{
    config::Mistake,
    plan::{Rule, reference::Role},
};

/// Time limit of the count, in milliseconds.
const READ: i64 = 5000;

/// The number of documents that the rule would insert; None for other rules, where counting takes too long, and where
/// the server cannot join the collections.
pub(super) async fn inserts(context: &Context, rule: &Rule) -> Result<Option<u64>> {
    let (source, target) = (&rule.source.namespace, &rule.target.namespace);
    if rule.creates.is_none() || source.database != target.database {
        return Ok(None);
    }
    let mut stages = read::all_keys(rule);
    let unusable = doc! {"$anyElementTrue": {"$map": {
        "input": "$k", "in": {"$in": [{"$type": "$$this"}, ["missing", "null", "undefined", "array"]]},
    }}};
    stages.extend([
        doc! {"$match": {"$expr": {"$not": [unusable]}}},
        doc! {"$replaceWith": {"id": id_expression(&rule.reference)}},
        doc! {"$lookup": {"from": &target.collection, "localField": "id", "foreignField": "_id", "as": "d"}},
        doc! {"$match": {"d": []}},
        doc! {"$count": "n"},
    ]);
    let mut command = read::command(&source.collection, stages);
    command.insert("maxTimeMS", READ);
    match context.server.read(&source.database, command, ClusterTime::default()).await {
        Ok(rows) => Ok(Some(decoded(&rows)?.first().and_then(|row| row.get("n")).map_or(0, number))),
        Err(error) if matches!(error.kind, Kind::ReadTimedOut | Kind::Refused) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A warning about sources that the server deletes after a time: the documents that are made of them shrink.
pub async fn expiring(server: &Server, rule: &Rule) -> Result<Option<Mistake>> {
    if rule.creates.is_none() {
        return Ok(None);
    }
    let source = &rule.source.namespace;
    let command = doc! {"listIndexes": &source.collection};
    let indexes = match server.database(&source.database).run_cursor_command(command).await {
        Ok(cursor) => cursor.try_collect::<Vec<Document>>().await?,
        // The collection does not exist.
        Err(error) => match Error::from(error) {
            error if error.kind == Kind::Refused => return Ok(None),
            error => return Err(error),
        },
    };
    let Some(index) = indexes.iter().find(|index| index.contains_key("expireAfterSeconds")) else { return Ok(None) };
    let path = index.get_document("key").ok().and_then(|key| key.keys().next()).cloned().unwrap_or_default();
    let message =
        format!("documents of `{source}` expire (a TTL index on `{path}`), and their totals shrink with them");
    let hint = "the values are those of the sources that are left; to keep totals, remove the index or keep the sources longer";
    Ok(Some(Mistake::new(rule.side_at(Role::Source), message).hint(hint)))
}
