//! The one binary: parses the command line, sets up logs, runs one subcommand, turns its error into one line and an
//! exit code (0 done, 1 failed, 2 wrong usage, 130 interrupted). Thin over the libraries: what a server or planner does is not here.
//!
//! - [`commands`]: one file a subcommand. [`settings`]: defaults < TOML file < environment < flags.
//! - [`client`]: gRPC connections. [`tls`]: settings of certificates and etcd. [`logging`], [`output`], [`signals`], [`units`], [`table`], [`progress`]: the terminal's side.

mod client;
mod commands;
mod devices;
mod logging;
mod output;
mod progress;
mod settings;
mod signals;
mod table;
mod tls;
mod units;

use std::{io::Write, process::ExitCode};

use clap::{Parser, Subcommand};
use lockstep_telemetry::otlp::Exporting;

use crate::{logging::LogSettings, output::ReaderGone};

/// Distributed inference of large language models: a coordinator plans how a model is cut over devices, and workers run
/// it in lockstep.
#[derive(Parser)]
#[command(
    name = "lockstep",
    version,
    arg_required_else_help = true,
    after_help = "\
Start a local cluster of two workers and talk to it:
  lockstep up --model model.gguf --workers 2
  lockstep generate \"The capital of France is\""
)]
struct Cli {
    #[command(flatten)]
    log: LogSettings,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Coordinator(commands::coordinator::Args),
    Worker(commands::worker::Args),
    Up(commands::up::Args),
    Generate(commands::generate::Args),
    Status(commands::status::Args),
    Devices(commands::devices::Args),
    Load(commands::load::Args),
    Unload(commands::unload::Args),
    Drain(commands::drain::Args),
    Health(commands::health::Args),
    Bench(commands::bench::Args),
    Plan(commands::plan::Args),
    Synth(commands::synth::Args),
    Tenant(commands::tenant::Args),
    Pull(commands::pull::Args),
    #[cfg(feature = "etcd")]
    EtcdMember(commands::etcd_member::Args),
}

impl Command {
    /// What a process that serves is called in traces.
    fn role(&self) -> Option<&'static str> {
        match self {
            Self::Coordinator(_) => Some("coordinator"),
            Self::Worker(_) => Some("worker"),
            _ => None,
        }
    }
}

/// The command line cannot be carried out as it was given.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

/// Ctrl-C or SIGTERM ended the command before it was done.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Interrupted(&'static str);

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<ReaderGone>() => ExitCode::SUCCESS,
        Err(error) => {
            // One line: the error and its causes. A cause that its effect already quotes is not said twice.
            let mut line = error.to_string();
            for cause in error.chain().skip(1).map(ToString::to_string) {
                if !line.contains(&cause) {
                    line = format!("{line}: {cause}");
                }
            }
            // Nobody may be left to read it.
            let _ = writeln!(std::io::stderr(), "error: {}", line.replace('\n', " ").trim_end());
            let is_interrupted = error.is::<Interrupted>();
            ExitCode::from(if is_interrupted { 130 } else { 1 + u8::from(error.is::<UsageError>()) })
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let exporting = {
        let _runtime = runtime.enter();
        logging::init(&cli.log, cli.command.role())?
    };
    let result = match cli.command {
        Command::Coordinator(args) => runtime.block_on(commands::coordinator::run(args)),
        Command::Worker(args) => runtime.block_on(commands::worker::run(args)),
        Command::Up(args) => runtime.block_on(commands::up::run(args, &cli.log)),
        Command::Generate(args) => runtime.block_on(commands::generate::run(args)),
        Command::Status(args) => runtime.block_on(commands::status::run(args)),
        Command::Devices(args) => commands::devices::run(&args),
        Command::Load(args) => runtime.block_on(commands::load::run(args)),
        Command::Unload(args) => runtime.block_on(commands::unload::run(args)),
        Command::Drain(args) => runtime.block_on(commands::drain::run(args)),
        Command::Health(args) => runtime.block_on(commands::health::run(args)),
        Command::Bench(args) => runtime.block_on(commands::bench::run(args)),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Synth(args) => runtime.block_on(commands::synth::run(args)),
        Command::Tenant(args) => commands::tenant::run(&args),
        Command::Pull(args) => runtime.block_on(commands::pull::run(args)),
        #[cfg(feature = "etcd")]
        Command::EtcdMember(args) => runtime.block_on(commands::etcd_member::run(args)),
    };
    exporting.into_iter().for_each(Exporting::finish);
    // A reader that blocks on standard input must not hold the process back.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_teaches_with_an_example() {
        for subcommand in super::Cli::command().get_subcommands() {
            let help = subcommand.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("lockstep {}", subcommand.get_name())), "{}", subcommand.get_name());
        }
    }
}
