//! The RMS norm of the CUDA device against its oracle.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;

use lockstep_kernels::{cuda::rms_norm::RmsNorm, reference};
use rand::{Rng, SeedableRng, rngs::StdRng};

#[test]
#[ignore = "needs a CUDA GPU"]
fn norm_agrees_with_the_oracle() {
    let gpu = gpu::open();
    let norm = RmsNorm::new(&gpu).unwrap();
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for width in [1, 15, 16, 63, 64, 65, 576, 2048, 4097, 8192] {
        let num_tokens = random.random_range(1..30);
        let input: Vec<f32> = (0..num_tokens * width).map(|_| random.random_range(-3.0..3.0)).collect();
        let weight: Vec<f32> = (0..width).map(|_| random.random_range(-2.0..2.0)).collect();
        let output = gpu::upload(&gpu, &vec![f32::NAN; num_tokens * width]);
        let (on_gpu, weight_on_gpu) = (gpu::upload(&gpu, &input), gpu::upload(&gpu, &weight));
        norm.run(num_tokens, width, &on_gpu, &weight_on_gpu, 1e-5, &output).unwrap();
        let got: Vec<f32> = gpu::download(&output, num_tokens * width);
        for (got, want) in got.iter().zip(reference::rms_norm::rms_norm(&input, &weight, 1e-5)) {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1e-3), "width {width}: {got} {want}");
        }
    }
}
