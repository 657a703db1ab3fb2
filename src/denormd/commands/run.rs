//! `denormd run`: stands by, leads and follows changes, and starts over when the lease is lost or the config changes.

#[cfg_attr(not(unix), path = "run/no_service.rs")]
mod service;
pub mod signals;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::{
    commands::{Failure, compile, context},
    logging,
    server::{self, Guard},
    status::Board,
};
use denormd_engine::{
    deployment::{identity::Identity, instances::Member},
    events::Journal,
    leadership::{Deployment, Ended, Event, Share},
    metrics::Metrics,
    pipeline::Handle,
    preflight,
    reconcile::Context,
    unavailable,
};
use denormd_model::{partition::Partition, text::counted};
use denormd_mongo::{
    Connection, Server, connect,
    error::{Error, Kind},
    primary::is_router,
};
use denormd_rules::config::{self, Config, Loaded};
use signals::{Signals, Wake};

/// The exit status if the cluster lacks something.
const CLUSTER: i32 = 4;
/// Interval between checks of a cluster that lacks something.
const CLUSTER_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between checks of a running pipeline.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Waits until the config is valid, and then runs the daemon ([`run`]). SIGTERM and SIGINT also end the wait: the kernel does not
/// deliver signals without a handler to the first process of a container.
pub async fn run_patiently(paths: &[PathBuf], environment: &[(String, String)]) -> Result<(), Failure> {
    let mut signals = Signals::listen(paths)?;
    let mut said = String::new();
    let loaded = loop {
        match config::load(paths, environment) {
            Ok(loaded) => break loaded,
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    super::notice(&format!("{text}\nnothing is written; the config is read again until it is right"));
                    said = text;
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = signals.stop() => return Ok(()),
        }
        // A change from now on causes a reload.
        signals.loaded();
    };
    run(paths, loaded, true, signals).await
}

/// Runs the daemon until SIGTERM or SIGINT. SIGHUP, or a change of a config file, replaces the rules. With `wait`, it
/// keeps running while the cluster lacks something: it writes nothing, reports the reason, and tries again.
pub async fn run(paths: &[PathBuf], loaded: Loaded, wait: bool, signals: Signals) -> Result<(), Failure> {
    let log = logging::start(&loaded.config.log, &loaded.config.name)?;
    let result = until_stopped(paths, loaded, wait, Identity::of_this_process(), signals).await;
    log.end().await;
    result
}

/// Runs the daemon as this instance until `signals` requests a stop; the caller has started the log. The HTTP server and the
/// watchdog stop when this returns. Open HTTP connections may outlive it.
pub async fn until_stopped(
    paths: &[PathBuf],
    loaded: Loaded,
    wait: bool,
    instance: Identity,
    mut signals: Signals,
) -> Result<(), Failure> {
    let files: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let (version, config) = (env!("DENORMD_VERSION"), files.join(", "));
    tracing::info!(version, config, deployment = %loaded.config.name, listen = %loaded.config.http.listen, "denormd starts");
    warn_of_insecure(&loaded);
    signals.watch(files_of(&loaded));
    let ended = CancellationToken::new();
    let _ended = ended.clone().drop_guard();
    let (board, guard) = serve(&loaded, &instance, &ended)?;
    // Startup is complete: the address is bound and the config is valid. The cluster may become available later.
    service::ready();
    let Some((loaded, context)) = reach(paths, loaded, (&board, &guard), wait, &mut signals).await? else {
        return Ok(());
    };
    say_cluster(&context.server).await;
    let config = &loaded.config;
    let connection = Connection::from(context.server.unfenced());
    let (name, database) = (config.name.clone(), config.state.database.clone());
    let (ttl, partitions) = (config.lease.ttl, config.lease.partitions);
    let member = Member::join(connection.clone(), &database, &name, &instance, ttl, &context.plan, partitions);
    board.keep(Journal::new(connection.clone(), &database, &name));
    board.divided(partitions);
    board.reached(context.clone(), ttl);
    let deployment =
        Deployment { connection: connection.clone(), database, name, ttl, partitions, instance, member: Some(member) };
    let shown = board.clone();
    let mut share = Share::new(deployment, context.clone(), move |handle, first| follows(&shown, handle, first));
    let mut rules = Rules { loaded, context, board, guard, connection, refused: None };
    let result = lead(paths, &mut rules, &mut share, &mut signals).await;
    rules.board.close().await;
    share.leave().await;
    tracing::info!("stopped");
    Ok(result?)
}

/// Leads its share of the partitions until it receives a stop signal, then hands them over.
async fn lead(paths: &[PathBuf], rules: &mut Rules, share: &mut Share, signals: &mut Signals) -> Result<(), Error> {
    tracing::info!(deployment = %rules.loaded.config.name, "standing by");
    let result = follow(paths, rules, share, signals).await;
    service::stopping();
    tracing::info!("stopping: what is in flight is finished, then the checkpoints are saved");
    share.hand_over();
    loop {
        tokio::select! {
            ended = share.ended() => match ended.transpose()? {
                Some((partition, ended)) => rules.over(partition, &ended, result.is_ok()),
                None => return result,
            },
            () = signals.stop() => return Err(Error::internal("stopped at once by a second signal")),
        }
    }
}

async fn follow(paths: &[PathBuf], rules: &mut Rules, share: &mut Share, signals: &mut Signals) -> Result<(), Error> {
    loop {
        tokio::select! {
            event = share.next() => match event? {
                Event::Free(free) => share.act(free),
                Event::Ended(partition, ended) => {
                    rules.over(partition, &ended, false);
                    ended?;
                }
            },
            wake = signals.next() => match wake {
                Wake::Stop => return Ok(()),
                Wake::Reload => match rules.reload(paths, signals).await {
                    Reload::Taken => share.replace(rules.context.clone()),
                    Reload::Refused => {}
                    Reload::Stopped => return Ok(()),
                },
            },
        }
    }
}

/// Reports a pipeline that has started.
fn follows(board: &Board, handle: &Handle, first: bool) {
    let Context { partition, server, plan, .. } = &*handle.context;
    let (place, term) = (part_of(*partition), server.term());
    board.attach(handle.context.clone());
    if first {
        board.happened("leader", &format!("this instance leads{place}, term {term}"));
    }
    let partition = (partition.of() > 1).then(|| partition.place());
    tracing::info!(term, rules = plan.rules.len(), partition, "following changes");
}

/// ` partition 2 of 4`; nothing if the deployment is not divided.
fn part_of(partition: Partition) -> String {
    if partition.of() > 1 { format!(" partition {} of {}", partition.place(), partition.of()) } else { String::new() }
}

/// A valid config and its context, on a cluster that has everything it needs.
struct Rules {
    loaded: Loaded,
    context: Arc<Context>,
    board: Arc<Board>,
    guard: Arc<Guard>,
    /// The connection for components that outlive a config.
    connection: Connection,
    /// The reason why the config that was read last is refused.
    refused: Option<String>,
}

/// The result of reading the config again.
enum Reload {
    Taken,
    Refused,
    /// A signal to stop came meanwhile.
    Stopped,
}

/// The files whose changes count as changes of the config: those with the connection string, the token and the
/// certificates.
fn files_of(loaded: &Loaded) -> Vec<PathBuf> {
    let config = &loaded.config;
    let named = [config.mongodb.uri_file.clone(), config.http.token_file.clone()];
    let certificates =
        connect::certificates(&config.mongodb.uri).into_iter().chain(config.http.certificate_files.clone());
    named.into_iter().flatten().chain(certificates).collect()
}

/// Logs the cluster's name and members, as the primary reports them. The connection string is never logged.
async fn say_cluster(server: &Server) {
    match server.hello().await {
        Ok(hello) if is_router(&hello) => {
            tracing::warn!("EXPERIMENTAL: this is a sharded cluster, on which denormd has never run");
        }
        Ok(hello) => {
            let text = |name: &str| hello.get_str(name).unwrap_or_default().to_owned();
            let hosts = hello.get_array("hosts").map(Vec::as_slice).unwrap_or_default();
            let hosts: Vec<&str> = hosts.iter().filter_map(bson::Bson::as_str).collect();
            tracing::info!(cluster = text("setName"), primary = text("primary"), hosts = hosts.join(", "), "connected");
        }
        Err(error) => tracing::warn!(error = %error.message, "the name and the members of the cluster cannot be read"),
    }
}

/// Warns at every start about security that the connection string or file permissions disable.
fn warn_of_insecure(loaded: &Loaded) {
    for option in connect::insecure(&loaded.config.mongodb.uri) {
        tracing::warn!(
            option,
            "INSECURE: the server's certificate is not verified; anyone on the network path to MongoDB can read and change the data. Give \
             tlsCAFile instead"
        );
    }
    let config = &loaded.config;
    let secrets = [&config.mongodb.uri_file, &config.http.token_file].into_iter().flatten();
    for file in secrets.chain(&config.http.certificate_files) {
        // Anybody who can write the file controls the server that denormd trusts, the token, or the key.
        if is_writable_by_all(file) {
            tracing::warn!(file = %file.display(), "INSECURE: every user of this machine can change this file: chmod o-w");
        }
    }
    if !loaded.config.http.listen.ip().is_loopback() {
        tracing::info!(listen = %loaded.config.http.listen, "the HTTP server can be reached from other machines");
    }
}

#[cfg(unix)]
fn is_writable_by_all(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & 0o002 != 0)
}

#[cfg(not(unix))]
fn is_writable_by_all(_file: &Path) -> bool {
    false
}

/// Binds the address before anything else, and serves until `ended`.
fn serve(loaded: &Loaded, instance: &Identity, ended: &CancellationToken) -> Result<(Arc<Board>, Arc<Guard>), Failure> {
    let listener = server::bind(loaded.config.http.listen)?;
    let board = Board::new(&loaded.config.name, instance, Metrics::new()?);
    board.insecure(connect::insecure(&loaded.config.mongodb.uri));
    let guard = Arc::new(Guard::default());
    guard.obey(&loaded.config.http);
    tokio::spawn(board.clone().watch(ended.clone()));
    tokio::spawn(server::serve(listener, board.clone(), guard.clone(), ended.clone()));
    tokio::spawn(ended.clone().run_until_cancelled_owned(service::watchdog(board.clone())));
    Ok((board, guard))
}

/// Runs all checks that can refuse the config, before anything is started.
async fn ready(loaded: &Loaded, board: &Board) -> Result<Arc<Context>, Failure> {
    let mut context = context(loaded, compile(loaded).await?, board.metrics.clone()).await?;
    let findings = preflight::all(&context.server, &context.plan, &loaded.config.state.database).await?;
    if findings.is_empty() {
        return Ok(context);
    }
    let lacking = unavailable::sort(&context, findings).await?;
    if !lacking.refused.is_empty() {
        return Err(Failure::Refused(super::plan::refusal(&lacking.refused)));
    }
    for (rule, reason) in &lacking.unavailable {
        let rule = &context.plan.rule(*rule).name;
        tracing::error!(rule, reason, "the cluster lacks something that this rule needs: the others go on without it");
    }
    if let Some(context) = Arc::get_mut(&mut context) {
        context.lacking = lacking.unavailable;
    }
    Ok(context)
}

/// Like [`ready`], retrying after every temporary failure: a sidecar may start before its database. With `wait`, also
/// retries after failures that an operator can fix in the cluster.
async fn patiently(loaded: &Loaded, board: &Board, wait: bool) -> Result<Arc<Context>, Failure> {
    let mut said = String::new();
    loop {
        let failure = match ready(loaded, board).await {
            Err(failure) => failure,
            context => return context,
        };
        let (error, pause) = match failure {
            Failure::Failed(error) if error.is_transient() => (error, POLL_INTERVAL),
            failure if wait && failure.status() == CLUSTER => {
                (Error::new(Kind::Topology, failure.to_string()), CLUSTER_POLL_INTERVAL)
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

/// Waits until the cluster can be used. The cause may be in the config, such as a wrong password or host name, so a changed
/// config replaces it meanwhile, unless it has mistakes. None after a signal to stop.
async fn reach(
    paths: &[PathBuf],
    mut loaded: Loaded,
    (board, guard): (&Board, &Guard),
    wait: bool,
    signals: &mut Signals,
) -> Result<Option<(Loaded, Arc<Context>)>, Failure> {
    let mut refused = None;
    loop {
        tokio::select! {
            context = patiently(&loaded, board, wait) => return Ok(Some((loaded, context?))),
            wake = signals.next() => if wake == Wake::Stop {
                return Ok(None);
            },
        }
        service::reloading();
        let changed = async {
            let changed = load_again(paths, &loaded.config)?;
            compile(&changed).await?;
            Ok::<_, Failure>(changed)
        };
        let result = tokio::select! {
            result = changed => result,
            () = signals.stop() => return Ok(None),
        };
        match result {
            Ok(changed) => {
                take_settings(&changed, (board, guard), signals);
                (loaded, refused) = (changed, None);
            }
            Err(failure) => refuse(board, signals, &mut refused, &failure),
        }
        service::ready();
    }
}

/// Loads the config again. Fails if `old` cannot be replaced without a restart.
fn load_again(paths: &[PathBuf], old: &Config) -> Result<Loaded, Failure> {
    let loaded = config::load(paths, &config::process_environment())?;
    if demands_restart(old, &loaded.config) {
        let message = "`name`, `state` and `lease` cannot change while the daemon runs";
        return Err(Error::new(Kind::Config, message).hint("restart it with the new config").into());
    }
    Ok(loaded)
}

/// Applies the settings of a reloaded config, except its rules.
fn take_settings(loaded: &Loaded, (board, guard): (&Board, &Guard), signals: &mut Signals) {
    guard.obey(&loaded.config.http);
    board.insecure(connect::insecure(&loaded.config.mongodb.uri));
    signals.watch(files_of(loaded));
    warn_of_insecure(loaded);
    board.metrics.reloaded(true);
    let count = counted(loaded.config.rules.len() as u64, "rule");
    // The board logs it.
    board.happened("config_reloaded", &format!("config reloaded: {count}"));
}

/// Reports why a reloaded config is refused, unless the last attempt failed for the same reason, which is in `refused`. The config
/// is tried again.
fn refuse(board: &Board, signals: &mut Signals, refused: &mut Option<String>, failure: &Failure) {
    // The cluster may accept later what it refuses now: after `plan --apply`, or when a new password is set.
    signals.try_again();
    let text = failure.to_string();
    if signals.is_repeated() && refused.as_ref() == Some(&text) {
        return;
    }
    board.metrics.reloaded(false);
    // The first line contains the place and the mistake; the others quote the file.
    let reason = text.lines().next().unwrap_or_default().to_owned();
    board.metrics.record_error(None, "read the config again", &Error::new(Kind::Config, &reason));
    board.happened("config_refused", &format!("the new config is refused: {reason}"));
    tracing::error!(reason = %text, "the new config is refused; the old rules stay in force, and it is tried again");
    *refused = Some(text);
}

/// True if a running daemon refuses the new config until it is restarted.
#[must_use]
pub fn demands_restart(old: &Config, new: &Config) -> bool {
    let lease = |config: &Config| (config.lease.ttl, config.lease.partitions);
    old.name != new.name || old.state.database != new.state.database || lease(old) != lease(new)
}

impl Rules {
    /// Reports the end of a leadership.
    fn over(&self, partition: Partition, ended: &Result<Ended, Error>, stops: bool) {
        self.board.detach(partition);
        match ended {
            Ok(Ended::HandedOver | Ended::Lost) => {}
            Ok(Ended::Unfit(error)) => {
                tracing::warn!(error = %error.message, "following changes cannot begin; standing by again");
                self.board.metrics.record_error(None, "begin to lead", error);
            }
            Err(error) => tracing::error!(error = %error.message, "this instance failed to lead"),
        }
        let (what, why) = match ended {
            _ if partition.of() > 1 => ("standby", &*format!("this instance no longer leads{}", part_of(partition))),
            Ok(Ended::HandedOver) if stops => ("stopped", "this instance was stopped"),
            Ok(Ended::HandedOver) => ("standby", "handed over to an instance with newer rules"),
            Ok(Ended::Lost) => (
                "lease_lost",
                "this instance no longer leads: its lease could not be renewed in time, or another took it",
            ),
            Ok(Ended::Unfit(_)) => ("standby", "this instance cannot lead: it lacks a privilege"),
            Err(_) => ("stopped", "this instance no longer leads: it failed"),
        };
        self.board.happened(what, why);
    }

    /// Applies the new config if it is valid and the cluster has everything it needs. Otherwise the old one stays in
    /// force.
    async fn reload(&mut self, paths: &[PathBuf], signals: &mut Signals) -> Reload {
        service::reloading();
        let result = self.take(paths, signals).await;
        service::ready();
        result
    }

    async fn take(&mut self, paths: &[PathBuf], signals: &mut Signals) -> Reload {
        let result = async {
            let loaded = load_again(paths, &self.loaded.config)?;
            let context = ready(&loaded, &self.board).await?;
            Ok::<_, Failure>((loaded, context))
        };
        let result = tokio::select! {
            result = result => result,
            () = signals.stop() => return Reload::Stopped,
        };
        match result {
            Ok((loaded, context)) => {
                self.board.reached(context.clone(), loaded.config.lease.ttl);
                (self.loaded, self.context, self.refused) = (loaded, context, None);
                self.connection.replace(self.context.server.unfenced());
                take_settings(&self.loaded, (&self.board, &self.guard), signals);
                Reload::Taken
            }
            Err(failure) => {
                refuse(&self.board, signals, &mut self.refused, &failure);
                Reload::Refused
            }
        }
    }
}
