//! Prefill attention on CUDA: many query tokens a sequence, causal, also behind a cached prefix.
//! Device code: `cuda/attention_prefill_hopper.cu` where it fits, else `cuda/attention_prefill.cu`.

use super::{AttentionCall, MAX_DECODE_TOKENS, pair};
use crate::{
    KernelError,
    cuda::{Argument, Gpu, Launch, context::GpuLimits, sources::Source},
};

/// Device code for all GPUs.
pub const SOURCE: Source = Source {
    name: "attention_prefill.cu",
    text: include_str!("../../../cuda/attention_prefill.cu"),
    variants: &[
        "-DHEAD_DIM=128 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=0 -DTILE_ROWS=128 -DTILE_KEYS=64",
        "-DHEAD_DIM=256 -DBLOCK_SIZE=32 -DBFLOAT=1 -DQUERY_FLOAT=1 -DTILE_ROWS=64 -DTILE_KEYS=32",
    ],
};

/// Device code for Hopper; elsewhere it compiles to nothing.
pub const HOPPER_SOURCE: Source = Source {
    name: "attention_prefill_hopper.cu",
    text: include_str!("../../../cuda/attention_prefill_hopper.cu"),
    variants: &[
        "-DHEAD_DIM=128 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=0 -DTILE_ROWS=128 -DTILE_KEYS=128",
        "-DHEAD_DIM=64 -DBLOCK_SIZE=16 -DBFLOAT=1 -DQUERY_FLOAT=1 -DTILE_ROWS=128 -DTILE_KEYS=128",
        "-DHEAD_DIM=80 -DBLOCK_SIZE=32 -DBFLOAT=1 -DQUERY_FLOAT=1 -DTILE_ROWS=128 -DTILE_KEYS=128",
        "-DHEAD_DIM=96 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=1 -DTILE_ROWS=128 -DTILE_KEYS=128",
        "-DHEAD_DIM=256 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQUERY_FLOAT=1 -DTILE_ROWS=128 -DTILE_KEYS=64",
    ],
};

const HOPPER: (i32, i32) = (9, 0);
/// Head sizes that its kernel has products for.
const HOPPER_HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Largest head whose sums leave registers for wide tiles.
const MAX_WIDE_HEAD_DIM: usize = 128;

/// How the kernel for a head size is compiled and launched.
struct Plan {
    source: &'static Source,
    /// Query rows (tokens times heads of a group) and keys that a block takes at a time.
    tile_rows: usize,
    tile_keys: usize,
    threads: u32,
    /// Most blocks: a block of a kernel that stays takes tile after tile.
    max_blocks: usize,
}

impl Plan {
    fn new(limits: &GpuLimits, head_dim: usize) -> Self {
        let is_wide = head_dim <= MAX_WIDE_HEAD_DIM;
        if limits.compute_capability == HOPPER && HOPPER_HEAD_DIMS.contains(&head_dim) {
            let (tile_keys, max_blocks) = (if is_wide { 128 } else { 64 }, limits.num_multiprocessors as usize);
            return Self { source: &HOPPER_SOURCE, tile_rows: 128, tile_keys, threads: 384, max_blocks };
        }
        let (tile_rows, tile_keys) = if is_wide { (128, 64) } else { (64, 32) };
        Self { source: &SOURCE, tile_rows, tile_keys, threads: 128, max_blocks: usize::MAX }
    }

    /// Options beside those of the call.
    fn options(&self) -> Vec<String> {
        vec![format!("-DTILE_ROWS={}", self.tile_rows), format!("-DTILE_KEYS={}", self.tile_keys)]
    }

    /// Of queries, and two stages of keys and values.
    fn shared_bytes(&self, head_dim: usize) -> u32 {
        ((self.tile_rows + 4 * self.tile_keys) * head_dim * size_of::<u16>()) as u32
    }
}

/// Query rows (tokens times heads of a group) of a block.
pub(super) fn tile_rows(gpu: &Gpu, head_dim: usize) -> usize {
    Plan::new(gpu.limits(), head_dim).tile_rows
}

/// Starts the kernel for the sequences that are not decoded.
pub(super) fn launch(gpu: &Gpu, call: &AttentionCall) -> Result<(), KernelError> {
    let spec = &call.batch.spec;
    let plan = Plan::new(gpu.limits(), spec.head_dim);
    let shared_bytes = plan.shared_bytes(spec.head_dim);
    let kernel = gpu.kernel(plan.source, &[call.options(), plan.options()].concat(), "attention_prefill")?;
    kernel.allow_shared_bytes(gpu, shared_bytes)?;
    let mut argument = call.argument(MAX_DECODE_TOKENS + 1, u32::MAX as usize)?;
    argument.push(pair(call.scale_log2(), call.batch.num_prefill_tiles as u32));
    argument.extend(call.output.argument());
    let blocks = (call.batch.num_prefill_tiles * spec.num_key_value_heads).min(plan.max_blocks) as u32;
    let launch = Launch { grid: [blocks, 1, 1], block: [plan.threads, 1, 1], shared_bytes };
    // SAFETY: the structure `Call` of the kernel. `stage` checked every address of the batch against the cache, the
    // caller the rows.
    unsafe { kernel.launch(gpu, launch, &[Argument::Struct(bytemuck::cast_slice(&argument))]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::context::tests::limits_of_every_kind;

    #[test]
    fn tiles_fit_every_gpu() {
        for limits in limits_of_every_kind() {
            for head_dim in (16..=256).step_by(16) {
                let shared_bytes = Plan::new(&limits, head_dim).shared_bytes(head_dim);
                assert!(shared_bytes <= limits.max_shared_bytes, "{shared_bytes} bytes of {head_dim} on {limits:?}");
            }
        }
    }
}
