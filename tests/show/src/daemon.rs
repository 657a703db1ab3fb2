//! The binary `denormd` as a child process.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Time limit of a regular shutdown.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// `denormd run` with a config file of `config/`, on a cluster of ours. Ends, and its log is removed, when this is
/// dropped.
pub struct Daemon {
    binary: PathBuf,
    config: PathBuf,
    uri: String,
    listen: String,
    child: Option<Child>,
    log: PathBuf,
}

impl Daemon {
    /// A daemon with `config/<name>`; nothing runs yet.
    pub fn new(config: &str, uri: &str) -> Self {
        Self::with(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config").join(config), uri)
    }

    /// A daemon with this config file. The binary is the one in this program's folder, or `$DENORMD`.
    pub fn with(config: &Path, uri: &str) -> Self {
        let beside = env::current_exe().expect("the path of this program").with_file_name("denormd");
        let binary = env::var_os("DENORMD").map_or(beside, PathBuf::from);
        assert!(binary.exists(), "there is no {}: build it in the same profile", binary.display());
        let config = config.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", config.display()));
        // Several may run at the same time, each with a config file of its own.
        let name = config.file_stem().unwrap_or_default().to_string_lossy();
        let log = env::temp_dir().join(format!("denormd-show-{}-{name}.log", std::process::id()));
        Self { binary, config, uri: uri.to_owned(), listen: "127.0.0.1:0".to_owned(), child: None, log }
    }

    /// Uses another program.
    #[must_use]
    pub fn running(mut self, binary: PathBuf) -> Self {
        self.binary = binary;
        self
    }

    /// Uses a free port of this machine, so that it can receive requests.
    #[must_use]
    pub fn reachable(mut self) -> Self {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        self.listen = free.local_addr().expect("its address").to_string();
        self
    }

    /// The address that it listens on, as chosen by the last [`Daemon::reachable`].
    pub fn address(&self) -> &str {
        &self.listen
    }

    /// `denormd wait`: returns when everything committed is applied.
    pub fn wait(&self) {
        let output = self.command(&["wait"]).output().expect("denormd starts");
        assert!(output.status.success(), "denormd wait: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The id of the running process.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// A command of denormd with this config on this cluster.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(words).arg("--config").arg(&self.config).stdin(Stdio::null());
        // Several may run on this machine.
        command.env("DENORMD__MONGODB__URI", &self.uri).env("DENORMD__HTTP__LISTEN", &self.listen);
        command
    }

    /// `denormd plan --apply`: returns the commands that it ran.
    pub fn plan_apply(&self) -> Vec<String> {
        let output = self.command(&["plan", "--apply"]).output().expect("denormd starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "denormd plan --apply: {}\n{text}", String::from_utf8_lossy(&output.stderr));
        text.lines().filter(|line| line.starts_with("db.")).map(str::to_owned).collect()
    }

    /// `denormd run`. Its log goes to one file through all restarts.
    pub fn start(&mut self) {
        let log = File::options().create(true).append(true).open(&self.log).expect("a log file");
        let child = self.command(&["run"]).stdout(Stdio::null()).stderr(log).spawn().expect("denormd starts");
        self.child = Some(child);
    }

    /// SIGKILL. The process is gone when this returns.
    pub fn kill9(&mut self) {
        self.assert_running();
        let mut child = self.child.take().expect("a daemon that runs");
        child.kill().expect("SIGKILL");
        child.wait().expect("the exit status");
    }

    /// SIGTERM, after which the daemon finishes the work in flight and exits with 0.
    pub async fn stop(&mut self) {
        self.assert_running();
        let mut child = self.child.take().expect("a daemon that runs");
        let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "SIGTERM could not be sent");
        let wait = async {
            loop {
                if let Some(status) = child.try_wait().expect("the exit status") {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let Ok(status) = tokio::time::timeout(STOP_LIMIT, wait).await else {
            self.child = Some(child);
            panic!("denormd did not stop within {STOP_LIMIT:?} of SIGTERM\n{}", self.log_tail());
        };
        assert!(status.success(), "denormd did not stop in good order: {status}\n{}", self.log_tail());
    }

    /// Panics with the end of the log if the daemon has ended by itself.
    pub fn assert_running(&mut self) {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait().expect("the exit status")
        {
            panic!("denormd ended by itself: {status}\n{}", self.log_tail());
        }
    }

    /// The last lines of the daemon's log.
    pub fn log_tail(&self) -> String {
        const LINES: usize = 20;
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// The warnings and errors in the log.
    pub fn warnings(&self) -> Vec<String> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let bad = |line: &&str| line.contains("\"level\":\"WARN\"") || line.contains("\"level\":\"ERROR\"");
        log.lines().filter(bad).map(str::to_owned).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            child.kill().ok();
            child.wait().ok();
        }
        fs::remove_file(&self.log).ok();
    }
}
