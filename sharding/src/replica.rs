//! Cuts one replica over given groups of devices, and estimates its time.
//! Invariant: a replica that is returned fits: every rank's weights, KV blocks and activations are within its device.

use crate::{
    DeviceSpec, ModelShape, PlanError, PlanOptions, RankPlan, ReplicaPlan, StagePlan, TensorShape, Topology,
    cost::{self, Batch, StageLinks, StepTime},
    memory::{OVERHEAD_BYTES, WeightUse, activation_bytes, kv_block_bytes, kv_token_bytes},
    pipeline::{LayerBytes, split_layers},
    plan::StagePosition,
    split::split,
};

/// Devices of one speed class are taken for equal: measured speeds scatter, and an even cut is worth more than the scatter.
pub(crate) const SAME_SPEED_RATIO: f64 = 1.25;
/// Tries to move work away from devices that are too small.
const MAX_ROUNDS: usize = 48;
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
    /// Tokens per second when all batches in flight are as full as the limits and the KV blocks allow.
    pub full_tokens_per_second: f64,
}

/// Numbers of KV blocks that decide how many a replica gets.
#[derive(Clone, Copy)]
struct BlockRange {
    /// More are of no use.
    wanted: usize,
    /// So many hold the longest sequence; memory of the host is spared only beyond.
    of_longest: usize,
    /// With fewer the plan is refused.
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
        let of_longest = blocks_of(longest);
        // Slots are numbered in 32 bits.
        let most = options.max_num_sequences.saturating_mul(of_longest).min(u32::MAX as usize / options.block_size);
        let least = match (options.num_kv_blocks, options.max_sequence_tokens) {
            (Some(asked), _) => asked,
            (None, Some(tokens)) => blocks_of(tokens),
            (None, None) => blocks_of(longest.min(LEAST_SEQUENCE_TOKENS)),
        };
        BlockRange { wanted: options.num_kv_blocks.unwrap_or(most.max(least)), of_longest, least }
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
                let (dtype, dtype_reason) = self.shape.dtype(spec.dtype);
                ranks.push(RankPlan {
                    rank,
                    device,
                    worker_id: spec.worker_id.clone(),
                    local_rank: spec.local_rank,
                    query_heads: share.query_heads,
                    key_value_heads: share.key_value_heads,
                    intermediate: share.intermediate,
                    vocabulary: share.vocabulary,
                    dtype,
                    dtype_reason: dtype_reason.to_owned(),
                    ..RankPlan::default()
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
        let num_ranks = plan.world_size() as u64;
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
                let spared = if device.is_processor() { possible.div_ceil(2) } else { 0 };
                num_blocks = num_blocks.min(possible.min((possible - spared).max(blocks.of_longest).max(blocks.least)));
                if possible >= blocks.least {
                    continue;
                }
                let kv_bytes = block_bytes.saturating_mul(blocks.least as u64);
                let ratio = device.memory_bytes.saturating_sub(rank.activation_bytes) as f64
                    / rank.weight_bytes.saturating_add(kv_bytes).max(1) as f64;
                overfull.push((stage_index, index, ratio));
                let error = PlanError::Memory {
                    device: format!("{} ({})", device.label(), device.name),
                    available_bytes: device.memory_bytes,
                    required_bytes: fixed.saturating_add(kv_bytes),
                    weight_bytes: rank.weight_bytes,
                    num_kv_blocks: blocks.least,
                    kv_bytes,
                    sequence_tokens: blocks.least * self.options.block_size,
                    activation_bytes: rank.activation_bytes,
                    min_devices: self.min_devices(device, blocks.least, num_ranks),
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

    /// Devices like this one that the model takes at the least, whatever the cut, if they are more than `num_ranks`.
    fn min_devices(&self, device: &DeviceSpec, num_blocks: usize, num_ranks: u64) -> Option<u64> {
        let tokens = (num_blocks * self.options.block_size) as u64;
        let heads = self.shape.num_key_value_heads;
        let (dtype, _) = self.shape.dtype(device.dtype);
        let token_bytes = kv_token_bytes(self.shape, dtype, self.shape.num_hidden_layers, heads);
        let kv_bytes = tokens.saturating_mul(token_bytes);
        let weight_bytes: u64 = self.shape.tensors.iter().map(TensorShape::bytes).sum();
        let each = device.memory_bytes.checked_sub(OVERHEAD_BYTES).filter(|&bytes| bytes > 0)?;
        Some(weight_bytes.saturating_add(kv_bytes).div_ceil(each)).filter(|&number| number > num_ranks)
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
        let kv_sequences = plan.num_kv_blocks * self.options.block_size / cost::CONTEXT_TOKENS;
        let batch_sequences = self.options.max_num_sequences.min(kv_sequences).div_ceil(num_stages).max(1);
        let (mut decode_seconds, mut slowest) = (0.0, f64::MIN_POSITIVE);
        for (stage_index, stage) in plan.stages.iter_mut().enumerate() {
            let position = position(stage, stage_index, num_stages);
            let group = &stages[stage_index];
            let next = stages.get(stage_index + 1).map(|next| self.topology.link(&[group[0], next[0]]));
            let has_processor = group.iter().any(|&device| self.topology.devices[device].is_processor());
            let links = StageLinks {
                num_layers: stage.layers.len(),
                is_first: position.is_first,
                group_size: group.len(),
                group: self.topology.link(group),
                sum_bytes: if has_processor { size_of::<f64>() } else { size_of::<f32>() },
                next,
            };
            let (mut stage_single, mut stage_full): (f64, f64) = (0.0, 0.0);
            for (index, rank) in stage.ranks.iter_mut().enumerate() {
                let weights = WeightUse::of(self.shape, &position, rank);
                let step_time = |batch| self.step_time(&links, rank, &weights, batch);
                let decode = step_time(single);
                let full = step_time(cost::decode_batch(batch_sequences));
                let prefill = step_time(cost::prefill_batch(self.options));
                rank.decode_step_ms = decode.total() * 1e3;
                rank.prefill_step_ms = prefill.total() * 1e3;
                rank.bound_by = self.reason(group, rank, is_bounded(stage_index, index), &decode);
                stage_single = stage_single.max(decode.total());
                stage_full = stage_full.max(full.total());
            }
            decode_seconds += stage_single;
            slowest = f64::max(slowest, stage_full);
        }
        Replica { plan, decode_seconds, full_tokens_per_second: batch_sequences as f64 / slowest }
    }

    fn step_time(&self, links: &StageLinks, rank: &RankPlan, weights: &WeightUse, batch: Batch) -> StepTime {
        let kv_bytes = kv_token_bytes(self.shape, rank.dtype, links.num_layers, rank.key_value_heads.len());
        let device = &self.topology.devices[rank.device];
        StepTime {
            communication: cost::communication_time(self.shape, links, batch),
            ..cost::device_time(device, weights, (links.num_layers, kv_bytes), batch)
        }
    }

    /// What decided the rank's share, and what its step waits for.
    fn reason(&self, group: &[usize], rank: &RankPlan, is_memory: bool, decode: &StepTime) -> String {
        let num_heads = self.shape.num_attention_heads;
        let speed = |&device: &usize| self.topology.devices[device].memory_bytes_per_second;
        let fastest = group.iter().map(speed).fold(0.0, f64::max);
        let share = if is_memory {
            "device memory".to_owned()
        } else if speed(&rank.device) * SAME_SPEED_RATIO < fastest {
            format!("device speed ({:.2} of the fastest)", speed(&rank.device) / fastest)
        } else if !num_heads.is_multiple_of(group.len()) {
            format!("whole heads ({num_heads} over {} ranks)", group.len())
        } else {
            "even share".to_owned()
        };
        format!("{share}; step: {}", decode.dominant())
    }
}

fn position(stage: &StagePlan, index: usize, num_stages: usize) -> StagePosition {
    StagePosition { layers: stage.layers.clone(), is_first: index == 0, is_last: index + 1 == num_stages }
}
