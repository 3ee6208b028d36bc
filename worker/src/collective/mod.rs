//! How ranks meet: authenticated TCP links, all-reduce, send/receive and messages.
//! For: `replica` sets the links up, `rank` reduces over them, the leader sends its step plans over them.
//! Invariant: no call outlasts the replica. An all-reduce has a deadline; all else waits for as long as the peer lives:
//! control links watch heartbeats, a path that is cut closes its connections, and [`AbortHandle::abort`] wakes every
//! waiting thread at once. Every frame carries the plan's epoch and a sequence number that must match.
//! Not here: what is reduced or said, and in which order (that order is the step plan's).
//!
//! ```text
//! LinkListener (one a worker process) ─▶ RankLinks (one a rank of a replica) ─▶ TcpCollective (a group of ranks)
//!                                                                            └▶ MessageLink   (a pair of ranks)
//! ```

mod abort;
mod frame;
mod handshake;
mod link;
mod listener;
mod message;
mod rank_links;
mod tcp;

pub use abort::AbortHandle;
pub use handshake::{LinkKey, Purpose};
pub use listener::LinkListener;
pub use message::MessageLink;
pub use rank_links::{RankLinks, RankLinksConfig};
pub use tcp::TcpCollective;

use crate::WorkerError;

/// What is summed: f32 where one term alone is not zero, f64 where the order of the terms must not show.
pub trait Element: sealed::Sealed + bytemuck::Pod + std::ops::AddAssign + Send {}

impl Element for f32 {}
impl Element for f64 {}

mod sealed {
    pub trait Sealed {}

    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Sums and moves vectors between the ranks of a group. Every rank of the group calls the same operations with the same
/// lengths in the same order.
pub trait Collective: Send {
    /// Index of this rank within the group.
    fn rank(&self) -> usize;

    /// Ranks of the group.
    fn world_size(&self) -> usize;

    /// Replaces `data` by its sum over the group. Every rank gets the same bits, whatever the timing.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if a peer closed, timed out or sent something else than agreed; the group is then unusable.
    fn all_reduce_sum<T: Element>(&mut self, data: &mut [T]) -> Result<(), WorkerError>;

    /// The bytes of every rank, in rank order. All ranks give equally many.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, WorkerError>;

    /// Sends `data` to `peer`, an index within the group. Returns when the socket took it; a peer that still computes
    /// may take its time.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if the peer closed, cannot be reached any more or sent something else than agreed.
    fn send(&mut self, peer: usize, data: &[f32]) -> Result<(), WorkerError>;

    /// Fills `data` with what `peer` sends, however long it computes; lengths must agree.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn receive(&mut self, peer: usize, data: &mut [f32]) -> Result<(), WorkerError>;
}

#[cfg(test)]
mod tests;
