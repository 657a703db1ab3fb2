//! Documents that a rule creates: totals for each item and day.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use bson::{Bson, DateTime, Document, doc};
use denormd_model::rule_state::{BlockReason, RuleState};

use crate::support::{
    cases::{Case, Write, dead_letters, delete, every_way, insert, replace, update},
    daemon::{self, Daemon, all, until},
    process::Program,
};

const DAILY: &str = "aggregate: { source: '@sales', target: { collection: '@daily', create: true }, \
    match: { _id.item: item, _id.day: { $dateTrunc: { date: $at, unit: day } } }, set: { amount: { $sum: $amount }, n: { $sum: 1 } } }";
const COUNT: &str = "aggregate: { source: '@sales', target: { collection: '@counts', create: true }, match: { _id: item }, set: { n: { $sum: 1 } } }";

/// Targets of a rule are large enough for shared statements with a field of this size.
const LONG: &str = "a note of more than thirty-two bytes";

fn at(text: &str) -> Bson {
    DateTime::parse_rfc3339_str(text).unwrap().into()
}

fn day(text: &str) -> Bson {
    at(&format!("{text}T00:00:00Z"))
}

fn sale(id: i32, item: impl Into<Bson>, time: &str, amount: i32) -> Document {
    doc! {"_id": id, "item": item.into(), "at": at(time), "amount": amount}
}

fn daily(item: i32, date: &str, amount: i32, n: i32) -> Document {
    doc! {"_id": {"item": item, "day": day(date)}, "amount": amount, "n": n}
}

fn set(fields: Document) -> Document {
    doc! {"$set": fields}
}

/// Sales of two items on two days.
fn some_sales() -> Vec<Document> {
    vec![
        sale(1, 7, "2024-03-09T10:00:00Z", 5),
        sale(2, 7, "2024-03-09T23:59:59.999Z", 6),
        sale(3, 7, "2024-03-10T00:00:00Z", 7),
        sale(4, 8, "2024-03-09T12:00:00Z", 8),
    ]
}

fn totals() -> Vec<Case> {
    let in_zone = |zone: &str| DAILY.replace("unit: day", &format!("unit: day, timezone: {zone}"));
    vec![
        Case::new("totals for each item and day", DAILY).has("sales", some_sales()).expect(
            "daily",
            [daily(7, "2024-03-09", 11, 2), daily(7, "2024-03-10", 7, 1), daily(8, "2024-03-09", 8, 1)],
        ),
        Case::new("sales come, change, move to another day and item, and go", DAILY)
            .has("sales", some_sales())
            .writes([
                insert("sales", sale(5, 9, "2024-03-11T01:00:00Z", 1)),
                update("sales", 1, set(doc! {"amount": 50})),
                update("sales", 3, set(doc! {"at": at("2024-03-09T01:00:00Z")})),
                update("sales", 4, set(doc! {"item": 9, "at": at("2024-03-11T02:00:00Z")})),
                delete("sales", 2),
                replace("sales", sale(5, 9, "2024-03-12T00:00:00Z", 3)),
            ])
            .expect(
                "daily",
                [daily(7, "2024-03-09", 57, 2), daily(9, "2024-03-11", 8, 1), daily(9, "2024-03-12", 3, 1)],
            ),
        Case::new("rows of an interval are in the order of `_id`, whatever their times", "aggregate: { source: '@sales', target: { collection: '@days', create: true }, match: { _id: { $dateTrunc: { date: $at, unit: day } } }, set: { amounts: { $push: $amount }, first: { $first: $amount } } }")
            .has("sales", [sale(1, 7, "2024-03-09T23:00:00Z", 5), sale(2, 7, "2024-03-09T10:00:00Z", 6)])
            .writes([insert("sales", sale(0, 8, "2024-03-09T12:00:00Z", 4))])
            .expect("days", [doc! {"_id": day("2024-03-09"), "amounts": [4, 5, 6], "first": 4}]),
        Case::new("the same in the rule's order, with an item beside the interval", "aggregate: { source: '@sales', target: { collection: '@daily', create: true }, match: { _id.day: { $dateTrunc: { date: $at, unit: day } }, _id.item: item }, sort: { amount: -1 }, set: { amounts: { $push: $amount } } }")
            .has("sales", [sale(1, 7, "2024-03-09T09:00:00Z", 5), sale(2, 7, "2024-03-09T10:00:00Z", 6), sale(3, 8, "2024-03-09T10:00:00Z", 6)])
            .writes([insert("sales", sale(4, 7, "2024-03-09T12:00:00Z", 4))])
            .expect("daily", [
                doc! {"_id": {"day": day("2024-03-09"), "item": 7}, "amounts": [6, 5, 4]},
                doc! {"_id": {"day": day("2024-03-09"), "item": 8}, "amounts": [6]},
            ]),
        Case::new("the last sale goes", DAILY)
            .has("sales", some_sales())
            .writes([delete("sales", 3), delete("sales", 4), delete("sales", 1), delete("sales", 2)])
            .expect("daily", []),
        Case::new("null, missing and other values make no document", DAILY)
            .has("sales", [
                doc! {"_id": 1, "item": null, "at": day("2024-03-09"), "amount": 1},
                doc! {"_id": 2, "at": day("2024-03-09"), "amount": 1},
                doc! {"_id": 3, "item": 7, "amount": 1},
                doc! {"_id": 4, "item": 7, "at": null, "amount": 1},
                doc! {"_id": 5, "item": 7, "at": day("2024-03-09"), "amount": 1},
            ])
            .writes([update("sales", 5, doc! {"$unset": {"at": 1}}), update("sales", 3, set(doc! {"at": day("2024-03-01")}))])
            .expect("daily", [daily(7, "2024-03-01", 1, 1)]),
        Case::new("equal keys are one document, whichever exists", COUNT)
            .has("counts", [doc! {"_id": 7.0, "note": "mine"}, doc! {"_id": 9, "note": "alone"}])
            .has("sales", [sale(1, 7, "2024-03-09T10:00:00Z", 5), sale(2, 7.0, "2024-03-09T10:00:00Z", 5)])
            .writes([insert("sales", sale(3, Bson::Int64(7), "2024-03-09T10:00:00Z", 5)), insert("sales", sale(4, "7", "2024-03-09T10:00:00Z", 5))])
            .expect(
                "counts",
                [doc! {"_id": 7.0, "note": "mine", "n": 3}, doc! {"_id": 9, "note": "alone", "n": 0}, doc! {"_id": "7", "n": 1}],
            ),
        Case::new("several documents with the same values are inserted beside others", COUNT)
            .has("counts", (1..=3).map(|id| doc! {"_id": id, "note": LONG}))
            .has("sales", [sale(1, "a", "2024-03-09T10:00:00Z", 5), sale(2, "b", "2024-03-09T10:00:00Z", 5)])
            .writes([insert("sales", sale(3, "c", "2024-03-09T10:00:00Z", 5)), insert("sales", sale(4, "d", "2024-03-09T10:00:00Z", 5))])
            .expect("counts", (1..=3).map(|id| doc! {"_id": id, "note": LONG, "n": 0}).chain(["a", "b", "c", "d"].map(|id| doc! {"_id": id, "n": 1}))),
        Case::new("a document with fields of others stays, and is that of no sales", DAILY)
            .has("daily", [doc! {"_id": {"item": 7, "day": day("2024-03-10")}, "note": "fair weather"}])
            .has("sales", some_sales())
            .writes([delete("sales", 3)])
            .expect("daily", [
                daily(7, "2024-03-09", 11, 2),
                doc! {"_id": {"item": 7, "day": day("2024-03-10")}, "note": "fair weather", "amount": 0, "n": 0},
                daily(8, "2024-03-09", 8, 1),
            ]),
        Case::new("with on_empty: unset it keeps its own fields alone", &COUNT.replace("set: { n", "on_empty: unset, set: { n"))
            .has("counts", [doc! {"_id": 7, "note": "mine"}, doc! {"_id": 8}])
            .has("sales", [sale(1, 7, "2024-03-09T10:00:00Z", 5), sale(2, 6, "2024-03-09T10:00:00Z", 5)])
            .writes([delete("sales", 1), delete("sales", 2)])
            .expect("counts", [doc! {"_id": 7, "note": "mine"}]),
        Case::new("documents of another form are none of the rule's", DAILY)
            .has("daily", [
                doc! {"_id": 5, "amount": "mine"},
                doc! {"_id": {"day": day("2024-03-09"), "item": 7}, "amount": "mine"},
                doc! {"_id": {"item": 7, "day": day("2024-03-09"), "shop": 1}, "amount": "mine"},
                doc! {"_id": {"item": null, "day": day("2024-03-09")}, "amount": "mine"},
            ])
            .has("sales", [sale(1, 7, "2024-03-09T10:00:00Z", 5)])
            .expect("daily", [
                doc! {"_id": 5, "amount": "mine"},
                doc! {"_id": {"item": null, "day": day("2024-03-09")}, "amount": "mine"},
                doc! {"_id": {"item": 7, "day": day("2024-03-09")}, "amount": 5, "n": 1},
                doc! {"_id": {"item": 7, "day": day("2024-03-09"), "shop": 1}, "amount": "mine"},
                doc! {"_id": {"day": day("2024-03-09"), "item": 7}, "amount": "mine"},
            ]),
        Case::new("a day of 23 hours, and one of 25", &in_zone("America/New_York"))
            .has("sales", [
                sale(1, 7, "2024-03-10T04:59:59Z", 1),
                sale(2, 7, "2024-03-10T05:00:00Z", 2),
                sale(3, 7, "2024-03-11T03:59:59Z", 4),
                sale(4, 7, "2024-03-11T04:00:00Z", 8),
                sale(5, 7, "2024-11-03T04:00:00Z", 16),
                sale(6, 7, "2024-11-04T04:59:59Z", 32),
                sale(7, 7, "2024-11-04T05:00:00Z", 64),
            ])
            .writes([update("sales", 7, set(doc! {"at": at("2024-11-03T05:00:00Z")}))])
            .expect("daily", [
                doc! {"_id": {"item": 7, "day": at("2024-03-09T05:00:00Z")}, "amount": 1, "n": 1},
                doc! {"_id": {"item": 7, "day": at("2024-03-10T05:00:00Z")}, "amount": 6, "n": 2},
                doc! {"_id": {"item": 7, "day": at("2024-03-11T04:00:00Z")}, "amount": 8, "n": 1},
                doc! {"_id": {"item": 7, "day": at("2024-11-03T04:00:00Z")}, "amount": 112, "n": 3},
            ]),
        // In UTC, a month after the start of this March is two days before its end, and the third sale is after that. The range of
        // April begins three hours before it.
        Case::new("months of a zone that is ahead of UTC", &DAILY.replace("unit: day", "unit: month, timezone: Europe/Paris"))
            .has("sales", [
                sale(1, 7, "2024-02-29T22:59:59Z", 1),
                sale(2, 7, "2024-02-29T23:00:00Z", 2),
                sale(3, 7, "2024-03-31T12:00:00Z", 4),
                sale(4, 7, "2024-03-31T22:00:00Z", 8),
            ])
            .expect("daily", [
                doc! {"_id": {"item": 7, "day": at("2024-01-31T23:00:00Z")}, "amount": 1, "n": 1},
                doc! {"_id": {"item": 7, "day": at("2024-02-29T23:00:00Z")}, "amount": 6, "n": 2},
                doc! {"_id": {"item": 7, "day": at("2024-03-31T22:00:00Z")}, "amount": 8, "n": 1},
            ]),
        // The day begins with the second midnight, an hour after its first sale.
        Case::new("a clock that is set back at midnight", &in_zone("America/Havana"))
            .has("sales", [
                sale(1, 7, "2018-11-04T04:13:11Z", 1),
                sale(2, 7, "2018-11-04T06:00:00Z", 2),
                sale(3, 7, "2018-11-04T03:59:59Z", 4),
            ])
            .expect("daily", [
                doc! {"_id": {"item": 7, "day": at("2018-11-03T04:00:00Z")}, "amount": 4, "n": 1},
                doc! {"_id": {"item": 7, "day": at("2018-11-04T05:00:00Z")}, "amount": 3, "n": 2},
            ]),
        // From 00:01 back to 23:01: an hour after its end, the day goes on.
        Case::new("a clock that is set back just after midnight", &in_zone("Canada/Newfoundland"))
            .has("sales", [sale(1, 7, "1987-10-25T03:12:38Z", 1), sale(2, 7, "1987-10-24T12:00:00Z", 2), sale(3, 7, "1987-10-25T04:00:00Z", 4)])
            .expect("daily", [
                doc! {"_id": {"item": 7, "day": at("1987-10-24T02:30:00Z")}, "amount": 3, "n": 2},
                doc! {"_id": {"item": 7, "day": at("1987-10-25T03:30:00Z")}, "amount": 4, "n": 1},
            ]),
        Case::new("weeks from Monday, and quarters of an hour", &DAILY.replace("_id.day: { $dateTrunc: { date: $at, unit: day } }", "_id.week: { $dateTrunc: { date: $at, unit: week, startOfWeek: monday } }, _id.quarter: { $dateTrunc: { date: $at, unit: minute, binSize: 15 } }"))
            .has("sales", [sale(1, 7, "2024-03-10T10:14:59Z", 1), sale(2, 7, "2024-03-10T10:15:00Z", 2), sale(3, 7, "2024-03-10T10:29:59Z", 4)])
            .expect("daily", [
                doc! {"_id": {"item": 7, "week": day("2024-03-04"), "quarter": at("2024-03-10T10:00:00Z")}, "amount": 1, "n": 1},
                doc! {"_id": {"item": 7, "week": day("2024-03-04"), "quarter": at("2024-03-10T10:15:00Z")}, "amount": 6, "n": 2},
            ]),
        Case::new("sources that a filter leaves out", &DAILY.replace("source: '@sales'", "source: { collection: '@sales', where: { void: { $ne: true } } }"))
            .has("sales", some_sales())
            .writes([update("sales", 4, set(doc! {"void": true})), update("sales", 1, set(doc! {"void": true})), update("sales", 1, set(doc! {"void": false}))])
            .expect("daily", [daily(7, "2024-03-09", 11, 2), daily(7, "2024-03-10", 7, 1)]),
    ]
}

fn with_others() -> Vec<Case> {
    let tags = "aggregate: { source: '@talks', target: { collection: '@tags', create: true }, match: { _id: 'tags.$[]' }, set: { n: { $sum: 1 } } }";
    let talk = |id: i32, tags: &[&str]| doc! {"_id": id, "tags": tags.to_vec()};
    let returns = DAILY
        .replace("@sales", "@returns")
        .replace("set: { amount: { $sum: $amount }, n: { $sum: 1 } }", "set: { returned: { $sum: $amount } }");
    let both = |item: i32, date: &str, amount: i32, n: i32, returned: i32| {
        doc! {"_id": {"item": item, "day": day(date)}, "amount": amount, "n": n, "returned": returned}
    };
    vec![
        Case::new("a document for each tag", tags)
            .has("talks", [talk(1, &["a", "b"]), talk(2, &["a", "a"]), talk(3, &[])])
            .writes([
                update("talks", 1, set(doc! {"tags": ["b", "c"]})),
                update("talks", 3, doc! {"$push": {"tags": "d"}}),
                update("talks", 2, doc! {"$pop": {"tags": 1}}),
                update("talks", 3, set(doc! {"tags": "no array"})),
            ])
            .expect("tags", [doc! {"_id": "a", "n": 1}, doc! {"_id": "b", "n": 1}, doc! {"_id": "c", "n": 1}]),
        Case::new("two rules share the documents", DAILY)
            .and(&returns)
            .has("sales", some_sales())
            .has("returns", [sale(1, 7, "2024-03-09T10:00:00Z", 1), sale(2, 6, "2024-03-09T10:00:00Z", 2)])
            .writes([
                // This document stays for the other rule's sake.
                delete("sales", 1),
                delete("sales", 2),
                // And this one goes with the last of both.
                insert("returns", sale(3, 8, "2024-03-09T11:00:00Z", 3)),
                delete("sales", 4),
                delete("returns", 3),
                insert("sales", sale(9, 6, "2024-03-09T23:00:00Z", 4)),
            ])
            .expect("daily", [
                both(6, "2024-03-09", 4, 1, 2),
                both(7, "2024-03-09", 0, 0, 1),
                both(7, "2024-03-10", 7, 1, 0),
            ]),
        Case::new("copies in the documents, and totals over them", DAILY)
            .and("copy: { source: '@items', target: '@daily', match: { _id.item: _id }, set: { name: $name } }")
            .and("aggregate: { source: '@daily', target: '@items', match: { _id: _id.item }, set: { sold: { $sum: $n }, days: { $sum: 1 } } }")
            .has("items", [doc! {"_id": 7, "name": "bolt"}, doc! {"_id": 8, "name": "nut"}])
            .has("sales", some_sales())
            .writes([delete("sales", 4), insert("sales", sale(5, 7, "2024-03-12T10:00:00Z", 1)), update("items", 7, set(doc! {"name": "screw"}))])
            .expect("daily", [
                doc! {"_id": {"item": 7, "day": day("2024-03-09")}, "amount": 11, "n": 2, "name": "screw"},
                doc! {"_id": {"item": 7, "day": day("2024-03-10")}, "amount": 7, "n": 1, "name": "screw"},
                doc! {"_id": {"item": 7, "day": day("2024-03-12")}, "amount": 1, "n": 1, "name": "screw"},
            ])
            .expect("items", [doc! {"_id": 7, "name": "screw", "sold": 4, "days": 3}, doc! {"_id": 8, "name": "nut", "sold": 0, "days": 0}]),
        // A document was deleted with the application's value in such a field.
        Case::new("a field that a rule owns in some of the documents", COUNT)
            .and("copy: { source: '@items', target: { collection: '@counts', where: { _id: { $lt: 8 } } }, match: { _id: _id }, set: { name: $name } }")
            .has("items", [doc! {"_id": 7, "name": "bolt"}, doc! {"_id": 8, "name": "nut"}])
            .has("sales", some_sales())
            .has("counts", [doc! {"_id": 8, "n": 1, "name": "the application's"}])
            .writes([
                delete("sales", 1),
                delete("sales", 2),
                delete("sales", 3),
                delete("sales", 4),
            ])
            .expect("counts", [doc! {"_id": 8, "n": 0, "name": "the application's"}]),
        Case::new("owned paths inside a field", &COUNT.replace("set: { n", "set: { stats.n"))
            .has("counts", [doc! {"_id": 7, "stats": {"by": "me"}}, doc! {"_id": 8, "stats": {"n": 4}}, doc! {"_id": 9, "stats": {}}])
            .has("sales", [sale(1, 6, "2024-03-09T10:00:00Z", 5)])
            .expect("counts", [doc! {"_id": 6, "stats": {"n": 1}}, doc! {"_id": 7, "stats": {"by": "me", "n": 0}}]),
        Case::new("groups in the documents", "aggregate: { source: '@sales', target: { collection: '@days', create: true }, match: { _id: { $dateTrunc: { date: $at, unit: day } } }, by: { item: $item }, into: items, set: { amount: { $sum: $amount } } }")
            .has("sales", some_sales())
            .writes([delete("sales", 3), delete("sales", 1)])
            .expect("days", [doc! {"_id": day("2024-03-09"), "items": [{"item": 7, "amount": 6}, {"item": 8, "amount": 8}]}]),
    ]
}

fn by_history() -> Vec<Case> {
    let id = || doc! {"item": 7, "day": day("2024-03-09")};
    let guarded = |how: &str| DAILY.replacen("aggregate:", &format!("guard: {how}\naggregate:"), 1);
    let (watched, unaudited) = (guarded("watch"), guarded("off"));
    vec![
        Case::new(
            "with on_empty: keep the document stays",
            &DAILY.replace("set: { amount", "on_empty: keep, set: { amount"),
        )
        .has("sales", some_sales())
        .writes([delete("sales", 3), delete("sales", 4)])
        .expect("daily", [daily(7, "2024-03-09", 11, 2), daily(7, "2024-03-10", 0, 0), daily(8, "2024-03-09", 0, 0)])
        .on_history(),
        // Not by the audit: by the event.
        Case::new("somebody deletes a document, and it comes back", &unaudited)
            .has("sales", some_sales())
            .writes([delete("daily", id()), delete("daily", doc! {"item": 8, "day": day("2024-03-09")})])
            .expect(
                "daily",
                [daily(7, "2024-03-09", 11, 2), daily(7, "2024-03-10", 7, 1), daily(8, "2024-03-09", 8, 1)],
            )
            .on_history(),
        Case::new("somebody edits and replaces documents", &watched)
            .has("sales", some_sales())
            .writes([
                update("daily", id(), set(doc! {"amount": 999})),
                update("daily", id(), doc! {"$unset": {"n": 1}}),
                replace("daily", doc! {"_id": {"item": 8, "day": day("2024-03-09")}, "note": "mine"}),
            ])
            .expect(
                "daily",
                [
                    daily(7, "2024-03-09", 11, 2),
                    daily(7, "2024-03-10", 7, 1),
                    doc! {"_id": {"item": 8, "day": day("2024-03-09")}, "note": "mine", "amount": 8, "n": 1},
                ],
            )
            .on_history(),
        Case::new("somebody inserts documents of keys without sales", DAILY)
            .has("sales", some_sales())
            .writes([
                insert("daily", doc! {"_id": {"item": 5, "day": day("2024-03-09")}, "amount": 5}),
                insert("daily", doc! {"_id": {"item": 6, "day": day("2024-03-09")}, "note": "mine", "amount": 5}),
                insert("daily", doc! {"_id": {"item": 7, "day": at("2024-03-09T12:00:00Z")}}),
            ])
            .expect(
                "daily",
                [
                    doc! {"_id": {"item": 6, "day": day("2024-03-09")}, "note": "mine", "amount": 0, "n": 0},
                    daily(7, "2024-03-09", 11, 2),
                    daily(7, "2024-03-10", 7, 1),
                    daily(8, "2024-03-09", 8, 1),
                ],
            )
            .on_history(),
        Case::new("the last field of others goes after the last sale", DAILY)
            .has("sales", some_sales())
            .writes([
                update("daily", doc! {"item": 7, "day": day("2024-03-10")}, set(doc! {"note": "mine", "other": 1})),
                delete("sales", 3),
                update("daily", doc! {"item": 7, "day": day("2024-03-10")}, doc! {"$unset": {"note": 1}}),
                Write::Burst(vec![update(
                    "daily",
                    doc! {"item": 7, "day": day("2024-03-10")},
                    doc! {"$unset": {"other": 1}},
                )]),
            ])
            .expect("daily", [daily(7, "2024-03-09", 11, 2), daily(8, "2024-03-09", 8, 1)])
            .on_history(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn as_the_tables_say() {
    let cases: Vec<Case> = [totals(), with_others(), by_history()].into_iter().flatten().collect();
    every_way(&cases).await;
}

/// The rule of the tables, in collections of this test.
fn rules(more: &str) -> String {
    format!("  - {{ name: daily, allow_scan: true, {more} {} }}", DAILY.replace('@', ""))
}

/// A rule with this name that creates documents in the same collection, from `returns`.
fn returned(name: &str) -> String {
    let rule = rules("").replace("name: daily", &format!("name: {name}")).replace("'sales'", "returns");
    rule.replace("amount: { $sum: $amount }, n: { $sum: 1 }", "returned: { $sum: $amount }")
}

async fn documents(test: &denormd_fixture::TestDb) -> u64 {
    test.database().collection::<Document>("daily").count_documents(doc! {}).await.unwrap()
}

/// A value that makes no `_id` is a dead letter of its source, and one that is gone ends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_with_an_unusable_value_is_a_dead_letter() {
    let test = denormd_fixture::database().await;
    let sales = test.database().collection::<Document>("sales");
    let bad = |id: i32, item: Bson, at: Bson| doc! {"_id": id, "item": item, "at": at, "amount": 1};
    sales.insert_many([bad(1, 7.into(), "2024-03-09".into()), bad(2, 7.into(), day("2024-03-09"))]).await.unwrap();
    let daemon = Daemon::start(&test, &rules("")).await;
    daemon.settled().await;
    let array = Bson::Array(vec![day("2024-03-09")]);
    sales.insert_many([bad(3, Bson::Array(vec![7.into()]), day("2024-03-09")), bad(4, 7.into(), array)]).await.unwrap();
    daemon.settled().await;
    let about = async || {
        let mut ids: Vec<i32> = dead_letters(&test)
            .await
            .iter()
            .map(|one| {
                let id = one.get_document("_id").unwrap();
                assert_eq!(id.get_str("task").unwrap(), "LocateSource");
                id.get_array("key").unwrap()[0].as_i32().unwrap()
            })
            .collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(about().await, [1, 3, 4]);
    assert_eq!(documents(&test).await, 1, "the others are not held up");
    sales.update_one(doc! {"_id": 1}, set(doc! {"at": day("2024-03-10")})).await.unwrap();
    sales.delete_one(doc! {"_id": 3}).await.unwrap();
    sales.update_one(doc! {"_id": 4}, set(doc! {"at": null})).await.unwrap();
    until("the dead letters end", || async { about().await.is_empty().then_some(()) }).await;
    assert_eq!(documents(&test).await, 2);
    daemon.stop().await;
}

/// A range of dates also finds sources of another interval. If computing something from one of them failed, this interval's document
/// became a dead letter.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_of_another_interval_does_not_count() {
    let week = "{ $dateTrunc: { date: $at, unit: week } }";
    let rule = |source: &str, of: &str, set: &str| {
        format!(
            "  - {{ name: weekly, allow_scan: true, aggregate: {{ source: {source}, target: {{ collection: weekly, create: true }}, match: {of}, set: {set} }} }}"
        )
    };
    // A Thursday, in a week that begins on the third.
    let (first, thursday) = (day("2024-03-03"), day("2024-03-07"));
    let sale = doc! {"_id": 1, "at": thursday.clone(), "name": 5, "lines": [{"item": 7, "qty": "x"}]};
    let simple = format!("{{ _id: {week} }}");
    let of_item = format!("{{ _id.item: 'lines.$[].item', _id.week: {week} }}");
    let sold = "{ collection: sales, where: { $expr: { $gt: [{ $toInt: $$element.qty }, 0] } } }";
    let one = |rule: String| (rule, thursday.clone(), vec![first.clone()]);
    for (rule, id, failing) in [
        one(rule("sales", &simple, "{ last: { $max: { $concat: [$name, '!'] } } }")),
        one(rule("sales", &simple, "{ all: { $mergeObjects: $name } }")),
        (
            rule(sold, &of_item, "{ n: { $sum: 1 } }"),
            doc! {"item": 7, "week": thursday.clone()}.into(),
            vec![7.into(), first.clone()],
        ),
    ] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        db.collection("sales").insert_one(sale.clone()).await.unwrap();
        let daemon = Daemon::start(&test, &rule).await;
        db.collection("weekly").insert_one(doc! {"_id": id}).await.unwrap();
        daemon.settled().await;
        assert_eq!(all(&db, "weekly").await, Vec::<Document>::new(), "{rule}");
        let failed: Vec<Document> = dead_letters(&test).await;
        let keys: Vec<&Vec<Bson>> =
            failed.iter().map(|one| one.get_document("_id").unwrap().get_array("key").unwrap()).collect();
        assert_eq!(keys, [&failing], "{rule}");
        daemon.stop().await;
    }
}

/// Deleted documents count for the removal limit, and are not deleted beyond it.
#[tokio::test(flavor = "multi_thread")]
async fn deletions_stop_at_the_removal_limit() {
    let test = denormd_fixture::database().await;
    let sales = test.database().collection::<Document>("sales");
    sales.insert_many((0..20).map(|n| sale(n, n, "2024-03-09T10:00:00Z", 1))).await.unwrap();
    let text = daemon::config(&test, &rules("")).replace("limits: {", "limits: { destroy_per_hour: 5,");
    let daemon = Daemon::start_config(&text).await;
    daemon.settled().await;
    assert_eq!(documents(&test).await, 20);
    sales.delete_many(doc! {"_id": {"$lt": 4}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(documents(&test).await, 16);
    sales.delete_many(doc! {}).await.unwrap();
    let states = test.beside("state").collection::<Document>("rules");
    until("the rule is blocked", || async { states.find_one(doc! {"backfill": "held"}).await.unwrap() }).await;
    let left = documents(&test).await;
    assert!((15..=16).contains(&left), "{left} documents are left");
    daemon.stop().await;
}

/// Documents that nobody has sources for are removed only after somebody has agreed.
#[tokio::test(flavor = "multi_thread")]
async fn a_first_backfill_deletes_nothing_unasked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("sales").insert_many(some_sales()).await.unwrap();
    db.collection("daily").insert_one(daily(1, "2023-01-01", 5, 1)).await.unwrap();
    let daemon = Daemon::start_unadopted(&daemon::config(&test, &rules(""))).await;
    until("the rule is blocked", || async {
        let progress = daemon.progress().borrow().clone();
        progress.states.iter().any(|state| matches!(state, RuleState::Blocked(BlockReason::Adoption(_)))).then_some(())
    })
    .await;
    assert_eq!(documents(&test).await, 1);
    daemon.stop().await;
}

/// While the other rule's source has never existed, it holds no document. A source that is gone holds all of them, until its rule is
/// taken out of the config.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_has_never_existed_holds_no_document() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("sales").insert_many(some_sales()).await.unwrap();
    let text = daemon::config(&test, &format!("{}\n{}", rules("guard: off, "), returned("returned")));
    // Without `plan --apply`, which would create the collection.
    let daemon = Daemon::begin(&daemon::load(&text), true).await;
    daemon.settled().await;
    assert_eq!(documents(&test).await, 3);
    let sales = db.collection::<Document>("sales");
    sales.delete_one(doc! {"_id": 4}).await.unwrap();
    daemon.settled().await;
    assert_eq!(documents(&test).await, 2);
    // Its source appears, and goes.
    db.collection("returns").insert_one(sale(1, 9, "2024-03-09T10:00:00Z", 1)).await.unwrap();
    daemon.settled().await;
    db.collection::<Document>("returns").drop().await.unwrap();
    until("the rule is blocked", || async {
        let progress = daemon.progress().borrow().clone();
        progress.states.iter().any(|state| *state == RuleState::Blocked(BlockReason::SourceGone)).then_some(())
    })
    .await;
    sales.insert_one(sale(5, 10, "2024-03-09T10:00:00Z", 1)).await.unwrap();
    daemon.settled().await;
    sales.delete_many(doc! {"_id": {"$in": [3, 5]}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(documents(&test).await, 4);
    daemon.stop().await;
    // The other rule leaves the config: documents with its field stay, and the one that it only held goes.
    let daemon = Daemon::begin(&daemon::load(&daemon::config(&test, &rules("guard: off, "))), true).await;
    daemon.settled().await;
    assert_eq!(documents(&test).await, 3);
    daemon.stop().await;
}

/// A rule whose source is gone gets another name. Nobody has agreed to what it deletes under that name, and no other rule deletes
/// its documents.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_with_another_name_loses_no_document_unasked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("sales").insert_many(some_sales()).await.unwrap();
    db.collection("returns").insert_one(sale(1, 9, "2024-03-09T10:00:00Z", 1)).await.unwrap();
    let text = |other: &str| daemon::config(&test, &format!("{}\n{}", rules("guard: off, "), returned(other)));
    let daemon = Daemon::begin(&daemon::load(&text("returned")), true).await;
    daemon.settled().await;
    assert_eq!(documents(&test).await, 4);
    daemon.stop().await;
    db.collection::<Document>("returns").drop().await.unwrap();
    let daemon = Daemon::begin(&daemon::load(&text("taken_back")), false).await;
    daemon.settled().await;
    let states = daemon.progress().borrow().states.clone();
    assert!(states.iter().any(|state| matches!(state, RuleState::Blocked(BlockReason::Adoption(_)))), "{states:?}");
    assert_eq!(documents(&test).await, 4);
    daemon.stop().await;
}

/// A creator dies at every step of its way, and the next one completes the work.
#[tokio::test(flavor = "multi_thread")]
async fn a_creator_that_dies_half_way() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let sales = db.collection::<Document>("sales");
    sales.insert_many((0..300).map(|n| sale(n, n % 50, "2024-03-09T10:00:00Z", 1))).await.unwrap();
    let text = daemon::config(&test, &rules("")).replace("limits: {", "limits: { destroy_per_hour: 100000,");
    let program = Program::new(&text);
    program.run(&["plan", "--apply"]).await.exits(0);
    program.dies_at("backfill-of-sources", 1).await;
    program.dies_at("page-done", 1).await;
    program.dies_at("written", 1).await;
    for (nth, place) in [(1, "read"), (1, "written"), (2, "written"), (1, "acknowledged"), (1, "position-saving")] {
        sales.delete_many(doc! {"item": {"$mod": [5, nth]}}).await.unwrap();
        sales.insert_one(sale(1000 + nth, 100 + nth, "2024-03-10T10:00:00Z", nth)).await.ok();
        program.dies_at(place, nth.unsigned_abs()).await;
    }
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    program.run(&["check"]).await.exits(0);
    let found = documents(&test).await;
    let keys = sales.distinct("item", doc! {}).await.unwrap().len() as u64;
    assert_eq!(found, keys);
    daemon.stop().await;
}

/// Nobody deletes the documents of a collection one by one that is dropped.
#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_is_dropped_is_filled_again() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("sales").insert_many(some_sales()).await.unwrap();
    let daemon = Daemon::start(&test, &rules("")).await;
    daemon.settled().await;
    assert_eq!(documents(&test).await, 3);
    db.collection::<Document>("daily").drop().await.unwrap();
    until("the documents are there again", || async { (documents(&test).await == 3).then_some(()) }).await;
    db.collection::<Document>("sales").delete_one(doc! {"_id": 4}).await.unwrap();
    daemon.settled().await;
    assert_eq!(documents(&test).await, 2);
    daemon.stop().await;
}

/// A document that is absent is a difference, and the audit and `check` find it by its sources.
#[tokio::test(flavor = "multi_thread")]
async fn a_document_that_is_absent_is_found() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("sales").insert_many(some_sales()).await.unwrap();
    // More documents than one page of a check.
    let more = (0..700).map(|n| doc! {"_id": 100 + n, "item": 100 + n, "at": day("2024-03-09"), "amount": 1});
    db.collection("sales").insert_many(more).await.unwrap();
    let program = Program::new(&daemon::config(&test, &rules("")));
    program.run(&["plan", "--apply"]).await.exits(0);
    program.run(&["backfill"]).await.exits(0);
    program.run(&["check"]).await.exits(0);
    let id = doc! {"_id": {"item": 8, "day": day("2024-03-09")}};
    db.collection::<Document>("daily").delete_one(id.clone()).await.unwrap();
    let told = program.run(&["check"]).await.exits(3);
    assert!(told.out.contains("_id"), "{}", told.out);
    program.run(&["check", "--sample", "1000"]).await.exits(3);
    program.run(&["check", "--repair"]).await;
    program.run(&["check"]).await.exits(0);
    // A document without sources that holds nothing else is one, too.
    db.collection::<Document>("daily").insert_one(daily(1, "2023-01-01", 5, 1)).await.unwrap();
    program.run(&["check"]).await.exits(3);
}

/// The mistakes of a rule's text.
fn mistakes(rules: &str) -> Vec<String> {
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{rules}\n");
    match denormd_rules::config::load_str(&text, denormd_rules::config::Format::Yaml) {
        Err(error) => vec![error.to_string()],
        Ok(loaded) => match denormd_rules::plan::compile(&loaded.config, None) {
            Ok(_) => Vec::new(),
            Err(mistakes) => mistakes.iter().map(|one| format!("{} ({:?})", one.message, one.hint)).collect(),
        },
    }
}

#[test]
fn what_has_no_meaning_is_refused() {
    let with = |rule: &str| mistakes(&format!("  - {{ name: r, {rule} }}"));
    let rule = |target: &str, entries: &str, more: &str| {
        with(&format!(
            "aggregate: {{ source: s, target: {target}, match: {entries}, set: {{ n: {{ $sum: 1 }} }}{more} }}"
        ))
    };
    let t = "{ collection: t, create: true }";
    assert_eq!(rule(t, "{ _id: item }", ""), [""; 0]);
    for (found, expected) in [
        (
            rule("t", "{ _id.d: { $dateTrunc: { date: $at, unit: day } } }", ""),
            "an interval of time needs `create: true`",
        ),
        (rule("t", "{ _id: item }", ", on_empty: keep"), "`on_empty: keep` needs `create: true`"),
        (rule(t, "{ item: item }", ""), "`item` is no part of it"),
        (rule(t, "{ _id: item, _id.day: day }", ""), "is the whole `_id`"),
        (rule(t, "{ _id.a.b: item }", ""), "is the whole `_id`"),
        (rule(t, "{ _id: ref.$id }", ""), "a DBRef cannot be a part of the `_id`"),
        (rule(t, "{ _id.d: { $dateTrunc: { date: '$a.$[].at', unit: day } } }", ""), "lies in an array"),
        (rule(t, "{ _id.d: { $dateTrunc: { date: at, unit: day } } }", ""), "`at` is not a path of the source"),
        (rule(t, "{ _id.d: { $dateTrunc: { date: $at } } }", ""), "the key `unit` is missing"),
        (rule(t, "{ _id.d: { $dateTrunc: { date: $at, unit: days } } }", ""), "did you mean `day`?"),
        (
            rule(t, "{ _id.d: { $dateTrunc: { date: $at, unit: day, timezone: $zone } } }", ""),
            "is read from the document",
        ),
        (rule(t, "{ _id: item }", ", key_type: string"), "`key_type` converts the target's values"),
        (rule("{ collection: t, create: true, where: { a: 1 } }", "{ _id: item }", ""), "`where` cannot choose"),
        (rule("{ collection: s, create: true }", "{ _id: item }", ""), "in its own source collection"),
        (
            with(&format!("copy: {{ source: s, target: {t}, match: {{ _id: item }}, set: {{ n: $n }} }}")),
            "`create` belongs to `aggregate`",
        ),
        (
            with(
                "aggregate: { source: { collection: s, create: true }, target: t, match: { _id: item }, set: { n: { $sum: 1 } } }",
            ),
            "never its sources",
        ),
        (
            with(&format!(
                "aggregate: {{ source: s, target: {t}, match: {{ _id: item }}, set: {{ n: {{ $sum: $$target.x }} }} }}"
            )),
            "their values cannot be computed from them",
        ),
    ] {
        assert!(found.iter().any(|one| one.contains(expected)), "{expected}: {found:?}");
    }
    let two = |entries: &str, more: &str| {
        let rule = |name: &str, entries: &str, path: &str, more: &str| {
            format!(
                "  - {{ name: {name}, aggregate: {{ source: s, target: {t}, match: {entries}, set: {{ {path}: {{ $sum: 1 }} }}{more} }} }}\n"
            )
        };
        mistakes(&format!("{}{}", rule("a", "{ _id.a: a, _id.b: b }", "x", ""), rule("b", entries, "y", more)))
    };
    assert_eq!(two("{ _id.a: c, _id.b: d }", ""), [""; 0]);
    for (found, expected) in [
        (two("{ _id.b: b, _id.a: a }", ""), "creates documents with another `_id`"),
        (
            two("{ _id.a: a, _id.b: { $dateTrunc: { date: $at, unit: day } } }", ""),
            "creates documents with another `_id`",
        ),
        (two("{ _id.a: a, _id.b: b }", ", on_empty: keep"), "creates documents in `d.t` as well"),
    ] {
        assert!(found.iter().any(|one| one.contains(expected)), "{expected}: {found:?}");
    }
    let deleted = mistakes(
        "  - { name: a, aggregate: { source: s, target: { collection: t, create: true }, match: { _id: x }, set: { n: { $sum: 1 } } } }\n  - { name: b, copy: { source: u, target: t, match: { _id: _id }, set: { m: $m }, on_missing: delete } }",
    );
    assert!(deleted.iter().any(|one| one.contains("creates the documents that this rule deletes")), "{deleted:?}");
    // A rule that reads the documents, and one that feeds it.
    let circle = mistakes(
        "  - { name: a, aggregate: { source: s, target: { collection: t, create: true }, match: { _id: x }, set: { n: { $sum: $m } } } }\n  - { name: b, aggregate: { source: t, target: s, match: { y: _id }, set: { m: { $sum: 1 } } } }",
    );
    assert!(circle.iter().any(|one| one.contains("in a circle")), "{circle:?}");
}
