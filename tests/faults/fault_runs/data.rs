//! Faults by commands: mass deletes by a TTL index, collections that are renamed over others, and a flood of oplog
//! entries that no rule watches.

use std::time::{Duration, Instant};

use bson::{DateTime, Document, doc};
use mongodb::{Client, IndexModel, options::IndexOptions};

use crate::support::{daemon::PATIENCE, seeds::from_environment, world::World};

/// The `_id` of the first host that expires, far from those that the application writes.
const EXPIRING: i32 = 2_000_000;
/// Number of hosts that expire at once.
const EXPIRED: i32 = 2000;
/// Documents in one insert command of a flood.
const TOGETHER: u64 = 1000;

/// The number of entries in a flood: `DENORMD_FLOOD`, or this default.
pub fn flood_size(default: u64) -> u64 {
    from_environment("DENORMD_FLOOD").unwrap_or(default)
}

/// Inserts this number of documents, in turns beside the rules' collections and in another database. Each is an entry of
/// the oplog that a stream has to pass.
pub async fn flood(client: &Client, database: &str, entries: u64) {
    let beside = format!("{database}_foreign");
    let places = [database, &beside].map(|name| client.database(name).collection::<Document>("foreign"));
    let mut left = entries;
    let mut last = Instant::now();
    for place in places.iter().cycle() {
        if left == 0 {
            return;
        }
        assert!(last.elapsed() < PATIENCE, "no insert of the flood succeeds");
        let some = left.min(TOGETHER);
        // An election may refuse it, or lose its answer: then it comes once more.
        if place.insert_many((0..some).map(|_| doc! {"x": 1})).await.is_ok() {
            (left, last) = (left - some, Instant::now());
        }
    }
}

/// Inserts hosts that a TTL index deletes at once, and logs that refer to them. Returns when they are deleted; the logs
/// stay until the next time.
pub async fn expire(world: &World) {
    let (hosts, logs) = (world.db.collection::<Document>("hosts"), world.db.collection::<Document>("logs"));
    let expiring = doc! {"_id": {"$gte": EXPIRING}};
    logs.delete_many(expiring.clone()).await.unwrap();
    let options = IndexOptions::builder().expire_after(Duration::ZERO).build();
    hosts.create_index(IndexModel::builder().keys(doc! {"gone": 1}).options(options).build()).await.unwrap();
    let ids = || (0..EXPIRED).map(|n| EXPIRING + n);
    logs.insert_many(ids().map(|id| doc! {"_id": id, "host": id})).await.unwrap();
    // The TTL monitor deletes them a second later at the earliest: they are copied before that, or meanwhile.
    let gone = DateTime::from_millis(DateTime::now().timestamp_millis() + 1000);
    hosts.insert_many(ids().map(|id| doc! {"_id": id, "ip": id, "gone": gone})).await.unwrap();
    let begun = Instant::now();
    while hosts.count_documents(expiring.clone()).await.unwrap() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the TTL monitor deletes nothing");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Renames a copy of a collection over it: the collection is dropped, and another one has its name. Writes of the
/// application since the copy are lost.
pub async fn rename_over(world: &World, collection: &str) {
    let next = format!("{collection}_next");
    let old = world.db.collection::<Document>(collection);
    let reference = IndexModel::builder().keys(doc! {"host": 1}).build();
    old.aggregate([doc! {"$out": &next}]).await.unwrap();
    world.db.collection::<Document>(&next).create_index(reference).await.unwrap();
    let name = |collection: &str| format!("{}.{collection}", world.test.name);
    let rename = doc! {"renameCollection": name(&next), "to": name(collection), "dropTarget": true};
    world.test.client.database("admin").run_command(rename).await.unwrap();
}
