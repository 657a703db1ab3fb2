//! Advice on a single collection: the size of its documents, its arrays, its indexes.

use crate::{
    advice::{Advice, Kind, bytes, count, distribution, figure},
    inventory::Collection,
};
use denormd_model::{
    distribution::{Distribution, ratio},
    field_path::FieldPath,
    text::duration,
};
use denormd_rules::config::Advise;

/// The server's maximum size of a document, in bytes.
const LIMIT: u64 = 16 << 20;
/// Observation time, in seconds, after which an index without uses counts as unused.
const LONG: f64 = 7.0 * 86_400.0;

/// An array of one collection.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// The path of the array.
    pub path: FieldPath,
    /// The distribution of its lengths.
    pub lengths: Distribution,
    /// True if its elements are subdocuments.
    pub subdocuments: bool,
    /// True if it holds references. The advice on the relationship then covers it.
    pub refers: bool,
    /// True if each of its elements has an `_id`.
    pub has_id: bool,
    /// Average size of an element, in bytes.
    pub element: u64,
    /// Elements added per day to the fastest-growing array.
    pub growth: Option<f64>,
    /// The number of elements that the application requests with `$slice`.
    pub shown: Option<u64>,
}

/// An index and its use on all members.
#[derive(Debug, Clone, PartialEq)]
pub struct Usage {
    /// The name of the index.
    pub name: String,
    /// True if it enforces uniqueness or expires documents, and so is useful without being read.
    pub works: bool,
    /// Uses since counting began, and the seconds since then; None if that is not known.
    pub used: Option<(u64, f64)>,
}

/// Gives the advice on a collection.
#[must_use]
pub fn decide(collection: &Collection, arrays: &[Array], usage: &[Usage], thresholds: &Advise) -> Vec<Advice> {
    let mut advice: Vec<Advice> = Vec::new();
    advice.extend(size(collection, arrays, thresholds));
    advice.extend(arrays.iter().filter_map(|array| of_array(collection, array, thresholds)));
    advice.extend(indexes(collection, usage, thresholds));
    advice
}

/// Warns of large documents, and estimates when the largest reaches the limit.
fn size(collection: &Collection, arrays: &[Array], thresholds: &Advise) -> Option<Advice> {
    let name = &collection.namespace.collection;
    let size = collection.size?;
    let fastest = arrays
        .iter()
        .filter_map(|array| Some((array.growth? * ratio(array.element, 1), &array.path)))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let left = ratio(LIMIT.saturating_sub(size.max), 1);
    let days =
        fastest.map(|(rate, path)| (left / rate.max(f64::MIN_POSITIVE), path)).filter(|(days, _)| *days < 3650.0);
    let until = days
        .map(|(days, path)| format!("; at the rate of `{path}` the largest reaches 16 MB in {} days", figure(days)));
    let verdict = if size.max >= thresholds.document_bad {
        format!("bad from {}", bytes(thresholds.document_bad))
    } else if size.max >= thresholds.document_warn {
        format!("warned about from {}", bytes(thresholds.document_warn))
    } else if days.is_some_and(|(days, _)| days < 365.0) {
        "small still".to_owned()
    } else {
        return None;
    };
    let says = format!(
        "documents of `{name}`: median {}, 99th percentile {}, largest seen {} ({}), {verdict}{}",
        bytes(size.median),
        bytes(size.p99),
        bytes(size.max),
        crate::advice::how(&size),
        until.unwrap_or_default()
    );
    Some(Advice::new(Kind::DocumentSize, 3, says))
}

fn of_array(collection: &Collection, array: &Array, thresholds: &Advise) -> Option<Advice> {
    if array.refers {
        return None;
    }
    let name = &collection.namespace.collection;
    let figures =
        format!("`{name}`.{} has {} of {} each", array.path, distribution(&array.lengths), bytes(array.element));
    let a_year =
        array.growth.map(|growth| growth * 365.0).filter(|a_year| *a_year >= ratio(thresholds.embed_elements, 1));
    if array.lengths.p99 < thresholds.embed_elements && a_year.is_none() {
        return array.subdocuments.then(|| {
            let below = format!("below {}", count(thresholds.embed_elements));
            Advice::new(Kind::KeepEmbedded, 1, format!("`{}` is where it belongs: {figures}, {below}", array.path))
        });
    }
    let grows = a_year.map(|a_year| format!("; it gets {} more a year", figure(a_year))).unwrap_or_default();
    let kept = match array.shown {
        Some(shown) => format!("; keep the {} that the application asks for, by `collect` with `slice`", count(shown)),
        None => format!("; keep the first {}, by `collect` with `slice`", thresholds.subset),
    };
    let says = format!(
        "move `{}` out into a collection of its own: {figures}, from {} on it is too long{grows}{kept}",
        array.path,
        count(thresholds.embed_elements)
    );
    Some(Advice::new(Kind::MoveOut, 3, says).command(moved(collection, array)))
}

/// The pipeline that turns each element into a document.
fn moved(collection: &Collection, array: &Array) -> String {
    let namespace = &collection.namespace;
    let path = array.path.query();
    let (parent, last) = (format!("{}_id", namespace.collection), path.replace('.', "_"));
    let id = if array.has_id && array.subdocuments {
        String::new()
    } else {
        "_id: { parent: \"$_id\", n: \"$n\" }, ".to_owned()
    };
    let from = format!("${path}");
    let element = if array.subdocuments { format!("{from:?}, ") } else { format!("{{ value: {from:?} }}, ") };
    format!(
        "db.getSiblingDB({:?}).getCollection({:?}).aggregate([\n  \
         {{ $unwind: {{ path: {from:?}, includeArrayIndex: \"n\" }} }},\n  \
         {{ $replaceWith: {{ $mergeObjects: [{element}{{ {id}{parent:?}: \"$_id\" }}] }} }},\n  \
         {{ $merge: {{ into: {:?}, whenMatched: \"replace\" }} }}\n])",
        namespace.database,
        namespace.collection,
        format!("{}_{last}", namespace.collection)
    )
}

fn indexes(collection: &Collection, usage: &[Usage], thresholds: &Advise) -> Vec<Advice> {
    let namespace = &collection.namespace;
    let mut advice = Vec::new();
    if usage.len() as u64 > thresholds.indexes {
        let says = format!(
            "`{}` has {} indexes, more than {}: every write of a document writes to them all",
            namespace.collection,
            usage.len(),
            thresholds.indexes
        );
        advice.push(Advice::new(Kind::IndexesMany, None, says));
    }
    for index in usage.iter().filter(|index| !index.works) {
        let Some((0, seconds)) = index.used else { continue };
        let short = if seconds < LONG { ", which is too short to drop it" } else { "" };
        let says = format!(
            "no member has used the index {:?} of `{}` in {}{short}",
            index.name,
            namespace.collection,
            duration(seconds)
        );
        let unused = Advice::new(Kind::IndexUnused, None, says);
        advice.push(if seconds < LONG {
            unused
        } else {
            // Hiding comes first because it can be undone at once.
            unused.command(format!(
                "db.getSiblingDB({:?}).getCollection({:?}).hideIndex({:?})   // and dropIndex once nothing misses it",
                namespace.database, namespace.collection, index.name
            ))
        });
    }
    advice
}

/// The arrays of a collection that may need advice, from its sample.
#[must_use]
pub fn arrays(collection: &Collection, refers: impl Fn(&FieldPath) -> bool) -> Vec<Array> {
    let mut arrays = Vec::new();
    for field in collection.shape.fields.iter().filter(|field| !field.lengths.is_empty()) {
        let Ok(each) = FieldPath::parse(&format!("{}.$[]", field.path)) else { continue };
        let element = collection.shape.field(&each);
        let how = collection.how;
        let Some(lengths) = Distribution::of_list(field.lengths.iter().copied(), how) else { continue };
        let below = |name: &str| FieldPath::parse(&format!("{each}.{name}")).ok();
        arrays.push(Array {
            path: field.path.clone(),
            lengths,
            subdocuments: element.is_some_and(|element| element.has_type("object")),
            refers: refers(&field.path),
            has_id: below("_id").is_some_and(|id| {
                collection.shape.field(&id).is_some_and(|id| id.values.values().all(|times| *times == 1))
            }),
            element: element.map_or(0, denormd_model::shape::Field::average_bytes),
            growth: field.growth.iter().copied().max_by(f64::total_cmp),
            shown: None,
        });
    }
    arrays
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::*;
    use denormd_model::{distribution::How, namespace::Namespace, shape::Shape};

    fn collection(documents: &[Document]) -> Collection {
        let shape = Shape::of(
            documents
                .iter()
                .map(|document| (document, bson::RawDocumentBuf::try_from(document).unwrap().as_bytes().len() as u64)),
        );
        Collection {
            namespace: Namespace { database: "blog".to_owned(), collection: "posts".to_owned() },
            capped: false,
            count: shape.documents,
            bytes: 0,
            index_bytes: 0,
            indexes: Vec::new(),
            size: shape.size(How::Exact),
            shape,
            how: How::Exact,
        }
    }

    fn kinds(documents: &[Document]) -> Vec<Kind> {
        let collection = collection(documents);
        let arrays = arrays(&collection, |_| false);
        decide(&collection, &arrays, &[], &Advise::default()).iter().map(|advice| advice.kind).collect()
    }

    #[test]
    fn arrays_that_stay_and_that_go() {
        let comments = |count: i32| doc! {"comments": (0..count).map(|n| doc! {"n": n}).collect::<Vec<_>>()};
        assert_eq!(kinds(&[comments(249)]), [Kind::KeepEmbedded]);
        assert_eq!(kinds(&[comments(250)]), [Kind::MoveOut]);
        assert_eq!(kinds(&[doc! {"tags": ["a", "b"]}]), [], "a few tags are nobody's problem");
        let text = "x".repeat(1 << 20);
        assert_eq!(kinds(&[doc! {"text": &text}]), [Kind::DocumentSize]);
    }

    #[test]
    fn days_until_a_document_is_too_large() {
        // One element of about a megabyte per day.
        let start = 1_700_000_000_000_i64;
        let entries: Vec<Document> = (0..10)
            .map(|day| doc! {"at": bson::DateTime::from_millis(start + day * 86_400_000), "text": "x".repeat(1 << 20)})
            .collect();
        let collection = collection(&[doc! {"log": entries}]);
        let arrays = arrays(&collection, |_| false);
        let advice = decide(&collection, &arrays, &[], &Advise::default());
        let size = advice.iter().find(|advice| advice.kind == Kind::DocumentSize).unwrap();
        assert!(size.says.contains("reaches 16 MB in 6 days"), "{}", size.says);
        assert!(size.says.contains("bad from 10.0 MB"), "{}", size.says);
        assert!(advice.iter().any(|advice| advice.kind == Kind::MoveOut), "it gets 365 more a year");
    }

    #[test]
    fn indexes_that_nobody_uses() {
        let usage = |name: &str, works, used| Usage { name: name.to_owned(), works, used };
        let (day, month) = (86_400.0, 30.0 * 86_400.0);
        let usages = [
            usage("_id_", true, Some((0, month))),
            usage("a_1", false, Some((0, month))),
            usage("b_1", false, Some((3, month))),
            usage("c_1", false, Some((0, day))),
            usage("d_1", false, None),
        ];
        let advice = decide(&collection(&[doc! {"a": 1}]), &[], &usages, &Advise::default());
        assert_eq!(advice.len(), 2);
        assert!(advice[0].says.contains("\"a_1\"") && advice[0].command.is_some(), "{}", advice[0].says);
        assert!(advice[1].says.contains("too short") && advice[1].command.is_none(), "{}", advice[1].says);
        let many: Vec<Usage> = (0..11).map(|n| usage(&format!("i{n}"), false, Some((1, month)))).collect();
        let advice = decide(&collection(&[doc! {"a": 1}]), &[], &many, &Advise::default());
        assert_eq!(advice.iter().map(|advice| advice.kind).collect::<Vec<_>>(), [Kind::IndexesMany]);
    }
}
