//! Many streams while workers are killed and stopped at random: every stream ends as if nothing had been.
//!
//! `LOCKSTEP_CHAOS_SECS` (20) says for how long faults strike, `LOCKSTEP_CHAOS_SEED` (1) which.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_proto::{
    status::Class,
    v1::{GenerateRequest, SamplingParams, generate_request::Input},
};
use lockstep_tests::{Client, Cluster, Layout, Output, process::PATIENCE};

use crate::{
    prompts::PROMPTS,
    worker_loss::{KILL, STOP, ready_replicas, signal},
};

const NUM_STREAMS: usize = 64;
const NUM_WORKERS: usize = 4;
const NUM_TOKENS: u32 = 48;
/// Between two faults, milliseconds: a base and what is added at random.
const PAUSE_MS: (u64, u64) = (2000, 3000);
/// How long a stopped worker is stopped.
const STOPPED: Duration = Duration::from_secs(4);

/// SplitMix64, so that a seed names a run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Half of them greedy, half drawn.
fn requests() -> Vec<GenerateRequest> {
    let request = |(index, prompt): (usize, &&str)| {
        let sampling = SamplingParams {
            max_tokens: Some(NUM_TOKENS),
            temperature: Some(if index % 2 == 0 { 0.0 } else { 0.8 }),
            seed: Some(index as u64),
            presence_penalty: Some(if index % 4 < 2 { 0.0 } else { 0.5 }),
            logprobs: 1,
            ..Default::default()
        };
        let input = Some(Input::Prompt((*prompt).to_owned()));
        GenerateRequest { input, sampling: Some(sampling), ..Default::default() }
    };
    PROMPTS.iter().enumerate().map(request).collect()
}

/// Asks until a replica takes the request: a refusal is no break.
async fn ask(client: &Client, request: &GenerateRequest) -> Output {
    let end = Instant::now() + PATIENCE;
    loop {
        match client.generate(request.clone()).await {
            Ok(output) => return output,
            Err(status) if Class::of(&status) == Class::NotReady && Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
}

/// The process that now is worker `index`; none while it waits for its restart.
fn pid_of(cluster: &Cluster, index: usize) -> Option<String> {
    let pid = cluster.worker_pid(index).unwrap().to_string();
    let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    command.contains(&format!("--worker-id=worker-{index}\0")).then_some(pid)
}

/// Strikes workers at random until `end`; returns the number of faults.
async fn strike(cluster: &Cluster, mut random: Random, end: Instant) -> usize {
    let mut num_faults = 0;
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(PAUSE_MS.0 + random.below(PAUSE_MS.1))).await;
        let index = random.below(NUM_WORKERS as u64) as usize;
        let fault = if random.below(3) == 0 { STOP } else { KILL };
        let Some(pid) = pid_of(cluster, index) else { continue };
        println!("kill {fault} of worker {index}");
        signal(fault, &pid);
        num_faults += 1;
        if fault == STOP {
            tokio::time::sleep(STOPPED).await;
            signal("-CONT", &pid);
        }
    }
    num_faults
}

#[tokio::test(flavor = "multi_thread")]
async fn every_stream_survives_random_faults() {
    let (seconds, seed) = (setting("LOCKSTEP_CHAOS_SECS", 20), setting("LOCKSTEP_CHAOS_SEED", 1));
    let cluster = Cluster::start(Layout { replicas: 2, workers: NUM_WORKERS, ..Layout::new(2, 1) }).unwrap();
    let client = cluster.client().await.unwrap();
    ready_replicas(&client, 2).await;
    let mut undisturbed = Vec::new();
    for request in requests() {
        undisturbed.push(client.generate(request).await.unwrap());
    }
    let (undisturbed, is_over) = (Arc::new(undisturbed), Arc::new(AtomicBool::new(false)));
    let num_complete = Arc::new(AtomicUsize::new(0));
    let streams = (0..NUM_STREAMS).map(|stream| {
        let (client, undisturbed, is_over) = (client.clone(), undisturbed.clone(), is_over.clone());
        let num_complete = num_complete.clone();
        tokio::spawn(async move {
            let requests = requests();
            for index in (0..requests.len()).cycle().skip(stream) {
                let (output, expected) = (ask(&client, &requests[index]).await, &undisturbed[index]);
                assert_eq!(output.token_ids, expected.token_ids, "request {index}");
                assert_eq!((&output.text, &output.logprobs), (&expected.text, &expected.logprobs));
                assert_eq!(
                    (output.finish.reason, output.finish.usage),
                    (expected.finish.reason, expected.finish.usage)
                );
                num_complete.fetch_add(1, Ordering::Relaxed);
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        })
    });
    let streams: Vec<_> = streams.collect();
    let num_faults = strike(&cluster, Random(seed), Instant::now() + Duration::from_secs(seconds)).await;
    is_over.store(true, Ordering::Relaxed);
    for stream in streams {
        stream.await.unwrap_or_else(|error| panic!("{error:?}\n{}", cluster.log()));
    }
    let num_complete = num_complete.load(Ordering::Relaxed);
    println!("chaos, seed {seed}: {num_complete} streams ended as undisturbed, {num_faults} faults in {seconds} s");
    assert!(num_faults > 0 && num_complete >= NUM_STREAMS);
}
