//! `make rolling-upgrade`: upgrades a replica set of three from one version of the server to the next, member by
//! member, while an application writes and two daemons run, one of which is killed between two members. Then the
//! feature level is raised, lowered and raised again. At the end nothing differs, and the daemon that was not killed
//! needed no attention. To an older server the feature level is lowered first.

use std::{path::PathBuf, process::Command, time::Duration};

use bson::{Document, doc};
use denormd_fixture::{Node, ReplicaSet};
use mongodb::Client;

use crate::support::{
    daemon::until,
    world::{Daemon, World},
};

/// Time for which the oplog must be silent.
const QUIET: Duration = Duration::from_secs(2);

/// The programs in `DENORMD_SERVERS`, separated by colons. The first one is also the one in `MONGOD`.
fn servers() -> Vec<PathBuf> {
    let servers = std::env::var("DENORMD_SERVERS").expect("DENORMD_SERVERS names the servers");
    std::env::split_paths(&servers).collect()
}

async fn version(client: &Client) -> Option<String> {
    let info: Document = client.database("admin").run_command(doc! {"buildInfo": 1}).await.ok()?;
    info.get_str("version").ok().map(str::to_owned)
}

/// The version that a program prints.
fn version_of(server: &str) -> String {
    let printed = Command::new(server).arg("--version").output().unwrap();
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let (_, rest) = printed.split_once("db version v").unwrap_or_else(|| panic!("{server} prints {printed:?}"));
    rest.split_whitespace().next().unwrap().to_owned()
}

/// The numbers of a version, to be compared.
fn numbers(version: &str) -> Vec<u32> {
    version.split(['.', '-']).map_while(|number| number.parse().ok()).collect()
}

/// The major and minor version, as in the names of feature levels.
fn level(version: &str) -> String {
    version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

async fn set_level(client: &Client, level: &str) {
    until(&format!("the feature level {level}"), async || {
        let plain = doc! {"setFeatureCompatibilityVersion": level};
        let mut confirmed = plain.clone();
        // Required from 7.0 on, and unknown before.
        confirmed.insert("confirm", true);
        let admin = client.database("admin");
        for command in [confirmed, plain] {
            if admin.run_command(command).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    println!("feature level {level}");
}

/// Restarts a member with another server version, and waits until it reports that version and the set is complete.
async fn replace(set: &ReplicaSet, place: usize, server: &str) -> String {
    let node: &Node = set.node(place);
    node.restart_with(server).await;
    set.wait_members().await;
    let version = until("its version", async || version(&node.client().await).await).await;
    println!("member {place}: {version}");
    version
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs several servers: make rolling-upgrade"]
async fn a_set_goes_from_server_to_server_while_daemons_run() {
    let servers = servers();
    let set = ReplicaSet::start(3).await;
    let client = set.client().await;
    let mut before = version(&client).await.unwrap();
    println!("begins with {before}");
    let world = World::new(set.database().await).await;
    // One of them starts alone: a server under Wine ends when two clients create one collection at once.
    let faithful = world.daemon();
    world.at_rest(QUIET).await;
    let mut other: Daemon = world.daemon();
    let mut written = 0;
    for (nth, server) in servers[1..].iter().enumerate() {
        let server = server.to_str().unwrap();
        let next = version_of(server);
        let is_older = numbers(&next) < numbers(&before);
        let writer = world.writer(u64::try_from(nth).unwrap());
        let primary = set.primary().await;
        let secondaries: Vec<usize> = (0..3).filter(|place| *place != primary).collect();
        if is_older {
            set_level(&client, &level(&next)).await;
        }
        replace(&set, secondaries[0], server).await;
        other.kill9();
        println!("a daemon is killed");
        replace(&set, secondaries[1], server).await;
        other = world.daemon();
        let after = replace(&set, primary, server).await;
        if !is_older {
            set_level(&client, &level(&after)).await;
            set_level(&client, &level(&before)).await;
            set_level(&client, &level(&after)).await;
        }
        let acknowledged = writer.stop().await;
        assert!(acknowledged > 100, "{acknowledged} writes are no application");
        written += acknowledged;
        let took = world.at_rest(QUIET).await;
        println!("{before} to {after}: {acknowledged} writes, right {took:?} after the last of them");
        before = after;
    }
    println!("{written} writes, {} members of {before}, 0 differences", set.nodes().len());
    faithful.terminate().await;
    other.terminate().await;
}
