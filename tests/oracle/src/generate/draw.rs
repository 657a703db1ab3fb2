//! Documents, values and updates.

use bson::{Bson, DateTime, Document, bson, doc, oid::ObjectId};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

use super::{
    Generator, Held, Scenario, TOUCHED, crowd,
    odd::{NOT_UTF8, Odd, odd_key},
    shape::{Shape, tenant},
};
use crate::Op;

impl Generator {
    /// A whole document: the fields that expressions read, and the references of every rule that reads them here.
    pub(super) fn draw_document(&mut self, coll: &str, id: Option<Bson>) -> Document {
        let mut document = doc! {"_id": id.unwrap_or_else(|| self.draw_key())};
        for field in ["name", "label", "num", "n", "rank", "info", "list", "tags", "code", "tenant", "status"] {
            if self.rng.random_bool(0.75) {
                document.insert(field, self.draw_value(field));
            }
        }
        document.extend(self.draw_date().map(|date| ("at".to_owned(), date)));
        for scenario in self.holders(coll) {
            if self.rng.random_bool(0.9) {
                document.insert(scenario.field(), self.draw_references(&scenario));
            }
        }
        for scenario in self.owners(coll) {
            // An application that has read the document writes it back with old copies, or with none.
            if self.rng.random_bool(0.15) {
                let wrong = self.options.wrong_shapes && self.rng.random_bool(0.4);
                let field = scenario.outputs.first().map(|path| path.split('.').next().unwrap_or(path).to_owned());
                if let Some(field) = field {
                    let dotted = scenario.outputs.iter().any(|path| path.contains('.'));
                    let stale = match (dotted, wrong) {
                        (true, false) => bson!({"p0": "stale", "mine": 1}),
                        (_, true) => [bson!(null), bson!(5), bson!([]), bson!("x")]
                            .choose(&mut self.rng)
                            .cloned()
                            .unwrap_or(Bson::Null),
                        (false, false) => bson!("stale"),
                    };
                    document.insert(field, stale);
                }
            }
        }
        if self.beside.random_bool(0.05) {
            // `touch` must leave such a value alone, and the rule must still write its other values.
            let in_2100 = Bson::DateTime(DateTime::from_millis(4_102_444_800_000));
            document.insert(TOUCHED[0], pick(&mut self.beside, &[in_2100, bson!("mine")]));
        }
        document
    }

    /// Gives a first document stale values in owned fields: the first backfill overwrites them.
    pub(super) fn draw_overwritten(&mut self, coll: &str, document: &mut Document) {
        for scenario in self.owners(coll) {
            let Some(path) = scenario.outputs.first().filter(|_| self.frequencies.random_bool(0.3)) else { continue };
            let (field, value) = match path.split_once('.') {
                Some((field, below)) => (field, Bson::from(doc! {below: "stale", "mine": 1})),
                None => (path.as_str(), Bson::from("stale")),
            };
            document.entry(field.to_owned()).or_insert(value);
        }
    }

    /// Rules whose references are in this collection's documents.
    fn holders(&self, coll: &str) -> Vec<Scenario> {
        self.scenarios.iter().filter(|scenario| self.collections[scenario.holder()] == coll).cloned().collect()
    }

    /// Rules that write to this collection.
    fn owners(&self, coll: &str) -> Vec<Scenario> {
        self.scenarios.iter().filter(|scenario| self.collections[scenario.target] == coll).cloned().collect()
    }

    /// All the references of a document for one rule.
    fn draw_references(&mut self, scenario: &Scenario) -> Bson {
        if self.rng.random_bool(0.04) {
            return Bson::Null;
        }
        if self.options.wrong_shapes && self.rng.random_bool(0.06) {
            return [
                bson!(1),
                bson!([1, [1]]),
                bson!({"id": 1}),
                bson!([null, 1, {"id": [1]}]),
                bson!([[{"id": 1, "ids": 1, "b": {"c": 1}}]]),
                bson!("$name"),
                bson!([]),
            ]
            .choose(&mut self.rng)
            .cloned()
            .unwrap_or(Bson::Null);
        }
        if scenario.shape.is_array() {
            let count = self.rng.random_range(0..=4);
            let mut elements: Vec<Bson> = (0..count).map(|_| self.draw_reference(scenario)).collect();
            if self.options.wrong_shapes && scenario.held_by == Held::Source && self.frequencies.random_bool(0.05) {
                let misplaced = elements.iter().find_map(|element| scenario.shape.misplaced(element));
                elements.extend(misplaced);
            }
            Bson::Array(elements)
        } else {
            self.draw_reference(scenario)
        }
    }

    /// One reference, or one element of the array of references.
    pub(super) fn draw_reference(&mut self, scenario: &Scenario) -> Bson {
        let other = if scenario.holder() == scenario.target { scenario.source } else { scenario.target };
        let to = (self.options.database.as_str(), self.collections[other].as_str());
        let odd = self.odd.clone();
        let (is_crowded, edges, extra) = (self.is_crowded(), self.edges, &mut self.crowd);
        let mut key = |rng: &mut StdRng| {
            if is_crowded && extra.random_bool(0.85) {
                return crowd::key(extra);
            }
            odd_key(rng, &odd, edges).unwrap_or_else(|| reference_key(rng))
        };
        let mut element = scenario.shape.element(&mut self.rng, to, &mut key);
        if let Bson::Document(element) = &mut element
            && odd.contains(&Odd::NotUtf8)
            && element.contains_key("role")
            && self.rng.random_bool(0.3)
        {
            // Next to the key, below the same top-level field.
            element.insert("role", format!("{NOT_UTF8}"));
        }
        if let Bson::Document(element) = &mut element
            && scenario.shape.is_array()
            && scenario.holder() == scenario.target
            && self.rng.random_bool(0.15)
        {
            // An element that was read earlier is written back with its old copies.
            let number = scenario.number;
            let own = format!("r{number}.$[].o{number}");
            let rule = self.rules.get(number).map(ToString::to_string).unwrap_or_default();
            if rule.contains(&format!("{own}.")) {
                element.insert(format!("o{number}"), doc! {"p0": "stale"});
            } else if rule.contains(&own) {
                let into = scenario.kind == super::Kind::Into;
                element.insert(format!("o{number}{}", if into { "" } else { "_0" }), "stale");
            }
        }
        // A document in place of a key: an update can change a field inside it.
        if self.echoed == Some(Shape::Scalar) && scenario.shape == Shape::Scalar && self.frequencies.random_bool(0.2) {
            return bson!({"k": self::key(&mut self.frequencies)});
        }
        // In an array, an id changes from inside the field. If one is a document, the stream leaves out nothing.
        if self.echoed == Some(Shape::Ids) && scenario.shape == Shape::Ids && element.as_document().is_some() {
            return bson!(1);
        }
        // An element that is no document refers to nothing, and has no room for values.
        if self.options.wrong_shapes && scenario.shape.is_array() && self.rare.random_bool(0.05) {
            return pick(&mut self.rare, &[bson!(null), bson!(1), bson!("x")]);
        }
        element
    }

    /// Usually the id of an existing document.
    pub(super) fn draw_known_id(&mut self, coll: &str) -> Bson {
        let known = self.model.get(coll).and_then(|documents| documents.choose(&mut self.rng));
        let usual = match known.and_then(|document| document.get("_id").cloned()) {
            Some(id) if self.rng.random_bool(0.95) => id,
            _ => self.draw_key(),
        };
        // Changes of one document in quick succession: the first ones are still being applied when the others come.
        let first = self.model.get(coll).and_then(|documents| documents.first()?.get("_id").cloned());
        first.filter(|_| self.frequencies.random_bool(self.hot)).unwrap_or(usual)
    }

    pub(super) fn draw_update(&mut self, coll: &str, filter: &Document) -> Document {
        if let Some(update) = self.draw_other_date() {
            return update;
        }
        let (holders, owners) = (self.holders(coll), self.owners(coll));
        if let Some(path) = self.draw_once_path(&owners) {
            return doc! {"$set": {path: "mine"}};
        }
        if self.options.write_owned && self.rng.random_bool(0.15) {
            let outputs: Vec<String> = owners.into_iter().flat_map(|scenario| scenario.outputs).collect();
            if let Some(path) = outputs.choose(&mut self.rng) {
                return if self.rng.random_bool(0.5) {
                    doc! {"$set": {path: "drift"}}
                } else {
                    doc! {"$unset": {path: ""}}
                };
            }
        }
        if self.rng.random_bool(0.5)
            && let Some(scenario) = holders.choose(&mut self.rng)
        {
            return self.draw_move(scenario, coll, filter);
        }
        let field =
            ["name", "name", "name", "label", "num", "n", "rank", "info", "list", "tags", "code", "tenant", "status"]
                .choose(&mut self.rng)
                .copied()
                .unwrap_or("name");
        match (field, self.rng.random_range(0..10)) {
            (_, 0..=1) => doc! {"$unset": {field: ""}},
            ("num" | "n", 2..=4) => doc! {"$inc": {field: 1}},
            ("info", 2..=4) => doc! {"$set": {"info.a": scalar(&mut self.rng)}},
            ("info", 5) => doc! {"$unset": {"info.a": ""}},
            ("info", 6) => doc! {"$set": {"info.b.c": scalar(&mut self.rng)}},
            ("tags", 2..=4) => doc! {"$push": {"tags": scalar(&mut self.rng)}},
            ("list", 2..=4) => doc! {"$push": {"list": {"x": scalar(&mut self.rng)}}},
            // Two fields at once, one of which may decide which key the document belongs to.
            (_, 9) => doc! {"$set": {
                field: self.draw_value(field),
                "status": self.draw_value("status"),
            }},
            _ => doc! {"$set": {field: self.draw_value(field)}},
        }
    }

    /// Sometimes an owned path of a `once` rule: the application may fill it before the rule does.
    fn draw_once_path(&mut self, owners: &[Scenario]) -> Option<String> {
        let path = self.once_paths(owners).choose(&mut self.frequencies).cloned()?;
        self.frequencies.random_bool(0.2).then_some(path)
    }

    /// The owned paths of the `once` rules among these, if the application fills them, too.
    fn once_paths(&self, owners: &[Scenario]) -> Vec<String> {
        let fills = |owner: &&Scenario| {
            self.options.fills_once
                && self.rules.get(owner.number).is_some_and(|rule| rule.to_string().contains("\"once\": true"))
        };
        owners.iter().filter(fills).flat_map(|owner| owner.outputs.clone()).collect()
    }

    /// Often fills the value of a `once` rule in the document that was changed last: the rule may be about to write it.
    pub(super) fn draw_fill(&mut self) -> Option<Op> {
        let (coll, id) = self.changed.clone()?;
        let mut paths = self.once_paths(&self.owners(&coll));
        let document = self.model.get(&coll)?.iter().find(|document| document.get("_id") == Some(&id))?;
        paths.retain(|path| !document.contains_key(path.split('.').next().unwrap_or(path)));
        let path = paths.choose(&mut self.frequencies)?;
        let update = doc! {"$set": {path: "mine"}};
        self.frequencies.random_bool(0.5).then(|| Op::Update { coll, filter: doc! {"_id": id}, update })
    }

    /// Adds, removes, moves or changes references.
    fn draw_move(&mut self, scenario: &Scenario, coll: &str, filter: &Document) -> Document {
        let field = scenario.field();
        let stored = self.model.get(coll).and_then(|documents| {
            documents
                .iter()
                .find(|document| document.get("_id") == filter.get("_id"))
                .and_then(|document| document.get(&field))
        });
        let mut elements = stored.and_then(Bson::as_array).cloned().unwrap_or_default();
        if !scenario.shape.is_array() {
            return match self.rng.random_range(0..10) {
                0 => doc! {"$unset": {field: ""}},
                1..=2
                    if scenario.shape.key_paths("")[0].ends_with("id")
                        && stored.is_some_and(|it| it.as_document().is_some()) =>
                {
                    doc! {"$set": {scenario.shape.key_paths(&field)[0].clone(): reference_key(&mut self.rng)}}
                }
                _ => doc! {"$set": {field: self.draw_references(scenario)}},
            };
        }
        let at = self.rng.random_range(0..elements.len().max(1));
        match self.rng.random_range(0..12) {
            0 => doc! {"$unset": {field: ""}},
            1..=3 => doc! {"$push": {field: self.draw_reference(scenario)}},
            4 => doc! {"$push": {field: {"$each": [self.draw_reference(scenario)], "$position": 0}}},
            5..=6 => {
                let pull = scenario.shape.pull(&reference_key(&mut self.rng));
                doc! {"$pull": {field: pull}}
            }
            7 if !elements.is_empty() => doc! {"$set": {format!("{field}.{at}"): self.draw_reference(scenario)}},
            8 if !elements.is_empty() => {
                elements.rotate_left(1);
                doc! {"$set": {field: elements}}
            }
            9 if !elements.is_empty() => {
                elements.push(elements[at].clone());
                doc! {"$set": {field: elements}}
            }
            10 if !elements.is_empty() => {
                elements.remove(at);
                doc! {"$set": {field: elements}}
            }
            _ => doc! {"$set": {field: self.draw_references(scenario)}},
        }
    }
}

pub(super) fn pick(rng: &mut StdRng, values: &[Bson]) -> Bson {
    values.choose(rng).cloned().unwrap_or(Bson::Null)
}

fn object_id(rng: &mut StdRng) -> ObjectId {
    ObjectId::from_bytes([rng.random_range(1..=2); 12])
}

/// A key: few distinct ones, numbers in every type, so that they collide.
pub(super) fn key(rng: &mut StdRng) -> Bson {
    let number = rng.random_range(1..=4);
    match rng.random_range(0..100) {
        0..=39 => Bson::Int32(number),
        40..=49 => Bson::Int64(number.into()),
        50..=59 => Bson::Double(number.into()),
        60..=62 => number.to_string().parse().map_or(Bson::Null, Bson::Decimal128),
        63..=76 => object_id(rng).into(),
        77..=84 => Bson::String(number.to_string()),
        85..=87 => pick(rng, &[bson!("$name"), bson!("$$ROOT"), bson!("")]),
        88..=91 => pick(rng, &[bson!({"k": 1}), bson!({"k": 1.0}), bson!({"k": [1]})]),
        92..=93 => pick(rng, &[bson!(0), bson!(0.0), bson!(-0.0)]),
        94 => Bson::Boolean(true),
        95..=97 => Bson::String(object_id(rng).to_hex()),
        _ => Bson::Null,
    }
}

/// The value of a reference: a key, or a value that `key_type` converts into one.
fn reference_key(rng: &mut StdRng) -> Bson {
    match rng.random_range(0..100) {
        0..=11 => Bson::String(object_id(rng).to_hex()),
        12..=13 => Bson::String(object_id(rng).to_hex().to_uppercase()),
        14..=15 => pick(rng, &[bson!([1]), bson!([]), bson!({})]),
        _ => key(rng),
    }
}

fn scalar(rng: &mut StdRng) -> Bson {
    pick(
        rng,
        &[
            bson!("a"),
            bson!("b"),
            bson!(""),
            bson!(0),
            bson!(1),
            Bson::Int64(1),
            bson!(1.0),
            bson!(false),
            bson!(null),
            bson!("$name"),
        ],
    )
}

/// The numbers of a world: of one of the first four kinds, whose sum depends on the order, or none. Large ones that cancel each
/// other out swallow a small one that is added between them. More than 2^57 would exceed a long where the daemon multiplies a
/// number by the count of its sources, and the simulated server does not decide that.
pub(super) fn numbers(rng: &mut StdRng, kinds: i32) -> Vec<Bson> {
    match rng.random_range(0..kinds) {
        0 => vec![bson!(1e100), bson!(-1e100), bson!(0.1)],
        1 => [1 << 57, -(1 << 57), 3].map(Bson::Int64).to_vec(),
        2 => vec![bson!(0.1)],
        3 => [(1 << 53) + 1, 1 << 57, -(1 << 57)].map(Bson::Int64).to_vec(),
        _ => Vec::new(),
    }
}

/// A value of one of the fields that users own.
pub(super) fn user_value(rng: &mut StdRng, field: &str) -> Bson {
    match field {
        "name" => match rng.random_range(0..10) {
            0..=4 => scalar(rng),
            5 => Bson::String(format!("n{}", rng.random_range(0..1000))),
            6 => pick(
                rng,
                &[bson!("$$ROOT"), bson!("$name"), bson!("$secret.x"), bson!({"$add": [1, 2]}), bson!({"a": "$name"})],
            ),
            7 => pick(
                rng,
                &[
                    bson!(-0.0),
                    bson!(0.0),
                    Bson::Int64(0),
                    Bson::Double(f64::NAN),
                    Bson::DateTime(DateTime::from_millis(0)),
                ],
            ),
            8 => pick(rng, &[bson!({"x": 1, "y": 2}), bson!({"y": 2, "x": 1}), bson!({}), bson!({"x": {"y": null}})]),
            _ => pick(rng, &[bson!([]), bson!([1, "$name"]), bson!([[1], {"a": 1}]), bson!([null])]),
        },
        "label" => pick(rng, &[bson!("a"), bson!("Bc"), bson!("$x"), bson!(""), bson!(null)]),
        "num" => pick(rng, &[bson!(1), bson!(2), bson!(3), Bson::Int64(2), bson!(2.5), bson!(0), bson!(null)]),
        "n" => match rng.random_range(0..12) {
            0 => bson!(i32::MAX),
            1 => bson!("x"),
            2 => bson!(null),
            3 => Bson::Int64(rng.random_range(-3..4)),
            4..=5 => Bson::Double(f64::from(rng.random_range(-8..9)) / 4.0),
            _ => Bson::Int32(rng.random_range(-3..10)),
        },
        "rank" => {
            pick(rng, &[bson!(1), bson!(2), bson!(3), bson!(2.0), Bson::Int64(1), bson!("x"), bson!(null), bson!(1.5)])
        }
        "info" => match rng.random_range(0..8) {
            0 => bson!(null),
            1 => bson!(5),
            2 => bson!({"b": {"c": scalar(rng)}}),
            3 => bson!({"a": scalar(rng), "b": 1}),
            4 => bson!({}),
            _ => bson!({"a": scalar(rng), "b": {"c": scalar(rng)}}),
        },
        "list" => pick(
            rng,
            &[
                bson!([]),
                bson!([{"x": 1}, {"x": "b"}, {"y": 1}]),
                bson!([{"x": null}, 3]),
                bson!([{"x": 1}, {"x": 2}, {"x": "1"}]),
                bson!([{"x": 4}, {"x": 3.0}, {"x": Bson::Int64(2)}, {"x": 1}]),
                bson!({"x": 1}),
                bson!(null),
            ],
        ),
        "tags" => pick(
            rng,
            &[
                bson!([]),
                bson!([1, "x"]),
                bson!([1, 2, "1", "2"]),
                bson!([4, 3.0, Bson::Int64(2), 1]),
                bson!([[1]]),
                bson!(null),
                bson!("$tags"),
            ],
        ),
        "code" => {
            if rng.random_bool(0.05) {
                return bson!([1]);
            }
            key(rng)
        }
        "tenant" => tenant(rng),
        _ => pick(rng, &[bson!("open"), bson!("open"), bson!("draft"), bson!("closed"), bson!(null)]),
    }
}
