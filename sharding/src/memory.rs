//! Bytes that a rank's part takes on its device.
//! Invariant: weights are exact (the slices as stored); KV blocks are exact; activations are an upper estimate of the
//! executor's buffers for the largest step.

use lockstep_formats::Dtype;

use crate::{
    ModelShape, PlanOptions, RankPlan, TensorRole,
    plan::{StagePosition, slice_of},
};

/// Bytes of an activation element.
const ACTIVATION_ELEMENT_BYTES: u64 = 4;
/// Rows `[max_step_tokens, hidden_size]` that a step holds at once: residual, normed input, output of a layer half
/// (f64, hence two), received activations, and quantized input (a fourth of a row) rounded up.
const HIDDEN_ROWS: u64 = 6;
/// What a rank needs beside weights, KV and activations: code, sockets, allocator.
pub(crate) const OVERHEAD_BYTES: u64 = 16 << 20;

/// What a rank holds of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct WeightUse {
    /// All of its slices.
    pub bytes: u64,
    /// Those that every step reads whole: not the embedding table, of which a step reads a few rows.
    pub step_bytes: u64,
    /// Multiply-adds of one token.
    pub multiply_adds: u64,
    /// Bytes and multiply-adds of the output head, which only sampled tokens need.
    pub head_bytes: u64,
    pub head_multiply_adds: u64,
}

impl WeightUse {
    pub fn of(shape: &ModelShape, stage: &StagePosition, rank: &RankPlan) -> Self {
        let mut sum = Self::default();
        let is_tied = shape.has_tied_embeddings();
        for tensor in &shape.tensors {
            let Some(slice) = slice_of(shape, tensor, stage, rank) else { continue };
            let blocks = slice.columns.len() / tensor.ggml_type.block_elements();
            let bytes = (slice.rows.len() * blocks * tensor.ggml_type.block_bytes()) as u64;
            let elements = (slice.rows.len() * slice.columns.len()) as u64;
            sum.bytes += bytes;
            let is_head = tensor.role == TensorRole::Output || (tensor.role == TensorRole::TokenEmbedding && is_tied);
            if is_head && stage.is_last {
                sum.head_bytes += bytes;
                sum.head_multiply_adds += elements;
            } else if tensor.role != TensorRole::TokenEmbedding {
                sum.step_bytes += bytes;
                sum.multiply_adds += if tensor.rows > 1 { elements } else { 0 };
            }
        }
        sum
    }
}

/// Bytes of one KV block on a rank: keys and values of all its layers.
pub(crate) fn kv_block_bytes(shape: &ModelShape, options: &PlanOptions, num_layers: usize, rank: &RankPlan) -> u64 {
    options.block_size as u64 * kv_token_bytes(shape, rank.dtype, num_layers, rank.key_value_heads.len())
}

/// Bytes of the keys and values of one token.
pub(crate) fn kv_token_bytes(shape: &ModelShape, dtype: Dtype, num_layers: usize, num_key_value_heads: usize) -> u64 {
    (num_layers * num_key_value_heads * shape.head_dim * 2 * dtype.element_bytes()) as u64
}

/// Bytes set aside for activations of the largest step.
pub(crate) fn activation_bytes(shape: &ModelShape, options: &PlanOptions, rank: &RankPlan, is_last: bool) -> u64 {
    let heads = (2 * rank.query_heads.len() + 2 * rank.key_value_heads.len()) * shape.head_dim;
    let widths = HIDDEN_ROWS * shape.hidden_size as u64 + heads as u64 + 3 * rank.intermediate.len() as u64;
    let logits = if is_last { options.max_num_sequences * rank.vocabulary.len() } else { 0 };
    OVERHEAD_BYTES + ACTIVATION_ELEMENT_BYTES * (options.step_tokens() as u64 * widths + logits as u64)
}
