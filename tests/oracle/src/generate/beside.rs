//! `touch`, paths in the matched element and beside the array, and arrays on both sides of `match`.

use bson::{Bson, Document};
use rand::{Rng, seq::IndexedRandom};

use super::{Generator, Held, Kind, Scenario};

/// The paths that rules touch. A few documents have the first one when they are written.
pub const TOUCHED: [&str; 2] = ["stamp", "seen.at"];

impl Generator {
    /// Gives some rules a path for the time of their changes.
    pub(super) fn draw_touch(&mut self, body: &mut Document) {
        let removes = body.get_str("on_missing").is_ok_and(|policy| policy == "remove" || policy == "delete");
        let paths = body.get_document("set").into_iter().flat_map(Document::keys);
        let nested = paths.into_iter().any(|path| path.matches("$[]").count() > 1);
        let often = self.is_shared || body.contains_key("once");
        if removes || nested || self.beside.random_bool(if often { 0.3 } else { 0.75 }) {
            return;
        }
        body.insert("touch", TOUCHED.choose(&mut self.beside).copied().unwrap_or("stamp"));
    }

    /// Lets some copies write in the elements and beside their array.
    pub(super) fn draw_inside_and_beside(
        &mut self,
        scenario: &Scenario,
        body: &mut Document,
        outputs: &mut Vec<String>,
    ) {
        let destroys = body.get_str("on_missing").is_ok_and(|policy| policy == "remove" || policy == "delete");
        let refused = destroys || body.contains_key("once") || body.to_string().contains("$$target");
        let matched =
            body.get_document("match").ok().and_then(|on| on.keys().find(|path| path.contains("$[]")).cloned());
        let Some((array, key)) = matched.as_deref().and_then(|path| path.rsplit_once(".$[]")) else { return };
        let bare = key.is_empty() || array.contains("$[]");
        if scenario.kind != Kind::Set || refused || bare || self.beside.random_bool(0.6) {
            return;
        }
        let number = scenario.number;
        let Ok(set) = body.get_document_mut("set") else { return };
        for path in [format!("{array}.$[].o{number}_e"), format!("o{number}_w")] {
            let values = ["$name", "$num", "$info", "$label"];
            set.insert(&path, values.choose(&mut self.beside).copied().unwrap_or("$name"));
        }
        outputs.push(format!("o{number}_w"));
    }

    /// Lets some targets have an array of keys where the sources have an array too.
    pub(super) fn draw_both_sides(&mut self, scenario: &Scenario, body: &mut Document, outputs: &mut Vec<String>) {
        let refused = scenario.held_by != Held::Source || !scenario.shape.is_array() || scenario.kind == Kind::Into;
        if refused || body.to_string().contains("$$target") || (self.beside.random_bool(0.5) && !self.is_crowded()) {
            return;
        }
        let Ok(on) = body.get_document("match").cloned() else { return };
        let array = ["tags.$[]", "list.$[].x", "list.$[].x"].choose(&mut self.beside).copied().unwrap_or("tags.$[]");
        // The entry with the array of the source.
        let other = |(target, source): (String, Bson)| {
            let held = source.as_str().is_some_and(|source| source.contains("$[]"));
            (if held && target != "tenant" { array.to_owned() } else { target }, source)
        };
        let on: Document = on.into_iter().map(other).collect();
        body.insert("match", on);
        if scenario.kind == Kind::Set && array.ends_with('x') && self.beside.random_bool(0.5) {
            outputs.clear();
            let inside = |(path, value): (String, Bson)| (format!("list.$[].{path}"), value);
            for part in ["set", "otherwise"] {
                if let Ok(values) = body.get_document(part).cloned() {
                    body.insert(part, values.into_iter().map(inside).collect::<Document>());
                }
            }
        }
    }
}
