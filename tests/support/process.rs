//! The program as a user runs it: commands on a config file, and daemons.

use std::{
    fs::File,
    io::Read,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bson::{Document, doc};
use denormd_fixture::TestDb;
use serde_json::Value;

use crate::support::daemon::PATIENCE;

/// A config file in its own folder.
pub struct Program {
    folder: tempfile::TempDir,
}

/// The result of a command.
#[derive(Debug)]
pub struct Printed {
    pub code: i32,
    pub out: String,
    pub err: String,
    /// Its peak memory, in bytes.
    pub peak: u64,
}

impl Printed {
    /// Each line of standard output as JSON.
    pub fn lines(&self) -> Vec<Value> {
        let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        self.out.lines().map(line).collect()
    }

    /// All of standard output as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Fails unless the exit status is this one.
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.out, self.err);
        self
    }
}

impl Program {
    /// Creates the folder with this config.
    pub fn new(config: &str) -> Self {
        let program = Self { folder: tempfile::tempdir().unwrap() };
        program.write(config);
        program
    }

    /// Replaces the config.
    pub fn write(&self, config: &str) {
        std::fs::write(self.config(), config).unwrap();
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("shop.yaml")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // DENORMD names another binary: a release build for large measurements.
        let binary = std::env::var_os("DENORMD").filter(|path| !path.is_empty());
        let mut command = Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_denormd").into()));
        command.args(arguments).arg("--config").arg(self.config()).stdin(Stdio::null());
        command
    }

    /// Runs a command to its end, without blocking the test.
    pub async fn run(&self, arguments: &[&str]) -> Printed {
        self.run_within(arguments, 10 * PATIENCE).await
    }

    /// The same, with a time limit that suits the amount of data.
    pub async fn run_within(&self, arguments: &[&str], limit: Duration) -> Printed {
        let mut command = self.command(arguments);
        let text = arguments.join(" ");
        let done = tokio::task::spawn_blocking(move || finish(&mut command, &text, limit));
        done.await.unwrap()
    }

    /// Starts a daemon. It ends with the value.
    pub fn daemon(&self) -> Daemon {
        let log = self.folder.path().join("daemon.log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let child = self.command(&["run"]).stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        Daemon { child, log }
    }

    /// Runs a daemon until it dies when it comes to `place` for the `nth` time.
    pub async fn dies_at(&self, place: &str, nth: u32) {
        let mut command = self.command(&["run"]);
        command.env("DENORMD_CRASH", format!("{place}:{nth}"));
        let text = format!("run, to die at {place}");
        let done = tokio::task::spawn_blocking(move || finish(&mut command, &text, PATIENCE)).await.unwrap();
        assert_ne!(done.code, 0, "{}", done.err);
    }

    /// Runs a command that dies when it comes to `place`.
    pub async fn run_and_die(&self, arguments: &[&str], place: &str) -> Printed {
        let mut command = self.command(arguments);
        command.env("DENORMD_CRASH", format!("{place}:1"));
        let text = arguments.join(" ");
        tokio::task::spawn_blocking(move || finish(&mut command, &text, PATIENCE)).await.unwrap()
    }

    /// Runs a command, and interrupts it as Ctrl-C does, as soon as `reached` returns.
    pub async fn interrupt(&self, arguments: &[&str], reached: impl Future<Output = ()>) -> Printed {
        let mut command = self.command(arguments);
        let (text, (told, tells)) = (arguments.join(" "), std::sync::mpsc::channel());
        let id = move |id| told.send(id).unwrap();
        let done = tokio::task::spawn_blocking(move || finish_with(&mut command, &text, PATIENCE, id));
        reached.await;
        let id: u32 = tells.recv().unwrap();
        assert!(Command::new("kill").args(["-INT", &id.to_string()]).status().unwrap().success());
        done.await.unwrap()
    }

    /// The log of its daemons.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("daemon.log")).unwrap_or_default()
    }

    /// Waits until every rule of the deployment has brought existing data up to date.
    pub async fn backfilled(&self, test: &TestDb, rules: usize) {
        self.backfilled_within(test, rules, PATIENCE).await;
    }

    /// The same, with a time limit that suits the amount of data.
    pub async fn backfilled_within(&self, test: &TestDb, rules: usize, limit: Duration) {
        let states = test.beside("state").collection::<Document>("rules");
        let begun = Instant::now();
        while states.count_documents(doc! {"backfill": "done"}).await.unwrap() < rules as u64 {
            assert!(begun.elapsed() < limit, "the backfills are not done");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

fn finish(command: &mut Command, text: &str, limit: Duration) -> Printed {
    finish_with(command, text, limit, |_| {})
}

/// Runs a command to its end, and passes the id of its process to `on_start`.
fn finish_with(command: &mut Command, text: &str, limit: Duration, on_start: impl FnOnce(u32)) -> Printed {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    on_start(child.id());
    let (out, err) = (read(child.stdout.take().unwrap()), read(child.stderr.take().unwrap()));
    let (started, mut peak) = (Instant::now(), 0);
    let status = loop {
        peak = peak.max(memory(child.id()));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(started.elapsed() < limit, "denormd {text} does not end");
        std::thread::sleep(Duration::from_millis(20));
    };
    Printed { code: status.code().unwrap_or(-1), out: out.join().unwrap(), err: err.join().unwrap(), peak }
}

fn read(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        pipe.read_to_string(&mut text).unwrap();
        text
    })
}

/// The peak memory of a process so far, if the system reports it.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or_default() * 1024
}

/// A daemon process.
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Waits until it has logged `text`.
    pub async fn says(&self, text: &str) {
        let begun = Instant::now();
        while !self.log().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "it does not say {text:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Its peak memory so far, in bytes.
    pub fn peak(&self) -> u64 {
        memory(self.child.id())
    }

    /// Its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Asks it to stop, and waits for its end.
    pub async fn stop(mut self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "it does not stop\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
