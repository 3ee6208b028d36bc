//! Pure planning: model shape + cluster topology + policy → shard plan. No I/O, no clock, no randomness.

pub mod codec;
pub mod error;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod shape;
pub mod topology;

pub use codec::{decode, encode};
pub use error::PlanError;
pub use plan::{RankPlan, ReplicaPlan, ShardPlan, StagePlan, TensorSlice};
pub use planner::plan;
pub use policy::{Parallelism, PlanOptions, Policy};
pub use shape::{ModelShape, TensorRole, TensorShape};
pub use topology::{DeviceSpec, LinkSpec, Topology};
