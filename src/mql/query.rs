//! Query filters of `find` and `$match`.

use bson::{Bson, Document};

use super::{Result, compare, expression::expression, is_true, needs_server, order::class, refused, type_name};

/// Returns true if the document matches the filter.
pub fn matches(filter: &Document, document: &Document) -> Result<bool> {
    for (name, condition) in filter {
        let holds = match name.as_str() {
            "$and" | "$or" | "$nor" => clauses(name, condition, document)?,
            "$expr" => is_true(expression(condition, document)?.as_ref()),
            "$comment" => true,
            // The fields of a DBRef are fields.
            _ if name.starts_with('$') && !matches!(name.as_str(), "$ref" | "$id" | "$db") => {
                return needs_server(format!("`{name}`"));
            }
            path => field(path, condition, document)?,
        };
        if !holds {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Like the server, looks at no further clause once one has decided: it may be an expression that fails.
fn clauses(name: &str, clauses: &Bson, document: &Document) -> Result<bool> {
    let (decides, decided) = match name {
        "$and" => (false, false),
        "$or" => (true, true),
        _ => (true, false),
    };
    for clause in clauses.as_array().into_iter().flatten() {
        let Some(clause) = clause.as_document() else { return refused(format!("`{name}` takes an array of filters")) };
        if matches(clause, document)? == decides {
            return Ok(decided);
        }
    }
    Ok(!decided)
}

fn field(path: &str, condition: &Bson, document: &Document) -> Result<bool> {
    let steps: Vec<&str> = path.split('.').collect();
    let mut found = Vec::new();
    walk(Some(document), &steps, &mut found);
    condition_holds(condition, &found)
}

/// A value at a path, `None` for a missing field.
struct PathValue<'a> {
    value: Option<&'a Bson>,
    /// False for an element that the path names by its position: an array there is not searched.
    with_elements: bool,
}

/// The values at a path, including those inside arrays on the way: one entry for each place.
fn walk<'a>(document: Option<&'a Document>, path: &[&str], out: &mut Vec<PathValue<'a>>) {
    let Some((first, rest)) = path.split_first() else { return };
    below(document.and_then(|document| document.get(*first)), rest, out);
}

fn below<'a>(value: Option<&'a Bson>, path: &[&str], out: &mut Vec<PathValue<'a>>) {
    let Some((first, rest)) = path.split_first() else { return out.push(PathValue { value, with_elements: true }) };
    match value {
        Some(Bson::Document(inside)) => walk(Some(inside), path, out),
        Some(Bson::Array(items)) => {
            // `a.0` is the first element, and the field `0` of each element.
            let place = first.parse().ok().filter(|place: &usize| place.to_string() == **first);
            match place.and_then(|place| items.get(place)) {
                Some(item) if rest.is_empty() => out.push(PathValue { value: Some(item), with_elements: false }),
                Some(item @ (Bson::Document(_) | Bson::Array(_))) => below(Some(item), rest, out),
                Some(_) | None => {}
            }
            items.iter().filter_map(Bson::as_document).for_each(|inside| walk(Some(inside), path, out));
        }
        _ => out.push(PathValue { value: None, with_elements: true }),
    }
}

/// The operators of a condition, which begin with `$`; a DBRef is a value.
pub(super) fn operators(condition: &Bson) -> Option<&Document> {
    let doc = condition.as_document()?;
    let first = doc.keys().next()?;
    (first.starts_with('$') && !matches!(first.as_str(), "$ref" | "$id" | "$db")).then_some(doc)
}

fn condition_holds(condition: &Bson, found: &[PathValue<'_>]) -> Result<bool> {
    let Some(operators) = operators(condition) else {
        return operator("$eq", implicit(condition)?, found);
    };
    for (name, argument) in operators {
        if !operator(name, argument, found)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A value that means "equal to it"; a regular expression would be a pattern.
fn implicit(value: &Bson) -> Result<&Bson> {
    match value {
        Bson::RegularExpression(_) => needs_server("a regular expression in a filter"),
        value => Ok(value),
    }
}

fn operator(name: &str, argument: &Bson, found: &[PathValue<'_>]) -> Result<bool> {
    Ok(match name {
        "$eq" | "$lt" | "$lte" | "$gt" | "$gte" => {
            if *argument == Bson::Undefined {
                return needs_server("undefined in a filter");
            }
            leaves(found).any(|value| compares(name, value, argument))
        }
        "$ne" => !operator("$eq", implicit(argument)?, found)?,
        "$in" => {
            let Some(values) = argument.as_array() else { return refused("`$in` takes an array") };
            let mut any = false;
            for value in values {
                any |= operator("$eq", implicit(value)?, found)?;
            }
            any
        }
        "$nin" => !operator("$in", argument, found)?,
        "$not" => match operators(argument) {
            Some(_) => !condition_holds(argument, found)?,
            None => return needs_server("`$not` of a regular expression"),
        },
        "$exists" => found.iter().any(|found| found.value.is_some()) == is_true(Some(argument)),
        "$size" => match super::number::position(Some(argument))? {
            Some(size) => arrays(found).any(|items| i64::try_from(items.len()) == Ok(size)),
            None => return refused("`$size` takes a whole number"),
        },
        "$type" => {
            let mut any = false;
            for wanted in argument.as_array().map_or(std::slice::from_ref(argument), Vec::as_slice) {
                any |= leaves(found).any(|value| value.is_some_and(|value| has_type(value, wanted)));
            }
            any
        }
        "$all" => {
            let Some(values) = argument.as_array() else { return refused("`$all` takes an array") };
            let mut all = !values.is_empty();
            for value in values {
                all &= match operators(value) {
                    Some(_) => condition_holds(value, found)?,
                    None => operator("$eq", implicit(value)?, found)?,
                };
            }
            all
        }
        "$elemMatch" => {
            let Some(inside) = argument.as_document() else { return refused("`$elemMatch` takes a document") };
            let mut any = false;
            for item in arrays(found).flatten() {
                any |= element_matches(inside, argument, item)?;
            }
            any
        }
        "$regex" | "$options" => return needs_server("`$regex`"),
        _ => return needs_server(format!("`{name}`")),
    })
}

fn element_matches(inside: &Document, argument: &Bson, item: &Bson) -> Result<bool> {
    let clause = inside.keys().next().is_some_and(|name| matches!(name.as_str(), "$and" | "$or" | "$nor" | "$expr"));
    if operators(argument).is_some() && !clause {
        // The element itself: its own elements are not searched.
        return condition_holds(argument, &[PathValue { value: Some(item), with_elements: false }]);
    }
    match item {
        Bson::Document(item) => matches(inside, item),
        // The server takes an array for a document whose fields are the indexes.
        Bson::Array(items) => {
            matches(inside, &items.iter().enumerate().map(|(n, item)| (n.to_string(), item.clone())).collect())
        }
        _ => Ok(false),
    }
}

/// The values themselves and, for arrays that are searched, their elements.
fn leaves<'a>(found: &'a [PathValue<'a>]) -> impl Iterator<Item = Option<&'a Bson>> {
    found.iter().flat_map(|PathValue { value, with_elements }| {
        let array = value.and_then(Bson::as_array).filter(|_| *with_elements);
        array.map(Vec::as_slice).unwrap_or_default().iter().map(Some).chain([*value])
    })
}

fn arrays<'a>(found: &'a [PathValue<'a>]) -> impl Iterator<Item = &'a Vec<Bson>> {
    found.iter().filter_map(|found| found.value?.as_array())
}

/// Compares within one class of types, and with the least and the greatest value. Across classes, only null and a missing
/// value are equal.
fn compares(name: &str, value: Option<&Bson>, wanted: &Bson) -> bool {
    let (left, right) = (class(value), class(Some(wanted)));
    let is_extreme = matches!(wanted, Bson::MinKey | Bson::MaxKey);
    let value = if is_extreme { value.or(Some(&Bson::Null)) } else { value };
    if left != right && !is_extreme {
        return match wanted {
            _ if i16::from(left) + i16::from(right) == 5 => matches!(name, "$eq" | "$lte" | "$gte"),
            _ => false,
        };
    }
    let nan = |value: Option<&Bson>| match value {
        Some(Bson::Double(number)) => number.is_nan(),
        Some(Bson::Decimal128(number)) => number.to_string() == "NaN",
        _ => false,
    };
    if !is_extreme && (nan(value) || nan(Some(wanted))) {
        return nan(value) && nan(Some(wanted)) && !matches!(name, "$lt" | "$gt");
    }
    let order = compare(value, Some(wanted));
    match name {
        "$lt" => order.is_lt(),
        "$lte" => order.is_le(),
        "$gt" => order.is_gt(),
        "$gte" => order.is_ge(),
        _ => order.is_eq(),
    }
}

/// True if a value has this type, given by its name or its number.
fn has_type(value: &Bson, wanted: &Bson) -> bool {
    let name = type_name(Some(value));
    match wanted {
        Bson::String(wanted) => {
            name == wanted || (wanted == "number" && matches!(name, "int" | "long" | "double" | "decimal"))
        }
        // The number of MinKey is -1.
        _ => super::number::position(Some(wanted)).ok().flatten() == Some(i64::from(value.element_type() as i8)),
    }
}
