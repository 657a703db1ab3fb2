//! `make guard-cost`: the cost of `guard: watch`. The same changes on the same server without a daemon, under `guard:
//! audit` and under `guard: watch`, in turn, for several rounds.

use std::{env, fs, path::PathBuf, time::Duration};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::{
    daemon::Daemon,
    figures::spread,
    host,
    print::{bold, count, dim, heading},
    progress::Progress,
};
use mongodb::{Client, Database};
use rand::seq::SliceRandom;
use tokio::time::Instant;

const DATABASE: &str = "guard_cost";
/// The database of the daemon's state.
const STATE: &str = "denormd";
const SOURCES: i32 = 20_000;
/// Targets of one source.
const FAN_OUT: i32 = 4;
/// Number of changes of each source in a run, with a pause for the daemon after each.
const TIMES: i32 = 3;
/// Statements in one command of the application.
const STATEMENTS: i32 = 1_000;

/// The guard during the changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// No daemon: the cost of the changes themselves.
    Nobody,
    Audit,
    Watch,
}

const GUARDS: [Guard; 3] = [Guard::Nobody, Guard::Audit, Guard::Watch];

/// The cost of a run.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Time from the first change until all are applied.
    wall: Duration,
    /// CPU seconds of the server.
    server: f64,
    /// CPU seconds of the daemon.
    daemon: f64,
}

#[tokio::main]
async fn main() {
    let rounds = env::var("ROUNDS").ok().filter(|text| !text.is_empty());
    let rounds: usize = rounds.map_or(5, |text| text.parse().expect("ROUNDS is a number"));
    let changes = SOURCES * TIMES;
    heading(&format!(
        "{} changes, each with {FAN_OUT} targets, without a daemon and under each guard, {rounds} rounds",
        count(size(changes))
    ));
    let set = ReplicaSet::builder().cache_gb(1.0).oplog_mb(2048).start().await;
    let bench = Bench { client: set.client().await, server: set.node(0).pid(), uri: set.uri() };
    let mut costs: Vec<[Cost; 3]> = Vec::new();
    println!("  {:<8}{:<8}{:>10}{:>14}{:>14}", "round", "guard", "wall", "server CPU", "daemon CPU");
    for round in 1..=rounds {
        let mut order = GUARDS;
        order.shuffle(&mut rand::rng());
        let mut found = [None; 3];
        for guard in order {
            let cost = bench.run(guard).await;
            let name = format!("{guard:?}").to_lowercase();
            let wall = cost.wall.as_secs_f64();
            println!("  {round:<8}{name:<8}{wall:>8.2} s{:>12.2} s{:>12.2} s", cost.server, cost.daemon);
            found[guard as usize] = Some(cost);
        }
        costs.push(found.map(|cost| cost.expect("each was run")));
    }
    print(&costs, f64::from(changes));
}

fn size(number: i32) -> usize {
    usize::try_from(number).unwrap_or_default()
}

struct Bench {
    client: Client,
    server: u32,
    uri: String,
}

impl Bench {
    async fn run(&self, guard: Guard) -> Cost {
        for database in [DATABASE, STATE] {
            self.client.database(database).drop().await.expect("a drop");
        }
        let database = self.client.database(DATABASE);
        load(&database).await;
        let config = ConfigFile::write(guard);
        let mut daemon = match guard {
            Guard::Nobody => None,
            Guard::Audit | Guard::Watch => Some(self.caught_up(&config).await),
        };
        let pid = daemon.as_ref().and_then(Daemon::pid);
        let (server, mine) = (host::cpu(self.server), pid.map_or(0.0, host::cpu));
        let started = Instant::now();
        for time in 1..=TIMES {
            change(&database, time).await;
            if let Some(daemon) = &daemon {
                daemon.wait();
            }
        }
        let cost = Cost {
            wall: started.elapsed(),
            server: host::cpu(self.server) - server,
            daemon: pid.map_or(0.0, host::cpu) - mine,
        };
        if let Some(daemon) = &mut daemon {
            assert_true(&database).await;
            let warnings = daemon.warnings();
            assert!(warnings.is_empty(), "{} warnings, the first: {}", warnings.len(), warnings[0]);
            daemon.stop().await;
        }
        cost
    }

    /// A daemon that has caught up.
    async fn caught_up(&self, config: &ConfigFile) -> Daemon {
        let mut daemon = Daemon::with(&config.0, &self.uri).reachable();
        daemon.plan_apply();
        daemon.start();
        Progress::new(&self.client, DATABASE, 1).wait_backfilled().await;
        daemon.wait();
        daemon
    }
}

/// A config file that is removed with the value.
struct ConfigFile(PathBuf);

impl ConfigFile {
    fn write(guard: Guard) -> Self {
        let guard = if guard == Guard::Watch { "watch" } else { "audit" };
        let path = env::temp_dir().join(format!("denormd-guard-cost-{}.yaml", std::process::id()));
        let text = format!(
            "mongodb: {{ uri: \"mongodb://localhost\", database: {DATABASE} }}\nrules:\n  - name: names\n    guard: {guard}\n    copy: {{ source: parts, target: products, match: {{ part: _id }}, set: {{ name: $name, price: $price }} }}\n"
        );
        fs::write(&path, text).expect("a config file");
        Self(path)
    }
}

impl Drop for ConfigFile {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

async fn load(database: &Database) {
    let parts: Vec<Document> = (0..SOURCES).map(|id| doc! {"_id": id, "name": "part", "price": 0}).collect();
    database.collection("parts").insert_many(parts).await.expect("an insert");
    let products: Vec<Document> =
        (0..SOURCES * FAN_OUT).map(|id| doc! {"_id": id, "part": id % SOURCES, "stock": id % 7}).collect();
    database.collection("products").insert_many(products).await.expect("an insert");
}

/// Each part gets a new name and a new price.
async fn change(database: &Database, time: i32) {
    for first in (0..SOURCES).step_by(size(STATEMENTS)) {
        let updates: Vec<Document> = (first..first + STATEMENTS)
            .map(|id| doc! {"q": {"_id": id}, "u": {"$set": {"name": format!("part {time}"), "price": time}}})
            .collect();
        let reply = database.run_command(doc! {"update": "parts", "updates": updates}).await.expect("an update");
        assert_eq!(reply.get_i32("nModified").ok(), Some(STATEMENTS), "{reply}");
    }
}

/// Asserts that every copy is correct: otherwise the runs did different work.
async fn assert_true(database: &Database) {
    let stale = doc! {"$nor": [{"name": format!("part {TIMES}"), "price": TIMES}]};
    let stale = database.collection::<Document>("products").count_documents(stale).await.expect("a count");
    assert_eq!(stale, 0, "copies that are not true after `denormd wait`");
}

fn print(costs: &[[Cost; 3]], changes: f64) {
    heading("CPU seconds per 1,000 changes, and wall time: median (least to greatest)");
    println!("  {:<10}{:>26}{:>26}{:>26}", "guard", "server", "daemon", "seconds in all");
    for guard in GUARDS {
        let of = |what: &dyn Fn(&Cost) -> f64| {
            spread(&costs.iter().map(|round| what(&round[guard as usize])).collect::<Vec<_>>(), 3)
        };
        let each = |seconds: f64| seconds / changes * 1000.0;
        let cells = [of(&|cost| each(cost.server)), of(&|cost| each(cost.daemon)), of(&|cost| cost.wall.as_secs_f64())];
        let name = format!("{guard:?}").to_lowercase();
        println!("  {name:<10}{}", cells.map(|cell| format!("{cell:>26}")).concat());
    }
    let ratio = |what: &dyn Fn(&Cost) -> f64| {
        let ratios = costs.iter().map(|[_, audit, watch]| what(watch) / what(audit));
        bold(&spread(&ratios.collect::<Vec<_>>(), 2))
    };
    println!("\n  watch / audit, round by round");
    println!("    wall time to drain      {}", ratio(&|cost| cost.wall.as_secs_f64()));
    println!("    CPU, server and daemon  {}", ratio(&|cost| cost.server + cost.daemon));
    println!("    CPU of the server       {}", ratio(&|cost| cost.server));
    println!("    CPU of the daemon       {}", ratio(&|cost| cost.daemon));
    println!("{}", dim("  The server's part has the application's own changes in it: the row `nobody`."));
}
