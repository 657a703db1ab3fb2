//! The stages of the slowest changes: the events of their copies, beside the spans of the batches that wrote them.
//!
//! The daemon sends its spans to a collector in this process. Spans name no document, so the batch of a change is inferred: it was writing
//! when the server committed the copy. Among several, it is the batch whose oldest change is the newest, but not newer than this change.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use axum::{Router, body::Bytes, extract::State, routing::post};
use bson::{Document, doc};
use denormd_show::{
    figures::median,
    print::{dim, heading},
};
use futures_util::{StreamExt, future::join_all};
use mongodb::Database;
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest, common::v1::any_value::Value, trace::v1::Span,
};
use prost::Message;
use tokio::{net::TcpListener, task::JoinHandle};

use super::{RATES, RULES, SPAN, Sent, WRITERS, load, write};
use crate::bench::{Bench, DATABASE};

/// The slowest share of the changes: one in this many.
const SLOWEST: usize = 100;

/// Spans that the collector has received.
type Spans = Arc<Mutex<Vec<Span>>>;

/// A change and its copy, in milliseconds since 1970. The server's times are whole milliseconds.
struct Change {
    sent: f64,
    /// Commit of the source's write.
    changed: f64,
    /// Commit of the copy's write.
    copied: f64,
    /// Time at which the copy's event arrived.
    seen: f64,
}

/// A batch, in milliseconds since 1970.
#[derive(Default)]
struct Batch {
    start: f64,
    /// Commit of its oldest change.
    oldest: f64,
    /// Beginning and end of each read.
    reads: Vec<(f64, f64)>,
    /// Beginning and end of each write.
    writes: Vec<(f64, f64)>,
}

impl Batch {
    /// The write that committed the copy of this change, and the last read before it.
    fn stages(&self, change: &Change) -> Option<Stages> {
        // Times of the server are rounded down.
        let has_committed = |write: &&(f64, f64)| write.0 < change.copied + 1.0 && write.1 >= change.copied;
        let write = *self.writes.iter().find(has_committed)?;
        let before = self.reads.iter().filter(|read| read.1 <= write.0);
        let read = *before.max_by(|one, other| one.1.total_cmp(&other.1))?;
        Some(Stages { read, write })
    }
}

/// Beginning and end of the read and the write of one change.
struct Stages {
    read: (f64, f64),
    write: (f64, f64),
}

/// Repeats the changes at each rate with a daemon that sends its spans, and prints the stages of the slowest ones.
pub async fn measure(bench: &Bench) {
    heading("Live: where the time of the slowest hundredth of the changes goes (milliseconds, medians of the stages)");
    let database = bench.fresh().await;
    load(&database).await;
    let spans = Spans::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address");
    let router = Router::new().route("/v1/traces", post(receive)).with_state(spans.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let daemon = bench.daemon_with(&format!("log: {{ otlp: \"http://{address}\" }}\n"), RULES, 1).await;
    let (mut next, mut rates) = (1, Vec::new());
    for rate in RATES {
        let mut changes = Vec::new();
        for round in 0..=bench.rounds {
            let found = run(&database, rate, &mut next).await;
            daemon.applied().await;
            // The first round warms caches.
            if round > 0 {
                changes.push(found);
            }
        }
        rates.push((rate, changes));
    }
    // The daemon sends its last spans when it stops.
    daemon.stop().await;
    let batches = batches(&spans.lock().expect("a lock"));
    println!(
        "  {:<10}{:>8}{:>10}{:>16}{:>18}{:>10}{:>18}{:>16}{:>12}",
        "changes/s",
        "of",
        "in all",
        "source write",
        "stream and queue",
        "read",
        "until the commit",
        "until seen",
        "ack"
    );
    for (rate, rounds) in rates {
        print(rate, &rounds, &batches);
    }
    println!(
        "{}",
        dim(
            "  The commits are known to the millisecond. `ack`: from the commit until the daemon has the majority's acknowledgement; `of`: changes whose batch is known."
        )
    );
}

async fn receive(State(spans): State<Spans>, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).expect("an export of spans");
    let received = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    spans.lock().expect("a lock").extend(received.flat_map(|scope| scope.spans));
}

#[expect(clippy::cast_precision_loss, reason = "a time in milliseconds")]
fn batches(spans: &[Span]) -> Vec<Batch> {
    let at = |nanos: u64| nanos as f64 / 1e6;
    let mut batches: HashMap<&[u8], Batch> = HashMap::new();
    for span in spans {
        let (start, end) = (at(span.start_time_unix_nano), at(span.end_time_unix_nano));
        match span.name.as_str() {
            "batch" => {
                let age = span.attributes.iter().find(|attribute| attribute.key == "oldest_change_ms");
                let age = age.and_then(|age| age.value.as_ref()?.value.as_ref());
                let Some(Value::IntValue(age)) = age else { continue };
                let batch = batches.entry(&span.span_id).or_default();
                (batch.start, batch.oldest) = (start, start - *age as f64);
            }
            "read" => batches.entry(&span.parent_span_id).or_default().reads.push((start, end)),
            "write" => batches.entry(&span.parent_span_id).or_default().writes.push((start, end)),
            _ => {}
        }
    }
    batches.into_values().filter(|batch| batch.start > 0.0).collect()
}

/// Makes changes at this rate, and returns them with the times of their copies.
async fn run(database: &Database, rate: u32, next: &mut i64) -> Vec<Change> {
    let sent = Sent::default();
    let total = rate * u32::try_from(SPAN.as_secs()).unwrap_or(1);
    let first = *next;
    *next += i64::from(total);
    let observer = observe(database, first, total, sent.clone()).await;
    join_all((0..WRITERS).map(|writer| write(database.clone(), rate, writer, first, total, sent.clone()))).await;
    observer.await.expect("the observer")
}

/// Follows sources and targets until the copy of the last change has arrived.
async fn observe(database: &Database, first: i64, total: u32, sent: Sent) -> JoinHandle<Vec<Change>> {
    let namespaces = ["parts", "products"].map(|name| doc! {"db": DATABASE, "coll": name});
    let pipeline = [
        doc! {"$match": {"ns": {"$in": namespaces.to_vec()}, "operationType": "update"}},
        doc! {"$project": {"n": "$updateDescription.updatedFields.n", "coll": "$ns.coll", "wallTime": 1}},
    ];
    let stream = database.watch().pipeline(pipeline).await.expect("a stream");
    let mut stream = stream.with_type::<Document>();
    let (began, clock) = (Instant::now(), now());
    let wall = move |at: Instant| clock + at.duration_since(began).as_secs_f64() * 1e3;
    tokio::spawn(async move {
        let last = first + i64::from(total) - 1;
        let (mut commits, mut changes) = (HashMap::new(), Vec::new());
        while let Some(event) = stream.next().await {
            let event = event.expect("an event");
            let Ok(n) = event.get_i64("n") else { continue };
            let at = event.get_datetime("wallTime").expect("a wallTime").timestamp_millis();
            #[expect(clippy::cast_precision_loss, reason = "a time in milliseconds")]
            let at = at as f64;
            if event.get_str("coll").is_ok_and(|coll| coll == "parts") {
                commits.insert(n, at);
                continue;
            }
            let sent = sent.lock().expect("a lock").remove(&n);
            if let (Some(sent), Some(changed)) = (sent, commits.remove(&n)) {
                changes.push(Change { sent: wall(sent), changed, copied: at, seen: wall(Instant::now()) });
            }
            if n == last {
                break;
            }
        }
        changes
    })
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs_f64() * 1e3
}

/// The stages of this change in the batch that most probably wrote its copy.
fn stages_of(change: &Change, batches: &[Batch]) -> Option<Stages> {
    let may_have = |batch: &&Batch| batch.oldest <= change.changed + 1.0 && batch.start >= change.changed;
    let stages = batches.iter().filter(may_have).filter_map(|batch| Some((batch.oldest, batch.stages(change)?)));
    stages.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, stages)| stages)
}

fn print(rate: u32, rounds: &[Vec<Change>], batches: &[Batch]) {
    let mut slowest: Vec<&Change> = Vec::new();
    for changes in rounds {
        let mut changes: Vec<&Change> = changes.iter().collect();
        changes.sort_by(|one, other| (other.seen - other.sent).total_cmp(&(one.seen - one.sent)));
        slowest.extend(changes.iter().take((changes.len() / SLOWEST).max(1)));
    }
    let known: Vec<(&Change, Stages)> =
        slowest.iter().filter_map(|change| Some((*change, stages_of(change, batches)?))).collect();
    let of = |stage: fn(&Change, &Stages) -> f64| {
        median(&known.iter().map(|(change, stages)| stage(change, stages)).collect::<Vec<_>>())
    };
    println!(
        "  {rate:<10}{:>8}{:>10.1}{:>16.1}{:>18.1}{:>10.1}{:>18.1}{:>16.1}{:>12.1}",
        format!("{}/{}", known.len(), slowest.len()),
        of(|change, _| change.seen - change.sent),
        of(|change, _| change.changed - change.sent),
        of(|change, stages| stages.read.0 - change.changed),
        of(|_, stages| stages.read.1 - stages.read.0),
        of(|change, stages| change.copied - stages.read.1),
        of(|change, _| change.seen - change.copied),
        of(|change, stages| stages.write.1 - change.copied),
    );
}
