//! Copy rules: the cases that a simple change-stream script gets wrong, and every form of reference through every
//! change.
#![allow(clippy::too_many_lines, reason = "tables are long")]

use bson::{
    Binary, Bson, DateTime, Decimal128, Document, JavaScriptCodeWithScope, Regex, Timestamp, bson, doc, oid::ObjectId,
};
use denormd_engine::preflight;
use denormd_mongo::{connect, error::Kind};
use futures_util::TryStreamExt;

use crate::support::{
    cases::{Case, Way, Write, delete, every_way, insert, replace, run, update},
    daemon::{self, Daemon},
};

/// The rule of most cases: the source's name next to its id.
const NAME: &str = "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name } }";

fn name(id: i32, name: &str) -> Document {
    doc! {"_id": id, "name": name}
}

/// Known failures of the npm package mongodb-data-sync, at least one case for each of its eleven failures.
fn known_failures() -> Vec<Case> {
    let falsy = [bson!(""), bson!(0), bson!(0.0), bson!(false), Bson::Null, bson!([]), bson!({})];
    let falsy = falsy.into_iter().map(|value| {
        Case::new(format!("a falsy value: {value}"), NAME)
            .has("s", [name(1, "x")])
            .has("t", [doc! {"_id": 1, "ref": 1}])
            .writes([update("s", 1, doc! {"$set": {"name": value.clone()}})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "name": value}])
    });
    let others = [
        Case::new("$unset", NAME)
            .has("s", [name(1, "x")])
            .has("t", [doc! {"_id": 1, "ref": 1}])
            .writes([update("s", 1, doc! {"$unset": {"name": 1}})])
            .expect("t", [doc! {"_id": 1, "ref": 1}]),
        Case::new("replace", NAME)
            .has("s", [name(1, "x"), name(2, "y")])
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2}])
            .writes([replace("s", name(1, "z")), replace("s", doc! {"_id": 2, "other": 1})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "name": "z"}, doc! {"_id": 2, "ref": 2}]),
        Case::new("re-pointed there and back", NAME)
            .has("s", [name(1, "x"), name(2, "y")])
            .has("t", (0..30).map(|id| doc! {"_id": id, "ref": 1}))
            .writes((0..30).flat_map(|id| [1, 2, 1].map(|to| replace("t", doc! {"_id": id, "ref": to}))))
            .expect("t", (0..30).map(|id| doc! {"_id": id, "ref": 1, "name": "x"})),
        Case::new("delete", NAME)
            .has("s", [name(1, "x"), name(2, "y")])
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2}])
            .writes([delete("s", 1)])
            .expect("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2, "name": "y"}]),
        Case::new("a whole object set over a dotted path", "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { city: $address.city, at.zip: $address.zip } }")
            .has("s", [doc! {"_id": 1, "address": {"city": "Oslo", "zip": "0150"}}])
            .has("t", [doc! {"_id": 1, "ref": 1, "at": {"mine": 1}}])
            .writes([update("s", 1, doc! {"$set": {"address": {"city": "Rome"}}})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "city": "Rome", "at": {"mine": 1}}]),
        Case::new("target insert", NAME)
            .has("s", [name(1, "x")])
            .writes([insert("t", doc! {"_id": 1, "ref": 1}), insert("t", doc! {"_id": 2, "ref": 9, "name": "stale"})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "name": "x"}, doc! {"_id": 2, "ref": 9}]),
        Case::new("re-point", NAME)
            .has("s", [name(1, "x"), name(2, "y")])
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 1}, doc! {"_id": 3, "ref": 1}])
            .writes([
                update("t", 1, doc! {"$set": {"ref": 2}}),
                update("t", 2, doc! {"$unset": {"ref": 1}}),
                update("t", 3, doc! {"$set": {"ref": 7}}),
            ])
            .expect("t", [doc! {"_id": 1, "ref": 2, "name": "y"}, doc! {"_id": 2}, doc! {"_id": 3, "ref": 7}]),
        Case::new("arrays", "copy: { source: '@s', target: '@t', match: { 'parts.$[].id': _id }, set: { 'parts.$[].name': $name } }")
            .has("s", [name(1, "x"), name(2, "y")])
            .has("t", [doc! {"_id": 1, "parts": [{"id": 1}, {"id": 2, "n": 5}, {"id": 1}]}])
            .writes([update("s", 1, doc! {"$set": {"name": ["a", "b"]}}), update("t", 1, doc! {"$push": {"parts": {"id": 2}}})])
            .expect("t", [doc! {"_id": 1, "parts": [
                {"id": 1, "name": ["a", "b"]}, {"id": 2, "n": 5, "name": "y"}, {"id": 1, "name": ["a", "b"]}, {"id": 2, "name": "y"},
            ]}]),
        Case::new("a key other than _id", "copy: { source: '@s', target: '@t', match: { code: code }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "code": "A", "name": "x"}, doc! {"_id": 2, "code": "B", "name": "y"}])
            .has("t", [doc! {"_id": 1, "code": "A"}, doc! {"_id": 2, "code": "B"}, doc! {"_id": 3, "code": "C"}])
            .writes([update("s", 1, doc! {"$set": {"code": "C"}}), update("s", 2, doc! {"$set": {"name": "z"}})])
            .expect("t", [doc! {"_id": 1, "code": "A"}, doc! {"_id": 2, "code": "B", "name": "z"}, doc! {"_id": 3, "code": "C", "name": "x"}]),
        // "Restart while changes go on" is `Way::Restart`, which every table includes.
        Case::new("a hot key in a burst", NAME)
            .has("s", [name(1, "x")])
            .has("t", (0..20).map(|id| doc! {"_id": id, "ref": 1}))
            .writes([Write::Burst((0..500).map(|n| update("s", 1, doc! {"$set": {"name": n}})).collect())])
            .expect("t", (0..20).map(|id| doc! {"_id": id, "ref": 1, "name": 499})),
    ];
    falsy.chain(others).collect()
}

/// A form of reference, with the shape of its documents.
struct Form {
    name: &'static str,
    rule: &'static str,
    source: &'static str,
    /// The source of reference `n`, without its value.
    source_of: fn(i32) -> Document,
    /// A target's fields with these references; as stored by the application, or with the values of the rule.
    target_of: fn(&[i32], &Names) -> Document,
    /// Updates of a target: append a reference, remove the reference at an index, change the reference at an index.
    array: Option<Array>,
}

struct Array {
    push: fn(i32) -> Document,
    pull: fn(i32) -> Document,
    put: fn(usize, i32) -> Document,
}

/// The sources' values; none before the rule has been applied.
type Names<'a> = Option<&'a dyn Fn(i32) -> Option<Bson>>;

/// A subdocument with the value that its reference has.
fn with(mut document: Document, path: &str, names: &Names, reference: i32) -> Document {
    if let Some(value) = names.and_then(|names| names(reference)) {
        document.insert(path, value);
    }
    document
}

fn one(references: &[i32]) -> i32 {
    references.first().copied().unwrap_or(-1)
}

fn code(n: i32) -> String {
    format!("code {n}")
}

fn hex(n: i32) -> ObjectId {
    ObjectId::parse_str(format!("{n:024x}")).unwrap()
}

fn forms() -> Vec<Form> {
    let by_id = |n| doc! {"_id": n};
    vec![
        Form {
            name: "scalar",
            rule: "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| with(doc! {"ref": one(refs)}, "name", names, one(refs)),
            array: None,
        },
        Form {
            name: "scalar in a subdocument",
            rule: "copy: { source: '@s', target: '@t', match: { a.b.ref: _id }, set: { a.c.name: $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| doc! {"a": {"b": {"ref": one(refs)}, "c": with(doc! {"mine": 1}, "name", names, one(refs))}},
            array: None,
        },
        Form {
            name: "array of ids",
            rule: "copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: info, element: { id: $_id, name: $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let mut target = doc! {"refs": refs};
                if let Some(names) = names {
                    let element = |n: &i32| names(*n).map(|name| Bson::from(doc! {"id": n, "name": name}));
                    target.insert("info", refs.iter().filter_map(element).collect::<Vec<_>>());
                }
                target
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"refs": n}},
                pull: |n| doc! {"$pull": {"refs": n}},
                put: |at, n| doc! {"$set": {format!("refs.{at}"): n}},
            }),
        },
        Form {
            name: "array of subdocuments",
            rule: "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].name': $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                doc! {"items": refs.iter().map(|n| with(doc! {"id": n, "mine": 1}, "name", names, *n)).collect::<Vec<_>>()}
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"items": {"id": n, "mine": 1}}},
                pull: |n| doc! {"$pull": {"items": {"id": n}}},
                put: |at, n| doc! {"$set": {format!("items.{at}.id"): n}},
            }),
        },
        Form {
            name: "nested arrays",
            rule: "copy: { source: '@s', target: '@t', match: { 'a.$[].b.$[].c': _id }, set: { 'a.$[].b.$[].name': $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let inner: Vec<Document> = refs.iter().map(|n| with(doc! {"c": n}, "name", names, *n)).collect();
                doc! {"a": [{"b": inner.clone()}, {"other": 1}, {"b": []}, {"b": inner}]}
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"a.0.b": {"c": n}, "a.3.b": {"c": n}}},
                pull: |n| doc! {"$pull": {"a.0.b": {"c": n}, "a.3.b": {"c": n}}},
                put: |at, n| doc! {"$set": {format!("a.0.b.{at}.c"): n, format!("a.3.b.{at}.c"): n}},
            }),
        },
        Form {
            name: "DBRef",
            rule: "copy: { source: '@s', target: '@t', match: { pub.$id: _id }, set: { info: { name: $name } } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let mut target = doc! {"pub": {"$ref": "@s", "$id": one(refs), "$db": "@@"}};
                if let Some(name) = names.map(|names| names(one(refs))) {
                    // A source without a name embeds as an empty subdocument; a missing one does not.
                    target.extend(name.map(|name| ("info".to_owned(), doc! {"name": name}.into())));
                }
                target
            },
            array: None,
        },
        Form {
            name: "array of DBRefs in subdocuments",
            rule: "copy: { source: '@s', target: '@t', match: { 'items.$[].pub.$id': _id }, set: { 'items.$[].name': $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let item = |n: &i32| with(doc! {"pub": {"$ref": "@s", "$id": n}}, "name", names, *n);
                doc! {"items": refs.iter().map(item).collect::<Vec<_>>()}
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"items": {"pub": {"$ref": "@s", "$id": n}}}},
                pull: |n| doc! {"$pull": {"items": {"pub": {"$ref": "@s", "$id": n}}}},
                put: |at, n| doc! {"$set": {format!("items.{at}.pub"): {"$ref": "@s", "$id": n}}},
            }),
        },
        Form {
            name: "plain array of DBRefs",
            rule: "copy: { source: '@s', target: '@t', match: { 'pubs.$[].$id': _id }, into: names, element: $name }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let mut target = doc! {"pubs": refs.iter().map(|n| doc! {"$ref": "@s", "$id": n}).collect::<Vec<_>>()};
                if let Some(names) = names {
                    target.insert("names", refs.iter().filter_map(|n| names(*n)).collect::<Vec<_>>());
                }
                target
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"pubs": {"$ref": "@s", "$id": n}}},
                pull: |n| doc! {"$pull": {"pubs": {"$ref": "@s", "$id": n}}},
                put: |at, n| doc! {"$set": {format!("pubs.{at}"): {"$ref": "@s", "$id": n}}},
            }),
        },
        Form {
            name: "another key",
            rule: "copy: { source: '@s', target: '@t', match: { ref: code }, set: { name: $name } }",
            source: "s",
            source_of: |n| doc! {"_id": n, "code": code(n)},
            target_of: |refs, names| with(doc! {"ref": code(one(refs))}, "name", names, one(refs)),
            array: None,
        },
        Form {
            name: "composite",
            rule: "copy: { source: '@s', target: '@t', match: { tenant: owner.tenant, code: code }, set: { name: $name } }",
            source: "s",
            source_of: |n| doc! {"_id": n, "owner": {"tenant": n % 2}, "code": code(n / 2)},
            target_of: |refs, names| {
                with(doc! {"tenant": one(refs).rem_euclid(2), "code": code(one(refs) / 2)}, "name", names, one(refs))
            },
            array: None,
        },
        Form {
            name: "composite, one key beside the array",
            rule: "copy: { source: '@s', target: '@t', match: { tenant: tenant, 'items.$[].code': code }, set: { 'items.$[].name': $name } }",
            source: "s",
            source_of: |n| doc! {"_id": n, "tenant": "T", "code": code(n)},
            target_of: |refs, names| {
                let item = |n: &i32| with(doc! {"code": code(*n)}, "name", names, *n);
                doc! {"tenant": "T", "items": refs.iter().map(item).collect::<Vec<_>>()}
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"items": {"code": code(n)}}},
                pull: |n| doc! {"$pull": {"items": {"code": code(n)}}},
                put: |at, n| doc! {"$set": {format!("items.{at}.code"): code(n)}},
            }),
        },
        Form {
            name: "key_type objectId",
            rule: "copy: { source: '@s', target: '@t', match: { ref: _id }, key_type: objectId, set: { name: $name } }",
            source: "s",
            source_of: |n| doc! {"_id": hex(n)},
            target_of: |refs, names| with(doc! {"ref": format!("{:024x}", one(refs).max(0))}, "name", names, one(refs)),
            array: None,
        },
        Form {
            name: "key_type string",
            rule: "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, key_type: string, set: { 'items.$[].name': $name } }",
            source: "s",
            source_of: |n| doc! {"_id": if n % 2 == 0 { n.to_string() } else { format!("{n:024x}") }},
            target_of: |refs, names| {
                let id = |n: i32| if n % 2 == 0 { Bson::Int64(n.into()) } else { Bson::from(hex(n.max(0))) };
                doc! {"items": refs.iter().map(|n| with(doc! {"id": id(*n)}, "name", names, *n)).collect::<Vec<_>>()}
            },
            array: None,
        },
        Form {
            name: "across databases",
            rule: "copy: { source: '@other.s', target: '@t', match: { ref: _id }, set: { name: $name } }",
            source: "other.s",
            source_of: by_id,
            target_of: |refs, names| with(doc! {"ref": one(refs)}, "name", names, one(refs)),
            array: None,
        },
        Form {
            name: "several references, the first by sort",
            rule: "copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, sort: { name: -1 }, set: { name: $name } }",
            source: "s",
            source_of: by_id,
            target_of: |refs, names| {
                let mut target = doc! {"refs": refs};
                let best = names.and_then(|names| {
                    let name = |n: &i32| names(*n).map(|name| (name.to_string(), name));
                    refs.iter().filter_map(name).max_by(|a, b| a.0.cmp(&b.0))
                });
                target.extend(best.map(|(_, name)| ("name".to_owned(), name)));
                target
            },
            array: Some(Array {
                push: |n| doc! {"$push": {"refs": n}},
                pull: |n| doc! {"$pull": {"refs": n}},
                put: |at, n| doc! {"$set": {format!("refs.{at}"): n}},
            }),
        },
    ]
}

impl Form {
    fn sourced(&self, n: i32, name: &str) -> Document {
        let mut source = (self.source_of)(n);
        source.insert("name", name);
        source
    }

    fn source_id(&self, n: i32) -> Bson {
        (self.source_of)(n).get("_id").cloned().unwrap()
    }

    fn target(&self, id: i32, references: &[i32]) -> Document {
        let mut target = doc! {"_id": id};
        target.extend((self.target_of)(references, &None));
        target
    }

    fn expected(&self, id: i32, references: &[i32], names: &[(i32, &str)]) -> Document {
        let mut target = doc! {"_id": id};
        let names = |n: i32| names.iter().find(|(other, _)| *other == n).map(|(_, name)| Bson::from(*name));
        target.extend((self.target_of)(references, &Some(&names)));
        target
    }

    /// Two sources "a" (1) and "b" (2), a target of the first, and a target of the second that no write affects.
    fn case(&self, name: &str, references: &[i32]) -> Case {
        Case::new(format!("{}: {name}", self.name), self.rule)
            .has(self.source, [self.sourced(1, "a"), self.sourced(2, "b")])
            .has("t", [self.target(1, references), self.target(2, &[2])])
    }

    fn cases(&self) -> Vec<Case> {
        let (ab, s) = ([(1, "a"), (2, "b")], self.source);
        let two = |first: Document, names: &[(i32, &str)]| [first, self.expected(2, &[2], names)];
        let ends = |references: &[i32], names: &[(i32, &str)]| two(self.expected(1, references, names), names);
        let fields = |references: &[i32]| (self.target_of)(references, &None);
        let mut replaced = self.sourced(1, "z");
        replaced.insert("other", 5);
        let mut cases = vec![
            self.case("source update", &[1])
                .writes([update(s, self.source_id(1), doc! {"$set": {"name": "z"}})])
                .expect("t", ends(&[1], &[(1, "z"), (2, "b")])),
            self.case("source replace", &[1])
                .writes([replace(s, replaced)])
                .expect("t", ends(&[1], &[(1, "z"), (2, "b")])),
            self.case("source delete", &[1])
                .writes([delete(s, self.source_id(1))])
                .expect("t", ends(&[1], &[(2, "b")])),
            self.case("source insert", &[3])
                .writes([insert(s, self.sourced(3, "c"))])
                .expect("t", ends(&[3], &[(2, "b"), (3, "c")])),
            self.case("source delete and insert", &[1])
                .writes([delete(s, self.source_id(1)), insert(s, self.sourced(1, "z"))])
                .expect("t", ends(&[1], &[(1, "z"), (2, "b")])),
            self.case("target insert", &[1])
                .writes([insert("t", self.target(3, &[2])), insert("t", self.target(4, &[9]))])
                .expect(
                    "t",
                    [
                        self.expected(1, &[1], &ab),
                        self.expected(2, &[2], &ab),
                        self.expected(3, &[2], &ab),
                        self.expected(4, &[9], &ab),
                    ],
                ),
            self.case("target re-pointed", &[1])
                .writes([update("t", 1, doc! {"$set": fields(&[2])})])
                .expect("t", ends(&[2], &ab)),
            self.case("target re-pointed to nobody", &[1])
                .writes([update("t", 1, doc! {"$set": fields(&[9])})])
                .expect("t", ends(&[9], &ab)),
            self.case("target replaced", &[1])
                .writes([replace("t", self.target(1, &[2]))])
                .expect("t", ends(&[2], &ab)),
            self.case("target there and back", &[1])
                .writes([update("t", 1, doc! {"$set": fields(&[2])}), update("t", 1, doc! {"$set": fields(&[1])})])
                .expect("t", ends(&[1], &ab)),
            self.case("target deleted", &[1]).writes([delete("t", 1)]).expect("t", [self.expected(2, &[2], &ab)]),
        ];
        if let Some(array) = &self.array {
            let swapped = || vec![update("t", 1, (array.put)(0, 2)), update("t", 1, (array.put)(1, 1))];
            cases.extend([
                self.case("element pushed", &[1])
                    .writes([update("t", 1, (array.push)(2))])
                    .expect("t", ends(&[1, 2], &ab)),
                self.case("element pushed to nobody", &[1])
                    .writes([update("t", 1, (array.push)(9))])
                    .expect("t", ends(&[1, 9], &ab)),
                self.case("element pushed twice", &[1])
                    .writes([update("t", 1, (array.push)(2)), update("t", 1, (array.push)(1))])
                    .expect("t", ends(&[1, 2, 1], &ab)),
                self.case("element pulled", &[1, 2])
                    .writes([update("t", 1, (array.pull)(1))])
                    .expect("t", ends(&[2], &ab)),
                self.case("last element pulled", &[1])
                    .writes([update("t", 1, (array.pull)(1))])
                    .expect("t", ends(&[], &ab)),
                self.case("elements swapped by index", &[1, 2]).writes(swapped()).expect("t", ends(&[2, 1], &ab)),
                self.case("element re-pointed to nobody", &[1, 2])
                    .writes([update("t", 1, (array.put)(0, 9))])
                    .expect("t", ends(&[9, 2], &ab)),
                self.case("source of one element changed", &[1, 2, 1])
                    .writes([update(s, self.source_id(1), doc! {"$set": {"name": "z"}})])
                    .expect("t", ends(&[1, 2, 1], &[(1, "z"), (2, "b")])),
                self.case("source of one element deleted", &[1, 2, 1])
                    .writes([delete(s, self.source_id(1))])
                    .expect("t", ends(&[1, 2, 1], &[(2, "b")])),
                self.case("push, rename, pull, push", &[1])
                    .writes([
                        update("t", 1, (array.push)(2)),
                        update(s, self.source_id(2), doc! {"$set": {"name": "z"}}),
                        update("t", 1, (array.pull)(1)),
                        update("t", 1, (array.push)(1)),
                    ])
                    .expect("t", ends(&[2, 1], &[(1, "a"), (2, "z")])),
            ]);
        }
        cases
    }
}

fn every_form() -> Vec<Case> {
    forms().iter().flat_map(Form::cases).collect()
}

/// References that no source matches, and targets that start or stop matching the rule's filter.
fn policies() -> Vec<Case> {
    let copy = |rest: &str| {
        format!(
            "copy: {{ source: '@s', target: '@t', match: {{ ref: _id }}, set: {{ name: $name, a.x: $x }}, {rest} }}"
        )
    };
    let items = |rest: &str| {
        format!(
            "copy: {{ source: '@s', target: '@t', match: {{ 'items.$[].id': _id }}, set: {{ 'items.$[].name': $name }}, {rest} }}"
        )
    };
    let into = |rest: &str| {
        format!(
            "copy: {{ source: '@s', target: '@t', match: {{ 'refs.$[]': _id }}, into: names, element: $name, {rest} }}"
        )
    };
    let s = || [doc! {"_id": 1, "name": "a", "x": 1}, doc! {"_id": 2, "name": "b", "x": 2}];
    let t = || [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2}, doc! {"_id": 3, "ref": 9}];
    let held = || {
        [doc! {"_id": 1, "ref": 1, "name": "a", "a": {"x": 1}}, doc! {"_id": 2, "ref": 2, "name": "b", "a": {"x": 2}}]
    };
    let table = |name: &str, rule: String| Case::new(name, &rule).has("s", s()).has("t", t()).writes([delete("s", 1)]);
    let elements = || doc! {"_id": 1, "items": [{"id": 1}, {"id": 2}, {"id": 9}, {"id": 1}]};
    let element_table =
        |name: &str, rule: String| Case::new(name, &rule).has("s", s()).has("t", [elements()]).writes([delete("s", 1)]);
    let into_table = |name: &str, rule: String| {
        Case::new(name, &rule).has("s", s()).has("t", [doc! {"_id": 1, "refs": [1, 9, 2, 1]}]).writes([delete("s", 1)])
    };
    let [first, second] = held();
    vec![
        table("unset", copy("on_missing: unset")).expect("t", [doc! {"_id": 1, "ref": 1, "a": {}}, second.clone(), doc! {"_id": 3, "ref": 9}]).on_history(),
        table("null", copy("on_missing: null")).expect("t", [
            doc! {"_id": 1, "ref": 1, "name": null, "a": {"x": null}},
            second.clone(),
            doc! {"_id": 3, "ref": 9, "name": null, "a": {"x": null}},
        ]),
        table("keep", copy("on_missing: keep")).expect("t", [first.clone(), second.clone(), doc! {"_id": 3, "ref": 9}]).on_history(),
        table("delete", copy("on_missing: delete")).expect("t", [second.clone()]),
        table("delete, but the source comes back in time", copy("on_missing: delete"))
            .has("s", [doc! {"_id": 9, "name": "i", "x": 9}])
            .writes([Write::Burst(vec![delete("s", 2), insert("s", doc! {"_id": 2, "name": "z", "x": 3})])])
            .expect("t", [doc! {"_id": 2, "ref": 2, "name": "z", "a": {"x": 3}}, doc! {"_id": 3, "ref": 9, "name": "i", "a": {"x": 9}}]),
        // A missing reference is not a dangling one.
        Case::new("delete, a target without a reference stays", &copy("on_missing: delete"))
            .has("s", s())
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2, "ref": null}])
            .writes([insert("t", doc! {"_id": 3, "name": "stale"}), insert("t", doc! {"_id": 4, "ref": 9})])
            .expect("t", [doc! {"_id": 1}, doc! {"_id": 2, "ref": null}, doc! {"_id": 3}]),
        element_table("unset in elements", items("on_missing: unset"))
            .expect("t", [doc! {"_id": 1, "items": [{"id": 1}, {"id": 2, "name": "b"}, {"id": 9}, {"id": 1}]}]),
        element_table("null in elements", items("on_missing: null"))
            .expect("t", [doc! {"_id": 1, "items": [{"id": 1, "name": null}, {"id": 2, "name": "b"}, {"id": 9, "name": null}, {"id": 1, "name": null}]}]),
        element_table("keep in elements", items("on_missing: keep"))
            .expect("t", [doc! {"_id": 1, "items": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 9}, {"id": 1, "name": "a"}]}])
            .on_history(),
        element_table("remove", items("on_missing: remove")).expect("t", [doc! {"_id": 1, "items": [{"id": 2, "name": "b"}]}]),
        Case::new("remove, an element without a reference stays", &items("on_missing: remove"))
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [{"id": null}, {"x": 1}, 5, {"id": 9}]}])
            .expect("t", [doc! {"_id": 1, "items": [{"id": null}, {"x": 1}, 5]}]),
        Case::new(
            "remove in nested arrays",
            "copy: { source: '@s', target: '@t', match: { 'a.$[].b.$[].c': _id }, set: { 'a.$[].b.$[].name': $name }, on_missing: remove }",
        )
        .has("s", s())
        .has("t", [doc! {"_id": 1, "a": [{"b": [{"c": 1}, {"c": 2}]}, {"b": [{"c": 1}]}]}])
        .writes([delete("s", 1)])
        .expect("t", [doc! {"_id": 1, "a": [{"b": [{"c": 2, "name": "b"}]}, {"b": []}]}]),
        into_table("unset in into", into("on_missing: unset")).expect("t", [doc! {"_id": 1, "refs": [1, 9, 2, 1], "names": ["b"]}]),
        into_table("null in into", into("on_missing: null"))
            .expect("t", [doc! {"_id": 1, "refs": [1, 9, 2, 1], "names": [null, null, "b", null]}]),
        Case::new("keep in into", &into("on_missing: keep"))
            .has("s", s())
            .has("t", [doc! {"_id": 1, "refs": [1, 2]}])
            .writes([delete("s", 1)])
            .expect("t", [doc! {"_id": 1, "refs": [1, 2], "names": ["a", "b"]}])
            .on_history(),
        Case::new("source.where: a source leaves and enters", "copy: { source: { collection: '@s', where: { live: true } }, target: '@t', match: { ref: _id }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "name": "a", "live": true}, doc! {"_id": 2, "name": "b", "live": false}])
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2}])
            .writes([update("s", 1, doc! {"$set": {"live": false}}), update("s", 2, doc! {"$set": {"live": true}})])
            .expect("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2, "name": "b"}]),
        Case::new("source.where: of two sources the other one takes over", "copy: { source: { collection: '@s', where: { live: { $gt: 0 } } }, target: '@t', match: { ref: code }, sort: { live: 1 }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "code": 7, "name": "a", "live": 1}, doc! {"_id": 2, "code": 7, "name": "b", "live": 2}])
            .has("t", [doc! {"_id": 1, "ref": 7}])
            .writes([update("s", 1, doc! {"$set": {"live": 0}})])
            .expect("t", [doc! {"_id": 1, "ref": 7, "name": "b"}]),
        Case::new("target.where: a target enters", "copy: { source: '@s', target: { collection: '@t', where: { open: true } }, match: { ref: _id }, set: { name: $name } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1, "open": false}, doc! {"_id": 2, "ref": 2, "open": true}])
            .writes([update("s", 1, doc! {"$set": {"name": "z"}}), update("t", 1, doc! {"$set": {"open": true}})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "open": true, "name": "z"}, doc! {"_id": 2, "ref": 2, "open": true, "name": "b"}]),
        Case::new("target.where: a target that leaves keeps what it has", "copy: { source: '@s', target: { collection: '@t', where: { open: true } }, match: { ref: _id }, set: { name: $name } }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1, "open": true}])
            .writes([update("t", 1, doc! {"$set": {"open": false}}), update("s", 1, doc! {"$set": {"name": "z"}}), delete("s", 1)])
            .expect("t", [doc! {"_id": 1, "ref": 1, "open": false, "name": "a"}])
            .on_history(),
        Case::new("target.where with an array of references", "copy: { source: '@s', target: { collection: '@t', where: { open: true } }, match: { 'refs.$[]': _id }, into: names, element: $name }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "refs": [1], "open": false}, doc! {"_id": 2, "refs": [2], "open": true}])
            .writes([update("t", 1, doc! {"$set": {"open": true}}), update("t", 2, doc! {"$set": {"open": false}}), update("s", 2, doc! {"$set": {"name": "z"}})])
            .expect("t", [doc! {"_id": 1, "refs": [1], "open": true, "names": ["a"]}, doc! {"_id": 2, "refs": [2], "open": false, "names": ["b"]}])
            .on_history(),
        Case::new("once", "copy: { source: '@s', target: '@t', match: { ref: _id }, set: { name: $name }, once: true }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "ref": 1}, doc! {"_id": 2, "ref": 2, "name": "own"}, doc! {"_id": 3, "ref": 3}])
            .writes([
                update("s", 1, doc! {"$set": {"name": "z"}}),
                delete("s", 2),
                insert("s", doc! {"_id": 3, "name": "c"}),
                update("s", 3, doc! {"$set": {"name": "y"}}),
                insert("t", doc! {"_id": 4, "ref": 1}),
            ])
            .expect("t", [
                doc! {"_id": 1, "ref": 1, "name": "a"},
                doc! {"_id": 2, "ref": 2, "name": "own"},
                doc! {"_id": 3, "ref": 3, "name": "c"},
                doc! {"_id": 4, "ref": 1, "name": "z"},
            ])
            .on_history(),
        Case::new("once in elements", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, set: { 'items.$[].price': $x }, once: true }")
            .has("s", s())
            .has("t", [doc! {"_id": 1, "items": [{"id": 1}, {"id": 2, "price": 7}]}])
            .writes([update("s", 1, doc! {"$set": {"x": 5}}), update("t", 1, doc! {"$push": {"items": {"id": 1}}})])
            .expect("t", [doc! {"_id": 1, "items": [{"id": 1, "price": 1}, {"id": 2, "price": 7}, {"id": 1, "price": 5}]}])
            .on_history(),
    ]
}

/// The source holds the references.
fn source_held() -> Vec<Case> {
    let product = "copy: { source: '@products', target: '@parts', match: { _id: 'parts.$[]' }, sort: { number: 1 }, set: { product: $name } }";
    let products = || {
        [
            doc! {"_id": 1, "name": "A", "number": 5, "parts": [1, 2, 2]},
            doc! {"_id": 2, "name": "B", "number": 3, "parts": [2, 3]},
        ]
    };
    let parts = || (1..=4).map(|id| doc! {"_id": id});
    let table = |name: &str, writes: Vec<Write>, expect: [Option<&str>; 4]| {
        let expect = (1..).zip(expect).map(|(id, product)| {
            let mut part = doc! {"_id": id};
            part.extend(product.map(|product| ("product".to_owned(), product.into())));
            part
        });
        Case::new(format!("source-held: {name}"), product)
            .has("products", products())
            .has("parts", parts())
            .writes(writes)
            .expect("parts", expect)
    };
    let cast = "copy: { source: '@films', target: '@people', match: { _id: 'cast.$[].person' }, sort: { year: -1 }, set: { film: $title, role: $$element.role } }";
    let films = || {
        [
            doc! {"_id": 1, "title": "Old", "year": 1950, "cast": [{"person": 1, "role": "x"}, {"person": 2, "role": "y"}]},
            doc! {"_id": 2, "title": "New", "year": 1990, "cast": [{"person": 2, "role": "z"}, {"person": 2, "role": "second"}]},
        ]
    };
    let people = || [doc! {"_id": 1}, doc! {"_id": 2}];
    vec![
        table("as it is", vec![], [Some("A"), Some("B"), Some("B"), None]),
        table("a reference comes", vec![update("products", 1, doc! {"$push": {"parts": 4}})], [Some("A"), Some("B"), Some("B"), Some("A")]),
        table("a reference goes", vec![update("products", 2, doc! {"$pull": {"parts": 2}})], [Some("A"), Some("A"), Some("B"), None]),
        table("the array goes", vec![update("products", 2, doc! {"$unset": {"parts": 1}})], [Some("A"), Some("A"), None, None]),
        table("the array becomes a scalar", vec![update("products", 2, doc! {"$set": {"parts": 3}})], [Some("A"), Some("A"), None, None]),
        table("the order changes", vec![update("products", 1, doc! {"$set": {"number": 1}})], [Some("A"), Some("A"), Some("B"), None]),
        table("the name changes", vec![update("products", 2, doc! {"$set": {"name": "C"}})], [Some("A"), Some("C"), Some("C"), None]),
        table("delete", vec![delete("products", 2)], [Some("A"), Some("A"), None, None]),
        table("replace", vec![replace("products", doc! {"_id": 2, "name": "C", "number": 9, "parts": [4]})], [Some("A"), Some("A"), None, Some("C")]),
        table("insert", vec![insert("products", doc! {"_id": 3, "name": "C", "number": 0, "parts": [1, 4]})], [Some("C"), Some("B"), Some("B"), Some("C")]),
        table("target insert", vec![delete("parts", 2), insert("parts", doc! {"_id": 2, "product": "stale"})], [Some("A"), Some("B"), Some("B"), None]),
        Case::new("$$element is the element that names the target, the first of several", cast)
            .has("films", films())
            .has("people", people())
            .expect("people", [doc! {"_id": 1, "film": "Old", "role": "x"}, doc! {"_id": 2, "film": "New", "role": "z"}]),
        Case::new("$$element changes", cast)
            .has("films", films())
            .has("people", people())
            .writes([update("films", 1, doc! {"$set": {"cast.0.role": "X"}}), update("films", 2, doc! {"$pull": {"cast": {"role": "z"}}})])
            .expect("people", [doc! {"_id": 1, "film": "Old", "role": "X"}, doc! {"_id": 2, "film": "New", "role": "second"}]),
        Case::new("$$element of one who is recast", cast)
            .has("films", films())
            .has("people", people())
            .writes([update("films", 1, doc! {"$set": {"cast.0.person": 2}}), delete("films", 2)])
            .expect("people", [doc! {"_id": 1}, doc! {"_id": 2, "film": "Old", "role": "x"}]),
        Case::new("source-held in nested arrays", "copy: { source: '@s', target: '@t', match: { _id: 'a.$[].b.$[].c' }, set: { name: $name, n: $$element.n } }")
            .has("s", [doc! {"_id": 1, "name": "x", "a": [{"b": [{"c": 1, "n": 5}]}, {"b": [{"c": 2, "n": 6}]}]}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}, doc! {"_id": 3}])
            .writes([update("s", 1, doc! {"$push": {"a.0.b": {"c": 3, "n": 7}}}), update("s", 1, doc! {"$pop": {"a": 1}})])
            .expect("t", [doc! {"_id": 1, "name": "x", "n": 5}, doc! {"_id": 2}, doc! {"_id": 3, "name": "x", "n": 7}]),
        Case::new("source-held scalar", "copy: { source: '@s', target: '@t', match: { _id: ref }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "ref": 1, "name": "a"}, doc! {"_id": 2, "ref": 1, "name": "b"}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes([update("s", 1, doc! {"$set": {"ref": 2}})])
            .expect("t", [doc! {"_id": 1, "name": "b"}, doc! {"_id": 2, "name": "a"}]),
        Case::new("source-held DBRefs", "copy: { source: '@s', target: '@t', match: { _id: 'refs.$[].$id' }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "name": "a", "refs": [{"$ref": "@t", "$id": 1}, {"$ref": "@elsewhere", "$id": 2}]}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}])
            .expect("t", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2}]),
        Case::new("source-held DBRef beside an array", "aggregate: { source: '@s', target: '@t', match: { _id: page.$id, lang: 'texts.$[].lang' }, set: { words: { $sum: $$element.words } } }")
            .has("s", [doc! {"_id": 1, "page": {"$ref": "@t", "$id": 1}, "texts": [{"lang": "en", "words": 10}]}, doc! {"_id": 2, "page": {"$ref": "@elsewhere", "$id": 1}, "texts": [{"lang": "en", "words": 99}]}])
            .has("t", [doc! {"_id": 1, "lang": "en"}])
            .writes([update("s", 1, doc! {"$set": {"texts.0.words": 11}})])
            .expect("t", [doc! {"_id": 1, "lang": "en", "words": 11}]),
        Case::new("source-held DBRef", "copy: { source: '@s', target: '@t', match: { _id: ref.$id }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "name": "a", "ref": {"$ref": "@t", "$id": 1}}, doc! {"_id": 2, "name": "b", "ref": {"$ref": "@elsewhere", "$id": 2}}])
            .has("t", [doc! {"_id": 1}, doc! {"_id": 2}, doc! {"_id": 3}])
            .writes([insert("s", doc! {"_id": 0, "name": "c", "ref": {"$ref": "@elsewhere", "$id": 1}}), insert("s", doc! {"_id": 3, "name": "d", "ref": {"$ref": "@t", "$id": 3, "$db": "@@"}})])
            .expect("t", [doc! {"_id": 1, "name": "a"}, doc! {"_id": 2}, doc! {"_id": 3, "name": "d"}]),
    ]
}

/// Relations with complications: to itself, in both directions, many to many, and combinations of the forms above.
fn relations() -> Vec<Case> {
    let refs = || doc! {"_id": 1, "pubs": [{"$ref": "@s", "$id": 1}, {"$ref": "@s", "$id": 9}, {"$ref": "@elsewhere", "$id": 9}]};
    let tags = || [doc! {"_id": "x"}, doc! {"_id": "y"}, doc! {"_id": "z"}];
    let posts = || {
        [
            doc! {"_id": 1, "title": "A", "tags": ["x", "y", "x"], "at": 5},
            doc! {"_id": 2, "title": "B", "tags": ["y"], "at": 3},
        ]
    };
    let staff = || {
        [
            doc! {"_id": 1, "name": "ann"},
            doc! {"_id": 2, "name": "bob", "boss": 1},
            doc! {"_id": 3, "name": "cy", "boss": 1},
            doc! {"_id": 4, "name": "me", "boss": 4},
        ]
    };
    vec![
        Case::new("to its own collection", "copy: { source: '@staff', target: '@staff', match: { boss: _id }, set: { boss_name: $name } }")
            .and("collect: { source: '@staff', target: '@staff', match: { _id: boss }, into: team, element: $name, on_empty: unset }")
            .has("staff", staff())
            .writes([
                update("staff", 1, doc! {"$set": {"name": "ANN"}}),
                update("staff", 3, doc! {"$set": {"boss": 2}}),
                update("staff", 4, doc! {"$set": {"name": "ME"}}),
            ])
            .expect("staff", [
                doc! {"_id": 1, "name": "ANN", "team": ["bob"]},
                doc! {"_id": 2, "name": "bob", "boss": 1, "boss_name": "ANN", "team": ["cy"]},
                doc! {"_id": 3, "name": "cy", "boss": 2, "boss_name": "bob"},
                doc! {"_id": 4, "name": "ME", "boss": 4, "boss_name": "ME", "team": ["ME"]},
            ]),
        Case::new("many to many, gathered", "collect: { source: '@posts', target: '@tags', match: { _id: 'tags.$[]' }, into: posts, element: $title, sort: { at: 1 } }")
            .and("aggregate: { source: '@posts', target: '@tags', match: { _id: 'tags.$[]' }, set: { n: { $sum: 1 }, latest: { $max: $at } } }")
            .has("posts", posts())
            .has("tags", tags())
            .writes([
                update("posts", 2, doc! {"$push": {"tags": "z"}}),
                update("posts", 1, doc! {"$pull": {"tags": "y"}}),
                insert("posts", doc! {"_id": 3, "title": "C", "tags": ["x"], "at": 1}),
            ])
            .expect("tags", [
                doc! {"_id": "x", "posts": ["C", "A", "A"], "n": 3, "latest": 5},
                doc! {"_id": "y", "posts": ["B"], "n": 1, "latest": 3},
                doc! {"_id": "z", "posts": ["B"], "n": 1, "latest": 3},
            ]),
        Case::new("many to many, gathered by element", "collect: { source: '@orders', target: '@parts', match: { _id: 'lines.$[].part' }, into: sold, element: { order: $_id, n: $$element.n }, slice: -2 }")
            .has("orders", [doc! {"_id": 1, "lines": [{"part": 1, "n": 5}, {"part": 2, "n": 6}]}, doc! {"_id": 2, "lines": [{"part": 1, "n": 7}]}])
            .has("parts", [doc! {"_id": 1}, doc! {"_id": 2}])
            .writes([update("orders", 1, doc! {"$set": {"lines.0.n": 50}}), insert("orders", doc! {"_id": 3, "lines": [{"part": 2, "n": 1}]}), delete("orders", 2)])
            .expect("parts", [doc! {"_id": 1, "sold": [{"order": 1, "n": 50}]}, doc! {"_id": 2, "sold": [{"order": 1, "n": 6}, {"order": 3, "n": 1}]}]),
        Case::new("source-held by a key that several targets have, across databases", "copy: { source: '@other.s', target: '@t', match: { code: 'codes.$[]' }, set: { name: $name } }")
            .has("other.s", [doc! {"_id": 1, "codes": ["a", "b"], "name": "n"}])
            .has("t", [doc! {"_id": 1, "code": "a"}, doc! {"_id": 2, "code": "a"}, doc! {"_id": 3, "code": "c"}])
            .writes([update("other.s", 1, doc! {"$set": {"codes": ["c", "a"], "name": "m"}}), update("t", 2, doc! {"$set": {"code": "b"}})])
            .expect("t", [doc! {"_id": 1, "code": "a", "name": "m"}, doc! {"_id": 2, "code": "b"}, doc! {"_id": 3, "code": "c", "name": "m"}]),
        Case::new("source-held, composite", "copy: { source: '@s', target: '@t', match: { tenant: tenant, code: 'items.$[].code' }, set: { name: $name, n: $$element.n } }")
            .has("s", [doc! {"_id": 1, "tenant": 1, "name": "a", "items": [{"code": "x", "n": 1}, {"code": "y", "n": 2}]}, doc! {"_id": 2, "tenant": 2, "name": "b", "items": [{"code": "x", "n": 3}]}])
            .has("t", [doc! {"_id": 1, "tenant": 1, "code": "x"}, doc! {"_id": 2, "tenant": 2, "code": "x"}, doc! {"_id": 3, "tenant": 2, "code": "y"}])
            .writes([update("s", 1, doc! {"$set": {"tenant": 2}}), delete("s", 2)])
            .expect("t", [doc! {"_id": 1, "tenant": 1, "code": "x"}, doc! {"_id": 2, "tenant": 2, "code": "x", "name": "a", "n": 1}, doc! {"_id": 3, "tenant": 2, "code": "y", "name": "a", "n": 2}]),
        Case::new("children by another key, across databases", "aggregate: { source: '@other.s', target: '@t', match: { code: k }, set: { in.n: { $sum: $v } } }")
            .has("other.s", [doc! {"_id": 1, "k": "a", "v": 1}, doc! {"_id": 2, "k": "a", "v": 2_i64}, doc! {"_id": 3, "k": "b", "v": 0.5}])
            .has("t", [doc! {"_id": 1, "code": "a"}, doc! {"_id": 2, "code": "a", "in": {"mine": 1}}, doc! {"_id": 3}])
            .writes([update("other.s", 3, doc! {"$set": {"k": "a"}}), delete("other.s", 1), update("t", 3, doc! {"$set": {"code": "b"}})])
            .expect("t", [doc! {"_id": 1, "code": "a", "in": {"n": 2.5}}, doc! {"_id": 2, "code": "a", "in": {"mine": 1, "n": 2.5}}, doc! {"_id": 3, "code": "b", "in": {"n": 0}}]),
        Case::new("children whose key_type differs", "collect: { source: '@s', target: '@t', match: { _id: owner }, key_type: string, into: all, element: $_id }")
            .has("s", [doc! {"_id": 1, "owner": "5"}, doc! {"_id": 2, "owner": hex(7).to_hex()}, doc! {"_id": 3, "owner": 5}])
            .has("t", [doc! {"_id": 5}, doc! {"_id": hex(7)}])
            .writes([insert("s", doc! {"_id": 4, "owner": "5"}), delete("s", 1), update("s", 2, doc! {"$set": {"owner": "5"}})])
            .expect("t", [doc! {"_id": 5, "all": [2, 4]}, doc! {"_id": hex(7), "all": []}]),
        Case::new("remove DBRefs that dangle", "copy: { source: '@s', target: '@t', match: { 'pubs.$[].$id': _id }, set: { 'pubs.$[].name': $name }, on_missing: remove }")
            .has("s", [name(1, "a")])
            .has("t", [refs()])
            .expect("t", [doc! {"_id": 1, "pubs": [{"$ref": "@s", "$id": 1, "name": "a"}, {"$ref": "@elsewhere", "$id": 9}]}]),
        Case::new("remove by a composite key", "copy: { source: '@s', target: '@t', match: { tenant: tenant, 'items.$[].code': code }, set: { 'items.$[].name': $name }, on_missing: remove }")
            .has("s", [doc! {"_id": 1, "tenant": 1, "code": "x", "name": "a"}, doc! {"_id": 2, "tenant": 2, "code": "y", "name": "b"}])
            .has("t", [doc! {"_id": 1, "tenant": 1, "items": [{"code": "x"}, {"code": "y"}, {}]}, doc! {"_id": 2, "items": [{"code": "q"}]}])
            .expect("t", [doc! {"_id": 1, "tenant": 1, "items": [{"code": "x", "name": "a"}, {}]}, doc! {"_id": 2, "items": [{"code": "q"}]}]),
        Case::new("remove by key_type", "copy: { source: '@s', target: '@t', match: { 'items.$[].id': _id }, key_type: objectId, set: { 'items.$[].name': $name }, on_missing: remove }")
            .has("s", [doc! {"_id": hex(1), "name": "a"}])
            .has("t", [doc! {"_id": 1, "items": [{"id": hex(1).to_hex()}, {"id": hex(2).to_hex()}, {"id": hex(2)}, {"id": hex(1)}, {"id": "no id"}]}])
            .expect("t", [doc! {"_id": 1, "items": [{"id": hex(1).to_hex(), "name": "a"}, {"id": hex(1), "name": "a"}]}]),
        Case::new("paths with spaces, dashes and letters beyond ASCII", "copy: { source: '@s', target: '@t', match: { 'réf é.a-b': _id }, set: { 'naïve.ключ 1': '$ñame.日本' } }")
            .has("s", [doc! {"_id": "ß", "ñame": {"日本": 1}}])
            .has("t", [doc! {"_id": 1, "réf é": {"a-b": "ß"}}])
            .writes([update("s", "ß", doc! {"$set": {"ñame.日本": 2}})])
            .expect("t", [doc! {"_id": 1, "réf é": {"a-b": "ß"}, "naïve": {"ключ 1": 2}}]),
        Case::new("where with operators", "copy: { source: { collection: '@s', where: { tags: { $elemMatch: { k: a, v: { $gte: 2 } } }, name: { $regex: '^n' } } }, target: { collection: '@t', where: { $or: [{ a: { $exists: true } }, { 'b.c': { $in: [1, 2] } }] } }, match: { ref: _id }, set: { name: $name } }")
            .has("s", [doc! {"_id": 1, "name": "n", "tags": [{"k": "a", "v": 1}, {"k": "b", "v": 9}]}])
            .has("t", [doc! {"_id": 1, "ref": 1, "a": null}, doc! {"_id": 2, "ref": 1, "b": [{"c": 3}]}, doc! {"_id": 3, "ref": 1}])
            .writes([update("s", 1, doc! {"$set": {"tags.0.v": 2}}), update("t", 2, doc! {"$set": {"b.0.c": 2}})])
            .expect("t", [doc! {"_id": 1, "ref": 1, "a": null, "name": "n"}, doc! {"_id": 2, "ref": 1, "b": [{"c": 2}], "name": "n"}, doc! {"_id": 3, "ref": 1}]),
        Case::new("several rules side by side on the same documents", NAME)
            .and("copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: in.names, element: $name }")
            .and("copy: { source: '@s', target: '@t', match: { 'in.items.$[].id': _id }, set: { 'in.items.$[].name': $name } }")
            .and("aggregate: { source: '@s', target: '@t', match: { k: k }, set: { in.count: { $count: {} } } }")
            .has("s", [doc! {"_id": 1, "name": "a", "k": 1}, doc! {"_id": 2, "name": "b", "k": 1}])
            .has("t", [doc! {"_id": 1, "ref": 1, "refs": [2, 1], "in": {"items": [{"id": 2}]}, "k": 1}, doc! {"_id": 2, "refs": []}])
            .writes([update("s", 1, doc! {"$set": {"name": "z", "k": 2}}), update("t", 1, doc! {"$set": {"ref": 2}, "$push": {"refs": 2, "in.items": {"id": 1}}})])
            .expect("t", [
                doc! {"_id": 1, "ref": 2, "name": "b", "refs": [2, 1, 2], "in": {"items": [{"id": 2, "name": "b"}, {"id": 1, "name": "z"}], "names": ["b", "z", "b"], "count": 1}, "k": 1},
                doc! {"_id": 2, "refs": [], "in": {"names": []}},
            ]),
        Case::new("ids of every type", NAME)
            .and("copy: { source: '@s', target: '@t', match: { 'refs.$[]': _id }, into: names, element: $name }")
            .has("s", ids().into_iter().map(|id| doc! {"_id": id, "name": "a"}))
            .has("t", ids().into_iter().map(|id| doc! {"_id": id.clone(), "ref": id.clone(), "refs": [id]}))
            .writes(ids().into_iter().map(|id| update("s", id, doc! {"$set": {"name": "b"}})))
            .expect("t", ids().into_iter().map(|id| doc! {"_id": id.clone(), "ref": id.clone(), "refs": [id], "name": "b", "names": ["b"]})),
    ]
}

/// An `_id` of every BSON type, in the server's order.
fn ids() -> Vec<Bson> {
    vec![
        Bson::MinKey,
        bson!(f64::NAN),
        bson!(-1),
        bson!(7.5),
        Bson::Int64(1 << 60),
        bson!("text"),
        bson!({"a": 1, "b.c": 2}),
        Bson::Binary(Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![1, 2] }),
        hex(3).into(),
        bson!(false),
        bson!(true),
        Bson::DateTime(DateTime::from_millis(1)),
        Bson::Timestamp(Timestamp { time: 1, increment: 2 }),
        Bson::MaxKey,
    ]
}

/// Values that a copy must not change, by name.
fn values() -> Vec<(&'static str, Bson)> {
    let decimal = |text: &str| Bson::Decimal128(text.parse::<Decimal128>().unwrap());
    let binary = |subtype, bytes: &[u8]| Bson::Binary(Binary { subtype, bytes: bytes.to_vec() });
    vec![
        ("int", Bson::Int32(5)),
        ("long", Bson::Int64(5)),
        ("double", Bson::Double(5.0)),
        ("decimal", decimal("5.00")),
        ("decimal NaN", decimal("NaN")),
        ("decimal -0", decimal("-0E+3")),
        ("largest long", Bson::Int64(i64::MAX)),
        ("NaN", Bson::Double(f64::NAN)),
        ("-0.0", Bson::Double(-0.0)),
        ("infinity", Bson::Double(f64::NEG_INFINITY)),
        ("smallest double", Bson::Double(5e-324)),
        ("date", Bson::DateTime(DateTime::from_millis(-1))),
        ("latest date", Bson::DateTime(DateTime::from_millis(i64::MAX))),
        ("timestamp", Bson::Timestamp(Timestamp { time: 7, increment: 9 })),
        // MongoDB replaces Timestamp(0, 0) by the time only at the top level of an inserted document.
        ("empty timestamp", bson!({"at": Bson::Timestamp(Timestamp { time: 0, increment: 0 })})),
        ("binary", binary(bson::spec::BinarySubtype::Generic, &[0, 1, 255])),
        ("uuid", binary(bson::spec::BinarySubtype::Uuid, &[7; 16])),
        ("user binary", binary(bson::spec::BinarySubtype::UserDefined(0x80), &[])),
        (
            "regex",
            Bson::RegularExpression(Regex { pattern: "^a.*$".try_into().unwrap(), options: "im".try_into().unwrap() }),
        ),
        ("code", Bson::JavaScriptCode("return 1".to_owned())),
        (
            "code with scope",
            Bson::JavaScriptCodeWithScope(JavaScriptCodeWithScope { code: "x".to_owned(), scope: doc! {"x": 1} }),
        ),
        ("symbol", Bson::Symbol("s".to_owned())),
        ("min key", Bson::MinKey),
        ("max key", Bson::MaxKey),
        ("undefined", Bson::Undefined),
        ("object id", hex(7).into()),
        ("composed", "\u{00e9}".into()),
        ("decomposed", "e\u{0301}".into()),
        ("beyond the first plane", "𝄞 \u{0000} \u{202e}".into()),
        ("empty text", "".into()),
        ("a field path", "$name".into()),
        ("the whole document", "$$ROOT".into()),
        ("remove", "$$REMOVE".into()),
        ("now", "$$NOW".into()),
        ("an expression", bson!({"$add": [1, 2]})),
        ("an expression inside", bson!({"a": [{"$literal": "$x"}, "$y"]})),
        ("an update operator", bson!({"$set": {"x": 1}, "$unset": {"y": 1}})),
        ("names with dots and dollars", bson!({"a.b": 1, "$c": 2, "d.$e": {"..": 3}, "": 4})),
        ("both normal forms as names", bson!({"\u{00e9}": 1, "e\u{0301}": 2})),
        ("names in order", bson!({"z": 1, "a": 2, "10": 3, "9": 4})),
        ("a DBRef", bson!({"$ref": "x", "$id": 1, "$db": "y", "more": 2})),
        ("arrays in arrays", bson!([[1, [2.0, null]], [], [{}]])),
    ]
}

/// References in a field of the `_id`. Reads once left out the other fields of the `_id`, so that it named another document.
fn parts_of_an_id() -> Vec<Case> {
    let of_tenant = |tenant: &str, n: i32| doc! {"tenant": tenant, "n": n};
    let customer = |id: i32, code: i32, name: &str| doc! {"_id": id, "tenant": "t", "code": code, "name": name};
    let items = [doc! {"_id": 7, "name": "bolt", "price": 3}, doc! {"_id": 8, "name": "nut", "price": 5}];
    let day = |item: i32, day: i32, n: i32| doc! {"_id": {"item": item, "day": day}, "n": n};
    vec![
        Case::new("beside another field", "copy: { source: '@customers', target: '@orders', match: { _id.tenant: tenant, customer: code }, set: { name: $name } }")
            .has("customers", [customer(1, 1, "Ada"), customer(2, 2, "Bob")])
            .has("orders", (0..3).map(|n| doc! {"_id": of_tenant("t", n), "customer": 1}))
            .writes([update("orders", of_tenant("t", 1), doc! {"$set": {"customer": 2}}), update("customers", 1, doc! {"$set": {"name": "Eve"}})])
            .expect("orders", [
                doc! {"_id": of_tenant("t", 0), "customer": 1, "name": "Eve"},
                doc! {"_id": of_tenant("t", 1), "customer": 2, "name": "Bob"},
                doc! {"_id": of_tenant("t", 2), "customer": 1, "name": "Eve"},
            ]),
        Case::new("with a field of the target", "copy: { source: '@items', target: '@days', match: { _id.item: _id }, set: { value: { $multiply: [$price, $$target.n] } } }")
            .has("items", items.clone())
            .has("days", [day(7, 1, 2), day(7, 2, 3), day(8, 1, 1)])
            .writes([update("items", 7, doc! {"$set": {"price": 4}}), update("days", doc! {"item": 8, "day": 1}, doc! {"$set": {"n": 6}})])
            .expect("days", [
                doc! {"_id": {"item": 7, "day": 1}, "n": 2, "value": 8},
                doc! {"_id": {"item": 7, "day": 2}, "n": 3, "value": 12},
                doc! {"_id": {"item": 8, "day": 1}, "n": 6, "value": 30},
            ]),
        Case::new("a field of the target's `_id` as a value", "copy: { source: '@items', target: '@days', match: { ref: _id }, set: { text: { $concat: [$name, ' ', $$target._id.unit] } } }")
            .has("items", items.clone())
            .has("days", [doc! {"_id": {"unit": "kg", "n": 1}, "ref": 7}])
            .writes([update("items", 7, doc! {"$set": {"name": "screw"}})])
            .expect("days", [doc! {"_id": {"unit": "kg", "n": 1}, "ref": 7, "text": "screw kg"}]),
        Case::new("an array in the `_id` refers to nothing", "copy: { source: '@items', target: '@days', match: { _id.item: _id }, set: { name: $name } }")
            .has("items", items.clone())
            .has("days", [doc! {"_id": {"item": [7, 8]}}, doc! {"_id": {"item": 8}}])
            .writes([update("items", 7, doc! {"$set": {"name": "screw"}}), update("items", 8, doc! {"$set": {"name": "washer"}})])
            .expect("days", [doc! {"_id": {"item": 8}, "name": "washer"}, doc! {"_id": {"item": [7, 8]}}]),
        Case::new("a field of the source's `_id`", "aggregate: { source: '@days', target: '@items', match: { _id: _id.item }, set: { n: { $sum: $n } } }")
            .has("items", items)
            .has("days", [day(7, 1, 2), day(7, 2, 3), day(8, 1, 1)])
            .writes([update("days", doc! {"item": 7, "day": 2}, doc! {"$set": {"n": 10}}), delete("days", doc! {"item": 8, "day": 1})])
            .expect("items", [
                doc! {"_id": 7, "name": "bolt", "price": 3, "n": 12},
                doc! {"_id": 8, "name": "nut", "price": 5, "n": 0},
            ]),
        Case::new("an array around the source's array", "aggregate: { source: '@orders', target: '@items', match: { _id: 'cart.lines.$[].item' }, set: { n: { $sum: 1 } } }")
            .has("items", [doc! {"_id": 5}])
            .has("orders", [doc! {"_id": 1, "cart": [{"lines": {"item": 5}}]}])
            .writes([insert("orders", doc! {"_id": 2, "cart": {"lines": [{"item": 5}]}}), delete("orders", 1)])
            .expect("items", [doc! {"_id": 5, "n": 1}]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_id_may_refer() {
    every_way(&parts_of_an_id()).await;
}

/// Pages once began after a part of the last `_id`, which sorts before or after all of a page.
#[tokio::test(flavor = "multi_thread")]
async fn pages_go_on_after_the_whole_id() {
    let many = |n: i32| doc! {"_id": {"item": n % 3, "day": DateTime::from_millis(i64::from(n) * 86_400_000)}, "n": 1};
    let by_day = |n: i32| doc! {"_id": DateTime::from_millis(i64::from(n) * 86_400_000), "n": 1};
    let named = |n: i32| {
        let mut day = many(n);
        day.extend(doc! {"name": format!("item {}", n % 3)});
        day
    };
    let cases = [
        Case::new("of targets", "copy: { source: '@items', target: '@days', match: { _id.item: _id }, set: { name: $name } }")
            .has("items", (0..3).map(|id| doc! {"_id": id, "name": format!("item {id}")}))
            .has("days", (0..3000).map(many))
            .expect("days", (0..3).flat_map(|item| (item..3000).step_by(3)).map(named)),
        Case::new("of sources", "aggregate: { source: '@days', target: { collection: '@by_day', create: true }, match: { _id: _id.day }, set: { n: { $sum: $n } } }")
            .has("days", (0..3000).map(many))
            .expect("by_day", (0..3000).map(by_day)),
    ];
    run(&cases, Way::Backfill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_known_peer_gets_wrong() {
    every_way(&known_failures()).await;
}

// This is the longest table: one test for each way. A restart includes a flood.
#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_reference_by_backfill() {
    run(&every_form(), Way::Backfill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_reference_through_every_change() {
    run(&every_form(), Way::StepByStep).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_reference_across_restarts() {
    run(&every_form(), Way::Restart).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_and_filters() {
    every_way(&policies()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_that_the_source_holds() {
    every_way(&source_held()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relations_with_a_turn() {
    every_way(&relations()).await;
}

/// Byte for byte: by `set`, in an element, in `into`, inside a subdocument; by backfill, and live over another value.
#[tokio::test(flavor = "multi_thread")]
async fn a_copied_value_is_data_and_keeps_its_type() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rules = "
  - name: scalar
    allow_scan: true
    copy: { source: s, target: scalar, match: { ref: _id }, set: { copy: $v, in.side: { v: $v } } }
  - name: element
    allow_scan: true
    copy: { source: s, target: element, match: { 'items.$[].ref': _id }, set: { 'items.$[].copy': $v } }
  - name: into
    allow_scan: true
    copy: { source: s, target: into, match: { 'refs.$[]': _id }, into: copies, element: { v: $v } }
  - name: once
    allow_scan: true
    copy: { source: s, target: once, match: { ref: _id }, set: { copy: $v }, once: true }
  - name: collect
    allow_scan: true
    collect: { source: s, target: collect, match: { _id: _id }, into: copies, element: { v: $v } }
  - name: newest
    allow_scan: true
    collect: { source: s, target: newest, match: { _id: _id }, into: copies, element: { v: $v }, slice: 1 }
  - name: first
    allow_scan: true
    aggregate: { source: s, target: first, match: { _id: _id }, set: { copy: { $first: $v } } }";
    // Half of the values exist before the daemon starts, half replace values that it has copied.
    for (id, (_, value)) in (0..).zip(values()) {
        let value = if id % 2 == 0 { value } else { "before".into() };
        db.collection("s").insert_one(doc! {"_id": id, "v": value}).await.unwrap();
        for target in ["scalar", "once", "collect", "newest", "first"] {
            db.collection(target).insert_one(doc! {"_id": id, "ref": id}).await.unwrap();
        }
        db.collection("element").insert_one(doc! {"_id": id, "items": [{"ref": id}]}).await.unwrap();
        db.collection("into").insert_one(doc! {"_id": id, "refs": [id]}).await.unwrap();
    }
    let config = daemon::config(&test, rules);
    let daemon = Daemon::start_config(&config).await;
    daemon.settled().await;
    for (id, (_, value)) in (0..).zip(values()) {
        if id % 2 == 1 {
            db.collection::<Document>("s").replace_one(doc! {"_id": id}, doc! {"_id": id, "v": value}).await.unwrap();
            db.collection::<Document>("once").update_one(doc! {"_id": id}, doc! {"$unset": {"copy": 1}}).await.unwrap();
            db.collection::<Document>("once").update_one(doc! {"_id": id}, doc! {"$set": {"ref": -1}}).await.unwrap();
            db.collection::<Document>("once").update_one(doc! {"_id": id}, doc! {"$set": {"ref": id}}).await.unwrap();
        }
    }
    daemon.settled().await;
    let mut wrong = Vec::new();
    for (id, (name, value)) in (0..).zip(values()) {
        let cover = |value: &Bson| bson::serialize_to_vec(&doc! {"v": value.clone()}).unwrap();
        let found =
            async |target: &str| db.collection::<Document>(target).find_one(doc! {"_id": id}).await.unwrap().unwrap();
        let inside =
            |document: Document, array: &str| document.get_array(array).unwrap()[0].as_document().unwrap().clone();
        let scalar = found("scalar").await;
        let side = scalar.get_document("in").unwrap().get_document("side").unwrap().clone();
        for (target, holder, field) in [
            ("scalar", scalar, "copy"),
            ("scalar, inside", side, "v"),
            ("once", found("once").await, "copy"),
            ("first", found("first").await, "copy"),
            ("element", inside(found("element").await, "items"), "copy"),
            ("into", inside(found("into").await, "copies"), "v"),
            ("collect", inside(found("collect").await, "copies"), "v"),
            ("newest", inside(found("newest").await, "copies"), "v"),
        ] {
            match holder.get(field) {
                Some(copy) if cover(copy) == cover(&value) => {}
                other => wrong.push(format!("{name} in {target}: {value:?} became {other:?}")),
            }
        }
    }
    let dead_letters = crate::support::cases::dead_letters(&test).await;
    assert!(wrong.is_empty(), "{}\n{dead_letters:?}", wrong.join("\n"));
    daemon.stop().await;
    crate::support::cases::assert_silence(&test, &config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backfill_of_several_pages_goes_on_across_types() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("s").insert_many((0..1200).map(|id| name(id, "a"))).await.unwrap();
    // The numbers fill more than a page, and end within one. Each has its own source: otherwise one would write the
    // other.
    let targets = (0..1100).map(Bson::Int32).chain(ids()).zip(0..).map(|(id, n)| doc! {"_id": id, "ref": n});
    db.collection("t").insert_many(targets).await.unwrap();
    let rule =
        "{ name: r, allow_scan: true, copy: { source: s, target: t, match: { ref: _id }, set: { name: $name } } }";
    let daemon = Daemon::start(&test, &format!("  - {rule}")).await;
    daemon.settled().await;
    let left = daemon::all(&db, "t").await.into_iter().filter(|target| target.get_str("name").ok() != Some("a"));
    assert_eq!(left.collect::<Vec<_>>(), Vec::<Document>::new());
    daemon.stop().await;
}

/// The preflight findings of a rule.
async fn findings(text: &str) -> Vec<preflight::Finding> {
    let context = daemon::context(text).await;
    preflight::check(&context.server, &context.plan).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_without_pre_images_is_refused_with_the_command_that_enables_them() {
    let test = denormd_fixture::database().await;
    test.database().create_collection("there").await.unwrap();
    for (rule, source, verb) in [
        ("copy: { source: there, target: t, match: { ref: code }, set: { name: $name } }", "there", "collMod"),
        ("copy: { source: absent, target: t, match: { ref: code }, set: { name: $name } }", "absent", "create"),
        ("copy: { source: there, target: t, match: { _id: 'refs.$[]' }, set: { name: $name } }", "there", "collMod"),
        ("aggregate: { source: there, target: t, match: { _id: owner }, set: { n: { $sum: 1 } } }", "there", "collMod"),
        ("collect: { source: there, target: t, match: { _id: owner }, into: all, element: $name }", "there", "collMod"),
    ] {
        let config = daemon::config(&test, &format!("  - name: r\n    allow_scan: true\n    {rule}"));
        let found = findings(&config).await;
        let [finding] = found.as_slice() else { panic!("{rule}: {found:?}") };
        assert!(
            finding.message.contains(&format!("{}.{source}", test.name)) && finding.message.contains("pre-images"),
            "{finding:?}"
        );
        let fix = finding.fix.as_ref().unwrap();
        let shell = if verb == "collMod" { "runCommand({ collMod: \"there\"" } else { "createCollection(\"absent\"" };
        assert!(
            fix.shell.contains(shell) && fix.shell.contains("changeStreamPreAndPostImages: { enabled: true }"),
            "{}",
            fix.shell
        );
        assert_eq!(fix.command.get_str(verb).unwrap(), source);
        assert_eq!(fix.database, test.name);
    }
    // By `_id`, the event alone contains the key.
    let config = daemon::config(
        &test,
        "  - name: r\n    allow_scan: true\n    copy: { source: there, target: t, match: { ref: _id }, set: { name: $name } }",
    );
    assert_eq!(findings(&config).await, []);
    // An element with the child's `_id` identifies the old parent.
    for element in ["$_id", "{ id: $_id, name: $name }"] {
        let rule = format!(
            "  - name: r\n    allow_scan: true\n    collect: {{ source: there, target: t, match: {{ _id: owner }}, into: all, element: {element} }}"
        );
        assert_eq!(findings(&daemon::config(&test, &rule)).await, [], "{element}");
    }
    let names = test.database().list_collection_names().await.unwrap();
    assert_eq!(names, ["there"], "looking creates nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn collections_without_a_change_stream_are_refused() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.run_command(doc! {"create": "view", "viewOn": "s", "pipeline": []}).await.unwrap();
    db.run_command(doc! {"create": "series", "timeseries": {"timeField": "at"}}).await.unwrap();
    db.run_command(doc! {"create": "capped", "capped": true, "size": 4096}).await.unwrap();
    for (source, target, said) in [
        ("s", "view", Some("a view")),
        ("view", "t", Some("a view")),
        ("s", "series", Some("a time-series collection")),
        ("series", "t", Some("a time-series collection")),
        ("s", "capped", Some("a capped collection")),
        ("capped", "t", None),
    ] {
        let rule = format!(
            "  - name: r\n    allow_scan: true\n    copy: {{ source: {source}, target: {target}, match: {{ ref: _id }}, set: {{ name: $name }} }}"
        );
        let found = findings(&daemon::config(&test, &rule)).await;
        match said {
            Some(said) => {
                assert!(
                    found.iter().any(|f| f.message.contains(said) && f.fix.is_none() && f.hint.is_some()),
                    "{source} -> {target}: {found:?}"
                );
            }
            None => assert_eq!(found, [], "{source} -> {target}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lookup_without_an_index_is_refused_with_the_command_that_makes_one() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rule = |rest: &str| {
        daemon::config(
            &test,
            &format!(
                "  - name: r{rest}\n    copy: {{ source: s, target: t, match: {{ ref: _id }}, set: {{ name: $name }} }}"
            ),
        )
    };
    for collection in ["s", "t"] {
        db.create_collection(collection).await.unwrap();
    }
    let found = findings(&rule("")).await;
    let [finding] = found.as_slice() else { panic!("{found:?}") };
    assert!(finding.message.contains("no index on ref"), "{finding:?}");
    assert!(
        finding.fix.as_ref().unwrap().shell.contains("getCollection(\"t\").createIndex({ \"ref\": 1 })"),
        "{finding:?}"
    );
    assert_eq!(findings(&rule("\n    allow_scan: true")).await, []);
    let create =
        doc! {"createIndexes": "t", "indexes": [{"key": {"ref": 1}, "name": "a", "partialFilterExpression": {"x": 1}}]};
    db.run_command(create).await.unwrap();
    assert_eq!(findings(&rule("")).await.len(), 1, "a partial index does not answer every lookup");
    db.run_command(doc! {"createIndexes": "t", "indexes": [{"key": {"ref": -1, "x": 1}, "name": "b"}]}).await.unwrap();
    assert_eq!(findings(&rule("")).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn writing_is_limited_to_the_declared_paths() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let target = doc! {"_id": 1, "z": 1, "ref": 1, "a": {"q": [1, {"name": 2}], "b": 3}, "name": "old", "y": null};
    db.collection("t").insert_one(target.clone()).await.unwrap();
    db.collection("s").insert_one(name(1, "new")).await.unwrap();
    let daemon =
        Daemon::start(&test, &format!("  - name: r\n    allow_scan: true\n    {}", NAME.replace('@', ""))).await;
    daemon.settled().await;
    db.collection::<Document>("s").delete_one(doc! {"_id": 2}).await.unwrap();
    daemon.settled().await;
    let mut expected = target;
    expected.insert("name", "new");
    let found: Vec<Document> = db.collection("t").find(doc! {}).await.unwrap().try_collect().await.unwrap();
    assert_eq!(found, [expected], "values, and the order of fields");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_target_stops_nothing_else() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let targets = [
        doc! {"_id": 1, "ref": 1},
        doc! {"_id": 2, "ref": 1, "at": 5},
        doc! {"_id": 3, "ref": 1},
        doc! {"_id": 4, "ref": 2},
    ];
    db.collection("t").insert_many(targets).await.unwrap();
    db.collection("s").insert_many([name(1, "a"), name(2, "b")]).await.unwrap();
    let rule = "  - name: r\n    allow_scan: true\n    copy: { source: s, target: t, match: { ref: _id }, set: { at.name: $name } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let expected = [
        doc! {"_id": 1, "ref": 1, "at": {"name": "a"}},
        doc! {"_id": 2, "ref": 1, "at": 5},
        doc! {"_id": 3, "ref": 1, "at": {"name": "a"}},
        doc! {"_id": 4, "ref": 2, "at": {"name": "b"}},
    ];
    assert_eq!(daemon::all(&db, "t").await, expected);
    let dead_letters = crate::support::cases::dead_letters(&test).await;
    let [dead_letter] = dead_letters.as_slice() else { panic!("{dead_letters:?}") };
    let id = dead_letter.get_document("_id").unwrap();
    assert_eq!((id.get_str("rule").unwrap(), id.get_array("target").unwrap()), ("r", &vec![bson!(2)]), "{dead_letter}");
    assert!(!dead_letter.get_str("reason").unwrap().is_empty(), "{dead_letter}");
    // After its owner repairs it, it is processed again.
    db.collection::<Document>("t").update_one(doc! {"_id": 2}, doc! {"$unset": {"at": 1}}).await.unwrap();
    for _ in 0..600 {
        if daemon::all(&db, "t").await[1].contains_key("at") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert_eq!(daemon::all(&db, "t").await[1], doc! {"_id": 2, "ref": 1, "at": {"name": "a"}});
    daemon.stop().await;
}

/// "a scalar where an array is expected, null or missing on the path, nested arrays …": where a rule would have to
/// write below something that is not a subdocument, the target becomes a dead letter with the path and the reason, and
/// stops nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_shape_is_set_aside_with_its_path() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("s")
        .insert_many([doc! {"_id": 1, "name": "a", "t": 1}, doc! {"_id": 2, "name": "b", "t": 2}])
        .await
        .unwrap();
    let rules = "
  - { name: set, allow_scan: true, copy: { source: s, target: set, match: { ref: _id }, set: { at.name: $name, beside: $name } } }
  - { name: element, allow_scan: true, copy: { source: s, target: element, match: { 'items.$[].id': _id }, set: { 'items.$[].at.name': $name } } }
  - { name: into, allow_scan: true, copy: { source: s, target: into, match: { 'refs.$[]': _id }, into: at.names, element: $name } }
  - { name: collect, allow_scan: true, collect: { source: s, target: collect, match: { ref: t }, into: at.all, element: $_id } }
  - { name: aggregate, allow_scan: true, aggregate: { source: s, target: aggregate, match: { ref: t }, set: { at.n: { $sum: 1 } } } }";
    // Values that prevent every rule's write; and values that do not.
    let bad = [bson!(5), Bson::Null, bson!("text"), bson!([{"name": 1}]), bson!(true)];
    let good = [None, Some(bson!({})), Some(bson!({"mine": 1}))];
    let shapes: Vec<(i32, Option<Bson>)> = (0..).zip(bad.into_iter().map(Some).chain(good)).collect();
    let target = |rule: &str, id: i32, at: Option<Bson>| {
        let at: Document = at.into_iter().map(|at| ("at".to_owned(), at)).collect();
        let mut target = doc! {"_id": id, "ref": 1, "refs": [2]};
        if rule == "element" {
            let mut element = doc! {"id": 1};
            element.extend(at);
            // A reference whose write nothing prevents, in the same array.
            target.insert("items", vec![element, doc! {"id": 2}]);
        } else {
            target.extend(at);
        }
        target
    };
    let names = ["set", "element", "into", "collect", "aggregate"];
    for rule in names {
        let targets = shapes.iter().map(|(id, at)| target(rule, *id, at.clone()));
        db.collection(rule).insert_many(targets).await.unwrap();
    }
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    db.collection::<Document>("s").update_many(doc! {}, doc! {"$set": {"name": "new"}}).await.unwrap();
    daemon.settled().await;
    let holds = |found: &Document, id: i32| found.get_document("at").is_ok_and(|at| at.len() > usize::from(id == 7));
    for rule in names {
        for (found, (id, at)) in daemon::all(&db, rule).await.into_iter().zip(&shapes) {
            let bad = *id < 5;
            match (rule, bad) {
                ("element", bad) => {
                    let items = found.get_array("items").unwrap();
                    let [first, second] = [0, 1].map(|nth: usize| items[nth].as_document().unwrap());
                    assert_eq!(holds(first, *id), !bad, "{found}");
                    assert_eq!(second, &doc! {"id": 2, "at": {"name": "new"}}, "{found}");
                }
                (_, true) => assert_eq!(found, target(rule, *id, at.clone()), "{rule}"),
                (_, false) => assert!(holds(&found, *id), "{rule}: {found}"),
            }
        }
    }
    let mut dead_letters: Vec<(String, i32, String, String)> = Vec::new();
    for dead_letter in crate::support::cases::dead_letters(&test).await {
        let id = dead_letter.get_document("_id").unwrap();
        // A rule that is keyed by its targets has the target as the key.
        let target = id.get_array("target").unwrap().first().or(id.get_array("key").unwrap().first()).unwrap();
        dead_letters.push((
            dead_letter.get_str("rule").unwrap().to_owned(),
            target.as_i32().unwrap(),
            dead_letter.get_str("path").unwrap_or("none").to_owned(),
            dead_letter.get_str("reason").unwrap().to_owned(),
        ));
    }
    dead_letters.sort();
    let mut expected: Vec<_> = names
        .into_iter()
        .flat_map(|rule| (0..5).map(move |id| (rule.to_owned(), id)))
        .map(|(rule, id)| {
            let path = if rule == "element" { "items.$[].at" } else { "at" };
            (rule, id, path.to_owned(), "server error 28 (PathNotViable)".to_owned())
        })
        .collect();
    expected.sort();
    assert_eq!(dead_letters, expected);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_rules_follows_to_its_end() {
    let chain = |case: &str| {
        Case::new(case, "copy: { source: '@categories', target: '@products', match: { category: _id }, set: { category_name: $name } }")
            .and("copy: { source: '@products', target: '@lines', match: { 'items.$[].product': _id }, set: { 'items.$[].info': { name: $name, category: $category_name } } }")
            .and("collect: { source: '@lines', target: '@customers', match: { _id: customer }, into: bought, element: $items }")
            .has("categories", [name(1, "tools"), name(2, "toys")])
            .has("products", [doc! {"_id": 1, "name": "saw", "category": 1}])
            .has("lines", [doc! {"_id": 1, "customer": 1, "items": [{"product": 1}]}])
            .has("customers", [doc! {"_id": 1}])
    };
    let bought = |name: &str, category: &str| {
        doc! {"_id": 1, "bought": [[{"product": 1, "info": {"name": name, "category": category}}]]}
    };
    let cases = [
        chain("from the start")
            .writes([update("categories", 1, doc! {"$set": {"name": "TOOLS"}})])
            .expect("customers", [bought("saw", "TOOLS")]),
        chain("from the middle")
            .writes([update("products", 1, doc! {"$set": {"category": 2}})])
            .expect("customers", [bought("saw", "toys")]),
        chain("from both")
            .writes([
                update("products", 1, doc! {"$set": {"name": "axe"}}),
                update("categories", 1, doc! {"$set": {"name": "T"}}),
            ])
            .expect("customers", [bought("axe", "T")]),
    ];
    every_way(&cases).await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_standalone_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mongod = std::process::Command::new("python3").arg("tests/mongod.py").output().unwrap();
    let mongod = String::from_utf8(mongod.stdout).unwrap();
    // Ends with this test's thread, however that ends.
    let mut server = std::process::Command::new("setpriv")
        .args([
            "--pdeathsig",
            "KILL",
            mongod.trim(),
            "--bind_ip",
            "127.0.0.1",
            "--nounixsocket",
            "--port",
            &port.to_string(),
        ])
        .args(["--wiredTigerCacheSizeGB", "0.25", "--dbpath"])
        .arg(folder.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let uri = format!("mongodb://127.0.0.1:{port}/?directConnection=true&serverSelectionTimeoutMS=60000");
    let error = connect::connect(&uri.into()).await.err().unwrap();
    assert_eq!(error.kind, Kind::Topology);
    assert!(error.message.contains("standalone"), "{}", error.message);
    assert!(error.hint.unwrap().contains("--replSet"));
    server.kill().unwrap();
    server.wait().unwrap();
}
