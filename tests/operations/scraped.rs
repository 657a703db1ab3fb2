//! The real Prometheus on a running daemon, with the queries of the alerts, the recording rules and the dashboard.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use denormd::server::client;

use crate::support::{daemon::PATIENCE, script::found_by};

/// The folder of `prometheus` and `promtool`.
pub fn programs() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(|| found_by("prometheus.py")).as_deref()
}

/// A Prometheus with our rules and alerts that scrapes one daemon every second; killed when the test ends.
pub struct Prometheus {
    folder: tempfile::TempDir,
    address: SocketAddr,
    child: Child,
}

/// One series of a result: its labels, and its value.
pub type Sample = (serde_json::Map<String, serde_json::Value>, f64);

impl Prometheus {
    /// Starts a Prometheus, if one is available.
    pub async fn start(daemon: SocketAddr) -> Option<Self> {
        let program = programs()?.join("prometheus");
        let folder = tempfile::tempdir().unwrap();
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus");
        for file in ["rules.yml", "alerts.yml"] {
            std::fs::copy(ours.join(file), folder.path().join(file)).unwrap();
        }
        let text = std::fs::read_to_string(ours.join("prometheus.yml")).unwrap();
        let text = text.replace("127.0.0.1:9464", &daemon.to_string()).replace("15s", "1s");
        std::fs::write(folder.path().join("prometheus.yml"), text).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(program)
            .arg(format!("--config.file={}", folder.path().join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let prometheus = Self { folder, address, child };
        let limit = Instant::now() + PATIENCE;
        while !client::get(address, "/-/ready", Duration::from_secs(5)).await.is_ok_and(|answer| answer.ok) {
            let log = std::fs::read_to_string(prometheus.folder.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < limit, "{log}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Some(prometheus)
    }

    /// The current result of an expression.
    pub async fn query(&self, expression: &str) -> Vec<Sample> {
        let encoded = expression.bytes().fold(String::new(), |text, byte| format!("{text}%{byte:02X}"));
        let path = format!("/api/v1/query?query={encoded}");
        let answer = client::get(self.address, &path, Duration::from_secs(30)).await.unwrap();
        let body: serde_json::Value = answer.json().unwrap();
        assert_eq!(body["status"], "success", "{expression}: {body}");
        let series = body["data"]["result"].as_array().unwrap_or_else(|| panic!("{expression}: {body}"));
        let sample = |one: &serde_json::Value| {
            let value = one["value"][1].as_str().unwrap().replace("+Inf", "inf").parse().unwrap();
            (one["metric"].as_object().unwrap().clone(), value)
        };
        series.iter().map(sample).collect()
    }

    /// Waits until an expression has a result.
    pub async fn until(&self, expression: &str) -> Vec<Sample> {
        let limit = Instant::now() + PATIENCE;
        loop {
            let found = self.query(expression).await;
            if !found.is_empty() {
                return found;
            }
            assert!(Instant::now() < limit, "{expression} says {found:?}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn deploy(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file)).unwrap()
}

/// Names and expressions of the alerts.
pub fn alerts() -> Vec<(String, String)> {
    let text = deploy("prometheus/alerts.yml");
    let after = |line: &str, key: &str| line.trim().strip_prefix(key).map(|rest| rest.trim().to_owned());
    let names = text.lines().filter_map(|line| after(line, "- alert:"));
    let expressions = text.lines().filter_map(|line| after(line, "expr:"));
    names.zip(expressions).collect()
}

/// The expression of one alert.
pub fn alert(name: &str) -> String {
    alerts().into_iter().find(|(known, _)| known == name).unwrap_or_else(|| panic!("{name}")).1
}

/// Names of the recording rules.
pub fn records() -> Vec<String> {
    let text = deploy("prometheus/rules.yml");
    text.lines().filter_map(|line| line.trim().strip_prefix("- record: ").map(ToOwned::to_owned)).collect()
}

/// Every expression of the dashboard, annotations and variables included, its variables filled in.
pub fn dashboard() -> Vec<String> {
    let board: serde_json::Value = serde_json::from_str(&deploy("grafana/denormd.json")).unwrap();
    let mut found = Vec::new();
    expressions(&board, &mut found);
    let fill = |text: String| text.replace("$job", "denormd").replace("$__rate_interval", "1m");
    found.into_iter().map(fill).collect()
}

/// A single figure was the last one of the whole range: of a cause that had ended, the 1 that it had an hour ago; of a daemon that was
/// gone, a lag of 0 and one leader.
#[test]
fn a_single_figure_of_the_dashboard_is_of_now() {
    let board: serde_json::Value = serde_json::from_str(&deploy("grafana/denormd.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    let figures: Vec<_> = panels.iter().filter(|panel| panel["type"] == "stat").collect();
    assert!(figures.len() > 5);
    for target in figures.iter().flat_map(|panel| panel["targets"].as_array().unwrap()) {
        assert!(target["instant"] == true && target["range"] == false, "{target}");
    }
}

fn expressions(value: &serde_json::Value, out: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            out.extend(fields.get("expr").and_then(|expr| expr.as_str()).map(ToOwned::to_owned));
            fields.values().for_each(|field| expressions(field, out));
        }
        serde_json::Value::Array(all) => all.iter().for_each(|one| expressions(one, out)),
        _ => {}
    }
}

/// The series that an expression reads: names with their labels, without ranges and thresholds.
pub fn selectors(expression: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = expression;
    let starts = |text: &str| ["denormd_", "denormd:", "up{"].iter().any(|start| text.starts_with(start));
    while !rest.is_empty() {
        if starts(rest) {
            let name = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
            let labels = if rest[name..].starts_with('{') { rest[name..].find('}').unwrap() + 1 } else { 0 };
            found.push(rest[..name + labels].to_owned());
            rest = &rest[name + labels..];
        } else {
            rest = &rest[rest.chars().next().unwrap().len_utf8()..];
        }
    }
    found
}

#[test]
fn selectors_are_taken_out_of_expressions() {
    let cases = [
        ("absent(up{job=\"denormd\"} == 1)", vec!["up{job=\"denormd\"}"]),
        ("denormd_a < 4 * 3600 and denormd_a{x=\"y\"} >= 4", vec!["denormd_a", "denormd_a{x=\"y\"}"]),
        ("increase(denormd_b_total[1h]) > 0", vec!["denormd_b_total"]),
    ];
    for (expression, expected) in cases {
        assert_eq!(selectors(expression), expected);
    }
}
