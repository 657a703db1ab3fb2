//! The jobs that the pipeline has started: backfills and fan-out jobs.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use tokio::sync::mpsc;

use crate::{
    checkpoint::fan_out::{FanOut, Subject},
    dead_letter::Written,
    jobs::{backfill::BackfillRequest, mailbox::Mailbox},
    reconcile::Context,
};
use denormd_rules::plan::RuleId;

/// The jobs in progress, and the way to start more.
#[derive(Debug)]
pub(super) struct Jobs {
    pub backfills: Arc<Mailbox<RuleId, BackfillRequest>>,
    pub fan_outs: Arc<Mailbox<Subject, FanOut>>,
    /// The newest request of each fan-out job that is not done.
    open: HashMap<Subject, FanOut>,
    /// Receives the writes of rules that have dead letters.
    pub written: mpsc::Sender<(RuleId, Written)>,
}

impl Jobs {
    pub fn new(written: mpsc::Sender<(RuleId, Written)>) -> Self {
        Self { backfills: Arc::default(), fan_outs: Arc::default(), open: HashMap::new(), written }
    }

    /// Starts a fan-out job, or another pass of it.
    pub fn fan_out(&mut self, context: &Context, fan_out: FanOut) {
        context.memory.fan_outs.begin(&fan_out.subject);
        self.open.insert(fan_out.subject.clone(), fan_out.clone());
        self.fan_outs.put(fan_out.subject.clone(), fan_out);
    }

    /// Ends a fan-out job, unless another pass was requested.
    pub fn fanned_out(&mut self, context: &Context, done: &FanOut) {
        if self.open.get(&done.subject).is_some_and(|newest| newest.request == done.request) {
            self.open.remove(&done.subject);
            context.memory.fan_outs.end(&done.subject);
        }
    }

    /// True if a fan-out job is open.
    pub fn has_fan_outs(&self) -> bool {
        !self.open.is_empty()
    }

    /// Number of open fan-out jobs of each rule that has any.
    pub fn count_fan_outs(&self) -> BTreeMap<usize, usize> {
        let mut counts = BTreeMap::new();
        self.open.keys().for_each(|subject| *counts.entry(subject.rule.0).or_default() += 1);
        counts
    }

    /// The open fan-out jobs of a rule.
    pub fn fan_outs_of(&self, rule: RuleId) -> impl Iterator<Item = &FanOut> {
        self.open.values().filter(move |fan_out| fan_out.subject.rule == rule)
    }
}
