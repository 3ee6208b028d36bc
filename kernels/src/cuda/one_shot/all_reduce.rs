//! Sums over the ranks, alone or with the RMS norm that follows. Device code: `cuda/all_reduce.cu`.
//! For: the communicator of a [`CudaDevice`](crate::cuda::CudaDevice).
//! Invariant: terms are added in the order of the ranks, so all ranks get the same bits; where a value lies in a message
//! depends on its index alone, so ranks may choose different launches.

use super::{MAX_BLOCKS, OneShot};
use crate::{
    KernelError,
    cuda::{
        Argument, DeviceBuffer, Launch,
        rms_norm::{RmsNormCall, RowShape},
        sources::Source,
    },
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "all_reduce.cu",
    text: include_str!("../../../cuda/all_reduce.cu"),
    variants: &[
        "-DWORLD_SIZE=2 -DCHUNKS=2 -DCLUSTER=1",
        "-DWORLD_SIZE=4 -DCHUNKS=4 -DCLUSTER=1",
        "-DWORLD_SIZE=8 -DCHUNKS=1 -DCLUSTER=8",
    ],
};

const OPERATION: &str = "all_reduce";
/// Values of a thread.
const CHUNK: usize = 4;
/// Threads of a block that sums alone; fewer in more blocks are no faster.
const NUM_THREADS: usize = 256;

impl OneShot {
    /// Starts `values = the sum of values over the ranks`, for the first `len` f32 values on all ranks.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::OutOfRange`] if the buffer is too small or the message empty or too large,
    /// [`KernelError::Device`] if the ranks were aborted or the launch fails.
    pub fn all_reduce(&self, len: usize, values: &DeviceBuffer) -> Result<(), KernelError> {
        self.check(OPERATION, len)?;
        values.expect_bytes(OPERATION, "bytes of the values", len * size_of::<f32>())?;
        let kernel = self.gpu.kernel(&SOURCE, &self.options(RowShape::default()), OPERATION)?;
        let ranks = self.argument();
        let arguments = [values.into(), (len as u32).into(), Argument::Struct(bytemuck::bytes_of(&ranks))];
        let launch = Launch::blocks(len.div_ceil(CHUNK * NUM_THREADS) as u32, NUM_THREADS as u32);
        // SAFETY: the kernel's arguments; it touches `len` values, which the buffer has, and lines of a message of at
        // most `max_len` values in each inbox.
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }

    /// Whether the norm of the sums of its input can be made in the kernel that sums: that of few rows.
    pub fn takes_norm(&self, norm: &RmsNormCall) -> bool {
        let columns = norm.output.columns;
        let shape = RowShape::of(&self.gpu, norm.num_tokens, columns);
        norm.num_tokens * columns <= self.max_len
            && shape.is_ok_and(|shape| norm.num_tokens * shape.cluster <= MAX_BLOCKS)
    }

    /// Starts `input = the sum of input over the ranks` and its norm as one kernel.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce) and [`RmsNorm::launch`](crate::cuda::rms_norm::RmsNorm::launch).
    pub fn all_reduce_norm(&self, norm: &RmsNormCall) -> Result<(), KernelError> {
        self.all_reduce_norm_in(RowShape::of(&self.gpu, norm.num_tokens, norm.output.columns)?, norm)
    }

    /// With blocks of another shape, for tests and measurements.
    #[doc(hidden)]
    pub fn all_reduce_norm_in(&self, shape: RowShape, norm: &RmsNormCall) -> Result<(), KernelError> {
        self.check(OPERATION, norm.num_tokens * norm.output.columns)?;
        norm.check()?;
        let num_blocks = norm.num_tokens * shape.cluster;
        if num_blocks > MAX_BLOCKS {
            let (operation, what, limit) = (OPERATION, "blocks", MAX_BLOCKS + 1);
            return Err(KernelError::OutOfRange { operation, what, got: num_blocks, limit });
        }
        let kernel = self.gpu.kernel(&SOURCE, &self.options(shape), "all_reduce_norm")?;
        let (output, ranks) = (norm.output.argument(), self.argument());
        let arguments = [
            (&*norm.input).into(),
            (&*norm.weight).into(),
            norm.epsilon.into(),
            Argument::Struct(bytemuck::bytes_of(&output)),
            Argument::Struct(bytemuck::bytes_of(&ranks)),
        ];
        let launch = Launch::blocks(num_blocks as u32, shape.num_threads as u32);
        // SAFETY: as in `all_reduce`; the rows of the norm were checked, too.
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }

    fn options(&self, shape: RowShape) -> [String; 3] {
        let [chunks, cluster] = shape.options();
        [format!("-DWORLD_SIZE={}", self.world_size()), chunks, cluster]
    }
}
