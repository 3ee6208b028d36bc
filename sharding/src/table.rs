//! An explained plan as a table for people.
//! For: `lockstep plan`. Invariant: shows what the explanation holds; replicas that differ only in their devices share
//! one table.

use std::{collections::BTreeSet, fmt, ops::Range};

use crate::{
    RankPlan,
    explain::{Explanation, RankExplanation, ReplicaExplanation},
    words::{count, format_bytes, rounded},
};

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
    "budget",
    "decode",
    "prefill",
    "bound by",
];

impl fmt::Display for Explanation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{}; sequences of up to {}; steps of up to {} and {}; KV blocks of {}",
            count(self.replicas.len(), "replica"),
            count(self.max_sequence_tokens, "token"),
            count(self.max_step_tokens, "token"),
            count(self.max_num_sequences, "sequence"),
            count(self.block_size, "token")
        )?;
        writeln!(formatter, "why: {}", self.reason)?;
        if !self.unused_devices.is_empty() {
            let devices = self.unused_devices.iter().map(|device| (device.worker_id.as_str(), device.local_rank));
            let names: BTreeSet<_> = self.unused_devices.iter().map(|device| device.name.as_str()).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            writeln!(formatter, "unused: {} ({names})", device_list(devices))?;
        }
        let ranks = self.replicas.iter().flat_map(|replica| &replica.ranks);
        let rates: BTreeSet<_> = ranks.map(rates).collect();
        let rates = rates.into_iter().collect::<Vec<_>>().join("; ");
        writeln!(formatter, "reckoned with: {rates} (a coordinator plans with what its workers measure)")?;
        let mut first = 0;
        for alike in self.replicas.chunk_by(is_alike) {
            write_replicas(formatter, first, alike, self.max_sequence_tokens)?;
            first += alike.len();
        }
        writeln!(formatter, "\nbudget: memory that weights, KV and activations may take, a tenth less than is free")
    }
}

/// Writes the replicas from index `first` on, which are alike.
fn write_replicas(
    formatter: &mut fmt::Formatter<'_>,
    first: usize,
    alike: &[ReplicaExplanation],
    longest: usize,
) -> fmt::Result {
    let Some(replica) = alike.first() else { return Ok(()) };
    let name = match alike.len() {
        1 => format!("replica {first}"),
        number => format!("replicas {first}-{}, identical, each", first + number - 1),
    };
    writeln!(
        formatter,
        "\n{name}: tensor {} × pipeline {}; about {} tokens/s decode (one sequence), {} tokens/s prefill; \
         weights {}, KV {}: {}, room for {} or {} of full length ({longest})",
        replica.tensor_parallel_size,
        replica.pipeline_parallel_size,
        replica.decode_tokens_per_second,
        replica.prefill_tokens_per_second,
        format_bytes(replica.weight_bytes),
        format_bytes(replica.kv_bytes),
        count(replica.num_kv_blocks, "block"),
        count(replica.kv_tokens, "token"),
        count(replica.num_longest_sequences, "sequence"),
    )?;
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(replica.ranks.iter().map(cells));
    write_aligned(formatter, &rows)?;
    if alike.len() > 1 {
        let of_replica = |replica: &ReplicaExplanation| {
            device_list(replica.ranks.iter().map(|rank| (rank.plan.worker_id.as_str(), rank.plan.local_rank)))
        };
        writeln!(formatter, "devices: {}", alike.iter().map(of_replica).collect::<Vec<_>>().join("; "))?;
    }
    Ok(())
}

/// Whether two replicas differ in nothing but the places of their devices.
fn is_alike(one: &ReplicaExplanation, other: &ReplicaExplanation) -> bool {
    let anywhere = |replica: &ReplicaExplanation| {
        let mut replica = replica.clone();
        for rank in &mut replica.ranks {
            rank.host.clear();
            rank.plan = RankPlan { device: 0, worker_id: String::new(), local_rank: 0, ..rank.plan.clone() };
        }
        replica
    };
    anywhere(one) == anywhere(other)
}

/// `a/0-3 b/0`: workers and indices, neighbours drawn together.
fn device_list<'a>(devices: impl Iterator<Item = (&'a str, usize)>) -> String {
    let mut spans: Vec<(&str, Range<usize>)> = Vec::new();
    for (worker_id, local_rank) in devices {
        match spans.last_mut() {
            Some((last, span)) if *last == worker_id && span.end == local_rank => span.end += 1,
            _ => spans.push((worker_id, local_rank..local_rank + 1)),
        }
    }
    let text = |(worker_id, span): (&str, Range<usize>)| match span.len() {
        1 => format!("{worker_id}/{}", span.start),
        _ => format!("{worker_id}/{}-{}", span.start, span.end - 1),
    };
    spans.into_iter().map(text).collect::<Vec<_>>().join(" ")
}

/// How fast the device of a rank is taken to be.
fn rates(rank: &RankExplanation) -> String {
    let (gigabytes, teraflops) = (rank.memory_bytes_per_second / 1e9, rank.operations_per_second / 1e12);
    format!("{} {} GB/s, {} TFLOP/s", rank.device_name, rounded(gigabytes), rounded(teraflops))
}

fn cells(rank: &RankExplanation) -> [String; 15] {
    let span = |range: &Range<usize>| format!("{}..{}", range.start, range.end);
    let plan = &rank.plan;
    let used_bytes = plan.weight_bytes + plan.kv_bytes + plan.activation_bytes;
    let share = used_bytes as f64 / rank.memory_bytes.max(1) as f64;
    [
        plan.rank.to_string(),
        format!("{}/{}", plan.worker_id, plan.local_rank),
        rank.device_name.clone(),
        span(&rank.layers),
        span(&plan.query_heads),
        span(&plan.key_value_heads),
        span(&plan.intermediate),
        span(&plan.vocabulary),
        format_bytes(plan.weight_bytes),
        format!("{} {}", format_bytes(plan.kv_bytes), plan.dtype),
        format_bytes(plan.activation_bytes),
        format!("{:.0}% of {}", share * 100.0, format_bytes(rank.memory_bytes)),
        format!("{} ms", plan.decode_step_ms),
        format!("{} ms", plan.prefill_step_ms),
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
