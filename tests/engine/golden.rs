//! The persisted format, pinned: this version reads golden documents of every kind of state, as an earlier version
//! wrote them; and it writes exactly its own golden documents.
//!
//! `tests/golden/VERSION/COLLECTION.json` contains the documents that denormd of that version leaves in a collection of
//! the state database, in canonical Extended JSON. Times, ids and values of one machine are replaced by constants. The
//! documents of a released version are never changed. `DENORMD_GOLDEN=write` rewrites those of this version.

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use bson::{Bson, DateTime, Document, RawBson, Timestamp, doc, oid::ObjectId, spec::BinarySubtype};
use denormd::status::Status;
use denormd_engine::{
    checkpoint::{
        adoption::{Decision, Decisions},
        fan_out::{FanOuts, Subject},
        format,
        kept::{self, Element, Fingerprint, Keeping, Kept, Place},
        progress::{CheckProgress, Tally},
        requests::RequestedWork,
        rule_record::{Agreement, Retired, RuleRecord},
        store::{Store, claim_term, highest_term},
    },
    dead_letter::{Chosen, DeadLetters, Offending},
    deployment::{
        identity::Identity,
        instances::{Member, fingerprint, instances},
        lease::{self, Lease},
    },
    events::{Event, Journal},
    request::Task,
};
use denormd_fixture::TestDb;
use denormd_model::{
    clock,
    field_path::FieldPath,
    key::Key,
    partition::Partition,
    position::{ClusterTime, Position},
    rule_state::{Adoption, BlockReason, RuleState},
};
use denormd_mongo::{
    Server,
    error::{Error, Kind},
};
use denormd_rules::plan::{self, Plan, Rule};

use crate::support::daemon::{all, load, until};

/// The version whose documents this program writes.
const WRITTEN: &str = "2";
/// Every version whose documents this program reads.
const READ: [&str; 2] = ["1", WRITTEN];
/// Every collection of the state database except `events`, which is capped, `canaries`, which is not read, and
/// `reports`, with a daemon's whole status: see [`a_leaders_report_is_read_and_written_as_it_was`].
const COLLECTIONS: [&str; 12] = [
    "positions",
    "rules",
    "terms",
    "fan_outs",
    "dead_letters",
    "requests",
    "checks",
    "formats",
    "leases",
    "instances",
    "plans",
    "kept",
];
const DEPLOYMENT: &str = "golden";
const TTL: Duration = Duration::from_secs(2);
/// Also the time limit of taking a lease.
const LEASE: Duration = Duration::from_secs(10);

/// One rule for each state that a rule can be in. Together they contain every part of a stored definition.
const RULES: &str = r#"
  - { name: pending, copy: { source: s, target: t01, match: { ref: _id }, set: { name: $name, "deep.name": { $concat: [$first, " ", $last] } } } }
  - { name: begun, copy: { source: { collection: s, where: { live: true, n: { $gt: 5 } } }, target: { collection: other.t02, where: { kind: a } }, match: { ref: _id }, key_type: objectId, on_missing: "null", set: { name: $name } } }
  - { name: manual, backfill: manual, copy: { source: s, target: t03, match: { ref: code, zone: zone }, sort: { rank: -1, name: 1 }, key_type: string, on_missing: keep, set: { name: $name } } }
  - { name: done, copy: { source: s, target: t04, match: { "lines.$[].item": _id }, on_missing: remove, set: { "lines.$[].name": $name } } }
  - { name: bereft, copy: { source: s, target: t05, match: { ref: _id }, on_missing: delete, set: { name: $name } } }
  - { name: braked, copy: { source: s, target: t06, match: { ref: _id }, once: true, set: { price: $price } } }
  - { name: paused, copy: { source: s, target: t07, match: { "refs.$[]": _id }, into: parts, element: { id: $_id, name: $name } } }
  - { name: paused-for-a-while, collect: { source: reviews, target: t08, match: { _id: product }, into: latest, element: { id: $_id, text: $text }, sort: { at: -1 }, slice: 3 } }
  - { name: suspended, collect: { source: reviews, target: t09, match: { _id: product }, into: all, element: $_id, on_empty: unset } }
  - { name: released, aggregate: { source: reviews, target: t10, match: { _id: product }, set: { stars: { $avg: $stars }, count: { $sum: 1 } } } }
  - { name: changed, shadow: true, aggregate: { source: reviews, target: t11, match: { _id: product }, on_empty: unset, set: { best: { $max: $stars } } } }
"#;

fn planned() -> Plan {
    let text =
        format!("mongodb: {{ uri: \"mongodb://localhost\", database: app }}\nname: {DEPLOYMENT}\nrules:\n{RULES}");
    plan::compile(&load(&text).config, None).unwrap()
}

fn rule<'a>(plan: &'a Plan, name: &str) -> &'a Rule {
    plan.rules.iter().find(|rule| rule.name == name).unwrap()
}

fn position(token: Option<Document>) -> Position {
    Position { time: ClusterTime { seconds: 1_700_000_000, increment: 7 }, token }
}

fn folder(version: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(version)
}

fn golden(version: &str, collection: &str) -> Vec<Document> {
    let text = fs::read_to_string(folder(version).join(format!("{collection}.json"))).unwrap();
    let documents: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    documents.into_iter().map(|json| Document::try_from(json.as_object().unwrap().clone()).unwrap()).collect()
}

fn adoption() -> BlockReason {
    let causes = vec!["it removes existing values".to_owned()];
    BlockReason::Adoption(Adoption { adds: 5, overwrites: 4, removes: 3, total: 20, sampled: true, causes })
}

fn unavailable() -> RuleState {
    RuleState::Unavailable { reason: "the user lacks update on `app.t09`".to_owned() }
}

/// Writes the state of a deployment with one of everything, by the functions of the daemon and its commands.
async fn write(test: &TestDb) {
    let (server, state) = (&Server::new(test.client.clone()), test.name.as_str());
    let another = || Server::new(test.client.clone());
    let plan = planned();
    assert_eq!(format::check(server, state, DEPLOYMENT).await.unwrap(), 1);
    let divided = server.collection(state, format::COLLECTION);
    format::check(server, state, "divided").await.unwrap();
    divided.update_one(format::of_number("divided", 1), format::divided(3)).await.unwrap();
    let store = Store::open(server, state, DEPLOYMENT).await.unwrap();
    write_rules(server, &store, &plan).await;
    let pipeline = [doc! {"$match": {"ns": {"db": "app", "coll": "s"}}}];
    let saved = position(Some(doc! {"_data": "826553F10000000007"}));
    store.save_position(server, "app", &pipeline, &saved, None, saved.time).await.unwrap();
    store.save_position(server, "other", &pipeline, &position(None), None, saved.time).await.unwrap();
    write_work(server, state, &store, &plan).await;
    let instance = &Identity::of_this_process();
    let held = Lease::new(another(), state, DEPLOYMENT, instance, LEASE).try_lead().await.unwrap().unwrap();
    drop(held);
    Lease::new(another(), state, "given-back", instance, LEASE).try_lead().await.unwrap().unwrap().release().await;
    claim_term(server, state, "led-before", 41).await.unwrap();
    let divided = Member::join(another(), state, DEPLOYMENT, instance, TTL, &plan, 2);
    divided.leads(Some(1));
    let other = Identity { id: "another".to_owned(), ..instance.clone() };
    let whole = Member::join(another(), state, DEPLOYMENT, &other, TTL, &plan, 1);
    until("the instances are announced", async || {
        let instances = all(&server.database(state), "instances").await;
        let leads = instances.iter().filter(|instance| instance.get_i64("leads").is_ok_and(|leads| leads == 1)).count();
        (instances.len() == 2 && leads == 1).then_some(())
    })
    .await;
    drop((divided, whole));
}

async fn write_rules(server: &Server, store: &Store, plan: &Plan) {
    let reset = async |name: &str, state: RuleState| {
        let reset = store.reset_rule(server, rule(plan, name), &state, Agreement::Ended);
        let (_, generation) = reset.await.unwrap();
        store.source_seen(server, name, generation, &Bson::String("a UUID".to_owned())).await.unwrap();
        generation
    };
    let done = async |name: &str| {
        let generation = reset(name, RuleState::BACKFILL).await;
        assert!(
            store
                .save_backfill(server, rule(plan, name), generation, (&RuleState::Live, None), (20, Some(20)))
                .await
                .unwrap()
        );
        generation
    };
    let change = |_: Option<&RuleRecord>| (RuleState::BACKFILL, Agreement::Ended);
    store.register_rule(server, rule(plan, "pending"), change, Some(&keeping()), false).await.unwrap();
    store.undoing(server, "pending", &keeping(), &[undone()]).await.unwrap();
    let generation = reset("begun", RuleState::BACKFILL).await;
    store.notice(server, "begun", generation).await.unwrap();
    let after =
        RuleState::Backfilling { after: Some(Bson::String("t-17".to_owned())), in_sources: false, agreed: false };
    assert!(store.save_backfill(server, rule(plan, "begun"), generation, (&after, None), (17, None)).await.unwrap());
    reset("manual", RuleState::AwaitingBackfill).await;
    done("done").await;
    done("bereft").await;
    reset("bereft", RuleState::Blocked(BlockReason::SourceGone)).await;
    reset("braked", RuleState::Blocked(BlockReason::RemovalLimit)).await;
    for name in ["adopting", "adopted"] {
        let new = Rule { name: name.to_owned(), ..rule(plan, "pending").clone() };
        store.reset_rule(server, &new, &RuleState::Blocked(adoption()), Agreement::Ended).await.unwrap();
    }
    let definition = &rule(plan, "pending").definition;
    assert!(store.unblock(server, "adopted", &adoption(), definition).await.unwrap());
    for (name, time) in [("paused", None), ("paused-for-a-while", Some(Duration::from_secs(600)))] {
        done(name).await;
        store.pause(server, name, time).await.unwrap();
    }
    let gone = Rule { name: "paused-without-source".to_owned(), ..rule(plan, "pending").clone() };
    store.reset_rule(server, &gone, &RuleState::Blocked(BlockReason::SourceGone), Agreement::Ended).await.unwrap();
    store.pause(server, "paused-without-source", None).await.unwrap();
    reset("suspended", unavailable()).await;
    let waiting = Rule { name: "suspended-waiting".to_owned(), ..rule(plan, "pending").clone() };
    for state in [RuleState::AwaitingBackfill, unavailable()] {
        store.reset_rule(server, &waiting, &state, Agreement::Ended).await.unwrap();
    }
    reset("released", RuleState::Blocked(BlockReason::SourceGone)).await;
    assert!(store.unblock(server, "released", &BlockReason::SourceGone, definition).await.unwrap());
    let mut before = rule(plan, "changed").clone();
    before.definition.remove("shadow");
    store.reset_rule(server, &before, &RuleState::Live, Agreement::Ended).await.unwrap();
    store.retire(server, "changed", &before.definition).await.unwrap();
    done("changed").await;
    let gone = Rule { name: "absent".to_owned(), ..rule(plan, "pending").clone() };
    store.reset_rule(server, &gone, &RuleState::Live, Agreement::Ended).await.unwrap();
    store.remove(server, "absent").await.unwrap();
}

fn keeping() -> Keeping {
    Keeping { paths: vec!["name".to_owned(), "deep.name".to_owned()], passed: vec![Bson::String("t-17".to_owned())] }
}

fn undone() -> Retired {
    Retired { collection: "app.t01".to_owned(), path: FieldPath::parse("deep.name").unwrap(), filter: None }
}

fn dead_letters_of(state: &str) -> DeadLetters {
    DeadLetters { database: state.to_owned(), deployment: DEPLOYMENT.to_owned(), partition: Partition::WHOLE }
}

const TASKS: [(Task, &str); 7] = [
    (Task::Value, "Value"),
    (Task::Target, "Target"),
    (Task::LocateSource, "LocateSource"),
    (Task::LocateTarget, "LocateTarget"),
    (Task::Guard, "Guard"),
    (Task::Parents, "Parents"),
    (Task::Holders, "Holders"),
];

async fn write_work(server: &Server, state: &str, store: &Store, plan: &Plan) {
    let done = rule(plan, "done");
    let fan_outs = FanOuts { database: state.to_owned(), deployment: DEPLOYMENT.to_owned() };
    let subject = |task, key: Bson| Subject { rule: done.id, task, key: Key::one(key) };
    let mut begun =
        fan_outs.open(server, done, subject(Task::Value, Bson::Int32(1)), Some(1_700_000_000_000)).await.unwrap();
    begun.after = Some(Bson::Int64(5000));
    assert!(fan_outs.advance(server, done, &begun).await.unwrap());
    for task in [Task::Parents, Task::Holders] {
        fan_outs.open(server, done, subject(task, Bson::String("x".to_owned())), None).await.unwrap();
    }
    let error = Error::new(Kind::Refused, "Document failed validation");
    let key = Key::new(vec![Bson::Int32(1), Bson::Null]);
    let target = Key::one(Bson::ObjectId(ObjectId::from_bytes([1; 12])));
    for (task, _) in TASKS {
        let offending = Offending { key: &key, target: None, path: None, tree: None, since: None };
        dead_letters_of(state).record(server, done, task, &offending, &error).await.unwrap();
    }
    let offending =
        Offending { key: &key, target: Some(&target), path: Some("lines.0".to_owned()), tree: None, since: None };
    let refused = Error { code: Some(121), ..error };
    for _ in 0..2 {
        dead_letters_of(state).record(server, done, Task::Value, &offending, &refused).await.unwrap();
    }
    let one = Chosen { rule: None, key: Some(Bson::ObjectId(ObjectId::from_bytes([1; 12]))) };
    dead_letters_of(state).ask(server, &one).await.unwrap();
    store
        .request(server, "done", &RequestedWork::Reconcile(vec![Bson::Int32(1), Bson::String("b".to_owned())]))
        .await
        .unwrap();
    let path = FieldPath::parse("lines.$[].name").unwrap();
    let prune = RequestedWork::Prune(vec![Retired { collection: "app.t04".to_owned(), path, filter: None }]);
    let refused = store.request(server, "done", &prune).await.unwrap();
    let requests = server.collection(state, "requests");
    let one = requests.find_one(doc! {"together": refused}).await.unwrap().unwrap();
    store.refuse_request(server, one.get_object_id("_id").unwrap(), "a rule owns it").await.unwrap();
    store.request(server, "done", &prune).await.unwrap();
    store.request(server, "done", &RequestedWork::Undo).await.unwrap();
    let tally = Tally { compared: 500, differing: 4, repaired: 1, undecided: 3, refused: 2, resumed: false };
    for (name, after, done) in [("done", Some(Bson::Int32(7)), false), ("begun", None, true)] {
        let progress = CheckProgress { after, done, tally: tally.clone() };
        store.save_check(server, rule(plan, name), &progress).await.unwrap();
    }
    store.nudge(server).await.unwrap();
    write_kept(server, state).await;
}

fn kept_of<'a>(server: &'a Server, state: &'a str) -> Kept<'a> {
    Kept { server, database: state, deployment: DEPLOYMENT }
}

/// A value of a field, one of an element, and one that was too large.
fn kept_values() -> [(Place, Option<RawBson>, [Fingerprint; 2]); 3] {
    let place = |target: i32, path: &str, element| Place {
        collection: "app.t04".to_owned(),
        target: Bson::Int32(target),
        path: path.to_owned(),
        element,
    };
    let print = |text: &str| kept::fingerprint(Some(&RawBson::String(text.to_owned())));
    let element = Element {
        at: "lines.3".to_owned(),
        by: vec![("item".to_owned(), Some(Bson::Int32(7))), ("zone".to_owned(), None)],
        rest: print("rest"),
        own: vec!["name".to_owned()],
    };
    [
        (place(1, "name", None), Some(RawBson::Null), [kept::fingerprint(Some(&RawBson::Null)), print("new")]),
        (place(1, "lines.$[].name", Some(element)), Some(RawBson::Int64(5)), [print("5"), None]),
        (place(2, "name", None), None, [print("large"), print("new")]),
    ]
}

async fn write_kept(server: &Server, state: &str) {
    let kept = kept_of(server, state);
    let values = kept_values();
    let statements: Vec<_> = values
        .iter()
        .flat_map(|(place, old, [was, new])| {
            kept.statements("done", place, old.as_ref(), (was, new), clock::now()).unwrap()
        })
        .collect();
    let written = server.update(state, "kept", &statements, TTL).await.unwrap();
    assert!(written.refused.is_empty());
    kept.leave("done").await.unwrap();
    kept.not_kept("done", 17).await.unwrap();
    let (place, old, [was, new]) = &values[0];
    let again = kept.statements("done", place, old.as_ref(), (was, new), clock::now()).unwrap();
    server.update(state, "kept", &again, TTL).await.unwrap();
}

#[tokio::test]
async fn kept_values_are_read() {
    let test = denormd_fixture::database().await;
    let server = restore(&test, WRITTEN).await;
    let kept = kept_of(&server, &test.name);
    let mut found = kept.page("done", None).await.unwrap();
    found.sort_by_key(|value| (value.place.target.as_i32(), value.place.element.is_some()));
    for (found, (place, old, [was, new])) in found.into_iter().zip(kept_values()) {
        assert_eq!((found.place, found.old, found.was, found.new), (place, old, was, new));
    }
    assert_eq!(kept.count_not_kept("done").await.unwrap(), 17);
    assert!(kept.page("pending", None).await.unwrap().is_empty());
    let fields = ["lines.$[].name", "name"].map(|path| ("app.t04".to_owned(), path.to_owned()));
    assert_eq!(kept.paths("done").await.unwrap(), fields);
}

/// Replaces times, ids and values of one machine by constants, so that two runs write the same.
fn constant(value: &Bson, ids: &mut Vec<ObjectId>) -> Bson {
    match value {
        Bson::DateTime(at) if at.timestamp_millis() > 1_750_000_000_000 => {
            DateTime::from_millis(1_790_000_000_000).into()
        }
        Bson::Timestamp(at) if at.time > 1_750_000_000 => Timestamp { time: 1_790_000_000, increment: 1 }.into(),
        Bson::ObjectId(id) if *id != ObjectId::from_bytes([1; 12]) => nth(*id, ids).into(),
        Bson::String(text) => match ObjectId::parse_str(text) {
            Ok(id) => nth(id, ids).to_hex().into(),
            Err(_) => text.clone().into(),
        },
        Bson::Binary(binary) if binary.subtype == BinarySubtype::Generic => value.clone(),
        Bson::Binary(_) => Bson::String("the UUID of `positions`".to_owned()),
        Bson::Array(values) => values.iter().map(|value| constant(value, ids)).collect::<Vec<_>>().into(),
        Bson::Document(fields) => fields
            .iter()
            .map(|(name, value)| {
                let value = match name.as_str() {
                    "host" => Bson::String("host".to_owned()),
                    "process" => Bson::Int64(1),
                    "program" => Bson::String("0.1.0".to_owned()),
                    _ => constant(value, ids),
                };
                (name.clone(), value)
            })
            .collect::<Document>()
            .into(),
        other => other.clone(),
    }
}

fn nth(id: ObjectId, ids: &mut Vec<ObjectId>) -> ObjectId {
    let place = ids.iter().position(|known| *known == id).unwrap_or_else(|| {
        ids.push(id);
        ids.len() - 1
    });
    let mut bytes = [0xAA; 12];
    bytes[11] = u8::try_from(place).unwrap();
    ObjectId::from_bytes(bytes)
}

fn as_text(documents: &[Document]) -> String {
    let mut ids = Vec::new();
    let json = documents.iter().map(|document| constant(&document.clone().into(), &mut ids).into_canonical_extjson());
    format!("{:#}\n", serde_json::Value::Array(json.collect()))
}

#[tokio::test]
async fn this_version_writes_its_golden_documents() {
    let test = denormd_fixture::database().await;
    write(&test).await;
    for collection in COLLECTIONS {
        let mut written = all(&test.database(), collection).await;
        // Random values must not determine the order.
        if collection == "instances" {
            written.sort_by_key(|document| document.get_i64("leads").is_err());
        }
        let written = as_text(&written);
        let file = folder(WRITTEN).join(format!("{collection}.json"));
        if std::env::var("DENORMD_GOLDEN").is_ok_and(|what| what == "write") {
            fs::create_dir_all(folder(WRITTEN)).unwrap();
            fs::write(&file, &written).unwrap();
        }
        assert_eq!(written, fs::read_to_string(&file).unwrap(), "{collection}: what is stored has changed");
    }
}

/// Puts golden documents where this version reads its state.
async fn restore(test: &TestDb, version: &str) -> Server {
    let server = Server::new(test.client.clone());
    // The positions belong to this cluster.
    Store::open(&server, &test.name, "another").await.unwrap();
    let positions =
        test.database().run_command(doc! {"listCollections": 1, "filter": {"name": "positions"}}).await.unwrap();
    let found = positions.get_document("cursor").unwrap().get_array("firstBatch").unwrap()[0].as_document().unwrap();
    let uuid = found.get_document("info").unwrap().get("uuid").unwrap();
    // The first version kept no values.
    let is_known = |collection: &&str| **collection != *"kept" || version != "1";
    for collection in COLLECTIONS.into_iter().filter(is_known) {
        let mut documents = golden(version, collection);
        for document in &mut documents {
            if document.contains_key("cluster") {
                document.insert("cluster", uuid.clone());
            }
            // The commands still wait for their requests.
            for time in ["asked", "heard"].into_iter().filter(|_| collection == "requests") {
                if document.contains_key(time) {
                    document.insert(time, bson::DateTime::now());
                }
            }
        }
        test.database().collection(collection).insert_many(documents).await.unwrap();
    }
    server
}

/// The names in a document, each with its path. The elements of an array share one path.
fn names(value: &serde_json::Value, at: &str, out: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                // The reason of a dead letter is a name here.
                let way =
                    if at.ends_with(".dead_letter_reasons") { format!("{at}.REASON") } else { format!("{at}.{name}") };
                names(value, &way, out);
                out.insert(way);
            }
        }
        serde_json::Value::Array(elements) => elements.iter().for_each(|element| names(element, at, out)),
        _ => {}
    }
}

/// The leader's report for the standbys: a running pair writes no name that the golden document lacks, and each of its
/// names is read and written again.
#[tokio::test(flavor = "multi_thread")]
async fn a_leaders_report_is_read_and_written_as_it_was() {
    let golden = golden(WRITTEN, "reports").remove(0);
    let stored = golden.get("status").cloned().unwrap().into_relaxed_extjson();
    let status: Status = serde_json::from_value(stored.clone()).unwrap();
    assert_eq!(serde_json::to_value(status).unwrap(), stored);

    let test = denormd_fixture::database().await;
    let _pair = crate::cluster::standbys::leader_and_standby(&test).await;
    let reports = test.beside("state").collection::<Document>("reports");
    let written = until("a leader's report", async || reports.find_one(doc! {}).await.ok()?).await;
    let fields = |document: &Document| document.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(fields(&written), fields(&golden));
    assert_eq!(fields(written.get_document("_id").unwrap()), fields(golden.get_document("_id").unwrap()));
    let (mut known, mut found) = (BTreeSet::new(), BTreeSet::new());
    names(&stored, "status", &mut known);
    names(&written.get("status").cloned().unwrap().into_relaxed_extjson(), "status", &mut found);
    let new: Vec<&String> = found.difference(&known).collect();
    assert!(new.is_empty(), "names that tests/golden/{WRITTEN}/reports.json lacks: {new:?}");
}

fn expected(name: &str, definition: Document, state: RuleState) -> (String, RuleRecord) {
    let removals_agreed = matches!(state, RuleState::Backfilling { agreed: true, .. });
    let record = RuleRecord {
        definition,
        retired: Vec::new(),
        agreed: None,
        source_seen: true,
        source_uuid: None,
        released: None,
        state,
        degraded: false,
        progress: None,
        noticed: 0,
        generation: 1,
        removals_agreed,
        awaiting: false,
        keeping: None,
        undone: Vec::new(),
    };
    (name.to_owned(), record)
}

#[tokio::test]
async fn rule_states_are_read() {
    for version in READ {
        rule_states(version).await;
    }
}

async fn rule_states(version: &str) {
    let test = denormd_fixture::database().await;
    let server = restore(&test, version).await;
    let plan = planned();
    let store = Store::open(&server, &test.name, DEPLOYMENT).await.unwrap();
    let mut known = store.rules(&server).await.unwrap();
    known.sort_by(|(a, _), (b, _)| a.cmp(b));
    let of = |name: &str, state: RuleState| expected(name, rule(&plan, name).definition.clone(), state);
    let mut states = vec![
        expected("absent", rule(&plan, "pending").definition.clone(), RuleState::Removed),
        of(
            "begun",
            RuleState::Backfilling { after: Some(Bson::String("t-17".to_owned())), in_sources: false, agreed: false },
        ),
        of("bereft", RuleState::Blocked(BlockReason::SourceGone)),
        of("braked", RuleState::Blocked(BlockReason::RemovalLimit)),
        of("changed", RuleState::Live),
        of("done", RuleState::Live),
        of("manual", RuleState::AwaitingBackfill),
        of("paused", RuleState::Paused { until: None, blocked: None }),
        of(
            "paused-for-a-while",
            RuleState::Paused { until: Some(DateTime::from_millis(1_790_000_000_000)), blocked: None },
        ),
        of("pending", RuleState::BACKFILL),
        of("released", RuleState::Backfilling { after: None, in_sources: false, agreed: version != "1" }),
        of("suspended", unavailable()),
    ];
    // The first version had no agreements.
    let agreed = version != "1";
    if agreed {
        let definition = rule(&plan, "pending").definition.clone();
        states.insert(
            1,
            expected("adopted", definition.clone(), RuleState::Backfilling { after: None, in_sources: false, agreed }),
        );
        states.insert(2, expected("adopting", definition.clone(), RuleState::Blocked(adoption())));
        let place = states.iter().position(|(name, _)| name == "pending").unwrap();
        let paused = RuleState::Paused { until: None, blocked: Some(BlockReason::SourceGone) };
        states.insert(place, expected("paused-without-source", definition.clone(), paused));
        states.push(expected("suspended-waiting", definition, unavailable()));
    }
    for (name, state) in &mut states {
        match name.as_str() {
            "adopted" => {
                state.source_seen = false;
                state.generation = 2;
                state.agreed = Some(state.definition.clone());
            }
            "absent" => {
                state.source_seen = false;
                // Since then, a rule that leaves the config gets a generation of its own.
                state.generation += i64::from(version != "1");
            }
            "adopting" => state.source_seen = false,
            "suspended-waiting" => (state.source_seen, state.generation, state.awaiting) = (false, 2, true),
            "paused-without-source" => (state.source_seen, state.generation) = (false, 2),
            "pending" => {
                state.source_seen = false;
                if version != "1" {
                    (state.keeping, state.undone) = (Some(keeping()), vec![undone()]);
                }
            }
            "begun" => (state.noticed, state.progress) = (1, Some((17, None))),
            "done" => state.progress = Some((20, Some(20))),
            "bereft" | "paused" | "paused-for-a-while" => state.generation = 2,
            "released" => {
                state.generation = 2;
                state.source_seen = false;
                state.released = Some(ClusterTime { seconds: 1_790_000_000, increment: 1 });
            }
            "changed" => {
                state.generation = 2;
                state.progress = Some((20, Some(20)));
                let mut before = state.definition.clone();
                before.remove("shadow");
                state.retired = vec![before];
            }
            _ => {}
        }
    }
    // The first version stored no UUID of a source.
    for (_, state) in &mut states {
        state.source_uuid = (version != "1" && state.source_seen).then(|| Bson::String("a UUID".to_owned()));
    }
    assert_eq!(known, states);
}

/// Positions, and unfinished work.
#[tokio::test]
async fn positions_and_work_are_read() {
    for version in READ {
        positions_and_work(version).await;
    }
}

async fn positions_and_work(version: &str) {
    let test = denormd_fixture::database().await;
    let server = restore(&test, version).await;
    let plan = planned();
    let store = Store::open(&server, &test.name, DEPLOYMENT).await.unwrap();
    let pipeline = [doc! {"$match": {"ns": {"db": "app", "coll": "s"}}}];
    let found =
        async |database: &str, pipeline: &[Document]| store.position(&server, database, pipeline).await.unwrap();
    let token = doc! {"_data": "826553F10000000007"};
    assert_eq!(found("app", &pipeline).await, Some(position(Some(token))));
    assert_eq!(found("app", &[]).await, Some(position(None)), "a token is of one pipeline");
    assert_eq!(found("other", &pipeline).await, Some(position(None)));

    let fan_outs = FanOuts { database: test.name.clone(), deployment: DEPLOYMENT.to_owned() };
    let mut open = fan_outs.all(&server, &plan).await.unwrap();
    open.sort_by_key(|fan_out| fan_out.subject.task);
    let parts = open.iter().map(|job| (job.subject.task, job.subject.key.clone(), job.after.clone(), job.committed));
    let x = Key::one(Bson::String("x".to_owned()));
    let one = (Task::Value, Key::one(Bson::Int32(1)), Some(Bson::Int64(5000)), Some(1_700_000_000_000));
    assert_eq!(
        parts.collect::<Vec<_>>(),
        [one, (Task::Parents, x.clone(), None, None), (Task::Holders, x, None, None)]
    );

    let mut asked = store.requests(&server, &[]).await.unwrap();
    // The first version knew no `undo`.
    assert_eq!(asked.len(), if version == "1" { 2 } else { 3 }, "one is refused");
    let path = FieldPath::parse("lines.$[].name").unwrap();
    assert_eq!(asked.remove(0).work, RequestedWork::Reconcile(vec![Bson::Int32(1), Bson::String("b".to_owned())]));
    assert_eq!(
        asked.remove(0).work,
        RequestedWork::Prune(vec![Retired { collection: "app.t04".to_owned(), path, filter: None }])
    );
    assert!(asked.iter().all(|asked| asked.work == RequestedWork::Undo));
    let refused = golden(version, "requests").iter().find(|request| request.contains_key("refused")).cloned().unwrap();
    let error = store.is_done(&server, refused.get_object_id("together").unwrap()).await.unwrap_err();
    assert_eq!(error.message, "the leader refuses this: a rule owns it");

    let repaired = u64::from(version != "1");
    let tally = Tally { compared: 500, differing: 4, repaired, undecided: 3, refused: 2, resumed: false };
    for (name, after, done) in [("done", Some(Bson::Int32(7)), false), ("begun", None, true)] {
        let progress = store.check(&server, rule(&plan, name)).await.unwrap();
        assert_eq!(progress, Some(CheckProgress { after, done, tally: tally.clone() }));
    }
    assert_eq!(store.check(&server, rule(&plan, "manual")).await.unwrap(), None);
}

#[tokio::test]
async fn dead_letters_are_read() {
    for version in READ {
        dead_letters(version).await;
    }
}

async fn dead_letters(version: &str) {
    let test = denormd_fixture::database().await;
    let server = restore(&test, version).await;
    let plan = planned();
    let of_rule = Chosen { rule: Some("done".to_owned()), key: None };
    let found = dead_letters_of(&test.name).find(&server, &of_rule, 0).await.unwrap();
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found.len(), TASKS.len() + 1);
    for (task, name) in TASKS {
        assert_eq!((task.name().to_owned(), Task::named(name)), (name.to_owned(), Some(task)));
        assert!(
            found.iter().any(|dead_letter| dead_letter.requests(rule(&plan, "done")).all(|one| one.task == task)),
            "{name}"
        );
    }
    let at = DateTime::from_millis(1_790_000_000_000);
    for dead_letter in found {
        assert_eq!(dead_letter.key, Key::new(vec![Bson::Int32(1), Bson::Null]));
        assert_eq!((dead_letter.rule.as_str(), dead_letter.reason.as_str()), ("done", "Document failed validation"));
        assert_eq!((dead_letter.first, dead_letter.last), (at, at));
        let expected = match dead_letter.target {
            Some(_) => (2, 0, Some("lines.0")),
            None => (1, at.timestamp_millis() + 5000, None),
        };
        assert_eq!((dead_letter.attempts, dead_letter.due, dead_letter.path.as_deref()), expected);
    }
}

/// Leases and instances.
#[tokio::test]
async fn leases_instances_and_formats_are_read() {
    for version in READ {
        leases_instances_and_formats(version).await;
    }
}

async fn leases_instances_and_formats(version: &str) {
    let test = denormd_fixture::database().await;
    let server = restore(&test, version).await;
    let plan = planned();
    assert_eq!(format::check(&server, &test.name, DEPLOYMENT).await.unwrap(), 1);
    assert_eq!(format::check(&server, &test.name, "divided").await.unwrap(), 3);
    assert_eq!(highest_term(&server, &test.name, "led-before").await.unwrap(), 41);
    assert_eq!(highest_term(&server, &test.name, DEPLOYMENT).await.unwrap(), 2);
    let ends = async |id: &str, in_millis: i64| {
        let at = DateTime::from_millis(DateTime::now().timestamp_millis() + in_millis);
        let leases = server.collection(&test.name, lease::COLLECTION);
        leases.update_one(doc! {"_id": id}, doc! {"$set": {"until": at}}).await.unwrap();
    };
    ends(DEPLOYMENT, 3_600_000).await;
    assert!(lease::is_held(&server, &test.name, &[DEPLOYMENT.to_owned()]).await.unwrap(), "until its end");
    let holders = lease::holders(&server, &test.name, DEPLOYMENT).await.unwrap();
    assert_eq!(holders[DEPLOYMENT].id.is_empty(), version == "1", "release 0.1 writes no id");
    let instance = &Identity::of_this_process();
    let lease = Lease::new(Server::new(test.client.clone()), &test.name, DEPLOYMENT, instance, LEASE);
    assert!(lease.try_lead().await.unwrap().is_none());
    let given_back = Lease::new(Server::new(test.client.clone()), &test.name, "given-back", instance, LEASE);
    ends("given-back", 0).await;
    assert_eq!(given_back.try_lead().await.unwrap().unwrap().term(), 2);

    let prints: Vec<String> = [1, 2].map(|partitions| fingerprint(&plan, partitions)).into();
    for known in golden(version, "plans") {
        let print = known.get_document("_id").unwrap().get_str("plan").unwrap();
        assert!(
            prints.iter().any(|known| known == print),
            "an instance of another version would seem to have other rules"
        );
    }
    let instances = server.collection(&test.name, "instances");
    let seen = doc! {"$set": {"seen": DateTime::from_millis(DateTime::now().timestamp_millis() + 3_600_000)}};
    instances.update_many(doc! {}, seen).await.unwrap();
    let member = Member::join(Server::new(test.client.clone()), &test.name, DEPLOYMENT, instance, TTL, &plan, 2);
    assert_eq!(member.others().await.unwrap(), [1]);
    assert!(!member.is_outdated().await.unwrap());
}

#[tokio::test]
async fn the_timeline_is_read() {
    let test = denormd_fixture::database().await;
    let journal = Journal::new(Server::new(test.client.clone()), &test.name, DEPLOYMENT);
    journal.open().await.unwrap();
    let mut event =
        Event::new(1_700_000_000_000, "backfill_done", vec!["done".to_owned()], "done: 20 targets".to_owned());
    event.id = "aaaaaaaaaaaaaaaaaaaaaa00".to_owned();
    event.instance = "host:1".to_owned();
    journal.write(std::slice::from_ref(&event)).await.unwrap();
    let written = as_text(&all(&test.database(), "events").await);
    let file = folder(WRITTEN).join("events.json");
    if std::env::var("DENORMD_GOLDEN").is_ok_and(|what| what == "write") {
        fs::create_dir_all(folder(WRITTEN)).unwrap();
        fs::write(&file, &written).unwrap();
    }
    assert_eq!(written, fs::read_to_string(&file).unwrap());
    for version in READ {
        test.database().collection::<Document>("events").drop().await.unwrap();
        journal.open().await.unwrap();
        test.database().collection("events").insert_many(golden(version, "events")).await.unwrap();
        assert_eq!(journal.read(0, 10).await.unwrap(), std::slice::from_ref(&event));
    }
    // One that cannot be read was left out. The others are still there.
    let later = doc! {"_id": 7, "deployment": DEPLOYMENT, "time": DateTime::from_millis(event.time + 1), "what": 7};
    test.database().collection("events").insert_one(later).await.unwrap();
    let [first, second] = &journal.read(0, 10).await.unwrap()[..] else { panic!("two events") };
    assert_eq!((first, second.what.as_str(), second.time), (&event, "unreadable", event.time + 1));
    assert!(second.text.starts_with("the event with the `_id` 7 cannot be read: "), "{}", second.text);
}

/// A checkpoint, a decision or a format that could not be read once counted as missing.
#[tokio::test]
async fn state_that_cannot_be_read_is_an_error() {
    let test = denormd_fixture::database().await;
    let server = restore(&test, WRITTEN).await;
    let set = async |collection: &str, field: &str, value: bson::Bson| {
        let documents = test.database().collection::<Document>(collection);
        documents.update_many(doc! {}, doc! {"$set": {field: value}}).await.unwrap();
    };
    let store = Store::open(&server, &test.name, DEPLOYMENT).await.unwrap();
    set("positions", "time", 7.into()).await;
    let databases = test.database().collection::<Document>("positions").distinct("_id.stream", doc! {}).await.unwrap();
    let error = store.position(&server, databases[0].as_str().unwrap(), &[]).await.unwrap_err();
    assert!(error.message.contains("in the state collection `positions` cannot be read"), "{}", error.message);

    let decisions = Decisions { server: &server, database: &test.name, deployment: DEPLOYMENT };
    decisions.decide("r", Decision { definition: doc! {"a": 1}, earlier: None, block: None }).await.unwrap();
    set("adoptions", "block", "no".into()).await;
    let error = decisions.of("r").await.unwrap_err();
    assert!(error.message.contains("`adoptions` cannot be read: `block` is no document"), "{}", error.message);

    set("rules", "term", "no".into()).await;
    let error = highest_term(&server, &test.name, DEPLOYMENT).await.unwrap_err();
    assert!(error.message.contains("`rules` cannot be read: its term is no number"), "{}", error.message);

    set("checks", "compared", "no".into()).await;
    let error = store.check(&server, rule(&planned(), "done")).await.unwrap_err();
    assert!(error.message.contains("`checks` cannot be read"), "{}", error.message);

    // A missing value would have this fingerprint, and `undo` would remove the field.
    let kept = kept_of(&server, &test.name);
    set("kept", "was", "no".into()).await;
    let error = kept.page("done", None).await.unwrap_err();
    assert!(
        error.message.contains("`kept` cannot be read: a field is missing, or of another type"),
        "{}",
        error.message
    );
    set("kept", "not_kept", "no".into()).await;
    let error = kept.count_not_kept("done").await.unwrap_err();
    assert!(error.message.contains("`kept` cannot be read"), "{}", error.message);

    let databases = databases.iter().map(|database| database.as_str().unwrap().to_owned()).collect();
    let error = store.applied(&server, &databases).await.unwrap_err();
    assert!(error.message.contains("`positions` cannot be read: a time is no timestamp"), "{}", error.message);

    let refused =
        test.database().collection::<Document>("requests").find_one(doc! {"refused": {"$exists": true}}).await;
    let together = refused.unwrap().unwrap().get_object_id("together").unwrap();
    set("requests", "refused", 7.into()).await;
    let error = store.is_done(&server, together).await.unwrap_err();
    assert!(error.message.contains("`requests` cannot be read"), "{}", error.message);

    set("leases", "until", DateTime::from_millis(DateTime::now().timestamp_millis() + 3_600_000).into()).await;
    assert_eq!(lease::holders(&server, &test.name, DEPLOYMENT).await.unwrap()[DEPLOYMENT].instance, "host:1");
    set("leases", "process", "no".into()).await;
    let error = lease::holders(&server, &test.name, DEPLOYMENT).await.unwrap_err();
    assert!(error.message.contains("`leases` cannot be read"), "{}", error.message);

    set("instances", "seen", DateTime::now().into()).await;
    assert_eq!(instances(&server, &test.name, DEPLOYMENT, Duration::from_secs(600)).await.unwrap().len(), 2);
    set("instances", "process", "no".into()).await;
    let error = instances(&server, &test.name, DEPLOYMENT, Duration::from_secs(600)).await.unwrap_err();
    assert!(error.message.contains("`instances` cannot be read"), "{}", error.message);

    set("formats", "version", "no".into()).await;
    let error = format::check(&server, &test.name, DEPLOYMENT).await.unwrap_err();
    assert!(error.message.contains("`formats` cannot be read"), "{}", error.message);
}
