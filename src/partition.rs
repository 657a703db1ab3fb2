//! Which share of a deployment's keys a pipeline reconciles. Pure.
//!
//! A deployment may be divided into partitions. Each is in most respects a deployment of its own, with its own lease, term,
//! fence, positions and rule states, under an id of its own ([`Partition::id`]); an instance runs one pipeline for each
//! partition that it leads. All of them follow the same streams.
//!
//! # Why no change is lost, and none is written out of order
//!
//! What writes is keyed: by the value that source and targets share, or by the target's `_id`. Such a key has one owner
//! ([`Partition::owns`]), by a hash that keys share when the server calls them equal, and only the owner's pipeline runs it.
//! So all writes for a key come from one queue, one at a time, and after a hand-over from one whose predecessor's deadline is
//! over: what holds with one pipeline for all keys holds for the keys of each. Two partitions may write one target: other
//! elements, or the same field for another reference. Every write demands the reference that it was computed for, as it does
//! of two keys that one pipeline writes side by side.
//!
//! What looks something up does not know the keys that it leads to, so every partition runs it, and keeps of the results what
//! it owns. Where a look-up must come after writes in flight, because one of these may yet put a child into its old parent,
//! it is the owner of that parent who writes it: its own look-up waits for its own writes, and finds the parent.
//!
//! What concerns a rule as a whole (a backfill, a dropped source, a pause) every partition does for its own keys, and records
//! in its own state before its own position passes the event that asks for it.

use sha2::{Digest, Sha256};

use crate::key::Key;

/// The most partitions of one deployment.
pub const MOST: u32 = 64;
/// Between the deployment's name and the partition's place: no name has it.
pub const SEPARATOR: char = '#';

/// One of a deployment's partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition {
    place: u32,
    of: u32,
}

impl Partition {
    /// The only one of a deployment that is not divided.
    pub const WHOLE: Self = Self { place: 0, of: 1 };

    /// All partitions of a deployment that is divided into so many.
    #[must_use = "they are made as they are asked for"]
    pub fn all(of: u32) -> impl DoubleEndedIterator<Item = Self> {
        (0..of).map(move |place| Self { place, of })
    }

    /// Its place, from 0.
    #[must_use]
    pub fn place(self) -> u32 {
        self.place
    }

    /// How many there are.
    #[must_use]
    pub fn of(self) -> u32 {
        self.of
    }

    /// What its state is kept under: `shop`, or `shop#2/4`.
    #[must_use]
    pub fn id(self, deployment: &str) -> String {
        if self.of <= 1 { deployment.to_owned() } else { format!("{deployment}{SEPARATOR}{}/{}", self.place, self.of) }
    }

    /// Whether this key of the rule is reconciled here: of all partitions exactly one says so. The same in every build, and
    /// for keys that are equal.
    #[must_use]
    pub fn owns(self, rule: &str, key: &Key) -> bool {
        self.of <= 1 || hash(rule, key) % u64::from(self.of) == u64::from(self.place)
    }

    /// A share of a limit that is meant for all partitions together.
    #[must_use]
    pub fn share(self, limit: usize) -> usize {
        usize::try_from(self.of).map_or(limit, |of| limit.div_ceil(of.max(1)))
    }
}

fn hash(rule: &str, key: &Key) -> u64 {
    let mut hash = Sha256::new();
    hash.update(rule.as_bytes());
    hash.update([0]);
    hash.update(key.canonical());
    hash.finalize().iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson, doc};

    use super::*;

    fn owner(key: &Key, of: u32) -> u32 {
        let owners: Vec<u32> = Partition::all(of).filter(|p| p.owns("r", key)).map(Partition::place).collect();
        assert_eq!(owners.len(), 1, "exactly one owns a key");
        owners[0]
    }

    #[test]
    fn keys_that_are_equal_have_one_owner() {
        for (a, b) in [
            (bson!(1), bson!(1.0)),
            (bson!(7), Bson::Int64(7)),
            (bson!(0), bson!(-0.0)),
            (bson!(100), Bson::Decimal128("1E+2".parse().unwrap())),
            (bson!({"a": [1, {"b": 2}]}), bson!({"a": [1.0, {"b": 2.0}]})),
            (bson!("x"), Bson::Symbol("x".to_owned())),
        ] {
            for of in 1..=MOST {
                assert_eq!(owner(&Key::one(a.clone()), of), owner(&Key::one(b.clone()), of), "{a} {b} of {of}");
            }
        }
    }

    /// Two builds that run side by side in a rolling update must agree: what this test says may never change.
    #[test]
    fn owners_are_the_same_in_every_build() {
        let keys = [
            Key::new(vec![]),
            Key::one(bson!(1)),
            Key::one(bson!("part-7")),
            Key::one(bson!(0.5)),
            Key::one(Bson::Null),
            Key::one(Bson::ObjectId(bson::oid::ObjectId::from_bytes([7; 12]))),
            Key::one(doc! {"a": 1, "b": [true, "x"]}.into()),
            Key::new(vec![bson!("a"), bson!(2)]),
        ];
        let owners: Vec<u32> = keys.iter().map(|key| owner(key, MOST)).collect();
        assert_eq!(owners, [23, 6, 39, 49, 56, 18, 15, 55]);
    }

    #[test]
    fn keys_spread_evenly() {
        let mut counts = [0; 4];
        for n in 0..4000 {
            counts[owner(&Key::one(bson!(n)), 4) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }

    #[test]
    fn one_partition_is_the_deployment() {
        assert_eq!(Partition::WHOLE.id("shop"), "shop");
        let ids: Vec<String> = Partition::all(2).map(|partition| partition.id("shop")).collect();
        assert_eq!(ids, ["shop#0/2", "shop#1/2"]);
    }
}
