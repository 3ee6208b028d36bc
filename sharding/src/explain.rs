//! A plan in words and numbers, as JSON for programs.
//! For: `lockstep plan` and the coordinator's `GetPlan`. Invariant: everything comes from the plan and the topology;
//! nothing is estimated anew.
//! Not here: the table for people (`table`).

use std::collections::BTreeSet;

use serde::Serialize;

use crate::{DeviceSpec, RankPlan, ReplicaPlan, ShardPlan, StagePlan, Topology, words::rounded};

/// A plan with its totals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Why this plan.
    pub reason: String,
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Longest sequence, in tokens.
    pub max_sequence_tokens: usize,
    /// Most sequences in a step.
    pub max_num_sequences: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Each copy of the model.
    pub replicas: Vec<ReplicaExplanation>,
    /// Devices that hold no rank.
    pub unused_devices: Vec<DeviceSpec>,
}

/// One replica.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplicaExplanation {
    /// Ranks of a stage; the largest, if stages differ.
    pub tensor_parallel_size: usize,
    /// Stages.
    pub pipeline_parallel_size: usize,
    /// KV blocks.
    pub num_kv_blocks: usize,
    /// Tokens that they hold.
    pub kv_tokens: usize,
    /// Sequences of the longest length that they hold at once.
    pub num_longest_sequences: usize,
    /// Estimated decode rate of one sequence alone, to three digits.
    pub decode_tokens_per_second: f64,
    /// Estimated prefill rate of one prompt, with as many chunks in flight as stages, to three digits.
    pub prefill_tokens_per_second: f64,
    /// Weights of all ranks, copies included.
    pub weight_bytes: u64,
    /// KV blocks of all ranks.
    pub kv_bytes: u64,
    /// Each rank.
    pub ranks: Vec<RankExplanation>,
}

/// One rank: its part, the device's memory, and what bound it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankExplanation {
    /// Index of the stage.
    pub pipeline_stage: usize,
    /// First and one past the last layer.
    pub layers: std::ops::Range<usize>,
    /// Host of the device.
    pub host: String,
    /// Kind and model of the device.
    pub device_name: String,
    /// Memory of the device that the plan may use.
    pub memory_bytes: u64,
    /// Its memory read bandwidth, by which the plan reckons.
    pub memory_bytes_per_second: f64,
    /// Its rate in quantized matmul, by which the plan reckons.
    pub operations_per_second: f64,
    /// The plan's own numbers.
    #[serde(flatten)]
    pub plan: RankPlan,
}

impl Explanation {
    /// Explains `plan`, which was made for `topology`.
    pub fn new(plan: &ShardPlan, topology: &Topology) -> Self {
        let ranks = || plan.replicas.iter().flat_map(|replica| &replica.stages).flat_map(|stage| &stage.ranks);
        let used: BTreeSet<usize> = ranks().map(|rank| rank.device).collect();
        let unused = topology.devices.iter().enumerate().filter(|(index, _)| !used.contains(index));
        Self {
            reason: plan.reason.clone(),
            block_size: plan.block_size,
            max_sequence_tokens: plan.max_sequence_tokens,
            max_num_sequences: plan.max_num_sequences,
            max_step_tokens: plan.max_step_tokens,
            replicas: plan.replicas.iter().map(|replica| explain_replica(plan, replica, topology)).collect(),
            unused_devices: unused.map(|(_, device)| device.clone()).collect(),
        }
    }

    /// The explanation as JSON, indented.
    ///
    /// # Errors
    /// [`crate::PlanError::Codec`] if a number cannot be written.
    pub fn to_json(&self) -> Result<String, crate::PlanError> {
        serde_json::to_string_pretty(self).map_err(|error| crate::PlanError::Codec { reason: error.to_string() })
    }
}

fn explain_replica(plan: &ShardPlan, replica: &ReplicaPlan, topology: &Topology) -> ReplicaExplanation {
    let slowest = |time: fn(&RankPlan) -> f64| {
        let stages = replica.stages.iter();
        stages.map(move |stage| stage.ranks.iter().map(time).fold(f64::MIN_POSITIVE, f64::max))
    };
    let decode_ms: f64 = slowest(|rank| rank.decode_step_ms).sum();
    let prefill_ms = slowest(|rank| rank.prefill_step_ms).fold(f64::MIN_POSITIVE, f64::max);
    let ranks: Vec<_> = replica
        .stages
        .iter()
        .enumerate()
        .flat_map(|(pipeline_stage, stage)| stage.ranks.iter().map(move |rank| (pipeline_stage, stage, rank)))
        .filter_map(|(pipeline_stage, stage, rank)| {
            Some(explain_rank(pipeline_stage, stage, rank, topology.devices.get(rank.device)?))
        })
        .collect();
    let kv_tokens = replica.num_kv_blocks * plan.block_size;
    ReplicaExplanation {
        tensor_parallel_size: replica.stages.iter().map(|stage| stage.ranks.len()).max().unwrap_or(0),
        pipeline_parallel_size: replica.stages.len(),
        num_kv_blocks: replica.num_kv_blocks,
        kv_tokens,
        num_longest_sequences: kv_tokens / plan.max_sequence_tokens.max(1),
        decode_tokens_per_second: rounded(1e3 / decode_ms.max(f64::MIN_POSITIVE)),
        prefill_tokens_per_second: rounded(plan.max_step_tokens as f64 * 1e3 / prefill_ms),
        weight_bytes: ranks.iter().map(|rank| rank.plan.weight_bytes).sum(),
        kv_bytes: ranks.iter().map(|rank| rank.plan.kv_bytes).sum(),
        ranks,
    }
}

fn explain_rank(pipeline_stage: usize, stage: &StagePlan, rank: &RankPlan, device: &DeviceSpec) -> RankExplanation {
    RankExplanation {
        pipeline_stage,
        layers: stage.layers.clone(),
        host: device.host.clone(),
        device_name: device.name.clone(),
        memory_bytes: device.memory_bytes,
        memory_bytes_per_second: device.memory_bytes_per_second,
        operations_per_second: device.operations_per_second,
        plan: RankPlan {
            decode_step_ms: rounded(rank.decode_step_ms),
            prefill_step_ms: rounded(rank.prefill_step_ms),
            ..rank.clone()
        },
    }
}
