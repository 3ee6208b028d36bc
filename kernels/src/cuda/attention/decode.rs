//! Decode attention on CUDA: a few query tokens a sequence, split over the length of the cache.
//! Device code: `cuda/attention_decode.cu`.
//! Invariant: the grid depends on the GPU and the head size alone, never on lengths, so that a recorded launch stays
//! right as sequences grow.

use std::sync::Arc;

use super::{AttentionCall, MAX_DECODE_TOKENS, OPERATION, pair};
use crate::{
    KernelError,
    cuda::{Argument, DeviceBuffer, Gpu, Launch, rope_and_store::CudaRope, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "attention_decode.cu",
    text: include_str!("../../../cuda/attention_decode.cu"),
    variants: &[
        &[
            "-DHEAD_DIM=128",
            "-DBLOCK_SIZE=16",
            "-DBFLOAT=0",
            "-DQUERY_FLOAT=1",
            "-DSTAGES=3",
            "-DQUERY_ROWS=8",
            "-DFUSED=1",
        ],
        &[
            "-DHEAD_DIM=80",
            "-DBLOCK_SIZE=32",
            "-DBFLOAT=1",
            "-DQUERY_FLOAT=0",
            "-DSTAGES=4",
            "-DQUERY_ROWS=16",
            "-DFUSED=0",
        ],
    ],
};

/// Warps of a block and tokens that one takes at a time: `WARPS` and `STEP` of the device code.
const WARPS: usize = 4;
const STEP: usize = 16;
const THREADS: u32 = 128;
/// Most copies of a warp's ring, and the fewest.
const MAX_STAGES: usize = 4;
const MIN_STAGES: usize = 2;
/// Shared memory beside the rings, at most.
const STATIC_SHARED_BYTES: usize = 16 << 10;
/// Blocks that share a multiprocessor where their rings fit: one computes while the other waits.
const MAX_BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Query rows of a segment, and the most `rows * head_dim` whose sums fit a warp's registers.
const QUERY_ROWS: [usize; 3] = [8, 16, 32];
const MAX_SUMS: usize = 2048;
/// Smallest range of a block, in units of 64 tokens of a head: less is not worth adding up partial sums.
const MIN_UNITS: u32 = 2;
/// Most query rows, for the size of the workspace.
const MAX_PARTIAL_ROWS: usize = 32;

/// Partial sums of blocks that share a sequence.
pub(super) struct Workspace {
    partials: Arc<DeviceBuffer>,
    counters: Arc<DeviceBuffer>,
}

/// How a launch is cut for a head size.
struct Shape {
    stages: usize,
    blocks: usize,
    shared_bytes: u32,
}

impl Shape {
    fn new(gpu: &Gpu, head_dim: usize) -> Self {
        let stage_bytes = WARPS * 2 * STEP * head_dim * size_of::<u16>();
        let all = gpu.limits().max_shared_bytes as usize;
        let stages = |per_multiprocessor: usize| {
            let rings = (all / per_multiprocessor).saturating_sub(STATIC_SHARED_BYTES);
            (rings / stage_bytes).min(MAX_STAGES)
        };
        let (per_multiprocessor, stages) = match stages(MAX_BLOCKS_PER_MULTIPROCESSOR) {
            enough @ MIN_STAGES.. => (MAX_BLOCKS_PER_MULTIPROCESSOR, enough),
            _ => (1, stages(1).max(MIN_STAGES)),
        };
        let blocks = per_multiprocessor * gpu.limits().num_multiprocessors as usize;
        Self { stages, blocks, shared_bytes: (stages * stage_bytes) as u32 }
    }

    /// Whether a segment may have so many query rows: their sums stay in registers, and in the end take the rings' place.
    fn holds(&self, rows: usize, head_dim: usize) -> bool {
        rows * head_dim <= MAX_SUMS && WARPS * rows * (head_dim + 4) * size_of::<f32>() <= self.shared_bytes as usize
    }
}

impl Workspace {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let blocks = MAX_BLOCKS_PER_MULTIPROCESSOR * gpu.limits().num_multiprocessors as usize;
        // Two partials a block: sums, and a maximum and a sum of weights for each row.
        let partial = MAX_SUMS + 2 * MAX_PARTIAL_ROWS;
        Ok(Self {
            partials: Arc::new(DeviceBuffer::zeroed(gpu, 2 * blocks * partial * size_of::<f32>())?),
            counters: Arc::new(DeviceBuffer::zeroed(gpu, blocks * size_of::<u32>())?),
        })
    }

    /// Starts the kernel; with `rope` the queries are rows of qkv of one token a sequence.
    pub(super) fn launch(&self, gpu: &Gpu, call: &AttentionCall, rope: Option<&CudaRope>) -> Result<(), KernelError> {
        let head_dim = call.batch.spec.head_dim;
        let wanted = call.batch.max_decode_tokens * call.batch.group_size;
        let shape = Shape::new(gpu, head_dim);
        let mut rows = QUERY_ROWS.into_iter().filter(|rows| shape.holds(*rows, head_dim));
        let rows = rows.clone().find(|rows| *rows >= wanted).or(rows.next_back()).unwrap_or(QUERY_ROWS[0]);
        let mut options = call.options();
        options.extend([
            format!("-DSTAGES={}", shape.stages),
            format!("-DQUERY_ROWS={rows}"),
            format!("-DFUSED={}", u8::from(rope.is_some())),
        ]);
        let kernel = gpu.kernel(&SOURCE, &options, "attention_decode")?;
        kernel.allow_shared_bytes(gpu, shape.shared_bytes)?;

        let mut argument = call.argument(1, MAX_DECODE_TOKENS)?;
        argument.extend([
            pair(call.scale_log2(), 0),
            self.partials.pointer().0,
            self.counters.pointer().0,
            pair(MIN_UNITS, 0),
        ]);
        argument.extend(call.output.argument());
        argument.extend(rope.map_or([0; 3], CudaRope::argument));
        let blocks = u32::try_from(shape.blocks).map_err(|_| gpu.error(format!("{OPERATION}: too many blocks")))?;
        let launch = Launch { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared_bytes: shape.shared_bytes };
        // SAFETY: the structure `Call` of the kernel. `stage` checked every address of the batch against the cache, the
        // caller the rows; the workspace has room for all blocks of any launch, and one stream orders its users.
        unsafe { kernel.launch(gpu, launch, &[Argument::Struct(bytemuck::cast_slice(&argument))]) }
    }
}
