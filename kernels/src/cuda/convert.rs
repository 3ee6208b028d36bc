//! Makes the forms that a matmul reads of f32 rows whose producer did not, on CUDA. Device code: `cuda/convert.cu`.
//! For: [`CudaDevice`](super::CudaDevice), before the first matmul that reads a tensor in a new form.

use std::sync::Arc;

use super::{Activations, Argument, DeviceBuffer, Gpu, Kernel, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source { name: "convert.cu", text: include_str!("../../cuda/convert.cu"), variants: &[] };

const OPERATION: &str = "convert";
const NUM_THREADS: usize = 256;

/// The loaded kernel.
pub struct Convert {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

/// `output = input` for the first `num_tokens` rows.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertCall {
    /// Rows.
    pub num_tokens: usize,
    /// `[num_tokens, output.columns]` f32.
    pub input: Arc<DeviceBuffer>,
    /// Forms to make.
    pub output: Activations,
}

impl Convert {
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
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, call: &ConvertCall) -> Result<(), KernelError> {
        let width = call.output.columns;
        call.input.expect_bytes(OPERATION, "bytes of the input", call.num_tokens * width * size_of::<f32>())?;
        call.output.expect_tokens(OPERATION, call.num_tokens)?;
        let output = call.output.argument();
        let arguments = [(&*call.input).into(), Argument::Struct(bytemuck::bytes_of(&output))];
        let grid = [width.div_ceil(NUM_THREADS) as u32, call.num_tokens as u32, 1];
        let launch = Launch { grid, ..Launch::blocks(0, NUM_THREADS as u32) };
        // SAFETY: the kernel's arguments; it touches `num_tokens` rows of `width` values, which the buffers have.
        unsafe { self.kernel.launch(&self.gpu, launch, &arguments) }
    }
}
