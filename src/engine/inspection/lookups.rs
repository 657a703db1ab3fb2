//! The lookups that a rule makes all the time, and the index that the server would use for each.

use bson::{Bson, DateTime, Document, doc};
use serde::Serialize;

use crate::reconcile::{Context, read};
use denormd_model::key::Key;
use denormd_mongo::error::{Kind, Result};
use denormd_rules::plan::{Pair, Rule};

/// The subject of a lookup: a rule has at most one lookup for each subject.
pub(super) const SOURCES: &str = "the sources of a target";
/// The same in the other direction.
pub(super) const TARGETS: &str = "the targets of a source";

/// One lookup.
#[derive(Debug, Clone, Serialize)]
pub struct Lookup {
    /// The subject of the lookup.
    pub what: &'static str,
    /// The collection that is searched.
    pub collection: String,
    /// The index; None when the whole collection is read.
    pub index: Option<String>,
}

/// The lookups of a rule, explained with a key that occurs, or else with an invented one.
pub(super) async fn lookups(context: &Context, rule: &Rule, key: Option<Key>) -> Result<Vec<Lookup>> {
    let invented = |pair: &Pair| match pair.bucket {
        Some(_) => Bson::DateTime(DateTime::from_millis(0)),
        None => Bson::String("x".to_owned()),
    };
    let key = key.unwrap_or_else(|| Key::new(rule.reference.pairs.iter().map(invented).collect()));
    let keys = [&key];
    let mut sources = read::source_ids(rule, &keys, 1);
    sources.remove("sort");
    sources.remove("limit");
    let mut wanted = vec![
        (SOURCES, &rule.source.namespace, Some(sources)),
        (TARGETS, &rule.target.namespace, Some(read::holders(rule, &keys))),
    ];
    if rule.child().is_some() && !rule.reference.keyed_by_source_id() {
        wanted.push(("the target a source referred to before", &rule.target.namespace, read::parents(rule, &keys)));
    }
    let mut out = Vec::new();
    for (what, namespace, command) in wanted {
        let Some(mut command) = command else { continue };
        command.remove("allowDiskUse");
        let explain = doc! {"explain": command, "verbosity": "queryPlanner"};
        let reply = match context.server.database(&namespace.database).run_command(explain).await {
            Ok(reply) => reply,
            // A filter or a collection that the server refuses is reported separately.
            Err(error) if denormd_mongo::error::Error::from(error.clone()).kind == Kind::Refused => continue,
            Err(error) => return Err(error.into()),
        };
        let mut stages = Stages::default();
        stages.find(&reply, false);
        let index = if stages.scans { None } else { stages.index.or(stages.by_id.then(|| "_id_".to_owned())) };
        // A collection that does not exist has neither.
        if stages.scans || index.is_some() {
            out.push(Lookup { what, collection: namespace.to_string(), index });
        }
    }
    Ok(out)
}

/// The relevant parts of a winning plan.
#[derive(Debug, Default, PartialEq)]
struct Stages {
    index: Option<String>,
    by_id: bool,
    scans: bool,
}

impl Stages {
    /// Searches an explanation, whose shape differs between versions and engines.
    fn find(&mut self, doc: &Document, winning: bool) {
        for (name, value) in doc {
            if winning && name == "stage" {
                self.scans |= value.as_str() == Some("COLLSCAN");
                self.by_id |= value.as_str() == Some("IDHACK");
            }
            if winning && name == "indexName" && self.index.is_none() {
                self.index = value.as_str().map(ToOwned::to_owned);
            }
            let winning = winning || name == "winningPlan";
            match value {
                Bson::Document(inner) if name != "rejectedPlans" => self.find(inner, winning),
                Bson::Array(items) if name != "rejectedPlans" => {
                    items.iter().filter_map(Bson::as_document).for_each(|inner| self.find(inner, winning));
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_is_found_wherever_the_plan_has_it() {
        let scan = doc! {"stage": "COLLSCAN", "direction": "forward"};
        let index = doc! {"stage": "FETCH", "inputStage": {"stage": "IXSCAN", "indexName": "host_1"}};
        let other = doc! {"stage": "IXSCAN", "indexName": "other_1"};
        for (plan, expected) in [
            (doc! {"winningPlan": scan.clone()}, Stages { scans: true, ..Stages::default() }),
            (
                doc! {"winningPlan": {"queryPlan": index.clone()}, "rejectedPlans": [scan, other]},
                Stages { index: Some("host_1".to_owned()), ..Stages::default() },
            ),
            (
                doc! {"winningPlan": {"stage": "OR", "inputStages": [index]}},
                Stages { index: Some("host_1".to_owned()), ..Stages::default() },
            ),
            (doc! {"winningPlan": {"stage": "IDHACK"}}, Stages { by_id: true, ..Stages::default() }),
            (doc! {"winningPlan": {"stage": "EOF"}}, Stages::default()),
        ] {
            let mut stages = Stages::default();
            stages.find(&doc! {"queryPlanner": plan.clone()}, false);
            assert_eq!(stages, expected, "{plan}");
        }
    }
}
