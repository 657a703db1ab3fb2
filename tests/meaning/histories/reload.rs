//! Other configs for the same data: some rules are absent, have another name, or mean something else.

use bson::Document;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

/// Parts of a rule that it may lose.
const PARTS: [&str; 8] = ["source", "target", "sort", "slice", "touch", "otherwise", "on_missing", "once"];

/// True if histories load another config.
pub fn is_on() -> bool {
    std::env::var_os("DENORMD_RELOADS").is_some_and(|value| value == "1")
}

/// These rules in another config.
pub fn changed(seed: u64, rules: &[Document]) -> Vec<Document> {
    let mut random = StdRng::seed_from_u64(seed ^ 0x7265_6c6f);
    let change = |rule: &Document| {
        let mut rule = rule.clone();
        match random.random_range(0..10) {
            0..=3 => {}
            4..=5 => return None,
            6 => {
                let name = format!("{}-again", rule.get_str("name").unwrap());
                rule.insert("name", name);
            }
            _ => lose_a_part(&mut rule, &mut random),
        }
        Some(rule)
    };
    rules.iter().filter_map(change).collect()
}

/// Removes a part of a rule, if it has one that it can do without.
fn lose_a_part(rule: &mut Document, random: &mut StdRng) {
    let kind = ["copy", "collect", "aggregate"].into_iter().find(|kind| rule.contains_key(kind)).unwrap();
    let body = rule.get_document_mut(kind).unwrap();
    // A tree needs each of its parts.
    let is_tree = body.contains_key("recursive");
    let has = |part: &&str| match *part {
        side @ ("source" | "target") => body.get_document(side).is_ok_and(|side| side.contains_key("where")),
        part => body.contains_key(part),
    };
    let parts: Vec<&str> = PARTS.into_iter().filter(|_| !is_tree).filter(has).collect();
    match parts.choose(random) {
        Some(side @ (&"source" | &"target")) => drop(body.get_document_mut(side).unwrap().remove("where")),
        Some(part) => drop(body.remove(*part)),
        None => {}
    }
}
