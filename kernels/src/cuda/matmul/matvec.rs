//! Quantized weights times one or two tokens (the kernel takes up to eight). Device code: `cuda/matvec.cu`.
//! For: decode. Invariant: the launch's shape, and with it the order of summation, depends on the GPU, the layer, the
//! epilogue and the number of tokens alone.

use super::{
    Target,
    arguments::{ActivationView, LayerView},
    layout::TILE_COLUMNS,
};
use crate::{
    KernelError,
    cuda::{Argument, Gpu, Launch, activations::tile_row_bytes, context::GpuLimits, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "matvec.cu",
    text: include_str!("../../../cuda/matvec.cu"),
    variants: &[
        "-DFORMATS=Q4_0,Q4_1,Q5_0 -DGROUPS=1 -DSETS=1 -DSPLITS=8 -DSTAGES=2 -DSHARED=0 -DTOKENS=1 -DEPILOGUE=Store",
        "-DFORMATS=Q5_1,Q8_0,Q2_K -DGROUPS=2 -DSETS=1 -DSPLITS=8 -DSTAGES=1 -DSHARED=1 -DTOKENS=4 -DEPILOGUE=Add",
        "-DFORMATS=Q3_K,Q4_K,Q5_K -DGROUPS=4 -DSETS=2 -DSPLITS=2 -DSTAGES=2 -DSHARED=1 -DTOKENS=1 -DEPILOGUE=SwiGlu",
        "-DFORMATS=Q6_K,Q8_K -DGROUPS=1 -DSETS=8 -DSPLITS=1 -DSTAGES=4 -DSHARED=0 -DTOKENS=8 -DEPILOGUE=SwiGlu",
    ],
};

/// Rows of a group, and outputs that a block of SwiGLU makes.
const GROUP_ROWS: usize = 8;
const SWIGLU_OUTPUTS: usize = 32;

/// Bytes of the largest tiles of formats of up to 2, 3, 4 and 5 bits.
const TWO_BITS: usize = 672;
const THREE_BITS: usize = 928;
const FOUR_BITS: usize = 1280;
const FIVE_BITS: usize = 1536;
/// Bytes of activations that fit beside the tiles.
const MAX_SHARED_ACTIVATIONS: usize = 40 << 10;
/// Shared memory that the driver takes of each block.
const RESERVED_BYTES: usize = 1 << 10;

/// Shape of a block: `sets * splits` warps, each with `groups` groups of 8 rows and a ring of `stages` tiles for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    groups: usize,
    sets: usize,
    splits: usize,
    stages: usize,
    /// Bytes of activations in shared memory.
    activation_bytes: usize,
}

impl Shape {
    /// What was fastest on an H200 for layers of about so many tiles a row, and groups of rows for each multiprocessor.
    fn of(limits: &GpuLimits, layer: &LayerView, target: Target, num_tokens: usize) -> Self {
        let (tile_bytes, num_tiles) = (layer.max_tile_bytes(), layer.num_tiles());
        let groups_each = layer.num_rows() / GROUP_ROWS / limits.num_multiprocessors.max(1) as usize;
        let (groups, sets, splits, stages) = match (target, num_tokens, groups_each) {
            (Target::SwiGlu, 2.., _) => (4, 2, 4, 1),
            (Target::SwiGlu, ..) if tile_bytes <= THREE_BITS => (2, 4, 2, 2),
            (Target::SwiGlu, ..) if num_tiles >= 24 => (4, 2, 4, 2),
            (Target::SwiGlu, ..) if tile_bytes <= FOUR_BITS => (4, 2, 2, 2),
            (Target::SwiGlu, ..) if tile_bytes <= FIVE_BITS => (4, 2, 2, 1),
            (Target::SwiGlu, ..) => (4, 2, 4, 1),
            (_, 2.., ..=3) if num_tiles >= 32 => (1, 2, 8, 1),
            (_, 2.., ..=3) => (2, 1, 8, 1),
            (_, 2.., _) => (4, 1, 8, 1),
            (_, _, ..=2) => (1, 1, 8, 2),
            (_, _, 3) if tile_bytes <= TWO_BITS && num_tiles >= 48 => (4, 1, 16, 1),
            (_, _, 3) => (1, 1, 8, 1),
            (_, _, 4..=6) => (2, 1, 8, 1),
            (_, _, 7..=8) => (1, 4, 4, 1),
            _ => (2, 1, 4, 2),
        };
        let activation_bytes = num_tokens * tile_row_bytes(num_tiles * TILE_COLUMNS);
        let is_shared = num_tokens > 1 || (target == Target::SwiGlu && tile_bytes <= THREE_BITS);
        let is_shared = is_shared && activation_bytes <= MAX_SHARED_ACTIVATIONS;
        let activation_bytes = if is_shared { activation_bytes } else { 0 };
        let mut shape = Self { groups, sets, splits, stages, activation_bytes };
        let max_bytes = limits.max_shared_bytes as usize;
        while shape.splits > 1 && shape.shared_bytes(layer) + shape.sum_bytes(num_tokens) > max_bytes {
            shape.splits /= 2;
        }
        shape
    }

    fn rows(self) -> usize {
        self.groups * self.sets * GROUP_ROWS
    }

    fn num_warps(self) -> usize {
        self.sets * self.splits
    }

    /// Sums of the warps.
    fn sum_bytes(self, num_tokens: usize) -> usize {
        self.splits * num_tokens.next_power_of_two() * self.rows() * size_of::<f32>()
    }

    /// Dynamic shared memory that the kernel uses.
    fn shared_bytes(self, layer: &LayerView) -> usize {
        self.activation_bytes + self.num_warps() * self.stages * self.groups * layer.max_tile_bytes()
    }
}

/// Shared memory of a block with which no multiprocessor takes more than its share of so many blocks. Launches overlap:
/// blocks would crowd where the kernel before ends first, and all would wait for those that share a multiprocessor.
fn fair_bytes(limits: &GpuLimits, num_blocks: usize) -> usize {
    let each = num_blocks.div_ceil(limits.num_multiprocessors.max(1) as usize).max(1);
    let all = limits.max_shared_bytes as usize + RESERVED_BYTES;
    // One more would not fit.
    (all / (each + 1)).saturating_sub(RESERVED_BYTES) + 128
}

/// Launches the product of a quantized layer and a few rows of tiles.
pub(super) fn launch(
    gpu: &Gpu,
    layer: &LayerView,
    num_tokens: usize,
    input: ActivationView,
    target: Target,
    output: ActivationView,
) -> Result<(), KernelError> {
    let shape = Shape::of(gpu.limits(), layer, target, num_tokens);
    let rows_each = if target == Target::SwiGlu { SWIGLU_OUTPUTS } else { shape.rows() };
    let num_units =
        if target == Target::SwiGlu { layer.first_rows().div_ceil(rows_each) } else { layer.num_units(rows_each) };
    let options = [
        layer.formats(),
        format!("-DGROUPS={}", shape.groups),
        format!("-DSETS={}", shape.sets),
        format!("-DSPLITS={}", shape.splits),
        format!("-DSTAGES={}", shape.stages),
        format!("-DSHARED={}", u8::from(shape.activation_bytes > 0)),
        format!("-DTOKENS={}", num_tokens.next_power_of_two()),
        format!("-DEPILOGUE={}", target.name()),
    ];
    let kernel = gpu.kernel(&SOURCE, &options, "matvec")?;
    let fair_bytes = fair_bytes(gpu.limits(), num_units).saturating_sub(shape.sum_bytes(num_tokens));
    let shared_bytes = shape.shared_bytes(layer).max(fair_bytes) as u32;
    kernel.allow_shared_bytes(gpu, shared_bytes)?;
    let launch = Launch { shared_bytes, ..Launch::blocks(num_units as u32, 32 * shape.num_warps() as u32) };
    let (layer, output) = (layer.argument(rows_each)?, output.argument());
    let arguments = [
        Argument::Struct(bytemuck::bytes_of(&layer)),
        input.tiles.into(),
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

    use super::{super::MAX_MATVEC_TOKENS, *};
    use crate::cuda::{context::tests::limits_of_every_kind, matmul::layout::Layout};

    #[test]
    fn every_launch_fits_every_gpu() {
        for mut limits in limits_of_every_kind() {
            for (num_multiprocessors, layout) in
                [16, 108, 132].into_iter().flat_map(|count| GgmlType::all().map(move |kind| (count, Layout::of(kind))))
            {
                limits.num_multiprocessors = num_multiprocessors;
                let Some(layout) = layout else { continue };
                for (rows, columns) in
                    [(8, 32), (2560, 8192), (4096, 14336), (6144, 4096), (8192, 7168), (128256, 4096)]
                {
                    let layer = LayerView::of_layout(layout, rows, columns);
                    for target in [Target::Store, Target::SwiGlu] {
                        for num_tokens in 1..=MAX_MATVEC_TOKENS {
                            let shape = Shape::of(&limits, &layer, target, num_tokens);
                            let (rows, num_warps) = (shape.rows(), shape.num_warps());
                            let bytes = shape.shared_bytes(&layer) + shape.sum_bytes(num_tokens);
                            assert!(bytes <= limits.max_shared_bytes as usize, "{limits:?} {layer:?} {shape:?}");
                            assert!((1..=32).contains(&num_warps), "{shape:?}");
                            let is_whole = rows == 2 * SWIGLU_OUTPUTS && shape.sets.is_multiple_of(2);
                            let has_threads = rows * num_tokens <= 32 * num_warps;
                            assert!(if target == Target::SwiGlu { is_whole } else { has_threads }, "{shape:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn no_multiprocessor_has_room_for_more_than_its_share() {
        for limits in limits_of_every_kind() {
            let all = limits.max_shared_bytes as usize + RESERVED_BYTES;
            // No multiprocessor has the threads for more than 16 blocks.
            for num_blocks in [1_usize, 128, 132, 133, 448, 1024, 2112] {
                let each = num_blocks.div_ceil(limits.num_multiprocessors as usize);
                let bytes = fair_bytes(&limits, num_blocks) + RESERVED_BYTES;
                assert!(each * bytes <= all && (each + 1) * bytes > all, "{limits:?} {num_blocks}: {bytes}");
            }
        }
    }
}
