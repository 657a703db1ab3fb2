//! Histories on a MongoDB in memory, each cluster in a process of its own. `DENORMD_CLUSTER` replays a cluster,
//! `DENORMD_SIMULATIONS` sets the number of seeds and `DENORMD_FIRST` the first one.

use std::{
    collections::BTreeMap,
    fmt::Write,
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZero,
    sync::Arc,
    thread::available_parallelism,
    time::{Duration, Instant},
};

use bson::{Bson, Document};
use denormd_engine::{
    checkpoint::{requests::RequestedWork, rule_record::Retired},
    jobs::{
        check::{Check, Scope},
        prune::retired,
    },
    reconcile::Context,
};
use denormd_fixture::TestDb;
use denormd_model::{
    clock,
    field_path::{FieldPath, value_at},
};
use denormd_oracle::{Odd, Options, Rule, TOUCHED, World, differences, equal, matches};
use denormd_simulated::{Model, Server};
use futures_util::{StreamExt, future::ready, stream};
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{process::Command, time::timeout};

use super::{
    History, Run, Start, Step,
    faulty::{Scale, simulate_and_shrink},
    perform::world,
    reload, seeds, writes,
};
use crate::support::{daemon::Daemon, seeds::from_environment};

/// The odd kinds of worlds that the model knows.
const KNOWN: &[Odd] = &[Odd::Empty, Odd::Collections, Odd::PreImages, Odd::Failing, Odd::Echo, Odd::EdgeIds];

/// The prefixes of lines that a process prints for its parent.
const UNKNOWN: &str = "unknown to the model: ";
const DIGEST: &str = "digest: ";
/// The time limit of a process. One that takes longer repeats something while no time passes.
const ENDLESS: Duration = Duration::from_secs(400);
/// Number of worlds in a cluster without faults. The CPU for 40 seeds was 15 s with five, 18 s with ten, 27 s with twenty and 76 s
/// with forty, because the rules of a finished world are polled until the slowest world is done.
const WORLDS: u64 = 5;
/// The longest delay of a command or of its answer, in clusters with latency.
const LATENCY: Duration = Duration::from_millis(16);
/// In these clusters, the crash comes at most this many milliseconds after the start of a round.
const CRASH_AFTER: u64 = 300;
/// The number of seeds from which every fault strikes.
const ENOUGH: u64 = 500;
/// The time limits of commands where collections may be large.
const SHORT: &str = "read_timeout_seconds: 1, write_timeout_seconds: 1, ";
/// The number of clusters that fail before a run of many ends.
const MOST_FAILED: usize = 10;
/// The time by which the clock of a daemon is ahead of the server's in the end, in milliseconds: more than values are kept.
const AHEAD: i64 = 8 * 86_400_000;
/// The time after the start of a daemon in which it deletes the kept values that have expired.
const EXPIRED: Duration = Duration::from_secs(11);

fn everything(prefix: String) -> Options {
    Options { mixed_composite: true, id_parts: true, shared: true, odd: KNOWN.to_vec(), ..Options::everything(prefix) }
}

fn destroying(prefix: String) -> Options {
    Options { destroy: true, ..everything(prefix) }
}

/// Limits so low that a backfill has several pages, and that a few values are too large for a batch; in a part of the clusters.
pub fn low_limits(rng: &mut StdRng) -> String {
    let mut limits = String::new();
    if rng.random_bool(0.2) {
        write!(limits, "backfill_per_second: {}, ", rng.random_range(4..=8)).unwrap();
    }
    if rng.random_bool(0.3) {
        write!(limits, "batch_bytes: {}, ", rng.random_range(200..5000)).unwrap();
    }
    limits
}

/// Runs the ignored test `name` of this file with the description of a cluster, in a process of its own, so that it can be
/// replayed exactly. Returns its output, as an error unless it has passed.
pub async fn output_of(name: &str, cluster: &impl Serialize) -> Result<String, String> {
    let name = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", &name, "--nocapture"]).kill_on_drop(true);
    // A reload reads settings from the environment.
    std::env::vars().filter(|(name, _)| name.starts_with("DENORMD__")).for_each(|(name, _)| {
        command.env_remove(name);
    });
    let cluster = serde_json::to_string(cluster).unwrap();
    let Ok(output) = timeout(ENDLESS, command.env("DENORMD_CLUSTER", &cluster).output()).await else {
        return Err(format!("it did not end within {ENDLESS:?}"));
    };
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
    // A name that no test has would pass, and so would a daemon one of whose tasks panics.
    let has_passed = output.status.success() && text.contains(DIGEST) && !text.contains("panicked at");
    if has_passed { Ok(text) } else { Err(text) }
}

/// What a process printed after this prefix, up to the end of the line.
pub fn printed<'a>(output: &'a str, prefix: &str) -> Option<&'a str> {
    output.split_once(prefix)?.1.lines().next()
}

/// The cluster that this process simulates.
fn cluster<T: DeserializeOwned>() -> T {
    serde_json::from_str(&std::env::var("DENORMD_CLUSTER").expect("the description of a cluster")).unwrap()
}

/// How to replay a cluster.
pub fn replay(cluster: &impl Serialize) -> String {
    format!("DENORMD_CLUSTER='{}' replays it, as CONTRIBUTING.md says", serde_json::to_string(cluster).unwrap())
}

/// Prints the digest of all changes of the application's database.
pub fn print_digest(server: &Server, test: &TestDb) {
    let mut hasher = DefaultHasher::new();
    server.model.changes(&test.name).hash(&mut hasher);
    println!("{DIGEST}{:x}", hasher.finish());
}

/// The digest that a process printed.
fn digest(output: &str) -> String {
    printed(output, DIGEST).expect("a digest").to_owned()
}

/// How the simulation of a cluster ended.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Outcome {
    Passed,
    Failed,
    /// The model does not know a command that it needs.
    Undecided,
}

/// The seeds of one cluster, and the numbers of partitions before and after the crash.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Cluster {
    first: u64,
    count: u64,
    partitions: [u32; 2],
    reloads: bool,
}

impl Cluster {
    /// Runs it in a process of its own. Returns the output, as an error unless it has passed.
    async fn simulate(self) -> Result<String, String> {
        output_of("without_faults", &self).await
    }

    /// Runs it in a process of its own, and prints why it has not passed or is not decided.
    async fn outcome(self) -> Outcome {
        let output = match self.simulate().await {
            Ok(output) => output,
            Err(output) => {
                println!("{}:\n{output}", replay(&self));
                return Outcome::Failed;
            }
        };
        let Some(unknown) = printed(&output, UNKNOWN) else { return Outcome::Passed };
        println!("{self:?} is not decided: the model does not know {unknown}");
        Outcome::Undecided
    }

    async fn run(self) {
        let Self { first, count, partitions, reloads } = self;
        let server = Server::start_set(Model::new(first), 1).await.unwrap();
        let test = TestDb::named(server.uri(), "app").await;
        server.model.record_writes("denormd", &test.name);
        // The limits are drawn from the same seed.
        let mut random = StdRng::seed_from_u64(first ^ 0x6c61_7267);
        let [destroys, large_collections, large_events, waits, crashes, few_removals] =
            [0.25, 0.25, 0.25, 0.5, 0.5, 0.15].map(|share| random.random_bool(share));
        let [has_latency, in_turn] = [0.3, 0.2].map(|share| random.random_bool(share));
        // A first backfill that the removal limit blocks does not end. With latency, it may write a value twice.
        let start = match (waits && !few_removals && !has_latency, crashes) {
            (false, _) => Start::AtOnce,
            (true, false) => Start::AfterBackfill,
            (true, true) => Start::AfterCrash,
        };
        println!(
            "{self:?}, destroys: {destroys}, few removals: {few_removals}, start: {start:?}, \
             large collections: {large_collections}, large events: {large_events}, latency: {has_latency}, in turn: {in_turn}"
        );
        let options = if destroys { destroying } else { everything };
        // The values of a first backfill seldom stay for long, and `undo` puts back only what has stayed.
        let is_short = start != Start::AtOnce && random.random_bool(0.3);
        let reloads = reloads && !is_short;
        let partitions = if is_short { [partitions[0]; 2] } else { partitions };
        let mut run = Run { partitions, start, reloads, in_turn, limits: low_limits, ..Run::new(options) };
        if is_short {
            run.rounds = 0;
        }
        if start == Start::AfterCrash {
            // Enough that a slow backfill has passed some of them when it is interrupted.
            run.documents = 8;
        }
        if has_latency {
            // Other changes happen between a read and the write that follows it.
            server.model.set_latency(LATENCY);
            run.crash_after = CRASH_AFTER;
        }
        if large_collections {
            server.model.set_large_collections(&test.name);
            run.limits = |rng| format!("{SHORT}{}", low_limits(rng));
        } else if few_removals {
            run.limits =
                |rng: &mut StdRng| format!("destroy_per_hour: {}, {}", rng.random_range(1..=3), low_limits(rng));
        }
        if large_events {
            // The connections of the daemon are the test's own: none is closed.
            server.model.set_large_events(&test.name, false);
        }
        let (daemon, mut histories) = run.histories_on(&test, first, count).await;
        server.model.set_latency(Duration::ZERO);
        if reloads && server.model.unknown().is_empty() {
            prune_takes_what_the_rules_wrote(&test.database(), daemon.context(), &histories).await;
        }
        let context = Arc::new(daemon.context().whole());
        daemon.stop().await;
        // With several partitions, small pages or commands that fail, a document may be written before one that it reads.
        let has_small_pages = (run.limits)(&mut StdRng::seed_from_u64(first)).contains("backfill_per_second");
        if start == Start::AfterBackfill
            && partitions[0] == 1
            && !(has_small_pages || large_collections || large_events)
        {
            trees_are_written_once(&server.model, &test.name, &histories);
        }
        // A command that the model does not know would make `check` fail.
        if server.model.unknown().is_empty() {
            // The first time inside a field creates the field.
            let alone = server.model.alone(&test.name, &[TOUCHED[0], TOUCHED[1], "seen"]);
            assert!(alone.is_empty(), "updates of nothing but the time: {alone:?}");
            for history in &mut histories {
                check_finds_the_same(&test.database(), &context, history).await;
            }
            if start != Start::AtOnce {
                undo_puts_back_what_was_there(&run, &server, &test, &histories).await;
            }
        }
        let writes = server.model.take_writes();
        assert!(!writes.is_empty() || count < WORLDS || is_short, "no write of the daemon is recorded");
        if let Some((_, text)) = writes::foreign(&writes, &histories, &[], &test.name) {
            panic!("{text}");
        }
        let unknown = server.model.unknown();
        if !unknown.is_empty() {
            println!("{UNKNOWN}{unknown:?}");
        }
        print_digest(&server, &test);
    }
}

/// Prunes the values of the rules that are gone, as `denormd prune` does.
///
/// # Panics
///
/// Panics if a document that the rule's `where` leaves out has lost its value, or another one has not.
async fn prune_takes_what_the_rules_wrote(db: &Database, context: &Context, histories: &[History]) {
    let (server, store) = (&context.server, context.state_of_deployment().await.unwrap());
    let collections: Vec<String> = histories.iter().flat_map(|history| history.generator.collections()).collect();
    let known = store.rules(server).await.unwrap();
    for (name, _) in &known {
        let retired = retired(&context.plan, &known, name);
        if retired.is_empty() {
            continue;
        }
        let before = world(db, &collections).await;
        let asked = store.request(server, name, &RequestedWork::Prune(retired.clone())).await.unwrap();
        store.until_done(server, asked).await.unwrap();
        let after = world(db, &collections).await;
        for Retired { collection, path, filter } in retired.iter().filter(|retired| !retired.path.has_each()) {
            let (_, collection) = collection.split_once('.').unwrap();
            for document in before.get(collection).into_iter().flatten() {
                let value = |of: &Document| value_at(of, path.segments()).map(|value| format!("{value:?}"));
                let stays = filter.as_ref().is_some_and(|filter| !matches(document, filter).unwrap());
                let left = of_same_id(&after, collection, document).and_then(value);
                assert_eq!(left, value(document).filter(|_| stays), "`{name}`, {path} of {collection} {document}");
            }
        }
    }
}

/// Looks through the updates of the trees before the end of the first backfill.
///
/// # Panics
///
/// Panics if a document has more of them than there are rules for its tree.
fn trees_are_written_once(model: &Model, database: &str, histories: &[History]) {
    for history in histories {
        // The first config.
        let other = history.other();
        let rules: Vec<&Rule> = other.rules().iter().filter(|rule| rule.tree.is_some()).collect();
        let Some(tree) = rules.first() else { continue };
        let mut updates = model.updates(database, &tree.target.collection, history.first.end.into());
        updates.retain(|_, times| *times > rules.len());
        assert!(
            updates.is_empty(),
            "world {}, {} rules, updates in the first backfill: {updates:?}",
            history.seed,
            rules.len()
        );
    }
}

/// Undoes the rules of the worlds whose documents existed before the start, and then prunes them, as `denormd undo` and
/// `denormd prune` do. All rules have left the config, so nobody else writes.
///
/// # Panics
///
/// Panics if a value from before the rule has not come back where it has to, if another value has changed, or if `prune` removes
/// what `undo` has put back.
async fn undo_puts_back_what_was_there(run: &Run, server: &Server, test: &TestDb, histories: &[History]) {
    // Kept values expire by the clock of the server.
    let (start, ahead) = (tokio::time::Instant::now(), clock::wall_millis() + AHEAD);
    clock::simulate(move || ahead + clock::millis(start.elapsed()));
    server.model.elect(0, -AHEAD);
    let daemon = Daemon::start_config(&Run::config(test, "[]", SHORT, run.partitions[1])).await;
    tokio::time::sleep(EXPIRED).await;
    let (db, context) = (test.database(), daemon.context());
    let store = context.state_of_deployment().await.unwrap();
    let ask = async |rule: &str, work: RequestedWork| {
        let asked = store.request(&context.server, rule, &work).await.unwrap();
        store.until_done(&context.server, asked).await.unwrap();
    };
    for history in histories.iter().filter(|history| history.seed.is_multiple_of(2)) {
        let (rules, collections) = (history.keeping(), history.generator.collections());
        let before = world(&db, &collections).await;
        for rule in &rules {
            ask(rule.name.as_str(), RequestedWork::Undo).await;
        }
        let undone = world(&db, &collections).await;
        let records = store.rules(&context.server).await.unwrap();
        for (name, _) in records.iter().filter(|(name, _)| rules.iter().any(|rule| rule.name == *name)) {
            let retired = retired(&context.plan, &records, name);
            if !retired.is_empty() {
                ask(name.as_str(), RequestedWork::Prune(retired)).await;
            }
        }
        let pruned = world(&db, &collections).await;
        for rule in rules {
            let is_certain = run.start == Start::AfterBackfill && history.is_alone(rule);
            assert_undone(history, rule, is_certain, [&before, &undone, &pruned]);
        }
    }
    daemon.stop().await;
}

/// Compares the values of a rule before `undo`, after it, and after `prune`. Left out are paths with `$[]`, because elements move,
/// and documents that are new or gone.
///
/// It is certain what comes back if each value was written once during the first backfill. Otherwise, because sources or the copies
/// of another rule changed meanwhile, the record may describe an earlier value than the stored one. Then a first value comes back or
/// the stored one stays, and nothing is known of a place without a first value: the rule may have kept a value of its own.
///
/// # Panics
///
/// Panics if a value differs.
fn assert_undone(history: &History, rule: &Rule, is_certain: bool, [before, undone, pruned]: [&World; 3]) {
    let collection = &rule.target.collection;
    let paths = rule.owned().into_iter().map(|path| FieldPath::parse(&path.to_string()).unwrap());
    for path in paths.filter(|path| !path.has_each()) {
        for document in history.first.before.get(collection).into_iter().flatten() {
            let in_world = |world| of_same_id(world, collection, document);
            let Some(now) = in_world(before) else { continue };
            let text = |of: &Document| value_at(of, path.segments()).map(|value| format!("{value:?}"));
            let (first, stored) = (text(document), text(now));
            let written = in_world(&history.first.after).map(text);
            let [undone, pruned] = [undone, pruned].map(|world| in_world(world).and_then(text));
            // A value comes back to the subdocument that it was in, if that is still there.
            let outer = path.segments().split_last().map(|(_, outer)| outer).unwrap_or_default();
            let has_place = outer.is_empty() || matches!(value_at(now, outer), Some(Bson::Document(_)));
            let comes_back = first.is_some() && written.as_ref() == Some(&stored) && has_place;
            let due = if comes_back { &first } else { &stored };
            let may_differ = !is_certain && (first.is_none() || undone == first || undone == stored);
            assert!(
                (undone == *due || may_differ) && (undone == stored || pruned == undone),
                "`{}`, {path} of {now}: at first {first:?}, then {written:?}, undone {undone:?}, pruned {pruned:?}",
                rule.name
            );
        }
    }
}

fn of_same_id<'a>(world: &'a World, collection: &str, document: &Document) -> Option<&'a Document> {
    let id = |document: &Document| document.get("_id").cloned().unwrap_or(Bson::Null);
    world.get(collection)?.iter().find(|other| equal(&id(other), &id(document)))
}

/// Plays up to three steps without a daemon. Then `denormd check` must find a difference where the oracle does.
///
/// # Panics
///
/// Panics if only one of them finds a difference of a rule.
async fn check_finds_the_same(db: &Database, context: &Arc<Context>, history: &mut History) {
    // After many steps each rule would differ, whatever `check` overlooks.
    let few = StdRng::seed_from_u64(history.seed ^ 0x6368_6563).random_range(0..4);
    let steps = history.steps(4).into_iter().filter(|step| matches!(step, Step::Ops(_))).take(few).collect();
    history.play(db, None, steps).await;
    let stored = world(db, &history.generator.collections()).await;
    let store = context.state_of_deployment().await.unwrap();
    let name = format!("w{}-", history.seed);
    for rule in context.plan.rules.iter().filter(|rule| rule.name.starts_with(&name)) {
        let mut check = Check::new(context, &store, rule, Scope::default()).await.unwrap();
        while check.next().await.unwrap().is_some() {}
        let expectation = history.oracle.expected_of(&rule.name, &stored).unwrap();
        // Where a value cannot be computed or written, or the source is gone, the oracle expects what is stored.
        let is_vague = check.tally.refused + check.tally.undecided > 0 || !expectation.notes.is_empty();
        // Documents of two rules stay while the source of one is lost. The oracle sees a source that was replaced as there.
        let may_be_held = rule.creates.is_some() && history.generator.has(Odd::Collections);
        if is_vague || may_be_held {
            continue;
        }
        let (found, differing) = (differences(&expectation, &stored), check.tally.differing);
        assert_eq!(
            differing > 0,
            !found.is_empty(),
            "`check` of `{}` finds {differing} different targets, and the oracle:\n{}",
            rule.name,
            history.describe(found.clone(), &stored).join("\n")
        );
    }
}

#[test]
#[ignore = "a part of other tests, in a process of its own"]
fn without_faults() {
    let cluster: Cluster = cluster();
    denormd_seeded::simulate(cluster.first, || cluster.run());
}

#[test]
#[ignore = "a part of other tests, in a process of its own"]
fn with_faults() {
    let scale: Scale = cluster();
    denormd_seeded::simulate(scale.seed, || scale.run());
}

/// The number of processes that run at once.
fn at_once() -> usize {
    from_environment("DENORMD_AT_ONCE").unwrap_or_else(|| available_parallelism().map_or(1, NonZero::get))
}

/// Prints the number of seeds in a minute.
fn print_speed(seeds: u64, begun: Instant) {
    let minutes = begun.elapsed().max(Duration::from_millis(1)).as_secs_f64() / 60.0;
    println!("{:.0} seeds a minute", f64::from(u32::try_from(seeds).unwrap()) / minutes);
}

async fn many(partitions: [u32; 2], default: u64) {
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", default);
    let clusters = seeds.clone().step_by(usize::try_from(WORLDS).unwrap()).map(|first| {
        let cluster = Cluster { first, count: WORLDS.min(seeds.end - first), partitions, reloads: reload::is_on() };
        cluster.outcome()
    });
    // One failed cluster does not end a run of hours.
    let mut failed = 0;
    let outcomes = stream::iter(clusters).buffer_unordered(at_once()).take_while(|outcome| {
        failed += usize::from(*outcome == Outcome::Failed);
        ready(failed < MOST_FAILED)
    });
    let outcomes: Vec<Outcome> = outcomes.collect().await;
    if failed < MOST_FAILED {
        print_speed(seeds.end - seeds.start, begun);
    }
    assert_eq!(failed, 0, "clusters failed; how to replay each is printed above");
    let undecided = outcomes.iter().filter(|outcome| **outcome == Outcome::Undecided).count();
    assert!(undecided * 20 <= outcomes.len(), "{undecided} of {} clusters are not decided", outcomes.len());
}

#[tokio::test]
async fn all_rules_converge_on_the_model() {
    many([1, 1], 60).await;
}

#[tokio::test]
async fn all_rules_converge_on_the_model_in_three_partitions() {
    many([2, 3], 20).await;
}

#[tokio::test]
async fn a_seed_replays_exactly() {
    let cluster = Cluster { first: 1_000_001, count: 6, partitions: [2, 3], reloads: true };
    let first = digest(&cluster.simulate().await.unwrap());
    assert_eq!(digest(&cluster.simulate().await.unwrap()), first);
    assert_ne!(digest(&Cluster { first: 1_000_007, ..cluster }.simulate().await.unwrap()), first);
}

/// Commands fail, primaries change, daemons are killed and cut off.
#[tokio::test]
async fn all_rules_converge_whatever_fails() {
    let worlds = from_environment("DENORMD_WORLDS").unwrap_or(10);
    let limit = Duration::from_secs(60 * from_environment("DENORMD_SHRINK_MINUTES").unwrap_or(2));
    let begun = Instant::now();
    let seeds = seeds("DENORMD_SIMULATIONS", 20);
    let scales = seeds.clone().step_by(usize::try_from(worlds).unwrap());
    let runs = scales.map(|first| simulate_and_shrink(Scale::draw(first, worlds.min(seeds.end - first)), limit));
    let mut runs = stream::iter(runs).buffer_unordered(at_once());
    let mut struck: BTreeMap<String, u32> = BTreeMap::new();
    while let Some(one) = runs.next().await {
        for (fault, times) in one {
            *struck.entry(fault).or_default() += times;
        }
    }
    print_speed(seeds.end - seeds.start, begun);
    println!("faults that struck: {struck:?}");
    let missing: Vec<&String> = struck.iter().filter(|(_, times)| **times == 0).map(|(fault, _)| fault).collect();
    assert!(missing.is_empty() || seeds.end - seeds.start < ENOUGH, "none of these faults struck: {missing:?}");
}

#[tokio::test]
async fn a_seed_with_faults_replays_exactly() {
    let scale = Scale { daemons: 2, partitions: [2, 3], ..Scale::draw(1_000_001, 3) };
    let [first, second] = [scale.simulate().await.unwrap(), scale.simulate().await.unwrap()];
    assert_eq!(digest(&first), digest(&second));
}

/// Each dimension takes each of its values in the clusters of one run, whose first seeds differ by ten.
#[test]
fn clusters_of_a_run_differ() {
    let drawn: Vec<Scale> = (1..1000).step_by(10).map(|first| Scale::draw(first, 10)).collect();
    let has = |is: &dyn Fn(&Scale) -> bool| drawn.iter().any(is);
    assert!((1..=3).all(|daemons| has(&|scale| scale.daemons == daemons)));
    assert!((1..=3).all(|of| has(&|scale| scale.partitions[0] == of)));
    assert!(has(&|scale| u32::from(scale.daemons) > scale.partitions[0]), "none of the daemons stands by");
    assert!(has(&|scale| scale.partitions[0] != scale.partitions[1]));
    assert!([2, 32].iter().all(|most| has(&|scale| scale.latency == *most)));
    assert!([false, true].iter().all(|overlaps| has(&|scale| scale.overlaps == *overlaps)));
    let large = |scale: &Scale| [scale.large_collections, scale.large_events];
    assert!([[false, false], [false, true], [true, false]].iter().all(|is| has(&|scale| large(scale) == *is)));
}
