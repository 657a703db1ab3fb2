//! The paths and names of a rule that can be mistaken, and their places in the config.

use super::side;
use crate::preflight;
use denormd_model::field_path::FieldPath;
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

/// The paths of one side that the rule reads, each with its place. They include those of the filter only if no document
/// matches it: any other filter may name a field that is still to come.
pub fn reads(rule: &Rule, role: Role, none_match: bool) -> Vec<(Mistake, FieldPath)> {
    let mut out = Vec::new();
    let mut add = |place: Mistake, reads: Reads| {
        if let Reads::Paths(paths) = reads {
            out.extend(paths.into_iter().map(|path| (place.clone(), path)));
        }
    };
    for pair in &rule.reference.pairs {
        let place = Mistake::new(pair_at(rule, pair), "");
        match role {
            Role::Target => add(place.on_key(), Reads::Paths(vec![pair.target.clone()])),
            Role::Source => add(place, Reads::Paths(vec![pair.source.clone()])),
        }
    }
    if role == Role::Source {
        let each = rule.reference.variables();
        for (place, value, accumulator) in rule.values_at() {
            let reads =
                if accumulator { expression::accumulator(value, each) } else { expression::expression(value, each) };
            add(Mistake::new(place, ""), reads.unwrap_or_default().source);
        }
        for (path, _) in &rule.sort {
            let mut reads = Reads::default();
            reads.add_text(path);
            add(Mistake::new(rule.at().key("sort").key(path), "").on_key(), reads);
        }
    }
    if let Some(filter) = side(rule, role).filter.as_ref().filter(|_| none_match) {
        let place = rule.side_at(role).key("where");
        add(Mistake::new(place, ""), expression::filter(filter).unwrap_or_default());
    }
    out
}

/// The paths of one side that can look misspelt: those that the rule reads, and those of its indexes.
pub fn paths(rule: &Rule, role: Role, none_match: bool) -> Vec<FieldPath> {
    let read = reads(rule, role, none_match).into_iter().map(|(_, path)| path);
    let mut paths: Vec<FieldPath> = read.chain(preflight::index_paths(rule, role)).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
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
