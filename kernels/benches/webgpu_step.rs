//! What each operation of a decode step of an 8B shape takes on the first Vulkan adapter, in chains of dependent dispatches,
//! and what the host takes to describe and encode them.
//!
//!     cargo bench -p lockstep-kernels --features webgpu --bench webgpu_step
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

use std::time::Instant;

use lockstep_formats::{Dtype, GgmlType};
use lockstep_kernels::{
    Device, KernelError,
    device::KvCacheSpec,
    group::Sum,
    ops::{Attention, AttentionSequence, Epilogue, HostMatrix, RopeAndStore, RopeStyle, RopeTable, SampleRow},
    webgpu::{AdapterId, Backend, WebGpuDevice, commands::Binding, gpu::GpuOptions},
};

/// Dispatches of a chain.
const CHAIN: usize = 200;
const HIDDEN: usize = 4096;
const HEADS: usize = 32;
const KEY_VALUE_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 32;

/// Layers of a whole step.
const LAYERS: usize = 32;

/// Prints microseconds of one of `CHAIN` calls: described by the host, encoded and submitted, executed.
fn measure(device: &mut WebGpuDevice, what: &str, mut call: impl FnMut(&mut WebGpuDevice)) {
    let mut best = [f64::INFINITY; 3];
    for _ in 0..5 {
        let mut seconds = [0.0; 3];
        device
            .step::<_, KernelError>(|device| {
                let start = Instant::now();
                (0..CHAIN).for_each(|_| call(device));
                seconds[0] = start.elapsed().as_secs_f64();
                device.commands().submit()?;
                seconds[1] = start.elapsed().as_secs_f64() - seconds[0];
                device.gpu().wait()?;
                seconds[2] = start.elapsed().as_secs_f64();
                Ok(())
            })
            .unwrap();
        for (best, seconds) in best.iter_mut().zip(seconds) {
            *best = best.min(seconds * 1e6 / CHAIN as f64);
        }
    }
    println!("{what}: {:.2} us; of these host {:.2}, encode and submit {:.2}", best[2], best[0], best[1]);
}

fn layer(device: &WebGpuDevice, ggml_type: GgmlType, rows: usize, columns: usize) -> <WebGpuDevice as Device>::Linear {
    let bytes = vec![0x11; rows * ggml_type.bytes_of(columns).unwrap()];
    device.linear(vec![HostMatrix { ggml_type, rows, columns, bytes }]).unwrap()
}

/// A norm by fewer and more threads.
fn norms(id: AdapterId) {
    for norm_threads in [256, 1024] {
        let mut device = WebGpuDevice::with_options(id, GpuOptions { norm_threads, ..GpuOptions::default() }).unwrap();
        let tensor = || device.tensor(1, HIDDEN).unwrap();
        let (input, mut normed, mut hidden) = (tensor(), tensor(), tensor());
        let weight = device.vector(&[1.0; HIDDEN]).unwrap();
        let output = layer(&device, GgmlType::Q4_K, HIDDEN, HIDDEN);
        device.matmul(1, &output, &normed, Epilogue::Store, &mut hidden).unwrap();
        measure(&mut device, &format!("norm, {norm_threads} threads"), |device| {
            device.rms_norm(1, &input, &weight, 1e-5, &mut normed).unwrap();
        });
    }
}

/// Attention of one token.
fn attentions(id: AdapterId) {
    let mut device = WebGpuDevice::with_options(id, GpuOptions::default()).unwrap();
    let spec = KvCacheSpec {
        num_layers: 1,
        num_blocks: 256,
        block_size: BLOCK_SIZE,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
    };
    let cache = device.kv_cache(spec, Dtype::F16).unwrap();
    let qkv = device.tensor(1, (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM).unwrap();
    let (mut attended, mut hidden) = (device.tensor(1, HIDDEN).unwrap(), device.tensor(1, HIDDEN).unwrap());
    let output = layer(&device, GgmlType::Q4_K, HIDDEN, HIDDEN);
    device.matmul(1, &output, &attended, Epilogue::Store, &mut hidden).unwrap();
    let block_table: Vec<u32> = (0..256).collect();
    for context in [100, 600, 4100] {
        let sequences = [AttentionSequence { num_tokens: 1, first_position: context, block_table: &block_table }];
        let call = Attention {
            num_heads: HEADS,
            num_key_value_heads: KEY_VALUE_HEADS,
            head_dim: HEAD_DIM,
            group_size: HEADS / KEY_VALUE_HEADS,
            group_offset: 0,
            scale: 0.1,
            layer: 0,
            sequences: &sequences,
        };
        measure(&mut device, &format!("attention to {context} keys"), |device| {
            device.attention(&call, &qkv, &cache, &mut attended).unwrap();
        });
    }
}

fn main() {
    let id = AdapterId { backend: Backend::Vulkan, ordinal: 0 };
    norms(id);
    attentions(id);
    let mut device = WebGpuDevice::with_options(id, GpuOptions::default()).unwrap();
    println!("{}", device.name());
    let tensor = |width| device.tensor(1, width).unwrap();
    let (input, mut normed, mut hidden) = (tensor(HIDDEN), tensor(HIDDEN), tensor(HIDDEN));
    let (mut qkv, mut attended) = (tensor((HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM), tensor(HIDDEN));
    let weight = device.vector(&[1.0; HIDDEN]).unwrap();
    let output = layer(&device, GgmlType::Q4_K, HIDDEN, HIDDEN);
    // Asks for 8-bit blocks, which producers make from then on.
    device.matmul(1, &output, &normed, Epilogue::Store, &mut hidden).unwrap();
    device.matmul(1, &output, &attended, Epilogue::Store, &mut hidden).unwrap();
    measure(&mut device, "norm", |device| device.rms_norm(1, &input, &weight, 1e-5, &mut normed).unwrap());
    measure(&mut device, "output, 4096x4096", |device| {
        device.matmul_add::<KernelError>(1, &output, &normed, &mut hidden, Sum::Own).unwrap();
    });
    let frequencies = vec![0.5; HEAD_DIM / 2];
    let table = RopeTable { style: RopeStyle::Interleaved, rotary_dim: HEAD_DIM, frequencies, magnitude: 1.0 };
    let num_blocks = 256;
    let spec = KvCacheSpec {
        num_layers: 1,
        num_blocks,
        block_size: BLOCK_SIZE,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
    };
    let mut cache = device.kv_cache(spec, Dtype::F16).unwrap();
    let block_table: Vec<u32> = (0..num_blocks as u32).collect();
    let mut gated = device.tensor(1, 14336).unwrap();
    let gate_up = layer(&device, GgmlType::Q4_K, 28672, HIDDEN);
    let down = layer(&device, GgmlType::Q4_K, HIDDEN, 14336);
    measure(&mut device, "gate and up", |device| {
        device.matmul(1, &gate_up, &normed, Epilogue::SwiGlu, &mut gated).unwrap();
    });
    measure(&mut device, "gate and up, blocks, down", |device| {
        device.matmul(1, &gate_up, &normed, Epilogue::SwiGlu, &mut gated).unwrap();
        device.matmul(1, &down, &gated, Epilogue::Store, &mut hidden).unwrap();
    });
    let qkv_weight = layer(&device, GgmlType::Q4_K, (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM, HIDDEN);
    let (positions, slots) = ([600], [600]);
    let store = RopeAndStore {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        layer: 0,
        positions: &positions,
        slot_mapping: &slots,
    };
    measure(&mut device, "rotation and store", |device| {
        device.rope_and_store(&store, &table, &mut qkv, &mut cache).unwrap();
    });
    let sequences = [AttentionSequence { num_tokens: 1, first_position: 600, block_table: &block_table }];
    let attention = Attention {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        group_size: HEADS / KEY_VALUE_HEADS,
        group_offset: 0,
        scale: 0.1,
        layer: 0,
        sequences: &sequences,
    };
    let mut best = [f64::INFINITY; 3];
    for _ in 0..8 {
        let mut seconds = [0.0; 3];
        device
            .step::<_, KernelError>(|device| {
                let start = Instant::now();
                for _ in 0..LAYERS {
                    device.rms_norm(1, &hidden, &weight, 1e-5, &mut normed)?;
                    device.matmul(1, &qkv_weight, &normed, Epilogue::Store, &mut qkv)?;
                    device.rope_and_store(&store, &table, &mut qkv, &mut cache)?;
                    device.attention(&attention, &qkv, &cache, &mut attended)?;
                    device.matmul_add::<KernelError>(1, &output, &attended, &mut hidden, Sum::Own)?;
                    device.rms_norm(1, &hidden, &weight, 1e-5, &mut normed)?;
                    device.matmul(1, &gate_up, &normed, Epilogue::SwiGlu, &mut gated)?;
                    device.matmul_add::<KernelError>(1, &down, &gated, &mut hidden, Sum::Own)?;
                }
                seconds[0] = start.elapsed().as_secs_f64();
                device.commands().submit()?;
                seconds[1] = start.elapsed().as_secs_f64();
                device.gpu().wait()?;
                seconds[2] = start.elapsed().as_secs_f64();
                Ok(())
            })
            .unwrap();
        for (best, seconds) in best.iter_mut().zip(seconds) {
            *best = best.min(seconds * 1e6);
        }
    }
    let [described, submitted, done] = best;
    println!(
        "{LAYERS} layers to 600 keys: described by {described:.0} us, submitted by {submitted:.0}, done by {done:.0}"
    );
    sampling(&mut device);
}

/// What sampling takes with its read-back, beside a read-back alone.
fn sampling(device: &mut WebGpuDevice) {
    let mut logits = device.tensor(1, 128_256).unwrap();
    let row = SampleRow { top_k: 1, temperature: 1.0, noise_seed: None, penalties: vec![], raw_top_k: 0 };
    let rows = std::slice::from_ref(&row);
    let buffer = Binding::whole(&device.gpu().buffer("numbers", 2560).unwrap());
    let mut calls = [Vec::new(), Vec::new()];
    for _ in 0..20 {
        let start = Instant::now();
        device.sample(rows, 0, &mut logits).unwrap();
        calls[0].push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        device.commands().read::<u32>(&buffer).unwrap();
        calls[1].push(start.elapsed().as_secs_f64() * 1e6);
    }
    for (what, times) in ["sampling greedily, with its read-back", "a read-back"].iter().zip(&mut calls) {
        times.sort_by(f64::total_cmp);
        println!("{what}: best {:.1} us, median {:.1}, worst {:.1}", times[0], times[10], times[19]);
    }
}
