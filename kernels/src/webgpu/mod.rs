//! The WebGPU device: GPUs through Vulkan, Metal and DX12, with kernels in WGSL that wgpu translates, and what a browser
//! gives to a page.
//! For: machines whose GPU is not NVIDIA's, or without CUDA; built with the feature `webgpu`, which needs no SDK and no GPU.
//! Invariant: everything that a GPU executes is ordered by the one queue of its [`Gpu`]; nothing is read back but what
//! [`Commands::read`](commands::Commands::read) asks for.
//! Not here: what the operations mean (`ops`). The device code is in `kernels/wgsl/*.wgsl`.
//!
//! - [`adapter`]: which GPUs are there; `browser`: the one of a page. [`gpu`]: an opened one: its queue, its limits, its pipelines;
//!   `kept_pipelines`: these on disk.
//! - [`source`]: the embedded device code and its variants. [`commands`]: dispatches of a step and their inputs.
//! - [`reading`]: what comes back, waited for or awaited. [`parameters`]: uniforms where there are no immediates.
//! - [`tensor`]: activations. [`matmul`] and so on: one operation a file, as in `ops`. [`attention_decode`]: how attention of one
//!   token is cut.
//! - [`WebGpuDevice`]: the operations, which add dispatches to a step.

#[cfg(not(target_family = "wasm"))]
pub mod adapter;
pub mod attention;
pub mod attention_decode;
#[cfg(target_family = "wasm")]
mod browser;
pub mod commands;
mod device;
mod elementwise;
pub mod gpu;
#[cfg(not(target_family = "wasm"))]
mod info;
#[cfg(not(target_family = "wasm"))]
mod kept_pipelines;
pub mod kv_cache;
pub mod matmul;
mod parameters;
mod reading;
mod rope_and_store;
pub mod sample;
pub mod source;
mod tensor;
pub mod variants;

pub use crate::adapter_id::{AdapterId, Backend};
#[cfg(not(target_family = "wasm"))]
pub use adapter::FoundAdapter;
pub use device::WebGpuDevice;
pub use gpu::Gpu;
pub use reading::Reading;
pub use tensor::WebGpuTensor;
