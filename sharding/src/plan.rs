//! The result of planning: which rank holds which part of the model.
//! For: the coordinator publishes it, workers load by it, `lockstep plan` explains it.
//! Invariant: within a replica each query head, intermediate column, vocabulary row and layer has exactly one owner
//! (along its tensor-parallel group and pipeline stage); only key/value heads, norms and rope tables are replicated.

use std::ops::Range;

use lockstep_formats::Dtype;
use serde::{Deserialize, Serialize};

use crate::shape::{ModelShape, TensorRole, TensorShape};

/// How one model is cut over a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardPlan {
    /// Tokens in a KV block, the same on every rank.
    pub block_size: usize,
    /// Longest sequence that a replica serves, in tokens.
    pub max_sequence_tokens: usize,
    /// Most sequences in one step.
    pub max_num_sequences: usize,
    /// Most tokens in one step (prefill chunks and decodes together).
    pub max_step_tokens: usize,
    /// Why this plan, in words.
    pub reason: String,
    /// Full copies of the model.
    pub replicas: Vec<ReplicaPlan>,
}

/// One full copy of the model: pipeline stages of tensor-parallel ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaPlan {
    /// Stages in the order of the layers.
    pub stages: Vec<StagePlan>,
    /// KV blocks of the replica: the least over its ranks, since every rank mirrors the same block table.
    pub num_kv_blocks: usize,
}

/// The ranks that share a range of layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Its tensor-parallel group, in order of their slices.
    pub ranks: Vec<RankPlan>,
}

/// What one device holds and is expected to cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// Index over the whole replica, stage by stage; rank 0 leads.
    pub rank: usize,
    /// Index into [`Topology::devices`](crate::topology::Topology).
    pub device: usize,
    /// Worker process of the device.
    pub worker_id: String,
    /// Index of the device within its worker.
    pub local_rank: usize,
    /// Query heads computed here.
    pub query_heads: Range<usize>,
    /// Key/value heads kept here: those that `query_heads` need.
    pub key_value_heads: Range<usize>,
    /// Columns of the feed-forward layer computed here.
    pub intermediate: Range<usize>,
    /// Rows of the embedding and output head held here (first and last stage).
    pub vocabulary: Range<usize>,
    /// Type of its keys and values.
    pub dtype: Dtype,
    /// Why this type, in words.
    pub dtype_reason: String,
    /// Bytes of its slices of the weights, as stored.
    pub weight_bytes: u64,
    /// Bytes of its KV blocks.
    pub kv_bytes: u64,
    /// Bytes set aside for activations.
    pub activation_bytes: u64,
    /// Estimated time of one decode step of one sequence on this rank, communication included.
    pub decode_step_ms: f64,
    /// Estimated time of a prefill step of `max_step_tokens` tokens.
    pub prefill_step_ms: f64,
    /// What bound the rank's share, in words.
    pub bound_by: String,
}

/// A rectangle of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSlice {
    /// Rows `[start, end)`.
    pub rows: Range<usize>,
    /// Columns `[start, end)`, on block borders.
    pub columns: Range<usize>,
}

impl ReplicaPlan {
    /// Ranks of all stages.
    pub fn world_size(&self) -> usize {
        self.stages.iter().map(|stage| stage.ranks.len()).sum()
    }

    /// Index of the stage that `rank` belongs to, and its plan.
    pub fn find_rank(&self, rank: usize) -> Option<(usize, &RankPlan)> {
        self.stages
            .iter()
            .enumerate()
            .find_map(|(index, stage)| stage.ranks.iter().find(|plan| plan.rank == rank).map(|plan| (index, plan)))
    }

    /// The rectangle of `tensor` that `rank` holds, or `None` if it holds none of it.
    ///
    /// Vocabulary: the first stage holds its rows of the token embedding, the last stage its rows of the output head
    /// (of the token embedding when tied).
    pub fn slice(&self, shape: &ModelShape, tensor: &TensorShape, rank: usize) -> Option<TensorSlice> {
        let (stage_index, plan) = self.find_rank(rank)?;
        let position = StagePosition {
            layers: self.stages[stage_index].layers.clone(),
            is_first: stage_index == 0,
            is_last: stage_index + 1 == self.stages.len(),
        };
        slice_of(shape, tensor, &position, plan)
    }
}

/// Where a stage stands in its replica.
pub(crate) struct StagePosition {
    pub layers: Range<usize>,
    pub is_first: bool,
    pub is_last: bool,
}

/// The rectangle of `tensor` that a rank of a stage holds; see [`ReplicaPlan::slice`].
pub(crate) fn slice_of(
    shape: &ModelShape,
    tensor: &TensorShape,
    stage: &StagePosition,
    plan: &RankPlan,
) -> Option<TensorSlice> {
    if let Some(layer) = tensor.layer
        && !stage.layers.contains(&layer)
    {
        return None;
    }
    let whole_rows = 0..tensor.rows;
    let whole_columns = 0..tensor.columns;
    let heads = |range: &Range<usize>| range.start * shape.head_dim..range.end * shape.head_dim;
    let (rows, columns) = match tensor.role {
        TensorRole::TokenEmbedding if stage.is_first || (stage.is_last && shape.has_tied_embeddings()) => {
            (plan.vocabulary.clone(), whole_columns)
        }
        TensorRole::Output if stage.is_last => (plan.vocabulary.clone(), whole_columns),
        TensorRole::OutputNorm if stage.is_last => (whole_rows, whole_columns),
        TensorRole::TokenEmbedding | TensorRole::Output | TensorRole::OutputNorm => return None,
        TensorRole::Query => (heads(&plan.query_heads), whole_columns),
        TensorRole::Key | TensorRole::Value => (heads(&plan.key_value_heads), whole_columns),
        TensorRole::AttentionOutput => (whole_rows, heads(&plan.query_heads)),
        TensorRole::Gate | TensorRole::Up => (plan.intermediate.clone(), whole_columns),
        TensorRole::Down => (whole_rows, plan.intermediate.clone()),
        TensorRole::AttentionNorm | TensorRole::FeedForwardNorm | TensorRole::RopeFrequencies => {
            (whole_rows, whole_columns)
        }
    };
    Some(TensorSlice { rows, columns })
}
