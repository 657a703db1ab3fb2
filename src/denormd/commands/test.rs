//! `denormd test`: runs rules on the documents of a file, and compares the results with the expected ones.

mod on_server;

use std::{collections::BTreeMap, path::PathBuf};

use bson::{Bson, Document};
use secrecy::SecretString;

use crate::{
    cli::Output,
    commands::{Failure, compile, print, print_as},
    dry_run::{self, Differs, Obstacle},
};
use denormd_model::{key::Key, namespace::Namespace, text::shown};
use denormd_mongo::connect;
use denormd_mql::{Collections, EvalError};
use denormd_rules::{
    config::{ConfigPath, Documents, Loaded, Mistake, TestCase, TestFile, nearest},
    plan::Plan,
};

/// The outcome of one case.
struct Outcome {
    file: String,
    case: String,
    problems: Vec<Problem>,
}

/// A deviation from the expectations of a case.
enum Problem {
    /// A document differs from the expected one.
    Differs { collection: String, id: Bson, differs: Differs },
    /// A rule could not be applied.
    Obstacle { rule: String, target: Option<Bson>, why: String, hint: Option<String> },
}

/// Runs every case of the files, in memory or on a server.
pub async fn test(loaded: &Loaded, output: Output, files: &[PathBuf], uri: Option<&str>) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let default = match &loaded.config.mongodb.database {
        Some(database) => Some(database.clone()),
        None => connect::default_database(&loaded.config.mongodb.uri).await,
    };
    // All mistakes in all files come before the first case.
    let files = files.iter().map(|path| TestFile::load(path)).collect::<Result<Vec<_>, _>>()?;
    let mut cases = Vec::new();
    for file in &files {
        let mut mistakes = Vec::new();
        let read = file.cases.iter().map(|case| Case::of(&plan, default.as_deref(), case, &mut mistakes));
        cases.extend(read.collect::<Vec<_>>().into_iter().map(|case| (file, case)));
        if !mistakes.is_empty() {
            return Err(file.report(&mistakes).into());
        }
    }
    let mut server = match uri {
        Some(uri) => Some(on_server::Scratch::connect(loaded, &SecretString::from(uri.to_owned())).await?),
        None => None,
    };
    let mut outcomes = Vec::new();
    for (file, case) in &cases {
        let (after, mut problems) = match &mut server {
            Some(scratch) => scratch.run(&plan, &case.given).await?,
            None => in_memory(&plan, &case.given)?,
        };
        problems.extend(case.compare(&after));
        let outcome = Outcome { file: file.name.clone(), case: case.name.clone(), problems };
        if output == Output::Text {
            print(&outcome.text());
        }
        outcomes.push(outcome);
    }
    let failed = outcomes.iter().filter(|outcome| !outcome.problems.is_empty()).count();
    print_as(
        output,
        || format!("{} passed, {failed} failed\n", outcomes.len() - failed),
        || outcomes.iter().map(Outcome::json).collect(),
    );
    if failed == 0 { Ok(()) } else { Err(Failure::TestsFailed(failed)) }
}

/// Runs the rules in memory. Returns the resulting documents, and the problems.
fn in_memory(plan: &Plan, given: &Collections) -> Result<(Collections, Vec<Problem>), Failure> {
    let mut after = given.clone();
    let concerned = |rule: &String| {
        let rule = plan.named(rule);
        let holds = |namespace: &Namespace| given.get(&namespace.to_string()).is_some_and(|docs| !docs.is_empty());
        rule.is_some_and(|rule| {
            holds(&rule.target.namespace) || (rule.creates.is_some() && holds(&rule.source.namespace))
        })
    };
    let beyond = dry_run::beyond(plan).into_iter().filter(|(rule, _)| concerned(rule));
    let beyond: Vec<Problem> = beyond.map(|(rule, what)| needs_server(rule, None, &what)).collect();
    if !beyond.is_empty() {
        return Ok((after, beyond));
    }
    let obstacles = dry_run::run(plan, &mut after)?;
    let problems = obstacles.into_iter().map(|Obstacle { rule, target, error }| match error {
        EvalError::NeedsServer(what) => needs_server(rule, Some(target), &what),
        EvalError::Refused(why) => Problem::Obstacle { rule, target: Some(target), why, hint: None },
    });
    Ok((after, problems.collect()))
}

fn needs_server(rule: String, target: Option<Bson>, what: &str) -> Problem {
    Problem::Obstacle {
        rule,
        target,
        why: format!("{what} needs a server"),
        hint: Some("run `denormd test --uri mongodb://…`: it works in databases of its own and drops them".to_owned()),
    }
}

/// A case with its collection names resolved.
struct Case {
    name: String,
    given: Collections,
    expect: Vec<(Namespace, Vec<Document>)>,
    gone: Vec<(Namespace, Vec<Bson>)>,
}

impl Case {
    fn of(plan: &Plan, default: Option<&str>, case: &TestCase, mistakes: &mut Vec<Mistake>) -> Self {
        let mut resolve = |name: &str, at: &ConfigPath| {
            let found = namespace(plan, default, name);
            if found.is_none() {
                mistakes.push(unknown(plan, default, name, at));
            }
            found
        };
        // A collection that is not given is empty.
        let mut given: Collections = plan.namespaces().into_iter().map(|ns| (ns.to_string(), Vec::new())).collect();
        for Documents { collection, at, documents } in &case.given {
            if let Some(namespace) = resolve(collection, at) {
                given.insert(namespace.to_string(), documents.clone());
            }
        }
        let expect = case
            .expect
            .iter()
            .filter_map(|Documents { collection, at, documents }| Some((resolve(collection, at)?, documents.clone())));
        let expect = expect.collect();
        let gone = case.gone.iter().filter_map(|(name, at, ids)| Some((at, resolve(name, at)?, ids.clone())));
        let gone: Vec<(&ConfigPath, Namespace, Vec<Bson>)> = gone.collect();
        for (at, namespace, ids) in &gone {
            mistakes.extend(never_there(plan, &given, at, namespace, ids));
        }
        let gone = gone.into_iter().map(|(_, namespace, ids)| (namespace, ids)).collect();
        Self { name: case.name.clone(), given, expect, gone }
    }

    /// Compares the resulting documents with the expected ones.
    fn compare(&self, after: &Collections) -> Vec<Problem> {
        let find = |namespace: &Namespace, id: &Bson| {
            let wanted = Key::one(id.clone());
            let documents = after.get(&namespace.to_string()).map(Vec::as_slice).unwrap_or_default();
            documents.iter().find(|document| document.get("_id").cloned().map(Key::one) == Some(wanted.clone()))
        };
        let mut out = Vec::new();
        let mut note = |namespace: &Namespace, id: &Bson, expected: Option<&Document>| {
            let differs = dry_run::between(expected, find(namespace, id)).into_iter();
            out.extend(differs.map(|differs| Problem::Differs {
                collection: namespace.to_string(),
                id: id.clone(),
                differs,
            }));
        };
        for (namespace, documents) in &self.expect {
            for document in documents {
                note(namespace, document.get("_id").unwrap_or(&Bson::Null), Some(document));
            }
        }
        for (namespace, ids) in &self.gone {
            for id in ids {
                note(namespace, id, None);
            }
        }
        out
    }
}

/// The documents under `gone` that do not exist before the rules run, and that no rule creates.
fn never_there(plan: &Plan, given: &Collections, at: &ConfigPath, namespace: &Namespace, ids: &[Bson]) -> Vec<Mistake> {
    if plan.rules.iter().any(|rule| rule.creates.is_some() && rule.target.namespace == *namespace) {
        return Vec::new();
    }
    let known = given.get(&namespace.to_string()).into_iter().flatten().filter_map(|document| document.get("_id"));
    let known: Vec<Key> = known.cloned().map(Key::one).collect();
    let never = ids.iter().enumerate().filter(|(_, id)| !known.contains(&Key::one((*id).clone())));
    let mistake = |(nth, id): (usize, &Bson)| {
        let message = format!("`{}` has no document {} before the rules run", namespace.collection, shown(id));
        Mistake::new(at.index(nth), message).hint("name it under `given`, with the fields that make a rule delete it")
    };
    never.map(mistake).collect()
}

/// The collection that a name refers to: without a database it is in the default database.
fn namespace(plan: &Plan, default: Option<&str>, name: &str) -> Option<Namespace> {
    let known = plan.namespaces();
    let bare = known.iter().find(|ns| Some(ns.database.as_str()) == default && ns.collection == name);
    bare.or_else(|| known.iter().find(|ns| ns.to_string() == name)).cloned()
}

fn unknown(plan: &Plan, default: Option<&str>, name: &str, at: &ConfigPath) -> Mistake {
    let written = |ns: &Namespace| {
        if Some(ns.database.as_str()) == default { ns.collection.clone() } else { ns.to_string() }
    };
    let known: Vec<String> = plan.namespaces().iter().map(written).collect();
    let hint = match nearest(name, &known.iter().map(String::as_str).collect::<Vec<_>>()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("the rules use: {}", known.join(", ")),
    };
    Mistake::new(at.clone(), format!("no rule reads or writes a collection `{name}`")).on_key().hint(hint)
}

impl Outcome {
    fn text(&self) -> String {
        let Self { file, case, problems } = self;
        let mut out = format!("{}  {file}: {case}\n", if problems.is_empty() { "ok    " } else { "FAILED" });
        let mut document: Option<(&String, &Bson)> = None;
        for problem in problems {
            match problem {
                Problem::Differs { collection, id, differs } => {
                    if document != Some((collection, id)) {
                        out.push_str(&format!("    {collection} {}\n", shown(id)));
                        document = Some((collection, id));
                    }
                    let (expected, found) = differs.shown();
                    let path = if differs.path.is_empty() { "the document" } else { &differs.path };
                    out.push_str(&format!("      {path}\n        expected {expected}\n        found    {found}\n"));
                }
                Problem::Obstacle { rule, target, why, hint } => {
                    let target = target.as_ref().map(|id| format!(", target {}", shown(id))).unwrap_or_default();
                    out.push_str(&format!("    rule {rule}{target}: {why}\n"));
                    out.extend(hint.iter().map(|hint| format!("      {hint}\n")));
                }
            }
        }
        out
    }

    fn json(&self) -> serde_json::Value {
        let value = |value: &Option<Bson>| value.clone().map(Bson::into_canonical_extjson);
        let problems = self.problems.iter().map(|problem| match problem {
            Problem::Differs { collection, id, differs } => {
                let mut out = serde_json::json!({
                    "collection": collection, "_id": id.clone().into_canonical_extjson(), "path": differs.path,
                });
                for (name, value) in [("expected", value(&differs.expected)), ("found", value(&differs.found))] {
                    if let Some(value) = value {
                        out[name] = value;
                    }
                }
                out
            }
            Problem::Obstacle { rule, target, why, hint } => serde_json::json!({
                "rule": rule, "target": value(target), "error": why, "hint": hint,
            }),
        });
        serde_json::json!({
            "file": self.file, "case": self.case, "passed": self.problems.is_empty(),
            "problems": problems.collect::<Vec<_>>(),
        })
    }
}

/// The collections that the rules use, grouped by database.
fn databases(plan: &Plan) -> BTreeMap<String, Vec<String>> {
    let mut out: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Namespace { database, collection } in plan.namespaces() {
        out.entry(database).or_default().push(collection);
    }
    out
}
