//! The forward pass of one rank: it loads its slice of the model and obeys step plans.
//! For: the worker's rank threads, and pages that compute in a browser. No clock, no thread, no network.
//! Invariant: ranks decide nothing. Equal plans in equal order give equal calls, so collectives match.
//! Not here: which sequences run (the worker's engine), how ranks reach each other (who implements [`Peers`]).
//!
//! - [`step`]: what the leader tells the ranks and what they answer.
//! - [`shape`]: what one rank computes of each layer.
//! - [`weights`]: its slices of the checkpoint, on the device.
//! - [`batch`]: a checked step plan, laid out as the kernels want it.
//! - `decoder`: one layer. [`logits`]: from hidden rows to logits. [`executor`]: a whole step.
//! - [`peers`]: the other ranks that a rank meets inside a step. `rehearsal`: the steps that a device prepares for.

#![forbid(unsafe_code)]

pub mod batch;
mod decoder;
pub mod error;
pub mod executor;
pub mod logits;
pub mod peers;
mod rehearsal;
pub mod shape;
pub mod step;
pub mod weights;

pub use batch::{Batch, StepLimits};
pub use error::ExecutorError;
pub use executor::Executor;
pub use logits::Logits;
pub use peers::{Alone, Peers};
pub use shape::RankShape;
pub use weights::{WeightLoader, Weights};
