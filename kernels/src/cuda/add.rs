//! Adds to the residual stream what was summed over the ranks, on CUDA. Device code: `cuda/add.cu`.
//! For: [`CudaDevice`](super::CudaDevice) where ranks meet on the host, or GPUs add long sums up in f16.

use std::sync::Arc;

use super::{DeviceBuffer, Gpu, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source =
    Source { name: "add.cu", text: include_str!("../../cuda/add.cu"), variants: &["-DHALVES=0", "-DHALVES=1"] };

const NUM_THREADS: usize = 256;
/// Values of a thread.
const WIDTH: usize = 8;

/// `hidden[i] += addend[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct AddCall {
    /// Values.
    pub len: usize,
    /// Whether the addend is f16, else f32.
    pub is_half: bool,
    /// `[len]`
    pub addend: Arc<DeviceBuffer>,
    /// `[len]` f32.
    pub hidden: Arc<DeviceBuffer>,
}

/// The launcher.
pub struct Add {
    gpu: Arc<Gpu>,
}

impl Add {
    /// Of a GPU; kernels are compiled when they are first wanted.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for more values than 32 bits count, [`KernelError::Shape`] if a buffer is too small,
    /// [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, call: &AddCall) -> Result<(), KernelError> {
        let AddCall { len, is_half, ref addend, ref hidden } = *call;
        let element_bytes = if is_half { size_of::<u16>() } else { size_of::<f32>() };
        let Ok(num_values) = u32::try_from(len) else {
            let (operation, what, limit) = ("add", "values", u32::MAX as usize + 1);
            return Err(KernelError::OutOfRange { operation, what, got: len, limit });
        };
        addend.expect_bytes("add", "bytes of the addend", len * element_bytes)?;
        hidden.expect_bytes("add", "bytes of the hidden rows", len * size_of::<f32>())?;
        let kernel = self.gpu.kernel(&SOURCE, &[format!("-DHALVES={}", u32::from(is_half))], "add")?;
        let launch = Launch::blocks(len.div_ceil(NUM_THREADS * WIDTH) as u32, NUM_THREADS as u32);
        let arguments = [(&**addend).into(), num_values.into(), (&**hidden).into()];
        // SAFETY: the kernel's arguments; it touches `len` values, which the buffers have, from their start on.
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }
}
