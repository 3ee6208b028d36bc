//! Quantized weights times many tokens, on tensor cores. Device code: `cuda/batch.cu`.
//! For: batched decode and short prompts. Invariant: as `matvec`.

use super::{
    Target,
    arguments::{ActivationView, LayerView},
};
use crate::{
    KernelError,
    cuda::{Argument, Gpu, Launch, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "batch.cu",
    text: include_str!("../../../cuda/batch.cu"),
    variants: &[
        &["-DFORMATS=Q4_0,Q4_1,Q5_0", "-DTOKENS=8", "-DSTAGES=4", "-DCLUSTER=1", "-DEPILOGUE=Store"],
        &["-DFORMATS=Q5_1,Q8_0,Q2_K", "-DTOKENS=32", "-DSTAGES=3", "-DCLUSTER=1", "-DEPILOGUE=Add"],
        &["-DFORMATS=Q3_K,Q4_K,Q5_K", "-DTOKENS=64", "-DSTAGES=2", "-DCLUSTER=1", "-DEPILOGUE=SwiGlu"],
        &["-DFORMATS=Q6_K,Q8_K", "-DTOKENS=128", "-DSTAGES=2", "-DCLUSTER=1", "-DEPILOGUE=SwiGlu"],
    ],
};

const NUM_THREADS: u32 = 256;
/// Rows of a block, and outputs that a block of SwiGLU makes.
const ROWS: usize = 128;
const SWIGLU_OUTPUTS: usize = 64;
/// Groups of 8 rows of a block.
const GROUPS: usize = 16;
/// Bytes of a token in a stage.
const TOKEN_BYTES: usize = 512;
/// Tokens of the smallest and of the largest piece.
const MIN_TOKENS: usize = 8;
const MAX_TOKENS: usize = 128;
/// Tokens up to which two warps of a set share the columns, each with sums of its own.
const MAX_DEEP_TOKENS: usize = 64;
const MAX_STAGES: usize = 4;
const MAX_CLUSTER: usize = 8;
/// Bytes of shared memory that the system takes of each block.
const RESERVED_BYTES: usize = 1 << 10;

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    tokens: usize,
    stages: usize,
    cluster: usize,
}

impl Shape {
    fn of(gpu: &Gpu, layer: &LayerView, num_units: usize, num_tokens: usize) -> Self {
        let tokens = num_tokens.next_power_of_two().clamp(MIN_TOKENS, MAX_TOKENS);
        let num_blocks = num_units * num_tokens.div_ceil(tokens);
        let limits = gpu.limits();
        let shared_bytes = limits.max_shared_bytes as usize;
        let stages_of = |num_bytes: usize| (num_bytes / stage_bytes(layer, tokens)).min(MAX_STAGES);
        // Two blocks on a multiprocessor hide each other's waits.
        let shared = (shared_bytes - RESERVED_BYTES) / 2;
        let stages = if stages_of(shared) >= 2 { stages_of(shared) } else { stages_of(shared_bytes).max(2) };
        let mut cluster = 1;
        while limits.has_overlapped_launch()
            && cluster < MAX_CLUSTER
            && num_blocks * cluster < limits.num_multiprocessors as usize
            && layer.num_tiles() >= 4 * cluster
        {
            cluster *= 2;
        }
        Self { tokens, stages, cluster }
    }

    fn shared_bytes(self, layer: &LayerView) -> usize {
        let depth = if self.tokens <= MAX_DEEP_TOKENS { 2 } else { 1 };
        let sums = depth * self.tokens * (ROWS + 4) * size_of::<f32>();
        (self.stages * stage_bytes(layer, self.tokens)).max(sums)
    }
}

fn stage_bytes(layer: &LayerView, tokens: usize) -> usize {
    GROUPS * layer.max_tile_bytes() + tokens * TOKEN_BYTES
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
    let rows_each = if target == Target::SwiGlu { SWIGLU_OUTPUTS } else { ROWS };
    let num_units =
        if target == Target::SwiGlu { layer.first_rows().div_ceil(rows_each) } else { layer.num_units(rows_each) };
    let shape = Shape::of(gpu, layer, num_units, num_tokens);
    let options = [
        layer.formats(),
        format!("-DTOKENS={}", shape.tokens),
        format!("-DSTAGES={}", shape.stages),
        format!("-DCLUSTER={}", shape.cluster),
        format!("-DEPILOGUE={}", target.name()),
    ];
    let kernel = gpu.kernel(&SOURCE, &options, "batch")?;
    let shared_bytes = shape.shared_bytes(layer) as u32;
    kernel.allow_shared_bytes(gpu, shared_bytes)?;
    let grid = [(num_units * shape.cluster) as u32, num_tokens.div_ceil(shape.tokens) as u32, 1];
    let launch = Launch { grid, block: [NUM_THREADS, 1, 1], shared_bytes };
    let (layer, output) = (layer.argument(rows_each)?, output.argument());
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
