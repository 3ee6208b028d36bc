//! An OTLP collector: takes what processes export over gRPC and keeps it for the test.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use lockstep_transport::{Gate, Incoming, ServerTls, TlsFiles};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, any_value::Value},
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, transport::Server};

/// A span with the service that it came from.
#[derive(Clone, Debug)]
pub struct Received {
    /// `service.name`.
    pub service: String,
    /// As it was exported.
    pub span: Span,
}

impl Received {
    /// The values of its attributes as text.
    pub fn attributes(&self) -> BTreeMap<String, String> {
        let attributes = self.span.attributes.iter();
        attributes.map(|attribute| (attribute.key.clone(), text(attribute.value.as_ref()))).collect()
    }
}

/// Runs until it is dropped.
pub struct Collector {
    /// Where it listens.
    pub address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    _stop: DropGuard,
}

/// What came so far.
#[derive(Default)]
struct Seen {
    spans: Vec<Received>,
    /// Values of `authorization`.
    keys: BTreeSet<String>,
}

impl Collector {
    /// Listens on a free port.
    ///
    /// # Errors
    /// If there is none.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_behind(Gate::Both(None, None)).await
    }

    /// One that speaks TLS as `files` say.
    ///
    /// # Errors
    /// As [`start`](Self::start), and if a file cannot be used.
    pub async fn start_secured(files: TlsFiles) -> anyhow::Result<Self> {
        Self::start_behind(Gate::Both(Some(ServerTls::open(files)?), None)).await
    }

    async fn start_behind(gate: Gate) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let seen = Arc::<Mutex<Seen>>::default();
        let stop = CancellationToken::new();
        let service = TraceServiceServer::new(Sink(Arc::clone(&seen)));
        let server = Server::builder().add_service(service);
        let closing = stop.clone().cancelled_owned();
        let incoming = Incoming::new(listener, gate).into_stream();
        tokio::spawn(server.serve_with_incoming_shutdown(incoming, closing));
        Ok(Self { address, seen, _stop: stop.drop_guard() })
    }

    /// The spans that came so far.
    pub fn spans(&self) -> Vec<Received> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }

    /// The values of `authorization` with which they came.
    pub fn keys(&self) -> BTreeSet<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).keys.clone()
    }
}

struct Sink(Arc<Mutex<Seen>>);

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        seen.keys.extend(key.map(str::to_owned));
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = attributes.iter().find(|attribute| attribute.key == "service.name");
            let service = service.map_or_else(String::new, |service| text(service.value.as_ref()));
            let of_scopes = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            seen.spans.extend(of_scopes.map(|span| Received { service: service.clone(), span }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text(value: Option<&AnyValue>) -> String {
    match value.and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(value)) => value.clone(),
        Some(Value::IntValue(value)) => value.to_string(),
        Some(Value::DoubleValue(value)) => value.to_string(),
        Some(Value::BoolValue(value)) => value.to_string(),
        Some(Value::ArrayValue(array)) => {
            let texts: Vec<_> = array.values.iter().map(|value| text(Some(value))).collect();
            format!("[{}]", texts.join(", "))
        }
        other => format!("{other:?}"),
    }
}
