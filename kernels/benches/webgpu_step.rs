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
    ops::{Attention, AttentionSequence, Epilogue, HostMatrix, RopeAndStore, RopeStyle, RopeTable, SampleRow},
    webgpu::{AdapterId, Backend, WebGpuDevice},
};

/// Dispatches of a chain.
const CHAIN: usize = 200;
const HIDDEN: usize = 4096;
const HEADS: usize = 32;
const KEY_VALUE_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 32;

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

fn main() {
    let id = AdapterId { backend: Backend::Vulkan, ordinal: 0 };
    let mut device = WebGpuDevice::new(id).unwrap();
    println!("{}", device.name());
    let tensor = |width| device.tensor(1, width).unwrap();
    let (input, mut normed, mut hidden) = (tensor(HIDDEN), tensor(HIDDEN), tensor(HIDDEN));
    let (mut qkv, mut attended) = (tensor((HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM), tensor(HIDDEN));
    let mut logits = tensor(128_256);
    let weight = device.vector(&[1.0; HIDDEN]).unwrap();
    let output = layer(&device, GgmlType::Q4_K, HIDDEN, HIDDEN);
    // Asks for 8-bit blocks, which producers make from then on.
    device.matmul(1, &output, &normed, Epilogue::Store, &mut hidden).unwrap();
    device.matmul(1, &output, &attended, Epilogue::Store, &mut hidden).unwrap();
    measure(&mut device, "norm", |device| device.rms_norm(1, &input, &weight, 1e-5, &mut normed).unwrap());
    measure(&mut device, "output, 4096x4096", |device| {
        device.matmul_add::<KernelError>(1, &output, &normed, &mut hidden, lockstep_kernels::group::Sum::Own).unwrap();
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
    for context in [100, 600, 4100] {
        let (positions, slots) = ([context as u32], [context as u32]);
        let call = RopeAndStore {
            num_heads: HEADS,
            num_key_value_heads: KEY_VALUE_HEADS,
            head_dim: HEAD_DIM,
            layer: 0,
            positions: &positions,
            slot_mapping: &slots,
        };
        if context == 100 {
            measure(&mut device, "rotation and store", |device| {
                device.rope_and_store(&call, &table, &mut qkv, &mut cache).unwrap();
            });
        }
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
    let row = SampleRow { top_k: 1, temperature: 1.0, noise_seed: None, penalties: vec![], raw_top_k: 0 };
    let rows = std::slice::from_ref(&row);
    device.sample(rows, 0, &mut logits).unwrap();
    let start = Instant::now();
    for _ in 0..20 {
        device.sample(rows, 0, &mut logits).unwrap();
    }
    println!("sampling greedily, with its read-back: {:.1} us", start.elapsed().as_secs_f64() * 1e6 / 20.0);
}
