//! Who may change something over HTTP, and how much is answered at once.

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Instant,
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use secrecy::{ExposeSecret, SecretString};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

/// Requests a second, in the long run: a page looks once a second, Prometheus every few.
const PER_SECOND: f64 = 50.0;
/// Requests at once after a quiet time.
const BURST: f64 = 100.0;
/// Requests that are being answered: one that waits (`/v1/wait`) costs next to nothing, but something.
const OPEN: usize = 256;
/// No request has a body that means anything.
const BODY: u64 = 4096;
/// Liveness must not depend on who else asks.
const ALWAYS: [&str; 2] = ["/livez", "/readyz"];

/// Stands before every request.
#[derive(Debug)]
pub struct Guard {
    token: RwLock<Option<SecretString>>,
    bucket: Mutex<Bucket>,
    open: Semaphore,
}

impl Guard {
    /// Without a token nothing can be changed.
    #[must_use]
    pub fn new(token: Option<SecretString>) -> Self {
        let bucket = Bucket { left: BURST, at: Instant::now() };
        Self { token: RwLock::new(token), bucket: Mutex::new(bucket), open: Semaphore::new(OPEN) }
    }

    /// Takes another token from now on.
    pub fn set_token(&self, token: Option<SecretString>) {
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
    }

    /// Why this request may not change anything, if it may not.
    fn refuses(&self, headers: &HeaderMap) -> Option<(StatusCode, &'static str)> {
        let token = self.token.read().unwrap_or_else(PoisonError::into_inner);
        let Some(token) = token.as_ref() else {
            let why = "nothing can be changed over HTTP: set http.token_file, or use the command of the same name\n";
            return Some((StatusCode::FORBIDDEN, why));
        };
        let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
        // In constant time: how long the answer takes must not tell how much of a guess was right.
        let same: bool = given.ct_eq(token.expose_secret().as_bytes()).into();
        if same {
            None
        } else {
            Some((StatusCode::UNAUTHORIZED, "this needs `Authorization: Bearer` and http.token\n"))
        }
    }
}

/// The layer that every request passes.
pub(super) async fn admit(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if ALWAYS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    if !guard.bucket.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) {
        return (StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "1")], "too many requests\n").into_response();
    }
    let Ok(_open) = guard.open.try_acquire() else {
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], "too many open requests\n")
            .into_response();
    };
    if is_large(request.headers()) {
        return (StatusCode::PAYLOAD_TOO_LARGE, "no request here has a body\n").into_response();
    }
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if let Some((code, why)) = (!reads).then(|| guard.refuses(request.headers())).flatten() {
        return (code, [(header::WWW_AUTHENTICATE, "Bearer")], why).into_response();
    }
    next.run(request).await
}

fn is_large(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    length.is_some_and(|length| length > BODY) || headers.contains_key(header::TRANSFER_ENCODING)
}

/// Fills at [`PER_SECOND`], holds [`BURST`].
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
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
    use std::time::Duration;

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

    #[test]
    fn only_the_whole_token_opens() {
        let token = "0123456789abcdef";
        let ask = |guard: &Guard, given: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, given.parse().unwrap());
            guard.refuses(&headers).map(|(code, _)| code)
        };
        let guard = Guard::new(Some(SecretString::from(token)));
        assert_eq!(ask(&guard, &format!("Bearer {token}")), None);
        for wrong in
            ["", "Bearer ", "Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Basic 0123456789abcdef", token]
        {
            assert_eq!(ask(&guard, wrong), Some(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        assert_eq!(guard.refuses(&HeaderMap::new()).map(|(code, _)| code), Some(StatusCode::UNAUTHORIZED));
        guard.set_token(None);
        assert_eq!(ask(&guard, &format!("Bearer {token}")), Some(StatusCode::FORBIDDEN));
        assert_eq!(ask(&guard, "Bearer "), Some(StatusCode::FORBIDDEN));
    }
}
