//! The manifests of `deploy/kubernetes`, as built by kustomize: each container of denormd is run with exactly the
//! arguments and environment of its manifest, on files as in its volumes, against a real replica set.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use denormd::server::client;
use denormd_fixture::ReplicaSet;
use serde_json::Value;

use crate::support::{daemon::until, running::Started};

/// The port in the manifests.
const PORT: &str = ":9464";

/// The output of kustomize for a folder; None if kubectl is not installed.
fn objects(folder: &str) -> Option<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes").join(folder);
    let output = Command::new("kubectl").arg("kustomize").arg(&path).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.split("\n---\n").map(|one| serde_saphyr::from_str(one).unwrap()).collect())
}

fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|one| one["kind"] == kind).unwrap_or_else(|| panic!("there is no {kind}"))
}

/// A replica set with the collections of the shop's rules.
async fn shop() -> ReplicaSet {
    let set = ReplicaSet::start(1).await;
    let shop = set.client().await.database("shop");
    for name in ["parts", "products", "hosts", "logmsg"] {
        shop.create_collection(name).await.unwrap();
    }
    set
}

/// One container of denormd, with its files.
struct Container {
    folder: tempfile::TempDir,
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
    address: SocketAddr,
}

impl Container {
    /// The container of an object; `uri` takes the place of the example's connection string.
    fn of(objects: &[Value], kind: &str, uri: &str) -> Self {
        let pod = &of_kind(objects, kind)["spec"]["template"]["spec"];
        let lists = [&pod["initContainers"], &pod["containers"]];
        let containers = lists.into_iter().filter_map(Value::as_array).flatten();
        let container = containers.into_iter().find(|one| one["name"] == "denormd").expect("a container of denormd");
        let folder = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let inside = |path: &str| format!("{}{path}", folder.path().display());
        for mount in container["volumeMounts"].as_array().unwrap() {
            let volume =
                pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            let source = if volume["configMap"].is_object() { "ConfigMap" } else { "Secret" };
            let path = inside(mount["mountPath"].as_str().unwrap());
            std::fs::create_dir_all(&path).unwrap();
            for (name, text) in of_kind(objects, source)["data"].as_object().unwrap() {
                let text = if source == "Secret" { uri } else { text.as_str().unwrap() };
                std::fs::write(format!("{path}/{name}"), text).unwrap();
            }
        }
        // As in the image.
        let mut environment = BTreeMap::from([("DENORMD_CONFIG".to_owned(), inside("/etc/denormd"))]);
        for variable in container["env"].as_array().unwrap() {
            let value = variable["value"].as_str().unwrap();
            let value = if value.starts_with('/') { inside(value) } else { value.replace(PORT, &format!(":{port}")) };
            environment.insert(variable["name"].as_str().unwrap().to_owned(), value);
        }
        let arguments = container["args"].as_array().unwrap().iter();
        Self {
            arguments: arguments.map(|argument| argument.as_str().unwrap().to_owned()).collect(),
            environment,
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            folder,
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
        command.args(&self.arguments).env_clear().envs(&self.environment).stdin(Stdio::null());
        command
    }

    /// Starts the container's process. It ends with the value.
    fn start(&self) -> Started {
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        Started(self.command().stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    async fn answers(&self, path: &str, code: u16) {
        let what = format!("{path} answers {code}");
        until(&what, async || {
            let answer = client::get(self.address, path, Duration::from_secs(10)).await;
            answer.is_ok_and(|answer| answer.code == code).then_some(())
        })
        .await;
    }
}

/// A relative URL leads nowhere in Alertmanager: one command sets the base, for Prometheus and for the operator alike.
#[test]
fn the_alerts_lead_to_the_runbook_wherever_it_is_served() {
    let copy = tempfile::tempdir().unwrap();
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let copied = Command::new("cp").arg("-r").arg(&deploy).arg(copy.path()).status().unwrap();
    assert!(copied.success());
    let deploy = copy.path().join("deploy");
    let set = |url: &str| Command::new("python3").arg(deploy.join("prometheus/runbooks.py")).arg(url).output().unwrap();
    assert!(!set("wiki/RUNBOOK.md").status.success(), "that is not absolute");
    // Twice: a base can be changed.
    for base in ["https://one.example/RUNBOOK.md", "https://wiki.example/denormd?page=RUNBOOK.md"] {
        let output = set(base);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for file in ["prometheus/alerts.yml", "kubernetes/prometheus-rule/prometheus-rule.yaml"] {
            let text = std::fs::read_to_string(deploy.join(file)).unwrap();
            let urls: Vec<&str> = text.lines().filter(|line| line.contains("runbook_url: ")).collect();
            assert!(urls.len() > 15, "{file}");
            assert!(urls.iter().all(|line| line.contains(&format!("runbook_url: \"{base}#denormd"))), "{urls:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deployment_starts_with_the_very_command_of_its_manifest() {
    let Some(objects) = objects("example") else { return println!("skipped: kubectl is not here") };
    let set = shop().await;
    let prepare = Container::of(&objects, "Job", &set.uri());
    let output = prepare.command().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let instances: Vec<Container> = (0..2).map(|_| Container::of(&objects, "Deployment", &set.uri())).collect();
    let mut started: Vec<Started> = instances.iter().map(Container::start).collect();
    for instance in &instances {
        instance.answers("/readyz", 200).await;
        instance.answers("/metrics", 200).await;
    }
    assert!(started.iter_mut().all(Started::is_running));
}

/// A sidecar that ends, or is not alive, prevents the application's pod from starting.
#[tokio::test(flavor = "multi_thread")]
async fn the_sidecar_stays_up_whatever_is_wrong() {
    let Some(objects) = objects("example-sidecar") else { return println!("skipped: kubectl is not here") };
    let set = shop().await;
    let sidecar = Container::of(&objects, "Deployment", &set.uri());
    let rules = sidecar.folder.path().join("etc/denormd/shop.yaml");
    let good = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(&rules, "rules: [").unwrap();
    let mut started = sidecar.start();
    until("it says what is wrong with the config", async || sidecar.log().contains("shop.yaml:1").then_some(())).await;
    assert!(started.is_running(), "{}", sidecar.log());

    // The config is right; the cluster lacks the indexes.
    std::fs::write(&rules, good).unwrap();
    sidecar.answers("/livez", 200).await;
    until("it says what the cluster lacks", async || sidecar.log().contains("createIndex").then_some(())).await;
    sidecar.answers("/readyz", 503).await;
    let status = client::get(sidecar.address, "/v1/status", Duration::from_secs(10)).await.unwrap();
    assert!(String::from_utf8_lossy(&status.body).contains("createIndex"), "the status says why");
    assert!(started.is_running(), "{}", sidecar.log());
    let databases = set.client().await.list_database_names().await.unwrap();
    assert!(!databases.contains(&"denormd".to_owned()), "nothing is written: {databases:?}");

    let prepare = Container::of(&objects, "Job", &set.uri());
    assert!(prepare.command().output().unwrap().status.success());
    sidecar.answers("/readyz", 200).await;
}
