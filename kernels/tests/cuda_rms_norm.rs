//! The RMS norm of the CUDA device against its oracle.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;
mod tiles;

use std::sync::Arc;

use half::{bf16, f16};
use lockstep_kernels::{
    cuda::{
        Activations, Forms, HalfType,
        rms_norm::{RmsNorm, RmsNormCall},
    },
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tiles::tiles_of;

#[test]
#[ignore = "needs a CUDA GPU"]
fn norm_agrees_with_the_oracle_in_every_form() {
    let gpu = gpu::open();
    let norm = RmsNorm::new(&gpu);
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for width in gpu::cases([4, 16, 20, 32, 64, 96, 128, 576, 1000, 2048, 4096, 4128, 8192, 16384]) {
        // One and two tokens are spread over more multiprocessors.
        let num_tokens = if random.random() { random.random_range(1..=2) } else { random.random_range(3..30) };
        let input: Vec<f32> = (0..num_tokens * width).map(|_| random.random_range(-3.0..3.0)).collect();
        let weight: Vec<f32> = (0..width).map(|_| random.random_range(-2.0..2.0)).collect();
        let half_type = if random.random() { HalfType::F16 } else { HalfType::BF16 };
        let forms = Forms { tiles: width % 32 == 0, halves: Some(half_type), values: true };
        let output = Activations::zeroed(&gpu, num_tokens, width, forms).unwrap();
        let call = RmsNormCall {
            num_tokens,
            input: Arc::new(gpu::upload(&gpu, &input)),
            weight: Arc::new(gpu::upload(&gpu, &weight)),
            epsilon: 1e-5,
            output: output.clone(),
        };
        norm.launch(&call).unwrap();
        let got: Vec<f32> = gpu::download(output.values.as_ref().unwrap(), num_tokens * width);
        for (got, want) in got.iter().zip(reference::rms_norm::rms_norm(&input, &weight, 1e-5)) {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1e-3), "width {width}: {got} {want}");
        }
        let halves: Vec<u16> = gpu::download(&output.halves.as_ref().unwrap().1, num_tokens * width);
        for (half, value) in halves.into_iter().zip(&got) {
            let want = match half_type {
                HalfType::F16 => f16::from_f32(*value).to_bits(),
                HalfType::BF16 => bf16::from_f32(*value).to_bits(),
            };
            assert_eq!(half, want, "width {width}: {value}");
        }
        if let Some(tiles) = &output.tiles {
            let tiles: Vec<u8> = gpu::download(tiles, tiles.num_bytes());
            assert!(tiles == tiles_of(&got, width), "tiles of width {width}");
        }
    }
}
