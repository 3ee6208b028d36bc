//! One connection to one peer, and the loop that moves frames over several of them at once.
//! For: `tcp` (vectors) and `message` (values).
//! Invariant: sockets are non-blocking; [`drive`] returns by its deadline, or if it has none when a peer closes, the path
//! to it is cut or the links are aborted; sending and receiving progress together, so two ranks that send more than the
//! sockets hold do not wait for each other.

use std::{
    io::{ErrorKind, IoSlice, IoSliceMut, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_transport::LinkStream;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt,
};

use super::{
    AbortHandle,
    frame::{FrameHeader, FrameKind, HEADER_BYTES},
};
use crate::WorkerError;

/// Socket buffers of links within a host.
const SAME_HOST_BUFFER_BYTES: usize = 512 << 10;
/// A rank that waits without a deadline asks the peer's machine whether it is still there: after so long a silence, so
/// long between questions, and so many of them without an answer.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(1), Duration::from_secs(1), 2);

/// An authenticated connection.
pub(super) struct Link {
    pub(super) stream: Arc<LinkStream>,
    pub(super) peer: usize,
    pub(super) plan_epoch: u64,
    pub(super) abort: AbortHandle,
    send_sequence: u64,
    receive_sequence: u64,
}

impl Link {
    /// Takes over `stream`, which passed the handshake.
    pub(super) fn new(
        stream: LinkStream,
        peer: usize,
        plan_epoch: u64,
        abort: &AbortHandle,
    ) -> Result<Self, WorkerError> {
        let setup = |stream: &TcpStream| -> std::io::Result<()> {
            stream.set_nodelay(true)?;
            sockopt::set_socket_keepalive(stream, true)?;
            sockopt::set_tcp_keepidle(stream, KEEPALIVE.0)?;
            sockopt::set_tcp_keepintvl(stream, KEEPALIVE.1)?;
            sockopt::set_tcp_keepcnt(stream, KEEPALIVE.2)?;
            // Within a host there is no distance to fill: buffers that grow by themselves only leave the cache.
            if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
                sockopt::set_socket_send_buffer_size(stream, SAME_HOST_BUFFER_BYTES)?;
                sockopt::set_socket_recv_buffer_size(stream, SAME_HOST_BUFFER_BYTES)?;
            }
            stream.set_nonblocking(true)
        };
        setup(stream.socket()).map_err(|error| link_error(peer, error.to_string()))?;
        let stream = Arc::new(stream);
        abort.register(&stream);
        Ok(Self { stream, peer, plan_epoch, abort: abort.clone(), send_sequence: 0, receive_sequence: 0 })
    }

    /// Header of the next frame to send.
    pub(super) fn next_send(&mut self, kind: FrameKind, payload_bytes: usize) -> FrameHeader {
        let header = FrameHeader::new(kind, self.plan_epoch, self.send_sequence, payload_bytes);
        self.send_sequence += 1;
        header
    }

    /// Header that the next frame must have.
    pub(super) fn next_receive(&mut self, kind: FrameKind, payload_bytes: usize) -> FrameHeader {
        let header = FrameHeader::new(kind, self.plan_epoch, self.receive_sequence, payload_bytes);
        self.receive_sequence += 1;
        header
    }

    /// Whether `header` is what the next frame of `kind` must be.
    pub(super) fn check_receive(&self, header: &FrameHeader, kind: FrameKind, bytes: usize) -> Result<(), String> {
        header.check(&FrameHeader::new(kind, self.plan_epoch, self.receive_sequence, bytes))
    }

    /// The same connection as one link that only sends and one that only receives.
    pub(super) fn split(self) -> (Self, Self) {
        let sending = Self { stream: Arc::clone(&self.stream), abort: self.abort.clone(), ..self };
        (sending, self)
    }

    /// The error of this link; an abort's reason wins, since it is the cause.
    pub(super) fn error(&self, what: impl Into<String>) -> WorkerError {
        match self.abort.reason() {
            Some(reason) => link_error(self.peer, format!("aborted: {reason}")),
            None => link_error(self.peer, what.into()),
        }
    }

    /// The error of a link whose peer does not answer any more, or whose path is cut.
    pub(super) fn unreachable(&self, what: impl Into<String>) -> WorkerError {
        self.abort.note_unreachable(self.peer);
        self.error(what)
    }

    /// Turns an I/O result into progress: bytes moved, or `None` if the socket is not ready.
    pub(super) fn moved(&self, result: std::io::Result<usize>, verb: &str) -> Result<Option<usize>, WorkerError> {
        match result {
            Ok(0) => Err(self.error("closed the connection")),
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            Err(error) if is_silence(&error) => Err(self.unreachable(format!("{verb} failed: {error}"))),
            Err(error) => Err(self.error(format!("{verb} failed: {error}"))),
        }
    }
}

/// The error of a link to `peer`.
pub(super) fn link_error(peer: usize, what: impl Into<String>) -> WorkerError {
    WorkerError::Link { peer, what: what.into() }
}

/// Whether an error says that nothing comes from the other machine, not even a refusal.
pub(super) fn is_silence(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable)
}

/// A frame on its way out.
pub(super) struct Outgoing<'a> {
    link: &'a Link,
    header: [u8; HEADER_BYTES],
    payload: &'a [u8],
    sent: usize,
}

impl<'a> Outgoing<'a> {
    pub(super) fn new(link: &'a Link, header: &FrameHeader, payload: &'a [u8]) -> Self {
        Self { link, header: header.encode(), payload, sent: 0 }
    }

    fn is_done(&self) -> bool {
        self.is_written() && self.link.stream.is_flushed()
    }

    fn is_written(&self) -> bool {
        self.sent == HEADER_BYTES + self.payload.len()
    }

    /// Writes what the socket takes; whether that was anything.
    fn advance(&mut self) -> Result<bool, WorkerError> {
        let header = &self.header[self.sent.min(HEADER_BYTES)..];
        let payload = &self.payload[self.sent.saturating_sub(HEADER_BYTES)..];
        let mut stream = &*self.link.stream;
        let result = if self.is_written() {
            let flushed = self.link.moved(stream.flush().map(|()| 1), "sending")?;
            return Ok(flushed.is_some());
        } else if header.is_empty() {
            stream.write(payload)
        } else {
            stream.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)])
        };
        let moved = self.link.moved(result, "sending")?;
        self.sent += moved.unwrap_or(0);
        Ok(moved.is_some())
    }
}

/// How far a frame has come in.
pub(super) struct Arrival {
    expected: FrameHeader,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
}

impl Arrival {
    pub(super) fn new(expected: FrameHeader) -> Self {
        Self { expected, header: [0; HEADER_BYTES], header_bytes: 0 }
    }
}

/// A frame, or one part of its payload, on its way in.
pub(super) struct Incoming<'a> {
    link: &'a Link,
    arrival: &'a mut Arrival,
    target: &'a mut [u8],
    filled: usize,
}

impl<'a> Incoming<'a> {
    /// Fills `target` with the next bytes of the payload, after the header if that is still to come.
    pub(super) fn new(link: &'a Link, arrival: &'a mut Arrival, target: &'a mut [u8]) -> Self {
        Self { link, arrival, target, filled: 0 }
    }

    fn is_done(&self) -> bool {
        self.arrival.header_bytes == HEADER_BYTES && self.filled == self.target.len()
    }

    /// Reads what the socket has; whether that was anything.
    fn advance(&mut self) -> Result<bool, WorkerError> {
        let missing = HEADER_BYTES - self.arrival.header_bytes;
        let mut stream = &*self.link.stream;
        let rest = &mut self.target[self.filled..];
        let result = if missing == 0 {
            stream.read(rest)
        } else {
            let header = &mut self.arrival.header[HEADER_BYTES - missing..];
            stream.read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(rest)])
        };
        let Some(moved) = self.link.moved(result, "receiving")? else {
            return Ok(false);
        };
        let of_header = moved.min(missing);
        self.arrival.header_bytes += of_header;
        self.filled += moved - of_header;
        if missing > 0 && self.arrival.header_bytes == HEADER_BYTES {
            FrameHeader::decode(&self.arrival.header)
                .and_then(|header| header.check(&self.arrival.expected))
                .map_err(|what| self.link.error(what))?;
        }
        Ok(true)
    }
}

/// How long to look again before sleeping. A peer on another core answers within microseconds, a sleep costs ten.
/// When looking does not help (the peer needs this core, or computes for long), it is mostly skipped.
#[derive(Clone, Debug)]
pub(super) struct Spin {
    limit: Duration,
    misses: u32,
}

/// Misses in a row after which spinning is tried only now and then.
const SPIN_PATIENCE: u32 = 8;
/// Every how many waits it is tried again.
const SPIN_RETRY: u32 = 16;

impl Spin {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, misses: 0 }
    }

    pub(super) fn budget(&self) -> Duration {
        let try_it = self.misses < SPIN_PATIENCE || self.misses.is_multiple_of(SPIN_RETRY);
        if try_it { self.limit } else { Duration::ZERO }
    }

    /// The peer answered while it was looked for.
    pub(super) fn hit(&mut self) {
        self.misses = 0;
    }

    /// It did not.
    pub(super) fn miss(&mut self) {
        self.misses = self.misses.saturating_add(1);
    }
}

/// What [`drive`] waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// All frames in and out.
    Done,
    /// All targets filled; outgoing frames may be left for the next call.
    Received,
}

/// Moves frames until `until` holds; `timeout` `None`: as long as the peers live.
///
/// # Errors
/// [`WorkerError::Link`] of the link that failed, or of a peer that is behind when `timeout` has passed.
pub(super) fn drive(
    outgoing: &mut [Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
    until: Until,
    timeout: Option<Duration>,
    spin: &mut Spin,
) -> Result<(), WorkerError> {
    let mut waiting_since: Option<Instant> = None;
    let mut has_slept = false;
    loop {
        let mut progress = false;
        for frame in outgoing.iter_mut().filter(|frame| !frame.is_done()) {
            progress |= frame.advance()?;
        }
        for frame in incoming.iter_mut().filter(|frame| !frame.is_done()) {
            progress |= frame.advance()?;
        }
        let is_received = incoming.iter().all(Incoming::is_done);
        if is_received && (until == Until::Received || outgoing.iter().all(Outgoing::is_done)) {
            if waiting_since.is_some() && !has_slept {
                spin.hit();
            }
            return Ok(());
        }
        if progress {
            continue;
        }
        let now = Instant::now();
        let waited = now.duration_since(*waiting_since.get_or_insert(now));
        let rest = timeout.map(|timeout| timeout.saturating_sub(waited));
        if let (Some(timeout), Some(Duration::ZERO)) = (timeout, rest) {
            return Err(timed_out(outgoing, incoming, timeout));
        }
        if waited < spin.budget() {
            std::hint::spin_loop();
            continue;
        }
        if !has_slept {
            has_slept = true;
            spin.miss();
        }
        sleep_until_ready(outgoing, incoming, rest)?;
    }
}

fn timed_out(outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>], timeout: Duration) -> WorkerError {
    let silent = incoming.iter().find(|frame| !frame.is_done());
    let stuck = outgoing.iter().find(|frame| !frame.is_done());
    match (silent, stuck) {
        (Some(frame), _) => {
            frame.link.error(format!("sent {} of {} bytes within {timeout:?}", frame.filled, frame.target.len()))
        }
        (None, Some(frame)) => frame.link.error(format!(
            "took {} of {} bytes within {timeout:?}",
            frame.sent.saturating_sub(HEADER_BYTES),
            frame.payload.len()
        )),
        (None, None) => link_error(0, "timed out"),
    }
}

/// Sleeps until one of the unfinished frames can move or `timeout`, if there is one, has passed.
fn sleep_until_ready(
    outgoing: &[Outgoing<'_>],
    incoming: &[Incoming<'_>],
    timeout: Option<Duration>,
) -> Result<(), WorkerError> {
    let writers = outgoing.iter().filter(|frame| !frame.is_done()).map(|frame| (frame.link, PollFlags::OUT));
    let readers = incoming.iter().filter(|frame| !frame.is_done()).map(|frame| (frame.link, PollFlags::IN));
    let mut fds: Vec<_> = writers.chain(readers).map(|(link, flags)| PollFd::new(&*link.stream, flags)).collect();
    wait_ready(&mut fds, timeout).map(drop).map_err(|error| link_error(0, format!("poll failed: {error}")))
}

/// Polls `fds`; the number of those that are ready, 0 after `timeout` or a signal.
pub(super) fn wait_ready(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> std::io::Result<usize> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(fds, timeout.as_ref()) {
        Ok(ready) => Ok(ready),
        Err(rustix::io::Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}
