//! A replica in this process as the target: no coordinator, no gRPC; ranks meet over loopback if there are several.

use std::{
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use lockstep_kernels::device::DeviceInfo;
use lockstep_model::Checkpoint;
use lockstep_sharding::{DeviceSpec, Dtype, Parallelism, PlanOptions, Policy, Topology};
use lockstep_worker::{
    collective::LinkListener,
    devices::{DeviceSelection, DeviceSettings, LocalDevices},
    engine::{Sampling, SequenceOutput, SequenceRequest, Tenant},
    metrics::Metrics,
    replica::{LeaderHandle, Replica, ReplicaSpec},
};
use tokio_util::sync::CancellationToken;

use super::{
    Args,
    measure::{TokenTimes, expect_to_fit},
};
use crate::{commands::worker::is_on, progress, settings};

const WORKER_ID: &str = "bench";
/// Memory that every device is planned with: what does not fit fails when it is loaded.
const MEMORY_BYTES: u64 = 1 << 40;

/// A loaded replica.
pub struct InProcessTarget {
    /// Keeps the rank threads alive.
    _replica: Replica,
    leader: LeaderHandle,
    /// Bytes of the checkpoint that the ranks loaded.
    pub num_bytes: u64,
    /// For the report.
    pub description: String,
    /// Token ids below it are valid.
    pub vocab_size: usize,
    /// Longest sequence.
    pub max_sequence_tokens: usize,
}

impl InProcessTarget {
    /// Plans and loads the model over this process's ranks.
    ///
    /// # Errors
    /// If the model cannot be opened, cut or loaded.
    pub fn load(model: &Path, args: &Args) -> anyhow::Result<Self> {
        let checkpoint = Checkpoint::open(model)?;
        expect_to_fit(args, checkpoint.config().max_position_embeddings)?;
        let world_size = args.tensor_parallel * args.pipeline_parallel;
        let devices = devices(args, world_size)?;
        let topology = topology(world_size, &devices.infos()?, args.devices.dtype()?);
        let policy = Policy {
            parallelism: Parallelism::Fixed {
                tensor_parallel_size: args.tensor_parallel,
                pipeline_parallel_size: args.pipeline_parallel,
            },
            replicas: Some(1),
        };
        let plan = lockstep_sharding::plan(checkpoint.shape(), &topology, &policy, &options(args))?;
        let plan_dtype = plan.replicas.first().and_then(|replica| replica.find_rank(0)).map(|(_, rank)| rank.dtype);
        let links = Arc::new(LinkListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)), None)?);
        let (max_sequence_tokens, max_step_tokens) = (plan.max_sequence_tokens, plan.max_step_tokens);
        let spec = ReplicaSpec {
            worker_id: String::from(WORKER_ID),
            model: String::from(WORKER_ID),
            source: model.to_owned(),
            plan_epoch: 1,
            replica: 0,
            index: 0,
            block_size: plan.block_size,
            max_sequence_tokens,
            max_num_sequences: plan.max_num_sequences,
            max_step_tokens,
            plan: plan.replicas.into_iter().next().context("the plan has no replica")?,
            is_prefix_caching: is_on("prefix-caching", &args.prefix_caching)?,
            max_waiting_sequences: args.concurrent.iter().copied().max().unwrap_or(1).max(1),
            secret: uuid::Uuid::new_v4().as_bytes().to_vec(),
            rank_addresses: vec![links.local_addr(); world_size],
            devices: devices.clone(),
            collective_timeout: Duration::from_secs(30),
            metrics: Arc::new(Metrics::new()?),
            cancel: CancellationToken::new(),
        };
        let bar = progress::bytes_bar("loading");
        let replica = Replica::load(spec, links, &|loaded, total| {
            bar.set_length(total);
            bar.set_position(loaded);
        })?;
        let num_bytes = bar.position();
        bar.finish_and_clear();
        let leader = replica.leader().context("the replica has no leader")?.clone();
        let device = match devices.selection() {
            DeviceSelection::Cpu if args.threads == 0 => String::from("all threads"),
            DeviceSelection::Cpu => format!("threads per rank: {}", args.threads),
            selection => format!("{selection} ({})", devices.reason()),
        };
        let kv = plan_dtype.map_or_else(String::new, |dtype| format!(", KV in {dtype}"));
        let name = lockstep_coordinator::config::default_model_name(&model.to_string_lossy());
        let description = format!(
            "{name} in process, tensor {} x pipeline {}, {device}{kv}, steps of {max_step_tokens} tokens at most",
            args.tensor_parallel, args.pipeline_parallel
        );
        Ok(Self {
            _replica: replica,
            leader,
            num_bytes,
            description,
            vocab_size: checkpoint.config().vocab_size,
            max_sequence_tokens,
        })
    }

    /// Runs one sequence to its end.
    ///
    /// # Errors
    /// If the replica refuses it or breaks.
    pub async fn generate(&self, prompt: Vec<u32>, max_tokens: usize) -> anyhow::Result<TokenTimes> {
        let start = Instant::now();
        let sampling = Sampling::greedy(max_tokens);
        let request_id = String::from(WORKER_ID);
        let tenant = Tenant::default();
        let request = SequenceRequest { request_id, tenant, token_ids: prompt, num_output_tokens: 0, sampling };
        let mut running = self.leader.submit(request).await?;
        let mut tokens = Vec::with_capacity(max_tokens);
        while let Some(output) = running.outputs.recv().await {
            match output {
                SequenceOutput::Token { .. } => tokens.push(Instant::now()),
                SequenceOutput::Finished { .. } => return Ok(TokenTimes { start, tokens }),
            }
        }
        anyhow::bail!("the replica broke")
    }
}

/// Sizes that hold what is measured, and no more KV blocks than that.
fn options(args: &Args) -> PlanOptions {
    let deepest = args.depth.iter().copied().max().unwrap_or(0);
    let prefill = args.shared_prefix + args.prefill.iter().copied().max().unwrap_or(0);
    let longest = prefill.max(deepest + args.decode) + 64;
    let concurrent = args.concurrent.iter().copied().max().unwrap_or(1);
    let options = PlanOptions::default();
    PlanOptions {
        max_sequence_tokens: Some(longest),
        max_num_sequences: options.max_num_sequences.max(concurrent),
        max_step_tokens: args.max_step_tokens,
        num_kv_blocks: Some(longest.div_ceil(options.block_size) * (concurrent + 1)),
        ..options
    }
}

fn devices(args: &Args, world_size: usize) -> anyhow::Result<LocalDevices> {
    let settings = DeviceSettings {
        selection: args.devices.selection()?,
        reason: None,
        num_cpu_devices: world_size,
        threads_per_device: args.threads,
        dtype: args.devices.dtype()?,
        kernel_cache: settings::default_kernel_cache(),
    };
    let devices = LocalDevices::choose(settings, world_size)?;
    anyhow::ensure!(
        devices.len() >= world_size,
        "{world_size} ranks need as many devices, --device names {}",
        devices.len()
    );
    Ok(devices)
}

/// As many devices as ranks, each as fast as the slowest of those that get one: measurements scatter, and equal devices have
/// equal parts.
fn topology(world_size: usize, infos: &[DeviceInfo], dtype: Option<Dtype>) -> Topology {
    let used = &infos[..world_size.min(infos.len())];
    let slowest = |rate: fn(&DeviceInfo) -> f64| used.iter().map(rate).fold(f64::INFINITY, f64::min);
    let device = |local_rank| DeviceSpec {
        worker_id: String::from(WORKER_ID),
        local_rank,
        host: String::from(WORKER_ID),
        name: used.first().map(|info| info.name.clone()).unwrap_or_default(),
        memory_bytes: MEMORY_BYTES,
        memory_bytes_per_second: slowest(|info| info.memory_bytes_per_second),
        operations_per_second: slowest(|info| info.operations_per_second),
        dtype,
        peer_link: None,
    };
    Topology { devices: (0..world_size).map(device).collect(), intra_host: None, inter_host: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_as_fast_as_the_slowest_device_that_has_one() {
        let info = |name: &str, rate: f64| DeviceInfo {
            name: String::from(name),
            memory_bytes: 1,
            host_memory_bytes: None,
            memory_bytes_per_second: 2.0 * rate,
            operations_per_second: rate,
            peer_link: None,
            abilities: Default::default(),
        };
        let topology = topology(2, &[info("fast", 5.0), info("slow", 3.0), info("idle", 1.0)], None);
        let rates: Vec<_> =
            topology.devices.iter().map(|it| (it.memory_bytes_per_second, it.operations_per_second)).collect();
        assert_eq!(rates, [(6.0, 3.0); 2]);
        assert!(topology.devices.iter().all(|device| device.name == "fast"));
    }
}
