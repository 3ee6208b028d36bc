//! Scratch memory of operations: taken, used by the next launches, given back, without waiting for the GPU.
//! Invariant: one stream orders all work, so memory that was given back is written by later work alone. Memory stays
//! with the pool until the GPU is closed: recorded graphs know its addresses.
//! Not here: what outlives an operation ([`DeviceBuffer`](super::DeviceBuffer)): a recorded graph writes to the scratch that it was
//! recorded with whenever it is replayed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{DevicePointer, Gpu, memory};
use crate::KernelError;

/// Smallest size. All are powers of two: prompts of all lengths share few of them, so that all that was ever taken for
/// one buffer is at most four times what the largest request asked for.
const MIN_BYTES: usize = 4096;
/// A free buffer may be so many times larger than what is asked for.
const MAX_WASTE: usize = 4;

/// What the pool did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStatistics {
    /// Memory that the pool holds.
    pub reserved_bytes: usize,
    /// Memory that is taken now.
    pub used_bytes: usize,
    /// Most memory that was ever taken at a time.
    pub high_water_bytes: usize,
    /// Requests so far.
    pub num_requests: u64,
    /// Requests that were served without the driver.
    pub num_hits: u64,
}

#[derive(Default)]
struct State {
    /// Memory that nobody uses, by size.
    free: BTreeMap<usize, Vec<Allocation>>,
    statistics: PoolStatistics,
}

/// Raw memory of the pool, freed with it. It holds no [`Gpu`], which holds the pool.
struct Allocation {
    pointer: DevicePointer,
    num_bytes: usize,
}

/// Size of the memory that serves a request.
fn size_of_request(num_bytes: usize) -> usize {
    num_bytes.max(MIN_BYTES).checked_next_power_of_two().unwrap_or(num_bytes)
}

impl State {
    /// Takes the smallest free memory that is large enough and not much too large.
    fn take(&mut self, wanted: usize) -> Option<Allocation> {
        let (&size, _) = self.free.range(wanted..=wanted.saturating_mul(MAX_WASTE)).next()?;
        let list = self.free.get_mut(&size)?;
        let allocation = list.pop();
        if list.is_empty() {
            self.free.remove(&size);
        }
        allocation
    }

    fn note_request(&mut self, num_bytes: usize, is_hit: bool) {
        let statistics = &mut self.statistics;
        statistics.num_requests += 1;
        statistics.num_hits += u64::from(is_hit);
        statistics.reserved_bytes += if is_hit { 0 } else { num_bytes };
        statistics.used_bytes += num_bytes;
        statistics.high_water_bytes = statistics.high_water_bytes.max(statistics.used_bytes);
    }

    fn give_back(&mut self, allocation: Allocation) {
        self.statistics.used_bytes -= allocation.num_bytes;
        self.free.entry(allocation.num_bytes).or_default().push(allocation);
    }
}

/// Free scratch memory of one GPU.
#[derive(Default)]
pub(super) struct Pool {
    state: Mutex<State>,
}

impl Pool {
    pub(super) fn statistics(&self) -> PoolStatistics {
        self.state().statistics
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Counters and lists are whole at any time, so a panic elsewhere does not spoil them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees everything: every [`ScratchBuffer`] holds the GPU, so none is left when the GPU closes.
    pub(super) fn close(&mut self, gpu_free: impl Fn(DevicePointer)) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut state.free).into_values().flatten().for_each(|allocation| gpu_free(allocation.pointer));
    }
}

/// Scratch memory, given back when dropped.
pub struct ScratchBuffer {
    gpu: Arc<Gpu>,
    pointer: DevicePointer,
    num_bytes: usize,
}

impl ScratchBuffer {
    /// At least so many bytes of unknown content, on a border of 256 bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        let wanted = size_of_request(num_bytes);
        let found = gpu.pool.state().take(wanted);
        let is_hit = found.is_some();
        let Allocation { pointer, num_bytes } = match found {
            Some(allocation) => allocation,
            None => Allocation { pointer: memory::allocate(gpu, wanted)?, num_bytes: wanted },
        };
        gpu.pool.state().note_request(num_bytes, is_hit);
        Ok(Self { gpu: Arc::clone(gpu), pointer, num_bytes })
    }

    /// Its address.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// Its size, at least what was asked for.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

impl Drop for ScratchBuffer {
    fn drop(&mut self) {
        self.gpu.pool.state().give_back(Allocation { pointer: self.pointer, num_bytes: self.num_bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_all_lengths_share_few_sizes() {
        let mut state = State::default();
        let mut reserved_bytes = 0;
        for num_bytes in (1..40_000_000).step_by(9973) {
            let wanted = size_of_request(num_bytes);
            assert!(wanted >= num_bytes && wanted <= (2 * num_bytes).max(MIN_BYTES));
            let allocation = state.take(wanted).unwrap_or_else(|| {
                reserved_bytes += wanted;
                Allocation { pointer: DevicePointer(0), num_bytes: wanted }
            });
            state.statistics.used_bytes += allocation.num_bytes;
            state.give_back(allocation);
        }
        assert!(reserved_bytes < 4 * 40_000_000, "{reserved_bytes}");
        assert_eq!(size_of_request(usize::MAX), usize::MAX);
    }

    #[test]
    fn memory_is_reused_and_counted() {
        let mut state = State::default();
        assert!(state.take(4096).is_none());
        state.note_request(4096, false);
        state.note_request(65536, false);
        for (address, num_bytes) in [(1, 4096), (2, 65536)] {
            state.give_back(Allocation { pointer: DevicePointer(address), num_bytes });
        }
        assert!(state.take(8192).is_none(), "one is too small, the other much too large");
        let taken = state.take(20480).unwrap();
        assert_eq!((taken.pointer, taken.num_bytes), (DevicePointer(2), 65536));
        state.note_request(taken.num_bytes, true);
        assert!(state.take(65536).is_none());
        let expected = PoolStatistics {
            reserved_bytes: 69632,
            used_bytes: 65536,
            high_water_bytes: 69632,
            num_requests: 3,
            num_hits: 1,
        };
        assert_eq!(state.statistics, expected);
    }
}
