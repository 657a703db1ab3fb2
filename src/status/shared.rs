//! What the instances of a deployment tell each other through the state database: who is there, and what the leader's status
//! is. So every instance can answer for the leader, which may listen on its loopback alone.
//!
//! The leader writes as often as it saves its position, and only while another instance is there. The server's log has no
//! more of it than what has changed.

use std::time::Duration;

use bson::{Bson, DateTime, Document, doc};
use futures_util::TryStreamExt;

use crate::{
    error::{Error, Result},
    lease::Holder,
    membership::{self, Instance},
    mongo::bounded,
    reconcile::Context,
};

use super::{
    Board,
    lag::{Lags, RHYTHM, RuleLag, seconds},
    leadership::Leadership,
    report::Status,
};

/// The collection of reports in the state database: one document a deployment and instance.
const COLLECTION: &str = "reports";
/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// In rounds of about a second: how often it is read which instances there are.
const SELDOM: u64 = 2;
/// The same: how often old reports of instances that are gone are removed.
const FORGET: u64 = 600;

/// What is known from others.
#[derive(Debug, Default)]
pub struct Shared {
    /// The instances that are there, this one included.
    pub instances: Vec<Instance>,
    /// What the leaders say, while this instance is not one of them.
    pub report: Option<Report>,
}

/// A leader's status as it was written.
#[derive(Debug, Clone)]
pub struct Report {
    /// When, in milliseconds since 1970 by the server's clock.
    pub at: i64,
    /// What it says.
    pub status: Box<Status>,
}

impl Report {
    /// For how many milliseconds nothing has been heard.
    pub fn silence(&self, now: i64) -> i64 {
        (now - self.at).max(0)
    }
}

impl Shared {
    /// The lags as they were reported. What has happened since is not known, so they grow with the report's age.
    pub fn lags(&self, now: i64) -> Lags {
        let Some(report) = &self.report else { return Lags::default() };
        let (status, silence) = (&report.status, report.silence(now));
        let since = if silence > RHYTHM { seconds(silence) } else { 0.0 };
        let rules = status.rules.iter().map(|rule| RuleLag {
            name: rule.name.clone(),
            own: rule.lag_seconds.unwrap_or_default() + since,
            chain: rule.chain_lag_seconds + since,
            runs: rule.lag_seconds.is_some(),
        });
        Lags {
            overall: status.lag_seconds.map(|lag| lag + since),
            rules: rules.collect(),
            unread: since,
            checkpoint: status.checkpoint_age_seconds,
            stream_age: since,
        }
    }
}

impl Board {
    /// Reads who is there; as a leader, tells the others; as a standby, reads what the leader says.
    pub(super) async fn share(&self, round: u64) {
        let Some((context, ttl)) = self.state().cluster.clone() else { return };
        let letters = &context.dead_letters;
        if round.is_multiple_of(SELDOM) {
            let there = membership::instances(&context.server, &letters.database, &letters.deployment, ttl);
            if let Ok(Ok(instances)) = tokio::time::timeout(PATIENCE, there).await {
                self.state().shared.instances = instances;
            }
        }
        let alone = self.state().shared.instances.len() < 2;
        if self.attached().is_some() {
            self.state().shared.report = None;
            if !alone && let Ok(Err(error)) = tokio::time::timeout(PATIENCE, self.write_report(&context, round)).await {
                tracing::debug!(error = %error.message, "the status could not be written for the other instances");
            }
        } else {
            self.hear(PATIENCE).await;
        }
    }

    /// As a standby, reads what the leaders say now. What was heard before stays, and gets old.
    pub async fn hear(&self, patience: Duration) {
        let known = {
            let state = self.state();
            let leadership = self.view(&state, self.metrics.now()).leadership;
            state.cluster.clone().map(|(context, _)| (context, leadership))
        };
        let Some((context, Leadership::Standby { leaders })) = known else { return };
        if let Ok(Ok(Some(report))) = tokio::time::timeout(patience, read(&context, &leaders)).await {
            self.state().shared.report = Some(report);
        }
    }

    async fn write_report(&self, context: &Context, round: u64) -> Result<()> {
        let status = serde_json::to_value(self.status()).ok().and_then(|status| Bson::try_from(status).ok());
        let status = status.ok_or_else(|| Error::internal("the status cannot be written as BSON"))?;
        let letters = &context.dead_letters;
        let id = doc! {"deployment": &letters.deployment, "instance": &self.instance};
        // By a pipeline, so that the server logs what differs instead of the whole.
        let update = vec![doc! {"$set": {"at": "$$NOW", "status": {"$literal": status}}}];
        let reports = context.server.unfenced().collection(&letters.database, COLLECTION);
        bounded(reports.update_one(doc! {"_id": id}, update).upsert(true)).await?;
        if round.is_multiple_of(FORGET) {
            let day = DateTime::from_millis(self.metrics.now() - 24 * 3600 * 1000);
            let old = doc! {"_id.deployment": &letters.deployment, "at": {"$lt": day}};
            bounded(reports.delete_many(old)).await?;
        }
        Ok(())
    }
}

/// What these leaders say, joined. None before any of them has said something.
async fn read(context: &Context, leaders: &[Holder]) -> Result<Option<Report>> {
    let letters = &context.dead_letters;
    let ids = leaders.iter().map(|leader| doc! {"deployment": &letters.deployment, "instance": &leader.instance});
    let reports = context.server.collection(&letters.database, COLLECTION);
    let filter = doc! {"_id": {"$in": ids.collect::<Vec<_>>()}};
    let found: Vec<Document> = bounded(async { reports.find(filter).await?.try_collect().await }).await?;
    let read = |doc: &Document| {
        let status = doc.get("status")?.clone().into_relaxed_extjson();
        Some(Report {
            at: doc.get_datetime("at").ok()?.timestamp_millis(),
            // One of another version may not be understood: then nothing has been heard.
            status: Box::new(serde_json::from_value(status).ok()?),
        })
    };
    let reports: Vec<Report> = found.iter().filter_map(read).collect();
    if reports.len() < leaders.len() {
        return Ok(None);
    }
    let joined = reports
        .into_iter()
        .reduce(|all, one| Report { at: all.at.min(one.at), status: Box::new(all.status.joined(*one.status)) });
    Ok(joined)
}
