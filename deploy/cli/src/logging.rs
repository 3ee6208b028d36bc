//! Logs on standard error; standard output belongs to results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What this process logs, and how.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Log")]
pub struct LogSettings {
    /// Form of the log on standard error
    #[arg(long = "log-format", global = true, value_enum, default_value_t = LogFormat::Text, env = "LOCKSTEP_LOG_FORMAT")]
    pub format: LogFormat,
    /// What is logged, such as `warn` or `lockstep_worker=debug,info` [default: info]
    #[arg(long = "log", global = true, env = "LOCKSTEP_LOG", value_name = "FILTER")]
    filter: Option<String>,
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
        filter.chain([format!("--log-format={format}")]).collect()
    }
}

/// Installs the log of this process.
///
/// # Errors
/// If the filter does not parse.
pub fn init(settings: &LogSettings) -> anyhow::Result<()> {
    let filter = settings.filter.as_deref().unwrap_or("info");
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| crate::UsageError(format!("--log {filter:?} is not a log filter: {error}")))?;
    // A child outlives the reader of its log by the time that it drains: a broken pipe must not make logging panic.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    match settings.format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
