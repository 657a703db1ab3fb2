//! Requests to a running daemon: signals, and changes of its files.

use std::{io, path::PathBuf, time::Duration};

#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::{sync::oneshot, time::Instant};

use denormd_mongo::error::Error;
use denormd_rules::config::{self, file};

/// Interval between reads of the files. A ConfigMap is replaced through a symlink, which file notifications miss.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before a refused config is tried again: `plan --apply` may have given the cluster what it lacked.
const AGAIN: Duration = Duration::from_secs(10);

/// Looks in a row at a file that cannot be read, after which it is not being replaced: a reload says what is wrong.
const UNREADABLE: u32 = 10;

/// The requests to a running daemon.
#[derive(Debug, PartialEq)]
pub enum Wake {
    /// Stop.
    Stop,
    /// Read the config again.
    Reload,
}

/// The source of requests.
enum Source {
    System(System),
    /// Another task of this process, which requests a stop once, as in simulations.
    Task(oneshot::Receiver<()>),
}

impl Source {
    async fn next(&mut self) -> Wake {
        match self {
            Self::System(system) => system.next().await,
            Self::Task(_) => {
                self.stop().await;
                Wake::Stop
            }
        }
    }

    async fn stop(&mut self) {
        match self {
            Self::System(system) => system.stop().await,
            Self::Task(asked) if asked.is_terminated() => std::future::pending().await,
            Self::Task(asked) => drop(asked.await),
        }
    }
}

/// The signals of the system: SIGTERM and SIGINT stop, SIGHUP reloads.
#[cfg(unix)]
struct System {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

#[cfg(unix)]
impl System {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    async fn next(&mut self) -> Wake {
        tokio::select! {
            _ = self.terminate.recv() => Wake::Stop,
            _ = self.interrupt.recv() => Wake::Stop,
            _ = self.hangup.recv() => Wake::Reload,
        }
    }
}

/// On Windows Ctrl-C stops. No signal reloads; a change of the files does.
#[cfg(windows)]
struct System(tokio::signal::windows::CtrlC);

#[cfg(windows)]
impl System {
    fn listen() -> io::Result<Self> {
        tokio::signal::windows::ctrl_c().map(Self)
    }

    async fn stop(&mut self) {
        self.0.recv().await;
    }

    async fn next(&mut self) -> Wake {
        self.stop().await;
        Wake::Stop
    }
}

/// Receives signals and watches files.
pub struct Signals {
    source: Source,
    paths: Vec<PathBuf>,
    /// Files with secrets that the config names.
    named: Vec<PathBuf>,
    /// The content of the files before they were last loaded or refused: those of the config, then those that it names.
    seen: Option<(Vec<String>, Vec<String>)>,
    /// Looks in a row at which a file could not be read.
    unreadable: u32,
    again: Option<Instant>,
    /// True if the last reload was requested by time alone.
    repeated: bool,
}

impl Signals {
    /// Starts to receive signals and to watch the files.
    pub fn listen(paths: &[PathBuf]) -> Result<Self, Error> {
        let unheard = |error| Error::internal(format!("signals cannot be handled: {error}"));
        Ok(Self::new(Source::System(System::listen().map_err(unheard)?), paths))
    }

    /// Receives the stop request from another task, which sends it or drops the sender, and watches the files.
    #[must_use]
    pub fn until(asked: oneshot::Receiver<()>, paths: &[PathBuf]) -> Self {
        Self::new(Source::Task(asked), paths)
    }

    fn new(source: Source, paths: &[PathBuf]) -> Self {
        let paths = paths.to_vec();
        let mut signals =
            Self { source, paths, named: Vec::new(), seen: None, unreadable: 0, again: None, repeated: false };
        signals.seen = signals.look();
        signals
    }

    /// Takes the present content of the files for what is known.
    pub fn loaded(&mut self) {
        self.seen = self.look();
    }

    /// Also watches these files, which the config names. Keeps the known content of the config's own files, so that a change
    /// since they were loaded still causes a reload.
    pub fn watch(&mut self, named: Vec<PathBuf>) {
        if named != self.named {
            self.named = named;
            let files = self.seen.take().map(|(files, _)| files);
            self.seen = files.zip(self.look_at_named());
        }
    }

    /// Requests another reload after a while, even without a change.
    pub fn try_again(&mut self) {
        self.again = Some(Instant::now() + AGAIN);
    }

    /// True if the current reload repeats the last one: neither a signal nor a change of the files has requested it.
    #[must_use]
    pub fn is_repeated(&self) -> bool {
        self.repeated
    }

    /// The content of the files; None while one of them cannot be read, such as in the middle of a replacement.
    fn look(&self) -> Option<(Vec<String>, Vec<String>)> {
        config::snapshot(&self.paths).zip(self.look_at_named())
    }

    fn look_at_named(&self) -> Option<Vec<String>> {
        let text = |path: &PathBuf| Some(String::from_utf8_lossy(&file::bytes(path, file::SECRET).ok()?).into_owned());
        self.named.iter().map(text).collect()
    }

    /// Waits for the next request.
    pub async fn next(&mut self) -> Wake {
        let mut tick = tokio::time::interval(POLL_INTERVAL);
        self.repeated = loop {
            tokio::select! {
                wake = self.source.next() => match wake {
                    Wake::Reload => break false,
                    Wake::Stop => return Wake::Stop,
                },
                _ = tick.tick() => {
                    let now = self.look();
                    self.unreadable = if now.is_some() { 0 } else { self.unreadable.saturating_add(1) };
                    if now.is_some() && now != self.seen || self.unreadable == UNREADABLE {
                        break false;
                    }
                    if self.again.is_some_and(|at| at <= Instant::now()) {
                        break true;
                    }
                }
            }
        };
        self.again = None;
        self.seen = self.look();
        Wake::Reload
    }

    /// Waits for a signal that ends a command: SIGTERM, SIGINT or SIGHUP.
    pub async fn any(&mut self) {
        self.source.next().await;
    }

    /// Waits for a signal to stop.
    pub async fn stop(&mut self) {
        self.source.stop().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A config file, another file, the sender of a stop request, and signals that watch the first file so far.
    fn two_files() -> (tempfile::TempDir, [PathBuf; 2], oneshot::Sender<()>, Signals) {
        let folder = tempfile::tempdir().unwrap();
        let files = ["shop.yaml", "uri"].map(|name| folder.path().join(name));
        for file in &files {
            std::fs::write(file, "first").unwrap();
        }
        let (stop, asked) = oneshot::channel();
        let signals = Signals::until(asked, &files[..1]);
        (folder, files, stop, signals)
    }

    /// While a config that names another file was being applied, a second change of the rules went unnoticed.
    #[tokio::test]
    async fn a_change_during_a_reload_is_not_missed() {
        let (_folder, [rules, uri], _stop, mut signals) = two_files();
        std::fs::write(&rules, "second").unwrap();
        signals.watch(vec![uri]);
        let next = tokio::time::timeout(POLL_INTERVAL * 30, signals.next()).await;
        assert_eq!(next, Ok(Wake::Reload));
        let again = tokio::time::timeout(POLL_INTERVAL * 2, signals.next()).await;
        assert!(again.is_err(), "each change is read once");
    }

    /// After a file got the wrong owner, later changes of all files were ignored, and nothing was logged.
    #[tokio::test]
    async fn a_file_that_stays_unreadable_is_reported_once() {
        let (_folder, [_, uri], _stop, mut signals) = two_files();
        signals.watch(vec![uri.clone()]);
        std::fs::remove_file(&uri).unwrap();
        let next = tokio::time::timeout(POLL_INTERVAL * 60, signals.next()).await;
        assert_eq!(next, Ok(Wake::Reload));
        let again = tokio::time::timeout(POLL_INTERVAL * 2, signals.next()).await;
        assert!(again.is_err(), "it is the same file");
        std::fs::write(&uri, "first").unwrap();
        let next = tokio::time::timeout(POLL_INTERVAL * 60, signals.next()).await;
        assert_eq!(next, Ok(Wake::Reload), "it can be read again");
    }
}
