//! Contract of the fused dequantizing matmul: `output = input × weightᵀ`, then an epilogue.
//! For: every linear layer, the fused QKV and gate/up pairs, and the output head.
//! A linear layer may be stacked from several matrices that share an input; their types may differ.

use lockstep_formats::GgmlType;

use crate::KernelError;

/// Rows of one matrix on the host, as the checkpoint stores them: `[rows, columns]`, row-major blocks of `ggml_type`.
#[derive(Clone, Debug)]
pub struct HostMatrix {
    /// Element type of `bytes`.
    pub ggml_type: GgmlType,
    /// Output features.
    pub rows: usize,
    /// Input features, a multiple of the type's block.
    pub columns: usize,
    /// `rows * ggml_type.bytes_of(columns)` bytes.
    pub bytes: Vec<u8>,
}

impl HostMatrix {
    /// Bytes of a row.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a row ends within a block, or `bytes` has not the length that the rows take.
    pub(crate) fn row_bytes(&self) -> Result<usize, KernelError> {
        let Self { ggml_type, rows, columns, bytes } = self;
        let row_bytes = ggml_type
            .bytes_of(*columns)
            .ok_or_else(|| shape("columns (not a multiple of the block)", *columns, ggml_type.block_elements()))?;
        if row_bytes.checked_mul(*rows) != Some(bytes.len()) {
            return Err(shape("bytes of a matrix", bytes.len(), row_bytes.saturating_mul(*rows)));
        }
        Ok(row_bytes)
    }
}

/// Columns of the matrices that a linear layer stacks.
///
/// # Errors
/// [`KernelError::Shape`] if there are none, or they disagree.
pub(crate) fn stacked_columns(matrices: &[HostMatrix]) -> Result<usize, KernelError> {
    let columns = matrices.first().map_or(0, |matrix| matrix.columns);
    if columns == 0 {
        return Err(shape("columns of a linear layer", 0, 1));
    }
    match matrices.iter().find(|matrix| matrix.columns != columns) {
        Some(matrix) => Err(shape("columns of a stacked matrix", matrix.columns, columns)),
        None => Ok(columns),
    }
}

/// What a matmul was given and cannot take.
pub(crate) fn shape(what: &'static str, got: usize, expected: usize) -> KernelError {
    KernelError::Shape { operation: "matmul", what, got, expected }
}

/// What happens to the product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `output[t, r] = product`
    Store,
    /// The layer stacks gate then up, each half of the rows: `output[t, r] = silu(gate[t, r]) * up[t, r]`,
    /// `r < rows / 2`.
    SwiGlu,
}
