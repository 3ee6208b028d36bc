//! Time estimates: a roofline for the device, latency and bandwidth for the links.
//! Invariant: pure arithmetic; estimates rank plans, they do not promise.

use crate::{DeviceSpec, LinkSpec, ModelShape, PlanOptions, memory::WeightUse};

/// Tokens that a sequence of the estimates has in its KV cache.
pub(crate) const CONTEXT_TOKENS: usize = 512;

/// Seconds of a layer that no device saves: a dozen kernel launches, or as many meetings of a processor's threads.
const LAYER_OVERHEAD: f64 = 20e-6;
/// Seconds of a step beside its layers: scheduling, the step plan's way, sampling.
const STEP_OVERHEAD: f64 = 50e-6;

/// A batch to estimate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub num_tokens: usize,
    /// Sequences whose logits are wanted and whose KV is read.
    pub num_sequences: usize,
}

/// Parts of a rank's step, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTime {
    pub memory: f64,
    pub compute: f64,
    pub communication: f64,
    pub overhead: f64,
}

impl StepTime {
    pub fn total(&self) -> f64 {
        self.memory.max(self.compute) + self.communication + self.overhead
    }

    /// Which part takes longest, in words.
    pub fn dominant(&self) -> &'static str {
        if self.overhead > self.communication + self.memory.max(self.compute) {
            "overhead of layers"
        } else if self.communication > self.memory.max(self.compute) {
            "communication"
        } else if self.memory >= self.compute {
            "memory bandwidth"
        } else {
            "compute"
        }
    }
}

/// Time of the device alone.
pub(crate) fn device_time(
    device: &DeviceSpec,
    weights: &WeightUse,
    (num_layers, kv_token_bytes): (usize, u64),
    batch: Batch,
) -> StepTime {
    let kv_bytes = kv_token_bytes * (CONTEXT_TOKENS * batch.num_sequences) as u64;
    let multiply_adds =
        weights.multiply_adds * batch.num_tokens as u64 + weights.head_multiply_adds * batch.num_sequences as u64;
    StepTime {
        memory: (weights.step_bytes + weights.head_bytes + kv_bytes) as f64 / device.memory_bytes_per_second,
        compute: 2.0 * multiply_adds as f64 / device.operations_per_second,
        communication: 0.0,
        overhead: STEP_OVERHEAD + LAYER_OVERHEAD * num_layers as f64,
    }
}

/// A pipeline stage as its links see it.
pub(crate) struct StageLinks {
    pub num_layers: usize,
    pub is_first: bool,
    /// Ranks of its tensor-parallel group, and the link that holds them up.
    pub group_size: usize,
    pub group: LinkSpec,
    /// Bytes of a summand of its layers: processors sum in f64, GPUs in f32.
    pub sum_bytes: usize,
    /// To the next stage, if there is one.
    pub next: Option<LinkSpec>,
}

/// Time that a stage spends on its links in one step: two all-reduces a layer, one for the embedding, the candidates'
/// way to the leader, and the activations' way to the next stage.
pub(crate) fn communication_time(shape: &ModelShape, stage: &StageLinks, batch: Batch) -> f64 {
    let num_values = batch.num_tokens * shape.hidden_size;
    let bytes = (num_values * size_of::<f32>()) as f64;
    let of_layer = 2.0 * all_reduce_time(&stage.group, stage.group_size, (num_values * stage.sum_bytes) as f64);
    let of_embedding = if stage.is_first { all_reduce_time(&stage.group, stage.group_size, bytes) } else { 0.0 };
    let reduce = of_layer * stage.num_layers as f64 + of_embedding;
    let has_candidates = stage.group_size > 1 && stage.next.is_none();
    let candidates = if has_candidates { stage.group.latency_seconds } else { 0.0 };
    let hand_over = stage.next.map_or(0.0, |link| link.latency_seconds + bytes / link.bytes_per_second);
    reduce + candidates + hand_over
}

/// The better of a direct exchange and a ring.
fn all_reduce_time(link: &LinkSpec, world_size: usize, bytes: f64) -> f64 {
    let peers = world_size.saturating_sub(1) as f64;
    let direct = link.latency_seconds + peers * bytes / link.bytes_per_second;
    let ring = 2.0 * peers * (link.latency_seconds + bytes / world_size as f64 / link.bytes_per_second);
    if world_size < 2 { 0.0 } else { direct.min(ring) }
}

/// The batches that plans are compared by: one sequence alone, and as many as a step may have.
pub(crate) fn decode_batch(num_sequences: usize) -> Batch {
    Batch { num_tokens: num_sequences, num_sequences }
}

/// The largest prefill chunk of one sequence.
pub(crate) fn prefill_batch(options: &PlanOptions) -> Batch {
    Batch { num_tokens: options.step_tokens(), num_sequences: 1 }
}
