//! The cluster time up to which the copies are current. Pure.
//!
//! Applying what a stream has read is one step of a chain: the writes of that step are changes that the next rule has
//! yet to apply. So a claim about a chain of two rules waits until the streams have applied everything that was
//! committed when the first step was known to be complete; and so on for longer chains. In a tree each level is a step, and
//! most trees are not as deep as they may be: if nothing was written during a step, there is no further one.

use std::collections::BTreeSet;

use denormd_model::position::ClusterTime;

/// The claim that every change committed by `time` is in the copies, except in those of some rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub time: ClusterTime,
    /// The rules whose copies may lack a change.
    pub except: BTreeSet<String>,
}

impl Claim {
    /// The same claim with further exceptions.
    fn except(&self, more: &BTreeSet<String>) -> Self {
        Self { time: self.time, except: self.except.union(more).cloned().collect() }
    }
}

/// The claims about chains of one rule, of two, and so on.
#[derive(Debug, Default)]
pub struct Currency {
    /// The claim for each length of a chain.
    claims: Vec<Option<Claim>>,
    /// For each length from two on: the next claim.
    due: Vec<Option<Due>>,
    /// The present exceptions.
    except: BTreeSet<String>,
}

/// A claim that does not hold yet.
#[derive(Debug, Clone)]
struct Due {
    claim: Claim,
    /// The time that must be applied before it holds.
    needed: ClusterTime,
    /// Number of writes before it was made.
    written: u64,
}

impl Currency {
    /// Records that every stream has applied everything up to the time of `applied`, with no work left for later but that of
    /// the exceptions; `operation` is an operation time of the server that was requested after that. `chain` is the length of
    /// the longest chain of rules. `written`, which was read between the two, changes with each write of a target.
    ///
    /// The changes that an excepted rule has missed reach the next rule of its chain later, so a claim keeps the exceptions of each
    /// step.
    pub fn applied(&mut self, applied: Claim, operation: ClusterTime, chain: usize, written: u64) {
        let chain = chain.max(1);
        if self.claims.len() != chain {
            (self.claims, self.due) = (vec![None; chain], vec![None; chain]);
        }
        self.claims[0] = Some(applied.clone());
        for length in 1..chain {
            if let Some(due) = self.due[length].take_if(|due| due.needed <= applied.time) {
                let last = if due.written == written { chain - 1 } else { length };
                let claim = due.claim.except(&applied.except);
                for held in &mut self.claims[length..=last] {
                    if held.as_ref().is_none_or(|held| held.time < claim.time) {
                        *held = Some(claim.clone());
                    }
                }
            }
            if self.due[length].is_none() {
                let claim = self.claims[length - 1].as_ref().map(|claim| claim.except(&applied.except));
                self.due[length] = claim.map(|claim| Due { claim, needed: operation, written });
            }
        }
        self.except = applied.except;
    }

    /// The newest claim about all chains; None while nothing is known.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        self.claims.last()?.as_ref().map(|claim| claim.except(&self.except))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u32) -> ClusterTime {
        ClusterTime { seconds, increment: 1 }
    }

    fn all(seconds: u32) -> Claim {
        but_for(seconds, &[])
    }

    fn but_for(seconds: u32, rules: &[&str]) -> Claim {
        Claim { time: at(seconds), except: rules.iter().map(|rule| (*rule).to_owned()).collect() }
    }

    /// The first rule of a chain was live again, and the second one had not read what its backfill had written.
    #[test]
    fn an_exception_at_one_step_is_one_of_the_whole_claim() {
        let mut currency = Currency::default();
        currency.applied(but_for(110, &["first", "second"]), at(190), 2, 1);
        assert_eq!(currency.claim(), None);
        currency.applied(all(191), at(205), 2, 2);
        assert_eq!(currency.claim(), Some(but_for(110, &["first", "second"])));
        currency.applied(but_for(206, &["third"]), at(207), 2, 3);
        assert_eq!(currency.claim(), Some(but_for(191, &["third"])));
    }

    #[test]
    fn one_rule_is_current_as_of_what_is_applied() {
        let mut currency = Currency::default();
        assert_eq!(currency.claim(), None);
        currency.applied(all(10), at(12), 1, 12);
        assert_eq!(currency.claim(), Some(all(10)));
    }

    #[test]
    fn a_chain_is_current_only_when_the_writes_of_its_first_rule_are_applied_too() {
        let mut currency = Currency::default();
        currency.applied(all(10), at(12), 2, 12);
        assert_eq!(currency.claim(), None, "what the first rule wrote for 10 may be at 12");
        currency.applied(all(11), at(13), 2, 13);
        assert_eq!(currency.claim(), None);
        currency.applied(all(12), at(14), 2, 14);
        assert_eq!(currency.claim(), Some(all(10)));
        currency.applied(all(14), at(15), 2, 15);
        assert_eq!(currency.claim(), Some(all(12)));
        currency.applied(all(14), at(15), 3, 15);
        assert_eq!(currency.claim(), None, "other rules, other chains");
    }

    /// A claim about a tree of 64 levels came a minute late, however flat the tree.
    #[test]
    fn a_step_that_writes_nothing_is_the_last_one() {
        let mut currency = Currency::default();
        currency.applied(all(10), at(12), 64, 1);
        currency.applied(all(12), at(14), 64, 2);
        assert_eq!(currency.claim(), None, "the first level was written");
        currency.applied(all(14), at(16), 64, 2);
        assert_eq!(currency.claim(), Some(all(12)));
    }

    /// A change is committed every second, and each rule of a chain takes a second to apply what the previous one
    /// wrote.
    #[test]
    fn no_claim_is_ahead_of_the_end_of_a_chain() {
        for chain in 1..6_u32 {
            let mut currency = Currency::default();
            for now in 10..60 {
                currency.applied(all(now - 1), at(now), chain as usize, now.into());
                if let Some(claim) = currency.claim() {
                    assert!(claim.time.seconds + chain <= now, "chain of {chain} at {now}: {claim:?}");
                }
            }
            assert!(currency.claim().is_some(), "a chain of {chain} makes claims");
        }
    }
}
