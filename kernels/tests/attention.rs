//! Paged attention against the oracle, and its promise: the bits of a token depend on nothing but its own sequence.

#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

use lockstep_formats::Dtype;
use lockstep_kernels::{
    KernelError,
    cpu::{CpuKvCache, Team, attention::attention, rope_and_store::rope_and_store, simd::Level},
    device::KvCacheSpec,
    ops::{Attention, AttentionSequence, RopeAndStore, RopeStyle, RopeTable},
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

#[derive(Clone, Copy, Debug)]
struct Shape {
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    group_size: usize,
    group_offset: usize,
    block_size: usize,
    dtype: Dtype,
}

impl Shape {
    fn new(num_heads: usize, num_key_value_heads: usize, head_dim: usize, block_size: usize) -> Self {
        let group_size = num_heads / num_key_value_heads;
        let dtype = Dtype::F16;
        Self { num_heads, num_key_value_heads, head_dim, group_size, group_offset: 0, block_size, dtype }
    }

    fn width(&self) -> usize {
        (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
    }
}

/// Whole sequences: `qkv` rows of each, the cache that holds them and the blocks of each.
struct Scene {
    shape: Shape,
    cache: CpuKvCache,
    qkv: Vec<Vec<f32>>,
    block_tables: Vec<Vec<u32>>,
}

const LAYER: usize = 1;

impl Scene {
    fn new(shape: Shape, lengths: &[usize], random: &mut StdRng) -> Self {
        let blocks_of = |length: &usize| length.div_ceil(shape.block_size);
        let num_blocks = lengths.iter().map(blocks_of).sum::<usize>() + 2;
        let spec = KvCacheSpec {
            num_layers: 2,
            num_blocks,
            block_size: shape.block_size,
            num_key_value_heads: shape.num_key_value_heads,
            head_dim: shape.head_dim,
        };
        let mut free: Vec<u32> = (0..num_blocks as u32).collect();
        let cache = CpuKvCache::new(spec, shape.dtype).unwrap();
        let mut scene = Self { shape, cache, qkv: vec![], block_tables: vec![] };
        let team = Team::new(1).unwrap();
        // Whatever a former owner left in the blocks must not be seen, not even what is no number.
        let slots: Vec<u32> = (0..(num_blocks * shape.block_size) as u32).collect();
        store(&team, shape, &slots, &mut vec![f32::NAN; slots.len() * shape.width()], &mut scene.cache);
        for length in lengths {
            let table: Vec<u32> =
                (0..blocks_of(length)).map(|_| free.swap_remove(random.random_range(0..free.len()))).collect();
            let mut rows: Vec<f32> = (0..length * shape.width()).map(|_| random.random_range(-2.0..2.0)).collect();
            let slot = |position: usize| {
                table[position / shape.block_size] as usize * shape.block_size + position % shape.block_size
            };
            let slots: Vec<u32> = (0..*length).map(|position| slot(position) as u32).collect();
            store(&team, shape, &slots, &mut rows, &mut scene.cache);
            scene.qkv.push(rows);
            scene.block_tables.push(table);
        }
        scene
    }

    /// Attention of `(sequence, first_position, num_tokens)` in one call.
    fn attention(&self, team: &Team, level: Level, parts: &[(usize, usize, usize)]) -> Vec<f32> {
        let width = self.shape.width();
        let mut qkv = Vec::new();
        let mut sequences = Vec::new();
        for &(sequence, first_position, num_tokens) in parts {
            qkv.extend_from_slice(&self.qkv[sequence][first_position * width..(first_position + num_tokens) * width]);
            sequences.push(AttentionSequence { num_tokens, first_position, block_table: &self.block_tables[sequence] });
        }
        let call = self.call(&sequences);
        let mut output = vec![f32::NAN; call.num_tokens() * self.shape.num_heads * self.shape.head_dim];
        attention(team, level, &call, &qkv, &self.cache, &mut output).unwrap();
        output
    }

    fn call<'a>(&self, sequences: &'a [AttentionSequence<'a>]) -> Attention<'a> {
        Attention {
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

    fn expected(&self, sequence: usize) -> Vec<f64> {
        let num_tokens = self.qkv[sequence].len() / self.shape.width();
        let block_table = &self.block_tables[sequence];
        let sequences = [AttentionSequence { num_tokens, first_position: 0, block_table }];
        reference::attention::attention(&self.call(&sequences), &self.qkv[sequence], |_, position, head| {
            let block = block_table[position / self.shape.block_size] as usize;
            let slot = block * self.shape.block_size + position % self.shape.block_size;
            self.cache.token(LAYER, slot, head).unwrap()
        })
    }
}

/// Stores keys and values without rotating them.
fn store(team: &Team, shape: Shape, slots: &[u32], rows: &mut [f32], cache: &mut CpuKvCache) {
    let table = RopeTable { style: RopeStyle::Halves, rotary_dim: 0, frequencies: vec![], magnitude: 1.0 };
    let call = RopeAndStore {
        num_heads: shape.num_heads,
        num_key_value_heads: shape.num_key_value_heads,
        head_dim: shape.head_dim,
        layer: LAYER,
        positions: slots,
        slot_mapping: slots,
    };
    rope_and_store(team, Level::detect(), &call, &table, rows, cache).unwrap();
}

fn random() -> StdRng {
    let seed = rand::rng().random();
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

fn shapes() -> Vec<Shape> {
    let mut shapes: Vec<Shape> = [64, 80, 96, 128, 256, 40]
        .into_iter()
        .zip([(3, 1), (4, 4), (8, 2), (8, 1), (2, 2), (5, 1)])
        .zip([16, 32, 16, 32, 16, 4])
        .map(|((head_dim, (num_heads, num_key_value_heads)), block_size)| {
            Shape::new(num_heads, num_key_value_heads, head_dim, block_size)
        })
        .collect();
    // Nine query heads over three key/value heads, cut as 5 + 4: the second rank starts inside a group.
    let split = Shape { group_size: 3, ..Shape::new(5, 2, 64, 16) };
    shapes.extend([split, Shape { num_heads: 4, group_offset: 2, ..split }, Shape::new(1, 1, 33, 24)]);
    shapes
}

#[test]
fn agrees_with_the_oracle_on_every_level() {
    let mut random = random();
    let all_types = |shape| Dtype::ALL.map(|dtype| Shape { dtype, ..shape });
    for shape in shapes().into_iter().flat_map(all_types) {
        let lengths = [1, random.random_range(2..40), random.random_range(260..300)];
        let scene = Scene::new(shape, &lengths, &mut random);
        let team = Team::new(2).unwrap();
        let parts: Vec<_> = lengths.iter().enumerate().map(|(index, length)| (index, 0, *length)).collect();
        let expected: Vec<f64> = (0..lengths.len()).flat_map(|sequence| scene.expected(sequence)).collect();
        for level in Level::supported() {
            let output = scene.attention(&team, level, &parts);
            let worst = output.iter().zip(&expected).map(|(got, want)| (f64::from(*got) - want).abs());
            let worst = worst.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst });
            // Scores reach some 30 and values 2: rounding a score to f32 alone moves a weight by 2e-6 of it.
            assert!(worst < 1e-5, "{shape:?} {level:?} {lengths:?}: error {worst}");
        }
    }
}

#[test]
fn bits_depend_on_the_sequence_alone() {
    let mut random = random();
    let teams = [1, 2, 3, 7].map(|num_threads| Team::new(num_threads).unwrap());
    let types = Dtype::ALL.into_iter().cycle();
    for shape in shapes().into_iter().zip(types).map(|(shape, dtype)| Shape { dtype, ..shape }) {
        let lengths = [37, random.random_range(500..900), 5];
        let scene = Scene::new(shape, &lengths, &mut random);
        let row = shape.num_heads * shape.head_dim;
        for level in Level::supported() {
            let whole: Vec<Vec<f32>> =
                (0..3).map(|index| scene.attention(&teams[0], level, &[(index, 0, lengths[index])])).collect();
            for team in &teams {
                // Decode steps of several sequences.
                let parts: Vec<_> = (0..3).map(|index| (index, lengths[index] - 1, 1)).collect();
                let together = scene.attention(team, level, &parts);
                for (index, output) in together.chunks(row).enumerate() {
                    assert_eq!(output, &whole[index][(lengths[index] - 1) * row..], "{shape:?} {level:?} decode");
                }
                assert_eq!(scene.attention(team, level, &parts[1..2]), &whole[1][(lengths[1] - 1) * row..]);
                // A prompt in chunks, beside others.
                let mut first = 0;
                while first < lengths[1] {
                    let num_tokens = random.random_range(1..=200).min(lengths[1] - first);
                    let output = scene.attention(team, level, &[(2, 0, 5), (1, first, num_tokens), (0, 36, 1)]);
                    let own = &output[5 * row..(5 + num_tokens) * row];
                    assert_eq!(own, &whole[1][first * row..(first + num_tokens) * row], "{shape:?} {level:?} chunk");
                    first += num_tokens;
                }
            }
        }
    }
}

#[test]
fn calls_that_would_leave_their_buffers_are_refused() {
    let shape = Shape::new(6, 2, 64, 16);
    let scene = Scene::new(shape, &[20], &mut StdRng::seed_from_u64(1));
    let table = &scene.block_tables[0];
    let spec = *scene.cache.spec();
    let good = [AttentionSequence { num_tokens: 4, first_position: 16, block_table: table }];
    let check = |call: Attention<'_>| call.check(&spec, shape.width(), 6 * 64);
    assert!(check(scene.call(&good)).is_ok());
    let foreign = [table[0], spec.num_blocks as u32];
    let sequences = [
        AttentionSequence { num_tokens: 0, ..good[0] },
        AttentionSequence { first_position: 29, ..good[0] },
        AttentionSequence { first_position: usize::MAX, ..good[0] },
        AttentionSequence { block_table: &foreign, ..good[0] },
    ];
    for sequence in sequences {
        assert!(check(scene.call(&[sequence])).is_err(), "{sequence:?}");
    }
    let call = scene.call(&good);
    let calls = [
        Attention { num_heads: 0, ..call },
        Attention { num_heads: 7, ..call },
        Attention { num_key_value_heads: 1, ..call },
        Attention { head_dim: 0, ..call },
        Attention { head_dim: 32, ..call },
        Attention { group_size: 0, ..call },
        Attention { group_size: 2, ..call },
        Attention { group_offset: 3, ..call },
        Attention { group_offset: usize::MAX, group_size: usize::MAX, ..call },
        Attention { layer: 2, ..call },
    ];
    for call in calls {
        assert!(check(call).is_err(), "{call:?}");
    }
    assert!(call.check(&spec, shape.width() - 1, 6 * 64).is_err());
    assert!(call.check(&spec, shape.width(), 5 * 64).is_err());
    let message = check(scene.call(&sequences[3..])).unwrap_err();
    assert!(matches!(message, KernelError::OutOfRange { what: "block id", .. }), "{message}");
}
