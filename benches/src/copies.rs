//! CPU time per maintained copy, of the server and of the client apart: denormd, and what people do without it.
//!
//! One round changes each source once. That costs the same in all ways and is not measured; the updates of the targets are.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use bson::{Document, doc};
use denormd_show::{
    figures::{median, spread},
    host,
    print::{bold, count, dim, heading},
};
use mongodb::{Database, options::WriteConcern};

use crate::{
    bench::{Bench, Cost, DATABASE, Running, breath, index_products, insert, update_by},
    process::Process,
    scan::{self, RULES},
};

/// Targets. All of them change in a round, whatever the fan-out.
const COPIES: i32 = 20_000;
/// Targets of each source.
const FAN_OUTS: [i32; 4] = [1, 4, 100, 10_000];
/// The first pause between two looks at the script's progress.
const PAUSE: Duration = Duration::from_millis(5);

/// A way to bring copies up to date after their sources have changed.
enum Way {
    /// The daemon.
    Denormd,
    /// Updates by the application itself, after it has updated a source.
    DualWrites,
    /// An aggregation over all targets, as a scheduled job runs it.
    Merge,
    /// `script.py` on a change stream, run by this Python.
    Script(PathBuf),
}

impl Way {
    fn name(&self) -> &'static str {
        match self {
            Self::Denormd => "denormd",
            Self::DualWrites => "dual writes",
            Self::Merge => "$merge",
            Self::Script(_) => "script",
        }
    }
}

/// Measures and prints.
pub async fn measure(bench: &Bench) {
    let copies = count(usize::try_from(COPIES).unwrap_or_default());
    heading(&format!("Copies: all sources of {copies} copies change, by denormd and without it"));
    let mut ways = vec![Way::Denormd, Way::DualWrites, Way::Merge];
    match python() {
        Ok(python) => ways.push(Way::Script(python)),
        Err(why) => println!("  script skipped: {why}"),
    }
    let mut measured = Vec::new();
    for fan_out in FAN_OUTS {
        measured.push((fan_out, rounds(bench, &ways, fan_out).await));
    }
    print(&ways, &measured);
}

/// The costs of each way in turn, round by round.
async fn rounds(bench: &Bench, ways: &[Way], fan_out: i32) -> Vec<Vec<Cost>> {
    let stock = Stock::load(bench, fan_out).await;
    let daemon = bench.daemon(RULES, 1).await;
    let mut all = vec![Vec::new(); ways.len()];
    let mut version = 0;
    for round in 0..=bench.rounds {
        let mut line = format!("  fan-out {fan_out:<6}");
        for (way, costs) in ways.iter().zip(&mut all) {
            version += 1;
            let cost = stock.cost(way, version, &daemon).await;
            line.push_str(&format!("   {} {:>6.2} s", way.name(), cost.wall));
            // The first round warms caches.
            if round > 0 {
                costs.push(cost);
            }
        }
        println!("{}", if round == 0 { dim(&line) } else { line });
    }
    daemon.stop().await;
    all
}

/// The documents: parts, and products with the name and the price of their part.
struct Stock<'a> {
    bench: &'a Bench,
    database: Database,
    /// Number of parts.
    sources: i32,
}

impl<'a> Stock<'a> {
    async fn load(bench: &'a Bench, fan_out: i32) -> Self {
        let database = bench.fresh().await;
        let sources = COPIES / fan_out;
        let part = |id: i32| {
            let mut part = copied(0);
            part.insert("_id", id);
            part
        };
        insert(&database, "parts", (0..sources).map(part).collect()).await;
        let product = |id: i32| doc! {"_id": id, "part": id % sources, "stock": id % 7};
        insert(&database, "products", (0..COPIES).map(product).collect()).await;
        index_products(&database).await;
        Self { bench, database, sources }
    }

    /// Changes all sources, and returns the cost of bringing the copies up to date.
    async fn cost(&self, way: &Way, version: i32, daemon: &Running) -> Cost {
        let cost = match way {
            Way::Denormd => {
                daemon.held(self.change(version)).await;
                let applied = async {
                    daemon.applied().await;
                    // Once more: the stream is past its own writes then.
                    daemon.applied().await;
                };
                let cost = self.spent(daemon.pid(), applied).await;
                self.assert_fresh(way, version).await;
                cost
            }
            // Held, the daemon does not bring them up to date itself.
            Way::DualWrites => daemon.held(self.client(way, version, self.update_targets(version))).await,
            Way::Merge => daemon.held(self.client(way, version, scan::merge(&self.database, scan::copies()))).await,
            Way::Script(python) => daemon.held(self.script(way, version, python)).await,
        };
        // It finds the copies of the others up to date.
        daemon.applied().await;
        breath().await;
        cost
    }

    /// Changes all sources, and returns the cost of work that this process does.
    async fn client(&self, way: &Way, version: i32, work: impl Future<Output = ()>) -> Cost {
        self.change(version).await;
        let cost = self.spent(std::process::id(), work).await;
        self.assert_fresh(way, version).await;
        cost
    }

    /// Updates all sources, in the order of their `_id`.
    async fn change(&self, version: i32) {
        let update = |id: i32| doc! {"q": {"_id": id}, "u": {"$set": copied(version)}};
        let statements: Vec<Document> = (0..self.sources).map(update).collect();
        // Several connections would change the order.
        update_by(1, &self.database, "parts", &statements).await;
        self.bench.at_rest().await;
    }

    /// The second half of dual writes: one statement for each source, one after the other.
    async fn update_targets(&self, version: i32) {
        let products = self.database.collection::<Document>("products");
        for part in 0..self.sources {
            let update = products.update_many(doc! {"part": part}, doc! {"$set": copied(version)});
            update.write_concern(WriteConcern::majority()).await.expect("an update");
        }
    }

    /// Starts the script, holds it while the sources change, and returns its cost from there. Each round has a new process
    /// without a token, so that it does not read what the other ways did.
    async fn script(&self, way: &Way, version: i32, python: &Path) -> Cost {
        let tokens = self.database.collection::<Document>("tokens");
        tokens.delete_many(doc! {}).await.expect("a delete");
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/script.py");
        let mut command = Command::new(python);
        command.args([file, &self.bench.uri(), DATABASE]).stdin(Stdio::null());
        let mut script = Process::start(&mut command);
        let follows = async || tokens.find_one(doc! {}).await.expect("a look").is_some();
        script.until("the script has a token", PAUSE, follows).await;
        script.signal("STOP");
        self.change(version).await;
        // It updates the targets in the order of the changes. This one is the last, and found by its `_id` at little cost.
        let mut last = stale(version);
        last.insert("_id", COPIES - 1);
        let pid = script.pid();
        let applied = async {
            script.signal("CONT");
            script.applied(&self.database, ("products", last), PAUSE).await;
        };
        let cost = self.spent(pid, applied).await;
        self.assert_fresh(way, version).await;
        cost
    }

    /// The cost of some work for the server and for the process that does it, which is the `daemon` of the result.
    async fn spent(&self, pid: u32, work: impl Future<Output = ()>) -> Cost {
        let (begin, before) = (self.bench.spent(None), host::cpu(pid));
        work.await;
        let cost = self.bench.since(begin, None);
        Cost { daemon: host::cpu(pid) - before, ..cost }
    }

    /// Asserts that every copy is up to date: otherwise it was not the same work.
    async fn assert_fresh(&self, way: &Way, version: i32) {
        let products = self.database.collection::<Document>("products");
        let stale = products.count_documents(stale(version)).await.expect("a count");
        assert_eq!(stale, 0, "{}: stale copies", way.name());
    }
}

/// The copied fields after this change.
fn copied(version: i32) -> Document {
    doc! {"name": format!("part {version}"), "price": version}
}

/// Finds the targets that are not up to date after this change.
fn stale(version: i32) -> Document {
    doc! {"$nor": [copied(version)]}
}

/// The path of a Python with PyMongo, or the reason why there is none.
fn python() -> Result<PathBuf, String> {
    let finder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/pymongo_python.py");
    let found = Command::new("python3").arg(finder).stdin(Stdio::null()).output();
    let found = found.map_err(|why| format!("python3 does not start ({why})"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if found.status.success() { Ok(text(&found.stdout).into()) } else { Err(text(&found.stderr)) }
}

fn print(ways: &[Way], measured: &[(i32, Vec<Vec<Cost>>)]) {
    heading("CPU per copy in microseconds and seconds from begin to end: medians; of the sum also (least to greatest)");
    println!(
        "  {:<10}{:<14}{:>18}{:>10}{:>28}{:>10}",
        "fan-out", "way", "client or daemon", "server", "sum", "seconds"
    );
    for (fan_out, all) in measured {
        for (way, costs) in ways.iter().zip(all) {
            let of = |what: fn(&Cost) -> f64| costs.iter().map(what).collect::<Vec<f64>>();
            let each = |what: fn(&Cost) -> f64| {
                of(what).into_iter().map(|seconds| seconds / f64::from(COPIES) * 1e6).collect::<Vec<f64>>()
            };
            println!(
                "  {fan_out:<10}{:<14}{:>18.1}{:>10.1}{}{:>10.2}",
                way.name(),
                median(&each(|cost| cost.daemon)),
                median(&each(|cost| cost.server)),
                bold(&format!("{:>28}", spread(&each(|cost| cost.server + cost.daemon), 1))),
                median(&of(|cost| cost.wall)),
            );
        }
    }
    for line in [
        "No way includes the updates of the sources. Dual writes: one updateMany for each source, one after the other.",
        "$merge reads all products, whatever changed. Here all of them are stale, which is its best case.",
        "The script saves its resume token after every 100 events.",
        "Daemon and script are held while the sources change: they work off a backlog. CPU is counted in ticks of 10 ms, 0.5 µs a copy.",
    ] {
        println!("{}", dim(&format!("  {line}")));
    }
}
