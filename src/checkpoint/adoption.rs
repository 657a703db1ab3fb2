//! What was decided about the first writes of a rule: once for each definition of it, and for all partitions together.
//!
//! A decision is recorded before anything of the rule is written. The first one that is recorded for a definition counts, so
//! that partitions that count at the same time, or a leader whose command comes late, cannot decide differently.

use bson::{Bson, DateTime, Document, doc};

use crate::{
    error::{Error, Result},
    mongo::{Server, bounded},
    rule_state::Adoption,
};

/// The collection of decisions: one document per deployment and rule.
pub const COLLECTION: &str = "adoptions";
/// DuplicateKey
const DUPLICATE_KEY: i32 = 11000;

/// A decision about one definition of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The definition that it is about.
    pub definition: Document,
    /// The definition that wrote before; none where the rule had written nothing.
    pub earlier: Option<Document>,
    /// What speaks against it, until a person agrees; none where the rule may write.
    pub block: Option<Adoption>,
}

/// Where the decisions of a deployment are kept.
#[derive(Debug, Clone, Copy)]
pub struct Decisions<'a> {
    /// The cluster.
    pub server: &'a Server,
    /// The state database.
    pub database: &'a str,
    /// The deployment, whatever it is divided into.
    pub deployment: &'a str,
}

impl Decisions<'_> {
    fn id(&self, rule: &str) -> Document {
        doc! {"deployment": self.deployment, "rule": rule}
    }

    fn collection(&self) -> mongodb::Collection<Document> {
        self.server.collection(self.database, COLLECTION)
    }

    /// The last decision about a rule.
    pub async fn of(&self, rule: &str) -> Result<Option<Decision>> {
        let found = bounded(self.collection().find_one(doc! {"_id": self.id(rule)})).await?;
        let Some(found) = found else { return Ok(None) };
        let document = |name: &str| found.get_document(name).ok().cloned();
        let Some(definition) = document("definition") else { return Ok(None) };
        let block = document("block").map(bson::deserialize_from_document).transpose()?;
        Ok(Some(Decision { definition, earlier: document("earlier"), block }))
    }

    /// Records a decision, unless there is one about this definition already. Returns the one that counts.
    pub async fn decide(&self, rule: &str, decision: Decision) -> Result<Decision> {
        let block = decision.block.as_ref().map(bson::serialize_to_document).transpose()?;
        let state = doc! {
            "definition": decision.definition.clone(), "earlier": decision.earlier.clone(), "block": block,
            "at": DateTime::now(),
        };
        let other = doc! {"_id": self.id(rule), "definition": {"$ne": decision.definition.clone()}};
        let collection = self.collection();
        match bounded(collection.update_one(other, doc! {"$set": state}).upsert(true)).await {
            Ok(_) => Ok(decision),
            Err(error) if error.code == Some(DUPLICATE_KEY) => {
                let first = self.of(rule).await?.filter(|first| first.definition == decision.definition);
                first.ok_or_else(|| Error::internal("the decision about a rule changes while it is made"))
            }
            Err(error) => Err(error),
        }
    }

    /// Records that a person has agreed to this definition.
    pub async fn agree(&self, rule: &str, definition: &Document) -> Result<()> {
        let state = doc! {"definition": definition.clone(), "block": Bson::Null, "agreed": DateTime::now()};
        let collection = self.collection();
        bounded(collection.update_one(doc! {"_id": self.id(rule)}, doc! {"$set": state}).upsert(true)).await?;
        Ok(())
    }

    /// Forgets what was decided: a rule that was removed from the config is checked again when it comes back.
    pub async fn forget(&self, rule: &str) -> Result<()> {
        let collection = self.collection();
        bounded(collection.delete_one(doc! {"_id": self.id(rule)})).await?;
        Ok(())
    }
}
