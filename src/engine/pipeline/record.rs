//! Records changes of the rules' states, one after another, while the loop goes on.
//!
//! Until a change is recorded, the state of its rule in memory stays the same, and nothing that depends on the change
//! counts as done: the batch of events that caused it is held back from the checkpoint, and if the change stops the
//! rule, the rule's keys wait in the queue.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::schedule::Hold;
use crate::{
    checkpoint::{
        rule_record::{Agreement, RuleRecord},
        store::Store,
    },
    reconcile::Context,
};
use denormd_model::rule_state::{BlockReason, RuleState};
use denormd_mongo::error::Result;
use denormd_rules::plan::{Rule, RuleId};

/// The first pause after a failed attempt; each further attempt makes it longer by as much.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, in first pauses.
const LONGEST: u32 = 50;

/// A change of a rule's state, or of the record of its source.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// The rule is blocked until an operator agrees to its further effects: its fields stay as they are. An unavailable rule is
    /// blocked as well; a paused one stays paused, and is blocked once resumed.
    Block(BlockReason),
    /// The rule is stopped until the cluster meets this requirement. Its fan-out jobs are deleted: the backfill on its
    /// return covers them.
    Unavailable(String),
    /// The backfill of the rule is restarted.
    Backfill,
    /// The same because changes were lost: until the backfill ends, the rule is degraded.
    Lost,
    /// The rule is unblocked and backfilled from its source, which is there again with this UUID. A rule that waited for `denormd
    /// backfill` goes on waiting.
    SourceBack(Bson),
    /// The source of the rule has this UUID.
    SourceSeen(Bson),
}

impl Change {
    /// True if no key of the rule runs once it is recorded.
    pub fn stops(&self) -> bool {
        matches!(self, Self::Block(_) | Self::Unavailable(_))
    }

    /// True if a rule in this state can change so.
    pub fn applies_to(&self, state: &RuleState) -> bool {
        match self {
            Self::Block(_) => state.block().is_none(),
            Self::Unavailable(_) => !state.is_stopped(),
            // A backfill that waits for its command covers what a lost position may have lost.
            Self::Backfill | Self::Lost => !state.is_stopped() && *state != RuleState::AwaitingBackfill,
            Self::SourceBack(_) => *state == RuleState::Blocked(BlockReason::SourceGone),
            Self::SourceSeen(_) => true,
        }
    }

    /// True if the other change of the same rule need not be recorded after this one.
    fn covers(&self, other: &Self) -> bool {
        match self {
            Self::Block(_) => other.stops(),
            Self::Unavailable(_) => matches!(other, Self::Unavailable(_)),
            Self::Backfill => matches!(other, Self::Backfill),
            Self::Lost => matches!(other, Self::Backfill | Self::Lost),
            Self::SourceBack(_) => matches!(other, Self::SourceBack(_)),
            Self::SourceSeen(_) => matches!(other, Self::SourceSeen(_)),
        }
    }

    /// The next state of a rule in this state, and the effect on an agreement; None if the rule cannot change so.
    fn next(&self, state: &RuleState) -> Option<(RuleState, Agreement)> {
        self.applies_to(state).then(|| match self {
            Self::Block(reason) => (state.blocked(reason.clone()), Agreement::Ended),
            Self::Unavailable(reason) => (RuleState::Unavailable { reason: reason.clone() }, Agreement::Kept),
            Self::Backfill | Self::Lost => (RuleState::BACKFILL, Agreement::Kept),
            Self::SourceBack(_) => (RuleState::BACKFILL, Agreement::Ended),
            Self::SourceSeen(_) => (state.clone(), Agreement::Kept),
        })
    }

    /// Records the change, unless the rule is in another state by now: a command may have paused it.
    pub async fn record(&self, context: &Context, store: &Store, rule: &Rule, generation: i64) -> Result<Recorded> {
        let server = &context.server;
        let more = match self {
            Self::SourceSeen(uuid) => {
                let is_recorded = store.source_seen(server, &rule.name, generation, uuid).await?;
                return Ok(if is_recorded { Recorded::Source } else { Recorded::Nothing });
            }
            // Until a backfill has ended.
            Self::Lost => doc! {"degraded": true},
            Self::SourceBack(uuid) => doc! {"source_seen": true, "source_uuid": uuid.clone()},
            Self::Block(_) | Self::Unavailable(_) | Self::Backfill => Document::new(),
        };
        let next = |seen: Option<&RuleRecord>| {
            let (state, agreement) = self.next(seen.map_or(&RuleState::Live, |seen| &seen.state))?;
            let waits_again = matches!(self, Self::SourceBack(_)) && seen.is_some_and(|seen| seen.awaiting);
            Some((if waits_again { RuleState::AwaitingBackfill } else { state }, agreement))
        };
        let (state, generation) = store.change_rule(server, rule, next, more).await?;
        if matches!(state, RuleState::Unavailable { .. }) {
            context.fan_outs.forget(server, &rule.name).await?;
        }
        Ok(Recorded::State(state, generation))
    }
}

/// The effect of a change on the record of its rule.
#[derive(Debug)]
pub(super) enum Recorded {
    /// The rule has this state, with this generation.
    State(RuleState, i64),
    /// The record names the source.
    Source,
    /// Nothing: a command has changed the record, and the leader has not read that yet.
    Nothing,
}

/// A change to record.
#[derive(Debug)]
pub(super) struct Order {
    pub rule: RuleId,
    pub change: Change,
    /// The batches before which the checkpoint stays until the change is recorded: the oldest one of each stream.
    pub holds: Vec<Hold>,
}

/// The changes to record, in their order. There are no more than one of each kind for each rule, beside the one that is being
/// recorded.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    orders: VecDeque<Order>,
    /// The recording of the first order, if it has begun.
    recording: JoinSet<Option<Recorded>>,
    /// The generation of the rule's state when that began.
    begun_at: i64,
}

impl Recorder {
    /// Adds a change of a rule whose state has this generation, unless it is covered by one that is not recorded yet. Returns
    /// the hold if an older one is enough.
    ///
    /// The pipeline polls the recorded states, so it may begin a backfill before the answer to the write that requested the backfill
    /// arrives. That backfill may already have passed the targets of this change, so this change is recorded separately.
    #[must_use]
    pub fn add(&mut self, rule: RuleId, change: Change, hold: Option<Hold>, generation: i64) -> Option<Hold> {
        let is_read = !self.recording.is_empty() && self.begun_at != generation;
        let mut orders = self.orders.iter_mut().enumerate();
        let known =
            orders.find(|(nth, order)| order.rule == rule && order.change.covers(&change) && !(is_read && *nth == 0));
        match known.map(|(_, order)| order) {
            Some(order) if hold.is_some_and(|hold| order.holds.iter().any(|held| held.stream == hold.stream)) => hold,
            Some(order) => {
                order.holds.extend(hold);
                None
            }
            None => {
                self.orders.push_back(Order { rule, change, holds: hold.into_iter().collect() });
                None
            }
        }
    }

    /// True if a change that stops the rule is not recorded yet.
    pub fn is_stopping(&self, rule: RuleId) -> bool {
        self.orders.iter().any(|order| order.rule == rule && order.change.stops())
    }

    /// The changes that are not recorded yet.
    pub fn open(&self) -> impl Iterator<Item = (RuleId, &Change)> {
        self.orders.iter().map(|order| (order.rule, &order.change))
    }

    /// The first change, unless one is being recorded.
    pub fn first(&self) -> Option<&Order> {
        self.orders.front().filter(|_| self.recording.is_empty())
    }

    /// Removes the first change.
    pub fn pop(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Begins to record the first change of a rule whose state has this generation.
    pub fn start(&mut self, context: &Arc<Context>, store: &Store, generation: i64) {
        let Some(Order { rule, change, .. }) = self.first() else { return };
        let (context, store, rule, change) = (context.clone(), store.clone(), *rule, change.clone());
        self.begun_at = generation;
        self.recording.spawn(async move { until_recorded(&context, &store, rule, &change, generation).await });
    }

    /// Waits until the first change is recorded; cancelling the wait loses nothing. None if nothing is being recorded, or
    /// the pipeline stops before that succeeds: the checkpoint stays before the cause of the change.
    pub async fn recorded(&mut self, stop: &CancellationToken) -> Option<(Order, Recorded)> {
        match self.recording.join_next().await? {
            Ok(Some(recorded)) => return Some((self.pop()?, recorded)),
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "recording a rule's state panicked; stopping");
                stop.cancel();
            }
        }
        self.orders.clear();
        None
    }
}

/// Records a change, with retries until it succeeds or the pipeline stops. None if it was stopped.
async fn until_recorded(
    context: &Context,
    store: &Store,
    rule: RuleId,
    change: &Change,
    generation: i64,
) -> Option<Recorded> {
    let mut attempts = 0_u32;
    loop {
        // The driver's futures are large.
        let error = match Box::pin(change.record(context, store, context.plan.rule(rule), generation)).await {
            Ok(recorded) => return Some(recorded),
            Err(error) => error,
        };
        let name = &context.plan.rule(rule).name;
        context.metrics.record_error(Some(name), "record the state of the rule", &error);
        tracing::warn!(rule = %name, error = %error.message, "the state of the rule cannot be recorded; trying again");
        attempts += 1;
        context.stopping.run_until_cancelled(tokio::time::sleep(PAUSE * attempts.min(LONGEST))).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: RuleId = RuleId(0);

    fn block() -> Change {
        Change::Block(BlockReason::SourceGone)
    }

    fn unavailable(reason: &str) -> Change {
        Change::Unavailable(reason.to_owned())
    }

    #[test]
    fn a_change_is_recorded_once_however_often_it_is_asked_for() {
        let mut recorder = Recorder::default();
        let changes = [Change::Backfill, unavailable("one"), unavailable("two"), block(), unavailable("three")];
        let mut spare = Vec::new();
        for (batch, change) in (1..).zip(changes) {
            spare.extend(recorder.add(RULE, change, Some(Hold { stream: 0, batch }), 1));
        }
        assert_eq!(spare, [3, 5].map(|batch| Hold { stream: 0, batch }));
        assert_eq!(recorder.add(RULE, Change::Backfill, Some(Hold { stream: 1, batch: 6 }), 1), None);
        assert_eq!(recorder.add(RuleId(1), Change::Backfill, None, 1), None);
        assert_eq!(recorder.add(RULE, Change::Backfill, None, 1), None);
        assert_eq!(recorder.add(RuleId(2), Change::Lost, None, 1), None);
        assert_eq!(recorder.add(RuleId(2), Change::Backfill, None, 1), None);
        let batches = |order: &Order| order.holds.iter().map(|hold| hold.batch).collect::<Vec<_>>();
        let orders = recorder.orders.iter().map(|order| (order.rule, order.change.clone(), batches(order)));
        let expected = [
            (RULE, Change::Backfill, vec![1, 6]),
            (RULE, unavailable("one"), vec![2]),
            (RULE, block(), vec![4]),
            (RuleId(1), Change::Backfill, vec![]),
            (RuleId(2), Change::Lost, vec![]),
        ];
        assert_eq!(orders.collect::<Vec<_>>(), expected);
        assert!(recorder.is_stopping(RULE) && !recorder.is_stopping(RuleId(1)));
    }

    /// The backfill had already passed the targets of the second change, and the checkpoint advanced past that change.
    #[tokio::test]
    async fn a_change_after_the_backfill_has_begun_is_not_covered_by_it() {
        let mut recorder = Recorder::default();
        let add = |recorder: &mut Recorder, batch, generation| {
            recorder.add(RULE, Change::Backfill, Some(Hold { stream: 0, batch }), generation)
        };
        assert_eq!(add(&mut recorder, 1, 5), None);
        // Its answer does not arrive.
        recorder.begun_at = 5;
        recorder.recording.spawn(std::future::pending());
        assert_eq!(add(&mut recorder, 2, 5), Some(Hold { stream: 0, batch: 2 }), "the backfill begins later");
        assert_eq!(add(&mut recorder, 3, 6), None, "it has been read from the state database");
        assert_eq!(add(&mut recorder, 4, 6), Some(Hold { stream: 0, batch: 4 }));
        assert_eq!(recorder.orders.len(), 2);
    }

    #[test]
    fn a_block_applies_to_a_stopped_rule_and_nothing_else_does() {
        let paused = RuleState::Paused { until: None, blocked: None };
        assert!(block().applies_to(&paused) && block().applies_to(&RuleState::Live));
        assert_eq!(block().next(&paused), Some((paused.blocked(BlockReason::SourceGone), Agreement::Ended)));
        assert!(!block().applies_to(&paused.blocked(BlockReason::RemovalLimit)));
        assert!(!unavailable("").applies_to(&paused) && !Change::Backfill.applies_to(&paused));
        assert!(
            !Change::Backfill.applies_to(&RuleState::AwaitingBackfill) && Change::Backfill.applies_to(&RuleState::Live)
        );
        // A pause that is recorded while a change is tried again.
        let source_back = Change::SourceBack(Bson::Null);
        for change in [Change::Backfill, Change::Lost, unavailable(""), source_back] {
            assert_eq!(change.next(&paused), None, "{change:?}");
        }
        let blocked = RuleState::Blocked(BlockReason::RemovalLimit);
        assert!(!block().applies_to(&blocked) && !Change::SourceBack(Bson::Null).applies_to(&blocked));
        assert!(Change::SourceBack(Bson::Null).applies_to(&RuleState::Blocked(BlockReason::SourceGone)));
    }
}
