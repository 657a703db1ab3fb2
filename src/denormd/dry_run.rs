//! Dry runs: rules on documents in memory, which `denormd test` computes without a server.
//!
//! The meaning of a rule is not implemented a second time here. The commands are those that the daemon would send,
//! answered by [`denormd_mql`]; from their rows on, the daemon's own code computes the content of a target.

mod create;
mod difference;
mod tree;

use std::collections::BTreeMap;

use bson::{Bson, Document, RawDocumentBuf};

use denormd_engine::reconcile::{
    applied::applied,
    by_target::{self, Referrer},
    compare::{self, created::ABSENT},
    read,
    value::{NoInput, Rows},
};
use denormd_model::key::{Key, id_of};
use denormd_mongo::error::{Error, Result};
use denormd_mql::{Collections, EvalError};
use denormd_rules::plan::{Assignment, Plan, Rule, reference::Role};
pub use difference::{Differs, between};

/// A rule that could not be applied to a target.
#[derive(Debug, Clone, PartialEq)]
pub struct Obstacle {
    /// The rule.
    pub rule: String,
    /// The target's `_id`.
    pub target: Bson,
    /// The reason. With a server the target would become a dead letter, or only a server can evaluate the rule.
    pub error: EvalError,
}

/// Applies every rule to its targets, each rule after those that it reads from. Returns the targets that could not be
/// computed.
pub fn run(plan: &Plan, collections: &mut Collections) -> Result<Vec<Obstacle>> {
    loop {
        let before = if plan.cascades { Some(bytes(collections)?) } else { None };
        let obstacles = apply_each(plan, collections)?;
        // Removals that cause each other end when nothing is left to remove.
        match before {
            Some(before) if before != bytes(collections)? => {}
            _ => return Ok(obstacles),
        }
    }
}

/// The bytes of all documents. They are compared instead of the documents because a document with NaN does not equal itself.
fn bytes(collections: &Collections) -> Result<Vec<Vec<u8>>> {
    let documents = collections.values().flatten();
    documents.map(|document| Ok(RawDocumentBuf::try_from(document)?.into_bytes())).collect()
}

/// Applies every rule once.
fn apply_each(plan: &Plan, collections: &mut Collections) -> Result<Vec<Obstacle>> {
    let mut obstacles = Vec::new();
    for id in &plan.order {
        let rule = plan.rule(*id);
        if let Some(tree) = rule.tree {
            tree::run((plan, rule), tree, collections, &mut obstacles)?;
            continue;
        }
        let name = rule.target.namespace.to_string();
        let mut kept = Vec::new();
        let mut targets = collections.get(&name).cloned().unwrap_or_default();
        targets.extend(create::absent(rule, collections, &targets, &mut obstacles)?);
        for target in targets {
            match apply(plan, rule, collections, target.clone()) {
                Ok(written) => kept.extend(written),
                Err(Stop::EvalError(error)) => {
                    let id = id_of(&target);
                    obstacles.push(Obstacle { rule: rule.name.clone(), target: id, error });
                    // A document that would have been inserted is not.
                    kept.extend(Some(target).filter(|target| !target.contains_key(ABSENT)));
                }
                Err(Stop::Error(error)) => return Err(error),
            }
        }
        if collections.contains_key(&name) {
            collections.insert(name, kept);
        }
    }
    Ok(obstacles)
}

enum Stop {
    EvalError(EvalError),
    Error(Error),
}

impl From<EvalError> for Stop {
    fn from(error: EvalError) -> Self {
        Self::EvalError(error)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error.kind {
            // Refused by the daemon itself, for instance because of `max_elements`.
            denormd_mongo::error::Kind::Refused => Self::EvalError(EvalError::Refused(error.message)),
            _ => Self::Error(error),
        }
    }
}

/// One target after the rule is applied; None if the rule deletes it.
fn apply(plan: &Plan, rule: &Rule, collections: &Collections, mut target: Document) -> Result<Option<Document>, Stop> {
    if let Some(filter) = &rule.target.filter
        && !denormd_mql::matches(filter, &target)?
    {
        return Ok(Some(target));
    }
    let references = rule.reference.keys(Role::Target, &target);
    let mut wanted: Vec<&Key> = references.iter().flatten().filter(|key| rule.reference.can_resolve(key)).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut rows = Rows::within(usize::MAX);
    let command = match &rule.of_target {
        Some(_) => Some(by_target::sources(rule, &[Referrer { target: &target, references: &references }], None)),
        None => Some(read::sources(rule, &wanted)).filter(|_| !wanted.is_empty()),
    };
    if let Some(command) = command {
        let found = denormd_mql::aggregate(collections, &rule.source.namespace.database, &command)?;
        for row in &found {
            rows.take(&RawDocumentBuf::try_from(row).map_err(Error::from)?)?;
        }
    }
    rows.no_input = no_input(rule, collections)?;
    rows.held = create::held_by_others(plan, rule, collections, &wanted)?;
    // A stand-in becomes the document that it stands for, as it is before the rule sets its paths.
    let is_absent = target.remove(ABSENT).is_some();
    if is_absent && !wanted.iter().any(|key| rows.answer(key)) {
        return Ok(None);
    }
    let compared = compare::one(rule, &rows, &target, references, &|_| true)?;
    if let Some(place) = compared.in_the_way(rule, &target) {
        let why = format!("`{place}` of the target is no subdocument, and the rule writes below it");
        return Err(EvalError::Refused(why).into());
    }
    Ok(applied(rule, target, &compared)?)
}

/// The values of a key without sources, if they are expressions.
fn no_input(rule: &Rule, collections: &Collections) -> Result<Option<NoInput>, Stop> {
    let Some(command) = read::no_input(rule) else { return Ok(None) };
    let found = match denormd_mql::aggregate(collections, &rule.source.namespace.database, &command) {
        Ok(found) => found,
        Err(EvalError::Refused(reason)) => return Ok(Some(Err(reason))),
        Err(error) => return Err(error.into()),
    };
    let row = found.first().and_then(|row| row.get_document("v").ok()).cloned().unwrap_or_default();
    Ok(Some(Ok(RawDocumentBuf::try_from(&row).map_err(Error::from)?)))
}

/// The first part of the rules that only a server can evaluate, for each rule that has one.
#[must_use]
pub fn beyond(plan: &Plan) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for rule in &plan.rules {
        let filters = [&rule.source.filter, &rule.target.filter];
        let conditions = [&rule.row_filter, &rule.pair_filter];
        let zone = rule.reference.pairs.iter().filter_map(|pair| pair.bucket.as_ref()).find_map(create::beyond);
        let rows = conditions.into_iter().flatten().find_map(denormd_mql::beyond_expression);
        let filter = filters.into_iter().flatten().find_map(denormd_mql::beyond_filter).or(rows);
        let value = match &rule.values {
            denormd_rules::plan::Values::Set { assignments, otherwise, .. } => {
                let value = assignments.iter().find_map(|one| denormd_mql::beyond_expression(&one.expression));
                value.or_else(|| otherwise.iter().flatten().flatten().find_map(denormd_mql::beyond_expression))
            }
            denormd_rules::plan::Values::Aggregate { assignments, .. } => {
                assignments.iter().find_map(beyond_accumulated)
            }
            denormd_rules::plan::Values::Groups(groups) => {
                let by = groups.by.iter().find_map(|(_, value)| denormd_mql::beyond_expression(value));
                by.or_else(|| groups.fields.iter().find_map(beyond_accumulated))
            }
            denormd_rules::plan::Values::Into { element, .. }
            | denormd_rules::plan::Values::Collect { element, .. } => denormd_mql::beyond_expression(element),
        };
        out.extend(filter.or(value).or(zone).map(|what| (rule.name.clone(), what)));
    }
    out
}

fn beyond_accumulated(value: &Assignment) -> Option<String> {
    let over_variables = value.variables().and_then(|(_, expression)| denormd_mql::beyond_expression(expression));
    value.accumulators().find_map(denormd_mql::beyond_accumulator).or(over_variables)
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use denormd_rules::{
        config::{Format, load_str},
        plan::compile,
    };

    use super::*;

    /// A key whose only sources are excluded by a condition on `$$element` has no row, and the daemon creates nothing for it.
    #[test]
    fn no_document_is_created_for_a_key_without_rows() {
        let text = "mongodb: { uri: mongodb://localhost, database: shop }\nrules:\n  - { name: r, aggregate: { source: { collection: \
                    orders, where: { $expr: { $gt: [$$element.qty, 0] } } }, target: { collection: totals, create: true }, match: \
                    { _id: \"lines.$[].item\" }, set: { units: { $sum: $$element.qty } }, on_empty: keep } }\n";
        let plan = compile(&load_str(text, Format::Yaml).unwrap().config, None).unwrap();
        let order = doc! {"_id": 1, "lines": [{"item": 7, "qty": 0}, {"item": 8, "qty": 2}]};
        let mut collections =
            Collections::from([("shop.orders".to_owned(), vec![order]), ("shop.totals".to_owned(), Vec::new())]);
        assert_eq!(run(&plan, &mut collections).unwrap(), []);
        assert_eq!(collections["shop.totals"], [doc! {"_id": 8, "units": 2}]);
    }

    /// The dry run deleted only documents without a parent; the daemon also deletes their descendants.
    #[test]
    fn removals_that_cause_each_other_go_on_to_the_last() {
        let text = "mongodb: { uri: mongodb://localhost, database: shop }\nrules:\n  - { name: r, copy: { source: notes, target: \
                    notes, match: { parent: _id }, set: { title: $text }, on_missing: delete } }\n";
        let plan = compile(&load_str(text, Format::Yaml).unwrap().config, None).unwrap();
        let given = [
            doc! {"_id": 1, "text": "a"},
            doc! {"_id": 2, "parent": 1, "n": f64::NAN},
            doc! {"_id": 3, "parent": 9},
            doc! {"_id": 4, "parent": 3},
            doc! {"_id": 5, "parent": 4},
        ];
        let mut collections = Collections::from([("shop.notes".to_owned(), given.to_vec())]);
        assert_eq!(run(&plan, &mut collections).unwrap(), []);
        let left: Vec<Bson> = collections["shop.notes"].iter().map(id_of).collect();
        assert_eq!(left, [Bson::Int32(1), Bson::Int32(2)]);
    }
}
