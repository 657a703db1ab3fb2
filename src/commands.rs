//! The commands, one file each, and what they share: loading the config and connecting.

pub mod about;
pub mod advise;
pub mod backfill;
pub mod check;
pub mod dead_letters;
pub mod events;
pub mod explain;
pub mod health;
pub mod init;
pub mod leader;
pub mod pause;
pub mod plan;
pub mod progress;
pub mod prune;
pub mod role;
pub mod run;
pub mod runbook;
pub mod status;
pub mod support_bundle;
pub mod test;
pub mod wait;

use std::{io::Write, sync::Arc};

use crate::{
    checkpoint::store::{Backfill, RuleState},
    cli::{Cli, Command},
    config::{self, ConfigError, Loaded},
    dead_letter::DeadLetters,
    error::{Error, Kind},
    metrics::Metrics,
    mongo::{Server, connect},
    partition::Partition,
    plan::{Plan, Rule},
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
    /// `check` has found differences. Exit status 3.
    #[error("{0}")]
    Differs(String),
    /// Cases of `test` do not come out as they should. Exit status 1.
    #[error("{}", if *.0 == 1 { "one case failed".to_owned() } else { format!("{} cases failed", .0) })]
    TestsFailed(usize),
    /// Something failed while it ran. Exit status 1, or 2 where the config is to blame.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl Failure {
    /// The exit status that tells it.
    #[must_use]
    pub fn status(&self) -> i32 {
        match self {
            Self::Config(_) | Self::Refused(_) => 2,
            Self::Differs(_) => 3,
            Self::TestsFailed(_) => 1,
            Self::Failed(error) => match error.kind {
                Kind::Config | Kind::Topology => 2,
                _ => 1,
            },
        }
    }
}

/// Does what the command line says.
pub async fn dispatch(cli: &Cli) -> Result<(), Failure> {
    let environment = config::process_environment();
    match &cli.command {
        // These need no config.
        Command::Schema { reference } => {
            about::schema(*reference);
            return Ok(());
        }
        Command::Completions { shell } => {
            about::completions(*shell);
            return Ok(());
        }
        Command::Man { out } => return about::man(out.as_deref()),
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
        Command::Advise(_)
        | Command::Init { .. }
        | Command::Health { .. }
        | Command::Schema { .. }
        | Command::Completions { .. }
        | Command::Man { .. } => Ok(()),
        Command::Run => run::run(&cli.config, loaded).await,
        Command::Plan { offline, apply, sample } => {
            let options = plan::Options { offline: *offline, apply: *apply, sample: *sample };
            plan::plan(&loaded, cli.output, options).await
        }
        Command::Config => {
            about::config(&loaded, cli.output);
            Ok(())
        }
        Command::Role { name, with_apply } => role::role(&loaded, cli.output, name, *with_apply).await,
        Command::Backfill { rule, no_wait } => backfill::backfill(&loaded, cli.output, rule, *no_wait).await,
        Command::Release { rule } => backfill::release(&loaded, cli.output, rule).await,
        Command::Prune { rule, dry_run } => prune::prune(&loaded, cli.output, rule, *dry_run).await,
        Command::Status { address } => status::status(&loaded, cli.output, *address).await,
        Command::Events { since } => events::events(&loaded, cli.output, *since).await,
        Command::Runbook { alert, address } => runbook::runbook(&loaded, cli.output, alert.as_deref(), *address).await,
        Command::Wait { address, operation_time, timeout } => {
            wait::wait(&loaded, cli.output, *address, operation_time.as_deref(), *timeout).await
        }
        Command::Check(options) => check::check(&loaded, cli.output, options).await,
        Command::Pause { rule, time } => pause::pause(&loaded, cli.output, rule, *time).await,
        Command::Resume { rule } => pause::resume(&loaded, cli.output, rule).await,
        Command::Explain { rule, id } => explain::explain(&loaded, cli.output, rule, id).await,
        Command::SupportBundle { to, address } => {
            support_bundle::support_bundle(&loaded, to.as_deref(), *address).await
        }
        Command::Test { files, uri } => test::test(&loaded, cli.output, files, uri.as_deref()).await,
        Command::DeadLetters(action) => dead_letters::dead_letters(&loaded, cli.output, action).await,
    }
}

/// Writes to standard output.
pub fn print(text: &str) {
    // A reader that closed the pipe has read enough.
    std::io::stdout().write_all(text.as_bytes()).ok();
}

/// Tells the user something beside the results: on standard error, so that standard output keeps what programs read.
pub fn notice(text: &str) {
    // Whoever closed standard error has seen enough.
    writeln!(std::io::stderr(), "{text}").ok();
}

/// A value as one types it: relaxed Extended JSON on one line.
#[must_use]
pub fn shown(value: &bson::Bson) -> String {
    value.clone().into_relaxed_extjson().to_string()
}

/// What a rule's state explains of its targets.
#[must_use]
pub fn state_note(state: Option<&RuleState>) -> Option<String> {
    match state.map(|state| &state.backfill) {
        None | Some(Backfill::Absent) => Some("it has never run".to_owned()),
        Some(Backfill::Pending(_)) => Some("its backfill is not done".to_owned()),
        Some(Backfill::Manual) => Some("it waits for `denormd backfill`".to_owned()),
        Some(Backfill::Held(hold)) if hold.paused => Some("it is paused".to_owned()),
        Some(Backfill::Held(hold)) if hold.suspended => Some(format!("it is suspended: {}", hold.reason)),
        Some(Backfill::Held(hold)) => Some(format!("it is held: {}", hold.reason)),
        Some(Backfill::Done) => None,
    }
}

/// Compiles the rules; mistakes come with their places.
pub async fn compile(loaded: &Loaded) -> Result<Plan, Failure> {
    let database = connect::default_database(&loaded.config.mongodb.uri).await;
    crate::plan::compile(&loaded.config, database.as_deref()).map_err(|mistakes| loaded.report(&mistakes).into())
}

/// The rules with these names, or all of them when none is named.
pub fn chosen<'a>(plan: &'a Plan, names: &[String]) -> Result<Vec<&'a Arc<Rule>>, Error> {
    if names.is_empty() {
        return Ok(plan.order.iter().map(|id| plan.rule(*id)).collect());
    }
    let find = |name: &String| {
        plan.rules.iter().find(|rule| rule.name == *name).ok_or_else(|| {
            let known: Vec<&str> = plan.rules.iter().map(|rule| rule.name.as_str()).collect();
            Error::new(Kind::Config, format!("the config has no rule `{name}`"))
                .hint(format!("its rules are: {}", known.join(", ")))
        })
    };
    names.iter().map(find).collect()
}

/// Connects, and gathers what every stage needs.
pub async fn context(loaded: &Loaded, plan: Plan, metrics: Arc<Metrics>) -> Result<Arc<Context>, Failure> {
    let config = &loaded.config;
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    let dead_letters = DeadLetters {
        database: config.state.database.clone(),
        deployment: config.name.clone(),
        partition: Partition::WHOLE,
    };
    Ok(Arc::new(Context::new(server, plan, config.limits.clone(), dead_letters, metrics)))
}
