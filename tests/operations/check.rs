//! `denormd check`: finds every planted difference, and no other one, also while the application writes.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, Document, bson, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;

use crate::support::{
    daemon::PATIENCE,
    daemon::{Daemon, config, until},
    process::{Printed, Program},
    running::Running,
};

/// Without a guard: the audit would repair the planted differences.
const RULES: &str = r#"
  - { name: host, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip, name: $name, port: $port } } }
  - { name: names, guard: off, copy: { source: parts, target: products, match: { "parts.$[].id": _id }, set: { "parts.$[].name": $name } } }
  - { name: info, guard: off, copy: { source: parts, target: products, match: { "spares.$[]": _id }, into: info, element: { id: $_id, name: $name, price: $price } } }
  - { name: latest, guard: off, collect: { source: reviews, target: products, match: { _id: product }, into: latest, element: { id: $_id, stars: $stars }, sort: { _id: -1 }, slice: 3 } }
  - { name: stats, guard: off, aggregate: { source: reviews, target: products, match: { _id: product }, set: { count: { $sum: 1 }, mean: { $avg: $stars } } } }
"#;
const NAMES: [&str; 5] = ["host", "names", "info", "latest", "stats"];

/// The application does not change sources and targets from this number on.
const STILL: i32 = 10_000_000;
/// Number of sources of a collection that the application changes: each has about as many targets, whatever the total.
fn busy(targets: i32) -> i32 {
    (targets / 100).max(50)
}

/// One planted difference.
struct Planted {
    rule: &'static str,
    path: &'static str,
    kind: &'static str,
    collection: &'static str,
    update: Document,
    /// The target's first version, where it is not like the others.
    special: Option<Document>,
}

/// Fifty planted differences, each in its own target.
fn planted() -> Vec<Planted> {
    let mut all = Vec::new();
    let mut plant = |times: usize, rule: &'static str, path, kind, update: Document| {
        for _ in 0..times {
            let collection = if rule == "host" { "logs" } else { "products" };
            all.push(Planted { rule, path, kind, collection, update: update.clone(), special: None });
        }
    };
    let set = |path: &str, value: Bson| doc! {"$set": {path: value}};
    let unset = |path: &str| doc! {"$unset": {path: ""}};
    plant(2, "host", "ip", "value", set("ip", bson!("forged")));
    plant(2, "host", "name", "missing", unset("name"));
    plant(2, "host", "port", "type", set("port", bson!(80.0)));
    plant(2, "host", "port", "value", set("port", bson!("80")));
    plant(2, "host", "ip", "value", set("ip", Bson::Null));
    plant(2, "host", "ip", "value", set("ip", bson!(["10.0.0.1"])));
    plant(4, "host", "name", "surplus", set("name", bson!("forged")));
    plant(3, "names", "parts.$[].name", "value", set("parts.0.name", bson!("forged")));
    plant(3, "names", "parts.$[].name", "missing", unset("parts.1.name"));
    plant(3, "names", "parts.$[].name", "surplus", set("parts.2.name", bson!("forged")));
    plant(3, "names", "parts.$[].name", "value", set("parts.0.name", bson!(5)));
    let info = |n: i32, price: Bson| bson!({"id": STILL + n, "name": format!("part {}", STILL + n), "price": price});
    plant(2, "info", "info", "order", set("info", bson!([info(1, bson!(1)), info(0, bson!(1))])));
    plant(2, "info", "info", "length", set("info", bson!([info(0, bson!(1))])));
    plant(2, "info", "info", "missing", unset("info"));
    plant(2, "info", "info", "type", set("info", bson!([info(0, bson!(1)), info(1, bson!(1.0))])));
    plant(2, "info", "info", "value", set("info", bson!([info(0, bson!(1)), info(1, bson!(2))])));
    plant(2, "latest", "latest", "length", set("latest", bson!([])));
    plant(2, "latest", "latest", "missing", unset("latest"));
    plant(2, "latest", "latest", "value", set("latest.0.stars", bson!(9)));
    plant(2, "latest", "latest", "type", set("latest.1.stars", bson!(3.0)));
    plant(1, "stats", "count", "type", set("count", Bson::Int64(4)));
    plant(1, "stats", "count", "value", set("count", bson!(5)));
    plant(1, "stats", "mean", "missing", unset("mean"));
    plant(1, "stats", "mean", "value", set("mean", bson!("3")));
    for (nth, planted) in
        all.iter_mut().filter(|planted| planted.rule == "host" && planted.kind == "surplus").enumerate()
    {
        // The reference is empty, or names a host that does not exist.
        planted.special = Some(if nth % 2 == 0 {
            doc! {"host": Bson::Null}
        } else {
            doc! {"host": -1}
        });
    }
    all
}

fn host(id: i32) -> Document {
    doc! {"_id": id, "ip": "10.0.0.1", "name": format!("host {id}"), "port": 80}
}

fn part(id: i32) -> Document {
    doc! {"_id": id, "name": format!("part {id}"), "price": 1}
}

/// A product with three parts, one of them with an empty reference.
fn product(id: i32, parts: [i32; 2]) -> Document {
    let [first, second] = parts;
    doc! {"_id": id, "parts": [{"id": first}, {"id": second}, {"id": Bson::Null}], "spares": [first, second]}
}

async fn insert(db: &Database, collection: &str, documents: impl Iterator<Item = Document>) {
    let documents: Vec<Document> = documents.collect();
    for chunk in documents.chunks(10_000) {
        db.collection::<Document>(collection).insert_many(chunk).await.unwrap();
    }
}

/// A shop of about `targets` targets, with the targets in which differences will be planted.
async fn shop(db: &Database, targets: i32, planted: &[Planted]) {
    let (logs, products, busy) = (targets * 4 / 5, targets / 25, busy(targets));
    insert(db, "hosts", (0..busy).chain(STILL..STILL + 2).map(host)).await;
    insert(db, "parts", (0..busy).chain(STILL..STILL + 2).map(part)).await;
    insert(db, "logs", (0..logs).map(|n| doc! {"_id": n, "host": n % busy})).await;
    insert(db, "products", (0..products).map(|n| product(n, [n % busy, (n + 7) % busy]))).await;
    insert(db, "reviews", (0..products).map(|n| doc! {"product": n, "stars": n % 5})).await;
    for (nth, planted) in (STILL..).zip(planted) {
        let target = match (planted.collection, &planted.special) {
            ("logs", Some(special)) => {
                let mut target = doc! {"_id": nth};
                target.extend(special.clone());
                target
            }
            ("logs", None) => doc! {"_id": nth, "host": STILL},
            _ => product(nth, [STILL, STILL + 1]),
        };
        insert(db, planted.collection, std::iter::once(target)).await;
        if planted.collection == "products" {
            insert(db, "reviews", (0..4).map(|n| doc! {"_id": nth * 10 + n, "product": nth, "stars": 3})).await;
        }
    }
}

async fn spoil(db: &Database, planted: &[Planted]) {
    for (nth, planted) in (STILL..).zip(planted) {
        let targets = db.collection::<Document>(planted.collection);
        let done = targets.update_one(doc! {"_id": nth}, planted.update.clone()).await.unwrap();
        assert_eq!(done.modified_count, 1, "{} {}", planted.rule, planted.update);
    }
}

/// One write of the application, on everything except the planted targets.
async fn write(db: &Database, random: &mut StdRng, targets: i32) -> mongodb::error::Result<()> {
    let source = random.random_range(0..busy(targets));
    let number: i32 = random.random_range(0..4);
    let (log, product) = (random.random_range(0..targets * 4 / 5), random.random_range(0..targets / 25));
    let at = |name: &str| db.collection::<Document>(name);
    match random.random_range(0..10) {
        // Few values, so that a source often returns to an earlier one.
        0..3 => at("hosts")
            .update_one(doc! {"_id": source}, doc! {"$set": {"ip": format!("10.0.0.{number}")}})
            .await
            .map(drop),
        3..5 => at("parts")
            .update_one(doc! {"_id": source}, doc! {"$set": {"name": format!("part {number}")}})
            .await
            .map(drop),
        5 => at("logs").update_one(doc! {"_id": log}, doc! {"$set": {"host": source}}).upsert(true).await.map(drop),
        6 => at("logs").delete_one(doc! {"_id": log}).await.map(drop),
        7 => {
            let update = doc! {"$set": {"parts.0.id": source, "spares.1": source}};
            at("products").update_one(doc! {"_id": product}, update).await.map(drop)
        }
        8 => at("reviews").insert_one(doc! {"product": product, "stars": number}).await.map(drop),
        _ => at("reviews").delete_one(doc! {"product": product}).await.map(drop),
    }
}

struct Writer {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

impl Writer {
    fn start(db: &Database, targets: i32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (db, stopped) = (db.clone(), stop.clone());
        let task = tokio::spawn(async move {
            let (mut random, mut done) = (StdRng::seed_from_u64(7), 0);
            while !stopped.load(Ordering::Relaxed) {
                done += u64::from(write(&db, &mut random, targets).await.is_ok());
                tokio::time::sleep(Duration::from_millis(random.random_range(0..8))).await;
            }
            done
        });
        Self { stop, task }
    }

    async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap()
    }
}

fn found(printed: &Printed) -> BTreeSet<String> {
    let lines = printed.lines();
    let targets = lines.iter().filter(|line| line.get("target").is_some());
    let paths = targets.flat_map(|line| {
        let paths = line["differences"].as_array().unwrap().iter();
        paths.map(|path| {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
            format!("{} {} {} {}", text(&line["rule"]), line["target"], text(&path["path"]), text(&path["kind"]))
        })
    });
    paths.collect()
}

/// Some of the arrays, and their prices, are those of their sources at that time: later changes are not differences.
#[tokio::test(flavor = "multi_thread")]
async fn every_planted_difference_and_no_other_is_found_while_the_application_writes() {
    // A million on request: `make check-million`.
    let targets = std::env::var("DENORMD_TARGETS").ok().and_then(|text| text.parse().ok()).unwrap_or(5000);
    // At least five hundred a second, on a busy machine.
    let limit = 10 * PATIENCE + Duration::from_secs(u64::try_from(targets).unwrap() / 500);
    // A server of its own for many targets.
    let set =
        if targets > 5000 { Some(ReplicaSet::builder().cache_gb(1.0).oplog_mb(1024).start().await) } else { None };
    let test = match &set {
        Some(set) => set.database().await,
        None => denormd_fixture::database().await,
    };
    let (db, planted) = (test.database(), planted());
    assert_eq!(planted.len(), 50);
    shop(&db, targets, &planted).await;
    let program = Program::new(&config(&test, RULES));
    program.run_within(&["plan", "--apply"], limit).await.exits(0);
    let daemon = program.daemon();
    let begun = Instant::now();
    program.backfilled_within(&test, NAMES.len(), limit).await;
    println!("{targets} targets backfilled in {:.1?}", begun.elapsed());
    let begun = Instant::now();
    let printed = program.run_within(&["check", "--output", "json"], limit).await.exits(0);
    let (count, megabytes) = (compared(&printed), printed.peak >> 20);
    println!("{count} targets checked at rest in {:.1?}, {megabytes} MB at most", begun.elapsed());

    spoil(&db, &planted).await;
    let writer = Writer::start(&db, targets);
    let begun = Instant::now();
    let printed = program.run_within(&["check", "--output", "json"], limit).await.exits(3);
    let (count, megabytes) = (compared(&printed), printed.peak >> 20);
    println!("{count} targets checked under load in {:.1?}, {megabytes} MB at most", begun.elapsed());
    let expected: BTreeSet<String> =
        (STILL..).zip(&planted).map(|(nth, p)| format!("{} {nth} {} {}", p.rule, p.path, p.kind)).collect();
    assert_eq!(found(&printed), expected, "{}", printed.err);
    // Memory of a debug build itself, a page and its sources; a million targets alone would take more.
    assert!(printed.peak < 150 << 20, "{} MB", printed.peak >> 20);

    println!(
        "{} planted differences, all found, and {} others",
        expected.len(),
        found(&printed).len() - expected.len()
    );
    let begun = Instant::now();
    let printed = program.run_within(&["check", "--repair"], limit).await.exits(0);
    println!("checked and repaired under load in {:.1?}, {} MB at most", begun.elapsed(), printed.peak >> 20);
    assert_eq!(printed.out.matches(", repaired\n").count(), 50, "{}", printed.out);
    let writes = writer.stop().await;
    println!("{writes} writes of the application meanwhile");
    assert!(writes > 10, "{writes} writes are no load");
    assert_eq!(found(&program.run_within(&["check", "--output", "json"], limit).await.exits(0)), BTreeSet::new());
    drop(daemon);
}

fn compared(printed: &Printed) -> u64 {
    printed.lines().iter().filter_map(|line| line["compared"].as_u64()).sum()
}

/// Without a daemon, the command takes the lease for the repair; values are shown on request only.
#[tokio::test]
async fn without_a_daemon_the_command_repairs_by_itself() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rule =
        "  - { name: host, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    insert(&db, "logs", (0..3).map(|n| doc! {"_id": n, "host": 1})).await;
    let program = Program::new(&config(&test, rule));
    program.run(&["plan", "--apply"]).await.exits(0);
    let printed = program.run(&["check"]).await.exits(3);
    assert!(printed.err.contains("host: it has never run"), "{}", printed.err);
    let expected = "host 0 ip: missing: nothing is stored, string is expected\n";
    assert!(printed.out.starts_with(expected), "{}", printed.out);
    assert!(printed.out.ends_with("host: 3 targets compared, 3 differ (paths: 3 missing)\n"), "{}", printed.out);
    assert!(!printed.out.contains("10.0.0.1"), "{}", printed.out);
    let printed = program.run(&["check", "--show-values", "--limit", "1"]).await.exits(3);
    assert!(printed.out.contains("; expected \"10.0.0.1\", stored nothing\n"), "{}", printed.out);
    assert!(printed.out.contains("host: 2 more are not listed"), "{}", printed.out);
    let printed = program.run(&["check", "--repair", "--sample", "3"]).await.exits(0);
    assert!(printed.err.contains("no daemon leads: this command takes the lease and does the work"), "{}", printed.err);
    assert!(printed.out.ends_with("3 repaired\n"), "{}", printed.out);
    program.run(&["check"]).await.exits(0);
    // It released the lease: a daemon leads at once.
    let daemon = program.daemon();
    daemon.says("this instance leads").await;
    daemon.stop().await;
    program.run(&["check", "--rule", "hots"]).await.exits(2);
    program.write(&config(&test, &rule.replace("ip: $ip", "address: $ip")));
    let printed = program.run(&["check"]).await.exits(3);
    assert!(printed.err.contains("host: the last leader had another definition of it"), "{}", printed.err);
}

/// The check of one rule waited ten minutes for a database that only another rule of its config needs, which the leader does not run.
#[tokio::test]
async fn a_rule_that_the_leader_does_not_run_holds_up_no_other_check() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rule = |name: &str, sources: &str| {
        format!(
            "  - {{ name: {name}, guard: off, copy: {{ source: {sources}, target: logs, match: {{ host: _id }}, set: {{ {name}: $ip }} }} }}\n"
        )
    };
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    insert(&db, "logs", (0..3).map(|n| doc! {"_id": n, "host": 1})).await;
    let program = Program::new(&config(&test, &rule("host_ip", "hosts")));
    program.run(&["plan", "--apply"]).await.exits(0);
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    db.collection::<Document>("logs").update_one(doc! {"_id": 1}, doc! {"$set": {"host_ip": "wrong"}}).await.unwrap();
    let elsewhere = format!("{}.hosts", test.beside("other").name());
    let both = Program::new(&config(&test, &(rule("host_ip", "hosts") + &rule("other", &elsewhere))));
    let told = both.run(&["check"]).await.exits(4).err;
    assert!(told.contains("the leader does not run rule `other` as this config defines it"), "{told}");
    let told = both.run(&["check", "--rule", "host_ip"]).await.exits(3).out;
    assert!(told.ends_with("host_ip: 3 targets compared, 1 differs (paths: 1 value)\n"), "{told}");
    daemon.stop().await;
}

/// An interrupted check resumes where everything was decided, with its counts.
#[tokio::test]
async fn a_check_goes_on_where_it_was() {
    use denormd_engine::{
        checkpoint::{
            progress::{CheckProgress, Tally},
            store::Store,
        },
        jobs::check::{Check, Scope},
    };
    let test: TestDb = denormd_fixture::database().await;
    let db = test.database();
    let rule =
        "  - { name: host, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    // Every BSON type of `_id`, the greatest too.
    let ids = [bson!(1), bson!(2), bson!("a"), bson!({"a": 1}), Bson::MaxKey];
    insert(&db, "logs", ids.iter().map(|id| doc! {"_id": id.clone(), "host": 1})).await;
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let context = daemon.shared();
    daemon.stop().await;
    db.collection::<Document>("logs").update_many(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    let dead_letters = &context.dead_letters;
    let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap();
    let rule = &context.plan.rules[0];
    let tally = Tally { compared: 2, differing: 2, ..Tally::default() };
    let progress = CheckProgress { after: Some(bson!(2)), done: false, tally };
    store.save_check(&context.server, rule, &progress).await.unwrap();
    let scope = Scope { resume: true, ..Scope::default() };
    let mut check = Check::new(&context, &store, rule, scope).await.unwrap();
    let mut found = Vec::new();
    while let Some(some) = check.next().await.unwrap() {
        found.extend(some.into_iter().map(|found| found.target));
    }
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.contains(&Bson::MaxKey) && !found.contains(&bson!(1)), "{found:?}");
    assert_eq!((check.tally.compared, check.tally.differing, check.tally.resumed), (5, 5, true));
    // The check has finished: the next one starts from the beginning.
    let check = Check::new(&context, &store, rule, scope).await.unwrap();
    assert_eq!(check.tally, Tally::default());
}

/// The number of repaired targets was not saved: a check that was interrupted after its repairs, and resumed, ended with
/// exit status 3 although every target was right.
#[tokio::test]
async fn what_was_repaired_before_an_interruption_counts_as_repaired() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rule =
        "  - { name: host, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    // More than one round of suspects.
    insert(&db, "logs", (0..1300).map(|n| doc! {"_id": n, "host": 1})).await;
    let program = Program::new(&config(&test, rule));
    program.run(&["plan", "--apply"]).await.exits(0);
    program.run(&["backfill"]).await.exits(0);
    let logs = db.collection::<Document>("logs");
    logs.update_many(doc! {}, doc! {"$set": {"ip": "forged"}}).await.unwrap();
    let died = program.run_and_die(&["check", "--repair"], "check-saved").await;
    assert_ne!(died.code, 0, "{}", died.err);
    let left = logs.count_documents(doc! {"ip": "forged"}).await.unwrap();
    assert!((1..1300).contains(&left), "{left}");
    let told = program.run(&["check", "--resume", "--repair"]).await.exits(0);
    let sum = "host: 1300 targets compared, 1300 differ (paths: ";
    assert!(told.out.contains(sum) && told.out.contains(", 1300 repaired, with what was counted"), "{}", told.out);
    program.run(&["check"]).await.exits(0);
}

/// A target whose values cannot be computed any more was called repaired: only those that could be were compared.
#[tokio::test]
async fn a_target_that_cannot_be_computed_after_its_repair_is_not_called_repaired() {
    use denormd_engine::{
        checkpoint::store::Store,
        jobs::check::{Check, Scope},
    };
    let test: TestDb = denormd_fixture::database().await;
    let db = test.database();
    let rule = "  - { name: share, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { share: { $divide: [$a, $b] } } } }";
    db.collection("hosts").insert_many((1..3).map(|n| doc! {"_id": n, "a": 1, "b": 1})).await.unwrap();
    insert(&db, "logs", (1..3).map(|n| doc! {"_id": n, "host": n})).await;
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let context = daemon.shared();
    daemon.stop().await;
    let logs = db.collection::<Document>("logs");
    logs.update_many(doc! {}, doc! {"$set": {"share": "forged"}}).await.unwrap();
    let dead_letters = &context.dead_letters;
    let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap();
    let mut check = Check::new(&context, &store, &context.plan.rules[0], Scope::default()).await.unwrap();
    let found = check.next().await.unwrap().unwrap();
    assert_eq!(found.len(), 2, "{found:?}");
    db.collection::<Document>("hosts").update_one(doc! {"_id": 1}, doc! {"$set": {"b": 0}}).await.unwrap();
    logs.update_one(doc! {"_id": 2}, doc! {"$set": {"share": 1.0}}).await.unwrap();
    let left = check.again(&[bson!(1), bson!(2)]).await.unwrap();
    assert_eq!(left, [bson!(1)]);
    assert_eq!((check.tally.differing, check.tally.repaired, check.tally.refused), (2, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_a_difference_does_not_stand_behind_the_bar() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 7, "host": 1}).await.unwrap();
    let rule =
        "  - { name: ip, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }";
    let running = Running::start(&test, rule, "").await;
    running.until_json("the copy is there", |status| status["rules"][0]["state"] == "live").await;
    db.collection::<Document>("logs").update_one(doc! {"_id": 7}, doc! {"$set": {"ip": "wrong"}}).await.unwrap();
    let on_terminal = "import pty, sys; pty.spawn(sys.argv[1:])";
    let mut command = Command::new("python3");
    command.args(["-c", on_terminal, env!("CARGO_BIN_EXE_denormd"), "check", "--config"]).arg(running.file());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let screen = String::from_utf8(output.stdout).unwrap();
    let (before, _) = screen.split_once("ip 7 ip: value").unwrap_or_else(|| panic!("{screen}"));
    // A carriage return, a line feed, or the end of a command that erases the line.
    assert!(before.ends_with(['\r', '\n', 'K', 'J']), "{screen:?}");
}

/// A target whose source changes at each look is not known to be right: exit status 0 would say so.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_changes_all_the_while_is_no_success() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "n": 0}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = "  - { name: r, allow_scan: true, copy: { source: hosts, target: logs, match: { host: _id }, set: { n: $n } } }";
    let program = Program::new(&config(&test, rule));
    let hosts = db.collection::<Document>("hosts");
    let writer = tokio::spawn(async move {
        loop {
            hosts.update_one(doc! {}, doc! {"$inc": {"n": 1}}).await.unwrap();
        }
    });
    // On a busy machine the writer may stand still between two looks, and then the target differs.
    let told = until("the source changes between all looks", async || {
        let told = program.run(&["check"]).await;
        (told.code != 3).then_some(told)
    })
    .await
    .exits(1);
    assert!(told.out.contains("1 changed at every comparison and are undecided"), "{}", told.out);
    assert!(
        told.err.contains("1 target changed at every comparison and could not be judged; no other target differs"),
        "{}",
        told.err
    );
    writer.abort();
}
