//! `denormd advise`: advice on the schema, from the data and its use.

use std::{collections::BTreeSet, io::Write, path::PathBuf};

use crate::{
    cli::{Inspection, Output},
    commands::{Failure, compile, print},
};
use denormd_advise::{
    render,
    report::{self, Options, Report},
};
use denormd_mongo::{
    Server, connect,
    error::{Error, Kind},
};
use denormd_rules::config::{self, Loaded};

/// Examines the data and prints the advice.
pub async fn advise(paths: &[PathBuf], output: Output, asked: &Inspection) -> Result<(), Failure> {
    let loaded = load(paths, asked)?;
    let (report, _) = look(&loaded, asked).await?;
    match output {
        Output::Text => print(&render::text(&report)),
        Output::Json => print(&format!("{:#}\n", render::json(&report))),
    }
    Ok(())
}

/// The config, if there is one, with the options of the command line applied.
pub fn load(paths: &[PathBuf], asked: &Inspection) -> Result<Loaded, Failure> {
    let mut environment = config::process_environment();
    if let Some(uri) = &asked.uri {
        environment.retain(|(name, _)| !name.to_uppercase().starts_with("DENORMD__MONGODB__URI"));
        environment.push(("DENORMD__MONGODB__URI".to_owned(), uri.clone()));
    }
    if let [database] = asked.database.as_slice() {
        environment.retain(|(name, _)| !name.eq_ignore_ascii_case("DENORMD__MONGODB__DATABASE"));
        environment.push(("DENORMD__MONGODB__DATABASE".to_owned(), database.clone()));
    }
    Ok(config::load_if_any(paths, &environment)?)
}

/// Builds the report. Also returns the server, for further queries.
pub async fn look(loaded: &Loaded, asked: &Inspection) -> Result<(Report, Server), Failure> {
    let plan = compile(loaded).await?;
    let config = &loaded.config;
    let default = match &config.mongodb.database {
        Some(database) => Some(database.clone()),
        None => connect::default_database(&config.mongodb.uri).await,
    };
    let mut databases: BTreeSet<String> = asked.database.iter().cloned().collect();
    if databases.is_empty() {
        databases.extend(default.clone());
        databases.extend(plan.databases());
    }
    if databases.is_empty() {
        let error = Error::new(Kind::Config, "no database is named")
            .hint("give --database, `mongodb.database` in the config, or a connection string with a database");
        return Err(error.into());
    }
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    let options = Options {
        databases,
        default,
        state: config.state.database.clone(),
        observe: asked.observe,
        told: asked.matches.clone(),
        thresholds: config.advise.clone(),
    };
    let report = report::report(&server, &config.mongodb.uri, &plan, &options, &say).await?;
    Ok((report, server))
}

/// Reports progress on standard error. Standard output contains only the result.
fn say(what: &str) {
    // Standard error may be closed.
    writeln!(std::io::stderr(), "{what}").ok();
}
