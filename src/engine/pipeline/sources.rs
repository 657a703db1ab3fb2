//! The rules' source collections: which exist, and which are there again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bson::Bson;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    inspection::adoption::{Losses, losses},
    reconcile::Context,
};
use denormd_model::{
    namespace::Namespace,
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::error::{Kind, Result};
use denormd_rules::plan::{Rule, RuleId};

/// Interval between reads of the list of existing source collections.
const READ_SOURCES: Duration = Duration::from_secs(2);
/// Counts of losses take no more than a twentieth of the time.
const PAUSE_FACTOR: u32 = 20;

/// A finding about sources.
#[derive(Debug)]
pub(super) enum Seen {
    /// The source collections with their UUIDs, or None for one that does not exist.
    All(Vec<(Namespace, Option<Bson>)>),
    /// The source of a rule is there again, with this UUID.
    Returned { rule: RuleId, uuid: Bson },
}

/// Reads at intervals which source collections exist.
pub(super) async fn look_at_intervals(context: Arc<Context>, out: mpsc::Sender<Seen>, stop: CancellationToken) {
    loop {
        let read = async {
            tokio::time::sleep(READ_SOURCES).await;
            read_sources(&context).await
        };
        // The driver's futures are large.
        match stop.run_until_cancelled(Box::pin(read)).await {
            Some(Ok(sources)) => {
                if out.send(Seen::All(sources)).await.is_err() {
                    return;
                }
            }
            Some(Err(error)) => {
                tracing::warn!(error = %error.message, "source collections cannot be listed; retrying");
            }
            None => return,
        }
    }
}

/// Counts what the rules without a source would lose if they ran again, and reports those that may. An application that
/// writes one document creates the collection, and `mongorestore` fills it bit by bit: neither is the source's return.
pub(super) async fn returns(context: Arc<Context>, out: mpsc::Sender<Seen>, stop: CancellationToken) {
    // The count covers the whole rule, not only this partition's keys.
    let whole = context.whole();
    let mut waiting: BTreeMap<RuleId, Waiting> = BTreeMap::new();
    while stop.run_until_cancelled(tokio::time::sleep(READ_SOURCES)).await.is_some() {
        let states = context.published.borrow().states.clone();
        let lacks = |rule: RuleId| states.get(rule.0) == Some(&RuleState::Blocked(BlockReason::SourceGone));
        waiting.retain(|rule, _| lacks(*rule));
        for rule in context.plan.rules.iter().filter(|rule| lacks(rule.id)) {
            let waits = waiting.entry(rule.id).or_default();
            if waits.next.is_some_and(|next| Instant::now() < next) {
                continue;
            }
            let start = Instant::now();
            let Some(looked) = stop.run_until_cancelled(Box::pin(look(&whole, rule, waits))).await else { return };
            waits.next = Some(Instant::now() + start.elapsed() * PAUSE_FACTOR);
            match looked {
                Ok(Some(uuid)) => {
                    if out.send(Seen::Returned { rule: rule.id, uuid }).await.is_err() {
                        return;
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(rule = %rule.name, error = %error.message, "the source cannot be compared; retrying");
                }
            }
        }
    }
}

/// A rule that waits for its source.
#[derive(Debug, Default)]
struct Waiting {
    /// Time of the next count: counts take no more than a twentieth of the time.
    next: Option<Instant>,
    /// The losses that were logged last.
    logged: Option<Losses>,
}

/// The UUID of a rule's source, if it is there again and the rule may run.
async fn look(whole: &Context, rule: &Rule, waits: &mut Waiting) -> Result<Option<Bson>> {
    let Namespace { database, collection } = &rule.source.namespace;
    let Some(uuid) = whole.server.collection_uuids(database, &[collection]).await?.remove(collection) else {
        return Ok(None);
    };
    let losses = losses(whole, rule).await?;
    if losses.are_small() {
        return Ok(Some(uuid));
    }
    if waits.logged != Some(losses) {
        tracing::warn!(
            rule = %rule.name, %losses,
            "the source collection is there again, but the rule stays blocked; `denormd unblock {}` agrees to the loss", rule.name
        );
        waits.logged = Some(losses);
    }
    Ok(None)
}

/// The source collections with their UUIDs, or None for one that does not exist. A collection in a database that may
/// not be listed is left out: its rules are unavailable, or will be.
pub(super) async fn read_sources(context: &Context) -> Result<Vec<(Namespace, Option<Bson>)>> {
    let sources: BTreeSet<&Namespace> = context.plan.rules.iter().map(|rule| &rule.source.namespace).collect();
    let mut found = Vec::new();
    for (database, names) in Namespace::by_database(sources) {
        let mut uuids = match context.server.collection_uuids(database, &names).await {
            Err(error) if error.kind == Kind::Privilege => continue,
            uuids => uuids?,
        };
        let of_one =
            |name: &str| (Namespace { database: database.to_owned(), collection: name.to_owned() }, uuids.remove(name));
        found.extend(names.into_iter().map(of_one));
    }
    Ok(found)
}
