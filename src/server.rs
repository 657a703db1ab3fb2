//! `/metrics`, health, `/v1` and the page. What changes something needs a token.

mod ask;
pub mod client;
mod guard;
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

use crate::{
    error::{Error, Kind, Result},
    status::{Board, Role},
};

pub use guard::Guard;

/// A server that has not answered for so long makes this process unready.
const SILENCE: Duration = Duration::from_secs(15);
/// The page: one file, nothing from outside.
const PAGE: &str = include_str!("server/page.html");
/// What the page may do: talk to where it came from.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:";

/// Takes the address, so that one that is taken is told before anything is started.
pub async fn bind(listen: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(listen).await.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "another process listens there".to_owned(),
            io::ErrorKind::PermissionDenied => "this user may not listen there".to_owned(),
            io::ErrorKind::AddrNotAvailable => "this machine does not have that address".to_owned(),
            _ => error.to_string(),
        };
        Error::new(Kind::Config, format!("http.listen: cannot listen on {listen}: {why}"))
            .hint("is another denormd running? Otherwise set http.listen, or DENORMD__HTTP__LISTEN, to a free port")
    })
}

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, board: Arc<Board>, guard: Arc<Guard>, stop: CancellationToken) {
    let router = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/v1/status", get(status))
        .route("/v1/history", get(history))
        .route("/v1/events", get(events))
        .route("/v1/wait", get(wait::wait))
        .route("/v1/rules/{rule}/backfill", post(ask::backfill))
        .route("/v1/rules/{rule}/release", post(ask::release))
        .layer(middleware::from_fn_with_state(guard, guard::admit))
        .with_state(board);
    let served = axum::serve(listener, router).with_graceful_shutdown(async move { stop.cancelled().await });
    if let Err(error) = served.await {
        tracing::error!(%error, "the HTTP server has ended");
    }
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, POLICY), (header::CACHE_CONTROL, "no-cache")], Html(PAGE))
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

/// Ready: it leads and the server and every stream answer, or it stands by. A backfill does not make it unready.
async fn readyz(State(board): State<Arc<Board>>) -> Response {
    let status = board.status();
    let stopped = ["no_primary", "privilege", "stalled", "stream_interrupted"];
    let blocking: Vec<&str> =
        status.causes.iter().map(|cause| cause.cause.as_str()).filter(|cause| stopped.contains(cause)).collect();
    let silent = status.streams.iter().any(|stream| stream.age_seconds > SILENCE.as_secs_f64())
        && status.queue_depth < status.queue_capacity;
    let ready = match status.role {
        Role::Starting => false,
        Role::Standby => true,
        Role::Leader => blocking.is_empty() && !silent && board.is_live(),
    };
    let named = |name: &str| {
        status.causes.iter().find(|cause| cause.cause == name).map_or_else(Vec::new, |cause| cause.rules.clone())
    };
    let body = serde_json::json!({
        "ready": ready,
        "role": status.role,
        "not_ready_because": blocking,
        "backfilling": named("backfilling"),
        "degraded": named("degraded"),
    });
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(body)).into_response()
}

async fn status(State(board): State<Arc<Board>>) -> Response {
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
