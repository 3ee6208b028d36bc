//! Adds to the residual stream what the host has summed over the ranks, on CUDA. Device code: `cuda/add.cu`.
//! For: [`CudaDevice`](super::CudaDevice) where ranks meet on the host.

use std::sync::Arc;

use super::{DeviceBuffer, Gpu, Kernel, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source { name: "add.cu", text: include_str!("../../cuda/add.cu"), variants: &[] };

const NUM_THREADS: usize = 256;

/// The loaded kernel.
pub struct Add {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

impl Add {
    /// Loads it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it does not compile.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self { gpu: Arc::clone(gpu), kernel: gpu.kernel(&SOURCE, &[], "add")? })
    }

    /// Starts `hidden[i] += addend[i]` for the first `len` f32 values.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, len: usize, addend: &DeviceBuffer, hidden: &DeviceBuffer) -> Result<(), KernelError> {
        for (what, buffer) in [("bytes of the addend", addend), ("bytes of the hidden rows", hidden)] {
            buffer.expect_bytes("add", what, len * size_of::<f32>())?;
        }
        let launch = Launch::blocks(len.div_ceil(NUM_THREADS) as u32, NUM_THREADS as u32);
        let arguments = [addend.into(), (len as u32).into(), hidden.into()];
        // SAFETY: the kernel's arguments; it touches `len` values, which the buffers have.
        unsafe { self.kernel.launch(&self.gpu, launch, &arguments) }
    }
}
