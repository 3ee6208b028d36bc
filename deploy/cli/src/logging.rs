//! Logs on standard error, since standard output belongs to results; traces to a collector.

use std::{io::IsTerminal, path::PathBuf};

use lockstep_telemetry::otlp::{self, ExportConfig, Exporting};
use lockstep_transport::TlsFiles;
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::tls;

/// Form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What this process logs and traces, and how.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Log")]
pub struct LogSettings {
    /// Form of the log on standard error
    #[arg(long = "log-format", global = true, value_enum, default_value_t = LogFormat::Text, env = "LOCKSTEP_LOG_FORMAT")]
    pub format: LogFormat,
    /// What is logged, such as `warn` or `lockstep_worker=debug,info` [default: info]
    #[arg(long = "log", global = true, env = "LOCKSTEP_LOG", value_name = "FILTER")]
    filter: Option<String>,
    #[command(flatten)]
    traces: TraceSettings,
}

impl LogSettings {
    /// These settings, with `filter` where none was given.
    pub fn or_filter(&self, filter: &str) -> Self {
        Self { filter: self.filter.clone().or_else(|| Some(filter.to_owned())), ..self.clone() }
    }

    /// The flags that give another process these settings.
    pub fn arguments(&self) -> Vec<String> {
        let format = match self.format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        let filter = self.filter.iter().map(|filter| format!("--log={filter}"));
        filter.chain([format!("--log-format={format}")]).chain(self.traces.arguments()).collect()
    }
}

/// Where this process's traces go.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Traces")]
struct TraceSettings {
    /// OTLP collector that coordinators and workers send traces to over gRPC, such as http://localhost:4317; https:// speaks
    /// TLS, and OTEL_EXPORTER_OTLP_HEADERS says what a collector demands besides [default: none]
    #[arg(
        long = "otlp-endpoint",
        global = true,
        hide_short_help = true,
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        value_name = "URL"
    )]
    endpoint: Option<String>,
    /// Certificates of the authorities that the collector's may come from, PEM [default, with https: the system's]
    #[arg(
        long = "otlp-ca",
        global = true,
        hide_short_help = true,
        env = "OTEL_EXPORTER_OTLP_CERTIFICATE",
        value_name = "FILE"
    )]
    ca: Option<PathBuf>,
    /// Certificate to show to a collector that demands one, PEM
    #[arg(
        long = "otlp-cert",
        global = true,
        hide_short_help = true,
        env = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
        value_name = "FILE"
    )]
    cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(
        long = "otlp-key",
        global = true,
        hide_short_help = true,
        env = "OTEL_EXPORTER_OTLP_CLIENT_KEY",
        value_name = "FILE"
    )]
    key: Option<PathBuf>,
    /// Share of the requests that are traced, 0 to 1, of those whose client does not say
    #[arg(
        long = "trace-ratio",
        global = true,
        hide_short_help = true,
        env = "OTEL_TRACES_SAMPLER_ARG",
        value_name = "RATIO",
        default_value_t = 1.0
    )]
    ratio: f64,
    /// Name of the service in traces [default: lockstep-coordinator, lockstep-worker]
    #[arg(
        long = "service-name",
        global = true,
        hide_short_help = true,
        env = "OTEL_SERVICE_NAME",
        value_name = "NAME"
    )]
    service: Option<String>,
}

impl TraceSettings {
    fn arguments(&self) -> Vec<String> {
        let endpoint = self.endpoint.iter().map(|endpoint| format!("--otlp-endpoint={endpoint}"));
        let service = self.service.iter().map(|service| format!("--service-name={service}"));
        let files = [("otlp-ca", &self.ca), ("otlp-cert", &self.cert), ("otlp-key", &self.key)];
        endpoint.chain(tls::flags(files)).chain(service).chain([format!("--trace-ratio={}", self.ratio)]).collect()
    }

    /// Starts the export of a role, if there is a collector; needs the async runtime.
    fn start(&self, role: &str) -> anyhow::Result<Option<Exporting>> {
        if !(0.0..=1.0).contains(&self.ratio) {
            return Err(crate::UsageError(format!("--trace-ratio is {}, allowed are 0 to 1", self.ratio)).into());
        }
        let Some(endpoint) = self.endpoint.clone().filter(|endpoint| !endpoint.is_empty()) else { return Ok(None) };
        let service = self.service.clone().unwrap_or_else(|| format!("lockstep-{role}"));
        let pair = tls::both(("--otlp-cert", self.cert.clone()), ("--otlp-key", self.key.clone()))?;
        let files = TlsFiles { ca: self.ca.clone(), pair };
        Ok(Some(otlp::start(&ExportConfig { endpoint, tls: files, ratio: self.ratio, service })?))
    }
}

/// Installs the log of this process, and the export of its traces if it has a role; that is to be finished.
///
/// # Errors
/// If the filter, the ratio or the endpoint is none.
pub fn init(settings: &LogSettings, role: Option<&str>) -> anyhow::Result<Option<Exporting>> {
    let filter = settings.filter.as_deref().unwrap_or("info");
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| crate::UsageError(format!("--log {filter:?} is not a log filter: {error}")))?;
    let exporting = role.map(|role| settings.traces.start(role)).transpose()?.flatten();
    // A child outlives the reader of its log by the time that it drains: a broken pipe must not make logging panic.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let lines = match settings.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().with_span_list(false).boxed(),
    };
    let spans = exporting.as_ref().map(Exporting::layer);
    tracing_subscriber::registry().with(spans).with(lines.with_filter(filter)).init();
    Ok(exporting)
}
