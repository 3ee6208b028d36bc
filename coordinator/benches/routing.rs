//! What it takes to choose a replica, from a tokenized prompt to a charged one: prompts of some 200 bytes and 200 KB,
//! half of whose blocks are held by one of 2 and of 16 replicas with 100,000 blocks each.
//!
//!   cargo bench -p lockstep-coordinator --bench routing

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_coordinator::{
    ModelSpec,
    router::choice::{Work, choose},
    served::{Member, Replica, ReplicaState, ServedModel},
};
use lockstep_proto::v1::{self, worker_client::WorkerClient};
use lockstep_sharding::{Explanation, PlanOptions, Policy, ReplicaPlan};

const ROUNDS: usize = 2000;
const NUM_BLOCKS: usize = 100_000;
const BYTES_PER_TOKEN: usize = 4;

fn model(num_replicas: usize) -> ServedModel {
    let channel = tonic::transport::Endpoint::from_static("http://127.0.0.1:9").connect_lazy();
    let replica = |index| {
        let part = ReplicaPlan { stages: Vec::new(), num_kv_blocks: NUM_BLOCKS };
        let members = vec![Member { worker_id: format!("w{index}"), session: 1 }];
        let load =
            v1::LoadReplicaRequest { model: "m".into(), plan_epoch: 1, replica: index as u32, ..Default::default() };
        let replica = Replica::new(load, part, members, WorkerClient::new(channel.clone()), index);
        let others: Vec<u64> = (0..NUM_BLOCKS as u64).map(|name| name * num_replicas as u64 + index as u64).collect();
        replica.prefixes.begin(NUM_BLOCKS, &others);
        replica.advance(ReplicaState::Ready);
        Arc::new(replica)
    };
    let options = PlanOptions::default();
    let plan = Explanation {
        reason: String::new(),
        block_size: options.block_size,
        max_sequence_tokens: 1 << 20,
        max_num_sequences: options.max_num_sequences,
        max_step_tokens: 2048,
        replicas: Vec::new(),
        unused_devices: Vec::new(),
    };
    ServedModel {
        spec: ModelSpec {
            name: "m".into(),
            source: "m.gguf".into(),
            policy: Policy::AUTO,
            min_workers: 1,
            plan_options: options,
        },
        description: None,
        plan: Some(Arc::new(plan)),
        plan_epoch: 1,
        replicas: (0..num_replicas).map(replica).collect(),
        num_wanted: num_replicas,
        num_ready: num_replicas,
        has_served: true,
        problem: None,
        failed_attempts: 0,
    }
}

/// A prompt whose first half is that of every other.
fn request(num_tokens: usize, round: u32) -> v1::RunSequenceRequest {
    let token_ids = (0..num_tokens as u32).map(|index| index + if index as usize * 2 < num_tokens { 0 } else { round });
    let sampling = Some(v1::SamplingParams { max_tokens: Some(100), ..Default::default() });
    v1::RunSequenceRequest { token_ids: token_ids.collect(), sampling, ..Default::default() }
}

fn measure(num_replicas: usize, num_bytes: usize) {
    let model = model(num_replicas);
    let num_tokens = num_bytes / BYTES_PER_TOKEN;
    let mut times: Vec<Duration> = (0..ROUNDS as u32)
        .map(|round| {
            let request = request(num_tokens, round);
            let begin = Instant::now();
            let load = choose(&model, Work::of(&request), |_| true).unwrap();
            let time = begin.elapsed();
            drop(load);
            time
        })
        .collect();
    times.sort_unstable();
    let micros = |part: usize| times[ROUNDS * part / 100].as_secs_f64() * 1e6;
    println!(
        "{num_replicas:2} replicas, {num_tokens:6} tokens: median {:7.1} µs, 99 % {:7.1} µs",
        micros(50),
        micros(99)
    );
}

#[tokio::main]
async fn main() {
    println!("blocks of {} tokens", PlanOptions::default().block_size);
    for num_replicas in [2, 16] {
        for num_bytes in [200, 200_000] {
            measure(num_replicas, num_bytes);
        }
    }
}
