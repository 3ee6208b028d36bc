//! A connection that came in, for tonic and hyper.
//! Invariant: it keeps its place among those of its port only as long as its peer is there: one that says nothing within
//! [`FIRST_BYTE_TIMEOUT`], or takes nothing of what is sent for [`WRITE_TIMEOUT`], is at an end.
//! Not here: how long a peer that has spoken may be silent (HTTP/1: [`http`](crate::http); HTTP/2: its pings).

use std::{
    future::Future,
    io::{self, IoSlice},
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;

use crate::stream::Stream;

/// Longest silence of a peer at its beginning.
pub const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest that a peer may take nothing of what waits to be sent.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// How a connection is secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// Not at all.
    ClearText,
    /// TLS of a client, with a certificate if the port demands one.
    Client,
    /// Mutual TLS of a member of the cluster.
    Member,
}

/// Who is on the other end of a connection; tonic adds it to the extensions of every request.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Where it connects from.
    pub address: SocketAddr,
    /// How it is secured.
    pub security: Security,
}

/// A connection that came in.
pub struct Connection {
    stream: Stream,
    /// Who is on the other end.
    pub peer: Peer,
    /// Its place among the connections of the port.
    _slot: OwnedSemaphorePermit,
    /// Fires when its first byte should have come; `None` when that has.
    first_byte: Option<Pin<Box<Sleep>>>,
    /// While something waits to be sent: fires when some of it should have been taken.
    write: Option<Pin<Box<Sleep>>>,
    write_timeout: Duration,
}

impl Connection {
    pub(crate) fn new(stream: Stream, peer: Peer, slot: OwnedSemaphorePermit) -> Self {
        let first_byte = Some(Box::pin(sleep(FIRST_BYTE_TIMEOUT)));
        Self { stream, peer, _slot: slot, first_byte, write: None, write_timeout: WRITE_TIMEOUT }
    }

    /// What came of sending, unless nothing does for too long.
    fn sent<T>(&mut self, context: &mut Context<'_>, sent: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if sent.is_ready() {
            self.write = None;
            return sent;
        }
        let write = self.write.get_or_insert_with(|| Box::pin(sleep(self.write_timeout)));
        write.as_mut().poll(context).map(|()| Err(late("the other end takes nothing")))
    }
}

fn late(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, what)
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        match &mut self.first_byte {
            None => read,
            Some(_) if read.is_ready() => {
                self.first_byte = None;
                read
            }
            Some(first_byte) => first_byte.as_mut().poll(context).map(|()| Err(late("the other end says nothing"))),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.sent(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.sent(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.sent(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.stream).poll_shutdown(context);
        self.sent(context, ended)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        time::timeout,
    };

    use super::*;
    use crate::{Gate, Incoming};

    #[tokio::test]
    async fn who_says_or_takes_nothing_is_at_an_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Incoming::new(listener, Gate::Http(None));
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(20));

        let _silent = TcpStream::connect(address).await.unwrap();
        let mut connection = incoming.next().await;
        connection.first_byte = Some(Box::pin(sleep(short)));
        let ended = timeout(long, connection.read_u8()).await.expect("it may be silent for ever");
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);

        let mut peer = TcpStream::connect(address).await.unwrap();
        let mut connection = incoming.next().await;
        (connection.first_byte, connection.write_timeout) = (Some(Box::pin(sleep(5 * short))), 3 * short);
        peer.write_all(b"x").await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), b'x');
        assert!(timeout(6 * short, connection.read_u8()).await.is_err(), "who has spoken may be silent");
        let much = vec![0; 64 << 20];
        let ended = timeout(long, connection.write_all(&much)).await.expect("it may take nothing for ever");
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
