//! What one rank computes: its part of every dimension, derived from the plan once and checked against the model.
//! Invariant: a `RankShape` that was made is consistent; the executor does not check it again.

use std::ops::Range;

use lockstep_formats::Dtype;
use lockstep_model::ModelConfig;
use lockstep_sharding::{RankPlan, ReplicaPlan};

use crate::ExecutorError;

/// Dimensions of one rank's part of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct RankShape {
    /// Index over the whole replica.
    pub rank: usize,
    /// Index in its tensor-parallel group.
    pub tensor_parallel_rank: usize,
    /// Ranks that share its layers.
    pub tensor_parallel_size: usize,
    /// Index of its pipeline stage.
    pub pipeline_stage: usize,
    /// Stages of the replica.
    pub pipeline_parallel_size: usize,
    /// Layers computed here.
    pub layers: Range<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Query heads computed here.
    pub num_heads: usize,
    /// Key/value heads kept here.
    pub num_key_value_heads: usize,
    /// Query heads of the whole model that share a key/value head.
    pub group_size: usize,
    /// Place of the first query head inside its group.
    pub group_offset: usize,
    /// Columns of the feed-forward layer computed here.
    pub intermediate_size: usize,
    /// Rows of embedding and output head held here.
    pub vocabulary: Range<usize>,
    /// Token ids of the model.
    pub vocab_size: usize,
    /// Added to the mean square.
    pub rms_norm_eps: f32,
    /// Type of keys and values.
    pub dtype: Dtype,
}

impl RankShape {
    /// The part of `rank`.
    ///
    /// # Errors
    /// [`ExecutorError::Mismatch`] if the plan does not describe a part of this model.
    pub fn new(config: &ModelConfig, replica: &ReplicaPlan, rank: usize) -> Result<Self, ExecutorError> {
        let (pipeline_stage, plan) =
            replica.find_rank(rank).ok_or_else(|| ExecutorError::Mismatch(format!("it has no rank {rank}")))?;
        let stage = &replica.stages[pipeline_stage];
        let tensor_parallel_rank = stage.ranks.iter().position(|other| other.rank == rank).unwrap_or(0);
        let pipeline_parallel_size = replica.stages.len();
        check_ranges(config, plan, &stage.layers)?;
        let holds_vocabulary = pipeline_stage == 0 || pipeline_stage + 1 == pipeline_parallel_size;
        if holds_vocabulary {
            check_range(rank, "vocabulary rows", &plan.vocabulary, config.vocab_size)?;
        }
        let group_size = config.num_attention_heads / config.num_key_value_heads;
        Ok(Self {
            rank,
            tensor_parallel_rank,
            tensor_parallel_size: stage.ranks.len(),
            pipeline_stage,
            pipeline_parallel_size,
            layers: stage.layers.clone(),
            hidden_size: config.hidden_size,
            head_dim: config.head_dim,
            num_heads: plan.query_heads.len(),
            num_key_value_heads: plan.key_value_heads.len(),
            group_size,
            group_offset: plan.query_heads.start % group_size,
            intermediate_size: plan.intermediate.len(),
            vocabulary: plan.vocabulary.clone(),
            vocab_size: config.vocab_size,
            rms_norm_eps: config.rms_norm_eps,
            dtype: plan.dtype,
        })
    }

    /// Whether it embeds the tokens.
    pub fn is_first_stage(&self) -> bool {
        self.pipeline_stage == 0
    }

    /// Whether it computes logits.
    pub fn is_last_stage(&self) -> bool {
        self.pipeline_stage + 1 == self.pipeline_parallel_size
    }

    /// Width of the fused query, key and value rows.
    pub fn qkv_size(&self) -> usize {
        (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
    }
}

fn check_ranges(config: &ModelConfig, plan: &RankPlan, layers: &Range<usize>) -> Result<(), ExecutorError> {
    let heads = (config.num_attention_heads, config.num_key_value_heads);
    if heads.1 == 0 || !heads.0.is_multiple_of(heads.1) {
        return Err(ExecutorError::Mismatch(format!(
            "num_attention_heads {} is not divisible by num_key_value_heads {}",
            heads.0, heads.1
        )));
    }
    let group_size = heads.0 / heads.1;
    check_range(plan.rank, "layers", layers, config.num_hidden_layers)?;
    check_range(plan.rank, "query heads", &plan.query_heads, heads.0)?;
    check_range(plan.rank, "intermediate columns", &plan.intermediate, config.intermediate_size)?;
    let needed = plan.query_heads.start / group_size..plan.query_heads.end.div_ceil(group_size);
    if plan.key_value_heads != needed {
        return Err(ExecutorError::Mismatch(format!(
            "rank {}: key/value heads are {:?}, query heads {:?} need {needed:?}",
            plan.rank, plan.key_value_heads, plan.query_heads
        )));
    }
    Ok(())
}

fn check_range(rank: usize, what: &str, range: &Range<usize>, limit: usize) -> Result<(), ExecutorError> {
    if range.is_empty() || range.end > limit {
        return Err(ExecutorError::Mismatch(format!("rank {rank}: {what} {range:?} are empty or exceed {limit}")));
    }
    Ok(())
}
