//! Weights of 16 and 32 bits times one to eight tokens. Device code: `cuda/matvec_plain.cu`.
//! For: decode with unquantized checkpoints. Invariant: as `matvec`.

use std::ops::Range;

use lockstep_formats::GgmlType;

use super::{
    Target,
    arguments::{ActivationView, LayerView},
};
use crate::{
    KernelError,
    cuda::{Argument, Gpu, HalfType, Launch, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "matvec_plain.cu",
    text: include_str!("../../../cuda/matvec_plain.cu"),
    variants: &[
        "-DWEIGHT=BF16 -DINPUT=BF16 -DVECTOR=8 -DROWS_EACH=2 -DSETS=1 -DSPLITS=4 -DSTAGES=1 -DTOKENS=1 -DEPILOGUE=Add",
        "-DWEIGHT=F16 -DINPUT=F16 -DVECTOR=8 -DROWS_EACH=4 -DSETS=16 -DSPLITS=1 -DSTAGES=1 -DTOKENS=8 -DEPILOGUE=SwiGlu",
        "-DWEIGHT=F32 -DINPUT=F32 -DVECTOR=4 -DROWS_EACH=2 -DSETS=1 -DSPLITS=4 -DSTAGES=1 -DTOKENS=2 -DEPILOGUE=Store",
        "-DWEIGHT=BF16 -DINPUT=F32 -DVECTOR=1 -DROWS_EACH=4 -DSETS=4 -DSPLITS=2 -DSTAGES=2 -DTOKENS=1 -DEPILOGUE=Store",
    ],
};

const SWIGLU_OUTPUTS: usize = 32;
/// Bytes of a load.
const VECTOR_BYTES: usize = 16;
/// Rows of layers that fill a GPU neither exactly nor many times, and columns of long rows.
const MEDIUM_ROWS: Range<usize> = 5120..16384;
const LONG_COLUMNS: usize = 8192;

/// Launches the product of a layer of one type and at most 8 rows: of halves of the same type, else of f32.
pub(super) fn launch(
    gpu: &Gpu,
    layer: &LayerView,
    ggml_type: GgmlType,
    num_tokens: usize,
    input: ActivationView,
    target: Target,
    output: ActivationView,
) -> Result<(), KernelError> {
    let (input_type, pointer) = match (ggml_type, input.half_type) {
        (GgmlType::F16, Some(HalfType::F16)) | (GgmlType::BF16, Some(HalfType::BF16)) => (ggml_type, input.halves),
        _ => (GgmlType::F32, input.values),
    };
    // What was fastest on an H200 for layers of about that size.
    let (rows_each, sets, splits, stages) = match target {
        Target::SwiGlu => (4, 16, 1, 1),
        _ if ggml_type == GgmlType::F32 => (4, 1, 8, 1),
        _ if MEDIUM_ROWS.contains(&layer.num_rows()) && input.columns < LONG_COLUMNS => (4, 4, 2, 2),
        _ => (4, 1, 4, 1),
    };
    let vector = VECTOR_BYTES / ggml_type.block_bytes();
    let unit_rows = if target == Target::SwiGlu { SWIGLU_OUTPUTS } else { rows_each * sets };
    let num_units =
        if target == Target::SwiGlu { layer.first_rows().div_ceil(unit_rows) } else { layer.num_units(unit_rows) };
    let options = [
        format!("-DWEIGHT={ggml_type}"),
        format!("-DINPUT={input_type}"),
        format!("-DVECTOR={}", if input.columns.is_multiple_of(vector) { vector } else { 1 }),
        format!("-DROWS_EACH={rows_each}"),
        format!("-DSETS={sets}"),
        format!("-DSPLITS={splits}"),
        format!("-DSTAGES={stages}"),
        format!("-DTOKENS={}", num_tokens.next_power_of_two()),
        format!("-DEPILOGUE={}", target.name()),
    ];
    let kernel = gpu.kernel(&SOURCE, &options, "matvec_plain")?;
    let columns = input.columns as u32;
    let (layer, output) = (layer.argument(unit_rows)?, output.argument());
    let arguments = [
        Argument::Struct(bytemuck::bytes_of(&layer)),
        pointer.into(),
        columns.into(),
        Argument::Struct(bytemuck::bytes_of(&output)),
        (num_tokens as u32).into(),
    ];
    let launch = Launch::blocks(num_units as u32, 32 * (sets * splits) as u32);
    // SAFETY: the kernel's arguments. The caller checked that the buffers hold so many rows of the layer's width and
    // height.
    unsafe { kernel.launch(gpu, launch, &arguments) }
}
