//! Values that depend on the target: `$$target` and `$$targetElement`.

use bson::{Bson, Document, doc};
use rand::{Rng, seq::IndexedRandom};

use super::{Generator, Held, Kind, Odd, Scenario};

impl Generator {
    /// Makes some rules read their target, in values and in the source's `where`.
    pub(super) fn draw_target(&mut self, scenario: &Scenario, body: &mut Document) {
        let removes = body.get_str("on_missing").is_ok_and(|policy| policy == "remove" || policy == "delete");
        let inside = body.get_document("set").is_ok_and(|set| set.keys().any(|path| path.contains("$[]")));
        let nested = scenario.shape.key_paths("").iter().any(|path| path.matches("$[]").count() > 1);
        let held = scenario.held_by == Held::Target && scenario.shape.is_array();
        let more = (self.is_crowded() || self.has(Odd::EdgeIds)) && self.crowd.random_bool(0.3);
        let is_excluded = removes || body.contains_key("once") || (inside && nested) || self.is_echoed(scenario.target);
        if is_excluded || (self.targets.random_bool(0.7) && !more) {
            return;
        }
        let element = held && !nested && (inside || scenario.kind == Kind::Into);
        let before = body.to_string();
        match scenario.kind {
            Kind::Set | Kind::Into | Kind::Collect => self.draw_target_values(scenario, element, body),
            Kind::Aggregate => self.draw_target_accumulators(scenario, element, body),
        }
        if self.targets.random_bool(0.4) || body.to_string() == before {
            self.draw_target_condition(scenario, element, body);
        }
    }

    /// A path of the target: a field that users own, or one that an earlier rule writes there.
    fn draw_target_path(&mut self, scenario: &Scenario, element: bool) -> Bson {
        if element && self.targets.random_bool(0.4) {
            return "$$targetElement.role".into();
        }
        let earlier = self.scenarios.iter().filter(|earlier| {
            earlier.number < scenario.number && earlier.target == scenario.target && self.options.chains
        });
        let outputs: Vec<String> = earlier.flat_map(|earlier| earlier.outputs.clone()).collect();
        if self.targets.random_bool(0.2)
            && let Some(output) = outputs.choose(&mut self.targets)
        {
            return format!("$$target.{output}").into();
        }
        let fields = ["name", "label", "num", "rank", "info.a", "info", "list.x", "tags", "status"];
        format!("$$target.{}", fields.choose(&mut self.targets).copied().unwrap_or("name")).into()
    }

    fn draw_target_values(&mut self, scenario: &Scenario, element: bool, body: &mut Document) {
        let mut keys: Vec<Vec<String>> = Vec::new();
        for part in ["set", "otherwise"] {
            let paths = body.get_document(part).into_iter().flat_map(Document::keys).cloned();
            keys.extend(paths.map(|path| vec![part.to_owned(), path]).collect::<Vec<_>>());
        }
        keys.extend(body.contains_key("element").then(|| vec!["element".to_owned()]));
        let untouched = self.is_untouched(scenario.source);
        for key in keys {
            if self.targets.random_bool(0.5) {
                continue;
            }
            let path = self.draw_target_path(scenario, element);
            // The whole document, unless some rule writes into it: that could be a cycle.
            let whole = untouched && key[0] == "set" && self.crowd.random_bool(0.3);
            let value = match self.targets.random_range(0..4) {
                _ if key[0] == "otherwise" => path,
                _ if whole => vec![Bson::from("$$ROOT"), path].into(),
                0 => path,
                // In a crowded world without an operator: then values are computed even from sources whose key is an array.
                1 if !self.is_crowded() => doc! {"$ifNull": [path, "$name"]}.into(),
                2 if !self.is_crowded() => {
                    doc! {"id": "$_id", "same": {"$eq": ["$label", path.clone()]}, "mine": path}.into()
                }
                _ => vec![Bson::from("$num"), path].into(),
            };
            match key.as_slice() {
                [part, path] => {
                    if let Ok(values) = body.get_document_mut(part) {
                        values.insert(path, value);
                    }
                }
                _ => drop(body.insert("element", value)),
            }
        }
    }

    fn draw_target_accumulators(&mut self, scenario: &Scenario, element: bool, body: &mut Document) {
        let path = self.draw_target_path(scenario, element);
        let counted = Bson::from(doc! {"$cond": [{"$eq": ["$label", path.clone()]}, 1, 0]});
        if self.targets.random_bool(0.5)
            && let Ok(by) = body.get_document_mut("by")
            && by.len() == 1
            && !body.contains_key("as")
        {
            body.insert("by", doc! {"g": {"$eq": ["$status", path]}});
            return;
        }
        let Ok(set) = body.get_document_mut("set") else { return };
        for (_, value) in set.iter_mut() {
            if let Some(value) = value.as_document_mut()
                && (value.contains_key("$sum") || value.contains_key("$push") || value.contains_key("$addToSet"))
                && self.targets.random_bool(0.6)
            {
                let operator = value.keys().next().cloned().unwrap_or_default();
                value.insert(operator, counted.clone());
            }
        }
    }

    fn draw_target_condition(&mut self, scenario: &Scenario, element: bool, body: &mut Document) {
        let mut side = match body.get("source") {
            Some(Bson::Document(side)) => side.clone(),
            _ => doc! {"collection": self.collections[scenario.source].clone()},
        };
        let mut filter = side.get_document("where").cloned().unwrap_or_default();
        let operator = ["$gt", "$gte", "$lt", "$eq"].choose(&mut self.targets).copied().unwrap_or("$gt");
        let field = ["$num", "$rank", "$n"].choose(&mut self.targets).copied().unwrap_or("$num");
        let other = ["$$target.num", "$$target.rank"].choose(&mut self.targets).copied().unwrap_or("$$target.num");
        let condition = match self.targets.random_range(0..3) {
            _ if element && self.targets.random_bool(0.3) => doc! {"$eq": ["$label", "$$targetElement.role"]},
            0 => doc! {"$eq": ["$status", "$$target.status"]},
            _ => doc! {operator: [field, other]},
        };
        if filter.contains_key("$expr") {
            return;
        }
        filter.insert("$expr", condition);
        side.insert("where", filter);
        body.insert("source", side);
    }
}
