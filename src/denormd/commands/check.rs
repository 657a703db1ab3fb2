//! `denormd check`: compares targets with their definition, and repairs them on request.

use std::{collections::BTreeMap, sync::Arc};

use bson::Bson;

use crate::{
    cli::{CheckOptions, Output},
    commands::{
        Failure, backfill::led_otherwise, chosen, connected, leader::with_a_leader, notice, print, progress::Progress,
        state_note, terminal::fitted,
    },
};
use denormd_engine::{
    checkpoint::{progress::Tally, requests::RequestedWork, rule_record::RuleRecord, store::Store},
    deployment::lease,
    jobs::check::{Check, DifferenceKind, Differing, DifferingTarget, Scope},
    reconcile::{Context, scan},
};
use denormd_model::text::{counted, shown, shown_or_nothing};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::{config::Loaded, plan::Rule};

/// Number of targets in one request to the leader.
const REQUEST: usize = 1000;

/// Compares the targets of the chosen rules with their definition.
pub async fn check(loaded: &Loaded, output: Output, options: &CheckOptions) -> std::result::Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    let states: BTreeMap<String, RuleRecord> = store.rules(&context.server).await?.into_iter().collect();
    let rules = chosen(&context.plan, &options.rule)?;
    let is_run = |rule: &Rule| states.get(&rule.name).is_some_and(|record| record.runs(rule));
    // The copies follow the leader's definition: all would differ, and the leader would repair them by its own.
    if let Some(other) = rules.iter().find(|rule| !is_run(rule))
        && lease::is_held(&context.server, store.database(), store.ids()).await?
    {
        return Err(led_otherwise(&other.name).into());
    }
    let mut left = Left::default();
    for rule in rules {
        let one = RuleCheck { loaded, context: &context, store: &store, rule, output, options };
        if let Some(note) = state_note(rule, states.get(&rule.name)) {
            notice(&format!("{}: {note}", rule.name));
        }
        let Left { differing, refused, undecided } = one.run().await?;
        left.differing += differing;
        left.refused += refused;
        left.undecided += undecided;
    }
    match left {
        Left { differing: 1, .. } => Err(Failure::Differs("one target differs from its definition".to_owned())),
        Left { differing: n @ 2.., .. } => Err(Failure::Differs(format!("{n} targets differ from their definition"))),
        Left { refused: n @ 1.., .. } => {
            let unknown = format!("{} could not be compared", counted(n, "document"));
            let hint = "`denormd dead-letters list` says which and why; `denormd explain RULE ID` shows how a target is \
                computed";
            Err(Error::new(Kind::Refused, unknown).hint(hint).into())
        }
        Left { undecided: n @ 1.., .. } => {
            let changed = format!(
                "{} changed at every comparison and could not be judged; no other target differs",
                counted(n, "target")
            );
            Err(Error::new(Kind::Unavailable, changed).hint("run the command again while less is written").into())
        }
        Left { .. } => Ok(()),
    }
}

/// Numbers of targets that are not known to be right.
#[derive(Default)]
struct Left {
    differing: u64,
    /// Their values cannot be computed, or they are sources without a usable key.
    refused: u64,
    undecided: u64,
}

struct RuleCheck<'a> {
    loaded: &'a Loaded,
    context: &'a Arc<Context>,
    store: &'a Store,
    rule: &'a Arc<Rule>,
    output: Output,
    options: &'a CheckOptions,
}

/// Counts in addition to the tally.
#[derive(Default)]
struct Counts {
    listed: u64,
    kinds: BTreeMap<DifferenceKind, u64>,
}

impl RuleCheck<'_> {
    /// Checks the rule, and repairs it on request.
    async fn run(&self) -> std::result::Result<Left, Failure> {
        let scope =
            Scope { sample: self.options.sample, resume: self.options.resume, values: self.options.show_values };
        let mut check = Check::new(self.context, self.store, self.rule, scope).await?;
        let all = scan::count(self.context, self.rule, None, false).await;
        let total = self.options.sample.map_or(all, |size| Some(all.map_or(size, |all| size.min(all))));
        let mut bar = Progress::new(&self.rule.name);
        bar.set(check.tally.compared, total);
        let mut counts = Counts::default();
        while let Some(found) = check.next().await? {
            bar.set(check.tally.compared, total);
            for found in &found {
                found.differing.iter().for_each(|path| *counts.kinds.entry(path.kind).or_default() += 1);
            }
            let left = if self.options.repair && !found.is_empty() {
                self.repair(&mut check, &found).await?
            } else {
                Vec::new()
            };
            for found in &found {
                let repaired = self.options.repair.then(|| !left.contains(&found.target));
                bar.beside(|| self.list(found, repaired, &mut counts));
            }
        }
        bar.end();
        self.sum_up(&check.tally, &counts);
        let Tally { differing, repaired, refused, undecided, .. } = check.tally;
        Ok(Left { differing: differing.saturating_sub(repaired), refused, undecided })
    }

    /// Has the leader reconcile these targets. Returns those that are not right even so.
    async fn repair(
        &self,
        check: &mut Check<'_>,
        found: &[DifferingTarget],
    ) -> std::result::Result<Vec<Bson>, Failure> {
        let ids: Vec<Bson> = found.iter().map(|found| found.target.clone()).collect();
        let server = &self.context.server;
        let work = async {
            for ids in ids.chunks(REQUEST) {
                let request =
                    self.store.request(server, &self.rule.name, &RequestedWork::Reconcile(ids.to_vec())).await?;
                self.store.until_done(server, request).await?;
            }
            Ok(())
        };
        with_a_leader(self.loaded, self.context, work).await?;
        Ok(check.again(&ids).await?)
    }

    fn list(&self, found: &DifferingTarget, repaired: Option<bool>, counts: &mut Counts) {
        counts.listed += 1;
        if self.options.limit > 0 && counts.listed > self.options.limit {
            return;
        }
        match self.output {
            Output::Text => {
                let known = if found.set_aside { " (a dead letter)" } else { "" };
                let repaired = match repaired {
                    Some(true) => ", repaired",
                    Some(false) => ", NOT repaired",
                    None => "",
                };
                for differing in &found.differing {
                    let Differing { path, element, kind, words, values } = differing;
                    let element = element.map(|nth| format!(" (element {nth})")).unwrap_or_default();
                    let values = values.as_ref().map(show).unwrap_or_default();
                    let target = shown(&found.target);
                    let rule = &self.rule.name;
                    print(&fitted(&format!(
                        "{rule} {target} {path}{element}: {}: {words}{values}{known}{repaired}\n",
                        kind.name()
                    )));
                }
            }
            Output::Json => print(&format!("{}\n", json(&self.rule.name, found, repaired))),
        }
    }

    fn sum_up(&self, tally: &Tally, counts: &Counts) {
        let rule = &self.rule.name;
        if self.output == Output::Json {
            let kinds: serde_json::Map<String, serde_json::Value> =
                counts.kinds.iter().map(|(kind, count)| (kind.name().to_owned(), (*count).into())).collect();
            let sum = serde_json::json!({
                "rule": rule, "compared": tally.compared, "differing": tally.differing, "repaired": tally.repaired,
                "undecided": tally.undecided, "refused": tally.refused, "resumed": tally.resumed, "kinds": kinds,
            });
            print(&format!("{sum}\n"));
            return;
        }
        let unlisted =
            counts.listed.saturating_sub(if self.options.limit == 0 { u64::MAX } else { self.options.limit });
        if unlisted > 0 {
            print(&format!("{rule}: {unlisted} more are not listed (--limit)\n"));
        }
        let kinds: Vec<String> = counts.kinds.iter().map(|(kind, n)| format!("{n} {}", kind.name())).collect();
        let Tally { compared, differing, repaired, .. } = tally;
        let differ = if *differing == 1 { "differs" } else { "differ" };
        let mut line = format!("{rule}: {} compared, {differing} {differ}", counted(*compared, "target"));
        if !kinds.is_empty() {
            line.push_str(&format!(" (paths: {})", kinds.join(", ")));
        }
        if self.options.repair || *repaired > 0 {
            line.push_str(&format!(", {repaired} repaired"));
        }
        if tally.undecided > 0 {
            line.push_str(&format!(", {} changed at every comparison and are undecided", tally.undecided));
        }
        if tally.refused > 0 {
            line.push_str(&format!(", {} cannot be computed (see `denormd dead-letters list`)", tally.refused));
        }
        if tally.resumed {
            line.push_str(", with what was counted before it was interrupted");
        }
        print(&fitted(&format!("{line}\n")));
    }
}

fn show((expected, stored): &(Option<Bson>, Option<Bson>)) -> String {
    format!("; expected {}, stored {}", shown_or_nothing(expected.as_ref()), shown_or_nothing(stored.as_ref()))
}

fn json(rule: &str, found: &DifferingTarget, repaired: Option<bool>) -> serde_json::Value {
    let paths = found.differing.iter().map(|differing| {
        let mut path = serde_json::json!({
            "path": differing.path, "element": differing.element, "kind": differing.kind, "words": differing.words,
        });
        if let Some((expected, stored)) = &differing.values {
            for (name, value) in [("expected", expected), ("stored", stored)] {
                if let Some(value) = value {
                    path[name] = value.clone().into_relaxed_extjson();
                }
            }
        }
        path
    });
    let mut line = serde_json::json!({
        "rule": rule, "target": found.target.clone().into_relaxed_extjson(), "set_aside": found.set_aside,
        "differences": paths.collect::<Vec<_>>(),
    });
    if let Some(repaired) = repaired {
        line["repaired"] = repaired.into();
    }
    line
}
