//! Attention with the heads of SmolLM2-135M (9 query heads, 3 key/value heads of 64): decode beside a plain read of the
//! same keys and values, prefill in multiply-adds.
//! Run: `cargo bench -p lockstep-kernels --bench attention`. Throughput of decode is bytes of keys and values, that of
//! prefill is floating point operations (two a multiply-add, causal ones only).

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockstep_formats::Dtype;
use lockstep_kernels::{
    cpu::{CpuKvCache, Team, attention::attention, rope_and_store::rope_and_store, simd::Level},
    device::KvCacheSpec,
    ops::{Attention, AttentionSequence, RopeAndStore, RopeStyle, RopeTable},
};

const NUM_HEADS: usize = 9;
const NUM_KEY_VALUE_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const BLOCK_SIZE: usize = 16;
const WIDTH: usize = (NUM_HEADS + 2 * NUM_KEY_VALUE_HEADS) * HEAD_DIM;

fn filled(num_tokens: usize, team: &Team) -> (CpuKvCache, Vec<f32>, Vec<u32>) {
    let num_blocks = num_tokens.div_ceil(BLOCK_SIZE);
    let spec = KvCacheSpec {
        num_layers: 1,
        num_blocks,
        block_size: BLOCK_SIZE,
        num_key_value_heads: NUM_KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
    };
    let mut cache = CpuKvCache::new(spec, Dtype::F16).unwrap();
    let mut qkv: Vec<f32> = (0..num_tokens * WIDTH).map(|index| ((index * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let positions: Vec<u32> = (0..num_tokens as u32).collect();
    let table = RopeTable {
        style: RopeStyle::Interleaved,
        rotary_dim: HEAD_DIM,
        frequencies: (0..HEAD_DIM / 2).map(|pair| 1e5_f32.powf(-(pair as f32) / 32.0)).collect(),
        magnitude: 1.0,
    };
    let call = RopeAndStore {
        num_heads: NUM_HEADS,
        num_key_value_heads: NUM_KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        layer: 0,
        positions: &positions,
        slot_mapping: &positions,
    };
    rope_and_store(team, Level::detect(), &call, &table, &mut qkv, &mut cache).unwrap();
    (cache, qkv, (0..num_blocks as u32).collect())
}

fn bench(criterion: &mut Criterion) {
    let pair_operations = (NUM_HEADS * HEAD_DIM * 4) as u64;
    for num_threads in [1, 2] {
        let team = Team::new(num_threads).unwrap();
        for (name, num_keys, num_tokens) in
            [("decode", 512, 1), ("decode", 8192, 1), ("prefill", 512, 512), ("prefill", 4096, 4096)]
        {
            let (cache, qkv, block_table) = filled(num_keys, &team);
            let first_position = num_keys - num_tokens;
            let sequences = [AttentionSequence { num_tokens, first_position, block_table: &block_table }];
            let call = Attention {
                num_heads: NUM_HEADS,
                num_key_value_heads: NUM_KEY_VALUE_HEADS,
                head_dim: HEAD_DIM,
                group_size: NUM_HEADS / NUM_KEY_VALUE_HEADS,
                group_offset: 0,
                scale: 0.125,
                layer: 0,
                sequences: &sequences,
            };
            let qkv = &qkv[first_position * WIDTH..];
            let mut output = vec![0.0; num_tokens * NUM_HEADS * HEAD_DIM];
            let bytes = (num_keys * NUM_KEY_VALUE_HEADS * HEAD_DIM * 2 * 2) as u64;
            let pairs = (num_tokens * (num_keys + first_position + 1) / 2) as u64;
            let mut group = criterion.benchmark_group(format!("{name}_{num_keys}_threads_{num_threads}"));
            group.throughput(match name {
                "decode" => Throughput::Bytes(bytes),
                _ => Throughput::Elements(pairs * pair_operations),
            });
            group.warm_up_time(std::time::Duration::from_millis(300));
            group.measurement_time(std::time::Duration::from_secs(1)).sample_size(10);
            for level in Level::supported() {
                group.bench_function(format!("{level:?}"), |bencher| {
                    team.stay_awake(|| {
                        bencher.iter(|| attention(&team, level, &call, qkv, &cache, black_box(&mut output)).unwrap());
                    });
                });
            }
            if name == "decode" {
                let plain: Vec<u64> = (0..bytes / 8).collect();
                group.bench_function("plain_read", |bencher| {
                    team.stay_awake(|| {
                        bencher.iter(|| {
                            team.for_chunks(plain.len(), plain.len().div_ceil(num_threads), &|range| {
                                black_box(plain[range].iter().fold(0, |sum: u64, value| sum ^ value));
                            });
                        });
                    });
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
