//! Random histories against an oracle that shares no code with the plan.
//!
//! Each world is a set of rules over collections of its own; hundreds of them live in one database under one daemon. The
//! seed of a failure is printed; `DENORMD_SEED` replays it, `DENORMD_HISTORIES` sets how many are drawn, `DENORMD_FIRST` the first seed
//! (1; `random` draws it, as `make histories` does), and `DENORMD_ODD` which odd kinds worlds have: `all`, `none`, or their names with commas between.

mod perform;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::TestDb;
use denormd_oracle::{Expectation, Generator, Odd, Op, Options, Oracle, World, differences};
use futures_util::{StreamExt, stream};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    daemon::{Daemon, PATIENCE, all, config, rules_as_json},
    seeds::seeds,
};
use perform::{Form, create, perform, world};

/// The odd kinds that are drawn unless `DENORMD_ODD` says otherwise.
const ODD: &[Odd] = &[
    Odd::NotUtf8,
    Odd::Empty,
    Odd::Collections,
    Odd::PreImages,
    Odd::Failing,
    Odd::Collation,
    Odd::Echo,
    Odd::EdgeIds,
];

/// One step of a history.
enum Step {
    Op(Op),
    /// Everything that is done is waited for, and compared.
    Wait,
    /// A collection is dropped and restored, each waited for: without it the values of others stay.
    Lose(String),
}

struct History {
    seed: u64,
    generator: Generator,
    oracle: Oracle,
    rules: Vec<Document>,
    pre_images: BTreeSet<String>,
}

impl History {
    fn draw(seed: u64, options: fn(String) -> Options, database: &str) -> Self {
        let mut options = options(format!("w{seed}_"));
        database.clone_into(&mut options.database);
        let mut generator = Generator::with_options(seed, options);
        let rules: Vec<Document> = generator.rules();
        let oracle = Oracle::new(&rules, database).unwrap();
        let pre_images = generator.pre_images();
        Self { seed, generator, oracle, rules, pre_images }
    }

    /// What a collection is created with. Half of the worlds get pre-images from `plan --apply`, and only where a rule cannot do
    /// without.
    fn form(&self, name: &str) -> Form {
        let pre_images = self.pre_images.contains(name) && self.seed % 4 < 2;
        Form { pre_images, collation: self.generator.collation(name) }
    }

    async fn create(&self, db: &Database) {
        for name in self.generator.collections() {
            create(db, &name, &self.form(&name)).await;
        }
    }

    /// The steps of one round.
    fn steps(&mut self, round: usize) -> Vec<Step> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ (round as u64) << 32);
        let first = round == 0 && self.seed % 2 == 1;
        let mut steps: Vec<Step> = Vec::new();
        if first {
            steps.extend(self.generator.initial().into_iter().map(Step::Op));
        }
        for _ in 0..12 {
            steps.push(Step::Op(self.generator.op()));
            match rng.random_range(0..100) {
                0..=9 => steps.push(Step::Wait),
                10..=12 if self.generator.has(Odd::Collections) => {
                    let names = self.generator.collections();
                    steps.push(Step::Lose(names[rng.random_range(0..names.len())].clone()));
                }
                _ => {}
            }
        }
        steps
    }

    /// Takes the steps. Returns what was wrong when everything had been waited for; `daemon` is none while it is away.
    async fn play(&self, db: &Database, daemon: Option<&Daemon>, steps: Vec<Step>) -> Vec<String> {
        for step in steps {
            let found = match (step, daemon) {
                (Step::Op(op), _) => {
                    perform(db, op, |name| self.form(name)).await;
                    continue;
                }
                (Step::Wait, Some(daemon)) => {
                    daemon.settled().await;
                    self.check_applied(db, daemon).await
                }
                (Step::Lose(name), Some(daemon)) => self.lose(db, daemon, &name).await,
                (_, None) => continue,
            };
            if !found.is_empty() {
                return found;
            }
        }
        Vec::new()
    }

    /// Drops a collection and restores it, each waited for.
    async fn lose(&self, db: &Database, daemon: &Daemon, name: &str) -> Vec<String> {
        daemon.settled().await;
        if daemon.sources_are_back().await {
            daemon.settled().await;
        }
        if self.lacks_source(daemon) {
            return Vec::new();
        }
        let names = self.generator.collections();
        let mut before = world(db, &names).await;
        if self.rules.iter().any(|rule| rule.to_string().contains("$$ROOT")) {
            // A copy of a whole document shows that it was touched.
            return Vec::new();
        }
        let Some(docs) = before.remove(name) else { return Vec::new() };
        perform(db, Op::Drop { coll: name.to_owned() }, |name| self.form(name)).await;
        // All that is left is looked at again.
        for (coll, docs) in &mut before {
            for doc in docs {
                doc.insert("touched", doc.get_i32("touched").unwrap_or(0) + 1);
                let filter = doc! {"_id": doc.get("_id").cloned()};
                perform(db, Op::Replace { coll: coll.clone(), filter, doc: doc.clone() }, |name| self.form(name)).await;
            }
        }
        daemon.settled().await;
        let after = world(db, &names).await;
        let stays = Expectation { world: before, owned: BTreeMap::new(), notes: Vec::new() };
        let found = differences(&stays, &after);
        if !found.is_empty() {
            return self.describe(found.into_iter().map(|line| format!("without {name}: {line}")).collect(), &after);
        }
        perform(db, Op::Restore { coll: name.to_owned(), docs }, |name| self.form(name)).await;
        daemon.settled().await;
        self.check_applied(db, daemon).await
    }

    /// What is wrong when everything is applied. A key with a dead letter is up to date when that has been tried again: nothing
    /// tells that a source concerned the key whose value it kept from being computed.
    async fn check_applied(&self, db: &Database, daemon: &Daemon) -> Vec<String> {
        let mut found = self.check(db).await;
        if found.is_empty() {
            return found;
        }
        // A rule whose source was gone for a moment is blocked until the source is looked for again.
        if daemon.sources_are_back().await {
            daemon.settled().await;
            found = self.check(db).await;
        }
        // Without its source a rule writes nothing, whatever becomes of its targets.
        if found.is_empty() || self.lacks_source(daemon) {
            return Vec::new();
        }
        for rule in named(self) {
            if daemon.retry_dead_letters(rule.get_str("name").unwrap()).await {
                daemon.settled().await;
                found = self.check(db).await;
            }
        }
        found
    }

    /// Whether a rule is blocked because its source is gone.
    fn lacks_source(&self, daemon: &Daemon) -> bool {
        named(self).iter().any(|rule| daemon.lacks_source(rule.get_str("name").unwrap()))
    }

    async fn check(&self, db: &Database) -> Vec<String> {
        let actual = world(db, &self.generator.collections()).await;
        let expectation = self.oracle.expected(&actual).unwrap();
        let found = differences(&expectation, &actual);
        if found.is_empty() {
            return found;
        }
        let mut found = self.describe(found, &actual);
        found.extend(expectation.notes.iter().map(|note| format!("  note {note}")));
        found
    }

    /// The same with what there is to know of the world.
    fn describe(&self, mut found: Vec<String>, actual: &World) -> Vec<String> {
        found.push(format!("  odd {:?}", self.generator.odd().collect::<Vec<_>>()));
        found.extend(self.rules.iter().map(|rule| format!("  rule {rule}")));
        for (name, documents) in actual {
            found.extend(documents.iter().map(|document| format!("  {name} {document}")));
        }
        // A large value tells no more than its beginning.
        for line in &mut found {
            if let Some((end, _)) = line.char_indices().nth(20_000) {
                line.truncate(end);
            }
        }
        found
    }
}

/// What a run is made of.
#[derive(Clone, Copy)]
struct Run {
    options: fn(String) -> Options,
    /// In so many partitions, before and after the crash.
    partitions: [u32; 2],
    /// More of the config's `limits`, drawn from the first seed.
    limits: fn(&mut StdRng) -> String,
    /// Copies that others write are repaired in a while, not by the time that everything is applied.
    repaired: bool,
    /// The most worlds under one daemon.
    at_once: u64,
}

impl Run {
    fn new(options: fn(String) -> Options) -> Self {
        Self { options, partitions: [1, 1], limits: |_| String::new(), repaired: false, at_once: 100 }
    }

    fn config(test: &TestDb, rules: &str, limits: &str, partitions: u32) -> String {
        let text = config(test, rules).replace("limits: { ", &format!("limits: {{ {limits}"));
        format!("{text}lease: {{ partitions: {partitions} }}\n")
    }

    /// Draws `count` histories from `first` on and runs them side by side, some of their documents there before the daemon.
    async fn histories(&self, first: u64, count: u64) {
        let test: TestDb = denormd_fixture::database().await;
        let db = test.database();
        let mut histories: Vec<History> =
            (first..first + count).map(|seed| History::draw(seed, self.options, &test.name)).collect();
        for history in &mut histories {
            history.create(&db).await;
            if history.seed % 2 == 0 {
                for op in history.generator.initial() {
                    perform(&db, op, |name| history.form(name)).await;
                }
            }
        }
        let rules: Vec<Document> = histories.iter().flat_map(named).collect();
        let rules = rules_as_json(&rules);
        let limits = (self.limits)(&mut StdRng::seed_from_u64(first));
        let config = |partitions: u32| Self::config(&test, &rules, &limits, partitions);
        let mut daemon = Daemon::start_config(&config(self.partitions[0])).await;
        for round in 0..3 {
            // Each history in its own order, all of them at once.
            let steps: Vec<Vec<Step>> = histories.iter_mut().map(|history| history.steps(round)).collect();
            let mut failures = BTreeMap::new();
            if round == 1 {
                // A crash and a restart while changes go on.
                let (daemon_again, found) = tokio::join!(
                    async {
                        tokio::task::yield_now().await;
                        daemon.kill();
                        Daemon::start_config(&config(self.partitions[1])).await
                    },
                    played(&db, None, &histories, steps)
                );
                daemon = daemon_again;
                failures.extend(found);
            } else {
                let steps = if self.repaired { without_waits(steps) } else { steps };
                failures.extend(played(&db, Some(&daemon), &histories, steps).await);
            }
            failures.extend(self.settled(&db, &daemon, &histories).await);
            fail(&test, &limits, round, failures).await;
        }
        daemon.stop().await;
    }

    /// What is wrong when everything is applied.
    async fn settled(&self, db: &Database, daemon: &Daemon, histories: &[History]) -> BTreeMap<u64, Vec<String>> {
        let begun = Instant::now();
        loop {
            daemon.settled().await;
            let mut failures = BTreeMap::new();
            for history in histories {
                let found = history.check_applied(db, daemon).await;
                if !found.is_empty() {
                    failures.insert(history.seed, found);
                }
            }
            if failures.is_empty() || !self.repaired || begun.elapsed() > PATIENCE {
                return failures;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn many(&self, default: u64) {
        let mut seeds = seeds("DENORMD_HISTORIES", default);
        while !seeds.is_empty() {
            let step = (seeds.end - seeds.start).min(self.at_once).min(default);
            println!("histories {}..{}", seeds.start, seeds.start + step);
            self.histories(seeds.start, step).await;
            seeds.start += step;
        }
    }
}

/// Plays all histories at once, and returns what was wrong on the way, by seed.
async fn played(
    db: &Database,
    daemon: Option<&Daemon>,
    histories: &[History],
    steps: Vec<Vec<Step>>,
) -> Vec<(u64, Vec<String>)> {
    let all = histories.iter().zip(steps);
    let all = all.map(|(history, steps)| async move { (history.seed, history.play(db, daemon, steps).await) });
    stream::iter(all).buffer_unordered(16).filter(|(_, found)| std::future::ready(!found.is_empty())).collect().await
}

fn without_waits(steps: Vec<Vec<Step>>) -> Vec<Vec<Step>> {
    steps.into_iter().map(|steps| steps.into_iter().filter(|step| matches!(step, Step::Op(_))).collect()).collect()
}

/// Fails if there are failures.
async fn fail(test: &TestDb, limits: &str, round: usize, failures: BTreeMap<u64, Vec<String>>) {
    let Some((seed, found)) = failures.first_key_value() else { return };
    let seeds: Vec<&u64> = failures.keys().collect();
    let letters = all(&test.beside("state"), "dead_letters").await;
    let letters: Vec<String> =
        letters.iter().map(ToString::to_string).filter(|letter| letter.contains(&format!("w{seed}-"))).collect();
    panic!(
        "round {round}, limits {{ {limits}}}: histories {seeds:?} diverge; DENORMD_SEED={seed}:\n{}\n{}",
        found.join("\n"),
        letters.join("\n")
    );
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

/// Which odd kinds a world may have.
fn odd() -> Vec<Odd> {
    match std::env::var("DENORMD_ODD").as_deref() {
        Err(_) => ODD.to_vec(),
        Ok("all") => Odd::ALL.to_vec(),
        Ok("none") => Vec::new(),
        Ok(names) => names
            .split(',')
            .map(|name| Odd::ALL.into_iter().find(|odd| odd.name() == name).unwrap_or_else(|| panic!("no kind {name}")))
            .collect(),
    }
}

fn everything(prefix: String) -> Options {
    Options { mixed_composite: true, odd: odd(), ..Options::everything(prefix) }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_rules_converge_whatever_happens() {
    Run::new(|prefix| Options { mixed_composite: true, odd: odd(), ..Options::new(prefix) }).many(100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_whatever_happens() {
    Run::new(everything).many(100).await;
}

/// Every partition writes what it owns, and all of them together what one would.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_in_three_partitions() {
    Run { partitions: [3, 3], ..Run::new(everything) }.many(60).await;
}

/// What was done in one number of partitions is done in another one, and what was not is not forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_when_the_partitions_change() {
    Run { partitions: [2, 3], ..Run::new(everything) }.many(30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_that_dangle_are_removed_with_their_element_or_target() {
    Run::new(|prefix| Options { destroy: true, mixed_composite: true, odd: odd(), ..Options::new(prefix) })
        .many(50)
        .await;
}

/// Few worlds under each daemon: beside many kinds of collections the stream holds no update back.
#[tokio::test(flavor = "multi_thread")]
async fn the_rules_of_one_application_converge() {
    Run { at_once: 4, ..Run::new(everything) }.many(12).await;
}

/// A queue that holds hardly anything, in batches of a few keys, while worlds write all at once.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_with_a_tiny_queue() {
    let limits = |rng: &mut StdRng| {
        let (pending, keys, batches) = (rng.random_range(2..=50), rng.random_range(1..=10), rng.random_range(1..=3));
        format!("pending: {pending}, batch_keys: {keys}, batches: {batches}, ")
    };
    Run { limits, ..Run::new(everything) }.many(15).await;
}

/// Reads that take too long: their keys are done alone, for longer each time, beside others.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_where_reads_take_too_long() {
    let options = |prefix| Options { odd: vec![Odd::Slow], ..everything(prefix) };
    let limits = |rng: &mut StdRng| format!("read_timeout_seconds: 1, batches: {}, ", rng.random_range(1..=3));
    Run { limits, at_once: 8, ..Run::new(options) }.many(8).await;
}

/// An application that writes the copies as well, with `guard: watch` or `audit`.
#[tokio::test(flavor = "multi_thread")]
async fn copies_that_others_write_are_repaired() {
    let options = |prefix| Options { write_owned: true, ..everything(prefix) };
    let limits = |_: &mut StdRng| "audit_per_second: 100000, ".to_owned();
    Run { limits, repaired: true, ..Run::new(options) }.many(30).await;
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
