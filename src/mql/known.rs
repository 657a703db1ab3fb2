//! Finds the parts of a rule that cannot be evaluated without a server, before the evaluation starts.

use bson::{Bson, Document};

use super::{ACCUMULATORS, expression::TABLE};

/// The first operator of an expression that is not supported.
#[must_use]
pub fn beyond_expression(expression: &Bson) -> Option<String> {
    match expression {
        Bson::Array(items) => items.iter().find_map(beyond_expression),
        Bson::Document(doc) => doc.iter().find_map(|(name, argument)| match name.as_str() {
            "$literal" => None,
            name if name.starts_with('$') && !TABLE.iter().any(|(known, ..)| *known == name) => {
                Some(format!("`{name}`"))
            }
            _ => beyond_expression(argument),
        }),
        _ => None,
    }
}

/// The first operator of an accumulator that is not supported.
#[must_use]
pub fn beyond_accumulator(accumulator: &Bson) -> Option<String> {
    let (name, argument) = accumulator.as_document()?.iter().next()?;
    if ACCUMULATORS.contains(&name.as_str()) { beyond_expression(argument) } else { Some(format!("`{name}`")) }
}

/// The first operator of a filter that is not supported.
#[must_use]
pub fn beyond_filter(filter: &Document) -> Option<String> {
    filter.iter().find_map(|(name, condition)| match name.as_str() {
        "$and" | "$or" | "$nor" => {
            condition.as_array().into_iter().flatten().filter_map(Bson::as_document).find_map(beyond_filter)
        }
        "$expr" => beyond_expression(condition),
        name if name.starts_with('$') => (name != "$comment").then(|| format!("`{name}`")),
        _ => beyond_condition(condition),
    })
}

/// The supported operators of a filter's field.
pub(super) const CONDITIONS: &[&str] = &[
    "$all",
    "$elemMatch",
    "$eq",
    "$exists",
    "$gt",
    "$gte",
    "$in",
    "$lt",
    "$lte",
    "$ne",
    "$nin",
    "$not",
    "$size",
    "$type",
];

fn beyond_condition(condition: &Bson) -> Option<String> {
    let Some(operators) = super::query::operators(condition) else {
        return matches!(condition, Bson::RegularExpression(_)).then(|| "a regular expression in a filter".to_owned());
    };
    operators.iter().find_map(|(name, argument)| match name.as_str() {
        name if !CONDITIONS.contains(&name) => Some(format!("`{name}`")),
        "$not" => beyond_condition(argument),
        "$elemMatch" => argument.as_document().and_then(|inside| {
            if super::query::operators(argument).is_some()
                && !inside.keys().any(|name| name == "$and" || name == "$or" || name == "$nor")
            {
                beyond_condition(argument)
            } else {
                beyond_filter(inside)
            }
        }),
        _ => None,
    })
}

/// The names of the supported operators: of expressions, and of a filter's fields.
#[must_use]
pub fn operators() -> (Vec<&'static str>, &'static [&'static str]) {
    (TABLE.iter().map(|(name, ..)| *name).collect(), CONDITIONS)
}
