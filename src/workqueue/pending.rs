//! The documents of trees that wait in the queue, or run.
//!
//! The queue records them, and a batch asks for them: a document of a tree is not written while one that it reads is
//! about to be. This only avoids intermediate values. Without it, the tree ends up the same.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{key::Key, plan::RuleId};

/// For each recursive rule, the documents with work in the queue, and in how many lanes.
#[derive(Debug, Default)]
pub struct Pending(Mutex<HashMap<RuleId, HashMap<Key, usize>>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<RuleId, HashMap<Key, usize>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a key has entered a lane of the rule.
    pub(super) fn entered(&self, rule: RuleId, key: &Key) {
        *self.lock().entry(rule).or_default().entry(key.clone()).or_default() += 1;
    }

    /// Records that a key has left a lane of the rule.
    pub(super) fn left(&self, rule: RuleId, key: &Key) {
        let mut rules = self.lock();
        let Some(keys) = rules.get_mut(&rule) else { return };
        if let Some(lanes) = keys.get_mut(key) {
            *lanes -= 1;
            if *lanes == 0 {
                keys.remove(key);
            }
        }
    }

    /// Forgets all keys: the queue that recorded them is gone.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// True if one of these documents is pending.
    pub fn any<'a>(&self, rule: RuleId, mut documents: impl Iterator<Item = &'a Key>) -> bool {
        self.lock().get(&rule).is_some_and(|keys| documents.any(|document| keys.contains_key(document)))
    }

    /// Up to `most` pending documents, without those that `known` accepts.
    pub fn some(&self, rule: RuleId, most: usize, known: impl Fn(&Key) -> bool) -> Vec<Key> {
        let rules = self.lock();
        let keys = rules.get(&rule).into_iter().flat_map(HashMap::keys);
        keys.filter(|key| !known(key)).take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use bson::Bson;

    use super::*;

    #[test]
    fn a_document_is_pending_until_it_has_left_every_lane() {
        let (pending, rule) = (Pending::default(), RuleId(0));
        let key = |id: i32| Key::one(Bson::Int32(id));
        pending.entered(rule, &key(1));
        pending.entered(rule, &key(1));
        pending.entered(rule, &key(2));
        pending.left(rule, &key(1));
        assert!(pending.any(rule, [key(7), key(1)].iter()));
        assert!(!pending.any(RuleId(1), [key(1)].iter()), "another rule");
        pending.left(rule, &key(1));
        assert!(!pending.any(rule, [key(1)].iter()));
        assert_eq!(pending.some(rule, 10, |_| false), [key(2)]);
        assert!(pending.some(rule, 10, |known| *known == key(2)).is_empty());
    }
}
