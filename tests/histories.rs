//! Random histories against an oracle that shares no code with the plan.
//!
//! Each world is a set of rules over collections of its own; hundreds of them live in one database under one daemon. The
//! seed of a failure is printed; `DENORMD_SEED` replays it, `DENORMD_HISTORIES` sets how many are drawn.

use std::collections::BTreeMap;

use bson::{Document, doc};
use denormd_fixture::TestDb;
use denormd_oracle::{Generator, Op, Options, Oracle, World, differences};
use futures_util::{StreamExt, stream};
use mongodb::{Database, options::ChangeStreamPreAndPostImages};

use crate::daemon::{Daemon, all, config, rules_as_json};

struct History {
    seed: u64,
    generator: Generator,
    oracle: Oracle,
    rules: Vec<Document>,
}

impl History {
    fn draw(seed: u64, options: fn(String) -> Options, database: &str) -> Self {
        let mut options = options(format!("w{seed}_"));
        database.clone_into(&mut options.database);
        let mut generator = Generator::with_options(seed, options);
        let rules: Vec<Document> = generator.rules();
        let oracle = Oracle::new(&rules, database).unwrap();
        Self { seed, generator, oracle, rules }
    }

    async fn create(&self, db: &Database) {
        let pre_images = self.generator.pre_images();
        for name in self.generator.collections() {
            let create = db.create_collection(&name);
            // The other half gets them from `plan --apply`, and only where a rule cannot do without.
            if pre_images.contains(&name) && self.seed % 4 < 2 {
                create
                    .change_stream_pre_and_post_images(ChangeStreamPreAndPostImages::builder().enabled(true).build())
                    .await
                    .unwrap();
            } else {
                create.await.unwrap();
            }
        }
    }

    async fn check(&self, db: &Database) -> Vec<String> {
        let mut actual = World::new();
        for name in self.generator.collections() {
            actual.insert(name.clone(), all(db, &name).await);
        }
        let expectation = self.oracle.expected(&actual).unwrap();
        let mut found = differences(&expectation, &actual);
        if !found.is_empty() {
            for rule in &self.rules {
                found.push(format!("  rule {rule}"));
            }
            for (name, documents) in &actual {
                found.extend(documents.iter().map(|document| format!("  {name} {document}")));
            }
            found.extend(expectation.notes.iter().map(|note| format!("  note {note}")));
        }
        found
    }
}

/// Does an operation. What the server refuses is part of the history.
async fn perform(db: &Database, op: Op) {
    let collection = db.collection::<Document>(op.coll());
    match op {
        Op::Insert { doc, .. } => collection.insert_one(doc).await.map(|_| ()).ok(),
        Op::Update { filter, update, .. } => collection.update_one(filter, update).await.map(|_| ()).ok(),
        Op::Replace { filter, doc, .. } => collection.replace_one(filter, doc).await.map(|_| ()).ok(),
        Op::Delete { filter, .. } => collection.delete_one(filter).await.map(|_| ()).ok(),
    };
}

/// Draws `count` histories from `first` on and runs them side by side, some of their documents there before the daemon.
async fn run(first: u64, count: u64, options: fn(String) -> Options, partitions: [u32; 2]) {
    let test: TestDb = denormd_fixture::database().await;
    let db = test.database();
    let mut histories: Vec<History> =
        (first..first + count).map(|seed| History::draw(seed, options, &test.name)).collect();
    for history in &mut histories {
        history.create(&db).await;
        if history.seed % 2 == 0 {
            for op in history.generator.initial() {
                perform(&db, op).await;
            }
        }
    }
    let rules: Vec<Document> = histories.iter().flat_map(named).collect();
    let rules = rules_as_json(&rules);
    let config = |partitions: u32| format!("{}lease: {{ partitions: {partitions} }}\n", config(&test, &rules));
    let mut daemon = Daemon::start_config(&config(partitions[0])).await;
    for round in 0..3 {
        // Each history in its own order, all of them at once.
        let steps: Vec<(u64, Vec<Op>)> = histories
            .iter_mut()
            .map(|history| {
                let mut ops =
                    if round == 0 && history.seed % 2 == 1 { history.generator.initial() } else { Vec::new() };
                ops.extend((0..12).map(|_| history.generator.op()));
                (history.seed, ops)
            })
            .collect();
        let writes = stream::iter(steps).for_each_concurrent(16, |(_, ops)| async {
            for op in ops {
                perform(&db, op).await;
            }
        });
        if round == 1 {
            // A crash and a restart while changes go on.
            let (daemon_again, ()) = tokio::join!(
                async {
                    tokio::task::yield_now().await;
                    daemon.kill();
                    Daemon::start_config(&config(partitions[1])).await
                },
                writes
            );
            daemon = daemon_again;
        } else {
            writes.await;
        }
        daemon.settled().await;
        let mut failures: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        for history in &histories {
            let found = history.check(&db).await;
            if !found.is_empty() {
                failures.insert(history.seed, found);
            }
        }
        if let Some((seed, found)) = failures.first_key_value() {
            let seeds: Vec<&u64> = failures.keys().collect();
            let letters = all(&test.beside("state"), "dead_letters").await;
            let letters: Vec<String> = letters
                .iter()
                .map(ToString::to_string)
                .filter(|letter| letter.contains(&format!("w{seed}-")))
                .collect();
            panic!(
                "round {round}: histories {seeds:?} diverge; DENORMD_SEED={seed}:\n{}\n{}",
                found.join("\n"),
                letters.join("\n")
            );
        }
    }
    daemon.stop().await;
}

fn named(history: &History) -> Vec<Document> {
    let rename = |(nth, rule): (usize, &Document)| {
        let mut rule = rule.clone();
        rule.insert("name", format!("w{}-{nth}", history.seed));
        rule.insert("allow_scan", true);
        rule
    };
    history.rules.iter().enumerate().map(rename).collect()
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

async fn many(default: u64, options: fn(String) -> Options) {
    divided(default, options, [1, 1]).await;
}

/// In so many partitions, before and after the crash.
async fn divided(default: u64, options: fn(String) -> Options, partitions: [u32; 2]) {
    if let Some(seed) = from_environment("DENORMD_SEED") {
        return run(seed, 1, options, partitions).await;
    }
    let count = from_environment("DENORMD_HISTORIES").unwrap_or(default);
    let start = from_environment("DENORMD_FIRST").unwrap_or_else(|| u64::from(rand::random::<u32>()));
    let mut done = 0;
    while done < count {
        let step = (count - done).min(100);
        println!("histories {}..{}", start + done, start + done + step);
        run(start + done, step, options, partitions).await;
        done += step;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_rules_converge_whatever_happens() {
    many(100, |prefix| Options { mixed_composite: true, ..Options::new(prefix) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_whatever_happens() {
    many(100, |prefix| Options { mixed_composite: true, ..Options::everything(prefix) }).await;
}

/// Every partition writes what it owns, and all of them together what one would.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_in_three_partitions() {
    divided(60, |prefix| Options { mixed_composite: true, ..Options::everything(prefix) }, [3, 3]).await;
}

/// What was done in one number of partitions is done in another one, and what was not is not forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_when_the_partitions_change() {
    divided(30, |prefix| Options { mixed_composite: true, ..Options::everything(prefix) }, [2, 3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_that_dangle_are_removed_with_their_element_or_target() {
    many(50, |prefix| Options { destroy: true, mixed_composite: true, ..Options::new(prefix) }).await;
}

#[tokio::test]
async fn nothing_is_left_of_the_canary() {
    // The harness itself: a database that the daemon never saw differs from what the oracle expects.
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection::<Document>("s").insert_one(doc! {"_id": 1, "name": "x"}).await.unwrap();
    db.collection::<Document>("t").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    let rule =
        doc! {"name": "r", "copy": {"source": "s", "target": "t", "match": {"ref": "_id"}, "set": {"copied": "$name"}}};
    let oracle = Oracle::new(&[rule], &test.name).unwrap();
    let world: World = [("s".to_owned(), all(&db, "s").await), ("t".to_owned(), all(&db, "t").await)].into();
    assert_eq!(differences(&oracle.expected(&world).unwrap(), &world).len(), 1);
}
