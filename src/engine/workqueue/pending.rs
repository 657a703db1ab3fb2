//! The documents of trees that are about to change.
//!
//! The queue records the documents that wait in it, or run; a batch records those that it writes, until the event of the
//! write is routed. Batches look here: a document of a tree is not written while one that it reads is about to change.
//! This only avoids intermediate values. Without it, the tree ends up the same.

use std::{collections::HashMap, time::Duration};

use denormd_model::key::Key;
use denormd_rules::plan::RuleId;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum time to wait for the change event of a write. A write that matched nothing causes none.
const ECHO: Duration = Duration::from_secs(1);
/// Number of recorded writes above which those older than [`ECHO`] are forgotten.
const MANY: usize = 10_000;

/// The documents of each recursive rule that are about to change.
#[derive(Debug, Default)]
pub struct Pending(Mutex<HashMap<RuleId, Documents>>);

#[derive(Debug, Default)]
struct Documents {
    /// Documents with queued work, and the number of lanes they are in.
    lanes: HashMap<Key, usize>,
    /// Written documents, with the time of the write.
    written: HashMap<Key, Instant>,
}

impl Documents {
    fn has(&self, document: &Key) -> bool {
        self.lanes.contains_key(document) || self.written.get(document).is_some_and(|since| since.elapsed() < ECHO)
    }
}

impl Pending {
    /// Records that a key has entered a lane of the rule.
    pub(super) fn entered(&self, rule: RuleId, key: &Key) {
        *self.0.lock().entry(rule).or_default().lanes.entry(key.clone()).or_default() += 1;
    }

    /// Records that a key has left a lane of the rule.
    pub(super) fn left(&self, rule: RuleId, key: &Key) {
        let mut rules = self.0.lock();
        let Some(documents) = rules.get_mut(&rule) else { return };
        if let Some(lanes) = documents.lanes.get_mut(key) {
            *lanes -= 1;
            if *lanes == 0 {
                documents.lanes.remove(key);
            }
        }
    }

    /// Records that these documents are being written.
    pub fn writes<'a>(&self, rule: RuleId, written: impl Iterator<Item = &'a Key>) {
        let mut rules = self.0.lock();
        let documents = rules.entry(rule).or_default();
        if documents.written.len() > MANY {
            documents.written.retain(|_, since| since.elapsed() < ECHO);
        }
        documents.written.extend(written.map(|document| (document.clone(), Instant::now())));
    }

    /// Records that the event of a write is routed: its requests are in the queue.
    pub(super) fn routed(&self, rule: RuleId, document: &Key) {
        if let Some(documents) = self.0.lock().get_mut(&rule) {
            documents.written.remove(document);
        }
    }

    /// Forgets all documents: the queue that recorded them is gone.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// True if one of these documents is about to change.
    pub fn any<'a>(&self, rule: RuleId, mut documents: impl Iterator<Item = &'a Key>) -> bool {
        self.0.lock().get(&rule).is_some_and(|known| documents.any(|document| known.has(document)))
    }

    /// Up to `most` documents that are about to change, without those that `known` accepts.
    pub fn some(&self, rule: RuleId, most: usize, known: impl Fn(&Key) -> bool) -> Vec<Key> {
        let rules = self.0.lock();
        let Some(documents) = rules.get(&rule) else { return Vec::new() };
        let all = documents.lanes.keys().chain(documents.written.keys());
        all.filter(|key| !known(key) && documents.has(key)).take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use bson::Bson;

    use super::*;

    fn key(id: i32) -> Key {
        Key::one(Bson::Int32(id))
    }

    #[test]
    fn a_document_is_pending_until_it_has_left_every_lane() {
        let (pending, rule) = (Pending::default(), RuleId(0));
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

    #[test]
    fn a_document_that_is_written_is_pending_until_its_event_is_routed() {
        let (pending, rule) = (Pending::default(), RuleId(0));
        pending.entered(rule, &key(1));
        pending.writes(rule, [key(1)].iter());
        pending.left(rule, &key(1));
        assert!(pending.any(rule, [key(1)].iter()));
        assert_eq!(pending.some(rule, 10, |_| false), [key(1)]);
        pending.routed(rule, &key(1));
        assert!(!pending.any(rule, [key(1)].iter()));
    }
}
