//! Whole forward steps of the CUDA device: against the oracles, eager, recorded and replayed; and what tensors remember from
//! step to step.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod blocks;
mod gpu;
mod steps;

use blocks::random_matrix;
use lockstep_formats::{Dtype, GgmlType};
use lockstep_kernels::{
    Device, KernelError,
    cuda::{CudaDevice, matmul::MAX_MATVEC_TOKENS},
    device::KvCacheSpec,
    ops::{Attention, AttentionSequence, Epilogue, RopeAndStore, RopeStyle, RopeTable},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use steps::{EIGHT_BIT_TOLERANCE, HIDDEN, LAYERS, MAX_TOKENS, Model, SPEC, batch, compare};

/// Largest error of a row, relative to its size, where tensor cores multiply f16 weights and activations, each rounded by
/// up to 2^-11: the oracle, its operands rounded so, parts from itself by 0.4 % in the worst of 40 rows, and by 1 % in that
/// of 20 seeds.
const HALF_TOLERANCE: f64 = 2e-2;
/// With queries and weights of attention in bf16, rounded by up to 2^-9 each.
const BFLOAT_TOLERANCE: f64 = 5e-2;

/// The first GPU.
fn open() -> CudaDevice {
    CudaDevice::new(0, gpu::cache()).unwrap()
}

fn compare_with_the_oracles(is_reduced_on_host: bool, dtype: Dtype) {
    let device = open();
    let half = if dtype == Dtype::F16 { HALF_TOLERANCE } else { BFLOAT_TOLERANCE };
    let tolerance = |num_rows| if num_rows <= MAX_MATVEC_TOKENS { EIGHT_BIT_TOLERANCE } else { half };
    compare(device, MAX_MATVEC_TOKENS, is_reduced_on_host, dtype, tolerance);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_agree_with_the_oracles() {
    compare_with_the_oracles(false, Dtype::F16);
    compare_with_the_oracles(false, Dtype::Bf16);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_of_ranks_that_meet_on_the_host_agree_with_the_oracles() {
    compare_with_the_oracles(true, Dtype::F16);
}

/// What changes from step to step is in the inputs alone, so a step that comes again gives the same bits: launched call by
/// call at first, then recorded, then replayed.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_replayed_step_gives_the_bits_of_a_launched_one() {
    let mut model = Model::new(open(), false, Dtype::F16);
    let tables: Vec<Vec<u32>> = (0..3).map(|sequence| (10 * sequence..10 * sequence + 10).collect()).collect();
    let prompts: Vec<_> = [20, 3, 50].into_iter().map(|len| ((0..len).collect(), 0)).collect();
    model.step(&batch(&prompts[..2], &tables));
    model.step(&batch(&prompts[2..], &tables[2..]));
    for decodes in [vec![(vec![7], 20), (vec![8], 3), (vec![9], 50)], vec![(vec![7], 20)]] {
        let batch = batch(&decodes, &tables);
        let (launched, rows) = (model.step(&batch), model.hidden_rows(decodes.len()));
        for repetition in 0..4 {
            assert_eq!(model.step(&batch), launched, "repetition {repetition}");
            assert_eq!(model.hidden_rows(decodes.len()), rows, "repetition {repetition}");
        }
    }
}

/// Norm, QKV, attention with rotation and store, its output, norm, gate and up, down: seven launches a layer, of one
/// sequence and of several. Around the layers are the embedding, the sampled rows, their norm, the head, and two kernels of
/// the sampler.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_layer_of_a_decode_step_is_seven_launches() {
    let mut model = Model::new(open(), false, Dtype::F16);
    let tables: Vec<Vec<u32>> = (0..3).map(|sequence| (10 * sequence..10 * sequence + 10).collect()).collect();
    model.step(&batch(&[((0..9).collect(), 0), (vec![1], 0), ((0..30).collect(), 0)], &tables));
    let mut position = [9, 1, 30];
    for num_sequences in [1, 3] {
        // Producers make what was asked for at the step before.
        let launches = [(); 2].map(|()| {
            let decodes: Vec<_> = position[..num_sequences].iter().map(|position| (vec![5], *position)).collect();
            position.iter_mut().for_each(|position| *position += 1);
            let before = model.device.gpu().num_launches();
            model.step(&batch(&decodes, &tables));
            model.device.gpu().num_launches() - before
        });
        assert_eq!(launches[1], (7 * LAYERS + 6) as u64, "{num_sequences} sequences");
    }
}

/// One tensor is read as bf16 by one layer, and by another one as 8-bit tiles or, of many tokens, as f16: what was made
/// for one is never taken for the other.
#[test]
#[ignore = "needs a CUDA GPU"]
fn readers_of_different_forms_get_their_own() {
    let mut device = open();
    let layers = [GgmlType::BF16, GgmlType::Q4_K]
        .map(|ggml_type| device.linear(vec![random_matrix(ggml_type, 64, HIDDEN, 3)]).unwrap());
    let norm = device.vector(&[1.0; HIDDEN]).unwrap();
    let mut random = StdRng::seed_from_u64(12);
    let mut input = device.tensor(MAX_TOKENS, HIDDEN).unwrap();
    let fill = |rows: &mut [f32]| {
        rows.fill_with(|| random.random_range(-1.0..1.0));
        Ok::<_, KernelError>(())
    };
    device.with_host(MAX_TOKENS, &mut input, fill).unwrap();
    let products = |device: &mut CudaDevice, num_tokens: usize, normed: &mut _| {
        device.rms_norm(num_tokens, &input, &norm, 1e-5, normed).unwrap();
        layers.each_ref().map(|layer| {
            let mut output = device.tensor(MAX_TOKENS, 64).unwrap();
            device.matmul(num_tokens, layer, normed, Epilogue::Store, &mut output).unwrap();
            device.with_host(num_tokens, &mut output, |rows| Ok::<_, KernelError>(rows.to_vec())).unwrap()
        })
    };
    let mut reused = device.tensor(MAX_TOKENS, HIDDEN).unwrap();
    for num_tokens in [1, 20, 1, 20, 1, 1] {
        let mut fresh = device.tensor(MAX_TOKENS, HIDDEN).unwrap();
        let want = products(&mut device, num_tokens, &mut fresh);
        assert!(want.iter().flatten().all(|value| value.is_finite() && *value != 0.0));
        assert_eq!(products(&mut device, num_tokens, &mut reused), want, "{num_tokens} tokens");
    }
}

/// A token that is stored elsewhere than its sequence goes on is stored there, though the rotation, the store and the
/// attention of a decode step are one launch otherwise.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_token_goes_to_the_slot_that_is_asked_for() {
    const POSITION: usize = 5;
    let mut device = open();
    let KvCacheSpec { num_key_value_heads, head_dim, block_size, .. } = SPEC;
    let num_heads = 2 * num_key_value_heads;
    let mut qkv = device.tensor(1, (num_heads + 2 * num_key_value_heads) * head_dim).unwrap();
    let mut output = device.tensor(1, num_heads * head_dim).unwrap();
    let frequencies = vec![0.5; head_dim / 2];
    let rope = RopeTable { style: RopeStyle::Interleaved, rotary_dim: head_dim, frequencies, magnitude: 1.0 };
    for slot in [POSITION, 2 * block_size + 3] {
        let mut cache = device.kv_cache(SPEC, Dtype::F16).unwrap();
        let fill = |row: &mut [f32]| {
            row.fill(1.0);
            Ok::<_, KernelError>(())
        };
        device.with_host(1, &mut qkv, fill).unwrap();
        let (positions, slot_mapping) = ([POSITION as u32], [slot as u32]);
        let layer = 0;
        let (positions, slot_mapping) = (&positions[..], &slot_mapping[..]);
        let store = RopeAndStore { num_heads, num_key_value_heads, head_dim, layer, positions, slot_mapping };
        let sequence = AttentionSequence { num_tokens: 1, first_position: POSITION, block_table: &[0] };
        let (group_size, group_offset, scale, sequences) = (2, 0, 0.1, &[sequence][..]);
        let attention =
            Attention { num_heads, num_key_value_heads, head_dim, group_size, group_offset, scale, layer, sequences };
        let step = |device: &mut CudaDevice| {
            device.rope_and_store(&store, &rope, &mut qkv, &mut cache)?;
            device.attention(&attention, &qkv, &cache, &mut output)
        };
        let before = device.gpu().num_launches();
        device.step::<_, KernelError>(step).unwrap();
        let num_launches = if slot == POSITION { 1 } else { 2 };
        assert_eq!(device.gpu().num_launches() - before, num_launches, "slot {slot}");
        for asked in [POSITION, 2 * block_size + 3] {
            let (_, value) = cache.download(layer).unwrap().token(asked, 1).unwrap();
            let expected = if asked == slot { 1.0 } else { 0.0 };
            assert!(value.iter().all(|element| *element == expected), "slot {slot}: {asked} holds {value:?}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rehearsal_computes_nothing_and_leaves_nothing_to_load() {
    let model = || Model::new(open(), false, Dtype::F16);
    let tables: Vec<Vec<u32>> = (0..3).map(|sequence| (10 * sequence..10 * sequence + 10).collect()).collect();
    let steps = [
        batch(&[((0..20).collect(), 0), (vec![5], 0), ((0..40).collect(), 0)], &tables),
        batch(&[(vec![7], 20), (vec![8], 1), (vec![9], 40)], &tables),
        batch(&[(vec![7], 21)], &tables),
    ];
    let (mut rehearsed, mut other) = (model(), model());
    steps.iter().for_each(|step| drop(rehearsed.run(step, true)));
    assert!(rehearsed.hidden_rows(MAX_TOKENS).iter().all(|value| *value == 0.0));
    let num_modules = rehearsed.device.gpu().num_modules();
    for step in steps.iter().chain(&steps[1..]).chain(&steps[1..]) {
        assert_eq!(rehearsed.step(step), other.step(step));
    }
    assert_eq!(rehearsed.device.gpu().num_modules(), num_modules);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_cache_in_f32_is_refused_by_name() {
    let device = open();
    let message = device.kv_cache(SPEC, Dtype::F32).map(drop).unwrap_err().to_string();
    assert!(message.contains("f32") && message.contains(device.name()), "{message}");
}
