//! `denormd advise`: advice on the schema, from the data and its use.

use std::{collections::BTreeSet, path::PathBuf};

use bson::doc;
use secrecy::SecretString;

use crate::{
    cli::{Inspection, Output},
    commands::{Failure, compile, notice, print_as},
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

/// Number of databases that a hint names.
const NAMED: usize = 10;

/// Examines the data and prints the advice.
pub async fn advise(paths: &[PathBuf], output: Output, asked: &Inspection) -> Result<(), Failure> {
    let loaded = load(paths, asked).await?;
    let (report, _) = look(&loaded, asked).await?;
    print_as(output, || render::text(&report), || render::json(&report));
    Ok(())
}

/// The config, if there is one, with the options of the command line applied.
pub async fn load(paths: &[PathBuf], asked: &Inspection) -> Result<Loaded, Failure> {
    let mut environment = config::process_environment();
    let is_uri = |name: &str| name.to_uppercase().starts_with("DENORMD__MONGODB__URI");
    let mut database = None;
    if let Some(uri) = &asked.uri {
        environment.retain(|(name, _)| !is_uri(name));
        environment.push(("DENORMD__MONGODB__URI".to_owned(), uri.clone()));
        // It comes before the config's database, too.
        database = connect::default_database(&SecretString::from(uri.clone())).await;
    }
    if let [asked] = asked.database.as_slice() {
        database = Some(asked.clone());
    }
    if let Some(database) = database {
        environment.retain(|(name, _)| !name.eq_ignore_ascii_case("DENORMD__MONGODB__DATABASE"));
        environment.push(("DENORMD__MONGODB__DATABASE".to_owned(), database));
    }
    if !paths.iter().any(|path| path.exists()) && !environment.iter().any(|(name, _)| is_uri(name)) {
        let error = Error::new(Kind::Config, "no server is named, and there is no config file")
            .hint("--uri mongodb://localhost:27017/DATABASE, or DENORMD__MONGODB__URI, or --config with a file");
        return Err(error.into());
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
            .hint("--uri mongodb://localhost:27017/DATABASE, or --database, or `mongodb.database` in the config");
        return Err(error.into());
    }
    let server = Server::new(connect::connect(&config.mongodb.uri).await?);
    check_databases(&server, &databases, asked, &config.state.database).await?;
    let options = Options {
        databases,
        default,
        state: config.state.database.clone(),
        observe: asked.observe,
        told: asked.matches.clone(),
        thresholds: config.advise.clone(),
    };
    let report = report::report(&server, &config.mongodb.uri, &plan, &options, &notice).await?;
    Ok((report, server))
}

/// Refuses databases that do not exist: the report would be empty. One that only the config's rules name may be still to
/// come, unless none of them exists.
async fn check_databases(
    server: &Server,
    databases: &BTreeSet<String>,
    asked: &Inspection,
    state: &str,
) -> Result<(), Error> {
    let mut absent = Vec::new();
    for database in databases {
        let command = doc! {"listCollections": 1, "nameOnly": true, "authorizedCollections": true};
        let mut found = server.database(database).run_cursor_command(command).await?;
        if !found.advance().await? {
            absent.push(database);
        }
    }
    let is_named = |database: &&&String| asked.database.contains(database) || absent.len() == databases.len();
    let Some(database) = absent.iter().find(is_named) else { return Ok(()) };
    let mut others = server.databases().await;
    others.retain(|name| !["admin", "config", "local", state].contains(&name.as_str()));
    let hint = match others.len() {
        0 => "there is no other database, or the user may not see it".to_owned(),
        number @ 1..=NAMED => format!("there {}: {}", if number == 1 { "is" } else { "are" }, others.join(", ")),
        number => format!("there are: {} and {} more", others[..NAMED].join(", "), number - NAMED),
    };
    let message = format!("the database `{database}` does not exist, or the user may not see it");
    Err(Error::new(Kind::Config, message).hint(hint))
}
