//! `denormd run`: stand by, lead, follow changes; and again when the lease is lost or the config changes.

mod partitions;
mod service;
mod signals;

use std::{os::unix::fs::PermissionsExt, path::PathBuf, sync::Arc, time::Duration};

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::{self, Config, Loaded},
    dead_letter::DeadLetters,
    division::divide,
    error::{Error, Kind},
    events::Journal,
    lease::{Held, Lease},
    logging,
    membership::Member,
    metrics::Metrics,
    mongo::{Connection, Server, connect},
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
    server::{self, Guard},
    status::Board,
    suspension,
};
use signals::{Signals, Wake};

/// The exit status of a failure that the cluster is to blame for.
const CLUSTER: i32 = 4;
/// How often a cluster that lacks something is looked at.
const LOOK_AT_CLUSTER: Duration = Duration::from_secs(5);
/// How often a running pipeline is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Loads the config, and tries again for as long as it is wrong.
pub async fn load_patiently(paths: &[PathBuf], environment: &[(String, String)]) -> Loaded {
    let mut said = String::new();
    loop {
        match config::load(paths, environment) {
            Ok(loaded) => return loaded,
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    super::notice(&format!("{text}\nnothing is written; the config is read again until it is right"));
                    said = text;
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP, or a change of a config file, swaps the rules. With `wait` it stays up while the
/// cluster lacks something: it writes nothing, says why, and looks again.
pub async fn run(paths: &[PathBuf], loaded: Loaded, wait: bool) -> Result<(), Failure> {
    let log = logging::start(&loaded.config.log, &loaded.config.name)?;
    let files: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let (version, config) = (env!("DENORMD_VERSION"), files.join(", "));
    tracing::info!(version, config, deployment = %loaded.config.name, listen = %loaded.config.http.listen, "denormd starts");
    warn_of_insecure(&loaded);
    let mut signals = Signals::listen(paths)?;
    signals.watch(files_of(&loaded));
    let (board, guard) = serve(&loaded)?;
    tokio::spawn(service::watchdog(board.clone()));
    // It has started: its address is taken and its config is whole. The cluster may come up later.
    service::say(&[NotifyState::Ready]);
    let context = tokio::select! {
        context = patiently(&loaded, &board, wait) => context?,
        () = signals.stop() => return Ok(()),
    };
    say_cluster(&context.server).await;
    let config = &loaded.config;
    let connection = Connection::from(context.server.unfenced());
    let (database, ttl) = (config.state.database.clone(), config.lease.ttl);
    let (lease, of) = (Lease::new(connection.clone(), &database, &config.name, ttl), config.lease.partitions);
    let member = Member::join(connection.clone(), &database, &config.name, ttl, &context.plan, of);
    board.keep(Journal::new(connection.clone(), &database, &config.name));
    board.reached(context.clone(), ttl);
    board.divided(of);
    let mut rules = Rules { loaded, context, board, guard, member, connection };
    let result = if of > 1 {
        partitions::share(paths, &mut rules, &mut signals).await
    } else {
        take_turns(paths, &mut rules, &lease, &mut signals).await
    };
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
            held = lease.stand_by_while(async || Ok(rules.member.is_outdated().await? || !rules.divide().await?)) => held,
            wake = signals.next() => match wake {
                Wake::Stop => return Ok(()),
                Wake::Reload | Wake::Yield => {
                    rules.reload(paths, signals).await;
                    continue;
                }
            },
        };
        let ended = lead(paths, rules, held, signals).await;
        rules.board.detach();
        let (what, why) = match &ended {
            Ok(Ended::Stopped) => ("stopped", "this instance was stopped"),
            Ok(Ended::Lost) => {
                ("lease_lost", "this instance leads no more: its lease could not be renewed in time, or was taken")
            }
            Ok(Ended::GivenBack(why)) => ("standby", *why),
            Err(_) => ("stopped", "this instance leads no more: it failed"),
        };
        rules.board.happened(what, why);
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
    guard: Arc<Guard>,
    member: Member,
    /// What lasts longer than a config goes by this.
    connection: Connection,
}

/// Files whose change is a change of the config: the connection string's, the token's, and the certificates'.
fn files_of(loaded: &Loaded) -> Vec<PathBuf> {
    let config = &loaded.config;
    let named = [config.mongodb.uri_file.clone(), config.http.token_file.clone()];
    let certificates =
        connect::certificates(&config.mongodb.uri).into_iter().chain(config.http.certificate_files.clone());
    named.into_iter().flatten().chain(certificates).collect()
}

/// Which cluster this is: its name and members, as its primary tells them. The connection string is never logged.
async fn say_cluster(server: &Server) {
    match server.hello().await {
        Ok(hello) => {
            let text = |name: &str| hello.get_str(name).unwrap_or_default().to_owned();
            let hosts = hello.get_array("hosts").map(Vec::as_slice).unwrap_or_default();
            let hosts: Vec<&str> = hosts.iter().filter_map(bson::Bson::as_str).collect();
            tracing::info!(cluster = text("setName"), primary = text("primary"), hosts = hosts.join(", "), "connected");
        }
        Err(error) => tracing::warn!(error = %error.message, "the cluster does not say who it is"),
    }
}

/// What the connection string switches off is said at every start, and in the status.
fn warn_of_insecure(loaded: &Loaded) {
    for option in connect::insecure(&loaded.config.mongodb.uri) {
        tracing::warn!(
            option,
            "INSECURE: the server's certificate is not verified; anybody on the way can read and change the data. Give \
             tlsCAFile instead"
        );
    }
    let config = &loaded.config;
    let secrets = [&config.mongodb.uri_file, &config.http.token_file].into_iter().flatten();
    for file in secrets.chain(&config.http.certificate_files) {
        // A user who may write it chooses the server that denormd trusts, the token, or the key.
        if std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & 0o002 != 0) {
            tracing::warn!(file = %file.display(), "INSECURE: every user of this machine can change this file: chmod o-w");
        }
    }
    if !loaded.config.http.listen.ip().is_loopback() {
        tracing::info!(listen = %loaded.config.http.listen, "the HTTP server can be reached from other machines");
    }
}

/// Takes the address before anything else, and serves until the process ends.
fn serve(loaded: &Loaded) -> Result<(Arc<Board>, Arc<Guard>), Failure> {
    let listener = server::bind(loaded.config.http.listen)?;
    let board = Board::new(&loaded.config.name, Metrics::new()?);
    board.insecure(connect::insecure(&loaded.config.mongodb.uri));
    let guard = Arc::new(Guard::new(None));
    guard.obey(&loaded.config.http);
    tokio::spawn(board.clone().watch(CancellationToken::new()));
    tokio::spawn(server::serve(listener, board.clone(), guard.clone(), CancellationToken::new()));
    Ok((board, guard))
}

/// Everything that can be refused, before anything is started.
async fn ready(loaded: &Loaded, board: &Board) -> Result<Arc<Context>, Failure> {
    let mut context = context(loaded, compile(loaded).await?, board.metrics.clone()).await?;
    let mut findings = preflight::privileges(&context.server, &context.plan, &loaded.config.state.database).await?;
    if findings.is_empty() {
        findings = preflight::check(&context.server, &context.plan).await?;
    }
    if findings.is_empty() {
        return Ok(context);
    }
    let lacking = suspension::sort(&context, findings).await?;
    if !lacking.refused.is_empty() {
        return Err(Failure::Refused(super::plan::refusal(&lacking.refused)));
    }
    for (rule, reason) in &lacking.suspended {
        let rule = &context.plan.rule(*rule).name;
        tracing::error!(rule, reason, "the cluster lacks something that this rule needs: the others go on without it");
    }
    if let Some(context) = Arc::get_mut(&mut context) {
        context.lacking = lacking.suspended;
    }
    Ok(context)
}

/// The same, through everything that passes by itself: a sidecar may be up before its database. With `wait`, through everything
/// that somebody may mend in the cluster as well.
async fn patiently(loaded: &Loaded, board: &Board, wait: bool) -> Result<Arc<Context>, Failure> {
    let mut said = String::new();
    loop {
        let failure = match ready(loaded, board).await {
            Err(failure) => failure,
            context => return context,
        };
        let (error, pause) = match failure {
            Failure::Failed(error) if error.is_transient() => (error, LOOK),
            failure if wait && failure.status() == CLUSTER => {
                (Error::new(Kind::Topology, failure.to_string()), LOOK_AT_CLUSTER)
            }
            failure => return Err(failure),
        };
        board.unreached(&error);
        let text = error.to_string();
        if text != said {
            tracing::warn!(error = %text, "the cluster cannot be used yet; nothing is written, and it is tried again");
            said = text;
        }
        tokio::time::sleep(pause).await;
    }
}

impl Rules {
    /// Divides the deployment into as many partitions as the config says. False while it has leaders of another number.
    async fn divide(&self) -> Result<bool, Error> {
        let Config { name, state, lease, .. } = &self.loaded.config;
        match divide(&self.connection.now(), &state.database, name, lease.partitions, lease.ttl).await {
            // Whoever leads is told, and ends.
            Err(error) if error.kind == Kind::Topology => Ok(true),
            divided => divided,
        }
    }

    /// Takes the new config when it is whole and the cluster has what it needs; otherwise the old one stays in force.
    async fn reload(&mut self, paths: &[PathBuf], signals: &mut Signals) -> bool {
        service::reloading();
        let taken = self.take(paths, signals).await;
        service::say(&[NotifyState::Ready]);
        taken
    }

    async fn take(&mut self, paths: &[PathBuf], signals: &mut Signals) -> bool {
        let result = async {
            let loaded = config::load(paths, &config::process_environment())?;
            let (old, new) = (&self.loaded.config, &loaded.config);
            let lease = |config: &Config| (config.lease.ttl, config.lease.partitions);
            if old.name != new.name || old.state.database != new.state.database || lease(old) != lease(new) {
                let message = "`name`, `state` and `lease` cannot change while the daemon runs";
                return Err(Error::new(Kind::Config, message).hint("restart it with the new config").into());
            }
            let context = ready(&loaded, &self.board).await?;
            Ok::<_, Failure>((loaded, context))
        };
        match result.await {
            Ok((loaded, context)) => {
                self.member.has_plan(&context.plan);
                self.board.reached(context.clone(), loaded.config.lease.ttl);
                (self.loaded, self.context) = (loaded, context);
                self.connection.replace(self.context.server.unfenced());
                self.guard.obey(&self.loaded.config.http);
                self.board.insecure(connect::insecure(&self.loaded.config.mongodb.uri));
                signals.watch(files_of(&self.loaded));
                warn_of_insecure(&self.loaded);
                self.board.metrics.reloaded(true);
                let count = self.loaded.config.rules.len();
                self.board.happened("config_reloaded", &format!("the config was read again: {count} rules"));
                tracing::info!(rules = self.loaded.config.rules.len(), "config reloaded");
                true
            }
            Err(failure) => {
                // What the cluster refuses it may take later: a new password is often in the file before it is set.
                if matches!(failure, Failure::Failed(_)) {
                    signals.try_again();
                }
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
    /// The lease is lost: another instance may lead now.
    Lost,
    /// The lease is given back, and why.
    GivenBack(&'static str),
}

/// Follows changes while the lease lasts.
async fn lead(paths: &[PathBuf], rules: &mut Rules, held: Held, signals: &mut Signals) -> Result<Ended, Failure> {
    let mut new = true;
    loop {
        let context = Arc::new(rules.context.under(held.fence()));
        let started = tokio::select! {
            started = start(&context) => started,
            () = held.lost() => return Ok(Ended::Lost),
            () = signals.stop() => {
                held.release().await;
                return Ok(Ended::Stopped);
            }
        };
        let handle = match started {
            Ok(handle) => handle,
            // It was granted before: a password that is being changed, and the file with the new one comes.
            Err(error) if error.kind == Kind::Privilege => {
                tracing::warn!(error = %error.message, "following changes cannot begin; standing by again");
                held.release().await;
                tokio::time::sleep(LOOK).await;
                return Ok(Ended::GivenBack("this instance cannot lead: it lacks a privilege"));
            }
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
                    Wake::Reload if !rules.reload(paths, signals).await => {}
                    wake => break wake,
                },
            }
        };
        if wake == Wake::Stop {
            service::say(&[NotifyState::Stopping]);
        }
        tracing::info!("stopping: what is in flight is finished, then the position is saved");
        let mut wake = wake;
        let mut stopping = std::pin::pin!(handle.stop());
        loop {
            tokio::select! {
                () = &mut stopping => break,
                // What is in flight ends by its deadlines.
                () = held.lost() => return Ok(if wake == Wake::Stop { Ended::Stopped } else { Ended::Lost }),
                () = signals.stop() => match wake {
                    Wake::Stop => return Err(Error::internal("stopped at once by a second signal").into()),
                    // The first one, which came while the rules were being swapped.
                    Wake::Reload | Wake::Yield => wake = Wake::Stop,
                },
            }
        }
        let ended = match wake {
            Wake::Stop => Ended::Stopped,
            Wake::Yield => Ended::GivenBack("handed over to an instance with newer rules"),
            Wake::Reload => continue,
        };
        held.release().await;
        return Ok(ended);
    }
}

/// Opens the state and starts the pipeline, through everything that passes by itself.
pub(super) async fn start(context: &Arc<Context>) -> Result<Handle, Error> {
    let DeadLetters { database, deployment, .. } = &context.dead_letters;
    loop {
        let attempt = async {
            let store = Store::open_partition(&context.server, database, deployment, context.partition).await?;
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

pub(super) async fn finished(handle: &Handle) {
    while !handle.is_finished() {
        tokio::time::sleep(LOOK).await;
    }
}
