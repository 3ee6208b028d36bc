//! A worker takes memory for its own slices of the model, and for what it computes; and not for more.

use std::{path::Path, process::Stdio, time::Duration};

use lockstep_proto::v1;
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    environment,
    process::{PATIENCE, synthesize},
};
use tokio::process::{Child, Command};

/// How far a rank's memory may lie from its half of the model file.
const TOLERANCE: f64 = 0.15;

/// Bytes of SmolLM2-135M that both ranks hold: keys and values of one of three heads in each layer, in Q4_1 (5 bytes for
/// 8 weights), and the norms.
const REPLICATED_BYTES: u64 = 30 * 2 * 64 * 576 / 8 * 5 + 61 * 576 * 4;

/// Memory of a process, bytes: all that is resident, and of that what is its own. The rest is pages of the program's
/// file, which all workers of a machine share.
#[derive(Clone, Copy, Debug)]
struct Memory {
    resident: u64,
    own: u64,
}

impl Memory {
    fn of(pid: u64) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
        };
        Self { resident: field("VmRSS:"), own: field("RssAnon:") }
    }
}

/// One more worker, which no plan uses; returns it when it is registered.
async fn idle_worker(cluster: &Cluster, client: &Client) -> Child {
    let coordinator = format!("http://{}", cluster.grpc());
    let worker = Command::new(environment::binary().unwrap())
        .args(["worker", "--worker-id=idle", "--device=cpu", "--threads-per-device=1", "--coordinator", &coordinator])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let registered = async {
        loop {
            let seen = client.admin.clone().get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner();
            if seen.workers.iter().any(|worker| worker.worker_id == "idle") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, registered).await.unwrap();
    worker
}

/// Memory of both ranks after a generation, and of a worker without a replica: what the program itself takes.
async fn measure(model: &Path) -> ([Memory; 2], Memory) {
    let cluster = Cluster::start_with(Layout::new(2, 1), model).unwrap();
    let client = cluster.client().await.unwrap();
    let output = client.generate(greedy(tokens(&[1, 2, 3, 4, 5]), 32)).await.unwrap();
    assert_eq!(output.token_ids.len(), 32);
    let ranks = [0, 1].map(|index| Memory::of(cluster.worker_pid(index).unwrap()));
    let idle = idle_worker(&cluster, &client).await;
    (ranks, Memory::of(idle.id().unwrap().into()))
}

/// Fails unless `bytes` is half of the model and what both ranks hold, within the tolerance.
fn check_half(what: &str, bytes: u64, model: &Path, replicated_bytes: u64) {
    let expected = std::fs::metadata(model).unwrap().len() / 2 + replicated_bytes;
    let ratio = bytes as f64 / expected as f64;
    println!("{what}: {bytes} bytes, {ratio:.3} of its part of the model");
    assert!((ratio - 1.0).abs() < TOLERANCE, "{what}: {bytes} bytes are {ratio:.3} of {expected} bytes");
}

/// Weights, KV blocks in use and activations, beside what a worker takes without a model.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_two_ranks_takes_half_of_a_small_model() {
    let model = environment::model().unwrap();
    let (ranks, program) = measure(&model).await;
    println!("without a model: {program:?}");
    for (rank, memory) in ranks.into_iter().enumerate() {
        check_half(&format!("rank {rank}"), memory.own.saturating_sub(program.own), &model, REPLICATED_BYTES);
    }
}

/// Where the model is large beside the program, all that is resident.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_two_ranks_takes_half_of_a_larger_model() {
    let folder = tempfile::TempDir::new().unwrap();
    let model = synthesize(folder.path(), 24).await.unwrap();
    let (ranks, _) = measure(&model).await;
    for (rank, memory) in ranks.into_iter().enumerate() {
        check_half(&format!("rank {rank}"), memory.resident, &model, 0);
    }
}
