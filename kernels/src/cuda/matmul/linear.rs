//! A linear layer on the GPU: stacked matrices, packed when the model is loaded.
//! For: `CudaDevice::linear`, and the launchers of this module.
//! Invariant: a part is whole groups of 8 rows of tiles (quantized types) or the checkpoint's own rows (F32, F16, BF16).
//! Not here: the layout of a tile (`layout`).

use std::sync::Arc;

use lockstep_formats::GgmlType;
use rayon::prelude::*;

use super::layout::{GROUP_ROWS, Layout, TILE_COLUMNS};
use crate::{
    KernelError,
    cuda::{DeviceBuffer, DevicePointer, Gpu},
    ops::HostMatrix,
};

/// Bytes that are packed before they are copied to the GPU.
const PIECE_BYTES: usize = 64 << 20;

/// A linear layer: matrices of equal width whose outputs are stacked.
#[derive(Debug, PartialEq)]
pub struct CudaLinear {
    pub(super) parts: Vec<Part>,
    rows: usize,
    columns: usize,
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Quantized, in tiles.
    Tiles(Layout),
    /// F32, F16 or BF16, as in the checkpoint.
    Plain(GgmlType),
}

impl Format {
    /// Whether one launch can do both.
    pub(super) fn goes_with(self, other: Self) -> bool {
        matches!((self, other), (Self::Tiles(_), Self::Tiles(_))) || self == other
    }
}

/// One matrix of a layer.
#[derive(Debug, PartialEq)]
pub(super) struct Part {
    pub(super) format: Format,
    pub(super) rows: usize,
    /// Its first row in the output of the layer.
    pub(super) first_row: usize,
    data: DeviceBuffer,
}

impl CudaLinear {
    /// Packs the matrices one after the other, each freed when it is done.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if lengths disagree, [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>, matrices: Vec<HostMatrix>) -> Result<Self, KernelError> {
        let columns = matrices.first().map_or(0, |matrix| matrix.columns);
        if columns == 0 {
            return Err(shape("columns of a linear layer", 0, 1));
        }
        let mut parts = Vec::with_capacity(matrices.len());
        let mut rows = 0;
        for matrix in matrices {
            if matrix.columns != columns {
                return Err(shape("columns of a stacked matrix", matrix.columns, columns));
            }
            let first_row = rows;
            rows += matrix.rows;
            // Rows that do not exist are no work for a kernel.
            if matrix.rows > 0 {
                parts.push(Part::new(gpu, matrix, first_row)?);
            }
        }
        Ok(Self { parts, rows, columns })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that the weights take on the GPU.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.data.num_bytes()).sum()
    }

    /// Tiles of a row of quantized weights.
    pub(super) fn num_tiles(&self) -> usize {
        self.columns.div_ceil(TILE_COLUMNS)
    }
}

impl Part {
    fn new(gpu: &Arc<Gpu>, matrix: HostMatrix, first_row: usize) -> Result<Self, KernelError> {
        let HostMatrix { ggml_type, rows, columns, bytes } = matrix;
        let row_bytes = ggml_type
            .bytes_of(columns)
            .ok_or_else(|| shape("columns (not a multiple of the block)", columns, ggml_type.block_elements()))?;
        if row_bytes.checked_mul(rows) != Some(bytes.len()) {
            return Err(shape("bytes of a matrix", bytes.len(), row_bytes.saturating_mul(rows)));
        }
        let (format, data) = match Layout::of(ggml_type) {
            None => (Format::Plain(ggml_type), DeviceBuffer::from_slice(gpu, &bytes)?),
            Some(layout) => (Format::Tiles(layout), pack(gpu, layout, ggml_type, columns, row_bytes, &bytes)?),
        };
        Ok(Self { format, rows, first_row, data })
    }

    /// Where its first row begins.
    pub(super) fn pointer(&self) -> DevicePointer {
        self.data.pointer()
    }
}

/// Packs rows group by group, all threads side by side, and copies them to the GPU piece by piece.
fn pack(
    gpu: &Arc<Gpu>,
    layout: Layout,
    ggml_type: GgmlType,
    columns: usize,
    row_bytes: usize,
    rows: &[u8],
) -> Result<DeviceBuffer, KernelError> {
    let group_bytes = columns.div_ceil(TILE_COLUMNS) * layout.tile_bytes();
    let source_bytes = row_bytes * GROUP_ROWS;
    let num_groups = rows.len().div_ceil(source_bytes);
    let data = DeviceBuffer::uninit(gpu, num_groups * group_bytes)?;
    let groups_each = (PIECE_BYTES / group_bytes).max(1);
    for (piece, rows) in rows.chunks(groups_each * source_bytes).enumerate() {
        let mut packed = vec![0_u8; rows.len().div_ceil(source_bytes) * group_bytes];
        let groups = packed.par_chunks_exact_mut(group_bytes).zip(rows.par_chunks(source_bytes));
        groups.for_each(|(group, rows)| layout.pack_group(ggml_type, row_bytes, rows, group));
        data.write(piece * groups_each * group_bytes, &packed)?;
    }
    Ok(data)
}

pub(super) fn shape(what: &'static str, got: usize, expected: usize) -> KernelError {
    KernelError::Shape { operation: "matmul", what, got, expected }
}
