//! The cluster time up to which the copies are current. Pure.
//!
//! Applying what a stream has read is one step of a chain: the writes of that step are changes that the next rule has
//! yet to apply. So a claim about a chain of two rules waits until the streams have applied everything that was
//! committed when the first step was known to be complete; and so on for longer chains. In a tree each level is a step, and
//! most trees are not as deep as they may be: if nothing was written during a step, there is no further one.

use denormd_model::position::ClusterTime;

/// The claims about chains of one rule, of two, and so on.
#[derive(Debug, Default)]
pub struct Currency {
    /// The claim for each length of a chain.
    claims: Vec<Option<ClusterTime>>,
    /// For each length from two on: the next claim.
    due: Vec<Option<Due>>,
}

/// A claim that does not hold yet.
#[derive(Debug, Clone, Copy)]
struct Due {
    claim: ClusterTime,
    /// The time that must be applied before it holds.
    needed: ClusterTime,
    /// Number of writes before it was made.
    written: u64,
}

impl Currency {
    /// Records that every stream has applied everything up to `applied`, with no work left for later; `operation` is an
    /// operation time of the server that was requested after that. `chain` is the length of the longest chain of rules.
    /// `written`, which was read between the two, changes with each write of a target.
    pub fn applied(&mut self, applied: ClusterTime, operation: ClusterTime, chain: usize, written: u64) {
        let chain = chain.max(1);
        if self.claims.len() != chain {
            (self.claims, self.due) = (vec![None; chain], vec![None; chain]);
        }
        self.claims[0] = Some(applied);
        for length in 1..chain {
            if let Some(due) = self.due[length].take_if(|due| due.needed <= applied) {
                let last = if due.written == written { chain - 1 } else { length };
                for claim in &mut self.claims[length..=last] {
                    *claim = (*claim).max(Some(due.claim));
                }
            }
            if self.due[length].is_none() {
                self.due[length] = self.claims[length - 1].map(|claim| Due { claim, needed: operation, written });
            }
        }
    }

    /// The time up to which every committed change is in the copies.
    #[must_use]
    pub fn claim(&self) -> Option<ClusterTime> {
        self.claims.last().copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u32) -> ClusterTime {
        ClusterTime { seconds, increment: 1 }
    }

    #[test]
    fn one_rule_is_current_as_of_what_is_applied() {
        let mut currency = Currency::default();
        assert_eq!(currency.claim(), None);
        currency.applied(at(10), at(12), 1, 12);
        assert_eq!(currency.claim(), Some(at(10)));
    }

    #[test]
    fn a_chain_is_current_only_when_the_writes_of_its_first_rule_are_applied_too() {
        let mut currency = Currency::default();
        currency.applied(at(10), at(12), 2, 12);
        assert_eq!(currency.claim(), None, "what the first rule wrote for 10 may be at 12");
        currency.applied(at(11), at(13), 2, 13);
        assert_eq!(currency.claim(), None);
        currency.applied(at(12), at(14), 2, 14);
        assert_eq!(currency.claim(), Some(at(10)));
        currency.applied(at(14), at(15), 2, 15);
        assert_eq!(currency.claim(), Some(at(12)));
        currency.applied(at(14), at(15), 3, 15);
        assert_eq!(currency.claim(), None, "other rules, other chains");
    }

    /// A claim about a tree of 64 levels came a minute late, however flat the tree.
    #[test]
    fn a_step_that_writes_nothing_is_the_last_one() {
        let mut currency = Currency::default();
        currency.applied(at(10), at(12), 64, 1);
        currency.applied(at(12), at(14), 64, 2);
        assert_eq!(currency.claim(), None, "the first level was written");
        currency.applied(at(14), at(16), 64, 2);
        assert_eq!(currency.claim(), Some(at(12)));
    }

    /// A change is committed every second, and each rule of a chain takes a second to apply what the previous one
    /// wrote.
    #[test]
    fn no_claim_is_ahead_of_the_end_of_a_chain() {
        for chain in 1..6_u32 {
            let mut currency = Currency::default();
            for now in 10..60 {
                currency.applied(at(now - 1), at(now), chain as usize, now.into());
                if let Some(claim) = currency.claim() {
                    assert!(claim.seconds + chain <= now, "chain of {chain} at {now}: {claim}");
                }
            }
            assert!(currency.claim().is_some(), "a chain of {chain} makes claims");
        }
    }
}
