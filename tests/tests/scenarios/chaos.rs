//! Many streams while workers and coordinators are killed, stopped and cut off at random: every stream ends as if nothing
//! had been.
//!
//! `LOCKSTEP_CHAOS_SECS` (20) says for how long faults strike, `LOCKSTEP_CHAOS_SEED` (1) which; with `LOCKSTEP_TEST_PROXIES`
//! cuts are made by proxies also where namespaces are permitted.

use std::time::{Duration, Instant};

use lockstep_proto::v1::{GenerateRequest, SamplingParams, generate_request::Input};
use lockstep_tests::{
    SharedCluster,
    network::{self, Cut, Network, Node},
    shared::Members,
};

use crate::{
    prompts::PROMPTS,
    streams::Streams,
    worker_loss::{STOP, ready_replicas, signal},
};

const NUM_STREAMS: usize = 64;
const NUM_COORDINATORS: usize = 2;
const NUM_WORKERS: usize = 4;
const NUM_TOKENS: u32 = 48;
/// Between two faults, milliseconds: a base and what is added at random.
const PAUSE_MS: (u64, u64) = (500, 2000);
/// How long a stopped worker is stopped, and a cut lasts.
const STOPPED: Duration = Duration::from_secs(3);
/// After so long a killed process is there again.
const RESTART: Duration = Duration::from_secs(1);

/// What may happen.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill(Node),
    Stop(Node),
    /// Two workers from each other.
    CutRanks(usize, usize),
    /// A worker from the coordinators.
    CutOff(usize),
}

/// SplitMix64, so that a seed names a run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    fn pause(&mut self) -> Duration {
        Duration::from_millis(PAUSE_MS.0 + self.below(PAUSE_MS.1 as usize) as u64)
    }

    fn fault(&mut self) -> Fault {
        let worker = self.below(NUM_WORKERS);
        match self.below(8) {
            0..=2 => Fault::Kill(Node::Worker(worker)),
            3 => Fault::Kill(Node::Coordinator(self.below(NUM_COORDINATORS))),
            4 => Fault::Stop(Node::Worker(worker)),
            5 => Fault::CutOff(worker),
            _ => Fault::CutRanks(worker, (worker + 1 + self.below(NUM_WORKERS - 1)) % NUM_WORKERS),
        }
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

/// Inflicts a fault and undoes it.
async fn inflict(cluster: &mut SharedCluster, fault: Fault) {
    let network = cluster.network.as_ref().unwrap();
    match fault {
        Fault::Kill(node) => {
            cluster.kill(node).unwrap();
            tokio::time::sleep(RESTART).await;
            cluster.restart(node).unwrap();
        }
        Fault::Stop(node) => {
            let pid = cluster.pid(node).unwrap().to_string();
            signal(STOP, &pid);
            tokio::time::sleep(STOPPED).await;
            signal("-CONT", &pid);
        }
        Fault::CutRanks(one, other) => cut(network, &Cut::Ranks(vec![one, other])).await,
        Fault::CutOff(worker) => cut(network, &Cut::Coordinators(worker)).await,
    }
}

async fn cut(network: &Network, cut: &Cut) {
    network.cut(cut).unwrap();
    tokio::time::sleep(STOPPED).await;
    network.heal(cut).unwrap();
}

/// Strikes at random until `end`; returns the number of faults.
async fn strike(cluster: &mut SharedCluster, mut random: Random, end: Instant) -> usize {
    let mut num_faults = 0;
    while Instant::now() < end {
        tokio::time::sleep(random.pause()).await;
        let fault = random.fault();
        println!("{fault:?}");
        inflict(cluster, fault).await;
        num_faults += 1;
    }
    num_faults
}

#[tokio::test(flavor = "multi_thread")]
async fn every_stream_survives_random_faults() {
    if network::run_apart(&["--exact", "chaos::every_stream_survives_random_faults", "--nocapture"]).unwrap() {
        return;
    }
    let (seconds, seed) = (setting("LOCKSTEP_CHAOS_SECS", 20), setting("LOCKSTEP_CHAOS_SEED", 1));
    let network = Network::start(NUM_COORDINATORS, NUM_WORKERS).await.unwrap();
    let means = network.means();
    let members = Members {
        // Those of one replica: one goes on alone.
        min_workers: 2,
        ..Members::new(NUM_COORDINATORS, NUM_WORKERS, "tensor=2,replicas=2")
    };
    let mut cluster = SharedCluster::start_on(network, members).await.unwrap();
    let mut clients = Vec::new();
    for index in 0..NUM_COORDINATORS {
        clients.push(cluster.client(index).await.unwrap());
        ready_replicas(&clients[index], 2).await;
    }
    let streams = Streams::start(&clients, requests(), NUM_STREAMS).await;
    let num_faults = strike(&mut cluster, Random(seed), Instant::now() + Duration::from_secs(seconds)).await;
    let (num_complete, num_refused) = streams.end(|| cluster.log()).await;
    println!(
        "chaos by {means}, seed {seed}: {num_complete} streams ended as undisturbed, {num_refused} times sent elsewhere or \
         again, {num_faults} faults in {seconds} s"
    );
    assert!(num_faults > 0 && num_complete >= NUM_STREAMS);
    // All is as before in the end.
    for client in &clients {
        ready_replicas(client, 2).await;
    }
}
