//! denormd as a separate process, used as its users do.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use denormd::{server::client, status::Status};
use denormd_fixture::TestDb;

use crate::support::daemon::{PATIENCE, config};

/// A config file, and the daemon started from it; killed when the test ends.
pub struct Running {
    folder: tempfile::TempDir,
    pub address: SocketAddr,
    child: Option<Child>,
}

impl Running {
    /// A config with these rules and a free port, after `plan --apply`; `more` is further YAML. Nothing runs yet.
    pub fn prepare(test: &TestDb, rules: &str, more: &str) -> Self {
        let running = Self::of(&format!("{}{more}", config(test, rules)));
        let (code, told, error) = running.command(&["plan", "--apply"]);
        assert_eq!(code, Some(0), "{told}\n{error}");
        running
    }

    /// A complete config, whose address is replaced by one with a free port. Nothing is prepared, nothing runs yet.
    pub fn of(text: &str) -> Self {
        let running = Self::new();
        std::fs::write(running.file(), text.replace("127.0.0.1:0", &running.address.to_string())).unwrap();
        running
    }

    fn new() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        Self { folder: tempfile::tempdir().unwrap(), address, child: None }
    }

    /// The same, started and leading.
    pub async fn start(test: &TestDb, rules: &str, more: &str) -> Self {
        let mut running = Self::prepare(test, rules, more);
        running.run().await;
        running
    }

    /// Starts it.
    pub fn spawn(&mut self) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log_file()).unwrap();
        self.child = Some(denormd(&self.file()).arg("run").stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    /// Starts it, and waits until it is ready.
    pub async fn run(&mut self) {
        self.spawn();
        let limit = Instant::now() + PATIENCE;
        while !client::get(self.address, "/readyz", Duration::from_secs(10)).await.is_ok_and(|answer| answer.ok) {
            assert!(Instant::now() < limit, "not ready: {}", self.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Ends it by SIGTERM.
    pub fn stop(&mut self) {
        let mut child = self.child.take().unwrap();
        assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
        assert!(child.wait().unwrap().success(), "{}", self.log());
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends a signal: `STOP`, `CONT`, `HUP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("denormd.yaml")
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Its complete log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Runs another command with the same config: exit status, standard output, standard error.
    pub fn command(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = denormd(&self.file()).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    pub async fn text(&self, path: &str) -> String {
        let answer = client::get(self.address, path, Duration::from_secs(60)).await.unwrap();
        String::from_utf8(answer.body).unwrap()
    }

    pub async fn status(&self) -> Status {
        serde_json::from_str(&self.text("/v1/status").await).unwrap()
    }

    /// The value of a series, written as in the exposition.
    pub async fn metric(&self, series: &str) -> Option<f64> {
        let text = self.text("/metrics").await;
        let line = text.lines().find(|line| line.rsplit_once(' ').is_some_and(|(name, _)| name == series))?;
        line.rsplit_once(' ').unwrap().1.parse().ok()
    }

    /// The values of all series with this prefix.
    pub async fn series(&self, start: &str) -> Vec<f64> {
        let text = self.text("/metrics").await;
        let lines = text.lines().filter(|line| line.starts_with(start));
        lines.filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect()
    }

    /// Waits for a status in the form that programs read.
    pub async fn until_json(&self, what: &str, condition: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let limit = Instant::now() + PATIENCE;
        loop {
            let status = serde_json::from_str(&self.text("/v1/status").await).unwrap();
            if condition(&status) {
                return status;
            }
            assert!(Instant::now() < limit, "{what}: {status:#}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until the first rule is in this state. A status from before the first pipeline has no rules.
    pub async fn until_state(&self, state: &str) {
        self.until(state, |status| status.rules.first().is_some_and(|rule| rule.state == state)).await;
    }

    pub async fn until(&self, what: &str, condition: impl Fn(&Status) -> bool) -> Status {
        let limit = Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if condition(&status) {
                return status;
            }
            assert!(Instant::now() < limit, "{what}: {status:#?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// A process that is killed when the test ends.
pub struct Started(pub Child);

impl Started {
    /// True if it is still running.
    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It may have ended already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The CPU seconds that a process has used, on Linux.
pub fn cpu(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The second field is a name in parentheses, which may contain anything; utime and stime are the 14th and the 15th.
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let spent = rest.split_whitespace().skip(11).take(2);
    spent.map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
}

/// The program, with a config. DENORMD names another binary: a release build for large measurements.
pub fn denormd(config: &Path) -> Command {
    let binary = std::env::var_os("DENORMD").filter(|path| !path.is_empty());
    let mut command = Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_denormd").into()));
    command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The names of the current causes.
pub fn causes(status: &Status) -> Vec<&str> {
    status.causes.iter().map(|cause| cause.cause.as_str()).collect()
}
