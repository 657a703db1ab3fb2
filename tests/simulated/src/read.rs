//! `find`, `aggregate`, `count`, `distinct` and cursors.

use std::collections::VecDeque;

use bson::{Bson, Document, doc};
use denormd_mql::{compare, matches};
use rand::{Rng, seq::SliceRandom};

use crate::{
    large, projection,
    replies::{Failure, Result},
    state::{Cursor, Progress, State, bind, bind_filter, check_options, target},
    stream::Stream,
};

/// The size of a first batch by default.
const FIRST_BATCH: usize = 101;

impl State {
    /// The documents of a collection that match a filter: in the order of `_id` where the `_id` index would be used.
    pub fn matching(&self, namespace: &str, filter: &Document, hint: Option<&Bson>) -> Result<Vec<&Document>> {
        let mut found = Vec::new();
        for document in self.data.get(namespace).into_iter().flatten() {
            if matches(filter, document)? {
                found.push(document);
            }
        }
        let by_id = match hint {
            Some(Bson::Document(hint)) => hint.contains_key("_id"),
            Some(Bson::String(hint)) => hint == "_id_",
            _ => names_id(filter),
        };
        if by_id {
            found.sort_by(|a, b| compare(a.get("_id"), b.get("_id")));
        }
        Ok(found)
    }

    pub fn find(&mut self, database: &str, command: &Document) -> Result<Document> {
        let known = [
            "filter",
            "projection",
            "sort",
            "limit",
            "skip",
            "batchSize",
            "singleBatch",
            "hint",
            "min",
            "max",
            "allowDiskUse",
            "let",
            "noCursorTimeout",
        ];
        check_options("find", command, &known)?;
        let namespace = target(database, command)?;
        let filter = command.get_document("filter").cloned().unwrap_or_default();
        let variables = self.variables(command)?;
        let filter = bind_filter(&filter, &variables);
        let mut rows: Vec<Document> = if namespace == "local.oplog.rs" {
            let mut rows = Vec::new();
            for row in self.oplog.iter().filter(|entry| entry.time >= self.first).map(crate::oplog::Entry::document) {
                if matches(&filter, &row)? {
                    rows.push(row);
                }
            }
            rows
        } else {
            self.matching(&namespace, &filter, command.get("hint"))?.into_iter().cloned().collect()
        };
        let of_id = |key: &Document| key.len() == 1 && key.contains_key("_id");
        let by_id = command.get_document("hint").is_ok_and(of_id);
        let [min, max] = ["min", "max"].map(|name| command.get_document(name).ok());
        if min.into_iter().chain(max).any(|bound| !(by_id && of_id(bound))) {
            return Err(Failure::unknown("`min` or `max` of another index than that of `_id`"));
        }
        // A collection may have a collation of its own. Those of the daemon's state, which tests name so, have none.
        let has_collation = command.contains_key("collation") || database.ends_with("_state");
        if by_id && !has_collation && compares_text(&filter) {
            return Err(Failure::unknown("a page that is filtered under the collection's own collation"));
        }
        let is_within = |row: &Document| {
            let id = row.get("_id");
            min.is_none_or(|min| compare(id, min.get("_id")).is_ge())
                && max.is_none_or(|max| compare(id, max.get("_id")).is_lt())
        };
        rows.retain(is_within);
        let is_limited = self.is_limited(&namespace, command);
        match command.get_document("sort") {
            Ok(by) if by.get("$natural").and_then(number) == Some(-1) => rows.reverse(),
            Ok(by) if !by.is_empty() && !by.contains_key("$natural") => {
                if is_limited && rows.len() > large::SORTED {
                    return Err(Failure::too_long());
                }
                rows = self.stage("$sort", &by.clone().into(), rows, database)?;
            }
            _ => {}
        }
        let skip = size(command, "skip").unwrap_or(0);
        rows.drain(..skip.min(rows.len()));
        let limit = command.get("limit").and_then(number).unwrap_or(0);
        let most = usize::try_from(limit.abs()).ok().filter(|most| *most > 0).unwrap_or(usize::MAX);
        rows.truncate(most);
        if is_limited && by_id && skip == 0 {
            // A full page ends with its last document.
            let end = rows.last().filter(|_| rows.len() == most);
            let is_read = |row: &Document| {
                is_within(row) && end.is_none_or(|end| compare(row.get("_id"), end.get("_id")).is_le())
            };
            if self.data.get(&namespace).into_iter().flatten().filter(|&row| is_read(row)).count() > large::READ {
                return Err(Failure::too_long());
            }
        }
        if let Ok(spec) = command.get_document("projection") {
            let bound = spec.iter().map(|(path, wanted)| (path.clone(), bind(wanted, &variables)));
            rows = projection::project(&bound.collect(), rows)?;
        }
        let single = limit < 0 || is_set(command, "singleBatch");
        Ok(self.opened(namespace, rows, size(command, "batchSize"), single))
    }

    /// The first batch of these documents, and a cursor for the rest.
    fn opened(&mut self, namespace: String, rows: Vec<Document>, batch: Option<usize>, single: bool) -> Document {
        let mut rows: VecDeque<Document> = rows.into();
        let batch = batch.unwrap_or(FIRST_BATCH).min(rows.len());
        let first: Vec<Document> = rows.drain(..batch).collect();
        let id = if rows.is_empty() || single { 0 } else { self.keep(Cursor::Rows(namespace.clone(), rows)) };
        doc! {"cursor": {"firstBatch": first, "id": id, "ns": namespace}}
    }

    pub fn keep(&mut self, cursor: Cursor) -> i64 {
        let id = self.random.random_range(1..i64::MAX);
        self.cursors.insert(id, cursor);
        id
    }

    pub fn get_more(&mut self, command: &Document, waited: bool, limit: i64) -> Result<Progress> {
        check_options("getMore", command, &["collection", "batchSize"])?;
        let id = command.get_i64("getMore").unwrap_or_default();
        let batch = size(command, "batchSize").filter(|size| *size > 0).unwrap_or(usize::MAX);
        let Some(cursor) = self.cursors.remove(&id) else {
            return Err(Failure::new(43, format!("cursor id {id} not found")));
        };
        match cursor {
            Cursor::Rows(namespace, mut rows) => {
                let next: Vec<Document> = rows.drain(..batch.min(rows.len())).collect();
                let left = if rows.is_empty() { 0 } else { id };
                if left != 0 {
                    self.cursors.insert(id, Cursor::Rows(namespace.clone(), rows));
                }
                Ok(Progress::Done(doc! {"cursor": {"nextBatch": next, "id": left, "ns": namespace}}))
            }
            Cursor::Stream(mut stream) => {
                let next = self.next_events(&mut stream, batch)?;
                let over = stream.over;
                if next.is_empty() && !over && !waited {
                    self.cursors.insert(id, Cursor::Stream(stream));
                    return Ok(Progress::Wait(limit));
                }
                let (token, namespace) = (stream.token(), stream.namespace());
                if !over {
                    self.cursors.insert(id, Cursor::Stream(stream));
                }
                let left = if over { 0 } else { id };
                let cursor = doc! {"nextBatch": next, "postBatchResumeToken": token, "id": left, "ns": namespace};
                Ok(Progress::Done(doc! {"cursor": cursor}))
            }
        }
    }

    pub fn aggregate(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("aggregate", command, &["pipeline", "cursor", "allowDiskUse", "hint", "let"])?;
        let stages = command.get_array("pipeline").cloned().unwrap_or_default();
        let batch = command.get_document("cursor").ok().and_then(|cursor| size(cursor, "batchSize"));
        let whole = matches!(command.get("aggregate"), Some(Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_)));
        let namespace = if whole { format!("{database}.$cmd.aggregate") } else { target(database, command)? };
        let variables = self.variables(command)?;
        let names: Vec<&str> = variables.keys().map(String::as_str).collect();
        let stages: Vec<Bson> = stages.iter().map(|stage| denormd_mql::bind_stage(stage, &names, &variables)).collect();
        if let Some(options) = stages.first().and_then(Bson::as_document).and_then(|stage| stage.get("$changeStream")) {
            let options = options.as_document().cloned().unwrap_or_default();
            let collection = (!whole).then(|| namespace.split_once('.').unwrap_or_default().1.to_owned());
            let stream = Stream::open(self, database, collection, &options, stages[1..].to_vec())?;
            let (token, namespace) = (stream.token(), stream.namespace());
            let id = self.keep(Cursor::Stream(Box::new(stream)));
            let none: Vec<Document> = Vec::new();
            let cursor = doc! {"firstBatch": none, "postBatchResumeToken": token, "id": id, "ns": namespace};
            return Ok(doc! {"cursor": cursor});
        }
        let rows = self.pipeline(database, (!whole).then_some(namespace.as_str()), &stages)?;
        Ok(self.opened(namespace, rows, batch, false))
    }

    fn pipeline(&mut self, database: &str, namespace: Option<&str>, stages: &[Bson]) -> Result<Vec<Document>> {
        let mut stages = stages.iter().map(|stage| {
            let one = stage.as_document().and_then(|stage| stage.iter().next());
            one.ok_or_else(|| Failure::new(14, "a stage is a document"))
        });
        // The documents that the first stage leaves out are not copied.
        let mut rows = Vec::new();
        if let Some(namespace) = namespace {
            match stages.next().transpose()? {
                Some((name, Bson::Document(filter))) if name == "$match" => {
                    rows = self.matching(namespace, filter, None)?.into_iter().cloned().collect();
                }
                first => {
                    rows = self.data.get(namespace).cloned().unwrap_or_default();
                    if let Some((name, argument)) = first {
                        rows = self.source(name, argument, rows, namespace, database)?;
                    }
                }
            }
        }
        for stage in stages {
            let (name, argument) = stage?;
            rows = self.stage(name, argument, rows, database)?;
        }
        Ok(rows)
    }

    /// The first stage of a pipeline, which may be about the collection itself.
    fn source(
        &mut self,
        name: &str,
        argument: &Bson,
        rows: Vec<Document>,
        namespace: &str,
        database: &str,
    ) -> Result<Vec<Document>> {
        if name != "$collStats" {
            return self.stage(name, argument, rows, database);
        }
        if !self.collections.contains_key(namespace) {
            return Err(Failure::new(26, format!("Collection [{namespace}] not found.")));
        }
        let count = i64::try_from(rows.len()).unwrap_or_default();
        let bytes = rows.iter().map(bytes).sum::<i64>();
        let mut out = doc! {"ns": namespace, "host": &self.members[0], "localTime": self.now()};
        for part in argument.as_document().into_iter().flat_map(Document::keys) {
            match part.as_str() {
                "storageStats" => {
                    let average = bytes.checked_div(count).unwrap_or_default();
                    let stats = doc! {
                        "size": bytes, "count": count, "avgObjSize": average, "storageSize": bytes, "totalSize": bytes,
                        "totalIndexSize": 4096_i64, "nindexes": 1,
                    };
                    out.insert("storageStats", stats);
                }
                "count" => drop(out.insert("count", count)),
                other => return Err(Failure::unknown(format_args!("`{other}` of `$collStats`"))),
            }
        }
        Ok(vec![out])
    }

    /// One stage of a pipeline.
    pub fn stage(
        &mut self,
        name: &str,
        argument: &Bson,
        mut rows: Vec<Document>,
        database: &str,
    ) -> Result<Vec<Document>> {
        Ok(match (name, argument) {
            ("$project", Bson::Document(spec)) => projection::project(spec, rows)?,
            ("$set" | "$addFields", Bson::Document(spec)) => projection::set(spec, rows)?,
            ("$unset", argument) => projection::unset(argument, &rows)?,
            ("$replaceRoot", Bson::Document(spec)) => {
                let root = spec.get("newRoot").cloned().unwrap_or(Bson::Null);
                denormd_mql::stage("$replaceWith", &root, rows, &self.data, database)?
            }
            ("$count", Bson::String(_)) if rows.is_empty() => rows,
            ("$count", Bson::String(name)) => vec![doc! {name: i32::try_from(rows.len()).unwrap_or(i32::MAX)}],
            ("$skip", count) => {
                let count = usize::try_from(number(count).unwrap_or_default()).unwrap_or(usize::MAX);
                rows.drain(..count.min(rows.len()));
                rows
            }
            ("$sample", Bson::Document(spec)) => {
                rows.shuffle(&mut self.random);
                rows.truncate(size(spec, "size").unwrap_or(0));
                rows
            }
            ("$group", _) => {
                // The server groups by a plain field in its slot-based engine, which keeps another one of equal values.
                if argument.as_document().is_some_and(|group| matches!(group.get("_id"), Some(Bson::String(_)))) {
                    rows.reverse();
                }
                // The server's groups have no order.
                let mut groups = denormd_mql::stage(name, argument, rows, &self.data, database)?;
                groups.shuffle(&mut self.random);
                groups
            }
            _ => denormd_mql::stage(name, argument, rows, &self.data, database)?,
        })
    }

    pub fn count(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("count", command, &["query", "limit", "skip", "hint", "fields"])?;
        let filter = command.get_document("query").cloned().unwrap_or_default();
        let filter = bind_filter(&filter, &self.variables(command)?);
        let mut count = self.matching(&target(database, command)?, &filter, None)?.len();
        count = count.saturating_sub(size(command, "skip").unwrap_or(0));
        if let Some(limit) = size(command, "limit").filter(|limit| *limit > 0) {
            count = count.min(limit);
        }
        Ok(doc! {"n": i32::try_from(count).unwrap_or(i32::MAX)})
    }

    pub fn distinct(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("distinct", command, &["key", "query"])?;
        let filter = command.get_document("query").cloned().unwrap_or_default();
        let path = Bson::from(format!("${}", command.get_str("key").unwrap_or_default()));
        let mut values: Vec<Bson> = Vec::new();
        for row in self.matching(&target(database, command)?, &filter, None)? {
            let value = denormd_mql::expression(&path, row)?;
            let items = match value {
                Some(Bson::Array(items)) => items,
                value => value.into_iter().collect(),
            };
            for item in items {
                if !values.iter().any(|known| compare(Some(known), Some(&item)).is_eq()) {
                    values.push(item);
                }
            }
        }
        values.sort_by(|a, b| compare(Some(a), Some(b)));
        Ok(doc! {"values": values})
    }
}

/// True if a filter has a condition on `_id`, which its index serves.
fn names_id(filter: &Document) -> bool {
    let inner = |value: &Bson| value.as_array().into_iter().flatten().filter_map(Bson::as_document).any(names_id);
    filter.iter().any(|(name, value)| name == "_id" || (name == "$and" && inner(value)))
}

/// True if a filter compares a field other than `_id` with a string: what it matches depends on the collation.
fn compares_text(filter: &Document) -> bool {
    filter.iter().any(|(name, condition)| match (name.as_str(), condition) {
        ("_id" | "$expr", _) => false,
        ("$and" | "$or" | "$nor", Bson::Array(clauses)) => {
            clauses.iter().filter_map(Bson::as_document).any(compares_text)
        }
        _ => has_text(condition),
    })
}

fn has_text(condition: &Bson) -> bool {
    match condition {
        Bson::String(_) => true,
        Bson::Array(items) => items.iter().any(has_text),
        Bson::Document(inner) => inner.iter().any(|(name, value)| name != "$type" && has_text(value)),
        _ => false,
    }
}

/// True if an option is given as true.
pub fn is_set(options: &Document, name: &str) -> bool {
    options.get_bool(name).unwrap_or(false)
}

/// True if the first error ends a command.
pub fn is_ordered(command: &Document) -> bool {
    command.get_bool("ordered").unwrap_or(true)
}

/// A number without a fraction.
pub fn number(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        #[expect(clippy::cast_possible_truncation, reason = "counts are small")]
        Bson::Double(number) if number.fract() == 0.0 => Some(*number as i64),
        _ => None,
    }
}

/// The time limit of a command in milliseconds, if it has one.
pub fn time_limit(command: &Document) -> Option<i64> {
    command.get("maxTimeMS").and_then(number).filter(|limit| *limit > 0)
}

fn size(command: &Document, name: &str) -> Option<usize> {
    usize::try_from(number(command.get(name)?)?).ok()
}

/// The size of a document.
pub fn bytes(document: &Document) -> i64 {
    let raw = bson::RawDocumentBuf::try_from(document);
    raw.map_or(0, |raw| i64::try_from(raw.as_bytes().len()).unwrap_or_default())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
mod tests {
    use bson::bson;

    use super::*;
    use crate::{Model, UNKNOWN};

    #[tokio::test]
    async fn a_page_that_is_filtered_by_text_has_a_collation() {
        let model = Model::new(1);
        for (database, more, expected) in [
            ("d", doc! {"filter": {"kind": "a"}}, Some(UNKNOWN)),
            ("d", doc! {"filter": {"$or": [{"n": 1}, {"kind": {"$nin": ["a"]}}]}}, Some(UNKNOWN)),
            ("d", doc! {"filter": {"kind": "a"}, "collation": {"locale": "simple"}}, None),
            ("d_state", doc! {"filter": {"kind": "a"}}, None),
            ("d", doc! {"filter": {"_id": "a", "n": 1, "kind": {"$type": "string"}}}, None),
        ] {
            let mut find = doc! {"find": "c", "hint": {"_id": 1}, "$db": database};
            find.extend(more);
            assert_eq!(model.run(find.clone()).await.get_i32("code").ok(), expected, "{find}");
        }
    }

    #[tokio::test]
    async fn the_first_of_equal_values_depends_on_the_engine() {
        let model = Model::new(1);
        let documents = vec![doc! {"_id": 1, "k": 1, "n": 1}, doc! {"_id": 2, "k": 1, "n": 1.0}];
        model.run(doc! {"insert": "c", "documents": documents, "$db": "d"}).await;
        for (key, expected) in [(bson!(["$k"]), bson!(1)), (bson!("$k"), bson!(1.0))] {
            let stages = vec![doc! {"$sort": {"_id": 1}}, doc! {"$group": {"_id": key, "n": {"$min": "$n"}}}];
            let reply = model.run(doc! {"aggregate": "c", "pipeline": stages, "cursor": {}, "$db": "d"}).await;
            let rows = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
            assert_eq!(rows[0].as_document().unwrap().get("n"), Some(&expected));
        }
    }
}
