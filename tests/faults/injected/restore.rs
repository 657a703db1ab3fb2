//! A cluster whose data goes back to an earlier point in time, and data that moves to another cluster.

use std::{path::Path, process::Command};

use bson::{Bson, Document, doc};
use denormd_fixture::{Node, ReplicaSet};
use futures_util::TryStreamExt;

use super::{QUIET, fail, work};
use crate::support::{
    daemon::{PATIENCE, all, until},
    world::World,
};

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").args(["-a"]).arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// A snapshot of a member's files, taken while it is shut down.
async fn take_snapshot(node: &Node, folder: &Path) {
    node.terminate().await;
    copy(&node.data_path(), &folder.join("snapshot"));
    node.restart().await;
}

/// Puts the files of the snapshot in the place of the present ones.
async fn restore(node: &Node, folder: &Path) {
    node.kill9();
    std::fs::remove_dir_all(node.data_path()).unwrap();
    copy(&folder.join("snapshot"), &node.data_path());
    node.restart().await;
}

/// The snapshot has a change that was not applied yet. A daemon that was stopped finds it, because its position is from
/// the snapshot as well. A daemon that runs throughout has passed it, in a future that the cluster no longer has: it once
/// went on from there, and the copies stayed wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_restored_to_an_earlier_time_is_read_from_there() {
    let set = ReplicaSet::start(1).await;
    let node = set.node(0);
    for runs in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let world = World::new(set.database().await).await;
        if runs {
            // Its lease does not end during the restore: nothing else makes it read its position once more.
            world.lease_for(2 * PATIENCE);
        }
        let mut daemon = world.daemon();
        world.at_rest(QUIET).await;
        // Every write to targets is refused, so the change is not applied, and the position stays before it.
        let namespace = format!("{}.logs", world.test.name);
        let refused = doc! {"failCommands": ["update"], "namespace": namespace, "errorCode": 189};
        fail(&world.test, doc! {"times": 1_000_000}, refused).await;
        let hosts = world.db.collection::<Document>("hosts");
        hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": "of the snapshot"}}).await.unwrap();
        daemon.says("reconciles failed and are tried again").await;
        take_snapshot(node, folder.path()).await;
        // Without the failing commands, which have ended with the server.
        world.converged().await;
        let writer = world.writer(70);
        work(1000).await;
        writer.stop().await;
        world.at_rest(QUIET).await;
        world.caught_up().await;
        if runs {
            restore(node, folder.path()).await;
            daemon.says("restored to an earlier time").await;
        } else {
            daemon.terminate().await;
            restore(node, folder.path()).await;
            assert!(!until("differences", async || world.differences().await.ok()).await.is_empty());
            daemon = world.daemon();
        }
        println!(
            "restored, the daemon {}: right after {:?}",
            if runs { "runs" } else { "is stopped" },
            world.at_rest(QUIET).await
        );
        let writer = world.writer(71);
        work(500).await;
        writer.stop().await;
        world.at_rest(QUIET).await;
        daemon.terminate().await;
    }
}

/// All collections of a database, in another one, with the names of both databases exchanged inside the documents. As
/// `mongodump` and `mongorestore` do, this gives the collections other UUIDs.
async fn transfer(from: &World, to: &World, state: bool) {
    let of = |world: &World| if state { world.test.beside("state") } else { world.db.clone() };
    let (from_db, to_db) = (of(from), of(to));
    for name in from_db.list_collection_names().await.unwrap() {
        let found: Vec<Document> = all(&from_db, &name).await;
        let text = Bson::Array(found.into_iter().map(Bson::Document).collect()).into_canonical_extjson().to_string();
        let text = text.replace(&from.test.name, &to.test.name);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let Bson::Array(documents) = Bson::try_from(value).unwrap() else { panic!("{name}") };
        let documents: Vec<Document> = documents.into_iter().map(|one| one.as_document().unwrap().clone()).collect();
        let collection = to_db.collection::<Document>(&name);
        collection.delete_many(doc! {}).await.ok();
        if !documents.is_empty() && name != "events" {
            collection.insert_many(documents).await.unwrap();
        }
    }
}

/// Data and state are dumped from one cluster and restored in another: its position, with a token, is not of this cluster.
#[tokio::test(flavor = "multi_thread")]
async fn a_position_from_another_cluster_is_not_used() {
    let (first, second) = (ReplicaSet::start(1).await, ReplicaSet::start(1).await);
    let (from, to) = (World::new(first.database().await).await, World::new(second.database().await).await);
    let daemon = from.daemon();
    let writer = from.writer(72);
    work(500).await;
    writer.stop().await;
    from.at_rest(QUIET).await;
    from.caught_up().await;
    daemon.terminate().await;
    transfer(&from, &to, false).await;
    transfer(&from, &to, true).await;
    let positions = to.test.beside("state").collection::<Document>("positions");
    let found: Vec<Document> = positions.find(doc! {}).await.unwrap().try_collect().await.unwrap();
    assert!(found.iter().all(|position| position.get_document("token").is_ok()), "{found:?}");
    // Only a backfill finds what happened before the daemon runs here.
    let copied = doc! {"ip": {"$exists": true}};
    to.db.collection::<Document>("logs").update_many(copied, doc! {"$set": {"ip": "elsewhere"}}).await.unwrap();
    let daemon = to.daemon();
    println!("in another cluster: right after {:?}", to.at_rest(QUIET).await);
    assert!(daemon.log().contains("of another cluster"), "{}", daemon.log());
    daemon.terminate().await;
}
