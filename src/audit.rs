//! The continuous audit: compares targets with their definition at a low rate, and repairs or reports what differs.

use std::{sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{Guard, OnDrift},
    error::{Error, Result},
    key::Key,
    mongo::Reads,
    plan::Rule,
    position::ClusterTime,
    reconcile::{
        Context,
        compare::{Compared, compare, compare_ids, projection},
        run::drifted,
    },
    request::Page,
    route::reference_requests,
};

/// Targets compared at once.
const PAGE: usize = 100;
/// How long a difference must last: a change may be on its way.
const SECOND_LOOK: Duration = Duration::from_secs(2);
/// How long the audit rests between two rounds over all rules, and after a failure.
const REST: Duration = Duration::from_secs(10);

/// Goes round over all targets of all rules, until `stop`.
pub async fn run(context: Arc<Context>, out: mpsc::Sender<Page>, stop: CancellationToken) {
    loop {
        let round = async {
            tokio::time::sleep(REST).await;
            for rule in context.plan.rules.iter().filter(|rule| rule.guard == Guard::Audit) {
                if let Err(error) = (Audit { context: &context, rule, out: &out }).round().await {
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

struct Audit<'a> {
    context: &'a Context,
    rule: &'a Rule,
    out: &'a mpsc::Sender<Page>,
}

impl Audit<'_> {
    /// Compares every target once.
    async fn round(&self) -> Result<()> {
        let mut after: Option<Bson> = None;
        loop {
            let started = tokio::time::Instant::now();
            let page = self.page(after.as_ref()).await?;
            let Some(last) = page.last().and_then(|target| target.get("_id")).cloned() else { return Ok(()) };
            let time = self.context.server.operation_time().await?;
            let compared = compare(self.context, self.rule, &page, time).await?;
            let suspects: Vec<Bson> =
                compared.into_iter().filter(|c| c.differences().next().is_some()).map(|c| c.target).collect();
            if !suspects.is_empty() {
                self.second_look(&suspects, time).await?;
            }
            after = Some(last);
            let millis = 1000 * page.len() / self.context.limits.audit_per_second.max(1);
            let budget = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
            tokio::time::sleep_until(started + budget).await;
        }
    }

    /// Looks again at what differed at `seen`.
    async fn second_look(&self, suspects: &[Bson], seen: ClusterTime) -> Result<()> {
        tokio::time::sleep(SECOND_LOOK).await;
        // While changes from before the first look wait, what is late would be taken for drift. The next round looks again.
        let applied =
            self.context.metrics.observation().and_then(|now| now.streams.iter().map(|stream| stream.applied).min());
        if applied.is_none_or(|applied| applied < seen) {
            return Ok(());
        }
        let time = self.context.server.operation_time().await?;
        let compared = compare_ids(self.context, self.rule, suspects, time).await?;
        let letters = self.context.dead_letters.of_rule(&self.context.server, self.rule).await?;
        // What the server refuses to hold is known, and nobody's drift.
        let refused = |c: &Compared| letters.iter().any(|l| l.concerns(&Key::one(c.target.clone()), &c.references));
        let drift = compared.into_iter().filter(|c| c.differences().next().is_some() && !refused(c));
        let drift: Vec<Compared> = drift.collect();
        for target in &drift {
            drifted(self.context, self.rule, target);
        }
        if self.rule.on_drift == OnDrift::Report || drift.is_empty() {
            return Ok(());
        }
        let requests = drift.into_iter().flat_map(|c| reference_requests(self.rule, &Key::one(c.target), c.references));
        let (done, acknowledged) = oneshot::channel();
        let page = Page { requests: requests.collect(), after: time, done };
        self.out.send(page).await.map_err(|_| Error::internal("the pipeline is gone"))?;
        acknowledged.await.map_err(|_| Error::internal("the pipeline is gone"))
    }

    /// The next targets by `_id`, across BSON types (see the backfill's pages).
    async fn page(&self, after: Option<&Bson>) -> Result<Vec<Document>> {
        let mut command = doc! {
            "find": &self.rule.target.namespace.collection, "filter": self.rule.target.filter.clone().unwrap_or_default(),
            "hint": {"_id": 1}, "projection": projection(self.rule), "limit": i64::try_from(PAGE).unwrap_or(1) + 1,
        };
        if let Some(after) = after {
            command.insert("min", doc! {"_id": after.clone()});
        }
        let rows = self.context.server.read(&self.rule.target.namespace.database, command, Reads::default()).await?;
        let page: Result<Vec<Document>> =
            rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect();
        let mut page = page?;
        page.retain(|target| target.get("_id") != after);
        Ok(page)
    }
}
