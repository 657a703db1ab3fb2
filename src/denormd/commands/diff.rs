//! `denormd diff`: the meaning of a change of the config. Asks no server.

mod keys;
mod render;

use std::{
    io::{self, Read},
    sync::Arc,
};

use serde::Serialize;

use crate::{
    cli::{Layers, Output},
    commands::{Failure, compile, notice, print, print_json, run::demands_restart, terminal::fitted},
};
use denormd_engine::{jobs::prune, preflight};
use denormd_model::field_path::FieldPath;
use denormd_mongo::error::{Error, Kind};
use denormd_rules::{
    config::{self, ChangedSetting, Format, Loaded},
    plan::{
        Plan, Rule, is_once,
        privileges::{Privilege, missing, needed},
    },
};
use keys::{KeyChange, changed_keys, defined, settings};

/// Bytes of a config on standard input, at most.
const LARGEST: u64 = 4 << 20;
/// Settings that are read once, when the daemon starts. Others that a running daemon cannot change make it refuse the
/// config.
const READ_AT_START: [&str; 2] = ["http.listen", "log."];

/// The difference between two configs.
#[derive(Debug, Serialize)]
struct Difference {
    /// True if anything differs.
    changed: bool,
    /// The rules that differ: those of the new config in its order, then the retired ones.
    rules: Vec<RuleChange>,
    /// The rules that the daemon backfills because of the change.
    backfills: Vec<Backfill>,
    /// The indexes and pre-images that the new rules need and the old ones did not.
    needs: Vec<Need>,
    /// The indexes and pre-images that only the old rules needed.
    no_longer_needed: Vec<Need>,
    /// The privileges that the new rules need and the old ones did not, as mongosh writes them.
    privileges: Vec<String>,
    /// The settings that differ.
    settings: Vec<ChangedSetting>,
    /// Settings among these that a running daemon does not change.
    read_at_start: Vec<String>,
    /// True if a running daemon refuses the new config until it is restarted.
    restart: bool,
    /// True if the state of the old rules is not found under the new names of deployment and state database.
    new_deployment: bool,
}

/// The change of one rule.
#[derive(Debug, Serialize)]
struct RuleChange {
    /// Its name in the new config; of a retired rule, in the old one.
    rule: String,
    change: Change,
    /// The old name of a renamed rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    was: Option<String>,
    source: String,
    target: String,
    /// True if it writes nothing.
    shadow: bool,
    /// The keys that differ, of a rule in both configs.
    keys: Vec<KeyChange>,
    /// The paths that it begins to own.
    owns: Vec<Gain>,
    /// The paths that it no longer owns.
    leaves: Vec<Loss>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    Added,
    Changed,
    Renamed,
    Retired,
}

/// A path that a rule begins to own.
#[derive(Debug, Serialize)]
struct Gain {
    path: String,
    /// The rule that owned it before.
    from: Option<String>,
}

/// A path that a rule no longer owns.
#[derive(Debug, Serialize)]
struct Loss {
    collection: String,
    path: String,
    #[serde(flatten)]
    values: Fate,
}

/// The fate of the values at a path that a rule no longer owns.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "values", rename_all = "snake_case")]
enum Fate {
    /// They stay until `denormd prune`.
    Stay,
    /// Another rule owns the path, or a part of it: they stay until that rule writes them.
    TakenOver { by: String },
    /// The rule was `once`: they stay for good, because nothing distinguishes them from the application's.
    LeftToTheApplication,
    /// The rule was in shadow: they belong to the application.
    NotWritten,
}

/// A backfill that the change causes.
#[derive(Debug, Serialize)]
struct Backfill {
    rule: String,
    /// False if it waits for `denormd backfill`.
    automatic: bool,
    /// False in shadow: it only compares.
    writes: bool,
    reason: String,
}

/// A command that creates an index, or enables pre-images.
#[derive(Debug, Serialize)]
struct Need {
    rule: String,
    command: String,
}

/// One of the two configs.
struct Side {
    loaded: Loaded,
    plan: Plan,
}

/// Compares two configs, and prints the meaning of the difference.
pub async fn diff(
    output: Output,
    old: &Layers,
    new: &Layers,
    markdown: bool,
    environment: &[(String, String)],
) -> Result<(), Failure> {
    if old.is_input() && new.is_input() {
        let error = Error::new(Kind::Config, "OLD and NEW are both standard input");
        return Err(error.hint("write one of them to a file").into());
    }
    let (old, new) = match (side(old, new, environment).await, side(new, old, environment).await) {
        (Ok(old), Ok(new)) => match (old, new) {
            (None, None) => return Err(Error::new(Kind::Config, "there is no config to compare").into()),
            // No config is the other one without its rules: its settings are not known to differ.
            (None, Some(new)) => (new.without_rules(), new),
            (Some(old), None) => {
                let new = old.without_rules();
                (old, new)
            }
            (Some(old), Some(new)) => (old, new),
        },
        (Err(old), new) => {
            notice("the old config cannot be used, so nothing is compared");
            if let Err(new) = new {
                notice(&format!("{new}"));
            }
            return Err(old);
        }
        (Ok(_), Err(new)) => {
            notice("the new config cannot be used, so nothing is compared");
            return Err(new);
        }
    };
    let difference = compare(&old, &new);
    match output {
        _ if markdown => print(&render::text(&difference, true)),
        Output::Text => print(&fitted(&render::text(&difference, false))),
        Output::Json => print_json(&difference),
    }
    Ok(())
}

/// Loads and compiles a config. None if it is an empty standard input.
async fn side(layers: &Layers, other: &Layers, environment: &[(String, String)]) -> Result<Option<Side>, Failure> {
    let loaded = if layers.is_input() {
        let mut text = String::new();
        let read = io::stdin().take(LARGEST + 1).read_to_string(&mut text);
        read.map_err(|error| Error::new(Kind::Machine, format!("standard input cannot be read: {error}")))?;
        if text.len() as u64 > LARGEST {
            return Err(Error::new(Kind::Config, "the config on standard input is larger than 4 MiB").into());
        }
        if text.trim().is_empty() {
            return Ok(None);
        }
        let format = other.0.first().and_then(|path| Format::of(path)).unwrap_or(Format::Yaml);
        config::load_text("standard input", &text, format, environment)?
    } else {
        config::load(&layers.0, environment)?
    };
    let plan = compile(&loaded).await?;
    Ok(Some(Side { loaded, plan }))
}

impl Side {
    fn without_rules(&self) -> Self {
        let Plan { name, .. } = &self.plan;
        let plan =
            Plan { name: name.clone(), rules: Vec::new(), order: Vec::new(), feeds: Vec::new(), cascades: false };
        Self { loaded: self.loaded.clone(), plan }
    }

    fn state(&self) -> &str {
        &self.loaded.config.state.database
    }
}

fn compare(old: &Side, new: &Side) -> Difference {
    let new_deployment = (&old.plan.name, old.state()) != (&new.plan.name, new.state()) && !old.plan.rules.is_empty();
    let pairs: Vec<(Option<&Rule>, &Rule)> =
        new.plan.rules.iter().map(|rule| (before(&old.plan, &new.plan, rule), rule.as_ref())).collect();
    let gone =
        |rule: &&Arc<Rule>| !pairs.iter().any(|(before, _)| before.is_some_and(|before| before.name == rule.name));
    let changed = pairs.iter().filter_map(|(before, rule)| of_rule(*before, rule, &old.plan, &new.plan));
    let retired = old
        .plan
        .rules
        .iter()
        .filter(gone)
        .map(|rule| RuleChange { leaves: losses(rule, None, &new.plan), ..RuleChange::new(rule, Change::Retired) });
    let rules: Vec<RuleChange> = changed.chain(retired).collect();
    let backfills = pairs.iter().filter_map(|(before, rule)| backfill(*before, rule, new_deployment)).collect();
    let settings = old.loaded.changed_settings(&new.loaded);
    let at_start = |setting: &&ChangedSetting| READ_AT_START.iter().any(|known| setting.setting.starts_with(known));
    let had: Vec<bson::Document> = needed(&old.plan, old.state()).iter().map(Privilege::document).collect();
    Difference {
        changed: !rules.is_empty() || !settings.is_empty(),
        rules,
        backfills,
        needs: needs(&old.plan, &new.plan),
        no_longer_needed: needs(&new.plan, &old.plan),
        privileges: missing(&needed(&new.plan, new.state()), &had).iter().map(Privilege::shell).collect(),
        read_at_start: settings.iter().filter(at_start).map(|setting| setting.setting.clone()).collect(),
        settings,
        restart: demands_restart(&old.loaded.config, &new.loaded.config),
        new_deployment,
    }
}

/// The old form of a rule: the rule of its name, or one of another name that is gone and did the same work.
fn before<'a>(old: &'a Plan, new: &Plan, rule: &Rule) -> Option<&'a Rule> {
    let is_gone = |known: &Rule| !new.rules.iter().any(|rule| rule.name == known.name);
    // Rules that own one path have filters of the target that exclude each other, so there is at most one.
    let same_work =
        |known: &Rule| known.source == rule.source && known.target == rule.target && known.owned() == rule.owned();
    let named = old.rules.iter().find(|known| known.name == rule.name);
    named.or_else(|| old.rules.iter().find(|known| is_gone(known) && same_work(known))).map(AsRef::as_ref)
}

/// The change of a rule of the new config; None if it is the same.
fn of_rule(before: Option<&Rule>, rule: &Rule, old: &Plan, new: &Plan) -> Option<RuleChange> {
    let Some(before) = before else {
        return Some(RuleChange { owns: gains(None, rule, old, new), ..RuleChange::new(rule, Change::Added) });
    };
    let of = |rule: &Rule| [defined(&rule.definition), settings(rule)].concat();
    let mut keys = changed_keys(&of(before), &of(rule));
    if keys.is_empty() && !rule.has_definition(&before.definition) {
        keys.push(KeyChange::order());
    }
    let renamed = before.name != rule.name;
    if keys.is_empty() && !renamed {
        return None;
    }
    Some(RuleChange {
        was: renamed.then(|| before.name.clone()),
        keys,
        owns: gains(Some(before), rule, old, new),
        leaves: losses(before, Some(rule), new),
        ..RuleChange::new(rule, if renamed { Change::Renamed } else { Change::Changed })
    })
}

impl RuleChange {
    fn new(rule: &Rule, change: Change) -> Self {
        Self {
            rule: rule.name.clone(),
            change,
            was: None,
            source: rule.source.namespace.to_string(),
            target: rule.target.namespace.to_string(),
            shadow: rule.shadow,
            keys: Vec::new(),
            owns: Vec::new(),
            leaves: Vec::new(),
        }
    }
}

/// True if a rule owns this path of the targets of `other`.
fn owns(rule: &Rule, other: &Rule, path: &FieldPath) -> bool {
    rule.target.namespace == other.target.namespace && rule.owned().contains(&path)
}

/// The paths that a rule begins to own.
fn gains(before: Option<&Rule>, rule: &Rule, old: &Plan, new: &Plan) -> Vec<Gain> {
    let gained = rule.owned().into_iter().filter(|path| !before.is_some_and(|before| owns(before, rule, path)));
    // Two rules may own one path on different targets.
    let still =
        |known: &Rule, path: &FieldPath| new.rules.iter().any(|new| new.name == known.name && owns(new, rule, path));
    let from = |path: &FieldPath| {
        let known = old.rules.iter().find(|known| owns(known, rule, path) && !still(known, path));
        known.map(|known| known.name.clone())
    };
    gained.map(|path| Gain { path: path.to_string(), from: from(path) }).collect()
}

/// The paths that a rule no longer owns, and the fate of their values.
fn losses(before: &Rule, rule: Option<&Rule>, new: &Plan) -> Vec<Loss> {
    let stay = prune::left_by(new, &before.definition);
    let gone = before.owned().into_iter().filter(|path| !rule.is_some_and(|rule| owns(rule, before, path)));
    let collection = before.target.namespace.to_string();
    let other = |path: &FieldPath| {
        let mut others = new.rules.iter().filter(|rule| rule.target.namespace == before.target.namespace);
        others.find(|rule| rule.owned().into_iter().any(|owned| owned.overlaps_loosely(path)))
    };
    let loss = |path: &FieldPath| {
        let values = match other(path) {
            _ if stay.iter().any(|stay| stay.path == *path) => Fate::Stay,
            None if is_once(&before.definition) && !before.shadow => Fate::LeftToTheApplication,
            Some(other) if !before.shadow => Fate::TakenOver { by: other.name.clone() },
            _ => Fate::NotWritten,
        };
        Loss { collection: collection.clone(), path: path.to_string(), values }
    };
    gone.map(loss).collect()
}

/// The backfill of a rule of the new config, if the daemon starts one: it knows a rule by its name and its definition.
fn backfill(before: Option<&Rule>, rule: &Rule, new_deployment: bool) -> Option<Backfill> {
    let reason = match before {
        _ if new_deployment => "the deployment has no state yet".to_owned(),
        None => "the rule is new".to_owned(),
        Some(before) if before.name != rule.name => "the daemon knows a rule by its name".to_owned(),
        Some(before) if rule.has_definition(&before.definition) => return None,
        Some(before) => {
            let keys = changed_keys(&defined(&before.definition), &defined(&rule.definition));
            let keys: Vec<String> = keys.iter().map(|change| render::code(&change.key)).collect();
            let keys = if keys.is_empty() { KeyChange::order().key } else { keys.join(", ") };
            format!("its definition has changed: {keys}")
        }
    };
    let automatic = rule.backfill == config::BackfillMode::Auto;
    Some(Backfill { rule: rule.name.clone(), automatic, writes: !rule.shadow, reason })
}

fn needs(before: &Plan, after: &Plan) -> Vec<Need> {
    let findings = preflight::additional(before, after).into_iter();
    findings.filter_map(|finding| Some(Need { rule: finding.rule, command: finding.fix?.shell })).collect()
}
