//! A model in a page: the same steps as a worker's rank, on the browser's GPU.
//! For: the page `/browser` that a coordinator serves (`coordinator::api::browser`), through `browser/worker.js`.
//! Invariant: nothing here waits; what the GPU takes time for is awaited.
//! Not here: kernels, layers, tokenizers: those are the crates' that a worker uses.
//!
//! - [`session`]: one sequence on any device. `engine`: what the page calls (WebAssembly only).

#[cfg(target_family = "wasm")]
mod engine;
pub mod session;

pub use session::Session;
