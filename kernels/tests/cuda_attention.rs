//! Rotation, KV store and attention of the CUDA device against their oracles: all head sizes, both 16-bit types, heads
//! that begin inside a group, sequences of very different lengths in one launch.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;
mod tiles;

use std::sync::Arc;

use lockstep_kernels::{
    cuda::{
        Activations, CudaKvCache, DeviceBuffer, Forms, Gpu, Graph, HalfType, StepInputs,
        attention::{Attention, AttentionCall},
        rope_and_store::{CudaRope, CudaRopeAndStore, Element, RopeAndStoreCall, Rows},
    },
    device::KvCacheSpec,
    ops::{self, AttentionSequence, RopeAndStore, RopeStyle, RopeTable},
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tiles::tiles_of;

const LAYER: usize = 1;

#[derive(Clone, Copy, Debug)]
struct Shape {
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    group_size: usize,
    group_offset: usize,
    block_size: usize,
    half_type: HalfType,
    element: Element,
}

impl Shape {
    fn width(&self) -> usize {
        (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// Largest error of a whole output, relative to its size.
    fn tolerance(&self) -> f64 {
        match self.half_type {
            HalfType::F16 => 6e-4,
            HalfType::BF16 => 4e-3,
        }
    }

    fn round(&self, value: f32) -> f32 {
        match self.element {
            Element::F32 => value,
            Element::Half => widen(self.half_type, &narrow(self.half_type, &[value]))[0],
        }
    }

    fn upload(&self, gpu: &Arc<Gpu>, values: &[f32]) -> Arc<DeviceBuffer> {
        Arc::new(match self.element {
            Element::F32 => gpu::upload(gpu, values),
            Element::Half => gpu::upload(gpu, &narrow(self.half_type, values)),
        })
    }

    fn download(&self, buffer: &DeviceBuffer, len: usize) -> Vec<f32> {
        match self.element {
            Element::F32 => gpu::download(buffer, len),
            Element::Half => widen(self.half_type, &gpu::download::<u16>(buffer, len)),
        }
    }
}

fn narrow(half_type: HalfType, values: &[f32]) -> Vec<u16> {
    let narrow = |value: &f32| match half_type {
        HalfType::F16 => half::f16::from_f32(*value).to_bits(),
        HalfType::BF16 => half::bf16::from_f32(*value).to_bits(),
    };
    values.iter().map(narrow).collect()
}

fn widen(half_type: HalfType, values: &[u16]) -> Vec<f32> {
    let widen = |bits: &u16| match half_type {
        HalfType::F16 => half::f16::from_bits(*bits).to_f32(),
        HalfType::BF16 => half::bf16::from_bits(*bits).to_f32(),
    };
    values.iter().map(widen).collect()
}

fn shapes() -> Vec<Shape> {
    let heads = [(8, 2, 4, 0), (5, 2, 3, 0), (4, 2, 3, 2), (9, 1, 9, 0), (3, 3, 1, 0)];
    let types = [(HalfType::F16, Element::F32, 16), (HalfType::BF16, Element::Half, 32)];
    let mut shapes = Vec::new();
    for (index, head_dim) in [64, 80, 96, 128, 256, 16].into_iter().enumerate() {
        for (half_type, element, block_size) in types {
            for shift in 0..2 {
                let (num_heads, num_key_value_heads, group_size, group_offset) = heads[(index + shift) % heads.len()];
                let head = Shape {
                    num_heads,
                    num_key_value_heads,
                    head_dim,
                    group_size,
                    group_offset,
                    block_size,
                    half_type,
                    element,
                };
                shapes.push(head);
            }
        }
    }
    shapes
}

/// All of them, or where each launch takes seconds one of each kind.
fn shapes_to_test() -> Vec<Shape> {
    let all = shapes();
    if gpu::is_few() { [0, 7, 13, 18].map(|index| all[index]).to_vec() } else { all }
}

/// Largest of several lengths, which are shorter where each launch takes seconds.
fn longest(usual: usize) -> usize {
    if gpu::is_few() { usual / 8 + 2 } else { usual }
}

fn random() -> StdRng {
    let seed = rand::rng().random();
    println!("{}: seed {seed}", std::thread::current().name().unwrap_or_default());
    StdRng::seed_from_u64(seed)
}

/// Error of the whole, relative to the size of what is wanted. NaN is no small error.
fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let error: f64 = got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).powi(2)).sum();
    let size: f64 = want.iter().map(|want| want.powi(2)).sum();
    assert!((error / size).sqrt() <= tolerance, "{what}: error {}", (error / size).sqrt());
}

/// Whole sequences, their qkv rows as the matmul leaves them, and a cache that may hold them.
struct Scene {
    gpu: Arc<Gpu>,
    shape: Shape,
    table: RopeTable,
    rope: CudaRope,
    cache: CudaKvCache,
    qkv: Vec<Vec<f32>>,
    block_tables: Vec<Vec<u32>>,
}

impl Scene {
    fn new(gpu: &Arc<Gpu>, shape: Shape, lengths: &[usize], random: &mut StdRng) -> Self {
        let blocks_of = |length: &usize| length.div_ceil(shape.block_size);
        let num_blocks = lengths.iter().map(blocks_of).sum::<usize>() + 2;
        let (num_key_value_heads, head_dim, block_size) = (shape.num_key_value_heads, shape.head_dim, shape.block_size);
        let spec = KvCacheSpec { num_layers: 2, num_blocks, block_size, num_key_value_heads, head_dim };
        let cache = CudaKvCache::new(gpu, spec, shape.half_type).unwrap();
        // Whatever a former owner left in the blocks must not be seen, not even what is no number.
        let poison = vec![u16::MAX; cache.layer(LAYER).unwrap().num_bytes() / 2];
        cache.layer(LAYER).unwrap().write(0, &poison).unwrap();
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        let mut take = |_| free.swap_remove(random.random_range(0..free.len()));
        let block_tables = lengths.iter().map(|length| (0..blocks_of(length)).map(&mut take).collect()).collect();
        let mut row = |_| shape.round(random.random_range(-2.0..2.0));
        let qkv = lengths.iter().map(|length| (0..length * shape.width()).map(&mut row).collect()).collect();
        let rotary_dim = if random.random() { head_dim } else { head_dim / 2 };
        let style = if random.random() { RopeStyle::Interleaved } else { RopeStyle::Halves };
        let frequency = |pair| 1e4_f32.powf(-2.0 * pair as f32 / rotary_dim as f32);
        let frequencies = (0..rotary_dim / 2).map(frequency).collect();
        let table = RopeTable { style, rotary_dim, frequencies, magnitude: 1.1 };
        let rope = CudaRope::new(gpu, &table).unwrap();
        Self { gpu: Arc::clone(gpu), shape, table, rope, cache, qkv, block_tables }
    }

    fn lengths(&self) -> Vec<usize> {
        self.qkv.iter().map(|rows| rows.len() / self.shape.width()).collect()
    }

    fn slot(&self, sequence: usize, position: usize) -> usize {
        let block_size = self.shape.block_size;
        self.block_tables[sequence][position / block_size] as usize * block_size + position % block_size
    }

    fn rope_call<'a>(&self, positions: &'a [u32], slot_mapping: &'a [u32]) -> RopeAndStore<'a> {
        let Shape { num_heads, num_key_value_heads, head_dim, .. } = self.shape;
        RopeAndStore { num_heads, num_key_value_heads, head_dim, layer: LAYER, positions, slot_mapping }
    }

    /// Queries of the first tokens of a sequence, rotated in the order of the oracle.
    fn expected_rows(&self, sequence: usize, num_tokens: usize) -> Vec<f64> {
        let positions: Vec<u32> = (0..num_tokens as u32).collect();
        let rows = &self.qkv[sequence][..num_tokens * self.shape.width()];
        reference::rope_and_store::rope(&self.rope_call(&positions, &positions), &self.table, rows)
    }

    /// Rotates and stores the first tokens of a sequence; the rotated queries.
    fn store(&self, sequence: usize, num_tokens: usize) -> Vec<f32> {
        let columns = self.shape.num_heads * self.shape.head_dim;
        let positions: Vec<u32> = (0..num_tokens as u32).collect();
        let slots: Vec<u32> = (0..num_tokens).map(|position| self.slot(sequence, position) as u32).collect();
        let mut inputs = StepInputs::new(&self.gpu).unwrap();
        let kernel = CudaRopeAndStore::new(&self.gpu);
        let addresses =
            kernel.stage(&mut inputs, &self.rope_call(&positions, &slots), &self.table, &self.cache).unwrap();
        inputs.send().unwrap();
        let rows = |values: &[f32], stride| Rows {
            buffer: self.shape.upload(&self.gpu, values),
            element: self.shape.element,
            stride,
        };
        let call = RopeAndStoreCall {
            addresses,
            layer: LAYER,
            rope: self.rope.clone(),
            qkv: rows(&self.qkv[sequence][..num_tokens * self.shape.width()], self.shape.width()),
            queries: rows(&vec![f32::NAN; num_tokens * columns], columns),
            cache: self.cache.clone(),
        };
        kernel.launch(&call).unwrap();
        self.shape.download(&call.queries.buffer, num_tokens * columns)
    }

    fn attention<'a>(&self, sequences: &'a [AttentionSequence<'a>]) -> ops::Attention<'a> {
        ops::Attention {
            num_heads: self.shape.num_heads,
            num_key_value_heads: self.shape.num_key_value_heads,
            head_dim: self.shape.head_dim,
            group_size: self.shape.group_size,
            group_offset: self.shape.group_offset,
            scale: (self.shape.head_dim as f32).powf(-0.5) * 1.5,
            layer: LAYER,
            sequences,
        }
    }

    /// The last `num_tokens[s]` tokens of each sequence.
    fn sequences(&self, num_tokens: &[usize]) -> Vec<AttentionSequence<'_>> {
        let parts = self.lengths().into_iter().zip(num_tokens).zip(&self.block_tables);
        parts
            .map(|((length, num_tokens), block_table)| AttentionSequence {
                num_tokens: *num_tokens,
                first_position: length - num_tokens,
                block_table,
            })
            .collect()
    }

    /// Oracle of attention over what the cache holds, of queries `[num_tokens, num_heads * head_dim]`.
    fn expected(&self, num_tokens: &[usize], queries: &[f32]) -> Vec<f64> {
        let sequences = self.sequences(num_tokens);
        let layer = self.cache.download(LAYER).unwrap();
        let held: Vec<Vec<_>> = self
            .lengths()
            .into_iter()
            .enumerate()
            .map(|(sequence, length)| {
                let heads = 0..self.shape.num_key_value_heads;
                (0..length)
                    .flat_map(|position| heads.clone().map(move |head| (position, head)))
                    .map(|(position, head)| layer.token(self.slot(sequence, position), head).unwrap())
                    .collect()
            })
            .collect();
        // The oracle takes whole rows and looks at the queries alone.
        let columns = self.shape.num_heads * self.shape.head_dim;
        let mut rows = vec![0.0; queries.len() / columns * self.shape.width()];
        rows.chunks_mut(self.shape.width())
            .zip(queries.chunks(columns))
            .for_each(|(row, query)| row[..columns].copy_from_slice(query));
        reference::attention::attention(&self.attention(&sequences), &rows, |sequence, position, head| {
            held[sequence][position * self.shape.num_key_value_heads + head].clone()
        })
    }

    fn output(&self, num_tokens: usize, tiles: bool) -> Activations {
        let forms = Forms { tiles, halves: Some(self.shape.half_type), values: true };
        let columns = self.shape.num_heads * self.shape.head_dim;
        let output = Activations::zeroed(&self.gpu, num_tokens, columns, forms).unwrap();
        output.values.as_ref().unwrap().write(0, &vec![f32::NAN; num_tokens * columns]).unwrap();
        output.halves.as_ref().unwrap().1.write(0, &vec![u16::MAX; num_tokens * columns]).unwrap();
        output
    }

    fn call(&self, inputs: &mut StepInputs, num_tokens: &[usize], rows: &[f32], tiles: bool) -> AttentionCall {
        let attention = Attention::new(&self.gpu).unwrap();
        let sequences = self.sequences(num_tokens);
        let batch = attention.stage(inputs, &self.attention(&sequences), &self.cache).unwrap();
        inputs.send().unwrap();
        let total: usize = num_tokens.iter().sum();
        AttentionCall {
            batch,
            layer: LAYER,
            queries: Rows {
                buffer: self.shape.upload(&self.gpu, rows),
                element: self.shape.element,
                stride: rows.len() / total,
            },
            cache: self.cache.clone(),
            output: self.output(total, tiles),
        }
    }

    /// The f32 form is near what is wanted, the others are made of it.
    fn assert_output(&self, output: &Activations, want: &[f64], what: &str) {
        let what = format!("{what} of {:?} {:?} {:?}", self.shape, self.table.style, self.lengths());
        let values: Vec<f32> = gpu::download(output.values.as_ref().unwrap(), want.len());
        assert_close(&values, want, self.shape.tolerance(), &what);
        let (half_type, halves) = output.halves.as_ref().unwrap();
        let halves: Vec<u16> = gpu::download(halves, want.len());
        assert!(halves == narrow(*half_type, &values), "halves of {what}");
        if let Some(tiles) = &output.tiles {
            let tiles: Vec<u8> = gpu::download(tiles, tiles.num_bytes());
            assert!(tiles == tiles_of(&values, output.columns), "tiles of {what}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn rotation_and_store_agree_with_the_oracle() {
    gpu::side_by_side(shapes_to_test(), |gpu, shape| {
        let mut random = random();
        let scene = Scene::new(gpu, shape, &[random.random_range(2..40)], &mut random);
        let num_tokens = scene.lengths()[0];
        let queries = scene.store(0, num_tokens);
        let layer = scene.cache.download(LAYER).unwrap();
        let want = scene.expected_rows(0, num_tokens);
        let what = format!("{shape:?} {:?}", scene.table);
        let tolerance = if shape.element == Element::F32 { 3e-6 } else { shape.tolerance() };
        let (head_dim, columns) = (shape.head_dim, shape.num_heads * shape.head_dim);
        for (position, row) in want.chunks(shape.width()).enumerate() {
            assert_close(&queries[position * columns..][..columns], &row[..columns], tolerance, &what);
            for head in 0..shape.num_key_value_heads {
                let (key, value) = layer.token(scene.slot(0, position), head).unwrap();
                let key_at = columns + head * head_dim;
                assert_close(&key, &row[key_at..][..head_dim], shape.tolerance(), &what);
                let value_at = key_at + shape.num_key_value_heads * head_dim;
                assert_close(&value, &row[value_at..][..head_dim], shape.tolerance(), &what);
            }
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn angles_hold_at_large_positions() {
    let (gpu, mut random) = (gpu::open(), random());
    let shape = Shape { element: Element::F32, half_type: HalfType::F16, block_size: 16, ..shapes()[0] };
    let scene = Scene::new(&gpu, shape, &[1], &mut random);
    let (positions, slots) = ([1_048_575], [scene.slot(0, 0) as u32]);
    let want = reference::rope_and_store::rope(&scene.rope_call(&positions, &slots), &scene.table, &scene.qkv[0]);
    let mut inputs = StepInputs::new(&gpu).unwrap();
    let kernel = CudaRopeAndStore::new(&gpu);
    let addresses =
        kernel.stage(&mut inputs, &scene.rope_call(&positions, &slots), &scene.table, &scene.cache).unwrap();
    inputs.send().unwrap();
    // In place.
    let qkv = Rows { buffer: shape.upload(&gpu, &scene.qkv[0]), element: Element::F32, stride: shape.width() };
    let (rope, cache) = (scene.rope.clone(), scene.cache.clone());
    let call = RopeAndStoreCall { addresses, layer: LAYER, rope, queries: qkv.clone(), qkv, cache };
    kernel.launch(&call).unwrap();
    let columns = shape.num_heads * shape.head_dim;
    assert_close(&gpu::download::<f32>(&call.queries.buffer, columns), &want[..columns], 3e-6, "queries");
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn attention_agrees_with_the_oracle() {
    gpu::side_by_side(shapes_to_test(), |gpu, shape| {
        let mut random = random();
        let attention = Attention::new(gpu).unwrap();
        let lengths = [longest(260) + random.random_range(0..longest(440)), 1, random.random_range(2..40), 64, 65];
        let scene = Scene::new(gpu, shape, &lengths, &mut random);
        let queries: Vec<Vec<f32>> = (0..lengths.len()).map(|index| scene.store(index, lengths[index])).collect();
        let few = lengths.map(|length| random.random_range(1..=8.min(length)));
        let chunks = lengths.map(|length| random.random_range(1..=length));
        let columns = shape.num_heads * shape.head_dim;
        for num_tokens in [[1; 5], few, chunks, lengths] {
            let last = |index: usize| &queries[index][(lengths[index] - num_tokens[index]) * columns..];
            let rows: Vec<f32> = (0..lengths.len()).flat_map(last).copied().collect();
            let tiles = shape.head_dim % 32 == 0 && num_tokens.iter().all(|tokens| *tokens <= 8);
            let call = scene.call(&mut StepInputs::new(gpu).unwrap(), &num_tokens, &rows, tiles);
            attention.launch(&call).unwrap();
            scene.assert_output(&call.output, &scene.expected(&num_tokens, &rows), &format!("{num_tokens:?}"));
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn one_launch_rotates_stores_and_attends() {
    gpu::side_by_side(shapes_to_test().into_iter().enumerate(), |gpu, (index, shape)| {
        let mut random = random();
        // A large or a small cluster for each; over all blocks, none of which has parts of two; several in a block.
        let short = vec![longest(260) + random.random_range(0..longest(440)), 1, 17, random.random_range(2..40), 64];
        let some = (0..20).map(|_| random.random_range(1..longest(300))).collect();
        let long = vec![random.random_range(4097..4500), 70];
        let many = (0..270).map(|_| random.random_range(1..longest(150))).collect();
        for (kind, lengths) in [short, some, long, many].iter().enumerate() {
            // Where each launch takes seconds every shape has one of the four.
            if !gpu::is_few() || kind == index {
                rotate_store_and_attend(gpu, shape, lengths, &mut random);
            }
        }
    });
}

fn rotate_store_and_attend(gpu: &Arc<Gpu>, shape: Shape, lengths: &[usize], random: &mut StdRng) {
    let scene = Scene::new(gpu, shape, lengths, random);
    let (width, head_dim, columns) = (shape.width(), shape.head_dim, shape.num_heads * shape.head_dim);
    let mut rows = Vec::new();
    let mut wanted = Vec::new();
    for (sequence, length) in lengths.iter().enumerate() {
        if *length > 1 {
            scene.store(sequence, length - 1);
        }
        rows.extend_from_slice(&scene.qkv[sequence][(length - 1) * width..]);
        wanted.push(scene.expected_rows(sequence, *length).split_off((length - 1) * width));
    }
    let ones = vec![1; lengths.len()];
    let call = scene.call(&mut StepInputs::new(gpu).unwrap(), &ones, &rows, head_dim % 32 == 0);
    Attention::new(gpu).unwrap().launch_fused(&call, &scene.rope).unwrap();
    let queries: Vec<f32> = wanted.iter().flat_map(|row| &row[..columns]).map(|value| *value as f32).collect();
    scene.assert_output(&call.output, &scene.expected(&ones, &queries), "fused");
    let layer = scene.cache.download(LAYER).unwrap();
    for (sequence, row) in wanted.iter().enumerate() {
        for head in 0..shape.num_key_value_heads {
            let slot = scene.slot(sequence, lengths[sequence] - 1);
            let (key, value) = layer.token(slot, head).unwrap();
            let value_at = columns + (shape.num_key_value_heads + head) * head_dim;
            assert_close(&key, &row[columns + head * head_dim..][..head_dim], shape.tolerance(), "key");
            assert_close(&value, &row[value_at..][..head_dim], shape.tolerance(), "value");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_recorded_launch_follows_growing_sequences() {
    let (gpu, mut random) = (gpu::open(), random());
    let attention = Attention::new(&gpu).unwrap();
    let shape = shapes()[12];
    let scene = Scene::new(&gpu, shape, &[200, 90, 130], &mut random);
    let columns = shape.num_heads * shape.head_dim;
    let queries: Vec<Vec<f32>> = (0..3).map(|index| scene.store(index, scene.lengths()[index])).collect();
    let mut inputs = StepInputs::new(&gpu).unwrap();
    let rows = |at: [usize; 3]| -> Vec<f32> {
        (0..3).flat_map(|index| &queries[index][at[index] * columns..][..columns]).copied().collect()
    };
    let stage = |inputs: &mut StepInputs, at: [usize; 3]| {
        let sequences = [0, 1, 2].map(|index| AttentionSequence {
            num_tokens: 1,
            first_position: at[index],
            block_table: &scene.block_tables[index],
        });
        let batch = attention.stage(inputs, &scene.attention(&sequences), &scene.cache).unwrap();
        inputs.send().unwrap();
        batch
    };
    let first = [3, 70, 20];
    let batch = stage(&mut inputs, first);
    let buffer = shape.upload(&gpu, &rows(first));
    let call = AttentionCall {
        batch,
        layer: LAYER,
        queries: Rows { buffer, element: shape.element, stride: columns },
        cache: scene.cache.clone(),
        output: scene.output(3, false),
    };
    attention.launch(&call).unwrap();
    let graph = Graph::record(&gpu, || attention.launch(&call)).unwrap();
    for at in [[4, 71, 21], [63, 89, 64], [199, 2, 129]] {
        inputs.clear();
        assert_eq!(stage(&mut inputs, at), call.batch, "a larger batch would need a new recording");
        let bytes = shape.upload(&gpu, &rows(at));
        call.queries.buffer.write(0, &gpu::download::<u8>(&bytes, bytes.num_bytes())).unwrap();
        graph.replay().unwrap();
        let values: Vec<f32> = gpu::download(call.output.values.as_ref().unwrap(), 3 * columns);
        for index in 0..3 {
            let mut part = Scene::new(&gpu, shape, &[at[index] + 1], &mut random);
            part.cache = scene.cache.clone();
            part.block_tables = vec![scene.block_tables[index].clone()];
            let want = part.expected(&[1], &rows(at)[index * columns..][..columns]);
            assert_close(&values[index * columns..][..columns], &want, shape.tolerance(), &format!("{at:?} {index}"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn calls_that_do_not_fit_are_refused() {
    let (gpu, mut random) = (gpu::open(), random());
    let attention = Attention::new(&gpu).unwrap();
    let spec = KvCacheSpec { num_layers: 1, num_blocks: 4, block_size: 16, num_key_value_heads: 1, head_dim: 64 };
    let refused = [
        KvCacheSpec { head_dim: 40, ..spec },
        KvCacheSpec { head_dim: 512, ..spec },
        KvCacheSpec { block_size: 24, ..spec },
        KvCacheSpec { num_blocks: usize::MAX, ..spec },
    ];
    for spec in refused {
        assert!(CudaKvCache::new(&gpu, spec, HalfType::F16).is_err(), "{spec:?}");
    }
    let scene = Scene::new(&gpu, shapes()[0], &[40], &mut random);
    let columns = scene.shape.num_heads * scene.shape.head_dim;
    let good = scene.call(&mut StepInputs::new(&gpu).unwrap(), &[1], &vec![0.0; columns], false);
    let other = CudaKvCache::new(&gpu, KvCacheSpec { num_blocks: 1, ..*scene.cache.spec() }, HalfType::F16).unwrap();
    let short = Rows { buffer: Arc::new(gpu::upload(&gpu, &[0.0_f32])), ..good.queries.clone() };
    let narrow = Activations { columns: columns - 1, ..good.output.clone() };
    let calls = [
        AttentionCall { cache: other, ..good.clone() },
        AttentionCall { queries: short, ..good.clone() },
        AttentionCall { output: narrow, ..good.clone() },
        AttentionCall { layer: 2, ..good.clone() },
    ];
    for call in calls {
        assert!(attention.launch(&call).is_err());
    }
    let prompt = scene.call(&mut StepInputs::new(&gpu).unwrap(), &[20], &vec![0.0; 20 * columns], true);
    assert!(attention.launch(&prompt).is_err(), "8-bit output of a prompt");
    let whole = scene.call(&mut StepInputs::new(&gpu).unwrap(), &[2], &vec![0.0; 2 * scene.shape.width()], false);
    assert!(attention.launch_fused(&whole, &scene.rope).is_err(), "two tokens");
}
