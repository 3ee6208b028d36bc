//! An asynchronous stream with or without TLS.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::TlsStream;

/// A connection; what is written and read is what the other end reads and writes.
pub struct Stream(Kind);

enum Kind {
    Clear(TcpStream),
    Secured(Box<TlsStream<TcpStream>>),
}

/// A pinned stream that reads and writes.
trait Duplex: AsyncRead + AsyncWrite {}
impl<T: AsyncRead + AsyncWrite> Duplex for T {}

impl Stream {
    pub(crate) fn clear(stream: TcpStream) -> Self {
        Self(Kind::Clear(stream))
    }

    pub(crate) fn secured(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        Self(Kind::Secured(Box::new(stream.into())))
    }

    fn inner(self: Pin<&mut Self>) -> Pin<&mut dyn Duplex> {
        match &mut self.get_mut().0 {
            Kind::Clear(stream) => Pin::<&mut TcpStream>::new(stream),
            Kind::Secured(stream) => Pin::<&mut TlsStream<TcpStream>>::new(stream),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.0 {
            Kind::Clear(stream) => stream.is_write_vectored(),
            Kind::Secured(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(context)
    }
}
