//! RMS norm on CUDA, and what the next matmul wants of its output, in one kernel. Device code: `cuda/rms_norm.cu`.
//! For: [`CudaDevice`](super::CudaDevice). Invariant: a token's result depends on that token alone.

use std::sync::Arc;

use super::{Activations, Argument, DeviceBuffer, Gpu, Kernel, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source { name: "rms_norm.cu", text: include_str!("../../cuda/rms_norm.cu"), variants: &[] };

const OPERATION: &str = "rms_norm";
/// Threads of the largest block.
const MAX_THREADS: usize = 1024;
/// Values that a thread of the kernel can hold.
const VALUES_PER_THREAD: usize = 16;
/// Values that a thread has where there are threads enough.
const USUAL_VALUES_PER_THREAD: usize = 4;

/// The loaded kernel.
pub struct RmsNorm {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

/// `output[t] = input[t] / sqrt(mean(input[t]²) + epsilon) * weight`.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsNormCall {
    /// Rows.
    pub num_tokens: usize,
    /// `[num_tokens, output.columns]` f32.
    pub input: Arc<DeviceBuffer>,
    /// `[output.columns]` f32.
    pub weight: Arc<DeviceBuffer>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// At least `num_tokens` rows.
    pub output: Activations,
}

impl RmsNorm {
    /// Loads it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it does not compile.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self { gpu: Arc::clone(gpu), kernel: gpu.kernel(&SOURCE, &[], OPERATION)? })
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Unsupported`] for rows that no block holds,
    /// [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, call: &RmsNormCall) -> Result<(), KernelError> {
        let width = call.output.columns;
        if width > MAX_THREADS * VALUES_PER_THREAD {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                what: format!("a width of {width} (at most {})", MAX_THREADS * VALUES_PER_THREAD),
                device: self.gpu.limits().name.clone(),
            });
        }
        let row_bytes = width * size_of::<f32>();
        call.input.expect_bytes(OPERATION, "bytes of the input", call.num_tokens * row_bytes)?;
        call.weight.expect_bytes(OPERATION, "bytes of the weight", row_bytes)?;
        call.output.expect_tokens(OPERATION, call.num_tokens)?;
        let num_threads = width.div_ceil(USUAL_VALUES_PER_THREAD).next_multiple_of(32).min(MAX_THREADS);
        let output = call.output.argument();
        let arguments = [
            (&*call.input).into(),
            (&*call.weight).into(),
            call.epsilon.into(),
            (width as u32).into(),
            Argument::Struct(bytemuck::bytes_of(&output)),
        ];
        let launch = Launch::blocks(call.num_tokens as u32, num_threads as u32);
        // SAFETY: the kernel's arguments; it touches `num_tokens` rows of `width` values, which the buffers have.
        unsafe { self.kernel.launch(&self.gpu, launch, &arguments) }
    }
}
