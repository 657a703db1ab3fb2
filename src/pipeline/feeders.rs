//! What asks for work beside the streams: dead letters that are due, and commands.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    backfill::Wish,
    checkpoint::store::{Backfill, Store},
    dead_letter,
    error::{Error, Result},
    key::Key,
    reconcile::Context,
    request::Page,
    route::target_request,
};

/// How often commands' wishes are looked for.
const LOOK_FOR_WISHES: Duration = Duration::from_secs(1);

/// Tries dead letters again, each when its own pause is over.
pub(super) async fn retry(context: Arc<Context>, out: mpsc::Sender<Page>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(dead_letter::ROUND) => {}
            () = stop.cancelled() => return,
        }
        let round = async {
            for rule in &context.plan.rules {
                for letter in context.dead_letters.due(&context.server, rule).await? {
                    let after = context.server.operation_time().await?;
                    let (done, acknowledged) = oneshot::channel();
                    if out.send(Page { requests: vec![letter.request(rule)], after, done }).await.is_ok()
                        && acknowledged.await.is_ok()
                    {
                        context.dead_letters.clear(&context.server, &letter).await?;
                    }
                }
            }
            Ok(())
        };
        let result: Result<()> = tokio::select! {
            result = round => result,
            () = stop.cancelled() => return,
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "dead letters cannot be read; trying again");
        }
    }
}

/// Looks for targets that commands want to be looked at again, and answers when that is done.
pub(super) async fn requests(context: Arc<Context>, store: Store, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let round = async || {
        for asked in store.requests(&context.server).await? {
            let Some(rule) = context.plan.rules.iter().find(|rule| rule.name == asked.rule) else {
                store.refuse_request(&context.server, asked.id, "the leader has no rule of that name").await?;
                continue;
            };
            let requests = asked.targets.into_iter().map(|id| target_request(rule, Key::one(id))).collect();
            let after = context.server.operation_time().await?;
            let (done, acknowledged) = oneshot::channel();
            if out.send(Page { requests, after, done }).await.is_err() || acknowledged.await.is_err() {
                return Ok(());
            }
            store.request_done(&context.server, asked.id).await?;
        }
        Ok::<_, Error>(())
    };
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_FOR_WISHES) => {}
            () = stop.cancelled() => return,
        }
        let result = tokio::select! {
            result = round() => result,
            () = stop.cancelled() => return,
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "what commands ask for cannot be read; trying again");
        }
    }
}

/// Looks for backfills that commands have asked for.
pub(super) async fn wishes(context: Arc<Context>, store: Store, out: mpsc::Sender<Vec<Wish>>, stop: CancellationToken) {
    let mut seen: BTreeMap<String, i64> = BTreeMap::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_FOR_WISHES) => {}
            () = stop.cancelled() => return,
        }
        let Ok(states) = store.rules(&context.server).await else { continue };
        let mut wishes = Vec::new();
        for (name, state) in states {
            let newer = seen.insert(name.clone(), state.generation) != Some(state.generation);
            let rule = context.plan.rules.iter().find(|rule| rule.name == name);
            if let (true, Some(rule), Backfill::Pending(after)) = (newer, rule, &state.backfill) {
                wishes.push(Wish { rule: rule.id, generation: state.generation, after: after.clone() });
            }
        }
        if !wishes.is_empty() && out.send(wishes).await.is_err() {
            return;
        }
    }
}
