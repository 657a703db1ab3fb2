//! `denormd init`: a first rules file from the advice.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

use secrecy::ExposeSecret;

use crate::{
    cli::Inspection,
    commands::{Failure, advise, notice, print},
};
use denormd_advise::{
    advice::{Advice, Kind, counted},
    draft::{self, Draft},
    relationships::Evidence,
    report::Report,
};
use denormd_engine::preflight;
use denormd_mongo::{
    Server, connect,
    error::{Error, Kind as ErrorKind},
};
use denormd_rules::config::{self, Format, Loaded};

/// Writes a rules file from the results of `advise`.
pub async fn init(paths: &[PathBuf], to: Option<&Path>, asked: &Inspection) -> Result<(), Failure> {
    let target = to.or_else(|| paths.first().map(PathBuf::as_path)).unwrap_or(Path::new("denormd.yaml"));
    let printed = target == Path::new("-");
    if !printed && target.exists() {
        return Err(exists(target).into());
    }
    let loaded = advise::load(paths, asked).await?;
    let (report, server) = advise::look(&loaded, asked).await?;
    let written = file(&loaded, &report, &server, Some(target).filter(|_| !printed)).await?;
    let text = &written.text;
    if printed {
        print(text);
        if written.rules == 0 {
            notice(&format!("no rule was written: {}", written.why()));
        }
        return Ok(());
    }
    // One step creates the file or fails, so a file created meanwhile is not overwritten either.
    let created = File::create_new(target).and_then(|mut file| file.write_all(text.as_bytes()));
    created.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => exists(target),
        _ => Error::new(ErrorKind::Machine, format!("cannot write {}: {error}", target.display())),
    })?;
    let name = target.display();
    print(&match written.rules {
        0 => format!("wrote {name} without a rule: {}\n", written.why()),
        rules => format!(
            "wrote {name}: {}, {} left out, each with its reason\nread it, then: denormd plan --config {name} --apply\n",
            counted(rules, "rule"),
            counted(written.left_out, "candidate"),
        ),
    });
    Ok(())
}

fn exists(path: &Path) -> Error {
    Error::new(ErrorKind::Config, format!("{} exists and is not overwritten", path.display()))
        .hint("name another file with --to, or print the rules with --to -")
}

/// The text of the file, with the numbers of its rules and of the candidates left out.
struct Written {
    text: String,
    rules: u64,
    left_out: u64,
}

impl Written {
    /// The reason why the file has no rule.
    fn why(&self) -> String {
        match self.left_out {
            0 => "no relationship was found; name one with --match orders.customer_id=customers._id".to_owned(),
            left_out => format!("each of {} was left out, with its reason in the file", counted(left_out, "candidate")),
        }
    }
}

/// Builds the file. Its rules compile together, and the cluster can run them after `plan --apply` has created what they
/// need. The other candidates become comments, each with the reason.
async fn file(loaded: &Loaded, report: &Report, server: &Server, target: Option<&Path>) -> Result<Written, Failure> {
    let head = head(loaded, report, target);
    let (mut accepted, mut refused) = (String::new(), String::new());
    let (mut rules, mut left_out) = (0, 0);
    let mut names = BTreeSet::new();
    for (about, found, advice) in candidates(report) {
        let reason = match &advice.draft {
            None => Some(advice.says.clone()),
            // A subset needs evidence that some page shows only the first few, so it is not a rule to start with.
            Some(draft) if advice.kind == Kind::Measure && draft.kind == "collect" => {
                Some(format!("{}; measure first", advice.says))
            }
            Some(draft) if !names.insert(draft.name.clone()) => {
                Some(format!("another rule is named {} already", draft.name))
            }
            Some(draft) => {
                let entry = entry(&about, found, advice, draft);
                let reason = dry_run(&format!("{head}{accepted}{entry}"), &draft.name, loaded, server).await?;
                if reason.is_none() {
                    accepted.push_str(&entry);
                    rules += 1;
                }
                reason
            }
        };
        if let Some(reason) = reason {
            left_out += 1;
            refused.push('\n');
            comment(&mut refused, &format!("left out: {about}: {reason}"));
            for line in
                advice.draft.iter().flat_map(|draft| draft.yaml().lines().map(ToOwned::to_owned).collect::<Vec<_>>())
            {
                writeln!(refused, "  # {line}").ok();
            }
        }
    }
    if accepted.is_empty() {
        accepted.push_str("  []\n");
    }
    let mut written = Written { text: String::new(), rules, left_out };
    if rules == 0 {
        refused.insert(0, '\n');
        let mut why = String::from("\n");
        comment(&mut why, &format!("no rule: {}", written.why()));
        report.notes.iter().for_each(|note| comment(&mut why, note));
        refused.insert_str(0, &why);
    }
    written.text = format!("{head}{accepted}{refused}");
    Ok(written)
}

/// The possible rules: first those that are advised, then those to measure, then those advised against.
fn candidates(report: &Report) -> Vec<(String, Evidence, &Advice)> {
    let mut all: Vec<(String, Evidence, &Advice)> = report
        .relationships
        .iter()
        .flat_map(|(facts, advice)| {
            let (holder, held) = (&facts.link.holder, &facts.link.held);
            let name = |namespace| draft::collection(namespace, report.default.as_deref());
            let (from, to) = (name(&holder.namespace), name(&held.namespace));
            let about = format!("{from}.{} -> {to}.{}", holder.path, held.path);
            let candidate =
                |advice: &&Advice| advice.draft.is_some() || matches!(advice.kind, Kind::Measure | Kind::DoNotCopy);
            advice.iter().filter(candidate).map(move |advice| (about.clone(), facts.link.found, advice))
        })
        .collect();
    all.sort_by_key(|(_, _, advice)| (advice.kind == Kind::Measure, advice.draft.is_none()));
    all
}

fn head(loaded: &Loaded, report: &Report, target: Option<&Path>) -> String {
    let uri = loaded.config.mongodb.uri.expose_secret();
    // Without it, the commands would use the config of DENORMD_CONFIG, or denormd.yaml.
    let config = target.map(|target| format!(" --config {}", target.display())).unwrap_or_default();
    let mut out = format!(
        "# Written by `denormd init` from what `denormd advise` found. It is a beginning: read each rule, and take out what no page\n\
         # of yours reads.\n#\n#   denormd plan --apply{config}   creates the indexes, and enables the pre-images, that the rules need\n\
         #   denormd run{config}\n\nmongodb:\n",
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
    if *state != config::State::default().database {
        writeln!(out, "state: {{ database: {} }}", serde_json::Value::String(state.clone())).ok();
    }
    out.push_str("\nrules:\n");
    out
}

fn entry(about: &str, found: Evidence, advice: &Advice, draft: &Draft) -> String {
    let mut out = String::new();
    if found == Evidence::Values {
        comment(&mut out, &format!("{}: verify it first", found.words()));
    }
    let mut says = format!("{about}: {}", advice.says);
    if !draft.comment.is_empty() {
        says.push_str(&format!("; {}", draft.comment));
    }
    comment(&mut out, &says);
    if let Some(warning) = draft.warning() {
        comment(&mut out, &warning);
    }
    for line in draft.yaml().lines() {
        writeln!(out, "  {line}").ok();
    }
    out.push('\n');
    out
}

/// Formats text as lines of a comment.
fn comment(out: &mut String, text: &str) {
    let mut line = String::from("  #");
    for word in text.split_whitespace() {
        if line.len() + word.len() > 116 {
            writeln!(out, "{line}").ok();
            line = String::from("  #");
        }
        line.push(' ');
        line.push_str(word);
    }
    writeln!(out, "{line}").ok();
}

/// The reason why a rule cannot be added to those before it; None if it can.
async fn dry_run(text: &str, name: &str, loaded: &Loaded, server: &Server) -> Result<Option<String>, Failure> {
    let uri = loaded.config.mongodb.uri.expose_secret().to_owned();
    let environment = [("DENORMD__MONGODB__URI".to_owned(), uri)];
    let dry_run = match config::load_text("init.yaml", text, Format::Yaml, &environment) {
        Ok(dry_run) => dry_run,
        Err(error) => return Ok(Some(first_line(&error.to_string()))),
    };
    let default = connect::default_database(&dry_run.config.mongodb.uri).await;
    let plan = match denormd_rules::plan::compile(&dry_run.config, default.as_deref()) {
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
