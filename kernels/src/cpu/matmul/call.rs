//! One product over all row groups and all tiles of tokens, in pieces for the threads.
//! For: `matmul`, when the activations lie in tiles.
//! Invariant: an output is written by one piece of work, and how it is summed depends on the layer alone.

use std::{mem::MaybeUninit, ops::Range};

use super::{
    CpuLinear, MatmulContext,
    activations::TOKEN_BYTES,
    epilogue::{AddSums, SwiGlu, TakeTotals, Target, Total},
    format::{BLOCK, GROUP},
    kernel::Span,
    kernels::Kernels,
    pack::PackedMatrix,
};
use crate::{
    cpu::{
        simd::Level,
        team::{SharedSlice, Team},
    },
    quant::Encoding,
};

/// Bytes of activations that a block of tokens may take, so that they stay in the second-level cache.
const TOKEN_BLOCK_BYTES: usize = 384 << 10;
/// Pieces of work for each thread, so that a thread that was interrupted does not hold up the others for long.
const PIECES_PER_THREAD: usize = 4;
/// Tokens of the widest tile of any level.
const MAX_TILE: usize = 8;
/// Sums of a row group and a token, of all tokens of a tile, that are kept in f32 before they are added up.
const MAX_SUMS: usize = 16 * MAX_TILE;

/// Room for what a product writes: `[sums][T][16]`.
type Products = MaybeUninit<[[f32; GROUP]; MAX_SUMS]>;

/// Tokens cut into tiles: as many of the widest as fit, then one of the next power of two.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    num_tokens: usize,
    max_tile: usize,
}

impl Tiles {
    pub(super) fn new(num_tokens: usize, max_tile: usize) -> Self {
        Self { num_tokens, max_tile }
    }

    pub(super) fn len(self) -> usize {
        self.num_tokens.div_ceil(self.max_tile)
    }

    pub(super) fn start(self, tile: usize) -> usize {
        tile * self.max_tile
    }

    pub(super) fn tokens(self, tile: usize) -> Range<usize> {
        self.start(tile)..self.num_tokens.min(self.start(tile + 1))
    }

    pub(super) fn width(self, tile: usize) -> usize {
        self.tokens(tile).len().next_power_of_two()
    }

    pub(super) fn padded_tokens(self) -> usize {
        self.num_tokens.next_multiple_of(self.max_tile)
    }
}

/// One matmul whose activations are prepared.
pub(super) struct Call<'a> {
    level: Level,
    kernels: &'static Kernels,
    weight: &'a CpuLinear,
    tiles: Tiles,
    quantized: &'a [u8],
    interleaved: &'a [f32],
}

impl<'a> Call<'a> {
    pub(super) fn new(context: &'a MatmulContext, weight: &'a CpuLinear, num_tokens: usize) -> Self {
        Self {
            level: context.level,
            kernels: context.kernels,
            weight,
            tiles: Tiles::new(num_tokens, context.kernels.max_tile),
            quantized: context.quantized.bytes(),
            interleaved: context.interleaved.values(),
        }
    }

    /// Tiles that are done together.
    fn tiles_each(&self) -> usize {
        let tile_bytes = self.weight.columns * self.kernels.max_tile * 2;
        (TOKEN_BLOCK_BYTES / tile_bytes).max(1)
    }

    /// Runs `work(group, tiles)` over `num_groups` row groups and all tiles: tiles in blocks that fit a cache, groups
    /// in chunks for the threads.
    fn for_groups(&self, team: &Team, num_groups: usize, work: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let tiles_each = self.tiles_each();
        let num_blocks = self.tiles.len().div_ceil(tiles_each);
        let groups_each = match team.num_threads() {
            1 => num_groups,
            num_threads => num_groups.div_ceil(num_threads * PIECES_PER_THREAD),
        };
        let num_chunks = num_groups.div_ceil(groups_each.max(1));
        team.for_chunks(num_blocks * num_chunks, 1, &|pieces| {
            for piece in pieces {
                let (block, chunk) = (piece / num_chunks, piece % num_chunks);
                let tiles = block * tiles_each..self.tiles.len().min((block + 1) * tiles_each);
                for group in chunk * groups_each..num_groups.min((chunk + 1) * groups_each) {
                    work(group, tiles.clone());
                }
            }
        });
    }

    /// The whole product.
    pub(super) fn store(&self, team: &Team, output: &mut [f32]) {
        let shared = SharedSlice::new(output);
        self.for_groups(team, self.num_groups(), &|group, tiles| {
            let Some((part, group)) = self.weight.group(group) else { return };
            let target = self.target(&shared, part, group);
            let mut products = Products::uninit();
            for tile in tiles {
                let products = self.product(part, group, tile, 0..part.columns, part.columns, &mut products);
                let tokens = self.tiles.tokens(tile);
                // SAFETY: tokens and columns are inside the output; no other piece of work has this group and tile.
                unsafe { target.write(tokens.start, &products[..tokens.len()]) };
            }
        });
    }

    /// The whole product, as sums in f64 over f32 sums of [`GgmlType::sum_columns`](lockstep_formats::GgmlType).
    pub(super) fn add_up<V: Total>(&self, team: &Team, output: &mut [V]) {
        let shared = SharedSlice::new(output);
        self.for_groups(team, self.num_groups(), &|group, tiles| {
            let Some((part, group)) = self.weight.group(group) else { return };
            let target = self.target(&shared, part, group);
            let sum_columns = part.ggml_type.sum_columns();
            let mut products = Products::uninit();
            for tile in tiles {
                let mut totals = [[0.0; GROUP]; MAX_TILE];
                let totals = &mut totals[..self.tiles.width(tile)];
                let columns_each = MAX_SUMS / totals.len() * sum_columns;
                for start in (0..part.columns).step_by(columns_each) {
                    let range = start..part.columns.min(start + columns_each);
                    let sums = self.product(part, group, tile, range, sum_columns, &mut products);
                    self.level.run(AddSums { sums, totals });
                }
                for (token, totals) in self.tiles.tokens(tile).zip(totals) {
                    // SAFETY: token and columns are inside the output; no other piece of work has this group and tile.
                    let outputs = unsafe { target.outputs(token) };
                    self.level.run(TakeTotals { totals, outputs });
                }
            }
        });
    }

    fn num_groups(&self) -> usize {
        self.weight.parts.iter().map(PackedMatrix::num_groups).sum()
    }

    /// Where the products of a part's row group go.
    fn target<V>(&self, output: &SharedSlice<'_, V>, part: &PackedMatrix, group: usize) -> Target<V> {
        Target {
            start: output.as_mut_ptr(),
            width: self.weight.rows,
            column: part.first_row + group * GROUP,
            rows: GROUP.min(part.rows - group * GROUP),
        }
    }

    /// Row groups of gate and up that lie side by side: `(of the gate, from gate to up)`, if the halves begin at groups.
    pub(super) fn num_paired_groups(&self) -> Option<usize> {
        let half = self.weight.rows / 2;
        match self.weight.parts.as_slice() {
            [whole] if whole.rows == self.weight.rows && half.is_multiple_of(GROUP) => Some(half / GROUP),
            [gate, up] if gate.rows == up.rows => Some(gate.num_groups()),
            _ => None,
        }
    }

    /// SwiGLU: the groups of gate and up together.
    pub(super) fn run_paired(&self, team: &Team, output: &mut [f32], width: usize) {
        let Some(num_groups) = self.num_paired_groups() else { return };
        let shared = SharedSlice::new(output);
        self.for_groups(team, num_groups, &|group, tiles| {
            let (Some(gate), Some(up)) = (self.weight.group(group), self.weight.group(group + num_groups)) else {
                return;
            };
            let rows = GROUP.min(width - group * GROUP);
            let target = Target { start: shared.as_mut_ptr(), width, column: group * GROUP, rows };
            let (mut gates, mut ups) = (Products::uninit(), Products::uninit());
            for tile in tiles {
                let columns = self.weight.columns;
                let gates = self.product(gate.0, gate.1, tile, 0..columns, columns, &mut gates);
                let ups = self.product(up.0, up.1, tile, 0..columns, columns, &mut ups);
                self.level.run(SwiGlu { gate: gates.as_flattened_mut(), up: ups.as_flattened() });
                let tokens = self.tiles.tokens(tile);
                // SAFETY: tokens and columns are inside the output; no other piece of work has this group and tile.
                unsafe { target.write(tokens.start, &gates[..tokens.len()]) };
            }
        });
    }

    /// Products of a row group and a tile over the columns `range`, `[sums][T]` (at most [`MAX_SUMS`] in all).
    fn product<'p>(
        &self,
        part: &PackedMatrix,
        group: usize,
        tile: usize,
        range: Range<usize>,
        sum_columns: usize,
        products: &'p mut Products,
    ) -> &'p mut [[f32; GROUP]] {
        let (columns, width) = (part.columns, self.tiles.width(tile));
        let activations = match Encoding::of(part.ggml_type) {
            Some(_) => self.quantized[self.tiles.start(tile) * (columns / BLOCK * TOKEN_BYTES)..].as_ptr(),
            None => self.interleaved[self.tiles.start(tile) * columns..].as_ptr().cast(),
        };
        let num_sums = range.len().div_ceil(sum_columns) * width;
        assert!(num_sums <= MAX_SUMS, "a span of {num_sums} sums");
        let span = Span { columns, range, sum_columns, prefetches: tile.is_multiple_of(self.tiles_each()) };
        let product = (self.kernels.product)(part.ggml_type, width);
        // SAFETY: the level proves the instructions; the group is packed for this type and width, the tile was prepared
        // in its form and has the width of the product; there is room for the sums.
        unsafe { product(part.group(group).as_ptr(), &span, activations, products.as_mut_ptr().cast()) };
        // SAFETY: the product has written them.
        unsafe { std::slice::from_raw_parts_mut(products.as_mut_ptr().cast(), num_sums) }
    }
}
