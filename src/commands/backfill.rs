//! `denormd backfill` and `denormd release`: wishes that the leader carries out; this process, where nobody leads.

use std::time::Duration;

use crate::{
    checkpoint::store::{Backfill, Hold, RuleState, Store},
    cli::Output,
    commands::{Failure, chosen, compile, context, leader::with_a_leader, print, progress::Progress},
    config::Loaded,
    error::{Error, Kind, Result},
    lease,
    metrics::Metrics,
    mongo::Server,
};

/// How often the leader's progress is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Asks for a backfill of these rules, or of all.
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
    // Where nobody leads this process will, and a rule that has never run is backfilled when it first does.
    let led = lease::is_held(&context.server, store.database(), store.ids()).await?;
    let mut known = Vec::new();
    for rule in chosen(&context.plan, rules)? {
        match state(&store, &context.server, &rule.name).await {
            Ok(RuleState { backfill: Backfill::Held(hold), .. }) => {
                return Err(held(&rule.name, &hold, Kind::Config).into());
            }
            Ok(_) => known.push(&rule.name),
            Err(unknown) if led || no_wait => return Err(unknown.into()),
            Err(_) => {}
        }
    }
    for rule in &known {
        store.ask(&context.server, rule).await?;
        if output == Output::Text {
            print(&format!("{rule}: asked for\n"));
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
    let done = with_a_leader(loaded, &context, wait(&store, &context.server, rules)).await?;
    match output {
        Output::Text => print(&text(&done)),
        Output::Json => print(&format!("{:#}\n", serde_json::Value::Array(done.iter().map(Done::json).collect()))),
    }
    Ok(())
}

/// A rule whose backfill is done, and how many targets that were where it is known.
#[derive(Debug)]
pub(super) struct Done {
    rule: String,
    targets: Option<u64>,
}

impl Done {
    fn json(&self) -> serde_json::Value {
        serde_json::json!({"rule": self.rule, "done": true, "targets": self.targets})
    }
}

/// What is said when they are done.
pub(super) fn text(done: &[Done]) -> String {
    let line = |Done { rule, targets }: &Done| match targets {
        Some(targets) => format!("{rule}: done, {targets} targets\n"),
        None => format!("{rule}: done\n"),
    };
    done.iter().map(line).collect()
}

/// Waits until a leader knows what was asked for: from then on `denormd wait` waits for it too. False where nobody leads.
pub(super) async fn noticed(store: &Store, server: &Server, rule: &str) -> Result<bool> {
    loop {
        if !lease::is_held(server, store.database(), store.ids()).await? {
            return Ok(false);
        }
        let now = state(store, server, rule).await?;
        if now.noticed == now.generation || !matches!(now.backfill, Backfill::Pending(_)) {
            return Ok(true);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Lets a held rule go on.
pub async fn release(loaded: &Loaded, output: Output, rule: &str) -> std::result::Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let Backfill::Held(hold) = state(&store, &context.server, rule).await?.backfill else {
        match output {
            Output::Text => print(&format!("{rule} is not held\n")),
            Output::Json => print(&format!("{:#}\n", serde_json::json!({"rule": rule, "released": false}))),
        }
        return Ok(());
    };
    if hold.rests() {
        return Err(held(rule, &hold, Kind::Config).into());
    }
    store.ask(&context.server, rule).await?;
    if output == Output::Text {
        print(&format!("{rule} was held ({}) and is released\n", hold.reason));
    }
    let done = with_a_leader(loaded, &context, wait(&store, &context.server, &[rule.to_owned()])).await?;
    match output {
        Output::Text => print(&text(&done)),
        Output::Json => {
            let targets = done.first().and_then(|done| done.targets);
            let told = serde_json::json!({"rule": rule, "released": true, "reason": hold.reason, "targets": targets});
            print(&format!("{told:#}\n"));
        }
    }
    Ok(())
}

/// That a rule is held, and what lets it go on.
pub(super) fn held(rule: &str, hold: &Hold, kind: Kind) -> Error {
    let how = if hold.suspended { "suspended" } else { "held" };
    let error = Error::new(kind, format!("rule `{rule}` is {how}: {}", hold.reason));
    error.hint(if hold.paused {
        format!("`denormd resume {rule}` lets it go on, by a backfill")
    } else if hold.suspended {
        "`denormd plan` says what is missing; it comes back by itself when that is there, by a backfill".to_owned()
    } else {
        format!("`denormd release {rule}` lets it go on and applies the loss")
    })
}

/// What is known of a rule that has run.
pub(super) async fn state(store: &Store, server: &Server, rule: &str) -> Result<RuleState> {
    let known = store.rules(server).await?;
    let names: Vec<String> = known.iter().map(|(name, _)| name.clone()).collect();
    known.into_iter().find(|(name, _)| name == rule).map(|(_, state)| state).ok_or_else(|| {
        Error::new(Kind::Config, format!("no rule named `{rule}` has run yet")).hint(format!(
            "known are: {}; a new rule is backfilled when `denormd run` first meets it",
            names.join(", ")
        ))
    })
}

/// Waits until the leader has done them all, and shows how far it is.
pub(super) async fn wait(store: &Store, server: &Server, rules: &[String]) -> Result<Vec<Done>> {
    let mut done = Vec::new();
    for rule in rules {
        let mut bar = Progress::new(rule);
        let state = loop {
            let known = store.rules(server).await?.into_iter().find(|(name, _)| name == rule);
            match known.map(|(_, state)| state) {
                Some(state) if !matches!(state.backfill, Backfill::Pending(_)) => break state,
                state => {
                    let (count, total) = state.and_then(|state| state.progress).unwrap_or_default();
                    bar.set(count, total);
                }
            }
            tokio::time::sleep(LOOK).await;
        };
        bar.end();
        if let Backfill::Held(hold) = state.backfill {
            return Err(held(rule, &hold, Kind::Refused));
        }
        done.push(Done { rule: rule.clone(), targets: state.progress.map(|(targets, _)| targets) });
    }
    Ok(done)
}
