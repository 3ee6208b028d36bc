//! Quantized weights times one or two tokens (the kernel takes up to eight). Device code: `cuda/matvec.cu`.
//! For: decode. Invariant: the launch's shape, and with it the order of summation, depends on the layer, the epilogue and
//! the number of tokens alone.

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
    name: "matvec.cu",
    text: include_str!("../../../cuda/matvec.cu"),
    variants: &[
        &[
            "-DFORMATS=Q4_0,Q4_1,Q5_0",
            "-DGROUPS=1",
            "-DSETS=1",
            "-DSPLITS=8",
            "-DSTAGES=2",
            "-DTOKENS=1",
            "-DEPILOGUE=Store",
        ],
        &[
            "-DFORMATS=Q5_1,Q8_0,Q2_K",
            "-DGROUPS=2",
            "-DSETS=1",
            "-DSPLITS=8",
            "-DSTAGES=1",
            "-DTOKENS=4",
            "-DEPILOGUE=Add",
        ],
        &[
            "-DFORMATS=Q3_K,Q4_K,Q5_K",
            "-DGROUPS=4",
            "-DSETS=2",
            "-DSPLITS=2",
            "-DSTAGES=2",
            "-DTOKENS=1",
            "-DEPILOGUE=SwiGlu",
        ],
        &[
            "-DFORMATS=Q6_K,Q8_K",
            "-DGROUPS=1",
            "-DSETS=8",
            "-DSPLITS=1",
            "-DSTAGES=4",
            "-DTOKENS=8",
            "-DEPILOGUE=SwiGlu",
        ],
    ],
};

/// Rows of a group, and outputs that a block of SwiGLU makes.
const GROUP_ROWS: usize = 8;
const SWIGLU_OUTPUTS: usize = 32;

/// Bytes of the largest tiles of formats of up to 3, 4 and 5 bits.
const THREE_BITS: usize = 928;
const FOUR_BITS: usize = 1280;
const FIVE_BITS: usize = 1536;
/// Rows of layers that fill a GPU several times, and that do not fill it with blocks of 8 rows.
const MANY_ROWS: usize = 16384;
const FEW_ROWS: usize = 5120;
/// Tiles of long rows.
const MANY_TILES: usize = 32;

/// Shape of a block: `sets * splits` warps, each with `groups` groups of 8 rows and a ring of `stages` tiles for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    groups: usize,
    sets: usize,
    splits: usize,
    stages: usize,
}

impl Shape {
    /// What was fastest on an H200 for layers of about that size.
    fn of(layer: &LayerView, target: Target) -> Self {
        let tile_bytes = layer.max_tile_bytes();
        let (groups, sets, splits, stages) = match (target, layer.num_rows(), layer.num_tiles()) {
            (Target::SwiGlu, ..) if layer.has_six_bit_scales() => (4, 2, 2, 1),
            (Target::SwiGlu, ..) if tile_bytes <= FIVE_BITS => (2, 4, 2, 1),
            (Target::SwiGlu, ..) => (1, 8, 2, 1),
            (_, MANY_ROWS.., _) => (1, 1, 4, 2),
            (_, _, MANY_TILES..) if tile_bytes <= FOUR_BITS => (4, 1, 16, 1),
            (_, ..=FEW_ROWS, ..MANY_TILES) if THREE_BITS < tile_bytes && tile_bytes <= FOUR_BITS => (2, 2, 8, 1),
            (_, _, MANY_TILES..) | (_, ..=FEW_ROWS, _) => (1, 2, 8, 1),
            _ if tile_bytes <= THREE_BITS => (2, 1, 8, 2),
            _ if tile_bytes <= FOUR_BITS => (2, 1, 8, 1),
            _ if tile_bytes <= FIVE_BITS => (1, 2, 4, 2),
            _ => (1, 1, 4, 2),
        };
        Self { groups, sets, splits, stages }
    }

    fn rows(self) -> usize {
        self.groups * self.sets * GROUP_ROWS
    }
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
    let shape = Shape::of(layer, target);
    let rows_each = if target == Target::SwiGlu { SWIGLU_OUTPUTS } else { shape.rows() };
    let num_units =
        if target == Target::SwiGlu { layer.first_rows().div_ceil(rows_each) } else { layer.num_units(rows_each) };
    let options = [
        layer.formats(),
        format!("-DGROUPS={}", shape.groups),
        format!("-DSETS={}", shape.sets),
        format!("-DSPLITS={}", shape.splits),
        format!("-DSTAGES={}", shape.stages),
        format!("-DTOKENS={}", num_tokens.next_power_of_two()),
        format!("-DEPILOGUE={}", target.name()),
    ];
    let kernel = gpu.kernel(&SOURCE, &options, "matvec")?;
    let num_warps = shape.sets * shape.splits;
    let shared_bytes = (num_warps * shape.stages * shape.groups * layer.max_tile_bytes()) as u32;
    kernel.allow_shared_bytes(gpu, shared_bytes)?;
    let launch = Launch { shared_bytes, ..Launch::blocks(num_units as u32, 32 * num_warps as u32) };
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
