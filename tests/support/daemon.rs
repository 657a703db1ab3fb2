//! denormd inside the test process, on the test's own database.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use denormd_engine::{
    checkpoint::store::Store,
    dead_letter::{Chosen, DeadLetters},
    deployment::repartitioning::divide,
    inspection::adoption::losses,
    metrics::Metrics,
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
    snapshot::Snapshot,
};
use denormd_fixture::TestDb;
use denormd_model::{
    clock::now,
    namespace::Namespace,
    partition::Partition,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{Server, connect};
use denormd_rules::{
    config::{Format, Loaded, load_str},
    plan::{self, Rule},
};
use futures_util::TryStreamExt;
use tokio::time::Instant;
use tracing_subscriber::fmt::{format::Writer, time::FormatTime};

/// A daemon, and the configuration it was started with.
pub struct Daemon {
    /// One for each partition.
    handles: Vec<Handle>,
}

/// Time limit for every expected condition. Generous: the machine may be busy with other work.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The clock of the test, which may be virtual.
struct Clock;

impl FormatTime for Clock {
    fn format_time(&self, w: &mut Writer<'_>) -> std::fmt::Result {
        write!(w, "{}", now().try_to_rfc3339_string().unwrap_or_default())
    }
}

/// Makes the daemon's log a part of the test's output, which is shown when the test fails. `RUST_LOG` selects lines.
pub fn log_to_the_test() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // Only the first daemon of a process sets it.
    drop(
        tracing_subscriber::fmt()
            .with_timer(Clock)
            .with_env_filter(filter)
            .with_ansi(false)
            .with_test_writer()
            .try_init(),
    );
}

/// Waits until `check` finds a value.
///
/// # Panics
///
/// Panics after [`PATIENCE`].
pub async fn until<T>(what: &str, check: impl AsyncFn() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = check().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A compiled rule, with collections in a database `d`.
#[must_use]
pub fn rule(text: &str) -> Rule {
    let text = format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n  - {{ name: r, {text} }}\n");
    let plan = plan::compile(&load_str(&text, Format::Yaml).unwrap().config, None).unwrap();
    Rule::clone(&plan.rules[0])
}

/// A complete config with these rules.
#[must_use]
pub fn config(db: &TestDb, rules: &str) -> String {
    // A flow sequence must be indented under its key.
    let indent = if rules.starts_with('[') { "  " } else { "" };
    format!(
        "{}limits: {{ destroy_grace_seconds: 1 }}\nhttp: {{ listen: \"127.0.0.1:0\" }}\nrules:\n{indent}{rules}\n",
        databases(db)
    )
}

/// The sections of a config about the cluster and its databases.
#[must_use]
pub fn databases(db: &TestDb) -> String {
    // Only the URI of a replica set names one.
    let sharded = if db.uri.contains("replicaSet=") { "" } else { ", allow_sharded: experimental" };
    let (uri, name, state) = (&db.uri, &db.name, format!("{}_state", db.name));
    format!("mongodb: {{ uri: {uri:?}, database: {name:?}{sharded} }}\nstate: {{ database: {state:?} }}\n")
}

/// The oracle's rules as config text.
#[must_use]
pub fn rules_as_json(rules: &[Document]) -> String {
    let json: Vec<serde_json::Value> =
        rules.iter().map(|rule| Bson::Document(rule.clone()).into_relaxed_extjson()).collect();
    serde_json::to_string(&json).unwrap()
}

impl Daemon {
    /// Starts with these rules (a YAML list), after the steps of `plan --apply`.
    pub async fn start(db: &TestDb, rules: &str) -> Self {
        Self::start_config(&config(db, rules)).await
    }

    /// Starts with this config.
    pub async fn start_config(text: &str) -> Self {
        Self::start_loaded(&load(text)).await
    }

    /// Starts with a loaded config. Its rules may remove and overwrite existing values: most tests are about what
    /// follows.
    pub async fn start_loaded(loaded: &Loaded) -> Self {
        Self::prepare(loaded).await;
        Self::begin(loaded, true).await
    }

    /// Starts with a config whose rules nobody has agreed to.
    pub async fn start_unadopted(text: &str) -> Self {
        let loaded = load(text);
        Self::prepare(&loaded).await;
        Self::begin(&loaded, false).await
    }

    /// Performs the steps of `plan --apply`, on collections that the application would have created.
    pub async fn prepare(loaded: &Loaded) {
        let context = context_of(loaded).await;
        let (server, namespaces) = (&context.server, context.plan.namespaces());
        // Meanwhile, an application may drop collections, or disable their pre-images.
        for attempt in 0.. {
            for (database, names) in Namespace::by_database(&namespaces) {
                let exist: BTreeSet<String> = server.collections(database).await.unwrap().into_iter().collect();
                // The application would have created them.
                for name in names.into_iter().filter(|name| !exist.contains(*name)) {
                    let created = server.database(database).create_collection(name).await;
                    assert!(created.is_ok() || attempt < 19, "{created:?}");
                }
            }
            for namespace in &namespaces {
                shard(server, namespace).await;
            }
            let findings = preflight::check(server, &context.plan).await.unwrap();
            if findings.is_empty() {
                break;
            }
            assert!(attempt < 20, "{findings:?}");
            for finding in findings {
                // A collection may have been dropped again: the next attempt creates it.
                let Some(fix) = finding.fix else {
                    assert!(attempt < 19, "{}", finding.message);
                    continue;
                };
                let applied = preflight::apply(server, &fix).await;
                assert!(applied.is_ok() || attempt < 19, "{applied:?}");
            }
        }
    }

    /// Starts on a cluster as it is.
    pub async fn begin(loaded: &Loaded, adopt: bool) -> Self {
        log_to_the_test();
        let context = context_of(loaded).await;
        // A test of one daemon must also pass with several partitions: `DENORMD_TEST_PARTITIONS=3` tests that.
        let wanted = std::env::var("DENORMD_TEST_PARTITIONS").ok().and_then(|text| text.parse().ok());
        let of = wanted.unwrap_or(loaded.config.lease.partitions);
        let dead_letters = &context.dead_letters;
        let ttl = std::time::Duration::from_millis(1);
        while !divide(&context.server, &dead_letters.database, &dead_letters.deployment, of, ttl).await.unwrap() {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        if of > 1 {
            // It leads without a lease, and therefore without a term.
            for name in ["rules", "positions", "fan_outs"] {
                let states = context.server.collection(&dead_letters.database, name);
                states.update_many(doc! {}, doc! {"$set": {"term": 0_i64}}).await.unwrap();
            }
        }
        let mut handles = Vec::new();
        for partition in Partition::all(of) {
            let mut context = Arc::into_inner(context_of(loaded).await).unwrap();
            for rule in context.plan.rules.iter_mut().filter(|_| adopt) {
                Arc::make_mut(rule).adopt = true;
            }
            let context = Arc::new(context.within(partition));
            let (server, dead_letters) = (&context.server, &context.dead_letters);
            let store = Store::open_partition(server, &dead_letters.database, &dead_letters.deployment, partition)
                .await
                .unwrap();
            handles.push(Box::pin(pipeline::start(context, store)).await.unwrap());
        }
        Self { handles }
    }

    /// Waits until everything committed so far is applied. Returns the rules that this does not cover, because they
    /// were blocked without their source.
    pub async fn settled(&self) -> BTreeSet<String> {
        let limit = std::time::Duration::from_secs(240);
        let all = async {
            let mut lacking = BTreeSet::new();
            // Each round waits for all partitions, because one may read the writes of another. The last round is one that changes
            // nothing, or the last step of the longest chain.
            let effects = || self.handles.iter().map(|handle| handle.context.counts.effects()).sum::<u64>();
            for _ in 0..=self.context().plan.longest_chain() {
                let before = effects();
                let now =
                    until("the primary answers", || async { self.context().server.operation_time().await.ok() }).await;
                for handle in &self.handles {
                    let mut progress = handle.context.published.subscribe();
                    let applied = progress.wait_for(|progress| progress.has_applied(now)).await.unwrap();
                    let rules = handle.context.plan.rules.iter().zip(applied.states.iter());
                    let lack = |state: &RuleState| *state == RuleState::Blocked(BlockReason::SourceGone);
                    lacking.extend(rules.filter(|(_, state)| lack(state)).map(|(rule, _)| rule.name.clone()));
                }
                if effects() == before {
                    break;
                }
            }
            lacking
        };
        tokio::time::timeout(limit, all).await.unwrap_or_else(|_| panic!("the daemon does not settle: {}", self.open()))
    }

    /// The open work of each partition, for a message.
    fn open(&self) -> String {
        let open = self.handles.iter().map(|handle| {
            let snapshot = handle.context.published.subscribe().borrow().clone();
            let rules = snapshot.rules.iter().zip(snapshot.states.iter());
            let rules = rules.filter(|(_, state)| state.is_backfilling()).map(|(rule, state)| (&rule.name, state));
            let (applied, fan_outs) = (snapshot.applied(), &snapshot.fan_outs);
            format!("applied up to {applied:?}, fan-out jobs {fan_outs:?}, backfills {:?}; ", rules.collect::<Vec<_>>())
        });
        open.collect()
    }

    /// The snapshots of its pipeline.
    pub fn progress(&self) -> tokio::sync::watch::Receiver<Snapshot> {
        self.handles[0].context.published.subscribe()
    }

    /// Requests a backfill of a rule, as `denormd backfill` and `denormd unblock` do.
    pub async fn ask(&self, rule: &str) {
        let DeadLetters { database, deployment, .. } = &self.context().dead_letters;
        let server = &self.context().server;
        let store = Store::open(server, database, deployment).await.unwrap();
        // Not all records: some tests ask in a loop, with a hundred rules.
        let records = store.of_each_partition(server, rule).await.unwrap();
        let blocked = records.iter().find(|(_, record)| matches!(record.state, RuleState::Blocked(_)));
        let (_, record) = blocked.or(records.first()).expect("a rule that has run");
        match &record.state {
            // The leader may have found the source again meanwhile.
            RuleState::Blocked(reason) => drop(store.unblock(server, rule, reason, &record.definition).await.unwrap()),
            state => assert!(store.ask(server, rule).await.unwrap(), "{rule} is {state:?}"),
        }
    }

    /// Waits until no rule is blocked for a source that exists and has documents, and agrees where too much would be lost.
    /// Returns true if there was such a rule.
    pub async fn sources_are_back(&self) -> bool {
        self.sources_are_back_of("").await
    }

    /// The same for the rules whose names begin with `prefix`.
    pub async fn sources_are_back_of(&self, prefix: &str) -> bool {
        let found = AtomicBool::new(false);
        for handle in &self.handles {
            let Context { server, plan, .. } = &*handle.context;
            let whole = handle.context.whole();
            until("the rules whose sources are there again are not blocked", || async {
                let states = handle.context.published.borrow().states.clone();
                for (rule, state) in plan.rules.iter().zip(states.iter()) {
                    let source = &rule.source.namespace;
                    let source = server.database(&source.database).collection::<RawDocumentBuf>(&source.collection);
                    if *state != RuleState::Blocked(BlockReason::SourceGone) || !rule.name.starts_with(prefix) {
                        continue;
                    }
                    // A read fails if the collection is dropped at that time.
                    if source.find_one(doc! {}).await.ok()?.is_some() {
                        found.store(true, Ordering::Relaxed);
                        if !losses(&whole, rule).await.ok()?.are_small() {
                            self.ask(&rule.name).await;
                        }
                        return None;
                    }
                }
                Some(())
            })
            .await;
        }
        found.into_inner()
    }

    /// True if a rule would lose more than a tenth of its values if it ran.
    pub async fn would_lose(&self, rule: &str) -> bool {
        let whole = self.context().whole();
        let rule = whole.plan.named(rule).unwrap();
        let found = until("the losses are counted", async || losses(&whole, rule).await.ok()).await;
        found.counted && !found.are_small()
    }

    /// True if a rule is blocked because its source is gone.
    pub fn lacks_source(&self, rule: &str) -> bool {
        self.is_blocked(rule, &BlockReason::SourceGone)
    }

    /// True if a rule is blocked for this reason.
    pub fn is_blocked(&self, rule: &str, reason: &BlockReason) -> bool {
        let is = |handle: &Handle| {
            let states = handle.context.published.borrow().states.clone();
            let mut rules = handle.context.plan.rules.iter().zip(states.iter());
            rules.any(|(one, state)| one.name == rule && *state == RuleState::Blocked(reason.clone()))
        };
        self.handles.iter().any(is)
    }

    /// Retries the dead letters of a rule, and waits for the end of the retries, or until they exceed the removal limit. Returns true
    /// if there were any.
    pub async fn retry_dead_letters(&self, rule: &str) -> bool {
        let chosen = Chosen { rule: Some(rule.to_owned()), ..Chosen::default() };
        let mut found = false;
        for handle in &self.handles {
            let Context { server, dead_letters, .. } = &*handle.context;
            found |= dead_letters.count(server, &chosen).await.unwrap() > 0;
            let asked = dead_letters.ask(server, &chosen).await.unwrap();
            until("the dead letters have been tried", || async {
                let are_tried = dead_letters.untried(server, &chosen, asked).await.unwrap() == 0;
                (are_tried || self.is_blocked(rule, &BlockReason::RemovalLimit)).then_some(())
            })
            .await;
        }
        found
    }

    /// Requests a backfill of a rule and waits for its start.
    pub async fn start_backfill(&self, rule: &str) {
        let jobs = || self.context().counts.jobs.load(Ordering::Relaxed);
        let before = jobs();
        self.ask(rule).await;
        until("the backfill starts", async || (jobs() > before).then_some(())).await;
    }

    /// Number of keys that it has reconciled, in all partitions.
    #[must_use]
    pub fn reconciled(&self) -> u64 {
        let of = |handle: &Handle| handle.context.counts.reconciled.load(Ordering::Relaxed);
        self.handles.iter().map(of).sum()
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.handles[0].context
    }

    /// A shared reference to its context.
    #[must_use]
    pub fn shared(&self) -> Arc<Context> {
        self.handles[0].context.clone()
    }

    /// Stops with a regular shutdown.
    pub async fn stop(self) {
        for handle in self.handles {
            handle.stop().await;
        }
    }

    /// Stops as a crash would: nothing is drained, nothing is saved.
    pub fn kill(self) {
        self.handles.into_iter().for_each(Handle::abort);
    }
}

/// Behind routers, divides a collection between two shards by the hash of `_id`, unless it is divided already.
pub async fn shard(server: &Server, namespace: &Namespace) {
    if !server.is_router().await.unwrap() {
        return;
    }
    let admin = server.database("admin");
    let hashed = doc! {"key": {"_id": "hashed"}, "name": "_id_hashed"};
    let index = doc! {"createIndexes": &namespace.collection, "indexes": [hashed]};
    server.database(&namespace.database).run_command(index).await.unwrap();
    let name = namespace.to_string();
    admin.run_command(doc! {"shardCollection": &name, "key": {"_id": "hashed"}}).await.unwrap();
    let shards = admin.run_command(doc! {"listShards": 1}).await.unwrap();
    let shards =
        shards.get_array("shards").unwrap().iter().map(|shard| shard.as_document().unwrap().get_str("_id").unwrap());
    let halves = [(Bson::MinKey, Bson::Int64(0)), (Bson::Int64(0), Bson::MaxKey)];
    for (shard, (min, max)) in shards.zip(halves) {
        let moved = doc! {"moveRange": &name, "toShard": shard, "min": {"_id": min}, "max": {"_id": max}};
        // An empty collection was divided when it was sharded, into other ranges.
        admin.run_command(moved).await.ok();
    }
}

/// The context of a config, without starting anything.
pub async fn context(text: &str) -> Arc<Context> {
    context_of(&load(text)).await
}

async fn context_of(loaded: &Loaded) -> Arc<Context> {
    let config = &loaded.config;
    let plan = plan::compile(config, None).unwrap_or_else(|mistakes| panic!("{}", loaded.report(&mistakes)));
    let server = Server::new(connect::connect(&config.mongodb.uri).await.unwrap());
    let dead_letters = DeadLetters {
        database: config.state.database.clone(),
        deployment: config.name.clone(),
        partition: Partition::WHOLE,
    };
    Arc::new(Context::new(server, plan, config.limits.clone(), dead_letters, Metrics::new().unwrap()))
}

/// Loads a YAML config that must be valid.
#[must_use]
pub fn load(text: &str) -> Loaded {
    load_str(text, Format::Yaml).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// All documents of a collection, by `_id`.
pub async fn all(db: &mongodb::Database, collection: &str) -> Vec<Document> {
    db.collection(collection).find(doc! {}).sort(doc! {"_id": 1}).await.unwrap().try_collect().await.unwrap()
}
