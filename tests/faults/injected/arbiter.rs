//! A primary, a secondary and an arbiter: without the secondary there is a primary, and no majority that has the data.

use bson::{Document, doc};
use denormd::{server::client, status::Status};
use denormd_fixture::ReplicaSet;

use crate::support::{
    daemon::until,
    running::{Running, causes},
};

const RULES: &str = "  - { name: ip, copy: { source: hosts, target: log, match: { host: _id }, set: { ip: $ip } } }";
const LEASE: &str = "lease: { ttl_seconds: 3 }\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_without_a_majority_makes_nothing_current() {
    let set = ReplicaSet::builder().nodes(3).arbiter().start().await;
    let test = set.database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": 0}).await.unwrap();
    db.collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let mut running = Running::start(&test, RULES, LEASE).await;
    let log = db.collection::<Document>("log");
    let hosts = db.collection::<Document>("hosts");
    let copied = async |ip: i32| {
        until("the change is applied", async || log.find_one(doc! {"ip": ip}).await.unwrap()).await;
    };
    for ip in 1..=2 {
        let primary = set.primary().await;
        let secondary = (0..2).find(|place| *place != primary).unwrap();
        hosts.update_one(doc! {}, doc! {"$set": {"ip": 10 * ip}}).await.unwrap();
        copied(10 * ip).await;
        running.until_json("well", |status| status["lag_seconds"] == 0.0).await;

        set.node(secondary).kill9();
        // Acknowledged by the primary alone: it may be rolled back.
        let update =
            doc! {"update": "hosts", "updates": [{"q": {}, "u": {"$set": {"ip": ip}}}], "writeConcern": {"w": 1}};
        let time = until("a write by one", async || db.run_command(update.clone()).await.ok()).await;
        let time = time.get_timestamp("operationTime").unwrap();
        let told = |status: &Status| {
            let names = causes(status);
            status.lag_seconds.is_none_or(|lag| lag > 5.0) && names.contains(&"no_majority")
        };
        let status = running.until("no majority is told", told).await;
        println!("without a majority: {:?}, {}", causes(&status), status.summary);
        assert!(!status.summary.contains("Not behind"), "{}", status.summary);
        let claim = status.current.as_ref().map(|current| current.as_of.clone());
        let claim = claim.as_deref().and_then(|text| text.split_once('.'));
        let claim = claim.map(|(seconds, increment)| (seconds.parse().unwrap(), increment.parse().unwrap()));
        assert!(claim.is_none_or(|claim: (u32, u32)| claim < (time.time, time.increment)), "{status:#?}");
        let path = format!("/v1/wait?operationTime={}.{}&timeout=2", time.time, time.increment);
        let waited = client::get(running.address, &path, std::time::Duration::from_secs(60)).await.unwrap();
        assert_ne!(waited.code, 200, "{}", String::from_utf8_lossy(&waited.body));
        assert_eq!(
            log.find_one(doc! {}).await.unwrap().unwrap().get_i32("ip").ok(),
            Some(10 * ip),
            "{}",
            running.log()
        );

        set.node(secondary).restart().await;
        copied(ip).await;
        running.until_json("well again", |status| status["lag_seconds"] == 0.0 && status["level"] != "critical").await;
    }
    running.stop();
}
