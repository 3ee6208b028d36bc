//! Rotary embedding and KV store on the CPU.
//! For: [`CpuDevice`](super::CpuDevice). Contract: [`ops::rope_and_store`](crate::ops::rope_and_store).
//! Invariant: angles are computed in f64, so that a long context loses nothing; what is stored is finite or NaN.

use super::{
    kv_cache::{CpuKvCache, TILE_TOKENS, TilesMut},
    kv_format::{KvFormat, with_format},
    memory::Element,
    simd::{LANES, Level, Simd, Vectorized},
    team::{SharedSlice, Team},
};
use crate::{
    KernelError,
    ops::{RopeAndStore, RopeStyle, RopeTable},
};

/// Tokens that one thread takes at a time.
const CHUNK_TOKENS: usize = 16;

/// Cosines and sines `[num_tokens, rotary_dim / 2]` of the latest call, kept while the positions stay the same: the
/// layers of one step.
#[derive(Default)]
pub(super) struct Angles {
    positions: Vec<u32>,
    frequencies: Vec<f32>,
    magnitude: f32,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl Angles {
    fn update(&mut self, positions: &[u32], table: &RopeTable) {
        let is_same = self.positions == positions
            && self.frequencies == table.frequencies
            && self.magnitude.to_bits() == table.magnitude.to_bits();
        if is_same {
            return;
        }
        self.positions = positions.to_vec();
        self.frequencies.clone_from(&table.frequencies);
        self.magnitude = table.magnitude;
        self.cosines.clear();
        self.sines.clear();
        for &position in positions {
            for &frequency in &table.frequencies {
                let (sine, cosine) = (f64::from(position) * f64::from(frequency)).sin_cos();
                self.cosines.push((cosine * f64::from(table.magnitude)) as f32);
                self.sines.push((sine * f64::from(table.magnitude)) as f32);
            }
        }
    }
}

/// Rotates queries and keys in `qkv` (whole rows, `[num_tokens, width]`) and stores keys and values.
///
/// # Errors
/// [`KernelError`] if the call does not pass its checks.
pub fn rope_and_store(
    team: &Team,
    level: Level,
    call: &RopeAndStore<'_>,
    table: &RopeTable,
    qkv: &mut [f32],
    cache: &mut CpuKvCache,
) -> Result<(), KernelError> {
    let num_tokens = call.num_tokens();
    if num_tokens == 0 {
        return Ok(());
    }
    let width = qkv.len() / num_tokens;
    call.check(table, cache.spec(), width)?;
    with_format!(cache.dtype(), |Format| store_as::<Format>(team, level, call, table, qkv, cache))
}

/// The call, which was checked, on a cache of this format.
fn store_as<F: KvFormat>(
    team: &Team,
    level: Level,
    call: &RopeAndStore<'_>,
    table: &RopeTable,
    qkv: &mut [f32],
    cache: &mut CpuKvCache,
) -> Result<(), KernelError>
where
    [F::Stored; LANES]: Element,
{
    let (num_layers, width) = (cache.spec().num_layers, qkv.len() / call.num_tokens());
    let Some((tiles, angles)) = cache.tiles_mut::<F>(call.layer) else {
        return Err(KernelError::OutOfRange {
            operation: "rope_and_store",
            what: "layer",
            got: call.layer,
            limit: num_layers,
        });
    };
    angles.update(call.positions, table);
    let angles = &*angles;
    let TilesMut { shape, keys, values } = tiles;
    let (keys, values) = (SharedSlice::new(keys.as_flattened_mut()), SharedSlice::new(values.as_flattened_mut()));
    let num_angles = table.frequencies.len();
    team.for_rows(qkv, width, CHUNK_TOKENS, &|first_token, rows| {
        for (token, row) in (first_token..).zip(rows.chunks_exact_mut(width)) {
            let (query_and_key, value_heads) = row.split_at_mut(width - call.num_key_value_heads * call.head_dim);
            level.run(Rotate {
                style: table.style,
                rotary_dim: table.rotary_dim,
                head_dim: call.head_dim,
                cosines: &angles.cosines[token * num_angles..][..num_angles],
                sines: &angles.sines[token * num_angles..][..num_angles],
                heads: query_and_key,
            });
            let key_heads = &query_and_key[call.num_heads * call.head_dim..];
            let slot = call.slot_mapping[token] as usize;
            for head in 0..call.num_key_value_heads {
                let elements = head * call.head_dim..(head + 1) * call.head_dim;
                let (tile, place) = shape.place(slot, head);
                let value_width = shape.value_vectors * LANES;
                let start = (tile * TILE_TOKENS + place) * value_width;
                // SAFETY: `check` lets no two tokens have the same slot, and each token belongs to one thread.
                let value_row = unsafe { values.range_mut(start..start + call.head_dim) };
                level.run(Narrow::<F> { from: &value_heads[elements.clone()], to: value_row });
                let mut narrow = [F::Stored::default(); crate::ops::MAX_HEAD_DIM];
                let narrow = &mut narrow[..call.head_dim];
                level.run(Narrow::<F> { from: &key_heads[elements], to: narrow });
                for (element, value) in narrow.iter().enumerate() {
                    let index = (tile * shape.head_dim + element) * TILE_TOKENS + place;
                    // SAFETY: as above; the range is the one element of this slot.
                    let own = unsafe { keys.range_mut(index..index + 1) };
                    own[0] = *value;
                }
            }
        }
    });
    Ok(())
}

/// Rotates the heads of one token.
struct Rotate<'a> {
    style: RopeStyle,
    rotary_dim: usize,
    head_dim: usize,
    cosines: &'a [f32],
    sines: &'a [f32],
    heads: &'a mut [f32],
}

impl Vectorized for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for head in self.heads.chunks_exact_mut(self.head_dim) {
            let head = &mut head[..self.rotary_dim];
            match self.style {
                RopeStyle::Interleaved => {
                    for (pair, (cosine, sine)) in head.chunks_exact_mut(2).zip(self.cosines.iter().zip(self.sines)) {
                        let (x, y) = (pair[0], pair[1]);
                        pair[0] = x * cosine - y * sine;
                        pair[1] = x * sine + y * cosine;
                    }
                }
                RopeStyle::Halves => {
                    let (left, right) = head.split_at_mut(self.rotary_dim / 2);
                    let angles = self.cosines.iter().zip(self.sines);
                    for ((left, right), (cosine, sine)) in left.iter_mut().zip(right).zip(angles) {
                        let (x, y) = (*left, *right);
                        *left = x * cosine - y * sine;
                        *right = x * sine + y * cosine;
                    }
                }
            }
        }
    }
}

/// Converts to the format of the cache.
struct Narrow<'a, F: KvFormat> {
    from: &'a [f32],
    to: &'a mut [F::Stored],
}

impl<F: KvFormat> Vectorized for Narrow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (from, from_rest) = self.from.as_chunks::<LANES>();
        let (to, to_rest) = self.to.as_chunks_mut::<LANES>();
        for (from, to) in from.iter().zip(to) {
            F::store(simd, from, to);
        }
        if !from_rest.is_empty() {
            let (mut padded, mut narrow) = ([0.0; LANES], [F::Stored::default(); LANES]);
            padded[..from_rest.len()].copy_from_slice(from_rest);
            F::store(simd, &padded, &mut narrow);
            to_rest.copy_from_slice(&narrow[..from_rest.len()]);
        }
    }
}
