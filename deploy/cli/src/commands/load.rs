//! `lockstep load`: have a cluster that runs serve one more model.

use lockstep_proto::v1::{LoadModelRequest, admin_client::AdminClient};
use lockstep_sharding::Policy;

use super::plan::parse_policy;
use crate::{
    Interrupted,
    client::{Reached, Server, ServerArgs, refused},
    output::print,
    progress, signals,
};

/// Load a model beside those that are served, and wait until it serves. A model that cannot be loaded is dropped again.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A file that the workers have, under the name `m`:
  lockstep load /models/m.gguf
Two-way tensor parallel, under another name, read where it lies:
  lockstep load s3://bucket/m.gguf --name chat --policy tensor=2
What is loaded like this stays until `lockstep unload`; without etcd, until the coordinator ends, too. An order that is
interrupted goes on: `lockstep status` shows how far it is.")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// A path on the workers, or the URL (https://, s3://, gs://, az://) of a GGUF file that they read where it lies
    #[arg(value_name = "MODEL")]
    source: String,
    /// Name of the model for clients [default: the file's name without extension]
    #[arg(long)]
    name: Option<String>,
    /// How to cut the model: auto, tensor=N, pipeline=N, hybrid=TPxPP, replicas=N
    #[arg(long, value_name = "POLICY", default_value = "auto", value_parser = checked_policy)]
    policy: Policy,
}

fn checked_policy(text: &str) -> Result<Policy, String> {
    parse_policy(text).map_err(|error| error.to_string())
}

/// Loads a model.
///
/// # Errors
/// If the coordinator cannot be reached or refuses, or the model cannot be loaded.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let name = args.name.unwrap_or_else(|| lockstep_coordinator::config::default_model_name(&args.source));
    let request = LoadModelRequest { name: name.clone(), source: args.source, policy: args.policy.to_string() };
    let shutdown = signals::shutdown_token(false)?;
    let mut admin = args.server.admin().await?;
    let loaded = shutdown.run_until_cancelled(follow(&mut admin, request)).await;
    loaded.ok_or(Interrupted("interrupted; the model is loaded all the same, as `lockstep status` shows"))??;
    print(&format!("{name}: serves\n"))
}

/// Orders a model and draws its progress until it serves.
///
/// # Errors
/// If the coordinator refuses or goes away, or the model cannot be loaded.
pub async fn follow(admin: &mut Reached<AdminClient<Server>>, request: LoadModelRequest) -> anyhow::Result<()> {
    let Reached { client, address } = admin;
    let bar = progress::bytes_bar(&format!("loading {}", request.name));
    let mut stream = client.load_model(request).await.map_err(|status| refused(address, &status))?.into_inner();
    while let Some(progress) = stream.message().await.map_err(|status| refused(address, &status))? {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.loaded_bytes);
        if progress.ready {
            bar.finish_and_clear();
            return Ok(());
        }
    }
    anyhow::bail!("the coordinator stopped reporting before the model was loaded")
}
