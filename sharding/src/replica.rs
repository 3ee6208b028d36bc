//! Cuts one replica over given groups of devices, and estimates its time.
//! Invariant: a replica that is returned fits: every rank's weights, KV blocks and activations are within its device.

use crate::{
    ModelShape, PlanError, PlanOptions, RankPlan, ReplicaPlan, StagePlan, Topology,
    cost::{self, Batch, StepTime},
    memory::{WeightUse, activation_bytes, kv_block_bytes},
    pipeline::{LayerBytes, split_layers},
    plan::StagePosition,
    split::split,
};

/// Devices of one speed class are taken for equal: measured speeds scatter, and an even cut is worth more than the scatter.
const SAME_SPEED_RATIO: f64 = 1.25;
/// Tries to move work away from devices that are too small.
const MAX_ROUNDS: usize = 48;
/// Tokens of the average sequence, by which the default number of KV blocks is reckoned.
const AVERAGE_SEQUENCE_TOKENS: usize = 512;
/// Default plans keep at least a sequence of so many tokens.
const LEAST_SEQUENCE_TOKENS: usize = 512;

/// What all replicas share.
pub(crate) struct Problem<'a> {
    pub shape: &'a ModelShape,
    pub topology: &'a Topology,
    pub options: &'a PlanOptions,
    pub layer_bytes: LayerBytes,
}

/// A replica with what its estimates are made of.
pub(crate) struct Replica {
    pub plan: ReplicaPlan,
    /// Seconds of a decode step of one sequence.
    pub decode_seconds: f64,
    /// Tokens per second when all batches in flight are full.
    pub full_tokens_per_second: f64,
}

/// Blocks wanted, and blocks without which the plan is refused.
#[derive(Clone, Copy)]
struct BlockRange {
    wanted: usize,
    least: usize,
}

/// Why a cut does not fit.
struct Overfull {
    /// Of the rank that is fullest.
    error: PlanError,
    /// `(stage, rank within it, how much of its work it could keep)`.
    ranks: Vec<(usize, usize, f64)>,
}

impl Problem<'_> {
    /// Cuts the model over `stages`, each a group of device indices.
    ///
    /// # Errors
    /// [`PlanError::Degree`] or [`PlanError::Memory`].
    pub fn replica(&self, stages: &[Vec<usize>]) -> Result<Replica, PlanError> {
        let speeds = self.speed_classes(stages);
        let mut shares = speeds.clone();
        let blocks = self.block_range();
        let mut refused = None;
        for _ in 0..MAX_ROUNDS {
            let mut plan = self.cut(stages, &shares)?;
            match self.fit(&mut plan, blocks) {
                Ok(()) => {
                    let is_bounded = |stage: usize, rank: usize| shares[stage][rank] < speeds[stage][rank];
                    return Ok(self.estimate(stages, plan, &is_bounded));
                }
                Err(overfull) => {
                    refused.get_or_insert(overfull.error);
                    for (stage, rank, ratio) in overfull.ranks {
                        shares[stage][rank] *= (ratio * 0.98).clamp(0.5, 0.98);
                    }
                }
            }
        }
        // Moving work did not help: the numbers of the cut by speed are the ones to report.
        Err(refused.unwrap_or_else(|| PlanError::Option { field: "devices", problem: "none given".to_owned() }))
    }

    /// Relative decode speed of each device, equal within a class.
    fn speed_classes(&self, stages: &[Vec<usize>]) -> Vec<Vec<f64>> {
        let speed = |&device: &usize| self.topology.devices[device].memory_bytes_per_second;
        let fastest = stages.iter().flatten().map(speed).fold(f64::MIN_POSITIVE, f64::max);
        let slowest = stages.iter().flatten().map(speed).fold(f64::MAX, f64::min);
        let is_even = fastest <= slowest * SAME_SPEED_RATIO;
        let share = |device| if is_even { 1.0 } else { speed(device) / fastest };
        stages.iter().map(|group| group.iter().map(share).collect()).collect()
    }

    fn block_range(&self) -> BlockRange {
        let options = self.options;
        let blocks_of = |tokens: usize| tokens.div_ceil(options.block_size);
        let longest = options.max_sequence_tokens.unwrap_or(self.shape.max_position_embeddings);
        let average = options.max_num_sequences.saturating_mul(blocks_of(AVERAGE_SEQUENCE_TOKENS.min(longest)));
        let least = match (options.num_kv_blocks, options.max_sequence_tokens) {
            (Some(asked), _) => asked,
            (None, Some(tokens)) => blocks_of(tokens),
            (None, None) => blocks_of(longest.min(LEAST_SEQUENCE_TOKENS)),
        };
        BlockRange { wanted: options.num_kv_blocks.unwrap_or(average.max(blocks_of(longest))), least }
    }

    /// The cut by shares, without memory and times.
    fn cut(&self, stages: &[Vec<usize>], shares: &[Vec<f64>]) -> Result<ReplicaPlan, PlanError> {
        let stage_speeds: Vec<f64> = shares.iter().map(|group| group.iter().sum()).collect();
        let layers = split_layers(&self.layer_bytes, &stage_speeds)?;
        let mut rank = 0;
        let mut plans = Vec::with_capacity(stages.len());
        for ((group, shares), layers) in stages.iter().zip(shares).zip(layers) {
            let mut ranks = Vec::with_capacity(group.len());
            for (&device, share) in group.iter().zip(split(self.shape, shares)?) {
                let spec = &self.topology.devices[device];
                ranks.push(RankPlan {
                    rank,
                    device,
                    worker_id: spec.worker_id.clone(),
                    local_rank: spec.local_rank,
                    query_heads: share.query_heads,
                    key_value_heads: share.key_value_heads,
                    intermediate: share.intermediate,
                    vocabulary: share.vocabulary,
                    weight_bytes: 0,
                    kv_bytes: 0,
                    activation_bytes: 0,
                    decode_step_ms: 0.0,
                    prefill_step_ms: 0.0,
                    bound_by: String::new(),
                });
                rank += 1;
            }
            plans.push(StagePlan { layers, ranks });
        }
        Ok(ReplicaPlan { stages: plans, num_kv_blocks: 0 })
    }

    /// Fills in bytes and the number of KV blocks.
    fn fit(&self, plan: &mut ReplicaPlan, blocks: BlockRange) -> Result<(), Overfull> {
        let num_stages = plan.stages.len();
        let mut num_blocks = blocks.wanted;
        let mut overfull = Vec::new();
        let mut worst: Option<(f64, PlanError)> = None;
        for (stage_index, stage) in plan.stages.iter_mut().enumerate() {
            let position = position(stage, stage_index, num_stages);
            for (index, rank) in stage.ranks.iter_mut().enumerate() {
                rank.weight_bytes = WeightUse::of(self.shape, &position, rank).bytes;
                rank.activation_bytes = activation_bytes(self.shape, self.options, rank, position.is_last);
                let block_bytes = kv_block_bytes(self.shape, self.options, stage.layers.len(), rank).max(1);
                let device = &self.topology.devices[rank.device];
                let fixed = rank.weight_bytes + rank.activation_bytes;
                let possible = device.memory_bytes.saturating_sub(fixed) / block_bytes;
                let possible = usize::try_from(possible).unwrap_or(usize::MAX);
                num_blocks = num_blocks.min(possible);
                if possible >= blocks.least {
                    continue;
                }
                let kv_bytes = block_bytes * blocks.least as u64;
                let ratio = device.memory_bytes.saturating_sub(rank.activation_bytes) as f64
                    / (rank.weight_bytes + kv_bytes).max(1) as f64;
                overfull.push((stage_index, index, ratio));
                let error = PlanError::Memory {
                    device: format!("{} device {} ({})", device.worker_id, device.local_rank, device.name),
                    available_bytes: device.memory_bytes,
                    required_bytes: fixed + kv_bytes,
                    weight_bytes: rank.weight_bytes,
                    num_kv_blocks: blocks.least,
                    kv_bytes,
                    sequence_tokens: blocks.least * self.options.block_size,
                    activation_bytes: rank.activation_bytes,
                };
                if worst.as_ref().is_none_or(|(least, _)| ratio < *least) {
                    worst = Some((ratio, error));
                }
            }
        }
        if let Some((_, error)) = worst {
            return Err(Overfull { error, ranks: overfull });
        }
        plan.num_kv_blocks = num_blocks;
        for stage in &mut plan.stages {
            let num_layers = stage.layers.len();
            for rank in &mut stage.ranks {
                rank.kv_bytes = kv_block_bytes(self.shape, self.options, num_layers, rank) * num_blocks as u64;
            }
        }
        Ok(())
    }

    /// Fills in times and reasons.
    fn estimate(
        &self,
        stages: &[Vec<usize>],
        mut plan: ReplicaPlan,
        is_bounded: &dyn Fn(usize, usize) -> bool,
    ) -> Replica {
        let num_stages = stages.len();
        let single = cost::decode_batch(1);
        // As many batches are in flight as there are stages, and they share the sequences.
        let batch_sequences = self.options.max_num_sequences.div_ceil(num_stages).max(1);
        let (mut decode_seconds, mut slowest) = (0.0, f64::MIN_POSITIVE);
        for (stage_index, stage) in plan.stages.iter_mut().enumerate() {
            let position = position(stage, stage_index, num_stages);
            let ways = Ways { group: &stages[stage_index], next: stages.get(stage_index + 1).map(Vec::as_slice) };
            let (mut stage_single, mut stage_full): (f64, f64) = (0.0, 0.0);
            for (index, rank) in stage.ranks.iter_mut().enumerate() {
                let decode = self.step_time(&position, &ways, rank, single);
                let full = self.step_time(&position, &ways, rank, cost::decode_batch(batch_sequences));
                let prefill = self.step_time(&position, &ways, rank, cost::prefill_batch(self.options));
                rank.decode_step_ms = decode.total() * 1e3;
                rank.prefill_step_ms = prefill.total() * 1e3;
                rank.bound_by = self.reason(&ways, rank, is_bounded(stage_index, index), &decode);
                stage_single = stage_single.max(decode.total());
                stage_full = stage_full.max(full.total());
            }
            decode_seconds += stage_single;
            slowest = f64::max(slowest, stage_full);
        }
        Replica { plan, decode_seconds, full_tokens_per_second: batch_sequences as f64 / slowest }
    }

    fn step_time(&self, position: &StagePosition, ways: &Ways<'_>, rank: &RankPlan, batch: Batch) -> StepTime {
        let weights = WeightUse::of(self.shape, position, rank);
        let num_layers = position.layers.len();
        let kv_token_bytes =
            kv_block_bytes(self.shape, self.options, num_layers, rank) / self.options.block_size as u64;
        let device = &self.topology.devices[rank.device];
        let stage = (num_layers, position.is_first);
        StepTime {
            communication: cost::communication_time(self.shape, self.topology, ways.group, ways.next, stage, batch),
            ..cost::device_time(device, &weights, kv_token_bytes, batch)
        }
    }

    /// What decided the rank's share, and what its step waits for.
    fn reason(&self, ways: &Ways<'_>, rank: &RankPlan, is_memory: bool, decode: &StepTime) -> String {
        let num_heads = self.shape.num_attention_heads;
        let speed = |&device: &usize| self.topology.devices[device].memory_bytes_per_second;
        let fastest = ways.group.iter().map(speed).fold(0.0, f64::max);
        let share = if is_memory {
            "device memory".to_owned()
        } else if speed(&rank.device) * SAME_SPEED_RATIO < fastest {
            format!("device speed ({:.2} of the fastest)", speed(&rank.device) / fastest)
        } else if !num_heads.is_multiple_of(ways.group.len()) {
            format!("whole heads ({num_heads} over {} ranks)", ways.group.len())
        } else {
            "even share".to_owned()
        };
        format!("{share}; step: {}", decode.dominant())
    }
}

/// Whom a stage talks to.
struct Ways<'a> {
    group: &'a [usize],
    next: Option<&'a [usize]>,
}

fn position(stage: &StagePlan, index: usize, num_stages: usize) -> StagePosition {
    StagePosition { layers: stage.layers.clone(), is_first: index == 0, is_last: index + 1 == num_stages }
}
