//! Trees: rules that read their own output in one collection, where each document names its parent.
//!
//! A recursive `copy` goes downwards: a document's values come from its parent (`match: { parent: _id }`). A recursive
//! `aggregate` goes upwards: they come from its children (`match: { _id: parent }`). Either way, a document has at most
//! one parent. So its ancestors form a chain that ends at a root, or runs into a circle.

use std::collections::HashMap;

use crate::{
    config::OnMissing,
    plan::{
        expression::Reads,
        reference::{Role, dbref_parent},
        rule::{Rule, Values},
    },
};
use denormd_model::{field_path::FieldPath, key::Key};

/// The tree of a recursive rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    /// The side of `match` whose path holds the `_id` of the parent: the target's where values come from the parent,
    /// the source's where they come from the children.
    pub parent: Role,
    /// The greatest number of ancestors.
    pub max_depth: usize,
}

/// Place of a document in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Its values follow from the documents that it reads. The ancestors begin with the parent; where they run into a
    /// circle, each of its members is there once.
    Node(Vec<Key>),
    /// It is its own ancestor. These are the members of the circle, in order.
    Circle(Vec<Key>),
    /// It has more ancestors than allowed. These are the nearest ones.
    TooDeep(Vec<Key>),
}

impl Tree {
    /// The parents known from targets that were read, given each one's `_id` and its references. Empty if values come from
    /// the children: those targets do not name their parent.
    pub fn known_parents<'a>(
        self,
        targets: impl Iterator<Item = (Key, &'a [Option<Key>])>,
    ) -> HashMap<Key, Option<Key>> {
        match self.parent {
            Role::Target => targets.map(|(id, references)| (id, references.last().cloned().flatten())).collect(),
            Role::Source => HashMap::new(),
        }
    }

    /// The place of a document, given the reference to the parent of every document that may be an ancestor. A
    /// reference to a document that is not in `parents` refers to nothing.
    #[must_use]
    pub fn place(self, id: &Key, parents: &HashMap<Key, Option<Key>>) -> Place {
        let mut chain: Vec<Key> = Vec::new();
        let mut at = id;
        loop {
            let parent = parents.get(at).and_then(Option::as_ref).filter(|parent| parents.contains_key(parent));
            let Some(parent) = parent.filter(|parent| !chain.contains(parent)) else { return Place::Node(chain) };
            if parent == id {
                chain.push(id.clone());
                chain.sort_unstable();
                return Place::Circle(chain);
            }
            if chain.len() == self.max_depth {
                return Place::TooDeep(chain);
            }
            chain.push(parent.clone());
            at = parent;
        }
    }
}

/// A reason why a rule cannot be recursive.
pub(super) struct Objection {
    /// The key of the rule that it concerns.
    pub key: &'static str,
    /// The reason.
    pub message: String,
    /// A way out.
    pub hint: &'static str,
}

/// The reasons why a rule cannot be recursive. `shadow` rules write nothing that the next level could read.
pub(super) fn objections(rule: &Rule, tree: Tree) -> Vec<Objection> {
    let mut out = Vec::new();
    let mut object = |key, message: &str, hint| out.push(Objection { key, message: message.to_owned(), hint });
    if rule.source.namespace != rule.target.namespace {
        let hint = "name one collection twice; a rule over two collections needs no `recursive`";
        object("recursive", "a tree is in one collection, and `source` and `target` are two", hint);
    }
    let shape = match (tree.parent, rule.reference.pairs.as_slice()) {
        (Role::Target, [pair]) => (pair.source.to_string() == "_id").then_some(&pair.target),
        (Role::Source, [pair]) => (pair.target.to_string() == "_id").then_some(&pair.source),
        _ => None,
    };
    let is_plain = |path: &&FieldPath| {
        !path.has_each() && dbref_parent(path).is_none() && path.root() != "_id" && rule.reference.key_type.is_none()
    };
    if shape.as_ref().is_none_or(|x| !is_plain(x)) {
        let hint = match tree.parent {
            Role::Target => "match: { parent: _id }",
            Role::Source => "match: { _id: parent }",
        };
        object("match", "in a tree, one plain field of a document holds the `_id` of its parent as it is", hint);
    }
    match &rule.values {
        Values::Set { once: true, .. } => {
            object("once", "`once` keeps a value that the documents below have to follow", "leave `once` out");
        }
        Values::Set { .. } | Values::Aggregate { .. } => {}
        Values::Into { .. } | Values::Collect { .. } | Values::Groups(_) => {
            object(
                "into",
                "a tree has values of single documents, and no array of groups or of references",
                "use `set`",
            );
        }
    }
    if rule.on_missing != OnMissing::Unset {
        object("on_missing", "a document without a parent is a root", "write its values in `otherwise`");
    }
    if rule.source.filter != rule.target.filter || rule.row_filter.is_some() || rule.pair_filter.is_some() {
        let hint = "write the same `where` in `source` and in `target`, without `$$target`";
        object("target", "the documents of a tree are its sources and its targets alike", hint);
    }
    if rule.creates.is_some() {
        let hint = "leave `create` out, and insert the documents with their parents";
        object(
            "target",
            "`create` inserts documents for their sources, and the documents of a tree name their parents",
            hint,
        );
    }
    if rule.shadow {
        let hint = "compare it with `denormd test`, or in a copy of the database";
        object("recursive", "a rule in shadow mode writes nothing that the next level could read", hint);
    }
    if matches!(rule.source_reads, Reads::Everything) {
        object("set", "a tree reads named paths, and `$$ROOT` would nest one document in the next", "name the fields");
    } else if !rule.owned().into_iter().any(|path| rule.source_reads.overlap(path)) {
        let hint = "leave `recursive` out: without it the rule does the same";
        object("recursive", "the rule reads none of the paths that it writes", hint);
    }
    out
}

#[cfg(test)]
mod tests {
    use bson::Bson;

    use super::*;

    fn id(id: i32) -> Key {
        Key::one(Bson::Int32(id))
    }

    fn place(document: i32, parents: &[(i32, Option<i32>)]) -> Place {
        let parents = parents.iter().map(|(of, parent)| (id(*of), parent.map(id))).collect();
        Tree { parent: Role::Target, max_depth: 3 }.place(&id(document), &parents)
    }

    fn ids(ids: &[i32]) -> Vec<Key> {
        ids.iter().copied().map(id).collect()
    }

    /// A circle lists its members in the order of keys.
    fn circle_of(members: &[i32]) -> Place {
        let mut members = ids(members);
        members.sort_unstable();
        Place::Circle(members)
    }

    #[test]
    fn a_chain_ends_at_a_root() {
        let parents = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(9))];
        assert_eq!(place(1, &parents), Place::Node(vec![]));
        assert_eq!(place(3, &parents), Place::Node(ids(&[2, 1])));
        assert_eq!(place(4, &parents), Place::Node(vec![]), "a reference that dangles");
    }

    #[test]
    fn a_circle_has_members_and_what_hangs_below() {
        let parents = [(1, Some(1)), (2, Some(4)), (3, Some(2)), (4, Some(3)), (5, Some(3)), (6, Some(1))];
        assert_eq!(place(1, &parents), circle_of(&[1]));
        assert_eq!(place(4, &parents), circle_of(&[2, 3, 4]));
        assert_eq!(place(2, &parents), place(4, &parents));
        assert_eq!(place(5, &parents), Place::Node(ids(&[3, 2, 4])));
        assert_eq!(place(6, &parents), Place::Node(ids(&[1])));
    }

    #[test]
    fn a_document_may_have_so_many_ancestors() {
        let parents = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(4)), (6, Some(5))];
        assert_eq!(place(4, &parents), Place::Node(ids(&[3, 2, 1])));
        assert_eq!(place(5, &parents), Place::TooDeep(ids(&[4, 3, 2])));
        assert_eq!(place(6, &parents), Place::TooDeep(ids(&[5, 4, 3])));
        let circle = [(1, Some(4)), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(4))];
        assert_eq!(place(2, &circle), circle_of(&[1, 2, 3, 4]));
        assert_eq!(place(5, &circle), Place::TooDeep(ids(&[4, 3, 2])), "below a circle of four");
    }
}
