//! Collections whose `_id`s are documents, in which a field is the key.

use std::collections::BTreeSet;

use bson::{Bson, Document, bson, doc};
use rand::{Rng, rngs::StdRng};

use super::Generator;
use crate::Op;

/// The field of such an `_id` that rules match by.
const KEY: &str = "_id.k";

/// The `_id` whose key is `key`. The other field sorts after it, and tells the document from one with the key alone. Four of
/// the keys become arrays, to which nothing refers.
fn whole(key: Bson) -> Bson {
    let key = match key {
        Bson::Boolean(true) => bson!([1]),
        Bson::String(text) if text.is_empty() => bson!([2]),
        Bson::String(text) if text == "3" => bson!([3]),
        Bson::String(text) if text == "4" => bson!([4]),
        key => key,
    };
    doc! {"k": key, "more": 1}.into()
}

fn split(document: &mut Document) {
    if let Some(id) = document.get_mut("_id") {
        *id = whole(std::mem::replace(id, Bson::Null));
    }
}

/// The collection of a side.
fn collection(side: &Bson) -> Option<&str> {
    match side {
        Bson::String(name) => Some(name),
        Bson::Document(side) => side.get_str("collection").ok(),
        _ => None,
    }
}

/// The body of a rule.
pub(super) fn body(rule: &mut Document) -> Option<&mut Document> {
    let kind = ["copy", "collect", "aggregate"].into_iter().find(|kind| rule.contains_key(kind))?;
    rule.get_document_mut(kind).ok()
}

impl Generator {
    /// Draws the collections, and changes the `match` of the rules.
    pub(super) fn draw_parts(&mut self, rng: &mut StdRng) {
        if !self.options.id_parts || !rng.random_bool(0.3) {
            return;
        }
        let mut rules = self.rules.clone();
        let (mut by_id, mut otherwise) = (BTreeSet::new(), BTreeSet::new());
        for body in rules.iter_mut().filter_map(body) {
            let [source, target] = ["source", "target"].map(|side| body.get(side).and_then(collection));
            for (of_target, of_source) in body.get_document("match").into_iter().flatten() {
                // A DBRef names a whole `_id`.
                let is_plain =
                    of_source.as_str().is_some_and(|path| !path.ends_with("$id")) && !of_target.ends_with("$id");
                let sides = [(source, of_source.as_str() == Some("_id")), (target, of_target == "_id")];
                for (name, _) in sides.into_iter().filter(|(_, is_id)| *is_id) {
                    if is_plain { &mut by_id } else { &mut otherwise }.extend(name.map(ToOwned::to_owned));
                }
            }
        }
        self.parts = self
            .collections
            .iter()
            .filter(|name| by_id.contains(*name) && !otherwise.contains(*name))
            .cloned()
            .collect();
        for body in self.rules.iter_mut().filter_map(body) {
            let is_split = |side| body.get(side).and_then(collection).is_some_and(|name| self.parts.contains(name));
            let [source, target] = ["source", "target"].map(is_split);
            let Ok(on) = body.get_document("match").cloned() else { continue };
            let renamed = on.into_iter().map(|(of_target, of_source)| {
                let of_target = if target && of_target == "_id" { KEY.to_owned() } else { of_target };
                let of_source = if source && of_source.as_str() == Some("_id") { KEY.into() } else { of_source };
                (of_target, of_source)
            });
            let renamed: Document = renamed.collect();
            body.insert("match", renamed);
        }
    }

    /// The operation on the documents as they are stored.
    pub(super) fn stored(&self, mut op: Op) -> Op {
        if !self.parts.contains(op.coll()) {
            return op;
        }
        match &mut op {
            Op::Insert { doc, .. } => split(doc),
            Op::Update { filter, .. } | Op::Replace { filter, .. } | Op::Delete { filter, .. } => split(filter),
            Op::Restore { docs, .. } => docs.iter_mut().for_each(split),
            Op::Drop { .. } | Op::Rename { .. } | Op::PreImages { .. } => {}
        }
        op
    }
}
