//! Targets that differed when they were last compared. Pure.

use std::collections::{HashMap, HashSet};

use bson::Bson;

use crate::reconcile::compare::Compared;
use denormd_model::key::Key;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The target is correct, or no longer exists.
    Cleared,
    /// The target must be compared again.
    Suspect,
    /// The target differs.
    Differs,
}

/// The suspects. Only a fingerprint of each is kept, enough to recognise the same difference.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    looked: HashMap<Key, Looked>,
}

#[derive(Debug, Clone, Copy)]
struct Looked {
    fingerprint: u64,
    /// Number of successive comparisons with this result.
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

    /// The `_id`s of the suspects, in chunks.
    pub fn ids(&self, size: usize) -> Vec<Vec<Bson>> {
        let ids: Vec<Bson> = self.looked.keys().filter_map(|key| key.values().first().cloned()).collect();
        ids.chunks(size).map(<[Bson]>::to_vec).collect()
    }

    /// Records the first comparison of a target.
    pub fn add(&mut self, compared: &Compared) {
        if let Some(fingerprint) = compared.fingerprint() {
            self.looked.insert(Key::one(compared.target.clone()), Looked { fingerprint, times: 1 });
        }
    }

    /// Takes over the suspects of other targets.
    pub fn join(&mut self, others: Self) {
        self.looked.extend(others.looked);
    }

    /// Removes those of `ids` whose targets were not found again.
    pub fn forget_all_but(&mut self, ids: &[Bson], found: &HashSet<Key>) {
        for id in ids.iter().map(|id| Key::one(id.clone())).filter(|id| !found.contains(id)) {
            self.looked.remove(&id);
        }
    }

    /// Records another comparison, made after everything committed at the previous one has been applied.
    pub fn look(&mut self, compared: &Compared, needed: u32) -> Verdict {
        let id = Key::one(compared.target.clone());
        let Some(fingerprint) = compared.fingerprint() else {
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
            // The pending write was applied.
            (vec![(2, 1), (2, 2)], vec![Cleared]),
            // The source keeps changing, so the difference is another one each time.
            (vec![(2, 1), (3, 2), (4, 3), (5, 4)], vec![Suspect, Suspect, Suspect]),
            // The source changed, and then the difference remained.
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
