//! Export of spans to an OpenTelemetry collector, by OTLP over HTTP.
//!
//! One span for each batch, with one child for each stage: each read and each write. Spans contain rule, task and
//! numbers, never a document's id or value.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::{body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use opentelemetry::{KeyValue, trace::TracerProvider};
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    trace::{SdkTracer, SdkTracerProvider},
};
use tokio::{net::TcpStream, runtime::Handle};
use tracing_opentelemetry::OpenTelemetryLayer;

use denormd_mongo::error::{Error, Kind, Result};

/// Time limit for one request to the collector.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The layer that sends spans to the collector at `endpoint`, and its provider, whose shutdown sends the last spans.
pub(super) fn layer<S>(
    endpoint: &str,
    deployment: &str,
) -> Result<(OpenTelemetryLayer<S, SdkTracer>, SdkTracerProvider)>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
        .with_http_client(Client { runtime: Handle::current() })
        .build()
        .map_err(|_| Error::new(Kind::Config, "log.otlp is not an address of a collector"))?;
    let deployment = KeyValue::new("denormd.deployment", deployment.to_owned());
    let resource = Resource::builder_empty().with_service_name("denormd").with_attribute(deployment).build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("denormd"))
        // Source files, lines and threads are of no use to a reader of the spans.
        .with_location(false)
        .with_threads(false)
        .with_target(false);
    Ok((layer, provider))
}

/// Posts with the HTTP client that denormd already has. The exporter's own thread has no runtime, so it borrows the
/// daemon's.
#[derive(Debug)]
struct Client {
    runtime: Handle,
}

#[async_trait::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> std::result::Result<Response<Bytes>, HttpError> {
        // The timer needs the runtime too.
        let posted = self.runtime.spawn(async move { tokio::time::timeout(TIMEOUT, post(request)).await }).await?;
        let result = posted.unwrap_or_else(|_| Err("no answer in time".into()));
        if let Err(error) = &result {
            tracing::warn!(%error, "spans could not be sent to log.otlp and are lost");
        }
        result
    }
}

async fn post(request: Request<Bytes>) -> std::result::Result<Response<Bytes>, HttpError> {
    let (mut parts, body) = request.into_parts();
    let authority = parts.uri.authority().ok_or("an address without a host")?.clone();
    let stream = TcpStream::connect((authority.host(), authority.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    parts.headers.insert(header::HOST, authority.as_str().parse()?);
    parts.uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
    let (parts, body) = sender.send_request(Request::from_parts(parts, Full::new(body))).await?.into_parts();
    if !parts.status.is_success() {
        return Err(format!("the collector answers {}", parts.status).into());
    }
    Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
}
