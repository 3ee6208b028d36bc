//! Decode attention on CUDA: a few query tokens a sequence, split over the length of the cache.
//! Device code: `cuda/attention_decode.cu`.
//! Invariant: the grid depends on the GPU and the head size alone, never on lengths, so that a recorded launch stays
//! right as sequences grow.

use std::sync::Arc;

use super::{AttentionCall, MAX_DECODE_TOKENS, OPERATION, pair};
use crate::{
    KernelError,
    cuda::{Argument, DeviceBuffer, Gpu, Launch, context::GpuLimits, rope_and_store::CudaRope, sources::Source},
    ops,
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "attention_decode.cu",
    text: include_str!("../../../cuda/attention_decode.cu"),
    variants: &[
        "-DHEAD_DIM=128 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=1 -DWARPS=8 -DSTAGES=2 -DQUERY_ROWS=8 -DFUSED=1 -DCLUSTER=8",
        "-DHEAD_DIM=80 -DBLOCK_SIZE=32 -DBFLOAT=1 -DQUERY_FLOAT=0 -DWARPS=4 -DSTAGES=4 -DQUERY_ROWS=16 -DFUSED=0 -DCLUSTER=2",
        "-DHEAD_DIM=256 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=1 -DWARPS=2 -DSTAGES=2 -DQUERY_ROWS=8 -DFUSED=1 -DCLUSTER=1",
    ],
};

/// Tokens that a warp takes at a time: `STEP` of the device code.
const STEP: usize = 16;
const WARP: usize = 32;
/// Most copies of a warp's ring, and the fewest.
const MAX_STAGES: usize = 4;
const MIN_STAGES: usize = 2;
/// Shared memory beside the rings, at most.
const STATIC_SHARED_BYTES: usize = 16 << 10;
/// Blocks that share a multiprocessor, where one computes while the other waits, and warps of each: the first that fit.
const CUTS: [(usize, usize); 3] = [(MAX_BLOCKS_PER_MULTIPROCESSOR, 4), (1, 4), (1, 2)];
const MAX_BLOCKS_PER_MULTIPROCESSOR: usize = 2;
/// Query rows of a segment, and the most `rows * head_dim` whose sums fit a warp's registers.
const QUERY_ROWS: [usize; 3] = [8, 16, 32];
const MAX_SUMS: usize = 2048;
/// Smallest range of a block, in units of 16 tokens a warp of a head: less is not worth adding up partial sums.
const MIN_UNITS: u32 = 2;
/// Blocks of a cluster, the first of which the GPU holds one for each sequence and head, on a multiprocessor each.
const CLUSTERS: [usize; 2] = [8, 4];
/// Warps of their blocks and copies of a ring, where there is room: most sequences that clusters take are so short that each
/// warp has a step or two.
const CLUSTER_CUT: (usize, usize) = (8, 2);
/// Tokens of the longest sequence that a cluster takes, alone and for each sequence and head beside it: the fewer they are,
/// the sooner it pays to spread them over all blocks.
const CLUSTER_KEYS: (usize, usize) = (2048, 1024);
/// Most query rows, for the size of the workspace.
const MAX_PARTIAL_ROWS: usize = 32;

/// Partial sums of blocks that share a sequence.
pub(super) struct Workspace {
    partials: Arc<DeviceBuffer>,
    counters: Arc<DeviceBuffer>,
}

/// How a launch is cut for a head size.
#[derive(Clone, Copy, Debug)]
struct Shape {
    warps: usize,
    stages: usize,
    blocks: usize,
    shared_bytes: usize,
}

impl Shape {
    fn new(limits: &GpuLimits, head_dim: usize) -> Self {
        let cut = |(blocks_each, warps): (usize, usize)| {
            let stage_bytes = warps * 2 * STEP * head_dim * size_of::<u16>();
            let rings = (limits.max_shared_bytes as usize / blocks_each).saturating_sub(STATIC_SHARED_BYTES);
            let stages = (rings / stage_bytes).min(MAX_STAGES);
            let blocks = blocks_each * limits.num_multiprocessors as usize;
            Self { warps, stages, blocks, shared_bytes: stages * stage_bytes }
        };
        let mut cuts = CUTS.into_iter().map(cut);
        let [.., smallest] = CUTS;
        cuts.find(|shape| shape.stages >= MIN_STAGES).unwrap_or_else(|| cut(smallest))
    }

    /// The fewest query rows of a segment that hold `wanted`, or the most that there are room and registers for: their sums
    /// stay in registers, and in the end take the rings' place.
    fn query_rows(&self, head_dim: usize, wanted: usize) -> usize {
        let sum_bytes = |rows: usize| self.warps * rows * (head_dim + 4) * size_of::<f32>();
        let holds = |rows: &usize| rows * head_dim <= MAX_SUMS && sum_bytes(*rows) <= self.shared_bytes;
        let mut rows = QUERY_ROWS.into_iter().filter(holds);
        rows.clone().find(|rows| *rows >= wanted).or(rows.next_back()).unwrap_or(QUERY_ROWS[0])
    }

    /// Of clusters' blocks.
    fn of_clusters(limits: &GpuLimits, head_dim: usize) -> Self {
        let (warps, stages) = CLUSTER_CUT;
        let shared_bytes = warps * stages * 2 * STEP * head_dim * size_of::<u16>();
        let shape = Self::new(limits, head_dim);
        let fits = shared_bytes + STATIC_SHARED_BYTES <= limits.max_shared_bytes as usize;
        // Every thread loads as many elements of the queries.
        let is_even = (QUERY_ROWS[0] * head_dim).is_multiple_of(WARP * warps);
        if fits && is_even { Self { warps, stages, shared_bytes, ..shape } } else { shape }
    }
}

/// Blocks of a cluster for each sequence and head of `call`, where a launch has room for `num_sequences`; 1: they are too
/// many, or too long.
pub(super) fn cluster(limits: &GpuLimits, call: &ops::Attention<'_>, num_sequences: usize) -> usize {
    let decoded = || call.sequences.iter().filter(|sequence| sequence.num_tokens <= MAX_DECODE_TOKENS);
    let num_rows = decoded().map(|sequence| sequence.num_tokens).max().unwrap_or(0) * call.group_size;
    let num_keys = decoded().map(|sequence| sequence.first_position + sequence.num_tokens).max().unwrap_or(0);
    let num_tiles = num_rows.div_ceil(Shape::of_clusters(limits, call.head_dim).query_rows(call.head_dim, num_rows));
    let num_pairs = num_sequences * call.num_key_value_heads * num_tiles;
    let (least, each) = CLUSTER_KEYS;
    if !limits.has_clusters() || num_keys > least + each * num_pairs {
        return 1;
    }
    let fits = |cluster: &usize| num_pairs * cluster <= limits.num_multiprocessors as usize;
    CLUSTERS.into_iter().find(fits).unwrap_or(1)
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
        let cluster = call.batch.cluster;
        let shape =
            if cluster > 1 { Shape::of_clusters(gpu.limits(), head_dim) } else { Shape::new(gpu.limits(), head_dim) };
        let query_rows = shape.query_rows(head_dim, wanted);
        let num_pairs = call.batch.num_sequences * call.batch.spec.num_key_value_heads * wanted.div_ceil(query_rows);
        let mut options = call.options();
        options.extend([
            format!("-DWARPS={}", shape.warps),
            format!("-DSTAGES={}", shape.stages),
            format!("-DQUERY_ROWS={query_rows}"),
            format!("-DFUSED={}", u8::from(rope.is_some())),
            format!("-DCLUSTER={cluster}"),
        ]);
        let kernel = gpu.kernel(&SOURCE, &options, "attention_decode")?;
        let shared_bytes = shape.shared_bytes as u32;
        kernel.allow_shared_bytes(gpu, shared_bytes)?;

        let mut argument = call.argument(1, MAX_DECODE_TOKENS)?;
        argument.extend([
            pair(call.scale_log2(), 0),
            self.partials.pointer().0,
            self.counters.pointer().0,
            pair(MIN_UNITS, 0),
        ]);
        argument.extend(call.output.argument());
        argument.extend(rope.map_or([0; 3], CudaRope::argument));
        let blocks = if cluster > 1 { num_pairs * cluster } else { shape.blocks };
        let blocks = u32::try_from(blocks).map_err(|_| gpu.error(format!("{OPERATION}: too many blocks")))?;
        let launch = Launch { grid: [blocks, 1, 1], block: [(WARP * shape.warps) as u32, 1, 1], shared_bytes };
        // SAFETY: the structure `Call` of the kernel. `stage` checked every address of the batch against the cache, the
        // caller the rows; the workspace has room for all blocks of any launch, and one stream orders its users.
        unsafe { kernel.launch(gpu, launch, &[Argument::Struct(bytemuck::cast_slice(&argument))]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::context::tests::limits_of_every_kind;

    #[test]
    fn rings_and_sums_fit_every_gpu() {
        for limits in limits_of_every_kind() {
            for head_dim in (16..=256).step_by(16) {
                let shape = Shape::new(&limits, head_dim);
                let what = format!("{shape:?} of {head_dim} on {limits:?}");
                assert!(shape.stages >= MIN_STAGES, "{what}");
                assert!(shape.shared_bytes + STATIC_SHARED_BYTES <= limits.max_shared_bytes as usize, "{what}");
                let rows = shape.query_rows(head_dim, usize::MAX);
                assert!(shape.warps * rows * (head_dim + 4) * size_of::<f32>() <= shape.shared_bytes, "{what}");
                assert!(rows * head_dim <= MAX_SUMS && rows <= MAX_PARTIAL_ROWS, "{what}");
                assert!(shape.query_rows(head_dim, 1) == QUERY_ROWS[0], "{what}");
                let shape = Shape::of_clusters(&limits, head_dim);
                let rows = shape.query_rows(head_dim, usize::MAX);
                let sums = shape.warps * rows * (head_dim + 4) + rows * (head_dim + 2);
                assert!(sums * size_of::<f32>() <= shape.shared_bytes, "{shape:?} of {head_dim} on {limits:?}");
                assert_eq!(QUERY_ROWS[0] * head_dim % (WARP * shape.warps), 0, "{shape:?} of {head_dim}");
            }
        }
    }
}
