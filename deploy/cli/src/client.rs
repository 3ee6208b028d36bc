//! gRPC connections of the commands that talk to a coordinator.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use anyhow::{Context, anyhow};
use lockstep_proto::{
    MAX_MESSAGE_BYTES,
    status::Class,
    v1::{admin_client::AdminClient, inference_client::InferenceClient},
};
use lockstep_transport::{ClientTls, Connector, Outbound, TlsFiles, explain};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};

use crate::tls;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Which coordinator.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerArgs {
    /// gRPC address of the coordinator, of several, between commas, the first that answers; https://HOST:PORT speaks TLS
    #[arg(
        long,
        visible_alias = "coordinator",
        env = "LOCKSTEP_SERVER",
        default_value = "127.0.0.1:7070",
        value_name = "HOST:PORT,..."
    )]
    pub server: String,
    /// Certificates of the authorities that the server's may come from, PEM; speaks TLS [default, with https: the system's]
    #[arg(long, env = "LOCKSTEP_TLS_CA", value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Certificate to show to a server that demands one, PEM; speaks TLS
    #[arg(long, env = "LOCKSTEP_CLIENT_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, env = "LOCKSTEP_CLIENT_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// API key, where the coordinator has tenants; better given by the environment, which other users do not see
    #[arg(long, env = "LOCKSTEP_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<ApiKey>,
    /// Certificate and key of the server, where this process has started it.
    #[arg(skip)]
    own_server: Option<TlsFiles>,
}

/// A connection that shows the API key with every call.
pub type Server = InterceptedService<Channel, ApiKey>;

/// An API key as calls carry it; empty where none is needed. It is not printed.
#[derive(Clone, Default)]
pub struct ApiKey(Option<MetadataValue<Ascii>>);

impl FromStr for ApiKey {
    type Err = &'static str;

    fn from_str(key: &str) -> Result<Self, Self::Err> {
        if key.is_empty() {
            return Ok(Self(None));
        }
        let mut value = MetadataValue::try_from(format!("Bearer {key}")).map_err(|_| "it has characters of no key")?;
        value.set_sensitive(true);
        Ok(Self(Some(value)))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "ApiKey(…)" } else { "ApiKey" })
    }
}

impl Interceptor for ApiKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

impl ServerArgs {
    /// A coordinator that this process has started, in clear text or with the certificate of `files`.
    pub fn own(server: String, files: Option<TlsFiles>, api_key: Option<ApiKey>) -> Self {
        Self { server, tls_ca: None, tls_cert: None, tls_key: None, api_key, own_server: files }
    }

    /// A client of the Inference service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn inference(&self) -> anyhow::Result<InferenceClient<Server>> {
        self.inference_but(0).await
    }

    /// The same, but the first `num_passed` coordinators come last.
    ///
    /// # Errors
    /// If none answers.
    pub async fn inference_but(&self, num_passed: usize) -> anyhow::Result<InferenceClient<Server>> {
        let channel = self.channel(num_passed).await?;
        Ok(InferenceClient::with_interceptor(channel, self.api_key.clone().unwrap_or_default())
            .max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// How many coordinators there are.
    pub fn num_coordinators(&self) -> usize {
        self.addresses().count()
    }

    /// A client of the Admin service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn admin(&self) -> anyhow::Result<AdminClient<Server>> {
        Ok(AdminClient::with_interceptor(self.channel(0).await?, self.api_key.clone().unwrap_or_default())
            .max_decoding_message_size(MAX_MESSAGE_BYTES))
    }

    /// A connection for any other service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn any(&self) -> anyhow::Result<Channel> {
        self.channel(0).await
    }

    fn addresses(&self) -> impl Iterator<Item = &str> {
        self.server.split(',').map(str::trim).filter(|address| !address.is_empty())
    }

    async fn channel(&self, num_passed: usize) -> anyhow::Result<Channel> {
        let mut addresses: Vec<&str> = self.addresses().collect();
        let num_addresses = addresses.len().max(1);
        addresses.rotate_left(num_passed % num_addresses);
        let mut last = anyhow!("server {:?} names no address", self.server);
        for address in addresses {
            match self.connect(address).await {
                Ok(channel) => return Ok(channel),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn connect(&self, address: &str) -> anyhow::Result<Channel> {
        let files = tls::of_client(self.tls_ca.clone(), self.tls_cert.clone(), self.tls_key.clone())?;
        let outbound = if let Some(own) = &self.own_server {
            Outbound::Server(ClientTls::to_own_server(own)?)
        } else if files.is_some() || address.starts_with("https://") {
            Outbound::Server(ClientTls::open(&files.unwrap_or_default())?)
        } else {
            Outbound::ClearText
        };
        let (endpoint, connector) = Connector::new(address, outbound).context("server")?;
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).connect_with_connector(connector).await;
        let in_words =
            |error: tonic::transport::Error| explain(&error).map_or_else(|| error.into(), |reason| anyhow!(reason));
        channel.map_err(in_words).with_context(|| format!("cannot reach a coordinator at {address}"))
    }
}

/// A refused call in one line: what the server says and the class of the failure.
pub fn refused(status: &Status) -> anyhow::Error {
    if let Some(reason) = explain(status) {
        return anyhow!(reason);
    }
    anyhow!("{} ({})", status.message(), Class::of(status).reason())
}
