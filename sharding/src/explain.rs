//! A plan in words and numbers, as a table for people and as JSON for programs.
//! For: `lockstep plan`. Invariant: everything comes from the plan and the topology; nothing is estimated anew.

use std::fmt;

use serde::Serialize;

use crate::{RankPlan, ReplicaPlan, ShardPlan, Topology};

/// A plan with its totals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
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
    /// Estimated decode rate of one sequence alone.
    pub decode_tokens_per_second: f64,
    /// Estimated prefill rate of one prompt, with as many chunks in flight as stages.
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
    /// Memory of the device.
    pub memory_bytes: u64,
    /// The plan's own numbers.
    #[serde(flatten)]
    pub plan: RankPlan,
}

impl RankExplanation {
    fn used_bytes(&self) -> u64 {
        self.plan.weight_bytes + self.plan.kv_bytes + self.plan.activation_bytes
    }
}

impl Explanation {
    /// Explains `plan`, which was made for `topology`.
    pub fn new(plan: &ShardPlan, topology: &Topology) -> Self {
        Self {
            block_size: plan.block_size,
            max_sequence_tokens: plan.max_sequence_tokens,
            max_num_sequences: plan.max_num_sequences,
            max_step_tokens: plan.max_step_tokens,
            replicas: plan.replicas.iter().map(|replica| explain_replica(plan, replica, topology)).collect(),
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
        .map(|(pipeline_stage, stage, rank)| {
            let device = topology.devices.get(rank.device);
            RankExplanation {
                pipeline_stage,
                layers: stage.layers.clone(),
                host: device.map(|device| device.host.clone()).unwrap_or_default(),
                device_name: device.map(|device| device.name.clone()).unwrap_or_default(),
                memory_bytes: device.map_or(0, |device| device.memory_bytes),
                plan: rank.clone(),
            }
        })
        .collect();
    ReplicaExplanation {
        tensor_parallel_size: replica.stages.iter().map(|stage| stage.ranks.len()).max().unwrap_or(0),
        pipeline_parallel_size: replica.stages.len(),
        num_kv_blocks: replica.num_kv_blocks,
        kv_tokens: replica.num_kv_blocks * plan.block_size,
        decode_tokens_per_second: 1e3 / decode_ms.max(f64::MIN_POSITIVE),
        prefill_tokens_per_second: plan.max_step_tokens as f64 * 1e3 / prefill_ms,
        weight_bytes: ranks.iter().map(|rank| rank.plan.weight_bytes).sum(),
        kv_bytes: ranks.iter().map(|rank| rank.plan.kv_bytes).sum(),
        ranks,
    }
}

const HEADINGS: [&str; 15] = [
    "rank",
    "device",
    "kind",
    "layers",
    "heads",
    "kv heads",
    "columns",
    "vocabulary",
    "weights",
    "kv",
    "activations",
    "memory",
    "decode",
    "prefill",
    "bound by",
];

impl fmt::Display for Explanation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{} replica(s); sequences of up to {} tokens; steps of up to {} tokens and {} sequences; KV blocks of {} tokens",
            self.replicas.len(),
            self.max_sequence_tokens,
            self.max_step_tokens,
            self.max_num_sequences,
            self.block_size
        )?;
        for (index, replica) in self.replicas.iter().enumerate() {
            writeln!(
                formatter,
                "\nreplica {index}: tensor {} × pipeline {}; about {:.1} tokens/s decode (one sequence), {:.0} tokens/s \
                 prefill; {} KV blocks ({} tokens); weights {}, KV {}",
                replica.tensor_parallel_size,
                replica.pipeline_parallel_size,
                replica.decode_tokens_per_second,
                replica.prefill_tokens_per_second,
                replica.num_kv_blocks,
                replica.kv_tokens,
                size(replica.weight_bytes),
                size(replica.kv_bytes)
            )?;
            let mut rows = vec![HEADINGS.map(str::to_owned)];
            rows.extend(replica.ranks.iter().map(cells));
            write_aligned(formatter, &rows)?;
        }
        Ok(())
    }
}

fn cells(rank: &RankExplanation) -> [String; 15] {
    let span = |range: &std::ops::Range<usize>| format!("{}..{}", range.start, range.end);
    let plan = &rank.plan;
    let share = rank.used_bytes() as f64 / rank.memory_bytes.max(1) as f64;
    [
        plan.rank.to_string(),
        format!("{}/{}", plan.worker_id, plan.local_rank),
        rank.device_name.clone(),
        span(&rank.layers),
        span(&plan.query_heads),
        span(&plan.key_value_heads),
        span(&plan.intermediate),
        span(&plan.vocabulary),
        size(plan.weight_bytes),
        size(plan.kv_bytes),
        size(plan.activation_bytes),
        format!("{:.0}% of {}", share * 100.0, size(rank.memory_bytes)),
        format!("{:.3} ms", plan.decode_step_ms),
        format!("{:.1} ms", plan.prefill_step_ms),
        plan.bound_by.clone(),
    ]
}

/// Columns two spaces apart, each as wide as its widest cell.
fn write_aligned<const N: usize>(formatter: &mut fmt::Formatter<'_>, rows: &[[String; N]]) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(formatter, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// Bytes in binary units.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
