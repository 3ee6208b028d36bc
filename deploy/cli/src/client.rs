//! gRPC connections of the commands that talk to a coordinator.

use std::time::Duration;

use anyhow::Context;
use lockstep_proto::{
    MAX_MESSAGE_BYTES,
    status::Class,
    v1::{admin_client::AdminClient, inference_client::InferenceClient},
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

/// Which coordinator.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerArgs {
    /// gRPC address of the coordinator
    #[arg(long, env = "LOCKSTEP_SERVER", default_value = "127.0.0.1:7070", value_name = "HOST:PORT")]
    pub server: String,
}

impl ServerArgs {
    /// A client of the Inference service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn inference(&self) -> anyhow::Result<InferenceClient<Channel>> {
        Ok(InferenceClient::new(self.channel().await?).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// A client of the Admin service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn admin(&self) -> anyhow::Result<AdminClient<Channel>> {
        Ok(AdminClient::new(self.channel().await?).max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    async fn channel(&self) -> anyhow::Result<Channel> {
        Endpoint::from_shared(url_of(&self.server))
            .with_context(|| format!("server {:?}", self.server))?
            .connect_timeout(Duration::from_secs(5))
            .tcp_nodelay(true)
            .connect()
            .await
            .with_context(|| format!("cannot reach a coordinator at {}", self.server))
    }
}

/// The URL of an address that may come without a scheme.
pub fn url_of(address: &str) -> String {
    if address.contains("://") { address.to_owned() } else { format!("http://{address}") }
}

/// A refused call in one line: what the server says and the class of the failure.
pub fn refused(status: &Status) -> anyhow::Error {
    anyhow::anyhow!("{} ({})", status.message(), Class::of(status).reason())
}
