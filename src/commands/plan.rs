//! `denormd plan`

use std::fmt::Write as _;

use crate::{
    cli::Output,
    commands::{Failure, compile, context, print},
    config::Loaded,
    metrics::Metrics,
    plan::{Keyed, Plan},
    preflight::{self, Finding},
};

/// Says what the rules are and need; with `apply`, makes what is missing.
pub async fn plan(loaded: &Loaded, output: Output, offline: bool, apply: bool) -> Result<(), Failure> {
    let plan = compile(loaded).await?;
    let mut findings = Vec::new();
    if !offline {
        let context = context(loaded, plan.clone(), Metrics::new()?).await?;
        findings = preflight::check(&context.server, &context.plan).await?;
        if apply {
            for fix in findings.iter().filter_map(|finding| finding.fix.as_ref()) {
                print(&format!("{}\n", fix.shell));
                preflight::apply(&context.server, fix).await?;
            }
            findings = preflight::check(&context.server, &context.plan).await?;
        }
    }
    match output {
        Output::Text => print(&text(&plan, &findings, offline)),
        Output::Json => print(&format!("{:#}\n", json(&plan, &findings))),
    }
    if findings.is_empty() {
        Ok(())
    } else {
        Err(Failure::Refused(format!("{} to do before the rules can run", things(findings.len()))))
    }
}

fn text(plan: &Plan, findings: &[Finding], offline: bool) -> String {
    let mut out = String::new();
    for id in &plan.order {
        let rule = plan.rule(*id);
        let owned: Vec<String> = rule.owned().into_iter().map(ToString::to_string).collect();
        let pairs: Vec<String> =
            rule.reference.pairs.iter().map(|pair| format!("{} = {}", pair.target, pair.source)).collect();
        let keyed = if rule.keyed == Keyed::Value { "" } else { ", target by target" };
        writeln!(out, "{}: {} -> {}", rule.name, rule.source.namespace, rule.target.namespace).ok();
        writeln!(out, "  match  {}{keyed}", pairs.join(", ")).ok();
        writeln!(out, "  owns   {}", owned.join(", ")).ok();
    }
    out.push('\n');
    match (findings, offline) {
        ([], true) => out.push_str("the config is sound (the cluster was not asked)\n"),
        ([], false) => out.push_str("ready\n"),
        (findings, _) => out.push_str(&todo(findings)),
    }
    out
}

fn todo(findings: &[Finding]) -> String {
    let mut out = String::new();
    for (nth, finding) in findings.iter().enumerate() {
        writeln!(out, "{}. rule {}: {}", nth + 1, finding.rule, finding.message).ok();
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

fn json(plan: &Plan, findings: &[Finding]) -> serde_json::Value {
    let rules = plan.order.iter().map(|id| {
        let rule = plan.rule(*id);
        serde_json::json!({
            "name": rule.name,
            "source": rule.source.namespace.to_string(),
            "target": rule.target.namespace.to_string(),
            "owns": rule.owned().into_iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    });
    let findings = findings.iter().map(|finding| {
        serde_json::json!({
            "rule": finding.rule,
            "message": finding.message,
            "command": finding.fix.as_ref().map(|fix| &fix.shell),
            "hint": finding.hint,
        })
    });
    serde_json::json!({"rules": rules.collect::<Vec<_>>(), "findings": findings.collect::<Vec<_>>()})
}
