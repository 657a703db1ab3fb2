//! `make memory`: the daemon's memory for data of unusual shapes.
//!
//! Each shape has its own replica set and daemon. The data, or the change, exists before the daemon starts, so that it
//! processes all of it at once. The daemon runs under the limit that the systemd unit sets (`prlimit --data`), and more
//! than `LIMIT_MB` (256) of resident memory at any time fails. Afterwards `denormd check` compares every copy.
//! `ONLY=values,events` runs some of the shapes, `SCALE=10` a tenth of the documents. `DENORMD` names the binary;
//! otherwise it is the one in this program's folder.

use std::{
    env, fs, iter,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use bson::{Bson, DateTime, Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use denormd_show::{
    daemon::Daemon,
    host,
    print::{heading, time},
};
use mongodb::{Collection, IndexModel};

const MB: usize = 1 << 20;
/// The value of `MemoryMax` in the systemd unit, for `RLIMIT_DATA`.
const DATA: usize = 1 << 30;
/// Time limit for one shape.
const LIMIT: Duration = Duration::from_mins(30);

/// A shape of data.
struct Shape {
    name: &'static str,
    title: &'static str,
    /// The rule, without its name.
    rule: &'static str,
    /// An index that the rule's look-ups need: collection and path.
    index: Option<(&'static str, &'static str)>,
    /// Number of documents, dead letters or elements.
    size: usize,
}

const SHAPES: &[Shape] = &[
    Shape {
        name: "parents",
        title: "parents that gather 1 MB each",
        rule: "collect: { source: s, target: t, match: { _id: t }, into: v, element: { id: $_id, v: $v } }",
        index: Some(("s", "t")),
        size: 1500,
    },
    Shape {
        name: "referrers",
        title: "sources with 9,000 referrers each",
        rule: "copy: { source: s, target: t, match: { \"refs.$[]\": _id }, into: v, element: $v }",
        index: Some(("t", "refs")),
        size: 1000,
    },
    Shape {
        name: "letters",
        title: "dead letters that are due",
        rule: "copy: { source: s, target: t, match: { s: _id }, set: { v: $v } }",
        index: Some(("t", "s")),
        size: 300_000,
    },
    Shape {
        name: "values",
        title: "sources of 8 MB, one target each",
        rule: "copy: { source: s, target: t, match: { s: _id }, set: { v: $v } }",
        index: Some(("t", "s")),
        size: 60,
    },
    Shape {
        name: "elements",
        title: "elements of one target",
        rule: "copy: { source: s, target: t, match: { \"e.$[].s\": _id }, set: { \"e.$[].v\": $v } }",
        index: Some(("t", "e.s")),
        size: 20_000,
    },
    Shape {
        name: "events",
        title: "change events of 5 MB",
        rule: "copy: { source: s, target: t, match: { r.s: _id }, set: { v: $v } }",
        index: Some(("t", "r.s")),
        size: 200,
    },
];

fn setting(name: &str) -> Option<String> {
    env::var(name).ok().filter(|text| !text.is_empty())
}

fn number(name: &str, default: usize) -> usize {
    setting(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[tokio::main]
async fn main() {
    let limit = f64::from(u32::try_from(number("LIMIT_MB", 256)).expect("fewer megabytes"));
    let (only, scale) = (setting("ONLY").unwrap_or_default(), number("SCALE", 1));
    let chosen = |shape: &&Shape| only.is_empty() || only.split(',').any(|name| name == shape.name);
    let mut lines = Vec::new();
    let mut worst = 0.0_f64;
    for shape in SHAPES.iter().filter(chosen) {
        let size = shape.size / scale;
        heading(&format!("{size} {}", shape.title));
        let (most, cpu, took) = run(shape, size).await;
        worst = worst.max(most);
        println!("{most:.0} MB, {cpu:.1} s of CPU, {}", time(took));
        lines.push(format!("| {size} {} | {most:.0} MB | {cpu:.1} s | {} |", shape.title, time(took)));
    }
    heading("The most memory that the daemon had");
    println!("| shape | memory | CPU | until all was applied |\n|---|---|---|---|\n{}", lines.join("\n"));
    assert!(worst <= limit, "more memory than {limit} MB");
}

/// Returns the peak memory in megabytes, the CPU seconds, and the duration.
async fn run(shape: &Shape, size: usize) -> (f64, f64, Duration) {
    let set = ReplicaSet::builder().oplog_mb(4000).cache_gb(1.0).start().await;
    let test = set.database().await;
    let file = config(&test, shape);
    if let Some((collection, path)) = shape.index {
        let index = IndexModel::builder().keys(doc! {path: 1}).build();
        docs(&test, collection).create_index(index).await.expect("an index");
    }
    if shape.name == "events" {
        // The other collection exists because of its index.
        test.database().create_collection("s").await.expect("a collection");
    }
    let mut daemon = Daemon::with(&file, &test.uri).reachable();
    let later = matches!(shape.name, "referrers" | "events");
    if !later {
        write(&test, shape.name, size).await;
    }
    daemon.plan_apply();
    if later {
        // These test changes, not the backfill.
        if shape.name == "referrers" {
            write(&test, shape.name, size).await;
        }
        daemon.start();
        applied(&mut daemon);
        daemon.stop().await;
        change(&test, shape.name, size).await;
    }
    let begun = Instant::now();
    // It starts under the limit, as under a service manager: then the allocator requests less.
    limit_data(&DATA.to_string());
    daemon.start();
    limit_data("unlimited");
    let pid = daemon.pid().expect("a daemon that runs");
    applied(&mut daemon);
    let dead_letters = test.beside("state").collection::<Document>("dead_letters");
    while dead_letters.count_documents(doc! {}).await.expect("a count") > 0 {
        assert!(begun.elapsed() < LIMIT, "dead letters are left\n{}", daemon.log_tail());
        thread::sleep(Duration::from_millis(200));
    }
    daemon.assert_running();
    let (took, cpu, most) = (begun.elapsed(), host::cpu(pid), host::memory(pid).1);
    let check = daemon.command(&["check"]).output().expect("denormd starts");
    daemon.stop().await;
    fs::remove_file(&file).ok();
    assert!(check.status.success(), "copies differ\n{}", String::from_utf8_lossy(&check.stdout));
    (most, cpu, took)
}

/// Limits the data of this process, and of the processes that it starts from now on. The limit can be removed again.
fn limit_data(bytes: &str) {
    let pid = std::process::id().to_string();
    let limited = Command::new("prlimit").args(["--pid", &pid, &format!("--data={bytes}:unlimited")]).status();
    assert!(limited.is_ok_and(|status| status.success()), "prlimit is missing");
}

/// Waits until everything committed is applied, by the command that users have for this.
fn applied(daemon: &mut Daemon) {
    let begun = Instant::now();
    while !daemon.command(&["wait"]).output().expect("denormd starts").status.success() {
        daemon.assert_running();
        assert!(begun.elapsed() < LIMIT, "it does not get there\n{}", daemon.log_tail());
        thread::sleep(Duration::from_millis(500));
    }
}

fn config(test: &TestDb, shape: &Shape) -> PathBuf {
    let file = env::temp_dir().join(format!("denormd-memory-{}.yaml", std::process::id()));
    let yaml = format!(
        "mongodb: {{ uri: {:?}, database: {:?} }}\nstate: {{ database: {:?} }}\nrules:\n  - {{ name: r, {} }}\n",
        test.uri,
        test.name,
        format!("{}_state", test.name),
        shape.rule
    );
    fs::write(&file, yaml).expect("a config");
    file
}

fn docs(test: &TestDb, collection: &str) -> Collection<Document> {
    test.database().collection(collection)
}

/// Inserts documents, about 16 MB at a time.
async fn insert(into: &Collection<Document>, documents: impl Iterator<Item = Document>, bytes: usize) {
    let mut documents = documents.peekable();
    let some = (16 * MB / bytes.max(1)).clamp(1, 10_000);
    while documents.peek().is_some() {
        let page: Vec<Document> = documents.by_ref().take(some).collect();
        into.insert_many(page).ordered(false).await.expect("inserts");
    }
}

async fn write(test: &TestDb, name: &str, size: usize) {
    let count = i32::try_from(size).expect("a number");
    let (s, t) = (docs(test, "s"), docs(test, "t"));
    match name {
        "parents" => {
            let value = "x".repeat(MB / 4);
            insert(&t, (0..count).map(|id| doc! {"_id": id}), 32).await;
            insert(&s, (0..4 * count).map(|id| doc! {"_id": id, "t": id / 4, "v": &value}), MB / 4).await;
        }
        "referrers" => {
            let all: Vec<i32> = (0..count).collect();
            insert(&s, (0..count).map(|id| doc! {"_id": id, "v": id}), 32).await;
            insert(&t, (0..9000).map(|id| doc! {"_id": id, "refs": &all}), 12 * size).await;
        }
        "letters" => {
            let long_ago = DateTime::from_millis(0);
            let dead_letter = |key: i32| {
                let id = doc! {"deployment": "default", "rule": "r", "task": "Value", "key": [key], "target": []};
                let id = Bson::Document(id);
                doc! {
                    "_id": id, "deployment": "default", "rule": "r", "attempts": 1, "code": 28,
                    "reason": "PathNotViable (code 28)", "first": long_ago, "last": long_ago,
                }
            };
            insert(&test.beside("state").collection("dead_letters"), (0..count).map(dead_letter), 400).await;
            for collection in [&s, &t] {
                insert(collection, iter::once(doc! {"_id": -1}), 32).await;
            }
        }
        "values" => {
            let value = "x".repeat(8 * MB);
            insert(&t, (0..count).map(|id| doc! {"_id": id, "s": id}), 32).await;
            insert(&s, (0..count).map(|id| doc! {"_id": id, "v": &value}), 8 * MB).await;
        }
        "elements" => {
            let elements: Vec<Document> = (0..count).map(|nth| doc! {"s": nth % 1000, "n": nth}).collect();
            insert(&s, (0..1000).map(|id| doc! {"_id": id, "v": format!("source {id}")}), 32).await;
            insert(&t, iter::once(doc! {"_id": 1, "e": elements}), 16 * MB).await;
        }
        other => panic!("no data of the shape {other}"),
    }
}

async fn change(test: &TestDb, name: &str, size: usize) {
    let count = i32::try_from(size).expect("a number");
    let (s, t) = (docs(test, "s"), docs(test, "t"));
    match name {
        "referrers" => {
            s.update_many(doc! {}, doc! {"$inc": {"v": 1}}).await.expect("updates");
        }
        "events" => {
            let value = "x".repeat(5 * MB);
            insert(&s, (0..count).map(|id| doc! {"_id": id, "v": id}), 32).await;
            insert(&t, (0..count).map(|id| doc! {"_id": id, "r": {"s": id, "x": &value}}), 5 * MB).await;
        }
        other => panic!("no change of the shape {other}"),
    }
}
