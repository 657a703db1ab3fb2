//! `denormd prune`

use crate::{
    cli::Output,
    commands::{
        Failure, connected,
        leader::{self, unless_interrupted},
        notice, print, print_json,
        run::signals::Signals,
        without_record,
    },
};
use denormd_engine::{
    checkpoint::{
        requests::RequestedWork,
        rule_record::{Retired, RuleRecord},
    },
    jobs::prune::{OtherDeployments, count, retired},
};
use denormd_model::{rule_state::RuleState, text::counted};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::{config::Loaded, plan::is_same_definition};

/// Has the leader remove the retired fields of a rule, or of all rules that the state knows; takes the lease where nobody
/// leads.
pub async fn prune(loaded: &Loaded, output: Output, rule: Option<&str>, dry_run: bool) -> Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    let known = store.rules(&context.server).await?;
    let is_active = |rule: &str| context.plan.named(rule).is_some();
    if let Some(rule) = rule.filter(|rule| known.iter().all(|(name, _)| name != rule)) {
        return Err(without_record(&context, &known, rule).into());
    }
    let chosen = || known.iter().filter(|(name, _)| rule.is_none_or(|rule| rule == name));
    // A command that is refused removes nothing, so all rules are checked first.
    let all: Vec<Retired> = chosen().flat_map(|(name, _)| retired(&context.plan, &known, name)).collect();
    if let Some(owner) = OtherDeployments::default().objection(&context, &all).await? {
        let error = Error::new(Kind::State, format!("nothing is pruned: {owner}"));
        return Err(error
            .hint("to remove that field, first remove that rule from the config of its deployment")
            .into());
    }
    let mut signals = Signals::listen(&[])?;
    let (mut pruned, mut failed) = (Vec::new(), None);
    for (name, state) in chosen() {
        let retired = retired(&context.plan, &known, name);
        let mut paths = Vec::new();
        for retired in &retired {
            let documents = unless_interrupted(name, &mut signals, count(&context, retired)).await?;
            paths.push((retired.clone(), documents));
        }
        if !dry_run && !retired.is_empty() {
            // The rule that is named may have left the config while no daemon was running.
            let gone = rule.into_iter().collect::<Vec<_>>();
            let work = (name.as_str(), RequestedWork::Prune(retired));
            match leader::request(loaded, &context, &store, work, &gone, &mut signals).await {
                Ok(()) => {}
                // A refusal for one rule does not stop the others.
                Err(Failure::Failed(error)) if rule.is_none() && error.kind == Kind::State => {
                    notice(&format!("{name}: {error}"));
                    failed.get_or_insert(error);
                    continue;
                }
                Err(failure) => return Err(failure),
            }
            // A leader may have recorded meanwhile that the rule is not in its config.
            let now = store.rules(&context.server).await?.into_iter().find(|(other, _)| other == name);
            let is_same = |now: &RuleRecord| {
                is_same_definition(&now.definition, &state.definition) && now.retired == state.retired
            };
            if let Some((_, now)) = now.filter(|(_, now)| is_same(now)) {
                let is_removed = !is_active(name) && now.state == RuleState::Removed;
                store.forget(&context.server, name, &now, is_removed).await?;
            }
        }
        let done = Pruned { rule: name, paths };
        if output == Output::Text {
            print(&done.text(dry_run));
        }
        pruned.push(done);
    }
    match (output, rule, pruned.as_slice()) {
        (Output::Json, Some(_), [done]) => print_json(&done.json(dry_run)),
        (Output::Json, ..) => {
            let rules: Vec<_> =
                pruned.iter().filter(|done| !done.paths.is_empty()).map(|done| done.json(dry_run)).collect();
            print_json(&serde_json::json!({"rules": rules, "dry_run": dry_run}));
        }
        (Output::Text, rule, done) if failed.is_none() && done.iter().all(|done| done.paths.is_empty()) => {
            let which = rule.map_or_else(|| "no rule has".to_owned(), |rule| format!("`{rule}` has no"));
            print(&format!("{which} retired fields: nothing to prune\n"));
        }
        (Output::Text, ..) => {}
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

/// The retired fields of one rule, each with the number of documents that had it.
struct Pruned<'a> {
    rule: &'a str,
    paths: Vec<(Retired, u64)>,
}

impl Pruned<'_> {
    fn text(&self, dry_run: bool) -> String {
        let verb = if dry_run { "would be removed from" } else { "was removed from" };
        let line = |(Retired { collection, path, filter }, documents): &(Retired, u64)| {
            let chosen = if filter.is_some() { ", among those that match its `where`" } else { "" };
            format!("{}: {path} {verb} {} of {collection}{chosen}\n", self.rule, counted(*documents, "document"))
        };
        self.paths.iter().map(line).collect()
    }

    fn json(&self, dry_run: bool) -> serde_json::Value {
        let paths = self.paths.iter().map(|(Retired { collection, path, .. }, documents)| {
            serde_json::json!({"collection": collection, "path": path.to_string(), "documents": documents})
        });
        serde_json::json!({"rule": self.rule, "dry_run": dry_run, "paths": paths.collect::<Vec<_>>()})
    }
}
