//! Copies the rows whose logits are wanted, on CUDA. Device code: `cuda/gather_rows.cu`.
//! For: [`CudaDevice`](super::CudaDevice), which has checked the rows.

use std::sync::Arc;

use super::{DeviceBuffer, Gpu, InputSlice, Kernel, Launch, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source =
    Source { name: "gather_rows.cu", text: include_str!("../../cuda/gather_rows.cu"), variants: &[] };

const OPERATION: &str = "gather_rows";
const NUM_THREADS: usize = 256;

/// The loaded kernel.
pub struct GatherRows {
    gpu: Arc<Gpu>,
    kernel: Kernel,
}

/// `output[i] = input[rows[i]]`, rows of `width` f32.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherRowsCall {
    /// Rows to copy.
    pub num_rows: usize,
    /// Values of a row.
    pub width: usize,
    /// `[more than any of rows, width]`
    pub input: Arc<DeviceBuffer>,
    /// `[num_rows]` u32, checked.
    pub rows: InputSlice,
    /// `[num_rows, width]`
    pub output: Arc<DeviceBuffer>,
}

impl GatherRows {
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
    ///
    /// # Safety
    /// The rows are rows of the input.
    pub unsafe fn launch(&self, call: &GatherRowsCall) -> Result<(), KernelError> {
        let num_bytes = call.num_rows * call.width * size_of::<f32>();
        call.output.expect_bytes(OPERATION, "bytes of the output", num_bytes)?;
        call.rows.expect_bytes(OPERATION, "bytes of the rows", call.num_rows * size_of::<u32>())?;
        let arguments =
            [(&*call.input).into(), call.rows.pointer().into(), (call.width as u32).into(), (&*call.output).into()];
        let launch = Launch {
            grid: [call.width.div_ceil(NUM_THREADS) as u32, call.num_rows as u32, 1],
            ..Launch::blocks(0, NUM_THREADS as u32)
        };
        // SAFETY: the kernel's arguments; it reads rows that the caller vouches for and writes `num_rows` of them.
        unsafe { self.kernel.launch(&self.gpu, launch, &arguments) }
    }
}
