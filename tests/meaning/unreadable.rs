//! Documents that do not fit into Rust's strings, or into one reply of the server: they are copied like any other and
//! stop nothing.

use std::collections::BTreeSet;

use bson::{Binary, Bson, Document, RawDocumentBuf, doc, spec::BinarySubtype};
use denormd_engine::checkpoint::store::Store;
use denormd_engine::jobs::check::{Check, Scope};
use denormd_fixture::TestDb;

use crate::support::{
    daemon::{Daemon, all, config},
    process::Program,
};

/// The command with each `¿` replaced by two bytes that are not UTF-8, and with a wrong length in each [`old_binary`].
fn raw(command: &Document) -> RawDocumentBuf {
    let mut bytes = RawDocumentBuf::try_from(command).unwrap().into_bytes();
    for at in 1..bytes.len() {
        if bytes[at - 1..=at] == *"¿".as_bytes() {
            bytes[at - 1..=at].copy_from_slice(&[0xFF, 0xC3]);
        }
        if bytes[at..].starts_with(b"\x03\0\0\0odd") {
            bytes[at] = 9;
        }
    }
    RawDocumentBuf::from_bytes(bytes).unwrap()
}

/// A value that contains its length twice.
fn old_binary() -> Binary {
    Binary { subtype: BinarySubtype::BinaryOld, bytes: b"odd".to_vec() }
}

async fn run(test: &TestDb, command: Document) -> Document {
    let reply = test.database().run_raw_command(raw(&command)).await.unwrap();
    assert!(!reply.contains_key("writeErrors"), "{command}: {reply}");
    reply
}

async fn insert(test: &TestDb, collection: &str, document: Document) {
    run(test, doc! {"insert": collection, "documents": [document]}).await;
}

async fn update(test: &TestDb, collection: &str, id: &str, change: Document) {
    let reply = run(test, doc! {"update": collection, "updates": [{"q": {"_id": id}, "u": change}]}).await;
    assert_eq!(reply.get_i32("n").unwrap(), 1, "{collection} {id}");
}

async fn delete(test: &TestDb, collection: &str, id: &str) {
    let reply = run(test, doc! {"delete": collection, "deletes": [{"q": {"_id": id}, "limit": 1}]}).await;
    assert_eq!(reply.get_i32("n").unwrap(), 1, "{collection} {id}");
}

/// Waits until everything is applied, and expects exactly one document that equals this.
async fn expect(daemon: &Daemon, test: &TestDb, collection: &str, document: Document) {
    daemon.settled().await;
    let same = doc! {"$expr": {"$eq": ["$$ROOT", {"$literal": document.clone()}]}};
    let found = run(test, doc! {"count": collection, "query": same}).await;
    if found.get_i32("n").unwrap() != 1 {
        let command = raw(&doc! {"find": collection, "filter": {"_id": document.get("_id")}});
        let mut stored = test.database().run_raw_cursor_command(command).batch().await.unwrap();
        let stored = futures_util::StreamExt::next(&mut stored)
            .await
            .map(|batch| String::from_utf8_lossy(batch.unwrap().as_raw_document().as_bytes()).into_owned());
        panic!("expected {document}, found {stored:?}");
    }
}

/// Number of differences that `check` finds.
async fn differing(daemon: &Daemon) -> u64 {
    let context = daemon.shared();
    let dead_letters = &context.dead_letters;
    let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap();
    let mut differing = 0;
    for rule in &context.plan.rules {
        let mut check = Check::new(&context, &store, rule, Scope::default()).await.unwrap();
        while check.next().await.unwrap().is_some() {}
        assert!(check.tally.compared > 0, "{}", rule.name);
        differing += check.tally.differing + check.tally.undecided + check.tally.refused;
    }
    differing
}

async fn dead_letters(test: &TestDb) -> usize {
    all(&test.client.database(&format!("{}_state", test.name)), "dead_letters").await.len()
}

const RULES: &str = r#"
  - { name: names, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name, info: $info } } }
  - { name: tags, copy: { source: tags, target: products, match: { "tags.$[]": _id }, into: tag_names, element: $name } }
  - { name: cities, copy: { source: cities, target: products, match: { address.city_id: _id }, set: { city: $name } } }
  - { name: counts, aggregate: { source: reviews, target: products, match: { _id: product }, set: { reviews: { $sum: 1 } } } }
  - { name: latest, collect: { source: reviews, target: products, match: { _id: product }, into: latest, element: { id: $_id, text: $text }, sort: { _id: 1 }, slice: 5 } }
  - { name: lines, copy: { source: parts, target: orders, match: { "lines.$[].part": _id }, set: { "lines.$[].name": $name } } }
"#;

/// Clients in Go, C and PHP can write such strings. One of them once stopped every rule of its database for good.
#[tokio::test(flavor = "multi_thread")]
async fn strings_that_are_not_utf8_are_copied_byte_for_byte_and_stop_nothing() {
    let test = denormd_fixture::database().await;
    insert(&test, "parts", doc! {"_id": "p¿", "name": "n¿", "info": {"a¿": ["x¿"]}}).await;
    insert(&test, "tags", doc! {"_id": "g¿", "name": "tag¿"}).await;
    insert(&test, "cities", doc! {"_id": 3, "name": "Oslo"}).await;
    let product = |id: &str| doc! {"_id": id, "part": "p¿", "tags": ["g¿"], "address": {"city_id": 3, "note¿": "¿"}};
    let copies = |name: &str, reviews: i32, latest: Vec<Document>| {
        doc! {"name": name, "info": {"a¿": ["x¿"]}, "tag_names": ["tag¿"], "city": "Oslo", "reviews": reviews, "latest": latest}
    };
    let whole = |id: &str, name: &str, reviews: i32, latest: Vec<Document>| {
        let mut whole = product(id);
        whole.extend(copies(name, reviews, latest));
        whole
    };
    insert(&test, "products", product("t¿")).await;
    insert(&test, "reviews", doc! {"_id": "r¿", "product": "t¿", "text": "¿"}).await;
    insert(&test, "orders", doc! {"_id": 1, "lines": [{"part": "p¿"}, {"part": 7, "note": "¿"}]}).await;
    let daemon = Daemon::start(&test, RULES).await;
    let review = || vec![doc! {"id": "r¿", "text": "¿"}];
    expect_fields(&daemon, &test, "products", whole("t¿", "n¿", 1, review())).await;
    insert(&test, "products", product("u¿")).await;
    expect_fields(&daemon, &test, "products", whole("u¿", "n¿", 0, Vec::new())).await;
    update(&test, "parts", "p¿", doc! {"$set": {"name": "m¿"}}).await;
    expect_fields(&daemon, &test, "products", whole("t¿", "m¿", 1, review())).await;
    expect_fields(&daemon, &test, "products", whole("u¿", "m¿", 0, Vec::new())).await;
    expect(
        &daemon,
        &test,
        "orders",
        doc! {"_id": 1, "lines": [{"part": "p¿", "name": "m¿"}, {"part": 7, "note": "¿"}]},
    )
    .await;
    update(&test, "reviews", "r¿", doc! {"$set": {"product": "u¿"}}).await;
    expect_fields(&daemon, &test, "products", whole("t¿", "m¿", 0, Vec::new())).await;
    expect_fields(&daemon, &test, "products", whole("u¿", "m¿", 1, review())).await;
    delete(&test, "reviews", "r¿").await;
    expect_fields(&daemon, &test, "products", whole("u¿", "m¿", 0, Vec::new())).await;
    update(&test, "products", "u¿", doc! {"part": "p¿", "tags": ["g¿"], "address": {"city_id": 3, "note¿": "¿"}}).await;
    expect_fields(&daemon, &test, "products", whole("u¿", "m¿", 0, Vec::new())).await;
    assert_eq!((dead_letters(&test).await, differing(&daemon).await), (0, 0));
    daemon.stop().await;
    let daemon = Daemon::start(&test, RULES).await;
    daemon.ask("names").await;
    delete(&test, "parts", "p¿").await;
    update(&test, "products", "t¿", doc! {"$set": {"tags": []}}).await;
    let mut bare = whole("t¿", "", 0, Vec::new());
    bare.remove("name");
    bare.remove("info");
    bare.extend(doc! {"tags": [], "tag_names": []});
    expect_fields(&daemon, &test, "products", bare).await;
    assert_eq!((dead_letters(&test).await, differing(&daemon).await), (0, 0));
    daemon.stop().await;
}

/// The driver refuses a binary value of the old subtype whose second length is wrong, which the server stores. The page of a
/// backfill that contained one was read again and again, and a change of a document with such an `_id` was lost.
#[tokio::test(flavor = "multi_thread")]
async fn binary_values_with_a_wrong_length_are_copied_byte_for_byte_and_stop_nothing() {
    let test = denormd_fixture::database().await;
    let odd = old_binary;
    insert(&test, "parts", doc! {"_id": odd(), "name": "n", "info": [odd()]}).await;
    insert(&test, "products", doc! {"_id": odd(), "part": odd()}).await;
    insert(&test, "orders", doc! {"_id": 1, "lines": [{"part": odd()}, {"part": 7, "note": odd()}]}).await;
    let daemon = Daemon::start(&test, RULES).await;
    let copied = |id: Bson, name: &str| {
        doc! {"_id": id, "part": odd(), "name": name, "info": [odd()], "reviews": 0, "latest": []}
    };
    expect_fields(&daemon, &test, "products", copied(odd().into(), "n")).await;
    insert(&test, "products", doc! {"_id": "live", "part": odd()}).await;
    let renamed = doc! {"q": {"_id": odd()}, "u": {"$set": {"name": "m"}}};
    assert_eq!(run(&test, doc! {"update": "parts", "updates": [renamed]}).await.get_i32("n").unwrap(), 1);
    expect_fields(&daemon, &test, "products", copied(odd().into(), "m")).await;
    expect_fields(&daemon, &test, "products", copied("live".into(), "m")).await;
    let lines = vec![doc! {"part": odd(), "name": "m"}, doc! {"part": 7, "note": odd()}];
    expect(&daemon, &test, "orders", doc! {"_id": 1, "lines": lines}).await;
    assert_eq!((dead_letters(&test).await, differing(&daemon).await), (0, 0));
    daemon.stop().await;
}

/// The server's text about a refused statement ends in the middle of a character, and the driver refuses to read the reply: none of
/// the key's other documents was written.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_whose_text_is_cut_within_a_character_stops_nothing_else() {
    let test = denormd_fixture::database().await;
    insert(&test, "parts", doc! {"_id": 1, "name": "n"}).await;
    for id in 0..20 {
        insert(&test, "products", doc! {"_id": format!("p{id:02}"), "part": 1}).await;
    }
    let rule = "  - { name: names, copy: { source: parts, target: products, match: { part: _id }, set: { copy.name: $name } } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    // In one of them, the 70th byte is the first half of a character.
    let long = "ä".repeat(200);
    for (id, text) in [("p05", long.clone()), ("p15", format!("a{long}"))] {
        update(&test, "products", id, doc! {"$set": {"copy": text}}).await;
    }
    daemon.settled().await;
    let renamed = doc! {"q": {"_id": 1}, "u": {"$set": {"name": "m"}}};
    run(&test, doc! {"update": "parts", "updates": [renamed]}).await;
    daemon.settled().await;
    let renamed = doc! {"count": "products", "query": {"copy.name": "m"}};
    assert_eq!(run(&test, renamed).await.get_i32("n").unwrap(), 18);
    let letters = all(&test.beside("state"), "dead_letters").await;
    let reasons: BTreeSet<&str> = letters.iter().map(|letter| letter.get_str("reason").unwrap()).collect();
    assert!(letters.len() == 2 && reasons.contains("the server's reply cannot be read"), "{letters:?}");
    daemon.stop().await;
}

/// The same where a key has several statements in one command.
#[tokio::test(flavor = "multi_thread")]
async fn such_a_refusal_of_one_of_several_statements_stops_nothing_else() {
    let test = denormd_fixture::database().await;
    insert(&test, "parts", doc! {"_id": 1, "name": "n"}).await;
    let rule = "  - { name: names, copy: { source: parts, target: products, match: { part: _id }, set: { copy.name: $name, copy.label: $name }, once: true } }";
    let daemon = Daemon::start(&test, rule).await;
    daemon.settled().await;
    let mut products: Vec<Document> = (0..20).map(|id| doc! {"_id": id, "part": 1}).collect();
    // In one of them, the 70th byte is the first half of a character.
    let long = "ä".repeat(200);
    products[5].insert("copy", &long);
    products[15].insert("copy", format!("a{long}"));
    run(&test, doc! {"insert": "products", "documents": products}).await;
    daemon.settled().await;
    let filled = doc! {"count": "products", "query": {"copy.name": "n", "copy.label": "n"}};
    assert_eq!(run(&test, filled).await.get_i32("n").unwrap(), 18);
    assert_eq!(dead_letters(&test).await, 2);
    daemon.stop().await;
}

/// The fan-out job of such a key once counted as done before it began, and a retry of its dead letter deleted the letter.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_not_utf8_has_fan_out_jobs_and_dead_letters() {
    let test = denormd_fixture::database().await;
    insert(&test, "parts", doc! {"_id": "p¿", "name": "n¿"}).await;
    insert(&test, "products", doc! {"_id": "bad¿", "part": "p¿", "copy": 5}).await;
    insert(&test, "products", doc! {"_id": "good", "part": "p¿"}).await;
    let rule = "  - { name: names, copy: { source: parts, target: products, match: { part: _id }, set: { copy.name: $name } } }";
    let daemon = Daemon::start(&test, rule).await;
    expect(&daemon, &test, "products", doc! {"_id": "good", "part": "p¿", "copy": {"name": "n¿"}}).await;
    // A statement for all targets of the key is refused because of one of them.
    update(&test, "parts", "p¿", doc! {"$set": {"name": "m¿"}}).await;
    expect(&daemon, &test, "products", doc! {"_id": "good", "part": "p¿", "copy": {"name": "m¿"}}).await;
    assert_eq!(dead_letters(&test).await, 1);
    assert!(daemon.retry_dead_letters("names").await);
    assert_eq!(dead_letters(&test).await, 1, "the document is as it was");
    update(&test, "products", "bad¿", doc! {"$unset": {"copy": ""}}).await;
    daemon.retry_dead_letters("names").await;
    expect(&daemon, &test, "products", doc! {"_id": "bad¿", "part": "p¿", "copy": {"name": "m¿"}}).await;
    assert_eq!(dead_letters(&test).await, 0);
    daemon.stop().await;
}

/// The server's answer to what was kept once contained the target's `_id`, which the driver could not read: each write of
/// a first backfill became a dead letter.
#[tokio::test(flavor = "multi_thread")]
async fn values_of_a_target_that_is_not_utf8_are_kept_and_put_back() {
    let test = denormd_fixture::database().await;
    insert(&test, "parts", doc! {"_id": "p¿", "name": "n¿"}).await;
    insert(&test, "products", doc! {"_id": "t¿", "part": "p¿", "name": "old¿"}).await;
    let rules = "  - { name: names, adopt: true, copy: { source: parts, target: products, match: { part: _id }, set: { name: $name } } }";
    let program = Program::new(&config(&test, rules));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    let named =
        async |name: &str| run(&test, doc! {"count": "products", "query": {"name": name}}).await.get_i32("n").unwrap();
    assert_eq!((named("n¿").await, dead_letters(&test).await), (1, 0));
    program.run(&["pause", "names"]).await.exits(0);
    let told = program.run(&["undo", "names"]).await.exits(0).out;
    assert!(told.starts_with("names: 1 value put back\n"), "{told}");
    assert_eq!(named("old¿").await, 1);
    daemon.stop().await;
}

/// Like [`expect`], but ignores the order of the fields: several rules write in any order.
async fn expect_fields(daemon: &Daemon, test: &TestDb, collection: &str, document: Document) {
    daemon.settled().await;
    let sorted = |document| doc! {"$sortArray": {"input": {"$objectToArray": document}, "sortBy": {"k": 1}}};
    let same = doc! {"$expr": {"$eq": [sorted("$$ROOT".into()), sorted(bson::Bson::from(doc! {"$literal": document.clone()}))]}};
    let found = run(test, doc! {"count": collection, "query": same}).await;
    if found.get_i32("n").unwrap() != 1 {
        expect(daemon, test, collection, document).await;
    }
}

const LARGE: &str = r#"
  - { name: nested, aggregate: { source: s, target: t, match: { _id: ref.id }, set: { n: { $sum: 1 } } } }
  - { name: held, aggregate: { source: h, target: t, match: { _id: "ids.$[]" }, set: { held: { $sum: 1 } } } }
  - { name: names, copy: { source: h, target: u, match: { h: _id }, set: { name: $name } } }
"#;

/// With pre-images, a replaced document of 9 MB is an event of 18 MB. The stream once stopped there for good.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_over_16_mb_is_passed_and_no_change_beside_it_is_lost() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let big = "x".repeat(9 << 20);
    let nested = |id: i32, to: i32| doc! {"_id": id, "ref": {"id": to, "note": &big}};
    // An array in place of a reference refers to nothing, however large it is.
    let held = |id: i32, to: i32| doc! {"_id": id, "name": to, "ids": [to, [&big]]};
    for target in [1, 2] {
        db.collection("t").insert_one(doc! {"_id": target}).await.unwrap();
        db.collection("u").insert_one(doc! {"_id": target, "h": target}).await.unwrap();
    }
    db.collection("s").insert_one(nested(1, 1)).await.unwrap();
    db.collection("h").insert_one(held(1, 1)).await.unwrap();
    let daemon = Daemon::start(&test, LARGE).await;
    expect_fields(&daemon, &test, "t", doc! {"_id": 1, "n": 1, "held": 1}).await;
    daemon.stop().await;
    // Everything is in one batch of the stream, in this order.
    let sources = db.collection::<Document>("h");
    sources.insert_one(doc! {"_id": 2, "name": 5, "ids": [2]}).await.unwrap();
    db.collection::<Document>("s").replace_one(doc! {"_id": 1}, nested(1, 2)).await.unwrap();
    sources.replace_one(doc! {"_id": 1}, held(1, 2)).await.unwrap();
    sources.insert_one(doc! {"_id": 3, "ids": [2]}).await.unwrap();
    sources.replace_one(doc! {"_id": 1}, held(1, 1)).await.unwrap();
    sources.replace_one(doc! {"_id": 1}, held(1, 2)).await.unwrap();
    sources.insert_one(doc! {"_id": 4, "ids": [1, 2]}).await.unwrap();
    let daemon = Daemon::start(&test, LARGE).await;
    expect_fields(&daemon, &test, "t", doc! {"_id": 1, "n": 0, "held": 1}).await;
    expect_fields(&daemon, &test, "t", doc! {"_id": 2, "n": 1, "held": 4}).await;
    expect(&daemon, &test, "u", doc! {"_id": 1, "h": 1, "name": 2}).await;
    expect(&daemon, &test, "u", doc! {"_id": 2, "h": 2, "name": 5}).await;
    // The stream returns to batches.
    sources.insert_one(doc! {"_id": 5, "ids": [1, 2]}).await.unwrap();
    expect_fields(&daemon, &test, "t", doc! {"_id": 2, "n": 1, "held": 5}).await;
    assert_eq!(differing(&daemon).await, 0);
    daemon.stop().await;
}

/// The names of the changed fields alone make an event over 16 MB, although the document has 9 MB.
#[tokio::test(flavor = "multi_thread")]
async fn an_update_whose_paths_alone_are_over_16_mb_is_passed() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let long = "a".repeat(60);
    let targets = db.collection::<Document>("t");
    for source in [1, 2] {
        db.collection("s").insert_one(doc! {"_id": source, "name": source}).await.unwrap();
    }
    targets.insert_one(doc! {"_id": 1, "ref": {"id": 1}, "x": {&long: vec![0; 300_000]}}).await.unwrap();
    let rules = "  - { name: names, copy: { source: s, target: t, match: { ref.id: _id }, set: { name: $name } } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    let ones = doc! {"$map": {"input": format!("$x.{long}"), "in": {"$add": ["$$this", 1]}}};
    let change = vec![doc! {"$set": {"ref.id": 2, "x": {&long: ones}}}];
    targets.update_one(doc! {"_id": 1}, change).await.unwrap();
    daemon.settled().await;
    let found = targets.find_one(doc! {"_id": 1}).projection(doc! {"name": 1}).await.unwrap();
    assert_eq!(found, Some(doc! {"_id": 1, "name": 2}));
    daemon.stop().await;
}

/// A resume token has twice the length of the `_id`, and a reply contains two tokens: the server closes the connection
/// without an error, each time.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_too_large_for_its_own_token_is_passed_with_a_backfill() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rules = "  - { name: names, copy: { source: s, target: t, match: { ref: _id }, set: { name: $name } } }";
    db.create_collection("t").await.unwrap();
    db.collection("s").insert_one(doc! {"_id": 1, "name": "x"}).await.unwrap();
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    db.collection("t").insert_one(doc! {"_id": 1, "ref": 1}).await.unwrap();
    db.collection("t").insert_one(doc! {"_id": "i".repeat(4 << 20), "ref": 1}).await.unwrap();
    db.collection("t").insert_one(doc! {"_id": 2, "ref": 1}).await.unwrap();
    daemon.settled().await;
    let found = all(&db, "t").await;
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(|target| target.get_str("name").is_ok_and(|name| name == "x")));
    daemon.stop().await;
}
