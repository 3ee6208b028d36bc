//! Workers are killed and stopped under running streams: every stream goes on, token for token as if nothing had been.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Context;
use lockstep_proto::v1::{
    self, GenerateRequest, GetClusterRequest, ReplicaState, ReplicaStatus, generate_response::Event,
};
use lockstep_tests::{
    Client, Cluster, Layout, Output,
    client::{check_undisturbed, tokens},
    cluster::SpareWorker,
    process::PATIENCE,
};
use tokio::task::JoinHandle;

/// Most that a client may wait for the next token when a second replica takes over, and when a new one must be loaded.
const LONGEST_GAP: Duration = Duration::from_secs(3);
const LONGEST_GAP_WITH_A_PLAN: Duration = Duration::from_secs(10);
/// The signal that ends a process at once, and the one that stops it until `-CONT`.
pub const KILL: &str = "-9";
pub const STOP: &str = "-STOP";
/// Tokens of a stream: some seconds of work.
const NUM_TOKENS: u32 = 250;
/// Of which so many have come when the fault strikes.
const NUM_TOKENS_BEFORE: usize = 40;

/// What the streams ask for: greedy, and drawn with a seed and penalties.
pub fn requests() -> [GenerateRequest; 2] {
    let request = |sampling| GenerateRequest {
        input: Some(tokens(&[504, 3575, 282, 4649, 314])),
        sampling: Some(sampling),
        ..Default::default()
    };
    let greedy = v1::SamplingParams {
        max_tokens: Some(NUM_TOKENS),
        temperature: Some(0.0),
        logprobs: 2,
        ignore_eos: true,
        ..Default::default()
    };
    let drawn = v1::SamplingParams {
        temperature: Some(0.8),
        top_p: Some(0.95),
        seed: Some(7),
        repetition_penalty: Some(1.1),
        frequency_penalty: Some(0.2),
        ..greedy.clone()
    };
    [request(greedy), request(drawn)]
}

/// Reads a stream to its end, with the longest time between two of its messages. Counts its tokens as they come.
async fn follow(
    client: Client,
    request: GenerateRequest,
    count: tokio::sync::watch::Sender<usize>,
) -> anyhow::Result<(Output, Duration)> {
    let mut stream = client.start(request).await?;
    let (mut output, mut gap, mut last) = (Output::default(), Duration::ZERO, Instant::now());
    while let Some(message) = stream.message().await? {
        gap = gap.max(last.elapsed());
        last = Instant::now();
        match message.event.context("an empty message")? {
            Event::Delta(delta) => {
                output.text.push_str(&delta.text);
                output.token_ids.extend(delta.token_ids);
                output.logprobs.extend(delta.logprobs);
                count.send_replace(output.token_ids.len());
            }
            Event::Finish(finish) => output.finish = finish,
        }
    }
    Ok((output, gap))
}

/// Starts streams of these requests and returns once each has brought some tokens.
pub async fn start(
    client: &Client,
    requests: &[GenerateRequest],
) -> Vec<JoinHandle<anyhow::Result<(Output, Duration)>>> {
    let mut streams = Vec::new();
    let mut counts = Vec::new();
    for request in requests {
        let (sender, count) = tokio::sync::watch::channel(0);
        streams.push(tokio::spawn(follow(client.clone(), request.clone(), sender)));
        counts.push(count);
    }
    for mut count in counts {
        count.wait_for(|count| *count >= NUM_TOKENS_BEFORE).await.unwrap();
    }
    streams
}

async fn replicas(client: &Client) -> Vec<ReplicaStatus> {
    let cluster = client.admin.clone().get_cluster(GetClusterRequest {}).await.unwrap().into_inner();
    cluster.models.into_iter().flat_map(|model| model.replicas).collect()
}

/// The replicas, once so many are ready.
pub async fn ready_replicas(client: &Client, count: usize) -> Vec<ReplicaStatus> {
    let end = Instant::now() + PATIENCE;
    loop {
        let replicas = replicas(client).await;
        if replicas.iter().filter(|replica| replica.state() == ReplicaState::Ready).count() == count {
            return replicas;
        }
        assert!(Instant::now() < end, "not all of {count} replicas are ready: {replicas:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The process of a rank: one of `up`, or else the spare worker.
fn pid_of(cluster: &Cluster, spare: Option<&SpareWorker>, replica: &ReplicaStatus, rank: usize) -> String {
    let index = replica.ranks[rank].worker_id.strip_prefix("worker-");
    let pid = index.map_or_else(|| spare.unwrap().pid(), |index| cluster.worker_pid(index.parse().unwrap()).unwrap());
    pid.to_string()
}

/// Sends a signal to a process.
pub fn signal(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
}

/// Strikes `rank` of the first of two replicas, or of the only one if there is a spare worker, under streams of all
/// requests, and compares them with `undisturbed`.
async fn strike(
    cluster: &Cluster,
    client: &Client,
    spare: Option<&SpareWorker>,
    (rank, fault): (usize, &str),
    undisturbed: &[Output],
) {
    let num_replicas = if spare.is_some() { 1 } else { 2 };
    let first = ready_replicas(client, num_replicas).await.remove(0);
    let pid = pid_of(cluster, spare, &first, rank);
    // In an order that gives each of two replicas one of each kind.
    let [greedy, drawn] = requests();
    let streams = start(client, &[greedy.clone(), drawn.clone(), drawn, greedy]).await;
    signal(fault, &pid);
    let mut longest = Duration::ZERO;
    for (stream, expected) in streams.into_iter().zip([0, 1, 1, 0]) {
        let (output, gap) = stream.await.unwrap().unwrap_or_else(|error| panic!("{error:?}\n{}", cluster.log()));
        check_undisturbed(&undisturbed[expected], &output)
            .unwrap_or_else(|error| panic!("after {fault} of rank {rank}: {error}"));
        longest = longest.max(gap);
    }
    if fault == STOP {
        signal("-CONT", &pid);
    }
    let limit = if num_replicas > 1 { LONGEST_GAP } else { LONGEST_GAP_WITH_A_PLAN };
    println!("stream gap, {num_replicas} replicas x TP 2, kill {fault} of rank {rank}: {:.2} s", longest.as_secs_f64());
    assert!(longest < limit, "{longest:?}\n{}", cluster.log());
}

/// What the requests yield while nothing happens.
pub async fn undisturbed(client: &Client) -> Vec<Output> {
    let mut outputs = Vec::new();
    for request in requests() {
        outputs.push(client.generate(request).await.unwrap());
    }
    outputs
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_move_to_the_second_replica() {
    let cluster = Cluster::start(Layout { replicas: 2, workers: 4, ..Layout::new(2, 1) }).unwrap();
    let client = cluster.client().await.unwrap();
    ready_replicas(&client, 2).await;
    let undisturbed = undisturbed(&client).await;
    for fault in [(1, KILL), (0, KILL), (1, STOP), (0, STOP)] {
        strike(&cluster, &client, None, fault, &undisturbed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_wait_for_a_new_plan() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let spare = cluster.spare_worker("spare").unwrap();
    let undisturbed = undisturbed(&client).await;
    for fault in [(0, KILL), (1, STOP)] {
        strike(&cluster, &client, Some(&spare), fault, &undisturbed).await;
    }
}
