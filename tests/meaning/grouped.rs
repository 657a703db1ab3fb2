//! One statement for many keys writes the same as one statement for each of them, whatever the shape of the targets.

use std::collections::{BTreeMap, HashSet};

use bson::{Bson, Document, RawBson, RawDocumentBuf, bson, doc};
use denormd_engine::{
    reconcile::{
        group::{self, Guarded, Member, Shape, Size},
        read,
        statement::{self, Part, Statement},
        value::{Desired, Field},
    },
    request::Scope,
};
use denormd_model::key::Key;
use denormd_rules::plan::Rule;
use futures_util::StreamExt;
use mongodb::Database;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use crate::support::daemon::PATIENCE;
use crate::support::daemon::rule;

/// Rules whose keys share statements: fields at the top, in a subdocument, two levels down, with a filter, with
/// converted references, keyed by the target, in array elements.
const RULES: [&str; 7] = [
    "copy: { source: s, target: t, match: { part: _id }, set: { name: $name, price: $price } }",
    "copy: { source: s, target: t, match: { part: _id }, set: { info.name: $name, info.price: $price } }",
    "copy: { source: s, target: t, match: { part: _id }, set: { a.b.name: $name, price: $price } }",
    "copy: { source: s, target: { collection: t, where: { open: true } }, match: { part: _id }, set: { name: $name, info.price: $price } }",
    "copy: { source: s, target: t, match: { part: _id }, key_type: string, set: { name: $name, price: $price } }",
    "aggregate: { source: s, target: t, match: { _id: t }, set: { name: { $max: $name }, info.price: { $max: $price } } }",
    r#"copy: { source: s, target: t, match: { "parts.$[].id": _id }, set: { "parts.$[].name": $name, "parts.$[].price": $price } }"#,
];
const ROUNDS: usize = 40;
/// The assumed shape of the targets: few and small, so that statements are shared.
const SMALL: Shape = Shape { targets: Some(1.0), size: Some(Size { bytes: 100.0, others: 60.0 }) };

/// References, some of which are equal to the server.
fn references() -> Vec<Bson> {
    vec![
        bson!(1),
        bson!(2),
        Bson::Int64(3),
        bson!(4.5),
        bson!(f64::NAN),
        bson!("1"),
        bson!("a"),
        bson!("A"),
        bson!("0123456789abcdef01234567"),
        Bson::ObjectId(bson::oid::ObjectId::parse_str("0123456789abcdef01234567").unwrap()),
        bson!(true),
        bson!({"x": 1}),
        bson!({"x": 1, "y": [1, 2]}),
        Bson::DateTime(bson::DateTime::from_millis(5)),
        Bson::Binary(bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![1] }),
        Bson::Decimal128("0.1".parse().unwrap()),
        Bson::RegularExpression(bson::Regex { pattern: "a".try_into().unwrap(), options: "".try_into().unwrap() }),
        bson!({"$x": 1}),
        Bson::MaxKey,
    ]
}

fn values() -> Vec<Bson> {
    vec![
        bson!(1),
        bson!(1.0),
        Bson::Int64(1),
        Bson::Null,
        bson!("$name"),
        bson!("$$ROOT"),
        bson!([]),
        bson!([1, {"v": 2}]),
        bson!({}),
        bson!({"v": 1, "w": {"x": []}}),
        bson!({"$add": [1, 2]}),
        bson!({"a.b": 1}),
        bson!(f64::NAN),
        bson!(0.0),
        bson!(-0.0),
        Bson::Decimal128("1".parse().unwrap()),
        Bson::Decimal128("1.0".parse().unwrap()),
        Bson::MinKey,
    ]
}

/// Possible values of the outermost document around an owned field.
fn around(random: &mut StdRng) -> Option<Bson> {
    let all = [
        None,
        None,
        Some(bson!({})),
        Some(bson!({"name": 1, "other": [1]})),
        Some(bson!({"b": {"name": 7}})),
        Some(bson!({"b": 5})),
        Some(Bson::Null),
        Some(bson!(5)),
        Some(bson!([{"name": 1}, 2])),
    ];
    // Usually nothing prevents the write: otherwise no shared statement would ever succeed.
    if random.random_range(0..6) > 0 {
        all[random.random_range(0..4)].clone()
    } else {
        all.choose(random).unwrap().clone()
    }
}

fn element(random: &mut StdRng) -> Bson {
    let reference = references().choose(random).unwrap().clone();
    match random.random_range(0..12) {
        0 => reference,
        1 => Bson::Array(vec![bson!({"id": reference})]),
        2 => bson!({"id": [reference], "name": 1}),
        3 => bson!({"name": 1}),
        4 => bson!({"id": null, "name": 1}),
        5 => bson!({"id": 2.0, "name": {"x": 1}, "price": [1], "other": 1}),
        _ => bson!({"id": reference, "n": 1}),
    }
}

fn target(id: Bson, random: &mut StdRng) -> Document {
    let references = references();
    let mut target = doc! {"_id": id, "open": random.random_bool(0.7), "other": "untouched"};
    let reference = match random.random_range(0..20) {
        0 => None,
        1 => Some(Bson::Null),
        2 => Some(Bson::Array(vec![references.choose(random).unwrap().clone(), bson!(1)])),
        3 => Some(Bson::Array(vec![bson!([1])])),
        4 => Some(bson!(1.0)),
        5 => Some(Bson::Int64(2)),
        6 => Some(Bson::Decimal128("3.0".parse().unwrap())),
        _ => references.choose(random).cloned(),
    };
    target.extend(reference.map(|value| ("part".to_owned(), value)));
    for name in ["name", "price"] {
        if random.random_bool(0.6) {
            target.insert(name, values().choose(random).unwrap().clone());
        }
    }
    let elements: Vec<Bson> = (0..random.random_range(0..5)).map(|_| element(random)).collect();
    target.insert("parts", if random.random_bool(0.9) { Bson::Array(elements) } else { element(random) });
    for name in ["info", "a"] {
        target.extend(around(random).map(|value| (name.to_owned(), value)));
    }
    target
}

/// A document as text, independent of the order of its fields.
fn text(value: &Bson) -> String {
    match value {
        Bson::Document(doc) => {
            let fields: BTreeMap<&String, String> = doc.iter().map(|(name, value)| (name, text(value))).collect();
            format!("{fields:?}")
        }
        other => other.clone().into_canonical_extjson().to_string(),
    }
}

struct Bench {
    database: Database,
}

impl Bench {
    async fn fill(&self, targets: &[Document]) {
        for name in ["alone", "together"] {
            let collection = self.database.collection::<Document>(name);
            collection.delete_many(doc! {}).await.unwrap();
            collection.insert_many(targets).await.unwrap();
        }
    }

    /// Runs one statement; returns true if the server accepted it.
    async fn run(&self, collection: &str, statement: Statement) -> bool {
        let Statement { deletes, raw } = statement;
        assert!(!deletes, "{raw:?}");
        let statement = Document::try_from(raw.as_ref()).unwrap();
        let reply = self.database.run_command(doc! {"update": collection, "updates": [statement]}).await.unwrap();
        !reply.contains_key("writeErrors")
    }

    async fn run_alone(&self, collection: &str, rule: &Rule, member: &Member<'_>) {
        let desired = Desired::Fields(member.fields.to_vec());
        for statement in statement::of_value(rule, member.key, member.scope, &desired).unwrap() {
            self.run(collection, statement).await;
        }
    }

    /// The targets that the rule takes, with their guards.
    async fn guards(&self, rule: &Rule, ids: &[Key]) -> Vec<(Key, RawDocumentBuf)> {
        let mut command = read::targets(rule, &ids.iter().collect::<Vec<_>>());
        command.extend(doc! {"aggregate": "alone", "cursor": {}});
        let reply = self.database.run_command(command).await.unwrap();
        let rows = reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
        let guarded = |row: &Bson| {
            let row = row.as_document().unwrap();
            let guard = RawDocumentBuf::try_from(row.get_document(read::GUARD).unwrap()).unwrap();
            (Key::one(row.get("_id").unwrap().clone()), guard)
        };
        rows.iter().map(guarded).collect()
    }

    async fn replace(&self, target: &Document) {
        for name in ["alone", "together"] {
            let collection = self.database.collection::<Document>(name);
            let id = target.get("_id").unwrap();
            let replaced = collection.replace_one(doc! {"_id": {"$eq": id}}, target).await.unwrap();
            assert_eq!(replaced.matched_count, 1, "{target}");
        }
    }

    async fn found(&self, collection: &str) -> Vec<String> {
        let mut cursor =
            self.database.collection::<Document>(collection).find(doc! {}).sort(doc! {"_id": 1}).await.unwrap();
        let mut out = Vec::new();
        while cursor.advance().await.unwrap() {
            out.push(text(&Bson::Document(cursor.deserialize_current().unwrap())));
        }
        out
    }
}

fn member_of(fields: &[Bson], random: &mut StdRng) -> Vec<Field> {
    let raw = |value: &Bson| {
        let doc = RawDocumentBuf::try_from(&doc! {"v": value.clone()}).unwrap();
        RawBson::from(doc.get("v").unwrap().unwrap())
    };
    fields.iter().map(|value| random.random_bool(0.85).then(|| raw(value))).collect()
}

#[tokio::test]
async fn a_shared_statement_writes_what_statements_of_their_own_write() {
    let test = denormd_fixture::database().await;
    let bench = Bench { database: test.database() };
    let mut random = StdRng::seed_from_u64(2026);
    for text in RULES {
        let rule = rule(text);
        assert!(group::is_possible(&rule), "{text}");
        let (mut taken, mut refused, mut shared) = (0, 0, 0);
        for _ in 0..ROUNDS {
            let by_id = rule.reference.keyed_by_target_id();
            let ids: Vec<Bson> = if by_id {
                references()
                    .into_iter()
                    .filter(|id| !matches!(id, Bson::RegularExpression(_) | Bson::Document(_)))
                    .collect()
            } else {
                (0..16).map(Bson::Int32).collect()
            };
            let targets: Vec<Document> = ids.iter().map(|id| target(id.clone(), &mut random)).collect();
            bench.fill(&targets).await;
            let mut keys: Vec<Key> = Vec::new();
            for value in references() {
                let value =
                    if text.contains("key_type") && !matches!(value, Bson::String(_)) { bson!("1") } else { value };
                if random.random_bool(0.5) && !keys.contains(&Key::one(value.clone())) {
                    keys.push(Key::one(value));
                }
            }
            let named = random.random_bool(0.5) && !by_id;
            // The same for all keys: together they write the targets that any of them names.
            let some = (0..16).filter(|_| random.random_bool(0.7)).map(|id| Key::one(Bson::Int32(id)));
            let some = Scope::Named(some.collect::<HashSet<Key>>());
            let scope = if named { some } else { Scope::All };
            let pool = values();
            let wanted: Vec<(Key, Scope, Vec<Field>)> = keys
                .into_iter()
                .map(|key| {
                    let values: Vec<Bson> =
                        rule.owned().iter().map(|_| pool.choose(&mut random).unwrap().clone()).collect();
                    (key, scope.clone(), member_of(&values, &mut random))
                })
                .collect();
            let members: Vec<Member> =
                wanted.iter().map(|(key, scope, fields)| Member { key, scope, fields }).collect();
            for member in &members {
                bench.run_alone("alone", &rule, member).await;
            }
            let (fitting, others): (Vec<Member>, Vec<Member>) =
                members.into_iter().partition(|member| group::fits(&rule, SMALL, member));
            for member in others {
                bench.run_alone("together", &rule, &member).await;
            }
            for group in group::divide(fitting.into_iter().map(|member| ((), member)).collect(), group::KEYS) {
                let members: Vec<Member> = group.into_iter().map(|((), member)| member).collect();
                shared += usize::from(members.len() > 1);
                if bench.run("together", group::statement(&rule, &members).unwrap()).await {
                    taken += 1;
                    continue;
                }
                refused += 1;
                for member in &members {
                    bench.run_alone("together", &rule, member).await;
                }
            }
            assert_eq!(bench.found("together").await, bench.found("alone").await, "{text}: {wanted:?} of {targets:?}");
        }
        assert!(shared > ROUNDS / 2 && taken > 3, "{text}: {shared} shared, {taken} taken, {refused} refused");
        let below = rule.owned().iter().any(|path| path.segments().len() > 1 && !path.has_each());
        assert_eq!(refused > 0, below, "{text}: what is in the way below a document is refused, and nothing else");
    }
}

/// Rules whose targets share statements: the values depend on the target, or on several references of it; fields at the
/// top and below, with a filter.
const RULES_BY_ID: [&str; 6] = [
    "copy: { source: s, target: t, match: { part: _id }, set: { name: { $concat: [$name, $$target.other] }, price: $price } }",
    "copy: { source: s, target: t, match: { part: _id }, set: { info.name: $name, price: $$target.open } }",
    "copy: { source: s, target: { collection: t, where: { open: true } }, match: { part: _id }, set: { a.b.name: $$target.info.other } }",
    "aggregate: { source: { collection: s, where: { $expr: { $lt: [$price, $$target.other] } } }, target: t, match: { _id: part }, set: { price: { $sum: $price } } }",
    r#"copy: { source: s, target: t, match: { "parts.$[].id": _id }, into: name, element: $name }"#,
    r#"aggregate: { source: s, target: t, match: { "parts.$[].id": "of.$[]" }, set: { info.name: { $last: $name }, info.price: { $sum: $price } } }"#,
];

/// A target that was changed since it was read is left alone by both.
#[tokio::test]
async fn a_shared_statement_of_targets_writes_what_statements_of_their_own_write() {
    let test = denormd_fixture::database().await;
    let bench = Bench { database: test.database() };
    let mut random = StdRng::seed_from_u64(2033);
    for text in RULES_BY_ID {
        let rule = rule(text);
        assert!(group::is_possible_by_id(&rule), "{text}");
        let (mut taken, mut refused, mut changed) = (0, 0, 0);
        for _ in 0..ROUNDS {
            let ids = references().into_iter().filter(|id| !matches!(id, Bson::RegularExpression(_)));
            let targets: Vec<Document> =
                ids.filter(|id| *id != bson!({"$x": 1})).map(|id| target(id, &mut random)).collect();
            bench.fill(&targets).await;
            let ids: Vec<Key> = targets.iter().map(|target| Key::one(target.get("_id").unwrap().clone())).collect();
            let read = bench.guards(&rule, &ids).await;
            for id in &ids {
                if random.random_bool(0.8) {
                    continue;
                }
                let other = target(id.values()[0].clone(), &mut random);
                bench.replace(&other).await;
                changed += 1;
            }
            let pool = values();
            let wanted: Vec<(&Key, &RawDocumentBuf, Vec<Field>)> = read
                .iter()
                .map(|(id, guard)| {
                    let values: Vec<Bson> =
                        rule.owned().iter().map(|_| pool.choose(&mut random).unwrap().clone()).collect();
                    (id, guard, member_of(&values, &mut random))
                })
                .collect();
            let alone = async |collection: &str, target: &Guarded<'_>| {
                let desired = Desired::Fields(target.fields.to_vec());
                for statement in statement::of_target(&rule, target.id, target.guard, &desired).unwrap() {
                    bench.run(collection, statement).await;
                }
            };
            let all: Vec<Guarded> = wanted.iter().map(|(id, guard, fields)| Guarded { id, guard, fields }).collect();
            for target in &all {
                alone("alone", target).await;
            }
            let (sharing, others): (Vec<Guarded>, Vec<Guarded>) =
                all.into_iter().partition(|target| group::fits_by_id(&rule, SMALL, target));
            for target in &others {
                alone("together", target).await;
            }
            for targets in sharing.chunks(6) {
                if bench.run("together", group::statement_by_id(&rule, targets).unwrap()).await {
                    taken += 1;
                    continue;
                }
                refused += 1;
                for target in targets {
                    alone("together", target).await;
                }
            }
            assert_eq!(bench.found("together").await, bench.found("alone").await, "{text}: {wanted:?} of {targets:?}");
        }
        assert!(taken > ROUNDS / 4 && changed > ROUNDS, "{text}: {taken} taken, {refused} refused, {changed} changed");
        let below = rule.owned().iter().any(|path| path.segments().len() > 1);
        assert_eq!(refused > 0, below, "{text}: what is in the way below a document is refused, and nothing else");
    }
}

/// A statement that did not finish is restarted for the targets that do not hold the value yet, in parts of the
/// collection between any `_id`s.
#[tokio::test]
async fn what_is_left_of_a_statement_makes_all_targets_the_same() {
    let test = denormd_fixture::database().await;
    let bench = Bench { database: test.database() };
    let mut random = StdRng::seed_from_u64(2027);
    let mut bound = StdRng::seed_from_u64(2031);
    for text in RULES {
        let rule = rule(text);
        let (mut same, mut passed_over) = (0, 0);
        for _ in 0..ROUNDS {
            // Few references, so that many targets share one.
            let key = Key::one(references()[random.random_range(0..3)].clone());
            let id = |n: i32| match n % 3 {
                0 => Bson::Int32(n),
                1 => Bson::Double(f64::from(n)),
                _ => Bson::DateTime(bson::DateTime::from_millis(n.into())),
            };
            let mut targets: Vec<Document> = (0..40).map(|n| target(id(n), &mut random)).collect();
            // Zeros are equal but not identical.
            let zeros = random.random_bool(0.3);
            for target in targets.iter_mut().filter(|_| zeros) {
                target.extend(doc! {"name": 0.0, "price": 0.0});
            }
            bench.fill(&targets).await;
            let simple = random.random_bool(0.7);
            let mut pool = values();
            pool.retain(|value| !simple || !matches!(value, Bson::Document(_) | Bson::Array(_) | Bson::MinKey));
            let values: Vec<Bson> = rule.owned().iter().map(|_| pool.choose(&mut random).unwrap().clone()).collect();
            let values = if zeros { vec![bson!(-0.0); values.len()] } else { values };
            let desired = Desired::Fields(member_of(&values, &mut random));
            let some = (0..40).filter(|_| random.random_bool(0.5)).map(|n| Key::one(id(n)));
            let some = Scope::Named(some.collect::<HashSet<Key>>());
            let whole = statement::of_value(&rule, &key, &Scope::All, &desired).unwrap();
            let begun = statement::of_value(&rule, &key, &some, &desired).unwrap();
            passed_over += usize::from(statement::of_rest(&rule, &key, &desired, &Part::default()).unwrap() != whole);
            let bounds: Vec<Bson> = (0..bound.random_range(0..4)).map(|_| id(bound.random_range(0..40))).collect();
            let rest = Part::between(&bounds);
            let rest = rest.iter().flat_map(|part| statement::of_rest(&rule, &key, &desired, part).unwrap());
            let rest: Vec<Statement> = rest.collect();
            let mut taken = true;
            for (collection, statements) in [("alone", whole), ("together", begun), ("together", rest)] {
                for statement in statements {
                    taken &= bench.run(collection, statement).await;
                }
            }
            // A refusal by the server ends a statement at any point.
            if taken {
                same += 1;
                assert_eq!(
                    bench.found("together").await,
                    bench.found("alone").await,
                    "{text}: {desired:?} of {targets:?}"
                );
            }
        }
        assert!(same > ROUNDS / 8, "{text}: {same} were carried out");
        let elements = rule.owned().iter().any(|path| path.has_each());
        assert_eq!(passed_over > ROUNDS / 8, !elements, "{text}: {passed_over} pass over what is done");
    }
}

/// The `_id` index has the collection's collation. In a collection that ignores case it finds no text under the simple
/// collation, and the whole index would be scanned for each part.
#[test]
fn a_collection_is_not_parted_by_text() {
    for text in [bson!("b"), bson!({"name": "b"})] {
        assert_eq!(Part::between(&[bson!(1), text]), [Part::default()]);
    }
    assert_eq!(Part::between(&[bson!(1), bson!(2)]).len(), 3);
}

fn members<'a>(keys: &'a [Key], scope: &'a Scope, fields: &'a [Field]) -> Vec<Member<'a>> {
    keys.iter().map(|key| Member { key, scope, fields }).collect()
}

/// Readers of the targets' change stream receive the real changes, even if a target is hardly larger than the copied
/// values.
#[tokio::test]
async fn what_a_shared_statement_changes_is_logged_as_a_change() {
    let test = denormd_fixture::database().await;
    let bench = Bench { database: test.database() };
    let rule = rule(RULES[0]);
    let targets: Vec<Document> = (0..20).map(|id| doc! {"_id": id, "part": id % 5, "n": ""}).collect();
    bench.fill(&targets).await;
    let others = bson::serialize_to_vec(&targets[0]).unwrap().len();
    assert_eq!(others, 32, "the least that is shared");
    let collection = bench.database.collection::<Document>("together");
    let mut events = collection.watch().await.unwrap();
    for version in ["a", "another, which is much longer than what is around it", "short"] {
        let fields = vec![
            Some(RawBson::String(version.to_owned())),
            Some(RawBson::Int32(i32::try_from(version.len()).unwrap())),
        ];
        let keys: Vec<Key> = (0..5).map(|n| Key::one(Bson::Int32(n))).collect();
        let members = members(&keys, &Scope::All, &fields);
        let shape = Shape { targets: Some(4.0), size: Some(Size { bytes: 60.0, others: 32.0 }) };
        assert!(members.iter().all(|member| group::fits(&rule, shape, member)));
        assert!(bench.run("together", group::statement(&rule, &members).unwrap()).await);
        for _ in 0..targets.len() {
            let event = tokio::time::timeout(PATIENCE, events.next()).await;
            let event = event.expect("an event in time").expect("a stream").unwrap();
            assert_eq!(event.operation_type, mongodb::change_stream::event::OperationType::Update, "{event:?}");
        }
    }
}

#[test]
fn statements_are_divided_by_keys_bytes_and_kind_of_scope() {
    let rule = rule(RULES[0]);
    let large: Vec<Field> = vec![Some(RawBson::String("x".repeat(100_000))), None];
    let small: Vec<Field> = vec![Some(RawBson::Int32(1)), None];
    let keys: Vec<Key> = (0..120).map(|n| Key::one(Bson::Int32(n))).collect();
    let named = Scope::Named((0..10).map(|n| Key::one(Bson::Int32(n))).collect());
    let sizes = |members: Vec<Member>| -> Vec<usize> {
        group::divide(members.into_iter().map(|member| ((), member)).collect(), group::KEYS)
            .iter()
            .map(Vec::len)
            .collect()
    };
    assert_eq!(sizes(members(&keys, &Scope::All, &small)), [50, 50, 20]);
    assert_eq!(sizes(members(&keys[..5], &Scope::All, &large)), [2, 2, 1]);
    let both = [members(&keys[..3], &Scope::All, &small), members(&keys[..4], &named, &small)].concat();
    assert_eq!(sizes(both), [3, 4]);
    let member = Member { key: &keys[0], scope: &Scope::All, fields: &small };
    let fits = |shape| group::fits(&rule, shape, &member);
    assert!(fits(SMALL));
    assert!(!fits(Shape { targets: Some(100.0), ..SMALL }), "many targets of one key");
    let sized = |bytes, others| Shape { size: Some(Size { bytes, others }), ..SMALL };
    assert!(!fits(sized(10_000.0, 60.0)), "large targets");
    assert!(!fits(sized(50.0, 25.0)), "targets with nothing else in them");
    assert!(!fits(Shape::default()), "nothing is known");
}
