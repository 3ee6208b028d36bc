//! `lockstep unload`: have a cluster serve a model no more.

use lockstep_proto::v1::UnloadModelRequest;

use crate::{
    client::{ServerArgs, refused},
    output::print,
};

/// Serve a model no more: it takes no new requests, running ones finish, and the memory of its replicas is given back.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
A model by its name, as `lockstep status` shows it:
  lockstep unload chat
This lasts for models that `lockstep load` brought. The model of a coordinator's own settings (--model) is loaded again when
a coordinator with them starts: change the settings to be rid of it.")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Name of the model for clients
    #[arg(value_name = "NAME")]
    model: String,
}

/// Unloads a model; returns when it is gone.
///
/// # Errors
/// If the coordinator cannot be reached or does not know the model.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let mut admin = args.server.admin().await?;
    let request = UnloadModelRequest { name: args.model.clone() };
    admin.client.unload_model(request).await.map_err(|status| refused(&admin.address, &status))?;
    print(&format!("{}: unloaded\n", args.model))
}
