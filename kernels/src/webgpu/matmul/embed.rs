//! The embedding on WebGPU. Device code: `wgsl/embed.wgsl`, `embed_plain.wgsl`.
//! For: [`WebGpuDevice`](crate::webgpu::WebGpuDevice). Invariant: every element of the output rows is written, by one part.

use super::{Format, WebGpuLinear, dtype_option};
use crate::{
    KernelError,
    quant::ACTIVATION_BLOCK,
    webgpu::{
        WebGpuTensor,
        commands::Commands,
        source::{Options, Source},
    },
};

/// Of quantized tables.
pub static EMBED: Source = Source { name: "embed.wgsl", text: include_str!("../../../wgsl/embed.wgsl") };
/// Of other tables.
pub static EMBED_PLAIN: Source =
    Source { name: "embed_plain.wgsl", text: include_str!("../../../wgsl/embed_plain.wgsl") };

const THREADS: usize = 64;

/// Options of the variant for tables of a format.
pub fn embed_options(format: Format) -> Options {
    let mut options = match format {
        Format::Planes(layout) => layout.options().to_vec(),
        Format::Plain(dtype) => vec![("DTYPE", dtype_option(dtype))],
    };
    options.push(("THREADS", THREADS as u32));
    options
}

/// Adds the rows of `token_ids` to the commands.
///
/// # Errors
/// [`KernelError::Shape`] if lengths disagree, [`KernelError::Device`] if memory is short or a shader is refused.
pub(in crate::webgpu) fn embed(
    commands: &mut Commands,
    table: &WebGpuLinear,
    first_token: u32,
    token_ids: &[u32],
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    output.expect_tokens("embed", token_ids.len())?;
    let (got, expected) = (output.width(), table.columns());
    if got != expected {
        return Err(KernelError::Shape { operation: "embed", what: "output width", got, expected });
    }
    if token_ids.is_empty() {
        return Ok(());
    }
    let token_ids_at = commands.stage(token_ids)?;
    let output = output.overwrite();
    for part in table.parts() {
        let (source, inner, step, planes) = match part.format {
            Format::Planes(_) => (&EMBED, expected / ACTIVATION_BLOCK, 1, &part.planes[..]),
            Format::Plain(dtype) => (&EMBED_PLAIN, expected, 4 / dtype.element_bytes(), &part.planes[..1]),
        };
        let pipeline = commands.gpu().pipeline(source, &embed_options(part.format))?;
        let bindings = planes.iter().cloned().chain([token_ids_at.clone(), output.clone()]).collect();
        let numbers = [inner, part.rows, part.first_row, table.rows(), first_token as usize];
        let grid = [inner.div_ceil(step * THREADS), token_ids.len(), 1];
        commands.dispatch(&pipeline, bindings, &numbers.map(|number| number as u32), grid)?;
    }
    Ok(())
}
