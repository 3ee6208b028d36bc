//! Norm, rotation and store, and sampling on WebGPU against their oracles, with subgroups and without.
#![cfg(feature = "webgpu")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod adapter;

use adapter::{random, stored, table, values};
use lockstep_formats::Dtype;
use lockstep_kernels::{
    Device, KernelError,
    device::KvCacheSpec,
    ops::{Candidates, RopeAndStore, RopeStyle, SampleRow, TokenPenalty},
    reference,
    webgpu::WebGpuDevice,
};
use rand::{Rng, rngs::StdRng, seq::SliceRandom};

#[test]
fn norm_agrees_with_the_oracle() {
    let mut random = random();
    for mut device in adapter::open_both() {
        for width in [1, 15, 64, 65, 576, 4097] {
            let num_tokens = random.random_range(1..30);
            let (input, weight) = (values(&mut random, num_tokens * width, 3.0), values(&mut random, width, 2.0));
            let on_device = adapter::tensor(&mut device, width, &input);
            let on_device_weight = device.vector(&weight).unwrap();
            let mut output = device.tensor(num_tokens, width).unwrap();
            device.rms_norm(num_tokens, &on_device, &on_device_weight, 1e-5, &mut output).unwrap();
            let expected = reference::rms_norm::rms_norm(&input, &weight, 1e-5);
            for (got, want) in adapter::rows(&mut device, num_tokens, &mut output).iter().zip(&expected) {
                assert!((f64::from(*got) - want).abs() <= 2e-6 * want.abs().max(1e-3), "width {width}: {got} {want}");
            }
        }
    }
}

#[test]
fn gathering_copies_rows_and_refuses_what_is_not_there() {
    let [mut device, _] = adapter::open_both();
    let input = adapter::tensor(&mut device, 2, &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    let mut output = device.tensor(3, 2).unwrap();
    device.gather_rows(&[2, 0, 2], &input, &mut output).unwrap();
    assert_eq!(adapter::rows(&mut device, 3, &mut output), [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
    assert!(device.gather_rows(&[0, 3], &input, &mut output).is_err());
    assert!(device.gather_rows(&[0, 0, 0, 0], &input, &mut output).is_err());
}

#[test]
fn rotates_and_stores_as_the_oracle_does() {
    let mut random = random();
    let [mut device, _] = adapter::open_both();
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
            let table = table(style, rotary_dim, magnitude);
            let spec = KvCacheSpec { num_layers: 2, num_blocks: 7, block_size, num_key_value_heads: 2, head_dim };
            let mut cache = device.kv_cache(spec, dtype).unwrap();
            let num_tokens = random.random_range(1..30);
            let width = 7 * head_dim;
            let positions: Vec<u32> = (0..num_tokens).map(|_| random.random_range(0..200_000)).collect();
            let mut slots: Vec<u32> = (0..7 * block_size as u32).collect();
            slots.shuffle(&mut random);
            slots.truncate(num_tokens);
            for layer in [0, 1] {
                let (positions, slot_mapping) = (&positions[..], &slots[..]);
                let call =
                    RopeAndStore { num_heads: 3, num_key_value_heads: 2, head_dim, layer, positions, slot_mapping };
                let rows = values(&mut random, num_tokens * width, 2.0);
                let expected = reference::rope_and_store::rope(&call, &table, &rows);
                let mut qkv = adapter::tensor(&mut device, width, &rows);
                device.rope_and_store(&call, &table, &mut qkv, &mut cache).unwrap();
                let got = adapter::rows(&mut device, num_tokens, &mut qkv);
                for (got, want) in got.iter().zip(&expected) {
                    assert!((f64::from(*got) - want).abs() < 1e-6, "{head_dim} {style:?}: {got} {want}");
                }
                for (row, slot) in got.chunks(width).zip(&slots).step_by(7) {
                    for head in 0..2 {
                        let narrow = |first_head: usize| -> Vec<f32> {
                            let elements = &row[(first_head + head) * head_dim..][..head_dim];
                            elements.iter().map(|value| stored(dtype, *value)).collect()
                        };
                        let found = cache.token(device.commands(), layer, *slot as usize, head).unwrap();
                        assert_eq!(found, Some([narrow(3), narrow(5)]), "{head_dim} {dtype} slot {slot} head {head}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_too_large_stays_finite() {
    let [mut device, _] = adapter::open_both();
    for (dtype, largest) in Dtype::ALL.into_iter().zip([65504.0, half::bf16::MAX.to_f32(), f32::MAX]) {
        let spec = KvCacheSpec { num_layers: 1, num_blocks: 1, block_size: 16, num_key_value_heads: 2, head_dim: 16 };
        let mut cache = device.kv_cache(spec, dtype).unwrap();
        let (positions, slot_mapping) = (&[0][..], &[3][..]);
        let call =
            RopeAndStore { num_heads: 1, num_key_value_heads: 2, head_dim: 16, layer: 0, positions, slot_mapping };
        let mut rows = [f32::INFINITY; 5 * 16];
        rows[4 * 16..].fill(f32::NEG_INFINITY);
        let mut qkv = adapter::tensor(&mut device, 5 * 16, &rows);
        device.rope_and_store(&call, &table(RopeStyle::Halves, 0, 1.0), &mut qkv, &mut cache).unwrap();
        let found = cache.token(device.commands(), 0, 3, 1).unwrap();
        assert_eq!(found, Some([vec![largest; 16], vec![-largest; 16]]), "{dtype}");
    }
}

#[test]
fn all_of_it_holds_with_subgroups_of_four() {
    adapter::run_with_subgroups_of_four(&[
        "norm_agrees_with_the_oracle",
        "rotates_and_stores_as_the_oracle_does",
        "sampling_agrees_with_the_oracle_and_draws_as_the_processor_does",
    ]);
}

fn row(top_k: usize) -> SampleRow {
    SampleRow { top_k, temperature: 1.0, noise_seed: None, penalties: vec![], raw_top_k: 0 }
}

fn sample(device: &mut WebGpuDevice, rows: &[SampleRow], first_token: u32, logits: &[f32]) -> Vec<Candidates> {
    let mut tensor = adapter::tensor(device, logits.len() / rows.len().max(1), logits);
    device.sample(rows, first_token, &mut tensor).unwrap()
}

/// What penalties subtract.
const SUBTRACTED: f32 = 0.7;

/// The same tokens in the same order. A logit that a penalty changed may be wrong in the last places, in which a driver's
/// division is: by 2.5 units of what it was before something was subtracted.
fn assert_same_top(got: &[(u32, f32)], want: &[(u32, f32)]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        let is_close = got.1 == want.1 || (got.1 - want.1).abs() <= 4.0 * f32::EPSILON * (want.1.abs() + SUBTRACTED);
        assert!(got.0 == want.0 && is_close, "{got:?} {want:?}");
    }
}

fn assert_close(got: &Candidates, want: &Candidates) {
    assert_same_top(&got.top, &want.top);
    assert_same_top(&got.raw_top, &want.raw_top);
    let pairs = [(got.scaled_log_sum_exp, want.scaled_log_sum_exp), (got.raw_log_sum_exp, want.raw_log_sum_exp)];
    for (got, want) in pairs {
        assert!(got == want || (got - want).abs() <= 4e-6 * want.abs().max(1.0), "{got} {want}");
    }
}

#[test]
fn sampling_agrees_with_the_oracle_and_draws_as_the_processor_does() {
    let mut random = random();
    let [mut device, _] = adapter::open_both();
    let mut cpu = lockstep_kernels::cpu::CpuDevice::new(1).unwrap();
    for width in [1, 100, 2048, 2049, 49_152] {
        let logit = |random: &mut StdRng| match random.random_range(0..20) {
            0 => f32::NEG_INFINITY,
            1 => f32::NAN,
            2 => -0.0,
            3..10 => f32::from(random.random_range(-40_i8..40)) * 0.25,
            _ => random.random_range(-30.0..30.0),
        };
        let rows: Vec<SampleRow> = [1, 7, 40, 3000]
            .into_iter()
            .map(|top_k| {
                let mut ids: Vec<u32> = (90..90 + width as u32 + 20).collect();
                ids.shuffle(&mut random);
                let penalty = |token_id| TokenPenalty { token_id, repetition: 1.3, subtract: SUBTRACTED };
                SampleRow {
                    top_k,
                    temperature: random.random_range(0.3..2.0),
                    noise_seed: Some(random.random()),
                    penalties: ids.into_iter().take(300).map(penalty).collect(),
                    raw_top_k: top_k % 6,
                }
            })
            .collect();
        let logits: Vec<f32> = (0..rows.len() * width).map(|_| logit(&mut random)).collect();
        let got = sample(&mut device, &rows, 100, &logits);
        let mut on_cpu = cpu.tensor(rows.len(), width).unwrap();
        on_cpu.values_mut().copy_from_slice(&logits);
        let drawn = cpu.sample(&rows, 100, &mut on_cpu).unwrap();
        for (((got, row), logits), on_cpu) in got.iter().zip(&rows).zip(logits.chunks(width)).zip(&drawn) {
            let logits: Vec<f32> = logits.iter().map(|logit| logit + 0.0).collect();
            assert_close(got, &reference::sample::sample(row, 100, &logits));
            assert_eq!(
                got.drawn.map(|drawn| (drawn.0, drawn.2)),
                on_cpu.drawn.map(|drawn| (drawn.0, drawn.2)),
                "{width}"
            );
        }
    }
}

#[test]
fn bad_rows_are_refused_and_broken_logits_survive() {
    let [mut device, _] = adapter::open_both();
    let mut logits = device.tensor(1, 1).unwrap();
    let rows = [0.0, -1.0, f32::NAN, f32::INFINITY].map(|temperature| SampleRow { temperature, ..row(1) });
    for row in rows.into_iter().chain([row(0)]) {
        assert!(device.sample(&[row], 0, &mut logits).is_err());
    }
    assert!(device.sample(&[row(1)], u32::MAX, &mut logits).is_err());
    assert!(matches!(device.sample(&vec![row(1); 2], 0, &mut logits), Err(KernelError::Shape { .. })));
    let broken = &sample(&mut device, &[SampleRow { noise_seed: Some(1), ..row(3) }], 5, &[f32::NAN; 2])[0];
    assert_eq!(broken.top, [(5, f32::NEG_INFINITY), (6, f32::NEG_INFINITY)]);
    assert_eq!((broken.scaled_log_sum_exp, broken.drawn), (f32::NEG_INFINITY, None));
    let infinite = &sample(&mut device, &[row(1)], 0, &[1.0, f32::INFINITY])[0];
    assert_eq!((infinite.top[0].0, infinite.scaled_log_sum_exp), (1, f32::INFINITY));
    assert_eq!(device.sample(&[], 0, &mut logits).unwrap(), []);
}

#[test]
fn what_is_awaited_is_what_a_wait_gives() {
    let values = values(&mut random(), 5000, 9.0);
    for mut device in adapter::open_both() {
        let mut logits = adapter::tensor(&mut device, values.len(), &values);
        let waited = device.sample(&[row(3)], 0, &mut logits).unwrap();
        let candidates = device.sample_later(&[row(3)], 0, &mut logits).unwrap();
        let rows = device.rows_later(1, &logits).unwrap();
        device.gpu().wait().unwrap();
        assert_eq!(pollster::block_on(candidates.arrive()).unwrap(), waited);
        assert_eq!(pollster::block_on(rows.arrive::<f32>()).unwrap(), values);
    }
}
