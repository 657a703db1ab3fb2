//! `POST /v1/rules/RULE/backfill` and `/release`: what the commands of these names ask for. Needs the token.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};

use crate::{
    checkpoint::store::{Backfill, Store},
    error::Result,
    status::{Attached, Board},
};

/// Asks for a backfill; a held rule is to be released instead.
pub(super) async fn backfill(State(board): State<Arc<Board>>, Path(rule): Path<String>) -> Response {
    answer(&board, &rule, |held| !held, "the rule is held: release it").await
}

/// Lets a held rule go on, and applies the loss.
pub(super) async fn release(State(board): State<Arc<Board>>, Path(rule): Path<String>) -> Response {
    answer(&board, &rule, |held| held, "the rule is not held").await
}

async fn answer(board: &Board, rule: &str, fits: impl Fn(bool) -> bool, otherwise: &str) -> Response {
    let Some(attached) = board.attached() else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "this process does not lead: ask the one that does");
    };
    match ask(&attached, rule, fits).await {
        Ok(Asked::For) => (StatusCode::ACCEPTED, Json(serde_json::json!({"asked": true}))).into_response(),
        Ok(Asked::Unfit) => refusal(StatusCode::CONFLICT, otherwise),
        Ok(Asked::Unknown) => refusal(StatusCode::NOT_FOUND, "no rule of this name has run yet"),
        Err(error) => refusal(StatusCode::SERVICE_UNAVAILABLE, &error.message),
    }
}

fn refusal(code: StatusCode, error: &str) -> Response {
    (code, Json(serde_json::json!({"asked": false, "error": error}))).into_response()
}

enum Asked {
    For,
    Unfit,
    Unknown,
}

async fn ask(attached: &Attached, rule: &str, fits: impl Fn(bool) -> bool) -> Result<Asked> {
    let (server, letters) = (&attached.context.server, &attached.context.dead_letters);
    let store = Store::open(&server.unfenced(), &letters.database, &letters.deployment).await?;
    let known = store.rules(server).await?;
    let Some((_, state)) = known.iter().find(|(name, _)| name == rule) else { return Ok(Asked::Unknown) };
    let suspended = matches!(&state.backfill, Backfill::Held(hold) if hold.suspended);
    if suspended || !fits(matches!(state.backfill, Backfill::Held(_))) {
        return Ok(Asked::Unfit);
    }
    let asked = store.ask(server, rule).await?;
    tracing::info!(rule, "a backfill was asked for over HTTP");
    Ok(if asked { Asked::For } else { Asked::Unknown })
}
