//! Why a plan was refused.

use crate::words::{count, format_bytes};

/// A plan that cannot be made; each variant carries the numbers that disagree.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The policy text is not understood.
    #[error("sharding policy {text:?}: {problem}")]
    Policy {
        /// What was given.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The encoded plan is damaged or of another version.
    #[error("shard plan cannot be decoded: {reason}")]
    Codec {
        /// What is wrong with it.
        reason: String,
    },
    /// A topology, or the text that describes one, is wrong.
    #[error("topology: {field}: {problem}")]
    Topology {
        /// The field or the part of the text.
        field: String,
        /// Expected and got.
        problem: String,
    },
    /// A model shape contradicts itself.
    #[error("model shape: {field}: {problem}")]
    Shape {
        /// The field.
        field: &'static str,
        /// Expected and got.
        problem: String,
    },
    /// A plan option is out of range.
    #[error("plan option {field}: {problem}")]
    Option {
        /// The option.
        field: &'static str,
        /// Expected and got.
        problem: String,
    },
    /// More tensor-parallel ranks or stages than the model can be cut into.
    #[error("{degree} {asked} is more than the {possible} {parts} that the model can be cut into{cause}")]
    Degree {
        /// `tensor_parallel_size` or `pipeline_parallel_size`.
        degree: &'static str,
        /// Asked for.
        asked: usize,
        /// Most possible.
        possible: usize,
        /// What is counted.
        parts: String,
        /// Why the parts are so large and what else would work, after a colon; empty if it goes without saying.
        cause: String,
    },
    /// Fewer devices than ranks.
    #[error(
        "{} of tensor_parallel_size {tensor_parallel_size} × pipeline_parallel_size {pipeline_parallel_size} \
         would need {}, the cluster has {devices}",
        count(*replicas, "replica"),
        count(replicas * tensor_parallel_size * pipeline_parallel_size, "device")
    )]
    Devices {
        /// Replicas asked for.
        replicas: usize,
        /// Ranks that share each layer.
        tensor_parallel_size: usize,
        /// Stages of layers.
        pipeline_parallel_size: usize,
        /// Devices there are.
        devices: usize,
    },
    /// A device is too small for its part.
    #[error(
        "device {device} has {} to use, its part needs {}: weights {}, {num_kv_blocks} KV blocks {} (for one sequence of \
         {sequence_tokens} tokens), activations {}{}",
        format_bytes(*available_bytes),
        format_bytes(*required_bytes),
        format_bytes(*weight_bytes),
        format_bytes(*kv_bytes),
        format_bytes(*activation_bytes),
        min_devices.map(|number| format!("; the model needs at least {number} such devices")).unwrap_or_default()
    )]
    Memory {
        /// Label and name of the device.
        device: String,
        /// Memory of the device that the plan may use.
        available_bytes: u64,
        /// Sum of the parts.
        required_bytes: u64,
        /// Slices of the weights.
        weight_bytes: u64,
        /// Blocks that are needed at least.
        num_kv_blocks: usize,
        /// Their bytes.
        kv_bytes: u64,
        /// Tokens that those blocks hold.
        sequence_tokens: usize,
        /// Activations of the largest step.
        activation_bytes: u64,
        /// Fewest devices of this size that could hold the model, if those of the plan are fewer.
        min_devices: Option<u64>,
    },
}
