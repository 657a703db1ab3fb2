//! `denormd backfill` and `denormd release`: wishes that the leader carries out; this process, where nobody leads.

use std::time::Duration;

use crate::{
    checkpoint::store::{Backfill, Hold, RuleState, Store},
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
pub async fn backfill(loaded: &Loaded, rules: &[String], no_wait: bool) -> std::result::Result<(), Failure> {
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
    for rule in known {
        store.ask(&context.server, rule).await?;
        print(&format!("{rule}: asked for\n"));
    }
    if no_wait {
        return Ok(());
    }
    with_a_leader(loaded, &context, wait(&store, &context.server, rules)).await
}

/// Lets a held rule go on.
pub async fn release(loaded: &Loaded, rule: &str) -> std::result::Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let Backfill::Held(hold) = state(&store, &context.server, rule).await?.backfill else {
        print(&format!("{rule} is not held\n"));
        return Ok(());
    };
    if hold.rests() {
        return Err(held(rule, &hold, Kind::Config).into());
    }
    store.ask(&context.server, rule).await?;
    print(&format!("{rule} was held ({}) and is released\n", hold.reason));
    with_a_leader(loaded, &context, wait(&store, &context.server, &[rule.to_owned()])).await
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
pub(super) async fn wait(store: &Store, server: &Server, rules: &[String]) -> Result<()> {
    for rule in rules {
        let mut bar = Progress::new(rule);
        let state = loop {
            let known = store.rules(server).await?.into_iter().find(|(name, _)| name == rule);
            match known.map(|(_, state)| state) {
                Some(state) if !matches!(state.backfill, Backfill::Pending(_)) => break state,
                state => {
                    let (done, total) = state.and_then(|state| state.progress).unwrap_or_default();
                    bar.set(done, total);
                }
            }
            tokio::time::sleep(LOOK).await;
        };
        bar.end();
        if let Backfill::Held(hold) = state.backfill {
            return Err(held(rule, &hold, Kind::Refused));
        }
        match state.progress {
            Some((targets, _)) => print(&format!("{rule}: done, {targets} targets\n")),
            None => print(&format!("{rule}: done\n")),
        }
    }
    Ok(())
}
