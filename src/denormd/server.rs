//! `/metrics`, health checks, `/v1` and the status page. Requests that change something need a token.

mod address;
mod ask;
pub mod client;
mod connections;
mod endpoints;
mod guard;
mod trust;
mod wait;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Query, State},
    http::{StatusCode, header},
    middleware,
    response::{Html, IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::status::{Board, CauseReport, Leadership, Status};
use denormd_mongo::error::{Error, Kind, Result};

pub use guard::Guard;

/// Longest wait for the leader's current status; after it, the response has the leader's last known status.
const HEAR: Duration = Duration::from_secs(1);
/// The status page: one file without external resources.
const PAGE: &str = include_str!("server/page.html");

/// Binds the address, so that a conflict is reported before anything is started.
pub fn bind(listen: SocketAddr) -> Result<TcpListener> {
    connections::listen(listen).map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "another process listens there".to_owned(),
            io::ErrorKind::PermissionDenied => "this user may not listen there".to_owned(),
            io::ErrorKind::AddrNotAvailable => "this machine does not have that address".to_owned(),
            _ => error.to_string(),
        };
        Error::new(Kind::Machine, format!("http.listen: cannot listen on {listen}: {why}"))
            .hint("is another denormd running? Otherwise set http.listen, or DENORMD__HTTP__LISTEN, to a free port")
    })
}

/// Serves until `stop`: HTTPS while the config has a certificate, HTTP otherwise.
pub async fn serve(listener: TcpListener, board: Arc<Board>, guard: Arc<Guard>, stop: CancellationToken) {
    let router = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/v1/status", get(status))
        .route("/v1/history", get(history))
        .route("/v1/events", get(events))
        .route("/v1/wait", get(wait::wait).with_state((board.clone(), Arc::default())))
        .route("/v1/rules/{rule}/backfill", post(ask::backfill))
        .route("/v1/rules/{rule}/unblock", post(ask::unblock))
        // The name of earlier versions.
        .route("/v1/rules/{rule}/release", post(ask::unblock))
        .layer(middleware::from_fn_with_state(guard.clone(), guard::admit))
        .layer(middleware::map_response(guard::protect))
        .with_state(board);
    connections::serve(listener, router, guard, stop).await;
}

async fn page() -> impl IntoResponse {
    ([(header::CACHE_CONTROL, "no-cache")], Html(PAGE))
}

async fn metrics(State(board): State<Arc<Board>>) -> Response {
    match board.expose() {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.message).into_response(),
    }
}

async fn livez(State(board): State<Arc<Board>>) -> Response {
    if board.is_live() {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the event loop does not turn, or the pipeline has ended\n").into_response()
    }
}

/// Ready if this instance leads, and the server and every stream answer; or if it is a standby and can read the lease.
/// A backfill does not make it unready. A daemon that has not started, or cannot tell which instance leads, is not
/// ready.
async fn readyz(State(board): State<Arc<Board>>) -> Response {
    let status = board.status();
    let because = not_ready_because(&status);
    let ready = because.is_empty() && board.is_live() && board.runs();
    let named = |name: &str| {
        status.causes.iter().find(|cause| cause.cause == name).map_or_else(Vec::new, |cause| cause.rules.clone())
    };
    let mut body = serde_json::json!({
        "ready": ready,
        "not_ready_because": because,
        "backfilling": named("backfilling"),
        "degraded": named("degraded"),
    });
    if let (Some(body), Ok(serde_json::Value::Object(leadership))) =
        (body.as_object_mut(), serde_json::to_value(&status.leadership))
    {
        body.extend(leadership);
    }
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(body)).into_response()
}

/// The causes that make this instance unready, each with the driver's reason; without any, its state if that makes it
/// unready.
fn not_ready_because(status: &Status) -> Vec<String> {
    let anywhere = ["no_primary", "lease_unreadable"];
    let leading = ["privilege", "stalled", "stream_interrupted"];
    let counts = |cause: &&CauseReport| {
        let cause = cause.cause.as_str();
        anywhere.contains(&cause) || (status.leadership.leads() && leading.contains(&cause))
    };
    let reason = |cause: &CauseReport| match &cause.reason {
        Some(reason) => format!("{}: {reason}", cause.cause),
        None => cause.cause.clone(),
    };
    let mut because: Vec<String> = status.causes.iter().filter(counts).map(reason).collect();
    if because.is_empty() && matches!(status.leadership, Leadership::Starting | Leadership::Unknown { .. }) {
        because.push(status.leadership.name().to_owned());
    }
    because
}

async fn status(State(board): State<Arc<Board>>) -> Response {
    // A standby responds with the leader's current status.
    board.hear(HEAR).await;
    Json(board.status()).into_response()
}

#[derive(Debug, Deserialize)]
struct Since {
    #[serde(default)]
    since: i64,
}

async fn history(State(board): State<Arc<Board>>, Query(Since { since }): Query<Since>) -> Response {
    Json(board.history(since)).into_response()
}

async fn events(State(board): State<Arc<Board>>, Query(Since { since }): Query<Since>) -> Response {
    Json(board.events(since)).into_response()
}
