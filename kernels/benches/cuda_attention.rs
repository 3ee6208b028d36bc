//! Attention on a GPU with the heads of an 8B model: prefill in TFLOP/s, decode in GB/s of keys and values, both from a
//! recorded graph whose launches go through several caches, more bytes than the second-level cache holds.
//! Run: `cargo bench -p lockstep-kernels --features cuda --bench cuda_attention` on a machine with a GPU; without one it
//! fails. `benches/cuda_attention_peers.py` prints the same table for torch.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a benchmark reports")]

use std::sync::Arc;

use lockstep_kernels::{
    cuda::{
        Activations, CudaKvCache, DeviceBuffer, Forms, Gpu, Graph, HalfType, KernelCache, StepInputs,
        attention::{Attention, AttentionCall},
        rope_and_store::{CudaRope, Element, Rows},
    },
    device::KvCacheSpec,
    ops::{self, AttentionSequence, RopeStyle, RopeTable},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const HEAD_DIM: usize = 128;
const BLOCK_SIZE: usize = 32;
const HALF_TYPE: HalfType = HalfType::BF16;
/// Keys and values that the launches of a graph go through, unless one launch reads more.
const ROTATED_BYTES: usize = 1 << 30;
const REPEATS: usize = 9;

/// Random 16-bit floats between -1 and 1.
fn fill(buffer: &DeviceBuffer, random: &mut StdRng) {
    let part: Vec<u16> = (0..1 << 22).map(|_| half::bf16::from_f32(random.random_range(-1.0..1.0)).to_bits()).collect();
    for start in (0..buffer.num_bytes()).step_by(2 * part.len()) {
        buffer.write(start, &part[..part.len().min((buffer.num_bytes() - start) / 2)]).unwrap();
    }
}

struct Case {
    num_heads: usize,
    num_key_value_heads: usize,
    num_sequences: usize,
    num_keys: usize,
    /// Query tokens of each sequence, the last of its keys.
    num_tokens: usize,
    /// Rotates and stores the new token in the same launch.
    fused: bool,
}

impl Case {
    fn cache_bytes(&self) -> usize {
        self.num_sequences * self.num_keys * self.num_key_value_heads * HEAD_DIM * 2 * size_of::<u16>()
    }

    /// Milliseconds of one launch: the median over replays of a graph.
    fn milliseconds(&self, gpu: &Arc<Gpu>, random: &mut StdRng) -> f32 {
        let blocks = self.num_keys.div_ceil(BLOCK_SIZE);
        let num_layers = (ROTATED_BYTES / self.cache_bytes()).clamp(1, 32);
        let spec = KvCacheSpec {
            num_layers,
            num_blocks: blocks * self.num_sequences,
            block_size: BLOCK_SIZE,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: HEAD_DIM,
        };
        let cache = CudaKvCache::new(gpu, spec, HALF_TYPE).unwrap();
        (0..num_layers).for_each(|layer| fill(cache.layer(layer).unwrap(), random));
        let mut free: Vec<u32> = (0..spec.num_blocks as u32).collect();
        let tables: Vec<Vec<u32>> = (0..self.num_sequences)
            .map(|_| (0..blocks).map(|_| free.swap_remove(random.random_range(0..free.len()))).collect())
            .collect();
        let (num_tokens, first_position) = (self.num_tokens, self.num_keys - self.num_tokens);
        let sequences: Vec<_> =
            tables.iter().map(|block_table| AttentionSequence { num_tokens, first_position, block_table }).collect();
        let call = ops::Attention {
            num_heads: self.num_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: HEAD_DIM,
            group_size: self.num_heads / self.num_key_value_heads,
            group_offset: 0,
            scale: (HEAD_DIM as f32).powf(-0.5),
            layer: 0,
            sequences: &sequences,
        };
        let attention = Attention::new(gpu).unwrap();
        let mut inputs = StepInputs::new(gpu).unwrap();
        let batch = attention.stage(&mut inputs, &call, &cache).unwrap();
        inputs.send().unwrap();
        let columns = self.num_heads * HEAD_DIM;
        let stride = if self.fused { columns + 2 * self.num_key_value_heads * HEAD_DIM } else { columns };
        let all_tokens = self.num_sequences * num_tokens;
        let buffer = Arc::new(DeviceBuffer::uninit(gpu, all_tokens * stride * size_of::<u16>()).unwrap());
        fill(&buffer, random);
        let frequencies = (0..HEAD_DIM / 2).map(|pair| 5e5_f32.powf(-(pair as f32) / 64.0)).collect();
        let table = RopeTable { style: RopeStyle::Interleaved, rotary_dim: HEAD_DIM, frequencies, magnitude: 1.0 };
        let rope = CudaRope::new(gpu, &table).unwrap();
        let forms = Forms { halves: Some(HALF_TYPE), ..Forms::default() };
        let calls: Vec<_> = (0..num_layers)
            .map(|layer| AttentionCall {
                batch: batch.clone(),
                layer,
                queries: Rows { buffer: Arc::clone(&buffer), element: Element::Half, stride },
                cache: cache.clone(),
                output: Activations::zeroed(gpu, all_tokens, columns, forms).unwrap(),
            })
            .collect();
        let launch_all = || {
            calls.iter().try_for_each(|call| match self.fused {
                true => attention.launch_fused(call, &rope),
                false => attention.launch(call),
            })
        };
        launch_all().unwrap();
        let graph = Graph::record(gpu, launch_all).unwrap();
        graph.replay().unwrap();
        gpu.synchronize().unwrap();
        let mut times: Vec<f32> = (0..REPEATS).map(|_| gpu.elapsed_ms(|| graph.replay()).unwrap()).collect();
        times.sort_by(f32::total_cmp);
        times[REPEATS / 2] / num_layers as f32
    }
}

fn main() {
    let gpu = Gpu::open(0, KernelCache::default()).unwrap();
    let mut random = StdRng::seed_from_u64(1);
    println!("{} bf16, heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}", gpu.limits().name);
    for (num_key_value_heads, num_keys) in [(32, 4096), (8, 4096), (32, 16384), (8, 16384)] {
        let (num_heads, num_sequences, num_tokens) = (32, 1, num_keys);
        let case = Case { num_heads, num_key_value_heads, num_sequences, num_keys, num_tokens, fused: false };
        let milliseconds = case.milliseconds(&gpu, &mut random);
        let operations = (4 * num_heads * HEAD_DIM * num_keys * num_keys / 2) as f32;
        let rate = operations / milliseconds / 1e9;
        println!("prefill {num_heads}/{num_key_value_heads} {num_keys}: {milliseconds:.3} ms, {rate:.0} TFLOP/s");
    }
    for (num_sequences, num_keys) in [(64, 8192), (8, 8192), (1, 65536), (1, 8192), (128, 512), (1, 2048), (1, 512)] {
        for fused in [false, true] {
            let (num_heads, num_key_value_heads, num_tokens) = (32, 8, 1);
            let case = Case { num_heads, num_key_value_heads, num_sequences, num_keys, num_tokens, fused };
            let milliseconds = case.milliseconds(&gpu, &mut random);
            let rate = case.cache_bytes() as f32 / milliseconds / 1e6;
            let name = if fused { "decode with rotation and store" } else { "decode" };
            println!("{name} {num_sequences} x {num_keys}: {:.1} us, {rate:.0} GB/s", milliseconds * 1e3);
        }
    }
}
