//! Traces leave the process by OTLP over gRPC.
//! For: the binary, which starts the export of a role and flushes it at the end.
//! Invariants: whoever ends a span never waits and never fails: at most [`MAX_QUEUED`] spans wait for the collector, more
//! are dropped and counted; the exporter's own connections are not traced.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockstep_transport::{AddressError, ClientTls, Connector, Outbound, TlsError, TlsFiles};
use opentelemetry::{Context, KeyValue, global, trace::TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter as Export,
        SpanProcessor,
    },
};
use tonic::{codegen::http::Uri, transport::Channel};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{Layer, filter::Targets, registry::LookupSpan};

use crate::{define_metrics, metrics::IntCounter, metrics::MetricError, trace::SCOPE};

/// Most spans that wait for the collector.
const MAX_QUEUED: usize = 8192;
/// Longest that one batch may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest flush at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

define_metrics! {
    #[derive(Debug)]
    /// What became of this process's spans.
    pub struct ExportMetrics {
        exported: IntCounter = "lockstep_trace_exported_spans_total",
            "Spans that the collector took";
        dropped: IntCounter = "lockstep_trace_dropped_spans_total",
            "Spans that found too many others waiting";
        failed: IntCounter = "lockstep_trace_failed_spans_total",
            "Spans of batches that the collector did not take in time or refused";
    }
}

/// The process's; an error is a wrong definition.
static METRICS: LazyLock<Result<ExportMetrics, MetricError>> = LazyLock::new(ExportMetrics::new);

/// The counts of this process's export, whether there is one or not.
pub fn metrics() -> Option<&'static ExportMetrics> {
    METRICS.as_ref().ok()
}

/// Why there is no export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The exporter cannot be built.
    #[error("traces cannot be sent to {endpoint:?}: {reason}")]
    Exporter {
        /// Where they were to go.
        endpoint: String,
        /// Cause.
        reason: String,
    },
    /// The endpoint is none.
    #[error("traces cannot be sent: {0}")]
    Address(#[from] AddressError),
    /// A certificate, key or authority cannot be used.
    #[error("traces cannot be sent: {0}")]
    Tls(#[from] TlsError),
    /// The counts of the export.
    #[error("metrics: {0}")]
    Metrics(String),
}

/// Where traces go, and how many.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExportConfig {
    /// A collector's OTLP port, `http://host:4317` or, for TLS, `https://host:4317`.
    pub endpoint: String,
    /// With `https`: the authorities of the collector's certificate, by default those of the system, and the certificate
    /// that it is shown. Read at the start.
    pub tls: TlsFiles,
    /// Share of the requests without a sampled parent that are traced, 0 to 1.
    pub ratio: f64,
    /// Name of the service.
    pub service: String,
}

/// A running export.
pub struct Exporting(SdkTracerProvider);

/// Starts the export of this process; needs the async runtime that its connection is to live on.
///
/// # Errors
/// [`ExportError`] if the endpoint is none or a file cannot be used. A collector that cannot be reached is no error.
pub fn start(config: &ExportConfig) -> Result<Exporting, ExportError> {
    let wrong = |reason: String| ExportError::Exporter { endpoint: config.endpoint.clone(), reason };
    let counts = METRICS.as_ref().map_err(|error| ExportError::Metrics(error.to_string()))?;
    // What `OTEL_EXPORTER_OTLP_HEADERS` holds goes along with every call.
    let exporter = SpanExporter::builder().with_tonic().with_channel(channel(config)?).with_timeout(EXPORT_TIMEOUT);
    let exporter = exporter.build().map_err(|error| wrong(error.to_string()))?;
    let num_queued = Arc::new(AtomicUsize::new(0));
    let counted = CountedExporter { exporter, num_queued: Arc::clone(&num_queued), counts };
    let batches = BatchConfigBuilder::default().with_max_queue_size(MAX_QUEUED).build();
    let processor = BatchSpanProcessor::builder(counted).with_batch_config(batches).build();
    let resource = Resource::builder_empty()
        .with_service_name(config.service.clone())
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
        .with_detector(Box::new(opentelemetry_sdk::resource::EnvResourceDetector::new()))
        .build();
    let provider = SdkTracerProvider::builder()
        .with_span_processor(BoundedProcessor { processor, num_queued, counts })
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.ratio))))
        .with_resource(resource)
        .build();
    global::set_tracer_provider(provider.clone());
    Ok(Exporting(provider))
}

/// A connection that is made when it is needed.
fn channel(config: &ExportConfig) -> Result<Channel, ExportError> {
    let outbound = if config.endpoint.starts_with("https://") || config.tls != TlsFiles::default() {
        Outbound::Server(ClientTls::open(&config.tls)?)
    } else {
        Outbound::ClearText
    };
    let default_port = match config.endpoint.parse::<Uri>() {
        Ok(uri) if uri.host().is_some() && uri.port().is_none() => match uri.scheme_str() {
            Some("https") => ":443",
            Some("http") => ":80",
            _ => "",
        },
        _ => "",
    };
    let address = format!("{}{default_port}", config.endpoint.trim_end_matches('/'));
    let (endpoint, connector) = Connector::new(&address, outbound)?;
    Ok(endpoint.connect_timeout(EXPORT_TIMEOUT).connect_with_connector_lazy(connector))
}

impl Exporting {
    /// The layer that makes spans of this workspace's request spans, and of nothing else.
    pub fn layer<S: Subscriber + for<'span> LookupSpan<'span>>(&self) -> impl Layer<S> + use<S> {
        let own = Targets::new().with_target(env!("CARGO_CRATE_NAME"), LevelFilter::ERROR);
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer(SCOPE))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(own)
    }

    /// Sends what waits, for some seconds at most.
    pub fn finish(self) {
        if let Err(error) = self.0.shutdown_with_timeout(FLUSH_TIMEOUT) {
            tracing::warn!(%error, "traces were lost at the end");
        }
    }
}

/// Drops spans when too many wait, so that the queue behind it is never full.
#[derive(Debug)]
struct BoundedProcessor {
    processor: BatchSpanProcessor,
    num_queued: Arc<AtomicUsize>,
    counts: &'static ExportMetrics,
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.processor.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.num_queued.fetch_add(1, Ordering::Relaxed) >= MAX_QUEUED {
            self.num_queued.fetch_sub(1, Ordering::Relaxed);
            self.counts.dropped.inc();
            return;
        }
        self.processor.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.processor.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.processor.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.processor.set_resource(resource);
    }
}

/// Counts what leaves.
#[derive(Debug)]
struct CountedExporter {
    exporter: SpanExporter,
    num_queued: Arc<AtomicUsize>,
    counts: &'static ExportMetrics,
}

impl Export for CountedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let num_spans = batch.len();
        self.num_queued.fetch_sub(num_spans, Ordering::Relaxed);
        let exported = self.exporter.export(batch).await;
        let count = if exported.is_ok() { &self.counts.exported } else { &self.counts.failed };
        count.inc_by(num_spans as u64);
        if let Err(error) = &exported {
            tracing::debug!(%error, num_spans, "the collector did not take spans");
        }
        exported.map_err(|error| OTelSdkError::InternalFailure(error.to_string()))
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
