//! What asks for work beside the streams: dead letters that are due, and commands.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bson::oid::ObjectId;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    backfill::Wish,
    checkpoint::{
        requests::{Retired, Work},
        store::{Backfill, Hold, Store},
    },
    dead_letter,
    error::{Error, Result},
    key::Key,
    plan::RuleId,
    prune::{self, Carried},
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

/// Looks for targets that commands want to be looked at again and for fields to take away, and answers when that is done.
pub(super) async fn requests(context: Arc<Context>, store: Store, out: mpsc::Sender<Page>, stop: CancellationToken) {
    let round = async || {
        for asked in store.requests(&context.server).await? {
            let targets = match asked.work {
                Work::Look(targets) => targets,
                Work::Prune(paths) => return Ok(Some((asked.id, paths))),
            };
            let Some(rule) = context.plan.rules.iter().find(|rule| rule.name == asked.rule) else {
                store.refuse_request(&context.server, asked.id, "the leader has no rule of that name").await?;
                continue;
            };
            let requests = targets.into_iter().map(|id| target_request(rule, Key::one(id))).collect();
            let after = context.server.operation_time().await?;
            let (done, acknowledged) = oneshot::channel();
            if out.send(Page { requests, after, done }).await.is_err() || acknowledged.await.is_err() {
                return Ok(None);
            }
            store.request_done(&context.server, asked.id).await?;
        }
        Ok::<_, Error>(None)
    };
    let prune = async |(id, paths): (ObjectId, Vec<Retired>)| {
        match prune::carry_out(&context, &paths, &stop).await? {
            Carried::Out => store.request_done(&context.server, id).await,
            Carried::Refused(why) => store.refuse_request(&context.server, id, &why).await,
            // The next leader begins again.
            Carried::Stopped => Ok(()),
        }
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
        let result = match result {
            // Not ended by a stop in the middle of a write: the lease is given back when all writes are answered.
            Ok(Some(asked)) => prune(asked).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            tracing::warn!(error = %error.message, "what commands ask for cannot be read; trying again");
        }
    }
}

/// What commands have asked for.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    /// Backfills.
    pub backfills: Vec<Wish>,
    /// Rules to pause.
    pub paused: Vec<(RuleId, Hold)>,
}

/// Looks for what commands have asked for, and for pauses that are over.
pub(super) async fn wishes(context: Arc<Context>, store: Store, out: mpsc::Sender<Wishes>, stop: CancellationToken) {
    let mut seen: BTreeMap<String, i64> = BTreeMap::new();
    let mut noticed: Vec<(String, i64)> = Vec::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_FOR_WISHES) => {}
            () = stop.cancelled() => return,
        }
        let Ok(states) = store.standing(&context.server).await else { continue };
        let mut wishes = Wishes::default();
        let mut pauses = false;
        for (name, state) in states {
            let newer = seen.insert(name.clone(), state.generation) != Some(state.generation);
            let rule = context.plan.rules.iter().find(|rule| rule.name == name);
            pauses |= matches!(&state.backfill, Backfill::Held(hold) if hold.paused);
            match (newer, rule, &state.backfill) {
                (true, Some(rule), Backfill::Pending(after)) => {
                    wishes.backfills.push(Wish { rule: rule.id, generation: state.generation, after: after.clone() });
                    noticed.push((name, state.generation));
                }
                (true, Some(rule), Backfill::Held(hold)) if hold.paused => {
                    wishes.paused.push((rule.id, hold.clone()));
                    noticed.push((name, state.generation));
                }
                _ => {}
            }
        }
        let asked = !wishes.backfills.is_empty() || !wishes.paused.is_empty();
        if asked && out.send(wishes).await.is_err() {
            return;
        }
        // For the command alone, which waits no longer than a leader is there: what `denormd wait` is asked after it must count
        // what was asked for. What cannot be recorded now is recorded the next time round.
        for (name, generation) in std::mem::take(&mut noticed) {
            if store.notice(&context.server, &name, generation).await.is_err() {
                noticed.push((name, generation));
            }
        }
        // Found resumed the next time round.
        if pauses && let Err(error) = store.resume(&context.server, None).await {
            tracing::warn!(error = %error.message, "the end of a pause cannot be recorded; trying again");
        }
    }
}
