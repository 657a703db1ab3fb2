//! A target as it would be with its owned paths as they should be. Pure.

use bson::{Bson, Document};

use crate::{
    error::Result,
    field_path::Segment,
    plan::Rule,
    reconcile::compare::{Compared, Difference},
};

/// Sets (or unsets) what differs. What `on_missing` takes away stays: an approximation for sizes and validators.
pub(super) fn apply(rule: &Rule, target: &mut Document, compared: &Compared) -> Result<()> {
    for difference in compared.differences() {
        let expected = match &difference.expected {
            Some(bson::RawBson::Undefined) => continue,
            Some(value) => Some(Bson::try_from(value.as_raw_bson_ref())?),
            None => None,
        };
        one(rule, target, difference, expected);
    }
    Ok(())
}

fn one(rule: &Rule, target: &mut Document, difference: &Difference, value: Option<Bson>) {
    let owned = rule.owned();
    let Some(path) = owned.into_iter().find(|path| path.to_string() == difference.path) else { return };
    match (&rule.reference.target_each, difference.element) {
        (Some(each), Some(nth)) => {
            let mut seen = 0;
            let mut change = |mut element: Bson| {
                if seen == nth
                    && let (Bson::Document(inner), Some(below)) = (&mut element, path.below(each))
                {
                    set(inner, below, value.clone());
                }
                seen += 1;
                element
            };
            let whole = Bson::Document(std::mem::take(target));
            if let Bson::Document(changed) = elements_of(each.segments(), whole, &mut change) {
                *target = changed;
            }
        }
        _ => set(target, path.segments(), value),
    }
}

/// Passes each element that a path ending in `$[]` leads to through `change`, in their order.
fn elements_of(path: &[Segment], at: Bson, change: &mut dyn FnMut(Bson) -> Bson) -> Bson {
    match (path.split_first(), at) {
        (None, value) => change(value),
        (Some((Segment::Each, rest)), Bson::Array(items)) => {
            items.into_iter().map(|item| elements_of(rest, item, change)).collect::<Vec<_>>().into()
        }
        (Some((Segment::Name(name), rest)), Bson::Document(mut doc)) => {
            if let Some(value) = doc.get_mut(name) {
                let taken = std::mem::replace(value, Bson::Null);
                *value = elements_of(rest, taken, change);
            }
            Bson::Document(doc)
        }
        (_, other) => other,
    }
}

/// Sets a path that does not look into arrays, as `$set` does; None unsets it.
fn set(doc: &mut Document, path: &[Segment], value: Option<Bson>) {
    let Some((Segment::Name(name), rest)) = path.split_first() else { return };
    if rest.is_empty() {
        match value {
            Some(value) => {
                doc.insert(name, value);
            }
            None => {
                doc.remove(name);
            }
        }
        return;
    }
    if value.is_some() && !doc.contains_key(name) {
        doc.insert(name, Document::new());
    }
    if let Ok(inner) = doc.get_document_mut(name) {
        set(inner, rest, value);
    }
}

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;
    use crate::{
        config::{Format, load_str},
        plan::compile,
    };

    #[test]
    fn owned_paths_are_set_in_the_target_and_in_its_elements() {
        let case = |rule: &str, mut target: Document, path: &str, element: Option<usize>, expected: Option<Bson>| {
            let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {rule}\n");
            let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
            let expected = expected.map(|value| bson::RawBson::try_from(value).unwrap());
            let stored = Some(bson::RawBson::try_from(bson!("other than any")).unwrap());
            let field = Difference { target: bson!(1), path: path.to_owned(), element, expected, stored };
            let compared = Compared { target: bson!(1), fields: vec![field], references: Vec::new() };
            apply(&plan.rules[0], &mut target, &compared).unwrap();
            target
        };
        let scalar = "{ name: r, copy: { source: s, target: t, match: { ref: _id }, set: { a.b: $n } } }";
        assert_eq!(case(scalar, doc! {"x": 1}, "a.b", None, Some(bson!(5))), doc! {"x": 1, "a": {"b": 5}});
        assert_eq!(case(scalar, doc! {"a": {"b": 1, "c": 2}}, "a.b", None, None), doc! {"a": {"c": 2}});
        let each = "{ name: r, copy: { source: s, target: t, match: { \"p.$[].q.$[].id\": _id }, set: { \"p.$[].q.$[].n\": $n } } }";
        let target = || doc! {"p": [{"q": [{"id": 1}, {"id": 2}]}, 7, {"q": [{"id": 3}]}]};
        let changed = case(each, target(), "p.$[].q.$[].n", Some(2), Some(bson!("x")));
        assert_eq!(changed, doc! {"p": [{"q": [{"id": 1}, {"id": 2}]}, 7, {"q": [{"id": 3, "n": "x"}]}]});
    }
}
