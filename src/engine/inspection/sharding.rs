//! The sharded collections of a rule, and their shard keys. It has never run on a sharded cluster: the decision is tested
//! on replies as MongoDB documents them
//! (<https://www.mongodb.com/docs/manual/reference/config-database/#config.collections>).

use bson::{Document, doc};
use serde::Serialize;

use denormd_model::{field_path::FieldPath, position::ClusterTime};
use denormd_mongo::{
    Server,
    error::{Kind, Result},
};
use denormd_rules::plan::Rule;

/// A collection that is sharded, or may be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sharded {
    /// Its full name.
    pub collection: String,
    /// Its shard key.
    pub key: ShardKey,
}

/// The shard key of a collection.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardKey {
    /// These paths.
    Paths(Vec<String>),
    /// Not known, because the user may not read it.
    Unknown,
}

impl Sharded {
    /// A path of the rule and a part of the shard key that are equal, or of which one contains the other.
    #[must_use]
    pub fn owned(&self, rule: &Rule) -> Option<(String, String)> {
        let ShardKey::Paths(parts) = &self.key else { return None };
        let owned = rule.owned();
        parts.iter().find_map(|part| {
            let path = FieldPath::parse(part).ok()?;
            owned.iter().find(|owned| owned.overlaps_loosely(&path)).map(|owned| (owned.to_string(), part.clone()))
        })
    }
}

/// The sharded collections among those of a rule. A replica set has none.
pub(super) async fn of_rule(server: &Server, rule: &Rule) -> Result<Vec<Sharded>> {
    if !server.is_router().await? {
        return Ok(Vec::new());
    }
    let mut out: Vec<Sharded> = Vec::new();
    for namespace in [&rule.target.namespace, &rule.source.namespace] {
        let collection = namespace.to_string();
        if out.iter().any(|sharded| sharded.collection == collection) {
            continue;
        }
        let command = doc! {"find": "collections", "filter": {"_id": &collection}, "limit": 1};
        let key = match server.read("config", command, ClusterTime::default()).await {
            Ok(rows) => {
                let entry = rows.first().map(|row| Document::try_from(row.as_ref())).transpose()?;
                shard_key(entry.as_ref())
            }
            Err(error) if error.kind == Kind::Privilege => Some(ShardKey::Unknown),
            Err(error) => return Err(error),
        };
        out.extend(key.map(|key| Sharded { collection, key }));
    }
    Ok(out)
}

/// The shard key in an entry of `config.collections`.
fn shard_key(entry: Option<&Document>) -> Option<ShardKey> {
    let entry = entry?;
    // Before 5.0 the list keeps dropped collections, and from 8.0 on it also has unsharded ones.
    let flag = |name: &str| entry.get_bool(name).is_ok_and(|set| set);
    if flag("dropped") || flag("unsplittable") {
        return None;
    }
    Some(ShardKey::Paths(entry.get_document("key").ok()?.keys().cloned().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    #[test]
    fn a_sharded_collection_is_known_by_its_entry() {
        let entry = doc! {
            "_id": "shop.products", "lastmodEpoch": bson::oid::ObjectId::from_bytes([1; 12]), "uuid": "…",
            "key": {"region": 1, "address.zip": "hashed"}, "unique": false, "noBalance": false,
        };
        let paths = ShardKey::Paths(vec!["region".to_owned(), "address.zip".to_owned()]);
        assert_eq!(shard_key(Some(&entry)), Some(paths.clone()));
        assert_eq!(shard_key(None), None);
        for flag in ["dropped", "unsplittable"] {
            let mut entry = entry.clone();
            entry.insert(flag, true);
            assert_eq!(shard_key(Some(&entry)), None, "{flag}");
        }
        let text = "mongodb: { uri: mongodb://localhost, database: shop }\nrules:\n  - { name: r, copy: { source: s, target: \
                    products, match: { ref: _id }, set: { name: $n, address: $a } } }\n";
        let plan = compile(&load_str(text, Format::Yaml).unwrap().config, None).unwrap();
        let sharded = Sharded { collection: "shop.products".to_owned(), key: paths };
        assert_eq!(sharded.owned(&plan.rules[0]), Some(("address".to_owned(), "address.zip".to_owned())));
    }
}
