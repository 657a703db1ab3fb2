//! `denormd plan`: checks the config, and whether the cluster has everything it needs.

use std::{collections::BTreeMap, fmt::Write as _};

use bson::{Bson, Document};

use crate::{
    cli::{Output, PlanOptions},
    commands::{Failure, compile, context, print, print_as, terminal::fitted},
};
use denormd_engine::{
    checkpoint::earlier,
    deployment::lease,
    inspection::{
        Distribution, Inspection, PreImages, Problem, References, Sample, ShardKey, Sharded, Sizes,
        adoption::{Basis, Change, ChangeKind, EarlierWrites, Figures, Standing},
        created::expiring,
        deployment::rules_that_stop,
        inspection,
        suspicion::{Doubts, doubts, suspicions, without_a_server},
    },
    jobs::prune::{OtherDeployments, written_by},
    metrics::Metrics,
    preflight::{self, Finding},
};
use denormd_model::{
    key::whole_number,
    text::{counted, shown, shown_or_nothing, span},
};
use denormd_mongo::{Server, code, error::Kind, skew};
use denormd_rules::{
    config::{ConfigPath, Loaded, LocatedMistake, Mistake, Place, Undo},
    plan::{Keyed, Pair, Plan, Rule, reference::Role},
};

/// Results that depend on the cluster.
#[derive(Default)]
struct Live {
    /// The cluster is a sharded one.
    sharded: bool,
    applied: Vec<String>,
    findings: Vec<Finding>,
    inspections: Vec<Inspection>,
    /// Likely mistakes, with their places in the config.
    suspicions: Vec<LocatedMistake>,
    /// Rules that would be blocked until somebody agrees, with the reasons.
    blocked: Vec<(String, String)>,
    /// The config of kept values.
    undo: Option<Undo>,
}

/// Describes the rules and their needs; with `apply`, creates what is missing.
pub async fn plan(loaded: &Loaded, output: Output, options: &PlanOptions) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let live = if options.offline { unasked(loaded, &plan) } else { look(loaded, output, &plan, options).await? };
    print_as(output, || fitted(&text(&plan, &live, options)), || json(&plan, &live, options));
    match (live.findings.len(), live.blocked.len()) {
        (0, 0) => Ok(()),
        (0, blocked) => {
            Err(Failure::Refused(format!("{} would be blocked until you agree", counted(blocked as u64, "rule"))))
        }
        (findings, blocked) => {
            Err(Failure::Refused(format!("{} needed before the rules can run", steps(findings + blocked))))
        }
    }
}

/// The results of the checks that need no server.
fn unasked(loaded: &Loaded, plan: &Plan) -> Live {
    let suspected: Vec<Mistake> = plan.rules.iter().flat_map(|rule| without_a_server(rule)).collect();
    Live { suspicions: loaded.located(&suspected), ..Live::default() }
}

async fn look(loaded: &Loaded, output: Output, plan: &Plan, options: &PlanOptions) -> Result<Live, Failure> {
    let context = context(loaded, plan.clone(), Metrics::new()?).await?;
    let findings = preflight::privileges(&context.server, plan, &loaded.config.state.database).await?;
    let sharded = context.server.is_router().await?;
    let undo = Some(loaded.config.undo.clone());
    let mut live = Live { sharded, findings, undo, ..Live::default() };
    if !live.findings.is_empty() {
        // Without these privileges, all further checks would fail.
        return Ok(live);
    }
    let mut known = BTreeMap::new();
    live.findings = check(&context.server, plan, &mut known).await?;
    // Missing collections are created in the first pass, and their indexes in the second.
    for _ in 0..if options.apply { 2 } else { 0 } {
        for fix in live.findings.iter().filter_map(|finding| finding.fix.as_ref()) {
            if output == Output::Text {
                print(&format!("{}\n", fix.shell));
            }
            live.applied.push(fix.shell.clone());
            preflight::apply(&context.server, fix).await.map_err(|error| match error.code {
                Some(code::UNAUTHORIZED) => error.hint("`denormd role --with-apply` prints a role that may do this"),
                _ => error,
            })?;
        }
        live.findings = check(&context.server, plan, &mut known).await?;
    }
    live.findings.extend(clocks(&context.server).await);
    let earlier = earlier::definitions(&context.server, &loaded.config.state.database, plan).await?;
    match inspection(&context, plan, options.sample, &earlier).await {
        Ok(inspections) => live.inspections = inspections,
        // The findings already contain the reason for the refusal.
        Err(error) if error.kind == Kind::Refused && !live.findings.is_empty() => {}
        Err(error) => return Err(error.into()),
    }
    let mut suspected = Vec::new();
    for rule in &plan.rules {
        suspected.extend(Box::pin(suspicions(&context.server, plan, rule)).await?);
    }
    let mut warnings = Vec::new();
    for rule in &plan.rules {
        warnings.extend(expiring(&context.server, rule).await?);
    }
    for finding in &mut live.findings {
        let Some(at) = finding.at.clone() else { continue };
        // A finding replaces an equal warning.
        suspected.retain(|mistake| mistake.at != at || mistake.message != finding.message);
        place(loaded, output, Mistake::new(at, ""), finding);
    }
    let others = OtherDeployments::default();
    for inspection in &live.inspections {
        let Some(rule) = plan.named(&inspection.rule) else { continue };
        // A rule that already runs with this definition has been agreed to.
        if rule.shadow || earlier.get(&rule.name).is_some_and(|before| rule.has_definition(before)) {
            continue;
        }
        let owner = others.objection(&context, &written_by(rule)).await?;
        let effect = blocked(rule, inspection, earlier.get(&rule.name), &suspected);
        let why: Vec<String> = owner.into_iter().chain(effect).collect();
        if !why.is_empty() {
            live.blocked.push((rule.name.clone(), why.join("; ")));
        }
    }
    for inspection in &live.inspections {
        let Some(rule) = plan.named(&inspection.rule) else { continue };
        for problem in inspection.problems(rule) {
            report((loaded, output), rule, problem, &mut suspected, &mut live.findings);
        }
    }
    suspected.append(&mut warnings);
    suspected.extend(rules_that_stop(&context.server, &loaded.config.state.database, plan).await?);
    live.suspicions = loaded.located(&suspected);
    Ok(live)
}

/// Checks the requirements of the rules. What a rule would need whose `match` looks reversed is not created, nor is an index on
/// a field whose name looks misspelt. `known` holds the doubts about each rule by its name: they are looked for once.
async fn check(server: &Server, plan: &Plan, known: &mut BTreeMap<String, Doubts>) -> Result<Vec<Finding>, Failure> {
    let mut findings = preflight::check(server, plan).await?;
    for finding in &mut findings {
        let Some(fix) = &finding.fix else { continue };
        let Some(rule) = plan.named(&finding.rule) else { continue };
        if !known.contains_key(&rule.name) {
            known.insert(rule.name.clone(), Box::pin(doubts(server, plan, rule)).await?);
        }
        let Some(doubts) = known.get(&rule.name) else { continue };
        let hint = if doubts.is_reversed {
            Some("`match` looks reversed: correct it first; `--apply` does not create this".to_owned())
        } else {
            doubts.misspelt(&fix.database, &fix.command).map(|(path, meant)| {
                format!(
                    "`{path}` looks misspelt; did you mean `{meant}`? Correct it first; `--apply` does not create this. If the \
                     name is right, create the index yourself"
                )
            })
        };
        if hint.is_some() {
            (finding.fix, finding.hint) = (None, hint);
        }
    }
    Ok(findings)
}

/// Adds a problem of the sampled documents to the findings, or to the warnings.
fn report(
    (loaded, output): (&Loaded, Output),
    rule: &Rule,
    problem: Problem,
    warnings: &mut Vec<Mistake>,
    findings: &mut Vec<Finding>,
) {
    let Problem { message, hint, is_general, at } = problem;
    let is_known = |known: &Mistake| at.as_ref().is_some_and(|at| (&known.at, known.on_key) == (&at.at, at.on_key));
    if is_general {
        warnings.retain(|known| !is_known(known));
        let (rule, hint) = (rule.name.clone(), Some(hint));
        let mut finding = Finding { rule, message, kind: Kind::Config, fix: None, hint, at: None };
        if let Some(at) = at {
            place(loaded, output, at, &mut finding);
        }
        findings.push(finding);
    } else if !warnings.iter().any(is_known) {
        let at = at.unwrap_or_else(|| Mistake::new(ConfigPath::rule(rule.id.0), ""));
        warnings.push(Mistake { message, ..at }.hint(hint));
    }
}

/// Adds the place in the config to a finding; in a text with the line of the file.
fn place(loaded: &Loaded, output: Output, at: Mistake, finding: &mut Finding) {
    let located = loaded.located(&[at]);
    let Some(place) = located.first().map(|located| &located.place) else { return };
    let Place { file, line: Some(line), .. } = place else { return };
    finding.message = format!("{file}:{line}: {}", finding.message);
    for line in place.shown().iter().filter(|_| output == Output::Text) {
        finding.message.push_str(&format!("\n   {line}"));
    }
}

/// Reports differing clocks, which delay failovers and can even make them unsafe.
async fn clocks(server: &Server) -> Option<Finding> {
    let found = skew::skew(server).await.filter(|seconds| *seconds >= skew::LARGE);
    found.map(|seconds| Finding {
        at: None,
        rule: String::new(),
        kind: Kind::Config,
        message: format!("the clocks of the replica set's members differ by {seconds:.0} s"),
        fix: None,
        hint: Some(format!(
            "synchronise them (NTP): after a failover, the takeover from a lost leader may be delayed by that difference, and above {} s a stale write is possible",
            lease::MOST_SKEW.as_secs()
        )),
    })
}

fn text(plan: &Plan, live: &Live, options: &PlanOptions) -> String {
    let mut out = String::new();
    if live.sharded {
        out.push_str("EXPERIMENTAL: this is a sharded cluster, on which denormd has never run\n\n");
    }
    for rule in &plan.rules {
        let owned: Vec<String> = rule.owned().into_iter().map(ToString::to_string).collect();
        let pairs: Vec<String> =
            rule.reference.pairs.iter().map(|pair| format!("{} = {}", pair.target, matched(pair))).collect();
        let keyed = if rule.keyed == Keyed::Value { "" } else { ", target by target" };
        let shadow = if rule.shadow { " (in shadow: writes nothing)" } else { "" };
        writeln!(out, "{}: {} -> {}{shadow}", rule.name, rule.source.namespace, rule.target.namespace).ok();
        writeln!(out, "  match       {}{keyed}", pairs.join(", ")).ok();
        writeln!(out, "  owns        {}", owned.join(", ")).ok();
        if let Some(creates) = &rule.creates {
            let deletes = if creates.keeps { "never deletes it" } else { "deletes it with the last of them" };
            writeln!(out, "  creates     a document for each key that has sources, and {deletes}").ok();
        }
        if let Some(path) = &rule.touch {
            writeln!(out, "  touch       {path} gets the server's time with each change of a target by this rule").ok();
            writeln!(
                out,
                "              after the first backfill, clients that sync by this path fetch all changed targets again"
            )
            .ok();
        }
        match live.inspections.iter().find(|inspection| inspection.rule == rule.name) {
            Some(inspection) => inspected(&mut out, rule, inspection),
            None if rule.needs_pre_images() => {
                let command = preflight::enable_pre_images(&rule.source.namespace, true).shell;
                writeln!(out, "  pre-images  {} must keep them: {command}", rule.source.namespace).ok();
            }
            None => {}
        }
    }
    out.push('\n');
    existing(&mut out, plan, live, options);
    for suspicion in &live.suspicions {
        writeln!(out, "warning: {suspicion}\n").ok();
    }
    match (live.findings.as_slice(), live.blocked.as_slice(), live.suspicions.len()) {
        ([], [], 0) if options.offline => out.push_str("the config is sound (the cluster was not asked)\n"),
        ([], [], 0) => out.push_str("ready\n"),
        ([], [], warnings) => {
            let warnings = if warnings == 1 { "warning".to_owned() } else { counted(warnings as u64, "warning") };
            let can = if options.offline {
                "the config can be used (the cluster was not asked)"
            } else {
                "the rules can run"
            };
            writeln!(out, "{can}, but read the {warnings} above first").ok();
        }
        (findings, blocked, _) => {
            out.push_str(&todo(findings));
            blocked.iter().enumerate().for_each(|(nth, rule)| would_block(&mut out, findings.len() + nth + 1, rule));
        }
    }
    out
}

/// The source's side of an entry of `match`: a path, or an interval of it.
fn matched(pair: &Pair) -> String {
    let Some(bucket) = &pair.bucket else { return pair.source.to_string() };
    let text = |name: &str| bucket.arguments.get_str(name).unwrap_or_default();
    let size = bucket.arguments.get("binSize").and_then(whole_number).filter(|size| *size > 1);
    let length = size.map_or_else(|| text("unit").to_owned(), |size| format!("{size} {}s", text("unit")));
    let zone = if text("timezone").is_empty() { String::new() } else { format!(", {}", text("timezone")) };
    format!("{} by {length}{zone}", pair.source)
}

fn would_block(out: &mut String, nth: usize, (rule, why): &(String, String)) {
    writeln!(out, "{nth}. rule {rule}: it will be blocked, because {why}").ok();
    writeln!(
        out,
        "   once the daemon runs, `denormd unblock {rule}` agrees; `adopt: true` in the rule agrees beforehand"
    )
    .ok();
}

/// Describes the effect of the rules on existing data.
fn existing(out: &mut String, plan: &Plan, live: &Live, options: &PlanOptions) {
    if live.inspections.is_empty() {
        return;
    }
    out.push_str("existing data\n");
    for Inspection { rule, unsettled_by: feeder, adoption: count, .. } in &live.inspections {
        let in_shadow = plan.rules.iter().any(|known| known.name == *rule && known.shadow);
        let shadow = if in_shadow { "; in shadow: nothing is written" } else { "" };
        writeln!(out, "  {rule}: {} ({}{shadow})", changes(&count.figures), count.figures.stated_basis()).ok();
        if let Some(feeder) = feeder {
            writeln!(out, "    as of now: `{feeder}` has not yet written fields that this rule reads").ok();
        }
        for change in count.examples.iter().filter(|_| options.show_values) {
            writeln!(out, "    {}", example(change)).ok();
        }
        if let Some(kept) = live.undo.as_ref().filter(|_| !in_shadow).and_then(|undo| kept(rule, &count.figures, undo))
        {
            writeln!(out, "    {kept}").ok();
        }
    }
    let mut total = Figures::default();
    for Inspection { adoption: count, .. } in &live.inspections {
        let Figures { adds, overwrites, removes, deletes, .. } = &count.figures;
        total.adds += adds;
        total.overwrites += overwrites;
        total.removes += removes;
        total.deletes += deletes;
        total.inserts = total.inserts.into_iter().chain(count.figures.inserts).reduce(|one, other| one + other);
    }
    let is_all = live.inspections.iter().all(|of| of.adoption.figures.basis == Basis::All);
    let least = if is_all { "" } else { ", at least" };
    writeln!(out, "  in total{least}: {}\n", changes(&total)).ok();
}

/// Describes what is kept of the values that a rule's first backfill would replace or delete; None if it does neither.
pub(super) fn kept(rule: &str, figures: &Figures, undo: &Undo) -> Option<String> {
    let (number, bytes) = figures.kept();
    let is_one = number == 1;
    let (they, are) = if is_one { ("it", "is") } else { ("they", "are") };
    let about = if figures.basis == Basis::Some { "about " } else { "" };
    let then = match (undo.enabled, undo.max_bytes) {
        (false, _) => format!("{they} {are} not kept (undo.mode is off)"),
        (true, most) if bytes > most => format!(
            "only {} MB of about {} MB are kept (undo.max_bytes), for {} (`denormd undo {rule}`)",
            most >> 20,
            bytes >> 20,
            span(undo.keep)
        ),
        (true, _) => format!("{they} {are} kept for {} (`denormd undo {rule}`)", span(undo.keep)),
    };
    let replaces = format!("{about}{} would be overwritten or removed: {then}", counted(number, "value"));
    let deletes = format!("deleted documents and elements are not kept for `denormd undo {rule}`");
    match (number > 0, figures.deletes > 0) {
        (true, true) => Some(format!("{replaces}; {deletes}")),
        (true, false) => Some(replaces),
        (false, true) => Some(deletes),
        (false, false) => None,
    }
}

fn changes(figures: &Figures) -> String {
    let Figures { adds, overwrites, removes, deletes, .. } = figures;
    let inserts = figures.inserts.map(|documents| format!(", inserts {documents}")).unwrap_or_default();
    let deletes = if *deletes == 0 { String::new() } else { format!(", deletes {deletes}") };
    format!("adds {adds}, overwrites {overwrites}, removes {removes}{deletes}{inserts}")
}

fn example(change: &Change) -> String {
    let Change { kind, target, path, stored, expected } = change;
    let (stored, expected) = (shown_or_nothing(stored.as_ref()), shown_or_nothing(expected.as_ref()));
    let verb = match kind {
        ChangeKind::Add => "add",
        ChangeKind::Overwrite => "overwrite",
        ChangeKind::Remove => "remove",
        ChangeKind::Delete => {
            return format!("delete {}, or its element with `{path}`: {stored}", shown(target));
        }
    };
    format!("{verb} `{path}` of {}: {stored} -> {expected}", shown(target))
}

/// The reason why a new or changed rule would be blocked for its effect on existing data. `before` is its last definition.
fn blocked(rule: &Rule, inspection: &Inspection, before: Option<&Document>, suspected: &[Mistake]) -> Option<String> {
    if rule.adopt {
        return None;
    }
    let own = EarlierWrites::of(rule, before);
    let standing = if own.paths.is_empty() { Standing::New } else { Standing::Changed };
    let figures = &inspection.adoption.figures;
    // Nothing can be counted without the index. The next run counts again once it exists, if the rule asks for one.
    let lacks_index = !rule.allow_scan && inspection.lookups.iter().any(|lookup| lookup.index.is_none());
    if figures.compared == 0 && lacks_index {
        return None;
    }
    let at = ConfigPath::rule(rule.id.0);
    let mistake = suspected.iter().find(|mistake| mistake.at.0.starts_with(&at.0)).filter(|_| figures.replaces_many());
    let mut why = figures.objections(standing);
    if let (Some(feeder), Some(at_stake)) = (&inspection.unsettled_by, figures.at_stake(rule, &own)) {
        why.push(Figures::unknown_before(feeder, &at_stake));
    }
    if why.is_empty() {
        why.push(figures.suspected(mistake?));
    }
    Some(why.join("; "))
}

fn inspected(out: &mut String, rule: &Rule, inspection: &Inspection) {
    let reads = |paths: &[String]| if paths.is_empty() { "nothing".to_owned() } else { paths.join(", ") };
    writeln!(out, "  reads       source: {}", reads(&inspection.source_reads)).ok();
    writeln!(out, "              target: {}", reads(&inspection.target_reads)).ok();
    if let Some(tree) = rule.tree {
        let (from, levels) = match tree.parent {
            Role::Target => ("its parent", "from the roots down"),
            Role::Source => ("its children", "from the leaves up"),
        };
        let most = counted(tree.max_depth as u64, "ancestor");
        writeln!(out, "  tree        each document follows {from}, level by level {levels}; at most {most}").ok();
    } else if let Some(of_target) = &rule.of_target {
        let why = if of_target.is_empty() {
            "the sources of all its keys are looked up together"
        } else {
            "they are computed from it"
        };
        writeln!(out, "  values      of each target on its own: {why}").ok();
    }
    for lookup in &inspection.lookups {
        let index = lookup.index.as_ref().map_or_else(|| "NO INDEX".to_owned(), |index| format!("index {index}"));
        writeln!(out, "  lookup      {}: {index} of {}", lookup.what, lookup.collection).ok();
    }
    if let Some(PreImages { collection, kept, command }) = &inspection.pre_images {
        match kept {
            Some(true) => writeln!(out, "  pre-images  {collection} keeps them").ok(),
            _ => writeln!(out, "  pre-images  {collection} must keep them: {command}").ok(),
        };
    }
    for Sharded { collection, key } in &inspection.sharded {
        let by = match key {
            ShardKey::Paths(paths) => format!("sharded by {}", paths.join(", ")),
            ShardKey::Unknown => "perhaps sharded: this user may not read config.collections".to_owned(),
        };
        writeln!(out, "  sharding    {collection} is {by}").ok();
    }
    if let Some(sample) = &inspection.sample {
        sampled(out, rule, sample);
    }
}

fn sampled(out: &mut String, rule: &Rule, sample: &Sample) {
    for references in &sample.references {
        let References { kind, count, resolved, .. } = references;
        let share = resolved * 100 / (*count).max(1);
        let held = sample.held_by;
        writeln!(out, "  references  of type {kind}: {resolved} of {count} resolve ({share}%), from sampled {held}s")
            .ok();
    }
    if let Some(Distribution { median, p99, worst, mean }) = sample.fan_out {
        let drawn = sample.sources;
        writeln!(
            out,
            "  fan-out     targets of a source: median {median}, p99 {p99}, worst {worst}, of {drawn} sampled"
        )
        .ok();
        let (work, lookups) =
            if rule.of_target.is_some() { ("recomputes", ", one lookup each") } else { ("writes", "") };
        writeln!(out, "              each change of a source {work} {mean:.1} targets on average{lookups}").ok();
    }
    if let Some(Distribution { median, p99, worst, .. }) = sample.fan_in {
        writeln!(out, "  fan-in      sources of a target: median {median}, p99 {p99}, worst {worst}").ok();
    }
    if !sample.not_estimated.is_empty() {
        let what = sample.not_estimated.join(", ");
        writeln!(out, "  unknown     {what}: without an index, the collection would be read for too long").ok();
    }
    let Sizes { largest_now, largest_then, mean_growth } = sample.sizes;
    if sample.targets > 0 && !sample.not_estimated.contains(&"changes") {
        let share = largest_then * 100 / (16 << 20);
        writeln!(
            out,
            "  size        largest target {largest_now} bytes, then {largest_then} ({share}% of 16 MB); {mean_growth:+.0} bytes on average"
        )
        .ok();
        let some = if sample.examples.is_empty() { "" } else { ", for example" };
        writeln!(out, "  changes     {} of {} sampled targets{some}", sample.differing, sample.targets).ok();
    }
    for example in &sample.examples {
        writeln!(out, "              {} {}: {}", example.target, example.path, example.words).ok();
    }
}

fn todo(findings: &[Finding]) -> String {
    let mut out = String::new();
    for (nth, finding) in findings.iter().enumerate() {
        let rule = if finding.rule.is_empty() { String::new() } else { format!("rule {}: ", finding.rule) };
        writeln!(out, "{}. {rule}{}", nth + 1, finding.message).ok();
        if let Some(fix) = &finding.fix {
            writeln!(out, "     {}", fix.shell).ok();
        }
        if let Some(hint) = &finding.hint {
            writeln!(out, "   {hint}").ok();
        }
    }
    out
}

/// The message of `run` when the cluster lacks something that the rules need.
#[must_use]
pub fn refusal(findings: &[Finding]) -> String {
    let fixable = if findings.iter().any(|finding| finding.fix.is_some()) {
        "\n`denormd plan --apply` runs these commands"
    } else {
        ""
    };
    format!(
        "{} needed before the rules can run; nothing was written\n{}{fixable}",
        steps(findings.len()),
        todo(findings).trim_end()
    )
}

fn steps(count: usize) -> String {
    if count == 1 { "1 step is".to_owned() } else { format!("{count} steps are") }
}

/// The examples for `--show-values`: a few of the changes to existing data, as Extended JSON.
fn examples(live: &Live, options: &PlanOptions) -> serde_json::Value {
    let value = |value: &Option<Bson>| value.clone().map(Bson::into_relaxed_extjson);
    let changes = live.inspections.iter().filter(|_| options.show_values).flat_map(|inspection| {
        inspection.adoption.examples.iter().map(move |change| {
            serde_json::json!({
                "rule": &inspection.rule,
                "kind": change.kind,
                "target": change.target.clone().into_relaxed_extjson(),
                "path": change.path,
                "stored": value(&change.stored),
                "expected": value(&change.expected),
            })
        })
    });
    changes.collect()
}

/// A finding as JSON, for programs.
pub(super) fn finding_json(finding: &Finding) -> serde_json::Value {
    serde_json::json!({
        "rule": finding.rule,
        "message": finding.message,
        "command": finding.fix.as_ref().map(|fix| &fix.shell),
        "hint": finding.hint,
    })
}

fn json(plan: &Plan, live: &Live, options: &PlanOptions) -> serde_json::Value {
    let blocked = live.blocked.iter().map(|(rule, why)| serde_json::json!({"rule": rule, "reason": why}));
    let rules = plan.rules.iter().map(|rule| {
        let matches = rule.reference.pairs.iter().map(|pair| (pair.target.to_string(), matched(pair).into()));
        serde_json::json!({
            "name": rule.name,
            "source": rule.source.namespace.to_string(),
            "target": rule.target.namespace.to_string(),
            "match": matches.collect::<serde_json::Map<String, serde_json::Value>>(),
            "owns": rule.owned().into_iter().map(ToString::to_string).collect::<Vec<_>>(),
            "touch": rule.touch.as_ref().map(ToString::to_string),
            "shadow": rule.shadow,
            "live": live.inspections.iter().find(|inspection| inspection.rule == rule.name),
        })
    });
    serde_json::json!({
        "experimental": live.sharded,
        "rules": rules.collect::<Vec<_>>(),
        "applied": live.applied,
        "findings": live.findings.iter().map(finding_json).collect::<Vec<_>>(),
        "warnings": live.suspicions,
        "blocked": blocked.collect::<Vec<_>>(),
        "existing": examples(live, options),
        "ready": live.findings.is_empty() && live.blocked.is_empty(),
    })
}
