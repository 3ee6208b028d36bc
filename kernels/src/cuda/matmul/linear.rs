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
    cuda::{DeviceBuffer, DevicePointer, Gpu, Staging},
    ops::{HostMatrix, matmul::stacked_columns},
};

/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

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
    /// A single layer, as [`upload`](Self::upload) makes it.
    ///
    /// # Errors
    /// Those of [`upload`](Self::upload).
    pub fn new(gpu: &Arc<Gpu>, matrices: Vec<HostMatrix>) -> Result<Self, KernelError> {
        Self::upload(&mut Staging::new(gpu), matrices)
    }

    /// Packs the matrices one after the other, each freed when it is done.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if lengths disagree, [`KernelError::Device`] if memory is short.
    pub fn upload(staging: &mut Staging, matrices: Vec<HostMatrix>) -> Result<Self, KernelError> {
        let columns = stacked_columns(&matrices)?;
        let mut parts = Vec::with_capacity(matrices.len());
        let mut rows = 0;
        for matrix in matrices {
            let first_row = rows;
            rows += matrix.rows;
            // Rows that do not exist are no work for a kernel.
            if matrix.rows > 0 {
                parts.push(Part::new(staging, matrix, first_row)?);
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
    fn new(staging: &mut Staging, matrix: HostMatrix, first_row: usize) -> Result<Self, KernelError> {
        let row_bytes = matrix.row_bytes()?;
        let HostMatrix { ggml_type, rows, columns, bytes } = matrix;
        let (format, data) = match Layout::of(ggml_type) {
            None => (Format::Plain(ggml_type), copy(staging, &bytes)?),
            Some(layout) => (Format::Tiles(layout), pack(staging, layout, ggml_type, columns, row_bytes, &bytes)?),
        };
        Ok(Self { format, rows, first_row, data })
    }

    /// Where its first row begins.
    pub(super) fn pointer(&self) -> DevicePointer {
        self.data.pointer()
    }
}

/// Copies rows as they are.
fn copy(staging: &mut Staging, rows: &[u8]) -> Result<DeviceBuffer, KernelError> {
    staging.upload(rows.len(), 1, |start, target| {
        let pieces = target.par_chunks_mut(COPY_BYTES).zip(rows[start..].par_chunks(COPY_BYTES));
        pieces.for_each(|(target, rows)| target.copy_from_slice(&rows[..target.len()]));
    })
}

/// Packs rows group by group, all threads side by side.
fn pack(
    staging: &mut Staging,
    layout: Layout,
    ggml_type: GgmlType,
    columns: usize,
    row_bytes: usize,
    rows: &[u8],
) -> Result<DeviceBuffer, KernelError> {
    let group_bytes = columns.div_ceil(TILE_COLUMNS) * layout.tile_bytes();
    let source_bytes = row_bytes * GROUP_ROWS;
    let num_groups = rows.len().div_ceil(source_bytes);
    staging.upload(num_groups * group_bytes, group_bytes, |start, target| {
        let rows = &rows[start / group_bytes * source_bytes..];
        let groups = target.par_chunks_exact_mut(group_bytes).zip(rows.par_chunks(source_bytes));
        groups.for_each(|(group, rows)| {
            group.fill(0);
            layout.pack_group(ggml_type, row_bytes, rows, group);
        });
    })
}
