//! The thread that owns a device: it loads its slice of the model and obeys step plans.
//! For: [`replica`](crate::replica), which starts one for each local device.
//! Invariant: ranks decide nothing. Equal plans in equal order give equal calls, so collectives match.
//! Not here: which sequences run (the engine), how bytes travel (the collective).
//!
//! - [`shape`]: what one rank computes of each layer.
//! - [`weights`]: its slices of the checkpoint, on the device.
//! - [`batch`]: a checked step plan, laid out as the kernels want it.
//! - [`decoder`]: one layer. [`logits`]: from hidden rows to candidates. [`executor`]: a whole step.
//! - [`peers`]: the other ranks that a rank meets inside a step. [`traffic`]: what it gave to them. `rehearsal`: the steps that a device prepares for.

pub mod batch;
mod decoder;
pub mod executor;
mod logits;
pub mod peers;
mod rehearsal;
pub mod shape;
pub mod traffic;
pub mod weights;

pub use batch::{Batch, StepLimits};
pub use executor::Executor;
pub use peers::RankPeers;
pub use shape::RankShape;
pub use traffic::Traffic;
pub use weights::Weights;
