//! The rare kinds of data, writes and commands that stop a daemon for good if it does not handle them.

use std::collections::BTreeSet;

use bson::{Bson, Document, bson, doc};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

use super::{Generator, Held, Kind, Scenario, crowd, draw, shape::Shape};
use crate::{Op, World, value::equal};

/// One rare kind. A world has each kind that [`super::Options`] allow with a certain probability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Odd {
    /// Strings that are not UTF-8, in values, references and `_id`s: represented here by [`NOT_UTF8`].
    NotUtf8,
    /// Values and documents of megabytes, up to the limit of the server.
    Large,
    /// Empty arrays and objects wherever an expression can yield them.
    Empty,
    /// Collections that are dropped, restored from a backup and renamed.
    Collections,
    /// Pre-images that are switched off and on.
    PreImages,
    /// Targets whose value cannot be computed, among others.
    Failing,
    /// Keys whose value takes long to compute.
    Slow,
    /// Collections with a default collation that ignores case.
    Collation,
    /// One update that changes a reference and writes the copy as well.
    Echo,
    /// `_id`s and references of MinKey, MaxKey and null.
    EdgeIds,
}

/// Stands for three bytes that are not UTF-8: worlds in memory only have valid strings.
pub const NOT_UTF8: char = '\u{F8FF}';

/// Index of the collection that echoes change.
pub(super) const ECHOED: usize = 3;

impl Odd {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::NotUtf8,
        Self::Large,
        Self::Empty,
        Self::Collections,
        Self::PreImages,
        Self::Failing,
        Self::Slow,
        Self::Collation,
        Self::Echo,
        Self::EdgeIds,
    ];

    /// Its name, by which it is chosen.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotUtf8 => "not-utf8",
            Self::Large => "large",
            Self::Empty => "empty",
            Self::Collections => "collections",
            Self::PreImages => "pre-images",
            Self::Failing => "failing",
            Self::Slow => "slow",
            Self::Collation => "collation",
            Self::Echo => "echo",
            Self::EdgeIds => "edge-ids",
        }
    }

    /// Percentage of worlds with this kind. Slow kinds are rare.
    fn percentage(self) -> u32 {
        match self {
            Self::Large => 6,
            Self::Slow => 15,
            _ => 35,
        }
    }
}

/// Draws the kinds of a world from the allowed ones. A single allowed kind is in every world.
pub(super) fn drawn(rng: &mut StdRng, allowed: &[Odd]) -> BTreeSet<Odd> {
    let alone = allowed.len() == 1;
    allowed.iter().copied().filter(|odd| alone || rng.random_range(0..100) < odd.percentage()).collect()
}

/// Sizes of large values in bytes: some documents hold two of the smaller ones, and one of the largest fits alone.
const LARGE: [usize; 4] = [1 << 20, 3 << 20, 9 << 20, (16 << 20) - 20_000];

/// An expression that fails for some values.
pub(super) fn failing_expression(rng: &mut StdRng) -> Bson {
    draw::pick(rng, &[bson!({"$concat": ["$name", "!"]}), bson!({"$add": ["$n", 1]})])
}

impl Generator {
    /// True if this world has the kind.
    #[must_use]
    pub fn has(&self, odd: Odd) -> bool {
        self.odd.contains(&odd)
    }

    /// The kinds of this world.
    pub fn odd(&self) -> impl Iterator<Item = Odd> {
        self.odd.iter().copied()
    }

    /// The default collation that a collection is created with.
    #[must_use]
    pub fn collation(&self, coll: &str) -> Option<Document> {
        let nth = self.collections.iter().position(|name| name == coll)?;
        self.collated.contains(&nth).then(|| doc! {"locale": "en", "strength": 2})
    }

    /// Draws the collections with a default collation.
    pub(super) fn draw_collations(&mut self) {
        if self.has(Odd::Collation) {
            self.collated = (0..self.collections.len()).filter(|_| self.rng.random_bool(0.6)).collect();
        }
    }

    /// Draws one shape for all references that echoes change, in half of the worlds with echoes: the stream leaves out updates only if
    /// all rules of a collection allow it.
    pub(super) fn draw_echoed(&mut self) -> Option<Shape> {
        let is_plain = self.frequencies.random_bool(0.5);
        let shapes = [Shape::Scalar, Shape::Ids];
        shapes.choose(&mut self.frequencies).copied().filter(|_| is_plain && self.has(Odd::Echo))
    }

    /// True for the collection that echoes change, if all its references have one shape.
    pub(super) fn is_echoed(&self, collection: usize) -> bool {
        self.echoed.is_some() && collection == ECHOED
    }

    /// One of the rare commands, or none.
    pub(super) fn draw_odd(&mut self, coll: &str) -> Option<Op> {
        let away = format!("{coll}x");
        if self.model.contains_key(&away) && self.rng.random_bool(0.4) {
            return Some(Op::Rename { from: away, coll: coll.to_owned() });
        }
        if self.has(Odd::Collections) && self.rng.random_bool(0.06) {
            return Some(match self.rng.random_range(0..4) {
                0 => Op::Drop { coll: coll.to_owned() },
                1 if self.model.contains_key(coll) => Op::Rename { from: coll.to_owned(), coll: away },
                _ => Op::Restore { coll: coll.to_owned(), docs: self.backup(coll) },
            });
        }
        if self.has(Odd::PreImages) && self.rng.random_bool(0.05) && self.pre_images().contains(coll) {
            let on = self.rng.random_bool(0.5);
            return Some(Op::PreImages { coll: coll.to_owned(), on });
        }
        if self.has(Odd::Echo) && self.rng.random_bool(0.25) {
            return self.draw_echo();
        }
        None
    }

    /// An older state of a collection.
    fn backup(&mut self, coll: &str) -> Vec<Document> {
        let kept = self.backup.get(coll).cloned().unwrap_or_default();
        kept.into_iter().filter(|_| self.rng.random_bool(0.8)).collect()
    }

    /// Saves the current state as a backup.
    pub(super) fn back_up(&mut self) {
        self.backup = World::clone(&self.model);
    }

    /// Changes a reference, as a whole or from inside, and writes an owned field in the same update.
    fn draw_echo(&mut self) -> Option<Op> {
        let scenarios: Vec<Scenario> = self
            .scenarios
            .iter()
            .filter(|it| matches!(it.kind, Kind::Set | Kind::Into) && it.held_by == Held::Target)
            .filter(|it| !matches!(it.shape, Shape::DbRef) && !it.outputs.is_empty())
            // A rule of a chain may refer by a field that another rule has written.
            .filter(|it| {
                self.rules[it.number].to_string().contains(&format!("{:?}", it.shape.key_paths(&it.field())[0]))
            })
            .cloned()
            .collect();
        let scenario = scenarios.choose(&mut self.rng)?;
        let field = scenario.field();
        let coll = self.collections[scenario.target].clone();
        let documents: Vec<&Document> =
            self.model.get(&coll)?.iter().filter(|document| document.contains_key(&field)).collect();
        let document = (*documents.choose(&mut self.rng)?).clone();
        let filter = doc! {"_id": document.get("_id").cloned()};
        let output = scenario.outputs.choose(&mut self.rng)?.clone();
        let stored = document.get(&field)?;
        if scenario.shape.is_array() {
            stored.as_array()?;
            let update = doc! {"$push": {field: self.draw_reference(scenario)}, "$set": {output: "old"}};
            return Some(Op::Update { coll, filter, update });
        }
        let path = match stored.as_document() {
            Some(stored) if scenario.shape == Shape::Scalar => format!("{field}.{}", stored.keys().next()?),
            Some(_) => scenario.shape.key_paths(&field).pop()?,
            None if scenario.shape == Shape::Scalar => field,
            None => return None,
        };
        let key = draw::key(&mut self.rng);
        let stored = path.split_once('.').map_or(Some(stored), |(_, last)| stored.as_document()?.get(last));
        if stored.is_some_and(|stored| equal(stored, &key)) {
            return None;
        }
        // The stored document may differ from this one: its collection may have been restored.
        let filter = doc! {"_id": document.get("_id").cloned(), "$nor": [{&path: {"$eq": &key}}]};
        Some(Op::Update { coll, filter, update: doc! {"$set": {path: key, output: "old"}} })
    }

    /// A key of one of this world's kinds, or of the usual ones.
    pub(super) fn draw_key(&mut self) -> Bson {
        let odd = self.odd.clone();
        odd_key(&mut self.rng, &odd, self.edges).unwrap_or_else(|| draw::key(&mut self.rng))
    }

    /// A value of a field that users own.
    pub(super) fn draw_value(&mut self, field: &str) -> Bson {
        // Drawn in any case: other draws of a seed stay as they were.
        let usual = self.draw_usual_value(field);
        match field {
            "n" if self.crowded_chance(0.6) => self.numbers.choose(&mut self.crowd).cloned().unwrap_or(usual),
            "n" if self.rare.random_bool(0.5) => self.numbers.choose(&mut self.rare).cloned().unwrap_or(usual),
            "code" if self.has_long_codes => format!("{:030}", self.rare.random_range(1..=4)).into(),
            "code" if self.crowded_chance(0.8) => crowd::key(&mut self.crowd),
            // It matches no key, but a query for 1 finds it.
            "code" if self.rare.random_bool(0.05) => bson!([1]),
            _ => usual,
        }
    }

    /// A value of one of this world's kinds, or of the usual ones.
    fn draw_usual_value(&mut self, field: &str) -> Bson {
        if field == "name" && self.has(Odd::Large) && self.large_left > 0 && self.rng.random_bool(0.1) {
            self.large_left -= 1;
            let size = LARGE.choose(&mut self.rng).copied().unwrap_or_default();
            return Bson::String("L".repeat(size));
        }
        let odd = self.odd.clone();
        let rng = &mut self.rng;
        if odd.contains(&Odd::NotUtf8) && rng.random_bool(0.25) {
            let text = format!("a{NOT_UTF8}{}", rng.random_range(0..3));
            return match field {
                "name" | "label" => Bson::String(text),
                "info" => bson!({"a": text.clone(), "b": {"c": text}}),
                "tags" => bson!([1, text]),
                "list" => bson!([{"x": text}]),
                "code" => Bson::String(text),
                _ => draw::user_value(rng, field),
            };
        }
        if odd.contains(&Odd::Collation) && rng.random_bool(0.3) {
            return match field {
                "label" => draw::pick(rng, &[bson!("A"), bson!("bC"), bson!("B")]),
                "status" => draw::pick(rng, &[bson!("Open"), bson!("DRAFT")]),
                "code" => draw::pick(rng, &[bson!("a"), bson!("A")]),
                _ => draw::user_value(rng, field),
            };
        }
        if odd.contains(&Odd::Empty) && rng.random_bool(0.4) {
            return match field {
                "name" | "tags" | "list" => draw::pick(rng, &[bson!([]), bson!({}), bson!([[]]), bson!([{}])]),
                "info" => draw::pick(rng, &[bson!({}), bson!({"a": []}), bson!({"a": {}, "b": {"c": []}})]),
                // The server cannot sort by two arrays.
                "n" => draw::pick(rng, &[bson!(1), bson!([]), bson!({})]),
                _ => draw::user_value(rng, field),
            };
        }
        draw::user_value(rng, field)
    }

    /// An expression of one of this world's kinds, or none.
    pub(super) fn draw_odd_expression(&mut self) -> Option<Bson> {
        if self.has(Odd::Slow) && self.rng.random_bool(0.4) {
            // A tenth of a second of the server's time.
            let long = doc! {"$size": {"$range": [0, 1_000_000]}};
            return Some(doc! {"$cond": [{"$eq": ["$num", 3]}, long, "$name"]}.into());
        }
        if self.has(Odd::Failing) && self.rng.random_bool(0.4) {
            return Some(failing_expression(&mut self.rng));
        }
        if self.has(Odd::Empty) && self.rng.random_bool(0.5) {
            let paths = ["$tags", "$info", "$list", "$name", "$info.a", "$list.x"];
            return paths.choose(&mut self.rng).map(|path| Bson::from(*path));
        }
        None
    }
}

/// A key of one of these kinds; `edges` is the share of MinKey, MaxKey and null.
pub(super) fn odd_key(rng: &mut StdRng, odd: &BTreeSet<Odd>, edges: f64) -> Option<Bson> {
    if odd.contains(&Odd::EdgeIds) && rng.random_bool(edges) {
        return Some(draw::pick(rng, &[Bson::MinKey, Bson::MaxKey, Bson::Null]));
    }
    if odd.contains(&Odd::NotUtf8) && rng.random_bool(0.15) {
        return Some(Bson::String(format!("a{NOT_UTF8}{}", rng.random_range(0..2))));
    }
    if odd.contains(&Odd::Collation) && rng.random_bool(0.2) {
        return Some(draw::pick(rng, &[bson!("a"), bson!("A"), bson!("b")]));
    }
    None
}
