//! `denormd run`

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::{self, Loaded},
    error::Error,
    logging,
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
};

/// How often the config files are looked at. A ConfigMap is swapped by a symlink, which file notifications miss.
const LOOK: Duration = Duration::from_secs(2);

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP, or a change of a config file, swaps the rules.
pub async fn run(paths: &[PathBuf], loaded: Loaded) -> Result<(), Failure> {
    logging::start(&loaded.config.log);
    let mut signals = Signals::listen()?;
    let mut files = config::snapshot(paths);
    let mut handle = start(&loaded, ready(&loaded).await?).await?;
    loop {
        let wake = signals.next(paths, files.as_ref(), &handle).await;
        match wake {
            Wake::Stop => break,
            Wake::Ended => return Err(Error::internal("the pipeline has ended by itself; see the log").into()),
            Wake::Reload => {
                files = config::snapshot(paths);
                handle = reload(paths, handle).await?;
            }
        }
    }
    tracing::info!("stopping: what is in flight is finished, then the position is saved");
    tokio::select! {
        () = handle.stop() => {}
        () = signals.stop() => return Err(Error::internal("stopped at once by a second signal").into()),
    }
    tracing::info!("stopped");
    Ok(())
}

/// Everything that can be refused, before anything is started.
async fn ready(loaded: &Loaded) -> Result<Arc<Context>, Failure> {
    let context = context(loaded, compile(loaded).await?).await?;
    let findings = preflight::check(&context.server, &context.plan).await?;
    if findings.is_empty() { Ok(context) } else { Err(Failure::Refused(super::plan::refusal(&findings))) }
}

async fn start(loaded: &Loaded, context: Arc<Context>) -> Result<Handle, Failure> {
    let config = &loaded.config;
    let store = Store { database: config.state.database.clone(), deployment: config.name.clone() };
    let handle = pipeline::start(context, store).await?;
    tracing::info!(rules = config.rules.len(), deployment = %config.name, "following changes");
    Ok(handle)
}

/// Swaps the rules when the new config is whole and the cluster has what it needs; otherwise the old ones go on.
async fn reload(paths: &[PathBuf], running: Handle) -> Result<Handle, Failure> {
    let loaded = match config::load(paths, &config::process_environment()) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(kept(running, &error.into())),
    };
    match ready(&loaded).await {
        Ok(context) => {
            running.stop().await;
            tracing::info!("config reloaded");
            start(&loaded, context).await
        }
        Err(failure) => Ok(kept(running, &failure)),
    }
}

fn kept(running: Handle, failure: &Failure) -> Handle {
    tracing::error!(reason = %failure, "the new config is refused; the old rules stay in force");
    running
}

enum Wake {
    Stop,
    Reload,
    Ended,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Error> {
        let listen =
            |kind| signal(kind).map_err(|error| Error::internal(format!("signals cannot be handled: {error}")));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for something to do.
    async fn next(&mut self, paths: &[PathBuf], files: Option<&Vec<String>>, running: &Handle) -> Wake {
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Wake::Stop,
                _ = self.interrupt.recv() => return Wake::Stop,
                _ = self.hangup.recv() => return Wake::Reload,
                _ = look.tick() => {
                    if running.is_finished() {
                        return Wake::Ended;
                    }
                    let now = config::snapshot(paths);
                    if now.is_some() && now.as_ref() != files {
                        return Wake::Reload;
                    }
                }
            }
        }
    }

    /// Waits for one more signal to stop.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
