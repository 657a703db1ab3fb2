//! One change stream per database: decoded events in batches, each with the position after it.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bson::{Bson, Document, RawDocument, Timestamp, doc};
use mongodb::raw_batch_cursor::RawBatch;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

mod relevance;

use crate::{
    change::{Change, ChangeEvent},
    metrics::Metrics,
    pace::Polling,
};
use denormd_model::{
    namespace::Namespace,
    position::{ClusterTime, Position, token_time},
};
use denormd_mongo::{
    Batches, Server, code,
    error::{Error, Kind, Result},
    text,
};
use denormd_rules::plan::{Plan, reference::Role};
use relevance::Scalars;

/// Time limit of the search for a reference that is a document, in milliseconds. An index on the reference finds it at
/// once.
const LOOK_FOR_NESTED: i64 = 5000;
/// Most events in one batch. All of them wait until the batch is full: beside a backlog, the server took half a second to find
/// 5,000.
const BATCH: u32 = 500;
/// Bytes beyond which a batch may have ended because the next event did not fit into it.
const LARGE: usize = 1 << 20;
/// Time limit for an answer of a change stream, after which the stream is opened again on another connection: a gateway that has forgotten a
/// connection drops what is sent on it, although the server is well. The server also answers late if it has very many other events to pass
/// over, so the limit is doubled after each silence, until an answer arrives.
const PATIENCE: Duration = Duration::from_secs(60);
/// The error message of a stream that does not answer.
const SILENCE: &str = "the change stream does not answer";
/// If an event with its resume token does not fit into a message, the server closes the connection without an error.
/// This number of times in a row, while the server answers everything else, means that.
const HANG_UPS: u32 = 5;

/// The condition by which a filter selects collections. The server evaluates a condition on an event's own fields on
/// each oplog entry, one name after the other, and again on the event: 18 µs each time with 1,000 names (MongoDB
/// 6.0.5). A condition on a computed field is evaluated on the event alone, which has been built by then (6 µs), by a
/// search in sorted names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Naming {
    /// Whole namespaces: cheapest for a few.
    Whole,
    /// The collections' names.
    Names,
    /// A field computed from the name.
    Computed,
}

impl Naming {
    /// The cheapest condition for this number of collections, from measurements with 2, 20, 100, 200 and 1,000.
    fn of(collections: usize) -> Self {
        match collections {
            0..=8 => Self::Whole,
            9..=100 => Self::Names,
            _ => Self::Computed,
        }
    }

    /// Condition that the event is of one of these collections.
    fn one_of(self, namespaces: &[&Namespace]) -> Document {
        let names: Vec<&str> = namespaces.iter().map(|ns| ns.collection.as_str()).collect();
        match self {
            Self::Whole => {
                let whole = namespaces.iter().map(|ns| doc! {"db": &ns.database, "coll": &ns.collection});
                doc! {"ns": {"$in": whole.collect::<Vec<_>>()}}
            }
            Self::Names => doc! {"ns.coll": {"$in": names}},
            Self::Computed => doc! {"collection": {"$in": names}},
        }
    }

    /// Stages before the filter.
    fn before(self) -> Vec<Document> {
        match self {
            Self::Whole | Self::Names => Vec::new(),
            // If a field is merely renamed, the server knows its origin.
            Self::Computed => vec![doc! {"$addFields": {"collection": {"$concat": ["$ns.coll", ""]}}}],
        }
    }
}

/// The stream of one database.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamSpec {
    /// Its index among the streams.
    pub stream: usize,
    /// The database.
    pub database: String,
    /// The stages after `$changeStream`: a filter and a projection.
    pub pipeline: Vec<Document>,
    /// The same stages without filtering out any update.
    pub whole: Vec<Document>,
    /// References that must not be documents while `pipeline` is used: it would filter out changes inside them.
    scalars: Scalars,
    /// True if events carry pre-images.
    pub pre_images: bool,
}

/// A batch of events of one stream.
#[derive(Debug)]
pub struct Delivery {
    /// The index of the stream.
    pub stream: usize,
    /// The events, in order.
    pub events: Vec<ChangeEvent>,
    /// The position after them.
    pub position: Position,
    /// The batch was full: more events follow.
    pub more: bool,
    /// Some events are not known: the stream could not resume where it was, or an event cannot be read.
    pub lost: bool,
}

/// The streams that a plan needs, one per database. Updates of collections in `nested` (see [`nested`]) are never
/// filtered out.
#[must_use]
pub fn streams(plan: &Plan, nested: &BTreeSet<Namespace>) -> Vec<StreamSpec> {
    let specs = plan.databases().into_iter().enumerate().map(|(stream, database)| {
        let namespaces: Vec<Namespace> = plan.namespaces().into_iter().filter(|ns| ns.database == database).collect();
        let pre_images = plan.pre_images().iter().any(|(ns, _)| ns.database == database);
        let all: BTreeSet<Namespace> = namespaces.iter().cloned().collect();
        let scalars = relevance::scalars(plan, &namespaces, nested);
        let pipeline = |nested, scalars| {
            let naming = Naming::of(namespaces.len());
            let mut pipeline = naming.before();
            let filter = filter(plan, &namespaces, naming, nested);
            pipeline.extend([filter, projection(plan, &database, pre_images, scalars)]);
            pipeline
        };
        let (pipeline, whole) = (pipeline(nested, &scalars), pipeline(&all, &Scalars::new()));
        StreamSpec { stream, database, pipeline, whole, scalars, pre_images }
    });
    specs.collect()
}

/// The target collections where a reference is a document, or where that is not known: an update may change it from
/// inside. Read before the streams are opened; from then on the streams detect it.
pub async fn nested(server: &Server, plan: &Plan) -> Result<BTreeSet<Namespace>> {
    let after = server.operation_time().await?;
    let mut nested = BTreeSet::new();
    for database in plan.databases() {
        let namespaces: Vec<Namespace> = plan.namespaces().into_iter().filter(|ns| ns.database == database).collect();
        for (namespace, names) in relevance::scalars(plan, &namespaces, &BTreeSet::new()) {
            // These documents refer by their `_id` alone, which never changes.
            if names.is_empty() {
                continue;
            }
            let is_document = names.iter().map(|name| doc! {name: {"$type": "object"}});
            let command = doc! {
                "find": &namespace.collection, "filter": {"$or": is_document.collect::<Vec<_>>()}, "limit": 1,
                "projection": {"_id": 1}, "maxTimeMS": LOOK_FOR_NESTED,
            };
            match server.read(&database, command, after).await {
                Ok(found) if found.is_empty() => {}
                Err(error) if error.is_transient() && error.kind != Kind::ReadTimedOut => return Err(error),
                Ok(_) | Err(_) => drop(nested.insert(namespace)),
            }
        }
    }
    Ok(nested)
}

fn filter(plan: &Plan, namespaces: &[Namespace], naming: Naming, nested: &BTreeSet<Namespace>) -> Document {
    let mut wanted = relevance::wanted(plan, namespaces, naming, nested);
    // `$out` and a rename onto a watched collection are recognized by their `to` alone, and every event would be
    // checked for it: so all renames are delivered.
    wanted.push(doc! {"operationType": {"$in": ["dropDatabase", "invalidate", "rename"]}});
    doc! {"$match": {"$or": wanted}}
}

/// Keeps the references and the names of the changed fields: an event of 16 MB becomes one of a few hundred bytes. An
/// update also has the names in `scalars` that it has set to a document.
fn projection(plan: &Plan, database: &str, pre_images: bool, scalars: &Scalars) -> Document {
    let changed = doc! {"$concatArrays": [
        {"$map": {"input": {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}, "in": "$$this.k"}},
        {"$ifNull": ["$updateDescription.removedFields", []]},
        {"$map": {"input": {"$ifNull": ["$updateDescription.truncatedArrays", []]}, "in": "$$this.field"}},
    ]};
    let mut fields = shared_fields();
    // For other events this would be wasted: an eighth of the cost of an insert.
    let of_update = |value: Document| doc! {"$cond": [{"$eq": ["$operationType", "update"]}, value, "$$REMOVE"]};
    fields.insert("changed", of_update(changed));
    let names: BTreeSet<&String> = scalars.values().flatten().collect();
    if !names.is_empty() {
        let nested = names.into_iter().map(|name| {
            let is_nested = doc! {"$eq": [{"$type": format!("$updateDescription.updatedFields.{name}")}, "object"]};
            doc! {"$cond": [is_nested, [name], []]}
        });
        fields.insert("nested", of_update(doc! {"$concatArrays": nested.collect::<Vec<_>>()}));
    }
    for path in reference_paths(plan, database) {
        fields.insert(format!("fullDocument.{path}"), 1);
        if pre_images {
            fields.insert(format!("fullDocumentBeforeChange.{path}"), 1);
        }
    }
    doc! {"$project": fields}
}

fn shared_fields() -> Document {
    doc! {
        "operationType": 1, "clusterTime": 1, "wallTime": 1, "ns": 1, "to": 1, "documentKey._id": 1, "txnNumber": 1,
    }
}

/// A pipeline whose events report only that something happened to a document. A token of `pipeline` is valid for it,
/// because its filter is the same.
fn unread(pipeline: &[Document]) -> Vec<Document> {
    let mut fields = shared_fields();
    fields.insert("unread", doc! {"$literal": true});
    let mut unread = pipeline.to_vec();
    unread.pop();
    unread.push(doc! {"$project": fields});
    unread
}

/// The paths of the references in a database's documents. No path is inside another one, which a projection refuses.
fn reference_paths(plan: &Plan, database: &str) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for rule in &plan.rules {
        for (side, role) in [(&rule.source, Role::Source), (&rule.target, Role::Target)] {
            if side.namespace.database == database {
                let of_side = rule.reference.paths(role).map(denormd_model::field_path::FieldPath::query);
                // All fields of a DBRef are needed.
                paths.extend(of_side.map(|path| path.strip_suffix(".$id").unwrap_or(&path).to_owned()));
            }
        }
    }
    let all = paths.clone();
    paths.retain(|path| !path.match_indices('.').any(|(end, _)| all.contains(&path[..end])));
    paths
}

/// The way in which a stream is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// In batches.
    Batches,
    /// One event at a time, because a batch has one that does not fit into a reply.
    Single,
    /// Only the fact that something happened to a document: for the one event that does not fit.
    Unread,
}

impl Way {
    fn batch(self) -> u32 {
        if self == Self::Batches { BATCH } else { 1 }
    }
}

/// Follows a stream until `stop`, and delivers into `out`, which pauses the stream when it is full. Reopens the stream
/// after every transient error, without a limit. `waiting` is the current backlog.
pub async fn follow(
    server: &Server,
    metrics: &Metrics,
    spec: &StreamSpec,
    start: Position,
    waiting: Arc<AtomicUsize>,
    out: mpsc::Sender<Delivery>,
    stop: CancellationToken,
) {
    let mut follower = Follower { server, spec, waiting, out, state: State::at(start) };
    while !stop.is_cancelled() {
        let Some(failed) = stop.run_until_cancelled(follower.go_on()).await else { return };
        let Some(error) = failed else { continue };
        let pause = Duration::from_millis(100).saturating_mul(1 << follower.state.failures.min(6));
        metrics.record_error(None, "read changes", &error);
        tracing::warn!(database = %spec.database, error = %error.message, retry_in = ?pause, "the change stream was interrupted");
        stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
}

/// A stream, and the dependencies that are needed to follow it.
struct Follower<'a> {
    server: &'a Server,
    spec: &'a StreamSpec,
    waiting: Arc<AtomicUsize>,
    out: mpsc::Sender<Delivery>,
    state: State,
}

/// The position of a stream, and the way it is read from there.
struct State {
    position: Position,
    /// The time at which the stream was reopened because its token was refused.
    by_time: Option<ClusterTime>,
    /// Failures since the last batch.
    failures: u32,
    /// The most recent of these failures in which the server closed the connection and answered the next request.
    hang_ups: u32,
    /// Time limit for the next answer that the server may give late; doubled when it does not arrive.
    patience: Duration,
    way: Way,
    /// The events since the stream was last narrowed.
    singles: usize,
    /// No update is filtered out.
    whole: bool,
}

impl State {
    /// A stream that is read in batches, of which nothing has failed yet.
    fn at(position: Position) -> Self {
        let (patience, way) = (PATIENCE, Way::Batches);
        Self { position, by_time: None, failures: 0, hang_ups: 0, patience, way, singles: 0, whole: false }
    }
}

impl Follower<'_> {
    /// Follows the stream until it has to be reopened. Returns an error if that should wait.
    async fn go_on(&mut self) -> Option<Error> {
        let error = self.deliver().await.err()?;
        self.state.failures += 1;
        let is_too_large = self.is_too_large(&error).await;
        let Position { time, token } = &mut self.state.position;
        let open_again = match error.kind {
            _ if is_too_large => self.narrow(&error).await,
            // The time of an invalid token may still be valid, and then nothing is lost. A time that the
            // oplog does not reach is refused only after a first batch, which has a token again.
            Kind::HistoryLost | Kind::Refused
                if token.is_some() && self.state.by_time != Some(*time) && !is_of_a_removed_shard(&error) =>
            {
                tracing::warn!(database = %self.spec.database, error = %error.message, "the change stream cannot resume after its token: it is reopened at its time");
                *token = None;
                self.state.by_time = Some(*time);
                true
            }
            // By time, the stream would open on the remaining shards, without the changes of the removed one.
            Kind::HistoryLost if is_of_a_removed_shard(&error) => {
                self.start_anew("a shard was removed with changes that were not read yet").await
            }
            Kind::HistoryLost => self.start_anew("the oplog no longer reaches back to the checkpoint").await,
            _ => false,
        };
        (!open_again).then_some(error)
    }

    /// True if the next event is too large to be sent. An error with a code is an answer, so the connection was not closed: a
    /// router, for example, may not reach a shard.
    async fn is_too_large(&mut self, error: &Error) -> bool {
        if error.kind == Kind::Connection && error.code.is_none() && self.server.operation_time().await.is_ok() {
            self.state.hang_ups += 1;
        } else {
            self.state.hang_ups = 0;
        }
        error.code.is_some_and(|code| code::TOO_LARGE.contains(&code)) || self.state.hang_ups >= HANG_UPS
    }

    /// Reads less at a time from the same position. False if that is not possible.
    async fn narrow(&mut self, error: &Error) -> bool {
        (self.state.failures, self.state.hang_ups, self.state.singles) = (0, 0, 0);
        self.state.way = match self.state.way {
            Way::Batches => Way::Single,
            Way::Single => {
                tracing::warn!(database = %self.spec.database, error = %error.message, "a change event is too large to be sent: the references of its document are read from the collection");
                Way::Unread
            }
            Way::Unread => return self.start_anew("a change event is too large even for its resume token").await,
        };
        true
    }

    /// Starts from the current time. Earlier events are not known.
    async fn start_anew(&mut self, why: &str) -> bool {
        let Ok(time) = self.server.operation_time().await else { return false };
        let database = &self.spec.database;
        tracing::error!(%database, why, "the change stream restarts at the current time; every rule of the database is backfilled");
        let position = Position { time, token: None };
        let delivery = Delivery {
            stream: self.spec.stream,
            events: Vec::new(),
            position: position.clone(),
            more: false,
            lost: true,
        };
        let State { by_time, failures, .. } = self.state;
        self.state = State { by_time, failures, whole: true, ..State::at(position) };
        self.out.send(delivery).await.is_ok()
    }

    /// Opens the stream at its position and delivers batches until it ends, or must be read in another way.
    async fn deliver(&mut self) -> Result<()> {
        let way = self.state.way;
        let polling = Polling::of(self.waiting.load(Ordering::Relaxed));
        let patience = self.state.patience;
        let batches = in_time(PATIENCE, self.open(polling.wait())).await?;
        // While one batch is decoded, the server prepares the next one.
        let (read, mut batches_read) = mpsc::channel(1);
        let reader = read_ahead(batches, patience, polling, self.waiting.clone(), read);
        let _reader = AbortOnDropHandle::new(tokio::spawn(reader));
        // The first batch is empty: it only confirms that the stream is open.
        let mut is_first = true;
        while let Some(batch) = batches_read.recv().await {
            let batch = batch.inspect_err(|error| {
                if is_silence(error) {
                    self.state.patience = self.state.patience.saturating_mul(2);
                }
            })?;
            let reading = Reading { way, narrow: !self.state.whole, is_first };
            let decoded = decode(self.spec, reading, &batch, &self.state.position)?;
            let is_empty = decoded.delivery.events.is_empty();
            if !is_first || !is_empty {
                (self.state.failures, self.state.hang_ups, self.state.patience) = (0, 0, PATIENCE);
            }
            self.state.position = decoded.delivery.position.clone();
            self.state.singles += decoded.delivery.events.len();
            if self.out.send(decoded.delivery).await.is_err() {
                return Ok(());
            }
            if decoded.nested {
                tracing::info!(database = %self.spec.database, "a reference may be a document: from now on the server sends the updates of owned fields, too");
                self.state.whole = true;
                return Ok(());
            }
            // The event that was too large is passed, or the server no longer has it. Or no event was too large: repeated connection
            // failures only looked like it.
            let is_passed = (is_empty && !is_first) || self.state.singles >= BATCH as usize;
            if (way == Way::Unread && !is_empty) || (way == Way::Single && is_passed) {
                self.state.way = Way::Batches;
                return Ok(());
            }
            is_first = false;
        }
        Ok(())
    }

    /// Opens the stream; a request waits this long on the server, for the lifetime of the cursor.
    async fn open(&self, wait: Duration) -> Result<Batches> {
        let spec = self.spec;
        let State { position, way, whole, .. } = &self.state;
        let mut change_stream = Document::new();
        match &position.token {
            // `startAfter` also continues after an invalidate event, where `resumeAfter` does not.
            Some(token) => change_stream.insert("startAfter", token.clone()),
            None => change_stream.insert("startAtOperationTime", Timestamp::from(position.time)),
        };
        if spec.pre_images && *way != Way::Unread {
            change_stream.insert("fullDocumentBeforeChange", "whenAvailable");
        }
        let stages = if *whole { &spec.whole } else { &spec.pipeline };
        let mut pipeline = vec![doc! {"$changeStream": change_stream}];
        pipeline.extend(if *way == Way::Unread { unread(stages) } else { stages.clone() });
        let command = doc! {"aggregate": 1, "pipeline": pipeline, "cursor": {"batchSize": 0}, "readConcern": {"level": "majority"}};
        self.server.follow(&spec.database, command, way.batch(), wait).await
    }
}

fn is_of_a_removed_shard(error: &Error) -> bool {
    error.code.is_some_and(|code| code::SHARD_REMOVED.contains(&code))
}

/// The answer, or an error if it takes longer than `patience`.
async fn in_time<T>(patience: Duration, answer: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = tokio::time::timeout(patience, answer).await;
    answer.unwrap_or_else(|_| Err(Error::new(Kind::Unavailable, SILENCE)))
}

fn is_silence(error: &Error) -> bool {
    error.message == SILENCE
}

/// Reads until the stream ends, or must be opened again because requests are to wait for another time.
async fn read_ahead(
    mut batches: Batches,
    mut patience: Duration,
    polling: Polling,
    waiting: Arc<AtomicUsize>,
    out: mpsc::Sender<Result<RawBatch>>,
) {
    for nth in 0_u64.. {
        // Only the second answer may be late: the first one merely confirms that the stream is open, and by the third the server has
        // passed over the other events.
        if nth > 1 {
            patience = PATIENCE;
        }
        let batch = match in_time(patience, batches.next()).await {
            Ok(Some(batch)) => Ok(batch),
            Ok(None) => return,
            Err(error) => Err(error),
        };
        let (failed, more) = (batch.is_err(), batch.as_ref().is_ok_and(is_full));
        if out.send(batch).await.is_err() || failed {
            return;
        }
        if !more && Polling::pause(|| waiting.load(Ordering::Relaxed)).await != polling {
            return;
        }
    }
}

/// The resume token of the position after a batch.
fn token_after(batch: &RawBatch) -> Option<&RawDocument> {
    batch.as_raw_document().get_document("cursor").ok()?.get_document("postBatchResumeToken").ok()
}

fn is_full(batch: &RawBatch) -> bool {
    batch.doc_slices().is_ok_and(|events| events.into_iter().count() >= BATCH as usize)
}

/// The content of a batch.
struct Decoded {
    delivery: Delivery,
    /// The last event may have set a document where references were scalars.
    nested: bool,
}

/// The circumstances in which a batch was read.
#[derive(Debug, Clone, Copy)]
struct Reading {
    way: Way,
    /// The pipeline filters out updates that change no scalar reference.
    narrow: bool,
    /// It is the first batch of a stream that was opened at its position.
    is_first: bool,
}

/// Decodes the events of a batch. If it is read by the `narrow` pipeline, stops at the first event after which all
/// updates are needed.
fn decode(spec: &StreamSpec, reading: Reading, batch: &RawBatch, before: &Position) -> Result<Decoded> {
    let Reading { way, narrow, is_first } = reading;
    let mut events: Vec<ChangeEvent> = Vec::new();
    let (mut last, mut lost, mut nested) = (None, false, false);
    for raw in batch.doc_slices()? {
        let raw = raw.map_err(Error::from)?;
        let raw = raw.as_document().ok_or_else(|| Error::internal("a change event that is no document"))?;
        last = Some(raw);
        match ChangeEvent::decode(&text::escaped(raw)) {
            Ok(event) => {
                nested = narrow && sets_nested(spec, raw, &event);
                events.push(event);
            }
            Err(error) => {
                tracing::error!(database = %spec.database, error = %error.message, "a change event cannot be read: every rule of the database is backfilled");
                (lost, nested) = (true, narrow && !spec.scalars.is_empty());
            }
        }
        if nested {
            break;
        }
    }
    let token = if nested { None } else { token_after(batch) };
    let token = token.or_else(|| last?.get_document("_id").ok()).map(Document::try_from).transpose()?;
    let of_transaction = last.is_some_and(|last| last.get("txnNumber").is_ok_and(|number| number.is_some()));
    let newest = events.last().map(|event| event.cluster_time);
    let reached = token.as_ref().and_then(token_time).max(newest).unwrap_or(before.time);
    // The events of one oplog entry, a transaction's for example, have the same time, and the batch may end among them.
    let shares_time = of_transaction || events.iter().rev().nth(1).map(|event| event.cluster_time) == newest;
    let is_cut = nested || events.len() >= way.batch() as usize || batch.as_raw_document().as_bytes().len() > LARGE;
    let more_may_follow = newest == Some(reached) && (shares_time || is_cut);
    // A stream that was reopened among such events confirms its token first, and has read nothing yet.
    let is_confirmation = is_first && newest.is_none();
    let time = if more_may_follow || is_confirmation { reached.before() } else { reached };
    let token = token.or_else(|| before.token.clone());
    let position = Position { time: time.max(before.time), token };
    let more = events.len() >= BATCH as usize;
    Ok(Decoded { delivery: Delivery { stream: spec.stream, events, position, more, lost }, nested })
}

/// True if a reference may have become a document, in a collection whose updates are filtered because it was none.
fn sets_nested(spec: &StreamSpec, raw: &RawDocument, event: &ChangeEvent) -> bool {
    let names = |namespace| spec.scalars.get(namespace);
    match &event.change {
        // The content of a collection that gets a new name has not been checked.
        Change::Rename(to) => names(to).is_some(),
        Change::Insert(now) | Change::Replace(now) => names(&event.namespace)
            .is_some_and(|names| names.iter().any(|name| matches!(now.get(name), Some(Bson::Document(_))))),
        Change::Update(_) => names(&event.namespace).is_some_and(|names| {
            let Ok(nested) = raw.get_array("nested") else { return true };
            nested.into_iter().any(|name| name.is_ok_and(|name| name.as_str().is_none_or(|name| names.contains(name))))
        }),
        Change::Delete | Change::Drop | Change::DropDatabase | Change::Other => false,
    }
}
