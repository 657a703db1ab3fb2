//! Dry runs of recursive rules: level by level, as a backfill goes.

use std::{cmp::Reverse, collections::HashMap};

use bson::Document;

use denormd_engine::reconcile::places::reason;
use denormd_model::key::{Key, id_of};
use denormd_mongo::error::Result;
use denormd_mql::{Collections, EvalError};
use denormd_rules::plan::{
    Plan, Rule,
    reference::Role,
    tree::{Place, Tree},
};

use super::{Obstacle, Stop, apply};

/// Applies a recursive rule to the documents of its collection, each after those that it reads. Adds the documents that
/// cannot be computed; of a circle, one.
pub(super) fn run(
    (plan, rule): (&Plan, &Rule),
    tree: Tree,
    collections: &mut Collections,
    obstacles: &mut Vec<Obstacle>,
) -> Result<()> {
    let name = rule.target.namespace.to_string();
    let documents = collections.get(&name).cloned().unwrap_or_default();
    let mut object = |document: &Document, error: EvalError| {
        obstacles.push(Obstacle { rule: rule.name.clone(), target: id_of(document), error });
    };
    let parents = parents(rule, tree, &documents, &mut object);
    for nth in in_order(tree, &documents, &parents, &mut object) {
        let Some(document) = collections.get(&name).and_then(|documents| documents.get(nth)).cloned() else { continue };
        match apply(plan, rule, collections, document.clone()) {
            Ok(Some(written)) => {
                if let Some(place) = collections.get_mut(&name).and_then(|documents| documents.get_mut(nth)) {
                    *place = written;
                }
            }
            // A recursive rule deletes nothing.
            Ok(None) => {}
            Err(Stop::EvalError(error)) => object(&document, error),
            Err(Stop::Error(error)) => return Err(error),
        }
    }
    Ok(())
}

/// The documents that take part, each with the key of its parent.
fn parents(
    rule: &Rule,
    tree: Tree,
    documents: &[Document],
    object: &mut impl FnMut(&Document, EvalError),
) -> HashMap<Key, Option<Key>> {
    let mut parents = HashMap::new();
    for document in documents {
        match rule.target.filter.as_ref().map_or(Ok(true), |filter| denormd_mql::matches(filter, document)) {
            Ok(true) => {
                let parent = rule.reference.keys(tree.parent, document).pop().flatten();
                parents.insert(Key::of_document(document), parent);
            }
            Ok(false) => {}
            Err(error) => object(document, error),
        }
    }
    parents
}

/// The places of the documents in the collection, each after those that it reads.
fn in_order(
    tree: Tree,
    documents: &[Document],
    parents: &HashMap<Key, Option<Key>>,
    object: &mut impl FnMut(&Document, EvalError),
) -> Vec<usize> {
    let mut levels: Vec<(usize, usize)> = Vec::new();
    for (nth, document) in documents.iter().enumerate() {
        let key = Key::of_document(document);
        if !parents.contains_key(&key) {
            continue;
        }
        let place = tree.place(&key, parents);
        match (&place, reason(tree, &place)) {
            (Place::Node(ancestors), _) => levels.push((ancestors.len(), nth)),
            (Place::Circle(members), Some(_)) if members.first() != Some(&key) => {}
            (_, Some(error)) => object(document, EvalError::Refused(error.message)),
            (_, None) => {}
        }
    }
    match tree.parent {
        Role::Target => levels.sort_unstable(),
        Role::Source => levels.sort_unstable_by_key(|(level, nth)| (Reverse(*level), *nth)),
    }
    levels.into_iter().map(|(_, nth)| nth).collect()
}
