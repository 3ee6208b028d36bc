//! Devices and their fused kernels. Leaf crate: it knows no model names, no ranks, no network.
//!
//! - [`adapter_id`]: names of GPUs that are not reached through CUDA.
//! - [`device`]: trait [`Device`], the dozen operations that a forward step is made of.
//! - [`group`]: what it takes for the devices of several ranks to meet.
//! - [`ops`]: the contract of each operation: parameters, shapes, and `check()`; no device code.
//! - [`quant`]: what the bits of each GGUF block mean: reference dequantization, quantization of activations.
//! - [`mod@reference`]: plain-loop oracles, slow and obvious, for tests.
//! - [`cpu`]: the CPU device, SIMD chosen at run time.
//! - `cuda`: NVIDIA GPUs (feature `cuda`).
//! - `webgpu`: GPUs through Vulkan, Metal and DX12, and those of browsers (feature `webgpu`).
//!
//! Invariants: a call that passes `check` stays inside its buffers; weights stay quantized in memory;
//! the result for one token does not depend on which other tokens share the call.

pub mod adapter_id;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod error;
pub mod group;
#[cfg(any(feature = "cuda", all(feature = "webgpu", not(target_family = "wasm"))))]
pub mod kernel_cache;
pub mod ops;
pub mod quant;
pub mod reference;
#[cfg(feature = "webgpu")]
pub mod webgpu;

pub use device::Device;
pub use error::KernelError;
