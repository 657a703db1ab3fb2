//! Targets that differed when they were last looked at. Pure.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
};

use bson::{Bson, RawBson, RawDocumentBuf};

use crate::{key::Key, reconcile::compare::Compared};

/// What a look has led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is as it should be, or gone.
    Cleared,
    /// Look again.
    Suspect,
    /// It differs.
    Differs,
}

/// The suspects: of each no more is kept than what tells whether the next look finds the same.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    looked: HashMap<Key, Looked>,
}

#[derive(Debug, Clone, Copy)]
struct Looked {
    fingerprint: u64,
    /// Looks in a row that found this.
    times: u32,
}

impl Suspects {
    pub fn is_empty(&self) -> bool {
        self.looked.is_empty()
    }

    pub fn len(&self) -> usize {
        self.looked.len()
    }

    pub fn clear(&mut self) {
        self.looked.clear();
    }

    /// Their `_id`s, some at a time.
    pub fn ids(&self, size: usize) -> Vec<Vec<Bson>> {
        let ids: Vec<Bson> = self.looked.keys().filter_map(|key| key.values().first().cloned()).collect();
        ids.chunks(size).map(<[Bson]>::to_vec).collect()
    }

    /// The first look at a target.
    pub fn add(&mut self, compared: &Compared) {
        if let Some(fingerprint) = fingerprint(compared) {
            self.looked.insert(Key::one(compared.target.clone()), Looked { fingerprint, times: 1 });
        }
    }

    /// Of `ids`, those that were not found any more take no part.
    pub fn forget_all_but(&mut self, ids: &[Bson], found: &HashSet<Key>) {
        for id in ids.iter().map(|id| Key::one(id.clone())).filter(|id| !found.contains(id)) {
            self.looked.remove(&id);
        }
    }

    /// One more look, after everything that was committed at the last one has been applied.
    pub fn look(&mut self, compared: &Compared, needed: u32) -> Verdict {
        let id = Key::one(compared.target.clone());
        let Some(fingerprint) = fingerprint(compared) else {
            self.looked.remove(&id);
            return Verdict::Cleared;
        };
        let Some(looked) = self.looked.get_mut(&id) else { return Verdict::Cleared };
        if looked.fingerprint != fingerprint {
            *looked = Looked { fingerprint, times: 1 };
            return Verdict::Suspect;
        }
        looked.times += 1;
        if looked.times < needed {
            return Verdict::Suspect;
        }
        self.looked.remove(&id);
        Verdict::Differs
    }
}

/// Which paths differ, what they hold and what they should hold; None when nothing differs.
fn fingerprint(compared: &Compared) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    let mut differs = false;
    for difference in compared.differences() {
        differs = true;
        (&difference.path, difference.element).hash(&mut hasher);
        for value in [&difference.expected, &difference.stored] {
            bytes(value.as_ref()).hash(&mut hasher);
        }
    }
    differs.then(|| hasher.finish())
}

fn bytes(value: Option<&RawBson>) -> Vec<u8> {
    let mut doc = RawDocumentBuf::new();
    if let Some(value) = value {
        doc.append(bson::cstr!("v"), value.clone());
    }
    doc.into_bytes()
}

#[cfg(test)]
mod tests {
    use bson::RawBson;

    use super::*;
    use crate::reconcile::compare::Difference;

    fn compared(expected: i32, stored: i32) -> Compared {
        let value = |n: i32| Some(RawBson::Int32(n));
        let target = Bson::Int32(1);
        let field = Difference {
            target: target.clone(),
            path: "n".to_owned(),
            element: None,
            expected: value(expected),
            stored: value(stored),
        };
        Compared { target, fields: vec![field], references: Vec::new() }
    }

    #[test]
    fn only_what_stands_still_differs() {
        use Verdict::{Cleared, Differs, Suspect};
        for (looks, expected) in [
            (vec![(2, 1), (2, 1), (2, 1)], vec![Suspect, Differs]),
            // The write that was under way arrived.
            (vec![(2, 1), (2, 2)], vec![Cleared]),
            // Its source changes all the while: each time it differs otherwise.
            (vec![(2, 1), (3, 2), (4, 3), (5, 4)], vec![Suspect, Suspect, Suspect]),
            // The source changed back and forth, and then nobody repaired it.
            (vec![(2, 1), (3, 1), (3, 1), (3, 1)], vec![Suspect, Suspect, Differs]),
        ] {
            let mut suspects = Suspects::default();
            suspects.add(&compared(looks[0].0, looks[0].1));
            let verdicts: Vec<Verdict> = looks[1..].iter().map(|(e, s)| suspects.look(&compared(*e, *s), 3)).collect();
            assert_eq!(verdicts, expected, "{looks:?}");
        }
    }

    #[test]
    fn a_target_as_it_should_be_is_no_suspect_and_one_that_is_gone_none_any_more() {
        let mut suspects = Suspects::default();
        suspects.add(&compared(1, 1));
        assert!(suspects.is_empty());
        suspects.add(&compared(1, 2));
        suspects.forget_all_but(&[Bson::Int64(1)], &HashSet::new());
        assert!(suspects.is_empty());
    }
}
