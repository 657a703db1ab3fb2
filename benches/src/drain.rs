//! A backlog of changes, drained by the daemon; and the same target writes by a client that knows them.

use bson::{Bson, Document};
use denormd_show::{
    figures::{median, spread},
    host,
    print::{bold, dim, heading},
};
use mongodb::{Database, IndexModel};

use crate::{
    bench::{Bench, Cost, Running, STATEMENTS, WRITERS, breath, insert, update, update_by},
    workloads::{Change, Floor, Workload},
};

/// The measurements of one workload.
pub struct Drained {
    name: &'static str,
    changes: usize,
    denormd: Vec<Cost>,
    /// By the floor's name.
    floors: Vec<(String, Vec<Cost>)>,
    /// Megabytes at the end of a drain, and the most.
    memory: (f64, f64),
}

/// Measures the daemon and each floor in turn.
pub async fn measure(bench: &Bench, workload: &Workload) -> Drained {
    heading(&format!("{}: {}", workload.name, workload.what));
    let database = bench.fresh().await;
    load(&database, workload).await;
    let daemon = bench.daemon(workload.rules, workload.rules.matches("- name:").count()).await;
    let mut version = 1;
    let ways = ways(&(workload.floors)(version));
    let mut floors: Vec<(String, Vec<Cost>)> = ways.iter().map(|way| (way.title.clone(), Vec::new())).collect();
    let mut denormd = Vec::new();
    for round in 0..=bench.rounds {
        version += 1;
        let cost = drained(bench, &database, workload, version, &daemon).await;
        let mut line = format!("  {:<12}{:>7.2} s", "denormd", cost.wall);
        // The first round warms caches.
        if round > 0 {
            denormd.push(cost);
        }
        for (way, (name, costs)) in ways.iter().zip(&mut floors) {
            version += 1;
            let cost = daemon.held(write_floor(bench, &database, workload, version, way)).await;
            line.push_str(&format!("   {name} {:>6.2} s", cost.wall));
            if round > 0 {
                costs.push(cost);
            }
            // It catches up with what is true already.
            daemon.applied().await;
            breath().await;
        }
        println!("{}", if round == 0 { dim(&line) } else { line });
    }
    let memory = host::memory(daemon.pid());
    daemon.stop().await;
    Drained { name: workload.name, changes: workload.changes, denormd, floors, memory }
}

/// Writes the documents before the first round.
pub async fn load(database: &Database, workload: &Workload) {
    for (collection, documents) in (workload.load)() {
        insert(database, collection, documents).await;
    }
    if let Some((collection, paths)) = workload.index {
        let keys: Document = paths.into_iter().map(|path| (path.to_owned(), Bson::Int32(1))).collect();
        let index = IndexModel::builder().keys(keys).build();
        database.collection::<Document>(collection).create_index(index).await.expect("an index");
    }
}

/// Makes one round's backlog while the daemon is held, and returns what it cost to work it off.
pub async fn drained(bench: &Bench, database: &Database, workload: &Workload, version: i32, daemon: &Running) -> Cost {
    let changed = async {
        change(database, workload, version).await;
        bench.at_rest().await;
    };
    daemon.held(changed).await;
    let begin = bench.spent(Some(daemon));
    daemon.applied().await;
    let cost = bench.since(begin, Some(daemon));
    assert_true(database, workload, version, daemon).await;
    cost
}

/// One round's source writes.
pub async fn change(database: &Database, workload: &Workload, version: i32) {
    for change in (workload.change)(version) {
        match change {
            Change::Insert(collection, documents) => insert(database, collection, documents).await,
            Change::Update(collection, statements) => update(database, collection, &statements).await,
        }
    }
}

/// The way a floor is written.
struct Way {
    title: String,
    /// Its place among the floors.
    floor: usize,
    connections: usize,
}

/// Each floor from two connections, and the one with the most statements from one as well, as a program does that sends one bulk
/// write after the other.
fn ways(floors: &[Floor]) -> Vec<Way> {
    let way = |floor: usize, connections, more: &str| Way {
        title: format!("{}{more}", floors[floor].name),
        floor,
        connections,
    };
    let mut ways: Vec<Way> = (0..floors.len()).map(|floor| way(floor, WRITERS, "")).collect();
    let most = (0..floors.len()).max_by_key(|floor| floors[*floor].statements.len());
    let parted = most.filter(|floor| floors[*floor].statements.len() > STATEMENTS);
    ways.extend(parted.map(|floor| way(floor, 1, ", one connection")));
    ways
}

async fn write_floor(bench: &Bench, database: &Database, workload: &Workload, version: i32, way: &Way) -> Cost {
    change(database, workload, version).await;
    let floor = (workload.floors)(version).swap_remove(way.floor);
    bench.at_rest().await;
    let begin = bench.spent(None);
    update_by(way.connections, database, floor.collection, &floor.statements).await;
    bench.since(begin, None)
}

/// Asserts that every copy is right: otherwise it was not the same work.
pub async fn assert_true(database: &Database, workload: &Workload, version: i32, daemon: &Running) {
    let (collection, stale) = (workload.stale)(version);
    let stale = database.collection::<bson::Document>(collection).count_documents(stale).await.expect("a count");
    assert_eq!(stale, 0, "{}: copies that are not true after a wait\n{}", workload.name, daemon.log_tail());
}

/// One line a floor.
pub fn print(all: &[Drained]) {
    heading("Drain of a backlog: floor / denormd, round by round: median (least to greatest)");
    println!(
        "  {:<12}{:<28}{:>22}{:>22}{:>12}{:>12}{:>10}",
        "workload", "floor", "time", "server CPU", "server", "daemon", "memory"
    );
    for drained in all {
        for (nth, (name, floor)) in drained.floors.iter().enumerate() {
            let pairs = || floor.iter().zip(&drained.denormd);
            let wall: Vec<f64> = pairs().map(|(floor, mine)| floor.wall / mine.wall).collect();
            let cpu: Vec<f64> = pairs().map(|(floor, mine)| floor.server / mine.server).collect();
            let changes = f64::from(u32::try_from(drained.changes).unwrap_or(u32::MAX));
            let each = |what: &dyn Fn(&Cost) -> f64| {
                median(&drained.denormd.iter().map(what).collect::<Vec<_>>()) / changes * 1e6
            };
            let (server, mine, memory) = if nth == 0 {
                (
                    format!("{:.1} ms", each(&|cost| cost.server)),
                    format!("{:.1} ms", each(&|cost| cost.daemon)),
                    format!("{:.0} MB", drained.memory.1),
                )
            } else {
                (String::new(), String::new(), String::new())
            };
            let title = if nth == 0 { drained.name } else { "" };
            println!(
                "  {title:<12}{name:<28}{:>22}{:>22}{server:>12}{mine:>12}{memory:>10}",
                bold(&spread(&wall, 2)),
                spread(&cpu, 2)
            );
        }
    }
    println!("{}", dim("  Server and daemon: CPU per 1,000 changes of sources. Memory: the most that was resident."));
}
