//! The places of a rule's parts in the config.

use denormd_model::field_path::FieldPath;
use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::{
        Pair, Rule,
        expression::{self, Reads},
    },
};

use bson::Bson;

/// The places of one rule.
pub struct Places<'a> {
    rule: &'a Rule,
    at: ConfigPath,
}

impl<'a> Places<'a> {
    /// The places of this rule of the config.
    pub fn of(rule: &'a Rule) -> Self {
        Self { rule, at: rule.at() }
    }

    /// The source collection.
    pub fn source(&self) -> ConfigPath {
        self.at.key("source")
    }

    /// The target collection.
    pub fn target(&self) -> ConfigPath {
        self.at.key("target")
    }

    /// The path of `touch`.
    pub fn touch(&self) -> ConfigPath {
        self.at.key("touch")
    }

    /// An entry of `match`.
    pub fn pair(&self, pair: &Pair) -> ConfigPath {
        self.at.key("match").key(&pair.target.to_string())
    }

    /// The place of an owned path, for a message about it.
    pub fn owned(&self, path: &FieldPath) -> Mistake {
        self.rule.values.written_at(&self.at, path)
    }

    /// The values over a source, each with its place; true marks an accumulator.
    pub fn values(&self) -> Vec<(ConfigPath, &'a Bson, bool)> {
        self.rule.values_at()
    }

    /// The paths that are read at each place; true marks paths of the source.
    pub fn reads(&self, rule: &Rule) -> Vec<(Mistake, Reads, bool)> {
        let mut out = Vec::new();
        for pair in &rule.reference.pairs {
            out.push((Mistake::new(self.pair(pair), "").on_key(), Reads::Paths(vec![pair.target.clone()]), false));
            out.push((Mistake::new(self.pair(pair), ""), Reads::Paths(vec![pair.source.clone()]), true));
        }
        let each = rule.reference.variables();
        for (place, value, accumulator) in self.values() {
            let reads =
                if accumulator { expression::accumulator(value, each) } else { expression::expression(value, each) };
            let reads = reads.unwrap_or_default();
            out.push((Mistake::new(place, ""), reads.source, true));
        }
        for (path, _) in &rule.sort {
            let mut reads = Reads::default();
            reads.add_text(path);
            out.push((Mistake::new(self.at.key("sort").key(path), "").on_key(), reads, true));
        }
        out
    }

    /// Every name with its place; true marks a key of a mapping.
    pub fn names(&self, rule: &Rule) -> Vec<(ConfigPath, String, bool)> {
        let mut out = vec![
            (self.source(), rule.source.namespace.collection.clone(), false),
            (self.target(), rule.target.namespace.collection.clone(), false),
        ];
        for pair in &rule.reference.pairs {
            out.push((self.pair(pair), pair.target.to_string(), true));
            out.push((self.pair(pair), pair.source.to_string(), false));
        }
        for path in rule.owned() {
            let place = self.owned(path);
            out.push((place.at, path.to_string(), place.on_key));
        }
        for (place, value, _) in self.values() {
            // Text may contain such a mark; text that begins with one was meant to be quoted itself.
            let text = value.as_str().filter(|text| text.starts_with(['\u{201c}', '\u{2018}']));
            out.extend(text.map(|text| (place, text.to_owned(), false)));
        }
        out
    }
}
