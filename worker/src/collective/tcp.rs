//! All-reduce and send/receive over one TCP connection a pair of ranks.
//! Invariant: values are added in an order that depends on ranks and lengths alone, so every rank gets the same bits.
//!
//! Short vectors: everybody sends all of it to everybody and adds in rank order (one trip). Long ones: ring reduce-scatter,
//! then ring all-gather (every byte crosses each link `2 (n - 1) / n` times); parts are added while the next arrive.

use std::time::Duration;

use bytemuck::Pod;

use super::{
    Collective, Element,
    frame::FrameKind,
    link::{Arrival, Incoming, Link, Outgoing, Spin, Until, drive, link_error},
};
use crate::WorkerError;

/// Longest vector that is exchanged whole, in bytes.
const DIRECT_BYTES: usize = 64 << 10;
/// Bytes of the ring that are added at once: they stay in the second-level cache between socket and addition.
const PART_BYTES: usize = 128 << 10;

// Values travel as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "links carry little-endian values");

/// How a group waits.
pub(super) struct GroupOptions {
    /// For each other inside an all-reduce.
    pub(super) timeout: Duration,
    pub(super) spin: Duration,
}

/// A group of ranks, each connected with each.
pub struct TcpCollective {
    rank: usize,
    /// By position in the group; `None` at this rank's own.
    links: Vec<Option<Link>>,
    timeout: Duration,
    spin: Spin,
    /// Bytes in units that any element may lie on.
    scratch: Vec<u64>,
}

impl TcpCollective {
    pub(super) fn new(rank: usize, links: Vec<Option<Link>>, options: GroupOptions) -> Self {
        Self { rank, links, timeout: options.timeout, spin: Spin::new(options.spin), scratch: Vec::new() }
    }

    /// Everybody sends `data` to everybody; returns what came, by rank, with unused room at this rank's own place.
    fn exchange<T: Pod>(&mut self, data: &[T]) -> Result<&mut [T], WorkerError> {
        let length = data.len();
        let bytes = size_of_val(data);
        let scratch = scratch::<T>(&mut self.scratch, length * self.links.len());
        let mut headers = Vec::with_capacity(self.links.len());
        let mut arrivals = Vec::with_capacity(self.links.len());
        for link in self.links.iter_mut().flatten() {
            headers.push(link.next_send(FrameKind::Values, bytes));
            arrivals.push(Arrival::new(link.next_receive(FrameKind::Values, bytes)));
        }
        let mut targets = scratch.chunks_exact_mut(length);
        // The chunk of this rank's own position stays unused, so that position and chunk agree.
        let targets =
            self.links.iter().zip(&mut targets).filter_map(|(link, part)| link.as_ref().map(|link| (link, part)));
        let mut incoming: Vec<_> = targets
            .zip(&mut arrivals)
            .map(|((link, part), arrival)| Incoming::new(link, arrival, bytemuck::cast_slice_mut(part)))
            .collect();
        let payload = bytemuck::cast_slice(data);
        let mut outgoing: Vec<_> = self
            .links
            .iter()
            .flatten()
            .zip(&headers)
            .map(|(link, header)| Outgoing::new(link, header, payload))
            .collect();
        drive(&mut outgoing, &mut incoming, Until::Done, Some(self.timeout), &mut self.spin)?;
        Ok(scratch)
    }

    /// The sum is taken in rank order.
    fn all_reduce_direct<T: Element>(&mut self, data: &mut [T]) -> Result<(), WorkerError> {
        let (rank, world_size) = (self.rank, self.links.len());
        sum_in_rank_order(data, self.exchange(data)?, rank, world_size);
        Ok(())
    }

    /// Ring reduce-scatter and all-gather.
    fn all_reduce_ring<T: Element>(&mut self, data: &mut [T]) -> Result<(), WorkerError> {
        let world_size = self.links.len();
        let segment = |index: usize| {
            let index = index % world_size;
            data.len() * index / world_size..data.len() * (index + 1) / world_size
        };
        let segments: Vec<_> = (0..world_size).map(segment).collect();
        // In step `s` segment `rank - s` leaves and segment `rank - s - 1` arrives, so that after the last step this rank
        // holds the whole sum of segment `rank + 1`.
        for step in 0..world_size - 1 {
            let leaving = segments[(self.rank + world_size - step) % world_size].clone();
            let arriving = segments[(self.rank + 2 * world_size - step - 1) % world_size].clone();
            self.ring_step(data, leaving, arriving, true)?;
        }
        for step in 0..world_size - 1 {
            let leaving = segments[(self.rank + world_size + 1 - step) % world_size].clone();
            let arriving = segments[(self.rank + world_size - step) % world_size].clone();
            self.ring_step(data, leaving, arriving, false)?;
        }
        Ok(())
    }

    /// Sends the `leaving` range to the next rank while `arriving` comes from the previous one and is added or stored.
    fn ring_step<T: Element>(
        &mut self,
        data: &mut [T],
        leaving: std::ops::Range<usize>,
        arriving: std::ops::Range<usize>,
        is_sum: bool,
    ) -> Result<(), WorkerError> {
        let world_size = self.links.len();
        let next = (self.rank + 1) % world_size;
        let previous = (self.rank + world_size - 1) % world_size;
        let header = link_mut(&mut self.links, next)?.next_send(FrameKind::Values, leaving.len() * size_of::<T>());
        let expected =
            link_mut(&mut self.links, previous)?.next_receive(FrameKind::Values, arriving.len() * size_of::<T>());
        let (next, previous) = (link_ref(&self.links, next)?, link_ref(&self.links, previous)?);
        let part_length = PART_BYTES / size_of::<T>();
        let scratch = scratch::<T>(&mut self.scratch, part_length);
        let (sent, received) = disjoint(data, leaving, arriving);
        let mut outgoing = [Outgoing::new(next, &header, bytemuck::cast_slice(sent))];
        let mut arrival = Arrival::new(expected);
        let mut step = |outgoing: &mut [Outgoing<'_>; 1], target: &mut [T], arrival: &mut Arrival, until| {
            let mut incoming = [Incoming::new(previous, arrival, bytemuck::cast_slice_mut(target))];
            drive(outgoing, &mut incoming, until, Some(self.timeout), &mut self.spin)
        };
        if !is_sum {
            return step(&mut outgoing, received, &mut arrival, Until::Done);
        }
        for part in received.chunks_mut(part_length) {
            let target = &mut scratch[..part.len()];
            step(&mut outgoing, target, &mut arrival, Until::Received)?;
            add(part, target);
        }
        step(&mut outgoing, &mut [], &mut arrival, Until::Done)
    }
}

impl Collective for TcpCollective {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.links.len()
    }

    fn all_reduce_sum<T: Element>(&mut self, data: &mut [T]) -> Result<(), WorkerError> {
        if self.links.len() < 2 || data.is_empty() {
            return Ok(());
        }
        if size_of_val(data) <= DIRECT_BYTES { self.all_reduce_direct(data) } else { self.all_reduce_ring(data) }
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, WorkerError> {
        if bytes.is_empty() {
            return Ok(vec![Vec::new(); self.links.len()]);
        }
        let rank = self.rank;
        let mut gathered: Vec<_> = self.exchange(bytes)?.chunks_exact(bytes.len()).map(<[u8]>::to_vec).collect();
        if let Some(own) = gathered.get_mut(rank) {
            own.copy_from_slice(bytes);
        }
        Ok(gathered)
    }

    fn send(&mut self, peer: usize, data: &[f32]) -> Result<(), WorkerError> {
        let payload = bytemuck::cast_slice(data);
        let header = link_mut(&mut self.links, peer)?.next_send(FrameKind::Values, payload.len());
        let mut outgoing = [Outgoing::new(link_ref(&self.links, peer)?, &header, payload)];
        drive(&mut outgoing, &mut [], Until::Done, None, &mut self.spin)
    }

    fn receive(&mut self, peer: usize, data: &mut [f32]) -> Result<(), WorkerError> {
        let target: &mut [u8] = bytemuck::cast_slice_mut(data);
        let mut arrival = Arrival::new(link_mut(&mut self.links, peer)?.next_receive(FrameKind::Values, target.len()));
        let mut incoming = [Incoming::new(link_ref(&self.links, peer)?, &mut arrival, target)];
        drive(&mut [], &mut incoming, Until::Done, None, &mut self.spin)
    }
}

fn link_mut(links: &mut [Option<Link>], peer: usize) -> Result<&mut Link, WorkerError> {
    let world_size = links.len();
    links.get_mut(peer).and_then(Option::as_mut).ok_or_else(|| no_link(peer, world_size))
}

fn link_ref(links: &[Option<Link>], peer: usize) -> Result<&Link, WorkerError> {
    links.get(peer).and_then(Option::as_ref).ok_or_else(|| no_link(peer, links.len()))
}

fn no_link(peer: usize, world_size: usize) -> WorkerError {
    link_error(peer, format!("is this rank itself or not in the group of {world_size}"))
}

/// The first `length` elements of a buffer that grows as needed.
fn scratch<T: Pod>(buffer: &mut Vec<u64>, length: usize) -> &mut [T] {
    let num_words = (length * size_of::<T>()).div_ceil(size_of::<u64>());
    if buffer.len() < num_words {
        buffer.resize(num_words, 0);
    }
    &mut bytemuck::cast_slice_mut(buffer)[..length]
}

fn add<T: Element>(sum: &mut [T], values: &[T]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += *value;
    }
}

/// `data = v[0] + v[1] + …` where `v[rank]` is `data` and the others lie in `scratch`, by position.
fn sum_in_rank_order<T: Element>(data: &mut [T], scratch: &mut [T], rank: usize, world_size: usize) {
    let length = data.len();
    if rank > 0 {
        // The sum begins in `v[0]` and takes this rank's own values when it is their turn.
        let (sum, rest) = scratch.split_at_mut(length);
        for position in 1..world_size {
            let start = (position - 1) * length;
            add(sum, if position == rank { data } else { &rest[start..start + length] });
        }
        data.copy_from_slice(sum);
    } else {
        for values in scratch[length..world_size * length].chunks_exact(length) {
            add(data, values);
        }
    }
}

/// Two ranges of `data` that do not overlap.
fn disjoint<T>(data: &mut [T], shared: std::ops::Range<usize>, exclusive: std::ops::Range<usize>) -> (&[T], &mut [T]) {
    if shared.end <= exclusive.start {
        let (low, high) = data.split_at_mut(exclusive.start);
        (&low[shared], &mut high[..exclusive.end - exclusive.start])
    } else {
        let (low, high) = data.split_at_mut(shared.start);
        (&high[..shared.end - shared.start], &mut low[exclusive])
    }
}
