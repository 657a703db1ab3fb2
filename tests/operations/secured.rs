//! A mongod with authentication, over TLS with a private authority.

use std::{
    fs,
    net::TcpListener,
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::{Authority, ReplicaSet, TestDb};
use futures_util::TryStreamExt;

use crate::operations::program::{File, Running};

const LIMIT: Duration = Duration::from_secs(120);
/// More than the roles of `denormd role`, with which the patterns run (`make test-secure`): this test is about
/// authentication.
fn roles() -> Vec<Document> {
    let role = |name: &str, database: &str| doc! {"role": name, "db": database};
    [
        role("readWriteAnyDatabase", "admin"),
        role("dbAdminAnyDatabase", "admin"),
        role("clusterMonitor", "admin"),
        role("read", "local"),
    ]
    .into()
}

/// A secured set, an application's documents, and a config whose connection string is in a separate file.
struct Secured {
    set: ReplicaSet,
    test: TestDb,
    file: File,
    port: u16,
}

impl Secured {
    async fn start() -> Self {
        let set = ReplicaSet::builder().auth().tls().start().await;
        let test = set.database().await;
        test.database().collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1"}).await.unwrap();
        test.database().collection("log").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let file = File::new(&format!(
            "mongodb: {{ uri_file: uri, database: {:?} }}\nstate: {{ database: {:?} }}\nlease: {{ ttl_seconds: 3 }}\n\
             http: {{ listen: \"127.0.0.1:{port}\" }}\nrules:\n\
             \x20 - {{ name: address, guard: off, allow_scan: true, copy: {{ source: hosts, target: log, match: {{ host: _id }}, set: {{ ip: $ip }} }} }}\n",
            test.name,
            format!("{}_state", test.name),
        ));
        Self { set, test, file, port }
    }

    fn put(&self, name: &str, text: &str) -> std::path::PathBuf {
        let path = self.file.folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    async fn admin(&self, command: Document) {
        let client = self.set.client().await;
        client.database("admin").run_command(command).await.unwrap();
    }

    async fn create_user(&self, password: &str) {
        let mechanisms = ["SCRAM-SHA-256"].to_vec();
        self.admin(doc! {"createUser": "denormd", "pwd": password, "roles": roles(), "mechanisms": mechanisms}).await;
    }

    async fn create_certificate_user(&self, subject: &str) {
        let client = self.set.client().await;
        let command = doc! {"createUser": subject, "roles": roles()};
        client.database("$external").run_command(command).await.unwrap();
    }

    /// Changes the host's address, and waits until the daemon has copied it.
    async fn copies(&self, ip: &str) {
        let begun = Instant::now();
        loop {
            let database = self.test.database();
            let hosts = database.collection::<Document>("hosts");
            let set = hosts.update_one(doc! {"_id": 1}, doc! {"$set": {"ip": ip}}).await;
            let log = match set {
                Ok(_) => match database.collection("log").find(doc! {}).await {
                    Ok(found) => found.try_collect().await.unwrap_or_default(),
                    Err(_) => Vec::<Document>::new(),
                },
                Err(_) => Vec::new(),
            };
            if log == [doc! {"_id": 1, "host": 1, "ip": ip}] {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "{ip} is not copied: {log:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test]
async fn certificates_are_verified_unless_a_switch_that_is_loud_says_otherwise() {
    let secured = Secured::start().await;
    secured.create_user("first").await;
    let trusted = secured.set.uri_of("denormd", "first");
    let ca = format!("&tlsCAFile={}", secured.set.tls().unwrap().ca_file().display());
    assert!(trusted.contains(&ca));

    // It is not signed by a public authority.
    secured.put("uri", &(trusted.replace(&ca, "") + "&serverSelectionTimeoutMS=2000"));
    let refused = secured.file.run(&["plan"]);
    let message = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{message}");
    assert!(message.contains("certificate") && message.contains("tlsCAFile"), "{message}");
    assert!(!message.contains("first"), "the password is in {message}");

    // Nor by another private authority.
    let other = secured.put("other.pem", &Authority::new("somebody").pem());
    let uri = trusted.replace(&ca, &format!("&tlsCAFile={}", other.display()));
    secured.put("uri", &(uri + "&serverSelectionTimeoutMS=2000"));
    assert_eq!(secured.file.run(&["plan"]).status.code(), Some(1));

    // A wrong password is reported differently from a wrong certificate.
    secured.put("uri", &secured.set.uri_of("denormd", "other"));
    let refused = String::from_utf8(secured.file.run(&["plan"]).stderr).unwrap();
    assert!(refused.contains("the user name or the password"), "{refused}");
    let server = secured.set.node(0).address();
    assert!(
        refused.contains(&server) && refused.contains("in the database `admin`"),
        "which server, and where the user is looked up: {refused}"
    );

    // The driver's switch is accepted, and cannot be overlooked.
    secured.put("uri", &(trusted.replace(&ca, "") + "&tlsInsecure=true"));
    let running = Running::start(&secured.file);
    let line = running.wait("INSECURE");
    assert!(line.contains("tlsInsecure"), "{line}");
    running.wait("following changes");
    let status = secured.file.run(&["status"]);
    let text = String::from_utf8(status.stdout).unwrap();
    assert!(text.contains("!! INSECURE: tlsInsecure"), "{text}");
    let address: std::net::SocketAddr = format!("127.0.0.1:{}", secured.port).parse().unwrap();
    let answer = denormd::server::client::get(address, "/metrics", LIMIT).await.unwrap();
    assert!(String::from_utf8(answer.body).unwrap().contains("denormd_tls_unverified 1"));
}

#[tokio::test]
async fn a_password_is_changed_without_a_restart_in_either_order() {
    let secured = Secured::start().await;
    secured.create_user("first").await;
    let uri = |password: &str| secured.set.uri_of("denormd", password);
    let change = async |password: &str| secured.admin(doc! {"updateUser": "denormd", "pwd": password}).await;
    secured.put("uri", &uri("first"));
    let running = Running::start(&secured.file);
    secured.copies("10.0.0.2").await;

    // First on the server: every new connection is refused.
    change("second").await;
    secured.set.node(0).restart().await;
    secured.put("uri", &uri("second"));
    running.wait("config reloaded");
    secured.copies("10.0.0.3").await;
    // After the restart every connection authenticates again.
    secured.set.node(0).restart().await;
    secured.copies("10.0.0.4").await;

    // First in the file: refused, and retried automatically.
    secured.put("uri", &uri("third"));
    let line = running.wait("the new config is refused");
    assert!(!line.contains("third"), "{line}");
    secured.copies("10.0.0.5").await;
    change("third").await;
    running.wait("config reloaded");
    secured.set.node(0).restart().await;
    secured.copies("10.0.0.6").await;
}

#[tokio::test]
async fn a_client_certificate_is_renewed_without_a_restart() {
    let secured = Secured::start().await;
    let tls = secured.set.tls().unwrap();
    let (old, new) = (Authority::new("clients, last year"), Authority::new("clients, this year"));
    let certificate = secured.put("denormd.pem", &old.issue("denormd", "daemons", &[]));
    secured.put("uri", &secured.set.uri_by_certificate(&certificate));
    tls.trust(&[&old, &new]);
    secured.set.node(0).restart().await;
    secured.set.primary().await;
    secured.create_certificate_user("CN=denormd,OU=daemons,O=denormd-test").await;
    let running = Running::start(&secured.file);
    secured.copies("10.0.0.2").await;

    secured.put("denormd.pem", &new.issue("denormd", "daemons", &[]));
    running.wait("config reloaded");
    tls.trust(&[&new]);
    secured.set.node(0).restart().await;
    secured.copies("10.0.0.3").await;
}
