//! Attention of a prompt of an 8B shape on the first Vulkan adapter: without tensor cores from caches
//! read as words and as f16, with them where the adapter has any, and as it is written first, with all scores in memory
//! (`naive_attention.wgsl`). Each is compared with the naive one.
//!
//!     cargo bench --workspace --features lockstep-kernels/webgpu --bench webgpu_attention [-- TOKENS...]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

use std::time::Instant;

use lockstep_formats::Dtype;
use lockstep_kernels::{
    Device, KernelError,
    device::KvCacheSpec,
    ops::{Attention, AttentionSequence, RopeAndStore, RopeStyle, RopeTable},
    webgpu::{
        AdapterId, Backend, WebGpuDevice, WebGpuTensor,
        commands::Binding,
        gpu::{GpuOptions, Matrices},
        source::Source,
    },
};

const HEADS: usize = 32;
const KEY_VALUE_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const WIDTH: usize = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM;
const BLOCK_SIZE: usize = 32;
const SCALE: f32 = 0.088;
/// Query heads whose scores are in memory at a time.
const NAIVE_HEADS: usize = 4;
/// Rows that are compared.
const COMPARED: usize = 64;

static NAIVE: Source = Source { name: "naive_attention.wgsl", text: include_str!("naive_attention.wgsl") };

fn open(options: GpuOptions) -> WebGpuDevice {
    WebGpuDevice::with_options(AdapterId { backend: Backend::Vulkan, ordinal: 0 }, options).unwrap()
}

/// Numbers between -1 and 1.
fn values(len: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// Seconds of a call, the best of several submissions.
fn seconds(device: &mut WebGpuDevice, mut call: impl FnMut(&mut WebGpuDevice)) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        call(device);
        device.gpu().wait().unwrap();
        let start = Instant::now();
        device.commands().submit().unwrap();
        device.gpu().wait().unwrap();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// What scores in memory take, and the last rows of the output.
fn naive(qkv: &[f32], num_tokens: usize) -> (f64, Vec<f32>) {
    let mut device = open(GpuOptions::default());
    let gpu = std::sync::Arc::clone(device.gpu());
    let buffer = |len: usize| gpu.buffer("a matrix", (len * size_of::<f32>()) as u64).unwrap();
    let (input, output) = (buffer(qkv.len()), buffer(num_tokens * HEADS * HEAD_DIM));
    let scores = buffer(NAIVE_HEADS * num_tokens * num_tokens);
    device.commands().write(&input, qkv).unwrap();
    let bindings: Vec<Binding> = [&input, &scores, &output].map(Binding::whole).to_vec();
    let tiles = num_tokens.div_ceil(16);
    let time = seconds(&mut device, |device| {
        for first_head in (0..HEADS).step_by(NAIVE_HEADS) {
            for (pass, grid) in
                [("SCORES", [tiles, tiles]), ("SOFTMAX", [num_tokens, 1]), ("WEIGHTED", [HEAD_DIM / 16, tiles])]
            {
                let options = ["SCORES", "SOFTMAX", "WEIGHTED"].map(|name| (name, u32::from(name == pass)));
                let pipeline = gpu.pipeline(&NAIVE, &options).unwrap();
                let numbers = [num_tokens, HEADS, KEY_VALUE_HEADS, first_head].map(|number| number as u32);
                let parameters: Vec<u32> = numbers.into_iter().chain([SCALE.to_bits()]).collect();
                let grid = [grid[0], grid[1], NAIVE_HEADS];
                device.commands().dispatch(&pipeline, bindings.clone(), &parameters, grid).unwrap();
            }
        }
    });
    let row_bytes = (HEADS * HEAD_DIM * size_of::<f32>()) as u64;
    let last = Binding {
        buffer: output,
        offset: (num_tokens - COMPARED) as u64 * row_bytes,
        num_bytes: COMPARED as u64 * row_bytes,
    };
    (time, device.commands().read(&last).unwrap())
}

/// What the device's attention takes, and the last rows of the output.
fn flash(options: GpuOptions, qkv: &[f32], num_tokens: usize) -> (f64, Vec<f32>) {
    let mut device = open(options);
    let num_blocks = num_tokens.div_ceil(BLOCK_SIZE);
    let spec = KvCacheSpec {
        num_layers: 1,
        num_blocks,
        block_size: BLOCK_SIZE,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
    };
    let mut cache = device.kv_cache(spec, Dtype::F16).unwrap();
    let mut input = device.tensor(num_tokens, WIDTH).unwrap();
    let fill = |rows: &mut [f32]| {
        rows.copy_from_slice(qkv);
        Ok::<_, KernelError>(())
    };
    device.with_host(num_tokens, &mut input, fill).unwrap();
    let slots: Vec<u32> = (0..num_tokens as u32).collect();
    let table = RopeTable { style: RopeStyle::Halves, rotary_dim: 0, frequencies: vec![], magnitude: 1.0 };
    let store = RopeAndStore {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        layer: 0,
        positions: &slots,
        slot_mapping: &slots,
    };
    device.rope_and_store(&store, &table, &mut input, &mut cache).unwrap();
    let block_table: Vec<u32> = (0..num_blocks as u32).collect();
    let sequences = [AttentionSequence { num_tokens, first_position: 0, block_table: &block_table }];
    let call = Attention {
        num_heads: HEADS,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        group_size: HEADS / KEY_VALUE_HEADS,
        group_offset: 0,
        scale: SCALE,
        layer: 0,
        sequences: &sequences,
    };
    let mut output: WebGpuTensor = device.tensor(num_tokens, HEADS * HEAD_DIM).unwrap();
    let time = seconds(&mut device, |device| device.attention(&call, &input, &cache, &mut output).unwrap());
    let rows = device.with_host(num_tokens, &mut output, |rows| Ok::<_, KernelError>(rows.to_vec())).unwrap();
    (time, rows[(num_tokens - COMPARED) * HEADS * HEAD_DIM..].to_vec())
}

fn main() {
    let sizes: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let device = open(GpuOptions::default());
    println!("{} matrices {:?}", device.name(), device.gpu().matrix_edge());
    drop(device);
    let plain = GpuOptions { matrices: Matrices::None, ..GpuOptions::default() };
    let variants = [
        ("tiles, cache as words", GpuOptions { use_f16: false, ..plain }),
        ("tiles, cache as f16", plain),
        ("as the adapter suggests", GpuOptions::default()),
    ];
    for num_tokens in if sizes.is_empty() { vec![512, 2048, 4096] } else { sizes } {
        let qkv = values(num_tokens * WIDTH);
        let operations = (2 * num_tokens * num_tokens * HEAD_DIM * HEADS) as f64;
        let (naive, expected) = naive(&qkv, num_tokens);
        println!("{num_tokens} tokens, naive: {:.3} ms, {:.1} TFLOP/s", naive * 1e3, operations / naive / 1e12);
        for (name, options) in variants {
            let (time, rows) = flash(options, &qkv, num_tokens);
            let errors = rows.iter().zip(&expected).map(|(got, want)| (got - want).abs());
            let worst =
                errors.fold(0.0_f32, |worst, error| if error > worst || error.is_nan() { error } else { worst });
            println!(
                "{num_tokens} tokens, {name}: {:.3} ms, {:.1} TFLOP/s, {:.1} x naive, error {worst:.1e}",
                time * 1e3,
                operations / time / 1e12,
                naive / time
            );
        }
    }
}
