//! `insert`, `update`, `delete` and `findAndModify`.

use bson::{Bson, Document, doc};
use denormd_mql::{compare, matches};

use crate::{
    large,
    oplog::Change,
    read::{is_ordered, is_set},
    replies::{Failure, Result, TOO_LONG},
    state::{State, bind_filter, check_options, target},
    update::{Outcome, Statement, check, with_id},
};

/// The result of one update statement.
#[derive(Default)]
struct Updated {
    matched: i32,
    modified: i32,
    inserted: Option<Bson>,
    /// The document before and after, for `findAndModify`.
    before: Option<Document>,
    after: Option<Document>,
}

impl State {
    pub fn insert(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("insert", command, &["documents", "ordered", "bypassDocumentValidation"])?;
        let namespace = target(database, command)?;
        let mut inserted = 0;
        let mut errors = Vec::new();
        for (nth, document) in command.get_array("documents").into_iter().flatten().enumerate() {
            let Bson::Document(document) = document else { return Err(Failure::new(9, "a document is a document")) };
            match self.insert_one(&namespace, document.clone()) {
                Ok(_) => inserted += 1,
                Err(failure) if failure.code == crate::UNKNOWN => return Err(failure),
                Err(failure) => {
                    errors.push(failure.of_statement(nth));
                    if is_ordered(command) {
                        break;
                    }
                }
            }
        }
        let mut reply = doc! {"n": inserted};
        if !errors.is_empty() {
            reply.insert("writeErrors", errors);
        }
        Ok(reply)
    }

    fn insert_one(&mut self, namespace: &str, document: Document) -> Result<Bson> {
        let id = match document.get("_id") {
            Some(Bson::Array(_) | Bson::RegularExpression(_) | Bson::Undefined) => {
                return Err(Failure::new(53, "the '_id' value cannot be of this type"));
            }
            Some(id) => id.clone(),
            None => self.object_id().into(),
        };
        let document = with_id(id.clone(), document);
        if crate::read::bytes(&document) > 16 << 20 {
            return Err(Failure::new(10334, "object to insert too large"));
        }
        self.create(namespace, Document::new());
        self.check_unique(namespace, &document, None)?;
        self.record(namespace, None, Some(&document));
        self.data.entry(namespace.to_owned()).or_default().push(document.clone());
        self.emit(namespace, Change::Insert(document));
        Ok(id)
    }

    /// Fails if another document has the same values in a unique index; `at` is the place of the document itself.
    fn check_unique(&self, namespace: &str, document: &Document, at: Option<usize>) -> Result<()> {
        let Some(meta) = self.collections.get(namespace) else { return Ok(()) };
        let rows = self.data.get(namespace).map(Vec::as_slice).unwrap_or_default();
        for index in &meta.indexes {
            let name = index.get_str("name").unwrap_or_default();
            if name != "_id_" && !is_set(index, "unique") {
                continue;
            }
            let partial = index.get_document("partialFilterExpression").ok();
            let indexed = |row: &Document| partial.map_or(Ok(true), |filter| matches(filter, row));
            let keys = index.get_document("key").cloned().unwrap_or_default();
            if !indexed(document)? {
                continue;
            }
            let values = |row: &Document| {
                keys.keys()
                    .map(|path| denormd_mql::expression(&format!("${path}").into(), row))
                    .collect::<Result<Vec<_>, _>>()
            };
            let mine = values(document)?;
            if name != "_id_" && mine.iter().flatten().any(|value| matches!(value, Bson::Array(_))) {
                return Err(Failure::unknown("a unique index on an array"));
            }
            if is_set(index, "sparse") && mine.iter().all(Option::is_none) {
                continue;
            }
            for (nth, row) in rows.iter().enumerate() {
                // A missing value is null in an index.
                let null = Some(Bson::Null);
                let same = |(a, b): (&Option<Bson>, &Option<Bson>)| {
                    compare(a.as_ref().or(null.as_ref()), b.as_ref().or(null.as_ref())).is_eq()
                };
                if Some(nth) != at && indexed(row)? && mine.iter().zip(&values(row)?).all(same) {
                    let values = keys.keys().cloned().zip(mine.into_iter().map(|value| value.unwrap_or(Bson::Null)));
                    return Err(Failure::duplicate(namespace, index, &values.collect()));
                }
            }
        }
        Ok(())
    }

    pub fn update(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("update", command, &["updates", "ordered", "let", "bypassDocumentValidation"])?;
        let namespace = target(database, command)?;
        let variables = self.variables(command)?;
        let most = if self.is_limited(&namespace, command) { large::MATCHED } else { usize::MAX };
        let (mut matched, mut modified) = (0, 0);
        let (mut errors, mut upserted) = (Vec::new(), Vec::new());
        for (nth, statement) in command.get_array("updates").into_iter().flatten().enumerate() {
            let Bson::Document(statement) = statement else { return Err(Failure::new(9, "a statement is a document")) };
            match self.update_one(&namespace, statement, &variables, most) {
                Ok(done) => {
                    matched += done.matched;
                    modified += done.modified;
                    if let Some(id) = done.inserted {
                        matched += 1;
                        upserted.push(doc! {"index": i32::try_from(nth).unwrap_or(i32::MAX), "_id": id});
                    }
                }
                Err(failure) if [crate::UNKNOWN, TOO_LONG].contains(&failure.code) => return Err(failure),
                Err(failure) => {
                    errors.push(failure.of_statement(nth));
                    if is_ordered(command) {
                        break;
                    }
                }
            }
        }
        let mut reply = doc! {"n": matched, "nModified": modified};
        if !upserted.is_empty() {
            reply.insert("upserted", upserted);
        }
        if !errors.is_empty() {
            reply.insert("writeErrors", errors);
        }
        Ok(reply)
    }

    /// The places of the documents that a filter matches, in the order of `_id` where its index would be used.
    fn places(&self, namespace: &str, filter: &Document, hint: Option<&Bson>) -> Result<Vec<usize>> {
        let rows = self.data.get(namespace).map(Vec::as_slice).unwrap_or_default();
        let found = self.matching(namespace, filter, hint)?;
        let place = |row: &Document| rows.iter().position(|other| std::ptr::eq(other, row));
        Ok(found.into_iter().filter_map(place).collect())
    }

    /// Fails if the statement matches more than `most` documents, once these are written.
    fn update_one(
        &mut self,
        namespace: &str,
        statement: &Document,
        variables: &Document,
        most: usize,
    ) -> Result<Updated> {
        check_options("updates", statement, &["q", "u", "multi", "upsert", "arrayFilters", "hint", "c"])?;
        let query = statement.get_document("q").cloned().unwrap_or_default();
        let query = bind_filter(&query, variables);
        let filters: Vec<Document> =
            statement.get_array("arrayFilters").into_iter().flatten().filter_map(Bson::as_document).cloned().collect();
        let Some(update) = statement.get("u") else { return Err(Failure::new(9, "a statement has an update")) };
        check(update)?;
        let apply = Statement {
            update,
            filters: &filters,
            variables,
            now: self.now(),
            cluster_time: self.last,
            inserts: false,
        };
        let mut places = self.places(namespace, &query, statement.get("hint"))?;
        if !is_set(statement, "multi") {
            places.truncate(1);
        }
        let takes_too_long = places.len() > most;
        places.truncate(most);
        let mut done = Updated::default();
        for at in &places {
            let before = self.data[namespace][*at].clone();
            done.matched += 1;
            let outcome = apply.apply(&before)?;
            let keeps = self.collections.get(namespace).is_some_and(crate::state::Meta::keeps_pre_images);
            let image = keeps.then(|| before.clone());
            let (after, change) = match outcome {
                Outcome::Same => {
                    done.after = Some(before.clone());
                    done.before = Some(before);
                    continue;
                }
                Outcome::Replaced(after) => (after.clone(), Change::Replace { document: after, before: image }),
                Outcome::Changed(after, changes) => {
                    let id = after.get("_id").cloned().unwrap_or(Bson::Null);
                    (after, Change::Update { id, changes, before: image })
                }
            };
            self.check_unique(namespace, &after, Some(*at))?;
            self.record(namespace, Some(&before), Some(&after));
            done.modified += 1;
            (done.before, done.after) = (Some(before), Some(after.clone()));
            if let Some(rows) = self.data.get_mut(namespace) {
                rows[*at] = after;
            }
            self.emit(namespace, change);
        }
        if takes_too_long {
            return Err(Failure::too_long());
        }
        if places.is_empty() && is_set(statement, "upsert") {
            let mut start = Document::new();
            if !is_replacement(update) {
                equalities(&query, &mut start)?;
            } else if let Some(id) = query.get("_id") {
                start.insert("_id", id.clone());
            }
            let new = Statement { inserts: true, ..apply }.apply(&start)?;
            let document = match new {
                Outcome::Same => start,
                Outcome::Replaced(document) | Outcome::Changed(document, _) => document,
            };
            done.inserted = Some(self.insert_one(namespace, document)?);
            done.after = self.data.get(namespace).and_then(|rows| rows.last()).cloned();
        }
        Ok(done)
    }

    pub fn delete(&mut self, database: &str, command: &Document) -> Result<Document> {
        check_options("delete", command, &["deletes", "ordered", "let"])?;
        let namespace = target(database, command)?;
        let variables = self.variables(command)?;
        let mut deleted = 0;
        let mut errors = Vec::new();
        for (nth, statement) in command.get_array("deletes").into_iter().flatten().enumerate() {
            let Bson::Document(statement) = statement else { return Err(Failure::new(9, "a statement is a document")) };
            match self.delete_some(&namespace, statement, &variables) {
                Ok(done) => deleted += done,
                Err(failure) if failure.code == crate::UNKNOWN => return Err(failure),
                Err(failure) => {
                    errors.push(failure.of_statement(nth));
                    if is_ordered(command) {
                        break;
                    }
                }
            }
        }
        let mut reply = doc! {"n": deleted};
        if !errors.is_empty() {
            reply.insert("writeErrors", errors);
        }
        Ok(reply)
    }

    fn delete_some(&mut self, namespace: &str, statement: &Document, variables: &Document) -> Result<i32> {
        check_options("deletes", statement, &["q", "limit", "hint"])?;
        let query = bind_filter(&statement.get_document("q").cloned().unwrap_or_default(), variables);
        let mut places = self.places(namespace, &query, statement.get("hint"))?;
        if statement.get("limit").and_then(crate::read::number) == Some(1) {
            places.truncate(1);
        }
        let ids: Vec<Option<Bson>> = places.iter().map(|at| self.data[namespace][*at].get("_id").cloned()).collect();
        for id in &ids {
            self.remove(namespace, id.as_ref());
        }
        Ok(i32::try_from(ids.len()).unwrap_or(i32::MAX))
    }

    fn remove(&mut self, namespace: &str, id: Option<&Bson>) {
        let Some(rows) = self.data.get_mut(namespace) else { return };
        let Some(at) = rows.iter().position(|row| compare(row.get("_id"), id).is_eq()) else { return };
        let row = rows.remove(at);
        self.record(namespace, Some(&row), None);
        let keeps = self.collections.get(namespace).is_some_and(crate::state::Meta::keeps_pre_images);
        let id = row.get("_id").cloned().unwrap_or(Bson::Null);
        self.emit(namespace, Change::Delete { id, before: keeps.then_some(row) });
    }

    pub fn find_and_modify(&mut self, database: &str, command: &Document) -> Result<Document> {
        let known = ["query", "update", "new", "upsert", "remove", "sort", "fields", "arrayFilters", "let"];
        check_options("findAndModify", command, &known)?;
        let namespace = target(database, command)?;
        let variables = self.variables(command)?;
        let query = command.get_document("query").cloned().unwrap_or_default();
        // The chosen document alone, by its `_id`.
        let mut one = query.clone();
        if let Ok(by) = command.get_document("sort") {
            let filter = bind_filter(&query, &variables);
            let rows = self.matching(&namespace, &filter, None)?.into_iter().cloned().collect();
            let rows = self.stage("$sort", &by.clone().into(), rows, database)?;
            if let Some(first) = rows.first() {
                one = doc! {"_id": first.get("_id").cloned()};
            }
        }
        let fields = |document: Option<Document>| -> Result<Bson> {
            let (Some(document), Ok(spec)) = (&document, command.get_document("fields")) else {
                return Ok(document.map_or(Bson::Null, Bson::Document));
            };
            let mut rows = crate::projection::project(spec, vec![document.clone()])?;
            Ok(rows.remove(0).into())
        };
        if is_set(command, "remove") {
            let filter = bind_filter(&one, &variables);
            let found = self.matching(&namespace, &filter, None)?.first().map(|row| (*row).clone());
            if let Some(found) = &found {
                self.remove(&namespace, found.get("_id"));
            }
            let n = i32::from(found.is_some());
            return Ok(doc! {"lastErrorObject": {"n": n}, "value": fields(found)?});
        }
        let mut statement = doc! {"q": one, "u": command.get("update").cloned()};
        for name in ["upsert", "arrayFilters"] {
            if let Some(value) = command.get(name) {
                statement.insert(name, value.clone());
            }
        }
        let done = self.update_one(&namespace, &statement, &variables, usize::MAX)?;
        let n = done.matched + i32::from(done.inserted.is_some());
        let mut last = doc! {"n": n, "updatedExisting": done.matched > 0};
        if let Some(id) = done.inserted {
            last.insert("upserted", id);
        }
        let value = if is_set(command, "new") { done.after } else { done.before };
        Ok(doc! {"lastErrorObject": last, "value": fields(value)?})
    }
}

fn is_replacement(update: &Bson) -> bool {
    update.as_document().is_some_and(|update| !update.keys().next().is_some_and(|name| name.starts_with('$')))
}

/// The fields that a new document gets from a filter.
fn equalities(filter: &Document, into: &mut Document) -> Result<()> {
    for (name, condition) in filter {
        let operators = condition.as_document().filter(|inner| {
            inner
                .keys()
                .next()
                .is_some_and(|name| name.starts_with('$') && !["$ref", "$id", "$db"].contains(&name.as_str()))
        });
        let value = match (name.as_str(), operators) {
            ("$and", _) => {
                for clause in condition.as_array().into_iter().flatten().filter_map(Bson::as_document) {
                    equalities(clause, into)?;
                }
                continue;
            }
            (name, _) if name.starts_with('$') => continue,
            (_, None) => condition.clone(),
            (_, Some(operators)) => match (operators.get("$eq"), operators.get("$in").and_then(Bson::as_array)) {
                (Some(value), _) => value.clone(),
                (None, Some(one)) if one.len() == 1 => one[0].clone(),
                _ => continue,
            },
        };
        let mut inside = &mut *into;
        let mut path = name.split('.').peekable();
        while let Some(step) = path.next() {
            if path.peek().is_none() {
                inside.insert(step, value);
                break;
            }
            let next = inside.entry(step.to_owned()).or_insert_with(|| Document::new().into());
            let Bson::Document(next) = next else { return Err(Failure::new(54, "cannot infer query fields to set")) };
            inside = next;
        }
    }
    Ok(())
}
