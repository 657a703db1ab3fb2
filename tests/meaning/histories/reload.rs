//! Other configs for the same data: some rules are absent, have another name, or mean something else.

use bson::Document;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

/// Parts of a rule that it may lose.
const PARTS: [&str; 8] = ["source", "target", "sort", "slice", "touch", "otherwise", "on_missing", "once"];

/// True if histories load another config.
pub fn is_on() -> bool {
    std::env::var_os("DENORMD_RELOADS").is_some_and(|value| value == "1")
}

/// True for a world, by its seed, whose `once` rules stay `once` in the other config. Only there the application fills their values, too.
pub fn keeps_once(seed: u64) -> bool {
    StdRng::seed_from_u64(seed ^ 0x6f6e_6365).random_bool(0.5)
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
            _ => lose_a_part(&mut rule, &mut random, keeps_once(seed)),
        }
        Some(rule)
    };
    let mut next: Vec<Document> = rules.iter().filter_map(change).collect();
    keep_one_creator(seed, rules, &mut next);
    next
}

/// In half of the worlds in which two rules create the same documents, only one of them is in the other config, unchanged: if its
/// definition changed, its backfill would hide what the other rule leaves behind.
fn keep_one_creator(seed: u64, rules: &[Document], next: &mut Vec<Document>) {
    let mut random = StdRng::seed_from_u64(seed ^ 0x6c65_6166);
    let creates = |rule: &Document| {
        let target = rule.get_document("aggregate").and_then(|body| body.get_document("target"));
        target.is_ok_and(|target| target.contains_key("create"))
    };
    let creators: Vec<&Document> = rules.iter().filter(|rule| creates(rule)).collect();
    let [one, other] = creators.as_slice() else { return };
    if random.random_bool(0.5) {
        return;
    }
    let (one, other) = if random.random_bool(0.5) { (one, other) } else { (other, one) };
    // Usually the rule that fails is the one that leaves. Then the other one may have kept a document that has none of its values.
    let fails = |rule: &&Document| rule.to_string().contains("$concat");
    let stays = if fails(one) && !fails(other) && random.random_bool(0.8) { other } else { one };
    next.retain(|rule| !creates(rule));
    next.push((*stays).clone());
}

/// Removes a part of a rule, if it has one that it can do without.
fn lose_a_part(rule: &mut Document, random: &mut StdRng, keeps_once: bool) {
    let kind = ["copy", "collect", "aggregate"].into_iter().find(|kind| rule.contains_key(kind)).unwrap();
    let body = rule.get_document_mut(kind).unwrap();
    // A tree needs each of its parts.
    let is_tree = body.contains_key("recursive");
    let has = |part: &&str| match *part {
        side @ ("source" | "target") => body.get_document(side).is_ok_and(|side| side.contains_key("where")),
        "once" if keeps_once => false,
        part => body.contains_key(part),
    };
    let parts: Vec<&str> = PARTS.into_iter().filter(|_| !is_tree).filter(has).collect();
    match parts.choose(random) {
        Some(side @ (&"source" | &"target")) => drop(body.get_document_mut(side).unwrap().remove("where")),
        Some(part) => drop(body.remove(*part)),
        None => {}
    }
}
