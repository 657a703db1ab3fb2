//! What asks a running daemon to do something else: signals, and files that change.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    config::{self, file},
    error::Error,
};

/// How often the files are looked at. A ConfigMap is swapped by a symlink, which file notifications miss.
const LOOK: Duration = Duration::from_secs(1);
/// How long after the cluster has refused a config it is asked again.
const AGAIN: Duration = Duration::from_secs(5);

/// What is asked for.
#[derive(Debug, PartialEq)]
pub enum Wake {
    /// To end.
    Stop,
    /// To read the config again.
    Reload,
    /// An instance with newer rules is there. No signal says so.
    Yield,
}

/// Listens.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    paths: Vec<PathBuf>,
    /// Files that the config names, with secrets.
    named: Vec<PathBuf>,
    /// All of them as they were last loaded, or refused.
    seen: Option<Vec<String>>,
    again: Option<Instant>,
}

impl Signals {
    /// Begins to listen.
    pub fn listen(paths: &[PathBuf]) -> Result<Self, Error> {
        let listen =
            |kind| signal(kind).map_err(|error| Error::internal(format!("signals cannot be handled: {error}")));
        let mut signals = Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
            paths: paths.to_vec(),
            named: Vec::new(),
            seen: None,
            again: None,
        };
        signals.seen = signals.look();
        Ok(signals)
    }

    /// Also looks at these files, which the config names.
    pub fn watch(&mut self, named: Vec<PathBuf>) {
        if named != self.named {
            self.named = named;
            self.seen = self.look();
        }
    }

    /// Asks for another reload in a while, although nothing changes.
    pub fn try_again(&mut self) {
        self.again = Some(Instant::now() + AGAIN);
    }

    /// What the files hold; None while one of them cannot be read, as in the middle of a swap.
    fn look(&self) -> Option<Vec<String>> {
        let mut texts = config::snapshot(&self.paths)?;
        for path in &self.named {
            texts.push(String::from_utf8_lossy(&file::bytes(path, file::SECRET).ok()?).into_owned());
        }
        Some(texts)
    }

    /// Waits for something to do.
    pub async fn next(&mut self) -> Wake {
        let mut tick = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Wake::Stop,
                _ = self.interrupt.recv() => return Wake::Stop,
                _ = self.hangup.recv() => break,
                _ = tick.tick() => {
                    let now = self.look();
                    let changed = now.is_some() && now != self.seen;
                    if changed || self.again.is_some_and(|at| at <= Instant::now()) {
                        break;
                    }
                }
            }
        }
        self.again = None;
        self.seen = self.look();
        Wake::Reload
    }

    /// Waits for a signal to stop.
    pub async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
