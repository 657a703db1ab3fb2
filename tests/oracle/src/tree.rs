//! Recursive rules: the documents of one collection, level by level.

use bson::{Bson, Document};

use crate::{
    World,
    expected::targets,
    path::{Path, get},
    query::matches,
    rule::{Kind, Rule},
    value::{equal, is_nothing},
};

/// The path that holds the `_id` of a document's parent.
fn parent_path(rule: &Rule) -> &Path {
    let (target, source) = &rule.on[0];
    if matches!(rule.kind, Kind::Aggregate(_)) { source } else { target }
}

fn id(document: &Document) -> Bson {
    document.get("_id").cloned().unwrap_or(Bson::Null)
}

/// The place of the parent among these documents.
fn parent(rule: &Rule, documents: &[Document], of: usize) -> Option<usize> {
    let document = Bson::Document(documents[of].clone());
    let reference = get(&document, &parent_path(rule).0).filter(|value| value.as_array().is_none())?;
    if is_nothing(Some(reference)) {
        return None;
    }
    documents.iter().position(|other| equal(&id(other), reference))
}

/// The number of a document's ancestors. None if it keeps its values: it is its own ancestor, or it has too many.
fn level(rule: &Rule, most: usize, documents: &[Document], of: usize) -> Option<usize> {
    let mut ancestors: Vec<usize> = Vec::new();
    let mut at = of;
    while let Some(next) = parent(rule, documents, at) {
        if next == of {
            return None;
        }
        if ancestors.contains(&next) {
            break;
        }
        ancestors.push(next);
        at = next;
    }
    Some(ancestors.len()).filter(|count| *count <= most)
}

/// Computes the documents of each level from those of the level before.
pub(crate) fn apply(rule: &Rule, most: usize, world: &mut World, notes: &mut Vec<String>) -> Result<(), String> {
    let name = &rule.target.collection;
    let mut nodes = Vec::new();
    for document in world.get(name).into_iter().flatten() {
        if matches(document, &rule.target.filter)? {
            nodes.push(document.clone());
        }
    }
    let levels: Vec<(Bson, Option<usize>)> =
        (0..nodes.len()).map(|nth| (id(&nodes[nth]), level(rule, most, &nodes, nth))).collect();
    let deepest = levels.iter().filter_map(|(_, level)| *level).max().unwrap_or_default();
    let mut order: Vec<usize> = (0..=deepest).collect();
    if matches!(rule.kind, Kind::Aggregate(_)) {
        order.reverse();
    }
    for now in order {
        let is_due =
            |document: &Document| levels.iter().any(|(of, level)| *level == Some(now) && equal(of, &id(document)));
        let after = targets(rule, world, &is_due, notes)?;
        world.insert(name.clone(), after);
    }
    Ok(())
}
