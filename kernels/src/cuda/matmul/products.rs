//! What becomes of products in memory. Device code: `cuda/products.cu`.
//! For: `dense`, and layers whose halves are not whole groups of rows. Invariant: as the fused epilogues.

use super::arguments::ActivationView;
use crate::{
    KernelError,
    cuda::{Argument, DevicePointer, Gpu, Launch, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "products.cu",
    text: include_str!("../../../cuda/products.cu"),
    variants: &["-DPRODUCT=F32 -DSWIGLU=0", "-DPRODUCT=F32 -DSWIGLU=1", "-DPRODUCT=F16 -DSWIGLU=1"],
};

const NUM_THREADS: usize = 256;
const BLOCK_COLUMNS: usize = 32;

/// Products on the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    /// `[num_tokens, columns]`, for SwiGLU `[num_tokens, 2 * columns]`, gates first.
    pub(super) pointer: DevicePointer,
    /// Whether they are f16, else f32.
    pub(super) is_half: bool,
    /// Columns of the output that they make.
    pub(super) columns: usize,
    /// The first of them, a multiple of 32.
    pub(super) first_column: usize,
}

/// Stores products, or SwiGLU of them, in the output's forms.
pub(super) fn store(
    gpu: &Gpu,
    num_tokens: usize,
    products: Products,
    is_swiglu: bool,
    output: ActivationView,
) -> Result<(), KernelError> {
    let options = [
        format!("-DPRODUCT={}", if products.is_half { "F16" } else { "F32" }),
        format!("-DSWIGLU={}", u32::from(is_swiglu)),
    ];
    let kernel = gpu.kernel(&SOURCE, &options, "store_products")?;
    let grid = [products.columns.div_ceil(NUM_THREADS) as u32, num_tokens as u32, 1];
    let launch = Launch { grid, ..Launch::blocks(0, NUM_THREADS as u32) };
    let output = output.argument();
    let arguments = [
        products.pointer.into(),
        (products.columns as u32).into(),
        ((products.first_column / BLOCK_COLUMNS) as u32).into(),
        Argument::Struct(bytemuck::bytes_of(&output)),
    ];
    // SAFETY: the kernel's arguments; products and outputs of `num_tokens` tokens are there.
    unsafe { kernel.launch(gpu, launch, &arguments) }
}
