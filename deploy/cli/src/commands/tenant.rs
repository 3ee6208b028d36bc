//! `lockstep tenant`: a new API key and its lines for the tenants' file.
//! Invariant: standard output, which the documented command adds to that file, never has the key (but with `--json`).
//! Not here: the file's meaning and the keys' form (`lockstep_coordinator::tenants`).

use std::io::Write;

use lockstep_coordinator::tenants::{file::check_name, key};
use serde_json::json;

use crate::{UsageError, output::print_line};

/// Make API keys for the tenants of a coordinator.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A key, shown on standard error, and its lines, added to the file that the coordinator is given with --tenants:
  lockstep tenant new search >> tenants.toml
Its limits are lines of the same file, each of which may be left out:
  weight = 3                    # share beside other tenants, 1 to 1000
  max_concurrent = 64           # requests at once
  tokens_per_minute = 120000    # prompts and outputs
  token_budget = 50000000       # in all, or in each period:
  budget_period_hours = 720
  admin = true                  # may call Admin: status, load, drain
  isolated = true               # shares no cached prompts with other tenants")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make a key; it is shown once, only its hash goes into the file
    New {
        /// The tenant
        name: String,
        /// Print JSON, the key included
        #[arg(long)]
        json: bool,
    },
}

/// Prints a new key.
///
/// # Errors
/// If the name cannot be one, or the system has no randomness.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let Command::New { name, json: is_json } = &args.command;
    check_name(name).map_err(UsageError)?;
    let key = key::generate()?;
    let hash = key::KeyHash::of(key.as_bytes());
    if *is_json {
        return print_line(&json!({"name": name, "key": key, "key_sha256": hash.to_string()}).to_string());
    }
    print_line(&format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{hash}\"]"))?;
    Ok(writeln!(std::io::stderr(), "The key of {name}, which is shown only now:\n{key}")?)
}
