//! The simulated server answers as a server does: random commands over random documents go to both, and replies, documents
//! and change events must be the same. `DENORMD_SEED` replays, `DENORMD_COMMANDS` draws more.

use std::collections::BTreeMap;

use bson::{Bson, DateTime, Document, Timestamp, bson, doc, oid::ObjectId};
use denormd_simulated::{Model, UNKNOWN};
use mongodb::{ClientSession, Database};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use tokio::sync::Mutex;

use crate::support::seeds::seeds;

/// The commands of one collection.
const LENGTH: u64 = 40;

struct Draw {
    random: StdRng,
    /// Updates may be pipelines.
    pipelines: bool,
}

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.random.random_range(0..n)
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of.choose(&mut self.random).unwrap().clone()
    }

    fn id(&mut self) -> Bson {
        match self.below(12) {
            0 => Bson::Double(f64::from(self.random.random_range(0..4))),
            1 => Bson::Int64(self.random.random_range(0..4)),
            2 => bson!("a"),
            3 => bson!({"a": 1, "b": self.random.random_range(0..2)}),
            4 => ObjectId::from_bytes([1; 12]).into(),
            _ => Bson::Int32(self.random.random_range(0..6)),
        }
    }

    fn scalar(&mut self) -> Bson {
        match self.below(14) {
            0 => Bson::Null,
            1 => Bson::Boolean(self.below(2) == 0),
            2 => Bson::Double(self.pick(&[0.0, -0.0, 1.0, 2.5, f64::NAN])),
            3 => Bson::Int64(self.pick(&[0, 1, 2, i64::MAX])),
            4 | 5 => Bson::from(self.pick(&["", "a", "b", "$a", "$$ROOT"])),
            6 => DateTime::from_millis(self.pick(&[0, 1, 1_700_000_000_000])).into(),
            7 => Bson::Timestamp(Timestamp { time: 3, increment: 1 }),
            8 => ObjectId::from_bytes([self.pick(&[1, 2]); 12]).into(),
            9 => Bson::Int32(i32::MAX),
            _ => Bson::Int32(self.random.random_range(0..4)),
        }
    }

    fn value(&mut self, depth: usize) -> Bson {
        match self.below(if depth > 0 { 8 } else { 4 }) {
            4 | 5 => self.object(depth - 1).into(),
            6 | 7 => {
                let length = self.below(4);
                (0..length).map(|_| self.value(depth - 1)).collect::<Vec<_>>().into()
            }
            _ => self.scalar(),
        }
    }

    fn object(&mut self, depth: usize) -> Document {
        let mut out = Document::new();
        for name in ["x", "y", "z"] {
            if self.below(2) == 0 {
                out.insert(name, self.value(depth));
            }
        }
        out
    }

    fn document(&mut self) -> Document {
        let mut out = doc! {"_id": self.id()};
        out.extend(self.fields());
        out
    }

    fn fields(&mut self) -> Document {
        let mut out = Document::new();
        for name in ["a", "b", "n", "o", "items", "tags"] {
            if self.below(4) == 0 {
                continue;
            }
            let value = match name {
                _ if self.below(8) == 0 => self.value(2),
                "n" => self.pick(&[bson!(1), bson!(2), bson!(2.5), Bson::Int64(7), bson!(3)]),
                "o" => self.object(1).into(),
                "items" => {
                    let length = self.below(4);
                    (0..length).map(|_| Bson::Document(self.object(1))).collect::<Vec<_>>().into()
                }
                "tags" => {
                    let length = self.below(4);
                    (0..length).map(|_| self.scalar()).collect::<Vec<_>>().into()
                }
                _ => self.value(1),
            };
            out.insert(name, value);
        }
        out
    }

    fn path(&mut self) -> String {
        let paths = [
            "a",
            "b",
            "n",
            "o",
            "o.x",
            "o.y",
            "o.x.y",
            "a.x",
            "items",
            "items.0",
            "items.1.x",
            "items.3",
            "tags",
            "tags.0",
            "tags.5",
            "c",
            "c.d.e",
        ];
        self.pick(&paths).to_owned()
    }

    /// A path without the index of an element.
    fn name(&mut self) -> String {
        self.pick(&["a", "b", "n", "o", "o.x", "o.y", "o.x.y", "items", "items.x", "items.y.z", "tags", "c"]).to_owned()
    }

    fn condition(&mut self) -> Bson {
        let value = self.value(1);
        match self.below(14) {
            0 => doc! {"$gt": value}.into(),
            1 => doc! {"$lte": value}.into(),
            2 => doc! {"$ne": value}.into(),
            3 => doc! {"$in": [value, self.scalar()]}.into(),
            4 => doc! {"$exists": self.below(2) == 0}.into(),
            5 => doc! {"$type": self.pick(&["array", "object", "int", "number", "null", "date"])}.into(),
            6 => doc! {"$not": {"$type": "array"}}.into(),
            // By number, from a double to a 64-bit integer.
            10 => doc! {"$type": self.random.random_range(1..=18_i32)}.into(),
            7 => doc! {"$elemMatch": {"x": self.scalar()}}.into(),
            8 => doc! {"$not": {"$lt": value}}.into(),
            9 => doc! {"$eq": value, "$not": {"$type": "array"}}.into(),
            _ => doc! {"$eq": value}.into(),
        }
    }

    fn filter(&mut self) -> Document {
        match self.below(12) {
            0..=3 => doc! {"_id": self.id()},
            4 => doc! {"_id": {"$in": [self.id(), self.id(), self.id()]}},
            5 => doc! {"$and": [{"_id": {"$gte": self.id()}}, {self.name(): self.condition()}]},
            6 => doc! {"$or": [{self.name(): self.condition()}, {self.name(): self.condition()}]},
            7 => doc! {"$nor": [{self.name(): self.condition()}]},
            8 => doc! {"$expr": {"$eq": [format!("${}", self.name()), {"$literal": self.scalar()}]}},
            9 => doc! {},
            _ => doc! {self.name(): self.condition()},
        }
    }

    fn modifiers(&mut self) -> Document {
        let mut out = Document::new();
        for _ in 0..=self.below(3) {
            let operator = self.pick(&[
                "$set",
                "$set",
                "$set",
                "$unset",
                "$inc",
                "$min",
                "$max",
                "$push",
                "$addToSet",
                "$pull",
                "$setOnInsert",
            ]);
            let path = self.path();
            let argument = match operator {
                "$unset" => bson!(""),
                "$inc" => self.pick(&[bson!(1), bson!(2.5), Bson::Int64(3)]),
                "$push" => match self.below(4) {
                    0 => doc! {"$each": [self.scalar(), self.scalar()], "$position": self.random.random_range(0..3)}
                        .into(),
                    1 => doc! {"$each": [self.value(1)]}.into(),
                    _ => self.value(1),
                },
                "$pull" => match self.below(3) {
                    0 => doc! {"$in": [self.scalar(), self.scalar()]}.into(),
                    1 => doc! {"x": self.scalar()}.into(),
                    _ => self.scalar(),
                },
                _ => self.value(2),
            };
            let fields = out.entry(operator.to_owned()).or_insert_with(|| Document::new().into());
            if let Bson::Document(fields) = fields {
                fields.insert(path, argument);
            }
        }
        out
    }

    fn stages(&mut self) -> Vec<Document> {
        let mut out = Vec::new();
        // A field that is removed and set again keeps its old place on the server, so fields are removed last.
        for last in [false, true].into_iter().skip(self.below(2)) {
            let (path, from) = (self.name(), format!("${}", self.name()));
            out.push(match self.below(6) {
                0 if last => doc! {"$unset": path},
                _ if !last => doc! {"$set": {path: {"$literal": self.value(2)}}},
                0 | 1 => doc! {"$set": {path: {"$literal": self.value(2)}}},
                2 => doc! {"$set": {path: {"$ifNull": [from, "none"]}}},
                3 => doc! {"$set": {path: {"$concatArrays": [{"$cond": [{"$isArray": [&from]}, &from, []]}, [1]]}}},
                4 => doc! {"$set": {path: {"$cond": [{"$gt": [from, 1]}, "$$REMOVE", "$n"]}}},
                _ => doc! {"$set": {path: from}},
            });
        }
        out
    }

    fn statement(&mut self) -> Document {
        let mut statement = doc! {"q": self.filter()};
        match self.below(10) {
            0 => drop(statement.insert("u", self.fields())),
            1 | 2 if self.pipelines => drop(statement.insert("u", self.stages())),
            3 => {
                let path = self.pick(&["items.$[e].x", "items.$[e].y.z", "items.$[e]", "items.$[].x", "tags.$[]"]);
                let operator = self.pick(&["$set", "$unset"]);
                statement.insert("u", doc! {operator: {path: self.scalar()}});
                if path.contains("$[e]") {
                    let filter = match self.below(2) {
                        0 => doc! {"e.x": self.condition()},
                        _ => doc! {"e": {"$type": "object"}, "e.y": {"$exists": true}},
                    };
                    statement.insert("arrayFilters", vec![filter]);
                }
            }
            _ => drop(statement.insert("u", self.modifiers())),
        }
        let replaces =
            statement.get_document("u").is_ok_and(|u| !u.keys().next().is_some_and(|name| name.starts_with('$')));
        if !replaces && self.below(2) == 0 {
            statement.insert("multi", true);
        }
        // Elsewhere a new document would get an `_id` of the server's choice.
        let has_id =
            statement.get_document("q").is_ok_and(|q| q.get("_id").is_some_and(|id| !id.to_string().contains('$')));
        if has_id && self.below(3) == 0 {
            statement.insert("upsert", true);
        }
        statement
    }

    fn command(&mut self, collection: &str) -> Document {
        let ordered = self.below(2) == 0;
        match self.below(16) {
            0..=3 => {
                let count = 1 + self.below(2);
                let documents: Vec<Document> = (0..count).map(|_| self.document()).collect();
                doc! {"insert": collection, "documents": documents, "ordered": ordered}
            }
            4..=8 => {
                let count = 1 + self.below(2);
                let updates: Vec<Document> = (0..count).map(|_| self.statement()).collect();
                doc! {"update": collection, "updates": updates, "ordered": ordered}
            }
            9 => doc! {"delete": collection, "deletes": [{"q": self.filter(), "limit": 0}]},
            10 => {
                let filter = doc! {"_id": self.id()};
                let piped = self.pipelines && self.below(2) == 0;
                let update: Bson = if piped { self.stages().into() } else { self.modifiers().into() };
                doc! {"findAndModify": collection, "query": filter, "update": update, "new": ordered, "upsert": self.below(2) == 0}
            }
            11 | 12 => {
                let mut find = doc! {"find": collection, "filter": self.filter(), "collation": {"locale": "simple"}};
                if self.below(2) == 0 {
                    find.insert("sort", doc! {self.pick(&["a", "n", "o.x"]): self.pick(&[1, -1]), "_id": 1});
                    find.insert("limit", self.random.random_range(1..5));
                } else if self.below(3) == 0 {
                    find.insert("hint", doc! {"_id": 1});
                    find.insert(self.pick(&["min", "max"]), doc! {"_id": self.id()});
                    find.insert("limit", self.random.random_range(1..5));
                }
                if self.below(2) == 0 {
                    let path = self.name();
                    let flag = i32::from(self.below(2) == 0);
                    find.insert("projection", doc! {path: flag});
                }
                find
            }
            13 => doc! {"count": collection, "query": self.filter()},
            _ => {
                let mut pipeline = vec![doc! {"$match": self.filter()}, doc! {"$sort": {"_id": 1}}];
                let path = self.name();
                pipeline.push(match self.below(6) {
                    0 => doc! {"$project": {path: 1, "v": format!("${}", self.name())}},
                    1 => doc! {"$addFields": {path: format!("${}", self.name())}},
                    2 => doc! {"$unwind": format!("${}", self.pick(&["items", "tags", "a"]))},
                    3 => doc! {"$replaceWith": {"k": "$_id", "v": format!("${path}")}},
                    4 => doc! {"$group": {"_id": null, "n": {"$sum": 1}, "all": {"$push": format!("${path}")}}},
                    _ => doc! {"$count": "n"},
                });
                doc! {"aggregate": collection, "pipeline": pipeline, "cursor": {}}
            }
        }
    }
}

/// The parts of a reply that must be the same. Rows without an order are sorted.
fn essence(command: &Document, reply: &Document) -> Document {
    let mut out = Document::new();
    for name in ["ok", "n", "nModified", "upserted", "value", "lastErrorObject"] {
        out.extend(reply.get(name).map(|value| (name.to_owned(), value.clone())));
    }
    // Of the errors of expressions, only that there is one: the model has no table of their codes.
    let by_expression = command.to_string().contains("$expr") || command.contains_key("aggregate") || {
        let statements = command.get_array("updates").into_iter().flatten().filter_map(Bson::as_document);
        let pipelines = statements.filter(|statement| matches!(statement.get("u"), Some(Bson::Array(_)))).count();
        pipelines > 0 || matches!(command.get("update"), Some(Bson::Array(_)))
    };
    let code =
        |error: &Document| if by_expression { Bson::Null } else { error.get("code").cloned().unwrap_or(Bson::Null) };
    if reply.contains_key("code") {
        out.insert("code", code(reply));
    }
    let errors = reply.get_array("writeErrors").into_iter().flatten().filter_map(Bson::as_document);
    let errors: Vec<Document> =
        errors.map(|error| doc! {"index": error.get("index").cloned(), "code": code(error)}).collect();
    out.insert("writeErrors", errors);
    if let Ok(cursor) = reply.get_document("cursor") {
        let rows = cursor.get_array("firstBatch").cloned().unwrap_or_default();
        let mut rows: Vec<String> = rows.iter().map(exact).collect();
        if command.contains_key("find") && !command.contains_key("sort") && !command.contains_key("hint") {
            rows.sort();
        }
        out.insert("rows", rows);
    }
    out
}

/// A value with its types.
fn exact(value: &Bson) -> String {
    value.clone().into_canonical_extjson().to_string()
}

/// An event without what differs from server to server. How the server describes an update by a pipeline depends on the
/// sizes of the descriptions: only whether there is an event is compared.
fn plain(event: &Document, pipelines: bool) -> String {
    if pipelines && event.get_str("operationType").is_ok_and(|kind| ["update", "replace"].contains(&kind)) {
        return format!("a write to {:?}", event.get_document("documentKey"));
    }
    let mut out: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in
        event.iter().filter(|(name, _)| !["_id", "clusterTime", "wallTime", "ns"].contains(&name.as_str()))
    {
        match value {
            Bson::Document(description) if name == "updateDescription" => {
                let fields = description.get_document("updatedFields").into_iter().flatten();
                let fields: BTreeMap<&String, String> = fields.map(|(name, value)| (name, exact(value))).collect();
                let mut removed: Vec<String> =
                    description.get_array("removedFields").unwrap().iter().map(ToString::to_string).collect();
                removed.sort();
                let truncated = description.get_array("truncatedArrays").unwrap();
                out.insert(name.clone(), format!("{fields:?} {removed:?} {truncated:?}"));
            }
            value => drop(out.insert(name.clone(), exact(value))),
        }
    }
    format!("{out:?}")
}

struct Both {
    model: Model,
    db: Database,
    /// A cursor belongs to the session that opened it, and without a session of our own each command takes any of the driver's
    /// pool. The driver sends no session with `killCursors`.
    session: Mutex<ClientSession>,
}

impl Both {
    async fn on_model(&self, mut command: Document) -> Document {
        command.insert("$db", self.db.name());
        self.model.run(command).await
    }

    async fn on_server(&self, command: &Document) -> Document {
        let run = self.db.run_command(command.clone());
        let reply = if command.contains_key("killCursors") {
            run.await
        } else {
            run.session(&mut *self.session.lock().await).await
        };
        match reply {
            Ok(reply) => reply,
            Err(error) => match *error.kind {
                mongodb::error::ErrorKind::Command(error) => {
                    doc! {"ok": 0.0, "code": error.code, "errmsg": error.message}
                }
                kind => panic!("{kind} for {command}"),
            },
        }
    }

    /// All events of a collection since a stream was opened at these times.
    async fn events(&self, collection: &str, since: [Timestamp; 2], pipelines: bool) -> [Vec<String>; 2] {
        let mut all = [Vec::new(), Vec::new()];
        for (side, since) in since.into_iter().enumerate() {
            let stream = doc! {"startAtOperationTime": since, "fullDocumentBeforeChange": "whenAvailable"};
            let open = doc! {"aggregate": 1, "pipeline": [{"$changeStream": stream}, {"$match": {"ns.coll": collection}}], "cursor": {}};
            let run = async |command: &Document| match side {
                0 => self.on_model(command.clone()).await,
                _ => self.on_server(command).await,
            };
            let mut reply = run(&open).await;
            loop {
                let cursor = reply.get_document("cursor").unwrap_or_else(|_| panic!("{reply}"));
                let batch = cursor.get_array("firstBatch").or_else(|_| cursor.get_array("nextBatch")).unwrap();
                let id = cursor.get_i64("id").unwrap();
                all[side].extend(batch.iter().map(|event| plain(event.as_document().unwrap(), pipelines)));
                if cursor.contains_key("nextBatch") && batch.is_empty() {
                    run(&doc! {"killCursors": "$cmd.aggregate", "cursors": [id]}).await;
                    break;
                }
                let more = doc! {"getMore": id, "collection": "$cmd.aggregate", "batchSize": 1000, "maxTimeMS": 10};
                reply = run(&more).await;
            }
        }
        all
    }

    async fn documents(&self, collection: &str) -> [Vec<String>; 2] {
        let find = doc! {"find": collection, "sort": {"_id": 1}, "batchSize": 1000};
        [self.on_model(find.clone()).await, self.on_server(&find).await].map(|reply| {
            let rows = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
            rows.iter().map(exact).collect()
        })
    }
}

fn time(reply: &Document) -> Timestamp {
    reply.get_timestamp("operationTime").unwrap()
}

/// Runs the commands of one seed on both. Returns the number of commands, and of those that the model does not know.
async fn compare(both: &Both, seed: u64) -> Result<(u64, u64), String> {
    let mut draw = Draw { random: StdRng::seed_from_u64(seed), pipelines: seed % 4 >= 2 };
    let collection = format!("m{seed}");
    let create = doc! {"create": &collection, "changeStreamPreAndPostImages": {"enabled": seed.is_multiple_of(2)}};
    let since = [time(&both.on_model(create.clone()).await), time(&both.on_server(&create).await)];
    let (mut done, mut unknown) = (0, 0);
    for _ in 0..LENGTH {
        let command = draw.command(&collection);
        let reply = both.on_model(command.clone()).await;
        if reply.get_i32("code").is_ok_and(|code| code == UNKNOWN) {
            unknown += 1;
            // A part of the command may have run.
            if command.keys().next().is_some_and(|name| ["update", "findAndModify", "delete"].contains(&name.as_str()))
            {
                return Ok((done, unknown));
            }
            continue;
        }
        let expected = both.on_server(&command).await;
        done += 1;
        let [mine, theirs] = [&reply, &expected].map(|reply| essence(&command, reply));
        if mine.to_string() != theirs.to_string() {
            return Err(format!("{command}\n  model  {mine}\n  server {theirs}"));
        }
        let [mine, theirs] = both.documents(&collection).await;
        if mine != theirs {
            return Err(format!("after {command}\n{}", first_difference(&mine, &theirs)));
        }
    }
    let [mine, theirs] = both.events(&collection, since, draw.pipelines).await;
    if mine != theirs {
        return Err(format!("the events\n{}", first_difference(&mine, &theirs)));
    }
    both.on_server(&doc! {"drop": &collection}).await;
    Ok((done, unknown))
}

fn first_difference(mine: &[String], theirs: &[String]) -> String {
    let at = mine.iter().zip(theirs).position(|(mine, theirs)| mine != theirs).unwrap_or(mine.len().min(theirs.len()));
    let at = |of: &[String]| of.get(at).cloned().unwrap_or_else(|| "nothing".to_owned());
    format!("  model  {}\n  server {}", at(mine), at(theirs))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_answers_as_a_server_does() {
    let test = denormd_fixture::database().await;
    let session = Mutex::new(test.client.start_session().await.unwrap());
    let both = Both { model: Model::new(1), db: test.database(), session };
    let (mut done, mut unknown) = (0, 0);
    let wanted = seeds("DENORMD_COMMANDS", 3000);
    let one = std::env::var("DENORMD_SEED").is_ok();
    let mut differences = Vec::new();
    for seed in wanted.start.. {
        match compare(&both, seed).await {
            Ok((more, refused)) => (done, unknown) = (done + more, unknown + refused),
            Err(difference) => differences.push(format!("DENORMD_SEED={seed}: {difference}")),
        }
        if one || done >= wanted.end - wanted.start || differences.len() >= 20 {
            break;
        }
    }
    println!("{done} commands compared, {unknown} unknown to the model, {} differences", differences.len());
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(unknown * 4 <= done || one, "the model does not know {:#?}", both.model.unknown());
}
