//! `denormd init`

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
};

use secrecy::ExposeSecret;

use crate::{
    advise::{
        advice::{Advice, Kind},
        draft::{self, Draft},
        report::Report,
    },
    cli::Survey,
    commands::{Failure, advise, print},
    config::{self, Format, Loaded},
    error::{Error, Kind as ErrorKind},
    mongo::{Server, connect},
    preflight,
};

/// Writes a rules file from what `advise` finds.
pub async fn init(paths: &[PathBuf], to: Option<&Path>, asked: &Survey) -> Result<(), Failure> {
    let target = to.or_else(|| paths.first().map(PathBuf::as_path)).unwrap_or(Path::new("denormd.yaml"));
    let printed = target == Path::new("-");
    if !printed && target.exists() {
        return Err(exists(target).into());
    }
    let loaded = advise::load(paths, asked)?;
    let (report, server) = advise::look(&loaded, asked).await?;
    let text = file(&loaded, &report, &server).await?;
    if printed {
        print(&text);
        return Ok(());
    }
    // Created or refused in one step: what has come meanwhile is not overwritten either.
    let mut file = match OpenOptions::new().write(true).create_new(true).open(target) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Err(exists(target).into()),
        Err(error) => {
            return Err(Error::new(ErrorKind::Config, format!("cannot write {}: {error}", target.display())).into());
        }
    };
    file.write_all(text.as_bytes())
        .map_err(|error| Error::new(ErrorKind::Config, format!("cannot write {}: {error}", target.display())))?;
    print(&format!("wrote {}\nread it, then: denormd plan --config {} --apply\n", target.display(), target.display()));
    Ok(())
}

fn exists(path: &Path) -> Error {
    Error::new(ErrorKind::Config, format!("{} exists and is not overwritten", path.display()))
        .hint("name another file with --to, or print the rules with --to -")
}

/// The text of the file: only rules that compile beside each other, and that the cluster can run once `plan --apply` has made
/// what they need. The others are comments, with the reason.
async fn file(loaded: &Loaded, report: &Report, server: &Server) -> Result<String, Failure> {
    let head = head(loaded, report);
    let mut accepted = String::new();
    let mut refused = String::new();
    let mut names = BTreeSet::new();
    for (about, advice) in drafts(report) {
        let Some(draft) = &advice.draft else { continue };
        // Whether any page shows the first few is not known: that is no rule to begin with.
        if advice.kind == Kind::Measure && draft.kind == "collect" {
            continue;
        }
        if !names.insert(draft.name.clone()) {
            continue;
        }
        let entry = entry(&about, advice, draft);
        match trial(&format!("{head}{accepted}{entry}"), &draft.name, loaded, server).await? {
            None => accepted.push_str(&entry),
            Some(reason) => {
                writeln!(refused, "\n  # left out: {reason}").ok();
                for line in draft.yaml().lines() {
                    writeln!(refused, "  # {line}").ok();
                }
            }
        }
    }
    if accepted.is_empty() {
        accepted.push_str("  []\n");
    }
    Ok(format!("{head}{accepted}{refused}"))
}

/// The rules that were advised: what is to be done first, then what is to be measured.
fn drafts(report: &Report) -> Vec<(String, &Advice)> {
    let mut all: Vec<(String, &Advice)> = report
        .relationships
        .iter()
        .flat_map(|(facts, advice)| {
            let (holder, held) = (&facts.link.holder, &facts.link.held);
            let name = |namespace| draft::collection(namespace, report.default.as_deref());
            let (from, to) = (name(&holder.namespace), name(&held.namespace));
            let about = format!("{from}.{} -> {to}.{}", holder.path, held.path);
            advice.iter().map(move |advice| (about.clone(), advice))
        })
        .collect();
    all.sort_by_key(|(_, advice)| advice.kind == Kind::Measure);
    all
}

fn head(loaded: &Loaded, report: &Report) -> String {
    let uri = loaded.config.mongodb.uri.expose_secret();
    let mut out = String::from(
        "# Written by `denormd init` from what `denormd advise` found. It is a beginning: read each rule, and take out what no page\n\
         # of yours reads.\n#\n#   denormd plan --apply   creates the indexes, and enables the pre-images, that the rules need\n#   denormd run\n\nmongodb:\n",
    );
    if uri.contains('@') {
        out.push_str(
            "  # The connection string has a password: DENORMD__MONGODB__URI in the environment, or uri_file.\n",
        );
    } else {
        writeln!(out, "  uri: {}", serde_json::Value::String(uri.to_owned())).ok();
    }
    match &report.default {
        Some(database) => writeln!(out, "  database: {}", serde_json::Value::String(database.clone())).ok(),
        None if uri.contains('@') => writeln!(out, "  {{}}").ok(),
        None => None,
    };
    let state = &loaded.config.state.database;
    if *state != config::State::DEFAULT_DATABASE {
        writeln!(out, "state: {{ database: {} }}", serde_json::Value::String(state.clone())).ok();
    }
    out.push_str("\nrules:\n");
    out
}

fn entry(about: &str, advice: &Advice, draft: &Draft) -> String {
    let mut out = String::new();
    let mut comment = format!("{about}: {}", advice.says);
    if !draft.comment.is_empty() {
        comment.push_str(&format!("; {}", draft.comment));
    }
    let mut line = String::from("  #");
    for word in comment.split_whitespace() {
        if line.len() + word.len() > 116 {
            writeln!(out, "{line}").ok();
            line = String::from("  #");
        }
        line.push(' ');
        line.push_str(word);
    }
    writeln!(out, "{line}").ok();
    for line in draft.yaml().lines() {
        writeln!(out, "  {line}").ok();
    }
    out.push('\n');
    out
}

/// Why a rule cannot stand beside those before it; None if it can.
async fn trial(text: &str, name: &str, loaded: &Loaded, server: &Server) -> Result<Option<String>, Failure> {
    let uri = loaded.config.mongodb.uri.expose_secret().to_owned();
    let environment = [("DENORMD__MONGODB__URI".to_owned(), uri)];
    let trial = match config::load_text("init.yaml", text, Format::Yaml, &environment) {
        Ok(trial) => trial,
        Err(error) => return Ok(Some(first_line(&error.to_string()))),
    };
    let default = connect::default_database(&trial.config.mongodb.uri).await;
    let plan = match crate::plan::compile(&trial.config, default.as_deref()) {
        Ok(plan) => plan,
        Err(mistakes) => return Ok(mistakes.first().map(|mistake| first_line(&mistake.message))),
    };
    let findings = preflight::check(server, &plan).await?;
    let unfixable = findings.into_iter().find(|finding| finding.rule == name && finding.fix.is_none());
    Ok(unfixable.map(|finding| finding.message))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
