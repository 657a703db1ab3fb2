//! The collections: number and size of documents, indexes, and a sample of each.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};

use denormd_model::namespace::Namespace;
use denormd_mongo::error::Result;
use denormd_rules::config::Advise;

use super::ask::Ask;
use denormd_model::{
    distribution::{Distribution, How, Known, Unknown, number},
    shape::Shape,
};

/// Maximum size of one sample, in bytes. Fewer documents are drawn if they are large.
const SAMPLE_BYTES: u64 = 64 << 20;
/// Minimum number of documents in a sample.
const LEAST: u64 = 20;
/// Maximum number of collections to inspect, the largest first.
const COLLECTIONS: usize = 200;

/// One collection.
#[derive(Debug, Clone)]
pub struct Collection {
    /// The namespace of the collection.
    pub namespace: Namespace,
    /// True for a capped collection.
    pub capped: bool,
    /// Number of documents.
    pub count: u64,
    /// Size of the documents in bytes, uncompressed.
    pub bytes: u64,
    /// Size of the indexes in bytes, on disk.
    pub index_bytes: u64,
    /// The indexes, hidden ones included.
    pub indexes: Vec<Index>,
    /// The shape of the sampled documents.
    pub shape: Shape,
    /// The basis of the sample: all documents, or a part.
    pub how: How,
    /// The distribution of the document sizes, in bytes.
    pub size: Option<Distribution>,
}

/// One index.
#[derive(Debug, Clone, PartialEq)]
pub struct Index {
    /// The name of the index.
    pub name: String,
    /// The indexed fields, in order, with their directions or types.
    pub keys: Document,
    /// True if it enforces uniqueness or expires documents: such an index is useful without being read.
    pub works: bool,
    /// True if its keys are unique.
    pub unique: bool,
    /// True if it contains every document: not hidden, sparse or partial.
    pub whole: bool,
}

/// The inspected collections.
#[derive(Debug, Clone, Default)]
pub struct Inventory {
    /// The collections, sorted by namespace.
    pub collections: Vec<Collection>,
    /// Total number of collections in the databases.
    pub listed: u64,
    /// The collections that were left out, each with the reason.
    pub left_out: Vec<String>,
}

impl Inventory {
    /// Finds a collection by its namespace.
    #[must_use]
    pub fn collection(&self, namespace: &Namespace) -> Option<&Collection> {
        self.collections.iter().find(|collection| collection.namespace == *namespace)
    }
}

impl Collection {
    /// True if an index of all documents begins with this path.
    #[must_use]
    pub fn is_indexed(&self, query: &str) -> bool {
        self.index(query).is_some()
    }

    /// Finds an index of all documents that begins with this path.
    #[must_use]
    pub fn index(&self, query: &str) -> Option<&Index> {
        let leads = |index: &&Index| {
            let first = index.keys.iter().next();
            index.whole && first.is_some_and(|(name, kind)| name == query && kind.as_str().is_none())
        };
        self.indexes.iter().find(leads)
    }
}

/// The collections available for inspection, without those of denormd's own database.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Plain collections, each with a flag that is true if it is capped.
    pub plain: Vec<(Namespace, bool)>,
    /// Number of collections of any kind.
    pub listed: u64,
    /// The others, such as views, each with its kind.
    pub left_out: Vec<String>,
}

impl Listing {
    /// The namespaces of the plain collections.
    #[must_use]
    pub fn namespaces(&self) -> Vec<Namespace> {
        self.plain.iter().map(|(namespace, _)| namespace.clone()).collect()
    }
}

/// Lists the collections of `databases`, except those of the database `state`.
pub async fn list(ask: &Ask, databases: &BTreeSet<String>, state: &str) -> Result<Listing> {
    let mut listing = Listing::default();
    for database in databases.iter().filter(|database| *database != state) {
        for info in ask.collections(database).await? {
            let Ok(name) = info.get_str("name") else { continue };
            if name.starts_with("system.") {
                continue;
            }
            listing.listed += 1;
            let namespace = Namespace { database: database.clone(), collection: name.to_owned() };
            match info.get_str("type").unwrap_or("collection") {
                "collection" => {
                    let capped = info.get_document("options").is_ok_and(|options| options.contains_key("capped"));
                    listing.plain.push((namespace, capped));
                }
                kind => listing.left_out.push(format!("`{namespace}` is a {kind}")),
            }
        }
    }
    Ok(listing)
}

/// Inspects each collection of a list.
pub async fn inventory(ask: &Ask, listing: Listing, bounds: &Advise) -> Result<Inventory> {
    let mut inspection = Inventory { listed: listing.listed, left_out: listing.left_out, ..Inventory::default() };
    let mut plain = Vec::new();
    for (namespace, capped) in listing.plain {
        plain.push((stats(ask, &namespace).await?, namespace, capped));
    }
    plain.sort_by_key(|(stats, ..)| std::cmp::Reverse(stats.bytes));
    if plain.len() > COLLECTIONS {
        inspection.left_out.push(format!("{} of {} collections, the smallest", plain.len() - COLLECTIONS, plain.len()));
        plain.truncate(COLLECTIONS);
    }
    for (stats, namespace, capped) in plain {
        match collection(ask, &namespace, capped, &stats, bounds).await? {
            Ok(collection) => inspection.collections.push(collection),
            Err(Unknown(why)) => inspection.left_out.push(format!("`{namespace}`: {why}")),
        }
    }
    inspection.collections.sort_by(|a, b| a.namespace.cmp(&b.namespace));
    Ok(inspection)
}

/// Statistics that the server keeps for each collection.
#[derive(Debug, Default)]
struct Stats {
    count: u64,
    bytes: u64,
    index_bytes: u64,
}

async fn stats(ask: &Ask, namespace: &Namespace) -> Result<Stats> {
    let stage = doc! {"$collStats": {"storageStats": {}}};
    if let Ok(reply) = ask.aggregate(namespace, vec![stage], "collStats").await? {
        let storage = reply.first().and_then(|reply| reply.get_document("storageStats").ok());
        let number = |name: &str| storage.and_then(|storage| storage.get(name)).map_or(0, number);
        return Ok(Stats { count: number("count"), bytes: number("size"), index_bytes: number("totalIndexSize") });
    }
    let counted = ask.command(&namespace.database, doc! {"count": &namespace.collection}, "find").await?;
    let count = counted.ok().and_then(|reply| reply.get("n").map(number)).unwrap_or_default();
    Ok(Stats { count, ..Stats::default() })
}

async fn collection(
    ask: &Ask,
    namespace: &Namespace,
    capped: bool,
    stats: &Stats,
    bounds: &Advise,
) -> Result<Known<Collection>> {
    let average = stats.bytes.checked_div(stats.count).unwrap_or(1).max(1);
    let wanted = bounds.sample.min((SAMPLE_BYTES / average).max(LEAST));
    // Reading everything costs less than sampling.
    let draw = if stats.count <= wanted {
        doc! {"$limit": i64::try_from(wanted).unwrap_or(i64::MAX)}
    } else {
        doc! {"$sample": {"size": i64::try_from(wanted).unwrap_or(i64::MAX)}}
    };
    let documents = match ask.aggregate(namespace, vec![draw], &format!("find on {namespace}")).await? {
        Ok(documents) => documents,
        Err(unknown) => return Ok(Err(unknown)),
    };
    let how = if stats.count <= wanted { How::Exact } else { How::Sample(documents.len() as u64) };
    let shape = Shape::of(documents.iter().map(|document| (document, size(document))));
    let mut distribution = shape.size(how);
    if wanted < bounds.sample && how != How::Exact {
        // For large documents, reading only the sizes is cheap.
        distribution = sizes(ask, namespace, bounds.sample).await?.or(distribution);
    }
    let count = if how == How::Exact { shape.documents } else { stats.count };
    Ok(Ok(Collection {
        namespace: namespace.clone(),
        capped,
        count,
        bytes: stats.bytes,
        index_bytes: stats.index_bytes,
        indexes: indexes(ask, namespace).await?,
        size: distribution,
        shape,
        how,
    }))
}

fn size(document: &Document) -> u64 {
    bson::RawDocumentBuf::try_from(document).map(|raw| raw.as_bytes().len() as u64).unwrap_or_default()
}

async fn sizes(ask: &Ask, namespace: &Namespace, sample: u64) -> Result<Option<Distribution>> {
    let pipeline = vec![
        doc! {"$sample": {"size": i64::try_from(sample).unwrap_or(i64::MAX)}},
        doc! {"$project": {"_id": 0, "n": {"$bsonSize": "$$ROOT"}}},
    ];
    let found = ask.aggregate(namespace, pipeline, &format!("find on {namespace}")).await?;
    Ok(found.ok().and_then(|found| {
        let how = How::Sample(found.len() as u64);
        Distribution::of_list(found.iter().filter_map(|row| row.get("n").map(number)), how)
    }))
}

async fn indexes(ask: &Ask, namespace: &Namespace) -> Result<Vec<Index>> {
    let reply = ask.command(&namespace.database, doc! {"listIndexes": &namespace.collection}, "listIndexes").await?;
    let Ok(reply) = reply else { return Ok(Vec::new()) };
    let batch = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).cloned();
    let read = |spec: &Document| {
        let flag = |name: &str| spec.get_bool(name).unwrap_or_default();
        let id = spec.get_str("name").ok()? == "_id_";
        Some(Index {
            name: spec.get_str("name").ok()?.to_owned(),
            keys: spec.get_document("key").ok()?.clone(),
            works: id || flag("unique") || spec.contains_key("expireAfterSeconds"),
            unique: id || flag("unique"),
            whole: !flag("hidden") && !flag("sparse") && !spec.contains_key("partialFilterExpression"),
        })
    };
    Ok(batch.unwrap_or_default().iter().filter_map(Bson::as_document).filter_map(read).collect())
}
