//! Random histories against an oracle that shares no code with the plan.
//!
//! Each world is a set of rules over its own collections; dozens of worlds share one database and one daemon. The
//! seed of a failure is printed; `DENORMD_SEED` replays it, `DENORMD_HISTORIES` sets the number of histories,
//! `DENORMD_FIRST` the first seed (1; `random` draws it, as `make histories` does), and `DENORMD_ODD` the odd kinds of
//! worlds: `all`, `none`, or names separated by commas. With `DENORMD_RELOADS=1`, as in `make histories`, another config
//! is loaded in the middle, and in some worlds all rules write the same targets, at the same time.

mod faulty;
mod instance;
mod perform;
mod recorded;
mod reload;
mod roles;
mod simulated;
mod touch;
mod weather;
mod writes;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Document, doc};
use denormd_engine::checkpoint::store::POSITIONS;
use denormd_fixture::TestDb;
use denormd_model::{position::ClusterTime, rule_state::BlockReason};
use denormd_oracle::{Expectation, Generator, Odd, Op, Options, Oracle, Rule, Staying, World, differences, equal};
use futures_util::{StreamExt, future::join_all, stream};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::time::Instant;

use crate::support::{
    daemon::{Daemon, PATIENCE, all, config, rules_as_json, until},
    seeds::seeds,
};
use perform::{Form, create, perform, together, world};

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

/// Number of histories that play at once.
const AT_ONCE: usize = 16;

/// One step of a history.
enum Step {
    /// Operations of several clients at the same time.
    Ops(Vec<Op>),
    /// All earlier steps are waited for, and the result is compared.
    Wait,
    /// A collection is dropped and restored, and each step is waited for: in between, the values of its targets stay.
    Lose(String),
}

struct History {
    seed: u64,
    generator: Generator,
    oracle: Oracle,
    /// The rules of the current config.
    rules: Vec<Document>,
    /// Those of the config that is loaded in the middle of the history.
    next: Vec<Document>,
    pre_images: BTreeSet<String>,
    /// The values and documents of the last comparison that must be the same in the next one, unless the application changes them.
    memory: RefCell<Vec<Staying>>,
    first: FirstBackfill,
}

/// The documents of a history before and after the first backfill, and the time of its end, if that was waited for.
#[derive(Default)]
struct FirstBackfill {
    before: World,
    after: World,
    end: ClusterTime,
}

impl History {
    fn draw(seed: u64, options: impl Fn(String) -> Options, database: &str, reloads: bool) -> Self {
        let mut options = options(format!("w{seed}_"));
        database.clone_into(&mut options.database);
        options.fills_once = !reloads || reload::keeps_once(seed);
        let mut generator = Generator::with_options(seed, options);
        let mut rules: Vec<Document> = generator.rules();
        for (nth, rule) in rules.iter_mut().enumerate() {
            rule.insert("name", format!("w{seed}-{nth}"));
        }
        // One drawn set in thousands has a circle, which the plan refuses.
        while Oracle::new(&rules, database).is_err() {
            rules.pop();
        }
        let mut next = if reloads { reload::changed(seed, &rules) } else { rules.clone() };
        if Oracle::new(&next, database).is_err() {
            // Two filters excluded each other, and one of them is gone: the plan would refuse the circle.
            next.clone_from(&rules);
        }
        if seed.is_multiple_of(3) {
            // Rules that are new, too.
            std::mem::swap(&mut rules, &mut next);
        }
        let oracle = Oracle::new(&rules, database).unwrap();
        let pre_images = generator.pre_images();
        let (memory, first) = (RefCell::default(), FirstBackfill::default());
        Self { seed, generator, oracle, rules, next, pre_images, memory, first }
    }

    /// Takes over the rules of the next config.
    fn reload(&mut self) {
        std::mem::swap(&mut self.rules, &mut self.next);
        self.oracle = Oracle::new(&self.rules, self.generator.database()).unwrap();
        self.memory.get_mut().clear();
    }

    /// The other config: the former one, once it is replaced.
    fn other(&self) -> Oracle {
        Oracle::new(&self.next, self.generator.database()).unwrap()
    }

    /// The rules that keep the values that they overwrite at first, and that both configs have for the same targets: at another
    /// target, a rule keeps values again, and these may be its own. A rule with `once` overwrites none. A rule of a tree may
    /// write a document several times in its first backfill.
    fn keeping(&self) -> Vec<&Rule> {
        let keeps = |rule: &Rule| !rule.once && rule.tree.is_none();
        let other = self.other();
        let is_same = |rule: &Rule, other: &Rule| {
            let targets = [rule, other].map(|rule| (&rule.target.collection, &rule.target.filter));
            rule.name == other.name && targets[0] == targets[1] && keeps(other)
        };
        let lasts = |rule: &&Rule| other.rules().iter().any(|other| is_same(rule, other));
        self.oracle.rules().iter().filter(|rule| keeps(rule)).filter(lasts).collect()
    }

    /// True if no other rule of either config writes to a collection of this rule.
    fn is_alone(&self, rule: &Rule) -> bool {
        let (other, own) = (self.other(), [&rule.source.collection, &rule.target.collection]);
        let mut others = self.oracle.rules().iter().chain(other.rules()).filter(|other| other.name != rule.name);
        !others.any(|other| own.contains(&&other.target.collection))
    }

    /// The options of a new collection. Half of the worlds get pre-images from `plan --apply`, and only where a rule
    /// needs them.
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
            steps.extend(self.generator.initial().into_iter().map(|op| Step::Ops(vec![op])));
        }
        let has_bursts = self.generator.is_shared() || self.generator.is_crowded();
        for _ in 0..12 {
            let at_once = if has_bursts { rng.random_range(1..=4) } else { 1 };
            steps.push(Step::Ops((0..at_once).map(|_| self.generator.op()).collect()));
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

    /// True if these operations are performed in one transaction. Their changes are read together and reconciled in one batch.
    fn is_transaction(&self, ops: &[Op]) -> bool {
        let is_of_collection =
            |op: &Op| matches!(op, Op::Drop { .. } | Op::Restore { .. } | Op::Rename { .. } | Op::PreImages { .. });
        let may = StdRng::seed_from_u64(self.seed ^ 0x7472_616e).random_bool(0.5);
        may && self.generator.is_crowded() && ops.len() > 1 && !ops.iter().any(is_of_collection)
    }

    /// Performs the steps. Returns the differences found after everything was waited for; `daemon` is None while it is
    /// stopped.
    async fn play(&self, db: &Database, daemon: Option<&Daemon>, steps: Vec<Step>) -> Vec<String> {
        for step in steps {
            let found = match (step, daemon) {
                (Step::Ops(ops), _) => {
                    for op in &ops {
                        self.forget(op);
                    }
                    // The server refuses all of them if it refuses one.
                    if !self.is_transaction(&ops) || together(db, &ops).await.is_err() {
                        join_all(ops.into_iter().map(|op| perform(db, op, |name| self.form(name)))).await;
                    }
                    continue;
                }
                (Step::Wait, Some(daemon)) => {
                    let lacking = daemon.settled().await;
                    self.check_applied(db, daemon, &lacking).await
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

    /// Drops a collection and restores it, waiting after each step.
    async fn lose(&self, db: &Database, daemon: &Daemon, name: &str) -> Vec<String> {
        let lacking = daemon.settled().await;
        if self.sources_are_back(daemon).await {
            daemon.settled().await;
        }
        // A retry of a dead letter would change values later.
        let found = self.check_applied(db, daemon, &lacking).await;
        if !found.is_empty() || self.lacks_source(daemon) {
            return found;
        }
        let names = self.generator.collections();
        let mut before = world(db, &names).await;
        if self.rules.iter().any(|rule| rule.to_string().contains("$$ROOT")) {
            // A copy of a whole document shows that it was touched.
            return Vec::new();
        }
        // The daemon creates these documents again.
        if self.generator.created_collection().is_some_and(|created| created == name) {
            return Vec::new();
        }
        let Some(docs) = before.remove(name) else { return Vec::new() };
        self.memory.borrow_mut().clear();
        perform(db, Op::Drop { coll: name.to_owned() }, |name| self.form(name)).await;
        // The remaining documents are checked again.
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
        let found = self.replace_by_one(db, daemon, name, &stays).await;
        if !found.is_empty() {
            return self.describe(found, &after);
        }
        perform(db, Op::Restore { coll: name.to_owned(), docs }, |name| self.form(name)).await;
        let lacking = daemon.settled().await;
        self.check_applied(db, daemon, &lacking).await
    }

    /// Inserts one document to which nothing refers into a dropped source. The source does not count as restored: a rule that
    /// would lose more than a tenth of its values stays blocked until an operator agrees. Returns what has changed.
    async fn replace_by_one(&self, db: &Database, daemon: &Daemon, name: &str, stays: &Expectation) -> Vec<String> {
        let rules = self.rules.iter().map(|rule| rule.get_str("name").unwrap());
        let lacking: Vec<&str> = rules.filter(|rule| daemon.lacks_source(rule)).collect();
        if lacking.is_empty() {
            return Vec::new();
        }
        let doc = doc! {"_id": "nobody refers to it"};
        perform(db, Op::Insert { coll: name.to_owned(), doc }, |name| self.form(name)).await;
        let mut losing = Vec::new();
        for rule in &lacking {
            losing.extend(daemon.would_lose(rule).await.then_some(*rule));
        }
        // The leader looks every two seconds.
        tokio::time::sleep(Duration::from_secs(3)).await;
        daemon.settled().await;
        // A rule that loses next to nothing runs again, and may write what another one reads.
        if losing.len() < lacking.len() {
            return Vec::new();
        }
        let runs = losing.iter().filter(|rule| !daemon.lacks_source(rule));
        let mut found: Vec<String> = runs.map(|rule| format!("{rule} runs with one document in {name}")).collect();
        let mut after = world(db, &self.generator.collections()).await;
        after.remove(name);
        found.extend(differences(stays, &after));
        found
    }

    /// Waits until no rule of this world is blocked for a source that exists, and agrees to the losses. Returns true if there was
    /// one. Those of other worlds may have to stay blocked.
    async fn sources_are_back(&self, daemon: &Daemon) -> bool {
        daemon.sources_are_back_of(&format!("w{}-", self.seed)).await
    }

    /// The differences once everything is applied. A key with a dead letter is up to date only after a retry: no event
    /// connects a source to the key whose value could not be computed because of it.
    async fn check_applied(&self, db: &Database, daemon: &Daemon, lacking: &BTreeSet<String>) -> Vec<String> {
        let mut found = self.check_with_memory(db).await;
        if found.is_empty() {
            return found;
        }
        // A rule whose source was briefly gone is blocked until the source is looked for again, possibly at this
        // moment.
        let was_lacking = self.rules.iter().any(|rule| lacking.contains(rule.get_str("name").unwrap()));
        let is_back = self.sources_are_back(daemon).await || was_lacking;
        if is_back {
            daemon.settled().await;
        }
        let mut rules = self.oracle.rules().iter();
        let is_limited = rules.any(|rule| daemon.is_blocked(&rule.name, &BlockReason::RemovalLimit));
        let again = self.agree_to_removals(daemon).await;
        if !again.is_empty() {
            return again;
        }
        let lacked_source = self.lacks_source(daemon);
        // Compares again only after a wait: a second comparison alone would hide a change that was applied too late.
        if is_back || is_limited {
            found = self.check_with_memory(db).await;
        }
        // An empty source may come back during the comparison.
        if lacked_source && !self.lacks_source(daemon) {
            daemon.settled().await;
            found = self.check_with_memory(db).await;
        }
        // Without its source a rule writes nothing, whatever happens to its targets.
        if found.is_empty() || self.lacks_source(daemon) {
            return Vec::new();
        }
        for rule in &self.rules {
            if daemon.retry_dead_letters(rule.get_str("name").unwrap()).await {
                daemon.settled().await;
                let again = self.agree_to_removals(daemon).await;
                if !again.is_empty() {
                    return again;
                }
                found = self.check_with_memory(db).await;
            }
        }
        found
    }

    /// Agrees to the removals of the rules that the removal limit blocks, until there are none. Returns those that are blocked again
    /// although nothing has changed since: an agreement is for the whole backfill. Other rules, and a tree, may change what a
    /// rule reads.
    async fn agree_to_removals(&self, daemon: &Daemon) -> Vec<String> {
        let mut agreed = BTreeSet::new();
        let is_blocked = |rule: &&Rule| daemon.is_blocked(&rule.name, &BlockReason::RemovalLimit);
        loop {
            let blocked: Vec<&Rule> = self.oracle.rules().iter().filter(is_blocked).collect();
            if blocked.is_empty() {
                return Vec::new();
            }
            for rule in &blocked {
                if !agreed.insert(&rule.name) && rule.tree.is_none() && self.is_alone(rule) {
                    return vec![format!("the removal limit blocks {} again, after an agreement", rule.name)];
                }
                daemon.ask(&rule.name).await;
            }
            // The leader reads an agreement within a second, on a busy machine within several. It may block the rule again at once.
            let released = until("it is read", async || (!blocked.iter().any(is_blocked)).then_some(()));
            tokio::time::timeout(Duration::from_secs(20), released).await.ok();
            daemon.settled().await;
        }
    }

    /// True if a rule is blocked because its source is gone.
    fn lacks_source(&self, daemon: &Daemon) -> bool {
        self.rules.iter().any(|rule| daemon.lacks_source(rule.get_str("name").unwrap()))
    }

    /// The differences now.
    async fn check(&self, db: &Database) -> Vec<String> {
        let actual = world(db, &self.generator.collections()).await;
        self.compare(&actual, Vec::new())
    }

    /// The differences now, from the rules and from the memory.
    async fn check_with_memory(&self, db: &Database) -> Vec<String> {
        let actual = world(db, &self.generator.collections()).await;
        self.compare(&actual, self.lost(&actual))
    }

    /// Adds the differences between the expected and the stored documents to what was found.
    fn compare(&self, actual: &World, mut found: Vec<String>) -> Vec<String> {
        let expectation = self.oracle.expected(actual).unwrap();
        found.extend(differences(&expectation, actual));
        if found.is_empty() {
            return found;
        }
        let mut found = self.describe(found, actual);
        found.extend(expectation.notes.iter().map(|note| format!("  note {note}")));
        found
    }

    /// The differences from the memory. If there are none, replaces the memory by what must stay from now on.
    fn lost(&self, actual: &World) -> Vec<String> {
        let mut memory = self.memory.borrow_mut();
        let lost: Vec<String> = memory.iter().filter_map(|staying| staying.difference(actual)).collect();
        if lost.is_empty() {
            *memory = self.oracle.staying(actual).unwrap();
        }
        lost
    }

    /// Removes the documents that an operation may change from the memory.
    fn forget(&self, op: &Op) {
        let id = match op {
            Op::Insert { doc, .. } => doc.get("_id"),
            Op::Update { filter, .. } | Op::Replace { filter, .. } | Op::Delete { filter, .. } => filter.get("_id"),
            Op::Drop { .. } | Op::Restore { .. } | Op::Rename { .. } => None,
            Op::PreImages { .. } => return,
        };
        // With a collation, a filter by `_id` finds other documents, too.
        let id = id.filter(|_| self.generator.collation(op.coll()).is_none());
        let from: &str = if let Op::Rename { from, .. } = op { from } else { op.coll() };
        let is_changed = |staying: &Staying| {
            (staying.collection == from || staying.collection == op.coll())
                && id.is_none_or(|id| equal(id, &staying.id))
        };
        self.memory.borrow_mut().retain(|staying| !is_changed(staying));
    }

    /// The same with a description of the world.
    fn describe(&self, mut found: Vec<String>, actual: &World) -> Vec<String> {
        found.push(format!("  odd {:?}", self.generator.odd().collect::<Vec<_>>()));
        found.extend(self.rules.iter().map(|rule| format!("  rule {rule}")));
        for (name, documents) in actual {
            found.extend(documents.iter().map(|document| format!("  {name} {document}")));
        }
        // The beginning of a large value is enough.
        for line in &mut found {
            if let Some((end, _)) = line.char_indices().nth(20_000) {
                line.truncate(end);
            }
        }
        found
    }
}

/// When a history begins: during the first backfill, or after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The steps are performed while the backfill runs.
    AtOnce,
    /// The backfill ends before the first step, and nothing changes meanwhile.
    AfterBackfill,
    /// The same, but the daemon crashes during it, and sources change before it starts again.
    AfterCrash,
}

/// The parameters of a run.
#[derive(Clone, Copy)]
struct Run {
    options: fn(String) -> Options,
    /// Approximate number of documents that each collection starts with.
    documents: usize,
    /// Number of rounds of changes after the first backfill; with a reload, there is one more. Without any, what that backfill has
    /// written is still there at the end.
    rounds: usize,
    /// Number of partitions, before and after the crash.
    partitions: [u32; 2],
    /// Additional `limits` of the config, drawn from the first seed.
    limits: fn(&mut StdRng) -> String,
    /// Copies that others write are repaired after some time, not as soon as everything is applied.
    repaired: bool,
    /// The most worlds under one daemon.
    at_once: u64,
    start: Start,
    /// Another config is loaded in the middle.
    reloads: bool,
    /// The worlds run one after another, with a wait after each step while a daemon runs: no later change hides a wait that ends too early.
    in_turn: bool,
    /// The crash comes at most this many milliseconds after the start of a round.
    crash_after: u64,
}

impl Run {
    fn new(options: fn(String) -> Options) -> Self {
        Self {
            options,
            documents: Options::new("").documents,
            rounds: 3,
            partitions: [1, 1],
            limits: |_| String::new(),
            repaired: false,
            at_once: 100,
            start: Start::AtOnce,
            reloads: reload::is_on(),
            in_turn: false,
            crash_after: 0,
        }
    }

    fn config(test: &TestDb, rules: &str, limits: &str, partitions: u32) -> String {
        let text = config(test, rules).replace("limits: { ", &format!("limits: {{ {limits}"));
        format!("{text}lease: {{ partitions: {partitions} }}\n")
    }

    /// Draws `count` histories from `first` on and runs them concurrently; some of their documents exist before the
    /// daemon starts.
    async fn histories(&self, first: u64, count: u64) {
        let test: TestDb = denormd_fixture::database().await;
        let (daemon, _) = self.histories_on(&test, first, count).await;
        daemon.stop().await;
        touch::assert_with_a_value(&test).await;
    }

    /// Returns the daemon, which has applied everything, and the histories.
    async fn histories_on(&self, test: &TestDb, first: u64, count: u64) -> (Daemon, Vec<History>) {
        let db = test.database();
        let options = |prefix| Options { documents: self.documents, ..(self.options)(prefix) };
        let mut histories: Vec<History> =
            (first..first + count).map(|seed| History::draw(seed, options, &test.name, self.reloads)).collect();
        for history in &mut histories {
            history.create(&db).await;
            if history.seed % 2 == 0 {
                for op in history.generator.initial() {
                    perform(&db, op, |name| history.form(name)).await;
                }
            }
        }
        let limits = (self.limits)(&mut StdRng::seed_from_u64(first));
        if !limits.is_empty() {
            println!("limits: {{ {limits}}}");
        }
        let config = |histories: &[History], partitions: u32| {
            let rules: Vec<Document> = histories.iter().flat_map(configured_rules).collect();
            Self::config(test, &rules_as_json(&rules), &limits, partitions)
        };
        let text = config(&histories, self.partitions[0]);
        let mut daemon = self.started(test, &text, &mut histories).await;
        if self.start != Start::AtOnce {
            // Later changes may hide what is wrong.
            fail(test, &limits, 0, self.settled(&db, &daemon, &histories).await).await;
        }
        for round in 0..self.rounds + usize::from(self.reloads) {
            // Each history in its own order, all at once.
            let steps: Vec<Vec<Step>> = histories.iter_mut().map(|history| history.steps(round)).collect();
            let (steps, at_once) = if self.in_turn { (with_waits(steps), 1) } else { (steps, AT_ONCE) };
            let mut failures = BTreeMap::new();
            let reloads = self.reloads && round == 2;
            if round == 1 || reloads {
                if reloads {
                    histories.iter_mut().for_each(History::reload);
                }
                let config = config(&histories, self.partitions[1]);
                // A crash and a restart, or another config, while changes go on.
                let (daemon_again, found) = tokio::join!(
                    async {
                        tokio::task::yield_now().await;
                        if round == 1 {
                            let millis = StdRng::seed_from_u64(first).random_range(0..=self.crash_after);
                            tokio::time::sleep(Duration::from_millis(millis)).await;
                            daemon.kill();
                        } else {
                            daemon.stop().await;
                        }
                        Daemon::start_config(&config).await
                    },
                    played(&db, None, &histories, steps, at_once)
                );
                daemon = daemon_again;
                failures.extend(found);
            } else {
                let steps = if self.repaired { without_waits(steps) } else { steps };
                failures.extend(played(&db, Some(&daemon), &histories, steps, at_once).await);
            }
            failures.extend(self.settled(&db, &daemon, &histories).await);
            fail(test, &limits, round, failures).await;
        }
        (daemon, histories)
    }

    /// Starts the daemon. If the first backfills are waited for, remembers them.
    async fn started(&self, test: &TestDb, config: &str, histories: &mut [History]) -> Daemon {
        if self.start == Start::AtOnce {
            return Daemon::start_config(config).await;
        }
        let db = test.database();
        for history in &mut *histories {
            history.first.before = world(&db, &history.generator.collections()).await;
        }
        let mut random = StdRng::seed_from_u64(histories[0].seed ^ 0x6372_6173);
        // Sometimes the checkpoints are lost in the crash. Pages of one document make sure that a backfill is open at that time.
        let loses_checkpoints =
            self.start == Start::AfterCrash && !config.contains("backfill_per_second") && random.random_bool(0.7);
        let millis = random.random_range(if loses_checkpoints { 3000..12_000 } else { 0..1500 });
        let slow = config.replace("limits: { ", "limits: { backfill_per_second: 1, ");
        let mut daemon = Daemon::start_config(if loses_checkpoints { &slow } else { config }).await;
        if self.start == Start::AfterCrash {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            daemon.kill();
            if loses_checkpoints {
                test.beside("state").collection::<Document>(POSITIONS).delete_many(doc! {}).await.unwrap();
            }
            // No rule writes these fields.
            let others = doc! {"$set": {"name": "another", "label": "another", "n": 77}};
            for name in histories.iter().flat_map(|history| history.generator.collections()) {
                let all = doc! {"q": {}, "u": others.clone(), "multi": true};
                db.run_command(doc! {"update": name, "updates": [all]}).await.unwrap();
            }
            daemon = Daemon::start_config(config).await;
        }
        daemon.settled().await;
        // From then on, a rule keeps no value that it overwrites.
        until("the first backfills are over", async || {
            let rules = all(&test.beside("state"), "rules").await;
            rules.iter().all(|rule| rule.get_document("keeping").is_err()).then_some(())
        })
        .await;
        daemon.settled().await;
        let end = daemon.context().server.operation_time().await.unwrap();
        for history in histories {
            let after = world(&db, &history.generator.collections()).await;
            (history.first.after, history.first.end) = (after, end);
        }
        daemon
    }

    /// The differences once everything is applied.
    async fn settled(&self, db: &Database, daemon: &Daemon, histories: &[History]) -> BTreeMap<u64, Vec<String>> {
        let begun = Instant::now();
        loop {
            let lacking = daemon.settled().await;
            let mut failures = BTreeMap::new();
            for history in histories {
                let found = history.check_applied(db, daemon, &lacking).await;
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

/// Plays all histories, `at_once` of them at a time, and returns the differences found, by seed.
async fn played(
    db: &Database,
    daemon: Option<&Daemon>,
    histories: &[History],
    steps: Vec<Vec<Step>>,
    at_once: usize,
) -> Vec<(u64, Vec<String>)> {
    let all = histories.iter().zip(steps);
    let all = all.map(|(history, steps)| async move { (history.seed, history.play(db, daemon, steps).await) });
    stream::iter(all)
        .buffer_unordered(at_once)
        .filter(|(_, found)| std::future::ready(!found.is_empty()))
        .collect()
        .await
}

fn with_waits(steps: Vec<Vec<Step>>) -> Vec<Vec<Step>> {
    let followed = |step| if matches!(step, Step::Ops(_)) { vec![step, Step::Wait] } else { vec![step] };
    steps.into_iter().map(|steps| steps.into_iter().flat_map(followed).collect()).collect()
}

fn without_waits(steps: Vec<Vec<Step>>) -> Vec<Vec<Step>> {
    steps.into_iter().map(|steps| steps.into_iter().filter(|step| matches!(step, Step::Ops(_))).collect()).collect()
}

/// Fails if there are failures.
async fn fail(test: &TestDb, limits: &str, round: usize, failures: BTreeMap<u64, Vec<String>>) {
    let Some((seed, found)) = failures.first_key_value() else { return };
    let seeds: Vec<&u64> = failures.keys().collect();
    let dead_letters = all(&test.beside("state"), "dead_letters").await;
    let dead_letters: Vec<String> = dead_letters
        .iter()
        .map(ToString::to_string)
        .filter(|dead_letter| dead_letter.contains(&format!("w{seed}-")))
        .collect();
    panic!(
        "round {round}, limits {{ {limits}}}: histories {seeds:?} diverge; DENORMD_SEED={seed}:\n{}\n{}",
        found.join("\n"),
        dead_letters.join("\n")
    );
}

/// The rules of the current config. In half of the worlds there is no audit, which could hide mistakes, unless others write the copies.
/// The stream leaves out updates only if there is an audit, so three quarters of the worlds with echoes have one.
fn configured_rules(history: &History) -> Vec<Document> {
    let echoes = || StdRng::seed_from_u64(history.seed ^ 0x6563_686f).random_bool(0.5);
    let has_audit = history.seed & 2 != 0 || (history.generator.has(Odd::Echo) && echoes());
    let configured = |rule: &Document| {
        let mut rule = rule.clone();
        rule.insert("allow_scan", true);
        if !rule.contains_key("guard") && !has_audit {
            rule.insert("guard", "off");
        }
        rule
    };
    history.rules.iter().map(configured).collect()
}

/// The odd kinds that a world may have.
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
    Options {
        mixed_composite: true,
        id_parts: true,
        odd: odd(),
        shared: reload::is_on(),
        ..Options::everything(prefix)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_rules_converge_whatever_happens() {
    Run::new(|prefix| Options { mixed_composite: true, id_parts: true, odd: odd(), ..Options::new(prefix) })
        .many(40)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_whatever_happens() {
    Run::new(everything).many(40).await;
}

/// Every partition writes its own share, and together they write the same as a single one.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_in_three_partitions() {
    Run { partitions: [3, 3], ..Run::new(everything) }.many(25).await;
}

/// Work done with one number of partitions remains valid with another one, and unfinished work is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_when_the_partitions_change() {
    Run { partitions: [2, 3], ..Run::new(everything) }.many(15).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_that_dangle_are_removed_with_their_element_or_target() {
    Run::new(|prefix| Options { destroy: true, mixed_composite: true, odd: odd(), ..Options::new(prefix) })
        .many(25)
        .await;
}

/// Few worlds for each daemon: with many kinds of collections the stream filters out no update.
#[tokio::test(flavor = "multi_thread")]
async fn the_rules_of_one_application_converge() {
    Run { at_once: 4, ..Run::new(everything) }.many(8).await;
}

/// A very small queue, in batches of a few keys, while all worlds write at once.
#[tokio::test(flavor = "multi_thread")]
async fn all_rules_converge_with_a_tiny_queue() {
    let limits = |rng: &mut StdRng| {
        let (pending, keys, batches) = (rng.random_range(2..=50), rng.random_range(1..=10), rng.random_range(1..=3));
        format!("pending: {pending}, batch_keys: {keys}, batches: {batches}, ")
    };
    Run { limits, ..Run::new(everything) }.many(8).await;
}

/// Reads that take too long: their keys run alone, for longer each time, while others continue.
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
    Run { limits, repaired: true, ..Run::new(options) }.many(15).await;
}

#[tokio::test]
async fn nothing_is_left_of_the_canary() {
    // A test of the test itself: a database that the daemon never processed differs from the oracle's expectation.
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
