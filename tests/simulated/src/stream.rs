//! Change streams.

use bson::{Bson, DateTime, Document, Timestamp, doc};
use rand::Rng;

use crate::{
    diff::Changes,
    oplog::{Change, Entry},
    replies::{Failure, Result},
    state::State,
};

/// A place in the oplog, ordered like it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    time: Timestamp,
    /// 0 before the entries of this time, and 1 + the number of an entry after it.
    after: u32,
}

/// An open change stream.
#[derive(Debug)]
pub struct Stream {
    database: String,
    collection: Option<String>,
    before: Images,
    /// Events are also sent for the creation of collections and the like.
    expanded: bool,
    stages: Vec<Bson>,
    place: Place,
    /// The index of the next oplog entry.
    next: usize,
    /// It has ended with an `invalidate` event, which may still have to be sent.
    invalidate: Option<Place>,
    pub over: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Images {
    Off,
    WhenAvailable,
}

impl Place {
    /// The layout of the server in its first bytes, from which the time can be read.
    fn token(self, invalidates: bool) -> Document {
        let Self { time, after } = self;
        let kind = if invalidates { "F0" } else { "29" };
        doc! {"_data": format!("82{:08X}{:08X}{kind}{after:08X}", time.time, time.increment)}
    }

    fn of(token: &Document) -> Result<Self> {
        let invalid = || Failure::new(260, "the resume token is not one of this server");
        let data = token.get_str("_data").map_err(|_| invalid())?;
        let number =
            |range| data.get(range).and_then(|digits| u32::from_str_radix(digits, 16).ok()).ok_or_else(invalid);
        Ok(Self { time: Timestamp { time: number(2..10)?, increment: number(10..18)? }, after: number(20..28)? })
    }
}

impl Stream {
    pub fn open(
        state: &State,
        database: &str,
        collection: Option<String>,
        options: &Document,
        stages: Vec<Bson>,
    ) -> Result<Self> {
        let mut place = Place { time: state.committed_time(), after: u32::MAX };
        let (mut before, mut expanded) = (Images::Off, false);
        for (name, value) in options {
            match (name.as_str(), value) {
                ("resumeAfter" | "startAfter", Bson::Document(token)) => place = Place::of(token)?,
                ("startAtOperationTime", Bson::Timestamp(time)) => place = Place { time: *time, after: 0 },
                ("fullDocumentBeforeChange", Bson::String(wanted)) if wanted == "whenAvailable" => {
                    before = Images::WhenAvailable;
                }
                ("showExpandedEvents", Bson::Boolean(flag)) => expanded = *flag,
                ("fullDocument", Bson::String(wanted)) if wanted == "default" => {}
                (name, value) => return Err(Failure::unknown(format_args!("`{name}: {value}` of `$changeStream`"))),
            }
        }
        if place.time < state.first {
            let lost = Failure::new(
                286,
                "Resume of change stream was not possible, as the resume point may no longer be in the oplog.",
            );
            return Err(lost.with("errorLabels", vec!["NonResumableChangeStreamError"]));
        }
        let next = state.oplog.partition_point(|entry| entry.place() <= place);
        let database = database.to_owned();
        Ok(Self { database, collection, before, expanded, stages, place, next, invalidate: None, over: false })
    }

    pub fn namespace(&self) -> String {
        format!("{}.{}", self.database, self.collection.as_deref().unwrap_or("$cmd.aggregate"))
    }

    /// The token after the last batch.
    pub fn token(&self) -> Document {
        self.place.token(self.over)
    }

    fn wants(&self, entry: &Entry) -> bool {
        let named = self.collection.as_ref().is_none_or(|name| *name == entry.collection);
        let renamed = matches!(&entry.change, Change::Rename { to: (database, collection), .. }
            if *database == self.database && self.collection.as_ref() == Some(collection));
        let here = entry.database == self.database && (named || matches!(entry.change, Change::DropDatabase));
        here || renamed
    }
}

impl Entry {
    fn place(&self) -> Place {
        Place { time: self.time, after: self.nth + 1 }
    }

    /// The event of this entry, if there is one.
    fn event(&self, stream: &Stream) -> Option<Document> {
        let namespace = doc! {"db": &self.database, "coll": &self.collection};
        let kind = match &self.change {
            Change::Insert(_) => "insert",
            Change::Replace { .. } => "replace",
            Change::Update { .. } => "update",
            Change::Delete { .. } => "delete",
            Change::Drop => "drop",
            Change::Rename { .. } => "rename",
            Change::DropDatabase => "dropDatabase",
            Change::Create if stream.expanded => "create",
            Change::Modify if stream.expanded => "modify",
            Change::Create | Change::Modify | Change::Noop => return None,
        };
        let mut event = doc! {
            "_id": self.place().token(false), "operationType": kind, "clusterTime": self.time,
            "wallTime": DateTime::from_millis(self.wall),
        };
        if let Change::Insert(document) | Change::Replace { document, .. } = &self.change {
            event.insert("fullDocument", document.clone());
        }
        match &self.change {
            Change::DropDatabase => drop(event.insert("ns", doc! {"db": &self.database})),
            _ => drop(event.insert("ns", namespace)),
        }
        if let Change::Rename { to: (database, collection), .. } = &self.change {
            event.insert("to", doc! {"db": database, "coll": collection});
        }
        if let Some(number) = self.transaction {
            event.insert("txnNumber", number);
        }
        if let Some(id) = self.id() {
            event.insert("documentKey", doc! {"_id": id.clone()});
        }
        if let Change::Update { changes, .. } = &self.change {
            event.insert("updateDescription", changes.description());
        }
        if let Change::Replace { before, .. } | Change::Update { before, .. } | Change::Delete { before, .. } =
            &self.change
            && stream.before == Images::WhenAvailable
        {
            event.insert("fullDocumentBeforeChange", before.clone());
        }
        Some(event)
    }

    /// True if a stream ends with this entry.
    fn invalidates(&self, stream: &Stream) -> bool {
        match &self.change {
            Change::DropDatabase => true,
            Change::Drop | Change::Rename { .. } => stream.collection.is_some(),
            _ => false,
        }
    }
}

impl State {
    /// The next events of a stream, at most so many.
    pub fn next_events(&mut self, stream: &mut Stream, most: usize) -> Result<Vec<Document>> {
        let mut out = Vec::new();
        if stream.place.time < self.first
            && stream.next < self.oplog.len()
            && stream.place.time < self.oplog[stream.next].time
            && self.oplog[stream.next].time < self.first
        {
            let lost = Failure::new(136, "the oplog has passed the position of the cursor");
            return Err(lost.with("errorLabels", vec!["NonResumableChangeStreamError"]));
        }
        while out.len() < most {
            if let Some(place) = stream.invalidate {
                let time = place.time;
                let event = doc! {
                    "_id": place.token(true), "operationType": "invalidate", "clusterTime": time, "wallTime": self.now(),
                };
                out.extend(self.transformed(stream, event)?);
                stream.over = true;
                return Ok(out);
            }
            let Some(entry) = self.oplog[..self.committed_length()].get(stream.next) else {
                // Everything up to here was looked at.
                stream.place = stream.place.max(Place { time: self.committed_time(), after: 0 });
                break;
            };
            stream.next += 1;
            if !stream.wants(entry) {
                continue;
            }
            let (place, invalidates, too_large) = (entry.place(), entry.invalidates(stream), self.too_large(entry));
            let is_of_transaction = entry.transaction.is_some();
            let Some(event) = entry.event(stream) else { continue };
            let found = self.transformed(stream, event)?;
            // Without its document, any event can be sent.
            if let Some(failure) = too_large.filter(|_| found.iter().any(|event| !event.contains_key("unread"))) {
                return Err(failure);
            }
            if !found.is_empty() {
                stream.place = place;
            }
            out.extend(found);
            if invalidates {
                stream.invalidate = Some(place);
            }
            // As where the next one does not fit: a batch may end between two changes of a transaction.
            if is_of_transaction && !out.is_empty() && self.draws.random() {
                break;
            }
        }
        Ok(out)
    }

    fn transformed(&mut self, stream: &Stream, event: Document) -> Result<Vec<Document>> {
        let mut rows = vec![event];
        for stage in &stream.stages {
            let Some((name, argument)) = stage.as_document().and_then(|stage| stage.iter().next()) else {
                return Err(Failure::new(14, "a stage is a document"));
            };
            rows = self.stage(name, argument, rows, &stream.database)?;
        }
        Ok(rows)
    }
}

impl Changes {
    /// The `updateDescription` of an event.
    fn description(&self) -> Document {
        let truncated: Vec<Document> = self
            .truncated
            .iter()
            .map(|(path, size)| doc! {"field": path, "newSize": i32::try_from(*size).unwrap_or(i32::MAX)})
            .collect();
        doc! {
            "updatedFields": self.set.iter().cloned().collect::<Document>(), "removedFields": self.unset.clone(),
            "truncatedArrays": truncated,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
mod tests {
    use bson::{Binary, spec::BinarySubtype};

    use super::*;
    use crate::Model;

    async fn open(model: &Model, options: Document) -> Document {
        let command = doc! {"aggregate": "c", "pipeline": [{"$changeStream": options}], "cursor": {}, "$db": "d"};
        model.run(command).await
    }

    #[tokio::test]
    async fn a_stream_resumes_after_its_token_while_the_oplog_has_it() {
        let model = Model::new(1);
        let insert = async |id: i32| model.run(doc! {"insert": "c", "documents": [{"_id": id}], "$db": "d"}).await;
        let next = async |reply: &Document| {
            let id = reply.get_document("cursor").unwrap().get_i64("id").unwrap();
            model.run(doc! {"getMore": id, "collection": "c", "batchSize": 1, "maxTimeMS": 1, "$db": "d"}).await
        };
        let batch = |reply: &Document| {
            let events = reply.get_document("cursor").unwrap().get_array("nextBatch").unwrap().clone();
            events
                .iter()
                .map(|event| event.as_document().unwrap().get_document("documentKey").unwrap().clone())
                .collect()
        };
        let token = |reply: &Document| {
            reply.get_document("cursor").unwrap().get_document("postBatchResumeToken").unwrap().clone()
        };
        let begun = insert(1).await.get_timestamp("operationTime").unwrap();
        insert(2).await;
        let stream = open(&model, doc! {"startAtOperationTime": begun}).await;
        let first = next(&stream).await;
        let keys: Vec<Document> = batch(&first);
        assert_eq!(keys, [doc! {"_id": 1}]);
        let resumed = next(&open(&model, doc! {"resumeAfter": token(&first)}).await).await;
        let keys: Vec<Document> = batch(&resumed);
        assert_eq!(keys, [doc! {"_id": 2}]);
        model.shorten_oplog();
        let lost = open(&model, doc! {"resumeAfter": token(&first)}).await;
        assert_eq!(lost.get_i32("code").unwrap(), 286, "{lost}");
        assert!(open(&model, doc! {"resumeAfter": token(&resumed)}).await.contains_key("cursor"));
    }

    #[tokio::test]
    async fn a_batch_may_end_between_two_changes_of_a_transaction() {
        let model = Model::new(1);
        let stream = open(&model, doc! {}).await.get_document("cursor").unwrap().get_i64("id").unwrap();
        let session = Binary { subtype: BinarySubtype::Uuid, bytes: vec![1; 16] };
        let documents: Vec<Document> = (0..20).map(|id| doc! {"_id": id}).collect();
        let insert = doc! {"insert": "c", "documents": documents, "startTransaction": true};
        for mut command in [insert, doc! {"commitTransaction": 1}] {
            command.extend(doc! {"lsid": {"id": &session}, "txnNumber": 7_i64, "autocommit": false, "$db": "d"});
            let reply = model.run(command).await;
            assert!(reply.get_f64("ok").unwrap() > 0.0, "{reply}");
        }
        let (mut batches, mut seen) = (0, Vec::new());
        loop {
            let more = doc! {"getMore": stream, "collection": "c", "maxTimeMS": 1, "$db": "d"};
            let reply = model.run(more).await;
            let events = reply.get_document("cursor").unwrap().get_array("nextBatch").unwrap();
            if events.is_empty() {
                break;
            }
            batches += 1;
            seen.extend(events.iter().filter_map(Bson::as_document).cloned());
        }
        assert!(batches > 1 && seen.len() == 20, "{batches} batches: {seen:?}");
        let is_same = |event: &Document| event.get("clusterTime") == seen[0].get("clusterTime");
        assert!(seen.iter().all(|event| is_same(event) && event.get_i64("txnNumber").unwrap() == 7));
    }
}
