//! Decisions about the first writes of a rule: one per definition, shared by all partitions.
//!
//! A decision is recorded before the rule writes anything. The first decision recorded for a definition wins. So
//! partitions that decide at the same time, or a former leader whose command arrives late, cannot decide differently.

use std::{collections::BTreeMap, time::Duration};

use bson::{Bson, Document, doc};

use super::unreadable;
use denormd_model::{clock, rule_state::Adoption};
use denormd_mongo::{
    Server, all, bounded, code,
    error::{Error, Result},
    unless,
};
use denormd_rules::plan::is_same_definition;

/// The collection of decisions: one document per deployment and rule.
pub const COLLECTION: &str = "adoptions";
/// Attempts to record a decision while other instances record theirs.
const ATTEMPTS: usize = 10;
/// After this time, every partition has acted on a decision, or has ended.
const ABOUT_TO_ACT: Duration = Duration::from_secs(600);

/// A decision about one definition of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The definition of the rule, as the plan records it.
    pub definition: Document,
    /// The definition that wrote before; None if the rule had written nothing.
    pub earlier: Option<Document>,
    /// The reason to block the rule until an operator agrees; None if the rule may write.
    pub block: Option<Adoption>,
}

impl Decision {
    /// The definition that wrote before this one; None if the decision is about another one.
    #[must_use]
    pub fn earlier_than(self, definition: &Document) -> Option<Document> {
        self.earlier.filter(|_| is_same_definition(&self.definition, definition))
    }
}

/// The decisions of a deployment.
#[derive(Debug, Clone, Copy)]
pub struct Decisions<'a> {
    /// The cluster that holds the state database.
    pub server: &'a Server,
    /// The name of the state database.
    pub database: &'a str,
    /// The name of the deployment, without a partition.
    pub deployment: &'a str,
}

impl Decisions<'_> {
    fn id(&self, rule: &str) -> Document {
        doc! {"deployment": self.deployment, "rule": rule}
    }

    fn collection(&self) -> mongodb::Collection<Document> {
        self.server.collection(self.database, COLLECTION)
    }

    /// The latest decision about a rule.
    pub async fn of(&self, rule: &str) -> Result<Option<Decision>> {
        let found = bounded(self.collection().find_one(doc! {"_id": self.id(rule)})).await?;
        found.as_ref().map_or(Ok(None), decision_in)
    }

    /// Records a decision, unless one exists for this definition. Returns the recorded one.
    pub async fn decide(&self, rule: &str, decision: Decision) -> Result<Decision> {
        let block = decision.block.as_ref().map(bson::serialize_to_document).transpose()?;
        let state = doc! {
            "definition": decision.definition.clone(), "earlier": decision.earlier.clone(), "block": block,
            "at": clock::now(),
        };
        let other = doc! {"_id": self.id(rule), "definition": {"$ne": decision.definition.clone()}};
        let collection = self.collection();
        let decided = bounded(collection.update_one(other, doc! {"$set": state.clone()}).upsert(true)).await;
        if unless(code::DUPLICATE_KEY, decided)?.is_some() {
            return Ok(decision);
        }
        for _ in 0..ATTEMPTS {
            let found = bounded(collection.find_one(doc! {"_id": self.id(rule)})).await?;
            let found = found.ok_or_else(|| Error::internal("the decision about a rule changes while it is made"))?;
            let first = decision_in(&found)?;
            if let Some(first) = first.filter(|first| is_same_definition(&first.definition, &decision.definition)) {
                return Ok(first);
            }
            // The server treats definitions as equal if only the types of numbers differ, such as 0 and 0.0. The new decision
            // replaces the other one.
            let [at, agreed] = ["at", "agreed"].map(|name| found.get(name).cloned().unwrap_or(Bson::Null));
            let same = doc! {"_id": self.id(rule), "at": at, "agreed": agreed};
            if bounded(collection.update_one(same, doc! {"$set": state.clone()})).await?.matched_count > 0 {
                return Ok(decision);
            }
        }
        Err(Error::internal("the decision about a rule changes while it is made"))
    }

    /// Records that somebody has agreed to this definition. `earlier` is the one that wrote before, unless that is recorded.
    pub async fn agree(&self, rule: &str, definition: &Document, earlier: Option<&Document>) -> Result<()> {
        let definition = doc! {"$literal": definition.clone()};
        let known = doc! {"$literal": earlier.cloned()};
        let earlier = doc! {"$cond": [{"$eq": ["$definition", definition.clone()]}, "$earlier", known]};
        let state = doc! {"definition": definition, "earlier": earlier, "block": Bson::Null, "agreed": clock::now()};
        let collection = self.collection();
        bounded(collection.update_one(doc! {"_id": self.id(rule)}, vec![doc! {"$set": state}]).upsert(true)).await?;
        Ok(())
    }

    /// The definition of each rule that its latest decision is about, by the rule's name; without those that cannot be read.
    pub async fn definitions(&self) -> Result<BTreeMap<String, Document>> {
        let found = all(self.collection().find(doc! {"_id.deployment": self.deployment})).await?;
        let read = |decision: &Document| {
            let rule = decision.get_document("_id").ok()?.get_str("rule").ok()?;
            Some((rule.to_owned(), decision.get_document("definition").ok()?.clone()))
        };
        Ok(found.iter().filter_map(read).collect())
    }

    /// Deletes the decision about a definition that is not in force, so that its effect is counted again if it returns. With
    /// `several` partitions, only an old decision: another partition may be about to act on a new one. A delayed deletion is
    /// harmless, because it only causes another count.
    pub async fn withdraw(&self, rule: &str, definition: &Document, several: bool) -> Result<()> {
        let mut decision = doc! {"_id": self.id(rule), "definition": definition.clone()};
        if several {
            let is_old =
                doc! {"$lt": [{"$max": ["$at", "$agreed"]}, {"$subtract": ["$$NOW", clock::millis(ABOUT_TO_ACT)]}]};
            decision.insert("$expr", is_old);
        }
        bounded(self.collection().delete_one(decision)).await?;
        Ok(())
    }

    /// Deletes the decision about a rule that was removed from the config, so that the rule is checked again if it
    /// returns.
    pub async fn forget(&self, rule: &str) -> Result<()> {
        let collection = self.collection();
        bounded(collection.delete_one(doc! {"_id": self.id(rule)})).await?;
        Ok(())
    }
}

/// The decision in a document; None if it is about no definition.
fn decision_in(found: &Document) -> Result<Option<Decision>> {
    // A block that is not understood must not allow the rule to write.
    let document = |name: &str| match found.get(name) {
        None | Some(Bson::Null) => Ok(None),
        Some(Bson::Document(document)) => Ok(Some(document.clone())),
        Some(_) => Err(unreadable(COLLECTION, found, &format!("`{name}` is no document"))),
    };
    let Some(definition) = document("definition")? else { return Ok(None) };
    let block = document("block")?.map(bson::deserialize_from_document).transpose()?;
    Ok(Some(Decision { definition, earlier: document("earlier")?, block }))
}
