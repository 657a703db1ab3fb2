//! `denormd backfill` and `denormd unblock`: requests to the leader. Without a leader, this process does the work.

use std::time::Duration;

use crate::{
    cli::Output,
    commands::{Failure, chosen, compile, context, leader::with_a_leader, print, progress::Progress, undo::span},
};
use denormd_engine::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    dead_letter::Chosen,
    deployment::lease,
    inspection::adoption::losses,
    metrics::Metrics,
    reconcile::Context,
};
use denormd_model::rule_state::{BlockReason, RuleState};
use denormd_mongo::{
    Server,
    error::{Error, Kind, Result},
};
use denormd_rules::config::Loaded;

/// Interval between reads of the leader's progress.
const LOOK: Duration = Duration::from_millis(500);

/// Requests a backfill of these rules, or of all.
pub async fn backfill(
    loaded: &Loaded,
    output: Output,
    rules: &[String],
    no_wait: bool,
) -> std::result::Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let all: Vec<String> = context.plan.rules.iter().map(|rule| rule.name.clone()).collect();
    let rules = if rules.is_empty() { &all } else { rules };
    // Without a leader, this process will lead, and then it backfills a rule that has never run.
    let led = lease::is_held(&context.server, store.database(), store.ids()).await?;
    let mut known = Vec::new();
    for rule in chosen(&context.plan, rules)? {
        match state(&store, &context.server, &rule.name).await {
            Ok(record) if record.state.is_stopped() => {
                return Err(stopped(&rule.name, &record.state).into());
            }
            Ok(_) => known.push(&rule.name),
            Err(unknown) if led || no_wait => return Err(unknown.into()),
            Err(_) => {}
        }
    }
    for rule in &known {
        if !store.ask(&context.server, rule).await? {
            let now = state(&store, &context.server, rule).await?;
            return Err(stopped(rule, &now.state).into());
        }
        if output == Output::Text {
            print(&format!("{rule}: requested\n"));
        }
    }
    if no_wait {
        for rule in &known {
            noticed(&store, &context.server, rule).await?;
        }
        if output == Output::Json {
            let asked = known.iter().map(|rule| serde_json::json!({"rule": rule, "done": false}));
            print(&format!("{:#}\n", serde_json::Value::Array(asked.collect())));
        }
        return Ok(());
    }
    let done = with_a_leader(loaded, &context, wait(&store, &context, rules)).await?;
    match output {
        Output::Text => print(&text(&done)),
        Output::Json => print(&format!("{:#}\n", serde_json::Value::Array(done.iter().map(Done::json).collect()))),
    }
    Ok(())
}

/// A rule whose backfill is done, with the number of its targets if known.
#[derive(Debug)]
pub(super) struct Done {
    rule: String,
    targets: Option<u64>,
    dead_letters: u64,
}

impl Done {
    fn json(&self) -> serde_json::Value {
        let Self { rule, targets, dead_letters } = self;
        serde_json::json!({"rule": rule, "done": true, "targets": targets, "dead_letters": dead_letters})
    }
}

/// Reports the finished backfills as text.
pub(super) fn text(done: &[Done]) -> String {
    let line = |Done { rule, targets, dead_letters }: &Done| {
        let targets = targets.map(|targets| format!(", {targets} targets")).unwrap_or_default();
        let dead_letters = if *dead_letters > 0 { format!(", dead letters: {dead_letters}") } else { String::new() };
        format!("{rule}: done{targets}{dead_letters}\n")
    };
    done.iter().map(line).collect()
}

/// Waits until a leader has read the request. From then on, `denormd wait` waits for it too. Returns false without a
/// leader.
pub(super) async fn noticed(store: &Store, server: &Server, rule: &str) -> Result<bool> {
    loop {
        if !lease::is_held(server, store.database(), store.ids()).await? {
            return Ok(false);
        }
        let now = state(store, server, rule).await?;
        if now.noticed == now.generation || !now.state.is_backfilling() {
            return Ok(true);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Shows the reason why a rule is blocked, agrees to the effect of its backfill, and waits for the backfill.
pub async fn unblock(loaded: &Loaded, output: Output, rule: &str) -> std::result::Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    chosen(&context.plan, &[rule.to_owned()])?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let record = state(&store, &context.server, rule).await?;
    let RuleState::Blocked(reason) = &record.state else {
        if record.state.is_stopped() {
            return Err(stopped(rule, &record.state).into());
        }
        match output {
            Output::Text => print(&format!("{rule} is not blocked\n")),
            Output::Json => print(&format!("{:#}\n", serde_json::json!({"rule": rule, "unblocked": false}))),
        }
        return Ok(());
    };
    if output == Output::Text {
        let objections = objections(&context, rule, reason).await;
        print(&blocked(rule, reason, &objections));
    }
    if !store.unblock(&context.server, rule, reason, &record.definition).await? {
        let message = format!("rule `{rule}` is not blocked for this reason any more");
        return Err(Error::new(Kind::State, message).hint("run the command again to see why it is blocked now").into());
    }
    if output == Output::Text {
        print(&format!("{rule} is unblocked, and backfilled\n"));
        let undo = &loaded.config.undo;
        if matches!(reason, BlockReason::Adoption(_)) && undo.enabled {
            let keep = span(undo.keep);
            print(&format!("values that it replaces are kept for {keep}: `denormd undo {rule}` puts them back\n"));
        }
    }
    let done = with_a_leader(loaded, &context, wait(&store, &context, &[rule.to_owned()])).await?;
    match output {
        Output::Text => print(&text(&done)),
        Output::Json => {
            let targets = done.first().and_then(|done| done.targets);
            let told = serde_json::json!({
                "rule": rule, "unblocked": true, "reason": reason.to_string(), "block": reason, "targets": targets,
            });
            print(&format!("{told:#}\n"));
        }
    }
    Ok(())
}

/// The effect of a backfill on the values of a rule that is blocked, each in a few words.
async fn objections(context: &Context, rule: &str, reason: &BlockReason) -> Vec<String> {
    let rule = context.plan.rules.iter().find(|known| known.name == rule);
    match (reason, rule) {
        (BlockReason::Adoption(adoption), _) => adoption.causes.clone(),
        (BlockReason::SourceGone | BlockReason::RemovalLimit, Some(rule)) => {
            match Box::pin(losses(context, rule)).await {
                Ok(losses) => vec![losses.to_string()],
                Err(error) => vec![format!("what it would remove could not be counted: {}", error.message)],
            }
        }
        _ => Vec::new(),
    }
}

/// The reason why a rule is blocked, with the effect of its backfill.
fn blocked(rule: &str, reason: &BlockReason, objections: &[String]) -> String {
    let mut text = match reason {
        BlockReason::Adoption(adoption) => {
            format!("{rule} is blocked: its first backfill would change existing data\n  {}\n", adoption.figures())
        }
        reason => format!("{rule} is blocked: {reason}\n"),
    };
    for cause in objections {
        text += &format!("  - {cause}\n");
    }
    text
}

/// The error for a stopped rule, with a hint on how to let it run again.
pub(super) fn stopped(rule: &str, state: &RuleState) -> Error {
    let error =
        Error::new(Kind::State, format!("rule `{rule}` is {}: {}", state.name(), state.reason().unwrap_or_default()));
    error.hint(match state {
        RuleState::Paused { .. } => format!("`denormd resume {rule}` lets it run again, by a backfill"),
        RuleState::Unavailable { .. } => {
            "`denormd plan` says what is missing; it comes back by itself when that is there, by a backfill".to_owned()
        }
        _ => format!("`denormd unblock {rule}` agrees to what it does to existing values, and lets it run again"),
    })
}

/// The record of a rule that has run before.
pub(super) async fn state(store: &Store, server: &Server, rule: &str) -> Result<RuleRecord> {
    let known = store.rules(server).await?;
    let names: Vec<String> = known.iter().map(|(name, _)| name.clone()).collect();
    match known.into_iter().find(|(name, _)| name == rule) {
        Some((_, record)) if record.state == RuleState::Removed => {
            Err(Error::new(Kind::State, format!("the rule `{rule}` was not in the config of the last leader"))
                .hint("it does not run; a leader that has it in its config backfills it first"))
        }
        Some((_, record)) => Ok(record),
        None => Err(Error::new(Kind::State, format!("the rule `{rule}` has not run yet")).hint(format!(
            "known are: {}; a new rule is backfilled when `denormd run` first meets it",
            names.join(", ")
        ))),
    }
}

/// Waits until the leader has done them all, and shows the progress.
pub(super) async fn wait(store: &Store, context: &Context, rules: &[String]) -> Result<Vec<Done>> {
    let mut done = Vec::new();
    for rule in rules {
        let mut bar = Progress::new(rule);
        let record = loop {
            let known = store.rules(&context.server).await?.into_iter().find(|(name, _)| name == rule);
            match known.map(|(_, record)| record) {
                Some(record) if !record.state.is_backfilling() => break record,
                record => {
                    let (count, total) = record.and_then(|record| record.progress).unwrap_or_default();
                    bar.set(count, total);
                }
            }
            tokio::time::sleep(LOOK).await;
        };
        bar.end();
        if record.state.is_stopped() {
            return Err(stopped(rule, &record.state));
        }
        let targets = record.progress.map(|(targets, _)| targets);
        let chosen = Chosen { rule: Some(rule.clone()), key: None };
        let dead_letters = context.dead_letters.count(&context.server, &chosen).await?;
        done.push(Done { rule: rule.clone(), targets, dead_letters });
    }
    Ok(done)
}
