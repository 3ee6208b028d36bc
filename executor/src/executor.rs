//! A whole step on one rank: embed or receive, the layers, send on or sample.
//! Invariant: the calls of a step, collectives included, follow from the step plan and the rank's shape alone.

use lockstep_kernels::{
    Device,
    device::{KvCacheSpec, Scratch},
    ops::{Candidates, RopeStyle, RopeTable},
};
use lockstep_model::ModelConfig;

use crate::{
    Batch, ExecutorError, Logits, Peers, RankShape, StepLimits, Weights,
    decoder::{Activations, LayerContext},
    logits::LogitBuffers,
    rehearsal,
    step::StepPlan,
};

/// A rank's device with everything it holds.
pub struct Executor<D: Device, P: Peers<D>> {
    device: D,
    parts: Parts<D, P>,
}

/// What a rank holds on its device.
struct Parts<D: Device, P> {
    shape: RankShape,
    limits: StepLimits,
    rope: RopeTable,
    weights: Weights<D>,
    cache: D::KvCache,
    activations: Activations<D>,
    logits: Option<LogitBuffers<D>>,
    peers: P,
}

impl<D: Device, P: Peers<D>> Executor<D, P> {
    /// Reserves the KV cache and the activations around loaded weights.
    ///
    /// # Errors
    /// [`ExecutorError::Kernel`] if the device's memory is short.
    pub fn new(
        device: D,
        config: &ModelConfig,
        shape: RankShape,
        limits: StepLimits,
        weights: Weights<D>,
        peers: P,
    ) -> Result<Self, ExecutorError> {
        let spec = KvCacheSpec {
            num_layers: shape.layers.len(),
            num_blocks: limits.num_kv_blocks,
            block_size: limits.block_size,
            num_key_value_heads: shape.num_key_value_heads,
            head_dim: shape.head_dim,
        };
        let cache = device.kv_cache(spec, shape.dtype)?;
        let activations = Activations::new(&device, &shape, limits.max_step_tokens)?;
        let logits =
            shape.is_last_stage().then(|| LogitBuffers::new(&device, &shape, limits.max_num_sequences)).transpose()?;
        let rope = rope_table(config);
        let parts = Parts { shape, limits, rope, weights, cache, activations, logits, peers };
        Ok(Self { device, parts })
    }

    /// Makes ready what steps of all sizes need, so that no request waits for it. The other ranks take no part.
    ///
    /// # Errors
    /// If the device fails.
    pub fn prepare(&mut self) -> Result<(), P::Error> {
        let Self { device, parts } = self;
        parts.peers.silence(true);
        let plans = rehearsal::plans(&parts.limits);
        let prepared =
            device.prepare(|device| plans.iter().try_for_each(|plan| parts.execute(device, plan, sample).map(drop)));
        parts.peers.silence(false);
        prepared
    }

    /// Executes a step; ranks of the last stage return the candidates of their part of the vocabulary.
    ///
    /// # Errors
    /// The plan is wrong, the device failed, or another rank did not come. The replica is then broken.
    pub fn execute(&mut self, plan: &StepPlan) -> Result<Option<Vec<Candidates>>, P::Error> {
        self.execute_with(plan, sample)
    }

    /// The same, but ranks of the last stage do something else with the logits.
    ///
    /// # Errors
    /// What `finish` returns, and what [`Self::execute`] does.
    pub fn execute_with<T>(
        &mut self,
        plan: &StepPlan,
        finish: impl FnOnce(&mut D, Logits<'_, D>) -> Result<T, P::Error>,
    ) -> Result<Option<T>, P::Error> {
        self.parts.execute(&mut self.device, plan, finish)
    }

    /// The other ranks.
    pub fn peers(&mut self) -> &mut P {
        &mut self.parts.peers
    }

    /// Scratch memory of its device.
    pub fn scratch(&self) -> Scratch {
        self.device.scratch()
    }
}

/// Reduces each row as it asks.
fn sample<D: Device, E: From<lockstep_kernels::KernelError>>(
    device: &mut D,
    logits: Logits<'_, D>,
) -> Result<Vec<Candidates>, E> {
    let Logits { rows, first_token, values } = logits;
    if rows.is_empty() { Ok(Vec::new()) } else { Ok(device.sample(rows, first_token, values)?) }
}

impl<D: Device, P: Peers<D>> Parts<D, P> {
    fn execute<T>(
        &mut self,
        device: &mut D,
        plan: &StepPlan,
        finish: impl FnOnce(&mut D, Logits<'_, D>) -> Result<T, P::Error>,
    ) -> Result<Option<T>, P::Error> {
        let batch = Batch::new(plan, &self.limits)?;
        let Self { shape, rope, weights, cache, activations, logits, peers, .. } = self;
        let num_tokens = batch.num_tokens();
        peers.receive_on_host(device, num_tokens, &mut activations.hidden)?;
        let finished = device.step::<_, P::Error>(|device| {
            if shape.is_first_stage() {
                let missing = || ExecutorError::Mismatch("the first stage has no embedding".to_owned());
                let embedding = weights.embedding.as_ref().ok_or_else(missing)?;
                let first_row = shape.vocabulary.start as u32;
                device.embed(embedding, first_row, &batch.token_ids, &mut activations.hidden)?;
                peers.all_reduce(device, num_tokens, &mut activations.hidden)?;
            }
            peers.receive_on_device(device, num_tokens, &mut activations.hidden)?;
            let context = LayerContext { shape, rope, batch: &batch };
            let num_layers = if plan.is_canary() { 1 } else { weights.layers.len() };
            for (layer, weights) in weights.layers.iter().enumerate().take(num_layers) {
                context.run(device, layer, weights, cache, activations, peers)?;
            }
            let (Some(output), Some(logits)) = (&weights.output, logits) else {
                peers.send_on_device(device, num_tokens, &mut activations.hidden)?;
                return Ok(None);
            };
            let head = output.head.as_ref().or(weights.embedding.as_ref());
            let head = head.ok_or_else(|| ExecutorError::Mismatch("the last stage has no output head".to_owned()))?;
            let logits = logits.compute(device, shape, &batch, &output.norm, head, &activations.hidden)?;
            finish(device, logits).map(Some)
        })?;
        peers.send_on_host(device, num_tokens, &mut activations.hidden)?;
        Ok(finished)
    }
}

fn rope_table(config: &ModelConfig) -> RopeTable {
    let style = match config.rope.style {
        lockstep_model::RopeStyle::Interleaved => RopeStyle::Interleaved,
        lockstep_model::RopeStyle::Halves => RopeStyle::Halves,
    };
    RopeTable {
        style,
        rotary_dim: config.rope.rotary_dim,
        frequencies: config.rope.frequencies.clone(),
        magnitude: config.rope.magnitude,
    }
}
