//! The oracle against the contract's "exact meaning", example by example, with expected results written by hand.

use bson::{Bson, Document, doc, oid::ObjectId};
use denormd_oracle::{Oracle, World, differences, expected};

/// The targets `t` after one rule, given the sources `s`.
fn targets(rule: Document, sources: &[Document], targets: &[Document]) -> Vec<Document> {
    let rule = doc! {"name": "r"}.into_iter().chain(rule).collect();
    let world = World::from([("s".into(), sources.to_vec()), ("t".into(), targets.to_vec())]);
    expected(&[rule], "shop", &world).unwrap().world["t"].clone()
}

fn target(rule: Document, sources: &[Document], target: Document) -> Document {
    let mut targets = targets(rule, sources, &[target]);
    assert_eq!(targets.len(), 1);
    targets.remove(0)
}

fn copy(rest: Document) -> Document {
    doc! {"copy": doc! {"source": "s", "target": "t"}.into_iter().chain(rest).collect::<Document>()}
}

fn scalar(rest: Document) -> Document {
    copy(doc! {"match": {"ref": "_id"}, "set": {"name": "$name"}}.into_iter().chain(rest).collect())
}

fn part_names() -> Document {
    copy(doc! {"match": {"parts.$[].id": "_id"}, "set": {"parts.$[].name": "$name"}})
}

fn part_info(on_missing: &str) -> Document {
    copy(doc! {
        "match": {"parts.$[]": "_id"}, "into": "info", "element": {"id": "$_id", "name": "$name"}, "on_missing": on_missing,
    })
}

#[test]
fn keys_match_across_number_types_and_nested() {
    for key in [Bson::Int32(1), Bson::Int64(1), Bson::Double(1.0), Bson::Decimal128("1".parse().unwrap())] {
        let found = target(scalar(doc! {}), &[doc! {"_id": 1, "name": "a"}], doc! {"_id": 0, "ref": key});
        assert_eq!(found.get_str("name").unwrap(), "a");
    }
    let found = target(scalar(doc! {}), &[doc! {"_id": {"k": [1]}, "name": "a"}], doc! {"_id": 0, "ref": {"k": [1.0]}});
    assert_eq!(found.get_str("name").unwrap(), "a");
}

#[test]
fn null_missing_and_arrays_refer_to_nothing_even_under_keep_and_null() {
    let sources = [doc! {"_id": Bson::Null, "name": "null"}, doc! {"_id": 1, "name": "a"}];
    for on_missing in ["unset", "null", "keep", "delete"] {
        for mut stored in [
            doc! {"_id": 0, "name": "old"},
            doc! {"_id": 0, "ref": Bson::Null, "name": "old"},
            doc! {"_id": 0, "ref": [1], "name": "old"},
        ] {
            let found = target(scalar(doc! {"on_missing": on_missing}), &sources, stored.clone());
            stored.remove("name");
            assert_eq!(found, stored);
        }
    }
}

#[test]
fn a_path_without_brackets_does_not_look_into_arrays() {
    let rule = copy(doc! {"match": {"parts.id": "_id"}, "set": {"name": "$name"}});
    let stored = doc! {"_id": 0, "parts": [{"id": 1}]};
    assert_eq!(target(rule, &[doc! {"_id": 1, "name": "a"}], stored.clone()), stored);
    let rule = copy(doc! {"match": {"ref": "code"}, "set": {"name": "$name"}});
    let stored = doc! {"_id": 0, "ref": 1};
    assert_eq!(target(rule, &[doc! {"_id": 1, "code": [1], "name": "a"}], stored.clone()), stored);
}

#[test]
fn dangling_references() {
    let stored = doc! {"_id": 0, "ref": 9, "name": "old"};
    let of = |on_missing: &str| targets(scalar(doc! {"on_missing": on_missing}), &[], std::slice::from_ref(&stored));
    assert_eq!(of("unset"), [doc! {"_id": 0, "ref": 9}]);
    assert_eq!(of("null"), [doc! {"_id": 0, "ref": 9, "name": Bson::Null}]);
    assert_eq!(of("keep"), std::slice::from_ref(&stored));
    assert!(of("delete").is_empty());
    let rule = copy(doc! {"match": {"p.$[].id": "_id"}, "set": {"p.$[].name": "$name"}, "on_missing": "remove"});
    let stored = doc! {"_id": 0, "p": [{"id": 9}, {"id": 1}, {"id": Bson::Null}, {"id": 8}]};
    let wanted = doc! {"_id": 0, "p": [{"id": 1, "name": "a"}, {"id": Bson::Null}]};
    assert_eq!(target(rule, &[doc! {"_id": 1, "name": "a"}], stored), wanted);
}

#[test]
fn a_missing_value_unsets_and_null_is_a_value() {
    let stored = doc! {"_id": 0, "ref": 1, "name": "old"};
    assert_eq!(target(scalar(doc! {}), &[doc! {"_id": 1}], stored.clone()), doc! {"_id": 0, "ref": 1});
    let null = doc! {"_id": 1, "name": Bson::Null};
    assert_eq!(target(scalar(doc! {}), &[null], stored), doc! {"_id": 0, "ref": 1, "name": Bson::Null});
}

#[test]
fn brackets_bind_the_element_that_matched() {
    let sources = [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2, "name": "b"}];
    let stored =
        doc! {"_id": 0, "parts": [{"id": 2}, 2, {"id": 3, "name": "old"}, {"id": 1}, {"id": 2}, {"name": "old"}]};
    let wanted = doc! {"_id": 0, "parts": [
        {"id": 2, "name": "b"}, 2, {"id": 3}, {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {},
    ]};
    assert_eq!(target(part_names(), &sources, stored), wanted);
    let scalar = doc! {"_id": 0, "parts": {"id": 1}};
    assert_eq!(target(part_names(), &sources, scalar.clone()), scalar);
}

#[test]
fn nested_arrays_and_a_path_with_the_shorter_prefix() {
    let rule = copy(doc! {
        "match": {"a.$[].b.$[].c": "_id"},
        "set": {"a.$[].b.$[].n": "$name", "a.$[].first": "$name", "first": "$name"},
        "sort": {"rank": -1},
    });
    let sources = [doc! {"_id": 1, "name": "x", "rank": 1}, doc! {"_id": 2, "name": "y", "rank": 2}];
    let stored = doc! {"_id": 0, "a": [{"b": [{"c": 1}]}, {"b": [{"c": 1}, {"c": 2}]}, {}]};
    let wanted = doc! {
        "_id": 0,
        "a": [{"b": [{"c": 1, "n": "x"}], "first": "x"}, {"b": [{"c": 1, "n": "x"}, {"c": 2, "n": "y"}], "first": "y"}, {}],
        "first": "y",
    };
    assert_eq!(target(rule, &sources, stored), wanted);
}

#[test]
fn of_several_sources_sort_picks_then_the_least_id() {
    let sources = [
        doc! {"_id": 3, "code": "k", "name": "three", "rank": 1},
        doc! {"_id": 2, "code": "k", "name": "two", "rank": 1},
        doc! {"_id": 1, "code": "k", "name": "one", "rank": 2},
    ];
    let of = |sort: Document| {
        let rule = copy(doc! {"match": {"ref": "code"}, "set": {"name": "$name"}, "sort": sort});
        target(rule, &sources, doc! {"_id": 0, "ref": "k"}).get_str("name").unwrap().to_owned()
    };
    assert_eq!(of(doc! {}), "one");
    assert_eq!(of(doc! {"rank": 1}), "two");
    assert_eq!(of(doc! {"rank": -1}), "one");
}

#[test]
fn into_keeps_the_ids_order_and_duplicates() {
    let sources = [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2}];
    let stored = doc! {"_id": 0, "parts": [2, 9, 1, 2, Bson::Null], "info": "old"};
    let wanted =
        doc! {"_id": 0, "parts": [2, 9, 1, 2, Bson::Null], "info": [{"id": 2}, {"id": 1, "name": "a"}, {"id": 2}]};
    assert_eq!(target(part_info("unset"), &sources, stored.clone()), wanted);
    let info = target(part_info("null"), &sources, stored);
    assert_eq!(info.get_array("info").unwrap()[1], Bson::Null);
    assert_eq!(info.get_array("info").unwrap().len(), 4);
    for parts in [Bson::Null, Bson::Int32(1)] {
        let stored = doc! {"_id": 0, "parts": parts.clone(), "info": []};
        assert_eq!(target(part_info("unset"), &sources, stored), doc! {"_id": 0, "parts": parts});
    }
    let empty = doc! {"_id": 0, "parts": []};
    assert_eq!(target(part_info("unset"), &sources, empty), doc! {"_id": 0, "parts": [], "info": []});
}

#[test]
fn a_dbref_must_name_the_source() {
    let rule = || copy(doc! {"match": {"ref.$id": "_id"}, "set": {"name": "$name"}});
    let of = |reference: Document| {
        target(rule(), &[doc! {"_id": 1, "name": "a"}], doc! {"_id": 0, "ref": reference}).contains_key("name")
    };
    assert!(of(doc! {"$ref": "s", "$id": 1}));
    assert!(of(doc! {"$ref": "s", "$id": 1, "$db": "shop"}));
    assert!(!of(doc! {"$ref": "other", "$id": 1}));
    assert!(!of(doc! {"$ref": "s", "$id": 1, "$db": "other"}));
    assert!(!of(doc! {"$id": 1}));
}

#[test]
fn composite_keys_bind_one_element() {
    let rule = copy(doc! {"match": {"p.$[].t": "tenant", "p.$[].k": "code"}, "set": {"p.$[].n": "$name"}});
    let sources = [doc! {"_id": 1, "tenant": 1, "code": "x", "name": "a"}, doc! {"_id": 2, "tenant": 2, "name": "b"}];
    let stored = doc! {"_id": 0, "p": [{"t": 1, "k": "x"}, {"t": 2, "k": "x"}, {"t": 2}]};
    let wanted = doc! {"_id": 0, "p": [{"t": 1, "k": "x", "n": "a"}, {"t": 2, "k": "x"}, {"t": 2}]};
    assert_eq!(target(rule, &sources, stored), wanted);
}

#[test]
fn source_held_references_and_their_element() {
    let rule = copy(doc! {
        "match": {"_id": "parts.$[].id"},
        "sort": {"rank": 1},
        "set": {"product": "$name", "role": "$$element.role"},
    });
    let sources = [
        doc! {"_id": 1, "name": "P", "rank": 2, "parts": [{"id": 7, "role": "x"}]},
        doc! {"_id": 2, "name": "Q", "rank": 1, "parts": [{"id": 8}, {"id": 7.0, "role": "y"}, {"id": 7, "role": "z"}]},
    ];
    let found =
        targets(rule, &sources, &[doc! {"_id": 7}, doc! {"_id": 8, "role": "old"}, doc! {"_id": 9, "product": 1}]);
    assert_eq!(found, [doc! {"_id": 7, "product": "Q", "role": "y"}, doc! {"_id": 8, "product": "Q"}, doc! {"_id": 9}]);
}

#[test]
fn key_types() {
    let id = ObjectId::from_bytes([7; 12]);
    let of = |key_type: &str, source: Bson, reference: Bson| {
        let found = target(
            scalar(doc! {"key_type": key_type}),
            &[doc! {"_id": source, "name": "a"}],
            doc! {"_id": 0, "ref": reference},
        );
        found.contains_key("name")
    };
    assert!(of("objectId", id.into(), id.to_hex().into()));
    assert!(of("objectId", id.into(), id.into()));
    assert!(!of("objectId", "abc".into(), "abc".into()));
    assert!(of("string", id.to_hex().into(), id.into()));
    assert!(of("string", "12".into(), Bson::Int64(12)));
    assert!(!of("string", 12.into(), 12.into()));
}

#[test]
fn filters_on_either_side() {
    let rule = scalar(doc! {
        "source": {"collection": "s", "where": {"status": "published"}},
        "target": {"collection": "t", "where": {"open": true}},
    });
    let sources =
        [doc! {"_id": 1, "name": "a", "status": "published"}, doc! {"_id": 2, "name": "b", "status": "draft"}];
    let stored = [
        doc! {"_id": 0, "ref": 1, "open": true},
        doc! {"_id": 1, "ref": 2, "open": true, "name": "old"},
        doc! {"_id": 2, "ref": 1, "open": false, "name": "kept"},
    ];
    let wanted = [
        doc! {"_id": 0, "ref": 1, "open": true, "name": "a"},
        doc! {"_id": 1, "ref": 2, "open": true},
        stored[2].clone(),
    ];
    assert_eq!(targets(rule, &sources, &stored), wanted);
}

#[test]
fn once_fills_and_never_changes() {
    let rule = || scalar(doc! {"once": true});
    let sources = [doc! {"_id": 1, "name": "new"}];
    let fill = doc! {"_id": 0, "ref": 1};
    assert_eq!(target(rule(), &sources, fill), doc! {"_id": 0, "ref": 1, "name": "new"});
    for kept in [doc! {"_id": 0, "ref": 1, "name": "old"}, doc! {"_id": 0, "ref": 9, "name": "old"}, doc! {"_id": 0}] {
        assert_eq!(target(rule(), &sources, kept.clone()), kept);
    }
}

#[test]
fn a_copied_value_is_data() {
    let sources = [doc! {"_id": 1, "name": "$secret"}];
    let rule = scalar(doc! {"set": {"a.b": {"n": "$name", "gone": "$nope"}, "root": "$$ROOT", "five": 5}});
    let wanted = doc! {
        "_id": 0, "ref": 1, "a": {"b": {"n": "$secret"}}, "root": {"_id": 1, "name": "$secret"}, "five": 5,
    };
    assert_eq!(target(rule, &sources, doc! {"_id": 0, "ref": 1}), wanted);
}

#[test]
fn a_write_that_the_server_refuses_leaves_the_target() {
    let rule = scalar(doc! {"set": {"a.b": "$name", "name": "$name"}});
    let stored = doc! {"_id": 0, "ref": 1, "a": 5};
    assert_eq!(target(rule, &[doc! {"_id": 1, "name": "a"}], stored.clone()), stored);
}

#[test]
fn collect_sorts_and_slices() {
    let collect = |rest: Document| {
        doc! {"collect": doc! {
            "source": "s", "target": "t", "match": {"_id": "host"}, "into": "log", "element": "$_id",
        }.into_iter().chain(rest).collect::<Document>()}
    };
    let sources: Vec<Document> =
        [(1, 5), (2, 4), (3, 5), (4, 1)].map(|(id, time)| doc! {"_id": id, "time": time, "host": 0}).to_vec();
    let of = |rest: Document| target(collect(rest), &sources, doc! {"_id": 0}).get_array("log").unwrap().clone();
    let ids = |ids: &[i32]| ids.iter().copied().map(Bson::Int32).collect::<Vec<_>>();
    assert_eq!(of(doc! {}), ids(&[1, 2, 3, 4]));
    assert_eq!(of(doc! {"sort": {"time": 1}}), ids(&[4, 2, 1, 3]));
    assert_eq!(of(doc! {"sort": {"time": -1}, "slice": 3}), ids(&[1, 3, 2]));
    assert_eq!(of(doc! {"sort": {"time": 1}, "slice": -2}), ids(&[1, 3]));
    assert_eq!(target(collect(doc! {}), &[], doc! {"_id": 0}), doc! {"_id": 0, "log": []});
    let unset = collect(doc! {"on_empty": "unset"});
    assert_eq!(target(unset, &[], doc! {"_id": 0, "log": 1}), doc! {"_id": 0});
}

#[test]
fn aggregate_and_on_empty() {
    let rule = || {
        doc! {"aggregate": {"source": "s", "target": "t", "match": {"_id": "product"}, "set": {
            "count": {"$sum": 1}, "rating.avg": {"$avg": "$rating"}, "all": {"$push": "$rating"}, "best": {"$max": "$rating"},
        }}}
    };
    let sources = [doc! {"_id": 1, "product": 0, "rating": 5}, doc! {"_id": 2, "product": 0, "rating": 4}];
    let wanted = doc! {"_id": 0, "count": 2, "rating": {"avg": 4.5}, "all": [5, 4], "best": 5};
    assert_eq!(target(rule(), &sources, doc! {"_id": 0}), wanted);
    let wanted = doc! {"_id": 0, "count": 0, "rating": {"avg": Bson::Null}, "all": [], "best": Bson::Null};
    assert_eq!(target(rule(), &[], doc! {"_id": 0}), wanted);
}

#[test]
fn chains_follow_dependencies_whatever_their_order() {
    let link = |name: &str, source: &str, target: &str| {
        doc! {"name": name, "copy": {
            "source": source, "target": target, "match": {"ref": "_id"}, "set": {"far": "$far"},
        }}
    };
    let rules = [link("second", "b", "c"), link("first", "a", "b")];
    let world = World::from([
        ("a".into(), vec![doc! {"_id": 1, "far": "new"}]),
        ("b".into(), vec![doc! {"_id": 1, "ref": 1, "far": "old"}]),
        ("c".into(), vec![doc! {"_id": 1, "ref": 1}]),
    ]);
    let expectation = expected(&rules, "shop", &world).unwrap();
    assert_eq!(expectation.world["c"], [doc! {"_id": 1, "ref": 1, "far": "new"}]);
    assert!(differences(&expectation, &expectation.world).is_empty());
    assert!(Oracle::new(&[link("one", "a", "b"), link("two", "b", "a")], "shop").is_err());
}

#[test]
fn differences_see_types_and_order_within_a_copied_value_alone() {
    let rules = [doc! {"name": "r", "copy": {
        "source": "s", "target": "t", "match": {"ref": "_id"}, "set": {"in.v": "$v", "w": "$w"},
    }}];
    let differ = |stored: Document| {
        let world = World::from([
            ("s".into(), vec![doc! {"_id": 1, "v": {"a": 1, "b": 2}, "w": 0.0}]),
            ("t".into(), vec![stored]),
        ]);
        differences(&expected(&rules, "shop", &world).unwrap(), &world).len()
    };
    assert_eq!(differ(doc! {"_id": 0, "w": 0.0, "in": {"v": {"a": 1, "b": 2}, "mine": 1}, "ref": 1}), 0);
    assert_eq!(differ(doc! {"_id": 0, "w": 0.0, "in": {"mine": 1, "v": {"a": 1, "b": 2}}, "ref": 1}), 0);
    assert_eq!(differ(doc! {"_id": 0, "w": 0.0, "in": {"v": {"b": 2, "a": 1}}, "ref": 1}), 1);
    assert_eq!(differ(doc! {"_id": 0, "w": -0.0, "in": {"v": {"a": 1, "b": Bson::Int64(2)}}, "ref": 1}), 2);
    assert_eq!(differ(doc! {"_id": 0, "w": 0, "ref": 1}), 2);
}
