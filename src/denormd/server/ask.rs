//! `POST /v1/rules/RULE/backfill` and `/unblock`: what the commands of these names request. Needs the token.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};

use crate::status::Board;
use denormd_engine::{
    inspection::adoption::{recounted, unsettled_feeder},
    reconcile::Context,
};
use denormd_model::rule_state::{BlockReason, RuleState};
use denormd_mongo::error::{Kind, Result};

/// Requests a backfill. A rule that is stopped is to be unblocked or resumed instead.
pub(super) async fn backfill(State(board): State<Arc<Board>>, Path(rule): Path<String>) -> Response {
    answer(&board, &rule, |state| !state.is_stopped(), "the rule is blocked, paused or unavailable").await
}

/// Agrees to what the backfill of a blocked rule does, and lets it run again.
pub(super) async fn unblock(State(board): State<Arc<Board>>, Path(rule): Path<String>) -> Response {
    answer(&board, &rule, RuleState::is_blocked, "the rule is not blocked").await
}

async fn answer(board: &Board, rule: &str, fits: impl Fn(&RuleState) -> bool, otherwise: &str) -> Response {
    let Some(context) = board.attached() else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "this process does not lead: ask the one that does");
    };
    match ask(&context, rule, fits).await {
        Ok(Requested::Accepted) => (StatusCode::ACCEPTED, Json(serde_json::json!({"asked": true}))).into_response(),
        Ok(Requested::WrongState) => refusal(StatusCode::CONFLICT, otherwise),
        Ok(Requested::UnknownRule) => {
            refusal(StatusCode::NOT_FOUND, "no rule of this name is in the config and has run")
        }
        Err(error) if error.kind == Kind::State => refusal(StatusCode::CONFLICT, &error.message),
        Err(error) => refusal(StatusCode::SERVICE_UNAVAILABLE, &error.message),
    }
}

fn refusal(code: StatusCode, error: &str) -> Response {
    (code, Json(serde_json::json!({"asked": false, "error": error}))).into_response()
}

enum Requested {
    Accepted,
    WrongState,
    UnknownRule,
}

async fn ask(context: &Context, rule: &str, fits: impl Fn(&RuleState) -> bool) -> Result<Requested> {
    let server = &context.server;
    let store = context.state_of_deployment().await?;
    let known = store.rules(server).await?;
    let Some(planned) = context.plan.named(rule) else { return Ok(Requested::UnknownRule) };
    let Some((_, record)) = known.iter().find(|(name, _)| name == rule) else { return Ok(Requested::UnknownRule) };
    if !fits(&record.state) {
        return Ok(Requested::WrongState);
    }
    if let RuleState::Blocked(BlockReason::Adoption(_)) = &record.state {
        let whole = context.whole();
        // Counting takes long, and an agreement fails only because of such a rule.
        if Box::pin(unsettled_feeder(&whole, planned)).await?.is_some() {
            drop(Box::pin(recounted(&whole, planned)).await?);
        }
    }
    let asked = match &record.state {
        RuleState::Blocked(reason) => store.unblock(&server.unfenced(), rule, reason, &record.definition).await?,
        _ => store.ask(server, rule).await?,
    };
    if asked {
        tracing::info!(rule, "a backfill was requested over HTTP");
    }
    // Its state may have changed since it was read.
    Ok(if asked { Requested::Accepted } else { Requested::WrongState })
}
