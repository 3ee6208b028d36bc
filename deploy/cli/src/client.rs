//! gRPC connections of the commands that talk to a coordinator.
//! Invariants: a connection is handed out once its coordinator has answered; one that falls silent later is found out by
//! HTTP/2's pings, so that no command waits for a coordinator that is stopped or gone.

use std::{error::Error, fmt, path::PathBuf, str::FromStr, time::Duration};

use anyhow::{Context, anyhow};
use lockstep_proto::{
    MAX_MESSAGE_BYTES,
    status::Class,
    v1::{GetClusterRequest, GetClusterResponse, admin_client::AdminClient, inference_client::InferenceClient},
};
use lockstep_transport::{ClientTls, Connector, Outbound, TlsFiles, explain};
use tonic::{
    Request, Response, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::Channel,
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::tls;

/// Longest time until a connection stands, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for an answer that needs no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two pings of a connection.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time that a ping may be under way.
const PING_TIMEOUT: Duration = Duration::from_secs(4);

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
    /// Name that the server's certificate must be for [default: the address's]
    #[arg(long, env = "LOCKSTEP_TLS_SERVER_NAME", value_name = "NAME")]
    tls_server_name: Option<String>,
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

/// A service of a coordinator that has answered.
pub struct Reached<C> {
    /// Its client.
    pub client: C,
    /// Where it is.
    pub address: String,
}

/// A coordinator is there no more.
#[derive(Debug, thiserror::Error)]
#[error("the coordinator at {0} went away")]
pub struct WentAway(String);

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
        Self { server, tls_ca: None, tls_server_name: None, tls_cert: None, tls_key: None, api_key, own_server: files }
    }

    /// A client of the Inference service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn inference(&self) -> anyhow::Result<Reached<InferenceClient<Server>>> {
        self.inference_after(None).await
    }

    /// The same, but the coordinator at `passed` and those before it come last.
    ///
    /// # Errors
    /// If none answers.
    pub async fn inference_after(&self, passed: Option<&str>) -> anyhow::Result<Reached<InferenceClient<Server>>> {
        let Reached { client, address } = self.channel(passed).await?;
        let client = InferenceClient::with_interceptor(client, self.api_key.clone().unwrap_or_default());
        Ok(Reached { client: client.max_decoding_message_size(MAX_MESSAGE_BYTES), address })
    }

    /// How many coordinators there are.
    pub fn num_coordinators(&self) -> usize {
        self.addresses().count()
    }

    /// A client of the Admin service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn admin(&self) -> anyhow::Result<Reached<AdminClient<Server>>> {
        self.admin_after(None).await
    }

    async fn admin_after(&self, passed: Option<&str>) -> anyhow::Result<Reached<AdminClient<Server>>> {
        let Reached { client, address } = self.channel(passed).await?;
        let client = AdminClient::with_interceptor(client, self.api_key.clone().unwrap_or_default());
        Ok(Reached { client: client.max_decoding_message_size(MAX_MESSAGE_BYTES), address })
    }

    /// The cluster as `admin` sees it. If that one went away, the next that answers takes its place.
    ///
    /// # Errors
    /// If none answers, or one refuses.
    pub async fn cluster(&self, admin: &mut Reached<AdminClient<Server>>) -> anyhow::Result<GetClusterResponse> {
        match answer(&admin.address, admin.client.get_cluster(GetClusterRequest {})).await {
            Err(error) if error.is::<WentAway>() && self.num_coordinators() > 1 => {
                *admin = self.admin_after(Some(&admin.address)).await?;
                answer(&admin.address, admin.client.get_cluster(GetClusterRequest {})).await
            }
            answer => answer,
        }
    }

    /// A connection for any other service.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn any(&self) -> anyhow::Result<Reached<Channel>> {
        self.channel(None).await
    }

    fn addresses(&self) -> impl Iterator<Item = &str> {
        self.server.split(',').map(str::trim).filter(|address| !address.is_empty())
    }

    async fn channel(&self, passed: Option<&str>) -> anyhow::Result<Reached<Channel>> {
        let mut addresses: Vec<&str> = self.addresses().collect();
        let num_passed = passed.and_then(|passed| addresses.iter().position(|address| *address == passed));
        addresses.rotate_left(num_passed.map_or(0, |index| index + 1));
        let mut last = anyhow!("server {:?} names no address", self.server);
        for address in addresses {
            match self.connect(address).await {
                Ok(client) => return Ok(Reached { client, address: address.to_owned() }),
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
        let is_secured = !matches!(outbound, Outbound::ClearText);
        let (endpoint, connector) = Connector::new(address, outbound).context("server")?;
        let connector = connector.expecting(self.tls_server_name.clone());
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true);
        let shows_none = self.tls_cert.is_none() && self.own_server.is_none();
        let hint = if is_secured && shows_none { " (--tls-cert, --tls-key)" } else { "" };
        let in_words =
            |error: tonic::transport::Error| explain(&error).map_or_else(|| error.into(), |reason| anyhow!(reason));
        let reached = async {
            let channel = endpoint.connect_with_connector(connector).await.map_err(in_words)?;
            is_there(channel.clone(), hint).await?;
            anyhow::Ok(channel)
        };
        reached.await.with_context(|| format!("cannot reach a coordinator at {address}"))
    }
}

/// Asks for anything: a stopped process has its connections accepted by the system, and with TLS 1.3 a server refuses a
/// certificate, or that there is none, after the handshake. `hint` says how to show one.
async fn is_there(channel: Channel, hint: &str) -> anyhow::Result<()> {
    let mut health = HealthClient::new(channel);
    match tokio::time::timeout(ANSWER_TIMEOUT, health.check(HealthCheckRequest::default())).await {
        Err(_) => Err(anyhow!("it does not answer")),
        Ok(Err(status)) if is_made_up(&status) => {
            // Whoever stands between may swallow the reason.
            let lost = || {
                format!(
                    "it closed the connection{}",
                    if hint.is_empty() { "" } else { ", perhaps for want of a certificate" }
                )
            };
            Err(anyhow!("{}{hint}", explain(&status).unwrap_or_else(lost)))
        }
        Ok(_) => Ok(()),
    }
}

/// Waits for an answer that needs no work.
///
/// # Errors
/// As [`refused`]; [`WentAway`] also if there is none in time.
pub async fn answer<T>(address: &str, call: impl Future<Output = Result<Response<T>, Status>>) -> anyhow::Result<T> {
    match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
        Err(_) => Err(WentAway(address.to_owned()).into()),
        Ok(answer) => Ok(answer.map_err(|status| refused(address, &status))?.into_inner()),
    }
}

/// Whether a broken connection made a status, and no server.
pub fn is_made_up(status: &Status) -> bool {
    Class::named(status).is_none() && (status.source().is_some() || Class::of(status) == Class::WorkerLost)
}

/// A call that the coordinator at `address` refused, in one line: what it says and the class of the failure.
/// [`WentAway`] if it is there no more.
pub fn refused(address: &str, status: &Status) -> anyhow::Error {
    match explain(status) {
        Some(reason) => anyhow!(reason),
        None if is_made_up(status) => WentAway(address.to_owned()).into(),
        None => anyhow!("{} ({})", status.message(), Class::of(status).reason()),
    }
}
