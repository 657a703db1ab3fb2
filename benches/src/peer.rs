//! A peer: `mongodb-data-sync`, a Node.js program, on the workload that it supports beside the same floor.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use denormd_show::{
    figures::spread,
    print::{bold, dim, heading},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    bench::{Bench, DATABASE, index_products, insert, update},
    drain::change,
    process::Process,
    workloads,
};

const PACKAGE: &str = "mongodb-data-sync@0.1.24";
/// The time between two looks at its progress. A look reads the targets.
const PAUSE: Duration = Duration::from_millis(500);

/// Measures the peer where it can be had: `PEER` names a folder with its `node_modules`, else npm fetches them.
pub async fn measure(bench: &Bench) {
    let all = workloads::all();
    let Some(rename) = all.iter().find(|workload| workload.name == "rename") else { return };
    heading(&format!("peer: {PACKAGE} on `rename`: {}", rename.what));
    let folder = match installed() {
        Ok(folder) => folder,
        Err(why) => return println!("  skipped: {why}"),
    };
    let database = bench.fresh().await;
    bench.client.database("mongodb_data_sync_db").drop().await.expect("a drop");
    for (collection, documents) in (rename.load)() {
        insert(&database, collection, documents).await;
    }
    index_products(&database).await;
    let mut peer = start(&folder, &bench.uri()).await;
    let mut ratios = Vec::new();
    for round in 0..=bench.rounds.min(3) {
        let version = i32::try_from(round).unwrap_or_default() * 2 + 1;
        peer.signal("STOP");
        change(&database, rename, version).await;
        let begin = bench.spent(None);
        peer.signal("CONT");
        peer.applied(&database, (rename.stale)(version), PAUSE).await;
        let mine = bench.since(begin, None);
        // The events that it receives later are applied already.
        peer.signal("STOP");
        change(&database, rename, version + 1).await;
        let floor = (rename.floors)(version + 1).swap_remove(0);
        let begin = bench.spent(None);
        update(&database, floor.collection, &floor.statements).await;
        let known = bench.since(begin, None);
        peer.signal("CONT");
        quiet(bench).await;
        let line = format!("  peer {:>8.2} s   {} {:>6.2} s", mine.wall, floor.name, known.wall);
        println!("{}", if round == 0 { dim(&line) } else { line });
        if round > 0 {
            ratios.push(known.wall / mine.wall);
        }
    }
    println!("  floor / peer: {}", bold(&spread(&ratios, 3)));
}

fn installed() -> Result<PathBuf, String> {
    if let Some(folder) = env::var_os("PEER").filter(|folder| !folder.is_empty()) {
        return Ok(folder.into());
    }
    let folder = env::temp_dir().join("denormd-bench-peer");
    if !folder.join("node_modules/mongodb-data-sync").exists() {
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--prefix"]).arg(&folder).arg(PACKAGE);
        let npm = npm.stdout(Stdio::null()).stderr(Stdio::null()).status();
        match npm {
            Ok(status) if status.success() => {}
            Ok(_) => return Err(format!("npm cannot fetch {PACKAGE} here")),
            Err(why) => return Err(format!("npm does not start ({why})")),
        }
    }
    Ok(folder)
}

async fn start(folder: &Path, uri: &str) -> Process {
    let port = free_port();
    let mut command = Command::new("node");
    command
        .arg(folder.join("node_modules/mongodb-data-sync/synchronizer_server.js"))
        .args(["-p", &port.to_string(), "-k", "bench", "-u", uri])
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut peer = Process::start(&mut command);
    let body = format!(
        r#"{{"dbName": "{DATABASE}", "dependentCollection": "products", "refCollection": "parts", "localField": "part", "foreignField": "_id", "fieldsToSync": {{"name": "name", "price": "price"}}}}"#
    );
    let taken = async || post(port, "/dependencies?api_key=bench", &body).await;
    peer.until("the peer takes its dependency", Duration::from_millis(200), taken).await;
    // Its stream opens a moment after the answer.
    tokio::time::sleep(Duration::from_secs(2)).await;
    peer
}

async fn post(port: u16, path: &str, body: &str) -> bool {
    let Ok(mut connection) = TcpStream::connect(("127.0.0.1", port)).await else { return false };
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answer = String::new();
    connection.write_all(request.as_bytes()).await.is_ok()
        && connection.read_to_string(&mut answer).await.is_ok()
        && answer.starts_with("HTTP/1.1 200")
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// Returns when the server has hardly anything to do.
async fn quiet(bench: &Bench) {
    loop {
        let begin = bench.spent(None);
        tokio::time::sleep(Duration::from_secs(1)).await;
        if bench.since(begin, None).server < 0.1 {
            return;
        }
    }
}
