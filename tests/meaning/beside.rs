//! Paths in the matched element and beside its array, and arrays on both sides of `match`.

use bson::{Document, doc};
use denormd_rules::{
    config::{Format, load_str},
    plan::compile,
};

use crate::support::{
    cases::{Case, TIME, Write, dead_letters, delete, every_way, insert, update},
    daemon::{self, Daemon, all, load, until},
    process::Program,
};

/// A product shows the name of each part, and the supplier of its most important one.
const PARTS: &str = "copy: { source: '@parts', target: '@products', match: { 'parts.$[].id': _id }, sort: { rank: 1 }, \
    set: { 'parts.$[].name': $name, supplier: $by, 'parts.$[].at.rank': $rank } }";
/// A user's feed counts the posts with one of the user's tags.
const FEED: &str = "aggregate: { source: '@posts', target: '@users', match: { 'likes.$[]': 'tags.$[]' }, set: { n: { $sum: 1 }, ids: { $push: $_id } } }";

fn set(fields: Document) -> Document {
    doc! {"$set": fields}
}

fn part(id: i32, name: &str, rank: i32) -> Document {
    doc! {"_id": id, "name": name, "rank": rank, "by": format!("by {name}")}
}

fn element(id: i32, name: &str, rank: i32) -> Document {
    doc! {"id": id, "name": name, "at": {"rank": rank}}
}

fn inside_and_beside() -> Vec<Case> {
    vec![
        Case::new("the source that `sort` puts first decides beside the array", PARTS)
            .has("parts", [part(1, "a", 2), part(2, "b", 1), part(3, "c", 3)])
            .has("products", [
                doc! {"_id": 1, "parts": [{"id": 1}, {"id": 2}, {"id": 9, "name": "stale"}, 5, {"name": "none"}]},
                doc! {"_id": 2, "parts": [{"id": 3}], "supplier": "stale"},
                doc! {"_id": 3, "parts": [{"id": 7}], "supplier": "stale"},
                doc! {"_id": 4, "parts": [], "supplier": "stale"},
                doc! {"_id": 5, "supplier": "stale"},
            ])
            .writes([
                update("parts", 1, set(doc! {"rank": 0})),
                update("products", 2, doc! {"$push": {"parts": {"$each": [{"id": 2}], "$position": 0}}}),
                update("parts", 2, set(doc! {"name": "B", "rank": -1})),
                delete("parts", 3),
                insert("parts", part(7, "g", 5)),
            ])
            .expect("products", [
                doc! {"_id": 1, "supplier": "by b", "parts": [element(1, "a", 0), element(2, "B", -1), {"id": 9}, 5, {}]},
                doc! {"_id": 2, "supplier": "by b", "parts": [element(2, "B", -1), {"id": 3, "at": {}}]},
                doc! {"_id": 3, "supplier": "by g", "parts": [element(7, "g", 5)]},
                doc! {"_id": 4, "parts": []},
                doc! {"_id": 5},
            ])
            .on_history(),
        Case::new(
            "values without a source",
            "copy: { source: '@s', target: '@t', match: { 'l.$[].s': _id }, set: { 'l.$[].name': $name, first: $name }, \
             otherwise: { 'l.$[].name': gone, first: none } }",
        )
        .has("s", [doc! {"_id": 1, "name": "a"}])
        .has("t", [doc! {"_id": 1, "l": [{"s": 2}, {"s": 1}]}, doc! {"_id": 2, "l": [{"s": 2}]}, doc! {"_id": 3}])
        .writes([insert("s", doc! {"_id": 3, "name": "c"}), update("t", 2, doc! {"$push": {"l": {"s": 3}}})])
        .expect("t", [
            doc! {"_id": 1, "first": "a", "l": [{"s": 2, "name": "gone"}, {"s": 1, "name": "a"}]},
            doc! {"_id": 2, "first": "c", "l": [{"s": 2, "name": "gone"}, {"s": 3, "name": "c"}]},
            doc! {"_id": 3, "first": "none"},
        ]),
        Case::new(
            "null for references that dangle, with several paths of `match` and a time",
            "copy: { source: '@s', target: '@t', match: { tenant: tenant, 'l.$[].s': code }, set: { 'l.$[].name': $name, first: $name }, \
             on_missing: 'null', touch: at }",
        )
        .has("s", [doc! {"_id": 1, "tenant": 1, "code": 1, "name": "a"}, doc! {"_id": 2, "tenant": 2, "code": 1, "name": "b"}])
        .has("t", [doc! {"_id": 1, "tenant": 2, "l": [{"s": 1}, {"s": 2}, {"s": null}]}, doc! {"_id": 2, "l": [{"s": 1}]}])
        .writes([update("t", 2, set(doc! {"tenant": 1}))])
        .expect("t", [
            doc! {"_id": 1, "tenant": 2, "first": "b", "l": [{"s": 1, "name": "b"}, {"s": 2, "name": null}, {"s": null}], "at": TIME},
            doc! {"_id": 2, "tenant": 1, "first": "a", "l": [{"s": 1, "name": "a"}], "at": TIME},
        ]),
    ]
}

fn names(id: i32, which: std::ops::Range<i32>) -> Vec<Document> {
    which.map(|nth| doc! {"id": id * 10 + nth, "name": format!("{id}-{nth}")}).collect()
}

fn both_arrays() -> Vec<Case> {
    let post = |id: i32, tags: &[i32]| doc! {"_id": id, "tags": tags.to_vec()};
    vec![
        Case::new("a row for each element that is one of the keys", FEED)
            .has("posts", [post(1, &[1, 2]), post(2, &[2, 2, 3]), post(3, &[4])])
            .has("users", [
                doc! {"_id": 1, "likes": [2, 1, 2]},
                doc! {"_id": 2, "likes": [3.0]},
                doc! {"_id": 3, "likes": []},
                doc! {"_id": 4, "n": 7, "ids": []},
                doc! {"_id": 5, "likes": [null, [4]]},
                doc! {"_id": 6, "likes": 4, "n": 7},
            ])
            .writes([
                insert("posts", post(4, &[3, 1])),
                update("posts", 1, set(doc! {"tags": [2]})),
                update("users", 2, doc! {"$push": {"likes": 4}}),
                delete("posts", 3),
                update("users", 3, set(doc! {"likes": [9]})),
            ])
            .expect("users", [
                doc! {"_id": 1, "likes": [2, 1, 2], "n": 4, "ids": [1, 2, 2, 4]},
                doc! {"_id": 2, "likes": [3.0, 4], "n": 2, "ids": [2, 4]},
                doc! {"_id": 3, "likes": [9], "n": 0, "ids": []},
                doc! {"_id": 4},
                doc! {"_id": 5, "likes": [null, [4]], "n": 0, "ids": []},
                doc! {"_id": 6, "likes": 4},
            ])
            .on_history(),
        // With many of them, a read that leaves their order to chance is wrong somewhere.
        Case::new(
            "of the elements of one source, the first decides beside the array",
            "copy: { source: '@s', target: '@t', match: { 'tags.$[]': 'l.$[].k.$[].id' }, set: { first: $$element.name } }",
        )
        .has("s", (0..12).map(|id| doc! {"_id": id, "l": [{"k": names(id, 2..5)}, {"k": names(id, 5..7)}, {"k": names(id, 0..2)}]}))
        .has("t", (0..12).map(|id| doc! {"_id": id, "tags": (0..7).map(|nth| id * 10 + nth).collect::<Vec<_>>()}))
        .writes((0..6).map(|id| update("s", id, set(doc! {"l.0.k.0.id": -1}))))
        .expect(
            "t",
            (0..12).map(|id| {
                let first = if id < 6 { 3 } else { 2 };
                let tags: Vec<_> = (0..7).map(|nth| id * 10 + nth).collect();
                doc! {"_id": id, "tags": tags, "first": format!("{id}-{first}")}
            }),
        ),
        Case::new(
            "elements as rows, with a condition, in a slice",
            "collect: { source: { collection: '@orders', where: { $expr: { $gt: [$$element.qty, 1] } } }, target: '@carts', \
             match: { 'items.$[].id': 'lines.$[].item' }, into: bought, element: { order: $_id, qty: $$element.qty }, sort: { at: -1 }, slice: 3, touch: at }",
        )
        .has("orders", [
            doc! {"_id": 1, "at": 1, "lines": [{"item": 1, "qty": 2}, {"item": 2, "qty": 1}, {"item": 2, "qty": 5}]},
            doc! {"_id": 2, "at": 2, "lines": [{"item": 1, "qty": 3}, {"item": 1, "qty": 4}, {"item": 3, "qty": 9}]},
        ])
        .has("carts", [doc! {"_id": 1, "items": [{"id": 1}, {"id": 2}]}, doc! {"_id": 2, "items": [{"id": 7}, {}], "bought": []}])
        .writes([update("orders", 1, set(doc! {"lines.1.qty": 6})), insert("orders", doc! {"_id": 3, "at": 0, "lines": [{"item": 2, "qty": 8}]})])
        .expect("carts", [
            doc! {"_id": 1, "items": [{"id": 1}, {"id": 2}], "at": TIME, "bought": [{"order": 2, "qty": 3}, {"order": 2, "qty": 4}, {"order": 1, "qty": 2}]},
            doc! {"_id": 2, "items": [{"id": 7}, {}], "bought": []},
        ]),
        Case::new(
            "groups and variables",
            "aggregate: { source: '@s', target: '@t', match: { 'k.$[]': 'l.$[].k' }, by: { k: $$element.k }, into: all, let: { n: { $sum: $$element.n } }, set: { n: $$n } }",
        )
        .and("aggregate: { source: '@s', target: '@t', match: { 'k.$[]': 'l.$[].k' }, let: { n: { $sum: 1 } }, set: { some: { $gt: [$$n, 0] } } }")
        .has("s", [doc! {"_id": 1, "l": [{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3}]}])
        .has("t", [doc! {"_id": 1, "k": ["a", "b", "c"]}, doc! {"_id": 2, "k": []}, doc! {"_id": 3, "all": 1}])
        .writes([insert("s", doc! {"_id": 2, "l": [{"k": "c", "n": 5}]})])
        .expect("t", [
            doc! {"_id": 1, "k": ["a", "b", "c"], "some": true, "all": [{"k": "a", "n": 4}, {"k": "b", "n": 2}, {"k": "c", "n": 5}]},
            doc! {"_id": 2, "k": [], "some": false, "all": []},
            doc! {"_id": 3},
        ]),
        Case::new(
            "the price of a variant in each line, and the first one's currency",
            "copy: { source: '@products', target: '@orders', match: { 'lines.$[].sku': 'variants.$[].sku' }, sort: { rank: 1 }, \
             set: { 'lines.$[].price': $$element.price, currency: $currency } }",
        )
        .and("copy: { source: '@products', target: '@orders', match: { 'lines.$[].sku': 'variants.$[].sku' }, into: names, element: $name }")
        .has("products", [
            doc! {"_id": 1, "rank": 2, "name": "x", "currency": "EUR", "variants": [{"sku": "a", "price": 1}, {"sku": "b", "price": 2}]},
            doc! {"_id": 2, "rank": 1, "name": "y", "currency": "CHF", "variants": [{"sku": "c", "price": 3}, {"sku": "c", "price": 4}]},
        ])
        .has("orders", [doc! {"_id": 1, "lines": [{"sku": "b"}, {"sku": "c"}, {"sku": "d"}]}, doc! {"_id": 2, "lines": [{"sku": "a"}]}])
        .writes([
            update("products", 1, set(doc! {"variants.1.price": 7})),
            Write::Burst(vec![update("orders", 2, doc! {"$push": {"lines": {"sku": "b"}}})]),
        ])
        .expect("orders", [
            doc! {"_id": 1, "currency": "CHF", "names": ["x", "y"], "lines": [{"sku": "b", "price": 7}, {"sku": "c", "price": 3}, {"sku": "d"}]},
            doc! {"_id": 2, "currency": "EUR", "names": ["x", "x"], "lines": [{"sku": "a", "price": 1}, {"sku": "b", "price": 7}]},
        ]),
    ]
}

#[tokio::test]
async fn one_rule_writes_in_the_element_and_beside_the_array() {
    every_way(&inside_and_beside()).await;
}

#[tokio::test]
async fn both_sides_may_hold_an_array() {
    every_way(&both_arrays()).await;
}

/// A part that is deleted takes its name along, and the first of those that are left decides beside the array. More
/// than the removal limit does not go.
#[tokio::test]
async fn elements_and_the_path_beside_them_count_once_for_the_removal_limit() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("parts").insert_many((0..6).map(|n| part(n, "p", n))).await.unwrap();
    let product = |n: i32| doc! {"_id": n, "parts": [{"id": n}, {"id": 5}]};
    db.collection("products").insert_many((0..5).map(product)).await.unwrap();
    let rule = format!("  - name: r\n    allow_scan: true\n    {}\n", PARTS.replace('@', ""));
    let config = daemon::config(&test, &rule).replace("limits: {", "limits: { destroy_per_hour: 2,");
    let daemon = Daemon::start_loaded(&load(&config)).await;
    daemon.settled().await;
    db.collection::<Document>("parts").delete_many(doc! {"_id": {"$lt": 2}}).await.unwrap();
    daemon.settled().await;
    let has_name = |nth: usize| {
        let db = &db;
        async move { all(db, "products").await[nth].to_string().matches("\"name\"").count() }
    };
    assert_eq!((has_name(0).await, has_name(1).await, has_name(2).await), (1, 1, 2));
    db.collection::<Document>("parts").delete_many(doc! {"_id": {"$lt": 5}}).await.unwrap();
    until("the rule is blocked", async || {
        let states = daemon.progress().borrow().states.clone();
        states.iter().any(|state| matches!(state, denormd_model::rule_state::RuleState::Blocked(_))).then_some(())
    })
    .await;
    assert_eq!((has_name(3).await, has_name(4).await), (2, 2));
    daemon.stop().await;
}

#[tokio::test]
async fn check_and_explain_show_the_element_and_the_path_beside_it() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("parts").insert_many([part(1, "a", 2), part(2, "b", 1)]).await.unwrap();
    let right = doc! {"_id": 1, "supplier": "by b", "parts": [element(1, "a", 2), element(2, "b", 1)]};
    let mut wrong = right.clone();
    wrong.extend(doc! {"_id": 2, "supplier": "by a"});
    db.collection("products").insert_many([right, wrong]).await.unwrap();
    db.collection("posts").insert_one(doc! {"_id": 1, "tags": [1, 2]}).await.unwrap();
    db.collection("users").insert_one(doc! {"_id": 1, "likes": [2, 7]}).await.unwrap();
    let rules = format!(
        "  - name: parts\n    allow_scan: true\n    {}\n  - name: feed\n    allow_scan: true\n    {}\n",
        PARTS.replace('@', ""),
        FEED.replace('@', "")
    );
    let config = daemon::config(&test, &rules);
    let program = Program::new(&config);
    let text = program.run(&["explain", "parts", "2"]).await.exits(0).out;
    assert!(text.contains("expected \"by b\"") && text.contains("stored   \"by a\"   <- differs"), "{text}");
    assert_eq!(text.matches("<- differs").count(), 1, "{text}");
    let text = program.run(&["explain", "feed", "1"]).await.exits(0).out;
    assert!(text.contains("likes.$[], element 0: 2, found in"), "{text}");
    assert!(text.contains("likes.$[], element 1: 7, not found in"), "{text}");
    let text = program.run(&["plan", "--apply"]).await.out;
    assert!(text.contains("target by target"), "{text}");
    let daemon = Daemon::start_loaded(&load(&config)).await;
    daemon.settled().await;
    daemon.stop().await;
    program.run(&["check"]).await.exits(0);
    assert_eq!(all(&db, "products").await[1].get_str("supplier").unwrap(), "by b");
    assert_eq!(all(&db, "users").await[0], doc! {"_id": 1, "likes": [2, 7], "n": 1, "ids": [1]});
}

/// Together, the values beside the array are larger than a document; only the first source's are stored.
#[tokio::test(flavor = "multi_thread")]
async fn large_values_beside_the_array_are_read_of_the_first_source() {
    const PARTS: i32 = 30;
    let test = denormd_fixture::database().await;
    let db = test.database();
    let leaflet = |id: i32| format!("{id} ").repeat(300_000);
    for id in 0..PARTS {
        db.collection("parts").insert_one(doc! {"_id": id, "name": id, "leaflet": leaflet(id)}).await.unwrap();
    }
    let parts: Vec<Document> = (0..PARTS).map(|id| doc! {"id": PARTS - 1 - id}).collect();
    db.collection("products").insert_one(doc! {"_id": 1, "parts": parts}).await.unwrap();
    let copy = "copy: { source: parts, target: products, match: { 'parts.$[].id': _id }, sort: { _id: 1 }, set: { 'parts.$[].name': $name, leaflet: $leaflet } }";
    let daemon = Daemon::start(&test, &format!("  - {{ name: parts, allow_scan: true, {copy} }}")).await;
    daemon.settled().await;
    let parts: Vec<Document> = (0..PARTS).rev().map(|id| doc! {"id": id, "name": id}).collect();
    let expected = doc! {"_id": 1, "parts": parts, "leaflet": leaflet(0)};
    let [product]: [Document; 1] = all(&db, "products").await.try_into().unwrap();
    assert!(product == expected, "{:?}", product.get("parts"));
    assert!(dead_letters(&test).await.is_empty());
    daemon.stop().await;
}

#[test]
fn combinations_without_a_meaning_are_refused() {
    for (rule, expected) in [
        (
            "copy: { source: s, target: t, match: { 'l.$[].s': _id }, set: { 'l.$[].a': $a, b: $b }, once: true }",
            "once: `once` needs paths in the matched element, or a reference that is no array",
        ),
        (
            "copy: { source: s, target: t, match: { 'l.$[].s': _id }, set: { 'l.$[].a': $a, b: $b }, on_missing: remove }",
            "on_missing: `remove` has no meaning for this form of reference",
        ),
        (
            "copy: { source: s, target: t, match: { 'l.$[].s': _id }, set: { 'l.$[].a': $$targetElement.x, b: $b } }",
            "set: `$$target` gives each element of `l.$[]` a value of its own, and some paths lie beside the array",
        ),
        (
            "copy: { source: s, target: t, match: { 'l.$[].m.$[].s': _id }, set: { 'l.$[].m.$[].a': $a, b: $b } }",
            "set: `l.$[].m.$[]` is an array inside another array, whose elements cannot be compared before each write",
        ),
        (
            "aggregate: { source: s, target: t, match: { 'l.$[].s': s }, set: { 'l.$[].a': { $sum: 1 }, b: { $sum: 1 } } }",
            "set: some paths lie in the matched element, and those beside the array would belong to all its elements",
        ),
        (
            "copy: { source: s, target: t, match: { 'ids.$[]': _id }, set: { 'ids.$[].a': $a, b: $b } }",
            "match: the elements of `ids.$[]` have no fields to set",
        ),
        (
            "aggregate: { source: s, target: t, match: { 'ids.$[]': _id }, set: { n: { $sum: 1 } } }",
            "match: `ids.$[]` holds several references, and the result would belong to all of them",
        ),
    ] {
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules: [{{ name: r, {rule} }}]\n");
        let mistakes = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap_err();
        let found: Vec<String> = mistakes.iter().map(|one| format!("{}: {}", one.at, one.message)).collect();
        assert!(found.iter().any(|found| found.ends_with(expected)), "{rule}: {found:?}");
        assert!(mistakes.iter().all(|mistake| mistake.hint.is_some()), "{found:?}");
    }
}
