//! `denormd plan`

use std::fmt::Write as _;

use crate::{
    cli::Output,
    commands::{Failure, compile, context, print},
    config::Loaded,
    error::Kind,
    metrics::Metrics,
    plan::{Keyed, Plan},
    preflight::{self, Finding},
    survey::{PreImages, References, ShardKey, Sharded, Sizes, Spread, Survey, survey},
};

/// How `plan` is asked.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Look at the config alone.
    pub offline: bool,
    /// Make what is missing.
    pub apply: bool,
    /// Targets of each rule that are looked at.
    pub sample: u32,
}

/// What the cluster says.
#[derive(Default)]
struct Live {
    applied: Vec<String>,
    findings: Vec<Finding>,
    surveys: Vec<Survey>,
}

/// Says what the rules are and need; with `apply`, makes what is missing.
pub async fn plan(loaded: &Loaded, output: Output, options: Options) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let live = if options.offline { Live::default() } else { look(loaded, output, &plan, options).await? };
    match output {
        Output::Text => print(&text(&plan, &live, options)),
        Output::Json => print(&format!("{:#}\n", json(&plan, &live))),
    }
    if live.findings.is_empty() {
        Ok(())
    } else {
        Err(Failure::Refused(format!("{} to do before the rules can run", things(live.findings.len()))))
    }
}

async fn look(loaded: &Loaded, output: Output, plan: &Plan, options: Options) -> Result<Live, Failure> {
    let context = context(loaded, plan.clone(), Metrics::new()?).await?;
    let findings = preflight::privileges(&context.server, plan, &loaded.config.state.database).await?;
    let mut live = Live { findings, ..Live::default() };
    if !live.findings.is_empty() {
        // Everything else would fail for want of them.
        return Ok(live);
    }
    live.findings = preflight::check(&context.server, plan).await?;
    if options.apply {
        for fix in live.findings.iter().filter_map(|finding| finding.fix.as_ref()) {
            if output == Output::Text {
                print(&format!("{}\n", fix.shell));
            }
            live.applied.push(fix.shell.clone());
            preflight::apply(&context.server, fix).await?;
        }
        live.findings = preflight::check(&context.server, plan).await?;
    }
    match survey(&context, plan, options.sample).await {
        Ok(surveys) => live.surveys = surveys,
        // What stands in the way of reading is among the findings.
        Err(error) if error.kind == Kind::Refused && !live.findings.is_empty() => {}
        Err(error) => return Err(error.into()),
    }
    for survey in &live.surveys {
        let Some(rule) = plan.rules.iter().find(|rule| rule.name == survey.rule) else { continue };
        let problems = survey.problems(rule).into_iter();
        live.findings.extend(problems.map(|(message, hint)| Finding {
            rule: rule.name.clone(),
            message,
            fix: None,
            hint: Some(hint),
        }));
    }
    Ok(live)
}

fn text(plan: &Plan, live: &Live, options: Options) -> String {
    let mut out = String::new();
    for id in &plan.order {
        let rule = plan.rule(*id);
        let owned: Vec<String> = rule.owned().into_iter().map(ToString::to_string).collect();
        let pairs: Vec<String> =
            rule.reference.pairs.iter().map(|pair| format!("{} = {}", pair.target, pair.source)).collect();
        let keyed = if rule.keyed == Keyed::Value { "" } else { ", target by target" };
        let shadow = if rule.shadow { " (in shadow: writes nothing)" } else { "" };
        writeln!(out, "{}: {} -> {}{shadow}", rule.name, rule.source.namespace, rule.target.namespace).ok();
        writeln!(out, "  match       {}{keyed}", pairs.join(", ")).ok();
        writeln!(out, "  owns        {}", owned.join(", ")).ok();
        match live.surveys.iter().find(|survey| survey.rule == rule.name) {
            Some(survey) => surveyed(&mut out, survey),
            None if rule.needs_pre_images() => {
                let command = preflight::enable_pre_images(&rule.source.namespace, true).shell;
                writeln!(out, "  pre-images  {} must keep them: {command}", rule.source.namespace).ok();
            }
            None => {}
        }
    }
    out.push('\n');
    match (live.findings.as_slice(), options.offline) {
        ([], true) => out.push_str("the config is sound (the cluster was not asked)\n"),
        ([], false) => out.push_str("ready\n"),
        (findings, _) => out.push_str(&todo(findings)),
    }
    out
}

fn surveyed(out: &mut String, survey: &Survey) {
    let reads = |paths: &[String]| if paths.is_empty() { "nothing".to_owned() } else { paths.join(", ") };
    writeln!(out, "  reads       source: {}", reads(&survey.source_reads)).ok();
    writeln!(out, "              target: {}", reads(&survey.target_reads)).ok();
    for lookup in &survey.lookups {
        let index = lookup.index.as_ref().map_or_else(|| "NO INDEX".to_owned(), |index| format!("index {index}"));
        writeln!(out, "  lookup      {}: {index} of {}", lookup.what, lookup.collection).ok();
    }
    if let Some(PreImages { collection, kept, command }) = &survey.pre_images {
        match kept {
            Some(true) => writeln!(out, "  pre-images  {collection} keeps them").ok(),
            _ => writeln!(out, "  pre-images  {collection} must keep them: {command}").ok(),
        };
    }
    for Sharded { collection, key } in &survey.sharded {
        let by = match key {
            ShardKey::Paths(paths) => format!("sharded by {}", paths.join(", ")),
            ShardKey::Unknown => "perhaps sharded: this user may not read config.collections".to_owned(),
        };
        writeln!(out, "  sharding    {collection} is {by} (denormd is untested on sharded clusters)").ok();
    }
    let Some(sample) = &survey.sample else { return };
    for references in &sample.references {
        let References { kind, count, resolved } = references;
        let share = resolved * 100 / (*count).max(1);
        let held = sample.held_by;
        writeln!(out, "  references  of type {kind}: {resolved} of {count} resolve ({share}%), from sampled {held}s")
            .ok();
    }
    if let Some(Spread { median, p99, worst, mean }) = sample.fan_out {
        let drawn = sample.sources;
        writeln!(out, "  fan-out     targets of a source: median {median}, p99 {p99}, worst {worst}, of {drawn} drawn")
            .ok();
        writeln!(out, "              so each change of a source writes {mean:.1} targets on average").ok();
    }
    if let Some(Spread { median, p99, worst, .. }) = sample.fan_in {
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

/// What `run` says when the cluster is not what the rules need.
#[must_use]
pub fn refusal(findings: &[Finding]) -> String {
    let fixable = if findings.iter().any(|finding| finding.fix.is_some()) {
        "\n`denormd plan --apply` runs these commands"
    } else {
        ""
    };
    format!(
        "{} to do before the rules can run; nothing was written\n{}{fixable}",
        things(findings.len()),
        todo(findings).trim_end()
    )
}

fn things(count: usize) -> String {
    if count == 1 { "one thing is".to_owned() } else { format!("{count} things are") }
}

fn json(plan: &Plan, live: &Live) -> serde_json::Value {
    let rules = plan.order.iter().map(|id| {
        let rule = plan.rule(*id);
        let matches = rule.reference.pairs.iter().map(|pair| (pair.target.to_string(), pair.source.to_string().into()));
        serde_json::json!({
            "name": rule.name,
            "source": rule.source.namespace.to_string(),
            "target": rule.target.namespace.to_string(),
            "match": matches.collect::<serde_json::Map<String, serde_json::Value>>(),
            "owns": rule.owned().into_iter().map(ToString::to_string).collect::<Vec<_>>(),
            "shadow": rule.shadow,
            "live": live.surveys.iter().find(|survey| survey.rule == rule.name),
        })
    });
    let findings = live.findings.iter().map(|finding| {
        serde_json::json!({
            "rule": finding.rule,
            "message": finding.message,
            "command": finding.fix.as_ref().map(|fix| &fix.shell),
            "hint": finding.hint,
        })
    });
    serde_json::json!({
        "rules": rules.collect::<Vec<_>>(),
        "applied": live.applied,
        "findings": findings.collect::<Vec<_>>(),
        "ready": live.findings.is_empty(),
    })
}
