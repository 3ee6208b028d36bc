//! Workers and coordinators are restarted one after the other under running streams, as in an update: nothing is lost, and
//! as long as the coordinators stay nothing is refused. What still runs at a worker's drain deadline moves. A rank that is
//! stopped while nothing runs makes its replica unready all the same.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use lockstep_proto::v1::{GenerateRequest, SamplingParams, generate_request::Input};
use lockstep_tests::{
    Cluster, Layout, SharedCluster, client::check_undisturbed, network::Node, process::PATIENCE, shared::Members,
};

use crate::{
    prompts::PROMPTS,
    streams::Streams,
    worker_loss::{self, STOP, ready_replicas, signal},
};

const NUM_STREAMS: usize = 16;
const NUM_TOKENS: u32 = 64;
/// So short that streams outlive the drain and have to move.
const DRAIN_SECS: &str = "1";
/// The same for a handful of long streams, as seconds.
const SHORT_DRAIN: &str = "--drain-timeout-secs=0.5";
/// From the stop of an idle rank to a replica that is not ready.
const LONGEST_DETECTION: Duration = Duration::from_secs(5);
/// From SIGTERM to all to the end of the last, where nothing runs.
const LONGEST_END: Duration = Duration::from_secs(12);
/// What a move at the deadline may cost a stream.
const LONGEST_GAP: Duration = Duration::from_secs(3);

fn request(index: usize) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens: Some(NUM_TOKENS),
        temperature: Some(if index.is_multiple_of(2) { 0.0 } else { 0.8 }),
        seed: Some(index as u64),
        logprobs: 1,
        ignore_eos: true,
        ..Default::default()
    };
    let input = Some(Input::Prompt(PROMPTS[index % PROMPTS.len()].to_owned()));
    GenerateRequest { input, sampling: Some(sampling), ..Default::default() }
}

/// Waits until `up` has started worker `index` again; by then the process that had `pid` has ended by itself.
async fn restarted(cluster: &Cluster, index: usize, pid: u64) {
    let end = Instant::now() + PATIENCE;
    while cluster.worker_pid(index).unwrap() == pid {
        assert!(Instant::now() < end, "worker {index} does not end: {}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Tells a member to end, and waits until it has, well.
async fn terminate(cluster: &mut SharedCluster, node: Node) {
    signal("-TERM", &cluster.pid(node).unwrap().to_string());
    ended_well(cluster, node).await;
}

async fn ended_well(cluster: &mut SharedCluster, node: Node) {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = cluster.ended(node).unwrap() {
            assert!(status.success(), "{node:?}: {status}\n{}", cluster.log());
            return;
        }
        assert!(Instant::now() < end, "{node:?} does not end: {}", cluster.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_the_workers_refuses_nothing() {
    let layout = Layout { replicas: 2, workers: 2, ..Layout::new(1, 1) };
    let drain = [("LOCKSTEP_DRAIN_TIMEOUT_SECS", Path::new(DRAIN_SECS))];
    let cluster = Cluster::start_with_environment(layout, &drain).unwrap();
    let client = cluster.client().await.unwrap();
    ready_replicas(&client, 2).await;
    let streams = Streams::start(std::slice::from_ref(&client), (0..4).map(request).collect(), NUM_STREAMS).await;
    for index in 0..2 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let pid = cluster.worker_pid(index).unwrap();
        signal("-TERM", &pid.to_string());
        restarted(&cluster, index, pid).await;
        ready_replicas(&client, 2).await;
    }
    let (num_complete, num_refused) = streams.end(|| cluster.log()).await;
    let log = cluster.log();
    assert_eq!(num_refused, 0, "{log}");
    assert_eq!(log.matches("exit status: 0").count(), 2, "{log}");
    assert!(!log.contains("sequences are cut off"), "{log}");
    let num_moved = log.matches("a running request lost its replica").count();
    println!("rolling restart: {num_complete} streams as undisturbed, {num_moved} moves");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_all_loses_nothing() {
    let worker_arguments = &[&*format!("--drain-timeout-secs={DRAIN_SECS}")];
    let members = Members { worker_arguments, ..Members::new(2, 2, "tensor=1,replicas=2") };
    let mut cluster = SharedCluster::start_members(members).unwrap();
    let clients = [cluster.client(0).await.unwrap(), cluster.client(1).await.unwrap()];
    for client in &clients {
        ready_replicas(client, 2).await;
    }
    let streams = Streams::start(&clients, (0..4).map(request).collect(), NUM_STREAMS).await;
    let order = [Node::Worker(0), Node::Coordinator(0), Node::Worker(1), Node::Coordinator(1)];
    for node in order {
        streams.progress(NUM_STREAMS / 2).await;
        let begin = Instant::now();
        terminate(&mut cluster, node).await;
        let ended = begin.elapsed();
        cluster.restart(node).unwrap();
        if let Node::Coordinator(index) = node {
            cluster.wait_listening(index).unwrap();
        }
        for client in &clients {
            ready_replicas(client, 2).await;
        }
        println!("{node:?} ended {ended:.1?} after SIGTERM, all is ready after {:.1?}", begin.elapsed());
    }
    let (num_complete, num_refused) = streams.end(|| cluster.log()).await;
    println!("rolling restart of all: {num_complete} streams as undisturbed, sent elsewhere {num_refused} times");
    assert!(!cluster.log().contains("sequences are cut off"), "{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_are_told_to_end_at_once_do_so() {
    let mut cluster = SharedCluster::start(2, 2, "tensor=1,replicas=2").unwrap();
    ready_replicas(&cluster.client(0).await.unwrap(), 2).await;
    let all = [Node::Coordinator(0), Node::Coordinator(1), Node::Worker(0), Node::Worker(1)];
    let begin = Instant::now();
    for node in all {
        signal("-TERM", &cluster.pid(node).unwrap().to_string());
    }
    for node in all {
        ended_well(&mut cluster, node).await;
    }
    println!("all have ended after {:.1?}", begin.elapsed());
    assert!(begin.elapsed() < LONGEST_END && !cluster.log().contains("drain timed out"), "{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_at_the_drain_deadline_moves() {
    let worker_arguments = &[SHORT_DRAIN];
    let members = Members { worker_arguments, ..Members::new(1, 2, "tensor=1,replicas=2") };
    let mut cluster = SharedCluster::start_members(members).unwrap();
    let client = cluster.client(0).await.unwrap();
    ready_replicas(&client, 2).await;
    let [greedy, drawn] = worker_loss::requests();
    let undisturbed = [client.generate(greedy.clone()).await.unwrap(), client.generate(drawn.clone()).await.unwrap()];
    // In an order that gives each replica one of each kind, and work for longer than the drain may take.
    let requests = [greedy.clone(), drawn.clone(), drawn, greedy];
    let streams = worker_loss::start(&client, &[&requests[..], &requests].concat()).await;
    let begin = Instant::now();
    terminate(&mut cluster, Node::Worker(0)).await;
    println!("the worker ended {:.2} s after SIGTERM", begin.elapsed().as_secs_f64());
    let mut longest = Duration::ZERO;
    for (stream, expected) in streams.into_iter().zip([0, 1, 1, 0].into_iter().cycle()) {
        let (output, gap) = stream.await.unwrap().unwrap_or_else(|error| panic!("{error:?}\n{}", cluster.log()));
        check_undisturbed(&undisturbed[expected], &output).unwrap();
        longest = longest.max(gap);
    }
    let log = cluster.log();
    let num_moved = log.matches("a request was moved").count();
    println!("{num_moved} of 8 streams moved at the deadline, longest gap {:.2} s", longest.as_secs_f64());
    assert!(num_moved > 0 && !log.contains("sequences are cut off"), "{log}");
    assert!(longest < LONGEST_GAP, "{longest:?}\n{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_rank_makes_an_idle_replica_unready() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let replica = ready_replicas(&client, 1).await.remove(0);
    let index = replica.ranks[1].worker_id.strip_prefix("worker-").unwrap().parse().unwrap();
    let pid = cluster.worker_pid(index).unwrap().to_string();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let begin = Instant::now();
    signal(STOP, &pid);
    ready_replicas(&client, 0).await;
    println!("an idle replica is unready {:.2} s after the stop of a rank", begin.elapsed().as_secs_f64());
    assert!(begin.elapsed() < LONGEST_DETECTION, "{:?}", begin.elapsed());
    // The replica is broken; what goes on again gets a new one.
    signal("-CONT", &pid);
    let again = ready_replicas(&client, 1).await.remove(0);
    assert_eq!(again.ranks.len(), 2);
    client.generate(request(0)).await.unwrap();
}
