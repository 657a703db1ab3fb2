//! The continuous audit: compares targets with their definition at a low rate, and repairs or reports what differs.

mod pace;

use std::{collections::HashMap, sync::Arc, time::Duration};

use bson::{Bson, RawDocumentBuf};
use futures_util::{StreamExt, stream};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    reconcile::{
        Context,
        compare::{Compared, Mismatch, compare_each, compare_ids_each, projection},
        guard::drifted,
        scan::{self, decoded_in_parts},
    },
    request::Page as Requested,
    route::reference_requests,
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{command::encoded, error::Result};
use denormd_rules::{
    config::{Guard, OnDrift},
    plan::{Rule, RuleId},
};
use pace::{Pace, expected_seconds};

/// Minimum age of a difference before it counts: its repair may be under way.
const CONFIRMATION_DELAY: Duration = Duration::from_secs(2);
/// Interval between checks that pending changes have been applied.
const ARRIVED: Duration = Duration::from_millis(100);
/// Pause before each round of a rule, and after a failure.
const REST: Duration = Duration::from_secs(10);

/// The time up to which all changes to a rule's targets are applied; None while the rule is being backfilled, waits for
/// `denormd backfill`, or is stopped.
pub type Applied = dyn Fn(RuleId) -> Option<ClusterTime> + Send + Sync;

/// Compares all targets of each rule, round after round, until `stop`. The rules take turns, so that a small rule does
/// not wait for the round of a large one.
pub async fn run(context: Arc<Context>, applied: Box<Applied>, out: mpsc::Sender<Requested>, stop: CancellationToken) {
    let pace = Pace::new(context.limits.audit_per_second);
    let audited = context.plan.rules.iter().filter(|rule| rule.guard == Guard::Audit && !rule.shadow);
    let rounds = stream::iter(audited).for_each_concurrent(None, |rule| {
        let audit = Audit { context: &context, rule, applied: &*applied, out: &out, pace: &pace };
        async move {
            let mut round = None;
            loop {
                tokio::time::sleep(REST).await;
                if let Err(error) = audit.round(&mut round).await {
                    tracing::warn!(rule = %audit.rule.name, error = %error.message, "the audit was interrupted");
                }
            }
        }
    });
    tokio::select! {
        () = rounds => {}
        () = stop.cancelled() => {}
    }
}

/// Compares every target of a rule once. Ends early while a backfill or a fan-out job is open.
pub async fn round(context: &Context, rule: &Rule, applied: &Applied, out: &mpsc::Sender<Requested>) -> Result<()> {
    let pace = Pace::new(context.limits.audit_per_second);
    Audit { context, rule, applied, out, pace: &pace }.round(&mut None).await
}

struct Audit<'a> {
    context: &'a Context,
    rule: &'a Rule,
    applied: &'a Applied,
    out: &'a mpsc::Sender<Requested>,
    pace: &'a Pace,
}

/// The progress of a round.
#[derive(Clone)]
struct Round {
    begun: Instant,
    after: Option<Bson>,
    compared: u64,
    total: Option<u64>,
    unknown: u64,
    /// True while the sources of a rule that creates its targets are read: documents may be absent.
    in_sources: bool,
    ended: bool,
}

impl Round {
    fn begin(total: Option<u64>) -> Self {
        let begun = Instant::now();
        Self { begun, after: None, compared: 0, total, unknown: 0, in_sources: false, ended: false }
    }
}

/// A page of targets to compare.
struct Page {
    targets: Vec<RawDocumentBuf>,
    /// Number of this partition's sources without a usable key, whose documents cannot be determined.
    unusable: u64,
    /// Number of documents read.
    read: u64,
    last: Option<Bson>,
}

impl Audit<'_> {
    /// Goes on with a round, or begins one. Leaves it in `current` where it is interrupted: with a fan-out job now and then,
    /// the targets at the end would otherwise never be compared.
    async fn round(&self, current: &mut Option<Round>) -> Result<()> {
        if (self.applied)(self.rule.id).is_none() {
            return Ok(());
        }
        let round = match current {
            Some(round) => round,
            None => {
                let total = scan::count(self.context, self.rule, None, false).await;
                self.pace.expects(self.rule.id, total);
                current.insert(Round::begin(total))
            }
        };
        self.publish(round);
        while !round.ended {
            if (self.applied)(self.rule.id).is_none() {
                return Ok(());
            }
            let before = round.clone();
            let suspects = self.turn(round).await?;
            if !suspects.is_empty() {
                let looked = self.second_look(&suspects).await;
                if !matches!(looked, Ok(true)) {
                    // They are suspects again in the next attempt.
                    *round = before;
                    return looked.map(drop);
                }
            }
        }
        let since = round.begun;
        self.context.published.note(|snapshot| snapshot.clear_drift(&self.rule.name, since));
        *current = None;
        Ok(())
    }

    /// Compares some pages at the rate that all rules share, one rule at a time. Returns the targets that differ.
    async fn turn(&self, round: &mut Round) -> Result<Vec<Mismatch>> {
        let turn = self.pace.turn(self.rule.id).await;
        let mut suspects = Vec::new();
        for _ in 0..turn.pages {
            let started = Instant::now();
            let time = self.context.server.operation_time().await?;
            let page = self.page(round, time).await?;
            let mut take = |compared: Compared| suspects.extend(compared.mismatch());
            let mut failing = 0;
            for targets in decoded_in_parts(&page.targets) {
                failing += compare_each(self.context, self.rule, &targets?, time, &mut take).await?;
            }
            let read = page.read;
            round.compared += read;
            round.unknown += failing + page.unusable;
            round.ended = page.last.is_none() && (round.in_sources || self.rule.creates.is_none());
            round.in_sources |= page.last.is_none();
            round.after = page.last;
            self.publish(round);
            tokio::time::sleep_until(started + self.pace.lasts(read)).await;
            if round.ended || !suspects.is_empty() {
                break;
            }
        }
        Ok(suspects)
    }

    /// Reads a page of targets; or of sources, with stand-ins for the documents that should exist.
    async fn page(&self, round: &Round, time: ClusterTime) -> Result<Page> {
        let (after, most) = (round.after.as_ref(), self.pace.page());
        if round.in_sources {
            let page = self.context.sources_of_documents(self.rule, after, most, time).await?;
            let owned = page.unusable.iter().filter(|source| self.context.owns(self.rule, source));
            let unusable = owned.count() as u64;
            return Ok(Page { targets: encoded(&page.absent)?, unusable, read: page.read, last: page.last });
        }
        let page = scan::page(self.context, self.rule, &projection(self.rule), after, most, time).await?;
        Ok(Page { read: page.targets.len() as u64, targets: page.targets, unusable: 0, last: page.last })
    }

    /// Publishes the progress of the round.
    fn publish(&self, round: &Round) {
        let seconds = round.begun.elapsed().as_secs_f64();
        let now = self.context.metrics.now();
        self.context.published.note(|snapshot| {
            let audit = snapshot.audits.entry(self.rule.name.clone()).or_default();
            if round.ended {
                (audit.last_ended, audit.last_seconds, audit.last_unknown) = (Some(now), Some(seconds), round.unknown);
            }
            (audit.compared, audit.total) = (round.compared, round.total);
            audit.round_seconds = expected_seconds(round.compared, round.total, seconds)
                .or(audit.last_seconds)
                .or_else(|| self.pace.expected_seconds(round.total));
        });
    }

    /// Compares the suspects again once everything visible to the first comparison is applied. A target that still
    /// differs in the same way was changed by another writer. One that differs in another way is being updated, and the
    /// next round checks it. Returns false if a backfill or a fan-out job begins meanwhile.
    async fn second_look(&self, suspects: &[Mismatch]) -> Result<bool> {
        let seen = self.context.server.operation_time().await?;
        tokio::time::sleep(CONFIRMATION_DELAY).await;
        loop {
            match (self.applied)(self.rule.id) {
                None => return Ok(false),
                Some(applied) if applied >= seen => break,
                Some(_) => tokio::time::sleep(ARRIVED).await,
            }
        }
        let ids: Vec<Bson> = suspects.iter().map(|suspect| suspect.target.clone()).collect();
        let time = self.context.server.operation_time().await?;
        let before: HashMap<Key, u64> =
            suspects.iter().map(|suspect| (Key::one(suspect.target.clone()), suspect.fingerprint)).collect();
        let mut drift = Vec::new();
        let mut take = |compared: Compared| {
            let same = |m: &Mismatch| before.get(&Key::one(m.target.clone())) == Some(&m.fingerprint);
            drift.extend(compared.mismatch().filter(same));
        };
        compare_ids_each(self.context, self.rule, &ids, time, &mut take).await?;
        // A document that the server refuses to store has a dead letter. It is not drift.
        let about: Vec<_> = drift.iter().map(|m| (Key::one(m.target.clone()), m.references.as_slice())).collect();
        let dead_letters = self.context.dead_letters.concerning(&self.context.server, self.rule, &about).await?;
        let refused =
            |m: &Mismatch| dead_letters.iter().any(|l| l.concerns(&Key::one(m.target.clone()), &m.references));
        drift.retain(|mismatch| !refused(mismatch));
        drifted(self.context, self.rule, &drift);
        if self.rule.on_drift == OnDrift::Report || drift.is_empty() {
            return Ok(true);
        }
        let requests = drift.into_iter().flat_map(|m| reference_requests(self.rule, &Key::one(m.target), m.references));
        Requested::send(self.out, requests.collect(), time).await?.done().await?;
        Ok(true)
    }
}
