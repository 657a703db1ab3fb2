//! All targets of a rule in the order of their `_id`s, a page at a time.

use bson::{Bson, Document, doc};

use crate::{
    error::{Error, Result},
    mongo::Reads,
    plan::Rule,
    position::ClusterTime,
    reconcile::run::Context,
};

/// How long the targets may be counted for, in milliseconds.
const COUNTING: i64 = 2000;

/// Up to `limit` targets that follow `after`, with the fields of `projection`; none after the last one.
///
/// `min` with a hint compares across BSON types, where `$gt` stays within one; it includes its bound, and leaves out a
/// target whose `_id` is MaxKey, which is read by itself at the end.
pub async fn page(
    context: &Context,
    rule: &Rule,
    projection: &Document,
    after: Option<&Bson>,
    limit: usize,
    time: ClusterTime,
) -> Result<Vec<Document>> {
    let filter = rule.target.filter.clone().unwrap_or_default();
    let limit = i64::try_from(limit).unwrap_or(i64::MAX - 1) + i64::from(after.is_some());
    let mut command = doc! {
        "find": &rule.target.namespace.collection, "filter": filter.clone(), "hint": {"_id": 1},
        "projection": projection.clone(), "limit": limit, "batchSize": limit,
    };
    match after {
        Some(Bson::MaxKey) => return Ok(Vec::new()),
        Some(after) => {
            command.insert("min", doc! {"_id": after.clone()});
        }
        None => {}
    }
    let mut page = read(context, rule, command, time).await?;
    if after.is_some() && page.first().and_then(|target| target.get("_id")) == after {
        page.remove(0);
    }
    if page.is_empty() && after.is_some() {
        let last = doc! {"$and": [{"_id": {"$eq": Bson::MaxKey}}, filter]};
        let command = doc! {
            "find": &rule.target.namespace.collection, "filter": last, "projection": projection.clone(), "limit": 1,
        };
        page = read(context, rule, command, time).await?;
    }
    Ok(page)
}

/// About how many targets there are, for progress alone: None when counting takes long.
pub async fn count(context: &Context, rule: &Rule) -> Option<u64> {
    let command = doc! {
        "count": &rule.target.namespace.collection, "query": rule.target.filter.clone().unwrap_or_default(),
        "maxTimeMS": COUNTING,
    };
    let reply = context.server.database(&rule.target.namespace.database).run_command(command).await.ok()?;
    match reply.get("n")? {
        Bson::Int32(n) => u64::try_from(*n).ok(),
        Bson::Int64(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

async fn read(context: &Context, rule: &Rule, command: Document, after: ClusterTime) -> Result<Vec<Document>> {
    let rows = context.server.read(&rule.target.namespace.database, command, Reads { after }).await?;
    rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect()
}
