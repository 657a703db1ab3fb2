//! Access control for requests: by host name, token and size, and by the limits of their endpoint.

use std::{
    net::IpAddr,
    sync::{Arc, LazyLock},
};

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, StatusCode, Uri,
        header::{self, HeaderName},
        uri::Authority,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use parking_lot::RwLock;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio_rustls::TlsAcceptor;

use super::{PAGE, endpoints::Endpoints};
use denormd_rules::config::{Certificate, Http};

/// Largest body of a request, in bytes. No endpoint reads a body.
const BODY: u64 = 4096;
/// Name of this machine that a browser may use, whichever page makes the request.
const LOCALHOST: &str = "localhost";

/// Checks every request before it is answered. By default there is no token, and every change is refused.
#[derive(Debug, Default)]
pub struct Guard {
    access: RwLock<Access>,
    endpoints: Endpoints,
}

/// The access settings of the config.
#[derive(Debug, Default)]
struct Access {
    token: Option<SecretString>,
    /// True if reads need the token as well.
    for_reads: bool,
    hosts: Vec<String>,
    certificate: Option<Certificate>,
}

/// Paths of probes, which need no token.
const PROBES: [&str; 2] = ["/livez", "/readyz"];

impl Guard {
    /// Applies this config from now on.
    pub fn obey(&self, http: &Http) {
        let access = Access {
            token: http.token.clone(),
            for_reads: http.token_for_reads,
            hosts: http.allowed_hosts.clone(),
            certificate: http.certificate.clone(),
        };
        *self.access.write() = access;
    }

    /// The TLS handshake of a new connection, if the server speaks HTTPS. A renewed certificate applies from the next
    /// connection on.
    pub(super) fn handshake(&self) -> Option<TlsAcceptor> {
        let access = self.access.read();
        access.certificate.as_ref().map(|certificate| TlsAcceptor::from(certificate.server.clone()))
    }

    /// The refusal of this request; None if it is admitted.
    fn refuses(&self, request: &Request) -> Option<Response> {
        let access = self.access.read();
        if let Some(name) = foreign_host(request.uri(), request.headers(), &access.hosts) {
            let why = format!(
                "`{name}` is not a name of this server: ask by its IP address, or add the name to http.allowed_hosts\n"
            );
            return Some((StatusCode::MISDIRECTED_REQUEST, why).into_response());
        }
        if is_large(request.headers()) {
            return Some((StatusCode::PAYLOAD_TOO_LARGE, "no request here has a body\n").into_response());
        }
        let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        match reads {
            true if PROBES.contains(&request.uri().path()) => None,
            true => access.refuses_read(request.headers()),
            false => access.refuses_change(request.headers()),
        }
    }

    /// True if the request may learn only whether this server is ready.
    fn is_probe(&self, request: &Request) -> bool {
        let access = self.access.read();
        PROBES.contains(&request.uri().path()) && access.refuses_read(request.headers()).is_some()
    }
}

impl Access {
    /// For reads, the token may also be the password of HTTP's Basic authentication, which a browser can send. Not for
    /// changes: the browser also sends it with requests that a page of another site makes.
    fn refuses_read(&self, headers: &HeaderMap) -> Option<Response> {
        let token = self.token.as_ref().filter(|_| self.for_reads)?.expose_secret().as_bytes();
        let (by_token, by_password) = (bearer(headers).ct_eq(token), password(headers).ct_eq(token));
        let why = "this needs `Authorization: Bearer` and http.token, or the token as the password of any user\n";
        let basic = "Basic realm=\"denormd\", charset=\"UTF-8\"";
        let refused = || (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, basic)], why).into_response();
        (!bool::from(by_token | by_password)).then(refused)
    }

    fn refuses_change(&self, headers: &HeaderMap) -> Option<Response> {
        let Some(token) = &self.token else {
            let why = "nothing can be changed over HTTP: set http.token_file, or use the command of the same name\n";
            return Some((StatusCode::FORBIDDEN, why).into_response());
        };
        // In constant time: the response time must not tell how much of a guess is right.
        let same: bool = bearer(headers).ct_eq(token.expose_secret().as_bytes()).into();
        let why = "this needs `Authorization: Bearer` and http.token\n";
        (!same).then(|| (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], why).into_response())
    }
}

/// The token of `Authorization: Bearer`.
fn bearer(headers: &HeaderMap) -> &[u8] {
    credentials(headers, b"bearer ")
}

/// The password of `Authorization: Basic`.
fn password(headers: &HeaderMap) -> Vec<u8> {
    let pair = BASE64.decode(credentials(headers, b"basic ")).unwrap_or_default();
    pair.iter().position(|byte| *byte == b':').map_or_else(Vec::new, |colon| pair[colon + 1..].to_vec())
}

/// The credentials that follow a scheme, whose case is ignored (RFC 9110, 11.1).
fn credentials<'a>(headers: &'a HeaderMap, scheme: &[u8]) -> &'a [u8] {
    let given = headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    match given.split_at_checked(scheme.len()) {
        Some((given, rest)) if given.eq_ignore_ascii_case(scheme) => rest,
        _ => b"",
    }
}

/// The requested host name, unless it is one of this server's: a page of any site can have its own name resolve to this
/// address (DNS rebinding), and its scripts would then count as this server's page. IP addresses cannot be rebound.
fn foreign_host(uri: &Uri, headers: &HeaderMap, allowed: &[String]) -> Option<String> {
    let given =
        headers.get_all(header::HOST).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let known = |name: &str| {
        let name = name.trim_end_matches('.');
        name.eq_ignore_ascii_case(LOCALHOST)
            || name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok()
            || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    };
    let mut names = given.chain(uri.authority().map(ToString::to_string));
    names.find(|name| !name.parse::<Authority>().is_ok_and(|authority| known(authority.host())))
}

fn is_large(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    length.is_some_and(|length| length > BODY) || headers.contains_key(header::TRANSFER_ENCODING)
}

/// The middleware that every request passes.
pub(super) async fn admit(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if let Some(refusal) = guard.refuses(&request) {
        return refusal;
    }
    let probe = guard.is_probe(&request);
    let answer = guard.endpoints.answer(request, next).await;
    // The body would name rules.
    if probe { answer.status().into_response() } else { answer }
}

/// The middleware that every response passes, refusals included.
pub(super) async fn protect(mut answer: Response) -> Response {
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
    ] {
        answer.headers_mut().insert(name, value);
    }
    answer
}

/// Restricts what a browser does with a response: it may run the page's own script and style, which are named by their
/// hashes, and connect to the server that sent it.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |tag: &str| {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        let content =
            PAGE.split_once(&open).and_then(|(_, rest)| rest.split_once(&close)).map_or("", |(content, _)| content);
        format!("'sha256-{}'", BASE64.encode(Sha256::digest(content)))
    };
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'",
        hash("script"),
        hash("style"),
    );
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"))
});

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    #[test]
    fn only_the_whole_token_opens() {
        let token = "0123456789abcdef";
        let ask = |access: &Access, given: &str| {
            access.refuses_change(&headers(header::AUTHORIZATION, given)).map(|answer| answer.status())
        };
        let access = Access { token: Some(SecretString::from(token)), ..Access::default() };
        for right in ["Bearer", "bearer", "BEARER"] {
            assert_eq!(ask(&access, &format!("{right} {token}")), None, "{right}");
        }
        for wrong in
            ["", "Bearer ", "Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Basic 0123456789abcdef", token]
        {
            assert_eq!(ask(&access, wrong), Some(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        let none = access.refuses_change(&HeaderMap::new()).map(|answer| answer.status());
        assert_eq!(none, Some(StatusCode::UNAUTHORIZED));
        assert_eq!(ask(&Access::default(), &format!("Bearer {token}")), Some(StatusCode::FORBIDDEN));
        assert_eq!(ask(&Access::default(), "Bearer "), Some(StatusCode::FORBIDDEN));
    }

    #[test]
    fn a_name_that_is_not_this_servers_is_refused() {
        let allowed = ["denormd.shop.svc".to_owned()];
        let ask = |host: &str| foreign_host(&Uri::from_static("/"), &headers(header::HOST, host), &allowed);
        for known in [
            "127.0.0.1",
            "127.0.0.1:9464",
            "10.1.2.3:9464",
            "[::1]:9464",
            "[fd00::1]",
            "localhost",
            "LOCALHOST:9464",
            "denormd.shop.svc:9464",
            "Denormd.shop.svc.",
        ] {
            assert_eq!(ask(known), None, "{known}");
        }
        for foreign in [
            "evil.example",
            "evil.example:9464",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "shop.svc",
            "",
            "a b",
        ] {
            assert_eq!(ask(foreign).as_deref(), Some(foreign));
        }
        assert_eq!(foreign_host(&Uri::from_static("/"), &HeaderMap::new(), &[]), None, "a browser always names it");
        let target = Uri::from_static("http://evil.example/metrics");
        assert!(foreign_host(&target, &headers(header::HOST, "127.0.0.1"), &[]).is_some(), "the target counts as well");
    }

    /// The policy names one script and one style by their hashes: a second one, or an attribute with code in it, would not work.
    #[test]
    fn the_page_has_one_script_and_one_style_and_no_inline_attributes() {
        for tag in ["<script", "<style"] {
            assert_eq!(PAGE.matches(tag).count(), 1, "{tag}");
            assert!(PAGE.contains(&format!("{tag}>")), "{tag} without attributes");
        }
        for attribute in
            [" style=\"", " onclick=", " onload=", " onerror=", "cssText", "\"style\"", "{ style:", ", style:"]
        {
            assert!(!PAGE.contains(attribute), "{attribute}");
        }
        let policy = POLICY.to_str().unwrap();
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{policy}");
    }
}
