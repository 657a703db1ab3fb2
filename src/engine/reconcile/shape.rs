//! Finds the part of a target's shape that prevents a write. Pure.

use bson::{Bson, Document};

use denormd_model::field_path::{FieldPath, Segment};

/// The first place on one of `paths` where `target` holds something other than the subdocument in which the path
/// continues: `at` of `at.name` where `at` is a number, null or an array. The server refuses to write below it
/// (`PathNotViable`), and names the place only in a message that quotes the value.
#[must_use]
pub fn in_the_way(paths: &[&FieldPath], target: &Document) -> Option<String> {
    paths.iter().find_map(|path| within(path.segments(), target, String::new()))
}

fn within(path: &[Segment], document: &Document, mut at: String) -> Option<String> {
    let [Segment::Name(name), rest @ ..] = path else { return None };
    if !at.is_empty() {
        at.push('.');
    }
    at.push_str(name);
    // A missing field is created, and the value at the end of the path is replaced.
    let (value, [next, below @ ..]) = (document.get(name)?, rest) else { return None };
    match (next, value) {
        (Segment::Name(_), Bson::Document(inside)) => within(rest, inside, at),
        (Segment::Name(_), _) => Some(at),
        // A value that is not an array holds no reference, nor does an element that is not a document: neither is
        // written to.
        (Segment::Each, Bson::Array(elements)) => {
            at.push_str(".$[]");
            elements.iter().filter_map(Bson::as_document).find_map(|element| within(below, element, at.clone()))
        }
        (Segment::Each, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn the_place_where_a_subdocument_should_be_is_named() {
        let nested = doc! {"a": [{"b": []}, 5, {"b": [{"c": {"d": 1}}, {"c": 7}]}]};
        for (path, target, expected) in [
            ("at.name", doc! {}, None),
            ("at.name", doc! {"at": {}}, None),
            ("at.name", doc! {"at": {"name": {"x": 1}}}, None),
            ("at", doc! {"at": 5}, None),
            ("at.name", doc! {"at": 5}, Some("at")),
            ("at.name", doc! {"at": null}, Some("at")),
            ("at.name", doc! {"at": "text"}, Some("at")),
            ("at.name", doc! {"at": [{"name": 1}]}, Some("at")),
            ("at.x.name", doc! {"at": {"x": false}}, Some("at.x")),
            ("items.$[].name", doc! {"items": 5}, None),
            ("items.$[].name", doc! {"items": [5, null, {"name": 1}]}, None),
            ("items.$[].in.name", doc! {"items": [{"in": {}}, {"in": 5}]}, Some("items.$[].in")),
            ("a.$[].b.$[].c.d", nested.clone(), Some("a.$[].b.$[].c")),
            ("a.$[].b.$[].c", nested, None),
        ] {
            let path = FieldPath::parse(path).unwrap();
            assert_eq!(in_the_way(&[&path], &target).as_deref(), expected, "{path} in {target}");
        }
    }
}
