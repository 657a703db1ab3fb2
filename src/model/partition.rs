//! A pipeline's share of a deployment's keys. No I/O.
//!
//! A deployment may be divided into partitions. In most respects each is a deployment of its own, with its own lease,
//! term, fence, checkpoints and rule states, under an id of its own ([`Partition::id`]). An instance runs one pipeline
//! for each partition that it leads. All partitions follow the same streams.
//!
//! # Why no change is lost, and no write is out of order
//!
//! Every write has a key: the value that source and targets share, or the target's `_id`. Each key has one owner
//! ([`Partition::owns`]), determined by a hash that is the same for all keys that the server considers equal, and only
//! the owner's pipeline processes the key. So all writes for a key come from one queue, one at a time. After a
//! hand-over, the predecessor's deadline has passed. The guarantees of a single pipeline for all keys therefore hold
//! for the keys of each partition. Two partitions may write one target: different elements, or the same field for
//! different references. Every write requires the reference that it was computed for, as two keys of one pipeline do.
//!
//! A lookup does not know in advance which keys it leads to, so every partition runs it and keeps the results that it
//! owns. Some lookups must run after writes in flight, because such a write may still put a child into its old parent.
//! The owner of the parent makes that write. Its own lookup waits for its own writes, so it finds the parent.
//!
//! Operations on a whole rule (a backfill, a dropped source, a pause) are done by every partition for its own keys.
//! Each records them in its own state before its own checkpoint passes the event that requires them.

use bson::{Document, doc};
use sha2::{Digest, Sha256};

use crate::key::Key;

/// Maximum number of partitions of one deployment.
pub const MOST: u32 = 64;
/// Separator between the deployment's name and the partition's place: no name contains it.
const SEPARATOR: char = '#';

/// One of a deployment's partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition {
    place: u32,
    of: u32,
}

impl Partition {
    /// The only partition of a deployment that is not divided.
    pub const WHOLE: Self = Self { place: 0, of: 1 };

    /// All partitions of a deployment that is divided into `of`.
    #[must_use = "iterators are lazy"]
    pub fn all(of: u32) -> impl DoubleEndedIterator<Item = Self> {
        (0..of).map(move |place| Self { place, of })
    }

    /// The index of the partition, from 0.
    #[must_use]
    pub fn place(self) -> u32 {
        self.place
    }

    /// The number of partitions in the deployment.
    #[must_use]
    pub fn of(self) -> u32 {
        self.of
    }

    /// The id under which its state is stored: `shop`, or `shop#2/4`.
    #[must_use]
    pub fn id(self, deployment: &str) -> String {
        if self.of <= 1 { deployment.to_owned() } else { format!("{deployment}{SEPARATOR}{}/{}", self.place, self.of) }
    }

    /// True if this partition reconciles the key of the rule: exactly one of all partitions does. The result is the
    /// same in every build, and for keys that are equal.
    #[must_use]
    pub fn owns(self, rule: &str, key: &Key) -> bool {
        self.of <= 1 || hash(rule, key) % u64::from(self.of) == u64::from(self.place)
    }

    /// This partition's share of a limit for all partitions together.
    #[must_use]
    pub fn share(self, limit: usize) -> usize {
        usize::try_from(self.of).map_or(limit, |of| limit.div_ceil(of.max(1)))
    }
}

/// Condition on a field: it holds the id of the deployment or of one of its partitions, for any number of them.
#[must_use]
pub fn of_deployment(field: &str, deployment: &str) -> Document {
    // '$' follows the separator in ASCII, so this range matches all partitions and nothing else.
    let of_partitions = doc! {"$gt": format!("{deployment}{SEPARATOR}"), "$lt": format!("{deployment}$")};
    doc! {"$or": [{field: deployment}, {field: of_partitions}]}
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

    /// Two builds that run at the same time in a rolling update must agree: these expected values must never change.
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
