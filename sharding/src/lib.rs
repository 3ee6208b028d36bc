//! Pure planning: model shape + cluster topology + policy → shard plan. No I/O, no clock, no randomness.

#![forbid(unsafe_code)]

pub mod codec;
mod cost;
pub mod error;
pub mod explain;
mod memory;
mod pipeline;
pub mod plan;
pub mod planner;
pub mod policy;
mod replica;
pub mod shape;
mod split;
mod table;
pub mod topology;
mod words;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use lockstep_formats::{Dtype, PeerLink};

pub use codec::{decode, decode_shape, encode, encode_shape};
pub use error::PlanError;
pub use explain::Explanation;
pub use plan::{RankPlan, ReplicaPlan, ShardPlan, StagePlan, TensorSlice};
pub use planner::plan;
pub use policy::{Parallelism, PlanOptions, Policy};
pub use shape::{ModelShape, TensorRole, TensorShape};
pub use topology::{DeviceSpec, LinkSpec, Topology, usable_bytes};
pub use words::format_bytes;
