//! What changes from step to step: token ids, positions, slots, block tables, sampling parameters. The host collects
//! it while a step is described and sends it in one copy from pinned memory.
//! For: [`CudaDevice`](super::CudaDevice).
//! Invariant: equal steps put equal things at equal addresses, so a recorded graph finds its inputs; a slice keeps its
//! memory alive. Content that is staged twice in a step is sent once: all layers share positions and block tables.

use std::{ops::Range, sync::Arc};

use bytemuck::NoUninit;

use super::{DeviceBuffer, DevicePointer, Gpu, PinnedBuffer};
use crate::KernelError;

/// Bytes at first; more are taken when a step needs them.
const FIRST_CAPACITY_BYTES: usize = 1 << 20;
/// Border of every slice.
const ALIGNMENT: usize = 16;

/// Part of a step's inputs on the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSlice {
    buffer: Arc<DeviceBuffer>,
    range: Range<usize>,
}

impl InputSlice {
    /// Where it starts.
    pub fn pointer(&self) -> DevicePointer {
        self.buffer.pointer().offset_bytes(self.range.start)
    }

    /// Refuses a slice that is shorter than an operation needs.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn expect_bytes(
        &self,
        operation: &'static str,
        what: &'static str,
        expected: usize,
    ) -> Result<(), KernelError> {
        let got = self.range.len();
        if got < expected { Err(KernelError::Shape { operation, what, got, expected }) } else { Ok(()) }
    }
}

/// The inputs of a step, on their way to the GPU.
pub struct StepInputs {
    gpu: Arc<Gpu>,
    staged: Vec<u8>,
    slices: Vec<Range<usize>>,
    num_sent: usize,
    pinned: PinnedBuffer,
    buffer: Arc<DeviceBuffer>,
}

impl StepInputs {
    /// Reserves memory for usual steps.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            staged: Vec::with_capacity(FIRST_CAPACITY_BYTES),
            slices: Vec::new(),
            num_sent: 0,
            pinned: PinnedBuffer::zeroed(gpu, FIRST_CAPACITY_BYTES)?,
            buffer: Arc::new(DeviceBuffer::zeroed(gpu, FIRST_CAPACITY_BYTES)?),
        })
    }

    /// Forgets the inputs of the step before.
    pub fn clear(&mut self) {
        self.staged.clear();
        self.slices.clear();
        self.num_sent = 0;
    }

    /// Where `values` will be once they are [sent](Self::send).
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn stage<T: NoUninit>(&mut self, values: &[T]) -> Result<InputSlice, KernelError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let known =
            self.slices.iter().find(|range| range.len() == bytes.len() && self.staged[(*range).clone()] == *bytes);
        if let Some(range) = known {
            return Ok(InputSlice { buffer: Arc::clone(&self.buffer), range: range.clone() });
        }
        let mut start = self.staged.len().next_multiple_of(ALIGNMENT);
        if start + bytes.len() > self.buffer.num_bytes() {
            self.grow(bytes.len())?;
            start = 0;
        }
        self.staged.resize(start, 0);
        self.staged.extend_from_slice(bytes);
        let range = start..start + bytes.len();
        self.slices.push(range.clone());
        Ok(InputSlice { buffer: Arc::clone(&self.buffer), range })
    }

    /// Sends what was staged since the last time, before any work that is launched later.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the copy fails.
    pub fn send(&mut self) -> Result<(), KernelError> {
        let pending = self.num_sent..self.staged.len();
        if !pending.is_empty() {
            if self.num_sent == 0 {
                // The step before may still be on its way.
                self.gpu.synchronize()?;
            }
            let bytes = &self.staged[pending.clone()];
            // SAFETY: copies that are under way are of this step, and end at `num_sent`.
            let pinned = unsafe { self.pinned.bytes_mut_idle() };
            pinned[pending.clone()].copy_from_slice(bytes);
            self.buffer.write_pinned(pending.start, &self.pinned, pending)?;
            self.num_sent = self.staged.len();
        }
        Ok(())
    }

    /// Sends what is staged and goes on with more memory. Slices of the old memory stay valid.
    fn grow(&mut self, num_bytes: usize) -> Result<(), KernelError> {
        self.send()?;
        let capacity = (2 * self.buffer.num_bytes()).max(num_bytes).next_power_of_two();
        self.buffer = Arc::new(DeviceBuffer::zeroed(&self.gpu, capacity)?);
        self.pinned = PinnedBuffer::zeroed(&self.gpu, capacity)?;
        self.clear();
        Ok(())
    }
}
