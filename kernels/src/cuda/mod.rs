//! The CUDA device: NVIDIA GPUs of compute capability 8.0 and above, through libraries opened at run time.
//! For: machines with such a GPU; built with the feature `cuda`, which needs neither a toolkit nor a GPU.
//! Invariant: no library is called before it was probed, every result code lands in `KernelError` with its name, and
//! everything that a GPU executes is ordered by the one stream of its [`Gpu`].
//! Not here: what the operations mean (`ops`). The device code is in `kernels/cuda/*.cu`.
//!
//! - [`probe`]: which libraries and GPUs are there. [`context`]: an opened GPU: its stream, its limits, its kernels.
//! - [`sources`]: the embedded device code. [`compiler`]: NVRTC, from source to cubin. [`KernelCache`]: cubins on disk.
//! - [`memory`]: plain device memory and pinned host memory. [`pool`]: scratch of operations.
//! - [`activations`]: what norms, attention and SwiGLU hand to matmuls.
//! - [`rms_norm`] and so on: one operation a file, as in `ops`. Each has a call, which holds all that decides the launch
//!   and shares its buffers, and a launcher. Equal calls are equal launches: that is how a recorded step is recognized.
//! - [`kv_cache`]: the paged cache of keys and values.
//! - [`CudaDevice`]: the operations, which add calls to a step; `step`: a step as a list of calls, launched or replayed.
//! - [`communicator`]: GPUs of several ranks that meet. `wait`: waits that end when one of them is lost.
//! - [`inputs`]: what changes from step to step, sent in one copy.
//! - [`one_shot`]: GPUs of a host that write to each other's memory, for sums over ranks.
//! - [`launch`]: kernels and their arguments. [`graph`]: whole steps recorded and replayed.

pub mod activations;
pub mod add;
pub mod attention;
mod call;
pub mod communicator;
pub mod compiler;
pub mod context;
pub mod convert;
mod device;
pub mod gather_rows;
pub mod graph;
mod info;
pub mod inputs;
pub mod kv_cache;
pub mod launch;
pub mod matmul;
pub mod memory;
pub mod one_shot;
pub mod pool;
pub mod probe;
mod rehearsal;
pub mod rms_norm;
pub mod rope_and_store;
pub mod sample;
pub mod sources;
mod staging;
mod step;
mod tensor;
mod wait;

pub use crate::kernel_cache::KernelCache;
pub use activations::{Activations, Forms, HalfType};
pub use communicator::{CollectiveCall, CudaCommunicator};
pub use context::Gpu;
pub use device::CudaDevice;
pub use graph::Graph;
pub use inputs::{InputSlice, StepInputs};
pub use kv_cache::{CudaKvCache, HostKvLayer};
pub use launch::{Argument, Kernel, Launch};
pub use memory::{DeviceBuffer, DevicePointer, PinnedBuffer, PinnedFlag};
pub use one_shot::OneShot;
pub use pool::{PoolStatistics, ScratchBuffer};
pub use staging::Staging;
pub use tensor::CudaTensor;
