//! The places of a rule's parts in the config.

use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::{
        Pair, Rule,
        expression::{self, Reads},
        reference::Role,
    },
};

/// The place of an entry of `match`.
pub fn pair_at(rule: &Rule, pair: &Pair) -> ConfigPath {
    rule.at().key("match").key(&pair.target.to_string())
}

/// The paths that are read at each place; true marks paths of the source.
pub fn reads(rule: &Rule) -> Vec<(Mistake, Reads, bool)> {
    let mut out = Vec::new();
    for pair in &rule.reference.pairs {
        out.push((Mistake::new(pair_at(rule, pair), "").on_key(), Reads::Paths(vec![pair.target.clone()]), false));
        out.push((Mistake::new(pair_at(rule, pair), ""), Reads::Paths(vec![pair.source.clone()]), true));
    }
    let each = rule.reference.variables();
    for (place, value, accumulator) in rule.values_at() {
        let reads =
            if accumulator { expression::accumulator(value, each) } else { expression::expression(value, each) };
        let reads = reads.unwrap_or_default();
        out.push((Mistake::new(place, ""), reads.source, true));
    }
    for (path, _) in &rule.sort {
        let mut reads = Reads::default();
        reads.add_text(path);
        out.push((Mistake::new(rule.at().key("sort").key(path), "").on_key(), reads, true));
    }
    out
}

/// Every name with its place; true marks a key of a mapping.
pub fn names(rule: &Rule) -> Vec<(ConfigPath, String, bool)> {
    let mut out = vec![
        (rule.side_at(Role::Source), rule.source.namespace.collection.clone(), false),
        (rule.side_at(Role::Target), rule.target.namespace.collection.clone(), false),
    ];
    for pair in &rule.reference.pairs {
        out.push((pair_at(rule, pair), pair.target.to_string(), true));
        out.push((pair_at(rule, pair), pair.source.to_string(), false));
    }
    for path in rule.owned() {
        let place = rule.written_at(path);
        out.push((place.at, path.to_string(), place.on_key));
    }
    for (place, value, _) in rule.values_at() {
        // Text may contain such a mark; text that begins with one was meant to be quoted itself.
        let text = value.as_str().filter(|text| text.starts_with(['\u{201c}', '\u{2018}']));
        out.extend(text.map(|text| (place, text.to_owned(), false)));
    }
    out
}
