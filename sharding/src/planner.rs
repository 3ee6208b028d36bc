//! Chooses devices and degrees; the cut itself is `replica`'s.
//!
//! `auto` tries every pair of degrees that the model and the devices allow, on all devices and on the fastest ones alone,
//! and takes the plan with the largest `tokens per second of one sequence alone × tokens per second of the cluster with
//! every batch full`: one percent of latency is worth one percent of throughput. Of equal plans the one with fewer
//! devices wins, then the one with fewer ranks a replica.

use crate::{
    ModelShape, Parallelism, PlanError, PlanOptions, Policy, ShardPlan, Topology,
    pipeline::LayerBytes,
    replica::{Problem, Replica, SAME_SPEED_RATIO},
    split::Granules,
    words::{count, rounded},
};

/// Largest tensor-parallel degree that `auto` tries.
const MAX_AUTO_TENSOR_PARALLEL: usize = 64;

/// Degrees of a plan.
#[derive(Clone, Copy, PartialEq)]
struct Degrees {
    tensor: usize,
    pipeline: usize,
    replicas: usize,
}

/// A plan that fits, as it is compared with others.
#[derive(Clone, Copy)]
struct Candidate {
    degrees: Degrees,
    /// Devices that were at its disposal.
    num_devices: usize,
    /// Tokens per second of one sequence alone, on the slowest replica.
    alone: f64,
    /// Tokens per second of all replicas with full batches.
    full: f64,
}

impl Candidate {
    fn new(degrees: Degrees, num_devices: usize, replicas: &[Replica]) -> Self {
        let slowest = replicas.iter().map(|replica| replica.decode_seconds).fold(f64::MIN_POSITIVE, f64::max);
        let full = replicas.iter().map(|replica| replica.full_tokens_per_second).sum();
        Self { degrees, num_devices, alone: 1.0 / slowest, full }
    }

    fn score(&self) -> f64 {
        self.alone * self.full
    }

    fn is_better_than(&self, other: &Self) -> bool {
        let ranks = |candidate: &Self| candidate.degrees.tensor * candidate.degrees.pipeline;
        let is_equal = self.score() > other.score() * 0.999_999 && self.num_devices == other.num_devices;
        self.score() > other.score() * 1.000_001 || (is_equal && ranks(self) < ranks(other))
    }
}

impl std::fmt::Display for Candidate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Degrees { tensor, pipeline, replicas } = self.degrees;
        let (alone, full) = (rounded(self.alone), rounded(self.full));
        let replicas = count(replicas, "replica");
        write!(formatter, "{replicas} of tensor {tensor} × pipeline {pipeline} ({alone} and {full} tokens/s)")
    }
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
    let options = &options.over(shape, topology);
    let problem = Problem { shape, topology, options, layer_bytes: LayerBytes::of(shape) };
    let (replicas, reason) = best_replicas(&problem, policy)?;
    finish(shape, options, replicas, reason)
}

fn finish(
    shape: &ModelShape,
    options: &PlanOptions,
    replicas: Vec<Replica>,
    reason: String,
) -> Result<ShardPlan, PlanError> {
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
        max_step_tokens: options.step_tokens(),
        reason,
        replicas: replicas.into_iter().map(|replica| replica.plan).collect(),
    })
}

fn check_options(options: &PlanOptions) -> Result<(), PlanError> {
    let sizes = [
        ("block_size", Some(options.block_size)),
        ("max_sequence_tokens", options.max_sequence_tokens),
        ("max_num_sequences", Some(options.max_num_sequences)),
        ("max_step_tokens", options.max_step_tokens),
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
    Granules::of(shape, usize::MAX).check(shape, degrees.tensor)?;
    if degrees.pipeline > shape.num_hidden_layers {
        return Err(PlanError::Degree {
            degree: "pipeline_parallel_size",
            asked: degrees.pipeline,
            possible: shape.num_hidden_layers,
            parts: "layers".to_owned(),
            cause: String::new(),
        });
    }
    Ok(())
}

/// Cuts all replicas of these degrees over some of `devices`.
fn replicas_of(problem: &Problem<'_>, devices: &[usize], degrees: &Degrees) -> Result<Vec<Replica>, PlanError> {
    let needed = degrees.tensor.checked_mul(degrees.pipeline).and_then(|ranks| ranks.checked_mul(degrees.replicas));
    if needed.is_none_or(|needed| needed == 0 || needed > devices.len()) {
        return Err(PlanError::Devices {
            replicas: degrees.replicas,
            tensor_parallel_size: degrees.tensor,
            pipeline_parallel_size: degrees.pipeline,
            devices: devices.len(),
        });
    }
    let groups = group_devices(problem.topology, devices, degrees.tensor);
    groups.chunks_exact(degrees.pipeline).take(degrees.replicas).map(|stages| problem.replica(stages)).collect()
}

/// Groups of `size` of the devices, of one host where possible; hosts in the order of their first device, faster devices
/// of a host first.
fn group_devices(topology: &Topology, devices: &[usize], size: usize) -> Vec<Vec<usize>> {
    let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
    for &index in devices {
        let name = topology.devices[index].host.as_str();
        match hosts.iter_mut().find(|(host, _)| *host == name) {
            Some((_, devices)) => devices.push(index),
            None => hosts.push((name, vec![index])),
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

/// The fastest devices alone, then with ever slower ones, all of them last; each in the order of the topology. Devices of
/// about one speed stay together.
fn device_choices(topology: &Topology) -> Vec<Vec<usize>> {
    let speed = |device: usize| topology.devices[device].memory_bytes_per_second;
    let mut by_speed: Vec<usize> = (0..topology.devices.len()).collect();
    by_speed.sort_by(|&one, &other| speed(other).total_cmp(&speed(one)));
    let is_border = |end: usize| {
        by_speed.get(end).is_none_or(|&slower| speed(by_speed[end - 1]) > speed(slower) * SAME_SPEED_RATIO)
    };
    let choice = |end: usize| {
        let mut devices = by_speed[..end].to_vec();
        devices.sort_unstable();
        devices
    };
    (1..=by_speed.len()).filter(|&end| is_border(end)).map(choice).collect()
}

/// Degrees to try on so many devices.
fn degrees_to_try(shape: &ModelShape, policy: &Policy, num_devices: usize) -> Vec<Degrees> {
    let replicas = |ranks: usize| policy.replicas.unwrap_or((num_devices / ranks.max(1)).max(1));
    if let Parallelism::Fixed { tensor_parallel_size: tensor, pipeline_parallel_size: pipeline } = policy.parallelism {
        return vec![Degrees { tensor, pipeline, replicas: replicas(tensor.saturating_mul(pipeline)) }];
    }
    let max_ranks = num_devices / policy.replicas.unwrap_or(1).max(1);
    let max_tensor = Granules::of(shape, usize::MAX).max_degree(shape).min(max_ranks).min(MAX_AUTO_TENSOR_PARALLEL);
    let pipelines = |tensor: usize| 1..=(max_ranks / tensor).min(shape.num_hidden_layers);
    let pairs = (1..=max_tensor).flat_map(|tensor| pipelines(tensor).map(move |pipeline| (tensor, pipeline)));
    pairs.map(|(tensor, pipeline)| Degrees { tensor, pipeline, replicas: replicas(tensor * pipeline) }).collect()
}

/// The best plan that the policy allows, and why.
fn best_replicas(problem: &Problem<'_>, policy: &Policy) -> Result<(Vec<Replica>, String), PlanError> {
    let mut choices = device_choices(problem.topology);
    // Of fixed degrees without a number of replicas the devices are to be used up.
    let is_fixed = policy.parallelism != Parallelism::Auto;
    if is_fixed && policy.replicas.is_none() {
        choices.drain(..choices.len() - 1);
    }
    let num_devices = problem.topology.devices.len();
    let mut best: Option<(Candidate, Vec<Replica>)> = None;
    let mut candidates = Vec::new();
    let mut refused = PlanError::Devices {
        replicas: policy.replicas.unwrap_or(1),
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        devices: num_devices,
    };
    for devices in choices {
        for degrees in degrees_to_try(problem.shape, policy, devices.len()) {
            if is_fixed {
                check_degrees(problem.shape, &degrees)?;
            }
            match replicas_of(problem, &devices, &degrees) {
                Ok(found) => {
                    let candidate = Candidate::new(degrees, devices.len(), &found);
                    candidates.push(candidate);
                    if best.as_ref().is_none_or(|(best, _)| candidate.is_better_than(best)) {
                        best = Some((candidate, found));
                    }
                }
                // The largest degrees come nearest to fitting: theirs are the numbers to report.
                Err(error) => refused = error,
            }
        }
    }
    let (best, replicas) = best.ok_or(refused)?;
    let reason = if is_fixed { format!("asked for: {policy}") } else { explain(&best, &candidates, num_devices) };
    Ok((replicas, reason))
}

/// Why `best` won, in one line.
fn explain(best: &Candidate, candidates: &[Candidate], num_devices: usize) -> String {
    let others = candidates.iter().filter(|candidate| candidate.degrees != best.degrees);
    let runner_up = match others.max_by(|one, other| one.score().total_cmp(&other.score())) {
        Some(second) => format!("then comes {second}"),
        None => "no other cut fits".to_owned(),
    };
    let left_out = match num_devices - best.num_devices {
        0 => String::new(),
        number => format!("; {} left out, as no cut with slower ones scores higher", count(number, "device")),
    };
    format!("largest product of tokens/s of one sequence and of full batches: {best}; {runner_up}{left_out}")
}
