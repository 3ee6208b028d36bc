//! Whole forward steps on the CUDA device against the same steps on the CPU: eager, recorded and replayed, prompts and
//! decode steps, with and without ranks that meet on the host.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod blocks;

use blocks::random_matrix;
use lockstep_formats::{Dtype, GgmlType};
use lockstep_kernels::{
    Device, KernelError,
    cpu::CpuDevice,
    cuda::{CudaDevice, KernelCache},
    device::KvCacheSpec,
    group::Sum,
    ops::{Attention, AttentionSequence, Candidates, Epilogue, RopeAndStore, RopeStyle, RopeTable, SampleRow},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const HIDDEN: usize = 256;
const HEADS: usize = 4;
const KEY_VALUE_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const FEED_FORWARD: usize = 512;
const VOCABULARY: usize = 1000;
const LAYERS: usize = 3;
const BLOCK_SIZE: usize = 16;
const MAX_TOKENS: usize = 64;
const SPEC: KvCacheSpec = KvCacheSpec {
    num_layers: LAYERS,
    num_blocks: 40,
    block_size: BLOCK_SIZE,
    num_key_value_heads: KEY_VALUE_HEADS,
    head_dim: HEAD_DIM,
};

/// The CPU rounds activations to 8 bits, worth up to 1/254 of the largest value of 32, and so does the GPU for few tokens;
/// in a batch it rounds them to 16 bits. A step of twelve such products in a row, whose random weights let no term
/// dominate, parts by 1 to 4 %. Single operations are judged more strictly, by f64 oracles.
const TOLERANCE: f64 = 6e-2;

/// A small model of random weights, the same on every device.
struct Model<D: Device> {
    device: D,
    table: D::Linear,
    layers: Vec<Layer<D>>,
    norm: D::Tensor,
    rope: RopeTable,
    cache: D::KvCache,
    hidden: D::Tensor,
    normed: D::Tensor,
    qkv: D::Tensor,
    attention: D::Tensor,
    feed_forward: D::Tensor,
    gathered: D::Tensor,
    gathered_normed: D::Tensor,
    logits: D::Tensor,
    is_reduced_on_host: bool,
}

struct Layer<D: Device> {
    qkv: D::Linear,
    output: D::Linear,
    gate_up: D::Linear,
    down: D::Linear,
}

/// Tokens of a step and where they go.
struct Batch<'a> {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    slot_mapping: Vec<u32>,
    sequences: Vec<AttentionSequence<'a>>,
    sampled_rows: Vec<u32>,
}

impl<D: Device> Model<D> {
    fn new(device: D, is_reduced_on_host: bool, dtype: Dtype) -> Self {
        let linear = |ggml_type, shapes: &[(usize, usize)], seed: u64| {
            let matrices = shapes.iter().zip(seed..).map(|((rows, columns), seed)| {
                let mut matrix = random_matrix(ggml_type, *rows, *columns, seed);
                shrink(&mut matrix.bytes, ggml_type);
                matrix
            });
            device.linear(matrices.collect()).unwrap()
        };
        let types = [GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q4_0];
        let layers = (0..LAYERS as u64)
            .map(|layer| {
                let (ggml_type, seed) = (types[layer as usize % types.len()], 100 * layer);
                let key_value = (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN);
                Layer {
                    qkv: linear(ggml_type, &[(HEADS * HEAD_DIM, HIDDEN), key_value, key_value], seed + 1),
                    output: linear(ggml_type, &[(HIDDEN, HEADS * HEAD_DIM)], seed + 10),
                    gate_up: linear(ggml_type, &[(FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN)], seed + 20),
                    down: linear(ggml_type, &[(HIDDEN, FEED_FORWARD)], seed + 30),
                }
            })
            .collect();
        let tensor = |width| device.tensor(MAX_TOKENS, width).unwrap();
        Self {
            table: linear(GgmlType::Q8_0, &[(VOCABULARY, HIDDEN)], 1000),
            layers,
            norm: device.vector(&[1.0; HIDDEN]).unwrap(),
            rope: RopeTable {
                style: RopeStyle::Interleaved,
                rotary_dim: HEAD_DIM,
                frequencies: (0..HEAD_DIM / 2).map(|pair| 0.8_f32.powi(pair as i32)).collect(),
                magnitude: 1.0,
            },
            cache: device.kv_cache(SPEC, dtype).unwrap(),
            hidden: tensor(HIDDEN),
            normed: tensor(HIDDEN),
            qkv: tensor((HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM),
            attention: tensor(HEADS * HEAD_DIM),
            feed_forward: tensor(FEED_FORWARD),
            gathered: tensor(HIDDEN),
            gathered_normed: tensor(HIDDEN),
            logits: tensor(VOCABULARY),
            is_reduced_on_host,
            device,
        }
    }

    fn step(&mut self, batch: &Batch<'_>) -> Vec<Candidates> {
        self.run(batch, false)
    }

    /// A step, or the rehearsal of one.
    fn run(&mut self, batch: &Batch<'_>, is_rehearsal: bool) -> Vec<Candidates> {
        let Self { device, table, layers, norm, rope, cache, hidden, normed, qkv, attention, feed_forward, .. } = self;
        let Self { gathered, gathered_normed, logits, is_reduced_on_host, .. } = self;
        let num_tokens = batch.token_ids.len();
        let mut double = |sums: &mut [f64]| {
            sums.iter_mut().for_each(|sum| *sum *= 2.0);
            Ok::<_, KernelError>(())
        };
        let body = |device: &mut D| {
            device.embed(table, 0, &batch.token_ids, hidden)?;
            for (index, layer) in layers.iter().enumerate() {
                device.rms_norm(num_tokens, hidden, norm, 1e-5, normed)?;
                device.matmul(num_tokens, &layer.qkv, normed, Epilogue::Store, qkv)?;
                device.rope_and_store(&rope_call(batch, index), rope, qkv, cache)?;
                device.attention(&attention_call(batch, index), qkv, cache, attention)?;
                let reduce = if *is_reduced_on_host { Sum::Hosts(&mut double) } else { Sum::Own };
                device.matmul_add(num_tokens, &layer.output, attention, hidden, reduce)?;
                device.rms_norm(num_tokens, hidden, norm, 1e-5, normed)?;
                device.matmul(num_tokens, &layer.gate_up, normed, Epilogue::SwiGlu, feed_forward)?;
                device.matmul_add::<KernelError>(num_tokens, &layer.down, feed_forward, hidden, Sum::Own)?;
            }
            device.gather_rows(&batch.sampled_rows, hidden, gathered)?;
            let num_rows = batch.sampled_rows.len();
            device.rms_norm(num_rows, gathered, norm, 1e-5, gathered_normed)?;
            device.matmul(num_rows, table, gathered_normed, Epilogue::Store, logits)?;
            let row = SampleRow { top_k: 5, temperature: 1.0, noise_seed: None, penalties: vec![], raw_top_k: 0 };
            device.sample(&vec![row; num_rows], 0, logits)
        };
        if is_rehearsal {
            device.prepare(|device| device.step(body).map(drop)).unwrap();
            return Vec::new();
        }
        device.step(body).unwrap()
    }

    fn hidden_rows(&mut self, num_tokens: usize) -> Vec<f32> {
        let copy = |rows: &mut [f32]| Ok::<_, KernelError>(rows.to_vec());
        self.device.with_host(num_tokens, &mut self.hidden, copy).unwrap()
    }
}

/// Scales of a size that keeps activations near 1.
fn shrink(bytes: &mut [u8], ggml_type: GgmlType) {
    let fields: &[usize] = match ggml_type {
        GgmlType::Q6_K => &[208],
        GgmlType::Q4_K => &[0, 2],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for at in fields {
            let value = half::f16::from_le_bytes([block[*at], block[at + 1]]);
            let small = half::f16::from_f32(value.to_f32() * 0.25);
            block[*at..at + 2].copy_from_slice(&small.to_le_bytes());
        }
    }
}

fn rope_call<'a>(batch: &'a Batch<'_>, layer: usize) -> RopeAndStore<'a> {
    RopeAndStore {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        layer,
        positions: &batch.positions,
        slot_mapping: &batch.slot_mapping,
    }
}

fn attention_call<'a>(batch: &'a Batch<'_>, layer: usize) -> Attention<'a> {
    Attention {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        group_size: HEADS / KEY_VALUE_HEADS,
        group_offset: 0,
        scale: (HEAD_DIM as f32).powf(-0.5),
        layer,
        sequences: &batch.sequences,
    }
}

/// Sequences as `(tokens of this step, first position)`, sequence `i` in blocks `10 i..`.
fn batch<'a>(sequences: &[(Vec<u32>, usize)], tables: &'a [Vec<u32>]) -> Batch<'a> {
    let mut batch =
        Batch { token_ids: vec![], positions: vec![], slot_mapping: vec![], sequences: vec![], sampled_rows: vec![] };
    for ((token_ids, first_position), table) in sequences.iter().zip(tables) {
        for (position, token_id) in (*first_position..).zip(token_ids) {
            batch.token_ids.push(*token_id);
            batch.positions.push(position as u32);
            batch.slot_mapping.push(table[position / BLOCK_SIZE] * BLOCK_SIZE as u32 + (position % BLOCK_SIZE) as u32);
        }
        let sequence =
            AttentionSequence { num_tokens: token_ids.len(), first_position: *first_position, block_table: table };
        batch.sequences.push(sequence);
        batch.sampled_rows.push(batch.token_ids.len() as u32 - 1);
    }
    batch
}

fn compare(is_reduced_on_host: bool, dtype: Dtype) {
    let mut random = StdRng::seed_from_u64(11);
    let mut on_cpu = Model::new(CpuDevice::new(2).unwrap(), is_reduced_on_host, dtype);
    let gpu = CudaDevice::new(0, KernelCache::default()).unwrap();
    let mut on_gpu = Model::new(gpu, is_reduced_on_host, dtype);
    let tables: Vec<Vec<u32>> = (0..4).map(|sequence| (10 * sequence..10 * sequence + 10).rev().collect()).collect();
    let mut lengths = [0; 4];
    // Prompts, a prompt beside decodes, then decode steps that are recorded and replayed, of three sequences and of one.
    let steps: Vec<Vec<usize>> =
        [vec![20, 1, 7], vec![1, 1, 9, 30]].into_iter().chain(vec![vec![1, 1, 1]; 6]).chain(vec![vec![1]; 5]).collect();
    for (index, counts) in steps.iter().enumerate() {
        let mut sequences = Vec::new();
        for (count, length) in counts.iter().zip(&mut lengths) {
            let token_ids = (0..*count).map(|_| random.random_range(0..VOCABULARY as u32)).collect();
            sequences.push((token_ids, *length));
            *length += count;
        }
        let batch = batch(&sequences, &tables);
        let (want, got) = (on_cpu.step(&batch), on_gpu.step(&batch));
        let num_tokens = batch.token_ids.len();
        let (want_rows, got_rows) = (on_cpu.hidden_rows(num_tokens), on_gpu.hidden_rows(num_tokens));
        let norm = |rows: &[f32]| rows.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        let difference: Vec<f32> = want_rows.iter().zip(&got_rows).map(|(want, got)| want - got).collect();
        let error = norm(&difference) / norm(&want_rows);
        println!("step {index}: error {error:e}, {:?} {:?}", want[0].top[0], got[0].top[0]);
        assert!(error < TOLERANCE, "step {index}: {error}");
        for (want, got) in want.iter().zip(&got) {
            let gap = want.top[0].1 - want.top[1].1;
            assert!(want.top[0].0 == got.top[0].0 || gap < 0.05 * want.top[0].1.abs(), "{want:?} {got:?}");
            assert!((want.raw_log_sum_exp - got.raw_log_sum_exp).abs() < 0.05 * want.raw_log_sum_exp.abs());
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_agree_with_the_cpus() {
    compare(false, Dtype::F16);
    compare(false, Dtype::Bf16);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_of_ranks_that_meet_on_the_host_agree_with_the_cpus() {
    compare(true, Dtype::F16);
}

/// What changes from step to step is in the inputs alone, so a step that comes again gives the same bits: launched call by
/// call at first, then recorded, then replayed.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_replayed_step_gives_the_bits_of_a_launched_one() {
    let mut model = Model::new(CudaDevice::new(0, KernelCache::default()).unwrap(), false, Dtype::F16);
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

/// One tensor is read as bf16 by one layer, and by another one as 8-bit tiles or, of many tokens, as f16: what was made
/// for one is never taken for the other.
#[test]
#[ignore = "needs a CUDA GPU"]
fn readers_of_different_forms_get_their_own() {
    let mut device = CudaDevice::new(0, KernelCache::default()).unwrap();
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

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rehearsal_computes_nothing_and_leaves_nothing_to_load() {
    let model = || Model::new(CudaDevice::new(0, KernelCache::default()).unwrap(), false, Dtype::F16);
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
    let device = CudaDevice::new(0, KernelCache::default()).unwrap();
    let message = device.kv_cache(SPEC, Dtype::F32).map(drop).unwrap_err().to_string();
    assert!(message.contains("f32") && message.contains(device.name()), "{message}");
}
