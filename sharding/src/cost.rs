//! Time estimates: a roofline for the device, latency and bandwidth for the links.
//! Invariant: pure arithmetic; estimates rank plans, they do not promise.

use crate::{DeviceSpec, LinkSpec, ModelShape, PlanOptions, Topology, memory::WeightUse};

/// Tokens that a sequence of the estimates has in its KV cache.
pub(crate) const CONTEXT_TOKENS: usize = 512;

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
}

impl StepTime {
    pub fn total(&self) -> f64 {
        self.memory.max(self.compute) + self.communication
    }

    /// Which part takes longest, in words.
    pub fn dominant(&self) -> &'static str {
        if self.communication > self.memory.max(self.compute) {
            "communication"
        } else if self.memory >= self.compute {
            "memory bandwidth"
        } else {
            "compute"
        }
    }
}

/// Time of the device alone.
pub(crate) fn device_time(device: &DeviceSpec, weights: &WeightUse, kv_token_bytes: u64, batch: Batch) -> StepTime {
    let kv_bytes = kv_token_bytes * (CONTEXT_TOKENS * batch.num_sequences) as u64;
    let multiply_adds =
        weights.multiply_adds * batch.num_tokens as u64 + weights.head_multiply_adds * batch.num_sequences as u64;
    StepTime {
        memory: (weights.step_bytes + weights.head_bytes + kv_bytes) as f64 / device.memory_bytes_per_second,
        compute: 2.0 * multiply_adds as f64 / device.operations_per_second,
        communication: 0.0,
    }
}

/// Time that a stage spends on its links in one step: two all-reduces a layer, one for the embedding, the candidates'
/// way to the leader, and the activations' way to the next stage.
pub(crate) fn communication_time(
    shape: &ModelShape,
    topology: &Topology,
    group: &[usize],
    next_group: Option<&[usize]>,
    stage: (usize, bool),
    batch: Batch,
) -> f64 {
    let (num_layers, is_first) = stage;
    let bytes = (batch.num_tokens * shape.hidden_size * size_of::<f32>()) as f64;
    let link = link_of(topology, group);
    // Layers sum in f64, the embedding in f32.
    let of_layer = 2.0 * all_reduce_time(link, group.len(), 2.0 * bytes);
    let of_embedding = if is_first { all_reduce_time(link, group.len(), bytes) } else { 0.0 };
    let reduce = of_layer * num_layers as f64 + of_embedding;
    let candidates = if group.len() > 1 && next_group.is_none() { link.latency_seconds } else { 0.0 };
    let hand_over = next_group.map_or(0.0, |next| {
        let ranks = [group.first(), next.first()].into_iter().flatten().copied().collect::<Vec<_>>();
        let link = link_of(topology, &ranks);
        link.latency_seconds + bytes / link.bytes_per_second
    });
    reduce + candidates + hand_over
}

/// The slowest kind of link within `devices`.
fn link_of<'a>(topology: &'a Topology, devices: &[usize]) -> &'a LinkSpec {
    let host = |&device: &usize| topology.devices.get(device).map(|spec| spec.host.as_str());
    let is_one_host = devices.windows(2).all(|pair| host(&pair[0]) == host(&pair[1]));
    if is_one_host { &topology.intra_host } else { &topology.inter_host }
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
    Batch { num_tokens: options.max_step_tokens, num_sequences: 1 }
}
