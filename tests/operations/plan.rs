//! `denormd plan` on a live cluster, and the role that `denormd role` prints.

use bson::{Bson, Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use serde_json::{Value, json};

use crate::support::{daemon::config, process::Program};

const HOST: &str =
    "  - { name: host, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip, name: $name } } }";

/// Ten hosts; a hundred log messages, some with an empty reference, and some with a reference of another type.
async fn hosts_and_logs(test: &TestDb) {
    let db = test.database();
    db.collection("hosts").insert_many((0..10).map(|n| doc! {"_id": n, "ip": "10.0.0.1", "name": "x"})).await.unwrap();
    let host = |n: i32| match n {
        0..90 => Bson::Int32(n / 9),
        90..95 => Bson::Int32(99),
        _ => Bson::String("3".to_owned()),
    };
    db.collection("logs").insert_many((0..100).map(|n| doc! {"_id": n, "host": host(n)})).await.unwrap();
}

#[tokio::test]
async fn plan_says_what_a_rule_will_meet() {
    let test = denormd_fixture::database().await;
    hosts_and_logs(&test).await;
    let program = Program::new(&config(&test, HOST));
    let told = program.run(&["plan"]).await.exits(4);
    assert!(told.out.contains("NO INDEX of "), "{}", told.out);
    let told = program.run(&["plan", "--apply", "--output", "json"]).await.exits(0).json();
    assert_eq!((&told["ready"], told["applied"].as_array().unwrap().len()), (&json!(true), 1));
    let live = &told["rules"][0]["live"];
    assert_eq!(live["source_reads"], json!(["ip", "name", "_id"]));
    assert_eq!(live["lookups"][0]["index"], json!("_id_"));
    assert_eq!(live["lookups"][1]["index"], json!("host_1"));
    let sample = &live["sample"];
    assert_eq!((&sample["targets"], &sample["differing"]), (&json!(100), &json!(90)));
    let references = json!([
        {"kind": "int", "count": 95, "resolved": 90},
        {"kind": "string", "count": 5, "resolved": 0},
    ]);
    assert_eq!(sample["references"], references);
    assert_eq!(sample["fan_out"], json!({"median": 9, "p99": 9, "worst": 9, "mean": 9.0}));
    // Two strings, with their names and types.
    let grown = bson::rawdoc! {"ip": "10.0.0.1", "name": "x"}.as_bytes().len() - 5;
    assert_eq!(sample["sizes"]["mean_growth"].as_f64(), Some(f64::from(u32::try_from(grown * 90).unwrap()) / 100.0));
    let text = program.run(&["plan"]).await.exits(0).out;
    assert!(text.contains("references  of type string: 0 of 5 resolve (0%), from sampled targets"), "{text}");
    assert!(text.ends_with("\nready\n"), "{text}");
}

/// The flights: without indexes, each sampled key once read all of them, and `plan` took minutes. Now one pass gives
/// the same figures.
#[tokio::test]
async fn without_an_index_a_large_collection_is_not_read_for_each_key() {
    const FLIGHTS: i32 = 12_000;
    const PLANES: i32 = 300;
    let set = ReplicaSet::builder().start().await;
    let test = set.database().await;
    let db = test.database();
    db.collection("planes").insert_many((0..PLANES).map(|n| doc! {"_id": n, "tail": n, "year": 2000})).await.unwrap();
    let flights = (0..FLIGHTS).map(|n| doc! {"_id": n, "tail": n % PLANES});
    db.collection("flights").insert_many(flights).await.unwrap();
    let rules = "
  - { name: plane, copy: { source: planes, target: flights, match: { tail: tail }, set: { year: $year } } }
  - { name: last, collect: { source: flights, target: planes, match: { tail: tail }, into: last, element: { id: $_id }, sort: { _id: 1 }, slice: -5 } }
  - { name: count, aggregate: { source: flights, target: planes, match: { tail: tail }, set: { count: { $sum: 1 } } } }
";
    let program = Program::new(&config(&test, rules));
    let scanned = async || {
        let status = test.client.database("admin").run_command(doc! {"serverStatus": 1}).await.unwrap();
        let executor = status.get_document("metrics").and_then(|metrics| metrics.get_document("queryExecutor"));
        executor.unwrap().get_i64("scannedObjects").unwrap()
    };
    let before = scanned().await;
    let without = program.run(&["plan", "--output", "json"]).await.exits(4).json();
    let read = scanned().await - before;
    // It was once a thousand times the collection.
    assert!(read < i64::from(FLIGHTS) * 20, "{read} documents were read");
    let with = program.run(&["plan", "--apply", "--output", "json"]).await.exits(0).json();
    let sample = |told: &Value, rule: &str| {
        let rules = told["rules"].as_array().unwrap();
        rules.iter().find(|told| told["name"] == rule).unwrap()["live"]["sample"].clone()
    };
    for told in [&without, &with] {
        for (rule, drawn, fan_out) in [("plane", 500, "fan_out"), ("last", 100, "fan_in"), ("count", 100, "fan_in")] {
            let sample = sample(told, rule);
            assert_eq!(sample["not_estimated"], json!([]));
            let forty = json!({"median": 40, "p99": 40, "worst": 40, "mean": 40.0});
            assert_eq!(sample[fan_out], forty, "{rule}: {sample}");
            assert_eq!(sample["references"], json!([{"kind": "int", "count": drawn, "resolved": drawn}]), "{rule}");
            assert_eq!(sample["differing"], sample["targets"], "{rule}: {sample}");
        }
    }
    let [few, all] = [&without, &with].map(|told| sample(told, "last")["targets"].clone());
    assert_eq!((few, all), (json!(200), json!(300)));
}

/// Nearly all messages belong to one host of a thousand: a sample of hosts rarely has it, a sample of messages does.
#[tokio::test]
async fn the_worst_fan_out_is_found_by_the_references() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let host = |n: i32| doc! {"_id": n, "ip": "10.0.0.1", "name": "x"};
    db.collection("hosts").insert_many((0..1000).map(host)).await.unwrap();
    let host = |n: i32| if n < 900 { 500 } else { n - 900 };
    db.collection("logs").insert_many((0..1000).map(|n| doc! {"_id": n, "host": host(n)})).await.unwrap();
    let program = Program::new(&config(&test, HOST));
    let told = program.run(&["plan", "--apply", "--output", "json"]).await.exits(0).json();
    let fan_out = &told["rules"][0]["live"]["sample"]["fan_out"];
    assert_eq!((&fan_out["worst"], &fan_out["mean"]), (&json!(900), &json!(1.0)));
}

#[tokio::test]
async fn plan_says_what_a_validator_would_refuse() {
    let test = denormd_fixture::database().await;
    hosts_and_logs(&test).await;
    let validator = doc! {"$jsonSchema": {"properties": {"ip": {"bsonType": "int"}}}};
    test.database().run_command(doc! {"collMod": "logs", "validator": validator}).await.unwrap();
    let program = Program::new(&config(&test, HOST));
    let told = program.run(&["plan", "--apply", "--output", "json"]).await.exits(4).json();
    let finding = told["findings"][0]["message"].as_str().unwrap();
    assert!(finding.contains("would refuse 90 of 100 sampled targets"), "{finding}");
}

/// Keys are compared byte by byte, so an index under the collection's own collation is of no use, not even the one on
/// `_id`. The plan once reported `ready`, and each change read the whole collection.
#[tokio::test]
async fn an_index_of_another_collation_is_none() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    for name in ["hosts", "logs"] {
        db.run_command(doc! {"create": name, "collation": {"locale": "en", "strength": 2}}).await.unwrap();
    }
    db.collection("logs").insert_one(doc! {"_id": "a", "host": "x"}).await.unwrap();
    db.run_command(doc! {"createIndexes": "logs", "indexes": [{"key": {"host": 1}, "name": "own"}]}).await.unwrap();
    let program = Program::new(&config(&test, HOST));
    let told = program.run(&["plan"]).await.exits(4);
    for part in [
        "createIndex({ \"_id\": hashed }",
        "getCollection(\"logs\").createIndex({ \"host\": 1 }, { collation: { locale: \"simple\" } })",
    ] {
        assert!(told.out.contains(&part.replace("hashed", "\"hashed\"")), "{part}: {}", told.out);
    }
    let told = program.run(&["plan", "--apply", "--output", "json"]).await.exits(0).json();
    let indexes: Vec<&Value> =
        told["rules"][0]["live"]["lookups"].as_array().unwrap().iter().map(|lookup| &lookup["index"]).collect();
    assert_eq!(indexes, [&json!("_id_hashed"), &json!("host_1")]);
}

/// The rules' expressions were once tested over the documents whose key is MinKey, on the assumption that there are
/// none: one such document whose value cannot be computed prevented the daemon from starting.
#[tokio::test]
async fn a_document_whose_id_is_min_key_prevents_no_start() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let odd = doc! {"_id": Bson::MinKey, "ref": Bson::MinKey, "name": 5, "code": Bson::MinKey};
    for name in ["s", "t"] {
        db.collection(name).insert_one(odd.clone()).await.unwrap();
    }
    let shout = "{ $concat: [$name, '!'] }";
    let rules = format!(
        "
  - {{ name: id, copy: {{ source: s, target: {{ collection: t, where: {{ $expr: {{ $eq: [{{ $toUpper: $name }}, X] }} }} }}, match: {{ ref: _id }}, set: {{ a: {shout} }} }} }}
  - {{ name: into, allow_scan: true, copy: {{ source: s, target: t, match: {{ 'refs.$[]': code }}, into: b, element: {shout} }} }}
  - {{ name: some, allow_scan: true, collect: {{ source: s, target: t, match: {{ _id: ref }}, into: c, element: {{ x: {shout} }}, slice: 2 }} }}
  - {{ name: sum, allow_scan: true, aggregate: {{ source: s, target: t, match: {{ _id: ref }}, set: {{ d: {{ $sum: {{ $add: [$name, $code] }} }} }} }} }}
  - {{ name: held, allow_scan: true, copy: {{ source: s, target: t, match: {{ _id: 'list.$[]' }}, set: {{ e: {shout} }} }} }}"
    );
    Program::new(&config(&test, &rules)).run(&["plan", "--apply", "--sample", "0"]).await.exits(0);
    // An expression that the server would refuse for every document is still a finding.
    let wrong = "  - { name: id, copy: { source: s, target: { collection: t, where: { b: { $mod: 5 } } }, match: { ref: _id }, set: { a: $name } } }";
    let told = Program::new(&config(&test, wrong)).run(&["plan", "--sample", "0"]).await.exits(4);
    assert!(told.out.contains("the server refuses the rule's expressions or filters"), "{}{}", told.out, told.err);
    assert!(
        told.out.contains("malformed mod, needs to be an array"),
        "in the server's words: {}{}",
        told.out,
        told.err
    );
}

/// The rules of this test need every kind of privilege: deletes too.
const RULES: &str = "
  - { name: host, guard: watch, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip }, on_missing: delete } }
  - { name: latest, collect: { source: logs, target: hosts, match: { _id: host }, into: latest, element: { id: $_id }, sort: { _id: -1 }, slice: 2 } }
  - { name: count, aggregate: { source: logs, target: hosts, match: { _id: host }, set: { count: { $sum: 1 } } } }
  - { name: full, copy: { source: hosts, target: logs, match: { host: _id }, set: { full: { $concat: [$ip, $$target.text] } } } }
";

/// Its databases are dropped before its server.
struct Guarded {
    test: TestDb,
    set: ReplicaSet,
    role: Document,
}

impl Guarded {
    /// Creates a user `name` with these privileges.
    async fn user(&self, name: &str, privileges: &[Bson]) -> Program {
        let admin = self.test.client.database("admin");
        let role = doc! {"createRole": name, "privileges": privileges.to_vec(), "roles": []};
        admin.run_command(role).await.unwrap();
        admin.run_command(doc! {"createUser": name, "pwd": "secret", "roles": [name]}).await.unwrap();
        let text = config(&self.test, RULES).replace(&self.test.uri, &self.set.uri_of(name, "secret"));
        Program::new(&text)
    }
}

/// A daemon runs with exactly the printed role; and each privilege that is removed is reported by name before anything
/// is written.
#[tokio::test]
async fn the_role_is_enough_and_each_privilege_of_it_is_needed() {
    let set = ReplicaSet::builder().auth().start().await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_many((0..3).map(|n| doc! {"_id": n, "ip": "old"})).await.unwrap();
    db.collection("logs").insert_many((0..9).map(|n| doc! {"_id": n, "host": n % 3})).await.unwrap();
    let root = Program::new(&config(&test, RULES));
    root.run(&["plan", "--apply"]).await.exits(0);
    let role = root.run(&["role", "--output", "json"]).await.exits(0).json();
    let role = Bson::try_from(role).unwrap().as_document().unwrap().clone();
    let guarded = Guarded { test, set, role };
    let privileges = guarded.role.get_array("privileges").unwrap();

    let program = guarded.user("denormd", privileges).await;
    program.run(&["plan"]).await.exits(0);
    let daemon = program.daemon();
    program.backfilled(&guarded.test, 3).await;
    db.collection::<Document>("hosts").update_one(doc! {"_id": 0}, doc! {"$set": {"ip": "new"}}).await.unwrap();
    db.collection::<Document>("hosts").delete_one(doc! {"_id": 2}).await.unwrap();
    let logs = db.collection::<Document>("logs");
    let begun = std::time::Instant::now();
    let done = doc! {"$or": [{"host": 0, "ip": {"$ne": "new"}}, {"host": 2}]};
    while logs.count_documents(done.clone()).await.unwrap() > 0 {
        assert!(begun.elapsed() < crate::support::daemon::PATIENCE, "{}", daemon.log());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    for command in [
        vec!["check"],
        vec!["explain", "host", "0"],
        vec!["dead-letters", "list"],
        vec!["pause", "count"],
        vec!["resume", "count"],
    ] {
        program.run(&command).await.exits(0);
    }
    daemon.stop().await;
    assert!(!program.log().contains("Unauthorized"), "{}", program.log());

    // After a change of the rules, the role is there.
    let update = root.run(&["role", "--update", "--output", "json"]).await.exits(0).json();
    let update = Bson::try_from(update).unwrap().as_document().unwrap().clone();
    let admin = guarded.test.client.database("admin");
    admin.run_command(doc! {"updateRole": "denormd", "privileges": []}).await.unwrap();
    program.run(&["plan"]).await.exits(4);
    admin.run_command(update).await.unwrap();
    program.run(&["plan"]).await.exits(0);
    let script = root.run(&["role", "--update"]).await.exits(0).out;
    let begin = "db.getSiblingDB(\"admin\").updateRole(\"denormd\", {\n  privileges: [\n    // ";
    assert!(script.starts_with(begin) && script.ends_with("  ],\n  roles: []\n})\n"), "{script}");

    let mut nth = 0;
    for (at, privilege) in privileges.iter().enumerate() {
        let privilege = privilege.as_document().unwrap();
        let resource = privilege.get_document("resource").unwrap();
        let actions = privilege.get_array("actions").unwrap();
        for action in actions {
            let mut less = privileges.clone();
            let left: Vec<Bson> = actions.iter().filter(|other| *other != action).cloned().collect();
            less[at] = doc! {"resource": resource.clone(), "actions": left.clone()}.into();
            less.retain(|privilege| !privilege.as_document().unwrap().get_array("actions").unwrap().is_empty());
            nth += 1;
            let program = guarded.user(&format!("less{nth}"), &less).await;
            let told = program.run(&["plan", "--sample", "0"]).await;
            if resource.get_str("db").is_ok_and(|db| db == "local") {
                told.exits(0);
                continue;
            }
            let covered =
                action.as_str() == Some("find") && resource.get_str("collection").is_ok_and(|name| !name.is_empty());
            if covered {
                // The stream's `find` on the whole database grants it as well.
                told.exits(0);
                continue;
            }
            let told = told.exits(4);
            let missing = format!("lacks {}", action.as_str().unwrap());
            assert!(told.out.contains(&missing), "{missing} {resource}: {}", told.out);
            assert!(told.out.contains("grantPrivilegesToRole"), "{}", told.out);
        }
    }
    let program = guarded.user("nobody", &[]).await;
    let told = program.run(&["run"]).await.exits(4);
    assert!(told.err.contains("lacks changeStream, find, listCollections"), "{}", told.err);
    let told = program.run(&["events"]).await.exits(4).err;
    let state = guarded.test.beside("state").name().to_owned();
    assert!(told.contains("the user may not run ") && told.contains(&format!(" on `{state}.")), "{told}");
    assert!(told.contains("hint: `denormd role`"), "{told}");

    // `--apply` needs more than the daemon.
    root.run(&["plan"]).await.exits(0);
    db.collection::<Document>("logs").drop_indexes().await.unwrap();
    let program = guarded.user("daemon", privileges).await;
    let told = program.run(&["plan", "--apply", "--sample", "0"]).await.exits(4).err;
    let logs = format!("the user may not run createIndexes on `{}.logs`", guarded.test.name);
    assert!(told.contains(&logs) && told.contains("hint: `denormd role --with-apply`"), "{told}");

    // A connection string without a user.
    let without = guarded.set.uri_of("", "").replace(":@", "").replace("&authSource=admin", "");
    let program = Program::new(&config(&guarded.test, RULES).replace(&guarded.test.uri, &without));
    for command in ["plan", "events", "check"] {
        let told = program.run(&[command]).await.exits(4).err;
        assert!(told.contains("the server demands a user, and the connection has none"), "{command}: {told}");
        assert!(told.contains("mongodb://USER:PASSWORD@"), "{command}: {told}");
    }
}

/// The message of `plan --offline` for these rules; the first of them is line 3 of the file.
fn told_offline(rules: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    std::fs::write(&file, format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{rules}\n")).unwrap();
    let output = crate::support::running::denormd(&file).args(["plan", "--offline"]).output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A rule over several lines: `copy` is line 4, `match` line 5, `set` line 6, and the path or value line 7.
fn a_copy(on: &str, entry: &str) -> String {
    format!(
        "  - name: r\n    copy: {{ source: s, target: t,\n      match: {{ {on} }},\n      set: {{\n        {entry} }} }}"
    )
}

/// Each mistake is shown with its line, and with the caret at the path or the key that is wrong.
#[test]
fn mistakes_in_paths_and_expressions_are_shown_at_their_place() {
    for (on, entry, expected) in [
        (
            "a: _id",
            "\"lines[].name\": $n",
            ":7:9: `lines[].name` is not a path: `lines[]` has no meaning here; every element of an array is `$[]`",
        ),
        ("a: _id", "\"lines[0].name\": $n", "did you mean `lines.$[].name`?"),
        ("a: _id", "lines.*.name: $n", ":7:9: `lines.*.name` is not a path: `*` has no meaning here"),
        ("a: _id", "\"company \": $n", ":7:9: `company ` is not a path: `company ` begins or ends with a space"),
        ("a: _id", "\"company \": $n", "did you mean `company`?"),
        ("a: _id", "$name: $n", ":7:9: `$name` is not a path"),
        ("$a: _id", "name: $n", ":5:16: `$a` is not a path"),
        ("a: $_id", "name: $n", ":5:19: `$_id` is not a path"),
        ("a: _id", "_id: $n", ":7:9: `_id` cannot be written"),
        ("a: _id", "a: $n", ":7:9: the rule writes `a` and reads it to find its source"),
        ("a: _id", "b: $$target.b", ":7:9: the rule writes `b` and reads it with `$$target`"),
        ("a: _id", "\"lines.$[].name\": $n", ":7:9: `lines.$[].name` runs through an array that `match` does not bind"),
        ("a: _id", "b: $n }, otherwise: { nome: x", ":7:31: `nome` is not a path of `set`"),
        ("a: _id", "b: { $cond: { if: $n, then: VIP } }", ":7:9: `$cond` has no `else`"),
        ("a: _id", "b: $n, c: $$targett.d", ":7:19: unknown variable `$$targett`"),
    ] {
        let told = told_offline(&a_copy(on, entry));
        assert!(told.contains(expected), "{on} {entry}: {told}");
    }
    // Two of them are two messages.
    let told = told_offline(&a_copy("a: _id", "b: { $cond: [true] }, c: $$targett.d"));
    assert!(told.contains("`$cond` takes three values, this one has 1") && told.contains("`$$targett`"), "{told}");
}

/// The owner of a path is shown, and so is the path itself.
#[test]
fn a_path_with_two_owners_is_shown_at_both_places() {
    let two =
        format!("{}\n{}", a_copy("a: _id", "name: $n"), a_copy("b: _id", "name: $n").replace("name: r", "name: q"));
    let told = told_offline(&two);
    assert!(told.contains(":12:9: `name` of `d.t` is already owned by rule `r`"), "{told}");
    assert!(told.contains(":7:15: its owner is here"), "{told}");
}

/// `$first $last` is the path of one field, and every copy of it was missing.
#[test]
fn texts_of_other_languages_are_a_warning() {
    let told = told_offline(&a_copy("a: _id", "name: \"$first $last\""));
    assert!(told.contains(":7:15: `$first $last` is the path of one field"), "{told}");
    assert!(told.contains("did you mean `{ $concat: [$first, \" \", $last] }`?"), "{told}");
    assert!(told.contains("read the warning above first"), "{told}");
    let told = told_offline(&a_copy("a: _id", "name: { $literal: \"$first $last\" }"));
    assert!(told.contains("the config is sound"), "{told}");
}

#[test]
fn slips_in_yaml_have_a_hint() {
    for (rules, expected) in [
        ("  - name: r\n    shadow: yes", ":4:13: expected true or false, found the text `yes`"),
        ("  - name: r\n    shadow: yes", "hint: write `true`"),
        (
            "  - name: r\n    copy: { source: s, target: t, matches: { a: _id }, set: { b: $c } }",
            "did you mean `match`?",
        ),
        (
            "  - name: r\n    copy:\n      source: s\n       target: t",
            "a line is indented differently from the line above",
        ),
        ("  - name: r\n    copy:\n\tsource: s", "denormd.yaml:5:"),
        ("  - name: r\n    copy:\n\tsource: s", "hint: YAML is indented by spaces"),
    ] {
        let told = told_offline(rules);
        assert!(told.contains(expected), "{rules}: {told}");
    }
}

/// The server finds some mistakes in expressions: they are shown at their place as well.
#[tokio::test]
async fn an_expression_that_the_server_refuses_is_shown_at_its_place() {
    let test = denormd_fixture::database().await;
    hosts_and_logs(&test).await;
    let rules = "  - name: r\n    allow_scan: true\n    copy:\n      source: hosts\n      target: logs\n      match: { host: _id }\n      set:\n        a: $name\n        b: { $dateToString: { format: \"%Y\" } }";
    let told = Program::new(&config(&test, rules)).run(&["plan"]).await.exits(4).out;
    assert!(told.contains("shop.yaml:14: the server refuses the rule's expressions or filters"), "{told}");
    assert!(told.contains("14 |         b: { $dateToString"), "{told}");
    assert!(told.contains("\n      |         ^"), "{told}");
    // It was only met at the first reference without a source.
    let rules = "  - name: r\n    allow_scan: true\n    copy:\n      source: hosts\n      target: logs\n      match: { host: _id }\n      set: { a: $name, b: $name }\n      otherwise:\n        a: none\n        b: { $dateToString: { format: \"%Y\" } }";
    let told = Program::new(&config(&test, rules)).run(&["plan"]).await.exits(4).out;
    assert!(told.contains("shop.yaml:15: the server refuses the rule's expressions or filters"), "{told}");
}

/// The steps of a rule whose `match` is reversed are those of another rule.
#[tokio::test]
async fn nothing_is_created_for_a_match_that_looks_reversed() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("customers").insert_many((0..20).map(|n| doc! {"_id": n, "name": "Ada"})).await.unwrap();
    db.collection("orders").insert_many((0..20).map(|n| doc! {"_id": n, "customerId": n})).await.unwrap();
    let rule = "  - { name: r, copy: { source: customers, target: orders, match: { _id: customerId }, set: { name: $name } } }";
    let told = Program::new(&config(&test, rule)).run(&["plan", "--apply"]).await.exits(4).out;
    assert!(told.contains("`match` looks reversed: correct it first; `--apply` does not create this"), "{told}");
    assert!(!told.contains("createIndex"), "{told}");
    let indexes = db.collection::<Document>("customers").list_index_names().await.unwrap();
    assert_eq!(indexes, ["_id_"]);
}

/// Where `plan` asks "did you mean", `--apply` does not create an index for the misspelt field.
#[tokio::test]
async fn nothing_is_created_for_a_field_that_looks_misspelt() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("customers").insert_many((0..20).map(|n| doc! {"_id": n, "name": "Ada"})).await.unwrap();
    db.collection("orders").insert_many((0..20).map(|n| doc! {"_id": n, "customer": n})).await.unwrap();
    let rule = |reference: &str| {
        format!(
            "  - {{ name: r, copy: {{ source: customers, target: orders, match: {{ {reference}: _id }}, set: {{ name: $name }} }} }}"
        )
    };
    let program = Program::new(&config(&test, &rule("custmer")));
    let told = program.run(&["plan", "--apply"]).await.exits(4).out;
    assert!(
        told.contains("`custmer` looks misspelt; did you mean `customer`? Correct it first; `--apply` does"),
        "{told}"
    );
    assert!(!told.contains("createIndex"), "{told}");
    let indexes = async || db.collection::<Document>("orders").list_index_names().await.unwrap();
    assert_eq!(indexes().await, ["_id_"]);
    // A field that resembles none may be still to come.
    program.write(&config(&test, &rule("buyer")));
    program.run(&["plan", "--apply"]).await.exits(0);
    assert_eq!(indexes().await, ["_id_", "buyer_1"]);
}

/// The config of a second application without a `name` would end the rules of the first.
#[tokio::test]
async fn plan_names_the_rules_that_stop_when_the_config_runs() {
    let test = denormd_fixture::database().await;
    hosts_and_logs(&test).await;
    let rule = |name: &str| {
        format!(
            "  - {{ name: {name}, allow_scan: true, copy: {{ source: hosts, target: logs, match: {{ host: _id }}, set: {{ {name}: $ip }} }} }}\n"
        )
    };
    let program = Program::new(&config(&test, &[rule("one"), rule("two")].concat()));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(!told.contains("does not have"), "{told}");
    let daemon = program.daemon();
    program.backfilled(&test, 2).await;
    daemon.stop().await;
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.ends_with("\nready\n"), "{told}");

    program.write(&config(&test, &rule("two")));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.contains("has 1 rule that this config does not have: one"), "{told}");
    assert!(told.contains("it stops when this config runs. If it belongs to another application"), "{told}");
    program.write(&config(&test, &rule("three")));
    let told = program.run(&["plan", "--output", "json"]).await.exits(0).json()["warnings"].to_string();
    assert!(told.contains("has 2 rules that this config does not have: one, two"), "{told}");
    assert!(told.contains("they probably belong to another application"), "{told}");
    // Under another name, they are of another deployment.
    program.write(&format!("name: other\n{}", config(&test, &rule("three"))));
    program.run(&["plan"]).await.exits(0).out.ends_with("\nready\n").then_some(()).unwrap();
}

/// `key_type` holds for every entry of `match`, and `touch` leaves a value of another type as it is.
#[tokio::test]
async fn plan_says_which_values_a_conversion_or_a_time_does_not_fit() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let id = bson::oid::ObjectId::new();
    db.collection("parts").insert_one(doc! {"_id": id, "tenant": "acme", "name": "bolt"}).await.unwrap();
    let product = doc! {"_id": 1, "part": id.to_hex(), "tenant": "acme", "at": 5_i64};
    db.collection("products").insert_one(product).await.unwrap();
    let rules = "  - { name: r, allow_scan: true, copy: { source: parts, target: products, match: { part: _id, tenant: tenant }, key_type: objectId, set: { name: $name }, touch: at } }";
    let told = Program::new(&config(&test, rules)).run(&["plan"]).await.exits(4).out;
    for part in [
        "`key_type: objectId` converts `tenant`, and `tenant` is string in `parts`: values of different types never match",
        "`key_type` holds for every entry of `match`",
        "`at` is long in 1 of 1 sampled targets",
        "`touch` sets dates, and leaves a value of another type as it is",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(!told.contains("converts `part`"), "{told}");
}
