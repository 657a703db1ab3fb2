//! The rules of `config/apps/`, each on the data of its application: a year of it, live changes, three kills of the
//! daemon, and `denormd check` at the end. `make apps` does so with 100,000 messages and prints what each kind of
//! change costs.

mod cards;
mod chat;
mod conversations;
mod forum;
mod habits;
mod shop;
mod wiki;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bson::{Bson, Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{
    cases::Write,
    daemon::PATIENCE,
    process::Program,
    running::{Running, cpu},
};

/// The beginning of the year, in milliseconds: 2025-01-01.
const START: i64 = 1_735_689_600_000;
const YEAR: i64 = 365 * 86_400_000;
const KILLS: usize = 3;
/// Documents in one insert command.
const AT_ONCE: usize = 10_000;

/// The size of an application: the chat has so many messages, the others have data in proportion.
#[derive(Debug, Clone, Copy)]
struct Size(i64);

impl Size {
    fn messages(self) -> i64 {
        self.0
    }

    fn users(self) -> i64 {
        self.0 / 20
    }

    /// Rooms, and likewise boards, guilds and challenges.
    fn rooms(self) -> i64 {
        self.0 / 200
    }
}

type Data = Vec<(&'static str, Vec<Document>)>;
/// Makes a change; the number is different each time.
type Change = fn(Size, i64, &mut StdRng) -> Write;

/// An application: the name of its file, its data without copies, and what its users do.
struct App {
    name: &'static str,
    data: fn(Size, &mut StdRng) -> Data,
    changes: &'static [(&'static str, Change)],
}

const APPS: [App; 7] = [
    App { name: "rocketchat", data: chat::data, changes: chat::CHANGES },
    App { name: "wekan", data: cards::data, changes: cards::CHANGES },
    App { name: "habitica", data: habits::data, changes: habits::CHANGES },
    App { name: "librechat", data: conversations::data, changes: conversations::CHANGES },
    App { name: "openedx", data: forum::data, changes: forum::CHANGES },
    App { name: "growi", data: wiki::data, changes: wiki::CHANGES },
    App { name: "reaction", data: shop::data, changes: shop::CHANGES },
];

fn at(milliseconds: i64) -> bson::DateTime {
    bson::DateTime::from_millis(milliseconds)
}

/// A time after the year.
fn later(nth: i64) -> bson::DateTime {
    at(START + YEAR + nth * 1000)
}

/// One of so many; low numbers are more frequent.
fn skewed(of: i64, random: &mut StdRng) -> i64 {
    random.random_range(0..of).min(random.random_range(0..of))
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("config/apps")
}

/// The rules of an application's file, as YAML.
fn rules(name: &str) -> String {
    let text = fs::read_to_string(folder().join(name).with_extension("yaml")).unwrap();
    text.split_once("\nrules:\n").unwrap().1.to_owned()
}

/// Applies a change. It may find nothing: another one has deleted the document.
async fn perform(database: &Database, write: Write) {
    let done = match write {
        Write::Insert(at, document) => database.collection(at).insert_one(document).await.map(|_| ()),
        Write::Update(at, filter, Bson::Document(update)) => {
            database.collection::<Document>(at).update_one(filter, update).await.map(|_| ())
        }
        Write::Delete(at, filter) => database.collection::<Document>(at).delete_one(filter).await.map(|_| ()),
        Write::Burst(writes) => {
            for write in writes {
                Box::pin(perform(database, write)).await;
            }
            Ok(())
        }
        other => panic!("{other:?} is no change of an application"),
    };
    done.unwrap();
}

/// One application at work.
struct Run<'a> {
    app: &'a App,
    size: Size,
    test: &'a TestDb,
    random: StdRng,
    /// Number of the next change.
    next: i64,
}

impl<'a> Run<'a> {
    /// An application with its data, and nothing else.
    async fn load(app: &'a App, size: Size, test: &'a TestDb) -> Self {
        let mut random = StdRng::seed_from_u64(7);
        for (collection, documents) in (app.data)(size, &mut random) {
            for documents in documents.chunks(AT_ONCE) {
                test.database().collection::<Document>(collection).insert_many(documents).await.unwrap();
            }
        }
        Self { app, size, test, random, next: 0 }
    }

    async fn change(&mut self, kind: usize) {
        let write = self.app.changes[kind].1(self.size, self.next, &mut self.random);
        self.next += 1;
        perform(&self.test.database(), write).await;
    }

    /// Changes of all kinds in turn, during which the daemon is killed three times. It has to catch up by itself.
    async fn live(&mut self, running: &mut Running, changes: usize) {
        for nth in 1..=changes {
            self.change(nth % self.app.changes.len()).await;
            if (1..=KILLS).any(|kill| nth == changes * kill / (KILLS + 1)) {
                running.kill();
                running.run().await;
            }
        }
        current(running).await;
        let status = running.status().await;
        let letters: u64 = status.rules.iter().map(|rule| rule.dead_letters).sum();
        assert_eq!(letters, 0, "{}: {status:#?}", self.app.name);
        let (code, out, error) = running.command(&["check"]);
        assert_eq!(code, Some(0), "{}: {out}\n{error}", self.app.name);
        assert_eq!(out.matches(", 0 differ").count(), status.rules.len(), "{}: {out}", self.app.name);
        println!(
            "{}: {} changes, {KILLS} kills, {} rules, 0 differences",
            self.app.name,
            self.next,
            status.rules.len()
        );
    }

    /// Prints a table of the cost of each kind of change, beside the change itself.
    async fn costs(&mut self, running: &Running, server: u32, of_each: i32) {
        println!("\n{}\n\n| a change | documents read | written | server CPU |\n|---|---|---|---|", self.app.name);
        for (kind, (name, _)) in self.app.changes.iter().enumerate() {
            let before = Spent::so_far(self.test, running, server).await;
            for _ in 0..of_each {
                self.change(kind).await;
            }
            current(running).await;
            let after = Spent::so_far(self.test, running, server).await;
            let each = |number: i64| f64::from(i32::try_from(number).unwrap()) / f64::from(of_each);
            println!(
                "| {name} | {:.1} | {:.1} | {:.2} ms |",
                each(after.read - before.read),
                each(after.written - before.written),
                (after.cpu - before.cpu) / f64::from(of_each) * 1000.0
            );
        }
        println!();
    }
}

/// The work of the server and the daemon so far.
struct Spent {
    /// Documents that the server has examined, oplog entries for change streams among them.
    read: i64,
    /// Targets that the daemon has changed.
    written: i64,
    /// CPU seconds of the server.
    cpu: f64,
}

impl Spent {
    async fn so_far(test: &TestDb, running: &Running, server: u32) -> Self {
        let status = test.database().run_command(doc! {"serverStatus": 1}).await.unwrap();
        let examined = status.get_document("metrics").unwrap().get_document("queryExecutor").unwrap();
        let read = match examined.get("scannedObjects") {
            Some(Bson::Int64(number)) => *number,
            Some(Bson::Int32(number)) => i64::from(*number),
            other => panic!("{other:?}"),
        };
        let written: u64 = running.status().await.rules.iter().map(|rule| rule.targets_changed).sum();
        Self { read, written: i64::try_from(written).unwrap(), cpu: cpu(server) }
    }
}

/// Waits until everything committed is applied, by all rules. A year's backfill takes its time on a busy machine.
async fn current(running: &Running) {
    let limit = Instant::now() + 10 * PATIENCE;
    loop {
        let status = running.status().await;
        if !status.rules.is_empty() && status.rules.iter().all(|rule| rule.state == "live") {
            break;
        }
        assert!(Instant::now() < limit, "not all rules are live: {status:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (code, _, error) = running.command(&["wait", "--timeout", "1800"]);
    assert_eq!(code, Some(0), "{error}\n{}", running.log());
}

/// A daemon with the rules of the application.
async fn daemon(app: &App, test: &TestDb, rules: &str) -> Running {
    let running = Running::start(test, rules, "lease: { ttl_seconds: 3 }\n").await;
    current(&running).await;
    assert!(running.status().await.rules.len() > 2, "{}", app.name);
    running
}

/// The short form: 1,000 messages.
async fn short(name: &str) {
    let app = APPS.iter().find(|app| app.name == name).unwrap();
    let test = denormd_fixture::database().await;
    let mut run = Run::load(app, Size(1000), &test).await;
    let mut running = daemon(app, &test, &rules(name)).await;
    run.live(&mut running, 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rocketchat_with_kills() {
    short("rocketchat").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wekan_with_kills() {
    short("wekan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn habitica_with_kills() {
    short("habitica").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn librechat_with_kills() {
    short("librechat").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn openedx_with_kills() {
    short("openedx").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn growi_with_kills() {
    short("growi").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reaction_with_kills() {
    short("reaction").await;
}

/// `make apps`: the chat with so many messages and the others in proportion, each on a replica set of its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a quarter of an hour: make apps"]
async fn each_application_for_a_year() {
    let number = |name: &str, usual: i64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let size = Size(number("DENORMD_MESSAGES", 100_000));
    let changes = usize::try_from(number("DENORMD_CHANGES", 5000)).unwrap();
    let only = std::env::var("DENORMD_APP").unwrap_or_default();
    for app in APPS.iter().filter(|app| only.is_empty() || only.split(',').any(|only| only == app.name)) {
        let set = ReplicaSet::builder().cache_gb(1.0).oplog_mb(2048).start().await;
        let test = set.database().await;
        let mut run = Run::load(app, size, &test).await;
        // The audit reads too, and would be counted.
        let quiet = rules(app.name).replace("  - name: ", "  - guard: off\n    name: ");
        let running = daemon(app, &test, &quiet).await;
        run.costs(&running, set.node(0).pid(), 200).await;
        drop(running);
        let mut running = daemon(app, &test, &rules(app.name)).await;
        run.live(&mut running, changes).await;
    }
}

/// Each file says what it needs without a server.
#[tokio::test]
async fn every_file_compiles() {
    let files: Vec<PathBuf> = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let files: Vec<PathBuf> = files.into_iter().filter(|path| path.is_file()).collect();
    assert_eq!(files.len(), APPS.len());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let printed = Program::new(&text).run(&["plan", "--offline"]).await.exits(0);
        assert!(printed.out.ends_with("the config is sound (the cluster was not asked)\n"), "{}", printed.out);
    }
}

/// The reports of wrong copies, as cases of `denormd test`; a server gives the same results.
#[tokio::test(flavor = "multi_thread")]
async fn the_reports_pass() {
    let set = ReplicaSet::start(1).await;
    for app in &APPS {
        let program = Program::new(&fs::read_to_string(folder().join(app.name).with_extension("yaml")).unwrap());
        let cases = folder().join("tests").join(app.name).with_extension("yaml");
        let cases = cases.to_str().unwrap();
        let alone = program.run(&["test", cases]).await.exits(0);
        assert!(alone.out.ends_with(" passed, 0 failed\n"), "{}", alone.out);
        let with = program.run(&["test", cases, "--uri", &set.uri()]).await.exits(0);
        assert_eq!(alone.out, with.out);
    }
}
