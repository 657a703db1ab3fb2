//! References per document and how many of them resolve, by BSON type: counted where that is cheap, otherwise sampled.

use std::collections::{BTreeMap, HashMap, HashSet};

use bson::{Bson, Document, doc};

use denormd_model::{
    field_path::{FieldPath, Segment},
    key::Key,
};
use denormd_mongo::error::Result;
use denormd_rules::config::Advise;

use super::{
    ask::Ask,
    inventory::Collection,
    relationships::{Link, as_class},
};
use denormd_model::{
    distribution::{Distribution, How, Known, Unknown, number, ratio},
    shape::{Class, type_name},
};

/// Maximum number of different values to fetch. With more, only a histogram is computed.
const ROWS: usize = 100_000;
/// Number of values in one `$in`.
const CHUNK: usize = 5000;
/// Factor by which the document limit grows if an index serves the count.
const COVERED: u64 = 20;
/// Number of referenced documents to sample, if not all references can be counted.
const DRAWN: usize = 1000;

/// The figures of one relationship.
#[derive(Debug, Clone, PartialEq)]
pub struct FanOut {
    /// Number of references, without null and missing ones.
    pub references: u64,
    /// References per referenced document, over the documents with at least one.
    pub distribution: Known<Distribution>,
    /// Mean number of references per document, including documents without any.
    pub mean: f64,
    /// Number of documents without references to them; None if that is not known.
    pub alone: Option<u64>,
    /// Resolved references, by the reference's BSON type.
    pub types: Vec<ByType>,
    /// The basis of the figures: a full count or a sample.
    pub how: How,
}

/// The references of one BSON type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByType {
    /// The type, as in `$type`.
    pub name: &'static str,
    /// Number of references.
    pub references: u64,
    /// Number of references to an existing document.
    pub resolved: u64,
    /// Number of references that would resolve if their type were converted.
    pub converted: u64,
}

impl FanOut {
    /// Number of references, of any type, to documents that do not exist.
    #[must_use]
    pub fn dangling(&self) -> u64 {
        self.types.iter().map(|of| of.references - of.resolved - of.converted).sum()
    }
}

/// Measures the references of one relationship.
pub async fn count(ask: &Ask, link: &Link, holder: &Collection, held: &Collection, bounds: &Advise) -> Result<FanOut> {
    let class = held.shape.field(&link.held.path).and_then(denormd_model::shape::Field::class);
    let Some(rows) = rows(ask, link, holder, bounds).await? else {
        return sampled(ask, link, holder, held, class).await;
    };
    let rows = match rows {
        Rows::All(rows) => rows,
        Rows::Histogram(histogram, references) => {
            let mut fan_out = sampled(ask, link, holder, held, class).await?;
            fan_out.references = references;
            fan_out.mean = ratio(references, held.count);
            fan_out.distribution =
                Distribution::of(&histogram, How::Exact).ok_or_else(|| Unknown("there are no references".to_owned()));
            return Ok(fan_out);
        }
    };
    let present = resolve(ask, &rows, held, &link.held.path, class).await?;
    let (types, fans) = by_type(&rows, &present, class);
    let references = rows.iter().map(|(_, times)| times).sum();
    let met: u64 = fans.len() as u64;
    Ok(FanOut {
        references,
        mean: ratio(fans.iter().sum(), held.count),
        distribution: Distribution::of_list(fans, How::Exact)
            .ok_or_else(|| Unknown("no reference resolves".to_owned())),
        alone: Some(held.count.saturating_sub(met)),
        types,
        how: How::Exact,
    })
}

enum Rows {
    /// Each value, with its number of occurrences.
    All(Vec<(Bson, u64)>),
    /// The number of values for each number of occurrences, and the total of the references.
    Histogram(BTreeMap<u64, u64>, u64),
}

/// Groups the references on the server; None if there are too many documents for that.
async fn rows(ask: &Ask, link: &Link, holder: &Collection, bounds: &Advise) -> Result<Option<Rows>> {
    let path = &link.holder.path;
    if holder.how == How::Exact {
        let field = holder.shape.field(path).filter(|field| field.all_values);
        let value = |(key, times): (&Key, &u64)| Some((key.values().first()?.clone(), *times));
        if let Some(field) = field {
            return Ok(Some(Rows::All(field.values.iter().filter_map(value).collect())));
        }
    }
    let index = if path.has_each() { None } else { holder.index(&path.query()) };
    let most = if index.is_some() { bounds.scan_documents.saturating_mul(COVERED) } else { bounds.scan_documents };
    if holder.count > most {
        return Ok(None);
    }
    let mut pipeline: Vec<Document> = unwinds(path).into_iter().map(|array| doc! {"$unwind": array}).collect();
    if index.is_some() {
        pipeline.push(doc! {"$sort": {path.query(): 1}});
    }
    pipeline.push(doc! {"$group": {"_id": expression(path), "n": {"$sum": 1_i64}}});
    let hint = index.map(|index| index.keys.clone());
    let needs = format!("find on {}", holder.namespace);
    let mut each = pipeline.clone();
    each.push(doc! {"$limit": i64::try_from(ROWS).unwrap_or(i64::MAX) + 1});
    let Ok(found) = ask.hinted(&holder.namespace, each, hint.clone(), &needs).await? else { return Ok(None) };
    if found.len() <= ROWS {
        let row = |row: &Document| Some((row.get("_id")?.clone(), number(row.get("n")?)));
        let is_key = |(value, _): &(Bson, u64)| denormd_model::shape::class(value).is_some();
        return Ok(Some(Rows::All(found.iter().filter_map(row).filter(is_key).collect())));
    }
    pipeline.push(doc! {"$match": {"_id": {"$ne": null}}});
    pipeline.push(doc! {"$group": {"_id": "$n", "values": {"$sum": 1_i64}}});
    let Ok(found) = ask.hinted(&holder.namespace, pipeline, hint, &needs).await? else { return Ok(None) };
    let row = |row: &Document| Some((number(row.get("_id")?), number(row.get("values")?)));
    let histogram: BTreeMap<u64, u64> = found.iter().filter_map(row).collect();
    let references = histogram.iter().map(|(times, values)| times * values).sum();
    Ok(Some(Rows::Histogram(histogram, references)))
}

/// The arrays on the way to a path, outermost first: `$a`, `$a.b` of `a.$[].b.$[].c`.
#[must_use]
pub fn unwinds(path: &FieldPath) -> Vec<String> {
    let (mut name, mut arrays) = (String::from("$"), Vec::new());
    for segment in path.segments() {
        match segment {
            Segment::Name(part) if name == "$" => name.push_str(part),
            Segment::Name(part) => name.push_str(&format!(".{part}")),
            Segment::Each => arrays.push(name.clone()),
        }
    }
    arrays
}

/// The expression for the value at a path after its arrays are unwound. A path cannot name the `$id` of a DBRef.
#[must_use]
pub fn expression(path: &FieldPath) -> Bson {
    let query = path.query();
    match query.strip_suffix(".$id") {
        Some(parent) => {
            Bson::Document(doc! {"$getField": {"field": {"$literal": "$id"}, "input": format!("${parent}")}})
        }
        None => Bson::String(format!("${query}")),
    }
}

/// Measures resolution on the sample alone, and counts the references to a few documents if an index allows it.
async fn sampled(
    ask: &Ask,
    link: &Link,
    holder: &Collection,
    held: &Collection,
    class: Option<Class>,
) -> Result<FanOut> {
    let values: HashMap<Key, u64> =
        holder.shape.field(&link.holder.path).map(|field| field.values.clone()).unwrap_or_default();
    let rows: Vec<(Bson, u64)> =
        values.iter().filter_map(|(key, times)| Some((key.values().first()?.clone(), *times))).collect();
    let present = resolve(ask, &rows, held, &link.held.path, class).await?;
    let (types, _) = by_type(&rows, &present, class);
    let drawn: u64 = rows.iter().map(|(_, times)| times).sum();
    let references =
        denormd_model::distribution::whole(ratio(drawn, holder.shape.documents.max(1)) * ratio(holder.count, 1));
    Ok(FanOut {
        references,
        distribution: sampled_distribution(ask, link, holder, held).await?,
        mean: ratio(references, held.count),
        alone: None,
        types,
        how: How::Sample(holder.shape.documents),
    })
}

/// Counts the references to each document in the sample of the referenced collection. Needs an index.
async fn sampled_distribution(
    ask: &Ask,
    link: &Link,
    holder: &Collection,
    held: &Collection,
) -> Result<Known<Distribution>> {
    let path = &link.holder.path;
    if !holder.is_indexed(&path.query()) {
        let why = format!("`{}` has {} documents and no index on {}", holder.namespace, holder.count, path.query());
        return Ok(Err(Unknown(why)));
    }
    let keys: Vec<Bson> = held
        .shape
        .field(&link.held.path)
        .map(|field| field.values.keys().filter_map(|key| key.values().first().cloned()).take(DRAWN).collect())
        .unwrap_or_default();
    let mut pipeline = vec![doc! {"$match": {path.query(): {"$in": &keys}}}];
    pipeline.extend(unwinds(path).into_iter().map(|array| doc! {"$unwind": array}));
    if path.has_each() {
        pipeline.push(doc! {"$match": {path.query(): {"$in": &keys}}});
    }
    pipeline.push(doc! {"$group": {"_id": expression(path), "n": {"$sum": 1_i64}}});
    let found = ask.aggregate(&holder.namespace, pipeline, &format!("find on {}", holder.namespace)).await?;
    Ok(found.and_then(|found| {
        let fans = found.iter().filter_map(|row| row.get("n").map(number));
        Distribution::of_list(fans, How::Sample(keys.len() as u64))
            .ok_or_else(|| Unknown("no reference resolves".to_owned()))
    }))
}

/// Finds the values that exist, either as they are or converted.
async fn resolve(
    ask: &Ask,
    rows: &[(Bson, u64)],
    held: &Collection,
    path: &FieldPath,
    class: Option<Class>,
) -> Result<HashSet<Key>> {
    let mut values: Vec<Bson> = rows.iter().map(|(value, _)| value.clone()).collect();
    if let Some(class) = class {
        let other = |(value, _): &(Bson, u64)| as_class(value, class).filter(|converted| converted != value);
        values.extend(rows.iter().filter_map(other));
    }
    present(ask, held, path, &values).await
}

/// Finds the elements of `values` that a collection has at `path`.
pub async fn present(ask: &Ask, held: &Collection, path: &FieldPath, values: &[Bson]) -> Result<HashSet<Key>> {
    if held.how == How::Exact
        && let Some(field) = held.shape.field(path)
        && field.all_values
    {
        return Ok(values
            .iter()
            .map(|value| Key::one(value.clone()))
            .filter(|key| field.values.contains_key(key))
            .collect());
    }
    let mut present = HashSet::new();
    let needs = format!("find on {}", held.namespace);
    let chunk = if held.is_indexed(&path.query()) { CHUNK } else { ROWS };
    for values in values.chunks(chunk) {
        let pipeline = vec![
            doc! {"$match": {path.query(): {"$in": values}}},
            doc! {"$project": {"_id": 0, "k": format!("${}", path.query())}},
        ];
        if let Ok(found) = ask.aggregate(&held.namespace, pipeline, &needs).await? {
            present.extend(found.into_iter().filter_map(|mut row| row.remove("k")).map(Key::one));
        }
    }
    Ok(present)
}

/// Groups the references by type, and counts the references to each existing document.
fn by_type(rows: &[(Bson, u64)], present: &HashSet<Key>, class: Option<Class>) -> (Vec<ByType>, Vec<u64>) {
    let mut types: BTreeMap<&'static str, ByType> = BTreeMap::new();
    let mut fans = Vec::new();
    for (value, times) in rows {
        let name = type_name(value);
        let of = types.entry(name).or_insert(ByType { name, references: 0, resolved: 0, converted: 0 });
        of.references += times;
        if present.contains(&Key::one(value.clone())) {
            of.resolved += times;
            fans.push(*times);
        } else if let Some(converted) = class.and_then(|class| as_class(value, class))
            && present.contains(&Key::one(converted))
        {
            of.converted += times;
            fans.push(*times);
        }
    }
    (types.into_values().collect(), fans)
}

/// The lengths of the arrays at `path`, counted over the whole collection if it is not too large.
pub async fn lengths(
    ask: &Ask,
    collection: &Collection,
    path: &FieldPath,
    bounds: &Advise,
) -> Result<Option<Distribution>> {
    let sampled = || {
        let field = collection.shape.field(path)?;
        Distribution::of_list(field.lengths.iter().copied(), collection.how)
    };
    if collection.how == How::Exact || path.has_each() || collection.count > bounds.scan_documents {
        return Ok(sampled());
    }
    let array = format!("${}", path.query());
    let pipeline = vec![
        doc! {"$group": {"_id": {"$cond": [{"$isArray": &array}, {"$size": &array}, null]}, "n": {"$sum": 1_i64}}},
        doc! {"$match": {"_id": {"$ne": null}}},
    ];
    let found = ask.aggregate(&collection.namespace, pipeline, &format!("find on {}", collection.namespace)).await?;
    let Ok(found) = found else { return Ok(sampled()) };
    let row = |row: &Document| Some((number(row.get("_id")?), number(row.get("n")?)));
    Ok(Distribution::of(&found.iter().filter_map(row).collect(), How::Exact).or_else(sampled))
}

/// The number of key values that several documents share.
pub async fn duplicates(ask: &Ask, held: &Collection, path: &FieldPath, bounds: &Advise) -> Result<Known<u64>> {
    let unique = held.indexes.iter().any(|index| {
        index.unique && index.keys.len() == 1 && index.keys.keys().next().is_some_and(|name| *name == path.query())
    });
    if unique {
        return Ok(Ok(0));
    }
    let indexed = held.index(&path.query());
    if indexed.is_none() && held.count > bounds.scan_documents {
        return Ok(Err(Unknown(format!("`{}` has {} documents and no index on {path}", held.namespace, held.count))));
    }
    let pipeline = vec![
        doc! {"$sort": {path.query(): 1}},
        doc! {"$group": {"_id": expression(path), "n": {"$sum": 1_i64}}},
        doc! {"$match": {"_id": {"$ne": null}, "n": {"$gt": 1}}},
        doc! {"$count": "n"},
    ];
    // Sorting helps only with the index.
    let pipeline = if indexed.is_some() { pipeline } else { pipeline[1..].to_vec() };
    let hint = indexed.map(|index| index.keys.clone());
    let found = ask.hinted(&held.namespace, pipeline, hint, &format!("find on {}", held.namespace)).await?;
    Ok(found.map(|found| found.first().and_then(|row| row.get("n")).map_or(0, number)))
}

#[cfg(test)]
mod tests {
    use bson::oid::ObjectId;

    use super::*;

    fn path(text: &str) -> FieldPath {
        FieldPath::parse(text).unwrap()
    }

    #[test]
    fn a_path_is_unwound_array_by_array() {
        assert_eq!(unwinds(&path("a.b")), [""; 0]);
        assert_eq!(unwinds(&path("a.$[].b.$[].c")), ["$a", "$a.b"]);
        assert_eq!(expression(&path("parts.$[].id")), Bson::from("$parts.id"));
        assert!(expression(&path("publisher.$id")).as_document().unwrap().contains_key("$getField"));
    }

    #[test]
    fn references_by_type() {
        let ids: Vec<ObjectId> = (0..3).map(|_| ObjectId::new()).collect();
        let present: HashSet<Key> = ids[..2].iter().map(|id| Key::one((*id).into())).collect();
        let rows = vec![
            (Bson::from(ids[0]), 5),
            (Bson::from(ids[1].to_hex()), 3),
            (Bson::from(ids[2]), 2),
            (Bson::from("nowhere"), 1),
        ];
        let (types, mut fans) = by_type(&rows, &present, Some(Class::ObjectId));
        fans.sort_unstable();
        assert_eq!(fans, [3, 5]);
        assert_eq!(
            types,
            [
                ByType { name: "objectId", references: 7, resolved: 5, converted: 0 },
                ByType { name: "string", references: 4, resolved: 0, converted: 3 },
            ]
        );
    }
}
