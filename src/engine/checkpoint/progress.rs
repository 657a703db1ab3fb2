//! The progress of each rule's `denormd check`, and of the leader.

use std::collections::BTreeSet;

use bson::{Bson, Document, Timestamp, doc};
use futures_util::TryStreamExt;

use crate::checkpoint::{
    fan_out,
    rule_record::RuleRecord,
    store::{POSITIONS, Store},
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
    /// Number of targets whose sources kept changing.
    pub undecided: u64,
    /// Number of targets whose definition cannot be computed, because the server rejects an expression.
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

impl Store {
    /// The progress of the rule's last check. None if the rule's definition has changed since.
    pub async fn check(&self, server: &Server, rule: &Rule) -> Result<Option<CheckProgress>> {
        let checks = server.collection(self.database(), CHECKS);
        let found = checks.find_one(doc! {"_id": self.id("rule", &rule.name)}).await?;
        Ok(found.filter(|found| found.get_document("definition").ok() == Some(&rule.definition)).map(|found| {
            let count = |name| found.get_i64(name).ok().and_then(|n| u64::try_from(n).ok()).unwrap_or_default();
            let tally = Tally {
                compared: count("compared"),
                differing: count("differing"),
                undecided: count("undecided"),
                refused: count("refused"),
                resumed: false,
            };
            let after = found.get_array("after").ok().and_then(|after| after.first().cloned());
            CheckProgress { after, done: found.get_bool("done").unwrap_or_default(), tally }
        }))
    }

    /// Saves the progress of the rule's check.
    pub async fn save_check(&self, server: &Server, rule: &Rule, progress: &CheckProgress) -> Result<()> {
        let CheckProgress { after, done, tally } = progress;
        let count = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let state = doc! {
            "definition": rule.definition.clone(),
            "after": after.iter().cloned().collect::<Vec<Bson>>(),
            "done": done,
            "compared": count(tally.compared),
            "differing": count(tally.differing),
            "undecided": count(tally.undecided),
            "refused": count(tally.refused),
            "saved": clock::now(),
        };
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
        let time = |position: &Document| position.get_timestamp("time").ok();
        Ok(self.times(server, databases, time).await?.and_then(|times| times.into_iter().min()))
    }

    /// The latest time of an effect before these positions ([`Store::save_position`]). None if any position lacks it.
    pub async fn effects_until(&self, server: &Server, databases: &BTreeSet<String>) -> Result<Option<ClusterTime>> {
        let until = |position: &Document| {
            let effects = position.get_document("effects").ok()?;
            let is_of_position = effects.get("at") == position.get("time");
            effects.get_timestamp("until").ok().filter(|_| is_of_position)
        };
        Ok(self.times(server, databases, until).await?.and_then(|times| times.into_iter().max()))
    }

    /// This time of each stream and partition. None if any of them lacks it.
    async fn times(
        &self,
        server: &Server,
        databases: &BTreeSet<String>,
        time: impl Fn(&Document) -> Option<Timestamp>,
    ) -> Result<Option<Vec<ClusterTime>>> {
        let of = |id| databases.iter().map(move |database| doc! {"deployment": id, "stream": database});
        let ids: Vec<Document> = self.ids().iter().flat_map(of).collect();
        let positions = server.collection(self.database(), POSITIONS);
        let found: Vec<Document> = positions.find(doc! {"_id": {"$in": &ids}}).await?.try_collect().await?;
        let times: Vec<ClusterTime> = found.iter().filter_map(time).map(ClusterTime::from).collect();
        Ok((times.len() == ids.len()).then_some(times))
    }

    /// True if a backfill of a rule in the plan, or a fan-out job, is open.
    pub async fn has_open_jobs(&self, server: &Server, plan: &Plan) -> Result<bool> {
        let is_planned = |name: &str| plan.rules.iter().any(|rule| rule.name == name);
        let open = |(name, record): &(String, RuleRecord)| record.state.is_backfilling() && is_planned(name);
        Ok(self.standing(server).await?.iter().any(open) || self.is_fanning_out(server, None).await?)
    }

    /// True if a fan-out job is open, for one rule or for any. The position passes a job's event before its last target
    /// is written.
    pub async fn is_fanning_out(&self, server: &Server, rule: Option<&str>) -> Result<bool> {
        let mut filter = doc! {"_id.deployment": {"$in": self.ids().to_vec()}};
        filter.extend(rule.map(|rule| doc! {"_id.rule": rule}).unwrap_or_default());
        Ok(server.collection(self.database(), fan_out::COLLECTION).find_one(filter).await?.is_some())
    }
}
