//! The stored form of a rule's record.
//!
//! Every name here is pinned: `tests/golden` holds documents written by this version and earlier ones. The fields of
//! the first version are unchanged, so that an instance of that version, running at the same time or later, reads the
//! same state. It reads a blocked rule as `held`, and ignores the fields that it does not know.

use std::mem;

use bson::{Bson, DateTime, Document, Timestamp, doc};
use serde::{Deserialize, Serialize};

use denormd_model::{
    clock,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::{Error, Kind, Result};

use super::{kept::Keeping, requests::Retired};

/// The record of a rule from earlier runs.
#[derive(Debug, Clone, PartialEq)]
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
    /// Targets done and targets to do in its open backfill, if known.
    pub progress: Option<(u64, Option<u64>)>,
    /// The last generation set by a command that a leader has acted on.
    pub noticed: i64,
    /// Number of changes of its state, so that a delayed write cannot undo a newer one.
    pub generation: i64,
    /// True if somebody has agreed to the removals of its open or next backfill. The rule is being backfilled, waits
    /// for `denormd backfill`, is paused or is unavailable.
    pub removals_agreed: bool,
    /// The values that its first backfill keeps; none after that backfill.
    pub keeping: Option<Keeping>,
    /// The fields to which `denormd undo` has put back values since the last backfill: they are the application's.
    pub undone: Vec<Retired>,
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
    /// True if somebody has agreed to the effect of this definition on existing data.
    #[must_use]
    pub fn has_agreed(&self, definition: &Document) -> bool {
        self.agreed.as_ref() == Some(definition)
    }

    /// Merges the records of two partitions: the more urgent state, and only the progress that both have made.
    pub(super) fn join(&mut self, other: Self) {
        let other_is_worse = other.state.outranks(&self.state);
        // The sum reaches the generation only when every partition has acted on its own changes.
        self.noticed += other.noticed;
        self.generation += other.generation;
        self.source_seen |= other.source_seen;
        self.source_uuid = self.source_uuid.take().or(other.source_uuid);
        self.released = self.released.max(other.released);
        if self.agreed != other.agreed {
            self.agreed = None;
        }
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
            self.removals_agreed = other.removals_agreed;
        }
        // The other partition may have written by a definition of its own, unless that was blocked before its first write.
        let has_written = !matches!(left_state, RuleState::Blocked(BlockReason::Adoption(_)));
        if has_written && left != self.definition && !self.retired.contains(&left) {
            self.retired.push(left);
        }
    }
}

#[derive(Debug, Deserialize)]
struct Id {
    rule: String,
}

/// `backfill`: the state, in the names of the first version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Backfill {
    #[serde(rename = "pending")]
    Pending,
    #[serde(rename = "manual")]
    Manual,
    #[serde(rename = "done")]
    Done,
    #[serde(rename = "held")]
    Held,
    #[serde(rename = "absent")]
    Absent,
}

#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    #[serde(rename = "done")]
    done: i64,
    #[serde(rename = "expected")]
    expected: Option<i64>,
}

/// The fields that contain the state of a rule.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(rename = "backfill")]
    backfill: Backfill,
    /// The `_id` of the target to resume after, in an array because any BSON value may be one.
    #[serde(rename = "after", default)]
    after: Vec<Bson>,
    /// True if that is a source. Unknown to the first version, whose rules have no such backfill.
    #[serde(rename = "in_sources", default, skip_serializing_if = "Option::is_none")]
    in_sources: Option<bool>,
    #[serde(rename = "reason", default)]
    reason: Option<String>,
    #[serde(rename = "detached", default)]
    detached: Option<bool>,
    #[serde(rename = "paused", default)]
    paused: Option<bool>,
    #[serde(rename = "suspended", default)]
    suspended: Option<bool>,
    /// Unknown to the first version.
    #[serde(rename = "block", default)]
    block: Option<BlockReason>,
    /// The `reason` that was written with `block`. The first version leaves both unchanged when it blocks a rule for
    /// its own reason, so a difference between the reasons marks `block` as outdated.
    #[serde(rename = "block_reason", default)]
    block_reason: Option<String>,
    #[serde(rename = "until", default)]
    until: Option<DateTime>,
    /// The generation of the backfill whose removals somebody has agreed to.
    #[serde(rename = "removals_agreed", default, skip_serializing)]
    removals_agreed: Option<i64>,
}

/// The other fields.
#[derive(Debug, Deserialize)]
struct Beside {
    #[serde(rename = "_id")]
    id: Id,
    #[serde(rename = "definition", default)]
    definition: Document,
    #[serde(rename = "retired", default)]
    retired: Vec<Document>,
    #[serde(rename = "agreed", default)]
    agreed: Option<Document>,
    #[serde(rename = "source_seen", default)]
    source_seen: bool,
    #[serde(rename = "source_uuid", default)]
    source_uuid: Option<Bson>,
    #[serde(rename = "released", default)]
    released: Option<Timestamp>,
    #[serde(rename = "progress", default)]
    progress: Option<Progress>,
    #[serde(rename = "noticed", default)]
    noticed: i64,
    #[serde(rename = "generation", default)]
    generation: i64,
    #[serde(rename = "keeping", default)]
    keeping: Option<Keeping>,
    #[serde(rename = "undone", default)]
    undone: Vec<Bson>,
}

impl Stored {
    fn state(self, generation: i64) -> RuleState {
        let is = |flag: Option<bool>| flag.unwrap_or(false);
        match self.backfill {
            Backfill::Pending => RuleState::Backfilling {
                after: self.after.into_iter().next(),
                in_sources: is(self.in_sources),
                agreed: self.removals_agreed == Some(generation),
            },
            Backfill::Manual => RuleState::AwaitingBackfill,
            Backfill::Done => RuleState::Live,
            Backfill::Absent => RuleState::Removed,
            Backfill::Held if is(self.paused) => RuleState::Paused { until: self.until },
            Backfill::Held if is(self.suspended) => {
                RuleState::Unavailable { reason: self.reason.unwrap_or_else(|| "something is missing".to_owned()) }
            }
            Backfill::Held if is(self.detached) => RuleState::Blocked(BlockReason::SourceGone),
            Backfill::Held => {
                let current = self.block.filter(|_| self.block_reason == self.reason);
                RuleState::Blocked(current.unwrap_or(BlockReason::RemovalLimit))
            }
        }
    }

    fn of(state: &RuleState) -> Self {
        let mut stored = Self {
            backfill: Backfill::Held,
            after: Vec::new(),
            in_sources: None,
            reason: state.reason(),
            detached: None,
            paused: None,
            suspended: None,
            block: None,
            block_reason: None,
            until: None,
            removals_agreed: None,
        };
        match state {
            RuleState::Backfilling { after, in_sources, .. } => {
                (stored.backfill, stored.after) = (Backfill::Pending, after.iter().cloned().collect());
                stored.in_sources = Some(*in_sources);
            }
            RuleState::AwaitingBackfill => stored.backfill = Backfill::Manual,
            RuleState::Live => stored.backfill = Backfill::Done,
            RuleState::Removed => stored.backfill = Backfill::Absent,
            RuleState::Paused { until } => stored.until = *until,
            RuleState::Blocked(reason) => {
                (stored.block, stored.block_reason) = (Some(reason.clone()), stored.reason.clone());
            }
            RuleState::Unavailable { .. } => {}
        }
        if stored.backfill == Backfill::Held {
            stored.detached = Some(*state == RuleState::Blocked(BlockReason::SourceGone));
            stored.paused = Some(matches!(state, RuleState::Paused { .. }));
            stored.suspended = Some(matches!(state, RuleState::Unavailable { .. }));
        }
        stored
    }
}

/// The fields of a rule's document for this state.
pub(super) fn state_fields(state: &RuleState) -> Result<Document> {
    let mut fields = bson::serialize_to_document(&Stored::of(state))
        .map_err(|error| Error::internal(format!("the state of a rule cannot be stored: {error}")))?;
    fields.extend(doc! {"progress": Bson::Null, "saved": clock::now()});
    Ok(fields)
}

/// The progress of a backfill in its stored form.
pub(super) fn progress_field((done, expected): (u64, Option<u64>)) -> Document {
    let count = |targets: u64| i64::try_from(targets).unwrap_or(i64::MAX);
    doc! {"done": count(done), "expected": expected.map(count)}
}

/// Reads a rule's document: the rule's name and its record.
pub(super) fn read(document: &Document) -> Result<(String, RuleRecord)> {
    let unreadable = |error: bson::error::Error| {
        let id = document.get("_id").cloned().unwrap_or(Bson::Null).into_relaxed_extjson();
        Error::new(Kind::Internal, format!("the state of a rule, `_id` {id}, cannot be read: {error}")).hint(
            "was it written by another version, or by hand? Without this document the rule is new, and backfilled",
        )
    };
    let stored: Stored = bson::deserialize_from_document(document.clone()).map_err(unreadable)?;
    let beside: Beside = bson::deserialize_from_document(document.clone()).map_err(unreadable)?;
    let number = |count: i64| u64::try_from(count).unwrap_or_default();
    let removals_agreed = stored.removals_agreed == Some(beside.generation);
    let state = stored.state(beside.generation);
    let may_be_agreed = matches!(
        state,
        RuleState::Backfilling { .. }
            | RuleState::AwaitingBackfill
            | RuleState::Paused { .. }
            | RuleState::Unavailable { .. }
    );
    let record = RuleRecord {
        definition: beside.definition,
        retired: beside.retired,
        agreed: beside.agreed,
        source_seen: beside.source_seen,
        source_uuid: beside.source_uuid,
        released: beside.released.map(ClusterTime::from),
        state,
        progress: beside.progress.map(|progress| (number(progress.done), progress.expected.map(number))),
        noticed: beside.noticed,
        generation: beside.generation,
        removals_agreed: removals_agreed && may_be_agreed,
        keeping: beside.keeping,
        undone: beside.undone.iter().filter_map(Retired::read).collect(),
    };
    Ok((beside.id.rule, record))
}
