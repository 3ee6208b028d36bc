//! RMS norm on CUDA. Device code: `cuda/rms_norm.cu`.
//! For: [`CudaDevice`](super). Invariant: a token's result depends on that token alone.

use std::sync::Arc;

use super::{DeviceBuffer, Gpu, Kernel, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source { name: "rms_norm.cu", text: include_str!("../../cuda/rms_norm.cu"), variants: &[] };

/// Values that one thread should have at least.
const VALUES_PER_THREAD: usize = 4;

/// The loaded kernel.
pub struct RmsNorm {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

impl RmsNorm {
    /// Loads it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it does not compile.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self { gpu: Arc::clone(gpu), kernel: gpu.kernel(&SOURCE, &[], "rms_norm")? })
    }

    /// `output[t] = input[t] / sqrt(mean(input[t]²) + epsilon) * weight` for `num_tokens` rows of `width` values.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Device`] if the launch fails.
    pub fn run(
        &self,
        num_tokens: usize,
        width: usize,
        input: &DeviceBuffer,
        weight: &DeviceBuffer,
        epsilon: f32,
        output: &DeviceBuffer,
    ) -> Result<(), KernelError> {
        let row_bytes = width * size_of::<f32>();
        for (what, buffer, expected) in [
            ("bytes of the input", input, num_tokens * row_bytes),
            ("bytes of the output", output, num_tokens * row_bytes),
            ("bytes of the weight", weight, row_bytes),
        ] {
            buffer.expect_bytes("rms_norm", what, expected)?;
        }
        let num_threads = width.div_ceil(VALUES_PER_THREAD).next_multiple_of(32).min(1024);
        let launch = Launch::blocks(num_tokens as u32, num_threads as u32);
        let arguments = [input.into(), weight.into(), epsilon.into(), (width as u32).into(), output.into()];
        // SAFETY: the kernel's arguments; it touches `num_tokens` rows of `width` values, which the buffers have.
        unsafe { self.kernel.launch(&self.gpu, launch, &arguments) }
    }
}
