//! The part of the server's query language that `where` uses in the generated rules.

use bson::{Bson, Document};

use crate::value::{class, compare, equal};

/// True if a document matches a query: equality, `$eq $ne $gt $gte $lt $lte $in $nin $exists`, `$and $or`. As on the
/// server, paths look into arrays.
pub fn matches(document: &Document, query: &Document) -> Result<bool, String> {
    for (key, condition) in query {
        let holds = match (key.as_str(), condition) {
            ("$and", Bson::Array(all)) => each(document, all)?.into_iter().all(|holds| holds),
            ("$or", Bson::Array(any)) => each(document, any)?.into_iter().any(|holds| holds),
            (operator, _) if operator.starts_with('$') => return Err(format!("query operator {operator}")),
            (path, Bson::Document(operators)) if operators.keys().next().is_some_and(|key| key.starts_with('$')) => {
                let mut all = true;
                for (operator, operand) in operators {
                    all &= holds_at(document, path, operator, operand)?;
                }
                all
            }
            (path, operand) => holds_at(document, path, "$eq", operand)?,
        };
        if !holds {
            return Ok(false);
        }
    }
    Ok(true)
}

fn each(document: &Document, queries: &[Bson]) -> Result<Vec<bool>, String> {
    queries.iter().map(|query| matches(document, query.as_document().ok_or("a query is a document")?)).collect()
}

fn holds_at(document: &Document, path: &str, operator: &str, operand: &Bson) -> Result<bool, String> {
    let names: Vec<&str> = path.split('.').collect();
    let mut found = Vec::new();
    collect(&Bson::Document(document.clone()), &names, &mut found);
    let any_equal = |operand: &Bson| {
        found.iter().any(|value| match value {
            Some(value) => equal(value, operand),
            None => *operand == Bson::Null,
        })
    };
    let list = |operand: &Bson| operand.as_array().cloned().ok_or(format!("{operator} wants an array"));
    Ok(match operator {
        "$eq" => any_equal(operand),
        "$ne" => !any_equal(operand),
        "$in" => list(operand)?.iter().any(any_equal),
        "$nin" => !list(operand)?.iter().any(any_equal),
        "$exists" => found.iter().any(Option::is_some) == (operand.as_bool() != Some(false)),
        "$gt" | "$gte" | "$lt" | "$lte" => found.iter().flatten().any(|value| {
            // Comparisons stay within one type, and NaN compares with itself alone.
            let is_nan = |value: &Bson| matches!(value, Bson::Double(number) if number.is_nan());
            let order = compare(value, operand);
            class(value) == class(operand)
                && (is_nan(value) == is_nan(operand))
                && match operator {
                    "$gt" => order.is_gt(),
                    "$gte" => order.is_ge(),
                    "$lt" => order.is_lt(),
                    _ => order.is_le(),
                }
        }),
        other => return Err(format!("query operator {other}")),
    })
}

/// Every value at a query path: through arrays of documents on the way, and the elements of an array at its end.
fn collect(value: &Bson, names: &[&str], found: &mut Vec<Option<Bson>>) {
    let Some((name, rest)) = names.split_first() else {
        found.push(Some(value.clone()));
        if let Bson::Array(elements) = value {
            found.extend(elements.iter().cloned().map(Some));
        }
        return;
    };
    match value {
        Bson::Document(document) => match document.get(name) {
            Some(Bson::Array(elements)) if !rest.is_empty() => {
                elements.iter().filter(|element| element.as_document().is_some()).for_each(|element| {
                    collect(element, rest, found);
                });
            }
            Some(value) => collect(value, rest, found),
            None => found.push(None),
        },
        _ => found.push(None),
    }
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::matches;

    #[test]
    fn operators() {
        let document = doc! {"a": 1.0, "s": "open", "tags": ["x", 2], "o": [{"k": 1}, {"k": 5}], "z": null};
        let holds = |query: Document| matches(&document, &query).unwrap();
        assert!(holds(doc! {"a": 1, "s": "open"}));
        assert!(holds(doc! {"tags": "x", "o.k": {"$gt": 4}}));
        assert!(holds(doc! {"missing": null, "z": null, "missing2": {"$ne": 1}}));
        assert!(holds(doc! {"z": {"$exists": true}, "missing": {"$exists": false}}));
        assert!(holds(doc! {"a": {"$gte": 1, "$lt": 2, "$in": [7, 1]}}));
        assert!(!holds(doc! {"s": {"$gt": 1}}));
        assert!(!holds(doc! {"missing": {"$lt": 1}}));
        assert!(!holds(doc! {"a": {"$ne": 1}}));
        assert!(holds(doc! {"$or": [{"a": 2}, {"$and": [{"a": 1}]}]}));
    }
}
