//! `denormd pause` and `denormd resume`

use std::time::Duration;

use crate::{
    cli::Output,
    commands::{
        Failure,
        backfill::{noticed, state, stopped, text, wait},
        chosen, compile, context,
        leader::with_a_leader,
        notice, print,
    },
    status::duration,
};
use denormd_engine::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    deployment::lease,
    metrics::Metrics,
    reconcile::Context,
};
use denormd_model::rule_state::RuleState;
use denormd_mongo::error::Error;
use denormd_rules::config::Loaded;

/// Interval between checks that the leader has read the pause.
const LOOK: Duration = Duration::from_millis(200);

/// Pauses a rule, or all of them, for a while or until they are resumed. All pauses are recorded before waiting for
/// any, because this is the emergency stop.
pub async fn pause(loaded: &Loaded, output: Output, rule: Option<&str>, time: Option<Duration>) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    chosen(&context.plan, rule.map(ToOwned::to_owned).as_slice())?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let (mut paused, mut blocked) = (Vec::new(), Vec::new());
    for (name, record) in known(&store, &context, rule).await? {
        // A rule that is blocked in one partition may run in the others.
        store.pause(&context.server, &name, time).await?;
        match record.state {
            RuleState::Removed => {}
            state @ RuleState::Blocked(_) if rule.is_some() => return Err(stopped(&name, &state).into()),
            RuleState::Blocked(_) => blocked.push(name),
            _ => paused.push(name),
        }
    }
    for name in &paused {
        take_effect(&context, &store, name, time).await?;
    }
    for name in &blocked {
        notice(&format!("{name} is blocked: it stays so, whatever is resumed"));
    }
    print(&told(output, rule, &paused, time));
    Ok(())
}

fn told(output: Output, rule: Option<&str>, paused: &[String], time: Option<Duration>) -> String {
    let end = time.map_or_else(
        || format!("until `denormd resume {}`", rule.unwrap_or("--all")),
        |time| format!("for {}", duration(time.as_secs_f64())),
    );
    let seconds = time.map(|time| time.as_secs());
    match (output, rule) {
        (Output::Text, rule) => {
            let (who, its) = match (rule, paused.len()) {
                (Some(rule), _) => (format!("{rule} is"), "its fields stay as they are"),
                (None, 1) => ("1 rule is".to_owned(), "its fields stay as they are"),
                (None, many) => (format!("{many} rules are"), "their fields stay as they are"),
            };
            format!(
                "{who} paused {end}: {its}\n\
                 the checkpoint keeps advancing, so the oplog is not held up; a resumed rule is backfilled from the start\n"
            )
        }
        (Output::Json, Some(rule)) => {
            format!("{:#}\n", serde_json::json!({"rule": rule, "paused": true, "seconds": seconds}))
        }
        (Output::Json, None) => {
            format!("{:#}\n", serde_json::json!({"rules": paused, "paused": true, "seconds": seconds}))
        }
    }
}

/// The record of the given rule, or those of all rules that have run, whether or not they are in the config of this command.
async fn known(store: &Store, context: &Context, rule: Option<&str>) -> Result<Vec<(String, RuleRecord)>, Error> {
    let Some(rule) = rule else { return store.rules(&context.server).await };
    Ok(vec![(rule.to_owned(), state(store, &context.server, rule).await?)])
}

/// Returns when the leader of every partition reports the pause. Until then a leader may overwrite the state, and then the
/// pause is recorded again. A leader that registers the rule later looks at the other partitions itself.
async fn take_effect(context: &Context, store: &Store, rule: &str, time: Option<Duration>) -> Result<(), Error> {
    let server = &context.server;
    loop {
        let led = lease::held(server, store.database(), store.ids()).await?;
        let records = store.of_each_partition(server, rule).await?;
        let (mut runs, mut waits) = (false, false);
        for (id, record) in records {
            match record.state {
                RuleState::Paused { .. } => waits |= record.noticed != record.generation && led.contains(&id),
                state @ RuleState::Blocked(_) => return Err(stopped(rule, &state)),
                RuleState::Removed => {}
                _ => runs = true,
            }
        }
        if runs {
            store.pause(server, rule, time).await?;
        } else if !waits {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Resumes a paused rule, or all paused rules, with a backfill.
pub async fn resume(loaded: &Loaded, output: Output, rule: Option<&str>) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    chosen(&context.plan, rule.map(ToOwned::to_owned).as_slice())?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let (mut resumed, mut unled) = (Vec::new(), Vec::new());
    for (name, record) in known(&store, &context, rule).await? {
        match record.state {
            RuleState::Paused { .. } => {
                let modified = store.resume(&context.server, &name).await?;
                resumed.extend((modified > 0).then_some(name));
            }
            state if state.is_stopped() && rule.is_some() => return Err(stopped(&name, &state).into()),
            _ => {}
        }
    }
    for name in &resumed {
        let led = noticed(&store, &context.server, name).await?;
        let is_planned = context.plan.rules.iter().any(|rule| rule.name == *name);
        let by = match (led, is_planned) {
            (true, _) => ", and backfilled by the leader",
            (false, true) => "",
            (false, false) => ", and backfilled when a daemon leads whose config has it",
        };
        if !led && is_planned {
            unled.push(name.clone());
        }
        if output == Output::Text {
            print(&format!("{name} is resumed{by}\n"));
        }
    }
    match (output, rule) {
        (Output::Text, Some(rule)) if resumed.is_empty() => print(&format!("{rule} is not paused\n")),
        (Output::Text, None) if resumed.is_empty() => print("no rule is paused\n"),
        (Output::Text, _) => {}
        (Output::Json, Some(rule)) => {
            print(&format!("{:#}\n", serde_json::json!({"rule": rule, "resumed": !resumed.is_empty()})));
        }
        (Output::Json, None) => print(&format!("{:#}\n", serde_json::json!({"rules": resumed, "resumed": true}))),
    }
    if !unled.is_empty() {
        let done = with_a_leader(loaded, &context, wait(&store, &context, &unled)).await?;
        if output == Output::Text {
            print(&text(&done));
        }
    }
    Ok(())
}
