//! Trees: rules that read their own output in one collection, where each document names its parent.
//!
//! A recursive `copy` goes downwards: a document's values come from its parent (`match: { parent: _id }`). A recursive
//! `aggregate` goes upwards: they come from its children (`match: { _id: parent }`). Either way, a document has at most
//! one parent. So its ancestors form a chain that ends at a root, or runs into a circle.

use std::collections::HashMap;

use crate::plan::reference::Role;
use denormd_model::key::Key;

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
