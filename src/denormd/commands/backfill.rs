//! `denormd backfill` and `denormd unblock`: requests to the leader. Without a leader, this process does the work.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::{
    cli::Output,
    commands::{
        Failure, chosen, connected,
        leader::{self, with_a_leader},
        plan::kept,
        print, print_as, print_json,
        progress::Progress,
    },
};
use denormd_engine::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    dead_letter::Chosen,
    deployment::{identity::Identity, lease},
    inspection::adoption::{Figures, losses, recounted},
    reconcile::Context,
};
use denormd_model::rule_state::{Adoption, BlockReason, RuleState};
use denormd_mongo::{
    Server,
    error::{Error, Kind, Result},
};
use denormd_rules::{
    config::{Loaded, Undo},
    plan::Rule,
};

/// Interval between reads of the leader's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time that a leader has to read the config of this command.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Requests a backfill of these rules, or of all.
pub async fn backfill(
    loaded: &Loaded,
    output: Output,
    rules: &[String],
    no_wait: bool,
) -> std::result::Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    // Without a leader, this process will lead, and then it backfills a rule that has never run.
    let led = lease::is_held(&context.server, store.database(), store.ids()).await?;
    let mut known = Vec::new();
    for rule in chosen(&context.plan, rules)? {
        match state(&store, &context.server, &rule.name).await {
            Ok(record) if record.state.is_stopped() => {
                return Err(stopped(&rule.name, &record.state).into());
            }
            Ok(_) => known.push(&rule.name),
            // Of another kind, it does not say that the rule has not run.
            Err(unknown) if led || no_wait || unknown.kind != Kind::State => return Err(unknown.into()),
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
            print_json(&serde_json::Value::Array(asked.collect()));
        }
        return Ok(());
    }
    let done = with_a_leader(loaded, &context, wait(&store, &context, rules)).await?;
    print_as(output, || text(&done), || serde_json::Value::Array(done.iter().map(Done::json).collect()));
    complete(&done)
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

/// Fails if some targets became dead letters: their copies are not up to date.
pub(super) fn complete(done: &[Done]) -> std::result::Result<(), Failure> {
    let incomplete: Vec<&str> =
        done.iter().filter(|done| done.dead_letters > 0).map(|done| done.rule.as_str()).collect();
    if incomplete.is_empty() {
        return Ok(());
    }
    let message = format!("not all targets could be written; rules with dead letters: {}", incomplete.join(", "));
    Err(Error::new(Kind::Refused, message).hint("`denormd dead-letters list` says which, and why").into())
}

/// Waits until the leader of each partition that has one has read the request. From then on, `denormd wait` waits for it too.
/// Returns false without a leader. An error for a rule that is stopped by now. A rule that the leader has registered
/// meanwhile with `backfill: manual` is requested again.
pub(super) async fn noticed(store: &Store, server: &Server, rule: &str) -> Result<bool> {
    loop {
        let led = lease::held(server, store.database(), store.ids()).await?;
        if led.is_empty() {
            return Ok(false);
        }
        match state(store, server, rule).await?.state {
            state if state.is_stopped() => return Err(stopped(rule, &state)),
            RuleState::AwaitingBackfill => drop(store.ask(server, rule).await?),
            _ => {
                let waits = |(id, record): &(String, RuleRecord)| {
                    record.state.is_backfilling() && record.noticed != record.generation && led.contains(id)
                };
                if !store.of_each_partition(server, rule).await?.iter().any(waits) {
                    return Ok(true);
                }
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Shows the reason why a rule is blocked, agrees to the effect of its backfill, and waits for the backfill.
pub async fn unblock(loaded: &Loaded, output: Output, rule: &str) -> std::result::Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    let planned = chosen(&context.plan, &[rule.to_owned()])?;
    let record = state(&store, &context.server, rule).await?;
    let RuleState::Blocked(reason) = &record.state else {
        if record.state.is_stopped() {
            return Err(stopped(rule, &record.state).into());
        }
        print_as(
            output,
            || format!("{rule} is not blocked\n"),
            || serde_json::json!({"rule": rule, "unblocked": false}),
        );
        return Ok(());
    };
    if !planned.iter().all(|rule| rule.has_definition(&record.definition)) {
        let message = format!(
            "the blocked definition of `{rule}` is not the one in this config, and `unblock` would agree to the blocked one"
        );
        let hint = "use the daemon's config, or wait until the daemon has read this one: `denormd status` shows whether it has";
        return Err(Error::new(Kind::State, message).hint(hint).into());
    }
    let now = match (reason, planned.first()) {
        (BlockReason::Adoption(adoption), Some(rule)) => Some((adoption, recounted(&context, rule).await?)),
        _ => None,
    };
    // An agreement is recorded at once: it must not wait for a leader that this process cannot be.
    if !lease::is_held(&context.server, store.database(), store.ids()).await? {
        leader::ready(loaded, &context, &[]).await?;
    }
    if output == Output::Text {
        let objections = objections(&context, rule, reason).await;
        print(&blocked(rule, reason, &objections));
        if let Some((recorded, now)) = &now {
            print(&effect(rule, recorded, now, &loaded.config.undo));
        }
    }
    if !store.unblock(&context.server, rule, reason, &record.definition).await? {
        let message = format!("rule `{rule}` is not blocked for this reason any more");
        return Err(Error::new(Kind::State, message).hint("run the command again to see why it is blocked now").into());
    }
    if output == Output::Text {
        print(&format!("{rule} is unblocked, and backfilled\n"));
    }
    let done = with_a_leader(loaded, &context, wait(&store, &context, &[rule.to_owned()])).await?;
    let json = || {
        let targets = done.first().and_then(|done| done.targets);
        let dead_letters: u64 = done.iter().map(|done| done.dead_letters).sum();
        serde_json::json!({
            "rule": rule, "unblocked": true, "reason": reason.to_string(), "block": reason, "targets": targets,
            "dead_letters": dead_letters, "effect": now.as_ref().and_then(|(_, now)| now.as_ref().ok()),
        })
    };
    print_as(output, || text(&done), json);
    complete(&done)
}

/// Describes the effect if it is not the recorded one, and what can be undone.
fn effect(rule: &str, recorded: &Adoption, now: &std::result::Result<Figures, String>, undo: &Undo) -> String {
    let figures = match now {
        Ok(figures) => figures,
        Err(why) => return format!("  now: its effect could not be counted: {why}\n"),
    };
    let now = figures.adoption(Vec::new());
    // Two samples differ in what they would add.
    let is_same = (now.overwrites, now.removes) == (recorded.overwrites, recorded.removes)
        && (now.sampled || now.adds == recorded.adds);
    let changed = (!is_same).then(|| format!("now: {}", now.figures()));
    let can_be_undone = undo.enabled && figures.kept().0 > 0;
    let undo = kept(rule, figures, undo);
    let how = can_be_undone.then(|| format!("to put them back: `denormd pause {rule}`, then `denormd undo {rule}`"));
    changed.into_iter().chain(undo).chain(how).fold(String::new(), |text, line| text + "  " + &line + "\n")
}

/// The effect of a backfill on the values of a rule that is blocked, each in a few words.
async fn objections(context: &Context, rule: &str, reason: &BlockReason) -> Vec<String> {
    let rule = context.plan.named(rule);
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
        RuleState::Paused { blocked: Some(_), .. } => {
            format!("`denormd resume {rule}` ends the pause, and then `denormd unblock {rule}` the block")
        }
        RuleState::Paused { .. } => format!("`denormd resume {rule}` lets it run again, by a backfill"),
        RuleState::Unavailable { .. } => {
            "`denormd plan` says what is missing; once that exists, the rule resumes by itself".to_owned()
        }
        RuleState::Blocked(BlockReason::SourceGone) => format!(
            "once its source is there, the rule runs again by itself if it would remove at most a tenth of its values; \
             `denormd unblock {rule}` accepts any loss"
        ),
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
            "known rules: {}; a new rule is backfilled when `denormd run` first reads it from the config",
            names.join(", ")
        ))),
    }
}

/// Waits until the leader has backfilled them all by the definitions of this config, and shows the progress. A rule that the
/// leader registers meanwhile with `backfill: manual` is requested again: the request that it had is gone.
pub(super) async fn wait(store: &Store, context: &Context, rules: &[String]) -> Result<Vec<Done>> {
    let server = &context.server;
    let mut done = Vec::new();
    for rule in chosen(&context.plan, rules)? {
        let mut bar = Progress::new(&rule.name);
        let mut unregistered = None;
        let targets = loop {
            match awaited(store, server, rule).await? {
                Awaited::Done(targets) => break targets,
                Awaited::Backfilling((count, total)) => {
                    unregistered = None;
                    bar.set(count, total);
                }
                Awaited::Unrequested => {
                    unregistered = None;
                    store.ask(server, &rule.name).await?;
                }
                Awaited::Unregistered(partitions) => {
                    let since = unregistered.get_or_insert_with(Instant::now);
                    if since.elapsed() > RELOAD_TIMEOUT && is_led_elsewhere(context, store, &partitions).await? {
                        return Err(led_otherwise(&rule.name));
                    }
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        bar.end();
        let chosen = Chosen { rule: Some(rule.name.clone()), key: None };
        let dead_letters = context.dead_letters.count(server, &chosen).await?;
        done.push(Done { rule: rule.name.clone(), targets, dead_letters });
    }
    Ok(done)
}

/// A rule whose backfill is waited for.
enum Awaited {
    /// The backfill is done in every partition, with this number of targets.
    Done(Option<u64>),
    /// It is open, with the targets done and the targets to do.
    Backfilling((u64, Option<u64>)),
    /// The rule waits for a request.
    Unrequested,
    /// These partitions have not registered the rule as the config defines it.
    Unregistered(Vec<String>),
}

/// The present state of the rule in all partitions. An error for a stopped rule.
async fn awaited(store: &Store, server: &Server, rule: &Rule) -> Result<Awaited> {
    let records: BTreeMap<String, RuleRecord> =
        store.of_each_partition(server, &rule.name).await?.into_iter().collect();
    let states = records.values().map(|record| &record.state);
    let worst = states.reduce(|worst, state| if state.outranks(worst) { state } else { worst });
    if let Some(state) = worst.filter(|state| state.is_stopped()) {
        return Err(stopped(&rule.name, state));
    }
    let unregistered = store.ids().iter().filter(|id| !records.get(*id).is_some_and(|record| record.runs(rule)));
    let unregistered: Vec<String> = unregistered.cloned().collect();
    if !unregistered.is_empty() {
        return Ok(Awaited::Unregistered(unregistered));
    }
    // Each partition scans all targets, so the slowest one determines the progress.
    let slowest = |records: &mut dyn Iterator<Item = &RuleRecord>| {
        records.map(|record| record.progress).min_by_key(|progress| progress.map(|(count, _)| count)).flatten()
    };
    let mut open = records.values().filter(|record| record.state.is_backfilling()).peekable();
    Ok(if open.peek().is_some() {
        Awaited::Backfilling(slowest(&mut open).unwrap_or_default())
    } else if records.values().any(|record| record.state == RuleState::AwaitingBackfill) {
        Awaited::Unrequested
    } else {
        Awaited::Done(slowest(&mut records.values()).map(|(count, _)| count))
    })
}

/// True if another process leads one of these partitions.
async fn is_led_elsewhere(context: &Context, store: &Store, partitions: &[String]) -> Result<bool> {
    let holders = lease::holders(&context.server, store.database(), &context.dead_letters.deployment).await?;
    let own = Identity::of_this_process();
    Ok(partitions.iter().filter_map(|id| holders.get(id)).any(|holder| holder.id != own.id))
}

/// The error for a rule that the leader runs by another definition, or does not run.
pub(super) fn led_otherwise(rule: &str) -> Error {
    Error::new(Kind::State, format!("the leader does not run rule `{rule}` as this config defines it")).hint(
        "the leader has another config, or has not read this one yet: `denormd status` shows whether it has refused it",
    )
}
