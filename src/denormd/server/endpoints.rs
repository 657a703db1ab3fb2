//! Limits per endpoint: a flood of one endpoint, or requests that it holds, take nothing from another.

use std::time::Duration;

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{Method, StatusCode, header, response::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

/// Requests a second, in the long run: a page looks once a second, Prometheus every few.
const PER_SECOND: f64 = 50.0;
/// Requests at once after a quiet time.
const BURST: f64 = 100.0;
/// Requests to one endpoint that are being answered.
const OPEN: usize = 32;
/// A request to `/v1/wait` is held until its time has come, and costs next to nothing meanwhile.
const WAITING: usize = 128;
/// No answer but that of `/v1/wait` takes longer.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// The largest answer that is kept.
const KEPT: usize = 16 << 20;

/// Answers that cost nothing: never refused.
const FREE: [&str; 2] = ["/", "/livez"];
/// Monitoring is never refused either: above the rate it gets the last answer once more.
const MONITORING: [&str; 2] = ["/metrics", "/readyz"];
/// The other endpoints, each with limits of its own. The last one stands for all paths that are not listed.
const LIMITED: [&str; 6] = ["/v1/status", "/v1/history", "/v1/events", WAIT, "/v1/rules/", ""];
const WAIT: &str = "/v1/wait";

/// The limits of all endpoints.
#[derive(Debug)]
pub(super) struct Endpoints {
    monitoring: [Recent; MONITORING.len()],
    limited: [Limit; LIMITED.len()],
}

impl Default for Endpoints {
    fn default() -> Self {
        let limit = |path| Limit::new(if path == WAIT { WAITING } else { OPEN });
        Self { monitoring: MONITORING.map(|_| Recent::default()), limited: LIMITED.map(limit) }
    }
}

impl Endpoints {
    /// Answers the request, or refuses it when its endpoint has too much to do.
    pub async fn answer(&self, request: Request, next: Next) -> Response {
        let path = request.uri().path();
        if FREE.contains(&path) {
            return next.run(request).await;
        }
        let monitoring = MONITORING.iter().position(|known| *known == path).and_then(|at| self.monitoring.get(at));
        if let Some(recent) = monitoring.filter(|_| request.method() == Method::GET) {
            return recent.answer(request, next).await;
        }
        // The last entry is empty: every path begins with it.
        let at = LIMITED.iter().position(|known| path.starts_with(known)).unwrap_or_default();
        let waits = path == WAIT;
        self.limited[at].answer(request, next, waits).await
    }
}

#[derive(Debug)]
struct Limit {
    bucket: Mutex<Bucket>,
    open: Semaphore,
}

impl Limit {
    fn new(open: usize) -> Self {
        Self { bucket: Mutex::default(), open: Semaphore::new(open) }
    }

    async fn answer(&self, request: Request, next: Next, waits: bool) -> Response {
        let later = |code: StatusCode, why: &'static str| (code, [(header::RETRY_AFTER, "1")], why).into_response();
        if !take(&self.bucket) {
            return later(StatusCode::TOO_MANY_REQUESTS, "too many requests\n");
        }
        let Ok(_open) = self.open.try_acquire() else {
            return later(StatusCode::SERVICE_UNAVAILABLE, "too many open requests\n");
        };
        let answer = next.run(request);
        if waits {
            return answer.await;
        }
        let late = |_| (StatusCode::GATEWAY_TIMEOUT, "no answer in time\n").into_response();
        tokio::time::timeout(ANSWER_TIME, answer).await.unwrap_or_else(late)
    }
}

/// The last answer of an endpoint, for when it is asked too often.
#[derive(Debug, Default)]
struct Recent {
    bucket: Mutex<Bucket>,
    last: Mutex<Option<(Parts, Bytes)>>,
}

impl Recent {
    async fn answer(&self, request: Request, next: Next) -> Response {
        let last = || self.last.lock();
        if !take(&self.bucket)
            && let Some((parts, body)) = last().clone()
        {
            return Response::from_parts(parts, Body::from(body));
        }
        let (parts, body) = next.run(request).await.into_parts();
        let Ok(body) = to_bytes(body, KEPT).await else {
            return (StatusCode::INTERNAL_SERVER_ERROR, "the answer is too large\n").into_response();
        };
        *last() = Some((parts.clone(), body.clone()));
        Response::from_parts(parts, Body::from(body))
    }
}

fn take(bucket: &Mutex<Bucket>) -> bool {
    bucket.lock().take(Instant::now())
}

/// Fills at [`PER_SECOND`], holds [`BURST`]. It is full at first.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { left: BURST, at: Instant::now() }
    }
}

impl Bucket {
    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * PER_SECOND).min(BURST);
        self.at = now;
        let some = self.left >= 1.0;
        if some {
            self.left -= 1.0;
        }
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = Bucket { left: BURST, at: start };
        let taken = |bucket: &mut Bucket, at: Instant| (0..1000).filter(|_| bucket.take(at)).count();
        assert_eq!(taken(&mut bucket, start), 100);
        assert_eq!(taken(&mut bucket, start + Duration::from_secs(1)), 50);
        assert_eq!(taken(&mut bucket, start + Duration::from_secs(3600)), 100, "it holds no more than its burst");
        assert_eq!(taken(&mut bucket, start), 0, "a clock that goes back gives nothing");
    }
}
