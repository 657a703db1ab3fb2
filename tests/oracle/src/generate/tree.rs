//! Trees: recursive rules over a collection of their own, and its history.

use bson::{Bson, Document, doc};
use rand::{Rng, seq::IndexedRandom};

use super::Generator;
use crate::Op;

/// Number of different `_id`s in most trees. It is small, so that operations often concern the same documents.
pub(super) const IDS: i32 = 9;

impl Generator {
    /// Gives some worlds a tree.
    pub(super) fn draw_tree(&mut self) {
        if !self.options.trees || self.trees.random_bool(0.6) {
            return;
        }
        let coll = format!("{}f", self.options.prefix);
        let filter = self.trees.random_bool(0.3).then(|| doc! {"kind": "a"});
        let side = match filter {
            Some(filter) => doc! {"collection": &coll, "where": filter}.into(),
            None => Bson::from(coll.as_str()),
        };
        let field = ["parent", "in.parent"].choose(&mut self.trees).copied().unwrap_or("parent");
        let which = self.trees.random_range(0..3);
        let base =
            |pair: Document| doc! {"source": side.clone(), "target": side.clone(), "match": pair, "recursive": true};
        if which != 1 {
            let mut body = base(doc! {field: "_id"});
            let label = doc! {"$ifNull": ["$$target.label", "-"]};
            body.insert(
                "set",
                doc! {
                    "path": {"$concat": [{"$ifNull": ["$path", "?"]}, "/", label.clone()]},
                    "depth": {"$add": [{"$ifNull": ["$depth", 0]}, 1]},
                    "top.id": {"$ifNull": ["$top.id", "$_id"]},
                    // The same for most moves.
                    "kin": {"$ifNull": ["$kin", "$$target.kind"]},
                },
            );
            if self.trees.random_bool(0.7) {
                body.insert("otherwise", doc! {"path": label, "depth": 0, "kin": "$$target.kind"});
            }
            self.draw_max_depth(&mut body);
            self.rules.push(doc! {"name": format!("{}down", self.options.prefix), "copy": body});
        }
        if which != 0 {
            let mut body = base(doc! {"_id": field});
            body.insert(
                "set",
                doc! {
                    "below": {"$sum": {"$add": [1, {"$ifNull": ["$below", 0]}]}},
                    "total": {"$sum": {"$add": [{"$ifNull": ["$n", 0]}, {"$ifNull": ["$total", 0]}]}},
                    "height": {"$max": {"$add": [1, {"$ifNull": ["$height", 0]}]}},
                },
            );
            self.draw_max_depth(&mut body);
            self.rules.push(doc! {"name": format!("{}up", self.options.prefix), "aggregate": body});
        }
        self.tree = Some((coll, field.to_owned()));
    }

    fn draw_max_depth(&mut self, body: &mut Document) {
        if self.trees.random_bool(0.4) {
            body.insert("max_depth", self.trees.random_range(1..5));
        }
    }

    /// The first documents of the tree.
    pub(super) fn tree_initial(&mut self) -> Vec<Op> {
        let Some((coll, _)) = self.tree.clone() else { return Vec::new() };
        (0..self.options.documents).map(|_| Op::Insert { coll: coll.clone(), doc: self.draw_node(true) }).collect()
    }

    /// An operation on the tree: most of them move a document with all that is below it.
    pub(super) fn draw_tree_op(&mut self) -> Option<Op> {
        let (coll, field) = self.tree.clone()?;
        if self.trees.random_bool(0.5) {
            return None;
        }
        let filter = doc! {"_id": self.trees.random_range(0..self.tree_ids)};
        let op = match self.trees.random_range(0..100) {
            0..=24 => Op::Insert { doc: self.draw_node(true), coll },
            25..=31 => Op::Delete { coll, filter },
            32..=39 => Op::Replace { doc: self.draw_node(false), coll, filter },
            40..=54 => {
                let label = self.draw_label();
                Op::Update { coll, filter, update: doc! {"$set": {"label": label}} }
            }
            55..=61 => {
                let n = self.trees.random_range(0..4);
                Op::Update { coll, filter, update: doc! {"$set": {"n": n}} }
            }
            62..=67 => {
                let kind = self.draw_kind();
                Op::Update { coll, filter, update: doc! {"$set": {"kind": kind}} }
            }
            68..=71 => Op::Update { coll, filter, update: doc! {"$unset": {field: 1}} },
            _ => {
                let parent = self.draw_parent();
                Op::Update { coll, filter, update: doc! {"$set": {field: parent}} }
            }
        };
        Some(op)
    }

    fn draw_kind(&mut self) -> &'static str {
        if self.trees.random_bool(0.85) { "a" } else { "b" }
    }

    fn draw_label(&mut self) -> &'static str {
        ["x", "y", "z"].choose(&mut self.trees).copied().unwrap_or("x")
    }

    fn draw_parent(&mut self) -> Bson {
        match self.trees.random_range(0..20) {
            0 => Bson::Null,
            1 => Bson::from(vec![self.trees.random_range(0..self.tree_ids)]),
            2 => Bson::from(f64::from(self.trees.random_range(0..self.tree_ids))),
            3 => Bson::from("nobody"),
            _ => self.trees.random_range(0..self.tree_ids).into(),
        }
    }

    fn draw_node(&mut self, with_id: bool) -> Document {
        let mut doc = if with_id {
            doc! {"_id": self.trees.random_range(0..self.tree_ids)}
        } else {
            Document::new()
        };
        if self.trees.random_bool(0.8) {
            let parent = self.draw_parent();
            match self.tree.as_ref().map(|(_, field)| field.as_str()) {
                Some("in.parent") => doc.insert("in", doc! {"parent": parent}),
                _ => doc.insert("parent", parent),
            };
        }
        let (label, kind, n) = (self.draw_label(), self.draw_kind(), self.trees.random_range(0..4));
        doc.extend(doc! {"label": label, "kind": kind, "n": n});
        doc
    }
}
