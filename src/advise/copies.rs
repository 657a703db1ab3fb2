//! Detection of existing copies: fields of a referring document that hold the value of a field of the referenced
//! document.

use std::collections::{BTreeSet, HashMap};

use bson::{Bson, Document, doc};

use denormd_model::{
    field_path::{FieldPath, Segment, value_at},
    key::Key,
};
use denormd_mongo::error::Result;

use super::{
    ask::Ask,
    facts::{Form, Place},
    inventory::Collection,
    relationships::Link,
};

/// Number of documents to compare.
const COMPARED: i64 = 500;
/// Minimum number of different values in a copy: two boolean fields are often equal by chance.
const DIFFERENT: usize = 3;

/// An existing copy: its place, its source field, and its quality.
#[derive(Debug, Clone, PartialEq)]
pub struct Copied {
    /// The field of the referenced document.
    pub field: FieldPath,
    /// The field of the referring document that holds the copy.
    pub place: FieldPath,
    /// The result of the comparison.
    pub held: Place,
}

/// Compares a sample of the referring documents with the documents that they reference.
pub async fn find(
    ask: &Ask,
    link: &Link,
    form: Form,
    holder: &Collection,
    held: &Collection,
    fields: &[FieldPath],
) -> Result<Vec<Copied>> {
    let each = link.holder.path.array_prefix();
    let nested = link.holder.path.segments().iter().filter(|segment| **segment == Segment::Each).count() > 1;
    if form == Form::Ids || nested || fields.is_empty() {
        return Ok(Vec::new());
    }
    let draw = doc! {"$sample": {"size": COMPARED}};
    let needs = format!("find on {}", holder.namespace);
    let Ok(documents) = ask.aggregate(&holder.namespace, vec![draw], &needs).await? else { return Ok(Vec::new()) };
    let rows: Vec<(Key, Document)> =
        documents.iter().flat_map(|document| rows(document, &link.holder.path, each.as_ref())).collect();
    let keys: BTreeSet<&Key> = rows.iter().map(|(key, _)| key).collect();
    let values: Vec<&Bson> = keys.iter().filter_map(|key| key.values().first()).collect();
    let key_path = link.held.path.query();
    let mut projection = doc! {&key_path: 1};
    projection.extend(fields.iter().map(|field| (field.query(), Bson::Int32(1))));
    let pipeline = vec![doc! {"$match": {&key_path: {"$in": values}}}, doc! {"$project": projection}];
    let needs = format!("find on {}", held.namespace);
    let Ok(sources) = ask.aggregate(&held.namespace, pipeline, &needs).await? else { return Ok(Vec::new()) };
    let sources: HashMap<Key, Document> = sources
        .into_iter()
        .filter_map(|source| Some((Key::one(at(&source, &link.held.path)?.clone()), source)))
        .collect();
    let pairs: Vec<(&Document, &Document)> =
        rows.iter().filter_map(|(key, row)| Some((row, sources.get(key)?))).collect();
    let places: BTreeSet<FieldPath> = holder
        .shape
        .fields
        .iter()
        .filter_map(|field| match &each {
            Some(each) => field.path.below(each).map(<[Segment]>::to_vec),
            None => Some(field.path.segments().to_vec()),
        })
        .filter(|segments| segments.len() <= 2 && !segments.contains(&Segment::Each))
        .filter_map(|segments| FieldPath::parse(&text(&segments)).ok())
        .collect();
    let own = each.as_ref().and_then(|each| link.holder.path.below(each)).unwrap_or(link.holder.path.segments());
    let own = text(own);
    let places: Vec<FieldPath> =
        places.into_iter().filter(|place| place.to_string() != own && place.to_string() != "_id").collect();
    Ok(matches(&pairs, fields, &places)
        .into_iter()
        .filter_map(|copied| {
            let place = match &each {
                Some(each) => FieldPath::parse(&format!("{each}.{}", copied.place)).ok()?,
                None => copied.place,
            };
            Some(Copied { place, ..copied })
        })
        .collect())
}

fn text(segments: &[Segment]) -> String {
    let part = |segment: &Segment| match segment {
        Segment::Name(name) => name.clone(),
        Segment::Each => "$[]".to_owned(),
    };
    segments.iter().map(part).collect::<Vec<_>>().join(".")
}

/// Finds, for each field, the place that most often holds its value. A place counts only if more than half of its
/// values match.
fn matches(pairs: &[(&Document, &Document)], fields: &[FieldPath], places: &[FieldPath]) -> Vec<Copied> {
    let mut found = Vec::new();
    for field in fields {
        let rated = places.iter().filter_map(|place| {
            let (mut compared, mut equal, mut values) = (0, 0, BTreeSet::new());
            for (row, source) in pairs {
                match (at(row, place), at(source, field)) {
                    (None, None) => {}
                    (Some(copy), Some(original)) if copy == original => {
                        compared += 1;
                        equal += 1;
                        values.insert(Key::one(copy.clone()));
                    }
                    _ => compared += 1,
                }
            }
            // A field with few different values may match by chance.
            let good = equal * 2 > compared && values.len() >= DIFFERENT;
            good.then(|| {
                (
                    equal,
                    Copied {
                        field: field.clone(),
                        place: place.clone(),
                        held: Place::Copy { compared, stale: compared - equal },
                    },
                )
            })
        });
        found.extend(rated.max_by_key(|(equal, _)| *equal).map(|(_, copied)| copied));
    }
    found
}

/// The references of one document, each with the subdocument or document that contains it.
fn rows(document: &Document, path: &FieldPath, each: Option<&FieldPath>) -> Vec<(Key, Document)> {
    let Some(each) = each else {
        return at(document, path).map(|value| (Key::one(value.clone()), document.clone())).into_iter().collect();
    };
    let array = &each.segments()[..each.segments().len() - 1];
    let (Some(rest), Some(Bson::Array(items))) = (path.below(each), value_at(document, array)) else {
        return Vec::new();
    };
    let elements = items.iter().filter_map(Bson::as_document);
    elements.filter_map(|element| Some((Key::one(value_at(element, rest)?.clone()), element.clone()))).collect()
}

fn at<'a>(document: &'a Document, path: &FieldPath) -> Option<&'a Bson> {
    value_at(document, path.segments())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> FieldPath {
        FieldPath::parse(text).unwrap()
    }

    #[test]
    fn a_copy_is_known_by_its_values() {
        let hosts: Vec<Document> = (0..5).map(|n| doc! {"_id": n, "ip": format!("10.0.0.{n}"), "up": true}).collect();
        let rows: Vec<Document> = (0..20)
            .map(|n| doc! {"host": n % 5, "address": format!("10.0.0.{}", if n == 7 { 0 } else { n % 5 }), "ok": true})
            .collect();
        let pairs: Vec<(&Document, &Document)> = rows.iter().zip(hosts.iter().cycle()).collect();
        let found = matches(&pairs, &[path("ip"), path("up")], &[path("address"), path("ok")]);
        let expected =
            Copied { field: path("ip"), place: path("address"), held: Place::Copy { compared: 20, stale: 1 } };
        assert_eq!(found, [expected], "one of twenty is stale; that all are up says nothing");
    }

    #[test]
    fn elements_are_looked_at_beside_their_id() {
        let document = doc! {"_id": 1, "parts": [{"id": 7, "name": "Spoke"}, {"name": "no id"}, {"id": 9}]};
        let found = rows(&document, &path("parts.$[].id"), Some(&path("parts.$[]")));
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], (Key::one(Bson::Int32(7)), doc! {"id": 7, "name": "Spoke"}));
    }
}
