//! `denormd run`: stand by, lead, follow changes; and again when the lease is lost or the config changes.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::{self, Loaded},
    error::{Error, Kind},
    events::Journal,
    lease::{Held, Lease},
    logging,
    membership::Member,
    metrics::Metrics,
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
    server,
    status::{Board, Role},
};

/// How often a running pipeline and the config files are looked at. A ConfigMap is swapped by a symlink, which file
/// notifications miss.
const LOOK: Duration = Duration::from_secs(1);

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP, or a change of a config file, swaps the rules.
pub async fn run(paths: &[PathBuf], loaded: Loaded) -> Result<(), Failure> {
    let log = logging::start(&loaded.config.log, &loaded.config.name)?;
    let mut signals = Signals::listen(paths)?;
    let board = serve(&loaded).await?;
    let context = tokio::select! {
        context = patiently(&loaded, &board) => context?,
        () = signals.stop() => return Ok(()),
    };
    let config = &loaded.config;
    let (server, database, ttl) = (context.server.unfenced(), config.state.database.clone(), config.lease.ttl);
    let lease = Lease::new(server, &database, &config.name, ttl);
    let member = Member::join(context.server.unfenced(), &database, &config.name, ttl, &context.plan);
    board.keep(Journal::new(context.server.unfenced(), &database, &config.name));
    let mut rules = Rules { loaded, context, board, member };
    let result = take_turns(paths, &mut rules, &lease, &mut signals).await;
    rules.board.close().await;
    log.end().await;
    rules.member.leave().await;
    tracing::info!("stopped");
    result
}

/// Stands by and leads in turns, until it is told to stop.
async fn take_turns(paths: &[PathBuf], rules: &mut Rules, lease: &Lease, signals: &mut Signals) -> Result<(), Failure> {
    loop {
        tracing::info!(deployment = %rules.loaded.config.name, "standing by");
        let held = tokio::select! {
            held = lease.stand_by_while(async || rules.member.is_outdated().await) => held,
            wake = signals.next() => match wake {
                Wake::Stop => return Ok(()),
                Wake::Reload | Wake::Yield => {
                    rules.reload(paths).await;
                    continue;
                }
            },
        };
        let ended = lead(paths, rules, held, signals).await;
        rules.board.detach(Role::Standby);
        let why = match &ended {
            Ok(Ended::Stopped) => "this instance leads no more: it was stopped",
            Ok(Ended::Lost) => "this instance leads no more: its lease is lost, or another instance has newer rules",
            Err(_) => "this instance leads no more: it failed",
        };
        rules.board.happened("standby", why);
        if ended? == Ended::Stopped {
            return Ok(());
        }
    }
}

/// A config that is whole, with a cluster that has what it needs.
struct Rules {
    loaded: Loaded,
    context: Arc<Context>,
    board: Arc<Board>,
    member: Member,
}

/// Takes the address before anything else, and serves until the process ends.
async fn serve(loaded: &Loaded) -> Result<Arc<Board>, Failure> {
    let listener = server::bind(loaded.config.http.listen).await?;
    let board = Board::new(&loaded.config.name, Metrics::new()?);
    tokio::spawn(board.clone().watch(CancellationToken::new()));
    tokio::spawn(server::serve(listener, board.clone(), CancellationToken::new()));
    Ok(board)
}

/// Everything that can be refused, before anything is started.
async fn ready(loaded: &Loaded, board: &Board) -> Result<Arc<Context>, Failure> {
    let context = context(loaded, compile(loaded).await?, board.metrics.clone()).await?;
    let findings = preflight::check(&context.server, &context.plan).await?;
    if findings.is_empty() { Ok(context) } else { Err(Failure::Refused(super::plan::refusal(&findings))) }
}

/// The same, through everything that passes by itself: a sidecar may be up before its database.
async fn patiently(loaded: &Loaded, board: &Board) -> Result<Arc<Context>, Failure> {
    loop {
        match ready(loaded, board).await {
            Err(Failure::Failed(error)) if error.is_transient() => {
                tracing::warn!(error = %error, "the cluster cannot be reached yet; trying again");
                tokio::time::sleep(LOOK).await;
            }
            result => return result,
        }
    }
}

impl Rules {
    /// Takes the new config when it is whole and the cluster has what it needs; otherwise the old one stays in force.
    async fn reload(&mut self, paths: &[PathBuf]) -> bool {
        let result = async {
            let loaded = config::load(paths, &config::process_environment())?;
            let (old, new) = (&self.loaded.config, &loaded.config);
            if old.name != new.name || old.state.database != new.state.database || old.lease.ttl != new.lease.ttl {
                let message = "`name`, `state` and `lease` cannot change while the daemon runs";
                return Err(Error::new(Kind::Config, message).hint("restart it with the new config").into());
            }
            let context = ready(&loaded, &self.board).await?;
            Ok::<_, Failure>((loaded, context))
        };
        match result.await {
            Ok((loaded, context)) => {
                self.member.has_plan(&context.plan);
                (self.loaded, self.context) = (loaded, context);
                self.board.metrics.reloaded(true);
                let count = self.loaded.config.rules.len();
                self.board.happened("config_reloaded", &format!("the config was read again: {count} rules"));
                tracing::info!(rules = self.loaded.config.rules.len(), "config reloaded");
                true
            }
            Err(failure) => {
                self.board.metrics.reloaded(false);
                // The first line has the place and the mistake; what follows quotes the file.
                let reason = failure.to_string().lines().next().unwrap_or_default().to_owned();
                self.board.metrics.trouble(None, "read the config again", &Error::new(Kind::Config, &reason));
                self.board.happened("config_refused", &format!("the new config is refused: {reason}"));
                tracing::error!(reason = %failure, "the new config is refused; the old rules stay in force");
                false
            }
        }
    }
}

/// How a leadership ended.
#[derive(Debug, PartialEq)]
enum Ended {
    /// By a signal: everything is saved and the lease is given back.
    Stopped,
    /// Another instance may lead now.
    Lost,
}

/// Follows changes while the lease lasts.
async fn lead(paths: &[PathBuf], rules: &mut Rules, held: Held, signals: &mut Signals) -> Result<Ended, Failure> {
    let mut new = true;
    loop {
        let context = Arc::new(rules.context.under(held.fence()));
        let started = tokio::select! {
            started = start(&rules.loaded, &context) => started,
            () = held.lost() => return Ok(Ended::Lost),
            () = signals.stop() => {
                held.release().await;
                return Ok(Ended::Stopped);
            }
        };
        let handle = match started {
            Ok(handle) => handle,
            Err(error) => {
                held.release().await;
                return Err(error.into());
            }
        };
        rules.board.attach(handle.context.clone(), handle.progress.clone());
        if std::mem::take(&mut new) {
            rules.board.happened("leader", &format!("this instance leads, term {}", held.term()));
        }
        tracing::info!(term = held.term(), rules = rules.loaded.config.rules.len(), "following changes");
        let wake = loop {
            tokio::select! {
                () = held.lost() => {
                    handle.abort();
                    return Ok(Ended::Lost);
                }
                () = outdated(&rules.member) => {
                    tracing::info!("an instance with newer rules is there: handing over to it");
                    break Wake::Yield;
                }
                // The lease runs out by itself: what was in flight when the pipeline broke may still be written until then.
                () = finished(&handle) => return Err(Error::internal("the pipeline has ended by itself").into()),
                wake = signals.next() => match wake {
                    Wake::Reload if !rules.reload(paths).await => {}
                    wake => break wake,
                },
            }
        };
        tracing::info!("stopping: what is in flight is finished, then the position is saved");
        tokio::select! {
            () = handle.stop() => {}
            // What is in flight ends by its deadlines.
            () = held.lost() => return Ok(if wake == Wake::Stop { Ended::Stopped } else { Ended::Lost }),
            () = signals.stop() => return Err(Error::internal("stopped at once by a second signal").into()),
        }
        let ended = match wake {
            Wake::Stop => Ended::Stopped,
            Wake::Yield => Ended::Lost,
            Wake::Reload => continue,
        };
        held.release().await;
        return Ok(ended);
    }
}

/// Opens the state and starts the pipeline, through everything that passes by itself.
async fn start(loaded: &Loaded, context: &Arc<Context>) -> Result<Handle, Error> {
    let config = &loaded.config;
    loop {
        let attempt = async {
            let store = Store::open(&context.server, &config.state.database, &config.name).await?;
            pipeline::start(context.clone(), store).await
        };
        match attempt.await {
            Err(error) if error.is_transient() => {
                tracing::warn!(error = %error.message, "following changes cannot begin yet; trying again");
                tokio::time::sleep(LOOK / 2).await;
            }
            result => return result,
        }
    }
}

/// Waits until an instance with newer rules is there.
async fn outdated(member: &Member) {
    loop {
        tokio::time::sleep(LOOK).await;
        // Who cannot be asked is not there.
        if member.is_outdated().await.unwrap_or_default() {
            return;
        }
    }
}

async fn finished(handle: &Handle) {
    while !handle.is_finished() {
        tokio::time::sleep(LOOK).await;
    }
}

/// What asks the daemon to do something else.
#[derive(Debug, PartialEq)]
enum Wake {
    Stop,
    Reload,
    /// An instance with newer rules is there. No signal says so.
    Yield,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    paths: Vec<PathBuf>,
    /// The config files as they were last loaded, or refused.
    files: Option<Vec<String>>,
}

impl Signals {
    fn listen(paths: &[PathBuf]) -> Result<Self, Error> {
        let listen =
            |kind| signal(kind).map_err(|error| Error::internal(format!("signals cannot be handled: {error}")));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
            files: config::snapshot(paths),
            paths: paths.to_vec(),
        })
    }

    /// Waits for something to do.
    async fn next(&mut self) -> Wake {
        let mut look = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return Wake::Stop,
                _ = self.interrupt.recv() => return Wake::Stop,
                _ = self.hangup.recv() => {
                    self.files = config::snapshot(&self.paths);
                    return Wake::Reload;
                }
                _ = look.tick() => {
                    let now = config::snapshot(&self.paths);
                    if now.is_some() && now != self.files {
                        self.files = now;
                        return Wake::Reload;
                    }
                }
            }
        }
    }

    /// Waits for a signal to stop.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
