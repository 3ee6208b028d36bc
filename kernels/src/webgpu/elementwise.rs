//! Operations on rows that no other file has: norm, 8-bit blocks, SwiGLU, sums, chosen rows.
//! For: [`WebGpuDevice`](super::WebGpuDevice) and the matmul. Device code: the file of that name in `wgsl/`.
//! Invariant: callers have checked that the tensors hold so many rows of these widths.

use super::{
    commands::{Binding, Commands},
    gpu::Gpu,
    source::Source,
    tensor::{Blocks, WebGpuTensor},
};
use crate::KernelError;

pub static RMS_NORM: Source = Source { name: "rms_norm.wgsl", text: include_str!("../../wgsl/rms_norm.wgsl") };
pub static QUANTIZE: Source = Source { name: "quantize.wgsl", text: include_str!("../../wgsl/quantize.wgsl") };
pub static SWIGLU: Source = Source { name: "swiglu.wgsl", text: include_str!("../../wgsl/swiglu.wgsl") };
pub static ADD: Source = Source { name: "add.wgsl", text: include_str!("../../wgsl/add.wgsl") };
pub static GATHER_ROWS: Source = Source { name: "gather_rows.wgsl", text: include_str!("../../wgsl/gather_rows.wgsl") };

/// Threads of a workgroup where one thread makes one value or block.
pub const THREADS: u32 = 128;
/// Threads that share a row of a norm: every adapter has the first.
pub const NORM_THREADS: [u32; 3] = [256, 512, 1024];
/// Most workgroups in a row of a grid.
const GRID_WIDTH: usize = 32768;

/// So many workgroups, in rows of a plane; those past the end find that they are.
pub fn plane(num_workgroups: usize) -> [usize; 2] {
    if num_workgroups <= GRID_WIDTH { [num_workgroups, 1] } else { [GRID_WIDTH, num_workgroups.div_ceil(GRID_WIDTH)] }
}

fn grid(num_threads: usize) -> [usize; 3] {
    let [x, y] = plane(num_threads.div_ceil(THREADS as usize));
    [x, y, 1]
}

/// The first rows as 8-bit blocks, made now if they are not there.
pub fn blocks(commands: &mut Commands, num_tokens: usize, input: &WebGpuTensor) -> Result<Blocks, KernelError> {
    let (blocks, is_missing) = input.request_blocks(commands.gpu(), num_tokens)?;
    if is_missing {
        let num_groups = num_tokens * input.width() / 4;
        let pipeline = commands.gpu().pipeline(&QUANTIZE, &[("THREADS", THREADS)])?;
        let bindings = vec![input.values(), blocks.quants.clone(), blocks.scales.clone()];
        commands.dispatch(&pipeline, bindings, &[num_groups as u32], grid(num_groups))?;
    }
    Ok(blocks)
}

/// As many as take the row at once, each four values, if the adapter has them.
fn norm_threads(gpu: &Gpu, width: usize) -> u32 {
    let most = gpu.most_threads().min(gpu.options().norm_threads);
    let fits = |threads: &&u32| **threads <= most && **threads as usize <= width / 4;
    NORM_THREADS.iter().rev().find(fits).copied().unwrap_or(NORM_THREADS[0])
}

pub fn rms_norm(
    commands: &mut Commands,
    num_tokens: usize,
    input: &WebGpuTensor,
    weight: &WebGpuTensor,
    epsilon: f32,
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    let values = output.overwrite();
    let mut bindings = vec![input.values(), weight.values(), values];
    let blocks = output.overwrite_blocks(num_tokens);
    let options = [("THREADS", norm_threads(commands.gpu(), input.width())), ("QUANTIZE", u32::from(blocks.is_some()))];
    bindings.extend(blocks.into_iter().flat_map(|blocks| [blocks.quants, blocks.scales]));
    let pipeline = commands.gpu().pipeline(&RMS_NORM, &options)?;
    commands.dispatch(&pipeline, bindings, &[input.width() as u32, epsilon.to_bits()], [num_tokens, 1, 1])
}

pub fn swiglu(
    commands: &mut Commands,
    num_tokens: usize,
    products: &WebGpuTensor,
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    let num_values = num_tokens * output.width();
    let pipeline = commands.gpu().pipeline(&SWIGLU, &[("THREADS", THREADS)])?;
    let parameters = [output.width() as u32, num_values as u32];
    commands.dispatch(&pipeline, vec![products.values(), output.overwrite()], &parameters, grid(num_values))
}

/// `output += addend`, values of the first rows.
pub fn add(
    commands: &mut Commands,
    num_values: usize,
    addend: Binding,
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    let pipeline = commands.gpu().pipeline(&ADD, &[("THREADS", THREADS)])?;
    commands.dispatch(&pipeline, vec![addend, output.overwrite()], &[num_values as u32], grid(num_values))
}

pub fn gather_rows(
    commands: &mut Commands,
    rows: &[u32],
    input: &WebGpuTensor,
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    let width = input.width();
    let pipeline = commands.gpu().pipeline(&GATHER_ROWS, &[("THREADS", THREADS)])?;
    let staged = commands.stage(rows)?;
    let bindings = vec![staged, input.values(), output.overwrite()];
    commands.dispatch(&pipeline, bindings, &[width as u32], [width.div_ceil(THREADS as usize), rows.len(), 1])
}
