//! The values that rules keep in their first backfill.

use std::{collections::HashMap, sync::Arc};

use bson::Bson;
use parking_lot::Mutex;

use crate::checkpoint::kept::Keeping;
use denormd_model::key::whole_number;
use denormd_rules::plan::RuleId;

/// The rules in their first backfill, which keep the values that they overwrite.
#[derive(Debug, Default)]
pub struct KeptValues {
    rules: Mutex<HashMap<RuleId, Kept>>,
    /// Bytes of kept values, if they were counted.
    bytes: Mutex<Option<u64>>,
}

/// The values that a rule in its first backfill keeps.
#[derive(Debug, Clone)]
pub(in crate::reconcile) struct Kept {
    /// The paths, and the targets that the backfill has passed.
    pub keeping: Arc<Keeping>,
    /// True if a target behind the backfill may hold a value that is not denormd's: some became dead letters.
    pub aside: bool,
    /// True once a value was not kept because of `undo.max_bytes`: from then on, no further value is kept. A later one
    /// in the same place could be denormd's own.
    pub is_full: bool,
    /// True if the `_id`s of the targets are in the order of the simple collation. None until the server was asked.
    pub simple: Option<bool>,
}

impl KeptValues {
    /// The values that a rule keeps before it overwrites them; none after its first backfill.
    pub(in crate::reconcile) fn of(&self, rule: RuleId) -> Option<Kept> {
        self.rules.lock().get(&rule).cloned()
    }

    /// Begins to keep the values that a rule overwrites. With `aside`, some of its targets are dead letters.
    pub fn begin(&self, rule: RuleId, keeping: Keeping, aside: bool, is_full: bool) {
        let kept = Kept { keeping: Arc::new(keeping), aside, is_full, simple: None };
        self.rules.lock().insert(rule, kept);
    }

    /// Stops keeping values: from now on the rule overwrites only its own.
    pub fn end(&self, rule: RuleId) {
        self.rules.lock().remove(&rule);
    }

    /// Changes what is known of the values that a rule keeps.
    pub(in crate::reconcile) fn learn(&self, rule: RuleId, change: impl FnOnce(&mut Kept)) {
        if let Some(kept) = self.rules.lock().get_mut(&rule) {
            change(kept);
        }
    }

    /// True if the first backfill of a rule keeps values, and has not passed this target before.
    pub fn is_before(&self, rule: RuleId, target: &Bson) -> bool {
        self.of(rule).is_some_and(|kept| !kept.keeping.passed.first().is_some_and(|passed| is_behind(target, passed)))
    }

    /// Records that the first backfill of a rule has passed this target.
    pub fn passes(&self, rule: RuleId, target: &Bson) {
        self.learn(rule, |kept| Arc::make_mut(&mut kept.keeping).passed = vec![target.clone()]);
    }

    /// The known number of bytes of kept values.
    pub(in crate::reconcile) fn bytes(&self) -> Option<u64> {
        *self.bytes.lock()
    }

    pub(in crate::reconcile) fn learn_bytes(&self, bytes: Option<u64>) {
        *self.bytes.lock() = bytes;
    }
}

/// True if a document with this `_id` comes before or at `passed` in the order of the simple collation. False where
/// the order is not certain: for `_id`s of different types but for whole numbers, binary values of different subtypes, strings that
/// are not ASCII, and types that are not listed here, such as documents.
pub(in crate::reconcile) fn is_behind(id: &Bson, passed: &Bson) -> bool {
    match (id, passed) {
        (Bson::ObjectId(id), Bson::ObjectId(passed)) => id <= passed,
        (Bson::String(id), Bson::String(passed)) => id.is_ascii() && passed.is_ascii() && id <= passed,
        (Bson::DateTime(id), Bson::DateTime(passed)) => id <= passed,
        (Bson::Double(id), Bson::Double(passed)) => id <= passed,
        // The server compares lengths first (<https://www.mongodb.com/docs/manual/reference/bson-type-comparison-order/>), and
        // values of the old subtype are four bytes longer there.
        (Bson::Binary(id), Bson::Binary(passed)) if id.subtype == passed.subtype => {
            (id.bytes.len(), &id.bytes) <= (passed.bytes.len(), &passed.bytes)
        }
        _ => whole_number(id).zip(whole_number(passed)).is_some_and(|(id, passed)| id <= passed),
    }
}
