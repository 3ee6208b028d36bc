//! Sampling on the CUDA device against the oracle, and its draws against the CPU's, bit for bit.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;

use std::sync::Arc;

use lockstep_kernels::{
    cpu::{self, Team, simd::Level},
    cuda::{
        Gpu, StepInputs,
        gather_rows::{GatherRows, GatherRowsCall},
        sample::{MAX_TOP, Sample, SamplePlan},
    },
    ops::{Candidates, SampleRow, TokenPenalty},
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

fn on_gpu(gpu: &Arc<Gpu>, rows: &[SampleRow], first_token: u32, width: usize, logits: &[f32]) -> Vec<Candidates> {
    let mut sample = Sample::new(gpu).unwrap();
    let mut inputs = StepInputs::new(gpu).unwrap();
    let plan = SamplePlan::new(rows, width, first_token).unwrap().unwrap();
    let mut results = Vec::new();
    // Twice: the counters must be left as they were found.
    for _ in 0..2 {
        inputs.clear();
        let logits = Arc::new(gpu::upload(gpu, logits));
        let call = sample.prepare(plan, rows, &logits, &mut inputs).unwrap();
        inputs.send().unwrap();
        sample.launch(&call).unwrap();
        results.push(sample.finish(&call, rows).unwrap());
    }
    assert_eq!(results[0], results[1]);
    results.remove(0)
}

fn assert_close(got: &Candidates, want: &Candidates) {
    assert_eq!((&got.top, &got.raw_top), (&want.top, &want.raw_top));
    let pairs = [(got.scaled_log_sum_exp, want.scaled_log_sum_exp), (got.raw_log_sum_exp, want.raw_log_sum_exp)];
    for (got, want) in pairs {
        assert!(got == want || (got - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} {want}");
    }
}

fn random_logit(random: &mut StdRng) -> f32 {
    match random.random_range(0..40) {
        0 => f32::NEG_INFINITY,
        1 => f32::NAN,
        2 => -0.0,
        3..20 => f32::from(random.random_range(-40_i8..40)) * 0.25,
        _ => random.random_range(-30.0..30.0),
    }
}

fn random_row(random: &mut StdRng, first_token: u32, width: usize) -> SampleRow {
    let is_penalized = random.random_bool(0.5);
    let mut tokens: Vec<u32> = (0..if is_penalized { random.random_range(0..60) } else { 0 })
        .map(|_| random.random_range(0..first_token + width as u32 + 50))
        .collect();
    tokens.sort_unstable();
    tokens.dedup();
    let mut penalty = |token_id| TokenPenalty {
        token_id,
        repetition: random.random_range(1.0..2.0),
        subtract: random.random_range(-3.0..3.0),
    };
    let penalties = tokens.into_iter().map(&mut penalty).collect();
    SampleRow {
        top_k: *[1, 1, 2, 40, 256, MAX_TOP].get(random.random_range(0..6)).unwrap(),
        temperature: if random.random() { 1.0 } else { random.random_range(0.05..3.0) },
        noise_seed: random.random_bool(0.7).then(|| random.random()),
        penalties,
        raw_top_k: *[0, 0, 5, 20].get(random.random_range(0..4)).unwrap(),
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn agrees_with_the_oracle_and_draws_as_the_cpu_does() {
    let gpu = gpu::open();
    let team = Team::new(1).unwrap();
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for width in gpu::cases([1, 2, 31, 700, 2048, 2049, 5000, 49_152, 128_256]) {
        for num_rows in [1, 5] {
            let first_token = random.random_range(0..1000);
            let rows: Vec<SampleRow> = (0..num_rows).map(|_| random_row(&mut random, first_token, width)).collect();
            let logits: Vec<f32> = (0..num_rows * width).map(|_| random_logit(&mut random)).collect();
            let got = on_gpu(&gpu, &rows, first_token, width, &logits);
            let on_cpu = cpu::sample::sample(&team, Level::detect(), &rows, first_token, &mut logits.clone()).unwrap();
            for (index, (row, got)) in rows.iter().zip(&got).enumerate() {
                let logits: Vec<f32> = logits[index * width..][..width].iter().map(|logit| logit + 0.0).collect();
                assert_close(got, &reference::sample::sample(row, first_token, &logits));
                assert_eq!(got.drawn, on_cpu[index].drawn, "width {width}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn broken_logits_survive_and_long_lists_are_left_to_the_host() {
    let gpu = gpu::open();
    let row = SampleRow { top_k: 3, temperature: 1.0, noise_seed: Some(1), penalties: vec![], raw_top_k: 0 };
    let broken = on_gpu(&gpu, std::slice::from_ref(&row), 5, 2, &[f32::NAN; 2]).remove(0);
    assert_eq!(broken.top, [(5, f32::NEG_INFINITY), (6, f32::NEG_INFINITY)]);
    assert_eq!((broken.scaled_log_sum_exp, broken.drawn), (f32::NEG_INFINITY, None));
    let infinite = on_gpu(&gpu, std::slice::from_ref(&row), 0, 2, &[1.0, f32::INFINITY]).remove(0);
    assert_eq!((infinite.top[0].0, infinite.scaled_log_sum_exp), (1, f32::INFINITY));
    assert_eq!(infinite.drawn.map(|(token_id, ..)| token_id), Some(1));
    let long = SampleRow { top_k: MAX_TOP + 1, ..row };
    assert_eq!(SamplePlan::new(std::slice::from_ref(&long), 10_000, 0).unwrap(), None);
    assert!(SamplePlan::new(&[long], 100, 0).unwrap().is_some());
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn gathering_copies_rows() {
    let gpu = gpu::open();
    let gather = GatherRows::new(&gpu).unwrap();
    let mut inputs = StepInputs::new(&gpu).unwrap();
    for width in [1, 255, 576, 4096] {
        let input: Vec<f32> = (0..7 * width).map(|index| index as f32).collect();
        let rows = [6_u32, 0, 6, 3];
        let call = GatherRowsCall {
            num_rows: rows.len(),
            width,
            input: Arc::new(gpu::upload(&gpu, &input)),
            rows: inputs.stage(&rows).unwrap(),
            output: Arc::new(gpu::upload(&gpu, &vec![f32::NAN; rows.len() * width])),
        };
        inputs.send().unwrap();
        // SAFETY: all rows are below 7.
        unsafe { gather.launch(&call) }.unwrap();
        let want: Vec<f32> =
            rows.iter().flat_map(|row| input[*row as usize * width..][..width].iter().copied()).collect();
        assert_eq!(gpu::download::<f32>(&call.output, rows.len() * width), want);
    }
}
