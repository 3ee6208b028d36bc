//! Connections that come in on a port.
//! Invariant: a connection leaves here secured as the port demands, or in clear text where a party has no TLS; it says
//! which ([`Peer`]). Handshakes run side by side, so that nobody waits for a slow stranger.
//! Not here: what becomes of a connection ([`connection`](crate::connection)), what a peer may ask for.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use rustls::server::Acceptor;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tokio_rustls::LazyConfigAcceptor;

use crate::{
    ClusterTls, Connection, HANDSHAKE_TIMEOUT, Peer, Security, ServerTls, cluster::GRPC_PROTOCOL, explain,
    stream::Stream,
};

/// Most connections of a port, unless it is told; further ones wait in the listener's queue.
const MAX_CONNECTIONS: usize = 10_000;
/// Most handshakes at once; further connections wait in the listener's queue.
const MAX_HANDSHAKES: usize = 1024;
/// Pause after a failure to accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// First byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;
/// Longest that somebody who was turned away may take to read why.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// To HTTP/2 in clear text: empty settings, then GOAWAY with INADEQUATE_SECURITY and a text of 20 bytes.
const HTTP2_REFUSAL: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x1c\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0cthis port speaks TLS";
/// To anything else in clear text, such as HTTP/1.
const HTTP1_REFUSAL: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\n\r\nthis port speaks TLS: use https\n";

/// Who may come in on a port. A party that has no TLS comes in clear text.
#[derive(Clone)]
pub enum Gate {
    /// HTTP clients.
    Http(Option<ServerTls>),
    /// gRPC members.
    Members(Option<ClusterTls>),
    /// gRPC clients and members, told apart by what they ask for.
    Both(Option<ServerTls>, Option<ClusterTls>),
}

/// The connections that come in on a listener.
pub struct Incoming {
    listener: TcpListener,
    gate: Gate,
    handshakes: JoinSet<Option<Connection>>,
    slots: Arc<Semaphore>,
}

impl Incoming {
    /// Lets them in through `gate`.
    pub fn new(listener: TcpListener, gate: Gate) -> Self {
        Self::limited(listener, gate, MAX_CONNECTIONS)
    }

    /// The same, at most so many at once.
    pub fn limited(listener: TcpListener, gate: Gate, max_connections: usize) -> Self {
        Self { listener, gate, handshakes: JoinSet::new(), slots: Arc::new(Semaphore::new(max_connections)) }
    }

    /// The next connection whose handshake is done. May be dropped and called again.
    pub async fn next(&mut self) -> Connection {
        loop {
            tokio::select! {
                accepted = accept(&self.listener, &self.slots), if self.handshakes.len() < MAX_HANDSHAKES => match accepted {
                    Ok((stream, address, slot)) => {
                        let gate = self.gate.clone();
                        self.handshakes.spawn(async move {
                            let (stream, peer) = gate.welcome(stream, address).await?;
                            Some(Connection::new(stream, peer, slot))
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                done = self.handshakes.join_next(), if !self.handshakes.is_empty() => {
                    if let Some(Ok(Some(connection))) = done {
                        return connection;
                    }
                }
            }
        }
    }

    /// The same as a stream, as tonic's servers take it.
    pub fn into_stream(self) -> impl futures::Stream<Item = io::Result<Connection>> + Send {
        futures::stream::unfold(self, |mut incoming| async { Some((Ok(incoming.next().await), incoming)) })
    }
}

/// Accepts a connection as soon as there is room for one.
async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, address) = listener.accept().await?;
    Ok((stream, address, slot))
}

impl Gate {
    async fn welcome(self, stream: TcpStream, address: SocketAddr) -> Option<(Stream, Peer)> {
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, self.admit(stream, address)).await {
            Ok(Ok(admitted)) => return Some(admitted),
            // Such as a probe of the port.
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                tracing::debug!(%address, "connection closed before it was secured");
            }
            Ok(Err(error)) => {
                let reason = explain(&error).unwrap_or_else(|| error.to_string());
                tracing::info!(%address, reason, "connection refused");
            }
            Err(_) => tracing::debug!(%address, "connection closed: its handshake took too long"),
        }
        None
    }

    async fn admit(self, stream: TcpStream, address: SocketAddr) -> io::Result<(Stream, Peer)> {
        stream.set_nodelay(true)?;
        let (takes_clear_text, takes_tls) = match &self {
            Self::Http(clients) => (clients.is_none(), clients.is_some()),
            Self::Members(members) => (members.is_none(), members.is_some()),
            Self::Both(clients, members) => {
                (clients.is_none() || members.is_none(), clients.is_some() || members.is_some())
            }
        };
        let clear = |stream| (Stream::clear(stream), Peer { address, security: Security::ClearText });
        if !takes_tls {
            return Ok(clear(stream));
        }
        let mut first = [0; 3];
        let length = stream.peek(&mut first).await?;
        if length > 0 && first[0] != TLS_HANDSHAKE {
            if takes_clear_text {
                return Ok(clear(stream));
            }
            turn_away(stream, first.starts_with(b"PR")).await;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it speaks clear text where TLS is demanded"));
        }
        self.secure(stream, address).await
    }

    async fn secure(self, stream: TcpStream, address: SocketAddr) -> io::Result<(Stream, Peer)> {
        let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        let is_member =
            start.client_hello().alpn().is_some_and(|mut protocols| protocols.any(|name| name == GRPC_PROTOCOL));
        // Where only one kind is secured the other is told by the protocol that they have none in common.
        let (config, security) = match self {
            Self::Both(Some(clients), members) if !is_member || members.is_none() => (clients.grpc(), Security::Client),
            Self::Both(_, Some(members)) | Self::Members(Some(members)) => (members.grpc_server(), Security::Member),
            Self::Http(Some(clients)) => (clients.http(), Security::Client),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "it speaks TLS where nobody does")),
        };
        match start.into_stream(config).into_fallible().await {
            Ok(stream) => Ok((Stream::secured(stream), Peer { address, security })),
            Err((error, stream)) => {
                // What is wrong has been said in an alert.
                hear_out(stream).await;
                Err(error)
            }
        }
    }
}

/// Says in the client's own protocol that TLS is spoken here.
async fn turn_away(mut stream: TcpStream, is_http2: bool) {
    let farewell = async {
        stream.write_all(if is_http2 { HTTP2_REFUSAL } else { HTTP1_REFUSAL }).await?;
        hear_out(stream).await;
        io::Result::Ok(())
    };
    // Whoever does not listen stays without an answer.
    let _ = tokio::time::timeout(FAREWELL_TIMEOUT, farewell).await;
}

/// Ends a connection so that the last words arrive: one that is closed with bytes unread is reset, and they are lost.
async fn hear_out(mut stream: TcpStream) {
    let rest = async {
        stream.shutdown().await?;
        let mut bytes = [0; 1024];
        while stream.read(&mut bytes).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(FAREWELL_TIMEOUT, rest).await;
}
