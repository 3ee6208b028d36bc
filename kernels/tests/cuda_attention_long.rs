//! Attention of the CUDA device over a cache of a million tokens: more elements than 31 bits count and more bytes than 32,
//! one long block table, a short sequence beside the long one.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;

use std::sync::Arc;

use half::f16;
use lockstep_kernels::{
    cuda::{
        Activations, CudaKvCache, Forms, Gpu, HalfType, StepInputs,
        attention::{Attention, AttentionCall},
        rope_and_store::{Element, Rows},
    },
    device::KvCacheSpec,
    ops::{self, AttentionSequence},
};

const TOKENS: usize = 1_000_000;
const BLOCK_SIZE: usize = 16;
const BLOCKS: usize = TOKENS / BLOCK_SIZE;
/// Blocks of the cache that no sequence has.
const SPARE: usize = 2;
const HEADS: usize = 9;
const HEAD_DIM: usize = 128;
const SPEC: KvCacheSpec = KvCacheSpec {
    num_layers: 1,
    num_blocks: SPARE + BLOCKS,
    block_size: BLOCK_SIZE,
    num_key_value_heads: HEADS,
    head_dim: HEAD_DIM,
};
/// All keys are zeros but for those of this block, whose scores are 8 times the key's elements.
const SPECIAL: usize = 12_345;
const SCALE: f32 = 8.0 / HEAD_DIM as f32;
/// A million equal terms may lose so much in f32. Tokens at a wrong address would cost far more: the special block has a
/// 17th of all weight and a value of thirty times the average.
const TOLERANCE: f64 = 1e-2;

fn special_key() -> f16 {
    f16::from_f32((BLOCKS as f32 / 16.0).ln() / 8.0)
}

/// Every element of the values of a block of the long sequence.
fn value_of(block: usize) -> f32 {
    if block == SPECIAL { 100.0 } else { (block % 7) as f32 }
}

/// The cache of the sequence with this table. What belongs to nobody is no number.
fn cache(gpu: &Arc<Gpu>, block_table: &[u32]) -> CudaKvCache {
    const SIDE: usize = BLOCK_SIZE * HEAD_DIM;
    let cache = CudaKvCache::new(gpu, SPEC, HalfType::F16).unwrap();
    let mut elements = vec![u16::MAX; SPEC.num_blocks * HEADS * 2 * SIDE];
    for (block, place) in block_table.iter().enumerate() {
        for head in elements[*place as usize * HEADS * 2 * SIDE..][..HEADS * 2 * SIDE].chunks_exact_mut(2 * SIDE) {
            let (keys, values) = head.split_at_mut(SIDE);
            keys.fill(if block == SPECIAL { special_key().to_bits() } else { 0 });
            values.fill(f16::from_f32(value_of(block)).to_bits());
        }
    }
    cache.layer(0).unwrap().write(0, &elements).unwrap();
    cache
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_million_tokens_are_attended_to() {
    let gpu = gpu::open();
    let attention = Attention::new(&gpu).unwrap();
    let block_table: Vec<u32> = (SPARE as u32..(SPARE + BLOCKS) as u32).rev().collect();
    let cache = cache(&gpu, &block_table);
    let weight_of = |block: usize| if block == SPECIAL { (f64::from(special_key().to_f32()) * 8.0).exp() } else { 1.0 };
    let sum: f64 = (0..BLOCKS).map(|block| weight_of(block) * f64::from(value_of(block))).sum();
    let want = sum / (0..BLOCKS).map(weight_of).sum::<f64>();
    for num_tokens in [1, 8, 20] {
        let sequences = [
            AttentionSequence { num_tokens: 1, first_position: 0, block_table: &block_table[SPECIAL..] },
            AttentionSequence { num_tokens, first_position: TOKENS - num_tokens, block_table: &block_table },
        ];
        let call = ops::Attention {
            num_heads: HEADS,
            num_key_value_heads: HEADS,
            head_dim: HEAD_DIM,
            group_size: 1,
            group_offset: 0,
            scale: SCALE,
            layer: 0,
            sequences: &sequences,
        };
        let mut inputs = StepInputs::new(&gpu).unwrap();
        let batch = attention.stage(&mut inputs, &call, &cache).unwrap();
        inputs.send().unwrap();
        let (rows, columns) = (1 + num_tokens, HEADS * HEAD_DIM);
        let buffer = Arc::new(gpu::upload(&gpu, &vec![1.0_f32; rows * columns]));
        let queries = Rows { buffer, element: Element::F32, stride: columns };
        let output = Activations::zeroed(&gpu, rows, columns, Forms { values: true, ..Forms::default() }).unwrap();
        let call = AttentionCall { batch, layer: 0, queries, cache: cache.clone(), output };
        attention.launch(&call).unwrap();
        let got: Vec<f32> = gpu::download(call.output.values.as_ref().unwrap(), rows * columns);
        for (index, value) in got.into_iter().enumerate() {
            let want = if index < columns { f64::from(value_of(SPECIAL)) } else { want };
            let error = (f64::from(value) - want).abs() / want;
            assert!(error <= TOLERANCE, "{num_tokens} tokens, element {index}: {value}, expected {want}");
        }
    }
}
