//! The writes that rules may make: to the paths that they own, to that of `touch`, and to elements and documents that they remove
//! or create.

use bson::{Bson, Document, doc};

use crate::{
    expected::has_more,
    path::{Part, Path},
    query::matches,
    rule::{OnMissing, Rule},
    value::identical,
};

/// A permitted change at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// The value changes, appears or disappears.
    Any,
    /// A value appears.
    Fill,
    /// A time appears, or replaces null or another time.
    Time,
    /// Elements of the array at the last `$[]` are removed.
    Remove,
}

/// A permitted change at a path below the current place.
#[derive(Debug, Clone, Copy)]
struct Right<'a> {
    path: &'a [Part],
    change: Change,
}

impl Change {
    fn allows(self, before: Option<&Bson>, after: Option<&Bson>) -> bool {
        match self {
            Self::Any => true,
            Self::Fill => before.is_none(),
            Self::Time => {
                matches!(before, None | Some(Bson::Null | Bson::DateTime(_)))
                    && matches!(after, Some(Bson::DateTime(_)))
            }
            Self::Remove => false,
        }
    }
}

/// True if these rules may have turned one version of a document into the other; `before` is None for an insert, `after` for a
/// delete. Fields that no rule owns must keep their order, BSON types and values. Not checked: whether new values are right, whether
/// a removed element had a source, whether an updated target matches `target.where` (`undo` ignores it), and whether the rule ran.
#[must_use]
pub fn may_write(rules: &[Rule], collection: &str, before: Option<&Document>, after: Option<&Document>) -> bool {
    let here = || rules.iter().filter(|rule| rule.target.collection == *collection);
    match (before, after) {
        (Some(before), Some(after)) => changes(here(), before, after),
        (None, Some(after)) => {
            let empty = doc! {"_id": after.get("_id").cloned()};
            here().any(|rule| rule.creates) && changes(here().filter(|rule| rule.creates), &empty, after)
        }
        (Some(before), None) => {
            let owns = |rule: &&Rule| matches(before, &rule.target.filter).expect("a filter that the oracle knows");
            let owned: Vec<Path> = here().filter(owns).flat_map(Rule::owned).collect();
            here().any(|rule| may_delete(rule, before, &owned))
        }
        (None, None) => true,
    }
}

/// True if the rule may have deleted the document. `owned`: the paths that rules own in its collection.
fn may_delete(rule: &Rule, document: &Document, owned: &[Path]) -> bool {
    let is_target = matches(document, &rule.target.filter).expect("a filter that the oracle knows");
    (rule.on_missing == OnMissing::Delete && is_target)
        || (rule.creates && !rule.keeps && !has_more(document, owned, &["_id"]))
}

/// True if these rules may have changed the document.
fn changes<'a>(rules: impl Iterator<Item = &'a Rule>, before: &Document, after: &Document) -> bool {
    let mut paths: Vec<(Path, Change)> = Vec::new();
    for rule in rules {
        let change = if rule.once { Change::Fill } else { Change::Any };
        paths.extend(rule.owned().into_iter().map(|path| (path, change)));
        paths.extend(rule.touch.clone().map(|path| (path, Change::Time)));
        if rule.on_missing == OnMissing::Remove {
            paths.push((Path(rule.target_prefix.clone()), Change::Remove));
        }
    }
    let rights: Vec<Right> = paths.iter().map(|(path, change)| Right { path: &path.0, change: *change }).collect();
    documents(before, after, &rights)
}

/// True if these rights suffice for the change of a document. Fields that are in both versions stay in their order.
fn documents(before: &Document, after: &Document, rights: &[Right]) -> bool {
    let is_owned = |name: &str| below_field(rights, name).iter().any(|right| right.path.is_empty());
    let stays = |name: &&String| before.contains_key(name) && after.contains_key(name) && !is_owned(name);
    before.keys().filter(stays).eq(after.keys().filter(stays))
        && before
            .keys()
            .chain(after.keys().filter(|name| !before.contains_key(name)))
            .all(|name| values(before.get(name), after.get(name), &below_field(rights, name)))
}

/// The same for a value; None where it is missing.
fn values(before: Option<&Bson>, after: Option<&Bson>, rights: &[Right]) -> bool {
    if rights.iter().any(|right| right.path.is_empty() && right.change.allows(before, after)) {
        return true;
    }
    match (before, after) {
        (Some(Bson::Document(before)), Some(Bson::Document(after))) => documents(before, after, rights),
        (Some(Bson::Array(before)), Some(Bson::Array(after))) => arrays(before, after, rights),
        (Some(before), Some(after)) => identical(before, after),
        // A document around an owned path appears only together with a value.
        (None, Some(Bson::Document(after))) => !after.is_empty() && documents(&Document::new(), after, rights),
        _ => false,
    }
}

/// The same for an array.
fn arrays(before: &[Bson], after: &[Bson], rights: &[Right]) -> bool {
    let inside = below(rights, &Part::All);
    let is_same = |before: &Bson, after: &Bson| values(Some(before), Some(after), &inside);
    if inside.iter().any(|right| right.path.is_empty() && right.change == Change::Remove) {
        let mut left = before.iter();
        return after.iter().all(|after| left.any(|before| is_same(before, after)));
    }
    before.len() == after.len() && before.iter().zip(after).all(|(before, after)| is_same(before, after))
}

fn below_field<'a>(rights: &[Right<'a>], name: &str) -> Vec<Right<'a>> {
    below(rights, &Part::Field(name.to_owned()))
}

/// The rights below one part, with the rest of each path.
fn below<'a>(rights: &[Right<'a>], part: &Part) -> Vec<Right<'a>> {
    let rests = rights.iter().filter_map(|right| Some((right.path.split_first()?, right.change)));
    rests.filter(|((first, _), _)| *first == part).map(|((_, path), change)| Right { path, change }).collect()
}

#[cfg(test)]
mod tests {
    use bson::DateTime;

    use super::*;

    fn check(rule: &Document, before: Option<Document>, after: Option<Document>, expected: bool) {
        let rule = Rule::parse(rule, "d").unwrap();
        let allowed = may_write(std::slice::from_ref(&rule), "t", before.as_ref(), after.as_ref());
        assert_eq!(allowed, expected, "{before:?} {after:?}");
    }

    #[test]
    fn a_copy_writes_its_paths_and_its_time() {
        let rule = doc! {"name": "r", "copy": {
            "source": "s", "target": "t", "match": {"l.$[].id": "_id"}, "set": {"l.$[].c.n": "$n"}, "touch": "at",
        }};
        let target = |element: Document, at: Bson| Some(doc! {"_id": 1, "l": [element, 5], "x": 1, "at": at});
        let now = Bson::DateTime(DateTime::from_millis(1));
        let before = target(doc! {"id": 1}, Bson::Null);
        for (element, at, expected) in [
            (doc! {"id": 1, "c": {"n": 2}}, now.clone(), true),
            (doc! {"c": {"n": 2}, "id": 1}, Bson::Null, true),
            (doc! {"id": 1, "c": {"n": 2, "m": 2}}, now.clone(), false),
            (doc! {"id": 1, "c": {}}, now.clone(), false),
            (doc! {"id": 1_i64}, now.clone(), false),
            (doc! {}, now.clone(), false),
            (doc! {"id": 1}, 5.into(), false),
        ] {
            check(&rule, before.clone(), target(element, at), expected);
        }
        let with = target(doc! {"id": 1, "c": {"n": 2}}, now.clone());
        check(&rule, with.clone(), target(doc! {"id": 1, "c": {}}, now.clone()), true);
        check(&rule, with, target(doc! {"id": 1}, now), false);
        check(&rule, before.clone(), Some(doc! {"_id": 1, "x": 1, "l": [{"id": 1}, 5], "at": null}), false);
        check(&rule, before.clone(), Some(doc! {"_id": 1, "l": [{"id": 1}], "x": 1, "at": null}), false);
        check(&rule, before.clone(), None, false);
        check(&rule, None, before, false);
    }

    #[test]
    fn some_rules_fill_remove_delete_and_create() {
        let copy = |target: &str, key: &str, path: &str, more: Document| {
            let mut body = doc! {"source": "s", "target": target, "match": {key: "_id"}, "set": {path: "$n"}};
            body.extend(more);
            doc! {"name": "r", "copy": body}
        };
        let once = copy("t", "r", "c", doc! {"once": true});
        check(&once, Some(doc! {"_id": 1}), Some(doc! {"_id": 1, "c": 1}), true);
        check(&once, Some(doc! {"_id": 1, "c": 1}), Some(doc! {"_id": 1, "c": 2}), false);

        let removes = copy("t", "l.$[].id", "l.$[].c", doc! {"on_missing": "remove"});
        let of = |ids: &[i32]| Some(doc! {"l": ids.iter().map(|id| doc! {"id": *id}).collect::<Vec<_>>()});
        check(&removes, of(&[1, 2, 1, 3]), of(&[1, 1]), true);
        check(&removes, of(&[1, 2]), of(&[2, 1]), false);

        let mut deletes = copy("t", "r", "c", doc! {"on_missing": "delete"});
        check(&deletes, Some(doc! {"_id": 1, "x": 1}), None, true);
        let some = doc! {"collection": "t", "where": {"x": 2}};
        deletes.get_document_mut("copy").unwrap().insert("target", some);
        check(&deletes, Some(doc! {"_id": 1, "x": 1}), None, false);

        let created = doc! {"collection": "t", "create": true};
        let creates = doc! {"name": "r", "aggregate": {
            "source": "s", "target": created, "match": {"_id": "k"}, "set": {"a.n": {"$sum": 1}},
        }};
        for (document, created, deleted) in [
            (doc! {"_id": 1, "a": {"n": 1}}, true, true),
            (doc! {"_id": 1, "a": {}}, false, true),
            (doc! {"_id": 1, "a": {"n": 1}, "x": 1}, false, false),
        ] {
            check(&creates, None, Some(document.clone()), created);
            check(&creates, Some(document), None, deleted);
        }
    }
}
