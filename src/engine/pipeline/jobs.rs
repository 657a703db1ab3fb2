//! The jobs that the pipeline starts: backfills and fan-out jobs.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::{
    checkpoint::fan_out::{FanOut, Subject},
    dead_letter::Written,
    jobs::{backfill::BackfillRequest, mailbox::Mailbox},
    reconcile::Context,
};
use denormd_rules::plan::RuleId;

/// The ways to start jobs.
#[derive(Debug)]
pub(super) struct Jobs {
    pub backfills: Arc<Mailbox<RuleId, BackfillRequest>>,
    pub fan_outs: Arc<Mailbox<Subject, FanOut>>,
    /// Receives the writes of rules that have dead letters.
    pub written: mpsc::Sender<(RuleId, Written)>,
}

impl Jobs {
    pub fn new(written: mpsc::Sender<(RuleId, Written)>) -> Self {
        Self { backfills: Arc::default(), fan_outs: Arc::default(), written }
    }

    /// Starts a fan-out job, or another pass of it.
    pub fn fan_out(&self, context: &Context, fan_out: FanOut) {
        context.memory.fan_outs.begin(&fan_out);
        self.fan_outs.put(fan_out.subject.clone(), fan_out);
    }
}
