//! The device side of sampling against the oracle; splitting the vocabulary must change nothing.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use lockstep_kernels::{
    cpu::{Team, sample::sample, simd::Level},
    ops::{Candidates, SampleRow, TokenPenalty},
    reference,
};
use proptest::prelude::*;
use rand::{Rng, SeedableRng, rngs::StdRng};

fn row(top_k: usize) -> SampleRow {
    SampleRow { top_k, temperature: 1.0, noise_seed: None, penalties: vec![], raw_top_k: 0 }
}

fn one(level: Level, row: &SampleRow, first_token: u32, logits: &[f32]) -> Candidates {
    let team = Team::new(2).unwrap();
    sample(&team, level, std::slice::from_ref(row), first_token, &mut logits.to_vec()).unwrap().remove(0)
}

fn assert_close(got: &Candidates, want: &Candidates) {
    assert_eq!((&got.top, &got.raw_top), (&want.top, &want.raw_top));
    let pairs = [(got.scaled_log_sum_exp, want.scaled_log_sum_exp), (got.raw_log_sum_exp, want.raw_log_sum_exp)];
    for (got, want) in pairs {
        assert!(got == want || (got - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} {want}");
    }
}

/// Few distinct values, so that ties abound, and some that are no finite number.
fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-40_i8..40).prop_map(|step| f32::from(step) * 0.25),
        8 => -30.0_f32..30.0,
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::NAN),
        1 => Just(-0.0),
    ]
}

prop_compose! {
    fn case()(
        logits in prop::collection::vec(logit(), 1..700),
        cut in 0.0..1.0_f64,
        top_k in 1_usize..80,
        raw_top_k in 0_usize..20,
        temperature in prop_oneof![Just(1.0_f32), 0.05_f32..3.0],
        seed in any::<u64>(),
        penalties in prop::collection::btree_map(0_u32..900, (1.0_f32..2.0, -3.0_f32..3.0), 0..40),
    ) -> (Vec<f32>, usize, SampleRow) {
        let cut = (cut * logits.len() as f64) as usize;
        let penalties = penalties
            .into_iter()
            .map(|(token_id, (repetition, subtract))| TokenPenalty { token_id, repetition, subtract })
            .collect();
        (logits, cut, SampleRow { top_k, temperature, noise_seed: Some(seed), penalties, raw_top_k })
    }
}

/// `-0` and `0` tie; the device returns `0`.
fn without_negative_zeros(logits: &[f32]) -> Vec<f32> {
    logits.iter().map(|logit| logit + 0.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn agrees_with_the_oracle_and_splits_merge((logits, cut, row) in case()) {
        let first_token = 100;
        let want = reference::sample::sample(&row, first_token, &without_negative_zeros(&logits));
        for level in Level::supported() {
            let whole = one(level, &row, first_token, &logits);
            assert_close(&whole, &want);
            let (left, right) = logits.split_at(cut);
            let slices = [(first_token, left), (first_token + cut as u32, right)];
            let slices = slices.map(|(first_token, logits)| one(level, &row, first_token, logits));
            let merged = Candidates::merge(&row, slices);
            assert_close(&merged, &want);
            prop_assert_eq!(merged.drawn, whole.drawn);
            let some_finite = want.top[0].1 > f32::NEG_INFINITY;
            prop_assert_eq!(whole.drawn.is_some(), some_finite);
            if let Some((id, _, raw)) = whole.drawn {
                prop_assert_eq!(raw, logits[(id - first_token) as usize]);
            }
        }
    }
}

#[test]
fn large_vocabularies_and_many_candidates() {
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let logits: Vec<f32> = (0..262_144).map(|_| random.random_range(-20.0..20.0)).collect();
    let rising: Vec<f32> = (0..50_000).map(|id| id as f32 * 1e-3).collect();
    for (top_k, logits) in [(1, &logits), (1024, &logits), (1, &rising), (1024, &rising)] {
        let row = SampleRow { raw_top_k: 20, ..row(top_k) };
        let want = reference::sample::sample(&row, 0, logits);
        for level in Level::supported() {
            assert_close(&one(level, &row, 0, logits), &want);
        }
    }
}

#[test]
fn rows_and_threads_do_not_matter() {
    let mut random = StdRng::seed_from_u64(7);
    let width = 20_011;
    let rows: Vec<SampleRow> = (0..5)
        .map(|index| SampleRow {
            noise_seed: Some(index),
            temperature: 0.3 + index as f32,
            ..row(1 + index as usize * 50)
        })
        .collect();
    let logits: Vec<f32> = (0..5 * width).map(|_| random.random_range(-9.0..9.0)).collect();
    let together = [1, 2, 5].map(|num_threads| {
        let team = Team::new(num_threads).unwrap();
        sample(&team, Level::detect(), &rows, 0, &mut logits.clone()).unwrap()
    });
    for results in &together {
        for ((result, row), logits) in results.iter().zip(&rows).zip(logits.chunks(width)) {
            assert_eq!(result, &one(Level::detect(), row, 0, logits));
        }
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [2.0, 0.0, 1.0, f32::NEG_INFINITY, -1.0, 1.5, 0.5, -3.0];
    let temperature = 0.8;
    let weights = logits.map(|logit| f64::from(logit / temperature).exp());
    let total: f64 = weights.iter().sum();
    let num_draws = 40_000;
    let rows: Vec<SampleRow> =
        (0..num_draws).map(|seed| SampleRow { temperature, noise_seed: Some(seed), ..row(1) }).collect();
    let mut all: Vec<f32> = logits.iter().copied().cycle().take(8 * num_draws as usize).collect();
    let mut counts = [0_u32; 8];
    for result in sample(&Team::new(1).unwrap(), Level::detect(), &rows, 0, &mut all).unwrap() {
        counts[result.drawn.unwrap().0 as usize] += 1;
    }
    // Chi-squared with 6 degrees of freedom exceeds 27.9 once in ten thousand; seeds are fixed.
    let chi_squared: f64 = weights
        .iter()
        .zip(counts)
        .filter(|(weight, _)| **weight > 0.0)
        .map(|(weight, count)| {
            let expected = weight / total * num_draws as f64;
            (f64::from(count) - expected).powi(2) / expected
        })
        .sum();
    assert!(chi_squared < 27.9, "{chi_squared} {counts:?}");
    assert_eq!(counts[3], 0);
}

#[test]
fn bad_rows_are_refused_and_broken_logits_survive() {
    let team = Team::new(1).unwrap();
    let rows = [0.0, -1.0, f32::NAN, f32::INFINITY].map(|temperature| SampleRow { temperature, ..row(1) });
    for row in rows.into_iter().chain([row(0)]) {
        assert!(sample(&team, Level::detect(), &[row], 0, &mut [0.0]).is_err());
    }
    assert!(sample(&team, Level::detect(), &[row(1)], u32::MAX, &mut [0.0]).is_err());
    let broken = one(Level::detect(), &SampleRow { noise_seed: Some(1), ..row(3) }, 5, &[f32::NAN; 2]);
    assert_eq!(broken.top, [(5, f32::NEG_INFINITY), (6, f32::NEG_INFINITY)]);
    assert_eq!((broken.scaled_log_sum_exp, broken.drawn), (f32::NEG_INFINITY, None));
    let infinite = one(Level::detect(), &row(1), 0, &[1.0, f32::INFINITY]);
    assert_eq!((infinite.top[0].0, infinite.scaled_log_sum_exp), (1, f32::INFINITY));
    assert_eq!(sample(&team, Level::detect(), &[], 0, &mut []).unwrap(), []);
}
