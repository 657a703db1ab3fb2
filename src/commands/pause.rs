//! `denormd pause` and `denormd resume`

use std::time::Duration;

use crate::{
    checkpoint::store::{Backfill, Store},
    cli::Output,
    commands::{
        Failure,
        backfill::{held, noticed, state, text, wait},
        chosen, compile, context,
        leader::with_a_leader,
        print,
    },
    config::Loaded,
    error::{Error, Kind},
    lease,
    metrics::Metrics,
    reconcile::Context,
    status::duration,
};

/// How often it is looked whether the leader knows.
const LOOK: Duration = Duration::from_millis(200);

/// Pauses a rule, for a while or until it is resumed.
pub async fn pause(loaded: &Loaded, output: Output, rule: &str, time: Option<Duration>) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    chosen(&context.plan, &[rule.to_owned()])?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    if let Backfill::Held(hold) = state(&store, &context.server, rule).await?.backfill
        && !hold.paused
    {
        return Err(held(rule, &hold, Kind::Config).into());
    }
    take_effect(&context, &store, rule, time).await?;
    let end = time.map_or_else(
        || format!("until `denormd resume {rule}`"),
        |time| format!("for {}", duration(time.as_secs_f64())),
    );
    match output {
        Output::Text => print(&format!(
            "{rule} is paused {end}: its fields stay as they are\n\
             the saved position goes on, so the oplog is not held up; resumed, the rule is backfilled whole\n"
        )),
        Output::Json => print(&format!(
            "{:#}\n",
            serde_json::json!({"rule": rule, "paused": true, "seconds": time.map(|time| time.as_secs())})
        )),
    }
    Ok(())
}

/// Records the pause, and returns when the leader knows of it: until then it may have recorded something over it.
async fn take_effect(context: &Context, store: &Store, rule: &str, time: Option<Duration>) -> Result<(), Error> {
    let server = &context.server;
    loop {
        store.pause(server, rule, time).await?;
        loop {
            let now = state(store, server, rule).await?;
            match now.backfill {
                Backfill::Held(hold) if !hold.paused => return Err(held(rule, &hold, Kind::Config)),
                Backfill::Held(_) if now.noticed == now.generation => return Ok(()),
                Backfill::Held(_) => {}
                _ => break,
            }
            if !lease::is_held(server, store.database(), store.ids()).await? {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Lets a paused rule go on, which backfills it.
pub async fn resume(loaded: &Loaded, output: Output, rule: &str) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let store = Store::open(&context.server, &loaded.config.state.database, &loaded.config.name).await?;
    let resumed = match state(&store, &context.server, rule).await?.backfill {
        Backfill::Held(hold) if !hold.paused => {
            return Err(held(rule, &hold, Kind::Config).into());
        }
        Backfill::Held(_) => store.resume(&context.server, Some(rule)).await? > 0,
        _ => false,
    };
    let led = resumed && noticed(&store, &context.server, rule).await?;
    match output {
        Output::Text if resumed && led => print(&format!("{rule} is resumed, and backfilled by the leader\n")),
        Output::Text if resumed => print(&format!("{rule} is resumed\n")),
        Output::Text => print(&format!("{rule} is not paused\n")),
        Output::Json => print(&format!("{:#}\n", serde_json::json!({"rule": rule, "resumed": resumed}))),
    }
    if resumed && !led {
        let done = with_a_leader(loaded, &context, wait(&store, &context.server, &[rule.to_owned()])).await?;
        if output == Output::Text {
            print(&text(&done));
        }
    }
    Ok(())
}
