//! `denormd advise` and `denormd init` on data for which the literature gives advice; figures are compared with exact
//! counts.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
};

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use denormd_fixture::{ReplicaSet, TestDb};
use mongodb::Database;
use serde_json::Value;

fn denormd(uri: &str, database: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
    command.args(arguments).args(["--uri", uri, "--database", database]).stdin(Stdio::null());
    // Prevents a config file in the current folder from being used.
    command.env("DENORMD_CONFIG", "/nonexistent/denormd.yaml").output().unwrap()
}

/// The report of a database, with the server's counters as they are.
fn advise(db: &TestDb, more: &[&str]) -> Value {
    let mut arguments = vec!["advise", "--output", "json", "--observe", "0"];
    arguments.extend(more);
    let output = denormd(&db.uri, &db.name, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A relationship of a report, by the end of its collection and the path that refers.
fn relationship<'a>(report: &'a Value, holder: &str) -> &'a Value {
    let named = |found: &&Value| {
        let text = |name: &str| found["holder"][name].as_str().unwrap().to_owned();
        format!("{}.{}", text("collection"), text("path")).ends_with(&format!(".{holder}"))
    };
    report["relationships"].as_array().unwrap().iter().find(named).unwrap_or_else(|| panic!("no {holder}: {report:#}"))
}

fn collection<'a>(report: &'a Value, name: &str) -> &'a Value {
    let all = report["collections"].as_array().unwrap();
    all.iter().find(|found| found["collection"].as_str().unwrap().ends_with(&format!(".{name}"))).unwrap()
}

/// The advice of one kind, which must exist.
fn advice<'a>(of: &'a Value, kind: &str) -> &'a Value {
    all_advice(of, kind).into_iter().next().unwrap_or_else(|| panic!("no {kind:?}: {:#}", of["advice"]))
}

fn all_advice<'a>(of: &'a Value, kind: &str) -> Vec<&'a Value> {
    of["advice"].as_array().unwrap().iter().filter(|advice| advice["kind"] == kind).collect()
}

async fn insert(db: &Database, collection: &str, documents: impl IntoIterator<Item = Document>) {
    db.collection(collection).insert_many(documents).await.unwrap();
}

async fn index(db: &Database, collection: &str, keys: Document) {
    let model = mongodb::IndexModel::builder().keys(keys).build();
    db.collection::<Document>(collection).create_index(model).await.unwrap();
}

/// Counts of the references at a path by `$group`: their number, the maximum, and the 99th percentile by nearest rank.
async fn exact(db: &Database, collection: &str, unwind: &str, path: &str) -> (u64, u64, u64) {
    let mut pipeline = vec![doc! {"$group": {"_id": format!("${path}"), "n": {"$sum": 1}}}, doc! {"$sort": {"n": 1}}];
    if !unwind.is_empty() {
        pipeline.insert(0, doc! {"$unwind": format!("${unwind}")});
    }
    let mut cursor = db.collection::<Document>(collection).aggregate(pipeline).await.unwrap();
    let mut counts = Vec::new();
    while cursor.advance().await.unwrap() {
        counts.push(u64::try_from(cursor.current().get_i32("n").unwrap()).unwrap());
    }
    let rank = (counts.len() * 99).div_ceil(100) - 1;
    (counts.iter().sum(), *counts.last().unwrap(), counts[rank])
}

fn assert_figures(found: &Value, (sum, max, p99): (u64, u64, u64)) {
    let fan_out = &found["fan_out"];
    assert_eq!(
        (&found["references"], &fan_out["max"], &fan_out["p99"]),
        (&sum.into(), &max.into(), &p99.into()),
        "{found:#}"
    );
    assert_eq!(fan_out["exact"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_are_embedded_in_their_person() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let address = |n: i32| doc! {"street": format!("{n} Sesame St"), "city": "Anytown"};
    insert(
        &db,
        "person",
        (0..300).map(|n| doc! {"_id": n, "name": format!("Kate {n}"), "addresses": [address(n), address(n + 1)]}),
    )
    .await;
    insert(&db, "patron", (0..300).map(|n| doc! {"_id": n, "name": format!("Joe {n}")})).await;
    let address =
        |n: i32| doc! {"_id": n, "patron_id": (n * n) % 300, "street": format!("{n} Fake Street"), "city": "Faketon"};
    insert(&db, "address", (0..900).map(address)).await;
    let report = advise(&test, &[]);

    let kept = advice(collection(&report, "person"), "keep embedded");
    assert_eq!(kept["rule_of_thumb"], 1);
    let found = relationship(&report, "address.patron_id");
    assert_figures(found, exact(&db, "address", "", "patron_id").await);
    let embed = advice(found, "embed");
    assert_eq!(embed["rule_of_thumb"], 1);
    assert_eq!(embed["rule"]["collect"]["into"], "address");
    assert!(all_advice(found, "copy").is_empty(), "what is embedded is not copied");
}

/// The parts of the blog: the name is read with each product and hardly ever changes, the quantity changes with each order.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_part_the_name_is_copied_and_the_quantity_is_not() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let db = test.database();
    let ids: Vec<ObjectId> = (0..400).map(|_| ObjectId::new()).collect();
    let part =
        |(n, id): (usize, &ObjectId)| doc! {"_id": *id, "name": format!("grommet {n}"), "qty": 94, "price": 3.99};
    insert(&db, "parts", ids.iter().enumerate().map(part)).await;
    let listed = |n: usize, count: usize| -> Vec<Bson> {
        (0..count).map(|nth| ids[(n * 7 + nth * 13) % ids.len()].into()).collect()
    };
    let product = |n: usize| {
        let spares: Vec<Document> = listed(n, 2).into_iter().map(|id| doc! {"id": id, "quantity": 2}).collect();
        doc! {"_id": i32::try_from(n).unwrap(), "name": format!("smoke shifter {n}"), "parts": listed(n, 1 + n % 12), "spares": spares}
    };
    insert(&db, "products", (0..2000).map(product)).await;
    index(&db, "products", doc! {"parts": 1}).await;

    let asked = std::thread::spawn({
        let (uri, name) = (test.uri.clone(), test.name.clone());
        move || denormd(&uri, &name, &["advise", "--output", "json", "--observe", "12s"])
    });
    // During the observation, each product page reads a product, and each order takes from one part.
    let (products, parts) = (db.collection::<Document>("products"), db.collection::<Document>("parts"));
    for n in 0_i32.. {
        if asked.is_finished() {
            break;
        }
        products.find_one(doc! {"_id": n % 2000}).await.unwrap();
        if n % 2 == 0 {
            let id = ids[usize::try_from(n).unwrap() % ids.len()];
            parts.update_one(doc! {"_id": id}, doc! {"$inc": {"qty": -1}}).await.unwrap();
        }
    }
    let output = asked.join().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    let found = relationship(&report, "products.parts.$[]");
    assert_figures(found, exact(&db, "products", "parts", "parts").await);
    assert_eq!((&found["lengths"]["max"], &found["lengths"]["count"]), (&12.into(), &2000.into()));
    assert_eq!(advice(found, "array of references")["rule_of_thumb"], 2);
    let copy = advice(found, "copy");
    assert_eq!(copy["rule_of_thumb"], 5);
    assert_eq!(copy["rule"]["copy"]["element"]["name"], "$name");
    assert_eq!(copy["rule"]["copy"]["element"]["qty"], Value::Null, "{copy:#}");
    let no = advice(found, "do not copy");
    assert!(no["says"].as_str().unwrap().contains("`qty`"), "{no:#}");
    let beside = advice(relationship(&report, "products.spares.$[].id"), "copy");
    assert_eq!(beside["rule"]["copy"]["set"]["spares.$[].name"], "$name");
    // The counted updates are real: each order made one.
    let seen = report["changes"]["collections"][format!("{}.parts", test.name)]["fields"]["qty"].as_u64().unwrap();
    assert!(seen > 0, "{:#}", report["changes"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_messages_keep_the_id_of_their_host() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let hosts: Vec<ObjectId> = (0..3).map(|_| ObjectId::new()).collect();
    insert(
        &db,
        "hosts",
        hosts.iter().map(|id| doc! {"_id": *id, "name": "goofy.example.com", "ipaddr": "127.66.66.66"}),
    )
    .await;
    let message = |n: usize| doc! {"host": hosts[(n * n) % 3], "time": DateTime::now(), "message": "cpu is on fire!"};
    insert(&db, "logmsg", (0..18_000).map(message)).await;
    let report = advise(&test, &[]);

    let found = relationship(&report, "logmsg.host");
    assert_figures(found, exact(&db, "logmsg", "", "host").await);
    let kept = advice(found, "parent reference");
    assert_eq!(kept["rule_of_thumb"], 3);
    assert!(kept["says"].as_str().unwrap().contains("even an array of ids is too long"), "{kept:#}");
    assert!(advice(found, "missing index")["command"].as_str().unwrap().contains("createIndex({ \"host\": 1 })"));
}

/// The product page shows ten reviews: the application's own queries show this in the slow query log.
#[tokio::test(flavor = "multi_thread")]
async fn of_the_reviews_ten_are_kept_in_the_product() {
    // Logs every query as slow.
    let set = ReplicaSet::builder().nodes(2).arg("--slowms").arg("-1").start().await;
    let test = set.database().await;
    let db = test.database();
    // Products are read on the other member.
    let elsewhere = denormd_fixture::client(&format!("{}&readPreference=secondary", test.uri)).await;
    insert(&db, "products", (0..20).map(|n| doc! {"_id": n, "name": format!("kettle {n}")})).await;
    let review = |n: i32| {
        let published = DateTime::from_millis(1_700_000_000_000 + i64::from(n) * 60_000);
        doc! {"_id": ObjectId::new(), "product_id": n % 20, "review_author": "Kristina", "published_date": published}
    };
    insert(&db, "reviews", (0..12_000).map(review)).await;
    index(&db, "reviews", doc! {"product_id": 1, "published_date": -1, "_id": 1}).await;
    let products = elsewhere.database(&test.name).collection::<Document>("products");
    let reviews = db.collection::<Document>("reviews");

    let asked = std::thread::spawn({
        let (uri, name) = (test.uri.clone(), test.name.clone());
        move || denormd(&uri, &name, &["advise", "--output", "json", "--observe", "12s"])
    });
    let mut pages = 0_u64;
    for n in 0.. {
        if asked.is_finished() {
            break;
        }
        pages += 1;
        products.find_one(doc! {"_id": n % 20}).await.unwrap();
        let newest =
            reviews.find(doc! {"product_id": n % 20}).sort(doc! {"published_date": -1}).limit(10).await.unwrap();
        assert_eq!(futures_util::TryStreamExt::try_collect::<Vec<_>>(newest).await.unwrap().len(), 10);
    }
    let output = asked.join().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    // Neither more than were made, nor only those of the first member. A slow machine samples for longer than it observes.
    let seen = collection(&report, "products")["reads"].as_u64().unwrap();
    assert!(seen > 0 && seen <= pages, "{seen} of {pages}");
    let found = relationship(&report, "reviews.product_id");
    assert_figures(found, exact(&db, "reviews", "", "product_id").await);
    let kinds: Vec<&str> =
        found["advice"].as_array().unwrap().iter().map(|advice| advice["kind"].as_str().unwrap()).collect();
    assert!(kinds.contains(&"subset") || kinds.contains(&"measure"), "{kinds:?}");
    let subset =
        found["advice"].as_array().unwrap().iter().find(|advice| advice["rule"]["collect"]["slice"] == 10).unwrap();
    assert!(subset["says"].as_str().unwrap().contains("the application asks for 10 of them"), "{subset:#}");
    assert_eq!(subset["rule"]["collect"]["sort"]["published_date"], -1);
}

/// References of the wrong type, DBRefs, empty references, two holders of one key, unbounded arrays.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_references_is_said_with_its_number() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let ids: Vec<ObjectId> = (0..100).map(|_| ObjectId::new()).collect();
    insert(
        &db,
        "publishers",
        ids.iter()
            .enumerate()
            .map(|(n, id)| doc! {"_id": *id, "acronym": format!("P{}", n.max(1)), "name": "O'Reilly Media"}),
    )
    .await;
    let book = |n: usize| {
        let to: Bson = if n.is_multiple_of(10) { ObjectId::new().into() } else { ids[n % 100].into() };
        doc! {
            "_id": i32::try_from(n).unwrap(), "publisher": {"$ref": "publishers", "$id": ids[n % 100]},
            "publisher_id": ids[n % 100].to_hex(), "second": to, "acronym": format!("P{}", n % 100),
        }
    };
    insert(&db, "books", (0..2000).map(book)).await;
    let comments: Vec<Document> = (0..400).map(|n| doc! {"text": format!("no {n}")}).collect();
    insert(&db, "posts", (0..5).map(|n| doc! {"_id": n, "comments": comments.clone()})).await;
    let report = advise(&test, &[]);

    let dbrefs = advice(relationship(&report, "books.publisher.$id"), "plain ids");
    assert!(dbrefs["says"].as_str().unwrap().contains("publishers"), "{dbrefs:#}");
    let strings = relationship(&report, "books.publisher_id");
    assert_eq!(
        strings["types"],
        serde_json::json!([{"type": "string", "references": 2000, "resolved": 0, "converted": 2000}])
    );
    assert!(advice(strings, "key type")["says"].as_str().unwrap().contains("key_type: objectId"));
    let dangling = relationship(&report, "books.second");
    assert_eq!(
        dangling["types"],
        serde_json::json!([{"type": "objectId", "references": 2000, "resolved": 1800, "converted": 0}])
    );
    assert!(advice(dangling, "dangling references")["says"].as_str().unwrap().contains("200 of 2,000 objectId"));
    assert!(advice(collection(&report, "posts"), "move out")["says"].as_str().unwrap().contains("most 400"));

    // The printed commands do what they promise.
    let shell = advice(collection(&report, "posts"), "move out")["command"].as_str().unwrap().to_owned();
    run_aggregation(&db, "posts", &shell).await;
    assert_eq!(db.collection::<Document>("posts_comments").count_documents(doc! {}).await.unwrap(), 2000);
    let moved = db.collection::<Document>("posts_comments").find_one(doc! {"posts_id": 3}).await.unwrap().unwrap();
    assert!(moved.get_str("text").unwrap().starts_with("no "), "{moved}");

    for (of, kind, field) in [(&report, "plain ids", "publisher"), (&report, "key type", "publisher_id")] {
        let found =
            of["relationships"].as_array().unwrap().iter().flat_map(|found| found["advice"].as_array().unwrap());
        let advice = found.into_iter().find(|advice| advice["kind"] == kind).unwrap();
        run_update(&db, "books", advice["command"].as_str().unwrap()).await;
        let plain = doc! {field: {"$type": "objectId"}};
        assert_eq!(db.collection::<Document>("books").count_documents(plain).await.unwrap(), 2000, "{kind}");
    }

    // Two publishers share an acronym, and a book may refer to them by it.
    let report = advise(&test, &["--match", "books.acronym=publishers.acronym"]);
    let told = relationship(&report, "books.acronym");
    assert_eq!(told["found"], "told");
    assert_eq!(told["duplicate_keys"], 1);
    assert!(!all_advice(told, "duplicate keys").is_empty());
}

/// Runs the aggregation of a mongosh command: the pipeline between its brackets.
async fn run_aggregation(db: &Database, collection: &str, shell: &str) {
    let arguments = arguments(shell, "aggregate(");
    let mut cursor = db.collection::<Document>(collection).aggregate(documents(&arguments[0])).await.unwrap();
    while cursor.advance().await.unwrap() {}
}

/// The same for an update with a pipeline.
async fn run_update(db: &Database, collection: &str, shell: &str) {
    let arguments = arguments(shell, "updateMany(");
    let filter = bson::serialize_to_document(&arguments[0]).unwrap();
    db.collection::<Document>(collection).update_many(filter, documents(&arguments[1])).await.unwrap();
}

fn documents(list: &Value) -> Vec<Document> {
    list.as_array().unwrap().iter().map(|stage| bson::serialize_to_document(stage).unwrap()).collect()
}

/// The arguments of a method in a mongosh command.
fn arguments(shell: &str, method: &str) -> Vec<Value> {
    let start = shell.find(method).unwrap() + method.len();
    let text = format!("[{}]", shell[start..].trim_end().strip_suffix(')').unwrap());
    // JSON except for the names without quotes.
    let mut json = String::new();
    for (nth, part) in text.split('"').enumerate() {
        if nth % 2 == 1 {
            json.push_str(&format!("\"{part}\""));
            continue;
        }
        let mut word = String::new();
        for c in part.chars() {
            if c.is_alphanumeric() || c == '_' || c == '$' {
                word.push(c);
                continue;
            }
            json.push_str(&quoted(&word, c));
            word.clear();
            json.push(c);
        }
        json.push_str(&word);
    }
    serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

fn quoted(word: &str, next: char) -> String {
    if next == ':' && !word.is_empty() { format!("\"{word}\"") } else { word.to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_writes_rules_that_pass_plan_and_overwrites_nothing() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    insert(&db, "parts", (1..=200).map(|id| doc! {"_id": id, "name": format!("Spoke {id}"), "price": 0.5})).await;
    let product =
        |id: i32| doc! {"_id": id, "parts": [{"id": id * 3 % 200 + 1, "quantity": 2}], "spares": [id * 9 % 200 + 1]};
    insert(&db, "products", (1..=1000).map(product)).await;
    insert(
        &db,
        "hosts",
        (1..=20).map(|id| doc! {"_id": id, "name": format!("web-{id}"), "ipaddr": format!("10.0.0.{id}")}),
    )
    .await;
    insert(&db, "logmsg", (1..=6000).map(|id| doc! {"_id": id, "host": id % 20 + 1, "message": "GET /"})).await;
    db.create_collection("pings").capped(true).size(1 << 20).await.unwrap();
    insert(&db, "pings", (1..=6000).map(|id| doc! {"_id": id, "host": id % 20 + 1})).await;
    // The shop of `make advise`, on a small scale: each figure is the exact count.
    let report = advise(&test, &[]);
    for (holder, collection, unwind, path) in [
        ("products.parts.$[].id", "products", "parts", "parts.id"),
        ("products.spares.$[]", "products", "spares", "spares"),
        ("logmsg.host", "logmsg", "", "host"),
        ("pings.host", "pings", "", "host"),
    ] {
        assert_figures(relationship(&report, holder), exact(&db, collection, unwind, path).await);
    }

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    let file = file.to_str().unwrap();
    let init = || denormd(&test.uri, &test.name, &["init", "--observe", "0", "--config", file]);
    let output = init();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = fs::read_to_string(file).unwrap();
    for expected in
        ["\"parts.$[].id\": _id", "\"spares.$[]\": _id", "host: _id", "\"parts.$[].name\": $name", "host_name: $name"]
    {
        assert!(written.contains(expected), "no {expected}:\n{written}");
    }
    // Advice that cannot be followed is reported, and does not prevent the rest.
    assert!(written.contains("# left out: ") && written.contains("capped"), "{written}");

    let state = format!("{}_state", test.name);
    let plan = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
        command.args(["plan", "--config", file]).args(more).env("DENORMD__STATE__DATABASE", &state).output().unwrap()
    };
    let applied = plan(&["--apply"]);
    assert!(applied.status.success(), "{}{written}", String::from_utf8_lossy(&applied.stderr));
    assert!(plan(&[]).status.success());

    // Advice that the rules already follow is not repeated.
    let output = Command::new(env!("CARGO_BIN_EXE_denormd"))
        .args(["advise", "--output", "json", "--observe", "0", "--config", file])
        .env("DENORMD__STATE__DATABASE", &state)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = relationship(&report, "logmsg.host");
    assert_eq!(found["found"], "told");
    let drafts = found["advice"].as_array().unwrap().iter().filter(|advice| !advice["rule"]["copy"].is_null());
    assert_eq!(drafts.count(), 0, "{found:#}");

    let again = init();
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("is not overwritten"));
    assert_eq!(fs::read_to_string(file).unwrap(), written);
    assert!(Path::new(file).exists());
}

/// Small numbers as references, in an array of subdocuments: the field's name is the collection's.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_in_an_array_of_subdocuments_refer_by_their_name() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let city = |n: i32| doc! {"_id": n, "name": format!("City {n}"), "email": format!("office@city{n}.example")};
    insert(&db, "cities", (1..=60).map(city)).await;
    let stops = |n: i32| (0..3).map(|k| doc! {"city": (n * 7 + k) % 25 + 1, "nights": k + 1}).collect::<Vec<_>>();
    insert(&db, "trips", (1..=200).map(|n| doc! {"_id": n, "title": format!("Tour {n}"), "stops": stops(n)})).await;
    let report = advise(&test, &[]);
    let found = relationship(&report, "trips.stops.$[].city");
    assert_eq!(found["held"]["path"], "_id", "{found:#}");

    let written = denormd(&test.uri, &test.name, &["init", "--observe", "0", "--to", "-"]);
    let written = String::from_utf8_lossy(&written.stdout).into_owned();
    let rule = |line: &str| !line.trim_start().starts_with('#') && line.contains("\"stops.$[].city\": _id");
    assert!(written.lines().any(rule), "{written}");
    assert!(written.contains("# warning: `email` looks personal or secret"), "{written}");
}

/// The server truncates the oplog while it is read, as it may at any time on a busy cluster.
#[tokio::test(flavor = "multi_thread")]
async fn an_oplog_that_is_truncated_while_it_is_read_is_read_from_a_later_time() {
    let set = ReplicaSet::start(1).await;
    let test = set.database().await;
    let oplog = test.client.database("local").collection::<Document>("oplog.rs");
    let oldest = oplog.find_one(doc! {}).sort(doc! {"$natural": 1}).await.unwrap().unwrap();
    let oldest = oldest.get_timestamp("ts").unwrap().time;
    crate::support::daemon::until("the later time is before the inserts", async || {
        insert(&test.database(), "countries", [doc! {}]).await;
        let now = test.client.database("admin").run_command(doc! {"hello": 1}).await.ok()?;
        (now.get_timestamp("operationTime").ok()?.time > oldest + 2).then_some(())
    })
    .await;
    insert(&test.database(), "cities", (1..=60).map(|n| doc! {"_id": n, "name": format!("City {n}")})).await;
    for (command, namespace) in
        [("find", "local.oplog.rs".to_owned()), ("getMore", format!("{}.$cmd.aggregate", test.name))]
    {
        let data = doc! {"failCommands": [command], "namespace": namespace, "errorCode": 136};
        let fail = doc! {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": data};
        let admin = test.client.database("admin");
        let before = admin.run_command(fail).await.unwrap().get_i32("count").unwrap();
        let report = advise(&test, &[]);
        assert_eq!(report["changes"]["collections"][format!("{}.cities", test.name)]["inserts"], 60, "{report:#}");
        let off = admin.run_command(doc! {"configureFailPoint": "failCommand", "mode": "off"}).await.unwrap();
        assert_eq!(off.get_i32("count").unwrap(), before + 1, "{command} has failed once");
    }
}

/// A file without a rule gives the reason, and the other findings.
#[tokio::test(flavor = "multi_thread")]
async fn init_never_writes_an_empty_file_silently() {
    let test = denormd_fixture::database().await;
    insert(&test.database(), "cities", (1..=60).map(|n| doc! {"_id": n, "name": format!("City {n}")})).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    let output = denormd(&test.uri, &test.name, &["init", "--observe", "0", "--config", file.to_str().unwrap()]);
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(told.contains("without a rule: no relationship was found"), "{told}");
    let written = fs::read_to_string(file).unwrap();
    assert!(written.contains("# no rule: no relationship was found; name one with --match"), "{written}");
}

/// The database of `--uri` comes before the config's, and a misspelt one is no empty one.
#[tokio::test(flavor = "multi_thread")]
async fn the_database_of_the_uri_is_examined_and_has_to_exist() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    insert(&db, "parts", (1..=200).map(|id| doc! {"_id": id, "name": format!("Spoke {id}")})).await;
    insert(&db, "products", (1..=500).map(|id| doc! {"_id": id, "spares": [id * 9 % 200 + 1]})).await;
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
        command.current_dir(folder.path()).args(arguments).stdin(Stdio::null()).env_remove("DENORMD_CONFIG");
        command.output().unwrap()
    };
    let told = String::from_utf8_lossy(&run(&["init"]).stderr).into_owned();
    assert!(told.contains("hint: --uri mongodb://localhost:27017/DATABASE"), "{told}");

    let other = format!("{}_other", test.name);
    let config = format!("mongodb: {{ uri: {:?}, database: {other:?} }}\nrules: []\n", test.uri);
    fs::write(folder.path().join("denormd.yaml"), config).unwrap();
    let uri = |database: &str| test.uri.replacen("/?", &format!("/{database}?"), 1);
    let init = |uri: &str| run(&["init", "--observe", "0", "--uri", uri, "--to", "first.yaml"]);
    let file = folder.path().join("first.yaml");
    for command in ["init", "advise"] {
        let refused = run(&[command, "--observe", "0", "--uri", &uri("nope")]);
        let told = String::from_utf8_lossy(&refused.stderr);
        assert_eq!((refused.status.code(), refused.stdout.as_slice()), (Some(2), b"".as_slice()), "{told}");
        if command == "advise" {
            assert!(told.contains("the database `nope` does not exist, or the user may not see it"), "{told}");
            assert!(told.contains("hint: there "), "{told}");
        }
    }
    assert_eq!(init(&uri("nope")).status.code(), Some(2));
    assert!(!file.exists());
    let output = init(&uri(&test.name));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = fs::read_to_string(&file).unwrap();
    assert!(written.contains(&format!("database: {:?}", test.name)) && !written.contains(&other), "{written}");
    // The commands at its top use this file, and a rule that may be chance says so.
    assert!(written.contains("#   denormd plan --apply --config first.yaml   creates"), "{written}");
    assert!(written.contains("#   denormd run --config first.yaml\n"), "{written}");
    assert!(written.contains("  # found by its values alone: verify it first\n"), "{written}");
}

/// People and their tasks refer to each other, and the owner's name is copied, with errors.
#[tokio::test(flavor = "multi_thread")]
async fn two_way_references_and_copies_that_are_there_already() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let (people, ids): (Vec<ObjectId>, Vec<ObjectId>) = (0..40).map(|_| (ObjectId::new(), ObjectId::new())).unzip();
    let task = |(n, id): (usize, &ObjectId)| {
        let name = if n == 7 { "Kate, before she married".to_owned() } else { format!("Kate {}", n % 20) };
        doc! {"_id": *id, "description": "Write the plan", "owner": people[n % 20], "by": name}
    };
    insert(&db, "tasks", ids.iter().enumerate().map(task)).await;
    let person = |(n, id): (usize, &ObjectId)| {
        let tasks: Vec<ObjectId> =
            ids.iter().enumerate().filter(|(task, _)| task % 20 == n).map(|(_, id)| *id).collect();
        doc! {"_id": *id, "name": format!("Kate {n}"), "tasks": tasks}
    };
    insert(&db, "person", people[..20].iter().enumerate().map(person)).await;
    let report = advise(&test, &[]);

    let up = relationship(&report, "tasks.owner");
    assert!(
        advice(up, "two-way references")["says"].as_str().unwrap().contains("`person`.tasks.$[] and `tasks`.owner")
    );
    let down = relationship(&report, "person.tasks.$[]");
    assert_eq!(advice(down, "array of references")["rule_of_thumb"], 3, "each task is one person's");
    assert!(all_advice(up, "embed").is_empty(), "{up:#}");
    let stale = advice(up, "stale copies");
    assert!(stale["says"].as_str().unwrap().contains("by (of `name`): 1 of 40"), "{stale:#}");
    let copy = up["advice"].as_array().unwrap().iter().find(|advice| !advice["rule"]["copy"].is_null()).unwrap();
    assert_eq!(copy["rule"]["copy"]["set"], serde_json::json!({"by": "$name"}), "what is there is taken over");
}

/// With the role `read` alone, anything it does not allow is "not known"; and no request writes anything.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_be_read_is_not_known_and_nothing_is_written() {
    let set = ReplicaSet::builder().auth().start().await;
    let test = set.database().await;
    let db = test.database();
    insert(&db, "patron", (0..30).map(|n| doc! {"_id": n, "name": format!("Joe {n}")})).await;
    insert(&db, "address", (0..90).map(|n| doc! {"_id": n, "patron_id": n % 30, "city": "Faketon"})).await;
    let admin = test.client.database("admin");
    let role = doc! {"role": "read", "db": &test.name};
    admin.run_command(doc! {"createUser": "reader", "pwd": "secret", "roles": [role]}).await.unwrap();
    let before = crate::support::cases::now(&db).await;

    let output =
        denormd(&set.uri_of("reader", "secret"), &test.name, &["advise", "--output", "json", "--observe", "1s"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!told.contains("secret"), "{told}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = relationship(&report, "address.patron_id");
    assert_figures(found, exact(&db, "address", "", "patron_id").await);
    advice(found, "embed");
    let unknown = report["not_known"].to_string();
    for privilege in ["top", "getLog", "serverStatus", "indexStats"] {
        assert!(unknown.contains(&format!("needs the privilege {privilege}")), "{privilege}: {unknown}");
    }
    assert_eq!(report["changes"]["events"], 120, "a change stream is within `read`");

    let output = denormd(&test.uri, &test.name, &["advise", "--output", "json", "--observe", "1s"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["not_known"], serde_json::json!([]));
    assert_eq!(collection(&report, "patron")["reads"], 0, "its own reads are not counted");
    assert_eq!(crate::support::cases::oplog(&test, before).await, [], "advise only reads");
    let profile = db.run_command(doc! {"profile": -1}).await.unwrap();
    assert_eq!(profile.get_i32("was").unwrap(), 0);
}

#[test]
fn the_page_has_the_defaults_of_every_threshold() {
    let page = include_str!("../../docs/advise.md");
    let advise = denormd_rules::config::Advise::default();
    for (key, default) in [
        ("embed_elements", advise.embed_elements),
        ("references_warn", advise.references_warn),
        ("references_stop", advise.references_stop),
        ("document_warn_bytes", advise.document_warn),
        ("document_bad_bytes", advise.document_bad),
        ("copy_ratio", advise.copy_ratio),
        ("no_copy_ratio", advise.no_copy_ratio),
        ("subset", advise.subset),
        ("indexes", advise.indexes),
        ("lookup_percent", advise.lookup_percent),
        ("collections", advise.collections),
        ("sample", advise.sample),
        ("scan_documents", advise.scan_documents),
        ("history_events", advise.history_events),
        ("history_seconds", advise.history.as_secs()),
    ] {
        assert!(page.contains(&format!("| `{key}` | {default} |")), "docs/advise.md: {key} is {default}");
    }
}
