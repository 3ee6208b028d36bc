//! Quantized products on the first Vulkan adapter: bytes of weights a second of chains of dependent products of one token,
//! and operations a second of many tokens.
//!
//!     cargo bench -p lockstep-kernels --features webgpu --bench webgpu_matmul [-- shapes | prefill]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

use std::time::Instant;

use lockstep_formats::GgmlType;
use lockstep_kernels::{
    Device, KernelError,
    ops::{Epilogue, HostMatrix},
    webgpu::{
        AdapterId, Backend, WebGpuDevice, WebGpuTensor,
        gpu::{GpuOptions, Matrices},
        matmul::{Shape, WebGpuLinear},
    },
};

/// Products with weights of their own, at most.
const CHAIN: usize = 40;
/// Products of a submission: so many that its cost, some 0.1 ms, counts for little.
const PRODUCTS: usize = 20 * CHAIN;
/// Bytes of weights that no cache holds.
const DISTINCT_BYTES: usize = 200 << 20;

fn open(options: GpuOptions) -> WebGpuDevice {
    WebGpuDevice::with_options(AdapterId { backend: Backend::Vulkan, ordinal: 0 }, options).unwrap()
}

/// Weights of small scales, so that chains stay finite.
fn matrix(ggml_type: GgmlType, rows: usize, columns: usize) -> HostMatrix {
    let row_bytes = ggml_type.bytes_of(columns).unwrap();
    HostMatrix { ggml_type, rows, columns, bytes: vec![0x11; rows * row_bytes] }
}

fn wait(device: &mut WebGpuDevice, tensor: &mut WebGpuTensor) {
    device.with_host(1, tensor, |_| Ok::<_, KernelError>(())).unwrap();
}

/// Seconds of `count` products, the best of several runs, each of which waits for the one before. From the third run on the
/// list is encoded before it is submitted, so these are the GPU's.
fn seconds(
    device: &mut WebGpuDevice,
    weights: &[WebGpuLinear],
    tokens: usize,
    epilogue: Epilogue,
    count: usize,
) -> f64 {
    let input = device.tensor(tokens, weights[0].columns()).unwrap();
    let width = weights[0].rows() / if epilogue == Epilogue::SwiGlu { 2 } else { 1 };
    let mut output = device.tensor(tokens, width).unwrap();
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        wait(device, &mut output);
        for weight in weights.iter().cycle().take(count) {
            device.matmul(tokens, weight, &input, epilogue, &mut output).unwrap();
        }
        let start = Instant::now();
        device.commands().submit().unwrap();
        device.gpu().wait().unwrap();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

fn linears(device: &WebGpuDevice, ggml_type: GgmlType, rows: usize, columns: usize) -> Vec<WebGpuLinear> {
    let bytes = rows * ggml_type.bytes_of(columns).unwrap();
    let count = DISTINCT_BYTES.div_ceil(bytes).min(CHAIN);
    (0..count).map(|_| device.linear(vec![matrix(ggml_type, rows, columns)]).unwrap()).collect()
}

/// Gigabytes of weights a second.
fn matvec(device: &mut WebGpuDevice, weights: &[WebGpuLinear], ggml_type: GgmlType, epilogue: Epilogue) -> f64 {
    let seconds = seconds(device, weights, 1, epilogue, PRODUCTS) / PRODUCTS as f64;
    (weights[0].rows() * ggml_type.bytes_of(weights[0].columns()).unwrap()) as f64 / seconds / 1e9
}

const LAYERS: [(usize, usize, Epilogue); 5] = [
    (4096, 14336, Epilogue::Store),
    (4096, 4096, Epilogue::Store),
    (6144, 4096, Epilogue::Store),
    (28672, 4096, Epilogue::SwiGlu),
    (128256, 4096, Epilogue::Store),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let mut device = open(GpuOptions::default());
    println!("{} matrices {:?}", device.name(), device.gpu().matrix_edge());
    if has("shapes") {
        for (rows, columns, epilogue) in LAYERS {
            for ggml_type in [GgmlType::Q4_K, GgmlType::Q4_0, GgmlType::Q6_K] {
                let weights = linears(&device, ggml_type, rows, columns);
                // 14336 columns are 448 blocks: 2 for each of 224 threads. Without subgroups numbers must be powers of two.
                let all_threads: &[u32] =
                    if device.gpu().has_subgroups() { &[32, 64, 128, 224, 256] } else { &[32, 64, 128, 256] };
                for &threads in all_threads {
                    let rates = [1, 2, 4].map(|each| {
                        device.gpu().choose_matvec_shape(Some(Shape { threads, rows: each }));
                        format!("{:.0}", matvec(&mut device, &weights, ggml_type, epilogue))
                    });
                    println!("{ggml_type} {rows}x{columns} {threads} threads, 1 2 4 rows: {} GB/s", rates.join(" "));
                }
            }
        }
    } else if has("prefill") {
        for matrices in [Matrices::OfAdapter, Matrices::None] {
            let mut device = open(GpuOptions { matrices, ..GpuOptions::default() });
            let layers = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)];
            for ((rows, columns), tokens) in
                layers.into_iter().flat_map(|layer| [512, 2048].map(|count| (layer, count)))
            {
                for ggml_type in [GgmlType::Q4_K, GgmlType::Q6_K] {
                    let weights = [device.linear(vec![matrix(ggml_type, rows, columns)]).unwrap()];
                    let seconds = seconds(&mut device, &weights, tokens, Epilogue::Store, 10) / 10.0;
                    let rate = 2.0 * (rows * columns * tokens) as f64 / seconds / 1e12;
                    println!("{ggml_type} {rows}x{columns} {tokens} tokens, {matrices:?}: {rate:.1} TFLOP/s");
                }
            }
        }
    } else {
        for ggml_type in [GgmlType::Q4_0, GgmlType::Q4_K, GgmlType::Q6_K, GgmlType::Q8_0] {
            for (rows, columns, epilogue) in LAYERS {
                let weights = linears(&device, ggml_type, rows, columns);
                let rate = matvec(&mut device, &weights, ggml_type, epilogue);
                println!("{ggml_type} {rows}x{columns} {epilogue:?}: {rate:.0} GB/s");
            }
        }
    }
}
