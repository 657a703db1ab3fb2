//! The stored form of a rule's record. No other file knows it.
//!
//! Every name here is pinned: `tests/golden` holds documents written by this version and earlier ones. The fields of
//! the first version are unchanged, so that an instance of that version, running at the same time or later, reads the
//! same state. It reads a blocked rule as `held`, and ignores the fields that it does not know.

use std::time::Duration;

use bson::{Bson, DateTime, Document, Timestamp, doc};
use serde::{Deserialize, Serialize};

use denormd_model::{
    clock,
    position::ClusterTime,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::{Error, Result};

use super::{Retired, RuleRecord};
use crate::checkpoint::{kept::Keeping, unreadable};

/// The collection of rule states: one document per deployment and rule.
pub const RULES: &str = "rules";

/// The `_id` of a rule's document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Id {
    /// The deployment, or one of its partitions.
    #[serde(rename = "deployment")]
    pub deployment: String,
    /// The rule's name.
    #[serde(rename = "rule")]
    pub rule: String,
}

/// `backfill`: the state, in the names of the first version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Backfill {
    #[serde(rename = "pending")]
    Pending,
    #[serde(rename = "manual")]
    Manual,
    #[serde(rename = "done")]
    Done,
    #[default]
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
#[derive(Debug, Default, Serialize, Deserialize)]
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
    /// The `reason` that was written with `block`. The first version leaves both unchanged when it blocks or pauses a rule
    /// for its own reason, so a difference between the reasons marks `block` as outdated.
    #[serde(rename = "block_reason", default)]
    block_reason: Option<String>,
    #[serde(rename = "until", default)]
    until: Option<DateTime>,
    /// The generation of the stop before which the rule waited for `denormd backfill`. Unknown to earlier versions.
    #[serde(rename = "awaiting", default)]
    awaiting: Option<i64>,
    /// The generation of the backfill whose removals somebody has agreed to.
    #[serde(rename = "removals_agreed", default, skip_serializing)]
    removals_agreed: Option<i64>,
}

/// The other fields.
#[derive(Debug, Serialize, Deserialize)]
struct Beside {
    #[serde(rename = "_id")]
    id: Id,
    #[serde(rename = "definition", default)]
    definition: Document,
    #[serde(rename = "retired", default)]
    retired: Vec<Document>,
    #[serde(rename = "agreed", default, skip_serializing_if = "Option::is_none")]
    agreed: Option<Document>,
    #[serde(rename = "source_seen", default)]
    source_seen: bool,
    #[serde(rename = "source_uuid", default, skip_serializing_if = "Option::is_none")]
    source_uuid: Option<Bson>,
    #[serde(rename = "released", default, skip_serializing_if = "Option::is_none")]
    released: Option<Timestamp>,
    #[serde(rename = "progress", default, skip_serializing)]
    progress: Option<Progress>,
    #[serde(rename = "noticed", default)]
    noticed: i64,
    #[serde(rename = "generation", default)]
    generation: i64,
    #[serde(rename = "keeping", default, skip_serializing_if = "Option::is_none")]
    keeping: Option<Keeping>,
    #[serde(rename = "undone", default)]
    undone: Vec<Retired>,
    /// Unknown to earlier versions, which end a backfill without removing it: of a live rule it has no meaning.
    #[serde(rename = "degraded", default, skip_serializing_if = "std::ops::Not::not")]
    degraded: bool,
}

impl Stored {
    fn state(self, generation: i64) -> RuleState {
        let is = |flag: Option<bool>| flag.unwrap_or(false);
        let block = if is(self.detached) {
            Some(BlockReason::SourceGone)
        } else {
            self.block.filter(|_| self.block_reason == self.reason)
        };
        match self.backfill {
            Backfill::Pending => RuleState::Backfilling {
                after: self.after.into_iter().next(),
                in_sources: is(self.in_sources),
                agreed: self.removals_agreed == Some(generation),
            },
            Backfill::Manual => RuleState::AwaitingBackfill,
            Backfill::Done => RuleState::Live,
            Backfill::Absent => RuleState::Removed,
            Backfill::Held if is(self.paused) => RuleState::Paused { until: self.until, blocked: block },
            Backfill::Held if is(self.suspended) => {
                RuleState::Unavailable { reason: self.reason.unwrap_or_else(|| "something is missing".to_owned()) }
            }
            Backfill::Held => RuleState::Blocked(block.unwrap_or(BlockReason::RemovalLimit)),
        }
    }

    fn of(state: &RuleState) -> Self {
        let mut stored = Self { backfill: Backfill::Held, reason: state.reason(), ..Self::default() };
        match state {
            RuleState::Backfilling { after, in_sources, .. } => {
                (stored.backfill, stored.after) = (Backfill::Pending, after.iter().cloned().collect());
                stored.in_sources = Some(*in_sources);
            }
            RuleState::AwaitingBackfill => stored.backfill = Backfill::Manual,
            RuleState::Live => stored.backfill = Backfill::Done,
            RuleState::Removed => stored.backfill = Backfill::Absent,
            RuleState::Paused { until, .. } => stored.until = *until,
            RuleState::Blocked(_) | RuleState::Unavailable { .. } => {}
        }
        if let Some(reason) = state.block() {
            (stored.block, stored.block_reason) = (Some(reason.clone()), stored.reason.clone());
        }
        if stored.backfill == Backfill::Held {
            stored.detached = Some(state.block() == Some(&BlockReason::SourceGone));
            stored.paused = Some(matches!(state, RuleState::Paused { .. }));
            stored.suspended = Some(matches!(state, RuleState::Unavailable { .. }));
        }
        stored
    }
}

/// The fields of a rule's document for this state.
pub(crate) fn state_fields(state: &RuleState) -> Result<Document> {
    let mut fields = bson::serialize_to_document(&Stored::of(state))
        .map_err(|error| Error::internal(format!("the state of a rule cannot be stored: {error}")))?;
    fields.extend(doc! {"progress": Bson::Null, "saved": clock::now()});
    Ok(fields)
}

/// The expression for `backfill` of a stopped rule that runs again by itself: it goes on waiting if it did before.
pub(crate) fn backfill_or_awaiting() -> Document {
    let is_awaiting = doc! {"$eq": [{"$ifNull": ["$awaiting", -1_i64]}, "$generation"]};
    doc! {"backfill": {"$cond": [is_awaiting, "manual", "pending"]}}
}

/// The progress of a backfill in its stored form.
pub(crate) fn progress_field((done, expected): (u64, Option<u64>)) -> Document {
    let count = |targets: u64| i64::try_from(targets).unwrap_or(i64::MAX);
    doc! {"done": count(done), "expected": expected.map(count)}
}

/// The whole document of a record.
pub(crate) fn document(id: Id, record: &RuleRecord, term: i64) -> Result<Document> {
    let beside = Beside {
        id,
        definition: record.definition.clone(),
        retired: record.retired.clone(),
        agreed: record.agreed.clone(),
        source_seen: record.source_seen,
        source_uuid: record.source_uuid.clone(),
        released: record.released.map(Timestamp::from),
        progress: None,
        noticed: record.noticed,
        generation: record.generation,
        keeping: record.keeping.clone(),
        undone: record.undone.clone(),
        degraded: record.degraded,
    };
    let mut document = bson::serialize_to_document(&beside)?;
    document.extend(state_fields(&record.state)?);
    document.insert("term", term);
    if record.removals_agreed {
        document.insert("removals_agreed", record.generation);
    }
    if record.awaiting {
        document.insert("awaiting", record.generation);
    }
    Ok(document)
}

/// A filter for paused rules.
pub(crate) fn is_paused() -> Document {
    doc! {"backfill": "held", "paused": true}
}

/// A filter for rules whose pause has ended.
pub(crate) fn has_ended() -> Document {
    let is_date = doc! {"$eq": [{"$type": "$until"}, "date"]};
    doc! {"$expr": {"$and": [is_date, {"$lte": ["$until", "$$NOW"]}]}}
}

/// A filter for rules whose backfill has not ended.
pub(crate) fn is_backfilling() -> Document {
    doc! {"backfill": "pending"}
}

/// A filter for unavailable rules.
pub(crate) fn is_unavailable() -> Document {
    doc! {"backfill": "held", "suspended": true}
}

/// A filter for rules that are in the config.
pub(crate) fn is_in_config() -> Document {
    doc! {"backfill": {"$ne": "absent"}}
}

/// The end of a pause of this length, by the server's clock, against which it is checked too.
pub(crate) fn end_of_pause(time: Duration) -> Document {
    doc! {"$add": ["$$NOW", clock::millis(time)]}
}

/// A filter for this generation. State from before generations existed has no such field.
pub(crate) fn same_generation(generation: i64) -> Bson {
    if generation == 0 { doc! {"$in": [Bson::Null, 0_i64]}.into() } else { generation.into() }
}

/// The update that gives a rule's document these fields, and `more` as expressions, with the next generation. An agreement to the
/// removals of an unfinished backfill remains valid ([`super::Agreement::Kept`]).
pub(crate) fn changed(fields: Document, more: Document) -> Vec<Document> {
    let mut fields: Document =
        fields.into_iter().map(|(name, value)| (name, doc! {"$literal": value}.into())).collect();
    let generation = doc! {"$ifNull": ["$generation", 0_i64]};
    let next = doc! {"$add": [generation.clone(), 1_i64]};
    let is_open = doc! {"$or": [
        {"$in": ["$backfill", ["pending", "manual"]]},
        {"$and": [{"$eq": ["$backfill", "held"]}, {"$or": [{"$eq": ["$paused", true]}, {"$eq": ["$suspended", true]}]}]},
    ]};
    let kept = doc! {"$and": [{"$eq": ["$removals_agreed", generation]}, is_open]};
    fields.insert("removals_agreed", doc! {"$cond": [kept, next.clone(), "$removals_agreed"]});
    fields.insert("generation", next);
    fields.extend(more);
    vec![doc! {"$set": fields}]
}

/// Reads a rule's document: its `_id` and the record.
pub(crate) fn read(document: &Document) -> Result<(Id, RuleRecord)> {
    let unreadable = |error: &dyn std::fmt::Display| {
        unreadable(RULES, document, error)
            .hint("was it written by another version, or by hand? Without it the rule is new, and backfilled")
    };
    let stored: Stored = bson::deserialize_from_document(document.clone()).map_err(|error| unreadable(&error))?;
    let beside: Beside = bson::deserialize_from_document(document.clone()).map_err(|error| unreadable(&error))?;
    let number = |count: i64| u64::try_from(count).unwrap_or_default();
    let removals_agreed = stored.removals_agreed == Some(beside.generation);
    let is_of_this_stop = stored.awaiting == Some(beside.generation);
    let state = stored.state(beside.generation);
    let awaiting = is_of_this_stop && state.is_stopped();
    let may_be_agreed = matches!(
        state,
        RuleState::Backfilling { .. }
            | RuleState::AwaitingBackfill
            | RuleState::Paused { .. }
            | RuleState::Unavailable { .. }
    );
    let degraded = beside.degraded && state != RuleState::Live;
    let record = RuleRecord {
        definition: beside.definition,
        retired: beside.retired,
        agreed: beside.agreed,
        source_seen: beside.source_seen,
        source_uuid: beside.source_uuid,
        released: beside.released.map(ClusterTime::from),
        state,
        degraded,
        progress: beside.progress.map(|progress| (number(progress.done), progress.expected.map(number))),
        noticed: beside.noticed,
        generation: beside.generation,
        removals_agreed: removals_agreed && may_be_agreed,
        awaiting,
        keeping: beside.keeping,
        undone: beside.undone,
    };
    Ok((beside.id, record))
}
