//! Batches of work: their start, and what follows from their outcomes.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use tokio::{
    task::{JoinError, JoinSet},
    time::Instant,
};

use super::{Pipeline, record::Change, schedule::Next};
use crate::{
    dead_letter::Written,
    pace::{self, spacing},
    reconcile::{
        self, Outcome,
        batch::{End, Ended},
    },
    request::{Scope, Task},
    workqueue::{Batch, BatchLimits, Lane, Work},
};
use denormd_model::{failpoint, rule_state::BlockReason};
use denormd_mongo::{code, error::Kind};

/// Time after which a write to all targets of a key counts as long.
const LONG: Duration = Duration::from_millis(250);
/// Privilege errors of a key before its rule becomes unavailable: an operator who edits a user's roles may remove them
/// for a moment.
const REFUSALS: u32 = 5;

/// Batches that are not finished.
#[derive(Debug, Default)]
pub(super) struct Batches {
    pub running: JoinSet<Outcome>,
    /// Running batches that write all targets of a key, with their start times.
    whole: HashMap<(Lane, u64), Instant>,
    /// Outcomes that stop their rule: their keys are not done before that is recorded.
    pub parked: Vec<Outcome>,
}

/// The reason to stop its rule that a batch has found. `resumed` is the generation under which the rule was resumed last.
fn stop_of(outcome: &Outcome, resumed: i64) -> Option<Change> {
    // A batch that began before that cannot know of an agreement that came with it.
    let ends = || outcome.keys.iter().map(|ended| &ended.end).filter(|_| outcome.generation >= resumed);
    if ends().any(|end| matches!(end, End::RemovalLimit)) {
        return Some(Change::Block(BlockReason::RemovalLimit));
    }
    if ends().any(|end| matches!(end, End::SourceGone)) {
        return Some(Change::Block(BlockReason::SourceGone));
    }
    outcome.keys.iter().find_map(refused)
}

fn refused(ended: &Ended) -> Option<Change> {
    match &ended.end {
        End::Failed(error)
            if error.code == Some(code::UNAUTHORIZED)
                && (ended.work.attempts >= REFUSALS || ended.work.has_failed_for_long()) =>
        {
            Some(Change::Unavailable(error.message.clone()))
        }
        _ => None,
    }
}

impl Pipeline {
    /// Size of the backlog: keys with changes, and the targets of large fan-outs, whose number is not known. Paused and
    /// failed keys do not count, because the batches are free for others.
    pub(super) fn backlog(&self) -> usize {
        let busy = self.batches.running.len() >= self.context.limits.batches;
        match self.batches.running.is_empty() {
            false if self.batches.whole.values().any(|start| start.elapsed() >= LONG) => usize::MAX,
            false if self.context.memory.fan_outs.any() => self.schedule.queue().depth(),
            false if busy => self.schedule.queue().all_late(),
            _ => 0,
        }
    }

    /// Starts batches while there is room. Requests that arrive while they run form the next batches.
    pub(super) fn dispatch(&mut self) {
        let limits = &self.context.limits;
        let (keys, all) = (limits.batch_keys, limits.batches);
        let silent = self.streams.iter().map(|stream| stream.delivered.elapsed());
        let batches = pace::batches(all, self.schedule.queue().has_room(), self.schedule.has_more(), silent);
        while self.batches.running.len() <= all {
            let limits = BatchLimits { keys, batches, all_running: self.batches.running.len() >= batches };
            let now = Instant::now();
            let crowded = |rule| self.context.memory.traits.is_crowded(rule);
            let stopping = |rule| self.rules.recorder.is_stopping(rule);
            let Some(mut batch) = self.schedule.take(limits, now, crowded, stopping) else { return };
            if !self.rules.may_run(&self.context.plan, batch.lane.0) {
                self.skip(batch);
                continue;
            }
            let elsewhere = self.context.memory.fan_outs.any() || self.rules.state(batch.lane.0).is_backfilling();
            self.schedule.postpone_verdicts(&mut batch, elsewhere, now);
            let detached = self.rules.state(batch.lane.0).is_blocked();
            let whole = |work: &Work| work.scope == Scope::All && work.slowness().read_limit.is_none();
            if batch.lane.1 == Task::Value && batch.items.iter().any(|(_, work)| whole(work)) {
                let restarted = batch.items.iter().any(|(_, work)| work.slowness().restarted.is_some());
                let start = if restarted { now.checked_sub(LONG) } else { None };
                self.batches.whole.insert((batch.lane, batch.number), start.unwrap_or(now));
            }
            let generation = self.rules.generation(batch.lane.0);
            self.batches.running.spawn(reconcile::run(self.context.clone(), batch, generation, detached));
        }
    }

    /// Drops pending requests of a stopped rule: its next backfill does their work.
    fn skip(&mut self, batch: Batch) {
        let done = Next::Done { pause: Duration::ZERO };
        let keys = batch.items.into_iter().map(|(key, work)| (key, work, done)).collect();
        self.schedule.finish(batch.lane, batch.number, &[], keys, Instant::now());
        self.acknowledge_pages();
    }

    /// Ends a batch whose task has ended.
    pub(super) fn ended(&mut self, outcome: Result<Outcome, JoinError>) {
        match outcome {
            Ok(outcome) => self.finish(outcome),
            Err(error) => {
                // The keys stay in the queue: the checkpoint does not pass them, and a restart processes them again.
                tracing::error!(%error, "a reconcile task panicked; stopping");
                self.context.stopping.cancel();
            }
        }
    }

    /// Ends a batch. If it has found that its rule must stop, this waits until that is recorded.
    pub(super) fn finish(&mut self, outcome: Outcome) {
        self.batches.whole.remove(&(outcome.lane, outcome.number));
        if let Some(stop) = stop_of(&outcome, self.rules.resumed(outcome.lane.0))
            && self.change(outcome.lane.0, stop, None)
        {
            self.batches.parked.push(outcome);
            return;
        }
        self.count_outcome(&outcome);
        self.report_written(&outcome);
        let recomputes = outcome.lane.1 == Task::Value && self.context.plan.rule(outcome.lane.0).gathers();
        let pause = if recomputes { spacing(outcome.took, outcome.keys.len()) } else { Duration::ZERO };
        let mut failed: BTreeMap<String, (usize, u32)> = BTreeMap::new();
        let mut keys = Vec::with_capacity(outcome.keys.len());
        for ended in outcome.keys {
            let mut work = ended.work;
            let next = match ended.end {
                End::Done | End::DeadLetter => Next::Done { pause },
                // The next backfill of a stopped rule does the remaining work.
                End::RemovalLimit | End::SourceGone | End::Later(_) | End::Failed(_)
                    if self.rules.state(outcome.lane.0).is_stopped() =>
                {
                    Next::Done { pause }
                }
                // The rule was resumed after the batch began.
                End::RemovalLimit | End::SourceGone => Next::Again { delay: Duration::ZERO },
                End::FanOut(fan_out) => {
                    self.jobs.fan_out(&self.context, fan_out);
                    Next::Done { pause }
                }
                End::Later(delay) => {
                    work.clear_failures();
                    Next::Again { delay }
                }
                End::Failed(error) => {
                    let is_lasting = error.kind == Kind::TimedOut || error.code == Some(code::UNAUTHORIZED);
                    let delay = reconcile::batch::backoff(work.attempts);
                    let (keys, attempts) = failed.entry(error.message).or_default();
                    (*keys, *attempts) = (*keys + 1, work.attempts.max(*attempts));
                    work.fails(is_lasting);
                    Next::Again { delay }
                }
            };
            keys.push((ended.key, work, next));
        }
        let rule = &self.context.plan.rule(outcome.lane.0).name;
        for (error, (keys, attempts)) in failed {
            tracing::warn!(rule, keys, attempts, error, "reconciles failed and are tried again");
        }
        failpoint::here("acknowledged");
        self.schedule.finish(outcome.lane, outcome.number, &outcome.follow_ups, keys, Instant::now());
        self.acknowledge_pages();
    }

    /// Reports what a batch has written, if its rule has dead letters: they are retried without their pause.
    fn report_written(&self, outcome: &Outcome) {
        let rule = outcome.lane.0;
        if !self.context.metrics.has_dead_letters(&self.context.plan.rule(rule).name) {
            return;
        }
        let mut written = Written::default();
        for ended in outcome.keys.iter().filter(|ended| matches!(ended.end, End::Done)) {
            written.add(&ended.key, &ended.work.scope);
        }
        if !written.is_empty() {
            // While the other side is busy, the dead letters wait for their own retry.
            self.jobs.written.try_send((rule, written)).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use denormd_model::key::Key;
    use denormd_rules::plan::RuleId;

    /// A batch that had found the removal limit reached ended after an operator had agreed, and withdrew the agreement.
    #[test]
    fn what_a_batch_found_before_an_agreement_does_not_stop_the_rule() {
        let outcome = |end| Outcome {
            lane: (RuleId(0), Task::Value),
            keys: vec![Ended { key: Key::one(1.into()), work: Work::default(), end }],
            follow_ups: Vec::new(),
            number: 1,
            generation: 5,
            took: Duration::ZERO,
        };
        for (end, reason) in
            [(|| End::RemovalLimit, BlockReason::RemovalLimit), (|| End::SourceGone, BlockReason::SourceGone)]
                as [(fn() -> End, BlockReason); 2]
        {
            assert_eq!(stop_of(&outcome(end()), 5), Some(Change::Block(reason)));
            assert_eq!(stop_of(&outcome(end()), 6), None);
        }
    }
}
