//! The time from a change to its target while changes arrive at a given rate, and the same by a bare change stream read and
//! one write.

mod trace;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_show::{
    figures::{median, spread},
    print::{bold, count, heading},
};
use futures_util::{StreamExt, future::join_all};
use mongodb::Database;
use tokio::task::JoinHandle;

use crate::{
    bare,
    bench::{Bench, Cost, insert},
};

const SOURCES: i32 = 20_000;
/// Changes a second.
pub const RATES: [u32; 3] = [200, 1_000, 5_000];
/// Duration of the changes in one measurement.
const SPAN: Duration = Duration::from_secs(5);
/// Connections that write changes.
const WRITERS: u32 = 8;
/// The rule that is measured.
pub const RULES: &str =
    "  - name: names\n    copy: { source: parts, target: products, match: { part: _id }, set: { n: $n } }\n";

/// The same copy, for the bare path.
const COPY: bare::Copy = bare::Copy { source: "parts", target: "products", reference: "part" };

type Sent = Arc<Mutex<HashMap<i64, Instant>>>;

/// Milliseconds from just before the source's write is sent to the event of the target's.
struct Latency {
    middle: f64,
    high: f64,
    cost: Cost,
}

/// Measures and prints.
pub async fn measure(bench: &Bench) {
    heading("Live: from a source's write to its target's, each read by the same change stream (milliseconds)");
    let database = bench.fresh().await;
    load(&database).await;
    let daemon = bench.daemon(RULES, 1).await;
    let mut next = 1_i64;
    println!(
        "  {:<10}{:<24}{:<24}{:<24}{:<24}{:<22}{:>26}",
        "changes/s", "denormd p50", "p99", "bare p50", "p99", "p99 ratio", "server CPU ratio, daemon"
    );
    for rate in RATES {
        let (mut mine, mut bare) = (Vec::new(), Vec::new());
        for round in 0..2 * bench.rounds {
            // denormd runs first in every second pair.
            if round % 4 == 0 || round % 4 == 3 {
                mine.push(run(bench, &database, rate, &mut next, Some(&daemon)).await);
            } else {
                // A held daemon does nothing. When it resumes, it finds that the copies it missed are right.
                let held = run(bench, &database, rate, &mut next, None);
                let other = bare::follow(&database, COPY).await;
                bare.push(daemon.held(held).await);
                other.abort();
            }
            daemon.applied().await;
        }
        let each = |of: &[Latency], what: fn(&Latency) -> f64| of.iter().map(what).collect::<Vec<_>>();
        let ratios: Vec<f64> = mine.iter().zip(&bare).map(|(mine, bare)| mine.high / bare.high).collect();
        let server: Vec<f64> = mine.iter().zip(&bare).map(|(mine, bare)| mine.cost.server / bare.cost.server).collect();
        println!(
            "  {:<10}{:<24}{:<24}{:<24}{:<24}{:<22}{:>13.2}{:>10.1} µs",
            count(rate as usize),
            spread(&each(&mine, |l| l.middle), 1),
            spread(&each(&mine, |l| l.high), 1),
            spread(&each(&bare, |l| l.middle), 1),
            spread(&each(&bare, |l| l.high), 1),
            bold(&spread(&ratios, 2)),
            median(&server),
            median(&each(&mine, |l| l.cost.daemon)) / f64::from(rate) / SPAN.as_secs_f64() * 1e6,
        );
    }
    daemon.stop().await;
    trace::measure(bench).await;
}

/// Writes the documents before the first measurement.
pub async fn load(database: &Database) {
    insert(database, "parts", (0..SOURCES).map(|id| doc! {"_id": id, "n": 0_i64}).collect()).await;
    insert(database, "products", (0..SOURCES).map(|id| doc! {"_id": id, "part": id, "n": 0_i64}).collect()).await;
}

/// Number of changes in one measurement at this rate.
pub fn changes(rate: u32) -> usize {
    usize::try_from(u64::from(rate) * SPAN.as_secs()).unwrap_or(usize::MAX)
}

/// The cost of changes at this rate, and the 99th percentile of the latency in milliseconds, after a measurement that warms caches.
pub async fn denormd(bench: &Bench, database: &Database, rate: u32, daemon: &crate::bench::Running) -> (Cost, f64) {
    let mut next = 1;
    run(bench, database, rate, &mut next, Some(daemon)).await;
    daemon.applied().await;
    let latency = run(bench, database, rate, &mut next, Some(daemon)).await;
    daemon.applied().await;
    (latency.cost, latency.high)
}

async fn run(
    bench: &Bench,
    database: &Database,
    rate: u32,
    next: &mut i64,
    daemon: Option<&crate::bench::Running>,
) -> Latency {
    let sent: Sent = Arc::default();
    let total = rate * u32::try_from(SPAN.as_secs()).unwrap_or(1);
    let first = *next;
    *next += i64::from(total);
    let observer = observe(database, first, total, sent.clone()).await;
    let begin = bench.spent(daemon);
    let writers = (0..WRITERS).map(|writer| write(database.clone(), rate, writer, first, total, sent.clone()));
    join_all(writers).await;
    let mut late = observer.await.expect("the observer");
    let cost = bench.since(begin, daemon);
    late.sort_by(f64::total_cmp);
    let at = |share: f64| {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a place in a list"
        )]
        let place = ((late.len() - 1) as f64 * share) as usize;
        late[place]
    };
    Latency { middle: at(0.5), high: at(0.99), cost }
}

/// Writes each of its changes at its time, late or not.
async fn write(database: Database, rate: u32, writer: u32, first: i64, total: u32, sent: Sent) {
    let parts = database.collection::<Document>("parts");
    let begin = Instant::now();
    for nth in (writer..total).step_by(WRITERS as usize) {
        tokio::time::sleep_until((begin + Duration::from_secs(1) * nth / rate).into()).await;
        let n = first + i64::from(nth);
        let change =
            parts.update_one(doc! {"_id": i32::try_from(nth).unwrap_or_default() % SOURCES}, doc! {"$set": {"n": n}});
        // Before it is sent: an event may be quicker than the acknowledgement.
        sent.lock().expect("a lock").insert(n, Instant::now());
        change.await.expect("an update");
    }
}

/// Follows the targets, and says how late each change was.
async fn observe(database: &Database, first: i64, total: u32, sent: Sent) -> JoinHandle<Vec<f64>> {
    let pipeline =
        [doc! {"$match": {"operationType": "update"}}, doc! {"$project": {"n": "$updateDescription.updatedFields.n"}}];
    let stream = database.collection::<Document>("products").watch().pipeline(pipeline).await.expect("a stream");
    let mut stream = stream.with_type::<Document>();
    tokio::spawn(async move {
        let last = first + i64::from(total) - 1;
        let mut late = Vec::new();
        while let Some(event) = stream.next().await {
            let event = event.expect("an event");
            let Ok(n) = event.get_i64("n") else { continue };
            if let Some(at) = sent.lock().expect("a lock").remove(&n) {
                late.push(at.elapsed().as_secs_f64() * 1e3);
            }
            if n == last {
                break;
            }
        }
        late
    })
}
