//! A target as it would be with its owned paths as they should be: `$set`, `$unset` and `$pull` in memory. Pure.

use std::collections::BTreeSet;

use bson::{Bson, Document, RawBson};

use crate::reconcile::compare::{Compared, Difference};
use denormd_model::field_path::{FieldPath, Segment};
use denormd_mongo::error::{Error, Result};
use denormd_rules::plan::Rule;

/// The target with every owned path as it should be; none when it should be gone.
pub fn applied(rule: &Rule, target: Document, compared: &Compared) -> Result<Option<Document>> {
    let mut target = Bson::Document(target);
    let mut removed = BTreeSet::new();
    for Difference { path, element, expected, .. } in compared.differences() {
        let value = match expected {
            Some(RawBson::Undefined) => match element {
                Some(nth) => {
                    removed.insert(*nth);
                    continue;
                }
                None => return Ok(None),
            },
            Some(value) => Some(Bson::try_from(value.as_raw_bson_ref())?),
            None => None,
        };
        let path = FieldPath::parse(path).map_err(|_| Error::internal("a path that is none"))?;
        match (element, &rule.reference.target_each) {
            (Some(nth), Some(each)) => {
                let below = path.below(each).unwrap_or_default();
                elements(each.segments(), &mut target, &mut 0, &mut |at, item| {
                    if at == *nth {
                        put(below, item, value.clone());
                    }
                    true
                });
            }
            _ => put(path.segments(), &mut target, value),
        }
    }
    if let (false, Some(each)) = (removed.is_empty(), &rule.reference.target_each) {
        elements(each.segments(), &mut target, &mut 0, &mut |at, _| !removed.contains(&at));
    }
    match target {
        Bson::Document(target) => Ok(Some(target)),
        _ => Err(Error::internal("a target that is no document")),
    }
}

/// Shows each element that a path ending in `$[]` leads to, with its number, and drops those that are not kept.
fn elements(path: &[Segment], at: &mut Bson, nth: &mut usize, keep: &mut dyn FnMut(usize, &mut Bson) -> bool) {
    match (path.split_first(), at) {
        (Some((Segment::Each, [])), Bson::Array(items)) => items.retain_mut(|item| {
            *nth += 1;
            keep(*nth - 1, item)
        }),
        (Some((Segment::Each, rest)), Bson::Array(items)) => {
            for item in items {
                elements(rest, item, nth, keep);
            }
        }
        (Some((Segment::Name(name), rest)), Bson::Document(doc)) => {
            if let Some(value) = doc.get_mut(name) {
                elements(rest, value, nth, keep);
            }
        }
        _ => {}
    }
}

/// Sets a field, and what is missing above it; or takes it away.
pub fn put(path: &[Segment], at: &mut Bson, value: Option<Bson>) {
    let (Some((Segment::Name(name), rest)), Bson::Document(doc)) = (path.split_first(), at) else { return };
    match (rest.is_empty(), value) {
        (true, Some(value)) => drop(doc.insert(name.clone(), value)),
        (true, None) => drop(doc.remove(name)),
        (false, Some(value)) => {
            let inside = doc.entry(name.clone()).or_insert_with(|| Bson::Document(Document::new()));
            put(rest, inside, Some(value));
        }
        (false, None) => {
            if let Some(inside) = doc.get_mut(name) {
                put(rest, inside, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    #[test]
    fn owned_paths_are_set_in_the_target_and_in_its_elements() {
        let case = |rule: &str,
                    target: Document,
                    path: &str,
                    element: Option<usize>,
                    expected: Option<Bson>|
         -> Option<Document> {
            let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
            let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
            let expected = expected.map(|value| RawBson::try_from(value).unwrap());
            let stored = Some(RawBson::try_from(bson!("other than any")).unwrap());
            let field = Difference { target: bson!(1), path: path.to_owned(), element, expected, stored };
            let compared = Compared { target: bson!(1), fields: vec![field], references: Vec::new() };
            applied(&plan.rules[0], target, &compared).unwrap()
        };
        let scalar = "{ name: r, copy: { source: s, target: t, match: { ref: _id }, set: { a.b: $n } } }";
        assert_eq!(case(scalar, doc! {"x": 1}, "a.b", None, Some(bson!(5))), Some(doc! {"x": 1, "a": {"b": 5}}));
        assert_eq!(case(scalar, doc! {"a": {"b": 1, "c": 2}}, "a.b", None, None), Some(doc! {"a": {"c": 2}}));
        let each = "{ name: r, copy: { source: s, target: t, match: { \"p.$[].q.$[].id\": _id }, set: { \"p.$[].q.$[].n\": $n } } }";
        let target = || doc! {"p": [{"q": [{"id": 1}, {"id": 2}]}, 7, {"q": [{"id": 3}]}]};
        let changed = case(each, target(), "p.$[].q.$[].n", Some(2), Some(bson!("x")));
        assert_eq!(changed, Some(doc! {"p": [{"q": [{"id": 1}, {"id": 2}]}, 7, {"q": [{"id": 3, "n": "x"}]}]}));
        let gone = case(each, target(), "p.$[].q.$[].n", Some(1), Some(Bson::Undefined));
        assert_eq!(gone, Some(doc! {"p": [{"q": [{"id": 1}]}, 7, {"q": [{"id": 3}]}]}));
        assert_eq!(case(scalar, doc! {"x": 1}, "a.b", None, Some(Bson::Undefined)), None);
    }
}
