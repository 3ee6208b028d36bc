//! Attention on WebGPU against the oracle: plain, by tiles and by what stands in for tensor cores, with rotation and store in
//! the same dispatch, with subgroups and without.
#![cfg(feature = "webgpu")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod adapter;

use adapter::{random, stored, table, values};
use lockstep_formats::Dtype;
use lockstep_kernels::{
    Device,
    device::KvCacheSpec,
    ops::{Attention, AttentionSequence, RopeAndStore, RopeStyle, RopeTable},
    reference,
    webgpu::{
        WebGpuDevice,
        attention::{MatrixShape, has_matrices},
        attention_decode::{MAX_RANGES, RANGE_KEYS, round_keys},
        gpu::GpuOptions,
        kv_cache::WebGpuKvCache,
    },
};
use rand::{Rng, rngs::StdRng, seq::SliceRandom};

#[derive(Clone, Copy, Debug)]
struct Shape {
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    group_size: usize,
    group_offset: usize,
    block_size: usize,
    dtype: Dtype,
    /// By how much of its size a key is larger than the one before it.
    growth: f32,
}

/// Whole sequences: `qkv` rows of each, the cache that holds them and the blocks of each.
struct Scene {
    shape: Shape,
    cache: WebGpuKvCache,
    qkv: Vec<Vec<f32>>,
    block_tables: Vec<Vec<u32>>,
}

impl Shape {
    fn width(&self) -> usize {
        (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
    }
}

impl Scene {
    fn new(device: &mut WebGpuDevice, shape: Shape, lengths: &[usize], random: &mut StdRng) -> Self {
        let num_blocks = lengths.iter().map(|length| length.div_ceil(shape.block_size)).sum::<usize>() + 2;
        let Shape { num_key_value_heads, head_dim, block_size, .. } = shape;
        let spec = KvCacheSpec { num_layers: 2, num_blocks, block_size, num_key_value_heads, head_dim };
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        free.shuffle(random);
        let mut cache = device.kv_cache(spec, shape.dtype).unwrap();
        let (mut qkv, mut block_tables) = (Vec::new(), Vec::new());
        for length in lengths {
            let table: Vec<u32> = free.split_off(free.len() - length.div_ceil(block_size));
            let slot =
                |position: usize| table[position / block_size] * block_size as u32 + (position % block_size) as u32;
            let slots: Vec<u32> = (0..*length).map(slot).collect();
            let mut rows = values(random, length * shape.width(), 2.0);
            for (position, row) in rows.chunks_mut(shape.width()).enumerate() {
                let keys = &mut row[shape.num_heads * head_dim..][..num_key_value_heads * head_dim];
                keys.iter_mut().for_each(|value| *value *= 1.0 + shape.growth * position as f32);
            }
            let mut tensor = adapter::tensor(device, shape.width(), &rows);
            let call = RopeAndStore {
                num_heads: shape.num_heads,
                num_key_value_heads,
                head_dim,
                layer: 1,
                positions: &slots,
                slot_mapping: &slots,
            };
            device.rope_and_store(&call, &no_rotation(), &mut tensor, &mut cache).unwrap();
            qkv.push(rows);
            block_tables.push(table);
        }
        Self { shape, cache, qkv, block_tables }
    }

    fn call<'a>(&self, sequences: &'a [AttentionSequence<'a>]) -> Attention<'a> {
        let Shape { num_heads, num_key_value_heads, head_dim, group_size, group_offset, .. } = self.shape;
        let scale = (head_dim as f32).powf(-0.5) * 1.5;
        Attention { num_heads, num_key_value_heads, head_dim, group_size, group_offset, scale, layer: 1, sequences }
    }

    /// Attention of `(sequence, first_position, num_tokens)` in one call.
    fn attention(&self, device: &mut WebGpuDevice, parts: &[(usize, usize, usize)]) -> Vec<f32> {
        let width = self.shape.width();
        let (mut rows, mut sequences) = (Vec::new(), Vec::new());
        for &(sequence, first_position, num_tokens) in parts {
            rows.extend_from_slice(&self.qkv[sequence][first_position * width..(first_position + num_tokens) * width]);
            sequences.push(AttentionSequence { num_tokens, first_position, block_table: &self.block_tables[sequence] });
        }
        let call = self.call(&sequences);
        let qkv = adapter::tensor(device, width, &rows);
        let mut output = device.tensor(call.num_tokens(), call.num_heads * call.head_dim).unwrap();
        device.attention(&call, &qkv, &self.cache, &mut output).unwrap();
        adapter::rows(device, call.num_tokens(), &mut output)
    }

    fn expected(&self, sequence: usize) -> Vec<f64> {
        self.expected_of(sequence, self.qkv[sequence].len() / self.shape.width())
    }

    /// Of the last tokens.
    fn expected_of(&self, sequence: usize, num_tokens: usize) -> Vec<f64> {
        let Shape { num_heads, num_key_value_heads, head_dim, dtype, .. } = self.shape;
        let rows = &self.qkv[sequence];
        let first_position = rows.len() / self.shape.width() - num_tokens;
        let sequences = [AttentionSequence { num_tokens, first_position, block_table: &self.block_tables[sequence] }];
        let queries = &rows[first_position * self.shape.width()..];
        reference::attention::attention(&self.call(&sequences), queries, |_, position, head| {
            let row = &rows[position * self.shape.width()..];
            let narrow =
                |head: usize| row[head * head_dim..][..head_dim].iter().map(|value| stored(dtype, *value)).collect();
            (narrow(num_heads + head), narrow(num_heads + num_key_value_heads + head))
        })
    }
}

fn no_rotation() -> RopeTable {
    table(RopeStyle::Halves, 0, 1.0)
}

fn shapes() -> Vec<Shape> {
    let shape = |num_heads: usize, num_key_value_heads: usize, head_dim, block_size, dtype| {
        let group_size = num_heads / num_key_value_heads;
        Shape { num_heads, num_key_value_heads, head_dim, group_size, group_offset: 0, block_size, dtype, growth: 0.0 }
    };
    // Nine query heads over three key/value heads, cut as 5 + 4: the second rank starts inside a group.
    let split = Shape { group_size: 3, ..shape(5, 2, 64, 16, Dtype::F16) };
    vec![
        shape(3, 1, 64, 16, Dtype::F16),
        shape(4, 4, 80, 32, Dtype::Bf16),
        shape(8, 2, 96, 16, Dtype::F32),
        shape(16, 1, 128, 32, Dtype::F16),
        shape(2, 2, 256, 16, Dtype::F16),
        shape(2, 1, 512, 16, Dtype::F32),
        // Four keys that are read at a time may lie in two blocks.
        shape(5, 1, 40, 6, Dtype::F16),
        shape(5, 1, 40, 4, Dtype::F16),
        shape(1, 1, 33, 24, Dtype::Bf16),
        split,
        Shape { num_heads: 4, group_offset: 2, ..split },
    ]
}

/// f32 rounding; with tensor cores that of queries and keys to f16, by up to 2^-11 of their size, and of each weight.
fn tolerance(device: &WebGpuDevice, shape: Shape) -> f64 {
    let has_matrices = device.gpu().matrix_edge().is_some() && has_matrices(shape.dtype, shape.head_dim);
    if has_matrices { 4e-3 * f64::from(1.0 + 280.0 * shape.growth) } else { 2e-5 }
}

/// Whole prompts, the last tokens alone, and parts of prompts beside others.
fn attention_agrees(device: &mut WebGpuDevice, shape: Shape, is_parted: bool, random: &mut StdRng) {
    let lengths = [1, random.random_range(2..40), random.random_range(257..280)];
    let scene = Scene::new(device, shape, &lengths, random);
    assert_eq!(scene.cache.is_parted(), is_parted);
    let expected: Vec<Vec<f64>> = (0..lengths.len()).map(|sequence| scene.expected(sequence)).collect();
    let row = shape.num_heads * shape.head_dim;
    let whole: Vec<_> = lengths.iter().enumerate().map(|(index, length)| (index, 0, *length)).collect();
    let last: Vec<_> = lengths.iter().enumerate().map(|(index, length)| (index, length - 1, 1)).collect();
    for parts in [whole, last, vec![(2, 130, 57), (1, 0, 2), (0, 0, 1)]] {
        let output = scene.attention(device, &parts);
        let rows =
            |&(sequence, first, count): &(usize, usize, usize)| &expected[sequence][first * row..(first + count) * row];
        let errors = output.iter().zip(parts.iter().flat_map(rows)).map(|(got, want)| (f64::from(*got) - want).abs());
        let worst = errors.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst });
        assert!(worst < tolerance(device, shape), "{shape:?} {lengths:?} {parts:?}: error {worst}");
    }
}

#[test]
fn attention_agrees_with_the_oracle() {
    let mut random = random();
    let [mut with_subgroups, mut without] = adapter::open_both();
    let num_shapes = if adapter::is_slow() { 1 } else { usize::MAX };
    for (index, shape) in shapes().into_iter().take(num_shapes).enumerate() {
        attention_agrees(&mut with_subgroups, shape, false, &mut random);
        if index % 3 == 0 {
            attention_agrees(&mut without, shape, false, &mut random);
        }
    }
}

impl Scene {
    /// The sequences' last tokens, one a sequence, and where they are stored.
    fn last_tokens(&self) -> (Vec<AttentionSequence<'_>>, Vec<u32>, Vec<u32>) {
        let block_size = self.shape.block_size;
        let (mut sequences, mut positions, mut slots) = (vec![], vec![], vec![]);
        for (rows, block_table) in self.qkv.iter().zip(&self.block_tables) {
            let first_position = rows.len() / self.shape.width() - 1;
            sequences.push(AttentionSequence { num_tokens: 1, first_position, block_table });
            positions.push(first_position as u32);
            slots.push(
                block_table[first_position / block_size] * block_size as u32 + (first_position % block_size) as u32,
            );
        }
        (sequences, positions, slots)
    }

    /// Puts a row, rotated by `table`, in the place of a sequence's last, as the cache holds it in `slot`; the cache's elements
    /// are those of the row but for their rounding.
    fn replace_last(
        &mut self,
        device: &mut WebGpuDevice,
        sequence: usize,
        slot: u32,
        (row, table): (&[f64], &RopeTable),
    ) {
        let Shape { num_heads, num_key_value_heads, head_dim, dtype, .. } = self.shape;
        let mut row: Vec<f32> = row.iter().map(|value| *value as f32).collect();
        let rounding = match dtype {
            Dtype::F16 => 1e-3,
            Dtype::Bf16 => 8e-3,
            Dtype::F32 => 0.0,
        };
        for head in 0..num_key_value_heads {
            let found = self.cache.token(device.commands(), 1, slot as usize, head).unwrap().unwrap();
            let parts = [(num_heads, table.rotary_dim), (num_heads + num_key_value_heads, 0)];
            for (found, (first_head, rotary_dim)) in found.iter().zip(parts) {
                let elements = &mut row[(first_head + head) * head_dim..][..head_dim];
                for (index, (got, want)) in found.iter().zip(&*elements).enumerate() {
                    let pair = want.hypot(elements[partner(table.style, rotary_dim, index)]);
                    // The element, its angle, a product and the sum are rounded by 2^-24 of the pair's size each: a small result
                    // is a difference of large products.
                    let most = (rounding * want.abs().max(1e-2)).max(1e-6 * pair);
                    assert!((got - want).abs() <= most, "{:?} {got} {want}", self.shape);
                }
                elements.copy_from_slice(found);
            }
        }
        let start = self.qkv[sequence].len() - row.len();
        self.qkv[sequence][start..].copy_from_slice(&row);
    }
}

/// The element of a head that is rotated with another one; elements that are not rotated are their own.
fn partner(style: RopeStyle, rotary_dim: usize, index: usize) -> usize {
    match style {
        _ if index >= rotary_dim => index,
        RopeStyle::Interleaved => index ^ 1,
        RopeStyle::Halves => (index + rotary_dim / 2) % rotary_dim,
    }
}

/// Decode tokens that are rotated and stored by the dispatch that attends, of sequences of one range of keys and of several.
fn fused_attention_agrees(
    device: &mut WebGpuDevice,
    shape: Shape,
    style: RopeStyle,
    lengths: &[usize],
    random: &mut StdRng,
) {
    let Shape { num_heads, num_key_value_heads, head_dim, .. } = shape;
    let mut scene = Scene::new(device, shape, lengths, random);
    let table = table(style, head_dim / 4 * 2, 1.25);
    let rows = values(random, lengths.len() * shape.width(), 2.0);
    let mut qkv = adapter::tensor(device, shape.width(), &rows);
    let mut output = device.tensor(lengths.len(), num_heads * head_dim).unwrap();
    let (_, positions, slots) = scene.last_tokens();
    let (positions, slot_mapping) = (&positions[..], &slots[..]);
    let call = RopeAndStore { num_heads, num_key_value_heads, head_dim, layer: 1, positions, slot_mapping };
    let before = device.commands().last_dispatch();
    device.rope_and_store(&call, &table, &mut qkv, &mut scene.cache).unwrap();
    let (sequences, ..) = scene.last_tokens();
    device.attention(&scene.call(&sequences), &qkv, &scene.cache, &mut output).unwrap();
    // One dispatch attends; it joins the ranges, or another one does.
    let joins = device.gpu().has_coherent_memory() && device.gpu().limits().max_storage_buffers_per_shader_stage > 16;
    assert_eq!(device.commands().last_dispatch() - before, if joins { 1 } else { 2 });
    let got = adapter::rows(device, lengths.len(), &mut output);
    let rotated = reference::rope_and_store::rope(&call, &table, &rows);
    for (sequence, row) in rotated.chunks(shape.width()).enumerate() {
        scene.replace_last(device, sequence, slots[sequence], (row, &table));
    }
    for (sequence, got) in got.chunks(num_heads * head_dim).enumerate() {
        for (got, want) in got.iter().zip(&scene.expected_of(sequence, 1)) {
            assert!((f64::from(*got) - want).abs() < 2e-5, "{shape:?} {lengths:?} sequence {sequence}: {got} {want}");
        }
    }
}

#[test]
fn attention_that_rotates_and_stores_agrees_with_the_oracle() {
    let mut random = random();
    let [mut with_all, mut without] = adapter::open_both();
    let num_shapes = if adapter::is_slow() { 1 } else { usize::MAX };
    let styles = [RopeStyle::Interleaved, RopeStyle::Halves].into_iter().cycle();
    for ((index, shape), style) in shapes().into_iter().take(num_shapes).enumerate().zip(styles) {
        let lengths = [1, random.random_range(2..250), random.random_range(RANGE_KEYS + 1..700)];
        fused_attention_agrees(&mut with_all, shape, style, &lengths, &mut random);
        if index % 3 == 0 {
            fused_attention_agrees(&mut without, shape, style, &lengths, &mut random);
        }
    }
}

/// Last tokens of sequences, rotated and stored by the dispatch that attends or before it.
fn decode_agrees(device: &mut WebGpuDevice, shape: Shape, lengths: &[usize], random: &mut StdRng) {
    fused_attention_agrees(device, shape, RopeStyle::Halves, lengths, random);
    let scene = Scene::new(device, shape, lengths, random);
    let parts: Vec<_> = lengths.iter().enumerate().map(|(index, length)| (index, length - 1, 1)).collect();
    let output = scene.attention(device, &parts);
    for (sequence, got) in output.chunks(shape.num_heads * shape.head_dim).enumerate() {
        for (got, want) in got.iter().zip(&scene.expected_of(sequence, 1)) {
            let length = lengths[sequence];
            assert!((f64::from(*got) - want).abs() < 2e-5, "{shape:?} sequence of {length}: {got} {want}");
        }
    }
}

/// Sequences that end around the ends of ranges, and ones whose ranges take several rounds.
#[test]
fn attention_agrees_around_the_ends_of_ranges() {
    let mut random = random();
    let [mut with_all, mut without] = adapter::open_both();
    for group_size in [4, 1] {
        let shape = Shape {
            num_heads: group_size,
            num_key_value_heads: 1,
            head_dim: 32,
            group_size,
            group_offset: 0,
            block_size: 16,
            dtype: Dtype::F16,
            growth: 0.0,
        };
        if adapter::is_slow() {
            decode_agrees(&mut with_all, shape, &[3, RANGE_KEYS, 2 * RANGE_KEYS + 1], &mut random);
            continue;
        }
        let several_rounds = MAX_RANGES * round_keys(shape.head_dim, group_size) + 3;
        let ends = [1, 2, 9]
            .into_iter()
            .flat_map(|ranges| [-1, 0, 1, 5].map(|more| (ranges * RANGE_KEYS).wrapping_add_signed(more)));
        let mut lengths: Vec<usize> = [1, 2, 3, 4, 5, 7, 8, 9, 31, 33].into_iter().chain(ends).collect();
        lengths.extend([MAX_RANGES * RANGE_KEYS, MAX_RANGES * RANGE_KEYS + 1, several_rounds]);
        decode_agrees(&mut with_all, shape, &lengths, &mut random);
        decode_agrees(&mut without, shape, &lengths, &mut random);
    }
}

/// Whoever rotates and stores a token leaves the same bits in the cache: the dispatch that attends, if all tokens of the batch
/// are decoded, or one of its own beside a prompt.
#[test]
fn a_stored_token_does_not_depend_on_the_batch() {
    let mut random = random();
    let mut device = adapter::open_with(GpuOptions::default());
    let shape = Shape { dtype: Dtype::F32, ..shapes()[0] };
    let Shape { num_heads, num_key_value_heads, head_dim, .. } = shape;
    let rows = values(&mut random, 3 * shape.width(), 2.0);
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        let [alone, beside] = [1, 3].map(|num_tokens| {
            let mut scene = Scene::new(&mut device, shape, &[60, 2], &mut random);
            let (_, _, slots) = scene.last_tokens();
            let (positions, slots) = ([59, 0, 1], [slots[0], slots[1] - 1, slots[1]]);
            let (positions, slot_mapping) = (&positions[..num_tokens], &slots[..num_tokens]);
            let call = RopeAndStore { num_heads, num_key_value_heads, head_dim, layer: 1, positions, slot_mapping };
            let mut qkv = adapter::tensor(&mut device, shape.width(), &rows[..num_tokens * shape.width()]);
            let mut output = device.tensor(num_tokens, num_heads * head_dim).unwrap();
            let before = device.commands().last_dispatch();
            device.rope_and_store(&call, &table(style, head_dim, 1.25), &mut qkv, &mut scene.cache).unwrap();
            let (mut sequences, ..) = scene.last_tokens();
            sequences[1] = AttentionSequence { num_tokens: 2, first_position: 0, ..sequences[1] };
            sequences.truncate(num_tokens.div_ceil(2));
            device.attention(&scene.call(&sequences), &qkv, &scene.cache, &mut output).unwrap();
            assert_eq!(device.commands().last_dispatch() - before, if num_tokens == 1 { 1 } else { 2 });
            let found = scene.cache.token(device.commands(), 1, slots[0] as usize, 0).unwrap().unwrap();
            found.map(|elements| elements.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        });
        assert_eq!(alone, beside, "{style:?}");
    }
}

/// What a token sees decides its result, to the bit; who else is in the batch does not.
#[test]
fn attention_of_a_token_does_not_depend_on_the_batch() {
    let mut random = random();
    let mut device = adapter::open_with(GpuOptions::default());
    let shape = shapes()[3];
    let scene = Scene::new(&mut device, shape, &[40, 812, RANGE_KEYS + 1], &mut random);
    let parts = [(0, 39, 1), (1, 811, 1), (2, RANGE_KEYS, 1)];
    let row = shape.num_heads * shape.head_dim;
    let together = scene.attention(&mut device, &parts);
    for (part, together) in parts.into_iter().zip(together.chunks(row)) {
        assert_eq!(scene.attention(&mut device, &[part]), together, "{part:?}");
    }
}

#[test]
fn attention_agrees_with_subgroups_of_four() {
    adapter::run_with_subgroups_of_four(&[
        "attention_agrees_with_the_oracle",
        "attention_that_rotates_and_stores_agrees_with_the_oracle",
        "attention_agrees_around_the_ends_of_ranges",
    ]);
}

/// The shaders for tensor cores, with what stands in for these, some with scores that grow from tile to tile. Compiling them in
/// software takes seconds for each shape.
#[test]
fn attention_by_matrices_agrees_with_the_oracle() {
    let mut random = random();
    let cases = [(32, Dtype::Bf16, 0.02), (16, Dtype::F16, 0.02)];
    for (matrix_shape, (head_dim, dtype, growth)) in MatrixShape::ALL.into_iter().zip(cases) {
        let mut device = adapter::open_with(adapter::matrices::stand_in(matrix_shape.edge));
        let shape = Shape {
            num_heads: 5,
            num_key_value_heads: 2,
            head_dim,
            group_size: 4,
            group_offset: 2,
            block_size: 16,
            dtype,
            growth,
        };
        attention_agrees(&mut device, shape, false, &mut random);
    }
}

/// A cache larger than a binding is in parts, which changes nothing.
#[test]
fn attention_over_a_cache_in_parts_agrees_with_the_oracle() {
    let mut random = random();
    let mut device = adapter::open_with(GpuOptions { max_binding_bytes: 40 << 10, ..GpuOptions::default() });
    for shape in shapes().into_iter().filter(|shape| shape.head_dim == 64) {
        attention_agrees(&mut device, shape, true, &mut random);
    }
}
