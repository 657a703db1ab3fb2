//! Documents that a rule creates, in a dry run.

use std::collections::{BTreeSet, HashSet};

use bson::{Bson, Document};

use super::{Obstacle, Stop};
use denormd_engine::reconcile::{
    compare::created::stand_ins,
    create::{buckets_of, unusable},
    read,
};
use denormd_model::key::{Key, id_of};
use denormd_mongo::error::Result;
use denormd_mql::{Collections, EvalError};
use denormd_rules::plan::{Bucket, Plan, Rule, reference::Role};

/// Stand-ins for the documents that the sources of a rule should have and that are not among these. A source with a value
/// that no key can have is an obstacle.
pub(super) fn absent(
    rule: &Rule,
    collections: &Collections,
    documents: &[Document],
    obstacles: &mut Vec<Obstacle>,
) -> Result<Vec<Document>> {
    if rule.creates.is_none() {
        return Ok(Vec::new());
    }
    let ids = match ids(rule, collections, obstacles) {
        Ok(ids) => ids,
        Err(Stop::Error(error)) => return Err(error),
        Err(Stop::EvalError(error)) => {
            obstacles.push(Obstacle { rule: rule.name.clone(), target: Bson::Null, error });
            Vec::new()
        }
    };
    Ok(stand_ins(documents, &ids))
}

fn ids(rule: &Rule, collections: &Collections, obstacles: &mut Vec<Obstacle>) -> Result<Vec<Bson>, Stop> {
    let mut keys: BTreeSet<Key> = BTreeSet::new();
    for source in collections.get(&rule.source.namespace.to_string()).into_iter().flatten() {
        if let Some(filter) = &rule.source.filter
            && !denormd_mql::matches(filter, source)?
        {
            continue;
        }
        if rule.reference.has_unusable_value(source) {
            let error = EvalError::Refused(unusable(&rule.reference).message);
            let target = id_of(source);
            obstacles.push(Obstacle { rule: rule.name.clone(), target, error });
        }
        keys.extend(rule.reference.keys(Role::Source, source).into_iter().flatten());
    }
    if rule.reference.has_buckets() && !keys.is_empty() {
        let command = buckets_of(rule, &keys.iter().collect::<Vec<_>>());
        let rows = denormd_mql::aggregate(collections, &rule.source.namespace.database, &command)?;
        keys = rows.iter().filter_map(key_of).collect();
    }
    Ok(keys.iter().map(|key| rule.reference.id_of(key)).collect())
}

fn key_of(row: &Document) -> Option<Key> {
    row.get_array("k").ok().cloned().map(Key::new)
}

/// Those of these keys for which another rule that creates the same documents has sources.
pub(super) fn held_by_others(
    plan: &Plan,
    rule: &Rule,
    collections: &Collections,
    keys: &[&Key],
) -> Result<HashSet<Key>, Stop> {
    let mut held = HashSet::new();
    let others = rule.creates.iter().flat_map(|creates| &creates.others).map(|other| plan.rule(*other));
    for other in others.filter(|_| !keys.is_empty()) {
        let command = read::keys_with_sources(other, keys);
        let rows = denormd_mql::aggregate(collections, &other.source.namespace.database, &command)?;
        held.extend(rows.iter().filter_map(key_of));
    }
    Ok(held)
}

/// The part of an interval that only a server knows.
pub(super) fn beyond(bucket: &Bucket) -> Option<String> {
    let zone = bucket.arguments.get_str("timezone").unwrap_or("UTC");
    let weeks =
        bucket.arguments.get_str("unit").is_ok_and(|unit| unit == "week") && bucket.arguments.contains_key("binSize");
    match (zone, weeks) {
        ("UTC" | "GMT", false) => None,
        ("UTC" | "GMT", true) => Some("an interval of several weeks".to_owned()),
        _ => Some("an interval in a time zone".to_owned()),
    }
}
