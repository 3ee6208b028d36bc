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

/// Installs the log of this process.
///
/// # Errors
/// If the filter does not parse.
pub fn init(format: LogFormat, filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| crate::UsageError(format!("--log {filter:?} is not a log filter: {error}")))?;
    // A child outlives the reader of its log by the time that it drains: a broken pipe must not make logging panic.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
