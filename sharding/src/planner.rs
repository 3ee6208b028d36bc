//! Chooses degrees and devices; the cut itself is `replica`'s.
//!
//! `auto` tries every pair of degrees that the model and the devices allow and takes the plan with the largest
//! `tokens per second of one sequence alone × tokens per second of the cluster with every batch full`: one percent of
//! latency is worth one percent of throughput. Of equal plans the one with fewer ranks a replica wins.

use crate::{
    ModelShape, Parallelism, PlanError, PlanOptions, Policy, ShardPlan, Topology,
    pipeline::LayerBytes,
    replica::{Problem, Replica},
    split::Granules,
};

/// Largest tensor-parallel degree that `auto` tries.
const MAX_AUTO_TENSOR_PARALLEL: usize = 64;

/// Degrees of a plan.
#[derive(Clone, Copy)]
struct Degrees {
    tensor: usize,
    pipeline: usize,
    replicas: usize,
}

/// Cuts `shape` over `topology` as `policy` says.
///
/// # Errors
/// [`PlanError`] with the numbers that disagree, if no such plan exists or it does not fit.
pub fn plan(
    shape: &ModelShape,
    topology: &Topology,
    policy: &Policy,
    options: &PlanOptions,
) -> Result<ShardPlan, PlanError> {
    shape.check()?;
    topology.check()?;
    check_options(options)?;
    let problem = Problem { shape, topology, options, layer_bytes: LayerBytes::of(shape) };
    let replicas = match policy.parallelism {
        Parallelism::Fixed { tensor_parallel_size, pipeline_parallel_size } => {
            let ranks = tensor_parallel_size.saturating_mul(pipeline_parallel_size).max(1);
            let replicas = policy.replicas.unwrap_or((topology.devices.len() / ranks).max(1));
            let degrees = Degrees { tensor: tensor_parallel_size, pipeline: pipeline_parallel_size, replicas };
            check_degrees(shape, &degrees)?;
            replicas_of(&problem, &degrees)?
        }
        Parallelism::Auto => best_replicas(&problem, policy.replicas)?,
    };
    finish(shape, options, replicas)
}

fn finish(shape: &ModelShape, options: &PlanOptions, replicas: Vec<Replica>) -> Result<ShardPlan, PlanError> {
    let possible = replicas.iter().map(|replica| replica.plan.num_kv_blocks).min().unwrap_or(0) * options.block_size;
    let max_sequence_tokens = match options.max_sequence_tokens {
        Some(asked) if asked > possible => {
            let problem = format!("{asked} tokens do not fit in num_kv_blocks, which hold {possible}");
            return Err(PlanError::Option { field: "max_sequence_tokens", problem });
        }
        Some(asked) => asked,
        None => shape.max_position_embeddings.min(possible),
    };
    Ok(ShardPlan {
        block_size: options.block_size,
        max_sequence_tokens,
        max_num_sequences: options.max_num_sequences,
        max_step_tokens: options.max_step_tokens,
        replicas: replicas.into_iter().map(|replica| replica.plan).collect(),
    })
}

fn check_options(options: &PlanOptions) -> Result<(), PlanError> {
    let sizes = [
        ("block_size", Some(options.block_size)),
        ("max_sequence_tokens", options.max_sequence_tokens),
        ("max_num_sequences", Some(options.max_num_sequences)),
        ("max_step_tokens", Some(options.max_step_tokens)),
        ("kv_element_bytes", Some(options.kv_element_bytes)),
        ("num_kv_blocks", options.num_kv_blocks),
    ];
    match sizes.into_iter().find(|(_, size)| size.is_some_and(|size| size == 0 || size > 1 << 30)) {
        Some((field, size)) => {
            let problem = format!("{} is not within 1..=2^30", size.unwrap_or(0));
            Err(PlanError::Option { field, problem })
        }
        None => Ok(()),
    }
}

fn check_degrees(shape: &ModelShape, degrees: &Degrees) -> Result<(), PlanError> {
    let (possible, parts) = Granules::of(shape, usize::MAX).max_degree(shape);
    if degrees.tensor > possible {
        return Err(PlanError::Degree { degree: "tensor_parallel_size", asked: degrees.tensor, possible, parts });
    }
    if degrees.pipeline > shape.num_hidden_layers {
        return Err(PlanError::Degree {
            degree: "pipeline_parallel_size",
            asked: degrees.pipeline,
            possible: shape.num_hidden_layers,
            parts: "layers".to_owned(),
        });
    }
    Ok(())
}

/// Cuts all replicas of these degrees.
fn replicas_of(problem: &Problem<'_>, degrees: &Degrees) -> Result<Vec<Replica>, PlanError> {
    let devices = problem.topology.devices.len();
    let needed = degrees.tensor.checked_mul(degrees.pipeline).and_then(|ranks| ranks.checked_mul(degrees.replicas));
    if degrees.tensor == 0 || degrees.pipeline == 0 || needed.is_none_or(|needed| needed == 0 || needed > devices) {
        return Err(PlanError::Devices {
            replicas: degrees.replicas,
            tensor_parallel_size: degrees.tensor,
            pipeline_parallel_size: degrees.pipeline,
            devices,
        });
    }
    let groups = group_devices(problem.topology, degrees.tensor);
    groups.chunks_exact(degrees.pipeline).take(degrees.replicas).map(|stages| problem.replica(stages)).collect()
}

/// Groups of `size` devices, of one host where possible; hosts in the order of their first device, faster devices of a
/// host first.
fn group_devices(topology: &Topology, size: usize) -> Vec<Vec<usize>> {
    let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
    for (index, device) in topology.devices.iter().enumerate() {
        match hosts.iter_mut().find(|(host, _)| *host == device.host) {
            Some((_, devices)) => devices.push(index),
            None => hosts.push((&device.host, vec![index])),
        }
    }
    let mut groups = Vec::new();
    let mut left_over = Vec::new();
    for (_, mut devices) in hosts {
        // Speeds are compared in coarse steps, so that the scatter of measurements does not reorder devices.
        let class = |&device: &usize| topology.devices[device].memory_bytes_per_second.max(1.0).log2().round() as i64;
        devices.sort_by_key(|device| std::cmp::Reverse(class(device)));
        let chunks = devices.chunks_exact(size);
        left_over.extend_from_slice(chunks.remainder());
        groups.extend(chunks.map(<[usize]>::to_vec));
    }
    groups.extend(left_over.chunks_exact(size).map(<[usize]>::to_vec));
    groups
}

/// The best plan over all degrees.
fn best_replicas(problem: &Problem<'_>, replicas: Option<usize>) -> Result<Vec<Replica>, PlanError> {
    let devices = problem.topology.devices.len();
    let (max_tensor, _) = Granules::of(problem.shape, usize::MAX).max_degree(problem.shape);
    let max_ranks = devices / replicas.unwrap_or(1).max(1);
    let mut best: Option<(f64, usize, Vec<Replica>)> = None;
    let mut refused = None;
    for tensor in 1..=max_tensor.min(max_ranks).min(MAX_AUTO_TENSOR_PARALLEL) {
        for pipeline in 1..=(max_ranks / tensor).min(problem.shape.num_hidden_layers) {
            let degrees = Degrees { tensor, pipeline, replicas: replicas.unwrap_or(devices / (tensor * pipeline)) };
            let found = match replicas_of(problem, &degrees) {
                Ok(found) => found,
                // The largest degrees come nearest to fitting: theirs are the numbers to report.
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            let score = score(&found);
            let ranks = tensor * pipeline;
            let is_better = best.as_ref().is_none_or(|(most, fewest, _)| {
                score > most * 1.000_001 || (score > most * 0.999_999 && ranks < *fewest)
            });
            if is_better {
                best = Some((score, ranks, found));
            }
        }
    }
    match (best, refused) {
        (Some((_, _, found)), _) => Ok(found),
        (None, Some(error)) => Err(error),
        (None, None) => Err(PlanError::Devices {
            replicas: replicas.unwrap_or(1),
            tensor_parallel_size: 1,
            pipeline_parallel_size: 1,
            devices,
        }),
    }
}

/// What `auto` maximises; see the head of this file.
fn score(replicas: &[Replica]) -> f64 {
    let slowest = replicas.iter().map(|replica| replica.decode_seconds).fold(f64::MIN_POSITIVE, f64::max);
    replicas.iter().map(|replica| replica.full_tokens_per_second).sum::<f64>() / slowest
}
