//! The writes of denormd in a simulation, each compared with what its rules may write.

use bson::Document;
use denormd_oracle::{Rule, may_write};
use denormd_simulated::Write;

use super::History;

/// The first of these writes that no rule may make, as a message, with the seed of its world. The rules are those of both configs
/// of each history, and some that belong to no world.
pub(super) fn foreign(
    writes: &[Write],
    histories: &[History],
    others: &[Document],
    database: &str,
) -> Option<(Option<u64>, String)> {
    let configured = histories.iter().flat_map(|history| history.rules.iter().chain(&history.next)).chain(others);
    let rules: Vec<Rule> = configured.map(|rule| Rule::parse(rule, database).unwrap()).collect();
    let is_foreign =
        |Write { collection, before, after }: &&Write| !may_write(&rules, collection, before.as_ref(), after.as_ref());
    let Write { collection, before, after } = writes.iter().find(is_foreign)?;
    let of_world = |history: &&History| collection.starts_with(&format!("w{}_", history.seed));
    let history = histories.iter().find(of_world);
    let id = before.as_ref().or(after.as_ref()).and_then(|document| document.get("_id"));
    let mut text = format!("no rule may write this: {collection} {id:?}\n  before {before:?}\n  after {after:?}");
    for rule in history.into_iter().flat_map(|history| history.rules.iter().chain(&history.next)) {
        text.push_str(&format!("\n  rule {rule}"));
    }
    Some((history.map(|history| history.seed), text))
}
