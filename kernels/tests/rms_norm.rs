//! The RMS norm and row gathering of the CPU device against their oracles.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use lockstep_kernels::{
    cpu::{Level, Team, gather_rows::gather_rows, rms_norm::rms_norm},
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

#[test]
fn norm_agrees_with_the_oracle_and_rows_stand_alone() {
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let teams = [1, 3].map(|num_threads| Team::new(num_threads).unwrap());
    for width in [1, 15, 16, 63, 64, 65, 576, 2048, 4097] {
        let num_tokens = random.random_range(1..30);
        let input: Vec<f32> = (0..num_tokens * width).map(|_| random.random_range(-3.0..3.0)).collect();
        let weight: Vec<f32> = (0..width).map(|_| random.random_range(-2.0..2.0)).collect();
        let expected = reference::rms_norm::rms_norm(&input, &weight, 1e-5);
        for level in Level::supported() {
            let mut alone = vec![0.0; num_tokens * width];
            for (input, output) in input.chunks(width).zip(alone.chunks_mut(width)) {
                rms_norm(&teams[0], level, input, &weight, 1e-5, output);
            }
            for team in &teams {
                let mut output = vec![f32::NAN; num_tokens * width];
                rms_norm(team, level, &input, &weight, 1e-5, &mut output);
                assert_eq!(output, alone, "{level:?} width {width}");
            }
            for (got, want) in alone.iter().zip(&expected) {
                assert!(
                    (f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1e-3),
                    "{level:?} width {width}: {got} {want}"
                );
            }
        }
    }
}

#[test]
fn gathering_copies_rows_and_refuses_what_is_not_there() {
    let input = [0.0, 1.0, 10.0, 11.0, 20.0, 21.0];
    let mut output = [f32::NAN; 6];
    gather_rows(&[2, 0, 2], 2, &input, &mut output).unwrap();
    assert_eq!(output, [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
    assert!(gather_rows(&[0, 3], 2, &input, &mut output).is_err());
    assert!(gather_rows(&[0, 0, 0, 0], 2, &input, &mut output).is_err());
    assert!(gather_rows(&[], 0, &[], &mut []).is_ok());
}
