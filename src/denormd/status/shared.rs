//! Data that the instances of a deployment share through the state database: the list of instances, and the leader's
//! status. So every instance can answer for the leader, which may listen on its loopback alone.
//!
//! The leader writes as often as it saves its position, and only while there is another instance. The oplog gets only
//! the fields that changed.

use std::{collections::BTreeMap, time::Duration};

use bson::{Bson, DateTime, Document, doc};
use futures_util::TryStreamExt;

use denormd_engine::{
    deployment::{
        instances::{self, Instance},
        lease::Holder,
    },
    metrics::Cause,
    reconcile::Context,
};
use denormd_mongo::{
    bounded,
    error::{Error, Result},
};

use super::{
    Board,
    lag::{Lags, RHYTHM, RuleLag, seconds},
    leadership::Leadership,
    report::Status,
};

/// The collection of reports in the state database: one document per deployment and instance.
const COLLECTION: &str = "reports";
/// Timeout of one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Rounds, of about a second, between reads of the instances.
const SELDOM: u64 = 2;
/// Rounds between removals of old reports of instances that are gone. An instance may lead for a short time only.
const FORGET: u64 = 30;
/// Age, in milliseconds, from which a report says nothing about the drift of now. It is written once a second.
const SILENT: i64 = 30_000;
/// Age, in milliseconds, from which a report is old. Only the report of an instance that leads is read.
const OLD: i64 = 3600 * 1000;

/// Data from other instances.
#[derive(Debug, Default)]
pub struct Shared {
    /// The running instances, this one included.
    pub instances: Vec<Instance>,
    /// The report of the leaders, while this instance is not one of them.
    pub report: Option<Report>,
}

/// A leader's status as it was written.
#[derive(Debug, Clone)]
pub struct Report {
    /// Time of the report, in milliseconds since 1970 by the server's clock.
    pub at: i64,
    /// The reported status.
    pub status: Box<Status>,
}

impl Report {
    /// Age of the report in milliseconds.
    pub fn silence(&self, now: i64) -> i64 {
        (now - self.at).max(0)
    }
}

impl Shared {
    /// The reported lags. Later changes are not known, so the lags grow with the report's age. While a partition is not led, no
    /// lag is known.
    pub fn lags(&self, now: i64) -> Lags {
        let Some(report) = &self.report else { return Lags::default() };
        let (status, silence) = (&report.status, report.silence(now));
        let since = if silence > RHYTHM { seconds(silence) } else { 0.0 };
        let is_whole = status.not_led().is_empty();
        let grown = |lag: Option<f64>| lag.filter(|_| is_whole).map(|lag| lag + since);
        let rules = status.rules.iter().map(|rule| RuleLag {
            name: rule.name.clone(),
            own: rule.lag_seconds.unwrap_or_default() + since,
            chain: grown(rule.chain_lag_seconds),
            is_known: is_whole && rule.lag_seconds.is_some(),
        });
        Lags {
            overall: grown(status.lag_seconds),
            rules: rules.collect(),
            unread: since,
            checkpoint: status.checkpoint_age_seconds,
            stream_age: since,
        }
    }
}

impl Board {
    /// Reads the list of instances; a leader also writes its report, a standby also reads the leader's.
    pub(super) async fn share(&self, round: u64) {
        let Some((context, ttl)) = self.state().cluster.clone() else { return };
        let dead_letters = &context.dead_letters;
        if round.is_multiple_of(SELDOM) {
            let there = instances::instances(&context.server, &dead_letters.database, &dead_letters.deployment, ttl);
            match tokio::time::timeout(TIMEOUT, there).await {
                Ok(Ok(instances)) => self.state().shared.instances = instances,
                Ok(Err(error)) => self.metrics.record_error(None, "read the instances", &error),
                Err(_) => {}
            }
        }
        let alone = self.state().shared.instances.len() < 2;
        if self.attached().is_some() {
            self.state().shared.report = None;
            if !alone && let Ok(Err(error)) = tokio::time::timeout(TIMEOUT, self.write_report(&context, round)).await {
                tracing::debug!(error = %error.message, "the status could not be written for the other instances");
            }
        } else {
            self.hear(TIMEOUT).await;
        }
    }

    /// The rules with unrepaired drift in the partitions that other instances lead, by those leaders' reports. None if that is not
    /// known: nobody leads one of the `partitions`, or a leader has written no recent report that this version can read.
    pub(crate) async fn drift_elsewhere(&self, partitions: u32) -> Option<Vec<String>> {
        let (context, leaders) = {
            let state = self.state();
            let held = &state.read.as_ref().filter(|read| read.held.len() >= partitions as usize)?.held;
            let others = held.values().filter(|holder| holder.id != self.instance.id);
            let by_id: BTreeMap<&str, &Holder> = others.map(|holder| (holder.id.as_str(), holder)).collect();
            (state.cluster.clone()?.0, by_id.into_values().cloned().collect::<Vec<_>>())
        };
        let report = tokio::time::timeout(TIMEOUT, read(&context, &leaders)).await.ok()?.ok()??;
        if report.silence(self.metrics.now()) > SILENT {
            return None;
        }
        let causes = report.status.causes.into_iter();
        let drift = causes.filter(|cause| cause.cause == Cause::DriftUnrepaired.name());
        Some(drift.flat_map(|cause| cause.rules).collect())
    }

    /// On a standby, reads the leaders' current reports. If that fails, the earlier report stays, and ages.
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
        let dead_letters = &context.dead_letters;
        let id = doc! {"deployment": &dead_letters.deployment, "instance": &self.instance.id};
        // By a pipeline, so that the server logs the differences instead of the whole.
        let update = vec![doc! {"$set": {"at": "$$NOW", "status": {"$literal": status}}}];
        let reports = context.server.unfenced().collection(&dead_letters.database, COLLECTION);
        bounded(reports.update_one(doc! {"_id": id}, update).upsert(true)).await?;
        if round.is_multiple_of(FORGET) {
            let before = DateTime::from_millis(self.metrics.now() - OLD);
            let old = doc! {"_id.deployment": &dead_letters.deployment, "at": {"$lt": before}};
            bounded(reports.delete_many(old)).await?;
        }
        Ok(())
    }
}

/// The reports of these leaders, joined. None until each of them has written one.
async fn read(context: &Context, leaders: &[Holder]) -> Result<Option<Report>> {
    let dead_letters = &context.dead_letters;
    let ids = leaders.iter().map(|leader| doc! {"deployment": &dead_letters.deployment, "instance": &leader.id});
    let reports = context.server.collection(&dead_letters.database, COLLECTION);
    let filter = doc! {"_id": {"$in": ids.collect::<Vec<_>>()}};
    let found: Vec<Document> = bounded(async { reports.find(filter).await?.try_collect().await }).await?;
    let read = |doc: &Document| {
        let status = doc.get("status")?.clone().into_relaxed_extjson();
        Some(Report {
            at: doc.get_datetime("at").ok()?.timestamp_millis(),
            // A report of another version may not be readable: then it counts as missing.
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
