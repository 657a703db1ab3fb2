//! The shape of sampled documents: paths, types, array lengths, and the values that may be keys. Pure.

use std::collections::{BTreeMap, HashMap};

use bson::{
    Bson, Document,
    spec::{BinarySubtype, ElementType},
};

use crate::{field_path::FieldPath, key::Key};

use super::distribution::{Distribution, How};

/// Maximum number of paths per collection: a document used as a map from ids has an unlimited number of them.
const PATHS: usize = 400;
/// Maximum depth of nesting to inspect.
const DEPTH: usize = 6;
/// Maximum number of different values to keep per path.
const VALUES: usize = 2000;
/// Maximum length of a string that may be a key, in bytes.
const LONGEST: usize = 64;
const DAY: f64 = 86_400.0;

/// The combined shape of the documents in a sample.
#[derive(Debug, Clone, Default)]
pub struct Shape {
    /// Number of documents.
    pub documents: u64,
    /// Sizes of the documents, in bytes.
    pub sizes: Vec<u64>,
    /// Creation times in seconds since 1970, from ObjectIds in `_id`.
    pub made: Vec<i64>,
    /// The fields, in the order in which their paths were found.
    pub fields: Vec<Field>,
    index: HashMap<String, usize>,
}

/// The values at one path.
#[derive(Debug, Clone)]
pub struct Field {
    /// The path; array elements are `$[]`.
    pub path: FieldPath,
    /// Number of values. A document has several if the path runs through an array.
    pub met: u64,
    /// Number of values of each BSON type, named as in `$type`.
    pub types: BTreeMap<&'static str, u64>,
    /// Total size of all values, in bytes.
    pub bytes: u64,
    /// The values that may be keys, with their number of occurrences.
    pub values: HashMap<Key, u64>,
    /// True if every value that may be a key was kept.
    pub all_values: bool,
    /// Lengths of the arrays at this path.
    pub lengths: Vec<u64>,
    /// Elements added per day to each array, derived from times in its elements.
    pub growth: Vec<f64>,
}

/// The class of a value that may be a key. Values of different classes are never equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// ObjectId.
    ObjectId,
    /// A UUID in binary.
    Uuid,
    /// A short string without spaces.
    Text,
    /// A whole number.
    Number,
}

impl Shape {
    /// The shape of these documents. Each comes with its size in bytes.
    #[must_use]
    pub fn of<'a>(documents: impl IntoIterator<Item = (&'a Document, u64)>) -> Self {
        let mut shape = Self::default();
        for (document, size) in documents {
            shape.documents += 1;
            shape.sizes.push(size);
            if let Some(Bson::ObjectId(id)) = document.get("_id") {
                shape.made.push(id.timestamp().timestamp_millis() / 1000);
            }
            shape.walk("", document, 0);
        }
        shape
    }

    /// True if some paths may not have been kept.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.fields.len() >= PATHS || self.fields.iter().any(|field| field.path.names().count() > DEPTH)
    }

    /// Finds the field at a path.
    #[must_use]
    pub fn field(&self, path: &FieldPath) -> Option<&Field> {
        self.index.get(&path.to_string()).and_then(|at| self.fields.get(*at))
    }

    /// Finds the field at a path in query syntax: `parts.id` for `parts.$[].id`.
    #[must_use]
    pub fn query_field(&self, query: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.path.query() == query && field.class().is_some())
    }

    /// The fields directly below a path, or the top-level fields.
    pub fn children<'a>(&'a self, parent: Option<&'a FieldPath>) -> impl Iterator<Item = &'a Field> {
        self.fields.iter().filter(move |field| match parent {
            None => field.path.segments().len() == 1,
            Some(parent) => field.path.below(parent).is_some_and(|rest| rest.len() == 1),
        })
    }

    fn walk(&mut self, prefix: &str, document: &Document, depth: usize) {
        for (name, value) in document {
            // A name with dots is one field in BSON but would be several segments of a path.
            if !name.contains('.') {
                let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                self.take(&path, value, depth);
            }
        }
    }

    fn take(&mut self, path: &str, value: &Bson, depth: usize) {
        let Some(field) = self.entry(path) else { return };
        field.met += 1;
        *field.types.entry(type_name(value)).or_default() += 1;
        field.bytes += weight(value);
        if class(value).is_some() {
            let room = field.values.len() < VALUES;
            match field.values.entry(Key::one(value.clone())) {
                std::collections::hash_map::Entry::Occupied(mut seen) => *seen.get_mut() += 1,
                std::collections::hash_map::Entry::Vacant(free) if room => {
                    free.insert(1);
                }
                std::collections::hash_map::Entry::Vacant(_) => field.all_values = false,
            }
        }
        match value {
            Bson::Array(items) => {
                field.lengths.push(items.len() as u64);
                field.growth.extend(growth(items));
                if depth < DEPTH && !path.ends_with("$[]") {
                    for item in items {
                        self.take(&format!("{path}.$[]"), item, depth + 1);
                    }
                }
            }
            Bson::Document(inner) if depth < DEPTH => self.walk(path, inner, depth + 1),
            _ => {}
        }
    }

    fn entry(&mut self, path: &str) -> Option<&mut Field> {
        if let Some(at) = self.index.get(path) {
            return self.fields.get_mut(*at);
        }
        let parsed = FieldPath::parse(path).ok().filter(|_| self.fields.len() < PATHS)?;
        self.index.insert(path.to_owned(), self.fields.len());
        self.fields.push(Field {
            path: parsed,
            met: 0,
            types: BTreeMap::new(),
            bytes: 0,
            values: HashMap::new(),
            all_values: true,
            lengths: Vec::new(),
            growth: Vec::new(),
        });
        self.fields.last_mut()
    }

    /// Documents created per day, scaled to a collection of `count`. Uses the 30 days before the newest document, if
    /// the sample covers as many.
    #[must_use]
    pub fn made_per_day(&self, count: u64) -> Option<f64> {
        let (first, last) = (*self.made.iter().min()?, *self.made.iter().max()?);
        if self.made.len() < 10 || last - first < 3600 {
            return None;
        }
        let month = last - 30 * 86_400;
        let recent = self.made.iter().filter(|made| **made > month).count();
        let days = to_f64(u64::try_from(last - first.max(month)).unwrap_or_default()) / DAY;
        Some(to_f64(count) * to_f64(recent as u64) / to_f64(self.made.len() as u64) / days)
    }

    /// The distribution of the document sizes.
    #[must_use]
    pub fn size(&self, how: How) -> Option<Distribution> {
        Distribution::of_list(self.sizes.iter().copied(), how)
    }
}

impl Field {
    /// The class of the values, if at least half of them may be keys.
    #[must_use]
    pub fn class(&self) -> Option<Class> {
        let mut seen: BTreeMap<Class, u64> = BTreeMap::new();
        for (key, times) in &self.values {
            if let Some(class) = key.values().first().and_then(class) {
                *seen.entry(class).or_default() += times;
            }
        }
        let (class, times) = seen.into_iter().max_by_key(|(_, times)| *times)?;
        (times * 2 >= self.met - self.types.get("null").copied().unwrap_or_default()).then_some(class)
    }

    /// True if no value occurs twice, in a field that at least 90% of `documents` have.
    #[must_use]
    pub fn is_unique(&self, documents: u64) -> bool {
        self.all_values
            && self.class().is_some()
            && self.values.values().all(|times| *times == 1)
            && self.values.len() as u64 * 10 >= documents * 9
    }

    /// Average size of a value, in bytes.
    #[must_use]
    pub fn average_bytes(&self) -> u64 {
        self.bytes.checked_div(self.met).unwrap_or_default()
    }

    /// True if any value has this type, named as in `$type`.
    #[must_use]
    pub fn has_type(&self, name: &str) -> bool {
        self.types.contains_key(name)
    }
}

/// The class of a value, if it may be a key.
#[must_use]
pub fn class(value: &Bson) -> Option<Class> {
    match value {
        Bson::ObjectId(_) => Some(Class::ObjectId),
        Bson::Binary(binary) if matches!(binary.subtype, BinarySubtype::Uuid | BinarySubtype::UuidOld) => {
            Some(Class::Uuid)
        }
        Bson::String(text) if !text.is_empty() && text.len() <= LONGEST && !text.contains(char::is_whitespace) => {
            Some(Class::Text)
        }
        Bson::Int32(_) | Bson::Int64(_) => Some(Class::Number),
        _ => None,
    }
}

/// The name of a value's type, as in `$type`.
#[must_use]
pub fn type_name(value: &Bson) -> &'static str {
    type_name_of(value.element_type())
}

/// The name of a type, as in `$type`.
#[must_use]
pub fn type_name_of(kind: ElementType) -> &'static str {
    match kind {
        ElementType::Double => "double",
        ElementType::String => "string",
        ElementType::EmbeddedDocument => "object",
        ElementType::Array => "array",
        ElementType::Binary => "binData",
        ElementType::Undefined => "undefined",
        ElementType::ObjectId => "objectId",
        ElementType::Boolean => "bool",
        ElementType::DateTime => "date",
        ElementType::Null => "null",
        ElementType::RegularExpression => "regex",
        ElementType::DbPointer => "dbPointer",
        ElementType::JavaScriptCode => "javascript",
        ElementType::Symbol => "symbol",
        ElementType::JavaScriptCodeWithScope => "javascriptWithScope",
        ElementType::Int32 => "int",
        ElementType::Timestamp => "timestamp",
        ElementType::Int64 => "long",
        ElementType::Decimal128 => "decimal",
        ElementType::MinKey => "minKey",
        ElementType::MaxKey => "maxKey",
    }
}

/// Approximate size of a value in BSON, in bytes, without its name.
fn weight(value: &Bson) -> u64 {
    match value {
        Bson::Double(_) | Bson::DateTime(_) | Bson::Int64(_) | Bson::Timestamp(_) => 8,
        Bson::String(text) | Bson::Symbol(text) => text.len() as u64 + 5,
        Bson::Document(document) => {
            5 + document.iter().map(|(name, value)| name.len() as u64 + 2 + weight(value)).sum::<u64>()
        }
        Bson::Array(items) => 5 + items.iter().map(|item| 4 + weight(item)).sum::<u64>(),
        Bson::Binary(binary) => binary.bytes.len() as u64 + 5,
        Bson::ObjectId(_) => 12,
        Bson::Boolean(_) => 1,
        Bson::Int32(_) => 4,
        Bson::Decimal128(_) => 16,
        _ => 0,
    }
}

/// Elements added per day, if there are ten or more elements and each contains a time.
fn growth(items: &[Bson]) -> Option<f64> {
    let time = |item: &Bson| match item {
        Bson::ObjectId(id) => Some(id.timestamp().timestamp_millis()),
        Bson::DateTime(time) => Some(time.timestamp_millis()),
        Bson::Document(document) => document.values().find_map(|value| match value {
            Bson::DateTime(time) => Some(time.timestamp_millis()),
            _ => None,
        }),
        _ => None,
    };
    let times: Vec<i64> = items.iter().filter_map(time).collect();
    let (first, last) = (times.iter().min()?, times.iter().max()?);
    let days = to_f64(u64::try_from(last - first).ok()?) / 1000.0 / DAY;
    (times.len() >= 10 && times.len() == items.len() && days >= 1.0 / 24.0)
        .then(|| to_f64(times.len() as u64 - 1) / days)
}

fn to_f64(number: u64) -> f64 {
    super::distribution::ratio(number, 1)
}

#[cfg(test)]
mod tests {
    use bson::{doc, oid::ObjectId};

    use super::*;

    fn shape(documents: &[Document]) -> Shape {
        Shape::of(documents.iter().map(|document| (document, 100)))
    }

    fn field<'a>(shape: &'a Shape, path: &str) -> &'a Field {
        shape.field(&FieldPath::parse(path).unwrap()).unwrap_or_else(|| panic!("no {path}"))
    }

    #[test]
    fn paths_run_through_arrays_and_subdocuments() {
        let shape = shape(&[
            doc! {"_id": 1, "parts": [{"id": 7, "n": 2}, {"id": 9}], "spares": [7, 7], "at": {"x": 1.5}},
            doc! {"_id": 2, "parts": [], "a.b": 1, "$odd": 1, "7": 1},
        ]);
        let paths: Vec<String> = shape.fields.iter().map(|field| field.path.to_string()).collect();
        let expected =
            ["_id", "parts", "parts.$[]", "parts.$[].id", "parts.$[].n", "spares", "spares.$[]", "at", "at.x"];
        assert_eq!(paths, expected);
        assert_eq!(field(&shape, "parts").lengths, [2, 0]);
        assert_eq!(field(&shape, "parts.$[].id").class(), Some(Class::Number));
        assert_eq!(field(&shape, "at.x").class(), None, "a double is no key");
        assert!(field(&shape, "_id").is_unique(2));
        assert!(!field(&shape, "spares.$[]").is_unique(2), "7 is there twice");
        assert!(!field(&shape, "parts.$[].n").is_unique(2), "too few have it");
        assert_eq!(shape.children(None).count(), 4);
    }

    #[test]
    fn text_with_spaces_is_no_key() {
        let shape = shape(&[doc! {"a": "two words", "b": "one", "c": "x".repeat(100)}]);
        assert_eq!(field(&shape, "a").class(), None);
        assert_eq!(field(&shape, "b").class(), Some(Class::Text));
        assert_eq!(field(&shape, "c").class(), None);
    }

    #[test]
    fn growth_is_read_from_ids_and_dates() {
        let id = |second: u32| {
            let mut bytes = [0; 12];
            bytes[..4].copy_from_slice(&second.to_be_bytes());
            ObjectId::from_bytes(bytes)
        };
        // One document per day for a hundred days, and one array element per hour.
        let day = |nth: u32| doc! {"_id": id(1_700_000_000 + nth * 86_400)};
        let documents: Vec<Document> = (0..100).map(day).collect();
        let per_day = shape(&documents).made_per_day(1000).unwrap();
        assert!((9.0..=11.0).contains(&per_day), "{per_day}: of 1000, of which a hundred were drawn, ten a day");
        let log: Vec<Bson> = (0..48_u32).map(|nth| id(1_700_000_000 + nth * 3600).into()).collect();
        let rate = shape(&[doc! {"log": log}]);
        let rate = field(&rate, "log").growth[0];
        assert!((23.9..=24.1).contains(&rate), "{rate}");
        assert_eq!(shape(&documents[..5]).made_per_day(5), None, "five are too few to tell");
    }
}
