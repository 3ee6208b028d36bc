//! Workers are restarted one after the other under running streams, as in an update: nothing is refused, nothing is lost.
//! A rank that is stopped while nothing runs makes its replica unready all the same.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_proto::v1::{GenerateRequest, SamplingParams, generate_request::Input};
use lockstep_tests::{Cluster, Layout, Output, process::PATIENCE};

use crate::{
    prompts::PROMPTS,
    worker_loss::{STOP, ready_replicas, signal},
};

const NUM_STREAMS: usize = 16;
const NUM_TOKENS: u32 = 64;
/// So short that streams outlive the drain and have to move.
const DRAIN_SECS: &str = "1";
/// From the stop of an idle rank to a replica that is not ready.
const LONGEST_DETECTION: Duration = Duration::from_secs(5);

fn request(index: usize) -> GenerateRequest {
    let sampling = SamplingParams {
        max_tokens: Some(NUM_TOKENS),
        temperature: Some(if index.is_multiple_of(2) { 0.0 } else { 0.8 }),
        seed: Some(index as u64),
        ignore_eos: true,
        ..Default::default()
    };
    let input = Some(Input::Prompt(PROMPTS[index % PROMPTS.len()].to_owned()));
    GenerateRequest { input, sampling: Some(sampling), ..Default::default() }
}

fn assert_same(output: &Output, expected: &Output) {
    assert_eq!((&output.token_ids, &output.text), (&expected.token_ids, &expected.text));
    assert_eq!(output.finish.reason, expected.finish.reason);
}

/// Waits until `up` has started worker `index` again; by then the process that had `pid` has ended by itself.
async fn restarted(cluster: &Cluster, index: usize, pid: u64) {
    let end = Instant::now() + PATIENCE;
    while cluster.worker_pid(index).unwrap() == pid {
        assert!(Instant::now() < end, "worker {index} does not end: {}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_the_workers_loses_nothing() {
    let layout = Layout { replicas: 2, workers: 2, ..Layout::new(1, 1) };
    let drain = [("LOCKSTEP_DRAIN_TIMEOUT_SECS", Path::new(DRAIN_SECS))];
    let cluster = Cluster::start_with_environment(layout, &drain).unwrap();
    let client = cluster.client().await.unwrap();
    ready_replicas(&client, 2).await;
    let mut undisturbed = Vec::new();
    for index in 0..4 {
        undisturbed.push(client.generate(request(index)).await.unwrap());
    }
    let (undisturbed, is_over) = (Arc::new(undisturbed), Arc::new(AtomicBool::new(false)));
    let num_complete = Arc::new(AtomicUsize::new(0));
    let streams = (0..NUM_STREAMS).map(|stream| {
        let (client, undisturbed, is_over) = (client.clone(), undisturbed.clone(), is_over.clone());
        let num_complete = num_complete.clone();
        tokio::spawn(async move {
            for index in (0..undisturbed.len()).cycle().skip(stream) {
                assert_same(&client.generate(request(index)).await.unwrap(), &undisturbed[index]);
                num_complete.fetch_add(1, Ordering::Relaxed);
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        })
    });
    let streams: Vec<_> = streams.collect();
    for index in 0..2 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let pid = cluster.worker_pid(index).unwrap();
        signal("-TERM", &pid.to_string());
        restarted(&cluster, index, pid).await;
        ready_replicas(&client, 2).await;
    }
    is_over.store(true, Ordering::Relaxed);
    for stream in streams {
        stream.await.unwrap_or_else(|error| panic!("{error:?}\n{}", cluster.log()));
    }
    let log = cluster.log();
    assert_eq!(log.matches("exit status: 0").count(), 2, "{log}");
    assert!(!log.contains("sequences are cut off"), "{log}");
    let num_moved = log.matches("a running request lost its replica").count();
    println!("rolling restart: {} streams as undisturbed, {num_moved} moves", num_complete.load(Ordering::Relaxed));
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
