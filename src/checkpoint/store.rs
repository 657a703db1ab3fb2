//! Positions and rule states in the state database, acknowledged by a majority.

use bson::{Bson, DateTime, Document, Timestamp, doc};
use futures_util::TryStreamExt;

use crate::{
    error::Result,
    mongo::Server,
    plan::Rule,
    position::{ClusterTime, Position},
};

/// The collection of positions: one document a deployment and stream.
pub const POSITIONS: &str = "positions";
/// The collection of rule states: one document a deployment and rule.
pub const RULES: &str = "rules";

/// The state of one deployment.
#[derive(Debug, Clone)]
pub struct Store {
    /// The state database.
    pub database: String,
    /// The deployment's name.
    pub deployment: String,
}

/// What is known of a rule from earlier runs.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleState {
    /// What the rule was.
    pub definition: Document,
    /// What it was before, where that owned something else.
    pub retired: Vec<Document>,
    /// How far its backfill is.
    pub backfill: Backfill,
    /// Counts the times that its backfill was asked for: progress of an older one must not overwrite a newer wish.
    pub generation: i64,
}

/// How far a rule's backfill is.
#[derive(Debug, Clone, PartialEq)]
pub enum Backfill {
    /// To be done, from the target after this `_id` on (or from the first).
    Pending(Option<Bson>),
    /// Waits for `denormd backfill`.
    Manual,
    /// Done.
    Done,
}

impl Store {
    fn id(&self, name: &str, value: &str) -> Document {
        doc! {"deployment": &self.deployment, name: value}
    }

    /// Where the stream of `database` is to go on, if it has been followed before. The token only fits the pipeline that
    /// it came from: with another one the stream is reopened by time.
    pub async fn position(&self, server: &Server, database: &str, pipeline: &[Document]) -> Result<Option<Position>> {
        let found =
            server.collection(&self.database, POSITIONS).find_one(doc! {"_id": self.id("stream", database)}).await?;
        Ok(found.and_then(|doc| {
            let time = ClusterTime::from(doc.get_timestamp("time").ok()?);
            let same = doc.get_array("pipeline").ok()?.iter().filter_map(Bson::as_document).eq(pipeline.iter());
            let token = doc.get_document("token").ok().filter(|_| same).cloned();
            Some(Position { time, token })
        }))
    }

    /// Saves where the stream of `database` is.
    pub async fn save_position(
        &self,
        server: &Server,
        database: &str,
        pipeline: &[Document],
        position: &Position,
    ) -> Result<()> {
        let state = doc! {
            "time": Timestamp::from(position.time),
            "token": position.token.clone(),
            "pipeline": pipeline.to_vec(),
            "saved": DateTime::now(),
        };
        server
            .collection(&self.database, POSITIONS)
            .update_one(doc! {"_id": self.id("stream", database)}, doc! {"$set": state})
            .upsert(true)
            .await?;
        Ok(())
    }

    /// What is known of every rule that this deployment has or had, by name.
    pub async fn rules(&self, server: &Server) -> Result<Vec<(String, RuleState)>> {
        let mut cursor =
            server.collection(&self.database, RULES).find(doc! {"_id.deployment": &self.deployment}).await?;
        let mut out = Vec::new();
        while let Some(doc) = cursor.try_next().await? {
            let (Ok(id), Ok(definition)) = (doc.get_document("_id"), doc.get_document("definition")) else { continue };
            let backfill = match doc.get_str("backfill").unwrap_or_default() {
                "done" => Backfill::Done,
                "manual" => Backfill::Manual,
                _ => Backfill::Pending(doc.get_array("after").ok().and_then(|after| after.first().cloned())),
            };
            let generation = doc.get_i64("generation").unwrap_or_default();
            let retired = doc.get_array("retired").map(Vec::as_slice).unwrap_or_default();
            let retired = retired.iter().filter_map(Bson::as_document).cloned().collect();
            let state = RuleState { definition: definition.clone(), retired, backfill, generation };
            out.push((id.get_str("rule").unwrap_or_default().to_owned(), state));
        }
        Ok(out)
    }

    /// Records what a rule is, and that its backfill is to be done from the start (or waits to be asked for). Returns the
    /// generation of this wish.
    pub async fn reset_rule(&self, server: &Server, rule: &Rule, backfill: &Backfill) -> Result<i64> {
        let mut state = backfill_state(backfill);
        state.insert("definition", rule.definition.clone());
        let saved = server
            .collection(&self.database, RULES)
            .find_one_and_update(
                doc! {"_id": self.id("rule", &rule.name)},
                doc! {"$set": state, "$inc": {"generation": 1_i64}},
            )
            .upsert(true)
            .return_document(mongodb::options::ReturnDocument::After)
            .await?;
        Ok(saved.and_then(|doc| doc.get_i64("generation").ok()).unwrap_or_default())
    }

    /// Keeps what a rule was, for `denormd prune`.
    pub async fn retire(&self, server: &Server, rule: &str, definition: &Document) -> Result<()> {
        let filter = doc! {"_id": self.id("rule", rule)};
        let update = doc! {"$addToSet": {"retired": definition.clone()}};
        server.collection(&self.database, RULES).update_one(filter, update).await?;
        Ok(())
    }

    /// Forgets what a rule was; with `whole`, the rule too.
    pub async fn forget(&self, server: &Server, rule: &str, whole: bool) -> Result<()> {
        let filter = doc! {"_id": self.id("rule", rule)};
        let rules = server.collection(&self.database, RULES);
        if whole {
            rules.delete_one(filter).await?;
        } else {
            rules.update_one(filter, doc! {"$unset": {"retired": ""}}).await?;
        }
        Ok(())
    }

    /// Saves how far the backfill of this generation is. False when a newer one has been asked for.
    pub async fn save_backfill(
        &self,
        server: &Server,
        rule: &Rule,
        generation: i64,
        backfill: &Backfill,
    ) -> Result<bool> {
        let filter = doc! {"_id": self.id("rule", &rule.name), "generation": generation};
        let done = server
            .collection(&self.database, RULES)
            .update_one(filter, doc! {"$set": backfill_state(backfill)})
            .await?;
        Ok(done.matched_count > 0)
    }
}

fn backfill_state(backfill: &Backfill) -> Document {
    let (state, after) = match backfill {
        Backfill::Pending(after) => ("pending", after.clone().map_or_else(Vec::new, |id| vec![id])),
        Backfill::Manual => ("manual", Vec::new()),
        Backfill::Done => ("done", Vec::new()),
    };
    doc! {"backfill": state, "after": after, "saved": DateTime::now()}
}
