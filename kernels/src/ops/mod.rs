//! Contracts of the operations: parameters, shapes, `check()`. An operation has one name in every backend.

pub mod attention;
pub mod matmul;
pub mod rope_and_store;
pub mod sample;

pub use attention::{Attention, AttentionSequence};
pub use matmul::{Epilogue, HostMatrix};
pub use rope_and_store::{RopeAndStore, RopeStyle, RopeTable};
pub use sample::{Candidates, SampleRow, TokenPenalty};

use crate::{KernelError, device::KvCacheSpec};

/// Largest head that a device has to support.
pub const MAX_HEAD_DIM: usize = 512;

/// The heads of a fused `qkv` row, as both operations on the cache state them.
struct HeadLayout {
    operation: &'static str,
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
}

impl HeadLayout {
    fn check(&self, spec: &KvCacheSpec, layer: usize, qkv_width: usize) -> Result<(), KernelError> {
        let operation = self.operation;
        expect_below(operation, "head_dim", self.head_dim, MAX_HEAD_DIM + 1)?;
        expect_below(operation, "layer", layer, spec.num_layers)?;
        expect_equal(operation, "num_key_value_heads", self.num_key_value_heads, spec.num_key_value_heads)?;
        expect_equal(operation, "head_dim", self.head_dim, spec.head_dim)?;
        for (what, got) in [("num_heads", self.num_heads), ("head_dim", self.head_dim)] {
            if got == 0 {
                return Err(KernelError::Shape { operation, what, got, expected: 1 });
            }
        }
        let width = self
            .num_key_value_heads
            .checked_mul(2)
            .and_then(|heads| heads.checked_add(self.num_heads))
            .and_then(|heads| heads.checked_mul(self.head_dim))
            .unwrap_or(usize::MAX);
        expect_equal(operation, "qkv width", qkv_width, width)
    }
}

fn expect_equal(operation: &'static str, what: &'static str, got: usize, expected: usize) -> Result<(), KernelError> {
    if got == expected { Ok(()) } else { Err(KernelError::Shape { operation, what, got, expected }) }
}

fn expect_below(operation: &'static str, what: &'static str, got: usize, limit: usize) -> Result<(), KernelError> {
    if got < limit { Ok(()) } else { Err(KernelError::OutOfRange { operation, what, got, limit }) }
}
