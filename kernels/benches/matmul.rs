//! Speed of the CPU matmul: `cargo bench --bench matmul`, all cores; a criterion filter narrows it down.
//!
//! - `decode/<type>`: one token against more weights than the caches hold, in bytes of weights a second; beside it
//!   `read`: a plain sum over as many bytes.
//! - `prefill/<type>`: 512 tokens, in multiply-adds a second.
//! - `smollm2`: the matrices of SmolLM2-135M Q4_1 in their order, for 1 and 512 tokens, in tokens a second.

#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    Device, KernelError,
    cpu::{CpuDevice, CpuLinear},
    group::Sum,
    ops::{Epilogue, HostMatrix},
};

/// More than the caches of a socket hold.
const WEIGHT_BYTES: usize = 200 << 20;
const PROMPT_TOKENS: usize = 512;

fn matrix(ggml_type: GgmlType, rows: usize, columns: usize) -> HostMatrix {
    let num_bytes = ggml_type.bytes_of(columns).unwrap() * rows;
    // Small positive numbers in every field.
    let bytes = (0..num_bytes).map(|index| (index.wrapping_mul(0x9e37_79b9) >> 7) as u8 & 0x3b).collect();
    HostMatrix { ggml_type, rows, columns, bytes }
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.sample_size(10);
    let mut device = CpuDevice::new(0).unwrap();
    let (rows, columns) = (4096, 4096);
    for ggml_type in GgmlType::all() {
        let mut layers = vec![device.linear(vec![matrix(ggml_type, rows, columns)]).unwrap()];
        let num_bytes = layers[0].num_bytes();
        while layers.len() * num_bytes < WEIGHT_BYTES {
            layers.push(device.linear(vec![matrix(ggml_type, rows, columns)]).unwrap());
        }
        let input = device.vector(&vec![0.5; columns]).unwrap();
        let mut output = device.tensor(1, rows).unwrap();
        group.throughput(Throughput::Bytes((layers.len() * num_bytes) as u64));
        group.bench_function(ggml_type.name(), |bencher| {
            bencher.iter(|| {
                device.step(|device| {
                    layers.iter().try_for_each(|layer| device.matmul(1, layer, &input, Epilogue::Store, &mut output))
                })
            });
        });
    }
    let words = vec![1_u64; WEIGHT_BYTES / 8];
    group.throughput(Throughput::Bytes(WEIGHT_BYTES as u64));
    group.bench_function("read", |bencher| {
        let team = lockstep_kernels::cpu::Team::new(0).unwrap();
        bencher.iter(|| {
            team.for_chunks(words.len(), 1 << 16, &|range| {
                black_box(words[range].iter().fold(0, |sum, word| sum ^ word));
            });
        });
    });
}

fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(10);
    let mut device = CpuDevice::new(0).unwrap();
    let (rows, columns) = (4096, 1024);
    for ggml_type in GgmlType::all() {
        let layer = device.linear(vec![matrix(ggml_type, rows, columns)]).unwrap();
        let input = device.tensor(PROMPT_TOKENS, columns).unwrap();
        let mut output = device.tensor(PROMPT_TOKENS, rows).unwrap();
        group.throughput(Throughput::Elements((rows * columns * PROMPT_TOKENS) as u64));
        group.bench_function(ggml_type.name(), |bencher| {
            bencher.iter(|| device.matmul(PROMPT_TOKENS, &layer, &input, Epilogue::Store, &mut output));
        });
    }
}

/// The matrices of one layer: QKV, attention output, gate and up, down.
struct Layer {
    qkv: CpuLinear,
    attention_output: CpuLinear,
    gate_up: CpuLinear,
    down: CpuLinear,
}

fn smollm2(criterion: &mut Criterion) {
    const HIDDEN: usize = 576;
    const INTERMEDIATE: usize = 1536;
    const VOCABULARY: usize = 49152;
    let mut group = criterion.benchmark_group("smollm2");
    group.sample_size(10);
    let mut device = CpuDevice::new(0).unwrap();
    let linear = |shapes: &[(usize, usize)]| {
        device.linear(shapes.iter().map(|&(rows, columns)| matrix(GgmlType::Q4_1, rows, columns)).collect()).unwrap()
    };
    let layers: Vec<_> = (0..30)
        .map(|_| Layer {
            qkv: linear(&[(576, HIDDEN), (192, HIDDEN), (192, HIDDEN)]),
            attention_output: linear(&[(HIDDEN, 576)]),
            gate_up: linear(&[(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN)]),
            down: linear(&[(HIDDEN, INTERMEDIATE)]),
        })
        .collect();
    let head = device.linear(vec![matrix(GgmlType::Q8_0, VOCABULARY, HIDDEN)]).unwrap();
    let mut logits = device.tensor(1, VOCABULARY).unwrap();
    for num_tokens in [1, PROMPT_TOKENS] {
        let input = device.tensor(num_tokens, HIDDEN).unwrap();
        let mut hidden = device.tensor(num_tokens, HIDDEN).unwrap();
        let mut qkv = device.tensor(num_tokens, 960).unwrap();
        let mut intermediate = device.tensor(num_tokens, INTERMEDIATE).unwrap();
        group.throughput(Throughput::Elements(num_tokens as u64));
        group.bench_function(format!("{num_tokens} tokens"), |bencher| {
            bencher.iter(|| {
                device.step(|device| -> Result<(), KernelError> {
                    for layer in &layers {
                        device.matmul(num_tokens, &layer.qkv, &input, Epilogue::Store, &mut qkv)?;
                        device.matmul_add::<KernelError>(
                            num_tokens,
                            &layer.attention_output,
                            &input,
                            &mut hidden,
                            Sum::Own,
                        )?;
                        device.matmul(num_tokens, &layer.gate_up, &input, Epilogue::SwiGlu, &mut intermediate)?;
                        device.matmul_add::<KernelError>(
                            num_tokens,
                            &layer.down,
                            &intermediate,
                            &mut hidden,
                            Sum::Own,
                        )?;
                    }
                    device.matmul(1, &head, &input, Epilogue::Store, &mut logits)
                })
            });
        });
    }
}

criterion_group!(benches, decode, prefill, smollm2);
criterion_main!(benches);
