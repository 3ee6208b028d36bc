//! SwiGLU of products in memory. Device code: `cuda/swiglu.cu`.
//! For: layers whose halves are not whole groups of rows. Invariant: as the fused epilogue.

use super::arguments::ActivationView;
use crate::{
    KernelError,
    cuda::{Argument, DevicePointer, Gpu, Launch, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source { name: "swiglu.cu", text: include_str!("../../../cuda/swiglu.cu"), variants: &[] };

const NUM_THREADS: usize = 256;

/// `output = silu(gate) * up` of `products` `[num_tokens, gate and up of output.columns each]`.
pub(super) fn launch(
    gpu: &Gpu,
    num_tokens: usize,
    products: DevicePointer,
    output: ActivationView,
) -> Result<(), KernelError> {
    let kernel = gpu.kernel(&SOURCE, &[], "swiglu")?;
    let grid = [output.columns.div_ceil(NUM_THREADS) as u32, num_tokens as u32, 1];
    let launch = Launch { grid, ..Launch::blocks(0, NUM_THREADS as u32) };
    let output = output.argument();
    let arguments = [products.into(), Argument::Struct(bytemuck::bytes_of(&output))];
    // SAFETY: the kernel's arguments; products and outputs of `num_tokens` tokens are there.
    unsafe { kernel.launch(gpu, launch, &arguments) }
}
