//! Accepts the rank links of a worker process and hands each to the rank that it names.
//! Invariant: nobody who does not know a registered replica's secret gets past the handshake; where the cluster has
//! certificates, nothing of it is read from who shows none. A slow or silent stranger
//! holds one of a bounded number of handshake threads until its deadline and never the accepting thread.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use lockstep_transport::{ClusterTls, LinkStream};
use rustix::event::{PollFd, PollFlags};

use super::{
    handshake::{self, HandshakeError, Hello, LinkKey, Purpose},
    link::wait_ready,
};
use crate::WorkerError;

/// Longest handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most handshakes at once; further connections are closed, and honest ones try again.
const MAX_HANDSHAKES: usize = 64;
/// How often the accepting thread looks whether it should stop.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// Accepts the rank links of this worker: checks the handshake and hands each connection to the replica and rank that it names.
pub struct LinkListener {
    address: SocketAddr,
    inner: Arc<Inner>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Inner {
    tls: Option<ClusterTls>,
    is_stopping: AtomicBool,
    num_handshakes: AtomicUsize,
    registrations: Mutex<HashMap<(LinkKey, usize), Registration>>,
    arrived: Condvar,
}

/// A rank that accepts links, and those that wait to be taken: `None` once taken.
struct Registration {
    secret: Vec<u8>,
    links: HashMap<(usize, Purpose), Option<LinkStream>>,
}

impl LinkListener {
    /// Listens on `address` (port 0: any). With `tls` members of the cluster alone get in, and links of ranks that use
    /// this listener are encrypted both ways.
    ///
    /// # Errors
    /// [`WorkerError::Bind`](crate::WorkerError).
    pub fn bind(address: SocketAddr, tls: Option<ClusterTls>) -> Result<Self, WorkerError> {
        let bind_error = |source| WorkerError::Bind { address, source };
        let listener = TcpListener::bind(address).map_err(bind_error)?;
        listener.set_nonblocking(true).map_err(bind_error)?;
        let local = listener.local_addr().map_err(bind_error)?;
        let inner = Arc::new(Inner { tls, ..Inner::default() });
        let accepting = std::thread::Builder::new()
            .name("link-listener".to_owned())
            .spawn({
                let inner = Arc::clone(&inner);
                move || accept_all(&listener, &inner)
            })
            .map_err(bind_error)?;
        Ok(Self { address: local, inner, accepting: Some(accepting) })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What links of this worker are secured with.
    pub(crate) fn tls(&self) -> Option<&ClusterTls> {
        self.inner.tls.as_ref()
    }

    /// Lets links to `rank` of the replica `key` in, until [`unregister`](Self::unregister).
    ///
    /// # Errors
    /// [`WorkerError::Config`] if that rank is registered already.
    pub(super) fn register(&self, key: &LinkKey, rank: usize, secret: &[u8]) -> Result<(), WorkerError> {
        let mut registrations = self.inner.lock();
        let slot = (key.clone(), rank);
        if registrations.contains_key(&slot) {
            return Err(WorkerError::Config {
                field: "rank",
                problem: format!("rank {rank} of {key} is here already"),
            });
        }
        registrations.insert(slot, Registration { secret: secret.to_vec(), links: HashMap::new() });
        Ok(())
    }

    /// Refuses links to that rank from now on and closes those that nobody took.
    pub(super) fn unregister(&self, key: &LinkKey, rank: usize) {
        self.inner.lock().remove(&(key.clone(), rank));
    }

    /// Waits for the link of `purpose` from `peer` to a registered rank.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if it did not come before `deadline`, or `is_aborted` says so.
    pub(super) fn take(
        &self,
        key: &LinkKey,
        rank: usize,
        (peer, purpose): (usize, Purpose),
        deadline: Instant,
        is_aborted: impl Fn() -> bool,
    ) -> Result<LinkStream, WorkerError> {
        let slot = (key.clone(), rank);
        let mut registrations = self.inner.lock();
        loop {
            let arrived = registrations.get_mut(&slot).and_then(|entry| entry.links.get_mut(&(peer, purpose)));
            if let Some(stream) = arrived.and_then(Option::take) {
                return Ok(stream);
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() || is_aborted() {
                let what = format!("did not connect for {purpose:?} of {key} in time");
                return Err(WorkerError::Link { peer, what });
            }
            registrations = self
                .inner
                .arrived
                .wait_timeout(registrations, rest.min(STOP_INTERVAL))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for LinkListener {
    fn drop(&mut self) {
        self.inner.is_stopping.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // A panic there was reported by the panic hook.
            let _ = accepting.join();
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HashMap<(LinkKey, usize), Registration>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one handshake and parks the link for [`LinkListener::take`].
    fn welcome(&self, stream: TcpStream) -> Result<(), HandshakeError> {
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let stream = LinkStream::accept(stream, self.tls.as_ref(), deadline)?;
        let slot = |hello: &Hello| (hello.key.clone(), hello.to_rank);
        let secret_of = |hello: &Hello| self.lock().get(&slot(hello)).map(|entry| entry.secret.clone());
        let hello = handshake::listen(&stream, secret_of, deadline)?;
        let link = (hello.from_rank, hello.purpose);
        // The answer is sent under the lock, so that a link is taken only once its peer was told; it is two bytes into
        // an empty socket buffer.
        let mut registrations = self.lock();
        let entry = registrations.get_mut(&slot(&hello));
        let is_free = entry.as_ref().is_some_and(|entry| !matches!(entry.links.get(&link), Some(None)));
        handshake::answer(&stream, is_free, deadline)?;
        match entry {
            Some(entry) if is_free => {
                entry.links.insert(link, Some(stream));
                self.arrived.notify_all();
                Ok(())
            }
            _ => Err(HandshakeError::Refused),
        }
    }
}

/// The accepting thread.
fn accept_all(listener: &TcpListener, inner: &Arc<Inner>) {
    while !inner.is_stopping.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, address)) => start_handshake(stream, address, inner),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let mut fds = [PollFd::new(listener, PollFlags::IN)];
                if let Err(error) = wait_ready(&mut fds, Some(STOP_INTERVAL)) {
                    tracing::error!(%error, "cannot wait for rank links");
                    std::thread::sleep(STOP_INTERVAL);
                }
            }
            Err(error) => {
                // Such as too many open files: others may be closed meanwhile.
                tracing::warn!(%error, "cannot accept a rank link");
                std::thread::sleep(STOP_INTERVAL);
            }
        }
    }
}

fn start_handshake(stream: TcpStream, address: SocketAddr, inner: &Arc<Inner>) {
    let Some(place) = Place::take(inner) else {
        tracing::warn!(%address, limit = MAX_HANDSHAKES, "rank link refused: too many handshakes at once");
        return;
    };
    let spawned = std::thread::Builder::new().name("link-handshake".to_owned()).spawn(move || {
        match place.0.welcome(stream) {
            Ok(()) => tracing::debug!(%address, "rank link accepted"),
            // Usual while this worker still loads; the peer tries again.
            Err(error @ HandshakeError::NotRegistered(_)) => tracing::debug!(%address, %error, "rank link refused"),
            Err(error) => tracing::warn!(%address, %error, "rank link refused"),
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%address, %error, "rank link refused: no thread for its handshake");
    }
}

/// A handshake's place among those at once, given back however it ends.
struct Place(Arc<Inner>);

impl Place {
    fn take(inner: &Arc<Inner>) -> Option<Self> {
        let place = Self(Arc::clone(inner));
        (inner.num_handshakes.fetch_add(1, Ordering::Relaxed) < MAX_HANDSHAKES).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.num_handshakes.fetch_sub(1, Ordering::Relaxed);
    }
}
