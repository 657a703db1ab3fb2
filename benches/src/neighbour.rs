//! The lag of a rule with few changes while another rule has a backlog, and the throughput of that backlog.
//!
//! A lag is the time between the commits of a source's write and of its copy, by the server's clock (`wallTime` of both
//! events), so the observer's own delay does not count. While the daemon is held, the neighbour does not change either: that
//! time would count as its lag. With `BEFORE`, the path of another denormd, both programs work
//! off the same backlogs in turn: the change in throughput is the median of these pairs. In a further run of each round, the bare
//! path maintains the neighbour's copies instead of denormd. `ROUNDS` rounds of renames, a quarter of them of the other backlogs.

use std::{
    collections::HashMap,
    env,
    path::PathBuf,
    pin::Pin,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_show::{
    figures::{median, spread},
    print::{bold, dim, heading},
};
use futures_util::StreamExt;
use mongodb::Database;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    bare,
    bench::{Bench, DATABASE, Running, insert, update},
};

/// Sources that are changed; `DOCUMENTS` has another number.
const SOURCES: i32 = 60_000;
const FAN_OUT: i32 = 4;
/// Targets of the one large source, for each of the others.
const LARGE: i32 = 3;
const ITEMS: i32 = 1_000;
/// Time between two changes of the neighbour.
const EVERY: Duration = Duration::from_millis(10);
/// Time limit for waits that end soon unless something is broken.
const LIMIT: Duration = Duration::from_mins(1);
/// Time without a backlog, for comparison.
const QUIET: Duration = Duration::from_secs(3);
/// The rule with the backlog.
const NAMES: &str = "  - name: names
    guard: GUARD
    copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, price: $price } }
";
const NEIGHBOUR: &str =
    "  - name: neighbour\n    copy: { source: items, target: orders, match: { item: _id }, set: { n: $n } }\n";
/// The neighbour's copy, for the bare path.
const COPY: bare::Copy = bare::Copy { source: "items", target: "orders", reference: "item" };

/// The ways in which a backlog comes about.
const BACKLOGS: [(&str, Backlog); 5] = [
    ("renames", Backlog::Renames),
    ("replay", Backlog::Replay),
    ("fan-out", Backlog::FanOut),
    ("backfill", Backlog::Backfill),
    ("repairs", Backlog::Repairs),
];

#[derive(Clone, Copy, PartialEq)]
enum Backlog {
    /// All sources of four targets each are changed while the daemon runs.
    Renames,
    /// The same, while the daemon is held.
    Replay,
    /// The one source of very many targets is changed.
    FanOut,
    /// The rule is backfilled, after its copies were changed by somebody else.
    Backfill,
    /// All copies are changed by somebody else, while the daemon is held, under `guard: watch`.
    Repairs,
}

/// The programs that maintain the neighbour's copies.
enum Program {
    /// The denormd in BEFORE, which also works off the backlog.
    Before(PathBuf),
    /// The denormd that is measured, which also works off the backlog.
    Denormd,
    /// A serial loop with a stream of its own, beside the denormd that works off the backlog.
    Bare,
}

impl Program {
    fn title(&self) -> &'static str {
        match self {
            Self::Before(_) => "before",
            Self::Denormd => "denormd",
            Self::Bare => "bare",
        }
    }
}

/// The neighbour's lags, in milliseconds, and the seconds that the backlog took.
#[derive(Default)]
struct Measured {
    quiet: Vec<f64>,
    beside: Vec<f64>,
    took: f64,
}

/// Measures and prints. `BACKLOGS=renames,replay` chooses some of the backlogs.
pub async fn measure(bench: &Bench, before: Option<&PathBuf>) {
    heading("Neighbour: the lag of a rule with 100 changes a second, beside the backlog of another rule");
    let database = bench.fresh().await;
    let sources = env::var("DOCUMENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(SOURCES);
    load(&database, sources).await;
    let mut programs: Vec<Program> = before.cloned().map(Program::Before).into_iter().collect();
    programs.extend([Program::Denormd, Program::Bare]);
    let only = env::var("BACKLOGS").unwrap_or_default();
    let mut version = 0;
    for (name, backlog) in BACKLOGS {
        if !only.is_empty() && !only.split(',').any(|word| word.trim() == name) {
            continue;
        }
        let mut all: Vec<Vec<Measured>> = programs.iter().map(|_| Vec::new()).collect();
        let rounds = if backlog == Backlog::Renames { bench.rounds } else { bench.rounds.div_ceil(4) };
        for round in 0..=rounds {
            for (program, measured) in programs.iter().zip(&mut all) {
                version += 1;
                let found = run(bench, &database, program, backlog, (version, sources)).await;
                // The first round warms caches.
                if round > 0 {
                    measured.push(found);
                }
            }
        }
        print(name, &programs, &all);
    }
    println!(
        "{}",
        dim(
            "  Milliseconds from the commit of the source's write to that of its copy. `before`: the program in BEFORE. `bare`: a change stream of the neighbour alone, and one write in a loop."
        )
    );
}

async fn load(database: &Database, sources: i32) {
    insert(database, "parts", (0..sources).map(|id| doc! {"_id": id, "name": "part 0", "price": 0}).collect()).await;
    let product = |id: i32| doc! {"_id": id, "part": id % sources, "stock": id % 7};
    insert(database, "products", (0..sources * FAN_OUT).map(product).collect()).await;
    insert(database, "parts", vec![doc! {"_id": -1, "name": "part 0", "price": 0}]).await;
    let product = |nth: i32| doc! {"_id": -1 - nth, "part": -1, "stock": nth % 7};
    insert(database, "products", (0..sources * LARGE).map(product).collect()).await;
    insert(database, "items", (0..ITEMS).map(|id| doc! {"_id": id, "n": 0_i64}).collect()).await;
    insert(database, "orders", (0..ITEMS).map(|id| doc! {"_id": id, "item": id, "n": 0_i64}).collect()).await;
}

async fn run(
    bench: &Bench,
    database: &Database,
    program: &Program,
    backlog: Backlog,
    (version, sources): (i32, i32),
) -> Measured {
    let mut rules = NAMES.replace("GUARD", if backlog == Backlog::Repairs { "watch" } else { "audit" });
    if !matches!(program, Program::Bare) {
        rules += NEIGHBOUR;
    }
    // The previous program may have had another number of rules.
    bench.forget().await;
    let count = rules.matches("- name:").count();
    let before = if let Program::Before(path) = program { Some(path.clone()) } else { None };
    let daemon = bench.daemon_of(before, &rules, count).await;
    let bare = match program {
        Program::Bare => Some(AbortOnDropHandle::new(bare::follow(database, COPY).await)),
        Program::Before(_) | Program::Denormd => None,
    };
    bench.at_rest().await;
    let observer = Observer::start(database).await;
    let (order, orders) = watch::channel(Order::Write);
    let writer = tokio::spawn(write(database.clone(), i64::from(version), orders));
    tokio::time::sleep(QUIET).await;
    let quiet = observer.found().await;
    let took = work_off(bench, database, (&daemon, count), &order, backlog, (version, sources)).await;
    order.send(Order::Stop).ok();
    writer.await.expect("the neighbour's writer");
    daemon.applied().await;
    until_copied(database).await;
    let beside = observer.end(database).await;
    assert_true(database, &daemon, backlog, version).await;
    daemon.stop().await;
    drop(bare);
    Measured { quiet, beside, took }
}

/// Makes the backlog, and returns the seconds until it is worked off.
async fn work_off(
    bench: &Bench,
    database: &Database,
    (daemon, rules): (&Running, usize),
    neighbour: &watch::Sender<Order>,
    backlog: Backlog,
    (version, sources): (i32, i32),
) -> f64 {
    let held = async |writes: Pin<Box<dyn Future<Output = ()> + '_>>| {
        neighbour.send(Order::Pause).ok();
        tokio::time::sleep(EVERY * 5).await;
        daemon.applied().await;
        daemon.held(writes).await;
        neighbour.send(Order::Write).ok();
    };
    let begin = match backlog {
        Backlog::Renames => {
            let begin = Instant::now();
            rename(database, 0..sources, version).await;
            begin
        }
        Backlog::Replay => {
            held(Box::pin(rename(database, 0..sources, version))).await;
            Instant::now()
        }
        Backlog::FanOut => {
            let begin = Instant::now();
            rename(database, -1..0, version).await;
            begin
        }
        Backlog::Backfill => {
            held(Box::pin(overwrite(database, version))).await;
            let begin = Instant::now();
            daemon.command(&["backfill", "--rule", "names", "--no-wait"]);
            bench.backfilled(rules).await;
            begin
        }
        Backlog::Repairs => {
            held(Box::pin(overwrite(database, version))).await;
            Instant::now()
        }
    };
    daemon.applied().await;
    begin.elapsed().as_secs_f64()
}

async fn rename(database: &Database, sources: std::ops::Range<i32>, version: i32) {
    let change = doc! {"$set": {"name": format!("part {version}"), "price": version}};
    let statements: Vec<Document> = sources.map(|id| doc! {"q": {"_id": id}, "u": change.clone()}).collect();
    update(database, "parts", &statements).await;
}

/// Somebody else changes the copies.
async fn overwrite(database: &Database, version: i32) {
    let other = doc! {"$set": {"price": -version}};
    database.collection::<Document>("products").update_many(doc! {}, other).await.expect("an update");
}

/// Waits until every copy of the neighbour is right: the bare path cannot report that it has caught up.
async fn until_copied(database: &Database) {
    let begun = Instant::now();
    let differing = [
        doc! {"$lookup": {"from": "items", "localField": "item", "foreignField": "_id", "as": "of"}},
        doc! {"$match": {"$expr": {"$ne": ["$n", {"$first": "$of.n"}]}}},
        doc! {"$limit": 1},
    ];
    let orders = database.collection::<Document>("orders");
    while orders.aggregate(differing.clone()).await.expect("a comparison").next().await.is_some() {
        assert!(begun.elapsed() < LIMIT, "the neighbour's copies are wrong");
        tokio::time::sleep(EVERY).await;
    }
}

/// All copies are right: otherwise it was not the same work.
async fn assert_true(database: &Database, daemon: &Running, backlog: Backlog, version: i32) {
    let stale = match backlog {
        Backlog::Renames | Backlog::Replay => doc! {"part": {"$gte": 0}, "price": {"$ne": version}},
        Backlog::FanOut => doc! {"part": -1, "price": {"$ne": version}},
        Backlog::Backfill | Backlog::Repairs => doc! {"price": -version},
    };
    let stale = database.collection::<Document>("products").count_documents(stale).await.expect("a count");
    assert_eq!(stale, 0, "copies that are wrong after a wait\n{}", daemon.log_tail());
}

/// An order to the writer of the neighbour's changes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    Write,
    Pause,
    Stop,
}

/// Changes one item after the other, each at its time.
async fn write(database: Database, version: i64, mut orders: watch::Receiver<Order>) {
    let items = database.collection::<Document>("items");
    let mut ticks = tokio::time::interval(EVERY);
    for nth in 0_i32.. {
        ticks.tick().await;
        if *orders.borrow() == Order::Pause {
            orders.wait_for(|order| *order != Order::Pause).await.expect("an order");
            ticks.reset_immediately();
        }
        if *orders.borrow() == Order::Stop {
            return;
        }
        let n = version * 1_000_000 + i64::from(nth);
        items.update_one(doc! {"_id": nth % ITEMS}, doc! {"$set": {"n": n}}).await.expect("an update");
    }
}

/// Follows sources and copies of the neighbour, and computes the lag of each.
struct Observer {
    ask: tokio::sync::mpsc::Sender<tokio::sync::oneshot::Sender<Vec<f64>>>,
    task: JoinHandle<()>,
}

impl Observer {
    async fn start(database: &Database) -> Self {
        let pipeline = [
            doc! {"$match": {"ns": {"$in": [{"db": DATABASE, "coll": "items"}, {"db": DATABASE, "coll": "orders"}]}, "operationType": "update"}},
            doc! {"$project": {"n": "$updateDescription.updatedFields.n", "coll": "$ns.coll", "wallTime": 1}},
        ];
        let stream = database.watch().pipeline(pipeline).await.expect("a stream");
        let mut stream = stream.with_type::<Document>();
        let (ask, mut asked) = tokio::sync::mpsc::channel::<tokio::sync::oneshot::Sender<Vec<f64>>>(1);
        let task = tokio::spawn(async move {
            let (mut written, mut lags) = (HashMap::new(), Vec::new());
            loop {
                let event = tokio::select! {
                    event = stream.next() => event.expect("a stream that goes on").expect("an event"),
                    answer = asked.recv() => match answer {
                        Some(answer) => {
                            answer.send(std::mem::take(&mut lags)).ok();
                            continue;
                        }
                        None => return,
                    },
                };
                let Ok(n) = event.get_i64("n") else { continue };
                let at = event.get_datetime("wallTime").expect("a wallTime").timestamp_millis();
                if event.get_str("coll").is_ok_and(|coll| coll == "items") {
                    written.insert(n, at);
                } else if let Some(source) = written.remove(&n) {
                    lags.push(f64::from(i32::try_from(at - source).expect("a short time")));
                }
            }
        });
        Self { ask, task }
    }

    /// The lags found since the last call.
    async fn found(&self) -> Vec<f64> {
        let (answer, found) = tokio::sync::oneshot::channel();
        self.ask.send(answer).await.expect("the observer");
        found.await.expect("an answer")
    }

    /// The lags found since the last call, including those of all events that are committed now.
    async fn end(self, database: &Database) -> Vec<f64> {
        let mark = doc! {"$set": {"n": -1_i64}};
        database.collection::<Document>("items").update_one(doc! {"_id": 0}, mark).await.expect("an update");
        let mut lags = self.found().await;
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let more = self.found().await;
            if more.is_empty() {
                self.task.abort();
                return lags;
            }
            lags.extend(more);
        }
    }
}

fn at(lags: &[f64], percent: usize) -> f64 {
    let mut lags = lags.to_vec();
    lags.sort_by(f64::total_cmp);
    lags.get(lags.len().saturating_sub(1) * percent / 100).copied().unwrap_or(f64::NAN)
}

fn print(name: &str, programs: &[Program], all: &[Vec<Measured>]) {
    let of = |rounds: &[Measured], lags: fn(&Measured) -> &[f64], percent| {
        spread(&rounds.iter().map(|round| at(lags(round), percent)).collect::<Vec<_>>(), 0)
    };
    for (program, rounds) in programs.iter().zip(all) {
        let title = program.title();
        println!(
            "  {name:<10}{title:<9} alone p50 {:<16} p99 {:<20} beside p50 {:<18} p99 {} max {:<22} backlog {} s",
            of(rounds, |round| &round.quiet, 50),
            of(rounds, |round| &round.quiet, 99),
            of(rounds, |round| &round.beside, 50),
            bold(&format!("{:<20}", of(rounds, |round| &round.beside, 99))),
            of(rounds, |round| &round.beside, 100),
            spread(&rounds.iter().map(|round| round.took).collect::<Vec<_>>(), 2),
        );
    }
    if let [Program::Before(_), ..] = programs
        && let [before, now, ..] = all
    {
        let ratios: Vec<f64> = before.iter().zip(now).map(|(before, now)| before.took / now.took).collect();
        println!(
            "  {name:<10}throughput of the backlog, now / before, pair by pair: {} ({} pairs, median {:.3})",
            bold(&spread(&ratios, 3)),
            ratios.len(),
            median(&ratios)
        );
    }
}
