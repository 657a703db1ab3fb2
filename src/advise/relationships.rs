//! Detection of relationships: those given by the user, by DBRefs, or by values that exist elsewhere. Pure; the caller
//! queries the server for the values.

use std::collections::{BTreeMap, HashMap, HashSet};

use bson::{Bson, oid::ObjectId};

use denormd_model::{field_path::FieldPath, key::Key, namespace::Namespace};

use super::names;
use denormd_model::{
    distribution::ratio,
    shape::{Class, Field, Shape},
};

/// Number of values of a field to look up elsewhere.
const TRIED: usize = 50;

/// A field of a collection.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct End {
    /// The collection that contains the field.
    pub namespace: Namespace,
    /// The path of the field; array elements are `$[]`.
    pub path: FieldPath,
}

/// The evidence for a relationship, the most certain first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Evidence {
    /// By `--match`, or by a rule of the config.
    Told,
    /// By a `$lookup` in the log of slow queries.
    Joined,
    /// By the `$ref` of DBRefs.
    DbRef,
    /// By its values, which exist in the other collection, and by its name.
    NameAndValues,
    /// By its values alone.
    Values,
}

impl Evidence {
    /// The evidence in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::Joined => "joined by a slow $lookup",
            Self::DbRef => "DBRefs",
            Self::NameAndValues => "found by its name and its values",
            Self::Values => "found by its values alone",
        }
    }
}

/// A relationship: the values of a referring field equal those of a referenced field.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// The referring field.
    pub holder: End,
    /// The referenced field.
    pub held: End,
    /// The evidence for the relationship.
    pub found: Evidence,
    /// Existing copies, as pairs of a referring document's field and the referenced document's field.
    pub copies: Vec<(FieldPath, FieldPath)>,
}

/// A field that may hold references.
#[derive(Debug, Clone)]
pub struct Holder {
    /// The collection and path of the field.
    pub end: End,
    /// The class of its values.
    pub class: Class,
    /// Some of its values.
    pub values: Vec<Bson>,
    /// Number of different values in the sample.
    distinct: u64,
}

/// A field that may identify documents.
#[derive(Debug, Clone)]
pub struct HeldKey {
    /// The collection and path of the field.
    pub end: End,
    /// The class of its values.
    pub class: Class,
    /// Number of documents in the collection.
    count: u64,
}

/// The view of a collection that detection needs.
pub struct Sampled<'a> {
    /// The namespace of the collection.
    pub namespace: &'a Namespace,
    /// The shape of its sampled documents.
    pub shape: &'a Shape,
    /// Number of documents in the collection.
    pub count: u64,
}

/// Finds the fields that may hold references. `owned` is true for fields written by denormd's rules: copies, not
/// references.
#[must_use]
pub fn holders(collections: &[Sampled<'_>], owned: impl Fn(&Namespace, &FieldPath) -> bool) -> Vec<Holder> {
    let mut holders = Vec::new();
    for Sampled { namespace, shape, .. } in collections {
        for field in &shape.fields {
            let Some(class) = field.class() else { continue };
            let id = field.path.to_string();
            // Two collections can share numbers and names as `_id` by chance, but not ObjectIds.
            let counts = matches!(class, Class::Number | Class::Text);
            if (id == "_id" && counts) || id.ends_with("$id") || owned(namespace, &field.path) {
                continue;
            }
            let end = End { namespace: (*namespace).clone(), path: field.path.clone() };
            holders.push(Holder { end, class, values: some(field), distinct: field.values.len() as u64 });
        }
    }
    holders
}

/// A few of a field's values, the same ones on every run.
fn some(field: &Field) -> Vec<Bson> {
    let mut keys: Vec<&Key> = field.values.keys().collect();
    keys.sort();
    let step = (keys.len() / TRIED).max(1);
    keys.into_iter().step_by(step).take(TRIED).filter_map(|key| key.values().first().cloned()).collect()
}

/// Finds the fields that may be referenced: `_id`, and fields that are unique in the sample.
#[must_use]
pub fn keys(collections: &[Sampled<'_>]) -> Vec<HeldKey> {
    let mut keys = Vec::new();
    for Sampled { namespace, shape, count } in collections {
        for field in shape.fields.iter().filter(|field| !field.path.has_each()) {
            let is_id = field.path.to_string() == "_id";
            let Some(class) = field.class().filter(|_| is_id || field.is_unique(shape.documents)) else { continue };
            let end = End { namespace: (*namespace).clone(), path: field.path.clone() };
            keys.push(HeldKey { end, class, count: *count });
        }
    }
    keys
}

/// Converts a value to another class of key, as `key_type` does; None if no `key_type` does it.
#[must_use]
pub fn as_class(value: &Bson, wanted: Class) -> Option<Bson> {
    match (denormd_model::shape::class(value)?, wanted) {
        (class, wanted) if class == wanted => Some(value.clone()),
        (Class::Text, Class::ObjectId) => {
            let text = value.as_str()?;
            ObjectId::parse_str(text).ok().filter(|id| id.to_hex() == text).map(Bson::ObjectId)
        }
        (Class::ObjectId, Class::Text) => value.as_object_id().map(|id| Bson::String(id.to_hex())),
        (Class::Number, Class::Text) => {
            denormd_model::key::whole_number(value).map(|number| Bson::String(number.to_string()))
        }
        _ => None,
    }
}

/// The values to look up in a key's collection, converted to the key's class.
#[must_use]
pub fn wanted(key: &HeldKey, holders: &[Holder]) -> Vec<Bson> {
    let mut seen = HashSet::new();
    let values = holders.iter().flat_map(|holder| &holder.values).filter_map(|value| as_class(value, key.class));
    values.filter(|value| seen.insert(Key::one(value.clone()))).collect()
}

/// Finds the relationships among `holders` and `keys`. `present` holds the existing values of each key's [`wanted`], in
/// the order of `keys`.
#[must_use]
pub(crate) fn links(holders: &[Holder], keys: &[HeldKey], present: &[HashSet<Key>]) -> Vec<Link> {
    let mut links = Vec::new();
    for holder in holders {
        let rated = keys.iter().zip(present).filter(|(key, _)| key.end != holder.end);
        let rated =
            rated.filter_map(|(key, present)| rate(holder, key, present).map(|(found, rate)| (found, rate, key)));
        // `_id` comes before other keys, then the highest share of existing values.
        let best = rated.min_by(|(found, rate, key), (other_found, other_rate, other)| {
            let id = |key: &HeldKey| key.end.path.to_string() != "_id";
            found
                .cmp(other_found)
                .then(other_rate.total_cmp(rate))
                .then(id(key).cmp(&id(other)))
                .then(key.count.cmp(&other.count))
        });
        if let Some((found, _, key)) = best {
            links.push(Link { holder: holder.end.clone(), held: key.end.clone(), found, copies: Vec::new() });
        }
    }
    one_of_each_pair(copies_apart(links))
}

/// Rates the evidence that a field refers to a key, with the share of its values that exist; None if it is too weak.
fn rate(holder: &Holder, key: &HeldKey, present: &HashSet<Key>) -> Option<(Evidence, f64)> {
    let tried = holder.values.len() as u64;
    let there = holder.values.iter().filter_map(|value| as_class(value, key.class));
    let there = there.filter(|value| present.contains(&Key::one(value.clone()))).count() as u64;
    let share = ratio(there, tried);
    let same_collection = holder.end.namespace == key.end.namespace;
    let converted = holder.class != key.class;
    let spoken = names::speaks_of(&holder.end.path, &key.end.namespace.collection, &key.end.path);
    let enough = match (holder.class, spoken) {
        _ if there == 0 => false,
        (Class::ObjectId | Class::Uuid, spoken) => share >= if spoken { 0.01 } else { 0.1 },
        // Text of 24 hexadecimal digits that equals an existing ObjectId is no coincidence either.
        (Class::Text, _) if key.class == Class::ObjectId => share >= 0.1,
        (Class::Text | Class::Number, true) => share >= 0.5,
        (Class::Text, false) => !converted && !same_collection && there >= 3 && share >= 0.9,
        // Small numbers are everywhere: all of them must exist, and they must cover at least half of the referenced
        // collection.
        (Class::Number, false) => {
            !converted && !same_collection && tried >= 10 && there == tried && holder.distinct * 2 >= key.count
        }
    };
    let found = if spoken { Evidence::NameAndValues } else { Evidence::Values };
    enough.then_some((found, share))
}

/// Keeps one reference for each referring document and referenced collection, to `_id` or the most certain; the others
/// are copies.
fn copies_apart(links: Vec<Link>) -> Vec<Link> {
    let mut groups: BTreeMap<(Namespace, Option<FieldPath>, Namespace), Vec<Link>> = BTreeMap::new();
    for link in links {
        let group = (link.holder.namespace.clone(), link.holder.path.array_prefix(), link.held.namespace.clone());
        groups.entry(group).or_default().push(link);
    }
    let mut kept = Vec::new();
    for group in groups.into_values() {
        let id = group.iter().find(|link| link.held.path.to_string() == "_id");
        let surest = id.or_else(|| group.iter().min_by_key(|link| link.found)).map(|link| link.held.path.clone());
        let (mut references, copies): (Vec<Link>, Vec<Link>) =
            group.into_iter().partition(|link| Some(&link.held.path) == surest.as_ref());
        if let Some(first) = references.first_mut() {
            first.copies = copies.into_iter().map(|copy| (copy.holder.path, copy.held.path)).collect();
        }
        kept.append(&mut references);
    }
    kept
}

/// Removes the reverse of a relationship: of two opposite links, the one with better evidence stays, or else the first.
fn one_of_each_pair(links: Vec<Link>) -> Vec<Link> {
    let mut kept: Vec<Link> = Vec::new();
    for link in links {
        match kept.iter_mut().find(|other| other.holder == link.held && other.held == link.holder) {
            Some(other) if link.found < other.found => *other = link,
            Some(_) => {}
            None => kept.push(link),
        }
    }
    kept
}

/// Finds the relationships given by DBRefs.
#[must_use]
pub fn db_refs(collections: &[Sampled<'_>]) -> Vec<Link> {
    let Ok(id) = FieldPath::parse("_id") else { return Vec::new() };
    let mut links = Vec::new();
    for Sampled { namespace, shape, .. } in collections {
        for field in shape.fields.iter().filter(|field| field.path.to_string().ends_with(".$id")) {
            let beside = |name: &str| {
                let path = field.path.to_string().replace(".$id", &format!(".{name}"));
                FieldPath::parse(&path).ok().and_then(|path| shape.field(&path))
            };
            let texts = |field: Option<&Field>| -> Vec<(String, u64)> {
                let values: HashMap<Key, u64> = field.map(|field| field.values.clone()).unwrap_or_default();
                let mut texts: Vec<(String, u64)> = values
                    .iter()
                    .filter_map(|(key, times)| Some((key.values().first()?.as_str()?.to_owned(), *times)))
                    .collect();
                texts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
                texts
            };
            let Some((collection, _)) = texts(beside("$ref")).into_iter().next() else { continue };
            let database = texts(beside("$db")).into_iter().next().map_or(namespace.database.clone(), |(name, _)| name);
            let holder = End { namespace: (*namespace).clone(), path: field.path.clone() };
            let held = End { namespace: Namespace { database, collection }, path: id.clone() };
            links.push(Link { holder, held, found: Evidence::DbRef, copies: Vec::new() });
        }
    }
    links
}

/// Merges all relationships, keeping the first for each field: those given by the user take precedence.
#[must_use]
pub fn joined(told: Vec<Link>, db_refs: Vec<Link>, found: Vec<Link>) -> Vec<Link> {
    let mut links: Vec<Link> = Vec::new();
    for link in told.into_iter().chain(db_refs).chain(found) {
        let known = |other: &Link| {
            (other.holder == link.holder && (other.found <= Evidence::Joined || other.held == link.held))
                || (other.holder == link.held && other.held == link.holder)
        };
        match links.iter_mut().find(|other| known(other)) {
            Some(other) => other.copies.extend(link.copies),
            None => links.push(link),
        }
    }
    links.sort_by(|a, b| a.holder.cmp(&b.holder));
    links
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::*;

    fn ns(collection: &str) -> Namespace {
        Namespace { database: "shop".to_owned(), collection: collection.to_owned() }
    }

    /// The relationships found between whole collections, as "referring field -> referenced field".
    fn found(collections: &[(&str, Vec<Document>)]) -> Vec<String> {
        let shapes: Vec<(Namespace, Shape)> = collections
            .iter()
            .map(|(name, documents)| (ns(name), Shape::of(documents.iter().map(|document| (document, 1)))))
            .collect();
        let sampled: Vec<Sampled<'_>> =
            shapes.iter().map(|(namespace, shape)| Sampled { namespace, shape, count: shape.documents }).collect();
        let (holders, keys) = (holders(&sampled, |_, _| false), keys(&sampled));
        let present: Vec<HashSet<Key>> = keys
            .iter()
            .map(|key| {
                let shape = &shapes.iter().find(|(ns, _)| *ns == key.end.namespace).unwrap().1;
                shape.field(&key.end.path).unwrap().values.keys().cloned().collect()
            })
            .collect();
        let all = joined(Vec::new(), db_refs(&sampled), links(&holders, &keys, &present));
        let show = |link: &Link| {
            let copies: Vec<String> = link.copies.iter().map(|(path, of)| format!(", {path} copies {of}")).collect();
            let copies = copies.concat();
            format!(
                "{}.{} -> {}.{} {:?}{copies}",
                link.holder.namespace.collection,
                link.holder.path,
                link.held.namespace.collection,
                link.held.path,
                link.found
            )
        };
        all.iter().map(show).collect()
    }

    #[test]
    fn the_shop() {
        let parts = (1..=200).map(|id| doc! {"_id": id, "name": format!("Spoke {id}"), "price": 0.5}).collect();
        let products = (1..=1000)
            .map(|id| {
                let part = |nth: i32| (id * nth * 3) % 200 + 1;
                doc! {"_id": id, "parts": [{"id": part(1), "quantity": 2}, {"id": part(2), "quantity": 4}], "spares": [part(3), part(4)]}
            })
            .collect();
        let hosts = (1..=20)
            .map(|id| doc! {"_id": id, "name": format!("web-{id}"), "ipaddr": format!("10.0.0.{id}")})
            .collect();
        let logmsg = (1..=2000)
            .map(|id| doc! {"_id": id, "host": id % 20 + 1, "message": "GET /", "ipaddr": format!("10.0.0.{}", id % 20 + 1)})
            .collect();
        let found = found(&[("parts", parts), ("products", products), ("hosts", hosts), ("logmsg", logmsg)]);
        assert_eq!(
            found,
            [
                "logmsg.host -> hosts._id NameAndValues, ipaddr copies ipaddr",
                "products.parts.$[].id -> parts._id NameAndValues",
                "products.spares.$[] -> parts._id Values",
            ]
        );
    }

    #[test]
    fn keys_that_are_no_id() {
        let airlines = ["UA", "AA", "B6", "DL"]
            .map(|code| doc! {"_id": ObjectId::new(), "carrier": code, "name": format!("{code} Air Lines")});
        let airports =
            ["EWR", "LGA", "JFK", "IAH", "MIA"].map(|code| doc! {"_id": ObjectId::new(), "faa": code, "alt": 10});
        let pick = |names: &[&str], n: usize| names[n % names.len()].to_owned();
        let flights = (0..40_usize).map(|n| {
            doc! {
                "_id": ObjectId::new(), "month": i32::try_from(n % 12).unwrap() + 1, "carrier": pick(&["UA", "AA", "B6", "DL"], n),
                "origin": pick(&["EWR", "LGA", "JFK"], n), "dest": pick(&["IAH", "MIA", "EWR"], n),
            }
        });
        let found =
            found(&[("airlines", airlines.to_vec()), ("airports", airports.to_vec()), ("flights", flights.collect())]);
        assert_eq!(
            found,
            [
                "flights.carrier -> airlines.carrier NameAndValues",
                "flights.dest -> airports.faa Values",
                "flights.origin -> airports.faa Values",
            ]
        );
    }

    #[test]
    fn other_forms() {
        let ids: Vec<ObjectId> = (0..20).map(|_| ObjectId::new()).collect();
        let publishers = ids.iter().map(|id| doc! {"_id": *id, "name": "O'Reilly Media"}).collect();
        let books = ids
            .iter()
            .map(|id| doc! {"_id": ObjectId::new(), "publisher": {"$ref": "publishers", "$id": *id}, "by": id.to_hex(), "seller": ObjectId::new()})
            .collect();
        let found = found(&[("publishers", publishers), ("books", books)]);
        assert_eq!(
            found,
            ["books.by -> publishers._id Values", "books.publisher.$id -> publishers._id DbRef"],
            "24 digits that are an ObjectId elsewhere refer; an ObjectId that is nowhere does not"
        );
    }
}
