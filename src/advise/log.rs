//! Reads slow queries from the server's log: field names, limits and joins, never a value. Pure.

use serde_json::{Map, Value};

use denormd_model::namespace::Namespace;

/// One query from the slow query log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// The collection that it reads.
    pub namespace: Namespace,
    /// The fields in its filter.
    pub filter: Vec<String>,
    /// The filtered fields with an `$in`, which indicates a join in the application.
    pub lists: Vec<String>,
    /// The filtered fields with a case-insensitive regular expression.
    pub ignores_case: Vec<String>,
    /// The sort keys with their directions.
    pub sort: Vec<(String, i64)>,
    /// The maximum number of documents it requests.
    pub limit: Option<u64>,
    /// True if it has a projection.
    pub projected: bool,
    /// The arrays it reads with `$slice`, each with the number of elements.
    pub slices: Vec<(String, u64)>,
    /// The `$lookup` stages that it runs.
    pub lookups: Vec<Lookup>,
}

/// One `$lookup`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    /// The joined collection.
    pub from: String,
    /// The field of the reading collection.
    pub local: String,
    /// The field of the joined collection.
    pub foreign: String,
    /// True if it has a projection.
    pub projected: bool,
}

/// Reads one line of `getLog`; None for lines that are not slow queries, and for denormd's own queries.
#[must_use]
pub fn slow_query(line: &str) -> Option<Query> {
    // Most lines are other messages, and parsing them would be most of the work.
    if !line.contains("\"Slow query\"") {
        return None;
    }
    let line: Value = serde_json::from_str(line).ok()?;
    let attr = line.get("attr")?;
    let app = attr.get("appName").and_then(Value::as_str).unwrap_or_default();
    if app == "denormd" {
        return None;
    }
    let (database, collection) = attr.get("ns")?.as_str()?.split_once('.')?;
    let namespace = Namespace { database: database.to_owned(), collection: collection.to_owned() };
    let command = attr.get("originatingCommand").or_else(|| attr.get("command"))?.as_object()?;
    let mut query = Query {
        namespace,
        filter: Vec::new(),
        lists: Vec::new(),
        ignores_case: Vec::new(),
        sort: Vec::new(),
        limit: None,
        projected: false,
        slices: Vec::new(),
        lookups: Vec::new(),
    };
    if command.contains_key("find") {
        query.stage("$match", command.get("filter").unwrap_or(&Value::Null));
        query.stage("$sort", command.get("sort").unwrap_or(&Value::Null));
        query.stage("$limit", command.get("limit").unwrap_or(&Value::Null));
        query.stage("$project", command.get("projection").unwrap_or(&Value::Null));
    } else if let Some(pipeline) = command.get("aggregate").and(command.get("pipeline")).and_then(Value::as_array) {
        for (name, stage) in pipeline.iter().filter_map(Value::as_object).flatten() {
            query.stage(name, stage);
        }
    } else {
        return None;
    }
    Some(query)
}

impl Query {
    fn stage(&mut self, name: &str, stage: &Value) {
        match (name, stage) {
            ("$match", Value::Object(filter)) => self.conditions(filter),
            ("$sort", Value::Object(sort)) if self.sort.is_empty() => {
                self.sort = sort.iter().filter_map(|(name, way)| Some((name.clone(), way.as_i64()?))).collect();
            }
            ("$limit", limit) if self.limit.is_none() => self.limit = limit.as_u64().filter(|limit| *limit > 0),
            ("$project" | "$group" | "$count", Value::Object(fields)) => {
                self.projected |= !fields.is_empty();
                self.slices.extend(fields.iter().filter_map(|(name, value)| Some((name.clone(), slice(value)?))));
            }
            ("$lookup", Value::Object(lookup)) => self.lookups.extend(joined(lookup)),
            _ => {}
        }
    }

    fn conditions(&mut self, filter: &Map<String, Value>) {
        for (name, condition) in filter {
            match condition {
                Value::Array(all) if name.starts_with('$') => {
                    all.iter().filter_map(Value::as_object).for_each(|filter| self.conditions(filter));
                }
                _ if name.starts_with('$') => {}
                condition => {
                    self.filter.push(name.clone());
                    if condition.get("$in").is_some() {
                        self.lists.push(name.clone());
                    }
                    if ignores_case(condition) {
                        self.ignores_case.push(name.clone());
                    }
                }
            }
        }
    }
}

fn ignores_case(condition: &Value) -> bool {
    let options = |value: &Value| value.as_str().is_some_and(|options| options.contains('i'));
    let literal =
        |value: &Value| value.get("$regularExpression").and_then(|regex| regex.get("options")).is_some_and(options);
    literal(condition)
        || condition.get("$options").is_some_and(options)
        || condition.get("$regex").is_some_and(literal)
        || condition.get("$in").and_then(Value::as_array).is_some_and(|all| all.iter().any(literal))
}

/// The number of elements in `{ $slice: n }`, `{ $slice: [skip, n] }` and `{ $slice: ["$path", n] }`.
fn slice(value: &Value) -> Option<u64> {
    let number = match value.get("$slice")? {
        Value::Array(parts) => parts.last()?.as_i64()?,
        number => number.as_i64()?,
    };
    Some(number.unsigned_abs())
}

fn joined(lookup: &Map<String, Value>) -> Option<Lookup> {
    let text = |name: &str| lookup.get(name).and_then(Value::as_str).map(ToOwned::to_owned);
    let stages = lookup.get("pipeline").and_then(Value::as_array);
    let projected = stages.is_some_and(|stages| stages.iter().any(|stage| stage.get("$project").is_some()));
    Some(Lookup { from: text("from")?, local: text("localField")?, foreign: text("foreignField")?, projected })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(command: &Value) -> Option<Query> {
        let line = json!({"msg": "Slow query", "attr": {"ns": "shop.reviews", "appName": "web", "command": command}});
        slow_query(&line.to_string())
    }

    #[test]
    fn a_find() {
        let query = read(&json!({
            "find": "reviews", "filter": {"$and": [{"product_id": 7}, {"status": {"$in": ["a"]}}], "author": {"$regularExpression": {"pattern": "x", "options": "i"}}},
            "sort": {"published_date": -1}, "limit": 10, "projection": {"tags": {"$slice": -3}},
        }))
        .unwrap();
        assert_eq!(query.filter, ["product_id", "status", "author"]);
        assert_eq!(query.lists, ["status"]);
        assert_eq!(query.ignores_case, ["author"]);
        assert_eq!(query.sort, [("published_date".to_owned(), -1)]);
        assert_eq!((query.limit, query.projected), (Some(10), true));
        assert_eq!(query.slices, [("tags".to_owned(), 3)]);
    }

    #[test]
    fn an_aggregation() {
        let lookup = json!({"from": "products", "localField": "product_id", "foreignField": "_id", "as": "product"});
        let query = read(&json!({"aggregate": "reviews", "pipeline": [{"$match": {"a": {"$regex": "x", "$options": "i"}}}, {"$lookup": lookup}]})).unwrap();
        assert_eq!(query.ignores_case, ["a"]);
        assert_eq!(
            query.lookups[0],
            Lookup {
                from: "products".to_owned(),
                local: "product_id".to_owned(),
                foreign: "_id".to_owned(),
                projected: false
            }
        );
        assert!(!query.projected);
    }

    #[test]
    fn what_is_no_query_of_an_application() {
        assert_eq!(read(&json!({"insert": "reviews"})), None);
        assert_eq!(slow_query("{}"), None);
        assert_eq!(slow_query("\"Slow query\" that is no JSON"), None);
        let own = json!({"msg": "Slow query", "attr": {"ns": "a.b", "appName": "denormd", "command": {"find": "b"}}});
        assert_eq!(slow_query(&own.to_string()), None);
    }
}
