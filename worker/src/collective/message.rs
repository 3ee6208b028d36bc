//! Values between two ranks: step plans and results.
//! Invariant: a peer that is closed, stopped or unreachable is noticed within [`SILENCE`] also while nobody sends or
//! receives: a thread of each link sends heartbeats, takes the peer's, and aborts the replica's links when they stop.

use std::{
    collections::VecDeque,
    io::Read,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    abort::Farewell,
    frame::{FrameHeader, FrameKind, HEADER_BYTES},
    link::{Link, Outgoing, Spin, Until, drive, link_error, wait_ready},
};
use crate::WorkerError;

/// Values that the watching thread may take from the socket before somebody asks for them.
const MAX_PENDING: usize = 64;
/// Pause between heartbeats of an idle link.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(300);
/// A peer that sends nothing for so long is taken for dead.
pub(super) const SILENCE: Duration = Duration::from_millis(1500);
/// Longest wait for a socket to take a goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(100);
/// Bytes asked of the socket at once.
const READ_BYTES: usize = 64 << 10;

/// Reported when the peer hangs up, without reading.
#[cfg(any(target_os = "linux", target_os = "android"))]
const HANGUP: PollFlags = PollFlags::RDHUP;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const HANGUP: PollFlags = PollFlags::HUP;

/// Sends values to a peer and receives its values, in order; one thread may send while another receives.
/// Dropping it closes the connection.
pub struct MessageLink {
    shared: Arc<Shared>,
    max_message_bytes: usize,
    watching: Option<JoinHandle<()>>,
}

struct Shared {
    is_stopping: AtomicBool,
    writer: Mutex<Writer>,
    reader: Mutex<Reader>,
}

struct Writer {
    link: Link,
    spin: Spin,
    last_sent: Instant,
}

struct Reader {
    link: Link,
    spin: Spin,
    /// Bytes of the frame that is coming in.
    buffer: Vec<u8>,
    /// Longest payload that is believed.
    max_message_bytes: usize,
    /// Payloads of whole frames.
    pending: VecDeque<Vec<u8>>,
    last_heard: Instant,
}

impl MessageLink {
    pub(super) fn new(link: Link, max_message_bytes: usize, spin: Duration) -> Result<Self, WorkerError> {
        let peer = link.peer;
        let (sending, receiving) = link.split();
        let now = Instant::now();
        let shared = Arc::new(Shared {
            is_stopping: AtomicBool::new(false),
            writer: Mutex::new(Writer { link: sending, spin: Spin::new(spin), last_sent: now }),
            reader: Mutex::new(Reader {
                link: receiving,
                spin: Spin::new(spin),
                buffer: Vec::new(),
                max_message_bytes,
                pending: VecDeque::new(),
                last_heard: now,
            }),
        });
        let farewell: Weak<dyn Farewell> = Arc::<Shared>::downgrade(&shared);
        lock(&shared.writer).link.abort.register_farewell(farewell);
        let watching = std::thread::Builder::new()
            .name(format!("link-watch-{peer}"))
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.watch()
            })
            .map_err(|error| link_error(peer, format!("no thread to watch its link: {error}")))?;
        Ok(Self { shared, max_message_bytes, watching: Some(watching) })
    }

    /// Sends `value`; returns when the socket took it. Waits for as long as the peer lives.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if the value is too large, or the peer closed or fell silent.
    pub fn send<T: Serialize>(&self, value: &T) -> Result<(), WorkerError> {
        // Before the lock: a long value must not hold heartbeats up.
        let encoded = bincode::serde::encode_to_vec(value, bincode::config::standard());
        let mut writer = lock(&self.shared.writer);
        let payload = encoded.map_err(|error| writer.link.error(format!("message cannot be encoded: {error}")))?;
        if payload.len() > self.max_message_bytes {
            let what = format!("message of {} bytes, at most {}", payload.len(), self.max_message_bytes);
            return Err(writer.link.error(what));
        }
        writer.send(FrameKind::Message, &payload, None)
    }

    /// Waits for a value of the peer; `timeout` `None`: as long as the peer lives.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if the peer closed, fell silent, sent something else, or `timeout` has passed.
    pub fn receive<T: DeserializeOwned>(&self, timeout: Option<Duration>) -> Result<T, WorkerError> {
        let mut reader = lock(&self.shared.reader);
        let payload = reader.receive(timeout)?;
        reader.decode(&payload)
    }

    /// A value of the peer if one is here.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn try_receive<T: DeserializeOwned>(&self) -> Result<Option<T>, WorkerError> {
        let mut reader = lock(&self.shared.reader);
        if reader.pending.is_empty() {
            reader.fill()?;
        }
        reader.pending.pop_front().map(|payload| reader.decode(&payload)).transpose()
    }

    /// The other rank.
    pub fn peer(&self) -> usize {
        lock(&self.shared.writer).link.peer
    }
}

impl Drop for MessageLink {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Relaxed);
        // Wakes the watching thread.
        lock(&self.shared.writer).link.stream.shutdown();
        if let Some(watching) = self.watching.take() {
            // A panic there was reported by the panic hook.
            let _ = watching.join();
        }
    }
}

impl Shared {
    /// The watching thread: until the link is dropped or broken.
    fn watch(&self) {
        // Taken now: later a sender whom only the abort can wake may hold the lock.
        let (stream, abort) = {
            let link = &lock(&self.writer).link;
            (Arc::clone(&link.stream), link.abort.clone())
        };
        loop {
            let mut fds = [PollFd::new(&*stream, HANGUP)];
            let hung_up = wait_ready(&mut fds, Some(HEARTBEAT_INTERVAL));
            if self.is_stopping.load(Ordering::Relaxed) {
                return;
            }
            let problem = match hung_up {
                Ok(0) => self.beat().err(),
                Ok(_) => Some(self.hung_up()),
                Err(error) => Some(link_error(0, format!("poll failed: {error}"))),
            };
            if let Some(problem) = problem {
                if !self.is_stopping.load(Ordering::Relaxed) {
                    abort.abort(&problem.to_string());
                }
                return;
            }
        }
    }

    /// Why the peer has hung up: what it sent last may say. Whoever receives at the moment notices by itself.
    fn hung_up(&self) -> WorkerError {
        let mut reader = lock(&self.reader);
        loop {
            match reader.fill() {
                Ok(true) => {}
                Ok(false) => return reader.link.error("closed the connection"),
                Err(error) => return error,
            }
        }
    }

    /// Sends a heartbeat if nothing was sent lately; takes the peer's. A lock that is held means that its owner is at it.
    fn beat(&self) -> Result<(), WorkerError> {
        if let Ok(mut writer) = self.writer.try_lock()
            && writer.last_sent.elapsed() >= HEARTBEAT_INTERVAL / 2
        {
            writer.send(FrameKind::Heartbeat, &[], Some(SILENCE))?;
        }
        if let Ok(mut reader) = self.reader.try_lock() {
            if reader.pending.len() < MAX_PENDING {
                reader.fill()?;
            }
            reader.check_silence()?;
        }
        Ok(())
    }
}

impl Farewell for Shared {
    fn say_goodbye(&self) {
        if let Ok(mut writer) = self.writer.try_lock() {
            // A peer that does not take it finds the connection closed.
            let _ = writer.send(FrameKind::Goodbye, &[], Some(GOODBYE_TIMEOUT));
        }
    }
}

impl Writer {
    fn send(&mut self, kind: FrameKind, payload: &[u8], timeout: Option<Duration>) -> Result<(), WorkerError> {
        let header = self.link.next_send(kind, payload.len());
        let mut outgoing = [Outgoing::new(&self.link, &header, payload)];
        drive(&mut outgoing, &mut [], Until::Done, timeout, &mut self.spin)?;
        self.last_sent = Instant::now();
        Ok(())
    }
}

impl Reader {
    fn receive(&mut self, timeout: Option<Duration>) -> Result<Vec<u8>, WorkerError> {
        let start = Instant::now();
        let spinning = self.spin.budget();
        let mut has_waited = false;
        let mut has_slept = false;
        loop {
            if let Some(payload) = self.pending.pop_front() {
                if has_waited && !has_slept {
                    self.spin.hit();
                }
                return Ok(payload);
            }
            if self.fill()? {
                continue;
            }
            has_waited = true;
            let waited = start.elapsed();
            let rest = timeout.map_or(SILENCE, |timeout| timeout.saturating_sub(waited));
            if rest.is_zero() {
                return Err(self.link.error(format!("sent no message within {timeout:?}")));
            }
            self.check_silence()?;
            if waited < spinning {
                std::hint::spin_loop();
                continue;
            }
            if !has_slept {
                has_slept = true;
                self.spin.miss();
            }
            let rest = rest.min(SILENCE.saturating_sub(self.last_heard.elapsed())).max(Duration::from_millis(1));
            let mut fds = [PollFd::new(&*self.link.stream, PollFlags::IN)];
            wait_ready(&mut fds, Some(rest)).map_err(|error| self.link.error(format!("poll failed: {error}")))?;
        }
    }

    /// Takes what the socket has; whether that was anything.
    fn fill(&mut self) -> Result<bool, WorkerError> {
        let length = self.buffer.len();
        self.buffer.resize(length + READ_BYTES, 0);
        let result = (&*self.link.stream).read(&mut self.buffer[length..]);
        let moved = self.link.moved(result, "receiving");
        self.buffer.truncate(length + moved.as_ref().ok().copied().flatten().unwrap_or(0));
        if moved?.is_none() {
            return Ok(false);
        }
        self.last_heard = Instant::now();
        while self.take_frame()? {}
        Ok(true)
    }

    /// Moves a whole frame from the buffer to `pending`; whether there was one.
    fn take_frame(&mut self) -> Result<bool, WorkerError> {
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else {
            return Ok(false);
        };
        let header = FrameHeader::decode(header).map_err(|what| self.link.error(what))?;
        let is_kind = |kind: &FrameKind| header.is(*kind);
        let empty = [FrameKind::Heartbeat, FrameKind::Goodbye].into_iter().find(is_kind);
        let (kind, limit) = empty.map_or((FrameKind::Message, self.max_message_bytes), |kind| (kind, 0));
        let payload_bytes = match usize::try_from(header.payload_bytes()) {
            Ok(bytes) if bytes <= limit => bytes,
            _ => {
                let what = format!("sent a message of {} bytes, at most {limit}", header.payload_bytes());
                return Err(self.link.error(what));
            }
        };
        self.link.check_receive(&header, kind, payload_bytes).map_err(|what| self.link.error(what))?;
        let end = HEADER_BYTES + payload_bytes;
        if self.buffer.len() < end {
            return Ok(false);
        }
        self.link.next_receive(kind, payload_bytes);
        match kind {
            FrameKind::Message => self.pending.push_back(self.buffer[HEADER_BYTES..end].to_vec()),
            FrameKind::Goodbye => {
                self.link.abort.expect_end();
                return Err(self.link.error("left the replica"));
            }
            FrameKind::Heartbeat | FrameKind::Values => {}
        }
        self.buffer.drain(..end);
        Ok(true)
    }

    fn check_silence(&self) -> Result<(), WorkerError> {
        let silent = self.last_heard.elapsed();
        if silent < SILENCE {
            return Ok(());
        }
        Err(self.link.unreachable(format!("sent nothing, not even a heartbeat, for {} ms", silent.as_millis())))
    }

    fn decode<T: DeserializeOwned>(&self, payload: &[u8]) -> Result<T, WorkerError> {
        let decoded = bincode::serde::decode_from_slice(payload, bincode::config::standard());
        let (value, used) =
            decoded.map_err(|error| self.link.error(format!("sent a message that cannot be decoded: {error}")))?;
        if used != payload.len() {
            return Err(self.link.error(format!("sent a message of {} bytes, {used} expected", payload.len())));
        }
        Ok(value)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
