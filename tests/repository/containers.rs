//! The sidecar's real image with a replica set of three containers on a private network, and the faults that strike
//! them.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{Network, Peer, docker};
use futures_util::{TryStreamExt, future::join_all};
use mongodb::{Client, options::ClientOptions};

use crate::support::daemon::PATIENCE;

const SET: &str = "rs0";
const PAUSE: Duration = Duration::from_millis(50);
const HOSTS: i32 = 5;
const LOGS: i32 = 50;

/// True where these tests cannot run; prints the reason. `DENORMD_TEST_CONTAINERS=required` fails them instead: for CI,
/// which has Docker.
fn skipped() -> bool {
    let why = match docker::answers() {
        Ok(()) if cfg!(target_os = "linux") => return false,
        Ok(()) => "the binary that was built here does not run in a Linux container".to_owned(),
        Err(why) => format!("Docker does not answer: {why}"),
    };
    assert!(std::env::var("DENORMD_TEST_CONTAINERS").is_err(), "containers are required, but {why}");
    println!("skipped: {why}");
    true
}

/// The image of a version: the given one (`DENORMD_TEST_SIDECAR`, an existing release image), or one of the debug
/// binary that was just built, by the same steps.
fn sidecar_image(version: &str) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_denormd"));
    let named = std::env::var("DENORMD_TEST_SIDECAR");
    named.unwrap_or_else(|_| docker::sidecar_image(&format!("denormd-test:{version}"), binary))
}

/// Three mongods in containers, and the documents of an application.
struct Cluster {
    members: Vec<Peer>,
}

impl Cluster {
    async fn start(network: &Network) -> Arc<Self> {
        let names = ["mongo-1", "mongo-2", "mongo-3"];
        let cluster = Self { members: join_all(names.map(|name| network.mongod(name, SET))).await };
        let members = cluster.members.iter().zip(0..);
        let members: Vec<Document> =
            members.map(|(peer, id)| doc! {"_id": id, "host": format!("{}:27017", peer.name())}).collect();
        let settings = doc! {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500, "heartbeatTimeoutSecs": 2};
        let initiate = doc! {"replSetInitiate": {"_id": SET, "members": members, "settings": settings}};
        client(&cluster.members[0].address()).await.database("admin").run_command(initiate).await.unwrap();
        Arc::new(cluster)
    }

    /// The primary, and a client for it.
    async fn primary(&self) -> (&Peer, Client) {
        let begun = Instant::now();
        loop {
            for peer in self.members.iter().filter(|peer| peer.inspect("{{.State.Status}}") == "running") {
                let address = peer.address();
                // It may have stopped since.
                if address.is_empty() {
                    continue;
                }
                let client = client(&address).await;
                let hello = client.database("admin").run_command(doc! {"hello": 1}).await;
                if hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false)) {
                    return (peer, client);
                }
            }
            assert!(begun.elapsed() < PATIENCE, "no primary");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Changes hosts repeatedly until `stop`, and until one change is acknowledged; returns their number. A fault may be
    /// over before the first one is.
    async fn write(self: Arc<Self>, stop: Arc<AtomicBool>) -> i32 {
        let mut done = 0;
        let goes_on = |done: i32| done == 0 || !stop.load(Ordering::Relaxed);
        'primaries: while goes_on(done) {
            let hosts = self.primary().await.1.database("shop").collection::<Document>("hosts");
            while goes_on(done) {
                let change = doc! {"$set": {"ip": format!("10.0.0.{done}")}};
                if hosts.update_one(doc! {"_id": done % HOSTS}, change).await.is_err() {
                    continue 'primaries;
                }
                done += 1;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        done
    }

    async fn all(&self, name: &str) -> mongodb::error::Result<Vec<Document>> {
        let (_, client) = self.primary().await;
        client.database("shop").collection(name).find(doc! {}).sort(doc! {"_id": 1}).await?.try_collect().await
    }

    /// Number of log messages whose address differs from the rule's definition; None while there is no answer.
    async fn wrong(&self, rule: Rule) -> Option<usize> {
        let (hosts, logs) = (self.all("hosts").await.ok()?, self.all("log").await.ok()?);
        let of = |log: &Document| hosts.iter().find(|host| host.get("_id") == log.get("host")).cloned();
        let right = |log: &&Document| {
            of(log).is_some_and(|host| log.get_str("ip").is_ok_and(|ip| ip == rule.value(host.get_str("ip").unwrap())))
        };
        assert_eq!(logs.len(), usize::try_from(LOGS).unwrap());
        Some(logs.iter().filter(|log| !right(log)).count())
    }

    async fn converges(&self, rule: Rule, sidecar: &Peer) {
        let begun = Instant::now();
        while self.wrong(rule).await != Some(0) {
            assert!(begun.elapsed() < PATIENCE, "{:?} are wrong; {}", self.wrong(rule).await, sidecar.log_tail());
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until the lease has expired, because its owner did not renew it in time.
    async fn nobody_leads(&self) {
        let free = doc! {"$expr": {"$lt": ["$until", "$$NOW"]}};
        let begun = Instant::now();
        loop {
            let (_, client) = self.primary().await;
            let leases = client.database("denormd").collection::<Document>("leases");
            if matches!(leases.find_one(free.clone()).await, Ok(Some(_))) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "somebody still leads");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn client(address: &str) -> Client {
    let mut options = ClientOptions::parse(format!("mongodb://{address}/?directConnection=true")).await.unwrap();
    options.server_selection_timeout = Some(Duration::from_secs(2));
    options.connect_timeout = Some(Duration::from_secs(2));
    Client::with_options(options).unwrap()
}

/// The copied value: the host's address as it is, or, in the next version, with its network.
#[derive(Debug, Clone, Copy)]
enum Rule {
    Old,
    New,
}

impl Rule {
    fn value(self, ip: &str) -> String {
        match self {
            Self::Old => ip.to_owned(),
            Self::New => format!("{ip}/24"),
        }
    }

    /// A folder to be mounted like a ConfigMap.
    fn config(self, cluster: &Cluster) -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;
        let hosts: Vec<&str> = cluster.members.iter().map(Peer::name).collect();
        let value = match self {
            Self::Old => "$ip",
            Self::New => "{ $concat: [$ip, /24] }",
        };
        let text = format!(
            "mongodb: {{ uri: \"mongodb://{}/?replicaSet={SET}\", database: shop }}\nlease: {{ ttl_seconds: 3 }}\nrules:\n\
             \x20 - name: address\n    guard: off\n    allow_scan: true\n    \
             copy: {{ source: hosts, target: log, match: {{ host: _id }}, set: {{ ip: {value} }} }}\n",
            hosts.join(",")
        );
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("denormd.yaml"), text).unwrap();
        // The image's user differs from this one.
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        folder
    }
}

async fn healthy(sidecar: &Peer) {
    let begun = Instant::now();
    while sidecar.health() != "healthy" {
        assert!(begun.elapsed() < PATIENCE, "{}; {}", sidecar.health(), sidecar.log_tail());
        tokio::time::sleep(PAUSE).await;
    }
}

/// Lets the application write during a fault, and waits until the copies are up to date again.
async fn beside_writes<F: Future<Output = ()>>(cluster: &Arc<Cluster>, befalls: impl FnOnce() -> F) {
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn(cluster.clone().write(stop.clone()));
    befalls().await;
    stop.store(true, Ordering::Relaxed);
    assert!(writer.await.unwrap() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sidecar_converges_whatever_befalls_it_and_its_cluster() {
    if skipped() {
        return;
    }
    let (old, new) = (sidecar_image("old"), sidecar_image("new"));
    let network = Network::create();
    let cluster = Cluster::start(&network).await;
    let shop = cluster.primary().await.1.database("shop");
    shop.collection("hosts").insert_many((0..HOSTS).map(|n| doc! {"_id": n, "ip": "10.0.0.0"})).await.unwrap();
    shop.collection("log").insert_many((0..LOGS).map(|n| doc! {"_id": n, "host": n % HOSTS})).await.unwrap();

    let config = Rule::Old.config(&cluster);
    let sidecar = network.sidecar("sidecar", &old, config.path()).await;
    assert_eq!(sidecar.inspect("{{.Config.User}}"), "65532:65532");
    cluster.converges(Rule::Old, &sidecar).await;
    healthy(&sidecar).await;

    // The primary's power is cut.
    beside_writes(&cluster, async || {
        let (primary, _) = cluster.primary().await;
        primary.kill();
        assert_ne!(cluster.primary().await.0.name(), primary.name());
        primary.start_again();
    })
    .await;
    cluster.converges(Rule::Old, &sidecar).await;

    // The daemon is stopped for longer than its lease, in the middle of its work.
    beside_writes(&cluster, async || {
        sidecar.pause();
        cluster.nobody_leads().await;
        sidecar.unpause();
    })
    .await;
    cluster.converges(Rule::Old, &sidecar).await;

    // The network drops it without an error: its connections only become silent.
    beside_writes(&cluster, async || {
        sidecar.disconnect();
        cluster.nobody_leads().await;
        sidecar.connect();
    })
    .await;
    cluster.converges(Rule::Old, &sidecar).await;

    // A new version with another rule is a standby before the old one stops.
    let config = Rule::New.config(&cluster);
    let next = network.sidecar("next", &new, config.path()).await;
    beside_writes(&cluster, async || {
        healthy(&next).await;
        assert_eq!(sidecar.stop(), "0", "{}", sidecar.log_tail());
    })
    .await;
    cluster.converges(Rule::New, &next).await;
    healthy(&next).await;
}
