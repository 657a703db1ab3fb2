//! Histories on a MongoDB in memory whose commands fail and whose primaries change, with whole daemons that are killed,
//! stopped and cut off.
//!
//! Every failure is an error, not a panic: it is run again with less, as long as it still fails, and the smallest failure
//! is printed with a trace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bson::{Bson, Document, Timestamp, doc};
use denormd::server::client;
use denormd_engine::{
    checkpoint::{fan_out, format, rule_record::RULES, store::POSITIONS},
    dead_letter::{Chosen, DeadLetter, DeadLetters, Entry, Retry},
    deployment::lease,
};
use denormd_fixture::TestDb;
use denormd_model::{clock, partition::Partition};
use denormd_oracle::{Odd, Op, Options, TOUCHED};
use denormd_rules::{
    config::{Format, load_str},
    plan::compile,
};
use denormd_simulated::{Model, Server};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::{
    History, Step, configured_rules,
    instance::{Instance, Naming},
    perform, recorded, reload, roles,
    simulated::{low_limits, output_of, print_digest, printed, replay},
    weather::{Fault, Trace, Weather},
    writes,
};
use crate::support::daemon::{Daemon, PATIENCE, all, config, load, log_to_the_test, rules_as_json, until};

/// The odd kinds of worlds that need no operator.
const KNOWN: &[Odd] = &[Odd::Empty, Odd::EdgeIds];
/// A rule whose copies show how current the others must be.
const MARKER: &str = "{\"name\": \"marker\", \"adopt\": true, \"guard\": \"off\", \"copy\": {\"source\": \"markers\", \"target\": \"marked\", \
                      \"match\": {\"marker\": \"_id\"}, \"set\": {\"n\": \"$n\"}}}";
/// A rule whose copies show what the target held when they were written.
const MIRROR: &str = "{\"name\": \"mirror\", \"adopt\": true, \"guard\": \"off\", \"copy\": {\"source\": \"markers\", \
                      \"target\": \"marked\", \"match\": {\"marker\": \"_id\"}, \"set\": {\"seen\": \"$$target.own\"}}}";
/// Number of markers: each partition has some.
const MARKERS: i32 = 12;
/// The application also changes this many of the copies of markers.
const CHANGED: i32 = 4;
/// One in this many writes of markers is a transaction that writes all of them.
const TOGETHER: usize = 5;
/// The number of lines to show of the output of a process that failed.
const LINES: usize = 400;
/// The prefix of the line that names the diverging world.
const WORLD: &str = "diverging world: ";
/// The prefix of the line with the number of times that each fault struck.
const STRUCK: &str = "faults that struck: ";
/// The prefix of a failure that is one of the model.
const UNKNOWN: &str = "the model does not know";
/// Time for which nothing may be written at the end.
const QUIET: Duration = Duration::from_millis(300);

fn everything(prefix: String) -> Options {
    Options { mixed_composite: true, id_parts: true, shared: true, odd: KNOWN.to_vec(), ..Options::everything(prefix) }
}

/// True for a world in which dangling references are removed, by its seed.
fn is_destroying(seed: u64) -> bool {
    seed % 8 == 2
}

/// True for a world in which the application writes the copies as well, by its seed.
fn is_overwritten(seed: u64) -> bool {
    seed % 4 == 3
}

/// True for a world whose copies only denormd writes, and whose guard must see no drift, by its seed.
fn is_guarded(seed: u64) -> bool {
    seed % 4 == 1
}

fn options(seed: u64) -> fn(String) -> Options {
    // An echo writes a reference and a copy. After a rollback it may change the copy alone, which only an audit repairs.
    // A target whose value cannot be computed must not stop the audit.
    let overwritten = |prefix| Options {
        write_owned: true,
        failing: true,
        odd: [KNOWN, &[Odd::Echo]].concat(),
        ..everything(prefix)
    };
    let destroying = |prefix| Options { destroy: true, ..everything(prefix) };
    match seed {
        seed if is_overwritten(seed) => overwritten,
        seed if is_destroying(seed) => destroying,
        _ => everything,
    }
}

/// The dimensions of a run, which a failure makes smaller.
#[expect(clippy::unsafe_derive_deserialize, reason = "the unsafe code is that of `tokio::join`")]
#[expect(clippy::struct_excessive_bools, reason = "each is a dimension of its own")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// Draws the faults.
    pub seed: u64,
    pub worlds: Vec<u64>,
    pub rounds: usize,
    pub daemons: u16,
    /// Their numbers in the first round, and in the others.
    pub partitions: [u32; 2],
    /// Other rules are loaded after the first round.
    pub reloads: bool,
    /// The other config is loaded during the operations of the second round, not before them.
    #[serde(default)]
    pub overlaps: bool,
    /// The longest delay of a command or an answer, in milliseconds. Without one, all work would be done when a fault strikes.
    pub latency: u64,
    /// Some collections are too large for the time limits of commands.
    #[serde(default)]
    pub large_collections: bool,
    /// Some change events are too large to be sent.
    #[serde(default)]
    pub large_events: bool,
    pub faults: BTreeSet<Fault>,
}

/// A failed run.
#[derive(Debug)]
pub struct Failed {
    /// The world that diverges, if it is one world.
    seed: Option<u64>,
    text: String,
}

impl Failed {
    fn new(text: impl Into<String>) -> Self {
        Self { seed: None, text: text.into() }
    }
}

type Result<T, E = Failed> = std::result::Result<T, E>;

/// A marker, what was written into it, and the time of the write.
type Written = (i32, i32, Timestamp);

impl Scale {
    /// The dimensions for these worlds, drawn from the first one's seed.
    pub fn draw(first: u64, worlds: u64) -> Self {
        // The first worlds of clusters differ by ten: what is drawn must not follow from their last digits.
        let mut random = StdRng::seed_from_u64(first ^ 0x7363_616c);
        let daemons = random.random_range(1..=3);
        let [before, other] = [(); 2].map(|()| random.random_range(1..=3));
        let partitions = [before, if random.random() { other } else { before }];
        let latency = 2 << random.random_range(0..5);
        let [large_collections, large_events] = [(); 2].map(|()| random.random_bool(0.25));
        Self {
            seed: first,
            worlds: (first..first + worlds).collect(),
            rounds: 2,
            daemons,
            partitions,
            reloads: reload::is_on(),
            overlaps: random.random_bool(0.4),
            latency,
            large_collections,
            large_events,
            faults: Fault::all(),
        }
    }

    /// True if no rule reads what another one writes, by the seed. For a chain of rules, `wait` waits for later changes as well,
    /// which hides that an earlier one was not waited for.
    fn is_without_chains(&self) -> bool {
        StdRng::seed_from_u64(self.seed ^ 0x6368_6169).random_bool(0.4)
    }

    /// True if somebody requests a retry of the dead letters once everything is applied, by the seed.
    fn retries(&self) -> bool {
        StdRng::seed_from_u64(self.seed ^ 0x7265_7472).random_bool(0.5)
    }

    /// The names of the instances, by the seed.
    fn naming(&self) -> Naming {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 0x6e61_6d65);
        *[Naming::Hosts, Naming::Containers, Naming::SameContainers].choose(&mut rng).unwrap()
    }

    fn world(&self, seed: u64, database: &str) -> History {
        let chains = !self.is_without_chains();
        let options = |prefix| Options { chains, trees: chains, ..options(seed)(prefix) };
        History::draw(seed, options, database, self.reloads)
    }

    /// Runs it in a process of its own, so that it can be replayed exactly. Returns the output.
    pub async fn simulate(&self) -> Result<String> {
        output_of("with_faults", self).await.map_err(|output| {
            let seed = printed(&output, WORLD).and_then(|world| world.parse().ok());
            // The last lines hold the failure itself.
            let lines: Vec<&str> = output.lines().collect();
            Failed { seed, text: lines[lines.len().saturating_sub(LINES)..].join("\n") }
        })
    }

    /// Smaller runs, of which one may still fail.
    fn smaller(&self, failed: &Failed) -> Vec<Self> {
        let mut out = Vec::new();
        if let Some(seed) = failed.seed.filter(|_| self.worlds.len() > 1) {
            out.push(Self { worlds: vec![seed], ..self.clone() });
        }
        if self.daemons > 1 {
            out.push(Self { daemons: 1, ..self.clone() });
        }
        let [before, after] = self.partitions;
        for partitions in [[1, 1], [before, before], [after, after]] {
            if partitions != self.partitions && before.max(after) > 1 {
                out.push(Self { partitions, ..self.clone() });
            }
        }
        if self.reloads {
            out.push(Self { reloads: false, ..self.clone() });
        }
        if self.overlaps {
            out.push(Self { overlaps: false, ..self.clone() });
        }
        if self.rounds > 1 {
            out.push(Self { rounds: 1, ..self.clone() });
        }
        if self.large_collections {
            out.push(Self { large_collections: false, ..self.clone() });
        }
        if self.large_events {
            out.push(Self { large_events: false, ..self.clone() });
        }
        for fault in &self.faults {
            let faults = self.faults.iter().filter(|other| *other != fault).copied().collect();
            out.push(Self { faults, ..self.clone() });
        }
        out
    }

    /// Runs it, and prints the outcome.
    ///
    /// # Panics
    ///
    /// Panics if a copy or a daemon's status is wrong.
    pub async fn run(&self) {
        log_to_the_test();
        let server = Server::start_set(Model::new(self.seed), 2).await.unwrap();
        server.model.set_latency(Duration::from_millis(self.latency));
        let test = TestDb::named(server.uri(), "app").await;
        server.model.record_writes("denormd", &test.name);
        if self.large_collections {
            server.model.set_large_collections(&test.name);
        }
        if self.large_events {
            server.model.set_large_events(&test.name, true);
        }
        let trace = Trace::new();
        let result = Box::pin(self.play(&server, &test, &trace)).await;
        let result = result.and(is_known(&server.model)).map_err(|failed| {
            let is_told = |line: &&String| {
                let ours = failed.seed.is_none_or(|seed| line.contains(&format!("ms  world {seed}:")));
                ours || !line.contains("ms  world ")
            };
            let trace: Vec<String> = trace.lines().iter().filter(is_told).cloned().collect();
            let trace = trace.join("\n");
            let struck = server.model.struck();
            Failed { text: format!("trace:\n{trace}\n{struck:?}\n{}", failed.text), ..failed }
        });
        if let Err(Failed { seed, text }) = result {
            println!("{text}");
            if let Some(seed) = seed {
                println!("{WORLD}{seed}");
            }
            panic!("a copy or a daemon's status is wrong");
        }
        print_digest(&server, &test);
    }

    async fn play(&self, server: &Server, test: &TestDb, trace: &Trace) -> Result<()> {
        let db = test.database();
        let mut histories: Vec<History> = self.worlds.iter().map(|seed| self.world(*seed, &test.name)).collect();
        prepare(&db, &mut histories).await;
        let mut daemons = self.start(server, test, &histories).await;
        let addresses: Vec<SocketAddr> = daemons.iter().map(|daemon| daemon.address).collect();
        let weather = |seed, kinds| Weather::new(seed, server.model.clone(), kinds, &self.faults, test);
        let mut of_cluster = weather(self.seed, &Fault::CLUSTER);
        let mut of_daemons = weather(!self.seed, &Fault::DAEMONS);
        let mut transactions = 0;
        for round in 0..self.rounds {
            let mut other = None;
            if round == 1 {
                trace.add(format_args!("reload: {}, partitions: {:?}", self.reloads, self.partitions));
                other = self.other_config(test, &mut histories, &daemons).await;
                if let Some(other) = other.take_if(|_| !self.overlaps) {
                    self.configure(&other, &mut daemons).await.map_err(Failed::new)?;
                }
            }
            of_daemons.rules = histories
                .iter()
                .flat_map(|history| &history.rules)
                .map(|rule| rule.get_str("name").unwrap().to_owned())
                .collect();
            let steps: Vec<Vec<Step>> = histories.iter_mut().map(|history| history.steps(round)).collect();
            let configured = AtomicBool::new(other.is_none());
            let over = AtomicBool::new(false);
            let stop = AtomicBool::new(false);
            let watched = async {
                let played = async {
                    let plays = histories
                        .iter()
                        .zip(steps)
                        .map(|(history, steps)| play(history, &db, &addresses, steps, &configured, trace));
                    let played: Result<Vec<()>> = futures_util::future::try_join_all(plays).await;
                    over.store(true, Ordering::Relaxed);
                    played
                };
                let ended = async {
                    if let Some(other) = &other {
                        self.configure(other, &mut daemons).await?;
                        trace.add("the other config is loaded");
                        configured.store(true, Ordering::Relaxed);
                    }
                    of_daemons.strike(&mut daemons, &over, trace).await
                };
                let (played, struck, ended) = tokio::join!(played, of_cluster.strike(&mut [], &over, trace), ended);
                stop.store(true, Ordering::Relaxed);
                played.and(struck.and(ended).map_err(Failed::new))
            };
            let (played, watched) = tokio::join!(watched, watch(test, &server.model, &addresses, &stop));
            transactions += played.and(watched)?;
            trace.add("the faults are over");
            if let Some(nth) = daemons.iter().position(Instance::has_ended) {
                return Err(Failed::new(format!("daemon {nth} has ended by itself")));
            }
            // The first one has the number that was rolled out last, and all are to have the same.
            let newest = daemons[0].partitions;
            for daemon in daemons.iter_mut().filter(|daemon| daemon.partitions != newest) {
                daemon.repartition(newest).await.map_err(Failed::new)?;
            }
            settle(server, &db, &addresses, &histories, self.retries()).await?;
            roles::are_shown(&daemons).await.map_err(Failed::new)?;
            at_rest(server, test).await?;
            for address in &addresses {
                let answer =
                    async || client::get(*address, "/v1/status", Duration::from_secs(5)).await.ok()?.json().ok();
                has_no_drift(&until("the status", answer).await)?;
            }
            only_own_writes(&server.model, &test.name, &histories)?;
        }
        mirrors_match(&server.model, &test.name)?;
        terms_rise(&server.model, state_of(&db).name())?;
        recorded::check(&server.model, state_of(&db).name()).map_err(Failed::new)?;
        times_rise(&server.model, &test.name, &histories)?;
        let struck = of_cluster.struck.into_iter().chain(of_daemons.struck);
        let struck = struck.map(|(fault, times)| (format!("{fault:?}"), times));
        let take_overs = take_overs(&server.model, state_of(&db).name());
        let counted = [("Transactions".to_owned(), transactions), ("TakeOvers".to_owned(), take_overs)];
        let struck: BTreeMap<String, u32> = struck.chain(counted).collect();
        println!("{STRUCK}{}", serde_json::to_string(&struck).unwrap());
        Ok(())
    }

    /// The config that is loaded in the middle, with other rules or for another number of partitions. None if neither differs.
    async fn other_config(&self, test: &TestDb, histories: &mut [History], daemons: &[Instance]) -> Option<String> {
        if self.reloads {
            histories.iter_mut().for_each(History::reload);
        } else if daemons.iter().all(|daemon| daemon.partitions == self.partitions[1]) {
            return None;
        }
        let text = self.config(test, histories);
        Daemon::prepare(&load(&text)).await;
        Some(text)
    }

    /// Loads another config. Running daemons read its rules, and start again for another number of partitions.
    async fn configure(&self, text: &str, daemons: &mut [Instance]) -> Result<(), String> {
        let after = self.partitions[1];
        for daemon in daemons.iter_mut() {
            if daemon.partitions != after {
                daemon.configure(text);
                daemon.repartition(after).await?;
                continue;
            }
            let reloads = until("metrics", async || daemon.reloads().await).await;
            daemon.configure(text);
            until("another config", async || daemon.reloads().await.filter(|now| *now > reloads)).await;
        }
        Ok(())
    }

    /// A config without `lease`, which each instance adds.
    fn config(&self, test: &TestDb, histories: &[History]) -> String {
        let rules = histories.iter().flat_map(|history| {
            let more = match history.seed {
                seed if is_overwritten(seed) => doc! {"adopt": true},
                seed if is_guarded(seed) => doc! {"adopt": true, "guard": "watch"},
                // An audit would repair what went wrong.
                _ => doc! {"adopt": true, "guard": "off"},
            };
            configured_rules(history).into_iter().map(move |rule| rule.into_iter().chain(more.clone()).collect())
        });
        let rules: Vec<Document> = rules.collect();
        let more = if rules.is_empty() { "" } else { "," };
        let rules = rules_as_json(&rules).replacen('[', &format!("[{MARKER},{MIRROR}{more}"), 1);
        // A backfill of a large collection begins with pages that exceed an eighth of this time.
        let reads = if self.large_collections { "read_timeout_seconds: 1, " } else { "" };
        let limits = low_limits(&mut StdRng::seed_from_u64(self.seed));
        let limits = format!("limits: {{ write_timeout_seconds: 1, {reads}{limits}");
        config(test, &rules).replace("limits: { ", &limits)
    }

    async fn start(&self, server: &Server, test: &TestDb, histories: &[History]) -> Vec<Instance> {
        let text = self.config(test, histories);
        Daemon::prepare(&load(&text)).await;
        let naming = self.naming();
        let instance = |nth| Instance::new(&text, nth, self.partitions[0], naming, server.model.clone());
        let mut daemons: Vec<Instance> = (0..self.daemons).map(instance).collect();
        daemons.iter_mut().for_each(Instance::start);
        daemons
    }
}

async fn prepare(db: &Database, histories: &mut [History]) {
    for history in histories {
        history.create(db).await;
        if history.seed % 2 == 0 {
            for op in history.generator.initial() {
                perform::perform(db, op, |name| history.form(name)).await;
            }
        }
    }
    let markers = (0..MARKERS).map(|id| doc! {"_id": id, "n": 0});
    db.collection("markers").insert_many(markers).await.unwrap();
    let marked = (0..MARKERS).map(|id| doc! {"_id": id, "marker": id, "own": 0});
    db.collection("marked").insert_many(marked).await.unwrap();
    db.run_command(doc! {"createIndexes": "marked", "indexes": [{"key": {"marker": 1}, "name": "marker"}]})
        .await
        .unwrap();
}

/// Performs the steps of a history. Where all earlier ones are waited for, and an instance says that they are applied,
/// the result must be right by the rules of the history, once all instances are `configured` with them.
async fn play(
    history: &History,
    db: &Database,
    instances: &[SocketAddr],
    steps: Vec<Step>,
    configured: &AtomicBool,
    trace: &Trace,
) -> Result<()> {
    let mut random = StdRng::seed_from_u64(history.seed ^ 0x746f_6765);
    let mut pauses = StdRng::seed_from_u64(history.seed ^ 0x7061_6365);
    let mut together: Vec<Op> = Vec::new();
    for (nth, step) in steps.into_iter().enumerate() {
        let is_performed = matches!(step, Step::Ops(_));
        let time = match step {
            Step::Ops(ops) => {
                for op in &ops {
                    trace.add(format_args!("world {}: {op:?}", history.seed));
                }
                let is_transaction = !together.is_empty();
                together.extend(ops);
                // Some steps are one transaction with the next one.
                if random.random_bool(0.25) {
                    continue;
                }
                let ops = std::mem::take(&mut together);
                if is_transaction {
                    let (time, count) = (perform::together(db, &ops).await, ops.len());
                    trace.add(format_args!("world {}: the last {count} in one transaction: {time:?}", history.seed));
                    time.ok().flatten()
                } else {
                    let all = ops.into_iter().map(|op| perform::perform(db, op, |name| history.form(name)));
                    futures_util::future::join_all(all).await;
                    None
                }
            }
            Step::Wait => {
                let reply = db.run_command(doc! {"ping": 1}).await;
                reply.ok().map(|reply| reply.get_timestamp("operationTime").unwrap())
            }
            Step::Lose(_) => None,
        };
        let instance = instances[(usize::try_from(history.seed).unwrap() + nth) % instances.len()];
        if let Some(time) = time.filter(|_| configured.load(Ordering::Relaxed))
            && let Some(except) = applied(instance, time, if is_performed { 1 } else { 3 }).await
        {
            trace.add(format_args!("world {}: `wait` for {time} was acknowledged", history.seed));
            let mine = format!("w{}-", history.seed);
            if !except.iter().any(|rule| rule.starts_with(&mine)) {
                check(history, db).await?;
            }
        }
        if is_performed {
            // Some steps follow at once: the step before is still being applied.
            let pause = if pauses.random_bool(0.4) { 1 } else { 40 + history.seed * 37 % 200 };
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }
    for op in together {
        perform::perform(db, op, |name| history.form(name)).await;
    }
    Ok(())
}

/// The rules that are excepted, if an instance says within so many seconds that everything up to this time is applied.
async fn applied(instance: SocketAddr, Timestamp { time, increment }: Timestamp, seconds: u32) -> Option<Vec<String>> {
    acknowledged(instance, &format!("/v1/wait?operationTime={time}.{increment}&timeout={seconds}")).await
}

/// The rules that are excepted, if an instance says that everything is applied.
async fn acknowledged(instance: SocketAddr, path: &str) -> Option<Vec<String>> {
    let answer = client::get(instance, path, Duration::from_secs(10)).await.ok().filter(|answer| answer.code == 200)?;
    serde_json::from_value(answer.json::<Value>().ok()?["except"].clone()).ok()
}

/// Fails if a copy of this world is wrong although no dead letter explains it.
async fn check(history: &History, db: &Database) -> Result<()> {
    let found = if is_overwritten(history.seed) { Vec::new() } else { history.check(db).await };
    if found.is_empty() || !dead_letters(db, history.seed).await.is_empty() {
        return Ok(());
    }
    Err(Failed { seed: Some(history.seed), text: found.join("\n") })
}

/// Fails if a copy of this world stays wrong. A key with a dead letter is up to date only after a retry, and a copy that the
/// application has overwritten after a repair.
async fn check_after_retries(history: &History, db: &Database, instances: &[SocketAddr]) -> Result<()> {
    let begun = Instant::now();
    loop {
        let found = history.check(db).await;
        let letters = dead_letters(db, history.seed).await;
        if found.is_empty() {
            return Ok(());
        }
        if (letters.is_empty() && !is_overwritten(history.seed)) || begun.elapsed() > PATIENCE {
            return Err(Failed { seed: Some(history.seed), text: [found, letters].concat().join("\n") });
        }
        let ask = doc! {"q": {}, "u": {"$set": {"asked": clock::now()}}, "multi": true};
        state_of(db).run_command(doc! {"update": "dead_letters", "updates": [ask]}).await.ok();
        tokio::time::sleep(Duration::from_millis(500)).await;
        acknowledged(instances[0], "/v1/wait?timeout=5").await;
    }
}

fn state_of(db: &Database) -> Database {
    db.client().database(&format!("{}_state", db.name()))
}

/// The dead letters of a world's rules.
async fn dead_letters(db: &Database, seed: u64) -> Vec<String> {
    let find = doc! {"find": "dead_letters", "batchSize": 10_000};
    let reply = until("the dead letters can be read", async || state_of(db).run_command(find.clone()).await.ok()).await;
    let found = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
    let of_world = |letter: &&Document| letter.get_str("rule").unwrap().starts_with(&format!("w{seed}-"));
    found.iter().filter_map(Bson::as_document).filter(of_world).map(Document::to_string).collect()
}

/// True if an instance says that everything is applied.
async fn has_applied_all(instance: SocketAddr, db: &Database) -> bool {
    match acknowledged(instance, "/v1/wait?timeout=5").await {
        Some(except) => only_with_dead_letters(db, &except).await,
        None => false,
    }
}

/// Requests a retry of the dead letters, as `denormd dead-letters retry` does. Fails if the wait for it ends before each of them was tried.
async fn dead_letters_are_tried(db: &Database, histories: &[History]) -> Result<()> {
    let server = denormd_mongo::Server::new(db.client().clone());
    let (database, deployment) = (state_of(db).name().to_owned(), "default".to_owned());
    let dead_letters = DeadLetters { database, deployment, partition: Partition::WHOLE };
    let found = async |chosen: &Chosen| -> Vec<DeadLetter> {
        let found = async || dead_letters.find(&server, chosen, 0).await.ok();
        until("the dead letters can be read", found).await.into_iter().filter_map(Entry::ok).collect()
    };
    let known = found(&Chosen::default()).await;
    let mut requests: Vec<(Chosen, Vec<DeadLetter>, Retry)> = Vec::new();
    // Those of a rule that has left the config are not retried.
    for rule in histories.iter().flat_map(|history| &history.rules) {
        let name = rule.get_str("name").unwrap();
        let before: Vec<DeadLetter> = known.iter().filter(|one| one.rule == name).cloned().collect();
        if !before.is_empty() {
            let chosen = Chosen { rule: Some(name.to_owned()), key: None };
            let asked = until("a retry", async || dead_letters.ask(&server, &chosen).await.ok()).await;
            requests.push((chosen, before, asked));
        }
    }
    let (server, dead_letters, found) = (&server, &dead_letters, &found);
    // Each by itself: in the end all of them were tried.
    let waits = requests.iter().map(|(chosen, before, asked)| async move {
        let are_tried = async || (dead_letters.untried(server, chosen, *asked).await.ok()? == 0).then_some(());
        until("the dead letters have been tried", are_tried).await;
        // An attempt is counted, or has resolved it.
        let is_same = |one: &DeadLetter, other: &DeadLetter| {
            one.is_same(other) && (one.attempts, one.last) == (other.attempts, other.last)
        };
        let after = found(chosen).await;
        let left = after.iter().find(|one| before.iter().any(|other| is_same(one, other)));
        let failed =
            |left: &DeadLetter| Failed::new(format!("a dead letter counts as tried, and is as before: {left:?}"));
        left.map_or(Ok(()), |left| Err(failed(left)))
    });
    futures_util::future::try_join_all(waits).await?;
    Ok(())
}

/// Waits until all instances say that everything is applied, and compares all worlds. A leader that cannot save its checkpoint
/// still knows its own progress, and the others do not. If `retries`, the dead letters are retried before.
async fn settle(
    server: &Server,
    db: &Database,
    instances: &[SocketAddr],
    histories: &[History],
    retries: bool,
) -> Result<()> {
    let begun = Instant::now();
    loop {
        let asked = instances.iter().map(|instance| has_applied_all(*instance, db));
        if !futures_util::future::join_all(asked).await.contains(&false) {
            break;
        }
        is_known(&server.model)?;
        if begun.elapsed() > PATIENCE {
            let status = client::get(instances[0], "/v1/status", Duration::from_secs(5)).await;
            let status = status.map(|answer| String::from_utf8_lossy(&answer.body).into_owned());
            let leadership = leadership(db).await;
            return Err(Failed::new(format!("it does not settle: {status:?}\n{leadership}")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    if retries {
        dead_letters_are_tried(db, histories).await?;
    }
    for history in histories {
        check_after_retries(history, db, instances).await?;
    }
    let values = async |collection: &str, field: &str| -> Vec<Option<Bson>> {
        let sort = all(db, collection).await.into_iter().map(|document| (document.get_i32("_id").unwrap(), document));
        sort.collect::<BTreeMap<_, _>>().into_values().map(|document| document.get(field).cloned()).collect()
    };
    for (collection, field, copy) in [("markers", "n", "n"), ("marked", "own", "seen")] {
        let (written, copies) = (values(collection, field).await, values("marked", copy).await);
        if written != copies {
            return Err(Failed::new(format!("the copies of `{field}` in `{collection}`, {written:?}, are {copies:?}")));
        }
    }
    Ok(())
}

/// The leases, the terms and the records of the rules without their definitions.
async fn leadership(db: &Database) -> String {
    let mut text = String::new();
    for name in ["leases", "terms", "rules"] {
        let find = doc! {"find": name, "projection": {"definition": 0}, "batchSize": 10_000};
        let Ok(reply) = state_of(db).run_command(find).await else { continue };
        let found = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        for document in found.into_iter().flatten() {
            writeln!(text, "{name}: {document}").ok();
        }
    }
    text
}

/// True if the world of each of these rules has dead letters: a rule without any may read the copies of one that has.
async fn only_with_dead_letters(db: &Database, rules: &[String]) -> bool {
    let find = doc! {"distinct": "dead_letters", "key": "rule"};
    let Ok(reply) = state_of(db).run_command(find).await else { return false };
    let with = reply.get_array("values").unwrap();
    let world = |rule: &str| rule.split('-').next().map(ToOwned::to_owned);
    rules.iter().all(|rule| with.iter().filter_map(Bson::as_str).any(|other| world(other) == world(rule)))
}

/// Fails if a guard has found drift where only denormd writes the copies, according to this status.
fn has_no_drift(status: &Value) -> Result<()> {
    let rules = status["rules"].as_array().into_iter().flatten();
    let found = rules.filter(|rule| rule["drift_found"].as_u64().is_some_and(|found| found > 0));
    let mut seeds =
        found.filter_map(|rule| rule["name"].as_str()?.strip_prefix('w')?.split_once('-')?.0.parse::<u64>().ok());
    let seed = seeds.find(|seed| is_guarded(*seed));
    let text = || format!("a guard has found drift that nobody made: {status:#}");
    seed.map_or(Ok(()), |seed| Err(Failed { seed: Some(seed), text: text() }))
}

/// Fails if a copy of what its target held was written after that had changed.
fn mirrors_match(model: &Model, database: &str) -> Result<()> {
    let mut seen = model.values(database, "marked", "seen");
    for (id, own) in model.values(database, "marked", "own") {
        let seen = seen.remove(&id).unwrap_or_default();
        let is_late = |nth: &usize| seen[*nth] != seen[*nth - 1] && seen[*nth].is_some() && seen[*nth] != own[*nth];
        if let Some(nth) = (1..seen.len()).find(is_late) {
            let text = format!("marker {id} gets the copy {:?} while it holds {:?}", seen[nth], own[nth]);
            return Err(Failed::new(text));
        }
    }
    Ok(())
}

/// Fails if the term of a document of the state has gone back, or if a term was claimed twice: a former leader has written.
/// Fails as well if the record of a rule was deleted otherwise than with its partition.
fn terms_rise(model: &Model, state: &str) -> Result<()> {
    let numbers = model.values(state, format::COLLECTION, "partitions").into_values().flatten();
    let numbers: Vec<i32> = numbers.map(|number| number.and_then(|number| number.as_i32()).unwrap_or(1)).collect();
    for collection in ["terms", POSITIONS, RULES, fan_out::COLLECTION] {
        // A partition that is back begins with the term of its lease, which somebody may have deleted.
        let is_deletion = |term: &Option<Bson>| term.is_none() && [POSITIONS, RULES].contains(&collection);
        for (id, terms) in model.values(state, collection, "term") {
            let rises = |pair: &[i64]| pair[0] < pair[1] || (pair[0] == pair[1] && collection != "terms");
            for terms in terms.split(is_deletion) {
                let terms: Vec<i64> = terms.iter().flatten().filter_map(Bson::as_i64).collect();
                if !terms.windows(2).all(rises) {
                    return Err(Failed::new(format!("the terms of {id} in `{collection}` do not rise: {terms:?}")));
                }
            }
            // `default#0/2` is the first one of two.
            let of: i32 = id.split_once('/').and_then(|(_, of)| of.get(..1)?.parse().ok()).unwrap_or(1);
            let changes = numbers.windows(2).filter(|pair| pair[0] == of && pair[1] != of).count();
            let deletions = terms.iter().filter(|term| term.is_none()).count();
            if collection == RULES && deletions > changes {
                return Err(Failed::new(format!("{id} was deleted {deletions} times; partitions: {numbers:?}")));
            }
        }
    }
    Ok(())
}

/// The number of times that one instance followed another as the leader of a partition.
fn take_overs(model: &Model, state: &str) -> u32 {
    let take_overs = model.values(state, lease::COLLECTION, "host").into_values().map(|hosts| {
        let mut hosts: Vec<Bson> = hosts.into_iter().flatten().collect();
        hosts.dedup();
        hosts.len().saturating_sub(1)
    });
    u32::try_from(take_overs.sum::<usize>()).unwrap()
}

/// Fails if a time of `touch` was replaced by an earlier one: the clock of a new primary may be behind.
fn times_rise(model: &Model, database: &str, histories: &[History]) -> Result<()> {
    let falls = |pair: &[Option<Bson>]| match pair {
        [Some(Bson::DateTime(before)), Some(Bson::DateTime(after))] => after < before,
        _ => false,
    };
    for history in histories {
        for collection in history.generator.collections() {
            for (id, times) in model.values(database, &collection, TOUCHED[0]) {
                if times.windows(2).any(falls) {
                    let text = format!("a time of {id} in `{collection}` goes back: {times:?}");
                    return Err(Failed { seed: Some(history.seed), text });
                }
            }
        }
    }
    Ok(())
}

/// Fails if an instance has written what no rule may write.
fn only_own_writes(model: &Model, database: &str, histories: &[History]) -> Result<()> {
    let markers: [Document; 2] = [MARKER, MIRROR].map(|rule| serde_json::from_str(rule).unwrap());
    let writes = model.take_writes();
    // The copies of the markers, at least.
    if writes.is_empty() {
        return Err(Failed::new("no write of the daemons is recorded"));
    }
    let found = writes::foreign(&writes, histories, &markers, database);
    found.map_or(Ok(()), |(seed, text)| Err(Failed { seed, text }))
}

/// Fails if anything is written to the application's database while nothing changes.
async fn at_rest(server: &Server, test: &TestDb) -> Result<()> {
    let mut since = server.model.changes(&test.name).len();
    let begun = Instant::now();
    loop {
        tokio::time::sleep(QUIET).await;
        let changes = server.model.changes(&test.name);
        let Some(last) = changes[since..].last() else { return Ok(()) };
        // The last writes may be seen before they are acknowledged, and dead letters are retried.
        if begun.elapsed() > PATIENCE / 6 {
            return Err(Failed::new(format!("written at rest: {last}")));
        }
        since = changes.len();
    }
}

/// Writes markers, and compares what the instances say with the copies, until `stop`. Returns the number of committed transactions.
async fn watch(test: &TestDb, model: &Model, instances: &[SocketAddr], stop: &AtomicBool) -> Result<u32> {
    let db = test.database();
    let mut written: Vec<Written> = Vec::new();
    let mut lost: BTreeMap<String, (i64, Instant)> = BTreeMap::new();
    let (mut turn, mut transactions) = (0_usize, 0);
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        turn += 1;
        if turn.is_multiple_of(4) {
            // In a row, so that one of them comes between the read and the write of the copies.
            for _ in 0..3 {
                let update = doc! {"q": {"_id": {"$lt": CHANGED}}, "u": {"$inc": {"own": 1}}, "multi": true};
                let command = doc! {"update": "marked", "updates": [update], "writeConcern": {"w": 1}};
                tokio::time::timeout(Duration::from_secs(5), db.run_command(command)).await.ok();
            }
        }
        let (n, is_transaction) = (i32::try_from(turn).unwrap(), turn.is_multiple_of(TOGETHER));
        let ids: Vec<i32> = if is_transaction { (0..MARKERS).collect() } else { vec![n % MARKERS] };
        let write = write_markers(&db, &ids, n, is_transaction);
        let time = tokio::time::timeout(Duration::from_secs(5), write).await.ok().flatten();
        transactions += u32::from(is_transaction && time.is_some());
        if let Some(time) = time {
            written.extend(ids.iter().map(|id| (*id, n, time)));
        }
        let instance = instances[turn % instances.len()];
        // At once, because only a part of the transaction may have been read.
        if let Some(time) = time.filter(|_| is_transaction)
            && let Some(except) = applied(instance, time, 1).await
            && !except.iter().any(|rule| rule == "marker")
        {
            are_current(model, &test.name, &written, time, "`wait` for it was acknowledged").await?;
        }
        let Ok(answer) = client::get(instance, "/v1/status", Duration::from_millis(500)).await else { continue };
        let Ok(status) = answer.json::<Value>() else { continue };
        // At once: a guard's count of drift is lost with a restart.
        has_no_drift(&status)?;
        let recorded = losses(model, state_of(&db).name()).await;
        lost.retain(|rule, (before, _)| recorded.get(rule).is_some_and(|(generation, _)| *generation == *before));
        for (rule, (generation, term)) in recorded {
            let (_, since) = lost.entry(rule.clone()).or_insert((generation, Instant::now()));
            // The figures of a status are up to a second old.
            if since.elapsed() > Duration::from_secs(2) && hides_loss(&status, &rule, term) {
                return Err(Failed::new(format!("the status hides that changes of {rule} were lost: {status:#}")));
            }
        }
        let current = &status["current"];
        let is_excepted = current["except"].as_array().is_some_and(|except| except.iter().any(|rule| rule == "marker"));
        if let Some(as_of) = current["as_of"].as_str().and_then(cluster_time).filter(|_| !is_excepted) {
            are_current(model, &test.name, &written, as_of, format_args!("the status is {status:#}")).await?;
        }
    }
    Ok(transactions)
}

/// The rules that are backfilled because changes were lost, by the records of a deployment with one partition, each with its
/// generation and its term.
async fn losses(model: &Model, state: &str) -> BTreeMap<String, (i64, i64)> {
    let filter = doc! {"_id.deployment": "default", "backfill": "pending", "degraded": true};
    let reply = model.run(doc! {"find": RULES, "filter": filter, "$db": state}).await;
    let records = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
    let loss = |record: &Document| {
        let rule = record.get_document("_id").ok()?.get_str("rule").ok()?;
        Some((rule.to_owned(), (record.get_i64("generation").ok()?, record.get_i64("term").ok()?)))
    };
    records.into_iter().flatten().filter_map(Bson::as_document).filter_map(loss).collect()
}

/// True if the leader of this term follows changes, and calls this rule backfilled and not degraded.
fn hides_loss(status: &Value, rule: &str, term: i64) -> bool {
    let is_fresh = |stream: &Value| stream["age_seconds"].as_f64().is_some_and(|age| age < 1.0);
    let follows = status["streams"].as_array().is_some_and(|all| !all.is_empty() && all.iter().all(is_fresh));
    let leads = status["role"] == "leader" && status["term"] == term && status["partitions"].is_null();
    let is_hidden = |one: &Value| one["name"] == rule && one["state"] == "backfilling";
    leads && follows && status["rules"].as_array().is_some_and(|rules| rules.iter().any(is_hidden))
}

/// Writes `n` into these markers. Returns the time of the write once a majority has it.
async fn write_markers(db: &Database, ids: &[i32], n: i32, is_transaction: bool) -> Option<Timestamp> {
    let update = doc! {"q": {"_id": {"$in": ids.to_vec()}}, "u": {"$max": {"n": n}}, "multi": true};
    let mut command = doc! {"update": "markers", "updates": [update]};
    if is_transaction {
        return perform::in_transaction(db, vec![command]).await.ok().flatten();
    }
    command.insert("writeConcern", doc! {"w": "majority"});
    let reply = db.run_command(command).await.ok()?;
    reply.get_timestamp("operationTime").ok().filter(|_| !reply.contains_key("writeConcernError"))
}

/// Fails if a copy of a marker lacks what was written by this time, although it was `said` to be applied.
async fn are_current(
    model: &Model,
    database: &str,
    written: &[Written],
    by: Timestamp,
    said: impl std::fmt::Display,
) -> Result<()> {
    // An older snapshot may lack a write that was majority-committed, and will not be rolled back.
    let level = if model.is_behind() { "local" } else { "majority" };
    let find = doc! {"find": "marked", "filter": {}, "readConcern": {"level": level}, "$db": database};
    let reply = model.run(find).await;
    let rows = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
    for row in rows.into_iter().flatten().filter_map(Bson::as_document) {
        let (id, n) = (row.get_i32("_id").unwrap(), row.get_i32("n").unwrap_or_default());
        let due = written.iter().filter(|(of, _, time)| *of == id && *time <= by).map(|(_, n, _)| *n).max();
        if due.is_some_and(|due| due > n) {
            let text = format!("the copy of marker {id} has {n} instead of {due:?} of {by}, and {said}");
            return Err(Failed::new(text));
        }
    }
    Ok(())
}

fn cluster_time(text: &str) -> Option<Timestamp> {
    let (time, increment) = text.split_once('.')?;
    Some(Timestamp { time: time.parse().ok()?, increment: increment.parse().ok()? })
}

/// Fails if a command asked for something that the model does not know.
fn is_known(model: &Model) -> Result<()> {
    let unknown = model.unknown();
    if unknown.is_empty() { Ok(()) } else { Err(Failed::new(format!("{UNKNOWN} {unknown:#?}"))) }
}

/// Runs these dimensions. A failure is run again with less, within `limit`, and the smallest one ends the test. Returns the
/// number of times that each fault struck.
pub async fn simulate_and_shrink(scale: Scale, limit: Duration) -> BTreeMap<String, u32> {
    let mut failed = match scale.simulate().await {
        Ok(output) => return serde_json::from_str(printed(&output, STRUCK).expect("the faults")).unwrap(),
        Err(failed) => failed,
    };
    let (mut smallest, begun) = (scale, Instant::now());
    let limit = if failed.text.contains(UNKNOWN) { Duration::ZERO } else { limit };
    println!("{}; running it with less for {limit:?}", replay(&smallest));
    'smaller: loop {
        for candidate in smallest.smaller(&failed) {
            if begun.elapsed() > limit {
                break 'smaller;
            }
            if let Err(again) = candidate.simulate().await {
                (smallest, failed) = (candidate, again);
                continue 'smaller;
            }
        }
        break;
    }
    panic!("{}:\n{}", replay(&smallest), failed.text);
}

/// With a chain, `wait` waits for later changes as well. A copy of created documents once made one in nearly all of these runs.
#[test]
fn a_run_without_chains_has_none() {
    let scales: Vec<Scale> = (1..200).step_by(10).map(|first| Scale::draw(first, 10)).collect();
    for scale in scales.iter().filter(|scale| scale.is_without_chains()) {
        let histories = scale.worlds.iter().map(|seed| scale.world(*seed, "app"));
        let rules: Vec<Document> = histories.flat_map(|history| configured_rules(&history)).collect();
        let rules = rules_as_json(&rules).replacen('[', &format!("[{MARKER},{MIRROR},"), 1);
        let text = format!("mongodb: {{ uri: mongodb://localhost, database: app }}\nrules:\n  {rules}\n");
        let plan = compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
        assert_eq!(plan.longest_chain(), 1, "{scale:?}");
    }
}
