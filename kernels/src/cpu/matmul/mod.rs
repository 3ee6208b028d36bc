//! The fused dequantizing matmul on the CPU.

/// A linear layer.
pub struct CpuLinear;
