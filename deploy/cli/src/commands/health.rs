//! `lockstep health`: whether a coordinator answers and can serve, as an exit code, for containers without other tools.

use lockstep_proto::status::Class;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::client::{Reached, ServerArgs, answer};

/// Ask a coordinator's health service: exit code 0 if a model can be served, else 1. Needs no API key.
#[derive(clap::Args)]
#[command(after_help = "\
Can it serve?
  lockstep health --server https://host-a:7070 --tls-ca ca.pem
Does it answer at all?
  lockstep health --live")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Ask only whether the process answers
    #[arg(long)]
    live: bool,
}

/// Asks once.
///
/// # Errors
/// If nothing answers, or the coordinator cannot serve.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let Reached { client, address } = args.server.any().await?;
    let mut client = HealthClient::new(client);
    let status = answer(&address, client.check(HealthCheckRequest::default())).await?.status();
    if status == ServingStatus::Serving || args.live {
        return Ok(());
    }
    anyhow::bail!("no model can be served ({})", Class::NotReady.reason())
}
