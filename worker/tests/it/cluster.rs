//! Replicas in one process over loopback links: every rank a worker of its own, cut by hand.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_model::Checkpoint;
use lockstep_sharding::{ModelShape, Parallelism, PlanOptions, Policy, ReplicaPlan, Topology};
use lockstep_worker::{
    collective::LinkListener,
    devices::{DeviceSelection, DeviceSettings, LocalDevices},
    engine::{Logprobs, Sampling, SequenceOutput, SequenceRequest, Tenant},
    metrics::Metrics,
    replica::{LeaderHandle, Replica, ReplicaSpec},
};

/// The real model that `tests/run.sh` provides.
pub fn test_model() -> PathBuf {
    match std::env::var_os("LOCKSTEP_TEST_MODEL") {
        Some(path) => path.into(),
        None => panic!("LOCKSTEP_TEST_MODEL is not set: run tests/run.sh, which fetches the model and sets it"),
    }
}

/// The planner's cut: one pipeline stage for each entry, of so many tensor-parallel ranks, each rank a worker of its own.
pub fn cut(shape: &ModelShape, stages: &[usize], num_kv_blocks: usize) -> ReplicaPlan {
    let mut plan = ReplicaPlan { stages: Vec::new(), num_kv_blocks };
    let mut rank = 0;
    for (index, size) in stages.iter().enumerate() {
        // The planner's stages are all of one size; those of a mixed plan come from one plan for each size.
        let mut stage = even_cut(shape, *size, stages.len(), num_kv_blocks).stages.swap_remove(index);
        for part in &mut stage.ranks {
            (part.rank, part.device, part.worker_id) = (rank, rank, format!("worker-{rank}"));
            rank += 1;
        }
        plan.stages.push(stage);
    }
    plan
}

fn even_cut(shape: &ModelShape, tensor: usize, pipeline: usize, num_kv_blocks: usize) -> ReplicaPlan {
    let devices = Topology::parse_devices(&format!("{}*h200@host", tensor * pipeline)).unwrap();
    let parallelism = Parallelism::Fixed { tensor_parallel_size: tensor, pipeline_parallel_size: pipeline };
    let policy = Policy { parallelism, replicas: Some(1) };
    let options = PlanOptions { num_kv_blocks: Some(num_kv_blocks), ..PlanOptions::default() };
    lockstep_sharding::plan(shape, &devices, &policy, &options).unwrap().replicas.swap_remove(0)
}

/// A replica with a worker for each rank (or one for all), in this process.
pub struct Cluster {
    /// One part for each worker; the first leads.
    pub parts: Vec<Replica>,
    /// Bytes that each part's ranks read.
    pub loaded_bytes: Vec<u64>,
}

impl Cluster {
    /// Loads the model, cut as `stages` says, each rank a worker of its own.
    pub fn start(model: &Path, stages: &[usize]) -> Self {
        let checkpoint = Checkpoint::open(model).unwrap();
        Self::load(model, cut(checkpoint.shape(), stages, 256))
    }

    /// Loads a plan; its workers are those that it names.
    pub fn load(model: &Path, plan: ReplicaPlan) -> Self {
        Self::load_following(model, plan, |_, _, _| ())
    }

    /// Loads a plan; `progress` is told the number of the worker, the bytes that it has loaded and all of its bytes.
    pub fn load_following(
        model: &Path,
        mut plan: ReplicaPlan,
        progress: impl Fn(usize, u64, u64) + Clone + Send + Sync + 'static,
    ) -> Self {
        let mut workers: Vec<String> = Vec::new();
        let mut rank_addresses: Vec<SocketAddr> = Vec::new();
        let mut listeners = Vec::new();
        let mut num_ranks = Vec::new();
        for rank in plan.stages.iter_mut().flat_map(|stage| &mut stage.ranks) {
            let worker = workers.iter().position(|worker| *worker == rank.worker_id).unwrap_or_else(|| {
                workers.push(rank.worker_id.clone());
                listeners.push(Arc::new(LinkListener::bind("127.0.0.1:0".parse().unwrap(), None).unwrap()));
                num_ranks.push(0);
                workers.len() - 1
            });
            rank.local_rank = num_ranks[worker];
            num_ranks[worker] += 1;
            rank_addresses.push(listeners[worker].local_addr());
        }
        let loads: Vec<_> = workers
            .into_iter()
            .zip(listeners)
            .enumerate()
            .map(|(worker, (worker_id, listener))| {
                let follow = progress.clone();
                let spec = spec(model, plan.clone(), worker_id, num_ranks[worker], rank_addresses.clone());
                std::thread::spawn(move || {
                    let loaded = AtomicU64::new(0);
                    let progress = |bytes, total| {
                        loaded.store(bytes, Ordering::Relaxed);
                        follow(worker, bytes, total);
                    };
                    let replica = Replica::load(spec, listener, &progress).unwrap();
                    (replica, loaded.load(Ordering::Relaxed))
                })
            })
            .collect();
        let (parts, loaded_bytes) = loads.into_iter().map(|load| load.join().unwrap()).unzip();
        Self { parts, loaded_bytes }
    }

    /// Where sequences are submitted.
    pub fn leader(&self) -> &LeaderHandle {
        self.parts[0].leader().unwrap()
    }

    /// Waits until the leader's part is broken and says why.
    pub fn wait_broken(&self, within: Duration) -> String {
        let start = Instant::now();
        loop {
            if let Some(reason) = self.parts[0].problem().borrow().clone() {
                return reason;
            }
            assert!(start.elapsed() < within, "the replica is not broken after {within:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn spec(
    model: &Path,
    plan: ReplicaPlan,
    worker_id: String,
    num_ranks: usize,
    rank_addresses: Vec<SocketAddr>,
) -> ReplicaSpec {
    let one_thread = DeviceSettings {
        selection: DeviceSelection::Cpu,
        num_cpu_devices: num_ranks,
        threads_per_device: 1,
        ..DeviceSettings::default()
    };
    ReplicaSpec {
        worker_id,
        model: "model".to_owned(),
        source: model.to_owned(),
        plan_epoch: 1,
        replica: 0,
        index: 0,
        plan,
        block_size: 16,
        max_sequence_tokens: 1024,
        max_num_sequences: 64,
        max_step_tokens: 64,
        max_waiting_sequences: 128,
        is_prefix_caching: true,
        secret: b"secret of the test".to_vec(),
        rank_addresses,
        devices: LocalDevices::choose(one_thread, 1).unwrap(),
        collective_timeout: Duration::from_secs(30),
        metrics: Arc::new(Metrics::new().unwrap()),
        cancel: Default::default(),
    }
}

/// Greedy decoding of `prompt`, with the two most likely tokens of each step.
pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> SequenceRequest {
    let sampling = Sampling { logprobs: 2, ..Sampling::greedy(max_tokens) };
    let (request_id, tenant) = ("test".to_owned(), Tenant::default());
    SequenceRequest { request_id, tenant, token_ids: prompt, num_output_tokens: 0, sampling }
}

/// Runs a sequence to its end.
pub async fn run(leader: &LeaderHandle, request: SequenceRequest) -> Vec<(u32, Logprobs)> {
    let mut running = leader.submit(request).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(output) = running.outputs.recv().await {
        match output {
            SequenceOutput::Token { token_id, logprobs, .. } => tokens.push((token_id, logprobs.unwrap())),
            SequenceOutput::Finished { .. } => return tokens,
        }
    }
    panic!("the sequence ended without Finished after {} tokens", tokens.len());
}

/// A runtime for the few async calls of a test.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}
