//! Copy rules, case by case.

use crate::daemon::{Daemon, all};
use bson::doc;

#[tokio::test]
async fn a_new_rule_is_backfilled_and_followed() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rules = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
    let daemon = Daemon::start(&test, rules).await;
    daemon.settled().await;
    assert_eq!(all(&db, "log").await, [doc! {"_id": 1, "host": 1, "ip": "10.0.0.1"}]);
    assert_eq!(daemon.context().counts.dead_letters.load(std::sync::atomic::Ordering::Relaxed), 0);
    daemon.stop().await;
}
