//! The links of one rank of a replica: sets up collectives and message links with its peers.
//! Invariant: of a pair of ranks the lower accepts and the higher connects, so each purpose has exactly one connection;
//! connecting never waits for the peer's thread, only for its registration, so ranks may set links up in any order.

use std::{
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_kernels::group::Group;
use lockstep_transport::LinkStream;

use super::{
    AbortHandle, Collective, LinkKey, LinkListener, MessageLink, Purpose, TcpCollective,
    handshake::{self, HandshakeError, Hello},
    link::{Link, is_silence, link_error},
    listener::HANDSHAKE_TIMEOUT,
    tcp::GroupOptions,
};
use crate::WorkerError;

/// Pause before a peer that is not there yet is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A peer of which nothing comes for so long, not even a refusal, is given up: its machine or the path to it is gone. One
/// that only opens its checkpoint answers that it is not ready.
const UNREACHABLE: Duration = Duration::from_secs(4);

/// What a rank needs to know to meet its peers.
#[derive(Clone, Debug)]
pub struct RankLinksConfig {
    /// Replica and epoch.
    pub key: LinkKey,
    /// Secret of the replica.
    pub secret: Vec<u8>,
    /// This rank, an index over the replica.
    pub rank: usize,
    /// Where each rank's links are reached, by rank.
    pub addresses: Vec<SocketAddr>,
    /// Longest wait for a peer to appear.
    pub connect_timeout: Duration,
    /// Longest wait for the others inside an all-reduce: all of them compute equal shares.
    pub timeout: Duration,
    /// Largest encoded message; a longer one is an error on either side.
    pub max_message_bytes: usize,
    /// How long a waiting rank looks again before it sleeps; zero where the ranks need each other's cores.
    pub spin: Duration,
    /// Breaks all links of this part of the replica.
    pub abort: AbortHandle,
}

/// Accepts links for one rank while it lives; the collectives and message links that it made live on.
pub struct RankLinks {
    listener: Arc<LinkListener>,
    config: RankLinksConfig,
}

impl RankLinks {
    /// Starts to accept links for `config.rank` on `listener`.
    ///
    /// # Errors
    /// [`WorkerError::Config`] if the rank is registered already or has no address.
    pub fn new(listener: Arc<LinkListener>, config: RankLinksConfig) -> Result<Self, WorkerError> {
        if config.rank >= config.addresses.len() {
            return Err(WorkerError::Config {
                field: "rank_addresses",
                problem: format!("rank {} is not among {} addresses", config.rank, config.addresses.len()),
            });
        }
        listener.register(&config.key, config.rank, &config.secret)?;
        Ok(Self { listener, config })
    }

    /// Connects this rank with the others of `group` (ranks of the replica in group order, this one included).
    ///
    /// # Errors
    /// [`WorkerError::Link`] naming the rank that did not appear or was refused, [`WorkerError::Config`] if this rank is
    /// not in `group`.
    pub fn collective(&self, group: &[usize], purpose: Purpose) -> Result<TcpCollective, WorkerError> {
        let Some(position) = group.iter().position(|&rank| rank == self.config.rank) else {
            return Err(WorkerError::Config {
                field: "group",
                problem: format!("rank {} is not in {group:?}", self.config.rank),
            });
        };
        let deadline = Instant::now() + self.config.connect_timeout;
        let links = group
            .iter()
            .map(|&peer| (peer != self.config.rank).then(|| self.link(peer, purpose, deadline)).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let options = GroupOptions { timeout: self.config.timeout, spin: self.config.spin };
        Ok(TcpCollective::new(position, links, options))
    }

    /// Connects this rank with `peer` for messages.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if it did not appear or was refused.
    pub fn message_link(&self, peer: usize) -> Result<MessageLink, WorkerError> {
        let link = self.link(peer, Purpose::Control, Instant::now() + self.config.connect_timeout)?;
        MessageLink::new(link, self.config.max_message_bytes, self.config.spin)
    }

    /// What the devices of the ranks of `collective` have to know to meet.
    pub(crate) fn device_group(&self, collective: &TcpCollective) -> Group {
        let abort = self.config.abort.clone();
        Group {
            rank: collective.rank(),
            world_size: collective.world_size(),
            timeout: self.config.timeout,
            end_reason: Arc::new(move || abort.reason()),
        }
    }

    #[cfg(test)]
    pub(super) fn abort_handle(&self) -> AbortHandle {
        self.config.abort.clone()
    }

    fn link(&self, peer: usize, purpose: Purpose, deadline: Instant) -> Result<Link, WorkerError> {
        let RankLinksConfig { key, rank, abort, .. } = &self.config;
        let stream = if *rank < peer {
            self.listener.take(key, *rank, (peer, purpose), deadline, || abort.reason().is_some())?
        } else {
            self.connect(peer, purpose, deadline)?
        };
        Link::new(stream, peer, key.plan_epoch, abort)
    }

    /// Connects to `peer`, again and again until it is there.
    fn connect(&self, peer: usize, purpose: Purpose, deadline: Instant) -> Result<LinkStream, WorkerError> {
        let RankLinksConfig { key, rank, addresses, secret, abort, .. } = &self.config;
        let address = *addresses
            .get(peer)
            .ok_or_else(|| link_error(peer, format!("has no address: the replica has {} ranks", addresses.len())))?;
        let mut silent_since = None;
        loop {
            let now = Instant::now();
            let attempt = || {
                let rest = deadline.saturating_duration_since(now).clamp(RETRY_INTERVAL, HANDSHAKE_TIMEOUT);
                let stream = TcpStream::connect_timeout(&address, rest)?;
                stream.set_nodelay(true)?;
                let stream = LinkStream::connect(stream, self.listener.tls(), now + rest)?;
                let hello = Hello::new(key.clone(), *rank, peer, purpose);
                handshake::connect(&stream, &hello, secret, now + rest)?;
                Ok(stream)
            };
            let error = match attempt() {
                Ok(stream) => return Ok(stream),
                Err(error @ (HandshakeError::Tls(_) | HandshakeError::WrongSecret | HandshakeError::Refused)) => {
                    return Err(link_error(peer, format!("at {address}: {error}")));
                }
                Err(error) => error,
            };
            let is_silent = matches!(&error, HandshakeError::Io(error) if is_silence(error));
            silent_since = is_silent.then(|| silent_since.unwrap_or(now));
            if silent_since.is_some_and(|since| since.elapsed() >= UNREACHABLE) {
                abort.note_unreachable(peer);
                return Err(link_error(peer, format!("at {address} cannot be reached: {error}")));
            }
            if Instant::now() + RETRY_INTERVAL >= deadline {
                return Err(link_error(peer, format!("at {address} cannot be reached in time: {error}")));
            }
            if let Some(reason) = abort.reason() {
                return Err(link_error(peer, format!("aborted: {reason}")));
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }
}

impl Drop for RankLinks {
    fn drop(&mut self) {
        self.listener.unregister(&self.config.key, self.config.rank);
    }
}
