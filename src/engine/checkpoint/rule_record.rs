//! The record of a rule: its state, its definitions, and what people have agreed to. [`stored`] has the form in which it is
//! stored.

mod stored;

use std::mem;

use bson::{Bson, Document};
use serde::{Deserialize, Serialize};

use denormd_model::{field_path::FieldPath, position::ClusterTime, rule_state::RuleState};

use denormd_rules::plan::{Rule, is_same_definition, owned_paths};

use super::kept::Keeping;
pub use stored::RULES;
pub(crate) use stored::{Id, document, read};
pub(super) use stored::{
    backfill_or_awaiting, changed, end_of_pause, has_ended, is_backfilling, is_in_config, is_paused, is_unavailable,
    progress_field, same_generation, state_fields,
};

/// The record of a rule from earlier runs.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each says something of its own, and any of them may hold together")]
pub struct RuleRecord {
    /// The definition of the rule, as last recorded.
    pub definition: Document,
    /// Earlier definitions that owned other fields.
    pub retired: Vec<Document>,
    /// The definition whose effect on existing data somebody has agreed to.
    pub agreed: Option<Document>,
    /// True once its source collection has been seen.
    pub source_seen: bool,
    /// The UUID of that collection. The first version did not store it.
    pub source_uuid: Option<Bson>,
    /// The time up to which the loss of its source is accepted: an earlier drop, read again after a crash, does not
    /// block the rule.
    pub released: Option<ClusterTime>,
    /// The state of the rule.
    pub state: RuleState,
    /// True if changes of the rule were lost, and no backfill has ended since.
    pub degraded: bool,
    /// Targets done and targets to do in its open backfill, if known.
    pub progress: Option<(u64, Option<u64>)>,
    /// The last generation set by a command that a leader has acted on.
    pub noticed: i64,
    /// Number of changes of its state, so that a delayed write cannot undo a newer one.
    pub generation: i64,
    /// True if somebody has agreed to the removals of its open or next backfill. The rule is being backfilled, waits
    /// for `denormd backfill`, is paused or is unavailable.
    pub removals_agreed: bool,
    /// True if the leader has stopped the rule while it waited for `denormd backfill`. Once the rule runs again by itself, it goes on
    /// waiting.
    pub awaiting: bool,
    /// The paths that are new to the rule, until its first backfill has ended: their values are kept, unless `undo.mode` is `off`.
    pub keeping: Option<Keeping>,
    /// The fields to which `denormd undo` has put back values since the last backfill: they are the application's.
    pub undone: Vec<Retired>,
}

/// A path of a collection that a rule used to own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Retired {
    /// The full name of the collection, with its database.
    #[serde(rename = "collection")]
    pub collection: String,
    /// The path of the field.
    #[serde(rename = "path")]
    pub path: FieldPath,
    /// The condition on the rule's targets (`where`): it has written nothing in other documents.
    #[serde(rename = "where", default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<Document>,
}

impl Retired {
    /// The names of the database and the collection.
    #[must_use]
    pub fn namespace(&self) -> (&str, &str) {
        self.collection.split_once('.').unwrap_or_default()
    }
}

/// The effect of a state change on an agreement to the values that a backfill removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Agreement {
    /// The change gives the agreement.
    Given,
    /// An agreement to the backfill before this change remains valid if the definition of the rule is unchanged.
    Kept,
    /// The change ends an earlier agreement.
    Ended,
}

impl RuleRecord {
    /// True if the rule was last in the config with this definition.
    #[must_use]
    pub fn runs(&self, rule: &Rule) -> bool {
        self.state != RuleState::Removed && rule.has_definition(&self.definition)
    }

    /// True if somebody has agreed to its definition, and the first backfill of that definition has not ended. Values on the paths that
    /// were new to the rule may still be the application's, and nobody has agreed to what another definition does to them.
    #[must_use]
    pub fn has_open_agreement(&self) -> bool {
        let agreed = self.agreed.as_ref().is_some_and(|agreed| is_same_definition(agreed, &self.definition));
        self.keeping.is_some() && (agreed || self.removals_agreed)
    }

    /// True if `denormd undo` has put back values in a field that this definition owned.
    #[must_use]
    pub fn has_given_back(&self, definition: &Document) -> bool {
        let collection = definition.get_document("target").and_then(|target| target.get_str("collection")).ok();
        let owned = owned_paths(definition);
        let mut undone = self.undone.iter().filter(|undone| Some(undone.collection.as_str()) == collection);
        undone.any(|undone| owned.iter().any(|path| path.overlaps_loosely(&undone.path)))
    }

    /// Merges the records of two partitions: the more urgent state, and only the progress that both have made.
    pub(super) fn join(&mut self, other: Self) {
        let other_is_worse = other.state.outranks(&self.state);
        // The sum reaches the generation only when every partition has acted on its own changes.
        self.noticed += other.noticed;
        self.generation += other.generation;
        self.source_seen |= other.source_seen;
        self.degraded |= other.degraded;
        self.source_uuid = self.source_uuid.take().or(other.source_uuid);
        self.released = self.released.max(other.released);
        if self.agreed != other.agreed {
            self.agreed = None;
        }
        self.removals_agreed &= other.removals_agreed;
        self.awaiting |= other.awaiting;
        for definition in other.retired {
            if !self.retired.contains(&definition) {
                self.retired.push(definition);
            }
        }
        self.keeping = Keeping::joined([self.keeping.as_ref(), other.keeping.as_ref()]);
        for undone in other.undone {
            if !self.undone.contains(&undone) {
                self.undone.push(undone);
            }
        }
        // Each partition scans all targets, so the slowest one determines the progress.
        let behind = |progress: &Option<(u64, Option<u64>)>| progress.map(|(done, _)| done);
        if other_is_worse || behind(&other.progress) < behind(&self.progress) {
            self.progress = other.progress;
        }
        let mut left = other.definition;
        let mut left_state = other.state;
        if other_is_worse {
            mem::swap(&mut self.definition, &mut left);
            mem::swap(&mut self.state, &mut left_state);
        }
        // The other partition may have written by a definition of its own, unless that was blocked before its first write.
        let has_written = !left_state.awaits_agreement();
        if has_written && left != self.definition && !self.retired.contains(&left) {
            self.retired.push(left);
        }
    }

    /// The record of a rule that new partitions begin with, from those of all old ones. A rule that runs is backfilled from the
    /// start if one of the old partitions has not done that, or has done it by another definition. A rule that was removed
    /// stays removed, so that it is compared with the existing data before it runs again; a rule that waits for `denormd
    /// backfill` goes on waiting.
    pub(crate) fn of_new_partitions(records: Vec<Self>, is_whole: bool) -> Option<Self> {
        let generation = records.iter().map(|record| record.generation).max()?;
        let is_same = records.iter().all(|record| is_same_definition(&record.definition, &records[0].definition));
        let is_removed = records.iter().any(|record| record.state == RuleState::Removed);
        let paused =
            records.iter().map(|record| &record.state).find(|state| matches!(state, RuleState::Paused { .. })).cloned();
        let mut records = records.into_iter();
        let mut joined = records.next()?;
        records.for_each(|other| joined.join(other));
        // Each new partition has this generation.
        joined.noticed = if joined.noticed == joined.generation { generation } else { 0 };
        joined.generation = generation;
        match joined.state {
            _ if joined.state.is_stopped() => {}
            _ if is_removed => joined.state = RuleState::Removed,
            RuleState::Live if is_whole && is_same => {}
            RuleState::Live | RuleState::Backfilling { .. } => joined.state = RuleState::BACKFILL,
            _ => {}
        }
        // The dead letters and jobs that say which targets the first backfill has passed over may not be carried along.
        if !is_whole && let Some(keeping) = &mut joined.keeping {
            keeping.passed.clear();
        }
        // An unavailable rule resumes by itself, a paused one does not.
        if let (Some(paused), RuleState::Unavailable { .. }) = (paused, &joined.state) {
            joined.state = paused;
        }
        joined.state = joined.state.with_removals(joined.removals_agreed);
        Some(joined)
    }
}
