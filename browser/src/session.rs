//! [`Session`]: one sequence, computed by one rank that has the whole model.
//! For: the page's engine, and tests, which compute the same on the processor.
//! Invariant: the tokens given so far are in the KV cache, and the next ones follow them.

use std::{cell::Cell, ops::ControlFlow};

use lockstep_executor::{
    Alone, Executor, ExecutorError, Logits, RankShape, StepLimits, WeightLoader,
    step::{StepPlan, StepSequence},
};
use lockstep_formats::Dtype;
use lockstep_kernels::{Device, ops::SampleRow};
use lockstep_model::Checkpoint;
use lockstep_sharding::{ModelShape, RankPlan, ReplicaPlan, StagePlan};

/// Most tokens of a step: enough for tiles, few enough for small GPUs.
const MAX_STEP_TOKENS: usize = 64;
/// Tokens of a KV block.
const BLOCK_SIZE: usize = 32;

/// The best token, without noise.
const GREEDY: SampleRow =
    SampleRow { top_k: 1, temperature: 1.0, noise_seed: None, penalties: Vec::new(), raw_top_k: 0 };

/// A model on a device, and the one sequence that it computes.
pub struct Session<D: Device> {
    executor: Executor<D, Alone>,
    block_table: Vec<u32>,
    num_tokens: u32,
    num_steps: u64,
}

impl<D: Device> Session<D> {
    /// Loads all weights, with a KV cache for sequences of up to `max_tokens`. `progress` is told how many of how many
    /// bytes were read.
    ///
    /// # Errors
    /// [`ExecutorError`] if the checkpoint cannot be read or the device's memory is short.
    pub fn load(
        device: D,
        checkpoint: &Checkpoint,
        max_tokens: usize,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Self, ExecutorError> {
        let config = checkpoint.config();
        let max_tokens = max_tokens.min(config.max_position_embeddings);
        let limits = StepLimits {
            vocab_size: config.vocab_size,
            num_kv_blocks: max_tokens.div_ceil(BLOCK_SIZE),
            block_size: BLOCK_SIZE,
            max_num_sequences: 1,
            max_step_tokens: MAX_STEP_TOKENS,
            max_sequence_tokens: max_tokens,
        };
        let plan = whole(checkpoint.shape(), limits.num_kv_blocks);
        let shape = RankShape::new(config, &plan, 0)?;
        let read = Cell::new(0);
        let mut loader = WeightLoader {
            device: &device,
            checkpoint,
            plan: &plan,
            shape: &shape,
            progress: &|_| ControlFlow::Continue(()),
        };
        let total = loader.total_bytes();
        let count = |num_bytes| {
            read.set(read.get() + num_bytes);
            progress(read.get(), total);
            ControlFlow::Continue(())
        };
        loader.progress = &count;
        let weights = loader.load()?;
        let executor = Executor::new(device, config, shape, limits, weights, Alone)?;
        let block_table = (0..limits.num_kv_blocks as u32).collect();
        Ok(Self { executor, block_table, num_tokens: 0, num_steps: 0 })
    }

    /// Forgets the sequence: the next tokens begin another.
    pub fn restart(&mut self) {
        self.num_tokens = 0;
    }

    /// Computes the next tokens of the sequence and hands the logits of the last one, one row, to `finish`.
    ///
    /// # Errors
    /// [`ExecutorError`] if there are none or too many, or the device fails.
    pub fn advance<T>(
        &mut self,
        token_ids: &[u32],
        finish: impl FnOnce(&mut D, Logits<'_, D>) -> Result<T, ExecutorError>,
    ) -> Result<T, ExecutorError> {
        let num_before = token_ids.len().saturating_sub(1) / MAX_STEP_TOKENS * MAX_STEP_TOKENS;
        let (before, last) = token_ids.split_at(num_before);
        for chunk in before.chunks(MAX_STEP_TOKENS) {
            let plan = self.plan(chunk, None);
            self.executor.execute_with(&plan, |_, _| Ok(()))?;
            self.num_tokens += chunk.len() as u32;
        }
        let plan = self.plan(last, Some(GREEDY));
        let finished = self.executor.execute_with(&plan, finish)?;
        self.num_tokens += last.len() as u32;
        finished.ok_or_else(|| ExecutorError::Mismatch("the only stage is not the last".to_owned()))
    }

    fn plan(&mut self, token_ids: &[u32], sample: Option<SampleRow>) -> StepPlan {
        let sequence = StepSequence {
            sequence_id: 0,
            first_position: self.num_tokens,
            token_ids: token_ids.to_vec(),
            block_table: self.block_table.clone(),
            sample,
        };
        self.num_steps += 1;
        StepPlan { step_id: self.num_steps - 1, sequences: vec![sequence], trace: None }
    }
}

/// All of the model on one rank.
fn whole(shape: &ModelShape, num_kv_blocks: usize) -> ReplicaPlan {
    let rank = RankPlan {
        query_heads: 0..shape.num_attention_heads,
        key_value_heads: 0..shape.num_key_value_heads,
        intermediate: 0..shape.intermediate_size,
        vocabulary: 0..shape.vocab_size,
        dtype: Dtype::F16,
        ..RankPlan::default()
    };
    ReplicaPlan { stages: vec![StagePlan { layers: 0..shape.num_hidden_layers, ranks: vec![rank] }], num_kv_blocks }
}
