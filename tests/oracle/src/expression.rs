//! The part of the aggregation language that the generated rules use, evaluated by definition.

use bson::{Bson, Document};

use crate::value::{compare, equal, float, is_nothing, is_number};

/// The variables of an expression.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// The source document.
    pub root: &'a Bson,
    /// `$$element`: the source's matched element.
    pub element: Option<&'a Bson>,
    /// `$$target` and `$$targetElement`.
    pub view: View<'a>,
}

/// The part of the target that an expression sees.
#[derive(Debug, Clone, Copy, Default)]
pub struct View<'a> {
    /// The target.
    pub target: Option<&'a Bson>,
    /// Its matched element.
    pub element: Option<&'a Bson>,
}

/// The value, `None` when the expression yields missing, an error where the server would fail the read.
pub fn evaluate(expression: &Bson, scope: Scope) -> Result<Option<Bson>, String> {
    match expression {
        Bson::String(text) => match text.strip_prefix('$') {
            Some(path) => field_path(path, scope),
            None => Ok(Some(expression.clone())),
        },
        Bson::Array(elements) => {
            let mut values = Vec::new();
            for element in elements {
                values.push(evaluate(element, scope)?.unwrap_or(Bson::Null));
            }
            Ok(Some(Bson::Array(values)))
        }
        Bson::Document(document) => match document.iter().next() {
            Some((operator, operand)) if operator.starts_with('$') => operate(operator, operand, scope),
            _ => {
                let mut fields = Document::new();
                for (name, expression) in document {
                    if let Some(value) = evaluate(expression, scope)? {
                        fields.insert(name, value);
                    }
                }
                Ok(Some(Bson::Document(fields)))
            }
        },
        literal => Ok(Some(literal.clone())),
    }
}

/// The paths that an expression reads of a variable: of `$$target`, for instance.
pub fn reads_of(name: &str, expression: &Bson, paths: &mut Vec<String>) {
    match expression {
        Bson::String(text) => {
            let rest = text.strip_prefix("$$").and_then(|text| text.strip_prefix(name));
            paths.extend(rest.filter(|rest| rest.is_empty()).map(ToOwned::to_owned));
            paths.extend(rest.and_then(|rest| rest.strip_prefix('.')).map(ToOwned::to_owned));
        }
        Bson::Array(elements) => elements.iter().for_each(|element| reads_of(name, element, paths)),
        Bson::Document(document) if !document.contains_key("$literal") => {
            document.values().for_each(|value| reads_of(name, value, paths));
        }
        _ => {}
    }
}

/// The source paths that an expression reads, `""` for the whole document.
pub fn reads(expression: &Bson, paths: &mut Vec<String>) {
    match expression {
        Bson::String(text) => {
            if let Some(variable) = text.strip_prefix("$$") {
                match variable.split_once('.') {
                    Some(("ROOT" | "CURRENT", path)) => paths.push(path.to_owned()),
                    None if variable == "ROOT" || variable == "CURRENT" => paths.push(String::new()),
                    _ => {}
                }
            } else if let Some(path) = text.strip_prefix('$') {
                paths.push(path.to_owned());
            }
        }
        Bson::Array(elements) => elements.iter().for_each(|element| reads(element, paths)),
        Bson::Document(document) if !document.contains_key("$literal") => {
            document.values().for_each(|value| reads(value, paths));
        }
        _ => {}
    }
}

fn field_path(path: &str, scope: Scope) -> Result<Option<Bson>, String> {
    let (base, path) = match path.strip_prefix('$') {
        None => (scope.root, Some(path)),
        Some(variable) => {
            let (name, rest) = variable.split_once('.').map_or((variable, None), |(name, rest)| (name, Some(rest)));
            match name {
                "ROOT" | "CURRENT" => (scope.root, rest),
                "element" => (scope.element.ok_or("$$element outside a source-held reference")?, rest),
                "target" => (scope.view.target.ok_or("$$target without a target")?, rest),
                "targetElement" => match scope.view.element {
                    Some(element) => (element, rest),
                    None => return Ok(None),
                },
                "REMOVE" => return Ok(None),
                other => return Err(format!("variable $${other}")),
            }
        }
    };
    let Some(path) = path else { return Ok(Some(base.clone())) };
    let names: Vec<&str> = path.split('.').collect();
    Ok(match base {
        Bson::Document(document) => walk(document, &names),
        Bson::Array(elements) => Some(walk_array(elements, &names)),
        _ => None,
    })
}

/// `$a.b` as the server evaluates it: an array on the way yields the array of the values in its documents.
fn walk(document: &Document, names: &[&str]) -> Option<Bson> {
    let (name, rest) = names.split_first()?;
    let value = document.get(name)?;
    if rest.is_empty() {
        return Some(value.clone());
    }
    match value {
        Bson::Document(document) => walk(document, rest),
        Bson::Array(elements) => Some(walk_array(elements, rest)),
        _ => None,
    }
}

fn walk_array(elements: &[Bson], names: &[&str]) -> Bson {
    Bson::Array(elements.iter().filter_map(Bson::as_document).filter_map(|element| walk(element, names)).collect())
}

fn operate(operator: &str, operand: &Bson, scope: Scope) -> Result<Option<Bson>, String> {
    let operands = || -> Result<Vec<Option<Bson>>, String> {
        match operand {
            Bson::Array(operands) => operands.iter().map(|operand| evaluate(operand, scope)).collect(),
            operand => Ok(vec![evaluate(operand, scope)?]),
        }
    };
    match operator {
        "$literal" => Ok(Some(operand.clone())),
        "$ifNull" => {
            let operands = operands()?;
            let last = operands.last().cloned().flatten();
            Ok(operands.into_iter().find(|value| !is_nothing(value.as_ref())).unwrap_or(last))
        }
        "$concat" => {
            let mut text = String::new();
            for value in operands()? {
                match value {
                    Some(Bson::String(part)) => text.push_str(&part),
                    value if is_nothing(value.as_ref()) => return Ok(Some(Bson::Null)),
                    other => return Err(format!("$concat of {other:?}")),
                }
            }
            Ok(Some(Bson::String(text)))
        }
        "$toUpper" => match operands()?.into_iter().next().flatten() {
            Some(Bson::String(text)) => Ok(Some(Bson::String(text.to_ascii_uppercase()))),
            value if is_nothing(value.as_ref()) => Ok(Some(Bson::String(String::new()))),
            other => Err(format!("$toUpper of {other:?}")),
        },
        "$add" => add(&operands()?),
        "$eq" => match &operands()?[..] {
            [Some(a), Some(b)] => Ok(Some(Bson::Boolean(equal(a, b)))),
            [a, b] => Ok(Some(Bson::Boolean(a.is_none() && b.is_none()))),
            _ => Err("$eq of two".to_owned()),
        },
        "$gt" | "$gte" | "$lt" | "$lte" => match &operands()?[..] {
            [a, b] => {
                // Missing is less than everything that the generated rules compare.
                let order = match (a, b) {
                    (Some(a), Some(b)) => compare(a, b),
                    (a, b) => a.is_some().cmp(&b.is_some()),
                };
                Ok(Some(Bson::Boolean(match operator {
                    "$gt" => order.is_gt(),
                    "$gte" => order.is_ge(),
                    "$lt" => order.is_lt(),
                    _ => order.is_le(),
                })))
            }
            _ => Err(format!("{operator} of two")),
        },
        "$cond" => match operand.as_array().map(Vec::as_slice) {
            Some([condition, then, otherwise]) => {
                let holds = evaluate(condition, scope)? == Some(Bson::Boolean(true));
                evaluate(if holds { then } else { otherwise }, scope)
            }
            _ => Err("$cond of three".to_owned()),
        },
        // Only for a long range, no other array.
        "$size" => {
            let range = operand.as_document().and_then(|operand| operand.get_array("$range").ok());
            if let Some(end) = range.and_then(|range| range.get(1)) {
                return Ok(Some(end.clone()));
            }
            match evaluate(operand, scope)? {
                Some(Bson::Array(items)) => Ok(Some(integer(items.len() as i128, false))),
                other => Err(format!("$size of {other:?}")),
            }
        }
        other => Err(format!("expression operator {other}")),
    }
}

/// `$add`: the widest type wins, an int32 that overflows becomes int64 and an int64 a double.
fn add(operands: &[Option<Bson>]) -> Result<Option<Bson>, String> {
    if operands.iter().any(|value| is_nothing(value.as_ref())) {
        return Ok(Some(Bson::Null));
    }
    let (mut whole, mut sum, mut any_long, mut any_double) = (0_i128, 0.0, false, false);
    for value in operands.iter().flatten() {
        match value {
            Bson::Int32(number) => whole += i128::from(*number),
            Bson::Int64(number) => {
                any_long = true;
                whole += i128::from(*number);
            }
            Bson::Double(_) => any_double = true,
            other => return Err(format!("$add of {other:?}")),
        }
        sum += float(value);
    }
    Ok(Some(if any_double { Bson::Double(sum) } else { integer(whole, any_long) }))
}

/// An integer sum with the server's type.
#[must_use]
pub fn integer(whole: i128, any_long: bool) -> Bson {
    match (i32::try_from(whole), i64::try_from(whole)) {
        (Ok(number), _) if !any_long => Bson::Int32(number),
        (_, Ok(number)) => Bson::Int64(number),
        #[allow(clippy::cast_precision_loss)]
        _ => Bson::Double(whole as f64),
    }
}

/// True if a value counts in `$sum` and `$avg`.
#[must_use]
pub fn counts(value: Option<&Bson>) -> bool {
    value.is_some_and(is_number)
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson};

    use super::*;

    fn of(expression: Bson) -> Option<Bson> {
        let root =
            bson!({"_id": 1, "name": "$n", "gone": null, "a": {"b": 2}, "l": [{"x": 1}, 3, [{"x": 9}], {"x": 2}, {}]});
        let element = bson!({"role": "lead"});
        evaluate(&expression, Scope { root: &root, element: Some(&element), view: View::default() }).unwrap()
    }

    #[test]
    fn expressions_by_hand() {
        assert_eq!(of(bson!("$name")), Some(bson!("$n")));
        assert_eq!(of(bson!("$nope")), None);
        assert_eq!(of(bson!("$a.b")), Some(bson!(2)));
        assert_eq!(of(bson!("$name.b")), None);
        assert_eq!(of(bson!("$l.x")), Some(bson!([1, 2])));
        assert_eq!(of(bson!({"x": "$nope", "g": "$gone", "n": {"m": "$nope"}})), Some(bson!({"g": null, "n": {}})));
        assert_eq!(of(bson!(["$nope", 1])), Some(bson!([null, 1])));
        assert_eq!(of(bson!({"$ifNull": ["$gone", "$nope", 7]})), Some(bson!(7)));
        assert_eq!(of(bson!({"$ifNull": ["$gone", "$nope"]})), None);
        assert_eq!(of(bson!({"$concat": ["$name", "-", "$name"]})), Some(bson!("$n-$n")));
        assert_eq!(of(bson!({"$concat": ["$name", "$nope"]})), Some(Bson::Null));
        assert_eq!(of(bson!({"$toUpper": "$gone"})), Some(bson!("")));
        assert_eq!(of(bson!({"$literal": "$name"})), Some(bson!("$name")));
        assert_eq!(of(bson!({"$add": ["$_id", 1]})), Some(bson!(2)));
        assert_eq!(of(bson!({"$add": [i32::MAX, 1]})), Some(Bson::Int64(1 << 31)));
        assert_eq!(of(bson!("$$element.role")), Some(bson!("lead")));
        assert!(matches!(of(bson!("$$ROOT")), Some(Bson::Document(_))));
    }
}
