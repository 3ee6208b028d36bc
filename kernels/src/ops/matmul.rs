//! Contract of the fused dequantizing matmul: `output = input × weightᵀ`, then an epilogue.
//! For: every linear layer, the fused QKV and gate/up pairs, and the output head.
//! A linear layer may be stacked from several matrices that share an input; their types may differ.

use lockstep_formats::GgmlType;

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

/// What happens to the product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// `output[t, r] = product`
    Store,
    /// The layer stacks gate then up, each half of the rows: `output[t, r] = silu(gate[t, r]) * up[t, r]`,
    /// `r < rows / 2`.
    SwiGlu,
}
