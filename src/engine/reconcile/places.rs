//! The places of documents in trees, read from the references to their parents.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use bson::{Document, doc};

use crate::reconcile::{
    context::Context,
    read::{id_of, one_of, simple_collation},
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{
    command::limited,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{
    Rule,
    tree::{Place, Tree},
};

/// Documents in one read.
const STEP: usize = 1000;

impl Context {
    /// The places of documents in the rule's tree. `known` has the parent references that were already read
    /// ([`Tree::known_parents`]); the others are read here. A document outside the tree has no place.
    pub(crate) async fn places(
        &self,
        rule: &Rule,
        tree: Tree,
        asked: &[&Key],
        known: HashMap<Key, Option<Key>>,
        (after, limit): (ClusterTime, Duration),
    ) -> Result<HashMap<Key, Place>> {
        let mut parents = known;
        let mut gone: HashSet<Key> = HashSet::new();
        let above = asked.iter().map(|id| (*id).clone()).chain(parents.values().flatten().cloned());
        let mut next: HashSet<Key> = above.filter(|id| !parents.contains_key(id)).collect();
        // One step for the documents themselves, and one for the parent that is one too many.
        for _ in 0..tree.max_depth + 2 {
            if next.is_empty() {
                break;
            }
            let found = self.parents(rule, tree, &next, after, limit).await?;
            gone.extend(next.into_iter().filter(|id| !found.contains_key(id)));
            parents.extend(found.clone());
            let above = found.into_values().flatten();
            next = above.filter(|id| !parents.contains_key(id) && !gone.contains(id)).collect();
        }
        let of_tree = asked.iter().filter(|id| parents.contains_key(id));
        Ok(of_tree.map(|id| ((*id).clone(), tree.place(id, &parents))).collect())
    }

    /// The references of documents to their parents.
    async fn parents(
        &self,
        rule: &Rule,
        tree: Tree,
        ids: &HashSet<Key>,
        after: ClusterTime,
        limit: Duration,
    ) -> Result<HashMap<Key, Option<Key>>> {
        let ids: Vec<&Key> = ids.iter().collect();
        let namespace = &rule.target.namespace;
        let mut projection = rule.reference.projection(tree.parent);
        projection.insert("_id", 1);
        let mut found = HashMap::with_capacity(ids.len());
        for ids in ids.chunks(STEP) {
            let mut clauses = vec![one_of("_id", ids.iter().filter_map(|id| id.values().first()))];
            clauses.extend(rule.target.filter.clone());
            let command = doc! {
                "find": &namespace.collection, "filter": {"$and": clauses}, "projection": projection.clone(),
                "batchSize": 10_000, "collation": simple_collation(),
            };
            for row in self.server.read(&namespace.database, limited(command, limit), after).await? {
                let parent = rule.reference.keys(tree.parent, &Document::try_from(row.as_ref())?).pop().flatten();
                found.insert(id_of(&row)?, parent);
            }
        }
        Ok(found)
    }
}

/// The error of a circle. Dead letters name the members.
pub(super) fn circle(members: &[Key]) -> Error {
    let text = match members.len() {
        1 => "the document is its own parent".to_owned(),
        count => format!("a circle of {count} documents, each of which is its own ancestor"),
    };
    Error::new(Kind::Refused, text)
}

pub(super) fn too_deep(tree: Tree) -> Error {
    let text = format!("the document has more than {} ancestors (`max_depth`)", tree.max_depth);
    Error::new(Kind::Refused, text)
}

/// The reason why a document keeps its values; none if it does not.
#[must_use]
pub fn reason(tree: Tree, place: &Place) -> Option<Error> {
    match place {
        Place::Node(_) => None,
        Place::Circle(members) => Some(circle(members)),
        Place::TooDeep(_) => Some(too_deep(tree)),
    }
}
