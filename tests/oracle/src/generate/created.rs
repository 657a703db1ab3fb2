//! Rules that create their documents, in a collection of their own, and what people do to these documents.

use bson::{Bson, DateTime, Document, bson, doc};
use rand::{Rng, seq::IndexedRandom};

use super::{Generator, Odd};
use crate::Op;

/// The name of the collection, after the prefix.
const NAME: &str = "e";
const HOUR: i64 = 3_600_000;

impl Generator {
    /// Draws one rule, or two that share their documents; in about half of the worlds that have aggregates.
    pub(super) fn draw_created(&mut self) {
        if !self.options.aggregate || self.created.random_bool(0.5) {
            return;
        }
        let target = format!("{}{NAME}", self.options.prefix);
        let unit = ["hour", "day", "day", "week"].choose(&mut self.created).copied().unwrap_or("day");
        let interval = doc! {"$dateTrunc": {"date": "$at", "unit": unit}};
        let key = match self.created.random_range(0..6) {
            0 => doc! {"_id": "code"},
            1 => doc! {"_id.c": "code", "_id.t": "tenant"},
            2 => doc! {"_id": interval},
            3 => doc! {"_id": "tags.$[]"},
            _ => doc! {"_id.c": "code", "_id.at": interval},
        };
        let on_empty = match self.created.random_range(0..10) {
            0..=1 => Some("keep"),
            2..=3 => Some("unset"),
            _ => None,
        };
        let nested = self.created.random_bool(0.5);
        let count = if self.created.random_bool(0.5) { 2 } else { 1 };
        let used = self.used();
        // Without chains, these rules read no collection that another rule writes, and nothing reads their documents.
        let chains = self.options.chains;
        let is_read = |name: &&String| {
            chains || self.scenarios.iter().all(|scenario| self.collections[scenario.target] != **name)
        };
        let sources: Vec<String> = used.iter().filter(is_read).cloned().collect();
        // The key above is drawn in any case: other draws of a seed stay as they were.
        let is_copied = self.frequencies.random_bool(0.5) && chains;
        let key = if is_copied {
            doc! {"_id": "code"}
        } else {
            key
        };
        for nth in 0..count {
            let source = sources.choose(&mut self.created).cloned().unwrap_or_default();
            self.created_sources.insert(source.clone());
            let mut set = Document::new();
            for part in 0..self.created.random_range(1..=2) {
                let path = if nested { format!("x{nth}.{part}p") } else { format!("x{nth}_{part}") };
                self.created_paths.push(path.clone());
                set.insert(path, self.draw_created_value());
            }
            let mut body = doc! {
                "source": source, "target": {"collection": &target, "create": true}, "match": key.clone(), "set": set,
            };
            if self.created.random_bool(0.3) {
                let filter = doc! {"collection": body.get("source").cloned(), "where": {"status": {"$ne": "closed"}}};
                body.insert("source", filter);
            }
            body.extend(on_empty.map(|word| ("on_empty".to_owned(), Bson::from(word))));
            let mut rule = doc! {"name": format!("{}created{nth}", self.options.prefix), "aggregate": body};
            if self.options.write_owned {
                rule.insert("guard", if self.created.random_bool(0.5) { "watch" } else { "audit" });
            }
            self.rules.push(rule);
        }
        if is_copied {
            self.draw_copy_of_created(&target, &used);
        }
        self.has_long_codes = key == doc! {"_id": "code"} && self.rare.random_bool(0.5);
        self.created_key = Some(key);
        self.leaving = if self.frequencies.random_bool(0.4) { 0.15 } else { 0.0 };
    }

    /// A rule that copies a value of the created documents.
    fn draw_copy_of_created(&mut self, created: &str, used: &[String]) {
        let (Some(path), Some(target)) = (self.created_paths.first(), used.choose(&mut self.frequencies)) else {
            return;
        };
        let set = doc! {"shown": format!("${path}")};
        let body = doc! {"source": created, "target": target, "match": {"code": "_id"}, "set": set};
        let mut rule = doc! {"name": format!("{}shown", self.options.prefix), "copy": body};
        if self.options.write_owned {
            rule.insert("guard", if self.frequencies.random_bool(0.5) { "watch" } else { "audit" });
        }
        self.rules.push(rule);
    }

    fn draw_created_value(&mut self) -> Document {
        // The rule cannot write such a document. It must not delete the document either, because the source still exists.
        if self.has(Odd::Failing) && self.frequencies.random_bool(0.4) {
            return doc! {"$max": {"$concat": ["$name", "!"]}};
        }
        match self.created.random_range(0..7) {
            0..=1 => doc! {"$sum": 1},
            2 => doc! {"$sum": "$n"},
            3 => doc! {"$avg": "$n"},
            4 => doc! {"$max": "$num"},
            5 => doc! {"$push": "$label"},
            _ => doc! {"$first": "$name"},
        }
    }

    /// The collection of the created documents, if there are any.
    #[must_use]
    pub fn created_collection(&self) -> Option<String> {
        self.created_key.is_some().then(|| format!("{}{NAME}", self.options.prefix))
    }

    /// A date, or something else.
    pub(super) fn draw_date(&mut self) -> Option<Bson> {
        self.created_key.as_ref()?;
        let date = |hours: i64, millis: i64| Bson::DateTime(DateTime::from_millis(hours * HOUR + millis));
        match self.created.random_range(0..20) {
            0 => None,
            1 => Some(Bson::Null),
            2 => Some(bson!("1970-01-01")),
            3 => Some(Bson::Array(vec![date(1, 0)])),
            4..=6 => Some(date(24, -1)),
            7..=9 => Some(date(24, 0)),
            _ => {
                let hours = self.created.random_range(-30..200);
                Some(date(hours - hours % 7, self.created.random_range(0..2)))
            }
        }
    }

    /// Sometimes an update of a source's date.
    pub(super) fn draw_other_date(&mut self) -> Option<Document> {
        if self.created_key.is_none() || self.created.random_bool(0.85) {
            return None;
        }
        Some(match self.draw_date() {
            Some(date) => doc! {"$set": {"at": date}},
            None => doc! {"$unset": {"at": ""}},
        })
    }

    /// In some worlds, often an update after which a source belongs to no document, or to that of another source: documents lose
    /// their last sources.
    pub(super) fn draw_leaving(&mut self) -> Option<Op> {
        if !self.frequencies.random_bool(self.leaving) {
            return None;
        }
        let first = self.created_key.as_ref()?.values().next()?;
        let path = first.as_str().unwrap_or("at").trim_end_matches(".$[]").to_owned();
        let sources: Vec<&String> = self.created_sources.iter().collect();
        let coll = (*sources.choose(&mut self.frequencies)?).clone();
        let documents = self.model.get(&coll)?;
        let filter = doc! {"_id": documents.choose(&mut self.frequencies)?.get("_id").cloned()};
        let other = documents.choose(&mut self.frequencies)?.get(&path).cloned();
        let update = match other.filter(|_| self.frequencies.random_bool(0.5)) {
            Some(value) => doc! {"$set": {path: value}},
            None => doc! {"$unset": {path: ""}},
        };
        Some(Op::Update { coll, filter, update })
    }

    /// Sometimes what a person does to a created document.
    pub(super) fn draw_meddling(&mut self) -> Option<Op> {
        let coll = self.created_collection()?;
        if self.created.random_bool(0.85) {
            return None;
        }
        let id = self.draw_created_id()?;
        let filter = doc! {"_id": id.clone()};
        // Sometimes beside an owned path, in the field that holds it.
        let parent = self.created_paths.first().and_then(|path| Some(path.split_once('.')?.0));
        let note = match parent {
            Some(parent) if self.rare.random_bool(0.7) => format!("{parent}.note"),
            _ => "note".to_owned(),
        };
        Some(match self.created.random_range(0..10) {
            0..=2 => Op::Delete { coll, filter },
            3..=4 => Op::Update { coll, filter, update: doc! {"$set": {note: "mine"}} },
            5 => Op::Update { coll, filter, update: doc! {"$unset": {note: ""}} },
            6 => Op::Replace { coll, filter, doc: doc! {"note": "mine"} },
            7 => Op::Replace { coll, filter, doc: doc! {} },
            8 if self.options.write_owned => {
                let path = self.created_paths.choose(&mut self.created).cloned().unwrap_or_default();
                Op::Update { coll, filter, update: doc! {"$set": {path: "drift"}} }
            }
            8 if self.has(Odd::Collections) => Op::Drop { coll },
            8 => Op::Insert { coll, doc: doc! {"_id": id} },
            _ => Op::Insert { coll, doc: doc! {"_id": id, "note": "mine"} },
        })
    }

    /// The `_id` that some document would have, or one of another form.
    fn draw_created_id(&mut self) -> Option<Bson> {
        let key = self.created_key.clone()?;
        let sources = self.model.iter().filter(|(name, _)| self.created_sources.contains(*name));
        let documents: Vec<&Document> = sources.flat_map(|(_, documents)| documents).collect();
        let document = documents.choose(&mut self.created).map(|document| (*document).clone())?;
        let mut values = Vec::new();
        for (_, source) in &key {
            let path = source.as_str().unwrap_or("at").trim_end_matches(".$[]");
            let value = document.get(path).cloned().unwrap_or(Bson::Int32(7));
            values.push(match value {
                Bson::DateTime(date) if source.as_document().is_some() => {
                    let length = if source.to_string().contains("hour") { HOUR } else { 24 * HOUR };
                    let millis = date.timestamp_millis();
                    Bson::DateTime(DateTime::from_millis(millis - millis.rem_euclid(length)))
                }
                Bson::Array(items) => items.first().cloned().unwrap_or(Bson::Int32(7)),
                value => value,
            });
        }
        let names: Vec<String> = key.keys().filter_map(|path| Some(path.split_once('.')?.1.to_owned())).collect();
        if self.created.random_bool(0.05) {
            return Some(bson!({"other": 1}));
        }
        Some(if names.is_empty() {
            values.remove(0)
        } else {
            names.into_iter().zip(values).collect::<Document>().into()
        })
    }
}
