//! What the engine takes for a step, devices aside, with 100,000 KV blocks that all hold something: forming the step and
//! taking its result, with shared prefixes and without.
//!
//!   cargo bench -p lockstep-worker --bench engine

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::time::{Duration, Instant};

use lockstep_executor::step::{StepPlan, StepResult};
use lockstep_kernels::ops::Candidates;
use lockstep_worker::engine::{Engine, EngineConfig, Sampling, SequenceRequest, Tenant};

const NUM_BLOCKS: usize = 100_000;
const BLOCK_SIZE: usize = 32;
const NUM_SEQUENCES: usize = 64;
/// Tokens of each of the prompts that fill the blocks.
const FILLING: usize = 8000;
const ROUNDS: usize = 200;

fn request(first_token: u32, num_tokens: usize, max_tokens: usize) -> SequenceRequest {
    SequenceRequest {
        request_id: String::new(),
        tenant: Tenant::default(),
        token_ids: (first_token..).take(num_tokens).collect(),
        num_output_tokens: 0,
        sampling: Sampling::greedy(max_tokens),
    }
}

fn result(plan: &StepPlan) -> StepResult {
    let candidates = || Candidates { top: vec![(7, 1.0), (8, 0.5)], ..Candidates::default() };
    let sampled = plan.sequences.iter().filter(|part| part.sample.is_some());
    StepResult { step_id: plan.step_id, candidates: sampled.map(|_| candidates()).collect() }
}

/// Runs one step and says how long its forming and its end took, and how many tokens it had.
fn step(engine: &mut Engine) -> (Duration, Duration, usize) {
    let begin = Instant::now();
    let plan = engine.schedule(begin).unwrap();
    let formed = begin.elapsed();
    let result = result(&plan);
    let begin = Instant::now();
    engine.update(result, begin);
    engine.take_prefix_changes();
    (formed, begin.elapsed(), plan.num_tokens())
}

fn report(what: &str, mut times: Vec<(Duration, Duration, usize)>) {
    let num_tokens = times[0].2;
    let mut median = |part: fn(&(Duration, Duration, usize)) -> Duration| {
        times.sort_by_key(part);
        part(&times[times.len() / 2]).as_secs_f64() * 1e6
    };
    let (formed, ended) = (median(|time| time.0), median(|time| time.1));
    println!("  {what}: {num_tokens} tokens in a step, {formed:.1} µs to form it, {ended:.1} µs to end it");
}

fn main() {
    for is_prefix_caching in [true, false] {
        println!("prefixes shared: {is_prefix_caching}");
        let mut engine = Engine::new(EngineConfig {
            num_kv_blocks: NUM_BLOCKS,
            block_size: BLOCK_SIZE,
            max_num_sequences: 2 * NUM_SEQUENCES,
            max_step_tokens: 16384,
            max_sequence_tokens: 1 << 17,
            max_waiting_sequences: 1000,
            max_steps_in_flight: 1,
            is_prefix_caching,
        });
        for index in 0..(NUM_BLOCKS * BLOCK_SIZE / FILLING) as u32 {
            engine.add(request(index * 100_000, FILLING, 1), Instant::now()).unwrap();
        }
        while !engine.is_idle() {
            step(&mut engine);
        }
        for round in 0..2 {
            let new = (0..ROUNDS as u32).map(|index| {
                let first_token = (10_000 + index * (1 - round)) * 100_000;
                engine.add(request(first_token, FILLING, 1), Instant::now()).unwrap();
                step(&mut engine)
            });
            report(if round == 0 { "a new prompt of 8000" } else { "a known one" }, new.collect());
        }
        for index in 0..NUM_SEQUENCES as u32 {
            engine.add(request(index * 5000, 1000, 1000), Instant::now()).unwrap();
        }
        while step(&mut engine).2 > NUM_SEQUENCES {}
        report("64 sequences decode", (0..ROUNDS).map(|_| step(&mut engine)).collect());
    }
}
