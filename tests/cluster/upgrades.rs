//! `make upgrades`: the previous release and this one in turn and side by side, on the state of both, while an application
//! writes. A matrix in three parts: each check prepares data and rules under the previous release, changes data around each
//! change of programs, and examines the copies after it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use mongodb::Database;

use crate::support::{
    daemon::{all, until},
    world::{Daemon, World},
};

/// Time for which the oplog must be silent.
const QUIET: std::time::Duration = std::time::Duration::from_secs(1);

/// The programs that run in each step: the previous release, this one, or both. It ends with this one.
const STEPS: [&[Program]; 7] = {
    use Program::{Previous, This};
    [&[Previous], &[Previous, This], &[This], &[This, Previous], &[Previous], &[Previous, This], &[This]]
};
const LAST: i32 = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    Previous,
    This,
}

/// Kinds of state that one program leaves to the other. Copies and lists are those of the [`World`], under its writer.
#[derive(Debug, Clone, Copy)]
enum Check {
    Totals,
    Elements,
    DeadLetter,
    Paused,
    SourceGone,
}

impl Check {
    const ALL: [Self; 5] = [Self::Totals, Self::Elements, Self::DeadLetter, Self::Paused, Self::SourceGone];

    fn rule(self) -> &'static str {
        match self {
            Self::Totals => {
                "  - { name: totals, guard: off, aggregate: { source: orders, target: customers, match: { _id: customer }, set: { orders: { $sum: 1 }, amount: { $sum: $amount } } } }\n"
            }
            Self::Elements => {
                "  - { name: lines, guard: off, copy: { source: items, target: carts, match: { \"lines.$[].item\": _id }, set: { \"lines.$[].title\": $title } } }\n"
            }
            Self::DeadLetter => {
                "  - { name: badges, guard: off, copy: { source: names, target: badges, match: { of: _id }, set: { name: $name } } }\n"
            }
            Self::Paused => {
                "  - { name: still, guard: off, copy: { source: models, target: cars, match: { of: _id }, set: { model: $title } } }\n"
            }
            Self::SourceGone => {
                "  - { name: gone, guard: off, copy: { source: plans, target: users, match: { of: _id }, set: { plan: $title } } }\n"
            }
        }
    }

    /// Documents before any daemon runs.
    async fn prepare(self, db: &Database) {
        let insert = async |name: &str, documents: Vec<Document>| {
            db.collection::<Document>(name).insert_many(documents).await.unwrap();
        };
        let titles = || (0..10).map(|n| doc! {"_id": n, "title": "first", "name": "first"}).collect::<Vec<_>>();
        let of = || (0..30).map(|n| doc! {"_id": n, "of": n % 10}).collect::<Vec<_>>();
        match self {
            Self::Totals => {
                insert("customers", (0..10).map(|n| doc! {"_id": n}).collect()).await;
                insert("orders", (0..50).map(|n| doc! {"_id": n, "customer": n % 10, "amount": n}).collect()).await;
            }
            Self::Elements => {
                insert("items", titles()).await;
                let lines = |n: i32| (0..3).map(|line| doc! {"item": (n + line) % 10}).collect::<Vec<_>>();
                insert("carts", (0..30).map(|n| doc! {"_id": n, "lines": lines(n)}).collect()).await;
            }
            Self::DeadLetter => {
                insert("names", titles()).await;
                let validator = doc! {"name": {"$ne": "refused"}};
                db.create_collection("badges").validator(validator).await.unwrap();
                insert("badges", of()).await;
            }
            Self::Paused => {
                insert("models", titles()).await;
                insert("cars", of()).await;
            }
            Self::SourceGone => {
                insert("plans", titles()).await;
                insert("users", of()).await;
            }
        }
    }

    /// Changes the data once the copies of the previous release are there.
    async fn initialise(self, world: &World, previous: &Path) {
        match self {
            Self::Paused => {
                self.validate(&world.db, 0).await;
                assert!(world.run_of(previous, &["pause", "still"]).await.success());
                let rules = world.test.beside("state").collection::<Document>("rules");
                let noticed = doc! {"_id.rule": "still", "$expr": {"$eq": ["$noticed", "$generation"]}};
                until("the pause is noticed", async || rules.find_one(noticed.clone()).await.unwrap()).await;
            }
            Self::SourceGone => {
                self.validate(&world.db, 0).await;
                world.db.collection::<Document>("plans").drop().await.unwrap();
                let rules = world.test.beside("state").collection::<Document>("rules");
                let held = doc! {"_id.rule": "gone", "backfill": "held"};
                until("the rule is held", async || rules.find_one(held.clone()).await.unwrap()).await;
            }
            Self::Totals | Self::Elements | Self::DeadLetter => {}
        }
    }

    /// A change before the programs change, and another one when they have `changed`.
    async fn change(self, world: &World, step: i32, changed: bool) {
        let db = &world.db;
        let set = async |name: &str, filter: Document, fields: Document| {
            db.collection::<Document>(name).update_many(filter, doc! {"$set": fields}).await.unwrap();
        };
        let title = format!("step {step}");
        match self {
            Self::Totals => {
                let orders = db.collection::<Document>("orders");
                let id = bson::oid::ObjectId::new();
                orders.insert_one(doc! {"_id": id, "customer": step % 10, "amount": step}).await.unwrap();
                orders.delete_one(doc! {"customer": (step + 1) % 10}).await.unwrap();
                set("orders", doc! {"amount": {"$lt": 5}}, doc! {"customer": (step + 2) % 10}).await;
            }
            Self::Elements => {
                set("items", doc! {"_id": step % 10}, doc! {"title": title}).await;
                let push = doc! {"$push": {"lines": {"item": (step + 5) % 10}}};
                db.collection::<Document>("carts").update_one(doc! {"_id": step}, push).await.unwrap();
            }
            Self::DeadLetter => {
                let name = if step % 2 == 1 { "refused".to_owned() } else { title };
                set("names", doc! {"_id": 3}, doc! {"name": name}).await;
            }
            Self::Paused => {
                set("models", doc! {"_id": 3}, doc! {"title": title}).await;
                if step == LAST && changed {
                    assert!(world.run(&["resume", "still"]).await.success());
                }
            }
            Self::SourceGone => {
                if step == LAST && changed {
                    // In place of the one that was dropped: most values are found again.
                    let plans = (0..10).map(|n| doc! {"_id": n, "title": if n == 3 { "last" } else { "first" }});
                    db.collection::<Document>("plans_next").insert_many(plans).await.unwrap();
                    let name = |name: &str| format!("{}.{name}", world.test.name);
                    let rename = doc! {"renameCollection": name("plans_next"), "to": name("plans"), "dropTarget": true};
                    world.test.client.database("admin").run_command(rename).await.unwrap();
                }
            }
        }
    }

    /// Waits until the targets are as they should be.
    async fn validate(self, db: &Database, step: i32) {
        until(&format!("{self:?} in step {step}"), async || self.is_right(db, step).await.then_some(())).await;
    }

    async fn is_right(self, db: &Database, step: i32) -> bool {
        match self {
            Self::Totals => {
                let mut expected: BTreeMap<i32, (i32, i32)> = (0..10).map(|n| (n, (0, 0))).collect();
                for order in all(db, "orders").await {
                    let entry = expected.get_mut(&order.get_i32("customer").unwrap()).unwrap();
                    *entry = (entry.0 + 1, entry.1 + order.get_i32("amount").unwrap());
                }
                all(db, "customers").await.iter().all(|customer| {
                    let (orders, amount) = expected[&customer.get_i32("_id").unwrap()];
                    customer.get_i32("orders").ok() == Some(orders) && customer.get_i32("amount").ok() == Some(amount)
                })
            }
            Self::Elements => {
                let items = all(db, "items").await;
                let titles: BTreeMap<i32, &str> =
                    items.iter().map(|item| (item.get_i32("_id").unwrap(), item.get_str("title").unwrap())).collect();
                let right = |line: &bson::Bson| {
                    let line = line.as_document().unwrap();
                    line.get_str("title").ok() == Some(titles[&line.get_i32("item").unwrap()])
                };
                all(db, "carts").await.iter().all(|cart| cart.get_array("lines").unwrap().iter().all(right))
            }
            // A value that the validator refuses leaves the one before it.
            Self::DeadLetter => {
                let three = if step == 0 { "step 0".to_owned() } else { format!("step {}", step - step % 2) };
                copied(db, "badges", "name", &three).await
            }
            Self::Paused => copied(db, "cars", "model", if step == LAST { "step 6" } else { "first" }).await,
            Self::SourceGone => copied(db, "users", "plan", if step == LAST { "last" } else { "first" }).await,
        }
    }
}

/// True if the targets of source 3 have this value, and the others their first one.
async fn copied(db: &Database, targets: &str, field: &str, of_three: &str) -> bool {
    all(db, targets).await.iter().all(|target| {
        let expected = if target.get_i32("of").ok() == Some(3) { of_three } else { "first" };
        target.get_str(field).ok() == Some(expected)
    })
}

/// Starts and ends programs until these run, beside the application's writes and those of the checks. Every second one is
/// killed.
async fn change_programs(world: &World, running: &mut Vec<(Program, Daemon)>, step: i32, previous: &Path) {
    let wanted = STEPS[usize::try_from(step).unwrap()];
    for program in wanted {
        if !running.iter().any(|(one, _)| one == program) {
            let daemon = if *program == Program::Previous { world.daemon_of(previous) } else { world.daemon() };
            running.push((*program, daemon));
        }
    }
    while let Some(nth) = running.iter().position(|(program, _)| !wanted.contains(program)) {
        let (_, daemon) = running.remove(nth);
        if step % 4 == 2 { daemon.kill9() } else { daemon.terminate().await }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "wants a program of the previous release: make upgrades"]
async fn the_previous_release_and_this_one_in_turn_and_side_by_side() {
    let previous = PathBuf::from(std::env::var_os("DENORMD_PREVIOUS").expect("DENORMD_PREVIOUS names a program"));
    let set = ReplicaSet::start(1).await;
    let world = World::new(set.database().await).await;
    for check in Check::ALL {
        check.prepare(&world.db).await;
    }
    world.write_config("denormd.yaml", &Check::ALL.map(Check::rule).concat());
    assert!(world.run_of(&previous, &["plan", "--apply"]).await.success());
    let mut running = Vec::new();
    let mut written = 0;
    for step in 0..=LAST {
        let writer = world.writer(u64::try_from(step).unwrap());
        if step > 0 {
            for check in Check::ALL {
                check.change(&world, step, false).await;
            }
        }
        change_programs(&world, &mut running, step, &previous).await;
        // One of them leads.
        world.caught_up().await;
        if step == 0 {
            for check in [Check::Paused, Check::SourceGone] {
                check.initialise(&world, &previous).await;
            }
        }
        // The next leader finishes the work that a leader has begun.
        assert!(world.run(&["backfill", "--rule", "address"]).await.success());
        for check in Check::ALL {
            check.change(&world, step, true).await;
        }
        written += writer.stop().await;
        let right = world.at_rest(QUIET).await;
        for check in Check::ALL {
            check.validate(&world.db, step).await;
        }
        println!("step {step}, {:?}: right {right:?} after the writes", STEPS[usize::try_from(step).unwrap()]);
    }
    let letters = world.test.beside("state").collection::<Document>("dead_letters");
    until("no dead letter is left", async || (letters.count_documents(doc! {}).await.unwrap() == 0).then_some(()))
        .await;
    println!(
        "{written} writes, {} steps, {} checks and the application's copies: 0 differences",
        LAST + 1,
        Check::ALL.len()
    );
    for (_, daemon) in running {
        daemon.terminate().await;
    }
}
