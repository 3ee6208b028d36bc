//! What the operator asks of the planner.

use serde::{Deserialize, Serialize};

/// How to cut the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Parallelism {
    /// The planner chooses the degrees with the best estimate.
    Auto,
    /// Every replica has these degrees.
    Fixed {
        /// Ranks that share each layer.
        tensor_parallel_size: usize,
        /// Stages of layers.
        pipeline_parallel_size: usize,
    },
}

/// A sharding policy: `auto`, `tensor=N`, `pipeline=N`, `hybrid=TPxPP`, each optionally with `,replicas=N`; or `replicas=N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Degrees of a replica.
    pub parallelism: Parallelism,
    /// Number of replicas; `None`: as many as the devices allow.
    pub replicas: Option<usize>,
}

/// Sizes that a plan must leave room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Longest sequence served; `None`: the model's `max_position_embeddings`.
    pub max_sequence_tokens: Option<usize>,
    /// Most sequences in one step.
    pub max_num_sequences: usize,
    /// Most tokens in one step.
    pub max_step_tokens: usize,
    /// Bytes of one element of the KV cache (2: f16).
    pub kv_element_bytes: usize,
    /// KV blocks of a replica; `None`: what `max_num_sequences` average sequences need, bounded by memory.
    pub num_kv_blocks: Option<usize>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            block_size: 32,
            max_sequence_tokens: None,
            max_num_sequences: 64,
            max_step_tokens: 512,
            kv_element_bytes: 2,
            num_kv_blocks: None,
        }
    }
}
