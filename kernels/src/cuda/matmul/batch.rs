//! Quantized weights times many tokens, on tensor cores. Device code: `cuda/batch.cu`, on Hopper `cuda/batch_hopper.cu`.
//! For: batched decode and short prompts. Invariant: as `matvec`.

use super::{
    Target,
    arguments::{ActivationView, LayerView},
    layout::GROUP_ROWS,
};
use crate::{
    KernelError,
    cuda::{Argument, Gpu, Launch, context::GpuLimits, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "batch.cu",
    text: include_str!("../../../cuda/batch.cu"),
    variants: &[
        "-DBLOCK_ROWS=128 -DFORMATS=Q4_0,Q4_1,Q5_0 -DTOKENS=8 -DSTAGES=4 -DCLUSTER=8 -DEPILOGUE=Store",
        "-DBLOCK_ROWS=128 -DFORMATS=Q5_1,Q8_0,Q2_K -DTOKENS=32 -DSTAGES=3 -DCLUSTER=1 -DEPILOGUE=Add",
        "-DBLOCK_ROWS=128 -DFORMATS=Q3_K,Q4_K,Q5_K -DTOKENS=64 -DSTAGES=2 -DCLUSTER=1 -DEPILOGUE=SwiGlu",
        "-DBLOCK_ROWS=128 -DFORMATS=Q6_K,Q8_K -DTOKENS=128 -DSTAGES=2 -DCLUSTER=1 -DEPILOGUE=SwiGlu",
    ],
};

/// Device code for Hopper.
pub const HOPPER_SOURCE: Source = Source {
    name: "batch_hopper.cu",
    text: include_str!("../../../cuda/batch_hopper.cu"),
    variants: &[
        "-DBLOCK_ROWS=128 -DFORMATS=Q4_0,Q4_1,Q5_0 -DTOKENS=16 -DSTAGES=4 -DCLUSTER=2 -DEPILOGUE=Store",
        "-DBLOCK_ROWS=128 -DFORMATS=Q5_1,Q8_0,Q2_K -DTOKENS=32 -DSTAGES=3 -DCLUSTER=1 -DEPILOGUE=Add",
        "-DBLOCK_ROWS=128 -DFORMATS=Q3_K,Q4_K,Q5_K -DTOKENS=64 -DSTAGES=2 -DCLUSTER=1 -DEPILOGUE=SwiGlu",
        "-DBLOCK_ROWS=256 -DFORMATS=Q6_K,Q8_K -DTOKENS=128 -DSTAGES=2 -DCLUSTER=1 -DEPILOGUE=SwiGlu",
    ],
};

/// Rows of a block, and of one of its warps.
const ROWS: usize = 128;
const WARP_ROWS: usize = 16;
/// Rows of a block of many tokens on Hopper: no second block fits on the multiprocessor, so the one has more warps.
const MANY_ROWS: usize = 256;
/// Bytes of a token in a stage.
const TOKEN_BYTES: usize = 512;
/// Tokens of the smallest and of the largest piece.
const MIN_TOKENS: usize = 8;
const MAX_TOKENS: usize = 128;
/// Tokens up to which two warps of a set share the columns, each with sums of its own.
const MAX_DEEP_TOKENS: usize = 64;
/// Tokens up to which two blocks share a multiprocessor.
const MAX_SHARED_TOKENS: usize = 64;
/// Tiles of rows that are long enough for blocks in two waves.
const MANY_TILES: usize = 32;
const MAX_STAGES: usize = 4;
const MAX_CLUSTER: usize = 8;
/// Bytes of shared memory that the system and the stages' border take of each block.
const RESERVED_BYTES: usize = 2 << 10;
/// Border of what Hopper's tensor cores read in shared memory.
const BORDER: usize = 1 << 10;
/// Tokens of the smallest piece on Hopper, and up to which the other kernel is faster there.
const MIN_HOPPER_TOKENS: usize = 16;
const MAX_SHALLOW_TOKENS: usize = 8;

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    is_hopper: bool,
    rows: usize,
    tokens: usize,
    stages: usize,
    cluster: usize,
}

impl Shape {
    fn of(limits: &GpuLimits, layer: &LayerView, target: Target, num_tokens: usize) -> Self {
        let is_hopper = limits.compute_capability == (9, 0) && num_tokens > MAX_SHALLOW_TOKENS;
        let min_tokens = if is_hopper { MIN_HOPPER_TOKENS } else { MIN_TOKENS };
        let wanted = num_tokens.next_power_of_two().clamp(min_tokens, MAX_TOKENS);
        let shared_bytes = limits.max_shared_bytes as usize;
        let fits = |shape: &Self| shape.shared_bytes(layer) + RESERVED_BYTES <= shared_bytes;
        let mut shape = Self { is_hopper, rows: ROWS, tokens: wanted, stages: 2, cluster: 1 };
        // A100s and smaller GPUs have not the shared memory for the largest pieces of the tokens.
        while shape.tokens > min_tokens && !fits(&shape) {
            shape.tokens /= 2;
        }
        let tokens = shape.tokens;
        let large = Self { rows: MANY_ROWS, ..shape };
        // Several pieces of the tokens fill the GPU more evenly with small blocks.
        let is_large = is_hopper && (MAX_SHARED_TOKENS + 1..=MAX_TOKENS).contains(&num_tokens);
        if is_large && fits(&large) {
            shape = large;
        }
        let num_blocks = shape.num_units(layer, target) * num_tokens.div_ceil(tokens);
        let stage_bytes = shape.stage_bytes(layer);
        // Two blocks on a multiprocessor hide each other's waits, if registers and shared memory are enough for both.
        let half = (shared_bytes / 2).saturating_sub(RESERVED_BYTES);
        let is_shared = tokens <= MAX_SHARED_TOKENS && half / stage_bytes >= 2;
        let available = if is_shared { half } else { shared_bytes.saturating_sub(RESERVED_BYTES) };
        shape.stages = (available / stage_bytes).clamp(2, MAX_STAGES);
        let blocks_each = if is_shared || layer.num_tiles() >= MANY_TILES { 2 } else { 1 };
        let room = blocks_each * limits.num_multiprocessors as usize;
        while limits.has_overlapped_launch()
            && shape.cluster < MAX_CLUSTER
            && num_blocks * shape.cluster * 2 <= room
            && layer.num_tiles() >= 4 * shape.cluster
        {
            shape.cluster *= 2;
        }
        shape
    }

    /// Rows of the layer, for SwiGLU outputs, that a block makes.
    fn unit_rows(self, target: Target) -> usize {
        if target == Target::SwiGlu { self.rows / 2 } else { self.rows }
    }

    /// Blocks, or clusters of them, for each piece of the tokens.
    fn num_units(self, layer: &LayerView, target: Target) -> usize {
        let rows_each = self.unit_rows(target);
        if target == Target::SwiGlu { layer.first_rows().div_ceil(rows_each) } else { layer.num_units(rows_each) }
    }

    fn stage_bytes(self, layer: &LayerView) -> usize {
        let weights = self.rows / GROUP_ROWS * layer.max_tile_bytes();
        let border = if self.is_hopper { BORDER } else { 1 };
        weights.next_multiple_of(border) + self.tokens * TOKEN_BYTES
    }

    fn shared_bytes(self, layer: &LayerView) -> usize {
        let depth = if !self.is_hopper && self.tokens <= MAX_DEEP_TOKENS { 2 } else { 1 };
        let sums = depth * self.tokens * (self.rows + 4) * size_of::<f32>();
        let border = if self.is_hopper { BORDER } else { 0 };
        (self.stages * self.stage_bytes(layer)).max(sums) + border
    }
}

/// Most tokens for which this is faster than cuBLAS over weights that become f16 in memory.
pub(super) fn max_tokens(gpu: &Gpu) -> usize {
    if gpu.limits().compute_capability == (9, 0) { 1024 } else { MAX_TOKENS }
}

/// Launches the product of a quantized layer and rows of f16.
pub(super) fn launch(
    gpu: &Gpu,
    layer: &LayerView,
    num_tokens: usize,
    input: ActivationView,
    target: Target,
    output: ActivationView,
) -> Result<(), KernelError> {
    let shape = Shape::of(gpu.limits(), layer, target, num_tokens);
    let options = [
        format!("-DBLOCK_ROWS={}", shape.rows),
        layer.formats(),
        format!("-DTOKENS={}", shape.tokens),
        format!("-DSTAGES={}", shape.stages),
        format!("-DCLUSTER={}", shape.cluster),
        format!("-DEPILOGUE={}", target.name()),
    ];
    let source = if shape.is_hopper { &HOPPER_SOURCE } else { &SOURCE };
    let kernel = gpu.kernel(source, &options, "batch")?;
    let shared_bytes = shape.shared_bytes(layer) as u32;
    kernel.allow_shared_bytes(gpu, shared_bytes)?;
    let num_units = shape.num_units(layer, target);
    let grid = [(num_units * shape.cluster) as u32, num_tokens.div_ceil(shape.tokens) as u32, 1];
    let launch = Launch { grid, block: [(shape.rows / WARP_ROWS * 32) as u32, 1, 1], shared_bytes };
    let (layer, output) = (layer.argument(shape.unit_rows(target))?, output.argument());
    let arguments = [
        Argument::Struct(bytemuck::bytes_of(&layer)),
        input.halves.into(),
        (input.columns as u32).into(),
        Argument::Struct(bytemuck::bytes_of(&output)),
        (num_tokens as u32).into(),
    ];
    // SAFETY: the kernel's arguments. The caller checked that the buffers hold so many rows of the layer's width and
    // height; the parts of the layer are whole groups of tiles.
    unsafe { kernel.launch(gpu, launch, &arguments) }
}

#[cfg(test)]
mod tests {
    use lockstep_formats::GgmlType;

    use super::*;
    use crate::cuda::matmul::layout::Layout;

    const TYPES: [GgmlType; 12] = [
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q8_1,
        GgmlType::Q2_K,
        GgmlType::Q3_K,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
        GgmlType::Q8_K,
    ];
    /// An RTX 4090, an A100 and an H200.
    const GPUS: [((i32, i32), u32, u32); 3] =
        [((8, 9), 128, 99 << 10), ((8, 0), 108, 163 << 10), ((9, 0), 132, 227 << 10)];

    #[test]
    fn every_type_and_number_of_tokens_fits_every_gpu() {
        for (compute_capability, num_multiprocessors, max_shared_bytes) in GPUS {
            let name = String::new();
            let limits =
                GpuLimits { name, compute_capability, num_multiprocessors, max_shared_bytes, l2_bytes: 1 << 20 };
            for ggml_type in TYPES {
                let layer = LayerView::of_layout(Layout::of(ggml_type).unwrap(), 28672, 4096);
                for num_tokens in 1..=1024 {
                    let shape = Shape::of(&limits, &layer, Target::SwiGlu, num_tokens);
                    let bytes = shape.shared_bytes(&layer);
                    assert!(
                        bytes <= max_shared_bytes as usize,
                        "{ggml_type:?}, {num_tokens} tokens: {shape:?}, {bytes}"
                    );
                }
            }
        }
    }
}
