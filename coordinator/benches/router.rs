//! What a coordinator does with many requests: the time that it adds at a given rate, the requests that a core of it
//! serves, and the memory that its streams take. Clients and a stub worker that computes nothing share the process; the
//! coordinator has threads of its own, whose processor time the kernel counts.
//!
//!   cargo bench --workspace --bench router
//!   ROUTER_RATE=500 ROUTER_SECS=10 ROUTER_STREAMS=1000 cargo bench --workspace --bench router

#![allow(clippy::unwrap_used, clippy::panic, reason = "a bench fails by panicking")]

#[path = "../tests/stub/mod.rs"]
mod stub;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_coordinator::CoordinatorConfig;
use lockstep_proto::v1::{
    self, generate_request::Input, inference_client::InferenceClient, worker_client::WorkerClient,
};
use lockstep_sharding::PlanOptions;
use tonic::transport::Channel;

/// Name of the coordinator's threads.
const COORDINATOR: &str = "coordinator";
/// What is asked, and one in how many of the full rate: 200 KB at full rate would measure the loopback.
const PROMPTS: [(Prompt, u64); 3] =
    [(Prompt::Text(200), 1), (Prompt::TokenIds(50_000), 100), (Prompt::Text(200_000), 100)];
/// Connections of the clients.
const NUM_CONNECTIONS: usize = 8;
/// Requests under way where as many as possible are served.
const NUM_AT_ONCE: usize = 64;
/// Threads that have tokenized stay, with the processor time that they took; a stub is not lost because it was not heard of
/// while the machine was busy.
const ALL_DAY: Duration = Duration::from_secs(86_400);
/// The kernel counts processor time in so many ticks a second.
const TICKS_PER_SECOND: f64 = 100.0;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// A prompt of so many bytes, each a token, or of so many tokens, of which 50,000 stand for some 200 KB.
#[derive(Clone, Copy)]
enum Prompt {
    Text(usize),
    TokenIds(usize),
}

impl std::fmt::Display for Prompt {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(num_bytes) => write!(formatter, "{num_bytes}-byte prompts"),
            Self::TokenIds(num_tokens) => write!(formatter, "prompts of {num_tokens} token ids"),
        }
    }
}

/// Where requests are sent to.
struct Targets {
    through: Vec<InferenceClient<Channel>>,
    straight: Vec<WorkerClient<Channel>>,
    load: v1::LoadReplicaRequest,
}

fn main() {
    let runtime = |name: &str, threads| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(threads).thread_name(name).thread_keep_alive(ALL_DAY).enable_all().build().unwrap()
    };
    let (ours, theirs) = (runtime("clients", 2), runtime(COORDINATOR, 2));
    let options =
        PlanOptions { max_sequence_tokens: Some(stub::MODEL_TOKENS), max_num_sequences: 1, ..PlanOptions::default() };
    let num_streams = setting("ROUTER_STREAMS", 5000) as usize;
    let mut config = CoordinatorConfig {
        max_concurrent_requests: num_streams.max(4096),
        lease: ALL_DAY,
        ..stub::config("tensor=1", 1)
    };
    config.model.as_mut().unwrap().plan_options = options;
    let coordinator = theirs.block_on(stub::Coordinator::start(config));
    ours.block_on(async {
        let worker = stub::StubWorker::start("w0", coordinator.grpc).await;
        coordinator.wait_ready(true).await;
        let load = worker.state.loads.lock().unwrap()[0].clone();
        let mut targets = Targets { through: Vec::new(), straight: Vec::new(), load };
        for _ in 0..NUM_CONNECTIONS {
            targets.through.push(coordinator.inference().await);
            let client = WorkerClient::connect(format!("http://{}", worker.address)).await.unwrap();
            targets.straight.push(client.max_decoding_message_size(usize::MAX));
        }
        let targets = Arc::new(targets);
        println!("load of the machine: {}", std::fs::read_to_string("/proc/loadavg").unwrap().trim());
        // First: what long prompts took of the allocator stays there.
        streams(&targets, &worker, num_streams).await;
        for (prompt, share) in PROMPTS {
            let rate = (setting("ROUTER_RATE", 2000) / share).max(1);
            latency(&targets, prompt, rate).await;
        }
        for (prompt, _) in PROMPTS {
            throughput(&targets, prompt).await;
        }
    });
    drop(coordinator);
    theirs.shutdown_background();
    ours.shutdown_background();
}

/// The time to the first token at a steady rate, through the coordinator and straight to the worker.
async fn latency(targets: &Arc<Targets>, prompt: Prompt, rate: u64) {
    let mut quantiles = Vec::new();
    for is_through in [false, true] {
        let pause = Duration::from_secs(1) / rate as u32;
        let mut interval = tokio::time::interval(pause);
        let (begin, mut requests) = (Instant::now(), tokio::task::JoinSet::new());
        let mut index = 0;
        while begin.elapsed() < Duration::from_secs(setting("ROUTER_SECS", 5)) {
            interval.tick().await;
            requests.spawn(first_token(Arc::clone(targets), index, prompt, is_through));
            index += 1;
        }
        let mut times = requests.join_all().await;
        times.sort_unstable();
        quantiles.push([times[times.len() / 2], times[times.len() * 99 / 100]]);
    }
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let ([p50, p99], [straight_p50, straight_p99]) = (quantiles[1], quantiles[0]);
    println!(
        "{prompt}, {rate} requests/s: p50 {:.3} ms, p99 {:.3} ms through the coordinator; {:.3} and {:.3} straight; \
         added: p50 {:.3} ms, p99 {:.3} ms",
        millis(p50),
        millis(p99),
        millis(straight_p50),
        millis(straight_p99),
        millis(p50.saturating_sub(straight_p50)),
        millis(p99.saturating_sub(straight_p99)),
    );
}

/// Runs a request of two tokens; the time to the first.
async fn first_token(targets: Arc<Targets>, index: usize, prompt: Prompt, is_through: bool) -> Duration {
    let request = request(prompt, 2);
    if is_through {
        let mut client = targets.through[index % NUM_CONNECTIONS].clone();
        let begin = Instant::now();
        let mut stream = client.generate(request).await.unwrap().into_inner();
        stream.message().await.unwrap();
        let time = begin.elapsed();
        while stream.message().await.unwrap().is_some() {}
        return time;
    }
    let sequence = v1::RunSequenceRequest {
        model: targets.load.model.clone(),
        plan_epoch: targets.load.plan_epoch,
        token_ids: match prompt {
            Prompt::Text(num_tokens) | Prompt::TokenIds(num_tokens) => vec![120; num_tokens],
        },
        sampling: request.sampling,
        ..Default::default()
    };
    let mut client = targets.straight[index % NUM_CONNECTIONS].clone();
    let begin = Instant::now();
    let mut stream = client.run_sequence(sequence).await.unwrap().into_inner();
    stream.message().await.unwrap();
    let time = begin.elapsed();
    while stream.message().await.unwrap().is_some() {}
    time
}

fn request(prompt: Prompt, num_tokens: u32) -> v1::GenerateRequest {
    let input = match prompt {
        Prompt::Text(num_bytes) => Input::Prompt("x".repeat(num_bytes)),
        Prompt::TokenIds(num_tokens) => Input::TokenIds(v1::TokenIds { ids: vec![120; num_tokens] }),
    };
    v1::GenerateRequest { input: Some(input), ..stub::request(num_tokens) }
}

/// Requests for a second of the coordinator's processor time, with as many under way as it takes.
async fn throughput(targets: &Arc<Targets>, prompt: Prompt) {
    let (begin, used, count) = (Instant::now(), processor_seconds(), Arc::new(AtomicUsize::new(0)));
    let mut requests = tokio::task::JoinSet::new();
    for index in 0..NUM_AT_ONCE {
        let (targets, count) = (Arc::clone(targets), Arc::clone(&count));
        requests.spawn(async move {
            while begin.elapsed() < Duration::from_secs(setting("ROUTER_SECS", 5)) {
                first_token(Arc::clone(&targets), index, prompt, true).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    requests.join_all().await;
    let (count, used) = (count.load(Ordering::Relaxed) as f64, processor_seconds() - used);
    println!(
        "{prompt}, {NUM_AT_ONCE} at a time: {:.0} requests/s for each core of the coordinator ({:.0} requests/s)",
        count / used,
        count / begin.elapsed().as_secs_f64(),
    );
}

/// Processor time of the coordinator's threads.
fn processor_seconds() -> f64 {
    let mut ticks = 0.0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        let Some((name, numbers)) = stat.rsplit_once(") ") else { continue };
        if name.ends_with(COORDINATOR) {
            // Fields 14 and 15 of the line, user and system time; the state is the third.
            let of = |index: usize| numbers.split(' ').nth(index).unwrap().parse::<f64>().unwrap();
            ticks += of(11) + of(12);
        }
    }
    ticks / TICKS_PER_SECOND
}

/// Memory of the process for `count` streams that have brought a token and go on; then they are given up.
async fn streams(targets: &Arc<Targets>, worker: &stub::StubWorker, count: usize) {
    *worker.state.halts_at.lock().unwrap() = 1;
    let (before, begin) = (resident_bytes(), Instant::now());
    let mut open = Vec::with_capacity(count);
    for index in 0..count {
        let mut client = targets.through[index % NUM_CONNECTIONS].clone();
        let mut stream = client.generate(request(Prompt::Text(200), 100)).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        open.push(stream);
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{count} streams held, opened in {:.1} s: {:.0} MiB resident, {:.0} MiB more than before, clients and worker included",
        begin.elapsed().as_secs_f64(),
        mib(resident_bytes()),
        mib(resident_bytes().saturating_sub(before)),
    );
    drop(open);
    *worker.state.halts_at.lock().unwrap() = usize::MAX;
    while worker.state.num_running.load(Ordering::SeqCst) > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
