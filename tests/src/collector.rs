//! An OTLP collector: takes what processes export over gRPC and keeps it for the test.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

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
        self.span.attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
    }
}

/// Runs until it is dropped.
pub struct Collector {
    /// Where it listens.
    pub address: SocketAddr,
    spans: Arc<Mutex<Vec<Received>>>,
    _stop: DropGuard,
}

impl Collector {
    /// Listens on a free port.
    ///
    /// # Errors
    /// If there is none.
    pub async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let spans = Arc::<Mutex<Vec<Received>>>::default();
        let stop = CancellationToken::new();
        let service = TraceServiceServer::new(Sink(Arc::clone(&spans)));
        let server = Server::builder().add_service(service);
        let closing = stop.clone().cancelled_owned();
        tokio::spawn(server.serve_with_incoming_shutdown(TcpIncoming::from(listener), closing));
        Ok(Self { address, spans, _stop: stop.drop_guard() })
    }

    /// What came so far.
    pub fn spans(&self) -> Vec<Received> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Sink(Arc<Mutex<Vec<Received>>>);

#[tonic::async_trait]
impl TraceService for Sink {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.unwrap_or_default().attributes;
            let service = attributes.iter().find(|attribute| attribute.key == "service.name");
            let service = service.map_or_else(String::new, text);
            let of_scopes = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(of_scopes.map(|span| Received { service: service.clone(), span }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn text(attribute: &KeyValue) -> String {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(value)) => value.clone(),
        Some(Value::IntValue(value)) => value.to_string(),
        Some(Value::DoubleValue(value)) => value.to_string(),
        Some(Value::BoolValue(value)) => value.to_string(),
        other => format!("{other:?}"),
    }
}
