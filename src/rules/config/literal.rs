//! Values of a config as BSON: expressions, filters, elements.
//!
//! Extended JSON and the aggregation language share the `$`: `{ $date: "2024-01-01T00:00:00Z" }` is a literal,
//! `{ $dateToString: … }`, `{ $cond: … }` and `{ $regex: …, $options: … }` are not. So only a document that is exactly of a
//! literal's form becomes one; everything else stays a document, its keys in order.

use bson::{Bson, DateTime, Document};
use serde_json::Value as Json;

use super::tree::{Node, Value};

/// The forms of Extended JSON (v2, canonical) that are told by one key. `$regex` with `$options` is the query operator,
/// never the old literal.
pub(crate) const WRAPPERS: [&str; 14] = [
    "$oid",
    "$date",
    "$numberInt",
    "$numberLong",
    "$numberDouble",
    "$numberDecimal",
    "$binary",
    "$uuid",
    "$regularExpression",
    "$timestamp",
    "$minKey",
    "$maxKey",
    "$symbol",
    "$undefined",
];

/// The BSON value of `node`, integers int32 where they fit.
pub(super) fn to_bson(node: &Node) -> Bson {
    match &node.value {
        Value::Null => Bson::Null,
        Value::Bool(flag) => Bson::Boolean(*flag),
        Value::Int(number) => i32::try_from(*number).map_or(Bson::Int64(*number), Bson::Int32),
        Value::Float(number) => Bson::Double(*number),
        Value::String(text) => Bson::String(text.clone()),
        Value::Date(text) => {
            DateTime::parse_rfc3339_str(text).map_or_else(|_| Bson::String(text.clone()), Bson::DateTime)
        }
        Value::Sequence(items) => Bson::Array(items.iter().map(to_bson).collect()),
        Value::Mapping(_) => literal(node).unwrap_or_else(|| Bson::Document(to_document(node))),
    }
}

/// The document of a mapping, whose own keys are never taken for a literal.
pub(super) fn to_document(node: &Node) -> Document {
    match &node.value {
        Value::Mapping(entries) => entries.iter().map(|entry| (entry.key.clone(), to_bson(&entry.node))).collect(),
        _ => Document::new(),
    }
}

/// The key of a malformed literal, such as `$date` with a value that is no date.
pub(super) fn malformed(node: &Node) -> Option<&str> {
    let Value::Mapping(entries) = &node.value else { return None };
    let key = entries.iter().map(|entry| entry.key.as_str()).find(|key| WRAPPERS.contains(key))?;
    literal(node).is_none().then_some(key)
}

fn literal(node: &Node) -> Option<Bson> {
    let Value::Mapping(entries) = &node.value else { return None };
    let [entry] = entries.as_slice() else { return None };
    if !WRAPPERS.contains(&entry.key.as_str()) {
        return None;
    }
    match Bson::try_from(to_json(node)?) {
        Ok(Bson::Document(_)) | Err(_) => None,
        Ok(literal) => Some(literal),
    }
}

/// The small part of JSON that literals are written in.
fn to_json(node: &Node) -> Option<Json> {
    match &node.value {
        Value::String(text) => Some(Json::from(text.clone())),
        Value::Int(number) => Some(Json::from(*number)),
        Value::Bool(flag) => Some(Json::from(*flag)),
        Value::Mapping(entries) => {
            let members = entries.iter().map(|entry| Some((entry.key.clone(), to_json(&entry.node)?)));
            Some(Json::Object(members.collect::<Option<_>>()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, oid::ObjectId};

    use super::*;
    use crate::config::format::Format;

    fn read(json: &str) -> Bson {
        let (tree, faults) = Format::Json.parse(json);
        assert_eq!(faults, vec![], "{json}");
        to_bson(&tree.unwrap())
    }

    #[test]
    fn well_formed_extended_json_is_a_literal() {
        let date = DateTime::from_millis(1_704_067_200_000);
        let oid = ObjectId::parse_str("5f5c0d1e2a3b4c5d6e7f8091").unwrap();
        let cases = [
            (r#"{"$oid": "5f5c0d1e2a3b4c5d6e7f8091"}"#, Bson::ObjectId(oid)),
            (r#"{"$date": "2024-01-01T00:00:00Z"}"#, Bson::DateTime(date)),
            (r#"{"$date": {"$numberLong": "1704067200000"}}"#, Bson::DateTime(date)),
            (r#"{"$numberLong": "1"}"#, Bson::Int64(1)),
            (r#"{"$numberInt": "1"}"#, Bson::Int32(1)),
            (r#"{"$numberDouble": "1.0"}"#, Bson::Double(1.0)),
            (r#"{"$numberDecimal": "1.10"}"#, Bson::Decimal128("1.10".parse().unwrap())),
            (r#"{"$minKey": 1}"#, Bson::MinKey),
            (r#"{"$maxKey": 1}"#, Bson::MaxKey),
            (r#"{"$timestamp": {"t": 1, "i": 2}}"#, Bson::Timestamp(bson::Timestamp { time: 1, increment: 2 })),
            ("1", Bson::Int32(1)),
            ("2147483648", Bson::Int64(2_147_483_648)),
            ("1.0", Bson::Double(1.0)),
            ("null", Bson::Null),
        ];
        for (json, expected) in cases {
            assert_eq!(read(json), expected, "{json}");
        }
    }

    #[test]
    fn anything_else_stays_a_document_with_its_keys_in_order() {
        for json in [
            r#"{"$cond":{"if":{"$gte":["$qty",250]},"then":30,"else":20}}"#,
            r#"{"$dateToString":{"format":"%Y","date":"$at"}}"#,
            r#"{"name":{"$regex":"^a","$options":"i"}}"#,
            r#"{"name":{"$options":"i","$regex":"^a"}}"#,
            r#"{"$literal":{"z":1,"a":2}}"#,
            r#"{"$date":"$field"}"#,
            r#"{"$date":"$$x"}"#,
            r#"{"$oid":"$x"}"#,
            r#"{"$oid":"5f5c0d1e2a3b4c5d6e7f8091","other":1}"#,
            r#"{"$timestamp":{"t":"$a","i":1}}"#,
            r#"{"$minKey":2}"#,
            r#"{"$uuid":"$x"}"#,
            r#"{"$binary":"$x"}"#,
            r#"{"$ref":"publisher","$id":1,"$db":"shop"}"#,
            r#"{"$numberLong":1}"#,
        ] {
            let Bson::Document(document) = read(json) else { panic!("{json} is no document") };
            assert_eq!(serde_json::to_string(&document).unwrap(), json);
        }
    }

    #[test]
    fn literals_are_found_at_any_depth() {
        let read = read(r#"{"$gte": ["$at", {"$date": "1970-01-01T00:00:00Z"}]}"#);
        assert_eq!(read, bson!({ "$gte": ["$at", DateTime::from_millis(0)] }));
    }
}
