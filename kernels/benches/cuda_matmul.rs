//! Speed of the CUDA matmul beside the machine's limits: GB/s of weights beside a kernel that only reads them, in the same
//! kind of graph, launched after the kernel before and overlapping it; TFLOP/s of batches beside cuBLAS.
//!
//! `cargo bench --features cuda --bench cuda_matmul -- [matvec|rank|batch] [type ...]`: layers of an 8B model with one
//! token, what one of four ranks holds of a 70B model with one token, and batches. Needs a CUDA GPU. Every graph rotates
//! over more than 2 GB of weights, so that nothing is left in a cache; figures are medians of replays.
//! LOCKSTEP_TEST_KERNEL_CACHE may name a folder that keeps compiled kernels.
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

#[path = "../tests/blocks/mod.rs"]
mod blocks;

use std::{env, sync::Arc, thread};

use blocks::random_matrix;
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    KernelError,
    cuda::{
        Activations, DeviceBuffer, Forms, Gpu, Graph, HalfType, KernelCache, Launch, Staging,
        matmul::{CudaLinear, Matmul, MatmulCall, Target},
        sources::Source,
    },
    ops::HostMatrix,
};

/// Rows and columns of the layers of an 8B model, and what becomes of their products.
const SHAPES: [(usize, usize, Target); 4] =
    [(4096, 14336, Target::Add), (28672, 4096, Target::SwiGlu), (6144, 4096, Target::Store), (4096, 4096, Target::Add)];
/// The same of what one of four ranks holds of a 70B model.
const RANK_SHAPES: [(usize, usize, Target); 4] =
    [(8192, 7168, Target::Add), (14336, 8192, Target::SwiGlu), (2560, 8192, Target::Store), (8192, 2048, Target::Add)];
const ROTATED_BYTES: usize = 2100 << 20;
const BATCHES: [usize; 12] = [2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 4096];
const NUM_REPLAYS: usize = 5;
/// Threads that make layers: one alone takes as long to copy matrices as the GPU to take them.
const NUM_MAKERS: usize = 4;

/// Reads and adds up, with as many loads under way as pay. OVERLAP=1: as our kernels are launched, reading before the
/// kernel before is done; OVERLAP=0: after it.
const READ: Source = Source {
    name: "read.cu",
    text: r#"
#include "launch.cuh"
extern "C" __global__ void __launch_bounds__(256) read(const uint4* from, uint32_t count, uint32_t* out) {
    const uint32_t stride = gridDim.x * 256;
    uint32_t sum = 0;
    if (OVERLAP) allow_next();
    for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < count; i += 8 * stride) {
        uint4 loaded[8] = {};
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) {
            if (i + k * stride < count) {
                asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(loaded[k].x), "=r"(loaded[k].y), "=r"(loaded[k].z), "=r"(loaded[k].w)
                             : "l"(from + i + k * stride));
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) sum ^= loaded[k].x ^ loaded[k].y ^ loaded[k].z ^ loaded[k].w;
    }
    if (OVERLAP) wait_for_previous();
    if (sum == 0x12345678) *out = sum;
}
"#,
    variants: &[],
};

/// Median microseconds of one of `count` launches of a graph.
fn time(gpu: &Arc<Gpu>, count: usize, launch: impl Fn(usize) -> Result<(), KernelError>) -> f64 {
    let all = || (0..count).try_for_each(&launch);
    all().unwrap();
    let graph = Graph::record(gpu, all).unwrap();
    graph.replay().unwrap();
    let mut times: Vec<f32> = (0..NUM_REPLAYS).map(|_| gpu.elapsed_ms(|| graph.replay()).unwrap()).collect();
    times.sort_by(f32::total_cmp);
    f64::from(times[NUM_REPLAYS / 2]) * 1e3 / count as f64
}

/// Layers of the same type and shape, of so many bytes together.
fn layers(gpu: &Arc<Gpu>, ggml_type: GgmlType, rows: usize, columns: usize, num_bytes: usize) -> Vec<Arc<CudaLinear>> {
    // Every row has the same bits: what they are does not change the speed.
    let row = random_matrix(ggml_type, 8, columns, 1);
    let matrix = HostMatrix { rows, bytes: row.bytes.repeat(rows / 8), ..row };
    let count = num_bytes.div_ceil(matrix.bytes.len());
    let make = |count| -> Vec<_> {
        let mut staging = Staging::new(gpu);
        (0..count).map(|_| Arc::new(CudaLinear::upload(&mut staging, vec![matrix.clone()]).unwrap())).collect()
    };
    let make = &make;
    thread::scope(|scope| {
        let makers: Vec<_> =
            (0..NUM_MAKERS).map(|index| scope.spawn(move || make((count + index) / NUM_MAKERS))).collect();
        makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
    })
}

fn call(gpu: &Arc<Gpu>, num_tokens: usize, weight: &Arc<CudaLinear>, target: Target) -> MatmulCall {
    let values = Forms { values: true, ..Forms::default() };
    let (width, forms) = match target {
        Target::SwiGlu if num_tokens == 1 => (weight.rows() / 2, Forms { tiles: true, ..Forms::default() }),
        Target::SwiGlu => (weight.rows() / 2, Forms { halves: Some(HalfType::F16), ..Forms::default() }),
        Target::Store | Target::Add => (weight.rows(), values),
    };
    let zeroed = |columns, forms| Activations::zeroed(gpu, num_tokens, columns, forms).unwrap();
    let input = zeroed(weight.columns(), weight.input_forms(num_tokens));
    // Numbers of every size: zeros make tensor cores faster.
    for buffer in input.halves.iter().map(|(_, buffer)| buffer).chain(&input.tiles).chain(&input.values) {
        let words: Vec<u32> =
            (0..buffer.num_bytes() as u32 / 4).map(|i| i.wrapping_mul(0x9e37_79b9) & 0xbbff_bbff).collect();
        buffer.write(0, &words).unwrap();
    }
    MatmulCall { num_tokens, weight: Arc::clone(weight), input, target, output: zeroed(width, forms) }
}

fn time_call(gpu: &Arc<Gpu>, matmul: &Matmul, layers: &[Arc<CudaLinear>], num_tokens: usize, target: Target) -> f64 {
    let call = call(gpu, num_tokens, &layers[0], target);
    let count = if num_tokens > 256 { 4 } else { layers.len() };
    let calls: Vec<_> =
        layers.iter().take(count).map(|weight| MatmulCall { weight: weight.clone(), ..call.clone() }).collect();
    time(gpu, calls.len(), |index| matmul.launch(&calls[index]))
}

/// Microseconds of a read of so many bytes, alone and overlapped.
fn time_reads(gpu: &Arc<Gpu>, num_bytes: usize) -> [f64; 2] {
    static SOURCE: Source = READ;
    let count = (ROTATED_BYTES / num_bytes).max(2);
    let buffers: Vec<_> = (0..count).map(|_| DeviceBuffer::zeroed(gpu, num_bytes).unwrap()).collect();
    let out = DeviceBuffer::zeroed(gpu, 4).unwrap();
    let launch = Launch::blocks(8 * gpu.limits().num_multiprocessors, 256);
    [false, true].map(|overlaps| {
        let kernel = gpu.kernel(&SOURCE, &[format!("-DOVERLAP={}", u8::from(overlaps))], "read").unwrap();
        time(gpu, count, |index| {
            let arguments = [(&buffers[index]).into(), ((num_bytes / 16) as u32).into(), (&out).into()];
            if overlaps {
                // SAFETY: the kernel's arguments; it reads the buffer.
                unsafe { kernel.launch(gpu, launch, &arguments) }
            } else {
                // SAFETY: as above.
                unsafe { kernel.launch_alone(gpu, launch, &arguments) }
            }
        })
    })
}

/// Compiles what these measurements need, all types side by side: one after the other that would take most of the time.
fn compile(cache: &KernelCache, types: &[GgmlType], shapes: &[(usize, usize, Target)], batches: &[usize]) {
    thread::scope(|scope| {
        for &ggml_type in types {
            scope.spawn(move || {
                let gpu = Gpu::open(0, cache.clone()).unwrap();
                let matmul = Matmul::new(&gpu).unwrap();
                for &(rows, columns, target) in shapes {
                    let layer = layers(&gpu, ggml_type, rows, columns, 1);
                    for &num_tokens in batches {
                        matmul.launch(&call(&gpu, num_tokens, &layer[0], target)).unwrap();
                    }
                }
            });
        }
    });
}

fn matvec(gpu: &Arc<Gpu>, matmul: &Matmul, types: &[GgmlType], shapes: &[(usize, usize, Target)]) {
    println!("one token: GB/s of weights, and what part it is of a read of the same bytes, alone and overlapped");
    for &ggml_type in types {
        for &(rows, columns, target) in shapes {
            let layers = layers(gpu, ggml_type, rows, columns, ROTATED_BYTES);
            let num_bytes = layers[0].num_bytes();
            let us = time_call(gpu, matmul, &layers, 1, target);
            drop(layers);
            let [alone, overlapped] = time_reads(gpu, num_bytes);
            let rate = |us: f64| num_bytes as f64 / us / 1e3;
            println!(
                "{:5} {rows:6}x{columns:<6} {:6.1} MB {us:7.2} us {:5.0} GB/s, read {:5.0} ({:.3}), overlapped {:5.0} ({:.3})",
                ggml_type.name(),
                num_bytes as f64 / 1e6,
                rate(us),
                rate(alone),
                alone / us,
                rate(overlapped),
                overlapped / us
            );
        }
    }
}

fn batch(gpu: &Arc<Gpu>, matmul: &Matmul, types: &[GgmlType]) {
    println!("batches: us (TFLOP/s) of each layer, us of all four, tokens/s of 32 layers of them");
    for &ggml_type in types {
        let mut totals = [0.0; BATCHES.len()];
        let mut cells = vec![String::new(); BATCHES.len()];
        for (rows, columns, target) in SHAPES {
            let layers = layers(gpu, ggml_type, rows, columns, ROTATED_BYTES);
            for (index, num_tokens) in BATCHES.into_iter().enumerate() {
                let us = time_call(gpu, matmul, &layers, num_tokens, target);
                totals[index] += us;
                let rate = 2.0 * (rows * columns * num_tokens) as f64 / us / 1e6;
                cells[index] += &format!(" {us:8.1} ({rate:4.0})");
            }
        }
        for ((num_tokens, cells), total) in BATCHES.iter().zip(cells).zip(totals) {
            let rate = *num_tokens as f64 / (32.0 * total) * 1e6;
            println!("{:5} {num_tokens:5} tokens{cells} {total:8.1} {rate:8.0}", ggml_type.name());
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let wants = |name: &str| arguments.iter().all(|argument| argument.parse::<GgmlType>().is_ok() || argument == name);
    let named: Vec<GgmlType> = arguments.iter().filter_map(|argument| argument.parse().ok()).collect();
    // Without a folder what is compiled side by side would be compiled again.
    let folder = tempfile::tempdir().unwrap();
    let folder = env::var_os("LOCKSTEP_TEST_KERNEL_CACHE").map_or_else(|| folder.path().to_owned(), Into::into);
    let cache = KernelCache::new(Some(folder));
    let gpu = Gpu::open(0, cache.clone()).unwrap();
    let matmul = Matmul::new(&gpu).unwrap();
    println!("{}", gpu.limits().name);
    let parts: [(_, Vec<GgmlType>, _, &[usize]); 3] = [
        ("matvec", GgmlType::all().collect(), SHAPES, &[1]),
        ("rank", vec![GgmlType::Q4_K, GgmlType::Q6_K], RANK_SHAPES, &[1]),
        ("batch", vec![GgmlType::Q4_K, GgmlType::BF16], SHAPES, &BATCHES),
    ];
    for (name, usual, shapes, batches) in parts {
        if !wants(name) {
            continue;
        }
        let types = if named.is_empty() { usual } else { named.clone() };
        compile(&cache, &types, &shapes, batches);
        if name == "batch" { batch(&gpu, &matmul, &types) } else { matvec(&gpu, &matmul, &types, &shapes) }
    }
}
