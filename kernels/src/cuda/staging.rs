//! Host data on its way to the GPU: made by all threads in one piece of page-locked memory while the other is copied.
//! For: weights, when a model is loaded.
//! Invariant: a piece is written to only after its last copy is done.

use std::sync::Arc;

use cudarc::driver::CudaEvent;

use super::{DeviceBuffer, Gpu, PinnedBuffer};
use crate::KernelError;

/// Bytes of a piece, unless a unit is larger.
const PIECE_BYTES: usize = 16 << 20;

/// Up to so many bytes ordinary memory serves: to lock pages takes longer than to copy them once more.
const PAGEABLE_BYTES: usize = 1 << 20;

/// Two pieces of page-locked memory, taken when they are first wanted.
pub struct Staging {
    gpu: Arc<Gpu>,
    pieces: [Option<Piece>; 2],
}

struct Piece {
    memory: PinnedBuffer,
    /// After its last copy.
    copied: CudaEvent,
}

impl Staging {
    /// For a GPU.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), pieces: [None, None] }
    }

    /// New memory of `num_bytes`, of which `make` writes the bytes from its first argument on, whole units at a time
    /// (but for the last). What it is given to write to holds anything.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short or the driver fails.
    pub fn upload(
        &mut self,
        num_bytes: usize,
        unit_bytes: usize,
        mut make: impl FnMut(usize, &mut [u8]),
    ) -> Result<DeviceBuffer, KernelError> {
        let Self { gpu, pieces } = self;
        let buffer = DeviceBuffer::uninit(gpu, num_bytes)?;
        if num_bytes <= PAGEABLE_BYTES {
            let mut bytes = vec![0; num_bytes];
            make(0, &mut bytes);
            buffer.write(0, &bytes)?;
            return Ok(buffer);
        }
        let piece_bytes = (PIECE_BYTES / unit_bytes.max(1)).max(1) * unit_bytes.max(1);
        for start in (0..num_bytes).step_by(piece_bytes) {
            let len = piece_bytes.min(num_bytes - start);
            // The one that was used longer ago.
            let piece = Piece::free(gpu, &mut pieces[0], len)?;
            // SAFETY: `free` waited for its last copy.
            make(start, &mut unsafe { piece.memory.bytes_mut_idle() }[..len]);
            buffer.write_pinned(start, &piece.memory, 0..len)?;
            piece.copied.record(gpu.stream()).map_err(gpu.failed("cuEventRecord"))?;
            pieces.rotate_left(1);
        }
        Ok(buffer)
    }
}

impl Piece {
    /// The piece in `slot` once it is free, or a new one if it is not there or too small.
    fn free<'a>(gpu: &Arc<Gpu>, slot: &'a mut Option<Self>, num_bytes: usize) -> Result<&'a mut Self, KernelError> {
        let piece = match slot.take().filter(|piece| piece.memory.num_bytes() >= num_bytes) {
            Some(piece) => piece,
            None => {
                Self { memory: PinnedBuffer::zeroed(gpu, num_bytes.next_power_of_two())?, copied: gpu.record_event()? }
            }
        };
        piece.copied.synchronize().map_err(gpu.failed("cuEventSynchronize"))?;
        Ok(slot.insert(piece))
    }
}
