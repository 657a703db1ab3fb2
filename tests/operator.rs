//! The operator's commands, as one types them: explain, dead-letters, pause, resume.

use bson::{Bson, Document, doc};
use serde_json::json;

use crate::{daemon::config, process::Program};

const NAMES: &str = r#"  - { name: names, copy: { source: parts, target: products, match: { "parts.$[].id": _id }, set: { "parts.$[].name": $name } } }"#;

#[tokio::test]
async fn explain_says_what_should_be_there_and_where_it_comes_from() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let rules = format!(
        "{NAMES}\n  - {{ name: latest, collect: {{ source: reviews, target: products, match: {{ _id: product }}, into: latest, element: $_id, sort: {{ _id: -1 }}, slice: 2 }} }}"
    );
    db.collection("parts").insert_one(doc! {"_id": 7, "name": "Spoke"}).await.unwrap();
    let parts = bson::bson!([{"id": 7, "name": "Hub"}, {"id": 9}, {"id": Bson::Null, "name": "stray"}]);
    db.collection("products").insert_one(doc! {"_id": 1, "parts": parts, "latest": [5, 4]}).await.unwrap();
    db.collection("reviews").insert_many((3..6).map(|n| doc! {"_id": n, "product": 1})).await.unwrap();
    let program = Program::new(&config(&test, &rules));
    program.run(&["plan", "--apply"]).await.exits(0);

    let told = program.run(&["explain", "names", "1"]).await.exits(0);
    let expected = format!(
        "names: {0}.products 1
  ! the rule: it has never run
  parts.$[].id, element 0: 7, found in {0}.parts 7
    parts.$[].name
      expected \"Spoke\"
      stored   \"Hub\"   <- differs
  parts.$[].id, element 1: 9, no document of {0}.parts answers
    parts.$[].name
      expected and stored nothing
  parts.$[].id, element 2: refers to nothing
    parts.$[].name
      expected nothing
      stored   \"stray\"   <- differs
",
        test.name
    );
    assert_eq!(told.out, expected);

    let told = program.run(&["explain", "latest", "1", "--output", "json"]).await.exits(0).json();
    assert_eq!(told["differs"], json!(false));
    assert_eq!(told["references"], json!([{"element": null, "value": [1], "sources": [5, 4, 3], "more": false}]));
    let path = json!({"path": "latest", "element": null, "differs": false, "expected": [5, 4], "stored": [5, 4]});
    assert_eq!(told["paths"], json!([path]));

    let told = program.run(&["explain", "names", "2"]).await.exits(1);
    assert!(told.err.contains("no document with this _id"), "{}", told.err);
    program.run(&["explain", "nmes", "1"]).await.exits(2);
}

/// A validator refuses what a rule copies. The letter is listed, a retry in vain says so, and once the validator is gone
/// one succeeds.
#[tokio::test]
async fn dead_letters_are_listed_retried_and_dropped() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let validator = doc! {"parts.name": {"$ne": "Spoke"}};
    db.run_command(doc! {"create": "products", "validator": validator}).await.unwrap();
    db.collection("parts")
        .insert_many([doc! {"_id": 7, "name": "Spoke"}, doc! {"_id": 8, "name": "Hub"}])
        .await
        .unwrap();
    let product = |id: i32, part: i32| doc! {"_id": id, "parts": [{"id": part}]};
    db.collection("products").insert_many([product(1, 7), product(2, 8), product(3, 7)]).await.unwrap();
    let program = Program::new(&config(&test, NAMES));
    program.run(&["plan", "--apply"]).await;
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;

    let listed = program.run(&["dead-letters", "list", "--output", "json"]).await.exits(0).json();
    assert_eq!(listed["count"], json!(2), "{listed}");
    let letter = &listed["dead_letters"][0];
    assert_eq!((&letter["rule"], &letter["about"], &letter["key"]), (&json!("names"), &json!("value"), &json!([7])));
    assert_eq!(letter["reason"], json!("server error 121 (DocumentValidationFailure)"));
    let listed = program.run(&["dead-letters", "list", "--key", "3"]).await.exits(0);
    assert!(listed.out.starts_with("names value 7, target 3: server error 121"), "{}", listed.out);
    assert!(listed.out.ends_with("\n1 dead letter\n"), "{}", listed.out);
    // A check knows of them.
    let checked = program.run(&["check"]).await.exits(3);
    assert_eq!(checked.out.matches(" (set aside as a dead letter)\n").count(), 2, "{}", checked.out);

    program.run(&["dead-letters", "retry"]).await.exits(2);
    let tried = program.run(&["dead-letters", "retry", "--all"]).await.exits(1);
    assert!(tried.out.ends_with("2 dead letters tried, 2 left\n"), "{}", tried.out);
    let dropped = program.run(&["dead-letters", "drop", "--rule", "names", "--key", "1"]).await.exits(0);
    assert_eq!(dropped.out, "1 dead letter forgotten; their targets stay as they are\n");
    db.run_command(doc! {"collMod": "products", "validator": {}}).await.unwrap();
    let tried = program.run(&["dead-letters", "retry", "--rule", "names"]).await.exits(0);
    assert!(tried.out.ends_with("1 dead letter tried, 0 left\n"), "{}", tried.out);
    let name = async |id: i32| {
        let product = db.collection::<Document>("products").find_one(doc! {"_id": id}).await.unwrap().unwrap();
        product.get_array("parts").unwrap()[0].as_document().unwrap().get("name").cloned()
    };
    assert_eq!((name(3).await, name(1).await), (Some("Spoke".into()), None), "what was dropped stays as it is");
    daemon.stop().await;
}
