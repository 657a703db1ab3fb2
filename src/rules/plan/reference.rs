//! References between a target and its sources: the pairs of `match`, and their values in documents.

use bson::{Bson, Document, oid::ObjectId};

use crate::{
    config::KeyType,
    plan::{bucket::Bucket, expression::Variables},
};
use denormd_model::{
    field_path::{FieldPath, Segment, touches, value_at},
    key::{Key, whole_number},
};

/// One entry of `match`.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// The path in the target.
    pub target: FieldPath,
    /// The path in the source.
    pub source: FieldPath,
    /// The interval of time that stands for a date of the source, for rules that create their targets.
    pub bucket: Option<Bucket>,
}

/// The `match` of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// The entries, in order. A [`Key`]'s values are in the same order.
    pub pairs: Vec<Pair>,
    /// Array of the target that the entries run through, such as `parts.$[]`.
    pub target_each: Option<FieldPath>,
    /// Array of the source that the entries run through, such as `parts.$[]`.
    pub source_each: Option<FieldPath>,
    /// Type to which the target's value is converted before matching.
    pub key_type: Option<KeyType>,
    /// Collection and database that a DBRef in the target must name: those of the source.
    pub source_name: (String, String),
    /// Collection and database that a DBRef in the source must name: those of the target.
    pub target_name: (String, String),
    /// True if the rule creates its targets: the entries are the whole `_id` of a target, in their order.
    pub creates: bool,
}

/// Role of a document in a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// The source.
    Source,
    /// The target.
    Target,
}

impl Reference {
    /// True if the only source path is `_id`: every event then contains the key.
    #[must_use]
    pub fn keyed_by_source_id(&self) -> bool {
        matches!(self.pairs.as_slice(), [pair] if pair.source.to_string() == "_id" && pair.bucket.is_none())
    }

    /// True if a key stands for one `_id` of the target.
    #[must_use]
    pub fn keyed_by_target_id(&self) -> bool {
        self.creates || matches!(self.pairs.as_slice(), [pair] if pair.target.to_string() == "_id")
    }

    /// The meaning of the variables in the rule's expressions.
    #[must_use]
    pub fn variables(&self) -> Variables<'_> {
        Variables {
            element: self.source_each.as_ref(),
            target_element: self.target_each.as_ref(),
            target: true,
            ..Variables::default()
        }
    }

    /// The paths on one side, in the order of the pairs.
    pub fn paths(&self, role: Role) -> impl Iterator<Item = &FieldPath> {
        self.pairs.iter().map(move |pair| match role {
            Role::Source => &pair.source,
            Role::Target => &pair.target,
        })
    }

    /// True if a write to the dotted path `changed` may change the reference keys of a document in this role.
    #[must_use]
    pub fn touched_by(&self, role: Role, changed: &str) -> bool {
        self.paths(role).any(|path| match path.segments() {
            // The other fields of a DBRef matter as much as its `$id`.
            [parent @ .., Segment::Name(id)] if id == "$id" && !parent.is_empty() => touches(parent, changed),
            path => touches(path, changed),
        })
    }

    /// A projection that keeps the fields for [`Reference::keys`], and the whole `_id`: a part of it does not
    /// identify the document.
    #[must_use]
    pub fn projection(&self, role: Role) -> Document {
        let mut out = Document::new();
        for path in self.paths(role) {
            if path.root() == "_id" {
                out.insert("_id", 1);
                continue;
            }
            out.insert(path.query(), 1);
            if let Some(parent) = dbref_parent(path) {
                out.extend(["$ref", "$db"].map(|name| (format!("{parent}{name}"), Bson::from(1))));
            }
        }
        out
    }

    /// The reference keys of a document: one for each element of the array, or a single one. None means no reference:
    /// null, missing, an array in place of a value, or a DBRef to another collection.
    #[must_use]
    pub fn keys(&self, role: Role, doc: &Document) -> Vec<Option<Key>> {
        if self.creates && role == Role::Target {
            return vec![doc.get("_id").and_then(|id| self.key_of_id(id))];
        }
        let Some(each) = self.each(role) else {
            return vec![self.key_at(role, doc, None)];
        };
        let elements = self.elements(role, doc).into_iter();
        elements.map(|element| self.key_at(role, doc, Some((each, element)))).collect()
    }

    /// The elements that contain the references of one side, in the order of [`Reference::keys`].
    #[must_use]
    pub fn elements<'a>(&self, role: Role, doc: &'a Document) -> Vec<&'a Bson> {
        let mut elements = Vec::new();
        if let Some(each) = self.each(role) {
            collect_elements(each.segments(), doc, &mut elements);
        }
        elements
    }

    fn each(&self, role: Role) -> Option<&FieldPath> {
        match role {
            Role::Source => self.source_each.as_ref(),
            Role::Target => self.target_each.as_ref(),
        }
    }

    /// True if the target has the array of its references.
    #[must_use]
    pub fn has_array(&self, target: &Document) -> bool {
        self.target_each.as_ref().is_some_and(|each| array_in(target, each.segments()).is_some())
    }

    fn key_at(&self, role: Role, doc: &Document, element: Option<(&FieldPath, &Bson)>) -> Option<Key> {
        let mut values = Vec::with_capacity(self.pairs.len());
        for (pair, path) in self.pairs.iter().zip(self.paths(role)) {
            let value = match element {
                Some((each, element)) if path == each => Some(element),
                Some((each, element)) if path.below(each).is_some() => match element {
                    Bson::Document(inside) => self.value_at(role, inside, path.below(each).unwrap_or_default()),
                    _ => None,
                },
                _ => self.value_at(role, doc, path.segments()),
            };
            match value? {
                Bson::Null | Bson::Undefined | Bson::Array(_) => return None,
                value if role == Role::Source && pair.bucket.is_some() && value.as_datetime().is_none() => return None,
                value if role == Role::Target => values.push(self.convert(value)),
                value => values.push(value.clone()),
            }
        }
        // With a `key_type`, every target's value has that type, so a source's value of another type matches no target.
        Some(Key::new(values)).filter(|key| role == Role::Target || self.can_resolve(key))
    }

    /// True if a source has a value that no key can have, for rules that create their targets: an array, or something
    /// other than a date where an interval needs one. Null and missing values refer to nothing.
    #[must_use]
    pub fn has_unusable_value(&self, source: &Document) -> bool {
        let unusable = |pair: &Pair, value: &Bson| match value {
            Bson::Null | Bson::Undefined => false,
            Bson::Array(_) => true,
            value => pair.bucket.is_some() && value.as_datetime().is_none(),
        };
        self.creates
            && self.pairs.iter().any(|pair| match &self.source_each {
                Some(each) if pair.source == *each => {
                    self.elements(Role::Source, source).into_iter().any(|element| unusable(pair, element))
                }
                Some(each) if pair.source.below(each).is_some() => {
                    let below = pair.source.below(each).unwrap_or_default();
                    let elements = self.elements(Role::Source, source).into_iter().filter_map(Bson::as_document);
                    elements
                        .filter_map(|element| self.value_at(Role::Source, element, below))
                        .any(|v| unusable(pair, v))
                }
                _ => self.value_at(Role::Source, source, pair.source.segments()).is_some_and(|v| unusable(pair, v)),
            })
    }

    /// The value at `path`. Does not look into arrays.
    fn value_at<'a>(&self, role: Role, doc: &'a Document, path: &[Segment]) -> Option<&'a Bson> {
        let (last, parents) = path.split_last()?;
        let parent = if parents.is_empty() { doc } else { value_at(doc, parents)?.as_document()? };
        let names_another = matches!(last, Segment::Name(name) if name == "$id") && !self.names(role, parent);
        value_at(parent, std::slice::from_ref(last)).filter(|_| !names_another)
    }

    /// True if the DBRef `at`, in a document of `role`, names the other side.
    fn names(&self, role: Role, at: &Document) -> bool {
        let (collection, database) = self.other(role);
        at.get_str("$ref").is_ok_and(|name| name == collection)
            && at.get("$db").is_none_or(|db| *db == Bson::Null || db.as_str() == Some(database))
    }

    /// The collection and the database that a DBRef in a document of `role` must name.
    #[must_use]
    pub fn other(&self, role: Role) -> (&str, &str) {
        let (collection, database) = match role {
            Role::Target => &self.source_name,
            Role::Source => &self.target_name,
        };
        (collection, database)
    }

    fn convert(&self, value: &Bson) -> Bson {
        match (self.key_type, value) {
            (Some(KeyType::ObjectId), Bson::String(text)) if is_lower_hex(text) => {
                ObjectId::parse_str(text).map_or_else(|_| value.clone(), Bson::ObjectId)
            }
            (Some(KeyType::String), Bson::ObjectId(id)) => Bson::String(id.to_hex()),
            (Some(KeyType::String), number) => {
                whole_number(number).map_or_else(|| value.clone(), |whole| Bson::String(whole.to_string()))
            }
            _ => value.clone(),
        }
    }

    /// True if a source can match `key`. Null refers to nothing, even if a source's `_id` is null. With a `key_type`, a
    /// value that does not convert matches nothing.
    #[must_use]
    pub fn can_resolve(&self, key: &Key) -> bool {
        key.values().iter().all(|value| match (value, self.key_type) {
            (Bson::Null | Bson::Undefined | Bson::Array(_), _) => false,
            (_, None) | (Bson::ObjectId(_), Some(KeyType::ObjectId)) | (Bson::String(_), Some(KeyType::String)) => true,
            (_, Some(_)) => false,
        })
    }

    /// The values of a target that convert to `value`, for use in a query.
    #[must_use]
    pub fn stored_as(&self, value: &Bson) -> Vec<Bson> {
        match (self.key_type, value) {
            (Some(KeyType::ObjectId), Bson::ObjectId(id)) => vec![value.clone(), Bson::String(id.to_hex())],
            (Some(KeyType::String), Bson::String(text)) => {
                let mut all = vec![value.clone()];
                if is_lower_hex(text) {
                    all.extend(ObjectId::parse_str(text).ok().map(Bson::ObjectId));
                }
                // Only the canonical text of an integer: "05" does not convert.
                all.extend(text.parse().ok().filter(|n: &i64| n.to_string() == *text).map(Bson::Int64));
                all
            }
            _ => vec![value.clone()],
        }
    }
}

fn is_lower_hex(text: &str) -> bool {
    text.len() == 24 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// `publisher.` of `publisher.$id`; the prefix of a DBRef's three fields.
#[must_use]
pub fn dbref_parent(path: &FieldPath) -> Option<String> {
    let text = path.query();
    text.strip_suffix("$id").map(ToOwned::to_owned)
}

/// The array at the first `$[]` of a path, and the rest of the path; None if something other than an array is there.
fn array_in<'a, 'p>(doc: &'a Document, path: &'p [Segment]) -> Option<(&'a Vec<Bson>, &'p [Segment])> {
    let at = path.iter().position(|segment| *segment == Segment::Each)?;
    Some((value_at(doc, &path[..at])?.as_array()?, &path[at + 1..]))
}

/// The elements at a path that ends in `$[]`; none if there is a value other than an array on the way.
fn collect_elements<'a>(path: &[Segment], doc: &'a Document, out: &mut Vec<&'a Bson>) {
    match array_in(doc, path) {
        None => {}
        Some((items, [])) => out.extend(items),
        Some((items, rest)) => {
            for item in items.iter().filter_map(Bson::as_document) {
                collect_elements(rest, item, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    fn reference(pairs: &[(&str, &str)]) -> Reference {
        let pairs: Vec<Pair> = pairs
            .iter()
            .map(|(t, s)| Pair {
                target: FieldPath::parse(t).unwrap(),
                source: FieldPath::parse(s).unwrap(),
                bucket: None,
            })
            .collect();
        Reference {
            target_each: pairs.iter().find_map(|p| p.target.array_prefix()),
            source_each: pairs.iter().find_map(|p| p.source.array_prefix()),
            pairs,
            key_type: None,
            source_name: ("parts".to_owned(), "shop".to_owned()),
            target_name: ("products".to_owned(), "shop".to_owned()),
            creates: false,
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "what keys() yields")]
    fn key(value: Bson) -> Option<Key> {
        Some(Key::one(value))
    }

    #[test]
    fn a_scalar_reference_does_not_look_into_arrays() {
        let r = reference(&[("a.b", "_id")]);
        let keys = |doc: Document| r.keys(Role::Target, &doc);
        assert_eq!(keys(doc! {"a": {"b": 5}}), [key(bson!(5))]);
        assert_eq!(keys(doc! {"a": {"b": null}}), [None]);
        assert_eq!(keys(doc! {"a": 5}), [None]);
        assert_eq!(keys(doc! {"a": [{"b": 5}]}), [None]);
        assert_eq!(keys(doc! {"a": {"b": [5]}}), [None]);
    }

    #[test]
    fn an_array_has_one_reference_an_element() {
        let r = reference(&[("parts.$[].id", "_id")]);
        let doc = doc! {"parts": [{"id": 1}, {"id": null}, {"x": 1}, 5, {"id": 1.0}]};
        assert_eq!(r.keys(Role::Target, &doc), [key(bson!(1)), None, None, None, key(bson!(1))]);
        assert_eq!(r.keys(Role::Target, &doc! {"parts": {"id": 1}}), []);
        assert_eq!(reference(&[("p.$[]", "_id")]).keys(Role::Target, &doc! {"p": [3, null]}), [key(bson!(3)), None]);
        let nested = reference(&[("a.$[].b.$[].c", "_id")]);
        let doc = doc! {"a": [{"b": [{"c": 1}, {"c": 2}]}, {"b": 5}, 7, {"b": [{"c": 3}]}]};
        assert_eq!(nested.keys(Role::Target, &doc), [key(bson!(1)), key(bson!(2)), key(bson!(3))]);
    }

    #[test]
    fn entries_of_one_element_belong_together() {
        let r = reference(&[("tenant", "tenant"), ("parts.$[].id", "sku")]);
        let doc = doc! {"tenant": "t", "parts": [{"id": 1}, {}]};
        assert_eq!(r.keys(Role::Target, &doc), [Some(Key::new(vec![bson!("t"), bson!(1)])), None]);
    }

    #[test]
    fn a_dbref_must_name_the_source() {
        let r = reference(&[("part.$id", "_id")]);
        let keys = |part: Document| r.keys(Role::Target, &doc! {"part": part});
        assert_eq!(keys(doc! {"$ref": "parts", "$id": 1}), [key(bson!(1))]);
        assert_eq!(keys(doc! {"$ref": "parts", "$id": 1, "$db": "shop"}), [key(bson!(1))]);
        assert_eq!(keys(doc! {"$ref": "parts", "$id": 1, "$db": "other"}), [None]);
        assert_eq!(keys(doc! {"$ref": "others", "$id": 1}), [None]);
    }

    #[test]
    fn key_type_converts_and_finds_back() {
        let id = ObjectId::parse_str("0123456789abcdef01234567").unwrap();
        let mut r = reference(&[("part", "_id")]);
        r.key_type = Some(KeyType::ObjectId);
        assert_eq!(r.keys(Role::Target, &doc! {"part": id.to_hex()}), [key(id.into())]);
        assert_eq!(r.stored_as(&id.into()), [bson!(id), bson!(id.to_hex())]);
        r.key_type = Some(KeyType::String);
        assert_eq!(r.keys(Role::Target, &doc! {"part": id}), [key(bson!(id.to_hex()))]);
        assert_eq!(r.keys(Role::Target, &doc! {"part": 5}), [key(bson!("5"))]);
        assert_eq!(r.stored_as(&bson!("5")), [bson!("5"), Bson::Int64(5)]);
        assert_eq!(r.stored_as(&bson!("05")), [bson!("05")]);
    }
}
