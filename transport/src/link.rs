//! A connection between two ranks: blocking or not, with or without TLS, one thread writing while another reads.
//! Invariant: no lock is held over a wait for the peer, so neither direction waits for the other; looking for bytes that
//! are not there costs one system call and touches no lock that a writer holds.
//! Not here: who is on the other end of the replica ([`ClusterTls`] knows members only).

use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustls::{ClientConnection, Connection, ServerConnection, pki_types::ServerName};

use crate::ClusterTls;

/// Bytes asked of the socket at once.
const READ_BYTES: usize = 64 << 10;

/// The stream; reads and writes go through a shared reference.
pub struct LinkStream {
    socket: TcpStream,
    session: Option<Session>,
}

struct Session {
    connection: Mutex<Connection>,
    inbound: Mutex<Inbound>,
    /// Bytes wait in `connection` for the socket to take them.
    has_unsent: AtomicBool,
}

/// What has come in.
struct Inbound {
    /// Bytes of the socket; those in `start..end` were not yet decrypted.
    sealed: Vec<u8>,
    start: usize,
    end: usize,
    /// Decrypted bytes that wait in the connection.
    num_plain_bytes: usize,
}

impl LinkStream {
    /// Takes `socket` as it is, or, with `tls`, as the end that connected, once the TLS handshake is done; both blocking.
    ///
    /// # Errors
    /// The socket's, or rustls's within one of kind `InvalidData`; `TimedOut` at the deadline.
    pub fn connect(socket: TcpStream, tls: Option<&ClusterTls>, deadline: Instant) -> io::Result<Self> {
        let session = tls.map(|tls| {
            let name = ServerName::from(socket.peer_addr()?.ip());
            let connection = ClientConnection::new(tls.rank_client(), name).map_err(io::Error::other)?;
            Session::begin(connection.into(), &socket, deadline)
        });
        Ok(Self { session: session.transpose()?, socket })
    }

    /// The same as the end that was connected to.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn accept(socket: TcpStream, tls: Option<&ClusterTls>, deadline: Instant) -> io::Result<Self> {
        let session = tls.map(|tls| {
            let connection = ServerConnection::new(tls.rank_server()).map_err(io::Error::other)?;
            Session::begin(connection.into(), &socket, deadline)
        });
        Ok(Self { session: session.transpose()?, socket })
    }

    /// The socket, for its options; nothing may be read from it or written to it.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Ends both directions, also for threads that wait.
    pub fn shutdown(&self) {
        // A socket that is closed already is what we want.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Whether the socket took everything that was written.
    pub fn is_flushed(&self) -> bool {
        self.session.as_ref().is_none_or(|session| !session.has_unsent.load(Ordering::Acquire))
    }
}

impl Session {
    fn begin(mut connection: Connection, mut socket: &TcpStream, deadline: Instant) -> io::Result<Self> {
        while connection.is_handshaking() || connection.wants_write() {
            if connection.wants_write() {
                socket.set_write_timeout(Some(remaining(deadline)?))?;
                connection.write_tls(&mut socket).map_err(late)?;
                continue;
            }
            socket.set_read_timeout(Some(remaining(deadline)?))?;
            if connection.read_tls(&mut socket).map_err(late)? == 0 {
                return Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection in the TLS handshake"));
            }
            if let Err(error) = connection.process_new_packets() {
                // The peer may still read why.
                let _ = connection.write_tls(&mut socket);
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
        // The peer's first bytes may have come with the end of its handshake.
        let num_plain_bytes = connection.process_new_packets().map_err(io::Error::other)?.plaintext_bytes_to_read();
        let inbound = Inbound { sealed: vec![0; READ_BYTES], start: 0, end: 0, num_plain_bytes };
        let has_unsent = AtomicBool::new(false);
        Ok(Self { connection: Mutex::new(connection), inbound: Mutex::new(inbound), has_unsent })
    }

    /// Fills `targets` as far as there are bytes.
    fn read(&self, mut socket: &TcpStream, targets: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut inbound = lock(&self.inbound);
        let inbound = &mut *inbound;
        loop {
            if inbound.num_plain_bytes > 0 {
                let mut connection = lock(&self.connection);
                let mut moved = 0;
                for target in targets {
                    let length = target.len().min(inbound.num_plain_bytes);
                    connection.reader().read_exact(&mut target[..length])?;
                    inbound.num_plain_bytes -= length;
                    moved += length;
                }
                return Ok(moved);
            }
            if inbound.start == inbound.end {
                // No lock of the other direction is held while the socket is asked.
                let length = socket.read(&mut inbound.sealed)?;
                if length == 0 {
                    return Ok(0);
                }
                (inbound.start, inbound.end) = (0, length);
            }
            let mut connection = lock(&self.connection);
            inbound.start += connection.read_tls(&mut &inbound.sealed[inbound.start..inbound.end])?;
            let state =
                connection.process_new_packets().map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            inbound.num_plain_bytes = state.plaintext_bytes_to_read();
            if state.peer_has_closed() && inbound.num_plain_bytes == 0 {
                return Ok(0);
            }
        }
    }

    /// Encrypts as much of `slices` as there is room for, and gives the socket what it takes.
    fn write(&self, socket: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut connection = lock(&self.connection);
        self.send(&mut connection, socket).or_else(unless_full)?;
        let taken = connection.writer().write_vectored(slices)?;
        self.send(&mut connection, socket).or_else(unless_full)?;
        if taken == 0 && slices.iter().any(|slice| !slice.is_empty()) {
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(taken)
    }

    /// Gives the socket all that is encrypted.
    fn send(&self, connection: &mut Connection, mut socket: &TcpStream) -> io::Result<()> {
        let mut result = Ok(());
        while result.is_ok() && connection.wants_write() {
            result = match connection.write_tls(&mut socket) {
                Ok(0) => Err(ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
                other => other.map(drop),
            };
        }
        self.has_unsent.store(connection.wants_write(), Ordering::Release);
        result
    }
}

/// A socket that takes no more for now is no failure: the rest waits.
fn unless_full(error: io::Error) -> io::Result<()> {
    if error.kind() == ErrorKind::WouldBlock { Ok(()) } else { Err(error) }
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let rest = deadline.saturating_duration_since(Instant::now());
    if rest.is_zero() { Err(silent()) } else { Ok(rest) }
}

/// A time limit of a blocking socket shows as an operation that would block.
fn late(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { silent() } else { error }
}

fn silent() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it did not finish the TLS handshake in time")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Read for &LinkStream {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        match &self.session {
            None => (&self.socket).read(target),
            Some(session) => session.read(&self.socket, &mut [IoSliceMut::new(target)]),
        }
    }

    fn read_vectored(&mut self, targets: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.session {
            None => (&self.socket).read_vectored(targets),
            Some(session) => session.read(&self.socket, targets),
        }
    }
}

impl Write for &LinkStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.session {
            None => (&self.socket).write(bytes),
            Some(session) => session.write(&self.socket, &[IoSlice::new(bytes)]),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.session {
            None => (&self.socket).write_vectored(slices),
            Some(session) => session.write(&self.socket, slices),
        }
    }

    /// Gives the socket what was written and it did not take yet.
    fn flush(&mut self) -> io::Result<()> {
        self.session.as_ref().map_or(Ok(()), |session| session.send(&mut lock(&session.connection), &self.socket))
    }
}

impl AsFd for LinkStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
