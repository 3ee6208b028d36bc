//! The arithmetic of attention: one query tile against some of its keys, with online softmax in base 2.
//! For: the tasks of [`attention`](super::attention).
//! Invariant: rows of a tile never mix, and each is computed by the same operations in the same order whatever rows
//! stand beside it: scores sum over the head in order, values over the keys in order.

use std::ops::Range;

use super::{
    super::{
        kv_cache::{TILE_TOKENS, Tiles},
        kv_format::KvFormat,
        math::exp2,
        simd::{LANES, Simd, Vectorized},
        team::SharedSlice,
    },
    PARTITION_TILES,
};
use crate::ops::Attention;

/// Tiles of keys that share one step of the online softmax.
const STEP_TILES: usize = 2;
/// Below every score, and finite: differences with it are numbers.
const LOWEST: f32 = -1e38;

/// Consecutive tokens of one sequence, with all query heads of one key/value head. Its rows are `[num_tokens, heads]`.
pub(super) struct QueryTile<'a> {
    pub(super) key_value_head: usize,
    pub(super) heads: Range<usize>,
    /// Row of its first token in `qkv` and in the output.
    pub(super) first_row: usize,
    pub(super) num_tokens: usize,
    /// Position of its first token.
    pub(super) first_position: usize,
    pub(super) block_table: &'a [u32],
}

impl QueryTile<'_> {
    pub(super) fn num_rows(&self) -> usize {
        self.num_tokens * self.heads.len()
    }
}

/// What attention over some keys comes to, for the rows of a tile.
pub(super) struct State {
    /// Largest score (in base 2) of each row.
    maxima: Vec<f32>,
    /// Sums of the weights, lane by lane, of each row.
    sums: Vec<[f32; LANES]>,
    /// Weighted sums of the values, `[num_rows, value_vectors]`.
    values: Vec<[f32; LANES]>,
}

impl State {
    fn new(num_rows: usize, value_vectors: usize) -> Self {
        Self {
            maxima: vec![LOWEST; num_rows],
            sums: vec![[0.0; LANES]; num_rows],
            values: vec![[0.0; LANES]; num_rows * value_vectors],
        }
    }

    fn clear(&mut self) {
        self.maxima.fill(LOWEST);
        self.sums.fill([0.0; LANES]);
        self.values.fill([0.0; LANES]);
    }

    fn value_vectors(&self) -> usize {
        self.values.len() / self.maxima.len().max(1)
    }
}

/// Scales the rows of `total` and `part` to a common maximum and adds them, from `first_row` on.
pub(super) struct Merge<'a> {
    pub(super) total: &'a mut State,
    pub(super) part: &'a State,
    pub(super) first_row: usize,
}

impl Vectorized for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { total, part, first_row } = self;
        let width = total.value_vectors();
        for row in first_row..total.maxima.len() {
            let maximum = if part.maxima[row] > total.maxima[row] { part.maxima[row] } else { total.maxima[row] };
            let old = exp2(simd, simd.splat(total.maxima[row] - maximum));
            let new = exp2(simd, simd.splat(part.maxima[row] - maximum));
            total.maxima[row] = maximum;
            let values = row * width..(row + 1) * width;
            let totals = total.values[values.clone()].iter_mut().chain([&mut total.sums[row]]);
            for (total, part) in totals.zip(part.values[values].iter().chain([&part.sums[row]])) {
                let mixed = simd.mul_add(simd.load(part), new, simd.mul(simd.load(total), old));
                simd.store(mixed, total);
            }
        }
    }
}

/// Divides by the sums of the weights and writes the rows of a tile.
pub(super) struct Finish<'a> {
    pub(super) call: &'a Attention<'a>,
    pub(super) tile: &'a QueryTile<'a>,
    pub(super) state: &'a State,
    pub(super) output: &'a SharedSlice<'a, f32>,
}

impl Vectorized for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { call, tile, state, output } = self;
        let width = state.value_vectors();
        for row in 0..tile.num_rows() {
            let token = tile.first_row + row / tile.heads.len();
            let head = tile.heads.start + row % tile.heads.len();
            let start = (token * call.num_heads + head) * call.head_dim;
            // SAFETY: each (token, head) of the call is in one tile, and one thread finishes a tile.
            let output = unsafe { output.range_mut(start..start + call.head_dim) };
            let factor = simd.splat(1.0 / simd.sum(simd.load(&state.sums[row])));
            for (output, values) in output.chunks_mut(LANES).zip(&state.values[row * width..]) {
                let scaled = simd.to_array(simd.mul(simd.load(values), factor));
                output.copy_from_slice(&scaled[..output.len()]);
            }
        }
    }
}

/// Attention of a tile over some partitions of its keys.
pub(super) struct Compute<'a, F: KvFormat> {
    pub(super) call: &'a Attention<'a>,
    pub(super) tile: &'a QueryTile<'a>,
    pub(super) tiles: &'a Tiles<'a, F>,
    pub(super) qkv: &'a [f32],
    pub(super) partitions: Range<usize>,
}

impl<F: KvFormat> Vectorized for Compute<'_, F> {
    type Output = State;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> State {
        let (num_rows, value_vectors) = (self.tile.num_rows(), self.tiles.shape.value_vectors);
        let queries = self.scaled_queries();
        let mut scores = vec![[[0.0; LANES]; STEP_TILES]; num_rows];
        let mut factors = vec![0.0; num_rows];
        let mut total = State::new(num_rows, value_vectors);
        let mut part = None;
        for partition in self.partitions.clone() {
            let is_first = partition == self.partitions.start;
            let state = if is_first {
                &mut total
            } else {
                let part = part.get_or_insert_with(|| State::new(num_rows, value_vectors));
                part.clear();
                part
            };
            let tiles = partition * PARTITION_TILES..(partition + 1) * PARTITION_TILES;
            let first_row = self.first_row_that_sees(tiles.start);
            for first_tile in tiles.step_by(STEP_TILES) {
                let step = [self.key_tile(first_tile), self.key_tile(first_tile + 1)];
                if step[0].is_none() {
                    break;
                }
                let rows = self.first_row_that_sees(first_tile)..num_rows;
                let step = Step { compute: &self, rows, tiles: step };
                step.scores(simd, &queries, &mut scores);
                step.softmax(simd, &mut scores, &mut factors, state);
                step.values(simd, &scores, &factors, state);
            }
            if !is_first && let Some(part) = &part {
                Merge { total: &mut total, part, first_row }.run(simd);
            }
        }
        total
    }
}

/// One tile of keys and values.
#[derive(Clone, Copy)]
struct KeyTile {
    /// Index among the tiles of the layer.
    index: usize,
    first_position: usize,
    /// Tokens that the query tile may see; the others may hold anything.
    num_keys: usize,
}

impl<F: KvFormat> Compute<'_, F> {
    /// Queries `[num_rows, head_dim]`, scaled for scores in base 2.
    #[inline(always)]
    fn scaled_queries(&self) -> Vec<f32> {
        let (call, tile) = (self.call, self.tile);
        let factor = call.scale * std::f32::consts::LOG2_E;
        let width = (call.num_heads + 2 * call.num_key_value_heads) * call.head_dim;
        let heads = tile.heads.start * call.head_dim..tile.heads.end * call.head_dim;
        let mut queries = Vec::with_capacity(tile.num_rows() * call.head_dim);
        for row in self.qkv.chunks_exact(width).skip(tile.first_row).take(tile.num_tokens) {
            queries.extend(row[heads.clone()].iter().map(|query| query * factor));
        }
        queries
    }

    /// Position of the first key of a tile, counted in tiles from the sequence's start.
    #[inline(always)]
    fn position_of(&self, tile: usize) -> usize {
        let shape = self.tiles.shape;
        tile / shape.tiles_per_block * shape.block_size + tile % shape.tiles_per_block * TILE_TOKENS
    }

    /// The tile, or `None` if no token of the query tile sees it.
    #[inline(always)]
    fn key_tile(&self, tile: usize) -> Option<KeyTile> {
        let shape = self.tiles.shape;
        let first_position = self.position_of(tile);
        let block_end = (tile / shape.tiles_per_block + 1) * shape.block_size;
        let end = block_end.min(self.tile.first_position + self.tile.num_tokens).min(first_position + TILE_TOKENS);
        let num_keys = end.checked_sub(first_position).filter(|keys| *keys > 0)?;
        let block = self.tile.block_table[tile / shape.tiles_per_block] as usize;
        let index = shape.tile(block, self.tile.key_value_head, tile % shape.tiles_per_block);
        Some(KeyTile { index, first_position, num_keys })
    }

    /// The rows before it see no key of the tile.
    #[inline(always)]
    fn first_row_that_sees(&self, tile: usize) -> usize {
        self.position_of(tile).saturating_sub(self.tile.first_position).min(self.tile.num_tokens)
            * self.tile.heads.len()
    }
}

/// One step of the online softmax: one or two tiles of keys, for the rows that see the first of them.
struct Step<'a, F: KvFormat> {
    compute: &'a Compute<'a, F>,
    rows: Range<usize>,
    tiles: [Option<KeyTile>; STEP_TILES],
}

/// Calls `$self.$function::<S, ROWS>` for all rows, in register tiles of at most `$most` rows.
macro_rules! in_register_tiles {
    ($rows:expr, $most:expr, |$row:ident, $count:ident| $call:expr) => {
        let mut $row = $rows.start;
        while $row < $rows.end {
            let left = $rows.end - $row;
            macro_rules! tile {
                ($rows_of_tile:literal) => {{
                    const $count: usize = $rows_of_tile;
                    $call;
                    $row += $rows_of_tile;
                }};
            }
            match left.min($most) {
                12.. => tile!(12),
                6.. => tile!(6),
                4.. => tile!(4),
                3 => tile!(3),
                2 => tile!(2),
                _ => tile!(1),
            }
        }
    };
}

impl<F: KvFormat> Step<'_, F> {
    /// `scores[row] = queries[row] · keys`.
    #[inline(always)]
    fn scores<S: Simd>(&self, simd: S, queries: &[f32], scores: &mut [[[f32; LANES]; STEP_TILES]]) {
        let head_dim = self.compute.call.head_dim;
        let keys = |tile: KeyTile| &self.compute.tiles.keys[tile.index * head_dim..][..head_dim];
        match self.tiles.map(|tile| tile.map(keys)) {
            [Some(first), Some(second)] if S::ACCUMULATORS >= 24 => {
                in_register_tiles!(self.rows, S::ACCUMULATORS / 2, |row, COUNT| {
                    let queries = &queries[row * head_dim..][..COUNT * head_dim];
                    score_tile::<S, F, COUNT, 2>(simd, queries, [first, second], [0, 1], &mut scores[row..row + COUNT])
                });
            }
            tiles => {
                for (place, tile) in tiles.into_iter().enumerate() {
                    let Some(tile) = tile else { continue };
                    in_register_tiles!(self.rows, S::ACCUMULATORS, |row, COUNT| {
                        let queries = &queries[row * head_dim..][..COUNT * head_dim];
                        score_tile::<S, F, COUNT, 1>(simd, queries, [tile], [place], &mut scores[row..row + COUNT])
                    });
                }
            }
        }
    }

    /// Turns scores into weights, with the maxima so far; `factors` are for what was summed before.
    #[inline(always)]
    fn softmax<S: Simd>(
        &self,
        simd: S,
        scores: &mut [[[f32; LANES]; STEP_TILES]],
        factors: &mut [f32],
        state: &mut State,
    ) {
        let heads = self.compute.tile.heads.len();
        let hidden = simd.splat(f32::NEG_INFINITY);
        for row in self.rows.clone() {
            let position = self.compute.tile.first_position + row / heads;
            let mut vectors = [hidden; STEP_TILES];
            for ((vector, tile), scores) in vectors.iter_mut().zip(self.tiles).zip(&scores[row]) {
                if let Some(tile) = tile {
                    let num_visible = (position + 1).saturating_sub(tile.first_position).min(tile.num_keys);
                    let mask = ((1_u32 << num_visible) - 1) as u16;
                    *vector = simd.select(mask, simd.load(scores), hidden);
                }
            }
            let largest = simd.largest(simd.max(vectors[0], vectors[1]));
            let maximum = if largest > state.maxima[row] { largest } else { state.maxima[row] };
            factors[row] = state.maxima[row] - maximum;
            state.maxima[row] = maximum;
            let mut weights = vectors;
            for (weights, scores) in weights.iter_mut().zip(&mut scores[row]) {
                *weights = exp2(simd, simd.sub(*weights, simd.splat(maximum)));
                simd.store(*weights, scores);
            }
            let factor = exp2(simd, simd.splat(factors[row]));
            factors[row] = simd.to_array(factor)[0];
            let sums = simd.mul_add(simd.load(&state.sums[row]), factor, simd.add(weights[0], weights[1]));
            simd.store(sums, &mut state.sums[row]);
        }
    }

    /// `values[row] = values[row] * factors[row] + weights[row] · values of the keys`.
    #[inline(always)]
    fn values<S: Simd>(&self, simd: S, weights: &[[[f32; LANES]; STEP_TILES]], factors: &[f32], state: &mut State) {
        let shape = self.compute.tiles.shape;
        let width = shape.value_vectors;
        let tiles = self.tiles.map(|tile| {
            tile.map_or(&[][..], |tile| {
                let start = tile.index * TILE_TOKENS * width;
                &self.compute.tiles.values[start..start + tile.num_keys * width]
            })
        });
        let mut column = 0;
        while column < width {
            if S::ACCUMULATORS >= 24 && column + 4 <= width {
                in_register_tiles!(self.rows, S::ACCUMULATORS / 4, |row, COUNT| {
                    let state = &mut state.values[row * width..][..COUNT * width];
                    let rows = row..row + COUNT;
                    value_tile::<S, F, COUNT, 4>(simd, &weights[rows.clone()], &factors[rows], tiles, column, state)
                });
                column += 4;
            } else {
                in_register_tiles!(self.rows, S::ACCUMULATORS, |row, COUNT| {
                    let state = &mut state.values[row * width..][..COUNT * width];
                    let rows = row..row + COUNT;
                    value_tile::<S, F, COUNT, 1>(simd, &weights[rows.clone()], &factors[rows], tiles, column, state)
                });
                column += 1;
            }
        }
    }
}

/// Scores of `ROWS` queries against `TILES` tiles, all sums in registers.
#[inline(always)]
fn score_tile<S: Simd, F: KvFormat, const ROWS: usize, const TILES: usize>(
    simd: S,
    queries: &[f32],
    keys: [&[[F::Stored; LANES]]; TILES],
    places: [usize; TILES],
    scores: &mut [[[f32; LANES]; STEP_TILES]],
) {
    let head_dim = keys[0].len();
    let keys: [&[[F::Stored; LANES]]; TILES] = std::array::from_fn(|tile| &keys[tile][..head_dim]);
    let queries: [&[f32]; ROWS] = std::array::from_fn(|row| &queries[row * head_dim..][..head_dim]);
    let mut sums = [[simd.splat(0.0); TILES]; ROWS];
    for element in 0..head_dim {
        let mut vectors = [simd.splat(0.0); TILES];
        for tile in 0..TILES {
            vectors[tile] = F::load(simd, &keys[tile][element]);
        }
        for row in 0..ROWS {
            let query = simd.splat(queries[row][element]);
            for tile in 0..TILES {
                sums[row][tile] = simd.mul_add(query, vectors[tile], sums[row][tile]);
            }
        }
    }
    for (scores, sums) in scores.iter_mut().zip(sums) {
        for (sum, place) in sums.into_iter().zip(places) {
            simd.store(sum, &mut scores[place]);
        }
    }
}

/// Adds the weighted values of a step to `COLUMNS` vectors of `ROWS` rows, all sums in registers.
#[inline(always)]
fn value_tile<S: Simd, F: KvFormat, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    weights: &[[[f32; LANES]; STEP_TILES]],
    factors: &[f32],
    tiles: [&[[F::Stored; LANES]]; STEP_TILES],
    column: usize,
    state: &mut [[f32; LANES]],
) {
    let width = state.len() / ROWS;
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    for row in 0..ROWS {
        let factor = simd.splat(factors[row]);
        for place in 0..COLUMNS {
            sums[row][place] = simd.mul(simd.load(&state[row * width + column + place]), factor);
        }
    }
    for (tile, values) in tiles.into_iter().enumerate() {
        let weights: [&[f32; LANES]; ROWS] = std::array::from_fn(|row| &weights[row][tile]);
        for (key, values) in values.chunks_exact(width).take(LANES).enumerate() {
            let values = &values[column..column + COLUMNS];
            let mut vectors = [simd.splat(0.0); COLUMNS];
            for place in 0..COLUMNS {
                vectors[place] = F::load(simd, &values[place]);
            }
            for row in 0..ROWS {
                let weight = simd.splat(weights[row][key]);
                for place in 0..COLUMNS {
                    sums[row][place] = simd.mul_add(weight, vectors[place], sums[row][place]);
                }
            }
        }
    }
    for row in 0..ROWS {
        for place in 0..COLUMNS {
            simd.store(sums[row][place], &mut state[row * width + column + place]);
        }
    }
}
