//! Several active instances on this machine, each with a partition of its own: what they achieve together, and what each
//! further one costs.
//!
//! Each instance reads the whole stream, so the server sends every event once more for it. A backlog shows the effect of
//! that on the throughput; new sources without targets show the cost of reading alone. The time of a backlog ends with
//! the last write of a copy, by the oplog: `/v1/wait` learns the progress of other instances from their checkpoints, up to
//! a second late. CPU that is used when nothing changes is measured first, and subtracted for the time after the last write;
//! for new sources without targets it is subtracted for the whole time.

use std::time::{Duration, SystemTime};

use bson::{Document, doc};
use denormd_show::{
    figures::{median, spread},
    print::{bold, dim, heading},
};
use futures_util::future::join_all;
use mongodb::Database;

use crate::{
    bench::{Bench, Cost, DATABASE, Running, cores, held, insert},
    drain::{assert_true, change, load},
    workloads::{self, Workload},
};

/// Numbers of partitions, and of instances.
const PARTITIONS: [u32; 3] = [1, 2, 4];
/// The workload. Its last write is about the last thing that it does.
const RENAME: &str = "rename";
/// New sources without targets in one measurement.
const EVENTS: i32 = 20_000;
/// Time for the streams to pass the last writes.
const SETTLED: Duration = Duration::from_millis(1500);
/// Duration of the measurement without changes.
const QUIET: Duration = Duration::from_secs(5);
/// The machines, by their cores, and the numbers of instances of the estimate.
const ESTIMATED: ([u32; 2], [u32; 4]) = ([8, 16], [1, 2, 4, 8]);

/// The measurements with one number of instances.
struct Measured {
    instances: u32,
    /// Without changes.
    idle: Cost,
    drains: Vec<Cost>,
    /// New sources without targets.
    events: Vec<Cost>,
}

/// Measures and prints.
pub async fn measure(bench: &Bench) {
    let all = workloads::all();
    let Some(rename) = all.iter().find(|workload| workload.name == RENAME) else { return };
    heading(&format!("Partitions, an instance for each; {RENAME}: {}", rename.what));
    let mut measured = Vec::new();
    for instances in PARTITIONS {
        measured.push(run(bench, rename, instances).await);
    }
    print(rename, &measured);
}

async fn run(bench: &Bench, workload: &Workload, instances: u32) -> Measured {
    let database = bench.fresh().await;
    load(&database, workload).await;
    let rules = workload.rules.matches("- name:").count();
    let daemons = bench.instances(instances, workload.rules, rules).await;
    bench.at_rest().await;
    let started = bench.spent(&daemons);
    tokio::time::sleep(QUIET).await;
    let idle = bench.since(started, &daemons);
    let mut measured = Measured { instances, idle, drains: Vec::new(), events: Vec::new() };
    for round in 0..=bench.rounds {
        let version = i32::try_from(round).unwrap_or_default() + 1;
        let cost = drained(bench, &database, workload, version, &daemons, idle).await;
        let line = format!(
            "  {instances} partitions {:>8.2} s   server {:>6.2} s   daemons {:>6.2} s",
            cost.wall, cost.server, cost.daemon
        );
        println!("{}", if round == 0 { dim(&line) } else { line });
        let events = unreferenced(bench, &database, version, &daemons, idle).await;
        // The first round warms caches.
        if round > 0 {
            measured.drains.push(cost);
            measured.events.push(events);
        }
    }
    join_all(daemons.into_iter().map(Running::stop)).await;
    measured
}

/// The cost of one round's backlog.
async fn drained(
    bench: &Bench,
    database: &Database,
    workload: &Workload,
    version: i32,
    daemons: &[Running],
    idle: Cost,
) -> Cost {
    let changed = async {
        change(database, workload, version).await;
        bench.at_rest().await;
        (SystemTime::now(), bench.spent(daemons))
    };
    let (started, spent) = held(daemons, changed).await;
    // Covers the partitions of the other instances, too.
    daemons[0].applied().await;
    tokio::time::sleep(SETTLED).await;
    let cost = bench.since(spent, daemons);
    assert_true(database, workload, version, &daemons[0]).await;
    let written = last_write(bench, (workload.stale)(version).0).await;
    let wall = written.duration_since(started).expect("a write after the changes").as_secs_f64();
    Cost { wall, ..without(cost, idle, cost.wall - wall) }
}

/// The cost of new sources that no target refers to, while the daemons follow.
async fn unreferenced(bench: &Bench, database: &Database, version: i32, daemons: &[Running], idle: Cost) -> Cost {
    let part = |nth: i32| doc! {"_id": -version * EVENTS - nth, "name": "part", "price": nth};
    let parts = (0..EVENTS).map(part).collect();
    bench.at_rest().await;
    let started = bench.spent(daemons);
    insert(database, "parts", parts).await;
    daemons[0].applied().await;
    tokio::time::sleep(SETTLED).await;
    let cost = bench.since(started, daemons);
    without(cost, idle, cost.wall)
}

/// The time of the last write to a collection, by the server's clock, which is this machine's.
async fn last_write(bench: &Bench, collection: &str) -> SystemTime {
    let oplog = bench.client.database("local").collection::<Document>("oplog.rs");
    let entry = oplog.find_one(doc! {"ns": format!("{DATABASE}.{collection}")}).sort(doc! {"$natural": -1});
    let entry = entry.await.expect("the oplog").expect("a write");
    entry.get_datetime("wall").expect("its time").to_system_time()
}

/// The cost without the CPU of so many idle seconds.
fn without(cost: Cost, idle: Cost, seconds: f64) -> Cost {
    let share = seconds / idle.wall;
    Cost { server: cost.server - share * idle.server, daemon: cost.daemon - share * idle.daemon, ..cost }
}

fn middle(costs: &[Cost], what: fn(&Cost) -> f64) -> f64 {
    median(&costs.iter().map(what).collect::<Vec<_>>())
}

/// Medians of the CPU seconds of the server, and of all daemons together, for each of so many changes.
fn each(costs: &[Cost], changes: f64) -> [f64; 2] {
    [middle(costs, |cost| cost.server) / changes, middle(costs, |cost| cost.daemon) / changes]
}

/// The CPU that each further instance takes, from that of one and of the most instances.
fn further(all: &[Measured], cpu: impl Fn(&Measured) -> [f64; 2]) -> [f64; 2] {
    let (one, most) = (&all[0], &all[all.len() - 1]);
    let ([server, daemons], [more_server, more_daemons]) = (cpu(one), cpu(most));
    let instances = f64::from(most.instances - one.instances);
    [(more_server - server) / instances, (more_daemons - daemons) / instances]
}

/// An estimate of the changes a second that `n` instances achieve beside the server on a machine with so many cores:
/// `min(n * alone, used * cores / (first + (n - 1) * further))`. An instance achieves no more than one alone did here,
/// and all processes together use no larger share of the cores than they did here. `further` comes from the backlogs, so it
/// includes the events of the copies' writes, and the lookups. One and the most instances determine the figures, so the
/// numbers in between are the test.
struct Model {
    /// Changes a second of one instance.
    alone: f64,
    /// Greatest share of the cores that was in use.
    used: f64,
    /// CPU seconds for a change with one instance: of the server, and of the daemon.
    first: [f64; 2],
    /// CPU seconds for a change with each further instance: of the server, and of the daemons.
    further: [f64; 2],
}

impl Model {
    fn of(all: &[Measured], changes: f64) -> Self {
        let cpu = |measured: &Measured| each(&measured.drains, changes);
        let rate = |measured: &Measured| changes / middle(&measured.drains, |cost| cost.wall);
        let used = all.iter().map(|measured| cpu(measured).iter().sum::<f64>() * rate(measured) / f64::from(cores()));
        // The CPU includes what follows the last write, the time does not.
        let used = used.fold(0.0, f64::max).min(1.0);
        Self { alone: rate(&all[0]), used, first: cpu(&all[0]), further: further(all, cpu) }
    }

    /// Changes a second that the cores allow.
    fn limit(&self, cores: u32, instances: u32) -> f64 {
        let [first, further] = [self.first, self.further].map(|cpu| cpu.iter().sum::<f64>());
        self.used * f64::from(cores) / (first + f64::from(instances - 1) * further)
    }

    fn rate(&self, cores: u32, instances: u32) -> f64 {
        self.limit(cores, instances).min(f64::from(instances) * self.alone)
    }

    fn print(&self) {
        let Self { alone, used, first, further } = self;
        let [[server, daemon], [more_server, more_daemons]] = [first, further].map(|cpu| cpu.map(|cpu| cpu * 1e6));
        println!(
            "{}",
            bold(&format!(
                "  Model, not a measurement: changes/s = min(n × {alone:.0}, {used:.2} × cores / ({server:.1} + {daemon:.1} + (n - 1) × ({more_server:.1} + {more_daemons:.1}) µs))"
            ))
        );
        for cores in ESTIMATED.0 {
            let estimate = |instances: u32| {
                format!("n = {instances}: {:.0} ({:.0})", self.rate(cores, instances), self.limit(cores, instances))
            };
            println!("    {cores} cores   {}", ESTIMATED.1.map(estimate).join("   "));
        }
        println!(
            "{}",
            dim(&format!(
                "    n: partitions, each with an instance. CPU: of the server + of the daemons. In parentheses the limit of the cores alone: n × {alone:.0} is of instances that share {} cores with the server.",
                cores()
            ))
        );
    }
}

fn print(workload: &Workload, all: &[Measured]) {
    let changes = f64::from(u32::try_from(workload.changes).unwrap_or(u32::MAX));
    let model = Model::of(all, changes);
    println!(
        "  {:<12}{:>24}{:>10}{:>10}{:>14}{:>14}{:>14}",
        "partitions", "wall", "speed-up", "model", "server CPU", "daemons' CPU", "of each"
    );
    let alone = middle(&all[0].drains, |cost| cost.wall);
    for Measured { instances, drains, .. } in all {
        let wall: Vec<f64> = drains.iter().map(|cost| cost.wall).collect();
        let daemons = middle(drains, |cost| cost.daemon);
        println!(
            "  {instances:<12}{:>22} s{:>10}{:>8.2} s{:>12.2} s{daemons:>12.2} s{:>12.2} s",
            spread(&wall, 2),
            bold(&format!("{:.2}", alone / median(&wall))),
            changes / model.rate(cores(), *instances),
            middle(drains, |cost| cost.server),
            daemons / f64::from(*instances)
        );
    }
    print_events(all, &model);
    model.print();
}

fn print_events(all: &[Measured], model: &Model) {
    let cpu = |measured: &Measured| each(&measured.events, f64::from(EVENTS)).map(|cpu| cpu * 1e6);
    println!(
        "  {:<12}{:>24}{:>24}{:>24}{:>24}",
        "partitions", "server, an event", "daemons", "server, idle", "daemons"
    );
    for measured in all {
        let ([server, daemons], Measured { instances, idle, .. }) = (cpu(measured), measured);
        let [idle_server, idle_daemons] = [idle.server, idle.daemon].map(|cpu| cpu / idle.wall * 1e3);
        println!(
            "  {instances:<12}{server:>21.1} µs{daemons:>21.1} µs{idle_server:>19.1} ms/s{idle_daemons:>19.1} ms/s"
        );
    }
    let ([stream, reading], whole) = (further(all, cpu), model.first[0] * 1e6);
    println!(
        "  Each further partition: its stream takes {stream:.1} µs of the server for an event, beside the {whole:.1} µs that a change with its writes takes with one instance: {:.0}% more. Reading it takes {reading:.1} µs of its instance.",
        stream / whole * 100.0
    );
    println!(
        "  Break-even: the streams of {} partitions take as much of the server as the writes of a change, {:.1} µs.",
        bold(&format!("{:.1}", (whole - stream) / stream)),
        whole - stream
    );
}
