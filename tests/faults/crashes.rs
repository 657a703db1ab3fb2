//! Crashes the daemon at every marked place in the source; afterwards the copies must be correct again.

use std::{collections::BTreeSet, path::Path, time::Duration};

use bson::{Document, doc};
use denormd_fixture::{ReplicaSet, TestDb};
use futures_util::{StreamExt, stream};

use crate::{engine::fan_outs::next_write_runs_out_of_time, support::world::World};

const QUIET: Duration = Duration::from_millis(500);

/// The marked places, read from the source: a new one is tested automatically.
fn places() -> BTreeSet<String> {
    fn look(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                look(&path, found);
            } else {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let after = text.split("failpoint::here(\"").skip(1);
                found.extend(after.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
            }
        }
    }
    let mut found = BTreeSet::new();
    look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    found
}

/// Places that a daemon passes repeatedly.
const OFTEN: [&str; 6] = ["acknowledged", "position-saved", "position-saving", "read", "routed", "written"];

/// Places that a daemon passes on request alone, or with other rules: tests/engine/undo.rs, tests/meaning/created.rs and
/// tests/operations/check.rs die there.
const ASKED: [&str; 4] = ["backfill-of-sources", "check-saved", "put-back", "undoing"];

async fn crash(test: TestDb, place: &str, nth: u32) {
    let world = World::new(test).await;
    if place == "set-aside" {
        let refuse = doc! {"collMod": "logs", "validator": {"$nor": [{"ip": {"$gt": -1}}]}};
        world.db.run_command(refuse).await.unwrap();
    }
    world.db.collection("tasks").insert_one(doc! {"_id": 0, "owner": 0, "due": 0}).await.unwrap();
    let mut daemon = world.daemon_that_dies(place, nth);
    let writer = world.writer(u64::from(nth));
    match place {
        "held" => {
            world.has_seen_tasks().await;
            world.db.collection::<Document>("tasks").drop().await.unwrap();
        }
        _ if place.starts_with("fan-out") => {
            // The write takes too long for one key alone.
            writer.stop().await;
            world.converged().await;
            let hosts = world.db.collection::<Document>("hosts");
            for ip in 0..30 {
                next_write_runs_out_of_time(&world.test, "logs").await;
                hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": -ip}}).upsert(true).await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
                if daemon.is_dead() {
                    break;
                }
            }
            daemon.has_died(place).await;
            return right_again(&world, place).await;
        }
        _ => {}
    }
    daemon.has_died(place).await;
    if place == "held" {
        writer.stop().await;
    } else {
        tokio::time::sleep(Duration::from_millis(300)).await;
        writer.stop().await;
    }
    right_again(&world, place).await;
}

async fn right_again(world: &World, place: &str) {
    if place == "set-aside" {
        world.db.run_command(doc! {"collMod": "logs", "validator": {}}).await.unwrap();
    }
    if place == "held" {
        // The index was dropped with the collection, and a daemon requires it at its start.
        assert!(world.run(&["plan", "--apply"]).await.success());
    }
    let daemon = world.daemon();
    if place == "held" {
        // The fields stay until an operator accepts the loss, and the drop event itself may be read once more.
        world.caught_up().await;
        assert!(world.run(&["release", "tasks"]).await.success());
    }
    let took = world.at_rest(QUIET).await;
    println!("{place}: right {took:?} after the restart");
    daemon.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_every_place_that_is_marked() {
    let set = ReplicaSet::start(1).await;
    let mut places = places();
    for asked in ASKED {
        assert!(places.remove(asked), "`{asked}` is no place any more");
    }
    for often in OFTEN {
        assert!(places.contains(often), "`{often}` is no place any more");
    }
    let runs = places.iter().flat_map(|place| {
        let more = OFTEN.contains(&place.as_str()).then_some(5);
        [Some(1), more].into_iter().flatten().map(move |nth| (place.clone(), nth))
    });
    // `DENORMD_PLACE=written` tries one alone.
    let only = std::env::var("DENORMD_PLACE").ok();
    let runs = runs.filter(|(place, _)| only.as_ref().is_none_or(|only| only == place));
    // A command that fails affects every sender: these run alone.
    let (alone, together): (Vec<_>, Vec<_>) = runs.partition(|(place, _)| place.starts_with("fan-out"));
    stream::iter(together)
        .for_each_concurrent(4, |(place, nth)| {
            let set = &set;
            async move { crash(set.database().await, &place, nth).await }
        })
        .await;
    for (place, nth) in alone {
        crash(set.database().await, &place, nth).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a router: make test-sharded"]
async fn through_the_routers_of_a_sharded_cluster() {
    for place in OFTEN {
        for nth in [1, 5] {
            crash(denormd_fixture::database().await, place, nth).await;
        }
    }
}
