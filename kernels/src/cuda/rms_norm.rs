//! RMS norm on CUDA, and what the next matmul wants of its output, in one kernel. Device code: `cuda/rms_norm.cu`.
//! For: [`CudaDevice`](super::CudaDevice). Invariant: a token's result depends on that token alone.

use std::sync::Arc;

use super::{Activations, Argument, DeviceBuffer, Gpu, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source {
    name: "rms_norm.cu",
    text: include_str!("../../cuda/rms_norm.cu"),
    variants: &[&["-DCHUNKS=1"], &["-DCHUNKS=2"], &["-DCHUNKS=4"]],
};

const OPERATION: &str = "rms_norm";
/// Threads of the largest block.
const MAX_THREADS: usize = 1024;
/// Columns that a thread has at a time.
const CHUNK: usize = 4;
/// Chunks of a thread, in steps of powers of two, up to what registers hold.
const MAX_CHUNKS: usize = 4;

/// The launcher.
pub struct RmsNorm {
    gpu: Arc<Gpu>,
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
    /// Of a GPU; kernels are compiled when they are first wanted.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Unsupported`] for rows that no block holds or that
    /// are not whole chunks, [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, call: &RmsNormCall) -> Result<(), KernelError> {
        let width = call.output.columns;
        let num_chunks = width.div_ceil(CHUNK * MAX_THREADS).max(1).next_power_of_two();
        if num_chunks > MAX_CHUNKS || !width.is_multiple_of(CHUNK) {
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                what: format!("a width of {width} (a multiple of {CHUNK} up to {})", MAX_THREADS * CHUNK * MAX_CHUNKS),
                device: self.gpu.limits().name.clone(),
            });
        }
        let row_bytes = width * size_of::<f32>();
        call.input.expect_bytes(OPERATION, "bytes of the input", call.num_tokens * row_bytes)?;
        call.weight.expect_bytes(OPERATION, "bytes of the weight", row_bytes)?;
        call.output.expect_tokens(OPERATION, call.num_tokens)?;
        let kernel = self.gpu.kernel(&SOURCE, &[format!("-DCHUNKS={num_chunks}")], OPERATION)?;
        let num_threads = width.div_ceil(CHUNK * num_chunks).next_multiple_of(32);
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
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }
}
