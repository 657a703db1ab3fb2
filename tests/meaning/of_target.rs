//! Values that depend on the target: `$$target` and `$$targetElement`.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use bson::{Bson, DateTime, Document, RawDocumentBuf, bson, doc, oid::ObjectId};
use denormd_engine::reconcile::{
    by_target::{self, Referrer},
    read, statement,
    value::Desired,
};
use denormd_fixture::ReplicaSet;
use denormd_model::key::Key;
use denormd_model::rule_state::{BlockReason, RuleState};
use denormd_rules::plan;
use mongodb::Database;

use crate::support::{
    cases::{Case, Write, dead_letters, delete, every_way, insert, now, oplog, replace, update},
    daemon::{self, Daemon, all, load, until},
    process::Program,
};

/// The messages of a room that a member has not read yet.
const UNREAD: &str = "aggregate: { source: { collection: '@messages', where: { $expr: { $gt: [$ts, $$target.ls] } } }, \
    target: '@subscriptions', match: { rid: rid }, set: { unread: { $sum: 1 } } }";
/// The total of an order's line.
const TOTAL: &str = "copy: { source: '@items', target: '@orders', match: { 'lines.$[].item': _id }, \
    set: { 'lines.$[].total': { $multiply: [$price, $$targetElement.qty] } } }";

fn at(seconds: i64) -> Bson {
    DateTime::from_millis(seconds * 1000).into()
}

fn message(id: i32, rid: i32, seconds: i64) -> Document {
    doc! {"_id": id, "rid": rid, "ts": at(seconds)}
}

fn item(id: i32, price: i32) -> Document {
    doc! {"_id": id, "price": price}
}

fn set(fields: Document) -> Document {
    doc! {"$set": fields}
}

fn counters() -> Vec<Case> {
    let member = |id: &str, rid: i32| doc! {"_id": id, "rid": rid};
    let with = |mut document: Document, fields: Document| {
        document.extend(fields);
        document
    };
    let ann = || with(member("ann", 1), doc! {"ls": at(2)});
    let bob = || with(member("bob", 1), doc! {"ls": at(9)});
    vec![
        Case::new("messages that came after a member last looked", UNREAD)
            .has("messages", (1..=4).map(|n| message(n, 1, n.into())))
            .has("messages", [message(5, 2, 5)])
            .has("subscriptions", [ann(), bob(), member("new", 1), with(member("other", 2), doc! {"ls": at(1)})])
            .expect(
                "subscriptions",
                [
                    with(ann(), doc! {"unread": 2}),
                    with(bob(), doc! {"unread": 0}),
                    // A missing time is before all others.
                    with(member("new", 1), doc! {"unread": 4}),
                    with(member("other", 2), doc! {"ls": at(1), "unread": 1}),
                ],
            ),
        Case::new("both sides change", UNREAD)
            .has("messages", (1..=4).map(|n| message(n, 1, n.into())))
            .has("subscriptions", [ann(), bob()])
            .writes([
                insert("messages", message(6, 1, 6)),
                update("subscriptions", "ann", set(doc! {"ls": at(3)})),
                insert("subscriptions", with(member("cid", 1), doc! {"ls": at(5)})),
                delete("messages", 4),
                update("messages", 1, set(doc! {"ts": at(11)})),
                update("subscriptions", "bob", doc! {"$unset": {"ls": 1}}),
                update("messages", 2, set(doc! {"rid": 2})),
                replace("subscriptions", with(member("cid", 1), doc! {"ls": at(11)})),
            ])
            .expect(
                "subscriptions",
                [
                    with(member("ann", 1), doc! {"ls": at(3), "unread": 2}),
                    with(member("bob", 1), doc! {"unread": 3}),
                    with(member("cid", 1), doc! {"ls": at(11), "unread": 0}),
                ],
            ),
        Case::new("a member that moves, and one that has no room", UNREAD)
            .has("messages", [message(1, 1, 1), message(2, 2, 2), message(3, 2, 3)])
            .has("subscriptions", [member("ann", 1), member("bob", 1), member("cid", 1)])
            .writes([
                update("subscriptions", "ann", set(doc! {"rid": 2, "ls": at(2)})),
                update("subscriptions", "bob", set(doc! {"rid": null})),
                update("subscriptions", "cid", set(doc! {"rid": 7})),
            ])
            .expect(
                "subscriptions",
                [
                    with(member("ann", 2), doc! {"ls": at(2), "unread": 1}),
                    doc! {"_id": "bob", "rid": null},
                    with(member("cid", 7), doc! {"unread": 0}),
                ],
            ),
        Case::new("a burst of both", UNREAD)
            .has("subscriptions", [member("ann", 1)])
            .writes([Write::Burst(
                (1..60)
                    .flat_map(|n| {
                        [
                            insert("messages", message(n, 1, n.into())),
                            update("subscriptions", "ann", set(doc! {"ls": at((n / 2).into())})),
                        ]
                    })
                    .collect(),
            )])
            .expect("subscriptions", [with(member("ann", 1), doc! {"ls": at(29), "unread": 30})]),
        // An application that marks a room as read often resets the counter itself.
        Case::new("the application writes the counter together with the time", UNREAD)
            .has("messages", (1..=4).map(|n| message(n, 1, n.into())))
            .has("subscriptions", [ann()])
            .writes([update("subscriptions", "ann", set(doc! {"ls": at(3), "unread": 0}))])
            .expect("subscriptions", [with(member("ann", 1), doc! {"ls": at(3), "unread": 1})]),
        Case::new(
            "a path of a subdocument, in another database, with a filter",
            "aggregate: { source: { collection: '@other.m', where: { kind: a, $expr: { $lt: [$n, $$target.max.n] } } }, \
             target: { collection: '@t', where: { open: true } }, match: { _id: t }, set: { n: { $sum: $n }, all: { $push: $n } }, sort: { n: -1 } }",
        )
        .has("other.m", (1..=6).map(|n| doc! {"_id": n, "t": 1, "n": n, "kind": if n == 2 { "b" } else { "a" }}))
        .has("t", [doc! {"_id": 1, "open": true, "max": {"n": 3, "x": 1}}, doc! {"_id": 2, "open": false}])
        .writes([
            update("t", 1, set(doc! {"max.n": 5})),
            update("t", 2, set(doc! {"open": true})),
            update("t", 1, set(doc! {"max.x": 2})),
        ])
        .expect(
            "t",
            [
                doc! {"_id": 1, "open": true, "max": {"n": 5, "x": 2}, "n": 8, "all": [4, 3, 1]},
                doc! {"_id": 2, "open": true, "n": 0, "all": []},
            ],
        ),
        Case::new(
            "an accumulator, a variable of `let`, and no source",
            "aggregate: { source: '@s', target: '@t', match: { _id: t }, let: { sum: { $sum: { $multiply: [$n, $$target.factor] } } }, \
             set: { share: { $divide: [$$sum, $$target.factor] }, sum: $$sum } }",
        )
        .has("s", [doc! {"_id": 1, "t": 1, "n": 3}, doc! {"_id": 2, "t": 1, "n": 4}])
        .has("t", [doc! {"_id": 1, "factor": 2}, doc! {"_id": 2, "factor": 4}])
        .writes([update("t", 1, set(doc! {"factor": 10})), update("s", 2, set(doc! {"n": 5}))])
        .expect("t", [doc! {"_id": 1, "factor": 10, "sum": 80, "share": 8.0}, doc! {"_id": 2, "factor": 4, "sum": 0, "share": 0.0}]),
        Case::new(
            "the target's own `_id`, and a path that another rule writes there",
            "aggregate: { source: { collection: '@s', where: { $expr: { $ne: [$by, $$target._id] } } }, target: '@t', match: { _id: t }, \
             set: { others: { $sum: { $cond: [{ $eq: [$kind, $$target.kind_name] }, 1, 0] } } } }",
        )
        .and("copy: { source: '@kinds', target: '@t', match: { kind: _id }, set: { kind_name: $name } }")
        .has("kinds", [doc! {"_id": 1, "name": "x"}, doc! {"_id": 2, "name": "y"}])
        .has("s", [doc! {"_id": 1, "t": 1, "by": 1, "kind": "x"}, doc! {"_id": 2, "t": 1, "by": 2, "kind": "x"}, doc! {"_id": 3, "t": 1, "by": 3, "kind": "y"}])
        .has("t", [doc! {"_id": 1, "kind": 1}])
        .writes([update("s", 3, set(doc! {"by": 1})), insert("s", doc! {"_id": 4, "t": 1, "by": 4, "kind": "z"}), update("kinds", 1, set(doc! {"name": "z"}))])
        .expect("t", [doc! {"_id": 1, "kind": 1, "kind_name": "z", "others": 1}]),
        Case::new(
            "groups",
            "aggregate: { source: '@s', target: '@t', match: { _id: t }, by: { mine: { $eq: [$user, $$target.owner] } }, \
             into: likes, set: { n: { $sum: 1 } }, sort: { mine: -1 } }",
        )
        .has("s", [doc! {"_id": 1, "t": 1, "user": "a"}, doc! {"_id": 2, "t": 1, "user": "b"}, doc! {"_id": 3, "t": 1, "user": "b"}])
        .has("t", [doc! {"_id": 1, "owner": "a"}, doc! {"_id": 2}])
        .writes([update("t", 1, set(doc! {"owner": "b"}))])
        .expect(
            "t",
            [doc! {"_id": 1, "owner": "b", "likes": [{"mine": true, "n": 2}, {"mine": false, "n": 1}]}, doc! {"_id": 2, "likes": []}],
        ),
        Case::new(
            "the elements of a collect, with a slice",
            "collect: { source: { collection: '@s', where: { $expr: { $ne: [$user, $$target.owner] } } }, target: '@t', match: { _id: t }, \
             into: last, element: { id: $_id, late: { $gt: [$at, $$target.due] } }, sort: { at: -1 }, slice: 2 }",
        )
        .has("s", (1..=5).map(|n| doc! {"_id": n, "t": 1, "user": if n == 4 { "a" } else { "b" }, "at": n}))
        .has("t", [doc! {"_id": 1, "owner": "a", "due": 3}])
        .writes([insert("s", doc! {"_id": 6, "t": 1, "user": "a", "at": 6}), update("t", 1, set(doc! {"due": 4})), delete("s", 1)])
        .expect("t", [doc! {"_id": 1, "owner": "a", "due": 4, "last": [{"id": 5, "late": true}, {"id": 3, "late": false}]}]),
        Case::new(
            "references that sources hold in arrays",
            "aggregate: { source: { collection: '@s', where: { $expr: { $gte: [$$element.n, $$target.least] } } }, target: '@t', \
             match: { _id: 'lines.$[].t' }, set: { n: { $sum: { $multiply: [$$element.n, $$target.factor] } } } }",
        )
        .has("s", [doc! {"_id": 1, "lines": [{"t": 1, "n": 1}, {"t": 1, "n": 5}, {"t": 2, "n": 7}, 3]}, doc! {"_id": 2, "lines": [{"t": 1, "n": 4}]}])
        .has("t", [doc! {"_id": 1, "least": 5, "factor": 10}, doc! {"_id": 2, "factor": 1}, doc! {"_id": 3}])
        .writes([update("t", 1, set(doc! {"least": 4})), update("s", 2, set(doc! {"lines.0.n": 6}))])
        .expect("t", [doc! {"_id": 1, "least": 4, "factor": 10, "n": 110}, doc! {"_id": 2, "factor": 1, "n": 7}, doc! {"_id": 3, "n": 0}]),
    ]
}

fn copies() -> Vec<Case> {
    let line = |item: i32, qty: i32| doc! {"item": item, "qty": qty};
    let total = |item: i32, qty: i32, total: i32| doc! {"item": item, "qty": qty, "total": total};
    vec![
        Case::new("two lines of one item with their own quantities", TOTAL)
            .has("items", [item(1, 10), item(2, 3)])
            .has("orders", [doc! {"_id": 1, "lines": [line(1, 2), line(1, 5), line(2, 1)]}])
            .writes([
                update("items", 1, set(doc! {"price": 11})),
                update("orders", 1, set(doc! {"lines.1.qty": 4})),
                update("orders", 1, doc! {"$push": {"lines": line(2, 9)}}),
            ])
            .expect("orders", [doc! {"_id": 1, "lines": [total(1, 2, 22), total(1, 4, 44), total(2, 1, 3), total(2, 9, 27)]}]),
        Case::new("elements that move, go and are no lines", TOTAL)
            .has("items", [item(1, 10), item(2, 3)])
            .has("orders", [doc! {"_id": 1, "lines": [line(1, 2), 7, {"item": 1}, {"qty": 3, "total": 5}, [line(1, 1)], line(9, 1)]}])
            .writes([
                update("orders", 1, doc! {"$push": {"lines": {"$each": [line(2, 6)], "$position": 0}}}),
                update("orders", 1, doc! {"$pull": {"lines": {"item": 9}}}),
            ])
            .expect(
                "orders",
                [doc! {"_id": 1, "lines": [total(2, 6, 18), total(1, 2, 20), 7, {"item": 1, "total": null}, {"qty": 3}, [line(1, 1)]]}],
            ),
        Case::new(
            "the element of a source is chosen by the target",
            "copy: { source: { collection: '@s', where: { $expr: { $gte: [$$element.n, $$target.least] } } }, target: '@t', match: { _id: 'lines.$[].t' }, set: { n: $$element.n } }",
        )
        .has("s", [doc! {"_id": 1, "lines": [{"t": 1, "n": 1}, {"t": 1, "n": 5}, {"t": 2, "n": 7}, {"t": 3, "n": 2}]}])
        .has("t", [doc! {"_id": 1, "least": 5}, doc! {"_id": 2, "least": 9}, doc! {"_id": 3, "least": 1}])
        .writes([update("t", 3, set(doc! {"least": 3})), update("s", 1, set(doc! {"lines.1.n": 6}))])
        .expect("t", [doc! {"_id": 1, "least": 5, "n": 6}, doc! {"_id": 2, "least": 9}, doc! {"_id": 3, "least": 3}]),
        Case::new("an array below a document, and none", &TOTAL.replace("lines.$[]", "of.lines.$[]"))
            .has("items", [item(1, 10)])
            .has("orders", [
                doc! {"_id": 1, "of": {"lines": [line(1, 2)]}},
                doc! {"_id": 2, "of": [{"lines": [line(1, 2)]}]},
                doc! {"_id": 3, "of": {"lines": line(1, 2)}},
                doc! {"_id": 4},
            ])
            .writes([update("items", 1, set(doc! {"price": 3}))])
            .expect("orders", [
                doc! {"_id": 1, "of": {"lines": [total(1, 2, 6)]}},
                doc! {"_id": 2, "of": [{"lines": [line(1, 2)]}]},
                doc! {"_id": 3, "of": {"lines": line(1, 2)}},
                doc! {"_id": 4},
            ]),
        Case::new(
            "a line whose item is gone",
            "copy: { source: '@items', target: '@orders', match: { 'lines.$[].item': _id }, on_missing: keep, \
             set: { 'lines.$[].total': { $multiply: [$price, $$targetElement.qty] } } }",
        )
        .has("items", [item(1, 10), item(2, 3)])
        .has("orders", [doc! {"_id": 1, "lines": [total(1, 2, 20), total(2, 1, 3)]}])
        .writes([delete("items", 1), update("orders", 1, set(doc! {"lines.1.qty": 2}))])
        .expect("orders", [doc! {"_id": 1, "lines": [total(1, 2, 20), total(2, 2, 6)]}]),
        Case::new(
            "values in `otherwise` of a target, of an element",
            "copy: { source: '@s', target: '@t', match: { 'l.$[].s': _id }, set: { 'l.$[].name': { $concat: [$name, $$target.suffix] } }, \
             otherwise: { 'l.$[].name': { $concat: [$$targetElement.own, $$target.suffix] } } }",
        )
        .and(
            "copy: { source: '@s', target: '@t', match: { s: _id }, set: { a: $name, b: $$target.suffix }, otherwise: { a: $$target.suffix } }",
        )
        .has("s", [doc! {"_id": 1, "name": "x"}])
        .has("t", [
            doc! {"_id": 1, "suffix": "!", "s": 1, "l": [{"s": 1, "own": "o"}, {"s": 2, "own": "p"}, {"s": null, "own": "q"}, {"own": "r"}, 5]},
            doc! {"_id": 2, "suffix": "?", "s": 2},
            doc! {"_id": 3, "suffix": "."},
        ])
        .writes([update("t", 1, set(doc! {"suffix": "#"}))])
        .expect("t", [
            doc! {"_id": 1, "suffix": "#", "s": 1, "a": "x", "b": "#", "l": [
                {"s": 1, "own": "o", "name": "x#"}, {"s": 2, "own": "p", "name": "p#"},
                {"s": null, "own": "q", "name": "q#"}, {"own": "r", "name": "r#"}, 5,
            ]},
            doc! {"_id": 2, "suffix": "?", "s": 2, "a": "?"},
            doc! {"_id": 3, "suffix": ".", "a": "."},
        ]),
        Case::new(
            "the best of several sources, chosen by a path of the target",
            "copy: { source: { collection: '@rates', where: { $expr: { $lte: [$from, $$target.at] } } }, target: '@t', match: { currency: code }, \
             sort: { from: -1 }, set: { rate: $rate, value: { $multiply: [$rate, $$target.amount] } } }",
        )
        .has("rates", [doc! {"_id": 1, "code": "EUR", "from": 1, "rate": 2}, doc! {"_id": 2, "code": "EUR", "from": 5, "rate": 3}])
        .has("t", [
            doc! {"_id": 1, "currency": "EUR", "at": 4, "amount": 10},
            doc! {"_id": 2, "currency": "EUR", "at": 5, "amount": 10},
            doc! {"_id": 3, "currency": "EUR", "at": 0, "amount": 10, "rate": 9},
        ])
        .writes([
            insert("rates", doc! {"_id": 3, "code": "EUR", "from": 3, "rate": 7}),
            update("t", 2, set(doc! {"amount": Bson::Int64(4)})),
        ])
        .expect("t", [
            doc! {"_id": 1, "currency": "EUR", "at": 4, "amount": 10, "rate": 7, "value": 70},
            doc! {"_id": 2, "currency": "EUR", "at": 5, "amount": Bson::Int64(4), "rate": 3, "value": Bson::Int64(12)},
            doc! {"_id": 3, "currency": "EUR", "at": 0, "amount": 10},
        ]),
        Case::new(
            "an array of the references, each with its own element",
            "copy: { source: '@items', target: '@orders', match: { 'lines.$[].item': _id }, into: priced, \
             element: { id: $_id, sum: { $multiply: [$price, $$targetElement.qty, $$target.factor] }, line: $$targetElement } }",
        )
        .has("items", [item(1, 10), item(2, 3)])
        .has("orders", [doc! {"_id": 1, "factor": 1, "lines": [line(1, 2), line(9, 1), line(1, 5)]}, doc! {"_id": 2, "factor": 1}])
        .writes([update("orders", 1, set(doc! {"factor": 2})), update("orders", 1, doc! {"$push": {"lines": line(2, 1)}})])
        .expect("orders", [
            doc! {"_id": 1, "factor": 2, "lines": [line(1, 2), line(9, 1), line(1, 5), line(2, 1)], "priced": [
                {"id": 1, "sum": 40, "line": line(1, 2)}, {"id": 1, "sum": 100, "line": line(1, 5)}, {"id": 2, "sum": 6, "line": line(2, 1)},
            ]},
            doc! {"_id": 2, "factor": 1},
        ]),
        Case::new(
            "paths beside an array of references: the first source",
            "copy: { source: '@s', target: '@t', match: { 'ids.$[]': _id }, sort: { rank: 1 }, set: { first: { $concat: [$name, $$target.suffix] } } }",
        )
        .has("s", [doc! {"_id": 1, "name": "a", "rank": 2}, doc! {"_id": 2, "name": "b", "rank": 1}])
        .has("t", [doc! {"_id": 1, "ids": [1, 2, 7], "suffix": "!"}, doc! {"_id": 2, "ids": [], "suffix": "!"}])
        .writes([update("t", 1, set(doc! {"suffix": "?"})), update("s", 2, set(doc! {"rank": 3}))])
        .expect("t", [doc! {"_id": 1, "ids": [1, 2, 7], "suffix": "?", "first": "a?"}, doc! {"_id": 2, "ids": [], "suffix": "!"}]),
        Case::new(
            "counts in each element",
            "aggregate: { source: { collection: '@s', where: { $expr: { $gt: [$at, $$targetElement.seen] } } }, target: '@t', \
             match: { 'rooms.$[].id': room }, set: { 'rooms.$[].n': { $sum: 1 } } }",
        )
        .has("s", (1..=4).map(|n| doc! {"_id": n, "room": 1, "at": n}))
        .has("t", [doc! {"_id": 1, "rooms": [{"id": 1, "seen": 3}, {"id": 1, "seen": 1}, {"id": 2}, {"seen": 1}]}])
        .writes([update("t", 1, set(doc! {"rooms.0.seen": 0})), insert("s", doc! {"_id": 5, "room": 2, "at": 1})])
        .expect("t", [doc! {"_id": 1, "rooms": [{"id": 1, "seen": 0, "n": 4}, {"id": 1, "seen": 1, "n": 3}, {"id": 2, "n": 1}, {"seen": 1}]}]),
    ]
}

fn keys() -> Vec<Case> {
    let hex = "0123456789abcdef01234567";
    let with = "set: { n: { $add: [$n, $$target.more] } }";
    let odd = [
        bson!({"x": 1}),
        bson!(1.5),
        Bson::Int64(3),
        bson!("a"),
        bson!(true),
        Bson::MinKey,
        Bson::MaxKey,
        Bson::RegularExpression(bson::Regex { pattern: "a".try_into().unwrap(), options: "".try_into().unwrap() }),
        bson!({"$x": 1}),
    ];
    let source = |(id, code): (i32, &Bson)| doc! {"_id": id, "code": code.clone(), "n": id};
    let target = |(id, code): (i32, &Bson)| doc! {"_id": id, "code": code.clone(), "more": 100};
    let done = |(id, code): (i32, &Bson)| doc! {"_id": id, "code": code.clone(), "more": 100, "n": 100 + id};
    vec![
        Case::new("keys of every kind", &format!("copy: {{ source: '@s', target: '@t', match: {{ code: code }}, {with} }}"))
            .has("s", (0..).zip(&odd).map(source))
            .has("s", [doc! {"_id": 100, "code": ["a", 1.5], "n": "not reached"}, doc! {"_id": 101, "n": "nor this"}, doc! {"_id": 102, "code": null, "n": "x"}])
            .has("t", (0..).zip(&odd).map(target))
            .has("t", [doc! {"_id": 100, "code": ["a"], "more": 1}, doc! {"_id": 101, "more": 1}])
            .expect("t", (0..).zip(&odd).map(done).chain([doc! {"_id": 100, "code": ["a"], "more": 1}, doc! {"_id": 101, "more": 1}])),
        // The source with the lowest `_id` counts, and the values of the others are not computed.
        Case::new("several targets of one key", &format!("copy: {{ source: '@s', target: '@t', match: {{ code: code }}, {with} }}"))
            .has("s", [
                doc! {"_id": 2, "code": 1, "n": "cannot be added"}, doc! {"_id": 1, "code": 1.0, "n": 5}, doc! {"_id": 3, "code": [1, 7], "n": 6},
                doc! {"_id": 4, "code": f64::NAN, "n": 7}, doc! {"_id": 5, "code": 9, "n": "of no target"},
            ])
            .has("t", [
                doc! {"_id": 1, "code": 1, "more": 10}, doc! {"_id": 2, "code": 1.0, "more": 20}, doc! {"_id": 3, "code": Bson::Int64(1), "more": 30},
                doc! {"_id": 4, "code": 7, "more": 40}, doc! {"_id": 5, "code": f64::NAN, "more": 50}, doc! {"_id": 6, "more": 60},
                doc! {"_id": 7, "code": null, "more": 70},
            ])
            .writes([update("t", 6, set(doc! {"code": 7})), update("t", 7, set(doc! {"code": 1}))])
            .expect("t", [
                doc! {"_id": 1, "code": 1, "more": 10, "n": 15}, doc! {"_id": 2, "code": 1.0, "more": 20, "n": 25},
                doc! {"_id": 3, "code": Bson::Int64(1), "more": 30, "n": 35}, doc! {"_id": 4, "code": 7, "more": 40},
                doc! {"_id": 5, "code": f64::NAN, "more": 50, "n": 57}, doc! {"_id": 6, "code": 7, "more": 60},
                doc! {"_id": 7, "code": 1, "more": 70, "n": 75},
            ]),
        // Nothing is computed, so that a source with an array is read as well.
        Case::new(
            "whole sources of several targets, the greatest first",
            "copy: { source: '@s', target: '@t', match: { code: code }, sort: { n: -1 }, set: { of: $$ROOT, m: $$target.more } }",
        )
        .has("s", [doc! {"_id": 1, "code": 1, "n": 1}, doc! {"_id": 2, "code": 1, "n": 2}, doc! {"_id": 3, "code": [1, 2, 7], "n": 3}])
        .has("t", [
            doc! {"_id": 1, "code": 1, "more": 10}, doc! {"_id": 2, "code": 1, "more": 20}, doc! {"_id": 3, "code": 2, "more": 30},
        ])
        .writes([update("t", 1, set(doc! {"more": 11}))])
        .expect("t", [
            doc! {"_id": 1, "code": 1, "more": 11, "of": {"_id": 2, "code": 1, "n": 2}, "m": 11},
            doc! {"_id": 2, "code": 1, "more": 20, "of": {"_id": 2, "code": 1, "n": 2}, "m": 20},
            doc! {"_id": 3, "code": 2, "more": 30},
        ]),
        // Neither an operator nor a sort excludes the source with an array, whose `_id` is the lowest.
        Case::new(
            "a source with an array, and a key without a source",
            "copy: { source: '@s', target: '@t', match: { code: code }, set: { n: $n, m: $$target.more }, otherwise: { m: $$target.more } }",
        )
        .has("s", [doc! {"_id": 0, "code": [1, 7], "n": 6}, doc! {"_id": 1, "code": 1, "n": 5}])
        .has("t", [
            doc! {"_id": 1, "code": 1, "more": 10}, doc! {"_id": 2, "code": 1, "more": 20}, doc! {"_id": 3, "code": 7, "more": 30},
        ])
        .writes([update("t", 2, set(doc! {"more": 21}))])
        .expect("t", [
            doc! {"_id": 1, "code": 1, "more": 10, "n": 5, "m": 10}, doc! {"_id": 2, "code": 1, "more": 21, "n": 5, "m": 21},
            doc! {"_id": 3, "code": 7, "more": 30, "m": 30},
        ]),
        Case::new(
            "no reference, and sources with the value that is searched for then",
            "copy: { source: '@s', target: '@t', match: { code: code }, set: { n: $n }, otherwise: { n: $$target.more } }",
        )
        .and(
            "aggregate: { source: '@s', target: '@t', match: { code: code }, let: { all: { $sum: { $multiply: [$n, $$target.more] } } }, \
             set: { m: { $add: [$$all, 1] } } }",
        )
        .has("s", [
            doc! {"_id": 1, "code": Bson::MinKey, "n": 1}, doc! {"_id": 2, "code": null, "n": 2}, doc! {"_id": 3, "n": 3}, doc! {"_id": 4, "code": [], "n": 4},
            doc! {"_id": 5, "code": 1, "n": 5},
        ])
        .has("t", [
            doc! {"_id": 1, "code": null, "more": 10}, doc! {"_id": 2, "more": 20}, doc! {"_id": 3, "code": [], "more": 30},
            doc! {"_id": 4, "code": 1, "more": 40},
        ])
        .expect("t", [
            doc! {"_id": 1, "code": null, "more": 10, "n": 10}, doc! {"_id": 2, "more": 20, "n": 20}, doc! {"_id": 3, "code": [], "more": 30, "n": 30},
            doc! {"_id": 4, "code": 1, "more": 40, "n": 5, "m": 201},
        ]),
        Case::new(
            "sources with arrays count for nobody",
            "aggregate: { source: '@s', target: '@t', match: { code: 'of.code' }, set: { n: { $sum: { $multiply: [$n, $$target.f] } } } }",
        )
        .has("s", [
            doc! {"_id": 1, "of": {"code": 1}, "n": 1}, doc! {"_id": 2, "of": {"code": [1, 2]}, "n": 10}, doc! {"_id": 3, "of": [{"code": 1}], "n": 100},
            doc! {"_id": 4, "of": {"code": 1.0}, "n": 1000},
        ])
        .has("t", [doc! {"_id": 1, "code": 1, "f": 2}, doc! {"_id": 2, "code": 2, "f": 2}])
        .expect("t", [doc! {"_id": 1, "code": 1, "f": 2, "n": 2002}, doc! {"_id": 2, "code": 2, "f": 2, "n": 0}]),
        Case::new("several paths", &format!("copy: {{ source: '@s', target: '@t', match: {{ tenant: tenant, ref: code }}, {with} }}"))
            .has("s", [doc! {"_id": 1, "tenant": "a", "code": 1, "n": 1}, doc! {"_id": 2, "tenant": "b", "code": 1, "n": 2}])
            .has("t", [doc! {"_id": 1, "tenant": "b", "ref": 1.0, "more": 10}, doc! {"_id": 2, "tenant": "c", "ref": 1, "more": 1}])
            .writes([update("t", 2, set(doc! {"tenant": "a"}))])
            .expect("t", [doc! {"_id": 1, "tenant": "b", "ref": 1.0, "more": 10, "n": 12}, doc! {"_id": 2, "tenant": "a", "ref": 1, "more": 1, "n": 2}]),
        Case::new("converted references", &format!("copy: {{ source: '@s', target: '@t', match: {{ ref: _id }}, key_type: objectId, {with} }}"))
            .has("s", [doc! {"_id": ObjectId::parse_str(hex).unwrap(), "n": 1}])
            .has("t", [doc! {"_id": 1, "ref": hex, "more": 1}, doc! {"_id": 2, "ref": "text", "more": 1}])
            .writes([update("s", ObjectId::parse_str(hex).unwrap(), set(doc! {"n": 5}))])
            .expect("t", [doc! {"_id": 1, "ref": hex, "more": 1, "n": 6}, doc! {"_id": 2, "ref": "text", "more": 1}]),
        Case::new("a DBRef in the target", &format!("copy: {{ source: '@s', target: '@t', match: {{ 'ref.$id': _id }}, {with} }}"))
            .has("s", [doc! {"_id": 1, "n": 1}])
            .has("t", [doc! {"_id": 1, "ref": {"$ref": "@s", "$id": 1}, "more": 1}, doc! {"_id": 2, "ref": {"$ref": "others", "$id": 1}, "more": 1}])
            .writes([update("t", 1, set(doc! {"more": 4}))])
            .expect("t", [doc! {"_id": 1, "ref": {"$ref": "@s", "$id": 1}, "more": 4, "n": 5}, doc! {"_id": 2, "ref": {"$ref": "others", "$id": 1}, "more": 1}]),
        Case::new(
            "a DBRef in the source",
            "aggregate: { source: '@s', target: '@t', match: { _id: 'of.$id' }, set: { n: { $sum: { $multiply: [$n, $$target.f] } } } }",
        )
        .has("s", [doc! {"_id": 1, "n": 1, "of": {"$ref": "@t", "$id": 1}}, doc! {"_id": 2, "n": 5, "of": {"$ref": "others", "$id": 1}}])
        .has("t", [doc! {"_id": 1, "f": 2}])
        .writes([update("t", 1, set(doc! {"f": 3}))])
        .expect("t", [doc! {"_id": 1, "f": 3, "n": 3}]),
    ]
}

#[tokio::test]
async fn counters_follow_both_sides() {
    every_way(&counters()).await;
}

#[tokio::test]
async fn copies_follow_both_sides() {
    every_way(&copies()).await;
}

#[tokio::test]
async fn the_source_is_found_by_keys_of_every_kind() {
    every_way(&keys()).await;
}

/// Writes a value that was computed for the target before it changed. Returns true if it was written.
async fn writes_after(db: &Database, rule: &str, target: &Document, change: &Document) -> bool {
    let rule = daemon::rule(&rule.replace('@', ""));
    let targets = db.collection::<Document>(&rule.target.namespace.collection);
    targets.delete_many(doc! {}).await.unwrap();
    targets.insert_one(target).await.unwrap();
    let id = Key::one(target.get("_id").unwrap().clone());
    let mut read = read::targets(&rule, &[&id]);
    read.insert("cursor", doc! {});
    let reply = db.run_command(read).await.unwrap();
    let row = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap()[0].as_document().unwrap().clone();
    let guard = RawDocumentBuf::try_from(row.get_document(read::GUARD).unwrap()).unwrap();
    let done = targets.update_one(doc! {}, change.clone()).await.unwrap();
    assert_eq!(done.modified_count, 1, "{change} changes nothing");
    let fields = vec![Some("written".into())];
    let statement = if rule.by_element() {
        statement::of_elements(&rule, &id, &guard, &[(0, fields)]).unwrap().unwrap()
    } else {
        statement::of_target(&rule, &id, &guard, &Desired::Fields(fields)).unwrap().remove(0)
    };
    assert!(!statement.deletes);
    let statement = Document::try_from(statement.raw.as_ref()).unwrap();
    let update = doc! {"update": &rule.target.namespace.collection, "updates": [statement]};
    let reply = db.run_command(update).await.unwrap();
    assert!(!reply.contains_key("writeErrors"), "{change}: {reply}");
    reply.get_i32("nModified").unwrap() == 1
}

/// "The write is guarded by the references and by every `$$target` path it read."
#[tokio::test]
async fn a_value_is_written_while_what_it_was_computed_from_is_unchanged() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let below = UNREAD.replace("$$target.ls", "$$target.seen.at");
    let into = "copy: { source: '@items', target: '@orders', match: { 'lines.$[].item': _id }, into: all, element: $$targetElement.qty }";
    let member = || doc! {"_id": 1, "rid": 1, "ls": 5, "seen": {"at": 5, "by": 1}};
    let order = || doc! {"_id": 1, "lines": [{"item": 1, "qty": 2}, {"item": 1, "qty": 3}, 7], "other": 1};
    let cases: Vec<(&str, Document, Document, bool)> = vec![
        (UNREAD, member(), set(doc! {"other": 1}), true),
        (UNREAD, member(), set(doc! {"ls": 6}), false),
        (UNREAD, member(), doc! {"$unset": {"ls": 1}}, false),
        (UNREAD, member(), set(doc! {"ls": null}), false),
        (UNREAD, member(), set(doc! {"rid": 2}), false),
        (&below, member(), set(doc! {"seen.at": 6}), false),
        (&below, member(), set(doc! {"seen": [{"at": 5}]}), false),
        (&below, member(), set(doc! {"seen.by": 6}), true),
        (TOTAL, order(), set(doc! {"other": 2}), true),
        (TOTAL, order(), set(doc! {"lines.1.other": 2}), true),
        (TOTAL, order(), set(doc! {"lines.0.qty": 9}), false),
        (TOTAL, order(), set(doc! {"lines.1.item": 9}), false),
        (TOTAL, order(), set(doc! {"lines": [{"item": 1, "qty": 3}, {"item": 1, "qty": 2}, 7]}), false),
        (TOTAL, order(), doc! {"$push": {"lines": {"$each": [{}], "$position": 0}}}, false),
        (TOTAL, order(), doc! {"$push": {"lines": {}}}, false),
        (TOTAL, order(), set(doc! {"lines.0": 5}), false),
        (TOTAL, order(), set(doc! {"lines": {"0": {"item": 1, "qty": 2}}}), false),
        (into, order(), set(doc! {"lines.1.qty": 9}), false),
        (into, order(), set(doc! {"lines.1.other": 9}), true),
    ];
    for (rule, target, change, written) in cases {
        assert_eq!(writes_after(&db, rule, &target, &change).await, written, "{rule}: {change} of {target}");
    }
    // An array that looks the same from outside.
    let dotted = TOTAL.replace("lines.$[]", "of.lines.$[]");
    let target = doc! {"_id": 1, "of": {"lines": [{"item": 1, "qty": 2}]}};
    let change = set(doc! {"of": [{"lines": {"item": 1, "qty": 2}}]});
    assert!(!writes_after(&db, &dotted, &target, &change).await);
}

/// The documents that the server looks at to compute a target are its own.
#[tokio::test]
async fn a_target_is_computed_by_an_index() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let messages = (0..2000).map(|n| doc! {"_id": n, "rid": n % 20, "code": n % 100, "ts": at(n.into())});
    db.collection("messages").insert_many(messages).await.unwrap();
    let indexes = [doc! {"rid": 1, "ts": 1}, doc! {"code": 1, "rid": 1}];
    for (nth, key) in indexes.into_iter().enumerate() {
        let index = doc! {"key": key, "name": format!("i{nth}")};
        db.run_command(doc! {"createIndexes": "messages", "indexes": [index]}).await.unwrap();
    }
    let several = "copy: { source: messages, target: subscriptions, match: { rid: rid, ref: code }, set: { at: { $max: [$ts, $$target.ls] } } }";
    let target = doc! {"_id": 1, "rid": 3, "ref": 23, "ls": at(1900)};
    for (rule, most) in [(UNREAD.replace('@', ""), 10), (several.to_owned(), 40)] {
        let rule = daemon::rule(&rule);
        let references = rule.reference.keys(plan::reference::Role::Target, &target);
        let command = by_target::sources(&rule, &[Referrer { target: &target, references: &references }], None);
        let plan = db.run_command(doc! {"explain": command, "verbosity": "executionStats"}).await.unwrap();
        let stages = plan.get_array("stages").unwrap().iter().filter_map(Bson::as_document);
        let lookup = stages.into_iter().find(|stage| stage.contains_key("$lookup")).unwrap();
        assert_eq!(lookup.get_i64("collectionScans").ok(), Some(0), "{lookup}");
        assert!(lookup.get_i64("totalDocsExamined").unwrap() <= most, "{lookup}");
    }
    // Many targets: each of their sources once.
    let rule = daemon::rule(
        "copy: { source: messages, target: subscriptions, match: { ref: code }, set: { at: { $max: [$ts, $$target.ls] } } }",
    );
    let targets: Vec<Document> = (0..40).map(|n| doc! {"_id": n, "ref": n % 4, "ls": at(1900)}).collect();
    let references: Vec<_> =
        targets.iter().map(|target| rule.reference.keys(plan::reference::Role::Target, target)).collect();
    let asked: Vec<Referrer> =
        targets.iter().zip(&references).map(|(target, references)| Referrer { target, references }).collect();
    let command = by_target::sources_at_once(&rule, &asked, None);
    let reply = db.run_command(command.clone()).await.unwrap();
    assert_eq!(reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap().len(), 40);
    let plan = db.run_command(doc! {"explain": command, "verbosity": "executionStats"}).await.unwrap();
    let examined = plan.get_array("stages").unwrap()[0].as_document().unwrap().get_document("$cursor").unwrap();
    let examined = examined.get_document("executionStats").unwrap().get_i32("totalDocsExamined").unwrap();
    assert_eq!(examined, 80, "20 of each of four keys");
}

/// The command contained the values read from a target once for each element: with a few hundred lines in the same subdocument, the
/// server closed the connection at each attempt.
#[test]
fn what_is_read_of_a_target_is_sent_once() {
    let rule = daemon::rule(
        "copy: { source: items, target: orders, match: { 'cart.lines.$[].item': _id }, \
         set: { 'cart.lines.$[].total': { $multiply: [$price, $$target.cart.rate] } } }",
    );
    let lines: Vec<Document> = (0..1000).map(|n| doc! {"item": n, "note": "x".repeat(50)}).collect();
    let target = doc! {"_id": 1, "cart": {"rate": 2, "lines": lines}};
    let references = rule.reference.keys(plan::reference::Role::Target, &target);
    let command = by_target::sources(&rule, &[Referrer { target: &target, references: &references }], None);
    let bytes = RawDocumentBuf::try_from(&command).unwrap().as_bytes().len();
    assert!(bytes < 1 << 20, "{bytes} bytes");
}

/// A condition on the target is compared in the index that `plan` asks for.
#[tokio::test]
async fn plan_asks_for_an_index_on_what_is_compared_with_the_target() {
    for (condition, index) in [
        ("$gt: [$ts, $$target.ls]", "{ \"rid\": 1, \"ts\": 1 }"),
        ("$and: [{ $ne: [$from, $$target.u] }, { $lt: [$$target.ls, $ts] }]", "{ \"rid\": 1, \"ts\": 1 }"),
        ("$ne: [$ts, $$target.ls]", "{ \"rid\": 1 }"),
    ] {
        let test = denormd_fixture::database().await;
        test.database().collection("messages").insert_one(message(1, 1, 1)).await.unwrap();
        test.database().collection("subscriptions").insert_one(doc! {"_id": 1, "rid": 1}).await.unwrap();
        let rule = UNREAD.replace('@', "").replace("$gt: [$ts, $$target.ls]", condition);
        let program = Program::new(&daemon::config(&test, &format!("  - {{ name: unread, {rule} }}")));
        let told = program.run(&["plan"]).await.out;
        assert!(told.contains(&format!("(\"messages\").createIndex({index})")), "{condition}\n{told}");
    }
}

/// `plan` says what is read, what a change costs, and what targets lack; `explain` which sources count.
#[tokio::test]
async fn plan_and_explain_tell_what_is_read_of_a_target() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("messages").insert_many((1..=4).map(|n| message(n, 1, n.into()))).await.unwrap();
    let member = |n: i32| {
        if n < 8 {
            doc! {"_id": n, "rid": 1, "ls": at(2)}
        } else {
            doc! {"_id": n, "rid": 1}
        }
    };
    db.collection("subscriptions").insert_many((0..10).map(member)).await.unwrap();
    let rules = format!("  - {{ name: unread, {} }}", UNREAD.replace('@', ""));
    let program = Program::new(&daemon::config(&test, &rules));
    program.run(&["plan", "--apply"]).await.exits(0);
    let told = program.run(&["plan"]).await.exits(0).out;
    for part in [
        "target: ls, rid",
        "of each target on its own",
        "each change of a source recomputes 10.0 targets on average, one lookup each",
        "2 of 10 sampled targets lack `ls`, which `$$target.ls` reads",
        "adds 10, overwrites 0",
    ] {
        assert!(told.contains(part), "{part}\n{told}");
    }
    let told = program.run(&["explain", "unread", "1"]).await.exits(0).out;
    for part in ["reads $$target.ls: ", "messages 3, 4\n", "expected 2"] {
        assert!(told.contains(part), "{part}\n{told}");
    }
    let told = program.run(&["explain", "unread", "9"]).await.exits(0).out;
    assert!(told.contains("reads $$target.ls: missing") && told.contains("messages 1, 2, 3, 4\n"), "{told}");
}

/// A target whose value cannot be computed is set aside; the others of the batch are written.
#[tokio::test]
async fn a_target_whose_value_fails_is_a_dead_letter_of_its_own() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("items").insert_one(item(1, 12)).await.unwrap();
    let order = |id: i32, parts: i32| doc! {"_id": id, "item": 1, "parts": parts};
    db.collection("orders").insert_many((0..10).map(|n| order(n, n % 5))).await.unwrap();
    let each = "copy: { source: items, target: orders, match: { item: _id }, set: { part: { $divide: [$price, $$target.parts] } } }";
    let daemon = Daemon::start(&test, &format!("  - {{ name: parts, {each} }}")).await;
    daemon.settled().await;
    let parts = async || {
        let orders = all(&db, "orders").await;
        orders.iter().map(|order| order.get_f64("part").ok()).collect::<Vec<_>>()
    };
    let five = [None, Some(12.0), Some(6.0), Some(4.0), Some(3.0)];
    assert_eq!(parts().await, [five, five].concat());
    assert_eq!(dead_letters(&test).await.len(), 2);
    db.collection::<Document>("orders").update_many(doc! {"parts": 0}, set(doc! {"parts": 8})).await.unwrap();
    daemon.settled().await;
    let five = [Some(1.5), Some(12.0), Some(6.0), Some(4.0), Some(3.0)];
    assert_eq!(parts().await, [five, five].concat());
    daemon.retry_dead_letters("parts").await;
    assert!(dead_letters(&test).await.is_empty());
    daemon.stop().await;
}

/// Targets with the same reference are computed by one lookup, whose result may be larger than a document.
#[tokio::test]
async fn a_large_value_reaches_many_targets_of_one_source() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let text = "x".repeat(1 << 20);
    db.collection("items").insert_one(doc! {"_id": 1, "text": &text}).await.unwrap();
    db.collection("orders").insert_many((0..40).map(|n| doc! {"_id": n, "item": 1, "nth": n})).await.unwrap();
    let copy = "copy: { source: items, target: orders, match: { item: _id }, set: { text: $text, next: { $add: [$$target.nth, 1] } } }";
    let daemon = Daemon::start(&test, &format!("  - {{ name: large, {copy} }}")).await;
    daemon.settled().await;
    let right = async |text: &str| {
        let orders = all(&db, "orders").await;
        orders.len() == 40
            && orders
                .iter()
                .zip(1..)
                .all(|(order, next)| order.get("text") == Some(&text.into()) && order.get("next") == Some(&next.into()))
    };
    assert!(right(&text).await);
    let text = "y".repeat(1 << 20);
    db.collection::<Document>("items").update_one(doc! {}, set(doc! {"text": &text})).await.unwrap();
    daemon.settled().await;
    assert!(right(&text).await);
    assert!(dead_letters(&test).await.is_empty());
    daemon.stop().await;
}

/// The element of a source that `where` excludes is not computed: it failed, and the target with it. The server puts a
/// comparison in a `$expr` behind the condition that an element is there.
#[tokio::test]
async fn a_source_that_is_excluded_cannot_fail() {
    for (condition, more, match_on, source, target) in [
        ("$eq: [$state, open]", "", "_id: thing", doc! {"thing": 1}, doc! {}),
        ("$eq: [$state, open]", ", slice: 2", "_id: thing", doc! {"thing": 1}, doc! {}),
        ("$eq: [$state, open]", "", "_id: 'things.$[]'", doc! {"things": [1]}, doc! {}),
        ("$eq: [$state, $$target.state]", "", "_id: thing", doc! {"thing": 1}, doc! {"state": "open"}),
        ("$eq: [$state, $$target.state]", ", slice: -2", "_id: thing", doc! {"thing": 1}, doc! {"state": "open"}),
    ] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let of = |id: i32, state: &str, name: Bson| {
            let mut document = doc! {"_id": id, "state": state, "name": name};
            document.extend(source.clone());
            document
        };
        let parts = [of(1, "open", "a".into()), of(2, "closed", 5.into()), of(3, "open", "b".into())];
        db.collection("parts").insert_many(parts).await.unwrap();
        let indexes = [doc! {"key": {"thing": 1}, "name": "thing"}, doc! {"key": {"things": 1}, "name": "things"}];
        db.run_command(doc! {"createIndexes": "parts", "indexes": indexes.to_vec()}).await.unwrap();
        let mut thing = doc! {"_id": 1};
        thing.extend(target);
        db.collection("things").insert_one(thing).await.unwrap();
        let rule = format!(
            "collect: {{ source: {{ collection: parts, where: {{ $expr: {{ {condition} }} }} }}, target: things, \
             match: {{ {match_on} }}, into: names, element: {{ $concat: [$name, '!'] }}{more} }}"
        );
        let daemon = Daemon::start(&test, &format!("  - {{ name: names, {rule} }}")).await;
        daemon.settled().await;
        let things = all(&db, "things").await;
        assert_eq!(things[0].get("names"), Some(&bson!(["a!", "b!"])), "{rule}: {:?}", dead_letters(&test).await);
        daemon.stop().await;
    }
}

/// "The removal limit covers every way of losing a value because a reference dangles or is filtered out", by a path of
/// the target too. A source collection that is gone takes nothing away.
#[tokio::test]
async fn lost_values_count_towards_the_removal_limit() {
    let rate = "copy: { source: { collection: items, where: { $expr: { $lte: [$from, $$target.at] } } }, target: orders, \
        match: { item: _id }, set: { total: $price } }";
    let total = TOTAL.replace('@', "");
    let filtered = (rate, doc! {"at": 0});
    for (rule, change, survives) in [
        (filtered.0, Some(filtered.1), false),
        (total.as_str(), None, false),
        (filtered.0, None, true),
        (total.as_str(), None, true),
    ] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let items = db.collection::<Document>("items");
        items.insert_one(doc! {"_id": 1, "price": 2, "from": 1}).await.unwrap();
        let order = |n: i32| doc! {"_id": n, "item": 1, "at": 5, "lines": [{"item": 1, "qty": n}]};
        db.collection("orders").insert_many((0..30).map(order)).await.unwrap();
        let text = daemon::config(&test, &format!("  - {{ name: r, {rule} }}"));
        let daemon = Daemon::start_config(&text.replace("limits: {", "limits: { destroy_per_hour: 10,")).await;
        daemon.settled().await;
        let totals = async || {
            let orders = all(&db, "orders").await;
            orders.iter().filter(|order| order.to_string().contains("total")).count()
        };
        assert_eq!(totals().await, 30);
        let blocked = match (survives, change) {
            (true, _) => {
                items.drop().await.unwrap();
                BlockReason::SourceGone
            }
            (false, Some(change)) => {
                db.collection::<Document>("orders").update_many(doc! {}, set(change)).await.unwrap();
                BlockReason::RemovalLimit
            }
            (false, None) => {
                items.delete_one(doc! {"_id": 1}).await.unwrap();
                BlockReason::RemovalLimit
            }
        };
        until("the rule is blocked", async || {
            let states = daemon.progress().borrow().states.clone();
            (*states.first().unwrap() == RuleState::Blocked(blocked.clone())).then_some(())
        })
        .await;
        let left = totals().await;
        assert!(if survives { left == 30 } else { left >= 20 }, "{rule}: {left}");
        daemon.stop().await;
    }
}

/// A target whose values are replaced by those of `otherwise` has lost them as well.
#[tokio::test]
async fn values_that_are_replaced_for_want_of_a_source_count_towards_the_removal_limit() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("items").insert_one(doc! {"_id": 1, "price": 2, "name": "part"}).await.unwrap();
    db.collection("orders").insert_many((0..30).map(|n| doc! {"_id": n, "item": 1, "qty": n + 1})).await.unwrap();
    let rule = "copy: { source: items, target: orders, match: { item: _id }, \
        set: { total: { $multiply: [$price, $$target.qty] }, name: $name }, otherwise: { total: 0 } }";
    let text = daemon::config(&test, &format!("  - {{ name: r, {rule} }}"));
    let daemon = Daemon::start_config(&text.replace("limits: {", "limits: { destroy_per_hour: 10,")).await;
    daemon.settled().await;
    db.collection::<Document>("items").delete_one(doc! {"_id": 1}).await.unwrap();
    until("the rule is blocked", async || {
        let blocked = RuleState::Blocked(BlockReason::RemovalLimit);
        (daemon.progress().borrow().states[0] == blocked).then_some(())
    })
    .await;
    let named = all(&db, "orders").await.iter().filter(|order| order.contains_key("name")).count();
    assert!(named >= 20, "{named}");
    daemon.stop().await;
}

/// A write that waits on the server while the path changes that its value was computed from matches nothing.
#[tokio::test]
async fn a_value_that_was_overtaken_is_never_stored() {
    let set_of_one = ReplicaSet::start(1).await;
    let test = set_of_one.database().await;
    let (db, admin) = (test.database(), test.client.database("admin"));
    db.collection("messages").insert_many((1..=2).map(|n| message(n, 1, n.into()))).await.unwrap();
    let subscriptions = db.collection::<Document>("subscriptions");
    subscriptions.insert_one(doc! {"_id": 1, "rid": 1, "ls": at(0)}).await.unwrap();
    let daemon = Daemon::start(&test, &format!("  - {{ name: unread, {} }}", UNREAD.replace('@', ""))).await;
    daemon.settled().await;
    let begun = now(&db).await;
    let namespace = format!("{}.subscriptions", test.name);
    let data = doc! {"failCommands": ["update"], "namespace": namespace, "appName": "denormd", "blockConnection": true, "blockTimeMS": 3000};
    let point = doc! {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data};
    let entered = match admin.run_command(point).await.unwrap().get("count") {
        Some(Bson::Int32(count)) => i64::from(*count),
        Some(Bson::Int64(count)) => *count,
        other => panic!("no count: {other:?}"),
    };
    // Its value is 3 until the member looks.
    db.collection("messages").insert_one(message(3, 1, 3)).await.unwrap();
    let wait = doc! {"waitForFailPoint": "failCommand", "timesEntered": entered + 1, "maxTimeMS": 120_000};
    admin.run_command(wait).await.unwrap();
    subscriptions.update_one(doc! {"_id": 1}, set(doc! {"ls": at(2)})).await.unwrap();
    daemon.settled().await;
    assert_eq!(all(&db, "subscriptions").await, [doc! {"_id": 1, "rid": 1, "ls": at(2), "unread": 1}]);
    let written = oplog(&test, begun).await;
    let looked = written.iter().position(|entry| entry.to_string().contains("\"ls\"")).unwrap();
    let late = written[looked..].iter().filter(|entry| entry.to_string().contains("\"unread\": 3"));
    assert_eq!(late.count(), 0, "{written:#?}");
    assert!(written[looked..].iter().any(|entry| entry.to_string().contains("\"unread\": 1")), "{written:#?}");
    daemon.stop().await;
}

/// The report on a rule that is refused.
fn refusal(rule: &str) -> String {
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {{ name: r, {rule} }}\n");
    let loaded = load(&text);
    let mistakes = plan::compile(&loaded.config, None).err().unwrap_or_else(|| panic!("{rule} is taken"));
    loaded.report(&mistakes).to_string()
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason() {
    let copy = |rest: &str| format!("copy: {{ source: s, target: t, match: {{ ref: _id }}, {rest} }}");
    let each = |rest: &str| format!("copy: {{ source: s, target: t, match: {{ 'l.$[].s': _id }}, {rest} }}");
    for (rule, message) in [
        (copy("set: { n: $$target }"), "`$$target` alone reads the whole target"),
        (copy("set: { n: { $mergeObjects: [$x, $$target] } }"), "`$$target` alone reads the whole target"),
        (
            copy("set: { n: { $getField: { field: { $concat: [a, $b] }, input: $$target } } }"),
            "`$$target` alone reads the whole target",
        ),
        (copy("set: { n: $$target.n }"), "the rule writes `n` and reads it with `$$target`"),
        (copy("set: { n.a: $$target.n }"), "the rule writes `n.a` and reads it with `$$target`"),
        (copy("set: { n: $$target.n.a }"), "the rule writes `n` and reads it with `$$target`"),
        (each("set: { 'l.$[].n': $$target.l }"), "the rule writes `l.$[].n` and reads it with `$$target`"),
        (each("set: { 'l.$[].n': $$targetElement }"), "the rule writes `l.$[].n` and reads it with `$$target`"),
        (each("set: { 'l.$[].n': $$targetElement.n }"), "the rule writes `l.$[].n` and reads it with `$$target`"),
        (each("set: { n: $$targetElement.q }"), "a path beside the array has a value for all of them"),
        (copy("set: { n: $$targetElement.q }"), "`match` binds no array of the target"),
        (copy("set: { n: '$$target.l.$[].q' }"), "`$[]` has no meaning in an expression"),
        (copy("once: true, set: { n: $$target.q }"), "`once` fills a value and keeps it"),
        (copy("on_missing: delete, set: { n: $$target.q }"), "`delete` depends on the reference alone"),
        (each("on_missing: remove, set: { 'l.$[].n': $$target.q }"), "`remove` depends on the reference alone"),
        (
            "copy: { source: s, target: t, match: { 'a.$[].b.$[].s': _id }, set: { 'a.$[].b.$[].n': $$target.q } }".to_owned(),
            "an array inside another array",
        ),
        (
            "copy: { source: { collection: s, where: { $or: [{ $expr: { $gt: [$a, $$target.b] } }] } }, target: t, match: { ref: _id }, set: { n: $n } }".to_owned(),
            "`$$target` is not known here",
        ),
        (
            "copy: { source: s, target: { collection: t, where: { $expr: { $gt: [$a, $$target.b] } } }, match: { ref: _id }, set: { n: $n } }".to_owned(),
            "`$$target` is not known here",
        ),
        (
            "copy: { source: { collection: s, where: { $expr: { $gt: [$a, $$target.n] } } }, target: t, match: { ref: _id }, set: { n: $n } }".to_owned(),
            "the rule writes `n` and reads it with `$$target`",
        ),
    ] {
        let report = refusal(&rule);
        assert!(report.contains(message), "{rule}\n{report}");
        assert!(report.contains(":3:"), "no line: {report}");
    }
}

/// Another rule's path is read like the application's; a circle of such reads is refused.
#[test]
fn rules_that_read_their_targets_are_ordered() {
    let rules = |first: &str, second: &str| {
        let copy = |name: &str, rest: &str| {
            format!(
                "  - {{ name: {name}, copy: {{ source: s, target: t, match: {{ ref: _id }}, set: {{ {rest} }} }} }}\n"
            )
        };
        let (first, second) = (copy("first", first), copy("second", second));
        let loaded = load(&format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{first}{second}"));
        plan::compile(&loaded.config, None).map_err(|mistakes| loaded.report(&mistakes).to_string())
    };
    let plan = rules("a: { $concat: [$x, $$target.b] }", "b: $y").unwrap();
    let order: Vec<&str> = plan.order.iter().map(|id| plan.rule(*id).name.as_str()).collect();
    assert_eq!(order, ["second", "first"]);
    let circle = rules("a: { $concat: [$x, $$target.b] }", "b: { $concat: [$y, $$target.a] }").unwrap_err();
    assert!(circle.contains("feed each other in a circle"), "{circle}");
}
