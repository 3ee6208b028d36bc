//! The WebGPU device: GPUs through Vulkan, Metal and DX12, with kernels in WGSL that wgpu translates.
//! For: machines whose GPU is not NVIDIA's, or without CUDA; built with the feature `webgpu`, which needs no SDK and no GPU.
//! Invariant: everything that a GPU executes is ordered by the one queue of its [`Gpu`]; nothing is read back but what
//! [`Commands::read`](commands::Commands::read) asks for.
//! Not here: what the operations mean (`ops`). The device code is in `kernels/wgsl/*.wgsl`.
//!
//! - [`adapter`]: which GPUs are there. [`gpu`]: an opened one: its queue, its limits, its pipelines.
//! - [`source`]: the embedded device code and its variants. [`commands`]: dispatches of a step and their inputs.
//! - [`tensor`]: activations. [`matmul`] and so on: one operation a file, as in `ops`.
//! - [`WebGpuDevice`]: the operations, which add dispatches to a step.

pub mod adapter;
pub mod attention;
pub mod commands;
mod device;
mod elementwise;
pub mod gpu;
mod info;
pub mod kv_cache;
pub mod matmul;
mod rope_and_store;
pub mod sample;
pub mod source;
mod tensor;
pub mod variants;

pub use crate::adapter_id::{AdapterId, Backend};
pub use adapter::FoundAdapter;
pub use device::WebGpuDevice;
pub use gpu::Gpu;
pub use tensor::WebGpuTensor;
