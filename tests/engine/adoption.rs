//! Mistakes in rules on existing data: each is reported with its line and a suggestion, and none costs a value.

mod table;

use bson::{Bson, Document, doc};
use denormd_engine::{
    checkpoint::store::Store,
    inspection::suspicion::suspicions,
    jobs::check::{Check, Scope},
    pipeline,
};
use denormd_model::rule_state::{BlockReason, RuleState};
use serde_json::json;

use crate::support::{
    daemon::{Daemon, all, config, context, load, until},
    process::Program,
};
use table::{AGGREGATE, AGGREGATES, COLLECT, COLLECTS, COPIES, COPY, Mistake};

/// A thousand orders whose customer's name the application has written.
async fn orders(db: &mongodb::Database, count: i32) {
    let customers = (0..10).map(|n| doc! {"_id": n, "firstName": format!("Ada {n}"), "email": "x"});
    db.collection("customers").insert_many(customers).await.unwrap();
    let orders = (0..count).map(|n| doc! {"_id": n, "customer": n % 10, "customerName": format!("Ada {}", n % 10)});
    db.collection("orders").insert_many(orders).await.unwrap();
    let keys = doc! {"createIndexes": "orders", "indexes": [{"key": {"customer": 1}, "name": "customer_1"}]};
    db.run_command(keys).await.unwrap();
}

const RIGHT: &str = "  - { name: customer, copy: { source: customers, target: orders, match: { customer: _id }, set: { customerName: $firstName } } }";

#[tokio::test]
async fn plan_counts_what_it_would_do_to_existing_values() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 1000).await;
    let orders = db.collection::<Document>("orders");
    orders.update_one(doc! {"_id": 1}, doc! {"$set": {"customerName": "Grace"}}).await.unwrap();
    orders.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 99}}).await.unwrap();
    orders.update_many(doc! {"_id": {"$in": [3, 4, 5]}}, doc! {"$unset": {"customerName": 1}}).await.unwrap();
    let program = Program::new(&config(&test, RIGHT));
    let told = program.run(&["plan"]).await;
    assert!(
        told.out.contains("customer: adds 3, overwrites 1, removes 1 (all 1000 targets compared)"),
        "{}\n{}",
        told.out,
        told.err
    );
    assert!(told.out.contains("in total: adds 3, overwrites 1, removes 1\n"), "{}", told.out);
    assert!(told.out.contains("it would remove 1 of 997 existing values"), "{}", told.out);
    assert!(!told.out.contains("Grace"), "values are shown on request alone: {}", told.out);
    let told = program.run(&["plan", "--show-values"]).await;
    assert!(told.out.contains("overwrite `customerName` of 1: \"Grace\" -> \"Ada 1\""), "{}", told.out);
    assert!(told.out.contains("remove `customerName` of 2: \"Ada 2\" -> nothing"), "{}", told.out);
}

/// Without a sample, `plan` compared nothing and said `ready`, although the daemon would block the rule.
#[tokio::test]
async fn plan_without_a_sample_counts_all_the_same() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 30).await;
    let program = Program::new(&config(&test, &RIGHT.replace("$firstName", "$email")));
    let told = program.run(&["plan", "--sample", "0"]).await.exits(4).out;
    assert!(
        told.contains("1. rule customer: it will be blocked, because it would overwrite 30 of 30 existing values"),
        "{told}"
    );
}

/// A rule is put into the shadow to see what it would do.
#[tokio::test]
async fn plan_counts_what_a_shadow_rule_would_do_and_does_not_block_it() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 100).await;
    let orders = db.collection::<Document>("orders");
    orders.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 99}}).await.unwrap();
    let program = Program::new(&config(&test, &RIGHT.replace("copy:", "shadow: true, copy:")));
    let told = program.run(&["plan"]).await.exits(0);
    let counted = "customer: adds 0, overwrites 0, removes 1 (all 100 targets compared; in shadow: nothing is written)";
    assert!(told.out.contains(counted), "{}", told.out);
}

/// A chain of rules once looked like a mistake: no document had the field that the first rule was going to write.
#[tokio::test]
async fn a_field_that_another_rule_writes_is_no_suspicion() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    db.collection::<Document>("orders").update_many(doc! {}, doc! {"$unset": {"customerName": 1}}).await.unwrap();
    db.collection("invoices").insert_one(doc! {"_id": 1, "order": 1}).await.unwrap();
    let second = "  - { name: invoice, allow_scan: true, copy: { source: orders, target: invoices, match: { order: _id }, set: { customer: $customerName } } }";
    let program = Program::new(&config(&test, second));
    let told = program.run(&["plan"]).await;
    assert!(told.out.contains("has the field `customerName`"), "{}", told.out);
    let program = Program::new(&config(&test, &format!("{RIGHT}\n{second}")));
    let told = program.run(&["plan"]).await;
    assert!(!told.out.contains("has the field `customerName`"), "{}", told.out);
}

/// A sample of a hundred is likely to lack a field that one document in 5,000 has. Because its name resembles that of another
/// field, its index was refused, and the rule could be blocked.
#[tokio::test]
async fn a_rare_field_is_no_suspicion() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let messages = (0..5000).map(|n| doc! {"_id": n, "rid": n % 10, "msg": "hello"});
    db.collection("messages").insert_many(messages).await.unwrap();
    // Larger than what is sampled.
    let rare = doc! {"drid": 7, "msgs": 8, "text": "x".repeat(300_000)};
    db.collection::<Document>("messages").update_one(doc! {"_id": 4000}, doc! {"$set": rare}).await.unwrap();
    db.collection("rooms").insert_many((0..10).map(|n| doc! {"_id": n, "name": n})).await.unwrap();
    let rules = "  - { name: discussion, copy: { source: rooms, target: messages, match: { drid: _id }, set: { name: $name } } }\n  \
                   - { name: within, copy: { source: messages, target: messages, match: { msgs: _id }, set: { found: $msg } } }\n";
    let told = Program::new(&config(&test, rules)).run(&["plan", "--apply"]).await.exits(0);
    for index in ["drid", "msgs"] {
        assert!(told.out.contains(&format!("createIndex({{ {index:?}: 1 }})")), "{}", told.out);
    }
    assert!(!told.out.contains("warning") && !told.out.contains("has the field"), "{}", told.out);
}

#[tokio::test]
async fn what_a_tree_reads_of_its_own_output_is_no_suspicion() {
    let test = denormd_fixture::database().await;
    let pages = (0..20).map(|id| doc! {"_id": id, "name": format!("page {id}"), "parent": id / 2});
    test.database().collection("pages").insert_many(pages).await.unwrap();
    let tree = "copy: { source: pages, target: pages, match: { parent: _id }, recursive: true, set: { path: { $concat: [$path, $$target.name] } }, otherwise: { path: $$target.name } }";
    let program = Program::new(&config(&test, &format!("  - {{ name: tree, allow_scan: true, {tree} }}")));
    let told = program.run(&["plan"]).await.exits(0);
    assert!(!told.out.contains("has the field"), "{}", told.out);
}

/// `plan` once reported `ready`; two seconds after `run`, all values were gone.
#[tokio::test]
async fn a_typo_in_the_source_is_not_ready() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 1000).await;
    let program = Program::new(&config(&test, &RIGHT.replace("source: customers", "source: custmers")));
    let told = program.run(&["plan", "--output", "json"]).await.json();
    assert_eq!(told["ready"], json!(false));
    assert_eq!(told["warnings"][0]["line"], json!(6));
    assert_eq!(told["warnings"][0]["hint"], json!("did you mean `customers`?"));
    let why = told["blocked"][0]["reason"].as_str().unwrap();
    assert_eq!(why, "it would remove 1000 of 1000 existing values; its source collection does not exist");
}

/// A misspelt database was once only warned about, and `plan --apply` created it with its indexes.
#[tokio::test]
async fn nothing_is_made_in_a_database_whose_name_is_misspelt() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 10).await;
    let misspelt = format!("{}s", test.name);
    let text = config(&test, RIGHT).replace(&format!("database: {:?}", test.name), &format!("database: {misspelt:?}"));
    let program = Program::new(&text.replace("target: orders", "target: \u{201c}orders\u{201d}"));
    let told = program.run(&["plan", "--apply"]).await.exits(4);
    assert!(told.out.contains("typographic"), "another warning at this place: {}", told.out);
    let place = format!("shop.yaml:6: the database `{misspelt}` of `{misspelt}.customers` does not exist");
    assert!(told.out.contains(&place), "{}", told.out);
    assert!(told.out.contains(&format!("did you mean `{}`?", test.name)), "{}", told.out);
    assert!(!told.out.contains("createIndex") && !told.out.contains("createCollection"), "{}", told.out);
    assert!(!test.client.list_database_names().await.unwrap().contains(&misspelt), "it was made");
    // If the name resembles no other one, `plan` offers to create the collection, and no index.
    let new: String = test.name.chars().rev().collect();
    let text = config(&test, RIGHT).replace(&format!("database: {:?}", test.name), &format!("database: {new:?}"));
    let told = Program::new(&text).run(&["plan"]).await.exits(4);
    assert!(!told.out.contains("createIndex") && told.out.contains("createCollection"), "{}", told.out);
}

/// They are in the text: no server is needed to detect them.
#[test]
fn typographic_quotation_marks_are_seen_offline() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("denormd.yaml");
    let rule = RIGHT.replace("orders,", "\u{201c}orders\u{201d},");
    std::fs::write(&file, format!("mongodb: {{ uri: mongodb://localhost, database: d }}\nrules:\n{rule}\n")).unwrap();
    let output = crate::support::running::denormd(&file).args(["plan", "--offline"]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("denormd.yaml:3:") && told.contains("typographic quotation marks"), "{told}");
    assert!(told.contains("did you mean `orders`?") && told.contains("read the warning above first"), "{told}");
}

/// A large collection is not read whole, and the summary says so.
#[tokio::test]
async fn a_large_collection_is_sampled_and_the_summary_says_so() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 12_000).await;
    let orders = db.collection::<Document>("orders");
    let program = Program::new(&config(&test, RIGHT));
    let told = program.run(&["plan"]).await.exits(0).out;
    assert!(told.contains("(sample: 5") && told.contains(" of about 12000 compared)"), "{told}");
    // Few values in a large collection: all of them are compared.
    orders.update_many(doc! {"_id": {"$gte": 10}}, doc! {"$unset": {"customerName": 1}}).await.unwrap();
    orders.update_one(doc! {"_id": 7}, doc! {"$set": {"customer": 99}}).await.unwrap();
    let told = program.run(&["plan"]).await.out;
    assert!(told.contains("among them all that hold a value"), "{told}");
    assert!(told.contains("it would remove 1 of 10 existing values"), "{told}");
}

/// A scan finds the oldest targets first. Those that an application has changed lately were lost among them: up to one in
/// sixteen could be overwritten without anybody's agreement.
#[tokio::test]
async fn the_newest_targets_of_a_large_collection_count_as_much_as_the_oldest() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 12_000).await;
    let newest = doc! {"_id": {"$gte": 11_500}};
    let changed = doc! {"$set": {"customerName": "mine"}};
    db.collection::<Document>("orders").update_many(newest, changed).await.unwrap();
    let told = Program::new(&config(&test, RIGHT)).run(&["plan"]).await.out;
    assert!(told.contains("it would overwrite"), "{told}");
}

/// Customers and their orders, each with values of the other one that the application has written.
async fn shop(db: &mongodb::Database) {
    for name in ["customers", "orders"] {
        db.run_command(doc! {"create": name, "changeStreamPreAndPostImages": {"enabled": true}}).await.unwrap();
    }
    let amount = |n: i32| 10 + n;
    let customers = (1..=240).map(|n| {
        doc! {
            "_id": n, "firstName": format!("Ada {n}"), "address": {"city": format!("Oslo {n}")}, "code": format!("c{n}"),
            "active": true, "orders": [{"id": n, "amount": amount(n)}], "total": amount(n),
        }
    });
    db.collection("customers").insert_many(customers).await.unwrap();
    let orders = (1..=240).map(|n| {
        doc! {
            "_id": n, "customer": n, "customerCode": format!("c{n}"), "customerName": format!("Ada {n}"),
            "customerCity": format!("Oslo {n}"), "amount": amount(n), "readers": [n, 1], "placed": n, "status": "open",
            "lines": [{"buyer": n, "buyerName": format!("Ada {n}")}],
        }
    });
    db.collection("orders").insert_many(orders).await.unwrap();
}

fn rule(text: &str) -> String {
    format!("  - name: r\n    allow_scan: true{}", text.trim_end())
}

/// The content of both collections, without the application's own changes that `changed` names.
async fn held(db: &mongodb::Database) -> Vec<Document> {
    let mut held = all(db, "customers").await;
    held.extend(all(db, "orders").await);
    held
}

/// Fails if an existing value has changed or is gone. Added values are allowed.
fn nothing_lost(row: &str, before: &[Document], after: &[Document]) {
    assert!(after.len() >= before.len(), "{row}: a document is gone");
    for (nth, before) in before.iter().enumerate() {
        for (name, value) in before {
            assert_eq!(after[nth].get(name), Some(value), "{row}: `{name}` of {}", before.get("_id").unwrap());
        }
    }
}

/// Tests all rows: as a new rule, or as a change of the right one.
async fn none_costs_a_value(right: &str, mistakes: &[Mistake], changed: bool) {
    for mistake in mistakes {
        let row = format!("{} ({})", mistake.what, if changed { "changed" } else { "new" });
        let test = denormd_fixture::database().await;
        let db = test.database();
        shop(&db).await;
        if changed {
            let daemon = Daemon::start(&test, &rule(right)).await;
            daemon.settled().await;
            daemon.stop().await;
        }
        let before = held(&db).await;
        let text = config(&test, &rule(mistake.rule));
        let loaded = load(&text);
        reported(&row, &text, mistake).await;
        let daemon = Daemon::begin(&loaded, false).await;
        daemon.settled().await;
        // A live change of both sides is no consent either.
        for name in ["customers", "orders"] {
            let all = db.collection::<Document>(name);
            all.update_many(doc! {"_id": {"$lte": 3}}, doc! {"$set": {"seen": true}}).await.unwrap();
        }
        daemon.settled().await;
        daemon.stop().await;
        nothing_lost(&row, &before, &held(&db).await);
    }
}

/// The mistake is reported at its line, with a suggestion.
async fn reported(row: &str, text: &str, mistake: &Mistake) {
    let context = context(text).await;
    let found = suspicions(&context.server, &context.plan, &context.plan.rules[0]).await.unwrap();
    let found = load(text).located(&found);
    let lines: Vec<&str> = text.lines().collect();
    let told = |found: &denormd_rules::config::LocatedMistake| {
        let line = found.place.line.and_then(|line| lines.get(line - 1)).copied().unwrap_or_default();
        line.contains(mistake.line) && found.hint.as_deref().unwrap_or_default().contains(mistake.suggestion)
    };
    assert!(found.iter().any(told), "{row}: {found:#?}\n{text}");
}

#[tokio::test]
async fn no_mistake_in_a_new_copy_costs_a_value() {
    none_costs_a_value(COPY, COPIES, false).await;
}

#[tokio::test]
async fn no_mistake_in_a_changed_copy_costs_a_value() {
    none_costs_a_value(COPY, COPIES, true).await;
}

#[tokio::test]
async fn no_mistake_in_a_new_collect_costs_a_value() {
    none_costs_a_value(COLLECT, COLLECTS, false).await;
}

#[tokio::test]
async fn no_mistake_in_a_changed_collect_costs_a_value() {
    none_costs_a_value(COLLECT, COLLECTS, true).await;
}

#[tokio::test]
async fn no_mistake_in_an_aggregate_costs_a_value() {
    none_costs_a_value(AGGREGATE, AGGREGATES, false).await;
    none_costs_a_value(AGGREGATE, AGGREGATES, true).await;
}

#[test]
fn the_table_has_forty_rows_and_more() {
    assert!(2 * (COPIES.len() + COLLECTS.len() + AGGREGATES.len()) >= 40);
}

/// The right rules, on the same data, are neither blocked nor suspected.
#[tokio::test]
async fn a_right_rule_is_neither_blocked_nor_suspected() {
    for right in [COPY, COLLECT, AGGREGATE] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        shop(&db).await;
        let text = config(&test, &rule(right));
        let context = context(&text).await;
        assert_eq!(suspicions(&context.server, &context.plan, &context.plan.rules[0]).await.unwrap(), [], "{right}");
        let daemon = Daemon::start_unadopted(&config(&test, &rule(right))).await;
        daemon.settled().await;
        db.collection::<Document>("customers")
            .update_one(doc! {"_id": 7}, doc! {"$set": {"firstName": "Grace"}})
            .await
            .unwrap();
        db.collection::<Document>("orders").update_one(doc! {"_id": 7}, doc! {"$set": {"amount": 1}}).await.unwrap();
        daemon.settled().await;
        daemon.stop().await;
        let customer = db.collection::<Document>("customers").find_one(doc! {"_id": 7}).await.unwrap().unwrap();
        let order = db.collection::<Document>("orders").find_one(doc! {"_id": 7}).await.unwrap().unwrap();
        let written = [
            order.get_str("customerName").ok() == Some("Grace"),
            customer.get_i32("total").ok() == Some(1),
            customer.get_array("orders").unwrap()[0].as_document().unwrap().get_i32("amount").ok() == Some(1),
        ];
        assert_eq!(written.iter().filter(|written| **written).count(), 1, "{right}: {order} {customer}");
    }
}

async fn standing(test: &denormd_fixture::TestDb, daemon: &Daemon) -> RuleState {
    let known = store_of(daemon).await.rules(&daemon.context().server).await.unwrap();
    known.into_iter().find(|(name, _)| name == "customer").unwrap_or_else(|| panic!("{}", test.name)).1.state
}

async fn store_of(daemon: &Daemon) -> Store {
    let context = daemon.context();
    let dead_letters = &context.dead_letters;
    Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await.unwrap()
}

/// The state of the rule once a daemon has run with it.
async fn state_after_a_run(test: &denormd_fixture::TestDb, rule: &str) -> RuleState {
    let daemon = Daemon::start_unadopted(&config(test, rule)).await;
    daemon.settled().await;
    let state = standing(test, &daemon).await;
    daemon.stop().await;
    state
}

/// Nine of a thousand documents were less than 1% of the values, so a changed rule deleted them without asking.
#[tokio::test]
async fn a_changed_rule_deletes_no_document_unasked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 1000).await;
    let targets = db.collection::<Document>("orders");
    let dangling = doc! {"$set": {"customer": 99}, "$unset": {"customerName": 1}};
    targets.update_many(doc! {"_id": {"$lt": 9}}, dangling).await.unwrap();
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let deletes = RIGHT.replace("set: {", "on_missing: delete, set: {");
    let state = run(&deletes).await;
    let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
    assert_eq!(adoption.causes, ["it would delete 9 documents or elements"]);
    assert_eq!(targets.count_documents(doc! {}).await.unwrap(), 1000);
    // It has been agreed to. The next change of the rule deletes the same documents.
    assert_eq!(run(&deletes.replace("copy:", "adopt: true, copy:")).await, RuleState::Live);
    let state = run(&deletes.replace("$firstName }", "$firstName, mail: $email }")).await;
    assert_eq!(state, RuleState::Live);
}

/// denormd took the values of a `once` rule for its own. When `once` was removed, the rule overwrote a year of history unasked.
#[tokio::test]
async fn a_rule_that_is_no_longer_once_needs_agreement() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    let once = RIGHT.replace("$firstName } }", "$firstName }, once: true }");
    assert_eq!(run(&once).await, RuleState::Live);
    let renamed = doc! {"$set": {"firstName": "Grace"}};
    db.collection::<Document>("customers").update_many(doc! {}, renamed).await.unwrap();
    let state = run(RIGHT).await;
    let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
    assert_eq!(adoption.causes, ["it would overwrite 30 of 30 existing values"]);
    let orders = db.collection::<Document>("orders");
    assert_eq!(orders.count_documents(doc! {"customerName": "Grace"}).await.unwrap(), 0);
    // Agreed to, the values can be put back.
    assert_eq!(run(&RIGHT.replace("copy:", "adopt: true, copy:")).await, RuleState::Live);
    assert_eq!(orders.count_documents(doc! {"customerName": "Grace"}).await.unwrap(), 30);
    let program = Program::new(&config(&test, "[]"));
    let told = program.run(&["undo", "customer"]).await.exits(0).out;
    assert!(told.starts_with("customer: 30 values put back\n"), "{told}");
    assert_eq!(orders.count_documents(doc! {"customerName": "Ada 1"}).await.unwrap(), 3);
}

/// Where a reference dangled, the rule had kept what the application wrote. Without `on_missing: keep` these values were removed, and with
/// another reference they were overwritten, as if the rule had written them.
#[tokio::test]
async fn a_rule_that_kept_values_without_a_source_needs_agreement_to_lose_them() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 1000).await;
    let orders = db.collection::<Document>("orders");
    let by_the_application = doc! {"$set": {"customer": 99, "customerName": "a visitor"}};
    orders.update_many(doc! {"_id": {"$lt": 9}}, by_the_application).await.unwrap();
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    let keeps = RIGHT.replace("$firstName } }", "$firstName }, on_missing: keep }");
    assert_eq!(run(&keeps).await, RuleState::Live);
    // The values of the other orders are the rule's own.
    let renamed = keeps.replace("$firstName", "{ $concat: [$firstName, '!'] }");
    assert_eq!(run(&renamed).await, RuleState::Live);
    let state = run(RIGHT).await;
    let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
    assert_eq!(adoption.causes[0], "it would remove 9 of 1000 existing values");
    assert_eq!(orders.count_documents(doc! {"customerName": "a visitor"}).await.unwrap(), 9);
}

/// Values that the application writes while a rule is not in the config belong to the application. A rule that returned overwrote them.
#[tokio::test]
async fn a_rule_that_returns_to_the_config_needs_agreement_like_a_new_one() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let mails = RIGHT.replace("name: customer", "name: mails").replace("customerName: $firstName", "mail: $email");
    let daemon = Daemon::start_unadopted(&config(&test, &mails)).await;
    daemon.settled().await;
    assert_eq!(standing(&test, &daemon).await, RuleState::Removed);
    daemon.stop().await;
    let orders = db.collection::<Document>("orders");
    orders.update_many(doc! {}, doc! {"$set": {"customerName": "the application's"}}).await.unwrap();
    let told = Program::new(&config(&test, RIGHT)).run(&["plan"]).await;
    assert!(told.out.contains("it would overwrite 30 of 30 existing values"), "{}", told.out);
    let state = run(RIGHT).await;
    assert!(matches!(state.block(), Some(BlockReason::Adoption(_))), "{state:?}");
    assert_eq!(orders.count_documents(doc! {"customerName": "the application's"}).await.unwrap(), 30);
}

/// Somebody agreed to a definition, paused the rule before its backfill was over, and corrected it. The values that were still the
/// application's counted as the rule's own, and the other definition overwrote them.
#[tokio::test]
async fn an_agreement_does_not_pass_to_another_definition() {
    for undo in ["", "undo: { mode: 'off' }\n"] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        orders(&db, 30).await;
        let orders = db.collection::<Document>("orders");
        orders.update_many(doc! {}, doc! {"$set": {"customerName": "the application's"}}).await.unwrap();
        for agreed in [RIGHT.to_owned(), RIGHT.replace("copy:", "adopt: true, backfill: manual, copy:")] {
            let with = |rules: &str| format!("{undo}{}", config(&test, rules));
            let daemon = Daemon::start_unadopted(&with(&agreed)).await;
            daemon.settled().await;
            let (context, store) = (daemon.shared(), store_of(&daemon).await);
            daemon.stop().await;
            let (_, record) = store.rules(&context.server).await.unwrap().into_iter().next().unwrap();
            if let Some(reason) = record.state.block() {
                assert!(store.unblock(&context.server, "customer", reason, &record.definition).await.unwrap());
            }
            let other = RIGHT.replace("$firstName", "$email");
            let told = Program::new(&with(&agreed)).run(&["plan"]).await;
            assert!(!told.out.contains("it will be blocked"), "it is agreed to: {}", told.out);
            let told = Program::new(&with(&other)).run(&["plan"]).await;
            assert!(told.out.contains("it would overwrite 30 of 30 existing values"), "{}", told.out);
            let daemon = Daemon::start_unadopted(&with(&other)).await;
            daemon.settled().await;
            let state = standing(&test, &daemon).await;
            assert!(matches!(state.block(), Some(BlockReason::Adoption(_))), "{state:?}");
            daemon.stop().await;
            assert_eq!(orders.count_documents(doc! {"customerName": "the application's"}).await.unwrap(), 30);
        }
    }
}

/// The definition that ran before the one with the open agreement is still what the rule has written.
#[tokio::test]
async fn values_that_the_rule_wrote_before_an_open_agreement_are_its_own() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let orders = db.collection::<Document>("orders");
    orders.update_many(doc! {}, doc! {"$set": {"mail": "the application's"}}).await.unwrap();
    let more = RIGHT.replace("$firstName", "$firstName, mail: $email");
    assert_eq!(run(&more.replace("copy:", "adopt: true, backfill: manual, copy:")).await, RuleState::AwaitingBackfill);
    // It replaces the rule's own values alone.
    let other = RIGHT.replace("$firstName", "{ $concat: ['Dr. ', $firstName] }");
    let told = Program::new(&config(&test, &other)).run(&["plan"]).await;
    assert!(!told.out.contains("it will be blocked"), "{}", told.out);
    assert_eq!(run(&other).await, RuleState::Live);
    assert_eq!(orders.count_documents(doc! {"customerName": {"$regex": "^Dr. "}}).await.unwrap(), 30);
    assert_eq!(orders.count_documents(doc! {"mail": "the application's"}).await.unwrap(), 30);
}

/// A changed definition was blocked, left the config and returned with its old figures. Agreed to, it overwrote what the application
/// had written meanwhile, and kept none of it.
#[tokio::test]
async fn a_blocked_definition_that_returns_to_the_config_is_counted_again() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let mistaken = RIGHT.replace("$firstName", "$lastName");
    let causes = async |state: RuleState| match state.block() {
        Some(BlockReason::Adoption(adoption)) => adoption.causes.join("; "),
        _ => panic!("{state:?}"),
    };
    assert_eq!(causes(run(&mistaken).await).await, "30 of 30 targets would lose their value");
    let mails = RIGHT.replace("name: customer", "name: mails").replace("customerName: $firstName", "mail: $email");
    let daemon = Daemon::start_unadopted(&config(&test, &mails)).await;
    daemon.settled().await;
    daemon.stop().await;
    let orders = db.collection::<Document>("orders");
    orders.update_many(doc! {}, doc! {"$set": {"customerName": "the application's"}}).await.unwrap();
    assert_eq!(causes(run(&mistaken).await).await, "it would remove 30 of 30 existing values");
    assert_eq!(run(&mistaken.replace("copy:", "adopt: true, copy:")).await, RuleState::Live);
    assert_eq!(orders.count_documents(doc! {"customerName": {"$exists": true}}).await.unwrap(), 0);
    let told = Program::new(&config(&test, "[]")).run(&["undo", "customer"]).await.exits(0).out;
    assert!(told.starts_with("customer: 30 values put back\n"), "{told}");
    assert_eq!(orders.count_documents(doc! {"customerName": "the application's"}).await.unwrap(), 30);
}

const DAYS: &str = "  - { name: customer, allow_scan: true, aggregate: { source: sales, target: { collection: days, create: true }, match: { _id: day }, set: { n: { $sum: 1 } } } }";

/// Inserts a sale on each of so many days.
async fn sales(db: &mongodb::Database, days: i32) -> mongodb::Collection<Document> {
    let sales = db.collection::<Document>("sales");
    sales.insert_many((0..days).map(|n| doc! {"_id": n, "day": n})).await.unwrap();
    sales
}

/// Documents stay without a sale because of the application's note. A rule that became the owner of the note deleted them unasked.
#[tokio::test]
async fn a_rule_that_becomes_the_owner_of_a_field_deletes_no_document_unasked() {
    // Of more than 10,000 documents, a sample is compared.
    for days in [1000, 10_001] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        let sales = sales(&db, days).await;
        let run = async |rule: &str| state_after_a_run(&test, rule).await;
        assert_eq!(run(DAYS).await, RuleState::Live);
        let targets = db.collection::<Document>("days");
        // A field that no document has changes nothing.
        let days_and_last = DAYS.replace("$sum: 1 }", "$sum: 1 }, last: { $max: $_id }");
        assert_eq!(run(&days_and_last).await, RuleState::Live);
        let few = doc! {"_id": {"$lt": 5}};
        targets.update_many(few.clone(), doc! {"$set": {"note": "the application's"}}).await.unwrap();
        sales.delete_many(few.clone()).await.unwrap();
        assert_eq!(run(&days_and_last).await, RuleState::Live);
        let owns = days_and_last.replace("$sum: 1 }", "$sum: 1 }, note: { $first: $text }");
        let state = run(&owns).await;
        let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
        let causes = adoption.causes.join("; ");
        let expected =
            if days == 1000 { "it would delete 5 documents or elements" } else { "it may delete targets or elements" };
        assert!(causes.contains(expected), "{causes}");
        assert_eq!(targets.count_documents(few).await.unwrap(), 5);
    }
}

/// The field of a blocked rule counted as the rules' own, so that documents with nothing but this field of the application were
/// deleted.
#[tokio::test]
async fn a_field_of_a_rule_that_is_blocked_keeps_its_document() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let sales = sales(&db, 20).await;
    assert_eq!(state_after_a_run(&test, DAYS).await, RuleState::Live);
    let targets = db.collection::<Document>("days");
    targets.update_many(doc! {}, doc! {"$set": {"note": "the application's"}}).await.unwrap();
    let notes = "  - { name: notes, copy: { source: notes, target: days, match: { _id: _id }, set: { note: $text } } }";
    let daemon = Daemon::start_unadopted(&config(&test, &format!("{DAYS}\n{notes}"))).await;
    daemon.settled().await;
    assert!(daemon.progress().borrow().states[1].is_blocked());
    sales.delete_many(doc! {"_id": {"$lt": 5}}).await.unwrap();
    daemon.settled().await;
    let few = doc! {"_id": {"$lt": 5}, "note": "the application's", "n": 0};
    assert_eq!(targets.count_documents(few).await.unwrap(), 5);
    let context = daemon.shared();
    let store = store_of(&daemon).await;
    let mut check = Check::new(&context, &store, &context.plan.rules[0], Scope::default()).await.unwrap();
    while check.next().await.unwrap().is_some() {}
    assert_eq!((check.tally.compared, check.tally.differing), (20, 0));
    Program::new(&config(&test, &format!("{DAYS}\n{notes}"))).run(&["unblock", "notes"]).await.exits(0);
    until("the documents are gone", async || (targets.count_documents(doc! {}).await.unwrap() == 15).then_some(()))
        .await;
    daemon.stop().await;
}

/// Both rules were counted before the first of them had written, so that the second one overwrote every label unasked.
#[tokio::test]
async fn a_rule_that_reads_what_another_has_yet_to_write_needs_agreement() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("makers").insert_one(doc! {"_id": 1, "name": "Ada"}).await.unwrap();
    let parts = db.collection::<Document>("parts");
    parts.insert_many((0..20).map(|n| doc! {"_id": n, "maker": 1})).await.unwrap();
    let products = db.collection::<Document>("products");
    products.insert_many((0..20).map(|n| doc! {"_id": n, "part": n, "label": "none"})).await.unwrap();
    let rules = "
  - { name: label, copy: { source: parts, target: products, match: { part: _id }, set: { label: { $ifNull: [$made_by, none] } } } }
  - { name: maker, backfill: manual, copy: { source: makers, target: parts, match: { maker: _id }, set: { made_by: $name } } }";
    let text = config(&test, rules);
    let program = Program::new(&text);
    let reason = "it reads fields that `maker` has not written yet, so its effect on 20 existing values is unknown";
    let told = program.run(&["plan", "--apply"]).await.exits(4);
    assert!(told.out.contains("label: adds 0, overwrites 0, removes 0 (all 20 targets compared)"), "{}", told.out);
    assert!(told.out.contains("as of now: `maker` has not yet written fields that this rule reads"), "{}", told.out);
    assert!(told.out.contains(reason), "{}", told.out);

    let daemon = Daemon::start_unadopted(&text).await;
    daemon.settled().await;
    let states = daemon.progress().borrow().states.clone();
    assert_eq!(states[1], RuleState::AwaitingBackfill);
    let Some(BlockReason::Adoption(adoption)) = states[0].block() else { panic!("{:?}", states[0]) };
    assert!(adoption.causes.iter().any(|cause| cause.contains(reason)), "{:?}", adoption.causes);
    // Nobody can know what they would agree to.
    let told = program.run(&["unblock", "label"]).await.exits(4);
    assert!(told.err.contains(reason), "{}", told.err);
    assert_eq!(products.count_documents(doc! {"label": "none"}).await.unwrap(), 20);

    program.run(&["backfill", "--rule", "maker"]).await.exits(0);
    let rules = test.beside("state").collection::<Document>("rules");
    let is_over = doc! {"_id.rule": "maker", "keeping": {"$not": {"$type": "object"}}};
    until("its first backfill is over", async || rules.find_one(is_over.clone()).await.unwrap()).await;
    let told = program.run(&["plan"]).await;
    assert!(told.out.contains("label: adds 0, overwrites 20, removes 0"), "{}", told.out);
    assert!(!told.out.contains("not written yet"), "{}", told.out);
    let told = program.run(&["unblock", "label"]).await.exits(0).out;
    assert!(told.contains("  now: of 20 targets it adds 0, overwrites 20, removes 0\n"), "{told}");
    until("the labels are written", async || {
        (products.count_documents(doc! {"label": "Ada"}).await.unwrap() == 20).then_some(())
    })
    .await;
    daemon.stop().await;

    // A rule that has nothing to write leaves nothing unknown.
    test.beside("state").drop().await.unwrap();
    let daemon = Daemon::start_unadopted(&text.replace("backfill: manual, ", "")).await;
    daemon.settled().await;
    assert!(daemon.progress().borrow().states.iter().all(|state| *state == RuleState::Live));
    daemon.stop().await;
}

/// Two deployments with a rule for one field overwrote each other's values for ever.
#[tokio::test]
async fn a_field_of_another_deployment_needs_agreement() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 30).await;
    let program = Program::new(&config(&test, RIGHT));
    let daemon = program.daemon();
    program.backfilled(&test, 1).await;
    for rule in [RIGHT.to_owned(), RIGHT.replace("copy:", "adopt: true, copy:")] {
        let other = format!("name: other\n{}", config(&test, &rule));
        let told = Program::new(&other).run(&["plan"]).await.exits(4);
        let owner = "rule `customer` of the deployment `default` owns `customerName` of ";
        assert!(told.out.contains(owner), "{}\n{}", told.out, told.err);
        let second = Daemon::start_unadopted(&other).await;
        second.settled().await;
        let state = second.progress().borrow().states[0].clone();
        let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
        assert!(adoption.causes[0].starts_with(owner), "{adoption:?}");
        second.stop().await;
    }
    daemon.stop().await;
    // Without a leader, it is the rule of a deployment that was removed.
    let other = format!("name: third\n{}", config(&test, RIGHT));
    Program::new(&other).run(&["plan"]).await.exits(0);
}

/// `on_empty: keep` promises that documents stay. When it was removed, the rule deleted them unasked.
#[tokio::test]
async fn a_rule_that_no_longer_keeps_empty_documents_deletes_none_unasked() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let sales = sales(&db, 1000).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    let keeps = &DAYS.replace("$sum: 1 } }", "$sum: 1 } }, on_empty: keep");
    assert_eq!(run(keeps).await, RuleState::Live);
    sales.delete_many(doc! {"_id": {"$lt": 9}}).await.unwrap();
    assert_eq!(run(keeps).await, RuleState::Live);
    let state = run(DAYS).await;
    let Some(BlockReason::Adoption(adoption)) = state.block() else { panic!("{state:?}") };
    assert_eq!(adoption.causes, ["it would delete 9 documents or elements"]);
    assert_eq!(db.collection::<Document>("days").count_documents(doc! {}).await.unwrap(), 1000);
}

/// The documents without a source may all be among those that were not drawn.
#[tokio::test]
async fn a_rule_that_may_delete_what_was_not_compared_needs_agreement() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 10_001).await;
    let rule = RIGHT.replace("set: {", "on_missing: delete, set: {");
    let told = Program::new(&config(&test, &rule)).run(&["plan"]).await;
    assert!(told.out.contains("it may delete targets or elements that were not compared (sample: "), "{}", told.out);
    let daemon = Daemon::start_unadopted(&config(&test, &rule)).await;
    daemon.settled().await;
    assert!(matches!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::Adoption(_))));
    daemon.stop().await;
}

/// A change that was taken back before it ran had been decided on, and nothing was counted when it returned.
#[tokio::test]
async fn a_change_that_was_withdrawn_is_counted_again() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let run = async |rule: &str| state_after_a_run(&test, rule).await;
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let changed = RIGHT.replace("$firstName }", "$firstName, mail: $email }");
    pipeline::decide(&*context(&config(&test, &changed)).await).await.unwrap();
    let decided = all(&test.beside("state"), "adoptions").await;
    assert!(decided[0].to_string().contains("mail"), "{decided:?}");
    assert_eq!(run(RIGHT).await, RuleState::Live);
    let targets = db.collection::<Document>("orders");
    targets.update_many(doc! {}, doc! {"$set": {"mail": "the application's"}}).await.unwrap();
    let state = run(&changed).await;
    assert!(matches!(state.block(), Some(BlockReason::Adoption(_))), "{state:?}");
    assert_eq!(targets.count_documents(doc! {"mail": "the application's"}).await.unwrap(), 30);
}

/// An order of this customer, without a copy.
async fn one_order(db: &mongodb::Database, customer: Document) {
    db.collection("customers").insert_many([customer, doc! {"_id": 2, "n": 5}]).await.unwrap();
    db.collection("orders").insert_one(doc! {"_id": 1, "customer": 1}).await.unwrap();
    let keys = doc! {"createIndexes": "orders", "indexes": [{"key": {"customer": 1}, "name": "customer_1"}]};
    db.run_command(keys).await.unwrap();
}

/// A number of another type is another definition. The server called both equal, and the daemon ended: it neither found a decision
/// about the new one nor could record one.
#[tokio::test]
async fn a_rule_with_a_number_of_another_type_is_a_changed_rule() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    one_order(&db, doc! {"_id": 1}).await;
    for (number, expected) in
        [("0", Bson::Int32(0)), ("0.0", Bson::Double(0.0)), ("-0.0", Bson::Double(-0.0)), ("0", Bson::Int32(0))]
    {
        let rule = RIGHT.replace("$firstName", &format!("{{ $ifNull: [$n, {number}] }}"));
        assert_eq!(state_after_a_run(&test, &rule).await, RuleState::Live);
        let order = db.collection::<Document>("orders").find_one(doc! {"_id": 1}).await.unwrap().unwrap();
        assert_eq!(format!("{:?}", order.get("customerName")), format!("{:?}", Some(&expected)));
    }
    // A definition with NaN is the same at each start.
    let rule = RIGHT.replace("$firstName", "{ $ifNull: [$n, .nan] }");
    for _ in 0..2 {
        assert_eq!(state_after_a_run(&test, &rule).await, RuleState::Live);
    }
}

/// The fields of a copied document in another order are another value. The daemon took the definitions for the same: the targets
/// kept the former order until an audit reported them as drift.
#[tokio::test]
async fn a_rule_that_copies_fields_in_another_order_is_a_changed_rule() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    one_order(&db, doc! {"_id": 1, "a": 1, "b": 2}).await;
    for (value, expected) in [("{ a: $a, b: $b }", ["a", "b"]), ("{ b: $b, a: $a }", ["b", "a"])] {
        let rule = RIGHT.replace("$firstName", value);
        assert_eq!(state_after_a_run(&test, &rule).await, RuleState::Live);
        let order = db.collection::<Document>("orders").find_one(doc! {"_id": 1}).await.unwrap().unwrap();
        let copied = order.get_document("customerName").unwrap();
        assert_eq!(copied.keys().collect::<Vec<_>>(), expected);
    }
}

/// The table's rule that would remove a value, in three partitions: no partition writes, not even where nothing would
/// be removed.
#[tokio::test]
async fn a_blocked_rule_waits_in_every_partition_until_a_person_agrees() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 300).await;
    let targets = db.collection::<Document>("orders");
    targets.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 99}}).await.unwrap();
    targets.update_one(doc! {"_id": 3}, doc! {"$unset": {"customerName": 1}}).await.unwrap();
    let before = all(&db, "orders").await;
    let text = config(&test, RIGHT).replace("state: {", "lease: { partitions: 3 }\nstate: {");
    let daemon = Daemon::start_unadopted(&text).await;
    daemon.settled().await;
    assert_eq!(all(&db, "orders").await, before);
    assert!(matches!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::Adoption(_))));
    let customers = db.collection::<Document>("customers");
    customers.update_one(doc! {"_id": 3}, doc! {"$set": {"firstName": "Grace"}}).await.unwrap();
    daemon.settled().await;
    assert_eq!(all(&db, "orders").await, before, "live writes wait as well");
    // After a restart the rule is still blocked: nobody has agreed.
    daemon.stop().await;
    let daemon = Daemon::start_unadopted(&text).await;
    daemon.settled().await;
    assert_eq!(all(&db, "orders").await, before);
    daemon.stop().await;

    let program = Program::new(&text);
    let told = program.run(&["unblock", "customer"]).await.exits(0).out;
    assert!(told.contains("adds 1, overwrites 0, removes 1"), "{told}");
    let orders = all(&db, "orders").await;
    assert_eq!((orders[2].get("customerName"), orders[3].get_str("customerName").ok()), (None, Some("Grace")));
    // The agreement is for this definition: another one that removes values is blocked.
    let other = text.replace("$firstName", "$lastName");
    let daemon = Daemon::start_unadopted(&other).await;
    daemon.settled().await;
    assert!(matches!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::Adoption(_))));
    assert_eq!(all(&db, "orders").await, orders);
    daemon.stop().await;
    // Back to the definition that was agreed to.
    let daemon = Daemon::start_unadopted(&text).await;
    daemon.settled().await;
    assert_eq!(standing(&test, &daemon).await, RuleState::Live);
    daemon.stop().await;
}

#[tokio::test]
async fn adopt_true_agrees_beforehand_and_later() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let targets = db.collection::<Document>("orders");
    targets.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 99}}).await.unwrap();
    let daemon = Daemon::start_unadopted(&config(&test, RIGHT)).await;
    daemon.settled().await;
    assert!(all(&db, "orders").await[2].contains_key("customerName"));
    daemon.stop().await;
    let daemon = Daemon::start_unadopted(&config(&test, &RIGHT.replace("copy:", "adopt: true, copy:"))).await;
    daemon.settled().await;
    assert!(!all(&db, "orders").await[2].contains_key("customerName"));
    daemon.stop().await;
}

/// The agreement once covered the adoption alone: a backfill that was agreed to stopped half-way at the removal limit
/// and needed another agreement.
#[tokio::test]
async fn adopt_true_agrees_to_removals_beyond_the_limit_in_the_first_backfill_alone() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let dangling = async |ids: std::ops::Range<i32>| {
        let ids: Vec<i32> = ids.collect();
        let orders = db.collection::<Document>("orders");
        orders.update_many(doc! {"_id": {"$in": ids}}, doc! {"$set": {"customer": 99}}).await.unwrap();
    };
    let with_values = async || {
        let orders = all(&db, "orders").await;
        orders.iter().filter(|order| order.contains_key("customerName")).count()
    };
    dangling(0..20).await;
    let rule = RIGHT.replace("copy:", "adopt: true, copy:");
    let text = config(&test, &rule).replace("limits: {", "limits: { destroy_per_hour: 5,");
    let daemon = Daemon::start_unadopted(&text).await;
    daemon.settled().await;
    assert_eq!(standing(&test, &daemon).await, RuleState::Live);
    assert_eq!(with_values().await, 10);
    // Afterwards the limit holds.
    let customers = db.collection::<Document>("customers");
    customers.delete_many(doc! {}).await.unwrap();
    daemon.settled().await;
    assert_eq!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::RemovalLimit));
    assert!(with_values().await >= 5, "{}", with_values().await);
    daemon.stop().await;
}

/// A rule whose decision was recorded just before the leader died.
#[tokio::test]
async fn a_decision_that_was_recorded_holds_after_a_crash() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let targets = db.collection::<Document>("orders");
    targets.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 99}}).await.unwrap();
    let daemon = Daemon::start_unadopted(&config(&test, RIGHT)).await;
    daemon.settled().await;
    daemon.kill();
    let states = test.beside("state");
    states.collection::<Document>("rules").delete_many(doc! {}).await.unwrap();
    // The effect of the rule is not counted a second time.
    targets.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 2}}).await.unwrap();
    targets.update_one(doc! {"_id": 3}, doc! {"$set": {"customerName": "x"}}).await.unwrap();
    let daemon = Daemon::start_unadopted(&config(&test, RIGHT)).await;
    daemon.settled().await;
    assert!(matches!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::Adoption(_))));
    assert_eq!(all(&db, "orders").await[3].get_str("customerName").ok(), Some("x"));
    daemon.stop().await;
}

/// No agreement is needed if no target has a value: nothing is at stake.
#[tokio::test]
async fn data_without_values_needs_no_agreement() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 300).await;
    let targets = db.collection::<Document>("orders");
    targets.update_many(doc! {}, doc! {"$set": {"customerName": null, "customer": 99}}).await.unwrap();
    targets.update_one(doc! {"_id": 2}, doc! {"$set": {"customer": 2}}).await.unwrap();
    let daemon = Daemon::start_unadopted(&config(&test, RIGHT)).await;
    daemon.settled().await;
    assert_eq!(all(&db, "orders").await[2].get_str("customerName").ok(), Some("Ada 2"));
    daemon.stop().await;
}

/// Rules are listed in the config's order, whatever order they are computed in.
#[tokio::test]
async fn plan_lists_rules_in_the_order_of_the_config() {
    let test = denormd_fixture::database().await;
    let rules = "
  - { name: second, copy: { source: b, target: c, match: { b: _id }, set: { a_name: $a_name } } }
  - { name: first, copy: { source: a, target: b, match: { a: _id }, set: { a_name: $name } } }";
    let program = Program::new(&config(&test, rules));
    let told = program.run(&["plan", "--offline", "--output", "json"]).await.exits(0).json();
    let names: Vec<&str> = told["rules"].as_array().unwrap().iter().filter_map(|rule| rule["name"].as_str()).collect();
    assert_eq!(names, ["second", "first"]);
}

/// A blocked rule has written nothing: when it is removed from the config, its paths still have the application's
/// values, which must not be pruned.
#[tokio::test]
async fn a_blocked_rule_leaves_nothing_to_prune() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let mistaken = RIGHT.replace("$firstName", "$lastName");
    let daemon = Daemon::start_unadopted(&config(&test, &mistaken)).await;
    daemon.settled().await;
    daemon.stop().await;
    let before = all(&db, "orders").await;
    let other = "  - { name: other, copy: { source: customers, target: orders, match: { customer: _id }, set: { mail: $email } } }";
    let program = Program::new(&config(&test, other));
    let told = program.run(&["prune", "customer"]).await.exits(0).out;
    assert!(told.contains("nothing to prune"), "{told}");
    assert_eq!(all(&db, "orders").await, before);
}

/// A changed rule that is blocked has written by its definition before. Without a daemon, `prune --all` removed these values if the
/// config did not have the rule.
#[tokio::test]
async fn what_a_blocked_rule_wrote_before_its_change_is_not_pruned_with_the_rest() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    assert_eq!(state_after_a_run(&test, RIGHT).await, RuleState::Live);
    let changed = RIGHT.replace("{ customer: _id }", "{ customer: email }");
    let daemon = Daemon::start_unadopted(&config(&test, &changed)).await;
    daemon.settled().await;
    assert!(standing(&test, &daemon).await.is_blocked());
    daemon.stop().await;
    let before = all(&db, "orders").await;
    let other = "  - { name: other, copy: { source: customers, target: orders, match: { customer: _id }, set: { mail: $email } } }";
    let program = Program::new(&config(&test, other));
    let told = program.run(&["prune", "--all"]).await.exits(4).err;
    assert!(told.contains("this config lacks rules of the deployment `default`: customer"), "{told}");
    assert_eq!(all(&db, "orders").await, before);
}

/// `unblock` counted the effect of the rule in its own config, and agreed to that of another definition, which the leader
/// runs.
#[tokio::test]
async fn a_definition_that_the_command_does_not_have_is_not_agreed_to() {
    let test = denormd_fixture::database().await;
    orders(&test.database(), 30).await;
    let mistaken = RIGHT.replace("$firstName", "$lastName");
    let daemon = Daemon::start_unadopted(&config(&test, &mistaken)).await;
    daemon.settled().await;
    let blocked = daemon.progress().borrow().states[0].clone();
    assert!(blocked.is_blocked());
    let told = Program::new(&config(&test, RIGHT)).run(&["unblock", "customer"]).await.exits(4).err;
    assert!(told.contains("the blocked definition of `customer` is not the one in this config"), "{told}");
    assert_eq!(daemon.progress().borrow().states[0], blocked);
    daemon.stop().await;
}

/// A rule in shadow has written nothing either. Its paths were retired with it, and `prune` removed the application's
/// values.
#[tokio::test]
async fn a_rule_in_shadow_leaves_nothing_to_prune() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 30).await;
    let before = all(&db, "orders").await;
    let daemon = Daemon::start(&test, &RIGHT.replace("copy:", "shadow: true, copy:")).await;
    daemon.settled().await;
    daemon.stop().await;
    let other = "  - { name: other, copy: { source: customers, target: orders, match: { customer: _id }, set: { mail: $email } } }";
    let program = Program::new(&config(&test, other));
    let told = program.run(&["prune", "customer"]).await.exits(0).out;
    assert!(told.contains("nothing to prune"), "{told}");
    assert_eq!(all(&db, "orders").await, before);
}

/// `explain` once reported nothing about a value that a `once` rule keeps.
#[tokio::test]
async fn explain_says_what_a_once_rule_keeps() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    orders(&db, 3).await;
    let customers = db.collection::<Document>("customers");
    customers.update_one(doc! {"_id": 1}, doc! {"$set": {"firstName": "Grace"}}).await.unwrap();
    let program = Program::new(&config(&test, &RIGHT.replace("copy: { ", "copy: { once: true, ")));
    let told = program.run(&["explain", "customer", "1"]).await.exits(0).out;
    assert!(told.contains("stored \"Ada 1\", which `once` never changes again"), "{told}");
    assert!(told.contains("the source gives \"Grace\" now"), "{told}");
}

/// Every target became a dead letter, and `plan` said that it would add a value to each.
#[tokio::test]
async fn a_path_through_an_array_without_its_mark_is_an_error() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("products").insert_many((0..5).map(|n| doc! {"_id": n, "name": format!("p{n}")})).await.unwrap();
    let lines = |n: i32| doc! {"_id": n, "lines": [{"productId": n % 5}, {"productId": (n + 1) % 5}]};
    db.collection("orders").insert_many((0..20).map(lines)).await.unwrap();
    let rule = |path: &str| {
        format!(
            "  - name: title\n    allow_scan: true\n    copy:\n      source: products\n      target: orders\n      match: {{ \"lines.$[].productId\": _id }}\n      set:\n        {path}: $name\n"
        )
    };
    let told = Program::new(&config(&test, &rule("lines.title"))).run(&["plan"]).await.exits(4).out;
    let error =
        "shop.yaml:13: `lines` is an array in 20 of 20 sampled targets: the server refuses to write `lines.title`";
    assert!(told.contains(error), "{told}");
    assert!(told.contains("did you mean `lines.$[].title`? `$[]` stands for each element"), "{told}");
    assert!(!told.contains("warning: "), "the error replaces the warning at its place: {told}");
    assert!(told.contains("title: adds 0, overwrites 0, removes 0 (all 20 targets compared)"), "{told}");
    let told = Program::new(&config(&test, &rule("\"lines.$[].title\""))).run(&["plan"]).await.exits(0).out;
    assert!(told.contains("title: adds 40, overwrites 0, removes 0 (all 20 targets compared)"), "{told}");
    // One target alone becomes a dead letter, and the rule runs for the others.
    db.collection::<Document>("orders").update_one(doc! {"_id": 0}, doc! {"$set": {"at": 5}}).await.unwrap();
    let told = Program::new(&config(&test, &rule("at.title"))).run(&["plan"]).await.exits(0).out;
    assert!(told.contains("`at` is no subdocument in 1 of 20 sampled targets"), "{told}");
    assert!(told.contains("title: adds 19, overwrites 0, removes 0 (all 20 targets compared)"), "{told}");
}

const PATHS: &str = "  - { name: customer, copy: { source: nodes, target: nodes, match: { in.parent: _id }, recursive: true, \
    set: { path: { $concat: [$path, /, $$target.name] }, depth: { $add: [$depth, 1] } }, \
    otherwise: { path: $$target.name, depth: 0 } } }";
const BELOW: &str = "  - { name: customer, aggregate: { source: nodes, target: nodes, match: { _id: in.parent }, \
    recursive: true, set: { below: { $sum: { $add: [1, $below] } } } } }";

/// A chain of three documents, and 27 below the last of them.
async fn nodes(db: &mongodb::Database) {
    let parent = |n: i32| if n < 4 { n - 1 } else { 2 };
    let node = |n: i32| {
        let mut node = doc! {"_id": n, "name": format!("n{n}")};
        if n > 0 {
            node.insert("in", doc! {"parent": parent(n)});
        }
        node
    };
    // The children come first.
    db.collection("nodes").insert_many((0..30).rev().map(node)).await.unwrap();
    let index = doc! {"createIndexes": "nodes", "indexes": [{"key": {"in.parent": 1}, "name": "parent"}]};
    db.run_command(index).await.unwrap();
}

/// The values of a tree are computed from those that a backfill writes above or below, not from those that are stored.
#[tokio::test]
async fn plan_counts_the_final_values_of_a_tree() {
    for (rule, values) in [(PATHS, 60), (BELOW, 30)] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        nodes(&db).await;
        if rule == BELOW {
            let pre_images = doc! {"collMod": "nodes", "changeStreamPreAndPostImages": {"enabled": true}};
            db.run_command(pre_images).await.unwrap();
        }
        let program = Program::new(&config(&test, rule));
        let told = program.run(&["plan"]).await.exits(0).out;
        let counted = format!("customer: adds {values}, overwrites 0, removes 0 (all 30 targets compared)");
        assert!(told.contains(&counted), "{told}");
        assert!(!told.contains("null is expected") && told.contains("30 of 30 sampled targets"), "{told}");
        let daemon = Daemon::start(&test, rule).await;
        daemon.settled().await;
        daemon.stop().await;
        let told = program.run(&["plan"]).await.exits(0).out;
        assert!(told.contains("customer: adds 0, overwrites 0, removes 0"), "the backfill wrote these values: {told}");
        assert!(told.contains("0 of 30 sampled targets"), "{told}");
    }
}

/// One document differs from what is stored around it, and a backfill would go from there to all others.
#[tokio::test]
async fn a_tree_whose_values_all_change_because_of_one_is_blocked() {
    for (rule, one, changed) in [(PATHS, doc! {"_id": 0}, 30), (BELOW, doc! {"_id": 29}, 3)] {
        let test = denormd_fixture::database().await;
        let db = test.database();
        nodes(&db).await;
        let pre_images = doc! {"collMod": "nodes", "changeStreamPreAndPostImages": {"enabled": true}};
        db.run_command(pre_images).await.unwrap();
        // The application has written these values, and then others at one place.
        let daemon = Daemon::start(&test, rule).await;
        daemon.settled().await;
        daemon.stop().await;
        db.client().database(&format!("{}_state", test.name)).drop().await.unwrap();
        let nodes = db.collection::<Document>("nodes");
        if rule == PATHS {
            nodes.update_one(one, doc! {"$set": {"name": "root"}}).await.unwrap();
        } else {
            nodes.delete_one(one).await.unwrap();
        }
        let before = all(&db, "nodes").await;
        let told = Program::new(&config(&test, rule)).run(&["plan"]).await.exits(4).out;
        assert!(told.contains(&format!("overwrites {changed}, removes 0")), "{told}");
        assert!(told.contains(&format!("it would overwrite {changed} of ")), "{told}");
        let daemon = Daemon::start_unadopted(&config(&test, rule)).await;
        daemon.settled().await;
        assert!(matches!(standing(&test, &daemon).await, RuleState::Blocked(BlockReason::Adoption(_))));
        daemon.stop().await;
        assert_eq!(all(&db, "nodes").await, before, "a blocked rule writes nothing");
    }
}

/// ObjectIds in capital letters are not what `key_type` reads, and nothing said so.
#[tokio::test]
async fn references_none_of_which_resolves_are_a_warning() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    let ids: Vec<bson::oid::ObjectId> = (0..30).map(|_| bson::oid::ObjectId::new()).collect();
    let customers = ids.iter().map(|id| doc! {"_id": *id, "firstName": "Ada"});
    db.collection("customers").insert_many(customers).await.unwrap();
    let orders = |form: fn(&bson::oid::ObjectId) -> bson::Bson| {
        ids.iter()
            .enumerate()
            .map(|(n, id)| doc! {"_id": i64::try_from(n).unwrap(), "customer": form(id)})
            .collect::<Vec<_>>()
    };
    db.collection("orders").insert_many(orders(|id| id.to_hex().to_uppercase().into())).await.unwrap();
    let rule = RIGHT.replace("name: customer,", "name: customer, allow_scan: true,");
    let typed = rule.replace("set:", "key_type: objectId, set:");
    let told = Program::new(&config(&test, &typed)).run(&["plan"]).await.exits(0).out;
    assert!(told.contains("none of 30 references of type string in sampled targets resolves"), "{told}");
    assert!(told.contains("they are ObjectIds in capital letters"), "{told}");
    // Some orders have one type, and some another.
    db.collection::<Document>("orders").drop().await.unwrap();
    let (mut mixed, others) = (orders(|id| id.to_hex().into()), orders(|id| (*id).into()));
    mixed.splice(..15, others.into_iter().take(15));
    db.collection("orders").insert_many(mixed).await.unwrap();
    let told = Program::new(&config(&test, &rule)).run(&["plan"]).await.exits(0).out;
    assert!(told.contains("none of 15 references of type string in sampled targets resolves"), "{told}");
    assert!(told.contains("`key_type` converts between ObjectIds and their strings"), "{told}");
    let told = Program::new(&config(&test, &typed)).run(&["plan"]).await.exits(0).out;
    assert!(!told.contains("warning: "), "{told}");
}
