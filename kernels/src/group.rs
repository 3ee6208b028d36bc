//! How the devices of several ranks meet without their hosts: what joining takes, and what is asked of those that joined.
//! For: [`Device::join`](crate::Device::join) and the operations that span ranks.
//! Invariant: the ranks of a group decide alike. They exchange offers, and unless every device can meet every other the
//! hosts exchange the values, as they do between devices of different kinds.
//! Not here: how bytes get from host to host (the caller's links), how devices meet (each device's own file).

use std::{convert::Infallible, sync::Arc, time::Duration};

/// Bytes of an offer, whatever the device.
pub const OFFER_BYTES: usize = 256;

/// The offer of a device that cannot meet others.
pub const NO_OFFER: [u8; OFFER_BYTES] = [0; OFFER_BYTES];

/// Gives the bytes of every rank in rank order, this rank's own included. All ranks of a group call it equally often,
/// each time with equal lengths.
pub type Exchange<'a, E> = &'a mut dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>;

/// Why the group has ended, if it has; asked again and again by a device that waits for others.
pub type EndReason = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Ranks whose devices may meet.
#[derive(Clone)]
pub struct Group {
    /// This rank's place.
    pub rank: usize,
    /// Ranks of the group.
    pub world_size: usize,
    /// Longest wait of a device for the others.
    pub timeout: Duration,
    /// Ends such a wait sooner.
    pub end_reason: EndReason,
}

/// What the devices of a group do together with the first rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Replaces them by their sums over all ranks, the same bits on each.
    AllReduce,
    /// Hands them to one rank.
    Send {
        /// Its place in the group.
        peer: usize,
    },
    /// Replaces them by those that one rank sends.
    Receive {
        /// Its place in the group.
        peer: usize,
    },
}

/// Replaces this rank's share of sums, `[num_tokens, width]`, by the sums over all ranks: the same bits on each of them.
/// In f64, so that neither the order of summation nor where the terms were cut shows in the f32 that a device with such
/// sums rounds them to.
pub type AllReduce<'a, E> = &'a mut dyn FnMut(&mut [f64]) -> Result<(), E>;

/// Where the products of a row-parallel layer are added up.
pub enum Sum<'a, C, E> {
    /// This rank holds all the columns.
    Own,
    /// The hosts add the ranks' shares.
    Hosts(AllReduce<'a, E>),
    /// The devices add them.
    Devices(&'a C),
}

/// What devices that cannot meet others have in place of a communicator: nothing, ever.
pub type NoCommunicator = Infallible;
