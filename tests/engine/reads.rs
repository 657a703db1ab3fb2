//! The documents that a read examines: only the sources of its keys, however large the collection is; and only an order
//! that does not affect the result is left out.

use std::collections::BTreeMap;

use bson::{Bson, Document, bson, doc};
use denormd_engine::reconcile::read;
use denormd_model::key::Key;
use mongodb::{Database, IndexModel};
use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedRandom, SliceRandom},
};

use crate::support::daemon::rule;

/// Rules that need their sources in an order.
const RULES: [&str; 5] = [
    "aggregate: { source: s, target: t, match: { _id: part }, set: { mean: { $avg: $rating } } }",
    "aggregate: { source: s, target: t, match: { _id: part }, set: { mean: { $avg: $rating } }, sort: { at: -1 } }",
    "collect: { source: s, target: t, match: { _id: part }, into: all, element: { rating: $rating } }",
    "collect: { source: s, target: t, match: { _id: part }, into: all, element: { rating: $rating }, sort: { at: -1 } }",
    "copy: { source: s, target: t, match: { _id: part }, sort: { at: -1 }, set: { rating: $rating } }",
];
const PARTS: i32 = 5000;
const EACH: i32 = 4;
/// With this number of keys the server once preferred an index that provided the order, and scanned the whole
/// collection.
const KEYS: i32 = 1000;

/// The rows by key; a row that was found through an array element belongs to no key.
async fn rows(database: &Database, command: &Document) -> Vec<(i32, Document)> {
    let mut reply = database.run_command(command.clone()).await.unwrap();
    let rows = std::mem::take(reply.get_document_mut("cursor").unwrap().get_array_mut("firstBatch").unwrap());
    let rows = rows.into_iter().map(|row| row.as_document().unwrap().clone());
    rows.filter_map(|row| Some((row.get_array("k").unwrap()[0].as_i32()?, row))).collect()
}

/// The number of examined documents in an `explain`. A stage may repeat the numbers of its parts.
fn examined(plan: &Bson) -> i64 {
    match plan {
        Bson::Document(doc) => match doc.get("totalDocsExamined") {
            Some(Bson::Int32(n)) => i64::from(*n),
            Some(Bson::Int64(n)) => *n,
            _ => doc.values().map(examined).sum(),
        },
        Bson::Array(items) => items.iter().map(examined).sum(),
        _ => 0,
    }
}

/// The plans that the server has chosen, in the text of an `explain`.
fn chosen(plan: &Bson) -> String {
    match plan {
        Bson::Document(doc) => doc
            .iter()
            .map(|(name, inner)| if name == "winningPlan" { inner.to_string() } else { chosen(inner) })
            .collect(),
        Bson::Array(items) => items.iter().map(chosen).collect(),
        _ => String::new(),
    }
}

#[tokio::test]
async fn a_read_of_many_keys_looks_at_their_sources_alone() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    let source = |id: i32| doc! {"_id": id, "part": id % PARTS, "rating": 0.1 * f64::from(id % 7), "at": id % 11};
    sources.insert_many((0..PARTS * EACH).map(source)).await.unwrap();
    // The server cannot sort by two arrays; such a source belongs to no key.
    sources.insert_one(doc! {"_id": "arrays", "part": [1, 2], "rating": 5, "at": [1, 2]}).await.unwrap();
    for keys in [doc! {"part": 1}, doc! {"at": 1}] {
        sources.create_index(IndexModel::builder().keys(keys).build()).await.unwrap();
    }
    let keys: Vec<Key> = (0..KEYS).map(|part| Key::one(Bson::Int32(part))).collect();
    let keys: Vec<&Key> = keys.iter().collect();
    for text in RULES {
        let rule = rule(text);
        let command = read::sources(&rule, &keys);
        let found = rows(&database, &command).await.len();
        assert!(found == KEYS as usize || found == (KEYS * EACH) as usize, "{text}: {found}");
        let plan = database.run_command(doc! {"explain": command, "verbosity": "executionStats"}).await.unwrap();
        let examined = examined(&plan.into());
        assert!(examined <= i64::from(KEYS * EACH) + 1, "{text}: {examined} looked at");
    }
}

/// Rules whose sums and means are read in any order.
const SUMS: [&str; 4] = [
    "aggregate: { source: s, target: t, match: { _id: part }, set: { sum: { $sum: $n }, all: { $sum: 1 } } }",
    "aggregate: { source: s, target: t, match: { _id: part }, set: { mean: { $avg: $n }, all: { $count: {} } }, sort: { at: -1 } }",
    "aggregate: { source: s, target: t, match: { _id: part }, set: { half: { $avg: { $cond: [true, $n, 0.5] } }, sum: { $sum: $m } } }",
    "aggregate: { source: s, target: t, match: { _id: \"parts.$[]\" }, set: { sum: { $sum: $n }, mean: { $avg: $m } } }",
];

/// Numbers of one kind, or of all kinds.
fn numbers(random: &mut StdRng) -> Vec<Bson> {
    // Prices: the least and the largest are often whole, those between them are not.
    if random.random_bool(0.1) {
        return vec![0.into(), 100.into(), 8.76.into(), 15.98.into(), 41.62.into(), 70.63.into()];
    }
    let whole = vec![Bson::Int32(3), Bson::Int32(-1), Bson::Int32(i32::MAX), Bson::Int64(5), Bson::Int64(-(1 << 40))];
    let others = vec![Bson::Null, "x".into(), Bson::Boolean(true), bson::DateTime::from_millis(5).into()];
    let doubles = [1e100, -1e100, 0.1, 1.0, -0.0].map(Bson::Double);
    let decimals = ["1", "0.10", "1E+40", "-1E+40"].map(|text| Bson::Decimal128(text.parse().unwrap()));
    let mut pool = whole;
    if random.random_bool(0.5) {
        pool.extend(others);
    }
    if random.random_bool(0.3) {
        pool.extend(doubles);
    }
    if random.random_bool(0.2) {
        pool.extend(decimals);
    }
    // More than a double can hold, and more than 64 bits when some of them are added.
    if random.random_bool(0.3) {
        pool.extend([(1 << 53) + 1, 1 << 60, -(1 << 60)].map(Bson::Int64));
    }
    if random.random_bool(0.2) {
        pool.extend([i64::MAX, i64::MIN].map(Bson::Int64));
    }
    pool
}

#[tokio::test]
async fn sums_in_any_order_are_the_same_where_they_say_so() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    sources.create_index(IndexModel::builder().keys(doc! {"part": 1}).build()).await.unwrap();
    let keys: Vec<Key> = (0..10).map(|part| Key::one(Bson::Int32(part))).collect();
    let keys: Vec<&Key> = keys.iter().collect();
    let mut random = StdRng::seed_from_u64(2028);
    let rules = SUMS.map(rule);
    let (mut whole, mut other) = (0, 0);
    for _ in 0..200 {
        // The server finds them in the order of their insertion.
        let mut ids: Vec<i32> = (0..80).collect();
        ids.shuffle(&mut random);
        let pools: Vec<Vec<Bson>> = (0..10).map(|_| numbers(&mut random)).collect();
        let mut source = |id: i32| {
            let part = random.random_range(0..10_usize);
            let [n, m] = [(), ()].map(|()| pools[part].choose(&mut random).unwrap().clone());
            let part = i32::try_from(part).unwrap();
            doc! {"_id": id, "part": part, "parts": [part, random.random_range(0..10)], "at": id % 7, "n": n, "m": m}
        };
        let documents: Vec<Document> = ids.into_iter().map(&mut source).collect();
        sources.delete_many(doc! {}).await.unwrap();
        sources.insert_many(&documents).await.unwrap();
        for rule in &rules {
            let exact: BTreeMap<i32, Document> =
                rows(&database, &read::sources(rule, &keys)).await.into_iter().collect();
            let found = rows(&database, &read::sources_by_shortcut(rule, &keys).unwrap()).await;
            assert_eq!(found.len(), exact.len());
            for (key, mut row) in found {
                let Bson::Boolean(says) = row.remove("w").unwrap() else { panic!("{row}") };
                if says {
                    assert_eq!(row, exact[&key], "{:?}", rule.values);
                    whole += 1;
                } else {
                    other += 1;
                }
            }
        }
    }
    assert!(whole > 500 && other > 500, "{whole} of whole numbers, {other} of others");
}

/// The last N are read as the first N of the opposite order, in which an array counts with another of its elements.
#[tokio::test]
async fn the_last_in_the_opposite_order_are_the_same_where_they_say_so() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    sources.create_index(IndexModel::builder().keys(doc! {"part": 1}).build()).await.unwrap();
    let keys: Vec<Key> = (0..4).map(|part| Key::one(Bson::Int32(part))).collect();
    let keys: Vec<&Key> = keys.iter().collect();
    let rules = ["{ a: 1 }", "{ a: -1 }", "{ a.b: 1 }", "{ a.b: -1, n: 1 }", "{ n: 1, a.b: -1 }"].map(|sort| {
        rule(&format!(
            "collect: {{ source: s, target: t, match: {{ _id: part }}, into: all, element: $_id, sort: {sort}, slice: -3 }}"
        ))
    });
    let mut random = StdRng::seed_from_u64(2035);
    let plain = [Bson::Null, 1.into(), 2.into(), 5.into(), bson!({"b": 1}), bson!({"b": 3}), bson!({"b": null})];
    let arrays = [
        bson!([]),
        bson!([0, 9]),
        bson!([2]),
        bson!([[1]]),
        bson!({"b": [0, 9]}),
        bson!({"b": []}),
        bson!([{"b": 0}, {"b": 9}]),
        bson!([{"b": 2}, 1]),
    ];
    let (mut right, mut other) = (0, 0);
    for _ in 0..100 {
        let has_arrays = random.random_bool(0.7);
        let mut source = |id: i32| {
            let pool = if has_arrays && random.random_bool(0.2) { &arrays[..] } else { &plain[..] };
            doc! {"_id": id, "part": id % 4, "n": random.random_range(0..2), "a": pool.choose(&mut random).unwrap()}
        };
        let documents: Vec<Document> = (0..24).map(&mut source).collect();
        sources.delete_many(doc! {}).await.unwrap();
        sources.insert_many(&documents).await.unwrap();
        for rule in &rules {
            let ids = |row: &Document| -> Vec<Bson> {
                let elements = row.get_document("v").unwrap().get_array("e").unwrap().iter();
                elements.map(|element| element.as_document().unwrap().get("e").unwrap().clone()).collect()
            };
            let exact: BTreeMap<i32, Document> =
                rows(&database, &read::sources(rule, &keys)).await.into_iter().collect();
            let found = rows(&database, &read::sources_by_shortcut(rule, &keys).unwrap()).await;
            assert_eq!(found.len(), exact.len());
            for (key, row) in found {
                if row.get_bool("w").unwrap() {
                    assert_eq!(ids(&row), ids(&exact[&key]), "{:?} of {documents:?}", rule.sort);
                    right += 1;
                } else {
                    other += 1;
                }
            }
        }
    }
    assert!(right > 200 && other > 200, "{right} are right, {other} may be wrong");
}

/// Of equal values `$min` and `$max` keep the one that comes first, whatever its type.
#[tokio::test]
async fn of_equal_values_the_first_is_kept() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    let rule = rule(
        "aggregate: { source: s, target: t, match: { _id: part }, set: { least: { $min: $n }, most: { $max: $n }, all: { $addToSet: $n } } }",
    );
    let mut equal = vec![Bson::Int32(1), Bson::Int64(1), Bson::Double(1.0), Bson::Decimal128("1.0".parse().unwrap())];
    let mut random = StdRng::seed_from_u64(2029);
    for _ in 0..20 {
        equal.shuffle(&mut random);
        sources.delete_many(doc! {}).await.unwrap();
        let mut documents: Vec<Document> =
            (0..).zip(&equal).map(|(id, n): (i32, _)| doc! {"_id": id, "part": 1, "n": n}).collect();
        documents.shuffle(&mut random);
        sources.insert_many(documents).await.unwrap();
        let found = rows(&database, &read::sources(&rule, &[&Key::one(Bson::Int32(1))])).await;
        let first = &equal[0];
        assert_eq!(found, [(1, doc! {"k": [1], "v": {"v0": first, "v1": first, "v2": [first]}})]);
    }
}

#[test]
fn what_keeps_the_order_of_its_sources_is_read_in_it() {
    let key = Key::one(Bson::Int32(1));
    for set in ["$min: $n", "$addToSet: $n", "$push: $n", "$first: $n"] {
        let text = format!(
            "aggregate: {{ source: s, target: t, match: {{ _id: part }}, set: {{ a: {{ $sum: $n }}, b: {{ {set} }} }} }}"
        );
        assert_eq!(read::sources_by_shortcut(&rule(&text), &[&key]), None, "{set}");
    }
    for set in ["$sum: 1", "$count: {}"] {
        let text = format!("aggregate: {{ source: s, target: t, match: {{ _id: part }}, set: {{ a: {{ {set} }} }} }}");
        assert_eq!(read::sources_by_shortcut(&rule(&text), &[&key]), None, "{set} needs none anyway");
    }
}

/// From an index that holds all fields of a read, the server reads null where a document lacks one. A rule's own index did that: it holds
/// the order of the elements.
#[tokio::test]
async fn an_index_makes_no_null_of_a_missing_field() {
    let test = denormd_fixture::database().await;
    let database = test.database();
    let sources = database.collection::<Document>("s");
    let some = [doc! {"at": 2, "n": 2}, doc! {"at": null, "n": null}, doc! {}, doc! {"at": 1}, doc! {"n": 1}];
    let source = |(id, mut source): (i32, Document)| {
        source.extend(doc! {"_id": id, "part": id % 2});
        source
    };
    sources.insert_many((0..40).zip(some.into_iter().cycle()).map(source)).await.unwrap();
    let of = |form: &str| {
        let is_missing = "{ $expr: { $eq: [{ $type: $n }, missing] } }";
        let sides = "target: t, match: { _id: part }";
        let filtered = format!("source: {{ collection: s, where: {is_missing} }}, {sides}");
        rule(&form.replace("@filtered", &filtered).replace('@', &format!("source: s, {sides}")))
    };
    let fetches = [
        "copy: { @, set: { n: $n }, sort: { at: -1 } }",
        "collect: { @, into: all, element: { at: $at, n: $n } }",
        "collect: { @, into: all, element: { id: $_id, at: $at }, sort: { at: -1 }, slice: 30 }",
        "collect: { @, into: all, element: { id: $_id, at: $at }, sort: { at: -1 }, slice: -30 }",
        "aggregate: { @, set: { all: { $addToSet: $n } } }",
        "aggregate: { @, set: { n: { $sum: { $cond: [{ $eq: [{ $type: $n }, missing] }, 1, 0] } } } }",
        "aggregate: { @filtered, set: { n: { $sum: 1 } } }",
    ];
    let index_alone =
        ["aggregate: { @, set: { n: { $sum: $n }, all: { $count: {} }, least: { $min: $n }, mean: { $avg: $n } } }"];
    let keys: Vec<Key> = (0..2).map(|part| Key::one(Bson::Int32(part))).collect();
    let keys: Vec<&Key> = keys.iter().collect();
    let mut before = Vec::new();
    for indexed in [false, true] {
        if indexed {
            let keys = doc! {"part": 1, "at": -1, "_id": -1, "n": 1};
            sources.create_index(IndexModel::builder().keys(keys).build()).await.unwrap();
        }
        for (nth, form) in fetches.iter().chain(&index_alone).enumerate() {
            let rule = of(form);
            for (at_once, command) in
                [read::sources(&rule, &keys), read::sources_at_once(&rule, &keys)].into_iter().enumerate()
            {
                let mut found = rows(&database, &command).await;
                found.sort_by_key(|(key, _)| *key);
                if !indexed {
                    before.push(found);
                    continue;
                }
                assert_eq!(found, before[2 * nth + at_once], "{form}");
                if at_once == 1 {
                    let plan =
                        database.run_command(doc! {"explain": command, "verbosity": "queryPlanner"}).await.unwrap();
                    let covered = chosen(&plan.into()).contains("PROJECTION_COVERED");
                    assert_eq!(covered, nth >= fetches.len(), "{form}");
                }
            }
        }
    }
}
