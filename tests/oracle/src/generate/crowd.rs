//! Crowded worlds: nearly all references are to one of two keys, so that many sources and targets share reads, batches and
//! statements.

use bson::{Bson, Document, bson, doc};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

use super::{Generator, Held, Kind, Scenario, draw::pick, shape::Shape};
use crate::Op;

/// The `_id`s of the first documents of each collection.
pub(super) const IDS: [i32; 2] = [1, 2];

/// A reference or a code: 1, 2, or an array of both. A query for 1 finds the array, but the array matches no key.
pub(super) fn key(rng: &mut StdRng) -> Bson {
    pick(rng, &[bson!(1), bson!(1), bson!(1), bson!(1), bson!(1.0), bson!(2), bson!(2), bson!([2, 1])])
}

/// The distribution of a world's references over keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Crowding {
    /// They are spread over all keys.
    None,
    /// Nearly all are to one of two keys.
    Crowded,
    /// As above, and the rules have no filters, and references that are single `_id`s.
    Plain,
}

impl Crowding {
    pub(super) fn draw(rng: &mut StdRng) -> Self {
        match (rng.random_bool(0.3), rng.random_bool(0.4)) {
            (false, _) => Self::None,
            (true, false) => Self::Crowded,
            (true, true) => Self::Plain,
        }
    }
}

impl Generator {
    /// True if nearly all references are to one of two keys.
    #[must_use]
    pub fn is_crowded(&self) -> bool {
        self.crowding != Crowding::None
    }

    pub(super) fn is_plain(&self) -> bool {
        self.crowding == Crowding::Plain
    }

    /// True with this probability in a crowded world.
    pub(super) fn crowded_chance(&mut self, probability: f64) -> bool {
        self.is_crowded() && self.crowd.random_bool(probability)
    }

    /// The direction and shape of a rule's references: often one with which keys share reads and statements.
    pub(super) fn draw_crowded_form(&mut self, kind: Kind, held_by: Held, shape: Shape) -> (Held, Shape) {
        match (kind, self.crowd.random_range(0..10)) {
            (Kind::Collect | Kind::Aggregate, _) if self.is_plain() => (Held::Source, Shape::Scalar),
            (Kind::Set, _) if self.is_plain() => (Held::Target, Shape::Scalar),
            (Kind::Set, 0..=5) => (Held::Target, Shape::Scalar),
            (Kind::Set, 6..=7) => (Held::Source, Shape::Elements),
            (Kind::Collect | Kind::Aggregate, 0..=4) => (Held::Source, Shape::Scalar),
            _ => (held_by, shape),
        }
    }

    /// In a crowded world, turns many aggregates into sums or means alone: only their sources may be read in any order, unless that
    /// changes the result.
    pub(super) fn draw_sums(&mut self, scenario: &Scenario, body: &mut Document, outputs: &mut Vec<String>) {
        let depends_on_target = body.get("source").is_some_and(|side| side.to_string().contains("$$target"));
        let has_groups = body.contains_key("by");
        if scenario.kind != Kind::Aggregate || depends_on_target || has_groups || !self.crowded_chance(0.8) {
            return;
        }
        body.remove("let");
        // Sources are usually found from the oldest to the newest.
        if self.crowd.random_bool(0.5) {
            body.insert("sort", doc! {"_id": -1});
        }
        // Integers have the same sum in any order, and a mean of fractions is never read in another one.
        let (usual, other) =
            if matches!(self.numbers.first(), Some(Bson::Double(_))) { ("$sum", "$avg") } else { ("$avg", "$sum") };
        let operator = if self.crowd.random_bool(0.75) { usual } else { other };
        let number = scenario.number;
        let mut set = doc! {format!("o{number}.0p"): {operator: "$n"}};
        if self.crowd.random_bool(0.5) {
            set.insert(format!("o{number}.1p"), doc! {"$sum": 1});
        }
        *outputs = set.keys().cloned().collect();
        body.insert("set", set);
    }

    /// In a crowded world, often an update of a value that many targets copy. 0.0 and -0.0 are equal but not identical.
    pub(super) fn draw_crowded_op(&mut self) -> Option<Op> {
        if !self.crowded_chance(0.35) {
            return self.draw_crowded_move();
        }
        let source = self.scenarios.choose(&mut self.crowd)?.source;
        let id = pick(&mut self.crowd, &[bson!(1), bson!(1), bson!(2)]);
        let name = pick(&mut self.crowd, &[bson!(0.0), bson!(0.0), bson!(-0.0), bson!(-0.0), bson!("a")]);
        let coll = self.collections[source].clone();
        Some(Op::Update { coll, filter: doc! {"_id": id}, update: doc! {"$set": {"name": name}} })
    }

    /// In a crowded world, sometimes moves one of two sources to another key: it often moves on while the last move is being applied.
    fn draw_crowded_move(&mut self) -> Option<Op> {
        if !self.crowded_chance(if self.is_plain() { 0.4 } else { 0.2 }) {
            return None;
        }
        let moves = |scenario: &&Scenario| scenario.held_by == Held::Source && !scenario.shape.is_array();
        let scenarios: Vec<&Scenario> = self.scenarios.iter().filter(moves).collect();
        let scenario = (*scenarios.choose(&mut self.crowd)?).clone();
        let id = pick(&mut self.crowd, &[bson!(1), bson!(1), bson!(2)]);
        let update = doc! {"$set": {scenario.field(): self.draw_reference(&scenario)}};
        Some(Op::Update { coll: self.collections[scenario.source].clone(), filter: doc! {"_id": id}, update })
    }
}
