//! What the bits of each GGUF block mean, and how activations are quantized.
//!
//! - [`blocks`]: a block taken apart into quants, scales and minima; reference dequantization.
//! - [`mod@planes`]: quants in bit planes, as kernels unpack them.
//! - [`activations`]: the 8-bit blocks that activations are turned into before an integer product.
//!
//! Source: `ggml-common.h` and `ggml-quants.c` of ggml.

pub mod activations;
pub mod blocks;
pub mod planes;

pub use activations::{ACTIVATION_BLOCK, quantize_block};
pub use blocks::{BlockParts, Encoding, dequantize};
pub use planes::planes;
