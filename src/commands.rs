//! The commands, one file each, and what they share: loading the config and connecting.

pub mod advise;
pub mod backfill;
pub mod events;
pub mod health;
pub mod init;
pub mod plan;
pub mod progress;
pub mod prune;
pub mod run;
pub mod runbook;
pub mod status;
pub mod wait;

use std::{io::Write, process::ExitCode, sync::Arc};

use crate::{
    cli::{Cli, Command},
    config::{self, ConfigError, Loaded},
    dead_letter::DeadLetters,
    error::{Error, Kind},
    metrics::Metrics,
    mongo::{Server, connect},
    plan::Plan,
    reconcile::Context,
};

/// Why a command did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The config is wrong. Exit status 2.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The cluster is not what the rules need. Exit status 2.
    #[error("{0}")]
    Refused(String),
    /// Something failed while it ran. Exit status 1, or 2 where the config is to blame.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl Failure {
    /// The exit status that tells it.
    #[must_use]
    pub fn status(&self) -> ExitCode {
        match self {
            Self::Config(_) | Self::Refused(_) => ExitCode::from(2),
            Self::Failed(error) => match error.kind {
                Kind::Config | Kind::Topology => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            },
        }
    }
}

/// Does what the command line says.
pub async fn dispatch(cli: &Cli) -> Result<(), Failure> {
    let environment = config::process_environment();
    match &cli.command {
        Command::Advise(survey) => return advise::advise(&cli.config, cli.output, survey).await,
        Command::Init { to, survey } => return init::init(&cli.config, to.as_deref(), survey).await,
        Command::Health { address, live } => {
            let listen = || health::address(config::load(&cli.config, &environment).ok().as_ref(), &environment);
            let address = address.map_or_else(listen, Ok)?;
            return health::health(cli.output, address, *live).await;
        }
        _ => {}
    }
    let loaded = config::load(&cli.config, &environment)?;
    match &cli.command {
        // They need no config file, see above.
        Command::Advise(_) | Command::Init { .. } | Command::Health { .. } => Ok(()),
        Command::Run => run::run(&cli.config, loaded).await,
        Command::Plan { offline, apply } => plan::plan(&loaded, cli.output, *offline, *apply).await,
        Command::Backfill { rule, no_wait } => backfill::backfill(&loaded, rule, *no_wait).await,
        Command::Release { rule } => backfill::release(&loaded, rule).await,
        Command::Prune { rule, dry_run } => prune::prune(&loaded, cli.output, rule, *dry_run).await,
        Command::Status { address } => status::status(&loaded, cli.output, *address).await,
        Command::Events { since } => events::events(&loaded, cli.output, *since).await,
        Command::Runbook { alert, address } => runbook::runbook(&loaded, cli.output, alert.as_deref(), *address).await,
        Command::Wait { address, operation_time, timeout } => {
            wait::wait(&loaded, cli.output, *address, operation_time.as_deref(), *timeout).await
        }
    }
}

/// Writes to standard output.
pub fn print(text: &str) {
    // A reader that closed the pipe has read enough.
    std::io::stdout().write_all(text.as_bytes()).ok();
}

/// Compiles the rules; mistakes come with their places.
pub async fn compile(loaded: &Loaded) -> Result<Plan, Failure> {
    let database = connect::default_database(&loaded.config.mongodb.uri).await;
    crate::plan::compile(&loaded.config, database.as_deref()).map_err(|mistakes| loaded.report(&mistakes).into())
}

/// Connects, and gathers what every stage needs.
pub async fn context(loaded: &Loaded, plan: Plan, metrics: Arc<Metrics>) -> Result<Arc<Context>, Failure> {
    let config = &loaded.config;
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    let dead_letters = DeadLetters { database: config.state.database.clone(), deployment: config.name.clone() };
    Ok(Arc::new(Context::new(server, plan, config.limits.clone(), dead_letters, metrics)))
}
