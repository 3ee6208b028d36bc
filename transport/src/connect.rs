//! Connections that go out, for tonic's channels.
//! Invariant: each connection is made with the certificates that are in force then, so that a channel that reconnects
//! shows new ones.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::{codegen::http::Uri, transport::Endpoint};
use tower_service::Service;

use crate::{AddressError, ClientTls, ClusterTls, HANDSHAKE_TIMEOUT, is_local, stream::Stream};

/// How to connect.
#[derive(Clone)]
pub enum Outbound {
    /// Without TLS.
    ClearText,
    /// To a server, whose certificate must be for the name in the address, or the one of [`Connector::expecting`].
    Server(ClientTls),
    /// To a member of the cluster, as a member.
    Member(ClusterTls),
}

/// Connects to one address; give it to `connect_with_connector` of the endpoint that it comes with.
#[derive(Clone)]
pub struct Connector {
    host: String,
    port: u16,
    /// What the server's certificate is to be for, if not for `host`.
    server_name: Option<String>,
    outbound: Outbound,
}

impl Connector {
    /// The endpoint and connector for `address`: `host:port`, with `http://` or `https://` before it or not.
    ///
    /// # Errors
    /// [`AddressError`] if it does not parse, or asks for something else than `outbound`.
    pub fn new(address: &str, outbound: Outbound) -> Result<(Endpoint, Self), AddressError> {
        let is_secured = !matches!(outbound, Outbound::ClearText);
        let plain = match address.split_once("://") {
            None => address,
            Some(("http", _)) if is_secured => return Err(AddressError::ForbidsTls(address.to_owned())),
            Some(("https", _)) if !is_secured => return Err(AddressError::NeedsTls(address.to_owned())),
            Some(("http" | "https", plain)) => plain,
            Some(_) => return Err(AddressError::Form(address.to_owned())),
        };
        let wrong = || AddressError::Form(address.to_owned());
        let uri = |scheme: &str| format!("{scheme}://{plain}").parse::<Uri>().map_err(|_| wrong());
        let target = uri("http")?;
        let (Some(host), Some(port)) = (target.host(), target.port_u16()) else { return Err(wrong()) };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        // The endpoint knows nothing of TLS: all of it is the connector's.
        let origin = uri(if is_secured { "https" } else { "http" })?;
        Ok((Endpoint::from(target.clone()).origin(origin), Self { host, port, server_name: None, outbound }))
    }

    /// The same, to a server whose certificate is for another name than the address has.
    #[must_use]
    pub fn expecting(self, server_name: Option<String>) -> Self {
        Self { server_name, ..self }
    }

    /// Whether it surely stays on this machine; a name is looked up only when it connects.
    pub fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(is_local)
    }

    async fn connect(self) -> io::Result<Stream> {
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await?;
        socket.set_nodelay(true)?;
        let config = match self.outbound {
            Outbound::ClearText => return Ok(Stream::clear(socket)),
            Outbound::Server(tls) => tls.0,
            Outbound::Member(tls) => tls.grpc_client(),
        };
        let name = self.server_name.unwrap_or(self.host);
        let name = ServerName::try_from(name).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let handshake = TlsConnector::from(config).connect(name, socket);
        let silent =
            |_| io::Error::new(io::ErrorKind::TimedOut, "the other end did not finish the TLS handshake in time");
        let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(silent)??;
        Ok(Stream::secured(stream))
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { Ok(TokioIo::new(connector.connect().await?)) })
    }
}
