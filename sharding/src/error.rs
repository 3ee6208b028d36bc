//! Why a plan was refused.

/// A plan that cannot be made; each variant carries the numbers that disagree.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The policy text is not understood.
    #[error("sharding policy {text:?} is none of auto, tensor=N, pipeline=N, hybrid=TPxPP, replicas=N")]
    Policy {
        /// What was given.
        text: String,
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
    #[error("{degree} {asked} is more than the {possible} {parts} that the model can be cut into")]
    Degree {
        /// `tensor_parallel_size` or `pipeline_parallel_size`.
        degree: &'static str,
        /// Asked for.
        asked: usize,
        /// Most possible.
        possible: usize,
        /// What is counted.
        parts: String,
    },
    /// Fewer devices than ranks.
    #[error(
        "{replicas} replicas of tensor_parallel_size {tensor_parallel_size} × pipeline_parallel_size \
         {pipeline_parallel_size} need {} devices, the cluster has {devices}",
        replicas * tensor_parallel_size * pipeline_parallel_size
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
        "{device} has {available_bytes} bytes, its part needs {required_bytes}: weights {weight_bytes}, \
         {num_kv_blocks} KV blocks {kv_bytes} (for one sequence of {sequence_tokens} tokens), activations {activation_bytes}"
    )]
    Memory {
        /// Worker, local rank and name of the device.
        device: String,
        /// Memory of the device.
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
    },
}
