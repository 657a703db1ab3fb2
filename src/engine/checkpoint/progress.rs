//! The progress of each rule's `denormd check`, and of the leader.

use std::collections::BTreeSet;

use bson::{Bson, DateTime, Document, Timestamp, doc};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{
    fan_out,
    rule_record::RuleRecord,
    store::{POSITIONS, Store},
    unreadable,
};
use denormd_model::{clock, position::ClusterTime};
use denormd_mongo::{Server, error::Result};
use denormd_rules::plan::{Plan, Rule};

/// The collection of checks: one document per deployment and rule.
pub const CHECKS: &str = "checks";

/// The counts of a check so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of targets compared.
    pub compared: u64,
    /// Number of targets that differ.
    pub differing: u64,
    /// Number of those that were repaired.
    pub repaired: u64,
    /// Number of targets whose sources kept changing.
    pub undecided: u64,
    /// Number of targets whose values cannot be computed, because the server rejects an expression, and of sources without a usable
    /// key.
    pub refused: u64,
    /// True if the check continued an earlier one, whose counts are included.
    pub resumed: bool,
}

/// The saved progress of a check.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckProgress {
    /// The `_id` of the last target up to which everything is judged.
    pub after: Option<Bson>,
    /// True if the check has finished.
    pub done: bool,
    /// The counts so far.
    pub tally: Tally,
}

/// The stored form of the progress.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    #[serde(rename = "definition")]
    definition: Document,
    /// In an array because any BSON value may be an `_id`.
    #[serde(rename = "after")]
    after: Vec<Bson>,
    #[serde(rename = "done")]
    done: bool,
    #[serde(rename = "compared")]
    compared: u64,
    #[serde(rename = "differing")]
    differing: u64,
    #[serde(rename = "undecided")]
    undecided: u64,
    #[serde(rename = "refused")]
    refused: u64,
    /// Earlier versions do not save it, and leave the number of a check before theirs as it is.
    #[serde(rename = "repaired", default)]
    repaired: u64,
    #[serde(rename = "saved")]
    saved: DateTime,
}

impl Store {
    /// The progress of the rule's last check. None if the rule's definition has changed since.
    pub async fn check(&self, server: &Server, rule: &Rule) -> Result<Option<CheckProgress>> {
        let checks = server.collection(self.database(), CHECKS);
        let found = checks.find_one(doc! {"_id": self.id("rule", &rule.name)}).await?;
        let Some(found) = found else { return Ok(None) };
        let stored: Result<Stored> = super::read(CHECKS, &found);
        let stored = stored.map_err(|error| error.hint("`denormd check` without `--resume` replaces it"))?;
        let Stored { definition, after, done, compared, differing, undecided, refused, repaired, .. } = stored;
        let repaired = repaired.min(differing);
        let tally = Tally { compared, differing, repaired, undecided, refused, resumed: false };
        let progress = CheckProgress { after: after.into_iter().next(), done, tally };
        Ok(rule.has_definition(&definition).then_some(progress))
    }

    /// Saves the progress of the rule's check.
    pub async fn save_check(&self, server: &Server, rule: &Rule, progress: &CheckProgress) -> Result<()> {
        let CheckProgress { after, done, tally } = progress;
        let Tally { compared, differing, repaired, undecided, refused, .. } = *tally;
        let (definition, after) = (rule.definition.clone(), after.iter().cloned().collect());
        let saved = clock::now();
        let state = Stored { definition, after, done: *done, compared, differing, undecided, refused, repaired, saved };
        let state = bson::serialize_to_document(&state)?;
        let checks = server.collection(self.database(), CHECKS);
        checks.update_one(doc! {"_id": self.id("rule", &rule.name)}, doc! {"$set": state}).upsert(true).await?;
        Ok(())
    }

    /// Writes an unimportant change, so that every stream has an event to advance past.
    pub async fn nudge(&self, server: &Server) -> Result<()> {
        let update = doc! {"$inc": {"nudges": 1_i64}};
        let checks = server.collection(self.database(), CHECKS);
        checks.update_one(doc! {"_id": self.id("nudge", "")}, update).upsert(true).await?;
        Ok(())
    }

    /// The time up to which everything committed is applied: the minimum of the saved positions of all streams and
    /// partitions. None until all of them have a position.
    pub async fn applied(&self, server: &Server, databases: &BTreeSet<String>) -> Result<Option<ClusterTime>> {
        let time = |position: &Document| timestamp(position, position.get("time"));
        Ok(self.times(server, databases, ClusterTime::default(), time).await?.and_then(|times| times.into_iter().min()))
    }

    /// The latest time of an effect before these positions ([`Store::save_position`]), as of `after` or later. None if any
    /// position lacks it.
    pub async fn effects_until(
        &self,
        server: &Server,
        databases: &BTreeSet<String>,
        after: ClusterTime,
    ) -> Result<Option<ClusterTime>> {
        let until = |position: &Document| {
            // An older program does not save it.
            let Ok(effects) = position.get_document("effects") else { return Ok(None) };
            let is_of_position = effects.get("at") == position.get("time");
            timestamp(position, effects.get("until").filter(|_| is_of_position))
        };
        Ok(self.times(server, databases, after, until).await?.and_then(|times| times.into_iter().max()))
    }

    /// This time of each stream and partition. None if any of them lacks it.
    async fn times(
        &self,
        server: &Server,
        databases: &BTreeSet<String>,
        after: ClusterTime,
        time: impl Fn(&Document) -> Result<Option<Timestamp>>,
    ) -> Result<Option<Vec<ClusterTime>>> {
        let of = |id| databases.iter().map(move |database| doc! {"deployment": id, "stream": database});
        let ids: Vec<Document> = self.ids().iter().flat_map(of).collect();
        let command = doc! {"find": POSITIONS, "filter": {"_id": {"$in": &ids}}};
        let found = server.read_state(self.database(), command, after).await?;
        let times = found.iter().map(time).collect::<Result<Vec<_>>>()?;
        let times: Vec<ClusterTime> = times.into_iter().flatten().map(ClusterTime::from).collect();
        Ok((times.len() == ids.len()).then_some(times))
    }

    /// True if a backfill of a rule in the plan, or a fan-out job, is open, as of `after` or later.
    pub async fn has_open_jobs(&self, server: &Server, plan: &Plan, after: ClusterTime) -> Result<bool> {
        let is_planned = |name: &str| plan.named(name).is_some();
        let open = |(name, record): &(String, RuleRecord)| record.state.is_backfilling() && is_planned(name);
        Ok(self.standing_after(server, after).await?.iter().any(open)
            || self.is_fanning_out(server, None, after).await?)
    }

    /// True if a fan-out job is open, for one rule or for any, as of `after` or later. The position
    /// passes a job's event before its last target is written.
    pub async fn is_fanning_out(&self, server: &Server, rule: Option<&str>, after: ClusterTime) -> Result<bool> {
        let mut filter = doc! {"_id.deployment": {"$in": self.ids().to_vec()}};
        filter.extend(rule.map(|rule| doc! {"_id.rule": rule}).unwrap_or_default());
        let command = doc! {"find": fan_out::COLLECTION, "filter": filter, "projection": {"_id": 1}, "limit": 1};
        Ok(!server.read_state(self.database(), command, after).await?.is_empty())
    }
}

/// A time of a position, if the position has it.
fn timestamp(position: &Document, time: Option<&Bson>) -> Result<Option<Timestamp>> {
    match time {
        None => Ok(None),
        Some(Bson::Timestamp(time)) => Ok(Some(*time)),
        Some(_) => Err(unreadable(POSITIONS, position, "a time is no timestamp")),
    }
}
