//! `/v1/wait`: answers once what was committed is applied. Read your writes.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;

use crate::{
    checkpoint::store::Store,
    error::{Error, Result},
    partition::Partition,
    position::ClusterTime,
    reconcile::Context,
    status::{Attached, Board},
};

/// How long to wait when not told.
const DEFAULT_TIMEOUT: f64 = 30.0;
/// How often it is looked how far the partitions are that others lead.
const LOOK: Duration = Duration::from_millis(100);
/// How long to wait at most.
const LONGEST: f64 = 3600.0;

#[derive(Debug, Deserialize)]
pub(super) struct Wish {
    /// `seconds.increment` (or with a colon); what is committed now, when left out.
    #[serde(rename = "operationTime")]
    operation_time: Option<String>,
    /// Seconds.
    timeout: Option<f64>,
}

/// Answers 200 once everything up to the operation time is applied, chains of rules followed to their end, and no backfill
/// is open; 504 with the reason when that takes longer than the timeout.
pub(super) async fn wait(State(board): State<Arc<Board>>, Query(wish): Query<Wish>) -> Response {
    let from = match wish.operation_time.as_deref().map(operation_time).transpose() {
        Ok(from) => from,
        Err(message) => return refusal(StatusCode::BAD_REQUEST, &message),
    };
    let timeout = wish.timeout.unwrap_or(DEFAULT_TIMEOUT);
    if !(0.0..=LONGEST).contains(&timeout) {
        return refusal(StatusCode::BAD_REQUEST, "timeout is a number of seconds from 0 to 3600");
    }
    let attached = board.all_attached();
    if attached.is_empty() {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "this process does not lead: ask the one that does");
    }
    let stopped = stopped(&attached);
    match tokio::time::timeout(Duration::from_secs_f64(timeout), settled(attached, from)).await {
        Ok(Ok(time)) => {
            // Rules that are held or paused write nothing, however long one waits.
            let body = serde_json::json!({"applied": true, "operationTime": time.to_string(), "except": stopped});
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

fn refusal(code: StatusCode, error: &str) -> Response {
    (code, Json(serde_json::json!({"applied": false, "error": error}))).into_response()
}

/// The rules that are held or paused.
fn stopped(attached: &[Attached]) -> BTreeSet<String> {
    let of_one = |attached: &Attached| {
        let progress = attached.progress.borrow();
        progress.held.keys().map(|rule| attached.context.plan.rule(*rule).name.clone()).collect::<Vec<_>>()
    };
    attached.iter().flat_map(of_one).collect()
}

/// Waits for `from` (or for now), then as often as the longest chain of rules needs for what that has written: in every
/// partition, by what this process knows of its own, and by what the others have saved.
async fn settled(mut attached: Vec<Attached>, from: Option<ClusterTime>) -> Result<ClusterTime> {
    let Some(context) = attached.first().map(|attached| attached.context.clone()) else {
        return Err(Error::internal("the pipeline has stopped"));
    };
    let mut first = None;
    let mut next = from;
    for _ in 0..context.plan.longest_chain().max(1) {
        let time = match next.take() {
            Some(time) => time,
            None => context.server.operation_time().await?,
        };
        first.get_or_insert(time);
        for attached in &mut attached {
            let applied = attached.progress.wait_for(|progress| progress.has_applied(time)).await;
            applied.map_err(|_| Error::internal("the pipeline has stopped"))?;
        }
        others(&context, &attached, time).await?;
    }
    Ok(first.unwrap_or_default())
}

/// Waits for the partitions that others lead.
async fn others(context: &Context, attached: &[Attached], time: ClusterTime) -> Result<()> {
    let elsewhere: Vec<Partition> = Partition::all(context.partition.of())
        .filter(|partition| attached.iter().all(|attached| attached.context.partition != *partition))
        .collect();
    if elsewhere.is_empty() {
        return Ok(());
    }
    let (server, letters) = (context.server.unfenced(), &context.dead_letters);
    let store = Store::open(&server, &letters.database, &letters.deployment).await?.of(&elsewhere);
    // Where nothing is written, a stream's position moves once in ten seconds.
    store.nudge(&server).await?;
    while !store.has_applied(&server, &context.plan.databases(), time).await? {
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
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
