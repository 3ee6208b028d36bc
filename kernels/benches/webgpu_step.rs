//! What each operation of a decode step of an 8B shape takes on the first Vulkan adapter, in chains of dependent dispatches,
//! and what the host takes to describe and encode them.
//!
//!     cargo bench -p lockstep-kernels --features webgpu --bench webgpu_step
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

use std::time::{Duration, Instant};

use lockstep_formats::{Dtype, GgmlType};
use lockstep_kernels::{
    Device, KernelError,
    device::KvCacheSpec,
    group::Sum,
    ops::{Attention, AttentionSequence, Epilogue, HostMatrix, RopeAndStore, RopeStyle, RopeTable, SampleRow},
    webgpu::{
        AdapterId, Backend, WebGpuDevice, WebGpuTensor, commands::Binding, gpu::GpuOptions, kv_cache::WebGpuKvCache,
        matmul::WebGpuLinear,
    },
};

/// Dispatches of a chain.
const CHAIN: usize = 200;
const HIDDEN: usize = 4096;
const HEADS: usize = 32;
const KEY_VALUE_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const FEED_FORWARD: usize = 14336;
const BLOCK_SIZE: usize = 32;
const BLOCKS: usize = 256;

/// Layers of a whole step.
const LAYERS: usize = 32;

/// A layer with what it computes.
struct Layer {
    hidden: WebGpuTensor,
    normed: WebGpuTensor,
    qkv: WebGpuTensor,
    attended: WebGpuTensor,
    gated: WebGpuTensor,
    norm: WebGpuTensor,
    layers: [WebGpuLinear; 4],
    table: RopeTable,
    cache: WebGpuKvCache,
    block_table: Vec<u32>,
}

impl Layer {
    fn new(device: &WebGpuDevice) -> Self {
        let tensor = |width| device.tensor(1, width).unwrap();
        let qkv_width = (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM;
        let ggml_type = GgmlType::Q4_K;
        let layer = |rows: usize, columns: usize| {
            let bytes = vec![0x11; rows * ggml_type.bytes_of(columns).unwrap()];
            device.linear(vec![HostMatrix { ggml_type, rows, columns, bytes }]).unwrap()
        };
        let spec = KvCacheSpec {
            num_layers: 1,
            num_blocks: BLOCKS,
            block_size: BLOCK_SIZE,
            num_key_value_heads: KEY_VALUE_HEADS,
            head_dim: HEAD_DIM,
        };
        let frequencies = vec![0.5; HEAD_DIM / 2];
        Self {
            hidden: tensor(HIDDEN),
            normed: tensor(HIDDEN),
            qkv: tensor(qkv_width),
            attended: tensor(HIDDEN),
            gated: tensor(FEED_FORWARD),
            norm: device.vector(&[1.0; HIDDEN]).unwrap(),
            layers: [(qkv_width, HIDDEN), (HIDDEN, HIDDEN), (2 * FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD)]
                .map(|(rows, columns)| layer(rows, columns)),
            table: RopeTable { style: RopeStyle::Interleaved, rotary_dim: HEAD_DIM, frequencies, magnitude: 1.0 },
            cache: device.kv_cache(spec, Dtype::F16).unwrap(),
            block_table: (0..BLOCKS as u32).collect(),
        }
    }

    fn norm(&mut self, device: &mut WebGpuDevice) -> Result<(), KernelError> {
        device.rms_norm(1, &self.hidden, &self.norm, 1e-5, &mut self.normed)
    }

    fn qkv(&mut self, device: &mut WebGpuDevice) -> Result<(), KernelError> {
        device.matmul(1, &self.layers[0], &self.normed, Epilogue::Store, &mut self.qkv)
    }

    fn output(&mut self, device: &mut WebGpuDevice) -> Result<(), KernelError> {
        device.matmul_add::<KernelError>(1, &self.layers[1], &self.attended, &mut self.hidden, Sum::Own)
    }

    fn gate_up(&mut self, device: &mut WebGpuDevice) -> Result<(), KernelError> {
        device.matmul(1, &self.layers[2], &self.normed, Epilogue::SwiGlu, &mut self.gated)
    }

    fn down(&mut self, device: &mut WebGpuDevice) -> Result<(), KernelError> {
        device.matmul_add::<KernelError>(1, &self.layers[3], &self.gated, &mut self.hidden, Sum::Own)
    }

    fn rope_and_store(&mut self, device: &mut WebGpuDevice, place: &u32) -> Result<(), KernelError> {
        let places = std::slice::from_ref(place);
        let call = RopeAndStore {
            num_heads: HEADS,
            num_key_value_heads: KEY_VALUE_HEADS,
            head_dim: HEAD_DIM,
            layer: 0,
            positions: places,
            slot_mapping: places,
        };
        device.rope_and_store(&call, &self.table, &mut self.qkv, &mut self.cache)
    }

    /// To keys that end with the token's own.
    fn attention(&mut self, device: &mut WebGpuDevice, position: u32) -> Result<(), KernelError> {
        let sequence =
            AttentionSequence { num_tokens: 1, first_position: position as usize, block_table: &self.block_table };
        let call = Attention {
            num_heads: HEADS,
            num_key_value_heads: KEY_VALUE_HEADS,
            head_dim: HEAD_DIM,
            group_size: HEADS / KEY_VALUE_HEADS,
            group_offset: 0,
            scale: 0.1,
            layer: 0,
            sequences: &[sequence],
        };
        device.attention(&call, &self.qkv, &self.cache, &mut self.attended)
    }

    fn all(&mut self, device: &mut WebGpuDevice, position: &u32) -> Result<(), KernelError> {
        self.norm(device)?;
        self.qkv(device)?;
        self.rope_and_store(device, position)?;
        self.attention(device, *position)?;
        self.output(device)?;
        self.norm(device)?;
        self.gate_up(device)?;
        self.down(device)
    }
}

/// Microseconds of so many calls as one step: until they are described, until they are submitted as well, until they are done;
/// and, if they are done long before somebody asks, until the answer is there.
fn step(
    device: &mut WebGpuDevice,
    count: usize,
    mut call: impl FnMut(&mut WebGpuDevice) -> Result<(), KernelError>,
) -> [f64; 4] {
    let mut best = [f64::INFINITY; 4];
    for round in 0..9 {
        let mut seconds = [0.0, 0.0, f64::INFINITY, f64::INFINITY];
        let body = |device: &mut WebGpuDevice| {
            let mut start = Instant::now();
            (0..count).try_for_each(|_| call(device))?;
            seconds[0] = start.elapsed().as_secs_f64();
            device.commands().submit()?;
            seconds[1] = start.elapsed().as_secs_f64();
            if round == 8 {
                std::thread::sleep(Duration::from_millis(100));
                start = Instant::now();
            }
            device.gpu().wait()?;
            seconds[if round == 8 { 3 } else { 2 }] = start.elapsed().as_secs_f64();
            Ok::<_, KernelError>(())
        };
        device.step(body).unwrap();
        for (best, seconds) in best.iter_mut().zip(seconds) {
            *best = best.min(seconds * 1e6);
        }
    }
    best
}

/// Prints microseconds of one of `CHAIN` calls.
fn measure(device: &mut WebGpuDevice, what: &str, call: impl FnMut(&mut WebGpuDevice) -> Result<(), KernelError>) {
    let [described, submitted, done, _] = step(device, CHAIN, call).map(|time| time / CHAIN as f64);
    println!("{what}: {done:.2} us; of these host {described:.2}, encode and submit {:.2}", submitted - described);
}

fn open(options: GpuOptions) -> (WebGpuDevice, Layer) {
    let device = WebGpuDevice::with_options(AdapterId { backend: Backend::Vulkan, ordinal: 0 }, options).unwrap();
    let layer = Layer::new(&device);
    (device, layer)
}

fn main() {
    // Products ask for 8-bit blocks, which producers make from then on.
    for norm_threads in [256, 1024] {
        let (mut device, mut layer) = open(GpuOptions { norm_threads, ..GpuOptions::default() });
        layer.qkv(&mut device).unwrap();
        measure(&mut device, &format!("norm, {norm_threads} threads"), |device| layer.norm(device));
    }
    let (mut device, mut layer) = open(GpuOptions::default());
    println!("{}", device.name());
    layer.qkv(&mut device).unwrap();
    layer.output(&mut device).unwrap();
    measure(&mut device, "norm", |device| layer.norm(device));
    measure(&mut device, "QKV, 6144x4096", |device| layer.qkv(device));
    measure(&mut device, "output, 4096x4096", |device| layer.output(device));
    measure(&mut device, "gate and up", |device| layer.gate_up(device));
    measure(&mut device, "down, 4096x14336", |device| layer.down(device));
    measure(&mut device, "gate and up with blocks", |device| layer.gate_up(device));
    measure(&mut device, "gate and up, down", |device| layer.gate_up(device).and_then(|()| layer.down(device)));
    measure(&mut device, "rotation and store", |device| layer.rope_and_store(device, &600));
    for position in [100, 250, 600, 1500, 4100] {
        measure(&mut device, &format!("attention to {position} keys"), |device| layer.attention(device, position));
        measure(&mut device, "  with rotation and store", |device| {
            layer.rope_and_store(device, &position).and_then(|()| layer.attention(device, position))
        });
    }
    for position in [100, 600] {
        let [described, submitted, done, answered] = step(&mut device, LAYERS, |device| layer.all(device, &position));
        println!(
            "{LAYERS} layers to {position} keys: described by {described:.0} us, submitted by {submitted:.0}, done by \
             {done:.0}, and once that is so noticed in {answered:.0}"
        );
    }
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
