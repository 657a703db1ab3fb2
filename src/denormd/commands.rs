//! The commands, one file each, and what they share: loading the config and connecting.

pub mod about;
pub mod advise;
pub mod backfill;
pub mod check;
pub mod dead_letters;
pub mod diff;
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
pub mod terminal;
pub mod test;
#[cfg(feature = "top")]
pub mod top;
pub mod undo;
pub mod wait;

use std::{io::Write, path::PathBuf, sync::Arc};

use bson::{Bson, oid::ObjectId};

use crate::{
    cli::{self, Cli, Command, DaemonAddress, Output},
    commands::run::signals::Signals,
    server::client::{Daemon, Trust},
};
use denormd_engine::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    dead_letter::DeadLetters,
    metrics::Metrics,
    reconcile::Context,
};
use denormd_model::{partition::Partition, rule_state::RuleState};
use denormd_mongo::{
    Server, connect,
    error::{Error, Kind},
};
use denormd_rules::{
    config::{self, ConfigError, Loaded},
    plan::{Plan, Rule},
};

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The config is wrong. Exit status 2.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The cluster lacks what the rules need, or a rule is blocked. Exit status 4.
    #[error("{0}")]
    Refused(String),
    /// `check` has found differences. Exit status 3.
    #[error("{0}")]
    Differs(String),
    /// A signal (SIGINT, SIGTERM, SIGHUP) ended the command before its work was done. Exit status 130.
    #[error("{0}")]
    Interrupted(String),
    /// Cases of `test` do not come out as they should. Exit status 1.
    #[error("{}", if *.0 == 1 { "one case failed".to_owned() } else { format!("{} cases failed", .0) })]
    TestsFailed(usize),
    /// Something failed while it ran. The kind of error decides the exit status.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl Failure {
    /// The exit status of the command, decided here for all commands.
    #[must_use]
    pub fn status(&self) -> i32 {
        match self {
            Self::Config(_) => 2,
            Self::Differs(_) => 3,
            Self::Refused(_) => 4,
            Self::TestsFailed(_) => 1,
            Self::Interrupted(_) => 130,
            Self::Failed(error) => error.kind.policy().status,
        }
    }
}

/// Does what the command line says. Only the commands that need a config file load it.
pub async fn dispatch(cli: &Cli) -> Result<(), Failure> {
    let (output, environment) = (cli.output, config::process_environment());
    let loaded = || config::load(&cli.config, &environment).map_err(|error| from_environment(&cli.config, error));
    let daemon = |asked| daemon(cli, &environment, asked);
    match &cli.command {
        Command::Schema { reference } => {
            about::schema(*reference);
            Ok(())
        }
        Command::Completions { shell } => {
            about::completions(*shell);
            Ok(())
        }
        Command::Man { out } => about::man(out.as_deref()),
        Command::Diff { old, new, markdown } => diff::diff(output, old, new, *markdown, &environment).await,
        Command::Advise(inspection) => advise::advise(&cli.config, output, inspection).await,
        Command::Init { to, inspection } => init::init(&cli.config, to.as_deref(), inspection).await,
        Command::Health { asked, live } => health::health(output, daemon(asked)?, *live).await,
        Command::Status { asked } => status::status(output, daemon(asked)?).await,
        Command::Top { asked } => top(output, daemon(asked)?).await,
        Command::Wait { asked, operation_time, timeout } => {
            wait::wait(output, daemon(asked)?, operation_time.as_deref(), *timeout).await
        }
        Command::Runbook { alert, asked } => runbook::runbook(output, alert.as_deref(), daemon(asked)?).await,
        Command::SupportBundle { to, asked } => {
            let (loaded, is_other) = (loaded(), asked.address.is_some());
            support_bundle::support_bundle(loaded, daemon(asked)?, to.as_deref(), is_other).await
        }
        Command::Run { wait_for_cluster: true } => run::run_patiently(&cli.config, &environment).await,
        Command::Run { wait_for_cluster: false } => {
            // First, so that a change of the files while they are loaded causes a reload.
            let signals = Signals::listen(&cli.config)?;
            run::run(&cli.config, loaded()?, false, signals).await
        }
        Command::Plan(options) => plan::plan(&loaded()?, output, options).await,
        Command::Config => {
            about::config(&loaded()?, output);
            Ok(())
        }
        Command::Role(options) => role::role(&loaded()?, output, options).await,
        Command::Backfill { rule, no_wait } => backfill::backfill(&loaded()?, output, rule, *no_wait).await,
        Command::Unblock { rule } => backfill::unblock(&loaded()?, output, rule).await,
        Command::Prune { rule, dry_run, .. } => prune::prune(&loaded()?, output, rule.as_deref(), *dry_run).await,
        Command::Undo { rule, dry_run } => undo::undo(&loaded()?, output, rule, *dry_run).await,
        Command::Events { since } => events::events(&loaded()?, output, *since).await,
        Command::Check(options) => check::check(&loaded()?, output, options).await,
        Command::Pause { rule, time, .. } => pause::pause(&loaded()?, output, rule.as_deref(), *time).await,
        Command::Resume { rule, .. } => pause::resume(&loaded()?, output, rule.as_deref()).await,
        Command::Explain { rule, id } => explain::explain(&loaded()?, output, rule, id).await,
        Command::Test { files, uri } => test::test(&loaded()?, output, files, uri.as_deref()).await,
        Command::DeadLetters(action) => dead_letters::dead_letters(&loaded()?, output, action).await,
    }
}

/// Adds where the path of a missing config comes from, if no option gives it.
fn from_environment(paths: &[PathBuf], error: ConfigError) -> ConfigError {
    let named = std::env::var("DENORMD_CONFIG").unwrap_or_default();
    let is_named = named.split(',').map(PathBuf::from).eq(paths.iter().cloned());
    match error {
        ConfigError::Read { path, error, .. } if is_named && error.kind() == std::io::ErrorKind::NotFound => {
            ConfigError::Read { path, error, hint: "the path comes from DENORMD_CONFIG; --config names another" }
        }
        other => other,
    }
}

#[cfg(feature = "top")]
use top::top;

/// Refuses `top` in a build without it.
#[cfg(not(feature = "top"))]
fn top(_: Output, _: Daemon) -> std::future::Ready<Result<(), Failure>> {
    let error = Error::new(Kind::Config, "this program was built without `top`")
        .hint("`watch -n 2 denormd status` repeats the same figures; `cargo build --features top` adds it");
    std::future::ready(Err(error.into()))
}

/// The daemon to ask: the one at the address that is given, or where the config says that it listens. A config that has been broken
/// since the daemon read it does not prevent that.
fn daemon(cli: &Cli, environment: &[(String, String)], asked: &DaemonAddress) -> Result<Daemon, Failure> {
    let loaded = config::load(&cli.config, environment);
    let (token, certificate) = match &loaded {
        Ok(loaded) => {
            let http = &loaded.config.http;
            // Commands only read over HTTP. Where reads need no token, sending it would only expose it.
            (http.token.clone().filter(|_| http.token_for_reads), http.certificate.clone())
        }
        Err(_) => (health::token(environment), health::certificate(environment)),
    };
    let mut address = match &asked.address {
        Some(address) => address.clone(),
        None => {
            let address = health::address(loaded.as_ref().ok(), environment)?.into();
            // The default path may be absent: nobody has named it.
            if let Err(error) = &loaded
                && (cli.config != [PathBuf::from(cli::CONFIG)] || cli.config[0].exists())
            {
                notice(&format!("{error}\nthe config cannot be used; the daemon is asked at {address}"));
            }
            address
        }
    };
    address.https.get_or_insert(certificate.is_some());
    let own = certificate.map(|certificate| certificate.own);
    Ok(Daemon { address, token, trust: Trust { own, ca_file: asked.ca_file.clone(), probe: false } })
}

/// Writes to standard output.
pub fn print(text: &str) {
    // A reader that closed the pipe has read enough.
    std::io::stdout().write_all(text.as_bytes()).ok();
}

/// Writes JSON to standard output.
pub fn print_json(value: &impl serde::Serialize) {
    print(&format!("{:#}\n", serde_json::json!(value)));
}

/// Writes results to standard output, as text or as JSON.
pub fn print_as(output: Output, text: impl FnOnce() -> String, json: impl FnOnce() -> serde_json::Value) {
    match output {
        Output::Text => print(&text()),
        Output::Json => print_json(&json()),
    }
}

/// Tells the user something beside the results: on standard error, so that standard output keeps what programs read.
pub fn notice(text: &str) {
    // Standard error may be closed.
    writeln!(std::io::stderr(), "{text}").ok();
}

/// The reason why a rule's targets may not be as this config defines them, by its record.
#[must_use]
pub fn state_note(rule: &Rule, record: Option<&RuleRecord>) -> Option<String> {
    let Some(record) = record else { return Some("it has never run".to_owned()) };
    match &record.state {
        // A definition that was blocked when the rule left the config is not kept.
        _ if record.state == RuleState::Removed || record.definition.is_empty() => {
            Some("it was not in the config of the last leader".to_owned())
        }
        _ if !record.runs(rule) => Some("the last leader had another definition of it".to_owned()),
        RuleState::Backfilling { .. } => Some("its backfill is not done".to_owned()),
        RuleState::AwaitingBackfill => Some("it waits for `denormd backfill`".to_owned()),
        RuleState::Paused { .. } => Some("it is paused".to_owned()),
        RuleState::Unavailable { reason } => Some(format!("it is unavailable: {reason}")),
        RuleState::Blocked(reason) => Some(format!("it is blocked: {reason}")),
        RuleState::Removed | RuleState::Live => None,
    }
}

/// Compiles the rules; mistakes come with their places.
pub async fn compile(loaded: &Loaded) -> Result<Plan, Failure> {
    let database = connect::default_database(&loaded.config.mongodb.uri).await;
    denormd_rules::plan::compile(&loaded.config, database.as_deref())
        .map_err(|mistakes| loaded.report(&mistakes).into())
}

/// The rules with these names, or all of them when none is named.
pub fn chosen<'a>(plan: &'a Plan, names: &[String]) -> Result<Vec<&'a Arc<Rule>>, Error> {
    if names.is_empty() {
        return Ok(plan.rules.iter().collect());
    }
    let find = |name: &String| {
        plan.named(name).ok_or_else(|| {
            let known: Vec<&str> = plan.rules.iter().map(|rule| rule.name.as_str()).collect();
            unknown_rule(format!("the config has no rule `{name}`"), name, "its rules are", &known)
        })
    };
    names.iter().map(find).collect()
}

/// The error for a name that no rule has, with the most similar of the known names. `introduction` precedes them all.
#[must_use]
pub fn unknown_rule(message: String, name: &str, introduction: &str, known: &[&str]) -> Error {
    let near = config::nearest(name, known).map(|near| format!("did you mean `{near}`? ")).unwrap_or_default();
    Error::new(Kind::Config, message).hint(format!("{near}{introduction}: {}", known.join(", ")))
}

/// Compiles the rules, connects to the cluster, and opens the state of the deployment.
pub async fn connected(loaded: &Loaded) -> Result<(Arc<Context>, Store), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    Ok((context, store))
}

/// The error for a rule that the state of the deployment does not contain.
#[must_use]
pub fn without_record(context: &Context, known: &[(String, RuleRecord)], rule: &str) -> Error {
    let deployment = &context.dead_letters.deployment;
    let message = format!("the deployment `{deployment}` knows no rule `{rule}`: it has never run, or is pruned");
    let names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
    let is_planned = context.plan.named(rule).is_some();
    let kind = if is_planned { Kind::State } else { Kind::Config };
    Error { kind, ..unknown_rule(message, rule, "known rules", &names) }
}

/// The values that a text on the command line may stand for: Extended JSON, a plain string, or the digits of an ObjectId.
#[must_use]
pub fn meanings(text: &str) -> Vec<Bson> {
    let json = serde_json::from_str::<serde_json::Value>(text).ok().and_then(|json| Bson::try_from(json).ok());
    let mut meant: Vec<Bson> = json.into_iter().collect();
    meant.push(Bson::String(text.to_owned()));
    meant.extend(ObjectId::parse_str(text).ok().map(Bson::ObjectId));
    meant
}

/// Connects, and gathers what every stage needs.
pub async fn context(loaded: &Loaded, plan: Plan, metrics: Arc<Metrics>) -> Result<Arc<Context>, Failure> {
    let config = &loaded.config;
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    connect::check_sharding(&server, config.mongodb.allow_sharded).await?;
    let dead_letters = DeadLetters {
        database: config.state.database.clone(),
        deployment: config.name.clone(),
        partition: Partition::WHOLE,
    };
    let context =
        Context::new(server, plan, config.limits.clone(), dead_letters, metrics).with_undo(config.undo.clone());
    Ok(Arc::new(context))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// It was sent in clear text to whatever answers at `--address`. Whoever has it can unblock rules by a `POST`.
    #[test]
    fn a_command_that_only_reads_does_not_send_a_token_that_it_does_not_need() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("denormd.yaml");
        let sent = |http: &str| {
            let text = format!("mongodb: {{ uri: \"mongodb://localhost\" }}\nrules: []\nhttp: {{ {http} }}\n");
            std::fs::write(&file, text).unwrap();
            let arguments = ["denormd", "top", "--address", "10.0.0.7:9464", "--config", file.to_str().unwrap()];
            let cli = Cli::parse_from(arguments);
            let Command::Top { asked } = &cli.command else { panic!("{cli:?}") };
            daemon(&cli, &[], asked).unwrap().token.is_some()
        };
        assert!(!sent("token: sixteen-characters"));
        assert!(sent("token: sixteen-characters, require_token: everything"));
    }
}
