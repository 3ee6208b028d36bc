//! The RMS norm of the CUDA device against its oracle.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;

use std::sync::Arc;

use half::{bf16, f16};
use lockstep_kernels::{
    cuda::{
        Activations, Forms, HalfType,
        rms_norm::{RmsNorm, RmsNormCall},
    },
    quant::quantize_block,
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Columns of a tile and bytes of it.
const TILE: (usize, usize) = (256, 320);

#[test]
#[ignore = "needs a CUDA GPU"]
fn norm_agrees_with_the_oracle_in_every_form() {
    let gpu = gpu::open();
    let norm = RmsNorm::new(&gpu);
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for width in [4, 16, 20, 32, 64, 96, 128, 576, 1000, 2048, 4096, 4128, 8192, 16384] {
        let num_tokens = random.random_range(1..30);
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
            check_tiles(&gpu::download(tiles, tiles.num_bytes()), width, &got);
        }
    }
}

/// Tiles equal the host's quantization bit for bit; what is past a row's end is zero.
fn check_tiles(tiles: &[u8], width: usize, values: &[f32]) {
    let row_bytes = width.div_ceil(TILE.0) * TILE.1;
    for (tiles, values) in tiles.chunks(row_bytes).zip(values.chunks(width)) {
        for block in 0..row_bytes / TILE.1 * 8 {
            let (tile, block_in_tile) = (&tiles[block / 8 * TILE.1..][..TILE.1], block % 8);
            let values: [f32; 32] =
                values.get(32 * block..).and_then(|rest| rest.first_chunk().copied()).unwrap_or([0.0; 32]);
            let (scale, quants) = quantize_block(&values);
            let mut sums = [0_i16; 2];
            for half in 0..2 {
                let got: Vec<i8> =
                    tile[128 * half + 16 * block_in_tile..][..16].iter().map(|byte| *byte as i8).collect();
                assert_eq!(got, quants[16 * half..][..16]);
                sums[half] = got.iter().map(|quant| i16::from(*quant)).sum();
            }
            let header = &tile[256 + 8 * block_in_tile..][..8];
            assert_eq!(header[..4], scale.to_le_bytes());
            assert_eq!(header[4..], [sums[0].to_le_bytes(), sums[1].to_le_bytes()].concat());
        }
    }
}
