//! The exact meaning of rules, sentence by sentence: each test or case quotes its sentence.
//!
//! The requirements on the cluster (pre-images, indexes, kinds of collections) are in `copy_rules.rs`.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use std::time::{Duration, Instant};

use bson::{Bson, Document, Regex, bson, doc};
use denormd_model::rule_state::RuleState;
use denormd_rules::{config::Loaded, plan};
use mongodb::options::Collation;

use crate::support::{
    cases::{Case, Write, delete, every_way, insert, replace, update},
    daemon::{self, Daemon, PATIENCE, all},
};

const NAME: &str = "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name } }";
const CODE: &str = "copy: { source: '@s', target: '@t', match: { ref: code }, set: { name: $name } }";
const ITEMS: &str =
    "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name } }";
/// An `aggregate` with groups, to be continued.
const GROUPS: &str = "aggregate: { source: '@s', target: '@t', match: { _id: ref }";
/// Values over variables, and one beside them.
const LET: &str = "let: { kinds: { $addToSet: $kind }, sum: { $sum: $rank }, rows: { $sum: 1 } }, set: { \
    kinds: { $size: $$kinds }, \
    ratio: { $cond: [{ $eq: [$$rows, 0] }, none, { $divide: [$$sum, $$rows] }] }, \
    both: { sum: $$sum, list: $$kinds }, \
    n: { $sum: 1 } }";
const INTO: &str = "copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: names, element: $name }";

fn decimal(text: &str) -> Bson {
    Bson::Decimal128(text.parse().unwrap())
}

fn regex(pattern: &str) -> Bson {
    Bson::RegularExpression(Regex { pattern: pattern.try_into().unwrap(), options: "".try_into().unwrap() })
}

fn keys() -> Vec<Case> {
    let numbered = |id: i32, value: Bson, name: Option<&str>| {
        let mut target = doc! {"_id": id, "ref": value};
        target.extend(name.map(|name| ("name".to_owned(), name.into())));
        target
    };
    let equals = [
        (bson!(1), Some("one")),
        (bson!(1.0), Some("one")),
        (Bson::Int64(1), Some("one")),
        (decimal("1.00"), Some("one")),
        (bson!("1"), None),
        (bson!(true), None),
        (bson!({"a": 1.0, "b": [Bson::Int64(1), decimal("2")]}), Some("nested")),
        (bson!({"b": [1, 2], "a": 1}), None),
        (bson!({"a": 1}), None),
        (bson!(f64::NAN), Some("nan")),
        (decimal("NaN"), Some("nan")),
        (bson!(0.0), Some("zero")),
        (bson!(-0.0), Some("zero")),
        (Bson::Int64(0), Some("zero")),
        (bson!("é"), Some("composed")),
        (bson!("e\u{301}"), None),
        (bson!(""), Some("empty")),
        (bson!({"$id": 1, "$ref": "x"}), None),
    ];
    let sources = [
        doc! {"_id": 1, "name": "one"},
        doc! {"_id": {"a": 1, "b": [1.0, 2]}, "name": "nested"},
        doc! {"_id": f64::NAN, "name": "nan"},
        doc! {"_id": -0.0, "name": "zero"},
        doc! {"_id": "é", "name": "composed"},
        doc! {"_id": "", "name": "empty"},
        doc! {"_id": 2.5, "name": "other"},
    ];
    let by_code = sources.iter().enumerate().map(|(nth, source)| {
        doc! {"_id": i32::try_from(nth).unwrap(), "code": source.get("_id").unwrap(), "name": source.get("name").unwrap()}
    });
    let targets = |with_name: bool| {
        let targets = (0..).zip(equals.clone());
        targets.map(move |(id, (value, name))| numbered(id, value, name.filter(|_| with_name))).collect::<Vec<_>>()
    };
    let items = |with_name: bool| {
        let items = equals.clone().into_iter().map(move |(value, name)| {
            let mut item = doc! {"id": value};
            item.extend(name.filter(|_| with_name).map(|name| ("name".to_owned(), name.into())));
            item
        });
        doc! {"_id": 1, "items": items.collect::<Vec<_>>()}
    };
    let refs = doc! {"_id": 1, "refs": equals.iter().map(|(value, _)| value.clone()).collect::<Vec<_>>()};
    let mut named = refs.clone();
    named.insert("names", equals.iter().filter_map(|(_, name)| *name).collect::<Vec<_>>());
    let codes =
        || [doc! {"_id": 1, "code": regex("^a"), "name": "regex"}, doc! {"_id": 2, "code": "abc", "name": "abc"}];
    let dbref = "copy: { source: '@s', target: '@t', match: { 'p.$id': _id }, set: { name: $name } }";
    let s = || [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}];
    let sorted = |sort: &str| {
        format!("copy: {{ source: '@s', target: '@t', match: {{ ref: code }}, {sort} set: {{ name: $name }} }}")
    };
    let rivals = || {
        [
            doc! {"_id": 3, "code": 1, "rank": 1, "name": "third"},
            doc! {"_id": 2, "code": 1, "rank": 2, "name": "second"},
            doc! {"_id": 1, "code": 1.0, "rank": 2, "name": "first"},
            doc! {"_id": 4, "code": 1, "name": "unranked"},
        ]
    };
    let one = |name: &str| doc! {"_id": 1, "ref": 1, "name": name};
    vec![
        // "Keys match by the server's equality (1 equals 1.0, nested too)"
        Case::new("equality of _id", NAME).has("s", sources.clone()).has("t", targets(false)).expect("t", targets(true)),
        Case::new("equality of another key", CODE).has("s", by_code).has("t", targets(false)).expect("t", targets(true)),
        Case::new("equality in elements", ITEMS).has("s", sources.clone()).has("t", [items(false)]).expect("t", [items(true)]),
        Case::new("equality in into", INTO).has("s", sources.clone()).has("t", [refs]).expect("t", [named]),
        Case::new("equality of children", "collect: { source: '@s', target: '@t', match: { k: k }, into: all, element: $_id }")
            .has("s", [doc! {"_id": 1, "k": 1}, doc! {"_id": 2, "k": 1.0}, doc! {"_id": 3, "k": decimal("1.0")}, doc! {"_id": 4, "k": "1"}])
            .has("t", [doc! {"_id": 1, "k": Bson::Int64(1)}])
            .expect("t", [doc! {"_id": 1, "k": Bson::Int64(1), "all": [1, 2, 3]}]),
        Case::new("equality, live", NAME)
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "ref": 1.0}, doc! {"_id": 2, "ref": {"$numberDecimal": "1"}}])
            .writes([update("s", 1, doc! {"$set": {"name": "b"}}), update("t", 2, doc! {"$set": {"ref": decimal("1")}})])
            .expect("t", [doc! {"_id": 1, "ref": 1.0, "name": "b"}, doc! {"_id": 2, "ref": decimal("1"), "name": "b"}]),
        // "a regex key is compared as a value, never used as a pattern"
        Case::new("a regex as a key", CODE)
            .has("s", codes())
            .has("t", [doc! {"_id": 1, "ref": regex("^a")}, doc! {"_id": 2, "ref": "abc"}, doc! {"_id": 3, "ref": regex("abc")}])
            .writes([insert("t", doc! {"_id": 4, "ref": regex("b")}), update("s", 1, doc! {"$set": {"name": "pattern"}})])
            .expect("t", [
                doc! {"_id": 1, "ref": regex("^a"), "name": "pattern"},
                doc! {"_id": 2, "ref": "abc", "name": "abc"},
                doc! {"_id": 3, "ref": regex("abc")},
                doc! {"_id": 4, "ref": regex("b")},
            ]),
        Case::new("a regex as a key of an element", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': code }, set: { 'items.$[].name': $name } }")
            .has("s", codes())
            .has("t", [doc! {"_id": 1, "items": [{"id": regex("^a")}, {"id": "abc"}, {"id": regex("b")}]}])
            .writes([delete("s", 2)])
            .expect("t", [doc! {"_id": 1, "items": [{"id": regex("^a"), "name": "regex"}, {"id": "abc"}, {"id": regex("b")}]}]),
        Case::new("a regex in a composite key", "copy: { source: '@s', target: '@t', match: { k: k, ref: code }, set: { name: $name } }")
            .has("s", codes().map(|mut source| { source.insert("k", 1); source }))
            .has("t", [doc! {"_id": 1, "k": 1, "ref": regex("^a")}, doc! {"_id": 2, "k": 1, "ref": "abc"}, doc! {"_id": 3, "k": 1, "ref": regex("abc")}])
            .expect("t", [doc! {"_id": 1, "k": 1, "ref": regex("^a"), "name": "regex"}, doc! {"_id": 2, "k": 1, "ref": "abc", "name": "abc"}, doc! {"_id": 3, "k": 1, "ref": regex("abc")}]),
        // "A DBRef's `$ref` (and `$db`, if there) must name the source."
        Case::new("DBRefs of other collections and databases", dbref)
            .has("s", s())
            .has("t", [
                doc! {"_id": 1, "p": {"$ref": "@s", "$id": 1}},
                doc! {"_id": 2, "p": {"$ref": "@s", "$id": 1, "$db": "@@"}},
                doc! {"_id": 3, "p": {"$ref": "@s", "$id": 1, "$db": "elsewhere"}, "name": "stale"},
                doc! {"_id": 4, "p": {"$ref": "@t", "$id": 1}, "name": "stale"},
                doc! {"_id": 5, "p": {"id": 1}, "name": "stale"},
                doc! {"_id": 6, "p": {"$ref": "@s", "$id": 1}},
                doc! {"_id": 7, "p": {"$ref": "@s", "$id": 1, "$db": null}},
            ])
            .writes([update("t", 6, doc! {"$set": {"p.$ref": "@t"}})])
            .expect("t", [
                doc! {"_id": 1, "p": {"$ref": "@s", "$id": 1}, "name": "a"},
                doc! {"_id": 2, "p": {"$ref": "@s", "$id": 1, "$db": "@@"}, "name": "a"},
                doc! {"_id": 3, "p": {"$ref": "@s", "$id": 1, "$db": "elsewhere"}},
                doc! {"_id": 4, "p": {"$ref": "@t", "$id": 1}},
                doc! {"_id": 5, "p": {"id": 1}},
                doc! {"_id": 6, "p": {"$ref": "@t", "$id": 1}},
                doc! {"_id": 7, "p": {"$ref": "@s", "$id": 1, "$db": null}, "name": "a"},
            ]),
        Case::new("DBRefs in the source", "aggregate: { source: '@s', target: '@t', match: { _id: p.$id }, set: { n: { $sum: 1 } } }")
            .has("s", [
                doc! {"_id": 1, "p": {"$ref": "@t", "$id": 1}},
                doc! {"_id": 2, "p": {"$ref": "@other", "$id": 1}},
                doc! {"_id": 3, "p": {"$ref": "@t", "$id": 1, "$db": "@@"}},
                doc! {"_id": 4, "p": {"$ref": "@t", "$id": 1, "$db": "elsewhere"}},
                doc! {"_id": 5, "p": {"$ref": "@t", "$id": 1}},
                doc! {"_id": 6, "p": {"$ref": "@t", "$id": 1, "$db": null}},
            ])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes([update("s", 5, doc! {"$set": {"p.$ref": "@elsewhere"}}), update("s", 6, doc! {"$set": {"p.$id": 2}})])
            .expect("t", [doc! {"_id": 1, "n": 2}, doc! {"_id": 2, "n": 1}]),
        // "A null or missing reference refers to nothing: owned paths are unset."
        Case::new("null and missing", CODE)
            .has("s", [doc! {"_id": 1, "code": null, "name": "null"}, doc! {"_id": 2, "name": "missing"}, doc! {"_id": 3, "code": 1, "name": "one"}])
            .has("t", [doc! {"_id": 1, "ref": null, "name": "stale"}, doc! {"_id": 2, "name": "stale"}, doc! {"_id": 3, "ref": 1}, doc! {"_id": 4, "ref": 1}])
            .writes([update("t", 3, doc! {"$unset": {"ref": 1}}), update("t", 4, doc! {"$set": {"ref": null}})])
            .expect("t", [doc! {"_id": 1, "ref": null}, doc! {"_id": 2}, doc! {"_id": 3}, doc! {"_id": 4, "ref": null}]),
        Case::new("a target whose _id is null", "aggregate: { source: '@s', target: '@t', match: { _id: to }, set: { n: { $sum: 1 } } }")
            .has("s", [doc! {"_id": 1, "to": null}, doc! {"_id": 2}, doc! {"_id": 3, "to": 1}])
            .has("t", [doc! {"_id": null, "n": 5}, doc! {"_id": 1}])
            .writes([insert("s", doc! {"_id": 4, "to": null}), insert("s", doc! {"_id": 5, "to": 1})])
            .expect("t", [doc! {"_id": null}, doc! {"_id": 1, "n": 2}]),
        Case::new("null and missing under on_missing: null", "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name }, on_missing: \"null\" }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "name": "stale"}, doc! {"_id": 2, "ref": null, "name": "stale"}, doc! {"_id": 3, "ref": 9}])
            .expect("t", [doc! {"_id": 1}, doc! {"_id": 2, "ref": null}, doc! {"_id": 3, "ref": 9, "name": null}]),
        Case::new("null and missing under on_missing: keep", "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name }, on_missing: keep }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 9, "name": "kept"}])
            .writes([update("t", 1, doc! {"$set": {"ref": null}})])
            .expect("t", [doc! {"_id": 1, "ref": null}, doc! {"_id": 2, "ref": 9, "name": "kept"}]),
        Case::new("null and missing in elements", ITEMS)
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [{"id": null, "name": "stale"}, {"name": "stale"}, {"id": 1}, {"id": [1], "name": "stale"}]}])
            .expect("t", [doc! {"_id": 1, "items": [{"id": null}, {}, {"id": 1, "name": "a"}, {"id": [1]}]}]),
        Case::new("a source whose _id is null", "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name } }")
            .has("s", [doc! {"_id": null, "name": "null"}, doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "ref": null}, doc! {"_id": 2}, doc! {"_id": 3, "ref": 1}])
            .writes([update("s", Bson::Null, doc! {"$set": {"name": "still null"}}), insert("t", doc! {"_id": 4, "name": "stale"})])
            .expect("t", [doc! {"_id": 1, "ref": null}, doc! {"_id": 2}, doc! {"_id": 3, "ref": 1, "name": "a"}, doc! {"_id": 4}]),
        Case::new("null of one part of a composite key", "copy: { source: '@s', target: '@t', match: { a: a, b: b }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "a": 1, "b": null, "name": "null"}, doc! {"_id": 2, "a": 1, "name": "missing"}])
            .has("t", [doc! {"_id": 1, "a": 1, "b": null, "name": "stale"}, doc! {"_id": 2, "a": 1, "name": "stale"}])
            .expect("t", [doc! {"_id": 1, "a": 1, "b": null}, doc! {"_id": 2, "a": 1}]),
        // "Where several sources match one target, `sort` picks the first, `_id` ascending by default."
        Case::new("the first by _id", &sorted("")).has("s", rivals()).has("t", [doc! {"_id": 1, "ref": 1}]).expect("t", [one("first")]),
        Case::new("the first by sort", &sorted("sort: { rank: 1 },")).has("s", rivals()).has("t", [doc! {"_id": 1, "ref": 1}]).expect("t", [one("unranked")]),
        Case::new("the first by sort, downwards, ties by _id", &sorted("sort: { rank: -1 },")).has("s", rivals()).has("t", [doc! {"_id": 1, "ref": 1}]).expect("t", [one("first")]),
        Case::new("the first by _id, downwards", &sorted("sort: { _id: -1 },")).has("s", rivals()).has("t", [doc! {"_id": 1, "ref": 1}]).expect("t", [one("unranked")]),
        Case::new("the next takes over", &sorted("sort: { rank: -1 },"))
            .has("s", rivals())
            .has("t", [doc! {"_id": 1, "ref": 1}])
            .writes([delete("s", 1), update("s", 3, doc! {"$set": {"rank": 2}}), update("s", 2, doc! {"$set": {"code": 2}})])
            .expect("t", [one("third")]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_match_by_the_servers_equality() {
    every_way(&keys()).await;
}

/// "under the simple collation": a collection's own would make "A" and "a" one key.
#[tokio::test(flavor = "multi_thread")]
async fn keys_match_under_the_simple_collation() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    for name in ["s", "t", "u"] {
        let collation =
            Collation::builder().locale("en").strength(mongodb::options::CollationStrength::Secondary).build();
        db.create_collection(name).collation(collation).await.unwrap();
    }
    let rules = "
  - { name: id, allow_scan: true, copy: { source: s, target: t, match: { ref: _id }, set: { name: $name } } }
  - { name: key, allow_scan: true, copy: { source: s, target: t, match: { ref: code }, set: { by_code: $name } } }
  - { name: element, allow_scan: true, copy: { source: s, target: t, match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name } } }
  - { name: into, allow_scan: true, copy: { source: s, target: t, match: { 'refs.$[]': _id }, into: names, element: $name } }
  - { name: held, allow_scan: true, copy: { source: s, target: u, match: { _id: 'list.$[]' }, set: { name: $name } } }
  - { name: all, allow_scan: true, collect: { source: s, target: u, match: { _id: code }, into: all, element: $_id } }
  - { name: some, allow_scan: true, aggregate: { source: { collection: s, where: { kind: X } }, target: { collection: u, where: { kind: X } }, match: { _id: code }, set: { ids: { $addToSet: $name } } } }";
    let daemon = Daemon::start(&test, rules).await;
    let targets = [
        doc! {"_id": 1, "ref": "a", "items": [{"id": "a"}, {"id": "A"}], "refs": ["A", "a"]},
        doc! {"_id": 2, "ref": "A", "items": [{"id": "A"}], "refs": ["A"]},
        doc! {"_id": 3, "ref": "B"},
    ];
    let sources = [
        doc! {"_id": "a", "code": "A", "name": "lower", "list": ["b"], "kind": "X"},
        doc! {"_id": "c", "code": "a", "name": "C", "list": ["a", "A"], "kind": "x"},
    ];
    db.collection("s").insert_many(sources).await.unwrap();
    db.collection("t").insert_many(targets).await.unwrap();
    db.collection("u").insert_many([doc! {"_id": "A", "kind": "X"}, doc! {"_id": "b", "kind": "x"}]).await.unwrap();
    daemon.settled().await;
    db.collection::<Document>("s").update_one(doc! {"_id": "a"}, doc! {"$set": {"name": "LOWER"}}).await.unwrap();
    daemon.settled().await;
    let expected = [
        doc! {"_id": 1, "ref": "a", "items": [{"id": "a", "name": "LOWER"}, {"id": "A"}], "refs": ["A", "a"], "name": "LOWER", "by_code": "C", "names": ["LOWER"]},
        doc! {"_id": 2, "ref": "A", "items": [{"id": "A"}], "refs": ["A"], "by_code": "LOWER", "names": []},
        doc! {"_id": 3, "ref": "B"},
    ];
    let shown = crate::support::cases::shown;
    assert_eq!(shown(&all(&db, "t").await), shown(&expected));
    let expected = [
        doc! {"_id": "A", "kind": "X", "name": "C", "all": ["a"], "ids": ["LOWER"]},
        doc! {"_id": "b", "kind": "x", "name": "LOWER", "all": []},
    ];
    assert_eq!(shown(&all(&db, "u").await), shown(&expected));
    assert_eq!(crate::support::cases::dead_letters(&test).await, Vec::<Document>::new());
    daemon.stop().await;
}

fn binding() -> Vec<Case> {
    let s = || [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}];
    let pair = "copy: { source: '@s', target: '@t', match: { 'items.$[].t': tenant, 'items.$[].k': code }, set: { 'items.$[].name': $name } }";
    vec![
        // "a `set` path with the match's array prefix is set in the element that matched"
        Case::new("set in the element", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name, 'items.$[].in.side': $name } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [{"id": 2, "in": {"mine": 1}}, {"id": 1}]}])
            .expect("t", [doc! {"_id": 1, "items": [{"id": 2, "in": {"mine": 1, "side": "b"}, "name": "b"}, {"id": 1, "in": {"side": "a"}, "name": "a"}]}]),
        // "entries of `match` with the same prefix bind the same element"
        Case::new("one element fulfils both entries", pair)
            .has("s", [doc! {"_id": 1, "tenant": 1, "code": "x", "name": "1x"}, doc! {"_id": 2, "tenant": 2, "code": "y", "name": "2y"}])
            .has("t", [
                doc! {"_id": 1, "items": [{"t": 1, "k": "x"}, {"t": 2, "k": "x"}, {"t": 2, "k": "y"}]},
                doc! {"_id": 2, "items": [{"t": 1, "k": "y", "name": "stale"}, {"t": 2, "k": "x"}]},
            ])
            .writes([update("s", 2, doc! {"$set": {"name": "Y"}})])
            .expect("t", [
                doc! {"_id": 1, "items": [{"t": 1, "k": "x", "name": "1x"}, {"t": 2, "k": "x"}, {"t": 2, "k": "y", "name": "Y"}]},
                doc! {"_id": 2, "items": [{"t": 1, "k": "y"}, {"t": 2, "k": "x"}]},
            ]),
        Case::new("an entry beside the array holds for every element", "copy: { source: '@s', target: '@t', match: { tenant: tenant, 'items.$[].k': code }, set: { 'items.$[].name': $name } }")
            .has("s", [doc! {"_id": 1, "tenant": 1, "code": "x", "name": "1x"}, doc! {"_id": 2, "tenant": 2, "code": "x", "name": "2x"}])
            .has("t", [doc! {"_id": 1, "tenant": 1, "items": [{"k": "x"}, {"k": "y"}]}, doc! {"_id": 2, "items": [{"k": "x", "name": "stale"}]}])
            .writes([update("t", 1, doc! {"$set": {"tenant": 2}})])
            .expect("t", [doc! {"_id": 1, "tenant": 2, "items": [{"k": "x", "name": "2x"}, {"k": "y"}]}, doc! {"_id": 2, "items": [{"k": "x"}]}]),
        // "A path without `$[]` does not look into arrays."
        Case::new("a target path without $[]", "copy: { source: '@s', target: '@t', match: { a.ref: _id }, set: { name: $name } }")
            .has("s", s())
            .has("t", [
                doc! {"_id": 1, "a": [{"ref": 1}], "name": "stale"},
                doc! {"_id": 2, "a": {"ref": [1]}, "name": "stale"},
                doc! {"_id": 3, "a": {"ref": 1}},
                doc! {"_id": 4, "a": 1, "name": "stale"},
            ])
            .writes([update("s", 1, doc! {"$set": {"name": "z"}})])
            .expect("t", [doc! {"_id": 1, "a": [{"ref": 1}]}, doc! {"_id": 2, "a": {"ref": [1]}}, doc! {"_id": 3, "a": {"ref": 1}, "name": "z"}, doc! {"_id": 4, "a": 1}]),
        Case::new("a source path without $[]", "collect: { source: '@s', target: '@t', match: { _id: a.t }, into: all, element: $_id }")
            .has("s", [doc! {"_id": 1, "a": [{"t": 1}]}, doc! {"_id": 2, "a": {"t": [1]}}, doc! {"_id": 3, "a": {"t": 1}}])
            .has("t", [doc! {"_id": 1}])
            .writes([replace("s", doc! {"_id": 3, "a": {"t": [1]}}), replace("s", doc! {"_id": 2, "a": {"t": 1}})])
            .expect("t", [doc! {"_id": 1, "all": [2]}]),
        Case::new("an array of ids of a copy without $[]", CODE)
            .has("s", [doc! {"_id": 1, "code": ["x", "y"], "name": "array"}, doc! {"_id": 2, "code": "x", "name": "scalar"}])
            .has("t", [doc! {"_id": 1, "ref": "x"}, doc! {"_id": 2, "ref": "y"}, doc! {"_id": 3, "ref": ["x", "y"], "name": "stale"}])
            .expect("t", [doc! {"_id": 1, "ref": "x", "name": "scalar"}, doc! {"_id": 2, "ref": "y"}, doc! {"_id": 3, "ref": ["x", "y"]}]),
        // Wrong shapes: a value that is not an array where one is expected, or not a subdocument, holds no reference.
        Case::new("no array where one is expected", ITEMS)
            .has("s", s())
            .has("t", [
                doc! {"_id": 1, "items": 5},
                doc! {"_id": 2, "items": null},
                doc! {"_id": 3, "items": {"id": 1}},
                doc! {"_id": 4, "items": [[{"id": 1}], 5, null, "x", {"id": 1}]},
                doc! {"_id": 5},
                doc! {"_id": 6, "items": [{"id": 1}]},
            ])
            .writes([update("s", 1, doc! {"$set": {"name": "z"}}), update("t", 6, doc! {"$set": {"items": {"id": 1}}})])
            .expect("t", [
                doc! {"_id": 1, "items": 5},
                doc! {"_id": 2, "items": null},
                doc! {"_id": 3, "items": {"id": 1}},
                doc! {"_id": 4, "items": [[{"id": 1}], 5, null, "x", {"id": 1, "name": "z"}]},
                doc! {"_id": 5},
                doc! {"_id": 6, "items": {"id": 1}},
            ]),
        Case::new("arrays right inside arrays, around the array that is bound", "copy: { source: '@s', target: '@t', match: { 'a.$[].b.$[].c': _id }, set: { 'a.$[].b.$[].n': $name } }")
            .has("s", s())
            .has("t", [
                doc! {"_id": 1, "a": [[{"b": [{"c": 1}]}], {"b": [[{"c": 1}], {"c": 1}]}, {"b": {"c": 1}}, 7, null]},
                doc! {"_id": 2, "a": {"b": [{"c": 1}]}},
            ])
            .writes([update("s", 1, doc! {"$set": {"name": "z"}})])
            .expect("t", [
                doc! {"_id": 1, "a": [[{"b": [{"c": 1}]}], {"b": [[{"c": 1}], {"c": 1, "n": "z"}]}, {"b": {"c": 1}}, 7, null]},
                doc! {"_id": 2, "a": {"b": [{"c": 1}]}},
            ]),
        Case::new("on_missing: remove passes over what is no subdocument", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name }, on_missing: remove }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [[{"id": 9}], 9, {"id": 9}, {"id": [9]}, {"id": 1}]}, doc! {"_id": 2, "items": {"id": 9}}])
            .expect("t", [doc! {"_id": 1, "items": [[{"id": 9}], 9, {"id": [9]}, {"id": 1, "name": "a"}]}, doc! {"_id": 2, "items": {"id": 9}}]),
        Case::new("once passes over what is no subdocument", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name }, once: true }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [[{"id": 1}], 1, {"id": 1}]}])
            .expect("t", [doc! {"_id": 1, "items": [[{"id": 1}], 1, {"id": 1, "name": "a"}]}]),
        Case::new("no array for into", INTO)
            .has("s", s())
            .has("t", [doc! {"_id": 1, "refs": 1, "names": ["stale"]}, doc! {"_id": 2, "names": ["stale"]}, doc! {"_id": 3, "refs": [[1], null, 1]}])
            .writes([insert("t", doc! {"_id": 4, "refs": [2]}), update("t", 4, doc! {"$set": {"refs": 2}})])
            .expect("t", [doc! {"_id": 1, "refs": 1}, doc! {"_id": 2}, doc! {"_id": 3, "refs": [[1], null, 1], "names": ["a"]}, doc! {"_id": 4, "refs": 2}]),
        // "In source-held references `$$element` is the source's matched element (`cast.$[].role` beside the film)."
        Case::new("$$element", "copy: { source: '@s', target: '@t', match: { _id: 'cast.$[].who' }, set: { title: $title, role: $$element.role, whole: $$element } }")
            .has("s", [doc! {"_id": 1, "title": "T", "cast": [{"who": 1, "role": "x"}, {"who": 2}]}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .expect("t", [doc! {"_id": 1, "title": "T", "role": "x", "whole": {"who": 1, "role": "x"}}, doc! {"_id": 2, "title": "T", "whole": {"who": 2}}]),
        Case::new("$$element is the id itself in an array of ids", "copy: { source: '@s', target: '@t', match: { _id: 'ids.$[]' }, set: { me: $$element } }")
            .has("s", [doc! {"_id": 1, "ids": [1.0, 2]}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .expect("t", [doc! {"_id": 1, "me": 1.0}, doc! {"_id": 2, "me": 2}]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn each_binds_the_element_that_matched() {
    every_way(&binding()).await;
}

fn loaded(rules: &str) -> Loaded {
    daemon::load(&format!("mongodb: {{ uri: 'mongodb://localhost/?replicaSet=rs0', database: db }}\nrules:\n{rules}"))
}

/// The error for rules that are refused.
fn refusal(rules: &str) -> String {
    let loaded = loaded(rules);
    match plan::compile(&loaded.config, None) {
        Ok(_) => panic!("accepted: {rules}"),
        Err(mistakes) => loaded.report(&mistakes).to_string(),
    }
}

fn accepted(rules: &str) {
    let loaded = loaded(rules);
    plan::compile(&loaded.config, None).unwrap_or_else(|mistakes| panic!("{}", loaded.report(&mistakes)));
}

/// "different prefixes are refused"
#[test]
fn different_array_prefixes_are_refused() {
    let said = refusal(
        "  - { name: r, copy: { source: s, target: t, match: { 'a.$[].x': x, 'b.$[].y': y }, set: { 'a.$[].n': $n } } }",
    );
    assert!(said.contains("a.$[]") && said.contains("b.$[]") && said.contains("different arrays"), "{said}");
    let said =
        refusal("  - { name: r, copy: { source: s, target: t, match: { 'a.$[].x': _id }, set: { 'b.$[].n': $n } } }");
    assert!(said.contains("b.$[].n"), "{said}");
}

/// "`$$NOW`, `$rand`, `$where`, `$function` are refused"
#[test]
fn what_is_no_function_of_the_data_is_refused() {
    for (value, said) in [
        ("$$NOW", "$$NOW"),
        ("{ $add: [$$NOW, 1] }", "$$NOW"),
        ("$$CLUSTER_TIME", "$$CLUSTER_TIME"),
        ("{ $rand: {} }", "$rand"),
        ("{ $function: { body: 'x', args: [], lang: js } }", "$function"),
        ("{ a: { b: [{ $cond: [true, { $rand: {} }, 1] }] } }", "$rand"),
    ] {
        let report = refusal(&format!(
            "  - {{ name: r, copy: {{ source: s, target: t, match: {{ ref: _id }}, set: {{ x: {value} }} }} }}"
        ));
        assert!(report.contains(said) && report.contains("config.yaml:3:"), "{value}: {report}");
    }
    for filter in [
        "{ $where: 'this.a' }",
        "{ $expr: { $function: { body: x, args: [], lang: js } } }",
        "{ a: 1, $or: [{ $where: x }] }",
        "{ $expr: { $gt: [$at, $$NOW] } }",
    ] {
        for side in ["source", "target"] {
            let other = if side == "source" { "target: t" } else { "source: s" };
            let report = refusal(&format!(
                "  - {{ name: r, copy: {{ {side}: {{ collection: c, where: {filter} }}, {other}, match: {{ ref: _id }}, set: {{ x: $x }} }} }}"
            ));
            assert!(
                report.contains("$where") || report.contains("$function") || report.contains("$$NOW"),
                "{filter}: {report}"
            );
        }
    }
    let report = refusal(
        "  - { name: r, aggregate: { source: s, target: t, match: { _id: ref }, set: { x: { $accumulator: {} } } } }",
    );
    assert!(report.contains("$accumulator"), "{report}");
}

fn values() -> Vec<Case> {
    let set = |set: &str| format!("copy: {{ source: '@s', target: '@t', match: {{ ref: _id }}, set: {set} }}");
    let s = || [doc! {"_id": 1, "name": "a", "at": {"x": 1}, "none": null}];
    let t = || [doc! {"_id": 1, "ref": 1, "out": "stale"}];
    let date = bson::DateTime::parse_rfc3339_str("2024-01-31T00:00:00Z").unwrap();
    let id = bson::oid::ObjectId::parse_str("0123456789abcdef01234567").unwrap();
    vec![
        // "Literals are Extended JSON, integers int32 where they fit."
        Case::new("literals", &set("{ int: 5, long: 5000000000, double: 5.0, forced: { $numberLong: \"5\" }, decimal: { $numberDecimal: \"5.0\" }, date: { $date: \"2024-01-31T00:00:00Z\" }, id: { $oid: 0123456789abcdef01234567 }, text: plain, dollar: { $literal: $name }, list: [1, $name], no: null, yes: true }"))
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1}])
            .expect("t", [doc! {
                "_id": 1, "ref": 1, "int": 5, "long": 5_000_000_000_i64, "double": 5.0, "forced": Bson::Int64(5), "decimal": decimal("5.0"), "date": date, "id": id,
                "text": "plain", "dollar": "$name", "list": [1, "a"], "no": null, "yes": true,
            }]),
        Case::new("literals in where", "copy: { source: { collection: '@s', where: { at: { $gte: { $date: \"2024-01-31T00:00:00Z\" } }, id: { $oid: 0123456789abcdef01234567 } } }, target: '@t', match: { ref: _id }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "at": date, "id": id, "name": "a"}, doc! {"_id": 2, "at": "2025", "id": id, "name": "b"}])
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2}])
            .expect("t", [doc! {"_id": 1, "ref": 1, "name": "a"}, doc! {"_id": 2, "ref": 2}]),
        // "An expression that yields missing unsets its path."
        Case::new("a missing field", &set("{ out: $nope }")).has("s", s()).has("t", t()).expect("t", [doc! {"_id": 1, "ref": 1}]),
        Case::new("null is not missing", &set("{ out: $none }")).has("s", s()).has("t", t()).expect("t", [doc! {"_id": 1, "ref": 1, "out": null}]),
        Case::new("a field of a scalar", &set("{ out: $name.x }")).has("s", s()).has("t", t()).expect("t", [doc! {"_id": 1, "ref": 1}]),
        Case::new("$$REMOVE", &set("{ out: { $cond: [{ $eq: [$name, a] }, $$REMOVE, 1] } }"))
            .has("s", s())
            .has("t", t())
            .writes([update("s", 1, doc! {"$set": {"name": "b"}}), update("s", 1, doc! {"$set": {"name": "a"}})])
            .expect("t", [doc! {"_id": 1, "ref": 1}]),
        Case::new("missing inside a subdocument", &set("{ out: { name: $name, nope: $nope } }"))
            .has("s", s())
            .has("t", t())
            .expect("t", [doc! {"_id": 1, "ref": 1, "out": {"name": "a"}}]),
        Case::new("a subdocument is replaced whole", &set("{ out: $at }"))
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1, "out": {"old": 1}}])
            .writes([replace("s", doc! {"_id": 1, "at": {"y": 2}})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "out": {"y": 2}}]),
        Case::new("missing in into", INTO)
            .has("s", [doc! {"_id": 1}, doc! {"_id": 2, "name": null}, doc! {"_id": 3, "name": "c"}])
            .has("t", [doc! {"_id": 1, "refs": [1, 2, 3]}])
            .expect("t", [doc! {"_id": 1, "refs": [1, 2, 3], "names": [null, "c"]}]),
        Case::new("missing in collect does not count for the slice", "collect: { source: '@s', target: '@t', match: { _id: ref }, into: names, element: $name, slice: 2 }")
            .has("s", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 1, "name": null}, doc! {"_id": 3, "ref": 1, "name": "c"}, doc! {"_id": 4, "ref": 1, "name": "d"}])
            .has("t", [doc! {"_id": 1}])
            .expect("t", [doc! {"_id": 1, "names": [null, "c"]}]),
        Case::new("the whole document", &set("{ out: $$ROOT }")).has("s", s()).has("t", t()).expect("t", [doc! {"_id": 1, "ref": 1, "out": s()[0].clone()}]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn values_are_a_function_of_the_data() {
    every_way(&values()).await;
}

fn order() -> Vec<Case> {
    let collect = |rest: &str| {
        format!("collect: {{ source: '@s', target: '@t', match: {{ _id: ref }}, into: all, element: $_id, {rest} }}")
    };
    let s = || {
        [
            doc! {"_id": 5, "ref": 1, "rank": 1, "kind": "x"},
            doc! {"_id": 3, "ref": 1, "rank": 2, "kind": "x"},
            doc! {"_id": 1, "ref": 1, "rank": 2, "kind": "y"},
            doc! {"_id": 4, "ref": 1, "kind": "y"},
            doc! {"_id": 2, "ref": 1, "rank": 0, "kind": "x"},
        ]
    };
    let slice = |rest: &str| {
        format!(
            "collect: {{ source: '@s', target: '@t', match: {{ _id: ref }}, into: all, element: {{ rank: $rank }}, {rest} }}"
        )
    };
    let table = |rest: &str, expected: &[i32]| {
        Case::new(format!("collect {rest}"), &collect(rest))
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .expect("t", [doc! {"_id": 1, "all": expected}])
    };
    let aggregate = |set: &str, rest: &str| {
        format!("aggregate: {{ source: '@s', target: '@t', match: {{ _id: ref }}, set: {set}, {rest} }}")
    };
    let accumulators = "{ sum: { $sum: $rank }, n: { $sum: 1 }, count: { $count: {} }, avg: { $avg: $rank }, min: { $min: $rank }, max: { $max: $rank }, first: { $first: $_id }, last: { $last: $_id }, push: { $push: $_id }, some: { $firstN: { n: 2, input: $_id } }, top: { $topN: { n: 2, sortBy: { rank: -1, _id: 1 }, output: $_id } }, best: { $top: { sortBy: { rank: -1, _id: 1 }, output: $_id } }, kinds: { $addToSet: $kind }, merged: { $mergeObjects: { k: $kind } } }";
    let values = [bson!(1), bson!(1.0), Bson::Null, bson!({"x": 1.0}), bson!([1, 2]), bson!([1, 3]), bson!({"x": 1})];
    let lines = || {
        [
            doc! {"_id": 1, "day": 1, "lines": [{"item": 7, "qty": 3}, {"item": 8, "qty": 1}, {"item": 7, "qty": 8}]},
            doc! {"_id": 2, "day": 2, "lines": [{"item": 7, "qty": 4}, {"item": 7, "qty": 5}]},
            doc! {"_id": 3, "day": 2, "lines": 7},
        ]
    };
    let oid = || bson::oid::ObjectId::parse_str("65a000000000000000000001").unwrap();
    let results = |sum: Bson| {
        doc! {
            "_id": 1, "sum": sum, "n": 5, "count": 5, "avg": 1.25, "min": 0, "max": 2, "first": 1, "last": 5, "push": [1, 2, 3, 4, 5], "some": [1, 2], "top": [1, 3], "best": 1, "kinds": ["x", "y"],
            "merged": {"k": "x"},
        }
    };
    let nothing = |id: i32| {
        doc! {
            "_id": id, "sum": 0, "n": 0, "count": 0, "avg": null, "min": null, "max": null, "first": null, "last": null, "push": [], "some": [], "top": [], "best": null, "kinds": [],
            "merged": null,
        }
    };
    // The server's `$sort` takes the least element of an array ascending, and the greatest descending.
    let arrays = |rest: &str, expected: &[i32]| {
        let children = [
            doc! {"_id": 1, "ref": 1, "rank": [3, 1], "lines": [{"n": 1}, {"n": 9}]},
            doc! {"_id": 2, "ref": 1, "rank": [], "lines": {"n": 5}},
            doc! {"_id": 3, "ref": 1, "rank": 2, "lines": []},
            doc! {"_id": 4, "ref": 1, "lines": [5, {"n": 7}]},
            doc! {"_id": 5, "ref": 1, "rank": [[0]], "lines": [{"n": 2}]},
        ];
        Case::new(format!("collect {rest} of arrays"), &collect(rest))
            .has("s", children)
            .has("t", [doc! {"_id": 1}])
            .expect("t", [doc! {"_id": 1, "all": expected}])
    };
    vec![
        arrays("sort: { rank: 1 }", &[2, 4, 1, 3, 5]),
        arrays("sort: { rank: 1 }, slice: 3", &[2, 4, 1]),
        arrays("sort: { rank: -1 }, slice: 3", &[5, 1, 3]),
        arrays("sort: { rank: 1 }, slice: -3", &[1, 3, 5]),
        arrays("sort: { lines.n: 1 }", &[3, 4, 1, 5, 2]),
        arrays("sort: { lines.n: 1 }, slice: 3", &[3, 4, 1]),
        arrays("sort: { lines.n: -1 }, slice: 3", &[1, 4, 2]),
        // "`sort` is over source fields, ties by `_id` ascending"
        table("", &[1, 2, 3, 4, 5]),
        table("sort: { rank: 1 }", &[4, 2, 5, 1, 3]),
        table("sort: { rank: -1 }", &[1, 3, 5, 2, 4]),
        table("sort: { kind: -1, rank: 1 }", &[4, 1, 2, 5, 3]),
        table("sort: { rank: -1, _id: -1 }", &[3, 1, 5, 2, 4]),
        // "`slice` as in `$push`": first N, or last N of the sorted array
        table("sort: { rank: -1 }, slice: 2", &[1, 3]),
        table("sort: { rank: -1 }, slice: -2", &[2, 4]),
        table("sort: { rank: 1 }, slice: -3", &[5, 1, 3]),
        table("slice: 100", &[1, 2, 3, 4, 5]),
        table("slice: -100", &[1, 2, 3, 4, 5]),
        Case::new("a slice is refilled, and reordered", &collect("sort: { rank: -1 }, slice: 2"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .writes([delete("s", 1), update("s", 3, doc! {"$set": {"rank": 0}}), insert("s", doc! {"_id": 9, "ref": 1, "rank": 0.5})])
            .expect("t", [doc! {"_id": 1, "all": [5, 9]}]),
        // Only the pre-image has the parent of a deleted child whose element holds no `_id`.
        Case::new("the first two are refilled after a delete", &slice("sort: { rank: -1 }, slice: 2"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .writes([delete("s", 1)])
            .expect("t", [doc! {"_id": 1, "all": [{"rank": 2}, {"rank": 1}]}]),
        Case::new("the last two are refilled after a delete", &slice("sort: { rank: 1 }, slice: -2"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .writes([delete("s", 3), delete("s", 1)])
            .expect("t", [doc! {"_id": 1, "all": [{"rank": 0}, {"rank": 1}]}]),
        Case::new("a child moves", &collect("sort: { rank: -1 }, slice: 2"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes([update("s", 1, doc! {"$set": {"ref": 2}}), update("s", 3, doc! {"$set": {"ref": 3}}), insert("t", doc! {"_id": 3})])
            .expect("t", [doc! {"_id": 1, "all": [5, 2]}, doc! {"_id": 2, "all": [1]}, doc! {"_id": 3, "all": [3]}]),
        // "Arrays of ids keep the ids' order and duplicates."
        Case::new("ids' order and duplicates", INTO)
            .has("s", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}])
            .has("t", [doc! {"_id": 1, "refs": [2, 1, 2, 2, 1]}])
            .writes([update("t", 1, doc! {"$push": {"refs": {"$each": [1], "$position": 0}}})])
            .expect("t", [doc! {"_id": 1, "refs": [1, 2, 1, 2, 2, 1], "names": ["a", "b", "a", "b", "b", "a"]}]),
        // "Aggregates read their input in `sort` order (default `_id`)"; "`$addToSet` results are sorted"
        Case::new("accumulators in the order of _id", &aggregate(accumulators, "")).has("s", s()).has("t", [doc! {"_id": 1}]).expect("t", [results(bson!(5))]),
        Case::new("accumulators in another order", &aggregate("{ push: { $push: $_id }, first: { $first: $_id }, last: { $last: $_id } }", "sort: { rank: -1 }"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .expect("t", [doc! {"_id": 1, "push": [1, 3, 5, 2, 4], "first": 1, "last": 4}]),
        Case::new("$addToSet", &aggregate("{ set: { $addToSet: $v } }", ""))
            .has("s", [bson!("b"), bson!(3), bson!([2]), bson!("a"), bson!(3.0), bson!(1), Bson::Null, bson!({"x": 1})].into_iter().zip(0..).map(|(v, id)| doc! {"_id": id, "ref": 1, "v": v}))
            .has("t", [doc! {"_id": 1}])
            .expect("t", [doc! {"_id": 1, "set": [null, 1, 3, "a", "b", {"x": 1}, [2]]}])
            .on_history(),
        // "so that floating-point sums are the same each time"
        Case::new("floating-point sums", &aggregate("{ sum: { $sum: $v }, avg: { $avg: $v } }", ""))
            .has("s", [0.1, 0.2, 0.3, 1e16, 1.0, -1e16].into_iter().zip(0..).map(|(v, id)| doc! {"_id": id, "ref": 1, "v": v}))
            .has("t", [doc! {"_id": 1}])
            .writes([update("s", 4, doc! {"$set": {"ref": 2}}), update("s", 3, doc! {"$set": {"ref": 2}}), delete("s", 5)])
            .expect("t", [doc! {"_id": 1, "sum": 0.6, "avg": 0.199_999_999_999_999_98}]),
        // "On no input: `[]` from `collect` and array accumulators, 0 from `$sum` and `$count`, null from the rest"
        Case::new("no input", &aggregate(accumulators, ""))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes((1..=5).map(|id| delete("s", id)))
            .expect("t", [nothing(1), nothing(2)]),
        // "accumulators under a name, for expressions over them"
        Case::new("expressions over accumulators", &format!("aggregate: {{ source: '@s', target: '@t', match: {{ _id: ref }}, {LET} }}"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}, doc! {"_id": 3}, doc! {"_id": 4, "kinds": "stale", "rest": 7}])
            .writes([update("s", 5, doc! {"$set": {"ref": 2}}), insert("s", doc! {"_id": 6, "ref": 3}), delete("s", 6)])
            .expect("t", [
                doc! {"_id": 1, "kinds": 2, "ratio": 1.0, "both": {"sum": 4, "list": ["x", "y"]}, "n": 4},
                doc! {"_id": 2, "kinds": 1, "ratio": 1.0, "both": {"sum": 1, "list": ["x"]}, "n": 1},
                doc! {"_id": 3, "kinds": 0, "ratio": "none", "both": {"sum": 0, "list": []}, "n": 0},
                doc! {"_id": 4, "kinds": 0, "rest": 7, "ratio": "none", "both": {"sum": 0, "list": []}, "n": 0},
            ]),
        Case::new("expressions over accumulators, on_empty: unset", &format!("aggregate: {{ source: '@s', target: '@t', match: {{ _id: ref }}, on_empty: unset, {LET} }}"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "kinds": 5, "n": 5}])
            .writes((1..=5).map(|id| delete("s", id)))
            .expect("t", [doc! {"_id": 1}, doc! {"_id": 2}]),
        // "one row per matching element: an order with two lines of item 7 counts twice", in the order of `sort`, `_id`
        // and the index; "an `$expr` on `$$element` filters rows"
        Case::new("rows from a source's array", "aggregate: { source: '@s', target: '@t', match: { _id: 'lines.$[].item' }, sort: { day: -1 }, set: { n: { $sum: 1 }, units: { $sum: $$element.qty }, all: { $push: $$element.qty }, days: { $push: $day } } }")
            .has("s", lines())
            .has("t", [doc! {"_id": 7}, doc! {"_id": 8}, doc! {"_id": 9}])
            .writes([update("s", 1, doc! {"$set": {"lines.0.qty": 6}}), update("s", 2, doc! {"$pop": {"lines": 1}})])
            .expect("t", [
                doc! {"_id": 7, "n": 3, "units": 18, "all": [4, 6, 8], "days": [2, 1, 1]},
                doc! {"_id": 8, "n": 1, "units": 1, "all": [1], "days": [1]},
                doc! {"_id": 9, "n": 0, "units": 0, "all": [], "days": []},
            ]),
        Case::new("rows that a filter chooses", "aggregate: { source: { collection: '@s', where: { day: 1, $expr: { $gt: [$$element.qty, 1] } } }, target: '@t', match: { _id: 'lines.$[].item' }, by: { open: $$element.open }, into: by, set: { units: { $sum: $$element.qty }, whole: { $push: $$ROOT } } }")
            .has("s", lines())
            .has("t", [doc! {"_id": 7}, doc! {"_id": 8}])
            .writes([update("s", 1, doc! {"$unset": {"lines": 1}}), insert("s", doc! {"_id": 4, "day": 1, "lines": [{"item": 7, "qty": 2, "open": true}, {"item": 7, "qty": 1}]})])
            .expect("t", [
                doc! {"_id": 7, "by": [{"open": true, "units": 2, "whole": [{"_id": 4, "day": 1, "lines": [{"item": 7, "qty": 2, "open": true}, {"item": 7, "qty": 1}]}]}]},
                doc! {"_id": 8, "by": []},
            ]),
        Case::new("an element for each row", "collect: { source: '@s', target: '@t', match: { _id: 'lines.$[].item' }, into: all, element: { order: $_id, qty: $$element.qty }, slice: -3 }")
            .has("s", lines())
            .has("t", [doc! {"_id": 7}])
            .expect("t", [doc! {"_id": 7, "all": [{"order": 1, "qty": 8}, {"order": 2, "qty": 4}, {"order": 2, "qty": 5}]}]),
        // "Groups are told apart by the server's equality: 1 and 1.0 are one group (with the value of the lowest `_id`),
        // null and missing are one group"
        Case::new("groups by equality", &format!("{GROUPS}, by: {{ v: $v }}, into: in.groups, set: {{ n: {{ $sum: 1 }}, ids: {{ $push: $_id }} }} }}"))
            .has("s", values.iter().zip(0..).map(|(v, id)| doc! {"_id": 10 - id, "ref": 1, "v": v.clone()}).chain([doc! {"_id": 0, "ref": 1}]))
            .has("t", [doc! {"_id": 1, "in": {"mine": 1}}, doc! {"_id": 2}])
            .writes([update("s", 10, doc! {"$set": {"v": "z"}})])
            .expect("t", [
                doc! {"_id": 1, "in": {"mine": 1, "groups": [
                    {"v": null, "n": 2, "ids": [0, 8]}, {"v": 1.0, "n": 1, "ids": [9]}, {"v": "z", "n": 1, "ids": [10]},
                    {"v": {"x": 1}, "n": 2, "ids": [4, 7]}, {"v": [1, 2], "n": 1, "ids": [6]}, {"v": [1, 3], "n": 1, "ids": [5]},
                ]}},
                doc! {"_id": 2, "in": {"groups": []}},
            ]),
        // "Here `sort` is over the elements' own fields, as in `$push`, ties by the `by` values"
        Case::new("groups in order, some of them", &format!("{GROUPS}, by: {{ kind: $kind, ref: $ref }}, into: groups, sort: {{ n: -1 }}, slice: 2, let: {{ sum: {{ $sum: $rank }} }}, set: {{ n: {{ $sum: 1 }}, sum: {{ $add: [$$sum, 100] }} }} }}"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "groups": 5}])
            .expect("t", [
                doc! {"_id": 1, "groups": [{"kind": "x", "ref": 1, "n": 3, "sum": 103}, {"kind": "y", "ref": 1, "n": 2, "sum": 102}]},
                doc! {"_id": 2, "groups": []},
            ]),
        Case::new("the last group", &format!("{GROUPS}, by: {{ kind: $kind }}, into: groups, sort: {{ n: 1 }}, slice: -1, on_empty: unset, set: {{ n: {{ $sum: 1 }} }} }}"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "groups": 5}])
            .writes([delete("s", 4)])
            .expect("t", [doc! {"_id": 1, "groups": [{"kind": "x", "n": 3}]}, doc! {"_id": 2}]),
        // "`as: object` stores an object instead"
        Case::new("an object of groups", &format!("{GROUPS}, by: {{ v: $v }}, into: groups, as: object, sort: {{ n: -1 }}, set: {{ n: {{ $sum: 1 }} }} }}"))
            .has("s", [bson!("b"), bson!("b"), bson!(7), Bson::Int64(8), bson!(oid()), bson!("a.b")].into_iter().zip(0..).map(|(v, id)| doc! {"_id": id, "ref": 1, "v": v}))
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes([update("s", 5, doc! {"$set": {"v": "c"}})])
            .expect("t", [
                doc! {"_id": 1, "groups": {"b": {"n": 2}, "7": {"n": 1}, "8": {"n": 1}, "c": {"n": 1}, "65a000000000000000000001": {"n": 1}}},
                doc! {"_id": 2, "groups": {}},
            ]),
        // "values (…) of paths in `set` for a target, or an element, whose reference is null, dangles, is filtered out
        // or is an array; paths that it leaves out are unset"
        Case::new("otherwise", "copy: { source: { collection: '@s', where: { kind: x } }, target: '@t', match: { ref: _id }, set: { name: $rank, kind: $kind, gone: $rank }, otherwise: { name: none, kind: { in: [1] } } }")
            .has("s", s())
            .has("t", [bson!(5), Bson::Null, bson!(99), bson!(4), bson!([5]), bson!(3)].into_iter().zip(0..).map(|(r, id)| doc! {"_id": id, "ref": r}).chain([doc! {"_id": 6, "gone": 1}]))
            .writes([delete("s", 3), insert("t", doc! {"_id": 7}), update("t", 1, doc! {"$set": {"ref": 2}}), insert("t", doc! {"_id": 8, "ref": 99, "gone": 2})])
            .expect("t", [
                doc! {"_id": 0, "ref": 5, "name": 1, "kind": "x", "gone": 1},
                doc! {"_id": 1, "ref": 2, "name": 0, "kind": "x", "gone": 0},
                doc! {"_id": 2, "ref": 99, "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 3, "ref": 4, "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 4, "ref": [5], "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 5, "ref": 3, "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 6, "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 7, "name": "none", "kind": {"in": [1]}},
                doc! {"_id": 8, "ref": 99, "name": "none", "kind": {"in": [1]}},
            ]),
        Case::new("otherwise in elements", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].rank': $rank }, otherwise: { 'items.$[].rank': -1 } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [{"id": 5}, {"id": 99}, {"x": 1}, 7, {"id": [5]}]}])
            .writes([update("t", 1, doc! {"$push": {"items": {"id": null}}}), delete("s", 5)])
            .expect("t", [doc! {"_id": 1, "items": [{"id": 5, "rank": -1}, {"id": 99, "rank": -1}, {"x": 1, "rank": -1}, 7, {"id": [5], "rank": -1}, {"id": null, "rank": -1}]}]),
        Case::new("otherwise beside an array", "copy: { source: '@s', target: '@t', match: { 'ids.$[]': _id }, sort: { rank: 1 }, set: { rank: $rank }, otherwise: { rank: -1 } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ids": [3, 2]}, doc! {"_id": 2, "ids": [99]}, doc! {"_id": 3, "ids": []}, doc! {"_id": 4}])
            .writes([delete("s", 2)])
            .expect("t", [doc! {"_id": 1, "ids": [3, 2], "rank": 2}, doc! {"_id": 2, "ids": [99], "rank": -1}, doc! {"_id": 3, "ids": [], "rank": -1}, doc! {"_id": 4, "rank": -1}]),
        // "filters that exclude each other"; a document whose path is an array is neither.
        Case::new("instances of templates", "copy: { source: { collection: '@t', where: { kind: template } }, target: { collection: '@t', where: { kind: instance } }, match: { of: _id }, set: { name: $name } }")
            .has("t", [
                doc! {"_id": 1, "kind": "template", "name": "a"},
                doc! {"_id": 2, "kind": "instance", "of": 1},
                doc! {"_id": 3, "kind": ["template", "instance"], "of": 3, "name": "x"},
                doc! {"_id": 4, "kind": "instance", "of": 3, "name": "y"},
            ])
            .writes([update("t", 1, doc! {"$set": {"name": "b"}}), insert("t", doc! {"_id": 5, "kind": "instance", "of": 1})])
            .expect("t", [
                doc! {"_id": 1, "kind": "template", "name": "b"},
                doc! {"_id": 2, "kind": "instance", "of": 1, "name": "b"},
                doc! {"_id": 3, "kind": ["template", "instance"], "of": 3, "name": "x"},
                doc! {"_id": 4, "kind": "instance", "of": 3},
                doc! {"_id": 5, "kind": "instance", "of": 1, "name": "b"},
            ]),
        // `$ne` rules out what an equality demands. A task that gets an owner, or loses it, changes sides.
        Case::new("tasks of members", "copy: { source: { collection: '@t', where: { owner: null } }, target: { collection: '@t', where: { owner: { $ne: null } } }, match: { of: _id }, set: { name: $name } }")
            .has("t", [
                doc! {"_id": 1, "name": "a"},
                doc! {"_id": 2, "owner": 7, "of": 1},
                doc! {"_id": 3, "owner": null, "of": 1, "name": "own"},
                doc! {"_id": 4, "owner": [null], "of": 1, "name": "neither"},
                doc! {"_id": 5, "owner": 8, "of": 3},
                doc! {"_id": 6, "owner": 8, "of": 4, "name": "x"},
            ])
            .writes([update("t", 1, doc! {"$set": {"name": "b"}}), update("t", 3, doc! {"$set": {"owner": 9}})])
            .expect("t", [
                doc! {"_id": 1, "name": "b"},
                doc! {"_id": 2, "owner": 7, "of": 1, "name": "b"},
                doc! {"_id": 3, "owner": 9, "of": 1, "name": "b"},
                doc! {"_id": 4, "owner": [null], "of": 1, "name": "neither"},
                doc! {"_id": 5, "owner": 8, "of": 3},
                doc! {"_id": 6, "owner": 8, "of": 4},
            ]),
        // "By the same test two rules may own one path on targets that exclude each other"
        Case::new("a polymorphic reference", "copy: { source: '@s', target: { collection: '@t', where: { on: post } }, match: { ref: _id }, set: { title: $kind } }")
            .and("copy: { source: '@u', target: { collection: '@t', where: { on: page } }, match: { ref: _id }, set: { title: $name } }")
            .has("s", s())
            .has("u", [doc! {"_id": 5, "name": "five"}])
            .has("t", [doc! {"_id": 1, "on": "post", "ref": 5}, doc! {"_id": 2, "on": "page", "ref": 5}, doc! {"_id": 3, "on": "post", "ref": 4}, doc! {"_id": 4, "on": "page", "ref": 4}])
            .writes([update("t", 1, doc! {"$set": {"on": "page"}}), update("t", 2, doc! {"$set": {"on": "post"}}), update("t", 3, doc! {"$set": {"on": "page"}})])
            .expect("t", [
                doc! {"_id": 1, "on": "page", "ref": 5, "title": "five"},
                doc! {"_id": 2, "on": "post", "ref": 5, "title": "x"},
                doc! {"_id": 3, "on": "page", "ref": 4},
                doc! {"_id": 4, "on": "page", "ref": 4},
            ]),
        Case::new("no child", &collect("sort: { rank: 1 }, slice: 3"))
            .has("s", s())
            .has("t", [doc! {"_id": 2}, doc! {"_id": 3, "all": ["stale"]}])
            .writes([update("s", 5, doc! {"$set": {"ref": 2}}), update("s", 5, doc! {"$unset": {"ref": 1}})])
            .expect("t", [doc! {"_id": 2, "all": []}, doc! {"_id": 3, "all": []}]),
        // "(`on_empty: value | unset`)"
        // The server's answer once had another key than the request, so there was no input, and `check` agreed.
        Case::new("children of MinKey and MaxKey", "aggregate: { source: '@s', target: '@t', match: { _id: ref }, set: { n: { $count: {} } } }")
            .has("s", [doc! {"_id": 1, "ref": Bson::MaxKey}, doc! {"_id": 2, "ref": Bson::MinKey}, doc! {"_id": 3, "ref": Bson::MinKey}])
            .has("t", [doc! {"_id": Bson::MinKey}, doc! {"_id": Bson::MaxKey}])
            .expect("t", [doc! {"_id": Bson::MinKey, "n": 2}, doc! {"_id": Bson::MaxKey, "n": 1}]),
        Case::new("no input, on_empty: unset", &aggregate("{ n: { $sum: 1 }, set: { $addToSet: $rank } }", "on_empty: unset"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "n": 5}])
            .writes((1..=5).map(|id| delete("s", id)))
            .expect("t", [doc! {"_id": 1}, doc! {"_id": 2}]),
        Case::new("no child, on_empty: unset", &collect("on_empty: unset"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "all": [1]}])
            .writes((1..=5).map(|id| delete("s", id)))
            .expect("t", [doc! {"_id": 1}, doc! {"_id": 2}]),
        Case::new("a child that leaves source.where", "aggregate: { source: { collection: '@s', where: { kind: x } }, target: '@t', match: { _id: ref }, set: { n: { $sum: 1 } } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1}])
            .writes([update("s", 5, doc! {"$set": {"kind": "z"}}), update("s", 1, doc! {"$set": {"kind": "x"}}), update("s", 2, doc! {"$unset": {"kind": 1}})])
            .expect("t", [doc! {"_id": 1, "n": 2}]),
        Case::new("children by a composite key, whole documents", "collect: { source: '@s', target: '@t', match: { r: ref, k: kind }, into: in.all, element: $$ROOT, sort: { rank: 1 } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "r": 1, "k": "y", "in": {"mine": 1}}, doc! {"_id": 2, "r": 1, "k": null}])
            .writes([update("s", 4, doc! {"$set": {"more": [1]}})])
            .expect("t", [
                doc! {"_id": 1, "r": 1, "k": "y", "in": {"mine": 1, "all": [{"_id": 4, "ref": 1, "kind": "y", "more": [1]}, {"_id": 1, "ref": 1, "rank": 2, "kind": "y"}]}},
                doc! {"_id": 2, "r": 1, "k": null},
            ]),
    ]
}

/// A group's fields have plain names of their own, and groups are sorted by what they have.
#[test]
fn groups_are_checked() {
    for (rule, said) in [
        ("by: { a.b: $a }, into: x, set: { n: { $sum: 1 } }", "`a.b` cannot be a group's field"),
        ("by: { n: $a }, into: x, set: { n: { $sum: 1 } }", "`n` is a field of `by` and of `set`"),
        ("by: { a: $a }, into: x, set: { n: { $sum: 1 } }, sort: { at: 1 }", "no field `at` to sort by"),
        ("by: { a: $a, b: $b }, into: x, as: object, set: { n: { $sum: 1 } }", "needs one name for each group"),
        ("by: { a: $$NOW }, into: x, set: { n: { $sum: 1 } }", "`$$NOW` is refused"),
        ("by: { a: $a }, into: _id, set: { n: { $sum: 1 } }", "`_id` cannot be written"),
    ] {
        let rule = format!("  - {{ name: r, aggregate: {{ source: s, target: t, match: {{ _id: ref }}, {rule} }} }}");
        let report = refusal(&rule);
        assert!(report.contains(said), "{rule}: {report}");
    }
}

/// "any other type, an empty key or two values that make one key is a dead letter of that target"
#[tokio::test(flavor = "multi_thread")]
async fn groups_without_a_name_are_dead_letters_of_their_targets() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.run_command(doc! {"create": "s", "changeStreamPreAndPostImages": {"enabled": true}}).await.unwrap();
    let values = [bson!("fine"), bson!(1.5), bson!(""), bson!("7"), Bson::Null];
    let sources = values.into_iter().zip(1..).map(|(v, id)| doc! {"_id": id, "ref": id, "v": v});
    db.collection("s").insert_many(sources.chain([doc! {"_id": 9, "ref": 4, "v": 7}])).await.unwrap();
    db.collection("t").insert_many((1..=5).map(|id| doc! {"_id": id})).await.unwrap();
    let rules = format!(
        "  - {{ name: r, {}, by: {{ v: $v }}, into: groups, as: object, set: {{ n: {{ $sum: 1 }} }} }}, allow_scan: true }}",
        GROUPS.replace('@', "")
    );
    let daemon = Daemon::start(&test, &rules).await;
    daemon.settled().await;
    let fine = doc! {"_id": 1, "groups": {"fine": {"n": 1}}};
    assert_eq!(daemon::all(&db, "t").await[0], fine);
    assert_eq!(crate::support::cases::dead_letters(&test).await.len(), 4);
    db.collection::<Document>("s").delete_one(doc! {"_id": 9}).await.unwrap();
    db.collection::<Document>("s")
        .update_many(doc! {"_id": {"$in": [2, 3, 5]}}, doc! {"$set": {"v": 3_i64}})
        .await
        .unwrap();
    daemon.settled().await;
    let named = |id: i32, name: &str| doc! {"_id": id, "groups": {name: {"n": 1}}};
    let mended = [fine, named(2, "3"), named(3, "3"), named(4, "7"), named(5, "3")];
    assert_eq!(daemon::all(&db, "t").await, mended);
    dead_letters_left(&test, 0).await;
    daemon.stop().await;
}

/// A variable is used, has a name that the server can bind, and its expressions read nothing else.
#[test]
fn variables_of_let_are_checked() {
    for (rule, said) in [
        ("let: { n: { $sum: 1 } }, set: { x: { $sum: 1 } }", "the variable `n` is not used"),
        ("let: { N: { $sum: 1 } }, set: { x: { $add: [$$N, 1] } }", "`N` cannot be a variable's name"),
        ("let: { target: { $sum: 1 } }, set: { x: $$target }", "`target` cannot be a variable's name"),
        ("let: { n: { $sum: 1 } }, set: { x: { $add: [$$n, $y] } }", "reads a source field"),
        ("let: { n: { $sum: 1 } }, set: { x: { $add: [$$n, $$m] } }", "unknown variable `$$m`"),
        ("let: { total: { $sum: 1 } }, set: { x: { $multiply: [$$total, $$totl] } }", "did you mean `$$total`?"),
        ("let: { total: { $sum: 1 } }, set: { x: $$total, y: $$totl }", "did you mean `$$total`?"),
        ("set: { x: { $divide: [$$total, 2] } }", "unknown variable `$$total`"),
        ("set: { x: { $divide: [$$total, 2] } }", "define it in the rule's `let`: { total: { $sum: $price } }"),
        ("set: { x: { $count: 1 } }", "`$count` takes no argument"),
        ("set: { x: $$total }", "unknown variable `$$total`"),
        ("set: { x: { $sum: $$total } }", "define it in the rule's `let`"),
        ("set: { x: { $subtract: [$a, $b] } }", "accumulate them under names in `let`"),
        ("let: { n: { $summ: 1 } }, set: { x: $$n }", "did you mean `$sum`?"),
        ("let: { n: { $sum: 1 }, m: { $add: [$$n, 1] } }, set: { x: [$$n, $$m] }", "unknown accumulator `$add`"),
        ("set: { x: { $size: { $addToSet: $y } } }", "accumulate them under names in `let`"),
    ] {
        let report = refusal(&format!(
            "  - {{ name: r, aggregate: {{ source: s, target: t, match: {{ _id: ref }}, {rule} }} }}"
        ));
        assert!(report.contains(said), "{rule}: {report}");
    }
}

/// An element of the wrong shape in a source that only looks as if it had the key: its array has the id in a DBRef to
/// another collection. The server moved the condition on the element to the front, and the target became a dead letter.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_without_the_key_fails_for_nobody() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.run_command(doc! {"create": "s", "changeStreamPreAndPostImages": {"enabled": true}}).await.unwrap();
    db.collection("s")
        .insert_many([
            doc! {"_id": 1, "name": "fine", "refs": [{"$ref": "t", "$id": 1}]},
            doc! {"_id": 2, "name": [null], "refs": [{"$ref": "elsewhere", "$id": 1}, {"$ref": "t", "$id": 99}]},
        ])
        .await
        .unwrap();
    db.collection("t").insert_one(doc! {"_id": 1}).await.unwrap();
    let rules = "  - { name: r, allow_scan: true, collect: { source: s, target: t, match: { _id: 'refs.$[].$id' }, into: names, element: { $concat: [$name, '!'] } } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    assert_eq!(daemon::all(&db, "t").await, [doc! {"_id": 1, "names": ["fine!"]}]);
    assert!(crate::support::cases::dead_letters(&test).await.is_empty());
    daemon.stop().await;
}

/// Values that would fail, or come out wrong, if they were computed from more than the target's sources.
fn nothing_else_is_computed() -> Vec<Case> {
    let aggregate = |source: &str, rest: &str| format!("aggregate: {{ source: {source}, target: '@t', {rest} }}");
    let lines = |condition: &str| format!("{{ collection: '@s', where: {{ $expr: {condition} }} }}");
    vec![
        Case::new("no value of `let` for an element without a reference", &aggregate("'@s'", "match: { 'lines.$[].sku': sku }, let: { s: { $sum: $n } }, set: { 'lines.$[].share': { $divide: [$$s, $$targetElement.qty] } }"))
            .has("s", [doc! {"_id": 1, "sku": 1, "n": 4}])
            .writes([insert("t", doc! {"_id": 1, "lines": [{"sku": 1, "qty": 2}, {"text": "a note", "qty": 0}]})])
            .expect("t", [doc! {"_id": 1, "lines": [{"sku": 1, "qty": 2, "share": 2.0}, {"text": "a note", "qty": 0}]}]),
        Case::new("no value of `let` for a target without its set of keys", &aggregate("'@s'", "match: { 'likes.$[]': 'tags.$[]' }, let: { n: { $sum: 1 }, s: { $sum: $score } }, set: { mean: { $divide: [$$s, $$n] } }"))
            .has("s", [doc! {"_id": 1, "tags": ["a"], "score": 4}])
            .has("t", [doc! {"_id": 1, "likes": ["a"]}])
            .writes([insert("t", doc! {"_id": 2})])
            .expect("t", [doc! {"_id": 1, "likes": ["a"], "mean": 4.0}, doc! {"_id": 2}]),
        Case::new("an accumulator that fails without an operator in its operand", &aggregate("'@s'", "match: { _id: ref }, set: { all: { $mergeObjects: $attributes } }"))
            .has("s", [doc! {"_id": 1, "ref": 1, "attributes": {"a": 0}}])
            .has("t", [doc! {"_id": 1}])
            .writes([insert("s", doc! {"_id": 2, "ref": [1], "attributes": "text"}), update("s", 1, doc! {"$set": {"attributes.a": 1}})])
            .expect("t", [doc! {"_id": 1, "all": {"a": 1}}]),
        Case::new("a condition on an element that holds its key in an array", &aggregate(&lines("{ $gt: [{ $toInt: $$element.qty }, 0] }"), "match: { _id: 'lines.$[].product' }, set: { n: { $sum: 1 } }"))
            .has("t", [doc! {"_id": 7}])
            .writes([insert("s", doc! {"_id": 1, "lines": [{"product": [7], "qty": "x"}, {"product": 7, "qty": "1"}]})])
            .expect("t", [doc! {"_id": 7, "n": 1}]),
        // 47 bytes, to which nothing of denormd's own is added.
        Case::new("a condition on the whole source", &aggregate(&lines("{ $lte: [{ $bsonSize: $$ROOT }, $$target.max] }"), "match: { _id: 'lines.$[].product' }, set: { n: { $sum: 1 } }"))
            .has("t", [doc! {"_id": 7, "max": 50}])
            .writes([insert("s", doc! {"_id": 1, "lines": [{"product": 7}]})])
            .expect("t", [doc! {"_id": 7, "max": 50, "n": 1}]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_the_targets_own_sources_is_computed() {
    every_way(&nothing_else_is_computed()).await;
}

/// Waits until this number of dead letters is left.
async fn dead_letters_left(test: &denormd_fixture::TestDb, count: usize) -> Vec<Document> {
    let limit = Instant::now() + PATIENCE;
    loop {
        let left = crate::support::cases::dead_letters(test).await;
        if left.len() == count {
            return left;
        }
        assert!(Instant::now() < limit, "{left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// An expression that fails without input makes a dead letter of each target without a source, and of no other.
#[tokio::test(flavor = "multi_thread")]
async fn an_expression_that_fails_without_input_harms_no_other_target() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.run_command(doc! {"create": "s", "changeStreamPreAndPostImages": {"enabled": true}}).await.unwrap();
    db.collection("s")
        .insert_many([doc! {"_id": 1, "ref": 1, "v": 6}, doc! {"_id": 2, "ref": 3, "v": 8}])
        .await
        .unwrap();
    db.collection("t").insert_many((1..=4).map(|id| doc! {"_id": id})).await.unwrap();
    let rules = "  - { name: r, aggregate: { source: s, target: t, match: { _id: ref }, let: { sum: { $sum: $v }, n: { $sum: 1 } }, set: { mean: { $divide: [$$sum, $$n] } } }, allow_scan: true }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    db.collection::<Document>("s").update_one(doc! {"_id": 1}, doc! {"$set": {"v": 7}}).await.unwrap();
    db.collection::<Document>("s").insert_one(doc! {"_id": 3, "ref": 4, "v": 2}).await.unwrap();
    daemon.settled().await;
    let expected =
        [doc! {"_id": 1, "mean": 7.0}, doc! {"_id": 2}, doc! {"_id": 3, "mean": 8.0}, doc! {"_id": 4, "mean": 2.0}];
    assert_eq!(daemon::all(&db, "t").await, expected);
    // Those of the others go when they are tried again.
    let left = dead_letters_left(&test, 1).await;
    assert_eq!(left[0].get_document("_id").unwrap().get_array("key").unwrap(), &vec![bson!(2)], "{left:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_is_a_function_of_the_data() {
    every_way(&order()).await;
}

fn destroying() -> Vec<Case> {
    let delete_rule =
        "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name }, on_missing: delete }";
    vec![
        // "`on_missing` is for a reference that dangles." / "wait a grace period and read again"
        Case::new("re-pointed within the grace period", delete_rule)
            .has("s", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}])
            .has("t", [doc! {"_id": 1, "ref": 1}])
            .writes([Write::Burst(vec![delete("s", 1), update("t", 1, doc! {"$set": {"ref": 2}})])])
            .expect("t", [doc! {"_id": 1, "ref": 2, "name": "b"}]),
        Case::new("leaves target.where within the grace period", "copy: { source: '@s', target: { collection: '@t', where: { open: true } }, match: { ref: _id }, set: { name: $name }, on_missing: delete }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "ref": 1, "open": true}])
            .writes([Write::Burst(vec![delete("s", 1), update("t", 1, doc! {"$set": {"open": false}})])])
            .expect("t", [doc! {"_id": 1, "ref": 1, "open": false, "name": "a"}])
            .on_history(),
        // A source whose element is an empty array once counted as a missing one, and `check` agreed.
        Case::new("into, elements that are empty arrays", "copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: tags, element: $tags, on_missing: \"null\" }")
            .has("s", [doc! {"_id": 1, "tags": []}, doc! {"_id": 2, "tags": {}}, doc! {"_id": 3}])
            .has("t", [doc! {"_id": 1, "refs": [1, 2, 3, 9]}])
            .expect("t", [doc! {"_id": 1, "refs": [1, 2, 3, 9], "tags": [[], {}, Bson::Null]}]),
        // "In `into`, unset leaves the element out and null puts null."
        Case::new("into, null for what dangles, nothing for null", "copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: names, element: $name, on_missing: \"null\" }")
            .has("s", [doc! {"_id": 1, "name": "a"}])
            .has("t", [doc! {"_id": 1, "refs": [9, null, 1]}])
            .expect("t", [doc! {"_id": 1, "refs": [9, null, 1], "names": [null, "a"]}]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn on_missing_is_for_a_reference_that_dangles() {
    every_way(&destroying()).await;
}

/// "`remove` and `delete` destroy, so they … wait a grace period"
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_destroyed_before_the_grace_period_is_over() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("s").insert_many([doc! {"_id": 1}, doc! {"_id": 2}]).await.unwrap();
    db.collection("t").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    let rule = "  - { name: r, allow_scan: true, copy: { source: s, target: t, match: { ref: _id }, set: { x: $x }, on_missing: delete } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let since = Instant::now();
    db.collection::<Document>("s").delete_one(doc! {"_id": 1}).await.unwrap();
    while !all(&db, "t").await.is_empty() {
        assert!(since.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(since.elapsed() >= daemon.context().limits.destroy_grace, "{:?}", since.elapsed());
    daemon.stop().await;
}

/// "A source collection that is dropped or renamed away detaches its rules: fields stay": also after a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_collection_that_goes_leaves_the_fields() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    for name in ["dropped", "renamed"] {
        db.collection(name).insert_one(doc! {"_id": 1, "name": "a"}).await.unwrap();
    }
    db.collection("t").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    let rules = "
  - { name: d, allow_scan: true, copy: { source: dropped, target: t, match: { ref: _id }, set: { d: $name } } }
  - { name: r, allow_scan: true, copy: { source: renamed, target: t, match: { ref: _id }, set: { r: $name }, on_missing: delete } }
  - { name: n, allow_scan: true, aggregate: { source: dropped, target: t, match: { ref: _id }, set: { n: { $sum: 1 } } } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    db.collection::<Document>("dropped").drop().await.unwrap();
    let rename = |from: &str, to: &str| doc! {"renameCollection": format!("{}.{from}", test.name), "to": format!("{}.{to}", test.name), "dropTarget": true};
    let admin = test.client.database("admin");
    admin.run_command(rename("renamed", "elsewhere")).await.unwrap();
    daemon.settled().await;
    let kept = [doc! {"_id": 1, "ref": 1, "d": "a", "r": "a", "n": 1}];
    let shown = crate::support::cases::shown;
    assert_eq!(shown(&all(&db, "t").await), shown(&kept));
    daemon.stop().await;
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    assert_eq!(shown(&all(&db, "t").await), shown(&kept));
    // A rename onto a watched collection, as by `$out` and a restore, replaces the whole source.
    db.collection("new").insert_one(doc! {"_id": 1, "name": "new"}).await.unwrap();
    admin.run_command(rename("new", "renamed")).await.unwrap();
    daemon.settled().await;
    // The rule counts its removals first.
    daemon.sources_are_back().await;
    daemon.settled().await;
    assert_eq!(all(&db, "t").await[0].get_str("r").unwrap(), "new");
    db.collection::<Document>("other").insert_one(doc! {"_id": 1, "name": "out"}).await.unwrap();
    let out = doc! {"aggregate": "other", "pipeline": [{"$out": "renamed"}], "cursor": {}};
    db.run_command(out).await.unwrap();
    daemon.settled().await;
    daemon.sources_are_back().await;
    daemon.settled().await;
    assert_eq!(all(&db, "t").await[0].get_str("r").unwrap(), "out");
    daemon.stop().await;
}

/// "`target.where`: … its paths count as reads in the cycle graph."
#[test]
fn paths_of_target_where_count_as_reads() {
    let own = "  - { name: r, copy: { source: s, target: { collection: t, where: { flag: true } }, match: { ref: _id }, set: { flag: $flag } } }";
    assert!(refusal(own).contains("`flag`"), "{}", refusal(own));
    let circle = |filter: &str| {
        format!(
            "
  - {{ name: one, copy: {{ source: s, target: {{ collection: t, where: {{ {filter} }} }}, match: {{ ref: _id }}, set: {{ a: $v }} }} }}
  - {{ name: two, collect: {{ source: t, target: u, match: {{ _id: owner }}, into: all, element: $a }} }}
  - {{ name: three, copy: {{ source: u, target: t, match: {{ owner: _id }}, set: {{ flag: $all }} }} }}"
        )
    };
    let said = refusal(&circle("flag: { $exists: true }"));
    assert!(said.contains("circle") && ["one", "two", "three"].iter().all(|name| said.contains(name)), "{said}");
    accepted(&circle("other: 1"));
}

/// "A circle is only a circle if data can run in it"
#[test]
fn filters_that_exclude_each_other_break_a_circle() {
    let own = |source: &str, target: &str| {
        format!(
            "  - {{ name: r, copy: {{ source: {{ collection: t, where: {source} }}, target: {{ collection: t, where: {target} }}, match: {{ of: _id }}, set: {{ name: $name }} }} }}"
        )
    };
    accepted(&own("{ kind: a }", "{ kind: b }"));
    accepted(&own("{ kind: { $in: [a, c] } }", "{ x: 1, $and: [{ kind: { $eq: b } }] }"));
    accepted(&own("{ owner: null }", "{ owner: { $ne: null } }"));
    accepted(&own("{ kind: { $nin: [a, b, c] } }", "{ kind: { $in: [a, b] } }"));
    for (source, target) in [
        ("{ kind: a }", "{ kind: { $in: [a, b] } }"),
        ("{ kind: 1 }", "{ kind: 1.0 }"),
        ("{ kind: { $in: [a, b] } }", "{ kind: { $ne: a } }"),
        ("{ owner: null }", "{ owner: { $exists: true } }"),
        ("{ owner: { $ne: null } }", "{ owner: { $ne: null } }"),
        ("{ kind: a }", "{ kind: [b] }"),
        ("{ kind: a }", "{ other: b }"),
        ("{ name: a }", "{ name: b }"),
    ] {
        let said = refusal(&own(source, target));
        let reasons = ["circle", "feeds itself", "reads it to find its source"];
        assert!(reasons.iter().any(|reason| said.contains(reason)), "{source} {target}: {said}");
    }
    let two = |one: &str, other: &str| {
        format!(
            "
  - {{ name: one, copy: {{ source: s, target: {{ collection: t, where: {one} }}, match: {{ ref: _id }}, set: {{ title: $v }} }} }}
  - {{ name: two, copy: {{ source: u, target: {{ collection: t, where: {other} }}, match: {{ ref: _id }}, set: {{ title: $v }} }} }}"
        )
    };
    accepted(&two("{ kind: post }", "{ kind: page }"));
    for (one, other) in [("{ kind: post }", "{ kind: { $in: [page, post] } }"), ("{ kind: post }", "{}")] {
        let said = refusal(&two(one, other));
        assert!(said.contains("already owned by rule `one`"), "{said}");
    }
    // The filters of such rules demand that `items` is no array, and their statements that it is one.
    let elements = |name: &str, kind: &str| {
        format!(
            "\n  - {{ name: {name}, copy: {{ source: {name}s, target: {{ collection: feeds, where: {{ items.kind: {kind} }} }}, match: {{ 'items.$[].ref': _id }}, set: {{ 'items.$[].title': $v }} }} }}"
        )
    };
    let said = refusal(&(elements("one", "post") + &elements("two", "page")));
    assert!(said.contains("already owned by rule `one`"), "{said}");
}

/// A query compares with texts, and takes `$[]` for the name of a field: such rules matched nothing, without a word.
#[test]
fn a_filter_that_is_written_like_an_expression_is_refused() {
    let of = |filter: &str| {
        format!(
            "  - {{ name: r, copy: {{ source: {{ collection: s, where: {filter} }}, target: t, match: {{ ref: _id }}, set: {{ a: $a }} }} }}"
        )
    };
    for (filter, said) in [
        ("{ ts: { $gt: $$target.ls } }", "`$$target.ls` is an expression"),
        ("{ $or: [{ ts: $$NOW }] }", "`$$NOW` is an expression"),
        ("{ parts: { $elemMatch: { at: { $lt: $$ROOT.at } } } }", "`$$ROOT.at` is an expression"),
        ("{ 'parts.$[].qty': 1 }", "write `parts.qty`"),
        ("{ 'lines[].x': 1 }", "write `lines.x`"),
        ("{ $and: [{ 'lines.$.x': 1 }] }", "write `lines.x`"),
        ("{ parts: { $elemMatch: { 'of.$[].x': 1 } } }", "write `of.x`"),
    ] {
        let text = refusal(&of(filter));
        assert!(text.contains(said), "{filter}: {text}");
    }
    for filter in ["{ price: $5 }", "{ note: $$$ }", "{ 'parts.0.qty': 1 }", "{ a: { $in: [$b, $$x] } }"] {
        accepted(&of(filter));
    }
}

/// Because of a circle elsewhere, these two rules demanded that `tags` is no array, and copied nothing.
#[test]
fn rules_outside_of_a_circle_keep_their_filters() {
    let tagged = "
  - { name: one, copy: { source: s, target: { collection: posts, where: { tags: featured } }, match: { ref: _id }, set: { author: $v } } }
  - { name: two, copy: { source: { collection: posts, where: { tags: news } }, target: u, match: { post: _id }, set: { author: $author } } }
";
    let circle = "  - { name: r, copy: { source: { collection: t, where: { kind: a } }, target: { collection: t, where: { kind: b } }, match: { of: _id }, set: { name: $name } } }";
    let compiled = |rules: &str| plan::compile(&loaded(rules).config, None).unwrap();
    let (alone, beside) = (compiled(tagged), compiled(&(tagged.to_owned() + circle)));
    for nth in 0..2 {
        assert_eq!(beside.rules[nth].definition, alone.rules[nth].definition);
    }
    assert_eq!(beside.feeds[0], alone.feeds[0]);
    assert!(beside.rules[2].source.filter.as_ref().unwrap().contains_key("$and"));
}

/// "missing is not null": a rule that writes null where it wrote nothing was taken for the same rule, and not backfilled.
#[test]
fn otherwise_null_is_another_definition_than_none() {
    let definition = |otherwise: &str| {
        let rule = format!(
            "  - {{ name: r, copy: {{ source: s, target: t, match: {{ ref: _id }}, set: {{ a: $a, b: $b }}, otherwise: {{ {otherwise} }} }} }}"
        );
        plan::compile(&loaded(&rule).config, None).unwrap().rules[0].definition.clone()
    };
    assert_ne!(definition("a: 1"), definition("a: 1, b: null"));
    assert_eq!(definition("a: 1, b: null"), definition("a: 1, b: { $literal: null }"));
}

/// A rule feeds the rules that read what it removes. An edge that would close a circle is left out: the removals cascade.
#[test]
fn what_a_rule_removes_feeds_its_readers() {
    let feeds = |rules: &str| {
        let plan = plan::compile(&loaded(rules).config, None).unwrap();
        (plan.feeds.iter().map(Vec::len).collect::<Vec<_>>(), plan.cascades, plan.longest_chain())
    };
    let reader = "  - { name: reader, copy: { source: t, target: u, match: { ref: _id }, set: { a: $unowned } } }\n";
    let elements = "  - { name: elements, collect: { source: t, target: u, match: { _id: owner }, into: all, element: $parts.note } }\n";
    let of = |source: &str, reference: &str, path: &str, more: &str| {
        format!(
            "  - {{ name: one, copy: {{ source: {source}, target: t, match: {{ {reference}: _id }}, set: {{ {path}: $v }}{more} }} }}\n"
        )
    };
    let whole = |more| of("s", "ref", "b", more);
    let element = |more| of("s", "'parts.$[].id'", "'parts.$[].b'", more);
    assert_eq!(feeds(&(whole("") + reader)), (vec![0, 0], false, 1));
    assert_eq!(feeds(&(whole(", on_missing: delete") + reader)), (vec![1, 0], false, 2));
    assert_eq!(feeds(&(element("") + elements)), (vec![0, 0], false, 1));
    assert_eq!(feeds(&(element(", on_missing: remove") + elements)), (vec![1, 0], false, 2));
    assert_eq!(feeds(&(element(", on_missing: remove") + reader)), (vec![0, 0], false, 1));
    let cascade = of("t", "parent", "b", ", on_missing: delete");
    assert_eq!(feeds(&(cascade + reader)), (vec![1, 0], true, 66));
}

/// "Null pre-images coalesce into one sweep of that rule. A recreated collection has lost the option."
#[tokio::test(flavor = "multi_thread")]
async fn without_its_pre_image_a_change_sweeps_the_rule() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("t").insert_many((0..50).map(|id| doc! {"_id": id, "code": id})).await.unwrap();
    db.collection("s").insert_many((0..500).map(|id| doc! {"_id": id, "code": id % 50, "v": 1})).await.unwrap();
    let rules = "
  - { name: n, allow_scan: true, aggregate: { source: s, target: t, match: { code: code }, set: { n: { $sum: $v } } } }
  - { name: first, allow_scan: true, copy: { source: s, target: t, match: { code: code }, set: { first: $_id } } }
  - { name: all, allow_scan: true, collect: { source: s, target: t, match: { code: code }, into: all, element: $_id, slice: 1 } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    let check = async |n: i32, first: Option<i32>| {
        daemon.settled().await;
        for (id, found) in (0..).zip(all(&db, "t").await) {
            let first = first.map(|first| first + id);
            let mut expected = doc! {"_id": id, "code": id, "n": n, "all": first.into_iter().collect::<Vec<_>>()};
            expected.extend(first.map(|first| ("first".to_owned(), first.into())));
            assert_eq!(crate::support::cases::shown(&[found]), crate::support::cases::shown(&[expected]));
        }
    };
    check(10, Some(0)).await;
    let generation = async || {
        let states =
            test.beside("state").collection::<Document>("rules").find_one(doc! {"_id.rule": "n"}).await.unwrap();
        states.unwrap().get_i64("generation").unwrap()
    };
    let before = generation().await;
    db.run_command(doc! {"collMod": "s", "changeStreamPreAndPostImages": {"enabled": false}}).await.unwrap();
    let s = db.collection::<Document>("s");
    s.delete_many(doc! {"_id": {"$lt": 100}}).await.unwrap();
    check(8, Some(100)).await;
    let sweeps = generation().await - before;
    assert!((1..=20).contains(&sweeps), "{sweeps} sweeps for 100 deletes");
    // Keys that change, and values that change while keys do not.
    s.update_many(doc! {"_id": {"$gte": 100, "$lt": 150}}, doc! {"$set": {"code": -1}}).await.unwrap();
    s.update_many(doc! {"_id": {"$gte": 150, "$lt": 200}}, doc! {"$set": {"v": 2}}).await.unwrap();
    check(8, Some(150)).await;
    // Dropped, and created again by its first insert: without the option.
    s.drop().await.unwrap();
    s.insert_many((0..50).map(|id| doc! {"_id": 1000 + id, "code": id, "v": 1})).await.unwrap();
    s.update_many(doc! {"_id": {"$gte": 0}}, doc! {"$set": {"v": 7}}).await.unwrap();
    daemon.settled().await;
    for rule in ["n", "first", "all"] {
        daemon.ask(rule).await;
    }
    let mut progress = daemon.progress();
    progress.wait_for(|progress| progress.in_state(RuleState::is_stopped).is_empty()).await.unwrap();
    check(7, Some(1000)).await;
    s.delete_many(doc! {}).await.unwrap();
    check(0, None).await;
    let context = daemon::context(&daemon::config(&test, rules)).await;
    let found = denormd_engine::preflight::check(&context.server, &context.plan).await.unwrap();
    assert!(found.iter().all(|finding| finding.message.contains("pre-images")) && !found.is_empty(), "{found:?}");
    daemon.stop().await;
}

/// "restoring a backup, or dropping the one side on purpose, must not wipe the targets": also with its whole database.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_database_that_is_dropped_leaves_the_fields() {
    let test = denormd_fixture::database().await;
    let (db, other) = (test.database(), test.beside("other"));
    let restore = async || other.collection("s").insert_many([doc! {"_id": 1, "name": "a"}]).await.map(drop).unwrap();
    restore().await;
    db.collection("t").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    let source = other.name();
    let rule = format!(
        "  - {{ name: r, allow_scan: true, copy: {{ source: {source}.s, target: t, match: {{ ref: _id }}, set: {{ name: $name }} }} }}"
    );
    let daemon = Daemon::start(&test, &rule).await;
    daemon.settled().await;
    other.drop().await.unwrap();
    daemon.settled().await;
    assert_eq!(all(&db, "t").await, [doc! {"_id": 1, "ref": 1, "name": "a"}]);
    // Restored from a backup, with another change: followed as before.
    restore().await;
    other.collection::<Document>("s").update_one(doc! {}, doc! {"$set": {"name": "b"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(all(&db, "t").await, [doc! {"_id": 1, "ref": 1, "name": "b"}]);
    daemon.stop().await;
}
