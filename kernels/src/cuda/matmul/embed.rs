//! Rows of an embedding table. Device code: `cuda/embed.cu`.
//! For: the first operation of a step. Invariant: values are those of the checkpoint's blocks, bit for bit.

use std::sync::Arc;

use super::{Matmul, arguments::LayerView, layout::TILE_COLUMNS, linear::CudaLinear};
use crate::{
    KernelError,
    cuda::{Argument, DeviceBuffer, InputSlice, Launch, sources::Source},
    ops::matmul::shape,
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "embed.cu",
    text: include_str!("../../../cuda/embed.cu"),
    variants: &["-DFORMATS=Q4_K", "-DFORMATS=Q8_0", "-DWEIGHT=F32", "-DWEIGHT=BF16"],
};

const OPERATION: &str = "embed";
const NUM_THREADS: usize = 256;
/// Tiles that a block makes.
const BLOCK_TILES: usize = 64;

/// `output[t] = table[token_ids[t] - first_row]`, or zeros for an id outside the table's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedCall {
    /// Rows to copy.
    pub num_tokens: usize,
    /// The table.
    pub table: Arc<CudaLinear>,
    /// Token of the table's first row.
    pub first_row: u32,
    /// `[num_tokens]` u32.
    pub token_ids: InputSlice,
    /// `[num_tokens, table.columns()]` f32.
    pub output: Arc<DeviceBuffer>,
}

impl Matmul {
    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small, [`KernelError::Device`] if a launch fails.
    pub fn embed(&self, call: &EmbedCall) -> Result<(), KernelError> {
        let EmbedCall { num_tokens, ref table, first_row, ref token_ids, ref output } = *call;
        let columns = table.columns();
        output.expect_bytes(OPERATION, "bytes of the output", num_tokens * columns * size_of::<f32>())?;
        token_ids.expect_bytes(OPERATION, "bytes of the token ids", num_tokens * size_of::<u32>())?;
        let width = u32::try_from(columns).map_err(|_| shape("columns", columns, u32::MAX as usize))?;
        for (index, layer) in LayerView::each(table).iter().enumerate() {
            let (option, num_blocks) = match layer.plain_type() {
                Some(ggml_type) => (format!("-DWEIGHT={ggml_type}"), columns.div_ceil(NUM_THREADS)),
                None => (layer.formats(), columns.div_ceil(BLOCK_TILES * TILE_COLUMNS)),
            };
            let kernel = self.gpu.kernel(&SOURCE, &[option], OPERATION)?;
            let launch =
                Launch { grid: [num_blocks as u32, num_tokens as u32, 1], ..Launch::blocks(0, NUM_THREADS as u32) };
            let layer = layer.argument(1)?;
            let arguments = [
                Argument::Struct(bytemuck::bytes_of(&layer)),
                token_ids.pointer().into(),
                first_row.into(),
                u32::from(index == 0).into(),
                width.into(),
                (&**output).into(),
            ];
            // SAFETY: the kernel's arguments; it reads `num_tokens` ids and writes as many rows, which were
            // checked, and reads rows that the table has.
            unsafe { kernel.launch(&self.gpu, launch, &arguments)? };
        }
        Ok(())
    }
}
