//! One change stream a database: decoded events in batches, each with the position after it.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bson::{Document, RawDocument, Timestamp, doc};
use mongodb::raw_batch_cursor::RawBatch;
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

mod relevance;

use crate::{
    change::{ChangeEvent, Namespace},
    error::{Error, Kind, Result},
    metrics::Metrics,
    mongo::{Batches, Server},
    plan::{Plan, reference::Role},
    position::{Position, token_time},
};

/// How long the server waits for an event before it answers with an empty batch. An empty batch carries a token too: it says
/// how far the stream is when nothing but our own writes, which are not sent, has moved the oplog.
const AWAIT: Duration = Duration::from_millis(100);
/// With more changed keys or targets of a fan-out than this in waiting, the server is not asked for more at once. A request that
/// waits for an event is woken by every entry of the oplog, our own writes included: 7 µs an entry, half of it in the thread
/// that makes entries visible (MongoDB 6.0.5; docs/performance.md). Asked later, it passes them in one go.
const BACKLOG: usize = 500;
/// How long it is not asked when a backlog begins, which most often is done by then; and later on, as long as that lasts: changes
/// of other rules wait as long, and of those that this one feeds.
const REST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(250));
/// How often it is seen whether the backlog is done.
const LOOK: Duration = Duration::from_millis(5);
/// Events in one batch at most.
const BATCH: u32 = 5000;

/// How a filter names the collections that it lets through. What it says of an event's own fields the server tries on each entry
/// of the oplog, one name after the other, and again on the event: with 1,000 names 18 µs each time (MongoDB 6.0.5). A field that
/// is computed is tried on the event alone, which has been made by then (6 µs), and by a search among sorted names.
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
    /// The cheapest for so many collections, from measurements with 2, 20, 100, 200 and 1,000.
    fn of(collections: usize) -> Self {
        match collections {
            0..=8 => Self::Whole,
            9..=100 => Self::Names,
            _ => Self::Computed,
        }
    }

    /// The event is of one of these.
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
            // Of a field that is merely named anew the server knows where it comes from.
            Self::Computed => vec![doc! {"$addFields": {"collection": {"$concat": ["$ns.coll", ""]}}}],
        }
    }
}

/// The stream of one database.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamSpec {
    /// Its place among the streams.
    pub stream: usize,
    /// The database.
    pub database: String,
    /// What follows `$changeStream`: a filter and a projection.
    pub pipeline: Vec<Document>,
    /// Whether events carry pre-images.
    pub pre_images: bool,
}

/// What a stream delivers.
#[derive(Debug)]
pub struct Delivery {
    /// Which stream.
    pub stream: usize,
    /// The events, in order.
    pub events: Vec<ChangeEvent>,
    /// The position after them.
    pub position: Position,
    /// The batch was full: more wait behind it.
    pub more: bool,
    /// The stream could not go on where it was and starts anew: what happened between is not known.
    pub lost: bool,
}

/// The streams that a plan needs, one a database.
#[must_use]
pub fn streams(plan: &Plan) -> Vec<StreamSpec> {
    let specs = plan.databases().into_iter().enumerate().map(|(stream, database)| {
        let namespaces: Vec<Namespace> = plan.namespaces().into_iter().filter(|ns| ns.database == database).collect();
        let pre_images = plan.pre_images().iter().any(|(ns, _)| ns.database == database);
        let naming = Naming::of(namespaces.len());
        let mut pipeline = naming.before();
        pipeline.extend([filter(plan, &namespaces, naming), projection(plan, &database, pre_images)]);
        StreamSpec { stream, database, pipeline, pre_images }
    });
    specs.collect()
}

fn filter(plan: &Plan, namespaces: &[Namespace], naming: Naming) -> Document {
    let mut wanted = relevance::wanted(plan, namespaces, naming);
    // `$out` and a rename onto a watched collection are seen by their `to` alone, and every event would be tried for one: so all
    // renames come.
    wanted.push(doc! {"operationType": {"$in": ["dropDatabase", "invalidate", "rename"]}});
    doc! {"$match": {"$or": wanted}}
}

/// Keeps the reference fields and the names of what changed: an event of 16 MB becomes one of a few hundred bytes.
fn projection(plan: &Plan, database: &str, pre_images: bool) -> Document {
    let changed = doc! {"$concatArrays": [
        {"$map": {"input": {"$objectToArray": {"$ifNull": ["$updateDescription.updatedFields", {}]}}, "in": "$$this.k"}},
        {"$ifNull": ["$updateDescription.removedFields", []]},
        {"$map": {"input": {"$ifNull": ["$updateDescription.truncatedArrays", []]}, "in": "$$this.field"}},
    ]};
    let mut fields = doc! {
        "operationType": 1, "clusterTime": 1, "wallTime": 1, "ns": 1, "to": 1, "documentKey._id": 1,
        // For other events it would be computed in vain: an eighth of what an insert costs.
        "changed": {"$cond": [{"$eq": ["$operationType", "update"]}, changed, "$$REMOVE"]},
    };
    let mut roots = BTreeSet::new();
    for rule in &plan.rules {
        for (side, role) in [(&rule.source, Role::Source), (&rule.target, Role::Target)] {
            if side.namespace.database == database {
                roots.extend(rule.reference.paths(role).map(|path| path.root().to_owned()));
            }
        }
    }
    for root in roots {
        fields.insert(format!("fullDocument.{root}"), 1);
        if pre_images {
            fields.insert(format!("fullDocumentBeforeChange.{root}"), 1);
        }
    }
    doc! {"$project": fields}
}

/// Follows a stream until `stop`, and delivers into `out`, which holds it back when it is full. Reopens by itself after
/// everything that may pass, for ever. `waiting` says how much is being written.
pub async fn follow(
    server: &Server,
    metrics: &Metrics,
    spec: &StreamSpec,
    start: Position,
    waiting: Arc<AtomicUsize>,
    out: mpsc::Sender<Delivery>,
    stop: CancellationToken,
) {
    let mut position = start;
    let mut failures = 0_u32;
    let mut by_time = None;
    while !stop.is_cancelled() {
        let result = tokio::select! {
            result = deliver(server, spec, &mut position, &waiting, &out, &mut failures) => result,
            () = stop.cancelled() => return,
        };
        let Err(error) = result else { continue };
        failures += 1;
        match error.kind {
            // Whatever is wrong with a token, its time may still hold, and then nothing is lost. A time that the oplog does not
            // reach is only refused after a first batch, which has a token again.
            Kind::HistoryLost | Kind::Refused if position.token.is_some() && by_time != Some(position.time) => {
                tracing::warn!(database = %spec.database, error = %error.message, "the change stream cannot go on from its token: reopening by time");
                position.token = None;
                by_time = Some(position.time);
                continue;
            }
            Kind::HistoryLost if start_anew(server, spec, &mut position, &out).await => continue,
            _ => {}
        }
        let pause = Duration::from_millis(100).saturating_mul(1 << failures.min(6));
        metrics.trouble(None, "read changes", &error);
        tracing::warn!(database = %spec.database, error = %error.message, retry_in = ?pause, "the change stream was interrupted");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => return,
        }
    }
}

async fn start_anew(server: &Server, spec: &StreamSpec, position: &mut Position, out: &mpsc::Sender<Delivery>) -> bool {
    let Ok(time) = server.operation_time().await else { return false };
    tracing::error!(database = %spec.database, "the oplog no longer reaches back to the saved position: starting from now, every rule is backfilled");
    *position = Position { time, token: None };
    out.send(Delivery { stream: spec.stream, events: Vec::new(), position: position.clone(), more: false, lost: true })
        .await
        .is_ok()
}

/// Opens the stream at `position` and delivers batches until it ends.
async fn deliver(
    server: &Server,
    spec: &StreamSpec,
    position: &mut Position,
    waiting: &Arc<AtomicUsize>,
    out: &mpsc::Sender<Delivery>,
    failures: &mut u32,
) -> Result<()> {
    let mut change_stream = Document::new();
    match &position.token {
        // `startAfter` also goes on after an invalidate, where `resumeAfter` does not.
        Some(token) => change_stream.insert("startAfter", token.clone()),
        None => change_stream.insert("startAtOperationTime", Timestamp::from(position.time)),
    };
    if spec.pre_images {
        change_stream.insert("fullDocumentBeforeChange", "whenAvailable");
    }
    let mut pipeline = vec![doc! {"$changeStream": change_stream}];
    pipeline.extend(spec.pipeline.iter().cloned());
    let command =
        doc! {"aggregate": 1, "pipeline": pipeline, "cursor": {"batchSize": 0}, "readConcern": {"level": "majority"}};
    let batches = server.follow(&spec.database, command, BATCH, AWAIT).await?;
    // While one batch is decoded, the server is at the next.
    let (read, mut batches_read) = mpsc::channel(1);
    let _reader = AbortOnDropHandle::new(tokio::spawn(read_ahead(batches, waiting.clone(), read)));
    while let Some(batch) = batches_read.recv().await {
        let delivery = decode(spec.stream, &batch?, position)?;
        *failures = 0;
        *position = delivery.position.clone();
        if out.send(delivery).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

/// Reads until the stream ends.
async fn read_ahead(mut batches: Batches, waiting: Arc<AtomicUsize>, out: mpsc::Sender<Result<RawBatch>>) {
    let mut lasts = false;
    loop {
        let batch = match batches.next().await {
            Ok(Some(batch)) => Ok(batch),
            Ok(None) => return,
            Err(error) => Err(error),
        };
        let (failed, more) = (batch.is_err(), batch.as_ref().is_ok_and(is_full));
        if out.send(batch).await.is_err() || failed {
            return;
        }
        let until = tokio::time::Instant::now() + if lasts { REST.1 } else { REST.0 };
        let much = || !more && waiting.load(Ordering::Relaxed) > BACKLOG;
        while much() && tokio::time::Instant::now() < until {
            tokio::time::sleep(LOOK).await;
        }
        lasts = much();
    }
}

/// The resume token of where the stream is after a batch.
fn token_after(batch: &RawBatch) -> Option<&RawDocument> {
    batch.as_raw_document().get_document("cursor").ok()?.get_document("postBatchResumeToken").ok()
}

fn is_full(batch: &RawBatch) -> bool {
    batch.doc_slices().is_ok_and(|events| events.into_iter().count() >= BATCH as usize)
}

fn decode(stream: usize, batch: &RawBatch, before: &Position) -> Result<Delivery> {
    let mut events = Vec::new();
    let mut last = None;
    for raw in batch.doc_slices()? {
        let raw = raw.map_err(Error::from)?;
        let raw = raw.as_document().ok_or_else(|| Error::internal("a change event that is no document"))?;
        last = raw.get_document("_id").ok().map(std::borrow::ToOwned::to_owned);
        events.push(ChangeEvent::decode(raw)?);
    }
    let token = token_after(batch).map(std::borrow::ToOwned::to_owned).or(last);
    let token = token.map(|token| Document::try_from(token.as_ref())).transpose()?;
    let reached = token.as_ref().and_then(token_time);
    let time = events.last().map(|event| event.cluster_time).into_iter().chain(reached).max().unwrap_or(before.time);
    let token = token.or_else(|| before.token.clone());
    let position = Position { time: time.max(before.time), token };
    let more = events.len() >= BATCH as usize;
    Ok(Delivery { stream, events, position, more, lost: false })
}
