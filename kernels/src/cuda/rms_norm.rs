//! RMS norm on CUDA, and what the next matmul wants of its output, in one kernel. Device code: `cuda/rms_norm.cu`.
//! For: [`CudaDevice`](super::CudaDevice). Invariant: a token's result depends on that token alone.

use std::sync::Arc;

use super::{Activations, Argument, DeviceBuffer, Gpu, Launch, matmul::MAX_MATVEC_TOKENS, sources::Source};
use crate::KernelError;

/// Device code.
pub const SOURCE: Source = Source {
    name: "rms_norm.cu",
    text: include_str!("../../cuda/rms_norm.cu"),
    variants: &["-DCHUNKS=1 -DCLUSTER=1", "-DCHUNKS=2 -DCLUSTER=1", "-DCHUNKS=4 -DCLUSTER=1"],
};

const OPERATION: &str = "rms_norm";
/// Threads of a row in one block, and in each block of a cluster.
const MAX_THREADS: usize = 1024;
const MAX_CLUSTER_THREADS: usize = 512;
/// Threads from which on a row gets another block of a cluster.
const FEW_THREADS: usize = 128;
/// Blocks of a cluster.
const MAX_CLUSTER: usize = 8;
/// Columns that a thread has at a time.
const CHUNK: usize = 4;
/// Chunks of a thread, in steps of powers of two, up to what registers hold.
const MAX_CHUNKS: usize = 4;

/// How the columns of a row are spread: `cluster` blocks of `num_threads` threads with `num_chunks` times four of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    pub(super) cluster: usize,
    pub(super) num_chunks: usize,
    pub(super) num_threads: usize,
}

impl Default for RowShape {
    /// One block of one warp.
    fn default() -> Self {
        Self { cluster: 1, num_chunks: 1, num_threads: 32 }
    }
}

impl RowShape {
    /// A row of `width` columns in `cluster` blocks.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for rows that these do not hold or that are not whole chunks.
    pub fn new(gpu: &Gpu, width: usize, cluster: usize) -> Result<Self, KernelError> {
        let max_threads = cluster * if cluster > 1 { MAX_CLUSTER_THREADS } else { MAX_THREADS };
        let num_chunks = width.div_ceil(CHUNK * max_threads).max(1).next_power_of_two();
        if num_chunks > MAX_CHUNKS || !width.is_multiple_of(CHUNK) {
            let limit = max_threads * CHUNK * MAX_CHUNKS;
            return Err(KernelError::Unsupported {
                operation: OPERATION,
                what: format!("a width of {width} (a multiple of {CHUNK} up to {limit})"),
                device: gpu.limits().name.clone(),
            });
        }
        let num_threads = width.div_ceil(CHUNK * num_chunks * cluster).next_multiple_of(32);
        Ok(Self { cluster, num_chunks, num_threads })
    }

    /// One of `num_tokens` rows: a few are spread over multiprocessors, where blocks form clusters.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(super) fn of(gpu: &Gpu, num_tokens: usize, width: usize) -> Result<Self, KernelError> {
        let wanted = width.div_ceil(CHUNK * FEW_THREADS).next_power_of_two();
        let is_spread = gpu.limits().has_clusters() && num_tokens <= MAX_MATVEC_TOKENS;
        Self::new(gpu, width, if is_spread { wanted.min(MAX_CLUSTER) } else { 1 })
    }

    /// `CHUNKS` and `CLUSTER` of the device code.
    pub(super) fn options(self) -> [String; 2] {
        [format!("-DCHUNKS={}", self.num_chunks), format!("-DCLUSTER={}", self.cluster)]
    }
}

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
        self.launch_in(RowShape::of(&self.gpu, call.num_tokens, call.output.columns)?, call)
    }

    /// With blocks of another shape, for tests and measurements.
    #[doc(hidden)]
    pub fn launch_in(&self, shape: RowShape, call: &RmsNormCall) -> Result<(), KernelError> {
        call.check()?;
        let kernel = self.gpu.kernel(&SOURCE, &shape.options(), OPERATION)?;
        let output = call.output.argument();
        let arguments = [
            (&*call.input).into(),
            (&*call.weight).into(),
            call.epsilon.into(),
            Argument::Struct(bytemuck::bytes_of(&output)),
        ];
        let launch = Launch::blocks((call.num_tokens * shape.cluster) as u32, shape.num_threads as u32);
        // SAFETY: the kernel's arguments; it touches `num_tokens` rows of `columns` values, which the buffers have.
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }
}

impl RmsNormCall {
    /// Refuses short buffers.
    pub(super) fn check(&self) -> Result<(), KernelError> {
        let row_bytes = self.output.columns * size_of::<f32>();
        self.input.expect_bytes(OPERATION, "bytes of the input", self.num_tokens * row_bytes)?;
        self.weight.expect_bytes(OPERATION, "bytes of the weight", row_bytes)?;
        self.output.expect_tokens(OPERATION, self.num_tokens)
    }
}
