//! The continuous audit: compares targets with their definition at a low rate, and repairs or reports what differs.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bson::Bson;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{Guard, OnDrift},
    error::{Error, Result},
    key::Key,
    plan::{Rule, RuleId},
    position::ClusterTime,
    reconcile::{
        Context,
        compare::{Compared, compare, compare_ids, projection},
        run::drifted,
        scan,
    },
    request::Page,
    route::reference_requests,
};

/// Targets compared at once.
const PAGE: usize = 100;
/// What a page that is not full takes at least: its commands cost the same for one target, and else many rules with few targets
/// each would be audited without a pause.
const LEAST: Duration = Duration::from_millis(100);
/// How long a difference must last at least: a change may be on its way.
const SECOND_LOOK: Duration = Duration::from_secs(2);
/// How often it is seen whether what was on its way has arrived.
const ARRIVED: Duration = Duration::from_millis(100);
/// How long the audit rests between two rounds over all rules, and after a failure.
const REST: Duration = Duration::from_secs(10);

/// Up to when everything is applied, for a rule whose targets must be true by then; None while it is being backfilled, or is
/// held.
pub type Applied = dyn Fn(RuleId) -> Option<ClusterTime> + Send + Sync;

/// Goes round over all targets of all rules, until `stop`.
pub async fn run(context: Arc<Context>, applied: Box<Applied>, out: mpsc::Sender<Page>, stop: CancellationToken) {
    loop {
        let round = async {
            tokio::time::sleep(REST).await;
            for rule in context.plan.rules.iter().filter(|rule| rule.guard == Guard::Audit && !rule.shadow) {
                if let Err(error) = round(&context, rule, &*applied, &out).await {
                    tracing::warn!(rule = %rule.name, error = %error.message, "the audit was interrupted");
                }
            }
        };
        tokio::select! {
            () = round => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Compares every target of a rule once, unless it is being backfilled meanwhile.
pub async fn round(context: &Context, rule: &Rule, applied: &Applied, out: &mpsc::Sender<Page>) -> Result<()> {
    Audit { context, rule, applied, out }.round().await
}

struct Audit<'a> {
    context: &'a Context,
    rule: &'a Rule,
    applied: &'a Applied,
    out: &'a mpsc::Sender<Page>,
}

impl Audit<'_> {
    async fn round(&self) -> Result<()> {
        let mut after: Option<Bson> = None;
        while (self.applied)(self.rule.id).is_some() {
            let started = tokio::time::Instant::now();
            let time = self.context.server.operation_time().await?;
            let page = scan::page(self.context, self.rule, &projection(self.rule), after.as_ref(), PAGE, time).await?;
            let Some(last) = page.last().and_then(|target| target.get("_id")).cloned() else { return Ok(()) };
            let compared = compare(self.context, self.rule, &page, time).await?;
            let suspects: Vec<Compared> = compared.into_iter().filter(|c| c.differences().next().is_some()).collect();
            if !suspects.is_empty() {
                self.second_look(&suspects).await?;
            }
            after = Some(last);
            let millis = 1000 * page.len() / self.context.limits.audit_per_second.max(1);
            let budget = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
            let least = if page.len() < PAGE { LEAST } else { Duration::ZERO };
            tokio::time::sleep_until(started + budget.max(least)).await;
        }
        Ok(())
    }

    /// Somebody else has written what differs in the same way when everything that the first look has seen is applied. What
    /// differs in another way is under way again, and seen in the next round.
    async fn second_look(&self, suspects: &[Compared]) -> Result<()> {
        let seen = self.context.server.operation_time().await?;
        tokio::time::sleep(SECOND_LOOK).await;
        loop {
            match (self.applied)(self.rule.id) {
                None => return Ok(()),
                Some(applied) if applied >= seen => break,
                Some(_) => tokio::time::sleep(ARRIVED).await,
            }
        }
        let ids: Vec<Bson> = suspects.iter().map(|suspect| suspect.target.clone()).collect();
        let time = self.context.server.operation_time().await?;
        let compared = compare_ids(self.context, self.rule, &ids, time).await?;
        let before: HashMap<Key, u64> =
            suspects.iter().map(|c| (Key::one(c.target.clone()), c.fingerprint())).collect();
        let same = |c: &Compared| before.get(&Key::one(c.target.clone())) == Some(&c.fingerprint());
        let letters = self.context.dead_letters.of_rule(&self.context.server, self.rule).await?;
        // What the server refuses to hold is known, and nobody's drift.
        let refused = |c: &Compared| letters.iter().any(|l| l.concerns(&Key::one(c.target.clone()), &c.references));
        let differing = compared.into_iter().filter(|c| c.differences().next().is_some());
        let drift = differing.filter(|c| same(c) && !refused(c));
        let drift: Vec<Compared> = drift.collect();
        drifted(self.context, self.rule, &drift);
        if self.rule.on_drift == OnDrift::Report || drift.is_empty() {
            return Ok(());
        }
        let requests = drift.into_iter().flat_map(|c| reference_requests(self.rule, &Key::one(c.target), c.references));
        let (done, acknowledged) = oneshot::channel();
        let page = Page { requests: requests.collect(), after: time, done };
        self.out.send(page).await.map_err(|_| Error::internal("the pipeline is gone"))?;
        acknowledged.await.map_err(|_| Error::internal("the pipeline is gone"))
    }
}
