//! `/v1/wait`: responds once everything that was committed is applied (read your writes).

mod shared_read;

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
    time::Duration,
};

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;

use shared_read::SharedRead;

use crate::status::{Board, Leadership};
use denormd_engine::{checkpoint::store::Store, reconcile::Context};
use denormd_model::{partition::Partition, position::ClusterTime, rule_state::RuleState};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::{config::OnDrift, plan::Rule};

/// The default timeout, in seconds.
const DEFAULT_TIMEOUT: f64 = 30.0;
/// Pause between checks of the partitions that other instances lead.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The longest timeout, in seconds.
const LONGEST: f64 = 3600.0;

#[derive(Debug, Deserialize)]
pub(super) struct BackfillRequest {
    /// `seconds.increment` (or with a colon); the current operation time if omitted.
    #[serde(rename = "operationTime")]
    operation_time: Option<String>,
    /// Seconds.
    timeout: Option<f64>,
}

/// Responds with 200 once everything up to the operation time is applied, including chains of rules, and no backfill is
/// open; the response names the rules that this does not cover. Responds with 504 and the reason if that takes longer
/// than the timeout.
pub(super) async fn wait(
    State((board, reads)): State<(Arc<Board>, Arc<Reads>)>,
    Query(request): Query<BackfillRequest>,
) -> Response {
    let from = match request.operation_time.as_deref().map(operation_time).transpose() {
        Ok(from) => from,
        Err(message) => return refusal(StatusCode::BAD_REQUEST, &message),
    };
    let timeout = request.timeout.unwrap_or(DEFAULT_TIMEOUT);
    if !(0.0..=LONGEST).contains(&timeout) {
        return refusal(StatusCode::BAD_REQUEST, "timeout is a number of seconds from 0 to 3600");
    }
    let whole = match Whole::of(&board, &reads) {
        Ok(whole) => whole,
        Err(message) => return refusal(StatusCode::SERVICE_UNAVAILABLE, &message),
    };
    let attempt = async || {
        // The rules behind one that is resumed during the wait, or whose dead letters are retried, may be late.
        let stands_still = |state: &RuleState| *state != RuleState::Live && !state.is_backfilling();
        let elsewhere = whole.elsewhere().await?;
        let mut except = whole.except(elsewhere.as_ref(), stands_still).await?;
        let (time, mut later) = whole.settled(elsewhere.as_ref(), from).await?;
        except.append(&mut later);
        Ok::<_, Error>((time, except))
    };
    let settled = async {
        loop {
            match attempt().await {
                // While the majority lags behind, nothing new can be read.
                Err(error) if error.kind == Kind::ReadTimedOut => tokio::time::sleep(POLL_INTERVAL).await,
                result => return result,
            }
        }
    };
    match tokio::time::timeout(Duration::from_secs_f64(timeout), settled).await {
        Ok(Ok((time, except))) => {
            let body = serde_json::json!({"applied": true, "operationTime": time.to_string(), "except": except});
            Json(body).into_response()
        }
        Ok(Err(error)) => refusal(StatusCode::SERVICE_UNAVAILABLE, &error.message),
        Err(_) => {
            let status = board.status();
            let causes: Vec<&String> = status.causes.iter().map(|cause| &cause.cause).collect();
            let body = serde_json::json!({
                "applied": false,
                "error": "not applied within the timeout",
                "lag_seconds": status.lag_seconds,
                "causes": causes,
            });
            (StatusCode::GATEWAY_TIMEOUT, Json(body)).into_response()
        }
    }
}

/// Reads that the open waits of this process share: there may be many while copies are late.
#[derive(Debug, Default)]
pub(super) struct Reads {
    dead_letters: SharedRead<(ClusterTime, Vec<String>)>,
    nudge: SharedRead<()>,
    elsewhere: SharedRead<Elsewhere>,
}

/// The progress of the partitions that other instances lead.
#[derive(Debug, Clone)]
struct Elsewhere {
    /// The context whose rules are meant.
    context: Weak<Context>,
    /// The partitions, by their ids.
    ids: Vec<String>,
    /// The time up to which all of them have applied every change.
    applied: Option<ClusterTime>,
    /// True if one of them has a backfill or a fan-out job.
    is_open: bool,
    /// The time of the read.
    at: ClusterTime,
}

fn refusal(code: StatusCode, error: &str) -> Response {
    (code, Json(serde_json::json!({"applied": false, "error": error}))).into_response()
}

/// All partitions of the deployment. The progress of those that this instance leads comes from memory, the progress of
/// the others from their leaders' checkpoints. So a standby answers as well, at most one checkpoint interval later.
struct Whole {
    board: Arc<Board>,
    reads: Arc<Reads>,
    context: Arc<Context>,
    partitions: u32,
    attached: Vec<Arc<Context>>,
    /// The rules that do not run yet here.
    incomplete: BTreeSet<String>,
}

impl Whole {
    fn of(board: &Arc<Board>, reads: &Arc<Reads>) -> Result<Self, String> {
        // In this order: a config that is put into force in between adds exceptions, and hides none.
        let (context, incomplete, attached) = (board.context(), board.starting(), board.all_attached());
        let leadership = board.leadership();
        let stands_by = matches!(leadership, Leadership::Standby { .. });
        if !stands_by && attached.is_empty() {
            return Err(leadership.sentence().unwrap_or_default());
        }
        let of_cluster = context.map(|context| (context, board.partitions()));
        let known = of_cluster.or_else(|| {
            let context = attached.first()?.clone();
            let partitions = context.partition.of();
            Some((context, partitions))
        });
        let (context, partitions) = known.ok_or("the cluster has not been reached yet")?;
        Ok(Self { board: board.clone(), reads: reads.clone(), context, partitions, attached, incomplete })
    }

    /// Waits for `from` (or for now), then once for each further level of the longest chain of rules. Stops early at a level
    /// that changes nothing: most trees have far fewer levels than they may have. Returns the time of the first level, and
    /// the rules that lacked a change after one of the levels: even if they have it by now, the rules that read their copies
    /// may lack it.
    async fn settled(
        &self,
        elsewhere: Option<&Store>,
        from: Option<ClusterTime>,
    ) -> Result<(ClusterTime, BTreeSet<String>)> {
        let (mut first, mut last, mut except) = (None, None, BTreeSet::new());
        let mut next = from;
        let effects = || self.attached.iter().map(|one| one.counts.effects()).sum::<u64>();
        for _ in 0..self.context.plan.longest_chain().max(1) {
            let (before, is_now) = (effects(), next.is_none());
            let time = match next.take() {
                Some(time) => time,
                None => self.context.server.operation_time().await?,
            };
            first.get_or_insert(time);
            for context in &self.attached {
                context.published.has_applied(time).await?;
            }
            let quiet_elsewhere = match elsewhere {
                Some(store) => self.have_applied(store, time, last).await?,
                None => true,
            };
            let is_last = is_now && quiet_elsewhere && effects() == before;
            // Read before the next level takes its time: that level then covers the writes of every rule that has recovered by now.
            except.append(&mut self.except(elsewhere, |state| *state != RuleState::Live).await?);
            if is_last {
                break;
            }
            last = Some(time);
        }
        Ok((first.unwrap_or_default(), except))
    }

    /// The state of the partitions that other instances lead; None if there are none.
    async fn elsewhere(&self) -> Result<Option<Store>> {
        let led = |partition: &Partition| self.attached.iter().any(|context| context.partition == *partition);
        let elsewhere: Vec<Partition> = Partition::all(self.partitions).filter(|partition| !led(partition)).collect();
        if elsewhere.is_empty() {
            return Ok(None);
        }
        Ok(Some(self.context.state_of_deployment().await?.of(&elsewhere)))
    }

    /// Waits for the partitions of `store`. True if their leaders have changed no target and started no job since `last`, the
    /// time of the previous round: other rules then have nothing to do.
    async fn have_applied(&self, store: &Store, time: ClusterTime, last: Option<ClusterTime>) -> Result<bool> {
        let (server, databases) = (self.context.server.unfenced(), self.context.plan.databases());
        // While nothing is written, a stream's position moves once in ten seconds.
        self.reads.nudge.get(Duration::ZERO, store.nudge(&server)).await?;
        // The position may be older than the last writes of a job that was open.
        let mut jobs = false;
        let of = Arc::downgrade(&self.context);
        let read = async || {
            // The positions are read first: jobs for the events before them were recorded earlier.
            let applied = store.applied(&server, &databases).await?;
            let at = server.operation_time().await?;
            let is_open = store.has_open_jobs(&server, &self.context.plan, at).await?;
            Ok::<_, Error>(Elsewhere { context: of.clone(), ids: store.ids().to_vec(), applied, is_open, at })
        };
        let after = loop {
            // Another request may have made it. One in which `time` is applied is from after `time`.
            let mut found = self.reads.elsewhere.get(POLL_INTERVAL, read()).await?;
            if found.ids != store.ids() || !found.context.ptr_eq(&of) {
                found = read().await?;
            }
            if found.applied.is_some_and(|applied| applied >= time) && !found.is_open {
                break found.at;
            }
            jobs |= found.is_open;
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        let Some(last) = last.filter(|_| !jobs) else { return Ok(false) };
        Ok(store.effects_until(&server, &databases, after).await?.is_some_and(|until| until <= last))
    }

    /// The rules whose copies may lack a change however long the request waits: those in certain states, those that do
    /// not run everywhere as this config defines them, those with dead letters or unrepaired drift, all that these feed, and shadow
    /// rules.
    async fn except(&self, elsewhere: Option<&Store>, in_state: fn(&RuleState) -> bool) -> Result<BTreeSet<String>> {
        let plan = &self.context.plan;
        let held = self.attached.iter().flat_map(|context| {
            let snapshot = context.published.borrow();
            let not_live = snapshot.in_state(in_state).into_iter();
            let not_live = not_live.filter_map(|rule| Some(snapshot.rules.get(rule)?.name.clone()));
            not_live.chain(snapshot.unrepaired.keys().cloned()).collect::<Vec<_>>()
        });
        let mut except: BTreeSet<String> = held.collect();
        let server = self.context.server.unfenced();
        // Dead letters and states are recorded before a change counts as applied, but shortly after a failover a majority read
        // without a time may miss them.
        let read = async {
            let after = server.operation_time().await?;
            Ok::<_, Error>((after, self.context.dead_letters.rules(&server, after).await?))
        };
        let (after, dead_letters) = self.reads.dead_letters.get(Duration::ZERO, read).await?;
        except.extend(dead_letters);
        if let Some(store) = elsewhere {
            let reports = |rule: &&Arc<Rule>| rule.on_drift == OnDrift::Report;
            let may_drift = || plan.rules.iter().filter(reports).map(|rule| rule.name.clone()).collect();
            except.extend(self.board.drift_elsewhere(self.partitions).await.unwrap_or_else(may_drift));
            let records = store.records(&server, after).await?;
            let is_run = |rule: &Rule, partition: &String| {
                let record = records.get(&(partition.clone(), rule.name.clone()));
                record.is_some_and(|record| rule.has_definition(&record.definition) && !in_state(&record.state))
            };
            let others = plan.rules.iter().filter(|rule| !store.ids().iter().all(|partition| is_run(rule, partition)));
            except.extend(others.map(|rule| rule.name.clone()));
        }
        except.extend(self.incomplete.iter().cloned());
        let mut except = plan.with_fed(except);
        except.extend(plan.rules.iter().filter(|rule| rule.shadow).map(|rule| rule.name.clone()));
        except.retain(|name| plan.named(name).is_some());
        Ok(except)
    }
}

/// `1700000000.5` or `1700000000:5`.
fn operation_time(text: &str) -> Result<ClusterTime, String> {
    let parts = text.split_once(['.', ':']).and_then(|(seconds, increment)| {
        Some(ClusterTime { seconds: seconds.parse().ok()?, increment: increment.parse().ok()? })
    });
    parts.ok_or_else(|| "operationTime is `seconds.increment`, as in 1700000000.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_time_has_seconds_and_an_increment() {
        let expected = ClusterTime { seconds: 1_700_000_000, increment: 5 };
        assert_eq!(operation_time("1700000000.5"), Ok(expected));
        assert_eq!(operation_time("1700000000:5"), Ok(expected));
        for wrong in ["", "5", "5.", "-1.2", "1.2.3", "9999999999.1"] {
            assert!(operation_time(wrong).is_err(), "{wrong}");
        }
    }
}
