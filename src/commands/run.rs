//! `denormd run`

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::{self, Loaded},
    error::Error,
    logging,
    metrics::Metrics,
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
    server,
    status::Board,
};

/// How often the config files are looked at. A ConfigMap is swapped by a symlink, which file notifications miss.
const LOOK: Duration = Duration::from_secs(2);

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP, or a change of a config file, swaps the rules.
pub async fn run(paths: &[PathBuf], loaded: Loaded) -> Result<(), Failure> {
    logging::start(&loaded.config.log);
    let mut signals = Signals::listen()?;
    let mut files = config::snapshot(paths);
    let board = serve(&loaded).await?;
    let mut handle = start(&loaded, ready(&loaded, &board).await?, &board).await?;
    loop {
        let wake = signals.next(paths, &files, &handle).await;
        match wake {
            Wake::Stop => break,
            Wake::Ended => return Err(Error::internal("the pipeline has ended by itself; see the log").into()),
            Wake::Reload => {
                files = config::snapshot(paths);
                handle = reload(paths, handle, &board).await?;
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
async fn ready(loaded: &Loaded, board: &Board) -> Result<Arc<Context>, Failure> {
    let context = context(loaded, compile(loaded).await?, board.metrics.clone()).await?;
    let findings = preflight::check(&context.server, &context.plan).await?;
    if findings.is_empty() { Ok(context) } else { Err(Failure::Refused(super::plan::refusal(&findings))) }
}

/// Takes the address first: a second daemon on the machine ends here. Serves until the process ends.
async fn serve(loaded: &Loaded) -> Result<Arc<Board>, Failure> {
    let listener = server::bind(loaded.config.http.listen).await?;
    let board = Board::new(&loaded.config.name, Metrics::new()?);
    tokio::spawn(board.clone().watch(CancellationToken::new()));
    tokio::spawn(server::serve(listener, board.clone(), CancellationToken::new()));
    Ok(board)
}

async fn start(loaded: &Loaded, context: Arc<Context>, board: &Board) -> Result<Handle, Failure> {
    let config = &loaded.config;
    let store = Store { database: config.state.database.clone(), deployment: config.name.clone() };
    let handle = pipeline::start(context, store).await?;
    board.attach(handle.context.clone(), handle.progress.clone());
    tracing::info!(rules = config.rules.len(), deployment = %config.name, http = %config.http.listen, "following changes");
    Ok(handle)
}

/// Swaps the rules when the new config is whole and the cluster has what it needs; otherwise the old ones go on.
async fn reload(paths: &[PathBuf], running: Handle, board: &Board) -> Result<Handle, Failure> {
    let loaded = match config::load(paths, &config::process_environment()) {
        Ok(loaded) => loaded,
        Err(error) => return Ok(kept(running, &error.into())),
    };
    match ready(&loaded, board).await {
        Ok(context) => {
            running.stop().await;
            tracing::info!("config reloaded");
            start(&loaded, context, board).await
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
    async fn next(&mut self, paths: &[PathBuf], files: &Option<Vec<String>>, running: &Handle) -> Wake {
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
                    if now.is_some() && now != *files {
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
