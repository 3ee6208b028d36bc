//! Rotary embedding and KV store of the CPU device against the oracle.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use lockstep_formats::Dtype;
use lockstep_kernels::{
    KernelError,
    cpu::{CpuKvCache, Level, Team, rope_and_store::rope_and_store},
    device::KvCacheSpec,
    ops::{RopeAndStore, RopeStyle, RopeTable},
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

/// A value as a cache of that type holds it.
fn stored(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        Dtype::Bf16 => half::bf16::from_f32(value).to_f32(),
        Dtype::F32 => value,
    }
}

fn cache(head_dim: usize, block_size: usize, dtype: Dtype) -> CpuKvCache {
    let spec = KvCacheSpec { num_layers: 2, num_blocks: 7, block_size, num_key_value_heads: 2, head_dim };
    CpuKvCache::new(spec, dtype).unwrap()
}

fn table(style: RopeStyle, rotary_dim: usize, magnitude: f32) -> RopeTable {
    let frequency = |pair: usize| 10_000_f32.powf(-2.0 * pair as f32 / rotary_dim as f32);
    RopeTable { style, rotary_dim, frequencies: (0..rotary_dim / 2).map(frequency).collect(), magnitude }
}

#[test]
fn rotates_and_stores_as_the_oracle_does() {
    let seed = rand::rng().random();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let team = Team::new(3).unwrap();
    let cases = [
        (64, 64, 16, 1.0),
        (80, 32, 32, 1.0),
        (40, 40, 16, 1.25),
        (128, 128, 5, 1.0),
        (33, 2, 24, 1.0),
        (16, 0, 16, 1.0),
    ];
    let types = Dtype::ALL.into_iter().cycle();
    for ((head_dim, rotary_dim, block_size, magnitude), dtype) in cases.into_iter().zip(types) {
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            let (table, mut cache) = (table(style, rotary_dim, magnitude), cache(head_dim, block_size, dtype));
            let num_tokens = random.random_range(1..30);
            let width = (3 + 2 * 2) * head_dim;
            let positions: Vec<u32> = (0..num_tokens).map(|_| random.random_range(0..200_000)).collect();
            let mut slots: Vec<u32> = (0..7 * block_size as u32).collect();
            slots.shuffle(&mut random);
            slots.truncate(num_tokens);
            // Twice, as two layers with the same positions do it, and once with others.
            for (layer, positions) in [(0, positions.clone()), (1, positions.clone()), (1, vec![3; num_tokens])] {
                let call = RopeAndStore {
                    num_heads: 3,
                    num_key_value_heads: 2,
                    head_dim,
                    layer,
                    positions: &positions,
                    slot_mapping: &slots,
                };
                let mut qkv: Vec<f32> = (0..num_tokens * width).map(|_| random.random_range(-2.0..2.0)).collect();
                let expected = reference::rope_and_store::rope(&call, &table, &qkv);
                rope_and_store(&team, Level::detect(), &call, &table, &mut qkv, &mut cache).unwrap();
                for (got, want) in qkv.iter().zip(&expected) {
                    assert!((f64::from(*got) - want).abs() < 1e-6, "{head_dim} {style:?}: {got} {want}");
                }
                for (row, slot) in qkv.chunks(width).zip(&slots) {
                    for head in 0..2 {
                        let narrow = |first_head: usize| -> Vec<f32> {
                            let elements = &row[(first_head + head) * head_dim..][..head_dim];
                            elements.iter().map(|value| stored(dtype, *value)).collect()
                        };
                        let found = cache.token(layer, *slot as usize, head).unwrap();
                        assert_eq!(found, (narrow(3), narrow(5)), "{head_dim} {dtype} slot {slot} head {head}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_too_large_stays_finite() {
    let largest = [65504.0, half::bf16::MAX.to_f32(), f32::MAX];
    for (dtype, largest) in Dtype::ALL.into_iter().zip(largest) {
        keeps_finite(dtype, largest);
    }
}

fn keeps_finite(dtype: Dtype, largest: f32) {
    let (table, mut cache) = (table(RopeStyle::Halves, 0, 1.0), cache(16, 16, dtype));
    let call = RopeAndStore {
        num_heads: 1,
        num_key_value_heads: 2,
        head_dim: 16,
        layer: 0,
        positions: &[0],
        slot_mapping: &[3],
    };
    let mut qkv = [f32::INFINITY; 5 * 16];
    qkv[4 * 16..].fill(f32::NEG_INFINITY);
    rope_and_store(&Team::new(1).unwrap(), Level::detect(), &call, &table, &mut qkv, &mut cache).unwrap();
    assert_eq!(cache.token(0, 3, 1), Some((vec![largest; 16], vec![-largest; 16])));
}

#[test]
fn calls_that_would_leave_the_cache_are_refused() {
    let cache = cache(64, 16, Dtype::F16);
    let good_table = table(RopeStyle::Halves, 64, 1.0);
    let good = RopeAndStore {
        num_heads: 3,
        num_key_value_heads: 2,
        head_dim: 64,
        layer: 1,
        positions: &[5, 6, 7],
        slot_mapping: &[111, 2, 50],
    };
    let check = |call: RopeAndStore<'_>, table: &RopeTable| call.check(table, cache.spec(), 7 * 64);
    assert!(check(good, &good_table).is_ok());
    let calls = [
        RopeAndStore { num_heads: 2, ..good },
        RopeAndStore { num_heads: usize::MAX, ..good },
        RopeAndStore { num_key_value_heads: 3, ..good },
        RopeAndStore { head_dim: 32, ..good },
        RopeAndStore { layer: 2, ..good },
        RopeAndStore { positions: &[5, 6], ..good },
        RopeAndStore { slot_mapping: &[112, 2, 50], ..good },
    ];
    for call in calls {
        assert!(check(call, &good_table).is_err(), "{call:?}");
    }
    let twice = check(RopeAndStore { slot_mapping: &[7, 50, 7], ..good }, &good_table);
    assert!(matches!(twice, Err(KernelError::Duplicate { got: 7, .. })), "{twice:?}");
    assert!(check(good, &table(RopeStyle::Halves, 66, 1.0)).is_err());
    assert!(check(good, &RopeTable { rotary_dim: 62, ..good_table }).is_err());
}

#[test]
fn a_cache_of_nothing_is_refused() {
    let good = *cache(64, 16, Dtype::F16).spec();
    for spec in [
        KvCacheSpec { block_size: 0, ..good },
        KvCacheSpec { head_dim: 0, ..good },
        KvCacheSpec { num_key_value_heads: 0, ..good },
        KvCacheSpec { num_blocks: usize::MAX / 16, ..good },
    ] {
        assert!(CpuKvCache::new(spec, Dtype::F16).is_err(), "{spec:?}");
    }
}
