//! Table tests: documents before, writes, documents after. Hundreds of cases share one daemon, each in its own
//! collections.
//!
//! In rules and documents `@parts` stands for the case's collection `parts`, `@other.parts` for one in another database,
//! and `@@` for the database.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use bson::{Bson, Document, Timestamp, doc};
use denormd_fixture::TestDb;
use denormd_model::field_path::FieldPath;
use denormd_rules::plan::{Plan, reference::Role};
use futures_util::{StreamExt, TryStreamExt, stream};
use mongodb::{Collection, Database, IndexModel, options::IndexOptions};

use crate::support::daemon::Daemon;

/// A user's write.
#[derive(Debug, Clone)]
pub enum Write {
    Insert(&'static str, Document),
    /// An update document or a pipeline.
    Update(&'static str, Document, Bson),
    Replace(&'static str, Document, Document),
    Delete(&'static str, Document),
    /// Several writes at once, in a case that runs step by step.
    Burst(Vec<Write>),
}

pub fn insert(collection: &'static str, document: Document) -> Write {
    Write::Insert(collection, document)
}

/// Updates the document with this `_id`.
pub fn update(collection: &'static str, id: impl Into<Bson>, update: impl Into<Bson>) -> Write {
    Write::Update(collection, doc! {"_id": id.into()}, update.into())
}

/// Replaces the document with the `_id` of the new one.
pub fn replace(collection: &'static str, document: Document) -> Write {
    Write::Replace(collection, doc! {"_id": document.get("_id").cloned()}, document)
}

/// Deletes the document with this `_id`.
pub fn delete(collection: &'static str, id: impl Into<Bson>) -> Write {
    Write::Delete(collection, doc! {"_id": id.into()})
}

/// The fields of a collection.
#[derive(Debug, Default)]
struct Fields {
    /// Paths of values that are not documents.
    scalar: BTreeSet<String>,
    /// Names of top-level fields that hold an array at some time: a compound index takes one of those at most.
    with_arrays: BTreeSet<String>,
}

impl Fields {
    fn add(&mut self, parent: &str, document: &Document) {
        for (name, value) in document {
            let path = if parent.is_empty() { name.clone() } else { format!("{parent}.{name}") };
            match value {
                Bson::Document(inner) => self.add(&path, inner),
                Bson::Array(_) => self.add_array(&path),
                _ => drop(self.scalar.insert(path)),
            }
        }
    }

    fn add_array(&mut self, path: &str) {
        self.with_arrays.extend(path.split('.').next().map(str::to_owned));
    }

    /// True if an index can cover the path: its top-level field never holds an array.
    fn may_cover(&self, path: &str) -> bool {
        let is_name = |name: &str| !name.is_empty() && !name.starts_with('$');
        path.split('.').all(is_name) && path.split('.').next().is_some_and(|root| !self.with_arrays.contains(root))
    }
}

impl Write {
    fn add_fields(&self, collections: &mut BTreeMap<&'static str, Fields>) {
        match self {
            Self::Insert(name, document) | Self::Replace(name, _, document) => {
                collections.entry(name).or_default().add("", document);
            }
            Self::Update(name, _, Bson::Document(update)) => {
                let fields = collections.entry(name).or_default();
                for (operator, assigned) in update {
                    match assigned.as_document() {
                        Some(assigned) if operator == "$set" => fields.add("", assigned),
                        assigned => {
                            assigned.into_iter().flat_map(Document::keys).for_each(|path| fields.add_array(path));
                        }
                    }
                }
            }
            // A pipeline may set a field to an array.
            Self::Update(name, _, pipeline) => {
                let stages = pipeline.as_array().into_iter().flatten().filter_map(Bson::as_document);
                let assigned = stages.flat_map(Document::values).filter_map(Bson::as_document).flat_map(Document::keys);
                let fields = collections.entry(name).or_default();
                assigned.for_each(|path| fields.add_array(path));
            }
            Self::Delete(..) => {}
            Self::Burst(writes) => writes.iter().for_each(|write| write.add_fields(collections)),
        }
    }
}

/// The ways in which a case may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depends {
    /// The result follows from the documents alone, so every way leads to it.
    OnData,
    /// The result depends on earlier values: each write is waited for.
    OnHistory,
}

/// One line of a table.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: String,
    rules: Vec<String>,
    before: Vec<(&'static str, Document)>,
    writes: Vec<Write>,
    expect: Vec<(&'static str, Vec<Document>)>,
    depends: Depends,
}

impl Case {
    /// `rule` is YAML without the name: `copy: { … }`.
    pub fn new(name: impl Into<String>, rule: &str) -> Self {
        Self {
            name: name.into(),
            rules: vec![rule.to_owned()],
            before: Vec::new(),
            writes: Vec::new(),
            expect: Vec::new(),
            depends: Depends::OnData,
        }
    }

    /// One more rule.
    pub fn and(mut self, rule: &str) -> Self {
        self.rules.push(rule.to_owned());
        self
    }

    /// Documents that exist before.
    pub fn has(mut self, collection: &'static str, documents: impl IntoIterator<Item = Document>) -> Self {
        self.before.extend(documents.into_iter().map(|document| (collection, document)));
        self
    }

    /// The application's writes, in order.
    pub fn writes(mut self, writes: impl IntoIterator<Item = Write>) -> Self {
        self.writes.extend(writes);
        self
    }

    /// The complete content of a collection at the end.
    pub fn expect(mut self, collection: &'static str, documents: impl IntoIterator<Item = Document>) -> Self {
        self.expect.push((collection, documents.into_iter().collect()));
        self
    }

    /// Marks that the result depends on the way.
    pub fn on_history(mut self) -> Self {
        self.depends = Depends::OnHistory;
        self
    }
}

/// The order of a table's writes and the daemon's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// All writes precede the start: the backfill does everything.
    Backfill,
    /// Each write is applied before the next one.
    StepByStep,
    /// The writes follow each other as fast as they can, and indexes hold all fields.
    Flood,
    /// The writes follow each other as fast as they can, with a kill and a restart of the daemon during the writes.
    Restart,
}

struct Placed<'a> {
    test: &'a TestDb,
    nth: usize,
    case: &'a Case,
}

impl Placed<'_> {
    fn prefix(&self) -> String {
        format!("c{}_", self.nth)
    }

    fn collection(&self, name: &str) -> Collection<Document> {
        match name.strip_prefix("other.") {
            Some(name) => self.test.beside("other").collection(&format!("{}{name}", self.prefix())),
            None => self.test.database().collection(&format!("{}{name}", self.prefix())),
        }
    }

    fn placed(&self, text: &str) -> String {
        let other = format!("{}_other.{}", self.test.name, self.prefix());
        text.replace("@@", &self.test.name).replace("@other.", &other).replace('@', &self.prefix())
    }

    fn value(&self, value: &Bson) -> Bson {
        match value {
            Bson::String(text) if text.starts_with('@') => self.placed(text).into(),
            Bson::Array(items) => items.iter().map(|item| self.value(item)).collect::<Vec<_>>().into(),
            Bson::Document(document) => self.document(document).into(),
            other => other.clone(),
        }
    }

    fn document(&self, document: &Document) -> Document {
        document.iter().map(|(name, value)| (name.clone(), self.value(value))).collect()
    }

    fn rules(&self) -> String {
        let mut out = String::new();
        for (nth, rule) in self.case.rules.iter().enumerate() {
            let rule = self.placed(rule).trim().replace('\n', "\n    ");
            writeln!(out, "  - name: c{}-{nth}\n    allow_scan: true\n    {rule}", self.nth).unwrap();
        }
        out
    }

    async fn prepare(&self) {
        for (collection, document) in &self.case.before {
            self.collection(collection).insert_one(self.document(document)).await.unwrap();
        }
    }

    /// Creates indexes that hold every field without an array beside the fields that the rules match by: the server can answer from them
    /// alone, without the documents. Returns their number: not every collection can have such an index.
    async fn index_everything(&self, plan: &Plan) -> usize {
        let mut created = 0;
        let mut collections: BTreeMap<&str, Fields> = BTreeMap::new();
        let expected =
            self.case.expect.iter().flat_map(|(name, documents)| documents.iter().map(move |one| (name, one)));
        for (name, document) in self.case.before.iter().map(|(name, document)| (name, document)).chain(expected) {
            collections.entry(name).or_default().add("", document);
        }
        self.case.writes.iter().for_each(|write| write.add_fields(&mut collections));
        let prefix = format!("c{}-", self.nth);
        let rules = plan.rules.iter().filter(|rule| rule.name.starts_with(&prefix));
        for (nth, (rule, role)) in rules.flat_map(|rule| [(rule, Role::Source), (rule, Role::Target)]).enumerate() {
            let namespace = rule.side(role).namespace.to_string();
            let mut collections = collections.iter().map(|(name, fields)| (self.collection(name), fields));
            let Some((collection, fields)) = collections.find(|(at, _)| at.namespace().to_string() == namespace) else {
                continue;
            };
            let matched = rule.reference.paths(role).map(FieldPath::query);
            let others = fields.scalar.iter().filter(|path| fields.may_cover(path)).cloned();
            let paths = matched.chain(others).chain(["_id".to_owned()]);
            let keys: Document = paths.map(|path| (path, Bson::Int32(1))).collect();
            let options = IndexOptions::builder().name(format!("all{nth}")).build();
            let index = collection.create_index(IndexModel::builder().keys(keys).options(options).build()).await;
            created += usize::from(index.is_ok());
        }
        created
    }

    async fn perform(&self, write: &Write) {
        let done = match write {
            Write::Insert(at, document) => self.collection(at).insert_one(self.document(document)).await.map(|_| 1),
            Write::Update(at, filter, Bson::Document(update)) => {
                let update = self.document(update);
                self.collection(at).update_one(filter.clone(), update).await.map(|done| done.matched_count)
            }
            Write::Update(at, filter, pipeline) => {
                let stages: Vec<Document> =
                    pipeline.as_array().unwrap().iter().map(|stage| stage.as_document().unwrap().clone()).collect();
                self.collection(at).update_one(filter.clone(), stages).await.map(|done| done.matched_count)
            }
            Write::Replace(at, filter, document) => {
                let document = self.document(document);
                self.collection(at).replace_one(filter.clone(), document).await.map(|done| done.matched_count)
            }
            Write::Delete(at, filter) => {
                self.collection(at).delete_one(filter.clone()).await.map(|done| done.deleted_count)
            }
            Write::Burst(writes) => {
                for write in writes {
                    Box::pin(self.perform(write)).await;
                }
                return;
            }
        };
        assert_eq!(done.ok(), Some(1), "{}: {write:?} did nothing", self.case.name);
    }

    async fn perform_step(&self, step: usize) {
        if let Some(write) = self.case.writes.get(step) {
            self.perform(write).await;
        }
    }

    async fn perform_all(&self) {
        for write in &self.case.writes {
            self.perform(write).await;
        }
    }

    /// The differences from the expected documents.
    async fn differences(&self) -> String {
        let mut out = String::new();
        for (name, expected) in &self.case.expect {
            let found = self.collection(name).find(doc! {}).sort(doc! {"_id": 1}).await.unwrap();
            let found: Vec<Document> = found.try_collect().await.unwrap();
            let expected: Vec<Document> = expected.iter().map(|document| self.document(document)).collect();
            let found = with_times(&expected, found);
            if shown(&expected) != shown(&found) {
                let (expected, found) = (shown(&expected).join("\n    "), shown(&found).join("\n    "));
                writeln!(out, "  {name} expected\n    {expected}\n  found\n    {found}").unwrap();
            }
        }
        out
    }
}

/// In an expected document, a time that is not older than the test.
pub const TIME: &str = "<time>";

/// The same documents with [`TIME`] where that is expected and there is such a time.
fn with_times(expected: &[Document], mut found: Vec<Document>) -> Vec<Document> {
    let now = bson::DateTime::now().timestamp_millis();
    let is_of_the_test =
        |value: &Bson| value.as_datetime().is_some_and(|time| (now - time.timestamp_millis()).abs() < 3_600_000);
    for (expected, found) in expected.iter().zip(&mut found) {
        for (_, value) in found.iter_mut().filter(|(name, value)| {
            expected.get_str(name.as_str()).is_ok_and(|text| text == TIME) && is_of_the_test(value)
        }) {
            *value = TIME.into();
        }
    }
    found
}

/// Documents as text that distinguishes every BSON type, -0.0 and NaN too. The order of fields that an update adds is
/// not guaranteed, so names are sorted.
pub fn shown(documents: &[Document]) -> Vec<String> {
    documents.iter().map(|document| sorted(&document.clone().into()).into_canonical_extjson().to_string()).collect()
}

fn sorted(value: &Bson) -> Bson {
    match value {
        Bson::Document(document) => {
            let mut fields: Vec<_> = document.iter().map(|(name, value)| (name.clone(), sorted(value))).collect();
            fields.sort_by(|a, b| a.0.cmp(&b.0));
            fields.into_iter().collect::<Document>().into()
        }
        Bson::Array(items) => items.iter().map(sorted).collect::<Vec<_>>().into(),
        other => other.clone(),
    }
}

/// Runs a table in every way concurrently: most of the time is waiting.
pub async fn every_way(cases: &[Case]) {
    // The futures are large.
    tokio::join!(
        Box::pin(run(cases, Way::Backfill)),
        Box::pin(run(cases, Way::StepByStep)),
        Box::pin(run(cases, Way::Flood)),
        Box::pin(run(cases, Way::Restart)),
    );
}

/// Runs the cases of a table that allow this way, and shows all differences. Once everything is as expected, a restart
/// and a backfill from the start must write nothing.
pub async fn run(cases: &[Case], way: Way) {
    let cases: Vec<&Case> =
        cases.iter().filter(|case| way == Way::StepByStep || case.depends == Depends::OnData).collect();
    let test = denormd_fixture::database().await;
    let placed: Vec<Placed> = cases.iter().enumerate().map(|(nth, case)| Placed { test: &test, nth, case }).collect();
    let rules: String = placed.iter().map(Placed::rules).collect();
    let config = crate::support::daemon::config(&test, &rules);
    each(&placed, Placed::prepare).await;
    if way == Way::Flood {
        let plan = &crate::support::daemon::context(&config).await.plan;
        let created = stream::iter(&placed).map(|placed| placed.index_everything(plan)).buffer_unordered(16);
        let created: usize = created.fold(0, async |all, one| all + one).await;
        assert!(created >= placed.len(), "{created} indexes for {} cases", placed.len());
    }
    if way == Way::Backfill {
        // Pre-images must be kept before anything is deleted, so collections are created first.
        each(&placed, Placed::perform_all).await;
    }
    let mut daemon = Daemon::start_config(&config).await;
    daemon.settled().await;
    match way {
        Way::Backfill => {}
        Way::StepByStep => {
            let steps = placed.iter().map(|placed| placed.case.writes.len()).max().unwrap_or_default();
            for step in 0..steps {
                each(&placed, |placed| placed.perform_step(step)).await;
                daemon.settled().await;
            }
        }
        Way::Flood => each(&placed, Placed::perform_all).await,
        Way::Restart => {
            let restart = async {
                for _ in 0..3 {
                    daemon.kill();
                    daemon = Daemon::start_config(&config).await;
                }
                daemon
            };
            (daemon, ()) = tokio::join!(restart, each(&placed, Placed::perform_all));
        }
    }
    daemon.settled().await;
    let mut wrong = String::new();
    for placed in &placed {
        let differences = placed.differences().await;
        if !differences.is_empty() {
            writeln!(
                wrong,
                "{} ({way:?})\n  {}\n{differences}",
                placed.case.name,
                placed.placed(&placed.case.rules.join("\n  "))
            )
            .unwrap();
        }
    }
    let dead_letters = dead_letters(&test).await;
    assert!(wrong.is_empty(), "\n{wrong}\ndead letters: {dead_letters:?}");
    assert!(dead_letters.is_empty(), "{dead_letters:?}");
    daemon.stop().await;
    assert_silence(&test, &config).await;
}

async fn each<'a, F: Future<Output = ()>>(placed: &'a [Placed<'a>], work: impl Fn(&'a Placed<'a>) -> F) {
    stream::iter(placed).for_each_concurrent(16, work).await;
}

/// The daemon's dead letters.
pub async fn dead_letters(test: &TestDb) -> Vec<Document> {
    let state = test.beside("state");
    state.collection(denormd_engine::dead_letter::COLLECTION).find(doc! {}).await.unwrap().try_collect().await.unwrap()
}

/// Starts a daemon without its state, and requires that the oplog receives nothing but that state.
pub async fn assert_silence(test: &TestDb, config: &str) {
    let state = test.beside("state");
    let before = now(&state).await;
    let daemon = Daemon::start_config(config).await;
    daemon.settled().await;
    daemon.stop().await;
    state.collection::<Document>("rules").delete_many(doc! {}).await.unwrap();
    let daemon = Daemon::start_config(config).await;
    daemon.settled().await;
    let reconciled = daemon.reconciled();
    daemon.stop().await;
    assert!(reconciled > 0, "the forced backfill looked at nothing");
    let written = oplog(test, before).await;
    assert!(written.is_empty(), "{} entries, the first: {}", written.len(), written[0]);
}

/// The cluster time.
pub async fn now(database: &Database) -> Timestamp {
    let reply = database.run_command(doc! {"ping": 1}).await.unwrap();
    reply.get_timestamp("operationTime").unwrap()
}

/// The writes to the test's databases after `since`, without the daemon's own state.
pub async fn oplog(test: &TestDb, since: Timestamp) -> Vec<Document> {
    let ours = |name: &str| bson::Regex {
        pattern: format!("^{}{name}", test.name).try_into().unwrap(),
        options: "".try_into().unwrap(),
    };
    let filter = doc! {"ts": {"$gt": since}, "op": {"$ne": "n"}, "$nor": [{"ns": ours("_state\\.")}], "$or": [
        {"ns": ours("")}, {"o.applyOps.ns": ours("(_other)?\\.")},
    ]};
    let entries = test.client.database("local").collection("oplog.rs");
    entries.find(filter).await.unwrap().try_collect().await.unwrap()
}
